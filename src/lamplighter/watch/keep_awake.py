"""Keep the machine awake while a run lasts, where the system offers it: systemd-inhibit on Linux, caffeinate on macOS.

In:  the process whose end ends it.
Out: a KeptAwake, or None where nothing is offered. The helper waits for that process by itself, so that it goes also
     when the process is killed; `end` only makes it sooner.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass

_LOOK_S = 0.2  # a system without a session bus refuses at once


@dataclass(frozen=True)
class KeptAwake:
    process: subprocess.Popen[bytes]
    words: str

    def end(self) -> None:
        """Let the machine sleep again."""
        with contextlib.suppress(OSError):  # it has ended by itself
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it goes when this process does
            self.process.wait(1.0)


def command_for(pid: int) -> tuple[list[str], str] | None:
    """What to start, and in which words it is said; None where there is no such tool."""
    if tool := shutil.which("caffeinate"):
        return [tool, "-i", "-w", str(pid)], "caffeinate"
    if (tool := shutil.which("systemd-inhibit")) and (waits := shutil.which("tail")):
        about = ["--what=sleep:idle", "--who=lamp", "--why=a training run", "--mode=block"]
        return [tool, *about, waits, f"--pid={pid}", "-f", os.devnull], "systemd-inhibit"
    return None


def begin(pid: int | None = None) -> tuple[KeptAwake | None, str]:
    """Started for this process; in words what is done, or why not; no word where the system has nothing to offer."""
    found = command_for(pid or os.getpid())
    if found is None:
        return None, ""
    command, name = found
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        return None, f"the machine may fall asleep: {name} cannot be started ({error.strerror})"
    try:
        process.wait(_LOOK_S)
    except subprocess.TimeoutExpired:
        words = f"the machine is kept awake until the run ends ({name})"
        return KeptAwake(process, words), words
    said = process.stderr.read().decode("utf-8", "replace").strip().splitlines() if process.stderr else []
    if said and "connect to bus" in said[-1]:  # a container or a bare server: nothing there would put it to sleep
        return None, ""
    return None, f"the machine may fall asleep: {name} refused ({said[-1][:120] if said else process.returncode})"
