"""Probes of the machine: cores, files, processes, memory, the right to look at others, and what dead runs have left behind.

In:  what the kernel says about processes and memory; control groups, resource limits; the runs folder.
Out: Findings, each with the number and what would raise it.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from lamplighter.doctor.probe import Finding, ProbeContext, ok, warn
from lamplighter.procs import cgroup, procfs, stacks
from lamplighter.procs.pool import usable_cores
from lamplighter.rundir import CACHE_NAME, RunDir, human_bytes, is_alive, is_running, read_record

_SHARED_MEMORY = Path("/dev/shm")
FEW_FILES, USUAL_FILES = 256, 1024
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


def processors(context: ProbeContext) -> Iterator[Finding]:
    """How many cores there are, how many we may use, and who else is at work."""
    cores, quota = usable_cores(), cgroup.core_quota()
    machine = os.cpu_count() or cores
    context.now("looking at the load for a second")
    psutil.cpu_percent(0.1)
    others = psutil.cpu_percent(0.9) / 100 * machine
    yield ok(
        f"{cores} of {machine} cores may be used" + (f", {quota:.1f} cores' worth of time" if quota else ""),
        figures={"cores": cores, "others_busy": others},
    )
    if quota is not None and quota < cores:
        wanted = max(1, int(quota))
        yield warn(
            f"the control group allows {quota:.1f} cores' worth of time, and {cores} cores are visible",
            f"{cores} threads would be held still for most of every tenth of a second",
            f"--train.threads {wanted}",
            "oversubscribed",
            settings={"train.threads": wanted},
        )
    if others > _BUSY * cores and machine == cores:
        load = os.getloadavg()[0]
        busy = sorted(_busiest(), reverse=True)[:3]
        names = ", ".join(f"{name} (pid {pid})" for _, name, pid in busy)
        yield warn(
            f"others keep {others:.1f} of {machine} cores busy (load {load:.1f})",
            f"the busiest: {names}" if names else "",
            "wait for them, or expect slower steps",
            "starved",
            figures={"load": load},
        )
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > cores:
        yield warn(
            f"OMP_NUM_THREADS is {threads}, and {cores} cores may be used",
            "threads that wait for a core make every product slower",
            f"export OMP_NUM_THREADS={cores}",
            "oversubscribed",
        )


def _busiest() -> Iterator[tuple[float, str, int]]:
    """Other processes by the share of a core that they took over their life."""
    mine = {os.getpid(), *(one.pid for one in psutil.Process().parents())}
    for one in psutil.process_iter(["name", "cpu_times", "create_time"]):
        times = one.info["cpu_times"]
        if one.pid not in mine and times is not None and one.is_running():
            age = max(1.0, time.time() - one.info["create_time"])
            yield (times.user + times.system) / age, one.info["name"] or "?", one.pid


# ---------------------------------------------------------------- limits


def limits(_: ProbeContext) -> Iterator[Finding]:
    """Files, processes, shared memory, memory, swap."""
    yield from _files()
    yield from _processes()
    yield from _shared_memory(_SHARED_MEMORY)
    yield from _memory()


def _files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "any number of" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    if soft == resource.RLIM_INFINITY or soft >= USUAL_FILES:
        yield ok(f"{shown} files may be open", figures={"files": soft})
        return
    most = USUAL_FILES if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    raised = (
        f"ulimit -n {most}"
        if most > soft
        else "raise the hard limit (/etc/security/limits.conf, docker run --ulimit nofile=65536)"
    )
    yield Finding(
        "fault" if soft < FEW_FILES else "warn",
        f"only {soft} files may be open at once",
        "shards, sockets and workers each take some; beyond it every open fails",
        raised,
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
            yield Finding(
                "fault" if rest < 20 else "warn",
                f"{max(0, rest)} more processes and threads may be started: {name} is {limit}",
                "each worker and each thread counts",
                "raise it (ulimit -u, docker run --pids-limit)",
                "low_nproc",
            )


def _threads_of_mine() -> int:
    me = os.getuid()
    total = 0
    for one in psutil.process_iter(["uids", "num_threads"]):
        if one.info["uids"] is not None and one.info["uids"].real == me:
            total += one.info["num_threads"] or 1
    return total


def _shared_memory(folder: Path) -> Iterator[Finding]:
    """Loader workers hand their batches over in it; where it ends they die by a bus error."""
    try:
        room = os.statvfs(folder)
    except OSError as error:
        yield warn(
            f"there is no {folder}: {error.strerror}",
            "loader workers cannot hand batches over by it",
            "docker run --shm-size=2g",
            "shm_small",
        )
        return
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    figures = {"bytes": float(size), "free_bytes": float(free)}
    if free < _SMALL_SHARED:
        yield warn(
            f"{folder} has {human_bytes(free)} free of {human_bytes(size)}",
            "loader workers hand their batches over in it, and die by a bus error where it ends",
            "docker run --shm-size=2g, mount -o remount,size=2g /dev/shm, or no loader workers",
            "shm_small",
            culprit={"path": str(folder)},
            figures=figures,
        )
    else:
        yield ok(f"{folder}: {human_bytes(free)} free of {human_bytes(size)}", figures=figures)


def _memory() -> Iterator[Finding]:
    left, limit = memory_left()
    total, swap = psutil.virtual_memory().total, psutil.swap_memory()
    of = f"{human_bytes(limit)} that the control group allows" if limit else human_bytes(total)
    yield ok(f"memory: {human_bytes(left)} free of {of}", figures={"free_bytes": left})
    if swap.used > _SWAPPED * total:
        yield warn(
            f"{human_bytes(swap.used)} are swapped out",
            "memory was short here; what is swapped comes back at the speed of the disk",
            "end what is not needed, or a smaller run",
            "swapping",
        )


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
    yield warn(
        f"stacks of other processes cannot be read: {_tracing_rule()}",
        f"py-spy: {trouble}",
        "lamp why RUN and lamp watch -- CMD work all the same (those processes answer themselves); for lamp why PID: docker run --cap-add SYS_PTRACE, or sysctl kernel.yama.ptrace_scope=0",
        "no_ptrace",
    )


def _tracing_rule() -> str:
    scope = procfs.trace_scope()
    if not scope:
        return "the container or the kernel forbids it"
    return {
        "1": "only of one's own children (ptrace_scope 1)",
        "2": "for administrators only (ptrace_scope 2)",
        "3": "for nobody (ptrace_scope 3)",
    }.get(scope, "the container forbids it")


# ---------------------------------------------------------------- what dead runs have left behind


def leftovers(context: ProbeContext) -> Iterator[Finding]:
    """Run by run, then process by process."""
    found = 0
    context.now(f"looking through {context.runs_dir}")
    for lock in sorted(context.runs_dir.glob("*/lock")):
        for finding in _of_run(RunDir(lock.parent)):
            found += finding.level != "ok"
            yield finding
    context.now("looking for processes without a parent")
    for finding in [*_of_caches(context.runs_dir / CACHE_NAME), *_orphans(), *_shared()]:
        found += finding.level != "ok"
        yield finding
    if not found:
        yield ok(f"nothing of a dead run in {context.runs_dir}")


def _of_run(run: RunDir) -> Iterator[Finding]:
    holder, status = read_record(run.lock), read_record(run.status)
    if is_running(run):
        yield ok(f"run {run.name} is going on (process {holder.get('pid', '?')})")
        return
    pid = holder.get("pid", "?")
    if status.get("state") in ("running", "stopping") and not is_alive(holder):
        safe = status.get("durable_step", 0)
        yield warn(
            f"run {run.name} was killed: its lock is of process {pid}, which is dead",
            f"no last word; step {safe} is safe",
            "the same lamp train command goes on from there; the lock is no hindrance",
            "dead_lock_file",
            culprit={"path": str(run.lock), "pid": pid},
        )
    for part in sorted(run.checkpoints.glob(".writing-*")):
        size = sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
        yield warn(
            f"{part.name} in run {run.name} is a save that did not finish ({human_bytes(size)})",
            "its process was killed meanwhile; it is never loaded",
            "the next start of the run clears it away",
            "save_kill",
            culprit={"path": str(part)},
            figures={"bytes": size},
        )


def _of_caches(folder: Path) -> Iterator[Finding]:
    """An orderly builder of a cache leaves its lock empty."""
    for lock in sorted(folder.glob("*/lock")):
        holder = read_record(lock)
        pid = holder.get("pid", "?")
        if not holder:
            continue
        if is_alive(holder):
            yield ok(f"process {pid} is building the token cache {lock.parent.name}")
        else:
            yield warn(
                f"the token cache {lock.parent.name} is half built: its lock is of process {pid}, which is dead",
                f"on {holder.get('host', '?')}",
                "the next run that needs it takes over and goes on where it ended",
                "dead_lock_file",
                culprit={"path": str(lock), "pid": pid},
            )


def _orphans() -> Iterator[Finding]:
    """Children of ours whose parent is gone. They should have died with it."""
    mine = {os.getpid(), *(one.pid for one in psutil.Process().parents())}
    for one in psutil.process_iter(["cmdline", "environ", "create_time"]):
        words, environment = one.info["cmdline"] or [], one.info["environ"] or {}
        if one.pid in mine or not any(name in words for name in _OURS) or "-m" not in words:
            continue
        parent = environment.get("LAMP_PARENT_PID", "")
        if parent.isdecimal() and not procfs.pid_start(int(parent)):
            age = time.time() - one.info["create_time"]
            yield warn(
                f"process {one.pid} lives on without its parent ({parent}), for {age / 60:.0f} min",
                " ".join(words)[:160],
                f"lamp why {one.pid}; if it is not wanted: kill {one.pid}",
                "orphans",
                culprit={"pid": one.pid},
            )


def _shared() -> Iterator[Finding]:
    """Slots that live in shared memory because their run is on a network file system."""
    for folder in sorted(_SHARED_MEMORY.glob(f"lamplighter-{os.getuid()}-*")):
        slots = list(folder.glob("*.slot"))
        newest = max((file.stat().st_mtime for file in [folder, *slots]), default=0.0)
        if time.time() - newest > _OLD_S:
            yield warn(
                f"{folder} was last touched {(time.time() - newest) / 3600:.0f} h ago",
                "slots of a run that is over; a few kilobytes",
                "remove it when no run on a network file system is going on",
                "orphans",
                culprit={"path": str(folder)},
            )
