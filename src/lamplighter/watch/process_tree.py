"""A command and all that it started: who is there, what each counts, who has gone and how.

In:  the pid of the command, and the folder of the slots that the shim writes.
Out: a Snapshot four times a second; deaths with their exit codes, also of processes that somebody else has reaped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from lamplighter.procs import procfs
from lamplighter.procs.procfs import ProcessLook
from lamplighter.slot import Slot, read_slot

PIDFD_GET_INFO = 0xC040FF0B  # Linux 6.15 and later
PIDFD_INFO_EXIT = 8
HELLO_S = 1.5  # a Python that has not said hello by then has no shim
MOST_MEMBERS = 64
MOST_PIDFDS = 400
TREE_EVERY_S = 0.9  # in calm times


@dataclass(frozen=True)
class Process:
    """One process of the family."""

    look: ProcessLook
    slot: Slot | None = None
    ppid: int = 0

    @property
    def pid(self) -> int:
        return self.look.pid

    @property
    def worker(self) -> int:
        return self.slot.worker if self.slot else -1

    @property
    def rank(self) -> int:
        return self.slot.rank if self.slot else -1

    @property
    def words(self) -> str:
        if self.worker >= 0:
            return f"worker {self.worker} (process {self.pid})"
        if self.rank >= 0:
            return f"rank {self.rank} (process {self.pid})"
        return f"process {self.pid} ({self.look.name})"


@dataclass(frozen=True)
class Exit:
    """A process that has ended; `code` is None where nobody can know it."""

    pid: int
    code: int | None
    slot: Slot | None
    at: float
    out_of_memory: bool = False


@dataclass(frozen=True)
class Snapshot:
    """One moment of the family; the command comes first."""

    at: float  # monotonic seconds
    processes: tuple[Process, ...]
    worked_at: float  # when anybody last counted a unit of work
    lost: tuple[Exit, ...] = ()  # so far

    @property
    def quiet_s(self) -> float:
        return max(0.0, self.at - self.worked_at)

    def process(self, pid: int) -> Process | None:
        return next((process for process in self.processes if process.pid == pid), None)


def work_of(slot: Slot) -> tuple[float, ...]:
    """All that moves when work gets done."""
    return (slot.step, slot.fetches, slot.items, slot.coll_seq, slot.bar_n, slot.done, slot.compiles)


def read_slots(folder: Path) -> dict[int, Slot]:
    """Every watched process that ever said hello, by pid; `pid_start` tells whether it is still the same one."""
    found = (read_slot(path) for path in folder.glob("p*.slot"))
    return {slot.pid: slot for slot in found if slot is not None}


class ProcessTree:
    """Remembers who was there between two looks."""

    def __init__(self, pid: int, slots: Path) -> None:
        self.pid, self.slots = pid, slots
        self.parents: dict[int, int] = {}
        self.counted_at = 0.0
        self.pidfds: dict[int, int] = {}
        self.born: dict[int, float] = {}
        self.seen: dict[int, Slot] = {}
        self.counted: dict[int, tuple[float, ...]] = {}
        self.output_bytes = -1
        self.worked_at = time.monotonic()
        self.lost: list[Exit] = []
        self.gone: set[int] = set()
        self.oom = procfs.oom_kills()
        self.without_shim: set[int] = set()

    def look(self, closely: bool, output_bytes: int = -1, calm: bool = False) -> Snapshot:
        """One round over all processes; a close look costs ten times as much and is for quiet times."""
        now = time.monotonic()
        if not calm or now - self.counted_at > TREE_EVERY_S:
            self.parents, self.counted_at = procfs.parents(self.pid), now
            self._welcome(self.parents, now)
            self._miss(now)
        self._bury(now)
        processes = []
        for pid, ppid in list(self.parents.items())[:MOST_MEMBERS]:
            seen = procfs.look_closely(pid) if closely else procfs.look(pid)
            if seen.state in "XZ" and pid != self.pid:
                continue
            processes.append(Process(seen, self._slot(pid, now), ppid))
        if output_bytes > self.output_bytes:
            self.output_bytes, self.worked_at = output_bytes, now
        return Snapshot(now, tuple(processes), self.worked_at, tuple(self.lost))

    def _slot(self, pid: int, now: float) -> Slot | None:
        slot = read_slot(self.slots / f"p{pid}.slot")
        if slot is None:
            if now - self.born.get(pid, now) > HELLO_S and procfs.is_python(pid):
                self.without_shim.add(pid)
            return None
        self.seen[pid] = slot
        counted = work_of(slot)
        if counted != self.counted.get(pid):
            self.counted[pid], self.worked_at = counted, now
        return slot

    def _welcome(self, parents: dict[int, int], now: float) -> None:
        for pid in parents:
            if pid in self.gone and procfs.look(pid).state in "XZ":
                continue  # buried already; its parent has not asked for it yet
            if pid not in self.born and len(self.pidfds) < MOST_PIDFDS:
                self.born[pid] = now
                with contextlib.suppress(OSError):
                    self.pidfds[pid] = os.pidfd_open(pid)

    def _miss(self, now: float) -> None:
        """Who said hello and was gone before we looked: the slot is all that is left."""
        for name in procfs.listed(str(self.slots)):
            pid = int(name[1:-5]) if name.startswith("p") and name.endswith(".slot") and name[1:-5].isdecimal() else 0
            if pid and pid not in self.born and pid not in self.gone and not procfs.exists(pid):
                self.gone.add(pid)
                self.lost.append(Exit(pid, None, read_slot(self.slots / name), now))

    def _bury(self, now: float) -> None:
        """Who has ended since the last look, with the exit code where the kernel still tells it."""
        if not self.pidfds:
            return
        poll = select.poll()
        for fd in self.pidfds.values():
            poll.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poll.poll(0)}
        oom = procfs.oom_kills() if ended else self.oom
        for pid, fd in list(self.pidfds.items()):
            if fd not in ended or pid == self.pid:
                continue
            code = _exit_code(fd, pid)
            os.close(self.pidfds.pop(pid))
            self.born.pop(pid, None)
            self.gone.add(pid)
            self.without_shim.discard(pid)
            slot = read_slot(self.slots / f"p{pid}.slot") or self.seen.get(pid)
            self.lost.append(Exit(pid, code, slot, now, oom > self.oom and code == -9))
        self.oom = oom

    def end_survivors(self, grace_s: float = 2.0) -> None:
        """The command was stopped by us: those it has left behind are asked to end, then killed."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            alive = {pid: fd for pid, fd in self.pidfds.items() if pid != self.pid and not _readable([fd], 0)}
            for fd in alive.values():
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(fd, number)
            deadline = time.monotonic() + grace_s
            while alive and time.monotonic() < deadline and len(_readable(list(alive.values()), 0.05)) < len(alive):
                time.sleep(0.02)

    def close(self) -> None:
        for fd in self.pidfds.values():
            os.close(fd)
        self.pidfds.clear()


def _readable(fds: list[int], wait_s: float) -> list[int]:
    """Which of these processes have ended."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(wait_s * 1000)]


def _exit_code(pidfd: int, pid: int) -> int | None:
    """Negative for a signal; by the zombie while nobody has asked for it, by the kernel's memory afterwards (6.15 on)."""
    for _ in range(5):
        code = procfs.zombie_code(pid)
        code = _code_of_reaped(pidfd) if code is None else code
        if code is not None:
            return code
        time.sleep(0.004)  # between the two
    return None


def _code_of_reaped(pidfd: int) -> int | None:
    info = bytearray(64)
    struct.pack_into("=Q", info, 0, PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except OSError:
        return None
    (mask,) = struct.unpack_from("=Q", info, 0)
    if not mask & PIDFD_INFO_EXIT:
        return None
    return os.waitstatus_to_exitcode(struct.unpack_from("=i", info, 60)[0])
