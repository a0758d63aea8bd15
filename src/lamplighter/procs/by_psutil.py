"""The questions of procfs where there is no /proc, answered by psutil; macOS first of all.

In:  a pid.
Out: what psutil knows on every system. What it cannot know (waits, bytes, single threads) is left out, never made up.
"""

from __future__ import annotations

import ctypes
import resource
import sys
import time
from pathlib import Path

import psutil

_STATES = {"running": "R", "stopped": "T", "tracing-stop": "t", "zombie": "Z", "dead": "X"}
_GONE = ("X", 0.0, 0, 0, "")


def look(pid: int) -> tuple[str, float, int, int, str]:
    """State, CPU seconds, resident bytes, threads, name."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            state, name = _STATES.get(process.status(), "S"), process.name()
            if state == "Z":
                return "Z", 0.0, 0, 0, name
            times = process.cpu_times()
            return state, times.user + times.system, process.memory_info().rss, process.num_threads(), name
    except psutil.ZombieProcess:  # ended, and nobody has asked for it
        return "Z", 0.0, 0, 0, ""
    except psutil.AccessDenied:  # another user's: it is there, and that is all
        return "S", 0.0, 0, 0, ""
    except psutil.NoSuchProcess:  # that is the answer
        return _GONE


def parents(pid: int) -> dict[int, int]:
    """Every descendant with its parent; the process itself comes first, with 0."""
    found, queue, table = {pid: 0}, [pid], _children()
    while queue:
        parent = queue.pop(0)
        for child in table.get(parent, []):
            if child not in found:
                found[child] = parent
                queue.append(child)
    return found


def _children() -> dict[int, list[int]]:
    table: dict[int, list[int]] = {}
    for process in psutil.process_iter(["ppid"]):
        table.setdefault(process.info["ppid"] or 0, []).append(process.pid)
    return table


def pid_start(pid: int) -> int:
    """In hundredths of a second; 0 if it is gone."""
    try:
        return int(psutil.Process(pid).create_time() * 100)
    except psutil.Error:  # it is gone, or another user's
        return 0


def age_s(pid: int) -> float | None:
    start = pid_start(pid)
    return max(0.0, time.time() - start / 100) if start else None


def exists(pid: int) -> bool:
    return bool(psutil.pid_exists(pid))


def is_python(pid: int) -> bool:
    """By its program where that may be read; on macOS its name begins with a capital letter."""
    try:
        return Path(psutil.Process(pid).exe()).name.lower().startswith("python")
    except psutil.Error:
        return look(pid)[4].lower().startswith("python")


def own_memory() -> tuple[int, int]:
    """Resident and mapped bytes of this process."""
    memory = psutil.Process().memory_info()
    return memory.rss, memory.vms


def own_peak() -> int:
    """In bytes; macOS counts in bytes, others in KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def boot_id() -> str:
    """macOS names each boot; elsewhere the time of the boot must do."""
    if sys.platform == "darwin":
        name, size = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
        if ctypes.CDLL(None).sysctlbyname(b"kern.bootsessionuuid", name, ctypes.byref(size), None, 0) == 0:
            return name.value.decode()
    return f"{psutil.boot_time():.0f}"


def mounts() -> list[tuple[str, str]]:
    """Every mount point with the kind of its file system."""
    return [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]


def memory_available() -> int:
    return int(psutil.virtual_memory().available)
