"""From paths to raw documents: which files there are, what each one holds, its documents or why it cannot be read.

In:  paths, folders and patterns.
Out: items (a file, or a range of a long JSON-lines file); the raw documents and the rejections of an item, in order.

All bytes come through readers/. What cannot be read is left out under a reason, or ends the job, by policy.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamplighter import report
from lamplighter.clean.markup import BadMarkup, read_html, read_xml
from lamplighter.clean.rules import Raw, Rejected, Rules, leave_out, snippet
from lamplighter.errors import BadData, InputMissing
from lamplighter.readers.bad_records import BadRecords
from lamplighter.readers.files import read_blocks, read_records
from lamplighter.readers.local import LocalFile, Tell, find_paths, is_packed, kind_of, mark_of, suffix_of
from lamplighter.readers.ranges import RangeFile
from lamplighter.readers.records import fault_in

RANGE_BYTES = 32 << 20
_HEAD_BYTES = 1 << 20
_NAMED_KINDS, _NAMED_FILES = 5, 10  # of the files that are left out because of their endings; the log has all of them
_JSON_SUFFIXES = {".jsonl", ".json", ".ndjson"}
_MARKUP_SUFFIXES = {".xml", ".html", ".htm", ".xhtml", ".tei", ".alto"}
_SUFFIXES = {".txt", ".text", ".md"} | _JSON_SUFFIXES | _MARKUP_SUFFIXES
_REASONS = {"bad JSON": "bad_json", "too long": "too_long", "bad row": "bad_row"}  # by what the reader says
_OUR_KEYS = {"text", "source", "title", "author", "language", "type", "meta"}
_HTML = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*(?:<!doctype\s+html|<html[\s>])", re.I | re.S)
_XML = re.compile(rb"\s*<\?xml\s|\s*<(?:TEI|alto|mets)[.:\s>]", re.I)
_MAGIC = {
    b"WARC/": "a WARC web archive", b"SQLite format 3": "an SQLite database", b"ARROW1": "an Arrow file", b"PAR1": "a Parquet file",
    b"PK\x03\x04": "a zip archive", b"%PDF": "a PDF file", b"\x1f\x8b": "a gzip file", b"\x28\xb5\x2f\xfd": "a zstd file",
    b"BZh": "a bzip2 file", b"\xfd7zXZ": "an xz file", b"\x89PNG": "a PNG image", b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image", b"\x7fELF": "a program",
}  # fmt: skip
_PACKED_KINDS = {".gz": "a gzip file", ".zst": "a zstd file"}
_MAGIC_BYTES = 512  # of a tar archive the name is in the middle of its first block
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


def find_items(patterns: list[str], out: Path | None, rules: Rules) -> tuple[list[Item], list[Rejected]]:
    """Every file that the patterns name, each once; folders are searched for the known kinds, but not the output itself."""
    found: dict[Path, Path] = {}
    others_of: dict[str, list[Path]] = {}
    refused: list[Rejected] = []
    made = out.resolve() if out else None

    def cannot(error: OSError) -> None:
        refused.append(leave_out(str(error.filename), "unreadable", error.strerror or str(error), rules))

    def is_input(real: Path) -> bool:
        return made is None or not real.is_relative_to(made)

    for pattern in patterns:
        paths, others = find_paths(pattern, lambda path: suffix_of(path) in _SUFFIXES, cannot, "the path")
        others_of[pattern] = [path for path in others if is_input(path.resolve())]
        if others_of[pattern] and rules.bad_files == "refuse":
            why = "its ending is not that of a text; name the files by a pattern to read it, or to leave it out"
            leave_out(str(others_of[pattern][0]), "unknown_kind", why, rules)
        if not paths and not refused:
            why = f"no file there ends in {' '.join(sorted(_SUFFIXES))}, or in these and .gz or .zst"
            raise InputMissing(f"nothing to clean in folder {pattern}", why, "name other files by a pattern, such as 'folder/**/*.log'")  # fmt: skip
        for path in paths:
            if is_input(real := path.resolve()):
                found.setdefault(real, path)
    items: list[Item] = []
    for path in found.values():
        try:
            items.extend(_ranges(path))
        except OSError as error:
            refused.append(leave_out(str(path), "unreadable", error.strerror or str(error), rules))
        except InputMissing as error:
            refused.append(leave_out(str(path), "unreadable", error.why, rules))
    if not items and not refused:
        raise InputMissing("nothing to clean", f"looked for {', '.join(patterns)}", "name files, folders or patterns")
    for folder, others in others_of.items():
        refused += _name_others(folder, [path for path in others if path.resolve() not in found])
    return items, refused


def _name_others(folder: str, others: list[Path]) -> list[Rejected]:
    """The files of a folder whose endings say nothing that is known: counted and named, and each of them in the log."""
    if not others:
        return []
    by_kind: dict[str, list[Path]] = {}
    for path in others:
        by_kind.setdefault(suffix_of(path) or path.name, []).append(path)
    kinds = sorted(by_kind, key=lambda kind: -len(by_kind[kind]))
    words = ", ".join(f"{len(by_kind[kind]):,} {kind} ({by_kind[kind][0]})" for kind in kinds[:_NAMED_KINDS])
    if more := [path for kind in kinds[_NAMED_KINDS:] for path in by_kind[kind]]:
        names = ", ".join(map(str, more[:_NAMED_FILES])) + (", ..." if len(more) > _NAMED_FILES else "")
        words += f", and {len(more):,} more files: {names}"
    report.warn(f"{len(others):,} files left out of {folder}, as their endings are not those of text: {words}", count=len(others))  # fmt: skip
    why = "its ending is not that of a text; name it outright, or by a pattern, to have it read"
    return [Rejected(str(path), "other_ending", why) for path in others]


def _ranges(path: Path) -> Iterator[Item]:
    """A long file of JSON lines is cut into ranges, so that all workers have a share of it."""
    file = LocalFile(path, mark_of(path.stat()))
    cuts = [0]
    if suffix_of(path) in (".jsonl", ".ndjson") and not is_packed(path) and file.size > 2 * RANGE_BYTES:
        with RangeFile(file) as opened:
            cuts += [opened.cut_line(at) for at in range(RANGE_BYTES, file.size, RANGE_BYTES)]
    for start, end in itertools.pairwise([*cuts, file.size]):
        if end > start or file.size == 0:
            yield Item(file, start, end)


# ---------------------------------------------------------------- what is in a file


def documents(item: Item, rules: Rules, tick: _Tick) -> Found:
    """Everything in the item. `tick` hears of the bytes of the file as they are read.

    Where it cannot be read to its end, the last one is Rejected as UNUSABLE, and nothing before it is to be used.
    """
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
            if item.start == 0:  # it is named once, however many ranges it has
                yield leave_out(item.path, "unknown_kind", f"it is {kind}, which cannot be read under this name", rules)
        else:
            yield from _whole(item, kind, read_blocks(item.file, tell), rules)
    except (BadData, InputMissing) as error:
        if rules.bad_files == "refuse":
            raise
        cut = error.what.startswith(("cut short:", "cannot unpack"))
        what = error.what.replace(f"{item.path}:", "line ").replace(item.path, "").strip(" :")
        yield Rejected(item.path, "cut_short" if cut else "unreadable", f"{what}: {error.why}")


def kind_of_file(item: Item, tell: Tell) -> str:
    """'json', 'table', 'xml', 'html' or 'text', or what it is that cannot be read. A name may lie: a page as .txt is a page."""
    suffix, kind = suffix_of(item.path), kind_of(item.path)
    if is_packed(item.path):
        known = _kind_by_magic(next(item.file.blocks(0, _MAGIC_BYTES, tell), b""))
        if known and known != _PACKED_KINDS[item.file.path.suffix.lower()]:
            return known
    head = next(read_blocks(item.file, tell), b"")
    if (known := _kind_by_magic(head)) and not (kind == "parquet" and known == "a Parquet file"):
        return known
    if kind in ("csv", "tsv", "parquet"):
        return "table"
    if suffix in _JSON_SUFFIXES:
        return "json"
    if _HTML.match(head[:4096]) or suffix in (".html", ".htm"):
        return "html"
    if suffix in _MARKUP_SUFFIXES or _XML.match(head[:4096]):
        return "xml"
    return "text"


def _kind_by_magic(head: bytes) -> str:
    """What begins with these bytes, of the kinds that are not read here; '' for all others."""
    if head[257:262] == b"ustar":
        return "a tar archive"
    return next((words for magic, words in _MAGIC.items() if head.startswith(magic)), "")


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
        head = snippet(data[:400].decode("utf-8", "replace"))
        if error.reason == "mets":  # passed over: nothing is wrong with it
            yield Rejected(where, error.reason, error.why, head=head)
        else:
            yield leave_out(where, error.reason, error.why, rules, head)
        return
    yield from _decoded(item, kind, decoded, rules)


def _decoded(item: Item, kind: str, decoded: Decoded, rules: Rules) -> Found:
    if decoded.refused:
        yield leave_out(item.path, "not_text", decoded.refused, rules)
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


def _json(item: Item, rules: Rules, tell: Tell) -> Found:
    """One JSON value over several lines, if that is what the whole file is; else what the reader of records finds in it."""
    if item.size == item.file.size and not _begins_with_an_object(item):
        value = _one_value(item, rules, tell)
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


def _one_value(item: Item, rules: Rules, tell: Tell) -> Any:
    """The JSON value that the whole file is; None where it is none (its first line may be torn), or is too long to hold."""
    parts, size = [], 0
    for block in read_blocks(item.file, tell):
        parts.append(block)
        size += len(block)
        if size > 4 * rules.max_bytes:
            return None
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError):  # the reader of records says what is wrong with which line
        return None


def _records(item: Item, rules: Rules, tell: Tell) -> Found:
    """The lines or rows of a file or a range of it; one that cannot be read loses itself alone."""
    bad = BadRecords(limit=1.0, quiet=True)
    start = None
    if item.start:  # places must be those of the file
        with RangeFile(item.file) as opened:
            start = {"at": item.start, "line": opened.line_at(item.start)}
    for record in read_records(item.file, bad.begin(), tell, start, 2 * rules.max_bytes):
        yield from _refused(bad, item)
        if record.at >= item.end and item.end < item.file.size:
            return
        place = f"{item.path}:{record.line}"
        yield _from_object(record.value, place, rules.text_key, snippet(str(record.value)[:400]))
    yield from _refused(bad, item)


def _refused(bad: BadRecords, item: Item) -> Iterator[Rejected]:
    """The bad lines since the last time; those behind the range belong to the next one."""
    for one in bad.listed:
        if one["at"] < item.end:
            what, why, _ = one["error"]
            reason = _REASONS.get(what.partition(":")[0], "not_text")
            yield Rejected(f"{one['path']}:{one['line']}", reason, f"byte {one['at']:,}: {why}")
    bad.listed.clear()  # the list has a limit: every bad line is to be named


def _table(item: Item, rules: Rules, tell: Tell) -> Found:
    """The rows of a table; one without the column of the texts is left out as a whole."""
    for number, one in enumerate(_records(item, rules, tell)):
        if not number and isinstance(one, Rejected) and one.reason == "no_text":
            yield leave_out(item.path, "unknown_kind", f"a table, {one.why}", rules)
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


# ---------------------------------------------------------------- the text in the bytes of a file

_BAD_SHARE = 0.01  # of the lines: from there on it is not a text with a few bad lines

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_DECLARED = re.compile(rb"<\?xml[^>]{0,200}?encoding\s*=\s*[\"']([A-Za-z0-9._-]+)[\"']|<meta[^>]{0,300}?charset\s*=\s*[\"']?([A-Za-z0-9._-]+)", re.I)  # fmt: skip
_HIGH_ONLY = bytes(32 if byte < 128 else byte for byte in range(256))
_RUNS = 5000  # of high bytes that are looked at


@dataclass(frozen=True)
class BadLine:
    """A line that is no text."""

    line: int
    byte: int
    why: str


@dataclass(frozen=True)
class Decoded:
    """The text of a file; `bad` are the lines that are not in it, `refused` says why there is no text at all."""

    text: str
    encoding: str
    bad: tuple[BadLine, ...] = field(default=())
    refused: str = ""


def declared_encoding(head: bytes) -> str:
    """What an XML declaration or an HTML meta element says; '' where nothing does, or nothing known."""
    found = _DECLARED.search(head[:2048])
    name = (found.group(1) or found.group(2)).decode() if found else ""
    try:
        return codecs.lookup(name).name if name else ""
    except LookupError:  # a name that Python does not know: as if nothing were declared
        return ""


def decode(data: bytes, declared: str = "") -> Decoded:
    """The text in these bytes: by its mark, as UTF-8, as UTF-16 without a mark, as declared, else as Windows-1252."""
    for mark, name in _MARKS:
        if data.startswith(mark):
            return _decode_as(data[len(mark) :], name)
    if known := _kind_by_magic(data):
        return Decoded("", "", refused=f"it is {known}")
    if b"\0" in data[:65536] and (wide := _wide(data[:65536])):
        return _decode_as(data, wide)
    if declared and declared not in ("utf-8", "ascii"):
        found = _decode_as(data, declared)
        if not found.refused:
            return found
    if b"\0" not in data:
        try:
            return Decoded(data.decode(), "utf-8")
        except UnicodeDecodeError:  # the next guess is tried
            pass
        if _is_latin(data):
            return _latin(data)
    return _good_lines(data)


def _decode_as(data: bytes, name: str) -> Decoded:
    if name == "utf-8":
        return decode(data)
    try:
        return Decoded(data.decode(name), name)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return Decoded("", name, refused=f"not {name}: {error.reason} at line {line}, byte {error.start:,}")


def _wide(head: bytes) -> str:
    """UTF-16 without a mark: every other byte of a Western text is NUL."""
    even, odd = head[::2].count(0), head[1::2].count(0)
    half = max(1, len(head) // 2)
    if odd > 0.4 * half and even < 0.05 * half:
        return "utf-16-le"
    if even > 0.4 * half and odd < 0.05 * half:
        return "utf-16-be"
    return ""


def _is_latin(data: bytes) -> bool:
    """Whether bytes that are not UTF-8 are single-byte Western text rather than damaged UTF-8.

    In Latin-1 hardly any pair of high bytes happens to be valid UTF-8; in damaged UTF-8 most of them are.
    """
    runs = data.translate(_HIGH_ONLY).split()
    bad = sum(len(run) for run in runs[:_RUNS] if not _is_utf8(run))
    good = sum(len(run) for run in runs[:_RUNS]) - bad
    return bad > good and sum(map(len, runs)) < 0.3 * len(data)


def _is_utf8(run: bytes) -> bool:
    try:
        run.decode()
    except UnicodeDecodeError:  # that is the answer
        return False
    return True


def _latin(data: bytes) -> Decoded:
    """Windows-1252, which is Latin-1 with quotes and dashes where Latin-1 has nothing; else Latin-1 itself."""
    try:
        return Decoded(data.decode("cp1252"), "cp1252")
    except UnicodeDecodeError:
        return Decoded(data.decode("latin-1"), "latin-1")


def _good_lines(data: bytes) -> Decoded:
    """The lines that are text; with too many that are not, none."""
    kept, bad, at = [], [], 0
    lines = data.split(b"\n")
    for number, raw in enumerate(lines, 1):
        fault = fault_in(raw)
        if fault is None:
            kept.append(raw.decode())
        else:
            bad.append(BadLine(number, at + fault[0], fault[1]))
        at += len(raw) + 1
    count = len(lines) if lines[-1] else len(lines) - 1  # behind the last newline there is no line
    if bad and len(bad) > max(1, _BAD_SHARE * count):
        first = bad[0]
        why = f"{len(bad):,} of {count:,} lines are not text; line {first.line}, byte {first.byte:,}: {first.why}"
        return Decoded("", "", tuple(bad), refused=why)
    return Decoded("\n".join(kept), "utf-8", tuple(bad))
