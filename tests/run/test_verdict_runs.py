"""In processes of their own: verdicts are pure: recorded moments in, a cause out; and the rules of acting on them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

from lamplighter.procs.procfs import look_closely


def test_a_socket_that_is_waited_on_is_named_by_its_other_end() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    code = f"import socket; s = socket.create_connection(('127.0.0.1', {server.getsockname()[1]})); s.recv(1)"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        connection, _ = server.accept()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and "socket" not in look_closely(child.pid).waits_on:
            time.sleep(0.02)
        waits_on = look_closely(child.pid).waits_on
        child.kill()
        connection.close()
    assert f"connected to 127.0.0.1:{server.getsockname()[1]}" in waits_on
