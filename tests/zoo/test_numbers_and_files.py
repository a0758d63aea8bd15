"""More of the zoo: faults in numbers, files, outputs and owners."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lamplighter.rundir import RunDir, is_running, read_json, read_lines
from running import (
    LAMP,
    LONG,
    TINY,
    Command,
    Row,
    clean_env,
    events_of,
    lamp,
    losses_of,
    processes_of,
    slot_of,
    start_lamp,
    verdicts_of,
    wait_for,
)

QUICK = ["train", "--run", "z", *TINY, "--train.steps", "40", "--save.every_steps", "10"]


NAN_MODEL = """
import torch

class Bad(torch.nn.Module):
    def forward(self, x):
        return x / 0 if x.shape[0] and BAD(self) else x

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.inner = torch.nn.Sequential(torch.nn.Linear(width, width), Bad())
        self.head = torch.nn.Linear(width, vocab_size)

    def forward(self, ids):
        self.inner[1].ids = ids
        return self.head(self.inner(self.embed(ids)))
"""


def test_nan_batch_is_skipped_and_named_down_to_the_module(tmp_path: Path, zoo_row: Row, here: Command) -> None:
    """A window of data (not a moment) makes Inf: found by its ids, so it is the same at every attempt."""
    bad = "def BAD(module):\n    return module.training and int(module.ids.sum()) % 23 == 5\n"
    (tmp_path / "nan_model.py").write_text(NAN_MODEL + bad)
    words = [*QUICK, "--model.family", "nan_model:Model"]
    done = here(*words, cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "z")
    found = verdicts_of(run, "nan_batch")
    assert found, done.stdout[-1500:]
    assert found[0]["action"] == "skip"
    assert found[0]["culprit"]["module"] == "inner.1"
    assert found[0]["culprit"]["item"]
    assert done.returncode in (0, 76)
    assert done.returncode == 0 or len(found) == 4
    whole = last_losses(run)
    again = start_lamp(*[word if word != "z" else "k" for word in words], cwd=tmp_path)
    other = RunDir(tmp_path / "runs" / "k")
    wait_for(lambda: slot_of(other).step >= 15, process=again)
    if again.poll() is None:
        os.kill(slot_of(other).pid, signal.SIGKILL)
    assert again.wait(60) == done.returncode
    assert last_losses(other) == whole
    zoo_row("nan_batch", "same step", "skip", done.returncode)


def test_too_many_bad_batches_stop_with_76(tmp_path: Path, here: Command) -> None:
    (tmp_path / "nan_model.py").write_text(NAN_MODEL + "def BAD(module):\n    return module.training\n")
    done = here(*QUICK, "--model.family", "nan_model:Model", cwd=tmp_path)
    assert done.returncode == 76
    actions = [v["action"] for v in verdicts_of(RunDir(tmp_path / "runs" / "z"), "nan_batch")]
    assert actions == ["skip", "skip", "skip", "stop"]


def last_losses(run: RunDir) -> dict[int, object]:
    return {record["step"]: record["train/loss"] for record in read_lines(run.metrics) if "train/loss" in record}


def bad_from(step: int, to: int) -> str:
    """By the step and not by the data, so that the batches of these steps are bad at every attempt."""
    return f"""
def BAD(module):
    frame = __import__("sys")._getframe()
    while frame and "batch" not in frame.f_locals:
        frame = frame.f_back
    return module.training and {step} <= frame.f_locals["batch"].step <= {to}
"""


@LONG  # tests/run/test_staging_runs.py rolls back too
def test_bad_batches_in_a_row_are_rolled_back_and_passed_over(tmp_path: Path, zoo_row: Row, here: Command) -> None:
    (tmp_path / "nan_model.py").write_text(NAN_MODEL + bad_from(22, 25))
    words = [*QUICK, "--model.family", "nan_model:Model"]
    done = here(*words, cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "z")
    assert done.returncode == 0, done.stdout[-2000:]
    assert [v["action"] for v in verdicts_of(run, "nan_batch")] == ["skip", "skip", "skip", "restart"]
    (back,) = events_of(run, "rolled back")
    assert (back["step"], back["passed_from"], back["passed_to"]) == (20, 22, 25)
    whole = last_losses(run)
    assert [step for step in range(1, 41) if whole[step] is None] == [22, 23, 24, 25]
    again = start_lamp(*[word if word != "z" else "k" for word in words], cwd=tmp_path)
    other = RunDir(tmp_path / "runs" / "k")
    for step in (23, 31):  # once before the roll-back, once after it
        wait_for(lambda step=step: slot_of(other).step >= step, process=again)
        if again.poll() is None:
            os.kill(slot_of(other).pid, signal.SIGKILL)
            time.sleep(0.3)
    assert again.wait(60) == 0
    assert last_losses(other) == whole
    zoo_row("nan_batch, back", "same step", "restart", 0)


@LONG  # too_many_bad_batches ends with 76 too
def test_a_second_roll_back_is_divergence(tmp_path: Path, zoo_row: Row) -> None:
    (tmp_path / "nan_model.py").write_text(NAN_MODEL + bad_from(22, 99))
    done = lamp(*QUICK, "--model.family", "nan_model:Model", cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "z")
    assert done.returncode == 76
    assert [v["action"] for v in verdicts_of(run, "nan_batch")] == [*["skip"] * 3, "restart", *["skip"] * 3, "stop"]
    assert read_json(run.status)["durable_step"] >= 20
    zoo_row("nan_batch, twice", "same step", "stop", 76)


SPOILED_MODEL = """
import os, torch

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Linear(width, vocab_size)
        self.head.weight.register_post_accumulate_grad_hook(self.spoil)
        self.calls = 0

    def spoil(self, weight):
        self.calls += 1
        if self.calls == 20 and not os.path.exists("spoiled"):
            open("spoiled", "w").close()
            weight.data[3, 3] = float("nan")  # memory gone bad, between the forward pass and the save

    def forward(self, ids):
        return self.head(self.embed(ids))
"""


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, zoo_row: Row, here: Command) -> None:
    (tmp_path / "spoiled_model.py").write_text(SPOILED_MODEL)
    words = [*QUICK, "--model.family", "spoiled_model:Model"]
    done = here(*words, cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "z")
    assert done.returncode == 0, done.stdout[-2000:]
    (found,) = verdicts_of(run, "nan_weights")
    assert found["action"] == "restart"
    assert found["culprit"] == {"step": 20, "module": "head.weight"}
    from safetensors.numpy import load_file

    for path in run.checkpoints.glob("checkpoint-*"):
        assert all(np.isfinite(tensor).all() for tensor in load_file(path / "model.safetensors").values()), path
    zoo_row("nan_weights_saved", "same step", "restart", 0)


@LONG
def test_a_learning_rate_near_zero_is_named(tmp_path: Path, zoo_row: Row) -> None:
    words = [*QUICK, "--train.steps", "30000", "--train.warmup_steps", "29000", "--save.every_steps", "1000"]
    going = start_lamp(*words, cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "z")
    wait_for(lambda: verdicts_of(run, "lr_zero"), process=going)
    going.terminate()
    assert going.wait(20) == 75
    (found,) = verdicts_of(run, "lr_zero")
    assert "warm-up takes 97%" in str(found["why"])
    assert "step 20" in str(found["why"])
    zoo_row("lr_zero", "20 steps", "none", 75)


@LONG  # tests/run/test_silence.py has a source that blocks
def test_slow_input_is_told_from_stuck(tmp_path: Path, zoo_row: Row) -> None:
    """A FIFO that gives 20 kB/s."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "slow.py").write_text(
        "def documents():\n"
        "    with open('pipe', 'rb', buffering=0) as file:\n"
        "        data = b''\n"
        "        while len(data) < 200_000:\n"
        "            data += file.read(4000)\n"
        "    text = data.decode()\n"
        "    for i in range(0, len(text), 500):\n"
        "        yield text[i:i + 500]\n"
    )

    def feed() -> None:
        for _ in range(2):  # looked at once, tokenised once
            with open(tmp_path / "pipe", "wb", buffering=0) as pipe:
                try:
                    for number in range(60):
                        pipe.write((f"line {number} of the slow pipe, " * 200)[:4000].encode())
                        time.sleep(0.2)
                except BrokenPipeError:
                    continue

    threading.Thread(target=feed, daemon=True).start()
    done = lamp(*QUICK, "--data.source", "slow:documents", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:]
    found = verdicts_of(RunDir(tmp_path / "runs" / "z"), "slow_disk")
    assert found, done.stdout
    assert str(found[0]["culprit"]["path"]).endswith("pipe")
    assert float(found[0]["since_s"]) < 6
    zoo_row("slow_disk", float(found[0]["since_s"]), "none", 0)


@pytest.mark.parametrize("how", [pytest.param("truncated", marks=LONG), "flipped"])
def test_a_damaged_token_shard_is_rebuilt_or_refused_never_trained_on(
    tmp_path: Path, how: str, zoo_row: Row, here: Command
) -> None:
    assert here(*QUICK, cwd=tmp_path).returncode == 0
    whole = losses_of(RunDir(tmp_path / "runs" / "z"))
    (shard,) = (tmp_path / "runs" / ".cache").glob("*/train-00000.bin")
    data = bytearray(shard.read_bytes())
    if how == "truncated":
        shard.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    done = here(*[word if word != "z" else "y" for word in QUICK], cwd=tmp_path)
    if done.returncode == 0:
        assert losses_of(RunDir(tmp_path / "runs" / "y")) == whole
        assert "rebuil" in done.stdout or "built" in done.stdout
    else:
        assert done.returncode == 65, done.stdout
        assert "train-00000.bin" in done.stdout
    cause = "shard_truncated" if how == "truncated" else "shard_bitflip"
    (found,) = verdicts_of(RunDir(tmp_path / "runs" / "y"), cause)
    zoo_row(cause, "start", str(found["action"]), done.returncode)


@LONG  # tests/unit/test_doctor_text.py finds it, tests/unit/test_tokens.py takes it over
def test_a_cache_lock_of_a_dead_process_is_taken_over(tmp_path: Path, zoo_row: Row) -> None:
    words = ["train", "--run", "z", *TINY, "--data.embedded_documents", "60000", "--train.steps", "3"]
    first = start_lamp(*words, "--watch.on_stuck", "stop", cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "z")
    wait_for(lambda: "tokenise" in slot_of(run).phase or "look" in slot_of(run).phase, process=first)
    os.kill(slot_of(run).pid, signal.SIGKILL)
    first.wait(10)
    done = lamp(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-1500:]
    assert verdicts_of(run, "dead_lock_file"), done.stdout[-1500:]
    zoo_row("dead_lock_file", "start", "none", 0)


@LONG  # tests/run/test_terminal.py blocks a pipe and a terminal too
def test_a_blocked_output_does_not_stop_training(tmp_path: Path, zoo_row: Row) -> None:
    reading, writing = os.pipe()
    run = RunDir(tmp_path / "runs" / "z")
    words = [*QUICK, "--train.steps", "1500", "--verbose"]
    going = subprocess.Popen([*LAMP, *words], cwd=tmp_path, stdout=writing, stderr=writing, env=clean_env())
    os.close(writing)
    try:
        wait_for(lambda: "output is blocked" in (run.console.read_text() if run.console.exists() else ""), 60, going)
        before = slot_of(run).step
        wait_for(lambda: slot_of(run).step > before or read_json(run.status)["state"] == "finished", 10, going)
        assert going.wait(300) == 0
    finally:
        os.close(reading)
        going.kill()
    assert read_json(run.status)["step"] == 1500
    zoo_row("stdout_blocked", "in the log", "none", 0)


def test_kill_of_the_parent_leaves_no_orphan_and_no_lock(tmp_path: Path, zoo_row: Row) -> None:
    run = RunDir(tmp_path / "runs" / "z")
    going = start_lamp(*QUICK, "--train.steps", "100000", cwd=tmp_path)
    wait_for(lambda: slot_of(run).step > 5, process=going)
    going.kill()
    going.wait()
    wait_for(lambda: not processes_of(run.path) and not is_running(run), 2)
    zoo_row("orphans", "none", "none", -9)


def test_too_few_file_descriptors(tmp_path: Path, zoo_row: Row) -> None:
    command = f"ulimit -n 40; exec {' '.join(LAMP)} {' '.join(QUICK)}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr
    zoo_row("low_fd", "none", "none", 0)


@LONG  # tests/run/test_watch.py notifies by a command
def test_notify_by_command_and_by_webhook(tmp_path: Path) -> None:
    heard: list[dict[str, object]] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    assert lamp(*QUICK, "--watch.notify", url, cwd=tmp_path).returncode == 0
    server.shutdown()
    assert heard[-1]["kind"] == "finished"
    assert heard[-1]["run"] == "z"
    shutil.rmtree(tmp_path / "runs")
    assert lamp(*QUICK, "--watch.notify", "cat >> told.txt; echo >> told.txt", cwd=tmp_path).returncode == 0
    assert json.loads((tmp_path / "told.txt").read_text().splitlines()[-1])["kind"] == "finished"
    shutil.rmtree(tmp_path / "runs")
    done = lamp(*QUICK, "--watch.notify", "exit 3", cwd=tmp_path)
    assert done.returncode == 0
    assert "watch.notify does not work" in done.stdout
