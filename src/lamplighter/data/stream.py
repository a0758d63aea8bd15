"""Training while documents arrive: chunks of tokens in the order of the source, shuffled inside, at an exact place.

In:  a source, a tokenizer, a Division; the State that was saved with a step, or none.
Out: Batch by Batch; the State after any step; the end of the data as an epoch or a stop, never as invented tokens.

The stream of an epoch is one end-of-text, then every document with one end-of-text after it, as in the token cache, but
in the order of the source. A chunk is the next `chunk_tokens` of it or a little more, up to the end of a text; windows
overlap by one token, and what is too short for a window begins the next chunk. The end of the source ends its chunk: the
last window is filled up (targets -100). Window order inside a chunk is a function of (seed, chunk).

A State is where a chunk begins: source cursor, left-over tokens, counts. From it everything after is the same again, so
a killed run reads at most the chunk that it was in once more, and proves by a digest that it is the same text.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from lamplighter import report
from lamplighter.data.batches import NO_TARGET, Batch, permute
from lamplighter.data.sources import Cursor, Part, Position, Source
from lamplighter.data.split import Divider, Division, Pieces
from lamplighter.data.stream_split import Stretch
from lamplighter.data.token_cache.ranges import Stretch as Texts
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import BadData

Ids = np.ndarray[Any, np.dtype[Any]]
LOOK_EVERY_S = 0.2
FIRST_BYTES, BATCH_BYTES = 1 << 12, 1 << 18  # of text that is encoded at once: little at first, so that it is seen
BATCH_S = 0.5  # a slow source: what has come is encoded after this time


@dataclass(frozen=True)
class Settings:
    """What, besides source and tokenizer, decides every batch."""

    seed: int
    batch_size: int
    seq_len: int
    chunk_tokens: int
    max_chunks: int | None = None
    repeat: bool = True


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

    def dump(self) -> dict[str, Any]:
        return asdict(self)


def load_state(saved: dict[str, Any] | None) -> State:
    """The State that `dump` wrote; the beginning where there is none."""
    return State(**{**saved, "carry": tuple(saved["carry"])}) if saved else State()


@dataclass(frozen=True)
class Chunk:
    """Tokens of some documents, cut into windows."""

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
    documents: int = 0
    last: float = 0.0  # monotonic time of the latest text

    def words(self, item: str) -> str:
        return f"{self.documents:,} samples, at {item}"


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

    def __init__(self, source: Source, tokenizer: Tokenizer, division: Division, settings: Settings) -> None:
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

    def _epoch(self, state: State) -> Iterator[Chunk]:
        """The chunks from here to the end of the source (or the last one that was asked for)."""
        end = self.tokenizer.end_of_text
        divider = Divider(self.division, state.open_val)
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
            if size <= self.settings.chunk_tokens:
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

    def _close(self, begin: State, tokens: Ids, windows: int, end: State) -> Chunk:
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
        if begin.digest and begin.digest != digest:
            raise BadData(
                f"{self.source} is no longer what it was",
                f"chunk {begin.chunk}, from document {begin.document:,} on, has other tokens than before the resume",
                "put the old data back, or begin anew with --resume never",
            )
        number = begin.chunk + (windows > 0)
        last = self.settings.max_chunks is not None and number >= self.settings.max_chunks
        same_epoch = end.epoch == begin.epoch
        end = replace(
            end,
            chunk=number,
            sample=begin.sample + windows,
            carry=tuple(tokens[windows * self.settings.seq_len :].tolist()) if same_epoch else (),
            ended=end.ended or last,
        )
        padded = np.full(windows * self.settings.seq_len + 1, NO_TARGET, np.int64)
        padded[: len(tokens)] = tokens[: len(padded)]
        return Chunk(replace(begin, digest=digest), end, padded, windows)

    def _texts(self, state: State, divider: Divider) -> Iterator[tuple[list[Piece], State]]:
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
            pieces = divider.pieces(Texts([text.encode()], going_on, isinstance(text, Part)))
            place = State(epoch=state.epoch, cursor=here.cursor, open_val=divider.open_val, share=share)
            waiting.append((pieces, place))
            size += len(text)
            self.now.last = time.monotonic()
            if self.stop.is_set():
                raise Stopped
            if size >= limit or self.now.last - since > BATCH_S:
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


@dataclass(frozen=True)
class Live:
    """Documents that are trained on as they arrive, and those that are held back."""

    filler: Filler
    val: Stretch

    @property
    def name(self) -> str:
        """Changes when a run would no longer be the same."""
        source = self.filler.source
        parts = f"{source} {source.total_bytes()} {self.filler.tokenizer.fingerprint()} {self.filler.division}"
        return f"stream-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"


# ---------------------------------------------------------------- batches


class ChunkStream:
    """A thread fills the next chunk while one is trained on; batches are cut from chunks in the caller's thread."""

    def __init__(self, filler: Filler, step: int, state: State) -> None:
        self.filler, self.settings = filler, filler.settings
        self._change = threading.Condition()
        self._begin(step, state)

    def _begin(self, step: int, state: State) -> None:
        self._step, self._state = step, state
        self._chunks: deque[Chunk] = deque()
        self._error: Exception | None = None
        self._over = False
        self._wanted = 0
        self.filler.stop.clear()
        self._thread = threading.Thread(target=self._work, args=(state,), name="lamp-stream", daemon=True)
        self._thread.start()

    def next(self, step: int, state: State) -> Batch | None:
        """The batch of `step`, which begins at or after `state`; None after the end of the data."""
        if step != self._step:  # a roll-back
            with report.phase("wait for the reader"):
                self.close()
                self._thread.join()
            self._begin(step, state)
        first = (step - 1) * self.settings.batch_size
        last = first + self.settings.batch_size
        self._drop_before(first, last)
        while not self._reaches(last):
            self._wait(last)
        with self._change:
            chunks = list(self._chunks)
        batch = self._cut(step, first, last, chunks)
        if batch is not None:
            self._step = step + 1
        return batch

    def state_after(self, step: int) -> State:
        """Where to begin again after `step` steps: the chunk that holds the next sample."""
        sample = step * self.settings.batch_size
        with self._change:
            for chunk in self._chunks:
                if chunk.begin.sample <= sample < chunk.end.sample:
                    return chunk.begin
            return self._chunks[-1].end if self._chunks else self._state

    def close(self) -> None:
        """End the thread at its next text; a second call does nothing."""
        with self._change:
            self.filler.stop.set()
            self._change.notify_all()

    # -- in the caller's thread

    def _reaches(self, last: int) -> bool:
        with self._change:
            if self._error is not None and not (self._chunks and self._chunks[-1].end.sample >= last):
                raise self._error
            return self._over or bool(self._chunks and self._chunks[-1].end.sample >= last)

    def _drop_before(self, sample: int, wanted: int) -> None:
        with self._change:
            self._wanted = wanted
            while self._chunks and self._chunks[0].end.sample <= sample:
                gone = self._chunks.popleft()
                self._state = gone.end
                if gone.end.epoch > gone.begin.epoch:
                    _declare(gone)
            self._change.notify_all()

    def _wait(self, last: int) -> None:
        """Say what is being gathered until it is there; the place being read is shown while it blocks."""
        now, shown = self.filler.now, ("", 0)
        with report.phase(f"fill chunk {now.chunk}", total=self.settings.chunk_tokens, unit="tokens") as phase:
            while not self._reaches(last):
                there = (now.words(self.filler.source.position().item), now.tokens)
                if there != shown:
                    phase.set(now.tokens, there[0])
                    shown = there
                with self._change:
                    if not self._over and self._error is None:
                        self._change.wait(LOOK_EVERY_S)

    def _cut(self, step: int, first: int, last: int, chunks: list[Chunk]) -> Batch | None:
        parts = []
        T, pad = self.settings.seq_len, self.filler.tokenizer.end_of_text
        for chunk in chunks:
            low, high = max(first, chunk.begin.sample), min(last, chunk.end.sample)
            if low < high:
                places = np.arange(low, high, dtype=np.int64) - chunk.begin.sample
                order = permute(self.settings.seed, np.full(len(places), chunk.begin.chunk), places, chunk.windows)
                parts.append((*chunk.rows(order, T, pad), order + chunk.begin.sample))
        if not parts:
            return None
        inputs, targets, samples = (np.concatenate([part[n] for part in parts]) for n in range(3))
        here = next(chunk.begin for chunk in chunks if first < chunk.end.sample)
        return Batch(step, inputs, targets, None, samples, here.epoch + here.share, int((targets != NO_TARGET).sum()))

    # -- in its own thread

    def _work(self, state: State) -> None:
        found: Exception | None = None
        try:
            for chunk in self.filler.chunks(state):
                with self._change:
                    self._chunks.append(chunk)
                    self._change.notify_all()
                    while chunk.begin.sample >= self._wanted and not self.filler.stop.is_set():
                        self._change.wait()  # one chunk ahead is enough
        except Stopped:
            return
        except Exception as error:  # noqa: BLE001 (goes to whoever asks next)
            found = error
        with self._change:
            self._error, self._over = found, found is None
            self._change.notify_all()


def _declare(chunk: Chunk) -> None:
    """The end of the data is said, and where."""
    documents = chunk.begin.document
    what = "that was all" if chunk.end.ended else f"epoch {chunk.end.epoch + 1} begins"
    report.event("epoch", epochs=chunk.end.epoch, chunk=chunk.begin.chunk, samples=chunk.end.sample)
    if (
        chunk.end.ended or len(str(chunk.end.epoch).rstrip("0")) == 1
    ):  # 1 to 9, 10, 20 ...: a tiny source ends each step
        report.note(f"the source ended in chunk {chunk.begin.chunk} (which began at document {documents:,}): {what}")
