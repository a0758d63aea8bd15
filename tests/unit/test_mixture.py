"""Several sources as one: shares as asked for, the same order from any cursor, ends and repetitions said."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from test_cursors import check_every_cursor, walk

from lamplighter import report
from lamplighter.data.sources import Part, Source
from lamplighter.errors import BadConfig, BadData
from lamplighter.readers import files as reader_files
from opening import open_source


@pytest.fixture
def said(monkeypatch: Any) -> list[str]:
    words: list[str] = []
    monkeypatch.setattr(report, "warn", lambda text, **_: words.append(text))
    monkeypatch.setattr(report, "note", lambda text, **_: words.append(text))
    return words


def write(path: Path, letter: str, sizes: list[int]) -> str:
    path.write_text("".join(json.dumps({"text": letter * size}) + "\n" for size in sizes))
    return str(path)


def mixed(paths: list[str], weights: list[float], until: str = "first") -> Source:
    return open_source(paths, None, None, weights=weights, mix_until=until)


def test_shares_are_by_text_and_the_order_depends_on_nothing_else(tmp_path: Path, said: list[str]) -> None:
    rng = random.Random(2)
    a = write(tmp_path / "a.jsonl", "a", [rng.randrange(1, 900) for _ in range(2000)])
    b = write(tmp_path / "b.jsonl", "b", [rng.randrange(1, 90) for _ in range(9000)])
    c = write(tmp_path / "c.jsonl", "c", [rng.randrange(1, 300) for _ in range(2000)])
    texts = list(mixed([a, b, c], [6, 3, 1]).documents())
    assert texts == list(mixed([a, b, c], [60, 30, 10]).documents())
    chars = [sum(len(t) for t in texts if t[0] == letter) for letter in "abc"]
    for share, wanted in zip(chars, (0.6, 0.3, 0.1), strict=True):
        assert abs(share / sum(chars) - wanted) < 0.002
    for stop in range(500, len(texts), 500):  # not only at the end
        part = sum(len(t) for t in texts[:stop] if t[0] == "a") / sum(map(len, texts[:stop]))
        assert abs(part - 0.6) < 0.02
    assert "mixture ends" in said[-1] and "of 60.0% asked for" in said[-1] and "left unread" in said[-1]


@pytest.mark.parametrize("until", ["first", "all"])
def test_any_cursor_of_a_mixture_goes_on(tmp_path: Path, said: list[str], until: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(reader_files, "PART_CHARS", 50)
    rng = random.Random(7)
    (tmp_path / "a.txt").write_text("|".join("word " * rng.randrange(1, 80) for _ in range(60)))
    b = write(tmp_path / "b.jsonl", "b ", [rng.randrange(1, 200) for _ in range(15)])
    paths = [str(tmp_path / "a.txt"), b]
    whole = check_every_cursor(
        lambda: open_source(paths, None, "|", weights=[1, 2], mix_until=until), 40 if until == "first" else 12
    )
    assert any(isinstance(text, Part) for text in whole)
    letters = [text[0] for text in whole]
    for text, letter, after in zip(whole, letters, letters[1:], strict=False):
        assert not isinstance(text, Part) or "w b".find(letter) < 0 or after in (letter, " "), (
            "a document stays together"
        )
    assert any("starts again" in words for words in said) == (until == "all")


def test_short_sources_are_repeated_until_all_have_ended(tmp_path: Path, said: list[str]) -> None:
    long, short = write(tmp_path / "a.jsonl", "a", [10] * 100), write(tmp_path / "b.jsonl", "b", [10] * 7)
    texts = list(mixed([long, short], [1, 1], "all").documents())
    assert texts.count("a" * 10) == 100 and 99 <= texts.count("b" * 10) <= 101
    repeated = [words for words in said if "starts again" in words]
    assert len(repeated) == 14 and "repetition 14" in repeated[-1]
    assert "read to its end" in said[-1] and "read 14 times" in said[-1]


def test_what_is_left_unread_is_said(tmp_path: Path, said: list[str]) -> None:
    long = write(tmp_path / "a.jsonl", "a", [50_000] * 100)
    short = write(tmp_path / "b.jsonl", "b", [50_000] * 10)
    texts = list(mixed([long, short], [1, 1]).documents())
    assert sum(text[0] == "b" for text in texts) == 10
    left = int(said[-1].partition("% left unread")[0].rpartition(" ")[2])
    assert 80 <= left <= 90


def test_wrong_weights_are_explained(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", "a", [3]), write(tmp_path / "b.jsonl", "b", [3])

    def fault(paths: list[str], weights: list[float]) -> BadConfig:
        with pytest.raises(BadConfig) as caught:
            mixed(paths, weights)
        assert caught.value.code == 78
        return caught.value

    assert "3 weights (3, 1, 2) for 2 entries" in fault([a, b], [3, 1, 2]).why
    assert "0 of 3 would be 0%" in fault([a, b], [3, 0]).why
    assert "-1" in fault([a, b], [3, -1]).what
    assert "without data.paths" in fault([], [1]).what


def test_what_a_mixture_is_decides_its_fingerprint(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", "a", [3]), write(tmp_path / "b.jsonl", "b", [3])
    marks = {mixed(p, w, u).fingerprint() for p, w, u in (([a, b], [1, 2], "first"), ([b, a], [1, 2], "first"),
                                                          ([a, b], [2, 1], "first"), ([a, b], [1, 2], "all"))}  # fmt: skip
    assert len(marks) == 4
    assert mixed([a, b], [1, 2]).fingerprint() in marks


def test_position_counts_over_all_of_them(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", "a", [10] * 50), write(tmp_path / "b.jsonl", "b", [10] * 50)
    source = mixed([a, b], [1, 1])
    assert source.position().item == a
    walk(source)
    assert source.position().bytes_done == source.total_bytes() == sum(Path(p).stat().st_size for p in (a, b))


def test_entries_without_weights_come_one_after_the_other(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_for_chain.py").write_text("texts = ['m1', 'm2']\n")
    a, b = write(tmp_path / "a.jsonl", "a", [3, 4]), write(tmp_path / "b.jsonl", "b", [3])
    paths = [a, "source:mine_for_chain:texts", b]
    assert check_every_cursor(lambda: open_source(paths), 9) == ["aaa", "aaaa", "m1", "m2", "bbb"]
    texts = list(mixed([a, "source:mine_for_chain:texts"], [1, 1]).documents())
    assert texts[:3] == ["aaa", "m1", "m2"]


def test_an_empty_source_in_a_mixture_is_an_error(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", "a", [3]), write(tmp_path / "b.jsonl", "b", [0, 0])
    with pytest.raises(BadData):
        list(mixed([a, b], [1, 1], "all").documents())
