"""Which texts are alike: n-grams of words as 64-bit numbers, MinHash signatures of them, and who shares bands of those.

In:  normalised texts.
Out: n-gram hashes (numpy, no Python object per word), signatures (by rensa), pairs of near duplicates, overlap with a set.

Two texts are near duplicates where the estimated Jaccard similarity of their 5-word sets is 0.8 or more. The estimate is
the share of 126 equal minima (standard error 0.036 at 0.8); a pair at 0.8 is found with 99.8 % probability.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from lamplighter.data.batches import mix

WORDS = 5
_ALIKE = 0.8
BANDS, ROWS = 21, 6
SIGNATURE = BANDS * ROWS
_SEED = 20
MOST_BYTES = 1 << 16  # of a text that count for its signature
BLOCK_BYTES = 1 << 20  # hashed at once
_FACTOR = 0x9E3779B97F4A7C15  # odd, so it has an inverse
_Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Signatures = np.ndarray[Any, np.dtype[np.uint32]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


def normalised(text: str) -> str:
    """Lower case, and one space where there is any white space."""
    return " ".join(text.lower().split())


def new_hash() -> hashlib.blake2b:
    """Of 8 bytes; two of a million different texts share one with probability 3e-8."""
    return hashlib.blake2b(digest_size=8)


def text_hash(normal: str) -> int:
    found = new_hash()
    found.update(normal.encode())
    return int.from_bytes(found.digest(), "little")


# ---------------------------------------------------------------- n-grams of words, as numbers


@cache
def _powers() -> tuple[_Hashes, _Hashes]:
    """FACTOR**n and its inverse**n, modulo 2**64."""
    inverse = pow(_FACTOR, -1, 1 << 64)
    made = []
    for base in (_FACTOR, inverse):
        steps = np.full(BLOCK_BYTES + 1, base, np.uint64)
        steps[0] = 1
        made.append(np.cumprod(steps, dtype=np.uint64))
    return made[0], made[1]


def word_grams(texts: Sequence[str], words: int = WORDS) -> tuple[_Hashes, Ints]:
    """The hashes of all runs of so many words, and for each the number of its text. Texts are normalised.

    A prefix sum of bytes times powers gives the hash of any stretch in two look-ups; equal stretches, equal hashes.
    """
    blocks = [*_blocks(texts)]
    found = [_grams(data, first, words) for data, first in blocks]
    if not found:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    return np.concatenate([hashes for hashes, _ in found]), np.concatenate([owners for _, owners in found])


def _blocks(texts: Sequence[str]) -> list[tuple[bytes, Ints]]:
    """Texts joined by newlines up to BLOCK_BYTES, with their numbers; a longer one is cut between words."""
    made: list[tuple[bytes, Ints]] = []
    held: list[bytes] = []
    numbers: list[int] = []
    size = 0
    for number, text in enumerate(texts):
        data = text.encode()
        while len(data) > BLOCK_BYTES // 2:
            cut = data.rfind(b" ", 0, BLOCK_BYTES // 2)
            cut = cut if cut > 0 else BLOCK_BYTES // 2
            made.append((data[:cut], np.array([number])))
            data = data[cut + 1 :]
        if size + len(data) + 1 > BLOCK_BYTES:
            made.append((b"\n".join(held), np.array(numbers)))
            held, numbers, size = [], [], 0
        held.append(data)
        numbers.append(number)
        size += len(data) + 1
    return [*made, (b"\n".join(held), np.array(numbers))] if held else made


def _grams(data: bytes, numbers: Ints, words: int) -> tuple[_Hashes, Ints]:
    raw = np.frombuffer(data, np.uint8)
    up, down = _powers()
    sums = np.zeros(len(raw) + 1, np.uint64)
    np.cumsum(raw * up[: len(raw)], dtype=np.uint64, out=sums[1:])
    lines = raw == ord("\n")
    breaks = np.flatnonzero(lines | (raw == ord(" ")))
    starts = np.concatenate([[0], breaks + 1])
    ends = np.concatenate([breaks, [len(raw)]])
    owner = np.concatenate([[0], np.cumsum(lines)])[starts] if len(raw) else np.zeros(1, np.int64)
    last = len(starts) - words + 1
    if last <= 0:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    begin, end = starts[:last], ends[words - 1 :]
    inside = (owner[:last] == owner[words - 1 :]) & (end > begin)
    begin, end = begin[inside], end[inside]
    hashes = (sums[end] - sums[begin]) * down[begin]  # mixed below: the sums of a polynomial have weak low bits
    return mix(hashes), numbers[owner[:last][inside]]


# ---------------------------------------------------------------- signatures and pairs


def signatures(texts: Sequence[str]) -> tuple[Signatures, np.ndarray[Any, np.dtype[np.bool_]]]:
    """uint32 [texts, SIGNATURE], and which of them have one (shorter ones have not enough words)."""
    rensa: Any = importlib.import_module("rensa")
    hashes, owners = word_grams([text[:MOST_BYTES] for text in texts])  # too short to be cut: owners are in order
    counts = np.bincount(owners, minlength=len(texts))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, SIGNATURE, _SEED)
    return np.array(matrix.to_rows(), np.uint32).reshape(len(texts), SIGNATURE), counts > 0


def missing() -> str:
    """Why there can be no signatures; '' where there can."""
    try:
        importlib.import_module("rensa")
    except ImportError as error:
        return f"the library rensa is missing ({error}): pip install 'lamplighter[data]'"
    return ""


@dataclass(frozen=True)
class Alike:
    """Two texts by number, the earlier one first."""

    first: int
    second: int
    similarity: float


def near_pairs(rows: Signatures, apart: int = 0, tick: Callable[[], None] = lambda: None) -> list[Alike]:
    """Each text with the first earlier one that it is a near duplicate of; a text is listed once.

    With `apart`, only pairs whose first is below it and whose second is not: across two sets, one after the other.
    """
    best: dict[int, Alike] = {}
    for band in range(BANDS) if len(rows) else ():
        tick()
        keys = np.ascontiguousarray(rows[:, band * ROWS : (band + 1) * ROWS]).view([("", np.uint32)] * ROWS).ravel()
        order = np.argsort(keys, kind="stable")
        same = np.concatenate([[False], keys[order][1:] == keys[order][:-1]])
        heads = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
        first, second = order[heads[same]], order[same]
        if apart:
            across = (first < apart) & (second >= apart)
            first, second = first[across], second[across]
        if not len(first):
            continue
        similar = (rows[first] == rows[second]).mean(axis=1)
        for a, b, share in zip(first.tolist(), second.tolist(), similar.tolist(), strict=True):
            if share >= _ALIKE and (b not in best or best[b].first > a):
                best[b] = Alike(a, b, share)
    return [best[number] for number in sorted(best)]


class Signer:
    """Signatures of a sample of texts, bounded: where there are too many, every second one (by a hash of its number) goes."""

    def __init__(self, most: int) -> None:
        self.most, self.every = most, 1
        self.numbers: list[int] = []
        self.rows: list[Signatures] = []
        self._waiting: list[tuple[int, str]] = []
        self._size = 0

    def offer(self, number: int, normal: str) -> None:
        if self.most and _scattered(number) % self.every == 0:
            self._waiting.append((number, normal[:MOST_BYTES]))
            self._size += len(self._waiting[-1][1])
            if self._size > BLOCK_BYTES:
                self.flush()

    def flush(self) -> None:
        """Turn what waits into signatures."""
        if not self._waiting:
            return
        rows, have = signatures([normal for _, normal in self._waiting])
        self.numbers += [number for (number, _), one in zip(self._waiting, have.tolist(), strict=True) if one]
        self.rows.append(rows[have])
        self._waiting, self._size = [], 0
        while len(self.numbers) > self.most:
            self.every *= 2
            keep = np.array([_scattered(number) % self.every == 0 for number in self.numbers])
            self.rows = [np.concatenate(self.rows)[keep]]
            self.numbers = [number for number, one in zip(self.numbers, keep.tolist(), strict=True) if one]

    def matrix(self) -> Signatures:
        self.flush()
        return np.concatenate([np.zeros((0, SIGNATURE), np.uint32), *self.rows])


def joined(signers: Iterable[Signer]) -> tuple[Signatures, Ints]:
    """The signatures of several, and the number of each text."""
    signers = list(signers)
    rows = np.concatenate([signer.matrix() for signer in signers])
    return rows, np.array([number for signer in signers for number in signer.numbers], np.int64)


def _scattered(number: int) -> int:
    """A number that has nothing to do with its neighbours'."""
    number = (number * _FACTOR) & ((1 << 64) - 1)
    return (number ^ (number >> 29)) >> 8


# ---------------------------------------------------------------- how much of some texts stands in others


class Grams:
    """The n-grams of a (small) set of texts, and which of them were met elsewhere."""

    def __init__(self, texts: Sequence[str], words: int) -> None:
        self.words, self.count = words, len(texts)
        hashes, self._owners = word_grams(texts, words)
        self._known, self._which = np.unique(hashes, return_inverse=True)
        self._met = np.zeros(len(self._known), np.bool_)

    def meet(self, texts: Sequence[str]) -> None:
        """Mark those that occur in these texts."""
        if not len(self._known):
            return
        hashes, _ = word_grams(texts, self.words)
        at = np.searchsorted(self._known, hashes)
        at[at == len(self._known)] = 0
        self._met[at[self._known[at] == hashes]] = True

    def shares(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Of each text, the share of its n-grams that were met; NaN for one that is too short to have any."""
        totals = np.bincount(self._owners, minlength=self.count)
        met = np.bincount(self._owners, weights=self._met[self._which], minlength=self.count)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(totals > 0, met / totals, np.nan))
