"""The ranks of a node read a stream once: one of them reads, encodes and cuts it into chunks, the others take these from its files.

In:  a Filler's source, tokenizer and settings; a folder that all ranks of this node see.
Out: the same chunks as a Filler gives, on every rank.

Who reads holds a lock for as long as it lives, and the kernel gives that to the next one: where the reader dies, another goes on at
the place where it was. A rank that wants a chunk which is no longer there (it has just come) reads that one for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lamplighter import report
from lamplighter.data.sources import Source
from lamplighter.data.split import Split
from lamplighter.data.stream import Chunk, Filler, State, Stopped, StreamSettings, load_state
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.procs import lock, procfs
from lamplighter.rundir import write_atomic

_LOOK_S = 0.05
_KEPT = 4  # chunks: ranks stand one step apart, and each has one ahead


@contextlib.contextmanager
def in_turn(folder: Path, phase: report.Phase) -> Iterator[None]:
    """One rank of this machine after the other: the first looks at a stream, the others find what it has decided."""
    folder.mkdir(parents=True, exist_ok=True)
    while (held := lock.hold(folder / "look.lock")) is None:
        phase.set(phase.done, "another rank of this machine looks at it")
        time.sleep(_LOOK_S)
    try:
        yield
    finally:
        os.close(held)


class SharedFiller(Filler):
    """A Filler of one rank among others of its node."""

    def __init__(
        self, source: Source, tokenizer: Tokenizer, division: Split, settings: StreamSettings, folder: Path
    ) -> None:
        super().__init__(source, tokenizer, division, settings)
        self.folder = folder
        self.start = os.environ.get("LAMP_PARENT_PID", "0")  # whatever is there of another start may be of other data
        self.lock_fd = -1
        self.alone = False  # nothing can be written there: every rank reads for itself
        self.of_run = f"{source} {tokenizer.fingerprint()} {division} {settings}"

    @property
    def reads(self) -> bool:
        """Whether this rank reads for all."""
        return self.lock_fd >= 0

    def chunks(self, state: State) -> Iterator[Chunk]:
        """Every chunk after the State, from a file or from the source."""
        own: Iterator[Chunk] = iter(())
        place: State | None = None  # up to where `own` has come
        while not state.ended:
            chunk = self._wait(state)
            if chunk is None:
                own = own if place is state else super().chunks(state)
                chunk = next(own)
                place = chunk.end
                if self.reads:
                    self._keep(chunk, state)
            state = chunk.end
            yield chunk

    def close(self) -> None:
        """This rank wants no more: what it has kept for others is taken away; they can read for themselves."""
        super().close()
        if self.reads:
            for path in self._kept():
                path.unlink(missing_ok=True)

    @property
    def place_of_lock(self) -> Path:
        return self.folder / "reader.lock"

    # ---------------------------------------------------------------- one of them reads

    def _wait(self, state: State) -> Chunk | None:
        """The chunk that begins here, as soon as somebody has made it; None where this rank is to read it."""
        self.now.chunk, self.now.by = state.chunk, ""
        while True:
            if (found := self._load(state)) is not None:
                return found if state.digest in ("", found.begin.digest) else None  # other text: found again, and told
            if self.alone or self._lead() or self._is_behind(state) or self._reader_is_stopped():
                self.now.by = ""
                return self._load(state)  # it may have come in between
            if self.stop.is_set():
                raise Stopped
            self.now.by = "another rank of this machine reads it"
            time.sleep(_LOOK_S)

    def _lead(self) -> bool:
        """Whether this rank reads, or does from now on as nobody else does."""
        if self.reads:
            return True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            place = lock.hold(self.place_of_lock)
        except OSError as error:
            self._read_alone(error)
            return False
        if place is None:
            return False
        lock.keep_to_ourselves([place])
        self.lock_fd = place
        os.truncate(place, 0)
        os.pwrite(place, str(os.getpid()).encode(), 0)
        for stale in {*self.folder.glob("*.npz"), *self.folder.glob(".*.tmp")} - set(self._kept()):
            stale.unlink(missing_ok=True)
        return True

    def _read_alone(self, error: OSError) -> None:
        """A full disk, say: the next one that reads for all will find the same."""
        report.warn(
            f"chunks of the stream cannot be kept for the other ranks ({error.strerror}): each reads for itself"
        )
        self.alone = True
        if self.reads:
            os.close(self.lock_fd)
            self.lock_fd = -1

    def _reader_is_stopped(self) -> bool:
        """By a signal: this rank must come to the collective in which it is seen that the other one does not."""
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            return procfs.look(int(self.place_of_lock.read_text())).stopped
        return False

    def _is_behind(self, state: State) -> bool:
        """The others are further: nobody will make this chunk again."""
        return any(int(path.name.split("-")[1]) > state.sample for path in self._kept())

    # ---------------------------------------------------------------- files

    def _kept(self) -> list[Path]:
        return list(self.folder.glob(f"{self.start}-*.npz"))

    def _path(self, state: State) -> Path:
        """By the place alone: how a rank has come there (a digest, the share of the bytes) differs a little from rank to rank."""
        told = [
            state.chunk,
            state.epoch,
            state.sample,
            state.document,
            state.open_val,
            state.in_parts,
            state.given,
            *state.carry,
        ]
        return (
            self.folder
            / f"{self.start}-{state.sample}-{hashlib.sha256(f'{self.of_run}{told}'.encode()).hexdigest()[:16]}.npz"
        )

    def _keep(self, chunk: Chunk, state: State) -> None:
        """For the others; the oldest are taken away."""
        about = json.dumps({"begin": chunk.begin.dump(), "end": chunk.end.dump(), "windows": chunk.windows})
        data = io.BytesIO()
        np.savez(data, tokens=chunk.tokens.astype(np.int32), about=np.frombuffer(about.encode(), np.uint8))
        try:
            write_atomic(self._path(state), data.getvalue(), durable=False)
        except OSError as error:
            self._read_alone(error)
        for old in sorted(self._kept(), key=_age)[:-_KEPT]:
            old.unlink(missing_ok=True)

    def _load(self, state: State) -> Chunk | None:
        """None where it is not there; it is never there by half."""
        try:
            data = self._path(state).read_bytes()
        except FileNotFoundError:  # not made yet
            return None
        except OSError as error:
            self._read_alone(error)
            return None
        with np.load(io.BytesIO(data), allow_pickle=False) as kept:
            about = json.loads(kept["about"].tobytes())
            tokens = kept["tokens"].astype(np.int64)
        return Chunk(load_state(about["begin"]), load_state(about["end"]), tokens, int(about["windows"]))


def _age(path: Path) -> float:
    with contextlib.suppress(OSError):  # taken away meanwhile
        return path.stat().st_mtime
    return 0.0
