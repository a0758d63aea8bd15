"""Who waits for whom: a proof only where nobody is left who could end the wait, and the chain in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamplighter.procs.stacks import Frame, ThreadStack
from lamplighter.procs.waits import FileLock, ThreadWait
from lamplighter.watch import source_lines
from lamplighter.watch.wait_chain import chain_words, follow
from lamplighter.watch.wait_graph import Gone, WaitGraph, WaitingProcess, WaitingThread, cannot_be_woken

MAIN = 100


def waiting(tid: int, wait: ThreadWait, pid: int = MAIN, **more: Any) -> WaitingThread:
    return WaitingThread(pid, tid, wait, **more)


def lock(tid: int, pid: int = MAIN, timed: bool = False) -> ThreadWait:
    return ThreadWait(tid, "lock", timed=timed, peers=(pid,))


def process(*threads: WaitingThread, pid: int = MAIN, ppid: int = 0, **more: Any) -> WaitingProcess:
    return WaitingProcess(pid, ppid, "python", f"process {pid} (python)", threads, **more)


def stuck(*processes: WaitingProcess) -> set[tuple[int, int]]:
    return set(cannot_be_woken(WaitGraph(processes)))


def test_threads_that_wait_for_each_other_are_proved() -> None:
    assert stuck(process(waiting(100, lock(100)), waiting(101, lock(101)))) == {(100, 100), (100, 101)}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(ThreadWait(101, "timer", timed=True), id="a timer"),
        pytest.param(lock(101, timed=True), id="a lock with a timeout"),
        pytest.param(ThreadWait(101, "socket", "10.0.0.1:80", anybody=True), id="the network"),
        pytest.param(ThreadWait(101, "terminal", "/dev/pts/0", anybody=True), id="a person"),
        pytest.param(ThreadWait(101, "pipe", peers=(999,)), id="a process outside"),
        pytest.param(ThreadWait(101), id="it runs, or may not be looked at"),
    ],
)
def test_nothing_is_proved_while_somebody_may_still_act(other: ThreadWait) -> None:
    assert stuck(process(waiting(100, lock(100)), waiting(101, other))) == set()


def test_a_thread_that_was_on_a_core_may_act() -> None:
    assert stuck(process(waiting(100, lock(100)), waiting(101, lock(101), ran=True))) == set()


def test_signal_handlers_and_interval_timers_may_end_the_wait_of_the_main_thread() -> None:
    assert stuck(process(waiting(100, lock(100)), handlers=(10,))) == set()
    assert stuck(process(waiting(100, lock(100)), timer=True)) == set()
    assert stuck(process(waiting(100, lock(100)), handlers=(17,))) == {(100, 100)}  # SIGCHLD, and there is no child


def test_a_handler_of_sigchld_counts_while_a_child_may_end() -> None:
    sleeping = process(waiting(200, ThreadWait(200, "timer", timed=True), 200), pid=200, ppid=100)
    assert stuck(process(waiting(100, lock(100)), handlers=(17,)), sleeping) == set()


def test_a_wait_is_followed_over_processes() -> None:
    """The main process reads a pipe of its child; the child waits for a lock that nobody holds."""
    main = process(waiting(100, ThreadWait(100, "pipe", peers=(200,))))
    child = process(waiting(200, lock(200, 200), 200), pid=200, ppid=100)
    assert stuck(main, child) == {(100, 100), (200, 200)}
    busy = process(waiting(200, lock(200, 200), 200), waiting(201, ThreadWait(201), 200), pid=200, ppid=100)
    assert stuck(main, busy) == set()


def test_a_progress_bars_monitor_wakes_nobody() -> None:
    monitor = ThreadStack("Thread-1", (Frame("/x/site-packages/tqdm/_monitor.py", 60, "run"),), tid=101)
    bar = waiting(101, lock(101, timed=True), stack=monitor)
    assert (100, 100) in stuck(process(waiting(100, lock(100)), bar))


@pytest.fixture
def two_locks(tmp_path: Path) -> str:
    file = tmp_path / "train.py"
    file.write_text("with A:\n    x = 1\n    with B:\n        pass\nwith B:\n    y = 1\n    with A:\n        pass\n")
    return str(file)


def holding(file: str, tid: int, line: int, name: str) -> WaitingThread:
    locks = tuple({"name": one, "id": number, "type": "lock", "locked": True} for number, one in enumerate("AB", 1))
    return waiting(tid, lock(tid), stack=ThreadStack(name, (Frame(file, line, "work", {}, locks),), tid=tid))


def test_a_cycle_of_locks_names_both_locks_and_both_lines(two_locks: str) -> None:
    graph = WaitGraph((process(holding(two_locks, 100, 3, "MainThread"), holding(two_locks, 101, 7, "loader")),))
    chain = follow(graph, 100, 100)
    assert chain is not None and chain.is_cycle
    words = chain_words(chain)
    assert "the lock `B`, held by thread loader" in words and "train.py:3" in words and "train.py:7" in words
    assert "the lock `A`, held by thread MainThread" in words


def test_the_names_of_locks_come_from_the_line(two_locks: str) -> None:
    assert source_lines.lock_taken_at(two_locks, 3) == "B"
    assert source_lines.locks_around(two_locks, 7) == {"B"}
    assert source_lines.lock_taken_at("/no/such/file.py", 1) == "" and not source_lines.locks_around(
        "/no/such/file.py", 1
    )


def on(kind: str, **more: Any) -> ThreadStack:
    return ThreadStack("MainThread", (Frame("/home/me/train.py", 9, "main"),), tid=MAIN, on={"kind": kind, **more})


@pytest.mark.parametrize(
    ("kind", "more", "wait", "words"),
    [
        ("queue", {"doing": "get"}, lock(MAIN), "an item from a queue that is empty"),
        ("queue", {"doing": "join", "unfinished": 3}, lock(MAIN), "task_done for 3 items"),
        ("future", {"state": "PENDING"}, lock(MAIN), "the result of a future (pending)"),
        ("barrier", {"there": 1, "parties": 3}, lock(MAIN), "a Barrier of 3: 1 are there, 2 missing"),
        ("event", {}, lock(MAIN), "an Event that nobody has set"),
        ("debugger", {}, ThreadWait(MAIN, "terminal", "/dev/pts/1", anybody=True), "the debugger's prompt"),
        ("", {}, ThreadWait(MAIN, "terminal", "/dev/pts/1", anybody=True), "input from the terminal, from a person"),
        ("", {}, ThreadWait(MAIN, "socket", "10.0.0.1:80", anybody=True, idle_s=12.0), "the last byte came 12 s ago"),
        (
            "",
            {},
            ThreadWait(MAIN, "file lock", "/tmp/x.lock", peers=(7,), pid=7),
            "the lock on /tmp/x.lock, held by process 7 (other)",
        ),
        ("", {}, ThreadWait(MAIN, "timer", timed=True), "sleeps at me/train.py:9"),
    ],
)
def test_what_is_waited_for_in_words(kind: str, more: dict[str, Any], wait: ThreadWait, words: str) -> None:
    graph = WaitGraph((process(waiting(MAIN, wait, stack=on(kind, **more))),), {7: "other"})
    chain = follow(graph, MAIN, MAIN)
    assert chain is not None and words in chain_words(chain)


def test_a_retry_loop_names_who_has_locked_its_file() -> None:
    locked = (FileLock("lock", 7, "/data/runs.db"),)
    thread = waiting(MAIN, ThreadWait(MAIN, "timer", timed=True), ran=True, locked=locked, stack=on(""))
    chain = follow(WaitGraph((process(thread),), {7: "sqlite3 runs.db"}), MAIN, MAIN)
    assert chain is not None and "held by process 7 (sqlite3 runs.db)" in chain_words(chain)


def test_a_queue_without_anybody_left_names_who_has_died() -> None:
    graph = WaitGraph(
        (process(waiting(MAIN, lock(MAIN), stack=on("queue", doing="get"))),),
        {},
        (Gone(55, "was killed by signal 9", 3.0),),
    )
    chain = follow(graph, MAIN, MAIN)
    assert chain is not None and "process 55 was killed by signal 9 3.0 s ago" in chain_words(chain)


def between(name: str, mine: bool) -> dict[str, Any]:
    return {"name": name, "id": 1, "type": "Lock", "locked": True, "shared": True, "mine": mine, "key": "/mp-1"}


def test_a_lock_between_processes_is_held_by_the_process_that_says_so(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("with disk:\n    pool.map(convert)\nwith disk:\n    pass\n")
    wait = ThreadWait(200, "shared lock", peers=(100, 200, 201))
    frames = {
        pid: (Frame(str(file), line, "work", {}, (between("disk", pid == 100),)),)
        for pid, line in ((100, 2), (200, 3), (201, 3))
    }
    stacks = {pid: ThreadStack("MainThread", each, tid=pid) for pid, each in frames.items()}
    main = process(waiting(100, ThreadWait(100, "pipe", peers=(200, 201)), stack=stacks[100]))
    children = [process(waiting(pid, wait, pid, stack=stacks[pid]), pid=pid, ppid=100) for pid in (200, 201)]
    chain = follow(WaitGraph((main, *children)), 200, 200)
    assert chain is not None and "the lock `disk`, held by process 100 (python)" in chain_words(chain)
    alone = waiting(200, ThreadWait(200, "shared lock", peers=(200,)), 200, stack=stacks[200])
    chain = follow(WaitGraph((process(alone, pid=200),), {}, (Gone(55, "was killed by signal 9", 3.0),)), 200, 200)
    assert chain is not None and "nobody that is alive; process 55 was killed by signal 9" in chain.last.holder


def test_a_barrier_names_who_will_not_come() -> None:
    thread = waiting(MAIN, ThreadWait(MAIN, "shared lock", peers=(MAIN,)), stack=on("barrier", parties=3, there=2))
    chain = follow(WaitGraph((process(thread),), {}, (Gone(55, "has ended with exit code 3", 2.0),)), MAIN, MAIN)
    assert chain is not None and "2 are there, 1 missing" in chain.last.what
    assert "process 55, which has ended with exit code 3" in chain.last.holder


def test_a_database_may_be_locked_by_the_process_itself() -> None:
    for pid, holder in ((MAIN, "this process itself"), (7, "process 7 (optuna)")):
        locked = (FileLock("posix", pid, "/runs/study.db"),)
        thread = waiting(MAIN, ThreadWait(MAIN, "timer", timed=True), locked=locked, stack=on("database"))
        chain = follow(WaitGraph((process(thread),), {7: "optuna"}), MAIN, MAIN)
        assert chain is not None and "/runs/study.db" in chain.last.what and holder in chain.last.holder
    idle = waiting(MAIN, lock(MAIN), locked=(FileLock("posix", MAIN, "/runs/study.db"),), stack=on("database"))
    chain = follow(WaitGraph((process(idle),)), MAIN, MAIN)
    assert chain is not None and chain.last.kind != "file lock", (
        "a lock of its own is no reason while it waits for another thing"
    )


def task(name: str, line: int, awaits: str, file: str = "/home/me/train.py") -> dict[str, Any]:
    return {"task": name, "awaits": awaits, "other": "", "file": file, "line": line, "func": "work"}


def test_a_task_names_the_child_or_the_task_that_it_waits_for(tmp_path: Path) -> None:
    thread = waiting(MAIN, ThreadWait(MAIN, "poll"), stack=on("tasks", tasks=[task("Task-1", 9, "subprocess.wait")]))
    child = process(waiting(200, ThreadWait(200, "timer", timed=True), 200), pid=200, ppid=MAIN)
    chain = follow(WaitGraph((process(thread), child)), MAIN, MAIN)
    assert (
        chain is not None
        and "Task-1, which awaits a child process" in chain.first.what
        and chain.last.thread.pid == 200
    )
    file = tmp_path / "serve.py"
    file.write_text("async with gate:\n    await queue.get()\nasync with gate:\n    pass\n")
    tasks = [task("Task-1", 2, "queues.get", str(file)), task("Task-2", 3, "locks.acquire", str(file))]
    chain = follow(
        WaitGraph((process(waiting(MAIN, ThreadWait(MAIN, "poll"), stack=on("tasks", tasks=tasks))),)), MAIN, MAIN
    )
    assert chain is not None and "Task-2, which awaits the lock `gate`, held by Task-1" in chain.first.what


def test_a_call_that_sleeps_in_c_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import x\nstore = dist.TCPStore(host, port(3))\ntime.sleep(9)\n")
    assert source_lines.call_at(str(file), 2) == "dist.TCPStore" and source_lines.call_at(str(file), 1) == ""
    for line, words in ((2, "inside dist.TCPStore(...)"), (3, "")):
        stack = ThreadStack("MainThread", (Frame(str(file), line, "main"),), tid=MAIN)
        chain = follow(
            WaitGraph((process(waiting(MAIN, ThreadWait(MAIN, "timer", timed=True), stack=stack)),)), MAIN, MAIN
        )
        assert chain is not None and words in chain_words(chain) and ("inside" in chain_words(chain)) == bool(words)


def test_who_looks_again_and_again_says_what_for() -> None:
    thread = waiting(MAIN, lock(MAIN, timed=True), ran=True, stack=on("queue", doing="get"))
    chain = follow(WaitGraph((process(thread),)), MAIN, MAIN)
    assert chain is not None and "an item from a queue that is empty, looking again and again" in chain.last.what


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ((("/lib/threading.py", "Condition.wait"), ("/lib/queue.py", "Queue.get")), "an item from a queue that is empty"),
        ((("/lib/threading.py", "Condition.wait"), ("/lib/threading.py", "Event.wait")), "an Event that nobody has set"),
        ((("/lib/threading.py", "Thread._wait_for_tstate_lock"), ("/lib/threading.py", "Thread.join")), "the thread `loader` to end"),
        ((("/lib/concurrent/futures/_base.py", "Future.result"),), "the result of a future"),
        ((("/lib/multiprocessing/connection.py", "Connection.poll"), ("/lib/multiprocessing/queues.py", "Queue.get")), "queue between processes"),
    ],
)  # fmt: skip
def test_a_stack_that_was_taken_from_outside_tells_by_its_functions(
    frames: tuple[tuple[str, str], ...], words: str, tmp_path: Path
) -> None:
    """As py-spy tells it: no objects, and functions with their class."""
    file = tmp_path / "train.py"
    file.write_text("loader.join()\n")
    below = tuple(Frame(f"/usr/lib/python3.11{path.removeprefix('/lib')}", 9, func) for path, func in frames)
    stack = ThreadStack("MainThread", (*below, Frame(str(file), 1, "main")), tid=MAIN)
    chain = follow(WaitGraph((process(waiting(MAIN, lock(MAIN), stack=stack)),)), MAIN, MAIN)
    assert chain is not None and words in chain_words(chain)


def test_a_rank_inside_a_collective_says_where_the_others_are() -> None:
    stacks = {pid: ThreadStack("MainThread", (Frame("/home/me/train.py", 9, "main"),), tid=pid) for pid in (100, 200)}
    one, other = (
        WaitingProcess(pid, 1, "python", f"rank {rank} (process {pid})", (waiting(pid, lock(pid, pid), pid, stack=stacks[pid]),),
                       collective=call)
        for rank, pid, call in ((0, 100, "monitored_barrier at me/train.py:9"), (1, 200, "all_reduce [1] float32 at me/train.py:12"))
    )  # fmt: skip
    chain = follow(WaitGraph((one, other)), 100, 100)
    assert chain is not None and "the other ranks, in monitored_barrier at me/train.py:9" in chain_words(chain)
    assert "rank 1 (process 200) is in all_reduce [1] float32" in chain_words(chain)


def test_a_wait_for_any_child_names_the_children() -> None:
    child = process(waiting(200, ThreadWait(200, "timer", timed=True), 200), pid=200, ppid=MAIN)
    main = process(waiting(MAIN, ThreadWait(MAIN, "child", "any child", peers=(200,)), stack=on("")))
    chain = follow(WaitGraph((main, child)), MAIN, MAIN)
    assert chain is not None and "the end of any child process, from process 200 (python)" in chain_words(chain)
