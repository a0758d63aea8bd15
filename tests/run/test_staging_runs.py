"""What starts processes: Saves beside the steps: of the right step, whole or not there, one at a time, from memory that is kept; faults reach the loop."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from lamplighter.rundir import RunDir, read_json, read_lines, verify_manifest
from running import LONG, TINY, Command, events_of, lamp, losses_of, slot_of, start_lamp, verdicts_of, wait_for

# A buffer that training changes, a parameter that nothing uses, and where a process is to be killed: writes that take longer.
MODEL = """
import ctypes, os, time, torch
from lamplighter.train import tensorfile

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, vocab_size)
        self.unused = torch.nn.Parameter(torch.zeros(3))
        self.calls = 0

    def forward(self, ids):
        self.calls += self.training
        before(self)
        found = self.embed(ids)
        return self.head(self.norm(found.transpose(1, 2)).transpose(1, 2))

def before(model):
    pass
"""
STRETCHED = """
write = tensorfile.write

def stretched(path, *rest):
    digest = write(path, *rest)
    after(str(path))
    return digest

tensorfile.write = stretched
"""


def write_model(cwd: Path, fault: str = "") -> None:
    (cwd / "stretched.py").write_text(MODEL + (STRETCHED if "def after" in fault else "") + fault)


@pytest.fixture
def after_write(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    """What happens after each file of a save, in this process."""
    from lamplighter.train import tensorfile

    write = tensorfile.write

    def install(act: Callable[[str], None]) -> None:
        def stretched(path: Path, *rest: Any) -> Any:
            digest = write(path, *rest)
            act(str(path))
            return digest

        monkeypatch.setattr(tensorfile, "write", stretched)

    return install


AfterWrite = Callable[[Callable[[str], None]], None]


def words_for(run: str, steps: int, every: int, *more: str) -> list[str]:
    return ["train", "--run", run, *TINY, "--model.family", "stretched:Model", "--train.steps", str(steps),
            "--save.every_steps", str(every), "--save.every_s", "0", "--save.keep", "9", *more]  # fmt: skip


def tensors_of(run: RunDir, step: int) -> dict[str, bytes]:
    folder = run.checkpoints / f"checkpoint-{step}"
    assert verify_manifest(folder) is None
    found = {}
    for name in ("model.safetensors", "training/optimizer.safetensors"):
        found |= {f"{name} {key}": tensor.tobytes() for key, tensor in load_file(folder / name).items()}
    return found


SLOW = """
def after(path):
    if "optimizer" in path:
        time.sleep(3)
"""


def test_a_slow_disk_holds_nothing_up_and_a_second_save_waits_for_the_first(
    tmp_path: Path, here: Command, after_write: AfterWrite
) -> None:
    """Every due step is saved, each with the state of its own step, to the bit as where steps wait for their saves."""
    write_model(tmp_path)
    again = here(*words_for("waiting", 9, 3, "--save.staged", "false"), cwd=tmp_path)
    assert again.returncode == 0, again.stdout
    after_write(lambda path: time.sleep(1.5 if "optimizer" in path else 0))
    done = here(*words_for("beside", 9, 3), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    run, other = RunDir(tmp_path / "runs" / "beside"), RunDir(tmp_path / "runs" / "waiting")
    assert losses_of(run) == losses_of(other)
    for step in (3, 6, 9):
        assert tensors_of(run, step) == tensors_of(other, step), step
    assert any("norm.running_mean" in name for name in tensors_of(run, 3))
    saved = events_of(run, "checkpoint")
    assert [event["step"] for event in saved] == [3, 6, 9]
    assert saved[0]["seconds"] >= 1.5
    assert saved[0]["blocked_s"] < 1.5, "the loop went on while the disk was slow"
    assert "longer than the time between two saves" in done.stdout
    assert "; steps waited " in done.stdout
    assert "steps wait for each save (save.staged false)" in again.stdout
    where = [event["path"] for event in events_of(run, "phase") if event["name"] == "save"]
    assert {"beside > save", "train > save"} <= set(where), (
        "the write is beside; the wait of the second is the loop's own"
    )
    assert max(record["step"] for record in read_lines(run.metrics) if record["t"] < saved[0]["t"]) > 3


@LONG  # tests/run/test_exact.py kills in a save too
def test_kills_while_a_write_is_under_way_change_nothing(tmp_path: Path, here: Command) -> None:
    steps, rng = 40, random.Random(7)
    write_model(tmp_path)
    assert here(*words_for("whole", steps, 5), cwd=tmp_path).returncode == 0
    write_model(tmp_path, "\ndef after(path):\n    time.sleep(0.05)\n")
    whole, run = RunDir(tmp_path / "runs" / "whole"), RunDir(tmp_path / "runs" / "broken")
    going = start_lamp(*words_for("broken", steps, 5), cwd=tmp_path)
    killed: set[int] = set()
    for least in (0, 10):
        seen = wait_for(lambda least=least: _writing(run, killed, least), 90, going)
        time.sleep(rng.random() * 0.1)
        killed.add(seen)
        with contextlib.suppress(ProcessLookupError):  # it was done with all its steps
            os.kill(seen, signal.SIGKILL)
    assert going.wait(120) == 0
    assert losses_of(run) == losses_of(whole)
    assert tensors_of(run, steps) == tensors_of(whole, steps)
    assert max(record["attempt"] for record in read_lines(run.metrics)) >= 2
    assert not list(run.checkpoints.glob(".writing-*")), "what a kill tore is cleared away"
    for path in run.checkpoints.glob("checkpoint-*"):
        assert verify_manifest(path) is None, path


def _writing(run: RunDir, killed: set[int], least: int) -> int:
    """The process, while it writes a save (and has made steps since the last kill)."""
    slot = slot_of(run)
    return slot.pid if slot.saving and slot.step > least and slot.pid not in killed else 0


@LONG
def test_requests_while_a_write_is_under_way_get_the_newest_step(tmp_path: Path) -> None:
    write_model(tmp_path, SLOW + "\ndef before(model):\n    time.sleep(0.02)\n")
    run = RunDir(tmp_path / "runs" / "r")
    going = start_lamp(*words_for("r", 5000, 1000, "--save.every_s", "0.5"), cwd=tmp_path)
    wait_for(lambda: slot_of(run).saving, 90, going)
    asked = slot_of(run).step
    said = lamp("save", "r", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    safe = int(re.findall(r"safe to step (\d+);", said.stdout + said.stderr)[-1])
    assert safe >= asked
    assert going.poll() is None
    at = slot_of(run).durable_step
    wait_for(lambda: slot_of(run).saving and slot_of(run).step > at, 90, going)
    going.send_signal(signal.SIGINT)
    assert going.wait(60) == 75, (tmp_path / "out.txt").read_text()[-2000:]
    status = read_json(run.status)
    assert status["durable_step"] == status["step"] == max(losses_of(run)) > asked
    tensors_of(run, status["step"])


SPOILED = """
def before(model):
    if model.training and model.calls == 5 and not os.path.exists("spoiled"):
        open("spoiled", "w").close()
        model.unused.data[0] = float("nan")  # nothing uses it: no loss tells
"""


def test_bad_weights_are_found_in_the_copy_and_the_outcome_does_not_depend_on_when(
    tmp_path: Path, here: Command
) -> None:
    found = {}
    write_model(tmp_path, SPOILED)
    for staged in ("true", "false"):
        (tmp_path / "spoiled").unlink(missing_ok=True)
        done = here(*words_for(staged, 12, 3, "--save.staged", staged), cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-2000:]
        run = RunDir(tmp_path / "runs" / staged)
        (verdict,) = verdicts_of(run, "nan_weights")
        assert verdict["culprit"] == {"step": 6, "module": "unused"}
        (back,) = events_of(run, "rolled back")
        assert (back["step"], back["passed_from"], back["passed_to"]) == (3, 6, 6)
        found[staged] = {**losses_of(run), **{step: str(tensors_of(run, step)) for step in (3, 6, 9, 12)}}
    assert found["true"] == found["false"]


def test_a_disk_that_is_full_beside_the_steps_is_pruned_for_and_then_ends_the_run(
    tmp_path: Path, here: Command, after_write: AfterWrite
) -> None:
    filled = []

    def fill(path: str) -> None:
        if "checkpoint-9-" in path or ("checkpoint-6-" in path and not filled):
            filled.append(path)
            raise OSError(errno.ENOSPC, "No space left on device", path)

    write_model(tmp_path)
    after_write(fill)
    done = here(*words_for("full", 4000, 3), cwd=tmp_path)
    assert done.returncode == 73, done.stdout[-2000:]
    assert "the disk filled up while saving step 6; pruning old checkpoints" in done.stdout
    run = RunDir(tmp_path / "runs" / "full")
    assert read_json(run.status)["durable_step"] >= 6
    assert verify_manifest(run.checkpoints / "checkpoint-6") is None
    assert not (run.checkpoints / "checkpoint-9").exists()
    assert max(losses_of(run)) < 100, "it ends soon after, and not at the end of the run"


HELD = """
def after(path):
    if "checkpoint-6-" in path:
        open("in-the-air", "w").close()
        time.sleep(2)

def before(model):
    if model.training and model.calls == 8:
        while not os.path.exists("in-the-air"):
            time.sleep(0.01)
        ctypes.PyDLL(None).sleep(90)
"""


@LONG
def test_a_stop_does_not_wait_for_a_write_that_cannot_go_on(tmp_path: Path) -> None:
    """The GIL is held while a save is under way: its flag stays up, and the stop still comes to its end."""
    write_model(tmp_path, HELD)
    run = RunDir(tmp_path / "runs" / "held")
    going = start_lamp(*words_for("held", 40, 3, "--watch.stop_grace_s", "3"), cwd=tmp_path)
    wait_for(lambda: (tmp_path / "in-the-air").exists() and slot_of(run).step == 7, 90, going)
    going.terminate()
    assert going.wait(60) == 75
    assert "the process is killed; step 3 is safe" in (tmp_path / "out.txt").read_text()
