"""Ranks by the real command, over gloo on this machine: the same bits on any number of them, through kills and stops."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lamplighter import report
from lamplighter.rundir import RunDir, newest_first, read_json, read_lines
from lamplighter.slot import read_slot
from lamplighter.train import checkpoint
from running import LAMP, LONG, TINY, clean_env, copy_run, events_of, lamp, losses_of, verdicts_of, wait_for

WORDS = ["train", "--run", "r", *TINY, "--train.batch_size", "6", "--train.micro_batch", "2", "--eval.every_steps", "300",
         "--train.steps", "600", "--save.every_steps", "100", "--save.keep", "100"]  # fmt: skip


def _folder(place: Path) -> RunDir:
    return RunDir(place / "runs" / "r")


def _stored(place: Path) -> list[bytes]:
    newest = newest_first(_folder(place).checkpoints)[0]
    weights = "model.safetensors" if (newest / "model.safetensors").exists() else "adapter_model.safetensors"
    return [
        newest.name.encode(),
        *((newest / name).read_bytes() for name in (weights, "training/optimizer.safetensors")),
    ]


def _start(place: Path, ranks: int, *more: str, also: dict[str, str] | None = None) -> subprocess.Popen[str]:
    words = [*LAMP, *WORDS, "--train.ranks", str(ranks), *more]
    environment = {**clean_env(), **(also or {})}
    return subprocess.Popen(
        words, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _at_step(place: Path, step: int, process: subprocess.Popen[str]) -> list[int]:
    """The processes of the ranks, once so many steps are made."""
    status = _folder(place).status
    wait_for(lambda: status.exists() and read_json(status).get("step", 0) >= step, 200, process)
    return [one["pid"] for one in read_json(status)["ranks"]]


def _attempt(place: Path) -> int:
    return int(read_json(_folder(place).status).get("attempt", 1))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one rank, unbroken."""
    place = tmp_path_factory.mktemp("alone")
    done = lamp(*WORDS, cwd=place)
    assert done.returncode == 0, done.stdout
    return place


def test_a_killed_rank_is_named_the_others_go_on_and_the_world_is_whole_again(tmp_path: Path, alone: Path) -> None:
    """Rank 1, then rank 0: once with nobody ready, once with a process that stands by. The bits are those of one rank."""
    going = _start(tmp_path, 2, "--launch.spare", "1")
    victim = _at_step(tmp_path, 20, going)[1]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: list(read_lines(_folder(tmp_path).metrics))[-1]["attempt"] >= 3, 200, going)
    wait_for(lambda: len(read_json(_folder(tmp_path).status).get("ranks", ())) == 2, 200, going)
    leader = read_json(_folder(tmp_path).status)["ranks"][0]["pid"]
    os.kill(leader, signal.SIGKILL)
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 0, said
    assert "3 micro-batches a step summed by one tree: the bits of a single rank" in said
    assert "attempt 2: 1 of 2 ranks go on at once, with the state that they hold" in said
    assert "the process that stood by becomes rank 1; the others keep their state" in said
    assert "resumed from" not in said, "nothing was read from a disk"
    first, second = verdicts_of(_folder(tmp_path), "killed")
    assert f"rank 1 (process {victim}) was killed by SIGKILL" in first["why"] and first["culprit"]["rank"] == 1
    assert second["culprit"] == {**second["culprit"], "rank": 0, "pid": leader}
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)
    assert {record["rank"] for record in read_lines(_folder(tmp_path).system)} == {0, 1}, (
        "a series for each, for the page"
    )


IN_CI = pytest.mark.timeout(600) if os.environ.get("CI") == "true" else LONG  # a minute, with the cores to itself
KILLS = [*["a rank"] * 6, "all ranks", "the parent", "SIGTERM", "SIGSTOP"]


def _alive(place: Path) -> dict[int, int]:
    """The process of each rank that there is now, by what the ranks themselves say."""
    slots = {rank: read_slot(_folder(place).slot(rank)) for rank in (0, 1)}
    return {rank: slot.pid for rank, slot in slots.items() if slot is not None and Path(f"/proc/{slot.pid}").exists()}


def _trains(place: Path, step: int) -> bool:
    """Whether a rank that is there has made so many steps and makes more."""
    if 0 not in _alive(place) or (slot := read_slot(_folder(place).slot(0))) is None:
        return False
    return slot.phase.startswith("train") and slot.step >= step


@IN_CI
def test_ten_random_kills_and_stops_change_no_bit(tmp_path: Path, alone: Path) -> None:
    """Of a rank, of all, of the parent; a request to stop, and a rank that is stopped: at any moment of a step, in any order."""
    rng, spare = random.Random(1), ("--launch.spare", "1")
    going = _start(tmp_path, 2, *spare)
    for count, kind in enumerate(rng.sample(KILLS, len(KILLS))):
        step = 30 + 40 * count + rng.randrange(30)
        wait_for(lambda step=step: _trains(tmp_path, step), 200, going)  # type: ignore[misc]
        time.sleep(0.05 * rng.random())
        assert going.poll() is None, f"it ended before all faults were made: {going.communicate()[0]}"
        if kind in ("the parent", "SIGTERM"):
            going.send_signal(signal.SIGKILL if kind == "the parent" else signal.SIGTERM)
            going.communicate(timeout=60)
            going = _start(tmp_path, 2, *spare)
            continue
        every = list(_alive(tmp_path).values())
        for pid in every if kind == "all ranks" else [rng.choice(every)]:
            with contextlib.suppress(ProcessLookupError):  # it has ended with another one
                os.kill(pid, signal.SIGSTOP if kind == "SIGSTOP" else signal.SIGKILL)
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 0, said
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)


@pytest.mark.parametrize("fault", ["kill and stop", "two kills", "two stops"])
@LONG
def test_a_second_fault_before_the_first_is_mended_is_outlived_too(tmp_path: Path, alone: Path, fault: str) -> None:
    """The survivor waits for a rank that is stopped, or dies, while the world is made anew."""
    going = _start(tmp_path, 3, "--launch.spare", "1")
    _, one, two = _at_step(tmp_path, 20, going)
    os.kill(two, signal.SIGSTOP if fault == "two stops" else signal.SIGKILL)
    os.kill(one, signal.SIGKILL if fault == "two kills" else signal.SIGSTOP)
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 0, said
    assert "resumed from" not in said, "nothing was read from a disk"
    if fault == "two kills":
        assert all(f"rank {rank} (process {pid})" in said for rank, pid in ((1, one), (2, two))), said
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)


DIES_HANDING_OVER = """
import os, signal, sys

class AtJoining:
    def find_spec(self, name, path=None, target=None):
        if name == "lamplighter.train.joining":
            from lamplighter.train import ranks
            whole = ranks.hand_over
            def hand_over(world, holder, tensors):
                if world.rank == holder and len(tensors) > 2 and not os.path.exists("died"):
                    open("died", "w").close()
                    whole(world, holder, tensors[:2])
                    os.kill(os.getpid(), signal.SIGKILL)
                whole(world, holder, tensors)
            ranks.hand_over = hand_over

sys.meta_path.insert(0, AtJoining())
"""


@LONG
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_state_that_was_handed_over_by_half_is_never_trained_on(tmp_path: Path, alone: Path, ranks: int) -> None:
    """The rank that gives its state to a new one dies after two tensors, and the new one has parts of two states. Of three ranks
    the one that holds a whole state hands it over once more; of two nobody does, and all start again from memory."""
    (tmp_path / "sitecustomize.py").write_text(DIES_HANDING_OVER)
    going = _start(tmp_path, ranks, "--launch.spare", "1", also={"PYTHONPATH": str(tmp_path)})
    ready = _folder(tmp_path).standby_slot
    wait_for(lambda: (slot := read_slot(ready)) is not None and slot.phase == report.STANDBY, 200, going)
    os.kill(_at_step(tmp_path, 20, going)[1], signal.SIGKILL)
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 0 and (tmp_path / "died").exists(), said
    assert ("NoState" in said) == ("resumed from" in said) == (ranks == 2), said
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)


def test_a_process_that_stands_by_goes_on_from_memory(tmp_path: Path, alone: Path) -> None:
    """One rank, killed before anything was saved: a process that was ready takes its place, and its last copied step."""
    going = _start(
        tmp_path, 1, "--launch.spare", "1", "--save.every_steps", "0", "--eval.every_steps", "0"
    )  # a best one would be saved
    folder = _folder(tmp_path)
    ready = folder.standby_slot
    wait_for(lambda: (slot := read_slot(ready)) is not None and slot.phase == report.STANDBY, 200, going)
    status = read_json(folder.status)
    standby = read_slot(ready)
    assert standby is not None and status["memory_step"] > status["durable_step"]
    os.kill(status["child_pid"], signal.SIGKILL)
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 0 and "attempt 2: a process that stood by takes over" in said, said
    assert "resumed from memory" in said, said
    assert read_json(folder.status)["child_pid"] == standby.pid
    (resumed,) = events_of(folder, "resumed")
    assert resumed["step"] >= status["memory_step"] > 0
    assert losses_of(folder) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)


def test_a_stop_is_agreed_and_another_number_of_ranks_goes_on(tmp_path: Path, alone: Path) -> None:
    """3 ranks, asked to stop; then 1. Three micro-batches over three ranks, then all on one."""
    going = _start(tmp_path, 3, "--watch.on_stuck", "report")  # the one that is stopped below is not replaced
    victim = _at_step(tmp_path, 50, going)[1]
    _see_the_stopped_rank(tmp_path, victim, going)
    going.send_signal(signal.SIGTERM)
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 75 and "is safe" in said, said
    saved = newest_first(_folder(tmp_path).checkpoints)[0]
    assert int(saved.name.rpartition("-")[2]) % 100, "not at a step where a save was due"
    done = lamp(*WORDS, "--train.ranks", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)


def test_sharded_ranks_go_on_from_the_checkpoint_of_one(tmp_path: Path, alone: Path) -> None:
    """Its last hundred steps once more, each of two ranks with a part of the model: the checkpoint is the same to the byte."""
    copy_run(_folder(alone).path, _folder(tmp_path).path)
    shutil.rmtree(_folder(tmp_path).checkpoint(600))
    _folder(tmp_path).status.unlink()
    done = lamp(*WORDS, "--train.ranks", "2", "--train.shard", "full", cwd=tmp_path)
    assert done.returncode == 0 and "replicated then, sharded now, with the same bits" in done.stdout, done.stdout
    assert "sharded: each of 2 ranks holds its rows" in done.stdout and "100 redone steps equal" in done.stdout
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)
    (made,) = {event["bytes"] for event in events_of(_folder(tmp_path), "checkpoint")}
    assert made == {event["bytes"] for event in events_of(_folder(alone), "checkpoint")}.pop(), "of both ranks together"


@LONG
def test_a_sharded_run_goes_on_after_a_kill_and_a_stop_and_on_one_rank(tmp_path: Path, alone: Path) -> None:
    """Two ranks with a part of the model each: one is killed, all start again; a stop saves both parts of one step as one
    checkpoint, from which a single rank goes on with the whole model. The bits are those of one rank."""
    going = _start(tmp_path, 2, "--train.shard", "full")
    os.kill(_at_step(tmp_path, 110, going)[1], signal.SIGKILL)
    wait_for(lambda: _attempt(tmp_path) == 2 and read_json(_folder(tmp_path).status).get("step", 0) >= 130, 200, going)
    going.send_signal(signal.SIGTERM)
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 75 and "is safe" in said, said
    assert "sharded: each of 2 ranks holds its rows" in said and "resumed from checkpoint-100" in said, said
    saved = newest_first(_folder(tmp_path).checkpoints)[0]
    assert int(saved.name.rpartition("-")[2]) % 100, "not at a step where a save was due"
    done = lamp(*WORDS, "--train.ranks", "1", "--train.shard", "none", cwd=tmp_path)
    assert done.returncode == 0 and "sharded then, replicated now, with the same bits" in done.stdout, done.stdout
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)


def _see_the_stopped_rank(place: Path, victim: int, going: subprocess.Popen[str]) -> None:
    """A line for each of three ranks, by every verb that looks at a run; the one that is stopped is marked."""
    os.kill(victim, signal.SIGSTOP)
    try:
        status = _folder(place).status
        wait_for(lambda: read_json(status)["ranks"][1]["state"] == "stopped", 20, going)
        for words in (["runs"], ["why", "r"]):
            told = [
                line.strip() for line in lamp(*words, cwd=place).stdout.splitlines() if " tok/s computing, " in line
            ]
            assert [line[:6] for line in told] == ["rank 0", "rank 1", "rank 2"], told
            assert ["slowest" in line for line in told] == [False, True, False] and f"kill -CONT {victim}" in told[1]
        watching = subprocess.Popen(
            [*LAMP, "watch", "r"], cwd=place, env=clean_env(), stdout=subprocess.PIPE, text=True
        )
        assert watching.stdout is not None
        assert any("rank 1" in line and "<- slowest: stopped by a signal" in line for line in watching.stdout)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 0
    finally:
        os.kill(victim, signal.SIGCONT)


KINDS: dict[str, Sequence[str]] = {
    "dropout": ("--model.dropout", "0.1"),
    "muon": ("--model.family", "qwen3", "--train.optimizer", "muon", "--train.lr", "0.02"),
    "bf16": ("--train.dtype", "bf16"),
    "fp16": ("--train.dtype", "fp16"),
    "llama": ("--model.family", "llama"),
    "one micro-batch": ("--train.micro_batch", "6"),
    "stream": ("--data.stream", "true", "--data.tokens_per_chunk", "4096"),
    "skipped batches": ("--model.family", "bad_rows:Model"),
    "adapters": ("--model.init_from", "base", "--lora.r", "2"),
    "packed": (
        "--data.paths",
        "rows.jsonl",
        "--data.packing",
        "packed",
        "--data.seq_len",
        "128",
        "--train.steps",
        "60",
    ),
    "pairs": (
        "--data.paths",
        "pairs.jsonl",
        "--train.objective",
        "dpo",
        "--model.init_from",
        "base",
        "--data.template",
        "plain",
        "--train.steps",
        "60",
    ),
}

NOT_SHARDED = {"muon", "skipped batches", "pairs"}

# Rows that hold a certain token give infinities: which rank computes them depends on the number of ranks.
BAD_ROWS = """
import torch

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Linear(width, vocab_size)

    def forward(self, ids):
        bad = (ids[:, :1] == 113) & (ids[:, 1:2] == 117)  # a row that begins with "qu"
        return self.head(self.embed(ids)) / (1 - bad.float())[:, :, None]
"""
# The weights are spoilt once, at step 151 of two micro-batches, on every rank, without a loss that shows it: a save finds it.
BAD_WEIGHTS = """
import os
from pathlib import Path

import torch

MARK = Path("spoilt" + os.environ["LAMP_RANK"])
CALLS = 150 * (2 if os.environ["LAMP_WORLD"] == "1" else 1)

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Linear(width, vocab_size)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.count = 0

    def forward(self, ids):
        self.count += self.training
        if self.count > CALLS and not MARK.exists():
            with torch.no_grad():
                self.unused.fill_(float("nan"))
            MARK.touch()
        return self.head(self.embed(ids))
"""


# From its 31st pass on every loss of rank 1 is no number, and no other rank's.
ONE_BAD_RANK = """
import os

import torch

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Linear(width, vocab_size)
        self.count = 0

    def forward(self, ids):
        self.count += self.training
        bad = os.environ["LAMP_RANK"] == "1" and self.count > 30
        return self.head(self.embed(ids)) * (float("nan") if bad else 1.0)
"""


# At its 131st pass the weights of the last rank lose a bit, once: nothing in its losses tells.
ONE_ROTTEN_RANK = """
import os
from pathlib import Path

import torch

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Linear(width, vocab_size)
        self.count = 0

    def forward(self, ids):
        self.count += self.training
        last = os.environ["LAMP_RANK"] == str(int(os.environ["LAMP_WORLD"]) - 1)
        if last and self.count > 130 and os.environ["LAMP_WORLD"] != "1" and not Path("rotten").exists():
            Path("rotten").touch()
            with torch.no_grad():
                self.embed.weight[5, 3] += 1e-6
        return self.head(self.embed(ids))
"""


# At its 31st pass rank 1 finds no memory on its GPU, once.
FULL_RANK = """
import os
from pathlib import Path

import torch

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Linear(width, vocab_size)
        self.count = 0

    def forward(self, ids):
        self.count += self.training
        if os.environ["LAMP_RANK"] == "1" and self.count > 30 and not Path("full").exists():
            Path("full").touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.head(self.embed(ids))
"""


def _prepare(place: Path, alone: Path) -> None:
    """What the kinds need beside the settings."""
    (place / "bad_rows.py").write_text(BAD_ROWS)
    (place / "bad_weights.py").write_text(BAD_WEIGHTS)
    shutil.copytree(newest_first(_folder(alone).checkpoints)[0], place / "base")
    shutil.rmtree(place / "base" / "training")
    rows = [{"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "so be it " * (n % 7)}]} for n in range(1, 200)]  # fmt: skip
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    pairs = [{"prompt": f"say {n}", "chosen": "so be it", "rejected": "no " * (1 + n % 3)} for n in range(200)]
    (place / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)) + "\n")


@LONG
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks, shard", [(2, "none"), (4, "none"), (3, "full")])
def test_every_kind_of_run_has_the_same_bits(tmp_path: Path, kind: str, ranks: int, shard: str, alone: Path) -> None:
    if shard == "full" and kind in NOT_SHARDED:
        pytest.skip("refused in words: see tests/unit/test_sharding_choice.py")
    ends = []
    for world, how in ((1, "none"), (ranks, shard)):
        place = tmp_path / str(world)
        place.mkdir()
        _prepare(place, alone)
        shorter = ("--train.steps", "150") if shard == "full" else ()
        going = _start(place, world, *shorter, *KINDS[kind], "--train.shard", how)
        said, _ = going.communicate(timeout=600)
        ends.append(
            (going.returncode, losses_of(_folder(place)), _stored(place) if going.returncode == 0 else said[-2000:])
        )
    assert ends[0] == ends[1] and ends[0][0] == 0


# Rank 1 dies at its 40th step between the reduction of the gradients and the exchange of Muon's updates; by its own Python alone.
DIES_SHARING = """
import os, signal
from pathlib import Path

mark = Path({mark!r})
if os.environ.get("LAMP_RANK") == "1" and not mark.exists():
    import importlib.abc, sys

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "lamplighter.train.muon":
                sys.meta_path.remove(self)
                import importlib.util
                spec = importlib.util.find_spec(name)
                load = spec.loader.exec_module
                def exec_module(module):
                    load(module)
                    share, calls = module.Muon.share, [0]
                    def dies(self, world, scale=None):
                        calls[0] += world.rank == 1
                        if calls[0] == 40 and not mark.exists():
                            mark.touch()
                            os.kill(os.getpid(), signal.SIGKILL)
                        share(self, world, scale)
                    module.Muon.share = dies
                spec.loader.exec_module = exec_module
                return spec

    sys.meta_path.insert(0, Finder())
"""


@LONG
def test_a_rank_that_dies_while_updates_are_shared_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have the gradients of the step and not all of its updates: nobody has changed a weight."""
    site, ends = tmp_path / "site", []
    site.mkdir()
    for world in (1, 2):
        place = tmp_path / str(world)
        place.mkdir()
        (site / "sitecustomize.py").write_text(DIES_SHARING.format(mark=str(place / "died")))
        words = [*LAMP, *WORDS, "--train.ranks", str(world), *KINDS["muon"]]
        paths = os.pathsep.join([str(site), *filter(None, [clean_env().get("PYTHONPATH")])])
        done = subprocess.run(words, cwd=place, env={**clean_env(), "PYTHONPATH": paths}, capture_output=True, text=True, timeout=600)  # fmt: skip
        assert done.returncode == 0, done.stdout
        assert (place / "died").exists() == (world == 2)
        ends.append((losses_of(_folder(place)), _stored(place)))
        if world == 2:
            assert "rank 1" in done.stdout and _attempt(place) >= 2, done.stdout
    assert ends[0] == ends[1]


@LONG
@pytest.mark.parametrize("preset", ["demo", "slm", "regular", "modern", "llama"])
def test_the_defaults_of_every_preset_have_the_same_bits(tmp_path: Path, preset: str) -> None:
    """Begun on one rank, gone on with on 1, 2 and 3, with nothing else set than what makes them small: more ranks than leaves,
    where it comes to that, since leaves are chosen at the first start."""
    small = ["--model.layers", "2", "--data.seq_len", "32", "--data.embedded_documents", "300", "--train.steps", "6", "--save.every_steps", "2",
             "--train.threads", "1", "--train.warmup_steps", "1", "--tokenizer.kind", "bytes", "--eval.windows", "4", "--eval.sample_every_steps", "0"]  # fmt: skip
    words = ["train", "--run", "r", "--preset", preset, *small]
    done = lamp(*words, "--train.ranks", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    wanted = (losses_of(_folder(tmp_path)), _stored(tmp_path))
    assert len(wanted[0]) == 6
    for ranks in (2, 3):
        place = tmp_path / str(ranks)
        place.mkdir()
        copy_run(_folder(tmp_path).path, _folder(place).path)
        for step in (4, 6):
            shutil.rmtree(_folder(place).checkpoint(step))
        _folder(place).status.unlink()
        done = lamp(*words, "--train.ranks", str(ranks), cwd=place)
        assert done.returncode == 0 and "4 redone steps equal" in done.stdout, done.stdout
        assert (losses_of(_folder(place)), _stored(place)) == wanted, ranks


@LONG
@pytest.mark.parametrize("shards", [("none", "none", "none"), ("full", "none", "full")])
def test_four_ranks_then_one_then_three(tmp_path: Path, alone: Path, shards: tuple[str, str, str]) -> None:
    """Each is stopped and the next goes on; sharded, then whole, then sharded again."""
    for ranks, shard, until in zip((4, 1, 3), shards, (150, 350, None), strict=True):
        going = _start(tmp_path, ranks, "--train.shard", shard)
        if until is not None:
            status = _folder(tmp_path).status
            wait_for(lambda: status.exists() and read_json(status).get("step", 0) >= until, 200, going)  # noqa: B023
            going.send_signal(signal.SIGTERM)
        said, _ = going.communicate(timeout=300)
        assert going.returncode == (0 if until is None else 75), said
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)


@LONG
def test_torchs_own_sum_is_exact_on_as_many_ranks_and_says_so(tmp_path: Path, alone: Path) -> None:
    ends = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        going = _start(tmp_path / name, 4, "--train.reduction", "native")  # one of the four has nothing to compute
        said, _ = going.communicate(timeout=300)
        assert going.returncode == 0 and "the same bits on 4 ranks alone" in said, said
        ends.append((losses_of(_folder(tmp_path / name)), _stored(tmp_path / name)))
    assert ends[0] == ends[1]
    wanted = losses_of(_folder(alone))
    assert ends[0][0].keys() == wanted.keys()
    close = [abs(float.fromhex(ends[0][0][step]) - float.fromhex(wanted[step])) for step in (1, 2, 3)]
    assert max(close) < 1e-5, "the same sum but for its order"


@LONG
def test_bad_weights_that_a_save_finds_take_all_ranks_back(tmp_path: Path, alone: Path) -> None:
    ends = []
    for world in (1, 2):
        place = tmp_path / str(world)
        place.mkdir()
        _prepare(place, alone)
        going = _start(place, world, "--model.family", "bad_weights:Model", "--train.micro_batch", "3")
        said, _ = going.communicate(timeout=300)
        assert going.returncode == 0 and "rolled back to step 100" in said, said
        ends.append((losses_of(_folder(place)), _stored(place)))
    assert ends[0] == ends[1]


@LONG
def test_one_rank_without_numbers_stops_all_and_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    """All skip together, go back once together, and stop together: nobody has touched the weights."""
    (tmp_path / "one_bad_rank.py").write_text(ONE_BAD_RANK)
    more = ("--model.family", "one_bad_rank:Model", "--train.micro_batch", "3", "--train.steps", "60")
    going = _start(tmp_path, 2, *more, "--save.every_steps", "20", "--launch.spare", "0")
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 76, said
    actions = [one["action"] for one in verdicts_of(_folder(tmp_path), "nan_batch")]
    again = [*["skip"] * 3, "restart", *["skip"] * 3, "stop"]
    assert actions == again, "three are skipped, the fourth rolls back, and the second time it is enough"
    assert [path.name for path in newest_first(_folder(tmp_path).checkpoints)] == ["checkpoint-20"]
    assert checkpoint.find(_folder(tmp_path).checkpoints) == _folder(tmp_path).checkpoint(20), "whole and finite"


@LONG
def test_a_rank_that_is_out_of_memory_is_named_and_the_other_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    more = (
        "--model.family",
        "full_rank:Model",
        "--train.steps",
        "60",
        "--save.every_steps",
        "20",
        "--launch.spare",
        "0",
    )
    ends = []
    for world in (1, 2):
        place = tmp_path / str(world)
        place.mkdir()
        (place / "full_rank.py").write_text(FULL_RANK)
        going = _start(place, world, *more)
        said, _ = going.communicate(timeout=300)
        assert going.returncode == 0, said
        ends.append((losses_of(_folder(place)), _stored(place)))
    assert ends[0] == ends[1] and "error: rank 1: OutOfMemoryError" in said, said
    (verdict,) = verdicts_of(_folder(place), "out_of_memory")
    assert verdict["culprit"]["rank"] == 1 and verdict["action"] == "restart"


@LONG
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_whose_weights_are_others_is_named_and_all_go_back(tmp_path: Path, ranks: int) -> None:
    """One bit on one rank: found at the next comparison, and what was added up with it is done again. Of two ranks none is named."""
    more = ("--model.family", "rotten:Model", "--train.steps", "200", "--save.every_steps", "40")
    ends = []
    for world in (1, ranks):
        place = tmp_path / str(world)
        place.mkdir()
        (place / "rotten.py").write_text(ONE_ROTTEN_RANK)
        going = _start(place, world, *more, "--launch.spare", "0")
        said, _ = going.communicate(timeout=300)
        assert going.returncode == 0, said
        last = {one["step"]: one["train/loss"] for one in read_lines(_folder(place).metrics) if "train/loss" in one}
        ends.append((last, _stored(place)))
    assert (place / "rotten").exists() and ends[0] == ends[1]
    (verdict,) = verdicts_of(_folder(place), "rank_weights")
    assert verdict["action"] == "restart" and "rolled back to step" in verdict["next"]
    assert verdict["culprit"].get("rank") == (2 if ranks == 3 else None), verdict


@LONG
def test_without_a_checkpoint_to_go_back_to_all_take_the_weights_of_one_rank(tmp_path: Path) -> None:
    (tmp_path / "rotten.py").write_text(ONE_ROTTEN_RANK)
    more = ("--model.family", "rotten:Model", "--train.steps", "200", "--save.every_steps", "0", "--launch.spare", "0")
    going = _start(tmp_path, 3, *more)
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 0, said
    (verdict,) = verdicts_of(_folder(tmp_path), "rank_weights")
    assert verdict["culprit"]["rank"] == 2 and "all go on with the weights of rank 0" in verdict["next"]
    (taken,) = events_of(_folder(tmp_path), "weights taken over")
    assert taken["step"] == 150 and len(losses_of(_folder(tmp_path))) == 200


@LONG
def test_a_run_without_micro_batches_gets_as_many_as_ranks(tmp_path: Path) -> None:
    at = WORDS.index("--train.micro_batch")
    words = [*WORDS[:at], *WORDS[at + 2 :]]
    done = lamp(*words, "--train.ranks", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    config = _folder(tmp_path).config.read_text()
    assert "micro_batch: 3" in config and "derived from 2 ranks" in config


@LONG
def test_a_stopped_rank_is_named_and_the_others_go_on(tmp_path: Path, alone: Path) -> None:
    going = _start(tmp_path, 2)
    victim = _at_step(tmp_path, 5, going)[1]
    os.kill(victim, signal.SIGSTOP)
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 0, said
    found = verdicts_of(_folder(tmp_path), "rank_sigstop")
    assert [one["action"] for one in found] == ["none", "restart"], "named first, then acted upon"
    assert all(one["culprit"]["rank"] == 1 and one["culprit"]["pid"] == victim for one in found)
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)


@LONG
def test_all_ranks_killed_at_once_go_on_from_memory(tmp_path: Path, alone: Path) -> None:
    going = _start(tmp_path, 3)
    victims = _at_step(tmp_path, 60, going)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 0 and "which is in memory" in said, said
    (verdict,) = verdicts_of(_folder(tmp_path), "killed")
    named = [f"rank {rank} (process {pid})" for rank, pid in enumerate(victims)]
    assert all(words in verdict["why"] for words in named), verdict["why"]
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)


@LONG
def test_a_rank_that_is_killed_while_all_start_again_is_outlived(tmp_path: Path, alone: Path) -> None:
    """None of them has met the others, or holds a state, yet."""
    going = _start(tmp_path, 2)
    for victim in _at_step(tmp_path, 60, going):
        os.kill(victim, signal.SIGKILL)
    wait_for(lambda: _attempt(tmp_path) > 1, 200, going)
    slots = [_folder(tmp_path).slot(rank) for rank in (0, 1)]
    wait_for(lambda: (slot := read_slot(slots[0])) is not None and slot.phase == "ranks", 200, going)
    killed = read_slot(slots[1])
    assert killed is not None
    os.kill(killed.pid, signal.SIGKILL)
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 0, said
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)


@LONG
def test_torchrun_starts_one_run_with_one_voice(tmp_path: Path, alone: Path) -> None:
    (tmp_path / "r.yaml").write_text("train: {steps: 600}\n")  # torchrun would take --run for a flag of its own
    words = [
        *LAMP[:1],
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "lamplighter",
        "train",
        "r.yaml",
        *WORDS[3:],
    ]
    done = subprocess.run(words, cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 ranks, 3 micro-batches a step") == 1
    assert done.stdout.count("lamp train: reading the request") == 1, "the other process says nothing"
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)
    words[words.index("2")] = "3"  # of --nproc-per-node: it is asked for as much as by train.ranks
    done = subprocess.run([*words, "--train.steps", "620"], cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0 and "2 ranks then, 3 now" in done.stdout, done.stdout + done.stderr
