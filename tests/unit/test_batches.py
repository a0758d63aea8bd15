"""Every token is a target once per epoch, in an order that depends on (seed, step) and on nothing else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamplighter.data import batches
from lamplighter.data.batch_source import StepBatches, text_batches
from lamplighter.data.batches import (
    NO_TARGET,
    BatchLayout,
    Prefetcher,
    count_windows,
    make_batch,
    permute,
    validation_batches,
)
from lamplighter.data.token_cache.reader import CachedStream

PAD = 9999


def split_of(tmp_path: Path, tokens: int, shard_tokens: int = 100, name: str = "train") -> CachedStream:
    """A stream whose token i is i, in shards (the first token is in no file: it is the mark before all documents)."""
    ids = np.arange(tokens, dtype="<u2")
    shards = []
    for number, begin in enumerate(range(1, tokens, shard_tokens)):
        path = tmp_path / f"{name}-{number:05d}.bin"
        own = ids[begin : begin + shard_tokens]
        path.write_bytes(own.tobytes())
        shards.append({"file": path.name, "tokens": len(own)})
    counts = {"tokens": tokens, "documents": 1, "text_bytes": 1, "shards": shards}
    return CachedStream(tmp_path, name, {"splits": {name: counts}, "dtype": "<u2", "end_of_text": 0})


def order(seed: int, epoch: int, size: int) -> list[int]:
    return permute(seed, np.full(size, epoch), np.arange(size), size).tolist()


# ---------------------------------------------------------------- the order


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4097])
def test_each_epoch_is_a_permutation(size: int) -> None:
    for epoch in (0, 1, 10**6):
        assert sorted(order(7, epoch, size)) == list(range(size))


def test_the_order_is_frozen() -> None:
    """These numbers may never change: a resumed run must see the same samples, with any version."""
    assert order(0, 0, 10) == GOLDEN_10
    assert order(1234, 3, 10) == GOLDEN_1234
    far = permute(42, np.array([0, 0, 5, 10**9]), np.array([0, 1, 10**12, 123456789]), 10**12 + 7)
    assert far.tolist() == GOLDEN_FAR


def test_the_order_worked_out_ahead_is_that_of_each_sample() -> None:
    for size, start, stop in ((7, 0, 3), (7, 500, 530), (1000, 510, 2100), (100_000, 5_000_000, 5_000_008)):
        numbers = np.arange(start, stop)
        assert (
            batches.order(3, start, stop, size).tolist() == permute(3, numbers // size, numbers % size, size).tolist()
        )


def test_the_order_looks_random() -> None:
    first, second, other = (np.array(order(*key, 5000)) for key in ((1, 0), (1, 1), (2, 0)))
    plain = np.arange(5000)
    for one, two in ((first, plain), (first, second), (first, other)):
        assert abs(float(np.corrcoef(one, two)[0, 1])) < 0.06
        assert (one == two).sum() < 12
    steps = np.diff(first)
    assert len(np.unique(steps)) > 3500


def test_any_step_can_be_asked_for(tmp_path: Path) -> None:
    split = split_of(tmp_path, 1001)
    batch = make_batch(split, BatchLayout(0, 8, 10, PAD), 10**9)
    assert batch.step == 10**9 and batch.epoch == 8 * 10**9 / 100
    assert not same(batch, make_batch(split, BatchLayout(0, 8, 10, PAD), 10**9 + 1))


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize(("tokens", "seq_len"), [(1001, 10), (1000, 10), (1002, 10), (50, 64), (2, 5), (777, 100)])
def test_every_token_is_a_target_exactly_once_per_epoch(tmp_path: Path, tokens: int, seq_len: int) -> None:
    split = split_of(tmp_path, tokens)
    windows = count_windows(tokens, seq_len)
    seen: list[int] = []
    real = 0
    for step in range(1, windows + 1):
        batch = make_batch(split, BatchLayout(3, 1, seq_len, PAD), step)
        mask = batch.targets != NO_TARGET
        assert (batch.targets[mask] == batch.inputs[mask] + 1).all(), "each token predicts the next"
        assert (batch.inputs[~mask][1:] == PAD).all()
        seen += batch.targets[mask].tolist()
        real += batch.real_tokens
    assert sorted(seen) == list(range(1, tokens))
    assert real == tokens - 1


def test_a_batch_may_span_epochs(tmp_path: Path) -> None:
    split = split_of(tmp_path, 71)  # 7 windows of 10
    samples = np.concatenate([make_batch(split, BatchLayout(5, 4, 10, PAD), step).samples for step in range(1, 15)])
    epochs = samples[:56].reshape(8, 7)
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) > 4
    assert np.array_equal(make_batch(split, BatchLayout(5, 56, 10, PAD), 1).samples, samples[:56]), (
        "batch size does not matter"
    )
    assert make_batch(split, BatchLayout(5, 4, 10, PAD), 7).epoch == 4.0


def test_shapes_and_types(tmp_path: Path) -> None:
    batch = make_batch(split_of(tmp_path, 500), BatchLayout(0, 3, 16, PAD), 1)
    assert batch.inputs.shape == batch.targets.shape == (3, 16)
    assert batch.inputs.dtype == batch.targets.dtype == batch.samples.dtype == np.int64
    assert batch.segments is None and batch.real_tokens == 48
    assert batch.inputs.flags["C_CONTIGUOUS"] and batch.targets.flags["C_CONTIGUOUS"]
    assert np.array_equal(batch.inputs[:, 0], batch.samples * 16)


def test_validation_sees_every_token_once_in_order(tmp_path: Path) -> None:
    split = split_of(tmp_path, 1005, name="val")
    got = list(validation_batches(split, 10, 8, PAD))
    targets = np.concatenate([batch.targets.ravel() for batch in got])
    assert targets[targets != NO_TARGET].tolist() == list(range(1, 1005))
    assert sum(batch.real_tokens for batch in got) == 1004
    assert [len(batch.samples) for batch in got] == [8] * 12 + [5]
    assert got[-1].epoch == 1.0


def test_limited_validation_is_spread_over_the_split(tmp_path: Path) -> None:
    split = split_of(tmp_path, 1001, name="val")
    samples = np.concatenate([batch.samples for batch in validation_batches(split, 10, 4, PAD, limit_windows=10)])
    assert samples.tolist() == list(range(0, 100, 10))
    assert sum(len(batch.samples) for batch in validation_batches(split, 10, 4, PAD, limit_windows=10**6)) == 100
    assert list(validation_batches(split_of(tmp_path, 0, name="none"), 10, 4, PAD)) == []


def test_an_empty_split_cannot_be_trained_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        make_batch(split_of(tmp_path, 0), BatchLayout(0, 1, 10, PAD), 1)


# ---------------------------------------------------------------- fetched ahead


def same(one: batches.Batch, two: batches.Batch) -> bool:
    return one.step == two.step and np.array_equal(one.inputs, two.inputs) and np.array_equal(one.targets, two.targets)


LAYOUT = BatchLayout(1, 4, 10, PAD)


def source_of(split: CachedStream) -> StepBatches:
    """The batches of a split, as a run gets them; make_batch is looked up anew, so that a test may replace it."""
    source = text_batches(split, split, LAYOUT, "cache", lambda _: None)
    source.make = lambda step: batches.make_batch(split, LAYOUT, step)
    return source


def test_a_source_gives_what_make_batch_gives_from_any_step_on(tmp_path: Path) -> None:
    split = split_of(tmp_path, 1001)
    source = source_of(split)
    for first in (500, 7, 10**9, 3, 2):
        source.start(first)
        for step in range(first, first + 5):
            assert same(source.next(step), make_batch(split, LAYOUT, step))
            assert source.state(step) is None, "the step itself says it all"
    source.close()


def test_batches_are_made_ahead_but_not_without_end(tmp_path: Path, monkeypatch: Any) -> None:
    made: list[int] = []
    enough = threading.Event()
    real = batches.make_batch

    def counting(split: CachedStream, layout: BatchLayout, step: int) -> batches.Batch:
        made.append(step)
        if len(made) == 3:
            enough.set()
        return real(split, layout, step)

    monkeypatch.setattr(batches, "make_batch", counting)
    source = source_of(split_of(tmp_path, 1001))
    source.start(1)
    assert enough.wait(10), "made before anybody asked"
    source.next(1)
    source.next(2)
    source.close()
    assert len(made) <= 6


def test_the_threads_error_reaches_the_caller(tmp_path: Path, monkeypatch: Any) -> None:
    real = batches.make_batch

    def breaking(split: CachedStream, layout: BatchLayout, step: int) -> batches.Batch:
        if step == 3:
            raise OSError("the disk is gone")
        return real(split, layout, step)

    monkeypatch.setattr(batches, "make_batch", breaking)
    source = source_of(split_of(tmp_path, 1001))
    source.start(1)
    assert [source.next(1).step, source.next(2).step] == [1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            source.next(3)
    source.close()


def test_close_ends_the_thread(tmp_path: Path) -> None:
    source = source_of(split_of(tmp_path, 1001))
    source.start(1)
    source.next(1)
    source.close()
    source.close()
    assert "lamp-batches" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="closed"):
        source.next(2)


def test_a_prefetcher_gives_every_item_then_none() -> None:
    ahead = Prefetcher(iter(range(10)), 2, "test-ahead")
    assert [ahead.next() for _ in range(12)] == [*range(10), None, None]
    ahead.close()


GOLDEN_10 = [0, 4, 6, 2, 5, 3, 8, 1, 9, 7]
GOLDEN_1234 = [5, 9, 3, 1, 7, 0, 4, 2, 6, 8]
GOLDEN_FAR = [296211811170, 621125466399, 544859179115, 783465906036]


def test_a_source_that_leaves_is_heard_by_its_reader() -> None:
    """sys.exit in a thread ends the thread alone: the reader waited for ever."""

    def items() -> Iterator[int]:
        yield 1
        sys.exit(0)

    ahead = Prefetcher(items(), 2, "lamp-test")
    assert ahead.next() == 1
    assert ahead.wait(20)
    with pytest.raises(SystemExit):
        ahead.next()
    ahead.close()
