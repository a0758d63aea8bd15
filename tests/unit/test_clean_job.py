"""`lamp data clean` as a user runs it: what it makes, what it says, what it leaves out and why; killed, repeated, in parallel."""

from __future__ import annotations

import errno
import gzip
import importlib.util
import json
import os
import random
import textwrap
from pathlib import Path
from typing import Any

import pytest
import zstandard

from lamplighter.clean import pipeline, worker
from lamplighter.clean import raw_documents as documents
from lamplighter.clean.rules import Rules
from lamplighter.errors import AlreadyRunning, BadData, CannotWrite, InputMissing, UsageError

WORDS = ["the", "of", "and", "to", "in", "a", "was", "he", "that", "it", "lamp", "lane", "ladder", "window", "evening", "child", "hat", "post", "oil", "wind", "street", "night", "parish"]  # fmt: skip


def prose(seed: int, paragraphs: int = 6, width: int = 72) -> str:
    rng = random.Random(seed)
    texts = [
        " ".join(rng.choices([*WORDS, f"name{seed}", f"place{rng.randint(0, 999)}"], k=rng.randint(30, 90)))
        for _ in range(paragraphs)
    ]
    return "\n\n".join(textwrap.fill(text.capitalize() + ".", width) for text in texts)


def make_corpus(folder: Path, count: int = 6, paragraphs: int = 6) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"book{number:03}.txt").write_text(prose(number, paragraphs))
    return folder


def texts(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(out.glob("clean-*.jsonl")) for line in path.read_text().splitlines()]


def rejected(out: Path) -> dict[str, tuple[str, str]]:
    rows = [json.loads(line) for line in (out / "log" / "rejected.log").read_text().splitlines()]
    return {row["place"]: (row["reason"], row["why"]) for row in rows}


def _run(folder: Path, *paths: str, workers: int = 1, out: str = "clean", **rules: Any) -> pipeline.CleanOutcome:
    before = Path.cwd()
    os.chdir(folder)
    try:
        return pipeline.run(list(paths), Path(out), Rules(**rules), workers)
    finally:
        os.chdir(before)


def test_near_copies_go_at_the_likeness_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    text = prose(1, 12)
    (tmp_path / "raw" / "1.txt").write_text(text)
    (tmp_path / "raw" / "2.txt").write_text(text.replace("ladder", "stepladder", 3))
    assert _run(tmp_path, "raw", out="near").totals["rejected"] == {"near_duplicate": 1}
    assert rejected(tmp_path / "near")["raw/2.txt"][1].endswith("like raw/1.txt")
    assert _run(tmp_path, "raw", out="exact", near=0.0).totals["kept"] == 2


def test_everything_that_is_left_out_is_named(tmp_path: Path) -> None:
    raw = make_corpus(tmp_path / "raw", 2)
    packed = gzip.compress((json.dumps({"text": prose(7)}) + "\n").encode() * 3 + os.urandom(90_000).hex().encode())
    files: dict[str, bytes] = {
        "empty.txt": b"",
        "nul.txt": prose(20, 40).encode().replace(b"\n\n", b"\n\nb\x00d\n\n", 1),
        "bits.txt": bytes(random.Random(1).randbytes(5000)),
        "torn.txt.gz": gzip.compress(prose(8).encode())[:-9],
        "torn.jsonl.gz": packed[: len(packed) - 4000],
        "torn.txt.zst": zstandard.compress(prose(9).encode())[:-6],
        "bad.xml": b"<TEI.2>\n<text><p>x</text></TEI.2>",
        "mets.xml": b"<mets/>",
        "other.jsonl": b'{"body": "x"}\n[1]\n{"text": "\\ud800 half"}\n\xff\xfe\n{"text": 3}\n',
        "array.json": json.dumps([{"text": prose(30)}, {"nothing": 1}]).encode(),
        "long.jsonl": json.dumps({"text": "a" * 300_000}).encode() + b"\n" + json.dumps({"text": prose(31)}).encode(),
        "long.txt": b"lamp " * 40_000,
    }
    for name, data in files.items():
        (raw / name).write_bytes(data)
    outcome = _run(tmp_path, "raw", max_document_mb=0.1)
    why = rejected(tmp_path / "clean")
    expected = {
        "empty.txt": "empty", "nul.txt:13": "bad_line", "bits.txt": "not_text", "torn.txt.gz": "cut_short", "torn.jsonl.gz": "cut_short",
        "torn.txt.zst": "cut_short", "bad.xml:2:13": "bad_xml", "mets.xml": "mets", "other.jsonl:1": "no_text", "other.jsonl:2": "no_text",
        "other.jsonl:3": "not_text", "other.jsonl:4": "not_text", "other.jsonl:5": "no_text", "array.json#2": "no_text",
        "long.jsonl:1": "too_long", "long.txt": "too_long",
    }  # fmt: skip
    found = {place.removeprefix("raw/"): reason for place, (reason, _) in why.items()}
    nul = next(place for place in found if place.startswith("nul.txt:"))
    expected = {nul if name == "nul.txt:13" else name: reason for name, reason in expected.items()}
    assert {name: found.get(name) for name in expected} == expected
    assert set(found) == set(expected)
    assert all(text for _, text in why.values())
    kept = {record["source"] for record in texts(tmp_path / "clean")}
    assert kept == {f"raw/{name}" for name in ("array.json#1", "book000.txt", "book001.txt", "long.jsonl:2", "nul.txt")}
    assert (
        outcome.totals["documents"]
        == outcome.totals["kept"] + sum(outcome.totals["rejected"].values()) - outcome.totals["rejected"]["bad_line"]
    )


def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    raw = make_corpus(tmp_path / "raw", 2)
    (raw / "book001.txt").chmod(0)
    if os.access(raw / "book001.txt", os.R_OK):
        pytest.skip("this user may read everything")
    assert _run(tmp_path, "raw").totals["kept"] == 1
    assert rejected(tmp_path / "clean")["raw/book001.txt"] == ("unreadable", "Permission denied")


def test_a_file_that_changes_while_it_is_read_is_left_out(tmp_path: Path) -> None:
    make_corpus(tmp_path / "raw", 1)
    (item,), _ = documents.find_items([str(tmp_path / "raw")], None, Rules())
    with open(item.path, "a") as file:
        file.write("\n\nand more")
    make_corpus(tmp_path / "other", 1)
    (other,), _ = documents.find_items([str(tmp_path / "other")], None, Rules())
    batch = worker.CleanBatch(str(tmp_path), (other, item, other), Rules())
    summary = worker.make(batch)
    assert summary["rejected"] == {"changed": 1}
    assert summary["kept"] == 2
    assert (tmp_path / f"{batch.name}.part").read_bytes().count(b"\n") == 2, "the others of its part are kept"


def test_stretches_of_a_long_file_have_the_places_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"text": prose(number)}) for number in range(60)]
    lines[41] = "{torn"
    (tmp_path / "web.jsonl").write_text("\n".join(lines) + "\n")
    _run(tmp_path, "web.jsonl", out="whole")
    monkeypatch.setattr(documents, "RANGE_BYTES", 20_000)
    assert len(documents.find_items([str(tmp_path / "web.jsonl")], None, Rules())[0]) > 3
    _run(tmp_path, "web.jsonl", out="parts")
    assert texts(tmp_path / "whole") == texts(tmp_path / "parts")
    assert list(rejected(tmp_path / "parts")) == ["web.jsonl:42"]


def test_a_part_of_other_rules_is_never_used(tmp_path: Path) -> None:
    make_corpus(tmp_path / "raw", 2)
    items, _ = documents.find_items([str(tmp_path / "raw")], None, Rules())
    for rules in (Rules(), Rules(keep_lines=True)):
        batch = worker.CleanBatch(str(tmp_path), (items[0],), rules)
        worker.make(batch)
        assert worker.is_done(tmp_path, batch)
    assert not worker.is_done(tmp_path, worker.CleanBatch(str(tmp_path), (items[0],), Rules()))


def test_the_output_cleaned_again_is_the_same(tmp_path: Path) -> None:
    raw = make_corpus(tmp_path / "raw", 4)
    (raw / "x.jsonl").write_text(json.dumps({"text": prose(60), "url": "u"}))
    _run(tmp_path, "raw", out="one")
    _run(tmp_path, "one", out="two")
    assert (tmp_path / "one" / "clean-00000.jsonl").read_bytes() == (
        tmp_path / "two" / "clean-00000.jsonl"
    ).read_bytes()


def test_shards_are_of_the_asked_size_and_old_ones_go(tmp_path: Path) -> None:
    make_corpus(tmp_path / "raw", 8)
    many = _run(tmp_path, "raw", shard_mb=0.005)
    assert len(many.shards) > 2
    assert len(texts(tmp_path / "clean")) == 8
    assert _run(tmp_path, "raw").shards == ["clean-00000.jsonl"]
    assert [path.name for path in (tmp_path / "clean").glob("clean-*")] == ["clean-00000.jsonl"]


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    raw = make_corpus(tmp_path / "raw", 1)
    items, _ = documents.find_items([str(raw)], None, Rules())
    held = pipeline._prepare(tmp_path / "clean", items)
    with pytest.raises(AlreadyRunning):
        pipeline.run([str(raw)], tmp_path / "clean", Rules(), 1)
    os.close(held)
    for found in (False, True):
        done = pipeline.run([str(raw)], tmp_path / "clean", Rules(), 1)
        assert done.totals["kept"] == 1 and done.found == found
        assert list((tmp_path / "clean" / "parts").iterdir()) == [], "not even the lock is left"


def test_no_space_left_is_an_exit_code_of_its_own(tmp_path: Path) -> None:
    full = pipeline._cannot_write(tmp_path, OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(full, CannotWrite)
    assert full.code == 73
    assert "what is finished is kept" in full.next


def test_an_output_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    make_corpus(tmp_path / "raw", 1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CannotWrite):
        _run(tmp_path, "raw", out="file/clean")
    with pytest.raises(InputMissing):
        _run(tmp_path, "nothing*")
    with pytest.raises(UsageError):
        _run(tmp_path, "raw", out="raw")
    with pytest.raises(BadData):
        pipeline.refuse_nothing(pipeline.CleanOutcome({"kept": 0, "rejected": {"empty": 2}}, [], 0.0), tmp_path)


def test_every_file_of_a_folder_that_is_not_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lamplighter.report.warn", lambda text, **_: said.append(text))
    raw = make_corpus(tmp_path / "raw", 2)
    others = ["b.csv", "c.csv", "d.warc.gz", "e.pdf", "f.docx", "g.epub", "h.rtf", "i.odt", "README"]
    for name in others:
        (raw / name).write_text("x")
    done = _run(tmp_path, "raw")
    assert done.totals["kept"] == done.totals["documents"] == 2
    assert done.totals["rejected"] == {"other_ending": 9}
    assert len(said) == 1 and "9 files left out of raw" in said[0] and "2 .csv (raw/b.csv)" in said[0]
    assert "and 3 more files: " in said[0] and all(name in said[0] for name in others if name != "c.csv")
    assert {place: reason for place, (reason, _) in rejected(tmp_path / "clean").items()} == {
        f"raw/{name}": "other_ending" for name in others
    }
    assert _run(tmp_path, "raw").found, "the same again"
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_text("x")
    with pytest.raises(InputMissing):
        _run(tmp_path, "pictures", out="none")


# ---------------------------------------------------------------- nothing lost in silence


def test_a_torn_line_loses_that_line_and_no_other(tmp_path: Path) -> None:
    for torn in (0, 1, 150, 299):
        lines = [json.dumps({"text": prose(number)}) for number in range(300)]
        lines[torn] = lines[torn][:40]
        (tmp_path / "web.jsonl").write_text("\n".join(lines) + "\n")
        done = _run(tmp_path, "web.jsonl", out=f"clean{torn}", keep_duplicates=True)
        assert done.totals["kept"] == 299 and done.totals["rejected"] == {"bad_json": 1}
        assert list(rejected(tmp_path / f"clean{torn}")) == [f"web.jsonl:{torn + 1}"]


@pytest.mark.parametrize("name", ["web.jsonl", "web.json", "web.jsonl.gz"])
@pytest.mark.parametrize("torn", ['["a", "b"], "text": "the tail of a torn line"}', '["a", "b', '["a",', "[1]", "3"])
def test_a_torn_first_line_is_no_array_whatever_it_begins_with(tmp_path: Path, torn: str, name: str) -> None:
    """The tokenizer's reader of the same file keeps the same documents."""
    from lamplighter.readers.bad_records import BadRecords
    from lamplighter.readers.files import TextFormat, read_texts
    from lamplighter.readers.local import local_file

    data = "\n".join([torn, *(json.dumps({"text": prose(number, 1)}) for number in range(19)), ""]).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    done = _run(tmp_path, name)
    assert done.totals["kept"] == 19 and sum(done.totals["rejected"].values()) == 1
    assert list(rejected(tmp_path / "clean")) == [f"{name}:1"]
    bad = BadRecords(limit=1.0, quiet=True).begin()
    assert len(list(read_texts(local_file(tmp_path / name), TextFormat(), bad, lambda *_: None))) == 19


def test_every_torn_line_is_named_however_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamplighter.readers.bad_records._LISTED", 2)
    lines = [json.dumps({"text": prose(number)}) if number % 2 else "{torn" for number in range(20)]
    (tmp_path / "web.jsonl").write_text("\n".join(lines))
    assert _run(tmp_path, "web.jsonl").totals["rejected"] == {"bad_json": 10}


def test_one_json_value_over_several_lines_is_still_read(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"text": prose(1)}, indent=2))
    (tmp_path / "some.json").write_text(json.dumps([{"text": prose(2)}, {"text": prose(3)}], indent=2))
    assert _run(tmp_path, "one.json", "some.json").totals["kept"] == 3


def test_what_cannot_be_read_is_named_and_left_out_loudly(tmp_path: Path, monkeypatch: Any) -> None:
    warned: list[str] = []
    monkeypatch.setattr("lamplighter.report.warn", lambda text, **_: warned.append(text))
    rows = "".join(json.dumps({"text": prose(n)}) + "\n" for n in range(40)).encode()
    (tmp_path / "good.jsonl").write_bytes(rows)
    (tmp_path / "crawl.warc.gz").write_bytes(
        gzip.compress(b"WARC/1.0\r\nWARC-Type: response\r\n\r\n" + prose(1).encode())
    )
    (tmp_path / "rows.parquet").write_bytes(rows)
    (tmp_path / "table.csv").write_text("title,body\n" + "".join(f'{n},"{prose(n)}"\n' for n in range(5)))
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(rows)[:-40])
    (tmp_path / "torn.txt.zst").write_bytes(zstandard.compress(prose(7).encode() * 50)[:-20])
    names = ["good.jsonl", "crawl.warc.gz", "rows.parquet", "table.csv", "torn.jsonl.gz", "torn.txt.zst"]
    done = _run(tmp_path, *names)
    why = rejected(tmp_path / "clean")
    assert why["crawl.warc.gz"][0] == "unknown_kind" and "WARC" in why["crawl.warc.gz"][1]
    assert why["rows.parquet"][0] == "unreadable"
    assert why["table.csv"][0] == "unknown_kind" and "title, body" in why["table.csv"][1]
    assert why["torn.jsonl.gz"][0] == why["torn.txt.zst"][0] == "cut_short" and "bytes" in why["torn.jsonl.gz"][1]
    assert done.totals["rejected"]["cut_short"] == 2 and not any(
        "WARC" in one["text"] for one in texts(tmp_path / "clean")
    )
    assert (
        len(warned) == 1
        and "cut_short 2" in warned[0]
        and "unknown_kind 2" in warned[0]
        and "rows.parquet" in warned[0]
    )


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".txt", ".csv", ".xml"])
def test_a_file_that_is_not_what_its_ending_says_is_named_once(tmp_path: Path, ending: str) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "good.txt").write_text(prose(1))
    pyarrow.parquet.write_table(pyarrow.table({"text": [prose(n) for n in range(200)]}), tmp_path / f"a{ending}")
    rows = "".join(json.dumps({"text": prose(n)}) + "\n" for n in range(20)).encode()
    (tmp_path / f"b{ending}").write_bytes(gzip.compress(rows))
    (tmp_path / f"c{ending}").write_bytes(zstandard.compress(rows))
    (tmp_path / f"d{ending}").write_bytes(b"PK\x03\x04" + rows)
    (tmp_path / f"e{ending}").write_bytes(b"%PDF-1.7\n" + rows)
    (tmp_path / f"f{ending}.gz").write_bytes(zstandard.compress(rows))
    (tmp_path / f"g{ending}.gz").write_bytes(gzip.compress((tmp_path / f"a{ending}").read_bytes()))
    kinds = {"a": "a Parquet file", "b": "a gzip file", "c": "a zstd file", "d": "a zip archive", "e": "a PDF file", "f": "a zstd file", "g": "a Parquet file"}  # fmt: skip
    names = {letter: f"{letter}{ending}{'.gz' if letter in 'fg' else ''}" for letter in kinds}
    done = _run(tmp_path, "good.txt", *names.values())
    assert done.totals["kept"] == 1 and done.totals["rejected"] == {"unknown_kind": len(kinds)}
    why = rejected(tmp_path / "clean")
    assert all(why[names[letter]][0] == "unknown_kind" and kinds[letter] in why[names[letter]][1] for letter in kinds)


def test_a_table_of_arbitrary_bytes_is_named(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text(prose(1))
    (tmp_path / "bits.csv").write_bytes(b"caf\xe9,b\xff\n1,2\n")
    assert _run(tmp_path, "good.txt", "bits.csv").totals["rejected"] == {"unknown_kind": 1}
    assert "\udce9" in rejected(tmp_path / "clean")["bits.csv"][1]


def test_a_long_file_that_is_not_what_its_ending_says_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(documents, "RANGE_BYTES", 10_000)
    (tmp_path / "rows.jsonl").write_bytes(b"PAR1" + prose(1, 200).encode())
    assert _run(tmp_path, "rows.jsonl").totals["rejected"] == {"unknown_kind": 1}


def test_of_a_file_that_is_cut_short_nothing_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr("lamplighter.report.warn", lambda text, **_: warned.append(text))
    rows = "".join(json.dumps({"text": prose(n)}) + "\n" for n in range(400))
    array = json.dumps([{"text": prose(n)} for n in range(400)])
    gz = gzip.compress(rows.encode())
    torn = {
        "half.jsonl.gz": (gz[: len(gz) // 2], f"after {len(gz) // 2:,} bytes"),
        "half.jsonl.zst": (zstandard.compress(rows.encode())[: len(gz) // 2], f"after {len(gz) // 2:,} bytes"),
        "flipped.jsonl.gz": (_flip(gz, len(gz) - 3), f"byte {len(gz):,}"),
        "half.json": (array[: len(array) // 2].encode(), "byte "),
    }
    (tmp_path / "good.txt").write_text(prose(1000))
    for number, (name, (data, place)) in enumerate(torn.items()):
        (tmp_path / name).write_bytes(data)
        warned.clear()
        done = _run(tmp_path, name, out=f"alone{number}")
        assert done.totals["kept"] == 0 and done.totals["documents"] == 1 and not done.shards
        assert list(rejected(tmp_path / f"alone{number}")) == [name]
        assert len(warned) == 1 and name in warned[0] and place in warned[0]
        with pytest.raises(BadData):
            pipeline.refuse_nothing(done, None)
        done = _run(tmp_path, "good.txt", name, out=f"beside{number}")
        assert [one["source"] for one in texts(tmp_path / f"beside{number}")] == ["good.txt"]
        assert sum(done.totals["rejected"].values()) == 1 and done.totals["documents"] == 2


def test_files_that_cannot_be_read_are_refused_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": prose(n)}) + "\n" for n in range(4)).encode()
    files = {
        "torn.jsonl.gz": gzip.compress(rows)[:-40],
        "torn.txt.zst": zstandard.compress(prose(7).encode() * 50)[:-20],
        "rows.parquet": rows,
        "crawl.warc.gz": gzip.compress(b"WARC/1.0\r\nWARC-Type: response\r\n\r\n"),
        "table.csv": b"title,body\n1,x\n",
        "bits.txt": random.Random(1).randbytes(5000),
        "bad.xml": b"<TEI.2>\n<text><p>x</text></TEI.2>",
    }
    for name, data in files.items():
        folder = tmp_path / name.partition(".")[0] / name
        folder.mkdir(parents=True)
        (folder / "good.jsonl").write_bytes(rows)
        (folder / name).write_bytes(data)
        for paths in ([folder], [folder / "good.jsonl", folder / name]):  # in a folder, and by its name
            with pytest.raises(BadData) as caught:
                _run(tmp_path, *map(str, paths), out=f"{folder}.clean", bad_files="refuse")
            assert name in caught.value.what and caught.value.code == 65
    (tmp_path / "mets.xml").write_bytes(b"<mets/>")
    (tmp_path / "good.jsonl").write_bytes(rows)
    assert _run(tmp_path, "mets.xml", "good.jsonl", bad_files="refuse").totals["kept"] == 4


def test_tables_are_read_by_the_column_of_the_texts(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.csv").write_text("id,text\n" + "".join(f'{n},"{prose(n)}"\n' for n in range(5)) + "6\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": [prose(n) for n in range(10, 14)]}), tmp_path / "b.parquet")
    done = _run(tmp_path, "a.csv", "b.parquet")
    assert done.totals["kept"] == 9 and done.totals["rejected"] == {"bad_row": 1}


def test_many_small_files_make_few_parts(tmp_path: Path, monkeypatch: Any) -> None:
    make_corpus(tmp_path / "raw", 60)
    alone = _run(tmp_path, "raw", out="alone")
    monkeypatch.setattr(worker, "PARTS", 7)
    items, _ = documents.find_items([str(tmp_path / "raw")], None, Rules())
    batches = worker.batches_of(items, "", Rules())
    assert len(batches) == 7 and [item for batch in batches for item in batch.items] == items
    together = _run(tmp_path, "raw", out="together")
    assert together.totals == alone.totals and texts(tmp_path / "alone") == texts(tmp_path / "together")


def test_a_missing_library_is_found_before_the_first_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("A letter of some words that would be cleaned first, were the library there. " * 5)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rensa" else found(name))
    monkeypatch.setattr(pipeline, "find_items", lambda *_: pytest.fail("a file was looked at"))
    with pytest.raises(InputMissing) as caught:
        pipeline.run([str(tmp_path)], tmp_path / "out", Rules(), 1)
    assert caught.value.what == "rensa is not installed" and "lamplighter[data]" in caught.value.next
    assert not (tmp_path / "out").exists()
