"""A step on several devices: who computes how much of it, what goes over the link, and the buffers that this takes. No torch.

In:  a Job, a Device with its count and its link.
Out: a Share (the busiest rank's), the ranks that stay idle and the setting that would use them, a Reduction in bytes and seconds.

Replicated (train/ranks.py): each rank hands its partial sums over by an all-to-all, adds up one shard of all of them, and the shards
are gathered; two ranks with one sum each take a plain all-reduce. Sharded (FSDP2, one unit a block): the weights are gathered twice
for each micro-batch, once forward and once backward, and gradients are reduced and scattered once for each base node of the tree.
Nothing of it is taken to be overlapped with computing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lamplighter.config import GRADIENT_BYTES
from lamplighter.gpus import Device
from lamplighter.leaves import Division, leaf_size, most_sums, nodes, owned_nodes, subtrees
from lamplighter.plan.job import Job

_LINK_SHARE = 0.7  # of the data sheet's figure: a usual share for large collectives, not measured here


@dataclass(frozen=True)
class Share:
    """What the rank with the most to do computes in a step."""

    leaves: int
    rows: int


@dataclass(frozen=True)
class Reduction:
    """What a device sends or receives in a step, whichever is more, and how long that takes."""

    bytes: float
    seconds: float
    words: str


def share(job: Job, ranks: int) -> Share:
    every = nodes(job.accumulation, job.tree)
    found = []
    for rank in range(min(ranks, len(every))):
        leaves = [leaf for node in owned_nodes(len(every), ranks, rank) for leaf in every[node]]
        rows = sum(min(job.micro_batch, job.batch_size - leaf * job.micro_batch) for leaf in leaves)
        found.append(Share(len(leaves), rows))
    return max(found, key=lambda one: (one.rows, one.leaves))


def idle(job: Job | Division, ranks: int) -> int:
    """Ranks that have nothing to compute: there are more of them than base nodes."""
    return max(0, ranks - job.nodes)


def division_words(job: Job | Division) -> str:
    """What of a step there is to share out."""
    leaves = f"{job.accumulation} micro-batch{'es' if job.accumulation > 1 else ''}"
    parts = f" in {job.tree} part{'s' if job.tree > 1 else ''} (train.tree)"
    return leaves + (parts if job.tree < job.accumulation else "")


def without_idle(job: Job | Division, ranks: int) -> str:
    """The setting with which a new run would use all of them; empty where the batch has too few rows for it."""
    if ranks > job.batch_size:
        return f"--train.batch_size {ranks} --train.micro_batch 1" + (
            f" --train.tree {ranks}" if ranks > job.tree else ""
        )
    words, leaf = [], leaf_size(job.batch_size, ranks)
    if (
        job.accumulation < ranks and math.ceil(job.batch_size / leaf) < ranks
    ):  # 36 rows: 12 ranks with 3 each, 4 with none
        leaf = job.batch_size // ranks
        words = [f"--train.batch_size {leaf * ranks}"]
    words += [f"--train.micro_batch {leaf}"] if job.accumulation < ranks else []
    return " ".join([*words, *([f"--train.tree {ranks}"] if job.tree < ranks else [])])


def idle_words(job: Job | Division, ranks: int) -> str:
    """Which ranks have nothing to compute, why, and what a new run would set; empty where all have something."""
    if not (lazy := idle(job, ranks)):
        return ""
    which = f"rank {job.nodes} stays" if lazy == 1 else f"ranks {job.nodes} to {ranks - 1} stay"
    return f"{which} idle, as a step has {division_words(job)} to share out; for a new run {without_idle(job, ranks)}"


def _partial_sums(job: Job, ranks: int) -> list[int]:
    """How many each rank hands over."""
    return [len(subtrees(job.nodes, owned_nodes(job.nodes, ranks, rank))) for rank in range(ranks)]


def rows_of_nodes(job: Job, ranks: int) -> int:
    """Of a sharded run, whose ranks compute base nodes a row at a time (train/sharding.py)."""
    return math.ceil(job.nodes / ranks)


def kept_sums(job: Job, ranks: int) -> int:
    """Sets of gradients that wait in the tree of one rank at most, while the next one is computed."""
    return max(most_sums(job.nodes, owned_nodes(job.nodes, ranks, rank)) for rank in range(ranks))


def reduction_sets(job: Job, ranks: int) -> float:
    """Sets of gradients that a replicated rank holds at most while they are added up, as train/ranks.py allocates them."""
    if ranks == 1:
        return 0.0
    sums = _partial_sums(job, ranks)
    most = max(sums)
    added = 1 / ranks if sum(sums) > 1 and not _is_plain(sums) else 0.0  # the sum of one shard
    left = 1 if job.nodes == 1 else 0  # a single node's gradients stay in the parameters
    return max(2.0 * most, kept_sets(job, ranks) + added + left)  # as they are and flat; all buffers


def kept_sets(job: Job, ranks: int) -> float:
    """Sets of gradients in the buffers of a replicated rank, which stay from step to step on a CPU."""
    if ranks == 1:
        return 0.0
    sums = _partial_sums(job, ranks)
    most = max(sums)
    if _is_plain(sums):
        return most
    flat = most if most == 1 else 2 * most  # and, of several, in the order in which they are sent
    return flat + sum(sums) / ranks + 1  # the others' shards; the whole


def _is_plain(sums: list[int]) -> bool:
    return sums == [1, 1]


def reduction(job: Job, device: Device) -> Reduction:
    """Of one step."""
    ranks = device.count
    if ranks == 1:
        return Reduction(0.0, 0.0, "")
    gradients, others = float(GRADIENT_BYTES * job.trained), (ranks - 1) / ranks
    sums = _partial_sums(job, ranks)
    if job.sharded:
        leaves = rows_of_nodes(job, ranks) * math.ceil(job.accumulation / job.nodes)
        sent = others * (2 * leaves * job.weight_bytes + rows_of_nodes(job, ranks) * gradients) + gradients / ranks
        words = f"weights gathered {2 * leaves} times, gradients reduced and scattered"
    elif _is_plain(sums):
        sent, words = gradients, "all-reduce"
    else:
        received = max(sum(sums) - own for own in sums) / ranks
        sent = gradients * (max(max(sums) * others, received) + others)
        words = "all-to-all and all-gather"
    if job.optimizer_flops and not job.sharded:  # each rank has whole matrices, and hands the update of them to all
        sent += others * job.hidden * (4 if job.dtype == "fp32" else 2)
        words += ", updates of matrices gathered"
    return Reduction(
        sent, sent / (device.link.bytes_per_s * _LINK_SHARE), f"{words}; {_LINK_SHARE:.0%} of {device.link}"
    )
