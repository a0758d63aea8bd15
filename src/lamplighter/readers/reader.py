"""One reading of one file: what every format needs to know, and what they all share.

In:  the unpacked bytes of a file from any place on, and how they are to be read.
Out: places, texts under a key, long texts in Parts; the errors for what is not text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamplighter.errors import BadData
from lamplighter.readers.bad_records import FileDirt
from lamplighter.readers.cursor import Cursor, cut_all
from lamplighter.readers.local import is_packed

Found = Iterator[tuple[str, Cursor]]


@dataclass(frozen=True)
class Reading:
    """One reading of one file: what every format needs."""

    file: int  # its number in the source
    name: str
    blocks: Callable[[int], Iterator[bytes]]  # the unpacked bytes from an offset on
    start: Cursor
    dirt: FileDirt
    key: str
    separator: str | None
    part_chars: int
    line_bytes: int  # a longer line of plain text is decoded in pieces

    @property
    def at(self) -> int:
        return int(self.start.get("at", 0))

    @property
    def line(self) -> int:
        return int(self.start.get("line", 1))

    def place(self, at: int, line: int) -> Cursor:
        """A cursor inside the file."""
        found: Cursor = {"file": self.file, "at": at, "line": line}
        if self.dirt.bad:
            found["bad"] = self.dirt.bad
        return found


def in_parts(text: str, size: int, skipped: int, before: Cursor, after: Cursor) -> Found:
    """A text with the place after it; a long one in Parts, of which the first `skipped` are behind."""
    if len(text) <= 2 * size:
        if text:
            yield text, after
        return
    pieces = list(cut_all(text, size))
    for number in range(skipped, len(pieces)):
        last = number == len(pieces) - 1
        yield pieces[number], after if last else {**before, "part": number + 1}


def text_of(record: Any, key: str, where: str) -> str:
    """What stands under a key; a dotted one goes down; "*" is the whole row, as JSON."""
    if key == "*":
        return json.dumps(record, ensure_ascii=False, default=str)
    value = record.get(key) if isinstance(record, dict) else None
    if value is None and "." in key:
        value = record
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, str):
        return value
    found = ", ".join(list(record)[:8]) if isinstance(record, dict) else f"a JSON {type(record).__name__}"
    why = f'nothing under "{key}"; found: {found}' if value is None else f'"{key}" holds a {type(value).__name__}'
    raise BadData(f"no text: {where}", why, "set data.text_key")


def is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
