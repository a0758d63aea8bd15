"""The trial of a user's Dataset with loader workers: runs in a process of its own, which may hang or die.

In:  a request: module:name, start method, workers, batch size.
Out: records: batches as they come; each worker's item and, again and again, where it stands; how a worker ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lamplighter.doctor.loading import find, make
from lamplighter.procs import stacks
from lamplighter.procs.child import Say

_BATCHES = 12
_LOOK_S = 0.25
_MOST_S = 6.0  # of reading batches
_LOCKS = ("lock", "RLock", "Lock", "Condition")


# ---------------------------------------------------------------- inside a worker

_items: dict[str, int] = {}  # of this worker: what it is at


class Watched(Dataset[Any]):
    """The user's dataset; the item that a worker is at is written down before it is asked for."""

    def __init__(self, inner: Any, path: str) -> None:
        self.inner, self.path = inner, path

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, number: int) -> Any:
        _at(self.path, number)
        return self.inner[number]


class WatchedStream(IterableDataset[Any]):
    """The same for a dataset without numbers."""

    def __init__(self, inner: Any, path: str) -> None:
        self.inner, self.path = inner, path

    def __iter__(self) -> Iterator[Any]:
        _at(self.path, 0)
        for number, item in enumerate(self.inner, 1):
            yield item
            _at(self.path, number)


def _at(path: str, item: int) -> None:
    is_first = "item" not in _items
    _items["item"] = item
    if is_first:
        _look(path)  # before anything can go wrong


def _start_watching(path: str, _: int) -> None:
    """In each worker as it starts: a thread says again and again where the worker stands."""
    threading.Thread(target=_look_on, args=(path,), daemon=True).start()


def _look_on(path: str) -> None:
    while True:
        time.sleep(_LOOK_S)
        _look(path)


def _look(path: str) -> None:
    """One line: worker, item, place, locks named in that line which are held."""
    info = get_worker_info()
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    place = stacks.line_to_name(stacks.frames_of(frame))
    while frame is not None and not stacks.is_users(frame.f_code.co_filename):
        frame = frame.f_back
    record = {
        "worker": info.id if info else 0,
        "pid": os.getpid(),
        "item": _items.get("item"),
        "place": place.fields() if place else None,
        "text": place.text if place else "",
        "locks": _held_locks(frame.f_locals, frame.f_globals, place.text) if frame and place else [],
        "in_users_code": frame is not None,
        "t": time.monotonic(),
    }
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, json.dumps(record, default=str).encode() + b"\n")  # at once: each worker appends whole lines
    finally:
        os.close(fd)


def _held_locks(local: dict[str, Any], around: dict[str, Any], line: str) -> list[str]:
    """Names of held locks that the line speaks of: variables, and attributes of self."""
    attributes = getattr(local.get("self"), "__dict__", {})
    named = {**around, **local, **{f"self.{name}": value for name, value in attributes.items()}}
    locks = {name: getattr(value, "_lock", value) for name, value in named.items() if type(value).__name__ in _LOCKS}
    return [name for name, lock in locks.items() if name.split(".")[-1] in line and "unlocked" not in repr(lock)]


# ---------------------------------------------------------------- the trial


def load(request: dict[str, Any], say: Say) -> None:
    """Batches with workers, for a few seconds."""
    torch.set_num_threads(1)
    name, method, watch = request["name"], request["method"], request["watch"]
    say(now=f"importing {name}")
    own = make(find(name), request["batch_size"], request["workers"])
    loader: DataLoader[Any] = DataLoader(
        (Watched if own.is_map else WatchedStream)(own.dataset, watch),
        num_workers=own.workers,
        multiprocessing_context=method,
        worker_init_fn=partial(_start_watching, watch),
        prefetch_factor=own.prefetch,
        batch_size=own.batch_size,
        collate_fn=own.collate,
    )
    say(now=f"starting {own.workers} workers by {method}", workers=own.workers, threads=_threads())
    began, first, batches = time.monotonic(), 0.0, None
    try:
        batches = iter(loader)
        for number, _ in enumerate(batches, 1):
            first = first or time.monotonic()
            spent = time.monotonic() - first
            say(now=f"batch {number} by {method}", batch=number, seconds=spent, start_s=first - began)
            if number >= _BATCHES or spent > _MOST_S:
                break
    except Exception as error:  # noqa: BLE001 (it is what this trial is about)
        time.sleep(0.1)  # a dead worker's code is known a moment later
        say(error=type(error).__name__, message=str(error)[-2000:], ended=_ended(batches))
    else:
        say(done=True)
    os._exit(0)  # the workers are daemons of this process; nobody waits for those that hang


def _threads() -> list[dict[str, Any]]:
    """The user's other threads in this process: one of them may hold a lock while it forks."""
    found = []
    for thread in threading.enumerate():
        place = stacks.line_to_name(stacks.frames_of(sys._current_frames().get(thread.ident or 0)))
        if thread is not threading.main_thread() and place is not None and stacks.is_users(place.file):
            found.append({"name": thread.name, **place.fields()})
    return found


def _ended(batches: Any) -> list[dict[str, int]]:
    workers = enumerate(getattr(batches, "_workers", []))
    return [{"worker": n, "pid": one.pid, "code": one.exitcode} for n, one in workers if one.exitcode not in (None, 0)]
