"""What the kernel says about processes: state, CPU, bytes, what they wait in. Nothing is stopped, nothing is asked.

In:  a pid.
Out: a ProcessLook of it, its descendants, its start and end; the machine's own facts (boot, mounts, memory, processor).

Only this package reads /proc. Where there is none (macOS), or with LAMP_PROCS=psutil, the same functions answer through
psutil; `not_known` then says what nobody can know there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from lamplighter.procs import cgroup

BY_PSUTIL = os.environ.get("LAMP_PROCS") == "psutil" or not os.path.exists("/proc/self/stat")  # noqa: PTH110 (half the price)
if BY_PSUTIL:
    from lamplighter.procs import by_psutil
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATES = {"R": "running", "S": "asleep", "D": "in uninterruptible sleep (disk or kernel)", "T": "stopped", "t": "traced",
          "Z": "dead", "X": "dead", "I": "idle"}  # fmt: skip
COMPILERS = ("cc1plus", "cc1", "g++", "gcc", "c++", "clang", "ld", "as", "collect2", "nvcc", "ptxas", "cicc")
READ, WRITE, RECVFROM, FUTEX, NANOSLEEP = "read", "write", "recvfrom", "futex", ("nanosleep", "clock_nanosleep")
SYSCALLS_X86_64 = {
    "0": "read",
    "1": "write",
    "45": "recvfrom",
    "202": "futex",
    "35": "nanosleep",
    "230": "clock_nanosleep",
}
SYSCALLS_GENERIC = {
    "63": "read",
    "64": "write",
    "207": "recvfrom",
    "98": "futex",
    "101": "nanosleep",
    "115": "clock_nanosleep",
}
_MACHINE = os.uname().machine
_SYSCALLS = (
    SYSCALLS_X86_64 if _MACHINE == "x86_64" else SYSCALLS_GENERIC
)  # aarch64, riscv64, loongarch64 share one table
TGKILL = 234 if _MACHINE == "x86_64" else 131
_FREEZERS = (
    "__refrigerator",
    "do_freezer_trap",
)  # where a frozen process sleeps, unless it is shown as uninterruptible


@dataclass(frozen=True)
class ThreadLook:
    """One thread: whether it runs, and what it sleeps in."""

    tid: int
    state: str
    cpu_ns: int
    starved_ns: int  # ready to run, but no core was free
    wchan: str
    syscall: str  # by name where the rules need it, else its number; or "running"; "" where it may not be read
    slices: int = -1  # how often it was put on a core: the same twice means that it never woke in between


@dataclass(frozen=True)
class ProcessLook:
    """A process at one moment; the lower half only on a close look, and None or empty where it cannot be known."""

    pid: int
    state: str = "X"
    cpu_s: float = 0.0
    rss_bytes: int = 0
    threads: int = 0
    name: str = ""
    wchan: str = ""
    syscall: str = ""
    read_bytes: int | None = 0  # by any means: files, pipes, sockets
    written_bytes: int | None = 0
    disk_bytes: int | None = 0  # read from or written to the disk: moves inside one long write as well
    waits_on: str = ""  # the file, pipe or socket behind the descriptor that it reads or writes
    each: tuple[ThreadLook, ...] = ()
    frozen: bool = False  # with its control group

    @property
    def words(self) -> str:
        return _STATES.get(self.state, self.state)

    @property
    def stopped(self) -> bool:
        """By a signal; a process that is being traced (`t`) is looked at, by us or by a debugger."""
        return self.state == "T"

    @property
    def moved_bytes(self) -> int:
        """By any means, as far as it is known."""
        return (self.read_bytes or 0) + (self.written_bytes or 0) + (self.disk_bytes or 0)


def not_known(seen: ProcessLook) -> str:
    """What this system does not tell about processes, for the evidence of a verdict; empty where it tells all."""
    blind = ("what it waits in", "bytes it moves", "whether it waits for a core", "kills by the kernel for memory")
    return f"not known on this system: {', '.join(blind)}" if seen.read_bytes is None else ""


def look(pid: int) -> ProcessLook:
    """One read of /proc/PID/stat; a process that is gone is dead."""
    if BY_PSUTIL:
        return ProcessLook(pid, *by_psutil.look(pid), read_bytes=None, written_bytes=None, disk_bytes=None)
    head, tail = _stat(pid)
    if not tail:
        return ProcessLook(pid)
    cpu_s = (int(tail[11]) + int(tail[12])) * _TICK_S
    return ProcessLook(pid, tail[0], cpu_s, int(tail[21]) * _PAGE_BYTES, threads=int(tail[17]), name=head)


def look_closely(pid: int) -> ProcessLook:
    """The same with bytes, waits and every thread; 2 ms for a large process, so only once it is quiet."""
    seen = look(pid)
    if seen.state == "X" or BY_PSUTIL:
        return seen
    io = _table(f"/proc/{pid}/io")
    syscall, descriptor = _syscall(f"/proc/{pid}")
    wchan = read(f"/proc/{pid}/wchan")
    return replace(
        seen,
        wchan=wchan,
        syscall=syscall,
        read_bytes=io.get("rchar", 0),
        written_bytes=io.get("wchar", 0),
        disk_bytes=io.get("read_bytes", 0) + io.get("write_bytes", 0),
        waits_on=_behind(pid, descriptor if syscall in (READ, WRITE, RECVFROM) else ""),
        each=tuple(_look_at_thread(pid, int(tid)) for tid in listed(f"/proc/{pid}/task")),
        frozen=(seen.state == "D" or wchan in _FREEZERS) and cgroup.is_frozen(pid),
    )


def tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    return list(parents(pid))


def parents(pid: int) -> dict[int, int]:
    """Every descendant with its parent; the process itself comes first, with 0."""
    if BY_PSUTIL:
        return by_psutil.parents(pid)
    found, queue = {pid: 0}, [pid]
    while queue:
        parent = queue.pop(0)
        for tid in listed(f"/proc/{parent}/task"):
            for child in map(int, read(f"/proc/{parent}/task/{tid}/children").split()):
                if child not in found:
                    found[child] = parent
                    queue.append(child)
    return found


# ---------------------------------------------------------------- one process


def pid_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot, 0 if it is gone: pid + start name a process for ever."""
    if BY_PSUTIL:
        return by_psutil.pid_start(pid)
    _, tail = _stat(pid)
    return int(tail[19]) if tail else 0


def age_s(pid: int) -> float | None:
    """Seconds since it was started; None if it is gone."""
    if BY_PSUTIL:
        return by_psutil.age_s(pid)
    _, tail = _stat(pid)
    return max(0.0, float(read("/proc/uptime").split()[0]) - int(tail[19]) * _TICK_S) if tail else None


def exists(pid: int) -> bool:
    """Whether there is such a process, alive or not yet asked for by its parent."""
    return by_psutil.exists(pid) if BY_PSUTIL else os.path.exists(f"/proc/{pid}")  # noqa: PTH110


def zombie_code(pid: int) -> int | None:
    """The exit code of a process that has ended and that nobody has asked for yet; negative for a signal."""
    _, tail = _stat(pid)
    return os.waitstatus_to_exitcode(int(tail[49])) if len(tail) > 49 and tail[0] == "Z" else None


def is_python(pid: int) -> bool:
    """By its program, not by its name: torch renames its processes."""
    if BY_PSUTIL:
        return by_psutil.is_python(pid)
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
    except OSError:  # it may not be looked into: then its name is all there is
        return look(pid).name.startswith("python")


def command(pid: int) -> str:
    """How it was started, shortened; its name where that may not be read."""
    words = " ".join(read(f"/proc/{pid}/cmdline").replace("\0", " ").split())  # a program after -c has lines of its own
    return (words or look(pid).name)[:120]


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal: without one it must not be sent."""
    return number in caught_signals(pid)


def caught_signals(pid: int) -> list[int]:
    """The signals for which the process has a handler."""
    rows = read(f"/proc/{pid}/status").splitlines()
    caught = int(next((row.split()[1] for row in rows if row.startswith("SigCgt:")), "0"), 16)
    return [number for number in range(1, 65) if caught >> (number - 1) & 1]


def _stat(pid: int) -> tuple[str, list[str]]:
    """The name and the fields after it, the state first; nothing for a process that is gone."""
    head, _, tail = read(f"/proc/{pid}/stat").rpartition(")")
    return head.partition("(")[2], tail.split()


# ---------------------------------------------------------------- ourselves and the machine


def own_memory() -> tuple[int, int]:
    """Resident and mapped bytes of this process."""
    if BY_PSUTIL:
        return by_psutil.own_memory()
    mapped, resident = read("/proc/self/statm").split()[:2]
    return int(resident) * _PAGE_BYTES, int(mapped) * _PAGE_BYTES


def own_peak() -> int:
    """The highest resident memory of this process; rusage would also count what started it."""
    return by_psutil.own_peak() if BY_PSUTIL else _table("/proc/self/status").get("VmHWM", 0) * 1024


def own_descriptor(fd: int) -> str:
    """A path by which a file of ours can be opened once more, with a position and flags of its own."""
    return f"/proc/self/fd/{fd}"


def die_first() -> None:
    """Where memory ends, the kernel takes this process before any other one."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:  # not every system and container lets it be set, and then nothing is lost
        return


def yield_cores(niceness: int) -> None:
    """Others get the cores first, also those of other sessions.

    Linux shares cores between sessions before it looks at the niceness of their processes (sched(7), autogroup): a process that is
    alone in its session takes as much as a training in another one, however nice it is, unless the session is.
    """
    os.nice(niceness)
    try:
        if os.getsid(0) == os.getpid():  # nobody else is made slower by it
            Path("/proc/self/autogroup").write_text(str(niceness))
    except OSError:  # a kernel or a system without it: then niceness is all there is
        return


def boot_id() -> str:
    """Another one after every boot."""
    return by_psutil.boot_id() if BY_PSUTIL else read("/proc/sys/kernel/random/boot_id").strip()


def mounts() -> list[tuple[str, str]]:
    """Every mount point with the kind of its file system."""
    rows = (row.split() for row in read_all("/proc/self/mounts").splitlines())
    return by_psutil.mounts() if BY_PSUTIL else [(row[1], row[2]) for row in rows if len(row) > 2]


def of_processor(field: str) -> str:
    """What /proc/cpuinfo says of the first core; nothing where there is no such file."""
    rows = (row.partition(":") for row in read_all("/proc/cpuinfo").splitlines())
    return next((value.strip() for name, _, value in rows if name.strip() == field), "")


def oom_kills() -> int:
    """How many processes the kernel has killed for memory since boot; 0 where it does not count."""
    return _table("/proc/vmstat", separator=" ").get("oom_kill", 0) if not BY_PSUTIL else 0


def memory_left() -> int:
    """Bytes that can still be had before the machine, or the group that we may use of it, is out of memory."""
    return min([memory_available(), *(limit.left for limit in cgroup.memory_limits())])


def memory_available() -> int:
    """Bytes of the machine that can still be had."""
    return by_psutil.memory_available() if BY_PSUTIL else _table("/proc/meminfo").get("MemAvailable", 0) * 1024


def memory_total() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES


def nvidia_driver() -> str:
    """The version line of NVIDIA's driver; empty where there is none."""
    return read("/proc/driver/nvidia/version").split("\n")[0]


def trace_scope() -> str:
    """Who may read another process's memory, as Yama says it; empty where it does not."""
    return read("/proc/sys/kernel/yama/ptrace_scope").strip()


# ---------------------------------------------------------------- reading


def slices_of(pid: int, tid: int) -> int:
    """How often a thread was put on a core; -1 where the kernel does not count it."""
    times = read(f"/proc/{pid}/task/{tid}/schedstat").split()
    return int(times[2]) if len(times) == 3 else -1


def _look_at_thread(pid: int, tid: int) -> ThreadLook:
    base = f"/proc/{pid}/task/{tid}"
    stat = read(f"{base}/stat")
    state = stat.rsplit(")", 1)[1].split()[0] if ")" in stat else "X"
    times = read(f"{base}/schedstat").split()
    cpu, starved, slices = map(int, times) if len(times) == 3 else (0, 0, -1)
    return ThreadLook(tid, state, cpu, starved, read(f"{base}/wchan"), syscall=_syscall(base)[0], slices=slices)


def _syscall(base: str) -> tuple[str, str]:
    """Its name, or its number where no rule asks for it, and its first argument."""
    words = [*read(f"{base}/syscall").split(), "", ""]
    return _SYSCALLS.get(words[0], words[0]), words[1]


def _behind(pid: int, descriptor: str) -> str:
    if not descriptor:
        return ""
    try:
        name = str(Path(f"/proc/{pid}/fd/{int(descriptor, 16)}").readlink())
    except (OSError, ValueError):  # the descriptor is closed, or not ours to see
        return ""
    return _peer(pid, name) if name.startswith("socket:[") else name


@lru_cache(maxsize=256)
def _peer(pid: int, name: str) -> str:
    """socket:[4711] -> the address at its other end; looked up once, for the tables are long."""
    inode = name[8:-1]
    for table in ("tcp", "tcp6"):
        for row in read_all(f"/proc/{pid}/net/{table}").splitlines()[1:]:
            fields = row.split()
            if len(fields) > 9 and fields[9] == inode:
                return f"{name}, connected to {address(fields[2])}"
    return name


def address(text: str) -> str:
    """0100007F:9A7B -> 127.0.0.1:39547."""
    import socket  # few ask, and every start of a command would pay for it

    host, port = text.split(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return f"{socket.inet_ntop(family, b''.join(words))}:{int(port, 16)}"


def read_all(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # no such file on this kernel
        return ""


def read(path: str) -> str:
    """A small file of /proc; empty where it may not be read or is gone. Half the price of Path.read_text."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # gone, or not ours to see
        return ""
    try:
        return os.read(fd, 1 << 16).decode("utf-8", "replace")
    except OSError:  # it ended while it was read
        return ""
    finally:
        os.close(fd)


def listed(path: str) -> list[str]:
    """The names in a folder; none where it is gone."""
    try:
        return os.listdir(path)
    except OSError:  # gone
        return []


def _table(path: str, separator: str = ":") -> dict[str, int]:
    rows = (line.split(separator, 1) for line in read(path).splitlines() if separator in line)
    found = {}
    for name, value in rows:
        number = value.split()[0] if value.split() else ""
        if number.isdecimal():
            found[name] = int(number)
    return found
