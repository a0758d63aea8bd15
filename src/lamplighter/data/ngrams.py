"""Runs of words as 64-bit numbers, and an index of them: which of a text stand in another.

In:  texts.
Out: a number for each word and for each run of words (numpy, no Python object per word); NgramIndex.

A word is letters and digits between anything else, without case. Everything that asks which texts have words in common uses
these numbers: duplicates when text is cleaned, near duplicates and test sets in the statistics, contamination in evaluation.
Words of the same length that differ only after their eighth byte have one number: a run of several is not mistaken for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
MIX = np.uint64(0x9E3779B97F4A7C15)
_ALNUM = bytes(byte if byte >= 128 else ord(chr(byte).lower()) if chr(byte).isalnum() else 0 for byte in range(256))
_MASKS = np.array([(1 << (8 * size)) - 1 for size in range(8)] + [(1 << 64) - 1], dtype=np.uint64)
_SIZES = np.arange(256, dtype=np.uint64) << np.uint64(56)
_SHIFT = np.uint64(29)


def plain_words(data: bytes) -> bytes:
    """Lower case (of ASCII), 0 where there is no word."""
    return data.translate(_ALNUM)


def word_spans(plain: bytes) -> tuple[Ints, Ints]:
    """(where each word begins, how long it is), in bytes."""
    inside = np.frombuffer(b"\0" + plain + b"\0", dtype=np.uint8) != 0
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    return edges[::2], edges[1::2] - edges[::2]


def word_keys(plain: bytes, spans: tuple[Ints, Ints]) -> Hashes:
    """One number for each word."""
    starts, sizes = spans
    padded = plain + b"\0" * 8
    eight = np.ndarray(shape=(len(plain) + 1,), dtype="<u8", buffer=padded, strides=(1,))
    keys: Hashes = eight[starts]
    keys &= _MASKS.take(sizes, mode="clip")
    keys ^= _SIZES.take(sizes, mode="wrap")
    keys *= MIX
    return keys


def word_key(word: str) -> int:
    """The number that stands for a word in lower case."""
    data = word.encode()
    return int(word_keys(data, (np.array([0]), np.array([len(data)])))[0])


def runs(keys: Hashes, words: int) -> Hashes:
    """One number for each run of so many words; none where there are fewer."""
    count = len(keys) - words + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    out = keys[:count].copy()
    for place in range(1, words):
        out ^= out >> _SHIFT
        out *= MIX
        out += keys[place : place + count]
    return out


def runs_of(texts: Sequence[str], words: int) -> tuple[Hashes, Ints]:
    """The numbers of all runs of so many words, in order, and for each the number of its text."""
    parts = [text.lower().encode() for text in texts]
    ends = np.cumsum([len(part) + 1 for part in parts]) if parts else np.zeros(0, np.int64)
    plain = plain_words(b"\0".join(parts))
    spans = word_spans(plain)
    found = runs(word_keys(plain, spans), words)
    owners = np.searchsorted(ends, spans[0], side="right")
    first, last = owners[: len(found)], owners[len(owners) - len(found) :]
    inside = first == last
    return found[inside], first[inside]


class NgramIndex:
    """The runs of words of a (small) set of texts, and which of them were met elsewhere."""

    def __init__(self, texts: Sequence[str], words: int) -> None:
        self.words, self.count = words, len(texts)
        found, self._owners = runs_of(texts, words)
        self._known, self._which = np.unique(found, return_inverse=True)
        self._met = np.zeros(len(self._known), np.bool_)

    def meet(self, texts: Sequence[str]) -> None:
        """Mark those that occur in these texts."""
        if not len(self._known):
            return
        found, _ = runs_of(texts, self.words)
        at = np.searchsorted(self._known, found)
        at[at == len(self._known)] = 0
        self._met[at[self._known[at] == found]] = True

    def shares(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Of each text, the share of its runs that were met; NaN for one that is too short to have any."""
        totals = np.bincount(self._owners, minlength=self.count)
        met = np.bincount(self._owners, weights=self._met[self._which], minlength=self.count)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(totals > 0, met / totals, np.nan))
