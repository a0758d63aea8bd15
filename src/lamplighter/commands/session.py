"""A verb that ends with a result: its child part runs in a process of its own, under watch, in a folder that is thrown away.

In:  the verb, its request, and the config where it has one.
Out: the result on stdout, all other words on stderr, the exit code.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lamplighter.errors import CHILD_LOST
from lamplighter.procs import lock
from lamplighter.rundir import RunDir, write_atomic
from lamplighter.slot import read_slot
from lamplighter.watch.console import Console
from lamplighter.watch.restart_policy import RestartPolicy
from lamplighter.watch.supervisor import Supervisor
from lamplighter.watch.trainer import ChildSpec, Trainer

_NEW_S = 60.0  # a folder that has just been made is not locked yet


def session(verb: str, request: dict[str, Any], interactive: bool = False, config: str | None = None) -> int:
    """Run a verb in a child of its own; its result goes to stdout, our words to stderr, the folder is thrown away."""
    run, held = scratch_folder(verb)
    if config is not None:
        write_atomic(run.config, config, mode=0o600)
    console = Console(2, live=False)
    request["tty"] = sys.stdout.isatty()
    request["readline"] = interactive and request["tty"] and sys.stdin.isatty()
    read_end, write_end = os.pipe() if interactive else (subprocess.DEVNULL, -1)
    if interactive:
        lines = _typed_lines(run) if request["readline"] else sys.stdin
        threading.Thread(target=_forward_lines, args=(write_end, lines), daemon=True).start()
    spec = ChildSpec(
        verb, request, lock_fd=held, keeps_report=False, result_fd=os.dup(1), child_stdin=read_end, grace_s=2.0
    )
    try:
        code = Supervisor(run, Trainer(run, spec, console), RestartPolicy("report")).supervise()
        if code in (1, CHILD_LOST):
            kept = Path(tempfile.mkdtemp(prefix="lamp-crash-")) / "output.log"
            shutil.copy(run.output, kept)
            console.say(f"its output is kept in {kept}")
        return code
    finally:
        console.close()
        shutil.rmtree(run.path, ignore_errors=True)
        os.close(held)


def piped_session(verb: str, request: dict[str, Any], child_stdin: int, result_fd: int, words: list[str]) -> int:
    """The same for a child that is spoken to by pipes of the caller's, and is started again where it dies."""
    run, held = scratch_folder(verb)
    console = Console(2, live=False)
    for line in words:
        console.say(line)
    spec = ChildSpec(
        verb,
        request,
        lock_fd=held,
        keeps_report=False,
        result_fd=result_fd,
        child_stdin=child_stdin,
        grace_s=5.0,
        restarts=True,
    )
    try:
        return Supervisor(run, Trainer(run, spec, console), RestartPolicy("recover")).supervise()
    finally:
        console.close()
        shutil.rmtree(run.path, ignore_errors=True)
        os.close(held)


def scratch_folder(verb: str) -> tuple[RunDir, int]:
    """A folder for this command, and the lock on it; those of commands that were killed before they could remove theirs go first."""
    for left in Path(tempfile.gettempdir()).glob("lamp-*-????????/lock"):
        with contextlib.suppress(OSError):  # of another user, or it is being removed
            about = left.lstat()
            old = time.time() - about.st_mtime > _NEW_S and about.st_uid == os.getuid()
            if old and not lock.is_held(left):
                shutil.rmtree(left.parent, ignore_errors=True)
    run = RunDir(Path(tempfile.mkdtemp(prefix=f"lamp-{verb}-")))
    run.create()
    held = lock.hold(run.lock)
    assert held is not None, "nobody else knows of it"
    return run, held


def _typed_lines(run: RunDir) -> Iterator[str]:
    """Lines with history and editing, each asked for when the child waits for one."""
    import readline  # noqa: F401  input() uses it by itself

    while True:
        while not ((slot := read_slot(run.slot(0))) is not None and slot.prompting):
            time.sleep(0.02)
        try:
            yield input("\n> ") + "\n"
        except EOFError:  # Ctrl+D ends a conversation
            return
        time.sleep(0.05)  # the child takes the line


def _forward_lines(fd: int, lines: Iterable[str]) -> None:
    """What the person types goes to the child, line by line; the end of input ends the talk."""
    with os.fdopen(fd, "w") as pipe:
        for line in lines:
            try:
                pipe.write(line)
                pipe.flush()
            except BrokenPipeError:  # the child has ended
                return
