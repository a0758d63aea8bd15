"""A quiet spell on paper: the observations and stacks behind a verdict, kept in the folder and read back to judge again.

In:  a window of observations, the stacks taken in it, what is usual.
Out: one JSON file; and from such a file exactly what `verdict.judge` was given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lamplighter.procs.procfs import COMPILERS, SYSCALLS_X86_64, ProcessLook, ThreadLook
from lamplighter.procs.stacks import Frame, Stacks, ThreadStack
from lamplighter.slot import Slot

ANSWER_OVERHEAD_BYTES = 16384  # the request, and the pages that a small file makes dirty


@dataclass(frozen=True)
class Observation:
    """One moment of a run: the slot, and the process with all its descendants (it comes first)."""

    at: float  # monotonic seconds
    slot: Slot
    tree: tuple[ProcessLook, ...]

    @property
    def main(self) -> ProcessLook:
        return self.tree[0]

    @property
    def quiet_s(self) -> float:
        return max(0.0, self.at - self.slot.tick_ns / 1e9)

    @property
    def cpu_s(self) -> float:
        return sum(process.cpu_s for process in self.tree)

    @property
    def moved_bytes(self) -> int:
        """By any means, less what our own questions have moved."""
        asked = self.slot.answered_bytes + ANSWER_OVERHEAD_BYTES * self.slot.answers
        return sum(process.moved_bytes for process in self.tree) - asked

    @property
    def compilers(self) -> list[ProcessLook]:
        return [process for process in self.tree[1:] if process.name in COMPILERS]


def to_json(window: Sequence[Observation], captures: Sequence[Stacks], usual_s: float) -> str:
    """First and last look are what the rules compare."""
    kept = [window[0], window[-1]] if len(window) > 1 else list(window)
    record = {"usual_s": usual_s, "window": [asdict(one) for one in kept], "stacks": [asdict(one) for one in captures]}
    return json.dumps(record, indent=1, default=Slot.told)


def from_json(text: str) -> tuple[list[Observation], list[Stacks], float]:
    """What `judge` was given."""
    record = json.loads(text)
    window = [Observation(o["at"], Slot(**o["slot"]), tuple(map(_process, o["tree"]))) for o in record["window"]]
    return window, [_stacks(one) for one in record["stacks"]], record["usual_s"]


def _process(fields: dict[str, Any]) -> ProcessLook:
    each = tuple(ThreadLook(**{**thread, "syscall": _syscall(thread["syscall"])}) for thread in fields["each"])
    return ProcessLook(**{**fields, "syscall": _syscall(fields["syscall"]), "each": each})


def _syscall(word: str) -> str:
    """Older evidence has the numbers of x86-64 in it."""
    return SYSCALLS_X86_64.get(word, word)


def _stacks(fields: dict[str, Any]) -> Stacks:
    threads = tuple(
        ThreadStack(t["name"], tuple(Frame(**frame) for frame in t["frames"]), t["holds_gil"])
        for t in fields["threads"]
    )
    return Stacks(**{**fields, "threads": threads})
