"""The stacks of a process, and whose lines they are: asked from its listening thread, taken by py-spy, or dumped on a signal.

In:  a pid, and its slot, beside which its listening thread has its FIFO; a traceback; what faulthandler wrote.
Out: Stacks, main thread first; frames, innermost first, and the one to name: the user's, else ours, else the innermost.
"""

from __future__ import annotations

import ctypes
import json
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from lamplighter.procs.procfs import TGKILL, catches, look
from lamplighter.read_back import parse_object, read_whole

_SAMPLER_DEADLINE_S = 0.5
_PYSPY_DEADLINE_S = 2.0
_SIGNAL_DEADLINE_S = 0.3
_DUMPED = re.compile(r'File "(.*)", line (\d+) in (.*)')
_LIBRARY_PARTS = (
    "<eval_with_key>",
    "/lib/python3",
    "/site-packages/",
    "/dist-packages/",
    "<frozen",
    "<string>",
    "/lib64/python3",
    "/torchinductor",
)
OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_PROGRAMS = re.compile(r"/bin/[^/]+$")  # torchrun, accelerate: launchers, not the user's code
OUR_THREADS = ("lamp-listener", "lamp-batches", "lamp-saver", "lamp-stopper", "lamp-writer")
_DEPTH = 12  # frames that a finding keeps


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    func: str
    numbers: Mapping[str, int] = field(default_factory=dict, compare=False)  # its whole-number locals: loop counters
    locks: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)  # that its code can name (own_stacks.py)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.func}"

    @property
    def short(self) -> str:
        """The last two parts of the path are enough to find it."""
        return f"{'/'.join(Path(self.file).parts[-2:])}:{self.line} ({self.func})"

    @property
    def place(self) -> str:
        """In full, as findings name it."""
        return f"{self.file}:{self.line} ({self.func})"

    @property
    def text(self) -> str:
        """The line itself."""
        return linecache.getline(self.file, self.line).strip()

    def fields(self) -> dict[str, Any]:
        """As a culprit."""
        return {"file": self.file, "line": self.line, "func": self.func}


@dataclass(frozen=True)
class ThreadStack:
    """One thread, innermost frame first."""

    name: str
    frames: tuple[Frame, ...]
    holds_gil: bool | None = None
    tid: int | None = None  # of the kernel, where it is known
    on: Mapping[str, Any] | None = field(
        default=None, compare=False
    )  # the object that it waits for, where the process says it


@dataclass(frozen=True)
class Stacks:
    """All threads of a process, main thread first, and how they were got."""

    threads: tuple[ThreadStack, ...]
    source: str
    sampler_silent: bool = False
    at: float = 0.0  # monotonic seconds
    handlers: tuple[int, ...] | None = None  # signals that its own code handles; None where it does not say
    timer: bool = False  # an interval timer runs in it

    @property
    def main(self) -> tuple[Frame, ...]:
        return self.threads[0].frames if self.threads else ()

    def text(self) -> str:
        blocks = []
        for thread in self.threads:
            gil = " (holds the GIL)" if thread.holds_gil else ""
            blocks.append("\n".join([f"thread {thread.name}{gil}", *(f"  {frame}" for frame in thread.frames)]))
        return "\n\n".join(blocks) + "\n"


# ---------------------------------------------------------------- taking them


def take(slot: Path, pid: int, ours: bool) -> Stacks | None:
    """Ask the process's own listening thread; if it is silent (GIL held in C, stopped, none there), py-spy with a deadline.

    `ours`: a process of ours, whose SIGURG is free for the last resort.
    """
    state, asked = look(pid).state, False
    if state not in "TtDZX":
        number = time.monotonic_ns()
        asked = send(slot, f"stacks {number}")
        answered = _answer(slot, number, _SAMPLER_DEADLINE_S) if asked else None
        if answered is not None:
            return answered
    silent = asked or (ours and state in "TtD")
    found = by_pyspy(pid, nonblocking=state in "TtD", sampler_silent=silent)
    return found or (by_signal(slot.with_suffix(".dump"), pid) if ours and state in "RS" else None)


def ask(slot: Path, deadline_s: float) -> Stacks | None:
    """The process's own word on its threads. None: nobody listens there, or nobody answers (GIL held in C, state T or D)."""
    number = time.monotonic_ns()
    return _answer(slot, number, deadline_s) if send(slot, f"stacks {number}") else None


def _answer(slot: Path, number: int, deadline_s: float) -> Stacks | None:
    deadline = time.monotonic() + deadline_s
    while True:
        late = time.monotonic() >= deadline  # one look more after the last sleep
        try:
            answer = parse_object(read_whole(slot.with_suffix(".stacks.json")))
        except OSError:  # not written yet
            answer = None
        if answer is not None and answer.get("id") == number:
            try:
                return _told(answer["answer"])
            except (LookupError, TypeError, ValueError, AttributeError):  # damaged: as if nobody had answered
                return None
        if late:
            return None
        time.sleep(0.002)


def _told(answer: Mapping[str, Any]) -> Stacks:
    """What own_stacks.py has written in the process."""
    threads = tuple(
        ThreadStack(
            item["name"],
            tuple(
                Frame(file, line, func, numbers, tuple(locks)) for file, line, func, numbers, locks in item["frames"]
            ),
            tid=item["tid"],
            on=item["on"],
        )
        for item in answer["threads"]
    )
    handlers = tuple(answer["handlers"])
    return Stacks(threads, "listener", at=time.monotonic(), handlers=handlers, timer=answer["timer"])


def send(slot: Path, request: str) -> bool:
    """Put a line into the FIFO of the process behind a slot; False if nobody has it open, or it is full."""
    try:
        fd = os.open(slot.with_suffix(".ask"), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # nobody listens: it has not opened it yet, or is gone
        return False
    try:
        return os.write(fd, request.encode() + b"\n") > 0
    except OSError:  # full, because nobody reads
        return False
    finally:
        os.close(fd)


def by_signal(dump: Path, pid: int, deadline_s: float = _SIGNAL_DEADLINE_S) -> Stacks | None:
    """Where ptrace is not allowed and no bytecode runs: the main thread's own dump, by faulthandler on SIGURG."""
    if not dump.exists():
        return None
    before, deadline = dump.stat().st_size, time.monotonic() + deadline_s
    if not _interrupt(pid):
        return None
    while time.monotonic() < deadline:
        text = dump.read_bytes()[before:].decode("utf-8", "replace")
        frames = _frames_in_dump(text)
        if frames and text.endswith("\n"):
            return Stacks((ThreadStack("MainThread", tuple(frames)),), "signal", True, time.monotonic())
        time.sleep(0.01)
    return None


def _interrupt(pid: int) -> bool:
    """SIGURG to the main thread; never to a process that does not expect it."""
    if sys.platform != "linux" or not catches(pid, signal.SIGURG):
        return False
    ctypes.CDLL(None).syscall(TGKILL, pid, pid, int(signal.SIGURG))
    return True


def py_spy() -> str | None:
    """The program, beside our Python or on the path."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def by_pyspy(pid: int, nonblocking: bool, sampler_silent: bool, deadline_s: float = _PYSPY_DEADLINE_S) -> Stacks | None:
    """From outside, with a deadline; None where it is not allowed."""
    program = py_spy()
    if program is None:
        return None
    command = [program, "dump", "--json", "--pid", str(pid)] + (["--nonblocking"] if nonblocking else [])
    try:
        done = subprocess.run(command, capture_output=True, timeout=deadline_s, check=True)
        dumped = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError, OSError):  # no permission, no time, or the process is gone
        return None
    threads = tuple(
        ThreadStack(
            item.get("thread_name") or str(item["thread_id"]),
            tuple(Frame(frame["filename"], frame["line"], frame["name"]) for frame in item["frames"]),
            bool(item.get("owns_gil")),
            item.get("os_thread_id"),
        )
        for item in dumped
    )
    main_first = sorted(threads, key=lambda thread: thread.tid != pid and thread.name != "MainThread")
    return Stacks(tuple(main_first), "py-spy", sampler_silent, time.monotonic())


# ---------------------------------------------------------------- frames from elsewhere


def _frames_in_dump(text: str) -> list[Frame]:
    """The stack that faulthandler wrote of one thread."""
    return [Frame(file, int(line), func) for file, line, func in _DUMPED.findall(text)]


def frames_of_error(error: BaseException) -> list[Frame]:
    """The stack of an exception, innermost first."""
    entries = reversed(traceback.extract_tb(error.__traceback__))
    return [Frame(entry.filename, entry.lineno or 0, entry.name) for entry in entries]


def frames_of(frame: FrameType | None) -> list[Frame]:
    """The stack of a running thread of this process, innermost first."""
    found = []
    while frame is not None:
        found.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


# ---------------------------------------------------------------- whose line


def _is_ours(frame: Frame) -> bool:
    return frame.file.startswith(OURS)


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Neither Python's, nor an installed library's or program's, nor ours."""
    return not any(part in file for part in _LIBRARY_PARTS) and not file.startswith(OURS) and not _PROGRAMS.search(file)


def users_line(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame of the user's code."""
    return next((frame for frame in frames if is_users(frame.file)), None)


def tried_files(taken: Iterable[Stacks]) -> list[str]:
    """The files that threads try to lock again and again, as the processes themselves tell."""
    told = [thread.on or {} for one in taken for thread in one.threads]
    return [str(on["path"]) for on in told if on.get("kind") == "file lock" and on.get("path")]


def users_frame(stack: ThreadStack) -> Frame | None:
    """The innermost frame of the user's code in a thread."""
    return users_line(own_frames(stack))


def own_frames(stack: ThreadStack) -> tuple[Frame, ...]:
    """Without what a forked child inherited: below its `_bootstrap` lies the stack of its parent."""
    for place, frame in enumerate(stack.frames):
        if frame.func == "_bootstrap" and frame.file.endswith(
            ("multiprocessing/process.py", "multiprocess/process.py")
        ):
            return stack.frames[: place + 1]
    return stack.frames


def line_to_name(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame of the user's code; else of ours; else the innermost at all."""
    found = list(frames)
    ours = next((frame for frame in found if _is_ours(frame)), None)
    return users_line(found) or ours or (found[0] if found else None)


def culprit(stack: ThreadStack) -> Frame | None:
    """The line to name in a thread."""
    return line_to_name(own_frames(stack))


def culprit_fields(frames: list[Frame]) -> dict[str, Any]:
    """The fields of a finding that say where."""
    frame = line_to_name(frames)
    return {} if frame is None else {**frame.fields(), "stack": [one.place for one in frames[:_DEPTH]]}
