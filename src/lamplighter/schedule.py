"""What is expected of a run: a learning rate that is a pure function of the step, and the loss of models of its size. No torch.

In:  the train section, the number of steps; parameters and vocabulary.
Out: `lr_at(step)`, in optimizer steps, everywhere; a loss at some shares of the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lamplighter.config import Train

# Training loss by progress, published for models of 108M and 334M with 30,000 tokens; as shares of ln(30,000).
_BAND = ((0.25, 6.0 / 10.309), (0.50, 5.0 / 10.309), (0.75, 4.0 / 10.309), (0.90, 3.5 / 10.309))
BAND_PARAMETERS, BAND_VOCABULARY = 80e6, (20_000, 130_000)


def expected_losses(parameters: float, vocabulary: float) -> list[tuple[float, float]]:
    """Shares of a run from scratch and the loss there; none where no table for the size is known."""
    low, high = BAND_VOCABULARY
    if parameters < BAND_PARAMETERS or not low <= vocabulary <= high:
        return []
    return [(share, part * math.log(vocabulary)) for share, part in _BAND]


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then cosine, constant, or constant and at last a straight line down (wsd). Steps count from 1."""

    peak: float
    steps: int
    warmup: int
    shape: str
    floor_ratio: float
    decay: int = 0  # of wsd: the last steps, in which it falls

    def lr_at(self, step: int) -> float:
        if step <= self.warmup:
            return self.peak * step / self.warmup
        if self.shape == "constant" or self.steps <= self.warmup:
            return self.peak
        if self.shape == "wsd":
            left = min(1.0, max(0, self.steps - step) / max(1, self.decay))
            return self.peak * (self.floor_ratio + (1 - self.floor_ratio) * left)
        progress = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return self.peak * (self.floor_ratio + (1 - self.floor_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def schedule(section: Train, steps: int) -> Schedule:
    """5 % warm-up (at most 2,000 steps) unless a number is given."""
    warmup = section.warmup_steps if section.warmup_steps is not None else min(2000, max(1, round(0.05 * steps)))
    return Schedule(
        section.lr, steps, warmup, section.schedule, section.min_lr_ratio, round(section.decay_ratio * steps)
    )
