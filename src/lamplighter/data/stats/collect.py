"""Documents are counted as they pass: tokens, hashes, signatures, places.

In:  a source, a tokenizer, the division that training would make.
Out: a Tally, filled: 24 bytes a document (length, hash, line) and a bounded sample of signatures, however large the text.
"""

from __future__ import annotations

import heapq
import re
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from lamplighter import report
from lamplighter.data.sampling import Quota
from lamplighter.data.sources import Position, Source, watched
from lamplighter.data.split import CacheSettings, Split, begin_survey, decide, survey_texts
from lamplighter.data.stats.minhash import MOST_BYTES, Signer, new_hash, normalised
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import BadData
from lamplighter.readers.records import Part
from lamplighter.rundir import human_bytes

SHOWN = 5
HEAD_CHARS = 80
NOTHING_HELD = "data.val_fraction is 0: nothing is held back"
_WITH_LINE = re.compile(r"(.+):(\d+)")
_HEADS = 50_000  # documents whose first words are kept, to show


def find_split(source: Source, val_fraction: float) -> tuple[Split | None, str]:
    """The division that `lamp train` would make, or why there is none."""
    if not val_fraction:
        return None, NOTHING_HELD
    settings = CacheSettings(val_fraction)
    seen = begin_survey(settings)
    with report.phase("look at the documents", unit="documents") as p:
        for _ in survey_texts(source, seen, lambda _, item: p.set(seen.documents, item)):
            if seen.is_enough():
                break
    try:
        return decide(seen, settings, source), ""
    except BadData as error:
        return None, would_refuse(error)


def would_refuse(error: BadData) -> str:
    return f"lamp train would refuse: {error.what} ({error.why})"


def _side(is_val: bool) -> str:
    return "val" if is_val else "train"


def _blocks(division: Split, text: str) -> Iterator[tuple[str, str]]:
    """(side, block) of each block of a text."""
    data = text.encode()
    ends, hashes = division.block_hashes(data)
    for begin, end, val in zip([0, *ends], ends, division.is_val(hashes).tolist(), strict=False):
        yield _side(val), data[begin:end].decode()


# ---------------------------------------------------------------- where a document stands


def line_of(before: Position, after: Position) -> int:
    """The line (or the row) that a text begins on, by the cursors around it; 0 where the source does not count them."""
    old, new = (cursor.get("inner", cursor) for cursor in (before.cursor, after.cursor))
    if not isinstance(old, dict) or not isinstance(new, dict) or "line" not in new:
        return int(new.get("row", 0)) if isinstance(new, dict) else 0
    kind = Path(after.item.removesuffix(".gz").removesuffix(".zst")).suffix
    fresh = old.get("file", 0) != new.get("file", 0) or "line" not in old
    begin = int(old.get("line", 1)) if not fresh else 2 if kind in (".csv", ".tsv") else 1
    if kind == ".json" and "row" in new:  # an array: the comma of the element before is on the line before
        return begin + (int(new["line"]) > begin)
    if "part" in new or kind not in (".jsonl", ".ndjson"):
        return begin
    return max(begin, int(new["line"]) - 1)  # a text is one line; lines set aside may come before it


class Places:
    """The place of each document by its number: file and line where the source says them, else a number."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._begins: list[int] = []
        self._lines = array("I")

    def add(self, item: str, line: int = 0) -> None:
        name = item.partition(" of ")[2] if item.startswith("document ") else item
        name = "" if name.isdecimal() else name  # document 5 of 2000: it has no name
        if not line and (found := _WITH_LINE.fullmatch(name)):
            name, line = found[1], int(found[2])
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
        if not self._names[at]:
            return f"document {number + 1}"
        if last - self._begins[at] == 1:
            return self._names[at]
        return f"{self._names[at]}, document {number - self._begins[at] + 1}"


# ---------------------------------------------------------------- counting


class Tally:
    """Counts documents as they pass, each in one part or several."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        divide: Split | None,
        near_documents: int,
        meet: Callable[[str], None] | None = None,
    ) -> None:
        self.tokenizer, self.divide, self.meet = tokenizer, divide, meet
        self.places, self.lengths, self.hashes = Places(), array("q"), array("Q")
        self.characters = self.bytes = self.empty = 0
        self.encode_s = 0.0
        self.used = np.zeros(tokenizer.vocab_size if tokenizer else 0, np.bool_)
        self._encode_bytes = tokenizer.batch_bytes if tokenizer else 0
        self.signers = {"train": Signer(near_documents), "val": Signer(near_documents // 2)}
        self.blocks = {"train": Signer(near_documents), "val": Signer(near_documents // 2)}
        self.sides = {"train": 0, "val": 0}
        self.learned: int | None = None
        self._heads: list[str] = []
        self._extreme: dict[str, list[tuple[int, int, str]]] = {"longest": [], "shortest": []}
        self._head: str | None = None
        self._normal = ""
        self._hash = new_hash()
        self._size = 0
        self._side = "train"
        self._batch: list[tuple[int, str]] = []
        self._batch_bytes = 0

    def add(self, text: str, item: str, line: int = 0) -> None:
        """One text; a Part is not the end of its document."""
        ends = not isinstance(text, Part)
        begins = self._head is None
        size = len(text) if text.isascii() else len(text.encode())
        if begins:
            if not text and ends:
                self.empty += 1
                return
            self.places.add(item, line)
            self.lengths.append(0)
            self._side = self._divide(text)
            self._head = text[:HEAD_CHARS]
        self.characters += len(text)
        self.bytes += size
        self._size += size
        self._normalise(text)
        self._count_blocks(text)
        self._batch.append((len(self.places) - 1, str(text)))
        self._batch_bytes += size
        if self._batch_bytes >= self._encode_bytes:
            self.encode()
        if ends:
            self._end()

    def add_counted(self, text: str, item: str, tokens: int) -> None:
        """A whole document whose tokens are counted already."""
        self.places.add(item)
        self.lengths.append(tokens)
        size = len(text) if text.isascii() else len(text.encode())
        self.characters += len(text)
        self.bytes += size
        self._head, self._size, self._side = text[:HEAD_CHARS], size, "train"
        self._normalise(text)
        self._end()

    def _normalise(self, text: str) -> None:
        """Into the hash of the document, and its beginning for the signature; a long document is never held whole."""
        normal = normalised(text)
        self._hash.update((f" {normal}" if self._normal else normal).encode())
        if len(self._normal) < MOST_BYTES:
            self._normal = f"{self._normal} {normal[:MOST_BYTES]}" if self._normal else normal[:MOST_BYTES]
        if self.meet is not None:
            self.meet(normal)

    def add_hashed(self, item: str, data: bytes, tokens: int) -> None:
        """A document of which only the ids are known."""
        self.places.add(item)
        self.lengths.append(tokens)
        found = new_hash()
        found.update(data)
        self.hashes.append(int.from_bytes(found.digest(), "little"))

    def _divide(self, text: str) -> str:
        """Where `lamp train` would put the document: by the hash of its first part."""
        if self.divide is None or self.divide.by != "documents":
            return "train"
        side = _side(bool(self.divide.is_val(self.divide.hashes([text.encode()]))[0]))
        self.sides[side] += 1
        return side

    def _count_blocks(self, text: str) -> None:
        if self.divide is None or self.divide.by != "blocks":
            return
        for side, block in _blocks(self.divide, text):
            self.sides[side] += 1
            self.blocks[side].offer(sum(self.sides.values()), normalised(block))

    def _end(self) -> None:
        number, head = len(self.places) - 1, self._head or ""
        self.hashes.append(int.from_bytes(self._hash.digest(), "little"))
        self.signers[self._side].offer(number, self._normal)
        if number < _HEADS:
            self._heads.append(head)
        for name, key in (("longest", self._size), ("shortest", -self._size)) if number >= _HEADS else ():
            heapq.heappush(self._extreme[name], (key, -number, head))
            if len(self._extreme[name]) > 4 * SHOWN:
                heapq.heappop(self._extreme[name])
        self._head, self._normal, self._hash, self._size = None, "", new_hash(), 0

    def encode(self) -> None:
        """Count the tokens of what waits."""
        if not self._batch or self.tokenizer is None:
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
        if self._head is not None:
            self._end()
        self.encode()

    def head_of(self, number: int) -> str:
        if number < len(self._heads):
            return self._heads[number]
        return next((head for heap in self._extreme.values() for _, n, head in heap if -n == number), "")


def read(source: Source, tally: Tally, sample_bytes: int | None) -> str:
    """Every text of the source, or of a sample of whole documents; says how much of what, '' for all."""
    total = source.total_bytes()
    quota = Quota(total, sample_bytes) if sample_bytes else None
    before, wanted, begins, ended = 0, True, True, True
    left_out = 0
    with report.phase("count", total=quota.end if quota else total, unit="B") as p:
        begun = source.position()
        for text in watched(source, lambda done, item: p.set(done, item)):
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
