"""A fixed binary tree over the micro-batches of a step, by which gradients are summed in one order, whoever computes them.

In:  losses and gradients of base nodes, one after another; how many there are.
Out: their sum, or as much of it as one rank can add up by itself.

Floating-point sums depend on their order, and this order depends on the batch and the settings alone: one rank or eight, the
step has the same bits. The price is one buffer of gradients for each level of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_Sum = list[torch.Tensor | None]  # the loss, then a gradient for each parameter; None: it had none
Node = tuple[
    int, int
]  # of the tree over n base nodes: those from the first number up to the second; (0, n) is the root


def nodes(leaves: int, most: int) -> list[range]:
    """The leaves of each base node: neighbours, as evenly as possible, whatever the number of ranks."""
    count = min(leaves, most)
    return [range(node * leaves // count, (node + 1) * leaves // count) for node in range(count)]


def owned_nodes(count: int, world: int, rank: int) -> range:
    """The base nodes of a rank: neighbours, as evenly as possible; with more ranks than nodes the last ones have none."""
    ranks = min(count, world)
    return range(rank * count // ranks, (rank + 1) * count // ranks) if rank < ranks else range(0)


def _halves(node: Node) -> tuple[Node, Node]:
    """The left one has the largest power of two of base nodes that is below the whole."""
    low, high = node
    middle = low + (1 << ((high - low - 1).bit_length() - 1))
    return (low, middle), (middle, high)


def subtrees(count: int, own: range) -> list[Node]:
    """The largest nodes of the tree that lie inside these base nodes, from left to right."""

    def inside(node: Node) -> list[Node]:
        if own.start <= node[0] and node[1] <= own.stop:
            return [node]
        if node[1] <= own.start or own.stop <= node[0]:
            return []
        return [one for half in _halves(node) for one in inside(half)]

    return inside((0, count)) if own else []


def sum_of(parts: dict[Node, torch.Tensor], node: Node) -> torch.Tensor:
    """Of a node, from those of its parts that are there, in the order of the tree."""
    if node in parts:
        return parts[node]
    left, right = (sum_of(parts, half) for half in _halves(node))
    return left + right


class GradientTree:
    """The sums of the base nodes, each added to its neighbour's as soon as both are there: one for each level at most."""

    def __init__(self, parameters: list[torch.nn.Parameter], nodes: int) -> None:
        self.parameters, self.nodes = parameters, nodes
        self.sums: dict[Node, _Sum] = {}

    def add(self, place: int, loss: torch.Tensor) -> None:
        """The next base node: its loss, and its gradients, which stand in the parameters and are taken out of them."""
        if self.nodes == 1:  # a single node: its gradients stay where they are
            self.sums[0, 1] = [loss]
            return
        found: _Sum = [loss, *(parameter.grad for parameter in self.parameters)]
        for parameter in self.parameters:
            parameter.grad = None
        node: Node = (place, place + 1)
        path = _path_to(node, self.nodes)
        while path:
            left, _ = _halves(parent := path.pop())
            if node == left or left not in self.sums:
                break  # its right neighbour is still to come, or is another rank's
            found, node = _added(self.sums.pop(left), found), parent
        self.sums[node] = found

    def take(self, node: Node) -> _Sum:
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
        left, right = _halves(at)
        at = left if node[1] <= left[1] else right
    return path


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
