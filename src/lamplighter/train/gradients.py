"""The loss of a batch and the gradients of a step: leaf by leaf, added up by a fixed binary tree.

In:  a RunContext, a Batch.
Out: a GradientTree with what this rank has computed of the step: the mean loss over all its real tokens, and the gradients.

A leaf is a micro-batch: what one device holds at once. The leaves of a step are divided into at most `train.tree` base nodes of
neighbouring leaves. Inside a node gradients are added one leaf after another; the sums of the nodes are added pairwise, as a
binary tree (gradient_tree.py), by one rank or by several (ranks.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from lamplighter.data.batches import Batch, Int64s
from lamplighter.model import varlen
from lamplighter.model.chunked_loss import Counted
from lamplighter.model.transformer import Transformer, token_loss, token_losses
from lamplighter.train import hardware, preference
from lamplighter.train.gradient_tree import GradientTree, nodes
from lamplighter.train.state import RunContext


def micro_batches(batch: Batch, size: int) -> list[slice]:
    """The rows of each micro-batch; where a pair has two rows, both."""
    size *= batch.pairs.rows_each if batch.pairs is not None else 1
    return [slice(start, start + size) for start in range(0, len(batch.inputs), size)]


def batch_loss(
    model: torch.nn.Module,
    batch: Batch,
    machine: hardware.Machine,
    *,
    whole: bool = False,
    scale: float | torch.Tensor = 1.0,
    rows: slice = slice(None),
    notes: preference.Notes | None = None,
    leaf: int = 0,
) -> torch.Tensor:
    """`scale` times the summed loss of some rows of a batch, on the run's device and in its precision.

    Of preference pairs, `notes` gets what is told of them besides, under the number of the leaf.
    """
    if batch.pairs is not None:
        nats_N, answers_N = answer_nats(model, batch, machine, whole=whole, rows=rows)
        loss, told = preference.pair_loss(nats_N, answers_N, batch.pairs)
        if notes is not None:
            notes.sums[leaf] = told
        return loss * scale
    here, packed = _on_device(model, batch, machine, whole=whole, rows=rows)
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


def answer_nats(
    model: torch.nn.Module, batch: Batch, machine: hardware.Machine, *, whole: bool = False, rows: slice = slice(None)
) -> tuple[torch.Tensor, Int64s]:
    """The loss of each learned token of some rows of pairs, and the number of the answer that it belongs to."""
    assert batch.pairs is not None
    here, packed = _on_device(model, batch, machine, whole=whole, rows=rows)
    with machine.precision():
        nats_N = token_losses(
            model,
            here["ids"],
            here["targets"],
            here.get("segments"),
            whole=whole,
            counted=Counted(here.get("places")),
            varlen=packed,
        )
    return nats_N, batch.pairs.answers[rows][batch.targets[rows] >= 0]


def _on_device(
    model: torch.nn.Module, batch: Batch, machine: hardware.Machine, *, whole: bool, rows: slice
) -> tuple[dict[str, torch.Tensor], varlen.VarlenRows | None]:
    """Some rows of a batch where the model is."""
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
    return here, packed


def micro_loss(
    context: RunContext, batch: Batch, rows: slice, notes: preference.Notes | None = None, leaf: int = 0
) -> torch.Tensor:
    """The share of these rows in the mean loss over all real tokens (or pairs) of the step; in fp16 times the loss scale."""
    whole, scale = context.run.train.loss == "whole", 1 / batch.real_tokens
    scaled = scale if context.loss_scale is None else context.loss_scale.scale * scale
    return batch_loss(
        context.model, batch, context.machine, whole=whole, scale=scaled, rows=rows, notes=notes, leaf=leaf
    )


def forward_backward(
    context: RunContext, batch: Batch, begun: torch.Tensor | None = None, notes: preference.Notes | None = None
) -> GradientTree:
    """The gradients and losses of all leaves that this rank computes, summed up as far as it can.

    `begun`: the loss of the step's first leaf, whose gradients are there already. `notes`: of pairs, filled.
    """
    train = context.run.train
    leaves = micro_batches(batch, train.micro_batch or train.batch_size)
    every = nodes(len(leaves), train.tree)
    tree = GradientTree([p for p in context.model.parameters() if p.requires_grad], len(every))
    for place in context.world.node_range(len(every)):
        node = every[place]
        total = begun if node.start == 0 else None
        for leaf in node[1:] if total is not None else node:
            hardware.seed_step(train.seed, batch.step, leaf)
            part = micro_loss(context, batch, leaves[leaf], notes, leaf)
            part.backward()  # type: ignore[no-untyped-call]
            total = part.detach() if total is None else total + part.detach()
        assert total is not None
        tree.add(place, total)
    return tree


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
        if context.shards is not None:
            context.shards.let_go()
    return found[0] if found else ""
