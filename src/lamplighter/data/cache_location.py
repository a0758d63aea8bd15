"""A cache on disk: named after what decides its content, built once by whoever comes first, checked before it is used.

In:  the folder of all caches, the kind of cache (tokens or examples), and the parts that decide its content.
Out: where that cache is, what is wrong with it, which parts differ from the nearest other one; a lock for who builds it.

If one part changes it is another cache, and the difference is said. A manifest is written last, so a folder without one
holds a build that was stopped, or nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lamplighter import read_back, report
from lamplighter.errors import BadData, InputMissing
from lamplighter.procs.lock import open_lock, try_lock
from lamplighter.procs.pool import TICK_S, usable_cores
from lamplighter.readers.records import digest
from lamplighter.rundir import cannot_write, hash_file, identity, is_whole, read_holder, read_record

_POLL_S = 0.2
_LATEST = 2**40  # seconds: the year 36,000, beyond which no clock can be shown
_PROGRESS = {
    "bytes": read_back.NUMBER,
    "total_bytes": read_back.NUMBER,
    "units": read_back.COUNT,
    "item": read_back.TEXT,
}
Mode = Literal["auto", "require", "rebuild"]
"""What data.cache says: use or build, only use, or build in any case."""
Parts = dict[str, dict[str, Any]]
"""What decides a cache, in the order of its fingerprint: each part's fingerprint, and its content in words for people."""


@dataclass(frozen=True)
class CacheKind:
    """Tokens of text, examples of instruction rows, or what a reference model gives them."""

    name: str
    prefix: str
    manifest: str
    format: int
    first: str
    """Why it is built where there is no other one."""


_FILE: read_back.Fields = {"bytes": read_back.needed(read_back.COUNT), "sha256": read_back.needed(read_back.TEXT)}
_PART: read_back.Fields = {"fingerprint": read_back.needed(read_back.TEXT)}
_FILES = read_back.Kind(
    "a list of files", (dict,), may_be_none=False, needed=True, of=read_back.Kind("a file", (dict,), of=_FILE)
)
_MANIFEST: read_back.Fields = {
    "files": _FILES,
    "parts": read_back.Kind("the parts of a cache", (dict,), of=read_back.Kind("a part", (dict,), may_be_none=False, of=_PART)),
}  # fmt: skip


def _read_manifest(folder: Path, kind: CacheKind) -> dict[str, Any] | None:
    """The manifest of a finished cache; None where it is damaged, of another format, or names files elsewhere."""
    manifest = read_record(folder / kind.manifest)
    if manifest.get("format") != kind.format or read_back.find_damage(manifest, _MANIFEST):
        return None
    if "check" in manifest and not is_whole(manifest):  # those of earlier versions have none
        return None
    inside = all(name == Path(name).name and "\0" not in name for name in manifest["files"])
    return manifest if inside else None


def find_fault(folder: Path, kind: CacheKind) -> str | None:
    """None for a complete cache whose files have their sizes; else what is wrong with it."""
    manifest = _read_manifest(folder, kind)
    if manifest is None:
        return "it is not there" if not (folder / kind.manifest).exists() else "its manifest cannot be read"
    for name, entry in manifest["files"].items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found is None:
            return f"{folder / name} is missing"
        if found != entry["bytes"]:
            return f"{folder / name} has {found:,} bytes, expected {entry['bytes']:,}"
    return None


@dataclass(frozen=True)
class CacheLocation:
    """Where the cache of these parts is, whether it is there or not."""

    root: Path
    kind: CacheKind
    parts: Parts

    @property
    def folder(self) -> Path:
        return self.root / f"{self.kind.prefix}{digest([part['fingerprint'] for part in self.parts.values()])[:20]}"

    @property
    def fault(self) -> str | None:
        """What is wrong with it now; None: complete, every file with its size."""
        return find_fault(self.folder, self.kind)

    @property
    def near(self) -> str:
        """Which parts differ from the nearest finished cache, in words; '' where there is no other."""
        best: tuple[int, float, str] = (0, 0.0, "")
        for path in self.root.glob(f"{self.kind.prefix}*/{self.kind.manifest}"):
            other = _read_manifest(path.parent, self.kind)
            old = (other.get("parts") or {}) if other is not None else {}
            if path.parent == self.folder or old.keys() != self.parts.keys():
                continue
            changed = [name for name in self.parts if old[name]["fingerprint"] != self.parts[name]["fingerprint"]]
            words = [f"{name} changed ({_change(old[name], self.parts[name])})" for name in changed]
            alike = len(self.parts) - len(changed)
            candidate = (alike, path.stat().st_mtime, f"{' and '.join(words)} since {path.parent.name}")
            best = max(best, candidate) if alike else best
        return best[2]

    def was_finished(self) -> bool:
        """Whether there is a manifest; what it lists may be damaged since."""
        return (self.folder / self.kind.manifest).exists()


def _change(old: dict[str, Any], new: dict[str, Any]) -> str:
    was, now = old.get("content"), new["content"]
    if isinstance(was, dict) and isinstance(now, dict):
        return ", ".join(f"{key}: {was.get(key)} -> {now[key]}" for key in now if was.get(key) != now[key]) or "rules"
    return f"{was} -> {now}" if was != now else f"{now}, other content"


def remove_others(folder: Path, kept: set[str]) -> None:
    """All files but these; a manifest goes first and build.json last, so that a kill in between leaves no seeming whole."""
    order = {"manifest.json": -1, "examples.json": -1, "reference.json": -1, "build.json": 1}
    for path in sorted(folder.iterdir(), key=lambda path: order.get(path.name, 0)):
        if path.name not in kept:
            path.unlink(missing_ok=True)


# ---------------------------------------------------------------- use or build


@contextmanager
def claimed(cache: CacheLocation, mode: Mode) -> Iterator[bool]:
    """True: it is to be built now, under its lock, from nothing or from where a build was stopped. False: use it as it is.

    It is said which of the two, and why.
    """
    folder, name = cache.folder, cache.kind.name
    untidy = (folder / "build.json").exists()  # a builder that was killed after its last word left its traces
    if cache.fault is None and (mode == "require" or (mode == "auto" and not untidy)):
        *parts, last = cache.parts
        report.note(f"{name} reused: {folder} ({', '.join(parts)} and {last} are unchanged)")
        yield False
        return
    if mode == "require":
        raise _required(cache)
    with locked(folder) as waited:
        fault = cache.fault
        if fault is None and (waited or mode != "rebuild"):
            report.note(f"{name} reused: {folder} ({'another process has built it' if waited else 'complete'})")
            files = read_record(folder / cache.kind.manifest)["files"]
            remove_others(folder, {*files, cache.kind.manifest, "lock"})
            yield False
            return
        reason = _reason(cache, mode, fault)
        if mode == "auto" and cache.was_finished():
            advice = "nothing to do; if it happens again, look at the disk"
            report.verdict(report.Verdict("broken", "shard_truncated", reason, advice, "rebuild"))
        else:
            report.note(reason)
        if mode == "rebuild" or cache.was_finished():
            remove_others(folder, {"lock"})
        yield True


def _reason(cache: CacheLocation, mode: Mode, fault: str | None) -> str:
    if mode == "rebuild":
        return f"{cache.kind.name} rebuilt: {cache.folder} (asked for by data.cache rebuild)"
    if cache.was_finished():
        return f"{cache.kind.name} rebuilt: {fault}"
    return f"building the {cache.kind.name}: {cache.folder} ({cache.near or cache.kind.first})"


def _required(cache: CacheLocation) -> Exception:
    folder, name = cache.folder, cache.kind.name
    if cache.was_finished():
        return BadData(f"damaged {name}: {folder}", cache.fault or "a build is not finished", "data.cache rebuild")
    *parts, last = cache.parts
    why = cache.near or f"no cache for this {', '.join(parts)} and {last} is there"
    return InputMissing(f"no {name} at {folder}", why, "build it: --data.cache auto")


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
        if dead := read_holder(folder / "lock"):  # an orderly holder leaves it empty
            since = time.strftime("%H:%M:%S", time.localtime(min(dead.get("t") or 0, _LATEST)))
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
    holder = read_holder(folder / "lock")
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
    report.note(f"{who} is building this token cache; waiting for it")
    now = _read_progress(folder)
    with report.phase("waiting for the token cache", total=now.get("total_bytes"), unit="B") as p:
        seen = None
        while not try_lock(fd):
            now = _read_progress(folder)
            if now.get("bytes") != seen:
                seen = now.get("bytes")
                p.set(seen or 0, f"{who}: {now.get('units') or 0:,} units, at {now.get('item', '?')}")
            time.sleep(_POLL_S)


def _read_progress(folder: Path) -> dict[str, Any]:
    """How far a builder is; empty where it has not said it."""
    return read_back.read_object(folder / "progress.json", _PROGRESS)[0]


# ---------------------------------------------------------------- every byte


def verify_hashes(folder: Path, kind: CacheKind) -> None:
    """Every file has the hash that the manifest says; computed by threads, which needs no lock of Python's."""
    files = read_record(folder / kind.manifest)["files"]
    counted = [0] * len(files)

    def check(number: int, name: str) -> str:
        def tick(count: int) -> None:
            counted[number] += count

        return hash_file(folder / name, tick)

    total = sum(entry["bytes"] for entry in files.values())
    with (
        report.phase(f"verify the {kind.name}", total=total, unit="B") as p,
        ThreadPoolExecutor(usable_cores()) as pool,
    ):
        futures = [pool.submit(check, number, name) for number, name in enumerate(files)]
        try:
            for (name, entry), future in zip(files.items(), futures, strict=True):
                p.set(sum(counted), str(folder / name))
                while not wait([future], TICK_S).done:
                    p.set(sum(counted), str(folder / name))
                if future.result() != entry["sha256"]:
                    why = f"its sha256 is not the one in {kind.manifest}: the disk or somebody changed it"
                    advice = "build it again with --data.cache rebuild"
                    raise BadData(f"damaged: {folder / name}", why, advice, cause="shard_bitflip")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        p.set(total)
