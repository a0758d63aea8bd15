"""A process tree: the processes that were started and all that they started in turn, what each reports, who has ended and how.

In:  the pids of the roots (one per rank, or the watched command), and where each process keeps its slot.
Out: a Snapshot at every look; exits with their codes, also of processes that somebody else has reaped.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lamplighter.procs import procfs
from lamplighter.procs.procfs import ProcessLook
from lamplighter.slot import Slot, parse_page, read_page, read_slot

if TYPE_CHECKING:
    from lamplighter.procs.stacks import Stacks

_PIDFD_GET_INFO = 0xC040FF0B  # Linux 6.15 and later
_PIDFD_INFO_EXIT = 8
_MOST_PROCESSES = 64
_MOST_PIDFDS = 400
_TREE_EVERY_S = 0.9  # in calm times
MANY = 64  # roots of ours from which on, in calm times, /proc is asked less often than the slots are read
_MANY_LOOK_EVERY_S = 2.0
_MANY_TURNS = 4  # looks in which each slot is read once
_MANY_TREE_EVERY_S = 5.0


@dataclass(frozen=True)
class Process:
    """One process of the tree at one moment."""

    look: ProcessLook
    slot: Slot | None = None
    ppid: int = 0
    moved_bytes: int = (
        0  # by any means since it was first looked at closely, but not while it answered a question of ours
    )

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
    def is_ours(self) -> bool:
        """Whether it reports itself; the agent, which lives in other people's processes, writes down their Python."""
        return self.slot is not None and bool(self.slot.phase) and not self.slot.python

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
    """The tree at one moment; the roots come first."""

    at: float  # monotonic seconds
    processes: tuple[Process, ...]
    worked_at: float  # when anybody last counted a unit of work
    exits: tuple[Exit, ...] = ()  # so far

    @property
    def stalled_s(self) -> float:
        return max(0.0, self.at - self.worked_at)

    @property
    def cpu_s(self) -> float:
        return sum(process.look.cpu_s for process in self.processes)

    @property
    def rss_bytes(self) -> int:
        return sum(process.look.rss_bytes for process in self.processes)

    @property
    def moved_bytes(self) -> int:
        return sum(process.moved_bytes for process in self.processes)

    def process(self, pid: int) -> Process | None:
        return next((process for process in self.processes if process.pid == pid), None)


def _work_of(slot: Slot) -> tuple[float, ...]:
    """All that moves when work gets done."""
    return (slot.ticks, slot.step, slot.fetches, slot.items, slot.coll_seq, slot.bar_n, slot.done, slot.compiles)


def counts(slot: Slot) -> bool:
    """Whether it has counted a unit of work by itself (a worker's items are counted by who asks for them)."""
    return bool(slot.step or slot.fetches or slot.bar_n or slot.done)


def read_slots(folder: Path) -> dict[int, Slot]:
    """Every watched process that ever opened a slot, by pid; `pid_start` tells whether it is still the same one."""
    found = (read_slot(path) for path in folder.glob("p*.slot"))
    return {slot.pid: slot for slot in found if slot is not None}


class OtherMachines(Protocol):
    """Processes of other machines that belong to the tree."""

    def look(self, closely: bool) -> Sequence[Process]: ...
    def take(self, pids: Sequence[int]) -> dict[int, Stacks | None]:
        """Their stacks."""
        ...


class ProcessTree:
    """Remembers between two looks who was there."""

    elsewhere: OtherMachines | None = None

    def __init__(self, roots: Sequence[int], slots: Path, own: Mapping[int, Path] | None = None) -> None:
        """`own`: the slots of our own processes by pid. All others have theirs in `slots`, where the agent puts it."""
        self.roots, self.slots, self.own = tuple(roots), slots, dict(own or {})
        self.parents: dict[int, int] = {}
        self.counted_at = 0.0
        self.pidfds: dict[int, int] = {}
        self.born: dict[int, float] = {}
        self.seen: dict[int, Slot] = {}
        self.pages: dict[int, tuple[bytes, Slot | None]] = {}  # of each slot, as it was read and taken apart last
        self.looks: dict[int, ProcessLook] = {}
        self.asked_at, self.turn = 0.0, 0
        self.counted: dict[int, tuple[float, ...]] = {}
        self.moved: dict[int, tuple[int, int, int]] = {}  # bytes as the kernel counts them, answers, bytes that count
        self.output_bytes = -1
        self.worked_at = time.monotonic()
        self.exits: list[Exit] = []
        self.gone: set[int] = set()
        self.oom = procfs.oom_kills()
        for pid in self.own:  # until it speaks for itself
            now_ns = time.monotonic_ns()
            self.seen[pid] = Slot(pid=pid, phase="start of the process", phase_since_ns=now_ns, tick_ns=now_ns)

    def slot_path(self, pid: int) -> Path:
        return self.own.get(pid) or self.slots / f"p{pid}.slot"

    def look(self, closely: bool, output_bytes: int = -1, calm: bool = False) -> Snapshot:
        """One look at every process; a close one costs ten times as much and is for stalls."""
        now = time.monotonic()
        many = calm and len(self.own) > MANY
        if not calm or now - self.counted_at > (_MANY_TREE_EVERY_S if many else _TREE_EVERY_S):
            self.parents = {pid: parent for root in self.roots for pid, parent in procfs.parents(root).items()}
            self.counted_at = now
            self._notice_births(now)
            self._notice_missed(now)
        self._notice_exits(now)
        processes = []
        again = not many or now - self.asked_at > _MANY_LOOK_EVERY_S
        self.asked_at = now if again else self.asked_at
        self.turn = (self.turn + 1) % _MANY_TURNS
        for place, (pid, ppid) in enumerate(self._watched()):
            seen = self.looks.get(pid) if not again else None
            if seen is None:
                seen = self.looks[pid] = procfs.look_closely(pid) if closely else procfs.look(pid)
            if seen.state in "XZ" and pid not in self.roots:
                continue
            its_turn = not many or place == 0 or place % _MANY_TURNS == self.turn or pid not in self.pages
            slot = self._slot(pid, now) if its_turn else self.pages[pid][1]
            processes.append(Process(seen, slot, ppid, self._moved_bytes(seen, slot) if closely else 0))
        for other in self.elsewhere.look(closely) if self.elsewhere is not None else ():
            processes.append(other)
            if other.slot is not None:
                self._count(other.pid, other.slot, now)
        if output_bytes > self.output_bytes:
            self.output_bytes, self.worked_at = output_bytes, now
        return Snapshot(now, tuple(processes), self.worked_at, tuple(self.exits))

    def _watched(self) -> list[tuple[int, int]]:
        """All processes with their parents; of very many, our own ranks and the first of the others."""
        everybody = list(self.parents.items())
        if len(everybody) <= _MOST_PROCESSES:
            return everybody
        others = {pid for pid, _ in [one for one in everybody if one[0] not in self.own][:_MOST_PROCESSES]}
        return [one for one in everybody if one[0] in self.own or one[0] in others]

    def _moved_bytes(self, seen: ProcessLook, slot: Slot | None) -> int:
        """An answer makes pages dirty, which the kernel counts as writes of that process: such moments are left out."""
        answers = slot.answers if slot else 0
        before, answered, total = self.moved.get(seen.pid, (seen.moved_bytes, answers, 0))
        total += seen.moved_bytes - before if answers == answered else 0
        self.moved[seen.pid] = (seen.moved_bytes, answers, total)
        return total

    def _slot(self, pid: int, now: float) -> Slot | None:
        page, (before, known) = read_page(self.slot_path(pid)), self.pages.get(pid, (b"", None))
        if page is not None and page == before:
            return known
        slot = parse_page(page) if page is not None else self.seen.get(pid) if pid in self.own else None
        if slot is None:
            return None
        if page is not None:
            self.pages[pid] = (page, slot)
        self.seen[pid] = slot
        self._count(pid, slot, now)
        return slot

    def _count(self, pid: int, slot: Slot, now: float) -> None:
        counted = _work_of(slot)
        if counted != self.counted.get(pid):
            self.counted[pid] = counted
            self.worked_at = max(self.worked_at, min(now, slot.tick_ns / 1e9 or now))  # the agent does not say when

    def _notice_births(self, now: float) -> None:
        for pid in self.parents:
            if pid in self.gone and procfs.look(pid).state in "XZ":
                continue  # noticed already; its parent has not asked for it yet
            if pid not in self.born and len(self.pidfds) < _MOST_PIDFDS:
                self.born[pid] = now
                if (fd := open_pidfd(pid)) >= 0:
                    self.pidfds[pid] = fd

    def _notice_missed(self, now: float) -> None:
        """Who opened a slot and was gone before we looked: the slot is all that is left."""
        for name in procfs.listed(str(self.slots)):
            pid = int(name[1:-5]) if name.startswith("p") and name.endswith(".slot") and name[1:-5].isdecimal() else 0
            if pid and pid not in self.born and pid not in self.gone and not procfs.exists(pid):
                self.gone.add(pid)
                self.exits.append(Exit(pid, None, read_slot(self.slots / name), now))

    def _notice_exits(self, now: float) -> None:
        """Who has ended since the last look, with the exit code where the kernel still tells it."""
        if not self.pidfds:
            return
        ended = set(_readable(list(self.pidfds.values()), 0))
        oom = procfs.oom_kills() if ended else self.oom
        for pid, fd in list(self.pidfds.items()):
            if fd not in ended or pid in self.roots:
                continue
            code = exit_code_of(fd, pid)
            os.close(self.pidfds.pop(pid))
            self.born.pop(pid, None)
            self.gone.add(pid)
            slot = read_slot(self.slot_path(pid)) or self.seen.get(pid)
            self.exits.append(Exit(pid, code, slot, now, oom > self.oom and code == -9))
        self.oom = oom

    def end_survivors(self, grace_s: float = 2.0) -> None:
        """The roots were stopped by us: those they have left behind are asked to end, then killed."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            alive = {pid: fd for pid, fd in self.pidfds.items() if pid not in self.roots and not _readable([fd], 0)}
            for fd in alive.values():
                send_signal(fd, number)
            deadline = time.monotonic() + grace_s
            while alive and time.monotonic() < deadline and len(_readable(list(alive.values()), 0.05)) < len(alive):
                time.sleep(0.02)

    def close(self) -> None:
        for fd in self.pidfds.values():
            os.close(fd)
        self.pidfds.clear()


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 where there is none to be had."""
    if procfs.BY_PSUTIL:  # only Linux has them
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:  # it has just ended
        return -1


def send_signal(pidfd: int, number: int) -> None:
    """To this very process, whoever may have its number by now."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except OSError:  # it has just ended
        return


def _readable(fds: list[int], wait_s: float) -> list[int]:
    """Which of these processes have ended."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(wait_s * 1000)]


def exit_code_of(pidfd: int, pid: int) -> int | None:
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
    struct.pack_into("=Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:  # an older kernel does not say
        return None
    (mask,) = struct.unpack_from("=Q", info, 0)
    if not mask & _PIDFD_INFO_EXIT:
        return None
    return os.waitstatus_to_exitcode(struct.unpack_from("=i", info, 60)[0])
