"""What starts processes: Run folder: atomic files, lock, manifests, identity."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from lamplighter import rundir
from lamplighter.errors import AlreadyRunning
from lamplighter.rundir import RunDir


def test_an_atomic_write_is_whole_at_every_instant(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    rundir.write_json(path, {"n": 0, "pad": "x" * 20000})
    code = f"""
from lamplighter.rundir import write_json
from pathlib import Path
n = 0
while True:
    n += 1
    write_json(Path({str(path)!r}), {{"n": n, "pad": "x" * 20000}}, durable=False)
"""
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 1.5
        seen = set()
        while time.monotonic() < deadline:
            value = rundir.read_json(path)
            assert value is not None
            assert len(value["pad"]) == 20000
            seen.add(value["n"])
    finally:
        child.kill()
        child.wait()
    assert len(seen) > 3
    assert rundir.read_json(path) is not None


def test_one_run_has_one_owner_and_a_dead_one_is_no_obstacle(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create()
    code = f"""
from lamplighter.rundir import RunDir, take_lock
from pathlib import Path
import time
take_lock(RunDir(Path({str(run.path)!r})))
print("locked", flush=True)
time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    assert rundir.is_running(run)
    with pytest.raises(AlreadyRunning) as caught:
        rundir.take_lock(run)
    assert caught.value.code == 69
    assert str(holder.pid) in caught.value.why
    holder.kill()
    holder.wait()
    assert not rundir.is_running(run)
    assert rundir.take_lock(run) > 0
