"""Validation during a run: loss per token, per document and bits per byte, beside the entropy bound where one is known.

In:  the model, a BatchSource, the loss of a batch.
Out: a Score; every held-out token is predicted exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lamplighter import report
from lamplighter.data.batch_source import BatchSource
from lamplighter.data.batches import Batch
from lamplighter.train import ranks
from lamplighter.train.parts import Sharded
from lamplighter.train.ranks import ALONE, World


@dataclass(frozen=True)
class EntropyBound:
    """What no model can beat: the entropy of the very documents that are validated on."""

    nats_per_document: float
    standard_error: float
    nats_per_token: float
    documents: int


@dataclass(frozen=True)
class Score:
    """Loss over the held-out windows that were used."""

    loss: float  # nats per token; of preference pairs, the mean over pairs
    tokens: int  # or pairs
    whole: bool  # all windows were used
    documents: int
    text_bytes: float
    batches: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def bits_per_byte(self, split_tokens: int) -> float:
        return self.loss / math.log(2) * split_tokens / self.text_bytes if self.text_bytes else math.nan

    @property
    def nats_per_document(self) -> float | None:
        return self.loss * self.tokens / self.documents if self.whole and self.documents else None

    def words(self, bound: EntropyBound | None, bpb: float) -> str:
        text = f"loss {self.loss:.4f}, perplexity {self.perplexity:.2f}, {bpb:.3f} bits per byte"
        each = self.nats_per_document
        if bound is not None and each is not None:
            over = each / bound.nats_per_document - 1
            text += f"; {each:.1f} nats per document, the floor is {bound.nats_per_document:.1f} ({over:+.1%})"
        return text


@torch.no_grad()
def validate(
    model: torch.nn.Module,
    source: BatchSource,
    loss_of: Callable[[Batch], torch.Tensor],
    *,
    rows: int,
    windows: int,
    world: World = ALONE,
    shards: Sharded | None = None,
) -> Score:
    """Score what is held out, in order, so many rows at a time; `windows` 0 = all. Ranks take turns, and the losses of all
    batches are added in their order, so that the score does not depend on how many ranks there are.
    """
    data, limit = source.describe(), windows or None
    held_out = data.held_out
    used = min(held_out.samples, limit) if limit else held_out.samples
    was_training = model.training
    model.eval()
    losses: dict[int, torch.Tensor] = {}  # they stay on the device until the end: no batch waits for another's number
    tokens = count = 0
    try:
        with report.phase("evaluate", total=used, unit=data.noun) as phase:
            for batch in source.validation(rows, limit):
                if count % world.size == world.rank:
                    losses[count] = loss_of(batch)
                tokens, count = tokens + batch.real_tokens, count + 1
                phase.tick(len(batch.inputs))
            if shards is not None and 0 < count % world.size <= world.rank:
                loss_of(batch)  # for nothing: weights are gathered by all ranks together
    finally:
        model.train(was_training)
        if shards is not None:
            shards.let_go()
    device = next(iter(model.parameters())).device
    total = sum(ranks.sum_in_order(world, losses, count, device))
    return Score(
        total / max(1, tokens), tokens, used == held_out.samples, held_out.documents, held_out.text_bytes, count
    )
