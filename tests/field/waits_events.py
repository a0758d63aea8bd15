"""Threads and what one tells the other: events, conditions, barriers, futures, queues; nobody left to tell, or somebody late."""

import http.server
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from marking import mark
from waits import NOBODY, Trainer, hang, healthy, main, python, train, train_arrays


@hang(r"condition|notif|wak(e|en)", NOBODY)
def cond_silent():
    """The producer ends without a notify."""
    ready, batch = threading.Condition(), []

    def produce():
        with ready:
            batch.append(None)

    train_arrays()
    with ready:
        threading.Thread(target=produce).start()
        mark("fault")
        ready.wait()  # HANG
    train_arrays()


@hang(r"future|\bresult\b", NOBODY + "|no executor|producer")
def future_bare():
    """The result of a future that nobody works on."""
    handle = Future()
    Trainer().fit(30)
    mark("fault")
    print(handle.result())  # HANG


@hang(r"task_done|queue.{0,60}(join|unfinished|done|empt)|unfinished", "thread|worker|nobody|task_done|itself|main")
def queue_join():
    """The worker never says task_done and waits for more."""
    work = queue.Queue()

    def write():
        while True:
            print("wrote", work.get(), flush=True)  # HANG-ALSO

    threading.Thread(target=write, daemon=True).start()
    train()
    for item in range(3):
        work.put(item)
    time.sleep(0.3)
    mark("fault")
    work.join()  # HANG


@hang(r"barrier|part(y|ies)", NOBODY + "|missing|2 of 3|third|another")
def barrier_two_of_three():
    """The third party was never started."""
    sync = threading.Barrier(3)

    def replica():
        train(16)
        sync.wait()  # HANG-ALSO

    threading.Thread(target=replica).start()
    train(24)
    mark("fault")
    sync.wait()  # HANG


@hang(r"\bevent\b", NOBODY)
def event_alone():
    """Before the first step, and there is no other thread."""
    print("building scheduler", flush=True)
    time.sleep(2.5)
    ready = threading.Event()
    mark("fault")
    ready.wait()  # HANG
    train()


@hang(
    r"future|executor|thread ?pool|worker thread",
    r"max_workers|only worker|no free|all (its )?(threads|workers)|ThreadPool|pool|worker|starv|itself|queued",
)
def nested_submit():
    """The only worker of a pool waits for a task that stands in line behind it."""
    pool = ThreadPoolExecutor(max_workers=1)

    def shard(documents):
        mark("fault")
        return sum(pool.submit(len, document).result() for document in documents)  # HANG

    train()
    print(pool.submit(shard, ["a", "bb"]).result())  # HANG-ALSO


@hang(r"queue|non-?daemon|(end|exit|shutdown).{0,60}thread|thread.{0,60}(end|exit|shut)", "uploader|" + NOBODY)
def leftover_thread():
    """Main has ended; Python joins a thread that waits for more to upload."""
    uploads = queue.Queue()

    def upload():
        while uploads.get() is not None:  # HANG
            print("uploaded", flush=True)

    threading.Thread(target=upload, name="uploader").start()
    train(60)
    print("training finished", flush=True)
    mark("fault")


@hang("condition|notif|each other", "thread|ema|each other|all|nobody|no other")
def upgrade():
    """Two readers of one lock, each waits for the other to leave before it writes."""
    changed, both, readers = threading.Condition(), threading.Barrier(2), []

    def read_then_write():
        with changed:
            readers.append(threading.current_thread())
        both.wait()
        mark("fault")
        with changed:
            while len(readers) > 1:
                changed.wait()  # HANG

    train()
    ema = threading.Thread(target=read_then_write, name="ema")
    ema.start()
    read_then_write()
    ema.join()


@hang(r"\bevent\b|executor|pool|thread.{0,40}(to end|join|end)", "monitor|executor|pool|nobody")
def executor_exit():
    """The block of a pool waits for its thread, which waits for what comes after the block."""
    stop = threading.Event()

    def monitor():
        stop.wait()  # HANG-ALSO

    train(20)
    with ThreadPoolExecutor(2) as pool:  # HANG
        pool.submit(monitor)
        train(30)
        mark("fault")
    stop.set()


@hang(r"event ?fd|\bevent\b", NOBODY)
def eventfd_alone():
    """The only other thread ended without writing."""
    counter = os.eventfd(0)
    threading.Thread(target=time.sleep, args=(0.1,)).start()
    train()
    mark("fault")
    print(os.read(counter, 8))  # HANG


@hang(r"future|\bresult\b", "each other|thread|nobody|both|cycle|stage|worker|no (other|live)")
def mutual_futures():
    """Two threads of a pool, each waits for the other's future."""
    results = {"a": Future(), "b": Future()}

    def stage(name, needs):
        value = results[needs].result()  # HANG
        results[name].set_result(value + 1)

    train()
    pool = ThreadPoolExecutor(2)
    mark("fault")
    tasks = [pool.submit(stage, "a", "b"), pool.submit(stage, "b", "a")]
    print([task.result() for task in tasks])  # HANG-ALSO


@hang("queue", "full|consumer|" + NOBODY)
def put_full():
    """The queue is full; its only consumer raised and ended."""
    ready = queue.Queue(maxsize=2)

    def consume():
        while True:
            if ready.get() == 3:
                raise KeyError("label")

    threading.Thread(target=consume, name="consumer").start()
    train_arrays()
    for item in range(10):
        if item == 6:
            mark("fault")
        time.sleep(0.1)
        ready.put(item)  # HANG


# ---------------------------------------------------------------- healthy


@healthy()
def event_set_by_an_interval_timer(wait):
    ready, trainer = threading.Event(), Trainer()
    signal.signal(signal.SIGALRM, lambda *_: ready.set())
    for _ in range(2):
        trainer.fit()
        ready.clear()
        signal.setitimer(signal.ITIMER_REAL, wait)
        ready.wait()


@healthy()
def event_set_when_a_child_ends(wait):
    """One thread, no other; the handler of SIGCHLD wakes it."""
    ended = threading.Event()
    signal.signal(signal.SIGCHLD, lambda *_: ended.set())
    for _ in range(2):
        train()
        ended.clear()
        child = subprocess.Popen(["sleep", str(wait)])
        ended.wait()
        child.wait()


@healthy()
def future_of_a_timer(wait):
    for _ in range(2):
        train_arrays()
        saved = Future()
        threading.Timer(wait, saved.set_result, args=("saved",)).start()
        print(saved.result(), flush=True)


@healthy()
def barrier_with_one_late(wait):
    """One of the three parties waits for a child first."""
    meet, trainer = threading.Barrier(3), Trainer()

    def shard(number):
        if number == 1:
            subprocess.run(["sleep", str(wait)], check=True)
        meet.wait()

    for _ in range(2):
        trainer.fit()
        threads = [threading.Thread(target=shard, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        meet.wait()
        for thread in threads:
            thread.join()


@healthy()
def condition_told_by_a_web_hook(wait):
    """A thread that serves wakes main when a client comes, which sleeps until then."""
    arrived, paths = threading.Condition(), []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with arrived:
                paths.append(self.path)
                arrived.notify_all()
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    call = "import sys, time, urllib.request as u; time.sleep(float(sys.argv[2])); u.urlopen(sys.argv[1])"
    for epoch in range(2):
        train()
        caller = python(call, f"http://127.0.0.1:{server.server_port}/ready{epoch}", wait)
        with arrived:
            arrived.wait_for(lambda epoch=epoch: len(paths) > epoch)
        caller.wait()
    server.shutdown()


@healthy()
def eventfd_written_by_a_child(wait):
    counter = os.eventfd(0)
    for _ in range(2):
        train_arrays()
        child = os.fork()
        if child == 0:
            time.sleep(wait)
            os.eventfd_write(counter, 1)
            os._exit(0)
        os.read(counter, 8)
        os.waitpid(child, 0)


@healthy()
def eventfd_written_by_an_orphan(wait):
    """A daemon, forked twice and in a session of its own, has inherited it: it is no longer below the script."""
    counter = os.eventfd(0)
    for _ in range(2):
        train_arrays()
        child = os.fork()
        if child == 0:
            if os.fork() == 0:
                os.setsid()
                time.sleep(wait)
                os.eventfd_write(counter, 1)
            os._exit(0)
        os.waitpid(child, 0)
        os.read(counter, 8)


@healthy()
def eventfd_on_its_way(wait):
    """It was sent over a local socket whose reader, a daemon, takes it only later: until then it is in nobody's table."""
    for _ in range(2):
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                ours.close()
                time.sleep(wait)
                _, (received,), _, _ = socket.recv_fds(theirs, 1, 1)
                os.eventfd_write(received, 1)
            os._exit(0)
        os.wait()
        theirs.close()
        counter = os.eventfd(0)
        socket.send_fds(ours, [b"x"], [counter])
        train_arrays()
        os.read(counter, 8)


if __name__ == "__main__":
    main(globals())
