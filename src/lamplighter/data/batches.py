"""Ids become batches: windows over the stream, in an order that is a pure function of (seed, step), fetched ahead.

In:  a Split, a seed, a step.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

NO_TARGET = -100
AHEAD = 512  # samples whose order is worked out at once
_CONSTANTS = [np.uint64(number * 0xD1342543DE82EF95 & (1 << 64) - 1) for number in range(6)]
ROUNDS = list(zip(_CONSTANTS[::2], _CONSTANTS[1::2], strict=True))
Int64s = np.ndarray[Any, np.dtype[np.int64]]
Uint64s = np.ndarray[Any, np.dtype[np.uint64]]


class TokenStream(Protocol):
    """Documents as one stream of ids: a Split of the token cache, or what a stream holds back."""

    @property
    def name(self) -> str: ...

    @property
    def documents(self) -> int: ...

    @property
    def text_bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Int64s: ...

    def gather(self, starts: Int64s, length: int) -> Int64s: ...

    def document_starts(self) -> Uint64s: ...


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

    @property
    def filled(self) -> int:
        return self.real_tokens if self.filled_tokens is None else self.filled_tokens


# ---------------------------------------------------------------- the order


def _mix(x: Uint64s) -> Uint64s:
    """The finisher of splitmix64: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int, epochs: Uint64s) -> Uint64s:
    golden = np.uint64(0x9E3779B97F4A7C15)
    start = _mix(np.array([seed & (1 << 64) - 1], np.uint64) + golden)
    return _mix(start + (epochs + np.uint64(1)) * golden)


def permute(seed: int, epochs: Int64s, positions: Int64s, size: int) -> Int64s:
    """Where each position of 0..size-1 goes in its epoch: a bijection per (seed, epoch)."""
    rows = math.isqrt(max(0, size - 1)) + 1
    columns = -(-size // rows)  # rows * columns is size, or little more
    keys = _keys(seed, epochs.astype(np.uint64))
    out = _feistel(positions.astype(np.uint64), keys, rows, columns)
    while (outside := out >= np.uint64(size)).any():  # walk on until it is inside
        out[outside] = _feistel(out[outside], keys[outside], rows, columns)
    return out.astype(np.int64)


def _feistel(x: Uint64s, keys: Uint64s, rows: int, columns: int) -> Uint64s:
    """A position is a row and a column; each in turn is moved on by a hash of the other, which can be undone."""
    height, width = np.uint64(rows), np.uint64(columns)
    row, column = x // width, x % width
    for one, two in ROUNDS:
        row = (row + _mix(keys + one + column) % height) % height
        column = (column + _mix(keys + two + row) % width) % width
    return row * width + column


@lru_cache(maxsize=4)
def _ahead(seed: int, block: int, size: int) -> Int64s:
    """The windows of a block of samples: a permutation of many costs hardly more than one of a batch."""
    numbers = np.arange(block * AHEAD, (block + 1) * AHEAD, dtype=np.int64)
    return permute(seed, numbers // size, numbers % size, size)


def order(seed: int, start: int, stop: int, size: int) -> Int64s:
    """The windows of samples start..stop-1 of a run, in a stream of `size` windows."""
    blocks = range(start // AHEAD, -(-stop // AHEAD))
    found = np.concatenate([_ahead(seed, block, size) for block in blocks])
    return found[start - blocks[0] * AHEAD : stop - blocks[0] * AHEAD]


# ---------------------------------------------------------------- windows


def count_windows(tokens: int, seq_len: int) -> int:
    """How many windows a stream has; its first token is nobody's target."""
    return max(0, -(-(tokens - 1) // seq_len))


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


def make_batch(split: TokenStream, seed: int, step: int, batch_size: int, seq_len: int, pad_id: int) -> Batch:
    """The batch of a step (steps count from 1), over all ranks."""
    windows = count_windows(len(split), seq_len)
    if not windows:
        raise ValueError(f"the {split.name} split has no tokens")
    samples = order(seed, (step - 1) * batch_size, step * batch_size, windows)
    inputs, targets = _windows(split, samples, seq_len, pad_id)
    real = int((targets != NO_TARGET).sum())
    return Batch(step, inputs, targets, None, samples, step * batch_size / windows, real)


def rows_of_rank(batch: Batch, rank: int, world: int) -> Batch:
    """The rows that one of `world` ranks works on; together the ranks have each row once."""
    begin, end = (number * len(batch.samples) // world for number in (rank, rank + 1))
    targets = batch.targets[begin:end]
    segments = None if batch.segments is None else batch.segments[begin:end]
    return replace(
        batch,
        inputs=batch.inputs[begin:end],
        targets=targets,
        segments=segments,
        samples=batch.samples[begin:end],
        real_tokens=int((targets != NO_TARGET).sum()),
    )


def validation_batches(
    split: TokenStream, seq_len: int, batch_size: int, pad_id: int, limit_windows: int | None = None
) -> Iterator[Batch]:
    """Every window once, in order; with a limit, that many, evenly spread. The last batch may have fewer rows."""
    total = count_windows(len(split), seq_len)
    count = total if limit_windows is None else min(total, limit_windows)
    chosen = np.arange(count, dtype=np.int64) * total // max(1, count)
    for step, begin in enumerate(range(0, count, batch_size), 1):
        samples = chosen[begin : begin + batch_size]
        inputs, targets = _windows(split, samples, seq_len, pad_id)
        real = int((targets != NO_TARGET).sum())
        yield Batch(step, inputs, targets, None, samples, min(1.0, (begin + len(samples)) / count), real)


# ---------------------------------------------------------------- fetched ahead


class BatchStream:
    """A thread makes the next few batches while a step runs; any step may be asked for next."""

    def __init__(self, make: Callable[[int], Batch], first_step: int = 1, depth: int = 3) -> None:
        self._make = make
        self._depth = depth
        self._ready: deque[Batch] = deque()
        self._wanted = first_step  # the step that the thread makes next
        self._error: Exception | None = None
        self._closed = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="lamp-batches", daemon=True)
        self._thread.start()

    def next(self, step: int) -> Batch:
        """The batch of `step`; waits where it is not made yet; raises what the thread met."""
        with self._change:
            expected = self._ready[0].step if self._ready else self._wanted
            if step != expected and self._error is None:
                self._ready.clear()
                self._wanted = step
                self._change.notify_all()
            while not self._ready and self._error is None and not self._closed:
                self._change.wait()
            if self._ready:
                self._change.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            raise RuntimeError("the batch stream is closed")

    def _work(self) -> None:
        while True:
            with self._change:
                while len(self._ready) >= self._depth and not self._closed:
                    self._change.wait()
                if self._closed:
                    return
                step = self._wanted
            try:
                batch = self._make(step)
            except Exception as error:  # noqa: BLE001 (goes to whoever asks next)
                with self._change:
                    self._error = error
                    self._change.notify_all()
                return
            with self._change:
                if step == self._wanted:  # else another step was asked for meanwhile
                    self._ready.append(batch)
                    self._wanted = step + 1
                    self._change.notify_all()

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        with self._change:
            self._closed = True
            self._ready.clear()
            self._change.notify_all()
        self._thread.join(timeout=5)

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
