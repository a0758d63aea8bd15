"""Kernels for a CPU, off the reading path of the model: each replaces a few plain operations of the transformer by faster ones.

In:  the tensors of a training step (or of one new token) on a CPU.
Out: the same results as the plain operations, and their gradients; which kernel is on is decided in one place, `enabled`.

| kernel | replaces | where |
|---|---|---|
| attention | scaled_dot_product_attention | a training step in bf16 |
| fused_layers | a whole transformer layer, as one node of the autograd graph (it has its own attention) | the same, without dropout |
| tied_gradient | the gradient of an embedding that is also the head | any training step in float32 weights |
| decode_pieces | products with one or a few rows | generation in float32 |

Nothing here is used while torch.compile traces, on a GPU, or on a layer that somebody hooked, wrapped or replaced (`untouched`).

Tensors carry their axes as a suffix: B batch, T time, C width, M MLP width, H heads, D head width, V vocabulary; N tokens of all
rows, G heads of all rows; I and O the inputs and outputs of a product.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lamplighter.model.recompute import RecomputedForward
from lamplighter.model.shape import keeps_probabilities

KERNELS = ("attention", "fused_layers", "tied_gradient", "decode_pieces")
_SWITCH = (
    "LAMP_CPU_KERNELS"  # "none", the names to use, or the names to leave out with a minus: "-attention,-fused_layers"
)
RotaryCosSin = tuple[Tensor, Tensor]  # as in transformer.py


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


def untouched(layer: nn.Module) -> bool:
    """Whether a layer and all of its modules are transformer.py's own, and nobody hooked, wrapped or replaced any of them."""
    wrapped = "forward" in layer.__dict__ and not isinstance(
        layer.forward, RecomputedForward
    )  # recompute's wrapper is ours
    if wrapped or _has_hooks(layer) or not _is_ours(layer):
        return False
    return all(part is layer or (_is_ours(part) and is_bare(part)) for part in layer.modules())


def _is_ours(part: nn.Module) -> bool:
    return type(part) in (nn.LayerNorm, nn.Linear) or type(part).__module__ == "lamplighter.model.transformer"


def is_bare(part: nn.Module) -> bool:
    return not _has_hooks(part) and "forward" not in part.__dict__


def _has_hooks(part: nn.Module) -> bool:
    own = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
    return bool(own) or bool(nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


# --- attention ---------------------------------------------------------------------------------------------------------
#
# Causal attention in bf16 as plain matrix products over a block of queries at a time. torch's own kernel for a CPU gains
# nothing from bf16: with its gradient it was a seventh of a step (decision 015). Scores are float32, as there; the other
# products are in the type of the inputs. Queries meet only the keys before them, so the scores of a long row never exist
# as a whole. In float32 torch's kernel is the faster one.

QUERIES = 256  # of a block
SCORES = 1 << 22  # numbers of a block at most, so that it stays in the caches


def attention(q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """scaled_dot_product_attention, causal where there is no mask; by our own kernel where that suits."""
    if _suits_attention(q_BHTD, k_BHSD.shape[2], dropout):
        return block_attention(q_BHTD, k_BHSD, v_BHSD, mask)
    causal = mask is None and q_BHTD.shape[2] > 1
    return functional.scaled_dot_product_attention(
        q_BHTD, k_BHSD, v_BHSD, attn_mask=mask, dropout_p=dropout, is_causal=causal
    )


def _suits_attention(q_BHTD: Tensor, keys: int, dropout: float) -> bool:
    """A step that learns in bf16, on a CPU, without dropout or a cache; what is compiled is left to the compiler."""
    learns = torch.is_grad_enabled() and q_BHTD.requires_grad and q_BHTD.shape[2] == keys
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
            dq, dk, dv = _attention_backward(upstream_BHTD.to(q.dtype).reshape(q.shape), (q, k, v), mask, kept).unbind()
        shape = upstream_BHTD.shape
        return dq.view(shape), dk.view(shape), dv.view(shape), None


def attention_forward(q_GTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, mask: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """The mixture of the values, and the probabilities that are worth keeping for the backward pass."""
    keep = keeps_probabilities(q_GTD.shape[1], q_GTD.shape[2], q_GTD.element_size())
    blocks = _query_blocks(q_GTD, mask)
    if len(blocks) == 1:
        probs = _probabilities(q_GTD, k_GTD, mask, 0)
        return torch.bmm(probs, v_GTD), [probs] if keep else []
    mixed_GTD, kept = torch.empty_like(q_GTD), []
    for heads, queries, keys in blocks:
        probs = _probabilities(
            q_GTD[heads, queries], k_GTD[heads, keys], _mask_of(mask, q_GTD, heads, queries), queries.start
        )
        mixed_GTD[heads, queries] = torch.bmm(probs, v_GTD[heads, keys])
        kept += [probs] if keep else []
    return mixed_GTD, kept


def _attention_backward(
    up_GTD: Tensor, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, kept: list[Tensor]
) -> Tensor:
    """The gradients of query, key and value [3, G, T, D], from that of the mixture."""
    q_GTD, k_GTD, v_GTD = qkv
    scale, blocks = q_GTD.shape[2] ** -0.5, _query_blocks(q_GTD, mask)
    made = torch.empty((3, *q_GTD.shape), dtype=q_GTD.dtype)
    if len(blocks) == 1:
        probs = kept[0] if kept else _probabilities(q_GTD, k_GTD, mask, 0)
        dscores = torch._softmax_backward_data(torch.bmm(up_GTD, v_GTD.mT), probs, -1, probs.dtype)
        torch.bmm(dscores, k_GTD, out=made[0])
        torch.bmm(dscores.mT, q_GTD, out=made[1])
        torch.bmm(probs.mT, up_GTD, out=made[2])
        made[:2].mul_(scale)
        return made
    dk_GTD, dv_GTD = torch.empty_like(k_GTD, dtype=torch.float32), torch.empty_like(v_GTD, dtype=torch.float32)
    for number, (heads, queries, keys) in enumerate(blocks):
        q, k, up = q_GTD[heads, queries], k_GTD[heads, keys], up_GTD[heads, queries]
        probs = kept[number] if kept else _probabilities(q, k, _mask_of(mask, q_GTD, heads, queries), queries.start)
        dscores = torch._softmax_backward_data(torch.bmm(up, v_GTD[heads, keys].mT), probs, -1, probs.dtype)
        made[0, heads, queries] = torch.bmm(dscores, k)
        _add_block(dk_GTD, (heads, keys), torch.bmm(dscores.mT, q))
        _add_block(dv_GTD, (heads, keys), torch.bmm(probs.mT, up))
    made[0].mul_(scale)
    made[1] = dk_GTD.mul_(scale)
    made[2] = dv_GTD
    return made


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
    queries = min(T, QUERIES)
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


# --- fused layers ------------------------------------------------------------------------------------------------------
#
# A layer of a bf16 step with its gradients written out by hand: one node of the autograd graph instead of forty. With few
# tokens, or a small model, calling an operation takes longer than the operation: a sixth of a step of 66 tokens was spent
# on bookkeeping (decision 017). Types are those that the layer has under autocast.

_LOW = torch.bfloat16
_ALL = (True, True, True)  # gradients of a norm


def suits_fused(x_BTC: Tensor, cached: bool) -> bool:
    """A step that learns in bf16, on a CPU, without a cache; what is compiled is left to the compiler."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not x_BTC.requires_grad or not x_BTC.numel():
        return False
    if "fused_layers" not in enabled:
        return False
    low = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == _LOW
    return low and x_BTC.device.type == "cpu" and x_BTC.dtype == torch.float32 and not cached


def _can_take(tensors: Sequence[Tensor | None]) -> bool:
    """All there, in float32."""
    return all(tensor is not None and tensor.dtype == torch.float32 for tensor in tensors)


def fused_gpt2(layer: Any, x_BTC: Tensor, mask: Tensor | None, cached: bool) -> Tensor | None:
    """The output of a GPT2Layer; None where the plain operations are to be used."""
    if not suits_fused(x_BTC, cached) or not untouched(layer):
        return None
    attn, mlp = layer.attn, layer.mlp
    parts = (layer.ln_1, attn.c_attn, attn.c_proj, layer.ln_2, mlp.c_fc, mlp.c_proj)
    tensors = [tensor for part in parts for tensor in (part.weight, part.bias)]
    if attn.dropout or mlp.dropout or layer.ln_1.eps != layer.ln_2.eps or not _can_take(tensors):
        return None
    return gpt2_layer(x_BTC, mask, attn.head_width, layer.ln_1.eps, *tensors)


def fused_llama(layer: Any, x_BTC: Tensor, mask: Tensor | None, rotary: RotaryCosSin, cached: bool) -> Tensor | None:
    """The output of a LlamaLayer; None where the plain operations are to be used."""
    if not suits_fused(x_BTC, cached) or not untouched(layer):
        return None
    attn, mlp, norm_1, norm_2 = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
    projections = (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj)
    parts = (norm_1, *projections, norm_2, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    weights = [part.weight for part in parts]
    if attn.dropout or norm_1.eps != norm_2.eps or not _can_take(weights):
        return None
    return llama_layer(x_BTC, mask, rotary, (attn.head_width, norm_1.eps), *weights)


def gpt2_layer(x_BTC: Tensor, mask: Tensor | None, head_width: int, eps: float, *tensors: Tensor) -> Tensor:
    """`tensors`: weight and bias of the first norm, query-key-value, output, the second norm, up, down."""
    out: Tensor = _GPT2.apply(x_BTC, mask, head_width, eps, *tensors)  # type: ignore[no-untyped-call]
    return out


class _GPT2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, mask: Tensor | None, D: int, eps: float, *tensors: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        norm1_w, norm1_b, qkv_w, qkv_b, out_w, out_b, norm2_w, norm2_b, up_w, up_b, down_w, down_b = tensors
        with torch.autocast("cpu", enabled=False):
            qkv_w, out_w, up_w, down_w = (weight.to(_LOW) for weight in (qkv_w, out_w, up_w, down_w))
            x_NC = x_BTC.reshape(-1, C)
            n1_NC, *sums1 = torch.native_layer_norm(x_NC, (C,), norm1_w, norm1_b, eps)
            n1_NC = n1_NC.to(_LOW)
            qkv = torch.addmm(qkv_b.to(_LOW), n1_NC, qkv_w).view(B, T, 3, -1, D).permute(2, 0, 3, 1, 4)
            q_GTD, k_GTD, v_GTD = qkv.reshape(3, -1, T, D).unbind()
            mixed_GTD, kept = attention_forward(q_GTD, k_GTD, v_GTD, mask)
            mixed_NC = _from_heads(mixed_GTD, B)
            y_NC = x_NC + torch.addmm(out_b.to(_LOW), mixed_NC, out_w)
            n2_NC, *sums2 = torch.native_layer_norm(y_NC, (C,), norm2_w, norm2_b, eps)
            n2_NC = n2_NC.to(_LOW)
            h_NM = torch.addmm(up_b.to(_LOW), n2_NC, up_w)
            g_NM = functional.gelu(h_NM, approximate="tanh")
            out_NC = y_NC + torch.addmm(down_b.to(_LOW), g_NM, down_w)
        ctx.save_for_backward(
            x_NC, *sums1, norm1_w, norm1_b, y_NC, *sums2, norm2_w, norm2_b, qkv_w, out_w, up_w, down_w,
            n1_NC, q_GTD, k_GTD, v_GTD, mixed_NC, n2_NC, h_NM, g_NM, mask, *kept,
        )  # fmt: skip
        return out_NC.view(B, T, C)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_BTC: Tensor) -> tuple[Tensor | None, ...]:
        (x_NC, mean1, spread1, norm1_w, norm1_b, y_NC, mean2, spread2, norm2_w, norm2_b, qkv_w, out_w, up_w, down_w,
         n1_NC, q_GTD, k_GTD, v_GTD, mixed_NC, n2_NC, h_NM, g_NM, mask, *kept) = ctx.saved_tensors  # fmt: skip
        B, T, C = upstream_BTC.shape
        back = torch.ops.aten.native_layer_norm_backward
        with torch.autocast("cpu", enabled=False):
            up_NC = upstream_BTC.reshape(-1, C)
            low_NC = up_NC.to(_LOW)
            ddown_w, ddown_b = g_NM.t() @ low_NC, up_NC.sum(0)
            dh_NM = torch.ops.aten.gelu_backward(low_NC @ down_w.t(), h_NM, approximate="tanh")
            dup_w, dup_b = n2_NC.t() @ dh_NM, dh_NM.sum(0, dtype=torch.float32)
            dn2_NC = (dh_NM @ up_w.t()).float()
            dy_NC, dnorm2_w, dnorm2_b = back(dn2_NC, y_NC, (C,), mean2, spread2, norm2_w, norm2_b, _ALL)
            dy_NC += up_NC
            low_NC = dy_NC.to(_LOW)
            dout_w, dout_b = mixed_NC.t() @ low_NC, dy_NC.sum(0)
            dmixed_GTD = _to_heads(low_NC @ out_w.t(), B, q_GTD.shape[2])
            dheads = _attention_backward(dmixed_GTD, (q_GTD, k_GTD, v_GTD), mask, kept)
            dqkv = dheads.view(3, B, -1, *q_GTD.shape[1:]).permute(1, 3, 0, 2, 4).reshape(-1, 3 * C)
            dqkv_w, dqkv_b = n1_NC.t() @ dqkv, dqkv.sum(0, dtype=torch.float32)
            dn1_NC = (dqkv @ qkv_w.t()).float()
            dx_NC, dnorm1_w, dnorm1_b = back(dn1_NC, x_NC, (C,), mean1, spread1, norm1_w, norm1_b, _ALL)
            dx_NC += dy_NC
        return (
            dx_NC.view(B, T, C), None, None, None, dnorm1_w, dnorm1_b, dqkv_w.float(), dqkv_b, dout_w.float(), dout_b,
            dnorm2_w, dnorm2_b, dup_w.float(), dup_b, ddown_w.float(), ddown_b,
        )  # fmt: skip


def llama_layer(
    x_BTC: Tensor, mask: Tensor | None, rotary: RotaryCosSin, sizes: tuple[int, float], *weights: Tensor
) -> Tensor:
    """`weights`: of the first norm, query, key, value, output, the second norm, gate, up, down; `sizes`: head width, eps."""
    out: Tensor = _Llama.apply(x_BTC, mask, rotary, sizes, *weights)  # type: ignore[no-untyped-call]
    return out


class _Llama(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTC: Tensor, mask: Tensor | None, rotary: RotaryCosSin, sizes: tuple[int, float], *tensors: Tensor
    ) -> Tensor:
        (B, T, C), (D, eps) = x_BTC.shape, sizes
        norm1_w, *weights1, norm2_w, gate_w, up_w, down_w = tensors
        with torch.autocast("cpu", enabled=False):
            q_w, k_w, v_w, out_w, gate_w, up_w, down_w = (w.to(_LOW) for w in (*weights1, gate_w, up_w, down_w))
            x_NC = x_BTC.reshape(-1, C)
            scaled1_NC, spread1_N1 = _rms(x_NC, eps)
            n1_NC = (scaled1_NC * norm1_w).to(_LOW)
            q_GTD, k_GTD, v_GTD = (_to_heads(n1_NC @ weight.t(), B, D) for weight in (q_w, k_w, v_w))
            q_GTD, k_GTD = _rotate(q_GTD, rotary, B), _rotate(k_GTD, rotary, B)
            groups = len(q_GTD) // len(k_GTD)
            k_GTD, v_GTD = (part if groups == 1 else part.repeat_interleave(groups, 0) for part in (k_GTD, v_GTD))
            mixed_GTD, kept = attention_forward(q_GTD, k_GTD, v_GTD, mask)
            mixed_NC = _from_heads(mixed_GTD, B)
            y_NC = x_NC + mixed_NC @ out_w.t()
            scaled2_NC, spread2_N1 = _rms(y_NC, eps)
            n2_NC = (scaled2_NC * norm2_w).to(_LOW)
            gate_NM, h_NM = n2_NC @ gate_w.t(), n2_NC @ up_w.t()
            g_NM = functional.silu(gate_NM) * h_NM
            out_NC = y_NC + g_NM @ down_w.t()
        ctx.groups = groups
        ctx.save_for_backward(
            *rotary, scaled1_NC, spread1_N1, norm1_w, scaled2_NC, spread2_N1, norm2_w, q_w, k_w, v_w, out_w, gate_w, up_w, down_w,
            n1_NC, q_GTD, k_GTD, v_GTD, mixed_NC, n2_NC, gate_NM, h_NM, g_NM, mask, *kept,
        )  # fmt: skip
        return out_NC.view(B, T, C)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_BTC: Tensor) -> tuple[Tensor | None, ...]:
        (cos, sin, scaled1_NC, spread1_N1, norm1_w, scaled2_NC, spread2_N1, norm2_w, q_w, k_w, v_w, out_w, gate_w, up_w, down_w,
         n1_NC, q_GTD, k_GTD, v_GTD, mixed_NC, n2_NC, gate_NM, h_NM, g_NM, mask, *kept) = ctx.saved_tensors  # fmt: skip
        B, T, C = upstream_BTC.shape
        with torch.autocast("cpu", enabled=False):
            up_NC = upstream_BTC.reshape(-1, C)
            low_NC = up_NC.to(_LOW)
            dg_NM, ddown_w = low_NC @ down_w, low_NC.t() @ g_NM
            dgate_NM = torch.ops.aten.silu_backward(dg_NM * h_NM, gate_NM)
            dh_NM = dg_NM.mul_(functional.silu(gate_NM))
            dgate_w, dup_w = dgate_NM.t() @ n2_NC, dh_NM.t() @ n2_NC
            dn2_NC = torch.addmm(dgate_NM @ gate_w, dh_NM, up_w)
            dy_NC, dnorm2_w = _rms_back(dn2_NC.float(), scaled2_NC, spread2_N1, norm2_w)
            dy_NC += up_NC
            low_NC = dy_NC.to(_LOW)
            dout_w = low_NC.t() @ mixed_NC
            dmixed_GTD = _to_heads(low_NC @ out_w, B, q_GTD.shape[2])
            dq_GTD, *shared = _attention_backward(dmixed_GTD, (q_GTD, k_GTD, v_GTD), mask, kept).unbind()
            dk_GTD, dv_GTD = (
                part if ctx.groups == 1 else part.view(-1, ctx.groups, *part.shape[1:]).sum(1) for part in shared
            )
            inverse = (cos, -sin)
            dq_GTD, dk_GTD = _rotate(dq_GTD, inverse, B), _rotate(dk_GTD, inverse, B)
            dq, dk, dv = (_from_heads(part, B) for part in (dq_GTD, dk_GTD, dv_GTD))
            dq_w, dk_w, dv_w = (part.t() @ n1_NC for part in (dq, dk, dv))
            dn1_NC = torch.addmm(torch.addmm(dq @ q_w, dk, k_w), dv, v_w)
            dx_NC, dnorm1_w = _rms_back(dn1_NC.float(), scaled1_NC, spread1_N1, norm1_w)
            dx_NC += dy_NC
        matrices1, matrices2 = (dq_w, dk_w, dv_w, dout_w), (dgate_w, dup_w, ddown_w)
        return (
            dx_NC.view(B, T, C), None, None, None,
            dnorm1_w, *(part.float() for part in matrices1), dnorm2_w, *(part.float() for part in matrices2),
        )  # fmt: skip


def _rms(x_NC: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x divided by the root of its mean square, and one over that root."""
    spread_N1 = x_NC.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return x_NC * spread_N1, spread_N1


def _rms_back(up_NC: Tensor, scaled_NC: Tensor, spread_N1: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    dweight_C = (up_NC * scaled_NC).sum(0)
    up_NC = up_NC * weight_C
    along_N1 = (up_NC * scaled_NC).mean(-1, keepdim=True)
    return up_NC.addcmul_(scaled_NC, along_N1, value=-1).mul_(spread_N1), dweight_C


def _rotate(x_GTD: Tensor, rotary: RotaryCosSin, samples: int) -> Tensor:
    """RoPE, as transformer.apply_rotary; with the sine negated, its gradient."""
    cos, sin = rotary
    x_BHTD = x_GTD.view(samples, -1, *x_GTD.shape[1:])
    first, second = x_BHTD.chunk(2, dim=-1)
    half_BHTD = torch.cat((-second, first), dim=-1)
    return (x_BHTD * cos).addcmul_(half_BHTD, sin).to(x_GTD.dtype).view(x_GTD.shape)


def _to_heads(x_NC: Tensor, samples: int, D: int) -> Tensor:
    T = len(x_NC) // samples
    return x_NC.view(samples, T, -1, D).transpose(1, 2).reshape(-1, T, D)


def _from_heads(x_GTD: Tensor, samples: int) -> Tensor:
    T, D = x_GTD.shape[1:]
    return x_GTD.view(samples, -1, T, D).transpose(1, 2).reshape(samples * T, -1)


# --- tied gradient -----------------------------------------------------------------------------------------------------
#
# The embedding of a tied model is also the last matrix. Left to autograd, its gradient is made twice, and the
# embedding's part, nearly all of it zeros, is cleared and added up in every step: a twentieth of a step of two short
# examples, and the memory. Here the loss makes the gradient, and the embedding adds its rows to it, one after the other,
# in the same order each time. On a GPU torch's way is kept.


class TiedGradient:
    """What the loss hands to the embedding within one backward pass."""

    def __init__(self) -> None:
        self.gradient_VC: Tensor | None = None


def tie_for(weight_VC: Tensor) -> TiedGradient | None:
    """For a step that learns, on a CPU."""
    if "tied_gradient" not in enabled:
        return None
    learns = torch.is_grad_enabled() and weight_VC.requires_grad and weight_VC.dtype == torch.float32
    return TiedGradient() if learns and weight_VC.device.type == "cpu" and not torch.compiler.is_compiling() else None


def tied_gradient(table: nn.Embedding, layers: nn.ModuleList) -> TiedGradient | None:
    """Where the embedding is torch's own without options, and nothing between it and the tied head can cut the graph."""
    if type(table) is not nn.Embedding or not is_bare(table):
        return None
    plain = table.padding_idx is None and table.max_norm is None and not (table.scale_grad_by_freq or table.sparse)
    return tie_for(table.weight) if plain and all(untouched(layer) for layer in layers) else None


def embed(table: nn.Embedding, ids_BT: Tensor, tie: TiedGradient | None) -> Tensor:
    if tie is None:
        found: Tensor = table(ids_BT)
        return found
    rows: Tensor = _TiedEmbedding.apply(table.weight, ids_BT, tie)  # type: ignore[no-untyped-call]
    return rows


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VC: Tensor, ids_BT: Tensor, tie: TiedGradient) -> Tensor:
        ctx.save_for_backward(ids_BT)
        ctx.tie = tie
        return functional.embedding(ids_BT, weight_VC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_BTC: Tensor) -> tuple[Tensor, None, None]:
        (ids_BT,) = ctx.saved_tensors
        gradient_VC, ctx.tie.gradient_VC = ctx.tie.gradient_VC, None
        assert gradient_VC is not None, "the loss comes first in the backward pass"
        return gradient_VC.index_add_(0, ids_BT.flatten(), upstream_BTC.flatten(0, 1)), None, None


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
