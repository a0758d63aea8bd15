"""JSON: an object on each line, or one array of objects; each record with its place and the cursor after it.

In:  an OpenFile.
Out: Records in order. Memory holds one line or one element, not the file.
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
from lamplighter.readers.records import OpenFile, Record, check_text, fault_in, not_text, text_of

ELEMENT_CHARS = 1 << 28  # one element of an array is held whole, as one JSON line is
_HEAD_BYTES = 1 << 16  # looked at to tell an array from lines
_SPACE = re.compile(r"[ \t\r\n]*")
_OBJECT_ON_A_LINE_OF_ITS_OWN = re.compile(rb"[^\s,:\[{]\s*\n\s*\{")  # without a comma before it: in no JSON value
_DECODER = json.JSONDecoder()


def read_json(file: OpenFile) -> Iterator[Record]:
    """The objects of a file; in a .json file, an array is told from lines by its beginning."""
    if "row" in file.start:
        return _array(file, file.blocks(file.at))
    blocks = file.blocks(file.at)
    if file.at == 0 and suffix_of(file.name) == ".json":
        head, blocks = _peek(blocks)
        if _begins_array(head):
            return _array(file, blocks)
    return _json_lines(file, blocks)


def starts_array(path: Path) -> bool:
    """Whether a local file is one array, not lines."""
    if suffix_of(path) != ".json":
        return False
    with open(path, "rb") as file:
        return _begins_array(_peek(iter(lambda: file.read(4096), b""))[0])


def _begins_array(head: bytes) -> bool:
    """Whether it begins with a bracket, and not because that is where the first of many lines was torn."""
    head = head.removeprefix(codecs.BOM_UTF8).lstrip()[:_HEAD_BYTES]
    if not head.startswith(b"["):
        return False
    return head.partition(b"\n")[0].strip() == b"[" or not _OBJECT_ON_A_LINE_OF_ITS_OWN.search(head)


def _peek(blocks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    seen: list[bytes] = []
    for block in blocks:
        seen.append(block)
        if block.removeprefix(codecs.BOM_UTF8).strip() and sum(map(len, seen)) >= _HEAD_BYTES:
            break
    return b"".join(seen), chain(seen, blocks)


def _json_lines(file: OpenFile, blocks: Iterator[bytes]) -> Iterator[Record]:
    number, size = file.line, 0
    for number, at, line, size in lines_of(blocks, file.at, file.line, file.longest):
        if not line or line.isspace():
            continue
        ends = size > len(line)
        try:
            if size > len(line) + 1:
                why = f"a line of {size:,} bytes; the limit is {file.longest:,}"
                raise BadData(f"too long: {file.name}:{number}, byte {at:,}", why, "cut it, or raise the limit")
            value = _json_value(line, file.name, number, at)
        except BadData as error:
            file.bad.set_aside(number, at, error)
            continue
        yield Record(value, number, at, file.cursor(at, number), file.cursor(at + size, number + ends))
    file.bad.end(number if size else number - 1)  # behind the last newline there is no line


def lines_of(
    blocks: Iterator[bytes], at: int, number: int, longest: int | None = None
) -> Iterator[tuple[int, int, bytes, int]]:
    """(number, byte offset, line, its size with the newline); a line is joined once, however long.

    Of one that is longer than `longest` the beginning is kept alone, so its size tells it from a whole one.
    """
    parts, size = [b""], 0
    for block in blocks:
        first, *others = block.split(b"\n")
        if longest is None or size <= longest:
            parts.append(first)
        size += len(first)
        for other in others:
            yield number, at, _whole_line(parts, size, longest), size + 1
            number, at, parts, size = number + 1, at + size + 1, [other], len(other)
    if longest is not None and size > longest:
        yield number, at, b"".join(parts)[:longest], size + 2  # as no newline ends it
    else:
        yield number, at, b"".join(parts), size


def _whole_line(parts: list[bytes], size: int, longest: int | None) -> bytes:
    line = b"".join(parts)
    return line if longest is None or size <= longest else line[:longest]


def _json_value(raw: bytes, name: str | Path, number: int, at: int) -> Any:
    """The value on one line; `number` and `at` are its place, for the error."""
    try:
        line = raw.decode()
        return json.loads(line.removeprefix("\ufeff") if number == 1 else line)
    except UnicodeDecodeError:
        raise _bad_bytes(raw, name, number, at) from None
    except (ValueError, RecursionError) as error:
        if b"\0" in raw:
            raise _bad_bytes(raw, name, number, at) from None
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        if number == 1 and raw.strip() in (b"{", b"["):
            why += "; wanted: an object on each line, or one array of objects in a file that ends in .json"
        raise BadData(f"bad JSON: {name}:{number}, byte {at:,}", why, "mend or remove the line") from error


def json_text(raw: bytes, name: str | Path, number: int, at: int, key: str) -> str:
    """The text under a key of the object on one line."""
    where = f"{name}:{number}, byte {at:,}"
    text = text_of(_json_value(raw, name, number, at), key, where)
    check_text(text, where, nul_is_text=True)
    return text


def _bad_bytes(raw: bytes, name: str | Path, number: int, at: int) -> BadData:
    fault = fault_in(raw) or (0, "not text")
    return not_text(name, number, at + fault[0], fault[1], raw)


# ---------------------------------------------------------------- one JSON array


def _array(file: OpenFile, blocks: Iterator[bytes]) -> Iterator[Record]:
    """The elements of one array, each decoded as soon as it is whole: memory holds one element, not the file."""
    row = int(file.start.get("row", 0))
    elements = _Elements(file, blocks)
    for value in elements.values(row):
        row += 1
        before = file.cursor(elements.before_comma, elements.line_comma) | {"row": row - 1}
        after = file.cursor(elements.at, elements.line) | {"row": row}
        yield Record(value, elements.line_before, elements.before, before, after)
    file.bad.end(row)


class _Elements:
    """The elements of a JSON array out of a stream of bytes, with the place of each."""

    def __init__(self, file: OpenFile, blocks: Iterator[bytes]) -> None:
        self.file, self.blocks = file, blocks
        self.decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")  # a bad byte spoils one element only
        self.text, self.index, self.ended = "", 0, False
        self.at, self.line = file.at, file.line  # of self.index
        self.before = self.before_comma = self.at
        self.line_before = self.line_comma = self.line

    def values(self, row: int) -> Iterator[Any]:
        """Every element; after it `at` and `line` are behind it, `before` and `line_before` in front."""
        first = row == 0
        if "row" not in self.file.start:
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
                    f"cut short: {self.file.name}",
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
        what = f"bad JSON: {self.file.name}:{self.line}, byte {self.at:,}"
        return BadData(
            what, f"{why}; the file is one JSON array", "mend the file; JSON lines (.jsonl) lose only a line"
        )
