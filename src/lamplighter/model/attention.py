"""Causal attention of a training step in bf16 on a CPU, as plain matrix products over a few queries at a time.

In:  questions, keys and values [B, H, T, D] as they come out of the layer; who may look at whom.
Out: the mixture, and all three gradients; what stays in memory in between is the inputs, and small probabilities.

torch's own kernel for a CPU gains nothing from bf16: with its gradient it was a seventh of a step (decision 015). Scores
are float32, as there; the other products are in the type of the inputs. Queries meet only the keys before them, a block
at a time, so the scores of a long row never exist as a whole. In float32 torch's kernel is the faster one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .shape import keeps_shares

QUERIES = 256  # of a block
SCORES = 1 << 22  # numbers of a block at most, so that it stays in the caches


def suits(q_BHTD: Tensor, keys: int, dropout: float) -> bool:
    """A step that learns in bf16, on a CPU, without dropout or a cache; what is compiled is left to the compiler."""
    learns = torch.is_grad_enabled() and q_BHTD.requires_grad and q_BHTD.shape[2] == keys
    plain = q_BHTD.device.type == "cpu" and q_BHTD.dtype == torch.bfloat16 and not dropout
    return learns and plain and not torch.compiler.is_compiling()


def by_products(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax(q k' / sqrt(D)) v over what comes before each token, or over what the mask [B or 1, 1, T, T] allows."""
    mixed: Tensor = _Attention.apply(q_BHTD, k_BHTD, v_BHTD, mask)  # type: ignore[no-untyped-call]
    return mixed


class Block(NamedTuple):
    """Some queries of some samples, and the keys that they may meet."""

    samples: slice
    queries: slice
    keys: slice


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: Tensor | None) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            q, k, v = (part.contiguous() for part in (q_BHTD, k_BHTD, v_BHTD))
            mixed, kept = torch.empty_like(q), []
            keep = keeps_shares(q.shape[2], q.shape[3], q.element_size())
            for block in _blocks(q):
                shares = _shares(q, k, mask, block)
                mixed[block.samples, :, block.queries] = shares @ v[block.samples, :, block.keys]
                kept += [shares] if keep else []
        ctx.save_for_backward(q, k, v, mask, *kept)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_BHTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, mask, *kept = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            up = upstream_BHTD.to(q.dtype).contiguous()
            sums = torch.float32 if q.shape[2] > QUERIES else q.dtype  # a key is met by the queries of several blocks
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k, dtype=sums), torch.empty_like(v, dtype=sums)
            for number, block in enumerate(_blocks(q)):
                here, seen = (block.samples, slice(None), block.queries), (block.samples, slice(None), block.keys)
                shares = kept[number] if kept else _shares(q, k, mask, block)
                wanted = up[here] @ v[seen].transpose(2, 3)
                dscores = torch._softmax_backward_data(wanted, shares, -1, shares.dtype)
                dq[here] = dscores @ k[seen]
                _gather(dk, seen, dscores.transpose(2, 3) @ q[here])
                _gather(dv, seen, shares.transpose(2, 3) @ up[here])
            scale = q.shape[3] ** -0.5
        return dq.mul_(scale), dk.mul_(scale).to(q.dtype), dv.to(q.dtype), None


def _gather(sums: Tensor, seen: tuple[slice, slice, slice], part: Tensor) -> None:
    """The last queries come first, and meet every key: there is nothing to add to yet."""
    if seen[2].stop == sums.shape[2]:
        sums[seen] = part
    else:
        sums[seen] += part


def _blocks(q_BHTD: Tensor) -> Iterator[Block]:
    """The same for forward and backward: a function of the shape alone. The last queries come first."""
    B, H, T, _ = q_BHTD.shape
    queries = min(T, QUERIES)
    samples = max(1, min(B, SCORES // (H * queries * T)))
    for first in range(0, B, samples):
        for start in reversed(range(0, T, queries)):
            end = min(start + queries, T)
            yield Block(slice(first, min(first + samples, B)), slice(start, end), slice(0, end))


def _shares(q: Tensor, k: Tensor, mask: Tensor | None, block: Block) -> Tensor:
    """How much each query takes of each key, in the type of the inputs; worked out in float32."""
    B, H, D = block.samples.stop - block.samples.start, q.shape[1], q.shape[3]
    rows, columns = block.queries.stop - block.queries.start, block.keys.stop
    q_rows = q[block.samples, :, block.queries].float().flatten(0, 1)
    k_rows = k[block.samples, :, block.keys].float().flatten(0, 1)
    if mask is None:
        bias = torch.full((rows, columns), float("-inf")).triu_(block.queries.start + 1)
        scores = torch.baddbmm(bias, q_rows, k_rows.transpose(1, 2), alpha=D**-0.5)
    else:
        scores = torch.bmm(q_rows, k_rows.transpose(1, 2)).mul_(D**-0.5)
        allowed = mask[block.samples if mask.shape[0] > 1 else slice(0, 1), :, block.queries, block.keys]
        scores.view(B, H, rows, columns).masked_fill_(~allowed, float("-inf"))
    torch.ops.aten._softmax.out(scores, -1, False, out=scores)
    return scores.view(B, H, rows, columns).to(q.dtype)
