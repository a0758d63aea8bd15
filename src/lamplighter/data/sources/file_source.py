"""What a source of documents is; and files as one, here or elsewhere, each text with a cursor that seeks.

In:  files that were found; how they are to be read.
Out: texts in a fixed order. Nothing is repaired in silence: a line that is not UTF-8 text is set aside and counted, or
     refused, with file, line and byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from lamplighter import report
from lamplighter.errors import BadData
from lamplighter.readers.bad_records import LIMIT, BadInReading, BadRecords
from lamplighter.readers.files import PART_CHARS, Item, TextFormat, read_texts, unpacked_bytes
from lamplighter.readers.lines import starts_array
from lamplighter.readers.local import LocalFile, Tell, hash_files, is_packed, kind_of, local_file
from lamplighter.readers.ranges import RangeFile
from lamplighter.readers.records import Cursor, Position, Texts, digest
from lamplighter.rundir import human_bytes


class Source(Protocol):
    """Texts in a fixed order. A user's own source needs only `documents`, or may be a list or a generator function.

    Its `documents` is given the number of texts that are behind, or its own cursor where its `position` has one.
    """

    def fingerprint(self) -> str:
        """A string that changes when the documents change."""

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        """The texts after `start`, or all. A `Part` counts as one text and says that its document goes on."""

    def total_bytes(self) -> int | None:
        """How much there is to read (on disk, packed), where that is known."""

    def position(self) -> Position:
        """How far the latest reading has come; asked before each text as well as after it.

        Its cursor is the place after the latest text: `documents(cursor)` goes on with the next one, in any process.
        """


class FileSource:
    """Text, JSON, CSV and Parquet files, packed or not, one after the other."""

    def __init__(
        self,
        files: Sequence[Item | Path],
        separator: str | None = None,
        text_key: str = "text",
        hash_store: Path | None = None,
        bad_text: str = "set_aside",
        bad_limit: float = LIMIT,
    ) -> None:
        self.items: list[Item] = [local_file(file) if isinstance(file, Path) else file for file in files]
        self.separator, self.text_key, self.hash_store = separator, text_key, hash_store
        sizes = [unpacked_bytes(item) for item in self.items]
        self.bad = BadRecords(bad_text, bad_limit, None if None in sizes else sum(size or 0 for size in sizes))
        self._before = [0, *accumulate(item.size or 0 for item in self.items)]  # bytes of the files before each
        self._fingerprint = ""
        self._here = (self.items[0].name, 0)
        self._cursor: Cursor = {}

    def __str__(self) -> str:
        others = f" and {len(self.items) - 1} more files" if len(self.items) > 1 else ""
        total = self.total_bytes()
        return f"{self.items[0].name}{others}, {'size unknown' if total is None else human_bytes(total)}"

    def local_files(self) -> list[LocalFile] | None:
        """Its files; None where one of them is elsewhere."""
        local = [item for item in self.items if isinstance(item, LocalFile)]
        return local if len(local) == len(self.items) else None

    def total_bytes(self) -> int | None:
        return None if self.bad.size is None else self._before[-1]

    def position(self) -> Position:
        item, done = self._here
        return Position(item, done, self._cursor)

    def bytes_behind(self) -> int:
        """As position().bytes_done, without what is read ahead of the latest text (known of files that are not packed)."""
        number, at = self._cursor.get("file", 0), self._cursor.get("at")
        before = self._before[number]
        return max(before, self._here[1]) if at is None or is_packed(self.items[number].name) else before + int(at)

    def fingerprint(self) -> str:
        """The content of every file in order (of remote ones: address, size and mark), and how it is read."""
        if not self._fingerprint:
            local = [item for item in self.items if isinstance(item, LocalFile)]
            hashed = iter(hash_files(local, self.hash_store))
            self.items = [next(hashed) if isinstance(item, LocalFile) else item for item in self.items]
            content = [
                [item.content if isinstance(item, LocalFile) else item.identity(), kind_of(item.name)]
                for item in self.items
            ]
            if len(local) < len(self.items):
                count = len(self.items) - len(local)
                report.note(f"{count} remote files count as changed when address, size, ETag or date change")
            self._fingerprint = digest([content, self.separator, self.text_key, PART_CHARS, self.bad.policy])
        return self._fingerprint

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        """Every text that is not empty, after `start`."""
        if start and not 0 <= start.get("file", -1) < len(self.items):
            why = f"it is {start}, and there are {len(self.items)} files"
            raise BadData("a place that is not in these files", why, "begin again; a token cache: --data.cache rebuild")
        self._cursor = start or {}
        self._here = (self.items[self._cursor.get("file", 0)].name, self.bytes_behind() if start else 0)
        return self._read(self._cursor)

    def _read(self, start: Cursor) -> Iterator[str]:
        first, some = int(start.get("file", 0)), bool(start)
        bad = self.bad.begin(int(start.get("bad", 0)))
        for number in range(first, len(self.items)):

            def tell(name: str, at: int, done: int = self._before[number]) -> None:
                self._here = (name, done + at)

            for text, after in self.texts(number, start if number == first else None, tell, bad):
                self._cursor = after
                some = True
                yield text
            self._here = (self.items[number].name, self._before[number + 1])
        whole = self._before[-1]
        bad.end((whole - self._before[first]) / whole if whole else 1.0)
        if not some:
            advice = "check data.paths, data.separator and data.text_key"
            raise BadData(f"no text in {self}", "every document is empty", advice)

    def texts(
        self,
        file: int,
        start: Cursor | None = None,
        tell: Tell = lambda *_: None,
        bad: BadInReading | None = None,
    ) -> Texts:
        """The texts of one file after a cursor in it, each with the cursor after it; the source's position stays."""
        form = TextFormat(self.separator, self.text_key)
        if bad is None:
            bad = self.bad.begin(int((start or {}).get("bad", 0)))
        return read_texts(self.items[file], form, bad, tell=tell, start=start, number=file)

    def cursor_at(self, file: int, byte: int) -> Cursor | None:
        """The first place at or after a byte of one file where a text begins: to read a part of a file alone.

        For local JSON lines and text with a separator, not packed; None for other kinds, and where no text begins there.
        """
        item = self.items[file]
        kind = kind_of(item.name)
        lines = kind == "json" and isinstance(item, LocalFile) and not starts_array(item.path)
        text = kind in ("text", "") and bool(self.separator)
        if not isinstance(item, LocalFile) or is_packed(item.name) or not (lines or text):
            return None
        with RangeFile(item) as opened:
            at = opened.cut_line(byte) if lines else opened.cut_separator(byte, (self.separator or "").encode())
            return {"file": file, "at": at, "line": opened.line_at(at)} if at < item.size else None
