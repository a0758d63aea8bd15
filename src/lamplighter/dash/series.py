"""The numbers of a run as columns, read as they grow, and a bounded number of points of any stretch of them.

In:  metrics.jsonl of a run folder, which may be damaged, huge or somebody else's.
Out: numpy columns (the last value of each step and name); at most so many points with the highest and the lowest of each bucket kept.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamplighter.dash.system_series import SystemSeries
from lamplighter.rundir import RunDir, Tail, parse_record

MOST_POINTS = 4000  # of one panel
_MOST_NAMES = 64  # of one run: a folder of somebody else must not fill the memory
_MOST_ROWS = 5_000_000
_MOST_STEP, _MOST_VALUE = 1 << 53, sys.float_info.max
_READ_BYTES = 1 << 18  # at once: what fits the cache of a processor is parsed quickest
_KEPT_VALUES = 12_000_000  # over all runs: 96 MB
Floats = NDArray[np.float64]


class RunSeries:
    """The columns of one run, up to where its file has been read."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.system = SystemSeries(run)
        self.tail = Tail(run.metrics)
        self._forget()

    def _forget(self) -> None:
        self.damaged = 0  # lines that are no records
        self.steps, self.times, self.attempts = array("d"), array("d"), array("d")
        self.columns: dict[str, array[float]] = {}
        self.scores: dict[str, dict[int, float]] = {}  # of validations, by step
        self.version = 0

    @property
    def values(self) -> int:
        return len(self.steps) * (3 + len(self.columns)) + self.system.values

    @property
    def newest_t(self) -> float:
        return self.times[-1] if self.times else 0.0

    @property
    def began(self) -> float:
        """The first moment of which anything is known: where the wall clock of the page begins."""
        return min([t for t in (self.times[0] if self.times else 0.0, self.system.began) if t > 0], default=0.0)

    def update(self) -> int:
        """Read what is new; how many records that were."""
        self.system.update()
        found, before = 0, self.tail.replaced
        for lines in self.tail.blocks(_READ_BYTES):
            if self.tail.replaced != before:
                self._forget()  # another file: the run began anew
                before = self.tail.replaced
            found += self._take_many(lines)
        self.version += bool(found)
        return found

    def _take_many(self, lines: list[bytes]) -> int:
        """As _take does one by one, in an eighth of the time: lines in a row that are alike are parsed and kept as columns."""
        from pydantic_core import from_json  # three times as quick as json, with the same numbers

        try:
            records = from_json(b"[" + b",".join(filter(None, lines)) + b"]")
        except ValueError:  # one of them is damaged: which one is found below
            records = []
        if len(records) != sum(map(bool, lines)):
            return sum(map(self._take, lines))
        found = 0
        for block in _alike(records):
            found += len(block) if self._add_block(block) else sum(map(self._take_record, block))
        return found

    def _add_block(self, records: list[dict[str, Any]]) -> bool:
        """Rows with the same names, each after the one before; False, with nothing changed, for all that is not so plain."""
        first = records[0]
        if len(records) < 4 or not isinstance(first, dict) or not {"step", "t", "attempt"} <= first.keys():
            return False
        try:
            found = dict(zip(first, zip(*map(itemgetter(*first), records), strict=True), strict=True))
        except (KeyError, TypeError):  # as many names, but others; or no object
            return False
        columns = {name: _plain_numbers(values) for name, values in found.items() if "/" in name}
        steps, times, attempts = found["step"], _plain_numbers(found["t"]), _plain_numbers(found["attempt"])
        if not any(name.startswith("train/") for name in columns):
            return False
        if set(map(type, steps)) != {int} or min(steps) < 0 or max(steps) >= _MOST_STEP:
            return False
        at = np.array(steps, dtype=np.float64)
        before = self.steps[-1] if self.steps else -1.0
        if at[0] <= before or np.any(np.diff(at) <= 0) or len(self.steps) + len(at) > _MOST_ROWS:
            return False
        if times is None or attempts is None or any(one is None for one in columns.values()):
            return False
        if len(self.columns.keys() | columns.keys()) > _MOST_NAMES:
            return False
        for name in columns.keys() - self.columns.keys():
            self.columns[name] = array("d", [math.nan]) * len(self.steps)
        for column, values in ((self.steps, at), (self.times, times), (self.attempts, np.nan_to_num(attempts))):
            column.frombytes(values.tobytes())
        for name, column in self.columns.items():
            fresh = columns.get(name)
            column.frombytes((np.full(len(at), math.nan) if fresh is None else fresh).tobytes())
        return True

    def _take(self, line: bytes) -> bool:
        return bool(line) and self._take_record(parse_record(line))

    def _take_record(self, record: object) -> bool:
        values = _numbers(record) if isinstance(record, dict) else None
        if not isinstance(record, dict) or values is None:
            self.damaged += 1
            return False
        step = int(record["step"])
        if any(name.startswith("train/") for name in values):
            self._add_row(step, record, values)
        else:
            for name, value in values.items():
                if name in self.scores or len(self.scores) < _MOST_NAMES:
                    self.scores.setdefault(name, {})[step] = value
        return True

    def _add_row(self, step: int, record: Mapping[str, Any], values: Mapping[str, float]) -> None:
        if self.steps and step <= self.steps[-1]:
            self._cut(step)
        if len(self.steps) >= _MOST_ROWS:
            return
        t, attempt = record.get("t"), record.get("attempt")
        self.steps.append(step)
        self.times.append(t if isinstance(t, int | float) and math.isfinite(t) else math.nan)
        self.attempts.append(float(attempt) if isinstance(attempt, int) else 0.0)
        if values.keys() - self.columns.keys():
            for name in sorted(values.keys() - self.columns.keys())[: max(0, _MOST_NAMES - len(self.columns))]:
                self.columns[name] = array("d", [math.nan]) * (len(self.steps) - 1)
        for name, column in self.columns.items():
            column.append(values.get(name, math.nan))

    def _cut(self, step: int) -> None:
        """Steps that are done again, and those after them, are as if they had not been."""
        at = int(np.searchsorted(np.frombuffer(self.steps), step))
        for column in (self.steps, self.times, self.attempts, *self.columns.values()):
            del column[at:]
        for name, scores in self.scores.items():
            self.scores[name] = {scored: value for scored, value in scores.items() if scored < step}

    def finite(self, name: str) -> Floats:
        """The finite values of a column, or of validations in the order of their steps."""
        scores = self.scores.get(name, {})
        values = np.array(self.columns.get(name) or [scores[step] for step in sorted(scores)], dtype=np.float64)
        found: Floats = values[np.isfinite(values)]
        return found

    def median(self, name: str) -> float | None:
        values = self.finite(name)
        return float(np.median(values)) if len(values) else None

    # ---------------------------------------------------------------- what is shown of it

    def x_of(self, kind: str, usd_per_hour: float) -> Floats:
        """The x of every row: step, tokens, hours of training (the time between attempts left out), dollars, or hours by the clock."""
        steps = np.array(self.steps)
        if kind == "step":
            return steps
        if kind == "wall":
            return (np.array(self.times) - self.began) / 3600
        if kind == "tokens":
            return np.array(self.columns.get("train/tokens", self.steps))
        seconds = np.array(self.columns.get("train/dt_ms", array("d"))) / 1000
        passed = np.diff(np.array(self.times), prepend=self.times[0] if self.times else 0.0)
        between = np.diff(np.array(self.attempts), prepend=self.attempts[0] if self.attempts else 0.0) != 0
        if len(seconds) == len(passed):
            passed = np.where(between | ~np.isfinite(passed) | (passed < 0), np.nan_to_num(seconds), passed)
        hours = np.cumsum(np.nan_to_num(np.maximum(passed, 0.0))) / 3600
        return hours if kind == "time" else hours * usd_per_hour

    def points(self, name: str, x: Floats, low: float = -math.inf, high: float = math.inf, most: int = MOST_POINTS) -> tuple[Floats, Floats]:  # fmt: skip
        """At most so many points of a stretch, the extremes kept. "sys/gpu_util@gpu0" is a card's, by hours of the clock."""
        if "@" in name:
            return self._of_member(name, (low, high, most))
        if name in self.scores and name not in self.columns:
            return self._scored(name, x, low, high)
        y = np.array(self.columns.get(name, array("d")))
        if not len(y):
            return np.empty(0), np.empty(0)
        inside = (x >= low) & (x <= high)
        if name != "train/loss":  # measured only now and then: no gap is meant; of a loss, it is
            inside &= ~np.isnan(y)
        return thin(x[inside], y[inside], most)

    def _of_member(self, curve: str, window: tuple[float, float, int]) -> tuple[Floats, Floats]:
        (low, high, most), (name, _, member) = window, curve.partition("@")
        found = self.system.members.get(member)
        if found is None or name not in found.columns:
            return np.empty(0), np.empty(0)
        x = (np.array(found.times) - self.began) / 3600
        inside = (x >= low) & (x <= high)
        return thin(x[inside], found.of(name)[inside], most)

    def at_time(self, t: float) -> int:
        """The row that was the newest one then."""
        return max(0, int(np.searchsorted(np.frombuffer(self.times), t, side="right")) - 1) if self.times else 0

    def _scored(self, name: str, x: Floats, low: float, high: float) -> tuple[Floats, Floats]:
        """Validations have a step; where the x is another one, that of the nearest row."""
        steps = sorted(self.scores[name])
        at = np.array(steps, dtype=np.float64)
        if len(self.steps) and len(x) == len(self.steps):
            rows = np.array(self.steps)
            at = x[np.clip(np.searchsorted(rows, at), 0, len(rows) - 1)]
        y = np.array([self.scores[name][step] for step in steps])
        inside = (at >= low) & (at <= high)
        return thin(at[inside], y[inside], MOST_POINTS)

    def rows_since(self, step: float, most: int) -> Iterator[dict[str, float]]:
        """The newest rows after a step, for whoever looks on."""
        at = int(np.searchsorted(np.frombuffer(self.steps), step, side="right")) if self.steps else 0
        for row in range(max(at, len(self.steps) - most), len(self.steps)):
            yield {"step": self.steps[row], **{name: column[row] for name, column in self.columns.items()}}


def _alike(records: list[Any]) -> Iterator[list[Any]]:
    """In the order that they have: those in a row with as many names."""
    sizes = [len(one) if isinstance(one, dict) else -1 for one in records]
    at = 0
    for _, group in groupby(sizes):
        end = at + len(list(group))
        yield records[at:end]
        at = end


def _plain_numbers(values: Sequence[Any]) -> Floats | None:
    """As an array, null as NaN; None where one is no finite number."""
    kinds = set(map(type, values))
    if not kinds <= {float, int, type(None)}:
        return None
    try:
        found = np.array(values, dtype=np.float64)
    except OverflowError:  # a whole number of 400 digits
        return None
    missing = values.count(None) if type(None) in kinds else 0
    return found if np.isfinite(found).sum() == len(values) - missing else None


def _numbers(record: Mapping[str, Any]) -> dict[str, float] | None:
    """The numbers of a record, null as NaN; None where it is damaged. As read_back.is_metric has it, in a third of its time."""
    step = record.get("step")
    if step.__class__ is not int or not 0 <= step < _MOST_STEP:
        return None
    values: dict[str, float] = {}
    for name, value in record.items():
        if "/" in name:
            if value.__class__ is float or value.__class__ is int:
                if not -_MOST_VALUE <= value <= _MOST_VALUE:
                    return None
                values[name] = float(value)
            elif value is None:
                values[name] = math.nan
            else:
                return None
    return values


def thin(x: Floats, y: Floats, most: int) -> tuple[Floats, Floats]:
    """The first, the lowest, the highest and the last point of each of most/4 buckets: no spike is ever lost.

    A quarter of the buckets is divided by powers, so that on a logarithmic axis the first decades have points too.
    """
    if len(x) <= most:
        return x, y
    buckets = max(1, most // 4)
    even, early = np.linspace(0, len(x), buckets - buckets // 4 + 1), np.geomspace(1, len(x), buckets // 4 + 1)[:-1]
    edges = np.unique(np.concatenate([even, early]).astype(np.int64))
    buckets = len(edges) - 1
    width = int(np.max(np.diff(edges)))
    index = np.minimum(edges[:-1, None] + np.arange(width)[None, :], (edges[1:] - 1)[:, None])
    values = y[index]
    lowest = index[np.arange(buckets), np.argmin(np.where(np.isnan(values), np.inf, values), axis=1)]
    highest = index[np.arange(buckets), np.argmax(np.where(np.isnan(values), -np.inf, values), axis=1)]
    kept = np.unique(np.concatenate([edges[:-1], lowest, highest, edges[1:] - 1]))
    return x[kept], y[kept]


class SeriesCache:
    """The columns of the runs that were looked at last; older ones are read again when they are wanted."""

    def __init__(self, most_values: int = _KEPT_VALUES) -> None:
        self.most_values = most_values
        self.kept: OrderedDict[str, RunSeries] = OrderedDict()

    def of(self, run: RunDir) -> RunSeries:
        key = str(run.path)
        series = self.kept.pop(key, None) or RunSeries(run)
        series.update()
        self.kept[key] = series
        while len(self.kept) > 1 and sum(one.values for one in self.kept.values()) > self.most_values:
            self.kept.popitem(last=False)
        return series
