"""On which side of the division a text would be: the only place where statistics know how training divides.

In:  a source, the share that is held back.
Out: a SideFinder: 'train' or 'val' for a document, or for each block of one.
"""

from __future__ import annotations

from collections.abc import Iterator

from lamplighter import report
from lamplighter.data import split
from lamplighter.data.sources import Source, watched
from lamplighter.data.sources.files import Part
from lamplighter.data.split import Split
from lamplighter.data.token_cache.ranges import TextBlock
from lamplighter.errors import BadData


class SideFinder:
    """The division that `lamp train` would make."""

    def __init__(self, found: Split) -> None:
        self._division = found
        self.by = found.by
        """documents or blocks."""

    def side(self, text: str) -> str:
        """Of a document, by the hash of its first part."""
        return "val" if self._division.is_val(self._division.hashes([text.encode()]))[0] else "train"

    def blocks(self, text: str) -> Iterator[tuple[str, str]]:
        """(side, block) of each block of a text."""
        data = text.encode()
        ends, hashes = self._division.block_hashes(data)
        for begin, end, val in zip([0, *ends], ends, self._division.is_val(hashes).tolist(), strict=False):
            yield "val" if val else "train", data[begin:end].decode()


def find_split(source: Source, val_fraction: float) -> tuple[SideFinder | None, str]:
    """The division, or why there is none."""
    if not val_fraction:
        return None, "data.val_fraction is 0: nothing is held back"
    settings = split.CacheSettings(val_fraction)
    seen, opened = split.begin_survey(settings), False
    with report.phase("look at the documents", unit="documents") as p:
        for text in watched(source, lambda _, item: p.set(seen.documents, item)):
            seen.add(TextBlock([text.encode()], opened, isinstance(text, Part)))
            opened = isinstance(text, Part)
            if seen.is_enough():
                break
    try:
        return SideFinder(split.decide(seen, settings, source)), ""
    except BadData as error:
        return None, f"lamp train would refuse: {error.what} ({error.why})"
