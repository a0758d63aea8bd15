"""Plain text: documents by a separator, or the whole file as one; each text with the place after it.

In:  a Reading.
Out: (text, place) in order: the same however the bytes arrive and wherever the reading began. Memory does not grow with
     a document or a line.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from lamplighter.data.parts import Cursor, Part, cut_after, cut_all
from lamplighter.data.reading import Found, Reading, fault_in, not_text, place


class Chunk(NamedTuple):
    """Some whole lines that are text (or a piece of a very long one), as characters and as bytes."""

    text: str
    raw: bytes
    at: int
    line: int
    bad: int
    long: bool  # a piece of a line that was cut


def read_text(r: Reading) -> Found:
    """The documents of a plain text, in Parts where they are long."""
    separator = r.separator or ""
    held = _Held(separator)
    for chunk in _chunks(r):
        held.add(chunk)
        if separator:
            yield from held.documents(r.part_chars)
        if held.chars > 2 * r.part_chars + len(separator):
            yield from held.parts(r.part_chars, len(separator))
    yield from held.rest(r.part_chars)
    r.dirt.end(held.marks[-1].line)


class _Mark(NamedTuple):
    """Where a character of the held text is in the file."""

    char: int
    byte: int
    at: int
    line: int
    bad: int
    long: bool


class _Held:
    """Text that is read and not yet handed out, as characters and as bytes, with its places in the file."""

    def __init__(self, separator: str) -> None:
        self.separator, self.separator_bytes = separator, separator.encode()
        self.texts: list[str] = []
        self.raws: list[bytes] = []
        self.chars = self.bytes = 0
        self.marks: deque[_Mark] = deque()

    def add(self, chunk: Chunk) -> None:
        self.marks.append(_Mark(self.chars, self.bytes, chunk.at, chunk.line, chunk.bad, chunk.long))
        self.texts.append(chunk.text)
        if self.separator:
            self.raws.append(chunk.raw)
        self.chars, self.bytes = self.chars + len(chunk.text), self.bytes + len(chunk.raw)

    def documents(self, size: int) -> Found:
        """Every document whose separator is here."""
        text = self._text()
        if self.separator not in text:
            return
        raw = self._raw()
        *whole, rest = text.split(self.separator)
        char = byte = 0
        for document, data in zip(whole, raw.split(self.separator_bytes), strict=False):
            if len(document) > 2 * size:
                *pieces, document = cut_all(document, size)
                for piece in pieces:
                    char += len(piece)
                    yield piece, self._move(char, None)
            char += len(document) + len(self.separator)
            byte += len(data) + len(self.separator_bytes)
            after = self._move(char, byte)
            if document:
                yield document, after
        self._drop(char, byte, rest)

    def parts(self, size: int, spare: int) -> Found:
        """What can be cut off the front of a long document."""
        text = self._text()
        begin = 0
        while (cut := cut_after(text[begin : begin + 2 * size + spare + 1], size, spare)) is not None:
            begin += cut
            yield Part(text[begin - cut : begin]), self._move(begin, None)
        if begin:
            self._drop(begin, self.marks[0].byte, text[begin:])

    def rest(self, size: int) -> Found:
        """The last document, which ends with the file."""
        *pieces, last = cut_all(self._text(), size)
        char = 0
        for piece in pieces:
            char += len(piece)
            yield piece, self._move(char, None)
        if last:
            end = self.marks[-1]
            yield last, place(end.at, end.line, end.bad)

    def _text(self) -> str:
        self.texts = ["".join(self.texts)]
        return self.texts[0]

    def _raw(self) -> bytes:
        self.raws = [b"".join(self.raws)]
        return self.raws[0]

    def _move(self, char: int, byte: int | None) -> Cursor:
        """The place before a character; what is before it is done with. The bytes of one chunk at most are counted."""
        while len(self.marks) > 1 and self.marks[1].char <= char:
            self.marks.popleft()
        mark = self.marks[0]
        text = self._text()
        if byte is None:
            byte = mark.byte + len(text[mark.char : char].encode())
        at, line = mark.at + byte - mark.byte, mark.line + text.count("\n", mark.char, char)
        self.marks[0] = _Mark(char, byte, at, line, mark.bad, mark.long)
        return place(at, line, mark.bad, long=mark.long)

    def _drop(self, char: int, byte: int, rest: str) -> None:
        """Forget the characters before `char`."""
        self.texts = [rest]
        if self.separator:
            self.raws = [self._raw()[byte:]]
        self.chars, self.bytes = self.chars - char, self.bytes - byte
        self.marks = deque(mark._replace(char=mark.char - char, byte=mark.byte - byte) for mark in self.marks)


def _chunks(r: Reading) -> Iterator[Chunk]:
    """The lines that are text; a byte-order mark is dropped, a line that is not text is set aside; then an empty one."""
    head, at, line, long = b"", r.at, r.line, bool(r.start.get("long"))
    for piece, goes_on in _pieces(r.blocks(at), at, r.line_bytes, long):
        head = head or piece[:4]
        text = None if b"\0" in piece else _decoded(piece)
        if text is None:
            yield from _good_lines(piece, at, line, long or goes_on, head, r)
        elif at == 0 and text.startswith("\ufeff"):
            yield Chunk(text[1:], piece[3:], 3, line, r.dirt.bad, goes_on)
        else:
            yield Chunk(text, piece, at, line, r.dirt.bad, long or goes_on)
        at, line, long = at + len(piece), line + piece.count(b"\n"), goes_on
    yield Chunk("", b"", at, line, r.dirt.bad, False)


def _decoded(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _good_lines(piece: bytes, at: int, line: int, long: bool, head: bytes, r: Reading) -> Iterator[Chunk]:
    """The lines of a piece that are text."""
    for raw in _split_keeping(piece):
        if (fault := fault_in(raw)) is None:
            mark = 3 if at == 0 and raw.startswith(codecs.BOM_UTF8) else 0
            yield Chunk(raw[mark:].decode(), raw[mark:], at + mark, line, r.dirt.bad, long)
        else:
            error = not_text(r.name, line, at + fault[0], fault[1], head, r.packed)
            r.dirt.set_aside(line, at + fault[0], error)
        at, line = at + len(raw), line + 1


def _split_keeping(piece: bytes) -> list[bytes]:
    """Lines end at a newline only; a carriage return is a character like others."""
    return [raw + b"\n" for raw in piece.split(b"\n")[:-1]] + ([rest] if (rest := piece.rpartition(b"\n")[2]) else [])


def _pieces(blocks: Iterator[bytes], at: int, limit: int, long: bool) -> Iterator[tuple[bytes, bool]]:
    """The same bytes, cut after a line's end; and whether the cut is inside a line.

    A line of over `limit` is cut between two characters, at multiples of `limit` in the file: so the pieces are the
    same wherever the reading began.
    """
    held = b""
    for block in blocks:
        held += block
        if long or len(held) > limit:
            for piece, long in _cut_long(held, at, limit, long, ended=False):
                yield piece, long
                at, held = at + len(piece), held[len(piece) :]
        elif end := held.rfind(b"\n") + 1:
            yield held[:end], False
            at, held = at + end, held[end:]
    yield from _cut_long(held, at, limit, long, ended=True)


def _cut_long(held: bytes, at: int, limit: int, long: bool, ended: bool) -> Iterator[tuple[bytes, bool]]:
    """Whole short lines, and the pieces of long ones; what may go on in the next block is left, unless the file has ended."""
    begin = 0
    while begin < len(held):
        newline = held.find(b"\n", begin)
        stop = newline + 1 if newline >= 0 else len(held)
        if not long and stop - begin <= limit:
            if newline < 0 and not ended:
                return
            if newline >= 0 and stop < len(held):  # as many short lines as there are, at once
                stop = _short_lines(held, begin, limit)
            yield held[begin:stop], False
            begin = stop
            continue
        edge = _edge(held, begin, at, limit)
        if edge is None or edge >= stop:
            if newline < 0 and not ended:
                return
            edge = stop
        yield held[begin:edge], (long := edge < stop)
        begin = edge


def _short_lines(held: bytes, begin: int, limit: int) -> int:
    stop = begin
    while (newline := held.find(b"\n", stop)) >= 0 and newline + 1 - stop <= limit:
        stop = newline + 1
    return stop


def _edge(held: bytes, begin: int, at: int, limit: int) -> int | None:
    """The next multiple of `limit` in the file, or the beginning of the character there; None where it is not held yet."""
    edge = ((at + begin) // limit + 1) * limit - at
    while True:
        if edge >= len(held):
            return None
        start = edge
        while start > max(begin, edge - 3) and held[start] & 0xC0 == 0x80:
            start -= 1
        if start > begin:
            return start
        edge += limit


