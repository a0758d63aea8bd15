"""Preference pairs in batches: a chosen and a rejected answer to the same prompt, which always stay together.

In:  open examples of pairs, the settings of a run.
Out: a batch source whose batches know which token belongs to which answer; the same pairs in order, for the reference model.

Both answers of a pair are packed into one window of data.seq_len, each with its prompt and kept apart as examples are. Where a
model does not keep them apart, they are two neighbouring rows of a batch of like lengths. Either way a micro-batch holds
whole pairs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from lamplighter import report
from lamplighter.config import Data
from lamplighter.data.batch_source import DataFacts, HeldOut, PairData, StepBatches
from lamplighter.data.batches import NO_TARGET, Batch, BatchLayout, Float64s, Int64s, Pairs, evenly_spread, permute
from lamplighter.data.chat import packing
from lamplighter.data.chat.example_cache import LEARNED, Examples, Side
from lamplighter.data.chat.packing import Fitted, Packing
from lamplighter.errors import BadConfig, BadData


@dataclass
class PairSide:
    """The pairs that are trained on, or those held back, as they go into windows (or rows)."""

    fitted: Fitted  # of the answers: 2n and 2n + 1 are those of pair n
    packed: Packing  # of pairs
    layout: BatchLayout
    rows_each: int  # 1: a pair is in one window; 2: each answer has a row of its own
    beta: float = 0.1  # train.dpo_beta
    reference: Float64s | None = (
        None  # the log-probability of each answer by the reference model, before the first step
    )

    def batch(self, windows: Int64s) -> Batch:
        """Some of the windows; with rows of their own, some of the pairs."""
        seq_len = self.layout.seq_len
        if self.rows_each == 2:
            members = _answers(windows)
            longest = int(self.fitted.positions[members].max())
            laid = Packing(members, np.arange(len(members) + 1, dtype=np.int64))
            made = packing.lay_out(
                self.fitted, laid, min(seq_len, packing.round_up(longest)), self.layout.pad_id, with_segments=False
            )
            answers = np.broadcast_to(members[:, None], made.targets.shape)
        else:
            some = packing.take_windows(self.packed, windows)
            laid = Packing(_answers(some.members), some.starts * 2)
            made = packing.lay_out(self.fitted, laid, seq_len, self.layout.pad_id, with_segments=True)
            assert made.segments is not None
            answers = laid.members[np.maximum(0, laid.starts[:-1, None] + made.segments)]
        answers = np.where(made.targets != NO_TARGET, answers, -1)
        pairs = Pairs(answers, self.rows_each, self.beta, self.reference)
        return replace(made, samples=windows, real_tokens=len(laid.members) // 2, pairs=pairs)

    @property
    def pairs(self) -> int:
        return len(self.fitted) // 2

    @property
    def windows(self) -> int:
        return self.pairs if self.rows_each == 2 else self.packed.windows

    def in_order(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """All of them (or some, evenly spread), so many windows at a time."""
        chosen = evenly_spread(self.windows, limit)
        if self.rows_each == 2:
            longest = self.fitted.positions.reshape(-1, 2).max(1)
            chosen = chosen[np.argsort(longest[chosen], kind="stable")]
        for step, begin in enumerate(range(0, len(chosen), size), 1):
            windows = chosen[begin : begin + size]
            yield replace(self.batch(windows), step=step, epoch=(begin + len(windows)) / len(chosen))


def _answers(pairs: Int64s) -> Int64s:
    """The numbers of both answers of each pair."""
    found: Int64s = (2 * pairs[:, None] + np.array([0, 1])).ravel()
    return found


# ---------------------------------------------------------------- both answers within a window


def fit_pairs(side: Side, seq_len: int, over_length: str, together: bool) -> Fitted:
    """The answers of a side after data.over_length, two by two; a pair is cut, left out or refused as a whole.

    `together`: both share one window. The longer one is cut first; neither below half of the window.
    """
    whole, first = side.last_answer.reshape(-1, 2), side.first_answer.reshape(-1, 2)
    long = np.asarray(whole.sum(1) > seq_len if together else (whole > seq_len).any(1), bool)
    if over_length == "refuse" and long.any():
        worst = int(whole.sum(1).max() if together else whole.max())
        raise BadData(
            f"{int(long.sum()):,} of {len(whole):,} pairs are longer than data.seq_len {seq_len}",
            f"{'both answers of a pair, each with its prompt, share a window: ' if together else ''}the longest has {worst:,}"
            " tokens; data.over_length is refuse",
            f"--data.seq_len {math.ceil(worst / 64) * 64}, or --data.over_length truncate (or drop)",
        )
    positions = np.minimum(whole, seq_len)
    if together:
        shorter = np.minimum(whole.min(1), seq_len // 2)
        limit = np.where(whole == whole.max(1)[:, None], (seq_len - shorter)[:, None], shorter[:, None])
        tie = whole[:, 0] == whole[:, 1]
        limit[tie] = seq_len // 2
        positions = np.where(long[:, None], np.minimum(whole, limit), whole)
    keep = ~long if over_length == "drop" else np.ones_like(long)
    learnable = (first <= positions).all(1)
    chosen = np.flatnonzero(keep & learnable)
    halves = _answers(chosen)
    targets = side.learned[halves].copy()
    fitted = positions.reshape(-1)[halves]
    for place in np.flatnonzero(np.repeat(long[chosen], 2)).tolist():
        begin = int(side.begin[halves[place]])
        targets[place] = int((side.tokens[begin + 1 : begin + 1 + int(fitted[place])] >= LEARNED).sum())
    return Fitted(
        side=side,
        chosen=halves,
        begin=side.begin[halves],
        positions=fitted,
        targets=targets,
        learn_all=False,
        cut=int(long[chosen].sum()),
        cut_tokens=int((whole[chosen].sum(1) - positions[chosen].sum(1)).sum()),
        dropped=int((~keep).sum()),
        unlearnable=int((keep & ~learnable).sum()),
    )


# ---------------------------------------------------------------- the batches of a run


def arrange_pairs(examples: Examples, data: Data, layout: BatchLayout, takes_segments: bool) -> StepBatches:
    """Choose, fit, pack; and say it."""
    how = packing.choose(data.packing, takes_segments)
    if how == "windows":
        why = "it pads each answer to data.seq_len; pairs are packed, or grouped by length"
        raise BadConfig("data.packing windows is not for preference pairs", why, "--data.packing auto")
    together = how == "packed"
    fitted = [fit_pairs(side, data.seq_len, data.over_length, together) for side in (examples.train, examples.val)]
    _tell(fitted[0], data, together)
    if not len(fitted[0]):
        raise BadData(
            "no pair is left to train on",
            f"{fitted[0].dropped:,} are longer than data.seq_len {data.seq_len}, of {fitted[0].unlearnable:,} an answer does not begin"
            " within it",
            "a larger data.seq_len",
        )
    train, val = (_side(one, layout, together) for one in fitted)
    sides = PairData(train, val, _fingerprint(examples.folder.name, train, val))
    made = _packed(train, val, layout) if together else _grouped(train, val, layout)
    facts = replace(made.facts, name=examples.folder.name, question=packing.question_of(examples), pairs=sides)
    packing.tell_padding(pair_lengths(fitted[0].positions), facts, how, data)
    return StepBatches(facts, made.make, made.validation, examples.check_ids)


def pair_lengths(answers: Int64s) -> Int64s:
    """Of both answers of each pair together."""
    found: Int64s = answers.reshape(-1, 2).sum(1)
    return found


def _side(fitted: Fitted, layout: BatchLayout, together: bool) -> PairSide:
    lengths = pair_lengths(fitted.positions)
    packed = packing.pack(lengths, layout.seq_len, layout.seed) if together else packing.alone(len(lengths))
    return PairSide(fitted, packed, layout, rows_each=1 if together else 2)


def _fingerprint(name: str, *sides: PairSide) -> str:
    found = hashlib.sha256(name.encode())
    for side in sides:
        for numbers in (side.fitted.chosen, side.fitted.positions, side.packed.members, side.packed.starts):
            found.update(numbers.tobytes() + b"|")
    return found.hexdigest()[:20]


def _packed(train: PairSide, val: PairSide, layout: BatchLayout) -> StepBatches:
    size = layout.batch_size

    def make(step: int) -> Batch:
        numbers = np.arange((step - 1) * size, step * size, dtype=np.int64)
        windows = permute(layout.seed, numbers // train.windows, numbers % train.windows, train.windows)
        return replace(train.batch(windows), step=step, epoch=step * size / train.windows)

    filled = float(train.fitted.positions.sum())
    facts = DataFacts(
        name="",
        samples=train.windows,
        noun="windows",
        batch_size=size,
        positions_per_step=size * layout.seq_len,
        padding=1 - filled / (train.windows * layout.seq_len),
        held_out=_held_out(val),
        fingerprint=packing.fingerprint_of(train.packed),
        documents=train.pairs,
    )
    return StepBatches(facts, make, val.in_order)


def _grouped(train: PairSide, val: PairSide, layout: BatchLayout) -> StepBatches:
    """Pairs of like length, each answer in a row of its own; batch_size counts pairs."""
    size = layout.batch_size
    longest = train.fitted.positions.reshape(-1, 2).max(1)
    per_epoch = math.ceil(train.pairs / size)
    epochs: dict[int, Packing] = {}

    def batches_of(epoch: int) -> Packing:
        if epoch not in epochs:
            while len(epochs) > 1:
                del epochs[min(epochs)]
            epochs[epoch] = packing.group(longest, size, layout.seed, epoch)
        return epochs[epoch]

    def make(step: int) -> Batch:
        epoch, number = divmod(step - 1, per_epoch)
        batches = batches_of(epoch)
        pairs = batches.members[batches.starts[number] : batches.starts[number + 1]]
        return replace(train.batch(pairs), step=step, epoch=step / per_epoch)

    first = batches_of(0)
    lengths = np.maximum.reduceat(longest[first.members], first.starts[:-1])
    filled = 2.0 * float((np.minimum(layout.seq_len, packing.round_up(lengths)) * np.diff(first.starts)).sum())
    facts = DataFacts(
        name="",
        samples=train.pairs,
        noun="pairs",
        batch_size=size,
        positions_per_step=filled / per_epoch,
        padding=1 - float(train.fitted.positions.sum()) / filled,
        held_out=_held_out(val),
        whole_batches=True,
        fingerprint=packing.fingerprint_of(first),
        documents=train.pairs,
    )
    return StepBatches(facts, make, val.in_order)


def _held_out(val: PairSide) -> HeldOut:
    return HeldOut(val.windows, val.pairs, int(val.fitted.targets.sum()), val.fitted.text_bytes)


def _tell(train: Fitted, data: Data, together: bool) -> None:
    """How long they are, and what the window cuts off."""
    lengths = pair_lengths(train.side.length)
    longest, mean = (int(lengths.max()), float(lengths.mean())) if len(lengths) else (0, 0.0)
    where = "both answers of a pair, each with its prompt, share a window" if together else "each answer has a row"
    words = f"{len(lengths):,} pairs, {mean:.0f} tokens on average with the template, {longest:,} at most ({where})"
    if not (train.cut or train.dropped or train.unlearnable):
        report.note(f"{words}: nothing is cut at data.seq_len {data.seq_len}")
        return
    parts = {
        f"{train.cut:,} are cut, {train.cut_tokens:,} tokens lost": train.cut,
        f"{train.dropped:,} are left out": train.dropped,
        f"{train.unlearnable:,} are left out because an answer does not begin within the window": train.unlearnable,
    }
    told = "; ".join(text for text, count in parts.items() if count)
    report.warn(
        f"{words}; longer than data.seq_len {data.seq_len}: {told} (data.over_length {data.over_length})",
        cut=train.cut,
        cut_tokens=train.cut_tokens,
        dropped=train.dropped + train.unlearnable,
    )
