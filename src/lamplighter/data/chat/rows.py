"""Instruction rows: files and datasets of questions and answers become conversations; what is not one is named.

In:  the entries of data.paths: files here or elsewhere (JSON, CSV, Parquet; packed or not) and datasets.
Out: a RowSource: conversations to learn from, each with its place; as a Source, their texts (to train a tokenizer on).

Kinds of rows, known by their keys: `messages` (or `conversations` with from and value), prompt with completion, question with
answer, instruction with output (and input, system, history), instruction with instances; and pairs: a prompt with a chosen and
a rejected answer; glaive's chat as one text. Calls of tools become text (tool_calls.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.data.chat.tool_calls import NotAnExample, calls_of, glaive_messages, is_glaive, offered, spoken_call
from lamplighter.data.sources import Opened, is_named, is_own
from lamplighter.data.sources.hub import HubSource, open_dataset
from lamplighter.errors import BadConfig, BadData, InputMissing
from lamplighter.readers.bad_records import LIMIT, SOON, BadInReading, BadRecords
from lamplighter.readers.files import Item, has_records, read_records, unpacked_bytes
from lamplighter.readers.local import LocalFile, Tell, find_paths, kind_of, local_file, suffix_of
from lamplighter.readers.records import Cursor, Position, Record, digest
from lamplighter.readers.remote import as_local, find_remote, is_url
from lamplighter.rundir import hash_file, human_bytes

if TYPE_CHECKING:
    from lamplighter.config import Data

_RULES = 2  # changes when the same rows give other conversations
_EVENTS = 100  # for single rows
_LOOK_ROWS = 20
_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"}
_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
            "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "function": "tool",
            "observation": "tool", "function_response": "tool", "function-response": "tool", "developer": "system",
            "ipython": "tool", "function_call": "assistant", "function-call": "assistant"}  # fmt: skip
_CALLERS = ("function_call", "function-call")  # who speaks is the model, and what it says is a call
Message = dict[str, str]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}"""
Row = dict[str, Any]
_RowInput = Item | HubSource
PAIR = "pair"
_SHOWN = 40  # characters of a word of the data, in a reason


# ---------------------------------------------------------------- which kind a row is


def kind_of_row(row: Row, pairs: bool = False) -> str | None:
    """The kind of instruction row that these keys make; None for any other row.

    `pairs`: a row that has two answers to prefer one of is that, whatever else it holds (often the chosen one once more).
    """
    if pairs and _is_pair(row):
        return PAIR
    if isinstance(row.get("messages"), list | str) or isinstance(row.get("conversations"), list | str):
        return "messages"
    if "instruction" in row and "instances" in row:
        return "instances"
    if "instruction" in row and _answer_key(row):
        return "instruction"
    if "prompt" in row and _answer_key(row):
        return "prompt"
    if "question" in row and "answer" in row:
        return "question"
    if _is_pair(row):
        return PAIR
    return "glaive" if is_glaive(row) else None


def _is_pair(row: Row) -> bool:
    return "chosen" in row and "rejected" in row


def _answer_key(row: Row) -> str | None:
    return next((key for key in ("output", "completion", "response") if key in row), None)


KIND_WORDS = {
    "messages": "messages",
    "instances": "instruction with instances",
    "instruction": "instruction, input, output",
    "prompt": "prompt, completion",
    "question": "question, answer",
    "glaive": "chat (USER: ... ASSISTANT: ...)",
    PAIR: "prompt, chosen, rejected",
}


def mixture(place: str, kind: str | None, first: str | None) -> BadData:
    return BadData(
        f"{place} is a row of another kind",
        f"it has {KIND_WORDS[kind or 'messages']}; the rows before it have {KIND_WORDS[first or 'messages']}",
        "put rows of one kind into one file; several files may differ",
    )


# ---------------------------------------------------------------- a row as messages


def conversations(row: Row, kind: str, between: str = "\n\n") -> list[list[Message]]:
    """The conversations in a row (one, but for instances and pairs); `between` stands between instruction and input."""
    if kind == PAIR:
        pair = pair_of(row, between)
        return [pair.chosen, pair.rejected]
    if kind == "messages":
        return [_from_messages(row)]
    if kind == "glaive":
        return [glaive_messages(row)]
    if kind == "prompt" and isinstance(row.get("prompt"), list):  # both are messages
        rest = row.get(_answer_key(row) or "")
        return [
            _from_messages({**row, "messages": [*row["prompt"], *(rest if isinstance(rest, list) else [_said(rest)])]})
        ]
    if kind == "question":
        return [_pair(row, {"prompt": row["question"], "completion": row["answer"]}, between)]
    if kind == "instances":
        instances = row["instances"]
        if not isinstance(instances, list) or not all(isinstance(one, dict) for one in instances) or not instances:
            raise NotAnExample("instances is not a list of inputs and outputs")
        return [_pair(row, {**row, **one}, between) for one in instances]
    return [_pair(row, row, between)]


def _said(answer: object) -> Row:
    return {"role": "assistant", "content": answer}


@dataclass(frozen=True)
class Pair:
    """Two conversations that begin alike; the first is preferred."""

    chosen: list[Message]
    rejected: list[Message]
    shared: int  # messages that both begin with: the prompt


def pair_of(row: Row, between: str = "\n\n") -> Pair:
    """A row's chosen and rejected conversation, each with the prompt before it (which may stand in them alone)."""
    sides = []
    for name in ("chosen", "rejected"):
        turns = row[name]
        if turns is None or turns in ("", [], {}):
            raise NotAnExample(f"the {name} answer is empty")
        turns = turns if isinstance(turns, list) else [turns if isinstance(turns, dict) else _said(turns)]
        sides.append(complete(_from_messages({**row, "messages": [*_prompt(row, turns, between), *turns]})))
    chosen, rejected = sides
    if chosen == rejected:
        raise NotAnExample("chosen and rejected are the same")
    shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if shared is None:
        raise NotAnExample("one of the answers is the beginning of the other")
    return Pair(chosen, rejected, shared)


def _prompt(row: Row, turns: list[Any], between: str) -> list[Row]:
    """The messages before an answer; none where the answer is a whole conversation."""
    first = turns[0] if isinstance(turns[0], dict) else {}
    prompt = row.get("prompt", row.get("question"))
    if prompt is None and isinstance(row.get("conversations"), list):
        prompt = row["conversations"]
    if _SPEAKERS.get(str(first.get("role", first.get("from")))) != "assistant":
        return []
    if isinstance(prompt, list):
        return prompt
    if prompt is None and "instruction" not in row:
        why = "it has no prompt, and chosen is no conversation"
        raise NotAnExample(f"{why} (one text with Human: and Assistant: must be taken apart first)")
    asked = {**row, "prompt": prompt} if prompt is not None else row
    return list(_pair(row, {**asked, "completion": ""}, between)[:-1])


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
    tools = offered(row.get("tools"))
    for turn in value:
        if not isinstance(turn, dict):
            raise NotAnExample("a message is not an object")
        who = turn.get("role", turn.get("from"))
        role = _SPEAKERS.get(who) if isinstance(who, str) else None
        if role is None:
            raise NotAnExample(
                "a message has no role" if who is None else f"a message has the role {str(who)[:_SHOWN]!r}"
            )
        content = _text(turn.get("content", turn.get("value")), "message")
        if who in _CALLERS:
            content = spoken_call(content)
        if role == "assistant" and (calls := calls_of(turn)):
            content = "\n".join([*([content] if content.strip() else []), *calls])
        messages.append({"role": role, "content": content})
    if tools and messages and messages[0]["role"] == "system":
        messages[0] = {"role": "system", "content": f"{messages[0]['content']}\n\n{tools}"}
    elif tools:
        messages.insert(0, {"role": "system", "content": tools})
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


# ---------------------------------------------------------------- the source


@dataclass
class SetAside:
    """Rows that are not learned from: counted by reason, the first place of each kept; or refused, by policy."""

    policy: str = "set_aside"
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    quiet: bool = False

    def add(self, place: str, reason: str) -> None:
        if self.policy == "refuse":
            advice = "mend it, or set such rows aside: --data.bad_text set_aside"
            raise BadData(f"{place} cannot be learned from", reason, advice)
        self.counts[reason] += 1
        self.first.setdefault(reason, place)
        if not self.quiet and self.counts.total() <= _EVENTS:
            report.event("set_aside", path=place.rpartition(":")[0], line=place.rpartition(":")[2], why=reason)

    def add_unread(self, bad: BadRecords) -> None:
        """What could not even be read as a row; its events are told already."""
        for one in bad.listed:
            reason = str(one["error"][0]).partition(":")[0]
            self.counts[reason] += 1
            self.first.setdefault(reason, f"{one['path']}:{one['line']}")


class RowSource:
    """Files and datasets of instruction rows."""

    def __init__(
        self, inputs: list[_RowInput], kinds: list[str], policy: str, limit: int | None = None, bad_limit: float = LIMIT
    ) -> None:
        self.inputs, self.kinds, self.policy, self.limit, self.bad_limit = inputs, kinds, policy, limit, bad_limit
        self._position = Position(name_of(inputs[0]), 0)
        self._fingerprint = ""

    def __str__(self) -> str:
        first = f"the first {self.limit:,} rows of " if self.limit else ""
        others = f" and {len(self.inputs) - 1} more files" if len(self.inputs) > 1 else ""
        total = self.total_bytes()
        return f"{first}{name_of(self.inputs[0])}{others}, {'size unknown' if total is None else human_bytes(total)}"

    def local_files(self) -> list[LocalFile] | None:
        """Its files; None where one of them is elsewhere."""
        local = [one for one in self.inputs if isinstance(one, LocalFile)]
        return local if len(local) == len(self.inputs) else None

    def fingerprint(self) -> str:
        """The content of every file in order (of remote ones: address, size and mark; of datasets: their revision)."""
        if not self._fingerprint:
            marks = []
            with report.phase("hash files", total=self.total_bytes(), unit="B") as p:
                for one, kind in zip(self.inputs, self.kinds, strict=True):
                    p.tick(0, name_of(one))
                    marks.append([*_identity(one, p.tick), kind])
            self._fingerprint = digest(["rows", _RULES, marks, self.policy, self.limit])
        return self._fingerprint

    def total_bytes(self) -> int | None:
        sizes = [one.size for one in self.inputs]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def position(self) -> Position:
        return self._position

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        """What was said in each conversation."""
        some = False
        for messages, _ in self.conversations(SetAside(self.policy, quiet=True)):
            some = True
            yield "\n".join(message["content"] for message in messages)
        if not some:
            raise BadData(f"no example in {self}", "no row has a question and an answer", "check data.paths")

    def bad_records(self, quiet: bool = False) -> BadRecords:
        """To count the lines that are no rows at all."""
        sizes = [one.size if isinstance(one, HubSource) else unpacked_bytes(one) for one in self.inputs]
        whole = None if None in sizes else sum(size or 0 for size in sizes)
        return BadRecords(self.policy, self.bad_limit, whole, quiet)

    def rows(self, bad: BadRecords, aside: SetAside | None = None) -> Iterator[tuple[Row, str, str]]:
        """(row, kind of its file, place) of every row in order; a value that is no row goes to `aside`."""
        done, reading, line, number = 0, bad.begin(), 0, 0
        for one, kind in zip(self.inputs, self.kinds, strict=True):

            def tell(name: str, at: int, done: int = done) -> None:
                self._position = Position(name, done + at)

            name, line = name_of(one), 0
            tell(name, 0)
            for record in _records(one, reading, tell):
                number = number + 1 if record.line == line else 1
                line = record.line
                place = f"{name}:{line}" if number == 1 else f"{name}:{line} (row {number} of it)"
                self._position = Position(place, self._position.bytes_done)
                if isinstance(record.value, dict):
                    yield record.value, kind, place
                elif aside is not None:
                    aside.add(place, "is not a row")
            done += one.size or 0
            self._position = Position(self._position.item, done)
        reading.end()

    def conversations(self, aside: SetAside, between: str = "\n\n") -> Iterator[tuple[list[Message], str]]:
        """Each complete conversation with its place; the others go to `aside`."""
        bad = self.bad_records(aside.quiet)
        for row, kind, place in islice(self.rows(bad, aside), self.limit):
            try:
                check_kind(row, kind, place)
                for messages in conversations(row, kind, between):
                    yield complete(messages), place
            except NotAnExample as error:
                aside.add(place, str(error))
        aside.add_unread(bad)

    @property
    def is_pairs(self) -> bool:
        """Rows of two answers each, of which one is preferred."""
        return self.kinds[0] == PAIR

    def pairs(self, aside: SetAside, between: str = "\n\n") -> Iterator[tuple[Pair, str]]:
        """Each pair with its place; the others go to `aside`."""
        bad = self.bad_records(aside.quiet)
        for row, kind, place in islice(self.rows(bad, aside), self.limit):
            try:
                check_kind(row, kind, place)
                yield pair_of(row, between), place
            except NotAnExample as error:
                aside.add(place, str(error))
        aside.add_unread(bad)


def check_kind(row: Row, kind: str, place: str) -> None:
    """Every row of a file is of one kind; one that is of none is set aside."""
    here = kind_of_row(row, kind == PAIR)
    if here not in (kind, None):
        raise mixture(place, here, kind)
    if here is None:
        raise NotAnExample(no_kind(row, kind))


def no_kind(row: Row, kind: str) -> str:
    """Why a row is not of the kind that its file has."""
    if kind == "messages" and (name := next((one for one in ("messages", "conversations") if one in row), None)):
        return f"{name} is {'null' if row[name] is None else 'not a list'}"
    if kind == "glaive" and "chat" in row:
        return "chat does not begin with USER:"
    return f"the keys are {', '.join(name[:_SHOWN] for name in list(row)[:8]) or 'none'}, not {KIND_WORDS[kind]}"


def name_of(one: _RowInput) -> str:
    return f"dataset {one.name}" if isinstance(one, HubSource) else one.name


def _identity(one: _RowInput, tick: Callable[[int], None]) -> list[Any]:
    if isinstance(one, HubSource):
        return [one.marks, "dataset"]
    if not isinstance(one, LocalFile):
        return [one.identity(), suffix_of(one.name)]
    with one.open(lambda *_: None) as opened:
        content = hash_file(one.path, tick)
        one.check(opened.fileno(), "while it was read")
    return [content, suffix_of(one.name)]


def _records(one: _RowInput, bad: BadInReading, tell: Tell) -> Iterator[Record]:
    if isinstance(one, HubSource):
        for record in one.records(bad):
            tell(f"dataset {one.name}", one.position().bytes_done)
            yield record
        return
    is_csv = kind_of(one.name) in ("csv", "tsv")
    for record in read_records(one, bad, tell):
        if is_csv:  # a cell cannot be left out: an empty one stands for no value
            yield record._replace(value={name: value for name, value in record.value.items() if value != ""})
        else:
            yield record


# ---------------------------------------------------------------- rows or text?


def find_rows(
    data: Data, hash_store: Path | None = None, opened: Opened | None = None, *, pairs: bool = False
) -> RowSource | None:
    """The instruction rows that data.paths names; None where it names text, by data.format or by the first rows.

    `opened` keeps what was opened elsewhere than on this machine, so that it is not asked for twice. `pairs`: rows that have
    two answers are wanted as pairs (train.objective dpo).
    """
    wanted = data.format
    if wanted == "text" or not data.paths or any(is_own(entry) for entry in data.paths):
        if wanted == "chat":
            why = "instruction rows are read from files and datasets"
            raise BadConfig("data.format is chat", why, "set data.paths")
        return None
    inputs, others = _row_inputs(data, hash_store, opened if opened is not None else {})
    if not inputs:
        if wanted == "chat":
            why = f"no file there ends in {' '.join(sorted(_SUFFIXES))}"
            raise InputMissing("no instruction rows in data.paths", why, "name other files")
        return None
    kinds: list[str] = []
    words = ""
    with report.phase("look at the rows", total=len(inputs), unit="files") as p:
        for one in inputs:
            p.tick(0, name_of(one))
            kind, why = look_at_rows(one, data.text_key if wanted == "auto" else "", pairs)
            p.tick()
            if kind is None and wanted == "auto" and not kinds:
                return None
            if kind is None:
                why = f"{why}; wanted: {'; or '.join(KIND_WORDS.values())}"
                advice = "take it out of data.paths, or --data.format text"
                raise BadData(f"{name_of(one)} holds no instruction rows", why, advice)
            words = words or why
            kinds.append(kind)
    if PAIR in kinds and (other := next((n for n, kind in enumerate(kinds) if kind != kinds[0]), None)) is not None:
        raise mixture(name_of(inputs[other]), kinds[other], kinds[0])
    report.note(f"instruction data (data.format {wanted}): {words}; --data.format text reads it as plain text")
    if others:
        report.warn(f"not read, as they hold no rows: {len(others)} other files, the first one {others[0]}")
    return RowSource(inputs, kinds, data.bad_text, data.max_documents, data.bad_limit)


def _row_inputs(data: Data, hash_store: Path | None, opened: Opened) -> tuple[list[_RowInput], list[Path]]:
    """(what may hold rows, other files in the folders); nothing where an entry names a file of another kind outright."""
    inputs: list[_RowInput] = []
    others: list[Path] = []
    for entry in data.paths:
        if is_named(entry):
            opened[entry] = hub = open_dataset(entry.partition(":")[2], data, "*", hash_store)
            inputs.append(hub)
            continue
        if is_url(entry) and not entry.startswith("file://"):
            opened[entry] = remote = find_remote(entry, data.retry_s)
            matches: list[Item] = [*remote]
        else:
            pattern = as_local(entry) if is_url(entry) else entry
            paths, more = find_paths(pattern, lambda path: suffix_of(path) in _SUFFIXES)
            matches = [local_file(path) for path in paths if path.stat().st_size]
            others += more
        if not matches or not all(has_records(one) for one in matches):
            return [], []
        inputs += matches
    return list({name_of(one): one for one in inputs}.values()), others


def look_at_rows(one: _RowInput, text_key: str, pairs: bool = False) -> tuple[str | None, str]:
    """(kind of row, or None for text; why), by the first rows of a file or dataset."""
    reading = BadRecords(quiet=True).begin()
    first: list[tuple[str, Row]] = []
    try:
        for record in islice(_records(one, reading, lambda *_: None), _LOOK_ROWS):
            if isinstance(record.value, dict):
                first.append((f"{name_of(one)}:{record.line}", record.value))
    except BadData:
        if reading.count < SOON:  # else these are no rows, and looking on is of no use
            raise
    short = Path(one.name).name
    rows = [(kind, place) for place, row in first if (kind := kind_of_row(row, pairs))]
    if not rows or text_key in first[0][1]:
        keys = ", ".join(first[0][1]) if first else ""
        return None, f"the rows of {short} have the keys {keys or 'none'}"
    if other := next((row for row in rows if row[0] != rows[0][0]), None):
        raise mixture(other[1], other[0], rows[0][0])
    return rows[0][0], f"the rows of {short} have {KIND_WORDS[rows[0][0]]}"
