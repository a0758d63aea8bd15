"""Data probes: every file opens and reads to its end; the tokenizer fits text and model; the token caches are whole.

In:  a ProbeContext; the real cache folder, which is only read.
Out: Findings: files cut short, dirty, empty or of other columns; tokenizer faults; damaged or stale caches, locks of dead processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lamplighter.data import tokenizer as tokenizers
from lamplighter.data import tokenizer_training
from lamplighter.data.chat import rows
from lamplighter.data.chat.rows import RowSource
from lamplighter.data.setup import open_source, open_text
from lamplighter.data.sources import Source
from lamplighter.data.sources.file_source import FileSource
from lamplighter.data.split import CacheSettings
from lamplighter.data.token_cache import reader
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.doctor.probe import (
    CannotExamine,
    Finding,
    Level,
    ProbeContext,
    as_finding,
    fault,
    finding,
    ok,
    skip,
    warn,
)
from lamplighter.doctor.sample_data import kept_tokenizer, own_cache, read_some, take
from lamplighter.doctor.system import locks_of_caches
from lamplighter.errors import BadData, LampError
from lamplighter.readers.bad_records import BadInReading
from lamplighter.readers.local import LocalFile, is_packed, kind_of
from lamplighter.rundir import CACHE_NAME, hash_file, human_bytes, read_record

_LOOK_S = 10.0  # for all files together
WHOLE_BYTES = 32_000_000  # a file up to this size is read to its end, while there is time
TAIL_BYTES = 1 << 17
_SLOW_MB_S = 1.0
_SHOWN = 5
_PACKED_TIMES = 4  # text unpacks to some times its size
_VERIFY_S = 15.0
_REBUILD = {"data.cache": "rebuild"}


# ---------------------------------------------------------------- files


@dataclass
class Looked:
    """What was read of the files."""

    whole: int = 0
    ends: int = 0  # files whose last documents were read
    documents: int = 0
    bytes: int = 0


def files(context: ProbeContext) -> Iterator[Finding]:
    """Each file opens; its first and its last documents are text."""
    data = context.run.data
    if not data.paths and data.source is None:
        yield skip(f"the embedded corpus, {data.embedded_documents:,} documents: there is no file to look at")
        return
    if is_dataset(data.source):
        what = f"{data.source} is a torch Dataset: its items are looked at by the loading probes"
        why = "lamp train reads texts: an iterable of strings, or an object with documents(start)"
        yield warn(what, why, "yield the texts, or watch your own script: lamp watch -- python train.py")
        return
    source = open_source(context.run, own_cache(context))
    inner = getattr(source, "source", source)  # only the first of many
    if isinstance(inner, FileSource):
        yield from _files(inner, context)
    elif isinstance(inner, RowSource):
        yield from _rows(inner, context)
    else:
        yield from _other(source, context)


def is_dataset(name: str | None) -> bool:
    """Whether data.source names a torch Dataset or DataLoader; torch is loaded only by whoever has one."""
    from lamplighter.doctor.loading import find, is_torch

    try:
        return name is not None and is_torch(find(name))
    except Exception:  # noqa: BLE001 (opening the source, which comes next, tells what is wrong with it)
        return False


def _files(source: FileSource, context: ProbeContext) -> Iterator[Finding]:
    began, looked, bad, reading = time.monotonic(), Looked(), set[str](), source.bad.begin()
    for number, item in enumerate(source.items):
        context.now(f"{item.name} ({number + 1} of {len(source.items)})")
        before = dict(source.bad.reasons)
        try:
            _look_at(source, number, looked, began + _LOOK_S, reading)
        except LampError as error:
            bad.add(item.name)
            dirty = dict(source.bad.reasons) != before or (".jsonl" not in item.name and "UTF-8" in error.why)
            if len(bad) <= _SHOWN:
                yield as_finding(error, "dirty_text" if dirty else error.cause, {"path": item.name})
    seconds = time.monotonic() - began
    try:
        lines = max(reading.lines, looked.documents) * max(1.0, (source.total_bytes() or 0) / max(1, looked.bytes))
        if not bad:  # else the files themselves are named
            reading.check(lines)
    except LampError as error:
        bad |= {path for path, _ in source.bad.known}
        yield as_finding(error, "dirty_text", {"path": min(bad)})
    if len(bad) > _SHOWN:
        yield fault(f"{len(bad) - _SHOWN:,} further files cannot be read", "as those above", "mend or leave out")
    if aside := sorted(known for known in source.bad.known if known[0] not in bad):
        path, at = aside[0]
        what = f"{len(aside):,} lines are not text and will be set aside; the first one: {path}, byte {at:,}"
        reasons = ", ".join(f"{why}: {count:,}" for why, count in source.bad.reasons.most_common())
        advice = "mend the file, or refuse such lines with --data.bad_text refuse"
        yield warn(what, reasons, advice, "dirty_text", culprit={"path": path, "byte": at})
    if not bad:
        yield _opened(source, looked)
    yield from _speed(looked.bytes, seconds, source.items[0].name)


def _opened(source: FileSource, looked: Looked) -> Finding:
    total = len(source.items)
    rest = "" if looked.whole == total else f"; {looked.whole:,} were read whole, of {looked.ends:,} the end was read"
    what = f"{total:,} files open: {looked.documents:,} documents, {human_bytes(looked.bytes)} of text looked at{rest}"
    figures = {"files": float(total), "read_whole": float(looked.whole), "documents": float(looked.documents)}
    return ok(what, f"of {source}", figures=figures)


def _look_at(source: FileSource, number: int, looked: Looked, until: float, reading: BadInReading) -> None:
    """All of a small file; of a large one, or when time is up, the beginning and the end."""
    item = source.items[number]
    limit = WHOLE_BYTES if time.monotonic() < until else TAIL_BYTES
    size, seen = 0, 0
    for text, _ in source.texts(number, bad=reading):
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
        if item.size * _PACKED_TIMES > 8 * WHOLE_BYTES or time.monotonic() > until:
            return False
        return all(time.monotonic() < until for _ in source.texts(number))
    if kind_of(item.name) == "parquet":
        return True  # its table of contents is at the end, and was read
    start = max(0, item.size - TAIL_BYTES)
    cursor = source.cursor_at(number, start)
    if cursor is not None:
        for _ in source.texts(number, cursor):
            pass
        return True
    with open(item.path, "rb") as file:
        file.seek(start)
        at = file.read().find(b"\0")
    if at >= 0:
        raise BadData(f"not text: {item.name}, byte {start + at:,}", "NUL bytes", "mend the file", cause="dirty_text")
    return True


def _speed(count: int, seconds: float, path: str) -> Iterator[Finding]:
    """MB/s of the actual path."""
    if count < 1 << 16 or seconds <= 0:
        return
    rate = count / seconds / 1e6
    figures = {"mb_per_s": rate}
    if rate < _SLOW_MB_S:
        what, why = (
            f"read at {rate:.2f} MB/s: {path} is on a slow disk or far away",
            f"{human_bytes(count)} took {seconds:.1f} s",
        )
        advice = "copy the files to a local disk first"
        yield warn(what, why, advice, "slow_disk", culprit={"path": path}, figures=figures)
    else:
        yield ok(f"read at {rate:.0f} MB/s, decoded and cut into documents", figures=figures)


def _rows(source: RowSource, context: ProbeContext) -> Iterator[Finding]:
    """Instruction rows: every file, row by row, while there is time."""
    began, count, size, bad = time.monotonic(), 0, 0, source.bad_records(quiet=True)
    for one, kind in zip(source.inputs, source.kinds, strict=True):
        alone = RowSource([one], [kind], source.policy, None, source.bad_limit)
        try:
            for _, _, place in alone.rows(bad):
                if count % 500 == 0:
                    context.now(place)
                count += 1
                if time.monotonic() - began > _LOOK_S:
                    break
            size += one.size or 0
        except LampError as error:
            yield as_finding(error)
    for line in bad.listed[:_SHOWN]:
        what, why, advice = line["error"]
        yield warn(what, why, advice, "dirty_text", culprit={"path": f"{line['path']}:{line['line']}"})
    kinds = ", ".join(sorted({rows.KIND_WORDS[kind] for kind in source.kinds}))
    if count:
        yield ok(f"{len(source.inputs)} files of instruction rows open: {count:,} rows", kinds)
    else:
        yield fault(f"no row in {source}", "every line is empty or not JSON", "check data.paths")
    yield from _speed(size, time.monotonic() - began, rows.name_of(source.inputs[0]))


def _other(source: Source, context: ProbeContext) -> Iterator[Finding]:
    """A source of the user's own, a dataset, a mixture: its first documents, as they come."""
    reading = read_some(source, context.now)
    if reading.trouble is not None:
        yield reading.trouble
        return
    what = f"{source}: the first {len(reading.texts):,} documents are text, {human_bytes(reading.bytes)}"
    yield ok(what, figures={"documents": float(len(reading.texts))})
    yield from _speed(reading.bytes, reading.seconds, str(source))


# ---------------------------------------------------------------- the tokenizer


def tokenizer(context: ProbeContext) -> Iterator[Finding]:
    """Loads or can be trained, has an end of text, gives each text back, fits the model."""
    origin = context.run.tokenizer.path or context.run.model.init_from
    try:
        sample = take(context)
    except CannotExamine as end:
        yield warn("the tokenizer was not tried", f"there is no text to try it on: {end}")
        if origin is not None:
            yield from _against_model(context, tokenizers.load(Path(origin)))
        return
    _, found = open_text(sample.run, sample.cache)
    texts = [str(text) for text in islice(sample.source.documents(), 500)]
    measured = tokenizer_training.measure(found, texts, [f"document {n + 1}" for n in range(len(texts))])
    if measured.round_trip_failures:
        what = f"the tokenizer does not give every text back: {measured.round_trip_failures:,} of {len(texts):,} differ"
        advice = "what differs can never be learned or written; choose a byte-level tokenizer"
        yield warn(what, measured.first_failure, advice)
    if origin or context.run.tokenizer.kind == "bytes":
        made = f"of {origin}" if origin else "the bytes"
    elif sample.run.tokenizer.path:
        made = f"kept from before, {sample.run.tokenizer.path}"
    else:
        asked = context.run.tokenizer.vocab_size
        made = "trained on the sample" + (f" (the run's will have {asked:,})" if asked > found.vocab_size else "")
    per_token = sum(len(text.encode()) for text in texts) / max(1, measured.tokens)
    yield ok(
        f"tokenizer {made}: {found.vocab_size:,} tokens, end of text {found.end_name} = {found.end_of_text}",
        f"{per_token:.2f} bytes per token over {sample.words}",
        figures={"vocab_size": found.vocab_size, "bytes_per_token": per_token},
    )
    yield from _against_model(context, found)


def _model_vocabulary(context: ProbeContext) -> int | None:
    """What the embedding of a given model has rows for; None where the model is still to be made."""
    folder = context.run.model.init_from
    knows = read_record(Path(folder) / "config.json").get("vocab_size") if folder else None
    return knows if isinstance(knows, int) else None


def _against_model(context: ProbeContext, found: Tokenizer) -> Iterator[Finding]:
    """A model that is given brings a vocabulary and a tokenizer of its own."""
    folder, given, knows = context.run.model.init_from, context.run.tokenizer.path, _model_vocabulary(context)
    if folder is None:
        return
    settings = {"tokenizer.path": folder}
    if knows is not None and knows < found.vocab_size:
        what = f"the tokenizer has {found.vocab_size:,} tokens, the model in {folder} knows {knows:,}"
        why = "an id beyond its embedding is an index error, or a CUDA assert in the middle of a run"
        yield fault(what, why, cause="token_range", settings=settings)
    if given is None:
        return
    try:
        own = tokenizers.load(Path(folder))
    except LampError as error:
        yield warn(f"{folder} has no tokenizer to compare with", error.why)
        return
    if own.fingerprint() != found.fingerprint():
        what = f"the tokenizer of {given} is not the one that {folder} was trained with"
        why = f"{found.vocab_size:,} tokens against {own.vocab_size:,}: the same ids mean other words to the model"
        advice = f"leave tokenizer.path out, or --tokenizer.path {folder}"
        yield fault(what, why, advice, "tokenizer_differs", settings=settings)


# ---------------------------------------------------------------- the caches


def cache(context: ProbeContext) -> Iterator[Finding]:
    """Locks first; then the caches of this very data."""
    root = context.runs_dir / CACHE_NAME
    if not root.is_dir():
        yield skip(f"no cache in {root} yet: it will be built")
        return
    yield from locks_of_caches(root)
    if context.run.data.stream:
        yield skip("data.stream: no token cache is used")
        return
    try:
        source = open_source(context.run, own_cache(context))
    except LampError as error:
        yield warn("the token cache was not looked at", f"the data does not open: {error.what}")
        return
    if isinstance(source, RowSource):
        yield from _examples(root, source, context)
    else:
        yield from _tokens(root, source, context)


def _tokens(root: Path, source: Source, context: ProbeContext) -> Iterator[Finding]:
    known = _known_tokenizer(source, context)
    if known is None:  # it is still to be trained on this very text, so there can only be a cache of older text
        named = str(source).split(", ")[0]
        same = [path.parent.name for path in root.glob("*/manifest.json") if _name_of_text(path) == named]
        near = f"{same[-1]}, an older state of {source}" if same else ""
        yield _missing(root, near, context)
        return
    sought = reader.locate_token_cache(root, source, known, CacheSettings(context.run.data.val_fraction))
    if sought.fault is not None and not (sought.folder / "manifest.json").exists():
        yield _missing(root, sought.near or "", context)
        return
    if sought.fault is not None:
        what = f"the token cache is cut short: {sought.fault}"
        why, advice = "a killed copy, a full disk, or somebody's hand", "--data.cache rebuild (auto does it by itself)"
        where = {"path": str(sought.folder)}
        yield finding(_needed(context), what, why, advice, "shard_truncated", culprit=where, settings=_REBUILD)
        return
    yield from _verified(sought.folder, read_record(sought.folder / "manifest.json")["files"], context)
    context.now("every id against the vocabulary")
    vocab_size = _model_vocabulary(context) or known.vocab_size
    try:
        reader.open_tokens(sought.folder).check_ids(vocab_size)
        yield ok(f"every id of the cache is below the model's vocabulary of {vocab_size:,}")
    except LampError as error:
        yield as_finding(error, "token_range")


def _needed(context: ProbeContext, otherwise: Level = "warn") -> Level:
    """How bad it is that there is no cache to use."""
    return "fault" if context.run.data.cache == "require" else otherwise


def _missing(root: Path, near: str, context: ProbeContext) -> Finding:
    """No cache for exactly this; another one near it is never used."""
    if near:
        what = f"the token cache that is there is of other content and will not be used: {near}"
        why = "a cache counts only for the same tokenizer, settings and sources, by their fingerprints"
        advice = "nothing to do: a new one is built beside it"
        return finding(_needed(context), what, why, advice, "stale_cache", culprit={"path": str(root)})
    if context.run.data.cache == "require":
        return fault("data.cache is require, and there is no token cache", "", "--data.cache auto")
    return skip("no token cache for this data yet: it will be built")


def _name_of_text(manifest: Path) -> str:
    content = read_record(manifest).get("parts", {}).get("sources", {}).get("content", "")
    return str(content).split(", ")[0]


def _known_tokenizer(source: Source, context: ProbeContext) -> Tokenizer | None:
    """The one that a run would use, if it is there already; nothing is trained for a look."""
    run = context.run
    if origin := run.tokenizer.path or run.model.init_from:
        return tokenizers.load(Path(origin))
    if run.tokenizer.kind == "bytes":
        return tokenizers.byte_level()
    kept = kept_tokenizer(context, source)
    return tokenizers.load(kept) if kept else None


def _examples(root: Path, source: RowSource, context: ProbeContext) -> Iterator[Finding]:
    """Caches of these very files."""
    manifests = {path.parent: read_record(path) for path in sorted(root.glob("examples-*/examples.json"))}
    found = [
        (folder, manifest["files"])
        for folder, manifest in manifests.items()
        if manifest.get("parts", {}).get("sources", {}).get("fingerprint") == source.fingerprint()
    ]
    for folder, files in found:
        yield from _verified(folder, files, context)
    if not found:
        level = _needed(context, "ok")
        advice = "" if level == "ok" else "--data.cache auto"
        yield finding(level, "no cache of these examples yet: it will be made", next=advice)


def _verified(folder: Path, files: dict[str, dict[str, object]], context: ProbeContext) -> Iterator[Finding]:
    """Sizes of all, hashes of as many as the time allows."""
    until, done, total = time.monotonic() + _VERIFY_S, 0, sum(int(str(entry["bytes"])) for entry in files.values())
    for name, entry in files.items():
        path, where = folder / name, {"path": str(folder / name)}
        context.now(f"checksum of {path}")
        size = path.stat().st_size if path.is_file() else 0
        if size != entry["bytes"]:
            what, why = f"cut short: {path}", f"{size:,} bytes, expected {entry['bytes']:,}"
            yield finding(_needed(context), what, why, "", "shard_truncated", culprit=where, settings=_REBUILD)
            return
        if time.monotonic() > until:
            continue
        if hash_file(path) != entry["sha256"]:
            why = "its sha256 is not the one in the manifest: the disk or somebody changed it"
            yield fault(f"damaged: {path}", why, cause="shard_bitflip", culprit=where, settings=_REBUILD)
            return
        done += size
    share = "all" if done == total else f"{human_bytes(done)} of"
    yield ok(f"checksums of the cache {folder.name} are right: {share} {human_bytes(total)}")
