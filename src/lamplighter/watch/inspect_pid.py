"""`lamp why PID`: one look at a process that was started without us; disturbs nothing, says what it may not see.

In:  a pid.
Out: what it and its children do, in the words of every other verdict.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from lamplighter.errors import DONE, InputMissing
from lamplighter.procs import procfs
from lamplighter.procs.procfs import is_python, look
from lamplighter.procs.stacks import Stacks
from lamplighter.watch import tree_diagnosis
from lamplighter.watch.console import result
from lamplighter.watch.evidence import GroupSample
from lamplighter.watch.process_tree import ProcessTree, Snapshot
from lamplighter.watch.stall import explain, take_all
from lamplighter.watch.status import duration

_BETWEEN_S = 1.0


def inspect_pid(pid: int) -> int:
    """Two looks and two samples of every stack, a second apart, and what they mean."""
    if look(pid).state in "XZ":
        raise InputMissing(f"there is no process {pid}", "it has ended, or never was", "lamp runs lists our own runs")
    with tempfile.TemporaryDirectory(prefix="lamp-why-") as folder:
        tree = ProcessTree([pid], Path(folder))
        snapshots: list[Snapshot] = []
        samples: dict[int, tuple[Stacks, ...]] = {}
        taken: dict[int, Stacks | None] = {}
        for number in range(2):
            snapshots.append(tree.look(closely=True))
            taken = take_all(tree, snapshots[-1].processes, everybody=True)
            samples = {one: (*samples.get(one, ()), stacks) for one, stacks in taken.items() if stacks is not None}
            time.sleep(_BETWEEN_S * (1 - number))
        snapshots.append(tree.look(closely=True))
        tree.close()
    finding = tree_diagnosis.judge(GroupSample(snapshots[0], snapshots[-1], samples, 0.0))
    age = duration(_age_s(pid))
    first = f"process {pid}, running for {age}, looked at for {snapshots[-1].at - snapshots[0].at:.1f} s from outside"
    text = [explain(first, snapshots[-1], taken, finding), *_unseen(snapshots[-1], taken)]
    text.append("next: start it with  lamp watch -- CMD...  and its steps, batches and collectives are counted too")
    result("\n".join(text) + "\n")
    return DONE


def _age_s(pid: int) -> float:
    age_s = procfs.age_s(pid)
    if age_s is None:
        raise InputMissing(f"process {pid} has just ended", "it is not there any more", "lamp runs lists our own runs")
    return age_s


def _unseen(snapshot: Snapshot, taken: dict[int, Stacks | None]) -> list[str]:
    """What we may not look at, and what would let us."""
    lines = []
    blind = [m.pid for m in snapshot.processes if is_python(m.pid) and taken.get(m.pid) is None]
    if blind:
        lines.append(
            f"not seen: the stacks of {', '.join(map(str, blind))} (reading another process needs ptrace);"
            " try: sudo lamp why, or sysctl kernel.yama.ptrace_scope=0, or docker run --cap-add SYS_PTRACE"
        )
    if unknown := procfs.not_known(snapshot.processes[0].look):
        lines.append(unknown)
    elif any(not m.look.wchan.strip("0") and not m.look.syscall for m in snapshot.processes):
        lines.append("not seen: system calls and bytes moved of a process of another user; try: sudo lamp why")
    return lines
