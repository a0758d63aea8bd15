"""A training that torchrun, srun or their like have started once for each device or each node: one process of a node leads.

In:  what the launcher has put into the environment.
Out: how many ranks it wants here and on which of how many nodes this is; the processes beside the first of a node wait for its end
     and leave with its exit code.

Our own parent starts and watches the ranks of its node, so that there is one voice and one folder, and so that a rank that dies
is restarted from the durable step instead of ending everything.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from lamplighter.errors import CRASHED, UsageError
from lamplighter.rundir import RunDir, is_running, read_status

_LOOK_S = 0.5
_PORTS = 1000  # jobs of one machine must not meet at the same one
FIRST_PORT = 29511
TORCHRUN, SRUN = LAUNCHERS = ("torchrun", "srun")


@dataclass(frozen=True)
class Launch:
    """One process of several that were started for the same command."""

    by: str
    local_rank: int
    ranks: int | None  # of this node; None: the launcher has started one process for the whole node
    nodes: int = 1
    node: int = 0
    host: str = ""  # of node 0
    port: int = 0

    @property
    def leads(self) -> bool:
        return self.local_rank == 0


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """None where this process was started alone."""
    return _by_torchrun(environ) or _by_srun(environ)


def _by_torchrun(environ: Mapping[str, str]) -> Launch | None:
    world, here = _number(environ, "WORLD_SIZE"), _number(environ, "LOCAL_WORLD_SIZE")
    if "LOCAL_RANK" not in environ or world < 2:
        return None
    here = here or world
    if world % here:
        raise UsageError(
            f"torchrun has started {world} processes, {here} of them here",
            "every node needs equally many",
            "--nproc-per-node",
        )
    nodes = world // here
    node = _number(environ, "GROUP_RANK") if nodes > 1 else 0
    port = _number(environ, "MASTER_PORT")  # torchrun's own store is there
    return Launch(
        TORCHRUN,
        int(environ["LOCAL_RANK"]),
        here,
        nodes,
        node,
        environ.get("MASTER_ADDR", ""),
        port + 1 if port else FIRST_PORT,
    )


def _by_srun(environ: Mapping[str, str]) -> Launch | None:
    tasks, nodes = (
        _number(environ, "SLURM_NTASKS"),
        _number(environ, "SLURM_STEP_NUM_NODES") or _number(environ, "SLURM_NNODES"),
    )
    if "SLURM_LOCALID" not in environ or tasks < 2:
        return None
    nodes = max(1, nodes)
    node = _number(environ, "SLURM_NODEID") if nodes > 1 else 0
    told = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", str(tasks))
    each = tasks_of_nodes(told)
    here = each[node] if node < len(each) else max(1, tasks // nodes)
    names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    port = FIRST_PORT + _number(environ, "SLURM_JOB_ID") % _PORTS
    return Launch(SRUN, int(environ["SLURM_LOCALID"]), here if here > 1 else None, nodes, node, first_host(names), port)


def _number(environ: Mapping[str, str], name: str) -> int:
    found = environ.get(name, "")
    return int(found) if found.isdecimal() else 0


def tasks_of_nodes(told: str) -> list[int]:
    """SLURM's way of saying it: 2(x3),1 is three nodes with 2 tasks and one with 1."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", told):
        found += [int(count)] * int(times or 1)
    return found


def first_host(names: str) -> str:
    """The first of SLURM's list of hosts: gpu[07-09,12],cpu3 begins with gpu07."""
    first = re.match(r"([^,\[]*)(?:\[([0-9]+)[^\]]*\]([^,]*))?", names)
    return f"{first[1]}{first[2] or ''}{first[3] or ''}" if first else ""


def follow(run: RunDir) -> int:
    """Wait for the process that leads; its exit code. Where it is killed, the launcher ends this one too."""
    began = time.time()
    while True:
        try:
            fresh = run.status.stat().st_mtime >= began
        except OSError:  # it has not begun yet
            fresh = False
        code = read_status(run).get("exit_code") if fresh else None
        if code is not None and not is_running(run):  # it may still copy its last checkpoint elsewhere
            return int(code) if isinstance(code, int | float) else CRASHED
        if os.getppid() == 1:  # the launcher is gone
            return CRASHED
        time.sleep(_LOOK_S)
