"""Probes of what this process may have: cores, files, processes, shared memory, memory, and the right to look at others.

In:  /proc, the control groups (version 1 and 2), the resource limits.
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

from lamplighter.doctor.probe import Finding, Patient, Stage
from lamplighter.procs import cgroup
from lamplighter.procs.pool import usable_cores
from lamplighter.rundir import human_bytes

STAGES = (
    Stage("environment / processors", "lamplighter.doctor.limits:processors", 20.0),
    Stage("environment / limits", "lamplighter.doctor.limits:limits", 20.0),
    Stage("environment / tracing", "lamplighter.doctor.limits:tracing", 30.0),
)
SHARED_MEMORY = Path("/dev/shm")
FEW_FILES, USUAL_FILES = 256, 1024
FEW_PROCESSES = 200
SMALL_SHARED = 128_000_000  # a container's default is 64 MB; a worker's batches pass through it
BUSY = 0.6  # of the cores, taken by others
SWAPPED = 0.2  # of the memory


def memory_left() -> tuple[int, int | None]:
    """Bytes that can still be had, and the limit of our control group where there is one."""
    of_machine, limits = psutil.virtual_memory().available, cgroup.memory_limits()
    return min([of_machine, *(one.left for one in limits)]), min((one.bytes for one in limits), default=None)


# ---------------------------------------------------------------- processors


def processors(patient: Patient) -> Iterator[Finding]:
    """How many cores there are, how many we may use, and who else is at work."""
    cores, quota = usable_cores(), cgroup.core_quota()
    machine = os.cpu_count() or cores
    patient.now("looking at the load for a second")
    psutil.cpu_percent(0.1)
    others = psutil.cpu_percent(0.9) / 100 * machine
    yield Finding("ok", f"{cores} of {machine} cores may be used" + (f", {quota:.1f} cores' worth of time" if quota else ""),
                  figures={"cores": cores, "others_busy": others})  # fmt: skip
    if quota is not None and quota < cores:
        wanted = max(1, int(quota))
        yield Finding("warn", f"the control group allows {quota:.1f} cores' worth of time, and {cores} cores are visible",
                      f"{cores} threads would be held still for most of every tenth of a second", f"--train.threads {wanted}", "oversubscribed",
                      settings={"train.threads": wanted})  # fmt: skip
    if others > BUSY * cores and machine == cores:
        load = os.getloadavg()[0]
        busy = sorted(_busiest(), reverse=True)[:3]
        names = ", ".join(f"{name} (pid {pid})" for _, name, pid in busy)
        yield Finding("warn", f"others keep {others:.1f} of {machine} cores busy (load {load:.1f})", f"the busiest: {names}" if names else "",
                      "wait for them, or expect slower steps", "starved", figures={"load": load})  # fmt: skip
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > cores:
        yield Finding("warn", f"OMP_NUM_THREADS is {threads}, and {cores} cores may be used", "threads that wait for a core make every product slower",
                      f"export OMP_NUM_THREADS={cores}", "oversubscribed")  # fmt: skip


def _busiest() -> Iterator[tuple[float, str, int]]:
    """Other processes by the share of a core that they took over their life."""
    mine = {os.getpid(), *(one.pid for one in psutil.Process().parents())}
    for one in psutil.process_iter(["name", "cpu_times", "create_time"]):
        times = one.info["cpu_times"]
        if one.pid not in mine and times is not None and one.is_running():
            age = max(1.0, time.time() - one.info["create_time"])
            yield (times.user + times.system) / age, one.info["name"] or "?", one.pid


# ---------------------------------------------------------------- limits


def limits(_: Patient) -> Iterator[Finding]:
    """Files, processes, shared memory, memory, swap."""
    yield from _files()
    yield from _processes()
    yield from shared_memory(SHARED_MEMORY)
    yield from _memory()


def _files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "any number of" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    if soft == resource.RLIM_INFINITY or soft >= USUAL_FILES:
        yield Finding("ok", f"{shown} files may be open", figures={"files": soft})
        return
    most = USUAL_FILES if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    raised = (
        f"ulimit -n {most}"
        if most > soft
        else "raise the hard limit (/etc/security/limits.conf, docker run --ulimit nofile=65536)"
    )
    yield Finding("fault" if soft < FEW_FILES else "warn", f"only {soft} files may be open at once", "shards, sockets and workers each take some; beyond it every open fails",
                  raised, "low_fd", figures={"files": soft})  # fmt: skip


def _processes() -> Iterator[Finding]:
    left = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # root is not held to it
        left.append(("ulimit -u", soft, soft - _threads_of_mine()))
    most, now = cgroup.smallest("pids", "pids.max"), cgroup.smallest("pids", "pids.current")
    if most is not None:
        left.append(("the control group (pids.max)", most, most - (now or 0)))
    for name, limit, rest in left:
        if rest < FEW_PROCESSES:
            yield Finding("fault" if rest < 20 else "warn", f"{max(0, rest)} more processes and threads may be started: {name} is {limit}",
                          "each worker and each thread counts", "raise it (ulimit -u, docker run --pids-limit)", "low_nproc")  # fmt: skip


def _threads_of_mine() -> int:
    me = os.getuid()
    total = 0
    for one in psutil.process_iter(["uids", "num_threads"]):
        if one.info["uids"] is not None and one.info["uids"].real == me:
            total += one.info["num_threads"] or 1
    return total


def shared_memory(folder: Path) -> Iterator[Finding]:
    """Loader workers hand their batches over in it; where it ends they die by a bus error."""
    try:
        room = os.statvfs(folder)
    except OSError as error:
        yield Finding("warn", f"there is no {folder}: {error.strerror}", "loader workers cannot hand batches over by it", "docker run --shm-size=2g", "shm_small")  # fmt: skip
        return
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    figures = {"bytes": float(size), "free_bytes": float(free)}
    if free < SMALL_SHARED:
        yield Finding("warn", f"{folder} has {human_bytes(free)} free of {human_bytes(size)}", "loader workers hand their batches over in it, and die by a bus error where it ends",
                      "docker run --shm-size=2g, mount -o remount,size=2g /dev/shm, or no loader workers", "shm_small",
                      {"path": str(folder)}, figures=figures)  # fmt: skip
    else:
        yield Finding("ok", f"{folder}: {human_bytes(free)} free of {human_bytes(size)}", figures=figures)


def _memory() -> Iterator[Finding]:
    left, limit = memory_left()
    total, swap = psutil.virtual_memory().total, psutil.swap_memory()
    of = f"{human_bytes(limit)} that the control group allows" if limit else human_bytes(total)
    yield Finding("ok", f"memory: {human_bytes(left)} free of {of}", figures={"free_bytes": left})
    if swap.used > SWAPPED * total:
        yield Finding("warn", f"{human_bytes(swap.used)} are swapped out", "memory was short here; what is swapped comes back at the speed of the disk",
                      "end what is not needed, or a smaller run", "swapping")  # fmt: skip


# ---------------------------------------------------------------- looking at others


def tracing(patient: Patient) -> Iterator[Finding]:
    """Whether stacks of other processes may be read: tried on a process of ours, as `lamp why PID` would."""
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    patient.now("reading a stack with py-spy")
    command = [_py_spy(), "dump", "--nonblocking", "--pid", str(sleeper.pid)]
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
        yield Finding("ok", "stacks of other processes can be read (lamp why PID)")
        return
    yield Finding("warn", f"stacks of other processes cannot be read: {_tracing_rule()}", f"py-spy: {trouble}",
                  "lamp why RUN and lamp watch -- CMD work all the same (those processes answer themselves); for lamp why PID: docker run --cap-add SYS_PTRACE, or sysctl kernel.yama.ptrace_scope=0",
                  "no_ptrace")  # fmt: skip


def _py_spy() -> str:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else "py-spy"


def _tracing_rule() -> str:
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return "the container or the kernel forbids it"
    return {"1": "only of one's own children (ptrace_scope 1)", "2": "for administrators only (ptrace_scope 2)",
            "3": "for nobody (ptrace_scope 3)"}.get(scope, "the container forbids it")  # fmt: skip
