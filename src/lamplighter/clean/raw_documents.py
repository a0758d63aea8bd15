"""From paths to raw documents: which files there are, what each one holds, its documents or why it cannot be read.

In:  paths, folders and patterns.
Out: items (a file, or a range of a long JSON-lines file); the raw documents and the rejections of an item, in order.

All bytes come through readers/. What cannot be read is left out under a reason, or ends the job, by policy.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamplighter import report
from lamplighter.clean.decode import Decoded, declared_encoding, decode
from lamplighter.clean.markup import BadMarkup, read_html, read_xml
from lamplighter.clean.rules import Raw, Rejected, Rules, snippet
from lamplighter.errors import BadData, InputMissing
from lamplighter.readers.bad_records import BadRecords
from lamplighter.readers.files import read_blocks, read_records
from lamplighter.readers.local import LocalFile, is_packed, kind_of, mark_of, no_such, suffix_of
from lamplighter.readers.text import count_newlines

RANGE_BYTES = 32 << 20
_HEAD_BYTES = 1 << 20
_TEXT_SUFFIXES = {".txt", ".text", ".md"}
_JSON_SUFFIXES = {".jsonl", ".json", ".ndjson"}
_MARKUP_SUFFIXES = {".xml", ".html", ".htm", ".xhtml", ".tei", ".alto"}
_OUR_KEYS = {"text", "source", "title", "author", "language", "type", "meta"}
_HTML = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*(?:<!doctype\s+html|<html[\s>])", re.I | re.S)
_XML = re.compile(rb"\s*<\?xml\s|\s*<(?:TEI|alto|mets)[.:\s>]", re.I)
_ARCHIVES = ((b"WARC/", "a WARC web archive"), (b"SQLite format 3", "an SQLite database"), (b"ARROW1", "an Arrow file"), (b"PAR1", "a Parquet file"), (b"PK\x03\x04", "a zip archive"), (b"%PDF", "a PDF file"))  # fmt: skip
Found = Iterator[Raw | Rejected]
_Tick = Callable[[int], None]


@dataclass(frozen=True)
class Item:
    """A file, or a range of it."""

    file: LocalFile
    start: int
    end: int

    @property
    def path(self) -> str:
        return self.file.name

    @property
    def size(self) -> int:
        return self.end - self.start

    def identity(self) -> list[Any]:
        """Changes when the file does."""
        return [self.path, self.start, self.end, list(self.file.mark)]


# ---------------------------------------------------------------- which files


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
            items.extend(_ranges(path))
        except OSError as error:
            refused.append(Rejected(str(path), "unreadable", error.strerror or str(error)))
    if not items and not refused:
        raise InputMissing("nothing to clean", f"looked for {', '.join(patterns)}", "name files, folders or patterns")
    return items, refused


def _ranges(path: Path) -> Iterator[Item]:
    """A long file of JSON lines is cut into ranges, so that all workers have a share of it."""
    file = LocalFile(path, mark_of(path.stat()))
    size = file.size
    plain = suffix_of(path) in (".jsonl", ".ndjson") and not is_packed(path)
    cuts = [0]
    if plain and size > 2 * RANGE_BYTES:
        with open(path, "rb") as opened:
            while cuts[-1] + RANGE_BYTES < size:
                opened.seek(cuts[-1] + RANGE_BYTES)
                while (block := opened.readline(1 << 20)) and not block.endswith(b"\n"):
                    pass
                cuts.append(opened.tell())
    ends = [*cuts[1:], size]
    for start, end in zip(cuts, ends, strict=True):
        if end > start or size == 0:
            yield Item(file, start, end)


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
    first: dict[str, Path] = {}
    for place, folders, names in os.walk(folder, onerror=cannot):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(place, name) for name in names if not name.startswith(".")):
            if _is_known(path):
                files.append(path)
            else:
                kind = suffix_of(path) or path.name
                others[kind] += 1
                first[kind] = min(path, first.get(kind, path))
    if others:
        kinds = ", ".join(f"{count:,} {kind} ({first[kind]})" for kind, count in others.most_common(5))
        report.warn(f"left out of {folder}, as their endings are not those of text: {kinds}", count=others.total())
    if not files and not refused:
        kinds = " ".join(sorted(_TEXT_SUFFIXES | _JSON_SUFFIXES | _MARKUP_SUFFIXES))
        why = f"no file there ends in {kinds}, or in these and .gz or .zst"
        raise InputMissing(f"nothing to clean in folder {folder}", why, "name other files by a pattern, such as 'folder/**/*.log'")  # fmt: skip
    return sorted(files)


def _is_known(path: Path) -> bool:
    return suffix_of(path) in _TEXT_SUFFIXES | _JSON_SUFFIXES | _MARKUP_SUFFIXES


# ---------------------------------------------------------------- what is in a file


def documents(item: Item, rules: Rules, tick: _Tick) -> Found:
    """Everything in the item. `tick` hears of the bytes of the file as they are read."""
    if not item.file.size:
        yield Rejected(item.path, "empty", "the file has 0 bytes")
        return
    behind = [item.start]

    def tell(_: str, at: int) -> None:
        if min(at, item.end) > behind[0]:
            tick(min(at, item.end) - behind[0])
            behind[0] = min(at, item.end)

    try:
        kind = kind_of_file(item, tell)
        if kind == "json":
            yield from _json(item, rules, tell)
        elif kind == "table":
            yield from _table(item, rules, tell)
        elif kind.startswith("a"):
            yield Rejected(item.path, "unknown_kind", f"it is {kind}, which cannot be read here")
        else:
            yield from _whole(item, kind, read_blocks(item.file, tell), rules)
    except (BadData, InputMissing) as error:
        if rules.bad_files == "refuse":
            raise
        cut = error.what.startswith(("cut short:", "cannot unpack"))
        yield Rejected(item.path, "cut_short" if cut else "unreadable", f"{error.what.partition(':')[0]}: {error.why}")


def kind_of_file(item: Item, tell: Callable[[str, int], None]) -> str:
    """'json', 'table', 'xml', 'html' or 'text', or what it is that cannot be read. A name may lie: a page as .txt is a page."""
    suffix = suffix_of(item.path)
    if kind_of(item.path) in ("csv", "tsv", "parquet"):
        return "table"
    if suffix in _JSON_SUFFIXES:
        return "json"
    head = next(read_blocks(item.file, tell), b"")
    if known := next((words for magic, words in _ARCHIVES if head.startswith(magic)), ""):
        return known
    if head[257:262] == b"ustar":
        return "a tar archive"
    if _HTML.match(head[:4096]) or suffix in (".html", ".htm"):
        return "html"
    if suffix in _MARKUP_SUFFIXES or _XML.match(head[:4096]):
        return "xml"
    return "text"


# ---------------------------------------------------------------- one document in a file


def _whole(item: Item, kind: str, blocks: Iterator[bytes], rules: Rules) -> Found:
    first = next(blocks, b"")
    parts, size = [first], len(first)
    for block in blocks:
        parts.append(block)
        size += len(block)
        if size > 4 * rules.max_bytes or (size > rules.max_bytes and kind == "text" and not rules.separator):
            why = f"over {rules.max_document_mb:g} MB in one document; raise --max-document-mb, or cut it with --separator"
            yield Rejected(item.path, "too_long", why, head=snippet(first[:400].decode("utf-8", "replace")))
            return
    data = b"".join(parts)
    try:
        if kind == "xml":
            pieces = read_xml(data, rules.split)
            for piece in pieces:
                place = f"{item.path}#{piece.part}" if piece.part else item.path
                yield Raw(place, piece.text, piece.extra)
            return
        decoded = decode(data, declared_encoding(data) if kind == "html" else "")
    except BadMarkup as error:
        where = f"{item.path}:{error.line}:{error.column}" if error.line else item.path
        yield Rejected(where, error.reason, error.why, head=snippet(data[:400].decode("utf-8", "replace")))
        return
    yield from _decoded(item, kind, decoded, rules)


def _decoded(item: Item, kind: str, decoded: Decoded, rules: Rules) -> Found:
    if decoded.refused:
        yield Rejected(item.path, "not_text", decoded.refused)
        return
    for bad in decoded.bad:
        yield Rejected(f"{item.path}:{bad.line}", "bad_line", f"byte {bad.byte:,}: {bad.why}; the line is left out")
    if kind == "html":
        page = read_html(decoded.text)
        yield Raw(item.path, page.text, page.extra)
    elif rules.separator:
        for number, text in enumerate(decoded.text.split(rules.separator), 1):
            if text.strip():
                yield Raw(f"{item.path}#{number}", text)
    else:
        yield Raw(item.path, decoded.text)


# ---------------------------------------------------------------- records


def _json(item: Item, rules: Rules, tell: Callable[[str, int], None]) -> Found:
    """One object on each line; else one JSON value over several lines, if that is what the whole file is."""
    if item.start == 0 and not _begins_with_an_object(item):
        value = _one_value(item, rules, tell)
        if isinstance(value, Rejected):
            yield value
            return
        if value is not None:
            for number, one in enumerate(value if isinstance(value, list) else [value], 1):
                yield _from_object(one, f"{item.path}#{number}", rules.text_key, snippet(str(one)[:400]))
            return
    yield from _records(item, rules, tell)


def _begins_with_an_object(item: Item) -> bool:
    """Whether the first line is a whole JSON object (or so long that it must be one)."""
    head = next(read_blocks(item.file, lambda *_: None), b"")[:_HEAD_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip()
    line, newline, _ = head.partition(b"\n")
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return not newline and item.file.size > _HEAD_BYTES and line.startswith(b"{")


def _one_value(item: Item, rules: Rules, tell: Callable[[str, int], None]) -> Any:
    """The JSON value that the whole file is; None where it is none, so that its lines are read one by one."""
    parts, size = [], 0
    for block in read_blocks(item.file, tell):
        parts.append(block)
        size += len(block)
        if size > 4 * rules.max_bytes:
            break
    data = b"".join(parts)
    is_array = data[:_HEAD_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    if size > 4 * rules.max_bytes:
        why = f"one JSON value of over {4 * rules.max_document_mb:g} MB; write it as JSON lines"
        return Rejected(item.path, "too_long", why) if is_array else None
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        if not is_array:
            return None
        line, column = getattr(error, "lineno", 0), getattr(error, "colno", 0)
        where = f"{item.path}:{line}:{column}" if line else item.path
        return Rejected(where, "bad_json", str(error), head=snippet(data[:400].decode("utf-8", "replace")))


def _records(item: Item, rules: Rules, tell: Callable[[str, int], None]) -> Found:
    """The lines or rows of a file or a range of it; one that cannot be read loses itself alone."""
    bad = BadRecords(limit=1.0, quiet=True)
    start = {"at": item.start, "line": 1 + _lines_before(item)} if item.start else None
    told = 0
    for record in read_records(item.file, bad.begin(), tell, start, 2 * rules.max_bytes):
        yield from _refused(bad, told, item)
        told = len(bad.listed)
        if record.at >= item.end and item.end < item.file.size:
            return
        place = f"{item.path}:{record.line}"
        yield _from_object(record.value, place, rules.text_key, snippet(str(record.value)[:400]))
    yield from _refused(bad, told, item)


def _refused(bad: BadRecords, told: int, item: Item) -> Iterator[Rejected]:
    """The bad lines since the last time; those behind the range belong to the next one."""
    for one in bad.listed[told:]:
        if one["at"] < item.end:
            what, why, _ = one["error"]
            reason = {"bad JSON": "bad_json", "too long": "too_long", "bad row": "bad_row"}.get(
                what.partition(":")[0], "not_text"
            )
            yield Rejected(f"{one['path']}:{one['line']}", reason, f"byte {one['at']:,}: {why}")


def _lines_before(item: Item) -> int:
    """How many lines are before this range: places must be those of the file."""
    count, left = 0, item.start
    for block in item.file.blocks(0, _HEAD_BYTES, lambda *_: None):
        count, left = count + count_newlines(block[:left]), left - len(block)
        if left <= 0:
            break
    return count


def _table(item: Item, rules: Rules, tell: Callable[[str, int], None]) -> Found:
    """The rows of a table; one without the column of the texts is left out as a whole."""
    for number, one in enumerate(_records(item, rules, tell)):
        if not number and isinstance(one, Rejected) and one.reason == "no_text":
            yield Rejected(item.path, "unknown_kind", f"a table, {one.why}")
            return
        yield one


def _from_object(found: Any, place: str, key: str, head: str) -> Raw | Rejected:
    text = found.get(key) if isinstance(found, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(list(found)[:8]) if isinstance(found, dict) else f"a JSON {type(found).__name__}"
        return Rejected(place, "no_text", f'nothing under "{key}" (--text-key); found: {keys}', head=head)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return Rejected(place, "not_text", "half of a surrogate pair in a \\u escape", head=head)
    others = {name: value for name, value in found.items() if name != key}
    if key == "text" and "source" in others and set(found) <= _OUR_KEYS:  # our own output, cleaned again
        return Raw(str(others.pop("source")), text, others)
    return Raw(place, text, {"meta": others} if others else {})
