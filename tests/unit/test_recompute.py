"""train.recompute: less memory, the same numbers to the last bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from lamplighter.errors import BadConfig
from lamplighter.model.recompute import RecomputedForward, blocks_of, recompute_blocks
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer, next_token_loss
from lamplighter.model.weights import init_weights
from lamplighter.train.compiled import Compiled
from lamplighter.train.hardware import seed_step

Numbers = list[tuple[str, str]]


def steps_of(family: str, again: bool, dtype: str = "fp32", packed: bool = False, compiled: bool = False) -> Numbers:
    """Loss and gradients of three steps, with dropout, as hexadecimal."""
    model = Transformer(Shape(family, 100, 24, 3, 32, 4, dropout=0.1))  # type: ignore[arg-type]
    init_weights(model, 1)
    if again:
        assert recompute_blocks(model) == 3
    if compiled:
        torch._dynamo.reset()
        Compiled(model).compile(Path(tempfile.gettempdir()) / "lamp-compiled")
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    found = []
    for step in range(3):
        ids = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(step))
        segments = (torch.arange(24) // 7).expand(2, 24) if packed else None
        seed_step(1, step, 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(ids, segments_BT=segments)
        loss = next_token_loss(logits, ids) / ids.numel()
        loss.backward()  # type: ignore[no-untyped-call]
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((loss.item().hex(), float(grads.double().pow(2).sum()).hex()))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_every_number_is_the_same_with_dropout(family: str, packed: bool) -> None:
    assert steps_of(family, again=True, packed=packed) == steps_of(family, again=False, packed=packed)


def test_other_random_numbers_would_be_noticed() -> None:
    """The test above is worth something: without the state put back, dropout differs in the second forward pass."""
    model = Transformer(Shape("gpt2", 100, 24, 3, 32, 4, dropout=0.1))
    init_weights(model, 1)
    recompute_blocks(model)
    wrapped = [block.forward for block in blocks_of(model)]
    assert all(isinstance(forward, RecomputedForward) for forward in wrapped)
    ids = torch.randint(0, 100, (2, 24))
    seed_step(1, 1, 0)
    first = model(ids).detach()
    seed_step(1, 2, 0)
    assert not torch.equal(first, model(ids).detach())


def test_what_is_kept_is_the_input_of_each_block() -> None:
    def kept(again: bool) -> int:
        model = Transformer(Shape("llama", 50, 64, 6, 64, 4))
        init_weights(model, 1)
        if again:
            recompute_blocks(model)
        held: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        ids = torch.randint(0, 50, (2, 64))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            next_token_loss(model(ids), ids)
        return sum(held.values())

    assert kept(True) < kept(False) / 4


def test_a_model_without_blocks_is_told_so() -> None:
    with pytest.raises(BadConfig) as caught:
        recompute_blocks(torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)))
    assert "ModuleList" in caught.value.why and "train.recompute" in caught.value.next
