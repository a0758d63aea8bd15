"""Pipes, named pipes and queues between processes: full, or without another end; and with somebody slow at the other end."""

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from ctypes import CDLL

from marking import mark
from waits import EITHER, NOBODY, PLAIN, Trainer, hang, healthy, main, outside, python, train, train_arrays

fork, spawn = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")


def new_fifo():
    path = os.path.join(tempfile.mkdtemp(), "stream.fifo")
    os.mkfifo(path)
    return path


@hang("pipe|queue|feeder|buffer", r"full|reader|read|main|nobody|parent|get\(")
def big_put_join():
    """Main joins a child whose queue is full of what only main can take."""

    def tokenize(tokens):
        tokens.put(b"x" * 4_000_000)

    tokens = fork.Queue()
    train()
    child = fork.Process(target=tokenize, args=(tokens,))
    child.start()
    time.sleep(0.5)
    mark("fault")
    child.join()  # HANG
    print(len(tokens.get()))


@hang("queue|pipe", "dead|died|exit|code 9|ended|gone|left|nobody|no (live|other)")
def dead_producer():
    """The only producer left with code 9."""

    def produce(batches):
        for number in range(4):
            batches.put(number)
        time.sleep(0.3)
        os._exit(9)

    batches = fork.Queue()
    fork.Process(target=produce, args=(batches,), name="producer").start()
    train()
    for number in range(5):
        if number == 4:
            mark("fault")
        print("batch", batches.get(), flush=True)  # HANG


@hang("pipe|socket", "itself|own|same process|this process|nobody|no other|only|dead|exited|ended|left")
def own_pipe_end():
    """The child has ended; main itself keeps the end open at which the child wrote."""

    def say_hello(connection):
        connection.send("hello")
        connection.close()

    here, there = fork.Pipe()
    child = fork.Process(target=say_hello, args=(there,))
    child.start()
    train()
    print(here.recv(), flush=True)
    child.join()
    mark("fault")
    print(here.recv())  # HANG


@hang("fifo|named pipe", "nobody|no (reader|one|other|process)|none|reader|other end", states=EITHER)
def fifo_without_reader():
    """A child opens a named pipe for writing that nobody reads."""
    fifo = new_fifo()

    def report():
        mark("fault")
        with open(fifo, "w") as file:  # HANG
            file.write("accuracy 0.9")

    train()
    child = fork.Process(target=report)
    child.start()
    mark("holder", child.pid)
    child.join()  # HANG-ALSO


@hang("fifo|named pipe", "nobody|no (writer|one|other|process)|none|writer|other end", states=EITHER)
def fifo_reader():
    """Main opens a named pipe for reading that nobody writes."""
    fifo = new_fifo()
    Trainer().fit()
    mark("fault")
    with open(fifo, "rb") as file:  # HANG
        file.read()


@hang("fifo|named pipe", "{holder}|bash|nobody|no (reader|one|process)|reader|other end", states=EITHER)
def multistage_fifo():
    """Main and bash open two named pipes, each in another order."""
    a, b = new_fifo(), new_fifo()
    child = subprocess.Popen(["bash", "-c", f"exec 3< {b}; exec 4< {a}; cat <&4"])
    mark("holder", child.pid)
    train()
    mark("fault")
    first = open(a, "w")  # HANG
    first.write(b)


@hang("pipe", "full|itself|own|same process|nobody|reader|this process")
def logging_pipe_self():
    """The pipe is full and its only reader is the process that writes."""
    reading, writing = os.pipe()
    log = os.fdopen(writing, "w", buffering=1)
    train()
    for number in range(5000):
        if number == 850:  # a few lines before it is full
            mark("fault")
        log.write(f"metric {number} " + "x" * 60 + "\n")  # HANG
    print(os.read(reading, 10))


def consume(batches):
    for _ in range(3):
        batches.get()
    sys.exit(1)


@hang("queue|semaphore", "full|code 1|" + NOBODY)
def mp_put_full():
    """The queue is full; its consumer left with code 1."""
    batches = spawn.Queue(2)
    spawn.Process(target=consume, args=(batches,)).start()
    train(30)
    for number in range(10):
        if number == 5:
            mark("fault")
        batches.put(number)  # HANG
        time.sleep(0.1)


# ---------------------------------------------------------------- healthy


@healthy()
def slow_producer(wait):
    def produce(batches):
        for number in (1, 2, None):
            time.sleep(wait if number else 0)
            batches.put(number)

    batches = fork.Queue()
    child = fork.Process(target=produce, args=(batches,))
    child.start()
    while batches.get() is not None:
        train_arrays()
    child.join()


@healthy()
def producer_behind_a_socket(wait):
    """The producer waits for a third process, which sleeps."""

    def originate(port):
        listening = socket.create_server(("127.0.0.1", 0))
        port.send(listening.getsockname()[1])
        connection, _ = listening.accept()
        for _ in range(2):
            time.sleep(wait)
            connection.sendall(b"row\n")
        connection.close()

    def produce(rows, port):
        for line in socket.create_connection(("127.0.0.1", port)).makefile():
            rows.put(line)
        rows.put(None)

    here, there = fork.Pipe()
    origin = fork.Process(target=originate, args=(there,))
    origin.start()
    rows = fork.Queue()
    child = fork.Process(target=produce, args=(rows, here.recv()))
    child.start()
    train()
    for _ in iter(rows.get, None):
        train()
    child.join()
    origin.join()


@healthy()
def fifo_opened_late(wait):
    fifo = new_fifo()
    for _ in range(2):
        train()
        child = subprocess.Popen(["bash", "-c", f"sleep {wait}; echo batch > {fifo}"])
        with open(fifo) as file:
            print(file.read(), end="", flush=True)
        child.wait()


@healthy()
def fifo_opened_late_from_outside(wait):
    """By a process that is no descendant and has not opened it yet."""
    fifo = new_fifo()
    for _ in range(2):
        outside(
            "import sys, time; time.sleep(float(sys.argv[2])); open(sys.argv[1], 'w').write('hello')", fifo, wait + 2
        )
        train()
        with open(fifo) as file:
            print(file.read(), flush=True)


@healthy()
def reader_that_takes_little(wait):
    """64 kB at a time, nine times."""
    Trainer().fit()
    child = python(
        """
        import sys, time
        while sys.stdin.buffer.read(65536):
            time.sleep(float(sys.argv[1]))
        """,
        wait / 4.5,
        stdin=subprocess.PIPE,
    )
    child.stdin.write(b"w" * 65536 * 9)
    child.stdin.close()
    child.wait()
    train()


@healthy()
def file_that_is_made_late(wait):
    """inotify on a folder."""
    libc, folder = CDLL(None), tempfile.mkdtemp()
    changes = libc.inotify_init1(0)
    libc.inotify_add_watch(changes, folder.encode(), 0x100)
    for epoch in range(2):
        train()
        child = subprocess.Popen(["bash", "-c", f"sleep {wait}; touch {folder}/shard{epoch}"])
        os.read(changes, 4096)
        child.wait()


@healthy("bash", "-c", "(sleep {wait}; echo a; sleep {wait}; echo b) | " + " ".join(PLAIN))
def slow_stdin(_wait):
    train()
    for line in sys.stdin:
        print("got", line.strip(), flush=True)
        train()


@healthy()
def partner_that_thinks(wait):
    def answer(connection):
        while (word := connection.recv()) is not None:
            time.sleep(wait / 2)
            connection.send(word + 1)

    here, there = fork.Pipe()
    child = fork.Process(target=answer, args=(there,))
    child.start()
    for turn in range(2):
        here.send(turn)
        print(here.recv(), flush=True)
        train()
        time.sleep(wait / 2)
    here.send(None)
    child.join()


if __name__ == "__main__":
    main(globals())
