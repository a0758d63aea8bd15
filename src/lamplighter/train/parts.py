"""One checkpoint that all ranks of a sharded run write together: each its own rows, into files that rank 0 has laid out.

In:  what a rank holds, the shapes of the whole tensors; a folder that all ranks see.
Out: model.safetensors and training/optimizer.safetensors as one rank would have written them, to the byte.

Nothing of it is a collective, since it goes on beside the steps. Rank 0 makes the folder under its temporary name, with room for
whole tensors, and says that it is open; the others write their rows, flush them, and say so in a file with the attempt and
the size of the world: rank 0 takes no other. Who has died is missed after a while; then there is no checkpoint.
"""

from __future__ import annotations

import functools
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
from lamplighter.rundir import cannot_write, read_record, write_json
from lamplighter.train import tensorfile

DEADLINE_S = 120.0  # beyond what a rank's own part takes, times _SLOWER
_SLOWER = 20.0
_LOOK_S = 0.02
PLACE = "parts"  # within the folder that is being written
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Part:
    """Which of all parts is this rank's."""

    rank: int
    size: int
    attempt: int
    leader: int  # the process of rank 0, by which the folder is named while it is being written
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the parameters, whole

    def whole(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """The shape of the whole tensor: moments have that of their parameter, counters are no part of anything."""
        if not tensor.dim():
            return ()
        known = self.shapes.get(name) or self.shapes.get(name.partition(".")[2])
        assert known is not None, f"{name} is no tensor of the model"
        return known

    def first_rows(self, tensors: Tensors) -> dict[str, int]:
        """Of the tensors that this rank writes something of: where its rows begin."""
        found = {}
        for name, tensor in tensors.items():
            if tensor.dim():
                found[name] = rows_of(self.whole(name, tensor)[0], self.size, self.rank).start
            elif self.rank == 0:
                found[name] = 0
        return {name: first for name, first in found.items() if tensors[name].numel()}

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

    def collect(self, folder: Path, own_s: float) -> str:
        """Wait for the others; a tensor of theirs that is not finite, or nothing."""
        missing, until = set(range(1, self.size)), time.monotonic() + DEADLINE_S + _SLOWER * own_s
        bad = ""
        while missing:
            for rank in list(missing):
                said = read_record(folder / PLACE / f"rank{rank}.json")
                if {name: said.get(name) for name in self.stamp} == self.stamp:
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

    # ---------------------------------------------------------------- every rank

    def write(self, folder: Path, files: dict[str, Tensors], tick: Callable[[int, str], None]) -> None:
        for name, tensors in files.items():
            whole = {key: self.whole(key, tensor) for key, tensor in tensors.items()}
            tensorfile.write_rows(
                folder / name, tensors, whole, self.first_rows(tensors), functools.partial(_told, tick, name)
            )

    # ---------------------------------------------------------------- the others

    def hand_in(self, final: Path, files: dict[str, Tensors], bad: str, tick: Callable[[int, str], None]) -> None:
        """Write this rank's rows as soon as rank 0 has laid the files out; CannotWrite where it never does."""
        folder = self.temporary(final)
        until = time.monotonic() + DEADLINE_S
        while read_record(folder / PLACE / "open.json") != self.stamp:
            if time.monotonic() > until:
                raise CannotWrite(
                    f"rank {self.rank} cannot write its part of {final.name}",
                    f"rank 0 has not opened {folder} within {DEADLINE_S:.0f} s",
                    "the checkpoints that exist are intact; look at rank 0: lamp why RUN",
                )
            time.sleep(_LOOK_S)
        try:
            self.write(folder, files, tick)
        except OSError as error:
            raise cannot_write(folder, error) from error
        write_json(folder / PLACE / f"rank{self.rank}.json", {**self.stamp, "bad": bad})


def _told(tick: Callable[[int, str], None], name: str, count: int) -> None:
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

    def __init__(self, folder: Path, part: Part) -> None:
        self.folder, self.part = folder, part

    def _file(self, rank: int) -> Path:
        return self.folder / f"standing-{self.part.attempt}-{self.part.size}-rank{rank}.json"

    def tell(self, step: int) -> None:
        write_json(self._file(self.part.rank), {"step": step}, durable=False)

    def newest(self) -> int | None:
        """The step that all ranks have or will come to; None while one has not told."""
        found = [read_record(self._file(rank)).get("step") for rank in range(self.part.size)]
        steps = [step for step in found if isinstance(step, int)]
        return max(steps) if len(steps) == self.part.size else None
