"""What a process may ask of the kernel, and of its own allocator, about itself and its relatives. Nothing happens where there is no Linux.

In:  pids.
Out: a child that dies with its parent and lets it read its stacks; a parent to whom orphans below it are given; memory given back.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PDEATHSIG, DUMPABLE, CHILD_SUBREAPER, PTRACER = 1, 4, 36, 0x59616D61
_M_MMAP_THRESHOLD = -3  # of mallopt(3)


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


def give_back_large_blocks(least_bytes: int = 1 << 17) -> None:
    """What is as large as this goes back to the kernel when it is freed.

    glibc raises the limit to 32 MB as soon as one such block is freed; from then on columns that come and go lie between
    others that stay, and a server that reads run after run grows.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # musl has none, and gives back by itself
        mallopt(_M_MMAP_THRESHOLD, least_bytes)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
