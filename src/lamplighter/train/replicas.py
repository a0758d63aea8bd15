"""Whether all ranks still hold the same weights: a sum of their bits every so often, told with the votes of a step.

In:  the weights of this rank; what every rank has told.
Out: a verdict that names the rank whose weights are others, or the ranks that differ where no majority tells who is right.

Every rank makes the same update, so what differs was changed by something else: memory that has lost a bit, code that runs on
one rank alone, a processor that rounds otherwise. Nothing in the losses shows it. A rank without a share of the step tells nothing, and adds nothing either.
"""

from __future__ import annotations

from collections import Counter

import torch

from lamplighter.report import Verdict
from lamplighter.train.ranks import World

EVERY_STEPS = 50
_BITS = 24  # that a float of the reduction holds exactly
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIME = 1_000_003


@torch.no_grad()
def votes(world: World, step: int, model: torch.nn.Module) -> list[float]:
    """One number for each rank, of which only this one's is not 0, and that only where a comparison is due: as many in every
    step, so that the buffers of the reduction stay as they are."""
    told = [0.0] * (world.size if world.size > 1 else 0)
    if not told or step % EVERY_STEPS:
        return told
    weights = [one.detach().reshape(-1) for one in model.parameters()]
    sums = torch.stack([one.view(_WORDS.get(one.element_size(), torch.int8)).sum(dtype=torch.int64) for one in weights])
    total = 0
    for part in sums.tolist():
        total = (total * _PRIME + part) % (1 << 61)
    told[world.rank] = float(1 + total % ((1 << _BITS) - 2))  # 0 is for a rank that tells nothing
    return told


def judge(told: list[float], step: int, equal_at: int) -> Verdict | None:
    """Of a comparison before this step; `equal_at`: the last step after which all were the same."""
    known = {rank: value for rank, value in enumerate(told) if value}
    counts = Counter(known.values())
    if len(counts) < 2:
        return None
    (usual, most), *_ = counts.most_common()
    others = [rank for rank, value in known.items() if value != usual]
    named = most > len(known) / 2
    when = f"since a step between {equal_at + 1} and {step}"
    if named:
        who = f"rank {' and rank '.join(map(str, others))}"
        why = f"{who} holds other weights than the {most} others, {when}"
    else:
        why = (
            f"ranks {', '.join(map(str, known))} do not hold the same weights, {when}; no majority tells which is right"
        )
    advice = "look at the memory of that host, for code that changes weights on one rank alone, and for processors of two kinds"
    culprit = {"rank": others[0], "step": step} if named else {"step": step}
    return Verdict("diverged", "rank_weights", why, advice, "stop", culprit=culprit)


def usual(told: list[float]) -> int:
    """The first rank that holds what most hold."""
    known = [value for value in told if value]
    return told.index(Counter(known).most_common(1)[0][0])
