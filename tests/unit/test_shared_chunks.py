"""Ranks of one machine and a stream: it is read once, whoever reads, and each rank gets the chunks that it would have read itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamplighter.data.shared_chunks import SharedFiller
from lamplighter.data.sources import Cursor, EmbeddedCorpus
from lamplighter.data.split import Split
from lamplighter.data.stream import Chunk, Filler, State, Stopped, StreamSettings
from lamplighter.data.tokenizer import byte_level
from lamplighter.errors import BadData
from lamplighter.procs import procfs

ALL = Split("documents", 0, 0)
SETTINGS = StreamSettings(1, 4, 32, 2000, repeat=False)


class Counted(EmbeddedCorpus):
    """How many documents were read."""

    def __init__(self) -> None:
        super().__init__(0, 60)
        self.read = 0

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        for text in super().documents(start):
            self.read += 1
            yield text


def rank(folder: Path) -> SharedFiller:
    return SharedFiller(Counted(), byte_level(), ALL, SETTINGS, folder)


def same(one: Chunk, other: Chunk) -> bool:
    """The share of the bytes that are behind a place is only shown, and a little other after a look from there."""
    places = [[replace(place, share=0.0).dump() for place in (chunk.begin, chunk.end)] for chunk in (one, other)]
    return places[0] == places[1] and one.windows == other.windows and np.array_equal(one.tokens, other.tokens)


@pytest.fixture
def truth() -> list[Chunk]:
    return list(Filler(Counted(), byte_level(), ALL, SETTINGS).chunks(State()))


def test_two_ranks_read_a_stream_once_and_get_the_same_chunks(tmp_path: Path, truth: list[Chunk]) -> None:
    one, other = rank(tmp_path), rank(tmp_path)
    got = list(zip(one.chunks(State()), other.chunks(State()), strict=True))
    assert len(got) == len(truth) > 5
    assert all(same(a, chunk) and same(b, chunk) for (a, b), chunk in zip(got, truth, strict=True))
    assert (one.source.read, other.source.read) == (60, 0) and one.reads and not other.reads  # type: ignore[attr-defined]
    assert len(list(tmp_path.glob("*.npz"))) <= 4, "no more than ranks may still want"
    one.close()
    assert not list(tmp_path.glob("*.npz"))


def test_where_the_reader_dies_another_goes_on_at_its_place(tmp_path: Path, truth: list[Chunk]) -> None:
    one, other = rank(tmp_path), rank(tmp_path)
    first, second = one.chunks(State()), other.chunks(State())
    got = [(next(first), next(second))[1] for _ in range(3)]
    os.close(one.lock_fd)  # as the kernel does
    got += list(second)
    assert all(same(chunk, wanted) for chunk, wanted in zip(got, truth, strict=True))
    assert other.reads and 0 < other.source.read < 60  # type: ignore[attr-defined]


def test_a_rank_waits_for_the_reader_and_not_for_one_that_is_stopped(
    tmp_path: Path, truth: list[Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = rank(tmp_path), rank(tmp_path)
    assert one._lead()
    got: list[Any] = []

    def wait() -> None:
        try:
            got.append(next(other.chunks(State())))
        except Stopped as stopped:
            got.append(stopped)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and other.now.words("x") == "another rank of this machine reads it"
    other.close()
    thread.join(10)
    assert isinstance(got.pop(), Stopped), "who waits can be told to stop"
    other.stop.clear()
    monkeypatch.setattr(procfs, "look", lambda pid: procfs.ProcessLook(pid, "T"))
    wait()
    assert same(got[0], truth[0])


def test_who_comes_late_or_cannot_share_reads_for_itself(tmp_path: Path, truth: list[Chunk]) -> None:
    one, late = rank(tmp_path), rank(tmp_path)
    assert len(list(one.chunks(State()))) == len(truth), "its first chunks are taken away meanwhile"
    assert all(same(chunk, wanted) for chunk, wanted in zip(late.chunks(State()), truth, strict=True))
    assert not late.reads
    (tmp_path / "file").write_text("")
    alone = rank(tmp_path / "file")
    assert all(same(chunk, wanted) for chunk, wanted in zip(alone.chunks(State()), truth, strict=True))
    assert alone.alone


def test_other_text_than_before_a_resume_is_told_by_every_rank(tmp_path: Path) -> None:
    one, other = rank(tmp_path), rank(tmp_path)
    next(one.chunks(State()))
    for filler in (one, other):
        with pytest.raises(BadData, match="is no longer what it was"):
            next(filler.chunks(State(digest="0123456789abcdef")))
