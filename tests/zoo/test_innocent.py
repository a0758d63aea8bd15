"""Must not be killed: healthy but slow, alone and beside four CPU hogs. One false kill fails everything."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lamplighter.rundir import RunDir, read_lines
from running import FULL, LONG, TINY, lamp, losses_of, slot_of, start_lamp, wait_for

MODEL = """
import gc, os, time, torch

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Linear(width, vocab_size)
        self.calls = self.scored = 0

    def forward(self, ids):
        self.calls += self.training
        self.scored += not self.training
        innocent(self)
        return self.head(self.embed(ids))

"""

INNOCENTS = {
    "a long step in pure Python": """
def innocent(model):
    if model.training and model.calls == 12:
        until, total = time.monotonic() + SECONDS * 4, 0
        for token in range(10**9):
            total += token
            if time.monotonic() > until:
                break
""",
    "a gc pause": """
def innocent(model):
    if model.training and model.calls == 12:
        model.junk = [[] for _ in range(4_000_000)]
        gc.collect()
        model.junk = None
""",
    "a long evaluation": """
def innocent(model):
    if not model.training and model.scored == 1:
        time.sleep(SECONDS * 3)
""",
    "a first batch that takes long": """
def innocent(model):
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

def innocent(model):
    pass
""",
    "a long native product": """
def innocent(model):
    if model.training and model.calls == 12:
        until, a = time.monotonic() + SECONDS * 2, torch.ones(1500, 1500)
        while time.monotonic() < until:
            a = (a @ a).clamp(0, 1)
""",
}


@contextmanager
def maybe_hogs(wanted: bool, request: pytest.FixtureRequest) -> Iterator[None]:
    if wanted:
        request.getfixturevalue("hogs")
    yield


def acted_on(run: RunDir) -> list[str]:
    return [
        event["why"] for event in read_lines(run.events) if event.get("type") == "verdict" and event["action"] != "none"
    ]


@pytest.mark.parametrize("crowded", [pytest.param(False, id="alone"), pytest.param(True, id="beside hogs", marks=LONG)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if "Python" in name else LONG) for name in INNOCENTS])
def test_the_innocent_are_left_alone(tmp_path: Path, name: str, crowded: bool, request: pytest.FixtureRequest) -> None:
    seconds = 10 if FULL else 2.5
    (tmp_path / "innocent.py").write_text(MODEL + INNOCENTS[name] + f"\nSECONDS = {seconds}\n")
    words = [
        "train",
        "--run",
        "i",
        *TINY,
        "--model.family",
        "innocent:Model",
        "--train.steps",
        "30",
        "--save.every_steps",
        "5",
    ]
    with maybe_hogs(crowded, request):
        done = lamp(*words, "--eval.every_steps", "15", cwd=tmp_path, timeout=300)
    run = RunDir(tmp_path / "runs" / "i")
    assert done.returncode == 0, done.stdout[-2000:]
    assert sum(event["type"] == "start" for event in read_lines(run.events)) == 1, "it was restarted"
    assert acted_on(run) == []
    assert sorted(losses_of(run)) == list(range(1, 31))


@LONG  # tests/run/test_silence.py stops and continues one
def test_a_job_that_is_stopped_and_continued_is_left_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "i")
    words = [
        "train",
        "--run",
        "i",
        *TINY,
        "--train.steps",
        "900",
        "--save.every_steps",
        "100",
        "--watch.patience_s",
        "2",
    ]
    going = start_lamp(*words, cwd=tmp_path)
    wait_for(lambda: slot_of(run).step > 60, process=going)
    os.kill(slot_of(run).pid, signal.SIGSTOP)
    wait_for(lambda: "is stopped" in (tmp_path / "out.txt").read_text(), 5, going)
    import time

    time.sleep(8 if FULL else 4)
    os.kill(slot_of(run).pid, signal.SIGCONT)
    assert going.wait(60) == 0
    assert acted_on(run) == []
    assert sum(event["type"] == "start" for event in read_lines(run.events)) == 1
