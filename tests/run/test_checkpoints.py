"""Checkpoints: open with transformers, survive damage and full disks, are pruned with care, generate what they should."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lamplighter.data.token_cache.reader import open_tokens
from lamplighter.rundir import RunDir, read_json, read_lines, write_json
from lamplighter.slot import read_slot
from running import (
    SHARED,
    TINY,
    Command,
    Finished,
    Row,
    lamp,
    losses_of,
    shared,
    slot_of,
    start_lamp,
    verdicts_of,
    wait_for,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TRAIN = ["train", "--run", "r", *TINY]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_checkpoint_opens_with_transformers_and_agrees(tmp_path: Path, family: str, here: Command) -> None:
    """Same logits, the same greedy text as `lamp generate`, and the same validation loss."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lamplighter.model.build import load_folder

    words = [
        *TRAIN,
        "--model.family",
        family,
        *["--tokenizer.kind", "bpe", "--tokenizer.vocab_size", "400", "--eval.windows", "0"],
    ]
    words += ["--model.kv_heads", "1"] if family == "llama" else []
    done = here(*words, "--model.dropout", "0.1", "--train.steps", "60", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(tmp_path / "runs" / "r")
    folder = run.checkpoints / "checkpoint-60"
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = "The fog"
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]])
    ours = load_folder(folder).model.eval()
    with torch.no_grad():
        assert torch.allclose(ours(ids), theirs(ids).logits, atol=1e-5)
        greedy = theirs.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    text = tokenizer.decode(greedy[0, 1:], skip_special_tokens=True)
    said = here("generate", "r", "--prompt", prompt, "--temperature", "0", "--max-tokens", "20", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert said.stdout == text + "\n"
    assert "tokens per second" in said.stderr

    (cache,) = [path.parent for path in (tmp_path / "runs" / ".cache").glob("*/train-00000.bin")]
    val = open_tokens(cache).val
    stream = torch.from_numpy(val.read(0, len(val)).astype(np.int64))
    nats, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(stream) - 1, 32):
            piece = stream[start : start + 33]
            logits = theirs(piece[None, :-1]).logits[0]
            nats += float(torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum"))
            count += len(piece) - 1
    recorded = [record["eval/val_loss"] for record in read_lines(run.metrics) if "eval/val_loss" in record][-1]
    assert recorded == pytest.approx(nats / count, abs=1e-4)
    assert count == len(val) - 1


def test_start_from_a_hugging_face_folder_and_fine_tune(tmp_path: Path, here: Command) -> None:
    folder = shared("models", "stories260K_hf_llama")
    text = shared("tinyshakespeare", "input.txt")
    done = here("train", "--run", "tuned", "--model.init_from", str(folder), "--data.paths", str(text), "--data.separator", "\n\n",
                "--data.seq_len", "64", "--train.batch_size", "8", "--train.steps", "40", "--train.lr", "1e-3", "--train.dtype", "fp32",
                "--train.threads", "1",
                "--eval.every_steps", "0", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "260,032 parameters" in done.stdout
    losses = [float.fromhex(value) for value in losses_of(RunDir(tmp_path / "runs" / "tuned")).values()]
    assert sum(losses[-5:]) < sum(losses[:5]) - 2
    words = ["--prompt", "Once upon a time", "--temperature", "0", "--max-tokens", "20"]
    said = here("generate", str(folder), *words, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    if folder.is_relative_to(SHARED):
        assert "there was a little girl named Lily" in said.stdout


FOURTHS = [*TINY, "--train.steps", "12", "--save.every_steps", "4"]


def damage(path: Path, how: str) -> None:
    model = path / "model.safetensors"
    data = bytearray(model.read_bytes())
    if how == "truncated":
        model.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        data[len(data) // 2] ^= 4
        model.write_bytes(data)
    elif how == "torn":
        (path / "manifest.json").unlink()
    else:
        (path / "training" / "state.json").unlink()


@pytest.mark.parametrize("how", ["truncated", "flipped", "torn", "state gone"])
def test_a_bad_checkpoint_is_passed_over_and_said(
    tmp_path: Path, how: str, zoo_row: Row, finished: Finished, here: Command
) -> None:
    run = finished(*FOURTHS)
    whole = losses_of(run)
    damage(run.checkpoints / "checkpoint-12", how)
    damage(run.checkpoints / "checkpoint-8", how)
    done = here("train", "--run", "r", *FOURTHS, "--train.steps", "13", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "checkpoint-12 is passed over" in done.stdout
    assert "checkpoint-8 is passed over" in done.stdout
    assert "resumed from checkpoint-4" in done.stdout
    assert {step: loss for step, loss in losses_of(run).items() if step <= 4} == {
        s: v for s, v in whole.items() if s <= 4
    }
    assert list(run.checkpoints.glob("aside-checkpoint-8-*")), "a bad folder is moved aside, not deleted"
    found = verdicts_of(run, "bad_checkpoint")
    assert [Path(e["culprit"]["path"]).name for e in found] == ["checkpoint-12", "checkpoint-8"]
    zoo_row(f"bad_checkpoint {how}"[:18], "start", "fallback", 0)


def test_a_stop_before_another_step_claims_none(tmp_path: Path, finished: Finished) -> None:
    """The status is of an earlier start, or was fetched from another machine: it had come further than to what is saved."""
    run = finished(*FOURTHS)
    shutil.rmtree(run.slots, ignore_errors=True)
    write_json(run.status, {**read_json(run.status), "state": "running", "step": 15, "durable_step": 12})
    process = start_lamp(*TRAIN, "--train.steps", "20", "--save.every_steps", "4", cwd=tmp_path)
    wait_for(lambda: (slot_file := read_slot(run.slot(0))) is not None and slot_file.phase == "import", process=process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 75
    assert read_json(run.status)["outcome"] == ("stopped early (SIGTERM) before another step was made; step 12 is safe")


def test_nothing_valid_is_an_error_not_a_fresh_start(tmp_path: Path, finished: Finished, here: Command) -> None:
    run = finished(*FOURTHS)
    for path in run.checkpoints.glob("checkpoint-*"):
        damage(path, "flipped")
    done = here(*TRAIN, "--train.steps", "20", "--save.every_steps", "4", cwd=tmp_path)
    assert done.returncode == 74
    assert "--resume never" in done.stdout
    assert "no valid checkpoint to go on from" in done.stdout and "is safe" not in done.stdout


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small file system here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


WIDE = ["--model.width", "128", "--model.heads", "4"]  # a checkpoint of about 5.3 MB


def test_a_full_disk_at_the_start_is_said_with_need_and_have(
    tmp_path: Path, small_disk: Path, zoo_row: Row, here: Command
) -> None:
    words = [*WIDE, "--model.layers", "4", "--train.steps", "5", "--runs-dir", str(small_disk / "runs")]
    done = here(*TRAIN, *words, cwd=tmp_path)
    assert done.returncode == 73, done.stdout
    assert re.search(r"it needs [\d.]+ MB, [\d.]+ MB are free", done.stdout)
    zoo_row("disk_full start", "start", "stop", 73)


def test_a_disk_that_fills_up_during_a_save_leaves_the_old_checkpoint_intact(
    tmp_path: Path, small_disk: Path, zoo_row: Row
) -> None:
    run = RunDir(small_disk / "runs" / "r")
    words = [*TRAIN, "--model.width", "64", "--train.steps", "100000", "--save.every_steps", "40",
             "--save.keep", "1", "--runs-dir", str(small_disk / "runs")]  # fmt: skip
    going = start_lamp(*words, cwd=tmp_path)
    wait_for(lambda: slot_of(run).durable_step >= 40, process=going)
    free = shutil.disk_usage(small_disk).free
    with open(small_disk / "ballast", "wb") as file:
        file.write(b"\1" * (free - 300_000))
    assert going.wait(60) == 73, (tmp_path / "out.txt").read_text()[-2000:]
    said = (tmp_path / "out.txt").read_text()
    assert "checkpoints that exist are intact" in said or "what was saved before is intact" in said
    (small_disk / "ballast").unlink()
    rows = json.loads(lamp("checkpoints", "r", "--json", "--runs-dir", str(small_disk / "runs"), cwd=tmp_path).stdout)
    assert [row for row in rows if row["valid"]]
    last = max(row["step"] for row in rows if row["valid"])
    steps = last + 30
    done = lamp(*words, "--train.steps", str(steps), cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert read_json(run.status)["step"] == steps
    assert verdicts_of(run, "disk_full")
    zoo_row("disk_full", "save", "stop", 73)


def test_the_best_is_never_pruned(tmp_path: Path, zoo_row: Row, here: Command) -> None:
    """With an absurd learning rate the first validation is the best one; many saves later it is still there."""
    wild = ["--train.lr", "1.0", "--train.warmup_steps", "0", "--train.grad_clip", "0", "--train.steps", "20"]
    done = here(
        *TRAIN, *wild, *["--save.every_steps", "2", "--eval.every_steps", "2", "--save.keep", "2"], cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    run = RunDir(tmp_path / "runs" / "r")
    best = read_json(run.checkpoints / "best.json")
    there = sorted(int(path.name.split("-")[1]) for path in run.checkpoints.glob("checkpoint-*"))
    scores = {r["step"]: r["eval/val_loss"] for r in read_lines(run.metrics) if "eval/val_loss" in r}
    assert best["step"] == min(scores, key=lambda step: scores[step])
    assert best["step"] in there
    assert there[-2:] == [18, 20]
    assert len(there) <= 3
    zoo_row("best_pruned", "none", "none", 0)


def test_generate_has_seeds_samples_and_limits(tmp_path: Path, finished: Finished, here: Command) -> None:
    finished(*FOURTHS)
    base = ["generate", "r", "--prompt", "A", "--max-tokens", "12"]
    one = here(*base, "--seed", "5", cwd=tmp_path).stdout
    assert one == here(*base, "--seed", "5", cwd=tmp_path).stdout
    assert one != here(*base, "--seed", "6", cwd=tmp_path).stdout
    many = here(*base, "--num-samples", "3", cwd=tmp_path).stdout
    assert many.count("--- sample") == 3
    bad = here(*base, "--temperature", "-1", cwd=tmp_path)
    assert bad.returncode == 2
    assert "temperature" in bad.stderr
    talk = lamp("generate", "r", "--interactive", "--max-tokens", "5", cwd=tmp_path, input="The lamp\nA goose\n")
    assert talk.returncode == 0, talk.stderr
    assert talk.stdout.startswith("The lamp")
    assert "\nA goose" in talk.stdout
    assert here("generate", "r", "--checkpoint", "best", "--max-tokens", "5", cwd=tmp_path).returncode == 0
