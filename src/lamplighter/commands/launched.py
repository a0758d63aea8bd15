"""A training that torchrun, srun or their like have started once for each device: one of the processes leads.

In:  what the launcher has put into the environment.
Out: how many ranks it wants; the processes beside the first wait for its end and leave with its exit code.

Our own parent starts and watches the ranks, so that there is one voice and one folder, and so that a rank that dies is
restarted from the durable step instead of ending everything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from lamplighter.errors import CRASHED, UsageError
from lamplighter.rundir import RunDir, read_status

_LOOK_S = 0.5
_NAMES = {  # of the launcher: its rank on this machine, how many on this machine, how many in all
    "torchrun": ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    "srun": ("SLURM_LOCALID", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS"),
}


@dataclass(frozen=True)
class Launch:
    """One process of several that were started for the same command."""

    by: str
    local_rank: int
    ranks: int

    @property
    def leads(self) -> bool:
        return self.local_rank == 0


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """None where this process was started alone."""
    for by, (rank, here, world) in _NAMES.items():
        started = environ.get(world, "")
        if rank not in environ or not started.isdecimal() or int(started) < 2:
            continue
        if (beside := environ.get(here, started)) != started:
            raise UsageError(
                f"{by} has started {started} processes on several machines ({here} is {beside})",
                "the ranks of a run are processes of one machine: several nodes are not there yet",
                "one machine; a script of your own: lamp watch -- torchrun ... script.py",
            )
        return Launch(by, int(environ[rank]), int(started))
    return None


def follow(run: RunDir) -> int:
    """Wait for the process that leads; its exit code. Where it is killed, the launcher ends this one too."""
    began = time.time()
    while True:
        try:
            fresh = run.status.stat().st_mtime >= began
        except OSError:  # it has not begun yet
            fresh = False
        code = read_status(run).get("exit_code") if fresh else None
        if code is not None:
            return int(code) if isinstance(code, int | float) else CRASHED
        if os.getppid() == 1:  # the launcher is gone
            return CRASHED
        time.sleep(_LOOK_S)
