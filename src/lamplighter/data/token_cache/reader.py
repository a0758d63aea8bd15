"""The token cache: found by its fingerprint, built once (by whoever is first), read by mapped memory.

In:  a folder for caches, a source, a tokenizer, settings.
Out: Tokens with a train and a val CachedStream: documents of ids, one after the other, in shards on disk (see builder.py).

A cache is named after three fingerprints: tokenizer, settings, sources. If one of them changes it is another cache, and
the difference is said.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lamplighter import report
from lamplighter.data import split as division
from lamplighter.data.sources import Source
from lamplighter.data.split import CacheSettings
from lamplighter.data.token_cache import builder
from lamplighter.data.token_cache.builder import read_manifest
from lamplighter.data.token_cache.encoder import Ids
from lamplighter.data.token_cache.writer import bad_id
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import BadData, InputMissing
from lamplighter.procs.lock import open_lock, try_lock
from lamplighter.procs.pool import TICK_S, usable_cores
from lamplighter.readers import ranges
from lamplighter.readers.records import digest
from lamplighter.rundir import cannot_write, hash_file, identity, read_json, read_record

__all__ = ["CacheSettings", "CachedStream", "Tokens", "ensure", "obtain", "open_tokens"]

PARTS = ("tokenizer", "settings", "sources")
_POLL_S = 0.2
MANY_ROWS, MANY_TOKENS = 32, 256  # from so many rows of fewer tokens a shard on, they are gathered together
_Mode = Literal["auto", "require", "rebuild"]


# ---------------------------------------------------------------- which cache, and is it there


def ensure(
    cache_root: Path,
    source: Source,
    tokenizer: Tokenizer,
    settings: CacheSettings,
    mode: _Mode = "auto",
    workers: int | None = None,
) -> Path:
    """The folder of the finished cache: reused, built or rebuilt, and said which and why."""
    return _ensure(cache_root, source, tokenizer, settings=settings, mode=mode, workers=workers)[0]


def obtain(
    cache_root: Path,
    source: Source,
    tokenizer: Tokenizer,
    settings: CacheSettings,
    mode: _Mode = "auto",
    workers: int | None = None,
) -> tuple[Tokens, bool]:
    """The open cache, and whether it was built just now; one that was there before is verified byte by byte."""
    folder, is_new = _ensure(cache_root, source, tokenizer, settings=settings, mode=mode, workers=workers)
    return open_tokens(folder, verify=not is_new), is_new


def _ensure(
    cache_root: Path, source: Source, tokenizer: Tokenizer, settings: CacheSettings, mode: _Mode, workers: int | None
) -> tuple[Path, bool]:
    parts = _parts(source, tokenizer, settings)
    folder = _folder(cache_root, parts)
    fault = _fault(folder)
    untidy = (folder / "build.json").exists()
    if fault is None and (mode == "require" or (mode == "auto" and not untidy)):
        report.note(f"token cache reused: {folder} (tokenizer, settings and sources are unchanged)")
        return folder, False
    if mode == "require":
        raise _required(cache_root, folder, parts, fault)
    with locked(folder) as waited:
        fault = _fault(folder)
        if fault is None and (waited or mode != "rebuild"):
            report.note(f"token cache reused: {folder} ({'another process has built it' if waited else 'complete'})")
            _tidy(folder)
            return folder, False
        reason = _reason(cache_root, folder, parts, mode, fault)
        if mode == "auto" and (folder / "manifest.json").exists():
            advice = "nothing to do; if it happens again, look at the disk"
            report.verdict(report.Verdict("broken", "shard_truncated", reason, advice, "rebuild"))
        else:
            report.note(reason)
        if mode == "rebuild" or (folder / "manifest.json").exists():
            for path in sorted(folder.iterdir(), key=lambda path: path.name != "manifest.json"):  # that one first
                if path.name != "lock":
                    path.unlink()
        builder.build(folder, source, tokenizer, settings=settings, parts=parts, workers=workers or usable_cores())
    return folder, True


@dataclass(frozen=True)
class CacheLocation:
    """Where the cache of a run would be, and what is there."""

    folder: Path
    fault: str | None  # None: complete, every file with its size
    near: str  # what differs from the nearest other cache; '' where there is none


def locate_token_cache(
    cache_root: Path, source: Source, tokenizer: Tokenizer, settings: CacheSettings
) -> CacheLocation:
    """Look, and touch nothing."""
    parts = _parts(source, tokenizer, settings)
    folder = _folder(cache_root, parts)
    return CacheLocation(folder, _fault(folder), _near(cache_root, folder, parts))


def find_token_cache(
    cache_root: Path, source: Source, tokenizer: Tokenizer, settings: CacheSettings
) -> dict[str, Any] | None:
    """The manifest of the finished cache of these three, with its folder's name; None where there is none. Builds nothing."""
    folder = _folder(cache_root, _parts(source, tokenizer, settings))
    if _fault(folder) is not None:
        return None
    manifest = read_manifest(folder)
    return None if manifest is None else {**manifest, "name": folder.name}


def _folder(cache_root: Path, parts: dict[str, dict[str, Any]]) -> Path:
    return cache_root / digest([parts[name]["fingerprint"] for name in PARTS])[:20]


def _parts(source: Source, tokenizer: Tokenizer, settings: CacheSettings) -> dict[str, dict[str, Any]]:
    """The three things that decide a cache, each with its fingerprint and words for people."""
    rules = [builder.FORMAT, division.LOOK_DOCUMENTS, division.LOOK_BYTES, division.BLOCK_BYTES, ranges.PART_BYTES]
    return {
        "tokenizer": {"fingerprint": tokenizer.fingerprint(), "content": str(tokenizer).split(", by ")[0]},
        "settings": {"fingerprint": digest([asdict(settings), rules]), "content": asdict(settings)},
        "sources": {"fingerprint": source.fingerprint(), "content": str(source)},
    }


def _fault(folder: Path) -> str | None:
    """None for a complete cache whose files have their sizes; else what is wrong with it."""
    manifest = read_manifest(folder)
    if manifest is None:
        return "it is not there" if not (folder / "manifest.json").exists() else "its manifest cannot be read"
    for name, entry in manifest["files"].items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found is None:
            return f"{folder / name} is missing"
        if found != entry["bytes"]:
            return f"{folder / name} has {found:,} bytes, expected {entry['bytes']:,}"
    return None


def _tidy(folder: Path) -> None:
    """A builder that was killed after its last word leaves these."""
    for pattern in ("*.hash", "unit-*.json", "open.json", "progress.json", ".*.tmp", "build.json"):  # that one last
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _near(cache_root: Path, folder: Path, parts: dict[str, Any]) -> str:
    """Which of the three parts differ from the nearest finished cache, in words; '' where there is no other."""
    best: tuple[int, float, str] = (0, 0.0, "")
    for path in cache_root.glob("*/manifest.json"):
        other = read_manifest(path.parent)
        if other is None or path.parent == folder:
            continue
        changed = [name for name in PARTS if other["parts"][name]["fingerprint"] != parts[name]["fingerprint"]]
        words = [f"{name} changed ({_change(other['parts'][name], parts[name])})" for name in changed]
        candidate = (len(PARTS) - len(changed), path.stat().st_mtime, f"{' and '.join(words)} since {path.parent.name}")
        best = max(best, candidate) if candidate[0] else best
    return best[2]


def _change(old: dict[str, Any], new: dict[str, Any]) -> str:
    was, now = old["content"], new["content"]
    if isinstance(was, dict) and isinstance(now, dict):
        return ", ".join(f"{key}: {was.get(key)} -> {now[key]}" for key in now if was.get(key) != now[key]) or "rules"
    return f"{was} -> {now}" if was != now else f"{now}, other content"


def _reason(cache_root: Path, folder: Path, parts: dict[str, Any], mode: _Mode, fault: str | None) -> str:
    if mode == "rebuild":
        return f"token cache rebuilt: {folder} (asked for by data.cache rebuild)"
    if (folder / "manifest.json").exists():
        return f"token cache rebuilt: {fault}"
    why = _near(cache_root, folder, parts) or "the first for this tokenizer, these settings and these sources"
    return f"building the token cache: {folder} ({why})"


def _required(cache_root: Path, folder: Path, parts: dict[str, Any], fault: str | None) -> Exception:
    if (folder / "manifest.json").exists():
        return BadData(
            f"the token cache is damaged: {folder}", fault or "a build is not finished", "data.cache rebuild"
        )
    why = _near(cache_root, folder, parts) or "no cache for this tokenizer, these settings or these sources is there"
    return InputMissing(f"no token cache at {folder}", why, "build it: --data.cache auto")


# ---------------------------------------------------------------- one builds, the others wait


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock; the value says whether somebody else held it first. A dead holder is no obstacle."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = open_lock(folder / "lock")
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        waited = not try_lock(fd)
        if waited:
            _wait(fd, folder)
        if dead := read_json(folder / "lock"):  # an orderly holder leaves it empty
            since = time.strftime("%H:%M:%S", time.localtime(dead.get("t", 0)))
            why = f"token cache taken over from dead pid {dead.get('pid')} on {dead.get('host')}, lock of {since}"
            culprit = {"pid": dead.get("pid"), "path": str(folder / "lock")}
            report.verdict(report.Verdict("broken", "dead_lock_file", why, "nothing to do", culprit=culprit))
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({**identity(), "t": time.time()}).encode(), 0)
        try:
            yield waited
        finally:
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _wait(fd: int, folder: Path) -> None:
    """Until the lock is free; the builder's own progress is what counts as progress here."""
    holder = read_record(folder / "lock")
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
    report.note(f"{who} is building this token cache; waiting for it")
    now = read_record(folder / "progress.json")
    with report.phase("waiting for the token cache", total=now.get("total_bytes"), unit="B") as p:
        seen = None
        while not try_lock(fd):
            now = read_record(folder / "progress.json")
            if now.get("bytes") != seen:
                seen = now.get("bytes")
                p.set(seen or 0, f"{who}: {now.get('units', 0):,} units, at {now.get('item', '?')}")
            time.sleep(_POLL_S)


# ---------------------------------------------------------------- reading


class CachedStream:
    """One side's stream of ids: an end-of-text, then its shards, which may have any sizes."""

    def __init__(self, folder: Path, name: str, manifest: dict[str, Any]) -> None:
        counts = manifest["splits"][name]
        self.name, self.tokens, self.documents = name, int(counts["tokens"]), int(counts["documents"])
        self.text_bytes = int(counts["text_bytes"])
        self.dtype = np.dtype(manifest["dtype"])
        self.paths = [folder / shard["file"] for shard in counts["shards"]]
        head = np.array([manifest["end_of_text"]] if self.tokens else [], self.dtype)
        mapped = [np.memmap(path, self.dtype, mode="r").view(np.ndarray) for path in self.paths]
        self.shards: list[Ids] = [head, *mapped]
        """The stream; the first one is the mark that it begins with, in no file."""
        self.bounds = np.cumsum([0, *map(len, self.shards)])

    def __len__(self) -> int:
        return self.tokens

    def read(self, start: int, stop: int) -> Ids:
        """Ids of the stream from `start` to `stop`; a view where they lie in one shard."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"{start}:{stop} of {self.tokens} tokens")
        pieces = []
        number = int(np.searchsorted(self.bounds, start, "right")) - 1
        while start < stop:
            at = start - int(self.bounds[number])
            pieces.append(self.shards[number][at : at + stop - start])
            start += len(pieces[-1])
            number += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, self.dtype), *pieces])

    def gather(self, starts: np.ndarray[Any, np.dtype[np.int64]], length: int) -> Ids:
        """int64 [B, length]: the stretches that begin at `starts`."""
        out = np.empty((len(starts), length), np.int64)
        if len(starts) and not 0 <= int(starts.min()) <= int(starts.max()) <= self.tokens - length:
            raise IndexError(f"stretches of {length} from {starts.min()} to {starts.max()} of {self.tokens} tokens")
        numbers = np.searchsorted(self.bounds, starts, "right") - 1
        at = starts - self.bounds[numbers]
        inside = starts + length <= self.bounds[numbers + 1]
        if length < MANY_TOKENS and len(starts) > MANY_ROWS * len(self.shards):
            self._gather_short(out, numbers, at, inside)
        else:
            rows, shards = np.flatnonzero(inside), self.shards
            for row, number, begin in zip(rows.tolist(), numbers[rows].tolist(), at[rows].tolist(), strict=True):
                out[row] = shards[number][begin : begin + length]
        for row in np.flatnonzero(~inside).tolist():  # over the border of two shards
            out[row] = self.read(int(starts[row]), int(starts[row]) + length)
        return out

    def _gather_short(self, out: Ids, numbers: Ids, at: Ids, inside: Ids) -> None:
        """Many short stretches of few shards: a shard at a time."""
        for number in np.unique(numbers[inside]).tolist():
            rows = np.flatnonzero(inside & (numbers == number))
            windows = np.lib.stride_tricks.sliding_window_view(self.shards[number], out.shape[1])
            out[rows] = windows[at[rows]]

    def document_starts(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Where each document's first token is in the stream."""
        found = [np.zeros(0, "<u8")]
        for path, base in zip(self.paths, self.bounds[1:].tolist(), strict=False):
            index = path.with_suffix(".idx")
            if index.is_file():  # a shard may lie inside one document
                found.append(np.fromfile(index, "<u8") + np.uint64(base))
        return np.concatenate(found)


@dataclass(frozen=True)
class Tokens:
    """An open cache."""

    folder: Path
    manifest: dict[str, Any]
    train: CachedStream
    val: CachedStream

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["vocab_size"])

    @property
    def end_of_text(self) -> int:
        return int(self.manifest["end_of_text"])

    def check_ids(self, vocab_size: int) -> None:
        """Read every id once: a model of `vocab_size` must know it."""
        with report.phase("check token ids", total=self.train.tokens + self.val.tokens, unit="tokens") as p:
            for split in (self.train, self.val):
                for path, shard in zip(split.paths, split.shards[1:], strict=True):
                    for begin in range(0, len(shard), 1 << 22):
                        p.tick(0, str(path))
                        block = shard[begin : begin + (1 << 22)]
                        if int(block.max()) >= vocab_size:
                            first = int(np.argmax(block >= vocab_size))
                            raise bad_id(str(path), begin + first, int(block[first]), vocab_size)
                        p.tick(len(block))


def open_tokens(folder: Path, verify: bool = False) -> Tokens:
    """Map a finished cache. Sizes are always checked; `verify` reads every byte and checks the hashes too."""
    if (fault := _fault(folder)) is not None:
        kind = BadData if (folder / "manifest.json").exists() else InputMissing
        raise kind(f"cannot open the token cache {folder}", fault, "build it again with --data.cache rebuild")
    manifest = read_manifest(folder)
    assert manifest is not None
    if verify:
        _verify(folder, manifest["files"])
    _allow_open_files(sum(len(split["shards"]) for split in manifest["splits"].values()))
    return Tokens(folder, manifest, CachedStream(folder, "train", manifest), CachedStream(folder, "val", manifest))


def _verify(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Hashes are computed by threads, which needs no lock of Python's."""
    counted = [0] * len(files)

    def check(number: int, name: str) -> str:
        def tick(count: int) -> None:
            counted[number] += count

        return hash_file(folder / name, tick)

    total = sum(entry["bytes"] for entry in files.values())
    with report.phase("verify the token cache", total=total, unit="B") as p, ThreadPoolExecutor(usable_cores()) as pool:
        futures = [pool.submit(check, number, name) for number, name in enumerate(files)]
        try:
            for (name, entry), future in zip(files.items(), futures, strict=True):
                p.set(sum(counted), str(folder / name))
                while not wait([future], TICK_S).done:
                    p.set(sum(counted), str(folder / name))
                if future.result() != entry["sha256"]:
                    why = "its sha256 is not the one in manifest.json: the disk or somebody changed it"
                    advice = "build it again with --data.cache rebuild"
                    raise BadData(f"damaged: {folder / name}", why, advice, cause="shard_bitflip")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        p.set(total)


def _allow_open_files(count: int) -> None:
    """A mapped shard holds a descriptor; the usual limit of 1,024 is raised where there are many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and (wanted := count + 512) > soft:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
