"""The rest of the zoo: compilers, dirty text, saves that are cut off, memory, clocks, and processes that never report."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lamplighter.rundir import RunDir, read_json, sealed
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
    slot_of,
    start_lamp,
    verdicts_of,
    wait_for,
    write_model,
)

QUICK = ["train", "--run", "z", *TINY, "--train.steps", "40", "--save.every_steps", "10"]


# ---------------------------------------------------------------- compilers


def compiled_run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = clean_env(TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"), **environment)
    command = [*LAMP, *QUICK, "--train.compile", "true", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False)


@LONG
def test_a_slow_compiler_is_status_and_never_killed(tmp_path: Path, zoo_row: Row) -> None:
    """compile_slow: the first call of the compiler sleeps, longer than the set patience."""
    nap = 60
    wrapper = tmp_path / "slow-c++"
    wrapper.write_text(f'#!/bin/sh\nmkdir {tmp_path}/once 2>/dev/null && sleep {nap}\nexec g++ "$@"\n')
    wrapper.chmod(0o755)
    done = compiled_run(tmp_path, "--watch.patience_s", "600", CXX=str(wrapper))
    run = RunDir(tmp_path / "runs" / "z")
    assert done.returncode == 0, done.stdout[-2000:]
    found = verdicts_of(run, "compile_slow")
    assert found and {v["action"] for v in found} == {"none"}, done.stdout[-2000:]
    assert len(events_of(run, "start")) == 1
    assert any("nothing computes" in line or "process" in line for line in done.stdout.splitlines() if "compil" in line)
    zoo_row("compile_slow", float(found[0]["since_s"]), "none", 0)


@LONG
def test_a_compiler_that_sleeps_beyond_patience_is_given_up_for_eager(tmp_path: Path, zoo_row: Row) -> None:
    wrapper = tmp_path / "slow-c++"
    wrapper.write_text("#!/bin/sh\nsleep 600\n")
    wrapper.chmod(0o755)
    done = compiled_run(tmp_path, "--watch.patience_s", "6", CXX=str(wrapper))
    run = RunDir(tmp_path / "runs" / "z")
    assert done.returncode == 0, done.stdout[-2000:]
    assert [v["action"] for v in verdicts_of(run, "compile_slow")][-1] == "fallback"
    assert "not compiled: compiling did not work out in an earlier attempt" in done.stdout
    assert len(events_of(run, "start")) == 2
    assert sorted(losses_of(run)) == list(range(1, 41))
    zoo_row("compile_asleep", float(verdicts_of(run, "compile_slow")[0]["since_s"]), "fallback", 0)


@LONG
def test_a_broken_compiler_means_eager_and_is_said(tmp_path: Path, zoo_row: Row) -> None:
    done = compiled_run(tmp_path, CXX="/bin/false")
    run = RunDir(tmp_path / "runs" / "z")
    assert done.returncode == 0, done.stdout[-2000:]
    (found,) = verdicts_of(run, "compile_failed")
    assert found["action"] == "fallback"
    assert "from step 1 on not bit-identical" in found["why"]
    state = read_json(run.checkpoints / "checkpoint-40" / "training" / "state.json")
    assert state["compiled"] is False
    assert read_json(run.status)["path"].endswith(
        "not compiled, attention by torch, fused adamw; fallen back from torch.compile"
    )
    zoo_row("compile_failed", "start", "fallback", 0)


STORM = """
import torch

class Inner(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):  # the culprit
        return torch.tanh(self.linear(x))

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.inner = torch.nn.ModuleList([Inner(width)])
        self.head = torch.nn.Linear(width, vocab_size)
        self.calls = 0

    def forward(self, ids):
        self.calls += 1
        x = self.embed(ids)
        n = 2 + self.calls % 20
        return self.head(torch.cat([self.inner[0](x[:, :n]), x[:, n:]], 1))
"""


@LONG
def test_a_recompile_storm_is_named_with_its_guard(tmp_path: Path, zoo_row: Row) -> None:
    (tmp_path / "storm.py").write_text(STORM)
    done = compiled_run(tmp_path, "--model.family", "storm:Model", "--train.steps", "14")
    run = RunDir(tmp_path / "runs" / "z")
    assert done.returncode == 0, done.stdout[-2000:]
    (found,) = verdicts_of(run, "recompile_storm")
    assert found["culprit"]["step"] <= 8
    assert found["culprit"]["file"].endswith("storm.py")
    assert "the culprit" in STORM.splitlines()[found["culprit"]["line"] - 1]
    assert "size mismatch" in found["culprit"]["guard"]
    assert "buckets" in found["next"]
    assert len(events_of(run, "start")) == 1
    zoo_row("recompile_storm", f"step {found['culprit']['step']}", "none", 0)


# ---------------------------------------------------------------- data


def test_dirty_text_is_set_aside_with_its_place_and_count(tmp_path: Path, zoo_row: Row, here: Command) -> None:
    good = [f"On day {n} the fog lay thick upon the river, and no boat went out.\n".encode() for n in range(8000)]
    dirty = [*good[:4000], b"a lamp\0lighter\n", *good[4000:6000], b"caf\xe9 noir\n", *good[6000:], b"x" * 20_000_000]
    (tmp_path / "dirty.txt").write_bytes(b"".join(dirty))
    done = here(*QUICK, "--data.paths", "dirty.txt", "--data.separator", "\n", cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "z")
    assert done.returncode == 0, done.stdout[-2000:]
    (found,) = verdicts_of(run, "dirty_text")
    assert found["action"] == "set_aside"
    assert found["culprit"]["line"] == 4001
    assert found["culprit"]["byte"] == sum(map(len, good[:4000])) + len("a lamp")
    assert "2 of 8,003 lines" in done.stdout
    assert [event["line"] for event in events_of(run, "set_aside")] == [4001, 6002]
    began = next(event["t"] for event in events_of(run, "phase") if event["name"] == "data")
    zoo_row("dirty_text", float(found["t"] - began), "set_aside", 0)


@LONG  # tests/unit/test_tokens.py names the place of such an id
def test_an_id_beyond_the_vocabulary_is_found_before_step_1(tmp_path: Path, zoo_row: Row) -> None:
    """token_range: the checksums agree, the ids do not fit the model."""
    assert lamp(*QUICK, cwd=tmp_path).returncode == 0
    (shard,) = (tmp_path / "runs" / ".cache").glob("*/train-00000.bin")
    ids = np.fromfile(shard, dtype=np.uint16)
    ids[1000] = 60000
    ids.tofile(shard)
    manifest = read_json(shard.parent / "manifest.json")
    manifest["files"][shard.name]["sha256"] = hashlib.sha256(shard.read_bytes()).hexdigest()
    (shard.parent / "manifest.json").write_text(json.dumps(sealed(manifest)))
    done = lamp(*[word if word != "z" else "y" for word in QUICK], cwd=tmp_path)
    assert done.returncode == 65, done.stdout[-1500:]
    assert "train-00000.bin" in done.stdout
    assert "60000" in done.stdout.replace(",", "")
    assert "1000" in done.stdout.replace(",", "")
    assert not losses_of(RunDir(tmp_path / "runs" / "y"))
    zoo_row("token_range", "start", "stop", 65)


# ---------------------------------------------------------------- saves that are cut off

SAVE_KILLER = """
import os, pathlib, signal, torch
import lamplighter.train.checkpoint as c

POINTS = ["open", "write", "fsync", "manifest", "rename", "renamed", "latest", "prune"]

def die(point, name):
    step = 10 * (2 + POINTS.index(point))
    mark = pathlib.Path(f"killed-{point}")
    if f"checkpoint-{step}" in str(name) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

def before(module, name, point, which=lambda *a, **k: a[0]):
    original = getattr(module, name)
    def wrapper(*args, **kwargs):
        die(point, which(*args, **kwargs))
        return original(*args, **kwargs)
    setattr(module, name, wrapper)

write = c.tensorfile.write
def write_half(path, *rest):
    die("open", path)
    if not pathlib.Path("killed-write").exists() and "checkpoint-30" in str(path):
        write(path, *rest)
        os.truncate(path, os.path.getsize(path) // 2)
        die("write", path)
    return write(path, *rest)
c.tensorfile.write = write_half
before(c, "_fsync", "fsync")
before(c, "write_manifest", "manifest")
before(pathlib.Path, "rename", "rename", lambda self, target: target)
fsync_folder = c.fsync_folder
def after_rename(folder):
    newest = c.newest_first(folder) if folder.name == "checkpoints" else []
    if newest:
        die("renamed", newest[0])
    fsync_folder(folder)
c.fsync_folder = after_rename
before(c, "write_json", "latest", lambda path, value, **_: value.get("path", "") if path.name == "latest.json" else "")
remove = c._remove
def half_removed(path):
    (path / "manifest.json").unlink(missing_ok=True)
    die("prune", c.newest_first(path.parent)[0])
    remove(path)
c._remove = half_removed

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Linear(width, vocab_size)

    def forward(self, ids):
        return self.head(self.embed(ids))
"""


@LONG  # tests/run/test_exact.py kills during saves too
def test_a_kill_at_each_step_of_a_save_never_goes_back_before_the_durable_one(tmp_path: Path, zoo_row: Row) -> None:
    (tmp_path / "killer.py").write_text(SAVE_KILLER)
    words = ["train", "--run", "z", *TINY, "--model.family", "killer:Model", "--train.steps", "100"]
    words += ["--save.every_steps", "10", "--save.keep", "2"]
    done = lamp(*words, cwd=tmp_path, timeout=240)
    run = RunDir(tmp_path / "runs" / "z")
    assert done.returncode == 0, done.stdout[-2000:]
    assert len(list(tmp_path.glob("killed-*"))) == 8
    resumed = [event["step"] for event in events_of(run, "resumed")]
    # cut off before the rename the step before is durable; once it is renamed, the step itself
    assert resumed == [10, 20, 30, 40, 50, 70, 80, 90]
    whole = losses_of(run)
    (tmp_path / "runs").rename(tmp_path / "before")
    assert lamp(*words, cwd=tmp_path).returncode == 0
    assert losses_of(RunDir(tmp_path / "runs" / "z")) == whole
    zoo_row("save_kill", "start", "restart", 0)


# ---------------------------------------------------------------- memory

LEAK = """
kept = []

def before(model):
    kept.append(torch.ones({bytes} // 4))
"""


@LONG
def test_a_leak_is_said_with_the_time_that_is_left(tmp_path: Path, zoo_row: Row) -> None:
    family = write_model(tmp_path, LEAK.format(bytes=100_000))
    run = RunDir(tmp_path / "runs" / "z")
    words = f"--train.steps 60000 --save.every_steps 50000 --model.family {family}".split()
    going = start_lamp(*QUICK, *words, cwd=tmp_path)
    wait_for(lambda: verdicts_of(run, "leak_rss"), 90, going)
    going.terminate()
    assert going.wait(20) == 75
    (found,) = verdicts_of(run, "leak_rss")
    assert "out of memory in about" in found["why"]
    zoo_row("leak_rss", "slope", "none", 75)


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of 900 MB; the test skips, visibly, where none can be made."""
    group = Path(f"/sys/fs/cgroup/memory/lamp-zoo-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(900 << 20))
    except OSError as error:
        pytest.skip(f"no memory group can be made here: {error}")
    yield group
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.1)


def test_the_limit_of_a_memory_group_counts(memory_group: Path) -> None:
    code = "from lamplighter.procs.procfs import memory_left; print(memory_left())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        preexec_fn=lambda: (memory_group / "cgroup.procs").write_text(str(os.getpid())),
    )  # fmt: skip
    assert 0 < int(done.stdout) < 900 << 20


@LONG
def test_a_process_killed_for_memory_is_called_so(tmp_path: Path, memory_group: Path, zoo_row: Row) -> None:
    family = write_model(tmp_path, LEAK.format(bytes=30_000_000))
    run = RunDir(tmp_path / "runs" / "z")
    going = start_lamp(
        *QUICK, "--train.steps", "600", "--save.every_steps", "5", "--model.family", family, cwd=tmp_path,
        preexec_fn=lambda: (memory_group / "cgroup.procs").write_text(str(os.getpid())),
    )  # fmt: skip
    wait_for(lambda: verdicts_of(run, "rss_oom"), 90, going)
    going.terminate()
    going.wait(30)
    found = verdicts_of(run, "rss_oom")[0]
    assert "SIGKILL" in found["why"] and "out of memory" in found["why"]
    assert found["action"] == "restart"
    assert any("largest seen" in item for item in found["evidence"])
    zoo_row("rss_oom", "death", "restart", going.returncode)


EATER = """
kept = []
while True:
    kept.append(bytearray(30_000_000))
    print(len(kept), flush=True)
"""


@LONG
def test_a_watched_command_that_is_killed_for_memory_is_called_so(tmp_path: Path, memory_group: Path) -> None:
    (tmp_path / "eat.py").write_text(EATER)
    going = start_lamp(
        "watch", "--run", "z", "--", sys.executable, "eat.py", cwd=tmp_path,
        preexec_fn=lambda: (memory_group / "cgroup.procs").write_text(str(os.getpid())),
    )  # fmt: skip
    assert going.wait(60) == -signal.SIGKILL
    (found,) = verdicts_of(RunDir(tmp_path / "runs" / "z"), "rss_oom")
    assert found["state"] == "dead" and "killed a process for memory" in found["why"]


@LONG
def test_a_frozen_control_group_is_said_and_nothing_is_stopped(tmp_path: Path) -> None:
    group = Path(f"/sys/fs/cgroup/freezer/lamp-zoo-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no group that can be frozen can be made here: {error}")
    script = tmp_path / "steps.py"
    script.write_text(
        "import time\nfor step in range(200):\n    time.sleep(0.05)\n    print('step', step, flush=True)\n"
    )
    run = RunDir(tmp_path / "runs" / "z")
    going = start_lamp("watch", "--on-stuck", "stop", "--run", "z", "--", sys.executable, str(script), cwd=tmp_path)
    try:
        wait_for(lambda: b"step 20" in (tmp_path / "out.txt").read_bytes(), process=going)
        (group / "cgroup.procs").write_text(str(json.loads(run.status.read_text())["child_pid"]))
        (group / "freezer.state").write_text("FROZEN")
        found = wait_for(lambda: verdicts_of(run, "frozen"), 20, going)[0]
        assert found["state"] == "stopped" and "is frozen" in found["why"]
    finally:
        (group / "freezer.state").write_text("THAWED")
    assert going.wait(40) == 0
    wait_for(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_a_stuck_step_that_ignores_a_stop_is_killed_after_its_grace(tmp_path: Path, zoo_row: Row) -> None:
    """TERM, save, KILL: while C code holds the GIL nothing can be saved, and the durable step counts."""
    family = write_model(tmp_path, "ctypes.PyDLL(None).sleep(60 if model.calls == 25 else 0)")
    run = RunDir(tmp_path / "runs" / "z")
    words = [*QUICK, "--model.family", family, "--watch.stop_grace_s", "3", "--save.staged", "false"]
    going = start_lamp(*words, cwd=tmp_path)
    wait_for(lambda: slot_of(run).step == 24, process=going)
    time.sleep(0.5)
    going.terminate()
    assert going.wait(15) == 75
    said = (tmp_path / "out.txt").read_text()
    assert "the process is killed; step 20 is safe" in said
    assert read_json(run.status)["durable_step"] == 20
    zoo_row("stop_ignored", "3 s grace", "stop", 75)


# ---------------------------------------------------------------- clocks, writers, processes that never report

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>
#include <stdlib.h>
static int (*real)(clockid_t, struct timespec *);
int clock_gettime(clockid_t id, struct timespec *t) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int r = real(id, t);
    if (id == CLOCK_REALTIME && access(getenv("JUMP_FILE"), F_OK) == 0) t->tv_sec -= 86400;
    return r;
}
"""


@LONG
def test_a_clock_that_jumps_back_a_day_changes_nothing(tmp_path: Path, zoo_row: Row) -> None:
    (tmp_path / "clock.c").write_text(CLOCK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"], cwd=tmp_path, check=True)
    words = ["train", *TINY, "--train.steps", "3000", "--save.every_steps", "0", "--save.every_s", "1"]
    env = clean_env(LD_PRELOAD=str(tmp_path / "clock.so"), JUMP_FILE=str(tmp_path / "jump"))
    run = RunDir(tmp_path / "runs" / "z")
    going = subprocess.Popen([*LAMP, *words, "--run", "z"], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: slot_of(run).step > 300, process=going)
        saved = slot_of(run).durable_step
        (tmp_path / "jump").touch()
        wait_for(lambda: slot_of(run).durable_step > saved + 200, 20, going)
        assert going.wait(90) == 0
    finally:
        going.kill()
    assert not [verdict for verdict in verdicts_of(run) if verdict["state"] in ("stuck", "dead")]
    assert len(events_of(run, "start")) == 1
    assert sorted(losses_of(run)) == list(range(1, 3001))
    status = read_json(run.status)
    assert status["spent_s"] < 200 and status["step"] == 3000
    zoo_row("clock_jump", "none", "none", 0)


@LONG
def test_a_writer_that_died_in_mid_line_costs_no_record(tmp_path: Path, zoo_row: Row) -> None:
    run = RunDir(tmp_path / "runs" / "z")
    going = start_lamp(*QUICK, "--train.steps", "400", cwd=tmp_path)
    wait_for(lambda: slot_of(run).step > 60, process=going)
    os.kill(going.pid, signal.SIGKILL)
    going.wait()
    wait_for(lambda: not Path(f"/proc/{slot_of(run).pid}").exists(), 5)
    for path in (run.metrics, run.events, run.rank_events(0)):
        with open(path, "ab") as file:
            file.write(b'{"step": 61, "attempt": 1, "t": 17')
    assert lamp(*QUICK, "--train.steps", "400", cwd=tmp_path).returncode == 0
    assert sorted(losses_of(run)) == list(range(1, 401))
    assert lamp(*[w if w != "z" else "y" for w in QUICK], "--train.steps", "400", cwd=tmp_path).returncode == 0
    assert losses_of(RunDir(tmp_path / "runs" / "y")) == losses_of(run)
    assert json.loads(run.events.read_text().splitlines()[-1])["type"] == "stop"
    zoo_row("writer_dies", "start", "none", 0)


@LONG
def test_a_process_that_never_reported_is_looked_at_all_the_same(tmp_path: Path, zoo_row: Row) -> None:
    """It sleeps in somebody's sitecustomize, before a line of ours has run."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, time\nif 'LAMP_ATTEMPT' in os.environ:\n    time.sleep(9)  # the culprit\n"
    )
    env = clean_env(PYTHONPATH=str(tmp_path / "site"))
    done = subprocess.run(
        [*LAMP, *QUICK], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    run = RunDir(tmp_path / "runs" / "z")
    assert done.returncode == 0, done.stdout[-1500:]
    found = verdicts_of(run, "sleep")[0]
    assert found["culprit"]["file"].endswith("sitecustomize.py")
    assert found["culprit"]["line"] == 3
    assert found["since_s"] < 7
    zoo_row("never_reported", float(found["since_s"]), "none", 0)
