"""The last lines of a command: true of this run, and fit to be pasted into a shell as they stand."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from lamplighter.commands.train import _left_out, _same_command
from lamplighter.dash import facts
from lamplighter.rundir import RunDir, read_json, read_lines
from lamplighter.watch.time_report import read_time_report
from running import SIZES, TINY, Command, Finished, write_model

EIGHT = [*TINY, "--train.steps", "8", "--save.every_steps", "4"]
HOOK = "https://hooks.slack.com/services/T0/B0/abcdefgh"


def said_after(text: str, head: str) -> str:
    """What stands behind these words in the last line that has them."""
    return [line for line in text.splitlines() if head in line][-1].partition(head)[2]


def test_a_secret_is_left_out_of_the_command_and_not_shown_as_stars() -> None:
    words = [
        "run.yaml",
        "--watch.notify",
        HOOK,
        "--train.steps",
        "9",
        "--data.paths",
        "a.txt",
        "https://me:word@host/b.txt",
    ]
    assert _same_command("train", words) == "lamp train run.yaml --train.steps 9"
    assert _left_out(words).startswith("--watch.notify, --data.paths: not repeated")
    assert _left_out([f"--watch.notify={HOOK}"]).startswith("--watch.notify: not repeated")
    plain = ["--data.paths", "a.txt", "b c.txt", "--watch.notify", "notify-send"]
    assert shlex.split(_same_command("train", plain)) == ["lamp", "train", *plain] and _left_out(plain) == ""


def test_a_checkpoint_that_is_not_there_is_not_called_a_run_without_any(
    tmp_path: Path, finished: Finished, here: Command
) -> None:
    finished(*EIGHT)
    secret = ["--watch.notify", "true --hf-token abcdefgh123"]
    words = ["train", "--run", "r", *EIGHT]
    done = here(*words, *secret, "--resume", "checkpoint-999", cwd=tmp_path)
    assert done.returncode == 74
    assert "checkpoint-8" in done.stdout and "it cannot go on from checkpoint-999" in done.stdout
    assert "there is no valid checkpoint" not in done.stdout
    assert said_after(done.stdout, "  next: ") == shlex.join(["lamp", *words]), (
        "as it can be pasted, without the secret"
    )
    assert done.stdout.index("--watch.notify: not repeated in the command") > done.stdout.index("  next: ")


def test_lamp_runs_ends_with_a_command_that_works(tmp_path: Path, finished: Finished, command: Command) -> None:
    finished(*EIGHT)
    (tmp_path / "runs").rename(tmp_path / "my runs")
    done = command("runs", "--runs-dir", "my runs", cwd=tmp_path)
    told = shlex.split(said_after(done.stdout, "next: "))
    assert told == ["lamp", "checkpoints", "r", "--runs-dir", "my runs"]


def test_a_model_of_one_s_own_is_named_again_and_not_called_one_of_transformers(tmp_path: Path, here: Command) -> None:
    family = write_model(tmp_path, "pass")
    words = ["train", "--run", "x", "--runs-dir", "RO", *SIZES, "--train.steps", "2", "--model.family", family]
    first = here(*words, cwd=tmp_path)
    again = here(*words, cwd=tmp_path)  # finished already
    for done in (first, again):
        assert done.returncode == 0, done.stdout + done.stderr
        assert "transformers" not in done.stdout
        told = said_after(done.stdout, "  next: ")
        assert told == f"lamp generate x --runs-dir RO --model.family {family}"
        assert here(*shlex.split(told)[1:], "--max-tokens", "2", "--threads", "1", cwd=tmp_path).returncode == 0
    told = said_after(here("checkpoints", "x", "--runs-dir", "RO", cwd=tmp_path).stdout, "next: ")
    assert told == f"lamp generate x --runs-dir {tmp_path}/RO --checkpoint checkpoint-2 --model.family {family}"
    assert here(*shlex.split(told)[1:], "--max-tokens", "2", "--threads", "1", cwd=tmp_path).returncode == 0
    told = here("checkpoints", "x", "test", "--runs-dir", "RO", "--model.family", family, cwd=tmp_path)
    assert told.returncode == 0 and said_after(told.stdout, "next: ").endswith(f"--model.family {family}"), told.stderr
    unnamed = here(*words[:-2], "--train.steps", "3", cwd=tmp_path)
    assert unnamed.returncode == 78 and "run x needs model.family given again" in unnamed.stderr
    assert f"--model.family {family}" in said_after(unnamed.stderr, "next:")


def test_the_steps_that_were_given_are_known_before_the_first(tmp_path: Path, here: Command) -> None:
    done = here("train", "--run", "r", *TINY, "--train.steps", "9", "--data.paths", "nothing.txt", cwd=tmp_path)
    assert done.returncode == 66 and "steps 0 of 9;" in done.stdout
    assert read_json(RunDir(tmp_path / "runs" / "r").status)["steps"] == 9


def test_steps_done_again_on_request_are_not_blamed_on_a_kill(
    tmp_path: Path, finished: Finished, here: Command
) -> None:
    run = finished(*EIGHT)
    done = here("train", "--run", "r", *EIGHT, "--resume", "checkpoint-4", "--force", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 steps were done twice, because --resume went back" in done.stdout
    assert "because of a kill" not in done.stdout + run.report.read_text()
    assert facts._ledger(read_time_report(run))["redone_steps"] == 4, "the page says so, too"


def test_steps_done_again_on_another_schedule_are_not_called_inexact(
    tmp_path: Path, finished: Finished, here: Command
) -> None:
    """Asked for, they must have other results; steps of the new schedule are compared again."""
    run = finished(*EIGHT)
    longer = ["train", "--run", "r", *TINY, "--save.every_steps", "4", "--train.steps", "12"]
    done = here(*longer, "--resume", "checkpoint-4", cwd=tmp_path)
    assert done.returncode == 0 and "the schedule changes from here" in done.stdout, done.stdout
    losses = [record["train/loss"] for record in read_lines(run.metrics) if record["step"] == 8 and "train/loss" in record]  # fmt: skip
    assert len(losses) == 2 and losses[0] != losses[1]
    again = here(*longer, "--resume", "checkpoint-8", cwd=tmp_path)
    assert again.returncode == 0 and "4 redone steps equal" in again.stdout, again.stdout
    assert not [event for event in read_lines(run.events) if event.get("cause") == "not_exact"]


def test_a_config_json_that_will_not_do_ends_with_something_to_do(
    tmp_path: Path, finished: Finished, here: Command
) -> None:
    folder = finished(*EIGHT).checkpoint(8)
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**found, "model_type": "bert"}))
    done = here("generate", str(folder), cwd=tmp_path)
    assert done.returncode == 65 and "not those of its config.json" in done.stderr, (
        "never random weights in their place"
    )
    assert "use the whole folder of one model" in said_after(done.stderr, "next:")
