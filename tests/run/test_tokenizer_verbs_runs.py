"""What starts processes: lamp tokenizer train and show: what is made is checked, said, and opens everywhere."""

from __future__ import annotations

import json
from pathlib import Path

from test_tokenizer_verbs import CORPUS

from lamplighter.data.tokenizer import byte_level
from running import Command, lamp


def test_train_show_and_use(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(CORPUS.documents()))
    done = lamp("tokenizer", "train", "--out", "tok", "--data.paths", "a.txt", "--tokenizer.vocab_size", "300",
                "--special", "<|im_start|>", "<|im_end|>", "--json", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "  | " not in done.stderr, "what the library prints is not for people"
    assert json.loads(done.stdout)["special"] == {"<|endoftext|>": 297, "<|im_start|>": 298, "<|im_end|>": 299}
    shown = lamp("tokenizer", "show", "tok", "a.txt", "--text", "My dear Aunt", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "300 tokens" in shown.stdout and "<|im_end|> = 299" in shown.stdout and "every one came back" in shown.stdout
    assert "[My]" in shown.stdout or "[M][y]" in shown.stdout
    used = lamp("data", "stats", "--data.paths", "a.txt", "--tokenizer.path", "tok", "--json", cwd=tmp_path)
    assert json.loads(used.stdout)["tokenizer"].startswith("300 tokens")


def test_mistakes_are_three_lines(tmp_path: Path, command: Command) -> None:
    (tmp_path / "a.txt").write_text("hello there, hello lamp")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "no-end").mkdir()
    text = json.dumps(byte_level().content).replace("<|endoftext|>", "[END]")
    (tmp_path / "no-end" / "tokenizer.json").write_text(text)
    made = ["tokenizer", "train", "--data.paths", "a.txt"]
    for words, code, said in [
        (made, 2, "--out"),
        ([*made, "--out", "t", "--tokenizer.vocab_size", "200"], 78, "257"),
        ([*made, "--out", "t", "--tokenizer.path", "x"], 78, "nothing to train"),
        ([*made, "--out", "a.txt/t"], 73, "--out"),
        (["tokenizer", "train", "--out", "t", "--data.paths", "empty.txt"], 65, "empty"),
        (["tokenizer", "show", "nowhere"], 66, "no tokenizer at nowhere"),
        (["tokenizer", "show", "a.txt"], 65, "cannot read the tokenizer"),
        (["tokenizer", "show", "no-end"], 78, "end-of-text"),
        (["tokenizer", "shwo", "x"], 2, "did you mean lamp tokenizer show"),
    ]:
        done = command(*words, cwd=tmp_path)
        assert done.returncode == code, (words, done.stderr)
        assert said in done.stderr and "Traceback" not in done.stderr and done.stdout == ""
    assert not (tmp_path / "t").exists()
