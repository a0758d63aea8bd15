"""Which micro-batches of a step are whose: the leaves, the base nodes of the tree that adds up their gradients, each rank's part. No torch.

In:  how many leaves, ranks and base nodes there are.
Out: the same answer for the plan and for training (train/gradient_tree.py adds up by it).
"""

from __future__ import annotations

from dataclasses import dataclass

Node = tuple[
    int, int
]  # of the tree over n base nodes: those from the first number up to the second; (0, n) is the root


@dataclass(frozen=True)
class Division:
    """A batch, as far as sharing it out needs it."""

    batch_size: int
    micro_batch: int
    tree: int  # base nodes at most

    @property
    def accumulation(self) -> int:
        return -(-self.batch_size // self.micro_batch)

    @property
    def nodes(self) -> int:
        return min(self.accumulation, self.tree)


def leaf_size(batch_size: int, ranks: int) -> int:
    """Rows of a micro-batch where train.micro_batch is not given: as many micro-batches as ranks, or one for each row."""
    return -(-batch_size // min(ranks, batch_size))


def nodes(leaves: int, most: int) -> list[range]:
    """The leaves of each base node: neighbours, as evenly as possible, whatever the number of ranks."""
    count = min(leaves, most)
    return [range(node * leaves // count, (node + 1) * leaves // count) for node in range(count)]


def owned_nodes(count: int, world: int, rank: int) -> range:
    """The base nodes of a rank: neighbours, as evenly as possible; with more ranks than nodes the last ones have none."""
    ranks = min(count, world)
    return range(rank * count // ranks, (rank + 1) * count // ranks) if rank < ranks else range(0)


def halves(node: Node) -> tuple[Node, Node]:
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
        return [one for half in halves(node) for one in inside(half)]

    return inside((0, count)) if own else []


def most_sums(count: int, own: range) -> int:
    """Sums of gradients that a rank keeps at most while it computes its next base node."""
    return max((len(subtrees(count, range(own.start, place))) for place in own), default=0)
