"""Validation during a run: nats per token, per document and bits per byte, beside the floor where one is known.

In:  the model, the feed's validation batches.
Out: a Score; every validation token is predicted exactly once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lamplighter import report
from lamplighter.data.batch_source import Feed
from lamplighter.data.batches import Int64s
from lamplighter.model.transformer import Transformer, next_token_loss
from lamplighter.train.hardware import Machine


@dataclass(frozen=True)
class Floor:
    """What no model can beat: the mean over the very documents that are validated on."""

    nats_per_document: float
    standard_error: float
    nats_per_token: float
    documents: int


@dataclass(frozen=True)
class Score:
    """Loss over the validation windows that were used."""

    loss: float  # nats per token
    tokens: int
    whole: bool  # all windows were used
    documents: int
    text_bytes: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def bits_per_byte(self, split_tokens: int) -> float:
        return self.loss / math.log(2) * split_tokens / self.text_bytes if self.text_bytes else math.nan

    @property
    def nats_per_document(self) -> float | None:
        return self.loss * self.tokens / self.documents if self.whole and self.documents else None

    def words(self, floor: Floor | None, bpb: float) -> str:
        text = f"loss {self.loss:.4f}, perplexity {self.perplexity:.2f}, {bpb:.3f} bits per byte"
        each = self.nats_per_document
        if floor is not None and each is not None:
            over = each / floor.nats_per_document - 1
            text += f"; {each:.1f} nats per document, the floor is {floor.nats_per_document:.1f} ({over:+.1%})"
        return text


def look(model: torch.nn.Module, ids: torch.Tensor, segments: Int64s | None, rows: slice = slice(None)) -> torch.Tensor:
    """The logits of some rows; packed examples do not see each other."""
    apart = {} if segments is None else {"segments_BT": torch.from_numpy(segments[rows]).to(ids.device)}
    logits: torch.Tensor = model(ids, **apart)
    return logits


def nats(
    model: torch.nn.Module,
    ids: torch.Tensor,
    targets: torch.Tensor,
    segments: Int64s | None,
    whole: bool,
    scale: float = 1.0,
    rows: slice = slice(None),
) -> torch.Tensor:
    """`scale` times the sum of nats over the targets: a few rows of logits at a time, or all of them as a whole."""
    if whole or not isinstance(model, Transformer):
        return next_token_loss(look(model, ids, segments, rows), targets) * scale
    apart = None if segments is None else torch.from_numpy(segments[rows]).to(ids.device)
    loss: torch.Tensor = model(ids, segments_BT=apart, targets_BT=targets, scale=scale)
    return loss


@torch.no_grad()
def validate(
    model: torch.nn.Module, feed: Feed, machine: Machine, batch: int, windows: int, whole: bool = False
) -> Score:
    """Score what is held back, in order; `windows` 0 = all."""
    limit = windows or None
    total = feed.held.samples
    used = min(total, limit) if limit else total
    was_training = model.training
    model.eval()
    found, tokens = 0.0, 0
    try:
        with report.phase("evaluate", total=used, unit=feed.noun) as phase:
            for piece in feed.validation(batch, limit):
                ids = torch.from_numpy(piece.inputs).to(machine.device)
                targets = torch.from_numpy(piece.targets).to(machine.device)
                with machine.precision():
                    found += float(nats(model, ids, targets, piece.segments, whole))
                tokens += piece.real_tokens
                phase.tick(len(piece.inputs))
    finally:
        model.train(was_training)
    held = feed.held
    return Score(found / max(1, tokens), tokens, used == total, held.documents, held.text_bytes)
