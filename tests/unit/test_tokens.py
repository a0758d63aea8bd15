"""The token cache: nothing lost or doubled, never mixed up, never half built, and it says what it does."""

from __future__ import annotations

import errno
import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamplighter import report
from lamplighter.data import split as division
from lamplighter.data.sources import Cursor, EmbeddedCorpus, Part, Position, Source
from lamplighter.data.token_cache import builder, units
from lamplighter.data.token_cache.reader import CachedStream, CacheSettings, Tokens, open_tokens
from lamplighter.data.tokenizer import Tokenizer, byte_level, load
from lamplighter.errors import BadConfig, BadData, CannotWrite, InputMissing, LampError
from lamplighter.readers import files as reader_files
from lamplighter.readers import ranges
from lamplighter.readers.records import cut_all, digest
from opening import ensure, open_source
from running import SHARED, shared


class Texts:
    """A source for tests: a list."""

    def __init__(self, texts: list[str], name: str = "") -> None:
        self.texts, self.name, self.number = texts, name, 0

    def __str__(self) -> str:
        return f"{len(self.texts)} texts"

    def fingerprint(self) -> str:
        return digest([self.texts, self.name])

    def total_bytes(self) -> int | None:
        return sum(len(text.encode()) for text in self.texts)

    def position(self) -> Position:
        done = sum(len(text.encode()) for text in self.texts[: self.number])
        return Position(f"text {self.number}", done, {"document": self.number})

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        self.number = (start or {}).get("document", 0)
        for text in self.texts[self.number :]:
            self.number += 1
            yield text


@pytest.fixture
def notes(monkeypatch: Any) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(report, "note", lambda text, **_: said.append(text))
    monkeypatch.setattr(report, "verdict", lambda verdict: said.append(verdict.why))
    return said


def made(folder: Path, texts: list[str] | Source, val: float = 0.1, shard: int = 50_000, verify: bool = True) -> Tokens:
    source = Texts(texts) if isinstance(texts, list) else texts
    return open_tokens(ensure(folder, source, byte_level(), CacheSettings(val, 0, shard)), verify)


def letters(count: int, seed: int = 0) -> list[str]:
    return list(EmbeddedCorpus(seed, count).documents())


def documents(split: CachedStream, tokenizer: Tokenizer | None = None) -> list[str]:
    """The stream taken apart at its marks; checked against the index."""
    tokenizer = tokenizer or byte_level()
    ids = split.read(0, len(split))
    if not len(ids):
        return []
    ends = np.flatnonzero(ids == tokenizer.end_of_text)
    assert ends[0] == 0 and ends[-1] == len(ids) - 1
    assert (ends[:-1] + 1).tolist() == split.document_starts().tolist()
    assert len(ends) - 1 == split.documents
    return [tokenizer.decode(ids[a + 1 : b]) for a, b in pairwise(ends)]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


# ---------------------------------------------------------------- what is in it


def test_every_document_is_there_once_on_one_side(tmp_path: Path) -> None:
    texts = [*letters(300), "", "ends with a space ", "🙂 naïve <|endoftext|> £"]
    cache = made(tmp_path, texts, shard=1000)
    train, val = documents(cache.train), documents(cache.val)
    assert Counter(train + val) == Counter(text for text in texts if text)
    assert 10 < len(val) < 60
    assert [text for text in texts if text in set(train)] == train, "in the order of the source"
    assert cache.train.text_bytes == sum(len(text.encode()) for text in train)
    assert len(cache.train) == cache.train.text_bytes + len(train) + 1
    assert cache.manifest["empty_documents"] == 1 and cache.manifest["divided_by"] == "documents"
    assert len(cache.train.shards) > 50 and max(map(len, cache.train.shards)) < 3000


def test_equal_documents_are_never_on_both_sides(tmp_path: Path) -> None:
    texts = letters(120) * 5
    random.Random(0).shuffle(texts)
    cache = made(tmp_path, texts, val=0.3)
    train, val = set(documents(cache.train)), set(documents(cache.val))
    assert train and val and not train & val


def test_the_overlap_check_can_fire(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(division.Split, "is_val", lambda self, hashes: np.arange(len(hashes)) % 2 == 1)
    with pytest.raises(BadData, match="validation text is also in"):
        made(tmp_path, [f"one text {n // 2}" for n in range(200)])


def test_the_seed_and_the_share_decide_the_division(tmp_path: Path) -> None:
    texts = letters(1000)
    seen = {}
    for seed, val in ((0, 0.1), (1, 0.1), (0, 0.2)):
        cache = open_tokens(ensure(tmp_path, Texts(texts), byte_level(), CacheSettings(val, seed)))
        seen[seed, val] = set(documents(cache.val))
        assert 0.7 < len(seen[seed, val]) / (1000 * val) < 1.3
    assert seen[0, 0.1] != seen[1, 0.1]
    assert seen[0, 0.1] <= seen[0, 0.2], "a larger share only adds"


def test_few_documents_are_divided_by_blocks(tmp_path: Path) -> None:
    texts = ["\n".join(letters(400, seed)) for seed in range(3)] + ["short"]
    cache = made(tmp_path, texts, val=0.1)
    assert cache.manifest["divided_by"] == "blocks"
    train, val = documents(cache.train), documents(cache.val)
    assert len(val) > 5 and 0.04 < sum(map(len, val)) / sum(map(len, texts)) < 0.2
    assert Counter("".join(train + val)) == Counter("".join(texts)), "not a character is lost"
    whole = "\0".join(texts)
    assert all(run in whole for run in train + val), "neighbouring blocks of one side stay together"
    assert max(map(len, train)) > 3 * division.BLOCK_BYTES
    again = made(tmp_path / "again", [*texts[1:], texts[0]], val=0.1)
    assert set(documents(again.val)) == set(val), "by the text of the block, not its place"


def test_neither_side_comes_out_empty(tmp_path: Path) -> None:
    for number, (count, val) in enumerate([(150, 1e-9), (150, 0.999999), (3, 1e-9), (3, 0.999999)]):
        cache = made(tmp_path / str(number), [text * 30 for text in letters(count)], val=val)
        assert cache.train.documents and cache.val.documents
    fewest = made(tmp_path / "two", ["one", "two"], val=0.1)
    assert sorted(documents(fewest.train) + documents(fewest.val)) == ["one", "two"]


def test_too_little_to_divide_is_said(tmp_path: Path) -> None:
    for texts in (["only one"], ["the same"] * 200):
        with pytest.raises(BadData) as caught:
            made(tmp_path, texts)
        assert "val_fraction 0" in caught.value.next
    cache = made(tmp_path, ["only one"], val=0)
    assert documents(cache.train) == ["only one"] and len(cache.val) == cache.val.documents == 0
    assert documents(cache.val) == []
    with pytest.raises(BadConfig):
        CacheSettings(val_fraction=1.0)


@pytest.mark.parametrize("many", [False, True])
def test_a_document_in_parts_is_one_document(tmp_path: Path, monkeypatch: Any, many: bool) -> None:
    monkeypatch.setattr(reader_files, "PART_CHARS", 5000)
    monkeypatch.setattr(ranges, "PART_BYTES", 5000)
    path = tmp_path / "long.txt"
    texts = ["\n".join(letters(60, seed)) for seed in range(3)] + (letters(200) if many else [])
    path.write_text("<sep>".join(texts))
    source = open_source([str(path)], None, "<sep>")
    assert sum(isinstance(text, Part) for text in source.documents()) > 8
    tokenizer = load(shared("tokenizers", "gpt2"))
    cache = open_tokens(ensure(tmp_path, source, tokenizer, CacheSettings(0.1, 0, 9000)), verify=True)
    both = documents(cache.train, tokenizer) + documents(cache.val, tokenizer)
    if many:
        assert sorted(both) == sorted(texts)
        whole = sum(len(tokenizer.encode(text)) for text in texts)
        assert len(cache.train) + len(cache.val) == whole + len(texts) + 2, "the very tokens of the whole text"
    else:
        assert cache.manifest["divided_by"] == "blocks"
        assert sum(map(len, both)) == sum(map(len, texts))


def test_real_web_text_with_its_duplicates(tmp_path: Path) -> None:
    source = open_source([str(shared("web", "slimpajama_like"))])
    texts = list(source.documents())
    assert len(set(texts)) < len(texts)
    tokenizer = load(shared("tokenizers", "gpt2"))
    cache = open_tokens(ensure(tmp_path, source, tokenizer, CacheSettings(0.1)), verify=True)
    train, val = documents(cache.train, tokenizer), documents(cache.val, tokenizer)
    assert Counter(train + val) == Counter(texts) and not set(train) & set(val)
    assert cache.manifest["dtype"] == "<u2" and cache.manifest["vocab_size"] == tokenizer.vocab_size
    if SHARED.is_dir():
        assert len(set(texts)) == len(texts) - 6 and cache.manifest["vocab_size"] == 50257
        assert 890_000 < len(cache.train) + len(cache.val) < 910_000


def test_real_books_have_both_sides(tmp_path: Path) -> None:
    path = shared("tinyshakespeare", "input.txt")
    source = open_source([str(path)])
    cache = open_tokens(ensure(tmp_path, source, byte_level(), CacheSettings(0.05)))
    assert cache.train.text_bytes + cache.val.text_bytes == path.stat().st_size > 1_000_000
    assert 0.03 < cache.val.text_bytes / path.stat().st_size < 0.08


# ---------------------------------------------------------------- reading


def test_reading_over_shard_borders(tmp_path: Path) -> None:
    cache = made(tmp_path, letters(150), shard=257)
    split = cache.train
    whole = np.concatenate(split.shards).astype(np.int64)
    rng = np.random.default_rng(0)
    for length in (1, 5, 256, 257, 258, 1000):
        starts = rng.integers(0, len(split) - length + 1, 200)
        starts[:2] = 0, len(split) - length
        got = split.gather(starts, length)
        assert got.dtype == np.int64 and got.shape == (200, length)
        assert np.array_equal(got, whole[starts[:, None] + np.arange(length)])
        assert np.array_equal(split.read(int(starts[5]), int(starts[5]) + length), got[5])
    assert split.gather(np.zeros(0, np.int64), 5).shape == (0, 5)
    for bad in (-1, len(split) - 4):
        with pytest.raises(IndexError):
            split.gather(np.array([0, bad]), 5)
    with pytest.raises(IndexError):
        split.read(0, len(split) + 1)


def test_large_vocabularies_use_four_bytes(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.vocab_size = 70_000
    cache = open_tokens(ensure(tmp_path, Texts(letters(150)), tokenizer, CacheSettings()))
    assert cache.train.dtype == np.dtype("<u4") and int(cache.train.read(0, 1)[0]) == 256


# ---------------------------------------------------------------- which cache, and why


def test_it_says_what_it_did_and_what_changed(tmp_path: Path, notes: list[str]) -> None:
    texts = letters(150)
    first = ensure(tmp_path, Texts(texts), byte_level(), CacheSettings(0.1))
    assert "building the token cache" in notes[0] and "the first" in notes[0] and "tokens from" in notes[1]
    before = content(first)
    assert ensure(tmp_path, Texts(texts), byte_level(), CacheSettings(0.1)) == first
    assert "reused" in notes[-1]
    assert ensure(tmp_path, Texts(texts), byte_level(), CacheSettings(0.1), "rebuild") == first
    assert "rebuilt" in notes[-2] and content(first) == before
    assert ensure(tmp_path, Texts(texts), byte_level(), CacheSettings(0.2)) != first
    assert "settings changed (val_fraction: 0.1 -> 0.2)" in notes[-2]
    ensure(tmp_path, Texts([*texts, "one more"]), byte_level(), CacheSettings(0.2))
    assert "sources changed (150 texts -> 151 texts)" in notes[-2] and "tokenizer" not in notes[-2]
    other = byte_level()
    other.fingerprint = lambda: "another"  # type: ignore[method-assign]
    ensure(tmp_path, Texts(texts), other, CacheSettings(0.2))
    assert "tokenizer changed" in notes[-2] and "settings" not in notes[-2]


def test_required_caches_are_not_built(tmp_path: Path) -> None:
    texts = letters(150)
    with pytest.raises(InputMissing) as caught:
        ensure(tmp_path, Texts(texts), byte_level(), CacheSettings(), "require")
    assert "no cache for this tokenizer" in caught.value.why
    folder = ensure(tmp_path, Texts(texts), byte_level(), CacheSettings())
    assert ensure(tmp_path, Texts(texts), byte_level(), CacheSettings(), "require") == folder
    with pytest.raises(InputMissing) as caught:
        ensure(tmp_path, Texts(texts[1:]), byte_level(), CacheSettings(), "require")
    assert "sources changed" in caught.value.why and caught.value.code == 66
    (folder / "train-00000.bin").write_bytes(b"")
    with pytest.raises(BadData, match="damaged"):
        ensure(tmp_path, Texts(texts), byte_level(), CacheSettings(), "require")


def test_a_cut_shard_is_named_and_rebuilt(tmp_path: Path, notes: list[str]) -> None:
    cache = made(tmp_path, letters(150), shard=1000)
    path = cache.folder / "train-00003.bin"
    before, size = content(cache.folder), path.stat().st_size
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(BadData) as caught:
        open_tokens(cache.folder)
    assert str(path) in caught.value.why and f"1,000 bytes, expected {size:,}" in caught.value.why
    made(tmp_path, letters(150), shard=1000)
    assert any("rebuilt" in note and f"expected {size:,}" in note for note in notes)
    assert content(cache.folder) == before
    path.unlink()
    with pytest.raises(BadData, match="cannot open"):
        open_tokens(cache.folder)
    (cache.folder / "manifest.json").write_text("{")
    with pytest.raises(BadData):
        open_tokens(cache.folder)
    with pytest.raises(InputMissing):
        open_tokens(tmp_path / "nowhere")


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    cache = made(tmp_path, letters(150))
    path = cache.folder / "val-00000.bin"
    data = bytearray(path.read_bytes())
    data[77] ^= 4
    path.write_bytes(data)
    open_tokens(cache.folder, verify=False)
    with pytest.raises(BadData) as caught:
        open_tokens(cache.folder, verify=True)
    assert str(path) in caught.value.what and "sha256" in caught.value.why


def test_ids_out_of_range_are_named_with_their_place(tmp_path: Path) -> None:
    cache = made(tmp_path, letters(150), shard=1000)
    cache.check_ids(257)
    with pytest.raises(BadData) as caught:
        cache.check_ids(256)
    first = int(np.argmax(cache.train.shards[1] == 256))
    assert f"train-00000.bin:{first}" in caught.value.what and "id 256" in caught.value.why
    path = cache.folder / "train-00002.bin"
    ids = np.frombuffer(path.read_bytes(), "<u2").copy()
    ids[123] = 60_000
    path.write_bytes(ids.tobytes())
    with pytest.raises(BadData) as caught:
        open_tokens(cache.folder).check_ids(257)
    assert "train-00002.bin:123" in caught.value.what and "60,000" in caught.value.why
    tokenizer = byte_level()
    tokenizer.vocab_size = 200
    with pytest.raises(BadData) as caught:
        ensure(tmp_path / "b", Texts(letters(150)), tokenizer, CacheSettings())
    assert ".bin:" in caught.value.what and "200 tokens" in caught.value.why


# ---------------------------------------------------------------- killed, full, shared


class Stop(BaseException):
    """As good as a kill: nothing of ours catches it."""


@pytest.mark.parametrize("by", ["documents", "blocks"])
def test_stopped_before_any_write_it_ends_the_same(tmp_path: Path, monkeypatch: Any, by: str) -> None:
    """Every place where a file is written or removed, in turn; long documents, in parts."""
    texts = []
    for seed in range(130 if by == "documents" else 4):
        texts += cut_all("\n".join(letters(3 if by == "documents" else 60, seed)), 300)
    tokenizer = byte_level()
    tokenizer.batch_bytes = 3000
    settings = CacheSettings(0.2, 0, 9_000)
    truth = content(ensure(tmp_path / "whole", Texts(texts), tokenizer, settings))
    assert json.loads(truth["manifest.json"])["divided_by"] == by
    real = {(where, name): getattr(where, name) for where, name in ((builder, "write_atomic"), (Path, "unlink"))}
    real[units.os, "write"] = units.os.write
    left = [0]

    def counting(function: Any) -> Any:
        def call(*words: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Stop
            return function(*words, **named)

        return call

    for (where, name), function in real.items():
        monkeypatch.setattr(where, name, counting(function))
    stops = 0
    for pace in (1, 4, 13):
        for attempt in range(400):
            left[0] = pace + 2 * attempt  # at 1, nothing at all would ever get done
            try:
                folder = ensure(tmp_path / f"torn{pace}", Texts(texts), tokenizer, settings)
            except Stop:
                stops += 1
                continue
            break
        left[0] = 0
        assert content(folder) == truth, f"stopped after every {pace} writes"
    assert stops > 40


def test_room_is_checked_first(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(builder, "free_bytes", lambda path: 10_000)
    with pytest.raises(CannotWrite) as caught:
        made(tmp_path, letters(500))
    assert caught.value.code == 73 and "10.0 KB are free" in caught.value.why and "needs about 4" in caught.value.why


def test_a_full_disk_keeps_what_is_done(tmp_path: Path, monkeypatch: Any, notes: list[str]) -> None:
    truth = content(made(tmp_path / "whole", letters(300), shard=5000).folder)
    real, written = units.os.write, []

    def filling(fd: int, data: Any) -> int:
        written.append(len(data))
        if len(written) > 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(real(fd, data))

    monkeypatch.setattr(units.os, "write", filling)
    tokenizer = byte_level()
    tokenizer.batch_bytes = 5000
    with pytest.raises(CannotWrite) as caught:
        ensure(tmp_path / "torn", Texts(letters(300)), tokenizer, CacheSettings(0.1, 0, 5000))
    assert "the finished shards are kept" in caught.value.next
    monkeypatch.undo()
    notes.clear()
    said: list[str] = []
    monkeypatch.setattr(report, "note", lambda text, **_: said.append(text))
    folder = ensure(tmp_path / "torn", Texts(letters(300)), tokenizer, CacheSettings(0.1, 0, 5000))
    assert any("goes on after" in note for note in said)
    assert content(folder) == truth


def test_a_slow_source_loses_little(tmp_path: Path, monkeypatch: Any) -> None:
    """Long before a shard is full, what was read is kept: here after every text."""
    texts = letters(150)
    truth = content(made(tmp_path / "whole", texts).folder)
    asked: list[int] = []

    class Breaking(Texts):
        broken = True

        def documents(self, start: Cursor | None = None) -> Iterator[str]:
            asked.append((start or {}).get("document", 0))
            for number, text in enumerate(super().documents(start), asked[-1]):
                if number == 120 and self.broken and len(asked) > 1:
                    raise ConnectionError("the line is dead")
                yield text

    monkeypatch.setattr(builder, "COMMIT_S", -1.0)
    source = Breaking(texts)
    with pytest.raises(ConnectionError):
        made(tmp_path / "torn", source)
    source.broken = False
    assert content(made(tmp_path / "torn", source).folder) == truth
    assert asked == [0, 0, 120]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite):
        made(tmp_path / "file", letters(10))


def test_the_watcher_sees_what_is_waited_for(tmp_path: Path) -> None:
    """While the source blocks in next(), the slot already names the text."""
    seen: list[tuple[str, str]] = []

    class Watched(Texts):
        def documents(self, start: Cursor | None = None) -> Iterator[str]:
            for text in super().documents(start):
                slot = report._reporter.slot
                seen.append((slot.get_text("phase"), slot.get_text("phase_item")))
                yield text

    with report.phase("cache"):
        made(tmp_path, Watched(letters(120)))
    assert ("cache > look at the documents", "text 7") in seen
    assert ("cache > tokenise", "text 119") in seen


def test_a_users_fault_passes_through_and_can_be_mended(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": text}) for text in letters(400)]
    path.write_text("\n".join([*rows, *['{"text": 7}'] * 9]))
    tokenizer = byte_level()
    with pytest.raises(LampError, match="401"):
        ensure(tmp_path / "cache", open_source([str(path)]), tokenizer, CacheSettings(0.1, 0, 5000))
    path.write_text("\n".join(rows))
    folder = ensure(tmp_path / "cache", open_source([str(path)]), tokenizer, CacheSettings(0.1, 0, 5000))
    assert sorted(documents(open_tokens(folder).train) + documents(open_tokens(folder).val)) == sorted(letters(400))
