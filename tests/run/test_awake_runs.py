"""The machine is kept awake while a run lasts, and may sleep again after every end, SIGKILL included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lamplighter.watch import keep_awake
from running import wait_for

STAND_IN = """#!{python}
import os, sys
open({mark!r}, "w").write(str(os.getpid()))
words = [word for word in sys.argv[1:] if not word.startswith("--") or word.startswith("--pid")]
os.execvp(words[0], words)
"""


@pytest.fixture
def inhibit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemd-inhibit that runs its command, as the real one does, and notes its own process."""
    mark, tool = tmp_path / "mark", tmp_path / "bin" / "systemd-inhibit"
    tool.parent.mkdir()
    tool.write_text(STAND_IN.format(python=sys.executable, mark=str(mark)))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    return mark


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_it_ends_when_told(inhibit: Path) -> None:
    awake, words = keep_awake.begin()
    assert awake is not None and "kept awake" in words
    wait_for(inhibit.exists)
    awake.end()
    assert awake.process.poll() is not None


def test_it_ends_with_a_process_that_is_killed(inhibit: Path) -> None:
    code = "import time; from lamplighter.watch import keep_awake; keep_awake.begin(); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: inhibit.exists() and inhibit.read_text().isdecimal())
    helper = int(inhibit.read_text())
    assert alive(helper)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    wait_for(lambda: not alive(helper))


def test_a_refusal_is_said_and_nothing_is_said_where_nothing_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "systemd-inhibit"
    tool.write_text("#!/bin/sh\necho 'Access denied' >&2; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    awake, words = keep_awake.begin()
    assert awake is None and "may fall asleep" in words and "Access denied" in words
    tool.write_text("#!/bin/sh\necho 'Failed to connect to bus: No such file' >&2; exit 1\n")
    assert keep_awake.begin() == (None, ""), "nothing puts a container to sleep"
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert keep_awake.begin() == (None, "")
