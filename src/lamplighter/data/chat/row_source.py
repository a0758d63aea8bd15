"""Instruction data as a source: found among data.paths by the look of it, conversations one by one, the others set aside.

In:  data.paths, data.format, data.bad_text.
Out: a RowSource: conversations to learn from; as a Source, their texts (to train a tokenizer on).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lamplighter import report
from lamplighter.data.chat import rows
from lamplighter.data.chat.rows import Message, NotAnExample
from lamplighter.data.sources.files import Cursor, Position, digest
from lamplighter.errors import BadConfig, BadData, InputMissing
from lamplighter.rundir import hash_file

RULES = 1  # changes when the same rows give other conversations
TOLD = 100  # events for single rows


@dataclass
class SetAside:
    """Rows that are not learned from: counted by reason, the first place of each kept; or refused, by policy."""

    policy: str = "set_aside"
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    quiet: bool = False

    def met(self, place: str, reason: str, error: BadData | None = None) -> None:
        if self.policy == "refuse":
            advice = "mend it, or set such rows aside: --data.bad_text set_aside"
            raise error or BadData(f"{place} cannot be learned from", reason, advice)
        self.counts[reason] += 1
        self.first.setdefault(reason, place)
        if not self.quiet and self.counts.total() <= TOLD:
            report.event("set_aside", path=place.rpartition(":")[0], line=place.rpartition(":")[2], why=reason)


class RowSource:
    """Files of instruction rows: conversations to train on; as a Source, their texts (to train a tokenizer)."""

    def __init__(self, files: list[Path], kinds: dict[Path, str], policy: str, limit: int | None = None) -> None:
        self.files, self.kinds, self.policy, self.limit = files, kinds, policy, limit
        self._position = Position(str(files[0]), 0)
        self._fingerprint = ""

    def __str__(self) -> str:
        first = f"the first {self.limit:,} rows of " if self.limit else ""
        return first + rows.words_of(self.files)

    def fingerprint(self) -> str:
        if not self._fingerprint:
            with report.phase("hash files", total=self.total_bytes(), unit="B") as p:
                hashes = []
                for path in self.files:
                    p.tick(0, str(path))
                    hashes.append([hash_file(path, p.tick), rows.suffix_of(path), self.kinds[path]])
            self._fingerprint = digest(["rows", RULES, hashes, self.policy, self.limit])
        return self._fingerprint

    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

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

    def conversations(self, aside: SetAside, between: str = "\n\n") -> Iterator[tuple[list[Message], str]]:
        """Each complete conversation with its place; the others go to `aside`."""

        def show(done: int, place: str) -> None:
            self._position = Position(place, done)

        kinds = {str(path): kind for path, kind in self.kinds.items()}
        found = rows.rows(
            self.files, lambda place, error: aside.met(place, error.what.removeprefix(f"{place} "), error), show
        )
        for number, (row, place) in enumerate(found):
            if self.limit is not None and number >= self.limit:
                return
            kind = kinds[place.rpartition(":")[0]]
            if (here := rows.kind_of(row)) not in (kind, None):
                raise rows.mixture(place, here, kind)
            try:
                if here is None:
                    raise NotAnExample(f"the keys are {', '.join(row) or 'none'}, not {rows.KIND_WORDS[kind]}")
                for messages in rows.conversations(row, kind, between):
                    yield rows.complete(messages), place
            except NotAnExample as error:
                aside.met(place, str(error))


def find_rows(paths: list[str], wanted: str, text_key: str, policy: str, limit: int | None) -> RowSource | None:
    """The instruction rows that data.paths names; None where they name text, by `wanted` or by the look of them."""
    if wanted == "text" or not paths or any("://" in path or path.startswith("dataset:") for path in paths):
        if wanted == "chat":
            raise BadConfig("data.format is chat", "instruction rows are read from local files", "set data.paths")
        return None
    files, others = _row_files(paths)
    if not files:
        if wanted == "chat":
            endings = " ".join(sorted(rows.SUFFIXES))
            raise InputMissing(
                "no instruction rows in data.paths", f"no file there ends in {endings}", "name other files"
            )
        return None
    with report.phase("look at the rows", total=len(files), unit="files") as p:
        found: dict[Path, tuple[str | None, str]] = {}
        for path in files:
            p.tick(0, str(path))
            found[path] = rows.look(path, text_key if wanted == "auto" else "")
            p.tick()
            if wanted == "auto" and found[path][0] is None and len(found) == 1:
                break
    kinds = {path: kind for path, (kind, _) in found.items() if kind is not None}
    other = next((path for path, (kind, _) in found.items() if kind is None), None)
    first = found[files[0]]
    if not kinds and wanted == "auto":
        return None
    if other is not None:
        why = f"{found[other][1]}; wanted: {'; or '.join(rows.KIND_WORDS.values())}"
        raise BadData(f"{other} holds no instruction rows", why, "take it out of data.paths, or --data.format text")
    report.note(f"instruction data (data.format {wanted}): {first[1]}; --data.format text reads it as plain text")
    if others:
        report.warn(f"not read, as they hold no rows: {len(others)} other files, the first one {others[0]}")
    return RowSource(files, kinds, policy, limit)


def _row_files(paths: list[str]) -> tuple[list[Path], list[Path]]:
    """(files that may hold rows, other files in the folders); none where a path names a file of another kind outright."""
    found: list[Path] = []
    others: list[Path] = []
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(item for item in path.rglob("*") if item.is_file() and not item.name.startswith("."))
            matches = [item for item in inside if rows.suffix_of(item) in rows.SUFFIXES]
            others += [item for item in inside if item not in matches]
        elif path.is_file():
            matches = [path]
        else:
            matches = sorted(item for item in Path().glob(name) if item.is_file()) if not path.is_absolute() else []
            matches = matches or sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        if not matches or any(rows.suffix_of(item) not in rows.SUFFIXES for item in matches):
            return [], []
        found += matches
    return [path for path in dict.fromkeys(found) if path.stat().st_size], others
