"""CSV, TSV, Parquet and JSON arrays: columns by name; bad rows with file, line and byte; cut, changed and huge files."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from test_sources import fails, joined, read, write

from lamplighter import report
from lamplighter.errors import BadData, InputMissing
from lamplighter.readers import lines as records
from lamplighter.readers import local
from opening import open_source
from running import real


@pytest.fixture
def warned(monkeypatch: Any) -> list[str]:
    words: list[str] = []
    monkeypatch.setattr(report, "warn", lambda text, **_: words.append(text))
    monkeypatch.setattr(report, "note", lambda text, **_: words.append(text))
    return words


# ---------------------------------------------------------------- CSV


def test_columns_by_name_and_quoted_newlines(tmp_path: Path) -> None:
    text = 'id,text,note\r\n1,"one\nwith ""quotes"", and more",x\r\n2,two,y\r\n\r\n3,"",z\r\n4,four,\r\n'
    path = write(tmp_path / "a.csv", b"\xef\xbb\xbf" + text.encode())
    assert read(path) == ['one\nwith "quotes", and more', "two", "four"]
    assert read(path, text_key="note") == ["x", "y", "z"]
    assert read(write(tmp_path / "a.tsv", text.replace(",", "\t"))) == ['one\nwith "quotes"\t and more', "two", "four"]
    assert read(write(tmp_path / "a.csv.gz", gzip.compress(text.encode())), text_key="id") == ["1", "2", "3", "4"]
    rows = [json.loads(row) for row in read(path, text_key="*")]
    assert rows[1] == {"id": "2", "text": "two", "note": "y"}


def test_another_delimiter_is_taken_and_said(tmp_path: Path, warned: list[str]) -> None:
    assert read(write(tmp_path / "a.csv", "id;text\n1;one, two\n")) == ["one, two"]
    assert "separated by ';'" in warned[0]


def test_a_missing_column_names_those_there_are(tmp_path: Path) -> None:
    error = fails(BadData, write(tmp_path / "a.csv", "id,texts,score\n1,a,2\n"))
    assert "id, texts, score" in error.why and "--data.text_key texts" in error.next
    pq.write_table(pa.table({"id": [1], "content": ["a"], "meta": [{"body": "b"}]}), tmp_path / "a.parquet")
    error = fails(BadData, tmp_path / "a.parquet", text_key="contents")
    assert "id, content, meta" in error.why and "--data.text_key content?" in error.next
    assert "meta.body" in fails(BadData, tmp_path / "a.parquet", text_key="meta.bodies").why
    assert "int64" in fails(BadData, tmp_path / "a.parquet", text_key="id").why
    assert "two columns" in fails(BadData, write(tmp_path / "b.csv", "text,text\n1,2\n")).what


def test_bad_rows_are_set_aside_with_their_line(tmp_path: Path, warned: list[str]) -> None:
    rows = [f'{n},"row\n{n}"' for n in range(5000)]
    lines = ["id,text", *rows]
    lines[100] = "99,a,b,c"
    lines[200] = '199,"torn" quote'
    data = "\n".join(lines).encode()
    data = data.replace(b'"row\n3000"', b'"caf\xe9"').replace(b'"row\n4000"', b'"n\0l"') + b"\n"
    path = write(tmp_path / "a.csv", data)
    texts = read(path)
    assert texts == [f"row\n{n}" for n in range(5000) if n not in (99, 199, 3000, 4000)]
    assert "4 of 5,000 rows" in warned[-1]
    at = data.index(b"99,a,b,c")
    error = fails(BadData, path, bad_text="refuse")
    assert f"{path}:200, byte {at:,}" in error.what and "4 fields, but the header has 2" in error.why


def test_a_quote_that_never_ends_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    from lamplighter.readers import tables

    monkeypatch.setattr(tables, "ROW_BYTES", 1000)
    path = write(tmp_path / "a.csv", "id,text\n1,fine\n" + '2,"open\n' + "3,more\n" * 500)
    error = fails(BadData, path)
    assert f"{path}:3, byte 15" in error.what and "never closed" in error.why


# ---------------------------------------------------------------- Parquet


def test_parquet_of_every_kind_of_text(tmp_path: Path) -> None:
    texts = ["one", "zwei ü", "", "三"] * 40
    columns = {
        "text": pa.array(texts),
        "large": pa.array(texts, pa.large_string()),
        "bytes": pa.array([text.encode() for text in texts]),
        "coded": pa.array(texts).dictionary_encode(),
        "meta": pa.array([{"a": 1, "body": {"t": text}} for text in texts]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=30)
    wanted = [text for text in texts if text]
    for key in ("text", "large", "bytes", "coded", "meta.body.t"):
        assert read(tmp_path / "a.parquet", text_key=key) == wanted
    assert json.loads(read(tmp_path / "a.parquet", text_key="*")[1])["meta"] == {"a": 1, "body": {"t": "zwei ü"}}


def test_a_missing_library_is_found_before_any_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("much text that would be tokenised first")
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else found(name))
    with pytest.raises(InputMissing) as caught:
        open_source([str(tmp_path / "a.txt"), str(tmp_path / "b.parquet")])
    assert "b.parquet" in caught.value.what and "lamplighter[data]" in caught.value.next


def test_bad_parquet_rows(tmp_path: Path, warned: list[str]) -> None:
    values: list[bytes | None] = [b"row %d" % n for n in range(4000)]
    values[10], values[2000], values[3999] = None, b"caf\xe9", b"n\0l"
    array = pa.array(values, pa.binary())
    text = pa.StringArray.from_buffers(
        len(array), array.buffers()[1], array.buffers()[2], array.buffers()[0], array.null_count
    )
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet", row_group_size=1500)
    texts = read(tmp_path / "a.parquet")
    assert texts == [f"row {n}" for n in range(4000) if n not in (10, 2000, 3999)]
    assert "3 of 4,000 rows" in warned[-1]
    error = fails(BadData, tmp_path / "a.parquet", bad_text="refuse")
    assert "a.parquet, row 11" in error.what and "null" in error.why


def test_truncated_files(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a" * 50] * 5000}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    error = fails(BadData, write(tmp_path / "cut.parquet", whole[: len(whole) // 2]))
    assert "cut.parquet" in error.what and "cut short or damaged" in error.what
    damaged = bytearray(whole)
    damaged[10:60] = b"\xff" * 50
    assert "damaged" in fails(BadData, write(tmp_path / "bad.parquet", bytes(damaged))).what
    assert fails(BadData, write(tmp_path / "no.parquet", b"not parquet at all, but long enough")).code == 65
    for name, packed in (("a.csv.gz", gzip.compress(b"text\n" + b"row\n" * 9999)),
                         ("long.csv.gz", gzip.compress(b"".join(b"%d\n" % n for n in range(200_000)).replace(b"0\n", b"text\n", 1))),
                         ("a.json.zst", zstandard.compress(json.dumps([{"text": "x" * n} for n in range(999)]).encode()))):  # fmt: skip
        assert "cut short" in fails(BadData, write(tmp_path / name, packed[: len(packed) // 2])).what


# ---------------------------------------------------------------- JSON arrays


def test_array_faults_have_line_and_byte(tmp_path: Path, warned: list[str], monkeypatch: Any) -> None:
    def error(text: str | bytes, **options: Any) -> BadData:
        return fails(BadData, write(tmp_path / "a.json", text), **options)  # type: ignore[return-value]

    assert "cut short" in error('[\n{"text": "x"},\n').what
    assert "bad JSON" in error('[\n{"text": "x"\n').what and ":2, byte 2" in error('[\n{"text": "x"\n').what
    torn = error('[\n{"text": "x"}\n{"text": "y"}]')
    assert ":3, byte 16" in torn.what and "comma" in torn.why
    assert "behind the end" in error('[{"text": "x"}]\n[1]').why
    assert ":1" in error('[{"text": "x"}, nonsense' + " " * 5000 + "]").what
    assert "nested too deeply" in error("[" * 100_000).why
    assert "nothing under" in error('[{"txt": "x"}]').why
    monkeypatch.setattr(records, "ELEMENT_CHARS", 5000)
    assert "over 5,000 characters" in error('[{"text": "' + "x" * 900_000).why
    monkeypatch.undo()
    rows = [json.dumps({"text": f"row {n}"}).encode() for n in range(3000)]
    rows[7], rows[8] = b'{"text": "caf\xe9"}', b'{"text": 7}'
    path = write(tmp_path / "b.json", b"[" + b",\n".join(rows) + b"]")
    assert read(path) == [f"row {n}" for n in range(3000) if n not in (7, 8)]
    assert f"{path}:8, byte {len(b',N'.join(rows[:7])) + 3:,}" in fails(BadData, path, bad_text="refuse").what


def test_an_array_under_another_name_says_which_name_it_needs(tmp_path: Path) -> None:
    assert "ends in .json" in fails(BadData, write(tmp_path / "a.jsonl", '[\n{"text": "x"}\n]')).why
    assert "wanted: an object on each line" in fails(BadData, write(tmp_path / "b.json", '{\n"text": "x"\n}')).why


def test_deep_json_lines_are_bad_lines_not_crashes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' * 2000 + "[" * 100_000 + "\n")
    assert len(read(path)) == 2000


def test_a_dotted_key_goes_down(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"data": {"body": "in"}, "data.body": "flat"}\n{"data": {"body": "in"}}\n')
    assert read(path, text_key="data.body") == ["flat", "in"]
    assert read(path, text_key="*")[1] == '{"data": {"body": "in"}}'
    assert "holds a dict" in fails(BadData, path, text_key="data").why


# ---------------------------------------------------------------- files that change, or may not be read


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    rows = b"".join(b'{"text": "row %d"}\n' % n for n in range(100_000))

    def fault(change: Any, name: str = "a.jsonl", data: bytes = rows) -> BadData:
        path = write(tmp_path / name, data)
        os.utime(path, (1_000_000_000, 1_000_000_000))
        texts = open_source([str(path)]).documents()
        next(texts)
        change(path)
        with pytest.raises(BadData) as caught:
            list(texts)
        assert str(path) in caught.value.what and "changed while it was read" in caught.value.what
        return caught.value

    assert "grew" in fault(lambda path: path.open("ab").write(b'{"text": "more"}\n')).why
    assert "shrank" in fault(lambda path: os.truncate(path, 1_000_000)).why
    assert "written to again" in fault(lambda path: path.write_bytes(rows)).why
    table = pa.table({"text": [f"row {n}" for n in range(9000)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=500)
    data = (tmp_path / "t.parquet").read_bytes()
    assert "grew" in fault(lambda path: path.open("ab").write(b"x"), "a.parquet", data).why


def test_a_file_replaced_since_it_was_found_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one two")
    source = open_source([str(path)])
    write(tmp_path / "b.txt", "two one").rename(path)
    with pytest.raises(BadData, match="changed since this command began") as caught:
        list(source.documents())
    assert "another file" in caught.value.why


def test_no_permission_is_said_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "x"}\n')
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything; test_unreadable_file covers the words")
    assert "chmod" in fails(InputMissing, path).next


# ---------------------------------------------------------------- real data


def test_real_tables_and_arrays() -> None:
    rows = read(real("web", "fineweb_edu_like", "train-00000-of-00001.parquet"))
    assert rows == read(real("web", "fineweb_edu_like", "train-00000.jsonl")) and len(rows) > 50
    import csv

    path = real("web", "fineweb_edu_scorer_training_data.csv")
    with open(path, newline="", encoding="utf-8") as file:
        truth = [row["text"] for row in csv.DictReader(file)]
    assert read(path) == [text for text in truth if text]
    assert read(real("web", "dolma_cc_en_head-0091.jsonl.gz")) == read(real("web", "dolma_cc_en_head-0091.jsonl"))
    for name in ("alpaca_en_demo.json", "instruction-data-short.json"):
        path = real("finetune", name)
        assert joined(read(path, text_key="output")) == [
            row["output"] for row in json.loads(path.read_text()) if row["output"]
        ]
        assert [json.loads(row) for row in read(path, text_key="*")] == json.loads(path.read_text())
    assert (
        local.kind_of("x.JSONL.GZ") == "json" and local.is_packed("x.JSONL.GZ") and local.kind_of("x.parquet.gz") == ""
    )
