"""Stretches of files as bytes of text: what a worker reads of its unit, the same documents as FileSource finds.

In:  a Span: a file, or a range of bytes of it that was wanted without looking (units.py).
Out: Stretches of about a megabyte, documents as bytes; lines that are not text, listed for the one who decides.

A wanted range is moved to where documents may be parted: a line's end (JSON lines), a separator, or a good place inside
a text that is one long document. Neighbours move their common border to the same place, so nothing is lost or doubled.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator
from dataclasses import dataclass

from lamplighter.data.token_cache.boundaries import LINE_BYTES, Opened, cut_after
from lamplighter.errors import BadData
from lamplighter.readers.bad_records import BadInFile, BadInReading, BadRecords
from lamplighter.readers.files import TextFormat, read_texts
from lamplighter.readers.lines import json_text
from lamplighter.readers.local import LocalFile
from lamplighter.readers.records import Part, fault_in, not_text
from lamplighter.readers.text import count_newlines, whole_lines

PART_BYTES = 1 << 20
CHECK_BYTES = 1 << 16  # decoded at a time, so that it stays in the processor's cache
BOM = codecs.BOM_UTF8


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
class Reading:
    """How files are read."""

    separator: str | None
    text_key: str
    bad_text: str
    part_bytes: int = PART_BYTES

    def bad_records(self) -> BadRecords:
        """For a worker: bad lines are only listed; whether they are too many is decided over the corpus."""
        return BadRecords(self.bad_text, math.inf, quiet=True)


@dataclass(frozen=True)
class Stretch:
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
            final = at + CHECK_BYTES >= len(data)
            at += codecs.utf_8_decode(view[at : at + CHECK_BYTES], "strict", final)[1]
    except UnicodeDecodeError:
        return False
    return True


def _clean(data: bytes, file: Opened, at: int, bad: BadInFile) -> bytes:
    """The lines of these bytes that are text; they lie at `at` in the file."""
    bad.reading.lines += count_newlines(data)
    if is_text(data):
        return data.removeprefix(BOM) if at == 0 else data
    head, good = file.read(0, 4), []
    for raw in whole_lines(data):
        if (fault := fault_in(raw)) is None:
            good.append(raw.removeprefix(BOM) if at == 0 else raw)
        else:
            line, place = file.line_at(at), at + fault[0]
            bad.set_aside(line, place, not_text(file.path, line, place, fault[1], head))
        at += len(raw)
    return b"".join(good)


# ---------------------------------------------------------------- reading


def read(span: Span, how: Reading, bad: BadInReading) -> Iterator[tuple[Stretch, int]]:
    """The stretches of a span, each with how many of the span's bytes are behind it."""
    if span.kind == "file":
        yield from _whole_file(span, how, bad)
        return
    in_file = bad.file(span.path)
    with Opened(span.file) as file:
        if span.kind == "json":
            stretches = _json_lines(file, span, how, in_file)
        elif how.separator:
            stretches = _separated(file, span, how, how.separator.encode(), in_file)
        else:
            stretches = _one_text(file, span, how, in_file)
        for stretch, at in stretches:
            yield stretch, min(at, span.stop) - span.start


def _one_text(file: Opened, span: Span, how: Reading, bad: BadInFile) -> Iterator[tuple[Stretch, int]]:
    """A file that is one document, in parts."""
    at = file.cut_text(span.start)
    for wanted in range(span.start, span.stop, how.part_bytes):
        end = file.cut_text(min(span.stop, wanted + how.part_bytes))
        if end > at:
            data = _clean(file.read(at, end), file, at, bad)
            yield Stretch([data], at > 0, end < file.size), end
        at = end


def first_part(span: Span, how: Reading) -> bytes:
    """The beginning of the document that a later span goes on with."""
    with Opened(span.file) as file:
        return _clean(file.read(0, file.cut_text(how.part_bytes)), file, 0, how.bad_records().begin().file(span.path))


def part_before(span: Span, how: Reading) -> bytes:
    """The last part before a span of a document that goes on in it."""
    with Opened(span.file) as file:
        begin, end = file.cut_text(span.start - how.part_bytes), file.cut_text(span.start)
        return _clean(file.read(begin, end), file, begin, how.bad_records().begin().file(span.path))


def _separated(
    file: Opened, span: Span, how: Reading, separator: bytes, bad: BadInFile
) -> Iterator[tuple[Stretch, int]]:
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
            cut = cut_after(rest, 0, how.part_bytes)
            yield Stretch([rest[:cut]], opened, True), at + len(data)
            rest, opened = rest[cut:], True
            long = len(rest) > 2 * how.part_bytes + len(separator)
    if rest or opened:
        yield from _in_parts([rest], opened, how.part_bytes, stop)


def _lines(file: Opened, at: int, stop: int) -> Iterator[tuple[bytes, int]]:
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


def _json_lines(file: Opened, span: Span, how: Reading, bad: BadInFile) -> Iterator[tuple[Stretch, int]]:
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


def _texts_of(data: bytes, at: int, file: Opened, how: Reading, bad: BadInFile) -> list[bytes]:
    """The texts of whole lines, fast; where a line is not as it should be, each on its own, with its place."""
    from pydantic_core import from_json

    key = how.text_key
    bad.reading.lines += count_newlines(data)
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


def _in_parts(docs: list[bytes], opened: bool, size: int, at: int) -> Iterator[tuple[Stretch, int]]:
    """Whole documents, the first one perhaps begun before; very long ones in parts."""
    begin = 0
    for number, doc in enumerate(docs) if docs and max(map(len, docs)) > 2 * size else ():
        if len(doc) <= 2 * size:
            continue
        if number > begin:
            yield Stretch(docs[begin:number], opened), at
            opened = False
        while len(doc) > 2 * size:
            cut = cut_after(doc, 0, size)
            yield Stretch([doc[:cut]], opened, True), at
            doc, opened = doc[cut:], True
        yield Stretch([doc], opened), at
        begin, opened = number + 1, False
    if begin < len(docs):
        yield Stretch(docs[begin:], opened), at


def _whole_file(span: Span, how: Reading, bad: BadInReading) -> Iterator[tuple[Stretch, int]]:
    """Packed files and other kinds, from beginning to end."""
    behind = [0]

    def tell(_: str, at: int) -> None:
        behind[0] = at

    texts = read_texts(span.file, TextFormat(how.separator, how.text_key), bad, tell)
    for stretch in gathered((text for text, _ in texts), PART_BYTES):
        yield stretch, behind[0]


def gathered(texts: Iterator[str], size: int) -> Iterator[Stretch]:
    """Texts, some of them Parts, in stretches of about `size` bytes."""
    docs: list[bytes] = []
    total, opened = 0, False
    for text in texts:
        docs.append(text.encode())
        total += len(docs[-1])
        if isinstance(text, Part):
            yield Stretch(docs, opened, True)
            docs, total, opened = [], 0, True
        elif total >= size:
            yield Stretch(docs, opened)
            docs, total, opened = [], 0, False
    if docs:
        yield Stretch(docs, opened)
