"""The products of a small step on a CPU: each thread keeps to its own rows of a weight, the rows that it updates as well.

In:  the activations of a few tokens, a weight [R, C] as it is stored.
Out: the products that a linear layer needs, and their gradients.

Two cores need not share a cache. Where they do not, what one has written and the other reads costs more than the
arithmetic: a library shares out a product as it likes, the optimizer the numbers of every weight in order, and a step of 66
tokens spent a quarter of its time on weights on their way from core to core (decision 016). So a weight is cut into as many
pieces of rows as there are threads, and the pieces are multiplied as a batch. In larger steps the libraries' own way is as
good. N tokens, R rows and C columns of a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

FEW = 192  # tokens: a step of 66 was faster by 5 to 19 %, of 132 by 5, of 264 no more (docs/performance.md)
THREADS = 2  # measured with so many, and used with no other number


def suits(tokens: int, weight_RC: Tensor) -> bool:
    """A small step that learns, in float32, on the two threads that this was measured with."""
    if torch.compiler.is_compiling() or not 0 < tokens <= FEW or not torch.is_grad_enabled():
        return False
    plain = weight_RC.device.type == "cpu" and weight_RC.dtype == torch.float32 and weight_RC.requires_grad
    shared = torch.get_num_threads() == THREADS and len(weight_RC) % THREADS == 0 and weight_RC.is_contiguous()
    return plain and shared and not torch.is_autocast_enabled("cpu")


def linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """As torch's, for a weight that is stored [out, in]."""
    if not suits(x.numel() // x.shape[-1], weight_OI):
        return functional.linear(x, weight_OI)
    made: Tensor = _Linear.apply(x, weight_OI)  # type: ignore[no-untyped-call]
    return made


def turned(x: Tensor, weight_IO: Tensor, bias_O: Tensor) -> Tensor:
    """The same for a weight that is stored [in, out], and a bias."""
    if not suits(x.numel() // x.shape[-1], weight_IO):
        return functional.linear(x, weight_IO.t(), bias_O)
    made: Tensor = _Turned.apply(x, weight_IO)  # type: ignore[no-untyped-call]
    return made + bias_O


# --- the three products of a weight, each thread with its rows --------------------------------------------------------


def across(x_NC: Tensor, weight_RC: Tensor, out_NR: Tensor | None = None) -> Tensor:
    """x times the weight turned: [N, R]."""
    N, (R, C) = len(x_NC), weight_RC.shape
    pieces = weight_RC.view(THREADS, R // THREADS, C).transpose(1, 2)
    made = torch.bmm(x_NC.expand(THREADS, N, C), pieces).transpose(0, 1)  # into its place at once was slower
    out_NR = x_NC.new_empty(N, R) if out_NR is None else out_NR
    out_NR.view(N, THREADS, R // THREADS).copy_(made)
    return out_NR


def along(x_NR: Tensor, weight_RC: Tensor) -> Tensor:
    """x times the weight: [N, C], a sum over the threads."""
    N, (R, C) = len(x_NR), weight_RC.shape
    parts = x_NR.view(N, THREADS, R // THREADS).transpose(0, 1)
    sums = torch.bmm(parts, weight_RC.view(THREADS, R // THREADS, C))
    return sums[0].add_(sums[1])


def outer(x_NR: Tensor, y_NC: Tensor) -> Tensor:
    """x turned times y: the gradient [R, C] of a weight."""
    return add_outer(x_NR.new_empty(x_NR.shape[1], y_NC.shape[1]), x_NR, y_NC, 1.0, first=True)


def add_outer(sum_RC: Tensor, x_NR: Tensor, y_NC: Tensor, scale: float, first: bool) -> Tensor:
    """Add `scale` times that gradient to a sum, or begin one."""
    (N, R), C = x_NR.shape, y_NC.shape[1]
    parts, whole = x_NR.t().view(THREADS, R // THREADS, N), y_NC.expand(THREADS, N, C)
    sum_RC.view(THREADS, R // THREADS, C).baddbmm_(parts, whole, beta=0.0 if first else 1.0, alpha=scale)
    return sum_RC


class _Linear(torch.autograd.Function):
    """The rows of the weight are outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return across(x.reshape(-1, x.shape[-1]), weight_OI).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight_OI = ctx.saved_tensors
        up_NO = upstream.reshape(-1, upstream.shape[-1])
        dx = along(up_NO, weight_OI).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, outer(up_NO, x.reshape(-1, x.shape[-1]))


class _Turned(torch.autograd.Function):
    """The rows of the weight are inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_IO: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_IO)
        return along(x.reshape(-1, x.shape[-1]), weight_IO).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight_IO = ctx.saved_tensors
        up_NO = upstream.reshape(-1, upstream.shape[-1])
        dx = across(up_NO, weight_IO).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, outer(x.reshape(-1, x.shape[-1]), up_NO)
