"""Collectives that a user's own model calls: the parent sees them as it sees ours, with the operation, the shape and the line.

In:  torch.distributed, before the user's module is loaded.
Out: its functions that all ranks call, each within report.collective. A call that fails because a peer is gone is PeerLost, as
     in ours; one that fails because another rank calls something else is RanksDiffer, with what each calls, and where.

Calls within a part of the ranks, and messages from one to another, are left alone: not every rank makes them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from lamplighter import report, slot
from lamplighter.errors import RanksDiffer
from lamplighter.rundir import RunDir
from lamplighter.train import ranks

_TRANSPORT = (
    "gloo/transport"  # in what gloo says when a connection is lost, or has carried something else than was expected
)


def watch(folder: RunDir) -> None:
    """From here on, in this process."""
    for name in slot.CALLED_BY_ALL:
        function = getattr(dist, name, None)
        if function is not None and not hasattr(function, "_lamplighter"):
            wrapped = _told(name, function, folder)
            for module in (dist, dist.distributed_c10d):
                if getattr(module, name, None) is function:
                    setattr(module, name, wrapped)


def _told(name: str, function: Callable[..., Any], folder: RunDir) -> Callable[..., Any]:
    names = list(inspect.signature(function).parameters)
    place = names.index("group") if "group" in names else len(names)

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group", args[place] if place < len(args) else None)
        if ranks.is_inside() or not dist.is_initialized() or group not in (None, dist.group.WORLD):
            return function(*args, **kwargs)
        what, at = name + _shape((*args, *kwargs.values())), slot.place(slot.users_frame(sys._getframe(1)))
        rank, world = dist.get_rank(), dist.get_world_size()
        try:
            with ranks.inside(), report.collective(what, rank, world, at):
                return function(*args, **kwargs)
        except RuntimeError as error:
            if _TRANSPORT not in str(error) and not isinstance(error, dist.DistError):
                raise  # its arguments are wrong
            _refuse_others(folder, world)
            raise ranks.PeerLost(f"rank {rank} of {world} lost its peers in {what} at {at}: {error}") from error

    told._lamplighter = told._torchdynamo_disable = True  # type: ignore[attr-defined]
    return told


def _shape(values: Iterable[Any]) -> str:
    """Of the first tensor, or list of tensors."""
    for value in values:
        several = f"{len(value)} x " if isinstance(value, (list, tuple)) and value else ""
        tensor = value[0] if several else value
        if isinstance(tensor, torch.Tensor):
            return f" {several}{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    return ""


def _refuse_others(folder: RunDir, world: int) -> None:
    """Whether another rank has come to the same collective with another call: gloo only says that a connection is broken."""
    every = {rank: found for rank in range(world) if (found := slot.read_slot(folder.slot(rank))) is not None}
    if told := slot.differing_calls(every)[1]:
        advice = "make every rank call the same collective with the same shape"
        raise RanksDiffer("the ranks call different collectives", told, advice)
