"""Probes of the machine: cores, files, processes, memory, the right to look at others, and what dead runs have left behind.

In:  what the kernel says about processes and memory; control groups, resource limits; the runs folder.
Out: Findings, each with the number and what would raise it.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from lamplighter.doctor.probe import Finding, ProbeContext, finding, ok, warn
from lamplighter.procs import cgroup, procfs, stacks
from lamplighter.procs.lock import is_held
from lamplighter.procs.pool import usable_cores
from lamplighter.rundir import CACHE_NAME, RunDir, human_bytes, is_alive, is_running, read_record

_SHARED_MEMORY = Path("/dev/shm")
_FEW_FILES, _USUAL_FILES = 256, 1024
_FEW_PROCESSES = 200
_SMALL_SHARED = 128_000_000  # a container's default is 64 MB; a worker's batches pass through it
_BUSY = 0.6  # of the cores, taken by others
_SWAPPED = 0.2  # of the memory
_OURS = ("lamplighter.commands.child_main", "lamplighter.procs.child")  # children: they never live without a parent
_OLD_S = 3600.0


def memory_left() -> tuple[int, int | None]:
    """Bytes that can still be had, and the limit of our control group where there is one."""
    return procfs.memory_left(), min((one.bytes for one in cgroup.memory_limits()), default=None)


# ---------------------------------------------------------------- processors


def too_many_threads(name: str, count: int, cores: int, advice: str = "", **more: Any) -> Finding:
    """Threads that are set somewhere, against the cores that may be used."""
    what = f"{name} is {count}, and {cores} cores may be used"
    return warn(what, "threads that wait for a core make every product slower", advice, "oversubscribed", **more)


def processors(context: ProbeContext) -> Iterator[Finding]:
    """How many cores there are, how many we may use, and who else is at work."""
    cores, quota = usable_cores(), cgroup.core_quota()
    machine = os.cpu_count() or cores
    context.now("looking at the load for a second")
    psutil.cpu_percent(0.1)
    others = psutil.cpu_percent(0.9) / 100 * machine
    worth = f", {quota:.1f} cores' worth of time" if quota else ""
    yield ok(f"{cores} of {machine} cores may be used{worth}", figures={"cores": cores, "others_busy": others})
    if quota is not None and quota < cores:
        what = f"the control group allows {quota:.1f} cores' worth of time, and {cores} cores are visible"
        why = f"{cores} threads would be held still for most of every tenth of a second"
        yield warn(what, why, cause="oversubscribed", settings={"train.threads": max(1, int(quota))})
    if others > _BUSY * cores and machine == cores:
        load = os.getloadavg()[0]
        names = ", ".join(f"{name} (pid {pid})" for _, name, pid in sorted(_busiest(), reverse=True)[:3])
        what = f"others keep {others:.1f} of {machine} cores busy (load {load:.1f})"
        why = f"the busiest: {names}" if names else ""
        yield warn(what, why, "wait for them, or expect slower steps", "starved", figures={"load": load})
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > cores:
        yield too_many_threads("OMP_NUM_THREADS", int(threads), cores, f"export OMP_NUM_THREADS={cores}")


def _us() -> set[int]:
    """This process and those above it."""
    return {os.getpid(), *(one.pid for one in psutil.Process().parents())}


def _busiest() -> Iterator[tuple[float, str, int]]:
    """Other processes by the share of a core that they took over their life."""
    us = _us()
    for one in psutil.process_iter(["name", "cpu_times", "create_time"]):
        times = one.info["cpu_times"]
        if one.pid not in us and times is not None and one.is_running():
            age = max(1.0, time.time() - one.info["create_time"])
            yield (times.user + times.system) / age, one.info["name"] or "?", one.pid


# ---------------------------------------------------------------- limits


def limits(_: ProbeContext) -> Iterator[Finding]:
    """Files, processes, shared memory, memory, swap."""
    yield _files()
    yield from _processes()
    yield _shared_memory(_SHARED_MEMORY)
    yield from _memory()


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _USUAL_FILES:
        shown = "any number of" if soft == resource.RLIM_INFINITY else f"{soft:,}"
        return ok(f"{shown} files may be open", figures={"files": soft})
    most = _USUAL_FILES if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    above = "raise the hard limit (/etc/security/limits.conf, docker run --ulimit nofile=65536)"
    return finding(
        "fault" if soft < _FEW_FILES else "warn",
        f"only {soft} files may be open at once",
        "shards, sockets and workers each take some; beyond it every open fails",
        f"ulimit -n {most}" if most > soft else above,
        "low_fd",
        figures={"files": soft},
    )


def _processes() -> Iterator[Finding]:
    left = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # root is not held to it
        left.append(("ulimit -u", soft, soft - _threads_of_mine()))
    most, now = cgroup.smallest("pids", "pids.max"), cgroup.smallest("pids", "pids.current")
    if most is not None:
        left.append(("the control group (pids.max)", most, most - (now or 0)))
    for name, limit, rest in left:
        if rest < _FEW_PROCESSES:
            what = f"{max(0, rest)} more processes and threads may be started: {name} is {limit}"
            why, advice = "each worker and each thread counts", "raise it (ulimit -u, docker run --pids-limit)"
            yield finding("fault" if rest < 20 else "warn", what, why, advice, "low_nproc")


def _threads_of_mine() -> int:
    found = [one.info for one in psutil.process_iter(["uids", "num_threads"]) if one.info["uids"] is not None]
    return sum(info["num_threads"] or 1 for info in found if info["uids"].real == os.getuid())


def _shared_memory(folder: Path) -> Finding:
    """Loader workers hand their batches over in it; where it ends they die by a bus error."""
    try:
        room = os.statvfs(folder)
    except OSError as error:
        what, why = f"there is no {folder}: {error.strerror}", "loader workers cannot hand batches over by it"
        return warn(what, why, "docker run --shm-size=2g", "shm_small")
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    figures = {"bytes": float(size), "free_bytes": float(free)}
    if free >= _SMALL_SHARED:
        return ok(f"{folder}: {human_bytes(free)} free of {human_bytes(size)}", figures=figures)
    return warn(
        f"{folder} has {human_bytes(free)} free of {human_bytes(size)}",
        "loader workers hand their batches over in it, and die by a bus error where it ends",
        "docker run --shm-size=2g, mount -o remount,size=2g /dev/shm, or no loader workers",
        "shm_small",
        culprit={"path": str(folder)},
        figures=figures,
    )


def _memory() -> Iterator[Finding]:
    left, limit = memory_left()
    total, swap = psutil.virtual_memory().total, psutil.swap_memory()
    of = f"{human_bytes(limit)} that the control group allows" if limit else human_bytes(total)
    yield ok(f"memory: {human_bytes(left)} free of {of}", figures={"free_bytes": left})
    if swap.used > _SWAPPED * total:
        why = "memory was short here; what is swapped comes back at the speed of the disk"
        advice = "end what is not needed, or a smaller run"
        yield warn(f"{human_bytes(swap.used)} are swapped out", why, advice, "swapping")


# ---------------------------------------------------------------- looking at others


def tracing(context: ProbeContext) -> Iterator[Finding]:
    """Whether stacks of other processes may be read: tried on a process of ours, as `lamp why PID` would."""
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    context.now("reading a stack with py-spy")
    command = [stacks.py_spy() or "py-spy", "dump", "--nonblocking", "--pid", str(sleeper.pid)]
    try:
        for _ in range(3):  # it may not have come to its first line yet
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            if done.returncode == 0 and "Thread" in done.stdout:
                break
        read, trouble = done.returncode == 0, " ".join(done.stderr.split())[:200]
    except (OSError, subprocess.TimeoutExpired) as error:
        read, trouble = False, str(error)
    finally:
        sleeper.kill()
        sleeper.wait()
    if read:
        yield ok("stacks of other processes can be read (lamp why PID)")
        return
    rules = {
        "": "the container or the kernel forbids it",
        "1": "only of one's own children (ptrace_scope 1)",
        "2": "for administrators only (ptrace_scope 2)",
        "3": "for nobody (ptrace_scope 3)",
    }
    rule = rules.get(procfs.trace_scope(), "the container forbids it")
    advice = (
        "lamp why RUN and lamp watch -- CMD work all the same (those processes answer themselves); for lamp why PID:"
    )
    advice += " docker run --cap-add SYS_PTRACE, or sysctl kernel.yama.ptrace_scope=0"
    yield warn(f"stacks of other processes cannot be read: {rule}", f"py-spy: {trouble}", advice, "no_ptrace")


# ---------------------------------------------------------------- what dead runs have left behind


def leftovers(context: ProbeContext) -> Iterator[Finding]:
    """Run by run, then process by process."""
    context.now(f"looking through {context.runs_dir}")
    found = [one for lock in sorted(context.runs_dir.glob("*/lock")) for one in _of_run(RunDir(lock.parent))]
    context.now("looking for processes without a parent")
    found += [*locks_of_caches(context.runs_dir / CACHE_NAME), *_orphans(), *_old_slots()]
    yield from found
    if all(one.level == "ok" for one in found):
        yield ok(f"nothing of a dead run in {context.runs_dir}")


def _of_run(run: RunDir) -> Iterator[Finding]:
    holder, status = read_record(run.lock), read_record(run.status)
    pid = holder.get("pid", "?")
    if is_running(run):
        yield ok(f"run {run.name} is going on (process {pid})")
        return
    if status.get("state") in ("running", "stopping") and not is_alive(holder):
        what = f"run {run.name} was killed: its lock is of process {pid}, which is dead"
        why = f"no last word; step {status.get('durable_step', 0)} is safe"
        advice = "the same lamp train command goes on from there; the lock is no hindrance"
        yield warn(what, why, advice, "dead_lock_file", culprit={"path": str(run.lock), "pid": pid})
    for part in sorted(run.checkpoints.glob(".writing-*")):
        size = sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
        what = f"{part.name} in run {run.name} is a save that did not finish ({human_bytes(size)})"
        why, advice = "its process was killed meanwhile; it is never loaded", "the next start of the run clears it away"
        yield warn(what, why, advice, "save_kill", culprit={"path": str(part)}, figures={"bytes": size})


def locks_of_caches(root: Path) -> Iterator[Finding]:
    """Who builds a token cache, or was killed while it did. An orderly builder leaves its lock empty."""
    for path in sorted(root.glob("*/lock")):
        holder, folder = read_record(path), path.parent
        if not holder:
            continue
        who, age_s = f"process {holder.get('pid')} on {holder.get('host')}", time.time() - float(holder.get("t", 0))
        where = {"pid": holder.get("pid"), "path": str(path)}
        if is_held(path) or is_alive(holder):
            yield ok(f"{who} is building {folder} now; a run would wait for it", culprit=where)
        elif holder.get("host") not in (None, socket.gethostname()):
            what = f"{folder} was locked by {who}, {age_s / 60:.0f} min ago: another machine, which cannot be asked from here"
            why = "the lock itself is free here; if that machine still builds, two would write one cache"
            yield warn(what, why, "make sure that it has ended there", "dead_lock_file", culprit=where)
        else:
            what = f"lock of a dead process: {who} held {path} and is gone, {age_s / 60:.0f} min"
            why = "it was killed while it built the cache; what is finished of it is kept"
            advice = "nothing to do: the next run takes the lock over and goes on"
            yield warn(what, why, advice, "dead_lock_file", culprit=where)


def _orphans() -> Iterator[Finding]:
    """Children of ours whose parent is gone. They should have died with it."""
    us = _us()
    for one in psutil.process_iter(["cmdline", "environ", "create_time"]):
        words, parent = one.info["cmdline"] or [], (one.info["environ"] or {}).get("LAMP_PARENT_PID", "")
        if one.pid in us or not any(name in words for name in _OURS) or "-m" not in words:
            continue
        if parent.isdecimal() and not procfs.pid_start(int(parent)):
            age_min = (time.time() - one.info["create_time"]) / 60
            what = f"process {one.pid} lives on without its parent ({parent}), for {age_min:.0f} min"
            advice = f"lamp why {one.pid}; if it is not wanted: kill {one.pid}"
            yield warn(what, " ".join(words)[:160], advice, "orphans", culprit={"pid": one.pid})


def _old_slots() -> Iterator[Finding]:
    """Slots that live in shared memory because their run is on a network file system."""
    for folder in sorted(_SHARED_MEMORY.glob(f"lamplighter-{os.getuid()}-*")):
        age_s = time.time() - max(file.stat().st_mtime for file in [folder, *folder.glob("*.slot")])
        if age_s > _OLD_S:
            what = f"{folder} was last touched {age_s / 3600:.0f} h ago"
            why = "slots of a run that is over; a few kilobytes"
            advice = "remove it when no run on a network file system is going on"
            yield warn(what, why, advice, "orphans", culprit={"path": str(folder)})
