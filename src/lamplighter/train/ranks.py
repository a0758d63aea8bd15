"""Ranks: one process per device, each with the whole model, that share out the micro-batches of every step.

In:  the rank and the world's size, a folder to meet in; the sums of the base nodes that a rank has computed (gradients.py).
Out: on every rank the same gradients, loss and votes, bit for bit those of one rank.

Floating-point sums depend on their order, so ranks do not simply add up what they have. The micro-batches of a step are
leaves of a fixed binary tree; a rank owns neighbouring nodes of it and hands over its partial sums, each rank adds up one
shard of all of them in the order of the tree, and the shards are gathered. The bytes are those of a ring all-reduce.

Votes (a stop that one rank was asked for, a budget that is spent) ride in the same buffer: one collective a step, and no rank
can come to another decision than its peers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from lamplighter import report
from lamplighter.errors import BadConfig
from lamplighter.train.gradient_tree import GradientTree, Node, owned_nodes, subtrees, sum_of

_NEVER = timedelta(days=30)  # the parent tells slow from stuck; a timer inside a collective cannot
_LOOK_S = 0.1
_KILLED_S = 20.0  # how long a rank that has lost a peer waits for the parent, which knows who has died


class PeerLost(RuntimeError):
    """A collective has failed: another rank is gone, or cannot be reached."""


@dataclass(frozen=True)
class World:
    """All ranks of a run, and which of them this process is."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this rank speaks, saves and samples for all."""
        return self.rank == 0

    def node_range(self, nodes: int) -> range:
        """The base nodes of the tree that this rank computes."""
        return owned_nodes(nodes, self.size, self.rank)


ALONE = World()


def world_of(environ: dict[str, str] | os._Environ[str]) -> World:
    """As the parent has set it for this process."""
    return World(int(environ.get("LAMP_RANK", "0")), int(environ.get("LAMP_WORLD", "1")))


def meet(world: World, place: Path, backend: str) -> None:
    """Wait for all ranks, saying who is missing; then make the group that collectives run in.

    They meet in a file of the run's folder: no port, no name to be resolved.
    """
    if world.size == 1:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = FileStore(str(place), world.size)
    store.set(f"rank{world.rank}", "here")
    with report.phase("ranks", total=world.size, unit="ranks") as phase, _collective("rendezvous", world):
        missing = list(range(world.size))
        while missing:
            missing = [rank for rank in missing if not store.check([f"rank{rank}"])]
            phase.set(world.size - len(missing), f"waiting for rank {', '.join(map(str, missing))}" if missing else "")
            if missing:
                time.sleep(_LOOK_S)
        dist.init_process_group(
            backend, store=PrefixStore("group", store), rank=world.rank, world_size=world.size, timeout=_NEVER
        )


def refuse_strangers(world: World, facts: dict[str, str], device: torch.device) -> None:
    """Every rank must have the same data, code and weights; whose facts differ from those of rank 0 is named."""
    if world.size == 1:
        return
    mine = torch.tensor([int(value, 16) >> 1 for value in facts.values()], dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(world.size)]
    with _collective("compare", world):
        dist.all_gather(every, mine)
    for rank, theirs in enumerate(every):
        other = [name for name, a, b in zip(facts, theirs.tolist(), every[0].tolist(), strict=True) if a != b]
        if other:
            raise BadConfig(
                f"rank {rank} has other {' and other '.join(other)} than rank 0",
                "all ranks must compute the same run",
                "the same files and the same version on every rank",
            )


def reduce(world: World, tree: GradientTree, votes: list[float]) -> tuple[torch.Tensor, list[float]]:
    """The loss of the step and the sums of all votes; the gradients of all ranks stand in the parameters."""
    if world.size == 1:
        return tree.finish(), votes
    every = [subtrees(tree.nodes, owned_nodes(tree.nodes, world.size, rank)) for rank in range(world.size)]
    mine = [
        _flat(tree, node, votes if place == 0 else [0.0] * len(votes)) for place, node in enumerate(every[world.rank])
    ]
    with report.span("reduce"), _collective("gradients", world):
        whole = _summed(world, tree, every, mine, len(votes))
    head = 1 + len(votes) + len(tree.parameters)
    loss, *told = whole[: 1 + len(votes)].unbind()
    had = whole[1 + len(votes) : head].tolist()
    _put_back(tree, whole[head:], had)
    return loss.clone(), [float(vote) for vote in torch.stack(told).tolist()] if told else []


def _flat(tree: GradientTree, node: Node, votes: list[float]) -> torch.Tensor:
    """loss, votes, which parameters have a gradient, the gradients."""
    loss, *gradients = tree.take(node)
    assert loss is not None
    device = loss.device
    has = torch.tensor([*votes, *(float(one is not None) for one in gradients)], device=device)
    parts = [
        (torch.zeros(parameter.numel(), device=device) if one is None else one.reshape(-1).float())
        for parameter, one in zip(tree.parameters, gradients, strict=True)
    ]
    return torch.cat([loss.reshape(1).float(), has, *parts])


def _summed(
    world: World, tree: GradientTree, every: list[list[Node]], mine: list[torch.Tensor], votes: int
) -> torch.Tensor:
    device = tree.parameters[0].device
    count = 1 + votes + len(tree.parameters) + sum(parameter.numel() for parameter in tree.parameters)
    if world.size == 2 and all(len(nodes) == 1 for nodes in every):
        dist.all_reduce(mine[0])  # a sum of two has one order
        return mine[0]
    shard = -(-count // world.size)
    sent = torch.zeros(len(mine), world.size * shard, device=device)
    for row, flat in zip(sent, mine, strict=True):
        row[:count] = flat
    sent = sent.view(len(mine), world.size, shard).transpose(0, 1).contiguous().view(-1)
    got = torch.empty(sum(map(len, every)) * shard, device=device)
    dist.all_to_all_single(got, sent, [len(nodes) * shard for nodes in every], [len(mine) * shard] * world.size)
    nodes = [node for nodes in every for node in nodes]
    total = sum_of(dict(zip(nodes, got.view(len(nodes), shard), strict=True)), (0, tree.nodes))
    whole = torch.empty(world.size * shard, device=device)
    dist.all_gather_into_tensor(whole, total.contiguous())
    return whole[:count]


def _put_back(tree: GradientTree, gradients: torch.Tensor, had: list[float]) -> None:
    sizes = [parameter.numel() for parameter in tree.parameters]
    for parameter, gradient, has in zip(tree.parameters, torch.split(gradients, sizes), had, strict=True):
        parameter.grad = gradient.view_as(parameter) if has else None


def sum_in_order(world: World, own: dict[int, torch.Tensor], count: int, device: torch.device) -> list[float]:
    """Of numbers that each rank has some of, all of them, in their order: what belongs to another is a zero in the sum."""
    values = torch.zeros(count, device=device)
    for place, value in own.items():
        values[place] = value
    if world.size > 1:
        with report.span("reduce"), _collective("validation", world):
            dist.all_reduce(values)
    return values.tolist()


def told_by_first(world: World, number: int, device: torch.device) -> int:
    """What rank 0 says."""
    if world.size == 1:
        return number
    said = torch.tensor([number], dtype=torch.int64, device=device)
    with _collective("agree", world):
        dist.broadcast(said, 0)
    return int(said.item())


@contextlib.contextmanager
def _collective(name: str, world: World) -> Iterator[None]:
    """Seen by the parent, which names the rank that does not come."""
    with report.collective(name, world.rank, world.size):
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(f"rank {world.rank} of {world.size} lost its peers in {name}: {error}") from error


def wait_for_the_parent() -> None:
    """A peer is gone. The parent knows which and ends this process too; without it, this process ends by itself."""
    time.sleep(_KILLED_S)
