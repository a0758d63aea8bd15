"""Files as a source of documents: finding, unpacking and decoding them, with the place of every fault.

In:  paths, folders and patterns; text or JSON lines, as they are or packed by gzip or zstd.
Out: texts in a fixed order. Nothing is repaired in silence: a line that is not UTF-8 text is set aside and counted, or
     refused, with file, line and byte.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lamplighter import report
from lamplighter.data.dirt import Dirt, FileDirt
from lamplighter.data.fingerprints import NAME, hash_content
from lamplighter.errors import BadData, InputMissing
from lamplighter.rundir import human_bytes, read_json, write_json

TEXT_SUFFIXES = {".txt", ".text", ".md"}
JSON_SUFFIXES = {".jsonl", ".json", ".ndjson"}
PACKED_SUFFIXES = {".gz", ".zst"}
BLOCK_BYTES = 1 << 18
PACKED_BLOCK_BYTES = 1 << 16  # unpacks to more
PART_CHARS = 1 << 20
LINE_BYTES = 1 << 20  # a longer line is decoded in pieces
JUST_WRITTEN_S = 2.0  # a file changed so lately may change again within the same time stamp


class Part(str):
    """A piece of a document that goes on in the next piece, so that memory does not grow with a document."""

    __slots__ = ()


Cursor = dict[str, Any]
"""A place between two texts of a source, as JSON; only the source itself knows what it means."""


@dataclass(frozen=True)
class Position:
    """What is being read now, how many of the source's bytes are behind it, and where to go on after the latest text."""

    item: str
    bytes_done: int
    cursor: Cursor = field(default_factory=dict)


# ---------------------------------------------------------------- where a long text may be cut

_WORD_ENDS = re.compile(r"[^\W_](?=[ \t\r\n])")
_SPACE_BEGINS = re.compile(r"[^ \t\r\n](?=[ \t\r\n])")


def cut_after(text: str, size: int, spare: int = 0) -> int | None:
    """Where to cut a text of over twice `size`: after a word and before its space, so that no pre-token is cut.

    None for a shorter text, so something is always left. Where that stretch has no word's end (or no space at all), the next best place.
    """
    if len(text) <= 2 * size + spare:
        return None
    for pattern in (_WORD_ENDS, _SPACE_BEGINS):
        if found := pattern.search(text, size, 2 * size):
            return found.end()
    return 2 * size


def cut_all(text: str, size: int) -> Iterator[str]:
    """The pieces of a text, all but the last one a Part."""
    begin = 0
    while (cut := cut_after(text[begin : begin + 2 * size + 1], size)) is not None:
        yield Part(text[begin : begin + cut])
        begin += cut
    yield text[begin:] if begin else text


def split(chunks: Iterable[str], separator: str | None) -> Iterator[str]:
    """The documents in a stream of characters, in Parts where they are long; the same however the chunks fall."""
    held: list[str] = []
    for chunk in chunks:
        held.append(chunk)
        if not separator and sum(map(len, held)) <= 2 * PART_CHARS:
            continue
        rest = "".join(held)
        if separator:
            *whole, rest = rest.split(separator)
            for text in whole:
                yield from cut_all(text, PART_CHARS)
        while (cut := cut_after(rest, PART_CHARS, len(separator or ""))) is not None:
            yield Part(rest[:cut])
            rest = rest[cut:]
        held = [rest]
    yield from cut_all("".join(held), PART_CHARS)


def skip(texts: Iterator[str], count: int, position: Callable[[], Position]) -> None:
    """Pass over what a resumed build has already stored, in sight of the watcher."""
    if count:
        with report.phase("skip to where it stopped", total=count, unit="texts") as p:
            for number in range(count):
                p.set(number, position().item)
                next(texts, None)


def digest(value: Any) -> str:
    """sha256 of anything that JSON can write."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------- finding files


def find_files(patterns: list[str]) -> list[Path]:
    """Every file that the patterns name, each once; folders are searched for the known kinds."""
    found: dict[Path, Path] = {}
    for pattern in patterns:
        for path in _matches(str(Path(pattern).expanduser())):
            found.setdefault(path.resolve(), path)
    full = [path for path in found.values() if path.stat().st_size]
    if empty := [path for path in found.values() if not path.stat().st_size]:
        if not full or any(str(path) in patterns for path in empty):
            raise BadData(f"empty file: {empty[0]}", "it has 0 bytes", "fill it, or take it out of data.paths")
        report.warn(f"{len(empty)} empty files are passed over; the first one is {empty[0]}")
    return full


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return [_readable(path)]
    matches = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207 (absolute ones too)
    files = [_readable(match) for match in matches if match.is_file()]
    if not files:
        raise _no_such(path)
    return files


def _in_folder(folder: Path) -> list[Path]:
    files = []
    with report.phase("find files", unit="files") as p:
        for path in folder.rglob("*"):
            if _kind(path) and path.is_file() and not path.name.startswith("."):
                files.append(_readable(path))
                p.tick(1, str(path))
    if not files:
        kinds = " ".join(sorted(TEXT_SUFFIXES | JSON_SUFFIXES))
        raise InputMissing(
            f"no text in folder {folder}",
            f"no file there ends in {kinds}, or in these and .gz or .zst",
            "name other files by a pattern, such as 'folder/**/*.log'",
        )
    return sorted(files)


def _kind(path: Path) -> str:
    """'text' or 'json' for the known endings, '' for others (read as text where they are named outright)."""
    suffix = path.suffix if path.suffix not in PACKED_SUFFIXES else Path(path.stem).suffix
    return "json" if suffix in JSON_SUFFIXES else "text" if suffix in TEXT_SUFFIXES else ""


def _readable(path: Path) -> Path:
    if not path.is_file():
        raise InputMissing(f"not a file: {path}", "it is a pipe or a device", "write its content to a file first")
    if not os.access(path, os.R_OK):
        raise InputMissing(f"cannot read {path}", "no permission to read it", f"try: chmod u+r '{path}'")
    return path


def _no_such(path: Path) -> InputMissing:
    what = "nothing matches" if any(letter in str(path) for letter in "*?[") else "no such file or folder:"
    missing, folder = path, path.parent
    while not folder.is_dir():
        missing, folder = folder, folder.parent
    near = get_close_matches(missing.name, [entry.name for entry in folder.iterdir()], n=1, cutoff=0.5)
    advice = f"did you mean {folder / near[0]}?" if near else "check data.paths; relative ones start at this folder"
    return InputMissing(f"{what} {path}", f"looked in {folder.resolve()}", advice)


def _unreadable(path: Path, error: OSError) -> InputMissing:
    return InputMissing(f"cannot read {path}", error.strerror or str(error), "check the file and the disk")


# ---------------------------------------------------------------- the source


class FileSource:
    """Text and JSON-lines files, packed or not, one after the other."""

    def __init__(
        self,
        files: list[Path],
        separator: str | None = None,
        text_key: str = "text",
        hash_store: Path | None = None,
        bad_text: str = "set_aside",
    ) -> None:
        self.files, self.separator, self.text_key, self.hash_store = files, separator, text_key, hash_store
        self.dirt = Dirt(bad_text)
        self._sizes = {path: path.stat().st_size for path in files}
        self._fingerprint = ""
        self._position = Position(str(files[0]), 0)
        self._texts = 0

    def __str__(self) -> str:
        others = f" and {len(self.files) - 1} more files" if len(self.files) > 1 else ""
        return f"{self.files[0]}{others}, {human_bytes(self.total_bytes())}"

    def total_bytes(self) -> int:
        return sum(self._sizes.values())

    def position(self) -> Position:
        return replace(self._position, cursor={"text": self._texts})

    def fingerprint(self) -> str:
        """The content of every file in order, and how it is read; neither names nor dates."""
        if not self._fingerprint:
            content = [[sha256, _kind(path)] for path, sha256 in zip(self.files, self._hashes(), strict=True)]
            self._fingerprint = digest([content, self.separator, self.text_key, PART_CHARS, self.dirt.policy])
        return self._fingerprint

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        """Every text that is not empty."""
        texts = self._all()
        self._texts = int((start or {}).get("text", 0))
        skip(texts, self._texts, self.position)
        some = self._texts > 0
        for text in texts:
            some = True
            self._texts += 1
            yield text
        if not some:
            advice = "check data.paths, data.separator and data.text_key"
            raise BadData(f"no text in {self}", "every document is empty", advice)

    def _all(self) -> Iterator[str]:
        done = 0
        for path in self.files:
            self._position = Position(str(path), done)
            blocks, dirt = self._blocks(path, done), self.dirt.file(path)
            if _kind(path) == "json":
                yield from filter(None, _json_texts(blocks, path, self.text_key, dirt))
            else:
                yield from filter(None, split(_characters(blocks, path, dirt), self.separator))
            done += self._sizes[path]
            self._position = Position(str(path), done)

    def _blocks(self, path: Path, done: int) -> Iterator[bytes]:
        """The bytes of one file, unpacked."""
        packed = path.suffix in PACKED_SUFFIXES
        try:
            with open(path, "rb", buffering=0) as file:
                raw = self._counted(file.read, path, done, PACKED_BLOCK_BYTES if packed else BLOCK_BYTES)
                yield from _unpack(raw, path) if packed else raw
        except OSError as error:
            raise _unreadable(path, error) from error

    def _counted(self, read: Callable[[int], bytes], path: Path, done: int, size: int) -> Iterator[bytes]:
        name = str(path)
        while block := read(size):
            done += len(block)
            self._position = Position(name, done)
            yield block

    def _hashes(self) -> list[str]:
        """The hash of each file; what the store remembers of an unchanged file is not computed again."""
        store = read_json(self.hash_store) if self.hash_store else None
        known: dict[str, Any] = store if isinstance(store, dict) else {}
        found: dict[str, Any] = {}
        with report.phase("hash files", total=self.total_bytes(), unit="B") as p:
            for path in self.files:
                p.tick(0, str(path))
                name = str(path.absolute())
                found[name] = _hashed(path, known.get(name), p.tick)
        fresh = {name: entry for name, entry in found.items() if entry != known.get(name) and _is_settled(entry)}
        if fresh and self.hash_store:
            _remember(self.hash_store, {**known, **fresh})
        return [str(entry[3]) for entry in found.values()]


def _hashed(path: Path, known: object, tick: Callable[[int], None]) -> list[Any]:
    """[size, time, inode, hash] of a file; the hash is the known one where the rest has not changed."""
    try:
        stat = path.stat()
        mark = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        if isinstance(known, list) and known[:3] == mark and str(known[-1]).startswith(NAME):
            tick(stat.st_size)
            return known
        return [*mark, hash_content(path, tick)]
    except OSError as error:
        raise _unreadable(path, error) from error


def _is_settled(entry: list[Any]) -> bool:
    return bool(time.time() - entry[1] / 1e9 > JUST_WRITTEN_S)


def _remember(store: Path, entries: dict[str, Any]) -> None:
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        write_json(store, entries, durable=False)
    except OSError as error:  # costs only the time to hash again
        report.warn(f"cannot remember file hashes in {store}: {error.strerror}")


# ---------------------------------------------------------------- bytes to text


def _unpack(raw: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """A .gz or .zst stream of one or more members; a torn end is an error, not the end."""
    import zstandard

    unpacker: Any = None
    try:
        for block in raw:
            while block and (unpacker or block.strip(b"\0")):  # zeros after the end are padding
                if unpacker is None:
                    gz = path.suffix == ".gz"
                    unpacker = zlib.decompressobj(31) if gz else zstandard.ZstdDecompressor().decompressobj()
                yield unpacker.decompress(block)
                block, unpacker = (unpacker.unused_data, None) if unpacker.eof else (b"", unpacker)
    except (zlib.error, zstandard.ZstdError) as error:
        raise BadData(f"cannot unpack {path}", str(error), "fetch or write the file again") from error
    if unpacker is not None:
        raise BadData(f"cut short: {path}", "the packed data ends in the middle", "fetch or write the file again")


def _not_text(path: Path, line: int, at: int, why: str, head: bytes) -> BadData:
    unpacked = " of the unpacked text" if path.suffix in PACKED_SUFFIXES else ""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        advice = f"it looks like UTF-16; try: iconv -f UTF-16 -t UTF-8 '{path}' > utf8.txt"
    elif "NUL" in why:
        advice = "it looks like a binary file; take it out of data.paths (Parquet: write it out as .jsonl first)"
    else:
        advice = f"if it is Latin-1: iconv -f ISO-8859-1 -t UTF-8 '{path}' > utf8.txt, and name that file"
    return BadData(f"not text: {path}:{line}, byte {at:,}{unpacked}", why, advice)


def _characters(blocks: Iterator[bytes], path: Path, dirt: FileDirt) -> Iterator[str]:
    """Decoded pieces of whole lines; a byte-order mark is dropped, a line that is not text is set aside."""
    head, at, line = b"", 0, 1
    for piece in _pieces(blocks):
        first, head = not head, head or piece[:4]
        if b"\0" not in piece and (text := _decoded(piece)) is not None:
            yield text.removeprefix("\ufeff") if first else text
        else:
            yield "".join(
                _good_lines(piece, path, line, at, head, dirt)
            )  # one chunk: `split` counts them all each time
        at, line = at + len(piece), line + piece.count(b"\n")
    dirt.end(line)


def _decoded(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _good_lines(piece: bytes, path: Path, line: int, at: int, head: bytes, dirt: FileDirt) -> Iterator[str]:
    """The lines of a piece that are text."""
    for raw in _split_keeping(piece):
        if (fault := _fault(raw)) is None:
            text = raw.decode()
            yield text.removeprefix("\ufeff") if at == 0 else text
        else:
            dirt.set_aside(line, at + fault[0], _not_text(path, line, at + fault[0], fault[1], head))
        at, line = at + len(raw), line + 1


def _split_keeping(piece: bytes) -> list[bytes]:
    """Lines end at a newline only; a carriage return is a character like others."""
    return [raw + b"\n" for raw in piece.split(b"\n")[:-1]] + ([rest] if (rest := piece.rpartition(b"\n")[2]) else [])


def _fault(raw: bytes) -> tuple[int, str] | None:
    """(byte, reason) of the first thing in these bytes that is not text."""
    if (nul := raw.find(b"\0")) >= 0:
        return nul, "a NUL byte"
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.start, f"not UTF-8: {error.reason} {raw[error.start]:#04x}"
    return None


def _pieces(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes, cut after a line's end; a line of over LINE_BYTES is cut between two characters."""
    held = b""
    for block in blocks:
        held += block
        end = held.rfind(b"\n") + 1
        if not end and len(held) > LINE_BYTES:
            end = len(held)
            while end > len(held) - 3 and held[end - 1] & 0xC0 == 0x80:
                end -= 1
            end -= held[end - 1] >= 0xC0  # the first byte of a character that may go on
        if end:
            yield held[:end]
            held = held[end:]
    if held:
        yield held


def _lines(blocks: Iterator[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """(number, byte offset, line); a line is joined once, however long."""
    number, at, parts = 1, 0, [b""]
    for block in blocks:
        first, *others = block.split(b"\n")
        parts.append(first)
        for other in others:
            line = b"".join(parts)
            yield number, at, line
            number, at, parts = number + 1, at + len(line) + 1, [other]
    yield number, at, b"".join(parts)


def _json_texts(blocks: Iterator[bytes], path: Path, key: str, dirt: FileDirt) -> Iterator[str]:
    number = 0
    for number, at, line in _lines(blocks):
        if line.strip():
            try:
                text = _json_text(line, path, number, at, key)
            except BadData as error:
                dirt.set_aside(number, at, error)
                continue
            yield from cut_all(text, PART_CHARS)
    dirt.end(number)


def _json_text(raw: bytes, path: Path, number: int, at: int, key: str) -> str:
    """The text of one line."""
    if (fault := _fault(raw)) is not None:
        raise _not_text(path, number, at + fault[0], fault[1], raw)
    line = raw.decode()
    try:
        record = json.loads(line.removeprefix("\ufeff") if number == 1 else line)
        text = record.get(key) if isinstance(record, dict) else None
        if isinstance(text, str) and not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        why = "half of a surrogate pair in a \\u escape"
        raise BadData(f"not text: {path}:{number}", why, "mend or remove the line") from error
    except ValueError as error:
        raise _bad_json(path, number, line, error) from error
    if not isinstance(text, str):
        found = ", ".join(list(record)[:8]) if isinstance(record, dict) else f"a JSON {type(record).__name__}"
        raise BadData(f"no text: {path}:{number}", f'nothing under "{key}"; found: {found}', "set data.text_key")
    return text


def _bad_json(path: Path, number: int, line: str, error: ValueError) -> BadData:
    if number == 1 and line.lstrip("\ufeff ").startswith("["):
        why = "the file is one JSON array, not one object per line"
        return BadData(f"bad JSON: {path}:{number}", why, f"try: jq -c '.[]' '{path}' > lines.jsonl")
    return BadData(f"bad JSON: {path}:{number}", str(error), "mend or remove the line")
