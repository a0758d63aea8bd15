"""The plan of a token cache: which range of the files is which unit of work; a pure function of files and settings.

In:  a source and the size of a unit.
Out: units, each a list of spans; None for a source that only it can read, text by text.

The number of workers plays no part, so neither do they in the files that come out. Large files are cut into ranges of
bytes without being opened, small ones go together, packed ones and other kinds stay whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from lamplighter.data.sources import Source
from lamplighter.data.sources.file_source import FileSource
from lamplighter.data.split import MB, CacheSettings, Survey
from lamplighter.readers import ranges
from lamplighter.readers.bad_records import BadRecords
from lamplighter.readers.local import LocalFile, is_packed, kind_of, suffix_of
from lamplighter.readers.ranges import ReadOptions, Span, read

LEAST_BYTES, USUAL_BYTES = 4 * MB, 64 * MB
_MOST_UNITS = 1024  # of a very large corpus: a shard is a file, and an open one while it is read
_PACKED_BY = 4  # text is packed about so well
_CUT_SUFFIXES = {".jsonl", ".ndjson"}


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
        for text_block, behind in read(span, plan.how, reading):
            found.add(text_block)
            show(done + behind, str(span))
            if found.is_enough():
                return done + behind
            if is_document and found.has_sample():
                break
        done += behind
    return done
