"""The evidence behind a verdict: two looks at a process tree and the stacks taken between them, kept as a file.

In:  the first and the last Snapshot of a stall, the stacks of each process, what is usual here.
Out: GroupSample, all that a rule may look at; one JSON file of it, and from such a file the same GroupSample again.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from lamplighter.procs.nvml import GpuLook, read_look
from lamplighter.procs.procfs import SYSCALLS_X86_64, ProcessLook, ThreadLook
from lamplighter.procs.stacks import Frame, Stacks, ThreadStack, users_frame
from lamplighter.procs.waits import FileLock, ThreadWait, Waits
from lamplighter.slot import Slot
from lamplighter.watch.process_tree import Exit, Process, Snapshot
from lamplighter.watch.status import duration
from lamplighter.watch.wait_graph import Gone, WaitGraph, WaitingProcess, WaitingThread, cannot_be_woken

_RECENT_S = 600.0
_AWAKE_NS = 1_000_000
_MOVING_BYTES_PER_S = 20_000
BUSY = 0.03  # share of one core that counts as running


@dataclass(frozen=True)
class GroupSample:
    """What the rules see: the tree at the start and at the end of the stall, and the two newest stacks of each process."""

    first: Snapshot
    last: Snapshot
    stacks: Mapping[int, tuple[Stacks, ...]]
    usual_s: float
    waits: Waits = field(default_factory=Waits)  # of every thread, taken with the last stacks
    cards: tuple[GpuLook, ...] = ()  # that the tree computes on, as they were seen last

    @property
    def seconds(self) -> float:
        return max(0.001, self.last.at - self.first.at)

    def main_stack(self, process: Process) -> ThreadStack | None:
        taken = self.stacks.get(process.pid, ())
        return taken[-1].threads[0] if taken and taken[-1].threads else None

    def frame(self, process: Process) -> Frame | None:
        """The innermost line of the user's code in its main thread."""
        stack = self.main_stack(process)
        return users_frame(stack) if stack else None

    def is_silent(self, process: Process) -> bool:
        """Whether its listening thread did not answer."""
        taken = self.stacks.get(process.pid, ())
        return bool(taken) and taken[-1].sampler_silent

    def cpu_share(self, process: Process) -> float:
        before = self.first.process(process.pid)
        return (process.look.cpu_s - before.look.cpu_s) / self.seconds if before else 0.0

    def moves_bytes(self, process: Process) -> bool:
        before = self.first.process(process.pid)
        return before is not None and process.moved_bytes - before.moved_bytes > _MOVING_BYTES_PER_S * self.seconds

    def is_busy(self, process: Process) -> bool:
        """It, or anybody that it has started, computes or moves bytes."""
        theirs, grew = {process.pid}, True
        while grew:
            more = {m.pid for m in self.last.processes if m.ppid in theirs} - theirs
            theirs, grew = theirs | more, bool(more)
        family = [m for m in self.last.processes if m.pid in theirs]
        return any(self.cpu_share(m) > BUSY or self.moves_bytes(m) for m in family)

    def culprit(self, process: Process, frame: Frame | None) -> dict[str, object]:
        """Who is named in a verdict, and the line."""
        named: dict[str, object] = {"pid": process.pid, **(frame.fields() if frame else {})}
        if process.worker >= 0 and process.slot is not None:
            named |= {"worker": process.worker, "item": process.slot.item}
        return {**named, "rank": process.rank} if process.rank >= 0 else named

    def at(self, process: Process) -> str:
        frame = self.frame(process)
        return f" at {frame.short}" if frame else ""

    def words(self) -> str:
        return f"no work for {duration(self.last.stalled_s)}"

    @cached_property
    def graph(self) -> WaitGraph:
        """Every thread with what it waits for."""
        gone = tuple(
            Gone(one.pid, f"{_rank_words(one)}{how_it_ended(one)}", self.last.at - one.at)
            for one in self.last.exits
            if (one.code != 0 or _rank_words(one)) and self.last.at - one.at < _RECENT_S
        )
        return WaitGraph(tuple(map(self._waiting, self.last.processes)), self.waits.commands, gone)

    @cached_property
    def unending(self) -> frozenset[tuple[int, int]]:
        """The threads whose wait nobody can end."""
        return cannot_be_woken(self.graph)

    def _waiting(self, process: Process) -> WaitingProcess:
        taken = self.stacks.get(process.pid, ())
        newest = taken[-1] if taken else None
        stacks = {thread.tid: thread for thread in newest.threads} if newest else {}
        if newest and newest.threads and process.pid not in stacks:
            stacks[process.pid] = newest.threads[0]
        before = self.first.process(process.pid)
        earlier = {thread.tid: thread for thread in before.look.each} if before else {}
        now = {thread.tid: thread for thread in process.look.each}
        threads = tuple(
            WaitingThread(
                process.pid,
                wait.tid,
                wait,
                ran=_has_run(wait, earlier.get(wait.tid), now.get(wait.tid)),
                locked=self.waits.locked.get(process.pid, ()),
                stack=stacks.get(wait.tid),
            )
            for wait in self.waits.threads.get(process.pid, ())
            if not wait.on.endswith(".ask")  # the thread that answers us
        )
        slot = process.slot
        told = newest.handlers if newest is not None else None
        caught = self.waits.handlers.get(process.pid, ())
        if (
            told is not None
        ):  # what C code handles, Python does not tell; torch's own for SIGTERM in workers only ends them
            caught = tuple(sorted({*told, *caught} - ({signal.SIGTERM} - {*told})))
        handlers = caught
        if process.is_ours:
            handlers = ()  # they stop it, and end no wait
        strangers = [
            one for one in (newest.threads[1:] if newest else ()) if not one.tid and users_frame(one) is not None
        ]
        return WaitingProcess(
            process.pid,
            process.ppid,
            process.look.name,
            process.words,
            threads,
            handlers=handlers,
            timer=newest is not None and newest.timer,
            is_forked=slot is not None and bool(slot.forked),
            collective=f"{slot.coll} at {'/'.join(slot.coll_at.split('/')[-2:])}" if slot and slot.in_coll else "",
            forked_beside=slot.forked_beside if slot else "",
            unnumbered=tuple(
                WaitingThread(process.pid, -number, ThreadWait(-number, "lock", peers=(process.pid,)), stack=one)
                for number, one in enumerate(strangers, 1)
            ),
        )


def _has_run(wait: ThreadWait, before: ThreadLook | None, now: ThreadLook | None) -> bool:
    """Whether it was on a core since its wait was looked at, or between the two looks: then it may wait for another thing."""
    if now is None or now.state in "RD":
        return True
    if wait.slices < 0 or now.slices < 0:
        return before is None or now.cpu_ns - before.cpu_ns > _AWAKE_NS
    return now.slices != wait.slices


def how_it_ended(ended: Exit) -> str:
    """was killed by signal 9 (out of memory)"""
    if ended.code is None:
        return "has ended"
    memory = ", out of memory" if ended.out_of_memory else ""
    return f"was killed by signal {-ended.code}{memory}" if ended.code < 0 else f"has ended with exit code {ended.code}"


def _rank_words(ended: Exit) -> str:
    """A rank that has left, with whatever code, may be who the others wait for."""
    return f"(rank {ended.slot.rank}) " if ended.slot is not None and ended.slot.rank >= 0 else ""


# ---------------------------------------------------------------- as a file


def to_json(sample: GroupSample) -> str:
    """Everything that `judge` was given."""
    record = {
        "usual_s": sample.usual_s,
        "first": asdict(sample.first),
        "last": asdict(sample.last),
        "stacks": {pid: [asdict(one) for one in taken] for pid, taken in sample.stacks.items()},
        "waits": asdict(sample.waits),
        "cards": [asdict(one) for one in sample.cards],
    }
    return json.dumps(record, indent=1, default=Slot.told)


def from_json(text: str) -> GroupSample:
    """What `judge` was given."""
    record = json.loads(text)
    stacks = {int(pid): tuple(map(read_stacks, taken)) for pid, taken in record["stacks"].items()}
    waits = _waits(record["waits"]) if "waits" in record else Waits()
    cards = tuple(map(read_look, record.get("cards", ())))
    first, last = _snapshot(record["first"]), _snapshot(record["last"])
    return GroupSample(first, last, stacks, record["usual_s"], waits, cards)


def _waits(fields: dict[str, Any]) -> Waits:
    threads = {int(pid): tuple(map(_wait, each)) for pid, each in fields["threads"].items()}
    locked = {int(pid): tuple(FileLock(**one) for one in each) for pid, each in fields["locked"].items()}
    commands = {int(pid): words for pid, words in fields["commands"].items()}
    return Waits(threads, locked, commands, {int(pid): tuple(each) for pid, each in fields["handlers"].items()})


def _wait(fields: dict[str, Any]) -> ThreadWait:
    return ThreadWait(**{**fields, "peers": tuple(fields["peers"])})


def _snapshot(fields: dict[str, Any]) -> Snapshot:
    processes = tuple(map(_process, fields["processes"]))
    exits = tuple(Exit(**{**one, "slot": _slot(one["slot"])}) for one in fields["exits"])
    return Snapshot(fields["at"], processes, fields["worked_at"], exits)


def _process(fields: dict[str, Any]) -> Process:
    """Older evidence counts all that the kernel did."""
    look = read_process_look(fields["look"])
    return Process(look, _slot(fields["slot"]), fields["ppid"], fields.get("moved_bytes", look.moved_bytes))


def _slot(fields: dict[str, Any] | None) -> Slot | None:
    return Slot(**fields) if fields is not None else None


def read_process_look(fields: dict[str, Any]) -> ProcessLook:
    each = tuple(ThreadLook(**{**thread, "syscall": _syscall(thread["syscall"])}) for thread in fields["each"])
    return ProcessLook(**{**fields, "syscall": _syscall(fields["syscall"]), "each": each})


def _syscall(word: str) -> str:
    """Older evidence has the numbers of x86-64 in it."""
    return SYSCALLS_X86_64.get(word, word)


def read_stacks(fields: dict[str, Any]) -> Stacks:
    threads = tuple(
        ThreadStack(t["name"], tuple(map(_frame, t["frames"])), t["holds_gil"], t.get("tid"), t.get("on"))
        for t in fields["threads"]
    )
    handlers = fields.get("handlers")
    return Stacks(**{**fields, "threads": threads, "handlers": tuple(handlers) if handlers is not None else None})


def _frame(fields: dict[str, Any]) -> Frame:
    return Frame(**{**fields, "locks": tuple(fields.get("locks", ()))})
