"""What starts processes: Verdicts are pure: recorded moments in, a cause out; and the rules of acting on them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

from lamplighter.procs.procfs import ProcessLook, look_closely
from lamplighter.rundir import RunDir
from lamplighter.slot import Slot
from lamplighter.watch.process_tree import Process, ProcessTree, Snapshot
from lamplighter.watch.stall import StallDetector


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


def test_the_time_before_the_first_step_does_not_stretch_the_patience_of_training(tmp_path: Path) -> None:
    """A script imports for 20 s, makes steps of 0.1 s, and hangs: 3 s later it is looked at."""
    run, nobody = RunDir(tmp_path), 2**22 + 5
    run.create()
    stall, tree = StallDetector(run, ours=False), ProcessTree((), run.slots)
    start = stall.worked_at

    def look(at: float, worked_at: float, step: int) -> None:
        process = Process(ProcessLook(nobody, "S"), Slot(pid=nobody, step=step, answers=1))
        stall.look(tree, Snapshot(start + at, (process,), start + worked_at))

    look(19.9, 0.0, 0)
    for step in range(5):
        look(20.0 + step / 10, 20.0 + step / 10, step + 1)
    stall.capturing = None
    look(21.6, 20.4, 5)
    assert stall.capturing is None, "too early"
    look(23.4, 20.4, 5)
    assert stall.capturing is not None
    stall.capturing.join()
