"""Ranks by the real command, over gloo on this machine: the same bits on any number of them, through kills and stops."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from lamplighter.rundir import RunDir, newest_first, read_json, read_lines
from running import LAMP, LONG, TINY, clean_env, events_of, lamp, losses_of, verdicts_of, wait_for

WORDS = ["train", "--run", "r", *TINY, "--train.batch_size", "6", "--train.micro_batch", "2", "--eval.every_steps", "300",
         "--train.steps", "600", "--save.every_steps", "100", "--save.keep", "100"]  # fmt: skip


def _folder(place: Path) -> RunDir:
    return RunDir(place / "runs" / "r")


def _stored(place: Path) -> list[bytes]:
    newest = newest_first(_folder(place).checkpoints)[0]
    return [
        newest.name.encode(),
        *((newest / name).read_bytes() for name in ("model.safetensors", "training/optimizer.safetensors")),
    ]


def _start(place: Path, ranks: int, *more: str) -> subprocess.Popen[str]:
    words = [*LAMP, *WORDS, "--train.ranks", str(ranks), *more]
    return subprocess.Popen(
        words, cwd=place, env=clean_env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _at_step(place: Path, step: int, process: subprocess.Popen[str]) -> list[int]:
    """The processes of the ranks, once so many steps are made."""
    status = _folder(place).status
    wait_for(lambda: status.exists() and read_json(status).get("step", 0) >= step, 200, process)
    return [one["pid"] for one in read_json(status)["ranks"]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one rank, unbroken."""
    place = tmp_path_factory.mktemp("alone")
    done = lamp(*WORDS, cwd=place)
    assert done.returncode == 0, done.stdout
    return place


def test_a_killed_rank_is_named_and_two_ranks_have_the_bits_of_one(tmp_path: Path, alone: Path) -> None:
    going = _start(tmp_path, 2)
    victim = _at_step(tmp_path, 110, going)[1]
    os.kill(victim, signal.SIGKILL)
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 0, said
    assert "3 micro-batches a step summed by one tree: the bits of a single rank" in said
    assert said.count("resumed from") == 1, "one voice"
    (verdict,) = verdicts_of(_folder(tmp_path), "killed")
    assert f"rank 1 (process {victim}) was killed by SIGKILL" in verdict["why"] and verdict["culprit"]["rank"] == 1
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)
    assert {record["rank"] for record in read_lines(_folder(tmp_path).system)} == {0, 1}, (
        "a series for each, for the page"
    )


def test_a_stop_is_agreed_and_another_number_of_ranks_goes_on(tmp_path: Path, alone: Path) -> None:
    """3 ranks, asked to stop; then 1. Three micro-batches over three ranks, then all on one."""
    going = _start(tmp_path, 3)
    _at_step(tmp_path, 50, going)
    going.send_signal(signal.SIGTERM)
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 75 and "is safe" in said, said
    saved = newest_first(_folder(tmp_path).checkpoints)[0]
    assert int(saved.name.rpartition("-")[2]) % 100, "not at a step where a save was due"
    done = lamp(*WORDS, "--train.ranks", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)


KINDS: dict[str, Sequence[str]] = {
    "dropout": ("--model.dropout", "0.1"),
    "bf16": ("--train.dtype", "bf16"),
    "fp16": ("--train.dtype", "fp16"),
    "llama": ("--model.family", "llama"),
    "one micro-batch": ("--train.micro_batch", "6"),
}


@LONG
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_kind_of_run_has_the_same_bits(tmp_path: Path, kind: str, ranks: int) -> None:
    ends = []
    for world in (1, ranks):
        place = tmp_path / str(world)
        place.mkdir()
        going = _start(place, world, *KINDS[kind])
        said, _ = going.communicate(timeout=600)
        ends.append(
            (going.returncode, losses_of(_folder(place)), _stored(place) if going.returncode == 0 else said[-1:])
        )
    assert ends[0] == ends[1] and ends[0][0] == 0


@LONG
def test_a_run_without_micro_batches_gets_as_many_as_ranks(tmp_path: Path) -> None:
    at = WORDS.index("--train.micro_batch")
    words = [*WORDS[:at], *WORDS[at + 2 :]]
    done = lamp(*words, "--train.ranks", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    config = _folder(tmp_path).config.read_text()
    assert "micro_batch: 3" in config and "derived from 2 ranks" in config


@LONG
def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    going = _start(tmp_path, 2, "--train.steps", "100000")
    victim = _at_step(tmp_path, 5, going)[1]
    os.kill(victim, signal.SIGSTOP)
    wait_for(lambda: verdicts_of(_folder(tmp_path), "rank_sigstop"), 30, going)
    (verdict,) = verdicts_of(_folder(tmp_path), "rank_sigstop")
    assert verdict["culprit"]["rank"] == 1 and verdict["culprit"]["pid"] == victim and verdict["action"] == "none"
    os.kill(victim, signal.SIGCONT)
    before = read_json(_folder(tmp_path).status)["step"]
    wait_for(lambda: read_json(_folder(tmp_path).status)["step"] > before + 5, 60, going)
    going.send_signal(signal.SIGINT)
    assert going.wait(120) == 75 and len(events_of(_folder(tmp_path), "start")) == 1


@LONG
def test_torchrun_starts_one_run_with_one_voice(tmp_path: Path, alone: Path) -> None:
    (tmp_path / "r.yaml").write_text("train: {steps: 600}\n")  # torchrun would take --run for a flag of its own
    words = [
        *LAMP[:1],
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "lamplighter",
        "train",
        "r.yaml",
        *WORDS[3:],
    ]
    done = subprocess.run(words, cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 ranks, 3 micro-batches a step") == 1
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)
