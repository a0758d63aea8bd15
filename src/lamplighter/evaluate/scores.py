"""A score as it is kept: its value, its standard error, how many items, and what guessing would give.

In:  numbers, one per item.
Out: TaskScore, and the words for it. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_TWO_SIDED_95 = 1.96
_TAIL = 0.025  # of guessing, on each side: together 95 %


@dataclass(frozen=True)
class TaskScore:
    """One number about a model."""

    name: str
    value: float
    stderr: float | None
    n: int
    chance: float | None = None
    higher_is_better: bool = True

    def record(self) -> dict[str, Any]:
        """As it is kept: the verdict is for readers of the file."""
        return {**asdict(self), "verdict": self.verdict}

    @staticmethod
    def of(record: Mapping[str, Any]) -> TaskScore:
        """As it was kept."""
        return TaskScore(**{name: record[name] for name in TaskScore.__dataclass_fields__})

    @property
    def verdict(self) -> str:
        """Against guessing, by the exact binomial test (two-sided, 95 %); empty where guessing has no level.

        Not by the standard error, which is 0 where all of a few items came out alike.
        """
        if self.chance is None or not self.higher_is_better or not 0 < self.chance < 1:
            return ""
        if min(self.chance, 1 - self.chance) ** self.n > _TAIL:  # whatever had come out, guessing could have done it
            return "too few items to tell"
        hits = round(self.value * self.n, 6)  # a draw of two models is half a hit: it counts for neither side
        if _at_least(math.floor(hits), self.n, self.chance) <= _TAIL:
            return "above chance"
        missed = self.n - math.ceil(hits)
        return "below chance" if _at_least(missed, self.n, 1 - self.chance) <= _TAIL else "not above chance"

    def words(self) -> str:
        error = "" if self.stderr is None else f" ± {shown(self.stderr)}"
        chance = "" if self.chance is None else f", chance {self.chance:.4f}"
        chance += f": {self.verdict}" if self.verdict else ""
        return f"{shown(self.value)}{error} (n {self.n:,}{chance})"


def shown(value: float) -> str:
    """Four decimals; a perplexity of a model that knows nothing has many digits that say nothing."""
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.2e}"


def _at_least(hits: int, n: int, share: float) -> float:
    """How probable so many hits or more are by guessing. (By logarithms: the terms themselves are too large and too small.)"""
    right, wrong, all_ = math.log(share), math.log1p(-share), math.lgamma(n + 1)
    return math.fsum(math.exp(all_ - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * right + (n - k) * wrong) for k in range(hits, n + 1))  # fmt: skip


def mean_score(
    name: str, values: Sequence[float], chance: float | None = None, higher_is_better: bool = True
) -> TaskScore:
    """The mean of one number per item; the standard error is that of the sample."""
    if not values:
        raise ValueError(f"{name}: there is no item to average")
    mean = math.fsum(values) / len(values)
    return TaskScore(name, mean, stderr_of(values, mean), len(values), chance, higher_is_better)


def stderr_of(values: Sequence[float], mean: float) -> float | None:
    """sqrt(sample variance / n); None for a single item, which says nothing about its spread."""
    if len(values) < 2:
        return None
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def ratio_score(name: str, tops: Sequence[float], bottoms: Sequence[float], chance: float | None = None) -> TaskScore:
    """A sum over a sum (nats over tokens, bits over bytes); its standard error by the delta method over the items."""
    total = math.fsum(bottoms)
    value = math.fsum(tops) / total
    if len(tops) < 2:
        return TaskScore(name, value, None, len(tops), chance, higher_is_better=False)
    rests = [top - value * bottom for top, bottom in zip(tops, bottoms, strict=True)]
    spread = math.fsum(rest * rest for rest in rests) * len(tops) / (len(tops) - 1)
    return TaskScore(name, value, math.sqrt(spread) / total, len(tops), chance, higher_is_better=False)


def exponential(name: str, of: TaskScore) -> TaskScore:
    """exp of a mean number of nats: a perplexity, its standard error by the delta method."""
    value = math.exp(min(of.value, 700.0))
    error = None if of.stderr is None else value * of.stderr
    return TaskScore(name, value, error, of.n, None, higher_is_better=False)


def wilson(wins: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson's: it stays within 0 and 1, and holds for few)."""
    if n == 0:
        return 0.0, 1.0
    z2, share = _TWO_SIDED_95**2, wins / n
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _TWO_SIDED_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)
