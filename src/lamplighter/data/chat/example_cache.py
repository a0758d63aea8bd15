"""Instruction data on disk: rows become examples (ids, and which of them are learned), built once, read by mapped memory.

In:  files of instruction rows, a tokenizer, a chat template, settings.
Out: Examples with a train and a val side. Equal examples are kept once, so they are never on both sides.

The cache is `<cache>/examples-<fingerprint>/` (cache_location.py): examples.bin holds every token as 32 bits, the highest
one set where the token is learned; index.npy one row of numbers per example; examples.json says what it was made of. It
is written last: a killed build leaves nothing that could be taken for a cache, and is done anew.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from lamplighter import report
from lamplighter.data.cache_location import CacheKind, CacheLocation, Mode, Parts, claimed, find_fault, verify_hashes
from lamplighter.data.chat.rendering import Refused, RowRefused
from lamplighter.data.chat.rows import Message, RowSource, SetAside
from lamplighter.data.chat.template import ChatTemplate, EncodedExample
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import BadConfig, BadData
from lamplighter.procs.pool import each, usable_cores
from lamplighter.readers.records import digest
from lamplighter.rundir import cannot_write, hash_file, human_bytes, read_record, sealed, write_atomic, write_json

KIND = CacheKind(
    name="examples", prefix="examples-", manifest="examples.json", format=1, first="the first for these rows"
)
LEARNED = np.uint32(1 << 31)
FIELDS = ("begin", "length", "first_answer", "last_answer", "learned", "text_bytes", "answer_bytes", "is_val")
MANY_BYTES = 1 << 23  # of rows: from here on other processes help
_CHUNK = 256  # rows that are rendered and encoded together
_Int64s = np.ndarray[Any, np.dtype[np.int64]]
_Uint32s = np.ndarray[Any, np.dtype[np.uint32]]


# ---------------------------------------------------------------- which cache, and is it there


def ensure(
    cache_root: Path,
    source: RowSource,
    template: ChatTemplate,
    val_fraction: float,
    mode: Mode = "auto",
    workers: int | None = None,
) -> Path:
    """The folder of the finished cache: reused, built or rebuilt, and said which and why."""
    cache = locate_example_cache(cache_root, source, template, val_fraction)
    with claimed(cache, mode) as to_build:
        if to_build:
            try:
                _build(cache, source, template, val_fraction=val_fraction, workers=workers or usable_cores())
            except OSError as error:
                raise cannot_write(cache.folder, error) from error
    return cache.folder


def locate_example_cache(
    cache_root: Path, source: RowSource, template: ChatTemplate, val_fraction: float
) -> CacheLocation:
    """Where it is or would be; nothing is touched."""
    settings, tokenizer = {"val_fraction": val_fraction}, template.tokenizer
    parts: Parts = {
        "tokenizer": {"fingerprint": tokenizer.fingerprint(), "content": str(tokenizer).split(", by ")[0]},
        "template": {"fingerprint": template.fingerprint(), "content": template.name},
        "settings": {"fingerprint": digest([settings, KIND.format]), "content": settings},
        "sources": {"fingerprint": source.fingerprint(), "content": str(source)},
    }
    return CacheLocation(cache_root, KIND, parts)


# ---------------------------------------------------------------- building


_Conversation = tuple[list[Message], str, int]
"""Messages, the place where they stand, and how many of the first ones are not learned from (the prompt of a pair)."""


class _Builder:
    """Conversations in, examples on disk out; each of several equal ones once."""

    def __init__(self, folder: Path, source: RowSource, template: ChatTemplate) -> None:
        self.folder, self.source, self.template = folder, source, template
        self.aside = SetAside(source.policy)
        self.index: array[int] = array("q")  # FIELDS but the last, one example after the other
        self.hashes: array[int] = array("Q")
        self.encoding: deque[tuple[int, int]] = (
            deque()
        )  # of each example on its way: its hash, how many conversations it has
        self.seen: set[int] = set()
        self.total_bytes = source.total_bytes()
        self.tokens = self.rows = self.ends_taken = self.borders_kept = 0

    def make(self, workers: int) -> None:
        """Every example into examples.bin.writing, in the order of the rows, whatever the number of workers."""
        _here[:] = [self.template]
        start, start_with = (_begin, _baggage(self.template)) if workers > 1 else (None, ())
        with (
            report.phase("make examples", total=self.total_bytes, unit="B") as p,
            open(self.folder / "examples.bin.writing", "wb") as out,
        ):
            work = each(
                _encode, self._chunks(p), workers, name=lambda chunk: chunk[0][1], start=start, start_with=start_with
            )
            for chunk, encoded in work:
                self._store(chunk, encoded, out)
                progress = {"bytes": self.source.position().bytes_done, "texts": self.rows, "item": chunk[-1][1]}
                write_json(self.folder / "progress.json", {**progress, "total_bytes": self.total_bytes}, durable=False)
            p.set(self.total_bytes or self.source.position().bytes_done)

    def _examples(self) -> Iterator[list[_Conversation]]:
        """What stays together: a conversation, or the two of a pair."""
        if not self.source.is_pairs:
            for messages, place in self.source.conversations(self.aside, self.template.between):
                yield [(messages, place, 0)]
            return
        for pair, place in self.source.pairs(self.aside, self.template.between):
            yield [(pair.chosen, place, pair.shared), (pair.rejected, place, pair.shared)]

    def _chunks(self, p: report.Phase) -> Iterator[list[_Conversation]]:
        stream = self._examples()
        while True:
            here = self.source.position()
            p.set(here.bytes_done, here.item)
            chunk = list(islice(stream, _CHUNK))
            if not chunk:
                return
            p.set(self.source.position().bytes_done, f"{self.rows + len(chunk):,} rows, at {chunk[-1][-1][1]}")
            if fresh := [part for example in chunk for part in self._fresh(example)]:
                yield fresh

    def _fresh(self, example: list[_Conversation]) -> list[_Conversation]:
        """An example without its written end marks; nothing where it was there before, or holds no answer."""
        cleaned: list[_Conversation] = []
        for messages, place, skipped in example:
            bare = [without_end(message, self.template) for message in messages]
            self.ends_taken += any(a is not b for a, b in zip(bare, messages, strict=True))
            cleaned.append((bare, place, skipped))
        place = cleaned[0][1]
        mark = hash_of([message for messages, _, _ in cleaned for message in messages])
        if not all(message["content"].strip() for messages, _, _ in cleaned for message in messages):
            self.aside.add(place, "the answer is empty")
        elif len(cleaned) > 1 and cleaned[0][0] == cleaned[1][0]:
            self.aside.add(place, "chosen and rejected are the same")
        elif mark in self.seen:
            self.aside.add(place, "the same as an earlier one")
        else:
            self.seen.add(mark)
            self.encoding.append((mark, len(cleaned)))
            return cleaned
        return []

    def _store(self, chunk: list[_Conversation], encoded: list[EncodedExample | Refused], out: IO[bytes]) -> None:
        both = zip(chunk, encoded, strict=True)
        while parts := list(islice(both, self.encoding[0][1] if self.encoding else 1)):
            mark, _ = self.encoding.popleft()
            refused, place = next(((made, one[1]) for one, made in parts if isinstance(made, Refused)), (None, ""))
            if refused is None:
                self.rows += 1
                self.hashes.append(mark)
                for one, made in parts:
                    assert isinstance(made, EncodedExample)
                    self._store_one(one, made, out)
            elif isinstance(refused, RowRefused):
                self.aside.add(place, str(refused))
            else:
                raise BadConfig(f"{place} cannot be learned with this template", str(refused), "--data.template chatml")

    def _store_one(self, one: _Conversation, made: EncodedExample, out: IO[bytes]) -> None:
        messages, _, skipped = one
        if before := sum(message["role"] == "assistant" for message in messages[:skipped]):
            made.learned[: made.begins[before]] = False
        stored = made.ids | np.where(made.learned, LEARNED, np.uint32(0))
        out.write(stored.astype("<u4").tobytes())
        sizes = [(len(message["content"].encode()), message["role"] == "assistant") for message in messages]
        first, last = np.flatnonzero(made.learned)[[0, -1]].tolist()
        text, answers = sum(n for n, _ in sizes), sum(n for n, is_answer in sizes if is_answer)
        self.index.extend((self.tokens, len(stored), first, last, int(made.learned.sum()), text, answers))
        self.tokens += len(stored)
        self.borders_kept += made.moved


_here: list[ChatTemplate] = []  # of a worker process (or of this one): made once, used for every chunk


def _baggage(template: ChatTemplate) -> tuple[Any, ...]:
    """What a worker needs to make the same template."""
    tokenizer = template.tokenizer
    return template.name, template.text, tokenizer.content, tokenizer.end_name, tokenizer.files


def _begin(name: str, text: str, content: dict[str, Any], end_name: str, files: dict[str, bytes]) -> None:
    _here[:] = [ChatTemplate(name, text, Tokenizer(content, end_name, files))]


def _encode(chunk: list[_Conversation]) -> list[EncodedExample | Refused]:
    return _here[0].encode([messages for messages, _, _ in chunk])


def _build(cache: CacheLocation, source: RowSource, template: ChatTemplate, val_fraction: float, workers: int) -> None:
    began, folder = time.monotonic(), cache.folder
    builder = _Builder(folder, source, template)
    builder.make(1 if (builder.total_bytes or 0) <= MANY_BYTES else workers)
    aside = builder.aside
    if not builder.rows:
        raise BadData(f"no example in {source}", _reasons(aside) or "it has no rows", "check data.paths")
    sides = np.repeat(sides_of(builder.hashes, val_fraction, source), 2 if source.is_pairs else 1)
    index = np.column_stack([np.array(builder.index, np.int64).reshape(len(sides), -1), sides])
    stored = io.BytesIO()
    np.save(stored, index)
    write_atomic(folder / "index.npy", stored.getvalue())
    (folder / "examples.bin.writing").replace(folder / "examples.bin")
    files = {}
    with report.phase("hash the examples", total=builder.tokens * 4, unit="B") as p:
        for name in ("examples.bin", "index.npy"):
            files[name] = {"bytes": (folder / name).stat().st_size, "sha256": hash_file(folder / name, p.tick)}
    manifest = {
        "format": KIND.format,
        "parts": cache.parts,
        "files": files,
        "examples": len(builder.hashes),
        "pairs": source.is_pairs,
        "rows": builder.rows + aside.counts.total(),
        "set_aside": [[reason, count, aside.first[reason]] for reason, count in aside.counts.most_common()],
        "ends_taken": builder.ends_taken,
        "borders_kept": builder.borders_kept,
        "seconds": round(time.monotonic() - began, 3),
    }
    write_json(folder / KIND.manifest, sealed(manifest))
    (folder / "progress.json").unlink(missing_ok=True)


def without_end(message: Message, template: ChatTemplate) -> Message:
    if message["role"] != "assistant":
        return message
    text = template.without_end(message["content"])
    return message if text == message["content"] else {**message, "content": text}


def hash_of(messages: list[Message]) -> int:
    data = json.dumps([[m["role"], m["content"].strip()] for m in messages], ensure_ascii=False).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def sides_of(hashes: array[int], val_fraction: float, source: RowSource) -> _Int64s:
    """1 for validation, by the hash alone; neither side may come out empty."""
    if not val_fraction:
        return np.zeros(len(hashes), np.int64)
    if len(hashes) < 2:
        why = f"{source} has one example of its own"
        raise BadData("too few examples to hold some back for validation", why, "--data.val_fraction 0")
    marks, below = np.array(hashes, np.uint64), np.uint64(val_fraction * 2**64)
    is_val: _Int64s = ((marks != marks.max()) & ((marks < below) | (marks == marks.min()))).astype(np.int64)
    return is_val


def _reasons(aside: SetAside) -> str:
    return "; ".join(
        f"{n:,} because {reason} (first: {aside.first[reason]})" for reason, n in aside.counts.most_common(5)
    )


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class Side:
    """The examples that are trained on, or those held back; one number per example in each array."""

    name: str
    tokens: _Uint32s  # of all examples, mapped; the highest bit says: learned
    begin: _Int64s
    length: _Int64s
    first_answer: _Int64s
    last_answer: _Int64s
    learned: _Int64s
    text_bytes: _Int64s
    answer_bytes: _Int64s

    @property
    def examples(self) -> int:
        return len(self.begin)

    def ids(self, number: int) -> _Int64s:
        begin = int(self.begin[number])
        return (self.tokens[begin : begin + int(self.length[number])] & ~LEARNED).astype(np.int64)


@dataclass(frozen=True)
class Examples:
    """An open cache of examples."""

    folder: Path
    manifest: dict[str, Any]
    train: Side
    val: Side

    @property
    def is_pairs(self) -> bool:
        """Then examples 2n and 2n + 1 of a side are the chosen and the rejected answer of its pair n."""
        return self.manifest.get("pairs") is True

    def check_ids(self, vocab_size: int) -> None:
        """Read every id once: a model of `vocab_size` must know it."""
        tokens = self.train.tokens
        with report.phase("check token ids", total=len(tokens), unit="tokens") as p:
            for begin in range(0, len(tokens), 1 << 22):
                block = tokens[begin : begin + (1 << 22)] & ~LEARNED
                if len(block) and int(block.max()) >= vocab_size:
                    what = f"{self.folder} holds the id {int(block.max())}"
                    raise BadData(what, f"the model knows ids below {vocab_size}", "use the model's own tokenizer")
                p.tick(len(block))

    def check_ends(self, stop_id: int, stop: str) -> None:
        """Every example must hold its end mark as something to learn: a model that never sees it never stops."""
        ends = int((self.train.tokens == (np.uint32(stop_id) | LEARNED)).sum())
        if ends < self.train.examples + self.val.examples:
            why = f"{ends:,} of {self.train.examples + self.val.examples:,} examples hold {stop} as a learned token"
            raise BadData("answers do not end with the token that generation stops at", why, "--data.cache rebuild",
                          cause="eos_not_trained")  # fmt: skip

    def tell(self) -> None:
        """What was made of the rows, and what was not."""
        found, each = self.manifest, 2 if self.is_pairs else 1
        noun, of = ("pairs", "rows") if self.is_pairs else ("examples", "conversations")
        report.note(
            f"{found['examples']:,} {noun} of {found['rows']:,} {of}: {self.train.examples // each:,} to train on,"
            f" {self.val.examples // each:,} to validate on (by hash: equal ones are kept once)"
        )
        for reason, count, first in found["set_aside"]:
            report.warn(
                f"{count:,} row{'s' * (count > 1)} set aside, as not to be learned from: {reason} (the first: {first})",
                path=first,
                count=count,
            )
        if found["ends_taken"]:
            report.note(f"{found['ends_taken']:,} answers end in an end mark that is written out: it became the token")
        if found["borders_kept"]:
            report.note(
                f"{found['borders_kept']:,} examples: the tokenizer would join prompt and answer into one token; kept apart,"
                " as in generation"
            )


def open_examples(folder: Path) -> Examples:
    """Map a finished cache; every byte is checked against its hash."""
    if (fault := find_fault(folder, KIND)) is not None:
        raise BadData(f"cannot open the examples in {folder}", fault, "--data.cache rebuild")
    verify_hashes(folder, KIND)
    index = np.load(folder / "index.npy")
    tokens = np.memmap(folder / "examples.bin", "<u4", mode="r").view(np.ndarray)
    columns = dict(zip(FIELDS, index.T.copy(), strict=True))
    is_val = columns.pop("is_val") == 1
    sides = [
        Side(name, tokens, **{field: column[rows_] for field, column in columns.items()})
        for name, rows_ in (("train", ~is_val), ("val", is_val))
    ]
    report.note(f"examples: {len(tokens):,} tokens, {human_bytes(tokens.nbytes)} on disk")
    return Examples(folder, read_record(folder / KIND.manifest), sides[0], sides[1])
