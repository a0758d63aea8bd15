"""The token cache being built: a plan, workers, a marker for each finished unit, the manifest last.

In:  a source, a tokenizer, settings and a folder whose lock is held.
Out: the shards of all units, and manifest.json.

A unit counts when its marker (unit-00007.json) is there, written after its files. Whatever is killed when: the next
build keeps what has a marker, removes the rest, and makes the missing units. (After a power cut a marker proves nothing:
then the hashes of its files decide.) The files depend neither on the number of workers nor on where a build stopped. A
source of texts that only it can read is read here, one unit after the other; since it may be slow, what is read is also
kept twice a minute (open.json), and the files go on where they were.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lamplighter import report
from lamplighter.data.cache_location import remove_others
from lamplighter.data.sources import Part, Source, watched
from lamplighter.data.sources.file_source import FileSource
from lamplighter.data.split import CacheSettings, Split, Survey, begin_survey, decide, survey_texts
from lamplighter.data.token_cache import units
from lamplighter.data.token_cache.encoder import renewed
from lamplighter.data.token_cache.units import (
    SIDES,
    BuildPlan,
    Record,
    Unit,
    UnitJob,
    UnitWriter,
    full,
    hash_first,
    sync_file,
)
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import BadData, CannotWrite
from lamplighter.procs.pool import TICK_S, each
from lamplighter.procs.procfs import boot_id
from lamplighter.readers.bad_records import SOON, BadInFile, BadRecords
from lamplighter.readers.files import unpacked_bytes
from lamplighter.readers.ranges import PART_BYTES, TextBlock
from lamplighter.rundir import (
    free_bytes,
    human_bytes,
    identity,
    is_whole,
    read_record,
    sealed,
    write_atomic,
    write_json,
)

FORMAT = 2
COMMIT_S = 30.0  # the most that a kill can cost of a slow source
_SYNC_THREADS = 4
ALONE_BYTES = 20_000_000  # a smaller corpus is done before workers would have started
OVERLAP_HASHES = 1 << 22  # held in memory at once

_Show = Callable[[int, str], None]
"""Is told how many bytes are read, and what is being read now."""


class Builder:
    """One build, from the first look to the manifest."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, settings: CacheSettings, workers: int = 1) -> None:
        self.folder, self.tokenizer, self.settings, self.workers = folder, tokenizer, settings, workers
        self.dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
        self.division = Split("documents", 0, 0)
        self.need_bytes = 0
        self.records: dict[int, Record] = {}
        self.half_done: Record = {}  # of the unit of a slow source that is not full yet
        self.threads = ThreadPoolExecutor(_SYNC_THREADS)
        self.synced: list[Future[None]] = []
        self._said = 0.0

    def _write(self, name: str, value: Any, durable: bool = True) -> None:
        try:
            write_atomic(self.folder / name, json.dumps(sealed(value), indent=1) + "\n", durable)
        except OSError as error:
            raise full(self.folder, 4096, error) from error

    def say(self, bytes_done: int, total: int | None, item: str) -> None:
        """For those who wait: about once a second."""
        if time.monotonic() - self._said < 1:
            return
        self._said = time.monotonic()
        now = {"bytes": bytes_done, "total_bytes": total, "units": len(self.records), "item": item}
        try:
            write_json(self.folder / "progress.json", {**identity(), "t": time.time(), **now}, durable=False)
        except OSError as error:  # only for those who wait; shards speak for themselves
            self._said = float("inf")
            report.warn(f"cannot write {self.folder / 'progress.json'}: {error.strerror}")

    # -- begin, or go on

    def begin(self, source: Source, plan: BuildPlan | None) -> None:
        """Decide the division, make sure of room, and write it down."""
        remove_others(self.folder, {"lock"})
        total = source.total_bytes()
        found = begin_survey(self.settings)
        with report.phase("look at the documents", unit="documents") as p:

            def show(bytes_done: int, item: str) -> None:
                p.set(found.documents, item)
                self.say(bytes_done, total, item)

            bad = plan.how.bad_records() if plan else BadRecords(quiet=True)
            read = units.survey_plan(plan, found, show, bad) if plan else _look_at_texts(source, found, show)
        try:
            self.division = decide(found, self.settings, source)
        except BadData as error:
            if bad.listed:  # too little text is left because of this
                raise BadData(*bad.listed[0]["error"]) from error
            raise
        self.need_bytes = self._estimate(found, total, read)
        self._check_room(self.need_bytes)
        self._write("build.json", self._head())

    def _head(self) -> dict[str, Any]:
        return {"format": FORMAT, "division": asdict(self.division), "need_bytes": self.need_bytes}

    def go_on(self) -> bool:
        """Take up a build that was killed; False where there is none (or none that can be trusted)."""
        head = read_record(self.folder / "build.json")
        if head.get("format") != FORMAT or not is_whole(head):
            return False
        self.division, self.need_bytes = Split(**head["division"]), head["need_bytes"]
        for path in sorted(self.folder.glob("unit-*.json")):
            record = read_record(path)
            if is_whole(record) and self._has_files(record):
                self.synced.append(self.threads.submit(self._sync, record))
                self.records[record["unit"]] = record
        half = read_record(self.folder / "open.json")
        if is_whole(half) and half["unit"] not in self.records and self._has_files(half, at_least=True):
            self.half_done = half
        records = [*self.records.values(), *([self.half_done] if self.half_done else [])]
        files = {name: entry["bytes"] for record in records for name, entry in record["files"].items()}
        markers = {_marker(number) for number in self.records} | ({"open.json"} if self.half_done else set())
        remove_others(self.folder, {*files, *markers, "build.json", "lock"})
        self._check_room(self.need_bytes - sum(files.values()))
        return True

    def _has_files(self, record: Record, at_least: bool = False) -> bool:
        """Whether the files of a record are there; since another start of the machine, by every byte."""
        same_start = record.get("boot_id") == boot_id()
        for name, entry in record["files"].items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else -1
            if found < entry["bytes"] or (found > entry["bytes"] and not at_least):
                return False
            if not same_start and hash_first(path, entry["bytes"]) != entry["sha256"]:
                return False
        return True

    def _estimate(self, found: Survey, total: int | None, read: int) -> int:
        """Bytes of the finished cache, from the tokens of a sample; 0 where the source cannot say its size."""
        with report.phase("estimate the size", unit="B") as p:
            sample: list[bytes] = []
            size = 0
            while size < min(self.tokenizer.batch_bytes, found.text_bytes) and len(sample) < len(found.sample):
                sample.append(found.sample[len(sample)])
                size += len(sample[-1])
            ids, _ = self.tokenizer.encoder(threads=False).encode(sample)
            tokens = len(ids) * found.text_bytes / max(1, size)
            p.tick(size)
        hashes = found.text_bytes / 2000 if self.division.by == "blocks" else found.documents
        need = tokens * np.dtype(self.dtype).itemsize + 8 * (found.documents + hashes)
        if not found.ended:
            need = need * total / read if total and read else 0
        return int(need * 1.05) + 4096

    def _check_room(self, need: int) -> None:
        if need > (have := free_bytes(self.folder)):
            raise CannotWrite(
                f"not enough room for the token cache in {self.folder}",
                f"it needs about {human_bytes(need)}; {human_bytes(have)} are free",
                "free some space, or choose another place with --runs-dir",
            )

    def _job(self) -> UnitJob:
        return UnitJob(self.folder, self.division, self.dtype, self.tokenizer.end_of_text, self.tokenizer.vocab_size)

    # -- units of files

    def run_plan(self, source: FileSource, plan: BuildPlan) -> None:
        """Make the missing units, in this process or by workers."""
        total = plan.total_bytes()
        todo = [unit for unit in plan.units if unit.number not in self.records]
        workers = min(self.workers, len(todo)) if sum(unit.bytes for unit in todo) > ALONE_BYTES else 1
        cells = multiprocessing.get_context("spawn").RawArray(ctypes.c_uint64, max(1, len(plan.units)))
        behind = np.frombuffer(memoryview(cells), np.uint64)
        for unit in plan.units:
            behind[unit.number] = unit.bytes if unit.number in self.records else 0
        bad_lines = _BadLines(source, plan)
        bad_lines.add(self.records)
        with report.phase("tokenise", total=total, unit="B") as p:

            def tick() -> None:
                now = next((unit for unit in todo if unit.number not in self.records), None)
                item = now.place(int(behind[now.number])) if now else "the last unit"
                p.set(int(behind.sum()), item)
                self.say(int(behind.sum()), total, item)

            def tell(number: int, done: int) -> None:
                cells[number] = done
                tick()

            tick()
            job = self._job()
            if workers == 1:
                units.start_here(job, plan.how, self.tokenizer.recipe(), self.tokenizer.encoder(threads=True), tell)
            start = units.start_worker if workers > 1 else None
            start_with = (job, plan.how, self.tokenizer.recipe(), cells)
            made = each(
                units.make_unit, todo, workers, name=str, start=start, start_with=start_with, in_order=False, tick=tick
            )
            for unit, record in made:
                self._commit(record)
                behind[unit.number] = unit.bytes
                bad_lines.add(self.records)
                tick()

    def _commit(self, record: Record) -> None:
        """The marker of a unit whose files are written; they go to the disk itself meanwhile."""
        self._write(_marker(record["unit"]), {**record, "boot_id": boot_id()}, durable=False)
        self.records[record["unit"]] = record
        self.synced.append(self.threads.submit(self._sync, record))

    def _sync(self, record: Record) -> None:
        try:
            for name in record["files"]:
                if not name.endswith(".hash"):
                    sync_file(self.folder / name)
        except OSError as error:
            raise full(self.folder, sum(entry["bytes"] for entry in record["files"].values()), error) from error

    def _wait_for_disk(self) -> None:
        """All shards survive a power cut from here on."""
        with report.phase("write to disk", total=len(self.synced), unit="shards") as p:
            for number, future in enumerate(self.synced):
                p.set(number, str(self.folder / f"train-{number:05d}.bin"))
                while not wait([future], TICK_S).done:
                    p.set(number)
                future.result()

    # -- texts that only the source can read

    def run_texts(self, source: Source) -> None:
        """Encode every text from the cursor on; a unit ends with the text that fills it."""
        total = source.total_bytes()
        size = self.settings.unit_bytes or units.USUAL_BYTES
        job, encoder = self._job(), self.tokenizer.encoder(threads=True)
        last: Record = self.records[max(self.records)] if self.records else {}
        writer = UnitWriter(job, encoder, len(self.records), last.get("open_val"))
        if self.half_done:
            last = self.half_done
            writer.go_on(last)
        batch = min(PART_BYTES, self.tokenizer.batch_bytes)
        with report.phase("tokenise", total=total, unit="B") as p, ExitStack() as writers:
            writers.enter_context(writer)

            def show(bytes_done: int, item: str) -> None:
                p.set(bytes_done, item)
                self.say(bytes_done, total, item)

            docs: list[bytes] = []
            held, opened, kept_at = 0, bool(last.get("opened")), time.monotonic()
            for text in watched(source, show, last.get("cursor")):
                docs.append(text.encode())
                held += len(docs[-1])
                is_full, is_due = writer.read_bytes + held >= size, time.monotonic() - kept_at > COMMIT_S
                if not (isinstance(text, Part) or held >= batch or is_full or is_due):
                    continue
                writer.add(TextBlock(docs, opened, isinstance(text, Part)))
                docs, held, opened = [], 0, isinstance(text, Part)
                if is_full or is_due:
                    self._keep(writer, is_full, {"cursor": source.position().cursor, "opened": opened})
                    kept_at = time.monotonic()
                if is_full:
                    encoder = renewed(encoder, self.tokenizer.recipe())
                    writers.close()
                    writer = writers.enter_context(UnitWriter(job, encoder, len(self.records), writer.divider.open_val))
            if docs:
                writer.add(TextBlock(docs, opened))
            if writer.read_bytes:
                self._keep(writer, True, {"cursor": source.position().cursor, "opened": False})
            p.set(source.position().bytes_done)

    def _keep(self, writer: UnitWriter, is_full: bool, place: dict[str, Any]) -> None:
        if is_full:
            self._commit({**writer.close(), "faults": [], "lines": [], **place})
            (self.folder / "open.json").unlink(missing_ok=True)
        else:
            self._write("open.json", {**writer.record(), **place, "boot_id": boot_id()}, durable=False)

    # -- end

    def finish(self, parts: dict[str, Any]) -> dict[str, Any]:
        """The check, the manifest; then the traces of building go."""
        records = [self.records[number] for number in sorted(self.records)]
        self._check_overlap(records)
        self._wait_for_disk()
        files = {n: e for record in records for n, e in record["files"].items() if not n.endswith(".hash")}
        manifest = {
            "format": FORMAT,
            "parts": parts,
            "vocab_size": self.tokenizer.vocab_size,
            "end_of_text": self.tokenizer.end_of_text,
            "dtype": self.dtype,
            "divided_by": self.division.by,
            "empty_documents": sum(record["empty"] for record in records),
            "splits": {side: _sum_side(side, records) for side in SIDES},
            "files": dict(sorted(files.items())),
        }
        self._write("manifest.json", manifest)
        remove_others(self.folder, {*files, "manifest.json", "lock"})
        return manifest

    def _check_overlap(self, records: list[Record]) -> None:
        """No text may be both trained on and validated on; so much is held in memory as one range of hashes needs."""
        names = [name for record in records for name in record["files"] if name.endswith(".hash")]
        held = [name for name in names if name.startswith("val")]
        count = sum((self.folder / name).stat().st_size // 8 for name in held)
        ranges = -(-count // OVERLAP_HASHES)
        with report.phase("check that the sides are apart", total=len(names) * ranges, unit="files") as p:
            for number in range(ranges):
                low, high = (min((1 << 64) - 1, (one << 64) // ranges) for one in (number, number + 1))
                val = np.unique(np.concatenate([self._hashes(name, low, high, p) for name in held]))
                for name in names:
                    if name.startswith("train") and np.isin(self._hashes(name, low, high, p), val).any():
                        what = f"a validation text is also in {name.replace('.hash', '.bin')}"
                        raise BadData(what, "the sides overlap", "build it again, and tell us")

    def _hashes(self, name: str, low: int, high: int, p: report.Phase) -> Any:
        found = np.fromfile(self.folder / name, "<u8")
        p.tick(1, name)
        whole = low == 0 and high == (1 << 64) - 1
        return found if whole else found[(found >= np.uint64(low)) & (found <= np.uint64(high))]


def _marker(number: int) -> str:
    return f"unit-{number:05d}.json"


def _sum_side(side: str, records: list[Record]) -> dict[str, Any]:
    """A split: its counts, and how many tokens each shard has; its stream begins with an end-of-text of its own."""
    rows = [(record["unit"], record["sides"][side]) for record in records if record["sides"][side]["tokens"]]
    shards = [{"file": f"{side}-{number:05d}.bin", "tokens": counts["tokens"]} for number, counts in rows]
    total = {name: sum(counts[name] for _, counts in rows) for name in ("tokens", "documents", "text_bytes")}
    return {**total, "tokens": total["tokens"] + 1 if rows else 0, "shards": shards}


# ---------------------------------------------------------------- reading texts in sight of the watcher


def _look_at_texts(source: Source, found: Survey, show: _Show) -> int:
    for _ in survey_texts(source, found, show):
        if found.is_enough():
            return source.position().bytes_done
    found.ended = True
    return source.position().bytes_done


class _BadLines:
    """Bad lines, as the units list them, put to the policy in the order of the files."""

    def __init__(self, source: FileSource, plan: BuildPlan) -> None:
        self.units, self.total = plan.units, plan.total_bytes()
        self.reading = source.bad.begin()
        self.files: dict[str, BadInFile] = {}
        self.next = self.bytes = 0
        self.path, self.lines = "", 0  # of the file that the latest unit ended in

    def add(self, records: dict[int, Record]) -> None:
        """Judge all units up to the first that is missing."""
        while self.next < len(self.units) and self.next in records:
            self._judge(self.units[self.next], records[self.next])
            self.next += 1
            is_last = self.next == len(self.units)
            if is_last or self.reading.count >= SOON:
                self.reading.check((self.reading.lines + self.lines) * self.total / max(1, self.bytes))

    def _judge(self, unit: Unit, record: Record) -> None:
        spans = {span.path: span for span in unit.spans}
        for fault in record["faults"]:
            path = fault["path"]
            if path not in self.files:
                self.files[path] = self.reading.file(path, unpacked_bytes(spans[path].file))
            self.files[path].set_aside(fault["line"], fault["at"], BadData(*fault["error"]))
        self.reading.count += record.get("bad", 0) - len(record["faults"])  # more than are listed
        for span, lines in zip(unit.spans, record["lines"], strict=False):
            self.lines = lines + (self.lines if span.path == self.path else 0)
            self.path = span.path
            if span.stop == span.size:
                self._end()
        self.bytes += unit.bytes

    def _end(self) -> None:
        """The file is read."""
        bad = self.files.pop(self.path, None)
        if bad is not None:
            bad.end(self.lines)
        else:
            self.reading.lines += self.lines
        self.lines = 0


# ---------------------------------------------------------------- the door


def build(
    folder: Path, source: Source, tokenizer: Tokenizer, settings: CacheSettings, parts: dict[str, Any], workers: int = 1
) -> None:
    """Make the cache in `folder`, or go on making it."""
    builder = Builder(folder, tokenizer, settings, workers)
    plan = units.plan(source, settings)
    if builder.go_on():
        done = sum(
            record["read_bytes"] for record in (*builder.records.values(), builder.half_done or {"read_bytes": 0})
        )
        report.note(f"the token cache goes on after {human_bytes(done)} of text that a stopped build had stored")
    else:
        builder.begin(source, plan)
    started = time.monotonic()
    if plan is not None and isinstance(source, FileSource):
        builder.run_plan(source, plan)
    else:
        builder.run_texts(source)
    manifest = builder.finish(parts)
    _sum_up(manifest, time.monotonic() - started)


def _sum_up(manifest: dict[str, Any], seconds: float) -> None:
    train, val = (manifest["splits"][name] for name in SIDES)
    empty = manifest["empty_documents"]
    report.note(
        f"token cache: {train['tokens'] + val['tokens']:,} tokens"
        f" from {human_bytes(train['text_bytes'] + val['text_bytes'])} of text, divided by {manifest['divided_by']}"
        + (f"; {empty:,} empty documents passed over" if empty else ""),
        seconds=round(seconds, 3),
    )
