"""Ranks of `lamp train` that do not come to a collective, or come to another one: each verdict compared with the truth.

The faults are in a model of the user's own, as nothing else of theirs runs in a rank.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from lamplighter.rundir import RunDir, newest_first, read_json, read_status
from running import LAMP, LONG, TINY, Row, clean_env, lamp, line_in, losses_of, verdicts_of, write_model

WORDS = ["train", "--run", "r", *TINY, "--train.batch_size", "6", "--train.micro_batch", "3", "--train.steps", "60",
         "--save.every_steps", "20", "--launch.spare", "0"]  # fmt: skip
NAMED_S = 7.0  # that every verdict of the zoo must have come by, however slow the machine is
AT_41 = """
import torch.distributed as dist

def before(model):
    if model.training and model.calls == 41 and dist.is_initialized() and not os.path.exists(f"fault{dist.get_rank()}"):
        pathlib.Path(f"fault{dist.get_rank()}").write_text(str(time.time()))
        fault(dist.get_rank())

"""
LATE = (
    AT_41
    + """
def fault(rank):
    if rank == 1:
        time.sleep(9)  # the culprit
"""
)
ORDER = (
    AT_41
    + """
def fault(rank):
    numbers = torch.ones(1000)
    if rank == 0:
        dist.all_reduce(numbers)  # of rank 0
    else:
        dist.broadcast(numbers, 1)  # of rank 1
"""
)
SHAPE = (
    AT_41
    + """
def fault(rank):
    dist.all_reduce(torch.ones(1000 - rank))  # the culprit
"""
)
BARRIER = (
    AT_41
    + """
def fault(rank):
    if rank == 0:
        dist.barrier()  # the culprit
"""
)
MISSING = """
if os.environ.get("LAMP_RANK") == "1" and not os.path.exists("fault1"):
    pathlib.Path("fault1").write_text(str(time.time()))
    time.sleep(9)  # the culprit

def before(model):
    pass
"""


class Ended:
    """A run on two ranks whose model does this, and what was said of it."""

    def __init__(self, place: Path, model: str, *more: str) -> None:
        words = [*LAMP, *WORDS, "--model.family", write_model(place, model), "--train.ranks", "2", *more]
        done = subprocess.run(words, cwd=place, env=clean_env(), capture_output=True, text=True, timeout=300)
        self.code, self.said, self.place = done.returncode, done.stdout + done.stderr, place
        self.run = RunDir(place / "runs" / "r")
        self.verdicts = verdicts_of(self.run)

    def named(self, cause: str) -> tuple[dict[str, Any], float]:
        """The first verdict by this name, and how long after the fault it came."""
        found = next((one for one in self.verdicts if one["cause"] == cause), None)
        assert found is not None, self.said
        began = max(float(mark.read_text()) for mark in self.place.glob("fault?"))
        assert found["t"] - began < NAMED_S
        return found, found["t"] - began

    def line(self, text: str) -> str:
        return f"own.py:{line_in(self.place / 'own.py', text)}"


def test_ranks_that_reduce_other_shapes_are_told_so_at_once(tmp_path: Path, zoo_row: Row) -> None:
    """gloo says of it that a connection is broken, on one rank or both."""
    ended = Ended(tmp_path, SHAPE)
    verdict, took_s = ended.named("rank_shape")
    for rank in (0, 1):
        assert (
            f"rank {rank} in all_reduce [{1000 - rank}] float32 at {tmp_path}/{ended.line('# the culprit')}"
            in verdict["why"]
        )
    _ends_once(ended)
    zoo_row("rank_shape", took_s, verdict["action"], ended.code)


@LONG
def test_a_late_rank_is_named_with_its_line_and_nothing_is_stopped(tmp_path: Path, zoo_row: Row) -> None:
    ended = Ended(tmp_path, LATE)
    verdict, took_s = ended.named("rank_late")
    assert ended.code == 0 and read_json(ended.run.status)["attempt"] == 1, ended.said
    where = verdict["culprit"]
    assert where["rank"] == 1 and f"{Path(where['file']).name}:{where['line']}" == ended.line("# the culprit")
    assert re.search(r"rank 1 \(process \d+\) sleeps at .* and has not entered collective \d+ \(gradients\); rank 0 waits in it at", verdict["why"])  # fmt: skip
    assert {one["state"] for one in ended.verdicts} <= {"waiting", "slow", "starved"}, ended.said
    assert {one["action"] for one in ended.verdicts} == {"none"}, ended.said
    (tmp_path / "one").mkdir()
    done = lamp(*WORDS, "--model.family", write_model(tmp_path / "one", LATE), cwd=tmp_path / "one")
    assert done.returncode == 0 and losses_of(ended.run) == losses_of(RunDir(tmp_path / "one" / "runs" / "r"))
    zoo_row("rank_late", took_s, verdict["action"], ended.code)


@LONG
@pytest.mark.parametrize("name, model, calls", [
    ("rank_order", ORDER, {"rank 0 in all_reduce [1000] float32": "# of rank 0", "rank 1 in broadcast [1000] float32": "# of rank 1"}),
    ("rank0_barrier", BARRIER, {"rank 0 in barrier": "# the culprit"}),
])  # fmt: skip
def test_ranks_that_wait_in_different_collectives_are_named_and_end_once(
    tmp_path: Path, zoo_row: Row, name: str, model: str, calls: dict[str, str]
) -> None:
    ended = Ended(tmp_path, model)
    verdict, took_s = ended.named("rank_order")
    assert verdict["state"] == "stuck" and verdict["provable"], verdict
    for call, text in calls.items():
        assert re.search(re.escape(call) + r" at \S*" + ended.line(text), verdict["why"]), verdict["why"]
    if name == "rank0_barrier":
        assert re.search(r"rank 1 in gradients at \S+\.py:\d+", verdict["why"]), verdict["why"]
    _ends_once(ended)
    zoo_row(name, took_s, ended.verdicts[-1]["action"], ended.code)


def _ends_once(ended: Ended) -> None:
    """With 70, without another attempt, and with all the steps that were made."""
    assert ended.code == 70 and read_json(ended.run.status)["attempt"] == 1, ended.said
    step = read_status(ended.run)["step"]
    assert newest_first(ended.run.checkpoints)[0].name == f"checkpoint-{step}" and step == 40, ended.said


@LONG
def test_a_rank_that_does_not_come_to_the_first_meeting_is_named(tmp_path: Path, zoo_row: Row) -> None:
    ended = Ended(tmp_path, MISSING)
    verdict, took_s = ended.named("rank_late")
    where = verdict["culprit"]
    assert where["rank"] == 1 and f"{Path(where['file']).name}:{where['line']}" == ended.line("# the culprit")
    assert ended.code == 0 and "waiting for rank 1" in ended.said, ended.said
    zoo_row("no_peer", took_s, verdict["action"], ended.code)


@LONG
def test_ranks_cannot_have_different_numbers_of_batches(tmp_path: Path, zoo_row: Row) -> None:
    """A last batch of an epoch that is not full, and fewer micro-batches than ranks: idle ranks are said, and none waits for ever."""
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{n:03} all work and no play"}}\n' for n in range(70)))
    ends: list[Any] = []
    for ranks, micro in ((1, 2), (2, 2), (4, 2), (1, 6), (2, 6)):
        run = f"r{ranks}-{micro}"
        words = [
            "train",
            "--run",
            run,
            *WORDS[3:],
            "--data.paths",
            "text.jsonl",
            "--train.micro_batch",
            str(micro),
            "--train.ranks",
            str(ranks),
        ]
        began = time.monotonic()
        done = lamp(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
        assert not verdicts_of(RunDir(tmp_path / "runs" / run), "rank_uneven")
        ends.append(losses_of(RunDir(tmp_path / "runs" / run)))
        idle = ranks > 6 // micro
        assert ("idle" in done.stdout) == idle, done.stdout
        zoo_row(f"uneven {ranks} ranks, {micro} rows", time.monotonic() - began, "none", done.returncode)
    assert len(ends[0]) == 60 and ends[0] == ends[1] == ends[2] and ends[3] == ends[4]
