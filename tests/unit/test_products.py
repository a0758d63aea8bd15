"""The products of a small step are torch's, and so are their gradients; where they were not measured, torch's are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lamplighter.model import cpu
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import GPT2Layer, LlamaLayer, Transformer, attention_context, rotary_cos_sin
from lamplighter.model.weights import init_weights

Way = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(cpu.SPLIT_THREADS)
    yield
    torch.set_num_threads(before)


def numbers(*size: int, seed: int = 1) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [1, 5, 66])
@pytest.mark.parametrize(("rows", "columns"), [(2, 3), (96, 32), (64, 200)])
def test_each_product_is_what_it_says(tokens: int, rows: int, columns: int) -> None:
    weight, x_NC, x_NR = numbers(rows, columns), numbers(tokens, columns, seed=2), numbers(tokens, rows, seed=3)
    near = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(cpu.split_matmul_t(x_NC, weight).double(), x_NC.double() @ weight.double().t(), **near)
    torch.testing.assert_close(cpu.split_matmul(x_NR, weight).double(), x_NR.double() @ weight.double(), **near)
    gradient = x_NR.double().t() @ x_NC.double()
    torch.testing.assert_close(cpu.split_outer(x_NR, x_NC).double(), gradient, **near)
    begun = cpu.add_split_outer(torch.full((rows, columns), float("nan")), x_NR, x_NC, 0.5, first=True)
    torch.testing.assert_close(begun.double(), gradient / 2, **near)
    cpu.add_split_outer(begun, x_NR, x_NC, 0.5, first=False)
    torch.testing.assert_close(begun.double(), gradient, **near)


@pytest.mark.parametrize("learns_input", [True, False])
@pytest.mark.parametrize("stored", ["out, in", "in, out"])
def test_a_layer_has_torchs_gradients(stored: str, learns_input: bool) -> None:
    bias = numbers(48, seed=4)
    ours: Way
    theirs: Way
    if stored == "out, in":
        weight, ours, theirs = numbers(48, 32), cpu.linear, functional.linear
    else:
        weight = numbers(32, 48)
        ours, theirs = (lambda x, w: cpu.linear_t(x, w, bias)), (lambda x, w: functional.linear(x, w.t(), bias))
    x, upstream = numbers(2, 33, 32, seed=2), numbers(2, 33, 48, seed=3)

    def there_and_back(way: Way) -> list[Tensor]:
        inputs = [weight.clone().requires_grad_()]
        given = x.clone().requires_grad_(learns_input)
        made = way(given, inputs[0])
        inputs += [given] if learns_input else []
        return [made.detach(), *torch.autograd.grad(made, inputs, upstream)]

    assert cpu.suits_split(66, weight.requires_grad_())
    for mine, other in zip(there_and_back(ours), there_and_back(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("vocab", [398, 397])  # an odd number of words cannot be shared out
def test_a_small_step_has_the_loss_and_gradients_of_torchs_products(
    family: str, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Transformer(Shape(family, vocab, 16, 2, 32, 2))  # type: ignore[arg-type]
    init_weights(model, 3)
    ids = torch.randint(0, vocab, (4, 16), generator=torch.Generator().manual_seed(5))
    targets = ids.roll(-1, 1)
    targets[:, ::5] = -1
    used: list[str] = []
    for name in ("split_matmul_t", "split_matmul", "add_split_outer"):
        plain = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *a, plain=plain, name=name, **k: (used.append(name), plain(*a, **k))[1])
    found, wanted = {}, {}
    for gradients, few in ((found, cpu.FEW_TOKENS), (wanted, 0)):
        monkeypatch.setattr(cpu, "FEW_TOKENS", few)
        before = len(used)
        loss = model(ids, targets_BT=targets, scale=1 / 7)
        loss.backward()
        assert bool(len(used) - before) == bool(few)
        gradients |= {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
    layers = 2 * (4 if family == "gpt2" else 7)
    assert [used.count(name) for name in ("split_matmul_t", "split_matmul", "add_split_outer")] == [
        layers + (vocab % 2 == 0)
    ] * 3
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-5, atol=2e-6, msg=name)


def test_what_was_not_measured_is_left_to_torch() -> None:
    weight = numbers(48, 32).requires_grad_()
    assert cpu.suits_split(cpu.FEW_TOKENS, weight)
    assert not cpu.suits_split(cpu.FEW_TOKENS + 1, weight)
    assert not cpu.suits_split(8, weight.detach())
    assert not cpu.suits_split(8, numbers(47, 32).requires_grad_())
    assert not cpu.suits_split(8, weight.double())
    assert not cpu.suits_split(8, weight.t())
    with torch.no_grad():
        assert not cpu.suits_split(8, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not cpu.suits_split(8, weight)
    torch.set_num_threads(1)
    assert not cpu.suits_split(8, weight)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_block_has_neither_our_products_nor_our_attention(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> Tensor:
        raise AssertionError("a compiled block is the compiler's")

    model = Transformer(Shape(family, 50, 16, 1, 32, 2))  # type: ignore[arg-type]
    init_weights(model, 3)
    x = numbers(2, 8, 32).requires_grad_()
    seen = attention_context(torch.zeros(2, 8, dtype=torch.long), None, None)
    layer: GPT2Layer | LlamaLayer
    layer = model.transformer.h[0] if family == "gpt2" else model.model.layers[0]
    more = () if family == "gpt2" else (rotary_cos_sin(seen.positions, 16, 10_000.0),)
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        plain = layer(x, seen, *more)
        monkeypatch.setattr(cpu, "split_matmul_t", never)
        monkeypatch.setattr(cpu, "split_matmul", never)
        monkeypatch.setattr(cpu, "attention_forward", never)
        with pytest.raises(AssertionError, match="the compiler's"):
            layer(x, seen, *more)
        layer.compile(dynamic=False, backend="eager")
        torch.testing.assert_close(layer(x, seen, *more), plain, rtol=2e-2, atol=2e-2)
