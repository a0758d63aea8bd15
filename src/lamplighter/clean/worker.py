"""One item to its part: the clean documents, their records for the duplicate search, the rejected, and a marker at the end.

In:  an item and the rules, in a worker process.
Out: four files with one name, of which the marker is written last; a small summary for the main process.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from pydantic_core import to_json

from lamplighter.clean.dedup import record_of
from lamplighter.clean.document import Clean, clean_document
from lamplighter.clean.inputs import Item, mark_of
from lamplighter.clean.raw_documents import documents
from lamplighter.clean.rules import Ledger, Raw, Rejected, Rules, snippet
from lamplighter.errors import LampError
from lamplighter.rundir import read_record, write_json

_JSON = json.JSONEncoder(ensure_ascii=False)
_counter: Any = None


@dataclass(frozen=True)
class Work:
    """What a worker is given; without a folder nothing is written."""

    folder: str
    item: Item
    rules: Rules


def begin(counter: Any) -> None:
    """Called once in each worker: where the bytes are counted."""
    global _counter
    _counter = counter


def _tick(count: int, item: str) -> None:
    if hasattr(_counter, "add"):
        _counter.add(count, item)
    elif _counter is not None:
        _counter.value += count


def is_done(folder: Path, item: Item, rules: str) -> bool:
    marker = read_record(folder / f"{item.name}.done")
    return marker.get("rules") == rules and marker.get("mark") == list(item.mark) and marker.get("path") == item.path


def remove(folder: Path, name: str) -> None:
    for ending in ("done", "part", "prints", "rejected"):
        (folder / f"{name}.{ending}").unlink(missing_ok=True)


def make(work: Work) -> dict[str, Any]:
    """Make the part, unless it is there."""
    item, rules = work.item, work.rules
    if not work.folder:
        kept, records = io.BytesIO(), io.BytesIO()
        summary = _work(item, rules, kept, records, io.StringIO())
        return {**summary, "bytes_out": kept.tell(), "prints": records.getvalue()}
    folder = Path(work.folder)
    if is_done(folder, item, rules.fingerprint()):
        _tick(item.size, item.path)
        return dict(read_record(folder / f"{item.name}.done")["summary"])
    remove(folder, item.name)
    paths = [folder / f"{item.name}.{ending}" for ending in ("part", "prints", "rejected")]
    temporary = [path.with_name(f".{path.name}.{os.getpid()}") for path in paths]
    with open(temporary[0], "wb") as text, open(temporary[1], "wb") as prints, open(temporary[2], "w", encoding="utf-8") as log:  # fmt: skip
        summary = _work(item, rules, text, prints, log)
        for file in (text, prints, log):
            file.flush()
            os.fsync(file.fileno())
    for one, path in zip(temporary, paths, strict=True):
        one.replace(path)
    marker = {"rules": rules.fingerprint(), "path": item.path, "mark": list(item.mark), "summary": summary}
    write_json(folder / f"{item.name}.done", marker)
    return summary


def _work(item: Item, rules: Rules, text: IO[bytes], prints: IO[bytes], log: IO[str]) -> dict[str, Any]:
    """Every document of the item; a file that changed meanwhile is left out as a whole."""
    ledger, rejected, languages = Ledger(), Counter[str](), Counter[str]()
    kept = found = 0
    for raw in documents(item, rules, lambda count: _tick(count, item.path)):
        result = raw if isinstance(raw, Rejected) else _guarded(raw, rules, ledger)
        found += not (isinstance(raw, Rejected) and raw.reason == "bad_line")
        if isinstance(result, Rejected):
            rejected[result.reason] += 1
            log.write(_JSON.encode(asdict(result)) + "\n")
            continue
        kept += 1
        if result.language:
            languages[result.language] += 1
        text.write(_line(result))
        if not rules.keep_duplicates:
            prints.write(record_of(result.words, bool(rules.near)))
    if _mark_now(item) != item.mark:
        for file in (text, prints, log):
            file.seek(0)
            file.truncate()
        why = "it changed while it was read: run it again when nobody writes to it"
        log.write(json.dumps(asdict(Rejected(item.path, "changed", why))) + "\n")
        return {"documents": 1, "kept": 0, "rejected": {"changed": 1}, "languages": {}, "ledger": Ledger().as_json()}
    return {"documents": found, "kept": kept, "rejected": dict(rejected), "languages": dict(languages), "ledger": ledger.as_json()}  # fmt: skip


def _mark_now(item: Item) -> tuple[int, ...]:
    try:
        return mark_of(item.path)
    except OSError:
        return ()


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
    return b'{"text": %b, %b\n' % (to_json(document.words.data), _JSON.encode(record)[1:].encode())
