"""The zoo: one fault each, injected from outside into the real command; the verdict is compared with the truth."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lamplighter.rundir import RunDir, read_json, read_lines
from running import LONG, TINY, lamp, losses_of, processes_of, slot_of, start_lamp, wait_for

MODEL = """
import ctypes, os, subprocess, threading, time, torch

ONCE = "fault-happened"

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Linear(width, vocab_size)
        self.calls = 0

    def forward(self, ids):
        self.calls += 1
        if self.training and (self.calls == 12 and not os.path.exists(ONCE) or self.calls == 1 and os.path.exists("again")):
            open(ONCE, "w").close()
            fault(self)
        return self.head(self.embed(ids))

"""


@dataclass(frozen=True)
class Animal:
    """A fault and the truth about it."""

    name: str
    body: str  # def fault(model), appended to MODEL
    cause: str
    line: str  # the text of the line that is the culprit
    state: str
    named_within_s: float
    code: int
    attempts: int
    flags: tuple[str, ...] = ()
    says: tuple[str, ...] = ()


ANIMALS = [
    Animal(
        "deadlock",
        """
def fault(model):
    a, b = threading.Lock(), threading.Lock()
    def other():
        with b:
            time.sleep(0.3)
            with a:  # the other line
                pass
    threading.Thread(target=other, name="other", daemon=True).start()
    with a:
        time.sleep(0.3)
        with b:  # the line
            pass
""",
        "deadlock",
        "with b:  # the line",
        "stuck",
        7.0,
        0,
        2,
        (),
        ("MainThread", "other"),
    ),
    Animal(
        "livelock",
        """
def fault(model):
    ok = False
    while not ok:
        ok = model.calls < 0  # the line
""",
        "livelock",
        "ok = model.calls < 0 or while not ok:",
        "slow",
        7.0,
        0,
        2,
        ("--watch.patience_s", "5"),
    ),
    Animal(
        "gil_hold",
        """
def fault(model):
    ctypes.PyDLL(None).sleep(60)  # the line
""",
        "gil_hold",
        "ctypes.PyDLL(None).sleep(60)",
        "slow",
        7.0,
        0,
        2,
        ("--watch.patience_s", "5"),
    ),
    Animal(
        "d_state",
        """
def fault(model):
    path = os.path.abspath("vforker")
    open(path + ".c", "w").write("#include <unistd.h>\\nvoid go(void){ if (vfork() == 0) { sleep(6); _exit(0); } }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path + ".so", path + ".c"], check=True)
    ctypes.CDLL(path + ".so").go()  # the line
""",
        "d_state",
        "ctypes.CDLL(path",
        "stuck",
        7.0,
        0,
        1,
    ),
    Animal(
        "python_loop",
        """
def fault(model):
    total = 0
    for token in range(120_000_000):
        total += token * token  # the line
""",
        "python_loop",
        "total += token * token",
        "slow",
        7.0,
        0,
        1,
        (),
        ("alive", "range(120000000)"),
    ),
    Animal(
        "same_twice",
        """
def fault(model):
    open("again", "w").close()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # the line
""",
        "deadlock",
        "lock.acquire()  # the line",
        "stuck",
        7.0,
        70,
        2,
    ),
    Animal(
        "long_sleep",
        """
def fault(model):
    time.sleep(9)  # the line
""",
        "sleep",
        "time.sleep(9)",
        "slow",
        7.0,
        0,
        1,
    ),
]


def verdicts_of(run: RunDir) -> list[dict[str, Any]]:
    return [event for event in read_lines(run.events) if event.get("type") == "verdict"]


HERE = ("deadlock", "gil_hold")  # one that is restarted at once, one after its patience; the others in make zoo


@pytest.mark.parametrize(
    "animal",
    [pytest.param(animal, marks=() if animal.name in HERE else LONG) for animal in ANIMALS],
    ids=lambda animal: animal.name,
)
def test_the_zoo(tmp_path: Path, animal: Animal, record_property: Callable[[str, object], None]) -> None:
    (tmp_path / "animal.py").write_text(MODEL + animal.body)
    words = [
        "train",
        "--run",
        "z",
        *TINY,
        "--model.family",
        "animal:Model",
        "--train.steps",
        "40",
        "--save.every_steps",
        "5",
    ]
    done = lamp(*words, *animal.flags, cwd=tmp_path, timeout=120)
    run = RunDir(tmp_path / "runs" / "z")
    assert done.returncode == animal.code, done.stdout[-3000:]
    found = [verdict for verdict in verdicts_of(run) if verdict["cause"] == animal.cause]
    assert found, [(v["cause"], v["why"]) for v in verdicts_of(run)]
    first = found[0]
    assert first["state"] == animal.state
    assert first["since_s"] < animal.named_within_s
    source = (tmp_path / "animal.py").read_text().splitlines()
    assert source[first["culprit"]["line"] - 1].strip().startswith(tuple(animal.line.split(" or "))), first
    assert first["culprit"]["file"].endswith("animal.py")
    assert all(part in first["why"] for part in animal.says), first["why"]
    action = next((verdict["action"] for verdict in found if verdict["action"] != "none"), "none")
    record_property(
        "zoo", json.dumps([animal.name, f"{first['since_s']:.1f} s", "right", "right", action, done.returncode])
    )
    attempts = [event["attempt"] for event in read_lines(run.events) if event["type"] == "start"]
    assert len(attempts) == animal.attempts
    if animal.code == 0:
        assert sorted(losses_of(run)) == list(range(1, 41))
        if animal.attempts == 2:
            acted = [verdict for verdict in verdicts_of(run) if verdict["action"] == "restart"]
            assert acted
            (tmp_path / "runs" / "whole").mkdir()
            whole = lamp("train", "--run", "whole2", *words[3:], cwd=tmp_path, timeout=120)
            assert whole.returncode == 0
            assert losses_of(run) == losses_of(RunDir(tmp_path / "runs" / "whole2")), "a restart changes nothing"
    assert not processes_of(run.path)


def test_a_killed_child_is_outlived(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "k")
    words = ["train", *TINY, "--train.steps", "600", "--save.every_steps", "20"]
    going = start_lamp(*words, "--run", "k", cwd=tmp_path)
    for step in (60, 200):
        wait_for(lambda step=step: slot_of(run).step >= step, process=going)
        os.kill(slot_of(run).pid, signal.SIGKILL)
        time.sleep(0.5)
    assert going.wait(90) == 0
    dead = [verdict for verdict in verdicts_of(run) if verdict["state"] == "dead"]
    assert [verdict["action"] for verdict in dead] == ["restart", "restart"]
    assert "SIGKILL" in dead[0]["why"]
    assert lamp(*words, "--run", "w", cwd=tmp_path).returncode == 0
    assert losses_of(run) == losses_of(RunDir(tmp_path / "runs" / "w"))
    assert json.loads(run.status.read_text())["attempt"] == 3


def test_restarts_without_progress_come_to_an_end(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(
        "import os, torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self, **_):\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    done = lamp("train", "--run", "d", *TINY, "--model.family", "dies:Model", "--train.steps", "9", cwd=tmp_path)
    assert done.returncode == 71, done.stdout
    assert "not chance" in done.stdout or "without progress" in done.stdout
    assert read_json(tmp_path / "runs" / "d" / "status.json")["state"] == "lost"
