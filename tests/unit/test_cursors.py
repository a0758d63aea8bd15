"""Every kind of file, from any cursor: the continuation is the rest of the unbroken reading, in any process."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from lamplighter.data.sources import Part, Source, file_source
from lamplighter.errors import BadData
from lamplighter.readers import compression, tables
from lamplighter.readers import files as reader_files
from opening import open_source

WORDS = ["fog", "lamp", "naïve", "日本", "don't", "12", "--", "\n", "\n\n", "\r\n", "  ", "\t", "🙂", '"quoted"', "a,b"]


def texts(seed: int, count: int = 60, longest: int = 400) -> list[str]:
    rng = random.Random(seed)
    made = [" ".join(rng.choice(WORDS) for _ in range(rng.choice([0, 1, 3, 30, longest]))) for _ in range(count)]
    return [text for text in made if text] + ["x" * 5000, "last one"]


def joined(found: list[str]) -> list[str]:
    """Documents, their Parts put together."""
    whole, rest = [], ""
    for text in found:
        rest += text
        if not isinstance(text, Part):
            whole.append(rest)
            rest = ""
    assert not rest
    return whole


def lines_of(rows: list[str]) -> bytes:
    return "".join(
        json.dumps({"id": n, "text": t}, ensure_ascii=n % 2 == 0) + "\n" for n, t in enumerate(rows)
    ).encode()


def csv_of(rows: list[str], delimiter: str) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerows([["id", "text", "note"], *([n, t, "x"] for n, t in enumerate(rows))])
    return out.getvalue().encode()


def parquet_of(rows: list[str]) -> bytes:
    out = io.BytesIO()
    table = pa.table({"id": list(range(len(rows))), "text": rows, "meta": [{"a": t.upper(), "b": 1} for t in rows]})
    pq.write_table(table, out, row_group_size=17)
    return out.getvalue()


def members(data: bytes, pack: Callable[[bytes], bytes], seed: int) -> bytes:
    """Packed in several members, cut anywhere."""
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(len(data)), 4))
    return b"".join(pack(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))


SEPARATOR = "<|end|>"
KINDS: dict[str, Callable[[list[str], int], bytes]] = {
    "a.txt": lambda rows, _: SEPARATOR.join(rows).encode(),
    "bom.txt": lambda rows, _: b"\xef\xbb\xbf" + SEPARATOR.join([*rows, ""]).encode(),
    "a.jsonl": lambda rows, _: lines_of(rows),
    "tail.ndjson": lambda rows, _: lines_of(rows).rstrip(b"\n"),
    "array.json": lambda rows, _: json.dumps([{"text": t, "n": [1, {"a": "]"}]} for t in rows], indent=1).encode(),
    "flat.json": lambda rows, _: json.dumps([{"text": t} for t in rows], ensure_ascii=False).encode(),
    "a.csv": lambda rows, _: csv_of(rows, ","),
    "a.tsv": lambda rows, _: csv_of(rows, "\t"),
    "a.parquet": lambda rows, _: parquet_of(rows),
    "a.txt.gz": lambda rows, seed: members(SEPARATOR.join(rows).encode(), gzip.compress, seed),
    "a.jsonl.zst": lambda rows, seed: members(lines_of(rows), zstandard.compress, seed),
    "one.jsonl.zst": lambda rows, _: zstandard.compress(lines_of(rows)),
    "a.csv.gz": lambda rows, seed: members(csv_of(rows, ","), gzip.compress, seed),
    "array.json.zst": lambda rows, seed: members(json.dumps([{"text": t} for t in rows]).encode(), zstandard.compress, seed),
}  # fmt: skip


def walk(source: Source, start: Any = None) -> tuple[list[str], list[Any]]:
    """Every text, and the cursor after each, as JSON would keep it."""
    found, cursors = [], []
    for text in source.documents(start):
        found.append(text)
        cursors.append(json.loads(json.dumps(source.position().cursor)))
    return found, cursors


def check_every_cursor(make: Callable[[], Source], sample: int, seed: int = 0, alike: bool = True) -> list[str]:
    """A fresh source goes on from each of some cursors with exactly the rest, Parts as Parts, cursors as cursors.

    Not `alike`: cursors may differ in their words, and must still mean the same: some are used again.
    """
    whole, cursors = walk(make())
    rng = random.Random(seed)
    for number in rng.sample(range(len(whole)), min(sample, len(whole))):
        rest, after = walk(make(), cursors[number])
        assert rest == whole[number + 1 :], f"after text {number}, cursor {cursors[number]}"
        assert [type(t) for t in rest] == [type(t) for t in whole[number + 1 :]]
        if alike:
            assert after == cursors[number + 1 :]
        elif after:
            again = rng.randrange(len(after))
            assert list(make().documents(after[again])) == whole[number + 2 + again :]
    return whole


@pytest.fixture
def small(monkeypatch: Any) -> None:
    monkeypatch.setattr(reader_files, "PART_CHARS", 300)
    monkeypatch.setattr(reader_files, "BLOCK_BYTES", 777)
    monkeypatch.setattr(reader_files, "PACKED_BLOCK_BYTES", 333)
    monkeypatch.setattr(reader_files, "LINE_BYTES", 1000)
    monkeypatch.setattr(compression, "OUT_BYTES", 500)
    monkeypatch.setattr(tables, "BATCH_ROWS", 5)


@pytest.mark.parametrize("name", KINDS)
def test_any_cursor_of_any_kind_goes_on_with_the_rest(name: str, tmp_path: Path, small: None) -> None:
    separator = SEPARATOR if ".txt" in name else None
    for seed in range(2):
        rows = texts(seed)
        (tmp_path / name).write_bytes(KINDS[name](rows, seed))
        (tmp_path / f"b{name}").write_bytes(KINDS[name](rows[:9], seed))
        paths = [str(tmp_path / name), str(tmp_path / f"b{name}")]
        whole = check_every_cursor(lambda p=paths: open_source(p, None, separator), 25, seed)  # type: ignore[misc]
        assert joined(whole) == rows + rows[:9]
        assert any(isinstance(text, Part) for text in whole)


def test_a_whole_file_as_one_document_too(tmp_path: Path, small: None) -> None:
    text = "\n".join(texts(3, 200))
    (tmp_path / "a.txt").write_text(text, newline="")
    whole = check_every_cursor(lambda: open_source([str(tmp_path / "a.txt")]), 40)
    assert joined(whole) == [text] and len(whole) > 40


@pytest.mark.parametrize("separator", [None, "<sep>"])
def test_dirt_is_the_same_from_any_cursor(tmp_path: Path, small: None, separator: str | None) -> None:
    """Bad lines, and bad bytes in a line that is longer than what is decoded at once."""
    rng = random.Random(4)
    lines = [("<sep>" if rng.random() < 0.3 else "fog é ") + "word " * rng.randrange(9) + "\n" for _ in range(12_000)]
    raw = [line.encode() for line in lines]
    for place in (100, 101, 7000, 11_999):
        raw[place] = b"caf\xe9 \0\n"
    raw[6000] = ("日本 é " * 900).encode() + b"\xff" + ("fog " * 1500).encode() + b"\n"
    (tmp_path / "a.txt").write_bytes(b"".join(raw))
    whole = check_every_cursor(lambda: open_source([str(tmp_path / "a.txt")], None, separator), 30)
    assert "caf" not in "".join(whole)
    rows = [json.dumps({"text": f"row {n}"}).encode() for n in range(4000)]
    rows[50], rows[51] = b"{half", b'{"text": 7}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(rows))
    assert len(check_every_cursor(lambda: open_source([str(tmp_path / "a.jsonl")]), 10)) == 3998


def test_a_cursor_seeks_instead_of_reading_again(tmp_path: Path, monkeypatch: Any) -> None:
    """What lies before the cursor is not touched: a hole there does no harm, and few bytes are read."""
    rows = [f"row {n} " + "x" * 200 for n in range(5000)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines_of(rows))
    _, cursors = walk(open_source([str(path)]))
    with open(path, "r+b") as file:
        file.write(b"\0" * 500_000)
    assert list(open_source([str(path)]).documents(cursors[4000])) == rows[4001:]
    two = zstandard.compress(lines_of(rows[:2500])) + zstandard.compress(lines_of(rows[2500:]))
    frame = len(zstandard.compress(lines_of(rows[:2500])))
    (tmp_path / "b.jsonl.zst").write_bytes(two)
    _, cursors = walk(open_source([str(tmp_path / "b.jsonl.zst")]))
    assert cursors[4000]["member"][0] == frame
    (tmp_path / "b.jsonl.zst").write_bytes(b"\0" * frame + two[frame:])
    assert list(open_source([str(tmp_path / "b.jsonl.zst")]).documents(cursors[4000])) == rows[4001:]


@pytest.mark.parametrize("separator", [None, SEPARATOR])
def test_a_file_can_be_read_in_stretches_side_by_side(tmp_path: Path, small: None, separator: str | None) -> None:
    rows = texts(5, 300)
    path = tmp_path / ("a.txt" if separator else "a.jsonl")
    path.write_bytes(KINDS[path.name](rows, 0))
    source = open_source([str(path)], None, separator)
    assert isinstance(source, file_source.FileSource)
    whole, cursors = walk(source)
    size = path.stat().st_size
    starts: list[Any] = [None]
    for byte in range(size // 7, size, size // 7):
        found = source.cursor_at(0, byte)
        if found and found != starts[-1]:
            assert found in cursors
            starts.append(found)
    assert len(starts) > 4
    together: list[str] = []
    for start, stop in zip(starts, [*starts[1:], None], strict=True):
        for text, place in source.texts(0, start):
            together.append(text)
            if stop and place["at"] >= stop["at"]:
                break
    assert together == whole
    assert source.cursor_at(0, size - 1) is None
    (tmp_path / "b.json").write_bytes(KINDS["array.json"](rows, 0))
    other = open_source([str(tmp_path / "b.json")])
    assert isinstance(other, file_source.FileSource) and other.cursor_at(0, 100) is None


@pytest.mark.parametrize("cursor", [{"text": 3}, {"file": 2, "at": 0}])
def test_a_place_of_other_files_is_refused(tmp_path: Path, cursor: Any) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(BadData, match="not in these files"):
        open_source([str(tmp_path / "a.txt")]).documents(cursor)
