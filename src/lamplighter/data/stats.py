"""A corpus in figures: documents, true tokens, lengths, duplicates, overlap of the sides; counted in one reading.

In:  a source, a tokenizer, the settings of a run; perhaps a test set.
Out: Stats, a frozen record of every figure (its JSON is `lamp data stats --json`); data/figures has the words for it.

Memory does not grow with the text: 16 bytes a document (length, hash, line), and a bounded sample of signatures.
"""

from __future__ import annotations

import heapq
import time
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lamplighter import report
from lamplighter.data import division, likeness
from lamplighter.data.division import Division
from lamplighter.data.files import Part, cut_all
from lamplighter.data.lengths import (
    Advice,
    Bar,
    Padding,
    Spread,
    Window,
    advise,
    bars,
    padding,
    spread,
    window,
    windows,
)
from lamplighter.data.likeness import Grams, Signer, normalised, text_hash
from lamplighter.data.quality import Quality
from lamplighter.data.sampling import Quota, passing
from lamplighter.data.sources import Position, Source
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import BadData
from lamplighter.rundir import human_bytes

FORMAT = 1
SHOWN = 5
HEAD_CHARS = 80
NEAR_DOCUMENTS = 50_000
GRAM_WORDS = 8
GRAM_SHARE = 0.7
TEST_BYTES = 1 << 26


@dataclass(frozen=True)
class Request:
    """What is to be counted, besides the text."""

    seq_len: int
    batch_size: int
    val_fraction: float
    sample_bytes: int | None = None
    near_documents: int = NEAR_DOCUMENTS


# ---------------------------------------------------------------- the record


@dataclass(frozen=True)
class Found:
    """A document, by its place."""

    number: int
    place: str
    tokens: int
    head: str


@dataclass(frozen=True)
class Pair:
    """Two documents that are alike."""

    first: str
    second: str
    similarity: float
    copies: int
    head: str


@dataclass(frozen=True)
class Counts:
    """How much there is."""

    documents: int
    characters: int
    bytes: int
    tokens: int
    """By the tokenizer, without end-of-text."""
    tokens_with_ends: int
    """With one end-of-text after each document: what a token cache of whole documents holds."""
    bytes_per_token: float
    empty_documents: int
    set_aside_lines: int
    set_aside_reasons: dict[str, int]
    used_tokens: int
    """Of the vocabulary."""


@dataclass(frozen=True)
class Duplicates:
    """Texts that stand more than once."""

    exact: int
    """Documents that repeat an earlier one, case and white space apart."""
    exact_groups: int
    exact_examples: list[Pair]
    near: int | None
    """Further documents of the sample that are near duplicates of an earlier one in it; None where not counted."""
    near_documents: int
    """Size of that sample."""
    near_share_of_documents: float
    near_reason: str
    near_examples: list[Pair]


@dataclass(frozen=True)
class Sides:
    """The division that `lamp train` would make."""

    by: str
    """documents or blocks; '' where there is none."""
    reason: str
    train: int
    val: int
    """Documents (or blocks) on either side."""
    exact: int
    """Texts on both sides: 0 by construction, as the side is decided by the text's hash."""
    near: int | None
    """Validation texts of the sample with a near duplicate among the training texts of the sample."""
    near_train: int
    near_val: int
    """Sizes of those samples."""
    near_examples: list[Pair]


@dataclass(frozen=True)
class TestSet:
    """A file of the user's, held against the training text."""

    name: str
    documents: int
    exact: int
    exact_examples: list[Pair]
    grams: int
    """Documents of which GRAM_SHARE of the runs of GRAM_WORDS words stand in the training text."""
    grams_any: int
    grams_short: int
    """Documents with fewer words than that: compared whole only."""
    gram_examples: list[Pair]
    near: int | None
    near_train: int
    near_examples: list[Pair]


@dataclass(frozen=True)
class Stats:
    """Everything."""

    format: int
    source: str
    kind: str
    """text, or chat."""
    template: str
    tokenizer: str
    tokenizer_path: str
    sampled: str
    """'' where all was read; else how much of what."""
    seconds: float
    bytes_per_second: float
    tokens_per_second: float
    """Of encoding alone."""
    counts: Counts
    lengths: Spread
    histogram: list[Bar]
    longest: list[Found]
    shortest: list[Found]
    seq_len: int
    batch_size: int
    window: Window
    windows: list[Window]
    padding: list[Padding]
    duplicates: Duplicates
    sides: Sides
    test_set: TestSet | None
    quality: Quality | None
    advice: list[Advice]
    notes: list[str] = field(default_factory=list)


# ---------------------------------------------------------------- where a document stands


def line_of(before: Position, after: Position) -> int:
    """The line that a text begins on, by the cursors around it; 0 where the source does not count lines."""
    old, new = (cursor.get("inner", cursor) for cursor in (before.cursor, after.cursor))
    if not isinstance(new, dict) or "line" not in new:
        return 0
    if after.item.removesuffix(".gz").removesuffix(".zst").endswith((".jsonl", ".ndjson")):
        return max(1, int(new["line"]) - 1)
    same = isinstance(old, dict) and old.get("file") == new.get("file")
    return int(old.get("line", 1)) if same else 1


class Places:
    """The place of each document by its number: file and line where the source says them, else a number."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._begins: list[int] = []
        self._lines = array("I")

    def add(self, item: str, line: int = 0) -> None:
        name = item.partition(" of ")[2] if item.startswith("document ") else item
        if not self._names or self._names[-1] != name:
            self._names.append(name)
            self._begins.append(len(self._lines))
        self._lines.append(line)

    def __len__(self) -> int:
        return len(self._lines)

    def of(self, number: int) -> str:
        at = bisect_right(self._begins, number) - 1
        if line := self._lines[number]:
            return f"{self._names[at]}:{line}"
        last = self._begins[at + 1] if at + 1 < len(self._begins) else len(self._lines)
        if last - self._begins[at] == 1:
            return self._names[at]
        return f"{self._names[at]}, document {number - self._begins[at] + 1}"


# ---------------------------------------------------------------- counting


class Tally:
    """Counts documents as they pass, each in one part or several."""

    def __init__(
        self, tokenizer: Tokenizer, divide: Division | None, near_documents: int, test: TestGrams | None
    ) -> None:
        self.tokenizer, self.divide, self.test = tokenizer, divide, test
        self.places, self.lengths, self.hashes = Places(), array("q"), array("Q")
        self.characters = self.bytes = self.empty = 0
        self.encode_s = 0.0
        self.used = np.zeros(tokenizer.vocab_size, np.bool_)
        self.signers = {"train": Signer(near_documents), "val": Signer(near_documents // 2)}
        self.blocks = {"train": Signer(near_documents), "val": Signer(near_documents // 2)}
        self.sides = {"train": 0, "val": 0}
        self.heads: dict[str, list[tuple[int, int, str]]] = {"longest": [], "shortest": []}
        self._parts: list[str] = []
        self._normal: list[str] = []
        self._size = 0
        self._side = "train"
        self._batch: list[tuple[int, str]] = []
        self._batch_bytes = 0

    def add(self, text: str, item: str, line: int = 0) -> None:
        """One text; a Part is not the end of its document."""
        ends = not isinstance(text, Part)
        begins = not self._parts
        size = len(text) if text.isascii() else len(text.encode())
        if begins:
            if not text and ends:
                self.empty += 1
                return
            self.places.add(item, line)
            self.lengths.append(0)
            self._side = self._divide(text)
        self.characters += len(text)
        self.bytes += size
        self._size += size
        self._parts.append(text[:HEAD_CHARS] if begins else "")
        self._normal.append(normalised(text))
        self._count_blocks(text)
        self._batch.append((len(self.places) - 1, str(text)))
        self._batch_bytes += size
        if self._batch_bytes >= self.tokenizer.batch_bytes:
            self.encode()
        if ends:
            self._end()

    def _divide(self, text: str) -> str:
        """Where `lamp train` would put the document: by the hash of its first part."""
        if self.divide is None or self.divide.by != "documents":
            return "train"
        side = self.divide.side(self.divide.hash(text.encode()))
        self.sides[side] += 1
        return side

    def _count_blocks(self, text: str) -> None:
        if self.divide is None or self.divide.by != "blocks":
            return
        for block in cut_all(text, division.BLOCK_CHARS):
            side = self.divide.side(self.divide.hash(block.encode()))
            self.sides[side] += 1
            self.blocks[side].offer(sum(self.sides.values()), normalised(block))

    def _end(self) -> None:
        number, head = len(self.places) - 1, self._parts[0]
        normal = " ".join(self._normal)
        self.hashes.append(text_hash(normal))
        self.signers[self._side].offer(number, normal)
        if self.test is not None:
            self.test.meet(normal)
        for name, key in (("longest", self._size), ("shortest", -self._size)):
            heapq.heappush(self.heads[name], (key, -number, head))
            if len(self.heads[name]) > 4 * SHOWN:
                heapq.heappop(self.heads[name])
        self._parts, self._normal, self._size = [], [], 0

    def encode(self) -> None:
        """Count the tokens of what waits."""
        if not self._batch:
            return
        started = time.monotonic()
        encoded = self.tokenizer.encode_batch([text for _, text in self._batch])
        self.encode_s += time.monotonic() - started
        for (number, _), count in zip(self._batch, np.diff(encoded.offsets).tolist(), strict=True):
            self.lengths[number] += count
        self.used[encoded.ids] = True
        self._batch, self._batch_bytes = [], 0

    def close(self) -> None:
        """A last document whose end did not come is a document all the same."""
        if self._parts:
            self._end()
        self.encode()

    def head_of(self, number: int) -> str:
        known = {-n: head for heap in self.heads.values() for _, n, head in heap}
        return known.get(number, "")


def read(source: Source, tally: Tally, sample_bytes: int | None) -> str:
    """Every text of the source, or of a sample of whole documents; says how much of what, '' for all."""
    total = source.total_bytes()
    quota = Quota(total, sample_bytes) if sample_bytes else None
    before, wanted, begins, ended = 0, True, True, True
    left_out = 0
    with report.phase("count", total=quota.end if quota else total, unit="B") as p:
        begun = source.position()
        for text in passing(source, lambda done, item: p.set(done, item)):
            here = source.position()
            if quota and begins:
                if quota.is_over(before):
                    ended = False
                    break
                wanted = quota.wants(here.bytes_done)
            if wanted:
                tally.add(text, here.item, line_of(begun, here))
                if quota:
                    quota.kept += len(text.encode())
            else:
                left_out += len(text.encode())
            begins = not isinstance(text, Part)
            before, begun = here.bytes_done, here
        tally.close()
        p.set(source.position().bytes_done)
    if not tally.bytes:
        raise BadData(f"no text in {source}", "every document is empty", "check data.paths")
    if quota is None or (ended and not left_out):
        return ""
    reach = quota.reach(ended)
    where = "its beginning (its size is not known)" if reach is None else f"{reach:.0%} of {source}"
    return f"a sample of {human_bytes(quota.kept)}, whole documents spread over {where}"


# ---------------------------------------------------------------- a test set of the user's


class TestGrams:
    """Documents of a test set, and what of them was met in the training text."""

    def __init__(self, name: str, source: Source) -> None:
        self.name, self.places = name, Places()
        self.normals: list[str] = []
        self.heads: list[str] = []
        self._read(source)
        self.hashes = [text_hash(normal) for normal in self.normals]
        self.grams = Grams(self.normals, GRAM_WORDS)
        self._waiting: list[str] = []
        self._size = 0

    def _read(self, source: Source) -> None:
        size, parts = 0, [""]
        with report.phase("read the test set", total=source.total_bytes(), unit="B") as p:
            begun = source.position()
            for text in passing(source, lambda done, item: p.set(done, item)):
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
                if size > TEST_BYTES:
                    why = f"it is held in memory while the training text passes, at most {human_bytes(TEST_BYTES)}"
                    raise BadData(f"the test set {self.name} is too large", why, "give a part of it to --val")

    def meet(self, normal: str) -> None:
        self._waiting.append(normal)
        self._size += len(normal)
        if self._size > likeness.BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        self.grams.meet(self._waiting)
        self._waiting, self._size = [], 0


# ---------------------------------------------------------------- conclusions


def exact_duplicates(tally: Tally) -> tuple[int, int, list[Pair], np.ndarray[Any, np.dtype[np.bool_]]]:
    """Repeats, groups of them, the largest groups; and for each document whether it is the first of its kind."""
    hashes = np.frombuffer(tally.hashes, np.uint64)
    order = np.argsort(hashes, kind="stable")
    same = np.concatenate([[False], hashes[order][1:] == hashes[order][:-1]])
    firsts = np.ones(len(hashes), np.bool_)
    firsts[order[same]] = False
    heads = np.flatnonzero(~same)
    sizes = np.diff(np.concatenate([heads, [len(order)]]))
    largest = [int(n) for n in np.argsort(-sizes, kind="stable")[:SHOWN] if sizes[n] > 1]
    pairs = [
        Pair(
            tally.places.of(int(order[heads[n]])),
            tally.places.of(int(order[heads[n] + 1])),
            1.0,
            int(sizes[n]),
            tally.head_of(int(order[heads[n]])),
        )
        for n in largest
    ]
    return int(same.sum()), int((sizes > 1).sum()), pairs, firsts


def find_duplicates(tally: Tally, reason: str) -> Duplicates:
    """Exact ones of all documents, near ones of the sample."""
    with report.phase("exact duplicates", unit="documents"):
        exact, groups, pairs, firsts = exact_duplicates(tally)
    if reason:
        return Duplicates(exact, groups, pairs, None, 0, 0.0, reason, [])
    with report.phase("near duplicates", unit="documents") as p:
        numbers = np.array([n for side in tally.signers.values() for n in _flushed(side).numbers], np.int64)
        rows = np.concatenate([side.matrix() for side in tally.signers.values()])
        order = np.argsort(numbers, kind="stable")
        order = order[firsts[numbers[order]]]
        found = likeness.near_pairs(rows[order])
        p.tick(len(order))
    examples = [
        _pair(tally, int(numbers[order[one.first]]), int(numbers[order[one.second]]), one.similarity)
        for one in sorted(found, key=lambda one: (-one.similarity, one.first))[:SHOWN]
    ]
    share = len(numbers) / max(1, len(tally.places))
    return Duplicates(exact, groups, pairs, len(found), len(numbers), share, "", examples)


def _flushed(signer: Signer) -> Signer:
    signer.flush()
    return signer


def _pair(tally: Tally, first: int, second: int, similarity: float) -> Pair:
    return Pair(tally.places.of(first), tally.places.of(second), round(similarity, 3), 2, tally.head_of(first))


def compare_sides(tally: Tally, divide: Division | None, why_not: str, reason: str) -> Sides:
    """Near duplicates across the division."""
    if divide is None:
        return Sides("", why_not, 0, 0, 0, None, 0, 0, [])
    signers = tally.signers if divide.by == "documents" else tally.blocks
    train, val = signers["train"], signers["val"]
    counts = (divide.by, reason, tally.sides["train"], tally.sides["val"], 0)
    if reason:
        return Sides(*counts, None, 0, 0, [])
    with report.phase("near duplicates across the sides", unit="texts") as p:
        rows = np.concatenate([train.matrix(), val.matrix()])
        found = likeness.near_pairs(rows, len(train.numbers)) if len(train.numbers) else []
        p.tick(len(rows))
    numbers = [*train.numbers, *val.numbers]
    examples = []
    for one in found[:SHOWN] if divide.by == "documents" else []:
        examples.append(_pair(tally, numbers[one.first], numbers[one.second], one.similarity))
    return Sides(*counts, len(found), len(train.numbers), len(val.numbers), examples)


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
        shares = test.grams.shares()
        over = np.flatnonzero(np.nan_to_num(shares) >= GRAM_SHARE)
        best = sorted(over.tolist(), key=lambda n: (-shares[n], n))[:SHOWN]
        grams = [Pair("", test.places.of(n), round(float(shares[n]), 3), 0, test.heads[n]) for n in best]
        near, train, pairs = None, 0, []
        if not reason:
            rows, have = likeness.signatures(test.normals)
            numbers = [*tally.signers["train"].numbers, *tally.signers["val"].numbers]
            known = np.concatenate([side.matrix() for side in tally.signers.values()])
            found = likeness.near_pairs(np.concatenate([known, rows[have]]), len(known)) if len(known) else []
            mine = np.flatnonzero(have)
            pairs = [
                Pair(tally.places.of(numbers[one.first]), test.places.of(n := int(mine[one.second - len(known)])),
                     round(one.similarity, 3), 2, test.heads[n])
                for one in found[:SHOWN]
            ]  # fmt: skip
            near, train = len(found), len(known)
        p.tick(len(test.normals))
    some = int((np.nan_to_num(shares) > 0).sum())
    short = int(np.isnan(shares).sum())
    return TestSet(test.name, len(test.normals), len(hits), exact, len(over), some, short, grams, near, train, pairs)


def extremes(tally: Tally, lengths: Sequence[int] | np.ndarray[Any, Any]) -> tuple[list[Found], list[Found]]:
    """The longest and the shortest documents, in tokens."""
    order = np.argsort(lengths, kind="stable")
    made = []
    for numbers in (order[::-1][:SHOWN], order[:SHOWN]):
        made.append([Found(int(n), tally.places.of(int(n)), int(lengths[n]), tally.head_of(int(n))) for n in numbers])
    return made[0], made[1]


def divide(source: Source, val_fraction: float) -> tuple[Division | None, str]:
    """The division that `lamp train` would make; or why there is none."""
    if not val_fraction:
        return None, "data.val_fraction is 0: nothing is held back"
    settings = division.Settings(val_fraction)
    try:
        return division.look(source, settings, lambda *_: None)[0], ""
    except BadData as error:
        return None, f"lamp train would refuse: {error.what} ({error.why})"


def count_text(source: Source, tokenizer: Tokenizer, path: str, request: Request, test: TestGrams | None) -> Stats:
    """All figures of plain text."""
    started = time.monotonic()
    found, why_not = divide(source, request.val_fraction)
    reason = likeness.missing() if request.near_documents else "not asked for (--near-documents 0)"
    if reason and request.near_documents:
        report.warn(f"near duplicates are not counted: {reason}")
    tally = Tally(tokenizer, found, 0 if reason else request.near_documents, test)
    sampled = read(source, tally, request.sample_bytes)
    seconds = time.monotonic() - started
    return conclude(source, tokenizer, path, request, tally, (found, why_not, reason), sampled, seconds)


def conclude(
    source: Source,
    tokenizer: Tokenizer,
    path: str,
    request: Request,
    tally: Tally,
    near: tuple[Division | None, str, str],
    sampled: str,
    seconds: float,
) -> Stats:
    found, why_not, reason = near
    lengths = np.frombuffer(tally.lengths, np.int64) + 1
    tokens = int(lengths.sum()) - len(lengths)
    duplicates = find_duplicates(tally, reason)
    with report.phase("padding of each strategy", unit="documents") as p:
        wasted = padding(lengths, request.seq_len, request.batch_size)
        p.tick(len(lengths))
    longest, shortest = extremes(tally, lengths)
    dirt = getattr(source, "dirt", None) or getattr(getattr(source, "source", None), "dirt", None)
    return Stats(
        format=FORMAT,
        source=str(source),
        kind="text",
        template="",
        tokenizer=str(tokenizer),
        tokenizer_path=path,
        sampled=sampled,
        seconds=round(seconds, 3),
        bytes_per_second=round(tally.bytes / max(1e-6, seconds)),
        tokens_per_second=round(tokens / max(1e-6, tally.encode_s)),
        counts=Counts(
            documents=len(lengths),
            characters=tally.characters,
            bytes=tally.bytes,
            tokens=tokens,
            tokens_with_ends=tokens + len(lengths),
            bytes_per_token=tally.bytes / max(1, tokens),
            empty_documents=tally.empty,
            set_aside_lines=len(dirt.known) if dirt else 0,
            set_aside_reasons=dict(dirt.reasons) if dirt else {},
            used_tokens=int(tally.used.sum()),
        ),
        lengths=spread(lengths),
        histogram=bars(lengths),
        longest=longest,
        shortest=shortest,
        seq_len=request.seq_len,
        batch_size=request.batch_size,
        window=window(lengths, request.seq_len),
        windows=windows(lengths, request.seq_len),
        padding=wasted,
        duplicates=duplicates,
        sides=compare_sides(tally, found, why_not, reason),
        test_set=compare_test(tally, tally.test, reason) if tally.test else None,
        quality=None,
        advice=advise(lengths, request.seq_len, request.batch_size, examples=False),
    )
