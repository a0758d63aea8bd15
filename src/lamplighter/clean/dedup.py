"""Documents that are there twice: exactly (but for case, blanks and punctuation), or nearly (MinHash over runs of five words).

In:  a record of fixed size for each document, made where the document was cleaned.
Out: for each document that goes, the earlier one that stays. The first in the order of the input always wins.

Records wait in a file. In memory is one column of them at a time: about 24 bytes for each document, plus the candidates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from lamplighter.clean.quality import Words
from lamplighter.clean.rules import rensa

PERMUTATIONS = 128
_SEED = 42
_GROUP_LIMIT = 16  # of one band: a later document is compared with so many earlier ones
_Array = np.ndarray
RECORD = np.dtype([("exact", "<u8", (2,)), ("words", "<u4"), ("sketch", "<u4", (PERMUTATIONS,))])
_NONE = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True)
class Twin:
    """A document that goes, because it is like an earlier one."""

    number: int
    first: int
    likeness: float  # 1.0: the same

    @property
    def reason(self) -> str:
        return "duplicate" if self.likeness == 1.0 else "near_duplicate"


def record_of(words: Words, near: bool) -> bytes:
    """The fixed-size record of a document."""
    letters = words.plain.translate(None, b"\0") or words.data
    exact = hashlib.blake2b(letters, digest_size=16).digest()
    grams = words.fives if near else _NONE
    if not len(grams):
        return exact + bytes(RECORD.itemsize - len(exact))
    matrix = rensa().RMinHash.digest_matrix_from_flat_token_hashes(grams, [0, len(grams)], PERMUTATIONS, _SEED)
    return exact + np.array([len(words.keys), *matrix.to_rows()[0]], dtype="<u4").tobytes()


def bands_for(threshold: float) -> int:
    """How many bands find_twins pairs at this likeness nearly always (a miss in fifty at most), with as few others as can be."""
    for bands in (4, 8, 16, 32, 64):
        rows = PERMUTATIONS // bands
        if (1 - threshold**rows) ** bands < 0.02:
            return bands
    return PERMUTATIONS


def find_twins(records: _Array, near: float, tick: Callable[[int], None]) -> dict[int, Twin]:
    """The documents that go. `near` 0: exact ones only. `tick` hears of each column."""
    out = _exact(records)
    tick(1)
    if near:
        pairs = _candidates(records, bands_for(near), tick)
        _near(records, pairs, near, out)
    return out


def columns(near: float) -> int:
    """How often `find_twins` ticks."""
    return 1 + (bands_for(near) if near else 0)


def _exact(records: _Array) -> dict[int, Twin]:
    out: dict[int, Twin] = {}
    for group in _groups(np.array(records["exact"][:, 0])):
        seen: dict[int, int] = {}
        for number in group.tolist():
            other = int(records["exact"][number, 1])
            if other in seen:
                out[number] = Twin(number, seen[other], 1.0)
            else:
                seen[other] = number
    return out


def _groups(keys: _Array) -> Iterator[_Array]:
    """The numbers of those that share a key, in order."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    edges = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1], [True])))
    for place in np.flatnonzero(np.diff(edges) > 1):
        yield order[edges[place] : edges[place + 1]]


def _candidates(records: _Array, bands: int, tick: Callable[[int], None]) -> list[tuple[int, int]]:
    """Pairs (later, earlier) that share all rows of a band."""
    rows = PERMUTATIONS // bands
    pairs: set[tuple[int, int]] = set()
    empty = np.array(records["words"]) == 0
    for band in range(bands):
        part = np.array(records["sketch"][:, band * rows : (band + 1) * rows]).astype(np.uint64)
        keys = np.zeros(len(records), dtype=np.uint64)
        for row in range(rows):
            keys = (keys ^ (keys >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15) + part[:, row]
        for group in _groups(keys):
            members = [number for number in group.tolist() if not empty[number]]
            for place, number in enumerate(members):
                pairs.update((number, other) for other in members[: min(place, _GROUP_LIMIT)])
        tick(1)
    return sorted(pairs)


def _near(records: _Array, pairs: list[tuple[int, int]], threshold: float, out: dict[int, Twin]) -> None:
    """In the order of the input: a document goes if it is like one that stays."""
    for number, other in pairs:
        first = out[other].first if other in out else other
        if number in out or first == number:
            continue
        one, two = records["sketch"][number], records["sketch"][first]
        likeness = float(np.mean(one == two))
        if likeness >= threshold:
            out[number] = Twin(number, first, min(0.999, round(likeness, 3)))  # 1.0 is kept for the same letters
