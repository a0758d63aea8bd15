"""A batch that failed a check inside a GPU kernel, tried again on the CPU: the index is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lamplighter import report
from lamplighter.config import Lora, Model, Train
from lamplighter.data.batches import Batch
from lamplighter.model.build import build
from lamplighter.train import replay

WORDS, LENGTH = 61, 16


def _context() -> Any:
    section = Model(layers=1, width=16, heads=2)
    run = SimpleNamespace(model=section, data=SimpleNamespace(seq_len=LENGTH), train=Train(steps=1), lora=Lora())
    tokenizer = SimpleNamespace(vocab_size=WORDS, end_of_text=0)
    return SimpleNamespace(
        run=run, tokenizer=tokenizer, built=build(section, WORDS, LENGTH, 0, 1), machine=SimpleNamespace(threads=1)
    )


def _batch(step: int = 7, length: int = LENGTH) -> Batch:
    ids = (np.arange(3 * length, dtype=np.int64) % WORDS).reshape(3, length)
    return Batch(step, ids, ids.copy(), None, np.array([4, 5, 6]), epoch=0.0, real_tokens=ids.size)


@pytest.mark.parametrize("kind", ["inputs", "targets"])
def test_an_id_beyond_the_vocabulary_is_named_with_its_place(kind: str) -> None:
    good, bad = _batch(6), _batch()
    getattr(bad, kind)[2, 5] = 70
    found = replay.explain_assert(_context(), [good, bad])
    assert found is not None and found.what == "step 7 cannot be computed"
    noun = "token" if kind == "inputs" else "target"
    assert f"{noun} id 70 at position 5 of row 2 is beyond the vocabulary of 61 (sample 6)" in found.why


def test_a_row_longer_than_the_positions_is_named() -> None:
    found = replay.explain_assert(_context(), [_batch(length=LENGTH + 1)])
    assert found is not None and "a row has 17 tokens, and the model 16 positions" in found.why


def test_a_batch_that_the_cpu_takes_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(report, "note", said.append)
    assert replay.explain_assert(_context(), [_batch()]) is None and "passes on the CPU" in said[0]
    monkeypatch.setattr(replay, "_DEADLINE_S", -1.0)
    assert replay.explain_assert(_context(), [_batch()]) is None and "left after" in said[1]
    monkeypatch.setattr(replay.procfs, "memory_left", lambda: 10)
    assert replay.explain_assert(_context(), [_batch()]) is None and "does not fit" in said[2]


def test_a_line_of_ones_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.zeros(3, WORDS)[ids]  # three rows for sixty-one words

    monkeypatch.setattr(replay, "_model_on_cpu", lambda _: Own())
    found = replay.explain_assert(_context(), [_batch()])
    assert (
        found is not None and "IndexError" in found.why and "test_replay.py" in found.why and "(sample 4)" in found.why
    )
