"""Never loses work: killed at any instant, the resumed run is bit-identical to the unbroken one."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from lamplighter.rundir import RunDir, read_json, read_lines, write_manifest
from running import FULL, LONG, SHARED, TINY, Command, lamp, losses_of, processes_of, slot_of, start_lamp, wait_for

STEPS, EVERY = 500, 25
KILLS = 20 if FULL else 4


def words_for(run: str, *more: str) -> list[str]:
    text = SHARED / "tinyshakespeare" / "input.txt"
    data = ["--data.paths", str(text), "--data.separator", "\n\n"] if text.exists() else []
    return ["train", "--run", run, *TINY, "--model.dropout", "0.1", "--train.steps", str(STEPS),
            "--save.every_steps", str(EVERY), "--save.every_s", "0", "--watch.on_stuck", "stop", *data, *more]  # fmt: skip


def weights_hash(run: RunDir, step: int) -> str:
    folder = run.checkpoints / f"checkpoint-{step}"
    digest = hashlib.sha256()
    for name in ("model.safetensors", "training/optimizer.safetensors"):
        for key, tensor in sorted(load_file(folder / name).items()):
            digest.update(key.encode() + tensor.tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    cwd = tmp_path_factory.mktemp("unbroken")
    done = lamp(*words_for("whole"), cwd=cwd, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return RunDir(cwd / "runs" / "whole")


def compare(run: RunDir, whole: RunDir) -> None:
    mine, theirs = losses_of(run), losses_of(whole)
    assert sorted(mine) == list(range(1, STEPS + 1))
    assert mine == theirs
    assert weights_hash(run, STEPS) == weights_hash(whole, STEPS)


def durable_step(run: RunDir) -> int:
    """On the disk, as the next start will find it."""
    return int((read_json(run.checkpoints / "latest.json") or {"step": 0})["step"])


def kill_once(cwd: Path, run: RunDir, rng: random.Random, who: str) -> None:
    """Start, wait for a random later step (or a save), kill, and look for leftovers."""
    before = durable_step(run)
    process = start_lamp(*words_for("broken"), cwd=cwd)
    run.slot(0).unlink(missing_ok=True)
    wait_for(lambda: slot_of(run).step > 0, process=process)
    child = slot_of(run).pid
    target = slot_of(run).step + rng.randint(1, EVERY + EVERY // 2)
    if who == "save":
        wait_for(lambda: slot_of(run).saving or slot_of(run).step >= STEPS, process=process)
    else:
        wait_for(lambda: slot_of(run).step >= min(target, STEPS), process=process)
    at = slot_of(run)
    for pid in {"parent": [process.pid], "child": [child], "both": [process.pid, child], "save": [child]}[who]:
        with_pid_gone = False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            with_pid_gone = True
        assert not with_pid_gone or at.step >= STEPS
    process.wait(20)
    wait_for(lambda: not processes_of(run.path), 5)
    durable = durable_step(run)
    assert durable >= before
    assert at.step - durable <= 2 * EVERY + 1, f"killed at {at.step}, durable {durable}"  # one save may be under way


@pytest.mark.slow
def test_many_kills_change_nothing(unbroken: RunDir, tmp_path: Path) -> None:
    rng = random.Random(20)
    run = RunDir(tmp_path / "runs" / "broken")
    kinds = ["parent", "child", "both", "save"] * (KILLS // 4)
    for who in kinds:
        if durable_step(run) >= STEPS - EVERY:
            for path in run.checkpoints.glob("checkpoint-*"):  # the run is nearly over: kill it in its early part again
                if int(path.name.split("-")[1]) > STEPS // 2:
                    path.rename(path.with_name("aside-" + path.name))
            write_latest(run)
        kill_once(tmp_path, run, rng, who)
    done = lamp(*words_for("broken"), cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    compare(run, unbroken)
    attempts = {record["attempt"] for record in read_lines(run.metrics)}
    assert len(attempts) >= KILLS // 2
    assert not processes_of(run.path)
    said = [event for event in read_lines(run.rank_events(0)) if event.get("type") == "exact"]
    assert {event["first_other"] for event in said} == {0}
    assert all(event["text"].startswith("exact: proved here (probe") for event in said)


def write_latest(run: RunDir) -> None:
    newest = max((int(p.name.split("-")[1]) for p in run.checkpoints.glob("checkpoint-*")), default=0)
    (run.checkpoints / "latest.json").write_text(json.dumps({"step": newest, "path": f"checkpoint-{newest}"}))


def stop_at(cwd: Path, name: str, step: int) -> RunDir:
    """A run that was stopped, saved, at or after `step`."""
    run = RunDir(cwd / "runs" / name)
    process = start_lamp(*words_for(name), cwd=cwd)
    wait_for(lambda: slot_of(run).step >= step, process=process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 75
    return run


def test_a_stop_saves_the_last_completed_step_and_the_rest_is_the_same(
    unbroken: RunDir, tmp_path: Path, here: Command
) -> None:
    run = stop_at(tmp_path, "stopped", 60)
    status = read_json(run.status)
    assert status["state"] == "stopped"
    assert status["durable_step"] == status["step"] == max(losses_of(run))
    assert here(*words_for("stopped"), cwd=tmp_path).returncode == 0
    compare(run, unbroken)
    steps = [record["step"] for record in read_lines(run.metrics) if "train/loss" in record]
    assert len(steps) == len(set(steps)), "a clean stop redoes nothing"


@LONG
def test_a_lost_piece_of_state_is_caught(unbroken: RunDir, tmp_path: Path) -> None:
    """The control: with one moment of Adam zeroed, the comparison above must fail, and the run must notice it by itself."""
    run = stop_at(tmp_path, "control", 65)
    newest, last = sorted(run.checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[-2:]
    shutil.rmtree(last)  # so that there are steps to do again
    path = newest / "training" / "optimizer.safetensors"
    tensors = load_file(path)
    name = next(key for key in tensors if key.startswith("exp_avg_sq"))
    tensors[name] = tensors[name] * 0
    save_file(tensors, path)
    write_manifest(newest, step=int(newest.name.split("-")[1]))
    assert lamp(*words_for("control"), cwd=tmp_path, timeout=300).returncode == 0
    with pytest.raises(AssertionError):
        compare(run, unbroken)
    told = [event for event in read_lines(run.rank_events(0)) if event.get("cause") == "not_exact"]
    assert len(told) == 1 and "the same step has given other bits" in told[0]["why"], "said once"
    assert read_json(run.status)["exact"].startswith("close, not bit-identical: step")
    assert "close, not bit-identical" in run.report.read_text()


@LONG
def test_resume_at_step_a_million_needs_no_replay(tmp_path: Path) -> None:
    run = stop_at(tmp_path, "far", 30)
    newest = max(run.checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    state = read_json(newest / "training" / "state.json")
    state["step"], state["steps"] = 1_000_000, 1_000_010
    (newest / "training" / "state.json").write_text(json.dumps(state))
    write_manifest(newest, step=1_000_000)
    for other in run.checkpoints.glob("checkpoint-*"):
        if other != newest:
            other.rename(other.with_name("aside-" + other.name))
    newest.rename(newest.with_name("checkpoint-1000000"))
    near = resume_times(tmp_path, "near")
    started = time.monotonic()
    done = lamp(*words_for("far", "--train.steps", "1000010"), cwd=tmp_path)
    took = time.monotonic() - started
    assert done.returncode == 0, done.stdout
    assert max(losses_of(run)) == 1_000_010
    assert took < 3 * near + 5


def resume_times(cwd: Path, name: str) -> float:
    run = stop_at(cwd, name, 30)
    step = read_json(run.status)["step"]
    started = time.monotonic()
    assert lamp(*words_for(name, "--train.steps", str(step + 10)), cwd=cwd).returncode == 0
    return time.monotonic() - started


VARIANTS = {
    "bf16": ["--train.dtype", "bf16"],
    "qwen3 by Muon with micro-batches, epochs of a trained tokenizer": [
        "--model.family", "qwen3", "--model.kv_heads", "1", "--model.tie_embeddings", "false", "--train.optimizer", "muon",
        "--train.schedule", "wsd", "--train.micro_batch", "3", "--tokenizer.kind", "bpe", "--tokenizer.vocab_size", "400",
    ],
    "compiled": ["--train.compile", "true"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", [pytest.param(name, marks=LONG if name == "compiled" else ()) for name in VARIANTS])
def test_every_way_of_training_resumes_exactly(tmp_path: Path, variant: str) -> None:
    words = ["train", *TINY, *VARIANTS[variant]]
    words += ["--model.dropout", "0.1", "--save.every_steps", "10", "--watch.on_stuck", "stop"]
    words += ["--train.epochs", "0.2"] if "epochs" in variant else ["--train.steps", "60"]
    whole = lamp(*words, "--run", "whole", cwd=tmp_path, timeout=200)
    if variant == "bf16" and "cannot compute in bf16" in whole.stdout:
        pytest.skip("this CPU cannot compute in bf16")
    assert whole.returncode == 0, whole.stdout
    if variant == "compiled":
        assert "done  compile" in whole.stdout
    run = RunDir(tmp_path / "runs" / "broken")
    going = start_lamp(*words, "--run", "broken", cwd=tmp_path)
    wait_for(lambda: slot_of(run).step >= 25, 90, going)
    os.kill(slot_of(run).pid, signal.SIGKILL)
    going.wait(20)
    assert lamp(*words, "--run", "broken", cwd=tmp_path, timeout=200).returncode == 0
    mine, theirs = losses_of(run), losses_of(RunDir(tmp_path / "runs" / "whole"))
    assert mine == theirs
    assert len(mine) >= 50
    last = max(mine)
    assert weights_hash(run, last) == weights_hash(RunDir(tmp_path / "runs" / "whole"), last)
    assert max(record["attempt"] for record in read_lines(run.metrics)) == 2


def test_a_resumed_run_keeps_the_instructions_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a trial of bf16 had to switch some off, a resume does not try again, and still computes without them."""
    from lamplighter.config import Train
    from lamplighter.train import bf16, hardware

    monkeypatch.setenv(bf16.ISA_LIMIT, "")
    monkeypatch.delenv(bf16.ISA_LIMIT)
    before = {"dtype": "fp32", "threads": 1, "isa_limit": "AVX512_CORE_BF16"}
    assert hardware.detect(Train(), before).facts()["isa_limit"] == "AVX512_CORE_BF16"
