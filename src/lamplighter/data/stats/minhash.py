"""Which texts are alike: MinHash signatures of their runs of words, and who shares bands of those.

In:  normalised texts.
Out: signatures (by rensa), pairs of near duplicates.

Two texts are near duplicates where the estimated Jaccard similarity of their 5-word sets is 0.8 or more. The estimate is
the share of 126 equal minima (standard error 0.036 at 0.8); a pair at 0.8 is found with 99.8 % probability.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamplighter.data.ngrams import Ints, runs_of

WORDS = 5
_ALIKE = 0.8
BANDS, ROWS = 21, 6
SIGNATURE = BANDS * ROWS
_SEED = 20
MOST_BYTES = 1 << 16  # of a text that count for its signature
BLOCK_BYTES = 1 << 20  # hashed at once
_FACTOR = 0x9E3779B97F4A7C15
Signatures = np.ndarray[Any, np.dtype[np.uint32]]


def normalised(text: str) -> str:
    """Lower case, and one space where there is any white space."""
    return " ".join(text.lower().split())


def new_hash() -> hashlib.blake2b:
    """Of 8 bytes; two of a million different texts share one with probability 3e-8."""
    return hashlib.blake2b(digest_size=8)


def text_hash(normal: str) -> int:
    found = new_hash()
    found.update(normal.encode("utf-8", "surrogatepass"))  # half of a character pair may stand in a JSON string
    return int.from_bytes(found.digest(), "little")


# ---------------------------------------------------------------- signatures and pairs


def signatures(texts: Sequence[str]) -> tuple[Signatures, np.ndarray[Any, np.dtype[np.bool_]]]:
    """uint32 [texts, SIGNATURE], and which of them have one (shorter ones have not enough words)."""
    rensa: Any = importlib.import_module("rensa")
    hashes, owners = runs_of([text[:MOST_BYTES] for text in texts], WORDS)
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
