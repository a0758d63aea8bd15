"""Whether anybody is left in a process tree who could end a wait. Pure functions.

In:  every thread of every process of the tree: what the kernel says that it waits for, what the process itself says.
Out: the threads whose wait nobody can end: a closed set, which is a proof. wait_chain.py says what they wait for.

The proof needs no Python: a thread can be woken if it runs, if a timer ends its wait, if somebody outside may (a person, the
network, another process), or if one of those who could end its wait can itself be woken. Whoever is left when this has been
followed to its end waits for others of the same set only, and none of them will ever move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lamplighter.procs.stacks import OUR_THREADS, Frame, ThreadStack, culprit, is_users, users_frame
from lamplighter.procs.waits import FileLock, ThreadWait

_SIGCHLD = 17
_HARMLESS = ("/tqdm/_monitor.py",)  # threads that only look now and then, and wake nobody


@dataclass(frozen=True)
class WaitingThread:
    """One thread of the tree at the end of a stall."""

    pid: int
    tid: int
    wait: ThreadWait
    ran: bool = False  # it used a core during the stall, or is about to
    locked: tuple[FileLock, ...] = ()  # locks that others have on files which its process has open
    stack: ThreadStack | None = None

    @property
    def frame(self) -> Frame | None:
        return culprit(self.stack) if self.stack else None

    @property
    def name(self) -> str:
        return self.stack.name if self.stack else str(self.tid)

    @property
    def on(self) -> Mapping[str, Any]:
        """What it waits for as the process itself tells; of a stack that was taken from outside, as far as functions tell it."""
        if self.stack is None:
            return {}
        return self.stack.on or _by_functions(self.stack)

    @property
    def is_harmless(self) -> bool:
        """Whether it wakes nobody: a bar's monitor, or a thread of ours that has nothing of the user's in hand."""
        if self.stack is None:
            return False
        ours = self.stack.name in OUR_THREADS and users_frame(self.stack) is None
        return ours or any(frame.file.endswith(_HARMLESS) for frame in self.stack.frames)


_FUNCTIONS: tuple[
    tuple[str, tuple[str, ...], str], ...
] = (  # of the standard library: file, functions, what they wait for
    ("/threading.py", ("join", "_wait_for_tstate_lock"), "thread"),
    ("/queue.py", ("get", "put", "join"), "queue"),
    ("/concurrent/futures/_base.py", ("result", "exception", "result_iterator", "as_completed"), "future"),
    ("/concurrent/futures/thread.py", ("_worker",), "work of a pool"),
    ("/multiprocessing/pool.py", ("wait", "get", "next", "map", "apply", "join"), "pool"),
    ("/multiprocessing/queues.py", ("get", "put", "join_thread", "_finalize_join"), "process queue"),
    ("/multiprocessing/process.py", ("join",), "process"),
    ("/multiprocessing/managers.py", ("_callmethod",), "manager"),
    ("/multiprocessing/connection.py", ("recv", "recv_bytes", "poll"), "connection"),
    ("/subprocess.py", ("wait", "communicate"), "process"),
    ("/pdb.py", ("interaction",), "debugger"),
)


_OBJECTS = ("event", "condition", "semaphore", "barrier")  # of threading


def _by_functions(stack: ThreadStack) -> Mapping[str, Any]:
    """The outermost function of a library that waits, below the user's line."""
    found: dict[str, Any] = {}
    for frame in stack.frames:
        if is_users(frame.file):
            break
        owner, _, function = frame.func.rpartition(".")  # from outside it is told as Condition.wait
        where = frame.file.replace("/multiprocess/", "/multiprocessing/")  # the fork that datasets uses
        for file, functions, kind in _FUNCTIONS:
            if where.endswith(file) and function in functions:
                found = {"kind": kind, "doing": function}
        if frame.file.endswith("/threading.py") and owner.lower() in _OBJECTS and function in ("wait", "acquire"):
            found = {"kind": owner.lower()}
    return found


@dataclass(frozen=True)
class WaitingProcess:
    """One process, and what may interrupt it."""

    pid: int
    ppid: int
    name: str
    words: str  # process 12 (python), worker 0 (process 13), rank 1 (process 14)
    threads: tuple[WaitingThread, ...]
    handlers: tuple[int, ...] = ()  # signals that its own code handles
    timer: bool = False  # an interval timer runs
    is_forked: bool = False
    collective: str = ""  # the call of torch.distributed that it is in, with its line
    forked_beside: str = ""  # what its parent's threads did when it was forked
    unnumbered: tuple[WaitingThread, ...] = ()  # of a library, seen from Python only: their numbers here are made up

    @property
    def main(self) -> WaitingThread | None:
        return next((thread for thread in self.threads if thread.tid == self.pid), None)

    def thread(self, tid: int) -> WaitingThread | None:
        return next((thread for thread in (*self.threads, *self.unnumbered) if thread.tid == tid), None)


@dataclass(frozen=True)
class Gone:
    """A process of the tree that has ended during the run."""

    pid: int
    words: str  # was killed by signal 9
    ago_s: float


@dataclass(frozen=True)
class WaitGraph:
    """All processes of the tree; `outside` names the others that appear in their waits."""

    processes: tuple[WaitingProcess, ...]
    outside: Mapping[int, str] = field(default_factory=dict)  # pid -> its command
    gone: tuple[Gone, ...] = ()

    def process(self, pid: int) -> WaitingProcess | None:
        return next((one for one in self.processes if one.pid == pid), None)

    def named(self, pid: int) -> str:
        known = self.process(pid)
        if known is not None:
            return known.words
        command = self.outside.get(pid, "")
        return f"process {pid} ({command})" if command else f"process {pid}"


# ---------------------------------------------------------------- the proof


def cannot_be_woken(graph: WaitGraph) -> frozenset[tuple[int, int]]:
    """(pid, tid) of every thread whose wait nobody can end."""
    inside = {process.pid for process in graph.processes}
    asleep = {
        (process.pid, thread.tid): thread
        for process in graph.processes
        for thread in process.threads
        if not _wakes_by_itself(process, thread, inside)
    }
    threads = {process.pid: [t.tid for t in process.threads if not t.is_harmless] for process in graph.processes}
    children = {process.pid: [c.pid for c in graph.processes if c.ppid == process.pid] for process in graph.processes}
    chld = {process.pid for process in graph.processes if _SIGCHLD in process.handlers}
    while True:
        alive = {pid for pid, tids in threads.items() if any((pid, tid) not in asleep for tid in tids)}

        def woken(pid: int, tid: int, thread: WaitingThread, alive: set[int] = alive) -> bool:
            for peer in thread.wait.peers:
                others = [t for t in threads.get(peer, ()) if (peer, t) != (pid, tid)]
                if any((peer, other) not in asleep for other in others):
                    return True
            return pid == tid and pid in chld and any(child in alive for child in children[pid])

        waking = [key for key, thread in asleep.items() if woken(*key, thread)]
        if not waking:
            return frozenset(asleep)
        for key in waking:
            del asleep[key]


def _wakes_by_itself(process: WaitingProcess, thread: WaitingThread, inside: set[int]) -> bool:
    wait = thread.wait
    if thread.ran or not wait.kind or wait.timed or wait.anybody or not wait.peers:
        return True
    if any(peer not in inside for peer in wait.peers):
        return True
    interrupted = process.timer or bool(set(process.handlers) - {_SIGCHLD})
    return interrupted and thread.tid == process.pid
