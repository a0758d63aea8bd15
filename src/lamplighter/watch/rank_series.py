"""What each rank does while a command with several of them is watched: one line of system.jsonl for each rank, every two seconds.

In:  the process tree at every look.
Out: per rank its steps, its cores, its memory, and the share of the time in which it was in a collective or waited for data. The
     rank that is least in collectives is the one that the others wait for.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from lamplighter.rundir import LineFile, RunDir
from lamplighter.watch.process_tree import Process, Snapshot

_EVERY_S = 2.0


@dataclass
class _Before:
    """A rank when its last line was written."""

    pid: int
    cpu_s: float
    fetch_wait_ns: int
    looks: int = 0
    in_collective: int = 0


class RankSeries:
    """Of one run; nothing is written where there are not two ranks."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.file: LineFile | None = None
        self.ranks: dict[int, _Before] = {}
        self.written_at = 0.0

    def look(self, snapshot: Snapshot, attempt: int) -> None:
        ranks = {one.rank: one for one in snapshot.processes if one.rank >= 0 and one.worker < 0}
        if len(ranks) < 2:
            return
        for rank, process in ranks.items():
            before = self.ranks.get(rank)
            if before is None or before.pid != process.pid:  # the first look at it, or another attempt
                before = self.ranks[rank] = _begin(process)
            before.looks += 1
            before.in_collective += bool(process.slot and process.slot.in_coll)
        passed_s = snapshot.at - self.written_at
        if passed_s < _EVERY_S:
            return
        if self.written_at:
            self._write(ranks, passed_s, attempt)
        self.written_at = snapshot.at
        self.ranks = {rank: _begin(process) for rank, process in ranks.items()}

    def _write(self, ranks: dict[int, Process], passed_s: float, attempt: int) -> None:
        try:
            self.file = self.file or LineFile(self.run.system)
        except OSError:  # the folder is gone, or the disk is full: the command goes on
            return
        for rank, process in sorted(ranks.items()):
            before, slot = self.ranks[rank], process.slot
            if slot is None:
                continue
            values = {
                "train/iter": slot.step,
                "sys/cpu_cores": round(max(0.0, process.look.cpu_s - before.cpu_s) / passed_s, 3),
                "sys/ram_gb": round(process.look.rss_bytes / 1e9, 3),
                "sys/in_collective": round(before.in_collective / max(1, before.looks), 3),
                "sys/data_wait": round(min(1.0, max(0, slot.fetch_wait_ns - before.fetch_wait_ns) / 1e9 / passed_s), 3),
            }
            self.file.write(
                json.dumps({"t": time.time(), "step": slot.step, "attempt": attempt, "rank": rank, **values})
            )


def _begin(process: Process) -> _Before:
    return _Before(process.pid, process.look.cpu_s, process.slot.fetch_wait_ns if process.slot else 0)
