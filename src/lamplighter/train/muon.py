"""Muon: the matrices inside the blocks move by orthogonal steps, everything else by AdamW.

In:  a model, the train section; gradients.
Out: changed weights; the state of both as tensors by name, for a checkpoint.

The momentum of a matrix is made nearly orthogonal by five Newton-Schulz steps, so that each of its directions moves by the same
amount, however small its gradient is. The step of a matrix [out, in] is scaled by sqrt(max(1, out / in)), which makes the best
rate nearly the same at every width. The arithmetic is that of torch.optim.Muon, which torch has from 2.9 on and whose import
loads the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lamplighter import report
from lamplighter.config import Train
from lamplighter.model.build import is_hidden
from lamplighter.train import ranks
from lamplighter.train.optimizers import AdamW, Group

MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_EPS = 1e-7
_KIND = "momentum"
# The rates of what AdamW moves, as multiples of that of the matrices. A head of its own adds up as many numbers as the model is
# wide, so its rate falls with the width; the others do not depend on it. Chosen by short tries at one width; no grid was measured yet.
_EMBEDDING_RATIO, _TIED_RATIO, _VECTOR_RATIO, _HEAD_RATIO = 15.0, 0.15, 0.5, 32.0
_HEAD = "lm_head.weight"


@torch.no_grad()
def orthogonalised(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """With the same singular vectors, and singular values between about 0.7 and 1.2."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.t() if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.t() if tall else x


def owners(shapes: Sequence[torch.Size], size: int) -> list[int]:
    """Which rank orthogonalises each matrix: the dearest first, each to the rank that has least to do."""
    work = [0.0] * size
    found = [0] * len(shapes)
    costs = [4.0 * min(one) ** 2 * max(one) + 2.0 * min(one) ** 3 for one in shapes]
    for place in sorted(range(len(shapes)), key=lambda at: -costs[at]):
        found[place] = work.index(min(work))
        work[found[place]] += costs[place]
    return found


@dataclass
class Muon:
    """Both of them, as one optimizer."""

    matrices: dict[str, torch.nn.Parameter]
    rest: AdamW
    weight_decay: float
    computed_in: torch.dtype = torch.float32  # the Newton-Schulz steps
    state: dict[str, torch.Tensor] = field(default_factory=dict)  # the momentum, by name
    made: dict[str, torch.Tensor] = field(default_factory=dict)  # updates of the step that comes, by several ranks

    def grad_norm(self) -> torch.Tensor:
        rest = [p.grad for group in self.rest.groups for p in group.parameters.values() if p.grad is not None]
        return torch.nn.utils.get_total_norm([p.grad for p in self.matrices.values() if p.grad is not None] + rest)

    @torch.no_grad()
    def share(self, world: ranks.World, grad_scale: torch.Tensor | None = None) -> None:
        """Before a step, where several ranks have the same gradients: each orthogonalises whole matrices of its own, and all get
        the results. Nothing is changed yet, so a rank may be lost in here.
        """
        self.made = {}
        names = [name for name, parameter in self.matrices.items() if parameter.grad is not None]
        if world.size == 1 or not names:
            return
        shapes = [self.matrices[name].shape for name in names]
        whose = owners(shapes, world.size)
        counts = [sum(shape.numel() for shape, owner in zip(shapes, whose, strict=True) if owner == rank) for rank in range(world.size)]  # fmt: skip
        device, each = self.matrices[names[0]].device, max(counts)
        mine = torch.zeros(each, dtype=self.computed_in, device=device)
        at = 0
        with report.span("optimizer"):
            for name, shape, owner in zip(names, shapes, whose, strict=True):
                if owner == world.rank:
                    mine[at : at + shape.numel()].view(shape).copy_(self._update(name, grad_scale))
                    at += shape.numel()
        everything = torch.empty(world.size * each, dtype=self.computed_in, device=device)
        with report.span("reduce"), ranks.collective("orthogonalised", world):
            ranks.gather(everything.view(torch.uint8), mine.view(torch.uint8))  # as bytes: every backend has them
        places = [rank * each for rank in range(world.size)]
        for name, shape, owner in zip(names, shapes, whose, strict=True):
            self.made[name] = everything[places[owner] : places[owner] + shape.numel()].view(shape)
            places[owner] += shape.numel()

    def _averaged(self, name: str, grad_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient, and the momentum with it."""
        parameter = self.matrices[name]
        assert parameter.grad is not None
        grad = parameter.grad if grad_scale is None else parameter.grad / grad_scale
        return grad, self._momentum(name, parameter).lerp(grad, 1 - MOMENTUM)

    def _update(self, name: str, grad_scale: torch.Tensor | None) -> torch.Tensor:
        grad, after = self._averaged(name, grad_scale)
        return orthogonalised(grad.lerp(after, MOMENTUM), self.computed_in)

    @torch.no_grad()
    def step(self, lr: float, grad_scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None) -> None:
        for name, parameter in self.matrices.items():
            if parameter.grad is None:
                continue
            before, after = self._momentum(name, parameter), self._averaged(name, grad_scale)[1]
            update = self.made[name] if name in self.made else self._update(name, grad_scale)
            rows, columns = parameter.shape
            moved = parameter * (1 - lr * self.weight_decay)
            update = update.to(
                moved.dtype
            ).contiguous()  # rows one after another: others are added by other instructions
            moved.add_(update, alpha=-lr * max(1.0, rows / columns) ** 0.5)
            if found_inf is not None:  # chosen on the device: nobody waits for the answer
                after, moved = (torch.where(found_inf.bool(), *pair) for pair in ((before, after), (parameter, moved)))
            before.copy_(after)
            parameter.copy_(moved)
        self.made = {}
        self.rest.step(lr, grad_scale, found_inf)

    def zero_grad(self) -> None:
        self.rest.zero_grad()
        for parameter in self.matrices.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {f"{_KIND}.{name}": tensor for name, tensor in self.state.items()} | self.rest.state_tensors()

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.rest.load_state_tensors(tensors)
        self.state = {}
        for name, parameter in self.matrices.items():
            if f"{_KIND}.{name}" in tensors:
                self._momentum(name, parameter).copy_(tensors[f"{_KIND}.{name}"])

    def _momentum(self, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        if name not in self.state:
            self.state[name] = torch.zeros_like(parameter, requires_grad=False)
        return self.state[name]


def muon(model: torch.nn.Module, section: Train, computed_in: torch.dtype = torch.float32) -> Muon:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    hidden = {name: p for name, p in trained.items() if is_hidden(name, p)}
    rest = AdamW(
        _groups({name: p for name, p in trained.items() if name not in hidden}), (section.beta1, section.beta2)
    )
    return Muon(hidden, rest, section.weight_decay, computed_in)


def _groups(rest: dict[str, torch.nn.Parameter]) -> list[Group]:
    """Without weight decay; each at its own multiple of the rate of the matrices."""
    heads = {name: p for name, p in rest.items() if name.endswith(_HEAD)}
    vectors = {name: p for name, p in rest.items() if p.dim() < 2}
    embeddings = {name: p for name, p in rest.items() if name not in heads and name not in vectors}
    ratio = _EMBEDDING_RATIO if heads else _TIED_RATIO
    groups = [Group({name: p}, 0.0, _HEAD_RATIO / p.shape[1]) for name, p in heads.items()]
    return [
        group
        for group in (*groups, Group(embeddings, 0.0, ratio), Group(vectors, 0.0, _VECTOR_RATIO))
        if group.parameters
    ]
