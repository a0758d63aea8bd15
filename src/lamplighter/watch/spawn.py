"""The environment that a child of ours is started in.

In:  the parent's environment; which attempt it is, and what was spent before.
Out: the variables of the child; how its threads wait is said once here, for the benchmarks too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

SPIN = "3000"  # turns of waiting before a thread sleeps: chosen by measurement, decision 005


def threads_wait(environ: Mapping[str, str]) -> dict[str, str]:
    """Threads that wait for each other spin a little and then sleep; who has said otherwise is heard."""
    said = "OMP_WAIT_POLICY" in environ or "GOMP_SPINCOUNT" in environ
    return {} if said else {"GOMP_SPINCOUNT": SPIN}


def environment(attempt: int, spent_s: float, began: float) -> dict[str, str]:
    """What the child is told at its start."""
    return {
        **os.environ,
        **threads_wait(os.environ),
        "PYTHONUNBUFFERED": "1",
        "LAMP_ATTEMPT": str(attempt),
        "LAMP_PARENT_PID": str(os.getpid()),
        "LAMP_SPENT_S": str(spent_s),
        "LAMP_STARTED_MONOTONIC": str(began),
    }
