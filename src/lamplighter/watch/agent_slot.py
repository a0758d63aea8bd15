"""What the watcher reads of a watched process: its slot, and its stacks on request.

In:  the folder of the slots, as the shim in each process writes it.
Out: ProcSlot, one look at one process; Stacks, as the process's own thread gives them.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lamplighter.procs.stacks import Frame, Stacks, ThreadStack, is_library
from lamplighter.rundir import read_json
from lamplighter.watch.agent.bootstrap import MAGIC, NUMBERS, SLOT_BYTES, TEXTS

NUMBERS_AT_ONCE = struct.Struct("=" + "".join(code for _, code in NUMBERS.values()))  # they lie side by side


@dataclass(frozen=True)
class ProcSlot:
    """What one look at a slot shows. Times are of the monotonic clock; -1 is unknown; `in_...` are 0 or 1."""

    pid: int = 0
    pid_start: int = 0
    ppid: int = 0
    forked: int = 0
    hello_ns: int = 0
    rank: int = -1
    world: int = 0
    answers: int = 0
    answered_bytes: int = 0  # written by the answering thread itself: no sign of work
    steps: int = 0
    step_ns: int = 0
    step_first_ns: int = 0
    optimizers: int = 0
    fetches: int = 0
    in_fetch: int = 0
    fetch_since_ns: int = 0
    fetch_wait_ns: int = 0
    loader_workers: int = 0
    wait_worker: int = -1
    loader_len: int = -1
    items: int = 0
    in_item: int = 0
    item_since_ns: int = 0
    worker: int = -1
    coll_seq: int = 0
    in_coll: int = 0
    coll_since_ns: int = 0
    compiles: int = 0
    compiling: int = 0
    compile_since_ns: int = 0
    recompiles: int = 0
    bar_n: int = 0
    bar_total: int = -1
    bar_ns: int = 0
    collecting: int = 0
    gc_since_ns: int = 0
    phase_since_ns: int = 0
    failed: int = 0
    done: float = 0.0
    total: float = -1.0
    phase: str = ""
    unit: str = ""
    phase_item: str = ""
    item: str = ""
    coll: str = ""
    coll_at: str = ""
    compile_id: str = ""
    bar: str = ""
    error: str = ""
    forked_beside: str = ""
    python: str = ""
    argv: str = ""


def read_procslot(path: Path) -> ProcSlot | None:
    """One look; None where there is no slot."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        page = os.read(fd, SLOT_BYTES + 1)
    finally:
        os.close(fd)
    if len(page) != SLOT_BYTES or page[:8] != MAGIC:
        return None
    values: dict[str, Any] = dict(zip(NUMBERS, NUMBERS_AT_ONCE.unpack_from(page, 16), strict=True))
    for name, (at, size) in TEXTS.items():
        values[name] = page[at : at + size].split(b"\0", 1)[0].decode("utf-8", "replace")
    return ProcSlot(**values)


def read_all(slots: Path) -> dict[int, ProcSlot]:
    """Every process that ever said hello, by pid. `pid` and `pid_start` tell whether it is still the same one."""
    found = (read_procslot(path) for path in slots.glob("p*.slot"))
    return {slot.pid: slot for slot in found if slot is not None}


def ask_stacks(slots: Path, pid: int, deadline_s: float) -> Stacks | None:
    """The process's own word on its threads. None: no shim there, or nobody answers (GIL held in C, state T or D)."""
    number = time.monotonic_ns()
    if not _send(slots / f"p{pid}.ask", f"stacks {number}\n"):
        return None
    deadline = time.monotonic() + deadline_s
    while True:
        late = time.monotonic() >= deadline  # one look more after the last sleep
        answer = read_json(slots / f"p{pid}.stacks.json")
        if answer is not None and answer["id"] == number:
            return Stacks(tuple(_thread_of(item) for item in answer["threads"]), "shim", at=time.monotonic())
        if late:
            return None
        time.sleep(0.002)


def _thread_of(item: dict[str, Any]) -> ThreadStack:
    """The counters belong to the innermost frame of the user's code."""
    frames = [Frame(*frame) for frame in item["frames"]]
    mine = next((n for n, frame in enumerate(frames) if not is_library(frame) or frame.file == "<string>"), None)
    if mine is not None:
        frames[mine] = replace(frames[mine], numbers=item["locals"])
    return ThreadStack(item["name"], tuple(frames), tid=item["tid"])


def _send(fifo: Path, line: str) -> bool:
    """Put a line into the FIFO; False if nobody has it open, or it is full because nobody reads."""
    with contextlib.suppress(OSError):
        fd = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        try:
            return os.write(fd, line.encode()) > 0
        finally:
            os.close(fd)
    return False
