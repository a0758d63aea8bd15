"""Data probes: every file opens and reads from its first document to its last; the tokenizer fits the text and the model.

In:  a Patient.
Out: Findings: files that do not open, are cut short, dirty, empty or of other columns; read speed; tokenizer faults.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lamplighter.data import tokenizer as tokenizers
from lamplighter.data import tokenizer_training
from lamplighter.data.chat import rows
from lamplighter.data.chat.row_source import RowSource
from lamplighter.data.setup import open_source, open_text
from lamplighter.data.sources import Source
from lamplighter.data.sources.files import FileSource
from lamplighter.doctor.probe import Finding, Patient, Stage
from lamplighter.doctor.sample_data import NoSample, as_finding, blocked, failed, own_cache, read_some, take
from lamplighter.errors import BadData, LampError
from lamplighter.readers.local import LocalFile, is_packed, kind_of
from lamplighter.rundir import human_bytes, read_record, write_json

LOOK_S = 10.0  # for all files together
WHOLE_BYTES = 32_000_000  # a file up to this size is read to its end, while there is time
TAIL_BYTES = 1 << 17
SLOW_MB_S = 1.0
SHOWN = 5
PACKED_TIMES = 4  # text unpacks to some times its size

STAGES = [
    Stage("data / files", "lamplighter.doctor.text:files", 40),
    Stage("data / tokenizer", "lamplighter.doctor.text:tokenizer", 40),
    Stage("data / cache", "lamplighter.doctor.cache_probe:cache", 40),
    Stage("data / documents", "lamplighter.doctor.samples:documents", 40),
]


# ---------------------------------------------------------------- files


@dataclass
class Looked:
    """What was read of the files."""

    files: int = 0
    whole: int = 0
    ends: int = 0  # files whose last documents were read
    documents: int = 0
    bytes: int = 0
    seconds: float = 0.0


def files(patient: Patient) -> Iterator[Finding]:
    """Each file opens; its first and its last documents are text."""
    data = patient.run.data
    if not data.paths and data.source is None:
        yield Finding("ok", f"the embedded corpus, {data.embedded_documents:,} documents: there is no file to look at")
        return
    if is_dataset(patient.run.data.source):
        yield Finding(
            "warn",
            f"{data.source} is a torch Dataset: its items are looked at by the loading probes",
            "lamp train reads texts: an iterable of strings, or an object with documents(start)",
            "yield the texts, or watch your own script: lamp watch -- python train.py",
        )
        return
    try:
        source = open_source(patient.run, own_cache(patient))
    except LampError as error:
        yield as_finding(error)
        return
    inner = getattr(source, "source", source)  # only the first of many
    if isinstance(inner, FileSource):
        yield from _files(inner, patient)
    elif isinstance(inner, RowSource):
        yield from _rows(inner, patient)
    else:
        yield from _other(source, patient)


def is_dataset(name: str | None) -> bool:
    """Whether data.source names a torch Dataset or DataLoader; torch is loaded only by whoever has one."""
    from lamplighter.doctor.datasets import find

    if name is None:
        return False
    try:
        return find(name).is_dataset
    except Exception:  # noqa: BLE001 (opening the source, which comes next, tells what is wrong with it)
        return False


def _files(source: FileSource, patient: Patient) -> Iterator[Finding]:
    looked, until = Looked(), time.monotonic() + LOOK_S
    bad: list[str] = []
    began = time.monotonic()
    for number, item in enumerate(source.items):
        patient.now(f"{item.name} ({number + 1} of {len(source.items)})")
        looked.files += 1
        before = dict(source.dirt.reasons)
        try:
            _look_at(source, number, looked, until)
        except LampError as error:
            bad.append(item.name)
            dirty = dict(source.dirt.reasons) != before or (".jsonl" not in item.name and "UTF-8" in error.why)
            if len(bad) <= SHOWN:
                cause = "dirty_text" if dirty else error.cause
                found = as_finding(error, "fault", cause)
                yield Finding("fault", found.what, found.why, found.next, cause, {"path": item.name})
    looked.seconds = time.monotonic() - began
    if len(bad) > SHOWN:
        yield Finding(
            "fault", f"{len(bad) - SHOWN:,} further files cannot be read", "as those above", "mend or leave out"
        )
    if aside := sorted(known for known in source.dirt.known if known[0] not in bad):
        path, at = aside[0]
        reasons = ", ".join(f"{why}: {count:,}" for why, count in source.dirt.reasons.most_common())
        yield Finding(
            "warn",
            f"{len(aside):,} lines are not text and will be set aside; the first one: {path}, byte {at:,}",
            reasons,
            "mend the file, or refuse such lines with --data.bad_text refuse",
            "dirty_text",
            {"path": path, "byte": at},
        )
    if not bad:
        yield _told(source, looked)
    yield from _speed(looked.bytes, looked.seconds, source.items[0].name, patient)


def _look_at(source: FileSource, number: int, looked: Looked, until: float) -> None:
    """All of a small file; of a large one, or when time is up, the beginning and the end."""
    item = source.items[number]
    limit = WHOLE_BYTES if time.monotonic() < until else TAIL_BYTES
    size, seen = 0, 0
    for text, _ in source.texts(number):
        size += len(text)
        seen += 1
        if size > limit or (seen > 3 and time.monotonic() > until):
            break
    else:
        looked.whole += 1
        looked.ends += 1
        if not seen:
            why = "every document in it is empty"
            raise BadData(f"no text in {item.name}", why, "take it out of data.paths, or check data.text_key")
    looked.documents += seen
    looked.bytes += size
    if size > limit and isinstance(item, LocalFile):
        looked.ends += _look_at_end(source, number, item, until)


def _look_at_end(source: FileSource, number: int, item: LocalFile, until: float) -> bool:
    """The last documents of a large local file; False where that would take reading it all."""
    if is_packed(item.name):
        if item.size * PACKED_TIMES > 8 * WHOLE_BYTES or time.monotonic() > until:
            return False
        return all(time.monotonic() < until for _ in source.texts(number))
    if kind_of(item.name) == "parquet":
        return True  # its table of contents is at the end, and was read
    cursor = source.cursor_at(number, max(0, item.size - TAIL_BYTES))
    if cursor is not None:
        for _ in source.texts(number, cursor):
            pass
        return True
    with open(item.path, "rb") as file:
        file.seek(max(0, item.size - TAIL_BYTES))
        tail = file.read()
    if b"\0" in tail:
        at = item.size - len(tail) + tail.index(b"\0")
        raise BadData(f"not text: {item.name}, byte {at:,}", "NUL bytes", "mend the file", cause="dirty_text")
    return True


def _told(source: FileSource, looked: Looked) -> Finding:
    total = len(source.items)
    rest = "" if looked.whole == total else f"; {looked.whole:,} were read whole, of {looked.ends:,} the end was read"
    what = f"{total:,} files open: {looked.documents:,} documents, {human_bytes(looked.bytes)} of text looked at{rest}"
    figures = {"files": float(total), "read_whole": float(looked.whole), "documents": float(looked.documents)}
    return Finding("ok", what, f"of {source}", figures=figures)


def _speed(count: int, seconds: float, path: str, patient: Patient) -> Iterator[Finding]:
    """MB/s of the actual path; kept for the probe that knows how fast a step is."""
    if count < 1 << 16 or seconds <= 0:
        return
    rate = count / seconds / 1e6
    write_json(patient.scratch / "speed.json", {"bytes_per_s": count / seconds}, durable=False)
    if rate < SLOW_MB_S:
        yield Finding(
            "warn",
            f"read at {rate:.2f} MB/s: {path} is on a slow disk or far away",
            f"{human_bytes(count)} took {seconds:.1f} s",
            "copy the files to a local disk first",
            "slow_disk",
            {"path": path},
            figures={"mb_per_s": rate},
        )
    else:
        yield Finding("ok", f"read at {rate:.0f} MB/s, decoded and cut into documents", figures={"mb_per_s": rate})


def _rows(source: RowSource, patient: Patient) -> Iterator[Finding]:
    """Instruction rows: every file, row by row, while there is time."""
    began, looked, bad = time.monotonic(), Looked(), []
    for path in source.files:
        looked.files += 1
        size = 0
        try:
            for _, place in rows.rows([path], lambda place, error: bad.append((place, error))):
                if looked.documents % 500 == 0:
                    patient.now(place)
                looked.documents += 1
                if time.monotonic() - began > LOOK_S:
                    break
            size = path.stat().st_size
        except LampError as error:
            yield as_finding(error)
        looked.bytes += size
    for place, dirt in bad[:SHOWN]:
        yield Finding("warn", dirt.what, dirt.why, dirt.next, "dirty_text", {"path": place})
    kinds = ", ".join(sorted({rows.KIND_WORDS[kind] for kind in source.kinds.values()}))
    if looked.documents:
        yield Finding("ok", f"{looked.files} files of instruction rows open: {looked.documents:,} rows", kinds)
    else:
        yield Finding("fault", f"no row in {source}", "every line is empty or not JSON", "check data.paths")
    yield from _speed(looked.bytes, time.monotonic() - began, str(source.files[0]), patient)


def _other(source: Source, patient: Patient) -> Iterator[Finding]:
    """A source of the user's own, a dataset, a mixture: its first documents, as they come."""
    reading = read_some(source, patient.now)
    if reading.blocked:
        yield blocked(reading, source)
        return
    if isinstance(reading.error, LampError):
        yield as_finding(reading.error)
        return
    if reading.error is not None:
        yield failed(reading.error, f"{source} failed after {len(reading.texts):,} documents")
        return
    yield Finding(
        "ok",
        f"{source}: the first {len(reading.texts):,} documents are text, {human_bytes(reading.bytes)}",
        figures={"documents": float(len(reading.texts))},
    )
    yield from _speed(reading.bytes, reading.seconds, str(source), patient)


# ---------------------------------------------------------------- the tokenizer


def tokenizer(patient: Patient) -> Iterator[Finding]:
    """Loads or can be trained, has an end of text, gives each text back, fits the model."""
    run = patient.run
    try:
        sample = take(patient)
        _, found = open_text(sample.run, sample.cache)
    except NoSample as error:
        yield from _alone(patient, error)
        return
    except LampError as error:
        yield as_finding(error)
        return
    texts = list(_texts(sample.source))
    measured = tokenizer_training.measure(found, texts, [f"document {n + 1}" for n in range(len(texts))])
    origin = run.tokenizer.path or run.model.init_from
    if origin or run.tokenizer.kind == "bytes":
        made = f"of {origin}" if origin else "the bytes"
    elif sample.run.tokenizer.path:
        made = f"kept from before, {sample.run.tokenizer.path}"
    else:
        asked = run.tokenizer.vocab_size
        made = "trained on the sample" + (f" (the run's will have {asked:,})" if asked > found.vocab_size else "")
    if measured.round_trip_failures:
        yield Finding(
            "warn",
            f"the tokenizer does not give every text back: {measured.round_trip_failures:,} of {len(texts):,} differ",
            measured.first_failure,
            "what differs can never be learned or written; choose a byte-level tokenizer",
        )
    size = sum(len(text.encode()) for text in texts)
    yield Finding(
        "ok",
        f"tokenizer {made}: {found.vocab_size:,} tokens, end of text {found.end_name} = {found.end_of_text}",
        f"{size / max(1, measured.tokens):.2f} bytes per token over {sample.words}",
        figures={"vocab_size": found.vocab_size, "bytes_per_token": size / max(1, measured.tokens)},
    )
    yield from _against_model(patient, found)


def _texts(source: Source, most: int = 500) -> Iterator[str]:
    for number, text in enumerate(source.documents()):
        if number == most:
            return
        yield str(text)


def _alone(patient: Patient, reason: NoSample) -> Iterator[Finding]:
    """Without text there is still a given tokenizer to look at."""
    origin = patient.run.tokenizer.path or patient.run.model.init_from
    if origin is None:
        yield Finding("warn", "the tokenizer was not looked at", f"there is no text to try it on: {reason}")
        return
    try:
        found = tokenizers.load(Path(origin))
    except LampError as error:
        yield as_finding(error)
        return
    yield Finding("ok", f"tokenizer of {origin}: {found.vocab_size:,} tokens; there is no text to try it on")
    yield from _against_model(patient, found)


def _against_model(patient: Patient, found: tokenizers.Tokenizer) -> Iterator[Finding]:
    """A model that is given brings a vocabulary and a tokenizer of its own."""
    folder = patient.run.model.init_from
    if folder is None:
        return
    knows = read_record(Path(folder) / "config.json").get("vocab_size")
    if isinstance(knows, int) and knows < found.vocab_size:
        yield Finding(
            "fault",
            f"the tokenizer has {found.vocab_size:,} tokens, the model in {folder} knows {knows:,}",
            "an id beyond its embedding is an index error, or a CUDA assert in the middle of a run",
            f"--tokenizer.path {folder}",
            "token_range",
            settings={"tokenizer.path": folder},
        )
    if patient.run.tokenizer.path is None:
        return
    try:
        own = tokenizers.load(Path(folder))
    except LampError as error:
        yield Finding("warn", f"{folder} has no tokenizer to compare with", error.why)
        return
    if own.fingerprint() != found.fingerprint():
        yield Finding(
            "fault",
            f"the tokenizer of {patient.run.tokenizer.path} is not the one that {folder} was trained with",
            f"{found.vocab_size:,} tokens against {own.vocab_size:,}: the same ids mean other words to the model",
            f"leave tokenizer.path out, or --tokenizer.path {folder}",
            "tokenizer_differs",
            settings={"tokenizer.path": folder},
        )
