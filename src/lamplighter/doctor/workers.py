"""The trial of a user's Dataset with loader workers: runs in a process of its own, which may hang or die.

In:  a request: module:name, start method, workers, batch size.
Out: records: batches as they come; each worker's item and, again and again, where it stands; how a worker ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lamplighter.doctor.loading import find, make
from lamplighter.procs import stacks
from lamplighter.procs.child import Say

_BATCHES = 12
_LOOK_S = 0.25
_MOST_S = 6.0  # of reading batches


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
        number = 0
        _at(self.path, number)
        for item in self.inner:
            yield item
            number += 1
            _at(self.path, number)


_items: dict[str, int] = {}  # of this worker: what it is at


def _at(path: str, item: int) -> None:
    if "item" not in _items:
        _items["item"] = item
        _look(path)  # the first word, before anything can go wrong
    _items["item"] = item


class WorkerWatch:
    """Called in each worker as it starts: a thread says again and again where the worker stands."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, worker: int) -> None:
        threading.Thread(target=_look_on, args=(self.path,), daemon=True).start()


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
    locks = [] if frame is None or place is None else _locks(frame.f_locals, frame.f_globals, place.text)
    _write(
        path,
        worker=info.id if info else 0,
        pid=os.getpid(),
        item=_items.get("item"),
        place=place.fields() if place else None,
        text=place.text if place else "",
        locks=locks,
        in_users_code=frame is not None,
        t=time.monotonic(),
    )


def _write(path: str, **record: Any) -> None:
    """One line of JSON; each worker appends whole lines."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, json.dumps(record, default=str).encode() + b"\n")
    finally:
        os.close(fd)


def _locks(local: dict[str, Any], around: dict[str, Any], line: str) -> list[str]:
    """Names of held locks that the line speaks of: variables, and attributes of self."""
    named = {**around, **local}
    owner = local.get("self")
    named |= {f"self.{name}": value for name, value in getattr(owner, "__dict__", {}).items()}
    found = []
    for name, value in named.items():
        if name.split(".")[-1] in line and type(value).__name__ in ("lock", "RLock", "Lock", "Condition"):
            inner = getattr(value, "_lock", value)
            held = "unlocked" not in repr(inner)
            found += [name] * held
    return found


def load(request: dict[str, Any], say: Say) -> None:
    """Batches with workers, for a few seconds."""
    torch.set_num_threads(1)
    say(now=f"importing {request['name']}")
    own = make(find(request["name"]), request["batch_size"], request["workers"])
    kind = Watched if own.is_map else WatchedStream
    dataset = kind(own.dataset, request["watch"])
    options = own.options()
    loader: DataLoader[Any] = DataLoader(
        dataset,
        num_workers=own.workers,
        multiprocessing_context=request["method"],
        worker_init_fn=WorkerWatch(request["watch"]),
        prefetch_factor=own.prefetch,
        **options,
    )
    say(now=f"starting {own.workers} workers by {request['method']}", workers=own.workers, threads=_threads())
    began = time.monotonic()
    batches: Any = None
    try:
        batches = iter(loader)
        first = None
        for number, _ in enumerate(batches, 1):
            first = first or time.monotonic()
            spent = time.monotonic() - first
            say(now=f"batch {number} by {request['method']}", batch=number, seconds=spent, start_s=first - began)
            if number >= _BATCHES or spent > _MOST_S:
                break
    except Exception as error:  # noqa: BLE001 (it is what this trial is about)
        time.sleep(0.1)  # a dead worker's code is known a moment later
        say(error=type(error).__name__, message=str(error)[-2000:], ended=_ended(batches))
    else:
        say(done=True)
    with contextlib.suppress(ValueError):  # a thread that ends while it is listed
        say(threads=_threads())
    os._exit(0)  # the workers are daemons of this process; nobody waits for those that hang


def _threads() -> list[dict[str, Any]]:
    """The user's other threads in this process: one of them may hold a lock while it forks."""
    main = threading.main_thread().ident
    found = []
    for thread in threading.enumerate():
        place = stacks.line_to_name(stacks.frames_of(sys._current_frames().get(thread.ident or 0)))
        if thread.ident != main and place is not None and stacks.is_users(place.file):
            found.append({"name": thread.name, **place.fields(), "text": place.text})
    return found


def _ended(batches: Any) -> list[dict[str, int]]:
    workers = getattr(batches, "_workers", [])
    return [
        {"worker": number, "pid": one.pid, "code": one.exitcode}
        for number, one in enumerate(workers)
        if one.exitcode not in (None, 0)
    ]
