"""Looking at a run from its folder: the slot, the events and the metrics become the status of now.

In:  a run folder (ours, or one that another process owns) and the slot of its first rank.
Out: a Status, and the events that are new since the last look.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamplighter.config import Budget
from lamplighter.procs.procfs import ProcessLook
from lamplighter.rundir import RunDir, parse_record, read_last_lines
from lamplighter.slot import Slot
from lamplighter.watch.status import Status, hear_flag

_RATE_WINDOW_S = 15.0
_HISTORY_RUNS = 5
_HISTORY_BYTES = 1 << 18


class Tail:
    """Complete new lines of a growing file; a half-written line waits for its end."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self.path = path
        self.offset = path.stat().st_size if from_end and path.exists() else 0
        self.part = b""

    def lines(self, limit_bytes: int = 1 << 20) -> list[str]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(limit_bytes)
        except OSError:  # not there yet, or gone
            return []
        self.offset += len(data)
        *whole, self.part = (self.part + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]

    def records(self) -> list[dict[str, Any]]:
        return [record for line in self.lines() if (record := parse_record(line)) is not None]


class Rate:
    """How fast something is counted, over the last seconds of one phase."""

    def __init__(self) -> None:
        self.samples: deque[tuple[float, float]] = deque()
        self.counted = ""  # what is counted
        self.per_s = 0.0

    def add(self, counted: str, now: float, done: float) -> float:
        if counted != self.counted:
            self.counted = counted
            self.samples.clear()
        self.samples.append((now, done))
        while len(self.samples) > 2 and now - self.samples[0][0] > _RATE_WINDOW_S:
            self.samples.popleft()
        (then, before), seconds = self.samples[0], now - self.samples[0][0]
        self.per_s = max(0.0, done - before) / seconds if seconds > 0.4 else self.per_s if then != now else 0.0
        return self.per_s


class Observer:
    """Keeps what must be remembered between two looks."""

    def __init__(self, run: RunDir, events: Sequence[Path], budget: Budget) -> None:
        self.run, self.budget = run, budget
        self.status = Status(run.name)
        self.events = [Tail(path, from_end=True) for path in events]
        self.metrics = Tail(run.metrics, from_end=True)
        self.rate = Rate()
        self.history = _phase_history(run)
        self.durable_at: float | None = None
        self.fresh: list[dict[str, Any]] = []  # metrics of the last look

    def look(
        self, slot: Slot | None, process: ProcessLook | None, stalled_s: float, spent_s: float
    ) -> list[tuple[int, dict[str, Any]]]:
        """One look; updates `status`, returns the new events with the number of the file that they come from."""
        status = self.status
        if slot is not None and slot.pid:
            status.slot, status.process, status.stalled_s = slot, process, stalled_s
            status.rate = self.rate.add(slot.phase, time.monotonic(), slot.done)
            status.usual_s = self.history.get(slot.phase)
        self.fresh = self.metrics.records()
        for record in self.fresh:
            self._learn(record)
        if self.budget.usd_per_hour is not None:
            status.usd = self.budget.spent_usd(spent_s)
            status.usd_limit = self.budget.usd
        events = [(number, event) for number, tail in enumerate(self.events) for event in tail.records()]
        for _, event in events:
            self._hear(event)
        status.durable_age_s = time.time() - self.durable_at if self.durable_at else None
        return events

    def begin_again(self) -> None:
        """A new attempt of the same run: what was learned stays, what was seen goes."""
        self.status.slot, self.status.process = None, None
        self.rate = Rate()

    def _learn(self, record: dict[str, Any]) -> None:
        status = self.status
        if record.get("train/loss") is not None:
            status.losses.append(record["train/loss"])
            status.lr = record.get("train/lr", 0.0)
            wait, whole = record.get("train/data_wait_ms", 0.0), record.get("train/dt_ms", 0.0)
            status.data_wait = 0.9 * status.data_wait + 0.1 * (wait / whole if whole else 0.0)
        if record.get("eval/val_loss") is not None:
            status.val_loss, status.val_step = record["eval/val_loss"], record["step"]

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("type") == "checkpoint":
            self.durable_at = event["t"]
        hear_flag(self.status.flags, event)
        if event.get("type") == "floor":
            self.status.floor = event["nats_per_token"]


def _phase_history(run: RunDir) -> dict[str, float]:
    """How long each phase took the last time, in this run or its newest neighbours."""
    found: dict[str, float] = {}
    neighbours = [path for path in run.path.parent.glob("*/events.jsonl") if path != run.events]
    neighbours.sort(key=lambda path: path.stat().st_mtime)
    for path in [*neighbours[-_HISTORY_RUNS:], run.events]:
        for event in read_last_lines(path, _HISTORY_BYTES):
            if event.get("type") == "phase" and event.get("state") == "end":
                found[event.get("path", "")] = event.get("seconds", 0.0)
    return found
