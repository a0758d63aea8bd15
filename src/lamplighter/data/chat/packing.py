"""Instruction examples in batches: several packed into a window, grouped by length, or cut as windows; and why so.

In:  open examples, the settings of a run.
Out: a batch source; the assignment of examples to windows is cached under a fingerprint.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lamplighter import report
from lamplighter.config import Data
from lamplighter.data.batch_source import SAMPLE_TOKENS, DataFacts, HeldOut, StepBatches, loss_of
from lamplighter.data.batches import NO_TARGET, Batch, BatchLayout, Int64s, evenly_spread, permute
from lamplighter.data.chat.example_cache import LEARNED, Examples, Side
from lamplighter.errors import BadConfig, BadData

STRATEGIES = ("to seq_len", "to 128-multiple", "dynamic", "grouped", "packed")
_ROUND_TO = 2  # a batch of like lengths is padded to a multiple of this: 8 was not faster on a CPU; not tried on a GPU
_POOL_BATCHES = 64  # so many batches are sorted by length together; more would leave less to chance


# ---------------------------------------------------------------- several examples in one window


@dataclass(frozen=True)
class Packing:
    """Window w holds the examples members[starts[w]:starts[w + 1]], one after the other."""

    members: Int64s
    starts: Int64s

    @property
    def windows(self) -> int:
        return len(self.starts) - 1


def pack(lengths: Int64s, seq_len: int, seed: int = 0) -> Packing:
    """Best fit, longest first: each example goes into the fullest window that still has room for it.

    Examples of one length are interchangeable: the seed decides which of them goes where. All of one length are placed
    together, so the work grows with the number of distinct lengths, not with the number of examples.
    """
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= seq_len:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit windows of {seq_len}")
    order = _shuffled_by_length(lengths, seed)
    values, counts = np.unique(lengths, return_counts=True)
    room: list[list[Int64s]] = [[] for _ in range(seq_len + 1)]  # windows by the positions that they have left
    have = np.zeros(seq_len + 1, np.int64)
    window_of = np.empty(len(lengths), np.int64)
    used = placed = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        rest = order[placed : placed + count]
        placed += count
        for left in (np.flatnonzero(have[length:]) + length).tolist():
            if not len(rest):
                break
            rest = _fill(np.concatenate(room[left]), left, length, rest=rest, room=room, have=have, window_of=window_of)
        if len(rest):
            each = seq_len // length
            new = np.arange(used, used - (-len(rest) // each), dtype=np.int64)
            used += len(new)
            have[seq_len] += len(new)
            _fill(new, seq_len, length, rest=rest, room=room, have=have, window_of=window_of)
    by_window = order[np.argsort(window_of[order], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(window_of, minlength=used))]).astype(np.int64)
    return Packing(by_window, starts)


def _fill(
    windows: Int64s, left: int, length: int, rest: Int64s, room: list[list[Int64s]], have: Int64s, window_of: Int64s
) -> Int64s:
    """Put examples of one length into windows that all have `left` positions; returns the examples that are over."""
    each = left // length
    touched = min(len(windows), -(-len(rest) // each))
    now = rest[: touched * each]
    window_of[now] = np.repeat(windows[:touched], each)[: len(now)]
    room[left] = [windows[touched:]] if touched < len(windows) else []
    have[left] -= touched
    full, over = divmod(len(now), each)
    for some, taken in ((windows[:full], each), (windows[full:touched], over)):
        if len(some):
            room[left - taken * length].append(some)
            have[left - taken * length] += len(some)
    return rest[len(now) :]


def _shuffled(count: int, seed: int, epoch: int = 0) -> Int64s:
    """0..count-1 in an order that (seed, epoch) decides."""
    places = np.arange(count, dtype=np.int64)
    return permute(seed, np.full_like(places, epoch), places, count) if count else places


def _shuffled_by_length(lengths: Int64s, seed: int) -> Int64s:
    """The examples, longest first; those of one length in an order that the seed decides."""
    shuffled = _shuffled(len(lengths), seed)
    return shuffled[np.argsort(-lengths[shuffled], kind="stable")]


# ---------------------------------------------------------------- batches of like length


def group(lengths: Int64s, batch_size: int, seed: int, epoch: int) -> Packing:
    """The batches of an epoch: examples are shuffled, sorted by length within pools, cut; then the batches are shuffled.

    Every example is in one batch; the last one cut may be smaller.
    """
    count = len(lengths)
    order = _shuffled(count, seed, epoch)
    pool = np.arange(count, dtype=np.int64) // (batch_size * _POOL_BATCHES)
    order = order[np.lexsort((-lengths[order], pool))]
    turn = _shuffled(-(-count // batch_size), seed + 1, epoch)
    sizes = np.minimum((turn + 1) * batch_size, count) - turn * batch_size
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    within = np.arange(count, dtype=np.int64) - np.repeat(starts[:-1], sizes)
    return Packing(order[np.repeat(turn * batch_size, sizes) + within], starts)


def round_up(length: Int64s | int, multiple: int = _ROUND_TO) -> Any:
    return -(-length // multiple) * multiple


# ---------------------------------------------------------------- the arithmetic of padding


def padding_share(lengths: Int64s, strategy: str, seq_len: int, batch_size: int) -> float:
    """The share of positions that would hold padding, from 0 to 1. An example longer than seq_len counts as seq_len.

    to seq_len: each example alone in a window. to 128-multiple: each to the next multiple of 128. dynamic: batches in
    random order, each padded to its longest. grouped: batches of like length, padded to their longest, rounded up to
    a multiple of 2. packed: several examples in a window.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"{strategy} is none of {', '.join(STRATEGIES)}")
    lengths = np.minimum(np.asarray(lengths, np.int64), seq_len)
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return 0.0
    return 1 - float(lengths.sum()) / _positions(lengths, strategy, seq_len, batch_size)


def _positions(lengths: Int64s, strategy: str, seq_len: int, batch_size: int) -> int:
    if strategy == "to seq_len":
        return len(lengths) * seq_len
    if strategy == "to 128-multiple":
        return int(np.minimum(round_up(lengths, 128), seq_len).sum())
    if strategy == "packed":
        return pack(lengths, seq_len).windows * seq_len
    if strategy == "grouped":
        batches = group(lengths, batch_size, 0, 0)
        longest = np.maximum.reduceat(lengths[batches.members], batches.starts[:-1])
        longest = np.minimum(round_up(longest, _ROUND_TO), seq_len)
        return int((longest * np.diff(batches.starts)).sum())
    starts = np.arange(0, len(lengths), batch_size)
    longest = np.maximum.reduceat(lengths[_shuffled(len(lengths), 0)], starts)
    return int((longest * np.diff([*starts, len(lengths)])).sum())


# ---------------------------------------------------------------- batches of the layout that a run asks for


_PADDING_SEGMENT = -1
_MUCH = 0.5  # padding that would have been most of the work is worth a word even where it was avoided
_SOME = 0.2  # padding that there is
WORDS = {"packed": "several examples in a window", "grouped": "batches of like length", "windows": "one per window"}


def arrange(examples: Examples, data: Data, layout: BatchLayout, takes_segments: bool) -> StepBatches:
    """Choose, fit, pack; and say it. Packed examples need a model that keeps them apart (`takes_segments`)."""
    how = choose(data.packing, takes_segments)
    learn_all = data.loss_on == "all"
    train, val = (fit(side, data.seq_len, data.over_length, learn_all) for side in (examples.train, examples.val))
    _tell_lengths(train, data)
    made = example_batches(train, val, how, layout)
    _tell_loss(train, data)
    tell_padding(train.positions, made.facts, how, data)
    facts = replace(
        made.facts,
        name=examples.folder.name,
        unigram_loss=_unigram_loss(examples, learn_all),
        question=question_of(examples),
    )
    return StepBatches(facts, made.make, made.validation, examples.check_ids)


def _unigram_loss(examples: Examples, learn_all: bool) -> float | None:
    """Over the tokens that are learned."""
    tokens = examples.train.tokens
    some = np.asarray(tokens[:: max(1, len(tokens) // (4 * SAMPLE_TOKENS))])
    kept = some if learn_all else some[some >= LEARNED]
    return loss_of((kept & ~LEARNED).astype(np.int64))


def question_of(examples: Examples) -> tuple[int, ...]:
    """What stands before the first answer of a held-out example."""
    side = examples.val if examples.val.examples else examples.train
    return tuple(side.ids(0)[: int(side.first_answer[0])].tolist()) if side.examples else ()


def choose(wanted: str, takes_segments: bool) -> str:
    why = "this model's forward has no segments_BT, so examples in one window would see each other"
    if wanted == "packed" and not takes_segments:
        raise BadConfig("data.packing packed cannot be used", why, "--data.packing grouped (or auto)")
    if wanted == "auto" and not takes_segments:
        report.note(f"examples are not packed: {why}; batches of like length instead (data.packing grouped)")
        return "grouped"
    return "packed" if wanted == "auto" else wanted


def _tell_lengths(train: Fitted, data: Data) -> None:
    """What the window cuts off, always."""
    total = train.side.examples
    longest = int(train.side.length.max()) if total else 0
    mean = float(train.side.length.mean()) if total else 0.0
    words = f"{total:,} examples, {mean:.0f} tokens on average with the template, {longest:,} at most"
    if not (train.cut or train.dropped or train.unlearnable):
        report.note(f"{words}: none is longer than data.seq_len {data.seq_len}, nothing is cut")
        return
    lost = f"{train.cut_tokens / max(1, int(train.side.length.sum())):.1%} of all tokens"
    parts = {
        f"{train.cut:,} ({train.cut / total:.1%}) are cut, {train.cut_tokens:,} tokens lost ({lost})": train.cut,
        f"{train.dropped:,} ({train.dropped / total:.1%}) are left out": train.dropped,
        f"{train.unlearnable:,} are left out because no answer begins within the window": train.unlearnable,
    }
    report.warn(
        f"{words}; longer than data.seq_len {data.seq_len}: {'; '.join(text for text, count in parts.items() if count)}"
        f" (data.over_length {data.over_length})",
        cut=train.cut,
        cut_tokens=train.cut_tokens,
        dropped=train.dropped + train.unlearnable,
    )


def _tell_loss(train: Fitted, data: Data) -> None:
    share = int(train.targets.sum()) / int(train.positions.sum())
    report.note(f"{share:.0%} of the tokens are in the loss (data.loss_on {data.loss_on})", loss_share=share)
    if len(train) == train.cut:
        report.verdict(
            report.Verdict(
                "broken",
                "eos_not_trained",
                f"every one of {len(train):,} examples is cut at data.seq_len {data.seq_len}: no answer reaches its end"
                " mark, so the model will not learn to stop",
                f"--data.seq_len {int(train.side.length.max())}, or --data.over_length drop",
            )
        )


def tell_padding(lengths: Int64s, facts: DataFacts, how: str, data: Data) -> None:
    """Padding as it is, as it would have been, and the setting that makes the difference."""
    batch_size = facts.batch_size
    alone = padding_share(lengths, "to seq_len", data.seq_len, batch_size)
    faster = (1 - facts.padding) / (1 - alone)
    now = f"{facts.padding:.1%} padding, {facts.samples:,} {facts.noun} per epoch"
    report.note(f"data.packing {how} ({WORDS[how]}): {now}", pad_frac=facts.padding)
    culprit = {"pad_frac": facts.padding, "pad_frac_alone": alone, "speed_up": faster, "packing": how}
    each = f"padding each example to data.seq_len {data.seq_len} is {alone:.0%} padding"
    if facts.padding > _SOME:
        why, advice = _remedy(lengths, facts, how, data)
        report.verdict(report.Verdict("waste", "padding", why, advice, culprit=culprit))
    elif alone > _MUCH:
        why = f"{each}; avoided: {now}, so an epoch is {faster:.0f} x less work"
        advice = f"nothing to do: data.packing {how} was chosen" + (" by auto" if data.packing == "auto" else "")
        report.verdict(report.Verdict("waste", "padding", why, advice, "fallback", culprit=culprit))
    if facts.samples < batch_size:
        report.warn(
            f"a batch of {batch_size} holds each of the {facts.samples} {facts.noun} about {batch_size / facts.samples:.1f}"
            f" times: a smaller train.batch_size would do"
        )


def _remedy(lengths: Int64s, facts: DataFacts, how: str, data: Data) -> tuple[str, str]:
    """(why, next) for padding that there is: another packing, or windows into which the examples fit better."""
    now = f"{facts.padding:.0%} of the positions are padding with data.packing {how}"
    batch_size = facts.batch_size
    if how != "packed":
        packed = padding_share(lengths, "packed", data.seq_len, batch_size)
        faster = (1 - packed) / (1 - facts.padding)
        return f"{now} at data.seq_len {data.seq_len}; packed it would be {packed:.1%}, {faster:.1f} x less work", (
            "--data.packing packed" if packed < facts.padding else "--data.seq_len of about the longest example"
        )
    windows = [data.seq_len * times // 4 for times in (1, 2, 3, 6, 8, 16) if lengths.max() <= data.seq_len * times // 4]
    if facts.samples <= 1 or not windows:
        return f"{now}: there are few examples for a window of {data.seq_len}", "a smaller data.seq_len"
    best = min(windows, key=lambda window: padding_share(lengths, "packed", window, batch_size))
    share = padding_share(lengths, "packed", best, batch_size)
    return (
        f"{now}: the lengths fill windows of {data.seq_len} badly; {best} would have {share:.1%}",
        f"--data.seq_len {best}",
    )


# ---------------------------------------------------------------- examples that fit


@dataclass(frozen=True)
class Fitted:
    """The examples of a side as they go into windows, after the over-length policy."""

    side: Side
    chosen: Int64s  # numbers within the side
    begin: Int64s
    positions: Int64s
    targets: Int64s  # that are learned
    learn_all: bool
    cut: int
    cut_tokens: int
    dropped: int
    unlearnable: int  # nothing of an answer is left within the window

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def text_bytes(self) -> float:
        """Of what is learned; of an example that was cut, in proportion."""
        sizes = self.side.text_bytes if self.learn_all else self.side.answer_bytes
        whole = self.side.length - 1 if self.learn_all else self.side.learned
        return float((sizes[self.chosen] * self.targets / np.maximum(1, whole[self.chosen])).sum())


def fit(side: Side, seq_len: int, over_length: str, learn_all: bool) -> Fitted:
    """Cut, leave out or refuse what is longer than a window; every case is counted."""
    whole = side.length - 1 if learn_all else side.last_answer  # what comes after the last answer teaches nothing
    long = whole > seq_len
    if over_length == "refuse" and long.any():
        worst = int(whole.max())
        raise BadData(
            f"{int(long.sum()):,} of {side.examples:,} examples are longer than data.seq_len {seq_len}",
            f"the longest has {worst + 1:,} tokens; data.over_length is refuse",
            f"--data.seq_len {round_up(worst, 64)}, or --data.over_length truncate (or drop)",
        )
    keep = ~long if over_length == "drop" else np.ones_like(long)
    learnable = np.ones_like(long) if learn_all else side.first_answer <= seq_len
    chosen = np.flatnonzero(keep & learnable & (whole > 0)).astype(np.int64)
    positions = np.minimum(whole[chosen], seq_len)
    targets = (positions if learn_all else side.learned[chosen]).copy()
    for place in np.flatnonzero(long[chosen]).tolist() if not learn_all else ():
        begin = int(side.begin[chosen[place]])
        targets[place] = int((side.tokens[begin + 1 : begin + 1 + seq_len] >= LEARNED).sum())
    cut = long[chosen]
    return Fitted(
        side=side,
        chosen=chosen,
        begin=side.begin[chosen],
        positions=positions,
        targets=targets,
        learn_all=learn_all,
        cut=int(cut.sum()),
        cut_tokens=int((whole[chosen] - positions).sum()),
        dropped=int((~keep).sum()),
        unlearnable=int((keep & ~learnable).sum()),
    )


# ---------------------------------------------------------------- rows of a batch


def lay_out(fitted: Fitted, packing: Packing, length: int, pad_id: int, with_segments: bool) -> Batch:
    """The rows of a packing as arrays of B x `length`: examples one after the other, the rest of a row padding."""
    members, starts = packing.members, packing.starts
    sizes = fitted.positions[members]
    ends = np.cumsum(sizes)
    row = np.repeat(np.arange(packing.windows), np.diff(starts))
    begins = ends - sizes
    in_row = begins - begins[starts[:-1]][row]
    step = np.arange(int(ends[-1])) - np.repeat(begins, sizes)
    source = np.repeat(fitted.begin[members], sizes) + step
    place = np.repeat(row * length + in_row, sizes) + step
    inputs = np.full((packing.windows, length), pad_id, np.int64)
    targets = np.full((packing.windows, length), NO_TARGET, np.int64)
    inputs.flat[place] = fitted.side.tokens[source] & ~LEARNED
    following = fitted.side.tokens[source + 1]
    wanted = np.where((following >= LEARNED) | fitted.learn_all, (following & ~LEARNED).astype(np.int64), NO_TARGET)
    targets.flat[place] = wanted
    segments = None
    if with_segments:
        segments = np.full((packing.windows, length), _PADDING_SEGMENT, np.int64)
        segments.flat[place] = np.repeat(np.arange(len(members)) - starts[:-1][row], sizes)
    real = int((wanted != NO_TARGET).sum())
    return Batch(0, inputs, targets, segments, members, epoch=0.0, real_tokens=real, filled_tokens=int(ends[-1]))


def take_windows(packing: Packing, windows: Int64s) -> Packing:
    """Some windows of a packing, in this order."""
    sizes = np.diff(packing.starts)[windows]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    within = np.arange(int(starts[-1]), dtype=np.int64) - np.repeat(starts[:-1], sizes)
    return Packing(packing.members[np.repeat(packing.starts[windows], sizes) + within], starts)


def alone(count: int) -> Packing:
    """One example in each window."""
    return Packing(np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64))


# ---------------------------------------------------------------- packed, or each example alone


def example_batches(train: Fitted, val: Fitted, how: str, layout: BatchLayout) -> StepBatches:
    """`packed`: several examples in a window; `windows`: one in each, padded; `grouped`: batches of like length."""
    seed, batch_size, seq_len, pad_id = layout.seed, layout.batch_size, layout.seq_len, layout.pad_id
    if not len(train):
        raise BadData(
            "no example is left to train on",
            f"{train.dropped:,} are longer than data.seq_len {seq_len}, {train.unlearnable:,} have no answer within it",
            "a larger data.seq_len" + (", or --data.over_length truncate" if train.dropped else ""),
        )
    if how == "grouped":
        return _grouped(train, val, layout)
    packing, held = (
        (pack(side.positions, seq_len, seed) if how == "packed" else alone(len(side))) for side in (train, val)
    )
    with_segments = how == "packed"

    def make(step: int) -> Batch:
        numbers = np.arange((step - 1) * batch_size, step * batch_size, dtype=np.int64)
        windows = permute(seed, numbers // packing.windows, numbers % packing.windows, packing.windows)
        batch = lay_out(train, take_windows(packing, windows), seq_len, pad_id, with_segments)
        return replace(batch, step=step, samples=windows, epoch=step * batch_size / packing.windows)

    def validation(size: int, limit: int | None) -> Iterator[Batch]:
        chosen = evenly_spread(held.windows, limit)
        for step, begin in enumerate(range(0, len(chosen), size), 1):
            windows = chosen[begin : begin + size]
            batch = lay_out(val, take_windows(held, windows), seq_len, pad_id, with_segments)
            yield replace(batch, step=step, samples=windows, epoch=(begin + len(windows)) / len(chosen))

    facts = DataFacts(
        name="",
        samples=packing.windows,
        noun="windows",
        batch_size=batch_size,
        positions_per_step=batch_size * seq_len,
        padding=1 - float(train.positions.sum()) / (packing.windows * seq_len),
        held_out=HeldOut(held.windows, len(val), int(val.targets.sum()), val.text_bytes),
        fingerprint=fingerprint_of(packing),
        documents=len(train),
    )
    return StepBatches(facts, make, validation)


def fingerprint_of(packing: Packing) -> str:
    return hashlib.sha256(packing.members.tobytes() + packing.starts.tobytes()).hexdigest()[:20]


# ---------------------------------------------------------------- batches of like length


def _grouped(train: Fitted, val: Fitted, layout: BatchLayout) -> StepBatches:
    seed, batch_size, seq_len, pad_id = layout.seed, layout.batch_size, layout.seq_len, layout.pad_id
    epochs: dict[int, Packing] = {}  # the latest one or two: a batch needs its whole epoch to be sorted

    def batches_of(epoch: int) -> Packing:
        if epoch not in epochs:
            while len(epochs) > 1:
                del epochs[min(epochs)]
            epochs[epoch] = group(train.positions, batch_size, seed, epoch)
        return epochs[epoch]

    def rows(fitted: Fitted, members: Int64s, step: int, epoch: float) -> Batch:
        longest = int(fitted.positions[members].max())
        length = min(seq_len, int(round_up(longest, _ROUND_TO)))
        each = Packing(members, np.arange(len(members) + 1, dtype=np.int64))
        batch = lay_out(fitted, each, length, pad_id, with_segments=False)
        return replace(batch, step=step, samples=members, epoch=epoch)

    per_epoch = math.ceil(len(train) / batch_size)

    def make(step: int) -> Batch:
        epoch, number = divmod(step - 1, per_epoch)
        batches = batches_of(epoch)
        return rows(train, batches.members[batches.starts[number] : batches.starts[number + 1]], step, step / per_epoch)

    def validation(size: int, limit: int | None) -> Iterator[Batch]:
        chosen = evenly_spread(len(val), limit)
        chosen = chosen[np.argsort(val.positions[chosen], kind="stable")]
        for step, begin in enumerate(range(0, len(chosen), size), 1):
            some = chosen[begin : begin + size]
            yield rows(val, some, step, (begin + len(some)) / len(chosen))

    first = batches_of(0)
    longest = np.maximum.reduceat(train.positions[first.members], first.starts[:-1])
    filled = np.minimum(seq_len, round_up(longest, _ROUND_TO)) * np.diff(first.starts)
    facts = DataFacts(
        name="",
        samples=len(train),
        noun="examples",
        batch_size=batch_size,
        positions_per_step=float(filled.sum()) / per_epoch,
        padding=1 - float(train.positions.sum()) / float(filled.sum()),
        held_out=HeldOut(len(val), len(val), int(val.targets.sum()), val.text_bytes),
        whole_batches=True,
        fingerprint=fingerprint_of(first),
        documents=len(train),
    )
    return StepBatches(facts, make, validation)
