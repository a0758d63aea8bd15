"""Cache probe: the token caches that a run would read are whole, unchanged and of its vocabulary; locks are of the living.

In:  a Patient; the real cache folder, which is only read.
Out: Findings: truncated or changed shards, ids beyond the vocabulary, caches of other content, locks of dead processes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

from lamplighter.data import tokenizer as tokenizers
from lamplighter.data.chat import example_cache
from lamplighter.data.chat.row_source import RowSource
from lamplighter.data.setup import open_source
from lamplighter.data.sources import Source
from lamplighter.data.split import Settings
from lamplighter.data.token_cache import reader
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.doctor.probe import Finding, Level, Patient
from lamplighter.doctor.sample_data import as_finding, kept_tokenizer, own_cache
from lamplighter.errors import LampError
from lamplighter.procs.lock import is_held
from lamplighter.rundir import CACHE_NAME, hash_file, human_bytes, is_alive, read_json, read_record

VERIFY_S = 15.0
REBUILD = "--data.cache rebuild"


def cache(patient: Patient) -> Iterator[Finding]:
    """Locks first; then the caches of this very data."""
    root = patient.runs_dir / CACHE_NAME
    if not root.is_dir():
        yield Finding("ok", f"no cache in {root} yet: it will be built")
        return
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        yield from _lock(folder)
    if patient.run.data.stream:
        yield Finding("ok", "data.stream: no token cache is used")
        return
    try:
        source = open_source(patient.run, own_cache(patient))
    except LampError as error:
        yield Finding("warn", "the token cache was not looked at", f"the data does not open: {error.what}")
        return
    if isinstance(source, RowSource):
        yield from _examples(root, source, patient)
    else:
        yield from _tokens(root, source, patient)


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
        yield Finding("ok", f"{who} is building {folder} now; a run would wait for it", culprit=culprit)
    elif holder.get("host") not in (None, socket.gethostname()):
        yield Finding(
            "warn",
            f"{folder} was locked by {who}, {age_s / 60:.0f} min ago: another machine, which cannot be asked from here",
            "the lock itself is free here; if that machine still builds, two would write one cache",
            "make sure that it has ended there",
            "dead_lock_file",
            culprit,
        )
    else:
        yield Finding(
            "warn",
            f"lock of a dead process: {who} held {path} and is gone, {age_s / 60:.0f} min",
            "it was killed while it built the cache; what is finished of it is kept",
            "nothing to do: the next run takes the lock over and goes on",
            "dead_lock_file",
            culprit,
        )


# ---------------------------------------------------------------- tokens


def _tokens(root: Path, source: Source, patient: Patient) -> Iterator[Finding]:
    run = patient.run
    try:
        known = _known_tokenizer(source, patient)
        if known is None:
            yield from _nothing_yet(root, source, patient)
            return
        sought = reader.look_for(root, source, known, Settings(run.data.val_fraction))
    except LampError as error:
        yield as_finding(error)
        return
    if sought.fault is not None and not (sought.folder / "manifest.json").exists():
        yield from _missing(sought, patient)
        return
    if sought.fault is not None:
        yield Finding(
            _level(patient, "warn"),
            f"the token cache is cut short: {sought.fault}",
            "a killed copy, a full disk, or somebody's hand",
            f"{REBUILD} (data.cache auto does it by itself)",
            "shard_truncated",
            {"path": str(sought.folder)},
            {"data.cache": "rebuild"},
        )
        return
    yield from _verified(sought.folder, read_record(sought.folder / "manifest.json")["files"], patient)
    yield from _in_range(reader.open_tokens(sought.folder), _vocabulary(patient, known), patient)


def _level(patient: Patient, otherwise: Level) -> Level:
    return "fault" if patient.run.data.cache == "require" else otherwise


def _missing(sought: reader.Sought, patient: Patient) -> Iterator[Finding]:
    """No cache for exactly this; another one near it is never used."""
    if sought.near:
        what = f"the token cache that is there is of other content and will not be used: {sought.near}"
        why = "a cache counts only for the same tokenizer, settings and sources, by their fingerprints"
        advice = "nothing to do: a new one is built beside it"
        yield Finding(_level(patient, "warn"), what, why, advice, "stale_cache", {"path": str(sought.folder.parent)})
    elif patient.run.data.cache == "require":
        yield Finding("fault", "data.cache is require, and there is no token cache", "", "--data.cache auto")
    else:
        yield Finding("ok", "no token cache for this data yet: it will be built")


def _nothing_yet(root: Path, source: Source, patient: Patient) -> Iterator[Finding]:
    """The tokenizer is still to be trained on this very text, so there is no cache of it; perhaps one of older text."""
    others = [path.parent for path in root.glob("*/manifest.json")]
    same = [folder for folder in others if _named(folder) == str(source).split(", ")[0]]
    if same:
        what = f"the token cache {same[-1].name} is of an older state of {source} and will not be used"
        why = "the text has changed since, so its tokenizer and its tokens are made anew"
        yield Finding(_level(patient, "warn"), what, why, "nothing to do", "stale_cache", {"path": str(same[-1])})
    elif patient.run.data.cache == "require":
        yield Finding("fault", "data.cache is require, and there is no token cache", "", "--data.cache auto")
    else:
        yield Finding("ok", "no token cache for this data yet: tokenizer and cache will be made")


def _named(folder: Path) -> str:
    content = read_record(folder / "manifest.json").get("parts", {}).get("sources", {}).get("content", "")
    return str(content).split(", ")[0]


def _known_tokenizer(source: Source, patient: Patient) -> Tokenizer | None:
    """The one that a run would use, if it is there already; nothing is trained for a look."""
    run = patient.run
    if origin := run.tokenizer.path or run.model.init_from:
        return tokenizers.load(Path(origin))
    if run.tokenizer.kind == "bytes":
        return tokenizers.byte_level()
    kept = kept_tokenizer(patient, source)
    return tokenizers.load(kept) if kept else None


def _vocabulary(patient: Patient, tokenizer: Tokenizer) -> int:
    """Of the model: what its embedding has rows for."""
    folder = patient.run.model.init_from
    knows = read_record(Path(folder) / "config.json").get("vocab_size") if folder else None
    return knows if isinstance(knows, int) else tokenizer.vocab_size


def _in_range(found: reader.Tokens | example_cache.Examples, vocab_size: int, patient: Patient) -> Iterator[Finding]:
    patient.now("every id against the vocabulary")
    try:
        found.check_ids(vocab_size)
    except LampError as error:
        yield as_finding(error, cause="token_range")
        return
    yield Finding("ok", f"every id of the cache is below the model's vocabulary of {vocab_size:,}")


# ---------------------------------------------------------------- examples


def _examples(root: Path, source: RowSource, patient: Patient) -> Iterator[Finding]:
    """Caches of these very files."""
    found = False
    for record in sorted(root.glob("examples-*/examples.json")):
        manifest = read_record(record)
        if manifest.get("parts", {}).get("sources", {}).get("fingerprint") != source.fingerprint():
            continue
        found = True
        yield from _verified(record.parent, manifest["files"], patient)
    if not found:
        level = _level(patient, "ok")
        yield Finding(
            level, "no cache of these examples yet: it will be made", next="--data.cache auto" * (level != "ok")
        )


# ---------------------------------------------------------------- checksums


def _verified(folder: Path, files: dict[str, dict[str, object]], patient: Patient) -> Iterator[Finding]:
    """Sizes of all, hashes of as many as the time allows."""
    until, done, total = time.monotonic() + VERIFY_S, 0, sum(int(str(entry["bytes"])) for entry in files.values())
    for name, entry in files.items():
        path = folder / name
        patient.now(f"checksum of {path}")
        size = path.stat().st_size if path.is_file() else 0
        if size != entry["bytes"]:
            yield _damaged(path, "shard_truncated", f"{size:,} bytes, expected {entry['bytes']:,}", patient)
            return
        if time.monotonic() > until:
            continue
        if hash_file(path) != entry["sha256"]:
            why = "its sha256 is not the one in the manifest: the disk or somebody changed it"
            yield _damaged(path, "shard_bitflip", why, patient)
            return
        done += size
    share = "all" if done == total else f"{human_bytes(done)} of"
    yield Finding("ok", f"checksums of the cache {folder.name} are right: {share} {human_bytes(total)}")


def _damaged(path: Path, cause: str, why: str, patient: Patient) -> Finding:
    words = "cut short" if cause == "shard_truncated" else "damaged"
    level: Level = "fault" if cause == "shard_bitflip" else _level(patient, "warn")
    return Finding(level, f"{words}: {path}", why, REBUILD, cause, {"path": str(path)}, {"data.cache": "rebuild"})
