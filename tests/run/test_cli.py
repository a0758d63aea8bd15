"""The command line: help, errors in three lines with the right codes, names, resume rules, readers."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from lamplighter import __version__, commands
from lamplighter.rundir import RunDir, read_json, read_lines
from running import (
    LAMP,
    TINY,
    Command,
    Finished,
    Row,
    clean_env,
    events_of,
    lamp,
    line_in,
    losses_of,
    slot_of,
    start_lamp,
    verdicts_of,
    wait_for,
    write_model,
)
from tracked import write_killed_run

QUICK = [*TINY, "--train.steps", "8"]
TRAIN = ["train", "--run", "r", *TINY]


def test_help_and_version(tmp_path: Path, command: Command) -> None:
    done = command("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in commands.VERBS)
    assert lamp(cwd=tmp_path).stdout == done.stdout
    assert lamp("--version", cwd=tmp_path).stdout == f"lamp {__version__}\n"
    for verb in commands.VERBS:
        shown = command(verb, "--help", cwd=tmp_path)
        assert shown.returncode == 0
        assert f"lamp {verb}" in shown.stdout
    assert "--train.lr" in command("train", "--help", cwd=tmp_path).stdout
    assert os.listdir(tmp_path) == []


AT_ONCE = [
    (["trian"], 2, "did you mean lamp train"),
    (["status"], 2, "did you mean lamp runs?"),
    (["test"], 2, "did you mean lamp train --test?"),
    (["chat"], 2, "did you mean lamp generate RUN --interactive?"),
    (["serve"], 2, "MODEL requires an argument"),
    (["evaluate"], 2, "did you mean lamp eval RUN?"),
    (["xyzzy"], 2, "verbs: demo train"),
    (["a\x1b]0;x\x07b"], 2, r"lamp has no verb a\x1b]0;x\x07b"),
    (["train", "--config", "run.yaml"], 2, "next:  lamp train run.yaml"),
    (["train", "--train.ddp", "true"], 2, "a run has one process for each GPU by itself"),
    (["train", "--nproc_per_node", "2"], 2, "--train.ranks 2"),
    (["train", "--model.init_from", "gpt2"], 66, "a name on the Hugging Face hub is written with its owner"),
    (["train", "--train.lrr", "3"], 2, "--train.lr"),
    (["train", "--max-seq-length", "512"], 2, "--data.seq_len"),
    (["train", "--resume_from_checkpoint", "x"], 2, "--resume"),
    (["train", "--tset"], 2, "did you mean --test?"),
    (["train", "--seed", "3"], 2, "did you mean --train.seed?"),
    (["train", "--checkpoint", "x"], 2, "did you mean --resume?"),
    (["train", "--lore.r", "8"], 2, "did you mean --lora.r?"),
    (["runs", "--train.steps", "3"], 2, "it belongs to lamp demo, train, sweep, launch slurm, plan, "),
    (["runs", "--train.steps", "3"], 2, "; lamp runs takes --json, --watch, --runs-dir\nnext:  lamp runs --help"),
    (["generate", "base", "--train.lr", "3"], 2, "--train.lr is not a flag of lamp generate"),
    (["plan", "--force"], 2, "it belongs to lamp train, export, tokenizer train; lamp plan takes --preset, "),
    (["doctor", "--force"], 2, "it belongs to lamp train, export, tokenizer train; lamp doctor takes --preset, "),
    (["tokenizer", "show", "x", "--max-tokens", "3"], 2, "it belongs to lamp generate; lamp tokenizer show takes"),
    (["why", "r", "--json"], 2, "; lamp why takes --runs-dir\nnext:  lamp why --help"),
    (["runs", "--verbose"], 2, "it belongs to lamp train; lamp runs takes"),
    (["plan", "--run", "x"], 2, "it belongs to lamp demo, train, sweep, launch slurm, watch; lamp plan takes"),
    (["plan", "--xyzzy"], 2, "next:  lamp plan --help"),
    (["data", "clean", "--val", "x"], 2, "it belongs to lamp data stats; lamp data clean takes --out"),
    (["plan", "--preset", "slm", "--on", "b200"], 2, "did you mean h200?\nnext:  lamp plan --on h200"),
    (["generate", "x", "--raw", "--data.template", "chatml"], 2, "--raw and --data.template"),
    (["train", "--train.lr", "abc"], 78, "train.lr"),
    (["train", "--train.lr", "50"], 78, "usual"),
    (["train", "--preset", "smal"], 2, "slm"),
    (["train", "nothing.yaml"], 66, "nothing.yaml"),
    (["train", *QUICK, "--runs-dir", "file.txt/runs"], 73, "file.txt"),
    (["generate", "nothing"], 66, "nothing"),
    (["watch", "nothing"], 66, "no run"),
    (["why", "nothing"], 66, "no run"),
    (["checkpoints"], 2, "lamp checkpoints --help"),
]
SEEN_BY_THE_CHILD = [
    (["train", *QUICK, "--data.paths", "nothing/*.txt"], 66, "nothing"),
    (["train", *QUICK, "--data.paths", "empty.txt"], 65, "empty.txt"),
    (["train", *QUICK, "--data.paths", "binary.txt"], 65, "binary.txt"),
    (["train", *QUICK, "--data.paths", "bad.jsonl"], 65, "bad.jsonl:2"),
    (["train", *QUICK, "--data.source", "nowhere:x"], 78, "nowhere"),
    (["train", *QUICK, "--model.family", "nowhere:x"], 78, "nowhere"),
    (["train", *QUICK, "--tokenizer.path", "nowhere"], 66, "nowhere"),
    (["train", *QUICK, "--model.init_from", "nowhere"], 66, "nowhere"),
    (["train", *QUICK, "--train.device", "cuda"], 78, "cuda"),
]


def brief(value: object) -> str:
    return " ".join(w for w in value if w not in QUICK)[:50] if isinstance(value, list) else ""


def three_lines(done: subprocess.CompletedProcess[str], code: int, part: str) -> None:
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert part in said
    assert "error:" in said
    assert "next:" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("words", "code", "part"), AT_ONCE, ids=brief)
def test_a_mistake_is_three_lines_and_a_code(
    tmp_path: Path, command: Command, words: list[str], code: int, part: str
) -> None:
    (tmp_path / "file.txt").write_text("x")
    three_lines(command(*words, cwd=tmp_path), code, part)


def test_a_launcher_over_several_machines_needs_a_place_to_meet(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    three_lines(command("train", *QUICK, cwd=tmp_path), 2, "launch.rendezvous is not set")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    three_lines(command("train", *QUICK, "--train.ranks", "3", cwd=tmp_path), 2, "leave train.ranks out")
    assert not (tmp_path / "runs").exists()


EVERY_VERB = [
    ["why", "nothing"], ["stop", "nothing"], ["save", "nothing"], ["runs"], ["checkpoints", "nothing"], ["watch", "nothing"],
    ["generate", "nothing"], ["plan", "--preset", "slm", "--on", "t4"], ["data", "clean"], ["data", "stats", "--preset", "x"],
    ["data", "prepare", "--preset", "x"], ["tokenizer", "train", "--preset", "x"], ["tokenizer", "show", "nothing"],
    ["doctor", "--only", "xyzzy"], ["train", "--preset", "x"], ["why", "999999999"],
    ["track", "nothing", "--to", "csv"], ["compare", "a", "b"], ["report", "nothing"], ["dash", "--host", "203.0.113.9"],
]  # fmt: skip


@pytest.mark.parametrize("words", EVERY_VERB, ids=lambda words: " ".join(words))
def test_runs_dir_is_a_flag_of_every_verb(tmp_path: Path, here: Command, words: list[str]) -> None:
    done = here(*words, "--runs-dir", str(tmp_path / "elsewhere"), cwd=tmp_path)
    assert "is not a flag" not in done.stdout + done.stderr


@pytest.mark.parametrize(("words", "code", "part"), SEEN_BY_THE_CHILD, ids=brief)
def test_a_mistake_that_the_child_sees_is_three_lines_and_a_code(
    tmp_path: Path, here: Command, words: list[str], code: int, part: str
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": oops}\n')
    three_lines(here(*words, cwd=tmp_path), code, part)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", [["runs"], ["--help"]])
def test_a_result_that_cannot_be_written_is_one_line_and_73(tmp_path: Path, words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*LAMP, *words], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 73
    said = [line for line in done.stderr.splitlines() if not line.endswith("reading the request")]
    assert said == ["error: the result cannot be written to stdout: No space left on device"]


def test_print_config_starts_nothing(tmp_path: Path, command: Command) -> None:
    (tmp_path / "my.yaml").write_text("train:\n  lr: 3e-4\n")
    done = command("train", "my.yaml", "--preset", "slm", "--train.seed", "9", "--print-config", cwd=tmp_path)
    assert done.returncode == 0
    assert re.search(r"lr: 0.0003 +# my.yaml:2", done.stdout)
    assert re.search(r"seed: 9 +# command line", done.stdout)
    assert re.search(r"layers: 12 +# preset slm", done.stdout)
    assert os.listdir(tmp_path) == ["my.yaml"]


def test_the_name_of_a_run_and_its_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("train: {steps: 3}\n")
    done = lamp("train", "mine.yaml", *TINY, "--test", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    run = RunDir(tmp_path / "runs" / "mine-test")
    assert read_json(run.status)["state"] == "finished"
    assert {"config.yaml", "status.json", "events.jsonl", "events.rank0.jsonl", "metrics.jsonl", "output.log", "console.log",
            "stacks", "slots", "ask", "checkpoints", "report.md"} <= set(os.listdir(run.path))  # fmt: skip
    assert all("type" in event and "t" in event for event in read_lines(run.events))
    record = next(read_lines(run.metrics))
    assert {"train/loss", "train/lr", "train/grad_norm", "train/iter", "train/dt_ms", "train/tok_per_sec", "train/mfu",
            "train/tokens", "train/epoch", "train/pad_frac", "train/data_wait_ms"} <= set(record)  # fmt: skip
    assert "unexplained" in run.report.read_text()


def test_a_finished_run_says_so_goes_on_when_raised_and_begins_anew_when_told(
    tmp_path: Path, finished: Finished, here: Command
) -> None:
    finished(*QUICK)
    same = here(*TRAIN, "--train.steps", "8", cwd=tmp_path)
    assert same.returncode == 0
    assert "is finished" in same.stdout
    done = here(*TRAIN, "--train.steps", "12", cwd=tmp_path)
    assert done.returncode == 0
    assert "train.steps: 8 -> 12" in done.stdout
    assert "resumed from checkpoint-8" in done.stdout
    run = RunDir(tmp_path / "runs" / "r")
    assert sorted(losses_of(run)) == list(range(1, 13))
    anew = here(*TRAIN, "--train.steps", "8", "--resume", "never", cwd=tmp_path)
    assert anew.returncode == 0
    assert "r.1" in anew.stdout
    assert (tmp_path / "runs" / "r.1" / "checkpoints" / "checkpoint-12").is_dir()
    assert sorted(losses_of(run)) == list(range(1, 9))


def test_drift_is_refused_and_named(tmp_path: Path, zoo_row: Row, command: Command, finished: Finished) -> None:
    finished(*QUICK)
    done = command(*TRAIN, "--train.steps", "20", "--train.lr", "0.5", cwd=tmp_path)
    assert done.returncode == 78
    assert "train.lr: 0.0003 -> 0.5" in done.stderr
    zoo_row("config_drift", "start", "stop", 78)


def test_going_back_to_an_older_checkpoint_keeps_the_newer_ones(
    tmp_path: Path, finished: Finished, here: Command
) -> None:
    """Also where the run is finished: what is asked for by name is done."""
    run = finished(*QUICK, "--save.every_steps", "2")
    before = losses_of(run)
    words = [*TRAIN, "--train.steps", "8", "--save.every_steps", "2", "--resume"]
    done = here(*words, "checkpoint-6", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "resumed from checkpoint-6" in done.stdout and "set aside" in done.stdout
    assert [p for p in run.checkpoints.iterdir() if p.name.startswith("aside-checkpoint-8")]
    assert losses_of(run) == before
    done = here(*words, "checkpoint-5", cwd=tmp_path)
    assert done.returncode == 74
    assert "there is no checkpoint" in done.stdout


def test_two_of_the_same_name_at_once_and_a_closed_terminal(tmp_path: Path, command: Command) -> None:
    run = RunDir(tmp_path / "runs" / "r")
    first = start_lamp(*TRAIN, "--train.steps", "100000", cwd=tmp_path)
    wait_for(lambda: slot_of(run).step > 2, process=first)
    second = command(*TRAIN, "--train.steps", "8", cwd=tmp_path)
    assert second.returncode == 69
    assert str(first.pid) in second.stderr
    first.send_signal(signal.SIGHUP)
    assert first.wait(20) == 75


def test_checkpoints_says_which_are_valid_and_why_not(tmp_path: Path, finished: Finished, here: Command) -> None:
    run = finished(*QUICK, "--save.every_steps", "2", "--eval.every_steps", "4")
    model = run.checkpoints / "checkpoint-8" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-10])
    done = here("checkpoints", "r", cwd=tmp_path)
    assert done.returncode == 0
    assert re.search(r"checkpoint-6 .* valid", done.stdout)
    assert re.search(r"checkpoint-8 .* invalid: model.safetensors has", done.stdout)
    rows = json.loads(here("checkpoints", "r", "--json", cwd=tmp_path).stdout)
    assert [row["step"] for row in rows if row["valid"]][-1] == 6
    assert next(row for row in rows if row["step"] == 8)["val_loss"] is not None


def test_verbose_says_every_step(finished: Finished) -> None:
    said = finished(*QUICK, "--verbose", "--train.warmup_steps", "6").console.read_text()
    assert all(re.search(rf"step {n}  .*grad_norm", said) for n in range(1, 9))


def test_epochs_are_counted_in_optimizer_steps(tmp_path: Path, here: Command) -> None:
    (tmp_path / "t.txt").write_text("The lamps are lit. " * 700)
    done = here(*TRAIN, "--data.paths", "t.txt", "--train.epochs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    run = RunDir(tmp_path / "runs" / "r")
    last = [r for r in read_lines(run.metrics) if "train/loss" in r][-1]
    assert 2.0 <= last["train/epoch"] < 2.1
    assert last["step"] == read_json(run.status)["steps"]
    assert "epoch 1 is done at step" in done.stdout
    assert [event["epochs"] for event in events_of(run, "epoch")] == [1, 2]


def test_a_toy_for_hours_is_refused(tmp_path: Path, here: Command) -> None:
    steps = ["--train.steps", "900000000"]
    done = here("train", "--preset", "demo", *steps, "--data.embedded_documents", "300", cwd=tmp_path)
    assert done.returncode == 78, done.stdout
    assert "--force" in done.stdout + done.stderr
    done = here(*TRAIN, *steps, *["--save.every_steps", "0", "--save.every_s", "0"], cwd=tmp_path)
    assert done.returncode == 78
    assert "no save is due" in done.stdout + done.stderr


def test_warm_up_is_explained_and_too_much_is_warned_about(finished: Finished) -> None:
    said = finished(*QUICK, "--verbose", "--train.warmup_steps", "6").console.read_text()
    assert "is warm-up" in said
    assert "optimizer steps" in said
    assert "WARNING  warm-up takes 75% of the run" in said


def test_an_end_has_the_statistics_of_the_run_and_no_phase_is_said_twice(finished: Finished) -> None:
    run = finished(*QUICK, "--verbose", "--train.warmup_steps", "6")
    said = [line[10:] for line in run.console.read_text().splitlines()]
    phases = [line[6:20].strip() for line in said if line.startswith("done  ")]
    assert len(phases) == len(set(phases)) > 5, phases
    ledger = [line for line in said if line.startswith("   ")]
    assert len(ledger) <= 10 and ledger[-1].split()[0] == "all"
    (total,) = [line for line in said if line.startswith("steps 8 of 8; ")]
    wanted = (
        "tokens 1,024;",
        "documents ",
        "tokens/s ",
        "average loss ",
        "last loss ",
        "validation ",
        "best ",
        "spent ",
    )
    assert all(name in total for name in wanted), total
    status, report = read_json(run.status), run.report.read_text()
    losses = [record["train/loss"] for record in read_lines(run.metrics) if "train/loss" in record]
    assert status["mean_loss"] == pytest.approx(sum(losses) / 8) and status["tokens"] == 1024
    assert "- average loss: " in report and "- tokens: 1,024" in report
    assert len(report.split("## Where the time went")[1].splitlines()) > len(ledger), "report.md has every name"


def test_a_test_run_ends_with_the_whole_one_as_it_can_be_pasted(tmp_path: Path, here: Command) -> None:
    words = ["--run", "my run", *TINY, "--train.steps", "3000", "--budget.usd_per_hour", "2"]
    done = here("train", "--test", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    how_long, last = done.stdout.splitlines()[-2:]
    assert last.endswith("the whole run: " + shlex.join(["lamp", "train", *words])), "nothing behind what is pasted"
    assert re.search(r"takes about [\d.]+ (s|min|h), \$\d+\.\d+ on cpu by the plan", how_long), how_long
    assert "next: lamp generate 'my run-test'" in done.stdout


def test_a_budget_stops_and_saves_before_it_is_spent_across_attempts(tmp_path: Path) -> None:
    words = [*TRAIN, "--train.steps", "1000000", "--budget.usd_per_hour", "3.6", "--budget.usd"]
    done = lamp(*words, "0.008", "--force", cwd=tmp_path)  # a million steps for a cent: the plan would refuse it
    assert done.returncode == 75, done.stdout
    run = RunDir(tmp_path / "runs" / "r")
    first = read_json(run.status)
    assert 0 < first["durable_step"] == first["step"]
    assert first["usd"] <= 0.008 * 1.1
    assert first["short_usd"] is None or first["short_usd"] > 0
    assert "stopped early (the budget is spent)" in done.stdout and "next: lamp train" in done.stdout
    assert float(done.stdout.splitlines()[-1].rpartition("--budget.usd ")[2]) > 0.008, "what to give to go on"
    again = lamp(*words, "0.008", cwd=tmp_path)
    assert again.returncode == 77, "refused by the parent, at once"
    assert "the budget of r is spent" in again.stderr and f"step {first['durable_step']} is safe" in again.stderr
    assert read_json(run.status)["spent_s"] == first["spent_s"]
    more = lamp(*words, "0.016", "--force", cwd=tmp_path)
    assert more.returncode == 75, more.stdout + more.stderr
    second = read_json(run.status)
    assert second["spent_s"] > first["spent_s"] and second["step"] > first["step"]
    assert "cost/usd" in [r for r in read_lines(run.metrics) if "train/loss" in r][-1]


def test_a_second_ctrl_c_leaves_now_without_a_torn_file(tmp_path: Path, zoo_row: Row) -> None:
    family = write_model(tmp_path, "ctypes.PyDLL(None).sleep(60 if model.calls == 20 else 0)")
    run = RunDir(tmp_path / "runs" / "r")
    # beside the steps the write of step 15 may still be under way when the GIL is taken
    words = f"--model.family {family} --train.steps 50 --save.every_steps 5 --save.staged false".split()
    going = start_lamp(*TRAIN, *words, cwd=tmp_path)
    wait_for(lambda: slot_of(run).step == 19, process=going)
    going.send_signal(signal.SIGINT)
    wait_for(lambda: "stopping (Ctrl+C)" in (tmp_path / "out.txt").read_text(), 5, going)
    going.send_signal(signal.SIGINT)
    assert going.wait(5) == 130
    assert "step 15 is safe" in (tmp_path / "out.txt").read_text()
    rows = json.loads(lamp("checkpoints", "r", "--json", cwd=tmp_path).stdout)
    assert rows[-1]["step"] == 15
    assert all(row["valid"] for row in rows)
    zoo_row("double_ctrl_c", "at once", "stop", 130)


def test_stop_while_the_main_thread_is_in_a_long_call_saves_the_last_completed_step(tmp_path: Path) -> None:
    family = write_model(tmp_path, "time.sleep(60 if model.calls == 20 else 0)")
    run = RunDir(tmp_path / "runs" / "r")
    words = f"--model.family {family} --train.steps 50 --save.every_steps 5".split()
    going = start_lamp(*TRAIN, *words, cwd=tmp_path)
    wait_for(lambda: slot_of(run).step == 19, process=going)
    going.send_signal(signal.SIGTERM)
    assert going.wait(8) == 75
    assert read_json(run.status)["durable_step"] == 19
    assert (run.checkpoints / "checkpoint-19" / "manifest.json").exists()


@pytest.mark.parametrize("phase", ["import", "tokenizer", "cache", "evaluate", "save"])
def test_a_stop_in_any_phase_is_said_at_once_and_ends_with_75(tmp_path: Path, phase: str, zoo_row: Row) -> None:
    run = RunDir(tmp_path / "runs" / "r")
    (tmp_path / "slow.py").write_text(
        "import time\ndef documents():\n    for i in range(400):\n        time.sleep(0.02)\n        yield f'paper {i} is read slowly ' * 9\n"
    )
    words = [*TRAIN, *["--train.steps", "100000", "--save.every_steps", "1", "--eval.every_steps", "1"]]
    if phase in ("tokenizer", "cache"):
        words += ["--data.source", "slow:documents", "--tokenizer.vocab_size", "300"]
    if phase == "tokenizer":
        words += ["--tokenizer.kind", "bpe"]
    going = start_lamp(*words, cwd=tmp_path)
    wait_for(lambda: phase in slot_of(run).phase, process=going)
    going.send_signal(signal.SIGTERM)
    wait_for(lambda: "stopping (SIGTERM)" in (tmp_path / "out.txt").read_text(), 5, going)
    assert going.wait(10) == 75, (tmp_path / "out.txt").read_text()
    status = read_json(run.status)
    assert status["state"] == "stopped"
    assert status["durable_step"] == status["step"]
    zoo_row(f"sigterm {phase}"[:18], "at once", "stop", 75)


def test_nohup_goes_on_when_the_terminal_is_closed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "r")
    words = [*TRAIN, "--train.steps", "100000"]
    ignoring = start_lamp(*words, cwd=tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for(lambda: slot_of(run).step > 5, process=ignoring)
    seen = (tmp_path / "out.txt").read_text()
    assert "lamp train" in seen, "output to a file is visible at once"
    ignoring.send_signal(signal.SIGHUP)
    before = slot_of(run).step
    wait_for(lambda: slot_of(run).step > before + 5, process=ignoring)
    ignoring.send_signal(signal.SIGTERM)
    assert ignoring.wait(20) == 75


def test_a_dead_child_ends_with_71_and_the_command_to_resume(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "r")
    going = start_lamp(
        *TRAIN, *["--train.steps", "100000", "--save.every_steps", "10", "--watch.on_stuck", "stop"], cwd=tmp_path
    )
    wait_for(lambda: slot_of(run).durable_step >= 10, process=going)
    os.kill(slot_of(run).pid, signal.SIGKILL)
    assert going.wait(10) == 71
    said = (tmp_path / "out.txt").read_text()
    assert "SIGKILL (signal 9)" in said
    assert re.search(r"step \d+ is safe", said)
    assert "next: lamp train --run r" in said


def test_a_crash_in_the_users_code_keeps_the_traceback_and_the_last_step(tmp_path: Path) -> None:
    family = write_model(tmp_path, "if model.calls == 8: raise RuntimeError('the lamp broke')")
    done = lamp(*TRAIN, "--model.family", family, "--train.steps", "50", cwd=tmp_path)
    assert done.returncode == 1
    assert "RuntimeError: the lamp broke" in done.stdout
    assert f"own.py:{line_in(tmp_path / 'own.py', 'the lamp broke')}" in done.stdout
    run = RunDir(tmp_path / "runs" / "r")
    assert "Traceback" in run.output.read_text()
    assert read_json(run.status)["durable_step"] == 7


def test_a_diverging_run_stops_before_the_weights_are_touched(tmp_path: Path, here: Command) -> None:
    hook = "model.head.register_forward_hook(lambda *parts: parts[2] * float('nan'))"
    family = write_model(tmp_path, f"if model.calls == 8: {hook}")
    words = f"--model.family {family} --train.on_nonfinite stop --train.steps 50 --save.every_steps 5".split()
    done = here(*TRAIN, *words, cwd=tmp_path)
    assert done.returncode == 76, done.stdout
    run = RunDir(tmp_path / "runs" / "r")
    (verdict,) = [event for event in verdicts_of(run) if event["state"] == "diverged"]
    assert verdict["action"] == "stop"
    assert "step 8" in verdict["why"]
    assert [p.name for p in run.checkpoints.glob("checkpoint-*")] == ["checkpoint-5"]
    from safetensors.numpy import load_file

    kept = load_file(run.checkpoints / "checkpoint-5" / "model.safetensors")
    assert all((tensor == tensor).all() for tensor in kept.values())


def test_an_unwritable_runs_folder(tmp_path: Path, command: Command) -> None:
    if os.getuid() == 0:
        folder = Path("/proc/lamplighter-cannot-be-here")
    else:
        folder = tmp_path / "closed"
        folder.mkdir()
        folder.chmod(stat.S_IRUSR)
    done = command("train", "--run", "r", *QUICK, "--runs-dir", str(folder), cwd=tmp_path)
    assert done.returncode == 73
    assert "cannot write" in done.stdout + done.stderr


def test_the_table_of_runs_is_renewed_until_ctrl_c(tmp_path: Path) -> None:
    write_killed_run(tmp_path / "runs" / "first", steps=20, kills=1)
    process = start_lamp("runs", "--watch", cwd=tmp_path)
    out = tmp_path / "out.txt"
    wait_for(lambda: "0 of 1 runs are going on; Ctrl+C leaves" in out.read_text(), process=process)
    write_killed_run(tmp_path / "runs" / "second", steps=20, kills=1)
    wait_for(lambda: "0 of 2 runs" in out.read_text(), process=process)
    assert re.search(r"^second +finished", out.read_text(), re.MULTILINE)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0


def test_the_address_of_the_page_is_there_before_its_server_is_loaded(tmp_path: Path) -> None:
    """A library that takes for ever stands in for a machine that has no time; a browser is in the queue meanwhile."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "uvicorn.py").write_text("import time\ntime.sleep(3600)\n")
    words = ["dash", "--port", "0"]
    log = tmp_path / "out.txt"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [*LAMP, *words], cwd=tmp_path, stdout=out, stderr=out, env=clean_env(PYTHONPATH="slow")
        )
    found = wait_for(lambda: re.search(r"open http://127\.0\.0\.1:(\d+)/", log.read_text()), process=process)
    with socket.create_connection(("127.0.0.1", int(found[1])), timeout=5):
        pass
    wait_for(lambda: "loading the server, for" in log.read_text(), process=process)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert "before the page was loaded; runs are not touched" in log.read_text()


def test_every_verb_of_the_help_exists() -> None:
    named = set(re.findall(r"^  (\w+)", commands.HELP, re.MULTILINE)) | {"save"}
    assert named == set(commands.VERBS) == set(commands.VERB_HELP)
