"""What starts processes: A corpus in figures: every number is the true one, every place can be gone to, and what was not counted is said."""

from __future__ import annotations

import json
from pathlib import Path

from test_stats import rows_file, words, write_lines

from running import Command, lamp


def test_the_command_counts_rows_with_their_template(tmp_path: Path) -> None:
    rows_file(tmp_path / "rows.jsonl")
    words_ = ["data", "stats", "--data.paths", "rows.jsonl", "--tokenizer.kind", "bytes", "--data.seq_len", "512",
              "--data.val_fraction", "0.1"]  # fmt: skip
    done = lamp(*words_, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kind"] == "chat" and found["template"] == "chatml"
    assert found["counts"]["documents"] == 62 and found["counts"]["learned_tokens"] < found["counts"]["tokens"]
    assert found["lengths"]["longest"] > max(len(words(n, 6)) for n in range(60)), "the template counts"
    counts = {one["reason"]: one["count"] for one in found["quality"]["reasons"] if one["count"]}
    assert counts["no_answer"] == 2 and counts["repeated"] == 1 and counts["same_prompt"] == 1
    assert counts["unreadable"] == 1
    places = {one["reason"]: [e["place"] for e in one["examples"]] for one in found["quality"]["reasons"]}
    assert places["repeated"] == ["rows.jsonl:61"] and places["unreadable"] == ["rows.jsonl:64"]
    assert found["duplicates"]["exact_examples"][0]["first"] == "rows.jsonl:6"
    (folder,) = (tmp_path / "runs" / ".stats").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["lengths.svg", "stats.json", "stats.txt"]
    kept = json.loads((folder / "stats.json").read_text())
    assert kept == found
    assert "made: runs/.stats/" in done.stderr and "next: " in done.stderr
    assert "61 are left" in (folder / "stats.txt").read_text()


def test_the_command_counts_text_and_a_test_set(tmp_path: Path) -> None:
    texts = [words(n, 80) for n in range(130)]
    write_lines(tmp_path / "train.jsonl", texts)
    write_lines(tmp_path / "test.jsonl", [texts[0], words(999, 80)])
    done = lamp("data", "stats", "--data.paths", "train.jsonl", "--tokenizer.vocab_size", "400", "--val", "test.jsonl",
                "--out", "figures", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 stand in the training text as they are" in done.stdout and "test.jsonl" in done.stdout
    assert "trained on this source" in done.stdout and "advice   " in done.stdout and "because  " in done.stdout
    assert (tmp_path / "figures" / "stats.txt").read_text() == done.stdout
    folder = next(path.parent for path in (tmp_path / "runs" / ".cache").glob("tokenizer-*/tokenizer.json"))
    again = lamp("data", "stats", "--data.paths", "train.jsonl", "--tokenizer.path", str(folder), "--val", "test.jsonl",
                 "--json", cwd=tmp_path)  # fmt: skip
    record = json.loads(again.stdout)
    assert record["test_set"]["exact"] == 1 and record["test_set"]["exact_examples"][0]["second"].startswith(
        "test.jsonl"
    )


def test_mistakes_are_three_lines(tmp_path: Path, command: Command) -> None:
    write_lines(tmp_path / "a.jsonl", [words(1), words(2)])
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "file").write_text("in the way")
    base = ["data", "stats", "--tokenizer.kind", "bytes"]
    for more, code, said in [
        (["--data.paths", "none.jsonl"], 66, "none.jsonl"),
        (["--data.paths", "empty.txt"], 65, "empty"),
        (["--data.paths", "a.jsonl", "--out", "file/figures"], 73, "--out"),
        (["--data.paths", "a.jsonl", "--val", "nothing.jsonl"], 66, "nothing.jsonl"),
        (["--sample-mb", "-1"], 2, "--sample-mb"),
        (["--sampel-mb", "1"], 2, "--sample-mb"),
        ([str(tmp_path)], 2, "not a run.yaml"),
    ]:
        done = command(*base, *more, cwd=tmp_path)
        assert done.returncode == code, (more, done.stderr)
        assert said in done.stderr and "Traceback" not in done.stderr
        assert done.stdout == ""
