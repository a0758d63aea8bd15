"""Where the bytes of a text may be cut: between words where there are words, never inside a character.

In:  bytes of UTF-8 text, or an open file and a place that is wanted.
Out: the next good place. It depends on the bytes around it alone, so every process finds the same one.

A cut after a word and before its space leaves each half with the tokens that it had in the whole, for the usual
patterns of pre-tokens.
"""

from __future__ import annotations

import os
import re

from lamplighter.errors import BadData
from lamplighter.readers.local import LocalFile, unreadable
from lamplighter.readers.records import fault_in

NEAR = 1 << 16  # so far ahead a good place is looked for
LINE_BYTES = 1 << 20  # a longer line is judged in pieces

_PLACES = (
    re.compile(rb"[0-9A-Za-z](?=[ \t\r\n])"),
    re.compile(rb"[\x80-\xff](?=[ \t\r\n])"),
    re.compile(rb"[^ \t\r\n](?=[ \t\r\n])"),
)
_WORD_ENDS = _PLACES[0]


def cut_after(data: bytes, at: int, size: int) -> int:
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
        at = found.end() if found else cut_after(data, at, size)
        ends.append(at)
    if at < len(data) or not ends:
        ends.append(len(data))
    return ends


# ---------------------------------------------------------------- in a file


class Opened:
    """A file that is read at any place; one that changes meanwhile is an error."""

    def __init__(self, file: LocalFile) -> None:
        self.file, self.path, self.size = file, file.path, file.size
        try:
            self.fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(file.path, error) from error
        self._lines = (0, 1)  # a place, and the number of its line

    def __enter__(self) -> Opened:
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
