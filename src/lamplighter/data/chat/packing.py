"""Which examples share a window or a batch, and what part of the positions is padding.

In:  the lengths of examples, the length of a window, a seed.
Out: a Packing (examples to windows), the batches of an epoch by like length, the padding share of each strategy.

All of it is a pure function of its arguments: the same lengths and seed give the same windows on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lamplighter.data.batches import permute

STRATEGIES = ("to seq_len", "to 128-multiple", "dynamic", "grouped", "packed")
ROUND_TO = 2  # a batch of like lengths is padded to a multiple of this: 8 was not faster on a CPU; not tried on a GPU
POOL_BATCHES = 64  # so many batches are sorted by length together; more would leave less to chance
Int64s = np.ndarray[Any, np.dtype[np.int64]]


# ---------------------------------------------------------------- several examples in one window


@dataclass(frozen=True)
class Packing:
    """Window w holds the examples members[starts[w]:starts[w + 1]], one after the other."""

    members: Int64s
    starts: Int64s

    @property
    def windows(self) -> int:
        return len(self.starts) - 1


def pack(lengths: Int64s, seq_len: int, seed: int = 0) -> Packing:
    """Best fit, longest first: each example goes into the fullest window that still has room for it.

    Examples of one length are interchangeable: the seed decides which of them goes where. All of one length are placed
    together, so the work grows with the number of distinct lengths, not with the number of examples.
    """
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= seq_len:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit windows of {seq_len}")
    order = _shuffled_by_length(lengths, seed)
    values, counts = np.unique(lengths, return_counts=True)
    room: list[list[Int64s]] = [[] for _ in range(seq_len + 1)]  # windows by the positions that they have left
    have = np.zeros(seq_len + 1, np.int64)
    window_of = np.empty(len(lengths), np.int64)
    used = placed = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        rest = order[placed : placed + count]
        placed += count
        for left in (np.flatnonzero(have[length:]) + length).tolist():
            if not len(rest):
                break
            rest = _fill(np.concatenate(room[left]), left, length, rest, room, have, window_of)
        if len(rest):
            each = seq_len // length
            new = np.arange(used, used - (-len(rest) // each), dtype=np.int64)
            used += len(new)
            have[seq_len] += len(new)
            _fill(new, seq_len, length, rest, room, have, window_of)
    by_window = order[np.argsort(window_of[order], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(window_of, minlength=used))]).astype(np.int64)
    return Packing(by_window, starts)


def _fill(
    windows: Int64s, left: int, length: int, rest: Int64s, room: list[list[Int64s]], have: Int64s, window_of: Int64s
) -> Int64s:
    """Put examples of one length into windows that all have `left` positions; returns the examples that are over."""
    each = left // length
    touched = min(len(windows), -(-len(rest) // each))
    now = rest[: touched * each]
    window_of[now] = np.repeat(windows[:touched], each)[: len(now)]
    room[left] = [windows[touched:]] if touched < len(windows) else []
    have[left] -= touched
    full, over = divmod(len(now), each)
    for some, taken in ((windows[:full], each), (windows[full:touched], over)):
        if len(some):
            room[left - taken * length].append(some)
            have[left - taken * length] += len(some)
    return rest[len(now) :]


def _shuffled_by_length(lengths: Int64s, seed: int, epoch: int = 0) -> Int64s:
    """The examples, longest first; those of one length in an order that (seed, epoch) decides."""
    places = np.arange(len(lengths), dtype=np.int64)
    shuffled = permute(seed, np.full_like(places, epoch), places, len(lengths)) if len(lengths) else places
    return shuffled[np.argsort(-lengths[shuffled], kind="stable")]


# ---------------------------------------------------------------- batches of like length


def group(lengths: Int64s, batch_size: int, seed: int, epoch: int) -> Packing:
    """The batches of an epoch: examples are shuffled, sorted by length within pools, cut; then the batches are shuffled.

    Every example is in one batch; the last one cut may be smaller.
    """
    count = len(lengths)
    places = np.arange(count, dtype=np.int64)
    order = permute(seed, np.full_like(places, epoch), places, count)
    pool = places // (batch_size * POOL_BATCHES)
    order = order[np.lexsort((-lengths[order], pool))]
    batches = -(-count // batch_size)
    numbers = np.arange(batches, dtype=np.int64)
    turn = permute(seed + 1, np.full_like(numbers, epoch), numbers, batches)
    sizes = np.minimum((turn + 1) * batch_size, count) - turn * batch_size
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    within = np.arange(count, dtype=np.int64) - np.repeat(starts[:-1], sizes)
    return Packing(order[np.repeat(turn * batch_size, sizes) + within], starts)


def round_up(length: Int64s | int, multiple: int) -> Any:
    return -(-length // multiple) * multiple


# ---------------------------------------------------------------- the arithmetic of padding


def padding_share(lengths: Int64s, strategy: str, seq_len: int, batch_size: int) -> float:
    """The share of positions that would hold padding, from 0 to 1. An example longer than seq_len counts as seq_len.

    to seq_len: each example alone in a window. to 128-multiple: each to the next multiple of 128. dynamic: batches in
    random order, each padded to its longest. grouped: batches of like length, padded to their longest, rounded up to
    a multiple of 2. packed: several examples in a window.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"{strategy} is none of {', '.join(STRATEGIES)}")
    lengths = np.minimum(np.asarray(lengths, np.int64), seq_len)
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return 0.0
    return 1 - float(lengths.sum()) / _positions(lengths, strategy, seq_len, batch_size)


def _positions(lengths: Int64s, strategy: str, seq_len: int, batch_size: int) -> int:
    if strategy == "to seq_len":
        return len(lengths) * seq_len
    if strategy == "to 128-multiple":
        return int(np.minimum(round_up(lengths, 128), seq_len).sum())
    if strategy == "packed":
        return pack(lengths, seq_len).windows * seq_len
    if strategy == "grouped":
        batches = group(lengths, batch_size, 0, 0)
        longest = np.maximum.reduceat(lengths[batches.members], batches.starts[:-1])
        longest = np.minimum(round_up(longest, ROUND_TO), seq_len)
        return int((longest * np.diff(batches.starts)).sum())
    places = np.arange(len(lengths), dtype=np.int64)
    order = permute(0, np.zeros_like(places), places, len(places))
    starts = np.arange(0, len(lengths), batch_size)
    longest = np.maximum.reduceat(lengths[order], starts)
    return int((longest * np.diff([*starts, len(lengths)])).sum())
