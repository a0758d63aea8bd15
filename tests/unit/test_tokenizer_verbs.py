"""lamp tokenizer train and show: what is made is checked, said, and opens everywhere."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from lamplighter import report
from lamplighter.data import tokenizer as tokenizer_room
from lamplighter.data import tokenizer_report, tokenizer_training
from lamplighter.data.sources import EmbeddedCorpus
from lamplighter.data.tokenizer import Tokenizer, byte_level, load, train
from lamplighter.data.tokenizer_training import Wish, make, measure
from lamplighter.errors import BadConfig, BadData, CannotWrite, InputMissing
from running import shared


@pytest.fixture
def notes(monkeypatch: Any) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(report, "note", lambda text, **_: said.append(text))
    return said


CORPUS = EmbeddedCorpus(0, 400)


def wish(folder: Path, **more: Any) -> Wish:
    return Wish(**{"out": folder / "made", "vocab_size": 350, "sample_mb": 50.0, **more})


# ---------------------------------------------------------------- measuring


def test_every_text_comes_back_and_the_vocabulary_is_counted() -> None:
    tokenizer = train(["the lamp the lamp the lamp lit"] * 5, 262)
    found = measure(tokenizer, ["the lamp", "the 日本\x07"], ["a", "b"])
    assert found.round_trip_failures == 0 and found.first_failure == ""
    assert found.text_bytes == 8 + 11 and found.bytes_per_token == pytest.approx(19 / found.tokens)
    ids = [*tokenizer.encode("the lamp"), *tokenizer.encode("the 日本\x07")]
    assert found.tokens == len(ids) and found.used == found.rare == len(set(ids))
    assert sum(one.count for one in found.frequent) <= found.tokens
    shown = " ".join(one.text for one in (*found.frequent, *found.longest))
    assert "\x07" not in shown and "\\x07" in shown, "control characters are shown, not obeyed"


class Lossy(Tokenizer):
    """Loses capital letters on the way back."""

    def decode(self, ids: Any) -> str:
        return super().decode(ids).lower()


def test_a_text_that_does_not_come_back_is_named() -> None:
    bytes_ = byte_level()
    tokenizer = Lossy(bytes_.content, bytes_.end_name)
    found = measure(tokenizer, ["all small", "one Capital", "Two"], ["f:1", "f:2", "f:3"])
    assert found.round_trip_failures == 2
    assert found.first_failure == 'f:2: character 4: "one Capital" came back as "one capital"'
    lines = tokenizer_training.measured_lines(vars(found) | {"frequent": [], "longest": []})
    assert any("2 of 3 texts did NOT come back; f:2" in line for line in lines)


def test_a_hidden_loss_in_real_tokenizers_is_found() -> None:
    london = load(shared("tokenizers", "hellolondon"))
    found = measure(london, ["Plain words.", "Two  spaces\tand a tab"], ["a", "b"])
    assert found.texts == 2 and found.round_trip_failures in (0, 1, 2)
    gpt2 = load(shared("tokenizers", "gpt2"))
    assert measure(gpt2, ["Two  spaces\tand a tab £\r\n"], ["a"]).round_trip_failures == 0


# ---------------------------------------------------------------- making


def test_made_checked_and_written(tmp_path: Path, notes: list[str]) -> None:
    found = make(CORPUS, wish(tmp_path, special=("<|im_start|>", "<|im_end|>")), tmp_path / "cache")
    assert found["vocab_size"] == 350 and found["special"]["<|im_end|>"] == 349
    assert found["measured"]["sample"]["texts"] == 400 and found["measured"]["sample"]["round_trip_failures"] == 0
    assert found["compared_on"] == "sample" and "all " in found["trained_on"]
    made = load(tmp_path / "made")
    assert made.fingerprint() == found["fingerprint"]
    kept = json.loads((tmp_path / "made" / tokenizer_training.REPORT_NAME).read_text())
    assert kept["key"] == found["key"]
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path / "made")
    assert theirs("The lamp.", add_special_tokens=False)["input_ids"] == made.encode("The lamp.").tolist()
    again = make(CORPUS, wish(tmp_path, special=("<|im_start|>", "<|im_end|>")), tmp_path / "cache")
    assert again["unchanged"] and "the same to the byte" in tokenizer_training.told(again)
    assert any("kept from before" in note for note in notes), "the cache of lamp train serves here too"


def test_a_large_source_is_judged_on_text_that_it_was_not_trained_on(tmp_path: Path) -> None:
    found = make(CORPUS, wish(tmp_path, sample_mb=0.03, compare=(_bytes_folder(tmp_path),)), tmp_path / "cache")
    assert found["compared_on"] == "other_text" and "spread over all of it" in found["trained_on"]
    assert found["measured"]["other_text"]["round_trip_failures"] == 0
    (other,) = found["compared"].values()
    assert other["bytes_per_token"] == pytest.approx(1.0)
    assert other["text_bytes"] == found["measured"]["other_text"]["text_bytes"], "on the same text"
    words = tokenizer_training.told(found)
    assert "beside" in words and "times as many tokens" in words and "next " in words


def _bytes_folder(tmp_path: Path) -> Path:
    byte_level().save(tmp_path / "bytes")
    return tmp_path / "bytes"


def test_another_tokenizer_is_not_written_over_unasked(tmp_path: Path) -> None:
    make(CORPUS, wish(tmp_path), tmp_path / "cache")
    before = (tmp_path / "made" / "tokenizer.json").read_bytes()
    with pytest.raises(BadConfig, match="holds another tokenizer") as caught:
        make(CORPUS, wish(tmp_path, vocab_size=360), tmp_path / "cache")
    assert "--force" in caught.value.next
    assert (tmp_path / "made" / "tokenizer.json").read_bytes() == before
    (tmp_path / "made" / "model.safetensors").write_text("something else")
    found = make(CORPUS, wish(tmp_path, vocab_size=360, force=True), tmp_path / "cache")
    assert load(tmp_path / "made").vocab_size == 360 and (tmp_path / "made" / "model.safetensors").exists()
    assert (Path(found["moved"]) / "tokenizer.json").read_bytes() == before, "the old one is kept"
    with pytest.raises(BadConfig, match="holds another tokenizer"):
        make(CORPUS, wish(tmp_path, out=_bytes_folder(tmp_path)), tmp_path / "cache")


def test_what_cannot_be_written_is_said_before_the_work(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(tokenizer_training, "take", lambda *_: pytest.fail("no work before the check"))
    with pytest.raises(CannotWrite) as caught:
        make(CORPUS, wish(tmp_path, out=tmp_path / "file" / "made"), tmp_path / "cache")
    assert "--out" in caught.value.next


def test_a_full_disk_leaves_nothing_that_looks_like_a_tokenizer(tmp_path: Path, monkeypatch: Any) -> None:
    whole = tokenizer_room.write_atomic

    def full(path: Path, data: Any, durable: bool = True) -> None:
        if path.name == "tokenizer.json" and "made" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(path, data, durable)

    monkeypatch.setattr(tokenizer_room, "write_atomic", full)
    with pytest.raises(CannotWrite, match="full"):
        make(CORPUS, wish(tmp_path), tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"], "no folder, no temporary one"
    monkeypatch.undo()
    assert make(CORPUS, wish(tmp_path), tmp_path / "cache")["vocab_size"] == 350


def test_somebody_else_was_quicker(tmp_path: Path, monkeypatch: Any) -> None:
    made = byte_level()
    save = Tokenizer.save

    def saved_by_two(self: Tokenizer, folder: Path) -> None:
        save(self, folder)
        save(self, tmp_path / "made")

    monkeypatch.setattr(Tokenizer, "save", saved_by_two)
    tokenizer_training._place(made, tmp_path / "made")
    assert load(tmp_path / "made").vocab_size == 257 and len(list(tmp_path.iterdir())) == 1


# ---------------------------------------------------------------- portraits


def test_a_portrait_says_what_it_is(tmp_path: Path) -> None:
    made = train(CORPUS.documents(), 350, ["<|im_start|>"])
    made.save(tmp_path / "tok")
    (tmp_path / "tok" / "chat_template.jinja").write_text("{{ messages }}")
    found = tokenizer_report.portray(
        tmp_path / "tok", "The lamp\n\x07日", EmbeddedCorpus(0, 50), 10_000_000, [_bytes_folder(tmp_path)]
    )
    assert found["kind"] == "byte-level BPE" and found["vocab_size"] == 350 and found["chat_template"]
    assert found["end_of_text"] == {"text": "<|endoftext|>", "id": 348}
    assert found["special"] == {"<|endoftext|>": 348, "<|im_start|>": 349}
    cut = found["text"][str(tmp_path / "tok")]
    assert cut["comes_back"] and cut["ids"] == made.encode("The lamp\n\x07日").tolist()
    assert len(cut["pieces"]) == cut["tokens"] and "\\x07" in cut["pieces"]
    assert set(found["measured"]) == {str(tmp_path / "tok"), str(tmp_path / "bytes")}
    plain, coloured = tokenizer_report.told(found, colour=False), tokenizer_report.told(found, colour=True)
    assert "[\\n]" in plain and "\x1b" not in plain and "\x1b[7m" in coloured and "\x07" not in coloured
    assert "chat template  yes" in plain and "bytes per token" in plain


def test_the_tokenizer_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="no tokenizer at"):
        tokenizer_report.portray(tmp_path / "nothing", None, None, 1)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(InputMissing, match="no tokenizer in run"):
        tokenizer_report.portray(tmp_path / "run", None, None, 1)
    for step in (5, 10):
        byte_level(["<|x|>"] if step == 10 else []).save(tmp_path / "run" / "checkpoints" / f"checkpoint-{step}")
    found = tokenizer_report.portray(tmp_path / "run", None, None, 1)
    assert found["path"].endswith("checkpoint-10") and found["vocab_size"] == 258
    assert "next " in tokenizer_report.told(found, colour=False)


@pytest.mark.parametrize(
    ("name", "kind", "backend", "back"),
    [
        ("tokenizers/gpt2", "byte-level BPE", "gigatoken", True),
        ("tokenizers/hellolondon", "BPE", "tokenizers", None),
        ("models/stories260K_hf_llama", "BPE", "gigatoken", True),
    ],
)
def test_portraits_of_real_ones(name: str, kind: str, backend: str, back: bool | None) -> None:
    found = tokenizer_report.portray(shared(*name.split("/")), "Once upon a time", None, 1)
    assert (found["kind"], found["backend"]) == (kind, backend) and found["backend_reason"]
    (cut,) = found["text"].values()
    assert cut["comes_back"] is back if back is not None else "comes_back" in cut


# ---------------------------------------------------------------- the commands


def test_no_text_is_bad_data(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no text"):
        train(["", ""], 300)
