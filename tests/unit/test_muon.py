"""Muon: torch's own numbers for matrices, AdamW for the rest, state that survives, and nothing changed by a bad step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lamplighter.config import Train
from lamplighter.model import cpu
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer, attention_context
from lamplighter.model.weights import init_weights
from lamplighter.train import hardware, muon
from lamplighter.train.optimizers import make_optimizer

SECTION = Train(steps=10, optimizer="muon", lr=0.02, weight_decay=0.1)


def a_model(family: str = "qwen3") -> Transformer:
    model = Transformer(Shape(family, 61, 32, 2, 32, 4, tie_embeddings=family != "qwen3"))  # type: ignore[arg-type]
    init_weights(model, 1)
    return model


def with_gradients(model: torch.nn.Module, seed: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * factor


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_matrices_move_as_torchs_muon_moves_them() -> None:
    """torch computes in bfloat16; here the same loop in float32 is compared, and in bfloat16 to the last bit."""
    generator = torch.Generator().manual_seed(1)
    for rows, columns in ((8, 8), (12, 5), (5, 12)):
        mine = torch.nn.Parameter(torch.randn(rows, columns, generator=generator))
        theirs = torch.nn.Parameter(mine.detach().clone())
        ours = muon.Muon({"layers.0.w": mine}, make_optimizer(torch.nn.Linear(1, 1), Train(steps=1)), 0.1)  # type: ignore[arg-type]
        torchs = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=muon.MOMENTUM)
        for _ in range(4):
            mine.grad = torch.randn(rows, columns, generator=generator)
            theirs.grad = mine.grad.clone()
            ours.step(0.02)
            torchs.step()
        torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=0)
        assert not torch.equal(mine, theirs), "float32, not bfloat16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_moves_every_direction_alike(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in ((64, 16), (16, 64)):
        steep = torch.randn(shape, generator=generator)
        steep[0] *= 10.0
        before = torch.linalg.svdvals(steep)
        assert float(before.max() / before.min()) > 5
        found = torch.linalg.svdvals(muon.orthogonalised(steep, dtype).float())
        assert float(found.min()) > 0.5 and float(found.max()) < 1.3


def test_the_products_are_in_bf16_where_the_step_is_and_a_resumed_run_keeps_what_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware.bf16, "make_it_work", lambda: True)
    monkeypatch.setattr(hardware, "_peak", lambda *_: (1e9, "not measured"))

    def found(before: dict[str, str], *, bf16: bool = False, section: Train = SECTION) -> str | None:
        where = hardware.detect(replace(section, dtype="bf16" if bf16 else "fp32", device="cpu", threads=1), before)
        return where.facts().get("newton_schulz")

    assert found({}) == "fp32"
    assert found({"device": "cpu"}) == "fp32", "a checkpoint from before this was recorded"
    assert found({"newton_schulz": "bf16"}) == "bf16" and found({"newton_schulz": "fp32"}) == "fp32"
    assert found({}, section=Train(steps=10)) is None, "AdamW has no products"
    assert found({}, bf16=True) == "bf16" and found({"newton_schulz": "fp32"}, bf16=True) == "fp32"
    assert found({"device": "cpu"}, bf16=True) == "fp32"
    optimizer = make_optimizer(a_model(), SECTION, torch.bfloat16)
    assert isinstance(optimizer, muon.Muon) and optimizer.computed_in == torch.bfloat16


def test_a_resumed_run_keeps_its_kernel_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAMP_CPU_KERNELS", raising=False)
    monkeypatch.setattr(cpu, "enabled", set(cpu.KERNELS))
    monkeypatch.setattr(hardware, "_peak", lambda *_: (1e9, "not measured"))
    plain = Train(steps=10, device="cpu", dtype="fp32", threads=1)
    assert hardware.detect(plain).facts()["attention"] == "blocks"
    assert hardware.detect(plain, {"attention": "torch"}).facts()["attention"] == "torch"
    assert hardware.detect(plain, {"attention": "blocks"}).facts()["attention"] == "blocks"
    monkeypatch.setenv("LAMP_CPU_KERNELS", "-attention")  # as asked for: the difference is told at the resume
    monkeypatch.setattr(cpu, "enabled", cpu.chosen_kernels("-attention"))
    assert hardware.detect(plain, {"attention": "blocks"}).facts()["attention"] == "torch"


def test_embeddings_heads_and_vectors_are_left_to_adamw() -> None:
    for family in ("gpt2", "llama", "qwen3"):
        optimizer = make_optimizer(a_model(family), SECTION)
        assert isinstance(optimizer, muon.Muon)
        assert all(".layers." in f".{name}" or ".h." in name for name in optimizer.matrices)
        rest = [name for group in optimizer.rest.groups for name in group.parameters]
        assert any("embed" in name or "wte" in name for name in rest)
        assert not [name for name in optimizer.matrices if "norm" in name or "ln_" in name]
        assert sorted([*optimizer.matrices, *rest]) == sorted(name for name, _ in a_model(family).named_parameters())


def test_state_that_is_put_back_goes_on_bit_for_bit() -> None:
    whole, parts = a_model(), a_model()
    first, second = make_optimizer(whole, SECTION), make_optimizer(parts, SECTION)
    for seed in range(6):
        for model, optimizer in ((whole, first), (parts, second)):
            with_gradients(model, seed)
            optimizer.step(0.02)
            optimizer.zero_grad()
        if seed == 2:
            kept = {name: tensor.clone() for name, tensor in second.state_tensors().items()}
            second = make_optimizer(parts, SECTION)
            second.load_state_tensors(kept)
    assert all(torch.equal(one, weights_of(parts)[name]) for name, one in weights_of(whole).items())
    assert all(torch.equal(one, second.state_tensors()[name]) for name, one in first.state_tensors().items())
    with pytest.raises(KeyError):
        make_optimizer(parts, SECTION).load_state_tensors({"exp_avg.lm_head.weight": torch.zeros(1)})


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    model = a_model()
    optimizer = make_optimizer(model, SECTION)
    with_gradients(model, 1)
    optimizer.step(0.02)
    before, state = weights_of(model), {name: one.clone() for name, one in optimizer.state_tensors().items()}
    with_gradients(model, 2, float("nan"))
    optimizer.step(0.02, torch.tensor(2.0), found_inf=torch.tensor(1.0))
    assert all(torch.equal(one, before[name]) for name, one in weights_of(model).items())
    assert all(torch.equal(one, state[name]) for name, one in optimizer.state_tensors().items())
    with_gradients(model, 2)
    optimizer.step(0.02, found_inf=torch.tensor(0.0))
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])


def test_a_gradient_that_is_scaled_down_is_the_smaller_gradient() -> None:
    one, two = a_model(), a_model()
    first, second = make_optimizer(one, SECTION), make_optimizer(two, SECTION)
    with_gradients(one, 1, 4.0)
    with_gradients(two, 1, 1.0)
    first.step(0.02, torch.tensor(4.0))
    second.step(0.02)
    for name, weight in weights_of(one).items():
        torch.testing.assert_close(weight, weights_of(two)[name], rtol=1e-6, atol=1e-7)
    total = torch.nn.utils.get_total_norm([p.grad for p in two.parameters() if p.grad is not None])
    torch.testing.assert_close(second.grad_norm(), total)


def _logits_after(width: int, steps: int = 6) -> tuple[float, float]:
    """How large logits and the last layer's numbers have become, by a few steps on one batch of a model so wide."""
    model = Transformer(Shape("qwen3", 97, 16, 2, width, width // 16, tie_embeddings=False))
    init_weights(model, 3)
    optimizer = make_optimizer(model, SECTION)
    ids = torch.randint(0, 97, (8, 17), generator=torch.Generator().manual_seed(5))
    for _ in range(steps):
        model(ids[:, :-1], targets_BT=ids[:, 1:], scale=1 / 128).backward()
        optimizer.step(0.02)
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model(ids[:, :-1])
        hidden = model.model(ids[:, :-1], attention_context(ids[:, :-1], None, None))
    return float(logits.square().mean().sqrt()), float(hidden.square().mean().sqrt())


def test_numbers_grow_alike_at_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinate check: what a step does to activations does not depend on the width, so one rate does for all."""
    found = [_logits_after(width) for width in (32, 64, 128, 256)]
    for sizes in zip(*found, strict=True):
        assert max(sizes) / min(sizes) < 1.6, found
    monkeypatch.setattr(muon, "_HEAD_RATIO", 32.0 * 256 / 32)  # as if the rate of the head did not fall with the width
    assert _logits_after(256)[0] / found[0][0] > 1.6, "the check can fail"


def test_every_matrix_has_one_owner_and_nobody_has_far_more_to_do() -> None:
    shapes = [matrix.shape for matrix in make_optimizer(a_model(), SECTION).matrices.values()]  # type: ignore[attr-defined]
    for size in (1, 2, 3, 8):
        found = muon.owners(shapes, size)
        assert len(found) == len(shapes) and set(found) == set(range(size))
        work = [sum(shape.numel() for shape, owner in zip(shapes, found, strict=True) if owner == rank) for rank in range(size)]  # fmt: skip
        assert max(work) <= sum(work) / size + max(shape.numel() for shape in shapes)
