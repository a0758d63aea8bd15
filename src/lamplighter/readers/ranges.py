"""Ranges of local files as bytes of text: what a worker reads of its unit, the same documents as a reading from the start finds.

In:  a Span: a file, or a range of bytes of it that was wanted without looking (units.py).
Out: blocks of about a megabyte, documents as bytes; lines that are not text, listed for the one who decides.

A wanted range is moved to where documents may be parted: a line's end (JSON lines), a separator, or a good place inside
a text that is one long document. Neighbours move their common border to the same place, which depends on the bytes around
it alone, so nothing is lost or doubled. A cut after a word and before its space leaves each half with the tokens that it
had in the whole, for the usual patterns of pre-tokens.
"""

from __future__ import annotations

import codecs
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lamplighter.errors import BadData
from lamplighter.readers.bad_records import BadInFile, BadInReading, BadRecords
from lamplighter.readers.files import TextFormat, read_texts
from lamplighter.readers.lines import json_text
from lamplighter.readers.local import LocalFile, unreadable
from lamplighter.readers.records import Part, fault_in, not_text
from lamplighter.readers.text import count_newlines, whole_lines

NEAR = 1 << 16  # so far ahead a good place is looked for
LINE_BYTES = 1 << 20  # a longer line is judged in pieces

_PLACES = (
    re.compile(rb"[0-9A-Za-z](?=[ \t\r\n])"),
    re.compile(rb"[\x80-\xff](?=[ \t\r\n])"),
    re.compile(rb"[^ \t\r\n](?=[ \t\r\n])"),
)
_WORD_ENDS = _PLACES[0]


def _cut_after(data: bytes, at: int, size: int) -> int:
    """The first good place from `at + size` on, at the latest some `size` bytes further; for over twice `size`."""
    if found := _WORD_ENDS.search(data, at + size, at + 2 * size):
        return found.end()
    for pattern in _PLACES[1:]:
        if found := pattern.search(data, at + size, at + 2 * size):
            return found.end()
    end = at + 2 * size
    while end > at + 1 and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def cut_all(data: bytes, size: int) -> list[int]:
    """Where the pieces of a text end, the last one at its end."""
    ends, at, last = [], 0, len(data) - 2 * size
    search = _WORD_ENDS.search
    while at < last:
        found = search(data, at + size, at + 2 * size)
        at = found.end() if found else _cut_after(data, at, size)
        ends.append(at)
    if at < len(data) or not ends:
        ends.append(len(data))
    return ends


# ---------------------------------------------------------------- in a file


class RangeFile:
    """A file that is read at any place; one that changes meanwhile is an error."""

    def __init__(self, file: LocalFile) -> None:
        self.file, self.path, self.size = file, file.path, file.size
        try:
            self.fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(file.path, error) from error
        self._lines = (0, 1)  # a place, and the number of its line

    def __enter__(self) -> RangeFile:
        try:
            self.file.check(self.fd, "since this command began")
        except BaseException:
            os.close(self.fd)
            raise
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        try:
            if failed is None:
                self.file.check(self.fd, "while it was read")
        finally:
            os.close(self.fd)

    def read(self, start: int, stop: int) -> bytes:
        stop = min(stop, self.size)
        try:
            data = os.pread(self.fd, max(0, stop - start), start)
            while len(data) < stop - start and (more := os.pread(self.fd, stop - start - len(data), start + len(data))):
                data += more
        except OSError as error:
            raise unreadable(self.path, error) from error
        if len(data) < stop - start:
            why = f"it had {self.size:,} bytes when it was found, now {start + len(data):,}"
            raise BadData(f"changed while it was read: {self.path}", why, "start again when nobody writes to it")
        return data

    def count_lines(self, data: bytes, at: int) -> int:
        """How many lines end in these bytes; the last one of the file may have no newline."""
        return count_newlines(data) + (at + len(data) == self.size and not data.endswith(b"\n"))

    def line_at(self, at: int) -> int:
        """The number of the line that holds a byte; counted only where somebody must be told."""
        place, line = self._lines if self._lines[0] <= at else (0, 1)
        while place < at:
            block = self.read(place, min(at, place + LINE_BYTES))
            place, line = place + len(block), line + block.count(b"\n")
        self._lines = (place, line)
        return line

    def next_line(self, at: int) -> int:
        """Where the line after the one of byte `at` begins."""
        while at < self.size:
            block = self.read(at, at + NEAR)
            if (found := block.find(b"\n")) >= 0:
                return at + found + 1
            at += len(block)
        return self.size

    def line_start(self, at: int) -> int:
        """Where the line of byte `at` begins; a megabyte back at most."""
        back = at
        while back > max(0, at - LINE_BYTES):
            block = self.read(max(0, back - NEAR), back)
            if (found := block.rfind(b"\n")) >= 0:
                return back - len(block) + found + 1
            back -= len(block)
        return back

    # -- good places

    def cut_line(self, wanted: int) -> int:
        """The first line that begins at or after a place."""
        return self.next_line(wanted - 1) if wanted > 0 else 0

    def cut_text(self, wanted: int) -> int:
        """A good place inside a long text; never inside a line that is not text, which is set aside as a whole."""
        if not 0 < wanted < self.size:
            return min(max(0, wanted), self.size)
        near = self.read(wanted, wanted + NEAR)
        found = next((found for pattern in _PLACES if (found := pattern.search(near))), None)
        if found is not None:
            place = wanted + found.end()
        else:
            rest = len(near) if len(near) < 4 else 0  # at the very end of a file, or no character at all
            place = wanted + next((n for n in range(min(4, len(near))) if near[n] & 0xC0 != 0x80), rest)
        begin, end = self.line_start(place), self.next_line(place)
        if end - begin > LINE_BYTES or fault_in(self.read(begin, end)) is None:
            return place
        return end

    def cut_separator(self, wanted: int, separator: bytes) -> int:
        """After the first separator from a place on that is one whoever reads from where, in lines that are text."""
        if not 0 < wanted < self.size:
            return min(max(0, wanted), self.size)
        size, at = len(separator), max(0, wanted - len(separator))
        held = b""  # what came before and may overlap
        while at + len(held) < self.size:
            block = held + self.read(at + len(held), at + len(held) + LINE_BYTES)
            place = block.find(separator, max(0, wanted - at))
            while place >= 0:
                if block.rfind(separator, max(0, place - size + 1), place + size - 1) < 0 and self._is_text(
                    at + place - size, at + place + size
                ):
                    return at + place + size
                place = block.find(separator, place + 1)
            kept = min(len(block), 2 * size)
            at, held = at + len(block) - kept, block[len(block) - kept :]
            wanted = max(wanted, at + kept - size + 1)
        return self.size

    def _is_text(self, start: int, stop: int) -> bool:
        begin, end = self.line_start(max(0, start)), self.next_line(stop - 1)
        return end - begin > 3 * LINE_BYTES or fault_in(self.read(begin, end)) is None


# ---------------------------------------------------------------- reading a range


PART_BYTES = 1 << 20
_CHECK_BYTES = 1 << 16  # decoded at a time, so that it stays in the processor's cache
_BOM = codecs.BOM_UTF8


@dataclass(frozen=True)
class Span:
    """A file, or a range of it as it was wanted."""

    file: LocalFile
    kind: str
    """"text", "json" (lines), or "file": read as a whole by FileSource."""
    start: int
    stop: int

    @property
    def path(self) -> str:
        return self.file.name

    @property
    def size(self) -> int:
        return self.file.size

    def __str__(self) -> str:
        return self.path if self.stop - self.start == self.size else f"{self.path} from byte {self.start:,}"


@dataclass(frozen=True)
class ReadOptions:
    """How files are read."""

    separator: str | None
    text_key: str
    bad_text: str
    part_bytes: int = PART_BYTES

    def bad_records(self) -> BadRecords:
        """For a worker: bad lines are only listed; whether they are too many is decided over the corpus."""
        return BadRecords(self.bad_text, math.inf, quiet=True)


@dataclass(frozen=True)
class TextBlock:
    """Documents; the first may have begun before, and the last may go on."""

    docs: list[bytes]
    opened: bool = False
    open: bool = False


# ---------------------------------------------------------------- what is not text


def is_text(data: bytes) -> bool:
    if b"\0" in data:
        return False
    if data.isascii():
        return True
    view, at = memoryview(data), 0
    try:
        while at < len(data):
            final = at + _CHECK_BYTES >= len(data)
            at += codecs.utf_8_decode(view[at : at + _CHECK_BYTES], "strict", final)[1]
    except UnicodeDecodeError:  # that is the answer
        return False
    return True


def _clean(data: bytes, file: RangeFile, at: int, bad: BadInFile) -> bytes:
    """The lines of these bytes that are text; they lie at `at` in the file."""
    bad.reading.lines += file.count_lines(data, at)
    if is_text(data):
        return data.removeprefix(_BOM) if at == 0 else data
    head, good = file.read(0, 4), []
    for raw in whole_lines(data):
        if (fault := fault_in(raw)) is None:
            good.append(raw.removeprefix(_BOM) if at == 0 else raw)
        else:
            line, place = file.line_at(at), at + fault[0]
            bad.set_aside(line, place, not_text(file.path, line, place, fault[1], head))
        at += len(raw)
    return b"".join(good)


# ---------------------------------------------------------------- reading


def read(span: Span, how: ReadOptions, bad: BadInReading) -> Iterator[tuple[TextBlock, int]]:
    """The blocks of a span, each with how many of the span's bytes are behind it."""
    if span.kind == "file":
        yield from _whole_file(span, how, bad)
        return
    in_file = bad.file(span.path)
    with RangeFile(span.file) as file:
        if span.kind == "json":
            blocks = _json_lines(file, span, how, in_file)
        elif how.separator:
            blocks = _separated(file, span, how, how.separator.encode(), in_file)
        else:
            blocks = _one_text(file, span, how, in_file)
        for text_block, at in blocks:
            yield text_block, min(at, span.stop) - span.start


def _one_text(file: RangeFile, span: Span, how: ReadOptions, bad: BadInFile) -> Iterator[tuple[TextBlock, int]]:
    """A file that is one document, in parts."""
    at = file.cut_text(span.start)
    for wanted in range(span.start, span.stop, how.part_bytes):
        end = file.cut_text(min(span.stop, wanted + how.part_bytes))
        if end > at:
            data = _clean(file.read(at, end), file, at, bad)
            yield TextBlock([data], at > 0, end < file.size), end
        at = end


def first_part(span: Span, how: ReadOptions) -> bytes:
    """The beginning of the document that a later span goes on with."""
    with RangeFile(span.file) as file:
        return _clean(file.read(0, file.cut_text(how.part_bytes)), file, 0, how.bad_records().begin().file(span.path))


def part_before(span: Span, how: ReadOptions) -> bytes:
    """The last part before a span of a document that goes on in it."""
    with RangeFile(span.file) as file:
        begin, end = file.cut_text(span.start - how.part_bytes), file.cut_text(span.start)
        return _clean(file.read(begin, end), file, begin, how.bad_records().begin().file(span.path))


def _separated(
    file: RangeFile, span: Span, how: ReadOptions, separator: bytes, bad: BadInFile
) -> Iterator[tuple[TextBlock, int]]:
    """The documents between separators."""
    begin, stop = file.cut_separator(span.start, separator), file.cut_separator(span.stop, separator)
    rest, opened = b"", False
    for data, at in _lines(file, begin, stop):
        *docs, rest = (rest + _clean(data, file, at, bad)).split(separator)
        long = len(rest) > 2 * how.part_bytes + len(separator)
        if docs:
            yield from _in_parts(docs, opened, how.part_bytes, at + len(data))
            opened = False
        while long:
            cut = _cut_after(rest, 0, how.part_bytes)
            yield TextBlock([rest[:cut]], opened, True), at + len(data)
            rest, opened = rest[cut:], True
            long = len(rest) > 2 * how.part_bytes + len(separator)
    if rest or opened:
        yield from _in_parts([rest], opened, how.part_bytes, stop)


def _lines(file: RangeFile, at: int, stop: int) -> Iterator[tuple[bytes, int]]:
    """(bytes, place): about a megabyte of whole lines at a time; a longer line is cut between two characters."""
    held = b""
    while at + len(held) < stop:
        held += file.read(at + len(held), min(stop, at + len(held) + PART_BYTES))
        end = len(held) if at + len(held) >= stop else held.rfind(b"\n") + 1
        if not end and len(held) > LINE_BYTES:
            end = len(held)
            while end > len(held) - 3 and held[end - 1] & 0xC0 == 0x80:
                end -= 1
            end -= held[end - 1] >= 0xC0  # the first byte of a character that may go on
        if end:
            yield (held[:end] if end < len(held) else held), at
            at, held = at + end, held[end:]


def _json_lines(file: RangeFile, span: Span, how: ReadOptions, bad: BadInFile) -> Iterator[tuple[TextBlock, int]]:
    begin, stop = file.cut_line(span.start), file.cut_line(span.stop) if span.stop < file.size else file.size
    at, parts = begin, []  # a line is joined once, however long
    while at < stop:
        block = file.read(at, min(stop, at + PART_BYTES))
        end = len(block) if at + len(block) >= stop else block.rfind(b"\n") + 1
        parts.append(block[:end] if end else block)
        if end:
            data = b"".join(parts)
            parts = []
            docs = _texts_of(data, at + end - len(data), file, how, bad)
            at += end
            yield from _in_parts(docs, False, how.part_bytes, at)
        else:
            at += len(block)


def _texts_of(data: bytes, at: int, file: RangeFile, how: ReadOptions, bad: BadInFile) -> list[bytes]:
    """The texts of whole lines, fast; where a line is not as it should be, each on its own, with its place."""
    from pydantic_core import from_json

    key = how.text_key
    bad.reading.lines += file.count_lines(data, at)
    try:
        if b"\0" not in data:
            lines = data.split(b"\n")
            return [from_json(line, cache_strings="keys")[key].encode() for line in lines if line]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        pass  # looked at again below, line by line, where each fault gets its name
    docs = []
    for raw in data.split(b"\n"):
        if raw.strip():
            try:
                line = 1 if at == 0 else 2  # the first one may have a byte-order mark
                docs.append(json_text(raw, file.path, line, at, key).encode())
            except BadData:
                line = file.line_at(at)
                try:
                    json_text(raw, file.path, line, at, key)
                except BadData as error:
                    bad.set_aside(line, at, error)
        at += len(raw) + 1
    return docs


def _in_parts(docs: list[bytes], opened: bool, size: int, at: int) -> Iterator[tuple[TextBlock, int]]:
    """Whole documents, the first one perhaps begun before; very long ones in parts."""
    begin = 0
    for number, doc in enumerate(docs) if docs and max(map(len, docs)) > 2 * size else ():
        if len(doc) <= 2 * size:
            continue
        if number > begin:
            yield TextBlock(docs[begin:number], opened), at
            opened = False
        while len(doc) > 2 * size:
            cut = _cut_after(doc, 0, size)
            yield TextBlock([doc[:cut]], opened, True), at
            doc, opened = doc[cut:], True
        yield TextBlock([doc], opened), at
        begin, opened = number + 1, False
    if begin < len(docs):
        yield TextBlock(docs[begin:], opened), at


def _whole_file(span: Span, how: ReadOptions, bad: BadInReading) -> Iterator[tuple[TextBlock, int]]:
    """Packed files and other kinds, from beginning to end."""
    behind = [0]

    def tell(_: str, at: int) -> None:
        behind[0] = at

    texts = read_texts(span.file, TextFormat(how.separator, how.text_key), bad, tell)
    for text_block in gathered((text for text, _ in texts), PART_BYTES):
        yield text_block, behind[0]


def gathered(texts: Iterator[str], size: int) -> Iterator[TextBlock]:
    """Texts, some of them Parts, in blocks of about `size` bytes."""
    docs: list[bytes] = []
    total, opened = 0, False
    for text in texts:
        docs.append(text.encode())
        total += len(docs[-1])
        if isinstance(text, Part):
            yield TextBlock(docs, opened, True)
            docs, total, opened = [], 0, True
        elif total >= size:
            yield TextBlock(docs, opened)
            docs, total, opened = [], 0, False
    if docs:
        yield TextBlock(docs, opened)
