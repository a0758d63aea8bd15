"""Loading probes: a user's own Dataset in this process, then with workers by fork, spawn and forkserver, each with a deadline.

In:  a ProbeContext whose data.source is "module:name".
Out: Findings: items per second, or what hangs, dies or cannot be pickled, with file:line, worker and item.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import psutil

from lamplighter import own_code
from lamplighter.doctor.probe import CannotExamine, Finding, Level, ProbeContext, failed, fault, finding, ok, skip, warn
from lamplighter.errors import BadConfig, LampError
from lamplighter.procs import child, stacks
from lamplighter.procs.child import Outcome
from lamplighter.procs.stacks import Frame
from lamplighter.rundir import human_bytes, read_lines, read_record, write_json

_SHM = Path("/dev/shm")
START_S = 60.0  # until the first batch: workers import torch
QUIET_S = 6.0  # a worker that stands at one item for so long
SILENT_S = 3.0  # a worker whose watching thread says nothing: the GIL is held, or it is stopped
_ASLEEP_TIMES = 4  # a crowded machine lets a sleeping worker's thread wait that much longer
_ITEMS_S = 5.0
_SLOW_TIMES = 4  # as long as an item takes in this process
_SHM_SHARE = 0.8
_DEEP = 4  # levels of an object that are searched for what cannot be pickled


# ---------------------------------------------------------------- whose dataset


def find(name: str) -> Any:
    """Import it (own_code.py); a function that is no generator is called, to see what it makes."""
    module_name, _, attribute = name.partition(":")
    module = own_code.load(module_name)
    if not hasattr(module, attribute):
        raise BadConfig(f"no {attribute} in module {module_name}", f"looked in {module.__file__}", "check data.source")
    target = getattr(module, attribute)
    if inspect.isfunction(target) and not inspect.isgeneratorfunction(target) and is_torch(made := target()):
        return made
    return target


def is_torch(target: Any) -> bool:
    """A torch Dataset or DataLoader, or a class of one, rather than texts for lamp train. Only a module that has loaded
    torch can hold one; a map-style class without torch counts too.
    """
    torch = sys.modules.get("torch.utils.data")
    kinds = (torch.Dataset, torch.DataLoader) if torch is not None else ()
    if isinstance(target, type):
        return issubclass(target, kinds) or (not hasattr(target, "documents") and _is_map(target))
    return isinstance(target, kinds) or (not isinstance(target, (list, tuple, str)) and _is_map(target))


def _is_map(target: Any) -> bool:
    return hasattr(target, "__getitem__") and hasattr(target, "__len__") and not hasattr(target, "__class_getitem__")


@dataclass(frozen=True)
class Loading:
    """A dataset and how its user loads it."""

    dataset: Any
    batch_size: int
    collate: Callable[[list[Any]], Any] | None
    workers: int
    prefetch: int
    is_map: bool


def make(target: Any, batch_size: int, workers: int | None) -> Loading:
    """The instance: a class is called without arguments; a DataLoader brings its own settings."""
    from torch.utils.data import DataLoader, IterableDataset

    found, collate, prefetch = target() if isinstance(target, type) else target, None, 2
    if isinstance(found, DataLoader):
        batch_size, workers = found.batch_size or batch_size, workers or found.num_workers
        collate, prefetch, found = found.collate_fn, found.prefetch_factor or prefetch, found.dataset
    is_map = not isinstance(found, IterableDataset) and hasattr(found, "__getitem__")
    return Loading(found, batch_size, collate, workers or 2, prefetch=prefetch, is_map=is_map)


# ---------------------------------------------------------------- in this process


def here(context: ProbeContext) -> Iterator[Finding]:
    """One item, one batch; then whether it could be sent to a worker, and what the workers would need."""
    name = context.run.data.source
    if name is None:
        yield skip("no Dataset of your own: batches are mapped memory and one thread, nothing is forked")
        return
    try:
        target = find(name)
    except LampError:
        raise
    except Exception as error:  # noqa: BLE001 (the user's module may raise anything)
        yield failed(error, f"cannot import {name}")
        return
    if not is_torch(target):
        yield skip(f"{name} gives texts: lamp train reads it in one process and forks nothing", "see data / files")
        return
    try:
        loading = make(target, _batch_size(context), context.run.data.workers)
    except Exception as error:  # noqa: BLE001 (the user's own code)
        yield failed(error, f"{name} cannot be made")
        return
    yield from _try_items(loading, name, context)


def _batch_size(context: ProbeContext) -> int:
    train = context.run.train
    return train.micro_batch or train.batch_size


def _try_items(loading: Loading, name: str, context: ProbeContext) -> Iterator[Finding]:
    from torch.utils.data import default_collate

    began = time.monotonic()
    items = _first_items(loading, name, context)
    seconds = time.monotonic() - began
    if not items:
        yield fault(f"{name} has no items", "", "check what it reads")
        return
    rate = len(items) / max(1e-6, seconds)
    write_json(context.scratch / "items.json", {"item_s": seconds / len(items)}, durable=False)
    try:
        batch = (loading.collate or default_collate)(items)
    except Exception as error:  # noqa: BLE001 (items of different sizes, or of kinds that do not stack)
        what = f"{len(items)} items of {name} cannot be put into one batch"
        yield failed(error, what, "pad them, or give a collate_fn")
        return
    size = _bytes_of(batch) * loading.batch_size // len(items)
    what = f"{len(items)} items of {name} in this process, without workers: {rate:,.1f} items/s"
    figures = {"items_per_s": rate, "batch_bytes": float(size)}
    yield ok(what, f"a batch of {loading.batch_size} has {human_bytes(size)}", figures=figures)
    yield shared_memory(loading.workers, loading.prefetch, size, _SHM)
    yield _picklable(loading, name)


def _first_items(loading: Loading, name: str, context: ProbeContext) -> list[Any]:
    """Of one batch, or as many as come in a few seconds."""
    until, items = time.monotonic() + _ITEMS_S, list[Any]()
    try:
        total = len(loading.dataset) if loading.is_map else sys.maxsize
        stream = iter(loading.dataset) if not loading.is_map else None
        while len(items) < min(loading.batch_size, total) and time.monotonic() < until:
            context.now(f"item {len(items)} of {name}")
            items.append(next(stream) if stream is not None else loading.dataset[len(items)])
    except StopIteration:  # a short stream: what has come is looked at
        pass
    except Exception as error:  # the user's own code
        what = f"item {len(items)} of {name} cannot be had, in this process and without workers"
        raise CannotExamine(failed(error, what)) from error
    return items


def _bytes_of(batch: Any) -> int:
    """Of the tensors and arrays in it, which travel by shared memory."""
    if hasattr(batch, "nbytes"):
        return int(batch.nbytes)
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return sum(_bytes_of(part) for part in parts)


def shared_memory(workers: int, prefetch: int, batch_bytes: int, folder: Path) -> Finding:
    """workers x batches ahead x bytes, against what is free."""
    need = workers * prefetch * batch_bytes
    have = shutil.disk_usage(folder).free if folder.is_dir() else 0
    sums = f"{workers} workers x {prefetch} batches ahead x {human_bytes(batch_bytes)} = {human_bytes(need)}"
    figures = {"need_bytes": float(need), "free_bytes": float(have)}
    if need <= _SHM_SHARE * have:
        return ok(f"shared memory will do: {sums}, {human_bytes(have)} are free in {folder}", figures=figures)
    fit = max(1, int(_SHM_SHARE * have // max(1, prefetch * batch_bytes)))
    return fault(
        f"shared memory is too small: {human_bytes(need)} are needed, {human_bytes(have)} are free in {folder}",
        f"{sums}; a worker that cannot write there dies of a bus error",
        f"a larger one (docker run --shm-size {max(1, round(2 * need / 1e9))}g), or --data.workers {fit}",
        "shm_small",
        culprit={"path": str(folder)},
        settings={"data.workers": fit},
        figures=figures,
    )


# ---------------------------------------------------------------- what cannot be sent to a worker


@dataclass(frozen=True)
class Unpicklable:
    """The innermost part that fails."""

    path: str
    kind: str
    error: str
    place: Frame | None


def _picklable(loading: Loading, name: str) -> Finding:
    """What spawn and forkserver have to send to a worker."""
    found = unpicklable(loading.dataset) or unpicklable(loading.collate, "collate_fn")
    if found is None:
        return ok(f"{name} can be pickled: it can be sent to a worker")
    made_at = f", made at {found.place.place}" if found.place else ""
    return warn(
        f"{found.path} cannot be pickled: it is {found.kind}{made_at}",
        f"{found.error}; workers by spawn or forkserver cannot start (fork can)",
        "a function of a module instead of a lambda; open files and locks in the worker, not in __init__",
        "spawn_pickle",
        at=found.place,
        culprit={"attribute": found.path},
    )


def unpicklable(value: Any, path: str = "dataset") -> Unpicklable | None:
    """None where all of it can be sent to another process."""
    error = _pickle_error(value)
    return None if error is None else _innermost(value, path, error, None, _DEEP)


def _pickle_error(value: Any) -> str | None:
    try:
        ForkingPickler.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _innermost(value: Any, path: str, error: str, owner: tuple[Any, str] | None, depth: int) -> Unpicklable:
    is_attribute = not isinstance(value, (dict, list, tuple))
    for name, part in _parts(value) if depth else ():
        if (inner := _pickle_error(part)) is not None:
            step = f".{name}" if is_attribute else f"[{name!r}]"
            return _innermost(part, path + step, inner, (value, name) if is_attribute else owner, depth - 1)
    if getattr(value, "__name__", "") == "<lambda>":
        kind = "a lambda"
    elif inspect.isfunction(value):
        kind = f"the function {value.__qualname__}"
    else:
        kind = f"a {type(value).__module__}.{type(value).__qualname__}"
    return Unpicklable(path, kind, error, _defined(value, owner))


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())[:1000]
    if isinstance(value, (list, tuple)):
        return list(enumerate(value[:1000]))
    return list(vars(value).items()) if hasattr(value, "__dict__") and not inspect.isroutine(value) else []


def _defined(value: Any, owner: tuple[Any, str] | None) -> Frame | None:
    """A function knows its line; of anything else, the line of its owner's class that sets it."""
    code = getattr(value, "__code__", None)
    if code is not None:
        return Frame(code.co_filename, code.co_firstlineno, code.co_name)
    if owner is None:
        return None
    kind, name = type(owner[0]), owner[1]
    try:
        lines, first = inspect.getsourcelines(kind)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = inspect.getsourcefile(kind) or "?"
    except (OSError, TypeError, SyntaxError):  # a class without a source that can be read: no line to name
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
            return Frame(file, first + node.lineno - 1, f"{kind.__name__}.{name}")
    return Frame(file, first, kind.__name__)


# ---------------------------------------------------------------- with workers


def with_workers(context: ProbeContext, method: str) -> Iterator[Finding]:
    """A few batches by workers of one start method: how fast, or what is wrong with them.

    Those by fork are copies of the process, with every held lock copied held; by spawn everything is imported and sent anew;
    by forkserver they are copies of a clean process.
    """
    name = context.run.data.source
    try:
        if name is None or not is_torch(find(name)):
            yield skip("nothing is loaded by workers here")
            return
    except Exception as error:  # noqa: BLE001 (told in full by the probe before)
        yield warn(f"not tried: {name} cannot be imported", str(error))
        return
    watch = context.scratch / f"workers-{method}-{time.monotonic_ns()}.jsonl"
    request = {"name": name, "method": method, "workers": context.run.data.workers, "watch": str(watch)}
    item_s = read_record(context.scratch / "items.json").get("item_s", 0.0)
    watcher = _Watcher(watch, max(QUIET_S, _SLOW_TIMES * item_s))
    done = child.run(
        "lamplighter.doctor.workers:load",
        {**request, "batch_size": _batch_size(context)},
        deadline_s=START_S,
        on_record=lambda record: context.now(str(record.get("now", ""))),
        is_stuck=watcher.is_stuck,
    )
    watcher.look()
    yield _judge(name, method, done, watcher)


by_fork, by_spawn, by_forkserver = (partial(with_workers, method=name) for name in ("fork", "spawn", "forkserver"))


class _Watcher:
    """Reads what the workers say of themselves, and decides when one is stuck."""

    def __init__(self, path: Path, quiet_s: float) -> None:
        self.path, self.quiet_s = path, quiet_s
        self.since: dict[int, tuple[Any, float]] = {}  # worker -> (item, since when it is there)
        self.last: dict[int, dict[str, Any]] = {}
        self.found: dict[str, Any] | None = None  # the one that is stuck

    def look(self) -> None:
        for record in read_lines(self.path):
            worker, key = record["worker"], (record["item"], record["pid"])
            if self.since.get(worker, (None, 0.0))[0] != key:
                self.since[worker] = (key, record["t"])
            self.last[worker] = record

    def is_stuck(self, records: list[dict[str, Any]]) -> bool:
        """A worker at one item for long, while no batch comes."""
        self.look()
        if any("error" in record or "done" in record for record in records):
            return False
        self.found = self._culprit(time.monotonic())
        return self.found is not None

    def _culprit(self, at: float) -> dict[str, Any] | None:
        """The worker that is stuck, and how: at one item in the user's code; or silent, which an idle one never is."""
        silent = []
        for worker, record in sorted(self.last.items()):
            for_s, silent_s = at - self.since[worker][1], at - record["t"]
            state = _state(record["pid"])
            if for_s <= self.quiet_s or state in ("", psutil.STATUS_ZOMBIE):
                continue
            if silent_s <= SILENT_S and record["in_users_code"]:
                return {**record, "for_s": for_s, "silent_s": 0.0}
            if silent_s > SILENT_S * (1 if state == psutil.STATUS_RUNNING else _ASLEEP_TIMES):
                silent.append({**record, "for_s": for_s, "silent_s": silent_s})
        return silent[0] if silent else None


def _state(pid: int) -> str:
    """Of a process as the kernel calls it; '' where it is gone."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:  # it has ended
        return ""


# ---------------------------------------------------------------- one finding for one start method


def _judge(name: str, method: str, done: Outcome, watcher: _Watcher) -> Finding:
    error = next((record for record in done.records if "error" in record), None)
    batches = [record for record in done.records if "batch" in record]
    if error is not None and error["ended"]:
        return _ended_worker(method, error["ended"][0], watcher)
    if error is not None:
        return _raised(method, error, watcher)
    if watcher.found is not None and done.ended_for:
        return _stuck_worker(method, watcher.found, done)
    if done.ended_for:
        place = stacks.line_to_name(done.stacks[done.pid].main) if done.pid in done.stacks else None
        what = f"workers by {method} gave {len(batches)} batches and then nothing: {done.how()}"
        why = f"the loader stands at {place.place}" if place else "its stack could not be read"
        return fault(what, why, "--data.workers 1, or no workers", "worker_hang", at=place, culprit={"method": method})
    if done.code != 0 or done.error or not batches:
        what = f"loading {name} by {method} {done.how()} before the first batch"
        where = {"method": method}
        return fault(what, done.last_line, "mend what its last line names", at=_raised_at(done.output), culprit=where)
    last, count = batches[-1], next(record["workers"] for record in done.records if "workers" in record)
    rate = (last["batch"] - 1) / last["seconds"] if last["seconds"] > 0 else 0.0
    speed = f"{rate:,.1f} batches/s, " if rate else ""
    what = f"{count} workers by {method}: {len(batches)} batches, {speed}the first after {last['start_s']:.1f} s"
    return ok(what, figures={"batches_per_s": rate, "start_s": last["start_s"]})


def _stuck_worker(method: str, stuck: dict[str, Any], done: Outcome) -> Finding:
    """It holds the GIL, waits for a lock that was copied held, or just hangs."""
    place = _place(stuck, done)
    who = f"worker {stuck['worker']} by {method}"
    culprit = {"worker": stuck["worker"], "pid": stuck["pid"], "item": stuck["item"], "method": method}
    stands = f"at {place and place.place}, item {stuck['item']}, for {stuck['for_s']:.0f} s"
    if stuck["silent_s"] > SILENT_S:
        why = f"its own watching thread has not run for {stuck['silent_s']:.0f} s: a long call into C"
        why += f" ({place.text})" if place and place.text else ""
        advice = "look at that line: a regular expression that explodes, or a call without an end"
        return fault(f"{who} holds the GIL {stands}", why, advice, "worker_gil", at=place, culprit=culprit)
    if stuck["locks"] and method == "fork":
        what = f"{who} waits for a lock that was copied held: {', '.join(stuck['locks'])}, {stands}"
        why = "fork copies a held lock, but not the thread that would release it"
        holder = next((one for record in done.records for one in record.get("threads", [])), None)
        if holder:
            why += f"; when the worker was forked, thread {holder['name']} stood at {holder['file']}:{holder['line']}"
            culprit |= {"taken_file": holder["file"], "taken_line": holder["line"]}
        advice = 'DataLoader(multiprocessing_context="spawn"), or start threads only after the workers'
        return fault(what, why, advice, "fork_lock", at=place, culprit=culprit)
    why = f"the line is: {stuck['text']}"
    advice = "look at that line; without workers it would hang in the same place, or not at all: see the probe before"
    return fault(f"{who} hangs {stands}", why, advice, "worker_hang", at=place, culprit=culprit)


def _place(stuck: dict[str, Any], done: Outcome) -> Frame | None:
    """By py-spy where the worker could not speak for itself."""
    taken = done.stacks.get(stuck["pid"])
    if stuck["silent_s"] > SILENT_S and taken is not None and taken.threads[0].name.endswith("MainThread"):
        return stacks.line_to_name(taken.main)
    return Frame(**stuck["place"]) if stuck["place"] else None


def _raised(method: str, error: dict[str, Any], watcher: _Watcher) -> Finding:
    message, kind = error["message"], error["error"]
    last = next((line.strip() for line in reversed(message.splitlines()) if line.strip()), kind)
    if "pickle" in message.lower() or kind == "PicklingError":
        what = f"workers by {method} cannot start: the dataset cannot be pickled"
        advice = "see the probe in this process: it names the attribute"
        level: Level = "fault" if method == "fork" else "warn"  # spawn and forkserver are only tried
        return finding(level, what, last, advice, "spawn_pickle", culprit={"method": method})
    number = re.search(r"worker process (\d+)", message)
    worker, place = int(number[1]) if number else 0, _raised_at(message)
    item = watcher.last.get(worker, {}).get("item")
    out_of_memory = kind == "MemoryError" or "MemoryError" in message
    return fault(
        f"worker {worker} by {method} raised {kind} at item {item}" + (f", {place.file}:{place.line}" if place else ""),
        last,
        "fewer workers, or smaller items" if out_of_memory else "mend that line or that item",
        "worker_oom" if out_of_memory else "worker_error",
        at=place,
        culprit={"worker": worker, "item": item, "method": method},
    )


def _raised_at(message: str) -> Frame | None:
    places = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', message)
    return stacks.line_to_name(Frame(file, int(line), func) for file, line, func in reversed(places))


def _ended_worker(method: str, ended: dict[str, int], watcher: _Watcher) -> Finding:
    worker, code = ended["worker"], ended["code"]
    record = watcher.last.get(worker, {})
    item, place = record.get("item"), record.get("place")
    culprit = {"worker": worker, "pid": ended["pid"], "item": item, "method": method, **(place or {})}
    if code >= 0:
        what = f"worker {worker} by {method} exited with code {code} at item {item}"
        why, advice = "something in the dataset ends the process", "look for sys.exit and os._exit"
        return fault(what, why, advice, "worker_exit", culprit=culprit)
    whys = {-9: "out of memory, or somebody's kill", -7: "no room in /dev/shm", -11: "a crash in native code"}
    why, cause = whys.get(code, "killed from outside"), "shm_small" if code == -7 else "worker_sigkill"
    what = f"worker {worker} by {method} was killed by signal {-code} at item {item}"
    return fault(what, why, "fewer workers, smaller items", cause, culprit=culprit)
