"""A trial: one function in a process of its own that may hang or die, with a deadline; what it said is kept.

In:  "module:function" of ours, a request (JSON), seconds.
Out: an Outcome: the records it wrote, how it ended, and where it stood if it did not end. Only what was started here is killed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lamplighter.doctor.code_owner import Place, threads_of
from lamplighter.rundir import read_lines

POLL_S = 0.1
Stacks = list[tuple[str, list[Place]]]


@dataclass(frozen=True)
class Outcome:
    """How a trial went."""

    records: list[dict[str, Any]]
    code: int | None  # None: it had to be ended at its deadline
    seconds: float
    last_words: str = ""  # of its stderr
    stacks: dict[int, Stacks] = field(default_factory=dict)  # of it and its children, where it had to be ended
    pid: int = 0

    @property
    def last(self) -> dict[str, Any]:
        return self.records[-1] if self.records else {}

    def ended(self) -> str:
        """In words."""
        if self.code is None:
            return f"had not ended after {self.seconds:.0f} s"
        return f"was killed by signal {-self.code}" if self.code < 0 else f"ended with code {self.code}"


def attempt(
    function: str,
    request: dict[str, Any],
    scratch: Path,
    deadline_s: float,
    now: Callable[[str], None],
    is_stuck: Callable[[list[dict[str, Any]]], bool] = lambda _: False,
) -> Outcome:
    """Run it to its end, to its deadline, or until what it says shows that it is stuck."""
    scratch.mkdir(parents=True, exist_ok=True)
    name = f"trial-{time.monotonic_ns()}"
    said, words = scratch / f"{name}.jsonl", scratch / f"{name}.stderr"
    command = [sys.executable, "-m", "lamplighter.doctor.trials", function, json.dumps(request), str(said)]
    began = time.monotonic()
    with open(words, "wb") as errors:
        child = subprocess.Popen(command, stdout=errors, stderr=errors, stdin=subprocess.DEVNULL)
    stacks: dict[int, Stacks] = {}
    while child.poll() is None:
        records = list(read_lines(said))
        now(str(records[-1].get("now", "")) if records else "starting a process")
        if time.monotonic() - began > deadline_s or is_stuck(records):
            family = [child.pid, *(one.pid for one in _children(child.pid))]
            stacks = {pid: threads_of(pid) for pid in family}
            _end(child)
            break
        time.sleep(POLL_S)
    ended = None if stacks else child.wait()
    text = words.read_text(errors="replace")
    return Outcome(list(read_lines(said)), ended, time.monotonic() - began, text[-4000:], stacks, child.pid)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end(child: subprocess.Popen[bytes]) -> None:
    """The trial and what it started."""
    family = _children(child.pid)
    child.kill()
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    child.wait()
    psutil.wait_procs(family, timeout=3)


class Said:
    """The trial's own pen: one JSON line for each thing it has to say."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, **record: Any) -> None:
        os.write(self._fd, json.dumps(record, default=str).encode() + b"\n")


def main() -> None:
    function, request, path = sys.argv[1:]
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(json.loads(request), Said(path))


if __name__ == "__main__":
    main()
