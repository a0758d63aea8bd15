"""Rules on preference pairs: the margin, the chosen answers, the ease of the pairs. Pure functions.

In:  the History of a run with train.objective dpo.
Out: a Verdict with its numbers while a rule holds, None while it does not; the detector says it once.
"""

from __future__ import annotations

from lamplighter.report import Verdict
from lamplighter.train.anomalies.history import Block, History

_NOTHING = 0.99  # of ln 2: a loss that has not moved
_FELL_SHARE, _FELL_NATS = 0.1, 5.0  # of the log-probability of the chosen answers, against where they began
_AT_ONCE_STEPS, _AT_ONCE_LOSS = 100, 0.02


def nothing_preferred(history: History) -> Verdict | None:
    """At ln 2 after a while."""
    facts, blocks = history.facts, history.last(50)
    if not blocks or history.step < max(50, min(facts.warmup, facts.steps // 4)):
        return None
    loss, accuracy = _mean(blocks, "loss"), _mean(blocks, "accuracy")
    if loss < _NOTHING * facts.chance:
        return None
    return Verdict(
        "waste",
        "not_learning",
        f"after {history.step} steps the loss is {loss:.4f}, and ln 2 is {facts.chance:.4f}: no answer is preferred over the other",
        "a higher train.lr; look whether chosen and rejected differ in what they should",
        evidence=(f"{accuracy:.0%} of the pairs as in the data", f"train.lr {facts.peak_lr:g} at its peak"),
    )


def margin_negative(history: History) -> Verdict | None:
    """It learns the opposite of the data."""
    blocks = history.last(50)
    if not blocks or history.step <= history.facts.warmup:
        return None
    margin = _mean(blocks, "margin")
    if not (margin < 0 and all(block.margin < 0 for block in blocks)):
        return None
    return Verdict(
        "waste",
        "margin_negative",
        f"the reward margin is {margin:.3f}: the rejected answers gain on the chosen ones",
        "look whether chosen and rejected are the right way round; a lower train.lr",
        evidence=(f"{_mean(blocks, 'accuracy'):.0%} of the pairs as in the data",),
    )


def chosen_falls(history: History) -> Verdict | None:
    """The margin grows while the chosen answers, too, become less probable: the model leaves both."""
    if len(history.blocks) < 3:
        return None
    first, now = history.blocks[0], history.blocks[-1]
    fell = first.logp_chosen - now.logp_chosen
    if not (fell > max(_FELL_NATS, _FELL_SHARE * abs(first.logp_chosen)) and now.margin > first.margin):
        return None
    return Verdict(
        "waste",
        "chosen_falls",
        f"the log-probability of the chosen answers fell from {first.logp_chosen:.1f} to {now.logp_chosen:.1f} (rejected:"
        f" {first.logp_rejected:.1f} to {now.logp_rejected:.1f}): the margin grows because both become less probable",
        "a lower train.lr or a higher train.dpo_beta; answers that the model would give itself; first sft on the chosen answers",
        evidence=(f"reward margin {now.margin:.3f}", f"blocks of {history.facts.block} steps"),
    )


def told_apart_at_once(history: History) -> Verdict | None:
    """A loss of next to nothing within the first steps: something outward tells the answers apart."""
    blocks = history.last(20)
    if not blocks or not history.step <= _AT_ONCE_STEPS:
        return None
    loss = _mean(blocks, "loss")
    if loss > _AT_ONCE_LOSS:
        return None
    return Verdict(
        "waste",
        "too_good",
        f"after {history.step} steps the loss is {loss:.4f}: every pair is told apart already",
        "look for what gives the rejected answers away (length, a fixed phrase), or a lower train.lr",
        evidence=(f"reward margin {_mean(blocks, 'margin'):.2f}", f"{_mean(blocks, 'accuracy'):.0%} of the pairs"),
    )


def _mean(blocks: list[Block], name: str) -> float:
    return float(sum(getattr(block, name) for block in blocks) / len(blocks))
