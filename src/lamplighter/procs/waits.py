"""What every thread of a process waits for, and which processes could end that wait: facts of the kernel alone.

In:  the pids of a process tree.
Out: a ThreadWait for every thread: what kind of wait, on which path, address or process, whether a timer ends it by
     itself, who has the other end, and whether somebody who cannot be looked at (a person, the network) may end it.

Nothing is stopped and nothing is asked: /proc/PID/task/TID/syscall has the system call and its arguments, /proc/PID/fd the
descriptors, /proc/locks the file locks, and netlink the other ends of sockets. A wait on a private futex (a lock of one
process) can be ended by the threads of that process alone; on a shared one by every process that maps the same memory.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from lamplighter.procs import procfs

# System calls by number: those that can last. x86-64, and the table that aarch64, riscv64 and loongarch64 share.
_X86_64 = {
    0: "read", 1: "write", 2: "open", 7: "poll", 16: "ioctl", 17: "pread", 18: "pwrite", 19: "readv", 20: "writev",
    23: "select", 34: "pause", 35: "nanosleep", 40: "sendfile", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom",
    46: "sendmsg", 47: "recvmsg", 61: "wait4", 65: "semop", 70: "msgrcv", 72: "fcntl", 73: "flock", 74: "fsync",
    75: "fdatasync", 128: "rt_sigtimedwait", 130: "rt_sigsuspend", 202: "futex", 219: "restart_syscall",
    220: "semtimedop", 242: "mq_send", 243: "mq_receive", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6",
    271: "ppoll", 275: "splice", 281: "epoll_pwait", 288: "accept4", 299: "recvmmsg", 441: "epoll_pwait2", 449: "futex_waitv",
}  # fmt: skip
_GENERIC = {
    63: "read", 64: "write", 67: "pread", 68: "pwrite", 65: "readv", 66: "writev", 29: "ioctl", 72: "pselect6", 73: "ppoll",
    101: "nanosleep", 71: "sendfile", 203: "connect", 202: "accept", 206: "sendto", 207: "recvfrom", 211: "sendmsg",
    212: "recvmsg", 260: "wait4", 193: "semop", 188: "msgrcv", 25: "fcntl", 32: "flock", 82: "fsync", 83: "fdatasync",
    137: "rt_sigtimedwait", 133: "rt_sigsuspend", 98: "futex", 128: "restart_syscall", 192: "semtimedop", 182: "mq_send", 183: "mq_receive",
    115: "clock_nanosleep", 22: "epoll_pwait", 95: "waitid", 56: "openat", 76: "splice", 242: "accept4", 243: "recvmmsg",
    441: "epoll_pwait2", 449: "futex_waitv",
}  # fmt: skip
_SYSCALLS = _X86_64 if os.uname().machine == "x86_64" else _GENERIC
BETWEEN_PROCESSES = {  # anybody who knows the key or the name may end these
    "semop": "a System V semaphore", "semtimedop": "a System V semaphore", "msgrcv": "a message of a System V queue",
    "mq_receive": "a message of a POSIX queue", "mq_send": "room in a POSIX queue",
}  # fmt: skip
_SETTLE_S, _SETTLE_TRIES = 0.1, 5
_SHARED = "/dev/shm"
_PRIVATE = "sem.mp-"  # semaphores of multiprocessing: nobody outside knows their names
_READS = {"read", "pread", "readv", "recvfrom", "recvmsg", "recvmmsg", "accept", "accept4", "splice"}
_WRITES = {"write", "pwrite", "writev", "sendto", "sendmsg", "connect"}
_FUTEX_PRIVATE, _FUTEX_COMMAND = 128, 0x7F
_FUTEX_WAITS = {0, 6, 9, 11}  # WAIT, LOCK_PI, WAIT_BITSET, WAIT_REQUEUE_PI
_MOST_COMMANDS = 32
_COMMON_SIGNALS = {2, 4, 6, 7, 8, 11, 13, 23, 32, 33, 34}  # INT; ILL to SEGV; PIPE; URG, which is ours; those of glibc
_LOCK_WAITS = {7, 38}  # fcntl: F_SETLKW, F_OFD_SETLKW
_TCP_STATES = {1: "established", 2: "connecting", 3: "connecting", 4: "closing", 5: "closing", 8: "closed by the other end",
               10: "listening"}  # fmt: skip


@dataclass(frozen=True)
class ThreadWait:
    """What one thread sleeps in. An empty kind: it runs, or may not be looked at."""

    tid: int
    kind: str = ""
    on: str = ""  # a path, an address, a process; in words
    timed: bool = False  # it ends by itself
    peers: tuple[int, ...] = ()  # processes that can end it; its own pid where its own threads can
    anybody: bool = False  # a person, the network, or a process that is not known may end it
    syscall: str = ""
    pid: int = 0  # the one other process that this is about: a child, the holder of a lock
    idle_s: float = -1.0  # of a socket: since the last byte came; -1 where it is not known
    fd: int = -1  # the descriptor that is read or written, where it is one
    writes: bool = False
    slices: int = -1  # how often it had been on a core then: more since means that it may wait for something else now


@dataclass(frozen=True)
class FileLock:
    """A lock on a file, as /proc/locks has it."""

    kind: str  # flock, posix
    pid: int
    path: str


@dataclass(frozen=True)
class Waits:
    """What the threads of some processes wait for."""

    threads: Mapping[int, tuple[ThreadWait, ...]] = field(default_factory=dict)  # by pid
    locked: Mapping[int, tuple[FileLock, ...]] = field(
        default_factory=dict
    )  # what others have locked of its files, by pid
    commands: Mapping[int, str] = field(default_factory=dict)  # of other processes that could end a wait, by pid
    handlers: Mapping[int, tuple[int, ...]] = field(
        default_factory=dict
    )  # signals that it handles beyond Python's own, by pid


def look_at_waits(pids: Sequence[int], paths: Sequence[str] = ()) -> Waits:
    """The waits of every thread of these processes; nothing where the system does not tell (macOS).

    `paths`: files that they are known to try to lock again and again, without keeping them open in between.
    """
    if procfs.BY_PSUTIL:
        return Waits()
    system = _System()
    threads = {pid: tuple(system.waits(pid)) for pid in pids}
    locked = {pid: tuple(_locked_files(system, pid, paths)) for pid in pids}
    named = {other for each in threads.values() for wait in each for other in (*wait.peers, wait.pid)}
    named |= {lock.pid for each in locked.values() for lock in each}
    others = sorted(pid for pid in named if pid > 0 and pid not in threads)[:_MOST_COMMANDS]
    commands = {pid: procfs.command(pid) for pid in others}
    return Waits(threads, locked, commands, {pid: _handlers(pid) for pid in pids})


def look_when_settled(pids: Sequence[int], paths: Sequence[str] = ()) -> Waits:
    """After these processes were traced: a thread that was stopped for it runs for a moment before it waits again."""
    for _ in range(_SETTLE_TRIES):
        seen = look_at_waits(pids, paths)
        time.sleep(_SETTLE_S)
        if all(procfs.slices_of(pid, wait.tid) == wait.slices for pid in pids for wait in seen.threads.get(pid, ())):
            break
    return seen


def _handlers(pid: int) -> tuple[int, ...]:
    """Without those that every Python, C library or crash handler has: whoever sends one of the rest may end a wait."""
    return tuple(number for number in procfs.caught_signals(pid) if number not in _COMMON_SIGNALS)


def _locked_files(system: _System, pid: int, paths: Sequence[str]) -> list[FileLock]:
    """The files that a process has open, or tries to lock, and that are locked: what a retry loop may be waiting for.

    A lock of the process's own on a descriptor is left out; one on the file (fcntl) belongs to the process as a whole, and may be
    what another part of it waits for (two connections to one database).
    """
    by_inode: dict[str, list[_Lock]] = defaultdict(list)
    for lock in system.locks:
        if not lock.waits and lock.pid > 0:
            by_inode[lock.inode].append(lock)
    if not by_inode:
        return []
    opened = {f"/proc/{pid}/fd/{one.fd}": one for one in system.descriptors(pid).values() if one.target.startswith("/")}
    tried = {path: _OpenFile(-1, path) for path in paths}
    found = []
    for path, file in {**opened, **tried}.items():
        for lock in by_inode.get(_device_inode(path), ()):
            theirs = file.fd < 0 or (lock.pid != pid and not _holds_lock(pid, file.fd))
            if theirs or (lock.pid == pid and lock.kind == "posix"):
                found.append(FileLock(lock.kind, lock.pid, file.target))
    return list(dict.fromkeys(found))


def _holds_lock(pid: int, fd: int) -> bool:
    """Whether a lock belongs to this very descriptor: a child that inherited it holds the lock with whoever took it."""
    return "\nlock:" in procfs.read(f"/proc/{pid}/fdinfo/{fd}")


# ---------------------------------------------------------------- the system at one moment


@dataclass(frozen=True)
class _OpenFile:
    fd: int
    target: str  # pipe:[4711], socket:[4712], /a/path, anon_inode:[eventfd]

    @property
    def inode(self) -> str:
        return self.target.partition("[")[2].rstrip("]")


@dataclass(frozen=True)
class _Lock:
    number: str
    waits: bool
    kind: str
    pid: int
    inode: str  # major:minor:inode


@dataclass
class _System:
    """All that is looked up on the way, once."""

    _descriptors: dict[int, dict[int, _OpenFile]] = field(default_factory=dict)

    def descriptors(self, pid: int) -> dict[int, _OpenFile]:
        if pid not in self._descriptors:
            found = {}
            for name in procfs.listed(f"/proc/{pid}/fd"):
                target = _link(f"/proc/{pid}/fd/{name}")
                if target:
                    found[int(name)] = _OpenFile(int(name), target)
            self._descriptors[pid] = found
        return self._descriptors[pid]

    @cached_property
    def owners(self) -> Mapping[str, list[tuple[int, int]]]:
        """pipe:[4711] or socket:[4712] or a path -> who has it open, as (pid, fd)."""
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for pid in _all_pids():
            for opened in self.descriptors(pid).values():
                found[opened.target].append((pid, opened.fd))
        return found

    @cached_property
    def locks(self) -> list[_Lock]:
        found = []
        for row in procfs.read_all("/proc/locks").splitlines():
            number, *words = row.split()
            waits = words[:1] == ["->"]
            words = words[1:] if waits else words
            if len(words) >= 5:
                found.append(_Lock(number, waits, words[0].lower(), int(words[3]), words[4]))
        return found

    @cached_property
    def unix_peers(self) -> dict[str, str]:
        return _unix_peers()

    @cached_property
    def tcp(self) -> list[_SocketRow]:
        return _socket_rows("tcp")

    @cached_property
    def udp(self) -> list[_SocketRow]:
        return _socket_rows("udp")

    @cached_property
    def in_flight(self) -> bool:
        """Whether descriptors are on their way over a local socket: such a one is in nobody's table, and its receiver unknown."""
        local = {row.inode for row in _unix_rows()}
        sockets = [
            (pid, one.fd)
            for pid in _all_pids()
            for one in self.descriptors(pid).values()
            if one.target.startswith("socket:[") and one.inode in local
        ]
        return any(row[:1] == ["scm_fds:"] and row[1] != "0" for pid, fd in sockets for row in _fdinfo(pid, fd))

    # -- threads

    def waits(self, pid: int) -> Iterable[ThreadWait]:
        for name in procfs.listed(f"/proc/{pid}/task"):
            yield self._wait(pid, int(name))

    def _wait(self, pid: int, tid: int) -> ThreadWait:
        slices = procfs.slices_of(pid, tid)
        words = procfs.read(f"/proc/{pid}/task/{tid}/syscall").split()
        if len(words) < 7 or not words[0].isdecimal():
            return ThreadWait(tid, slices=slices)  # it runs, or may not be looked at
        call = _SYSCALLS.get(int(words[0]), f"system call {words[0]}")
        return replace(self._in_call(pid, tid, call, [int(word, 16) for word in words[1:7]]), slices=slices)

    def _in_call(self, pid: int, tid: int, call: str, args: list[int]) -> ThreadWait:
        if call in ("nanosleep", "clock_nanosleep", "restart_syscall"):
            return ThreadWait(tid, "timer", timed=True, syscall=call)
        if call in ("futex", "futex_waitv"):
            return self._futex(pid, tid, call, args)
        if call in ("wait4", "waitid"):
            return self._child(pid, tid, call, args)
        if call in ("flock", "fcntl"):
            return self._file_lock(pid, tid, call, args)
        if call in ("open", "openat"):
            return self._opening(pid, tid, call, args[0] if call == "open" else args[1])
        if call in ("poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "epoll_pwait2"):
            return self._many(pid, tid, call, args)
        if call in _READS or call in _WRITES:
            fd, writes = _signed(args[0]), call in _WRITES
            return replace(self._on_descriptor(pid, tid, call, fd, writes), fd=fd, writes=writes)
        if call in ("pause", "rt_sigsuspend", "rt_sigtimedwait"):
            timed = call == "rt_sigtimedwait" and args[2] != 0
            return ThreadWait(tid, "signal", "a signal", timed, anybody=True, syscall=call)
        if call in ("fsync", "fdatasync"):
            opened = self.descriptors(pid).get(_signed(args[0]))
            return ThreadWait(tid, "disk", opened.target if opened else "", anybody=True, syscall=call)
        return ThreadWait(tid, "other", BETWEEN_PROCESSES.get(call, call), anybody=True, syscall=call)

    def _futex(self, pid: int, tid: int, call: str, args: list[int]) -> ThreadWait:
        command = args[1] & _FUTEX_COMMAND
        if call == "futex_waitv" or command not in _FUTEX_WAITS:
            return ThreadWait(tid, "lock", anybody=True, syscall=call)
        timed = args[3] != 0
        if args[1] & _FUTEX_PRIVATE:
            return ThreadWait(tid, "lock", timed=timed, peers=(pid,), syscall=call)
        where, path = _mapping(pid, args[0])
        peers = [other for other in _all_pids() if where and _maps(other, where)] if where else [pid]
        name = _name_of_shared(path, where) if where else ""
        return ThreadWait(tid, "shared lock", name, timed, tuple(peers), anybody=bool(name), syscall=call)

    def _child(self, pid: int, tid: int, call: str, args: list[int]) -> ThreadWait:
        wanted = _signed(args[0]) if call == "wait4" else _signed(args[1]) if _signed(args[0]) in (1, 3) else -1
        if call == "waitid" and _signed(args[0]) == 3:  # P_PIDFD
            wanted = _pid_of_pidfd(pid, _signed(args[1]))
        children = (
            (wanted,) if wanted > 0 else tuple(child for child, parent in procfs.parents(pid).items() if parent == pid)
        )
        on = f"process {wanted} ({procfs.look(wanted).name})" if wanted > 0 else "any child"
        return ThreadWait(tid, "child", on, peers=children, syscall=call, pid=max(0, wanted))

    def _file_lock(self, pid: int, tid: int, call: str, args: list[int]) -> ThreadWait:
        opened = self.descriptors(pid).get(_signed(args[0]))
        path = opened.target if opened else ""
        if call == "fcntl" and args[1] not in _LOCK_WAITS:
            return ThreadWait(tid, "other", path, anybody=True, syscall=call)
        inode = _device_inode(f"/proc/{pid}/fd/{_signed(args[0])}")
        holders = [lock.pid for lock in self.locks if not lock.waits and lock.inode == inode and lock.pid > 0]
        # the table names who took it; who has inherited the descriptor, or was sent it, holds it as well
        holders += [other for other, fd in self.owners.get(path, ()) if other not in holders and _holds_lock(other, fd)]
        alive = [holder for holder in holders if procfs.look(holder).state not in "XZ"]
        if (
            not alive
        ):  # taken by a process that has ended, and kept by a descriptor that others inherited; or an OFD lock
            alive = [other for other, fd in self.owners.get(path, ()) if (other, fd) != (pid, _signed(args[0]))]
        # one that was taken here and given up again belongs to whoever inherited it, though the table still names us
        ours = any(_holds_lock(pid, one.fd) for one in self.descriptors(pid).values() if one.target == path)
        named = [holder for holder in alive if holder != pid or ours] or alive
        return ThreadWait(tid, "file lock", path, peers=tuple(dict.fromkeys(alive)), anybody=not alive, syscall=call,
                          pid=named[0] if named else 0)  # fmt: skip

    def _opening(self, pid: int, tid: int, call: str, address: int) -> ThreadWait:
        path = _text_in_memory(pid, address)
        shown = path if path.startswith("/") else f"{_link(f'/proc/{pid}/cwd')}/{path}"
        try:
            fifo = stat.S_ISFIFO(Path(f"/proc/{pid}/root{shown}").stat().st_mode) if path else False
        except OSError:  # gone, or not ours to see
            fifo = False
        peers = tuple(dict.fromkeys(other for other, _ in self.owners.get(shown, ())))
        return ThreadWait(tid, "fifo" if fifo else "file", shown, peers=peers, anybody=True, syscall=call)

    def _many(self, pid: int, tid: int, call: str, args: list[int]) -> ThreadWait:
        """Several descriptors at once: whoever can end the wait on one of them ends it."""
        if call.startswith("epoll"):
            fds, timeout = _epoll_fds(pid, _signed(args[0])), args[3]
            timed = timeout != 0 if call == "epoll_pwait2" else _signed(timeout) >= 0
        elif call in ("poll", "ppoll"):
            fds = _poll_fds(pid, args[0], args[1])
            timed = args[2] != 0 if call == "ppoll" else _signed(args[2]) >= 0
        else:
            fds, timed = _select_fds(pid, args), args[4] != 0
        if fds is None:
            return ThreadWait(tid, "poll", "descriptors that may not be looked at", timed, anybody=True, syscall=call)
        if not fds:
            return ThreadWait(tid, "timer" if timed else "signal", "", timed, anybody=not timed, syscall=call)
        found = [self._on_descriptor(pid, tid, call, fd, writes) for fd, writes in fds]
        known = [one for one in found if one.kind not in ("event", "")] or found
        one = known[0]
        on = one.on if len(known) == 1 else ", ".join(dict.fromkeys(wait.on for wait in known if wait.on))[:300]
        return ThreadWait(
            tid,
            one.kind if len({wait.kind for wait in known}) == 1 else "poll",
            on,
            timed=timed or any(wait.timed for wait in found),
            peers=tuple(dict.fromkeys(peer for wait in found for peer in wait.peers)),
            anybody=any(wait.anybody for wait in found),
            syscall=call,
            pid=one.pid if len(known) == 1 else 0,
            idle_s=one.idle_s if len(known) == 1 else -1.0,
            fd=fds[0][0] if len(fds) == 1 else -1,
            writes=len(fds) == 1 and fds[0][1],
        )

    # -- descriptors

    def _on_descriptor(self, pid: int, tid: int, call: str, fd: int, writes: bool) -> ThreadWait:
        opened = self.descriptors(pid).get(fd)
        target = opened.target if opened else ""
        if target.startswith("pipe:["):
            return self._pipe(pid, tid, call, target, writes)
        if target.startswith("socket:["):
            return self._socket(tid, call, opened.inode if opened else "")
        if target.startswith("anon_inode:"):
            return self._anonymous(pid, tid, call, fd, target)
        if target.startswith("/dev/pts/") or target in ("/dev/tty", "/dev/console"):
            return ThreadWait(tid, "terminal", target, anybody=True, syscall=call)
        if target == "/dev/ptmx":
            return self._pty(pid, tid, call, fd)
        if target and _is_fifo(pid, fd):
            return self._pipe(pid, tid, call, target, writes)
        return ThreadWait(tid, "file" if target else "other", target or f"descriptor {fd}", anybody=True, syscall=call)

    def _pipe(self, pid: int, tid: int, call: str, target: str, writes: bool) -> ThreadWait:
        """The other end: who can write where we read, or read where we write."""
        named = target.startswith("/")
        wanted = (os.O_RDONLY, os.O_RDWR) if writes else (os.O_WRONLY, os.O_RDWR)
        peers = [other for other, fd in self.owners.get(target, ()) if _access(other, fd) in wanted]
        kind = "fifo" if named else "pipe"
        return ThreadWait(
            tid,
            kind,
            target if named else "a pipe",
            peers=tuple(dict.fromkeys(peers)),
            anybody=named or self.in_flight,
            syscall=call,
        )

    def _pty(self, pid: int, tid: int, call: str, fd: int) -> ThreadWait:
        """The master of a terminal: whoever is at the other side of it."""
        index = next((row[1] for row in _fdinfo(pid, fd) if row[:1] == ["tty-index:"]), "")
        terminal = f"/dev/pts/{index}" if index else "a terminal"
        peers = tuple(dict.fromkeys(other for other, _ in self.owners.get(terminal, ()) if other != pid))
        return ThreadWait(
            tid, "pty", terminal, peers=peers, anybody=True, syscall=call, pid=peers[0] if len(peers) == 1 else 0
        )

    def _anonymous(self, pid: int, tid: int, call: str, fd: int, target: str) -> ThreadWait:
        if "timerfd" in target:
            return ThreadWait(tid, "timer", timed=True, syscall=call)
        if (
            "eventfd" in target
        ):  # written by this process, or by any that inherited it or was sent it, wherever it is now
            mine = _eventfd_id(pid, fd)
            peers = [other for other, one in self.owners.get(target, ()) if _eventfd_id(other, one) == mine]
            unknown = not mine or self.in_flight
            return ThreadWait(tid, "event", "", peers=tuple(dict.fromkeys(peers)), anybody=unknown, syscall=call)
        if "inotify" in target:
            return ThreadWait(
                tid, "file", "a change of the files that it watches (inotify)", anybody=True, syscall=call
            )
        if "pidfd" in target:
            other = _pid_of_pidfd(pid, fd)
            return ThreadWait(
                tid, "child", f"process {other} ({procfs.look(other).name})", peers=(other,), syscall=call, pid=other
            )
        if "eventpoll" in target and (inner := _epoll_fds(pid, fd)) is not None:
            found = [self._on_descriptor(pid, tid, call, one, writes) for one, writes in inner if one != fd]
            return ThreadWait(
                tid,
                "poll",
                ", ".join(wait.on for wait in found if wait.on),
                timed=any(wait.timed for wait in found),
                peers=tuple(peer for wait in found for peer in wait.peers),
                anybody=any(wait.anybody for wait in found),
                syscall=call,
            )
        return ThreadWait(tid, "other", target, anybody=True, syscall=call)

    def _socket(self, tid: int, call: str, inode: str) -> ThreadWait:
        if inode in self.unix_peers:
            other = self.unix_peers[inode]
            peers = tuple(dict.fromkeys(pid for pid, _ in self.owners.get(f"socket:[{other}]", ())))
            unknown = not peers or self.in_flight
            return ThreadWait(tid, "socket", "a local socket", peers=peers, anybody=unknown, syscall=call)
        row = next((row for row in self.tcp if row.inode == inode), None)
        if row is None:
            return self._unconnected(tid, call, inode)
        if row.state == 10:
            return ThreadWait(tid, "listen", f"a connection to {row.local}", anybody=True, syscall=call)
        state = _TCP_STATES.get(row.state, "")
        mirror = next((other for other in self.tcp if (other.local, other.remote) == (row.remote, row.local)), None)
        listener = next((one for one in self.tcp if one.state == 10 and one.port == row.remote_port), None)
        theirs = (
            mirror.inode
            if mirror is not None and mirror.inode != "0"
            else listener.inode
            if mirror and listener
            else ""
        )
        peers = tuple(dict.fromkeys(pid for pid, _ in self.owners.get(f"socket:[{theirs}]", ()))) if theirs else ()
        accepted = "" if mirror is None or mirror.inode != "0" else ", never accepted there"
        words = f"{row.remote}{f' ({state})' if state and state != 'established' else ''}{accepted}"
        idle_s, received = _last_byte(row)
        words += "" if received or row.state in (2, 3) else ", which has sent nothing so far"
        return ThreadWait(tid, "connect" if row.state in (2, 3) else "socket", words, peers=peers, anybody=not peers, syscall=call,
                          pid=peers[0] if len(peers) == 1 else 0, idle_s=idle_s if received else -1.0)  # fmt: skip

    def _unconnected(self, tid: int, call: str, inode: str) -> ThreadWait:
        """A socket that is no TCP connection: datagrams, or a local one that nobody is connected to."""
        datagrams = next((row for row in self.udp if row.inode == inode), None)
        if datagrams is not None:
            return self._datagrams(tid, call, datagrams)
        local = next((row for row in _unix_rows() if row.inode == inode), None)
        if local is None:
            return ThreadWait(tid, "socket", "a socket", anybody=True, syscall=call)
        path = f"the local socket {local.path or '(without a name)'}"
        if local.listens:
            return ThreadWait(tid, "listen", f"a connection to {path}", anybody=True, syscall=call)
        return ThreadWait(tid, "socket", f"{path}, to which nobody is connected", anybody=True, syscall=call)

    def _datagrams(self, tid: int, call: str, row: _SocketRow) -> ThreadWait:
        """UDP knows no connection: whoever has the other address open is known only where one was set and it is on this machine."""
        if row.remote_port == "0":
            return ThreadWait(tid, "datagram", f"a datagram at {row.local} (UDP)", anybody=True, syscall=call)
        theirs = [other for other in self.udp if other.port == row.remote_port]
        owners = [pid for other in theirs for pid, _ in self.owners.get(f"socket:[{other.inode}]", ())]
        here = row.remote.startswith(("127.", "[::1]", "::1"))
        nobody = ", which no process of this machine has open" if here and not theirs else ""
        words = f"a datagram from {row.remote} (UDP){nobody}"
        return ThreadWait(tid, "datagram", words, peers=tuple(dict.fromkeys(owners)), anybody=True, syscall=call)


# ---------------------------------------------------------------- one process


def _signed(number: int) -> int:
    """An argument of 32 bits that was widened."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number


def _all_pids() -> list[int]:
    return [int(name) for name in procfs.listed("/proc") if name.isdecimal()]


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 (thousands of them)
    except OSError:  # closed meanwhile, or not ours to see
        return ""


def _device_inode(path: str) -> str:
    """As /proc/locks writes it."""
    try:
        found = Path(path).stat()
    except OSError:  # closed meanwhile
        return ""
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"


def _is_fifo(pid: int, fd: int) -> bool:
    try:
        return stat.S_ISFIFO(Path(f"/proc/{pid}/fd/{fd}").stat().st_mode)
    except OSError:  # closed meanwhile
        return False


def _fdinfo(pid: int, fd: int) -> list[list[str]]:
    return [row.split() for row in procfs.read(f"/proc/{pid}/fdinfo/{fd}").splitlines()]


def _access(pid: int, fd: int) -> int:
    """Whether it is open for reading, writing or both."""
    flags = next((row[1] for row in _fdinfo(pid, fd) if row[:1] == ["flags:"]), "0")
    return int(flags, 8) & os.O_ACCMODE


def _eventfd_id(pid: int, fd: int) -> str:
    """The same for every descriptor of one eventfd, in whatever process; empty where the kernel does not tell (before 5.2)."""
    return next((row[1] for row in _fdinfo(pid, fd) if row[:1] == ["eventfd-id:"]), "")


def _pid_of_pidfd(pid: int, fd: int) -> int:
    return next((int(row[1]) for row in _fdinfo(pid, fd) if row[:1] == ["Pid:"]), 0)


def _epoll_fds(pid: int, fd: int) -> list[tuple[int, bool]] | None:
    """(descriptor, whether only room to write is waited for)."""
    rows = [row for row in _fdinfo(pid, fd) if row[:1] == ["tfd:"]]
    return [(int(row[1]), int(row[3], 16) & 5 == 4) for row in rows]


def _memory(pid: int, address: int, count: int) -> bytes | None:
    """Some bytes of its memory; reading stops nothing, and is allowed to those who may trace it."""
    try:
        fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # not ours to see
        return None
    try:
        return os.pread(fd, count, address)
    except (OSError, OverflowError):  # no such memory
        return None
    finally:
        os.close(fd)


def _text_in_memory(pid: int, address: int) -> str:
    """A path, which may lie at the very end of a page."""
    found = _memory(pid, address, 4096 - address % 4096) or b""
    if b"\0" not in found:
        found += _memory(pid, address + len(found), 4096) or b""
    return found.partition(b"\0")[0].decode("utf-8", "replace")


def _poll_fds(pid: int, address: int, count: int) -> list[tuple[int, bool]] | None:
    if not count:
        return []
    found = _memory(pid, address, 8 * min(count, 1024))
    if found is None:
        return None
    rows = struct.iter_unpack("=ihh", found[: len(found) // 8 * 8])
    return [(fd, events & 5 == 4) for fd, events, _ in rows if fd >= 0]  # POLLOUT without POLLIN


def _select_fds(pid: int, args: list[int]) -> list[tuple[int, bool]] | None:
    found: list[tuple[int, bool]] = []
    count = min(args[0], 1024)
    for address, writes in ((args[1], False), (args[2], True)):
        bits = _memory(pid, address, (count + 63) // 64 * 8) if address and count else b""
        if bits is None:
            return None
        number = int.from_bytes(bits, "little")
        found += [(fd, writes) for fd in range(count) if number >> fd & 1]
    return found


def _mapping(pid: int, address: int) -> tuple[str, str]:
    """`device inode` and path of the shared memory behind an address; empty where it is private memory."""
    for row in procfs.read_all(f"/proc/{pid}/maps").splitlines():
        span, rights, _, device, inode, *path = row.split(maxsplit=5)
        start, _, end = span.partition("-")
        if int(start, 16) <= address < int(end, 16):
            return (f"{device} {inode}", path[0] if path else "") if "s" in rights and inode != "0" else ("", "")
    return "", ""


def _name_of_shared(path: str, where: str) -> str:
    """The name by which anybody may open this memory; a named semaphore is mapped under a name that is gone again.

    Memory of System V has a key, and a memfd may be in the hands of somebody who has not mapped it yet.
    """
    if path.startswith(("/SYSV", "/memfd:")):
        return path.removesuffix(" (deleted)")
    if path and not path.endswith("(deleted)"):
        return path if not path.startswith(f"{_SHARED}/{_PRIVATE}") else ""
    if not path.startswith(f"{_SHARED}/"):
        return ""
    names = [f"{_SHARED}/{name}" for name in procfs.listed(_SHARED) if not name.startswith(_PRIVATE)]
    return next((name for name in names if _device_inode(name).rpartition(":")[2] == where.split()[1]), "")


def _maps(pid: int, where: str) -> bool:
    return f" {where} " in procfs.read_all(f"/proc/{pid}/maps")


# ---------------------------------------------------------------- sockets


@dataclass(frozen=True)
class _SocketRow:
    """A line of the kernel's table of TCP or UDP sockets."""

    local: str
    remote: str
    state: int
    inode: str
    raw: tuple[str, str]  # as in the table

    @property
    def port(self) -> str:
        return self.local.rpartition(":")[2]

    @property
    def remote_port(self) -> str:
        return self.remote.rpartition(":")[2]


def _socket_rows(protocol: str) -> list[_SocketRow]:
    found = []
    for table in (protocol, f"{protocol}6"):
        for row in procfs.read_all(f"/proc/net/{table}").splitlines()[1:]:
            fields = row.split()
            if len(fields) > 9:
                local, remote = (procfs.address(one).replace("::ffff:", "") for one in fields[1:3])
                found.append(_SocketRow(local, remote, int(fields[3], 16), fields[9], (fields[1], fields[2])))
    return found


@dataclass(frozen=True)
class _UnixRow:
    inode: str
    listens: bool
    path: str


def _unix_rows() -> list[_UnixRow]:
    rows = [row.split(maxsplit=7) for row in procfs.read_all("/proc/net/unix").splitlines()[1:]]
    return [
        _UnixRow(row[6], bool(int(row[3], 16) & _SO_ACCEPTCON), row[7] if len(row) > 7 else "")
        for row in rows
        if len(row) > 6
    ]


_SO_ACCEPTCON = 1 << 16
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_REQUEST_DUMP = 4, 20, 0x301
_UDIAG_SHOW_PEER, _UNIX_DIAG_PEER = 4, 2
_INET_DIAG_INFO = 2
_LAST_DATA_RECV_AT = 44 + 8  # in struct tcp_info: eight bytes of flags, then words; see linux/tcp.h
_BYTES_RECEIVED_AT = 128


def _diagnose(request: bytes) -> Iterable[bytes]:
    """The answers of the kernel's socket diagnostics; none where it has them not."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as link:
            link.settimeout(0.5)
            head = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_REQUEST_DUMP, 1, 0)
            link.send(head + request)
            while True:
                block = link.recv(1 << 18)
                while len(block) >= 16:
                    size, kind = struct.unpack_from("=IH", block)
                    if kind in (2, 3) or size < 16:  # error, done
                        return
                    yield block[16:size]
                    block = block[(size + 3) & ~3 :]
    except OSError:  # a kernel or a container without them: peers stay unknown, and nothing is proved by them
        return


def _attributes(block: bytes) -> Iterable[tuple[int, bytes]]:
    while len(block) >= 4:
        size, kind = struct.unpack_from("=HH", block)
        if size < 4:
            return
        yield kind, block[4:size]
        block = block[(size + 3) & ~3 :]


def _unix_peers() -> dict[str, str]:
    """The inode of every connected local socket -> that of its other end."""
    found = {}
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _UDIAG_SHOW_PEER, 0xFFFFFFFF, 0xFFFFFFFF)
    for answer in _diagnose(request):
        (inode,) = struct.unpack_from("=I", answer, 4)
        for kind, value in _attributes(answer[16:]):
            if kind == _UNIX_DIAG_PEER:
                found[str(inode)] = str(struct.unpack("=I", value)[0])
    return found


def _last_byte(row: _SocketRow) -> tuple[float, bool]:
    """Seconds since the last byte came over a TCP connection (-1 where the kernel does not tell), and whether any has come."""
    family = socket.AF_INET if len(row.raw[0]) < 20 else socket.AF_INET6
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 0, 1 << row.state) + bytes(
        48
    )
    for answer in _diagnose(request):
        if len(answer) >= 72 and str(struct.unpack_from("=I", answer, 68)[0]) == row.inode:
            for kind, value in _attributes(answer[72:]):
                if kind == _INET_DIAG_INFO and len(value) >= _LAST_DATA_RECV_AT + 4:
                    told = len(value) >= _BYTES_RECEIVED_AT + 8
                    received = not told or struct.unpack_from("=Q", value, _BYTES_RECEIVED_AT)[0] > 0
                    return float(struct.unpack_from("=I", value, _LAST_DATA_RECV_AT)[0]) / 1000, received
    return -1.0, True
