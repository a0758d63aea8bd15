"""lamp train --detach: the same command in a session of its own, which goes on when the terminal is gone.

In:  the words of a command that trains, without --detach; its run folder.
Out: a process that no hang-up reaches, its output in RUN/detached.log; this one returns when the run has begun, or with the exit code
     of one that has not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from lamplighter import first_words
from lamplighter.commands import write
from lamplighter.errors import DONE, UsageError
from lamplighter.procs.signals import left_by_ctrl_c
from lamplighter.rundir import RunDir, Tail, cannot_write, read_holder, read_status

_LOOK_S = 0.1
_SETTLE_S = (
    10.0  # from the first status on: data that is missing or a plan that refuses is said here, to whoever still looks
)
LOG = "detached.log"


def start(verb: str, words: list[str], run: RunDir, environ: Mapping[str, str]) -> int:
    """Start it, show what it says until it runs, and leave it alone."""
    if any(name in environ for name in ("LOCAL_RANK", "SLURM_LOCALID")):
        raise UsageError(
            "--detach is given under a launcher",
            "torchrun and srun end what they have started when it lets go of them",
            "leave --detach out: the job itself needs no terminal",
        )
    if hasattr(signal, "SIGHUP"):
        signal.signal(
            signal.SIGHUP, signal.SIG_IGN
        )  # handed on to the run, as nohup does; a terminal may close at any moment
    log = (
        run.path.parent / f".{run.name}.{os.getpid()}.log"
    )  # the folder itself may be moved aside first (--resume never)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        process = _spawn([verb, *words], log)
    except OSError as error:
        raise cannot_write(log, error) from error
    first_words.end()
    try:
        code = _see_it_begin(process, run, log)
    finally:
        kept = _keep(log, run, process.pid)
    if code is not None:
        return code
    write(1, f"{run.name} goes on without this terminal (process {process.pid}): {run.path}, its words in {kept}\n")
    write(1, f"look: lamp watch {run.address}\nstop: lamp stop {run.address}\n")
    return DONE


def _spawn(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "wb", opener=lambda name, flags: os.open(name, flags | os.O_APPEND, 0o600)) as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "lamplighter", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _see_it_begin(process: subprocess.Popen[bytes], run: RunDir, log: Path) -> int | None:
    """None once it runs; else the exit code that it has ended with. All that it says meanwhile is said here."""
    tail, begun, left = Tail(log), 0.0, left_by_ctrl_c()
    while True:
        code = process.poll()
        for line in tail.lines():
            write(1, f"{line}\n")
        if code is not None:
            return code
        status = read_status(run) if read_holder(run.lock).get("pid") == process.pid else {}
        if status.get("pid") == process.pid:
            begun = begun or time.monotonic()
            trains = bool(status.get("step")) or str(status.get("phase")).startswith("train")
            if trains or time.monotonic() - begun > _SETTLE_S:
                return None
        if left.wait(_LOOK_S):
            return None


def _keep(log: Path, run: RunDir, pid: int) -> Path:
    """Into the run's folder, where console.log has the words of all attempts; a file that is moved is written on."""
    try:
        if read_holder(run.lock).get("pid") == pid:  # else the folder is not its own: another one may write there
            log.replace(run.path / LOG)
    finally:
        log.unlink(missing_ok=True)
    return run.path / LOG
