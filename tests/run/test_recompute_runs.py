"""What starts processes: train.recompute: less memory, the same numbers to the last bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_recompute import steps_of

from lamplighter.rundir import RunDir
from lamplighter.train.bf16 import make_it_work
from running import LONG, NO_BF16, TINY, Command, losses_of, run_with_bf16


@LONG  # in float32: tests/unit/test_recompute.py
def test_every_number_is_the_same_in_bf16() -> None:
    run_with_bf16(__file__)


@LONG
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_number_is_the_same_compiled(family: str) -> None:
    assert steps_of(family, again=True, compiled=True) == steps_of(family, again=False, compiled=True)


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


def test_a_run_has_the_same_losses_also_with_a_model_of_ones_own(tmp_path: Path, here: Command) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    words = ["--model.family", "mine:Model", "--train.steps", "4", "--train.micro_batch", "2"]
    for name, flag in (("a", "false"), ("b", "true")):
        done = here("train", "--run", name, *TINY, *words, "--train.recompute", flag, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    losses = [losses_of(RunDir(tmp_path / "runs" / name)) for name in "ab"]
    assert len(losses[0]) == 4 and losses[0] == losses[1]
    words += ["--model.family", "mine:Flat", "--train.recompute", "true"]
    refused = here("train", "--run", "c", *TINY, *words, cwd=tmp_path)
    assert refused.returncode == 78 and "no blocks to compute again" in refused.stdout


if __name__ == "__main__":
    if not make_it_work():
        sys.exit(NO_BF16)
    for kind in ("gpt2", "llama"):
        assert steps_of(kind, again=True, dtype="bf16") == steps_of(kind, again=False, dtype="bf16"), kind
