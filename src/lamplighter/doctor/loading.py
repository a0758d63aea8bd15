"""Loading probes: a user's own Dataset in this process, then with workers by fork, spawn and forkserver, each with a deadline.

In:  a ProbeContext whose data.source is "module:name".
Out: Findings: items per second, or what hangs, dies or cannot be pickled, with file:line, worker and item.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import psutil

from lamplighter.doctor.probe import Finding, Level, ProbeContext, as_finding, failed, fault, ok, warn
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


@dataclass(frozen=True)
class Own:
    """What the name stands for."""

    name: str
    target: Any
    is_dataset: bool
    """A torch Dataset or DataLoader, rather than texts for lamp train."""


def find(name: str) -> Own:
    """Import it, with the current folder on the path; a function that is no generator is called, to see what it makes."""
    module_name, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise BadConfig(f"no {attribute} in module {module_name}", f"looked in {module.__file__}", "check data.source")
    target = getattr(module, attribute)
    if inspect.isfunction(target) and not inspect.isgeneratorfunction(target) and _is_torch(made := target()):
        target = made
    return Own(name, target, _is_torch(target))


def _is_torch(target: Any) -> bool:
    """Only a module that has loaded torch can hold a Dataset of it; a map-style class without torch counts too."""
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

    def options(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "collate_fn": self.collate}


def make(own: Own, batch_size: int, workers: int | None) -> Loading:
    """The instance: a class is called without arguments; a DataLoader brings its own settings."""
    from torch.utils.data import DataLoader, IterableDataset

    target = own.target
    found = target() if isinstance(target, type) else target
    if isinstance(found, DataLoader):
        dataset, is_map = found.dataset, not isinstance(found.dataset, IterableDataset)
        count = workers or found.num_workers or 2
        size = found.batch_size or batch_size
        return Loading(dataset, size, found.collate_fn, count, prefetch=found.prefetch_factor or 2, is_map=is_map)
    is_map = not isinstance(found, IterableDataset) and hasattr(found, "__getitem__")
    return Loading(found, batch_size, None, workers or 2, prefetch=2, is_map=is_map)


# ---------------------------------------------------------------- in this process


def here(context: ProbeContext) -> Iterator[Finding]:
    """One item, one batch; then whether it could be sent to a worker, and what the workers would need."""
    name = context.run.data.source
    if name is None:
        yield ok("no Dataset of your own: batches are mapped memory and one thread, nothing is forked")
        return
    try:
        own = find(name)
    except LampError as error:
        yield as_finding(error)
        return
    except Exception as error:  # noqa: BLE001 (the user's module may raise anything)
        yield failed(error, f"cannot import {name}")
        return
    if not own.is_dataset:
        yield ok(f"{name} gives texts: lamp train reads it in one process and forks nothing", "see data / files")
        return
    try:
        loading = make(own, _batch_size(context), context.run.data.workers)
    except Exception as error:  # noqa: BLE001 (the user's own code)
        yield failed(error, f"{name} cannot be made")
        return
    yield from _items(loading, name, context)


def _batch_size(context: ProbeContext) -> int:
    train = context.run.train
    return train.micro_batch or train.batch_size


def _items(loading: Loading, name: str, context: ProbeContext) -> Iterator[Finding]:
    from torch.utils.data import default_collate

    began, number = time.monotonic(), 0
    items: list[Any] = []
    context.now(f"item 0 of {name}")
    stream = iter(loading.dataset) if not loading.is_map else None
    total = len(loading.dataset) if loading.is_map else None
    try:
        while len(items) < loading.batch_size and (total is None or number < total):
            context.now(f"item {number} of {name}")
            items.append(next(stream) if stream is not None else loading.dataset[number])
            number += 1
            if time.monotonic() - began > _ITEMS_S:
                break
    except StopIteration:  # a short stream: what has come is looked at
        pass
    except Exception as error:  # noqa: BLE001 (the user's own code)
        yield failed(error, f"item {number} of {name} cannot be had, in this process and without workers")
        return
    seconds = time.monotonic() - began
    if not items:
        yield fault(f"{name} has no items", f"its length is {total}", "check what it reads")
        return
    rate = len(items) / max(1e-6, seconds)
    write_json(context.scratch / "items.json", {"item_s": seconds / len(items)}, durable=False)
    try:
        batch = (loading.collate or default_collate)(items)
    except Exception as error:  # noqa: BLE001 (items of different sizes, or of kinds that do not stack)
        yield failed(
            error, f"{len(items)} items of {name} cannot be put into one batch", "pad them, or give a collate_fn"
        )
        return
    size = _bytes_of(batch) * loading.batch_size // len(items)
    yield ok(
        f"{len(items)} items of {name} in this process, without workers: {rate:,.1f} items/s",
        f"a batch of {loading.batch_size} has {human_bytes(size)}",
        figures={"items_per_s": rate, "batch_bytes": float(size)},
    )
    yield shared_memory(loading.workers, loading.prefetch, size, _SHM)
    yield _picklable(loading, name)


def _bytes_of(batch: Any) -> int:
    """Of the tensors and arrays in it, which travel by shared memory."""
    if hasattr(batch, "nbytes"):
        return int(batch.nbytes)
    if isinstance(batch, dict):
        return sum(_bytes_of(part) for part in batch.values())
    return sum(_bytes_of(part) for part in batch) if isinstance(batch, (list, tuple)) else 0


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


def _picklable(loading: Loading, name: str) -> Finding:
    """What spawn and forkserver have to send to a worker."""
    parts = [(loading.dataset, "dataset"), (loading.collate, "collate_fn")]
    for value, path in parts:
        found = unpicklable(value, path)
        if found is not None:
            where = f", made at {found.place.place}" if found.place else ""
            return warn(
                f"{found.path} cannot be pickled: it is {found.kind}{where}",
                f"{found.error}; workers by spawn or forkserver cannot start (fork can)",
                "a function of a module instead of a lambda; open files and locks in the worker, not in __init__",
                "spawn_pickle",
                culprit={"attribute": found.path, **(found.place.fields() if found.place else {})},
            )
    return ok(f"{name} can be pickled: it can be sent to a worker")


# ---------------------------------------------------------------- with workers


def by_fork(context: ProbeContext) -> Iterator[Finding]:
    """Workers as copies of the process: quick, and every held lock is copied held."""
    yield from _with_workers(context, "fork")


def by_spawn(context: ProbeContext) -> Iterator[Finding]:
    """Workers as new processes: everything is imported and sent anew."""
    yield from _with_workers(context, "spawn")


def by_forkserver(context: ProbeContext) -> Iterator[Finding]:
    """Workers as copies of a clean process."""
    yield from _with_workers(context, "forkserver")


def _with_workers(context: ProbeContext, method: str) -> Iterator[Finding]:
    name = context.run.data.source
    try:
        if name is None or not find(name).is_dataset:
            yield ok("nothing is loaded by workers here")
            return
    except Exception as error:  # noqa: BLE001 (told in full by the probe before)
        yield warn(f"not tried: {name} cannot be imported", str(error))
        return
    folder = context.scratch / f"loading-{method}"
    folder.mkdir(parents=True, exist_ok=True)
    watch = folder / f"workers-{time.monotonic_ns()}.jsonl"
    request = {
        "name": name,
        "method": method,
        "workers": context.run.data.workers,
        "batch_size": _batch_size(context),
        "watch": str(watch),
    }
    item_s = read_record(context.scratch / "items.json").get("item_s", 0.0)
    watcher = _Watcher(watch, max(QUIET_S, _SLOW_TIMES * item_s))
    done = child.run(
        "lamplighter.doctor.workers:load",
        request,
        deadline_s=START_S,
        on_record=lambda record: context.now(str(record.get("now", ""))),
        is_stuck=watcher.is_stuck,
    )
    yield judge(name, method, done, watcher)


class _Watcher:
    """Reads what the workers say of themselves, and decides when one is stuck."""

    def __init__(self, path: Path, quiet_s: float) -> None:
        self.path, self.quiet_s = path, quiet_s
        self.since: dict[int, tuple[Any, float]] = {}  # worker -> (item, since when it is there)
        self.heard: dict[int, float] = {}
        self.last: dict[int, dict[str, Any]] = {}
        self.found: dict[str, Any] | None = None  # the one that is stuck

    def look(self) -> None:
        for record in read_lines(self.path):
            worker, at = record["worker"], record["t"]
            key = (record["item"], record["pid"])
            if self.since.get(worker, (None, 0.0))[0] != key:
                self.since[worker] = (key, at)
            self.heard[worker] = max(at, self.heard.get(worker, 0.0))
            self.last[worker] = record

    def is_stuck(self, records: list[dict[str, Any]]) -> bool:
        """A worker at one item for long, while no batch comes."""
        self.look()
        if not self.last or any("error" in record or "done" in record for record in records):
            return False
        self.found = self.culprit(time.monotonic())
        return self.found is not None

    def culprit(self, at: float) -> dict[str, Any] | None:
        """The worker that is stuck, and how: at one item in the user's code; or silent, which an idle one never is."""
        silent = []
        for worker, record in sorted(self.last.items()):
            for_s, silent_s = at - self.since[worker][1], at - self.heard[worker]
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


def judge(name: str, method: str, done: Outcome, watcher: _Watcher) -> Finding:
    """One finding for one start method."""
    watcher.look()
    error = next((record for record in done.records if "error" in record), None)
    batches = [record for record in done.records if "batch" in record]
    count = next((record["workers"] for record in done.records if "workers" in record), 0)
    if error is not None:
        return _raised(name, method, error, watcher)
    if done.ended_for:
        return _hung(name, method, done, watcher, len(batches))
    if done.code != 0 or done.error or not batches:
        return _died(name, method, done, watcher)
    last = batches[-1]
    rate = (last["batch"] - 1) / last["seconds"] if last["seconds"] > 0 and last["batch"] > 1 else 0.0
    speed = f"{rate:,.1f} batches/s, " if rate else ""
    return ok(
        f"{count} workers by {method}: {len(batches)} batches, {speed}the first after {last['start_s']:.1f} s",
        figures={"batches_per_s": rate, "start_s": last["start_s"]},
    )


def _hung(name: str, method: str, done: Outcome, watcher: _Watcher, batches: int) -> Finding:
    stuck = watcher.found
    if stuck is None:
        taken = done.stacks.get(done.pid)
        place = stacks.line_to_name(taken.main) if taken else None
        return fault(
            f"workers by {method} gave {batches} batches and then nothing: {done.how()}",
            f"the loader stands at {place.place}" if place else "its stack could not be read",
            "--data.workers 1, or no workers",
            "worker_hang",
            culprit={"method": method, **(place.fields() if place else {})},
        )
    place = _place(stuck, done)
    worker, item = stuck["worker"], stuck["item"]
    culprit = {
        "worker": worker,
        "pid": stuck["pid"],
        "item": item,
        "method": method,
        **(place.fields() if place else {}),
    }
    stands = f"at {place.place if place else None}, item {item}, for {stuck['for_s']:.0f} s"
    if stuck["silent_s"] > SILENT_S:
        return fault(
            f"worker {worker} by {method} holds the GIL {stands}",
            f"its own watching thread has not run for {stuck['silent_s']:.0f} s: a long call into C"
            + (f" ({place.text})" if place and place.text else ""),
            "look at that line: a regular expression that explodes, or a call without an end",
            "worker_gil",
            culprit=culprit,
        )
    if stuck["locks"] and method == "fork":
        return _inherited(worker, stuck, stands, culprit, done)
    return fault(
        f"worker {worker} by {method} hangs {stands}",
        f"the line is: {stuck['text']}",
        "look at that line; without workers it would hang in the same place, or not at all: see the probe before",
        "worker_hang",
        culprit=culprit,
    )


def _inherited(worker: int, stuck: dict[str, Any], stands: str, culprit: dict[str, Any], done: Outcome) -> Finding:
    threads = [one for record in done.records for one in record.get("threads", [])]
    holder = next(iter(threads), None)
    where = (
        f"; when the worker was forked, thread {holder['name']} stood at {holder['file']}:{holder['line']}"
        if holder
        else ""
    )
    taken = {"taken_file": holder["file"], "taken_line": holder["line"]} if holder else {}
    return fault(
        f"worker {worker} by fork waits for a lock that was copied held: {', '.join(stuck['locks'])}, {stands}",
        f"fork copies a held lock, but not the thread that would release it{where}",
        'DataLoader(multiprocessing_context="spawn"), or start threads only after the workers',
        "fork_lock",
        culprit={**culprit, **taken},
    )


def _place(stuck: dict[str, Any], done: Outcome) -> Frame | None:
    """By py-spy where the worker could not speak for itself."""
    if stuck["silent_s"] > SILENT_S:
        taken = done.stacks.get(stuck["pid"])
        if taken is not None and taken.threads[0].name.endswith("MainThread"):
            return stacks.line_to_name(taken.main)
    return Frame(**stuck["place"]) if stuck["place"] else None


def _raised(name: str, method: str, error: dict[str, Any], watcher: _Watcher) -> Finding:
    message, kind = error["message"], error["error"]
    lines = [line for line in message.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else kind
    if error["ended"]:
        return _ended_worker(method, error["ended"][0], watcher)
    if "pickle" in message.lower() or kind in ("PicklingError",):
        return Finding(
            _pickle_level(method),
            f"workers by {method} cannot start: the dataset cannot be pickled",
            last,
            "see the probe in this process: it names the attribute",
            "spawn_pickle",
            culprit={"method": method},
        )
    found = re.search(r"worker process (\d+)", message)
    worker = int(found[1]) if found else 0
    record = watcher.last.get(worker, {})
    culprit = {"worker": worker, "item": record.get("item"), "method": method, **_raised_line(message)}
    cause = "worker_oom" if kind == "MemoryError" or "MemoryError" in message else "worker_error"
    return fault(
        f"worker {worker} by {method} raised {kind} at item {record.get('item')}"
        + (f", {culprit['file']}:{culprit['line']}" if "file" in culprit else ""),
        last,
        "fewer workers, or smaller items" if cause == "worker_oom" else "mend that line or that item",
        cause,
        culprit=culprit,
    )


def _pickle_level(method: str) -> Level:
    return "fault" if method == "fork" else "warn"  # spawn and forkserver are tried, fork is what torch does on Linux


def _raised_line(message: str) -> dict[str, Any]:
    places = [
        Frame(file, int(line), func)
        for file, line, func in re.findall(r'File "([^"]+)", line (\d+), in (\S+)', message)
    ]
    place = stacks.line_to_name(reversed(places))
    return place.fields() if place else {}


def _ended_worker(method: str, ended: dict[str, int], watcher: _Watcher) -> Finding:
    worker, code = ended["worker"], ended["code"]
    record = watcher.last.get(worker, {})
    item, place = record.get("item"), record.get("place")
    culprit = {"worker": worker, "pid": ended["pid"], "item": item, "method": method, **(place or {})}
    if code < 0:
        signal_words = {
            -9: "out of memory, or somebody's kill",
            -7: "no room in /dev/shm",
            -11: "a crash in native code",
        }
        cause = "shm_small" if code == -7 else "worker_sigkill"
        what = f"worker {worker} by {method} was killed by signal {-code} at item {item}"
        return fault(
            what, signal_words.get(code, "killed from outside"), "fewer workers, smaller items", cause, culprit=culprit
        )
    what = f"worker {worker} by {method} exited with code {code} at item {item}"
    return fault(
        what,
        "something in the dataset ends the process",
        "look for sys.exit and os._exit",
        "worker_exit",
        culprit=culprit,
    )


def _died(name: str, method: str, done: Outcome, watcher: _Watcher) -> Finding:
    lines = [line for line in done.output.splitlines() if line.strip()]
    culprit = {"method": method, **_raised_line(done.output)}
    what = f"loading {name} by {method} {done.how()} before the first batch"
    return fault(what, lines[-1] if lines else "", "see the traceback in the scratch folder", "", culprit=culprit)


# ---------------------------------------------------------------- what cannot be sent to a worker


@dataclass(frozen=True)
class Unpicklable:
    """The innermost part that fails."""

    path: str
    kind: str
    error: str
    place: Frame | None


def unpicklable(value: Any, path: str = "dataset") -> Unpicklable | None:
    """None where all of it can be sent to another process."""
    error = _error(value)
    return None if error is None else _innermost(value, path, error, None, _DEEP)


def _error(value: Any) -> str | None:
    try:
        ForkingPickler.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _innermost(value: Any, path: str, error: str, owner: tuple[Any, str] | None, depth: int) -> Unpicklable:
    for name, part in _parts(value) if depth else ():
        if (inner := _error(part)) is not None:
            is_attribute = not isinstance(value, (dict, list, tuple))
            step = f".{name}" if is_attribute else f"[{name!r}]"
            attribute = (value, name) if is_attribute else owner
            return _innermost(part, path + step, inner, attribute, depth - 1)
    return Unpicklable(path, _kind(value), error, _defined(value, owner))


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())[:1000]
    if isinstance(value, (list, tuple)):
        return list(enumerate(value[:1000]))
    return list(vars(value).items()) if hasattr(value, "__dict__") and not inspect.isroutine(value) else []


def _kind(value: Any) -> str:
    if getattr(value, "__name__", "") == "<lambda>":
        return "a lambda"
    if inspect.isfunction(value):
        return f"the function {value.__qualname__}"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


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
