"""What a source hands out: texts, long ones in Parts; and where it is: a Position with a cursor.

In:  texts of any length.
Out: pieces of bounded length, cut where no pre-token is cut; the same pieces however the text arrived.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lamplighter import report


class Part(str):
    """A piece of a document that goes on in the next piece, so that memory does not grow with a document."""

    __slots__ = ()


Cursor = dict[str, Any]
"""A place between two texts of a source, as JSON; only the source itself knows what it means."""


@dataclass(frozen=True)
class Position:
    """What is being read now, how many of the source's bytes are behind it, and where to go on after the latest text."""

    item: str
    bytes_done: int
    cursor: Cursor = field(default_factory=dict)


_WORD_ENDS = re.compile(r"[^\W_](?=[ \t\r\n])")
_SPACE_BEGINS = re.compile(r"[^ \t\r\n](?=[ \t\r\n])")
_SPACE = re.compile(r"[ \t\r\n]")


def cut_after(text: str, size: int, spare: int = 0) -> int | None:
    """Where to cut a text of over twice `size`: after a word and before its space, so that no pre-token is cut.

    None for a shorter text, so something is always left. Where that stretch has no word's end (or no space at all), the next best place.
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
