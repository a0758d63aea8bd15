"""The raw documents of one item: unpacked, decoded, taken out of JSON or markup; what cannot be read is named and goes on.

In:  an item.
Out: raw documents and rejections, in order.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lamplighter.clean import detect, html
from lamplighter.clean.inputs import Item
from lamplighter.clean.rules import Raw, Rejected, Rules, snippet
from lamplighter.clean.types import BadMarkup

BLOCK_BYTES = 1 << 20
OUR_KEYS = {"text", "source", "title", "author", "language", "type", "meta"}
Found = Iterator[Raw | Rejected]
Tick = Callable[[int], None]


class Torn(Exception):
    """A packed file that ends in the middle, or is damaged."""


def documents(item: Item, rules: Rules, tick: Tick) -> Found:
    """Everything in the item. `tick` hears of the bytes of the file as they are read."""
    path = Path(item.path)
    if item.end == 0:
        yield Rejected(item.path, "empty", "the file has 0 bytes")
        return
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(item.start)
            blocks = _blocks(path, _counted(file.read, item.size, tick))
            first = next(blocks, b"")
            kind = detect.kind_of(path, first)
            if kind == "json":
                yield from _json(item, first, blocks, rules)
            else:
                yield from _whole(item, kind, first, blocks, rules)
    except OSError as error:
        yield Rejected(item.path, "unreadable", error.strerror or str(error))
    except Torn as error:
        yield Rejected(item.path, "cut_short", str(error))


def _counted(read: Callable[[int], bytes], size: int, tick: Tick) -> Iterator[bytes]:
    while size > 0 and (block := read(min(BLOCK_BYTES, size))):
        size -= len(block)
        yield block
        tick(len(block))


def _blocks(path: Path, raw: Iterator[bytes]) -> Iterator[bytes]:
    if path.suffix.lower() not in detect.PACKED_SUFFIXES:
        yield from raw
        return
    import zstandard

    unpacker: Any = None
    try:
        for block in raw:
            while block and (unpacker or block.strip(b"\0")):  # zeros after the end are padding
                if unpacker is None:
                    gz = path.suffix.lower() == ".gz"
                    unpacker = zlib.decompressobj(31) if gz else zstandard.ZstdDecompressor().decompressobj()
                data = unpacker.decompress(block)
                if data:
                    yield data
                block, unpacker = (unpacker.unused_data, None) if unpacker.eof else (b"", unpacker)
    except (zlib.error, zstandard.ZstdError) as error:
        raise Torn(f"cannot unpack: {error}") from error
    if unpacker is not None:
        raise Torn("the packed data ends in the middle")


# ---------------------------------------------------------------- one document in a file


def _whole(item: Item, kind: str, first: bytes, blocks: Iterator[bytes], rules: Rules) -> Found:
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
            pieces = html.read_xml(data, rules.split)
            for piece in pieces:
                place = f"{item.path}#{piece.part}" if piece.part else item.path
                yield Raw(place, piece.text, piece.extra, kind)
            return
        decoded = detect.decode(data, detect.declared_encoding(data) if kind == "html" else "")
    except BadMarkup as error:
        where = f"{item.path}:{error.line}:{error.column}" if error.line else item.path
        yield Rejected(where, error.reason, error.why, head=snippet(data[:400].decode("utf-8", "replace")))
        return
    yield from _decoded(item, kind, decoded, rules)


def _decoded(item: Item, kind: str, decoded: detect.Decoded, rules: Rules) -> Found:
    if decoded.refused:
        yield Rejected(item.path, "not_text", decoded.refused)
        return
    for bad in decoded.bad:
        yield Rejected(f"{item.path}:{bad.line}", "bad_line", f"byte {bad.byte:,}: {bad.why}; the line is left out")
    if kind == "html":
        page = html.read_html(decoded.text)
        yield Raw(item.path, page.text, page.extra, kind)
    elif rules.separator:
        for number, text in enumerate(decoded.text.split(rules.separator), 1):
            if text.strip():
                yield Raw(f"{item.path}#{number}", text)
    else:
        yield Raw(item.path, decoded.text)


# ---------------------------------------------------------------- JSON


def _json(item: Item, first: bytes, blocks: Iterator[bytes], rules: Rules) -> Found:
    """One object in a line; a file that begins with a bracket, or whose first object goes over lines, is read as a whole."""
    start = first.lstrip(b"\xef\xbb\xbf \t\r\n")
    if item.start == 0 and (start.startswith(b"[") or _goes_over_lines(start)):
        yield from _array(item, first, blocks, rules)
        return
    number = _line_number(item)
    for line, long in _lines(first, blocks, 2 * rules.max_bytes):
        number += 1
        if long:
            yield Rejected(f"{item.path}:{number}", "too_long", f"a line of {long:,} bytes; the limit is {2 * rules.max_document_mb:g} MB (--max-document-mb)", head=snippet(line[:400].decode("utf-8", "replace")))  # fmt: skip
        elif line.strip():
            yield _record(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, f"{item.path}:{number}", rules)


def _line_number(item: Item) -> int:
    """How many lines are before this stretch: places must be those of the file."""
    count, left = 0, item.start
    if left:
        with open(item.path, "rb", buffering=0) as file:
            while left and (block := file.read(min(BLOCK_BYTES, left))):
                count, left = count + block.count(b"\n"), left - len(block)
    return count


def _goes_over_lines(start: bytes) -> bool:
    line = start.partition(b"\n")[0].rstrip()
    return start.startswith(b"{") and b"\n" in start and not line.endswith(b"}")


def _lines(first: bytes, blocks: Iterator[bytes], limit: int) -> Iterator[tuple[bytes, int]]:
    """(line, 0), or (its beginning, its length) for one over the limit, of which no more is kept."""
    parts: list[bytes] = []
    size = 0
    for block in _chain(first, blocks):
        pieces = block.split(b"\n")
        for place, piece in enumerate(pieces):
            size += len(piece)
            if size <= limit or not parts:
                parts.append(piece if size <= limit else piece[:400])
            if place < len(pieces) - 1:
                yield (b"".join(parts), 0) if size <= limit else (b"".join(parts)[:400], size)
                parts, size = [], 0
    if size:
        yield (b"".join(parts), 0) if size <= limit else (b"".join(parts)[:400], size)


def _chain(first: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from blocks


def _record(line: bytes, place: str, rules: Rules) -> Raw | Rejected:
    head = snippet(line[:400].decode("utf-8", "replace"))
    try:
        return _from_object(json.loads(line.decode()), place, rules.text_key, head)
    except UnicodeDecodeError as error:
        return Rejected(place, "not_text", f"not UTF-8 at byte {error.start:,} of the line: {error.reason}", head=head)
    except (ValueError, RecursionError) as error:
        return Rejected(place, "bad_json", str(error), head=head)


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
    if key == "text" and "source" in others and set(found) <= OUR_KEYS:  # our own output, cleaned again
        return Raw(str(others.pop("source")), text, others, "ours")
    return Raw(place, text, {"meta": others} if others else {}, "json")


def _array(item: Item, first: bytes, blocks: Iterator[bytes], rules: Rules) -> Found:
    parts, size = [first], len(first)
    for block in blocks:
        parts.append(block)
        size += len(block)
        if size > 4 * rules.max_bytes:
            yield Rejected(item.path, "too_long", f"one JSON value of over {4 * rules.max_document_mb:g} MB; write it as JSON lines")  # fmt: skip
            return
    data = b"".join(parts)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        line, column = getattr(error, "lineno", 0), getattr(error, "colno", 0)
        where = f"{item.path}:{line}:{column}" if line else item.path
        yield Rejected(where, "bad_json", str(error), head=snippet(data[:400].decode("utf-8", "replace")))
        return
    for number, one in enumerate(found if isinstance(found, list) else [found], 1):
        yield _from_object(one, f"{item.path}#{number}", rules.text_key, snippet(str(one)[:400]))
