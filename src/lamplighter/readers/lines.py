"""JSON: an object on each line, or one array of objects; each text with the place after it.

In:  a Reading.
Out: (text, place) in order. Memory holds one line or one element, not the file.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from lamplighter.errors import BadData
from lamplighter.readers.local import suffix_of
from lamplighter.readers.reader import Found, Reading, fault_in, in_parts, is_whole, not_text, text_of

ELEMENT_CHARS = 1 << 28  # one element of an array is held whole, as one JSON line is
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def read_json(r: Reading) -> Found:
    """The texts under a key; in a .json file, an array is told from lines by its first character."""
    if "row" in r.start:
        return _array(r, r.blocks(r.at))
    blocks = r.blocks(r.at)
    if r.at == 0 and suffix_of(r.name) == ".json":
        head, blocks = _peek(blocks)
        if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            return _array(r, blocks)
    return _json_lines(r, blocks)


def starts_array(path: Path) -> bool:
    """Whether a local file is one array, not lines."""
    if suffix_of(path) != ".json":
        return False
    with open(path, "rb") as file:
        head, _ = _peek(iter(lambda: file.read(4096), b""))
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _peek(blocks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    seen: list[bytes] = []
    for block in blocks:
        seen.append(block)
        if block.removeprefix(codecs.BOM_UTF8).strip() and sum(map(len, seen)) > 3:
            break
    return b"".join(seen), chain(seen, blocks)


def _json_lines(r: Reading, blocks: Iterator[bytes]) -> Found:
    number, skipped = r.line, int(r.start.get("part", 0))
    for number, at, line, ends in _lines(blocks, r.at, r.line):
        if not line or line.isspace():
            continue
        try:
            text = json_text(line, r.name, number, at, r.key)
        except BadData as error:
            r.dirt.set_aside(number, at, error)
            continue
        after = r.place(at + len(line) + ends, number + ends)
        if len(text) > 2 * r.part_chars:
            yield from in_parts(text, r.part_chars, skipped, r.place(at, number), after)
        elif text:
            yield text, after
        skipped = 0
    r.dirt.end(number)


def _lines(blocks: Iterator[bytes], at: int, number: int) -> Iterator[tuple[int, int, bytes, int]]:
    """(number, byte offset, line, 1 where a newline ends it); a line is joined once, however long."""
    parts = [b""]
    for block in blocks:
        first, *others = block.split(b"\n")
        parts.append(first)
        for other in others:
            line = b"".join(parts)
            yield number, at, line, 1
            number, at, parts = number + 1, at + len(line) + 1, [other]
    yield number, at, b"".join(parts), 0


def json_text(raw: bytes, name: str | Path, number: int, at: int, key: str) -> str:
    """The text of one line; `number` and `at` are its place, for the error."""
    try:
        line = raw.decode()
        record = json.loads(line.removeprefix("\ufeff") if number == 1 else line)
    except UnicodeDecodeError:
        raise _bad_bytes(raw, name, number, at) from None
    except (ValueError, RecursionError) as error:
        if b"\0" in raw:
            raise _bad_bytes(raw, name, number, at) from None
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        if number == 1 and raw.strip() in (b"{", b"["):
            why += "; wanted: an object on each line, or one array of objects in a file that ends in .json"
        raise BadData(f"bad JSON: {name}:{number}, byte {at:,}", why, "mend or remove the line") from error
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        text = text_of(record, key, f"{name}:{number}, byte {at:,}")
    if not text.isascii() and not is_whole(text):
        raise _half_pair(f"{name}:{number}, byte {at:,}")
    return text


def _bad_bytes(raw: bytes, name: str | Path, number: int, at: int) -> BadData:
    fault = fault_in(raw) or (0, "not text")
    return not_text(name, number, at + fault[0], fault[1], raw)


def _half_pair(where: str) -> BadData:
    return BadData(f"not text: {where}", "half of a surrogate pair in a \\u escape", "mend or remove the line")


# ---------------------------------------------------------------- one JSON array


def _array(r: Reading, blocks: Iterator[bytes]) -> Found:
    """The elements of one array, each decoded as soon as it is whole: memory holds one element, not the file."""
    row, skipped = int(r.start.get("row", 0)), int(r.start.get("part", 0))
    elements = _Elements(r, blocks)
    for record in elements.records(row):
        row += 1
        where = f"{r.name}:{elements.line_before}, byte {elements.before:,}"
        before = r.place(elements.before_comma, elements.line_comma) | {"row": row - 1}
        try:
            text = text_of(record, r.key, where)
            if not is_whole(text):
                why = "bytes that are not UTF-8, or half of a surrogate pair"
                raise BadData(f"not text: {where}", why, "mend or remove the element")
        except BadData as error:
            r.dirt.set_aside(elements.line_before, elements.before, error, row)
            continue
        after = r.place(elements.at, elements.line) | {"row": row}
        yield from in_parts(text, r.part_chars, skipped, before, after)
        skipped = 0
    r.dirt.end(row)


class _Elements:
    """The elements of a JSON array out of a stream of bytes, with the place of each."""

    def __init__(self, r: Reading, blocks: Iterator[bytes]) -> None:
        self.r, self.blocks = r, blocks
        self.decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")  # a bad byte spoils one element only
        self.text, self.index, self.ended = "", 0, False
        self.at, self.line = r.at, r.line  # of self.index
        self.before = self.before_comma = self.at
        self.line_before = self.line_comma = self.line

    def records(self, row: int) -> Iterator[Any]:
        """Every element; after it `at` and `line` are behind it, `before` and `line_before` in front."""
        first = row == 0
        if "row" not in self.r.start:
            if self._next_character() == "\ufeff":
                self._move(self.index + 1)
            self._next_character()
            self._move(self.index + 1)
        while True:
            self.before_comma, self.line_comma = self.at, self.line
            found = self._next_character()
            if found == "," and not first:
                self._move(self.index + 1)
                found = self._next_character()
            elif found != "]" and not first:
                raise self._bad(f"expected a comma or the end of the array, found {found!r}")
            if found == "]":
                return self._end()
            self.before, self.line_before = self.at, self.line
            yield self._decode()
            first = False

    def _end(self) -> None:
        self._move(self.index + 1)
        if self._next_character(at_end=True):
            raise self._bad("something stands behind the end of the array")

    def _next_character(self, at_end: bool = False) -> str:
        """The next one that is no space; its place becomes ours."""
        while True:
            if (end := _SPACE.match(self.text, self.index).end()) < len(self.text):  # type: ignore[union-attr]
                self._move(end)
                return self.text[end]
            self._move(end)
            if not self._more():
                if at_end:
                    return ""
                raise BadData(
                    f"cut short: {self.r.name}",
                    f"the JSON array does not end (line {self.line}, byte {self.at:,})",
                    "fetch or write the file again",
                )

    def _decode(self) -> Any:
        """One element; more is read, twice as much each time, while it may only be incomplete."""
        while True:
            try:
                record, end = _DECODER.raw_decode(self.text, self.index)
            except RecursionError as error:
                raise self._bad("nested too deeply") from error
            except ValueError as error:
                at = getattr(error, "pos", 0)
                incomplete = at >= len(self.text) - 12 or str(error).startswith("Unterminated string")
                if not incomplete or not self._more():
                    raise self._bad(str(error)) from error
                continue
            if end == len(self.text) and self._more():  # a number may go on
                continue
            self._move(end)
            return record

    def _more(self) -> bool:
        """At least as many characters again as are held."""
        kept = self.text[self.index :]
        if len(kept) > ELEMENT_CHARS:
            raise self._bad(f"one element has over {ELEMENT_CHARS:,} characters")
        wanted, pieces, size = max(1, len(kept)), [kept], 0
        while size < wanted and not self.ended:
            block = next(self.blocks, None)
            self.ended = block is None
            pieces.append(self.decoder.decode(block or b"", final=self.ended))
            size += len(pieces[-1])
        self.text, self.index = "".join(pieces), 0
        return size > 0

    def _move(self, index: int) -> None:
        passed = self.text[self.index : index]
        self.at += len(passed) if passed.isascii() else len(passed.encode("utf-8", "surrogateescape"))
        self.line += passed.count("\n")
        self.index = index

    def _bad(self, why: str) -> BadData:
        what = f"bad JSON: {self.r.name}:{self.line}, byte {self.at:,}"
        return BadData(
            what, f"{why}; the file is one JSON array", "mend the file; JSON lines (.jsonl) lose only a line"
        )
