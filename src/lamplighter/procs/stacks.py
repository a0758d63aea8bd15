"""The stacks of a process: asked from its listening thread, or taken by py-spy with a deadline.

In:  a pid, and the FIFO of its listening thread where it has one.
Out: Stacks, main thread first, and the innermost line of the user's code. Nothing is stopped.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lamplighter.procs.procfs import look
from lamplighter.rundir import RunDir, read_json

SAMPLER_DEADLINE_S = 0.5
PYSPY_DEADLINE_S = 2.0
SIGNAL_DEADLINE_S = 0.3
TGKILL = 234  # x86-64
DUMPED = re.compile(r'File "(.*)", line (\d+) in (.*)')
LIBRARY_PARTS = (
    "/lib/python3",
    "/site-packages/",
    "/dist-packages/",
    "<frozen",
    "<string>",
    "/lib64/python3",
    "/torchinductor",
)
OURS = str(Path(__file__).resolve().parents[1]) + os.sep
PROGRAMS = re.compile(r"/bin/[^/]+$")  # torchrun, accelerate: launchers, not the user's code
OUR_THREADS = ("lamp-listener", "lamp-batches", "lamp-saver", "lamp-stopper", "lamp-writer")


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    func: str
    numbers: Mapping[str, int] = field(default_factory=dict, compare=False)  # its whole-number locals: loop counters

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.func}"

    @property
    def short(self) -> str:
        """The last two parts of the path are enough to find it."""
        return f"{'/'.join(Path(self.file).parts[-2:])}:{self.line} ({self.func})"


@dataclass(frozen=True)
class ThreadStack:
    """One thread, innermost frame first."""

    name: str
    frames: tuple[Frame, ...]
    holds_gil: bool | None = None
    tid: int | None = None  # of the kernel, where it is known


@dataclass(frozen=True)
class Stacks:
    """All threads of a process, main thread first, and how they were got."""

    threads: tuple[ThreadStack, ...]
    source: str
    sampler_silent: bool = False
    at: float = 0.0  # monotonic seconds

    def text(self) -> str:
        blocks = []
        for thread in self.threads:
            gil = " (holds the GIL)" if thread.holds_gil else ""
            blocks.append("\n".join([f"thread {thread.name}{gil}", *(f"  {frame}" for frame in thread.frames)]))
        return "\n\n".join(blocks) + "\n"


def take(run: RunDir, rank: int, pid: int) -> Stacks | None:
    """Ask the listening thread; if it is silent (GIL held in C, or stopped), py-spy with a deadline."""
    state, asked = look(pid).state, False
    if state not in "TtDZX":
        asked = send(run, rank, f"stacks {(number := time.monotonic_ns())}")
        answered = _answer(run, rank, number) if asked else None
        if answered is not None:
            return answered
    found = by_pyspy(pid, nonblocking=state in "TtD", sampler_silent=asked or state in "TtD")
    return found or (_by_signal(run, rank, pid) if state in "RS" else None)


def _answer(run: RunDir, rank: int, number: int) -> Stacks | None:
    deadline = time.monotonic() + SAMPLER_DEADLINE_S
    while time.monotonic() < deadline:
        answer = read_json(run.stack_answer(rank))
        if answer is not None and answer["id"] == number:
            threads = tuple(
                ThreadStack(item["name"], tuple(Frame(*frame) for frame in item["frames"]))
                for item in answer["threads"]
            )
            return Stacks(threads, "listener", at=time.monotonic())
        time.sleep(0.002)
    return None


def _by_signal(run: RunDir, rank: int, pid: int) -> Stacks | None:
    """Where ptrace is not allowed and the listener is silent (so no bytecode runs): the main thread's own dump on SIGURG."""
    path = run.stack_dump(rank)
    if sys.platform != "linux" or not _catches(pid, signal.SIGURG) or not path.exists():
        return None
    before = path.stat().st_size
    ctypes.CDLL(None).syscall(TGKILL, pid, pid, int(signal.SIGURG))
    deadline = time.monotonic() + SIGNAL_DEADLINE_S
    while time.monotonic() < deadline:
        text = path.read_bytes()[before:].decode("utf-8", "replace")
        frames = tuple(Frame(file, int(line), func) for file, line, func in DUMPED.findall(text))
        if frames and text.endswith("\n"):
            return Stacks((ThreadStack("MainThread", frames),), "signal", True, time.monotonic())
        time.sleep(0.01)
    return None


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal: without one it must not be sent."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def send(run: RunDir, rank: int, request: str) -> bool:
    """Put a line into the child's FIFO; False if nobody has it open."""
    try:
        fd = os.open(run.fifo(rank), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(fd, request.encode() + b"\n")
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def by_pyspy(pid: int, nonblocking: bool, sampler_silent: bool) -> Stacks | None:
    """From outside, with a deadline; None where it is not allowed."""
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return None
    command = [program, "dump", "--json", "--pid", str(pid)] + (["--nonblocking"] if nonblocking else [])
    try:
        done = subprocess.run(command, capture_output=True, timeout=PYSPY_DEADLINE_S, check=True)
        dumped = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError, OSError):
        return None
    threads = tuple(
        ThreadStack(
            item.get("thread_name") or str(item["thread_id"]),
            tuple(Frame(frame["filename"], frame["line"], frame["name"]) for frame in item["frames"]),
            bool(item.get("owns_gil")),
        )
        for item in dumped
    )
    main_first = sorted(threads, key=lambda thread: thread.name != "MainThread")
    return Stacks(tuple(main_first), "py-spy", sampler_silent, time.monotonic())


def is_library(frame: Frame) -> bool:
    """Whether it is neither the user's code nor ours."""
    return any(part in frame.file for part in LIBRARY_PARTS) and not frame.file.startswith(OURS)


def users_frame(stack: ThreadStack) -> Frame | None:
    """The innermost frame of the user's code."""
    mine = (frame for frame in own_frames(stack) if not is_library(frame) and not frame.file.startswith(OURS))
    return next((frame for frame in mine if not PROGRAMS.search(frame.file)), None)


def own_frames(stack: ThreadStack) -> tuple[Frame, ...]:
    """Without what a forked child inherited: below its `_bootstrap` lies the stack of its parent."""
    for place, frame in enumerate(stack.frames):
        if frame.func == "_bootstrap" and frame.file.endswith(
            ("multiprocessing/process.py", "multiprocess/process.py")
        ):
            return stack.frames[: place + 1]
    return stack.frames


def culprit(stack: ThreadStack) -> Frame | None:
    """The innermost frame of the user's code; else of ours; else the innermost at all."""
    ours = next((frame for frame in stack.frames if frame.file.startswith(OURS) and not is_library(frame)), None)
    return users_frame(stack) or ours or (stack.frames[0] if stack.frames else None)
