"""Streaming: chunks, order, exact states, the end of the data, roll-back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamplighter.data.batches import NO_TARGET, Batch
from lamplighter.data.sources import Cursor, EmbeddedCorpus, Position
from lamplighter.data.split import Split
from lamplighter.data.stream import (
    AsItComes,
    Chunk,
    Filler,
    HeldOutTokens,
    ReadOnce,
    State,
    StreamBatches,
    StreamSettings,
    hold_back,
    load_state,
)
from lamplighter.data.tokenizer import Tokenizer, byte_level
from lamplighter.errors import BadData
from opening import open_source

ALL = Split("documents", 0, 0)


class Counted(EmbeddedCorpus):
    """Counts what is read, can break off and can be changed."""

    def __init__(self, documents: int = 60, broken_at: int = -1, other: int = -1) -> None:
        super().__init__(0, documents)
        self.read, self.broken_at, self.other = 0, broken_at, other
        self.starts: list[Cursor | None] = []

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        self.starts.append(start)
        for number, text in enumerate(super().documents(start), (start or {}).get("document", 0)):
            if number == self.broken_at:
                raise ConnectionError("the line is dead")
            self.read += 1
            yield text if number != self.other else "another text"


def filler(source: Any = None, tokenizer: Tokenizer | None = None, **changes: Any) -> Filler:
    given = {"seed": 1, "batch_size": 4, "seq_len": 32, "chunk_tokens": 4000, **changes}
    return Filler(source or Counted(), tokenizer or byte_level(), ALL, StreamSettings(**given))


def opened(filler: Filler, step: int = 1, state: dict[str, Any] | None = None) -> StreamBatches:
    source = StreamBatches(filler, HeldOutTokens(np.zeros(0, np.uint32), 0, 0))
    source.start(step, state)
    return source


def take(stream: StreamBatches, steps: int, first: int = 1) -> list[Batch]:
    found = []
    for step in range(first, first + steps):
        batch = stream.next(step)
        if batch is None:
            break
        found.append(batch)
    return found


def all_of(one: Filler, limit: int = 10_000) -> list[Batch]:
    stream = opened(one)
    try:
        return take(stream, limit)
    finally:
        stream.close()


def equal(one: Batch, other: Batch) -> bool:
    return bool(np.array_equal(one.inputs, other.inputs) and np.array_equal(one.targets, other.targets))


def test_every_token_of_an_epoch_is_a_target_exactly_once() -> None:
    batches = all_of(filler(repeat=False))
    tokenizer = byte_level()
    whole = [tokenizer.end_of_text]
    for text in EmbeddedCorpus(0, 60).documents():
        whole += [*tokenizer.encode(text).tolist(), tokenizer.end_of_text]
    seen = sum(batch.real_tokens for batch in batches)
    assert seen == len(whole) - 1
    windows = {int(s): row for batch in batches for s, row in zip(batch.samples, batch.targets, strict=True)}
    assert sorted(windows) == list(range(len(windows)))
    joined = np.concatenate([windows[s] for s in range(len(windows))])
    assert joined[joined != NO_TARGET].tolist() == whole[1:]
    assert all(len(batch.inputs) == 4 for batch in batches[:-1]) and len(batches[-1].inputs) <= 4


def test_the_windows_of_a_chunk_are_shuffled_and_those_of_different_chunks_do_not_mix() -> None:
    batches = all_of(filler(repeat=False))
    order = np.concatenate([batch.samples for batch in batches]).tolist()
    assert order != sorted(order)
    chunks = list(filler(repeat=False).chunks(State()))
    assert len(chunks) > 3
    for chunk in chunks:
        assert sorted(order[chunk.begin.sample : chunk.end.sample]) == list(range(chunk.begin.sample, chunk.end.sample))
    other = np.concatenate([batch.samples for batch in all_of(filler(repeat=False, seed=2))]).tolist()
    assert other != order and sorted(other) == sorted(order)


def test_chunks_do_not_depend_on_how_the_texts_are_gathered(monkeypatch: Any) -> None:
    from lamplighter.data import stream

    truth = [(c.begin, c.end) for c in filler(repeat=False).chunks(State())]
    for size in (1, 700, 1 << 30):
        monkeypatch.setattr(stream, "BATCH_BYTES", size)
        assert [(c.begin, c.end) for c in filler(repeat=False).chunks(State())] == truth


@pytest.mark.parametrize("first_part", [1 << 16, 500])
@pytest.mark.parametrize("chunk_tokens", [1024, 4000, 1_000_000])
def test_from_the_state_after_any_step_everything_is_the_same_again(
    chunk_tokens: int, first_part: int, monkeypatch: Any
) -> None:
    """Also where a batch is larger than a chunk, where an epoch is smaller than one, and where the first comes in parts."""
    monkeypatch.setattr("lamplighter.data.stream._FIRST_PART", first_part)
    one = opened(filler(chunk_tokens=chunk_tokens, batch_size=9))
    batches, states = [], [State().dump()]
    for step in range(1, 200):
        batch = one.next(step)
        assert batch is not None
        batches.append(batch)
        states.append(one.state(step))
    one.close()
    assert batches[-1].epoch > 1, "the source was read more than once"
    for step in (1, 2, 3, 50, 99, 120, 150, 180, 198):
        saved = json.loads(json.dumps(states[step]))
        assert load_state(saved) == load_state(states[step])
        source = Counted()
        again = opened(filler(source, chunk_tokens=chunk_tokens, batch_size=9), step + 1, saved)
        for truth in batches[step : step + 30]:
            batch = again.next(truth.step)
            assert batch is not None and equal(batch, truth) and abs(batch.epoch - truth.epoch) < 0.02
        again.close()
        assert source.starts[0] == states[step]["cursor"], "it went to the place at once"


def test_a_resume_reads_one_chunk_again_not_the_whole_stream() -> None:
    first = Counted(2000)
    one = opened(filler(first, chunk_tokens=8000))
    take(one, 800)
    state = one.state(800)
    one.close()
    assert state["document"] > 100
    source = Counted(2000)
    again = opened(filler(source, chunk_tokens=8000), 801, state)
    assert again.next(801) is not None
    again.close()
    assert source.starts == [{"document": state["document"]}]


def test_a_changed_source_is_refused_at_resume() -> None:
    one = opened(filler(Counted()))
    take(one, 70)
    state = one.state(70)
    one.close()
    assert state["digest"]
    again = opened(filler(Counted(other=state["document"] + 1)), 71, state)
    with pytest.raises(BadData, match="no longer what it was"):
        again.next(71)
    again.close()


def test_the_end_is_an_epoch_or_a_stop() -> None:
    stops = all_of(filler(repeat=False))
    stream = opened(filler(repeat=True))
    more = take(stream, 2 * len(stops))
    stream.close()
    assert len(more) == 2 * len(stops)
    assert [equal(a, b) for a, b in zip(stops[:-1], more, strict=False)] == [True] * (len(stops) - 1)
    assert more[-1].epoch >= 1


def test_max_chunks_ends_it() -> None:
    batches = all_of(filler(max_chunks=2))
    chunks = list(filler(max_chunks=2).chunks(State()))
    assert len(chunks) == 2 and sum(len(batch.inputs) for batch in batches) == chunks[-1].end.sample


def _windows(chunks: list[Chunk]) -> list[list[int]]:
    return [row for chunk in chunks for row in chunk.rows(np.arange(chunk.windows), 32, 0)[1].tolist()]


def test_the_first_step_waits_for_a_part_of_the_first_chunk_only(monkeypatch: Any) -> None:
    source = Counted(2000)
    whole = list(filler(source, chunk_tokens=300_000, repeat=False).chunks(load_state({"carry": []})))
    assert [chunk.end.chunk for chunk in whole] == list(range(1, len(whole) + 1)) and len(whole) > 2
    source.read = 0
    parts = filler(source, chunk_tokens=300_000, repeat=False).chunks(State())
    first = next(parts)
    assert 1 << 16 < first.windows * 32 + 1 < 1.2 * (1 << 16), "of 300,000 tokens"
    assert source.read < 600, "and of 2,000 documents"
    found = [first, *parts]
    assert [chunk.end.chunk for chunk in found] == [0, 0, 0, *range(1, len(whole) + 1)], "four parts are one chunk"
    assert _windows(found) == _windows(whole), "the same text in the same windows"
    assert found[3].end == whole[0].end


def test_chunks_in_parts_are_counted_as_one(monkeypatch: Any) -> None:
    monkeypatch.setattr("lamplighter.data.stream._FIRST_PART", 500)
    for chunks in (1, 2):
        whole = list(filler(max_chunks=chunks).chunks(load_state({"carry": []})))
        parts = list(filler(max_chunks=chunks).chunks(State()))
        assert len(parts) > len(whole) == chunks and _windows(parts) == _windows(whole)
        assert parts[-1].end == whole[-1].end


def test_a_chunk_that_an_older_version_began_is_not_divided(monkeypatch: Any) -> None:
    monkeypatch.setattr("lamplighter.data.stream._FIRST_PART", 500)
    saved = {name: value for name, value in State().dump().items() if name not in ("in_parts", "given")}
    chunk = next(filler().chunks(load_state(saved)))
    assert chunk.end.chunk == 1 and chunk.windows * 32 > 3900


def test_an_error_of_the_source_comes_after_what_was_read_before_it() -> None:
    stream = opened(filler(Counted(broken_at=40)))
    got = 0
    with pytest.raises(ConnectionError, match="the line is dead"):
        for step in range(1, 10_000):
            assert stream.next(step) is not None
            got += 1
    assert got > 50


def test_a_roll_back_goes_to_the_state_that_it_is_given() -> None:
    stream = opened(filler())
    first = take(stream, 30)
    state = stream.state(10)
    more = take(stream, 120, 31)
    assert more
    stream.start(11, state)
    back = [stream.next(step) for step in range(11, 31)]
    assert all(b is not None and equal(a, b) for a, b in zip(first[10:], back, strict=True))
    stream.close()


def test_one_chunk_is_filled_ahead_and_no_more() -> None:
    source = Counted(5000)
    stream = opened(filler(source, chunk_tokens=8000))
    take(stream, 2)
    deadline = threading.Event()
    for _ in range(50):
        before = source.read
        deadline.wait(0.05)
        if source.read == before:
            break
    assert 20 < source.read < 5000 / 5
    stream.close()


def test_nothing_but_validation_text_is_refused() -> None:
    nothing = Filler(Counted(5), byte_level(), Split("documents", (1 << 64) - 1, 0), StreamSettings(1, 4, 32, 4000))
    stream = opened(nothing)
    with pytest.raises(BadData, match="no text to train on"):
        stream.next(1)


# ---------------------------------------------------------------- what is held back


def test_what_is_held_back_is_never_trained_on(tmp_path: Path) -> None:
    source, tokenizer = EmbeddedCorpus(0, 400), byte_level()
    division, held = hold_back(tmp_path, ReadOnce(source), tokenizer, 0.1, 50_000)
    assert held.documents > 5 and held.read(0, 1)[0] == tokenizer.end_of_text
    ends = np.flatnonzero(held.ids == tokenizer.end_of_text)
    texts = {tokenizer.decode(held.ids[a + 1 : b]) for a, b in pairwise(ends)}
    assert len(texts) == held.documents and texts < set(source.documents())
    run = Filler(source, tokenizer, division, StreamSettings(1, 4, 64, 10_000, repeat=False))
    trained = np.concatenate([c.tokens[:-1] for c in run.chunks(State())])
    told = tokenizer.decode(trained[trained >= 0])
    assert not any(text in told for text in texts)
    held_back = {text: division.is_val(division.hashes([text.encode()]))[0] for text in source.documents()}
    assert all((text in told) != is_val for text, is_val in list(held_back.items())[:-1])


def test_what_was_looked_at_is_not_read_again(tmp_path: Path, monkeypatch: Any) -> None:
    from lamplighter import report

    phases: list[tuple[str, float | None]] = []
    real = report.phase
    monkeypatch.setattr(
        report, "phase", lambda name, total=None, unit="": phases.append((name, total)) or real(name, total, unit)
    )
    kept = Counted(300)
    source = ReadOnce(kept)
    division, _ = hold_back(tmp_path, source, byte_level(), 0.1, 50_000)
    assert phases == [("look at the documents", 50_000)]
    looked = kept.read
    assert 100 <= looked < 300
    settings = StreamSettings(1, 4, 32, 4000, repeat=False)
    found = list(Filler(source, byte_level(), division, settings).chunks(State()))
    assert kept.starts == [None] and kept.read == 300, "each document once"
    truth = list(Filler(Counted(300), byte_level(), division, settings).chunks(State()))
    assert [(c.begin, c.end, c.tokens.tolist()) for c in found] == [(c.begin, c.end, c.tokens.tolist()) for c in truth]
    assert len(list(source.documents())) == 300 and kept.starts == [None, None], "another epoch is read anew"
    middle = found[3].begin.cursor
    assert next(source.documents(middle)) == next(Counted(300).documents(middle))


def test_what_was_held_back_is_kept_and_checked(tmp_path: Path, monkeypatch: Any) -> None:
    said: list[str] = []
    from lamplighter import report

    monkeypatch.setattr(report, "warn", lambda text, **_: said.append(text))
    source, tokenizer = Counted(300), byte_level()
    first = hold_back(tmp_path, ReadOnce(source), tokenizer, 0.1, 50_000)
    again = hold_back(tmp_path, ReadOnce(source), tokenizer, 0.1, 50_000)
    assert len(source.starts) == 1 and again[0] == first[0] and np.array_equal(again[1].ids, first[1].ids)
    hold_back(tmp_path, ReadOnce(source), tokenizer, 0.2, 50_000)
    assert len(source.starts) == 2, "another share is another choice"
    path = tmp_path / "val.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    hold_back(tmp_path, ReadOnce(source), tokenizer, 0.2, 50_000)
    assert len(source.starts) == 3 and "damaged" in said[0]


def test_the_place_is_named_while_next_blocks() -> None:
    """The watcher's line: how much is gathered, from where, also when the source says nothing any more."""
    from lamplighter import report

    gate = threading.Event()
    seen: list[str] = []

    class Blocking(Counted):
        def documents(self, start: Cursor | None = None) -> Iterator[str]:
            for number, text in enumerate(super().documents(start)):
                if number == 7:
                    gate.wait(20)
                yield text

        def position(self) -> Position:
            return Position(f"shard 3, byte {self.read}", 0, super().position().cursor)

    real = report.Phase.set

    def spy(phase: Any, done: float, item: str | None = None) -> None:
        seen.append(f"{phase.name}: {done:.0f} {item}")
        if item and "at shard 3, byte 8" in item:
            gate.set()
        real(phase, done, item)

    stream = opened(filler(Blocking()))
    report.Phase.set = spy  # type: ignore[method-assign]
    try:
        assert stream.next(1) is not None
    finally:
        report.Phase.set = real  # type: ignore[method-assign]
        stream.close()
    assert gate.is_set() and any(line.startswith("fill chunk 0: ") and "samples" in line for line in seen)


def test_another_text_under_the_same_name_gets_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    """A stream is not hashed as a whole; a kept tokenizer must still not be that of a text which is gone."""
    path = tmp_path / "a.txt"
    marks = []
    for letter in "aba":
        path.write_text(f"{letter} " * 500)
        marks.append(AsItComes(open_source([str(path)])).fingerprint())
    assert marks[0] != marks[1] and marks[0] == marks[2]


def test_a_file_that_grew_by_a_line_is_another_stream(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    names = []
    for count in (30_000, 30_001):  # 1.2 MB both times
        path.write_text('{"text": "the same words each time"}\n' * count)
        source = open_source([str(path)])
        filler = Filler(source, byte_level(), ALL, StreamSettings(1, 4, 32, 4000))
        names.append(StreamBatches(filler, HeldOutTokens(np.zeros(0, np.uint32), 0, 0)).describe().name)
    assert names[0] != names[1]


def test_the_name_of_a_stream_is_frozen() -> None:
    """It is in the checkpoints of older runs: another spelling would refuse to resume them."""
    assert (
        StreamBatches(filler(), HeldOutTokens(np.zeros(0, np.uint32), 0, 0)).describe().name
        == "stream-405f12a9896db984"
    )


def test_a_tiny_source_does_not_flood_the_console(monkeypatch: Any) -> None:
    said: list[str] = []
    from lamplighter import report

    monkeypatch.setattr(report, "note", lambda text, **_: said.append(text))
    tiny = Filler(Counted(1), byte_level(), ALL, StreamSettings(1, 64, 32, 4000))
    stream = opened(tiny)
    for step in range(1, 40):
        stream.next(step)
    stream.close()
    assert "epoch 2 begins" in said[0] and len(said) < 30
