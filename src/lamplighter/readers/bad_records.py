"""Bad lines and rows of a corpus: each with file, line and byte; set aside and counted up to a limit, or refused, by policy.

In:  bad lines as the readers meet them, and how many lines there were.
Out: an event for each (the first hundred), one verdict, the counts; BadData where there are more than the limit allows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from lamplighter import report
from lamplighter.errors import BadData

LIMIT = 0.001  # of the lines of a corpus: more is another encoding or another format (a Latin-1 book has so few)
_FLOOR = 5  # so many are borne in a small corpus too, as long as they are no more than a tenth of its lines
SOON = 200  # so many bad lines, and it is checked before the end of the corpus
_EVENTS = 100
_LISTED = 20_000  # so many are kept with their places
_FOR_MANY = (
    "is the file another format than its name says? if not, lamp data clean leaves such lines out,"
    " and a larger data.bad_limit sets them aside"
)
PACKED_TIMES = 8  # more than text is ever packed: packed files count as so many bytes when lines are estimated


class BadRecords:
    """The bad lines of a corpus, each told once however often the corpus is read."""

    def __init__(
        self, policy: str = "set_aside", limit: float = LIMIT, size: int | None = None, quiet: bool = False
    ) -> None:
        self.policy, self.limit, self.size, self.quiet = policy, limit, size, quiet
        self.known: set[tuple[str, int]] = set()
        self.reasons: Counter[str] = Counter()
        self.listed: list[dict[str, Any]] = []  # as JSON, for another process to judge
        self.warned: Counter[str] = Counter()

    def begin(self, count: int = 0) -> BadInReading:
        """Begin one reading of the corpus, or go on where `count` bad lines are behind."""
        return BadInReading(self, count)

    def note(self, path: str, line: int, at: int, error: BadData) -> None:
        """A line is set aside; the first one is a verdict."""
        if (path, at) in self.known:
            return
        self.known.add((path, at))
        self.reasons[error.why.split(":")[0]] += 1
        if len(self.listed) < _LISTED:
            self.listed.append({"path": path, "line": line, "at": at, "error": [error.what, error.why, error.next]})
        if self.quiet:
            return
        if len(self.known) == 1:
            verdict = report.Verdict(
                "broken",
                "dirty_text",
                f"{error.what}: {error.why}; set aside, and so are others like it, up to {self.limit:.3g} of all lines",
                "mend the file, or refuse such lines with --data.bad_text refuse",
                "set_aside",
                culprit={"path": path, "line": line, "byte": at},
            )
            report.verdict(verdict)
        if len(self.known) <= _EVENTS:
            report.event("set_aside", path=path, line=line, byte=at, why=error.why)

    def warn(self, path: str, bad: int, lines: int, unit: str) -> None:
        """At the end of a file, once: how many."""
        if self.warned[path] != bad and not self.quiet:
            report.warn(f"{bad} of {lines:,} {unit} of {path} set aside, as not text", path=path, count=bad)
        self.warned[path] = bad


class BadInReading:
    """The bad lines of one reading of the corpus, over all of its files."""

    def __init__(self, corpus: BadRecords, count: int = 0) -> None:
        self.corpus, self.count = corpus, count
        self.lines = 0
        self.first: BadData | None = None

    def file(self, path: object, size: int | None = None, unit: str = "lines") -> BadInFile:
        """Begin one file; `size` in unpacked bytes, as far as that is known."""
        return BadInFile(self, str(path), size, unit)

    def end(self, share_read: float = 1.0) -> None:
        """The corpus is read, or the rest of it from a cursor on, which was this share of it."""
        self.check(self.lines / max(share_read, 1e-9))

    def check(self, lines: float) -> None:
        """Refuse a corpus of so many lines where too many of them are bad."""
        limit = self.corpus.limit
        if not self.count or self.count <= max(limit * lines, min(_FLOOR, lines // 10)):
            return
        why = (
            f"so in {self.count:,} of {round(lines):,} lines; the limit is {limit:.3g} of all lines (data.bad_limit),"
            f" or {_FLOOR} lines where that is no more than a tenth of them"
        )
        if (first := self.first) is None:
            raise BadData("too much that is not text", why, _FOR_MANY)
        one_by_one = first.next.startswith("mend or remove")  # what the readers advise for a single line
        raise BadData(
            first.what, f"{first.why} ({why})", _FOR_MANY if one_by_one and self.count > _FLOOR else first.next
        )


class BadInFile:
    """The bad lines of one file in one reading."""

    def __init__(self, reading: BadInReading, path: str, size: int | None, unit: str) -> None:
        self.reading, self.path, self.size, self.unit = reading, path, size, unit
        self.here = 0
        self.end_at = size  # what `at` goes up to: a table of Parquet counts in rows, not in bytes

    @property
    def count(self) -> int:
        """Of all files up to here, for the cursor."""
        return self.reading.count

    def set_aside(self, line: int, at: int, error: BadData) -> None:
        """Count a bad line; refuse it by policy, or as soon as there are too many for a corpus of this size."""
        reading, corpus = self.reading, self.reading.corpus
        if corpus.policy == "refuse":
            raise error
        reading.count += 1
        self.here += 1
        reading.first = reading.first or error
        corpus.note(self.path, line, at, error)
        if reading.count >= SOON and reading.count % (SOON // 4) == 0:
            reading.check(self._expected_lines(line, at))

    def _expected_lines(self, line: int, at: int) -> float:
        """Of the corpus, if it goes on as this file has begun."""
        if not self.size or not self.end_at or not self.reading.corpus.size:
            return self.reading.lines + line
        in_file = line * max(1.0, self.end_at / max(1, at))
        return max(self.reading.lines + line, in_file * self.reading.corpus.size / self.size)

    def end(self, lines: int) -> None:
        """The file is read."""
        self.reading.lines += lines
        if self.here:
            self.reading.corpus.warn(self.path, self.here, lines, self.unit)
