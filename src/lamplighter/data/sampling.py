"""A part of a source that stands for the whole: spread over all of it, the same every time.

In:  a source, how much of it.
Out: texts with their places, and in words how much of what they are.

A text is taken while what was taken lags behind its share of what was read (by the source's own count of bytes), so the
sample comes in short stretches from everywhere. No random numbers: the same source gives the same sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamplighter import report
from lamplighter.data.sources import Source, watched
from lamplighter.errors import BadData
from lamplighter.readers.records import cut_all
from lamplighter.rundir import human_bytes

_SAMPLE_BYTES = 50_000_000
READ_TIMES = 40  # at most so many times the sample is read of a larger source, and that is said
_PIECE_CHARS = 1 << 15  # a longer text is sampled in pieces, cut where no pre-token is cut


@dataclass(frozen=True)
class TextSample:
    """Texts that stand for a source."""

    texts: list[str]
    places: list[str]
    """Of each text, where it stands: file, or document."""
    bytes: int
    """Of the texts, as UTF-8."""
    others: list[str] = field(default_factory=list)
    """Texts that are not in the sample: to try on what it has not seen."""
    other_places: list[str] = field(default_factory=list)
    read_bytes: int = 0
    """Of text that was passed on the way, the sample included."""
    share: float | None = 1.0
    """Of the source that was read to the place where it stopped; None where its size is not known."""

    @property
    def whole(self) -> bool:
        return self.bytes == self.read_bytes and self.share == 1.0

    @property
    def words(self) -> str:
        """'all 27 MB of text', or how much of what."""
        size = human_bytes(self.bytes)
        if self.whole:
            return f"all {size} of text"
        if self.share is None:
            return f"the first {size} of text (the source does not say how large it is)"
        where = "all of it" if self.share == 1.0 else f"the first {self.share:.1%} of the source"
        return f"{size} of {human_bytes(self.read_bytes)} of text, spread over {where}"


class Quota:
    """Whether the next text belongs to a sample of so many bytes; one is asked for each text, in order."""

    def __init__(self, total_bytes: int | None, sample_bytes: int) -> None:
        self.sample_bytes, self.total = sample_bytes, total_bytes
        self.end = min(total_bytes, READ_TIMES * sample_bytes) if total_bytes else None
        self.kept = 0
        """Bytes of text in the sample so far; the asker adds to it."""

    def share(self, reached: float) -> float:
        """Of what is to be read, the part that is behind the place `reached` (by the source's count)."""
        return min(1.0, reached / self.end) if self.end else 1.0

    def wants(self, reached: float) -> bool:
        if self.end is None:
            return self.kept < self.sample_bytes
        return self.kept < self.sample_bytes * self.share(reached)

    def is_over(self, before: int) -> bool:
        """Whether to stop reading, at a text that begins at the place `before`."""
        if self.end is None or self.total is None:
            return self.kept >= self.sample_bytes
        return before >= self.end and self.end < self.total

    def reach(self, ended: bool) -> float | None:
        """The part of the source that was gone through; None where its size is not known."""
        if ended:
            return 1.0
        return None if self.end is None or not self.total else self.end / self.total


def take(source: Source, sample_bytes: int = _SAMPLE_BYTES, other_bytes: int = 0) -> TextSample:
    """Some `sample_bytes` of text, and up to `other_bytes` of the text between."""
    quota = Quota(source.total_bytes(), sample_bytes)
    kept: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    other_size = read = before = 0
    ended = True
    with report.phase("read a sample", total=quota.end or sample_bytes, unit="B") as p:

        def show(done: int, item: str) -> None:
            p.set(min(done, quota.end) if quota.end else quota.kept, item)

        for text in watched(source, show):
            if quota.is_over(before):
                ended = False
                break
            here = source.position()
            pieces = list(cut_all(text, _PIECE_CHARS)) if quota.end and quota.end > sample_bytes else [text]
            for number, piece in enumerate(pieces, 1):
                reached = before + (here.bytes_done - before) * number / len(pieces)
                size = len(piece.encode())
                read += size
                if quota.wants(reached):
                    kept.append((str(piece), here.item))
                    quota.kept += size
                elif other_size < other_bytes * quota.share(reached):
                    others.append((str(piece), here.item))
                    other_size += size
            before = here.bytes_done
    if not quota.kept:
        raise BadData(f"no text in {source}", "every document is empty", "check data.paths")
    return TextSample(*_unzip(kept), quota.kept, *_unzip(others), read, quota.reach(ended))


def _unzip(pairs: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
    return [text for text, _ in pairs], [place for _, place in pairs]
