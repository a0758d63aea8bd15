"""Plain text: documents by a separator, or the whole file as one; each text with the place after it.

In:  an OpenFile.
Out: (text, place) in order: the same however the bytes arrive and wherever the reading began. Memory does not grow with
     a document or a line.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lamplighter.readers.records import Cursor, OpenFile, Part, Texts, cut_after, cut_all, fault_in, not_text


class DecodedLines(NamedTuple):
    """Some whole lines that are text, or a piece of a very long one."""

    text: str
    raw: bytes
    at: int
    line: int
    bad: int
    long: bool  # a piece of a line that was cut


def read_text(r: OpenFile) -> Texts:
    """The documents of a plain text, in Parts where they are long."""
    separator = r.separator or ""
    held = _Held(separator, r.number)
    for chunk in _chunks(r):
        held.add(chunk)
        if separator:
            yield from held.documents(r.part_chars)
        if held.chars > 2 * r.part_chars + len(separator):
            yield from held.parts(r.part_chars, len(separator))
    yield from held.rest(r.part_chars)


_Mark = tuple[int, int, int, int, int, bool]  # character and byte of the held text; at, line, bad, long in the file


class _Held:
    """Text that is read and not yet handed out, with its places in the file."""

    def __init__(self, separator: str, file: int) -> None:
        self.separator, self.separator_bytes, self.file = separator, separator.encode(), file
        self.texts: list[str] = []
        self.raws: list[bytes] = []  # only to find separators in
        self.chars = self.bytes = 0
        self.here: _Mark = (0, 0, 0, 1, 0, False)  # everything before it is handed out
        self.marks: deque[_Mark] = deque()  # the beginnings of chunks behind it

    def add(self, chunk: DecodedLines) -> None:
        self.marks.append((self.chars, self.bytes, chunk.at, chunk.line, chunk.bad, chunk.long))
        self.texts.append(chunk.text)
        if self.separator:
            self.raws.append(chunk.raw)
        self.chars, self.bytes = self.chars + len(chunk.text), self.bytes + len(chunk.raw)

    def documents(self, size: int) -> Texts:
        """Every document whose separator is here."""
        text = self._text()
        if self.separator not in text:
            return
        self.raws = [b"".join(self.raws)]
        *whole, rest = text.split(self.separator)
        chars, bytes_, find, move = len(self.separator), len(self.separator_bytes), self.raws[0].find, self._move
        char = byte = 0
        for document in whole:
            byte = find(self.separator_bytes, byte) + bytes_
            if len(document) > 2 * size:
                *pieces, document = cut_all(document, size)
                for piece in pieces:
                    char += len(piece)
                    yield piece, move(char, None)
            char += len(document) + chars
            if document:
                yield document, move(char, byte)
        move(char, byte)
        self._drop(rest)

    def parts(self, size: int, spare: int) -> Texts:
        """What can be cut off the front of a long document."""
        while (cut := cut_after(self._text(), size, spare)) is not None:
            piece, after = Part(self._text()[:cut]), self._move(cut, None)
            self._drop(self._text()[cut:])
            yield piece, after

    def rest(self, size: int) -> Texts:
        """The last document, which ends with the file."""
        *pieces, last = cut_all(self._text(), size)
        char = 0
        for piece in pieces:
            char += len(piece)
            yield piece, self._move(char, None)
        end = self._move(self.chars, self.bytes)
        if last:
            yield last, end

    def _text(self) -> str:
        if len(self.texts) != 1:
            self.texts = ["".join(self.texts)]
        return self.texts[0]

    def _move(self, char: int, byte: int | None) -> Cursor:
        """The place before a character; what is before it is done with. The bytes of one chunk at most are counted."""
        marks = self.marks
        if marks and marks[0][0] <= char:
            while len(marks) > 1 and marks[1][0] <= char:
                marks.popleft()
            self.here = marks.popleft()
        from_char, from_byte, at, line, bad, long = self.here
        text = self.texts[0]
        if byte is None:
            byte = from_byte + len(text[from_char:char].encode())
        at += byte - from_byte
        line += text.count("\n", from_char, char)
        self.here = (char, byte, at, line, bad, long)
        if bad or long:
            return {"file": self.file, "at": at, "line": line, "bad": bad, "long": long}
        return {"file": self.file, "at": at, "line": line}

    def _drop(self, rest: str) -> None:
        """Forget what is handed out."""
        char, byte, *where = self.here
        if self.separator:
            self.raws = [b"".join(self.raws)[byte:]]
        self.texts = [rest]
        self.chars, self.bytes = self.chars - char, self.bytes - byte
        self.here = (0, 0, *where)  # type: ignore[assignment]
        self.marks = deque((mark[0] - char, mark[1] - byte, *mark[2:]) for mark in self.marks)


def _chunks(r: OpenFile) -> Iterator[DecodedLines]:
    """The lines that are text; a byte-order mark is dropped, a line that is not text is set aside; then an empty one."""
    head, at, line, long = b"", r.at, r.line, bool(r.start.get("long"))
    piece = b"\n"
    for piece, goes_on in _pieces(r.blocks(at), at, r.line_bytes, long):
        head = head or piece[:4]
        text = None if b"\0" in piece else _decoded(piece)
        if text is None:
            yield from _good_lines(piece, at, line, long=long or goes_on, head=head, r=r)
        elif at == 0 and text.startswith("\ufeff"):
            yield DecodedLines(text[1:], piece[3:], 3, line=line, bad=r.bad.count, long=goes_on)
        else:
            yield DecodedLines(text, piece, at, line=line, bad=r.bad.count, long=long or goes_on)
        at, line, long = at + len(piece), line + count_newlines(piece), goes_on
    yield DecodedLines("", b"", at, line=line, bad=r.bad.count, long=False)
    r.bad.end(line - piece.endswith(b"\n"))  # behind the last newline there is no line


def count_newlines(piece: bytes) -> int:
    """As bytes.count, at a third of its cost."""
    return int(np.count_nonzero(np.frombuffer(piece, np.uint8) == 10))


def _decoded(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:  # the caller says where
        return None


def _good_lines(piece: bytes, at: int, line: int, long: bool, head: bytes, r: OpenFile) -> Iterator[DecodedLines]:
    """The runs of lines of a piece that are text."""
    begin, first, bad = 0, line, r.bad.count  # of the run: in the piece, its line, the bad lines before it
    end = 0
    for raw in whole_lines(piece):
        if (fault := fault_in(raw)) is not None:
            yield from _run(piece[begin:end], at + begin, first, bad, long)
            error = not_text(r.name, line, at + end + fault[0], fault[1], head)
            r.bad.set_aside(line, at + end + fault[0], error)
            begin, first, bad = end + len(raw), line + 1, r.bad.count
        end, line = end + len(raw), line + 1
    yield from _run(piece[begin:], at + begin, first, bad, long)


def _run(raw: bytes, at: int, line: int, bad: int, long: bool) -> Iterator[DecodedLines]:
    if raw:
        mark = 3 if at == 0 and raw.startswith(codecs.BOM_UTF8) else 0
        yield DecodedLines(raw[mark:].decode(), raw[mark:], at + mark, line=line, bad=bad, long=long)


def whole_lines(piece: bytes) -> list[bytes]:
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
            for piece, inside in _cut_long(held, at, limit, long, ended=False):
                yield piece, inside
                long, at, held = inside, at + len(piece), held[len(piece) :]
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
