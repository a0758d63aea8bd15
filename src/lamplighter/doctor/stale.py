"""Probes for what dead runs left behind: locks, half-written checkpoints, processes without a parent, shared memory.

In:  the runs folder, /proc, /dev/shm.
Out: Findings that name each; nothing is removed and nothing is killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from lamplighter.doctor.probe import Finding, Patient, Stage
from lamplighter.procs.procfs import pid_start
from lamplighter.rundir import CACHE_NAME, RunDir, human_bytes, is_alive, is_running, read_record

STAGES = (Stage("environment / leftovers", "lamplighter.doctor.stale:leftovers", 30.0),)
OURS = ("lamplighter.commands.child", "lamplighter.doctor")  # children: they never live without a parent
SHARED_MEMORY = Path("/dev/shm")
OLD_S = 3600.0


def leftovers(patient: Patient) -> Iterator[Finding]:
    """Run by run, then process by process."""
    found = 0
    patient.now(f"looking through {patient.runs_dir}")
    for lock in sorted(patient.runs_dir.glob("*/lock")):
        for finding in _of_run(RunDir(lock.parent)):
            found += finding.level != "ok"
            yield finding
    patient.now("looking for processes without a parent")
    for finding in [*_of_caches(patient.runs_dir / CACHE_NAME), *_orphans(), *_shared()]:
        found += finding.level != "ok"
        yield finding
    if not found:
        yield Finding("ok", f"nothing of a dead run in {patient.runs_dir}")


def _of_run(run: RunDir) -> Iterator[Finding]:
    holder, status = read_record(run.lock), read_record(run.status)
    if is_running(run):
        yield Finding("ok", f"run {run.name} is going on (process {holder.get('pid', '?')})")
        return
    pid = holder.get("pid", "?")
    if status.get("state") in ("running", "stopping") and not is_alive(holder):
        safe = status.get("durable_step", 0)
        yield Finding("warn", f"run {run.name} was killed: its lock is of process {pid}, which is dead", f"no last word; step {safe} is safe",
                      "the same lamp train command goes on from there; the lock is no hindrance", "dead_lock_file", {"path": str(run.lock), "pid": pid})  # fmt: skip
    for part in sorted(run.checkpoints.glob(".writing-*")):
        size = sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
        yield Finding("warn", f"{part.name} in run {run.name} is a save that did not finish ({human_bytes(size)})", "its process was killed meanwhile; it is never loaded",
                      "the next start of the run clears it away", "save_kill", {"path": str(part)}, figures={"bytes": size})  # fmt: skip


def _of_caches(folder: Path) -> Iterator[Finding]:
    """An orderly builder of a cache leaves its lock empty."""
    for lock in sorted(folder.glob("*/lock")):
        holder = read_record(lock)
        pid = holder.get("pid", "?")
        if not holder:
            continue
        if is_alive(holder):
            yield Finding("ok", f"process {pid} is building the token cache {lock.parent.name}")
        else:
            yield Finding(
                "warn",
                f"the token cache {lock.parent.name} is half built: its lock is of process {pid}, which is dead",
                f"on {holder.get('host', '?')}",
                "the next run that needs it takes over and goes on where it ended",
                "dead_lock_file",
                {"path": str(lock), "pid": pid},
            )


def _orphans() -> Iterator[Finding]:
    """Children of ours whose parent is gone. They should have died with it."""
    mine = {os.getpid(), *(one.pid for one in psutil.Process().parents())}
    for one in psutil.process_iter(["cmdline", "environ", "create_time"]):
        words, environment = one.info["cmdline"] or [], one.info["environ"] or {}
        if one.pid in mine or not any(name in words for name in OURS) or "-m" not in words:
            continue
        parent = environment.get("LAMP_PARENT_PID", "")
        if parent.isdecimal() and not pid_start(int(parent)):
            age = time.time() - one.info["create_time"]
            yield Finding("warn", f"process {one.pid} lives on without its parent ({parent}), for {age / 60:.0f} min", " ".join(words)[:160],
                          f"lamp why {one.pid}; if it is not wanted: kill {one.pid}", "orphans", {"pid": one.pid})  # fmt: skip


def _shared() -> Iterator[Finding]:
    """Slots that live in shared memory because their run is on a network file system."""
    for folder in sorted(SHARED_MEMORY.glob(f"lamplighter-{os.getuid()}-*")):
        slots = list(folder.glob("*.slot"))
        newest = max((file.stat().st_mtime for file in [folder, *slots]), default=0.0)
        if time.time() - newest > OLD_S:
            yield Finding("warn", f"{folder} was last touched {(time.time() - newest) / 3600:.0f} h ago", "slots of a run that is over; a few kilobytes",
                          "remove it when no run on a network file system is going on", "orphans", {"path": str(folder)})  # fmt: skip
