"""Ids are exact, texts come back as they were, and nothing is cut or added."""

from __future__ import annotations

import json
import random
import shutil
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from lamplighter import report
from lamplighter.data import tokenizer as room
from lamplighter.data.sources import EmbeddedCorpus
from lamplighter.data.tokenizer import Tokenizer, byte_level, ids_before_prompt, load, train
from lamplighter.errors import BadConfig, BadData, InputMissing
from running import SHARED, shared

MIXED = (
    "Hello world <|endoftext|> £5 œuvre naïve\n\n\n  tabs\t\t x\r\n 'tis  it's IT'S 1234567 \u00a0\u3000 日本語 "
    "🙂👩‍👩‍👧 \x00\x07 e\u0301\u0301 <s>a</s> <|startoftext|><|unk|> [PAD] ##ing ▁x"
)


@pytest.fixture
def notes(monkeypatch: Any) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(report, "note", lambda text, **_: said.append(text))
    return said


@pytest.fixture
def no_gigatoken(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train([*EmbeddedCorpus(0, 200).documents(), "naïve £5 日本語 🙂 " * 20], 400)


def random_text(rng: random.Random) -> str:
    """Any text at all: letters, control characters, emoji, lone marks, spaces of every kind, far planes."""
    kinds = [
        lambda: chr(rng.randrange(128)),
        lambda: rng.choice(" \n\t\r\x0b\x0c\x00\x1b\x7f\x85\u00a0\u2028\u3000\u200b\u200d\ufeff\ufffd"),
        lambda: rng.choice(
            ["'s", "'LL", "<|endoftext|>", "</s>", "🙂", "👩‍👩‍👧", "e\u0301", "\u0301", "ﬁ", "Ⅷ", "٣", "½"]
        ),
        lambda: chr(rng.randrange(0x3000)),
        lambda: chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])),
    ]
    text = "".join(rng.choice(kinds)() for _ in range(rng.randrange(60)))
    return "".join(letter for letter in text if unicodedata.category(letter) != "Cn")  # newer letters differ by library


RANDOM_TEXTS = [random_text(random.Random(number)) for number in range(600)]


# ---------------------------------------------------------------- byte-level: made here


def test_bytes_need_no_training() -> None:
    tokenizer = byte_level()
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert len(tokenizer.encode("é")) == 2
    assert tokenizer.encode("").tolist() == []


@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_any_text_comes_back_as_it_was(kind: str, trained: Tokenizer) -> None:
    tokenizer = byte_level() if kind == "bytes" else trained
    encoded = tokenizer.encode_batch(RANDOM_TEXTS)
    assert len(encoded.offsets) == len(RANDOM_TEXTS) + 1
    for number, text in enumerate(RANDOM_TEXTS):
        ids = encoded.ids[encoded.offsets[number] : encoded.offsets[number + 1]]
        assert tokenizer.decode(ids) == text
        assert "".join(tokenizer.decode_stream(ids)) == text
        assert tokenizer.end_of_text not in ids
    assert int(encoded.ids.max()) < tokenizer.vocab_size


def test_both_backends_give_the_same_ids(trained: Tokenizer, no_gigatoken: None, notes: list[str]) -> None:
    slow = Tokenizer(trained.content, trained.end_name)
    assert (trained.backend, slow.backend) == ("gigatoken", "tokenizers")
    assert len(notes) == 1 and "slower" in notes[0]
    for texts in (RANDOM_TEXTS, [MIXED], ["", "a", ""], [""], []):
        fast, reference = trained.encode_batch(texts), slow.encode_batch(texts)
        assert np.array_equal(fast.ids, reference.ids)
        assert np.array_equal(fast.offsets, reference.offsets)
    assert np.array_equal(trained.encode(MIXED), slow.encode(MIXED))
    assert slow.fingerprint() == trained.fingerprint()


def test_training_by_either_library_makes_the_same_merges() -> None:
    book = shared("tinyshakespeare", "input.txt").read_text()[:300_000]
    sample = [book[n : n + 3000].encode() for n in range(0, len(book), 3000)] + [MIXED.encode() * 3]
    fast, slow = room._train_fast(sample, 900), room._train_reference(sample, 900)
    assert fast == slow and len(slow) == 900


def test_training_lets_no_library_talk(capfd: pytest.CaptureFixture[str]) -> None:
    texts = [text.encode() for text in EmbeddedCorpus(0, 50).documents()]
    assert room._train_fast(texts, 40)
    assert capfd.readouterr() == ("", "")


def test_trained_ids_are_laid_out_as_in_gpt2(trained: Tokenizer) -> None:
    vocab, merges = trained.content["model"]["vocab"], trained.content["model"]["merges"]
    assert sorted(vocab.values()) == list(range(trained.vocab_size)) == list(range(400))
    assert [vocab[left + right] for left, right in merges] == list(range(256, 399))
    assert vocab["<|endoftext|>"] == trained.end_of_text == 399
    assert (vocab["!"], vocab["Ġ"], vocab["ÿ"]) == (0, 220, 187), "GPT-2's own numbers"


def test_a_text_with_few_pairs_gives_a_smaller_vocabulary(notes: list[str]) -> None:
    texts = ["hello world hello there, the world is the world", "aaaa aaaa aaa"]
    tokenizer = train(texts, 5000)
    assert 257 < tokenizer.vocab_size < 300
    assert tokenizer.vocab_size == 257 + len(room._train_reference([t.encode() for t in texts], 4743))
    assert any("5,000 were asked for" in note for note in notes)
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)


def test_control_tokens_come_after_the_merges_and_text_never_becomes_one(trained: Tokenizer, tmp_path: Path) -> None:
    texts = [*EmbeddedCorpus(0, 100).documents(), "naïve £5 日本語 🙂 " * 20]
    names = ["<|im_start|>", "<|im_end|>", "<|pad|>", "<｜tool▁call｜>", "<|endoftext|>", "<|im_end|>"]
    made = train(texts, 400, names)
    assert made.vocab_size == 400
    assert made.special == {
        395: "<|endoftext|>",
        396: "<|im_start|>",
        397: "<|im_end|>",
        398: "<|pad|>",
        399: "<｜tool▁call｜>",
    }
    text = "a <|im_start|>user <｜tool▁call｜> naïve"
    ids = made.encode(text).tolist()
    assert max(ids) < 395 and made.decode(ids) == text
    assert made.decode([396, 399]) == "<|im_start|><｜tool▁call｜>"
    made.save(tmp_path)
    assert load(tmp_path).special == made.special
    roles = json.loads((tmp_path / "special_tokens_map.json").read_text())
    assert roles["pad_token"] == "<|pad|>" and roles["eos_token"] == "<|endoftext|>"
    assert roles["additional_special_tokens"] == ["<|im_start|>", "<|im_end|>", "<｜tool▁call｜>"]
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.pad_token_id == 398 and len(theirs) == 400
    assert {"<|im_start|>", "<|im_end|>", "<｜tool▁call｜>"} <= set(theirs.all_special_tokens)
    assert theirs("<|im_start|>hello", add_special_tokens=False)["input_ids"][0] == 396


def test_control_tokens_that_cannot_be_are_refused_before_the_work() -> None:
    for name in ("a", " ", ""):
        with pytest.raises(BadConfig, match="cannot be a control token"):
            train(["hello there"], 300, [name])
    with pytest.raises(BadConfig) as caught:
        train(["hello there"], 258, ["<|a|>", "<|b|>"])
    assert "need 259" in caught.value.why


def test_training_mistakes() -> None:
    with pytest.raises(BadConfig, match="200"):
        train(["x"], 200)
    with pytest.raises(BadData):
        train(["", ""], 300)
    with pytest.raises(BadData):
        train([], 300)


def test_half_characters_wait_in_a_stream() -> None:
    tokenizer = byte_level()
    pieces = list(tokenizer.decode_stream(tokenizer.encode("a🙂é")))
    assert pieces == ["a", "🙂", "é"]
    rng = random.Random(0)
    for _ in range(100):
        ids = [rng.randrange(257) for _ in range(rng.randrange(12))]
        assert "".join(tokenizer.decode_stream(ids)) == tokenizer.decode(ids)
    assert tokenizer.decode([256]) == "<|endoftext|>"
    assert list(tokenizer.decode_stream(iter([tokenizer.encode("é")[0]]))) == ["\ufffd"]


# ---------------------------------------------------------------- loaded


def test_gpt2_has_the_ids_of_its_own_library(no_gigatoken: None) -> None:
    path = shared("tokenizers", "gpt2", "tokenizer.json")
    reference = tokenizers.Tokenizer.from_file(str(path))
    reference.encode_special_tokens = True
    assert load(path).encode(MIXED).tolist() == reference.encode(MIXED).ids


def test_gpt2_by_gigatoken_is_exact_on_real_text() -> None:
    folder = shared("tokenizers", "gpt2")
    tokenizer = load(folder)
    vocab = json.loads((folder / "vocab.json").read_text())
    assert (tokenizer.backend, tokenizer.vocab_size) == ("gigatoken", len(vocab))
    assert tokenizer.end_of_text == vocab["<|endoftext|>"] == len(vocab) - 1
    if folder.is_relative_to(SHARED):
        assert len(vocab) == 50257 and tokenizer.encode("Hello world").tolist() == [15496, 995]
    texts = [MIXED, *RANDOM_TEXTS]
    web = SHARED / "web" / "c4_demo_first200.jsonl"
    texts += [json.loads(line)["text"] for line in web.read_text().splitlines()[:100]] if web.exists() else []
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.encode_special_tokens = True
    encoded = tokenizer.encode_batch(texts)
    for number, row in enumerate(reference.encode_batch(texts, add_special_tokens=False)):
        assert encoded.ids[encoded.offsets[number] : encoded.offsets[number + 1]].tolist() == row.ids


def test_gpt2_from_vocab_and_merges(tmp_path: Path) -> None:
    folder = shared("tokenizers", "gpt2")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(folder / name, tmp_path / name)
    tokenizer = load(tmp_path)
    assert tokenizer.end_of_text == json.loads((folder / "vocab.json").read_text())["<|endoftext|>"]
    assert np.array_equal(tokenizer.encode(MIXED), load(folder).encode(MIXED))


def test_a_template_adds_nothing(notes: list[str]) -> None:
    tokenizer = load(shared("tokenizers", "hellolondon"))
    assert (tokenizer.backend, tokenizer.end_of_text) == ("tokenizers", 0)
    assert tokenizer.vocab_size == len(tokenizer.content["model"]["vocab"])
    assert "gigatoken cannot take this one" in notes[0]
    ids = tokenizer.encode("Hello <|endoftext|> the old world")
    assert not {0, 1} & set(ids.tolist())
    assert tokenizer.decode(tokenizer.encode("Hello the old world")) == "Hello the old world"
    stream = list(tokenizer.decode_stream(ids))
    assert "".join(stream) == tokenizer.decode(ids) and len(stream) > 5


def test_a_llama_tokenizer_is_exact() -> None:
    folder = shared("models", "stories260K_hf_llama")
    tokenizer = load(folder)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (512, 2)
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.encode_special_tokens = True
    for text in [MIXED, "Once upon a time", "", " ", *RANDOM_TEXTS]:
        ids = tokenizer.encode(text)
        assert ids.tolist() == reference.encode(text, add_special_tokens=False).ids
        assert 1 not in ids and 2 not in ids
        assert "".join(tokenizer.decode_stream(ids)) == tokenizer.decode(ids) == text.replace("▁", " ")
    assert list(tokenizer.decode_stream(tokenizer.encode("Once upon a time")))[-1] == " time"


def test_a_prompt_begins_as_the_model_has_read_texts(tmp_path: Path) -> None:
    """After the end of another where it was trained here; else as transformers would begin, so that its answers are the same."""
    llama = load(shared("models", "stories260K_hf_llama"))
    assert ids_before_prompt(llama, tmp_path) == llama.ids_before_text() == [1]
    assert load(shared("tokenizers", "hellolondon")).ids_before_text() == [1]  # and not what it puts behind a text
    ours = byte_level()
    assert ours.ids_before_text() == []
    assert ids_before_prompt(ours, tmp_path) == [ours.end_of_text] == [ours.begin_of_text]
    named = json.dumps({"bos_token": ours.end_name + "x", "eos_token": ours.end_name}).encode()
    content = {**ours.content, "added_tokens": [*ours.content["added_tokens"], {**ours.content["added_tokens"][0], "id": 257, "content": ours.end_name + "x"}]}  # fmt: skip
    other = Tokenizer(content, ours.end_name, {"tokenizer_config.json": named})
    assert (other.begin_of_text, ids_before_prompt(other, tmp_path)) == (257, [])
    (tmp_path / "manifest.json").write_text("{}")
    assert ids_before_prompt(llama, tmp_path) == [llama.end_of_text]


def test_what_is_not_a_tokenizer_is_explained(tmp_path: Path) -> None:
    with pytest.raises(InputMissing):
        load(tmp_path / "none")
    with pytest.raises(InputMissing, match="no tokenizer in"):
        load(tmp_path)
    for content in ("{torn", "[]", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises((BadData, BadConfig)):
            load(tmp_path)


def test_the_end_of_text_must_be_known(tmp_path: Path) -> None:
    content = byte_level().content
    text = json.dumps(content).replace("<|endoftext|>", "[END]")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(BadConfig) as caught:
        load(tmp_path)
    assert "eos_token" in caught.value.next
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "[END]"}}')
    assert load(tmp_path).end_of_text == 256
    (tmp_path / "special_tokens_map.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[END]"}')
    assert load(tmp_path).end_of_text == 256


def test_a_file_that_asks_for_truncation_is_not_obeyed(tmp_path: Path, no_gigatoken: None) -> None:
    content = dict(byte_level().content)
    content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 99},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(load(tmp_path).encode("x" * 50)) == 50


def test_added_tokens_that_are_not_special_count(tmp_path: Path) -> None:
    content = byte_level().content
    token = {**content["added_tokens"][0], "id": 257, "content": "    ", "special": False}
    content["added_tokens"].append(token)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load(tmp_path)
    assert tokenizer.vocab_size == 258
    assert 257 in tokenizer.encode("a    b")
    assert tokenizer.decode(tokenizer.encode("a    b")) == "a    b"


# ---------------------------------------------------------------- saved


def test_saved_and_loaded_is_the_same(tmp_path: Path, trained: Tokenizer) -> None:
    trained.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.fingerprint() == trained.fingerprint() != byte_level().fingerprint()
    assert np.array_equal(again.encode(MIXED), trained.encode(MIXED))


def test_a_loaded_tokenizer_saves_its_own_files(tmp_path: Path) -> None:
    for name in ("tokenizers/gpt2", "models/stories260K_hf_llama"):
        folder = shared(*name.split("/"))
        load(folder).save(tmp_path / name)
        for path in folder.glob("*.json"):
            if path.name.startswith(("tokenizer", "vocab")):
                assert (tmp_path / name / path.name).read_bytes() == path.read_bytes()
    assert (tmp_path / "tokenizers/gpt2/merges.txt").exists()


def test_transformers_opens_what_was_saved(tmp_path: Path, trained: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    made = {"trained": trained, "bytes": byte_level()}
    for name in ("tokenizers/gpt2", "tokenizers/hellolondon", "models/stories260K_hf_llama"):
        made[name.replace("/", "-")] = load(shared(*name.split("/")))
    text = "Hello old world, naïve £5 \n\n 日本語 🙂  it's 1234"
    for name, tokenizer in made.items():
        tokenizer.save(tmp_path / name)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text).tolist(), name
        assert theirs.eos_token_id == tokenizer.end_of_text
        assert len(theirs) == tokenizer.vocab_size


def a_sentencepiece_file(folder: Path, **more: Any) -> Path:
    """A real one, trained here."""
    import io

    import sentencepiece

    made, texts = (
        io.BytesIO(),
        [f"The lamp-lighter lights lamp {n}, and {n % 7} more in the street." for n in range(300)],
    )
    settings = {"model_type": "bpe", "vocab_size": 320, "byte_fallback": True, "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False, "character_coverage": 1.0, "minloglevel": 2, **more}  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=made, **settings)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(made.getvalue())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}')
    return folder


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_file_is_converted_to_the_very_same_ids(tmp_path: Path, kind: str) -> None:
    import sentencepiece
    from transformers import AutoTokenizer

    known = "<>usnk/"  # the characters of its control tokens
    folder = a_sentencepiece_file(tmp_path / kind, model_type=kind, required_chars=known)
    original = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    tokenizer = load(folder)
    for text in ("The lamp  lights\n naïve 日本 🙂 </s> <s>\t£5 ", " x", "", "lamplighter's"):
        assert tokenizer.encode(text).tolist() == original.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.end_name == "</s>" and tokenizer.vocab_size == 320
    tokenizer.save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs("The lamp  lights\n naïve", add_special_tokens=False)["input_ids"] == original.encode(
        "The lamp  lights\n naïve"
    )
    assert load(tmp_path / "saved").fingerprint() == tokenizer.fingerprint()


def test_a_file_that_cannot_be_converted_is_refused_in_the_right_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_sentencepiece_file(tmp_path / "a")
    whole = (folder / "tokenizer.model").read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"x", bytes(100)):
        (folder / "tokenizer.model").write_bytes(data)
        with pytest.raises(BadData, match="is no whole sentencepiece file"):
            load(folder)
    (folder / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")  # as Llama 3 has it
    with pytest.raises(InputMissing, match="is a tiktoken file") as error:
        load(folder)
    assert "stands in the code of its model" in error.value.why
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "qwen.tiktoken").write_bytes(b"IQ== 0\n")
    with pytest.raises(InputMissing, match="is a tiktoken file"):
        load(tmp_path / "b")
    other = a_sentencepiece_file(tmp_path / "c", normalization_rule_name="nmt_nfkc")
    with pytest.raises(BadData, match="cannot be converted"):
        load(other)
    words = a_sentencepiece_file(tmp_path / "d", model_type="char", vocab_size=300)
    with pytest.raises(BadData, match="of another kind"):
        load(words)
    (folder / "tokenizer.model").write_bytes(whole)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(InputMissing, match="is a sentencepiece file") as error:
        load(folder)
    assert error.value.next == "pip install sentencepiece"
