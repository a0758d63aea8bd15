"""Testing checkpoints: the table for the sizes it was made for, the run's own curve else; actions and red flags."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamplighter import report
from lamplighter.commands import generate_many
from lamplighter.commands.chat import Chat
from lamplighter.commands.generate import _Talk
from lamplighter.data.pieces import TextPieces
from lamplighter.data.tokenizer import byte_level
from lamplighter.errors import BadData
from lamplighter.evaluate import checkpoint_test as testing

FACTS = {"progress": 0.5, "vocab_size": 30000.0, "best_before": None, "train_now": 4.4, "train_then": 5.0}


@pytest.mark.parametrize(
    ("progress", "words", "action"),
    [(0.2, "5.00 to 6.00", "continue"), (0.5, "4.00 to 5.00", "monitor"), (0.75, "3.00 to 4.00", "check convergence"),
     (0.9, "2.50 to 3.50", "consider stopping"), (1.0, "below 3.00", "ready")],
)  # fmt: skip
def test_the_table_holds_for_its_own_sizes(progress: float, words: str, action: str) -> None:
    found = testing.expected(progress, 108_800_000, 30_000, [])
    assert found is not None
    assert (found.words(), found.action) == (words, action)


def test_other_sizes_are_measured_by_their_own_curve() -> None:
    found = testing.expected(0.5, 1_000_000, 8192, [2.0, 2.1, 1.9, 2.0])
    assert found is not None and "own training losses" in found.source
    assert found.low < 2.0 < found.high < 3.0
    assert testing.expected(0.5, 1_000_000, 8192, [2.0]) is None


def test_each_action_has_its_reason() -> None:
    found = testing.expected(0.5, 108_800_000, 30_000, [])
    assert testing.act(4.5, found, FACTS)[0] == "monitor"
    assert testing.act(5.5, found, FACTS)[0] == "continue"
    assert testing.act(5.5, found, {**FACTS, "progress": 1.0})[0] == "check convergence"
    assert testing.act(math.nan, found, FACTS)[0] == "broken"
    assert testing.act(math.log(30000), found, FACTS)[0] == "broken"
    assert testing.act(4.5, found, {**FACTS, "best_before": 4.0})[0] == "overfitting"
    assert testing.act(4.5, found, {**FACTS, "best_before": 4.0, "train_now": 5.2})[0] == "monitor"
    assert testing.act(4.5, None, FACTS)[0] == "monitor"


def test_english_is_known_by_its_commonest_words() -> None:
    assert testing.is_english("The fog came in by the window, and it was cold as a fish on the slab.")
    assert not testing.is_english(
        "Der Nebel kam zum Fenster herein, und es was kalt in der Stube wie nie zuvor im Jahr."
    )
    assert not testing.is_english("Le brouillard est entré par la fenêtre, il a fait froid dans toute la maison.")
    assert not testing.is_english("")


def test_red_flags_are_raised_by_what_they_name() -> None:
    known = testing.dictionary_of(["the fog came in by the window and sat down"])
    good = testing.text_figures("The fog came in by the window.", True, known, 0.3)
    assert testing.red_flags([good]) == []
    again = testing.text_figures("the fog came in the fog came in the fog came in", False, known, 0.3)
    assert ["repetition" in flag for flag in testing.red_flags([again])] == [True]
    noise = testing.text_figures("xq zzv kkr wwe", False, known, 0.95)
    assert len([flag for flag in testing.red_flags([noise]) if flag.startswith("gibberish")]) == 2
    assert any(
        flag.startswith("very short") for flag in testing.red_flags([testing.text_figures("", True, known, 0.1)])
    )
    half = testing.text_figures("The fog came in by the", True, known, 0.3)
    assert [flag[:41] for flag in testing.red_flags([half, half, half, good])] == [
        "unfinished sentences: 3 of the 4 texts th"
    ]
    assert testing.red_flags([half, good]) == []
    assert testing.red_flags([{**half, "ended": False}] * 3 + [good]) == [], "they were cut at the limit"
    assert testing.sparkline([3.0, 2.0, 1.0]) == "█▅▁"


# ---------------------------------------------------------------- texts as they come, and the commands of a conversation


def test_pieces_add_up_and_stop_where_they_should() -> None:
    tokenizer = byte_level()
    text = "café and £5 STOP no more"
    pieces = TextPieces(tokenizer)
    shown = [pieces.add(token) for token in tokenizer.encode(text).tolist()]
    assert "".join(shown) + pieces.end() == text
    assert "" in shown  # half a character waited
    pieces = TextPieces(tokenizer, ["STOP", "§"])
    shown = [pieces.add(token) for token in tokenizer.encode(text).tolist()]
    assert ("".join(shown) + pieces.end(), pieces.stopped) == ("café and £5 ", True)
    pieces = TextPieces(tokenizer, ["STOP"])
    assert "".join(pieces.add(token) for token in tokenizer.encode("a STO").tolist()) == "a "
    assert pieces.end() == "STO"


def a_chat() -> Chat:
    request = {"max_tokens": 9, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 1, "repetition_penalty": 1.0, "stop": [], "system": ""}  # fmt: skip
    return Chat([], request, True)


def test_settings_change_and_nonsense_does_not(tmp_path: object) -> None:
    chat = a_chat()
    for line in (
        "/set temperature 0.2",
        "/set max-tokens 50",
        "/set top_p 7",
        "/set colour red",
        "/set seed x",
        "/nothing",
        "/set",
    ):
        assert chat.heard(line) is None
    assert (chat.request["temperature"], chat.request["max_tokens"], chat.request["top_p"], chat.request["seed"]) == (0.2, 50, 1.0, 1)  # fmt: skip
    assert chat.heard("/system Be brief.") is None
    assert chat.request["system"] == "Be brief."
    assert chat.heard("//etc is a folder") == "/etc is a folder"


def test_texts_of_several_lines() -> None:
    chat = a_chat()
    assert [chat.heard(line) for line in ("one\\", "two")] == [None, "one\ntwo"]
    assert [chat.heard(line) for line in ('"""', "/a", "b", '"""')] == [None, None, None, "/a\nb"]


def test_a_conversation_is_saved_loaded_tried_again_and_left(tmp_path: object) -> None:
    chat, file = a_chat(), f"{tmp_path}/talk.json"
    assert chat.heard("/retry") is None  # nothing was asked yet
    chat.said, chat.last = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "hi"
    chat.heard("/set temperature 0.3")
    chat.heard("/set stop THE END")
    chat.heard(f"/save {file}")
    other = a_chat()
    other.heard(f"/load {file}")
    assert (other.said, other.request["temperature"], other.request["stop"]) == (chat.said, 0.3, ["THE END"])
    other.heard("/load /dev/null")
    assert other.said == chat.said
    assert (chat.heard("/retry"), chat.said, chat.request["seed"]) == ("hi", [], 2)
    chat.heard("/quit")
    assert chat.left


# ---------------------------------------------------------------- what is cut, and what is said of it


@pytest.mark.parametrize(("penalty", "read"), [(1.0, 8), (1.1, 5)])
def test_a_prompt_that_is_too_long_is_said_to_be(monkeypatch: pytest.MonkeyPatch, penalty: float, read: int) -> None:
    said: list[str] = []
    monkeypatch.setattr(report, "warn", said.append)
    built: Any = SimpleNamespace(positions=8)
    talk = _Talk(built, byte_level(), None, [], {"repetition_penalty": penalty, "max_tokens": 3})
    talk._say_cut([1] * read)
    assert said == []
    talk._say_cut([1] * 12)
    assert said == [f"the prompt has 12 tokens; the model reads the last {read} of them"]


def test_a_line_that_a_kill_tore_is_cut_off_before_the_next_answer(tmp_path: Path) -> None:
    file, whole = tmp_path / "answers.jsonl", json.dumps({"number": 0, "prompt": "a", "samples": []}) + "\n"
    for torn in ('{"number": 1, "prompt": "b", "sam', '{"num', "{", ""):
        file.write_text(whole + torn)
        done, out = generate_many._opened(str(file), ["a", "b"])
        assert done == {0} and out is not None
        generate_many._keep(out, {"number": 1, "prompt": "b", "samples": []})
        assert [json.loads(line)["number"] for line in file.read_text().splitlines()] == [0, 1], torn
    file.write_text(whole.rstrip())  # all but its newline
    assert generate_many._opened(str(file), ["a", "b"])[0] == {0}
    assert file.read_text() == whole
    file.write_text("my notes")
    with pytest.raises(BadData, match="cannot be gone on with"):
        generate_many._opened(str(file), ["a", "b"])
    assert file.read_text() == "my notes"
