"""What starts processes: Red flags: recorded curves of healthy runs raise none, those of sick runs raise the right one; and early stopping."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lamplighter.rundir import RunDir, read_lines, read_record
from running import LONG, TINY, Command, events_of, lamp, shared, slot_of, start_lamp, verdicts_of, wait_for


def flags_of(run: RunDir) -> list[dict[str, Any]]:
    return [event for event in verdicts_of(run) if event.get("flag")]


def test_a_flag_stays_visible_over_a_kill_and_is_said_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "z")
    words = ["train", "--run", "z", *TINY, "--train.lr", "1e-8", "--train.steps", "20000", "--save.every_steps", "50"]
    words += ["--train.warmup_steps", "10"]
    going = start_lamp(*words, cwd=tmp_path)
    wait_for(lambda: flags_of(run) and slot_of(run).durable_step >= 150, 90, going)
    os.kill(slot_of(run).pid, signal.SIGKILL)
    wait_for(lambda: read_record(run.status).get("attempt") == 2 and slot_of(run).step > 200, 90, going)
    status = wait_for(
        lambda: (s := read_record(run.status)).get("flags") and s.get("phase", "").startswith("train") and s, 20, going
    )
    assert "not_learning" in [flag["cause"] for flag in status["flags"]]
    assert "not_learning since step 100" in status["now"]
    assert "red flag since step 100: not_learning" in lamp("why", "z", cwd=tmp_path).stdout
    (row,) = [line for line in lamp("runs", cwd=tmp_path).stdout.splitlines() if line.startswith("z ")]
    assert "not_learning" in row
    watcher = start_lamp("watch", "z", cwd=tmp_path)
    wait_for(lambda: "red flag since step 100: not_learning" in (tmp_path / "out.txt").read_text(), 20, watcher)
    watcher.send_signal(signal.SIGINT)
    going.send_signal(signal.SIGTERM)
    assert going.wait(40) == 75
    assert [event["cause"] for event in flags_of(run)].count("not_learning") == 1
    assert "| not_learning | 100 | the end (" in run.report.read_text()


PATIENT = [*TINY, "--train.lr", "0.3", "--train.schedule", "constant", "--train.steps", "4000", "--eval.every_steps", "20",
           "--save.every_steps", "40", "--eval.patience", "4"]  # fmt: skip


def out_of_patience(run: RunDir, patience: int) -> tuple[int, int]:
    """(the step at which it must end, the best one), from the validations on record."""
    seen = {record["step"]: record["eval/val_loss"] for record in read_lines(run.metrics) if "eval/val_loss" in record}
    best, since = 0, 0
    for step, loss in sorted(seen.items()):
        best, since = (step, 0) if not best or loss < seen[best] else (best, since + 1)
        if since == patience:
            return step, best
    raise AssertionError(f"it should not have ended: {seen}")


STREAM = ["--data.stream", "true", "--data.tokens_per_chunk", "4096"]


@pytest.mark.parametrize("extra", [[], pytest.param(STREAM, marks=LONG)], ids=["text", "stream"])
def test_patience_ends_a_run_exactly_over_a_kill_and_more_of_it_goes_on(
    tmp_path: Path, extra: list[str], here: Command
) -> None:
    run = RunDir(tmp_path / "runs" / "z")
    words = ["train", "--run", "z", *extra, *PATIENT]
    going = start_lamp(*words, cwd=tmp_path)
    wait_for(lambda: slot_of(run).step >= 50, 90, going)
    os.kill(slot_of(run).pid, signal.SIGKILL)
    assert going.wait(120) == 0
    (end,) = events_of(run, "ended early")
    assert (end["step"], end["best_step"]) == out_of_patience(run, 4)
    assert end["since_best"] == 4
    said = (tmp_path / "out.txt").read_text()
    assert "attempt 2" in said
    assert f"finished z early, at step {end['step']} of 4000: 4 validations without a new best" in said
    assert f"use checkpoint-{end['best_step']}" in said
    assert {f"checkpoint-{step}" for step in (end["best_step"], end["step"])} <= {
        p.name for p in run.checkpoints.iterdir()
    }
    assert read_record(run.checkpoints / "best.json")["step"] == end["best_step"]
    same = here(*words, cwd=tmp_path)
    assert same.returncode == 0
    assert "is finished, early" in same.stdout and "larger eval.patience" in same.stdout
    assert here(*words[:-1], "6", cwd=tmp_path).returncode == 0
    last = events_of(run, "ended early")[-1]
    assert last["step"] > end["step"]
    assert (last["step"], last["best_step"]) == out_of_patience(run, 6)


@LONG
@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_demo_raises_none(tmp_path: Path, seed: str) -> None:
    done = lamp("demo", "--train.seed", seed, cwd=tmp_path, timeout=900)
    assert done.returncode == 0
    assert flags_of(RunDir(tmp_path / "runs" / "demo")) == []
    assert "## Red flags\n\nnone" in (tmp_path / "runs" / "demo" / "report.md").read_text()


@LONG
def test_a_run_on_real_text_raises_none(tmp_path: Path) -> None:
    text = shared("tinyshakespeare", "input.txt")
    words = ["train", "--run", "r", "--data.paths", str(text), "--tokenizer.vocab_size", "1024", "--model.layers", "2"]
    words += ["--model.width", "96", "--model.heads", "4", "--data.seq_len", "128", "--train.steps", "500"]
    done = lamp(
        *words, "--train.batch_size", "4", "--train.lr", "2e-3", "--eval.every_steps", "50", cwd=tmp_path, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert flags_of(RunDir(tmp_path / "runs" / "r")) == []
