"""The whole of `lamp data clean`: items to parts (in parallel, each whole or not there), parts to shards, the log and the table.

In:  paths, a folder, the rules.
Out: DIR/clean-00000.jsonl ... for `lamp train --data.paths DIR`, and DIR/log/ with the rejected, the report and the manifest.

The files in log/ and parts/ have endings that no reader of documents takes. A killed job run again goes on: a part with its
marker is done, everything after the parts is made again from them, and comes out the same to the byte.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from lamplighter import report
from lamplighter.clean import dedup, worker
from lamplighter.clean.raw_documents import Item, find_items
from lamplighter.clean.rules import UNREAD, Rejected, Rules, require_libraries
from lamplighter.clean.worker import CleanBatch, CleanCounts
from lamplighter.errors import AlreadyRunning, BadData, CannotWrite, ChildLost, UsageError
from lamplighter.procs import lock, pool
from lamplighter.rundir import free_bytes, fsync_folder, hash_file, human_bytes, read_record, write_atomic, write_json

PARTS, LOG, LOCK = "parts", "log", "lock"
REJECTED, MANIFEST, REPORT = "rejected.log", "manifest.log", "report.log"


@dataclass(frozen=True)
class CleanOutcome:
    """The totals as JSON, the files made, and whether they were there before."""

    totals: dict[str, Any]
    shards: list[str]
    seconds: float
    found: bool = False


def run(paths: list[str], out: Path | None, rules: Rules, workers: int, dry: bool = False) -> CleanOutcome:
    """Clean; with `dry` nothing is written, and the totals have the examples."""
    started = time.monotonic()
    if out is not None and any(Path(path).expanduser().resolve() == out.resolve() for path in paths):
        raise UsageError(f"{out} is both input and output", "what is there would be replaced", "choose another --out")
    require_libraries(rules)
    items, refused = find_items(paths, out, rules)
    totals = CleanCounts(len({item.path for item in items}), sum(item.size for item in items))
    for one in refused:
        totals.documents += one.reason != "other_ending"  # these were not looked at
        totals.reject(one)
    if dry or out is None:
        _try(worker.batches_of(items, "", rules), rules, workers, totals)
        _warn_of_unread(totals)
        return CleanOutcome(totals.as_json(), [], time.monotonic() - started)
    held = _prepare(out, items)
    try:
        known = _finished(out, items, refused, rules)
        if known is not None:
            (out / PARTS / LOCK).unlink(missing_ok=True)
            return CleanOutcome(known["totals"], list(known["shards"]), time.monotonic() - started, found=True)
        batches = worker.batches_of(items, str(out / PARTS), rules)
        _say_what_is_reused(out, batches)
        with report.phase("clean", total=totals.bytes_in, unit="B") as p:
            for part in _each(batches, workers, p):
                totals.add(part)
        shards = _write(out, batches, refused, rules, totals)
        (out / PARTS / LOCK).unlink(missing_ok=True)  # while it is held: see lock.hold
        _warn_of_unread(totals)
    except OSError as error:
        raise _cannot_write(out, error) from error
    finally:
        os.close(held)
    return CleanOutcome(totals.as_json(), shards, time.monotonic() - started)


# ---------------------------------------------------------------- before


def _prepare(out: Path, items: list[Item]) -> int:
    """The folders and the lock. A folder with documents of somebody else is refused: they would be trained on."""
    try:
        (out / PARTS).mkdir(parents=True, exist_ok=True)
        (out / LOG).mkdir(exist_ok=True)
        strangers = [path.name for path in out.iterdir() if path.is_file() and not _is_ours(path.name)]
        if strangers:
            raise UsageError(
                f"{out} has other files in it", f"such as {strangers[0]}", "choose an empty or new folder for --out"
            )
        held = lock.hold(out / PARTS / LOCK)
    except OSError as error:
        raise _cannot_write(out, error) from error
    if held is None:
        raise AlreadyRunning(f"another lamp data clean works in {out}", "it holds the lock", "wait for it, or choose another --out")  # fmt: skip
    needed = sum(item.size for item in items)
    if free_bytes(out) < 2 * needed:
        report.warn(f"{human_bytes(free_bytes(out))} are free in {out}; up to {human_bytes(2 * needed)} may be needed")
    return held


def _is_ours(name: str) -> bool:
    return (name.startswith("clean-") and name.endswith(".jsonl")) or name.startswith(".")


def _cannot_write(out: Path, error: OSError) -> CannotWrite:
    if error.errno == errno.ENOSPC:
        free = human_bytes(free_bytes(out))
        return CannotWrite(f"the disk is full: {out}", f"{free} are free there", "free some space and run it again: what is finished is kept")  # fmt: skip
    return CannotWrite(f"cannot write to {out}", error.strerror or str(error), "choose another --out", cause="cannot_write")  # fmt: skip


def _identity(items: list[Item], refused: list[Rejected], rules: Rules) -> dict[str, Any]:
    return {
        "rules": rules.fingerprint(),
        "items": [item.identity() for item in items],
        "refused": [[one.place, one.reason] for one in refused],
    }


def _finished(out: Path, items: list[Item], refused: list[Rejected], rules: Rules) -> dict[str, Any] | None:
    """What an earlier run made of the same files by the same rules, if it is all still there."""
    manifest = read_record(out / LOG / MANIFEST)
    if not manifest:
        return None
    now = json.loads(json.dumps(_identity(items, refused, rules)))
    if manifest.get("rules") != now["rules"]:
        report.note("the rules are not those of the last time: everything is cleaned again")
    elif any(manifest.get(name) != now[name] for name in ("items", "refused")):
        report.note(
            "the input is not that of the last time: what changed is cleaned again, and the output is made anew"
        )
    elif any(_size(out / name) != size for name, size in manifest["sizes"].items()):
        report.note("the output of the last time is not all there: it is made again")
    else:
        return manifest
    return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _say_what_is_reused(out: Path, batches: list[CleanBatch]) -> None:
    names = {batch.name for batch in batches}
    done = list((out / PARTS).glob("*.done"))
    usable = sum(worker.is_done(out / PARTS, batch) for batch in batches)
    if usable:
        report.note(f"{usable:,} of {len(batches):,} parts are there from an earlier run")
    if stale := len(done) - usable:
        report.note(f"{stale:,} parts of an earlier run are not used: the rules or their files changed")
    for path in done:
        if path.stem not in names:
            worker.remove(out / PARTS, path.stem)


def _warn_of_unread(counts: CleanCounts) -> None:
    """Files that could not be read, or not to their end, are named: a short corpus should surprise nobody."""
    if unread := {reason: counts.rejected[reason] for reason in UNREAD if counts.rejected[reason]}:
        words = "; ".join(
            f"{reason} {count:,} ({'the first one is ' if count > 1 else ''}{counts.first[reason][0]}: {counts.first[reason][1]})"
            for reason, count in unread.items()
        )
        report.warn(f"left out, as it cannot be read: {words}", count=sum(unread.values()))


# ---------------------------------------------------------------- items to parts


def _each(batches: list[CleanBatch], workers: int, p: report.Phase) -> Iterator[dict[str, Any]]:
    """The counts of each part, in order; the phase hears of every block that any worker has read."""
    workers = min(workers, len(batches)) or 1
    # a number without a lock: a lost count is only late news
    counter: Any = multiprocessing.get_context("spawn").RawValue("q", 0) if workers > 1 else p.tick
    waiting_for = batches[0].path if batches else ""

    def meanwhile() -> None:
        if workers > 1:
            p.set(counter.value, waiting_for)

    try:
        results = pool.each(worker.make, batches, workers, name=lambda one: one.path, start=worker.begin, start_with=(counter,), tick=meanwhile)  # fmt: skip
        for number, (_, part) in enumerate(results, 1):
            waiting_for = batches[min(number, len(batches) - 1)].path
            meanwhile()
            yield part
    except ChildLost as error:
        raise ChildLost(error.what, error.why, "fewer at a time: --workers 1; what is finished is kept") from error


def _try(batches: list[CleanBatch], rules: Rules, workers: int, totals: CleanCounts) -> None:
    """The same without a trace on the disk."""
    records: list[bytes] = []
    with report.phase("try", total=totals.bytes_in, unit="B") as p:
        for part in _each(batches, workers, p):
            totals.add(part)
            records.append(part["prints"])
    twins = _twins(np.frombuffer(b"".join(records), dtype=dedup.RECORD), rules)
    totals.rejected.update(twin.reason for twin in twins.values())
    totals.kept -= len(twins)


# ---------------------------------------------------------------- parts to shards


def _twins(records: Any, rules: Rules) -> dict[int, dedup.Twin]:
    if rules.keep_duplicates or not len(records):
        return {}
    with report.phase("duplicates", total=dedup.columns(rules.near), unit="columns") as p:
        return dedup.find_twins(records, rules.near, p.tick)


def _write(
    out: Path, batches: list[CleanBatch], refused: list[Rejected], rules: Rules, totals: CleanCounts
) -> list[str]:
    """Shards, log and manifest, from the parts alone; the parts go last."""
    folder = out / PARTS
    (out / LOG / MANIFEST).unlink(missing_ok=True)  # from here on the old output is not the last word
    prints = folder / "all.prints"
    with open(prints, "wb") as file:
        for batch in batches:
            file.write((folder / f"{batch.name}.prints").read_bytes())
    size = prints.stat().st_size
    records = np.memmap(prints, dtype=dedup.RECORD, mode="r") if size else np.zeros(0, dtype=dedup.RECORD)
    twins = _twins(records, rules)
    del records
    shards = _Shards(out, int(rules.shard_mb * 1e6))
    places: dict[int, str] = {}
    wanted = {twin.first for twin in twins.values()}
    total = sum((folder / f"{batch.name}.part").stat().st_size for batch in batches)
    rejected_path = out / LOG / f".{REJECTED}.tmp"
    number = 0
    with report.phase("write", total=total, unit="B") as p, open(rejected_path, "w", encoding="utf-8") as log:
        for one in refused:
            log.write(one.as_line())
        for batch in batches:
            p.tick(0, batch.path)
            with open(folder / f"{batch.name}.rejected", encoding="utf-8") as file:
                shutil.copyfileobj(file, log)
            with open(folder / f"{batch.name}.part", "rb") as lines:
                for line in lines:
                    if number in wanted:
                        places[number] = json.loads(line)["source"]
                    if twin := twins.get(number):
                        totals.rejected[twin.reason] += 1
                        log.write(_as_rejected(line, twin, places[twin.first]).as_line())
                    else:
                        shards.add(line)
                    number += 1
                    p.tick(len(line))
        log.flush()
        os.fsync(log.fileno())
    names = shards.close()
    totals.kept, totals.bytes_out = shards.documents, shards.bytes
    rejected_path.replace(out / LOG / REJECTED)
    items = [item for batch in batches for item in batch.items]
    _finish(out, items, refused, rules=rules, totals=totals, names=names)
    return names


def _as_rejected(line: bytes, twin: dedup.Twin, first: str) -> Rejected:
    found = json.loads(line)
    why = f"the same as {first}" if twin.likeness == 1.0 else f"{twin.likeness:.0%} like {first}"
    return Rejected(found["source"], twin.reason, why, {"likeness": twin.likeness}, found["text"][:160])


class _Shards:
    """Files of a set size, under other names until all of them are there."""

    def __init__(self, out: Path, limit: int) -> None:
        self.out, self.limit = out, limit
        self.names: list[str] = []
        self.file: IO[bytes] | None = None
        self.in_file = self.documents = self.bytes = 0

    def add(self, line: bytes) -> None:
        if self.file is None or self.in_file >= self.limit:
            self._next()
        assert self.file is not None
        self.file.write(line)
        self.in_file += len(line)
        self.bytes += len(line)
        self.documents += 1

    def _next(self) -> None:
        self._end()
        self.names.append(f"clean-{len(self.names):05}.jsonl")
        self.file, self.in_file = open(self.out / f".{self.names[-1]}.tmp", "wb"), 0

    def _end(self) -> None:
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None

    def close(self) -> list[str]:
        self._end()
        for name in self.names:
            (self.out / f".{name}.tmp").replace(self.out / name)
        for path in self.out.glob("clean-*.jsonl"):
            if path.name not in self.names:
                path.unlink()
        fsync_folder(self.out)
        return self.names


def _finish(
    out: Path, items: list[Item], refused: list[Rejected], rules: Rules, totals: CleanCounts, names: list[str]
) -> None:
    """The report, then the manifest, then no more parts."""
    made = [*names, f"{LOG}/{REJECTED}", f"{LOG}/{REPORT}"]
    write_atomic(out / LOG / REPORT, table(totals.as_json(), examples=True))
    with report.phase("manifest", total=sum(_size(out / name) for name in made), unit="B") as p:
        hashes = {name: hash_file(out / name, lambda n, name=name: p.tick(n, name)) for name in made}  # type: ignore[misc]
    sizes = {name: _size(out / name) for name in made}
    manifest = {**_identity(items, refused, rules), "settings": asdict(rules), "shards": names, "sizes": sizes, "sha256": hashes, "totals": totals.as_json()}  # fmt: skip
    write_json(out / LOG / MANIFEST, manifest)
    with report.phase("remove the parts", unit="files") as p:
        for path in (out / PARTS).iterdir():
            if path.name != LOCK:
                path.unlink()
                p.tick(1, path.name)


def refuse_nothing(outcome: CleanOutcome, out: Path | None) -> None:
    """Nothing kept is an error: the folder would train on nothing."""
    if outcome.totals["kept"]:
        return
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in outcome.totals["rejected"].items())
    where = f"see {out / LOG / REJECTED}" if out else "look at the examples above"
    raise BadData("every document was rejected", reasons, where)


# ---------------------------------------------------------------- the table at the end


_MEANINGS = {
    "empty": "no text",
    "too_short": "too few words",
    "too_long": "over the size limit",
    "language": "another language",
    "letters": "too few letters",
    "word_length": "words too short or too long",
    "odd_symbols": "too many odd symbols",
    "broken_words": "too many broken words",
    "common_words": "hardly any common English word",
    "repeated_lines": "the same lines again and again",
    "repeated_words": "the same words again and again",
    "distinct_words": "too few different words",
    "duplicate": "the same as an earlier one",
    "near_duplicate": "nearly the same as an earlier one",
    "not_text": "cannot be decoded",
    "bad_line": "single lines that cannot be decoded",
    "bad_json": "not JSON",
    "bad_xml": "not well-formed XML",
    "no_text": "no text under the key",
    "mets": "METS: a list of files",
    "unknown_xml": "XML of an unknown kind",
    "unreadable": "cannot be read",
    "unknown_kind": "neither text nor a table of texts",
    "other_ending": "files of a folder that do not end as texts do",
    "bad_row": "rows that cannot be read",
    "cut_short": "torn or damaged; nothing of it is used",
    "changed": "changed while it was read",
    "error": "an error in cleaning it",
}


def table(totals: dict[str, Any], examples: bool = False) -> str:
    """Everything in one column of rows; with examples, what each rule did before and after."""
    documents, kept = totals["documents"], totals["kept"]
    rows = [
        f"{'files':<28}{totals['files']:>12,}   {human_bytes(totals['bytes_in'])}",
        f"{'documents':<28}{documents:>12,}",
        f"{'kept':<28}{kept:>12,}   {human_bytes(totals['bytes_out'])}   {_share(kept, documents)}",
    ]
    for reason, count in sorted(totals["rejected"].items(), key=lambda row: (-row[1], row[0])):
        unit = "lines" if reason == "bad_line" else ""
        rows.append(f"  {'rejected ' + reason:<26}{count:>12,}   {_MEANINGS.get(reason, '')} {unit}".rstrip())
    rules = totals["rules"]
    if rules["counts"]:
        rows += ["", f"{'what was done':<28}{'times':>12}   characters"]
        for rule, count in sorted(rules["counts"].items()):
            chars = rules["chars"].get(rule, 0)
            rows.append(f"  {rule:<26}{count:>12,}   {f'{chars:,}' if chars else ''}".rstrip())
    if totals["languages"]:
        named = ", ".join(f"{name} {count:,}" for name, count in list(totals["languages"].items())[:8])
        rows += ["", f"languages: {named}"]
    if examples:
        rows += _examples(rules["examples"])
    return "\n".join(rows) + "\n"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _examples(found: dict[str, list[list[str]]]) -> list[str]:
    rows: list[str] = []
    for rule in sorted(found):
        for place, before, after in found[rule]:
            rows += [
                "",
                f"{rule}: {_safe(place)}",
                f"  - {_safe(before)}",
                f"  + {_safe(after)}" if after else "  + (taken away)",
            ]
    return rows


def _safe(text: str) -> str:
    """Text from data, in one line, with nothing that steers a terminal."""
    flat = text.replace("\n", "\u23ce")
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in flat)
