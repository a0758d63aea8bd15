"""The one gradient of a matrix at both ends is the sum of both, without a second tensor of its size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lamplighter.model import cpu
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer
from lamplighter.model.weights import init_weights

VOCAB = 53


def model_of(family: str, tie_embeddings: bool = True) -> Transformer:
    model = Transformer(Shape(family, VOCAB, 12, 2, 32, 4, tie_embeddings=tie_embeddings))  # type: ignore[arg-type]
    init_weights(model, 3)
    return model


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Words that come again and again, and some places without a target."""
    for seed in (1, 2):
        ids = torch.randint(0, VOCAB // 4, (3, 12), generator=torch.Generator().manual_seed(seed))
        targets = ids.roll(-1, 1)
        targets[:, ::5] = -1
        yield ids, targets


def gradients(model: Transformer) -> dict[str, Tensor]:
    """Of two micro-batches, one after the other."""
    model.zero_grad()
    for ids, targets in batches():
        (3.0 * model(ids, targets_BT=targets, scale=0.1)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_it_is_the_gradient_that_autograd_adds_up(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family)
    ours = gradients(model)
    monkeypatch.setattr(cpu, "tie_for", lambda _: None)
    wanted = gradients(model)
    assert ours.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


class Cleared(TorchDispatchMode):
    """How many embedding gradients were made as tensors of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten.embedding_dense_backward.default and args[2] == VOCAB
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_a_second_tensor_is_made_only_where_there_are_two_matrices(family: str, tie_embeddings: bool) -> None:
    model = model_of(family, tie_embeddings)
    ids, targets = next(batches())
    with Cleared() as cleared:
        model(ids, targets_BT=targets).backward()
    assert cleared.count == (0 if tie_embeddings else 1)


def test_the_same_graph_is_not_gone_through_twice() -> None:
    model = model_of("gpt2")
    ids, targets = next(batches())
    loss = model(ids, targets_BT=targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_frozen_matrix_and_a_look_without_learning_are_left_to_torch() -> None:
    model = model_of("llama")
    assert cpu.tie_for(model.head_weight()) is not None
    assert cpu.tie_for(model.head_weight().detach()) is None
    with torch.no_grad():
        assert cpu.tie_for(model.head_weight()) is None
    model.head_weight().requires_grad_(False)
    ids, targets = next(batches())
    model(ids, targets_BT=targets).backward()
    assert model.head_weight().grad is None and model.model.norm.weight.grad is not None


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_embedding_that_is_another_or_has_a_hook_is_asked(family: str) -> None:
    model = model_of(family)
    assert model.tie() is not None and model_of(family, tie_embeddings=False).tie() is None
    table = model.transformer.wte if family == "gpt2" else model.model.embed_tokens
    called: list[int] = []
    handle = table.register_forward_hook(lambda *_: called.append(1))
    ids, targets = next(batches())
    model(ids, targets_BT=targets).backward()
    assert called == [1] and model.tie() is None
    handle.remove()
    assert model.tie() is not None
    table.__class__ = type("Another", (torch.nn.Embedding,), {})
    assert model.tie() is None


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_graph_that_somebody_cut_between_the_ends_still_has_the_heads_gradient(family: str) -> None:
    model = model_of(family)
    layers = model.transformer.h if family == "gpt2" else model.model.layers
    layers[0].register_forward_hook(lambda _, __, out: out.detach())
    ids, targets = next(batches())
    model(ids, targets_BT=targets).backward()
    assert model.head_weight().grad is not None


@pytest.mark.parametrize("options", [{"padding_idx": 3}, {"max_norm": 0.1}, {"scale_grad_by_freq": True}])
def test_options_of_an_embedding_are_torchs_affair(options: dict[str, object]) -> None:
    model = model_of("gpt2")
    weight = model.transformer.wte.weight
    model.transformer.wte = torch.nn.Embedding(VOCAB, 32, _weight=weight, **options)  # type: ignore[arg-type]
    assert model.tie() is None
