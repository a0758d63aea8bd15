"""Memory on paper against what autograd really keeps, and against the memory of a real process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lamplighter.gpus import Device, find
from lamplighter.model.recompute import recompute_blocks
from lamplighter.model.shape import Shape, matmul_parameters_per_layer
from lamplighter.model.transformer import Transformer, next_token_loss
from lamplighter.model.weights import init_weights
from lamplighter.plan.job import Job
from lamplighter.plan.memory import layer_bytes, memory

B, T, V = 2, 64, 90
CPU = Device("cpu", 24.0, None, 1e11)


def kept_bytes(shape: Shape, dtype: str, again: bool = False, packed: bool = False) -> int:
    """Of all tensors that autograd holds on to, weights excepted."""
    model = Transformer(shape)
    init_weights(model, 1)
    if again:
        recompute_blocks(model)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.randint(0, shape.vocab_size, (B, shape.positions))
    segments = (torch.arange(shape.positions) // 20).expand(B, -1) if packed else None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(ids, segments_BT=segments)
        next_token_loss(logits, ids)
    return sum(size for size, _ in held.values())


def compare_layer(family: str, dtype: str, dropout: float, packed: bool, length: int = T, heads: int = 4) -> None:
    small = Shape(family, V, length, 1, 64, heads, dropout=dropout)  # type: ignore[arg-type]
    real = (kept_bytes(replace(small, layers=3), dtype, packed=packed) - kept_bytes(small, dtype, packed=packed)) / 2
    copies = 2 * matmul_parameters_per_layer(small) if dtype == "bf16" else 0
    paper = B * length * layer_bytes(small, dtype, True, packed, length) + copies
    assert real == pytest.approx(paper, rel=0.02), (family, dtype, dropout, packed)


CASES = [(0.0, False), (0.1, False), (0.0, True)]


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize(("dropout", "packed"), CASES)
def test_a_layer_keeps_what_is_written_down(family: str, dropout: float, packed: bool) -> None:
    compare_layer(family, "fp32", dropout, packed)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_a_qwen3_normalises_is_counted(dtype: str) -> None:
    small = Shape("qwen3", V, T, 1, 64, 4, kv_heads=2)
    real = (kept_bytes(replace(small, layers=3), dtype) - kept_bytes(small, dtype)) / 2
    copies = 2 * matmul_parameters_per_layer(small) if dtype == "bf16" else 0
    assert real == pytest.approx(B * T * layer_bytes(small, dtype, True, False, T) + copies, rel=0.02)


def test_keys_and_values_that_heads_share_are_kept_for_each() -> None:
    small = Shape("llama", V, T, 1, 64, 4, kv_heads=2)
    real = (kept_bytes(replace(small, layers=3), "fp32") - kept_bytes(small, "fp32")) / 2
    assert real == pytest.approx(B * T * layer_bytes(small, "fp32", True, False, T), rel=0.02)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_recompute_keeps_one_input_for_each_layer(family: str) -> None:
    shape = Shape(family, V, T, 3, 64, 4)  # type: ignore[arg-type]
    job = Job(shape, T, B, B, 10)
    plain, again = memory(job, CPU), memory(replace(job, recompute=True), CPU)
    for found, flag in ((plain, False), (again, True)):
        logits = 4 * B * T * V  # of its twelve bytes four are there before the backward pass
        assert found.logits == 3 * logits
        assert kept_bytes(shape, "fp32", again=flag) == pytest.approx(found.activations + logits, rel=0.03)
    assert again.activations < plain.activations / 3
    assert again.layer == pytest.approx(plain.activations / 3, rel=0.25), "one layer at a time is whole"


def test_the_copy_for_a_save_is_counted_where_it_lies() -> None:
    job = Job(Shape("gpt2", 8000, 256, 4, 256, 4), 256, 8, 8, 10)
    here, there = memory(job, CPU), memory(job, find("l4"))
    assert here.staging == there.staging == 12 * job.params
    assert here.peak - here.training == here.staging and there.peak == there.training


def test_gradients_lie_beside_activations_only_where_micro_batches_add_up() -> None:
    job = Job(Shape("gpt2", 8000, 256, 4, 256, 4), 256, 8, 8, 10)
    one, two = memory(job, CPU), memory(replace(job, batch_size=16), CPU)
    assert two.peak - one.peak == two.gradients
