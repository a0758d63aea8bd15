"""Child processes and signals: a child that cannot end, or is stopped, or asks; a signal that nobody sends, or sends late."""

import fcntl
import os
import select
import signal
import struct
import subprocess
import tempfile
import threading
import time
from ctypes import CDLL

from marking import mark
from waits import EITHER, OUTSIDE, Trainer, hang, healthy, main, python, train

STOPPED = ("stopped", "stuck", "waiting")


@hang(r"\bcat\b|child|subprocess|process", "{holder}|stdin|pipe|standard input")
def cat_stdin():
    """The child reads until its stdin ends; main has the only other end, and waits for the child."""
    train(50)
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    child.stdin.write(b"metrics\n")
    child.stdin.flush()
    mark("holder", child.pid)
    mark("fault")
    child.wait()  # HANG


@hang("pipe|stdout|stderr", "{holder}|full|stderr|writ")
def stderr_full():
    """The child blocks on its stderr, which main does not read."""
    train()
    words = ["bash", "-c", "head -c 400000 /dev/zero >&2; echo ready"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    mark("holder", child.pid)
    mark("fault")
    print(child.stdout.readline())  # HANG


@hang("stopped|SIGSTOP|kill -CONT|suspended", r"{holder}|\bsleep\b", states=STOPPED)
def stopped_child():
    train()
    child = subprocess.Popen(["sleep", "2"])
    os.kill(child.pid, signal.SIGSTOP)
    mark("holder", child.pid)
    mark("fault")
    child.wait()  # HANG


@hang("pipe|stdout|output", r"{holder}|\bsleep\b", states=OUTSIDE)
def capture_daemon():
    """The child has ended; a grandchild keeps the pipe of its output open."""
    train()
    mark("fault")
    code = "sleep 100000 & echo holder 0 $! >> $LAMP_FIELD_MARK; exit 0"
    subprocess.run(["bash", "-c", code], stdout=subprocess.PIPE, check=True)  # HANG


@hang("pipe|stopped|SIGSTOP|kill -CONT|suspended", r"{holder}|\bcat\b", states=STOPPED)
def full_pipe_stopped():
    """The pipe is full and its reader is stopped."""
    Trainer().fit()
    sink = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    os.kill(sink.pid, signal.SIGSTOP)
    mark("holder", sink.pid)
    mark("fault")
    sink.stdin.write(b"0" * 1_000_000)  # HANG


@hang("stdin|prompt|standard input|terminal|keyboard|tty|pts", "bash|child", states=OUTSIDE, stdin="terminal")
def child_prompt():
    """The child asks the user."""
    train()
    mark("fault")
    subprocess.run(["bash", "-c", "read -p 'Password for origin: ' x; echo $x"], check=True)  # HANG


@hang(
    "signal|SIGUSR1|sigwait",
    "nobody|no (one|other|live|child|process)|dead|exit|ended|code 4|SIGUSR1|somebody|anybody|kill",
    states=EITHER,
)
def sigwait_dead():
    """The helper that should send the signal left with code 4."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    train()
    subprocess.run(["bash", "-c", "exit 4"], check=False)
    mark("fault")
    signal.sigwait({signal.SIGUSR1})  # HANG


@hang(r"flock|file lock|\block\b.{0,80}ckpt\.lck|lock on", "{holder}|itself|main|own|this process")
def child_wants_my_flock():
    """The child waits for a file lock that main itself holds."""
    path = os.path.join(tempfile.mkdtemp(), "ckpt.lck")
    kept = open(path, "w")
    fcntl.flock(kept, fcntl.LOCK_EX)
    mark("holder")
    train(50)
    mark("fault")
    subprocess.check_call(["flock", path, "true"])  # HANG


# ---------------------------------------------------------------- healthy


@healthy()
def thread_that_waits_for_a_child(wait):
    def upload():
        subprocess.Popen(["sleep", str(wait)]).wait()

    for _ in range(2):
        train()
        thread = threading.Thread(target=upload)
        thread.start()
        thread.join()


@healthy()
def child_that_waits_for_its_sibling(wait):
    server = python(
        """
        import socket, sys, time
        listening = socket.create_server(("127.0.0.1", 0))
        print(listening.getsockname()[1], flush=True)
        for _ in range(2):
            connection, _ = listening.accept()
            connection.recv(10)
            time.sleep(float(sys.argv[1]))
            connection.sendall(b"ok")
            connection.close()
        """,
        wait,
        stdout=subprocess.PIPE,
        text=True,
    )
    port = server.stdout.readline().strip()
    for _ in range(2):
        train()
        client = python(
            """
            import socket, sys
            connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
            connection.sendall(b"question")
            print(connection.recv(10))
            """,
            port,
            stdout=subprocess.PIPE,
            text=True,
        )
        print(client.communicate()[0], end="", flush=True)
    server.wait()


@healthy()
def signal_from_a_child(wait):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    for _ in range(2):
        train()
        child = os.fork()
        if child == 0:
            time.sleep(wait)
            os.kill(os.getppid(), signal.SIGUSR2)
            os._exit(0)
        signal.sigwait({signal.SIGUSR2})
        os.waitpid(child, 0)


@healthy()
def pause_until_an_alarm(wait):
    trainer = Trainer()
    signal.signal(signal.SIGALRM, lambda *_: print("tick", flush=True))
    for _ in range(2):
        trainer.fit()
        signal.setitimer(signal.ITIMER_REAL, wait)
        signal.pause()


@healthy()
def stopped_child_that_is_continued(wait):
    for _ in range(2):
        train()
        child = subprocess.Popen(["sleep", str(wait / 5)])
        os.kill(child.pid, signal.SIGSTOP)
        other = subprocess.Popen(["bash", "-c", f"sleep {wait}; kill -CONT {child.pid}"])
        child.wait()
        other.wait()


@healthy()
def timer_as_a_file(wait):
    """epoll on a timerfd: what an event loop sleeps in."""
    libc = CDLL(None)
    for _ in range(2):
        train()
        timer = libc.timerfd_create(time.CLOCK_MONOTONIC, 0)
        seconds, part = divmod(wait, 1)
        assert libc.timerfd_settime(timer, 0, struct.pack("qqqq", 0, 0, int(seconds), int(part * 1e9)), None) == 0
        with select.epoll() as poll:
            poll.register(timer, select.EPOLLIN)
            poll.poll()
        os.close(timer)


if __name__ == "__main__":
    main(globals())
