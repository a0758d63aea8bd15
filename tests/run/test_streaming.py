"""Streaming training through the real command: kills, the end of the data, a source that blocks, what is refused."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest

from lamplighter.rundir import RunDir, read_lines
from running import (
    LAMP,
    LONG,
    TINY,
    Command,
    lamp,
    listen,
    losses_of,
    slot_of,
    start_lamp,
    verdicts_of,
    wait_for,
)
from server import serving

STREAM = [*TINY, "--data.stream", "true", "--data.tokens_per_chunk", "4000", "--save.every_steps", "10"]


def rows(count: int) -> str:
    from lamplighter.data.sources import EmbeddedCorpus

    return "".join(json.dumps({"text": text}) + "\n" for text in EmbeddedCorpus(0, count).documents())


def test_kills_change_nothing(tmp_path: Path, here: Command) -> None:
    """Child and parent, at random moments: every loss is the same to the last bit, over chunks and an epoch's end."""
    (tmp_path / "a.jsonl").write_text(rows(80))
    words = ["train", *STREAM, "--data.paths", "a.jsonl", "--train.steps", "220", "--train.batch_size", "8"]
    whole = here(*words, "--run", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stdout[-2000:]
    assert "epoch 2 begins" in whole.stdout
    truth = losses_of(RunDir(tmp_path / "runs" / "whole"))
    run = RunDir(tmp_path / "runs" / "torn")
    rng = random.Random(5)
    for number in range(2):
        process = start_lamp(*words, "--run", "torn", cwd=tmp_path)
        goal = 30 + 60 * number + rng.randrange(30)
        wait_for(lambda goal=goal: slot_of(run).step >= goal, process=process)  # type: ignore[misc]
        os.kill(slot_of(run).pid, signal.SIGKILL)
        if number % 2:
            process.kill()
        else:
            process.terminate()
        process.wait()
    last = here(*words, "--run", "torn", cwd=tmp_path)
    assert last.returncode == 0, last.stdout[-2000:]
    assert losses_of(run) == truth and len(truth) == 220


@LONG
def test_kills_over_a_bad_line_change_nothing(tmp_path: Path) -> None:
    """Zoo 13 and 14 through training: a server that is slow, drops, stalls and lies; the trainer is killed meanwhile."""
    data = rows(160).encode()
    words = ["train", *STREAM, "--train.steps", "150", "--train.batch_size", "8", "--data.val_fraction", "0"]
    (tmp_path / "a.jsonl").write_bytes(data)
    whole = lamp(*words, "--data.paths", "a.jsonl", "--run", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stdout[-2000:]
    truth = losses_of(RunDir(tmp_path / "runs" / "whole"))
    run = RunDir(tmp_path / "runs" / "torn")
    with serving() as server:
        url, served = server.put("a.jsonl", data, slow_s=0.05)
        words += ["--data.paths", url, "--run", "torn"]
        size = len(data)
        served.drops = [size // 5, size // 3]
        process = start_lamp(*words, cwd=tmp_path)
        wait_for(lambda: slot_of(run).step >= 75, process=process)
        os.kill(slot_of(run).pid, signal.SIGKILL)
        process.kill()
        process.wait()
        served.stalls, served.spared, served.slow_s = [size // 2], 0, 0.02
        last = lamp(*words, cwd=tmp_path)
        assert last.returncode == 0, last.stdout[-2000:]
        again = [int(r["Range"].removeprefix("bytes=").split("-")[0]) for r in served.requests if "Range" in r]
    assert losses_of(run) == truth and len(truth) == 150
    causes = {event["cause"] for event in verdicts_of(run)}
    assert {"stream_drop", "stream_stall"} <= causes, causes
    assert max(again) > size // 4, "a resumed run asks for its byte, not for the beginning"


@LONG
def test_the_end_of_the_data_is_the_end_of_the_run_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(rows(60))
    words = ["train", *STREAM, "--data.paths", "a.jsonl", "--train.steps", "5000", "--data.at_end", "stop"]
    done = lamp(*words, "--eval.every_steps", "1", "--eval.windows", "2", "--run", "ends", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:]
    run = RunDir(tmp_path / "runs" / "ends")
    steps = max(losses_of(run))
    assert f"the data ended after step {steps} of 5000" in done.stdout
    assert (run.checkpoints / f"checkpoint-{steps}" / "manifest.json").exists()
    records = [r for r in read_lines(run.metrics) if "train/loss" in r]
    assert records[-1]["train/tokens"] == sum(r["tokens"] for r in _token_counts(tmp_path)), "each token once"
    scored = [r["step"] for r in read_lines(run.metrics) if "eval/val_loss" in r]
    assert scored.count(steps) == 1, "scored at its end, and not twice where it was due there"


def _token_counts(folder: Path) -> list[dict[str, int]]:
    """What the training side of the file holds, counted apart from the product's own chunks."""
    from lamplighter.data.split import Split

    record = json.loads((folder / "runs/ends/stream/val.json").read_text())
    division = Split(**record["division"])
    texts = [json.loads(line)["text"].encode() for line in (folder / "a.jsonl").read_text().splitlines()]
    assert division.by == "blocks" or len(texts) >= 100
    return [{"tokens": _train_tokens(division, text)} for text in texts]


def _train_tokens(division: object, text: bytes) -> int:
    from lamplighter.data.split import Split, Splitter
    from lamplighter.readers.ranges import TextBlock

    assert isinstance(division, Split)
    pieces = Splitter(division).pieces(TextBlock([text]))
    return sum(len(one) + 1 for one, val in zip(pieces.texts, pieces.val.tolist(), strict=True) if not val)


def test_max_chunks_counts_the_steps(tmp_path: Path, here: Command) -> None:
    (tmp_path / "a.jsonl").write_text(rows(200))
    words = ["train", *STREAM, "--data.paths", "a.jsonl", "--data.max_chunks", "3", "--run", "three"]
    done = here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "3 chunks of 4,000 tokens: 94 steps" in done.stdout  # 12,000 / (32 * 4)
    assert max(losses_of(RunDir(tmp_path / "runs" / "three"))) == 94


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data.stream", "true", "--train.epochs", "2"], "a stream has no known length"),
        (["--data.max_chunks", "3"], "data.max_chunks needs data.stream true"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: list[str], said: str, command: Command) -> None:
    done = command("train", *TINY, *words, cwd=tmp_path)
    assert done.returncode == 78 and said in done.stderr


BLOCKED = """\
import time

def documents():
    for number in range(100_000):
        time.sleep(0.02 if number < 200 else 9 if number == 200 else 0)
        yield f"paper {number} is read slowly, and {number * 7919 % 1000} others follow it. " * 5
"""


@LONG  # tests/run/test_silence.py has a source that blocks
def test_a_stream_that_blocks_is_never_quiet_and_its_line_is_named(tmp_path: Path) -> None:
    """Zoo 12 and situation 1: gathered so far, rate, time left, where; then, while next() blocks, how long ago.

    All of it is said from outside the loop, and the source's own line is named.
    """
    (tmp_path / "blocked.py").write_text(BLOCKED)
    words = [*LAMP, "train", *STREAM, "--data.source", "blocked:documents", "--data.tokens_per_chunk", "400000"]
    heard = listen([*words, "--data.val_fraction", "0", "--train.steps", "20", "--run", "b"], tmp_path, on_pty=False)
    assert heard.code == 0, heard.text[-3000:]
    assert heard.longest_gap_s < 2.5, f"{heard.longest_gap_s:.2f} s of silence after: {heard.before_gap}"
    filling = [line for line in heard.text.splitlines() if "fill chunk 0" in line and "tokens/s" in line]
    assert filling and all(" s left" in line and " samples" in line for line in filling), "k of N, rate, time left"
    waiting = [line for line in heard.text.splitlines() if "fill chunk 0" in line and "last progress" in line]
    assert waiting and all(" tokens of " in line and "document 200 of blocked" in line for line in waiting)
    gathered = max(int(line.split(" tokens of")[0].rsplit(" ", 1)[1].replace(",", "")) for line in waiting)
    assert gathered > 40_000, "what had come was counted while it blocked"
    run = RunDir(tmp_path / "runs" / "b")
    named = [event for event in verdicts_of(run) if event["state"] == "waiting"]
    assert any("blocked.py:5" in str(event["why"]) and event["culprit"]["line"] == 5 for event in named), named
    assert not any(event["state"] == "stuck" for event in verdicts_of(run)), "slow, not stuck: nothing is killed"


@LONG
def test_the_stream_side_of_the_promises_holds_in_a_test_run(tmp_path: Path) -> None:
    done = lamp("train", "--data.stream", "true", "--test", "--run", "t", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-500:]
    assert "streaming the first 500 documents of embedded corpus" in done.stdout and "the floor" in done.stdout
