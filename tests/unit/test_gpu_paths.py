"""What only a GPU does, without one: the widened vocabulary, packed rows without a mask, and a whole step on tensors without numbers.

A step runs on torch's meta tensors, where a read of a number raises. (Fake CUDA tensors would raise too, but torch without CUDA
cannot index them.) The variable-length kernel is stood in for by the same attention, example by example.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from lamplighter.config import Train
from lamplighter.data.batches import Batch
from lamplighter.model import shape as shapes
from lamplighter.model import varlen
from lamplighter.model.chunked_loss import LossBuffers, chunked_loss
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer
from lamplighter.model.weights import init_weights
from lamplighter.train.gradients import batch_loss
from lamplighter.train.hardware import Machine
from lamplighter.train.optimizers import adamw, clip_scale, not_finite

CPU = Machine(torch.device("cpu"), torch.float32, 1, "a CPU", peak_flops=1e9, reasons=())
WORDS = 61


def _model(family: str, device: str = "cpu") -> Transformer:
    kind = Shape(family, WORDS, 32, 2, 32, 4, kv_heads=2 if family == "llama" else 4, dropout=0.0)  # type: ignore[arg-type]
    with torch.device(device):
        model = Transformer(kind)
    if device == "cpu":
        init_weights(model, 1)
    return model


def _batch(packed: bool) -> Batch:
    ids = (np.arange(3 * 24, dtype=np.int64) * 7 % WORDS).reshape(3, 24)
    targets = ids.copy()
    segments = None
    if packed:
        targets[:, ::3] = -1
        lengths = ((9, 15), (24,), (1, 1, 20, 2))
        segments = np.stack([np.repeat(np.arange(len(row)), row) for row in lengths]).astype(np.int64)
    return Batch(1, ids, targets, segments, np.arange(3), epoch=0.0, real_tokens=int((targets >= 0).sum()))


# ---------------------------------------------------------------- the vocabulary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("words", [61, 64, 127])
def test_a_widened_vocabulary_changes_neither_loss_nor_gradients(
    words: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 24, generator=generator)
    weight = torch.randn(words, 24, generator=generator)
    targets = torch.randint(0, words, (1, 40), generator=generator)
    slack = 1e-5 if dtype == torch.float32 else 1e-2
    found = []
    for unit in (1, 64):
        monkeypatch.setattr(shapes, "widened_vocab", lambda count, _, unit=unit: -(-count // unit) * unit)
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            scale = torch.tensor(8.0) if dtype == torch.float16 else 0.5
            loss = chunked_loss(inputs[0][None], inputs[1], targets, scale, buffers=LossBuffers())
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([loss.detach(), *(one.grad for one in inputs)])
    for plain, wide in zip(*found, strict=True):
        assert plain.shape == wide.shape and torch.allclose(plain, wide, rtol=slack, atol=slack / 10)
    reference = functional.cross_entropy(x @ weight.t(), targets[0], reduction="sum")
    assert found[1][0].item() == pytest.approx(reference.item() * float(scale), rel=2e-2)


def test_a_gpu_gets_a_multiple_of_64_words() -> None:
    assert [shapes.widened_vocab(words, "cuda") for words in (50257, 50304, 1)] == [50304, 50304, 64]
    assert shapes.widened_vocab(50257, "cpu") == 50257


def test_in_fp16_small_gradients_survive_by_the_scale() -> None:
    """Scaled before they are narrowed: a probability of 1e-7 divided by many tokens would be 0 otherwise."""
    x, weight = torch.zeros(1, 2, 8), torch.zeros(50_000, 8)
    x[..., 0], weight[0, 0] = 1.0, 6.0
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = chunked_loss(x, weight, torch.tensor([[0, 0]]), torch.tensor(2.0**16), buffers=LossBuffers())
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and weight.grad[7, 0] > 0


# ---------------------------------------------------------------- packed rows


def _by_example(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bounds: Any, **more: Any) -> torch.Tensor:
    """What torch documents of varlen_attn, example by example."""
    assert more["window_size"] == (-1, 0) and bounds[0].dtype == torch.int32 and bounds[2] >= max(bounds[0].diff())
    groups = q.shape[1] // k.shape[1]
    assert more["enable_gqa"] is (groups > 1)
    parts = []
    for start, stop in zip(bounds[0][:-1].tolist(), bounds[0][1:].tolist(), strict=True):
        one = [x[start:stop].transpose(0, 1) for x in (q, k, v)]
        one[1:] = [x.repeat_interleave(groups, dim=0) for x in one[1:]]
        if stop > start:
            parts.append(functional.scaled_dot_product_attention(*one, is_causal=True).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_packed_rows_without_a_mask_are_those_with_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, found = _batch(packed=True), []
    monkeypatch.setattr(varlen, "_kernel", lambda: _by_example)
    for without_mask in (False, True):
        monkeypatch.setattr(varlen, "is_available", lambda *_: without_mask)  # noqa: B023
        model = _model(family)
        loss = batch_loss(model, batch, CPU, scale=1 / batch.real_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.allclose(one, two, rtol=1e-4, atol=1e-6) for one, two in zip(*found, strict=True))


def test_where_examples_begin_is_known_before_they_are_copied() -> None:
    segments = _batch(packed=True).segments
    assert segments is not None
    positions, bounds = varlen.layout(segments)
    assert bounds.tolist() == [0, 9, 24, 48, 49, 50, 70, 72, 72], "7 examples, and one of no tokens"
    assert positions[0].tolist() == [*range(9), *range(15)] and positions[2].tolist() == [0, 0, *range(20), 0, 1]
    assert len(varlen.layout(np.zeros((1, 5), np.int64))[1]) == 2


def test_a_cpu_has_no_such_kernel() -> None:
    assert not CPU.has_varlen(_model("gpt2").shape)


# ---------------------------------------------------------------- a step on tensors without numbers


def _step(model: Transformer, batch: Batch, where: Machine) -> None:
    optimizer = adamw(model, Train(steps=1))
    loss = batch_loss(model, batch, where, scale=1 / batch.real_tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    numbers = torch.stack((loss.detach(), optimizer.grad_norm()))
    optimizer.step(0.1, clip_scale(numbers[1], 0.3), not_finite(numbers))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_whole_step_reads_no_number(family: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # not known for this device
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    where = Machine(torch.device("meta"), torch.float32, 1, "no numbers", peak_flops=1e9, reasons=())
    _step(_model(family, "meta"), _batch(packed), where)
    with pytest.raises(RuntimeError, match="meta"):  # the control
        torch.ones(1, device="meta").item()
