"""What each thread of a tree that is asleep waits for, and who has it, from one thread to the end of the chain. Pure functions.

In:  a WaitGraph: every thread with what the kernel and the process itself say of its wait.
Out: a WaitChain, and the chain in words. By the object that the process names, else by the kernel; the source gives names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lamplighter.procs.stacks import ThreadStack, is_users, users_frame
from lamplighter.procs.waits import BETWEEN_PROCESSES, FileLock, ThreadWait
from lamplighter.watch import source_lines
from lamplighter.watch.status import duration
from lamplighter.watch.wait_graph import WaitGraph, WaitingProcess, WaitingThread

_LONGEST_CHAIN = 12
_LATELY_S = 60.0
_DEAF = (
    ", whose thread for answers has ended by an error (a callback that raised, or an answer that cannot be unpickled)"
)


@dataclass(frozen=True)
class Link:
    """What one thread waits for, and who has it."""

    thread: WaitingThread
    kind: str
    what: str  # in words: the lock `A`, process 12 (sleep 100), input from the terminal
    holder: str = ""  # in words
    path: str = ""
    next: tuple[int, int] | None = None  # the thread that could end it, where it is one that can be looked at
    timed: bool = False

    def fields(self) -> dict[str, Any]:
        """As `waits_for` of a verdict."""
        found = {"kind": self.kind, "what": self.what, "holder": self.holder, "path": self.path}
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True)
class WaitChain:
    """From a thread to the end of what it waits for."""

    links: tuple[Link, ...]
    is_cycle: bool = False

    @property
    def first(self) -> Link:
        return self.links[0]

    @property
    def last(self) -> Link:
        return self.links[-1]


def follow(graph: WaitGraph, pid: int, tid: int) -> WaitChain | None:
    """The waits from this thread on, until one runs, sleeps by a timer, waits for somebody outside, or closes a circle."""
    links: list[Link] = []
    seen: list[tuple[int, int]] = []
    here: tuple[int, int] | None = (pid, tid)
    while here is not None and here not in seen and len(links) < _LONGEST_CHAIN:
        process = graph.process(here[0])
        thread = process.thread(here[1]) if process else None
        if process is None or thread is None:
            break
        seen.append(here)
        links.append(_link(graph, process, thread))
        here = links[-1].next
    return WaitChain(tuple(links), is_cycle=here is not None and here in seen) if links else None


def _link(graph: WaitGraph, process: WaitingProcess, thread: WaitingThread) -> Link:
    """By what the process itself says of the thread, else by what the kernel says."""
    if thread.ran:
        return _in_and_out(graph, process, thread)
    for understand in (_by_object, _by_kernel):
        found = understand(graph, process, thread)
        if found is not None:
            return found
    return Link(thread, "unknown", "something that cannot be seen")


def _in_and_out(graph: WaitGraph, process: WaitingProcess, thread: WaitingThread) -> Link:
    """It was on a core for moments only: it sleeps, looks, and sleeps again. What for, the process itself may tell."""
    found = _by_object(graph, process, thread) if thread.on.get("kind") else None
    if found is not None:
        return replace(found, what=f"{found.what}, looking again and again", timed=True)
    if lock := _lock_of_others(thread):
        what = f"the lock on {lock.path}, trying again and again"
        return Link(thread, "file lock", what, graph.named(lock.pid), lock.path, timed=True)
    if thread.wait.kind in ("socket", "connect", "listen"):
        return Link(thread, "socket", f"{thread.wait.on}, trying again and again", timed=True)
    if thread.wait.kind == "poll" or thread.wait.timed:
        what = "something that it looks for again and again, sleeping in between"
        return Link(thread, "polling", what + inside_call(thread.stack), _ended_lately(graph), timed=True)
    return Link(thread, "running", "nothing: it runs")


def _ended_lately(graph: WaitGraph) -> str:
    """A process of the tree that is gone and may have been the one to bring it."""
    dead = graph.gone[-1] if graph.gone else None
    return f"process {dead.pid} {dead.words} {duration(dead.ago_s)} ago" if dead and dead.ago_s < _LATELY_S else ""


def _lock_of_others(thread: WaitingThread, path: str = "") -> FileLock | None:
    """A lock that another process has on a file which this one has open, or on that of this path."""
    wanted = [lock for lock in thread.locked if lock.pid != thread.pid and path in ("", lock.path)]
    return wanted[0] if wanted else None


def inside_call(stack: ThreadStack | None) -> str:
    """The call of the user's line that has not returned, where it is C code that sleeps: no Python is below that line."""
    innermost = stack.frames[0] if stack and stack.frames else None
    if innermost is None or not is_users(innermost.file):
        return ""
    call = source_lines.call_at(innermost.file, innermost.line)
    return f" inside {call}(...)" if call and call.rpartition(".")[2] != "sleep" else ""


def _by_object(graph: WaitGraph, process: WaitingProcess, thread: WaitingThread) -> Link | None:
    on, kind = thread.on, thread.on.get("kind", "")
    if kind == "thread":
        name = on.get("name") or f"`{_named_at(thread)}`"
        return _for_thread(graph, process, thread, on.get("tid", 0), f"the thread {name} to end")
    if kind == "process" and thread.wait.kind in ("pipe", "poll") and graph.process(on.get("pid", 0)) is None:
        return None  # it has ended: what is waited for is whoever still has its pipe
    if kind in ("process", "process process") or (kind == "pool" and thread.wait.kind == "child"):
        return _for_process(
            graph, thread, int(on.get("pid") or thread.wait.pid or 0), str(on.get("command") or on.get("name") or "")
        )
    if kind == "import lock":
        return _for_thread(
            graph, process, thread, on.get("owner", 0), f"the import of {on.get('name')}", kind="import lock"
        )
    if kind == "tasks":
        return _for_tasks(graph, process, thread)
    if kind == "barrier":
        return _for_barrier(graph, process, thread)
    if kind == "database":
        return _for_database(graph, thread)
    if (kind in ("lock", "") and thread.wait.kind in ("lock", "shared lock")) or (kind == "lock" and on.get("shared")):
        return _for_lock(graph, process, thread)
    words = {
        "queue": {"get": "an item from a queue that is empty", "put": "room in a queue that is full",
                  "join": f"task_done for {on.get('unfinished', 'all')} items of a queue"}.get(on.get("doing", ""), ""),
        "process queue": {"get": "an item from a queue between processes", "put": "room in a queue between processes",
                          }.get(on.get("doing", ""), "the feeder thread of a queue between processes"),
        "future": f"the result of a future ({str(on.get('state', 'not done')).lower()})",
        "event": "an Event that nobody has set",
        "condition": "a Condition that nobody has notified",
        "semaphore": "a Semaphore that is at zero",
        "pool": "an answer of a pool of processes" + _DEAF * bool(on.get("deaf")),
        "work of a pool": "work: an idle thread of a pool",
        "manager": f"the answer of a multiprocessing Manager to {on['asked']}" if on.get("asked") else "an answer of a multiprocessing Manager",
        "connection": "a message over a pipe from another process",
        "debugger": "a command at the debugger's prompt",
        "threads at exit": "threads that are no daemons, at the end of the program",
    }.get(kind, f"a {kind} between processes" if kind.startswith("process ") else "")  # fmt: skip
    if kind == "file lock":
        return _for_file_lock(graph, thread, str(on.get("path", "")))
    if not words:
        return None
    holder, following = _whoever_may(graph, process, thread)
    if kind == "manager" and (worker := _at_work(graph, process)) is None:
        return _for_manager(graph, thread, words, holder)
    if kind == "debugger":
        holder, following = "a person", None
    by_processes = kind in ("pool", "future", "process queue", "connection", "manager")
    if by_processes and (worker := _at_work(graph, process)) is not None:
        holder, following = f"{worker.words}{_at(worker.main)}", (worker.pid, worker.pid)
    return Link(thread, kind, words, holder, next=following, timed=thread.wait.timed)


def _for_manager(graph: WaitGraph, thread: WaitingThread, words: str, holder: str) -> Link:
    """What a Manager is asked for waits there as it would here: of a lock, an event or a queue, for another who uses it."""
    who = holder.split(" at ")[0]  # where the server's own threads stand tells nothing
    others = [
        f"{one.words}{_at(one.main)}"
        for one in graph.processes
        if one.pid not in (thread.pid, *thread.wait.peers) and one.main and one.main.on.get("kind") == "manager"
    ]
    also = f"; {', '.join(others[:3])} also" if others else ""
    return Link(
        thread, "manager", words, f"{who}, where another must set, put or release it{also}", timed=thread.wait.timed
    )


def _at_work(graph: WaitGraph, process: WaitingProcess) -> WaitingProcess | None:
    """A child that has something of the user's in hand; the others of a pool are idle."""
    children = [
        one
        for one in graph.processes
        if one.ppid == process.pid and one.main is not None and one.main.stack is not None
    ]
    return next(
        (one for one in children if one.main and one.main.stack and users_frame(one.main.stack) is not None), None
    )


def _for_thread(
    graph: WaitGraph, process: WaitingProcess, thread: WaitingThread, tid: int, what: str, kind: str = "thread"
) -> Link:
    other = process.thread(tid)
    if other is None and kind == "thread":  # looked at from outside: which one it is, is not known
        holder, following = _whoever_may(graph, process, thread)
        return Link(thread, kind, what, holder, next=following, timed=thread.wait.timed)
    holder = f"thread {other.name}{_at(other)}" if other else ""
    return Link(
        thread,
        kind,
        what,
        holder,
        next=(process.pid, tid) if other and other is not thread else None,
        timed=thread.wait.timed,
    )


def _for_process(graph: WaitGraph, thread: WaitingThread, pid: int, command: str) -> Link:
    other = graph.process(pid)
    if not pid:
        children = [graph.process(one) for one in thread.wait.peers]
        words = ", ".join(f"{one.words}{_at(one.main)}" for one in children if one is not None)
        return Link(thread, "children", "the end of any child process", words, timed=thread.wait.timed)
    what = f"process {pid} ({command})" if command else graph.named(pid)
    holder = f"{graph.named(pid)}{_at(other.main) if other and other.main else ''}" if pid else ""
    return Link(
        thread, "child", what, holder, next=(pid, pid) if other and other.main else None, timed=thread.wait.timed
    )


def _for_barrier(graph: WaitGraph, process: WaitingProcess, thread: WaitingThread) -> Link:
    on = thread.on
    missing = (on.get("parties") or 0) - (on.get("there") or 0)
    what = f"a Barrier of {on['parties']}: {on['there']} are there, {missing} missing" if missing else "a Barrier"
    dead = graph.gone[-1] if graph.gone else None
    holder, following = _whoever_may(graph, process, thread)
    if dead is not None:
        holder, following = f"process {dead.pid}, which {dead.words} {duration(dead.ago_s)} ago and will not come", None
    return Link(thread, "barrier", what, holder, next=following, timed=thread.wait.timed)


def _for_database(graph: WaitGraph, thread: WaitingThread) -> Link | None:
    """SQLite sleeps and looks again while a database is locked, by another process or by another connection of this one."""
    if thread.wait.kind != "timer" and not thread.ran:
        return None
    files = [lock for lock in thread.locked if lock.kind == "posix"]
    lock = _lock_of_others(thread) or (files[0] if files else None)
    if lock is None:
        return None
    own = lock.pid == thread.pid
    holder = "this process itself, by another connection" if own else graph.named(lock.pid)
    return Link(thread, "file lock", f"the lock on the database {lock.path}", holder, lock.path, timed=True)


def _for_tasks(graph: WaitGraph, process: WaitingProcess, thread: WaitingThread) -> Link:
    """Tasks of an event loop. A child process or a thread at work that a task waits for is followed."""
    tasks = [task for task in thread.on.get("tasks", ()) if task.get("file")]
    words = "; ".join(
        f"the asyncio task {task['task']}, which awaits {_awaited(task, tasks)} at {_short(task)} ({task['func']})"
        for task in tasks[:6]
    )
    children = [one for one in graph.processes if one.ppid == process.pid]
    following: tuple[int, int] | None = None
    holder = ""
    if any(str(task.get("awaits")).startswith(("subprocess.", "base_subprocess.")) for task in tasks) and children:
        holder, following = f"{children[0].words}{_at_main(graph, children[0].pid)}", (children[0].pid, children[0].pid)
    elif any(task.get("awaits") in ("Future", "threads.to_thread") and not task.get("other") for task in tasks):
        at_work = [one for one in _threads_at_work(process, thread) if one.on.get("kind") != "work of a pool"]
        holder = ", ".join(f"thread {one.name}{_at(one)}" for one in at_work[:3])
        following = (process.pid, at_work[0].tid) if len(at_work) == 1 else None
    if not holder and any(pid != process.pid for pid in thread.wait.peers):
        holder, following = _whoever_may(graph, process, thread)
    words = words or "an event loop without tasks of its own"
    return Link(thread, "task", words, holder, next=following, timed=thread.wait.timed)


def _short(task: Mapping[str, Any]) -> str:
    return f"{'/'.join(task['file'].split('/')[-2:])}:{task['line']}"


def _awaited(task: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]]) -> str:
    known = {
        "locks.wait": "an event or a condition", "queues.get": "an item from a queue", "queues.join": "task_done of a queue",
        "queues.put": "room in a queue", "tasks.sleep": "a timer", "streams.read": "bytes from a stream",
        "streams.readline": "a line from a stream", "streams.readexactly": "bytes from a stream", "Future": "a future", "_GatheringFuture": "several tasks", "tasks.wait_for": "a task",
        "subprocess.wait": "a child process", "subprocess.communicate": "a child process", "threads.to_thread": "a thread",
    }  # fmt: skip
    if task.get("other"):
        return f"task {task['other']}"
    if task.get("awaits") in ("locks.acquire", "locks.__aenter__"):
        name = source_lines.lock_taken_at(task["file"], task["line"])
        inside = [one for one in tasks if name and name in source_lines.locks_around(one["file"], one["line"])]
        who = "itself" if task in inside else inside[0]["task"] if inside else ""
        return f"the lock `{name}`" + (f", held by {who}" if who else "") if name else "a lock"
    return known.get(str(task.get("awaits")), str(task.get("awaits")))


def _for_lock(graph: WaitGraph, process: WaitingProcess, thread: WaitingThread) -> Link | None:
    """Which lock, by the line that it stands at and the objects that the process names; and who is inside of it."""
    wanted = waited_lock(thread)
    shared = thread.wait.kind == "shared lock"
    if wanted is None and process.collective and thread.tid == process.pid:
        return _for_ranks(graph, process, thread)
    if wanted is None:
        holder, following = _whoever_may(graph, process, thread)
        named = f" ({thread.wait.on})" if thread.wait.on else ""
        taken = _named_at(thread)
        lock = f"the lock `{taken}`" if taken else f"a lock{inside_call(thread.stack)}"
        lock = f"a lock between processes{named}" if shared else lock
        if process.unnumbered:
            other = process.unnumbered[0]
            return Link(thread, "lock", lock, f"a thread of that library{_at(other)}", next=(process.pid, other.tid))
        if process.is_forked and not shared and inside_call(thread.stack) and holder.startswith("nobody"):
            holder = "threads that do not exist here: it was forked, and a fork copies no threads"
        return Link(thread, "lock", lock, holder, next=following, timed=thread.wait.timed)
    if wanted["name"] == "self":  # seen inside of the lock's own method: the user's line has a better name for it
        wanted = {**wanted, "name": _named_at(thread) or "self"}
    inside = wanted.get("of")
    what = (
        f"the lock inside of a {inside}"
        if inside
        else f"the {_KINDS.get(wanted['type'], wanted['type'])} `{wanted['name']}`"
    )
    owner = wanted.get("owner", 0)
    if owner == -1:
        return Link(
            thread,
            "lock",
            what,
            f"a thread that does not exist in this process{_at_fork(process)}",
            timed=thread.wait.timed,
        )
    holders = (
        [process.thread(owner)]
        if owner > 0
        else [one for one in process.threads if one is not thread and wanted["id"] in held_locks(one)]
    )
    if (shared or wanted.get("shared")) and not holders:
        return _for_shared_lock(graph, process, thread, what, str(wanted.get("key", "")))
    if holders and holders[0] is thread:
        return Link(
            thread, "lock", what, "this very thread itself", next=(process.pid, thread.tid), timed=thread.wait.timed
        )
    if holders and holders[0] is not None:
        other = holders[0]
        at = (process.pid, other.tid)
        return Link(thread, "lock", what, f"thread {other.name}{_at(other)}", next=at, timed=thread.wait.timed)
    if process.is_forked and (taken := _held_before_fork(thread, wanted["id"])):
        holder = f"the process that forked this one, which took it at {taken}: the copy here is never released"
        return Link(thread, "lock", what, holder, timed=thread.wait.timed)
    if wanted["id"] in held_locks(thread, outer=True):
        return Link(
            thread, "lock", what, "this very thread itself", next=(process.pid, thread.tid), timed=thread.wait.timed
        )
    if process.forked_beside:
        return Link(
            thread,
            "lock",
            what,
            f"a thread of the process that forked this one{_at_fork(process)}",
            timed=thread.wait.timed,
        )
    return Link(thread, "lock", what, "", timed=thread.wait.timed)


def _for_ranks(graph: WaitGraph, process: WaitingProcess, thread: WaitingThread) -> Link:
    """Inside a collective: the others, and what each of them is in."""
    others = [
        one for one in graph.processes if one is not process and (one.collective or one.words.startswith("rank "))
    ]
    words = [
        f"{one.words} is in {one.collective}" if one.collective else f"{one.words} is{_at(one.main)}" for one in others
    ]
    what = f"the other ranks, in {process.collective}"
    return Link(thread, "collective", what, "; ".join(words[:4]), timed=thread.wait.timed)


_KINDS = {"lock": "lock", "RLock": "RLock", "Lock": "lock", "Queue": "queue"}


def _at_fork(process: WaitingProcess) -> str:
    return (
        f" (held when it was forked; then: {process.forked_beside})"
        if process.forked_beside
        else " (held when it was forked)"
    )


def _for_shared_lock(graph: WaitGraph, process: WaitingProcess, thread: WaitingThread, what: str, key: str) -> Link:
    """Between processes: each tells whether the lock is its own. Where none says so, whoever took it has ended, or is outside."""
    others = [one for pid in thread.wait.peers if (one := graph.process(pid)) is not None]
    holding = next((one for one in [*others, *graph.processes] if any(_has(each, key) for each in one.threads)), None)
    timed = thread.wait.timed
    if holding is not None:
        main = holding.main or thread
        words = "this very process" if holding is process else f"{holding.words}{_at(main)}"
        return Link(thread, "lock", what, words, next=(holding.pid, main.tid), timed=timed)
    outside = [pid for pid in thread.wait.peers if graph.process(pid) is None]
    if outside:
        return Link(thread, "lock", what, graph.named(outside[0]), timed=timed)
    dead = graph.gone[-1] if graph.gone else None
    lost = f"; process {dead.pid} {dead.words} {duration(dead.ago_s)} ago" if dead else ""
    return Link(thread, "lock", what, f"nobody that is alive{lost}", timed=timed)


def _has(thread: WaitingThread, key: str) -> bool:
    frames = thread.stack.frames if thread.stack else ()
    return any(lock.get("mine") and lock.get("key") == key for frame in frames for lock in frame.locks)


def _for_file_lock(graph: WaitGraph, thread: WaitingThread, path: str) -> Link:
    lock = _lock_of_others(thread, path) or next((one for one in thread.locked if one.path == path), None)
    holder = thread.wait.pid or (lock.pid if lock else 0)
    other = graph.process(holder) if holder != thread.pid else None
    words = (
        f"this process itself ({graph.named(holder)})"
        if holder == thread.pid
        else f"{graph.named(holder)}{_at(other.main) if other and other.main else ''}"
        if holder
        else ""
    )
    return Link(
        thread,
        "file lock",
        f"the lock on {path or 'a file'}",
        words,
        path,
        next=(holder, holder) if other else None,
        timed=thread.wait.timed,
    )


def _by_kernel(graph: WaitGraph, process: WaitingProcess, thread: WaitingThread) -> Link | None:
    wait = thread.wait
    if wait.kind == "timer":
        return Link(thread, "timer", f"a timer: it sleeps{inside_call(thread.stack)}", timed=True)
    if wait.kind == "child":
        return _for_process(graph, thread, wait.pid, "")
    if wait.kind == "file lock":
        return _for_file_lock(graph, thread, wait.on)
    by_script = wait.kind == "pipe" and any(
        graph.process(pid) for pid in wait.peers
    )  # who started it has the other end
    if wait.kind == "terminal" or (wait.fd == 0 and wait.kind in ("pipe", "file", "fifo") and not by_script):
        return Link(thread, "stdin", "input from the terminal" if wait.kind == "terminal" else "input on stdin",
                    "a person" if wait.kind == "terminal" else _others(graph, process, wait), timed=wait.timed)  # fmt: skip
    words = {
        "pipe": "room in a pipe that is full"
        if wait.writes
        else "data on its stdin, a pipe"
        if wait.fd == 0
        else "data from a pipe",
        "fifo": f"the other end of the FIFO {wait.on}"
        if wait.syscall.startswith("open")
        else f"{'room in' if wait.writes else 'data from'} the FIFO {wait.on}",
        "socket": f"an answer from {wait.on}{inside_call(thread.stack)}",
        "listen": wait.on,
        "datagram": wait.on,
        "connect": f"a connection to {wait.on}",
        "signal": "a signal",
        "disk": f"the disk ({wait.on})",
        "file": wait.on,
        "poll": f"one of several: {wait.on}" if wait.on else "one of several descriptors",
        "event": "an eventfd",
        "other": wait.on if wait.on in _NAMED_CALLS else None,
        "pty": f"output of the program on {wait.on}",
    }.get(wait.kind)  # fmt: skip
    if words is None:
        return None
    if wait.idle_s >= 0:
        words += f", from which the last byte came {duration(wait.idle_s)} ago"
    holder, following = _whoever_may(graph, process, thread)
    path = wait.on if wait.kind in ("fifo", "file") else ""
    return Link(thread, wait.kind, words, holder, path, next=following, timed=wait.timed)


_FROM_ANYWHERE = {  # who could end a wait that is not tied to any process
    "listen": "any client: none has connected",
    "datagram": "whoever sends one: none has come",
    "socket": "the other end, which is not on this machine",
    "connect": "the other end, which has not answered",
    "fifo": "nobody: no process has it open",
    "signal": "anybody who sends one: none has come",
    "shared lock": "any process that knows its name",
    "other": "any process that knows its name",
}
_NAMED_CALLS = frozenset(BETWEEN_PROCESSES.values())


def _others(graph: WaitGraph, process: WaitingProcess, wait: ThreadWait) -> str:
    return ", ".join(graph.named(pid) for pid in wait.peers if pid != process.pid)[:200]


def _whoever_may(
    graph: WaitGraph, process: WaitingProcess, thread: WaitingThread
) -> tuple[str, tuple[int, int] | None]:
    """Those who could end it: other processes first; then other threads of this process that are at the user's work."""
    wait = thread.wait
    peers = [pid for pid in wait.peers if pid != process.pid]
    lately = f"; {_ended_lately(graph)}" if _ended_lately(graph) else ""
    if not wait.peers and wait.anybody and wait.kind in _FROM_ANYWHERE:
        return f"{_FROM_ANYWHERE[wait.kind]}{lately}", None
    if not peers and wait.peers and wait.kind in ("socket", "fifo"):
        return f"this very process, which alone has the other end of it{lately}", None
    if peers:
        inside = [one for pid in peers if (one := graph.process(pid)) is not None]
        at_work = [pid for pid in peers if _at_main(graph, pid)] or peers
        words = ", ".join(f"{graph.named(pid)}{_at_main(graph, pid)}" for pid in at_work[:3])
        return words, (inside[0].pid, inside[0].pid) if len(peers) == 1 and inside else None
    others = _threads_at_work(process, thread)
    if not others and wait.anybody:
        return "", None
    if not others:
        dead = graph.gone[-1] if graph.gone else None
        return (
            f"nobody: no other thread is left; process {dead.pid} {dead.words} {duration(dead.ago_s)} ago"
            if dead
            else "nobody: no other thread is left"
        ), None
    words = ", ".join(f"thread {one.name}{_at(one)}" for one in others[:3])
    together = len({one.frame.place for one in others if one.frame}) == 1  # what one of them waits for, all do
    return words, (process.pid, others[0].tid) if together else None


def _threads_at_work(process: WaitingProcess, thread: WaitingThread) -> list[WaitingThread]:
    """The other threads that stand in the user's code."""
    return [
        one
        for one in process.threads
        if one is not thread and not one.is_harmless and one.stack is not None and users_frame(one.stack) is not None
    ]


def _at_main(graph: WaitGraph, pid: int) -> str:
    other = graph.process(pid)
    return _at(other.main) if other and other.main else ""


def _at(thread: WaitingThread | None) -> str:
    frame = thread.frame if thread else None
    return f" at {frame.short}" if frame else ""


# ---------------------------------------------------------------- locks by their names


def _named_at(thread: WaitingThread) -> str:
    """What the user's line waits for, by its name there."""
    frame = thread.frame
    return source_lines.lock_taken_at(frame.file, frame.line) if frame else ""


def waited_lock(thread: WaitingThread) -> Mapping[str, Any] | None:
    """The lock that the innermost line takes: its name by the source, its identity by the process."""
    on = thread.on
    if on.get("kind") == "lock" and on.get("id"):
        return on
    frames = thread.stack.frames if thread.stack else ()
    for frame in frames[:3]:
        name = source_lines.lock_taken_at(frame.file, frame.line)
        found = next((lock for lock in frame.locks if lock["name"] == name), None)
        if found is not None:
            return found
    return None


def held_locks(thread: WaitingThread, outer: bool = False) -> set[int]:
    """The locks that it holds by a `with` around the line of one of its frames; `outer`: leave out the line that waits."""
    found: set[int] = set()
    for frame in thread.stack.frames if thread.stack else ():
        names = source_lines.locks_around(frame.file, frame.line)
        found |= {lock["id"] for lock in frame.locks if lock["name"] in names and lock.get("locked")}
        found |= {lock["id"] for lock in frame.locks if not outer and lock.get("owner") == thread.tid}
    return found


def _held_before_fork(thread: WaitingThread, lock: int) -> str:
    """Where the forking code held the lock: its frames are still below those of the fork, in the copy of its stack."""
    frames = list(thread.stack.frames) if thread.stack else []
    fork = next((place for place, frame in enumerate(frames) if frame.file.endswith(_FORKS)), len(frames))
    for frame in frames[fork:]:
        names = source_lines.locks_around(frame.file, frame.line)
        if any(one["id"] == lock and one["name"] in names for one in frame.locks):
            return frame.short
    return ""


_FORKS = ("multiprocessing/popen_fork.py", "multiprocess/popen_fork.py")


def chain_words(chain: WaitChain) -> str:
    """waits at a.py:3 (main) for the thread loader to end, which waits at b.py:9 (work) for the lock `A`, held by ..."""
    parts = []
    for number, link in enumerate(chain.links):
        frame = link.thread.frame
        where = f" at {frame.short}" if frame else ""
        lead = "" if number == 0 else "which "
        call = inside_call(link.thread.stack)
        if link.kind == "timer":
            parts.append(f"{lead}sleeps{where}{call}")
        elif link.kind == "polling":
            brings = f"; {link.holder}, and may have been the one to bring it" if link.holder else ""
            parts.append(
                f"{lead}sleeps and looks again{where}{call}, again and again: what it looks for has not come{brings}"
            )
        elif link.kind == "running":
            parts.append(f"{lead}runs{where}")
        else:
            parts.append(f"{lead}waits{where} for {link.what}{_held_by(link, last=number == len(chain.links) - 1)}")
    return ", ".join(parts)


def _held_by(link: Link, last: bool) -> str:
    """Where its holder stands is told only of the last one: of the others the next link tells it."""
    if not link.holder or link.kind == "child" or (link.kind == "thread" and link.next is not None):
        return ""
    if link.kind == "collective":
        return f"; {link.holder}"
    word = "held by" if link.kind in ("lock", "file lock", "import lock") else "from"
    holder = link.holder if last or link.next is None else link.holder.split(" at ")[0]
    return f", {word} {holder}" if last or link.kind in ("lock", "file lock") else f" ({word} {holder})"


def closed(chain: Sequence[Link], stuck: frozenset[tuple[int, int]]) -> bool:
    """Whether all of a chain is part of the proof; a thread without a number is, where all threads of its process are."""
    return all((link.thread.pid, link.thread.tid) in stuck for link in chain if link.thread.tid > 0)
