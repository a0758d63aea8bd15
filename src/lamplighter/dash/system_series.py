"""What the machine did beside a run, by wall time: each card and each rank as columns, and when a card was slowed down and by what.

In:  system.jsonl of a run folder, which may be damaged, huge or somebody else's.
Out: columns of each member ("gpu0", "rank1"), bounded: a series that grows too long keeps every second point.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamplighter.rundir import RunDir, Tail, number, parse_record
from lamplighter.safe_text import clean

_MOST_MEMBERS, _MOST_NAMES, _MOST_ROWS, _MOST_PERIODS = 72, 16, 200_000, 500
_READ_BYTES = 1 << 20
_PAUSE_S = 30.0  # without a look: what was before it and what is after it are two periods
_NO_FAULT = ("", "idle", "application clocks", "sync boost", "display")  # a clock that is low by somebody's wish


@dataclass
class SlowedPeriod:
    """A card's clock held down, from one look to another."""

    begin: float
    end: float
    by: str


@dataclass
class MemberSeries:
    """One card or one rank."""

    times: array[float] = field(default_factory=lambda: array("d"))
    columns: dict[str, array[float]] = field(default_factory=dict)
    slowed: list[SlowedPeriod] = field(default_factory=list)

    def add(self, t: float, values: Mapping[str, float], slowed_by: str) -> None:
        for name in values.keys() - self.columns.keys():
            if len(self.columns) < _MOST_NAMES:
                self.columns[name] = array("d", [math.nan]) * len(self.times)
        before = self.times[-1] if self.times else t
        self.times.append(t)
        for name, column in self.columns.items():
            column.append(values.get(name, math.nan))
        self._slow(before, t, slowed_by)
        if len(self.times) > _MOST_ROWS:
            self.times = self.times[::2]
            self.columns = {name: column[::2] for name, column in self.columns.items()}

    def _slow(self, before: float, t: float, by: str) -> None:
        last = self.slowed[-1] if self.slowed else None
        if by and last is not None and last.by == by and last.end == before and t - before < _PAUSE_S:
            last.end = t
        elif by and len(self.slowed) < _MOST_PERIODS:
            self.slowed.append(SlowedPeriod(t, t, by))

    def of(self, name: str) -> NDArray[np.float64]:
        return np.array(self.columns.get(name, array("d")), dtype=np.float64)


class SystemSeries:
    """All of a run, up to where its file has been read."""

    def __init__(self, run: RunDir) -> None:
        self.tail = Tail(run.system)
        self._forget()

    def _forget(self) -> None:
        self.members: dict[str, MemberSeries] = {}
        self.damaged = 0

    @property
    def values(self) -> int:
        return sum(len(one.times) * (1 + len(one.columns)) for one in self.members.values())

    @property
    def began(self) -> float:
        return min((one.times[0] for one in self.members.values() if one.times), default=0.0)

    def update(self) -> None:
        """Read what is new; no file is written where there is neither a card nor a rank."""
        before = self.tail.replaced
        for lines in self.tail.blocks(_READ_BYTES):
            if self.tail.replaced != before:
                self._forget()
                before = self.tail.replaced
            for line in filter(None, lines):
                self._take(parse_record(line))

    def _take(self, record: Mapping[str, Any] | None) -> None:
        kind = next((one for one in ("gpu", "rank") if record is not None and type(record.get(one)) is int), None)
        t = number(record.get("t"), math.nan) if record is not None else math.nan
        if record is None or kind is None or math.isnan(t) or not 0 <= record[kind] < 1 << 20:
            self.damaged += 1
            return
        member = f"{kind}{record[kind]}"
        if member not in self.members and len(self.members) >= _MOST_MEMBERS:
            return
        values = {str(name): found for name, value in record.items() if "/" in name and not math.isnan(found := number(value, math.nan))}  # fmt: skip
        said = record.get("sys/gpu_slowed_by")
        reasons = [] if not isinstance(said, str) else [one for one in clean(said)[:200].split(", ") if one not in _NO_FAULT]  # fmt: skip
        self.members.setdefault(member, MemberSeries()).add(t, values, ", ".join(reasons))

    def named(self, kind: str) -> dict[str, MemberSeries]:
        """The cards ("gpu") or the ranks ("rank"), in the order of their numbers."""
        found = [name for name in self.members if name.startswith(kind)]
        return {name: self.members[name] for name in sorted(found, key=lambda one: int(one[len(kind) :]))}
