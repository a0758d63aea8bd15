"""The plan with real text, real steps and real runs: counted or estimated, measured, refused with 77."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from pathlib import Path

from lamplighter.data.corpus import entries
from lamplighter.rundir import RunDir, read_json, read_lines
from running import LAMP, LONG, TINY, Command, clean_env, lamp, slot_of, start_lamp, wait_for

BYTES = ["--tokenizer.kind", "bytes"]


def text_files(folder: Path) -> Path:
    folder.mkdir()
    texts = [entry.text for entry in entries(3, 600)]
    for part in range(3):
        (folder / f"{part}.txt").write_text("\n\n".join(texts[part::3]))
    return folder


def test_tokens_are_estimated_and_then_counted(tmp_path: Path, command: Command) -> None:
    text_files(tmp_path / "text")
    words = ["--data.paths", "text", "--train.epochs", "3", "--tokenizer.vocab_size", "600", "--on", "l4", "--json"]
    guessed = json.loads(command("plan", *words, cwd=tmp_path).stdout)
    assert "estimated" in guessed["data_tokens_how"] and "trained on the sample" in guessed["data_tokens_how"]
    assert not (tmp_path / "runs").exists(), "nothing is written"
    made = command("data", "prepare", *words[:2], "--tokenizer.vocab_size", "600", "--json", cwd=tmp_path)
    true = json.loads(made.stdout)["splits"]["train"]["tokens"]
    counted = json.loads(command("plan", *words, cwd=tmp_path).stdout)
    assert "counted: token cache" in counted["data_tokens_how"] and counted["data_tokens"] == true
    assert abs(guessed["data_tokens"] / true - 1) < 0.15, (guessed["data_tokens"], true)
    assert counted["steps"] == -(-3 * -(-(true - 1) // 256) // 16) and 2.9 < counted["epochs"] < 3.2


def test_instruction_rows_show_their_padding(tmp_path: Path) -> None:
    """Situation 12, on paper: 97 % padding is seen before anything is started."""
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(300)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [
        "plan",
        "--data.paths",
        "rows.jsonl",
        *BYTES,
        "--train.epochs",
        "2",
        "--data.seq_len",
        "1024",
        "--on",
        "l4",
    ]
    alone = lamp(*words, "--data.packing", "windows", cwd=tmp_path).stdout
    assert "WARNING  9" in alone and "are padding" in alone and "--data.packing packed" in alone
    packed = json.loads(lamp(*words, "--json", cwd=tmp_path).stdout)
    assert packed["padding"] < 0.1 and packed["steps"] < 10


def test_a_run_keeps_its_plan_and_says_it_in_a_few_lines(tmp_path: Path) -> None:
    done = lamp("train", *TINY, "--train.steps", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    run = RunDir(tmp_path / "runs" / "train")
    page, record = (run.path / "plan.txt").read_text(), read_json(run.path / "plan.json")
    assert "GO" in page and "learning rate" in page and record["go"] and record["params"] == 34_720
    assert record["data_tokens_how"] == "counted" and record["steps"] == 3
    notes = [str(event.get("text")) for event in read_lines(run.rank_events(0)) if event["type"] == "note"]
    assert any(note.startswith("memory: at most") for note in notes)
    assert any("a crash can cost" in note for note in notes)
    phases = [event["name"] for event in read_lines(run.rank_events(0)) if event["type"] == "phase"]
    assert phases.index("plan") < phases.index("model"), "before anything is built"


def test_a_run_that_cannot_be_is_refused_before_it_is_built(tmp_path: Path) -> None:
    """Situations 10 and 11: more memory than there is; more hours than the budget even at the best MFU."""
    huge = ["--model.layers", "300", "--model.width", "8192", "--model.heads", "64"]
    done = lamp("train", "--run", "huge", *TINY, *huge, "--train.steps", "3", cwd=tmp_path)
    assert done.returncode == 77 and "memory: at least" in done.stdout and "insist with --force" in done.stdout
    assert "NO GO" in (tmp_path / "runs" / "huge" / "plan.txt").read_text()
    words = ["train", "--run", "slow", *TINY, "--train.steps", "1000000000", "--budget.hours", "0.2"]
    done = lamp(*words, cwd=tmp_path)
    assert done.returncode == 77 and "times the peak" in done.stdout and "--train.steps" in done.stdout
    assert not list((tmp_path / "runs" / "slow" / "checkpoints").glob("*"))


def test_force_goes_on_and_what_has_begun_is_not_refused(tmp_path: Path) -> None:
    """Situation 25: the budget of a run that has begun stops and saves it."""
    words = ["train", "--run", "slow", *TINY, "--train.steps", "1000000000", "--budget.hours", "0.2"]
    run = RunDir(tmp_path / "runs" / "slow")
    for more, said in ((["--force"], "going on: --force"), ([], "resumed from")):
        process = start_lamp(*words, *more, cwd=tmp_path)
        wait_for(lambda said=said: said in (tmp_path / "out.txt").read_text(), 120, process)  # type: ignore[misc]
        before = slot_of(run).step
        wait_for(lambda before=before: slot_of(run).step > before, 120, process)  # type: ignore[misc]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 75, (tmp_path / "out.txt").read_text()


@LONG
def test_real_steps_are_tried_in_a_process_that_may_die(tmp_path: Path) -> None:
    """With 2.5 GB to map, four rows do not fit: told as that, and the largest that does is found."""
    words = ["plan", "--tokenizer.vocab_size", "50000", "--model.layers", "1",
             "--model.width", "32", "--model.heads", "2", "--data.seq_len", "1024", "--train.batch_size", "4",
             "--train.dtype", "fp32", "--train.threads", "1", "--train.loss", "whole", "--measure", "--fit", "--json"]  # fmt: skip
    command = f"ulimit -v 2500000 && exec {shlex.join([*LAMP, *words])}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, env=clean_env(), check=False, timeout=300
    )
    assert done.returncode == 77, done.stderr
    found = json.loads(done.stdout)
    assert not found["measured"]["fits"] and "tried with a micro-batch of 4" in found["reasons"][0]
    assert 1 <= found["largest_micro_batch"] <= 3
    assert f"micro-batch {found['largest_micro_batch']}: " in done.stderr


def test_measured_time_is_used_and_said(tmp_path: Path) -> None:
    done = lamp("plan", *TINY, "--train.steps", "1000", "--measure", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "measured over" in done.stdout and "GiB at the peak" in done.stdout
