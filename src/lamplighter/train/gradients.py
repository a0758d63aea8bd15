"""The loss of a batch and the gradients of a step: leaf by leaf, added up by a fixed binary tree.

In:  a RunContext, a Batch.
Out: the mean loss over all real tokens of the step, on its device; the gradients, in the parameters.

A leaf is a micro-batch: what one device holds at once. The leaves of a step are divided into at most `train.tree` base nodes of
neighbouring leaves. Inside a node gradients are added one leaf after another; the sums of the nodes are added pairwise, as a
binary tree. Floating-point sums depend on their order, and this order depends on the batch and the settings alone: whoever
computes a node, one rank or eight, the step has the same bits. The price is one buffer of gradients for each level of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from lamplighter.data.batches import Batch
from lamplighter.model import varlen
from lamplighter.model.chunked_loss import Counted
from lamplighter.model.transformer import Transformer, token_loss
from lamplighter.train import hardware
from lamplighter.train.state import RunContext

_Sum = list[torch.Tensor | None]  # the loss, then a gradient for each parameter; None: it had none


def micro_batches(batch: Batch, size: int) -> list[slice]:
    """The rows of each micro-batch."""
    return [slice(start, start + size) for start in range(0, len(batch.inputs), size)]


def batch_loss(
    model: torch.nn.Module,
    batch: Batch,
    machine: hardware.Machine,
    *,
    whole: bool = False,
    scale: float | torch.Tensor = 1.0,
    rows: slice = slice(None),
) -> torch.Tensor:
    """`scale` times the summed loss of some rows of a batch, on the run's device and in its precision."""
    targets, segments = batch.targets[rows], None if batch.segments is None else batch.segments[rows]
    parts = {"ids": batch.inputs[rows], "targets": targets}
    if segments is not None:
        parts["segments"] = segments
        if isinstance(model, Transformer) and not whole and machine.has_varlen(model.shape):
            parts["positions"], parts["bounds"] = varlen.layout(segments)
    places = np.flatnonzero(targets >= 0)
    if len(places) < targets.size:  # prompts and padding are left out before the last matrix
        parts["places"] = places
    here = dict(zip(parts, machine.copied(*parts.values()), strict=True))
    packed = None
    if "bounds" in here:
        packed = varlen.VarlenRows(here["positions"], here["bounds"].int(), longest=targets.shape[1])
    with machine.precision():
        return token_loss(
            model,
            here["ids"],
            here["targets"],
            here.get("segments"),
            whole=whole,
            scale=scale,
            counted=Counted(here.get("places")),
            varlen=packed,
        )


def micro_loss(context: RunContext, batch: Batch, rows: slice) -> torch.Tensor:
    """The share of these rows in the mean loss over all real tokens of the step; in fp16 times the loss scale."""
    whole, scale = context.run.train.loss == "whole", 1 / batch.real_tokens
    scaled = scale if context.loss_scale is None else context.loss_scale.scale * scale
    return batch_loss(context.model, batch, context.machine, whole=whole, scale=scaled, rows=rows)


def nodes(leaves: int, most: int) -> list[range]:
    """The leaves of each base node: neighbours, as evenly as possible, whatever the number of ranks."""
    count = min(leaves, most)
    return [range(node * leaves // count, (node + 1) * leaves // count) for node in range(count)]


def forward_backward(context: RunContext, batch: Batch, begun: torch.Tensor | None = None) -> torch.Tensor:
    """The loss of the step, with the gradients of all its leaves summed up in the parameters.

    `begun`: the loss of its first leaf, whose gradients are there already.
    """
    train = context.run.train
    leaves = micro_batches(batch, train.micro_batch or train.batch_size)
    tree = GradientTree([p for p in context.model.parameters() if p.requires_grad])
    for node in nodes(len(leaves), train.tree):
        total = begun if node.start == 0 else None
        for leaf in node[1:] if total is not None else node:
            hardware.seed_step(train.seed, batch.step, leaf)
            part = micro_loss(context, batch, leaves[leaf])
            part.backward()  # type: ignore[no-untyped-call]
            total = part.detach() if total is None else total + part.detach()
        assert total is not None
        tree.add(total, last=node.stop == len(leaves))
    return tree.finish()


class GradientTree:
    """The sums of the base nodes, added pairwise as they come: like a binary counter, one sum for each level at most.

    Of a number of nodes that is no power of two the left part of every pair is the largest power of two that is below.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.sums: list[tuple[int, _Sum]] = []  # with how many nodes are in each: falling powers of two

    def add(self, loss: torch.Tensor, last: bool = False) -> None:
        """The next node: its loss, and its gradients, which stand in the parameters and are taken out of them."""
        if last and not self.sums:  # a single node: its gradients stay where they are
            self.sums.append((1, [loss]))
            return
        found: _Sum = [loss, *(parameter.grad for parameter in self.parameters)]
        for parameter in self.parameters:
            parameter.grad = None
        count = 1
        while self.sums and self.sums[-1][0] == count:
            found = _added(self.sums.pop()[1], found)
            count *= 2
        self.sums.append((count, found))

    def finish(self) -> torch.Tensor:
        """The loss of all nodes; their gradients are in the parameters."""
        _, found = self.sums.pop()
        while self.sums:
            found = _added(self.sums.pop()[1], found)
        loss, *gradients = found
        for parameter, gradient in zip(self.parameters, gradients, strict=False):
            parameter.grad = gradient
        assert loss is not None
        return loss


@torch.no_grad()
def _added(left: _Sum, right: _Sum) -> _Sum:
    """Left plus right, in the memory of the left one."""
    both = list(_pairs(left, right))
    torch._foreach_add_([one for one, _ in both], [other for _, other in both])
    return [other if one is None else one for one, other in zip(left, right, strict=True)]


def _pairs(left: _Sum, right: _Sum) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for one, other in zip(left, right, strict=True):
        if one is not None and other is not None:
            yield one, other


@torch.no_grad()
def first_bad_module(context: RunContext, batch: Batch) -> str:
    """The first module whose output is not finite, found by one more forward pass with the same random numbers."""
    train = context.run.train
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, _inputs: object, output: object) -> None:
            if not found and isinstance(output, torch.Tensor) and not bool(torch.isfinite(output).all()):
                found.append(name or type(context.model).__name__)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in context.model.named_modules()]
    try:
        for micro, rows in enumerate(micro_batches(batch, train.micro_batch or train.batch_size)):
            hardware.seed_step(train.seed, batch.step, micro)
            micro_loss(context, batch, rows)
            if found:
                break
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""
