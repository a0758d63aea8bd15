"""Instruction rows: every kind is found, every fault is named with its place, the cache is built once and never trusted."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import threading
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lamplighter import report
from lamplighter.config import Data
from lamplighter.data.batches import BatchLayout
from lamplighter.data.cache_location import locked
from lamplighter.data.chat import example_cache, rendering, rows
from lamplighter.data.chat.example_cache import LEARNED, ensure, open_examples
from lamplighter.data.chat.packing import arrange
from lamplighter.data.chat.rows import (
    NotAnExample,
    RowSource,
    SetAside,
    complete,
    conversations,
    find_rows,
    kind_of_row,
)
from lamplighter.data.chat.template import load_template
from lamplighter.data.sources import Opened, open_data
from lamplighter.data.tokenizer import byte_level, load
from lamplighter.errors import BadConfig, BadData, InputMissing
from lamplighter.readers.local import local_file
from running import shared, wait_for
from server import serving

MESSAGES = {
    "messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}],
    "id": 7,
}
SHARED_GPT = {
    "conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}],
    "system": "Brief.",
}
PROMPT = {"prompt": "Who?", "completion": "Me."}
ALPACA = {"instruction": "Translate.", "input": "lampe", "output": "lamp", "system": "Be brief."}
SEED = {"instruction": "Translate.", "instances": [{"input": "a", "output": "b"}, {"input": "c", "output": "d"}]}
TEMPLATE = load_template("chatml", byte_level())


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(report._reporter, "event", lambda type, **fields: events.append({"type": type, **fields}))
    return events


def texts(said: list[dict[str, Any]], type: str = "note") -> str:
    return "\n".join(str(event.get("text")) for event in said if event["type"] == type)


def write_lines(path: Path, found: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in found))
    return path


def source_of(*paths: Path, policy: str = "set_aside", limit: int | None = None, wanted: str = "auto") -> RowSource:
    found = find_rows(Data(paths=[str(path) for path in paths], format=wanted, bad_text=policy, max_documents=limit))
    assert found is not None
    return found


def talks(source: RowSource) -> list[list[tuple[str, str]]]:
    found = source.conversations(SetAside(source.policy))
    return [[(message["role"], message["content"]) for message in messages] for messages, _ in found]


# ---------------------------------------------------------------- kinds


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (MESSAGES, [("user", "Who?"), ("assistant", "Me.")]),
        (SHARED_GPT, [("system", "Brief."), ("user", "Who?"), ("assistant", "Me.")]),
        (PROMPT, [("user", "Who?"), ("assistant", "Me.")]),
        (ALPACA, [("system", "Be brief."), ("user", "Translate.\n\nlampe"), ("assistant", "lamp")]),
        ({"prompt": "Who?", "response": 7}, [("user", "Who?"), ("assistant", "7")]),
        (
            {"instruction": "And?", "output": "No.", "history": [["Who?", "Me."]]},
            [("user", "Who?"), ("assistant", "Me."), ("user", "And?"), ("assistant", "No.")],
        ),
    ],
)
def test_each_kind_is_found_by_its_keys(row: dict[str, Any], expected: list[tuple[str, str]], tmp_path: Path) -> None:
    assert talks(source_of(write_lines(tmp_path / "x.jsonl", [row]))) == [expected]


def test_a_row_with_several_instances_is_several_examples(tmp_path: Path) -> None:
    found = talks(source_of(write_lines(tmp_path / "x.jsonl", [SEED])))
    assert [talk[-1][1] for talk in found] == ["b", "d"]


def test_alpaca_keeps_its_heading_between_instruction_and_input(tmp_path: Path) -> None:
    template = load_template("alpaca", byte_level())
    folder = ensure(tmp_path / "cache", source_of(write_lines(tmp_path / "x.jsonl", [ALPACA])), template, 0.0)
    text = byte_level().decode(open_examples(folder).train.ids(0))
    assert "### Instruction:\nTranslate.\n\n### Input:\nlampe\n\n### Response:\nlamp<|endoftext|>" in text


def test_all_the_formats_of_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = [PROMPT, {"prompt": 'quoted, "twice"\nand long', "completion": "Yes."}]
    write_lines(tmp_path / "a.jsonl", table)
    (tmp_path / "b.json").write_text("\ufeff" + json.dumps(table, indent=2))
    (tmp_path / "c.csv").write_text('prompt,completion\nWho?,Me.\n"quoted, ""twice""\nand long",Yes.\n')
    parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "d.parquet")
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    expected = talks(source_of(tmp_path / "a.jsonl"))
    for name in ("b.json", "c.csv", "d.parquet", "e.jsonl.gz"):
        assert talks(source_of(tmp_path / name)) == expected, name
    assert len(talks(source_of(tmp_path))) == 10, "a folder: all of them"
    nested = [MESSAGES, MESSAGES]
    parquet.write_table(pyarrow.Table.from_pylist(nested), tmp_path / "m.parquet")
    assert talks(source_of(tmp_path / "m.parquet"))[0] == [("user", "Who?"), ("assistant", "Me.")]


def test_places_are_lines_also_in_an_array(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([PROMPT, PROMPT, {"prompt": "Q", "completion": ""}], indent=1))
    aside = SetAside()
    assert len(list(source_of(tmp_path / "x.json").conversations(aside))) == 2
    line = (tmp_path / "x.json").read_text().splitlines().index('  "prompt": "Q",')
    assert aside.first == {"the answer is empty": f"{tmp_path / 'x.json'}:{line}"}


# ---------------------------------------------------------------- from wherever text may come


def test_torn_packed_rows_are_refused_with_file_and_byte(tmp_path: Path) -> None:
    data = "".join(json.dumps(row) + "\n" for row in many(8000)).encode()
    for name, packed in (("x.jsonl.zst", zstandard.compress(data)), ("x.jsonl.gz", gzip.compress(data))):
        path = tmp_path / name
        path.write_bytes(packed[: len(packed) // 2])
        with pytest.raises(BadData, match="cut short") as caught:
            ensure(tmp_path / name[-3:], source_of(path), TEMPLATE, 0.1)
        assert str(path) in caught.value.what and f"after {len(packed) // 2:,} bytes" in caught.value.why
        assert not list((tmp_path / name[-3:]).glob("*/examples.json"))
        path.write_bytes(packed)
        assert open_examples(ensure(tmp_path / name[-3:], source_of(path), TEMPLATE, 0.1)).manifest["rows"] == 8000


def test_rows_come_over_http_packed_or_not_and_from_any_file_system(tmp_path: Path) -> None:
    found = [(row["prompt"], row["completion"]) for row in many(300)]
    lines = "".join(json.dumps(row) + "\n" for row in many(300)).encode()
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(many(300)), table, row_group_size=70)
    comma = io.StringIO()
    writer = csv.DictWriter(comma, ["prompt", "completion"])
    writer.writeheader()
    writer.writerows(many(300))
    kinds = {"x.jsonl": lines, "x.jsonl.zst": zstandard.compress(lines), "x.jsonl.gz": gzip.compress(lines),
             "x.json": json.dumps(many(300)).encode(), "x.parquet": table.getvalue(), "x.csv.gz": gzip.compress(comma.getvalue().encode())}  # fmt: skip
    with serving() as server:
        for name, data in kinds.items():
            fsspec.filesystem("memory").pipe(f"/rows/{name}", data)
            for url in (server.put(name, data)[0], f"memory://rows/{name}"):
                source = find_rows(Data(paths=[url]))
                assert source is not None and source.fingerprint() == source.fingerprint()
                assert [(talk[0][1], talk[1][1]) for talk in talks(source)] == found, url
        url, _ = server.put("torn.jsonl.gz", gzip.compress(lines)[:-100])
        torn = find_rows(Data(paths=[url]))
        assert torn is not None
        with pytest.raises(BadData, match="cut short"):
            talks(torn)


def test_rows_come_from_a_dataset_and_text_of_it_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(many(40)).save_to_disk(str(tmp_path / "rows"))
    source = find_rows(Data(paths=[f"dataset:{tmp_path / 'rows'}"]))
    assert source is not None and len(talks(source)) == 40 and len(source.fingerprint()) == 64
    assert open_examples(ensure(tmp_path / "cache", source, TEMPLATE, 0.1)).manifest["rows"] == 40
    datasets.Dataset.from_list([{"text": f"text {n}"} for n in range(9)]).save_to_disk(str(tmp_path / "text"))
    opened: Opened = {}
    data = Data(paths=[f"dataset:{tmp_path / 'text'}"])
    assert find_rows(data, None, opened) is None
    assert list(open_data(data, None, opened).documents()) == [f"text {n}" for n in range(9)]


def test_rows_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", many(300))
    source = source_of(path)
    source.fingerprint()
    write_lines(path, many(301))
    with pytest.raises(BadData, match="changed"):
        ensure(tmp_path / "cache", source, TEMPLATE, 0.1)


def test_too_many_lines_that_are_no_rows_are_refused_by_the_limit(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [*many(300), *["{torn"] * 9])
    with pytest.raises(BadData, match=r"x\.jsonl:301") as caught:
        talks(source_of(path))
    assert "9 of 309 lines" in caught.value.why and "data.bad_limit" in caught.value.why
    loose = find_rows(Data(paths=[str(path)], bad_limit=0.1))
    assert loose is not None and len(talks(loose)) == 300


# ---------------------------------------------------------------- auto


def test_what_was_detected_is_announced_with_the_reason(tmp_path: Path, said: list[dict[str, Any]]) -> None:
    source_of(write_lines(tmp_path / "x.jsonl", [ALPACA]))
    assert "instruction data (data.format auto): the rows of x.jsonl have instruction, input, output" in texts(said)


def test_text_stays_text(tmp_path: Path) -> None:
    with_text = write_lines(tmp_path / "x.jsonl", [{"text": "Once.", "prompt": "a", "completion": "b"}])
    plain = tmp_path / "x.txt"
    plain.write_text('{"prompt": "a", "completion": "b"}')
    for path in (with_text, plain, write_lines(tmp_path / "y.jsonl", [{"body": "Once."}])):
        assert find_rows(Data(paths=[str(path)], format="auto")) is None
    rows_ = write_lines(tmp_path / "z.jsonl", [PROMPT])
    assert find_rows(Data(paths=[str(rows_)], format="text")) is None, "as asked for"
    assert find_rows(Data(paths=[str(with_text)], format="chat")) is not None, "as asked for"
    assert find_rows(Data(paths=[], format="auto")) is None


def test_a_folder_of_rows_may_hold_a_readme_which_is_said(tmp_path: Path, said: list[dict[str, Any]]) -> None:
    write_lines(tmp_path / "x.jsonl", [PROMPT])
    (tmp_path / "README.md").write_text("About.")
    assert [one.name for one in source_of(tmp_path).inputs] == [str(tmp_path / "x.jsonl")]
    assert "not read, as they hold no rows: 1 other files" in texts(said, "warning") and "README.md" in texts(
        said, "warning"
    )


def test_a_file_that_is_broken_throughout_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", ["{broken"] * 5000 + [json.dumps(PROMPT)])
    assert rows.look_at_rows(local_file(path), "text") == (None, "the rows of x.jsonl have the keys none")


def test_chat_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="holds no instruction rows") as error:
        source_of(write_lines(tmp_path / "y.jsonl", [{"body": "Once."}]), wanted="chat")
    assert "keys body" in error.value.why
    (tmp_path / "x.txt").write_text("Once.")
    with pytest.raises(InputMissing, match="no instruction rows"):
        source_of(tmp_path / "x.txt", wanted="chat")
    with pytest.raises(BadConfig, match=r"data\.format is chat"):
        find_rows(Data(paths=[], format="chat"))


def test_a_mixture_is_named_with_its_line(tmp_path: Path) -> None:
    early = write_lines(tmp_path / "early.jsonl", [PROMPT, MESSAGES])
    with pytest.raises(BadData, match=r"early\.jsonl:2 is a row of another kind") as error:
        source_of(early)
    assert "messages" in error.value.why and "prompt, completion" in error.value.why
    late = source_of(write_lines(tmp_path / "late.jsonl", [PROMPT] * 30 + [MESSAGES]))
    with pytest.raises(BadData, match=r"late\.jsonl:31 is a row of another kind"):
        talks(late)
    two = source_of(write_lines(tmp_path / "one.jsonl", [PROMPT]), write_lines(tmp_path / "two.jsonl", [MESSAGES]))
    assert len(talks(two)) == 2, "several files may differ"


# ---------------------------------------------------------------- what is set aside


BAD = [
    PROMPT,
    {"prompt": "Who?", "completion": "  "},
    {"prompt": "", "completion": "Me."},
    {"prompt": "Who?"},
    "{not json",
    '"a string"',
    {"prompt": "Who?", "completion": {"a": 1}},
    PROMPT,
    {"prompt": "Where?", "completion": "Here.<|endoftext|>"},
    {"prompt": "When?", "completion": "<|endoftext|>"},
]


def test_rows_that_cannot_be_learned_from_are_counted_and_named(tmp_path: Path, said: list[dict[str, Any]]) -> None:
    path = write_lines(tmp_path / "x.jsonl", BAD)
    found = open_examples(ensure(tmp_path / "cache", source_of(path), TEMPLATE, 0.0))
    found.tell()
    assert found.train.examples == 2
    reasons = {reason: (count, first) for reason, count, first in found.manifest["set_aside"]}
    assert reasons == {
        "the answer is empty": (2, f"{path}:2"),
        "the question is empty": (1, f"{path}:3"),
        "the keys are prompt, not prompt, completion": (1, f"{path}:4"),
        "bad JSON": (1, f"{path}:5"),
        "is not a row": (1, f"{path}:6"),
        "the answer is not text": (1, f"{path}:7"),
        "the same as an earlier one": (1, f"{path}:8"),
    }
    assert found.manifest["rows"] == 10
    warned = texts(said, "warning")
    assert "2 rows set aside" in warned and f"{path}:2" in warned and "the same as an earlier one" in warned
    assert "2 answers end in an end mark that is written out" in texts(said)
    text = byte_level().decode(found.train.ids(1))
    assert text.count("<|endoftext|>") == 2 and found.train.ids(1).tolist().count(256) == 2
    said.clear()
    open_examples(ensure(tmp_path / "cache", source_of(path), TEMPLATE, 0.0)).tell()
    assert "the same as an earlier one" in texts(said, "warning"), "said again when the cache is reused"


@pytest.mark.parametrize("number", range(1, 8))
def test_refuse_means_refuse(number: int, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [PROMPT, BAD[number]])
    with pytest.raises(BadData) as error:
        ensure(tmp_path / "cache", source_of(path, policy="refuse"), TEMPLATE, 0.0)
    assert f"{path}:2" in error.value.what and error.value.code == 65


def test_nothing_left_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"prompt": "Who?", "completion": ""}] * 3)
    with pytest.raises(BadData, match="no example in") as error:
        ensure(tmp_path / "cache", source_of(path), TEMPLATE, 0.0)
    assert "3 because the answer is empty" in error.value.why


def test_messages_that_are_not_a_conversation(tmp_path: Path) -> None:
    for value, reason in (
        ([{"role": "user", "content": "Hi"}], "no answer"),
        ([{"role": "assistant", "content": "Hi"}], "no question"),
        ([{"role": "wizard", "content": "Hi"}], "a message has the role 'wizard'"),
        ([{"content": "Hi"}], "a message has no role"),
        (["Hi"], "a message is not an object"),
        ([{"role": "user", "content": [{"type": "image"}]}], "the message is not text"),
    ):
        aside = SetAside()
        path = write_lines(tmp_path / "x.jsonl", [MESSAGES, {"messages": value}])
        assert len(list(source_of(path).conversations(aside))) == 1
        assert list(aside.counts) == [reason]
    unanswered = {"messages": [*MESSAGES["messages"], {"role": "user", "content": "And?"}]}  # type: ignore[misc]
    assert talks(source_of(write_lines(tmp_path / "x.jsonl", [unanswered])))[0][-1] == ("assistant", "Me.")


# ---------------------------------------------------------------- two sides


def many(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"What is {n} and {n}?", "completion": str(2 * n)} for n in range(count)]


def test_equal_examples_are_never_on_both_sides(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", many(400) + many(400))
    found = open_examples(ensure(tmp_path / "cache", source_of(path), TEMPLATE, 0.1))
    sides = [{bytes(side.ids(n)) for n in range(side.examples)} for side in (found.train, found.val)]
    assert not sides[0] & sides[1]
    assert found.train.examples + found.val.examples == 400
    assert 20 <= found.val.examples <= 60
    grown = write_lines(tmp_path / "y.jsonl", many(500))
    again = open_examples(ensure(tmp_path / "cache", source_of(grown), TEMPLATE, 0.1))
    assert sides[1] <= {bytes(again.val.ids(n)) for n in range(again.val.examples)}, "a side is for ever"


def test_neither_side_is_empty(tmp_path: Path) -> None:
    for count, fraction in ((2, 0.001), (5, 0.5), (30, 0.001)):
        path = write_lines(tmp_path / "x.jsonl", many(count))
        found = open_examples(ensure(tmp_path / "cache", source_of(path), TEMPLATE, fraction))
        assert found.train.examples and found.val.examples
    with pytest.raises(BadData, match="too few examples"):
        ensure(tmp_path / "cache", source_of(write_lines(tmp_path / "x.jsonl", many(1))), TEMPLATE, 0.1)


def test_every_end_mark_is_learned_or_it_is_an_error(tmp_path: Path) -> None:
    found = open_examples(
        ensure(tmp_path / "cache", source_of(write_lines(tmp_path / "x.jsonl", many(9))), TEMPLATE, 0.0)
    )
    found.check_ends(TEMPLATE.stop_id, TEMPLATE.stop)
    for number in range(9):
        begin, last = int(found.train.begin[number]), int(found.train.last_answer[number])
        assert found.train.tokens[begin + last] == np.uint32(TEMPLATE.stop_id) | LEARNED
    with pytest.raises(BadData, match="do not end with the token that generation stops at") as error:
        found.check_ends(65, "A")
    assert error.value.cause == "eos_not_trained"
    with pytest.raises(BadData, match="holds the id 256"):
        found.check_ids(256)


# ---------------------------------------------------------------- the cache


def test_the_cache_is_reused_and_rejected_by_its_fingerprint(tmp_path: Path, said: list[dict[str, Any]]) -> None:
    root, path = tmp_path / "cache", write_lines(tmp_path / "x.jsonl", many(9))
    first = ensure(root, source_of(path), TEMPLATE, 0.0)
    assert ensure(root, source_of(path), TEMPLATE, 0.0) == first
    assert "examples reused" in texts(said)
    bytes_before = (first / "examples.bin").read_bytes()
    said.clear()
    other = ensure(root, source_of(path), load_template("alpaca", byte_level()), 0.0)
    assert other != first and "template changed (chatml -> alpaca)" in texts(said)
    tokenizer = load(shared("models", "stories260K_hf_llama"))
    assert ensure(root, source_of(path), load_template("chatml", tokenizer), 0.0) not in (first, other)
    write_lines(path, many(10))
    said.clear()
    changed = ensure(root, source_of(path), TEMPLATE, 0.0)
    assert changed != first and "sources changed" in texts(said)
    assert (first / "examples.bin").read_bytes() == bytes_before
    with pytest.raises(InputMissing, match="no examples at"):
        ensure(root, source_of(path, limit=3), TEMPLATE, 0.0, "require")


def test_a_damaged_cache_is_found_and_built_anew(tmp_path: Path, said: list[dict[str, Any]]) -> None:
    root, path = tmp_path / "cache", write_lines(tmp_path / "x.jsonl", many(9))
    folder = ensure(root, source_of(path), TEMPLATE, 0.0)
    whole = (folder / "examples.bin").read_bytes()
    (folder / "examples.bin").write_bytes(whole[:-4])
    assert ensure(root, source_of(path), TEMPLATE, 0.0) == folder
    (verdict,) = [event for event in said if event["type"] == "verdict"]
    assert verdict["cause"] == "shard_truncated" and verdict["action"] == "rebuild"
    assert (folder / "examples.bin").read_bytes() == whole, "byte-identical"
    (folder / "examples.bin").write_bytes(b"\1" + whole[1:])
    with pytest.raises(BadData, match=r"damaged: .*examples\.bin"):
        open_examples(folder)
    ensure(root, source_of(path), TEMPLATE, 0.0, "rebuild")
    assert (folder / "examples.bin").read_bytes() == whole


def test_a_killed_build_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, path = tmp_path / "cache", write_lines(tmp_path / "x.jsonl", many(600))
    real, calls = example_cache._encode, 0

    def dying(chunk: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return real(chunk)

    monkeypatch.setattr(example_cache, "_encode", dying)
    with pytest.raises(KeyboardInterrupt):
        ensure(root, source_of(path), TEMPLATE, 0.0)
    (folder,) = root.iterdir()
    with pytest.raises(BadData):
        open_examples(folder)
    monkeypatch.setattr(example_cache, "_encode", real)
    again = open_examples(ensure(root, source_of(path), TEMPLATE, 0.0))
    assert again.train.examples == 600


def test_one_builds_and_the_others_wait_in_sight(tmp_path: Path, said: list[dict[str, Any]]) -> None:
    root, path = tmp_path / "cache", write_lines(tmp_path / "x.jsonl", many(9))
    built = ensure(root, source_of(path), TEMPLATE, 0.0)
    manifest = (built / "examples.json").read_bytes()
    (built / "examples.json").unlink()
    made: list[Path] = []
    with locked(built):
        other = threading.Thread(target=lambda: made.append(ensure(root, source_of(path), TEMPLATE, 0.0)))
        other.start()
        wait_for(lambda: "waiting for it" in texts(said))
        assert not made
        (built / "examples.json").write_bytes(manifest)  # the builder has finished
    other.join(20)
    assert made == [built] and "another process has built it" in texts(said)


# ---------------------------------------------------------------- real data


def test_real_files_load(tmp_path: Path) -> None:
    for name, kind, least in [
        ("instruction-data-short.json", "instruction", 1100),
        ("alpaca_en_demo.json", "instruction", 980),
        ("self_instruct_seed_tasks.jsonl", "instances", 175),
        ("t0_p3_short_mix.jsonl", "prompt", 1500),
    ]:
        path = shared("finetune", name)
        source = source_of(path, limit=2000)
        assert source.kinds == [kind], name
        found = open_examples(ensure(tmp_path, source, TEMPLATE, 0.02))
        assert found.train.examples + found.val.examples >= least, name
        found.check_ends(TEMPLATE.stop_id, TEMPLATE.stop)


def test_short_instructions_are_packed_with_next_to_no_padding(tmp_path: Path) -> None:
    template = load_template("chatml", load(shared("tokenizers", "gpt2")))
    source = source_of(shared("finetune", "instruction-data-short.json"))
    found = open_examples(ensure(tmp_path, source, template, 0.02))
    for seq_len in (256, 1024):
        feed = arrange(found, Data(seq_len=seq_len), BatchLayout(1, 8, seq_len, 0), takes_segments=True)
        assert feed.facts.padding <= 0.05
        batches = [feed.make(step) for step in range(1, feed.facts.steps_for(1) + 1)]
        filled, positions = (sum(batch.filled for batch in batches), sum(batch.targets.size for batch in batches))
        assert 1 - filled / positions <= 0.05


def test_the_texts_of_the_rows_train_a_tokenizer(tmp_path: Path) -> None:
    source = source_of(write_lines(tmp_path / "x.jsonl", many(3)))
    assert list(source.documents())[1] == "What is 1 and 1?\n2"
    assert source.position().item.endswith("x.jsonl:3")
    assert rows.suffix_of(Path("a.jsonl.gz")) == ".jsonl"


def test_weights_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    from lamplighter.config import resolve
    from lamplighter.data.setup import open_source
    from lamplighter.errors import BadConfig

    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "How many?", "completion": "Seven."}\n' * 3)
    run = resolve(None, None, {"data.paths": [str(path), str(path)], "data.weights": [1, 2]}).run
    with pytest.raises(BadConfig, match="instruction rows"):
        open_source(run, tmp_path / "cache")


# ---------------------------------------------------------------- calls of tools, questions and answers


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}


def test_tool_calls_become_text_and_the_answer_after_them_is_learned() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Łódź"}'}}
    row = {"tools": [WEATHER], "messages": [
        {"role": "user", "content": "Weather in Łódź?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"}, {"role": "assistant", "content": "It rains."}]}  # fmt: skip
    (made,) = conversations(row, "messages")
    assert [message["role"] for message in made] == ["system", "user", "assistant", "tool", "assistant"]
    assert (
        made[0]["content"].startswith("You may call these functions:\n<tools>\n")
        and '"name": "weather"' in made[0]["content"]
    )
    assert made[2]["content"] == '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
    assert complete(made) == made


def test_the_roles_of_sharegpt_and_glaive_are_known() -> None:
    row = {"system": "Be brief.", "tools": json.dumps([WEATHER]), "conversations": [
        {"from": "human", "value": "Weather?"}, {"from": "function_call", "value": '{"name": "weather", "arguments": {}}'},
        {"from": "observation", "value": "sun"}, {"from": "gpt", "value": "Sun."}]}  # fmt: skip
    (made,) = conversations(row, "messages")
    assert [message["role"] for message in made] == ["system", "user", "assistant", "tool", "assistant"]
    assert made[0]["content"].startswith("Be brief.\n\nYou may call") and "<tool_call>" in made[2]["content"]


GLAIVE = {
    "system": 'SYSTEM: You have these functions -\n{"name": "rate"}\n',
    "chat": 'USER: Dollars to euros?\n\n\nASSISTANT: <functioncall> {"name": "rate", "arguments": \'{"from": "USD", "why": "it\\\'s asked"}\'} <|endoftext|>'
    '\n\n\nFUNCTION RESPONSE: {"rate": 0.9}\n\n\nASSISTANT: It is 0.9.\nUSER and ASSISTANT: no turns here. <|endoftext|>\n\n\n',
}


PICKY = (
    "{% for m in messages %}{% if 'twice' in m['content'] %}{{ raise_exception('speakers must alternate') }}{% endif %}"
    "{{ m['role'] }}: {{ m['content'] }}{% if m['role'] == 'assistant' %}<|endoftext|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_row_that_the_template_refuses_is_set_aside_in_its_words_and_the_others_are_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "Elsewhere", rendering.Here)  # no process of its own
    (tmp_path / "picky.jinja").write_text(PICKY)
    template = load_template(str(tmp_path / "picky.jinja"), byte_level())
    rows = [{"prompt": word, "completion": f"{word}!"} for word in ("one", "twice", "three", "twice more", "five")]
    found = open_examples(ensure(tmp_path / "cache", source_of(write_lines(tmp_path / "x.jsonl", rows)), template, 0.0))
    assert found.manifest["examples"] == 3 and len(found.train.begin) == 3
    ((reason, count, place),) = found.manifest["set_aside"]
    assert "speakers must alternate" in reason and count == 2 and place.endswith("x.jsonl:2")
    pairs = [{"prompt": "?", "chosen": word, "rejected": f"not {word}"} for word in ("one", "twice", "three")]
    source = find_rows(Data(paths=[str(write_lines(tmp_path / "p.jsonl", pairs))]), pairs=True)
    assert source is not None
    kept = open_examples(ensure(tmp_path / "cache", source, template, 0.0))
    assert kept.manifest["examples"] == 2 and len(kept.train.begin) == 4, "whole pairs"
    with pytest.raises(BadData, match="no example") as nothing:
        ensure(tmp_path / "cache", source_of(write_lines(tmp_path / "y.jsonl", rows[1:2])), template, 0.0)
    assert "speakers must alternate" in nothing.value.why


def test_glaive_as_published_is_one_text_with_the_speakers_in_it() -> None:
    assert kind_of_row(GLAIVE) == "glaive"
    (made,) = conversations(GLAIVE, "glaive")
    assert [message["role"] for message in made] == ["system", "user", "assistant", "tool", "assistant"]
    assert made[0]["content"] == 'You have these functions -\n{"name": "rate"}'
    assert made[2]["content"] == (
        '<tool_call>\n{"name": "rate", "arguments": {"from": "USD", "why": "it\'s asked"}}\n</tool_call>'
    )
    assert made[-1]["content"] == "It is 0.9.\nUSER and ASSISTANT: no turns here."
    broken = {**GLAIVE, "chat": "USER: a\n\n\nASSISTANT: <functioncall> rate() <|endoftext|>"}
    with pytest.raises(NotAnExample, match="a function_call is not JSON"):
        conversations(broken, "glaive")
    assert kind_of_row({"chat": "we chatted"}) is None, "text under another name"


def test_a_row_that_is_set_aside_says_its_true_reason_and_where_it_stands(tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows = [good, {"messages": None}, {"messages": 3}, {"message": []}, good | {"messages": good["messages"][1:]}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))  # one line, as most tools write it
    source = find_rows(Data(paths=[str(tmp_path / "rows.json")]))
    aside = SetAside()
    assert source is not None and len(list(source.conversations(aside))) == 1
    assert {reason: place.rpartition("/")[2] for reason, place in aside.first.items()} == {
        "messages is null": "rows.json:1 (row 2 of it)",
        "messages is not a list": "rows.json:1 (row 3 of it)",
        "the keys are message, not messages": "rows.json:1 (row 4 of it)",
        "no question": "rows.json:1 (row 5 of it)",
    }


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, "a tool call has no function name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "the arguments of a tool call are not JSON",
        ),
        ({"role": "assistant", "tool_calls": "f()"}, "tool_calls is not a list of calls"),
        ({"from": "function_call", "value": "f()"}, "a function_call is not JSON"),
        ({"role": "narrator", "content": "x"}, "a message has the role 'narrator'"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(turn: dict[str, object], reason: str) -> None:
    with pytest.raises(NotAnExample, match=re.escape(reason)):
        conversations({"messages": [{"role": "user", "content": "?"}, turn]}, "messages")


def test_question_and_answer_with_a_history_and_prompts_that_are_messages() -> None:
    gsm8k = {"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"}
    assert kind_of_row(gsm8k) == "question"
    assert conversations(gsm8k, "question")[0][-1]["content"] == gsm8k["answer"]
    (made,) = conversations({**gsm8k, "history": [["1+1?", "2"]], "system": "Sums."}, "question")
    assert [message["role"] for message in made] == ["system", "user", "assistant", "user", "assistant"]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (made,) = conversations({"prompt": turns, "completion": [{"role": "assistant", "content": "d"}]}, "prompt")
    assert [message["content"] for message in made] == ["a", "b", "c", "d"]
