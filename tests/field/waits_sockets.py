"""Sockets: a peer that never answers, never accepts, never connects, refuses; and peers that are only late."""

import http.server
import multiprocessing
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

from marking import mark
from waits import ASLEEP, EITHER, hang, healthy, main, python, train, train_arrays

spawn = multiprocessing.get_context("spawn")
PEER = r"socket|127\.0\.0\.1|peer|connection|server"


def beside(serve):
    """A process that serves, and its port."""
    here, there = spawn.Pipe()
    server = spawn.Process(target=serve, args=(there,), daemon=True)
    server.start()
    mark("holder", server.pid)
    return here.recv()


def take_and_say_nothing(port):
    listening = socket.create_server(("127.0.0.1", 0))
    port.send(listening.getsockname()[1])
    connection, _ = listening.accept()
    while connection.recv(100):
        pass
    listening.accept()  # HANG-ALSO no_reply


@hang(PEER, "{holder}", states=EITHER)
def no_reply():
    """The server has read it all, keeps the connection half open and waits for the next client."""
    port = beside(take_and_say_nothing)
    train()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"get weights")
    connection.shutdown(socket.SHUT_WR)
    mark("fault")
    print(connection.recv(1000))  # HANG


class Silent(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        threading.Event().wait()  # HANG-ALSO silent_http


def serve_silently(port):
    server = http.server.HTTPServer(("127.0.0.1", 0), Silent)
    port.send(server.server_port)
    server.serve_forever()


@hang(PEER, "{holder}", states=EITHER)
def silent_http():
    """The server's handler waits for an event that nobody sets."""
    port = beside(serve_silently)
    train()
    mark("fault")
    print(urllib.request.urlopen(f"http://127.0.0.1:{port}/tokens").read())  # HANG


@hang("socket", "{holder}|each other|both")
def socketpair_both():
    """Both ends of a socketpair wait for a word of the other."""
    here, there = socket.socketpair()
    train()
    child = os.fork()
    if child == 0:
        here.close()
        there.recv(16)  # HANG-ALSO
        there.sendall(b"ack")
        os._exit(0)
    there.close()
    mark("holder", child)
    mark("fault")
    print(here.recv(16))  # HANG


@hang(PEER, "{holder}|not accept|never accept|nobody serves|unaccepted|backlog", states=EITHER)
def backlog_only():
    """The server listens and never accepts."""
    server = python(
        """
        import signal, socket
        listening = socket.create_server(("127.0.0.1", 0))
        print(listening.getsockname()[1], flush=True)
        signal.pause()
        """,
        stdout=subprocess.PIPE,
        text=True,
    )
    mark("holder", server.pid)
    store = socket.create_connection(("127.0.0.1", int(server.stdout.readline()))).makefile("rw")
    train(50)
    store.write("epoch\n")
    store.flush()
    mark("fault")
    print(store.readline())  # HANG


@hang(
    "accept|listen|connect|rendezvous", r"127\.0\.0\.1|port|peer|nobody|no (one|client|peer|connection)", states=EITHER
)
def accept_missing():
    """Before the first step; nobody connects."""
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"rendezvous on {listening.getsockname()}", flush=True)
    time.sleep(1.5)
    mark("fault")
    listening.accept()  # HANG
    train()


@hang(r"\bsleep(s|ing)?\b|retr(y|ies)|back-?off|timer|refused", states=ASLEEP)
def backoff_http():
    """The server refuses; each try waits twice as long as the one before, with a line for each."""
    refusing = socket.socket()
    refusing.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{refusing.getsockname()[1]}/shard-7"
    train(50)
    mark("fault")
    delay = 0.5
    while True:
        try:
            urllib.request.urlopen(url).read()
        except urllib.error.URLError as error:
            print("retry:", error, flush=True)
            time.sleep(delay)  # HANG
            delay = min(delay * 2, 600)


# ---------------------------------------------------------------- healthy


@healthy()
def backoff_that_succeeds(wait):
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    opens, delay = time.monotonic() + 1.6 * wait, 1.0
    train()
    while True:
        if time.monotonic() > opens:
            listening.listen()
        try:
            socket.create_connection(listening.getsockname()).close()
            break
        except ConnectionRefusedError:
            time.sleep(delay)
            delay = min(delay * 2, 30)
    train()


@healthy()
def peer_with_a_timeout(wait):
    """Both ends wait for the other; one gives up after a while and speaks."""
    here, there = socket.socketpair()
    train()
    child = os.fork()
    if child == 0:
        here.close()
        there.settimeout(wait)
        for _ in range(2):
            try:
                there.recv(10)
            except TimeoutError:
                there.sendall(b"tick")
        os._exit(0)
    there.close()
    for _ in range(2):
        print(here.recv(10), flush=True)
        train()
    os.waitpid(child, 0)


@healthy()
def client_that_comes_late(wait):
    listening = socket.create_server(("127.0.0.1", 0))
    code = """
        import socket, sys, time
        time.sleep(float(sys.argv[2]))
        socket.create_connection(("127.0.0.1", int(sys.argv[1]))).sendall(b"hi")
    """
    for _ in range(2):
        child = python(code, listening.getsockname()[1], wait + 2)
        train_arrays()
        connection, _ = listening.accept()
        print(connection.recv(2), flush=True)
        child.wait()


if __name__ == "__main__":
    main(globals())
