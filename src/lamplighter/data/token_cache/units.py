"""The units of a token cache: which range of the files is which unit of work, and one unit being written.

In:  a source and the size of a unit; blocks of text, a division, an encoder.
Out: a BuildPlan (None for a source that only it can read, text by text); of each unit train-00007.bin, .idx and .hash, the
     same for val, and a record of them. Nothing counts until its marker is written (builder.py).

The plan is a pure function of files and settings. The number of workers plays no part, so neither do they in the files
that come out. Large files are cut into ranges of bytes without being opened, small ones go together, packed ones and
other kinds stay whole. A unit is written in a worker (`start_worker`, `make_unit`) or in the process that reads a source of
its own.
"""

from __future__ import annotations

import errno
import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from lamplighter.data.sources import Source
from lamplighter.data.sources.file_source import FileSource
from lamplighter.data.split import MB, CacheSettings, Pieces, Split, Splitter, Survey
from lamplighter.data.token_cache.encoder import Encoder, Ids, Recipe, make_encoder, renewed
from lamplighter.errors import BadData, CannotWrite
from lamplighter.readers import ranges
from lamplighter.readers.bad_records import BadRecords
from lamplighter.readers.local import LocalFile, is_packed, kind_of, suffix_of
from lamplighter.readers.ranges import ReadOptions, Span, TextBlock
from lamplighter.rundir import cannot_write, free_bytes, human_bytes

LEAST_BYTES, USUAL_BYTES = 4 * MB, 64 * MB
_MOST_UNITS = 1024  # of a very large corpus: a shard is a file, and an open one while it is read
_PACKED_BY = 4  # text is packed about so well
_CUT_SUFFIXES = {".jsonl", ".ndjson"}
SIDES = ("train", "val")
_KINDS = (
    "bin",
    "idx",
    "hash",
)  # ids; where documents begin in it (u8); hashes of its texts (u8), until the sides are checked
_READ_BYTES = 1 << 22
_FEW = 256  # texts, from which on they are not copied one by one

Record = dict[str, Any]


# ---------------------------------------------------------------- which units there are


@dataclass(frozen=True)
class Unit:
    """What one worker turns into one shard of each side."""

    number: int
    spans: tuple[Span, ...]

    @property
    def bytes(self) -> int:
        return sum(span.stop - span.start for span in self.spans)

    def __str__(self) -> str:
        others = f" and {len(self.spans) - 1} more files" if len(self.spans) > 1 else ""
        return f"{self.spans[0]}{others}"

    def place(self, done: int) -> str:
        """What is being read when so many bytes are behind it."""
        number = bisect_right(self._ends, done)
        if number == len(self.spans):
            return str(self.spans[-1])
        span = self.spans[number]
        return f"{span.path} at byte {span.stop - self._ends[number] + done:,}"

    @cached_property
    def _ends(self) -> list[int]:
        """How many bytes of the unit are behind each span: asked for at every tick, of units of up to a million files."""
        return list(accumulate(span.stop - span.start for span in self.spans))


@dataclass(frozen=True)
class BuildPlan:
    """The units of a cache, and how their files are read."""

    units: list[Unit]
    how: ReadOptions

    def total_bytes(self) -> int:
        return sum(unit.bytes for unit in self.units)


def unit_bytes(total: int, settings: CacheSettings) -> int:
    """Small enough to share the work evenly and to lose little by a kill; a whole number of parts."""
    usual = min(max(total // 32, LEAST_BYTES), USUAL_BYTES)
    wanted = settings.unit_bytes or max(usual, total // _MOST_UNITS)
    part = ranges.PART_BYTES
    return wanted if wanted < part else -(-wanted // part) * part


def plan(source: Source, settings: CacheSettings) -> BuildPlan | None:
    """The units of files; None where the texts must be asked of the source one after the other."""
    files = source.local_files() if type(source) is FileSource else None
    if files is None or type(source) is not FileSource:
        return None
    size = unit_bytes(sum(file.size for file in files), settings)
    groups: list[list[Span]] = [[]]
    weight = 0
    for file in files:
        kind, length = _span_kind(file), file.size
        weighs = length * (_PACKED_BY if is_packed(file.path) else 1)
        if weight and weight + weighs > size:
            groups.append([])
            weight = 0
        if kind == "file" or length <= size:
            groups[-1].append(Span(file, kind, 0, length))
            weight += weighs
            continue
        for start in range(0, length, size):
            groups[-1].append(Span(file, kind, start, min(length, start + size)))
            groups.append([])
        weight = 0
    units = [Unit(number, tuple(spans)) for number, spans in enumerate(filter(None, groups))]
    how = ReadOptions(source.separator, source.text_key, source.bad.policy, min(ranges.PART_BYTES, size))
    return BuildPlan(units, how)


def _span_kind(file: LocalFile) -> str:
    if is_packed(file.path):
        return "file"
    kind = kind_of(file.path)
    if kind == "json":
        return "json" if suffix_of(file.path) in _CUT_SUFFIXES else "file"
    return "text" if kind in ("text", "") else "file"


def survey_plan(plan: BuildPlan, found: Survey, show: Callable[[int, str], None], bad: BadRecords) -> int:
    """Read the first documents of the plan; how many bytes were read for it."""
    done, reading = 0, bad.begin()
    for span in (span for unit in plan.units for span in unit.spans):
        is_document = span.kind == "text" and not plan.how.separator
        if is_document and found.has_sample():
            found.documents += span.start == 0  # no need to read it
            continue
        show(done, str(span))
        behind = 0
        for text_block, behind in ranges.read(span, plan.how, reading):
            found.add(text_block)
            show(done + behind, str(span))
            if found.is_enough():
                return done + behind
            if is_document and found.has_sample():
                break
        done += behind
    return done


# ---------------------------------------------------------------- one unit being written


@dataclass(frozen=True)
class UnitJob:
    """What every unit of a cache has in common; can be sent to another process."""

    folder: Path
    division: Split
    dtype: str
    end_of_text: int
    vocab_size: int


def bad_id(name: str, offset: int, found: int, vocab_size: int) -> BadData:
    return BadData(
        f"token id out of range: {name}:{offset:,}",
        f"id {found:,}, but the vocabulary has {vocab_size:,} tokens",
        "the cache is from another tokenizer, or damaged: build it again with --data.cache rebuild",
        cause="token_range",
    )


def full(folder: Path, size: int, error: OSError) -> CannotWrite:
    if error.errno != errno.ENOSPC:
        return cannot_write(folder, error)
    return CannotWrite(
        f"the disk is full: {folder}",
        f"{human_bytes(size)} more are needed, {human_bytes(free_bytes(folder))} are free",
        "free some space and start again: the finished shards are kept, and the build goes on after them",
    )


# ---------------------------------------------------------------- files


class _Growing:
    """A file that is appended to, with the hash of all of it; there from its first byte on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self.sha256 = hashlib.sha256()
        self._fd = -1

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        if not view:
            return
        try:
            if self._fd < 0:
                how = os.O_APPEND if self.bytes else os.O_TRUNC
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o644)
            at = 0
            while at < len(view):
                at += os.write(self._fd, view[at:])
        except OSError as error:
            raise full(self.path.parent, len(view), error) from error
        self.sha256.update(view)
        self.bytes += len(view)

    def go_on_at(self, size: int) -> None:
        """What a stopped process wrote after its last word is cut off."""
        os.truncate(self.path, size)
        self.read_on(size)

    def read_on(self, size: int) -> None:
        with open(self.path, "rb") as file:
            while self.bytes < size and (block := file.read(min(_READ_BYTES, size - self.bytes))):
                self.sha256.update(block)
                self.bytes += len(block)

    def entry(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "sha256": self.sha256.hexdigest()}

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def hash_first(path: Path, size: int) -> str:
    """sha256 of the first bytes of a file."""
    file = _Growing(path)
    file.read_on(size)
    return file.sha256.hexdigest()


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Shard:
    """One side's tokens of one unit."""

    def __init__(self, folder: Path, side: str, number: int) -> None:
        self.side = side
        self.files = {kind: _Growing(folder / f"{side}-{number:05d}.{kind}") for kind in _KINDS}
        self.counts = {"tokens": 0, "documents": 0, "text_bytes": 0}

    def add(self, tokens: Ids, starts: Ids, text_bytes: int) -> None:
        """Tokens with their end-of-text marks; `starts` says where documents begin among them."""
        self.files["bin"].write(tokens)
        self.files["idx"].write((starts + self.counts["tokens"]).astype("<u8"))
        more = {"tokens": len(tokens), "documents": len(starts), "text_bytes": text_bytes}
        self.counts = {name: count + more[name] for name, count in self.counts.items()}


# ---------------------------------------------------------------- the writer


class UnitWriter:
    """Divides, encodes and appends; what it holds in memory is one block of text."""

    def __init__(self, job: UnitJob, encoder: Encoder, number: int, open_val: bool | None = None) -> None:
        self.job, self.encoder, self.number = job, encoder, number
        self.divider = Splitter(job.division, open_val)
        self.shards = [_Shard(job.folder, side, number) for side in SIDES]
        self.read_bytes = 0

    def add(self, text_block: TextBlock) -> None:
        pieces = self.divider.pieces(text_block)
        self.read_bytes += sum(map(len, text_block.docs))
        ids, lengths = self.encoder.encode(pieces.texts)
        self._check(ids, lengths, pieces)
        sizes = np.fromiter(map(len, pieces.texts), np.int64, len(pieces.texts))
        for shard, chosen in zip(self.shards, (~pieces.val, pieces.val), strict=True):
            if chosen.any():
                ends = pieces.ends[chosen]
                tokens = _laid_out(ids, lengths, chosen, ends, self.job)
                own = lengths[chosen] + ends
                shard.add(tokens, (np.cumsum(own) - own)[pieces.begins[chosen]], int(sizes[chosen].sum()))
        for shard, chosen in zip(self.shards, (~pieces.hashes_val, pieces.hashes_val), strict=True):
            shard.files["hash"].write(pieces.hashes[chosen].astype("<u8"))

    def _check(self, ids: Ids, lengths: Ids, pieces: Pieces) -> None:
        """Every id must be one of the vocabulary."""
        if not len(ids) or int(ids.max()) < self.job.vocab_size:
            return
        first = int(np.argmax(ids >= self.job.vocab_size))
        piece = int(np.searchsorted(np.cumsum(lengths), first, "right"))
        shard = self.shards[int(pieces.val[piece])]
        before = (lengths + pieces.ends)[:piece][pieces.val[:piece] == pieces.val[piece]].sum()
        at = shard.counts["tokens"] + int(before) + first - int(lengths[:piece].sum())
        raise bad_id(shard.files["bin"].path.name, at, int(ids[first]), self.job.vocab_size)

    # -- what is kept of it

    def record(self) -> Record:
        """Counts, files and hashes as they are now."""
        files = {file.path.name: file for shard in self.shards for file in shard.files.values() if file.bytes}
        return {
            "unit": self.number,
            "sides": {shard.side: shard.counts for shard in self.shards},
            "empty": self.divider.empty,
            "open_val": self.divider.open_val,
            "read_bytes": self.read_bytes,
            "files": {name: file.entry() for name, file in files.items()},
        }

    def go_on(self, record: Record) -> None:
        """As if it had just written that record."""
        for shard in self.shards:
            shard.counts = dict(record["sides"][shard.side])
            for file in shard.files.values():
                if entry := record["files"].get(file.path.name):
                    file.go_on_at(entry["bytes"])
        self.divider.empty, self.divider.open_val = record["empty"], record["open_val"]
        self.read_bytes = record["read_bytes"]

    def close(self) -> Record:
        """The files are whole; a second call does nothing more."""
        for shard in self.shards:
            for file in shard.files.values():
                file.close()
        return self.record()

    def __enter__(self) -> UnitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _laid_out(ids: Ids, lengths: Ids, chosen: Ids, ends: Ids, job: UnitJob) -> Ids:
    """The ids of the chosen texts, each with an end-of-text after it where it ends."""
    if len(lengths) <= _FEW:
        stops = np.cumsum(lengths)
        rows: list[Ids] = []
        mark = np.array([job.end_of_text], np.uint32)
        for at, ended in zip(np.flatnonzero(chosen).tolist(), ends.tolist(), strict=True):
            rows.append(ids[stops[at] - lengths[at] : stops[at]])
            if ended:
                rows.append(mark)
        return np.concatenate(rows, dtype=job.dtype, casting="unsafe")
    if not chosen.all():
        ids, lengths = ids[np.repeat(chosen, lengths)], lengths[chosen]
    is_text = np.ones(len(ids) + int(ends.sum()), bool)
    is_text[(np.cumsum(lengths + ends) - 1)[ends]] = False
    tokens = np.full(len(is_text), job.end_of_text, job.dtype)
    tokens[is_text] = ids
    return tokens


# ---------------------------------------------------------------- a unit of files


@dataclass
class _Worker:
    job: UnitJob
    how: ReadOptions
    recipe: Recipe
    encoder: Encoder
    tell: Callable[[int, int], None]


_worker: _Worker | None = None


def start_worker(job: UnitJob, how: ReadOptions, recipe: Recipe, cells: Any) -> None:
    """In a process of its own: load the encoder; progress goes to a cell of shared memory for each unit."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # one worker, one core
    start_here(job, how, recipe, make_encoder(recipe), cells.__setitem__)


def start_here(
    job: UnitJob, how: ReadOptions, recipe: Recipe, encoder: Encoder, tell: Callable[[int, int], None]
) -> None:
    """In this process."""
    global _worker
    _worker = _Worker(job, how, recipe, encoder, tell)


def make_unit(unit: Unit) -> Record:
    """Read, divide, encode and write one unit."""
    assert _worker is not None
    job, how = _worker.job, _worker.how
    bad = how.bad_records()
    reading = bad.begin()
    lines: list[int] = []  # of each span
    _worker.encoder = renewed(_worker.encoder, _worker.recipe)
    writer = UnitWriter(job, _worker.encoder, unit.number, _open_side(unit, how, job.division))
    done = 0
    with writer:
        for span in unit.spans:
            before = reading.lines
            for text_block, behind in ranges.read(span, how, reading):
                writer.add(text_block)
                _worker.tell(unit.number, done + behind)
            done += span.stop - span.start
            lines.append(reading.lines - before)
            _worker.tell(unit.number, done)
        return {**writer.close(), "faults": bad.listed, "bad": reading.count, "lines": lines}


def _open_side(unit: Unit, how: ReadOptions, division: Split) -> bool | None:
    """The side of the document that a unit goes on with, found as the unit before has found it."""
    span = unit.spans[0]
    if span.kind != "text" or how.separator or not span.start:
        return None
    if not division.below:
        return False
    if division.by == "documents":
        first = ranges.first_part(span, how)
        return bool(division.is_val(division.hashes([first]))[0]) if first else None
    before = ranges.part_before(span, how)
    return bool(division.is_val(division.block_hashes(before)[1])[-1]) if before else None
