"""A fixed binary tree over the micro-batches of a step, by which gradients are summed in one order, whoever computes them.

In:  losses and gradients of base nodes, one after another; how many there are.
Out: their sum, or as much of it as one rank can add up by itself.

Floating-point sums depend on their order, and this order depends on the batch and the settings alone: one rank or eight, the
step has the same bits. The price is one buffer of gradients for each level of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lamplighter.leaves import Node as Node
from lamplighter.leaves import halves
from lamplighter.leaves import nodes as nodes
from lamplighter.leaves import owned_nodes as owned_nodes
from lamplighter.leaves import subtrees as subtrees

Sum = list[torch.Tensor | None]  # the loss, then a gradient for each parameter; None: it had none


def sum_of(parts: dict[Node, torch.Tensor], node: Node) -> torch.Tensor:
    """Of a node, from those of its parts that are there, in the order of the tree."""
    if node in parts:
        return parts[node]
    left, right = (sum_of(parts, half) for half in halves(node))
    return left + right


def put(sums: dict[Node, Sum], nodes: int, place: int, found: Sum) -> None:
    """The next base node, from left to right, into the sums so far; its memory is used for them."""
    node: Node = (place, place + 1)
    path = _path_to(node, nodes)
    while path:
        left, _ = halves(parent := path.pop())
        if node == left or left not in sums:
            break  # its right neighbour is still to come, or is another rank's
        found, node = _added(sums.pop(left), found), parent
    sums[node] = found


class GradientTree:
    """The sums of the base nodes, each added to its neighbour's as soon as both are there: one for each level at most."""

    def __init__(self, parameters: list[torch.nn.Parameter], nodes: int) -> None:
        self.parameters, self.nodes = parameters, nodes
        self.sums: dict[Node, Sum] = {}

    def add(self, place: int, loss: torch.Tensor) -> None:
        """The next base node: its loss, and its gradients, which stand in the parameters and are taken out of them."""
        if self.nodes == 1:  # a single node: its gradients stay where they are
            self.sums[0, 1] = [loss]
            return
        found: Sum = [loss, *(parameter.grad for parameter in self.parameters)]
        for parameter in self.parameters:
            parameter.grad = None
        put(self.sums, self.nodes, place, found)

    def take(self, node: Node) -> Sum:
        """What is summed up of a node, the loss first."""
        if self.nodes == 1:
            return [self.sums[node][0], *(parameter.grad for parameter in self.parameters)]
        return self.sums.pop(node)

    def finish(self) -> torch.Tensor:
        """The loss of all nodes; their gradients are in the parameters."""
        loss, *gradients = self.sums.pop((0, self.nodes))
        for parameter, gradient in zip(self.parameters, gradients, strict=False):
            parameter.grad = gradient
        assert loss is not None
        return loss


def _path_to(node: Node, count: int) -> list[Node]:
    """The nodes above it, from the root down."""
    path, at = [], (0, count)
    while at != node:
        path.append(at)
        left, right = halves(at)
        at = left if node[1] <= left[1] else right
    return path


@torch.no_grad()
def _added(left: Sum, right: Sum) -> Sum:
    """Left plus right, in the memory of the left one."""
    both = list(_pairs(left, right))
    torch._foreach_add_([one for one, _ in both], [other for _, other in both])
    return [other if one is None else one for one, other in zip(left, right, strict=True)]


def _pairs(left: Sum, right: Sum) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for one, other in zip(left, right, strict=True):
        if one is not None and other is not None:
            yield one, other
