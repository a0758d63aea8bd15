"""Texts that stand more than once: in a corpus, on both sides of its division, in a test set of the user's.

In:  a filled Tally; a test set.
Out: counts and examples with their places; near ones from a stated sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lamplighter import report
from lamplighter.data.ngrams import Ints, NgramIndex
from lamplighter.data.sources import Source, watched
from lamplighter.data.split import Split
from lamplighter.data.stats import minhash
from lamplighter.data.stats.collect import HEAD_CHARS, SHOWN, Places, Tally, line_of
from lamplighter.data.stats.minhash import Signatures, normalised, text_hash
from lamplighter.errors import BadData
from lamplighter.readers.records import Part
from lamplighter.rundir import human_bytes

GRAM_WORDS = 8
GRAM_SHARE = 0.7
_TEST_BYTES = 1 << 26


@dataclass(frozen=True)
class Pair:
    """Two documents that are alike."""

    first: str
    second: str
    similarity: float
    copies: int
    head: str


@dataclass(frozen=True)
class Duplicates:
    """Texts that stand more than once."""

    exact: int
    """Documents that repeat an earlier one, case and white space apart."""
    exact_groups: int
    exact_examples: list[Pair]
    near: int | None = None
    """Further documents of the sample that are near duplicates of an earlier one in it; None where not counted."""
    near_documents: int = 0
    """Size of that sample; documents of fewer than 5 words are never in it."""
    near_sampled: bool = False
    """Whether there were more documents than were looked at."""
    near_reason: str = ""
    near_examples: list[Pair] = field(default_factory=list)


@dataclass(frozen=True)
class Sides:
    """The division that `lamp train` would make."""

    by: str
    """documents, blocks or examples; '' where there is no division."""
    reason: str
    train: int = 0
    val: int = 0
    """Documents (or blocks) on either side."""
    exact: int = 0
    """Texts on both sides: 0 by construction, as the side is decided by the text's hash."""
    near: int | None = None
    """Validation texts of the sample with a near duplicate among the training texts of the sample."""
    near_train: int = 0
    near_val: int = 0
    """Sizes of those samples."""
    near_examples: list[Pair] = field(default_factory=list)


@dataclass(frozen=True)
class TestSet:
    """A file of the user's, held against the training text."""

    name: str
    documents: int
    exact: int
    exact_examples: list[Pair]
    grams: int
    """Further documents of which GRAM_SHARE of the runs of GRAM_WORDS words stand in the training text."""
    grams_any: int
    """Further documents of which at least one run does."""
    grams_short: int
    """Documents with fewer words than that: compared whole only."""
    gram_examples: list[Pair]
    near: int | None = None
    """Documents, not among the exact ones, that are near duplicates of a training document of the sample."""
    near_train: int = 0
    near_examples: list[Pair] = field(default_factory=list)


# ---------------------------------------------------------------- a test set of the user's


class TestGrams:
    """Documents of a test set, and what of them was met in the training text."""

    def __init__(self, name: str, source: Source) -> None:
        self.name, self.places = name, Places()
        self.normals: list[str] = []
        self.heads: list[str] = []
        self._read(source)
        self.hashes = [text_hash(normal) for normal in self.normals]
        self.grams = NgramIndex(self.normals, GRAM_WORDS)
        self._waiting: list[str] = []
        self._size = 0

    def _read(self, source: Source) -> None:
        size, parts = 0, [""]
        with report.phase("read the test set", total=source.total_bytes(), unit="B") as p:
            begun = source.position()
            for text in watched(source, lambda done, item: p.set(done, item)):
                here = source.position()
                parts.append(str(text))
                size += len(text)
                if isinstance(text, Part):
                    continue
                whole = "".join(parts)
                self.places.add(here.item, line_of(begun, here))
                begun = here
                self.normals.append(normalised(whole))
                self.heads.append(whole[:HEAD_CHARS])
                parts = []
                if size > _TEST_BYTES:
                    why = f"it is held in memory while the training text passes, at most {human_bytes(_TEST_BYTES)}"
                    raise BadData(f"the test set {self.name} is too large", why, "give a part of it to --val")

    def meet(self, normal: str) -> None:
        self._waiting.append(normal)
        self._size += len(normal)
        if self._size > minhash.BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        self.grams.meet(self._waiting)
        self._waiting, self._size = [], 0


# ---------------------------------------------------------------- conclusions


def _exact_duplicates(tally: Tally) -> tuple[int, int, list[Pair], np.ndarray[Any, np.dtype[np.bool_]]]:
    """Repeats, groups of them, the largest groups; and for each document whether it is the first of its kind."""
    hashes = np.frombuffer(tally.hashes, np.uint64)
    order = np.argsort(hashes, kind="stable")
    same = np.concatenate([[False], hashes[order][1:] == hashes[order][:-1]])
    firsts = np.ones(len(hashes), np.bool_)
    firsts[order[same]] = False
    heads = np.flatnonzero(~same)
    sizes = np.diff(np.concatenate([heads, [len(order)]]))
    largest = [int(n) for n in np.argsort(-sizes, kind="stable")[:SHOWN] if sizes[n] > 1]
    pairs = [_pair_of(tally, int(order[heads[n]]), int(order[heads[n] + 1]), 1.0, int(sizes[n])) for n in largest]
    return int(same.sum()), int((sizes > 1).sum()), pairs, firsts


def _pair_of(tally: Tally, first: int, second: int, similarity: float, copies: int = 2) -> Pair:
    """Two documents by number."""
    return Pair(tally.places.of(first), tally.places.of(second), round(similarity, 3), copies, tally.head_of(first))


def find_duplicates(tally: Tally, reason: str) -> Duplicates:
    """Exact ones of all documents, near ones of the sample; `reason`: why near ones are not counted."""
    with report.phase("exact duplicates", unit="documents"):
        exact, groups, pairs, firsts = _exact_duplicates(tally)
    if reason:
        return Duplicates(exact, groups, pairs, near_reason=reason)
    with report.phase("near duplicates", total=minhash.BANDS, unit="bands") as p:
        rows, numbers = minhash.joined(tally.signers.values())
        order = np.argsort(numbers, kind="stable")
        order = order[firsts[numbers[order]]]
        found = minhash.near_pairs(rows[order], tick=p.tick)
    examples = [
        _pair_of(tally, int(numbers[order[one.first]]), int(numbers[order[one.second]]), one.similarity)
        for one in sorted(found, key=lambda one: (-one.similarity, one.first))[:SHOWN]
    ]
    sampled = any(side.every > 1 for side in tally.signers.values())
    return Duplicates(exact, groups, pairs, len(found), len(numbers), near_sampled=sampled, near_examples=examples)


def compare_sides(tally: Tally, divide: Split | None, why_not: str, reason: str) -> Sides:
    """Near duplicates across the division of a text."""
    if divide is None:
        return Sides("", why_not)
    sides = Sides(divide.by, reason, tally.sides["train"], tally.sides["val"])
    if reason:
        return sides
    signers = tally.signers if divide.by == "documents" else tally.blocks
    rows, numbers = minhash.joined(signers.values())
    return near_across(sides, tally, rows, numbers, len(signers["train"].numbers))


def near_across(sides: Sides, tally: Tally, rows: Signatures, numbers: Ints, train: int) -> Sides:
    """Held-back texts with a near duplicate among those that are trained on, which are the first `train` of the rows."""
    with report.phase("near duplicates across the sides", total=minhash.BANDS, unit="bands") as p:
        found = minhash.near_pairs(rows, train, p.tick) if train else []
    shown = found[:SHOWN] if sides.by != "blocks" else []
    examples = [_pair_of(tally, int(numbers[one.first]), int(numbers[one.second]), one.similarity) for one in shown]
    return replace(sides, near=len(found), near_train=train, near_val=len(rows) - train, near_examples=examples)


def compare_test(tally: Tally, test: TestGrams, reason: str) -> TestSet:
    """What of the test set stands in the training text: whole, nearly, or in pieces."""
    test.flush()
    with report.phase("compare with the test set", total=len(test.normals), unit="documents") as p:
        hashes = np.frombuffer(tally.hashes, np.uint64)
        order = np.argsort(hashes, kind="stable")
        at = np.searchsorted(hashes[order], np.array(test.hashes, np.uint64))
        hits = [(n, int(order[i])) for n, i in enumerate(at.tolist())
                if i < len(order) and int(hashes[order[i]]) == test.hashes[n]]  # fmt: skip
        exact = [Pair(tally.places.of(there), test.places.of(n), 1.0, 2, test.heads[n]) for n, there in hits[:SHOWN]]
        rest = np.ones(len(test.normals), np.bool_)
        rest[[n for n, _ in hits]] = False
        shares = test.grams.shares()
        over = np.flatnonzero(rest & (np.nan_to_num(shares) >= GRAM_SHARE))
        best = sorted(over.tolist(), key=lambda n: (-shares[n], n))[:SHOWN]
        grams = [Pair("", test.places.of(n), round(float(shares[n]), 3), 0, test.heads[n]) for n in best]
        near = None if reason else _near_test(tally, test, rest)
        p.tick(len(test.normals))
    some = int((rest & (np.nan_to_num(shares) > 0)).sum())
    found = (len(test.normals), len(hits), exact, len(over), some, int(np.isnan(shares).sum()), grams)
    if near is None:
        return TestSet(test.name, *found)
    known = sum(len(side.numbers) for side in tally.signers.values())
    return TestSet(test.name, *found, len(near), known, near[:SHOWN])


def _near_test(tally: Tally, test: TestGrams, rest: np.ndarray[Any, np.dtype[np.bool_]]) -> list[Pair]:
    rows, have = minhash.signatures(test.normals)
    known, numbers = minhash.joined(tally.signers.values())
    mine = np.flatnonzero(have & rest)
    if not len(known) or not len(mine):
        return []
    pairs = []
    for one in minhash.near_pairs(np.concatenate([known, rows[mine]]), len(known)):
        n = int(mine[one.second - len(known)])
        first, second = tally.places.of(int(numbers[one.first])), test.places.of(n)
        pairs.append(Pair(first, second, round(one.similarity, 3), 2, test.heads[n]))
    return pairs


def no_near(near_documents: int) -> str:
    """Why near duplicates cannot be counted; '' where they can."""
    if not near_documents:
        return "not asked for (--near-documents 0)"
    if reason := minhash.missing():
        report.warn(f"near duplicates are not counted: {reason}")
    return reason
