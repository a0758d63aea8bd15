"""save.mirror by the real command: a run that goes on on a new machine; stores that hang or refuse, registered as fsspec's plug-ins are."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from lamplighter.rundir import RunDir, read_lines, read_status
from running import TINY, lamp, losses_of, processes_of, start_lamp, wait_for, write_model

STORES = """
import time
from fsspec.implementations.memory import MemoryFileSystem

class Stalls(MemoryFileSystem):
    protocol = "stalls"
    def _open(self, path, mode="rb", **options):
        while "w" in mode:
            time.sleep(1)
        return super()._open(path, mode, **options)

class Refuses(MemoryFileSystem):
    protocol = "refuses"
    def cat_file(self, path, **options):
        raise PermissionError("403 for key sesame")
"""


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems of a package that every process of the command finds."""
    facts = tmp_path / "plugin" / "stores-1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: stores\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(
        "[fsspec.specs]\nstalls = slow_stores:Stalls\nrefuses = slow_stores:Refuses\n"
    )
    (tmp_path / "plugin" / "slow_stores.py").write_text(STORES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "plugin"))


def test_a_new_machine_goes_on_from_the_mirror_bit_for_bit(tmp_path: Path) -> None:
    """The machine is lost between two saves: all its processes at once, and its disk."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        family = write_model(folder, "time.sleep(0.02 if model.training else 0)")
    words = ("train", "--run", "r", *TINY, "--tokenizer.kind", "bpe", "--tokenizer.vocab_size", "300", "--model.family", family,
             "--train.steps", "400", "--save.every_steps", "20", "--save.mirror", f"file://{tmp_path / 'store'}")  # fmt: skip
    process, run = start_lamp(*words, cwd=old), RunDir(old / "runs" / "r")
    wait_for(lambda: (read_status(run).get("mirrored_step") or 0) >= 20, process=process)
    assert "(mirrored " in str(read_status(run).get("now"))
    pids = {process.pid, *processes_of(run.path)}
    pids |= {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _copies_for(pid, process.pid)}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it went with its parent
            os.kill(pid, signal.SIGKILL)
    process.wait()
    before = losses_of(run)
    (half,) = (tmp_path / "store" / "r").glob("run-*")
    torn = half / "checkpoint-9999"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")

    process, again = start_lamp(*words, cwd=new), RunDir(new / "runs" / "r")
    wait_for(lambda: len(losses_of(again)) > len(before) + 3, process=process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    said = (new / "out.txt").read_text()
    fetched = next(line for line in said.splitlines() if "fetched from" in line)
    assert all(
        one in fetched for one in ("config.yaml", "status.json", "metrics.jsonl", "the tokenizer", "every hash checked")
    )
    resumed = next(event for event in read_lines(again.events) if event["type"] == "resumed")
    assert resumed["step"] % 20 == 0 and resumed["step"] > 0
    after = {r["step"]: r["train/loss"].hex() for r in read_lines(again.metrics) if r["t"] > resumed["t"]}
    common = after.keys() & before.keys()
    assert common and all(after[step] == before[step] for step in common)
    status = read_status(again)
    assert status["mirrored_step"] == status["durable_step"] > resumed["step"], (
        "the step of the stop is in the mirror, too"
    )
    assert "mirrored: step" in again.report.read_text()
    assert not torn.exists(), "half a checkpoint beyond the newest is cleared away"


def _copies_for(pid: int, parent: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return (
            b"mirror.copying" in words
            and int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) == parent
        )
    except OSError:  # it has ended
        return False


def test_a_store_that_hangs_costs_the_run_nothing_and_keeps_no_secret(tmp_path: Path, stores: None) -> None:
    words = (
        "train",
        "--run",
        "r",
        *TINY,
        "--train.steps",
        "60",
        "--save.every_steps",
        "10",
        "--save.mirror_wait_s",
        "3",
    )
    done = lamp(*words, "--save.mirror", "stalls://me:sesame@host/runs?word=sesame", cwd=tmp_path)
    ended, run = time.time(), RunDir(tmp_path / "runs" / "r")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same command again copies the rest") == 1 and "has no checkpoint of 60" in done.stdout
    assert (run.checkpoint(60) / "manifest.json").exists() and read_status(run)["mirrored_step"] == 0
    stop = next(event for event in read_lines(run.events) if event["type"] == "stop")
    assert ended - stop["t"] < 3 + 5, "the stated deadline, and what a loaded machine takes to leave"
    assert "sesame" not in done.stdout + done.stderr
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(files) > 10 and not any(b"sesame" in path.read_bytes() for path in files)
    assert json.loads(run.mirror.read_text())["doing"], "it hung in there"


def test_a_store_that_cannot_be_asked_begins_no_second_run(tmp_path: Path, stores: None) -> None:
    words = ("train", "--run", "r", *TINY, "--train.steps", "5", "--save.mirror", "refuses://host/runs")
    done = lamp(*words, cwd=tmp_path)
    assert (
        done.returncode == 67 and "cannot be asked for checkpoints" in done.stderr and "--resume never" in done.stderr
    )
    assert not (tmp_path / "runs" / "r" / "metrics.jsonl").exists()
