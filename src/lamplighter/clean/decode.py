"""The text in the bytes of a file: its encoding by a mark, by its bytes or by what it declares; bad lines named.

In:  bytes.
Out: a text, with every line that cannot be decoded named by line and byte.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field

from lamplighter.readers.records import fault_in

_BAD_SHARE = 0.01  # of the lines: from there on it is not a text with a few bad lines

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_BINARY = (b"%PDF", b"PK\x03\x04", b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"\x7fELF", b"PAR1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")  # fmt: skip
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
    except LookupError:
        return ""


def decode(data: bytes, declared: str = "") -> Decoded:
    """The text in these bytes: by its mark, as UTF-8, as UTF-16 without a mark, as declared, else as Windows-1252."""
    for mark, name in _MARKS:
        if data.startswith(mark):
            return _decode_as(data[len(mark) :], name)
    if any(data.startswith(magic) for magic in _BINARY):
        return Decoded("", "", refused=f"it begins like a binary file ({data[:4]!r})")
    if b"\0" in data[:65536] and (wide := _wide(data[:65536])):
        return _decode_as(data, wide)
    if declared and declared not in ("utf-8", "ascii"):
        found = _decode_as(data, declared)
        if not found.refused:
            return found
    if b"\0" not in data:
        try:
            return Decoded(data.decode(), "utf-8")
        except UnicodeDecodeError:
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
    except UnicodeDecodeError:
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
    if bad and len(bad) > max(1, _BAD_SHARE * len(lines)):
        first = bad[0]
        why = f"{len(bad):,} of {len(lines):,} lines are not text; line {first.line}, byte {first.byte:,}: {first.why}"
        return Decoded("", "", tuple(bad), refused=why)
    return Decoded("\n".join(kept), "utf-8", tuple(bad))
