"""Locks on files and in databases, files that are waited for: left behind, held by somebody alive, or given back soon."""

import fcntl
import multiprocessing
import os
import random
import sqlite3
import subprocess
import tempfile
import time

from marking import mark
from waits import ASLEEP, EITHER, OUTSIDE, hang, healthy, main, outside, python, train, train_arrays

spawn = multiprocessing.get_context("spawn")


def new_path(name):
    return os.path.join(tempfile.mkdtemp(), name)


FLOCK = """
    import fcntl, signal, sys
    file = open(sys.argv[1], "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    signal.pause()
"""
FILELOCK = """
    import filelock, sys, time
    with filelock.FileLock(sys.argv[1]):
        time.sleep(float(sys.argv[2]))
"""
TRANSACTION = """
    import sqlite3, sys, time
    database = sqlite3.connect(sys.argv[1])
    database.execute("begin exclusive")
    time.sleep(float(sys.argv[2]))
    database.commit()
"""


@hang(r"flock|file lock|lock on|\block\b.{0,80}tokens\.cache", "{holder}", states=OUTSIDE)
def flock_outside():
    """Held by a process outside the tree."""
    path = new_path("tokens.cache")
    mark("holder", outside(FLOCK, path))
    train(50)
    with open(path, "a") as file:
        mark("fault")
        fcntl.flock(file, fcntl.LOCK_EX)  # HANG


def index(connection, path):
    with open(path, "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        connection.send("ready")
        connection.recv()  # HANG-ALSO fcntl_cycle


@hang(r"fcntl|posix|file lock|lock on|\block\b.{0,80}index\.bin", "{holder}")
def fcntl_cycle():
    """The child holds the record lock and waits for a word of main, which wants the lock."""
    path = new_path("index.bin")
    here, there = spawn.Pipe()
    child = spawn.Process(target=index, args=(there, path))
    child.start()
    there.close()
    mark("holder", child.pid)
    here.recv()
    train()
    with open(path, "r+") as file:
        mark("fault")
        fcntl.lockf(file, fcntl.LOCK_EX)  # HANG
    here.send("go on")


@hang(r"flock|file ?lock|lock on|\block\b.{0,80}dataset\.lock", "{holder}", states=OUTSIDE)
def filelock_outside():
    """Held by a process outside the tree; filelock tries twenty times a second."""
    from filelock import FileLock

    path = new_path("dataset.lock")
    mark("holder", outside(FILELOCK, path, 100000))
    train_arrays(90)
    mark("fault")
    with FileLock(path):  # HANG
        print("building the dataset", flush=True)


@hang(
    r"poll|\bsleep(s|ing)?\b|lock file|/lock\b",
    r"/lock\b|lock file|baton|timer|\bsleep|poll",
    states=("waiting", "slow", "stuck"),
)
def file_baton():
    """A lock file left behind by a build that was killed; before the first step."""
    from torch.utils.file_baton import FileBaton

    path = new_path("lock")
    open(path, "w").close()
    print("loading fused kernels", flush=True)
    baton = FileBaton(path)
    if not baton.try_acquire():
        mark("fault")
        baton.wait()  # HANG


@hang(r"database|sqlite|runs\.db|file lock|\block\b", "{holder}", states=OUTSIDE)
def sqlite_outside():
    """A process outside the tree has an exclusive transaction."""
    path = new_path("runs.db")
    database = sqlite3.connect(path, timeout=100000)
    database.execute("create table m (step int, loss real)")
    database.commit()
    mark("holder", outside(TRANSACTION, path, 100000))
    train(50)
    mark("fault")
    database.execute("insert into m values (25, 0.1)")  # HANG


@hang(r"database|sqlite|study\.db|file lock|\block\b", "itself|own|same process|this process|pid", states=EITHER)
def sqlite_self():
    """Another connection of the same process has begun a transaction."""
    path = new_path("study.db")
    one = sqlite3.connect(path, isolation_level=None)
    one.execute("create table trial (v real)")
    train()
    one.execute("begin immediate")
    one.execute("insert into trial values (1)")
    two = sqlite3.connect(path, timeout=90000, isolation_level=None)
    mark("fault")
    two.execute("insert into trial values (0.3)")  # HANG


@hang(r"shard_0003|poll|\bsleep(s|ing)?\b", states=ASLEEP)
def poll_file():
    """The one who should make the file left with code 7."""
    flag = new_path("shard_0003.done")
    child = subprocess.Popen(["bash", "-c", "sleep 1; exit 7"])
    train(50)
    child.wait()
    mark("fault")
    while not os.path.exists(flag):
        time.sleep(0.5)  # HANG


@hang(r"\bsleep(s|ing)?\b|retr(y|ies)|poll|timer|lockdir", states=ASLEEP)
def lockdir_retry():
    """A folder that stands for a lock, left behind by a run that was killed."""
    lock = new_path("cache.lockdir")
    os.mkdir(lock)

    class DirLock:
        def __enter__(self):
            while True:
                try:
                    os.mkdir(lock)
                    return self
                except FileExistsError:
                    time.sleep(0.2 + random.random() * 0.2)  # HANG

        def __exit__(self, *_):
            os.rmdir(lock)

    train()
    mark("fault")
    with DirLock():  # HANG-ALSO
        train()


# ---------------------------------------------------------------- healthy


@healthy()
def filelock_given_back(wait):
    from filelock import FileLock

    path = new_path("data.lock")
    for _ in range(2):
        outside(FILELOCK, path, wait + 2)
        train(50)
        with FileLock(path):
            train(20)


@healthy()
def transaction_that_ends(wait):
    path = new_path("t.db")
    database = sqlite3.connect(path, timeout=100)
    database.execute("create table m (v)")
    database.commit()
    for _ in range(2):
        outside(TRANSACTION, path, wait + 2)
        train()
        database.execute("insert into m values (1)")
        database.commit()


@healthy()
def record_lock_behind_a_socket(wait):
    """The holder waits for a third process, which sleeps."""
    path = new_path("index")
    open(path, "w").close()
    far = """
        import socket, sys, time
        listening = socket.create_server(("127.0.0.1", 0))
        print(listening.getsockname()[1], flush=True)
        connection, _ = listening.accept()
        time.sleep(float(sys.argv[1]))
        connection.sendall(b"k")
    """
    near = """
        import fcntl, socket, sys
        file = open(sys.argv[1], "r+")
        fcntl.lockf(file, fcntl.LOCK_EX)
        connection = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
        print("held", flush=True)
        connection.recv(1)
    """
    for _ in range(2):
        one = python(far, wait + 2, stdout=subprocess.PIPE, text=True)
        two = python(near, path, one.stdout.readline().strip(), stdout=subprocess.PIPE, text=True)
        two.stdout.readline()
        train(50)
        with open(path, "r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            train(20)
        two.wait()
        one.wait()


@healthy()
def file_that_comes_late(wait):
    folder = tempfile.mkdtemp()
    for epoch in range(2):
        subprocess.Popen(["bash", "-c", f"sleep {wait + 2}; touch {folder}/part{epoch}.done"])
        train()
        while not os.path.exists(f"{folder}/part{epoch}.done"):
            time.sleep(1)
        train(20)


if __name__ == "__main__":
    main(globals())
