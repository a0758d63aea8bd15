"""Rules on what was held back, on passes over the data, and on samples. Pure functions.

In:  the Memory of a run.
Out: a Verdict while a rule holds, None while it does not.
"""

from __future__ import annotations

from lamplighter.report import Verdict
from lamplighter.train.anomalies.history import Memory, Validation

RISING, WORSE = 3, 0.01  # so many validations in a row above the best, by so much of it
NEW_RISING, NEW_WORSE = 5, 0.05  # the same while no text was seen twice, which is no learning by heart
MANY_PASSES = 5.0
DEGENERATE = 0.5  # of a sample
DEGENERATE_TIMES = 2


def overfitting(memory: Memory) -> Verdict | None:
    """Validation rises over several looks while the training loss falls, and text was seen more than once."""
    found = _rise(memory.validations, RISING, WORSE)
    if found is None or found[1].epoch <= 1:
        return None
    best, now = found
    return Verdict(
        "waste",
        "overfitting",
        f"{_rise_words(best, now)}: it learns the text by heart",
        f"use checkpoint-{best.step}; eval.patience {RISING} ends such a run by itself; more text or model.dropout helps",
        evidence=(_gap_words(best, now), f"{now.epoch:.1f} passes over the data"),
        culprit={"best_step": best.step},
    )


def gap_grows(memory: Memory) -> Verdict | None:
    """The same within the first pass: what is validated on is unlike what is trained on now."""
    found = _rise(memory.validations, NEW_RISING, NEW_WORSE)
    if found is None or found[1].epoch > 1:
        return None
    best, now = found
    return Verdict(
        "waste",
        "gap_grows",
        f"{_rise_words(best, now)}, and no text was seen twice: what is held back is unlike what is trained on now",
        "mix the sources (data.weights, a larger data.tokens_per_chunk), or look for copies in the text: lamp data stats",
        evidence=(_gap_words(best, now), f"{now.epoch:.2f} passes over the data"),
        culprit={"best_step": best.step},
    )


def _rise(seen: list[Validation], times: int, worse: float) -> tuple[Validation, Validation] | None:
    """(the best, the last) where the last few are all above the best while the training loss fell."""
    if len(seen) <= times:
        return None
    best = min(seen, key=lambda one: one.loss)
    later, now = [one for one in seen if one.step > best.step], seen[-1]
    if len(later) < times or now.loss < best.loss * (1 + worse):
        return None
    high = all(one.loss > best.loss * (1 + worse / 2) for one in later[-times:])
    return (best, now) if high and now.train_loss < best.train_loss * (1 - WORSE) else None


def _rise_words(best: Validation, now: Validation) -> str:
    return (
        f"validation rose from {best.loss:.3f} (step {best.step}) to {now.loss:.3f} (step {now.step}) while the training"
        f" loss fell from {best.train_loss:.3f} to {now.train_loss:.3f}"
    )


def _gap_words(best: Validation, now: Validation) -> str:
    return f"gap {best.loss - best.train_loss:.3f} then, {now.loss - now.train_loss:.3f} now"


def data_repeats(memory: Memory) -> Verdict | None:
    """Many passes over the same text, and validation has gained nothing from the last of them."""
    if not memory.blocks or memory.blocks[-1].epoch <= MANY_PASSES:
        return None
    passes, seen = memory.blocks[-1].epoch, memory.validations
    gained = ""
    if seen:
        best = min(seen, key=lambda one: one.loss)
        later = sum(one.step > best.step for one in seen)
        if passes - best.epoch < 1 or later < RISING + 2:  # overfitting shows earlier, and says more
            return None
        gained = f"; the best validation ({best.loss:.3f}) was {passes - best.epoch:.1f} passes ago"
    return Verdict(
        "waste",
        "data_repeats",
        f"this is pass {int(passes) + 1} over the same text{gained}",
        "more text, or fewer train.steps; up to about 4 passes are nearly as good as new text",
        evidence=(f"{passes:.2f} passes at step {memory.step}",),
    )


def degenerate_samples(memory: Memory) -> Verdict | None:
    """What the model writes is one token or one short cycle, twice in a row."""
    last = memory.samples[-DEGENERATE_TIMES:]
    if len(last) < DEGENERATE_TIMES or memory.step < memory.settled or any(one.repeat < DEGENERATE for one in last):
        return None
    return Verdict(
        "waste",
        "sample_degenerate",
        f"{last[-1].repeat:.0%} of the sample at step {last[-1].step} is one short cycle of tokens, again and again"
        f" ({last[0].repeat:.0%} at step {last[0].step})",
        "look at the samples and at the text itself; is the loss still falling?",
        evidence=tuple(f"step {one.step}: {one.repeat:.3f}" for one in last),
    )
