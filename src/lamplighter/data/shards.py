"""The token cache being written: shards of ids, and a builder that survives any kill.

In:  a source, a tokenizer, settings and a folder whose lock is held.
Out: train-00000.bin, val-00000.bin, ... with their indexes, and manifest.json, written last.

A split's stream is one end-of-text, then every document with one end-of-text after it: each token of each document is
predicted exactly once. Shards are cut at exact sizes, so their bytes do not depend on where a build stopped and went on.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lamplighter import report
from lamplighter.data.division import Divider, Division, Look, Piece, Settings, look, watched
from lamplighter.data.sources import Cursor, Source
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import BadData, CannotWrite
from lamplighter.rundir import (
    cannot_write,
    free_bytes,
    human_bytes,
    identity,
    open_lines,
    read_json,
    read_lines,
    write_atomic,
    write_json,
)

FORMAT = 1
SIDES = ("train", "val")
COMMIT_S = 30.0  # a slow source fills no shard for hours: this much time is the most that a kill can cost

Ids = np.ndarray[Any, np.dtype[Any]]


# ---------------------------------------------------------------- one side's stream


class _Stream:
    """The tokens of one side that are not yet in a shard, and the counts of all that were added."""

    def __init__(self, name: str, dtype: str, settings: Settings, vocab_size: int) -> None:
        self.name, self.dtype, self.size, self.vocab_size = name, dtype, settings.shard_tokens, vocab_size
        self.shards = 0
        self.tokens = self.documents = self.text_bytes = 0
        self.pending: list[Ids] = []
        self.starts: list[Ids] = []
        self.hashes: list[Ids] = []  # rows of (position of the piece, hash of a text in it)

    def counts(self) -> dict[str, int]:
        names = ("shards", "tokens", "documents", "text_bytes")
        return {name: getattr(self, name) for name in names}

    def add(self, tokens: Ids, lengths: Ids, pieces: list[Piece], end: int) -> None:
        """Tokens of the pieces, end-of-text marks included; `lengths` says how many belong to each piece."""
        if not pieces:
            return
        if not self.tokens:  # the stream begins with an end-of-text, as if a document had ended before
            tokens = np.concatenate([np.array([end], tokens.dtype), tokens])
        at = self.tokens + len(tokens) - int(lengths.sum()) + np.cumsum(lengths) - lengths
        self._check(tokens)
        self.starts.append(at[[piece.begins for piece in pieces]].astype("<u8"))
        rows = [(where, hash) for where, piece in zip(at.tolist(), pieces, strict=True) for hash in piece.hashes]
        self.hashes.append(np.array(rows, "<u8").reshape(-1, 2))
        self.pending.append(tokens.astype(self.dtype))
        self.tokens += len(tokens)
        self.documents += sum(piece.begins for piece in pieces)
        self.text_bytes += sum(piece.bytes for piece in pieces)

    def _check(self, tokens: Ids) -> None:
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            first = int(np.argmax(tokens >= self.vocab_size))
            shard, offset = divmod(self.tokens + first, self.size)
            raise bad_id(f"{self.name}-{shard:05d}.bin", offset, int(tokens[first]), self.vocab_size)

    def full(self) -> bool:
        return self.tokens - self.shards * self.size >= self.size

    def cut_shard(self) -> dict[str, bytes]:
        """The next shard (the rest, if that is less) as files; what is left stays pending."""
        end = (self.shards + 1) * self.size
        tokens, starts, hashes = self.arrays()
        name = f"{self.name}-{self.shards:05d}"
        self.pending = [tokens[self.size :].copy()]
        self.starts, self.hashes = [starts[starts >= end]], [hashes[hashes[:, 0] >= end]]
        self.shards += 1
        return {
            f"{name}.bin": tokens[: self.size].tobytes(),
            f"{name}.idx.npy": _npy(starts[starts < end]),
            f"{name}.hash.npy": _npy(hashes[hashes[:, 0] < end, 1]),
        }

    def arrays(self) -> tuple[Ids, Ids, Ids]:
        nothing = np.zeros(0, self.dtype), np.zeros(0, "<u8"), np.zeros((0, 2), "<u8")
        lists = (self.pending, self.starts, self.hashes)
        tokens, starts, hashes = (np.concatenate([e, *rest]) for e, rest in zip(nothing, lists, strict=True))
        return tokens, starts, hashes

    def restore(self, counts: dict[str, int], arrays: tuple[Ids, Ids, Ids]) -> None:
        for name, value in counts.items():
            setattr(self, name, value)
        self.pending, self.starts, self.hashes = ([array] for array in arrays)


def bad_id(name: str, offset: int, found: int, vocab_size: int) -> BadData:
    return BadData(
        f"token id out of range: {name}:{offset:,}",
        f"id {found:,}, but the vocabulary has {vocab_size:,} tokens",
        "the cache is from another tokenizer, or damaged: build it again with --data.cache rebuild",
        cause="token_range",
    )


def _npy(array: Ids) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


# ---------------------------------------------------------------- the builder


class Builder:
    """Writes shards; after each full one (or half a minute), a durable line says how far the texts are consumed."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, settings: Settings) -> None:
        self.folder, self.tokenizer, self.settings = folder, tokenizer, settings
        self.dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
        self.streams = {name: _Stream(name, self.dtype, settings, tokenizer.vocab_size) for name in SIDES}
        self.divider = Divider(Division("documents", 0, 0), None)
        self.files: dict[str, dict[str, Any]] = {}
        self.new_files: dict[str, dict[str, Any]] = {}
        self.cursor: Cursor | None = None
        self.texts = self.empty = self.need_bytes = 0
        self._said = 0.0
        self._committed = time.monotonic()

    # -- files

    def _write(self, name: str, data: bytes) -> dict[str, Any]:
        try:
            write_atomic(self.folder / name, data)
        except OSError as error:
            raise _full(self.folder, len(data), error) from error
        return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def _append(self, record: dict[str, Any]) -> None:
        """A line that survives a power cut."""
        try:
            fd = open_lines(self.folder / "progress.jsonl")
            os.write(fd, json.dumps(record).encode() + b"\n")
            os.fsync(fd)
            os.close(fd)
        except OSError as error:
            raise _full(self.folder, 1000, error) from error

    def say(self, bytes_done: int, total: int | None, item: str) -> None:
        """For those who wait: about once a second."""
        if time.monotonic() - self._said < 1:
            return
        self._said = time.monotonic()
        tokens = sum(stream.tokens for stream in self.streams.values())
        now = {"bytes": bytes_done, "total_bytes": total, "texts": self.texts, "tokens": tokens, "item": item}
        try:
            write_json(self.folder / "progress.json", {**identity(), "t": time.time(), **now}, durable=False)
        except OSError as error:  # only for those who wait; shards speak for themselves
            self._said = float("inf")
            report.warn(f"cannot write {self.folder / 'progress.json'}: {error.strerror}")

    # -- begin, or go on

    def begin(self, source: Source) -> None:
        """Decide the division, make sure of room, and write the first line."""
        total = source.total_bytes()
        division, found = look(source, self.settings, lambda done, item: self.say(done, total, item))
        self.divider = Divider(division, None)
        self.need_bytes = self._estimate(source, found)
        self._check_room(self.need_bytes)
        self._append({"format": FORMAT, "division": asdict(division), "need_bytes": self.need_bytes})

    def go_on(self) -> bool:
        """Take up a build that was killed; False where there is none (or none that can be trusted)."""
        lines = list(read_lines(self.folder / "progress.jsonl"))
        if not lines or lines[0].get("format") != FORMAT:
            return False
        last = lines[-1]
        self.files = {name: entry for line in lines[1:] for name, entry in line["files"].items()}
        sizes = {name: entry["bytes"] for name, entry in (self.files | last.get("carry", {})).items()}
        if any(not (path := self.folder / n).is_file() or path.stat().st_size != size for n, size in sizes.items()):
            self.files = {}
            return False
        self.divider = Divider(Division(**lines[0]["division"]), last.get("open"))
        self.need_bytes = lines[0]["need_bytes"]
        self.cursor, self.texts, self.empty = last.get("cursor"), last.get("texts", 0), last.get("empty", 0)
        for carry in last.get("carry", {}):
            with np.load(self.folder / carry, allow_pickle=False) as saved:
                for name, stream in self.streams.items():
                    arrays = saved[f"{name}.tokens"], saved[f"{name}.starts"], saved[f"{name}.hashes"]
                    stream.restore(last["streams"][name], arrays)
        self._remove_others({*sizes, "progress.jsonl", "lock"})
        self._check_room(self.need_bytes - sum(sizes.values()))
        return True

    def _remove_others(self, kept: set[str]) -> None:
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def _estimate(self, source: Source, found: Look) -> int:
        """Bytes of the finished cache, from the tokens of a sample; 0 where the source cannot say its size."""
        with report.phase("estimate the size", unit="B") as p:
            sample: list[str] = []
            size = 0
            while size < min(self.tokenizer.batch_bytes, found.text_bytes) and len(sample) < len(found.sample):
                sample.append(found.sample[len(sample)])
                size += len(sample[-1].encode())
            tokens = len(self.tokenizer.encode_batch(sample).ids) * found.text_bytes / max(1, size)
            p.tick(size)
        need = tokens * np.dtype(self.dtype).itemsize + 16 * found.documents
        if not found.ended:
            total, seen = source.total_bytes(), source.position().bytes_done
            need = need * total / seen if total and seen else 0
        return int(need * 1.05) + 4096

    def _check_room(self, need: int) -> None:
        if need > (have := free_bytes(self.folder)):
            raise CannotWrite(
                f"not enough room for the token cache in {self.folder}",
                f"it needs about {human_bytes(need)}; {human_bytes(have)} are free",
                "free some space, or choose another place with --runs-dir",
            )

    # -- work

    def run(self, source: Source) -> None:
        """Encode every text from the cursor on, in batches, and store what fills a shard."""
        total = source.total_bytes()
        with report.phase("tokenise", total=total, unit="B") as p:

            def show(bytes_done: int, item: str) -> None:
                p.set(bytes_done, item)
                self.say(bytes_done, total, item)

            pieces: list[Piece] = []
            size = texts = 0
            for text in watched(source, self.cursor, show):
                more = list(self.divider.pieces(text))
                pieces += more
                self.empty += not more
                texts, size = texts + 1, size + len(text)
                if size >= self.tokenizer.batch_bytes or self._is_due():
                    self._store(pieces, texts, source.position().cursor)
                    pieces, size, texts = [], 0, 0
            self._store(pieces, texts, source.position().cursor)
            p.set(source.position().bytes_done)

    def _store(self, pieces: list[Piece], texts: int, cursor: Cursor) -> None:
        self._encode(pieces)
        self.cursor, self.texts = cursor, self.texts + texts
        full = [stream for stream in self.streams.values() if stream.full()]
        for stream in full:
            while stream.full():
                self._write_shard(stream)
        if full or self._is_due():
            self._commit()

    def _is_due(self) -> bool:
        return time.monotonic() - self._committed > COMMIT_S

    def _encode(self, pieces: list[Piece]) -> None:
        """Ids of all pieces in one array, an end-of-text after each that ends; then each side takes its own."""
        encoded = self.tokenizer.encode_batch([piece.text for piece in pieces])
        ends = np.array([piece.ends for piece in pieces], bool)
        tokens = np.insert(encoded.ids, encoded.offsets[1:][ends], self.tokenizer.end_of_text)
        lengths = np.diff(encoded.offsets) + ends
        for name, stream in self.streams.items():
            mine = np.array([piece.side == name for piece in pieces], bool)
            of_mine = tokens if mine.all() else tokens[np.repeat(mine, lengths)]
            own = [piece for piece in pieces if piece.side == name]
            stream.add(of_mine, lengths[mine], own, self.tokenizer.end_of_text)

    def _write_shard(self, stream: _Stream) -> None:
        for name, data in stream.cut_shard().items():
            self.new_files[name] = self._write(name, data)

    def _commit(self) -> None:
        """Shards are on disk; now what is left over, then the line that makes it count."""
        arrays = {}
        for name, stream in self.streams.items():
            for kind, array in zip(("tokens", "starts", "hashes"), stream.arrays(), strict=True):
                arrays[f"{name}.{kind}"] = array
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **arrays)
        carry = f"carry-{self.texts}.npz"
        before = [path for path in self.folder.glob("carry-*.npz") if path.name != carry]
        self._append(
            {
                "cursor": self.cursor,
                "texts": self.texts,
                "empty": self.empty,
                "open": self.divider.open_side,
                "files": self.new_files,
                "carry": {carry: self._write(carry, file.getvalue())},
                "streams": {name: stream.counts() for name, stream in self.streams.items()},
            }
        )
        self.files |= self.new_files
        self.new_files = {}
        self._committed = time.monotonic()
        for path in before:
            path.unlink()

    # -- end

    def finish(self, parts: dict[str, Any]) -> dict[str, Any]:
        """The last shards, the check, the manifest; then the traces of building go."""
        for stream in self.streams.values():
            if stream.tokens > stream.shards * self.settings.shard_tokens:
                self._write_shard(stream)
        self.files |= self.new_files
        self._check_overlap()
        manifest = {
            "format": FORMAT,
            "parts": parts,
            "vocab_size": self.tokenizer.vocab_size,
            "end_of_text": self.tokenizer.end_of_text,
            "dtype": self.dtype,
            "shard_tokens": self.settings.shard_tokens,
            "divided_by": self.divider.division.by,
            "empty_documents": self.empty,
            "splits": {name: stream.counts() for name, stream in self.streams.items()},
            "files": dict(sorted(self.files.items())),
        }
        self._write("manifest.json", json.dumps(manifest, indent=1).encode() + b"\n")
        self._remove_others({*self.files, "manifest.json", "lock"})
        return manifest

    def _check_overlap(self) -> None:
        """No text may be both trained on and validated on."""
        names = sorted(name for name in self.files if name.endswith(".hash.npy"))
        with report.phase("check that the sides are apart", total=len(names), unit="files") as p:
            held = [np.load(self.folder / name) for name in names if name.startswith("val")]
            val = np.unique(np.concatenate([np.zeros(0, "<u8"), *held]))
            for name in names:
                p.tick(1, name)
                if name.startswith("train") and np.isin(np.load(self.folder / name), val).any():
                    raise BadData(
                        f"a validation text is also in {name}", "the sides overlap", "build it again, and tell us"
                    )


def _full(folder: Path, size: int, error: OSError) -> CannotWrite:
    if error.errno != errno.ENOSPC:
        return cannot_write(folder, error)
    return CannotWrite(
        f"the disk is full: {folder}",
        f"{human_bytes(size)} more are needed, {human_bytes(free_bytes(folder))} are free",
        "free some space and start again: the finished shards are kept, and the build goes on after them",
    )


def build(folder: Path, source: Source, tokenizer: Tokenizer, settings: Settings, parts: dict[str, Any]) -> None:
    """Make the cache in `folder`, or go on making it."""
    builder = Builder(folder, tokenizer, settings)
    if builder.go_on():
        report.note(f"the token cache goes on after {builder.texts:,} texts that a stopped build had stored")
    else:
        builder._remove_others({"lock"})
        builder.begin(source)
    started = time.monotonic()
    builder.run(source)
    manifest = builder.finish(parts)
    _sum_up(manifest, time.monotonic() - started)


def _sum_up(manifest: dict[str, Any], seconds: float) -> None:
    train, val = (manifest["splits"][name] for name in SIDES)
    empty = manifest["empty_documents"]
    report.note(
        f"token cache: {train['tokens']:,} tokens to train on, {val['tokens']:,} to validate on, "
        f"from {human_bytes(train['text_bytes'] + val['text_bytes'])} of text, divided by {manifest['divided_by']}"
        + (f"; {empty:,} empty documents passed over" if empty else ""),
        seconds=round(seconds, 3),
    )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished cache."""
    manifest = read_json(folder / "manifest.json")
    usable = isinstance(manifest, dict) and manifest.get("format") == FORMAT and isinstance(manifest.get("files"), dict)
    return manifest if usable else None
