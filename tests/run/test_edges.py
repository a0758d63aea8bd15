"""Edges: odd folders, odd files, odd moments; each was a bug once."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lamplighter.config import parse_overrides, resolve
from lamplighter.errors import BadConfig
from lamplighter.rundir import LineFile, RunDir, is_running, read_json, read_lines
from running import LAMP, STARTED, TINY, Command, Finished, clean_env, lamp, slot_of, start_lamp, wait_for

QUICK = [*TINY, "--train.steps", "8", "--save.every_steps", "2"]


Train = Callable[..., tuple[int, str]]


@pytest.fixture
def train(here: Command, tmp_path: Path) -> Train:
    """A run in this process: its code, and what it said."""

    def call(*words: str) -> tuple[int, str]:
        done = here("train", "--run", "r", *QUICK, *words, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    return call


def steps_in(run: RunDir) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in run.checkpoints.glob("checkpoint-*"))


def test_a_damaged_checkpoint_with_a_high_number_does_not_cost_a_good_one(train: Train, finished: Finished) -> None:
    run = finished(*QUICK)
    shutil.copytree(run.checkpoints / "checkpoint-8", run.checkpoints / "checkpoint-9999")
    (run.checkpoints / "checkpoint-9999" / "model.safetensors").write_bytes(b"x")
    code, said = train("--save.keep", "1", "--train.steps", "12")
    assert code == 0
    assert "checkpoint-9999 is passed over" in said
    assert steps_in(run)[-1] == 12


def test_an_error_inside_the_optimizer_saves_nothing_half_done(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lamplighter.train import optimizers

    real, calls = optimizers.fused_adamw, itertools.count(1)

    def adamw(*given: Any, **named: Any) -> None:
        real(*given, **named)
        if next(calls) == 11:  # the first of the two groups of step 6
            raise RuntimeError("a fault in the optimizer")

    monkeypatch.setattr(optimizers, "fused_adamw", adamw)
    code, said = train("--save.every_steps", "4")
    assert code == 1
    assert "half-changed weights are not saved" in said
    assert steps_in(RunDir(tmp_path / "runs" / "r")) == [4]


def test_a_stale_request_does_not_stop_the_next_attempt(tmp_path: Path, train: Train) -> None:
    run = RunDir(tmp_path / "runs" / "r")
    run.create()
    (run.ask / "old.stop").write_text("{}")
    assert train()[0] == 0
    assert not list(run.ask.iterdir())
    assert read_json(run.status)["step"] == 8


def test_the_best_is_saved_where_no_save_was_due(tmp_path: Path, train: Train) -> None:
    assert (
        train(*["--eval.every_steps", "3", "--save.every_steps", "5", "--save.keep", "1", "--train.steps", "11"])[0]
        == 0
    )
    run = RunDir(tmp_path / "runs" / "r")
    best = read_json(run.checkpoints / "best.json")["step"]
    scores = {r["step"]: r["eval/val_loss"] for r in read_lines(run.metrics) if "eval/val_loss" in r}
    assert best == min(scores, key=lambda step: scores[step])
    assert best in steps_in(run)


def test_a_stop_during_the_start_of_a_resumed_run_still_knows_what_is_safe(tmp_path: Path, finished: Finished) -> None:
    run = finished(*QUICK)
    going = start_lamp("train", "--run", "r", *QUICK, "--train.steps", "900000", cwd=tmp_path)
    wait_for(lambda: slot_of(run).phase == "import", process=going)
    going.send_signal(signal.SIGINT)
    assert going.wait(10) == 75
    assert "before another step was made; step 8 is safe" in (tmp_path / "out.txt").read_text()
    assert read_json(run.status)["durable_step"] == 8


def test_a_run_by_epochs_can_be_extended(tmp_path: Path, here: Command) -> None:
    words = ["train", *TINY, *["--data.embedded_documents", "200", "--data.seq_len", "128", "--train.epochs"]]
    assert here(*words, "0.1", cwd=tmp_path).returncode == 0
    done = here(*words, "0.2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train.epochs: 0.1 -> 0.2" in done.stdout
    assert "resumed from" in done.stdout


def test_odd_files_in_a_run_folder_harm_nobody(tmp_path: Path, finished: Finished, here: Command, train: Train) -> None:
    run = finished(*QUICK, "--eval.every_steps", "4")
    (run.checkpoints / "checkpoint-²").mkdir()
    (run.checkpoints / "checkpoint-x").mkdir()
    (run.checkpoints / "best.json").write_text("[4]")
    with open(run.metrics, "a") as file:
        file.write('{"step":"x","train/loss":1}\n7\n"text"\n{"torn')
    run.status.write_text("[1, 2]")
    assert here("runs", cwd=tmp_path).returncode == 0
    assert json.loads(here("checkpoints", "r", "--json", cwd=tmp_path).stdout)[-1]["step"] == 8
    code, said = train("--eval.every_steps", "4", "--train.steps", "10")
    assert code == 0, said
    run.config.write_text("train: [")
    code, said = train("--train.steps", "12")
    assert code == 78
    assert "--resume never" in said


@pytest.mark.parametrize(
    ("text", "part"),
    [("train: {yes: 3}\n", "train.True"), ("train: {1: 2}\n", "train.1"), ("train: {steps: 5, steps: 6}\n", "stands twice"),
     ("train: {steps: 5}\ntrain: {lr: 1}\n", "stands twice")],
)  # fmt: skip
def test_odd_keys_in_yaml(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(BadConfig) as caught:
        resolve(None, file)
    assert part in caught.value.what


def test_paths_that_look_like_lists_and_lists_that_look_like_paths(tmp_path: Path) -> None:
    assert resolve(None, None, parse_overrides(["--data.paths", "[ab] draft.txt"])[1]).run.data.paths == [
        "[ab] draft.txt"
    ]
    assert resolve(None, None, parse_overrides(["--data.paths", "[a.txt, b.txt]"])[1]).run.data.paths == [
        "a.txt",
        "b.txt",
    ]
    file = tmp_path / "x.yaml"
    file.write_text("data: {paths: a.txt}\n")
    assert resolve(None, file).run.data.paths == ["a.txt"]


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [(["train", "--run", ""], 2, "name"), (["train", "--train.steps", "99999999999999999999"], 78, "train.steps"),
     (["generate", "r", "--prompt", "\udcff"], 2, "UTF-8")],
)  # fmt: skip
def test_odd_values(tmp_path: Path, command: Command, words: list[str], code: int, part: str) -> None:
    done = command(*words, cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert part in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_warm_up_that_never_ends_is_refused(train: Train) -> None:
    code, said = train("--train.warmup_steps", "99")
    assert code == 78
    assert "never ends" in said


def test_padding_and_a_lopsided_division_are_said(tmp_path: Path, train: Train) -> None:
    (tmp_path / "t.txt").write_text("the same few words again " * 300)
    code, said = train(
        *["--data.paths", "t.txt", "--data.seq_len", "12000", "--train.steps", "1", "--train.batch_size", "1"]
    )
    assert code == 0, said
    assert "is padding" in said
    assert "held back for validation" in said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_stop_before_anything_was_started(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """At any moment of the first half second: a code and a word, never a traceback."""
    for wait_s in (0.06, 0.2):
        process = subprocess.Popen(
            [*LAMP, "train", "--run", "r", *QUICK, "--train.steps", "90000"], cwd=tmp_path, env=clean_env(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        STARTED.append(process)
        assert process.stdout is not None
        first = process.stdout.readline()  # the first word: from here on it is our code that runs
        time.sleep(wait_s)
        process.send_signal(number)
        said = first + process.communicate(timeout=20)[0]
        assert process.returncode in (code, 75), said
        assert "Traceback" not in said
        assert "stopp" in said or "left" in said


def test_closed_streams_do_not_become_the_lock_file(tmp_path: Path) -> None:
    command = f"exec {sys.executable} -m lamplighter train --run r {' '.join(QUICK)} >&- 2>&- <&-"
    assert (
        subprocess.run(["bash", "-c", command], cwd=tmp_path, env=clean_env(), check=False, timeout=60).returncode == 0
    )
    run = RunDir(tmp_path / "runs" / "r")
    assert set(json.loads(run.lock.read_text())) >= {"pid", "host"}
    assert not is_running(run)


def test_a_line_that_did_not_fit_is_closed_before_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    file = LineFile(path)
    assert file.write('{"a": 1}')
    file.torn = True  # as after a short write
    os.write(file.fd, b'{"half')
    assert file.write('{"b": 2}')
    assert list(read_lines(path)) == [{"a": 1}, {"b": 2}]


def test_bad_data_is_found_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 20)
    done = lamp("train", "--run", "r", *QUICK, "--data.paths", "binary.txt", cwd=tmp_path)
    assert done.returncode == 65, done.stdout
    begun = [event["name"] for event in read_lines(RunDir(tmp_path / "runs" / "r").events) if event["type"] == "phase"]
    assert begun[0] == "config"
    assert "import" not in begun
