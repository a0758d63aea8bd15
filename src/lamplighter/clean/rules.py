"""What cleaning is asked to do, what passes between its files, and the libraries of the extra `data` that it loads at first use.

In:  the flags of the command.
Out: frozen values; a rule set has a fingerprint, so that old parts are never taken for new ones.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from lamplighter.errors import BadData, InputMissing

_VERSION = 5  # raise it with any change that gives other output: old parts are then not used again
_SNIPPET_CHARS = 160
_EXAMPLES = 3


@dataclass(frozen=True)
class Rules:
    """How to clean; everything here changes the output."""

    language: str = "any"
    min_quality: float = 0.0
    min_words: int = 10
    near: float = 0.8  # likeness from which two documents are the same one; 0 for exact copies only
    keep_duplicates: bool = False
    keep_lines: bool = False
    split: str = "auto"  # of TEI: a document for each "div", one for the whole "file", or by what the divisions are
    text_key: str = "text"
    separator: str = ""
    max_document_mb: float = 64.0
    shard_mb: float = 256.0
    bad_files: str = "set_aside"  # a file that cannot be read to its end: left out as a whole and counted, or "refuse"

    def fingerprint(self) -> str:
        """Changes with every rule and with the version of the code."""
        return hashlib.sha256(json.dumps([_VERSION, asdict(self)], sort_keys=True).encode()).hexdigest()[:16]

    @property
    def max_bytes(self) -> int:
        return int(self.max_document_mb * 1e6)


@dataclass(frozen=True)
class Raw:
    """One document as it was found: its place, its text, and what its container says about it."""

    place: str
    text: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rejected:
    """A document (or a line of one) that is left out, and why."""

    place: str
    reason: str
    why: str
    scores: dict[str, float] = field(default_factory=dict)
    head: str = ""

    def as_line(self) -> str:
        line = json.dumps(asdict(self), ensure_ascii=False) + "\n"
        return line.encode(errors="backslashreplace").decode()  # half of a surrogate pair becomes its escape in JSON


UNREAD = ("unreadable", "cut_short", "unknown_kind", "not_text", "changed", "bad_xml", "unknown_xml")
"""The reasons for which a file is left out."""
UNUSABLE = ("unreadable", "cut_short")
"""Those that may come to light when some of its documents have been read: these are left out too."""


def leave_out(place: str, reason: str, why: str, rules: Rules, head: str = "") -> Rejected:
    """A file that cannot be read: left out under its reason, or an error, by policy."""
    if rules.bad_files == "refuse":
        raise BadData(f"cannot read {place}", f"{reason}: {why}", "mend it or move it away, or --bad-files set_aside")
    return Rejected(place, reason, why, head=head)


@dataclass(frozen=True)
class Edit:
    """One thing that a rule did, shown by an example."""

    rule: str
    before: str
    after: str


class Ledger:
    """What the rules did, counted by rule, with the first few examples of each."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.chars: dict[str, int] = {}
        self.examples: dict[str, list[tuple[str, str, str]]] = {}

    def add(self, rule: str, count: int, chars: int = 0, changes: list[Edit] | None = None, place: str = "") -> None:
        if not count:
            return
        self.counts[rule] = self.counts.get(rule, 0) + count
        self.chars[rule] = self.chars.get(rule, 0) + chars
        kept = self.examples.setdefault(rule, [])
        for change in (changes or [])[: _EXAMPLES - len(kept)]:
            kept.append((place, snippet(change.before), snippet(change.after)))

    def merge(self, other: dict[str, Any]) -> None:
        for rule, count in other["counts"].items():
            self.counts[rule] = self.counts.get(rule, 0) + count
            self.chars[rule] = self.chars.get(rule, 0) + other["chars"].get(rule, 0)
            kept = self.examples.setdefault(rule, [])
            kept.extend(tuple(one) for one in other["examples"].get(rule, [])[: _EXAMPLES - len(kept)])

    def as_json(self) -> dict[str, Any]:
        return {"counts": self.counts, "chars": self.chars, "examples": self.examples}


def snippet(text: str, size: int = _SNIPPET_CHARS) -> str:
    """The beginning of a text; of a longer one the end as well."""
    if len(text) <= size:
        return text
    return f"{text[: size * 2 // 3]} [...] {text[-size // 3 :]}"


# ---------------------------------------------------------------- libraries, loaded at first use


@cache
def _load(name: str, use: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputMissing(f"{name} is not installed", f"{use} needs it", "pip install 'lamplighter[data]'") from error


def ftfy() -> Any:
    return _load("ftfy", "mending misread encodings")


def py3langid() -> Any:
    return _load("py3langid", "the language check")


def rensa() -> Any:
    return _load("rensa", "finding near duplicates")


def require_libraries(rules: Rules) -> None:
    """What these rules need must be installed before the first file is read."""
    needed = {"ftfy": "mending misread encodings"}
    needed |= {"py3langid": "the language check"} if rules.language != "any" else {}
    needed |= {"rensa": "finding near duplicates"} if rules.near and not rules.keep_duplicates else {}
    for name, use in needed.items():
        if importlib.util.find_spec(name) is None:
            raise InputMissing(f"{name} is not installed", f"{use} needs it", "pip install 'lamplighter[data]'")


@cache
def has_language(needed: bool) -> bool:
    """Whether the language can be told; where it must be and cannot, an error."""
    try:
        py3langid()
    except InputMissing:
        if needed:
            raise
        return False
    return True
