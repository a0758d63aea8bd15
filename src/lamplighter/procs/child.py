"""One way to run a function in a process of its own that may hang, die, raise or take too much memory.

In:  "module:function" (called with the request and a `say` that sends a record back), a request of plain JSON, a deadline in
     seconds, a limit in bytes.
Out: its records as they come, and an Outcome: how it ended, the end of what it printed, its stacks where it hung.

The child dies with this process, is the first that the kernel takes where memory ends, and dumps its stack on SIGURG (by
faulthandler: that works while C code holds the GIL). Only what it started is ever killed: its session, and those of its
descendants that were given to us.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from lamplighter.procs import prctl, procfs, stacks
from lamplighter.procs.stacks import Frame, Stacks

_LISTEN_S = 0.1
_WEIGH_EVERY_S = 0.4
_STACK_S = 1.5  # for the stack to be written
_PYSPY_S = 5.0
_LEAVE_S = 1.0  # for its own children to end with it
_MOST_LINE = 1 << 20
_MOST_OUTPUT = 1 << 15
_MOST_STACKS = 16
_Record = dict[str, Any]
End = Literal["", "deadline", "memory", "stuck"]


class Say(Protocol):
    """Sends one record to the parent."""

    def __call__(self, **record: Any) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How it went."""

    records: list[_Record]
    code: int  # negative for a signal; ours where `ended_for` says so
    seconds: float
    output: str  # the end of what it printed
    pid: int
    done: bool = False  # the function came to its end
    error: str = ""  # it raised: "ValueError: ..."
    frames: tuple[Frame, ...] = ()  # where it raised, innermost first
    ended_for: End = ""  # why we ended it
    stacks: dict[int, Stacks] = field(default_factory=dict)  # of it and its children, where we ended it
    state: str = ""  # what it did when we ended it
    peak_bytes: int = 0  # of it and all that it started
    unreadable: int = 0  # lines of its records that could not be read
    out_of_memory: bool = False  # killed, and the kernel has killed somebody for memory meanwhile

    @property
    def last_line(self) -> str:
        return (self.output.strip().splitlines() or [""])[-1]

    def how(self) -> str:
        """Its end, in words."""
        if self.ended_for:
            return f"had not ended after {self.seconds:.0f} s"
        if self.error:
            return f"raised {self.error.splitlines()[0][:200]}"
        return f"was killed by signal {-self.code}" if self.code < 0 else f"ended with code {self.code}"


def run(
    function: str,
    request: _Record,
    *,
    deadline_s: float | None = None,
    memory_bytes: int | None = None,
    on_record: Callable[[_Record], None] = lambda record: None,
    on_tick: Callable[[float], None] = lambda seconds: None,
    is_stuck: Callable[[list[_Record]], bool] = lambda records: False,
) -> Outcome:
    """From its start to its end, to its deadline, to its limit, or until what it says shows that it is stuck.

    `on_tick` is called about ten times a second. OSError: no process could be had.
    """
    child = Child(function, request)
    ended_for: End = ""
    try:
        while not ended_for and not child.has_ended():
            for record in child.listen(_LISTEN_S):
                on_record(record)
            on_tick(child.seconds)
            if child.weigh() > (memory_bytes or sys.maxsize):
                ended_for = "memory"
            elif child.seconds > (deadline_s or float("inf")):
                ended_for = "deadline"
            elif is_stuck(child.records):
                ended_for = "stuck"
        if ended_for:
            child.take_stacks()
        else:
            child.let_children_leave()
    finally:
        heard = len(child.records)
        child.end()
    for record in child.records[heard:]:
        on_record(record)
    return child.outcome(ended_for)


class Child:
    """A function at work in its process. Whoever makes one calls `end`, whatever happens."""

    living: set[int] = set()  # the pids of all children that have not been ended

    def __init__(self, function: str, request: _Record, env: Mapping[str, str] | None = None) -> None:
        self.began = time.monotonic()
        self.before = _below_us()
        self.oom_before = procfs.oom_kills()
        handle, name = tempfile.mkstemp(prefix="lamp-stack-")
        os.close(handle)
        self.dump = Path(name)
        reading, writing = os.pipe()
        told = {"function": function, "request": request, "fd": writing, "dump": str(self.dump), "parent": os.getpid()}
        try:
            with tempfile.TemporaryFile() as stdin:  # not in its arguments, which everybody can read
                stdin.write(json.dumps(told).encode())
                stdin.seek(0)
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "lamplighter.procs.child"],  # -P: nothing out of the current folder
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[writing],
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                )
        except OSError:
            os.close(reading)
            self.dump.unlink(missing_ok=True)
            raise
        finally:
            os.close(writing)
        assert self.process.stdout is not None
        self.pid, self.words, self.printed = self.process.pid, reading, self.process.stdout.fileno()
        Child.living.add(self.pid)
        for fd in (self.words, self.printed):
            os.set_blocking(fd, False)
        self.open = [self.words, self.printed]  # the descriptors that have not come to their end
        self.records: list[_Record] = []
        self.end_record: _Record = {}
        self.pending = self.output = b""
        self.unreadable = self.peak_bytes = 0
        self.weighed_at = 0.0
        self.stacks: dict[int, Stacks] = {}
        self.state = ""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    # -------------------------------------------------------- while it lives

    def listen(self, wait_s: float) -> list[_Record]:
        """What it has said since, once there is something or the time is over; of what it prints the end is kept."""
        before = len(self.records)
        if not self.open:
            time.sleep(wait_s)  # it has closed everything, and may live on
            return []
        for fd in select.select(self.open, [], [], wait_s)[0]:
            data, at_end = _read(fd)
            if at_end:
                self.open.remove(fd)
            if fd == self.printed:
                self.output = (self.output + data)[-_MOST_OUTPUT:]
                continue
            *lines, self.pending = (self.pending + data).split(b"\n")
            for line in lines:
                self._hear(line)
            if len(self.pending) > _MOST_LINE:
                self.pending, self.unreadable = b"", self.unreadable + 1
        return self.records[before:]

    def _hear(self, line: bytes) -> None:
        try:
            record = json.loads(line) if len(line) <= _MOST_LINE else None
        except ValueError:  # counted as unreadable below
            record = None
        if not isinstance(record, dict):
            self.unreadable += 1
        elif "__end__" in record:
            self.end_record = record
        else:
            self.records.append(record)

    def has_ended(self) -> bool:
        """Without taking its number away yet: while it is ours, its process group cannot be anybody else's."""
        if not hasattr(os, "waitid"):  # macOS, before Python 3.13
            return self.process.poll() is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def weigh(self) -> int:
        """Resident bytes of it and all that it started, at the highest; looked at now and then."""
        if self.seconds - self.weighed_at > _WEIGH_EVERY_S:
            self.weighed_at = self.seconds
            now = sum(procfs.look(pid).rss_bytes for pid in (self.pid, *self.descendants()))
            self.peak_bytes = max(self.peak_bytes, now)
        return self.peak_bytes

    def descendants(self) -> list[int]:
        """Whatever came below us since it was started, itself and the families of our other children left out."""
        others = {one for pid in Child.living - {self.pid} for one in procfs.tree(pid)}
        new = _below_us() - self.before
        return [pid for pid, start in new if pid != self.pid and pid not in others]

    def take_stacks(self) -> None:
        """Its own by signal, else py-spy; those of its children by py-spy."""
        self.state = procfs.look(self.pid).words
        own = stacks.by_signal(self.dump, self.pid, _STACK_S) or _by_pyspy(self.pid)
        found = {self.pid: own, **{pid: _by_pyspy(pid) for pid in self.descendants()[:_MOST_STACKS]}}
        self.stacks = {pid: taken for pid, taken in found.items() if taken is not None}

    # -------------------------------------------------------- its end

    def let_children_leave(self) -> None:
        """Helpers of its own (a resource tracker, loader workers) notice by themselves that it is gone."""
        until = time.monotonic() + _LEAVE_S
        while time.monotonic() < until and any(_lives(pid) for pid in self.descendants()):
            time.sleep(0.02)

    def end(self) -> None:
        """It and all that it started, and nothing else; what it had still to say is heard."""
        if self.pid not in Child.living:
            return  # its number may be somebody else's by now
        for _ in range(50):
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(self.pid, signal.SIGKILL)
            left = self.descendants()
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or no longer ours
                    os.kill(pid, signal.SIGKILL)
            if not any(_lives(pid) for pid in left):
                break
            time.sleep(0.02)
        self.process.wait()
        for pid in self.descendants():
            with contextlib.suppress(ChildProcessError):  # its own parent has asked for it
                os.waitpid(pid, os.WNOHANG)
        Child.living.discard(self.pid)
        self.dump.unlink(missing_ok=True)
        self.listen(0)
        os.close(self.words)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def outcome(self, ended_for: End = "") -> Outcome:
        """All that is known about it; after `end`."""
        end, code = self.end_record, self.process.returncode
        return Outcome(
            self.records,
            code,
            self.seconds,
            self.output.decode(errors="replace"),
            self.pid,
            done=end.get("__end__") == "done",
            error=str(end.get("error", "")),
            frames=tuple(Frame(*frame) for frame in end.get("frames", [])),
            ended_for=ended_for,
            stacks=self.stacks,
            state=self.state,
            peak_bytes=self.peak_bytes,
            unreadable=self.unreadable,
            out_of_memory=code == -signal.SIGKILL and procfs.oom_kills() > self.oom_before and not ended_for,
        )


def _below_us() -> set[tuple[int, int]]:
    """Every process below this one, with its start: a number may be given again."""
    return {(pid, procfs.pid_start(pid)) for pid in procfs.tree(os.getpid())[1:]}


def _lives(pid: int) -> bool:
    return procfs.look(pid).state not in "XZ"


def _by_pyspy(pid: int) -> Stacks | None:
    return stacks.by_pyspy(pid, nonblocking=True, sampler_silent=False, deadline_s=_PYSPY_S)


def _read(fd: int) -> tuple[bytes, bool]:
    """All that is there now, at most a few megabytes; and whether that was the end of it."""
    parts: list[bytes] = []
    with contextlib.suppress(BlockingIOError):  # that was all for now
        while len(parts) < 64:
            parts.append(os.read(fd, 1 << 16))
            if not parts[-1]:
                return b"".join(parts), True
    return b"".join(parts), False


# ---------------------------------------------------------------- inside the child


def main() -> None:
    """Called as `python -m lamplighter.procs.child`; what to do comes by standard input, which is empty from then on."""
    told = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    fd: int = told["fd"]
    os.set_inheritable(fd, False)
    dump = open(told["dump"], "wb")
    faulthandler.register(signal.SIGURG, file=dump, all_threads=False, chain=False)
    prctl.belong_to(told["parent"])
    procfs.die_first()

    def say(**record: Any) -> None:
        data = json.dumps(record, default=str).encode() + b"\n"
        while data:
            data = data[os.write(fd, data) :]

    try:
        module, _, name = told["function"].partition(":")
        getattr(importlib.import_module(module), name)(told["request"], say)
    except BaseException as death:  # noqa: BLE001  SystemExit too: it is told, and the traceback is printed
        traceback.print_exc()
        frames = [(frame.file, frame.line, frame.func) for frame in stacks.frames_of_error(death)]
        say(__end__="raised", error=f"{type(death).__name__}: {death}", frames=frames)
    else:
        say(__end__="done")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # at once: torch takes a second to unload itself, and a thread that was left must not hold us


def limit_own_memory(more_bytes: int) -> None:
    """From here on this process gets so many bytes more and no further; then malloc fails, and nothing else does."""
    if sys.platform != "linux":  # others do not heed RLIMIT_AS
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [procfs.own_memory()[1] + more_bytes, *(one for one in (soft, hard) if one != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))


if __name__ == "__main__":
    main()
