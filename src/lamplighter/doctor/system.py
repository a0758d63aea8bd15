"""Probes of the machine and of what is installed on it: torch against the driver, packages, clock; cores, files, memory, the
right to look at other processes, and what dead runs have left behind.

In:  this interpreter and its packages, nvidia-smi where there is one; the kernel, control groups, limits; the runs folder.
Out: Findings, each with the number and what would raise it. Of the run only the device that it asks for is looked at.
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
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lamplighter.doctor.probe import Finding, Level, ProbeContext, fault, finding, first_line, ok, warn
from lamplighter.procs import cgroup, procfs, stacks
from lamplighter.procs.lock import is_held
from lamplighter.procs.pool import usable_cores
from lamplighter.rundir import CACHE_NAME, RunDir, human_bytes, is_alive, is_running, read_holder, read_status

# Packages of this field; what they require of each other is checked. Those of BOUND stop working where it is not kept:
# they hold code that was compiled for one torch, or refuse to be imported.
_BOUND = ("torchvision", "torchaudio", "torchtext", "xformers", "flash-attn", "triton", "transformers", "torch")
_FIELD = (
    *_BOUND, "lamplighter", "accelerate", "bitsandbytes", "datasets", "deepspeed", "gigatoken", "huggingface-hub",
    "lightning", "numpy", "pandas", "peft", "pyarrow", "pytorch-lightning", "safetensors", "scikit-learn", "scipy",
    "sentence-transformers", "tokenizers", "torchmetrics", "trl", "vllm",
)  # fmt: skip
_MODULES = {"scikit-learn": "sklearn", "huggingface-hub": "huggingface_hub", "pytorch-lightning": "pytorch_lightning"}
_COMPILED_FOR_TORCH = ("torchvision", "torchaudio")  # imported by others unasked, so a broken one breaks those
_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_DAY_S = 86_400.0
_SHARED_MEMORY = Path("/dev/shm")
_FEW_FILES, _USUAL_FILES = 256, 1024
_FEW_PROCESSES = 200
_SMALL_SHARED = 128_000_000  # a container's default is 64 MB; a worker's batches pass through it
_BUSY = 0.6  # of the cores, taken by others
_SWAPPED = 0.2  # of the memory
_OURS = ("lamplighter.commands.child_main", "lamplighter.procs.child")  # children: they never live without a parent
_OLD_S = 3600.0


def _versions(what: str, why: str, advice: str, module: str = "torch") -> Finding:
    """A package that does not fit the others, or this machine."""
    return fault(what, why, advice, "versions", culprit={"module": module})


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
        advice = "pip install --force-reinstall torch, of one build"
        yield _versions(f"torch cannot be imported: {error}", "a broken or partial installation", advice)
        return
    built, rocm = torch.version.cuda or "", torch.version.hip or ""
    kind = f"CUDA {built}" if built else "ROCm" if rocm else "the CPU"
    yield ok(f"Python {platform.python_version()}, torch {torch.__version__}, built for {kind}")
    yield from _numpy_and_torch(context)
    if trouble:
        why = "the driver and its tools are of different versions, or the module is not loaded"
        yield warn(
            f"nvidia-smi does not work: {trouble}", why, "restart the machine, or install the driver anew", "driver"
        )
    refused = ""
    if built or rocm:
        context.now("starting the GPU")
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            refused = str(error)
    yield from judge_driver(built or rocm, driver, refused, context.run.train.device)
    if torch.cuda.is_available():
        yield from _each_gpu(context)


def ask_driver() -> tuple[Driver | None, str]:
    """The driver, and what was wrong where it could not be asked."""
    if shutil.which(_SMI[0]) is None:
        return None, ""
    try:
        rows = subprocess.run(_SMI, capture_output=True, text=True, timeout=30, check=False)
        header = subprocess.run(_SMI[:1], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if rows.returncode:
        return None, " ".join((rows.stdout + rows.stderr).split())[:200]
    found = [[cell.strip() for cell in row.split(",")] for row in rows.stdout.splitlines() if row.strip()]
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", header)
    return Driver(found[0][1] if found else "", cuda.group(1) if cuda else "", tuple(row[0] for row in found)), ""


def judge_driver(built: str, driver: Driver | None, refused: str, device: str) -> Iterator[Finding]:
    """`built`: the CUDA that torch was built for, empty for a CPU build. `refused`: what torch said when it was started."""
    said = first_line(refused)
    if not built:
        yield from _judge_cpu_build(driver, device)
    elif refused and ("too old" in refused or (driver and driver.cuda and _older(driver.cuda, built))):
        have = f"driver {driver.version} (up to CUDA {driver.cuda or '?'})" if driver else "the driver"
        what = f"{have} is too old for torch, which was built for CUDA {built}"
        yield fault(what, said, "a newer driver, or a torch that was built for an older CUDA", "driver")
    elif refused and driver is None:
        what = f"torch was built for CUDA {built}, and there is no driver: everything runs on the CPU"
        advice = "install the driver, run the container with --gpus all, or use a CPU build of torch"
        if device == "cuda":
            yield fault(what, said, advice, "driver", settings={"train.device": "auto"})
        else:
            yield warn(what, said, advice, "driver")
    elif refused:
        why = f"driver {driver.version if driver else '?'}, built for CUDA {built}"
        advice = "nvidia-smi; CUDA_VISIBLE_DEVICES; restart the machine if the driver was changed"
        yield fault(f"torch cannot start the GPU: {said}", why, advice, "driver")
    elif driver and driver.cuda and int(driver.cuda.split(".")[0]) < int(built.split(".")[0]):
        what = f"the driver runs up to CUDA {driver.cuda}, torch was built for {built}"
        yield warn(what, "newer kernels may fail at their first use", "a newer driver", "driver")


def _judge_cpu_build(driver: Driver | None, device: str) -> Iterator[Finding]:
    if driver and driver.gpus and device != "cpu":
        what = f"torch is a CPU build, and this machine has {', '.join(driver.gpus)}"
        advice = "install a CUDA build of torch (its site names the index for your driver)"
        yield _versions(what, "the GPU would stand idle while it is paid for", advice)
    elif device == "cuda":
        what, advice = "train.device is cuda, and torch is a CPU build", "a CUDA build of torch, or --train.device auto"
        where, settings = {"module": "torch"}, {"train.device": "auto"}
        yield fault(what, "", advice, "versions", culprit=where, settings=settings)


def _older(one: str, other: str) -> bool:
    return [int(part) for part in one.split(".")] < [int(part) for part in other.split(".")]


def _each_gpu(context: ProbeContext) -> Iterator[Finding]:
    """A product on each, checked; a GPU that torch has no kernels for fails here and not after an hour."""
    import torch

    for number in range(torch.cuda.device_count()):
        gpu, where = f"GPU {number} ({torch.cuda.get_device_name(number)})", {"gpu": number}
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(number))
        context.now(f"a product on GPU {number}")
        try:
            ones = torch.ones(512, 512, device=f"cuda:{number}")
            right = bool((ones @ ones == 512).all().item())
        except RuntimeError as error:
            why = f"this torch has kernels for: {' '.join(torch.cuda.get_arch_list())}"
            what, advice = f"{gpu} cannot compute: {first_line(error)}", "a build of torch for this GPU"
            yield fault(what, why, advice, "driver", culprit=where)
            continue
        if not right:
            why, advice = "512 x 1 x 1 did not add up", "another GPU; this one is broken"
            yield fault(f"{gpu} computes wrongly", why, advice, "gpu", culprit=where)
        elif free < 0.5 * total:
            what = f"{gpu}: {free:.1f} of {total:.1f} GiB are free"
            yield warn(what, "somebody else computes on it", "nvidia-smi names the process", culprit=where)
        else:
            yield ok(f"{gpu}: {free:.1f} of {total:.1f} GiB free")


def _numpy_and_torch(context: ProbeContext) -> Iterator[Finding]:
    """A torch that was compiled for another numpy says so only when an array is handed over."""
    context.now("handing an array to torch")
    import numpy as np
    import torch

    try:
        torch.from_numpy(np.ones(4, np.float32)).numpy()
    except RuntimeError as error:
        what = f"torch and numpy {np.__version__} do not work together: {first_line(error)}"
        why, advice = "torch was compiled for another numpy", "pip install 'numpy<2', or a newer torch"
        yield _versions(what, why, advice, "numpy")


# ---------------------------------------------------------------- packages


def packages(context: ProbeContext) -> Iterator[Finding]:
    """What the packages of this field require of each other, and whether the touchy ones can be imported."""
    context.now("reading what the packages require")
    installed = [name for name in _FIELD if _version(name)]
    for name in _FIELD:
        yield from _judge_metadata(name)
    for name in installed:
        for text in metadata.requires(name) or []:
            yield from _judge_requirement(name, Requirement(text))
    imported = []
    for name in _COMPILED_FOR_TORCH:
        if importlib.util.find_spec(name) is None:
            continue
        context.now(f"importing {name}")
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  whatever it raises is the finding
            what = f"{name} {_version(name) or '?'} cannot be imported: {type(error).__name__}: {first_line(error)}"
            why = f"torch is {_version('torch') or 'none'}; transformers and others import {name} unasked and break with it"
            yield _versions(what, why, f"pip uninstall {name}, or the {name} for this torch", name)
        else:
            imported.append(name)
    also = f"; {', '.join(imported)} can be imported" if imported else ""
    yield ok(f"requirements of {len(installed)} packages were compared with what is installed{also}")


def _judge_metadata(name: str) -> Iterator[Finding]:
    """A package that can be imported and does not say its version: others ask for it, and fail with a riddle."""
    module = _MODULES.get(name, name.replace("-", "_"))
    spec = importlib.util.find_spec(module)
    if _version(name) or spec is None or "-packages" not in (spec.origin or ""):
        return
    try:
        metadata.distribution(name)
        what = f"the metadata of {name} are damaged: its folder {_dist_info(name)} names no version"
    except metadata.PackageNotFoundError:  # that is the finding
        what = f"the metadata of {name} are missing: it can be imported from {Path(spec.origin or '').parent}"
    why = "an installation was broken off, or copied by hand; transformers and others ask for its version and fail"
    yield _versions(what, why, f"pip install --force-reinstall --no-deps {name}", name)


def _dist_info(name: str) -> str:
    return str(getattr(metadata.distribution(name), "_path", ""))


def _judge_requirement(name: str, wanted: Requirement) -> Iterator[Finding]:
    """One line of a package's requirements against what is installed."""
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return
    have, where = _version(wanted.name), {"module": name}
    needs = f"{name} {_version(name)} needs {wanted.name}{wanted.specifier}"
    if not have:
        advice = f"pip install '{wanted.name}{wanted.specifier}'"
        yield warn(f"{needs}, which is not installed", "", advice, "versions", culprit=where)
    elif not wanted.specifier.contains(have, prereleases=True):
        compiled = name in _COMPILED_FOR_TORCH
        why = "it holds code that was compiled for that one" if compiled else "its authors exclude this version"
        advice = f"pip install --upgrade {name} (one that fits {wanted.name} {have}), or pip uninstall {name}"
        level: Level = "fault" if canonicalize_name(name) in _BOUND else "warn"
        yield finding(level, f"{needs}, and {have} is installed", why, advice, "versions", culprit=where)


def _version(name: str) -> str:
    try:
        return metadata.version(name) or ""
    except metadata.PackageNotFoundError:  # that is the answer
        return ""
    except (OSError, KeyError, TypeError):  # damaged: each version of the library says it in its own way
        return ""


# ---------------------------------------------------------------- clock and language


def clock_and_language(context: ProbeContext) -> Iterator[Finding]:
    """A clock that goes wrong, and an encoding in which text cannot be read."""
    now, installed = time.time(), Path(__file__).stat().st_mtime
    probe = context.scratch / "clock"
    probe.touch()
    apart = probe.stat().st_mtime - now
    if installed > now + _DAY_S:
        day = time.strftime("%Y-%m-%d", time.gmtime(now))
        what = f"the clock says {day}, which is before this package was installed"
        why = "downloads fail by their certificates, and ages of files are wrong"
        yield warn(what, why, "set the clock (timedatectl set-ntp true)", "clock")
    elif abs(apart) > 5:
        what = f"the file system's clock is {apart:+.0f} s from this machine's"
        yield warn(what, f"{context.scratch} is on another machine", "set both clocks", "clock")
    encoding = locale.getpreferredencoding(False)
    if encoding.lower().replace("-", "").replace("_", "") != "utf8" and not sys.flags.utf8_mode:
        why = "scripts of your own that open files without an encoding fail on, or garble, other letters"
        yield warn(f"text files are read as {encoding} here", why, "export PYTHONUTF8=1", "encoding")
    else:
        yield ok(f"clock {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(now))}, text in UTF-8")


def memory_left() -> tuple[int, int | None]:
    """Bytes that can still be had, and the limit of our control group where there is one."""
    return procfs.memory_left(), min((one.bytes for one in cgroup.memory_limits()), default=None)


# ---------------------------------------------------------------- processors


def oversubscribed(name: str, count: int, cores: int, advice: str = "", **more: Any) -> Finding:
    """Threads or workers that are set somewhere, against the cores that may be used."""
    what = f"{name} is {count}, and {cores} cores may be used"
    return warn(what, "those that wait for a core make all of them slower", advice, "oversubscribed", **more)


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
        yield oversubscribed("OMP_NUM_THREADS", int(threads), cores, f"export OMP_NUM_THREADS={cores}")


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
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    context.now("reading a stack with py-spy")
    try:
        tries = (stacks.by_pyspy(sleeper.pid, nonblocking=True, sampler_silent=False, deadline_s=8.0) for _ in range(3))
        read = any(found is not None for found in tries)  # at first it may not have come to its first line yet
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
    why = "py-spy read none of a process that was started for it" if stacks.py_spy() else "py-spy is not installed"
    yield warn(f"stacks of other processes cannot be read: {rule}", why, advice, "no_ptrace")


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
    holder, status = read_holder(run.lock), read_status(run)
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
        holder, folder = read_holder(path), path.parent
        if not holder:
            continue
        who, age_s = f"process {holder.get('pid')} on {holder.get('host')}", time.time() - float(holder.get("t") or 0)
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
