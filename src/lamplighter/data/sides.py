"""On which side of the division a text would be: the only place where statistics know how training divides.

In:  a source, the share that is held back.
Out: a Sider: 'train' or 'val' for a document, or for each block of one.
"""

from __future__ import annotations

from collections.abc import Iterator

from lamplighter.data import division
from lamplighter.data.division import Division
from lamplighter.data.files import cut_all
from lamplighter.data.sources import Source
from lamplighter.errors import BadData


class Sider:
    """The division that `lamp train` would make."""

    def __init__(self, found: Division) -> None:
        self._division = found
        self.by = found.by
        """documents or blocks."""

    def side(self, text: str) -> str:
        """Of a document, by the hash of its first part."""
        return self._division.side(self._division.hash(text.encode()))

    def blocks(self, text: str) -> Iterator[tuple[str, str]]:
        """(side, block) of each block of a text."""
        for block in cut_all(text, division.BLOCK_CHARS):
            yield self.side(block), block


def find(source: Source, val_fraction: float) -> tuple[Sider | None, str]:
    """The division, or why there is none."""
    if not val_fraction:
        return None, "data.val_fraction is 0: nothing is held back"
    try:
        return Sider(division.look(source, division.Settings(val_fraction), lambda *_: None)[0]), ""
    except BadData as error:
        return None, f"lamp train would refuse: {error.what} ({error.why})"
