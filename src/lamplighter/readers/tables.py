"""Tables: CSV, TSV and Parquet; each row with its place and the cursor after it.

In:  an OpenFile, and for Parquet the file itself; the column by its name, dotted for one inside a struct; "*" for all of them.
Out: Records in order. Memory holds some rows, not the file. A bad row is set aside and counted, or refused.
"""

from __future__ import annotations

import codecs
import csv
import importlib.util
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.errors import BadData, InputMissing
from lamplighter.readers.lines import lines_of
from lamplighter.readers.local import LocalFile, Tell, suffix_of
from lamplighter.readers.records import Cursor, OpenFile, Record

if TYPE_CHECKING:
    from lamplighter.readers.remote import RemoteFile

ROW_BYTES = 1 << 28  # one row of CSV is held whole; a longer one is a quote that never ends
BATCH_ROWS = 256
_COLUMN_BUFFER_BYTES = 1 << 20


def no_column(name: str, key: str, columns: list[str], hint: str = "") -> BadData:
    """The error for a column that is not there: which are, and which may be meant."""
    near = get_close_matches(key, columns, n=1, cutoff=0.4)
    advice = (
        f"did you mean --data.text_key {near[0]}?" if near else "set data.text_key to the column that holds the text"
    )
    listed = ", ".join(columns[:20]) + (f" and {len(columns) - 20} more" if len(columns) > 20 else "")
    return BadData(f'no column "{key}" in {name}', f"its columns are: {listed}{hint}", advice)


# ---------------------------------------------------------------- CSV and TSV


class _Lines:
    """The lines of a file for csv.reader, which takes as many as a row has; counts them and their bytes."""

    def __init__(self, blocks: Iterator[bytes], at: int, line: int) -> None:
        self.lines = lines_of(blocks, at, line)
        self.at, self.line = at, line
        self.row_at = at

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        number, at, raw, size = next(self.lines)
        if not size:  # behind the last newline there is no line
            raise StopIteration
        self.at, self.line = at + size, number + 1
        if self.at - self.row_at > ROW_BYTES:
            raise csv.Error(f"a row of over {ROW_BYTES >> 20} MB: a quote that is opened and never closed?")
        text = raw.decode("utf-8", "surrogateescape")  # a bad byte spoils its own row only
        return text + "\n" if size > len(raw) else text


@dataclass(frozen=True)
class _Header:
    """What the first row says, as far as a later reading needs it."""

    columns: list[str]
    delimiter: str

    def row(self, fields: list[str], where: str) -> dict[str, str]:
        if len(fields) != len(self.columns):
            why = f"{len(fields)} fields, but the header has {len(self.columns)}"
            raise BadData(
                f"bad row: {where}", why, "mend or remove the row; a text with commas or newlines needs quotes"
            )
        return dict(zip(self.columns, fields, strict=True))


def read_csv(r: OpenFile) -> Iterator[Record]:
    """The rows; the first row names the columns, a quoted field may hold newlines."""
    csv.field_size_limit(ROW_BYTES)
    lines = _Lines(r.blocks(r.at), r.at, r.line)
    header = _Header(*r.start["header"]) if "header" in r.start else _header(r, lines)
    known = {"header": [header.columns, header.delimiter]}
    rows = csv.reader(lines, delimiter=header.delimiter, strict=True)
    row = int(r.start.get("row", 0))
    while True:
        before, lines.row_at = (lines.at, lines.line), lines.at
        where = f"{r.name}:{lines.line}, byte {lines.at:,}"
        try:
            fields = next(rows, None)
        except csv.Error as error:
            if lines.at - before[0] > ROW_BYTES:
                raise BadData(f"bad row: {where}", str(error), "mend the file") from error
            row += 1
            wrong = BadData(f"bad row: {where}", str(error), "mend the quotes, or remove the row")
            r.bad.set_aside(before[1], before[0], wrong)
            rows = csv.reader(lines, delimiter=header.delimiter, strict=True)
            continue
        if fields is None:
            break
        if not fields:
            continue
        row += 1
        try:  # around the row alone: that the file is cut short is no fault of a row
            value = header.row(fields, where)
        except BadData as error:
            r.bad.set_aside(before[1], before[0], error)
            continue
        after = r.cursor(lines.at, lines.line) | {"row": row} | known
        yield Record(value, before[1], before[0], r.cursor(*before) | {"row": row - 1} | known, after)
    r.bad.end(row)


def _header(r: OpenFile, lines: _Lines) -> _Header:
    """The first row. Another delimiter than the ending says is taken where only that one gives the column, and said."""
    usual = "\t" if suffix_of(r.name) == ".tsv" else ","
    taken: list[str] = []

    def first() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line

    try:
        columns = next(csv.reader(first(), delimiter=usual, strict=True), [])
    except csv.Error as error:
        raise BadData(f"bad header: {r.name}:1", str(error), "the first row must name the columns") from error
    columns = [name.removeprefix(codecs.BOM_UTF8.decode()).strip() for name in columns]
    if r.key == "*" or columns.count(r.key) == 1:
        return _Header(columns, usual)
    if columns.count(r.key) > 1:
        raise BadData(f'two columns "{r.key}" in {r.name}', "which one is meant?", "name them differently")
    for other in (";", "\t", "|", ","):
        found = next(csv.reader(io.StringIO("".join(taken).removeprefix("\ufeff")), delimiter=other), [])
        if other != usual and found.count(r.key) == 1:
            report.note(f"the fields of {r.name} are separated by {other!r}, not by {usual!r}: read so")
            return _Header(found, other)
    raise no_column(r.name, r.key, columns, "" if len(columns) > 1 else " (the first row must name the columns)")


# ---------------------------------------------------------------- Parquet


def require_library(names: Iterable[str]) -> None:
    """An error that names the first Parquet file, where what reads them is not installed: before any other file is read."""
    first = next((name for name in names if name.lower().endswith(".parquet")), None)
    if first is not None and importlib.util.find_spec("pyarrow") is None:
        raise _without_library(first)


def _without_library(name: str) -> InputMissing:
    why, advice = "Parquet needs the package pyarrow, which is missing or broken", "pip install 'lamplighter[data]'"
    return InputMissing(f"cannot read {name}", why, advice)


def read_parquet(r: OpenFile, item: LocalFile | RemoteFile, tell: Tell) -> Iterator[Record]:
    """The rows, row group by row group; where one column is asked for, only that one is read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise _without_library(r.name) from error

    try:
        with item.open(tell) as file:
            parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=_COLUMN_BUFFER_BYTES)
            yield from _groups(r, parquet, item.size or 0, tell)
            if isinstance(item, LocalFile):
                item.check(file.fileno(), "while it was read")
    except pyarrow.ArrowException as error:
        why = " ".join(str(error).split())[:300]
        raise BadData(f"cut short or damaged: {r.name}", why, "fetch or write the file again") from error
    except OSError as error:
        raise BadData(f"damaged: {r.name}", " ".join(str(error).split())[:300], "fetch or write it again") from error


def _groups(r: OpenFile, parquet: Any, size: int, tell: Tell) -> Iterator[Record]:
    column = _column(r, parquet.schema_arrow)
    group, row = int(r.start.get("group", 0)), int(r.start.get("row", 0))
    before = sum(parquet.metadata.row_group(number).num_rows for number in range(group))
    total, groups = max(1, parquet.metadata.num_rows), parquet.num_row_groups
    r.bad.end_at = total
    for number in range(group, groups):
        words = f"{r.name}, row group {number + 1} of {groups}"
        for at, value in _rows(r, parquet, column, number, row):
            if at % BATCH_ROWS == 0:
                tell(words, size * (before + at) // total)
            if isinstance(value, BadData):
                r.bad.set_aside(before + at + 1, before + at, value)
                continue
            after: Cursor = {"file": r.number, "group": number, "row": at + 1}
            if r.bad.count:
                after["bad"] = r.bad.count
            yield Record(value, before + at + 1, before + at, {**after, "row": at}, after)
        before += parquet.metadata.row_group(number).num_rows
        row = 0
        tell(words, size * before // total)
    r.bad.end(parquet.metadata.num_rows)


def _column(r: OpenFile, schema: Any) -> list[str] | None:
    """The column to read; None for all of them. A dotted name goes into a struct."""
    import pyarrow.types as types

    if r.key == "*":
        return None
    names = [r.key] if r.key in schema.names else r.key.split(".")
    if names[0] not in schema.names:
        raise no_column(r.name, r.key, schema.names)
    kind = schema.field(names[0]).type
    for name in names[1:]:
        inner = [field.name for field in kind] if types.is_struct(kind) else []
        if name not in inner:
            raise no_column(r.name, r.key, [f"{names[0]}.{one}" for one in inner] or schema.names)
        kind = kind.field(name).type
    value = kind.value_type if types.is_dictionary(kind) else kind
    kinds = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_string_view)
    if not any(check(value) for check in kinds):
        texts = [field.name for field in schema if types.is_string(field.type) or types.is_large_string(field.type)]
        why = f"it holds {kind}; columns of text: {', '.join(texts) or 'none'}"
        raise BadData(f'column "{r.key}" of {r.name} is not text', why, "set data.text_key")
    return [".".join(names)]


def _rows(
    r: OpenFile, parquet: Any, column: list[str] | None, group: int, start: int
) -> Iterator[tuple[int, dict[str, Any] | BadData]]:
    """(row of the group, its columns or why they cannot be read) from a row on."""
    at = 0
    for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=column, use_threads=False):
        if at + batch.num_rows > start:
            values = _whole_rows(batch, r.name) if column is None else _column_values(batch, r.key)
            for number, value in enumerate(values):
                if at + number >= start:
                    yield at + number, value
        at += batch.num_rows


def _column_values(batch: Any, key: str) -> Iterator[dict[str, Any]]:
    """One value for each row: a text, or bytes where they may not be one."""
    import pyarrow

    array = batch.column(0)
    while pyarrow.types.is_struct(array.type):
        array = array.flatten()[0]  # one leaf was read, so there is one field; a null struct gives nulls
    if pyarrow.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    try:
        values = array.to_pylist()
    except UnicodeDecodeError:
        wide = pyarrow.types.is_large_string(array.type)
        values = array.cast(pyarrow.large_binary() if wide else pyarrow.binary()).to_pylist()
    return ({key: value} for value in values)


def _whole_rows(batch: Any, name: str) -> Iterator[dict[str, Any] | BadData]:
    """Every column of each row; one that is not UTF-8 spoils its own row only."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for number in range(batch.num_rows):
            try:
                yield batch.slice(number, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield BadData(f"not text: {name}", f"not UTF-8: {error.reason}", "mend or remove the row")
