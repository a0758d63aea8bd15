"""Trackers beside real runs: killed and resumed, rolled back by hand, read back with each tracker's own reader; one that hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lamplighter.rundir import RunDir, read_status
from running import LAMP, LONG, clean_env, lamp, processes_of, start_lamp, wait_for
from tracked import assert_same, merge, read_csv, read_tensorboard, read_trackio, read_wandb, write_killed_run

SMALL = ("--data.embedded_documents", "300", "--tokenizer.vocab_size", "300", "--model.width", "32", "--model.layers", "1", "--model.heads", "2",
         "--data.seq_len", "32", "--train.batch_size", "4", "--train.threads", "1", "--train.dtype", "fp32")  # fmt: skip


def test_all_four_read_back_as_the_run_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 kills, a roll-back, --resume checkpoint-N and a late evaluation, as a run leaves them; by the command itself."""
    run = write_killed_run(tmp_path / "runs" / "r")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    done = lamp(
        "track", "r", "--to", "csv", "tensorboard", "trackio", "wandb", "--offline", "--tags", "a", "b", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("in 3 linked runs") == 4
    names = ("r", "r~2", "r~3")
    folder = run.path / "track"
    assert_same(merge([read_csv(folder / "csv" / name) for name in names]), run)
    assert_same(merge([read_tensorboard(folder / "tensorboard" / name)[0] for name in names]), run, digits=6)
    stored = [read_trackio(tmp_path / "trackio" / "lamplighter.db", name) for name in names]
    assert_same(merge([points for points, _ in stored]), run)
    assert "stuck: deadlock" in stored[0][1] and any("begins at step" in title for title in stored[1][1])
    points, facts = read_wandb(folder / "wandb")
    assert_same(merge([points[name] for name in names]), run)
    assert any("deadlock" in title for title in facts["r"]["alerts"])
    assert facts["r~2"]["group"] == "r" and facts["r"]["tags"] == ["a", "b"] and facts["r"]["project"] == "lamplighter"
    again = lamp("track", "r", "--to", "csv", "--no-follow", cwd=tmp_path)
    assert again.returncode == 0
    assert_same(merge([read_csv(folder / "csv" / name) for name in names]), run), "nothing twice"


@LONG  # the kill must meet a run that goes on: it does not always; kills on a written run stay in make test
def test_a_run_that_is_killed_and_sent_back_is_followed_in_one_piece(tmp_path: Path) -> None:
    """Everything by kill -9, parent and followers too; then --resume to an earlier checkpoint with other data ahead."""
    words = ("train", "--run", "r", "--preset", "demo", *SMALL, "--train.steps", "40000", "--save.every_steps", "40", "--save.keep", "50",
             "--eval.every_steps", "40", "--eval.sample_every_steps", "0", "--track.to", "csv", "tensorboard")  # fmt: skip
    run = RunDir(tmp_path / "runs" / "r")
    for reached in (90, 200):
        process = start_lamp(*words, cwd=tmp_path)
        wait_for(lambda wanted=reached: (read_status(run).get("durable_step") or 0) >= wanted, process=process)
        for pid in [process.pid, *processes_of(run.path)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
        wait_for(lambda: not processes_of(run.path))
    process = start_lamp(*words, "--resume", "checkpoint-120", cwd=tmp_path)
    wait_for(
        lambda: (read_status(run).get("durable_step") or 0) >= 280 and (read_status(run).get("attempt") or 0) >= 3,
        process=process,
    )
    told = read_status(run)["track"]
    assert {one["to"] for one in told} == {"csv", "tensorboard"} and all("lag" in one for one in told)
    stopped = lamp("stop", "r", cwd=tmp_path)
    assert stopped.returncode == 0 and process.wait(40) == 75
    folders = sorted((run.path / "track" / "csv").glob("r*"))
    assert len(folders) == 1, "the same machine does the same steps: redone ones are equal"
    assert_same(merge([read_csv(folder) for folder in folders]), run)
    assert_same(read_tensorboard(run.path / "track" / "tensorboard" / "r")[0], run, digits=6)
    assert json.loads((run.path / "track" / "csv.json").read_text())["done"]
    assert not processes_of(run.path)


HANGING = """
import time
class Settings:
    def __init__(self, **_): pass
def init(**_):
    time.sleep(3600)
"""


def test_a_tracker_that_hangs_costs_the_training_nothing(tmp_path: Path) -> None:
    """The zoo's tracker_hang: wandb.init never comes back."""
    (tmp_path / "fake" / "wandb").mkdir(parents=True)
    (tmp_path / "fake" / "wandb" / "__init__.py").write_text(HANGING)
    words = [
        *LAMP,
        "train",
        "--run",
        "r",
        "--preset",
        "demo",
        *SMALL,
        "--train.steps",
        "60",
        "--track.to",
        "wandb",
        "csv",
    ]
    began = time.monotonic()
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env={**clean_env(), "PYTHONPATH": str(tmp_path / "fake")}, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 60
    assert "lamp track r --to wandb" in done.stdout, "how the rest is sent later"
    run = RunDir(tmp_path / "runs" / "r")
    assert_same(read_csv(run.path / "track" / "csv" / "r"), run)
    assert read_status(run)["state"] == "finished" and not processes_of(run.path)


def test_a_watched_command_is_followed_too(tmp_path: Path) -> None:
    code = "import time, torch\nm = torch.nn.Linear(2, 2)\no = torch.optim.SGD(m.parameters(), 0.1)\nfor _ in range(40):\n    m(torch.ones(1, 2)).sum().backward(); o.step(); o.zero_grad(); time.sleep(0.05)\n"
    (tmp_path / "script.py").write_text(code)
    done = lamp("watch", "--", sys.executable, "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = lamp("track", "script", "--to", "csv", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    points = read_csv(tmp_path / "runs" / "script" / "track" / "csv" / "script")
    assert max(step for name, step in points if name == "train/iter") >= 30


def test_a_wrong_tracker_is_named(tmp_path: Path) -> None:
    write_killed_run(tmp_path / "runs" / "r", steps=20, kills=1)
    for words, what in ((("--to", "mlflow"), "mlflow"), ((), "no tracker was named")):
        done = lamp("track", "r", *words, cwd=tmp_path)
        assert done.returncode == 2 and what in done.stderr and "tensorboard" in done.stderr
    done = lamp("train", "--track.to", "mlflow", "--train.steps", "5", cwd=tmp_path)
    assert done.returncode == 78 and "track.to" in done.stderr
