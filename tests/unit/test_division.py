"""Ranges of files: the documents, faults and sides are those of the whole, wherever a file is cut."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamplighter import report
from lamplighter.data.sources import FileSource, Part
from lamplighter.data.split import CacheSettings, Split, Splitter
from lamplighter.data.token_cache import builder, encoder, units
from lamplighter.data.token_cache.reader import open_tokens
from lamplighter.data.tokenizer import byte_level
from lamplighter.errors import BadData
from lamplighter.readers import bad_records, ranges
from lamplighter.readers.ranges import TextBlock
from opening import ensure, open_source


def by_source(source: FileSource) -> tuple[list[str], list[Any]]:
    """Documents and faults as the source itself finds them."""
    source.bad = bad_records.BadRecords(limit=math.inf, quiet=True)
    documents, now = [], ""
    try:
        for text in source.documents():
            now += text
            if not isinstance(text, Part):
                documents.append(now)
                now = ""
    except BadData as error:
        assert error.what.startswith("no text in")
    return [text for text in documents if text], sorted(map(json.dumps, source.bad.listed))


def by_units(source: FileSource, unit_bytes: int) -> tuple[list[str], list[Any]]:
    """The same, unit by unit, each on its own."""
    plan = units.plan(source, CacheSettings(0.1, 0, unit_bytes))
    assert plan is not None
    documents, now, faults = [], b"", []
    for unit in plan.units:
        own = plan.how.bad_records()
        for span in unit.spans:
            for stretch, behind in ranges.read(span, plan.how, own.begin()):
                assert 0 <= behind <= span.stop - span.start
                assert stretch.opened or not now
                for number, doc in enumerate(stretch.docs):
                    now += doc
                    if not (stretch.open and number == len(stretch.docs) - 1):
                        documents.append(now.decode())
                        now = b""
        faults += own.listed
    assert not now
    return [text for text in documents if text], sorted(map(json.dumps, faults))


def some_file(rng: random.Random, kind: str, separator: str | None) -> bytes:
    alphabet = rng.choice(["ab \n", "abcdefgh   \n", "aé£ \n漢", "a\n", "ab漢字", "word \r\n"])

    def text(size: int) -> str:
        return "".join(rng.choices(alphabet, k=size))

    if kind == "json":
        odd = [
            b'{"text": 7}',
            b'\xff{"text":"x"}',
            b"  ",
            b'{"text":"\\ud800"}',
            b'{"text":"a\0"}',
            b"[1]",
            b'{"text":""}',
        ]
        rows = [
            json.dumps({"n": 1, "text": text(rng.choice([3, 40, 700]))}).encode() for _ in range(rng.choice([3, 60]))
        ]
        for _ in range(rng.choice([0, 5])):
            rows.insert(rng.randrange(len(rows)), rng.choice(odd))
        data = rng.choice([b"\n", b"\r\n"]).join(rows) + rng.choice([b"", b"\n"])
    else:
        texts = [text(rng.choice([0, 3, 50, 500, 1500])) for _ in range(rng.choice([1, 15]))]
        raw = bytearray((separator or "\n").join(texts).encode() or b"x")
        for _ in range(rng.choice([0, 0, 1, 8])):
            raw[rng.randrange(len(raw))] = rng.choice([0, 0x80, 0xC3, 0xFF])
        data = bytes(raw)
    return (b"\xef\xbb\xbf" if rng.random() < 0.2 else b"") + data


@pytest.mark.parametrize("kind", ["plain", "json", "\n\n", "<sep>", "a\na", "é"])
def test_the_documents_are_the_same_however_files_are_cut(tmp_path: Path, monkeypatch: Any, kind: str) -> None:
    monkeypatch.setattr(ranges, "NEAR", 300)
    rng = random.Random(kind)
    separator = None if kind in ("plain", "json") else kind
    cut = False
    for number in range(25):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in range(rng.choice([1, 3])):
            (folder / f"{name}.{'jsonl' if kind == 'json' else 'txt'}").write_bytes(some_file(rng, kind, separator))
        source = open_source([str(folder)], None, separator)
        assert isinstance(source, FileSource)
        expected = by_source(source)
        monkeypatch.setattr(ranges, "PART_BYTES", rng.choice([40, 1000, 1 << 20]))
        unit_bytes = rng.choice([50, 333, 5000])
        assert by_units(source, unit_bytes) == expected, (number, unit_bytes)
        plan = units.plan(source, CacheSettings(0.1, 0, unit_bytes))
        cut = cut or (plan is not None and len(plan.units) > 5)
    assert cut


def test_packed_files_and_small_ones_go_together_and_large_ones_are_cut(tmp_path: Path) -> None:
    import gzip

    for number in range(10):
        (tmp_path / f"small{number}.txt").write_text(f"text {number} " * 10)
    (tmp_path / "large.txt").write_text("word " * 1000)
    (tmp_path / "large.jsonl").write_text('{"text": "some words"}\n' * 200)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(b"packed words " * 3000))
    source = open_source([str(tmp_path)])
    plan = units.plan(source, CacheSettings(0.1, 0, 1000))
    assert plan is not None
    spans = [span for unit in plan.units for span in unit.spans]
    assert sum(span.stop - span.start for span in spans) == source.total_bytes()
    assert [span.kind for span in spans if span.path.endswith("packed.txt.gz")] == ["file"]
    assert len([span for span in spans if span.path.endswith("large.txt")]) == 5
    assert len([span for span in spans if span.path.endswith("large.jsonl")]) == 5
    assert max(len(unit.spans) for unit in plan.units) > 4, "small files go together"
    assert by_units(source, 1000) == by_source(source)  # type: ignore[arg-type]
    assert units.plan(open_source([]), CacheSettings()) is None, "texts that only their source can read"


def stream(tmp_path: Path, name: str, source: FileSource, unit_bytes: int, val: float = 0.2) -> tuple[Any, ...]:
    cache = open_tokens(ensure(tmp_path / name, source, byte_level(), CacheSettings(val, 0, unit_bytes)), verify=True)
    both = tuple(split.read(0, len(split)).tobytes() for split in (cache.train, cache.val))
    assert cache.train.documents == len(cache.train.document_starts())
    return *both, cache.manifest["divided_by"], len(cache.train.paths), cache.train.documents


@pytest.mark.parametrize("count", [1, 120])
def test_one_long_text_in_many_units_is_the_same_stream(tmp_path: Path, monkeypatch: Any, count: int) -> None:
    """By blocks, a run goes on over the border of two units; by documents, a long one stays on one side."""
    monkeypatch.setattr(ranges, "PART_BYTES", 10_000)
    rng = random.Random(3)
    for number in range(count):
        words = rng.choices(["lamp", "fog", "naïve", "of\n", "the", "goose.", "1837"], k=30_000 if number == 0 else 20)
        (tmp_path / f"{number:03d}.txt").write_text(" ".join(words))
    source = open_source([str(tmp_path)])
    assert isinstance(source, FileSource)
    whole = stream(tmp_path, "whole", source, 1_000_000)
    assert whole[2] == ("blocks" if count == 1 else "documents") and whole[3] == 1
    for unit_bytes in (10_000, 30_000):
        cut = stream(tmp_path, str(unit_bytes), source, unit_bytes)
        assert cut[3] > 3 and (cut[:3], cut[4]) == (whole[:3], whole[4])
    nothing_held_back = stream(tmp_path, "none", source, 10_000, val=0)
    assert nothing_held_back[4] == count, "where nothing is held back, no document is broken up"


def test_an_empty_part_neither_begins_nor_ends_a_document() -> None:
    divider = Splitter(Split("documents", 1 << 63, 0))
    first = divider.pieces(TextBlock([b"one", b""], open=True))
    assert first.texts == [b"one"] and divider.open_val is None and divider.empty == 0
    second = divider.pieces(TextBlock([b"begins here"], opened=True, open=True))
    assert second.begins.tolist() == [True] and second.ends.tolist() == [False]
    assert divider.pieces(TextBlock([b""], opened=True, open=True)).texts == []
    last = divider.pieces(TextBlock([b"", b"", b"next"], opened=True))
    assert last.texts == [b"", b"next"] and last.begins.tolist() == [False, True] and divider.empty == 1
    assert last.val[0] == second.val[0]


def test_bad_lines_are_judged_over_the_whole_file(tmp_path: Path, monkeypatch: Any) -> None:
    """Each is told once with its line, however the file is cut; too many of them are refused."""
    told: list[tuple[int, int]] = []
    warned: list[str] = []
    monkeypatch.setattr(report, "event", lambda type, **f: told.append((f["line"], f["byte"])))
    monkeypatch.setattr(report, "warn", lambda text, **_: warned.append(text))
    lines = [b"line %d of the file\n" % number for number in range(5000)]
    lines[7], lines[4990] = b"b\0d\n", b"caf\xe9 au lait\n"
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join(lines))
    ensure(tmp_path / "c", open_source([str(path)]), byte_level(), CacheSettings(0.1, 0, 5000))
    places = [sum(map(len, lines[:at])) + add for at, add in ((7, 1), (4990, 3))]
    assert told == [(8, places[0]), (4991, places[1])]
    assert warned == [f"2 of 5,000 lines of {path} set aside, as not text"]
    for at in range(0, 5000, 300):
        lines[at] = b"caf\xe9\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(BadData, match="not text") as caught:
        ensure(tmp_path / "c", open_source([str(path)]), byte_level(), CacheSettings(0.1, 0, 5000))
    assert "of 5,000 lines" in caught.value.why and "data.bad_limit" in caught.value.why
    assert "no more than a tenth" in caught.value.why
    with pytest.raises(BadData, match=f"{path}:1, byte 3"):
        refusing = open_source([str(path)], None, None, bad_text="refuse")
        ensure(tmp_path / "c", refusing, byte_level(), CacheSettings(0.1, 0, 5000))


def test_an_encoder_that_has_grown_is_made_anew(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{number} words and {number * 7} more\n" for number in range(5000)))
    source = open_source([str(path)])
    assert isinstance(source, FileSource)
    before = stream(tmp_path, "before", source, 20_000)
    made: list[int] = []
    real = encoder.make_encoder
    monkeypatch.setattr(encoder, "make_encoder", lambda *words: made.append(1) or real(*words))
    monkeypatch.setattr(encoder, "GROWN_BYTES", -(1 << 40))
    assert stream(tmp_path, "after", source, 20_000) == before and len(made) > 3


def test_the_overlap_is_found_in_any_range_of_hashes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(builder, "OVERLAP_HASHES", 3)
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 1 << 64, 40, np.uint64)
    one = builder.Builder(tmp_path, byte_level(), CacheSettings())
    for shared in (0, 39, None):
        val, train = hashes[:20], hashes[20:]
        if shared is not None:
            train = np.append(train, np.sort(hashes[:20])[shared // 2])
        val.tofile(tmp_path / "val-00000.hash")
        train.tofile(tmp_path / "train-00000.hash")
        record = {"files": {"val-00000.hash": {}, "train-00000.hash": {}}}
        if shared is None:
            one._check_overlap([record])
        else:
            with pytest.raises(BadData, match=r"validation text is also in train-00000\.bin"):
                one._check_overlap([record])


# ---------------------------------------------------------------- files that change, and files that are many


def _append(path: Path) -> None:
    with open(path, "a") as file:
        file.write('{"text": "one more"}\n')


def _edit(path: Path) -> None:
    """As many bytes as before, and the date of before."""
    before = path.stat()
    path.write_bytes(path.read_bytes().swapcase())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _wait_for_the_clock_of_files(path: Path) -> None:
    """Until a write has another time stamp than the latest one of `path`: they go by some milliseconds."""
    probe, until = path.with_name("probe"), time.monotonic() + 5
    while time.monotonic() < until:
        probe.write_text("")
        if probe.stat().st_ctime_ns > path.stat().st_ctime_ns:
            return
        time.sleep(0.001)


MOMENTS = ["before a unit", "after a unit was read", "after the hash"]


@pytest.mark.parametrize("change", [_append, _edit])
@pytest.mark.parametrize(
    ("name", "moment"),
    [
        *((name, moment) for name in ("a.jsonl", "a.txt") for moment in MOMENTS),
        *(("a.jsonl.gz", moment) for moment in MOMENTS[::2]),  # read to its end before its first document is handed on
    ],
)
def test_a_file_that_changes_while_it_is_prepared_is_refused(
    tmp_path: Path, monkeypatch: Any, name: str, change: Any, moment: str
) -> None:
    text = "".join(json.dumps({"text": f"document {n} " * 20}) + "\n" for n in range(300)).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    _wait_for_the_clock_of_files(path)
    source = open_source([str(path)])
    real_read, real_look = ranges.read, units.survey_plan

    def read(*args: Any) -> Any:
        if moment == "before a unit":
            change(path)
        yield from real_read(*args)

    def read_then(span: Any, how: Any, faults: Any) -> Any:
        for number, found in enumerate(real_read(span, how, faults)):
            if not number:
                change(path)
            yield found

    if moment == "after the hash":
        monkeypatch.setattr(units, "survey_plan", lambda *args: (change(path), real_look(*args))[1])
    else:
        monkeypatch.setattr(ranges, "read", read if moment == "before a unit" else read_then)
    with pytest.raises(BadData, match="changed"):
        ensure(tmp_path / "cache", source, byte_level(), CacheSettings(0.1))
    assert not list((tmp_path / "cache").glob("*/manifest.json"))


def test_a_hard_link_to_a_file_that_is_being_read_is_no_change(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a line of text\n" * 5000)
    source = open_source([str(path)])
    real = units.survey_plan
    monkeypatch.setattr(units, "survey_plan", lambda *args: (os.link(path, tmp_path / "backup"), real(*args))[1])
    assert open_tokens(ensure(tmp_path / "cache", source, byte_level(), CacheSettings(0.1))).train.tokens > 5000


def test_the_place_in_a_unit_of_many_files_is_found_without_walking_over_them(tmp_path: Path) -> None:
    paths = []
    for number in range(50):
        paths.append(tmp_path / f"{number:02}.txt")
        paths[-1].write_text("x" * (number % 7 + 1))
    plan = units.plan(FileSource(paths), CacheSettings(0.1))
    assert plan is not None and len(plan.units) == 1
    done = 0
    for span in plan.units[0].spans:
        for byte in range(span.stop):
            assert plan.units[0].place(done + byte) == f"{span.path} at byte {byte:,}"
        done += span.stop
    assert plan.units[0].place(done) == str(paths[-1])
