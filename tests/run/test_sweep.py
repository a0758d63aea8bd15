"""lamp sweep: rounds of runs that pause and go on bit for bit, one budget, one best."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from lamplighter.commands.sweep import Sweep, SweepRun
from lamplighter.config import load_dump, resolve
from lamplighter.rundir import RunDir, is_running, read_lines, read_status
from running import TINY, Command, lamp, start_lamp, wait_for

TINY_RUN = [*TINY, "--train.steps", "16", "--save.every_steps", "0", "--save.every_s", "0", "--launch.spare", "0"]
OVER = ["--over", "train.lr=1e-5,3e-3"]


def losses(run: RunDir) -> dict[int, str]:
    found = {int(row["step"]): float(row["train/loss"]).hex() for row in read_lines(run.metrics) if "train/loss" in row}
    assert found
    return found


def test_the_better_half_goes_on_bit_for_bit_and_the_budget_is_one(tmp_path: Path) -> None:
    first = lamp("sweep", *OVER, *TINY_RUN, "--budget.hours", "0.0001", cwd=tmp_path)
    assert first.returncode == 75, first.stdout + first.stderr
    assert "the budget is spent" in first.stdout and "goes on" in first.stdout
    done = lamp("sweep", *OVER, *TINY_RUN, "--budget.hours", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sweep-1  train.lr=1e-5" in done.stdout and "best: sweep-2  train.lr=3e-3" in done.stdout
    lost, best = (RunDir(tmp_path / "runs" / name) for name in ("sweep-1", "sweep-2"))
    assert max(losses(lost)) == 8, "half of its steps, and no further"
    assert [path.name for path in lost.checkpoints.glob("checkpoint-*")] == ["checkpoint-8"]
    table = (tmp_path / "runs" / "sweep" / "table.md").read_text()
    assert "| 1 | sweep-2 | train.lr=3e-3 | 16 of 16 |" in table and "place 2 of 2 after step 8" in table
    settings = load_dump(tmp_path / "runs" / "sweep" / "best.yaml")
    assert settings.train.lr == 3e-3 and settings.budget.until_step is None
    whole = lamp("train", "--run", "whole", *TINY_RUN, "--train.lr", "3e-3", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert losses(best) == losses(RunDir(tmp_path / "runs" / "whole")), "as if it had never paused"
    again = lamp("sweep", *OVER, *TINY_RUN, cwd=tmp_path)
    assert again.returncode == 0 and "to step" not in again.stdout.replace("at step", ""), "nothing is trained twice"


def test_a_sweep_that_cannot_be_is_refused_before_anything_runs(here: Command, tmp_path: Path) -> None:
    for words, said in (
        ([], "--over is not given"),
        (["--over", "train.lr"], "a name, =, and values"),
        (["--over", "train.lrr=1,2"], "train.lr"),
        (["--over", "train.lr=1e-3"], "1 combinations"),
        (["--over", "train.lr=1e-3,1e-3"], "a value stands twice"),
        (["--over", "save.keep=1,2"], "changes nothing that is learned"),
        (["--over", "train.lr=1e-3,2e-3", "--train.lr", "1"], "given twice"),
        (["--over", "train.lr=1e-3,many"], "train.lr"),
        (["--over", "train.lr=1e-3,2e-3", "--train.epochs", "2"], "rounds are counted in steps"),
        (["--over", "train.lr=1e-3,2e-3", "--data.val_fraction", "0"], "held-back"),
        (["--over", "train.lr=1e-3,2e-3", "--halvings", "-1"], "--halvings -1"),
    ):
        done = here("sweep", *words, cwd=tmp_path)
        assert done.returncode in (2, 78) and said in done.stderr, (words, done.stderr)
    assert not (tmp_path / "runs").exists()


def test_a_folder_with_another_sweep_or_a_run_is_left_alone(here: Command, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "sweep"
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps([{"run": "sweep-1", "settings": {"train.lr": "1"}, "steps": 5}]))
    done = here("sweep", *OVER, *TINY_RUN, cwd=tmp_path)
    assert done.returncode == 2 and "holds another sweep" in done.stderr
    (folder / "events.jsonl").touch()
    done = here("sweep", *OVER, *TINY_RUN, cwd=tmp_path)
    assert done.returncode == 2 and "is a run" in done.stderr


def test_runs_that_it_has_not_made_are_left_alone(here: Command, tmp_path: Path) -> None:
    mine = tmp_path / "runs" / "sweep-2" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    done = here("sweep", *OVER, *TINY_RUN, cwd=tmp_path)
    assert done.returncode == 2 and "sweep-2 is there already" in done.stderr
    assert not (tmp_path / "runs" / "sweep-1").exists() and mine.read_text() == "mine"


def test_what_the_plan_refuses_is_out_and_takes_no_room(tmp_path: Path) -> None:
    words = ["--over", "model.mlp_width=64,100000000", *TINY_RUN, "--train.steps", "4", "--halvings", "0"]
    done = lamp("sweep", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sweep-2 (model.mlp_width=100000000) is out: refused by the plan" in done.stdout
    assert "1 runs, 0 halvings" in done.stdout and "best: sweep-1" in done.stdout
    assert not (tmp_path / "runs" / "sweep-2").exists()


def test_a_rate_that_is_tried_is_one_of_the_optimizer_that_a_run_has_without_it(tmp_path: Path) -> None:
    words = [word for word in TINY_RUN if word not in ("--model.family", "gpt2")]
    begun = lamp("sweep", "--over", "train.lr=0.01,0.02", *words, "--budget.hours", "0.0001", cwd=tmp_path)
    assert begun.returncode == 75 and "the rates are those of muon with the schedule wsd" in begun.stdout


def test_all_have_the_precision_and_the_threads_of_the_first(tmp_path: Path) -> None:
    first, second = (SweepRun(RunDir(tmp_path / name), {}, resolve(), 8) for name in ("s-1", "s-2"))
    one = Sweep(RunDir(tmp_path / "s"), [first, second], 0, "eval/val_loss", given=[], again="")
    assert one._as_the_first(first) == [], "nobody was before it"
    folder = first.run.checkpoint(8)
    (folder / "training").mkdir(parents=True)
    (folder / "training" / "state.json").write_text(json.dumps({"machine": {"dtype": "bf16", "threads": 2}}))
    assert one._as_the_first(second) == ["--train.dtype", "bf16", "--train.threads", "2"]
    second.resolved = resolve(None, None, {"train.dtype": ["fp32"]})
    assert one._as_the_first(second) == ["--train.threads", "2"], "what is given stays"


def test_a_sweep_that_is_asked_to_stop_leaves_its_run_saved_and_goes_on(tmp_path: Path) -> None:
    words = ["sweep", *OVER, *TINY_RUN, "--train.steps", "20000", "--halvings", "0"]
    going = start_lamp(*words, cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "sweep-1")
    wait_for(lambda: run.status.exists() and (read_status(run).get("step") or 0) > 5, process=going)
    going.send_signal(signal.SIGTERM)
    assert going.wait(30) == 75
    status = read_status(run)
    assert status["state"] != "running" and status["durable_step"] > 5 and not is_running(run)
    assert "goes on" in (tmp_path / "out.txt").read_text()
    assert not (tmp_path / "runs" / "sweep-2").exists()


def test_no_room_is_said_before_the_first_run(here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamplighter.commands.sweep.free_bytes", lambda _: 10)
    done = here("sweep", *OVER, *TINY_RUN, cwd=tmp_path)
    assert done.returncode == 73 and "no room for this sweep" in done.stderr
    assert not list((tmp_path / "runs").glob("sweep-*"))


def test_a_run_pauses_once_and_says_how_it_goes_on(here: Command, tmp_path: Path) -> None:
    words = ["train", "--run", "r", *TINY_RUN]
    paused = here(*words, "--budget.until_step", "5", cwd=tmp_path)
    assert paused.returncode == 75 and "--budget.until_step none" in paused.stdout, paused.stdout
    run = RunDir(tmp_path / "runs" / "r")
    made = losses(run)
    again = here(*words, "--budget.until_step", "5", cwd=tmp_path)
    assert again.returncode == 75 and "nothing is trained" in again.stdout and losses(run) == made
    done = here(*words, "--budget.until_step", "none", cwd=tmp_path)
    assert done.returncode == 0 and max(losses(run)) == 16, done.stdout


def test_steps_that_nothing_was_saved_of_are_said_where_other_settings_begin(here: Command, tmp_path: Path) -> None:
    words = ["train", "--run", "r", *TINY_RUN]
    assert here(*words, "--budget.until_step", "3", cwd=tmp_path).returncode == 75
    shutil.rmtree(tmp_path / "runs" / "r" / "checkpoints")  # as after a kill before the first save
    done = here(*words, "--train.lr", "2e-3", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "nothing was saved of the earlier start" in done.stdout and "train.lr: 0.0003 -> 0.002" in done.stdout
