"""Words of somebody else on a terminal and in a log; and settings in YAML that want too much."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest

from lamplighter.config import resolve
from lamplighter.errors import BadConfig, LampError
from lamplighter.safe_text import clean, clean_text, mask, mask_record, safe
from lamplighter.slot import Slot
from lamplighter.watch.live import Live
from lamplighter.watch.status import Status

# ---------------------------------------------------------------- terminals


def test_what_a_terminal_would_obey_is_shown() -> None:
    assert clean_text("a\x1b]0;t\x07b\x9b2J\r\u202e\udc80\x7f") == "a\\x1b]0;t\\x07b\\u009b2J\\r\\u202e\\udc80\\u007f"
    assert clean_text("naïve 日本語\n\t👩‍👩‍👧 a\u00a0b") == "naïve 日本語\n\t👩‍👩‍👧 a\u00a0b"
    record = {"text": "\x1b\x7f\x9b\u202e\n"}
    assert json.loads(clean_text(json.dumps(record, ensure_ascii=False))) == record
    assert clean("a\nb\t\x1b") == "a\\nb\\t\\x1b"


def test_the_live_display_shows_names_and_phases_as_they_are() -> None:
    screen = io.StringIO()
    live = Live(screen)
    slot = Slot(pid=1, phase="data\x1b]0;x\x07", phase_item="\x1b[2J", total=5.0)
    status = Status("r\x1b]0;x\x07", slot=slot, stall_words="\x1b]0;x\x07")
    live.console.print(live._draw(status))
    assert "\x1b]" not in screen.getvalue() and "\x1b[2J" not in screen.getvalue()
    assert screen.getvalue().count("\\x1b]0;x\\x07") == 3


# ---------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pa@ss@host/x", "https://***@host/x"),
        ("read s3://key:word@bucket/a.jsonl now", "read s3://***@bucket/a.jsonl now"),
        ("https://h/x?token=abc&n=3", "https://h/x?token=***&n=3"),
        ("https://h/x?a=1&X-Amz-Signature=abc&b=2", "https://h/x?a=1&X-Amz-Signature=***&b=2"),
        ("use hf_abcdefghijklmnop.", "use ***."),
        ("sk-proj-0123456789abcdef", "***"),
        ("WANDB_API_KEY=0123456789", "WANDB_API_KEY=***"),
        ('{"HF_TOKEN": "abc def"}', '{"HF_TOKEN": "*** def"}'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ('{"authorization": "Basic dTpw"}', '{"authorization": "Basic ***"}'),
        ("curl -H 'Authorization: token abc' x", "curl -H 'Authorization: token ***' x"),
        ("https://hooks.slack.com/services/T0/B0/xyz", "https://hooks.slack.com/services/***"),
        ("https://discord.com/api/webhooks/1/abc", "https://discord.com/api/webhooks/***"),
        ("https://api.telegram.org/bot1:abc/sendMessage", "https://api.telegram.org/bot***"),
        ("python train.py --hf-token abc --lr 3", "python train.py --hf-token *** --lr 3"),
        ('["--api-key", "abc"]', '["--api-key", "***"]'),
        ("password=abc", "password=***"),
        ("lamp train --watch.notify 'https://ntfy.host/abc?x=1'", "lamp train --watch.notify 'https://ntfy.host/***'"),
    ],
)
def test_a_secret_is_masked(text: str, shown: str) -> None:
    assert mask(text) == shown
    assert mask(shown) == shown
    assert mask_record({"type": "note", "text": [text, 3]}) == {"type": "note", "text": [shown, 3]}


def test_the_word_after_a_flag_for_a_secret_is_masked() -> None:
    assert mask_record({"command": ("python", "--hf-token", "a b", "--lr", "3")})["command"] == [
        "python", "--hf-token", "***", "--lr", "3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["step 3/8, 1,000 tokens per second", "the stop token: <|im_end|> (id 3)", "--tokenizer.path tok --data.text_key text",
     "https://host/a.jsonl?rev=main", "key/value heads", "tokens: 12345678901234567890", "basic training of the model",
     "author: Jane", "mail me@host.org", "hf_ is a prefix", "train/tokens", "runs/r/checkpoints/checkpoint-8"],
)  # fmt: skip
def test_ordinary_words_stay(text: str) -> None:
    assert safe(text) == text


def test_masking_takes_no_longer_for_hostile_words() -> None:
    began = time.process_time()
    for text in ("a.b." * 50_000 + "://", "A_" * 100_000 + "TOKEN", "?token" * 50_000, "bearer " * 50_000, "://" * 100_000, "eyJ" * 70_000,
                 "authorization: " * 20_000, "--token" * 50_000, "hf_" * 100_000, "&" + "x-" * 100_000 + "key="):  # fmt: skip
        safe(text)
    assert time.process_time() - began < 5


# ---------------------------------------------------------------- YAML


def bomb(first: str, link: str, levels: int = 9) -> str:
    """Each level holds the one before ten times."""
    return first + "".join(link.format(n + 1, ", ".join([f"*a{n}"] * 10), n) for n in range(levels))


HOSTILE = {
    "aliases": bomb("data: {paths: &a0 [x, x]}\n", "k{2}: &a{0} [{1}]\n"),
    "aliases in a section": bomb("data:\n  paths: &a0 [x, x]\n", "  k{2}: &a{0} [{1}]\n"),
    "merges": bomb("train: &a0 {{lr: 0.1}}\n".replace("{{", "{").replace("}}", "}"), "k{2}: &a{0} {{<<: [{1}]}}\n"),
    "long text": "data: {text_key: &a '" + "x" * 200_000 + "', paths: [" + ", ".join(["*a"] * 9000) + "]}",
    "deep lists": "train: " + "[" * 50_000,
    "deep mappings": "train: " + "{a: " * 3000,
    "deep blocks": "".join(" " * n + "a:\n" for n in range(600)),
    "itself": "train: &a [*a]",
    "itself merged": "train: &a {<<: *a, lr: 1}",
    "itself within": "train: &a {lr: *a}",
    "a number without end": "train: {steps: " + "9" * 100_000 + "}",
    "the same in hex": "train: {steps: 0x" + "f" * 100_000 + "}",
    "a list as a name": "? [a]\n: 3\n",
    "a mapping as a name": "train: {{a: 1}: 2}",
    "code": "train: !!python/object/apply:os.system ['touch imported']",
    "twice": "train: {lr: 1, lr: 2}",
    "twice after a merge": "save: &s {keep: 7}\ntrain:\n  <<: *s\n  lr: 1\n  lr: 2\n",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_settings_that_want_too_much_are_refused(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(text)
    began = time.process_time()
    with pytest.raises(BadConfig) as caught:
        resolve(None, Path("x.yaml"))
    assert time.process_time() - began < 5
    assert len("".join(caught.value.lines())) < 2000
    assert not Path("imported").exists()


def test_merges_are_read_as_yaml_means_them(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("save: &s {every_steps: 7}\neval:\n  <<: *s\n  windows: 9\n")
    found = resolve(None, file)
    assert (found.run.eval.every_steps, found.run.eval.windows) == (7, 9)
    assert (found.origin["eval.every_steps"], found.origin["eval.windows"]) == ("x.yaml:1", "x.yaml:4")
    file.write_text("save: &s {every_steps: 7}\neval:\n  windows: 2\n  <<: [*s]\n  every_steps: 9\n")
    found = resolve(None, file)
    assert (found.run.eval.every_steps, found.run.eval.windows) == (9, 2)
    assert found.origin["eval.every_steps"] == "x.yaml:5"


def test_a_list_on_the_command_line_is_checked_too() -> None:
    with pytest.raises(LampError, match="is not a list"):
        resolve(None, None, {"data.paths": ["[[]"]})
