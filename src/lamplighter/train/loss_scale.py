"""The loss scale of fp16: gradients that would vanish in 16 bits are made larger, and divided again in the update.

In:  whether a step's gradients were finite, as tensors: nobody waits for a GPU to know.
Out: the scale of the next step; both its numbers as tensors by name, kept with the optimizer's state in every checkpoint.

An overflow is no bad batch: the scale was too large for it. The step is passed over, the scale halved, and it is counted apart.
A loss that is not finite is a bad batch and says nothing about the scale. All scales are powers of two, so that scaling
changes no bit of a gradient that fits.
"""

from __future__ import annotations

import torch

from lamplighter.report import Verdict
from lamplighter.train.optimizers import Optimizer, Shares
from lamplighter.train.ranks import World

FIRST, GROW_AFTER = 2.0**16, 2000  # as torch's GradScaler has them: doubled after so many steps without an overflow
LEAST = 2.0**-14  # gradients that do not fit at this scale are no matter of scale: such a step is a bad batch
_NAMES = ("loss_scale.scale", "loss_scale.good_steps")


class LossScale:
    """The factor of the loss, and for how many steps it has held."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(FIRST, device=device)
        self.good_steps = torch.tensor(0.0, device=device)

    @torch.no_grad()
    def update(self, finite: torch.Tensor) -> None:
        """After a step; `finite`: whether its loss and its gradient norm were."""
        loss, norm = finite[0], finite[1]
        overflow, learned = loss & ~norm & (self.scale > LEAST), loss & norm
        count = self.good_steps + learned.float()
        grows = count >= GROW_AFTER
        factor = torch.where(overflow, 0.5, torch.where(grows, 2.0, 1.0))
        self.good_steps.copy_(torch.where(overflow | grows, 0.0, count))
        self.scale.mul_(factor)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(zip(_NAMES, (self.scale, self.good_steps), strict=True))


class ScaledOptimizer:
    """An optimizer whose gradients carry the loss scale: it is divided out where they are looked at or used."""

    def __init__(self, inner: Optimizer, loss_scale: LossScale) -> None:
        self.inner, self.loss_scale = inner, loss_scale

    def grad_norm(self) -> torch.Tensor:
        return self.inner.grad_norm() / self.loss_scale.scale

    def step(self, lr: float, grad_scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None) -> None:
        scale = self.loss_scale.scale
        self.inner.step(lr, scale if grad_scale is None else scale * grad_scale, found_inf)

    def share(self, world: World, grad_scale: torch.Tensor | None = None) -> None:
        if isinstance(self.inner, Shares):
            scale = self.loss_scale.scale
            self.inner.share(world, scale if grad_scale is None else scale * grad_scale)

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {**self.inner.state_tensors(), **self.loss_scale.tensors}

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, kept in self.loss_scale.tensors.items():
            kept.copy_(tensors[name])
        self.inner.load_state_tensors({name: one for name, one in tensors.items() if name not in _NAMES})


def collapsed(step: int, scale: float) -> Verdict:
    """The scale has fallen below 1: it is not the scale that is to blame."""
    return Verdict(
        "broken",
        "loss_scale",
        f"the loss scale of fp16 has fallen to {scale:g} at step {step}: gradients do not fit into 16 bits any more",
        "a lower train.lr or more train.warmup_steps; --train.dtype fp32 shows whether the model itself diverges",
        culprit={"step": step},
    )
