"""The matrix at both ends of a tied model: its gradient is one tensor, made by the head and finished by the embedding.

In:  token ids, the [V, C] matrix.
Out: its rows; on the way back, the head's gradient with what the embedding adds to a few of its rows.

Left to autograd, the embedding's gradient is a second tensor of that size, nearly all of it zeros, which is cleared and added up in
every step: a twentieth of a step of two short examples, and the memory. Rows are added one after the other, in the same order each
time. On a GPU torch's way is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class Tie:
    """What the head hands to the embedding within one backward pass."""

    def __init__(self) -> None:
        self.gradient_VC: Tensor | None = None


def tie_for(weight_VC: Tensor) -> Tie | None:
    """For a step that learns, on a CPU."""
    learns = torch.is_grad_enabled() and weight_VC.requires_grad and weight_VC.dtype == torch.float32
    return Tie() if learns and weight_VC.device.type == "cpu" and not torch.compiler.is_compiling() else None


def look_up(table: nn.Embedding, ids_BT: Tensor, tie: Tie | None) -> Tensor:
    if tie is None:
        found: Tensor = table(ids_BT)
        return found
    rows: Tensor = _LookUp.apply(table.weight, ids_BT, tie)  # type: ignore[no-untyped-call]
    return rows


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VC: Tensor, ids_BT: Tensor, tie: Tie) -> Tensor:
        ctx.save_for_backward(ids_BT)
        ctx.tie = tie
        return functional.embedding(ids_BT, weight_VC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_BTC: Tensor) -> tuple[Tensor, None, None]:
        (ids_BT,) = ctx.saved_tensors
        gradient_VC, ctx.tie.gradient_VC = ctx.tie.gradient_VC, None
        assert gradient_VC is not None, "the head comes first on the way back"
        return gradient_VC.index_add_(0, ids_BT.flatten(), upstream_BTC.flatten(0, 1)), None, None
