"""A quiet spell: what is remembered while nothing gets done, when stacks are taken, and what it is judged to be.

In:  the slot at each look.
Out: how long it has been quiet, and the finding of the moment, once it has lasted longer than is usual here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path

from lamplighter.procs import procfs, stacks
from lamplighter.rundir import RunDir
from lamplighter.slot import Slot
from lamplighter.watch.diagnosis import Finding, judge
from lamplighter.watch.evidence import Observation, to_json

QUIET_S = 2.0
UNCOUNTED_QUIET_S = 3.0  # for a phase that counts nothing (an import, a model being built)
CLOSE_LOOK_S = 1.0  # from here on every look is a close one
TREE_EVERY_S = 1.0
WINDOW_S = 8.0
WITHOUT_STACKS_S = 4.5  # if they cannot be had by then, judge without
TIMES_USUAL = 4.0


class StallDetector:
    """Learns what is usual in each phase, and looks closely when it lasts longer."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.usual_gap_s: dict[str, float] = {}
        self.longest_gap_s: dict[str, float] = {}
        self.window: deque[Observation] = deque()
        self.captures: list[stacks.Stacks] = []
        self.finding: Finding | None = None
        self.phase = ""
        self.ticks = self.phase_ticks = -1
        self.gap_s = 0.0
        self.next_capture_s = 0.0
        self.capturing: threading.Thread | None = None
        self.pids: list[int] = []
        self.tree_at = 0.0

    def look(self, slot: Slot, phase_usual_s: float | None) -> float:
        """One look; the seconds since the last unit of work."""
        now = time.monotonic()
        if slot.phase != self.phase:
            self.phase, self.phase_ticks, self.gap_s = slot.phase, slot.ticks, 0.0
        if slot.ticks != self.ticks:
            self._learn(slot)
        self.gap_s = max(0.0, now - slot.tick_ns / 1e9)
        if slot.prompting or self.gap_s < CLOSE_LOOK_S:
            return self.gap_s
        self._watch_closely(slot, now)
        halted = all(any(process.state in "TtD" for process in seen.tree) for seen in list(self.window)[-2:])
        if not halted and self.gap_s < self._patience_s(slot, phase_usual_s):
            return self.gap_s
        if not slot.compiling:
            self._capture_when_due(slot)
        if self.captures or slot.compiling or self.gap_s > WITHOUT_STACKS_S:
            self.finding = judge(list(self.window), self.captures, self.usual_gap_s.get(self.phase, 0.0))
        return self.gap_s

    def keep_evidence(self, finding: Finding) -> str | None:
        """What the verdict was judged from, as a file: it can be judged again."""
        path = self.run.stacks / f"{time.strftime('%Y%m%d-%H%M%S')}-{finding.verdict.cause}.json"
        try:
            path.write_text(to_json(list(self.window), self.captures, self.usual_gap_s.get(self.phase, 0.0)))
        except OSError:  # a full disk: the sentence is still said
            return None
        return path.name

    def _learn(self, slot: Slot) -> None:
        """Work was done: the spell is over, and its length is a fact about this phase."""
        if self.ticks >= 0:
            usual = self.usual_gap_s.get(self.phase, 0.0)
            self.usual_gap_s[self.phase] = max(usual * 0.98, self.gap_s)
            self.longest_gap_s[self.phase] = max(self.longest_gap_s.get(self.phase, 0.0), self.gap_s)
        self.ticks = slot.ticks
        self.window.clear()
        self.captures, self.finding, self.next_capture_s = [], None, 0.0

    def _patience_s(self, slot: Slot, phase_usual_s: float | None) -> float:
        counted = slot.ticks > self.phase_ticks + 1
        least_s = QUIET_S if counted else max(UNCOUNTED_QUIET_S, 2 * (phase_usual_s or 0.0))
        return max(least_s, TIMES_USUAL * self.usual_gap_s.get(self.phase, 0.0))

    def _watch_closely(self, slot: Slot, now: float) -> None:
        if now - self.tree_at > TREE_EVERY_S or not self.pids or self.pids[0] != slot.pid:
            self.pids, self.tree_at = procfs.tree(slot.pid), now
        looks = [procfs.look_closely(pid) for pid in self.pids]
        self.window.append(Observation(now, slot, tuple(seen for seen in looks if seen.state != "X") or (looks[0],)))
        while now - self.window[0].at > WINDOW_S:
            self.window.popleft()

    def _capture_when_due(self, slot: Slot) -> None:
        """At once, a second time after a second (two samples must agree), then less and less often."""
        if self.gap_s < self.next_capture_s or (self.capturing is not None and self.capturing.is_alive()):
            return
        self.next_capture_s = self.gap_s + (1.0 if not self.captures else min(30.0, max(2.0, self.gap_s / 2)))
        self.capturing = threading.Thread(target=self._capture, args=(slot,), name="lamp-capture", daemon=True)
        self.capturing.start()

    def _capture(self, slot: Slot) -> None:
        """In a thread of its own: py-spy may take its two seconds, and the console must not wait."""
        taken = stacks.take(self.run.slot(0), slot.pid, ours=True)
        if taken is not None and taken.threads and self.ticks == slot.ticks:
            self.captures = [*self.captures[-1:], taken]
            keep(self.run, taken, slot)


def keep(run: RunDir, taken: stacks.Stacks, slot: Slot) -> Path | None:
    """One text file per capture."""
    path = run.stacks / (time.strftime("%Y%m%d-%H%M%S") + f"-{time.monotonic_ns() % 1000:03}.txt")
    try:
        path.write_text(f"phase {slot.phase} {slot.span}\nstep {slot.step}\nsource {taken.source}\n\n{taken.text()}")
    except OSError:  # a full disk: the sentence is still said
        return None
    return path
