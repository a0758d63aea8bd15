"""Which text is trained on and which is held back for validation: by hash, so equal texts are never on both sides.

In:  blocks of documents, and what share of them to hold back.
Out: pieces of text, each with its side; whole documents where there are enough of them, else runs of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from lamplighter.data.sources import Part, Source, watched
from lamplighter.errors import BadConfig, BadData
from lamplighter.readers.ranges import TextBlock, cut_all
from lamplighter.rundir import human_bytes

LOOK_DOCUMENTS = 100  # with fewer, single blocks of text are divided between training and validation
LOOK_BYTES = 1 << 30
_SAMPLE_BYTES = 1 << 22
BLOCK_BYTES = 2000
MB = 1_000_000

_Bools = np.ndarray[Any, np.dtype[np.bool_]]
_Hashes = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class CacheSettings:
    """What, besides texts and tokenizer, decides the bytes of a cache."""

    val_fraction: float = 0.01
    seed: int = 0
    unit_bytes: int = 0
    """Text of one unit of work, which is a shard of each side; 0: by the size of the corpus."""

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise BadConfig(
                f"data.val_fraction is {self.val_fraction}", "it must be 0 or more, and below 1", "try 0.01"
            )
        if self.unit_bytes < 0:
            raise BadConfig(f"unit_bytes is {self.unit_bytes}", "a unit holds at least one byte", "")


@dataclass(frozen=True)
class Split:
    """A text's side is decided by its hash alone, so equal texts are never on both sides."""

    by: str
    """"documents", or "blocks" of some 2,000 bytes where there are too few documents."""
    below: int
    """Hashes below this are for validation."""
    seed: int
    always_val: int | None = None
    always_train: int | None = None

    def hashes(self, texts: list[bytes]) -> _Hashes:
        seed = self.seed & (1 << 64) - 1
        return np.array([xxh3_64_intdigest(text, seed) for text in texts], np.uint64)

    def is_val(self, hashes: _Hashes) -> _Bools:
        """True for those that are held back."""
        val = hashes < np.uint64(self.below)
        if self.always_val is not None:
            val |= hashes == np.uint64(self.always_val)
        if self.always_train is not None:
            val &= hashes != np.uint64(self.always_train)
        return val

    def block_hashes(self, text: bytes) -> tuple[list[int], _Hashes]:
        """Where the blocks of a text end, and their hashes."""
        ends = cut_all(text, BLOCK_BYTES)
        view, seed, begin = memoryview(text), self.seed & (1 << 64) - 1, 0
        hashes = []
        for end in ends:
            hashes.append(xxh3_64_intdigest(view[begin:end], seed))
            begin = end
        return ends, np.array(hashes, np.uint64)


# ---------------------------------------------------------------- the first look


@dataclass
class Extremes:
    """The least and the greatest hash of what was looked at."""

    least: int = 1 << 64
    greatest: int = -1

    def add(self, hashes: _Hashes) -> None:
        if len(hashes):
            self.least = min(self.least, int(hashes.min()))
            self.greatest = max(self.greatest, int(hashes.max()))


@dataclass
class Survey:
    """What the first documents tell."""

    plain: Split
    documents: int = 0
    text_bytes: int = 0
    ended: bool = False
    sample: list[bytes] = field(default_factory=list)
    by_document: Extremes = field(default_factory=Extremes)
    by_block: Extremes = field(default_factory=Extremes)

    def add(self, text_block: TextBlock) -> None:
        begun = [doc for doc in text_block.docs[text_block.opened :] if doc]
        self.by_document.add(self.plain.hashes(begun))
        if self.text_bytes < _SAMPLE_BYTES or self.by_block.least == self.by_block.greatest:
            for doc in filter(None, text_block.docs):
                self.by_block.add(self.plain.block_hashes(doc)[1])
        if self.text_bytes < _SAMPLE_BYTES:
            self.sample += text_block.docs
        self.text_bytes += sum(map(len, text_block.docs))
        self.documents += len(begun)

    def has_sample(self) -> bool:
        return self.text_bytes >= _SAMPLE_BYTES and self.by_block.least < self.by_block.greatest

    def is_enough(self) -> bool:
        return self.text_bytes >= LOOK_BYTES or (self.documents >= LOOK_DOCUMENTS and self.has_sample())


def begin_survey(settings: CacheSettings) -> Survey:
    """An empty look."""
    return Survey(Split("documents", int(settings.val_fraction * 2**64), settings.seed))


def survey_texts(source: Source, found: Survey, show: Callable[[int, str], None]) -> Iterator[TextBlock]:
    """Each text of a source, after it was looked at; the asker stops when it has seen enough."""
    opened = False
    for text in watched(source, show):
        block = TextBlock([text.encode()], opened, isinstance(text, Part))
        opened = block.open
        found.add(block)
        yield block


def decide(found: Survey, settings: CacheSettings, source: object) -> Split:
    """By documents, if there are enough of them; neither side may come out empty."""
    by = "documents" if found.documents >= LOOK_DOCUMENTS else "blocks"
    hashes = found.by_document if by == "documents" else found.by_block
    if not found.text_bytes:
        advice = "check data.paths, data.separator and data.text_key"
        raise BadData(f"no text in {source}", "every document is empty", advice)
    if not settings.val_fraction:
        return Split(by, 0, settings.seed)
    if hashes.least == hashes.greatest:
        raise BadData(
            "too little text to hold some back for validation",
            f"{source} has one piece of text of its own, of {human_bytes(found.text_bytes)}",
            "add text, or train without validation: --data.val_fraction 0",
        )
    below = found.plain.below
    return Split(
        by,
        below,
        settings.seed,
        always_val=hashes.least if hashes.least >= below else None,
        always_train=hashes.greatest if hashes.greatest < below else None,
    )


# ---------------------------------------------------------------- pieces


@dataclass(frozen=True)
class Pieces:
    """Stretches of text that go to one side as they are."""

    texts: list[bytes]
    val: _Bools
    begins: _Bools
    ends: _Bools
    hashes: _Hashes
    hashes_val: _Bools


_NO = np.zeros(0, bool)
_NO_PIECES = Pieces([], _NO, _NO, ends=_NO, hashes=np.zeros(0, np.uint64), hashes_val=_NO)


class Splitter:
    """Stretches in, pieces out. Between blocks it remembers only the side whose document has not ended."""

    def __init__(self, division: Split, open_val: bool | None = None) -> None:
        self.division, self.open_val = division, open_val
        self.empty = 0

    def pieces(self, text_block: TextBlock) -> Pieces:
        docs, open_end = text_block.docs, text_block.open
        if open_end and not docs[-1]:  # nothing of it yet
            docs, open_end = docs[:-1], False
            if not docs:
                return _NO_PIECES
        going_on = text_block.opened and self.open_val is not None
        if not all(docs):  # an empty text has no side; one that ends an open document has
            kept = [doc for number, doc in enumerate(docs) if doc or (going_on and not number)]
            self.empty += len(docs) - len(kept)
            docs = kept
        if not docs:
            return _NO_PIECES
        divide = self._by_blocks if self.division.by == "blocks" else self._by_documents
        return divide(docs, going_on, open_end)

    def _by_documents(self, docs: list[bytes], going_on: bool, open_end: bool) -> Pieces:
        """A document of several parts goes where its first part says."""
        begun = docs[1:] if going_on else docs
        hashes = self.division.hashes(begun)
        hashes_val = self.division.is_val(hashes)
        val = np.concatenate([[self.open_val], hashes_val]).astype(bool) if going_on else hashes_val
        begins, ends = np.ones(len(docs), bool), np.ones(len(docs), bool)
        begins[0], ends[-1] = not going_on, not open_end
        self.open_val = bool(val[-1]) if open_end else None
        return Pieces(docs, val, begins, ends=ends, hashes=hashes, hashes_val=hashes_val)

    def _by_blocks(self, docs: list[bytes], going_on: bool, open_end: bool) -> Pieces:
        """Neighbouring blocks of one side stay together; where the side changes, the run ends."""
        texts: list[bytes] = []
        val: list[bool] = []
        begins: list[bool] = []
        ends: list[bool] = []
        hashes, sides = [np.zeros(0, np.uint64)], [np.zeros(0, bool)]
        now = self.open_val if going_on else None
        for number, doc in enumerate(docs):
            cuts, of_blocks = self.division.block_hashes(doc) if doc else ([], hashes[0])
            is_val = self.division.is_val(of_blocks)
            hashes.append(of_blocks)
            sides.append(is_val)
            turns = np.flatnonzero(is_val[1:] != is_val[:-1]).tolist()
            bounds = [0, *(cuts[turn] for turn in turns), len(doc)]
            of_runs = [bool(is_val[turn]) for turn in (*turns, -1)] if doc else [bool(now)]
            if now is not None and of_runs[0] != now:  # the run of the part before ends here
                bounds, of_runs = [0, *bounds], [now, *of_runs]
            for run, side in enumerate(of_runs):
                texts.append(doc[bounds[run] : bounds[run + 1]])
                val.append(side)
                begins.append(run > 0 or now is None)
                ends.append(True)
            ends[-1] = not (open_end and number == len(docs) - 1)
            now = None if ends[-1] else of_runs[-1]
        self.open_val = now
        return Pieces(
            texts,
            np.array(val, bool),
            np.array(begins, bool),
            ends=np.array(ends, bool),
            hashes=np.concatenate(hashes),
            hashes_val=np.concatenate(sides),
        )
