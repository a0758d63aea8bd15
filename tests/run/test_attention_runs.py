"""What starts processes: Attention by plain products is attention, and so are its gradients: any length, any mask, any type."""

from __future__ import annotations

import pytest
import torch
from test_attention import documents, layer_output, plain, there_and_back
from torch import Tensor

from lamplighter.model import cpu, shape
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer, attend, attention_context, rotary_cos_sin
from lamplighter.model.weights import init_weights
from lamplighter.train.bf16 import make_it_work


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [64, 600])
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch says so whenever oneDNN is switched
def test_in_bf16_it_is_as_near_to_the_truth_as_torchs(masked: bool, length: int) -> None:
    inputs, mask = layer_output(2, 3, length, 32), documents(2, length) if masked else None
    rounded = [4 * part.bfloat16().double() for part in inputs]  # sharp: scores of some tens
    truth = there_and_back(plain, rounded, mask, torch.float64)
    with torch.backends.mkldnn.flags(enabled=make_it_work()):
        theirs = there_and_back(plain, rounded, mask, torch.bfloat16)
        ours = there_and_back(cpu.block_attention, rounded, mask, torch.bfloat16)
    for name, right, mine, other in zip(("mixed", "dq", "dk", "dv"), truth, ours, theirs, strict=True):
        far, theirs_far = ((found.double() - right).norm() / right.norm() for found in (mine, other))
        assert far < max(1.5 * theirs_far, 0.01), f"{name}: {far:.4f} against {theirs_far:.4f}"


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_it_is_taken_for_steps_that_learn_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real = cpu.attention_forward
    monkeypatch.setattr(cpu, "attention_forward", lambda *parts: (taken.append(1), real(*parts))[1])
    for family in ("gpt2", "llama"):
        model = Transformer(Shape(family, 50, 16, 2, 32, 4, kv_heads=2 if family == "llama" else 0))  # type: ignore[arg-type]
        init_weights(model, 1)
        ids = torch.arange(16)[None]
        with torch.autocast("cpu", torch.bfloat16), torch.backends.mkldnn.flags(enabled=make_it_work()):
            model(ids)
            assert len(taken) == 2, "two layers"
            with torch.no_grad():
                model(ids)
        model(ids)
        assert len(taken) == 2, "nothing is learned, or float32"
        taken.clear()
    q, k, v = (part.bfloat16().requires_grad_() for part in layer_output(1, 2, 8, 8))
    with torch.backends.mkldnn.flags(enabled=make_it_work()):
        attend(q, k, v, None, dropout=0.5)
        assert not taken, "dropout is torch's"
        long = [part.bfloat16().requires_grad_() for part in layer_output(1, 1, shape.BLOCK_ATTENTION_TOKENS + 1, 8)]
        attend(long[0], long[1], long[2], None, dropout=0.0)
        assert not taken, "torch's is faster for long rows"
        attend(q, k, v, None, dropout=0.0)
    assert taken == [1]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_a_compiled_block_keeps_torchs_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> Tensor:
        raise AssertionError("a compiled block is the compiler's")

    model = Transformer(Shape(family, 50, 16, 1, 32, 2))  # type: ignore[arg-type]
    init_weights(model, 3)
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    context = attention_context(torch.zeros(2, 8, dtype=torch.long), None, None)
    layer = model.transformer.h[0] if family == "gpt2" else model.model.layers[0]
    more = () if family == "gpt2" else (rotary_cos_sin(context.positions, 16, 10_000.0),)
    with torch.autocast("cpu", torch.bfloat16), torch.backends.mkldnn.flags(enabled=make_it_work()):
        uncompiled = layer(x, context, *more)
        monkeypatch.setattr(cpu, "attention_forward", never)
        with pytest.raises(AssertionError, match="the compiler's"):
            layer(x, context, *more)
        layer.compile(dynamic=False, backend="eager")
        torch.testing.assert_close(layer(x, context, *more), uncompiled, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_no_rows_in_are_no_rows_out(family: str) -> None:
    model = Transformer(Shape(family, 60, 16, 2, 32, 4))  # type: ignore[arg-type]
    init_weights(model, 3)
    for low in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=low), torch.backends.mkldnn.flags(enabled=make_it_work()):
            assert model(torch.zeros(0, 4, dtype=torch.long)).shape == (0, 4, 60)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_without_any_kernel_a_step_is_torchs_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "enabled", set())
    monkeypatch.setattr(cpu, "attention_forward", lambda *_: pytest.fail("a kernel that was switched off"))
    model = Transformer(Shape(family, 60, 16, 2, 32, 4))  # type: ignore[arg-type]
    init_weights(model, 3)
    ids = torch.arange(16)[None]
    for low in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=low), torch.backends.mkldnn.flags(enabled=make_it_work()):
            model(ids, targets_BT=ids).backward()
