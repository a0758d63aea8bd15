"""Sharded ranks: each holds some rows of every tensor, of its gradient and of the optimizer's state; whole is only what is computed with.

In:  a model on the CPU, the world; the batch of a step.
Out: the model in units of FSDP2, one for each block; on every rank the step's loss, votes and gradient norm, and the gradients of its
     rows: bit for bit those of one rank that holds everything.

How a step goes. The base nodes of the tree (leaves.py) are dealt out in rows: with four ranks, nodes 0 to 3 are the first row, 4 to 7
the second. A rank computes its node's leaves one after another; with the last one each unit's gradients go to the ranks that hold
their rows (all-to-all), and each rank adds what it gets to the tree, in its order. As a row is a run of neighbours, few sums are
kept: one of a rank's rows for each level of the tree. FSDP gathers weights for every leaf, so every rank must compute as many:
one that has fewer computes the first leaf again, and throws it away.

The norm of a tensor depends on the order of its sum too, so each tensor's gradient is brought together on one rank, which takes its
norm as it would alone; then norms, losses and votes are told in one collective.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lamplighter import report
from lamplighter.config import OptimizerKind
from lamplighter.data.batches import Batch
from lamplighter.errors import BadConfig
from lamplighter.model.recompute import blocks_of
from lamplighter.model.shape import FAMILIES
from lamplighter.model.transformer import Transformer
from lamplighter.model.weights import local, rows_of, stored_tensors, weights
from lamplighter.train import exactness, hardware, ranks
from lamplighter.train.gradient_tree import Node, Sum, nodes, put, sum_of
from lamplighter.train.gradients import micro_batches, micro_loss
from lamplighter.train.optimizers import matrices_and_vectors
from lamplighter.train.parts import Part
from lamplighter.train.ranks import World
from lamplighter.train.state import RunContext


def why_not(model: torch.nn.Module, narrow: bool, optimizer: OptimizerKind) -> str:
    """In words, why this model cannot be sharded; empty where it can."""
    if not isinstance(model, Transformer):
        return f"{type(model).__name__} is none of the families that are built here ({', '.join(FAMILIES)})"
    if optimizer.split == "matrix":
        return f"{optimizer.name} moves whole matrices (train.optimizer)"
    if narrow:
        return "the matrices of the base are narrow (lora.base_dtype), and units of one type are sharded"
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        return f"torch {torch.__version__} has no reduction of one's own for FSDP2 (2.9 has)"
    return ""


@dataclass
class _Row:
    """What the ranks compute at the same time."""

    nodes: range = range(0)  # the base nodes, by rank; fewer than ranks in the last row
    count: int = 1  # base nodes in all
    is_last: bool = True
    discards: bool = False  # what is computed now is nobody's


@dataclass
class _Gather:
    """Of one unit's weights: FSDP2's own all-gather, seen by the parent, which names the rank that does not come."""

    world: World

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with ranks.collective("weights", self.world):
            work: dist.Work | None = ranks.gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


@dataclass
class _Reduction:
    """Of one unit's gradients: what FSDP2 calls in place of its reduce-scatter."""

    row: _Row
    world: World
    native: bool
    sums: dict[Node, Sum] = field(default_factory=dict)

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        row, world = self.row, self.world
        if row.discards:
            output_tensor.zero_()
        elif self.native:
            if world.rank >= len(row.nodes):
                input_tensor.zero_()
            with ranks.collective("gradients", world):
                dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group)
        else:
            got = torch.empty_like(input_tensor)
            with ranks.collective("gradients", world):
                dist.all_to_all_single(got, input_tensor, group=group)
            self._add(got, output_tensor)

    def _add(self, got: torch.Tensor, output: torch.Tensor) -> None:
        row = self.row
        for node, part in zip(row.nodes, got.view(self.world.size, -1), strict=False):
            put(self.sums, row.count, node, [part])
        if row.is_last:
            (total,) = self.sums.pop((0, row.count))
            assert total is not None
            output.copy_(total)
        else:  # only the sums are kept, not what they came in
            self.sums = {node: [one.clone() for one in found if one is not None] for node, found in self.sums.items()}


class Shards:
    """A sharded model, and how its ranks add up a step."""

    def __init__(
        self, model: torch.nn.Module, world: World, device: torch.device, native: bool, apart: bool = False
    ) -> None:
        """Of a whole model, the same on every rank, which have met already; `apart`: on another machine than rank 0."""
        self.model, self.world, self.device, self.native = model, world, device, native
        self.first = exactness.hash_of_all(weights(model))
        shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        leader, attempt = ranks.told_by_first(world, os.getpid(), device), int(os.environ.get("LAMP_ATTEMPT", "1"))
        others = frozenset(rank for rank, is_apart in enumerate(ranks.every(world, int(apart), device)) if is_apart)
        self.row = _Row()
        mesh = init_device_mesh(device.type, (world.size,))
        units = [*blocks_of(model), model]
        for unit in units:
            fully_shard(unit, mesh=mesh)
        for unit in units:
            assert isinstance(unit, FSDPModule)
            unit.set_custom_all_gather(_Gather(world))  # type: ignore[arg-type]
            unit.set_custom_reduce_scatter(_Reduction(self.row, world, native))  # type: ignore[arg-type]
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        self.root: FSDPModule = units[-1]  # type: ignore[assignment]
        self.stored = stored_tensors(model)  # asking a model for its state in the middle of a step would reshard it
        shapes |= {name: tuple(tensor.shape) for name, tensor in self.stored.items()}
        self.part = Part(world.rank, world.size, attempt, leader, shapes, others)
        self.trained = [one for part in matrices_and_vectors(model) for one in part.values()]
        self.owners = _owners([one.numel() for one in self.trained], world.size)

    def held(self) -> dict[str, torch.Tensor]:
        """What this rank holds of the tensors to store."""
        return {name: local(tensor) for name, tensor in self.stored.items()}

    def let_go(self) -> None:
        """After a forward pass that no backward pass follows: what was gathered is stale after the next update."""
        self.root.reshard()

    # ---------------------------------------------------------------- one step

    def step(
        self, context: RunContext, batch: Batch, votes: list[float]
    ) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
        """The loss, the norm of the gradients, the sums of all votes; the gradients of this rank's rows are in the parameters."""
        leaves = micro_batches(batch, context.run.train.micro_batch or context.run.train.batch_size)
        every = nodes(len(leaves), context.run.train.tree)
        losses: dict[int, torch.Tensor] = {}
        for start in range(0, len(every), self.world.size):
            row = range(start, min(start + self.world.size, len(every)))
            self.row.nodes, self.row.count, self.row.is_last = row, len(every), row.stop == len(every)
            own = every[row[self.world.rank]] if self.world.rank < len(row) else range(0)
            longest = max(len(every[node]) for node in row)
            self._compute_again(context, batch, leaves[0], longest - max(1, len(own)))
            found = [self._leaf(context, batch, leaves, leaf, leaf == own[-1]) for leaf in own]
            if not own:  # the ranks meet in the last one
                self._leaf(context, batch, leaves, 0, True)
            if found:
                losses[row[self.world.rank]] = sum(found[1:], found[0])
            if not self.row.is_last and not self.native:
                self._forget()
        return self._tell(losses, len(every), votes)

    def _leaf(
        self, context: RunContext, batch: Batch, leaves: list[slice], leaf: int, hands_over: bool
    ) -> torch.Tensor:
        self.root.set_requires_gradient_sync(hands_over)
        hardware.seed_step(context.run.train.seed, batch.step, leaf)
        part = micro_loss(context, batch, leaves[leaf])
        part.backward()  # type: ignore[no-untyped-call]
        return part.detach()

    def _compute_again(self, context: RunContext, batch: Batch, leaf: slice, times: int) -> None:
        """Where other ranks have more to compute: the same gathers, for nothing."""
        self.row.discards = True
        self.root.set_requires_gradient_sync(True)
        for _ in range(times):
            micro_loss(context, batch, leaf).backward()  # type: ignore[no-untyped-call]
            if not self.native:
                self._forget()
        self.row.discards = False

    def _forget(self) -> None:
        for parameter in self.trained:
            parameter.grad = None

    @torch.no_grad()
    def _tell(
        self, losses: dict[int, torch.Tensor], count: int, votes: list[float]
    ) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
        """Each number is known to one rank, and is a zero in the others' sums."""
        with report.span("reduce"), ranks.collective("norm and votes", self.world):
            norms = self._own_norms()
            told = torch.zeros(count + len(self.trained) + len(votes), device=self.device)
            for place, value in [*losses.items(), *((count + place, norm) for place, norm in norms.items())]:
                told[place] = value
            if votes:
                told[-len(votes) :] = torch.tensor(votes, device=self.device)
            dist.all_reduce(told)
        loss = sum_of({(node, node + 1): told[node] for node in range(count)}, (0, count))
        norm = torch.linalg.vector_norm(told[count : count + len(self.trained)])
        return loss.clone(), norm, told[count + len(self.trained) :].tolist()

    def _own_norms(self) -> dict[int, torch.Tensor]:
        """Of the tensors whose gradients come together here."""
        mine = [place for place, owner in enumerate(self.owners) if owner == self.world.rank]
        got = self._brought_together(mine)
        if self.device.type == "cpu":  # as torch.nn.utils.get_total_norm takes them
            return {place: torch.linalg.vector_norm(one) for place, one in got.items()}
        return dict(zip(got, torch._foreach_norm(list(got.values())), strict=True)) if got else {}

    def _brought_together(self, mine: list[int]) -> dict[int, torch.Tensor]:
        size, rank = self.world.size, self.world.rank
        parts: list[list[torch.Tensor]] = [[] for _ in range(size)]
        for parameter, owner in zip(self.trained, self.owners, strict=True):
            assert parameter.grad is not None, "every tensor of a family that is built here has a gradient"
            parts[owner].append(local(parameter.grad).reshape(-1))
        sent = torch.cat([one for part in parts for one in part])
        sizes = [[self._held_by(place, other) for place in mine] for other in range(size)]
        got = torch.empty(sum(map(sum, sizes)), device=self.device)
        ours = [sum(self._held_by(place, rank) for place in range(len(self.trained)) if self.owners[place] == other) for other in range(size)]  # fmt: skip
        dist.all_to_all_single(got, sent, list(map(sum, sizes)), ours)
        pieces = iter(torch.split(got, [one for part in sizes for one in part]))
        by_rank = [[next(pieces) for _ in mine] for _ in range(size)]
        return {
            place: torch.cat([by_rank[other][number] for other in range(size)]).view(self.trained[place].shape)
            for number, place in enumerate(mine)
        }

    def _held_by(self, place: int, rank: int) -> int:
        """Numbers of a tensor that a rank holds."""
        shape = self.trained[place].shape
        rows = rows_of(shape[0], self.world.size, rank)
        return int((rows.stop - rows.start) * shape[1:].numel())


def _owners(sizes: list[int], ranks: int) -> list[int]:
    """On which rank each tensor's gradient comes together: the largest first, to the one that has least."""
    loads, owners = [0] * ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


def refuse(why: str) -> BadConfig:
    return BadConfig("this run cannot be sharded", why, "--train.shard none")
