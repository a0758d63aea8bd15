"""One checkpoint that all ranks of a sharded run write together: each its own rows, into files that rank 0 has laid out.

In:  what a rank holds, the shapes of the whole tensors; a folder that all ranks see.
Out: model.safetensors and training/optimizer.safetensors as one rank would have written them, to the byte.

Nothing of it is a collective, since it goes on beside the steps. Rank 0 makes the folder under its temporary name, with room for
whole tensors, and says that it is open; the others write their rows, flush them, and say so in a file with the attempt and
the size of the world: rank 0 takes no other. Who has died is missed after a while; then there is no checkpoint.

A network file system keeps whole pages on each machine: two machines that write neighbouring rows into one page would undo each
other's. So ranks on other machines than rank 0's write their rows into files of their own and tell the checksums; rank 0
compares them as it copies the rows to their places.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from lamplighter.data.batches import Batch
from lamplighter.errors import CannotWrite
from lamplighter.model.weights import rows_of
from lamplighter.rundir import RunDir, cannot_write, read_record, write_json
from lamplighter.train import tensorfile

DEADLINE_S = 120.0  # beyond what a rank's own part takes, times _SLOWER
_SLOWER = 20.0
_LOOK_S = 0.02
_ANEW_S = 0.5
PLACE = "parts"  # within the folder that is being written
Tensors = dict[str, torch.Tensor]
Tick = Callable[[int, str], None]


@dataclass(frozen=True)
class Part:
    """Which of all parts is this rank's."""

    rank: int
    size: int
    attempt: int
    leader: int  # the process of rank 0, by which the folder is named while it is being written
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the parameters, whole
    apart: frozenset[int] = frozenset()  # the ranks on other machines than rank 0's

    def whole(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """The shape of the whole tensor: moments have that of their parameter, counters are no part of anything."""
        if not tensor.dim():
            return ()
        known = self.shapes.get(name) or self.shapes.get(name.partition(".")[2])
        assert known is not None, f"{name} is no tensor of the model"
        return known

    def first_rows(self, tensors: Tensors) -> dict[str, int]:
        """Of the tensors that this rank writes something of: where its rows begin."""
        found = {name: rows.start for name, rows in self._rows(tensors, self.rank).items()}
        return found | ({name: 0 for name, tensor in tensors.items() if not tensor.dim()} if self.rank == 0 else {})

    def _rows(self, tensors: Tensors, rank: int) -> dict[str, range]:
        """Which rows of each tensor are that rank's; without those of which it has none."""
        shapes = {name: self.whole(name, tensor) for name, tensor in tensors.items() if tensor.dim()}
        found = {name: rows_of(shape[0], self.size, rank) for name, shape in shapes.items()}
        rows = {name: range(one.start, one.stop) for name, one in found.items()}
        return {name: one for name, one in rows.items() if len(one) and math.prod(shapes[name])}

    def temporary(self, final: Path) -> Path:
        return final.with_name(f".writing-{final.name}-{self.leader}")

    @property
    def stamp(self) -> dict[str, int]:
        return {"attempt": self.attempt, "world": self.size}

    # ---------------------------------------------------------------- rank 0

    def lay_out(self, folder: Path, files: dict[str, Tensors]) -> None:
        for name, tensors in files.items():
            whole = {key: self.whole(key, tensor) for key, tensor in tensors.items()}
            tensorfile.lay_out(folder / name, tensors, whole)
        (folder / PLACE).mkdir()
        write_json(folder / PLACE / "open.json", self.stamp)

    def collect(self, folder: Path, files: dict[str, Tensors], own_s: float, tick: Tick) -> str:
        """Wait for the others, and copy what they have written apart; a tensor of theirs that is not finite, or nothing."""
        missing, until = set(range(1, self.size)), time.monotonic() + DEADLINE_S + _SLOWER * own_s
        bad, look = "", SeenAnew((folder / PLACE,), bool(self.apart))
        while missing:
            look.now_and_then()
            for rank in [one for one in missing if _is_listed(folder / PLACE / f"rank{one}.json")]:
                said = read_record(folder / PLACE / f"rank{rank}.json")
                if {name: said.get(name) for name in self.stamp} == self.stamp:
                    if rank in self.apart:
                        self._copy(folder, files, rank, said.get("files"))
                        tick(0, f"copied the part of rank {rank}")
                    missing.discard(rank)
                    bad = bad or str(said.get("bad") or "")
            if missing and time.monotonic() > until:
                ranks = ", ".join(map(str, sorted(missing)))
                raise CannotWrite(
                    f"rank {ranks} has not written its part of {folder}",
                    f"the others were ready {DEADLINE_S + _SLOWER * own_s:.0f} s ago",
                    "the checkpoints that exist are intact; look at that rank: lamp why RUN",
                )
            time.sleep(_LOOK_S)
        shutil.rmtree(folder / PLACE)
        return bad

    def _copy(self, folder: Path, files: dict[str, Tensors], rank: int, checksums: object) -> None:
        """The rows of a rank on another machine to their places, and its files away: they are there twice no longer than that."""
        for name, tensors in files.items():
            whole = {key: self.whole(key, tensor) for key, tensor in tensors.items()}
            source = _own_file(folder, name, rank)
            told = checksums.get(name) if isinstance(checksums, dict) else None
            try:
                found = tensorfile.copy_rows(source, folder / name, tensors, whole, self._rows(tensors, rank))
                why = "" if found == told else f"{source.name} has the checksum {found}, and was written with {told}"
            except (ValueError, FileNotFoundError) as error:
                why = f"{source.name} is not there" if isinstance(error, FileNotFoundError) else str(error)
            if why:
                raise CannotWrite(
                    f"the part of rank {rank} has not come whole to {folder}",
                    why,
                    "the checkpoints that exist are intact; look at the file system that the nodes share",
                )
            source.unlink()

    # ---------------------------------------------------------------- every rank

    def write(self, folder: Path, files: dict[str, Tensors], tick: Tick) -> None:
        for name, tensors in files.items():
            whole = {key: self.whole(key, tensor) for key, tensor in tensors.items()}
            tensorfile.write_rows(
                folder / name, tensors, whole, self.first_rows(tensors), functools.partial(_told, tick, name)
            )

    # ---------------------------------------------------------------- the others

    def hand_in(self, final: Path, files: dict[str, Tensors], bad: str, tick: Tick) -> None:
        """Write this rank's rows as soon as rank 0 has laid the files out; CannotWrite where it never does."""
        folder = self.temporary(final)
        until = time.monotonic() + DEADLINE_S
        look = SeenAnew((final.parent, folder, folder / PLACE), self.rank in self.apart)
        word = folder / PLACE / "open.json"
        while not all(map(_is_listed, (folder, word.parent, word))) or read_record(word) != self.stamp:
            if time.monotonic() > until:
                raise CannotWrite(
                    f"rank {self.rank} cannot write its part of {final.name}",
                    f"rank 0 has not opened {folder} within {DEADLINE_S:.0f} s",
                    "the checkpoints that exist are intact; look at rank 0: lamp why RUN",
                )
            look.now_and_then()
            time.sleep(_LOOK_S)
        apart: dict[str, Any] = {}
        try:
            if self.rank in self.apart:
                apart = {"files": self._write_apart(folder, files, tick)}
            else:
                self.write(folder, files, tick)
        except OSError as error:
            raise cannot_write(folder, error) from error
        write_json(folder / PLACE / f"rank{self.rank}.json", {**self.stamp, "bad": bad, **apart})

    def _write_apart(self, folder: Path, files: dict[str, Tensors], tick: Tick) -> dict[str, str]:
        """Files of its own, on the disk when this returns, and their checksums."""
        checksums = {}
        for name, tensors in files.items():
            rows = {key: tensors[key] for key in self._rows(tensors, self.rank)}
            path = _own_file(folder, name, self.rank)
            checksums[name] = tensorfile.write(path, rows, functools.partial(_told, tick, name))
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        return checksums


def _own_file(folder: Path, name: str, rank: int) -> Path:
    return folder / PLACE / f"rank{rank}.{Path(name).name}"


def _is_listed(path: Path) -> bool:
    """Whether it is there, without asking for its name: a network file system may remember for a while that a name was not there."""
    try:
        return path.name in os.listdir(path.parent)
    except FileNotFoundError:
        return False


def see_anew(folder: Path) -> None:
    """What other machines have made there: a client of a network file system may go on for half a minute with what it knew of a
    folder, until it changes something there itself."""
    mark = folder / f".look-{os.uname().nodename}-{os.getpid()}"
    with contextlib.suppress(OSError):  # then it is seen when the client asks again by itself
        mark.touch()
        mark.unlink()


@dataclass
class SeenAnew:
    """The same, again and again while something is waited for."""

    folders: tuple[Path, ...]
    wanted: bool  # not where all is on one machine
    at: float = 0.0

    def now_and_then(self) -> None:
        if self.wanted and time.monotonic() - self.at > _ANEW_S:
            self.at = time.monotonic()
            for folder in self.folders:  # each within the one before
                if folder != self.folders[0] and not _is_listed(folder):
                    return
                see_anew(folder)


def _told(tick: Tick, name: str, count: int) -> None:
    tick(count, name)


class Sharded(Protocol):
    """A model of which each rank holds a part (sharding.py)."""

    part: Part
    first: str  # hash of the first weights, which every rank has made whole

    def held(self) -> Tensors:
        """What this rank holds of the tensors to store."""
        ...

    def let_go(self) -> None:
        """Whole weights that a forward pass without a backward pass has left."""
        ...

    def step(self, context: Any, batch: Batch, votes: list[float]) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
        """Loss, norm of the gradients, sums of the votes; the gradients of this rank's rows are in the parameters."""
        ...


# ---------------------------------------------------------------- at a stop that no step ends


class Standing:
    """Where each rank stands, told in files: ranks that are asked to stop in the middle of a step may be one step apart."""

    def __init__(self, run: RunDir, part: Part) -> None:
        self.folder = run.nodes if part.apart else run.slots  # slots are each machine's own
        self.part, self.look = part, SeenAnew((self.folder,), bool(part.apart))
        if part.rank == 0:
            for stale in self.folder.glob("standing-*"):  # of an attempt before, whatever ranks it had
                if not stale.name.startswith(f"standing-{part.attempt}-"):
                    stale.unlink(missing_ok=True)

    def tell(self, step: int) -> None:
        """In the file's name, which every machine sees as it is; what was in a file before may be remembered for a while."""
        (self.folder / f"{self._begin}rank{self.part.rank}-step{step}").touch()

    @property
    def _begin(self) -> str:
        return f"standing-{self.part.attempt}-{self.part.size}-"

    def newest(self) -> int | None:
        """The step that all ranks have or will come to; None while one has not told."""
        self.look.now_and_then()
        told = [
            name.removeprefix(self._begin).split("-step")
            for name in os.listdir(self.folder)
            if name.startswith(self._begin)
        ]
        return max(int(step) for _, step in told) if len({rank for rank, _ in told}) == self.part.size else None
