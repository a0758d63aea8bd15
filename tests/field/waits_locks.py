"""Threads and locks: a lock that nobody gives back, cycles, a lock taken twice; and the same shapes with somebody who will."""

import gc
import multiprocessing
import signal
import socket
import subprocess
import threading
import time

from marking import mark
from waits import ASLEEP, NOBODY, OUTSIDE, Trainer, hang, healthy, main, python, train, train_arrays

SELF = r"itself|same thread|own|main ?thread|MainThread|nobody|no other|only thread"
fork = multiprocessing.get_context("fork")


@hang(r"semaphore|\block\b", NOBODY)
def sem_leak():
    """Both permits went with threads that raised before they gave them back."""
    slots = threading.BoundedSemaphore(2)

    def prefetch(shard):
        slots.acquire()
        try:
            raise ValueError("bad shard")
        except ValueError as error:
            print("skipped shard", shard, error, flush=True)

    train()
    for shard in range(2):
        worker = threading.Thread(target=prefetch, args=(shard,))
        worker.start()
        worker.join()
    mark("fault")
    slots.acquire()  # HANG
    train()


@hang(r"\block\b|deadlock", r"main ?thread|MainThread|main\b|each other|cycle|checkpointer")
def join_holding():
    """The main thread joins a thread that wants the lock which the main thread holds."""
    state = threading.Lock()

    def save():
        print("saving", flush=True)
        with state:  # HANG-ALSO
            print("saved", flush=True)

    train()
    with state:
        checkpointer = threading.Thread(target=save, name="checkpointer")
        checkpointer.start()
        mark("fault")
        checkpointer.join()  # HANG
    train()


@hang(r"\block\b|deadlock|cycle", r"thread|each other|cycle|wait for")
def three_cycle():
    """Three threads, each holds what the one before wants."""
    a, b, c = threading.Lock(), threading.Lock(), threading.Lock()
    gate = threading.Barrier(3)

    def work(first, second):
        with first:
            gate.wait()
            mark("fault")
            second.acquire()  # HANG
            second.release()

    train(60)
    threads = [threading.Thread(target=work, args=pair) for pair in ((a, b), (b, c), (c, a))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # HANG-ALSO


@hang(r"\block\b", NOBODY)
def owner_ended():
    """The thread that took the lock has ended and never gave it back."""
    cache = threading.Lock()

    def refresh():
        cache.acquire()
        print("cache refreshed", flush=True)

    train_arrays()
    refresher = threading.Thread(target=refresh, name="refresher")
    refresher.start()
    refresher.join()
    mark("fault")
    with cache:  # HANG
        train_arrays()


@hang(r"\block\b", SELF + "|handler")
def handler_relock():
    """A signal handler wants the lock that the code it interrupted holds."""
    log_lock = threading.Lock()

    def log(message):
        with log_lock:  # HANG
            print(message, flush=True)
            if message.startswith("sync"):
                signal.raise_signal(signal.SIGUSR1)

    def on_usr1(_signum, _frame):
        mark("fault")
        log("got a preemption notice")

    signal.signal(signal.SIGUSR1, on_usr1)
    train()
    log("sync point")
    train()


@hang(r"import|\bmodule\b", r"thread|main|each other|import|waits_plugin")
def import_cycle():
    """While a module is imported, it joins a thread that imports the module."""
    train(30)
    print("loading plugin", flush=True)
    mark("fault")
    import waits_plugin  # HANG-ALSO

    print(waits_plugin.TABLE)


@hang(r"\block\b", SELF)
def callback_relock():
    """A listener asks for the value while the update that calls it holds the lock."""

    class Meter:
        def __init__(self):
            self.lock, self.listeners, self.count = threading.Lock(), [], 0

        def update(self, more):
            with self.lock:
                self.count += more
                for listener in self.listeners:
                    listener(self)

        def value(self):
            self.lock.acquire()  # HANG
            try:
                return self.count
            finally:
                self.lock.release()

    meter, trainer = Meter(), Trainer()
    meter.update(1)
    trainer.fit()
    meter.listeners.append(lambda meter: print("count", meter.value()))
    mark("fault")
    meter.update(1)
    trainer.fit()


@hang(r"\block\b", SELF + "|__del__|finali|garbage")
def gc_del_lock():
    """The garbage collector runs a finaliser that wants the lock held around the collection."""
    registry_lock, registry = threading.Lock(), set()

    class Buffer:
        def __init__(self):
            self.me = self
            registry.add(id(self))

        def __del__(self):
            with registry_lock:  # HANG
                registry.discard(id(self))

    train()
    gc.disable()
    Buffer()
    mark("fault")
    with registry_lock:
        gc.collect()  # HANG-ALSO
    train()


@hang(r"\bsleep(s|ing)?\b|retr(y|ies)|poll|loop|\block\b|timer", states=ASLEEP)
def after_you():
    """Two threads give way to each other for ever, in step: asleep at one line, round after round."""
    left, right = threading.Lock(), threading.Lock()
    turn = threading.Barrier(2)

    def polite(mine, other):
        while True:
            with mine:
                turn.wait()
                if other.acquire(blocking=False):
                    break
                turn.wait()
            time.sleep(0.25)  # HANG

    train()
    threads = [threading.Thread(target=polite, args=pair) for pair in ((left, right), (right, left))]
    mark("fault")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # HANG-ALSO


@hang(r"\block\b|socket", r"puller|{holder}", states=OUTSIDE)
def lock_thread_socket():
    """The thread that holds the lock waits for a server that is alive and silent."""
    server = python(
        """
        import signal, socket
        listening = socket.create_server(("127.0.0.1", 0))
        print(listening.getsockname()[1], flush=True)
        connection, _ = listening.accept()
        connection.recv(4)
        signal.pause()
        """,
        stdout=subprocess.PIPE,
        text=True,
    )
    mark("holder", server.pid)
    connection = socket.create_connection(("127.0.0.1", int(server.stdout.readline())))
    params = threading.Lock()

    def pull():
        with params:
            connection.sendall(b"pull")
            connection.recv(100)  # HANG-ALSO

    train()
    threading.Thread(target=pull, name="puller", daemon=True).start()
    time.sleep(0.2)
    mark("fault")
    with params:  # HANG
        train()


@hang(r"\block\b", "compactor|thread", states=OUTSIDE)
def lock_thread_sleeps():
    """The thread that holds the lock sleeps for a day."""
    journal, trainer = threading.Lock(), Trainer()

    def compact():
        with journal:
            time.sleep(90000)  # HANG-ALSO

    trainer.fit(30)
    threading.Thread(target=compact, name="compactor", daemon=True).start()
    trainer.fit(30)
    mark("fault")
    with journal:  # HANG
        trainer.fit()


# ---------------------------------------------------------------- healthy


@healthy()
def lock_given_back_by_an_alarm(wait):
    """A rate limit: the handler of an alarm gives back what its own thread holds."""
    token = threading.Lock()
    signal.signal(signal.SIGALRM, lambda *_: token.release())
    for _ in range(2):
        token.acquire()
        train()
        signal.setitimer(signal.ITIMER_REAL, wait)
        token.acquire()
        token.release()


@healthy()
def cycle_with_a_timeout(wait):
    """Two threads in a cycle, of which one gives up after a while."""
    a, b = threading.Lock(), threading.Lock()

    def left():
        with a:
            time.sleep(0.3)
            if b.acquire(timeout=wait):
                b.release()
            else:
                print("left gives up", flush=True)

    def right():
        with b:
            time.sleep(0.3)
            with a:
                print("right has both", flush=True)

    for _ in range(2):
        train()
        threads = [threading.Thread(target=left), threading.Thread(target=right)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@healthy()
def chain_of_locks_to_a_child(wait):
    """Main waits for a lock, its holder for a second one, its holder for a queue that a sleeping child fills."""

    def slow(shards):
        time.sleep(wait)
        shards.put("shard")

    def take(shards, lock):
        with lock:
            print(shards.get(), flush=True)

    def index(lock, other):
        with other:
            time.sleep(0.3)
            with lock:
                print("index written", flush=True)

    for _ in range(2):
        train()
        shards = fork.Queue()
        child = fork.Process(target=slow, args=(shards,))
        child.start()
        one, two = threading.Lock(), threading.Lock()
        threads = [threading.Thread(target=take, args=(shards, one)), threading.Thread(target=index, args=(one, two))]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        with two:
            train(10)
        for thread in threads:
            thread.join()
        child.join()


if __name__ == "__main__":
    main(globals())
