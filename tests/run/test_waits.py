"""What real processes wait for, and who holds it, as the kernel tells; a process that runs already is watched from outside."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamplighter.procs.waits import ThreadWait, look_at_waits
from lamplighter.rundir import RunDir, read_json
from running import STARTED, lamp, line_in, start_lamp, verdicts_of, wait_for

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def call(code: str) -> subprocess.Popen[bytes]:
        one = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.PIPE)
        STARTED.append(one)
        started.append(one)
        return one

    yield call
    for one in started:
        one.kill()
        one.wait()
        assert one.stdin is not None
        one.stdin.close()


def main_wait(pid: int) -> ThreadWait:
    return next((wait for wait in look_at_waits([pid]).threads[pid] if wait.tid == pid), ThreadWait(pid))


SELF = "its own threads"
WAITS = {
    "a lock": ("import threading; l = threading.Lock(); l.acquire(); l.acquire()", "lock", SELF),
    "a lock between processes": (
        "import multiprocessing as m; l = m.Lock(); l.acquire(); l.acquire()",
        "shared lock",
        SELF,
    ),
    "a semaphore that anybody may open": (
        "import ctypes, os; c = ctypes.CDLL(None); c.sem_open.restype = ctypes.c_void_p; c.sem_wait.argtypes = [ctypes.c_void_p]; "
        "n = f'/lamp-{os.getpid()}'.encode(); s = c.sem_open(n, os.O_CREAT, 0o600, 0); c.sem_wait(s)",
        "shared lock",
        "anybody",
    ),
    "a pipe": ("import os; r, w = os.pipe(); os.read(r, 1)", "pipe", SELF),
    "a pipe, polled": ("import os, select; r, w = os.pipe(); select.select([r], [], [])", "pipe", SELF),
    "a local socket": ("import socket; a, b = socket.socketpair(); a.recv(1)", "socket", SELF),
    "a connection": (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname()); c.recv(1)",
        "socket",
        SELF,
    ),
    "an event loop": ("import asyncio; asyncio.run(asyncio.Event().wait())", "socket", SELF),
    "a listening socket": ("import socket; socket.create_server(('127.0.0.1', 0)).accept()", "listen", "anybody"),
    "a FIFO": ("import os; os.mkfifo('f'); open('f')", "fifo", "anybody"),
    "the program on a terminal": ("import os, pty; m, s = pty.openpty(); os.read(m, 1)", "pty", "anybody"),
    "a signal": ("import signal; signal.pause()", "signal", "anybody"),
    "stdin": ("input()", "pipe", "us"),
    "a timer": ("import time; time.sleep(60)", "timer", "a timer"),
    "a lock with a timeout": (
        "import threading; l = threading.Lock(); l.acquire(); l.acquire(timeout=60)",
        "lock",
        "a timer",
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_a_thread_waits_for(name: str, start: Start) -> None:
    code, kind, ends = WAITS[name]
    pid = start(code).pid
    wait = wait_for(lambda: (seen := main_wait(pid)).kind == kind and seen)
    assert wait.timed == (ends == "a timer") and wait.anybody == (ends == "anybody")
    assert wait.peers == {SELF: (pid,), "us": (os.getpid(),)}.get(ends, wait.peers)


def test_file_locks_and_their_holders(start: Start, tmp_path: Path) -> None:
    with open(tmp_path / "x.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waits = start("import fcntl; f = open('x.lock'); fcntl.flock(f, fcntl.LOCK_EX)").pid
        wait = wait_for(lambda: (seen := main_wait(waits)).kind == "file lock" and seen)
        assert (wait.on, wait.peers, wait.pid) == (str(tmp_path / "x.lock"), (os.getpid(),), os.getpid())


def test_a_database_that_somebody_has_locked(start: Start, tmp_path: Path) -> None:
    """It tries again and again, so no system call says it; the table of locks does."""
    holder = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    holder.execute("begin exclusive")
    tries = start("import sqlite3; sqlite3.connect('x.db', timeout=60).execute('begin exclusive')").pid
    locked = wait_for(lambda: look_at_waits([tries]).locked[tries])
    assert (locked[0].path, locked[0].pid) == (str(tmp_path / "x.db"), os.getpid())
    holder.close()


def test_a_lock_that_is_inherited_is_no_lock_of_others(start: Start, tmp_path: Path) -> None:
    """A child shares the descriptor with whoever took the lock; one that opens the file itself does not have it."""
    with open(tmp_path / "x.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code = f"import time; time.sleep(60 + 0 * {file.fileno()})"
        heir = subprocess.Popen([sys.executable, "-c", code], pass_fds=[file.fileno()])
        STARTED.append(heir)
        tries = start("f = open('x.lock'); import time; time.sleep(60)").pid
        wait_for(lambda: look_at_waits([tries]).locked[tries])
        assert look_at_waits([heir.pid]).locked[heir.pid] == ()
        path = str(tmp_path / "x.lock")
        other = start("import time; time.sleep(60)").pid
        assert [lock.path for lock in look_at_waits([other], [path]).locked[other]] == [path]
        heir.kill()
        heir.wait()


def test_a_lock_is_held_by_everybody_who_has_its_descriptor(tmp_path: Path) -> None:
    """The table of locks names who took it; a process that has inherited the descriptor may let go as well."""
    code = (
        "import fcntl, os, subprocess, sys, time; f = open('x.lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
        "heir = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], pass_fds=[f.fileno()]);"
        "print(heir.pid, flush=True); f.close(); g = open('x.lock'); fcntl.flock(g, fcntl.LOCK_EX)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as going:
        assert going.stdout is not None
        heir = int(going.stdout.readline())
        try:
            wait = wait_for(lambda: (seen := main_wait(going.pid)).kind == "file lock" and seen)
            assert heir in wait.peers, wait
        finally:
            os.kill(heir, signal.SIGKILL)
            going.kill()


def test_a_child_is_waited_for_by_its_number(start: Start) -> None:
    pid = start("import subprocess; subprocess.Popen(['sleep', '60']).wait()").pid
    wait = wait_for(lambda: (seen := main_wait(pid)).kind == "child" and seen)
    assert wait.pid > 0 and wait.peers == (wait.pid,) and "sleep" in wait.on
    os.kill(wait.pid, signal.SIGKILL)


HANG = """\
import queue

def train():
    queue.Queue().get()  # the line

train()
"""


def test_a_process_that_runs_already_is_watched_and_left(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HANG)
    with subprocess.Popen([sys.executable, str(script)], cwd=tmp_path) as going, contextlib.ExitStack() as after:
        after.callback(going.kill)  # also where an assertion fails: it would be waited for
        watcher = start_lamp("watch", str(going.pid), cwd=tmp_path)
        run = RunDir(tmp_path / "runs" / f"pid-{going.pid}")
        found = wait_for(lambda: [one for one in verdicts_of(run) if one["state"] == "stuck"], process=watcher)[0]
        assert found["culprit"]["line"] == line_in(script, "# the line")
        assert found["provable"] and "nobody is left who could end it" in found["why"]
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(10) == 0 and going.poll() is None
        assert read_json(run.status)["state"] == "left"
    assert lamp("watch", "999999999", cwd=tmp_path).returncode == 66
