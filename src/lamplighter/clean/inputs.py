"""Which files there are to clean, in a fixed order, and in which stretches they are worked on.

In:  paths, folders and patterns.
Out: items: a file, or a stretch of a long JSON-lines file; and what cannot even be looked at, with its reason.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from lamplighter import report
from lamplighter.clean.detect import JSON_SUFFIXES, MARKUP_SUFFIXES, PACKED_SUFFIXES, TEXT_SUFFIXES, is_known, suffix_of
from lamplighter.clean.rules import Rejected
from lamplighter.errors import InputMissing
from lamplighter.readers.local import no_such

STRETCH_BYTES = 32 << 20


@dataclass(frozen=True)
class Item:
    """A file or a stretch of it; `mark` changes when the file does."""

    path: str
    start: int
    end: int
    mark: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of its part: the same place gives the same name in every run."""
        return sha256(f"{self.path}\0{self.start}\0{self.end}".encode()).hexdigest()[:20]

    @property
    def size(self) -> int:
        return self.end - self.start


def find_items(patterns: list[str], out: Path | None) -> tuple[list[Item], list[Rejected]]:
    """Every file that the patterns name, each once; folders are searched for the known kinds, but not the output itself."""
    found: dict[Path, Path] = {}
    refused: list[Rejected] = []
    inside = out.resolve() if out else None
    with report.phase("find files", unit="files") as p:
        for pattern in patterns:
            for path in _matches(str(Path(pattern).expanduser()), refused):
                real = path.resolve()
                if inside is None or not real.is_relative_to(inside):
                    found.setdefault(real, path)
                    p.tick(1, str(path))
    items: list[Item] = []
    for path in found.values():
        try:
            items.extend(_stretches(path))
        except OSError as error:
            refused.append(Rejected(str(path), "unreadable", error.strerror or str(error)))
    if not items and not refused:
        raise InputMissing("nothing to clean", f"looked for {', '.join(patterns)}", "name files, folders or patterns")
    return items, refused


def mark_of(path: str) -> tuple[int, ...]:
    stat = os.stat(path)  # noqa: PTH116
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _stretches(path: Path) -> Iterator[Item]:
    """A long file of JSON lines is cut, so that all workers have a share of it."""
    mark = mark_of(str(path))
    size = mark[0]
    plain = suffix_of(path) in (".jsonl", ".ndjson") and path.suffix.lower() not in PACKED_SUFFIXES
    cuts = [0]
    if plain and size > 2 * STRETCH_BYTES:
        with open(path, "rb") as file:
            while cuts[-1] + STRETCH_BYTES < size:
                file.seek(cuts[-1] + STRETCH_BYTES)
                while (block := file.readline(1 << 20)) and not block.endswith(b"\n"):
                    pass
                cuts.append(file.tell())
    ends = [*cuts[1:], size]
    for start, end in zip(cuts, ends, strict=True):
        if end > start or size == 0:
            yield Item(str(path), start, end, mark)


def _matches(pattern: str, refused: list[Rejected]) -> list[Path]:
    path = Path(pattern)
    if path.is_dir():
        return _in_folder(path, refused)
    if path.is_file():
        return [path]
    if path.exists():
        raise InputMissing(f"not a file: {path}", "it is a pipe or a device", "write its content to a file first")
    files = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207 (absolute ones too)
    files = [file for file in files if file.is_file()]
    if not files:
        raise no_such(path, "the path")
    return files


def _in_folder(folder: Path, refused: list[Rejected]) -> list[Path]:
    def cannot(error: OSError) -> None:
        refused.append(Rejected(str(error.filename), "unreadable", error.strerror or str(error)))

    files: list[Path] = []
    others: Counter[str] = Counter()
    for place, folders, names in os.walk(folder, onerror=cannot):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(place, name) for name in names if not name.startswith(".")):
            if is_known(path):
                files.append(path)
            else:
                others[suffix_of(path) or path.name] += 1
    if others:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in others.most_common(5))
        report.note(f"not cleaned in {folder}, as their endings are not those of text: {kinds}")
    if not files and not refused:
        kinds = " ".join(sorted(TEXT_SUFFIXES | JSON_SUFFIXES | MARKUP_SUFFIXES))
        why = f"no file there ends in {kinds}, or in these and .gz or .zst"
        raise InputMissing(f"nothing to clean in folder {folder}", why, "name other files by a pattern, such as 'folder/**/*.log'")  # fmt: skip
    return sorted(files)
