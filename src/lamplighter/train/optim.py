"""Parameter groups, AdamW, and a learning rate that is a pure function of the step.

In:  the train section, a model, the number of steps.
Out: an optimizer and `lr_at(step)`; both in optimizer steps, everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

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


def make_optimizer(model: torch.nn.Module, section: Train) -> torch.optim.AdamW:
    """Weight decay on matrices, none on vectors (norms, biases)."""
    wanted = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for _, p in wanted if p.dim() >= 2]
    vectors = [p for _, p in wanted if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=section.lr, betas=(section.beta1, section.beta2), fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter name: 'exp_avg.<name>', 'exp_avg_sq.<name>', 'step.<name>'."""
    found = {}
    for name, parameter in model.named_parameters():
        for kind, tensor in optimizer.state.get(parameter, {}).items():
            found[f"{kind}.{name}"] = tensor.detach().contiguous()
    return found


def load_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Put the state back, tensor for tensor; a missing one is an error, never a fresh start."""
    for name, parameter in model.named_parameters():
        state = {}
        for kind in ("step", "exp_avg", "exp_avg_sq"):
            tensor = tensors[f"{kind}.{name}"]
            kept = torch.zeros_like(parameter) if kind != "step" else torch.zeros_like(tensor, device=parameter.device)
            state[kind] = kept.copy_(tensor)
        optimizer.state[parameter] = state
