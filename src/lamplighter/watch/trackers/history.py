"""A run's metrics as a tracker wants them: each step once, in order, however often the run was killed and redone.

In:  the lines of metrics.jsonl, in the order in which they were written.
Out: what is to be sent, and to which tracker run. Steps that were done again with the same result are dropped; the first one
     with another result (a roll-back, --resume checkpoint-N, a device that is not exact) begins a linked tracker run there.

It is a pure function of the lines: a follower that starts again reads them from the beginning and knows what it had known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lamplighter import read_back

# Measured anew by whoever does the step again; everything else is a result.
_TIMES = ("train/dt_ms", "train/tok_per_sec", "train/mfu", "train/data_wait_ms")
_MEASURED = ("sys/", "cost/", "time/")


@dataclass(frozen=True)
class TrackerEntry:
    """The numbers of one line; null in the file is NaN here. `late`: of an earlier step than the newest, with an x of its own."""

    branch: int
    step: int
    t: float
    values: Mapping[str, float]
    late: bool = False


@dataclass(frozen=True)
class Branch:
    """A linked tracker run begins: NAME~2, at this step, because of this."""

    number: int
    from_step: int
    why: str
    t: float = 0.0


class RunHistory:
    """Remembers a hash of every result that was sent."""

    def __init__(self) -> None:
        self.branch = 1
        self.newest = 0  # step of the newest training record of this branch
        self.seen: dict[tuple[int, str], int] = {}  # step and kind -> hash of its results
        self.scored: set[int] = set()

    def take(self, record: Mapping[str, Any]) -> list[Branch | TrackerEntry]:
        """What a line means; nothing where it is damaged, empty, or known already."""
        if not read_back.is_metric(record):
            return []
        step = int(record["step"])
        values = {name: math.nan if value is None else float(value) for name, value in record.items() if "/" in name}
        if not values:
            return []
        kind = _kind(values)
        key, found = (step, kind), _hash_of(values)
        before = self.seen.get(key)
        if before == found:
            return []
        told: list[Branch | TrackerEntry] = []
        if before is not None:
            told.append(replace(self._begin_branch(step, kind), t=float(record.get("t") or 0.0)))
        self.seen[key] = found
        if kind != "train" and "eval/iter" in values:  # every set of scores says it: it is a point of its own only once
            if step in self.scored:
                values = {name: value for name, value in values.items() if name != "eval/iter"}
            self.scored.add(step)
        late = step < self.newest
        if kind == "train":
            self.newest = max(self.newest, step)
        told.append(TrackerEntry(self.branch, step, float(record.get("t") or 0.0), values, late))
        return told

    def _begin_branch(self, step: int, kind: str) -> Branch:
        """From here on nothing of the old future counts."""
        self.branch += 1
        self.seen = {
            key: value for key, value in self.seen.items() if key[0] < step or (key[0] == step and key[1] != kind)
        }
        self.scored = {at for at in self.scored if at < step}
        self.newest = max((at for at, _ in self.seen), default=0)
        return Branch(
            self.branch, step, f"step {step} was done again with another result; the run before keeps the old one"
        )


def _kind(values: Mapping[str, float]) -> str:
    """Training and validation of one step are two lines; so is each further set of names."""
    return "train" if any(name.startswith("train/") for name in values) else " ".join(sorted(values))


def _hash_of(values: Mapping[str, float]) -> int:
    results = [
        (name, "nan" if math.isnan(value) else value)
        for name, value in sorted(values.items())
        if name not in _TIMES and not name.startswith(_MEASURED)
    ]
    return hash(tuple(results))
