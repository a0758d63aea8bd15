"""Checkpoints that somebody reads: a shared lock on manifest.json for as long as that lasts, which pruning respects.

In:  the folder of a checkpoint.
Out: whether it is ours to read; whether a checkpoint is read by any process. A lock ends with its process, also by SIGKILL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lamplighter.procs import lock
from lamplighter.read_back import open_regular

_HELD: dict[Path, int] = {}  # by this process: descriptors, until they are let go


def hold(folder: Path) -> bool:
    """Keep a checkpoint from being pruned, until `let_go` or the end of the process; False where it is gone already."""
    if is_ours(folder):
        return True
    let_go(folder)
    try:
        fd = open_regular(folder / "manifest.json")
    except OSError:  # no save that finished, or pruned meanwhile
        return False
    if not lock.try_lock(fd, shared=True) or not os.fstat(fd).st_nlink:  # it is being removed
        os.close(fd)
        return False
    _HELD[folder] = fd
    return True


def is_ours(folder: Path) -> bool:
    """Whether this process holds it, and it is still there."""
    return folder in _HELD and os.fstat(_HELD[folder]).st_nlink > 0


def let_go(folder: Path) -> None:
    """It may be pruned."""
    if (fd := _HELD.pop(folder, None)) is not None:
        os.close(fd)


def remove_unless_read(folder: Path, remove: Callable[[Path], None]) -> bool:
    """Remove a checkpoint that nobody reads; False where somebody does. Who comes meanwhile finds it gone."""
    try:
        fd = open_regular(folder / "manifest.json")
    except OSError:  # without a manifest nobody can read it
        remove(folder)
        return True
    try:
        alone = lock.try_lock(fd)
        if alone:
            remove(folder)
        return alone
    finally:
        os.close(fd)
