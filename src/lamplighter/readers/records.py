"""What the readers of all formats share: records and texts, each with its place and a cursor; errors for what is no text.

In:  the unpacked bytes of a file from any offset on, and how they are to be read.
Out: Records; texts under a key, long ones in Parts that are cut where no pre-token is cut, the same however they arrived.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lamplighter import report
from lamplighter.errors import BadData
from lamplighter.readers.bad_records import BadInFile
from lamplighter.readers.local import is_packed

Cursor = dict[str, Any]
"""A place between two texts of a source, as JSON; only the source itself knows what it means."""


class Part(str):
    """A piece of a document that goes on in the next piece, so that memory does not grow with a document."""

    __slots__ = ()


Texts = Iterator[tuple[str, Cursor]]
"""Each text with the cursor after it."""


class Record(NamedTuple):
    """A JSON value or a row of a table, and where it stands."""

    value: Any
    line: int  # or the number of the row, in Parquet
    at: int  # the byte, or the row
    before: Cursor
    after: Cursor


@dataclass(frozen=True)
class Position:
    """What is being read now, how many of the source's bytes are behind it, and where to go on after the latest text."""

    item: str
    bytes_done: int
    cursor: Cursor = field(default_factory=dict)


@dataclass(frozen=True)
class OpenFile:
    """One reading of one file: what every format needs."""

    number: int  # of the file in its source
    name: str
    kind: str
    blocks: Callable[[int], Iterator[bytes]]  # the unpacked bytes from an offset on
    start: Cursor
    bad: BadInFile
    key: str
    separator: str | None
    part_chars: int
    line_bytes: int  # a longer line of plain text is decoded in pieces
    longest: int | None = None  # a longer JSON line is set aside, and only its beginning is held

    @property
    def at(self) -> int:
        return int(self.start.get("at", 0))

    @property
    def line(self) -> int:
        return int(self.start.get("line", 1))

    def cursor(self, at: int, line: int) -> Cursor:
        """A cursor inside the file."""
        cursor: Cursor = {"file": self.number, "at": at, "line": line}
        if self.bad.count:
            cursor["bad"] = self.bad.count
        return cursor

    def where(self, line: int, at: int) -> str:
        """A place, for people."""
        if self.kind == "parquet":
            return f"{self.name}, row {line:,}"
        return f"{self.name}:{line}, byte {at:,}"


# ---------------------------------------------------------------- texts of records


def texts_of(file: OpenFile, records: Iterator[Record]) -> Texts:
    """The text under the key of each record; what has none is set aside and counted, or refused."""
    skipped = int(file.start.get("part", 0))
    for record in records:
        text = record.value.get(file.key) if isinstance(record.value, dict) else None
        try:
            if not isinstance(text, str):
                text = text_of(record.value, file.key, file.where(record.line, record.at))
            if not text.isascii() or "\0" in text:
                check_text(text, file.where(record.line, record.at), nul_is_text=file.kind == "json")
        except BadData as error:
            file.bad.set_aside(record.line, record.at, error)
            continue
        if len(text) > 2 * file.part_chars:
            yield from in_parts(text, file.part_chars, skipped, record.before, record.after)
        elif text:
            yield text, record.after
        skipped = 0


def text_of(record: Any, key: str, where: str) -> str:
    """What stands under a key; a dotted one goes down; "*" is the whole row, as JSON."""
    if key == "*":
        return json.dumps(record, ensure_ascii=False, default=str)
    value = record.get(key) if isinstance(record, dict) else None
    if value is None and "." in key:
        value = record
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, bytes):
        value = _decoded(value, where)
    if isinstance(value, str):
        return value
    if isinstance(record, dict) and value is None and key in record:
        raise BadData(f"no text: {where}", f'"{key}" is null', "mend or remove the row")
    known = ", ".join(list(record)[:8]) if isinstance(record, dict) else f"a JSON {type(record).__name__}"
    why = f'nothing under "{key}"; found: {known}' if value is None else f'"{key}" holds a {type(value).__name__}'
    advice = "set data.text_key; questions and answers are known by keys such as messages, or instruction with output (docs/finetuning.md)"
    raise BadData(f"no text: {where}", why, advice)


def _decoded(value: bytes, where: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        why = f"not UTF-8: {error.reason} {value[error.start]:#04x} at byte {error.start} of the text"
        raise BadData(f"not text: {where}", why, "mend or remove the row") from error


def check_text(text: str, where: str, nul_is_text: bool = False) -> None:
    """Refuse a text that cannot be written as UTF-8, or that holds a NUL."""
    if not nul_is_text and "\0" in text:
        raise BadData(f"not text: {where}", "a NUL byte", "mend or remove the row")
    try:
        text.encode()
    except UnicodeEncodeError:
        why = "not UTF-8, or half of a surrogate pair in a \\u escape"
        raise BadData(f"not text: {where}", why, "mend or remove it; if it is Latin-1, convert it with iconv") from None


# ---------------------------------------------------------------- long texts in parts

_WORD_ENDS = re.compile(r"[^\W_](?=[ \t\r\n])")
_SPACE_BEGINS = re.compile(r"[^ \t\r\n](?=[ \t\r\n])")
_SPACE = re.compile(r"[ \t\r\n]")


def cut_after(text: str, size: int, spare: int = 0) -> int | None:
    """Where to cut a text of over twice `size`: after a word and before its space, so that no pre-token is cut.

    None for a shorter text, so something is always left. Where there is no word's end (or no space at all), the next best place.
    """
    if len(text) <= 2 * size + spare:
        return None
    if not _SPACE.search(text, size, 2 * size):  # the others would search a megabyte in vain, at length
        return 2 * size
    for pattern in (_WORD_ENDS, _SPACE_BEGINS):
        if found := pattern.search(text, size, 2 * size):
            return found.end()
    return 2 * size


def cut_all(text: str, size: int) -> Iterator[str]:
    """The pieces of a text, all but the last one a Part."""
    begin = 0
    while (cut := cut_after(text[begin : begin + 2 * size + 1], size)) is not None:
        yield Part(text[begin : begin + cut])
        begin += cut
    yield text[begin:] if begin else text


def in_parts(text: str, size: int, skipped: int, before: Cursor, after: Cursor) -> Texts:
    """A text with the cursor after it; a long one in Parts, of which the first `skipped` are behind."""
    if len(text) <= 2 * size:
        if text:
            yield text, after
        return
    pieces = list(cut_all(text, size))
    for number in range(skipped, len(pieces)):
        last = number == len(pieces) - 1
        yield pieces[number], after if last else {**before, "part": number + 1}


def skip(texts: Iterator[str], count: int, position: Callable[[], Position]) -> None:
    """Pass over what a resumed build has already stored, in sight of the watcher."""
    if count:
        with report.phase("skip to where it stopped", total=count, unit="texts") as p:
            for number in range(count):
                p.set(number, position().item)
                next(texts, None)


def digest(value: Any) -> str:
    """sha256 of anything that JSON can write."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------- what is not text


def fault_in(raw: bytes) -> tuple[int, str] | None:
    """(byte, reason) of the first thing in these bytes that is not text."""
    if (nul := raw.find(b"\0")) >= 0:
        return nul, "a NUL byte"
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.start, f"not UTF-8: {error.reason} {raw[error.start]:#04x}"
    return None


def not_text(name: str | Path, line: int, at: int, why: str, head: bytes) -> BadData:
    """The error for bytes that are no text, with the likeliest remedy."""
    unpacked = " of the unpacked text" if is_packed(name) else ""
    other = f"utf8{Path(name).suffix}"  # the ending says how it is read
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        advice = f"it looks like UTF-16; try: iconv -f UTF-16 -t UTF-8 '{name}' > {other}"
    elif head.startswith(b"PAR1"):
        advice = "it looks like Parquet; give it a name that ends in .parquet"
    elif "NUL" in why:
        advice = "it looks like a binary file; take it out of data.paths"
    else:
        advice = f"if it is Latin-1: iconv -f ISO-8859-1 -t UTF-8 '{name}' > {other}, and name that file"
    return BadData(f"not text: {name}:{line}, byte {at:,}{unpacked}", why, advice)
