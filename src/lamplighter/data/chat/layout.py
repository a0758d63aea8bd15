"""How a run's examples are laid out: packed, by like length, or each alone; said before the first step, with what it saves.

In:  Examples, the data section, how many rows a step has, whether the model keeps packed examples apart.
Out: a Feed; notes on what is cut and learned; a verdict where padding is, or would have been, most of the work.
"""

from __future__ import annotations

from lamplighter import report
from lamplighter.config import Data
from lamplighter.data.batch_source import Feed, Fitted, example_feed, fit
from lamplighter.data.chat.example_cache import Examples
from lamplighter.data.chat.packing import padding_share
from lamplighter.errors import BadConfig

MUCH = 0.5  # padding that would have been most of the work is worth a word even where it was avoided
SOME = 0.2  # padding that there is
WORDS = {"packed": "several examples in a window", "grouped": "batches of like length", "windows": "one per window"}


def arrange(examples: Examples, data: Data, seed: int, batch_size: int, pad_id: int, takes_segments: bool) -> Feed:
    """Choose, fit, pack; and say it."""
    how = _choose(data.packing, takes_segments)
    learn_all = data.loss_on == "all"
    train, val = (fit(side, data.seq_len, data.over_length, learn_all) for side in (examples.train, examples.val))
    _tell_lengths(train, data)
    feed = example_feed(train, val, how, seed, batch_size, data.seq_len, pad_id)
    _tell_loss(train, data)
    _tell_padding(train, feed, how, data, batch_size)
    return feed


def _choose(wanted: str, takes_segments: bool) -> str:
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


def _tell_padding(train: Fitted, feed: Feed, how: str, data: Data, batch_size: int) -> None:
    """Padding as it is, as it would have been, and the setting that makes the difference."""
    alone = padding_share(train.positions, "to seq_len", data.seq_len, batch_size)
    faster = (1 - feed.padding) / (1 - alone)
    now = f"{feed.padding:.1%} padding, {feed.samples:,} {feed.noun} per epoch"
    report.note(f"data.packing {how} ({WORDS[how]}): {now}", pad_frac=feed.padding)
    culprit = {"pad_frac": feed.padding, "pad_frac_alone": alone, "speed_up": faster, "packing": how}
    each = f"padding each example to data.seq_len {data.seq_len} is {alone:.0%} padding"
    if feed.padding > SOME:
        why, advice = _remedy(train, feed, how, data, batch_size)
        report.verdict(report.Verdict("waste", "padding", why, advice, culprit=culprit))
    elif alone > MUCH:
        why = f"{each}; avoided: {now}, so an epoch is {faster:.0f} x less work"
        advice = f"nothing to do: data.packing {how} was chosen" + (" by auto" if data.packing == "auto" else "")
        report.verdict(report.Verdict("waste", "padding", why, advice, "fallback", culprit=culprit))
    if feed.samples < batch_size:
        report.warn(
            f"a batch of {batch_size} holds each of the {feed.samples} {feed.noun} about {batch_size / feed.samples:.1f}"
            f" times: a smaller train.batch_size would do"
        )


def _remedy(train: Fitted, feed: Feed, how: str, data: Data, batch_size: int) -> tuple[str, str]:
    """(why, next) for padding that there is: another packing, or windows into which the examples fit better."""
    now = f"{feed.padding:.0%} of the positions are padding with data.packing {how}"
    if how != "packed":
        packed = padding_share(train.positions, "packed", data.seq_len, batch_size)
        faster = (1 - packed) / (1 - feed.padding)
        return f"{now} at data.seq_len {data.seq_len}; packed it would be {packed:.1%}, {faster:.1f} x less work", (
            "--data.packing packed" if packed < feed.padding else "--data.seq_len of about the longest example"
        )
    lengths = [
        data.seq_len * times // 4 for times in (1, 2, 3, 6, 8, 16) if train.positions.max() <= data.seq_len * times // 4
    ]
    if feed.samples <= 1 or not lengths:
        return f"{now}: there are few examples for a window of {data.seq_len}", "a smaller data.seq_len"
    best = min(lengths, key=lambda length: padding_share(train.positions, "packed", length, batch_size))
    share = padding_share(train.positions, "packed", best, batch_size)
    return (
        f"{now}: the lengths fill windows of {data.seq_len} badly; {best} would have {share:.1%}",
        f"--data.seq_len {best}",
    )
