"""train.recompute: less memory, the same numbers to the last bit."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from lamplighter.errors import BadConfig
from lamplighter.model.recompute import RecomputedForward, blocks_of, recompute_blocks
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer, next_token_loss
from lamplighter.model.weights import init_weights
from lamplighter.rundir import RunDir
from lamplighter.train.bf16 import make_it_work
from lamplighter.train.compiled import Compiled
from lamplighter.train.hardware import seed_step
from running import LONG, TINY, lamp, losses_of

Numbers = list[tuple[str, str]]
NO_BF16 = 3


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
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_number_is_the_same_with_dropout(family: str, packed: bool) -> None:
    assert steps_of(family, again=True, packed=packed) == steps_of(family, again=False, packed=packed)


def test_every_number_is_the_same_in_bf16() -> None:
    """In a process of its own: some CPUs die of bf16, and then there is nothing to compare."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    if done.returncode == NO_BF16:
        pytest.skip("this CPU has no bf16 that works")
    assert done.returncode == 0, done.stdout + done.stderr


@LONG
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_number_is_the_same_compiled(family: str) -> None:
    assert steps_of(family, again=True, compiled=True) == steps_of(family, again=False, compiled=True)


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


OWN = """
import torch

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(width, width)
    def forward(self, x):
        return x + torch.nn.functional.dropout(torch.tanh(self.inner(x)), 0.2, self.training)

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, layers, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, vocab_size)
    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

class Flat(Model):
    def __init__(self, **named):
        super().__init__(**named)
        self.blocks = torch.nn.Sequential(*self.blocks)
"""


def test_a_run_has_the_same_losses_also_with_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    words = ["--model.family", "mine:Model", "--train.steps", "4", "--train.micro_batch", "2"]
    for name, flag in (("a", "false"), ("b", "true")):
        done = lamp("train", "--run", name, *TINY, *words, "--train.recompute", flag, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    losses = [losses_of(RunDir(tmp_path / "runs" / name)) for name in "ab"]
    assert len(losses[0]) == 4 and losses[0] == losses[1]
    refused = lamp(
        "train", "--run", "c", *TINY, *words, "--model.family", "mine:Flat", "--train.recompute", "true", cwd=tmp_path
    )
    assert refused.returncode == 78 and "no blocks to compute again" in refused.stdout


if __name__ == "__main__":
    if not make_it_work():
        sys.exit(NO_BF16)
    for kind in ("gpt2", "llama"):
        assert steps_of(kind, again=True, dtype="bf16") == steps_of(kind, again=False, dtype="bf16"), kind
