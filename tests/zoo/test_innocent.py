"""Must not be killed: healthy but slow, alone and beside four CPU hogs. One false kill fails everything."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from lamplighter.rundir import RunDir
from running import (
    FULL,
    LONG,
    TINY,
    events_of,
    lamp,
    losses_of,
    slot_of,
    start_lamp,
    verdicts_of,
    wait_for,
    write_model,
)

INNOCENTS = {
    "a long step in pure Python": """
def before(model):
    if model.training and model.calls == 12:
        until, total = time.monotonic() + SECONDS * 4, 0
        for token in range(10**9):
            total += token
            if time.monotonic() > until:
                break
""",
    "a gc pause": """
def before(model):
    if model.training and model.calls == 12:
        model.junk = [[] for _ in range(4_000_000)]
        gc.collect()
        model.junk = None
""",
    "a long evaluation": """
def before(model):
    if not model.training and model.scored == 1:
        time.sleep(SECONDS * 3)
""",
    "a first batch that takes long": """
def before(model):
    if model.training and model.calls == 1:
        time.sleep(SECONDS * 2)
""",
    "a throttled save": """
from lamplighter.train import tensorfile
write = tensorfile.write

def throttled(path, *rest):
    if "checkpoint-15" in str(path) and "optimizer" not in str(path):
        time.sleep(SECONDS * 2)
    return write(path, *rest)

tensorfile.write = throttled

def before(model):
    pass
""",
    "a long native product": """
def before(model):
    if model.training and model.calls == 12:
        until, a = time.monotonic() + SECONDS * 2, torch.ones(1500, 1500)
        while time.monotonic() < until:
            a = (a @ a).clamp(0, 1)
""",
}


def acted_on(run: RunDir) -> list[str]:
    return [verdict["why"] for verdict in verdicts_of(run) if verdict["action"] != "none"]


@pytest.mark.parametrize("crowded", [pytest.param(False, id="alone"), pytest.param(True, id="beside hogs", marks=LONG)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if "Python" in name else LONG) for name in INNOCENTS])
def test_the_innocent_are_left_alone(tmp_path: Path, name: str, crowded: bool, request: pytest.FixtureRequest) -> None:
    seconds = 10 if FULL else 2.5
    family = write_model(tmp_path, INNOCENTS[name] + f"\nSECONDS = {seconds}\n")
    words = f"--model.family {family} --train.steps 30 --save.every_steps 5 --eval.every_steps 15".split()
    if crowded:
        request.getfixturevalue("hogs")
    done = lamp("train", "--run", "i", *TINY, *words, cwd=tmp_path, timeout=300)
    run = RunDir(tmp_path / "runs" / "i")
    assert done.returncode == 0, done.stdout[-2000:]
    assert len(events_of(run, "start")) == 1, "it was restarted"
    assert acted_on(run) == []
    assert sorted(losses_of(run)) == list(range(1, 31))


@LONG  # tests/run/test_silence.py stops and continues one
def test_a_job_that_is_stopped_and_continued_is_left_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "i")
    words = ["--train.steps", "900", "--save.every_steps", "100", "--watch.patience_s", "2"]
    going = start_lamp("train", "--run", "i", *TINY, *words, cwd=tmp_path)
    wait_for(lambda: slot_of(run).step > 60, process=going)
    os.kill(slot_of(run).pid, signal.SIGSTOP)
    wait_for(lambda: "is stopped" in (tmp_path / "out.txt").read_text(), 5, going)
    time.sleep(8 if FULL else 4)
    os.kill(slot_of(run).pid, signal.SIGCONT)
    assert going.wait(60) == 0
    assert acted_on(run) == []
    assert len(events_of(run, "start")) == 1
