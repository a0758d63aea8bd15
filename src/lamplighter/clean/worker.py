"""Some items to one part: documents cleaned by the rules, their records for the duplicate search, the rejected, a marker at the end.

In:  a batch of items and the rules, in a worker process.
Out: four files with one name, of which the marker is written last; a small summary for the main process.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from pydantic_core import to_json

from lamplighter.clean import gutenberg, normalise, quality
from lamplighter.clean.dedup import record_of
from lamplighter.clean.quality import Words, language_of, words_of
from lamplighter.clean.raw_documents import Item, documents
from lamplighter.clean.rules import UNUSABLE, Ledger, Raw, Rejected, Rules, has_language, leave_out, snippet
from lamplighter.errors import LampError
from lamplighter.readers.local import Mark, mark_of
from lamplighter.rundir import read_record, write_json

_INSIDE = {"transcriber's note", "gutenberg line", "page numbers", "illustrations", "italics"}


@dataclass(frozen=True)
class Clean:
    """A document as it goes out."""

    place: str
    text: str
    words: Words
    extra: dict[str, Any] = field(default_factory=dict)
    language: str = ""
    score: float = 1.0


def clean_text(text: str, rules: Rules, ledger: Ledger | None = None, place: str = "") -> tuple[str, dict[str, str]]:
    """(the clean text, what its own header says of it). Doing it again changes nothing."""
    ledger = ledger or Ledger()
    odd = normalise.odd_ones(text)
    text, changes = normalise.misread(text, odd)
    ledger.add("mojibake", len(changes), sum(len(one.before) for one in changes), changes, place)
    text, unseen = normalise.characters(text, None if changes else odd)
    ledger.add("unseen characters", unseen, unseen)
    book = gutenberg.strip(text)
    for change in book.removed:
        ledger.add(change.rule, 1, len(change.before), [change], place)
    cut_inside = any(change.rule in _INSIDE for change in book.removed)  # that may leave blanks at a line's end
    text = normalise.blank_lines(normalise.trailing(book.text) if cut_inside else book.text)
    if not rules.keep_lines:
        joined = normalise.join(text, real_hyphens=bool(book.removed))
        text = joined.text
        ledger.add("joined lines", joined.count, 0, list(joined.changes), place)
        ledger.add("hyphens closed", joined.hyphens, joined.hyphens)
    extra = {name: value for name, value in (("title", book.title), ("author", book.author)) if value}
    return text, extra


def clean_document(raw: Raw, rules: Rules, ledger: Ledger) -> Clean | Rejected:
    """Clean it, then ask whether it is worth keeping."""
    if not raw.text or raw.text.isspace():
        return Rejected(raw.place, "empty", "there is no text in it")
    if len(raw.text) > rules.max_bytes:
        why = f"{len(raw.text):,} characters; the limit is {rules.max_document_mb:g} MB (--max-document-mb)"
        return Rejected(raw.place, "too_long", why, head=snippet(raw.text))
    text, own = clean_text(raw.text, rules, ledger, raw.place)
    if not text:
        return Rejected(raw.place, "empty", "nothing is left when the boilerplate is gone", head=snippet(raw.text))
    words = words_of(text)
    language = language_of(text, words) if has_language(rules.language != "any") else ""
    found = quality.judge(text, words, english=language == "en" or rules.language == "en")
    if reason := _refusal(found, language, rules):
        scores = {**found.measures, "score": found.score, "words": found.words}
        return Rejected(raw.place, reason[0], reason[1], scores, snippet(text))
    return Clean(raw.place, text, words, extra={**own, **raw.extra}, language=language, score=found.score)


def _refusal(found: quality.TextQuality, language: str, rules: Rules) -> tuple[str, str] | None:
    if found.words < rules.min_words:
        return "too_short", f"{found.words} words; {rules.min_words} are wanted (--min-words)"
    wanted = {one.strip() for one in rules.language.split(",")}
    if "any" not in wanted and language not in wanted:
        return "language", f"{language or 'unknown'}, wanted is {rules.language} (--language)"
    if found.score <= rules.min_quality:
        (bad, good), value = quality.BOUNDS[found.worst], found.measures[found.worst]
        why = f"{found.worst} is {value:g}; good text has {good:g}, {bad:g} is out of bounds"
        return quality.REASONS[found.worst], why
    return None


# ---------------------------------------------------------------- the parts


PARTS = 512  # about so many of them, whatever the number of files
LEAST_BYTES, MOST_BYTES = 8 << 20, 256 << 20  # of one part
_counter: Any = None


@dataclass
class CleanCounts:
    """What came of some items; nothing in here depends on time or on the number of workers."""

    files: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    documents: int = 0
    kept: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[str]] = field(default_factory=dict)  # of each reason, the first place and why
    languages: Counter[str] = field(default_factory=Counter)
    ledger: Ledger = field(default_factory=Ledger)

    def reject(self, one: Rejected) -> None:
        self.rejected[one.reason] += 1
        self.first.setdefault(one.reason, [one.place, one.why])

    def add(self, part: dict[str, Any]) -> None:
        """Add the counts of a part, as they are in its marker."""
        self.documents += part["documents"]
        self.kept += part["kept"]
        self.bytes_out += part["bytes_out"]
        self.rejected.update(part["rejected"])
        self.first = {**part["first"], **self.first}
        self.languages.update(part["languages"])
        self.ledger.merge(part["rules"])

    def as_json(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "documents": self.documents,
            "kept": self.kept,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "rejected": dict(sorted(self.rejected.items())),
            "languages": dict(self.languages.most_common()),
            "rules": self.ledger.as_json(),
        }


@dataclass(frozen=True)
class CleanBatch:
    """What a worker is given: neighbouring items that make one part; without a folder nothing is written."""

    folder: str
    items: tuple[Item, ...]
    rules: Rules

    @cached_property
    def name(self) -> str:
        """Of its part: the same items give the same name in every run."""
        places = "\0".join(f"{item.path}\0{item.start}\0{item.end}" for item in self.items)
        return sha256(places.encode()).hexdigest()[:20]

    @property
    def size(self) -> int:
        return sum(item.size for item in self.items)

    @property
    def path(self) -> str:
        return self.items[0].path

    def identity(self) -> list[Any]:
        return [item.identity() for item in self.items]


def batches_of(items: list[Item], folder: str, rules: Rules) -> list[CleanBatch]:
    """Neighbours together, so that there are some hundreds of parts however many files there are."""
    most_bytes = min(max(LEAST_BYTES, sum(item.size for item in items) // PARTS), MOST_BYTES)
    most_items = -(-len(items) // PARTS)
    batches: list[list[Item]] = []
    size = 0
    for item in items:
        if not batches or len(batches[-1]) >= most_items or size + item.size > most_bytes:
            batches.append([])
            size = 0
        batches[-1].append(item)
        size += item.size
    return [CleanBatch(folder, tuple(batch), rules) for batch in batches]


def begin(counter: Any) -> None:
    """Called once in each worker: where the bytes are counted. A shared number, or in the main process a function."""
    global _counter
    _counter = counter


def _tick(count: int, item: str) -> None:
    if callable(_counter):
        _counter(count, item)
    elif _counter is not None:
        _counter.value += count


def is_done(folder: Path, batch: CleanBatch) -> bool:
    marker = read_record(folder / f"{batch.name}.done")
    return marker.get("rules") == batch.rules.fingerprint() and marker.get("items") == batch.identity()


def remove(folder: Path, name: str) -> None:
    for ending in ("done", "part", "prints", "rejected"):
        (folder / f"{name}.{ending}").unlink(missing_ok=True)


def make(batch: CleanBatch) -> dict[str, Any]:
    """Make the part, unless it is there; its counts."""
    if not batch.folder:
        prints = io.BytesIO()
        return {**_work(batch, io.BytesIO(), prints, io.StringIO()), "prints": prints.getvalue()}
    folder = Path(batch.folder)
    if is_done(folder, batch):
        _tick(batch.size, batch.path)
        return dict(read_record(folder / f"{batch.name}.done")["summary"])
    remove(folder, batch.name)
    paths = [folder / f"{batch.name}.{ending}" for ending in ("part", "prints", "rejected")]
    temporary = [path.with_name(f".{path.name}.{os.getpid()}") for path in paths]
    with open(temporary[0], "wb") as text, open(temporary[1], "wb") as prints_file, open(temporary[2], "w", encoding="utf-8") as log:  # fmt: skip
        summary = _work(batch, text, prints_file, log)
        for file in (text, prints_file, log):
            file.flush()
            os.fsync(file.fileno())
    for one, path in zip(temporary, paths, strict=True):
        one.replace(path)
    marker = {"rules": batch.rules.fingerprint(), "items": batch.identity(), "summary": summary}
    write_json(folder / f"{batch.name}.done", marker)
    return summary


def _work(batch: CleanBatch, text: IO[bytes], prints: IO[bytes], log: IO[str]) -> dict[str, Any]:
    """Every document of the items, in order; a file that changed meanwhile or has no sound end is left out as a whole."""
    counts = CleanCounts()
    files: tuple[IO[Any], ...] = (text, prints, log)
    for item in batch.items:
        before = [file.tell() for file in files]
        own = _add_item(item, batch.rules, text, prints, log)
        if (left_out := _left_out(item, own, batch.rules)) is not None:
            for file, place in zip(files, before, strict=True):
                file.seek(place)
                file.truncate()
            own = CleanCounts(documents=1)
            own.reject(left_out)
            log.write(left_out.as_line())
        counts.add({**own.as_json(), "first": own.first})
    counts.bytes_out = text.tell()
    return {**counts.as_json(), "first": counts.first}


def _left_out(item: Item, own: CleanCounts, rules: Rules) -> Rejected | None:
    """Why nothing of an item is to be used; None where it was read to its end and is still the same."""
    if _mark_now(item) != item.file.mark:
        why = "it changed while it was read: run it again when nobody writes to it"
        return leave_out(item.path, "changed", why, rules)
    reason = next((reason for reason in UNUSABLE if own.rejected[reason]), None)
    return Rejected(item.path, reason, own.first[reason][1]) if reason else None


def _add_item(item: Item, rules: Rules, text: IO[bytes], prints: IO[bytes], log: IO[str]) -> CleanCounts:
    """The documents of one item."""
    own = CleanCounts()
    for raw in documents(item, rules, lambda count: _tick(count, item.path)):
        result = raw if isinstance(raw, Rejected) else _guarded(raw, rules, own.ledger)
        own.documents += not (isinstance(raw, Rejected) and raw.reason == "bad_line")
        if isinstance(result, Rejected):
            own.reject(result)
            log.write(result.as_line())
            continue
        own.kept += 1
        if result.language:
            own.languages[result.language] += 1
        text.write(_line(result))
        if not rules.keep_duplicates:
            prints.write(record_of(result.words, bool(rules.near)))
    return own


def _mark_now(item: Item) -> Mark | None:
    try:
        return mark_of(item.file.path.stat())
    except OSError:  # gone meanwhile: then it has changed
        return None


def _guarded(raw: Raw, rules: Rules, ledger: Ledger) -> Clean | Rejected:
    """A document that breaks a rule's code is left out under its error; the other ones go on."""
    started = time.monotonic()
    try:
        return clean_document(raw, rules, ledger)
    except LampError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, RecursionError, AssertionError) as error:
        after = f"after {time.monotonic() - started:.0f} s" if time.monotonic() - started > 5 else ""
        return Rejected(
            raw.place, "error", f"{type(error).__name__}: {error} {after}".strip(), head=snippet(raw.text[:400])
        )


def _line(document: Clean) -> bytes:
    """As json.dumps writes it; the text itself by a writer that is ten times faster and gives the same bytes."""
    record: dict[str, Any] = {"source": document.place, **document.extra}
    if document.language:
        record["language"] = document.language
    return b'{"text": %b, %b\n' % (to_json(document.words.data), json.dumps(record, ensure_ascii=False)[1:].encode())
