"""What runs out: memory and disk, as slopes over minutes. Pure functions over samples.

In:  (seconds, bytes) samples of the process's memory and of the free disk.
Out: a verdict before it is too late: "will be out of memory in about X".
"""

from __future__ import annotations

from collections.abc import Sequence

from lamplighter.report import Verdict
from lamplighter.rundir import human_bytes
from lamplighter.watch.status import duration

_LEAST_S = 20.0
_LEAST_GROWTH = 0.05  # of what it was, and
_LEAST_BYTES = 50_000_000
_SOON_S = 3600.0


def slope(samples: Sequence[tuple[float, float]]) -> float:
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
    rate = slope(samples)
    if rate <= 0 or last - first < max(_LEAST_GROWTH * first, _LEAST_BYTES) or not _steady(samples):
        return None
    in_s = left_bytes / rate
    if in_s > _SOON_S:
        return None
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
