"""Probes of the machine: what is installed, what this process may have, and what dead runs have left behind.

In:  this interpreter and its packages; nvidia-smi where there is one; /proc, control groups, resource limits; the runs folder.
Out: Findings, each with the number and what would change it. Of the run only the device that it asks for is looked at.
"""

from __future__ import annotations

import importlib
import importlib.util
import locale
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lamplighter.doctor.probe import Finding, Level, ProbeContext
from lamplighter.procs import cgroup, procfs, stacks
from lamplighter.procs.pool import usable_cores
from lamplighter.rundir import CACHE_NAME, RunDir, human_bytes, is_alive, is_running, read_record

# Packages of this field; what they require of each other is checked. Those of BOUND stop working where it is not kept:
# they hold code that was compiled for one torch, or refuse to be imported.
BOUND = ("torchvision", "torchaudio", "torchtext", "xformers", "flash-attn", "triton", "transformers", "torch")
FIELD = (
    *BOUND, "lamplighter", "accelerate", "bitsandbytes", "datasets", "deepspeed", "gigatoken", "huggingface-hub", "lightning",
    "numpy", "pandas", "peft", "pyarrow", "pytorch-lightning", "safetensors", "scikit-learn", "scipy", "sentence-transformers",
    "tokenizers", "torchmetrics", "trl", "vllm",
)  # fmt: skip
COMPILED_FOR_TORCH = ("torchvision", "torchaudio")  # imported by others unasked, so a broken one breaks those
SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
DAY_S = 86_400.0


# ---------------------------------------------------------------- torch and the driver


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi says."""

    version: str
    cuda: str  # the newest CUDA that this driver can run; empty where it does not say
    gpus: tuple[str, ...]


def torch_and_driver(context: ProbeContext) -> Iterator[Finding]:
    """Whether torch was built for what this machine has."""
    context.now("asking nvidia-smi")
    driver, trouble = ask_driver()
    context.now("importing torch")
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("fault", f"torch cannot be imported: {error}", "a broken or partial installation",
                      "pip install --force-reinstall torch, of one build", "versions", {"module": "torch"})  # fmt: skip
        return
    built = torch.version.cuda or ""
    yield Finding("ok", f"Python {platform.python_version()}, torch {torch.__version__},"
                  f" {f'built for CUDA {built}' if built else 'built for the CPU' if not torch.version.hip else 'built for ROCm'}")  # fmt: skip
    yield from _numpy_and_torch(context)
    if trouble:
        yield Finding("warn", f"nvidia-smi does not work: {trouble}", "the driver and its tools are of different versions, or the module is not loaded",
                      "restart the machine, or install the driver anew", "driver")  # fmt: skip
    refused = ""
    if built or torch.version.hip:
        context.now("starting the GPU")
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            refused = str(error)
    yield from judge_driver(built or torch.version.hip or "", driver, refused, context.run.train.device)
    if torch.cuda.is_available():
        yield from _each_gpu(context)


def ask_driver() -> tuple[Driver | None, str]:
    """The driver, and what was wrong where it could not be asked."""
    if shutil.which(SMI[0]) is None:
        return None, ""
    try:
        rows = subprocess.run(SMI, capture_output=True, text=True, timeout=30, check=False)
        header = subprocess.run(SMI[:1], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if rows.returncode:
        return None, " ".join((rows.stdout + rows.stderr).split())[:200]
    found = [[cell.strip() for cell in row.split(",")] for row in rows.stdout.splitlines() if row.strip()]
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", header)
    return Driver(found[0][1] if found else "", cuda.group(1) if cuda else "", tuple(row[0] for row in found)), ""


def judge_driver(built: str, driver: Driver | None, refused: str, device: str) -> Iterator[Finding]:
    """`built`: the CUDA that torch was built for, empty for a CPU build. `refused`: what torch said when it was started."""
    gpus = ", ".join(driver.gpus) if driver else ""
    if not built:
        if driver and driver.gpus and device != "cpu":
            yield Finding("fault", f"torch is a CPU build, and this machine has {gpus}", "the GPU would stand idle while it is paid for",
                          "install a CUDA build of torch (its site names the index for your driver)", "versions", {"module": "torch"})  # fmt: skip
        elif device == "cuda":
            yield Finding("fault", "train.device is cuda, and torch is a CPU build", "", "a CUDA build of torch, or --train.device auto",
                          "versions", {"module": "torch"}, {"train.device": "auto"})  # fmt: skip
        return
    if refused and ("too old" in refused or (driver and driver.cuda and _older(driver.cuda, built))):
        have = f"driver {driver.version} (up to CUDA {driver.cuda or '?'})" if driver else "the driver"
        yield Finding("fault", f"{have} is too old for torch, which was built for CUDA {built}", refused.splitlines()[0],
                      "a newer driver, or a torch that was built for an older CUDA", "driver")  # fmt: skip
    elif refused and driver is None:
        level: Level = "fault" if device == "cuda" else "warn"
        settings = {"train.device": "auto"} if device == "cuda" else {}
        yield Finding(level, f"torch was built for CUDA {built}, and there is no driver: everything runs on the CPU",
                      refused.splitlines()[0], "install the driver, run the container with --gpus all, or use a CPU build of torch", "driver",
                      settings=settings)  # fmt: skip
    elif refused:
        yield Finding("fault", f"torch cannot start the GPU: {refused.splitlines()[0]}", f"driver {driver.version if driver else '?'}, built for CUDA {built}",
                      "nvidia-smi; CUDA_VISIBLE_DEVICES; restart the machine if the driver was changed", "driver")  # fmt: skip
    elif driver and driver.cuda and int(driver.cuda.split(".")[0]) < int(built.split(".")[0]):
        yield Finding("warn", f"the driver runs up to CUDA {driver.cuda}, torch was built for {built}", "newer kernels may fail at their first use",
                      "a newer driver", "driver")  # fmt: skip


def _older(one: str, other: str) -> bool:
    return [int(part) for part in one.split(".")] < [int(part) for part in other.split(".")]


def _each_gpu(context: ProbeContext) -> Iterator[Finding]:
    """A product on each, checked; a GPU that torch has no kernels for fails here and not after an hour."""
    import torch

    for number in range(torch.cuda.device_count()):
        name, free = torch.cuda.get_device_name(number), torch.cuda.mem_get_info(number)
        context.now(f"a product on GPU {number}")
        try:
            ones = torch.ones(512, 512, device=f"cuda:{number}")
            right = bool((ones @ ones == 512).all().item())
        except RuntimeError as error:
            known = " ".join(torch.cuda.get_arch_list())
            yield Finding("fault", f"GPU {number} ({name}) cannot compute: {str(error).splitlines()[0]}", f"this torch has kernels for: {known}",
                          "a build of torch for this GPU", "driver", {"gpu": number})  # fmt: skip
            continue
        if not right:
            yield Finding("fault", f"GPU {number} ({name}) computes wrongly", "512 x 1 x 1 did not add up", "another GPU; this one is broken", "gpu", {"gpu": number})  # fmt: skip
        elif free[0] < 0.5 * free[1]:
            yield Finding("warn", f"GPU {number} ({name}): {free[0] / 2**30:.1f} of {free[1] / 2**30:.1f} GiB are free", "somebody else computes on it",
                          "nvidia-smi names the process", "", {"gpu": number})  # fmt: skip
        else:
            yield Finding("ok", f"GPU {number}: {name}, {free[0] / 2**30:.1f} of {free[1] / 2**30:.1f} GiB free")


# ---------------------------------------------------------------- packages


def packages(context: ProbeContext) -> Iterator[Finding]:
    """What the packages of this field require of each other, and whether the touchy ones can be imported."""
    context.now("reading what the packages require")
    found, checked = [], 0
    for name in FIELD:
        try:
            wanted = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        checked += 1
        found += [finding for text in wanted if (finding := judge_requirement(name, text)) is not None]
    yield from found
    imported = []
    for name in COMPILED_FOR_TORCH:
        if importlib.util.find_spec(name) is None:
            continue
        context.now(f"importing {name}")
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  whatever it raises is the finding
            yield _broken(name, error)
        else:
            imported.append(name)
    also = f"; {', '.join(imported)} can be imported" if imported else ""
    yield Finding("ok", f"requirements of {checked} packages were compared with what is installed{also}")


def judge_requirement(name: str, text: str) -> Finding | None:
    """One line of a package's requirements against what is installed; None where it is kept, or does not count here."""
    wanted = Requirement(text)
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return None
    mine = metadata.version(name)
    level: Level = "fault" if canonicalize_name(name) in BOUND else "warn"
    try:
        have = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return Finding("warn", f"{name} {mine} needs {wanted.name}{wanted.specifier}, which is not installed", "",
                       f"pip install '{wanted.name}{wanted.specifier}'", "versions", {"module": name})  # fmt: skip
    if wanted.specifier.contains(have, prereleases=True):
        return None
    why = (
        "it holds code that was compiled for that one"
        if name in COMPILED_FOR_TORCH
        else "its authors exclude this version"
    )
    advice = f"pip install --upgrade {name} (one that fits {wanted.name} {have}), or pip uninstall {name}"
    return Finding(level, f"{name} {mine} needs {wanted.name}{wanted.specifier}, and {have} is installed",
                   why, advice, "versions", {"module": name})  # fmt: skip


def _broken(name: str, error: Exception) -> Finding:
    mine = metadata.version(name) if _is_installed(name) else "?"
    torch = metadata.version("torch") if _is_installed("torch") else "none"
    what = (
        f"{name} {mine} cannot be imported: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    )
    why = f"torch is {torch}; transformers and others import {name} unasked and break with it"
    return Finding(
        "fault", what, why, f"pip uninstall {name}, or the {name} for this torch", "versions", {"module": name}
    )


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _numpy_and_torch(context: ProbeContext) -> Iterator[Finding]:
    """A torch that was compiled for another numpy says so only when an array is handed over."""
    context.now("handing an array to torch")
    import numpy as np
    import torch

    try:
        torch.from_numpy(np.ones(4, np.float32)).numpy()
    except RuntimeError as error:
        what = f"torch and numpy {np.__version__} do not work together: {str(error).splitlines()[0]}"
        yield Finding("fault", what, "torch was compiled for another numpy", "pip install 'numpy<2', or a newer torch", "versions", {"module": "numpy"})  # fmt: skip


# ---------------------------------------------------------------- clock and language


def clock_and_language(context: ProbeContext) -> Iterator[Finding]:
    """A clock that goes wrong, and an encoding in which text cannot be read."""
    now, installed = time.time(), Path(__file__).stat().st_mtime
    probe = context.scratch / "clock"
    probe.touch()
    apart = probe.stat().st_mtime - now
    if installed > now + DAY_S:
        yield Finding("warn", f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now))}, which is before this package was installed",
                      "downloads fail by their certificates, and ages of files are wrong", "set the clock (timedatectl set-ntp true)", "clock")  # fmt: skip
    elif abs(apart) > 5:
        yield Finding("warn", f"the file system's clock is {apart:+.0f} s from this machine's", f"{context.scratch} is on another machine",
                      "set both clocks", "clock")  # fmt: skip
    encoding = locale.getpreferredencoding(False).lower().replace("-", "").replace("_", "")
    if encoding != "utf8" and not sys.flags.utf8_mode:
        yield Finding("warn", f"text files are read as {locale.getpreferredencoding(False)} here", "scripts of your own that open files without an encoding fail on, or garble, other letters",
                      "export PYTHONUTF8=1", "encoding")  # fmt: skip
    else:
        yield Finding("ok", f"clock {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(now))}, text in UTF-8")


SHARED_MEMORY = Path("/dev/shm")
FEW_FILES, USUAL_FILES = 256, 1024
FEW_PROCESSES = 200
SMALL_SHARED = 128_000_000  # a container's default is 64 MB; a worker's batches pass through it
BUSY = 0.6  # of the cores, taken by others
SWAPPED = 0.2  # of the memory


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


def limits(_: ProbeContext) -> Iterator[Finding]:
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
        yield Finding("ok", "stacks of other processes can be read (lamp why PID)")
        return
    yield Finding("warn", f"stacks of other processes cannot be read: {_tracing_rule()}", f"py-spy: {trouble}",
                  "lamp why RUN and lamp watch -- CMD work all the same (those processes answer themselves); for lamp why PID: docker run --cap-add SYS_PTRACE, or sysctl kernel.yama.ptrace_scope=0",
                  "no_ptrace")  # fmt: skip


def _tracing_rule() -> str:
    scope = procfs.trace_scope()
    if not scope:
        return "the container or the kernel forbids it"
    return {"1": "only of one's own children (ptrace_scope 1)", "2": "for administrators only (ptrace_scope 2)",
            "3": "for nobody (ptrace_scope 3)"}.get(scope, "the container forbids it")  # fmt: skip


OURS = ("lamplighter.commands.child", "lamplighter.procs.child")  # children: they never live without a parent
SHARED_MEMORY = Path("/dev/shm")
OLD_S = 3600.0


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
        yield Finding("ok", f"nothing of a dead run in {context.runs_dir}")


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
        if parent.isdecimal() and not procfs.pid_start(int(parent)):
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
