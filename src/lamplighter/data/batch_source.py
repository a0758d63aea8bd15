"""A run's batches, whatever they are made of: windows over a stream of text, packed examples, or examples of like length.

In:  the tokens or examples of a run, how to lay them out.
Out: a Feed: the batch of any step (a pure function of seed and step), the validation batches, the arithmetic of epochs.

An example of n ids fills n - 1 positions: its first id is nobody's target, its last id nobody's input.
Shapes: B rows of a batch, T positions of a row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamplighter.data.batches import (
    NO_TARGET,
    Batch,
    TokenStream,
    count_windows,
    make_batch,
    permute,
    validation_batches,
)
from lamplighter.data.chat.example_cache import LEARNED, Side
from lamplighter.data.chat.packing import ROUND_TO, Packing, group, pack, round_up
from lamplighter.data.stream import Filler, Live
from lamplighter.errors import BadData

Int64s = np.ndarray[Any, np.dtype[np.int64]]
PADDING_SEGMENT = -1


@dataclass(frozen=True)
class Held:
    """What is held back for validation."""

    samples: int
    documents: int
    targets: int
    text_bytes: float


@dataclass(frozen=True)
class Feed:
    """Where a training loop gets its batches from."""

    make: Callable[[int], Batch] | Filler
    """The batch of a step, as a function of it; or, of a stream, what reads it chunk by chunk."""
    validation: Callable[[int, int | None], Iterator[Batch]]
    samples: int
    """Windows (or examples) of an epoch; 0 = nobody knows (a stream)."""
    noun: str
    batch_size: int
    positions_per_step: float
    padding: float
    held: Held
    whole_batches: bool = False
    """An epoch ends with a smaller batch, rather than in the middle of one."""
    fingerprint: str = ""

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


def live_feed(live: Live, batch_size: int, seq_len: int, pad_id: int) -> Feed:
    """Windows over a stream that is still arriving: no padding but at the end of an epoch."""
    return Feed(
        make=live.filler,
        validation=lambda size, limit: validation_batches(live.val, seq_len, size, pad_id, limit),
        samples=0,
        noun="windows",
        batch_size=batch_size,
        positions_per_step=batch_size * seq_len,
        padding=0.0,
        held=_held(live.val, seq_len),
    )


def _held(val: TokenStream, seq_len: int) -> Held:
    return Held(count_windows(len(val), seq_len), val.documents, max(0, len(val) - 1), val.text_bytes)


def text_feed(train: TokenStream, val: TokenStream, seed: int, batch_size: int, seq_len: int, pad_id: int) -> Feed:
    """Windows over the stream."""
    windows = count_windows(len(train), seq_len)
    return Feed(
        make=lambda step: make_batch(train, seed, step, batch_size, seq_len, pad_id),
        validation=lambda size, limit: validation_batches(val, seq_len, size, pad_id, limit),
        samples=windows,
        noun="windows",
        batch_size=batch_size,
        positions_per_step=batch_size * seq_len,
        padding=1 - max(0, len(train) - 1) / max(1, windows * seq_len),
        held=_held(val, seq_len),
    )


# ---------------------------------------------------------------- examples that fit


@dataclass(frozen=True)
class Fitted:
    """The examples of a side as they go into windows, after the over-length policy."""

    side: Side
    chosen: Int64s  # numbers within the side
    begin: Int64s
    positions: Int64s
    targets: Int64s  # that are learned
    learn_all: bool
    cut: int
    cut_tokens: int
    dropped: int
    unlearnable: int  # nothing of an answer is left within the window

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def text_bytes(self) -> float:
        """Of what is learned; of an example that was cut, in proportion."""
        sizes = self.side.text_bytes if self.learn_all else self.side.answer_bytes
        whole = self.side.length - 1 if self.learn_all else self.side.learned
        return float((sizes[self.chosen] * self.targets / np.maximum(1, whole[self.chosen])).sum())


def fit(side: Side, seq_len: int, over_length: str, learn_all: bool) -> Fitted:
    """Cut, leave out or refuse what is longer than a window; every case is counted."""
    whole = side.length - 1 if learn_all else side.last_answer  # what comes after the last answer teaches nothing
    long = whole > seq_len
    if over_length == "refuse" and long.any():
        worst = int(whole.max())
        raise BadData(
            f"{int(long.sum()):,} of {side.examples:,} examples are longer than data.seq_len {seq_len}",
            f"the longest has {worst + 1:,} tokens; data.over_length is refuse",
            f"--data.seq_len {round_up(worst, 64)}, or --data.over_length truncate (or drop)",
        )
    keep = ~long if over_length == "drop" else np.ones_like(long)
    learnable = np.ones_like(long) if learn_all else side.first_answer <= seq_len
    chosen = np.flatnonzero(keep & learnable & (whole > 0)).astype(np.int64)
    positions = np.minimum(whole[chosen], seq_len)
    targets = (positions if learn_all else side.learned[chosen]).copy()
    for place in np.flatnonzero(long[chosen]).tolist() if not learn_all else ():
        begin = int(side.begin[chosen[place]])
        targets[place] = int((side.tokens[begin + 1 : begin + 1 + seq_len] >= LEARNED).sum())
    cut = long[chosen]
    return Fitted(
        side,
        chosen,
        side.begin[chosen],
        positions,
        targets,
        learn_all,
        int(cut.sum()),
        int((whole[chosen] - positions).sum()),
        int((~keep).sum()),
        int((keep & ~learnable).sum()),
    )


# ---------------------------------------------------------------- rows of a batch


def lay_out(fitted: Fitted, packing: Packing, length: int, pad_id: int, with_segments: bool) -> Batch:
    """The rows of a packing as arrays of B x `length`: examples one after the other, the rest of a row padding."""
    members, starts = packing.members, packing.starts
    sizes = fitted.positions[members]
    ends = np.cumsum(sizes)
    row = np.repeat(np.arange(packing.windows), np.diff(starts))
    begins = ends - sizes
    in_row = begins - begins[starts[:-1]][row]
    step = np.arange(int(ends[-1])) - np.repeat(begins, sizes)
    source = np.repeat(fitted.begin[members], sizes) + step
    place = np.repeat(row * length + in_row, sizes) + step
    inputs = np.full((packing.windows, length), pad_id, np.int64)
    targets = np.full((packing.windows, length), NO_TARGET, np.int64)
    inputs.flat[place] = fitted.side.tokens[source] & ~LEARNED
    following = fitted.side.tokens[source + 1]
    wanted = np.where((following >= LEARNED) | fitted.learn_all, (following & ~LEARNED).astype(np.int64), NO_TARGET)
    targets.flat[place] = wanted
    segments = None
    if with_segments:
        segments = np.full((packing.windows, length), PADDING_SEGMENT, np.int64)
        segments.flat[place] = np.repeat(np.arange(len(members)) - starts[:-1][row], sizes)
    real = int((wanted != NO_TARGET).sum())
    return Batch(0, inputs, targets, segments, members, 0.0, real, int(ends[-1]))


def _take(packing: Packing, windows: Int64s) -> Packing:
    """Some windows of a packing, in this order."""
    sizes = np.diff(packing.starts)[windows]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    within = np.arange(int(starts[-1]), dtype=np.int64) - np.repeat(starts[:-1], sizes)
    return Packing(packing.members[np.repeat(packing.starts[windows], sizes) + within], starts)


def alone(count: int) -> Packing:
    """One example in each window."""
    return Packing(np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))


# ---------------------------------------------------------------- packed, or each example alone


def example_feed(train: Fitted, val: Fitted, how: str, seed: int, batch_size: int, seq_len: int, pad_id: int) -> Feed:
    """`packed`: several examples in a window; `windows`: one in each, padded; `grouped`: batches of like length."""
    if not len(train):
        raise BadData(
            "no example is left to train on",
            f"{train.dropped:,} are longer than data.seq_len {seq_len}, {train.unlearnable:,} have no answer within it",
            "a larger data.seq_len" + (", or --data.over_length truncate" if train.dropped else ""),
        )
    if how == "grouped":
        return _grouped(train, val, seed, batch_size, seq_len, pad_id)
    packing, held = (
        (pack(side.positions, seq_len, seed) if how == "packed" else alone(len(side))) for side in (train, val)
    )
    with_segments = how == "packed"

    def make(step: int) -> Batch:
        numbers = np.arange((step - 1) * batch_size, step * batch_size, dtype=np.int64)
        windows = permute(seed, numbers // packing.windows, numbers % packing.windows, packing.windows)
        batch = lay_out(train, _take(packing, windows), seq_len, pad_id, with_segments)
        return _named(batch, step, windows, step * batch_size / packing.windows)

    def validation(size: int, limit: int | None) -> Iterator[Batch]:
        chosen = _spread(held.windows, limit)
        for step, begin in enumerate(range(0, len(chosen), size), 1):
            windows = chosen[begin : begin + size]
            batch = lay_out(val, _take(held, windows), seq_len, pad_id, with_segments)
            yield _named(batch, step, windows, (begin + len(windows)) / len(chosen))

    padding = 1 - float(train.positions.sum()) / (packing.windows * seq_len)
    return Feed(
        make, validation, packing.windows, "windows", batch_size, batch_size * seq_len, padding,
        Held(held.windows, len(val), int(val.targets.sum()), val.text_bytes), fingerprint=_print(packing),
    )  # fmt: skip


def _named(batch: Batch, step: int, samples: Int64s, epoch: float) -> Batch:
    return Batch(step, batch.inputs, batch.targets, batch.segments, samples, epoch, batch.real_tokens, batch.filled)


def _print(packing: Packing) -> str:
    return hashlib.sha256(packing.members.tobytes() + packing.starts.tobytes()).hexdigest()[:20]


def _spread(total: int, limit: int | None) -> Int64s:
    count = total if limit is None else min(total, limit)
    return np.arange(count, dtype=np.int64) * total // max(1, count)


# ---------------------------------------------------------------- batches of like length


def _grouped(train: Fitted, val: Fitted, seed: int, batch_size: int, seq_len: int, pad_id: int) -> Feed:
    epochs: dict[int, Packing] = {}  # the latest one or two: a batch needs its whole epoch to be sorted

    def batches_of(epoch: int) -> Packing:
        if epoch not in epochs:
            while len(epochs) > 1:
                del epochs[min(epochs)]
            epochs[epoch] = group(train.positions, batch_size, seed, epoch)
        return epochs[epoch]

    def rows(fitted: Fitted, members: Int64s, step: int, epoch: float) -> Batch:
        longest = int(fitted.positions[members].max())
        length = min(seq_len, int(round_up(longest, ROUND_TO)))
        each = Packing(members, np.arange(len(members) + 1, dtype=np.int64))
        return _named(lay_out(fitted, each, length, pad_id, with_segments=False), step, members, epoch)

    per_epoch = math.ceil(len(train) / batch_size)

    def make(step: int) -> Batch:
        epoch, number = divmod(step - 1, per_epoch)
        batches = batches_of(epoch)
        return rows(train, batches.members[batches.starts[number] : batches.starts[number + 1]], step, step / per_epoch)

    def validation(size: int, limit: int | None) -> Iterator[Batch]:
        chosen = _spread(len(val), limit)
        chosen = chosen[np.argsort(val.positions[chosen], kind="stable")]
        for step, begin in enumerate(range(0, len(chosen), size), 1):
            some = chosen[begin : begin + size]
            yield rows(val, some, step, (begin + len(some)) / len(chosen))

    first = batches_of(0)
    longest = np.maximum.reduceat(train.positions[first.members], first.starts[:-1])
    filled = np.minimum(seq_len, round_up(longest, ROUND_TO)) * np.diff(first.starts)
    return Feed(
        make, validation, len(train), "examples", batch_size, float(filled.sum()) / per_epoch,
        1 - float(train.positions.sum()) / float(filled.sum()),
        Held(len(val), len(val), int(val.targets.sum()), val.text_bytes), whole_batches=True, fingerprint=_print(first),
    )  # fmt: skip
