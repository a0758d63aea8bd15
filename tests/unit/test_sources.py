"""Documents come from files, a user's own code or the embedded corpus; faults are named with their place."""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard
from test_cursors import joined
from tokenizers import pre_tokenizers

from lamplighter import report
from lamplighter.data.sources import EmbeddedCorpus, Part
from lamplighter.data.split import CacheSettings
from lamplighter.data.token_cache.reader import open_tokens
from lamplighter.data.tokenizer import byte_level
from lamplighter.errors import BadConfig, BadData, InputMissing, LampError
from lamplighter.readers import files as reader_files
from lamplighter.readers import local
from lamplighter.readers.records import cut_all
from opening import ensure, open_source
from running import shared


def read(
    *paths: object,
    separator: str | None = None,
    text_key: str = "text",
    start: int = 0,
    bad_text: str = "set_aside",
) -> list[str]:
    source = open_source([str(path) for path in paths], None, separator, text_key=text_key, bad_text=bad_text)
    texts = source.documents()
    for _ in range(start):
        next(texts)
    return list(source.documents(source.position().cursor if start else None))


def fails(kind: type[LampError], *paths: object, **options: Any) -> LampError:
    with pytest.raises(kind) as caught:
        read(*paths, **options)
    assert caught.value.what and caught.value.why and caught.value.next
    return caught.value


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# ---------------------------------------------------------------- what is read


def test_a_text_file_is_one_document_as_it_is(tmp_path: Path) -> None:
    text = "  The fog\r\n\r\n£5 œuvre\t日本\n"
    assert read(write(tmp_path / "a.txt", text)) == [text]
    assert read(write(tmp_path / "notes.log", text)) == [text]
    assert read(write(tmp_path / "b.md", b"\xef\xbb\xbf" + text.encode())) == [text]


def test_a_separator_makes_documents_and_empty_ones_are_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one<|endoftext|>two<|endoftext|><|endoftext|>three<|endoftext|>")
    assert read(path, separator="<|endoftext|>") == ["one", "two", "three"]
    assert read(path, separator="<|endoftext|>", start=1) == ["two", "three"]


def test_json_lines_and_packed_files(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": t, "body": t.upper()}) + "\n" for t in ("a\nb", "", "ç 🙂")).encode()
    plain = write(tmp_path / "a.jsonl", lines + b"\n  \n")
    gz = write(tmp_path / "b.jsonl.gz", gzip.compress(lines[:10]) + gzip.compress(lines[10:]) + b"\0" * 512)
    zst = write(tmp_path / "c.json.zst", zstandard.compress(lines[:10]) + zstandard.compress(lines[10:]))
    for path in (plain, gz, zst):
        assert read(path) == ["a\nb", "ç 🙂"]
    assert read(plain, text_key="body") == ["A\nB", "Ç 🙂"]
    assert read(write(tmp_path / "d.txt.zst", zstandard.compress(b"one two"))) == ["one two"]
    assert read(write(tmp_path / "bom.jsonl", b"\xef\xbb\xbf" + lines)) == ["a\nb", "ç 🙂"]


def test_folders_patterns_and_repeats(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.jsonl", "picture.png", ".hidden.txt", "d[1].txt"):
        write(tmp_path / name, '{"text": "' + name + '"}\n' if name.endswith("jsonl") else name)
    assert read(tmp_path) == ["a.txt", "b.txt", "d[1].txt", "deep/er/c.jsonl"]
    assert read(tmp_path / "*.txt") == ["a.txt", "b.txt", "d[1].txt"]
    assert read(tmp_path / "**" / "*.jsonl") == ["deep/er/c.jsonl"]
    assert read(tmp_path / "b.txt", tmp_path / "*.txt") == ["b.txt", "a.txt", "d[1].txt"]
    assert read(tmp_path / "d[1].txt") == ["d[1].txt"]


def test_a_long_text_comes_in_parts_that_depend_on_nothing_else(tmp_path: Path, monkeypatch: Any) -> None:
    rng = random.Random(5)
    words = ["fog", "lamp", "naïve", "日本", "don't", "12", "--", "\n\n", "  ", "\t", "endless" * 40]
    texts = [" ".join(rng.choice(words) for _ in range(n)) for n in (3000, 1, 70, 900)] + ["x" * 5000, "y" * 1000]
    path = write(tmp_path / "a.txt", "<sep> ".join(texts))
    lines = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": t}) + "\n" for t in texts))
    monkeypatch.setattr(reader_files, "PART_CHARS", 500)
    seen = []
    for block in (17, 1000, 1 << 20):
        monkeypatch.setattr(reader_files, "BLOCK_BYTES", block)
        seen.append(read(path, separator="<sep> "))
        assert read(lines) == seen[0]
        assert [isinstance(t, Part) for t in seen[-1]] == [isinstance(t, Part) for t in seen[0]]
    assert seen[0] == seen[1] == seen[2]
    assert joined(seen[0]) == texts
    assert max(map(len, seen[0])) <= 1000
    assert read(path, separator="<sep> ", start=7) == seen[0][7:]


def test_cuts_do_not_change_pre_tokens() -> None:
    text = shared("tinyshakespeare", "input.txt").read_text()[:60_000]
    rng = random.Random(3)
    text += "".join(rng.choice("ab1'.,!\n\n\r\t   é日") for _ in range(20_000))
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole = [token for token, _ in gpt2.pre_tokenize_str(text)]
    pieces = list(cut_all(text, 300))
    assert len(pieces) > 100
    assert "".join(pieces) == text
    assert [token for piece in pieces for token, _ in gpt2.pre_tokenize_str(piece)] == whole


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "big.txt"
    with open(path, "w") as file:
        for _ in range(400):
            file.write("fog and lamps in the night, " * 4000)
    tracemalloc.start()
    size = sum(len(text) for text in open_source([str(path)]).documents())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == path.stat().st_size > 40_000_000
    assert peak < 16_000_000


def test_real_web_documents() -> None:
    folder = shared("web", "slimpajama_like")
    rows = [row for path in sorted(folder.glob("*.zst")) for row in zstandard.open(path, "rt").readlines()]
    assert len(joined(read(folder))) == len(rows) == 603
    assert read(folder, start=600) == read(folder)[600:]


def test_where_the_reading_is_can_be_seen(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.txt", "a" * 10), write(tmp_path / "b.txt", "b" * 30)
    source = open_source([str(first), str(second)])
    assert source.total_bytes() == 40
    texts = source.documents()
    assert source.position().item == str(first)
    next(texts)
    assert (source.position().item, source.position().bytes_done) == (str(first), 10)
    next(texts)
    assert (source.position().item, source.position().bytes_done) == (str(second), 40)
    source.documents({"file": 1, "at": 7, "line": 1})
    assert (source.position().item, source.position().bytes_done) == (str(second), 17), "before the first wait, too"


# ---------------------------------------------------------------- what is refused


def test_missing_files_name_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "letters.txt", "x")
    error = fails(InputMissing, tmp_path / "leters.txt")
    assert error.code == 66 and "letters.txt" in error.next
    assert "nothing matches" in fails(InputMissing, tmp_path / "*.xyz").what
    assert str(tmp_path) in fails(InputMissing, tmp_path / "no" / "such" / "place.txt").why
    (tmp_path / "folder").mkdir()
    assert "no text in folder" in fails(InputMissing, tmp_path / "folder").what
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in fails(InputMissing, tmp_path / "pipe").what


def test_empty_files(tmp_path: Path, monkeypatch: Any) -> None:
    empty = write(tmp_path / "empty.txt", "")
    assert fails(BadData, empty).code == 65
    warned: list[str] = []
    monkeypatch.setattr(report, "warn", lambda text, **_: warned.append(text))
    write(tmp_path / "full.txt", "text")
    assert read(tmp_path) == ["text"]
    assert "empty.txt" in warned[0]
    assert "every document is empty" in fails(BadData, write(tmp_path / "e.jsonl", '{"text": ""}\n' * 3)).why
    assert "every document is empty" in fails(BadData, write(tmp_path / "s.txt", "||||"), separator="||").why


def test_bytes_that_are_not_text_are_named_with_their_place(tmp_path: Path, monkeypatch: Any) -> None:
    good = "good line é\n".encode() * 1000
    for block in (64, 1 << 18):
        monkeypatch.setattr(reader_files, "BLOCK_BYTES", block)
        for bad, why in ((b"caf\xe9 noir", "not UTF-8"), (b"caf\x00 noir", "NUL")):
            path = write(tmp_path / "a.txt", good + bad + good)
            error = fails(BadData, path, bad_text="refuse")
            assert f"{path}:1001, byte {len(good) + 3:,}" in error.what and why in error.why
            packed = write(tmp_path / "a.txt.gz", gzip.compress(good + bad))
            assert (
                f":1001, byte {len(good) + 3:,} of the unpacked text" in fails(BadData, packed, bad_text="refuse").what
            )
            row = b'{"text": "fine"}\n' * 5
            lines = write(tmp_path / "a.jsonl", row + b'{"text": "' + bad + b'"}\n')
            assert f"{lines}:6, byte {len(row) + 13:,}" in fails(BadData, lines).what
    assert "iconv -f ISO-8859-1" in fails(BadData, write(tmp_path / "l.txt", "café".encode("latin-1"))).next
    rows = write(tmp_path / "l.jsonl", '{"text": "café"}\n'.encode("latin-1"))
    assert "> utf8.jsonl, and name that file" in fails(BadData, rows).next, "under .txt it would be read as one text"
    assert "iconv -f UTF-16" in fails(BadData, write(tmp_path / "u.txt", "text".encode("utf-16"))).next
    assert "byte 5" in fails(BadData, write(tmp_path / "cut.txt", "hello€".encode()[:-1])).what


def test_a_few_bad_lines_are_set_aside_and_counted(tmp_path: Path, monkeypatch: Any) -> None:
    warned: list[str] = []
    verdicts: list[report.Verdict] = []
    monkeypatch.setattr(report, "warn", lambda text, **_: warned.append(text))
    monkeypatch.setattr(report, "verdict", verdicts.append)
    for block in (64, 1 << 18):
        monkeypatch.setattr(reader_files, "BLOCK_BYTES", block)
        good = [f"good line é {n}\r\n".encode() for n in range(6000)]
        dirty = [
            *good[:100],
            b"caf\xe9 noir\n",
            *good[100:4000],
            b"a\0b\n",
            b"\xff\xfe\n",
            *good[4000:],
            b"ends in \xc3",
        ]
        path = write(tmp_path / "a.txt", b"".join(dirty))
        source = open_source([str(path)])
        assert list(source.documents()) == list(source.documents()) == [b"".join(good).decode()]
        assert [text for text in warned if "4 of 6,004 lines" in text] == [warned[-1]], "said once, not per reading"
        assert verdicts[-1].culprit == {"path": str(path), "line": 101, "byte": sum(map(len, good[:100])) + 3}
        warned.clear()
        rows = [json.dumps({"text": f"row {n}"}).encode() for n in range(3000)]
        lines = write(tmp_path / "a.jsonl", b"\n".join([*rows[:9], b'{"text": 7}', b"{half", *rows[9:]]))
        assert read(lines) == [f"row {n}" for n in range(3000)]
        assert "2 of 3,002 lines" in warned[-1]
        warned.clear()


def test_the_limit_on_bad_lines_is_of_the_corpus_with_a_floor_and_a_setting(tmp_path: Path) -> None:
    """One torn line in a small file of a large corpus, or three in a small corpus, are no reason to refuse it all."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(200):
        lines = [json.dumps({"text": f"document {number} {n}"}) for n in range(60)]
        if number in (0, 1, 50):
            lines[20:25] = ["{torn"] * 5
        (folder / f"{number:03}.jsonl").write_text("\n".join(lines) + "\n")
    found = open_source([str(folder)])
    with pytest.raises(BadData) as caught:
        list(found.documents())
    assert "15 of 12,000 lines" in caught.value.why and "data.bad_limit" in caught.value.why
    assert f"{folder / '000.jsonl'}:21, byte" in caught.value.what
    assert "lamp data clean" in caught.value.next and "remove the line" not in caught.value.next, "15 lines, not one"
    with pytest.raises(BadData, match="bad JSON"):
        ensure(tmp_path / "cache", open_source([str(folder)]), byte_level(), CacheSettings(0.1))
    loose = open_source([str(folder)], None, None, bad_limit=0.01)
    assert len(list(loose.documents())) == 200 * 60 - 15
    cache = open_tokens(ensure(tmp_path / "cache", loose, byte_level(), CacheSettings(0.1)))
    assert cache.train.documents + cache.val.documents == 200 * 60 - 15
    middle = dict(walk_to(loose, 7000))
    assert middle["bad"] == 15 and len(list(loose.documents(middle))) == 200 * 60 - 15 - 7000
    small = write(tmp_path / "small.jsonl", '{"text": "good"}\n' * 60 + "{torn\n" * 5)
    assert len(read(small)) == 60
    tiny = write(tmp_path / "tiny.jsonl", '{"text": "good"}\n' * 3 + "{torn\n")
    assert "1 of 4 lines" in fails(BadData, tiny).why


def walk_to(source: Any, count: int) -> Any:
    """The cursor after so many texts."""
    texts = source.documents()
    for _ in range(count):
        next(texts)
    return source.position().cursor


def test_a_long_line_with_a_bad_byte_loses_only_a_piece(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(reader_files, "LINE_BYTES", 1000)
    monkeypatch.setattr(reader_files, "BLOCK_BYTES", 512)
    long = ("日本é" * 20_000).encode()
    path = write(tmp_path / "a.txt", long)
    assert "".join(read(path)) == long.decode()
    other = write(tmp_path / "b.txt", long + b"\xff" + long + b"\n" * 5000)
    assert len(long.decode()) * 2 - 1000 < len("".join(read(other)).strip()) < len(long.decode()) * 2


def test_real_latin_1_book_is_refused_at_its_first_odd_byte() -> None:
    path = shared("london", "gutenberg_raw", "defoe_plague_17221-8.txt")
    with pytest.raises(UnicodeDecodeError) as truth:
        path.read_bytes().decode()
    line = path.read_bytes()[: truth.value.start].count(b"\n") + 1
    assert f":{line}, byte {truth.value.start:,}" in fails(BadData, path).what


def test_json_faults_name_the_line(tmp_path: Path) -> None:
    good = '{"text": "fine"}\n'
    assert ":3" in fails(BadData, write(tmp_path / "a.jsonl", good * 2 + '{"text": "torn\n')).what
    error = fails(BadData, write(tmp_path / "b.jsonl", good + '{"content": "x", "id": 1}\n'))
    assert ":2" in error.what and "content, id" in error.why and "text_key" in error.next
    assert ":1" in fails(BadData, write(tmp_path / "d.jsonl", '{"text": 7}\n')).what
    assert ":1" in fails(BadData, write(tmp_path / "e.jsonl", '"only a string"\n')).what
    assert "surrogate" in fails(BadData, write(tmp_path / "f.jsonl", '{"text": "\\ud800"}\n')).why


def test_torn_and_damaged_packed_files(tmp_path: Path) -> None:
    data = b"".join(b'{"text": "%d"}\n' % n for n in range(10_000))
    for name, packed in (("a.jsonl.gz", gzip.compress(data)), ("a.jsonl.zst", zstandard.compress(data))):
        assert "cut short" in fails(BadData, write(tmp_path / name, packed[: len(packed) // 2])).what
        assert "cannot unpack" in fails(BadData, write(tmp_path / name, b"not packed at all")).what
    flipped = bytearray(gzip.compress(data))
    flipped[-6] ^= 1
    assert "cannot unpack" in fails(BadData, write(tmp_path / "b.jsonl.gz", bytes(flipped))).what


def test_unreadable_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = write(tmp_path / "a.txt", "x")
    monkeypatch.setattr(local.os, "access", lambda *_: False)
    assert "permission" in fails(InputMissing, path).why
    monkeypatch.undo()
    source = open_source([str(path)])
    path.unlink()
    with pytest.raises(InputMissing):
        list(source.documents())
    with pytest.raises(InputMissing):
        source.fingerprint()


# ---------------------------------------------------------------- fingerprints


def test_fingerprint_follows_content_not_names_or_dates(tmp_path: Path) -> None:
    def mark(*names: str, separator: str | None = None) -> str:
        return open_source([str(tmp_path / name) for name in names], None, separator).fingerprint()

    write(tmp_path / "a.txt", "one")
    write(tmp_path / "b.txt", "two")
    before = mark("a.txt", "b.txt")
    os.utime(tmp_path / "a.txt", (1, 1))
    assert mark("a.txt", "b.txt") == before
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    assert mark("c.txt", "b.txt") == before
    assert mark("b.txt", "c.txt") != before
    assert mark("c.txt", "b.txt", separator="n") != before
    write(tmp_path / "b.txt", "twO")
    assert mark("c.txt", "b.txt") != before


def test_known_files_are_not_hashed_again(tmp_path: Path, monkeypatch: Any) -> None:
    path, store = write(tmp_path / "a.txt", "one"), tmp_path / "cache" / "hashes.json"
    hashed: list[Path] = []
    real = local.hash_content
    monkeypatch.setattr(local, "hash_content", lambda path, tick=None: hashed.append(path) or real(path, tick))
    now = time.time

    def mark() -> str:
        return open_source([str(path)], None, None, hash_store=store).fingerprint()

    first = mark()
    assert mark() == first and len(hashed) == 2, "a file written a moment ago may still change: not remembered"
    monkeypatch.setattr(local.time, "time", lambda: now() + 100)
    assert mark() == first and mark() == first
    assert len(hashed) == 3
    store.write_text("{damaged")
    assert mark() == first and len(hashed) == 4
    before = path.stat()
    path.write_text("two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and mark() != first, "an edit of the same size with its old date"


# ---------------------------------------------------------------- a user's own source


@pytest.fixture
def module(tmp_path: Path, monkeypatch: Any) -> Any:
    """Write a module into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = iter(f"mine{n}_{tmp_path.name.replace('-', '_')}" for n in range(100))

    def make(code: str) -> str:
        name = next(names)
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return make


@pytest.mark.parametrize(
    "code",
    [
        "texts = ['a', 'b', 'c']",
        "def texts():\n    yield from 'abc'",
        "def texts():\n    return ['a', 'b', 'c']",
        "class texts:\n    def documents(self, start=0):\n        return iter(['a', 'b', 'c'][start:])",
        "class T:\n    def documents(self, start=0):\n        return iter('abc'[start:])\ntexts = T()",
        "class T:\n    def documents(self, start=0):\n        yield from 'abc'[start:]\ndef texts():\n    return T()",
    ],
)
def test_own_sources_of_every_shape(module: Any, code: str) -> None:
    source = open_source([], f"{module(code)}:texts", None)
    for _ in range(2):
        assert list(source.documents()) == ["a", "b", "c"]
        assert list(source.documents({"document": 2})) == ["c"]
    assert source.total_bytes() is None
    assert source.position().item.startswith("document 3 of mine")


def test_own_fingerprint_or_that_of_the_code(module: Any) -> None:
    def mark(code: str) -> str:
        return open_source([], f"{module(code)}:T", None).fingerprint()

    given = (
        "class T:\n    def documents(self, start=0):\n        yield 'a'\n    def fingerprint(self):\n        return '7'"
    )
    assert mark(given) != mark(given.replace("7", "8"))
    name = module("T = ['a']")
    first = open_source([], f"{name}:T", None).fingerprint()
    assert open_source([], f"{name}:T", None).fingerprint() == first
    Path(f"{name}.py").write_text("T = ['b']")
    assert open_source([], f"{name}:T", None).fingerprint() != first


def test_own_source_mistakes_are_explained(module: Any) -> None:
    def fault(name: str, kind: type[LampError] = BadConfig) -> LampError:
        with pytest.raises(kind) as caught:
            list(open_source([], name, None).documents())
        return caught.value

    def of(code: str, kind: type[LampError] = BadConfig) -> LampError:
        return fault(f"{module(code)}:x", kind)

    assert fault("nocolon").code == 78
    assert "No module named" in fault("no_such_module_here:x").why
    broken = of("import json\n\n1 / 0\n")
    assert "ZeroDivisionError" in broken.why and ".py:3" in broken.why
    assert ":xs?" in of("def xs(): yield 1").next
    assert "only once" in of("x = (t for t in ['a'])").what
    assert "gives a int" in of("x = 7").what
    assert "document 1" in of("x = ['a', {}]", BadData).what
    assert "no text" in of("x = ['', '']", BadData).what
    with pytest.raises(BadConfig):
        open_source(["a.txt"], "m:x", None)


# ---------------------------------------------------------------- the embedded corpus


def test_the_embedded_corpus_is_the_default() -> None:
    source = open_source([])
    assert isinstance(source, EmbeddedCorpus)
    small = EmbeddedCorpus(seed=3, documents=50)
    texts = list(small.documents())
    assert len(texts) == 50 and all(texts)
    assert list(EmbeddedCorpus(seed=3, documents=50).documents({"document": 30})) == texts[30:]
    assert small.fingerprint() == EmbeddedCorpus(3, 50).fingerprint() != EmbeddedCorpus(4, 50).fingerprint()
    assert 0.5 < (small.total_bytes() or 0) / sum(map(len, texts)) < 2


def test_only_the_first_texts_are_read() -> None:
    from lamplighter.data.sources import EmbeddedCorpus, First

    whole = EmbeddedCorpus(0, 50)
    first = First(whole, 7)
    assert list(first.documents()) == list(whole.documents())[:7]
    some = first.documents()
    taken = [next(some) for _ in range(5)]
    assert taken + list(first.documents(first.position().cursor)) == list(whole.documents())[:7]
    assert first.fingerprint() != whole.fingerprint()
    assert First(whole, 8).fingerprint() != first.fingerprint()


def test_the_first_documents_come_with_all_their_parts(tmp_path: Path, monkeypatch: Any) -> None:
    from lamplighter.data.sources import First

    monkeypatch.setattr(reader_files, "PART_CHARS", 20)
    path = write(tmp_path / "a.txt", "|".join(f"{n} " + "fog " * 30 for n in range(9)))
    whole = open_source([str(path)], None, "|")
    first = First(whole, 3)
    texts = list(first.documents())
    assert joined(texts) == [f"{n} " + "fog " * 30 for n in range(3)]
    some = first.documents()
    taken = [next(some) for _ in range(4)]
    assert isinstance(taken[-1], Part)
    assert taken + list(first.documents(first.position().cursor)) == texts


def test_a_source_that_is_opened_again_stands_at_its_start(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n{"text": "two"}\n')
    source = open_source([str(path)])
    list(source.documents())
    again = source.documents()
    assert source.position().cursor == {}
    assert next(again) == "one"
    assert list(source.documents(source.position().cursor)) == ["two"]


def test_an_own_source_with_a_cursor_of_its_own(module: Any) -> None:
    code = """
from lamplighter.data.sources import Position
class T:
    def documents(self, start=0):
        self.at = start["byte"] if isinstance(start, dict) else start
        while self.at < 9:
            self.at += 3
            yield f"text {self.at}"
    def position(self):
        return Position("mine", self.at, {"byte": self.at})
"""
    source = open_source([], f"{module(code)}:T", None)
    texts = source.documents()
    assert next(texts) == "text 3"
    assert source.position().cursor == {"document": 1, "own": {"byte": 3}}
    assert list(source.documents(source.position().cursor)) == ["text 6", "text 9"]


def test_what_a_folder_holds_besides_text_is_said(tmp_path: Path, monkeypatch: Any) -> None:
    said: list[str] = []
    monkeypatch.setattr(report, "note", lambda text, **_: said.append(text))
    for name in ("a.txt", "b.html", "c.html", "d.warc.gz", ".hidden", "README"):
        write(tmp_path / name, "some text")
    assert read(tmp_path) == ["some text"]
    assert len(said) == 1 and said[0].endswith(": .html 2, .warc.gz 1, README 1"), said
