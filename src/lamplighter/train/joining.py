"""All ranks come together with the same run in their hands: at a start, and after one of them has died or come back.

In:  a RunContext whose world is known, a TrainState: of this process, of a checkpoint, or of nothing yet.
Out: a group for collectives, and on every rank the newest state that any of them holds.

Ranks that train stand at most one step apart, and each holds a whole state: weights change only after the collective of their
step. The newest one counts, because every rank would have come to it. A rank that has just come holds none until it is handed
over; nor does one whose peer was lost in the middle of that. Where nobody is left who holds one, all start again.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lamplighter import report
from lamplighter.errors import BadConfig
from lamplighter.model.weights import stored_tensors, weights
from lamplighter.rundir import RunDir, read_last_lines
from lamplighter.train import checkpoint, exactness, ranks
from lamplighter.train.ranks import World
from lamplighter.train.state import RunContext, TrainState

_NAMED_FILES, _END_BYTES = 16, 1 << 16
_NONE = -1  # the step of a rank that holds no state


def meet(world: World, folder: RunDir, device: torch.device) -> None:
    """A group for collectives, of the ranks of this attempt."""
    attempt = os.environ.get("LAMP_ATTEMPT", "1")
    ranks.meet(world, folder.slots / f"meeting-{attempt}", "nccl" if device.type == "cuda" else "gloo")


def join(context: RunContext, state: TrainState, met: bool = False) -> None:
    """Meet, take over the newest state, and refuse a rank that has another run in its hands; where one more is lost before all
    are together, in the world that the parent makes of the others."""
    while True:
        try:
            return _join(context, state, met)
        except ranks.NoState:
            raise
        except ranks.PeerLost:
            if met or context.shards is not None or not ranks.next_world(context.world, context.folder):
                raise


def _join(context: RunContext, state: TrainState, met: bool) -> None:
    world, device = context.world, context.machine.device
    if not met:
        meet(world, context.folder, device)
    world.peak_flops = float(sum(ranks.every(world, int(context.machine.peak_flops), device)))
    steps = ranks.every(world, state.progress.step if state.whole else _NONE, device)
    if max(steps) == _NONE:
        raise ranks.NoState(f"rank {world.rank} of {world.size} holds no state, nor does any other")
    records = report.recent_metrics()
    if len(set(steps)) > 1 and context.shards is not None:
        told = ", ".join(f"rank {rank} step {step}" for rank, step in enumerate(steps))
        raise BadConfig(
            "ranks of a sharded run have found different checkpoints", told, "one folder that all ranks see"
        )
    if len(set(steps)) > 1:
        records = _take_newest(context, state, steps)
    report.write_missing(records)  # before the next collective, after which every rank reads them
    facts = {
        "settings": exactness.short_hash(repr(context.run)),
        "data": exactness.short_hash(f"{context.data.name} {context.data.fingerprint}"),
        **{f"data in {path}": _ends_of(path) for path in context.run.data.paths[:_NAMED_FILES]},
        "weights": _hash_of_weights(context),
        "steps": exactness.short_hash(f"{state.progress.step} of {state.steps}"),
        "arithmetic (dtype, threads, torch)": exactness.short_hash(_arithmetic(context)),
    }
    ranks.refuse_strangers(world, facts, device)


def _ends_of(path: str) -> str:
    """Of a local file, what tells it from another one soon; of all else nothing: the hash of the data speaks for it."""
    try:
        if not Path(path).is_file():
            return "0"
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            first = file.read(_END_BYTES)
            file.seek(max(0, size - _END_BYTES))
            return exactness.short_hash(f"{size} {first!r} {file.read(_END_BYTES)!r}")
    except (OSError, ValueError):  # it only helps to name a difference
        return "0"


def _hash_of_weights(context: RunContext) -> str:
    """Of a sharded model the first ones, which each rank has made whole; a checkpoint is verified as it is read."""
    return context.shards.first if context.shards is not None else exactness.hash_of_all(weights(context.model))


def _take_newest(context: RunContext, state: TrainState, steps: list[int]) -> list[dict[str, Any]]:
    """The state of the rank that is furthest; gives its last records, which the one that writes them may not have written."""
    holder, behind = steps.index(max(steps)), steps[context.world.rank] < max(steps)
    found = take_over(context, state, holder, behind)
    step = state.progress.step
    if behind:
        state.from_disk = False
        if context.world.leads:
            state.redone = exactness.Redone.of(read_last_lines(context.folder.metrics), step)
    report.note(f"rank {holder} holds step {step}, the newest: every rank goes on from it", step=step)
    return found


@torch.no_grad()
def take_over(context: RunContext, state: TrainState, holder: int, takes: bool) -> list[dict[str, Any]]:
    """What one rank holds, on every rank that takes it; gives its last records."""
    world, device, optimizer = context.world, context.machine.device, context.optimizer
    own = optimizer.state_tensors()
    told: dict[str, Any] = {
        "progress": asdict(state.progress),
        "records": report.recent_metrics(),
        "optimizer": [
            [name, str(one.dtype).removeprefix("torch."), list(one.shape), one.device.type] for name, one in own.items()
        ],
    }
    with report.phase("hand over"):
        told = json.loads(ranks.hand_over_text(world, holder, json.dumps(told), device))
        if takes:
            own = {
                name: torch.empty(shape, dtype=getattr(torch, kind), device=device if place != "cpu" else "cpu")
                for name, kind, shape, place in told["optimizer"]
            }
        state.whole = not takes  # its peer may be lost in the middle: then this rank has parts of two
        ranks.hand_over(world, holder, [*stored_tensors(context.model).values(), *own.values()])
        if takes:
            optimizer.load_state_tensors(own)
            state.progress = checkpoint.progress_of(told["progress"])
            state.whole = True
    found: list[dict[str, Any]] = told["records"]
    return found


def _arithmetic(context: RunContext) -> str:
    """What the bits of a sum depend on, beside the model: every machine has chosen it for itself."""
    where = context.machine
    return f"{where.device.type} {where.dtype_name} {where.threads} {torch.__version__}"
