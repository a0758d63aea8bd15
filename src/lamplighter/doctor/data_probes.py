"""Data probes: every file opens and reads to its end; the tokenizer fits text and model; the token caches are whole.

In:  a ProbeContext; the real cache folder, which is only read.
Out: Findings: files cut short, dirty, empty or of other columns; tokenizer faults; damaged or stale caches, locks of dead processes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lamplighter.data import tokenizer as tokenizers
from lamplighter.data import tokenizer_training
from lamplighter.data.chat import example_cache, rows
from lamplighter.data.chat.rows import RowSource
from lamplighter.data.setup import open_source, open_text
from lamplighter.data.sources import Source
from lamplighter.data.sources.file_source import FileSource
from lamplighter.data.split import CacheSettings
from lamplighter.data.token_cache import reader
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.doctor.probe import Finding, Level, ProbeContext, as_finding, failed, fault, ok, warn
from lamplighter.doctor.sample_data import NoSample, blocked, kept_tokenizer, own_cache, read_some, take
from lamplighter.errors import BadData, LampError
from lamplighter.procs.lock import is_held
from lamplighter.readers.bad_records import BadInReading
from lamplighter.readers.local import LocalFile, is_packed, kind_of
from lamplighter.rundir import CACHE_NAME, hash_file, human_bytes, is_alive, read_json, read_record, write_json

_LOOK_S = 10.0  # for all files together
WHOLE_BYTES = 32_000_000  # a file up to this size is read to its end, while there is time
TAIL_BYTES = 1 << 17
_SLOW_MB_S = 1.0
_SHOWN = 5
_PACKED_TIMES = 4  # text unpacks to some times its size


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


def files(context: ProbeContext) -> Iterator[Finding]:
    """Each file opens; its first and its last documents are text."""
    data = context.run.data
    if not data.paths and data.source is None:
        yield ok(f"the embedded corpus, {data.embedded_documents:,} documents: there is no file to look at")
        return
    if is_dataset(context.run.data.source):
        yield warn(
            f"{data.source} is a torch Dataset: its items are looked at by the loading probes",
            "lamp train reads texts: an iterable of strings, or an object with documents(start)",
            "yield the texts, or watch your own script: lamp watch -- python train.py",
        )
        return
    try:
        source = open_source(context.run, own_cache(context))
    except LampError as error:
        yield as_finding(error)
        return
    inner = getattr(source, "source", source)  # only the first of many
    if isinstance(inner, FileSource):
        yield from _files(inner, context)
    elif isinstance(inner, RowSource):
        yield from _rows(inner, context)
    else:
        yield from _other(source, context)


def is_dataset(name: str | None) -> bool:
    """Whether data.source names a torch Dataset or DataLoader; torch is loaded only by whoever has one."""
    from lamplighter.doctor.loading import find

    if name is None:
        return False
    try:
        return find(name).is_dataset
    except Exception:  # noqa: BLE001 (opening the source, which comes next, tells what is wrong with it)
        return False


def _files(source: FileSource, context: ProbeContext) -> Iterator[Finding]:
    looked, until = Looked(), time.monotonic() + _LOOK_S
    bad: list[str] = []
    began, reading = time.monotonic(), source.bad.begin()
    for number, item in enumerate(source.items):
        context.now(f"{item.name} ({number + 1} of {len(source.items)})")
        looked.files += 1
        before = dict(source.bad.reasons)
        try:
            _look_at(source, number, looked, until, reading)
        except LampError as error:
            bad.append(item.name)
            dirty = dict(source.bad.reasons) != before or (".jsonl" not in item.name and "UTF-8" in error.why)
            if len(bad) <= _SHOWN:
                cause = "dirty_text" if dirty else error.cause
                found = as_finding(error, "fault", cause)
                yield fault(found.what, found.why, found.next, cause, culprit={"path": item.name})
    looked.seconds = time.monotonic() - began
    try:
        lines = max(reading.lines, looked.documents) * max(1.0, (source.total_bytes() or 0) / max(1, looked.bytes))
        if not bad:  # else the files themselves are named
            reading.check(lines)
    except LampError as error:
        bad += {path for path, _ in source.bad.known}
        found = as_finding(error, "fault", "dirty_text")
        yield fault(found.what, found.why, found.next, "dirty_text", culprit={"path": min(bad)})
    if len(bad) > _SHOWN:
        yield fault(f"{len(bad) - _SHOWN:,} further files cannot be read", "as those above", "mend or leave out")
    if aside := sorted(known for known in source.bad.known if known[0] not in bad):
        path, at = aside[0]
        reasons = ", ".join(f"{why}: {count:,}" for why, count in source.bad.reasons.most_common())
        yield warn(
            f"{len(aside):,} lines are not text and will be set aside; the first one: {path}, byte {at:,}",
            reasons,
            "mend the file, or refuse such lines with --data.bad_text refuse",
            "dirty_text",
            culprit={"path": path, "byte": at},
        )
    if not bad:
        yield _told(source, looked)
    yield from _speed(looked.bytes, looked.seconds, source.items[0].name, context)


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
    return ok(what, f"of {source}", figures=figures)


def _speed(count: int, seconds: float, path: str, context: ProbeContext) -> Iterator[Finding]:
    """MB/s of the actual path; kept for the probe that knows how fast a step is."""
    if count < 1 << 16 or seconds <= 0:
        return
    rate = count / seconds / 1e6
    write_json(context.scratch / "speed.json", {"bytes_per_s": count / seconds}, durable=False)
    if rate < _SLOW_MB_S:
        yield warn(
            f"read at {rate:.2f} MB/s: {path} is on a slow disk or far away",
            f"{human_bytes(count)} took {seconds:.1f} s",
            "copy the files to a local disk first",
            "slow_disk",
            culprit={"path": path},
            figures={"mb_per_s": rate},
        )
    else:
        yield ok(f"read at {rate:.0f} MB/s, decoded and cut into documents", figures={"mb_per_s": rate})


def _rows(source: RowSource, context: ProbeContext) -> Iterator[Finding]:
    """Instruction rows: every file, row by row, while there is time."""
    began, looked, bad = time.monotonic(), Looked(), source.bad_records(quiet=True)
    for one, kind in zip(source.inputs, source.kinds, strict=True):
        looked.files += 1
        alone = RowSource([one], [kind], source.policy, None, source.bad_limit)
        try:
            for _, _, place in alone.rows(bad):
                if looked.documents % 500 == 0:
                    context.now(place)
                looked.documents += 1
                if time.monotonic() - began > _LOOK_S:
                    break
            looked.bytes += one.size or 0
        except LampError as error:
            yield as_finding(error)
    for line in bad.listed[:_SHOWN]:
        what, why, advice = line["error"]
        yield warn(what, why, advice, "dirty_text", culprit={"path": f"{line['path']}:{line['line']}"})
    kinds = ", ".join(sorted({rows.KIND_WORDS[kind] for kind in source.kinds}))
    if looked.documents:
        yield ok(f"{looked.files} files of instruction rows open: {looked.documents:,} rows", kinds)
    else:
        yield fault(f"no row in {source}", "every line is empty or not JSON", "check data.paths")
    yield from _speed(looked.bytes, time.monotonic() - began, rows.name_of(source.inputs[0]), context)


def _other(source: Source, context: ProbeContext) -> Iterator[Finding]:
    """A source of the user's own, a dataset, a mixture: its first documents, as they come."""
    reading = read_some(source, context.now)
    if reading.blocked:
        yield blocked(reading, source)
        return
    if isinstance(reading.error, LampError):
        yield as_finding(reading.error)
        return
    if reading.error is not None:
        yield failed(reading.error, f"{source} failed after {len(reading.texts):,} documents")
        return
    yield ok(
        f"{source}: the first {len(reading.texts):,} documents are text, {human_bytes(reading.bytes)}",
        figures={"documents": float(len(reading.texts))},
    )
    yield from _speed(reading.bytes, reading.seconds, str(source), context)


# ---------------------------------------------------------------- the tokenizer


def tokenizer(context: ProbeContext) -> Iterator[Finding]:
    """Loads or can be trained, has an end of text, gives each text back, fits the model."""
    run = context.run
    try:
        sample = take(context)
        _, found = open_text(sample.run, sample.cache)
    except NoSample as error:
        yield from _alone(context, error)
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
        yield warn(
            f"the tokenizer does not give every text back: {measured.round_trip_failures:,} of {len(texts):,} differ",
            measured.first_failure,
            "what differs can never be learned or written; choose a byte-level tokenizer",
        )
    size = sum(len(text.encode()) for text in texts)
    yield ok(
        f"tokenizer {made}: {found.vocab_size:,} tokens, end of text {found.end_name} = {found.end_of_text}",
        f"{size / max(1, measured.tokens):.2f} bytes per token over {sample.words}",
        figures={"vocab_size": found.vocab_size, "bytes_per_token": size / max(1, measured.tokens)},
    )
    yield from _against_model(context, found)


def _texts(source: Source, most: int = 500) -> Iterator[str]:
    for number, text in enumerate(source.documents()):
        if number == most:
            return
        yield str(text)


def _alone(context: ProbeContext, reason: NoSample) -> Iterator[Finding]:
    """Without text there is still a given tokenizer to look at."""
    origin = context.run.tokenizer.path or context.run.model.init_from
    if origin is None:
        yield warn("the tokenizer was not looked at", f"there is no text to try it on: {reason}")
        return
    try:
        found = tokenizers.load(Path(origin))
    except LampError as error:
        yield as_finding(error)
        return
    yield ok(f"tokenizer of {origin}: {found.vocab_size:,} tokens; there is no text to try it on")
    yield from _against_model(context, found)


def _against_model(context: ProbeContext, found: tokenizers.Tokenizer) -> Iterator[Finding]:
    """A model that is given brings a vocabulary and a tokenizer of its own."""
    folder = context.run.model.init_from
    if folder is None:
        return
    knows = read_record(Path(folder) / "config.json").get("vocab_size")
    if isinstance(knows, int) and knows < found.vocab_size:
        yield fault(
            f"the tokenizer has {found.vocab_size:,} tokens, the model in {folder} knows {knows:,}",
            "an id beyond its embedding is an index error, or a CUDA assert in the middle of a run",
            f"--tokenizer.path {folder}",
            "token_range",
            settings={"tokenizer.path": folder},
        )
    if context.run.tokenizer.path is None:
        return
    try:
        own = tokenizers.load(Path(folder))
    except LampError as error:
        yield warn(f"{folder} has no tokenizer to compare with", error.why)
        return
    if own.fingerprint() != found.fingerprint():
        yield fault(
            f"the tokenizer of {context.run.tokenizer.path} is not the one that {folder} was trained with",
            f"{found.vocab_size:,} tokens against {own.vocab_size:,}: the same ids mean other words to the model",
            f"leave tokenizer.path out, or --tokenizer.path {folder}",
            "tokenizer_differs",
            settings={"tokenizer.path": folder},
        )


_VERIFY_S = 15.0
_REBUILD = "--data.cache rebuild"


def cache(context: ProbeContext) -> Iterator[Finding]:
    """Locks first; then the caches of this very data."""
    root = context.runs_dir / CACHE_NAME
    if not root.is_dir():
        yield ok(f"no cache in {root} yet: it will be built")
        return
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        yield from _lock(folder)
    if context.run.data.stream:
        yield ok("data.stream: no token cache is used")
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


# ---------------------------------------------------------------- locks


def _lock(folder: Path) -> Iterator[Finding]:
    """An orderly holder leaves the file empty."""
    path = folder / "lock"
    holder = read_json(path) if path.is_file() else None
    if not isinstance(holder, dict):
        return
    who = f"process {holder.get('pid')} on {holder.get('host')}"
    age_s = time.time() - float(holder.get("t", 0))
    culprit = {"pid": holder.get("pid"), "path": str(path)}
    if is_held(path) or is_alive(holder):
        yield ok(f"{who} is building {folder} now; a run would wait for it", culprit=culprit)
    elif holder.get("host") not in (None, socket.gethostname()):
        yield warn(
            f"{folder} was locked by {who}, {age_s / 60:.0f} min ago: another machine, which cannot be asked from here",
            "the lock itself is free here; if that machine still builds, two would write one cache",
            "make sure that it has ended there",
            "dead_lock_file",
            culprit=culprit,
        )
    else:
        yield warn(
            f"lock of a dead process: {who} held {path} and is gone, {age_s / 60:.0f} min",
            "it was killed while it built the cache; what is finished of it is kept",
            "nothing to do: the next run takes the lock over and goes on",
            "dead_lock_file",
            culprit=culprit,
        )


# ---------------------------------------------------------------- tokens


def _tokens(root: Path, source: Source, context: ProbeContext) -> Iterator[Finding]:
    run = context.run
    try:
        known = _known_tokenizer(source, context)
        if known is None:
            yield from _nothing_yet(root, source, context)
            return
        sought = reader.locate_token_cache(root, source, known, CacheSettings(run.data.val_fraction))
    except LampError as error:
        yield as_finding(error)
        return
    if sought.fault is not None and not (sought.folder / "manifest.json").exists():
        yield from _missing(sought, context)
        return
    if sought.fault is not None:
        yield Finding(
            _level(context, "warn"),
            f"the token cache is cut short: {sought.fault}",
            "a killed copy, a full disk, or somebody's hand",
            f"{_REBUILD} (data.cache auto does it by itself)",
            "shard_truncated",
            culprit={"path": str(sought.folder)},
            settings={"data.cache": "rebuild"},
        )
        return
    yield from _verified(sought.folder, read_record(sought.folder / "manifest.json")["files"], context)
    yield from _in_range(reader.open_tokens(sought.folder), _vocabulary(context, known), context)


def _level(context: ProbeContext, otherwise: Level) -> Level:
    return "fault" if context.run.data.cache == "require" else otherwise


def _missing(sought: reader.CacheLocation, context: ProbeContext) -> Iterator[Finding]:
    """No cache for exactly this; another one near it is never used."""
    if sought.near:
        what = f"the token cache that is there is of other content and will not be used: {sought.near}"
        why = "a cache counts only for the same tokenizer, settings and sources, by their fingerprints"
        advice = "nothing to do: a new one is built beside it"
        yield Finding(
            _level(context, "warn"), what, why, advice, "stale_cache", culprit={"path": str(sought.folder.parent)}
        )
    elif context.run.data.cache == "require":
        yield fault("data.cache is require, and there is no token cache", "", "--data.cache auto")
    else:
        yield ok("no token cache for this data yet: it will be built")


def _nothing_yet(root: Path, source: Source, context: ProbeContext) -> Iterator[Finding]:
    """The tokenizer is still to be trained on this very text, so there is no cache of it; perhaps one of older text."""
    others = [path.parent for path in root.glob("*/manifest.json")]
    same = [folder for folder in others if _named(folder) == str(source).split(", ")[0]]
    if same:
        what = f"the token cache {same[-1].name} is of an older state of {source} and will not be used"
        why = "the text has changed since, so its tokenizer and its tokens are made anew"
        yield Finding(
            _level(context, "warn"), what, why, "nothing to do", "stale_cache", culprit={"path": str(same[-1])}
        )
    elif context.run.data.cache == "require":
        yield fault("data.cache is require, and there is no token cache", "", "--data.cache auto")
    else:
        yield ok("no token cache for this data yet: tokenizer and cache will be made")


def _named(folder: Path) -> str:
    content = read_record(folder / "manifest.json").get("parts", {}).get("sources", {}).get("content", "")
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


def _vocabulary(context: ProbeContext, tokenizer: Tokenizer) -> int:
    """Of the model: what its embedding has rows for."""
    folder = context.run.model.init_from
    knows = read_record(Path(folder) / "config.json").get("vocab_size") if folder else None
    return knows if isinstance(knows, int) else tokenizer.vocab_size


def _in_range(
    found: reader.Tokens | example_cache.Examples, vocab_size: int, context: ProbeContext
) -> Iterator[Finding]:
    context.now("every id against the vocabulary")
    try:
        found.check_ids(vocab_size)
    except LampError as error:
        yield as_finding(error, cause="token_range")
        return
    yield ok(f"every id of the cache is below the model's vocabulary of {vocab_size:,}")


# ---------------------------------------------------------------- examples


def _examples(root: Path, source: RowSource, context: ProbeContext) -> Iterator[Finding]:
    """Caches of these very files."""
    found = False
    for record in sorted(root.glob("examples-*/examples.json")):
        manifest = read_record(record)
        if manifest.get("parts", {}).get("sources", {}).get("fingerprint") != source.fingerprint():
            continue
        found = True
        yield from _verified(record.parent, manifest["files"], context)
    if not found:
        level = _level(context, "ok")
        yield Finding(
            level, "no cache of these examples yet: it will be made", next="--data.cache auto" * (level != "ok")
        )


# ---------------------------------------------------------------- checksums


def _verified(folder: Path, files: dict[str, dict[str, object]], context: ProbeContext) -> Iterator[Finding]:
    """Sizes of all, hashes of as many as the time allows."""
    until, done, total = time.monotonic() + _VERIFY_S, 0, sum(int(str(entry["bytes"])) for entry in files.values())
    for name, entry in files.items():
        path = folder / name
        context.now(f"checksum of {path}")
        size = path.stat().st_size if path.is_file() else 0
        if size != entry["bytes"]:
            yield _damaged(path, "shard_truncated", f"{size:,} bytes, expected {entry['bytes']:,}", context)
            return
        if time.monotonic() > until:
            continue
        if hash_file(path) != entry["sha256"]:
            why = "its sha256 is not the one in the manifest: the disk or somebody changed it"
            yield _damaged(path, "shard_bitflip", why, context)
            return
        done += size
    share = "all" if done == total else f"{human_bytes(done)} of"
    yield ok(f"checksums of the cache {folder.name} are right: {share} {human_bytes(total)}")


def _damaged(path: Path, cause: str, why: str, context: ProbeContext) -> Finding:
    words = "cut short" if cause == "shard_truncated" else "damaged"
    level: Level = "fault" if cause == "shard_bitflip" else _level(context, "warn")
    return Finding(
        level, f"{words}: {path}", why, _REBUILD, cause, culprit={"path": str(path)}, settings={"data.cache": "rebuild"}
    )
