"""Causal attention of a training step in bf16 on a CPU, as plain matrix products over a few queries at a time.

In:  questions, keys and values [B, H, T, D] as they come out of the layer; who may look at whom.
Out: the mixture, and all three gradients; what stays in memory in between is the inputs, and small probabilities.

torch's own kernel for a CPU gains nothing from bf16: with its gradient it was a seventh of a step (decision 015). Scores
are float32, as there; the other products are in the type of the inputs. Queries meet only the keys before them, a block
at a time, so the scores of a long row never exist as a whole. In float32 torch's kernel is the faster one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamplighter.model.shape import keeps_shares

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


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: Tensor | None) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            q, k, v = (part.reshape(-1, *part.shape[2:]) for part in (q_BHTD, k_BHTD, v_BHTD))
            mixed, kept = mix(q, k, v, mask)
        ctx.save_for_backward(q, k, v, mask, *kept)
        return mixed.view(q_BHTD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_BHTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, mask, *kept = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            dq, dk, dv = mix_back(upstream_BHTD.to(q.dtype).reshape(q.shape), q, k, v, mask, kept).unbind()
        shape = upstream_BHTD.shape
        return dq.view(shape), dk.view(shape), dv.view(shape), None


# --- the same on plain tensors, G = the heads of all samples, one after the other --------------------------------------


def mix(q_GTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, mask: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """The mixture, and the probabilities that are worth keeping."""
    keep = keeps_shares(q_GTD.shape[1], q_GTD.shape[2], q_GTD.element_size())
    blocks = _blocks(q_GTD, mask)
    if len(blocks) == 1:
        shares = _shares(q_GTD, k_GTD, mask, 0)
        return torch.bmm(shares, v_GTD), [shares] if keep else []
    mixed_GTD, kept = torch.empty_like(q_GTD), []
    for heads, queries, keys in blocks:
        shares = _shares(q_GTD[heads, queries], k_GTD[heads, keys], _part(mask, q_GTD, heads, queries), queries.start)
        mixed_GTD[heads, queries] = torch.bmm(shares, v_GTD[heads, keys])
        kept += [shares] if keep else []
    return mixed_GTD, kept


def mix_back(
    up_GTD: Tensor, q_GTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, mask: Tensor | None, kept: list[Tensor]
) -> Tensor:
    """The gradients of the three [3, G, T, D], from that of the mixture."""
    scale, blocks = q_GTD.shape[2] ** -0.5, _blocks(q_GTD, mask)
    made = torch.empty((3, *q_GTD.shape), dtype=q_GTD.dtype)
    if len(blocks) == 1:
        shares = kept[0] if kept else _shares(q_GTD, k_GTD, mask, 0)
        dscores = torch._softmax_backward_data(torch.bmm(up_GTD, v_GTD.mT), shares, -1, shares.dtype)
        torch.bmm(dscores, k_GTD, out=made[0])
        torch.bmm(dscores.mT, q_GTD, out=made[1])
        torch.bmm(shares.mT, up_GTD, out=made[2])
        made[:2].mul_(scale)
        return made
    dk_GTD, dv_GTD = torch.empty_like(k_GTD, dtype=torch.float32), torch.empty_like(v_GTD, dtype=torch.float32)
    for number, (heads, queries, keys) in enumerate(blocks):
        q, k, up = q_GTD[heads, queries], k_GTD[heads, keys], up_GTD[heads, queries]
        shares = kept[number] if kept else _shares(q, k, _part(mask, q_GTD, heads, queries), queries.start)
        dscores = torch._softmax_backward_data(torch.bmm(up, v_GTD[heads, keys].mT), shares, -1, shares.dtype)
        made[0, heads, queries] = torch.bmm(dscores, k)
        _gather(dk_GTD, (heads, keys), torch.bmm(dscores.mT, q))
        _gather(dv_GTD, (heads, keys), torch.bmm(shares.mT, up))
    made[0].mul_(scale)
    made[1] = dk_GTD.mul_(scale)
    made[2] = dv_GTD
    return made


def _gather(sums: Tensor, seen: tuple[slice, slice], part: Tensor) -> None:
    """A key is met by the queries of several blocks. The last queries come first, and meet every key: there is nothing
    to add to yet.
    """
    if seen[1].stop == sums.shape[1]:
        sums[seen] = part
    else:
        sums[seen] += part


def _blocks(q_GTD: Tensor, mask: Tensor | None) -> list[tuple[slice, slice, slice]]:
    """Some heads, some of their queries, and the keys that these may meet. The same for forward and backward: a function of the
    shapes alone. The last queries come first; heads of one sample stay together where samples have masks of their own.
    """
    G, T, _ = q_GTD.shape
    queries = min(T, QUERIES)
    each = 1 if mask is None or len(mask) == 1 else G // len(mask)
    heads = max(each, min(G, SCORES // (queries * T)) // each * each)
    found = []
    for first in range(0, G, heads):
        for start in reversed(range(0, T, queries)):
            end = min(start + queries, T)
            found.append((slice(first, min(first + heads, G)), slice(start, end), slice(0, end)))
    return found


def _part(mask: Tensor | None, q_GTD: Tensor, heads: slice, queries: slice) -> Tensor | None:
    """Of the mask, what concerns a block."""
    if mask is None or len(mask) == 1:
        return None if mask is None else mask[:, :, queries, : queries.stop]
    each = len(q_GTD) // len(mask)
    return mask[heads.start // each : heads.stop // each, :, queries, : queries.stop]


def _shares(q: Tensor, k: Tensor, mask: Tensor | None, start: int) -> Tensor:
    """How much each query takes of each key, in the type of the inputs; worked out in float32."""
    (rows, D), columns = q.shape[1:], k.shape[1]
    if mask is None:
        bias = torch.full((rows, columns), float("-inf")).triu_(start + 1)
        scores = torch.baddbmm(bias, q.float(), k.float().mT, alpha=D**-0.5)
    else:
        scores = torch.bmm(q.float(), k.float().mT).mul_(D**-0.5)
        scores.view(len(mask), -1, rows, columns).masked_fill_(~mask, float("-inf"))
    torch.ops.aten._softmax.out(scores, -1, False, out=scores)
    return scores.to(q.dtype)
