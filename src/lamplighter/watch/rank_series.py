"""What each rank does, of a run of ours or of a watched command: a record for each rank now, and one line of system.jsonl every two seconds.

In:  the process tree at every look.
Out: per rank its step, its phase, its speed while it computes, its cores and memory, and the share of the time in which it was in a
     collective or waited for data. The rank that is least in collectives is the one that the others wait for.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from lamplighter.rundir import LineFile, RunDir
from lamplighter.slot import Slot
from lamplighter.watch.elsewhere import RemotePid, shown_pids
from lamplighter.watch.process_tree import Process, Snapshot

_EVERY_S = 2.0


@dataclass(frozen=True)
class _Before:
    """A rank when its last line was written."""

    pid: int
    cpu_s: float
    fetch_wait_ns: int
    collective_ns: int
    tokens: int


@dataclass(frozen=True)
class _Pace:
    """Of the two seconds before its last line."""

    in_collective: float = 0.0  # share of the time
    tokens_per_s: float = 0.0  # of its own part of the steps, while it computes


class RankSeries:
    """Of one run; nothing is written where there are not two ranks."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.host = run, socket.gethostname()
        self.file: LineFile | None = None
        self.ranks: dict[int, _Before] = {}
        self.pace: dict[int, _Pace] = {}
        self.written_at = 0.0
        self.last: Snapshot | None = None

    def look(self, snapshot: Snapshot, attempt: int) -> None:
        self.last = snapshot
        ranks = {one.rank: one for one in snapshot.processes if one.rank >= 0 and one.worker < 0}
        if len(ranks) < 2:
            return
        for rank, process in ranks.items():
            before = self.ranks.get(rank)
            if before is None or before.pid != process.pid:  # the first look at it, or another attempt
                self.ranks[rank] = _begin(process, snapshot.at)
        passed_s = snapshot.at - self.written_at
        if passed_s < _EVERY_S:
            return
        if self.written_at:
            self.pace = {
                rank: self._pace(rank, one.slot, snapshot.at, passed_s) for rank, one in ranks.items() if one.slot
            }
            self._write(ranks, passed_s, attempt)
        self.written_at = snapshot.at
        self.ranks = {rank: _begin(process, snapshot.at) for rank, process in ranks.items()}

    def now(self, pids: Sequence[int], done: Collection[int] = ()) -> list[dict[str, Any]]:
        """Each rank at the last look, by the processes that they are; for status.json. `done`: ranks that have ended well."""
        found = {one.pid: one for one in self.last.processes} if self.last is not None else {}
        at = self.last.at if self.last is not None else 0.0
        nodes = any(isinstance(pid, RemotePid) for pid in pids)
        records = [self._record(rank, pid, found.get(pid), at, nodes) for rank, pid in enumerate(pids)]
        return [{**one, "state": "ended"} if one["rank"] in done else one for one in records]

    def _record(self, rank: int, pid: int, process: Process | None, at: float, nodes: bool) -> dict[str, Any]:
        slot = (process.slot if process else None) or Slot()
        pace = self.pace.get(rank, _Pace())
        state = "gone" if process is None or process.look.state in "XZ" else "stopped" if process.look.stopped else ""
        return {
            "rank": rank,
            **shown_pids({"pid": pid, "host": self.host}),
            **({"node": pid.node if isinstance(pid, RemotePid) else 0} if nodes else {}),
            "state": state,
            "step": slot.step,
            "phase": slot.phase,
            "span": slot.coll if slot.in_coll else slot.span,
            "collectives": slot.coll_seq,
            "waiting_s": round(max(0.0, at - slot.coll_since_ns / 1e9), 2) if slot.in_coll else 0.0,
            "in_collective": round(pace.in_collective, 3),
            "tokens_per_s": round(pace.tokens_per_s, 1),
            "ram_gb": round(process.look.rss_bytes / 1e9, 3) if process else 0.0,
        }

    def _pace(self, rank: int, slot: Slot, at: float, passed_s: float) -> _Pace:
        """Where no step has ended, the speed is that of the steps before."""
        before = self.ranks[rank]
        waited = min(1.0, max(0, _collective_ns(slot, at) - before.collective_ns) / 1e9 / passed_s)
        tokens = slot.tokens - before.tokens
        if tokens <= 0:
            return _Pace(waited, self.pace.get(rank, _Pace()).tokens_per_s)
        return _Pace(waited, tokens / max(1, slot.world) / max(1e-3, (1 - waited) * passed_s))

    def _write(self, ranks: dict[int, Process], passed_s: float, attempt: int) -> None:
        try:
            self.file = self.file or LineFile(self.run.system)
        except OSError:  # the folder is gone, or the disk is full: the command goes on
            return
        for rank, process in sorted(ranks.items()):
            before, slot = self.ranks[rank], process.slot
            if slot is None or not process.look.rss_bytes:  # it has ended, and is not buried yet
                continue
            values = {
                "train/iter": slot.step,
                "sys/cpu_cores": round(max(0.0, process.look.cpu_s - before.cpu_s) / passed_s, 3),
                "sys/ram_gb": round(process.look.rss_bytes / 1e9, 3),
                "sys/in_collective": round(self.pace[rank].in_collective, 3),
                "sys/data_wait": round(min(1.0, max(0, slot.fetch_wait_ns - before.fetch_wait_ns) / 1e9 / passed_s), 3),
            }
            self.file.write(
                json.dumps({"t": time.time(), "step": slot.step, "attempt": attempt, "rank": rank, **values})
            )


def _collective_ns(slot: Slot, at: float) -> int:
    """Spent in collectives so far, the present one included."""
    return slot.coll_ns + (max(0, int(at * 1e9) - slot.coll_since_ns) if slot.in_coll else 0)


def _begin(process: Process, at: float) -> _Before:
    slot = process.slot or Slot()
    return _Before(process.pid, process.look.cpu_s, slot.fetch_wait_ns, _collective_ns(slot, at), slot.tokens)
