"""A sample stands for the whole: spread, bounded, the same every time, and it says what it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lamplighter.data import sampling
from lamplighter.data.sources import EmbeddedCorpus, First, Position
from lamplighter.data.sources.file_source import FileSource
from lamplighter.errors import BadData
from lamplighter.readers.local import find_files


class Counted:
    """A source that knows its size and tells how much of it was read."""

    def __init__(self, texts: list[str], total: int | None = -1) -> None:
        self.texts, self.read = texts, 0
        self.total = sum(map(len, texts)) if total == -1 else total
        self._done = 0

    def fingerprint(self) -> str:
        return "x"

    def total_bytes(self) -> int | None:
        return self.total

    def position(self) -> Position:
        return Position(f"document {self.read} of it", self._done)

    def documents(self, start: object = None) -> Iterator[str]:
        self._done = self.read = 0
        for text in self.texts:
            self.read += 1
            self._done += len(text)
            yield text


TEXTS = [f"text {number:05d} " + "x" * 89 for number in range(1000)]


def test_a_small_source_is_taken_whole() -> None:
    found = sampling.take(Counted(TEXTS), 10_000_000)
    assert found.texts == TEXTS and found.whole and not found.others
    assert found.words == "all 100.0 KB of text"


def test_a_large_source_is_sampled_from_everywhere() -> None:
    found = sampling.take(Counted(TEXTS), 10_000, 5_000)
    assert found.texts == sampling.take(Counted(TEXTS), 10_000, 5_000).texts, "the same every time"
    assert 9_900 <= found.bytes <= 10_100
    numbers = [int(text.split()[1]) for text in found.texts]
    tenths = [sum(n // 100 == tenth for n in numbers) for tenth in range(10)]
    assert min(tenths) >= 9, f"every tenth of the source gives a tenth of the sample: {tenths}"
    assert 4_900 <= sum(map(len, found.others)) <= 5_100
    assert not set(found.texts) & set(found.others)
    assert "10.0 KB of 100.0 KB of text, spread over all of it" in found.words
    assert len(found.places) == len(found.texts) and len(found.other_places) == len(found.others)


def test_a_source_without_a_size_gives_its_beginning_and_says_so() -> None:
    source = Counted(TEXTS, None)
    found = sampling.take(source, 1_000)
    assert found.texts == TEXTS[:10] and source.read <= 11
    assert "the first 1.0 KB of text" in found.words and "does not say how large" in found.words
    assert "does not say" in sampling.take(First(EmbeddedCorpus(0, 500), 400), 1_000).words


def test_a_huge_source_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "READ_TIMES", 5)
    source = Counted(TEXTS)
    found = sampling.take(source, 2_000)
    assert source.read <= 102, "five times the sample is read"
    assert "spread over the first 10.0% of the source" in found.words


def test_one_long_text_is_sampled_in_pieces(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(200_000)]
    (tmp_path / "book.txt").write_text(" ".join(words))
    found = sampling.take(FileSource(find_files([str(tmp_path)])), 300_000)
    assert len(found.texts) > 3 and 250_000 < found.bytes < 450_000
    seen = [int(text.split()[-1].removeprefix("word")) for text in found.texts]
    assert seen[-1] > 150_000, "not only its beginning"


def test_nothing_is_an_error() -> None:
    with pytest.raises(BadData, match="no text"):
        sampling.take(Counted([""]), 1_000)
