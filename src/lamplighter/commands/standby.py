"""A process that has done everything that a start takes, and waits to take the place of one that died.

In:  a socket from the parent; over it the rank, the attempt and the run's lock, when its turn has come.
Out: the same process as that rank. Without a parent it ends.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from lamplighter import report
from lamplighter.procs.lock import keep_to_ourselves
from lamplighter.read_back import parse_object
from lamplighter.rundir import RunDir


def wait_for_turn(folder: RunDir, request: dict[str, Any]) -> None:
    """Returns as the rank that the parent names; `request` and the environment are then those of a process started anew."""
    with socket.socket(fileno=request.pop("standby_fd")) as parent, report.phase(report.STANDBY):
        message, received, _, _ = socket.recv_fds(parent, 1 << 16, 1)
    order = parse_object(message)
    if order is None:  # the parent is gone, and nobody needs this process
        os._exit(0)
    os.environ.update(order["environment"])
    request.update(order["request"])
    keep_to_ourselves(received)
    report.start(folder, order["rank"], order["attempt"], request["result_fd"])
