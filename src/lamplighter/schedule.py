"""A learning rate that is a pure function of the step. No torch: plans draw it as well.

In:  the train section, the number of steps.
Out: `lr_at(step)`, in optimizer steps, everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lamplighter.config import Train


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then cosine or constant. Steps count from 1."""

    peak: float
    steps: int
    warmup: int
    shape: str
    floor_ratio: float

    def lr_at(self, step: int) -> float:
        if step <= self.warmup:
            return self.peak * step / self.warmup
        if self.shape == "constant" or self.steps <= self.warmup:
            return self.peak
        progress = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return self.peak * (self.floor_ratio + (1 - self.floor_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def schedule(section: Train, steps: int) -> Schedule:
    """5 % warm-up (at most 2,000 steps) unless a number is given."""
    warmup = section.warmup_steps if section.warmup_steps is not None else min(2000, max(1, round(0.05 * steps)))
    return Schedule(section.lr, steps, warmup, section.schedule, section.min_lr_ratio)
