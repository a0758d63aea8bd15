"""Files here or elsewhere, opened by their ending: texts or records, each with its place and the cursor after it.

In:  paths, folders, patterns and URLs; how the files are to be read.
Out: the files that they name; the texts or the records of one file from a cursor on. Every room reads files through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from lamplighter.readers.bad_records import PACKED_TIMES, BadInReading
from lamplighter.readers.compression import Unpacked
from lamplighter.readers.lines import read_json
from lamplighter.readers.local import LocalFile, Tell, find_files, is_packed, kind_of
from lamplighter.readers.records import Cursor, OpenFile, Record, Texts, texts_of
from lamplighter.readers.remote import RemoteFile, as_local, find_remote, is_url
from lamplighter.readers.tables import read_csv, read_parquet
from lamplighter.readers.text import read_text

BLOCK_BYTES = 1 << 18
PACKED_BLOCK_BYTES = 1 << 16  # unpacks to more
PART_CHARS = 1 << 20
LINE_BYTES = 1 << 20  # a longer line is decoded in pieces
Item = LocalFile | RemoteFile
_Blocks = Callable[[int], Iterator[bytes]]


@dataclass(frozen=True)
class TextFormat:
    """How documents are found in files."""

    separator: str | None = None
    text_key: str = "text"


def find_items(
    entries: list[str], retry_s: float = 600.0, known: Mapping[str, list[RemoteFile]] | None = None
) -> list[Item]:
    """The files that paths, folders, patterns and URLs name, in the order of the entries."""
    found: list[Item] = []
    local: list[str] = []
    for entry in entries:
        if is_url(entry) and not entry.startswith("file://"):
            found += find_files(local) if local else []
            found += (known or {}).get(entry) or find_remote(entry, retry_s)
            local = []
        else:
            local.append(as_local(entry) if is_url(entry) else entry)
    return [*found, *(find_files(local) if local else [])]


def has_records(item: Item) -> bool:
    """Whether a file holds records (JSON, CSV, Parquet), not plain text."""
    return kind_of(item.name) not in ("text", "")


def unpacked_bytes(item: Item) -> int | None:
    """The size of a file, unpacked: the most that it may be."""
    return item.size * PACKED_TIMES if item.size is not None and is_packed(item.name) else item.size


def read_texts(
    item: Item, form: TextFormat, bad: BadInReading, tell: Tell, start: Cursor | None = None, number: int = 0
) -> Texts:
    """The documents of a file after a cursor; `number` is its own in the source, for the cursors."""
    file, unpacked = _open(item, form, bad, tell=tell, start=start or {}, number=number)
    texts = texts_of(file, _records(file, item, tell)) if has_records(item) else read_text(file)
    return ((text, after | unpacked.note(after["at"])) for text, after in texts) if unpacked else texts


def read_records(
    item: Item, bad: BadInReading, tell: Tell, start: Cursor | None = None, longest: int | None = None
) -> Iterator[Record]:
    """The JSON values or table rows of a file after a cursor, whole; JSON lines of over `longest` bytes are set aside."""
    file, unpacked = _open(item, TextFormat(text_key="*"), bad, tell=tell, start=start or {}, number=0)
    file = replace(file, longest=longest)
    records = _records(file, item, tell)
    if unpacked is None:
        return records
    return (record._replace(after=record.after | unpacked.note(record.after["at"])) for record in records)


def read_blocks(item: Item, tell: Tell) -> Iterator[bytes]:
    """All of the unpacked bytes of a file."""
    return _blocks(item, tell, {})[0](0)


def _blocks(item: Item, tell: Tell, start: Cursor) -> tuple[_Blocks, Unpacked | None]:
    if not is_packed(item.name):
        return lambda at: item.blocks(at, BLOCK_BYTES, tell), None
    unpacked = Unpacked(lambda at: item.blocks(at, PACKED_BLOCK_BYTES, tell), item.name, start)
    return unpacked.blocks, unpacked


def _open(
    item: Item, form: TextFormat, bad: BadInReading, tell: Tell, start: Cursor, number: int
) -> tuple[OpenFile, Unpacked | None]:
    blocks, unpacked = _blocks(item, tell, start)
    kind = kind_of(item.name)
    in_file = bad.file(item.name, unpacked_bytes(item), "lines" if kind in ("text", "json", "") else "rows")
    file = OpenFile(
        number,
        item.name,
        kind,
        blocks=blocks,
        start=start,
        bad=in_file,
        key=form.text_key,
        separator=form.separator,
        part_chars=PART_CHARS,
        line_bytes=LINE_BYTES,
    )
    return file, unpacked


def _records(file: OpenFile, item: Item, tell: Tell) -> Iterator[Record]:
    if file.kind == "parquet":
        return read_parquet(file, item, tell)
    return read_json(file) if file.kind == "json" else read_csv(file)
