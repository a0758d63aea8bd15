"""Running the real command: tiny settings, finished runs, waiting on conditions, measuring silence, the shared data.

In:  nothing; `pythonpath` in pyproject.toml lets tests of any folder import it.
Out: lamp, start_lamp, wait_for, listen, shared and their kin. Fixtures are in conftest.py.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import hashlib
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import standins
from lamplighter import report
from lamplighter.commands import child_main
from lamplighter.procs import prctl
from lamplighter.rundir import RunDir, read_lines
from lamplighter.slot import Slot, read_slot
from lamplighter.watch.launcher import Launcher

SHARED = Path(__file__).parents[2] / "shared" / "data"
LAMP = [sys.executable, "-m", "lamplighter"]
SIZES = [  # of a run that is over in a second
    "--tokenizer.kind", "bytes", "--model.layers", "2", "--model.width", "32", "--model.heads", "2", "--data.seq_len", "32",
    "--train.batch_size", "4", "--train.dtype", "fp32", "--train.threads", "1", "--data.embedded_documents", "300",
    "--data.val_fraction", "0.05", "--eval.windows", "4", "--eval.sample_every_steps", "0", "--eval.every_steps", "0",
]  # fmt: skip
TINY = ["--model.family", "gpt2", *SIZES]


FULL = os.environ.get("LAMP_ZOO_FULL") == "1"  # make zoo
LONG = pytest.mark.zoo  # only in make zoo: takes long, or needs a quiet machine


STARTED: list[subprocess.Popen[bytes]] = []

# what the fixtures of conftest.py give
Command = Callable[..., subprocess.CompletedProcess[str]]
Finished = Callable[..., RunDir]
Row = Callable[[str, float | str, str, int], None]


def shared(*parts: str) -> Path:
    """A file or folder of the shared data; where that is absent, a small one made up in its place (standins.py)."""
    path = SHARED.joinpath(*parts)
    return path if path.exists() else standins.find(*parts) or real(*parts)


def real(*parts: str) -> Path:
    """The shared data itself, for tests of what is known about it; the test skips, visibly, where it is absent."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"shared data is absent: {'/'.join(parts)}")
    return path


def clean_env(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAMP_")}
    return {**kept, "TERM": "xterm-256color", **extra}


def lamp(*words: str, cwd: Path, timeout: float = 120, **extra: Any) -> subprocess.CompletedProcess[str]:
    """The real command, to its end."""
    return subprocess.run(
        [*LAMP, *words], cwd=cwd, capture_output=True, text=True, timeout=timeout, env=clean_env(), check=False, **extra
    )


def start_lamp(*words: str, cwd: Path, **extra: Any) -> subprocess.Popen[bytes]:
    """The real command, going on; its output is in cwd/out.txt."""
    with open(cwd / "out.txt", "ab") as out:
        process = subprocess.Popen(
            [*LAMP, *words], cwd=cwd, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=clean_env(), **extra
        )
    STARTED.append(process)
    return process


NO_BF16 = 3


def run_with_bf16(file: str) -> None:
    """A test file as a program, in a process of its own: some CPUs die of bf16, and then there is nothing to compare."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False, env=env)
    if done.returncode == NO_BF16:
        pytest.skip("this CPU has no bf16 that works")
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass
class Ended:
    """A process as the supervisor sees it, which has ended before it was looked at."""

    returncode: int
    pid: int = 2**22 + 7  # beyond the largest: there is no such process

    def poll(self) -> int:
        return self.returncode

    wait = poll


def run_child_here(launcher: Launcher, given: Mapping[str, Any], attempt: int) -> Ended:
    """The child's part of a verb in this process; what is its process's own (signals, listener, last exit) is left out."""
    request = {**given, "folder": str(launcher.run.path), "result_fd": launcher.result_fd}
    reporter = report._Reporter()

    def leave(code: int) -> None:
        report.close()
        reporter.slot.set("closing", code + 1)

    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (
            (report, "_reporter", reporter), (report, "_listen", lambda _: None), (report, "leave", leave),
            (prctl, "belong_to", lambda _: None), (child_main, "keep_to_ourselves", lambda _: None),
            (warnings, "showwarning", warnings.showwarning), (sys, "argv", ["child_main", launcher.verb, json.dumps(request)]),
        ):  # fmt: skip
            patch.setattr(module, name, value)
        patch.setenv("LAMP_ATTEMPT", str(attempt))
        launcher.run.slot(0).unlink(missing_ok=True)
        code = child_main.main()
    faulthandler.unregister(signal.SIGURG)
    with contextlib.suppress(ValueError):  # where it could not start to report
        gc.callbacks.remove(report._on_gc)
    for file in (reporter.events, reporter.metrics):
        if file:
            os.close(file.fd)
    return Ended(code)


# ---------------------------------------------------------------- a finished run, trained once


def copy_run(run: Path, to: Path) -> None:
    """All but the slots: a named pipe is in there, and the next start makes them anew."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("slots"), dirs_exist_ok=True)


def trained_once(factory: pytest.TempPathFactory, words: tuple[str, ...]) -> Path:
    """A folder in which `lamp train --run r WORDS` has finished; the workers of pytest-xdist share it."""
    root = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    place = root / f"finished-{hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12]}"
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            done = lamp("train", "--run", "r", *words, cwd=place)
            assert done.returncode == 0, done.stdout + done.stderr
            (place / "done").touch()
    return place


def wait_for(
    condition: Callable[[], Any], deadline_s: float = 40.0, process: subprocess.Popen[Any] | None = None
) -> Any:
    """The first true value of the condition; a process that ends meanwhile ends the waiting too."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        if process is not None and process.poll() is not None:
            found = condition()
            assert found, f"the process ended with {process.returncode} before the condition came true"
            return found
        time.sleep(0.004)
    raise AssertionError("the condition did not come true in time")


@contextlib.contextmanager
def four_hogs() -> Iterator[None]:
    """Four processes that eat the CPU beside the test."""
    eaters = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        yield
    finally:
        for eater in eaters:
            eater.kill()
            eater.wait()


def events_of(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run.events) if event.get("type") == kind] if run.events.exists() else []


def verdicts_of(run: RunDir, cause: str = "") -> list[dict[str, Any]]:
    return [event for event in events_of(run, "verdict") if cause in ("", event["cause"])]


MODEL = """
import ctypes, errno, gc, os, pathlib, subprocess, sys, threading, time, torch

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Linear(width, vocab_size)
        self.calls = self.scored = 0

    def forward(self, ids):
        self.calls += self.training
        self.scored += not self.training
        before(self)
        return self.head(self.embed(ids))

"""


def write_model(folder: Path, before: str) -> str:
    """A model of one's own whose forward pass does this first; the words that choose it. `model.calls` counts training steps."""
    body = before if "def before(" in before else f"def before(model):\n    {before}\n"
    (folder / "own.py").write_text(MODEL + body)
    return "own:Model"


def line_in(path: Path, text: str) -> int:
    """The number of the one line that holds this text."""
    (number,) = [n for n, line in enumerate(path.read_text().splitlines(), 1) if text in line]
    return number


def slot_of(run: RunDir) -> Slot:
    return read_slot(run.slot(0)) or Slot()


def losses_of(run: RunDir) -> dict[int, str]:
    """The last record of each step, as the hexadecimal of its loss."""
    return {r["step"]: float(r["train/loss"]).hex() for r in read_lines(run.metrics) if r.get("train/loss") is not None}


def processes_of(folder: Path) -> list[int]:
    """Every live process whose command line or environment names this folder."""
    found = []
    for proc in Path("/proc").iterdir():
        if not proc.name.isdigit() or int(proc.name) == os.getpid():
            continue
        try:
            words = (proc / "cmdline").read_bytes()
            state = (proc / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if str(folder).encode() in words and b"lamplighter" in words and state != "Z":
            found.append(int(proc.name))
    return found


def bare_start_s() -> float:
    """How long a Python that only says one word takes for it here and now: what a first word is measured against."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "print('x')"], check=True, capture_output=True)
    return time.monotonic() - began


@dataclass
class Heard:
    """What came out of a command, and how long it was ever quiet."""

    code: int = 0
    text: str = ""
    first_s: float = float("inf")
    longest_gap_s: float = 0.0
    before_gap: str = ""
    chunks: list[tuple[float, bytes]] = field(default_factory=list)


def listen(
    words: list[str], cwd: Path, on_pty: bool, meanwhile: Callable[[float], None] | None = None, timeout: float = 180
) -> Heard:
    """Run a command and measure its silence; `meanwhile` is called with the elapsed time, again and again."""
    reading, writing = pty.openpty() if on_pty else os.pipe()
    started = last = time.monotonic()
    child = subprocess.Popen(words, cwd=cwd, stdout=writing, stderr=writing, stdin=subprocess.DEVNULL, env=clean_env())
    os.close(writing)
    heard = Heard()
    said = ""
    while True:
        ready, _, _ = select.select([reading], [], [], 0.05)
        now = time.monotonic()
        assert now - started < timeout, f"not done after {timeout} s; so far:\n{heard.text[-2000:]}"
        if meanwhile:
            meanwhile(now - started)
        if not ready:
            continue
        try:
            data = os.read(reading, 65536)
        except OSError:
            data = b""
        gap = now - last
        if gap > heard.longest_gap_s:
            heard.longest_gap_s, heard.before_gap = gap, said
        if not data:
            break
        heard.first_s = min(heard.first_s, now - started)
        heard.chunks.append((now - started, data))
        last = now
        text = data.decode(errors="replace")
        heard.text += text
        said = (text.strip().splitlines() or [said])[-1][-160:]
    os.close(reading)
    heard.code = child.wait()
    return heard
