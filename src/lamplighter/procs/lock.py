"""One lock per file, held by a descriptor and let go when the last copy of it is closed, even by SIGKILL.

In:  a path, or a descriptor that is open already.
Out: whether the lock was got, or is held by somebody. Nothing waits here; who wants to wait asks again and says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from lamplighter.read_back import open_regular


def open_lock(path: Path) -> int:
    """A descriptor for a lock file, made where it is not there; OSError where that may not be."""
    return open_regular(path, os.O_RDWR | os.O_CREAT)


def try_lock(fd: int, shared: bool = False, tries: int = 1) -> bool:
    """Readers hold a lock for an instant when they look whether it is held: several tries outlast them."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    for number in range(tries):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.04 if number + 1 < tries else 0)
        else:
            return True
    return False


def hold(path: Path) -> int | None:
    """A descriptor that holds the lock of a file, or None where another process does.

    Its holder may remove the file before letting go: who had opened it before that holds the lock of a file that is gone, and
    tries the new one.
    """
    while True:
        fd = open_lock(path)
        if not try_lock(fd):
            os.close(fd)
            return None
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def is_held(path: Path) -> bool:
    """Whether any process holds the lock of this file; a file that is not there is held by nobody."""
    try:
        fd = open_regular(path)
    except OSError:  # nobody has ever locked it, or it is no file that could be locked
        return False
    try:
        return not try_lock(fd, shared=True)
    finally:
        os.close(fd)


def keep_to_ourselves(descriptors: list[int]) -> None:
    """The run's lock and its like are for this process and nothing that it starts: a process that the user's code leaves behind
    would keep the run locked, the asker's pipe open and the memory of the state taken."""
    files = {fd: os.fstat(fd) for fd in descriptors}

    def let_go() -> None:
        for fd, file in files.items():
            with contextlib.suppress(OSError):  # the user's code has closed it already
                if os.path.samestat(os.fstat(fd), file):
                    os.close(fd)

    for fd in descriptors:
        os.set_inheritable(fd, False)
    os.register_at_fork(after_in_child=let_go)
