"""lamp train --detach by the real command: the terminal goes, the run stays; an error comes back with its code."""

from __future__ import annotations

import os
import pty
import signal
import time
from pathlib import Path

from lamplighter.rundir import RunDir, read_status
from running import LAMP, TINY, clean_env, lamp, wait_for


def _at_a_terminal(words: list[str], cwd: Path) -> tuple[int, int, str]:
    """A shell's stand-in that leads the session of a terminal and runs the command in it; (its pid, the terminal, what was seen)."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execvpe("bash", ["bash", "-c", '"$@"; echo "code $?"; sleep 600', "bash", *words], clean_env())
    seen, deadline = b"", time.monotonic() + 60
    while b"\ncode " not in seen:
        assert time.monotonic() < deadline, seen.decode()
        seen += os.read(terminal, 65536)
    return pid, terminal, seen.decode()


def test_a_detached_run_outlives_its_terminal(tmp_path: Path) -> None:
    words = [*LAMP, "train", "--run", "r", *TINY, "--train.steps", "100000", "--save.every_steps", "1000", "--detach"]
    shell, terminal, seen = _at_a_terminal(words, tmp_path)
    run = RunDir(tmp_path / "runs" / "r")
    assert "code 0" in seen and "look: lamp watch r" in seen and "stop: lamp stop r" in seen
    status = read_status(run)
    assert status["state"] == "running" and f"(process {status['pid']})" in seen
    os.close(terminal)  # the terminal is gone: the kernel hangs up on its session
    assert os.waitstatus_to_exitcode(os.waitpid(shell, 0)[1]) == -signal.SIGHUP
    os.kill(status["pid"], signal.SIGHUP)  # and one that is sent to it alone
    step = read_status(run)["step"] or 0
    wait_for(lambda: (read_status(run)["step"] or 0) > step + 20)
    assert "step" in (run.path / "detached.log").read_text()
    twice = lamp(*words[3:], cwd=tmp_path)
    assert twice.returncode == 69 and "already running" in twice.stdout and "goes on without" not in twice.stdout
    assert "already running" not in (run.path / "detached.log").read_text(), "the folder is not that one's"
    assert lamp("stop", "r", cwd=tmp_path).returncode == 0
    wait_for(lambda: read_status(run).get("exit_code") == 75)
    assert not list((tmp_path / "runs").glob(".r.*.log")), "nothing is left beside the run"


def test_what_keeps_a_detached_run_from_beginning_comes_back(tmp_path: Path) -> None:
    done = lamp("train", "--run", "r", *TINY, "--data.paths", "nowhere.txt", "--detach", cwd=tmp_path)
    assert done.returncode == 66 and "nowhere.txt" in done.stdout and "goes on without" not in done.stdout
