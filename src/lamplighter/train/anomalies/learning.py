"""Rules on what is learned: chance, context, bands, rising, spikes, plateaus, gradients, the rate. Pure functions.

In:  the History of a run.
Out: a Verdict with its numbers while a rule holds, None while it does not; the detector says it once.

Each limit is either arithmetic (ln of the vocabulary, the entropy of single tokens, the floor of the embedded text), or
beyond what healthy runs of very different sizes did (tests/recordings; docs/redflags.md names them).
"""

from __future__ import annotations

import math
from statistics import median

from lamplighter.report import Verdict
from lamplighter.schedule import expected_losses
from lamplighter.train.anomalies.history import LR_NEAR_ZERO, Block, History, Validation, spread_of

_NOT_LEARNING = 0.97  # of ln(vocabulary)
_TOO_GOOD_NATS = 0.05
_START_HIGH = 2.0  # times ln(vocabulary)
LR_STEPS = 20
_LR_END = 0.05  # the last share of a schedule, where a rate near zero is meant
_CONTEXT_FROM = 0.15  # of the run
_NEARLY = 0.015  # of the entropy of single tokens: no more is forgiven as noise
_STILL_EARLY = 0.25  # of the run: until then a loss that still falls is given time
_GAVE_BACK = 0.10  # of what had been learned below chance
_RISE_SIGMAS = 4.0
PLATEAU_SHARE, PLATEAU_STEPS = 0.25, 200
_PLATEAU_GAIN = 0.005  # of the loss
_PLATEAU_LR = 0.3  # of the peak
EXPLODES, VANISHES = 10.0, 1e-3  # against the usual gradient norm of this run
_HARD_CLIP_SHARE = 0.95
_BAND_SLACK = 1.1
RISING, WORSE = 3, 0.01  # so many validations in a row above the best, by so much of it
NEW_RISING, NEW_WORSE = 5, 0.05  # the same while no text was seen twice, which is no learning by heart
_MANY_PASSES = 5.0
_DEGENERATE = 0.5  # of a sample
_DEGENERATE_TIMES = 2


def not_learning(history: History) -> Verdict | None:
    """At chance after a while."""
    facts, blocks = history.facts, history.last(50)
    patience = max(100, min(facts.warmup, facts.steps // 4))
    if not blocks or history.step < patience:
        return None
    loss = _mean_loss(blocks)
    if loss <= _NOT_LEARNING * facts.chance or (history.step < _STILL_EARLY * facts.steps and _falls(history)):
        return None
    return Verdict(
        "waste",
        "not_learning",
        f"after {history.step} steps the loss is {loss:.2f}, and ln(vocabulary) is {facts.chance:.2f}: nothing is learned",
        "check the data and train.lr; stop it with lamp stop",
        evidence=(f"loss of the last {_steps(blocks)} steps {loss:.4f}", f"train.lr {facts.peak_lr:g} at its peak"),
    )


def no_context(history: History) -> Verdict | None:
    """No better than counting tokens: what stands before a token is not used."""
    facts, blocks = history.facts, history.last(50)
    if facts.unigram_nats is None or not blocks or history.step < history.settled:
        return None
    if history.step < _CONTEXT_FROM * facts.steps:
        return None
    loss, limit = _mean_loss(blocks), facts.unigram_nats - min(2 * _error(blocks), _NEARLY * facts.unigram_nats)
    if loss < limit or (history.step < _STILL_EARLY * facts.steps and _falls(history)):
        return None
    return Verdict(
        "waste",
        "no_context",
        f"after {history.step} steps the loss is {loss:.2f}; counting single tokens alone gives {facts.unigram_nats:.2f}:"
        " nothing is learned from context",
        "another train.lr if it is far off; else check that targets belong to their inputs (lamp doctor)",
        evidence=(
            f"entropy of single tokens {facts.unigram_nats:.4f}",
            f"loss of the last {_steps(blocks)} steps {loss:.4f}",
        ),
    )


def above_band(history: History) -> Verdict | None:
    """Higher than models of this size are at this share of a run: only where a table for the size is known."""
    facts, blocks = history.facts, history.last(200)
    if not facts.from_scratch or facts.chat:
        return None
    share = history.step / facts.steps
    passed = [one for one in expected_losses(facts.parameters, facts.vocab_size) if share >= one[0]]
    if not blocks or not passed:
        return None
    at, limit = passed[-1]
    loss = _mean_loss(blocks)
    if loss <= _BAND_SLACK * limit:
        return None
    return Verdict(
        "waste",
        "above_band",
        f"at {share:.0%} of the run the loss is {loss:.2f}; models of this size are at {limit:.2f} or less at {at:.0%}",
        "look at the learning rate and the data before the rest is paid for: lamp generate RUN shows what it knows",
        evidence=(f"loss of the last {_steps(blocks)} steps {loss:.4f}", f"{facts.parameters:,} parameters"),
    )


def starts_high(history: History) -> Verdict | None:
    """A new model knows nothing, so it begins at ln(vocabulary); far above it, its first weights are too large."""
    facts, first = history.facts, history.first_loss
    if first is None or not facts.from_scratch or first < _START_HIGH * facts.chance:
        return None
    if history.blocks and history.blocks[-1].loss < facts.chance:
        return None  # it got over it
    return Verdict(
        "waste",
        "starts_high",
        f"the first loss was {first:.1f}, and ln(vocabulary) is {facts.chance:.2f}: the first weights are too large",
        "initialise embeddings and the output layer with a standard deviation of about 0.02",
        evidence=(f"loss of step 1 {first:.4f}",),
    )


def too_good(history: History) -> Verdict | None:
    """Text cannot be predicted like this; something leaks, or the data repeats."""
    facts, blocks = history.facts, history.last(50)
    if not blocks or history.step < 100:
        return None
    loss = _mean_loss(blocks)
    advice = "look for targets that leak into inputs, or data that repeats"
    evidence: tuple[str, ...] = (f"loss of the last {_steps(blocks)} steps {loss:.4f}",)
    if loss < _TOO_GOOD_NATS:
        why = f"after {history.step} steps the loss is {loss:.4f} nats per token: too good to be true for text"
        return Verdict("waste", "too_good", why, advice, evidence=evidence)
    if facts.floor_nats is None or not history.validations:
        return None
    found, limit = history.validations[-1], 0.97 * facts.floor_nats - 3 * facts.floor_error
    if found.loss >= limit:
        return None
    why = f"the validation loss is {found.loss:.3f}, below the floor of {facts.floor_nats:.3f} that no model can beat"
    return Verdict("waste", "too_good", why, advice, evidence=(f"validation at step {found.step}: {found.loss:.4f}",))


def loss_rising(history: History) -> Verdict | None:
    """Over windows: what had been learned is being lost, beyond noise, and validation does not say otherwise."""
    facts = history.facts
    now = history.last(max(3 * facts.block, facts.steps // 20))
    before = [
        block for block in history.blocks if block.last > facts.warmup and (not now or block.first < now[0].first)
    ]
    if not now or len(before) < 3:
        return None
    best, at = min((_mean_loss(before[n : n + 3]), before[n + 2].last) for n in range(len(before) - 2))
    level, error = _mean_loss(now), _error(now)
    learned = max(0.5, facts.chance - best)
    rise = level - best
    heard = [one for one in history.validations if one.step > at]
    known = [one.loss for one in history.validations if one.step <= at]
    agrees = bool(heard and known) and heard[-1].loss > min(known) + 0.5 * _GAVE_BACK * learned
    if heard and known and not agrees:
        return None
    needed = max(_GAVE_BACK * learned * (1 if agrees else 2), _RISE_SIGMAS * error)
    if rise < needed or min(block.loss for block in now) < best + 0.5 * needed:
        return None
    lost = rise / learned
    said = f"; validation rose from {min(known):.3f} to {heard[-1].loss:.3f}" if agrees else ""
    return Verdict(
        "diverged",
        "loss_rising",
        f"the loss rose from {best:.3f} (step {at}) to {level:.3f} over the last {_steps(now)} steps: {lost:.0%} of what"
        f" had been learned is gone{said}",
        f"--train.lr {facts.peak_lr / 3:.1g} in a new run, from the checkpoint before step {at}",
        evidence=(
            f"noise of that mean {error:.4f}",
            f"gradient norm {now[-1].grad_norm:.3g}",
            f"rate {now[-1].lr:.3g}",
        ),
    )


def spike(history: History) -> Verdict | None:
    """Three of the last five losses far outside of the usual spread: one odd batch is none."""
    if history.usual is None or history.step <= history.facts.warmup or not history.spiking:
        return None
    usual, spread = history.usual
    top = median(history.last_losses)
    return Verdict(
        "waste",
        "loss_spike",
        f"the loss jumped to {top:.3f} at step {history.step}; it was {usual:.3f} before, give or take {spread:.3f}",
        "nothing if it comes back; if it does so again, a lower train.lr or train.grad_clip",
        evidence=tuple(f"{loss:.4f}" for loss in history.last_losses),
    )


def plateau(history: History) -> Verdict | None:
    """Nothing more is gained, said only where the numbers are sure of it and validation agrees."""
    facts = history.facts
    span = history.last(max(PLATEAU_STEPS, round(PLATEAU_SHARE * facts.steps)))
    if not span or span[0].first < history.settled or span[-1].lr < _PLATEAU_LR * facts.peak_lr:
        return None
    half = len(span) // 2
    then, now = span[:half], span[half:]
    gain, error = _mean_loss(then) - _mean_loss(now), math.hypot(_error(then), _error(now))
    level = _mean_loss(now)
    if gain + 2 * error > _PLATEAU_GAIN * level or gain < -2 * error - _PLATEAU_GAIN * level:
        return None
    quarters = [_mean_loss(part) for whole in (then, now) for part in (whole[: half // 2], whole[half // 2 :]) if part]
    if max(quarters) - min(quarters) > 2 * _PLATEAU_GAIN * level + 3 * error:
        return None  # down and up again is another matter
    if facts.floor_nats is not None and level < 1.1 * facts.floor_nats:
        return None  # there is little left to learn
    inside = [one.loss for one in history.validations if one.step >= span[0].first]
    if history.validations and len(inside) < 2:
        return None
    if inside and min(inside[1:]) < inside[0] * (1 - _PLATEAU_GAIN):
        return None
    agrees = f"; the validation loss went from {inside[0]:.3f} to {inside[-1]:.3f}" if inside else ""
    return Verdict(
        "waste",
        "plateau",
        f"over the last {_steps(span)} steps the loss went from {_mean_loss(then):.3f} to {level:.3f}: under"
        f" {_PLATEAU_GAIN:.1%} was gained while the rate was {span[-1].lr / facts.peak_lr:.0%} of its peak{agrees}",
        "another train.lr (is it far too low, or too high?), or end it: eval.patience 5 does so by itself",
        evidence=(f"gain {gain:.4f}, give or take {error:.4f}", f"rate {span[-1].lr:.3g}"),
    )


def gradients_explode(history: History) -> Verdict | None:
    facts, usual = history.facts, _usual_norm(history)
    if usual is None or history.step <= facts.warmup:
        return None
    now = history.blocks[-1].grad_norm
    if now < EXPLODES * usual or now < facts.grad_clip:
        return None
    return Verdict(
        "diverged",
        "gradients_explode",
        f"the gradient norm is {now:.3g}, {now / usual:.0f} times what was usual in this run ({usual:.3g})",
        f"--train.lr {facts.peak_lr / 3:.1g} in a new run" + ("" if facts.grad_clip else ", and --train.grad_clip 1"),
        evidence=(f"median of the last {facts.block} steps {now:.4g}", f"loss {history.blocks[-1].loss:.4f}"),
    )


def gradients_vanish(history: History) -> Verdict | None:
    usual = _usual_norm(history)
    if usual is None:
        return None
    now = history.blocks[-1].grad_norm
    if now > VANISHES * usual:
        return None
    return Verdict(
        "waste",
        "gradients_vanish",
        f"the gradient norm is {now:.3g}, a {usual / max(now, 1e-30):,.0f}th of what was usual in this run ({usual:.3g}): next to"
        " nothing is learned",
        "look for a saturated layer, or a loss that no longer depends on the weights (lamp doctor)",
        evidence=(f"median of the last {history.facts.block} steps {now:.4g}", f"loss {history.blocks[-1].loss:.4f}"),
    )


def clipped_always(history: History) -> Verdict | None:
    """Hardly any step is taken as computed: each gradient is cut to less than a fifth."""
    facts = history.facts
    blocks = history.last(max(200, facts.steps // 10))
    if not facts.grad_clip or not blocks or blocks[0].first < history.settled:
        return None
    share = sum(block.clipped for block in blocks) / len(blocks)
    if share < _HARD_CLIP_SHARE:
        return None
    norm = median(block.grad_norm for block in blocks)
    return Verdict(
        "waste",
        "clipped_always",
        f"{share:.0%} of the last {_steps(blocks)} gradients were cut to less than a fifth: their norm is {norm:.3g},"
        f" train.grad_clip is {facts.grad_clip:g}",
        f"a lower train.lr, a larger batch, or --train.grad_clip {norm:.1g} if this norm is right for the model",
        evidence=(f"median norm {norm:.4g}",),
    )


def rate_near_zero(history: History) -> Verdict | None:
    """Outside of the end of the schedule, where it is meant."""
    facts = history.facts
    if history.low_rates < LR_STEPS or history.step > (1 - _LR_END) * facts.steps:
        return None
    warmup = facts.warmup / facts.steps
    return Verdict(
        "waste",
        "lr_zero",
        f"the learning rate has been under {LR_NEAR_ZERO:.1%} of its peak for {history.low_rates} steps (at step"
        f" {history.step}); warm-up takes {warmup:.0%} of the run",
        f"--train.warmup_steps {max(1, facts.steps // 20)} (optimizer steps)",
        evidence=(f"train.lr {facts.peak_lr:g} at its peak",),
    )


# ---------------------------------------------------------------- what is held out, passes over the data, samples


def overfitting(history: History) -> Verdict | None:
    """Validation rises over several looks while the training loss falls, and text was seen more than once."""
    found = _rise(history.validations, RISING, WORSE)
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


def gap_grows(history: History) -> Verdict | None:
    """The same within the first pass: what is validated on is unlike what is trained on now."""
    found = _rise(history.validations, NEW_RISING, NEW_WORSE)
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


def data_repeats(history: History) -> Verdict | None:
    """Many passes over the same text, and validation has gained nothing from the last of them."""
    if not history.blocks or history.blocks[-1].epoch <= _MANY_PASSES:
        return None
    passes, seen = history.blocks[-1].epoch, history.validations
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
        evidence=(f"{passes:.2f} passes at step {history.step}",),
    )


def degenerate_samples(history: History) -> Verdict | None:
    """What the model writes is one token or one short cycle, twice in a row."""
    last = history.samples[-_DEGENERATE_TIMES:]
    if len(last) < _DEGENERATE_TIMES or history.step < history.settled or any(one.repeat < _DEGENERATE for one in last):
        return None
    return Verdict(
        "waste",
        "sample_degenerate",
        f"{last[-1].repeat:.0%} of the sample at step {last[-1].step} is one short cycle of tokens, again and again"
        f" ({last[0].repeat:.0%} at step {last[0].step})",
        "look at the samples and at the text itself; is the loss still falling?",
        evidence=tuple(f"step {one.step}: {one.repeat:.3f}" for one in last),
    )


# ---------------------------------------------------------------- arithmetic


def _mean_loss(blocks: list[Block]) -> float:
    return sum(block.loss for block in blocks) / len(blocks)


def _error(blocks: list[Block]) -> float:
    """Standard error of the mean of the blocks' medians, from the noise inside them and between them."""
    mean = _mean_loss(blocks)
    inside = math.sqrt(sum(block.error**2 for block in blocks)) / len(blocks)
    between = math.sqrt(sum((b.loss - mean) ** 2 for b in blocks) / max(1, len(blocks) - 1) / len(blocks))
    return max(inside, between)


def _falls(history: History) -> bool:
    """Whether the loss still comes down, beyond noise: within the last hundred steps, or over twice as many."""
    losses = list(history.recent)
    half = len(losses) // 2
    if half < 2:
        return True
    (then, noise), (now, more) = (
        (mid := median(part), spread_of(part, mid)) for part in (losses[:half], losses[half:])
    )
    if then - now > 2 * 1.2533 * math.hypot(noise, more) / math.sqrt(half):
        return True
    blocks = history.last(2 * len(losses))
    middle = len(blocks) // 2
    if middle < 2:
        return False
    before, after = blocks[:middle], blocks[middle:]
    return _mean_loss(before) - _mean_loss(after) > 2 * math.hypot(_error(before), _error(after))


def _usual_norm(history: History) -> float | None:
    """The middle of all earlier blocks after warm-up."""
    norms = [block.grad_norm for block in history.blocks if block.last > history.facts.warmup][:-1]
    return median(norms) if len(norms) >= 4 else None


def _steps(blocks: list[Block]) -> int:
    return blocks[-1].last - blocks[0].first + 1
