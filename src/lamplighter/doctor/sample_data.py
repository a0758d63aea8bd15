"""The text that probes look at: the first documents of the run's own source, read once, with an eye on a source that blocks.

In:  a ProbeContext.
Out: a SampledRun, kept in its scratch folder: the same run on a small file of its own documents, and how much of what it is.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from lamplighter.config import Run
from lamplighter.data import tokenizer_training
from lamplighter.data.chat.rows import RowSource
from lamplighter.data.setup import open_source
from lamplighter.data.sources import Source
from lamplighter.data.sources.file_source import FileSource
from lamplighter.doctor.probe import CannotExamine, Finding, ProbeContext, as_finding, failed, fault
from lamplighter.errors import LampError
from lamplighter.procs import stacks
from lamplighter.readers.records import Part
from lamplighter.rundir import CACHE_NAME, human_bytes, read_record, write_json

_DOCUMENTS, _BYTES, _ROWS = 2000, 4_000_000, 2000
_QUICK_VOCABULARY = 4096  # more merges take long, and little changes
_FINGERPRINT_BYTES = 2_000_000_000  # more of text that nobody has hashed yet is not hashed for a look
_READ_S = 8.0  # a slow source: what has come by then
QUIET_S = 8.0  # nothing new for so long: it blocks


@dataclass(frozen=True)
class SampledRun:
    """A run on a small part of its own data."""

    run: Run
    source: Source
    words: str  # how much of what
    share: float | None  # of the whole source; none where its size is not known
    cache: Path


def own_cache(context: ProbeContext) -> Path:
    """A cache folder in the scratch, with what the real one remembers of file hashes; the real one is never written."""
    folder = context.scratch / CACHE_NAME
    folder.mkdir(parents=True, exist_ok=True)
    known = context.runs_dir / CACHE_NAME / "file_hashes.json"
    if known.is_file() and not (folder / known.name).exists():
        shutil.copy(known, folder / known.name)
    return folder


def take(context: ProbeContext) -> SampledRun:
    """The sample, made once; CannotExamine where the data cannot be read."""
    cache, record = own_cache(context), context.scratch / "sample.json"
    try:
        known = read_record(record)
        if not known:
            source = open_source(context.run, cache)
            known = {**_read(context, source), "tokenizer": _quick_tokenizer(context, source)}
            write_json(record, known, durable=False)
        data, tokenizer = (replace(getattr(context.run, name), **known[name]) for name in ("data", "tokenizer"))
        run = replace(context.run, data=data, tokenizer=tokenizer)
        return SampledRun(run, open_source(run, cache), known["words"], known["share"], cache)
    except LampError as error:
        raise CannotExamine(as_finding(error)) from error


def kept_tokenizer(context: ProbeContext, source: Source) -> Path | None:
    """The one that an earlier run trained on this very text, if there is one; nothing is trained for a look."""
    section, root = context.run.tokenizer, context.runs_dir / CACHE_NAME
    if not any(root.glob("tokenizer-*")):
        return None
    if (source.total_bytes() or 0) > _FINGERPRINT_BYTES and not (own_cache(context) / "file_hashes.json").exists():
        return None
    context.now("fingerprint of the text")
    folder = root / f"tokenizer-{tokenizer_training.key_of(source, section.vocab_size, section.sample_mb)}"
    return folder if (folder / "tokenizer.json").exists() else None


def _quick_tokenizer(context: ProbeContext, source: Source) -> dict[str, Any]:
    """Changes to the tokenizer section: the kept one, or a small vocabulary that is trained in a second."""
    section = context.run.tokenizer
    if section.path or context.run.model.init_from or section.kind == "bytes":
        return {}
    if kept := kept_tokenizer(context, source):
        return {"path": str(kept)}
    return {"vocab_size": min(section.vocab_size, _QUICK_VOCABULARY)}


def _read(context: ProbeContext, source: Source) -> dict[str, Any]:
    """What take() remembers: the changes to the data section, words, how large a share it is."""
    if isinstance(source, RowSource):
        return _read_rows(context, source)
    reading = read_some(source, context.now)
    if reading.trouble is not None and not (isinstance(reading.error, LampError) and reading.texts):
        raise CannotExamine(reading.trouble)
    if not reading.texts:
        raise CannotExamine(fault(f"no text in {source}", "it gave no document that holds text"))
    path = context.scratch / "sample.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in reading.texts))
    data: dict[str, Any] = {"paths": [str(path)], "text_key": "text", "format": "text", "bad_text": "set_aside"}
    data |= {"source": None, "stream": False, "weights": [], "packing": "auto"}
    data |= {"separator": None, "max_documents": None, "max_chunks": None}
    how_many = f"{'all' if reading.whole else 'the first'} {len(reading.texts):,} documents"
    words = f"{how_many}, {human_bytes(reading.bytes)}, of {source}"
    return {"data": data, "words": words, "share": _share(source, reading)}


def _read_rows(context: ProbeContext, source: RowSource) -> dict[str, Any]:
    limit = min(_ROWS, context.run.data.max_documents or _ROWS)
    count = sum(1 for _ in islice(source.rows(source.bad_records(quiet=True)), limit + 1))
    if count <= limit:
        return {"data": {}, "words": f"all {count:,} rows of {source}", "share": 1.0}
    share = min(1.0, max(1e-9, source.position().bytes_done / max(1, source.total_bytes() or 0)))
    return {"data": {"max_documents": limit}, "words": f"the first {limit:,} rows of {source}", "share": share}


def _share(source: Source, reading: Reading) -> float | None:
    """By the source's own count of bytes."""
    total = source.total_bytes()
    if reading.whole or not total:
        return 1.0 if reading.whole else None
    behind = source.bytes_behind() if isinstance(source, FileSource) else source.position().bytes_done
    return min(1.0, max(1e-9, behind / total))


# ---------------------------------------------------------------- a source that may block


@dataclass
class Reading:
    """Texts as they come, in a thread of its own."""

    texts: list[str] = field(default_factory=list)
    bytes: int = 0
    item: str = ""
    whole: bool = False
    error: Exception | None = None
    seconds: float = 0.0
    trouble: Finding | None = None  # it blocks or raises


def read_some(source: Source, now: Callable[[str], None]) -> Reading:
    """The first documents, for a few seconds; a source that gives nothing for long is left where it is, and looked at."""
    reading, stop = Reading(), threading.Event()
    thread = threading.Thread(target=_read_on, args=(source, reading, stop), daemon=True)
    began = moved = time.monotonic()
    seen = -1
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        at = time.monotonic()
        if reading.bytes != seen:
            seen, moved = reading.bytes, at
        now(f"{len(reading.texts):,} documents, {human_bytes(reading.bytes)}, {reading.item}")
        if at - began > _READ_S and reading.texts:
            stop.set()
        if at - moved > QUIET_S:
            reading.trouble = _blocked(source, len(reading.texts), thread, at - moved)
            return reading
    reading.seconds = time.monotonic() - began
    if isinstance(reading.error, LampError):
        reading.trouble = as_finding(reading.error)
    elif reading.error is not None:
        reading.trouble = failed(reading.error, f"{source} failed after {len(reading.texts):,} documents")
    return reading


def _read_on(source: Source, reading: Reading, stop: threading.Event) -> None:
    part: list[str] = []
    try:
        for text in source.documents():
            part.append(str(text))
            reading.bytes += len(text.encode())
            reading.item = source.position().item
            over = reading.bytes >= _BYTES or stop.is_set()
            if not isinstance(text, Part) or over:
                reading.texts.append("".join(part))
                part = []
            if over or len(reading.texts) >= _DOCUMENTS:
                return
        reading.whole = True
    except Exception as error:  # noqa: BLE001 (handed to whoever asked for the texts)
        reading.error = error


def _blocked(source: Source, count: int, thread: threading.Thread, quiet_s: float) -> Finding:
    """Where it stands, and whether it computes."""
    place = stacks.line_to_name(stacks.frames_of(sys._current_frames().get(thread.ident or 0)))
    before = _cpu_s(thread.native_id)
    time.sleep(0.3)
    asleep = _cpu_s(thread.native_id) - before < 0.05
    shown = f" ({place.text})" if place is not None and place.text else ""
    return fault(
        f"{source} gave {count:,} documents, then nothing for {quiet_s:.0f} s: it stands at {place and place.place}",
        f"it {'sleeps there, waiting for something' if asleep else 'computes there'}{shown}; training would wait in the"
        " same next()",
        "look at that line: a timeout or a retry belongs there; lamp train shows such a wait live",
        "stream_stall",
        at=place,
        culprit={"item": count},
        figures={"documents": count, "quiet_s": quiet_s},
    )


def _cpu_s(thread: int | None) -> float:
    return sum(one.user_time + one.system_time for one in psutil.Process().threads() if one.id == thread)
