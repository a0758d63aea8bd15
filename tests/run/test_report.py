"""Report: slot, events, ledger, listener; and that it never raises into training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from lamplighter.procs import stacks
from lamplighter.rundir import RunDir, read_lines
from lamplighter.slot import read_slot


def start_child(folder: Path, body: str) -> subprocess.Popen[bytes]:
    """A process that reports into `folder`, then runs `body`."""
    run = RunDir(folder)
    run.create()
    code = f"from lamplighter import report\nfrom lamplighter.rundir import RunDir\nfrom pathlib import Path\nimport time, os, sys\nrun = RunDir(Path({str(folder)!r}))\nreport.start(run)\n"
    return subprocess.Popen([sys.executable, "-c", code + textwrap.dedent(body)], stderr=subprocess.PIPE)


def wait_for(condition: Any, deadline_s: float = 10.0) -> Any:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("the condition did not come true in time")


def test_the_slot_shows_the_innermost_phase_and_its_count(tmp_path: Path) -> None:
    child = start_child(tmp_path, """
        with report.phase("train", total=10, unit="steps") as outer:
            outer.tick(3)
            with report.phase("save", total=100, unit="B") as inner:
                inner.tick(40, "model.safetensors")
                time.sleep(30)
    """)  # fmt: skip
    try:
        slot = wait_for(lambda: (s := read_slot(RunDir(tmp_path).slot(0))) and s.done == 40 and s)
        assert slot.phase == "train > save"
        assert (slot.total, slot.unit, slot.phase_item, slot.pid) == (100, "B", "model.safetensors", child.pid)
    finally:
        child.kill()
        child.wait()


def test_events_metrics_and_the_ledger_add_up(tmp_path: Path) -> None:
    child = start_child(tmp_path, """
        with report.phase("data"):
            time.sleep(0.3)
        with report.phase("train"):
            with report.span("compute"):
                time.sleep(0.2)
            time.sleep(0.1)
        report.metric(1, {"train/loss": 0.1 + 0.2, "train/lr": float("nan")})
        report.close()
    """)  # fmt: skip
    assert child.wait() == 0
    run = RunDir(tmp_path)
    ledger = [event for event in read_lines(run.rank_events(0)) if event["type"] == "ledger"][-1]
    seconds = ledger["seconds"]
    assert ledger["final"]
    assert seconds["data"] == pytest.approx(0.3, abs=0.15)
    assert seconds["compute"] == pytest.approx(0.2, abs=0.15)
    assert seconds["train"] == pytest.approx(0.1, abs=0.15)
    (metric,) = read_lines(run.metrics)
    assert metric["train/loss"] == 0.1 + 0.2
    assert metric["train/lr"] is None
    assert (metric["step"], metric["attempt"]) == (1, 1)


def test_the_listener_answers_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    child = start_child(tmp_path, """
        import threading
        def sleeper():
            time.sleep(30)
        threading.Thread(target=sleeper, name="beside", daemon=True).start()
        with report.phase("waiting"):
            time.sleep(30)
    """)  # fmt: skip
    try:
        run = RunDir(tmp_path)
        wait_for(lambda: (s := read_slot(run.slot(0))) and s.phase == "waiting")
        taken = stacks.take(run.slot(0), child.pid, ours=True)
        assert taken is not None
        assert taken.source == "listener"
        names = {thread.name for thread in taken.threads}
        assert {"MainThread", "beside"} <= names
        assert taken.threads[0].name == "MainThread"
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("where", ["in Python", "in C with the GIL"])
def test_without_ptrace_stacks_are_still_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """py-spy refused: the listener answers; and where it cannot (the GIL is held), the main thread's own dump does."""
    monkeypatch.setattr(stacks, "by_pyspy", lambda *_, **__: None)
    wait = (
        "time.sleep(30)" if where == "in Python" else "while True: __import__('ctypes').PyDLL(None).usleep(30_000_000)"
    )  # a signal ends one sleep
    child = start_child(tmp_path, f"""
        def busy():
            {wait}
        with report.phase("waiting"):
            busy()
    """)  # fmt: skip
    try:
        run = RunDir(tmp_path)
        wait_for(lambda: (s := read_slot(run.slot(0))) and s.phase == "waiting")
        time.sleep(0.2)
        taken = stacks.take(run.slot(0), child.pid, ours=True)
        assert taken is not None
        assert taken.source == ("listener" if where == "in Python" else "signal")
        assert "busy" in [frame.func for frame in taken.threads[0].frames]
        assert child.poll() is None, "it did not harm the process"
    finally:
        child.kill()
        child.wait()


def test_a_stop_before_training_leaves_with_75_even_in_a_long_call(tmp_path: Path) -> None:
    child = start_child(tmp_path, """
        with report.phase("tokenise"):
            time.sleep(60)
    """)  # fmt: skip
    run = RunDir(tmp_path)
    wait_for(lambda: (s := read_slot(run.slot(0))) and s.phase == "tokenise")
    child.terminate()
    assert child.wait(5) == 75
    kinds = [event["type"] for event in read_lines(run.rank_events(0))]
    assert "stopping" in kinds
    assert kinds[-1] == "ledger"


def test_a_full_disk_is_counted_not_raised(tmp_path: Path) -> None:
    child = start_child(tmp_path, """
        full = os.open("/dev/full", os.O_WRONLY)
        report._reporter.events.fd = report._reporter.metrics.fd = full
        report.note("lost")
        report.metric(1, {"train/loss": 1.0})
        sys.exit(0)
    """)  # fmt: skip
    assert child.wait() == 0
    slot = read_slot(RunDir(tmp_path).slot(0))
    assert slot is not None
    assert slot.dropped == 2


def test_a_file_that_was_killed_in_mid_line_gets_its_newline_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    run.rank_events(0).write_bytes(b'{"type":"note","t":1.0}\n{"type":"no')
    child = start_child(tmp_path, "report.note('after')")
    assert child.wait() == 0
    lines = run.rank_events(0).read_bytes().split(b"\n")
    assert lines[1] == b'{"type":"no'
    kinds = [event["type"] for event in read_lines(run.rank_events(0))]
    assert kinds == ["note", "hello", "note"]


def test_without_start_everything_works_and_writes_nothing(tmp_path: Path) -> None:
    code = "from lamplighter import report\nwith report.phase('a', total=3) as p:\n    p.tick()\n    report.metric(1, {'train/loss': 1.0})\nreport.note('x')\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert os.listdir(tmp_path) == []


def test_metrics_are_whole_json_lines(tmp_path: Path) -> None:
    child = start_child(tmp_path, "for i in range(500): report.metric(i, {'train/loss': i / 3})")
    assert child.wait() == 0
    lines = RunDir(tmp_path).metrics.read_text().splitlines()
    assert [json.loads(line)["train/loss"] for line in lines] == [i / 3 for i in range(500)]
