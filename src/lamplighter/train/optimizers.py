"""Parameter groups and AdamW; the learning rate, a pure function of the step, is in schedule.py.

In:  the train section, a model.
Out: an optimizer; its state by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from lamplighter.config import Train
from lamplighter.train.schedule import Schedule as Schedule
from lamplighter.train.schedule import schedule as schedule

EPS = 1e-8
KINDS = ("step", "exp_avg", "exp_avg_sq")
State = dict[str, torch.Tensor]  # by KINDS


@dataclass(frozen=True)
class Group:
    """Parameters with one weight decay."""

    parameters: tuple[torch.nn.Parameter, ...]
    weight_decay: float


class AdamW:
    """torch's fused AdamW in its functional form: an Optimizer object loads the compiler, 1.5 s of every start."""

    def __init__(self, groups: list[Group], betas: tuple[float, float]) -> None:
        self.groups, self.betas = groups, betas
        self.state: dict[torch.nn.Parameter, State] = {}

    def norm(self) -> torch.Tensor:
        """Of all gradients together."""
        return torch.nn.utils.get_total_norm(
            [p.grad for group in self.groups for p in group.parameters if p.grad is not None]
        )

    @torch.no_grad()
    def step(self, lr: float, shrink: float = 1.0) -> None:
        """Change the weights by their gradients, divided by `shrink`; a parameter without one is left as it is."""
        scale = None if shrink == 1.0 else torch.tensor(shrink)  # with a scale, torch writes every gradient back
        for group in self.groups:
            with_grad = [p for p in group.parameters if p.grad is not None]
            if not with_grad:
                continue
            states = [self._state(p) for p in with_grad]
            adamw(
                list(with_grad),
                [p.grad for p in with_grad if p.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr,
                weight_decay=group.weight_decay,
                eps=EPS,
                maximize=False,
                grad_scale=scale,
            )

    def zero_grad(self) -> None:
        for group in self.groups:
            for parameter in group.parameters:
                parameter.grad = None

    def _state(self, parameter: torch.nn.Parameter) -> State:
        if parameter not in self.state:
            zeros = {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = {"step": torch.zeros((), device=parameter.device), **zeros}
        return self.state[parameter]


def shrink(norm: float, limit: float) -> float:
    """What gradients of this norm are divided by to keep within the limit; 0 is no limit."""
    return max(1.0, norm / limit) if limit else 1.0


def make_optimizer(model: torch.nn.Module, section: Train) -> AdamW:
    """Weight decay on matrices, none on vectors (norms, biases)."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = tuple(p for p in wanted if p.dim() >= 2), tuple(p for p in wanted if p.dim() < 2)
    return AdamW([Group(matrices, section.weight_decay), Group(vectors, 0.0)], (section.beta1, section.beta2))


def state_tensors(model: torch.nn.Module, optimizer: AdamW) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter name: 'exp_avg.<name>', 'exp_avg_sq.<name>', 'step.<name>'."""
    found = {}
    for name, parameter in model.named_parameters():
        for kind, tensor in optimizer.state.get(parameter, {}).items():
            found[f"{kind}.{name}"] = tensor.detach().contiguous()
    return found


def load_state(model: torch.nn.Module, optimizer: AdamW, tensors: dict[str, torch.Tensor]) -> None:
    """Put the state back, tensor for tensor; a missing one is an error, never a fresh start.

    A parameter that never had a gradient has no state, then as now.
    """
    for name, parameter in model.named_parameters():
        if not any(f"{kind}.{name}" in tensors for kind in KINDS):
            continue
        state = {}
        for kind in KINDS:
            tensor = tensors[f"{kind}.{name}"]
            kept = torch.zeros_like(parameter) if kind != "step" else torch.zeros_like(tensor, device=parameter.device)
            state[kind] = kept.copy_(tensor)
        optimizer.state[parameter] = state
