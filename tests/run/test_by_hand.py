"""A layer with its gradients written out is the layer: as near to the truth as autograd under autocast, and no more is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lamplighter.model import cpu
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer
from lamplighter.model.weights import init_weights
from lamplighter.train.bf16 import make_it_work

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch says so whenever oneDNN is switched
Gradients = dict[str, Tensor]


def model_of(family: str, kv_heads: int, length: int) -> Transformer:
    model = Transformer(Shape(family, 60, length, 2, 32, 4, kv_heads=kv_heads))  # type: ignore[arg-type]
    init_weights(model, 3)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):  # norms and biases that do something
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(noise, alpha=0.1)
    return model


def batch(length: int, packed: bool) -> tuple[Tensor, Tensor | None]:
    ids = torch.randint(0, 60, (3, length), generator=torch.Generator().manual_seed(5))
    segments = torch.arange(length)[None] // torch.tensor([[7], [11], [length]]) if packed else None
    return ids, segments


def gradients(model: Transformer, ids: Tensor, segments: Tensor | None, low: bool = True) -> Gradients:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=low), torch.backends.mkldnn.flags(enabled=make_it_work()):
        loss = model(ids, segments_BT=segments, targets_BT=ids.roll(-1, 1), scale=1 / ids.numel())
    loss.backward()
    return {"loss": loss.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def far(found: Gradients, truth: Gradients) -> dict[str, float]:
    return {
        name: float((found[name].double() - right).norm() / right.norm().clamp(min=1e-6))
        for name, right in truth.items()
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 17, 300])
@pytest.mark.parametrize(("family", "kv_heads"), [("gpt2", 0), ("llama", 4), ("llama", 2)])
def test_gradients_are_as_near_to_the_truth_as_autograds(
    family: str, kv_heads: int, length: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family, kv_heads, length)
    ids, segments = batch(length, packed)
    truth = gradients(model.double(), ids, segments, low=False)
    model.float()
    used: list[str] = []
    for name in ("gpt2", "llama"):
        real = getattr(cpu, f"{name}_layer")
        monkeypatch.setattr(
            cpu, f"{name}_layer", lambda *parts, real=real, name=name: (used.append(name), real(*parts))[1]
        )
    ours = gradients(model, ids, segments)
    assert used == [family] * 2
    monkeypatch.setattr(cpu, "suits_fused", lambda *_: False)
    autograds = gradients(model, ids, segments)
    assert used == [family] * 2
    assert ours.keys() == autograds.keys() == truth.keys()
    mine, others = far(ours, truth), far(autograds, truth)
    assert mine["loss"] < 0.01
    total = (sum(value**2 for value in found.values()) ** 0.5 for found in (mine, others))
    assert next(total) < 1.25 * next(total)
    for name, value in mine.items():
        assert value < max(2 * others[name], 0.03), f"{name}: {value:.4f} against {others[name]:.4f}"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_no_more_is_kept_for_the_way_back_than_autograd_keeps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, _) = model_of(family, 0, 128), batch(128, packed=False)
    kept: list[int] = []
    for way in ("by hand", "autograd"):
        if way == "autograd":
            monkeypatch.setattr(cpu, "suits_fused", lambda *_: False)
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16),
            torch.backends.mkldnn.flags(enabled=make_it_work()),
        ):
            model(ids, targets_BT=ids)
        kept.append(sum(sizes.values()))
    assert kept[0] <= 1.02 * kept[1]


def test_what_it_was_not_made_for_is_left_to_autograd() -> None:
    x = torch.zeros(1, 2, 4, requires_grad=True)
    assert not cpu.suits_fused(x, cached=False), "float32"
    with torch.autocast("cpu", torch.bfloat16):
        assert cpu.suits_fused(x, cached=False)
        assert not cpu.suits_fused(x, cached=True)
        assert not cpu.suits_fused(x.detach(), cached=False)
        assert not cpu.suits_fused(x.bfloat16(), cached=False)
        with torch.no_grad():
            assert not cpu.suits_fused(x, cached=False)
    with torch.autocast("cpu", torch.float16):
        assert not cpu.suits_fused(x, cached=False)


class Doubled(torch.nn.Module):
    """A part that somebody put around another, which lends it its tensors."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.weight, self.bias = inner, inner.weight, getattr(inner, "bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_part_that_somebody_put_there_is_asked(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, _) = model_of(family, 0, 16), batch(16, packed=False)
    place, name = (model.transformer.h[1].mlp, "c_proj") if family == "gpt2" else (model.model.layers[1].mlp, "up_proj")
    setattr(place, name, Doubled(getattr(place, name)))
    found = gradients(model, ids, None)
    monkeypatch.setattr(cpu, "suits_fused", lambda *_: False)
    wanted = gradients(model, ids, None)
    assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("hang", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_a_hook_on_a_part_is_called(family: str, hang: str) -> None:
    model, (ids, _) = model_of(family, 0, 16), batch(16, packed=False)
    layer = model.transformer.h[0].mlp if family == "gpt2" else model.model.layers[0].mlp
    called: list[int] = []
    getattr(layer, hang)(lambda *_: called.append(1))
    gradients(model, ids, None)
    assert called == [1]


def layer_of(model: Transformer) -> torch.nn.Module:
    return model.transformer.h[0] if model.shape.family == "gpt2" else model.model.layers[0]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_forward_that_somebody_wrapped_and_a_hook_on_everything_are_called(family: str) -> None:
    model, (ids, _) = model_of(family, 0, 16), batch(16, packed=False)
    mlp = layer_of(model).mlp
    called: list[str] = []
    real = mlp.forward  # type: ignore[union-attr]
    mlp.forward = lambda x: (called.append("wrapped"), real(x))[1]  # type: ignore[union-attr]
    gradients(model, ids, None)
    assert called == ["wrapped"]
    del mlp.forward  # type: ignore[union-attr]
    handle = torch.nn.modules.module.register_module_forward_hook(lambda part, *_: called.append(type(part).__name__))
    try:
        gradients(model, ids, None)
    finally:
        handle.remove()
    assert called.count("GPT2MLP" if family == "gpt2" else "LlamaMLP") == 2


@pytest.mark.parametrize("what", ["eps", "dropout", "no bias", "bf16"])
def test_settings_of_a_part_are_heeded(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, _) = model_of("gpt2", 0, 16), batch(16, packed=False)
    layer = model.transformer.h[0]
    if what == "eps":
        layer.ln_2.eps = 1.0  # type: ignore[union-attr]
    elif what == "dropout":
        layer.mlp.dropout = 0.9  # type: ignore[union-attr]
    elif what == "no bias":
        layer.ln_1 = torch.nn.LayerNorm(32, bias=False)
    else:
        layer.ln_1.bfloat16()  # type: ignore[union-attr]
    used: list[str] = []
    real = cpu.gpt2_layer
    monkeypatch.setattr(cpu, "gpt2_layer", lambda *parts: (used.append("gpt2"), real(*parts))[1])
    if what == "bf16":  # torch's norm refuses this mixture, as it always did
        with pytest.raises(RuntimeError, match="mixed dtype"):
            gradients(model, ids, None)
    else:
        gradients(model, ids, None)
    assert used == ([] if what == "bf16" else ["gpt2"]), "the second layer alone is plain"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("low", [True, False])
def test_nothing_in_is_nothing_out(family: str, low: bool) -> None:
    model = model_of(family, 0, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=low), torch.backends.mkldnn.flags(enabled=make_it_work()):
        assert model(torch.zeros(0, 4, dtype=torch.long)).shape == (0, 4, 60)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_dropout_is_left_to_the_modules(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, f"{family}_layer", lambda *_: pytest.fail("by hand there is no dropout"))
    model = Transformer(Shape(family, 60, 16, 1, 32, 4, dropout=0.1))  # type: ignore[arg-type]
    init_weights(model, 3)
    assert gradients(model, batch(16, packed=False)[0], None)["loss"] > 0


def test_each_kernel_has_a_switch() -> None:
    assert cpu.chosen_kernels("") == set(cpu.KERNELS) and cpu.chosen_kernels("none") == set()
    assert cpu.chosen_kernels("attention, tied_gradient") == {"attention", "tied_gradient"}
    assert cpu.chosen_kernels("-attention") == set(cpu.KERNELS) - {"attention"}
    with pytest.raises(ValueError, match="warp is no kernel"):
        cpu.chosen_kernels("warp")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_without_any_kernel_a_step_is_torchs_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "enabled", set())
    for name in ("attention_forward", "gpt2_layer", "llama_layer", "_TiedEmbedding"):
        monkeypatch.setattr(cpu, name, lambda *_: pytest.fail("a kernel that was switched off"))
    for low in (True, False):
        model, (ids, _) = model_of(family, 0, 16), batch(16, packed=False)
        assert len(gradients(model, ids, None, low=low)) > 10
