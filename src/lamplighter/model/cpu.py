"""Kernels for a CPU, off the reading path of the model: each replaces a few plain operations of the transformer by faster ones.

In:  the tensors of a training step (or of one new token) on a CPU.
Out: the same results as the plain operations, and their gradients; which kernel is on is decided in one place, `enabled`.

| kernel | replaces | where |
|---|---|---|
| attention | scaled_dot_product_attention | a training step in bf16, rows of at most 512 tokens |
| decode_pieces | products with one or a few rows | generation in float32 |

`attention` is not used while torch.compile traces, nor on a GPU.

Tensors carry their axes as a suffix: B batch, T time, C width, H heads, D head width, V vocabulary; G heads of all rows; I and O
the inputs and outputs of a product.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lamplighter.model.shape import BLOCK_ATTENTION_TOKENS, BLOCK_QUERIES, keeps_probabilities

KERNELS = ("attention", "decode_pieces")
_SWITCH = "LAMP_CPU_KERNELS"  # "none", the names to use, or the names to leave out with a minus: "-attention"


def chosen_kernels(words: str) -> set[str]:
    """What the switch asks for; all of them where it is empty. For measurements, not for users."""
    named = [word for word in words.replace(",", " ").split() if word != "none"]
    unknown = [word for word in named if word.lstrip("-") not in KERNELS]
    if unknown:
        raise ValueError(f"{_SWITCH}: {', '.join(unknown)} is no kernel; there are {', '.join(KERNELS)}")
    if all(word.startswith("-") for word in named) and "none" not in words:
        return set(KERNELS) - {word[1:] for word in named}
    return {word for word in named if not word.startswith("-")}


enabled = chosen_kernels(os.environ.get(_SWITCH, ""))


def attention() -> str:
    """Which one a training step takes where both can be: recorded with a run."""
    return "blocks" if "attention" in enabled else "torch"


def go_on_with(recorded: str) -> None:
    """A resumed run keeps its kernel, unless the switch says otherwise, which is then told as a difference."""
    if recorded in ("blocks", "torch") and not os.environ.get(_SWITCH):
        (enabled.add if recorded == "blocks" else enabled.discard)("attention")


# --- attention ---------------------------------------------------------------------------------------------------------
#
# Causal attention in bf16 as plain matrix products over a block of queries at a time. torch's own kernel for a CPU gains
# nothing from bf16: with its gradient it was a seventh of a step (decision 015). Scores are float32, as there; the other
# products are in the type of the inputs. Queries meet only the keys before them. In float32, and for rows of more than
# BLOCK_ATTENTION_TOKENS, torch's kernel is the faster one (decision 021).

SCORES = 1 << 22  # numbers of a block at most, so that it stays in the caches


def suits_attention(q_BHTD: Tensor, keys: int, dropout: float) -> bool:
    """A step that learns in bf16 from short rows, on a CPU, without dropout or a cache; what is compiled is the compiler's."""
    learns = torch.is_grad_enabled() and q_BHTD.requires_grad and q_BHTD.shape[2] == keys <= BLOCK_ATTENTION_TOKENS
    plain = q_BHTD.device.type == "cpu" and q_BHTD.dtype == torch.bfloat16 and not dropout
    return learns and plain and not torch.compiler.is_compiling() and "attention" in enabled


def block_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax(q k' / sqrt(D)) v over what comes before each token, or over what the mask [B or 1, 1, T, T] allows."""
    mixed: Tensor = _Attention.apply(q_BHTD, k_BHTD, v_BHTD, mask)  # type: ignore[no-untyped-call]
    return mixed


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: Tensor | None) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            q, k, v = (part.reshape(-1, *part.shape[2:]) for part in (q_BHTD, k_BHTD, v_BHTD))
            mixed, kept = attention_forward(q, k, v, mask)
        ctx.save_for_backward(q, k, v, mask, *kept)
        return mixed.view(q_BHTD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_BHTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, mask, *kept = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            gradients = _attention_backward(upstream_BHTD.to(q.dtype).reshape(q.shape), (q, k, v), mask, kept)
        dq, dk, dv = (part.view(upstream_BHTD.shape) for part in gradients)
        return dq, dk, dv, None


def attention_forward(q_GTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, mask: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """The mixture of the values, and the probabilities that are worth keeping for the backward pass."""
    keep = keeps_probabilities(q_GTD.shape[1], q_GTD.shape[2], q_GTD.element_size())
    mixed_GTD, kept = torch.empty_like(q_GTD), []
    for heads, queries, keys in _query_blocks(q_GTD, mask):
        probs = _probabilities(
            q_GTD[heads, queries], k_GTD[heads, keys], _mask_of(mask, q_GTD, heads, queries), queries.start
        )
        mixed_GTD[heads, queries] = torch.bmm(probs, v_GTD[heads, keys])
        kept += [probs] if keep else []
    return mixed_GTD, kept


def _attention_backward(
    up_GTD: Tensor, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, kept: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from that of the mixture; those of key and value are added up in float32."""
    q_GTD, k_GTD, v_GTD = qkv
    dq_GTD, scale = torch.empty_like(q_GTD), q_GTD.shape[2] ** -0.5
    dk_GTD, dv_GTD = torch.empty_like(k_GTD, dtype=torch.float32), torch.empty_like(v_GTD, dtype=torch.float32)
    for number, (heads, queries, keys) in enumerate(_query_blocks(q_GTD, mask)):
        q, k, up = q_GTD[heads, queries], k_GTD[heads, keys], up_GTD[heads, queries]
        probs = kept[number] if kept else _probabilities(q, k, _mask_of(mask, q_GTD, heads, queries), queries.start)
        dscores = torch._softmax_backward_data(torch.bmm(up, v_GTD[heads, keys].mT), probs, -1, probs.dtype)
        dq_GTD[heads, queries] = torch.bmm(dscores, k)
        _add_block(dk_GTD, (heads, keys), torch.bmm(dscores.mT, q))
        _add_block(dv_GTD, (heads, keys), torch.bmm(probs.mT, up))
    return dq_GTD.mul_(scale), dk_GTD.mul_(scale).to(k_GTD.dtype), dv_GTD.to(v_GTD.dtype)


def _add_block(sums: Tensor, seen: tuple[slice, slice], part: Tensor) -> None:
    """A key is met by the queries of several blocks. The last queries come first, and meet every key: there is nothing
    to add to yet.
    """
    if seen[1].stop == sums.shape[1]:
        sums[seen] = part
    else:
        sums[seen] += part


def _query_blocks(q_GTD: Tensor, mask: Tensor | None) -> list[tuple[slice, slice, slice]]:
    """Some heads, some of their queries, and the keys that these may meet. The same for forward and backward: a function of the
    shapes alone. The last queries come first; heads of one sample stay together where samples have masks of their own.
    """
    G, T, _ = q_GTD.shape
    queries = min(T, BLOCK_QUERIES)
    each = 1 if mask is None or len(mask) == 1 else G // len(mask)
    heads = max(each, min(G, SCORES // (queries * T)) // each * each)
    found = []
    for first in range(0, G, heads):
        for start in reversed(range(0, T, queries)):
            end = min(start + queries, T)
            found.append((slice(first, min(first + heads, G)), slice(start, end), slice(0, end)))
    return found


def _mask_of(mask: Tensor | None, q_GTD: Tensor, heads: slice, queries: slice) -> Tensor | None:
    """Of the mask, what concerns a block."""
    if mask is None or len(mask) == 1:
        return None if mask is None else mask[:, :, queries, : queries.stop]
    each = len(q_GTD) // len(mask)
    return mask[heads.start // each : heads.stop // each, :, queries, : queries.stop]


def _probabilities(q: Tensor, k: Tensor, mask: Tensor | None, start: int) -> Tensor:
    """Softmax of the scores, in the type of the inputs; worked out in float32."""
    (rows, D), columns = q.shape[1:], k.shape[1]
    if mask is None:
        bias = torch.full((rows, columns), float("-inf")).triu_(start + 1)
        scores = torch.baddbmm(bias, q.float(), k.float().mT, alpha=D**-0.5)
    else:
        scores = torch.bmm(q.float(), k.float().mT).mul_(D**-0.5)
        scores.view(len(mask), -1, rows, columns).masked_fill_(~mask, float("-inf"))
    torch.ops.aten._softmax.out(scores, -1, False, out=scores)
    return scores.to(q.dtype)


# --- decode pieces -----------------------------------------------------------------------------------------------------
#
# One new token: every product reads its weight in the order that is fastest for one or a few rows.

LARGE_WEIGHT = 1 << 18  # numbers of a weight, from which on it is read in pieces
_DECODE_PIECES = 8  # of a weight [O, I]
DECODE_PARTS = 4  # of a weight [I, O], whose products are added up
FEW_ROWS = 16  # in which that pays
_WEIGHT_FIRST_ROWS = 4  # rows, for which even a flat weight is better the left operand


def decode_linear(x_BI: Tensor, weight_OI: Tensor) -> Tensor:
    """x times the weight. For a few rows and a tall weight the libraries are twice as fast the other way round; for one row
    and a weight beyond the nearest caches if it is given to them in pieces.
    """
    if "decode_pieces" not in enabled:
        return functional.linear(x_BI, weight_OI)
    if len(x_BI) > 1 and (weight_OI.shape[0] >= weight_OI.shape[1] or len(x_BI) <= _WEIGHT_FIRST_ROWS):
        return (weight_OI @ x_BI.t()).t()
    return _one_row(x_BI, weight_OI) if len(x_BI) == 1 and _in_pieces(weight_OI) else functional.linear(x_BI, weight_OI)


def decode_linear_t(x_BI: Tensor, bias_O: Tensor, weight_IO: Tensor) -> Tensor:
    """The same for a weight that is stored the other way round: a few rows are multiplied with it part by part."""
    if len(x_BI) > FEW_ROWS or len(weight_IO) % DECODE_PARTS or not _in_pieces(weight_IO):
        return torch.addmm(bias_O, x_BI, weight_IO)
    parts = x_BI.view(len(x_BI), DECODE_PARTS, -1).transpose(0, 1)
    return torch.bmm(parts, weight_IO.view(DECODE_PARTS, -1, weight_IO.shape[1])).sum(0).add_(bias_O)


def _in_pieces(weight: Tensor) -> bool:
    """Measured in float32, on a CPU."""
    return (
        "decode_pieces" in enabled
        and weight.numel() >= LARGE_WEIGHT
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
    )


def _one_row(x_1I: Tensor, weight_OI: Tensor) -> Tensor:
    """The weight as some pieces of equal height, each times the same row; what is left over is small."""
    whole = len(weight_OI) // _DECODE_PIECES * _DECODE_PIECES
    pieces = weight_OI[:whole].view(_DECODE_PIECES, whole // _DECODE_PIECES, -1)
    made_1O = torch.bmm(pieces, x_1I.t().expand(_DECODE_PIECES, -1, 1)).view(1, whole)
    if whole == len(weight_OI):
        return made_1O
    return torch.cat((made_1O, functional.linear(x_1I, weight_OI[whole:])), dim=-1)
