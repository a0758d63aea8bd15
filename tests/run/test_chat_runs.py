"""What starts processes: Chat templates: what people write stays text, answers are found exactly, training and use agree or refuse."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from test_chat import ZEPHYR, change

from lamplighter.rundir import RunDir, read_lines
from running import Command, Row, lamp, losses_of, slot_of, start_lamp, verdicts_of, wait_for

ROWS = [
    {"instruction": f"Add {a} and {b}.", "input": "", "output": f"{a} and {b} is {a + b}."}
    for a in range(14)
    for b in range(14)
]


TINY = [
    "--tokenizer.kind", "bytes", "--model.family", "gpt2", "--model.layers", "2", "--model.width", "32", "--model.heads", "2", "--data.seq_len",
    "384", "--train.batch_size", "4", "--train.micro_batch", "2", "--train.dtype", "fp32", "--train.threads", "1",
    "--train.lr", "1e-2", "--eval.every_steps", "15", "--eval.sample_every_steps", "0", "--model.dropout", "0.1",
    "--train.steps", "40", "--save.every_steps", "5", "--save.every_s", "0", "--watch.on_stuck", "stop",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("chat")
    (cwd / "rows.json").write_text(json.dumps(ROWS))
    done = lamp("train", "--run", "whole", *TINY, "--data.paths", "rows.json", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd


def test_a_run_on_instruction_rows_says_everything_before_the_first_step(trained: Path, zoo_row: Row) -> None:
    run = RunDir(trained / "runs" / "whole")
    said = run.console.read_text()
    before = said[: said.index("first step")]
    for words in (
        "the rows of rows.json have instruction, input, output",
        "chat template chatml; answers end in <|endoftext|>",
        "<|im_start|>: ordinary text",
        "196 examples of 196 conversations",
        "nothing is cut",
        "of the tokens are in the loss (data.loss_on response)",
        "data.packing packed (several examples in a window)",
    ):
        assert words in before, words
    verdict = verdicts_of(run, "padding")[0]
    assert (verdict["state"], verdict["action"]) == ("waste", "fallback")
    zoo_row("padding", "start", verdict["action"], 0)
    records = [r for r in read_lines(run.metrics) if "train/pad_frac" in r]
    assert len(records) == 40 and np.mean([r["train/pad_frac"] for r in records]) < 0.2
    losses = [r["eval/val_loss"] for r in read_lines(run.metrics) if "eval/val_loss" in r]
    assert len(losses) == 3 and losses[-1] < losses[0], "it learns"


def test_killed_and_resumed_it_is_bit_identical(trained: Path, here: Command) -> None:
    run = RunDir(trained / "runs" / "broken")
    words = ["train", "--run", "broken", *TINY, "--data.paths", "rows.json"]
    process = start_lamp(*words, cwd=trained)
    wait_for(lambda: run.slot(0).exists() and slot_of(run).durable_step >= 10, process=process)
    os.kill(slot_of(run).pid, signal.SIGKILL)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = here(*words, cwd=trained)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "examples reused" in done.stdout and "resumed from checkpoint-" in done.stdout
    mine, whole = losses_of(run), losses_of(RunDir(trained / "runs" / "whole"))
    assert sorted(mine) == list(range(1, 41)) and mine == whole


def test_the_model_is_asked_by_its_template_and_gives_the_answer_alone(trained: Path, here: Command) -> None:
    asked = ["generate", "whole", "--prompt", "Add 2 and 3.", "--temperature", "0", "--max-tokens", "60"]
    done = here(*asked, cwd=trained)
    assert done.returncode == 0, done.stderr
    assert "asked by its chat template chatml" in done.stderr
    assert "Add" not in done.stdout and "im_start" not in done.stdout
    assert " and " in done.stdout, "it has learned how an answer sounds"
    assert len(done.stdout) < 60, "and where one ends"
    raw = here(*asked, "--raw", cwd=trained)
    assert raw.returncode == 0 and raw.stdout.startswith("Add 2 and 3.")


def test_an_edited_template_or_end_mark_is_refused_at_the_door(trained: Path, here: Command) -> None:
    folder = trained / "runs" / "whole" / "checkpoints" / "checkpoint-40"
    config = folder / "tokenizer_config.json"
    old = config.read_text()
    try:
        change(config, chat_template=ZEPHYR)
        done = here("generate", "whole", "--prompt", "Hi", cwd=trained)
        assert done.returncode == 78
        assert "chat_template is not the one that this model was trained with" in done.stderr
        assert "<|im_start|>" in done.stderr and "in training" in done.stderr and done.stdout == ""
    finally:
        config.write_text(old)
