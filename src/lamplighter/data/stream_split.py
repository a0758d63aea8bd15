"""The validation side of a stream: from its first documents, decided once, kept in the run's folder.

In:  a source, a tokenizer, what share to hold back.
Out: the Split (later documents of that side are never trained on), and a HeldOutTokens of tokens to validate on.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lamplighter import report
from lamplighter.data.sources import Part, Source, watched
from lamplighter.data.split import LOOK_DOCUMENTS, CacheSettings, Split, Splitter, begin_survey, decide
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.readers.ranges import TextBlock as Texts
from lamplighter.rundir import read_json, write_atomic, write_json

Ids = np.ndarray[Any, np.dtype[Any]]
NAME = "val"


@dataclass(frozen=True)
class HeldOutTokens:
    """Some documents as one stream of ids in memory; read like a Split of the token cache."""

    ids: Ids
    documents: int
    text_bytes: int
    name: str = NAME

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, stop: int) -> Ids:
        return self.ids[start:stop]

    def document_starts(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Where each document begins: after each end-of-text but the last."""
        return np.flatnonzero(self.ids == self.ids[0])[:-1].astype(np.uint64) + np.uint64(1)

    def gather(self, starts: np.ndarray[Any, np.dtype[np.int64]], length: int) -> Ids:
        """int64 [B, length]: the stretches that begin at `starts`."""
        if not len(starts):
            return np.zeros((0, length), np.int64)
        out: Ids = np.lib.stride_tricks.sliding_window_view(self.ids, length)[starts].astype(np.int64)
        return out


def hold_back(
    folder: Path, source: Source, tokenizer: Tokenizer, fraction: float, sample_bytes: int
) -> tuple[Split, HeldOutTokens]:
    """What an earlier start of this run decided; else from the first documents, and kept."""
    if not fraction:
        return Split("documents", 0, 0), HeldOutTokens(np.zeros(0, np.uint32), 0, 0)
    key = hashlib.sha256(f"{source} {tokenizer.fingerprint()} {fraction}".encode()).hexdigest()
    if (known := _load(folder, key)) is not None:
        return known
    texts, division = _look(source, CacheSettings(fraction), sample_bytes)
    held = _take(division, texts, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    data = io.BytesIO()
    np.save(data, held.ids, allow_pickle=False)
    write_atomic(folder / f"{NAME}.npy", data.getvalue())
    record = {
        "key": key,
        "sha256": hashlib.sha256(data.getvalue()).hexdigest(),
        "division": asdict(division),
        "documents": held.documents,
        "text_bytes": held.text_bytes,
    }
    write_json(folder / f"{NAME}.json", record)
    return division, held


def _load(folder: Path, key: str) -> tuple[Split, HeldOutTokens] | None:
    record = read_json(folder / f"{NAME}.json")
    path = folder / f"{NAME}.npy"
    if not isinstance(record, dict) or record.get("key") != key or not path.is_file():
        return None
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        report.warn(f"{path} is damaged: the validation text is taken from the source again", path=str(path))
        return None
    ids = np.load(io.BytesIO(data), allow_pickle=False)
    return Split(**record["division"]), HeldOutTokens(ids, record["documents"], record["text_bytes"])


def _look(source: Source, settings: CacheSettings, sample_bytes: int) -> tuple[list[Texts], Split]:
    """The first texts, and how they and all others are divided."""
    seen, texts, opened = begin_survey(settings), list[Texts](), False
    with report.phase("look at the documents", unit="documents") as p:
        for text in watched(source, lambda _, item: p.set(seen.documents, item)):
            texts.append(Texts([text.encode()], opened, isinstance(text, Part)))
            opened = texts[-1].open
            seen.add(texts[-1])
            if seen.text_bytes >= sample_bytes and seen.documents >= LOOK_DOCUMENTS:
                break
    return texts, decide(seen, settings, source)


def _take(division: Split, texts: list[Texts], tokenizer: Tokenizer) -> HeldOutTokens:
    """The validation pieces of what was looked at, as one stream: end-of-text first, and after each document."""
    divider, chosen = Splitter(division), list[bytes]()
    begins, ends = 0, list[bool]()
    for pieces in map(divider.pieces, texts):
        chosen += [text for text, val in zip(pieces.texts, pieces.val.tolist(), strict=True) if val]
        begins += int((pieces.begins & pieces.val).sum())
        ends += pieces.ends[pieces.val].tolist()
    encoded = tokenizer.encode_batch([text.decode() for text in chosen])
    ids = np.insert(encoded.ids, encoded.offsets[1:][np.array(ends, bool)], tokenizer.end_of_text)
    ids = np.concatenate([np.array([tokenizer.end_of_text], ids.dtype), ids]) if chosen else ids[:0]
    return HeldOutTokens(ids, begins, sum(map(len, chosen)))
