"""Instruction rows: files of questions and answers become conversations, each with its place; what is not one is named.

In:  .jsonl, .json (lines or one array), .csv, .tsv and .parquet files (the first kinds also packed by gzip or zstd).
Out: (row, "file:line"); which kind of rows a file holds; a row as a list of messages, or the reason why it is none.

Kinds, found by their keys: `messages` (or `conversations` with from and value), prompt with completion, instruction with
output (and input, system, history), instruction with instances.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from lamplighter.errors import BadData, InputMissing
from lamplighter.rundir import human_bytes

LINES, ARRAY, TABLE, COLUMNS = {".jsonl", ".ndjson"}, {".json"}, {".csv", ".tsv"}, {".parquet"}
SUFFIXES = LINES | ARRAY | TABLE | COLUMNS
PACKED = {".gz", ".zst"}
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
            "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "function": "tool",
            "observation": "tool"}  # fmt: skip
TABLE_BATCH = 1024
Message = dict[str, str]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}"""
Row = dict[str, Any]
Bad = Callable[[str, BadData], None]
"""Is told of a row that cannot be read, with its place; raises where that is the policy."""
Show = Callable[[int, str], None]
"""Is told how many bytes are behind, and what is being read now."""


def suffix_of(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


# ---------------------------------------------------------------- rows of files


def rows(paths: Iterable[Path], bad: Bad, show: Show = lambda done, place: None) -> Iterator[tuple[Row, str]]:
    """Every row of the files in order, with the place where it stands."""
    done = 0
    for path in paths:
        show(done, str(path))
        for row, place, at in _rows_of(path, bad):
            show(done + at, place)
            yield row, place
        done += path.stat().st_size


def _rows_of(path: Path, bad: Bad) -> Iterator[tuple[Row, str, int]]:
    """(row, place, about how many bytes of the file are behind it)."""
    suffix = suffix_of(path)
    try:
        if suffix in COLUMNS:
            yield from _columns(path)
        elif suffix in TABLE:
            yield from _table(path, bad)
        elif suffix in ARRAY and _first_letter(path) == b"[":
            yield from _array(path, bad)
        else:
            yield from _lines(path, bad)
    except OSError as error:
        raise InputMissing(f"cannot read {path}", error.strerror or str(error), "check the file") from error


def _open(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        import zstandard

        return io.BufferedReader(zstandard.open(path, "rb"))
    return open(path, "rb")


def _first_letter(path: Path) -> bytes:
    with _open(path) as file:
        head: bytes = file.read(4096)
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _lines(path: Path, bad: Bad) -> Iterator[tuple[Row, str, int]]:
    at = 0
    with _open(path) as file:
        for number, raw in enumerate(file, 1):
            place, at = f"{path}:{number}", at + len(raw)
            if raw.strip():
                try:
                    row = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
                except ValueError as error:
                    bad(place, _not_json(place, error))
                    continue
                if isinstance(row, dict):
                    yield row, place, at
                else:
                    bad(place, _no_object(place, row))


def _array(path: Path, bad: Bad) -> Iterator[tuple[Row, str, int]]:
    """One element after the other, so that each has its line and its share of the file."""
    with _open(path) as file:
        data = file.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise BadData(f"{path}:{line} is not UTF-8 text", str(error), "save it as UTF-8") from error
    decoder = json.JSONDecoder()
    at, line, counted, scale = _skip(text, text.index("[") + 1), 1, 0, len(data) / max(1, len(text))
    while text[at : at + 1] != "]":
        line, counted = line + text.count("\n", counted, at), at
        place = f"{path}:{line}"
        try:
            row, end = decoder.raw_decode(text, at)
        except ValueError as error:
            raise _not_json(place, error) from error
        at = _skip(text, end)
        if isinstance(row, dict):
            yield row, place, int(at * scale)
        else:
            bad(place, _no_object(place, row))
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "]":
            raise BadData(f"{place} is not JSON", "the array does not go on with , or ]", "mend or save the file again")


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\n", "\r", "\t"):
        at += 1
    return at


def _table(path: Path, bad: Bad) -> Iterator[tuple[Row, str, int]]:
    csv.field_size_limit(sys.maxsize)
    with _open(path) as file:
        lines = io.TextIOWrapper(file, "utf-8-sig", newline="")
        reader = csv.DictReader(lines, delimiter="\t" if suffix_of(path) == ".tsv" else ",", strict=True)
        begin, size = 2, path.stat().st_size
        try:
            for row in reader:
                place = f"{path}:{begin}"
                if None in row or None in row.values():
                    bad(place, BadData(f"{place} has another number of columns than line 1", "", "mend that line"))
                else:
                    at = file.tell() if path.suffix not in PACKED else 0
                    yield {name: value for name, value in row.items() if value != ""}, place, min(size, at)
                begin = reader.line_num + 1
        except (csv.Error, UnicodeDecodeError) as error:
            raise BadData(f"{path}:{begin} is not CSV", str(error), "save it again as UTF-8 CSV") from error


def _columns(path: Path) -> Iterator[tuple[Row, str, int]]:
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputMissing(f"cannot read {path}", str(error), "pip install 'lamplighter[data]'") from error
    try:
        file = parquet.ParquetFile(path)
        number, total, size = 0, max(1, file.metadata.num_rows), path.stat().st_size
        for batch in file.iter_batches(TABLE_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield row, f"{path}:{number}", size * number // total
    except pyarrow.ArrowException as error:
        raise BadData(f"{path} is not a readable Parquet file", str(error), "fetch or save it again") from error


def _not_json(place: str, error: ValueError) -> BadData:
    return BadData(f"{place} is not JSON", str(error), "mend that line")


def _no_object(place: str, row: object) -> BadData:
    return BadData(f"{place} is not a row", f"it is a {type(row).__name__}, wanted an object with keys", "mend it")


# ---------------------------------------------------------------- which kind a row is


def kind_of(row: Row) -> str | None:
    """The kind of instruction row that these keys make; None for any other row."""
    if isinstance(row.get("messages"), list | str) or isinstance(row.get("conversations"), list | str):
        return "messages"
    if "instruction" in row and "instances" in row:
        return "instances"
    if "instruction" in row and _answer_key(row):
        return "instruction"
    if "prompt" in row and _answer_key(row):
        return "prompt"
    return None


def _answer_key(row: Row) -> str | None:
    return next((key for key in ("output", "completion", "response") if key in row), None)


KIND_WORDS = {
    "messages": "messages",
    "instances": "instruction with instances",
    "instruction": "instruction, input, output",
    "prompt": "prompt, completion",
}


def look(path: Path, text_key: str, count: int = 20) -> tuple[str | None, str]:
    """(kind or None for text, why), by the first rows of a file."""
    if suffix_of(path) not in SUFFIXES:
        return None, f"{path.name} is a file of text"
    found: list[tuple[str | None, str, Row]] = []
    try:
        for row, place in rows([path], _Enough().bad):
            found.append((kind_of(row), place, row))
            if len(found) >= count:
                break
    except _Enough:
        pass
    kinds = {kind for kind, _, _ in found if kind}
    if not kinds or any(text_key in row for _, _, row in found[:1]):
        keys = ", ".join(found[0][2]) if found else ""
        return None, f"the rows of {path.name} have the keys {keys or 'none'}"
    if len(kinds) > 1:
        first, other = found[0], next(item for item in found if item[0] not in (None, found[0][0]))
        raise mixture(other[1], other[0], first[0])
    kind = kinds.pop()
    return kind, f"the rows of {path.name} have {KIND_WORDS[kind]}"


class _Enough(Exception):
    """So many broken rows that looking on is of no use."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def bad(self, place: str, error: BadData) -> None:
        self.count += 1
        if self.count >= 100:
            raise self


def mixture(place: str, kind: str | None, first: str | None) -> BadData:
    return BadData(
        f"{place} is a row of another kind",
        f"it has {KIND_WORDS[kind or 'messages']}; the rows before it have {KIND_WORDS[first or 'messages']}",
        "put rows of one kind into one file; several files may differ",
    )


# ---------------------------------------------------------------- a row as messages


class NotAnExample(Exception):
    """Why a row cannot be learned from, in a few words that are the same for rows of the same fault."""


def conversations(row: Row, kind: str, between: str = "\n\n") -> list[list[Message]]:
    """The conversations in a row (one, but for instances); `between` stands between instruction and input."""
    if kind == "messages":
        return [_from_messages(row)]
    if kind == "instances":
        instances = row["instances"]
        if not isinstance(instances, list) or not all(isinstance(one, dict) for one in instances) or not instances:
            raise NotAnExample("instances is not a list of inputs and outputs")
        return [_pair(row, {**row, **one}, between) for one in instances]
    return [_pair(row, row, between)]


def _pair(row: Row, turn: Row, between: str) -> list[Message]:
    question = _text(turn.get("instruction", turn.get("prompt")), "question")
    extra = _text(turn.get("input"), "input") if "instruction" in turn else ""
    asked = between.join(part for part in (question, extra) if part.strip())
    key = _answer_key(turn)
    answer = _text(turn.get(key) if key else None, "answer")
    messages: list[Message] = []
    if (system := _text(row.get("system", row.get("system_prompt")), "system message")).strip():
        messages.append({"role": "system", "content": system})
    for before in row.get("history") or []:
        if not isinstance(before, list | tuple) or len(before) != 2:
            raise NotAnExample("history is not a list of pairs")
        messages.append({"role": "user", "content": _text(before[0], "question")})
        messages.append({"role": "assistant", "content": _text(before[1], "answer")})
    return [*messages, {"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _from_messages(row: Row) -> list[Message]:
    value = row.get("messages") if row.get("messages") is not None else row.get("conversations")
    if isinstance(value, str):  # a column of a CSV file
        try:
            value = json.loads(value)
        except ValueError:
            raise NotAnExample("messages is not JSON") from None
    if not isinstance(value, list):
        raise NotAnExample("messages is not a list")
    messages: list[Message] = []
    system = row.get("system")
    if isinstance(system, str) and system.strip():
        messages.append({"role": "system", "content": system})
    for turn in value:
        if not isinstance(turn, dict):
            raise NotAnExample("a message is not an object")
        who = turn.get("role", turn.get("from"))
        role = SPEAKERS.get(who) if isinstance(who, str) else None
        if role is None:
            raise NotAnExample(f"a message has the role {who!r}" if who is not None else "a message has no role")
        messages.append({"role": role, "content": _text(turn.get("content", turn.get("value")), "message")})
    return messages


def _text(value: object, what: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    if isinstance(value, bool | int | float):
        return str(value)
    raise NotAnExample(f"the {what} is not text")


def complete(messages: list[Message]) -> list[Message]:
    """The conversation up to its last answer; NotAnExample where there is none, or a turn is empty."""
    last = max((place for place, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    kept = messages[: last + 1]
    if last < 0:
        raise NotAnExample("no answer")
    if not any(message["role"] == "user" for message in kept):
        raise NotAnExample("no question")
    for message in kept:
        if not message["content"].strip():
            name = {"assistant": "answer", "user": "question"}.get(message["role"], f"{message['role']} message")
            raise NotAnExample(f"the {name} is empty")
    try:
        json.dumps(kept, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise NotAnExample("it cannot be written as UTF-8") from None
    return kept


def words_of(paths: list[Path]) -> str:
    size = sum(path.stat().st_size for path in paths)
    return f"{paths[0]}{f' and {len(paths) - 1} more files' if len(paths) > 1 else ''}, {human_bytes(size)}"
