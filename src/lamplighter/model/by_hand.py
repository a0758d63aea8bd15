"""A layer of a bf16 step on a CPU with its gradients written out: one node of the graph, where autograd has forty.

In:  a layer, its input [B, T, C] in float32, who may look at whom.
Out: its output, and all gradients, with the types that the layer has under autocast.

With few tokens, or a small model, calling an operation takes longer than the operation: a sixth of a step of 66 tokens was
spent on bookkeeping (decision 017). N tokens, C width, M MLP width, H heads, D head width, G heads of all samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lamplighter.model import attention

LOW = torch.bfloat16
ALL = (True, True, True)  # gradients of a norm
Turn = tuple[Tensor, Tensor]  # cosine and sine, as in transformer.py


def suits(x_BTC: Tensor, cached: bool) -> bool:
    """A step that learns in bf16, on a CPU, without a cache; what is compiled is left to the compiler."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not x_BTC.requires_grad or not x_BTC.numel():
        return False
    low = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == LOW
    return low and x_BTC.device.type == "cpu" and x_BTC.dtype == torch.float32 and not cached


def can_take(tensors: Sequence[Tensor | None]) -> bool:
    """All there, in float32."""
    return all(tensor is not None and tensor.dtype == torch.float32 for tensor in tensors)


# --- GPT-2 ---------------------------------------------------------------------------------------------------------


def gpt2(x_BTC: Tensor, mask: Tensor | None, head_width: int, eps: float, *tensors: Tensor) -> Tensor:
    """Weight and bias of: the first norm, questions to values, output, the second norm, up, down."""
    out: Tensor = _GPT2.apply(x_BTC, mask, head_width, eps, *tensors)  # type: ignore[no-untyped-call]
    return out


class _GPT2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, mask: Tensor | None, D: int, eps: float, *tensors: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        norm1_w, norm1_b, qkv_w, qkv_b, out_w, out_b, norm2_w, norm2_b, up_w, up_b, down_w, down_b = tensors
        with torch.autocast("cpu", enabled=False):
            qkv_w, out_w, up_w, down_w = (weight.to(LOW) for weight in (qkv_w, out_w, up_w, down_w))
            x_NC = x_BTC.reshape(-1, C)
            n1_NC, *sums1 = torch.native_layer_norm(x_NC, (C,), norm1_w, norm1_b, eps)
            n1_NC = n1_NC.to(LOW)
            qkv = torch.addmm(qkv_b.to(LOW), n1_NC, qkv_w).view(B, T, 3, -1, D).permute(2, 0, 3, 1, 4)
            q_GTD, k_GTD, v_GTD = qkv.reshape(3, -1, T, D).unbind()
            mixed_GTD, kept = attention.mix(q_GTD, k_GTD, v_GTD, mask)
            mixed_NC = _from_heads(mixed_GTD, B)
            y_NC = x_NC + torch.addmm(out_b.to(LOW), mixed_NC, out_w)
            n2_NC, *sums2 = torch.native_layer_norm(y_NC, (C,), norm2_w, norm2_b, eps)
            n2_NC = n2_NC.to(LOW)
            h_NM = torch.addmm(up_b.to(LOW), n2_NC, up_w)
            g_NM = functional.gelu(h_NM, approximate="tanh")
            out_NC = y_NC + torch.addmm(down_b.to(LOW), g_NM, down_w)
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
            low_NC = up_NC.to(LOW)
            ddown_w, ddown_b = g_NM.t() @ low_NC, up_NC.sum(0)
            dh_NM = torch.ops.aten.gelu_backward(low_NC @ down_w.t(), h_NM, approximate="tanh")
            dup_w, dup_b = n2_NC.t() @ dh_NM, dh_NM.sum(0, dtype=torch.float32)
            dn2_NC = (dh_NM @ up_w.t()).float()
            dy_NC, dnorm2_w, dnorm2_b = back(dn2_NC, y_NC, (C,), mean2, spread2, norm2_w, norm2_b, ALL)
            dy_NC += up_NC
            low_NC = dy_NC.to(LOW)
            dout_w, dout_b = mixed_NC.t() @ low_NC, dy_NC.sum(0)
            dmixed_GTD = _to_heads(low_NC @ out_w.t(), B, q_GTD.shape[2])
            dheads = attention.mix_back(dmixed_GTD, q_GTD, k_GTD, v_GTD, mask, kept)
            dqkv = dheads.view(3, B, -1, *q_GTD.shape[1:]).permute(1, 3, 0, 2, 4).reshape(-1, 3 * C)
            dqkv_w, dqkv_b = n1_NC.t() @ dqkv, dqkv.sum(0, dtype=torch.float32)
            dn1_NC = (dqkv @ qkv_w.t()).float()
            dx_NC, dnorm1_w, dnorm1_b = back(dn1_NC, x_NC, (C,), mean1, spread1, norm1_w, norm1_b, ALL)
            dx_NC += dy_NC
        return (
            dx_NC.view(B, T, C), None, None, None, dnorm1_w, dnorm1_b, dqkv_w.float(), dqkv_b, dout_w.float(), dout_b,
            dnorm2_w, dnorm2_b, dup_w.float(), dup_b, ddown_w.float(), ddown_b,
        )  # fmt: skip


# --- Llama ---------------------------------------------------------------------------------------------------------


def llama(x_BTC: Tensor, mask: Tensor | None, turn: Turn, head_width: int, eps: float, *weights: Tensor) -> Tensor:
    """The weights of: the first norm, questions, keys, values, output, the second norm, gate, up, down."""
    out: Tensor = _Llama.apply(x_BTC, mask, turn, head_width, eps, *weights)  # type: ignore[no-untyped-call]
    return out


class _Llama(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTC: Tensor, mask: Tensor | None, turn: Turn, D: int, eps: float, *tensors: Tensor
    ) -> Tensor:
        B, T, C = x_BTC.shape
        norm1_w, *weights1, norm2_w, gate_w, up_w, down_w = tensors
        with torch.autocast("cpu", enabled=False):
            q_w, k_w, v_w, out_w, gate_w, up_w, down_w = (w.to(LOW) for w in (*weights1, gate_w, up_w, down_w))
            x_NC = x_BTC.reshape(-1, C)
            scaled1_NC, spread1_N1 = _rms(x_NC, eps)
            n1_NC = (scaled1_NC * norm1_w).to(LOW)
            q_GTD, k_GTD, v_GTD = (_to_heads(n1_NC @ weight.t(), B, D) for weight in (q_w, k_w, v_w))
            q_GTD, k_GTD = _turned(q_GTD, turn, B), _turned(k_GTD, turn, B)
            groups = len(q_GTD) // len(k_GTD)
            k_GTD, v_GTD = (part if groups == 1 else part.repeat_interleave(groups, 0) for part in (k_GTD, v_GTD))
            mixed_GTD, kept = attention.mix(q_GTD, k_GTD, v_GTD, mask)
            mixed_NC = _from_heads(mixed_GTD, B)
            y_NC = x_NC + mixed_NC @ out_w.t()
            scaled2_NC, spread2_N1 = _rms(y_NC, eps)
            n2_NC = (scaled2_NC * norm2_w).to(LOW)
            gate_NM, h_NM = n2_NC @ gate_w.t(), n2_NC @ up_w.t()
            g_NM = functional.silu(gate_NM) * h_NM
            out_NC = y_NC + g_NM @ down_w.t()
        ctx.groups = groups
        ctx.save_for_backward(
            *turn, scaled1_NC, spread1_N1, norm1_w, scaled2_NC, spread2_N1, norm2_w, q_w, k_w, v_w, out_w, gate_w, up_w, down_w,
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
            low_NC = up_NC.to(LOW)
            dg_NM, ddown_w = low_NC @ down_w, low_NC.t() @ g_NM
            dgate_NM = torch.ops.aten.silu_backward(dg_NM * h_NM, gate_NM)
            dh_NM = dg_NM.mul_(functional.silu(gate_NM))
            dgate_w, dup_w = dgate_NM.t() @ n2_NC, dh_NM.t() @ n2_NC
            dn2_NC = torch.addmm(dgate_NM @ gate_w, dh_NM, up_w)
            dy_NC, dnorm2_w = _rms_back(dn2_NC.float(), scaled2_NC, spread2_N1, norm2_w)
            dy_NC += up_NC
            low_NC = dy_NC.to(LOW)
            dout_w = low_NC.t() @ mixed_NC
            dmixed_GTD = _to_heads(low_NC @ out_w, B, q_GTD.shape[2])
            dq_GTD, *shared = attention.mix_back(dmixed_GTD, q_GTD, k_GTD, v_GTD, mask, kept).unbind()
            dk_GTD, dv_GTD = (
                part if ctx.groups == 1 else part.view(-1, ctx.groups, *part.shape[1:]).sum(1) for part in shared
            )
            turn_back = (cos, -sin)
            dq_GTD, dk_GTD = _turned(dq_GTD, turn_back, B), _turned(dk_GTD, turn_back, B)
            dq, dk, dv = (_from_heads(part, B) for part in (dq_GTD, dk_GTD, dv_GTD))
            dq_w, dk_w, dv_w = (part.t() @ n1_NC for part in (dq, dk, dv))
            dn1_NC = torch.addmm(torch.addmm(dq @ q_w, dk, k_w), dv, v_w)
            dx_NC, dnorm1_w = _rms_back(dn1_NC.float(), scaled1_NC, spread1_N1, norm1_w)
            dx_NC += dy_NC
        matrices1, matrices2 = (dq_w, dk_w, dv_w, dout_w), (dgate_w, dup_w, ddown_w)
        return (
            dx_NC.view(B, T, C), None, None, None, None,
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


def _turned(x_GTD: Tensor, turn: Turn, samples: int) -> Tensor:
    """RoPE, as transformer.rotate; with the sine turned round, its gradient."""
    cos, sin = turn
    x_BHTD = x_GTD.view(samples, -1, *x_GTD.shape[1:])
    first, second = x_BHTD.chunk(2, dim=-1)
    half_BHTD = torch.cat((-second, first), dim=-1)
    return (x_BHTD * cos).addcmul_(half_BHTD, sin).to(x_GTD.dtype).view(x_GTD.shape)


# --- both ----------------------------------------------------------------------------------------------------------


def _to_heads(x_NC: Tensor, samples: int, D: int) -> Tensor:
    T = len(x_NC) // samples
    return x_NC.view(samples, T, -1, D).transpose(1, 2).reshape(-1, T, D)


def _from_heads(x_GTD: Tensor, samples: int) -> Tensor:
    T, D = x_GTD.shape[1:]
    return x_GTD.view(samples, -1, T, D).transpose(1, 2).reshape(samples * T, -1)
