"""Training while documents arrive: chunks of tokens in the order of the source, shuffled inside, at an exact place.

In:  a source, a tokenizer, what share to hold back; the State that was saved with a step, or none.
Out: Batch by Batch; the State after any step; the end of the data as an epoch or a stop, never as invented tokens. What is
     held back is decided by the first documents, once, and kept in the run's folder; later ones of that side are never
     trained on.

The stream of an epoch is one end-of-text, then every document with one end-of-text after it, as in the token cache, but
in the order of the source. A chunk is the next `chunk_tokens` of it or a little more, up to the end of a text; windows
overlap by one token, and what is too short for a window begins the next chunk. The end of the source ends its chunk: the
last window is filled up (targets -100). Window order inside a chunk is a function of (seed, chunk). The first chunk is given
out in parts, each as large as all before it, so that the first step does not wait for all of it.

A State is where a chunk begins: source cursor, left-over tokens, counts. From it everything after is the same again, so
a killed run reads at most the chunk that it was in once more, and proves by a digest that it is the same text.
"""

from __future__ import annotations

import hashlib
import io
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lamplighter import report
from lamplighter.data.batch_source import DataFacts, held_out_windows, unigram_loss
from lamplighter.data.batches import NO_TARGET, Batch, Prefetcher, count_targets, permute, validation_batches
from lamplighter.data.sources import Cursor, Part, Position, Source
from lamplighter.data.split import (
    LOOK_DOCUMENTS,
    CacheSettings,
    Pieces,
    Split,
    Splitter,
    begin_survey,
    decide,
    survey_texts,
)
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import BadData
from lamplighter.readers.ranges import TextBlock
from lamplighter.rundir import is_whole, read_json, sealed, write_atomic, write_json

Ids = np.ndarray[Any, np.dtype[Any]]
_LOOK_EVERY_S = 0.2
_FIRST_PART = 1 << 16
_CHUNKS_AHEAD = 1
FIRST_BYTES, BATCH_BYTES = 1 << 12, 1 << 18  # of text that is encoded at once: little at first, so that it is seen
_BATCH_S = 0.5  # a slow source: what has come is encoded after this time


@dataclass(frozen=True)
class StreamSettings:
    """What, besides source and tokenizer, decides every batch."""

    seed: int
    batch_size: int
    seq_len: int
    chunk_tokens: int
    max_chunks: int | None = None
    repeat: bool = True

    @property
    def first_part(self) -> int:
        """Tokens of the first part of the first chunk: some steps, and enough to be worth a shuffle."""
        return max(_FIRST_PART, 4 * self.batch_size * self.seq_len)


@dataclass(frozen=True)
class State:
    """Where a chunk begins. As JSON it is saved with a step."""

    chunk: int = 0
    epoch: int = 0
    sample: int = 0  # windows before this chunk, over all epochs
    document: int = 0  # documents before it, in this epoch
    cursor: Cursor | None = None
    open_val: bool | None = None  # of a document that began before: whether it is held back
    carry: tuple[int, ...] = ()  # tokens that were too few for a window
    share: float = 0.0  # of the source's bytes that are behind it, where that is known
    ended: bool = False  # nothing comes after it
    digest: str = ""  # of the chunk's tokens, once it was filled
    in_parts: bool = True  # the first chunk of a run is, unless an older version has begun it
    given: int = 0  # tokens of this chunk in the parts before this one

    def dump(self) -> dict[str, Any]:
        """As JSON; without the parts where there are none, as older versions wrote it."""
        return {
            name: value for name, value in asdict(self).items() if self.in_parts or name not in ("in_parts", "given")
        }


def load_state(saved: dict[str, Any] | None) -> State:
    """The State that `dump` wrote; the beginning where there is none."""
    return State(**{"in_parts": False, **saved, "carry": tuple(saved["carry"])}) if saved else State()


@dataclass(frozen=True)
class Chunk:
    """Tokens of some documents, cut into windows; of the first chunk, a part of them."""

    begin: State
    end: State  # where the next one begins
    tokens: Ids  # int64, windows * seq_len + 1 of them; the last window of an epoch is filled up with NO_TARGET
    windows: int

    def rows(self, numbers: Ids, seq_len: int, pad_id: int) -> tuple[Ids, Ids]:
        """Inputs and targets of the windows."""
        ids = np.lib.stride_tricks.sliding_window_view(self.tokens, seq_len + 1)[numbers * seq_len]
        inputs, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
        inputs[inputs == NO_TARGET] = pad_id
        return inputs, targets


# ---------------------------------------------------------------- filling


@dataclass
class Filling:
    """How far the chunk that is being filled is: written by the filler, read by whoever waits."""

    chunk: int = 0
    tokens: int = 0
    wanted: int = 0
    documents: int = 0
    last: float = 0.0  # monotonic time of the latest text
    by: str = ""  # in words, where another process reads it

    def words(self, item: str) -> str:
        return self.by or f"{self.documents:,} samples, at {item}"


@dataclass(frozen=True)
class Piece:
    """The tokens of a stretch of text that goes to one side."""

    val: bool
    begins: bool
    ids: Ids


class Stopped(Exception):
    """The filler was told to stop; nobody waits for it."""


class Filler:
    """Reads the source from a State on and cuts it into chunks; has no thread of its own."""

    def __init__(self, source: Source, tokenizer: Tokenizer, division: Split, settings: StreamSettings) -> None:
        self.source, self.tokenizer, self.division, self.settings = source, tokenizer, division, settings
        self.now = Filling()
        self.stop = threading.Event()

    def chunks(self, state: State) -> Iterator[Chunk]:
        """Every chunk after the State, epoch after epoch."""
        while not state.ended:
            some = state.cursor is not None
            for chunk in self._epoch(state):
                some = some or chunk.windows > 0
                state = chunk.end
                yield chunk
            if not some:
                raise BadData(f"no text to train on in {self.source}", "all of it is held back", "add text")

    def close(self) -> None:
        """Stop at the next text."""
        self.stop.set()

    def _epoch(self, state: State) -> Iterator[Chunk]:
        """The chunks from here to the end of the source (or the last one that was asked for)."""
        end = self.tokenizer.end_of_text
        divider = Splitter(self.division, state.open_val)
        held = [np.array(state.carry or (end,), np.uint32)]
        begin, size, documents = state, len(held[0]), state.document
        self._show(begin, size, documents)
        for pieces, here in self._texts(state, divider):
            for piece in pieces:
                documents += piece.begins
                if not piece.val:
                    held.append(piece.ids)
                    size += len(piece.ids)
            self._show(begin, size, documents)
            if size <= self._wanted(begin):
                continue
            tokens = np.concatenate(held)
            windows = (size - 1) // self.settings.seq_len
            chunk = self._close(begin, tokens, windows, replace(here, document=documents))
            yield chunk
            if chunk.end.ended:
                return
            begin, held, size = chunk.end, [np.array(chunk.end.carry, np.uint32)], len(chunk.end.carry)
            self._show(begin, size, documents)
        tokens = np.concatenate(held)
        windows = -(-(len(tokens) - 1) // self.settings.seq_len)
        new = State(epoch=begin.epoch + 1, ended=not self.settings.repeat)
        yield self._close(begin, tokens, windows, new)

    def _wanted(self, begin: State) -> int:
        """Tokens that the chunk, or the part of it, which begins here is closed at."""
        left = self.settings.chunk_tokens - begin.given
        return min(left, max(self.settings.first_part, begin.given)) if begin.in_parts else left

    def _close(self, begin: State, tokens: Ids, windows: int, end: State) -> Chunk:
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
        if begin.digest and begin.digest != digest:
            raise BadData(
                f"{self.source} is no longer what it was",
                f"chunk {begin.chunk}, from document {begin.document:,} on, has other tokens than before the resume",
                "put the old data back, or begin anew with --resume never",
            )
        same_epoch = end.epoch == begin.epoch
        given = begin.given + windows * self.settings.seq_len
        whole = not same_epoch or begin.given + len(tokens) > self.settings.chunk_tokens
        number = begin.chunk + (whole and given > 0)
        last = self.settings.max_chunks is not None and number >= self.settings.max_chunks
        end = replace(
            end,
            chunk=number,
            sample=begin.sample + windows,
            carry=tuple(tokens[windows * self.settings.seq_len :].tolist()) if same_epoch else (),
            ended=end.ended or last,
            in_parts=begin.in_parts and number == begin.chunk,
            given=0 if whole else given,
        )
        padded = np.full(windows * self.settings.seq_len + 1, NO_TARGET, np.int64)
        padded[: len(tokens)] = tokens[: len(padded)]
        return Chunk(replace(begin, digest=digest), end, padded, windows)

    def _texts(self, state: State, divider: Splitter) -> Iterator[tuple[list[Piece], State]]:
        """Each text of the source: its pieces with their tokens, and the place after it."""
        total = self.source.total_bytes()
        waiting: list[tuple[Pieces, State]] = []
        size, limit, since = 0, min(FIRST_BYTES, BATCH_BYTES), time.monotonic()
        fault: Exception | None = None
        texts = self.source.documents(state.cursor)
        while True:
            try:
                text = next(texts, None)
            except Exception as error:  # noqa: BLE001 (raised below, after what came before it)
                text, fault = None, error
            if text is None:
                break
            here = self.source.position()
            share = min(1.0, here.bytes_done / total) if total else 0.0
            going_on = divider.open_val is not None
            pieces = divider.pieces(TextBlock([text.encode()], going_on, isinstance(text, Part)))
            place = State(epoch=state.epoch, cursor=here.cursor, open_val=divider.open_val, share=share)
            waiting.append((pieces, place))
            size += len(text)
            self.now.last = time.monotonic()
            if self.stop.is_set():
                raise Stopped
            if size >= limit or self.now.last - since > _BATCH_S:
                yield from self._encoded(waiting)
                limit = min(BATCH_BYTES, 2 * limit)
                waiting, size, since = [], 0, time.monotonic()
        yield from self._encoded(waiting)
        if fault is not None:
            raise fault

    def _encoded(self, waiting: list[tuple[Pieces, State]]) -> Iterator[tuple[list[Piece], State]]:
        found = self.tokenizer.encode_batch([text.decode() for pieces, _ in waiting for text in pieces.texts])
        end = np.array([self.tokenizer.end_of_text], np.uint32)
        ids = (found.ids[a:b] for a, b in zip(found.offsets[:-1], found.offsets[1:], strict=True))
        for pieces, place in waiting:
            sides = zip(pieces.val.tolist(), pieces.begins.tolist(), pieces.ends.tolist(), strict=True)
            yield (
                [
                    Piece(val, begins, np.concatenate([mine, end]) if ends else mine)
                    for (val, begins, ends), mine in zip(sides, ids, strict=False)
                ],
                place,
            )

    def _show(self, begin: State, tokens: int, documents: int) -> None:
        self.now.chunk, self.now.tokens, self.now.documents = begin.chunk, tokens, documents - begin.document
        self.now.wanted = self._wanted(begin)


class AsItComes:
    """A source whose size and content are not asked for beforehand: its beginning stands for it."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __str__(self) -> str:
        return str(self.source)

    def fingerprint(self) -> str:
        """Of its name and its first text: another corpus under the same name does not get the tokenizer of the old one."""
        with report.phase("look at the first text") as p:
            p.set(0, self.source.position().item)
            first = next(self.source.documents(), "")
        return hashlib.sha256(f"{self.source}\n{first}".encode()).hexdigest()

    def total_bytes(self) -> int | None:
        """Unknown: a sample is then the first so many bytes."""
        return None

    def position(self) -> Position:
        return self.source.position()

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        return self.source.documents(start)


class ReadOnce:
    """A source whose beginning is looked at first, and then given out from memory, the rest behind it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.keeps = False  # what is read now is a look, and will be wanted again
        self._kept: list[tuple[str, Position]] = []
        self._rest: Iterator[str] | None = None  # behind what was kept
        self._here: Position | None = None  # in what was kept

    def __str__(self) -> str:
        return str(self.source)

    def fingerprint(self) -> str:
        return self.source.fingerprint()

    def total_bytes(self) -> int | None:
        return self.source.total_bytes()

    def position(self) -> Position:
        return self._here or self.source.position()

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        """From the beginning, the first time after a look: what was kept, and on from there. Else as the source has it."""
        kept, rest = self._kept, self._rest
        self._kept, self._rest, self._here = [], None, None
        if start is None and self.keeps:
            return self._keep(self.source.documents())
        return self.source.documents(start) if start is not None or rest is None else self._again(kept, rest)

    def _keep(self, texts: Iterator[str]) -> Iterator[str]:
        self._rest = texts
        for text in texts:
            self._kept.append((text, self.source.position()))
            yield text

    def _again(self, kept: list[tuple[str, Position]], rest: Iterator[str]) -> Iterator[str]:
        for text, self._here in kept:
            yield text
        kept.clear()
        self._here = None
        yield from rest


# ---------------------------------------------------------------- batches


class StreamBatches:
    """A BatchSource over a Filler: the next chunk is filled while one is trained on; batches are cut by the reader."""

    def __init__(self, filler: Filler, held_out: HeldOutTokens) -> None:
        self.filler, self.settings, self.held_out = filler, filler.settings, held_out
        self._lock = threading.Lock()  # the checkpointer asks for the state from a thread of its own
        self._chunks: deque[Chunk] = deque()  # those that the next batch may need
        self._before = State()  # where the oldest of them begins
        self._step = 1
        self._ahead: Prefetcher[Chunk] | None = None

    @property
    def name(self) -> str:
        """Changes when a run would no longer be the same; recorded in every checkpoint, so its spelling may never change."""
        source, split = self.filler.source, ", ".join(f"{n}={v!r}" for n, v in asdict(self.filler.division).items())
        parts = f"{source} {source.total_bytes()} {self.filler.tokenizer.fingerprint()} Division({split})"
        return f"stream-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"

    def describe(self) -> DataFacts:
        return self._facts

    @cached_property
    def _facts(self) -> DataFacts:
        """No padding but at the end of an epoch; how many windows there will be is not known."""
        settings = self.settings
        return DataFacts(
            name=self.name,
            samples=0,
            noun="windows",
            batch_size=settings.batch_size,
            positions_per_step=settings.batch_size * settings.seq_len,
            padding=0.0,
            held_out=held_out_windows(self.held_out, settings.seq_len),
            unigram_loss=unigram_loss(self.held_out),
        )

    def check_ids(self, vocab_size: int) -> None:
        """Nothing is stored: every id comes from the run's own tokenizer."""

    def start(self, step: int, state: dict[str, Any] | None) -> None:
        if self._ahead is not None:
            with report.phase("wait for the reader"):  # of the same source: two of them would mix up its position
                self.close(join_s=None)
        with self._lock:
            self._step, self._before = step, load_state(state)
            self._chunks.clear()
        self.filler.stop.clear()
        self._ahead = Prefetcher(self.filler.chunks(self._before), _CHUNKS_AHEAD, "lamp-stream")

    def next(self, step: int) -> Batch | None:
        assert self._ahead is not None and step == self._step, "start comes first, then one step after the other"
        first = (step - 1) * self.settings.batch_size
        last = first + self.settings.batch_size
        self._drop_before(first)
        while not (self._chunks and self._chunks[-1].end.sample >= last):
            self._show_until_filled(self._ahead)
            if (chunk := self._ahead.next()) is None:
                break
            with self._lock:
                self._chunks.append(chunk)
        batch = self._cut(step, first, last)
        if batch is not None:
            self._step = step + 1
        return batch

    def state(self, step: int) -> dict[str, Any]:
        """Where the chunk begins that holds the next sample."""
        sample = step * self.settings.batch_size
        with self._lock:
            for chunk in self._chunks:
                if chunk.begin.sample <= sample < chunk.end.sample:
                    return chunk.begin.dump()
            return (self._chunks[-1].end if self._chunks else self._before).dump()

    def validation(self, rows: int, limit: int | None) -> Iterator[Batch]:
        pad_id = self.filler.tokenizer.end_of_text
        return validation_batches(self.held_out, self.settings.seq_len, rows, pad_id, limit)

    def close(self, join_s: float | None = 0.0) -> None:
        """End the thread at its next text, without waiting: a dead remote source may hold it for long."""
        self.filler.close()
        if self._ahead is not None:
            self._ahead.close(join_s)

    def _drop_before(self, sample: int) -> None:
        while self._chunks and self._chunks[0].end.sample <= sample:
            with self._lock:
                gone = self._chunks.popleft()
                self._before = gone.end
            if gone.end.epoch > gone.begin.epoch:
                _declare(gone)

    def _show_until_filled(self, ahead: Prefetcher[Chunk]) -> None:
        """Say what is being gathered until it is there; the place being read is shown while it blocks."""
        if ahead.wait(0):
            return
        now, shown = self.filler.now, ("", 0)
        with report.phase(f"fill chunk {now.chunk}", total=now.wanted, unit="tokens") as phase:
            while True:
                there = (now.words(self.filler.source.position().item), now.tokens)
                if there != shown:
                    phase.set(now.tokens, there[0])
                    shown = there
                if ahead.wait(_LOOK_EVERY_S):
                    return

    def _cut(self, step: int, first: int, last: int) -> Batch | None:
        parts = []
        T, pad = self.settings.seq_len, self.filler.tokenizer.end_of_text
        for chunk in self._chunks:
            low, high = max(first, chunk.begin.sample), min(last, chunk.end.sample)
            if low < high:
                places = np.arange(low, high, dtype=np.int64) - chunk.begin.sample
                order = permute(self.settings.seed, np.full(len(places), chunk.begin.chunk), places, chunk.windows)
                parts.append((*chunk.rows(order, T, pad), order + chunk.begin.sample))
        if not parts:
            return None
        inputs, targets, samples = (np.concatenate([part[n] for part in parts]) for n in range(3))
        here = next(chunk.begin for chunk in self._chunks if first < chunk.end.sample)
        epoch = here.epoch + here.share
        return Batch(step, inputs, targets, None, samples, epoch=epoch, real_tokens=count_targets(targets))


def _declare(chunk: Chunk) -> None:
    """The end of the data is said, and where."""
    documents = chunk.begin.document
    what = "that was all" if chunk.end.ended else f"epoch {chunk.end.epoch + 1} begins"
    report.event("epoch", epochs=chunk.end.epoch, chunk=chunk.begin.chunk, samples=chunk.end.sample)
    if (
        chunk.end.ended or len(str(chunk.end.epoch).rstrip("0")) == 1
    ):  # 1 to 9, 10, 20 ...: a tiny source ends each step
        report.note(f"the source ended in chunk {chunk.begin.chunk} (which began at document {documents:,}): {what}")


# ---------------------------------------------------------------- what is held back


@dataclass(frozen=True)
class HeldOutTokens:
    """Some documents as one stream of ids in memory; read like one side of the token cache."""

    ids: Ids
    documents: int
    text_bytes: int
    name: str = "val"

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
    folder: Path, source: ReadOnce, tokenizer: Tokenizer, fraction: float, sample_bytes: int
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
    write_atomic(folder / "val.npy", data.getvalue())
    record = {
        "key": key,
        "sha256": hashlib.sha256(data.getvalue()).hexdigest(),
        "division": asdict(division),
        "documents": held.documents,
        "text_bytes": held.text_bytes,
    }
    write_json(folder / "val.json", sealed(record))
    return division, held


def _load(folder: Path, key: str) -> tuple[Split, HeldOutTokens] | None:
    record = read_json(folder / "val.json")
    path = folder / "val.npy"
    if not isinstance(record, dict) or record.get("key") != key or not path.is_file():
        return None
    data = path.read_bytes()
    damaged = "check" in record and not is_whole(record)  # those of earlier versions have none
    if damaged or hashlib.sha256(data).hexdigest() != record["sha256"]:
        report.warn(f"{path} is damaged: the validation text is taken from the source again", path=str(path))
        return None
    ids = np.load(io.BytesIO(data), allow_pickle=False)
    return Split(**record["division"]), HeldOutTokens(ids, record["documents"], record["text_bytes"])


def _look(source: ReadOnce, settings: CacheSettings, sample_bytes: int) -> tuple[list[TextBlock], Split]:
    """The first texts, and how they and all others are divided; they are kept for the first chunk."""
    seen, texts = begin_survey(settings), list[TextBlock]()
    source.keeps = True
    with report.phase("look at the documents", total=sample_bytes, unit="B") as p:

        def show(_: int, item: str) -> None:
            p.set(min(seen.text_bytes, sample_bytes), f"{seen.documents:,} documents, at {item}")

        for block in survey_texts(source, seen, show):
            texts.append(block)
            if seen.text_bytes >= sample_bytes and seen.documents >= LOOK_DOCUMENTS:
                break
    source.keeps = False
    return texts, decide(seen, settings, source)


def _take(division: Split, texts: list[TextBlock], tokenizer: Tokenizer) -> HeldOutTokens:
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
