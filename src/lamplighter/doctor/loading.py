"""Loading probes: a user's own Dataset in this process, then with workers by fork, spawn and forkserver, each with a deadline.

In:  a Patient whose data.source is "module:name".
Out: Findings: items per second, or what hangs, dies or cannot be pickled, with file:line, worker and item.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from lamplighter.doctor import datasets, pickling
from lamplighter.doctor.code_owner import Place, innermost
from lamplighter.doctor.datasets import Loading
from lamplighter.doctor.probe import Finding, Level, Patient, Stage
from lamplighter.doctor.sample_data import as_finding, failed
from lamplighter.doctor.trials import Outcome, attempt
from lamplighter.errors import LampError
from lamplighter.rundir import human_bytes, read_lines, read_record, write_json

SHM = Path("/dev/shm")
START_S = 60.0  # until the first batch: workers import torch
QUIET_S = 6.0  # a worker that stands at one item for so long
SILENT_S = 3.0  # a worker whose watching thread says nothing: the GIL is held, or it is stopped
ASLEEP_TIMES = 4  # a crowded machine lets a sleeping worker's thread wait that much longer
ITEMS_S = 5.0
SLOW_TIMES = 4  # as long as an item takes in this process
SHM_SHARE = 0.8

STAGES = [
    Stage("loading / in this process", "lamplighter.doctor.loading:here", 60),
    Stage("loading / workers by fork", "lamplighter.doctor.loading:by_fork", 90),
    Stage("loading / workers by spawn", "lamplighter.doctor.loading:by_spawn", 90),
    Stage("loading / workers by forkserver", "lamplighter.doctor.loading:by_forkserver", 90),
]


# ---------------------------------------------------------------- in this process


def here(patient: Patient) -> Iterator[Finding]:
    """One item, one batch; then whether it could be sent to a worker, and what the workers would need."""
    name = patient.run.data.source
    if name is None:
        yield Finding("ok", "no Dataset of your own: batches are mapped memory and one thread, nothing is forked")
        return
    try:
        own = datasets.find(name)
    except LampError as error:
        yield as_finding(error)
        return
    except Exception as error:  # noqa: BLE001 (the user's module may raise anything)
        yield failed(error, f"cannot import {name}")
        return
    if not own.is_dataset:
        yield Finding(
            "ok", f"{name} gives texts: lamp train reads it in one process and forks nothing", "see data / files"
        )
        return
    try:
        loading = datasets.make(own, _batch_size(patient), patient.run.data.workers)
    except Exception as error:  # noqa: BLE001 (the user's own code)
        yield failed(error, f"{name} cannot be made")
        return
    yield from _items(loading, name, patient)


def _batch_size(patient: Patient) -> int:
    train = patient.run.train
    return train.micro_batch or train.batch_size


def _items(loading: Loading, name: str, patient: Patient) -> Iterator[Finding]:
    from torch.utils.data import default_collate

    began, number = time.monotonic(), 0
    items: list[Any] = []
    patient.now(f"item 0 of {name}")
    stream = iter(loading.dataset) if not loading.is_map else None
    total = len(loading.dataset) if loading.is_map else None
    try:
        while len(items) < loading.batch_size and (total is None or number < total):
            patient.now(f"item {number} of {name}")
            items.append(next(stream) if stream is not None else loading.dataset[number])
            number += 1
            if time.monotonic() - began > ITEMS_S:
                break
    except StopIteration:
        pass
    except Exception as error:  # noqa: BLE001 (the user's own code)
        yield failed(error, f"item {number} of {name} cannot be had, in this process and without workers")
        return
    seconds = time.monotonic() - began
    if not items:
        yield Finding("fault", f"{name} has no items", f"its length is {total}", "check what it reads")
        return
    rate = len(items) / max(1e-6, seconds)
    write_json(patient.scratch / "items.json", {"item_s": seconds / len(items)}, durable=False)
    try:
        batch = (loading.collate or default_collate)(items)
    except Exception as error:  # noqa: BLE001 (items of different sizes, or of kinds that do not stack)
        yield failed(
            error, f"{len(items)} items of {name} cannot be put into one batch", "pad them, or give a collate_fn"
        )
        return
    size = _bytes_of(batch) * loading.batch_size // len(items)
    yield Finding(
        "ok",
        f"{len(items)} items of {name} in this process, without workers: {rate:,.1f} items/s",
        f"a batch of {loading.batch_size} has {human_bytes(size)}",
        figures={"items_per_s": rate, "batch_bytes": float(size)},
    )
    yield shared_memory(loading.workers, loading.prefetch, size, SHM)
    yield picklable(loading, name)


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
    if need <= SHM_SHARE * have:
        return Finding(
            "ok", f"shared memory will do: {sums}, {human_bytes(have)} are free in {folder}", figures=figures
        )
    fit = max(1, int(SHM_SHARE * have // max(1, prefetch * batch_bytes)))
    return Finding(
        "fault",
        f"shared memory is too small: {human_bytes(need)} are needed, {human_bytes(have)} are free in {folder}",
        f"{sums}; a worker that cannot write there dies of a bus error",
        f"a larger one (docker run --shm-size {max(1, round(2 * need / 1e9))}g), or --data.workers {fit}",
        "shm_small",
        {"path": str(folder)},
        {"data.workers": fit},
        figures,
    )


def picklable(loading: Loading, name: str) -> Finding:
    """What spawn and forkserver have to send to a worker."""
    parts = [(loading.dataset, "dataset"), (loading.collate, "collate_fn")]
    for value, path in parts:
        found = pickling.find(value, path)
        if found is not None:
            where = f", made at {found.place}" if found.place else ""
            return Finding(
                "warn",
                f"{found.path} cannot be pickled: it is {found.kind}{where}",
                f"{found.error}; workers by spawn or forkserver cannot start (fork can)",
                "a function of a module instead of a lambda; open files and locks in the worker, not in __init__",
                "spawn_pickle",
                {"attribute": found.path, **(found.place.fields() if found.place else {})},
            )
    return Finding("ok", f"{name} can be pickled: it can be sent to a worker")


# ---------------------------------------------------------------- with workers


def by_fork(patient: Patient) -> Iterator[Finding]:
    """Workers as copies of the process: quick, and every held lock is copied held."""
    yield from _with_workers(patient, "fork")


def by_spawn(patient: Patient) -> Iterator[Finding]:
    """Workers as new processes: everything is imported and sent anew."""
    yield from _with_workers(patient, "spawn")


def by_forkserver(patient: Patient) -> Iterator[Finding]:
    """Workers as copies of a clean process."""
    yield from _with_workers(patient, "forkserver")


def _with_workers(patient: Patient, method: str) -> Iterator[Finding]:
    name = patient.run.data.source
    try:
        if name is None or not datasets.find(name).is_dataset:
            yield Finding("ok", "nothing is loaded by workers here")
            return
    except Exception as error:  # noqa: BLE001 (told in full by the probe before)
        yield Finding("warn", f"not tried: {name} cannot be imported", str(error))
        return
    folder = patient.scratch / f"loading-{method}"
    folder.mkdir(parents=True, exist_ok=True)
    watch = folder / f"workers-{time.monotonic_ns()}.jsonl"
    request = {
        "name": name, "method": method, "workers": patient.run.data.workers, "batch_size": _batch_size(patient),
        "watch": str(watch),
    }  # fmt: skip
    item_s = read_record(patient.scratch / "items.json").get("item_s", 0.0)
    watcher = _Watcher(watch, max(QUIET_S, SLOW_TIMES * item_s))
    done = attempt("lamplighter.doctor.workers:load", request, folder, START_S, patient.now, watcher.is_stuck)
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
            if silent_s > SILENT_S * (1 if state == psutil.STATUS_RUNNING else ASLEEP_TIMES):
                silent.append({**record, "for_s": for_s, "silent_s": silent_s})
        return silent[0] if silent else None


def _state(pid: int) -> str:
    """Of a process as the kernel calls it; '' where it is gone."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return ""


def judge(name: str, method: str, done: Outcome, watcher: _Watcher) -> Finding:
    """One finding for one start method."""
    watcher.look()
    error = next((record for record in done.records if "error" in record), None)
    batches = [record for record in done.records if "batch" in record]
    count = next((record["workers"] for record in done.records if "workers" in record), 0)
    if error is not None:
        return _raised(name, method, error, watcher)
    if done.code is None:
        return _hung(name, method, done, watcher, len(batches))
    if done.code != 0 or not batches:
        return _died(name, method, done, watcher)
    last = batches[-1]
    rate = (last["batch"] - 1) / last["seconds"] if last["seconds"] > 0 and last["batch"] > 1 else 0.0
    speed = f"{rate:,.1f} batches/s, " if rate else ""
    return Finding(
        "ok",
        f"{count} workers by {method}: {len(batches)} batches, {speed}the first after {last['start_s']:.1f} s",
        figures={"batches_per_s": rate, "start_s": last["start_s"]},
    )


def _hung(name: str, method: str, done: Outcome, watcher: _Watcher, batches: int) -> Finding:
    stuck = watcher.found
    if stuck is None:
        place = innermost([p for _, stack in done.stacks.get(done.pid, []) for p in stack])
        return Finding(
            "fault",
            f"workers by {method} gave {batches} batches and then nothing: {done.ended()}",
            f"the loader stands at {place}" if place else "its stack could not be read",
            "--data.workers 1, or no workers",
            "worker_hang",
            {"method": method, **(place.fields() if place else {})},
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
    stands = f"at {place}, item {item}, for {stuck['for_s']:.0f} s"
    if stuck["silent_s"] > SILENT_S:
        return Finding(
            "fault",
            f"worker {worker} by {method} holds the GIL {stands}",
            f"its own watching thread has not run for {stuck['silent_s']:.0f} s: a long call into C"
            + (f" ({place.text})" if place and place.text else ""),
            "look at that line: a regular expression that explodes, or a call without an end",
            "worker_gil",
            culprit,
        )
    if stuck["locks"] and method == "fork":
        return _inherited(worker, stuck, stands, culprit, done)
    return Finding(
        "fault",
        f"worker {worker} by {method} hangs {stands}",
        f"the line is: {stuck['text']}",
        "look at that line; without workers it would hang in the same place, or not at all: see the probe before",
        "worker_hang",
        culprit,
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
    return Finding(
        "fault",
        f"worker {worker} by fork waits for a lock that was copied held: {', '.join(stuck['locks'])}, {stands}",
        f"fork copies a held lock, but not the thread that would release it{where}",
        'DataLoader(multiprocessing_context="spawn"), or start threads only after the workers',
        "fork_lock",
        {**culprit, **taken},
    )


def _place(stuck: dict[str, Any], done: Outcome) -> Place | None:
    """By py-spy where the worker could not speak for itself."""
    if stuck["silent_s"] > SILENT_S:
        for thread, stack in done.stacks.get(stuck["pid"], []):
            if thread == "MainThread" or thread.endswith("MainThread"):
                return innermost(stack)
    return Place(**stuck["place"]) if stuck["place"] else None


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
            {"method": method},
        )
    found = re.search(r"worker process (\d+)", message)
    worker = int(found[1]) if found else 0
    record = watcher.last.get(worker, {})
    culprit = {"worker": worker, "item": record.get("item"), "method": method, **_raised_line(message)}
    cause = "worker_oom" if kind == "MemoryError" or "MemoryError" in message else "worker_error"
    return Finding(
        "fault",
        f"worker {worker} by {method} raised {kind} at item {record.get('item')}"
        + (f", {culprit['file']}:{culprit['line']}" if "file" in culprit else ""),
        last,
        "fewer workers, or smaller items" if cause == "worker_oom" else "mend that line or that item",
        cause,
        culprit,
    )


def _pickle_level(method: str) -> Level:
    return "fault" if method == "fork" else "warn"  # spawn and forkserver are tried, fork is what torch does on Linux


def _raised_line(message: str) -> dict[str, Any]:
    places = [
        Place(file, int(line), func)
        for file, line, func in re.findall(r'File "([^"]+)", line (\d+), in (\S+)', message)
    ]
    place = innermost(reversed(places))
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
        return Finding(
            "fault", what, signal_words.get(code, "killed from outside"), "fewer workers, smaller items", cause, culprit
        )
    what = f"worker {worker} by {method} exited with code {code} at item {item}"
    return Finding(
        "fault",
        what,
        "something in the dataset ends the process",
        "look for sys.exit and os._exit",
        "worker_exit",
        culprit,
    )


def _died(name: str, method: str, done: Outcome, watcher: _Watcher) -> Finding:
    lines = [line for line in done.last_words.splitlines() if line.strip()]
    culprit = {"method": method, **_raised_line(done.last_words)}
    what = f"loading {name} by {method} {done.ended()} before the first batch"
    return Finding("fault", what, lines[-1] if lines else "", "see the traceback in the scratch folder", "", culprit)
