"""One look at processes from outside: state, CPU, bytes, what they wait in; nothing is stopped, nothing is asked.

In:  a pid.
Out: Observations of it and of all that it started, from /proc alone; a quiet process is looked at more closely.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lamplighter.procs import cgroup
from lamplighter.report import Slot

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STATES = {"R": "running", "S": "asleep", "D": "in uninterruptible sleep (disk or kernel)", "T": "stopped", "t": "traced",
          "Z": "dead", "X": "dead", "I": "idle"}  # fmt: skip
COMPILERS = ("cc1plus", "cc1", "g++", "gcc", "c++", "clang", "ld", "as", "collect2", "nvcc", "ptxas", "cicc")
FUTEX, READ, WRITE, NANOSLEEP, RECVFROM = "202", "0", "1", ("35", "230"), "45"  # x86-64 system calls


@dataclass(frozen=True)
class ThreadLook:
    """One thread: whether it runs, and what it sleeps in."""

    tid: int
    state: str
    cpu_ns: int
    starved_ns: int  # ready to run, but no core was free
    wchan: str
    syscall: str  # the number, or "running", or "" where it may not be read


@dataclass(frozen=True)
class ProcessLook:
    """What /proc says about a process at one moment; the lower half only on a close look."""

    pid: int
    state: str = "X"
    cpu_s: float = 0.0
    rss_bytes: int = 0
    threads: int = 0
    name: str = ""
    wchan: str = ""
    syscall: str = ""
    read_bytes: int = 0  # by any means: files, pipes, sockets
    written_bytes: int = 0
    disk_bytes: int = 0  # read from or written to the disk: moves inside one long write as well
    waits_on: str = ""  # the file, pipe or socket behind the descriptor that it reads or writes
    each: tuple[ThreadLook, ...] = ()

    @property
    def words(self) -> str:
        return STATES.get(self.state, self.state)

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


@dataclass(frozen=True)
class Observation:
    """One moment of a run: the slot, and the process with all its descendants (it comes first)."""

    at: float  # monotonic seconds
    slot: Slot
    tree: tuple[ProcessLook, ...]

    @property
    def main(self) -> ProcessLook:
        return self.tree[0]

    @property
    def quiet_s(self) -> float:
        return max(0.0, self.at - self.slot.tick_ns / 1e9)

    @property
    def cpu_s(self) -> float:
        return sum(process.cpu_s for process in self.tree)

    @property
    def moved_bytes(self) -> int:
        """By any means, less what our own questions have moved."""
        moved = sum(process.read_bytes + process.written_bytes + process.disk_bytes for process in self.tree)
        return moved - self.slot.answered_bytes

    @property
    def compilers(self) -> list[ProcessLook]:
        return [process for process in self.tree[1:] if process.name in COMPILERS]


def look(pid: int) -> ProcessLook:
    """One read of /proc/PID/stat; a process that is gone is dead."""
    stat = _read(f"/proc/{pid}/stat")
    if not stat:
        return ProcessLook(pid) if sys.platform == "linux" else _look_by_psutil(pid)
    head, tail = stat.rsplit(")", 1)
    rest = tail.split()
    cpu_s = (int(rest[11]) + int(rest[12])) * TICK_S
    return ProcessLook(pid, rest[0], cpu_s, int(rest[21]) * PAGE_BYTES, int(rest[17]), head.split("(", 1)[1])


def look_closely(pid: int) -> ProcessLook:
    """The same with bytes, waits and every thread; 2 ms for a large process, so only once it is quiet."""
    seen = look(pid)
    if seen.state == "X":
        return seen
    io = _table(Path(f"/proc/{pid}/io"))
    syscall = _first_word(f"/proc/{pid}/syscall")
    descriptor = _second_word(f"/proc/{pid}/syscall") if syscall in (READ, WRITE, RECVFROM) else ""
    each = tuple(_look_at_thread(pid, int(tid)) for tid in listed(f"/proc/{pid}/task"))
    return ProcessLook(
        seen.pid,
        seen.state,
        seen.cpu_s,
        seen.rss_bytes,
        seen.threads,
        seen.name,
        _read(f"/proc/{pid}/wchan"),
        syscall,
        io.get("rchar", 0),
        io.get("wchar", 0),
        io.get("read_bytes", 0) + io.get("write_bytes", 0),
        _behind(pid, descriptor),
        each,
    )


def tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    return list(parents(pid))


def parents(pid: int) -> dict[int, int]:
    """Every descendant with its parent; the process itself comes first, with 0."""
    found, queue = {pid: 0}, [pid]
    while queue:
        parent = queue.pop(0)
        for tid in listed(f"/proc/{parent}/task"):
            for child in map(int, _read(f"/proc/{parent}/task/{tid}/children").split()):
                if child not in found:
                    found[child] = parent
                    queue.append(child)
    return found


def oom_kills() -> int:
    """How many processes the kernel has killed for memory since boot."""
    return _table(Path("/proc/vmstat"), separator=" ").get("oom_kill", 0)


def memory_left() -> int:
    """Bytes that can still be had before the machine, or the group that we may use of it, is out of memory."""
    of_machine = _table(Path("/proc/meminfo")).get("MemAvailable", 0) * 1024
    return min([of_machine, *(limit.left for limit in cgroup.memory_limits())])


def _look_at_thread(pid: int, tid: int) -> ThreadLook:
    base = f"/proc/{pid}/task/{tid}"
    stat = _read(f"{base}/stat")
    state = stat.rsplit(")", 1)[1].split()[0] if ")" in stat else "X"
    times = _read(f"{base}/schedstat").split()
    cpu, starved = (int(times[0]), int(times[1])) if len(times) >= 2 else (0, 0)
    return ThreadLook(tid, state, cpu, starved, _read(f"{base}/wchan"), _first_word(f"{base}/syscall"))


def _behind(pid: int, descriptor: str) -> str:
    if not descriptor:
        return ""
    try:
        name = str(Path(f"/proc/{pid}/fd/{int(descriptor, 16)}").readlink())
    except (OSError, ValueError):
        return ""
    return _peer(pid, name) if name.startswith("socket:[") else name


@lru_cache(maxsize=256)
def _peer(pid: int, name: str) -> str:
    """socket:[4711] -> the address at its other end; looked up once, for the tables are long."""
    inode = name[8:-1]
    for table in ("tcp", "tcp6"):
        for row in _read_all(f"/proc/{pid}/net/{table}").splitlines()[1:]:
            fields = row.split()
            if len(fields) > 9 and fields[9] == inode:
                return f"{name}, connected to {_address(fields[2])}"
    return name


def _address(text: str) -> str:
    """0100007F:9A7B -> 127.0.0.1:39547."""
    host, port = text.split(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return f"{socket.inet_ntop(family, b''.join(words))}:{int(port, 16)}"


def _read_all(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _read(path: str) -> str:
    """A small file of /proc; empty where it may not be read or is gone. Half the price of Path.read_text."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 1 << 16).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def _first_word(path: str) -> str:
    return (_read(path).split() or [""])[0]


def _second_word(path: str) -> str:
    return ([*_read(path).split(), "", ""])[1]


def listed(path: str) -> list[str]:
    """The names in a folder; none where it is gone."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def _table(path: Path, separator: str = ":") -> dict[str, int]:
    rows = (line.split(separator, 1) for line in _read(str(path)).splitlines() if separator in line)
    found = {}
    for name, value in rows:
        number = value.split()[0] if value.split() else ""
        if number.isdecimal():
            found[name] = int(number)
    return found


def _look_by_psutil(pid: int) -> ProcessLook:
    """Where there is no /proc."""
    import psutil

    try:
        process = psutil.Process(pid)
        state = {"stopped": "T", "running": "R", "zombie": "Z"}.get(process.status(), "S")
        times = process.cpu_times()
        return ProcessLook(pid, state, times.user + times.system, process.memory_info().rss, process.num_threads())
    except psutil.Error:
        return ProcessLook(pid)
