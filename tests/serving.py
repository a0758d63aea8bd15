"""A real lamp serve for tests, and a small client for it.

In:  a folder with runs, the words of the command.
Out: serving (a server that is ready), ask (one request).
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from running import start_lamp, wait_for


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def ask(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, data, headers)
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    try:
        return reply.status, json.loads(text)
    except ValueError:
        return reply.status, text.decode()


@contextmanager
def serving(cwd: Path, *words: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    port = free_port()
    process = start_lamp("serve", *words, "--port", str(port), "--threads", "1", cwd=cwd)

    def ready() -> bool:
        try:
            return ask(port, "/health")[0] == 200
        except OSError:
            return False

    wait_for(ready, 60, process)
    try:
        yield port, process
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0, (cwd / "out.txt").read_text()
