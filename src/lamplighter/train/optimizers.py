"""What an optimizer must do, and AdamW. The learning rate, a pure function of the step, is in schedule.py.

In:  a model, the train section; gradients.
Out: changed weights; the optimizer's state as tensors by name, for a checkpoint.

A new optimizer is a file of its own and one line in config.OPTIMIZERS, which names the function that builds it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch.optim.adamw import adamw as fused_adamw

from lamplighter.config import Train
from lamplighter.schedule import Schedule as Schedule
from lamplighter.schedule import schedule as schedule

_EPS = 1e-8
KINDS = ("step", "exp_avg", "exp_avg_sq")
_State = dict[str, torch.Tensor]  # by KINDS


class Optimizer(Protocol):
    """How the state may be split between ranks is in its line of config.OPTIMIZERS."""

    def grad_norm(self) -> torch.Tensor:
        """Of all gradients together, on their device."""
        ...

    def step(self, lr: float, grad_scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None) -> None:
        """Update the weights from the gradients divided by `grad_scale`; where `found_inf` is 1, change nothing.

        Both are tensors, so that a GPU is never waited for. A parameter without a gradient is left as it is.
        """
        ...

    def zero_grad(self) -> None: ...

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """'<kind>.<parameter name>' -> the live tensor; nothing for a parameter that never had a gradient."""
        ...

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Put the state back, tensor for tensor; a missing one is an error, never a fresh start."""
        ...


@dataclass(frozen=True)
class Group:
    """Parameters by name, with one weight decay."""

    parameters: dict[str, torch.nn.Parameter]
    weight_decay: float


class AdamW:
    """torch's fused AdamW in its functional form: an Optimizer object loads the compiler, 1.5 s of every start."""

    def __init__(self, groups: list[Group], betas: tuple[float, float]) -> None:
        self.groups, self.betas = groups, betas
        self.state: dict[str, _State] = {}

    def grad_norm(self) -> torch.Tensor:
        return torch.nn.utils.get_total_norm(
            [p.grad for group in self.groups for p in group.parameters.values() if p.grad is not None]
        )

    @torch.no_grad()
    def step(self, lr: float, grad_scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None) -> None:
        for group in self.groups:
            with_grad = {name: p for name, p in group.parameters.items() if p.grad is not None}
            if not with_grad:
                continue
            states = [self._state(name, p) for name, p in with_grad.items()]
            fused_adamw(
                list(with_grad.values()),
                [p.grad for p in with_grad.values() if p.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                max_exp_avg_sqs=[],
                state_steps=[state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr,
                weight_decay=group.weight_decay,
                eps=_EPS,
                maximize=False,
                grad_scale=grad_scale,
                found_inf=found_inf,
            )

    def zero_grad(self) -> None:
        for group in self.groups:
            for parameter in group.parameters.values():
                parameter.grad = None

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {f"{kind}.{name}": tensor for name, state in self.state.items() for kind, tensor in state.items()}

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.state = {}
        for group in self.groups:
            for name, parameter in group.parameters.items():
                if any(f"{kind}.{name}" in tensors for kind in KINDS):
                    for kind, kept in self._state(name, parameter).items():
                        kept.copy_(tensors[f"{kind}.{name}"])

    def _state(self, name: str, parameter: torch.nn.Parameter) -> _State:
        if name not in self.state:
            step = torch.zeros((), device=parameter.device)
            moments = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in KINDS[1:]}
            self.state[name] = {"step": step, **moments}
        return self.state[name]


def adamw(model: torch.nn.Module, section: Train) -> AdamW:
    """Weight decay on matrices, none on vectors (norms, biases)."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {name: p for name, p in trained.items() if p.dim() >= 2}
    vectors = {name: p for name, p in trained.items() if p.dim() < 2}
    return AdamW([Group(matrices, section.weight_decay), Group(vectors, 0.0)], (section.beta1, section.beta2))


def make_optimizer(model: torch.nn.Module, section: Train) -> Optimizer:
    """The one that the train section names."""
    module, _, name = section.optimizer_kind.built_by.partition(":")
    return cast(Optimizer, getattr(importlib.import_module(module), name)(model, section))


def clip_scale(grad_norm: torch.Tensor, limit: float) -> torch.Tensor | None:
    """The same as a tensor, which nobody has to read: 1 where nothing is to be clipped."""
    return (grad_norm.double() / limit).clamp(min=1.0).float() if limit else None


def not_finite(numbers: torch.Tensor) -> torch.Tensor:
    """1 where any of them is infinite or no number, else 0, for an optimizer's `found_inf`: three small kernels.

    Zero times such a number is no number, and so is every sum with it.
    """
    found = torch.empty((), dtype=torch.float32, device=numbers.device)
    return torch.ne((numbers * 0.0).sum(), 0.0, out=found)


def clip_factor(grad_norm: float, limit: float) -> torch.Tensor | None:
    """What gradients of this norm are divided by to keep within the limit (0: no limit).

    None rather than 1 where nothing is to be clipped: with a scale, torch writes every gradient back.
    """
    return torch.tensor(grad_norm / limit) if limit and grad_norm > limit else None
