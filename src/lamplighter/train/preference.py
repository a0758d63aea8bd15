"""Preference pairs (DPO): the loss of a pair, and what is told of a step besides it.

In:  the loss of each learned token, which answer it belongs to, what the reference model gave each answer.
Out: the sum of the pairs' losses; rewards, accuracy and log-probabilities, added over leaves and ranks in one order.

-log sigmoid(beta ((log p(chosen) - log r(chosen)) - (log p(rejected) - log r(rejected)))), Rafailov et al. 2023. r is the model
before the first step, so the first loss is ln 2. The reward of an answer is beta (log p - log r).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lamplighter.data.batches import Int64s, Pairs
from lamplighter.train import ranks
from lamplighter.train.ranks import World

CHANCE = math.log(2)
_SUMS = ("pairs", "reward_chosen", "reward_rejected", "reward_accuracy", "logp_chosen", "logp_rejected")


@dataclass
class Notes:
    """Sums over the pairs of some leaves (or batches of validation), by the leaf's number."""

    sums: dict[int, Tensor] = field(default_factory=dict)

    def means(self, world: World, leaves: int, device: torch.device) -> dict[str, float]:
        """Over the pairs of all leaves of all ranks; the same on any number of ranks."""
        size = len(_SUMS)
        own = {leaf * size + n: one for leaf, sums in self.sums.items() for n, one in enumerate(sums.unbind())}
        values = np.array(ranks.sum_in_order(world, own, leaves * size, device)).reshape(leaves, size).sum(0)
        count, *sums = values.tolist()
        if not count:
            return {}
        found = {name: one / count for name, one in zip(_SUMS[1:], sums, strict=True)}
        return found | {"reward_margin": found["reward_chosen"] - found["reward_rejected"]}


def answer_logps(nats_N: Tensor, answers_N: Int64s) -> tuple[Int64s, Tensor]:
    """(number of each answer, in order; its log-probability, in float64) from the loss of each of its tokens."""
    numbers, index = np.unique(answers_N, return_inverse=True)
    place_N = torch.from_numpy(index.reshape(-1)).to(nats_N.device)
    sums = torch.zeros(len(numbers), dtype=torch.float64, device=nats_N.device)
    return numbers, sums.index_add(0, place_N, -nats_N.double())


def pair_loss(nats_N: Tensor, answers_N: Int64s, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """(the summed loss of the pairs, the sums that are told of them)."""
    numbers, logps = answer_logps(nats_N, answers_N)
    assert pairs.reference is not None, "the reference model comes before the first step"
    assert len(numbers) % 2 == 0 and not (numbers[::2] % 2).any(), "a pair is never split"
    logps_P2 = logps.view(-1, 2)
    known_P2 = torch.from_numpy(pairs.reference[numbers]).to(logps.device).view(-1, 2)
    rewards_P2 = pairs.beta * (logps_P2 - known_P2)
    margins = rewards_P2[:, 0] - rewards_P2[:, 1]
    loss = -functional.logsigmoid(margins).sum()
    with torch.no_grad():
        count = torch.full((1,), float(len(margins)), dtype=torch.float64, device=logps.device)
        told = torch.cat([count, rewards_P2.sum(0), (margins > 0).double().sum()[None], logps_P2.sum(0)])
    return loss.float(), told.float()


def words(loss: float, means: dict[str, float]) -> str:
    """Of a validation."""
    told = f"{means['reward_accuracy']:.1%} of the pairs as in the data, reward margin {means['reward_margin']:.3f}"
    return f"loss {loss:.4f} (chance {CHANCE:.4f}), {told}"
