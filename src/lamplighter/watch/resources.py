"""What runs out while work gets done: memory and disk, by slopes over minutes; and time, by one recompile after another.

In:  a Snapshot of the process tree at each look, the sizes of saved checkpoints.
Out: a verdict before it is too late ("out of memory in about X"), once in an attempt. The rules are pure functions over samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamplighter.procs import procfs
from lamplighter.report import Verdict
from lamplighter.rundir import free_bytes, human_bytes
from lamplighter.watch.end_diagnosis import failing_children_verdict, storm_verdict
from lamplighter.watch.process_tree import ProcessTree, Snapshot
from lamplighter.watch.stall import take_all
from lamplighter.watch.status import duration

_LOOK_EVERY_S = 2.5
_RECOMPILES, _RECOMPILES_S = 3, 10.0

_LEAST_S = 20.0
_FLAT_S, _FLAT_SHARE = 15.0, 0.3  # memory that has grown by less of its own rate for so long is no leak any more
_FAILING, _FAILING_S = 6, 4.0  # so many children with the same exit code within so many seconds
_LEAST_GROWTH = 0.05  # of what it was, and
_LEAST_BYTES = 50_000_000
_SOON_S = 3600.0


class ResourceWatch:
    """Remembers the last minutes of one attempt, and what was said of them."""

    def __init__(self) -> None:
        self.checkpoint_bytes = 0
        self.begin_again()

    def begin_again(self) -> None:
        """A new attempt."""
        self.memory: deque[tuple[float, float]] = deque(maxlen=240)
        self.recompiles: deque[tuple[float, int]] = deque()
        self.said: set[str] = set()
        self.looked_at: float | None = None

    def hear(self, event: dict[str, Any]) -> None:
        """A checkpoint tells how large the next one will be."""
        if event.get("type") == "checkpoint":
            self.checkpoint_bytes = event.get("bytes", 0)

    def look(self, tree: ProcessTree, snapshot: Snapshot, may_grow: bool, folder: Path) -> list[Verdict]:
        """What is new; memory and disk are looked at every few seconds. `may_grow`: loading grows by right."""
        found = [self._look_at_compiles(tree, snapshot), self._look_at_exits(tree, snapshot)]
        self.looked_at = snapshot.at if self.looked_at is None else self.looked_at
        if may_grow:
            self.memory.clear()
        if snapshot.at - self.looked_at >= _LOOK_EVERY_S:
            self.looked_at = snapshot.at
            if not may_grow:
                self.memory.append((snapshot.at, float(snapshot.rss_bytes)))
            found.append(memory_verdict(list(self.memory), procfs.memory_left()))
            if self.checkpoint_bytes:
                found.append(disk_verdict(free_bytes(folder), self.checkpoint_bytes))
        fresh = [verdict for verdict in found if verdict is not None and verdict.cause not in self.said]
        self.said |= {verdict.cause for verdict in fresh}
        return fresh

    def _look_at_compiles(self, tree: ProcessTree, snapshot: Snapshot) -> Verdict | None:
        """Many recompiles in a short time are work of a kind, and are said all the same."""
        counted = [(process.slot.recompiles, process) for process in snapshot.processes if process.slot]
        count, process = max(counted, key=lambda one: one[0], default=(0, None))
        if process is None or not count or "recompile_storm" in self.said:
            return None
        self.recompiles.append((snapshot.at, count))
        while snapshot.at - self.recompiles[0][0] > _RECOMPILES_S:
            self.recompiles.popleft()
        since, before = self.recompiles[0]
        if count - before < _RECOMPILES:
            return None
        taken = take_all(tree, (process,), everybody=False).get(process.pid)
        return storm_verdict(process, count - before, snapshot.at - since, taken)

    def _look_at_exits(self, tree: ProcessTree, snapshot: Snapshot) -> Verdict | None:
        """Processes that fail one after another print and start, which looks like work."""
        failed = [one for one in snapshot.exits if one.code and one.code > 0 and snapshot.at - one.at < _FAILING_S]
        if len(failed) < _FAILING or len({one.code for one in failed}) > 1 or "pool_init_fails" in self.said:
            return None
        main = snapshot.processes[0]
        return failing_children_verdict(main, failed, _FAILING_S, take_all(tree, (main,), everybody=True).get(main.pid))


def _slope(samples: Sequence[tuple[float, float]]) -> float:
    """Bytes per second, by least squares."""
    count = len(samples)
    mean_t = sum(t for t, _ in samples) / count
    mean_y = sum(y for _, y in samples) / count
    spread = sum((t - mean_t) ** 2 for t, _ in samples)
    return sum((t - mean_t) * (y - mean_y) for t, y in samples) / spread if spread else 0.0


def memory_verdict(samples: Sequence[tuple[float, float]], left_bytes: float) -> Verdict | None:
    """Growing steadily, and the end is in sight."""
    if len(samples) < 8 or samples[-1][0] - samples[0][0] < _LEAST_S:
        return None
    first, last = samples[0][1], samples[-1][1]
    rate = _slope(samples)
    if rate <= 0 or last - first < max(_LEAST_GROWTH * first, _LEAST_BYTES) or not _steady(samples):
        return None
    lately = [bytes for at, bytes in samples if samples[-1][0] - at <= _FLAT_S]
    in_s = left_bytes / rate
    if in_s > _SOON_S or lately[-1] - lately[0] < _FLAT_SHARE * rate * _FLAT_S:
        return None  # not soon; or it has stopped growing
    why = f"memory grows by {human_bytes(rate)} a second ({human_bytes(first)} to {human_bytes(last)}): out of memory in about {duration(in_s)}"
    return Verdict(
        "waste",
        "leak_rss",
        why,
        "look for lists that keep tensors; a resume starts small again",
        evidence=(f"{human_bytes(left_bytes)} left",),
    )


def _steady(samples: Sequence[tuple[float, float]]) -> bool:
    """Each quarter of the time holds more than the one before: a leak, not a step up."""
    size = len(samples) // 4
    means = [sum(y for _, y in samples[i * size : (i + 1) * size]) / size for i in range(4)]
    return means[0] < means[1] < means[2] < means[3]


def disk_verdict(free_bytes: int, checkpoint_bytes: int) -> Verdict | None:
    """The next save may not fit."""
    if not checkpoint_bytes or free_bytes > 2 * checkpoint_bytes:
        return None
    why = f"{human_bytes(free_bytes)} of disk are free, a checkpoint takes {human_bytes(checkpoint_bytes)}"
    return Verdict("waste", "disk_full", why, "free some space, or lower save.keep")
