"""A command under `lamp watch`, in a folder of its own; and what a field script has written of its fault.

In:  words to run, flags of the watcher.
Out: the watcher while it runs, and its run; at the end nothing of the command is left, in whatever session it is.
"""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil

from lamplighter.rundir import RunDir
from running import LAMP, clean_env

Stdin = Literal["null", "terminal", "pipe"]


def marks(folder: Path) -> dict[str, list[tuple[float, int]]]:
    """What the script has written: word -> (time, pid) of each."""
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    path = folder / "mark"
    for line in path.read_text().splitlines() if path.exists() else []:
        word, at, pid = line.split()
        found[word].append((float(at), int(pid)))
    return found


@contextlib.contextmanager
def watching(
    words: list[str], folder: Path, *flags: str, stdin: Stdin = "null", **env: str
) -> Iterator[tuple[subprocess.Popen[bytes], RunDir]]:
    """Started with its output in folder/out.txt; ended, if it has not, with the block."""
    mark = str(folder / "mark")
    with open(folder / "out.txt", "wb") as out, _stdin(stdin) as source:
        going = subprocess.Popen(
            [*LAMP, "watch", "--run", "w", *flags, "--", *words],
            cwd=folder, env=clean_env(LAMP_FIELD_MARK=mark, OMP_NUM_THREADS="1", **env),
            stdout=out, stderr=out, stdin=source, start_new_session=True,
        )  # fmt: skip
        try:
            yield going, RunDir(folder / "runs" / "w")
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(going.pid, signal.SIGKILL)
            going.wait()
            _end_those_with(mark)


@contextlib.contextmanager
def _stdin(kind: Stdin) -> Iterator[int]:
    """Nothing, a terminal at which nobody types, or a pipe into which nobody writes."""
    if kind == "null":
        yield subprocess.DEVNULL
        return
    ours, theirs = pty.openpty() if kind == "terminal" else os.pipe()[::-1]
    try:
        yield theirs
    finally:
        os.close(ours)
        os.close(theirs)


def _end_those_with(word: str) -> None:
    """Ranks and workers in sessions of their own, also those that they start meanwhile: found by what their environment says."""
    deadline, found = time.monotonic() + 10, True
    while found:
        assert time.monotonic() < deadline, f"processes with {word} in their environment cannot be ended"
        found = False
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended, or is not ours
                if word in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    found = True
