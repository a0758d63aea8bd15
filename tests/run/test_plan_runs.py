"""The plan with real text, real steps, real runs and real memory: counted or estimated, measured, refused with 77."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import pytest
from test_plan_memory import CASES, CPU, compare_layer

from lamplighter.config import resolve
from lamplighter.data.corpus import entries
from lamplighter.model.shape import Shape
from lamplighter.plan import devices, dry_run
from lamplighter.plan.job import Job
from lamplighter.plan.memory import memory
from lamplighter.procs import cgroup, child
from lamplighter.rundir import RunDir, read_json, read_lines
from lamplighter.train.bf16 import make_it_work
from running import (
    LAMP,
    LONG,
    NO_BF16,
    TINY,
    Command,
    clean_env,
    lamp,
    run_with_bf16,
    slot_of,
    start_lamp,
    wait_for,
)


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


def test_instruction_rows_show_their_padding(tmp_path: Path, here: Command) -> None:
    """Situation 12, on paper: 97 % padding is seen before anything is started."""
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(300)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [
        "plan",
        "--data.paths",
        "rows.jsonl",
        "--tokenizer.kind",
        "bytes",
        "--train.epochs",
        "2",
        "--data.seq_len",
        "1024",
        "--on",
        "l4",
    ]
    alone = here(*words, "--data.packing", "windows", cwd=tmp_path).stdout
    assert "WARNING  9" in alone and "are padding" in alone and "--data.packing packed" in alone
    packed = json.loads(here(*words, "--json", cwd=tmp_path).stdout)
    assert packed["padding"] < 0.1 and packed["steps"] < 10


def test_a_run_keeps_its_plan_and_says_it_in_a_few_lines(tmp_path: Path, here: Command) -> None:
    done = here("train", *TINY, "--train.steps", "3", cwd=tmp_path)
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


def test_a_run_that_cannot_be_is_refused_before_it_is_built(tmp_path: Path, here: Command) -> None:
    """Situations 10 and 11: more memory than there is; more hours than the budget even at the best MFU."""
    huge = ["--model.layers", "300", "--model.width", "8192", "--model.heads", "64"]
    done = here("train", "--run", "huge", *TINY, *huge, "--train.steps", "3", cwd=tmp_path)
    assert done.returncode == 77 and "memory: at least" in done.stdout and "insist with --force" in done.stdout
    assert "NO GO" in (tmp_path / "runs" / "huge" / "plan.txt").read_text()
    words = ["train", "--run", "slow", *TINY, "--train.steps", "1000000000", "--budget.hours", "0.2"]
    done = here(*words, cwd=tmp_path)
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


# ---------------------------------------------------------------- the command alone


def test_room_is_the_least_of_what_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    monkeypatch.setattr(cgroup, "folders", lambda _: [tmp_path])
    assert devices.host_room() == devices.Room(100, f"the memory limit of {tmp_path}")
    assert devices.host_total().bytes == 1000
    code = "from lamplighter.plan.devices import host_room; r = host_room(); print(r.bytes, r.by)"
    limited = ["bash", "-c", f"ulimit -v 4000000 && exec {sys.executable} -c '{code}'"]
    said = subprocess.run(limited, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["4096000000", "ulimit"]


def test_the_command_refuses_with_77_and_writes_nothing(tmp_path: Path, command: Command) -> None:
    done = command("plan", "--preset", "slm", "--on", "a100-80gb", "--what-if", cwd=tmp_path)
    assert done.returncode == 0 and "GO" in done.stdout and "plan on a100-80gb" in done.stdout, done.stderr
    for name in ("t4", "l4", "a10", "l40s", "a100-40gb", "h100-80gb", "rtx3090", "rtx4090", "regular", "llama"):
        assert name in done.stdout
    dear = ["plan", "--preset", "slm", "--on", "t4", "--budget.usd", "2", "--budget.usd_per_hour", "0.5"]
    done = command(*dear, cwd=tmp_path)
    assert done.returncode == 77 and "NO GO" in done.stdout and "--train.steps" in done.stdout
    done = command(*dear, "--json", cwd=tmp_path)
    assert done.returncode == 77 and json.loads(done.stdout)["reasons"]
    for words, code in (
        (["--on", "a100"], 2),
        (["--on", "a10:0"], 2),
        (["--on", "l4", "--measure"], 2),
        (["--on", "l4", "--mfu", "2"], 2),
    ):
        assert command("plan", "--preset", "slm", *words, cwd=tmp_path).returncode == code
    assert command("plan", "--train.epochs", "3", "--on", "l4", cwd=tmp_path).returncode == 78
    assert not (tmp_path / "runs").exists(), "nothing is written"


def test_a_card_of_this_machine_is_planned_for(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-1a, 81920, NVIDIA A10G'; echo '1, GPU-2b, 23034, NVIDIA L4'\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2b")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["plan", "--preset", "slm", "--json"]
    done = command(*words, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["device"] == "l4" and found["memory_there_gib"] == pytest.approx(23034 / 1024)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    done = command(*words, cwd=tmp_path)  # the first card is of a kind that is not in the table
    assert done.returncode == 78 and "NVIDIA A10G" in done.stderr and "lamp plan --measure" in done.stderr
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    done = command(*words, cwd=tmp_path)
    assert json.loads(done.stdout)["device"] == "cpu"


# ---------------------------------------------------------------- memory on paper, and of a real process


@LONG  # in float32: tests/unit/test_plan_memory.py
def test_a_layer_keeps_what_is_written_down_in_bf16() -> None:
    run_with_bf16(__file__)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])  # with AdamW, and with Muon
def test_the_peak_on_paper_is_near_the_peak_of_a_real_process(family: Literal["gpt2", "qwen3"]) -> None:
    words = {"model.family": family, "model.layers": "4", "model.width": "256", "model.heads": "4", "tokenizer.vocab_size": "8000",
             "train.batch_size": "8", "train.dtype": "fp32", "train.threads": "1"}  # fmt: skip
    run = resolve(None, None, {name: [value] for name, value in words.items()}).run
    request = {"run": asdict(run), "vocab_size": 8000, "micro_batch": 8, "warm_up": 1, "rounds": 1, "seconds": 60}
    real = child.run(dry_run.STEPS, request).records[-1]
    shape = Shape(family, 8000, 256, 4, 256, 4, tie_embeddings=run.model.tie_embeddings)
    job = Job(shape, 256, 8, 8, 10, optimizer=run.train.optimizer_kind)
    assert job.optimizer.name == {"gpt2": "adamw", "qwen3": "muon"}[family]
    assert real["fits"] and real["parameters"] == job.params and real["step_s"] > 0
    assert memory(job, CPU).training == pytest.approx(real["peak_bytes"], rel=0.25)


if __name__ == "__main__":
    if not make_it_work():
        sys.exit(NO_BF16)
    for kind in ("gpt2", "llama"):
        for case in CASES:
            compare_layer(kind, "bf16", *case)
        for length in (256, 520):  # attention in blocks that keep their probabilities; torch's
            compare_layer(kind, "bf16", 0.0, False, length, heads=1)
