"""What an optimizer must do, and AdamW. The learning rate, a pure function of the step, is in schedule.py.

In:  a model, the train section; gradients.
Out: changed weights; the optimizer's state as tensors by name, for a checkpoint.

A new optimizer is a file of its own and one line in config.OPTIMIZERS, which names the function that builds it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
from torch.optim.adamw import adamw as fused_adamw

from lamplighter.config import Train
from lamplighter.model.weights import local, local_part, local_rows
from lamplighter.schedule import Schedule as Schedule
from lamplighter.schedule import schedule as schedule

if TYPE_CHECKING:
    from lamplighter.train.ranks import World

_EPS = 1e-8
_VECTOR = 16  # numbers that a kernel of a CPU takes at once, at most: 4, 8 or 16, by its instructions
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


@runtime_checkable
class Shares(Protocol):
    """An optimizer whose ranks work out parts of an update for each other."""

    def share(self, world: World, grad_scale: torch.Tensor | None = None) -> None:
        """Called before each step with the same scale, while nothing is changed yet: the one place for its collectives."""
        ...


@dataclass(frozen=True)
class Group:
    """Parameters by name, with one weight decay and one learning rate: so many times that of the step."""

    parameters: dict[str, torch.nn.Parameter]
    weight_decay: float
    lr_ratio: float = 1.0


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
            pieces = [piece for name, p in with_grad.items() for piece in _pieces(p, self._state(name, p))]
            fused_adamw(
                [piece.tensors[0] for piece in pieces],
                [piece.tensors[1] for piece in pieces],
                [piece.tensors[2] for piece in pieces],
                [piece.tensors[3] for piece in pieces],
                max_exp_avg_sqs=[],
                state_steps=[piece.step for piece in pieces],
                fused=True,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr * group.lr_ratio,
                weight_decay=group.weight_decay,
                eps=_EPS,
                maximize=False,
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
            for piece in pieces:
                piece.put_back()

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
                        whole = tensors[f"{kind}.{name}"]
                        kept.copy_(local_part(whole, parameter))

    def _state(self, name: str, parameter: torch.nn.Parameter) -> _State:
        if name not in self.state:
            step = torch.zeros((), device=parameter.device)
            moments = {kind: torch.zeros_like(local(parameter), requires_grad=False) for kind in KINDS[1:]}
            self.state[name] = {"step": step, **moments}
        return self.state[name]


@dataclass(frozen=True)
class _Piece:
    """What the fused kernel takes as one tensor: the parameter, its gradient, both moments; the count of its steps."""

    tensors: list[torch.Tensor]
    step: torch.Tensor
    copied_from: tuple[torch.Tensor, ...] = ()
    first: int = 0  # where in the copy they stand

    def put_back(self) -> None:
        for kept, made in zip(self.copied_from, self.tensors, strict=False):
            kept.copy_(made[self.first : self.first + len(kept)])


def _padded(parts: list[torch.Tensor], first: int, length: int, step: torch.Tensor) -> _Piece:
    """A copy of this length, in which the numbers stand where they would in a whole tensor."""
    around = (first, length - first - len(parts[0]))
    return _Piece([torch.nn.functional.pad(one, around) for one in parts], step.clone(), tuple(parts), first)


def _pieces(parameter: torch.nn.Parameter, state: _State) -> list[_Piece]:
    """A whole tensor as it is. Of a sharded one on a CPU, so that every number is rounded as in the whole: the kernel takes
    numbers by the vector, and those that are left at a tensor's end one by one, with other instructions.
    """
    assert parameter.grad is not None
    parts, step = [local(parameter), local(parameter.grad), state["exp_avg"], state["exp_avg_sq"]], state["step"]
    if parts[0] is parameter or parts[0].device.type != "cpu":
        return [_Piece(parts, step)]
    flat, rows, count = [part.reshape(-1) for part in parts], local_rows(parameter), parameter.numel()
    row = count // len(parameter)
    inside = max(0, min(rows.stop * row, count - count % _VECTOR) - rows.start * row)  # by the vector, in the whole
    even = inside - inside % _VECTOR
    found = [_Piece([one[:even] for one in flat], step)]
    if even < inside:  # at the end of ours, not of the whole
        found.append(_padded([one[even:inside] for one in flat], 0, _VECTOR, step))
    if inside < len(
        flat[0]
    ):  # at the end of the whole, which may be that of several ranks; vectors of 4 or 8 fill some of it
        first = rows.start * row + inside - (count - count % _VECTOR)
        found.append(_padded([one[inside:] for one in flat], first, count % _VECTOR, step))
    return found


Parameters = dict[str, torch.nn.Parameter]


def matrices_and_vectors(model: torch.nn.Module) -> tuple[Parameters, Parameters]:
    """What is trained, in the order in which the norm of the gradients is taken."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {name: p for name, p in trained.items() if p.dim() >= 2}
    return matrices, {name: p for name, p in trained.items() if p.dim() < 2}


def adamw(model: torch.nn.Module, section: Train) -> AdamW:
    """Weight decay on matrices, none on vectors (norms, biases)."""
    matrices, vectors = matrices_and_vectors(model)
    return AdamW([Group(matrices, section.weight_decay), Group(vectors, 0.0)], (section.beta1, section.beta2))


def make_optimizer(model: torch.nn.Module, section: Train, computed_in: torch.dtype | None = None) -> Optimizer:
    """The one that the train section names; `computed_in`: products of its own, if it has any."""
    kind = section.optimizer_kind
    module, _, name = kind.built_by.partition(":")
    build = getattr(importlib.import_module(module), name)
    return cast(Optimizer, build(model, section, computed_in) if computed_in is not None else build(model, section))


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
