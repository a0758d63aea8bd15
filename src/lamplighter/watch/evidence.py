"""The evidence behind a verdict: two looks at a process tree and the stacks taken between them, kept as a file.

In:  the first and the last Snapshot of a stall, the stacks of each process, what is usual here.
Out: GroupSample, all that a rule may look at; one JSON file of it, and from such a file the same GroupSample again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lamplighter.procs.procfs import SYSCALLS_X86_64, ProcessLook, ThreadLook
from lamplighter.procs.stacks import Frame, Stacks, ThreadStack, users_frame
from lamplighter.slot import Slot
from lamplighter.watch.process_tree import Exit, Process, Snapshot
from lamplighter.watch.status import duration


@dataclass(frozen=True)
class GroupSample:
    """What the rules see: the tree at the start and at the end of the stall, and the two newest stacks of each process."""

    first: Snapshot
    last: Snapshot
    stacks: Mapping[int, tuple[Stacks, ...]]
    usual_s: float

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


# ---------------------------------------------------------------- as a file


def to_json(sample: GroupSample) -> str:
    """Everything that `judge` was given."""
    record = {
        "usual_s": sample.usual_s,
        "first": asdict(sample.first),
        "last": asdict(sample.last),
        "stacks": {pid: [asdict(one) for one in taken] for pid, taken in sample.stacks.items()},
    }
    return json.dumps(record, indent=1, default=Slot.told)


def from_json(text: str) -> GroupSample:
    """What `judge` was given."""
    record = json.loads(text)
    stacks = {int(pid): tuple(map(_stacks, taken)) for pid, taken in record["stacks"].items()}
    return GroupSample(_snapshot(record["first"]), _snapshot(record["last"]), stacks, record["usual_s"])


def _snapshot(fields: dict[str, Any]) -> Snapshot:
    processes = tuple(Process(_look(one["look"]), _slot(one["slot"]), one["ppid"]) for one in fields["processes"])
    exits = tuple(Exit(**{**one, "slot": _slot(one["slot"])}) for one in fields["exits"])
    return Snapshot(fields["at"], processes, fields["worked_at"], exits)


def _slot(fields: dict[str, Any] | None) -> Slot | None:
    return Slot(**fields) if fields is not None else None


def _look(fields: dict[str, Any]) -> ProcessLook:
    each = tuple(ThreadLook(**{**thread, "syscall": _syscall(thread["syscall"])}) for thread in fields["each"])
    return ProcessLook(**{**fields, "syscall": _syscall(fields["syscall"]), "each": each})


def _syscall(word: str) -> str:
    """Older evidence has the numbers of x86-64 in it."""
    return SYSCALLS_X86_64.get(word, word)


def _stacks(fields: dict[str, Any]) -> Stacks:
    threads = tuple(
        ThreadStack(t["name"], tuple(Frame(**frame) for frame in t["frames"]), t["holds_gil"], t.get("tid"))
        for t in fields["threads"]
    )
    return Stacks(**{**fields, "threads": threads})
