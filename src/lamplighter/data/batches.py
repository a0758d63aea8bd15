"""Ids become batches: windows over the stream, in an order that is a pure function of (seed, step), fetched ahead.

In:  a stream of tokens, a seed, a step.
Out: Batch(inputs, targets, ...), the same for that step always and everywhere.

Window i is stream tokens [i*T, i*T + T]: T inputs, and the same shifted by one as targets. The last window is filled
up (inputs with end-of-text, targets with -100), so every token is a target exactly once per epoch. Sample s of a run,
counted from 0 over all steps, is window permutation(seed, epoch)[s mod windows] of epoch s div windows. The permutation
is arithmetic of our own (a Feistel network), so it is O(1) at any step and no library's random numbers decide it.

Shapes: B sequences of a batch, T tokens of a sequence.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

NO_TARGET = -100
_AHEAD = 512  # samples whose order is worked out at once
_CONSTANTS = [np.uint64(number * 0xD1342543DE82EF95 & (1 << 64) - 1) for number in range(6)]
_ROUNDS = list(zip(_CONSTANTS[::2], _CONSTANTS[1::2], strict=True))
Int64s = np.ndarray[Any, np.dtype[np.int64]]
Float64s = np.ndarray[Any, np.dtype[np.float64]]
_Uint64s = np.ndarray[Any, np.dtype[np.uint64]]
T = TypeVar("T")


class TokenStream(Protocol):
    """Documents as one stream of ids: one side of the token cache, or what a live stream holds back."""

    @property
    def name(self) -> str: ...

    @property
    def documents(self) -> int: ...

    @property
    def text_bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Int64s: ...

    def gather(self, starts: Int64s, length: int) -> Int64s: ...

    def document_starts(self) -> _Uint64s: ...


@dataclass(frozen=True)
class Pairs:
    """Preference pairs in a batch: which tokens belong to which answer, and what the reference model gives each answer."""

    answers: Int64s  # at the learned tokens: 2 x pair for the chosen answer, one more for the rejected one; else -1
    rows_each: int = 1  # 2: the answers of a pair stand in two rows, one after the other
    beta: float = 0.1  # train.dpo_beta
    reference: Float64s | None = None  # log-probabilities, one of each answer of this side of the data, by its number


@dataclass(frozen=True)
class Batch:
    """What one optimizer step (or one step of validation) sees."""

    step: int
    inputs: Int64s
    targets: Int64s
    segments: Int64s | None
    samples: Int64s
    epoch: float
    real_tokens: int  # targets: what the loss is a mean over
    filled_tokens: int | None = None  # positions that are not padding; none = as many as targets
    pairs: Pairs | None = None  # preference pairs: then real_tokens counts them

    @property
    def filled(self) -> int:
        return self.real_tokens if self.filled_tokens is None else self.filled_tokens


@dataclass(frozen=True)
class BatchLayout:
    """How samples become the batch of a step."""

    seed: int
    batch_size: int
    seq_len: int
    pad_id: int


# ---------------------------------------------------------------- the order


def mix(x: _Uint64s) -> _Uint64s:
    """The finisher of splitmix64: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int, epochs: _Uint64s) -> _Uint64s:
    golden = np.uint64(0x9E3779B97F4A7C15)
    start = mix(np.array([seed & (1 << 64) - 1], np.uint64) + golden)
    return mix(start + (epochs + np.uint64(1)) * golden)


def permute(seed: int, epochs: Int64s, positions: Int64s, size: int) -> Int64s:
    """Where each position of 0..size-1 goes in its epoch: a bijection per (seed, epoch)."""
    rows = math.isqrt(max(0, size - 1)) + 1
    columns = -(-size // rows)  # rows * columns is size, or little more
    keys = _keys(seed, epochs.astype(np.uint64))
    out = _feistel(positions.astype(np.uint64), keys, rows, columns)
    while (outside := out >= np.uint64(size)).any():  # walk on until it is inside
        out[outside] = _feistel(out[outside], keys[outside], rows, columns)
    return out.astype(np.int64)


def _feistel(x: _Uint64s, keys: _Uint64s, rows: int, columns: int) -> _Uint64s:
    """A position is a row and a column; each in turn is moved on by a hash of the other, which can be undone."""
    height, width = np.uint64(rows), np.uint64(columns)
    row, column = x // width, x % width
    for one, two in _ROUNDS:
        row = (row + mix(keys + one + column) % height) % height
        column = (column + mix(keys + two + row) % width) % width
    return row * width + column


@lru_cache(maxsize=4)
def _ahead(seed: int, block: int, size: int) -> Int64s:
    """The windows of a block of samples: a permutation of many costs hardly more than one of a batch."""
    numbers = np.arange(block * _AHEAD, (block + 1) * _AHEAD, dtype=np.int64)
    return permute(seed, numbers // size, numbers % size, size)


def order(seed: int, start: int, stop: int, size: int) -> Int64s:
    """The windows of samples start..stop-1 of a run, in a stream of `size` windows."""
    blocks = range(start // _AHEAD, -(-stop // _AHEAD))
    found = np.concatenate([_ahead(seed, block, size) for block in blocks])
    return found[start - blocks[0] * _AHEAD : stop - blocks[0] * _AHEAD]


# ---------------------------------------------------------------- windows


def count_windows(tokens: int, seq_len: int) -> int:
    """How many windows a stream has; its first token is nobody's target."""
    return max(0, -(-(tokens - 1) // seq_len))


def count_targets(targets: Int64s) -> int:
    return int((targets != NO_TARGET).sum())


def _windows(split: TokenStream, windows: Int64s, seq_len: int, pad_id: int) -> tuple[Int64s, Int64s]:
    starts = windows * seq_len
    whole = starts + seq_len + 1 <= len(split)
    if whole.all():
        ids = split.gather(starts, seq_len + 1)
        return ids[:, :-1].copy(), ids[:, 1:].copy()
    ids = np.full((len(windows), seq_len + 1), NO_TARGET, np.int64)
    ids[whole] = split.gather(starts[whole], seq_len + 1)
    for row in np.flatnonzero(~whole).tolist():  # the last window
        rest = split.read(int(starts[row]), len(split))
        ids[row, : len(rest)] = rest
    inputs, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
    inputs[inputs == NO_TARGET] = pad_id
    return inputs, targets


def make_batch(split: TokenStream, layout: BatchLayout, step: int) -> Batch:
    """The batch of a step (steps count from 1), over all ranks."""
    windows = count_windows(len(split), layout.seq_len)
    if not windows:
        raise ValueError(f"the {split.name} split has no tokens")
    last = step * layout.batch_size
    samples = order(layout.seed, last - layout.batch_size, last, windows)
    inputs, targets = _windows(split, samples, layout.seq_len, layout.pad_id)
    return Batch(step, inputs, targets, None, samples, epoch=last / windows, real_tokens=count_targets(targets))


def evenly_spread(total: int, limit: int | None) -> Int64s:
    """All of 0..total-1; with a limit, that many of them at even distances."""
    count = total if limit is None else min(total, limit)
    return np.arange(count, dtype=np.int64) * total // max(1, count)


def validation_batches(
    split: TokenStream, seq_len: int, batch_size: int, pad_id: int, limit_windows: int | None = None
) -> Iterator[Batch]:
    """Every window once, in order; with a limit, that many, evenly spread. The last batch may have fewer rows."""
    chosen = evenly_spread(count_windows(len(split), seq_len), limit_windows)
    for step, begin in enumerate(range(0, len(chosen), batch_size), 1):
        samples = chosen[begin : begin + batch_size]
        inputs, targets = _windows(split, samples, seq_len, pad_id)
        done = (begin + len(samples)) / len(chosen)
        yield Batch(step, inputs, targets, None, samples, epoch=done, real_tokens=count_targets(targets))


# ---------------------------------------------------------------- fetched ahead


class Prefetcher(Generic[T]):
    """A thread that runs an iterator ahead of its reader, by at most `depth` items. The only one in the package.

    What the iterator raises is raised to the reader, after the items that came before it.
    """

    def __init__(self, items: Iterator[T], depth: int, name: str) -> None:
        self._items, self._depth = items, depth
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether `next` would return (or raise) at once, after waiting for that at most so long."""
        with self._change:
            return self._change.wait_for(lambda: bool(self._ready) or self._ended or self._closed, timeout_s)

    def next(self) -> T | None:
        """The next item; None after the last one."""
        self.wait(None)
        with self._change:
            if self._ready:
                self._change.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            return None

    def close(self, join_s: float | None = 5.0) -> None:
        """End the thread after the item it is working on, and wait for that (None: however long it takes)."""
        with self._change:
            self._closed = True
            self._ready.clear()
            self._change.notify_all()
        self._thread.join(join_s)

    def _run(self) -> None:
        while self._has_room():
            try:
                item = next(self._items)
            except StopIteration:  # the reader is told by the end of the queue
                break
            except BaseException as error:  # noqa: BLE001 (raised to the reader: also the SystemExit of a source, or it would wait for ever)
                self._error = error
                break
            with self._change:
                if not self._closed:
                    self._ready.append(item)
                    self._change.notify_all()
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _has_room(self) -> bool:
        with self._change:
            self._change.wait_for(lambda: len(self._ready) < self._depth or self._closed)
            return not self._closed
