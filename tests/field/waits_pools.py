"""Pools of processes: tasks that are lost, initializers that fail; and long tasks, idle workers, workers that come and go."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

from marking import mark
from waits import hang, healthy, main, train, train_arrays

fork, spawn = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
disk = fork.Lock()


def load_vocab():
    raise FileNotFoundError("vocab.json")


@hang(
    r"initiali[sz]er|again and again|(worker|child|process)\w*.{0,60}(fail|die|dead|exit|end|raise)|FileNotFound",
    "load_vocab|initiali[sz]er|worker|FileNotFound|exit",
    states=("stuck", "broken", "dead", "waiting", "slow"),
    heavy=True,
)
def pool_init_raises():
    """Every worker dies in the initializer and is replaced, for ever."""
    train(20)
    with fork.Pool(2, initializer=load_vocab) as pool:
        mark("fault")
        print(pool.map(len, ["a"] * 8))  # HANG


def featurize(number):
    if number == 5:
        mark("fault")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return number


@hang(
    r"(worker|child|process)\w*.{0,80}(died|killed|dead|gone|signal 9|lost|SIGKILL)"
    r"|(killed|died|lost).{0,60}(worker|task|child|process)",
    "9|killed|SIGKILL|dead|died|lost",
    states=("stuck", "waiting", "dead"),
)
def pool_task_killed():
    """A worker was killed in a task; the pool has replaced it, and lost the task."""
    train(30)
    pool = fork.Pool(3)
    results = pool.imap(featurize, range(12))
    for _ in range(12):
        print(next(results), flush=True)  # HANG


def convert(number):
    with disk:  # HANG-ALSO ppe_lock
        return number * number


@hang(r"\block\b|semaphore", "main|parent|pid|worker|itself|each other")
def ppe_lock():
    """Main holds the lock that the workers want, and waits for what they return."""
    train_arrays()
    with ProcessPoolExecutor(2, mp_context=fork) as pool, disk:
        mark("fault")
        print(list(pool.map(convert, range(4))))  # HANG


# ---------------------------------------------------------------- healthy


def sleep_for(seconds):
    time.sleep(seconds)
    return seconds


@healthy()
def long_task_and_workers_that_come_and_go(wait):
    train()
    with fork.Pool(3, maxtasksperchild=1) as pool:
        for _ in range(2):
            print(sorted(pool.imap_unordered(sleep_for, [wait, *[0.05] * 5])), flush=True)
            train()


@healthy()
def long_task_beside_a_worker_that_was_replaced(wait):
    train()
    with spawn.Pool(2, maxtasksperchild=2) as pool:
        long = pool.apply_async(sleep_for, (2 * wait,))
        for short in [pool.apply_async(sleep_for, (wait / 7,)) for _ in range(5)]:
            short.get()
        print("short ones done", flush=True)
        print(long.get(), flush=True)
        pool.close()
        pool.join()


@healthy()
def idle_workers(wait):
    """Main sleeps by itself; the workers of its pool have nothing to do."""
    with ProcessPoolExecutor(2, mp_context=fork) as pool:
        for _ in range(2):
            print(list(pool.map(sleep_for, [0.01] * 8)), flush=True)
            train()
            time.sleep(wait)


def build(seconds):
    """Reads from a child of its own, which sleeps."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        time.sleep(seconds)
        os.write(writing, b"x")
        os._exit(0)
    os.read(reading, 1)
    os.wait()
    return seconds


@healthy()
def workers_that_wait_for_children(wait):
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        for _ in range(2):
            train()
            for built in as_completed([pool.submit(build, seconds) for seconds in (wait, 1.0, 1.0)]):
                print("built", built.result(), flush=True)


@healthy()
def slow_initializer(wait):
    for _ in range(2):
        train()
        with fork.Pool(2, initializer=time.sleep, initargs=(wait,)) as pool:
            print(pool.map(len, ["a"] * 8), flush=True)


if __name__ == "__main__":
    main(globals())
