"""Looking at any run from its folder: slot, /proc, events and metrics become the picture of now.

In:  a run folder (ours, or one that another process owns).
Out: a Status four times a second, and the events that are new since the last look.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

from lamplighter.config import Budget
from lamplighter.procs import procfs
from lamplighter.rundir import RunDir, parse_record, read_last_lines
from lamplighter.slot import Slot, read_slot
from lamplighter.watch import redflags
from lamplighter.watch.stall import StallDetector
from lamplighter.watch.status import Status

RATE_WINDOW_S = 15.0
HISTORY_RUNS = 5
HISTORY_BYTES = 1 << 18


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
        except OSError:
            return []
        self.offset += len(data)
        *whole, self.part = (self.part + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]

    def records(self) -> list[dict[str, Any]]:
        return [record for line in self.lines() if (record := parse_record(line)) is not None]


class Observer:
    """Keeps what must be remembered between two looks."""

    def __init__(self, run: RunDir, events: Path, budget: Budget, fresh: bool) -> None:
        self.run, self.budget = run, budget
        self.picture = Status(run.name)
        self.events = Tail(events, from_end=fresh)
        self.metrics = Tail(run.metrics, from_end=fresh)
        self.samples: deque[tuple[float, float]] = deque()
        self.sampled_phase = ""
        self.quiet = StallDetector(run)
        self.history = phase_history(run)
        self.durable_at: float | None = None
        self.fresh: list[dict[str, Any]] = []
        self.before_hello: Slot | None = None

    def started(self, pid: int) -> None:
        """A process that has not reported yet is looked at from outside all the same."""
        now = time.monotonic_ns()
        self.before_hello = Slot(pid=pid, phase="start of the process", phase_since_ns=now, tick_ns=now)

    def look(self, spent_s: float = 0.0) -> list[dict[str, Any]]:
        """One look; updates `picture`, returns the new events."""
        picture = self.picture
        slot = read_slot(self.run.slot(0)) or self.before_hello
        if slot is not None and slot.pid:
            picture.process = procfs.look(slot.pid)
            self._count(slot)
            picture.quiet_s = self.quiet.look(slot, picture.usual_s)
            finding = self.quiet.finding
            picture.quiet_words = f"{finding.verdict.state}: {finding.verdict.why}" if finding else ""
        self.fresh = self.metrics.records()
        for record in self.fresh:
            self._learn(record)
        if self.budget.usd_per_hour is not None:
            picture.usd = self.budget.spent_usd(spent_s)
            picture.usd_limit = self.budget.usd
        events = self.events.records()
        for event in events:
            self._hear(event)
        picture.durable_age_s = time.time() - self.durable_at if self.durable_at else None
        return events

    def begin_again(self) -> None:
        """A new attempt of the same run: what was learned stays, what was seen goes."""
        self.picture.slot, self.picture.process = None, None
        learned, longest = self.quiet.usual_gap_s, self.quiet.longest_gap_s
        self.quiet = StallDetector(self.run)
        self.quiet.usual_gap_s, self.quiet.longest_gap_s = learned, longest
        self.samples.clear()

    def _learn(self, record: dict[str, Any]) -> None:
        picture = self.picture
        if record.get("train/loss") is not None:
            picture.losses.append(record["train/loss"])
            picture.lr = record.get("train/lr", 0.0)
            wait, whole = record.get("train/data_wait_ms", 0.0), record.get("train/dt_ms", 0.0)
            picture.data_wait = 0.9 * picture.data_wait + 0.1 * (wait / whole if whole else 0.0)
        if record.get("eval/val_loss") is not None:
            picture.val_loss, picture.val_step = record["eval/val_loss"], record["step"]

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("type") == "checkpoint":
            self.durable_at = event["t"]
        redflags.hear(self.picture.flags, event)
        if event.get("type") == "floor":
            self.picture.floor = event["nats_per_token"]

    def _count(self, slot: Slot) -> None:
        """The rate over the last seconds of this phase."""
        picture, now = self.picture, time.monotonic()
        picture.slot = slot
        if slot.phase != self.sampled_phase:
            self.sampled_phase = slot.phase
            self.samples.clear()
            picture.usual_s = self.history.get(slot.phase)
        self.samples.append((now, slot.done))
        while len(self.samples) > 2 and now - self.samples[0][0] > RATE_WINDOW_S:
            self.samples.popleft()
        (then, before), seconds = self.samples[0], now - self.samples[0][0]
        picture.rate = max(0.0, slot.done - before) / seconds if seconds > 0.4 else picture.rate if then != now else 0.0


def phase_history(run: RunDir) -> dict[str, float]:
    """How long each phase took the last time, in this run or its newest neighbours."""
    found: dict[str, float] = {}
    neighbours = [path for path in run.path.parent.glob("*/events.jsonl") if path != run.events]
    neighbours.sort(key=lambda path: path.stat().st_mtime)
    for path in [*neighbours[-HISTORY_RUNS:], run.events]:
        for event in read_last_lines(path, HISTORY_BYTES):
            if event.get("type") == "phase" and event.get("state") == "end":
                found[event.get("path", "")] = event.get("seconds", 0.0)
    return found
