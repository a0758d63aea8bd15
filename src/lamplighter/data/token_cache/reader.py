"""The token cache: found by its fingerprint, built once (by whoever is first), read by mapped memory.

In:  a folder for caches, a source, a tokenizer, settings.
Out: Tokens with a train and a val CachedStream: documents of ids, one after the other, in shards on disk (see builder.py).

A cache is named after three fingerprints: tokenizer, settings, sources (cache_location.py).
"""

from __future__ import annotations

import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lamplighter import report
from lamplighter.data import split as division
from lamplighter.data.cache_location import CacheKind, CacheLocation, Mode, Parts, claimed, find_fault, verify_hashes
from lamplighter.data.sources import Source
from lamplighter.data.split import CacheSettings
from lamplighter.data.token_cache import builder
from lamplighter.data.token_cache.encoder import Ids
from lamplighter.data.token_cache.units import bad_id
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import BadData, InputMissing
from lamplighter.procs.pool import usable_cores
from lamplighter.readers import ranges
from lamplighter.readers.records import digest
from lamplighter.rundir import read_record

__all__ = ["CacheLocation", "CacheSettings", "CachedStream", "Tokens", "obtain", "open_tokens"]

KIND = CacheKind(
    name="token cache",
    prefix="",
    manifest="manifest.json",
    format=builder.FORMAT,
    first="the first for this tokenizer, these settings and these sources",
)
MANY_ROWS, MANY_TOKENS = 32, 256  # from so many rows of fewer tokens a shard on, they are gathered together


# ---------------------------------------------------------------- which cache, and is it there


def obtain(
    cache_root: Path,
    source: Source,
    tokenizer: Tokenizer,
    settings: CacheSettings,
    mode: Mode = "auto",
    workers: int | None = None,
) -> tuple[Tokens, bool]:
    """The open cache, and whether it was built just now; one that was there before is verified byte by byte."""
    cache, workers = locate_token_cache(cache_root, source, tokenizer, settings), workers or usable_cores()
    with claimed(cache, mode) as is_new:
        if is_new:
            builder.build(cache.folder, source, tokenizer, settings=settings, parts=cache.parts, workers=workers)
    return open_tokens(cache.folder, verify=not is_new), is_new


def locate_token_cache(
    cache_root: Path, source: Source, tokenizer: Tokenizer, settings: CacheSettings
) -> CacheLocation:
    """Where it is or would be; nothing is touched."""
    rules = [builder.FORMAT, division.LOOK_DOCUMENTS, division.LOOK_BYTES, division.BLOCK_BYTES, ranges.PART_BYTES]
    parts: Parts = {
        "tokenizer": {"fingerprint": tokenizer.fingerprint(), "content": str(tokenizer).split(", by ")[0]},
        "settings": {"fingerprint": digest([asdict(settings), rules]), "content": asdict(settings)},
        "sources": {"fingerprint": source.fingerprint(), "content": str(source)},
    }
    return CacheLocation(cache_root, KIND, parts)


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
        if int(self.bounds[-1]) != self.tokens:
            raise ValueError(f"{self.tokens:,} tokens are listed, and {int(self.bounds[-1]):,} are there")

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
    if (fault := find_fault(folder, KIND)) is not None:
        kind = BadData if (folder / KIND.manifest).exists() else InputMissing
        raise kind(f"cannot open the token cache {folder}", fault, "build it again with --data.cache rebuild")
    manifest = read_record(folder / KIND.manifest)
    if verify:
        verify_hashes(folder, KIND)
    try:
        _allow_open_files(sum(len(split["shards"]) for split in manifest["splits"].values()))
        train, val = (CachedStream(folder, side, manifest) for side in ("train", "val"))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what, why = f"cannot open the token cache {folder}", f"its manifest is damaged: {type(error).__name__}: {error}"
        raise BadData(what, why, "build it again with --data.cache rebuild") from error
    return Tokens(folder, manifest, train, val)


def _allow_open_files(count: int) -> None:
    """A mapped shard holds a descriptor; the usual limit of 1,024 is raised where there are many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and (wanted := count + 512) > soft:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
