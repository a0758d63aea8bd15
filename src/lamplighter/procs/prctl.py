"""What a process may ask of the kernel about itself and its relatives. Nothing happens where the kernel is not Linux.

In:  pids.
Out: a child that dies with its parent and lets it read its stacks; a parent to whom orphans below it are given.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PDEATHSIG, DUMPABLE, CHILD_SUBREAPER, PTRACER = 1, 4, 36, 0x59616D61


def belong_to(parent: int) -> None:
    """Die with the parent, and let it (and its py-spy) read our stacks. 0: the parent is not known."""
    _prctl(PDEATHSIG, signal.SIGKILL)
    if sys.platform == "linux" and parent and os.getppid() != parent:
        os._exit(1)  # it died before we could ask
    _prctl(PTRACER, parent)


def adopt_orphans() -> None:
    """Processes that lose their parent below us come to us, so that none can get away."""
    _prctl(CHILD_SUBREAPER, 1)


def leave_no_core() -> None:
    """Not dumpable: where we die by the signal of a command, a core file of ours would be mistaken for the command's."""
    _prctl(DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
