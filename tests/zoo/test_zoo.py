"""The zoo: one fault each, injected from outside into the real command; the verdict is compared with the truth."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from lamplighter.rundir import RunDir, read_json
from running import (
    LONG,
    TINY,
    Command,
    Row,
    events_of,
    lamp,
    losses_of,
    processes_of,
    slot_of,
    start_lamp,
    verdicts_of,
    wait_for,
    write_model,
)

ONCE = """
def before(model):
    if model.calls == 12 and not os.path.exists("happened") or model.calls == 1 and os.path.exists("again"):
        open("happened", "w").close()
        fault(model)

"""


@dataclass(frozen=True)
class Animal:
    """A fault and the truth about it."""

    name: str
    cause: str
    body: str  # def fault(model)
    line: str  # the text of the line that is the culprit
    state: str
    attempts: int
    code: int = 0
    flags: tuple[str, ...] = ()
    says: tuple[str, ...] = ()


ANIMALS = [
    Animal(
        "deadlock", "deadlock",
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
        "with b:  # the line", "stuck", 2, says=("MainThread", "other"),
    ),
    Animal(
        "livelock", "livelock",
        """
def fault(model):
    ok = False
    while not ok:
        ok = model.calls < 0  # the line
""",
        "ok = model.calls < 0 or while not ok:", "slow", 2, flags=("--watch.patience_s", "5"),
    ),
    Animal(
        "gil_hold", "gil_hold",
        """
def fault(model):
    ctypes.PyDLL(None).sleep(60)  # the line
""",
        "ctypes.PyDLL(None).sleep(60)", "slow", 2, flags=("--watch.patience_s", "5"),
    ),
    Animal(
        "d_state", "d_state",
        """
def fault(model):
    path = os.path.abspath("vforker")
    open(path + ".c", "w").write("#include <unistd.h>\\nvoid go(void){ if (vfork() == 0) { sleep(6); _exit(0); } }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path + ".so", path + ".c"], check=True)
    ctypes.CDLL(path + ".so").go()  # the line
""",
        "ctypes.CDLL(path", "stuck", 1,
    ),
    Animal(
        "python_loop", "python_loop",
        """
def fault(model):
    total = 0
    for token in range(120_000_000):
        total += token * token  # the line
""",
        "total += token * token", "slow", 1, says=("alive", "range(120000000)"),
    ),
    Animal(
        "same_twice", "deadlock",
        """
def fault(model):
    open("again", "w").close()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # the line
""",
        "lock.acquire()  # the line", "stuck", 2, code=70,
    ),
    Animal(
        "long_sleep", "sleep",
        """
def fault(model):
    time.sleep(9)  # the line
""",
        "time.sleep(9)", "waiting", 1,
    ),
]  # fmt: skip


HERE = ("deadlock",)  # the others in make zoo; tests/run/test_silence.py has a held GIL


@pytest.mark.parametrize(
    "animal",
    [pytest.param(animal, marks=() if animal.name in HERE else LONG) for animal in ANIMALS],
    ids=lambda animal: animal.name,
)
def test_the_zoo(tmp_path: Path, animal: Animal, zoo_row: Row, here: Command) -> None:
    family = write_model(tmp_path, ONCE + animal.body)
    words = ["train", *TINY, "--model.family", family, "--train.steps", "40", "--save.every_steps", "5"]
    done = lamp(*words, "--run", "z", *animal.flags, cwd=tmp_path, timeout=120)
    run = RunDir(tmp_path / "runs" / "z")
    assert done.returncode == animal.code, done.stdout[-3000:]
    found = verdicts_of(run, animal.cause)
    assert found, [(v["cause"], v["why"]) for v in verdicts_of(run)]
    first = found[0]
    assert first["state"] == animal.state
    assert first["since_s"] < 7
    source = (tmp_path / "own.py").read_text().splitlines()
    assert source[first["culprit"]["line"] - 1].strip().startswith(tuple(animal.line.split(" or "))), first
    assert first["culprit"]["file"].endswith("own.py")
    assert all(part in first["why"] for part in animal.says), first["why"]
    action = next((verdict["action"] for verdict in found if verdict["action"] != "none"), "none")
    zoo_row(animal.name, float(first["since_s"]), action, done.returncode)
    assert len(events_of(run, "start")) == animal.attempts
    if animal.code == 0:
        assert sorted(losses_of(run)) == list(range(1, 41))
        if animal.attempts == 2:
            acted = [verdict for verdict in verdicts_of(run) if verdict["action"] == "restart"]
            assert acted
            whole = here(*words, "--run", "whole", cwd=tmp_path)
            assert whole.returncode == 0
            assert losses_of(run) == losses_of(RunDir(tmp_path / "runs" / "whole")), "a restart changes nothing"
    assert not processes_of(run.path)


def test_a_killed_child_is_outlived(tmp_path: Path, here: Command) -> None:
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
    assert here(*words, "--run", "w", cwd=tmp_path).returncode == 0
    assert losses_of(run) == losses_of(RunDir(tmp_path / "runs" / "w"))
    assert json.loads(run.status.read_text())["attempt"] == 3


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=LONG)], ids=["once", "twice"])
def test_an_error_that_may_pass_is_tried_once_more(tmp_path: Path, again: bool) -> None:
    """A network's or a disk's; at the same step for the second time it is a bug."""
    marks = "    open('again', 'w').close()\n" if again else ""
    family = write_model(
        tmp_path, f"{ONCE}def fault(model):\n{marks}    raise ConnectionResetError('the store has gone away')\n"
    )
    words = ["train", "--run", "r", *TINY, "--train.steps", "20", "--save.every_steps", "5", "--model.family", family]
    assert lamp(*words, cwd=tmp_path).returncode == int(again)
    run = RunDir(tmp_path / "runs" / "r")
    found = verdicts_of(run, "exception")
    assert [verdict["action"] for verdict in found] == (["restart", "stop"] if again else ["restart"])
    assert "the store has gone away" in found[0]["why"]
    assert len(events_of(run, "start")) == 2


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
