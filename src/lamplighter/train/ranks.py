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
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lamplighter import report
from lamplighter.errors import BadConfig
from lamplighter.rundir import RunDir, write_atomic
from lamplighter.slot import MEETING
from lamplighter.train.gradient_tree import GradientTree, Node, owned_nodes, subtrees, sum_of

gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its newer name, where torch has it
_NEVER = timedelta(days=30)  # the parent tells slow from stuck; a timer inside a collective cannot
_CONNECT = timedelta(seconds=5)  # but no order of the parent reaches a rank that connects to one which has just died
_TRIED = "2.13."  # of torch
_FAILED_S = 2.0  # so soon a rank whose timer has fired has said so to those that have lost it by that
_LOOK_S = 0.1
_TOLD_S = 20.0  # how long a rank that has lost a peer waits for the parent, which knows who has died
_inside: set[int] = set()  # threads that are in a collective


class PeerLost(RuntimeError):
    """A collective has failed: another rank is gone, or cannot be reached."""

    of_all_ranks = False  # whether those that are left cannot go on either, and all start again


class NoState(PeerLost):
    """None of the ranks that are left holds the state of a step: all start again, from memory or the durable step."""

    of_all_ranks = True


@dataclass
class World:
    """All ranks of a run, and which of them this process is. Both may change while it runs: when a rank dies or comes back."""

    rank: int = 0
    size: int = 1
    peak_flops: float = 0.0  # of all ranks together, once they have met
    kept: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)  # buffers of the reduction

    def buffer(self, name: str, count: int, device: torch.device) -> torch.Tensor:
        """So many floats; on a CPU the same memory in every step, as taking it anew costs more than filling it. The allocator of
        a GPU keeps memory by itself, for whoever needs it next."""
        if device.type != "cpu":
            return torch.zeros(count, device=device)
        if name not in self.kept or self.kept[name].numel() != count:
            self.kept[name] = torch.zeros(count, device=device)
        return self.kept[name]

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

    On one machine they meet in a file of the run's folder: no port, no name to be resolved. On several, at a port that rank 0
    opens and the parents pass on: the file then holds its address.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    if world.size == 1:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with report.phase("ranks", total=world.size, unit="ranks") as phase, collective(MEETING, world):
        store, again = _store(world, place, phase), 0
        while not _connected(world, PrefixStore(f"meeting {again}", store), backend, phase, _CONNECT * 2**again):
            report.note(f"the ranks have not been connected within {_CONNECT * 2**again}: they meet once more")
            again += 1
    report.number(coll_seq=0)  # counted alike on all ranks, also on those that were there before


def _connected(world: World, store: Store, backend: str, phase: report.Phase, within: timedelta) -> bool:
    """All are there, and each is connected to every other; False where a timer has fired although nobody was lost: a rank that
    gets no core for so long, or was stopped for a while."""
    _wait_for_all(world, store, "here", phase)
    began = time.monotonic()
    try:
        timed = _connect(world, store, backend, within)
    except RuntimeError:
        fired = time.monotonic() - began >= within.total_seconds()
        if not (fired or _has_failed(store)):
            raise
        store.set("failed", "yes")
        return False
    if not _wait_for_all(world, store, "connected", phase):
        dist.destroy_process_group()
        return False
    if timed:
        dist.distributed_c10d._set_pg_timeout(_NEVER)
    return True


def _wait_for_all(world: World, store: Store, what: str, phase: report.Phase) -> bool:
    """Say it of this rank and wait until all have; False where a rank could not connect."""
    store.set(f"{what}{world.rank}", "yes")
    missing: list[int] | None = None
    while missing != []:
        now = [rank for rank in range(world.size) if not store.check([f"{what}{rank}"])]
        _leave_if_told()
        if now and store.check(["failed"]):
            return False
        if now != missing:  # waiting is no work, and is not counted as such
            phase.set(world.size - len(now), f"waiting for rank {', '.join(map(str, now))}" if now else "")
        else:
            time.sleep(_LOOK_S / 5)
        missing = now
    return True


def _connect(world: World, store: Store, backend: str, within: timedelta) -> bool:
    """Make the group; whether with a timer, which gloo alone has while it connects. It is taken off again by private names of
    torch, and an older gloo keeps it for its collectives: in other versions than the one where this was tried nothing is timed,
    and the parent's patience ends a wait for a rank that has died."""
    c10d = dist.distributed_c10d
    timed = backend == "gloo" and torch.__version__.startswith(_TRIED) and hasattr(c10d, "_set_pg_timeout")
    if timed:
        c10d._world.group_count = 0  # the group is named by it, and what came to nothing is counted as well
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=world.rank,
        world_size=world.size,
        timeout=within if timed else _NEVER,
    )
    return timed


def _has_failed(store: Store) -> bool:
    """Whether another rank says that its timer has fired. The store is gone where the rank that has it is."""
    until = time.monotonic() + _FAILED_S
    while time.monotonic() < until:
        _leave_if_told()
        if store.check(["failed"]):
            return True
        time.sleep(_LOOK_S / 5)
    return False


def _leave_if_told() -> None:
    """Who is waited for may have died meanwhile: then the parent has made another world."""
    if report.has_orders():
        raise PeerLost("the parent makes another world")


def _store(world: World, place: Path, phase: report.Phase) -> Store:
    """What the ranks of this world find each other by."""
    host = os.environ.get("LAMP_MEET")
    if host is None:
        return FileStore(str(place), world.size)
    if world.leads:
        kind, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        server = socket.socket(kind, socket.SOCK_STREAM)
        server.bind(where)
        server.listen(128)
        port = server.getsockname()[1]
        store = TCPStore(
            host, port, world.size, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
        write_atomic(place, f"{host} {port}", durable=False)
        return store
    phase.set(0, "waiting for rank 0 to say where the ranks meet")
    while not place.is_file():
        _leave_if_told()
        time.sleep(_LOOK_S / 5)
    named, _, port_there = place.read_text().rpartition(" ")
    return TCPStore(named, int(port_there), world.size, is_master=False, wait_for_workers=False)


def refuse_strangers(world: World, facts: dict[str, str], device: torch.device) -> None:
    """Every rank must have the same data, code and weights; whose facts differ from those of rank 0 is named."""
    if world.size == 1:
        return
    mine = torch.tensor([int(value, 16) >> 1 for value in facts.values()], dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(world.size)]
    with collective("compare", world):
        dist.all_gather(every, mine)
    for rank, theirs in enumerate(every):
        other = [name for name, a, b in zip(facts, theirs.tolist(), every[0].tolist(), strict=True) if a != b]
        if other := _as_named(other):
            raise BadConfig(
                f"rank {rank}{_on_host(rank)} has other {' and other '.join(other)} than rank 0{_on_host(0)}",
                "all ranks must compute the same run",
                "the same files and the same version on every rank",
            )


def _as_named(other: list[str]) -> list[str]:
    """What differs, in words; "data in FILE" says more of "data", and is no difference by itself."""
    files = [name for name in other if " in " in name]
    plain = [name for name in other if name not in files]
    more = {name: [file for file in files if file.startswith(f"{name} in ")] for name in plain}
    return [told for name in plain for told in more[name] or [name]]


def _on_host(rank: int) -> str:
    """Where the run has several machines: which of them."""
    hosts = json.loads(os.environ.get("LAMP_HOSTS", "[]"))
    return f" on {hosts[rank]}" if rank < len(hosts) else ""


def reduce(
    world: World, tree: GradientTree, votes: list[float], native: bool = False
) -> tuple[torch.Tensor, list[float]]:
    """The loss of the step and the sums of all votes; the gradients of all ranks stand in the parameters."""
    if world.size == 1:
        return tree.finish(), votes
    every = [subtrees(tree.nodes, owned_nodes(tree.nodes, world.size, rank)) for rank in range(world.size)]
    with report.span("reduce"), collective("gradients", world):
        whole = (_summed_natively if native else _summed)(world, tree, every, votes)
    head = 1 + len(votes) + len(tree.parameters)
    loss, *told = whole[: 1 + len(votes)].unbind()
    had = whole[1 + len(votes) : head].tolist()
    _put_back(tree, whole[head:], had)
    return loss.clone(), [float(vote) for vote in torch.stack(told).tolist()] if told else []


def _fill(tree: GradientTree, node: Node, votes: list[float], row: torch.Tensor) -> None:
    """loss, votes, which parameters have a gradient, the gradients."""
    loss, *gradients = tree.take(node)
    assert loss is not None
    device = loss.device
    has = torch.tensor([*votes, *(float(one is not None) for one in gradients)], device=device)
    parts = [
        (torch.zeros(parameter.numel(), device=device) if one is None else one.reshape(-1).float())
        for parameter, one in zip(tree.parameters, gradients, strict=True)
    ]
    torch.cat([loss.reshape(1).float(), has, *parts], out=row)


def _summed(world: World, tree: GradientTree, every: list[list[Node]], votes: list[float]) -> torch.Tensor:
    device, mine = tree.parameters[0].device, every[world.rank]
    count = 1 + len(votes) + len(tree.parameters) + sum(parameter.numel() for parameter in tree.parameters)
    shard = -(-count // world.size)
    rows = world.buffer("rows", len(mine) * world.size * shard, device).view(len(mine), world.size * shard)
    for place, (row, node) in enumerate(zip(rows, mine, strict=True)):
        _fill(tree, node, votes if place == 0 else [0.0] * len(votes), row[:count])
    if world.size == 2 and all(len(nodes) == 1 for nodes in every):
        dist.all_reduce(rows[0])  # a sum of two has one order
        return rows[0, :count]
    sent = rows.view(-1)
    if len(mine) > 1:  # by receiver, then by node
        sent = world.buffer("sent", rows.numel(), device)
        sent.view(world.size, len(mine), shard).copy_(rows.view(len(mine), world.size, shard).transpose(0, 1))
    got = world.buffer("got", sum(map(len, every)) * shard, device)
    dist.all_to_all_single(got, sent, [len(nodes) * shard for nodes in every], [len(mine) * shard] * world.size)
    nodes = [node for nodes in every for node in nodes]
    total = sum_of(dict(zip(nodes, got.view(len(nodes), shard), strict=True)), (0, tree.nodes))
    whole = world.buffer("whole", world.size * shard, device)
    gather(whole, total.contiguous())
    return whole[:count]


def _summed_natively(world: World, tree: GradientTree, every: list[list[Node]], votes: list[float]) -> torch.Tensor:
    """By torch's own all_reduce, whose order depends on the number of ranks."""
    device, mine = tree.parameters[0].device, every[world.rank]
    count = 1 + len(votes) + len(tree.parameters) + sum(parameter.numel() for parameter in tree.parameters)
    rows = world.buffer("rows", max(1, len(mine)) * count, device).view(-1, count)
    for place, node in enumerate(mine):
        _fill(tree, node, votes if place == 0 else [0.0] * len(votes), rows[place])
        if place:
            rows[0] += rows[place]
    if not mine:
        rows.zero_()
        rows[0, 1 : 1 + len(votes)] = torch.tensor(votes, device=device)
    dist.all_reduce(rows[0])
    return rows[0]


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
        with report.span("reduce"), collective("validation", world):
            dist.all_reduce(values)
    return values.tolist()


def told_by_first(world: World, number: int, device: torch.device) -> int:
    """What rank 0 says."""
    if world.size == 1:
        return number
    said = torch.tensor([number], dtype=torch.int64, device=device)
    with collective("agree", world):
        dist.broadcast(said, 0)
    return int(said.item())


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """In a collective that the parent sees: what it calls in turn is a part of it."""
    _inside.add(threading.get_ident())
    try:
        yield
    finally:
        _inside.discard(threading.get_ident())


def is_inside() -> bool:
    """Whether this thread is in such a one."""
    return threading.get_ident() in _inside


@contextlib.contextmanager
def collective(name: str, world: World) -> Iterator[None]:
    """Seen by the parent, which names the rank that does not come."""
    with inside(), report.collective(name, world.rank, world.size):
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(f"rank {world.rank} of {world.size} lost its peers in {name}: {error}") from error


def every(world: World, number: int, device: torch.device) -> list[int]:
    """What each rank says, by rank."""
    if world.size == 1:
        return [number]
    said = torch.empty(world.size, dtype=torch.int64, device=device)
    with collective("agree", world):
        gather(said, torch.tensor([number], dtype=torch.int64, device=device))
    return [int(one) for one in said.tolist()]


def hand_over(world: World, holder: int, tensors: list[torch.Tensor]) -> None:
    """These tensors of one rank, into those of all others."""
    with collective("hand over", world):
        for tensor in tensors:
            dist.broadcast(tensor, holder)


def hand_over_text(world: World, holder: int, text: str, device: torch.device) -> str:
    """A text of one rank, for all others."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    size = every(world, len(data), device)[holder]
    if world.rank != holder:
        data = torch.empty(size, dtype=torch.uint8, device=device)
    hand_over(world, holder, [data])
    return bytes(data.tolist()).decode()


def next_world(world: World, folder: RunDir) -> bool:
    """After a loss: which rank this process is from now on, as the parent says. False where it says nothing, or a stop is asked
    for: then this process ends."""
    until = time.monotonic() + _TOLD_S
    with report.phase("ranks", unit="ranks") as phase:
        phase.set(0, "a rank was lost; the parent says who goes on")
        while (order := report.orders(_LOOK_S)) is None:
            if report.stopping() or time.monotonic() > until:
                return False
    os.environ.update(order["environment"])
    if order["rank"] == world.rank:
        report.same_rank(order["attempt"])
    else:
        report.start(folder, order["rank"], order["attempt"])
    world.rank, world.size = order["rank"], order["world"]
    return True
