"""Where a training loop gets its batches from: one protocol, whatever the data is.

In:  a token cache (here), instruction rows (chat/packing.py), or a live stream (stream.py).
Out: the batch of each step, what a checkpoint must remember of them, the validation batches, and facts about the data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lamplighter.data.batches import (
    Batch,
    BatchLayout,
    Float64s,
    Int64s,
    Prefetcher,
    TokenStream,
    count_windows,
    make_batch,
    validation_batches,
)

_BATCHES_AHEAD = 3
SAMPLE_TOKENS = 1 << 20
_STRETCHES = 64
_LEAST_TOKENS = 2_000  # of fewer the estimate says nothing


@dataclass(frozen=True)
class HeldOut:
    """What is kept for validation."""

    samples: int
    documents: int
    targets: int
    text_bytes: float
    text: TokenStream | None = None  # None: instruction rows, which are no stream of documents


class AnswerSide(Protocol):
    """The preference pairs that are trained on, or those held back."""

    beta: float  # train.dpo_beta
    reference: Float64s | None  # the log-probability of each answer by the reference model, before the first step

    @property
    def pairs(self) -> int: ...

    def in_order(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """All of them (or some, evenly spread), so many windows at a time."""
        ...


@dataclass(frozen=True)
class PairData:
    """Both sides of the data of a run on preference pairs."""

    train: AnswerSide
    val: AnswerSide
    fingerprint: str  # of what the reference model sees, token by token


@dataclass(frozen=True)
class DataFacts:
    """What is known of a run's data before the first step."""

    name: str  # of the cache or the stream: may not change between two starts of a run
    samples: int  # windows or examples of an epoch; 0 = unknown (a stream)
    noun: str
    batch_size: int
    positions_per_step: float
    padding: float
    held_out: HeldOut
    whole_batches: bool = False  # an epoch ends with a smaller batch, rather than in the middle of one
    fingerprint: str = ""  # of the packing
    unigram_loss: float | None = None  # what guessing by token frequency achieves; None: too few tokens to count
    documents: int = 0  # to train on, or examples; 0 = unknown (a stream)
    question: tuple[int, ...] = ()  # of instruction rows: the ids of one that samples may begin with
    pairs: PairData | None = None  # of preference pairs: what the reference model must look at before the first step

    @property
    def steps_per_epoch(self) -> float:
        exact = self.samples / self.batch_size
        return float(math.ceil(exact)) if self.whole_batches else exact

    def epochs(self, step: int) -> float:
        """How many epochs are done after a step."""
        return step / self.steps_per_epoch if self.whole_batches else step * self.batch_size / self.samples

    def steps_for(self, epochs: float) -> int:
        exact = epochs * self.steps_per_epoch if self.whole_batches else epochs * self.samples / self.batch_size
        return max(1, math.ceil(exact))


class BatchSource(Protocol):
    """The batches of one run. `start` comes before the first `next`, and again after a roll-back."""

    def describe(self) -> DataFacts: ...

    def check_ids(self, vocab_size: int) -> None:
        """BadData where a stored id is not one that a model of `vocab_size` knows."""
        ...

    def start(self, step: int, state: dict[str, Any] | None) -> None:
        """The next batch is that of `step`; `state` is what `state(step - 1)` gave. Begins to prefetch."""
        ...

    def next(self, step: int) -> Batch | None:
        """The batch of `step`, which is one more than the last; None after the end of a stream."""
        ...

    def state(self, step: int) -> dict[str, Any] | None:
        """What a checkpoint after `step` must hold to go on from there; None where the step itself says it all.

        May be called from another thread, while the batch of `step + 1` is in use.
        """
        ...

    def validation(self, rows: int, limit: int | None) -> Iterator[Batch]:
        """Everything that is held out, in order, so many rows at a time; with a limit, that many samples."""
        ...

    def close(self) -> None: ...


class StepBatches:
    """A BatchSource whose batches are a pure function of the step: a token cache, or instruction rows."""

    def __init__(
        self,
        facts: DataFacts,
        make: Callable[[int], Batch],
        validation: Callable[[int, int | None], Iterator[Batch]],
        check_ids: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.facts, self.make, self.validation, self.check_ids = facts, make, validation, check_ids
        self._ahead: Prefetcher[Batch] | None = None

    def describe(self) -> DataFacts:
        return self.facts

    def start(self, step: int, state: dict[str, Any] | None = None) -> None:
        self.close()
        self._ahead = Prefetcher(map(self.make, itertools.count(step)), _BATCHES_AHEAD, "lamp-batches")

    def next(self, step: int) -> Batch:
        assert self._ahead is not None, "start comes first"
        batch = self._ahead.next()
        assert batch is not None and batch.step == step
        return batch

    def state(self, step: int) -> None:
        return None

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()


def held_out_windows(text: TokenStream, seq_len: int) -> HeldOut:
    samples, targets = count_windows(len(text), seq_len), max(0, len(text) - 1)
    return HeldOut(samples, text.documents, targets, text.text_bytes, text)


def text_batches(
    train: TokenStream, val: TokenStream, layout: BatchLayout, name: str, check_ids: Callable[[int], None]
) -> StepBatches:
    """Windows over a token cache."""
    windows = count_windows(len(train), layout.seq_len)
    facts = DataFacts(
        name=name,
        samples=windows,
        noun="windows",
        batch_size=layout.batch_size,
        positions_per_step=layout.batch_size * layout.seq_len,
        padding=1 - max(0, len(train) - 1) / max(1, windows * layout.seq_len),
        held_out=held_out_windows(val, layout.seq_len),
        unigram_loss=unigram_loss(train),
        documents=train.documents,
    )
    return StepBatches(
        facts,
        make=lambda step: make_batch(train, layout, step),
        validation=lambda rows, limit: validation_batches(val, layout.seq_len, rows, layout.pad_id, limit),
        check_ids=check_ids,
    )


# ---------------------------------------------------------------- what counting alone achieves


def unigram_loss(text: TokenStream) -> float | None:
    """Of a stream of text; None where there are too few tokens to count."""
    return loss_of(_spread(text))


def loss_of(ids: Int64s) -> float | None:
    """Of a sample of tokens."""
    return entropy(ids) if len(ids) >= _LEAST_TOKENS else None


def entropy(ids: Int64s) -> float:
    """Nats per token of a guess by frequency, which a model that reads its context must beat.

    What is too small in a small sample is added (Miller and Madow, 1955).
    """
    counts = np.bincount(ids)
    seen = counts[counts > 0]
    share = seen / len(ids)
    return float(-(share * np.log(share)).sum() + (len(seen) - 1) / (2 * len(ids)))


def _spread(stream: TokenStream) -> Int64s:
    """Stretches at even distances, or all of it."""
    size = SAMPLE_TOKENS // _STRETCHES
    if len(stream) <= SAMPLE_TOKENS:
        return np.asarray(stream.read(0, len(stream)), np.int64)
    starts = (np.arange(_STRETCHES) * (len(stream) - size) // (_STRETCHES - 1)).tolist()
    return np.concatenate([np.asarray(stream.read(start, start + size), np.int64) for start in starts])
