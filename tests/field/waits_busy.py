"""Not asleep but busy: loops without an end, C calls that keep the interpreter; and work that only takes long."""

import ctypes
import gc
import hashlib
import itertools
import mmap
import multiprocessing
import os
import queue
import re
import tempfile
import threading
import time

from marking import mark
from waits import BUSY, hang, healthy, main, train, train_arrays

SPINS = r"spin|busy|running|100 ?%|loop|CPU"
fork = multiprocessing.get_context("fork")


@hang(SPINS, "reducer|thread", states=("slow", "stuck"), heavy=True)
def spin_holder():
    """A thread spins with the lock that main wants, until main says something."""
    grads, ready = threading.Lock(), []

    def reduce():
        with grads:
            mark("fault")
            while not ready:  # HANG
                pass  # HANG-ALSO

    train(50)
    threading.Thread(target=reduce, name="reducer", daemon=True).start()
    time.sleep(0.2)
    with grads:  # HANG-ALSO
        ready.append(True)


@hang(r"\bGIL\b|interpreter lock|" + SPINS, "cleaner|thread|clean", states=BUSY, heavy=True)
def regex_thread():
    """A thread in a regular expression that takes for ever and keeps the interpreter."""
    found = []

    def clean(text):
        mark("fault")
        found.append(re.match(r"(\w+\s?)+$", text))  # HANG

    train()
    cleaner = threading.Thread(target=clean, args=("word " * 12 + "x" * 40 + "!",), name="cleaner")
    cleaner.start()
    while not found:
        time.sleep(0.05)
    cleaner.join()


@hang(
    r"\bGIL\b|interpreter lock", r"poller|thread|poll|C (call|code)|native|sleep", states=("slow", "waiting", "stuck")
)
def pydll_sleep():
    """A thread sleeps in C and keeps the interpreter."""
    libc = ctypes.PyDLL(None)

    def poll():
        mark("fault")
        libc.sleep(100000)  # HANG

    train(50)
    threading.Thread(target=poll, name="poller", daemon=True).start()
    while True:
        time.sleep(0.05)
        print("waiting for the device", flush=True)


@hang(SPINS, states=BUSY, heavy=True)
def livelock():
    """A draw that is never accepted."""
    train(60)
    mark("fault")
    word, accepted = 8, False
    while not accepted:  # HANG-ALSO
        draw = (word * 1103515245 + 12345) % 4  # HANG
        word = draw * 4  # HANG-ALSO
        accepted = draw == 3  # HANG-ALSO


@hang(SPINS, "{holder}|scorer|child|process", states=("slow", "waiting"), heavy=True)
def child_spins():
    """Main waits for the second answer of a child that spins."""

    def score(answers):
        answers.put(0.5)
        mark("fault")
        low, high = 0.0, 1.0
        while high - low > 0:  # HANG-ALSO
            middle = (low + high) / 2  # HANG
            low = middle if middle > 2 else low  # HANG-ALSO
            high = max(high, middle)  # HANG-ALSO

    answers = fork.Queue()
    train_arrays()
    scorer = fork.Process(target=score, args=(answers,), name="scorer")
    scorer.start()
    mark("holder", scorer.pid)
    print(answers.get(), flush=True)
    print(answers.get())  # HANG-ALSO


@hang(r"\bGIL\b|interpreter lock|C (call|code)|" + SPINS, states=BUSY, heavy=True)
def endless_c():
    """One C call without an end."""
    train(50)
    mark("fault")
    print(sum(itertools.repeat(0)))  # HANG


# ---------------------------------------------------------------- healthy


@healthy()
def long_call_without_the_gil(wait):
    for _ in range(2):
        train(80)
        until, rounds = time.monotonic() + wait, 200_000
        while time.monotonic() < until:
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", rounds)
            rounds = 3_000_000


@healthy()
def long_call_with_the_gil(wait):
    began = time.monotonic()
    sum(range(20_000_000))
    per_second = 20_000_000 / (time.monotonic() - began)
    for _ in range(2):
        train(80)
        print("counting", flush=True)
        print(sum(range(int(per_second * wait))), flush=True)


@healthy()
def silent_sorting_beside_an_idle_thread(wait):
    import numpy as np

    inbox, generator = queue.Queue(), np.random.default_rng(1)
    threading.Thread(target=lambda: print("log", inbox.get(), flush=True), daemon=True).start()
    for _ in range(2):
        train_arrays()
        until = time.monotonic() + wait
        while time.monotonic() < until:
            np.sort(generator.normal(size=400_000))


@healthy()
def long_garbage_collection(wait):
    train(60)
    kept = [[n] for n in range(1_500_000)]
    gc.disable()
    for _ in range(2):
        until = time.monotonic() + wait
        while time.monotonic() < until:
            gc.collect()
        train(60)
    print(len(kept), "lists")


@healthy()
def pages_read_again_and_again(wait):
    """The pages of a mapped file are dropped and read anew, silently."""
    path = os.path.join(tempfile.mkdtemp(), "tokens.bin")
    with open(path, "wb") as file:
        for _ in range(100):
            file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
    for _ in range(2):
        train(60)
        until = time.monotonic() + wait
        with open(path, "rb") as file:
            while time.monotonic() < until:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
                    sum(pages[place] for place in range(0, len(pages), 4096))


if __name__ == "__main__":
    main(globals())
