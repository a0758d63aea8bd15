"""What is not text: each bad line or row with file, line and byte; set aside and counted, or refused, by policy.

In:  bad lines as the readers of files meet them, and how many lines there were.
Out: an event for each (the first hundred), one verdict, the counts; BadData where there is too much of it to be dirt.
"""

from __future__ import annotations

from collections import Counter

from lamplighter import report
from lamplighter.errors import BadData

TOO_MUCH = 0.001  # of a file's lines: more is another encoding or another format, not dirt (a Latin-1 book has so few)
SOON = 200  # so many bad lines, and it is checked before the end of the file
TOLD = 100


class Dirt:
    """The bad lines of a source, each counted once however often the source is read."""

    def __init__(self, policy: str = "set_aside") -> None:
        self.policy = policy
        self.known: set[tuple[str, int]] = set()
        self.reasons: Counter[str] = Counter()
        self.told: Counter[str] = Counter()

    def file(self, path: object, bad: int = 0, unit: str = "lines") -> FileDirt:
        """Begin one reading of one file, or go on where `bad` lines are behind."""
        return FileDirt(self, str(path), bad, unit)

    def met(self, path: str, line: int, at: int, error: BadData) -> None:
        """A line is set aside; the first one is a verdict."""
        if (path, at) in self.known:
            return
        self.known.add((path, at))
        self.reasons[error.why.split(":")[0]] += 1
        if len(self.known) == 1:
            verdict = report.Verdict(
                "broken",
                "dirty_text",
                f"{error.what}: {error.why}; set aside, and so are others like it, up to {TOO_MUCH:.1%} of a file",
                "mend the file, or refuse such lines with --data.bad_text refuse",
                "set_aside",
                culprit={"path": path, "line": line, "byte": at},
            )
            report.verdict(verdict)
        if len(self.known) <= TOLD:
            report.event("set_aside", path=path, line=line, byte=at, why=error.why)

    def tell(self, path: str, bad: int, lines: int, unit: str) -> None:
        """At the end of a file, once: how many."""
        if self.told[path] == bad:
            return
        self.told[path] = bad
        report.warn(f"{bad} of {lines:,} {unit} of {path} set aside, as not text", path=path, count=bad)


class FileDirt:
    """One reading of one file."""

    def __init__(self, dirt: Dirt, path: str, bad: int, unit: str) -> None:
        self.dirt, self.path, self.bad, self.unit = dirt, path, bad, unit
        self.first: BadData | None = None

    def set_aside(self, line: int, at: int, error: BadData, count: int | None = None) -> None:
        """Count a bad line; refuse by policy, or as soon as there are too many. `count`: rows, where that is not `line`."""
        if self.dirt.policy == "refuse":
            raise error
        self.bad += 1
        self.first = self.first or error
        self.dirt.met(self.path, line, at, error)
        if self.bad >= SOON:
            self._refuse_too_much(count or line)

    def end(self, lines: int) -> None:
        """The file is read."""
        if self.bad:
            self._refuse_too_much(lines)
            self.dirt.tell(self.path, self.bad, lines, self.unit)

    def _refuse_too_much(self, lines: int) -> None:
        if self.bad <= TOO_MUCH * max(1, lines):
            return
        share = f"so in {self.bad:,} of {lines:,} {self.unit}"
        if (first := self.first) is not None:
            raise BadData(first.what, f"{first.why} ({share})", first.next)
        raise BadData(f"too much that is not text: {self.path}", share, "mend the file, or take it out of data.paths")
