"""The progress of somebody else's script: what it counts, how fast, what is left, and where its time went.

In:  snapshots of its process tree.
Out: the words of now, and seconds by name for the time report.
"""

from __future__ import annotations

from lamplighter.watch.diagnosis import BUSY
from lamplighter.watch.observe import Rate
from lamplighter.watch.process_tree import Process, Snapshot, counts
from lamplighter.watch.status import amount, clean, duration


class ScriptProgress:
    """Remembers the last seconds, and adds up where they went."""

    def __init__(self) -> None:
        self.counted = Rate()
        self.done = 0.0
        self.unit = ""
        self.steps = self.total = self.loaders = 0
        self.phase = "start"
        self.inferred = ""  # from stacks, during a stall
        self.rate = 0.0
        self.left_s: float | None = None
        self.seconds: dict[str, float] = {}
        self.before: Snapshot | None = None
        self.counts = False
        self.peak_bytes = 0

    def look(self, snapshot: Snapshot) -> None:
        """One more snapshot."""
        self.peak_bytes = max(self.peak_bytes, snapshot.rss_bytes)
        self.counts = self.counts or any(process.slot and counts(process.slot) for process in snapshot.processes)
        self._charge(snapshot)
        leader = self._leader(snapshot)
        if leader is None or leader.slot is None:
            return
        slot = leader.slot
        self.steps, self.loaders = max(self.steps, slot.step), slot.loader_workers
        self.done, total, self.unit = _count(leader)
        self.rate = self.counted.add(self.unit, snapshot.at, self.done)
        self.total = int(total) if total > 0 else 0
        left = total - self.done
        self.left_s = round(left / self.rate, 1) if left > 0 and self.rate > 0 else None

    def _leader(self, snapshot: Snapshot) -> Process | None:
        """The process whose counters tell the most: rank 0 or the one that steps."""
        counted = [m for m in snapshot.processes if m.slot is not None and m.worker < 0]
        return max(counted, key=_worth, default=None)

    def _charge(self, snapshot: Snapshot) -> None:
        """The time since the last look, by what the leader was doing in it."""
        before, self.before = self.before, snapshot
        if before is None:
            return
        leader = self._leader(snapshot) or snapshot.processes[0]
        then = before.process(leader.pid)
        slice_s = snapshot.at - before.at
        self.phase = _phase_of(leader, snapshot)
        if then is not None and leader.slot is not None and then.slot is not None:
            waited = min(slice_s, max(0.0, (leader.slot.fetch_wait_ns - then.slot.fetch_wait_ns) / 1e9))
            if leader.slot.in_fetch and leader.slot.fetch_since_ns <= then.slot.fetch_since_ns:
                waited = slice_s
            if waited > 0:
                self._add("data wait", waited)
                slice_s -= waited
        name = self.inferred or self.phase
        if name == "script":
            busy = snapshot.cpu_s - before.cpu_s
            worked = snapshot.worked_at > before.worked_at or busy > BUSY * (snapshot.at - before.at)
            name = "compute" if worked and self.counts else "running, nothing counted yet" if worked else "asleep"
        self._add(name, slice_s)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    # -- words

    def words(self, snapshot: Snapshot) -> str:
        parts = []
        if self.unit:
            of = f" of {amount(self.total, '')}" if self.total else ""
            parts.append(f"{self.unit} {amount(self.done, '')}{of}")
            if self.rate:
                parts.append(f"{self.rate:.1f}/s" if self.rate < 100 else f"{self.rate:,.0f}/s")
            if self.left_s is not None:
                parts.append(f"{duration(self.left_s)} left")
        if self.phase != "script" or self.inferred:
            parts.append(self.inferred or self.phase)
        wait = self.seconds.get("data wait", 0.0) / max(1e-9, sum(self.seconds.values()))
        if wait > 0.02:
            parts.append(f"data wait {wait:.0%}")
        memory = snapshot.rss_bytes
        others = f" in {len(snapshot.processes)} processes" if len(snapshot.processes) > 1 else ""
        parts.append(f"{memory / 1e9:.2f} GB{others}")
        return " · ".join(parts)

    def facts(self) -> dict[str, str]:
        return {"largest memory": f"{self.peak_bytes / 1e9:.2f} GB"}

    def summary(self) -> str:
        whole = sum(self.seconds.values()) or 1e-9
        rows = sorted(self.seconds.items(), key=lambda row: -row[1])[:4]
        return ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in rows)


def _worth(process: Process) -> tuple[int, int, int, int]:
    slot = process.slot
    assert slot is not None
    return (slot.step, int(slot.done > 0 or bool(slot.phase)), slot.bar_n + slot.fetches, -process.pid)


def _count(process: Process) -> tuple[float, float, str]:
    """(done, total or -1, what is counted): the script's own phase, a bar with a total, steps, fetches."""
    slot = process.slot
    assert slot is not None
    if slot.phase and slot.done:
        return slot.done, slot.total, clean(f"{slot.phase} {slot.unit}".strip())
    if slot.bar_n and slot.bar_total > 0:
        return slot.bar_n, slot.bar_total, clean(slot.bar.rstrip(": ")) or ("step" if slot.step else "bar")
    if slot.step:
        return slot.step, -1, "step"
    if slot.bar_n:
        return slot.bar_n, -1, clean(slot.bar.rstrip(": ")) or "bar"
    return (slot.fetches, slot.loader_len, "batch") if slot.fetches else (0, -1, "")


def _phase_of(leader: Process, snapshot: Snapshot) -> str:
    """From the counters alone: what the script is in."""
    slot = leader.slot
    if leader.look.stopped:
        return "stopped"
    if any(m.slot and m.slot.compiling for m in snapshot.processes):
        return "compiling"
    if slot is None:
        return "script"
    if slot.collecting:
        return "collecting garbage"
    if slot.in_coll:
        return f"in a collective ({slot.coll.split()[0]})" if slot.coll else "in a collective"
    if slot.in_fetch:
        waits = f" for worker {slot.wait_worker}" if slot.wait_worker >= 0 else ""
        return f"waiting{waits}" if slot.loader_workers else "loading a batch"
    return "script"
