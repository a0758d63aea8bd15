"""A corpus in figures: every number is the true one, every place can be gone to, and what was not counted is said."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamplighter import report
from lamplighter.config import Data
from lamplighter.data.chat import example_cache
from lamplighter.data.chat.rows import find_rows
from lamplighter.data.chat.template import load_template
from lamplighter.data.sources import EmbeddedCorpus, Position
from lamplighter.data.sources.file_source import FileSource
from lamplighter.data.split import CacheSettings
from lamplighter.data.stats import Request, Stats, collect, count_cache, count_text, minhash
from lamplighter.data.stats.chat_stats import Inspector, Row, count_rows, ends_mid_sentence
from lamplighter.data.stats.minhash import Signer, near_pairs, normalised, signatures
from lamplighter.data.stats.overlap import TestGrams as HeldBack
from lamplighter.data.stats.summary import told
from lamplighter.data.token_cache import reader
from lamplighter.data.tokenizer import byte_level, load
from lamplighter.readers.local import find_files
from opening import ensure
from running import real, shared

WORDS = [
    f"{a}{b}" for a in ("lamp", "fog", "bridge", "river", "coach", "candle") for b in ("", "s", "light", "man", "ing")
]


def words(number: int, count: int = 120) -> str:
    rng = random.Random(number)
    return " ".join(rng.choice(WORDS) + str(rng.randrange(50)) for _ in range(count))


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def source_of(*paths: Path) -> FileSource:
    return FileSource(find_files([str(path) for path in paths]))


def count(source: Any, test: HeldBack | None = None, **settings: Any) -> Stats:
    request = Request(**{"seq_len": 256, "batch_size": 8, "val_fraction": 0.05, **settings})
    return count_text(source, byte_level(), "", request, test)


# ---------------------------------------------------------------- counts


def test_the_counts_are_those_of_the_token_cache(tmp_path: Path) -> None:
    texts = [words(n, 20 + n % 60) + " naïve £5 日本語" for n in range(150)]
    source = source_of(write_lines(tmp_path / "a.jsonl", texts))
    found = count(source)
    assert found.counts.documents == 150
    assert found.counts.characters == sum(map(len, texts))
    assert found.counts.bytes == found.counts.tokens == sum(len(text.encode()) for text in texts)
    assert found.lengths.longest == max(len(text.encode()) for text in texts) + 1
    folder = ensure(tmp_path / "cache", source, byte_level(), CacheSettings(0.05))
    cache = reader.open_tokens(folder)
    assert len(cache.train) + len(cache.val) - found.counts.tokens_with_ends in (0, 2), "a side may begin with one more"
    assert (found.sides.train, found.sides.val) == (cache.train.documents, cache.val.documents)
    again = count_cache(folder, Request(256, 8, 0.05))
    assert again.lengths == found.lengths and again.histogram == found.histogram
    assert again.counts.tokens == found.counts.tokens and again.duplicates.near is None


def test_the_longest_and_the_shortest_have_a_place(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "a.jsonl", [words(1), words(2, 900), words(3)])
    two = write_lines(tmp_path / "b.jsonl", ["x", words(4)])
    found = count(source_of(one, two))
    assert "a.jsonl" in found.longest[0].place and found.longest[0].number == 1
    assert "b.jsonl" in found.shortest[0].place and (found.shortest[0].tokens, found.shortest[0].head) == (2, "x")


def test_a_document_in_parts_is_one_document(tmp_path: Path) -> None:
    text = words(5, 500_000)
    assert len(text) > 2 << 20
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "copy.txt").write_text(text.upper().replace(" ", "\n"))
    found = count(source_of(tmp_path), near_documents=0)
    assert found.counts.documents == 2 and found.lengths.longest == len(text) + 1
    assert found.duplicates.exact == 1, "case and white space apart, over the borders of parts"
    assert found.longest[0].place.removesuffix(":1").endswith(("book.txt", "copy.txt"))


def test_lines_that_are_not_text_are_shown(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [words(n, 5) for n in range(3000)])
    path.write_bytes(path.read_bytes() + b'{"text": "half a \xff"}\n')
    found = count(source_of(path), near_documents=0)
    assert found.counts.set_aside_lines == 1 and sum(found.counts.set_aside_reasons.values()) == 1
    assert "1 lines that are not text" in told(found)


def test_places_by_line_and_by_number() -> None:
    places = collect.Places()
    for line in (1, 2):
        places.add(f"a.jsonl:{line}")
    places.add("b.txt")
    for number in range(3):
        places.add(f"document {number} of my:source")
    assert [places.of(n) for n in range(4)] == ["a.jsonl:1", "a.jsonl:2", "b.txt", "my:source, document 1"]
    embedded = collect.Places()
    embedded.add("document 7 of 2000")
    assert embedded.of(0) == "document 1"


@pytest.mark.parametrize(
    ("name", "before", "after", "line"),
    [
        ("a.jsonl", {}, {"file": 0, "at": 9, "line": 2}, 1),
        ("a.jsonl.zst", {"file": 0, "line": 2}, {"file": 0, "line": 5}, 4),
        ("a.jsonl", {"file": 0, "line": 7}, {"file": 0, "line": 7}, 7),
        ("a.jsonl", {"file": 0, "line": 7}, {"file": 0, "line": 7, "part": 1}, 7),
        ("b.txt", {"file": 0, "line": 90}, {"file": 1, "line": 4}, 1),
        ("b.txt", {"file": 1, "line": 4}, {"file": 1, "line": 9}, 4),
        ("c.csv", {}, {"file": 0, "line": 3, "row": 1}, 2),
        ("d.json", {"file": 0, "line": 6, "row": 1}, {"file": 0, "line": 11, "row": 2}, 7),
        ("e.parquet", {}, {"file": 0, "row": 3}, 3),
        ("b.txt", {"number": 1, "inner": {"line": 4}}, {"number": 2, "inner": {"line": 9}}, 4),
        ("mine", {"document": 1}, {"document": 2}, 0),
    ],
)
def test_the_line_of_a_text_is_read_off_the_cursors(name: str, before: Any, after: Any, line: int) -> None:
    assert collect.line_of(Position(name, 0, before), Position(name, 1, after)) == line


# ---------------------------------------------------------------- duplicates


def test_near_duplicates_are_found_and_others_are_not(tmp_path: Path) -> None:
    texts = [words(n, 150) for n in range(120)]
    changed = texts[7].split()
    changed[60] = "otherwise"
    texts += [" ".join(changed), texts[11].upper(), words(500, 75) + " " + " ".join(texts[3].split()[:75])]
    found = count(source_of(write_lines(tmp_path / "a.jsonl", texts))).duplicates
    assert (found.exact, found.exact_groups, found.near) == (1, 1, 1), "half a text is not a near duplicate"
    assert found.exact_examples[0].copies == 2
    assert found.exact_examples[0].second.endswith(("document 122", ":122"))
    pair = found.near_examples[0]
    assert pair.first.endswith(("document 8", ":8")) and pair.second.endswith(("document 121", ":121"))
    assert 0.85 < pair.similarity < 1 and not found.near_sampled


def test_near_duplicates_across_the_sides(tmp_path: Path) -> None:
    texts = []
    for number in range(300):
        text = words(number, 200).split()
        texts.append(" ".join(text))
        text[100] = "otherwise"
        texts.append(" ".join(text))
    whole = count(source_of(write_lines(tmp_path / "a.jsonl", texts)), val_fraction=0.2)
    assert any("look better than it is" in one.because for one in whole.advice)
    found = whole.sides
    assert found.by == "documents" and found.exact == 0 and found.train + found.val == 600
    assert found.near_val == found.val and found.near_train == found.train
    assert found.near is not None and 0.5 * found.val < found.near <= found.val, (
        "most have their twin on the other side"
    )
    assert found.near_examples[0].first != found.near_examples[0].second


def test_few_long_texts_are_divided_by_blocks(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(words(1, 20_000))
    found = count(source_of(tmp_path), val_fraction=0.1).sides
    assert found.by == "blocks" and found.train + found.val > 40 and found.near == 0
    (tmp_path / "book.txt").write_text("one piece of text")
    found = count(source_of(tmp_path)).sides
    assert found.by == "" and "lamp train would refuse" in found.reason


def test_the_sample_of_signatures_is_bounded_and_the_same_every_time() -> None:
    made = []
    for _ in range(2):
        signer = Signer(50)
        for number in range(400):
            signer.offer(number, normalised(words(number, 20)))
        signer.flush()
        made.append(signer)
    assert made[0].numbers == made[1].numbers and 10 < len(made[0].numbers) <= 50 and made[0].every > 1
    assert made[0].matrix().shape == (len(made[0].numbers), minhash.SIGNATURE)
    rows, have = signatures([normalised(words(n, 20)) for n in made[0].numbers])
    assert have.all() and np.array_equal(rows, made[0].matrix())
    assert near_pairs(rows) == []


def test_without_the_library_near_duplicates_are_said_to_be_missing(tmp_path: Path, monkeypatch: Any) -> None:
    said: list[str] = []
    monkeypatch.setitem(sys.modules, "rensa", None)
    monkeypatch.setattr(report, "warn", lambda text, **_: said.append(text))
    found = count(source_of(write_lines(tmp_path / "a.jsonl", [words(n) for n in range(120)])))
    assert found.duplicates.near is None and "lamplighter[data]" in found.duplicates.near_reason
    assert found.sides.near is None and len(said) == 1
    assert "near ones are not counted" in told(found)


# ---------------------------------------------------------------- a test set (situation 21)


def test_a_test_set_that_overlaps_is_found(tmp_path: Path) -> None:
    texts = [words(n, 150) for n in range(150)]
    near = texts[20].split()
    near[75] = "otherwise"
    inside = " ".join(texts[30].split()[40:90])
    test = [texts[10].upper(), " ".join(near), inside, words(900, 100), "three short words"]
    held = HeldBack("test", source_of(write_lines(tmp_path / "test.jsonl", test)))
    whole = count(source_of(write_lines(tmp_path / "train.jsonl", texts)), held)
    assert "3 of its 5 documents stand in the training text" in whole.advice[-1].because
    found = whole.test_set
    assert found is not None
    assert (found.documents, found.exact, found.grams, found.grams_short) == (5, 1, 2, 1)
    assert found.exact_examples[0].first.endswith(("document 11", ":11"))
    assert {pair.second[-1] for pair in found.gram_examples} == {"2", "3"}, "nearly the same, and a piece of one"
    assert found.near == 1 and found.near_examples[0].second[-1] == "2"


def test_a_test_set_of_rows_is_held_against_rows(tmp_path: Path) -> None:
    train, test = rows_file(tmp_path / "rows.jsonl"), tmp_path / "test.jsonl"
    lines = train.read_text().splitlines()
    fresh = {"prompt": "Never asked before, in no row?", "completion": f"Never said before: {words(77, 30)}"}
    test.write_text("\n".join([json.dumps(fresh), json.dumps({"prompt": json.loads(lines[4])["instruction"],
                    "completion": json.loads(lines[4])["output"]})]) + "\n")  # fmt: skip
    sources = [find_rows(Data(paths=[str(path)], format="auto")) for path in (train, test)]
    assert sources[0] is not None and sources[1] is not None
    held = HeldBack("test", sources[1])
    found = count_rows(sources[0], load_template("chatml", byte_level()), "", Request(512, 8, 0.1), held).test_set
    assert found is not None and (found.documents, found.exact) == (2, 1)
    assert found.exact_examples[0].first == f"{train}:5" and found.exact_examples[0].second == f"{test}:2"


# ---------------------------------------------------------------- samples and sources


def test_a_sample_says_so_in_every_figure(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [words(n, 150) for n in range(1500)])
    found = count(source_of(path), sample_bytes=300_000, near_documents=0)
    assert 290_000 < found.counts.bytes < 330_000
    assert "a sample of 30" in found.sampled and "SAMPLE" in told(found)
    assert max(one.number for one in found.longest) < found.counts.documents < 400
    assert count(source_of(path), sample_bytes=10**9, near_documents=0).sampled == ""


class Own:
    """A source of the user's own, without a size, with an empty text."""

    def fingerprint(self) -> str:
        return "own"

    def total_bytes(self) -> None:
        return None

    def position(self) -> Any:
        return Position("document 0 of my:own", 0)

    def documents(self, start: Any = None) -> Iterator[str]:
        yield ""
        yield from EmbeddedCorpus(0, 120).documents()


def test_any_source_will_do() -> None:
    found = count(Own())
    assert found.counts.documents == 120 and found.counts.empty_documents == 1
    assert "empty documents" in told(found)
    assert found.longest[0].place.startswith("my:own, document ")


# ---------------------------------------------------------------- faults of instruction rows


def test_faults_of_rows_are_counted_by_reason_with_examples() -> None:
    inspector = Inspector()
    good = [Row(f"f:{n}", f"Question {n}?", f"This is the answer number {n}.") for n in range(10)]
    for row in good:
        assert inspector.look(row) == []
    assert inspector.look(Row("f:20", "  ", "")) == ["empty"]
    assert inspector.look(Row("f:21", "Why?", " ")) == ["no_answer"]
    assert inspector.look(Row("f:22", "", "Because.")) == ["no_prompt"]
    assert inspector.look(Row("f:23", "QUESTION  3?", "this is the answer number 3.")) == ["repeated"]
    assert inspector.look(Row("f:24", "Question 4?", "Another answer.")) == ["same_prompt"]
    assert inspector.look(Row("f:25", "Say this again.", "say this again.")) == ["answer_is_prompt"]
    assert inspector.look(Row("f:26", "What is 1 + 1?", "2"), over_length=True) == ["very_short", "very_long"]
    inspector.set_aside(2, {"f:27": "not JSON", "f:28": "no keys"})
    found = inspector.result()
    counts = {one.reason: one.count for one in found.reasons if one.count}
    assert counts == {"empty": 1, "no_answer": 1, "no_prompt": 1, "repeated": 1, "answer_is_prompt": 1, "same_prompt": 1,
                      "very_short": 1, "very_long": 1, "unreadable": 2}  # fmt: skip
    assert (found.rows, found.faulty, found.doubtful) == (19, 7, 2)
    assert found.score == pytest.approx(100 * (1 - (7 + 0.25 * 2) / 19), abs=0.01)
    unreadable = next(one for one in found.reasons if one.reason == "unreadable")
    assert [one.place for one in unreadable.examples] == ["f:27", "f:28"]


@pytest.mark.parametrize(
    ("answer", "cut"),
    [
        ("The bridge was built in 1750. It has thirteen arches and the lamps on it", True),
        ("There were three of them: the first, the second, and then,", True),
        ("The bridge was built in 1750. It has thirteen arches and many lamps.", False),
        ("Paris", False),
        ("- the first lamp\n- the second lamp\n- the third lamp on the old bridge", False),
        ("See the code. It is short and simple:\n```python\nprint(1 + 1 + 1 + 1)\n```", False),
        ("one two three four five six seven eight nine ten", False),
        ("He said it was late. Then he left and wrote on the wall “goodbye”", False),
        ("A day at the sea. We laughed and swam and ate all day long #summer", False),
    ],
)
def test_an_answer_that_stops_in_the_middle_is_a_guess(answer: str, cut: bool) -> None:
    assert ends_mid_sentence(answer) is cut


# ---------------------------------------------------------------- the command


def rows_file(path: Path) -> Path:
    rows: list[Any] = [
        {"instruction": f"Question {n} of the row?", "output": f"Answer {n}, and {words(n, 6)}."} for n in range(60)
    ]
    rows += [
        rows[5],
        {"instruction": "Why?", "output": ""},
        {"instruction": "Question 7 of the row?", "output": "Other."},
    ]
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join([*lines, "{torn", json.dumps({"instruction": "No answer key"})]) + "\n")
    return path


def test_the_examples_are_those_of_training(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "rows.jsonl")
    source = find_rows(Data(paths=[str(path)], format="auto"))
    assert source is not None
    template = load_template("chatml", byte_level())
    found = count_rows(source, template, "", Request(512, 8, 0.1), None)
    made = example_cache.open_examples(example_cache.ensure(tmp_path / "cache", source, template, 0.1))
    assert (found.sides.train, found.sides.val) == (made.train.examples, made.val.examples)
    assert found.counts.documents - found.duplicates.exact == made.train.examples + made.val.examples
    lengths = {*made.train.length.tolist(), *made.val.length.tolist()}
    assert (found.lengths.shortest, found.lengths.longest) == (min(lengths), max(lengths))


# ---------------------------------------------------------------- real data


def test_the_web_sample_has_the_figures_that_are_known_of_it() -> None:
    source = source_of(real("web", "slimpajama_like"))
    request = Request(1024, 8, 0.02, near_documents=1000)
    found = count_text(source, load(real("tokenizers", "gpt2")), "gpt2", request, None)
    assert found.counts.documents == 603 and found.counts.tokens == 902_741
    assert (found.lengths.p50, found.lengths.p95, found.lengths.longest) == (358, 5_124, 225_897)
    assert found.window.over == 144
    assert found.duplicates.exact == 7, "six to the byte, and one that differs in white space"


def test_the_famous_padding_is_measured() -> None:
    path = shared("finetune", "instruction-data-short.json")
    tokenizer = load(shared("tokenizers", "gpt2"))
    source = find_rows(Data(paths=[str(path)], format="auto"))
    assert source is not None
    found = count_rows(source, load_template("plain", tokenizer), "gpt2", Request(2048, 16, 0.02), None)
    assert found.counts.documents == 1100 and found.lengths.p95 < 64
    shares = {one.strategy: one.share for one in found.padding}
    assert shares["to seq_len"] > 0.97 and shares["packed"] < 0.1
    assert found.quality is not None and (found.quality.rows, found.quality.faulty) == (1100, 0)
