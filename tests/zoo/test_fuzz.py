"""Sixty damaged files through the real command: no traceback, no hang, no wrong success, no code run (a few of them in CI)."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from lamplighter.rundir import RunDir, read_json, verify_manifest
from mutations import mutate
from running import FULL, TINY, Finished, lamp, losses_of

WORDS = [*TINY, "--train.steps", "8", "--save.every_steps", "4", "--save.staged", "false"]
MORE = ["train", "--run", "r", *TINY, "--train.steps", "9", "--save.every_steps", "4", "--save.staged", "false"]
VERBS = {
    "runs": ["runs"],
    "checkpoints": ["checkpoints", "r"],
    "generate": ["generate", "r", "--prompt", "It was", "--max-tokens", "4", "--seed", "1"],
    "train": MORE,
    "watch": ["watch", "r"],
    "why": ["why", "r"],
    "runs in JSON": ["runs", "--json"],
}
FILES = [
    "status.json", "config.yaml", "lock", "events.jsonl", "metrics.jsonl", "events.rank0.jsonl", "checkpoints/latest.json", "checkpoints/best.json",
    "checkpoints/checkpoint-8/manifest.json", "checkpoints/checkpoint-8/training/state.json", "checkpoints/checkpoint-8/config.json",
    "checkpoints/checkpoint-8/tokenizer.json", "checkpoints/checkpoint-8/tokenizer_config.json", "checkpoints/checkpoint-8/model.safetensors",
    "../.cache/manifest.json", "../.cache/lock", "ask/x.stop",
]  # fmt: skip
CODES = {0, 65, 66, 69, 73, 74, 75, 78}  # those of errors with a name; 1 is a crash
IN_CI = (0, 5, 8, 16)  # runs, why, checkpoints, generate


def damage(run: RunDir, seed: int) -> str:
    """One file of the run, by the seed: its content is changed, or there is a pipe or a folder in its place."""
    name = FILES[seed % len(FILES)]
    path = run.path / name
    if name.startswith("../.cache"):
        found = sorted(run.path.parent.glob(f".cache/*/{path.name}"))
        path = found[0] if found else run.path / "nothing"
    chance = random.Random(seed)
    whole = path.read_bytes() if path.is_file() else b"{}"
    if chance.random() < 0.15:
        path.unlink(missing_ok=True)
        os.mkfifo(path) if chance.random() < 0.7 else path.mkdir()
        return f"{name} is no file"
    path.write_bytes(mutate(whole, chance))
    return name


@pytest.fixture(scope="module")
def said_before() -> dict[str, Any]:
    """What the undamaged run answers, kept for all seeds."""
    return {}


@pytest.mark.parametrize("seed", range(60) if FULL else IN_CI)
def test_a_damaged_file_is_named_or_passed_over(
    tmp_path: Path, finished: Finished, seed: int, said_before: dict[str, Any]
) -> None:
    run = finished(*WORDS)
    verb = list(VERBS)[seed % len(VERBS)]
    if verb in ("generate", "train") and verb not in said_before:
        clean = lamp(*VERBS[verb], cwd=tmp_path)
        assert clean.returncode == 0, clean.stdout + clean.stderr
        said_before[verb] = losses_of(run)[9] if verb == "train" else clean.stdout
        shutil.rmtree(run.path.parent)
        run = finished(*WORDS)
    what = damage(run, seed)
    began = time.monotonic()
    said = lamp(*VERBS[verb], cwd=tmp_path, timeout=100)
    told = f"{verb}, seed {seed}, {what} after {time.monotonic() - began:.1f} s:\n{said.stdout}{said.stderr}"
    assert said.returncode in CODES, told
    assert "Traceback" not in said.stdout + said.stderr, told
    assert not list(tmp_path.rglob("ran")), told
    if said.returncode == 0:
        _success_is_true(verb, run, said, said_before, told)


def _success_is_true(
    verb: str, run: RunDir, said: subprocess.CompletedProcess[str], before: dict[str, Any], told: str
) -> None:
    if verb == "train":  # all nine steps, and the ninth as ever
        assert read_json(run.status)["step"] == 9, told
        said_why = "config.yaml is not as it was written" in said.stdout or "checkpoint-8 is passed over" in said.stdout
        assert losses_of(run)[9] == before["train"] or said_why, (
            told
        )  # from checkpoint-4 on, by the schedule of nine steps
        assert verify_manifest(run.checkpoint(9)) is None, told
    elif verb == "generate":
        assert said.stdout == before["generate"] or "passed over" in said.stderr, told
    elif verb == "runs":
        assert said.stdout.count("\n") == 4, told
