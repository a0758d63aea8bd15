"""Locks and events between processes, and locks that a fork copied: the holder is gone, or waits itself, or is only late."""

import logging
import logging.handlers
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time

from marking import mark
from waits import EITHER, NOBODY, Trainer, hang, healthy, main, train, train_arrays

fork, spawn = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")


def held_for(lock, seconds):
    """A thread that holds the lock for so long, and holds it now."""

    def hold():
        with lock:
            time.sleep(seconds)

    thread = threading.Thread(target=hold, name="holder")
    thread.start()
    time.sleep(0.2)
    return thread


@hang(r"\block\b|mutex", "fork|inherit")
def fork_queuehandler():
    """Logging in a child, through a queue whose mutex a thread held at the fork."""
    records = queue.Queue()
    log = logging.getLogger("train")
    log.addHandler(logging.handlers.QueueHandler(records))
    log.setLevel("INFO")
    train()
    held_for(records.mutex, 0.6)
    child = os.fork()
    if child == 0:
        time.sleep(0.6)
        mark("fault")
        log.info("evaluating in a child")  # HANG
        os._exit(0)
    print(os.waitpid(child, 0))  # HANG-ALSO


@hang(r"\block\b", "fork|inherit")
def fork_tqdm():
    """A progress bar in a child, whose lock a thread held at the fork."""
    from tqdm import tqdm

    def evaluate():
        time.sleep(1.0)
        mark("fault")
        for _ in tqdm(range(100), desc="eval"):  # HANG
            time.sleep(0.01)

    train(50)
    held_for(tqdm.get_lock(), 0.8)
    child = fork.Process(target=evaluate)
    child.start()
    child.join()  # HANG-ALSO


@hang(r"\block\b", "fork|inherit")
def fork_own():
    """A lock of the script's own; the parent reads from a pipe meanwhile."""
    table = threading.RLock()
    train_arrays()
    held_for(table, 1.0)
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        mark("fault")
        table.acquire()  # HANG
        os.write(writing, b"ok")
        os._exit(0)
    os.close(writing)
    print(os.read(reading, 2))  # HANG-ALSO


@hang(r"\block\b|semaphore", "process|pid|each other|both|Process-")
def mplock_cycle():
    """Two children, each holds what the other wants."""

    def rank(first, second, meet):
        with first:
            meet.wait()
            mark("fault")
            with second:  # HANG
                train()

    a, b, meet = fork.Lock(), fork.Lock(), fork.Barrier(2)
    train()
    children = [fork.Process(target=rank, args=(*pair, meet)) for pair in ((a, b), (b, a))]
    for child in children:
        child.start()
    for child in children:
        child.join()  # HANG-ALSO


@hang(r"\block\b|manager|socket", "manager|dead|died|killed|signal 9|SyncManager|pid", states=EITHER)
def manager_lock():
    """The holder was killed; the lock lives in a manager process that is alive."""

    def work(lock):
        lock.acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    with fork.Manager() as manager:
        lock = manager.Lock()
        train()
        child = fork.Process(target=work, args=(lock,))
        child.start()
        child.join()
        mark("fault")
        lock.acquire()  # HANG


@hang(r"\block\b|semaphore", "code 9|exit|" + NOBODY)
def semlock_killed():
    """The holder left with code 9."""

    def write(lock):
        lock.acquire()
        os._exit(9)

    lock = fork.Lock()
    Trainer().fit(50)
    child = fork.Process(target=write, args=(lock,))
    child.start()
    child.join()
    mark("fault")
    lock.acquire()  # HANG
    train()


def part(barrier, number):
    time.sleep(0.5)
    if number == 1:
        sys.exit(3)
    mark("fault")
    barrier.wait()  # HANG mp_barrier_dead


@hang(r"barrier|semaphore|\block\b|condition", "part-1|code 3|exit|dead|left|ended|missing|gone")
def mp_barrier_dead():
    """One of three left with code 3."""
    barrier = spawn.Barrier(3)
    train()
    for number in (1, 2):
        spawn.Process(target=part, args=(barrier, number), name=f"part-{number}").start()
    barrier.wait()  # HANG-ALSO


@hang(r"\bevent\b|semaphore|child|process", "{holder}|board|exit")
def exit_joins_child():
    """Main has ended; Python joins a child that waits for what only main could set."""

    def show(stop):
        stop.wait()  # HANG

    stop = fork.Event()
    board = fork.Process(target=show, args=(stop,), name="board")
    board.start()
    mark("holder", board.pid)
    Trainer().fit(50)
    print("training finished", flush=True)
    mark("fault")


# ---------------------------------------------------------------- healthy


@healthy()
def lock_of_a_live_child(wait):
    def export(lock, ready):
        with lock:
            ready.set()
            time.sleep(wait)

    lock = fork.Lock()
    for _ in range(2):
        ready = fork.Event()
        child = fork.Process(target=export, args=(lock, ready))
        child.start()
        ready.wait()
        train()
        with lock:
            train(20)
        child.join()


@healthy()
def lock_of_an_orphan(wait):
    """The holder is a grandchild whose parent has left."""
    lock = fork.Lock()
    for _ in range(2):
        train()
        lock.acquire()
        child = os.fork()
        if child == 0:
            if os.fork() == 0:
                os.setsid()
                time.sleep(wait)
                lock.release()
            os._exit(0)
        os.waitpid(child, 0)
        with lock:
            train(20)


@hang(r"Barrier of 3: 2 are there, 1 missing", r"process|rank|missing", states=EITHER)
def process_barrier_short():
    """Two of three processes come to a barrier; the third has ended."""
    barrier = fork.Barrier(3)

    def rank(number):
        if number < 2:
            barrier.wait()  # HANG

    ranks = [fork.Process(target=rank, args=(number,)) for number in range(3)]
    train()
    mark("fault")
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()  # HANG-ALSO


@hang(r"lock", r"fork")
def fork_inside_with():
    """The main thread itself holds the lock while it forks."""
    lock = threading.Lock()

    def work():
        with lock:  # HANG
            train(1)

    train()
    mark("fault")
    with lock:
        child = fork.Process(target=work)
        child.start()
        child.join()  # HANG-ALSO


@healthy()
def event_of_a_grandchild(wait):
    def set_late(event):
        time.sleep(wait)
        event.set()

    def start_another(event):
        grandchild = fork.Process(target=set_late, args=(event,))
        grandchild.start()
        grandchild.join()

    with fork.Manager() as manager:
        for event in (manager.Event(), fork.Event()):
            child = fork.Process(target=start_another, args=(event,))
            child.start()
            train()
            event.wait()
            child.join()


if __name__ == "__main__":
    main(globals())
