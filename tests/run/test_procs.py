"""procs: a function in a child that hangs, dies, raises or eats; /proc and psutil agree; locks; a run without /proc."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_verdict import moment, stack_at

import running
from lamplighter.procs import by_psutil, child, lock, procfs, stacks
from lamplighter.rundir import RunDir, read_json, read_lines
from lamplighter.watch.evidence import GroupSample
from lamplighter.watch.process_tree import Process, Snapshot
from lamplighter.watch.tree_diagnosis import judge
from running import TINY, clean_env, lamp, start_lamp, wait_for

FUNCTIONS = """
import os, signal, subprocess, sys, time

def adds(request, say):
    for number in request["numbers"]:
        say(number=number + 1)
    print(sys.stdin.read() + "printed")

def raises(request, say):
    {}["a key"]

def hangs(request, say):
    say(now="at the door")
    time.sleep(1000)  # here

def eats(request, say):
    hoard = []
    while True:
        hoard.append(bytearray(b"x") * (8 << 20))
        time.sleep(0.01)

def starts_others(request, say):
    for alone in (False, True):
        one = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=alone)
        say(pid=one.pid)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "odd_functions.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return "odd_functions:"


# ---------------------------------------------------------------- a function in a child


def test_a_child_gives_its_records_back_and_finds_nothing_on_its_standard_input(functions: str) -> None:
    heard: list[dict[str, Any]] = []
    done = child.run(functions + "adds", {"numbers": [1, 2]}, on_record=heard.append)
    assert heard == done.records == [{"number": 2}, {"number": 3}]
    assert (done.code, done.done, done.error, done.last_line) == (0, True, "", "printed")


def test_an_error_comes_back_with_its_line(functions: str) -> None:
    done = child.run(functions + "raises", {})
    assert done.error == "KeyError: 'a key'" and not done.done
    found = stacks.line_to_name(done.frames)
    assert found is not None and found.text == '{}["a key"]'


def test_a_child_that_hangs_is_ended_at_its_deadline_and_its_line_is_known(functions: str) -> None:
    done = child.run(functions + "hangs", {}, deadline_s=1.0)
    assert (done.ended_for, done.code) == ("deadline", -signal.SIGKILL)
    found = stacks.line_to_name(done.stacks[done.pid].main)
    assert found is not None and found.text.endswith("# here")
    stuck = child.run(functions + "hangs", {}, is_stuck=lambda records: records[-1:] == [{"now": "at the door"}])
    assert stuck.ended_for == "stuck" and not psutil.pid_exists(stuck.pid)


def test_a_child_that_takes_too_much_memory_is_ended(functions: str) -> None:
    done = child.run(functions + "eats", {}, memory_bytes=200 << 20)
    assert done.ended_for == "memory" and done.peak_bytes > 200 << 20


def test_what_a_child_leaves_behind_in_its_session_is_ended_with_it(functions: str) -> None:
    done = child.run(functions + "starts_others", {})
    inside, outside = (record["pid"] for record in done.records)
    assert done.code == -signal.SIGKILL and not done.done
    wait_for(lambda: procfs.look(inside).state in "XZ", 10)
    with contextlib.suppress(ProcessLookupError):  # ended too, where this process adopts orphans; else not ours to find
        os.kill(outside, signal.SIGKILL)


# ---------------------------------------------------------------- looking at processes


def test_psutil_says_the_same_as_proc_where_both_can_know() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as sleeper:
        try:
            wait_for(lambda: procfs.look(sleeper.pid).state == "S")
            ours, theirs = procfs.look(sleeper.pid), by_psutil.look(sleeper.pid)
            assert (ours.state, ours.threads, ours.name) == (theirs[0], theirs[3], theirs[4])
            assert abs(ours.rss_bytes - theirs[2]) < 1 << 22
            assert (
                by_psutil.parents(os.getpid())[sleeper.pid] == procfs.parents(os.getpid())[sleeper.pid] == os.getpid()
            )
            assert by_psutil.is_python(sleeper.pid) and procfs.is_python(sleeper.pid)
            assert by_psutil.pid_start(sleeper.pid) and by_psutil.exists(sleeper.pid)
            assert abs((by_psutil.age_s(sleeper.pid) or 0) - (procfs.age_s(sleeper.pid) or 0)) < 2
        finally:
            sleeper.kill()
    assert by_psutil.look(sleeper.pid)[0] == procfs.look(sleeper.pid).state == "X"
    assert by_psutil.pid_start(sleeper.pid) == procfs.pid_start(sleeper.pid) == 0
    assert by_psutil.age_s(sleeper.pid) is procfs.age_s(sleeper.pid) is None
    resident, peak = by_psutil.own_memory()[0], by_psutil.own_peak()
    assert abs(resident - procfs.own_memory()[0]) < 1 << 25 and peak > 0.9 * procfs.own_peak() > 0


def test_system_calls_have_names_on_every_machine() -> None:
    for table in (procfs.SYSCALLS_X86_64, procfs.SYSCALLS_GENERIC):
        assert set(table.values()) == {"read", "write", "recvfrom", "futex", "nanosleep", "clock_nanosleep"}
    assert procfs.SYSCALLS_GENERIC["98"] == procfs.SYSCALLS_X86_64["202"] == procfs.FUTEX


def test_a_verdict_without_proc_says_what_cannot_be_known() -> None:
    def blind(one: Snapshot) -> Snapshot:
        main = procfs.ProcessLook(7, "S", 0.0, 10**8, 1, "python", read_bytes=None, written_bytes=None, disk_bytes=None)
        return replace(one, processes=(Process(main, one.processes[0].slot),))

    found = judge(GroupSample(blind(moment(2.0)), blind(moment(4.0)), {7: (stack_at(__file__, 1),)}, 0.0))
    assert found is not None and found.verdict.state == "waiting" and not found.provable
    assert any(word.startswith("not known on this system: what it waits in") for word in found.verdict.evidence)


def test_a_lock_is_held_by_one_and_seen_by_others(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not lock.is_held(path)
    mine, other = lock.open_lock(path), lock.open_lock(path)
    assert lock.try_lock(mine) and not lock.try_lock(other, tries=2) and lock.is_held(path)
    os.close(mine)
    assert not lock.is_held(path) and lock.try_lock(other, shared=True) and not lock.is_held(path)
    os.close(other)


def test_a_lock_whose_file_was_removed_is_held_by_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    first = lock.hold(path)
    assert first is not None and lock.hold(path) is None
    real = lock.try_lock

    def the_first_one_ends(fd: int) -> bool:
        """Between the opening and the locking of the second one; a third one comes before it has looked again."""
        monkeypatch.setattr(lock, "try_lock", real)
        path.unlink()
        os.close(first)
        third.append(lock.hold(path))
        return real(fd)

    third: list[int | None] = []
    monkeypatch.setattr(lock, "try_lock", the_first_one_ends)
    assert lock.hold(path) is None and third[0] is not None
    os.close(third[0])
    again = lock.hold(path)
    assert again is not None and lock.is_held(path)
    os.close(again)


# ---------------------------------------------------------------- a run on a system without /proc


def test_a_run_trains_is_listed_is_killed_and_resumes_without_proc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "clean_env", lambda **extra: clean_env(LAMP_PROCS="psutil", **extra))
    words = ["train", "--run", "r", *TINY, "--train.steps", "800", "--save.every_steps", "50", "--save.every_s", "0"]
    run = RunDir(tmp_path / "runs" / "r")
    going = start_lamp(*words, cwd=tmp_path)
    wait_for(lambda: (run.checkpoints / "checkpoint-50").exists(), 90, going)
    status = read_json(run.status)
    assert status["state"] == "running" and status["pid_start"] == by_psutil.pid_start(going.pid)
    listed = lamp("runs", "--json", cwd=tmp_path)
    assert json.loads(listed.stdout)[0]["state"] == "running", listed.stdout
    family = psutil.Process(going.pid).children(recursive=True)
    going.kill()
    going.wait()
    wait_for(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family), 20)
    again = lamp(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    last = list(read_lines(run.metrics))[-1]
    assert last["step"] == 800 and "resum" in again.stdout


def test_a_pool_that_is_given_up_leaves_no_worker_and_no_semaphore_behind(tmp_path: Path) -> None:
    """Its process leaves at once after a refusal: Python then said "5 leaked semaphore objects" to the user."""
    script = (
        "import multiprocessing, os\n"
        "from lamplighter.procs import pool\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        "        print(dict(pool.each(int, ['1', 'x', '3', '4', '5', '6'], 2)))\n"
        "    except ValueError:\n"
        "        print(len(multiprocessing.active_children()), flush=True)\n"
        "    os._exit(65)\n"
    )
    (tmp_path / "refuses.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "refuses.py"], cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (65, "0\n", "")


YIELDS = """
import os, sys, time
from lamplighter.procs import procfs
os.sched_setaffinity(0, {int(sys.argv[1])})
if sys.argv[2] == "yields":
    procfs.yield_cores(10)
print(os.nice(0), flush=True)
end = time.monotonic() + 2.5
while time.monotonic() < end:
    pass
print(time.process_time(), flush=True)
"""


def test_who_yields_leaves_a_core_to_another_session() -> None:
    """Each in a session of its own, as a training and an evaluation are: there niceness alone counts for nothing."""
    core = str(min(os.sched_getaffinity(0)))
    both = [subprocess.Popen([sys.executable, "-c", YIELDS, core, kind], stdout=subprocess.PIPE, text=True, start_new_session=True, env=clean_env())
            for kind in ("yields", "works")]  # fmt: skip
    (yields_nice, yields_s), (works_nice, works_s) = [
        map(float, one.communicate(timeout=60)[0].split()) for one in both
    ]
    assert yields_nice == works_nice + 10
    assert yields_s < 0.5 * works_s, (yields_s, works_s)
