"""The last matrix and the loss in one, a chunk of rows at a time: the logits of a whole batch never exist.

In:  the last layer's output, the [V, C] matrix of the head, the targets.
Out: the sum of cross entropy, and both gradients; or the cross entropy of each target.

Why. A batch of 8 x 256 tokens and 30,000 words has 245 MB of logits. Plain cross entropy holds three tensors of that size (the
logits, their log-softmax, its gradient) and has them mapped anew in every step.

How. For a chunk of rows: logits = x W', their loss, and at once their gradient, softmax minus one at the target, which
overwrites the logits. From it come the chunk's rows of dx and its share of dW. So one chunk of logits is all that exists at
a time, in a buffer that is kept between steps, and the backward pass only hands over dx and dW, which the forward pass
has already made. The price: the gradient is made also where nobody asks for it later, and can be used once.

In bf16 and fp16 the softmax is worked out in float32, a strip of the chunk at a time, small enough for a CPU's caches. In fp16
the gradient is scaled before it is narrowed: afterwards, what had vanished would not come back. Rows without a target (prompts,
padding) are left out before the matrix. On a GPU the matrix is widened with zeros to a multiple of 64 words, which its
kernels are made for (50,257 is odd); those words get no probability and no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lamplighter.model import shape

_LEAST_ROWS = 128  # of single losses: each chunk adds to the whole gradient of the matrix
_STRIP_WORDS = 1024  # of the matrix's gradient, converted together


class LossBuffers:
    """The memory for one chunk of logits, allocated once and kept between steps."""

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, Tensor] = {}

    def take(self, rows: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        kept = self._kept.get(dtype)
        if kept is None or kept.device != like.device or kept.shape[0] < rows or kept.shape[1] != like.shape[0]:
            kept = self._kept[dtype] = torch.empty(rows, like.shape[0], dtype=dtype, device=like.device)
        return kept[:rows]


class _Settings(NamedTuple):
    scale: float | Tensor
    dtype: torch.dtype  # of the products: autocast's where it is on
    buffers: LossBuffers


class Counted(NamedTuple):
    """The places of the targets >= 0 among all of a batch, known beforehand: looking for them, a GPU would be waited for."""

    places: Tensor | None  # None: all of them


def chunked_loss(
    x_BTC: Tensor,
    weight_VC: Tensor,
    targets_BT: Tensor,
    scale: float | Tensor,
    *,
    buffers: LossBuffers,
    counted: Counted | None = None,
) -> Tensor:
    """`scale` times the sum of cross entropy (nats) over targets >= 0, in float32."""
    x_NC, targets_N = x_BTC.flatten(0, 1), targets_BT.flatten()
    places = _places(targets_N) if counted is None else counted.places
    if places is not None:
        x_NC, targets_N = x_NC.index_select(0, places), targets_N.index_select(0, places)
    device = x_NC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_NC.dtype
    settings = _Settings(scale, dtype, buffers)
    with torch.autocast(device, enabled=False):
        loss: Tensor = _ChunkedLoss.apply(x_NC, weight_VC, targets_N, settings)  # type: ignore[no-untyped-call]
    return loss


def token_nats(
    x_BTC: Tensor,
    weight_VC: Tensor,
    targets_BT: Tensor,
    *,
    buffers: LossBuffers,
    counted: Counted | None = None,
) -> Tensor:
    """The cross entropy of each target >= 0, [N] in float32, in their order, for a loss that is no sum over tokens.

    What each token's gradient is multiplied by is not known before all losses are there, so the backward pass works every chunk of
    logits out again.
    """
    x_NC, targets_N = x_BTC.flatten(0, 1), targets_BT.flatten()
    places = _places(targets_N) if counted is None else counted.places
    if places is not None:
        x_NC, targets_N = x_NC.index_select(0, places), targets_N.index_select(0, places)
    device = x_NC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_NC.dtype
    settings = _Settings(1.0, dtype, buffers)
    with torch.autocast(device, enabled=False):
        nats_N: Tensor = _TokenNats.apply(x_NC, weight_VC, targets_N, settings)  # type: ignore[no-untyped-call]
    return nats_N


def _places(targets_N: Tensor) -> Tensor | None:
    counted_N = targets_N >= 0
    return None if bool(counted_N.all()) else counted_N.nonzero().squeeze(1)


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are worked out in the forward pass, chunk by chunk; the backward pass hands them over."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, settings: _Settings) -> Tensor:
        scale, dtype, buffers = settings
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        words, weight = len(weight_VC), _widened(weight_VC, dtype)
        dx_NC = torch.empty_like(x_NC) if wants_x else None
        dweight_VC = torch.empty_like(weight, dtype=weight_VC.dtype) if wants_weight else None
        if dweight_VC is not None and not len(x_NC):
            dweight_VC.zero_()
        # What the gradient is multiplied by before it is narrowed, and what it is multiplied by after the products.
        early, late = (scale, 1.0) if dtype == torch.float16 else (None, scale)
        loss_N1 = torch.empty(len(x_NC), 1, dtype=torch.float32, device=x_NC.device)
        rows = min(shape.block_rows(weight_VC.shape[0], x_NC.device.type), max(1, len(x_NC)))
        for start in range(0, len(x_NC), rows):
            here = slice(start, start + rows)
            x_RC, targets_R1 = x_NC[here].to(dtype), targets_N[here, None]
            chunk_RV = buffers.take(rows, weight, dtype)[: len(x_RC)]
            torch.mm(x_RC, weight.t(), out=chunk_RV)
            strip = shape.strip_rows(rows, x_NC.device.type)
            for top in range(0, len(x_RC), strip):
                part = slice(top, top + strip)
                strip_SV = chunk_RV[part]
                if strip_SV.shape[1] > words:
                    strip_SV[:, words:] = float("-inf")
                wanted = wants_x or wants_weight
                loss_N1[here][part] = _to_gradient(strip_SV, targets_R1[part], buffers, wanted=wanted, scale=early)
            if dx_NC is not None:
                dx_NC[here] = chunk_RV @ weight
            if dweight_VC is not None:
                _add_product(dweight_VC, chunk_RV, x_RC, late, first=start == 0)
        dx_NC = dx_NC if dx_NC is None or early is not None else dx_NC.mul_(late)
        ctx.save_for_backward(dx_NC, None if dweight_VC is None else dweight_VC[:words])
        return loss_N1.sum() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        dx_NC, dweight_VC = ctx.saved_tensors
        if upstream.device.type != "cpu":  # not asked whether it is 1: that would be waited for
            dx_NC, dweight_VC = (None if part is None else part.mul_(upstream) for part in (dx_NC, dweight_VC))
        elif float(upstream) != 1.0:
            dx_NC, dweight_VC = (None if part is None else part * upstream for part in (dx_NC, dweight_VC))
        return dx_NC, dweight_VC, None, None


class _TokenNats(torch.autograd.Function):
    """Losses in the forward pass, gradients in the backward pass, each a chunk of logits at a time."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, settings: _Settings) -> Tensor:
        ctx.settings = settings
        ctx.save_for_backward(x_NC, weight_VC, targets_N)
        nats_N1 = torch.empty(len(x_NC), 1, dtype=torch.float32, device=x_NC.device)
        weight = _widened(weight_VC, settings.dtype)
        for rows, strip_SV in _strips(x_NC, weight, len(weight_VC), settings):
            nats_N1[rows] = _to_gradient(strip_SV, targets_N[rows, None], settings.buffers, wanted=False, scale=None)
        return nats_N1.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor | None, ...]:
        x_NC, weight_VC, targets_N = ctx.saved_tensors
        settings, (wants_x, wants_weight) = ctx.settings, ctx.needs_input_grad[:2]
        weight = _widened(weight_VC, settings.dtype)
        dx_NC = torch.zeros_like(x_NC) if wants_x else None
        dweight_VC = torch.zeros_like(weight, dtype=weight_VC.dtype) if wants_weight else None
        for rows, strip_SV in _strips(x_NC, weight, len(weight_VC), settings):
            _to_gradient(strip_SV, targets_N[rows, None], settings.buffers, wanted=True, scale=upstream_N[rows, None])
            if dx_NC is not None:
                dx_NC[rows] = strip_SV @ weight
            if dweight_VC is not None:
                _add_product(dweight_VC, strip_SV, x_NC[rows].to(settings.dtype), 1.0, first=False)
        return dx_NC, None if dweight_VC is None else dweight_VC[: len(weight_VC)], None, None


def _strips(x_NC: Tensor, weight: Tensor, words: int, settings: _Settings) -> Iterator[tuple[slice, Tensor]]:
    """The logits of so many rows at a time, in a buffer that the next ones overwrite."""
    rows = min(max(_LEAST_ROWS, shape.block_rows(words, x_NC.device.type)), max(1, len(x_NC)))
    for start in range(0, len(x_NC), rows):
        here = slice(start, min(start + rows, len(x_NC)))
        chunk_RV = settings.buffers.take(rows, weight, settings.dtype)[: here.stop - start]
        torch.mm(x_NC[here].to(settings.dtype), weight.t(), out=chunk_RV)
        chunk_RV[:, words:] = float("-inf")
        yield here, chunk_RV


def _widened(weight_VC: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix in the type of the products, with as many words as they are made for."""
    words = shape.widened_vocab(len(weight_VC), weight_VC.device.type)
    if words == len(weight_VC):
        return weight_VC.to(dtype)
    wide = weight_VC.new_zeros(words, weight_VC.shape[1], dtype=dtype)
    wide[: len(weight_VC)].copy_(weight_VC)
    return wide


def _to_gradient(
    chunk_SV: Tensor, targets_S1: Tensor, buffers: LossBuffers, *, wanted: bool, scale: float | Tensor | None
) -> Tensor:
    """The loss of a strip of logits; the strip itself becomes its gradient, in float32 in between.

    One pass of softmax gives both: its largest probability is 1 / the sum of exp(logit - largest logit).
    """
    wide_SV = chunk_SV
    if chunk_SV.dtype != torch.float32:
        wide_SV = buffers.take(len(chunk_SV), chunk_SV[0], torch.float32).copy_(chunk_SV)
    loss_S1 = wide_SV.amax(-1, keepdim=True) - wide_SV.gather(1, targets_S1)
    torch.ops.aten._softmax.out(wide_SV, -1, False, out=wide_SV)
    loss_S1 -= wide_SV.amax(-1, keepdim=True).log_()
    if wanted:  # the probabilities, less one at the target, are the gradient
        wide_SV.scatter_add_(1, targets_S1, torch.full_like(loss_S1, -1.0))
        if scale is not None:
            wide_SV.mul_(scale)
        if wide_SV is not chunk_SV:
            chunk_SV.copy_(wide_SV)
    return loss_S1


def _add_product(dweight_VC: Tensor, gradient_RV: Tensor, x_RC: Tensor, scale: float | Tensor, first: bool) -> None:
    """Add up, or begin, the gradient of the matrix; in 16 bits by strips, whose float32 stays in the caches of a CPU."""
    assert isinstance(scale, (int, float)), "a scale that is a tensor is that of fp16, and is in the gradient already"
    if gradient_RV.dtype == dweight_VC.dtype:
        torch.addmm(dweight_VC, gradient_RV.t(), x_RC, beta=0.0 if first else 1.0, alpha=scale, out=dweight_VC)
        return
    product_VC = gradient_RV.t() @ x_RC
    words = _STRIP_WORDS if dweight_VC.device.type == "cpu" else len(dweight_VC)
    for sums, part in zip(torch.split(dweight_VC, words), torch.split(product_VC, words), strict=True):
        if first:
            sums.copy_(part).mul_(scale)
        else:
            sums.add_(part, alpha=scale)
