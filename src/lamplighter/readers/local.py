"""Finding files on this machine, and reading their bytes: the same file from beginning to end, or an error that says so.

In:  paths, folders, patterns.
Out: LocalFiles, each once, in a fixed order; their bytes from any place on; a hash of their content.
"""

from __future__ import annotations

import glob
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_128

from lamplighter import report
from lamplighter.errors import BadData, InputMissing
from lamplighter.readers.compression import PACKED_SUFFIXES
from lamplighter.rundir import read_json, write_json

_KINDS = {
    ".txt": "text", ".text": "text", ".md": "text", ".jsonl": "json", ".ndjson": "json", ".json": "json",
    ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
}  # fmt: skip
_JUST_WRITTEN_S = 2.0  # a file changed so lately may change again within the same time stamp
_HASH_NAME = "xxh3:"
_HASH_BLOCK_BYTES = 1 << 20
Tell = Callable[[str, int], None]  # what is being read, and the byte of the file


def suffix_of(name: str | Path) -> str:
    """The ending that says what is inside: of "a.jsonl.zst" it is ".jsonl"."""
    path = Path(name)
    return (Path(path.stem) if is_packed(name) else path).suffix.lower()


def kind_of(name: str | Path) -> str:
    """text, json, csv, tsv or parquet for the known endings, '' for others (read as text where they are named outright)."""
    kind = _KINDS.get(suffix_of(name), "")
    return "" if kind == "parquet" and is_packed(name) else kind


def is_packed(name: str | Path) -> bool:
    return Path(name).suffix.lower() in PACKED_SUFFIXES


# ---------------------------------------------------------------- one file


Mark = tuple[int, int, int, int]
"""Size, time of the last write, time of the last change (which nobody can set back), inode."""


def mark_of(stat: os.stat_result) -> Mark:
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


@dataclass(frozen=True)
class LocalFile:
    """A file as it was when it was found."""

    path: Path
    mark: Mark
    content: str = field(default="", compare=False)
    """The hash of its content, where that is known."""

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        return self.mark[0]

    def blocks(self, at: int, size: int, tell: Tell) -> Iterator[bytes]:
        """Its bytes from `at` on; it must be the same file at the beginning and at the end."""
        name = self.name
        try:
            with open(self.path, "rb", buffering=0) as file:
                self.check(file.fileno(), "since this command began")
                file.seek(at)
                tell(name, at)
                while block := file.read(size):
                    at += len(block)
                    tell(name, at)
                    yield block
                self.check(file.fileno(), "while it was read")
        except OSError as error:
            raise unreadable(self.path, error) from error

    def open(self, tell: Tell) -> BinaryIO:
        """The open file; the caller checks it again at the end."""
        tell(self.name, 0)
        try:
            file = open(self.path, "rb")
            self.check(file.fileno(), "since this command began")
        except OSError as error:
            raise unreadable(self.path, error) from error
        return file

    def check(self, fd: int, when: str) -> None:
        """Refuse a file that is no longer the one that was found.

        A hard link or other rights change one of the times too: then the content decides, where its hash is known.
        """
        now = mark_of(os.fstat(fd))
        if now == self.mark:
            return
        (size, written, _, inode), (was, written_before, _, before) = now, self.mark
        only_ctime = (size, written, inode) == (was, written_before, before)
        if only_ctime and self.content and hash_content(self.path) == self.content:
            return
        why = "it was written to again"
        if size != was:
            why = f"it {'shrank' if size < was else 'grew'} from {was:,} to {size:,} bytes"
        elif inode != before:
            why = "another file has taken its place"
        raise BadData(f"{self.path} changed {when}", why, "let whatever writes it finish, then run this again")


def local_file(path: Path) -> LocalFile:
    """A file that is there and can be read."""
    if not path.is_file():
        raise InputMissing(f"not a file: {path}", "it is a pipe or a device", "write its content to a file first")
    if not os.access(path, os.R_OK):
        raise InputMissing(f"cannot read {path}", "no permission to read it", f"try: chmod u+r '{path}'")
    return LocalFile(path, mark_of(path.stat()))


def unreadable(path: Path, error: OSError) -> InputMissing:
    return InputMissing(f"cannot read {path}", error.strerror or str(error), "check the file and the disk")


# ---------------------------------------------------------------- finding


def find_files(patterns: list[str]) -> list[LocalFile]:
    """Every file that the patterns name, each once; folders are searched for the known kinds."""
    found: dict[Path, LocalFile] = {}
    for pattern in patterns:
        paths, others = find_paths(pattern, lambda path: bool(kind_of(path)))
        if not paths:
            raise InputMissing(
                f"no text in folder {Path(pattern).expanduser()}",
                f"no file there ends in {' '.join(sorted(_KINDS))}, or in these and .gz or .zst",
                "name other files by a pattern, such as 'folder/**/*.log'",
            )
        if others:
            report.note(f"not read in {pattern}, as their endings are not those of text: {_count_endings(others)}")
        for path in paths:
            found.setdefault(path.resolve(), local_file(path))
    full = [file for file in found.values() if file.size]
    if empty := [file for file in found.values() if not file.size]:
        if not full or any(file.name in patterns for file in empty):
            raise BadData(f"empty file: {empty[0].path}", "it has 0 bytes", "fill it, or take it out of data.paths")
        report.warn(f"{len(empty)} empty files are passed over; the first one is {empty[0].path}")
    return full


def find_paths(
    pattern: str,
    is_wanted: Callable[[Path], bool],
    on_error: Callable[[OSError], None] | None = None,
    where: str = "data.paths",
) -> tuple[list[Path], list[Path]]:
    """(the files that a path, folder or pattern names, the other files of the folder), sorted.

    Of a folder those that are wanted, and nothing hidden; `on_error` hears of a folder inside it that cannot be read.
    """
    path = Path(pattern).expanduser()
    if path.is_dir():
        wanted: list[Path] = []
        others: list[Path] = []
        with report.phase("find files", unit="files") as p:
            for one in _walk(path, on_error or _refuse):
                p.tick(1, str(one))
                (wanted if is_wanted(one) else others).append(one)
        return sorted(wanted), sorted(others)
    if path.exists():
        if not path.is_file():
            raise InputMissing(f"not a file: {path}", "it is a pipe or a device", "write its content to a file first")
        return [path], []
    names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 (absolute ones too)
    files = [Path(name) for name in names if Path(name).is_file()]
    if not files:
        raise no_such(path, where)
    return files, []


def _walk(folder: Path, on_error: Callable[[OSError], None]) -> Iterator[Path]:
    for place, folders, names in os.walk(folder, onerror=on_error):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (path for name in names if not name.startswith(".") and (path := Path(place, name)).is_file())


def _refuse(error: OSError) -> None:
    raise unreadable(Path(error.filename), error) from error


def _count_endings(others: list[Path]) -> str:
    endings = Counter(
        "".join(path.suffixes[-2:] if is_packed(path) else path.suffixes[-1:]) or path.name for path in others
    )
    most = sorted(endings.items(), key=lambda one: (-one[1], one[0]))[:5]
    more = f" and {len(endings) - 5:,} other endings" if len(endings) > 5 else ""
    return ", ".join(f"{ending} {count:,}" for ending, count in most) + more


def no_such(path: Path, where: str = "data.paths") -> InputMissing:
    """The error for a path or pattern that names nothing, with the nearest name; `where` it was given."""
    what = "nothing matches" if any(letter in str(path) for letter in "*?[") else "no such file or folder:"
    missing, folder = path, path.parent
    while not folder.is_dir():
        missing, folder = folder, folder.parent
    near = get_close_matches(missing.name, [entry.name for entry in folder.iterdir()], n=1, cutoff=0.5)
    advice = f"did you mean {folder / near[0]}?" if near else f"check {where}; relative ones start at this folder"
    return InputMissing(f"{what} {path}", f"looked in {folder.resolve()}", advice)


# ---------------------------------------------------------------- hashes


def hash_files(files: list[LocalFile], store_path: Path | None) -> list[LocalFile]:
    """The same files with the hashes of their contents; what the store remembers of an unchanged file is not read again."""
    store = read_json(store_path) if store_path else None
    known: dict[str, Any] = store if isinstance(store, dict) else {}
    hashed: list[LocalFile] = []
    fresh: dict[str, Any] = {}
    with report.phase("hash files", total=sum(file.size for file in files), unit="B") as p:
        for file in files:
            p.tick(0, file.name)
            name = str(file.path.absolute())
            hashed.append(_hashed(file, known.get(name), p.tick))
            entry = [*file.mark, hashed[-1].content]
            if entry != known.get(name) and time.time() - max(file.mark[1:3]) / 1e9 > _JUST_WRITTEN_S:
                fresh[name] = entry
    if fresh and store_path:
        _remember(store_path, {**known, **fresh})
    return hashed


def _hashed(file: LocalFile, known: object, tick: Callable[[int], None]) -> LocalFile:
    if isinstance(known, list) and known[:-1] == [*file.mark] and str(known[-1]).startswith(_HASH_NAME):
        tick(file.size)
        return replace(file, content=str(known[-1]))
    try:
        with file.open(lambda *_: None) as opened:
            content = hash_content(file.path, tick)
            file.check(opened.fileno(), "while it was read")
    except OSError as error:
        raise unreadable(file.path, error) from error
    return replace(file, content=content)


def hash_content(path: Path, tick: Callable[[int], None] = lambda _: None) -> str:
    """The hash of every byte, as fast as they can be read.

    It tells whether a content changed; it is no proof against somebody who wants two contents to look the same (sha256
    would be, at five times the time, before anything else can begin).
    """
    digest, buffer = xxh3_128(), bytearray(_HASH_BLOCK_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            tick(count)
    return _HASH_NAME + digest.hexdigest()


def _remember(store: Path, entries: dict[str, Any]) -> None:
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        write_json(store, entries, durable=False)
    except OSError as error:  # costs only the time to hash again
        report.warn(f"cannot remember file hashes in {store}: {error.strerror}")
