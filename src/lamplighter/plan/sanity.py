"""Settings that are not impossible, only odd: warm-up, schedule, saves, validation, epochs, padding, vocabulary. No torch.

In:  a Plan.
Out: Checks: a line for each, with its numbers, and whether it is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lamplighter.plan.estimate import Plan

TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv:2203.15556
WARMUP_SHARE = 0.30
MANY_EPOCHS = 5
MUCH_PADDING = 0.20
DEAR_CRASH = 0.05  # of the whole run
LITTLE_VALIDATION = 10_000  # tokens
MUCH_VALIDATION = 0.20  # of the time
UNUSED_ROWS = 0.10


@dataclass(frozen=True)
class Check:
    """One setting, looked at."""

    name: str
    text: str
    warns: bool = False


def check(plan: Plan) -> list[Check]:
    return [*_rate(plan), *_saves(plan), *_validation(plan), *_data(plan), *_vocabulary(plan), *_size(plan)]


def warnings(plan: Plan) -> list[str]:
    return [f"{found.name}: {found.text}" for found in check(plan) if found.warns]


def _rate(plan: Plan) -> Iterator[Check]:
    job, rate = plan.job, plan.job.rate
    if rate is None:
        return
    share = rate.warmup / job.steps
    unit = f"{rate.warmup:,} of {job.steps:,} optimizer steps = {share:.0%} of the run"
    micro = f" (not micro-batches: {job.accumulation} of them make a step)" if job.accumulation > 1 else ""
    if share > 1:
        never = f"{unit}{micro}: the peak rate would never be reached; --train.warmup_steps {max(1, job.steps // 20)}"
        yield Check("warm-up", never, True)
    elif share > WARMUP_SHARE:
        advice = f"under 10 % is usual: --train.warmup_steps {max(1, job.steps // 20)}"
        yield Check("warm-up", f"{unit}{micro}; {advice}", True)
    else:
        yield Check("warm-up", unit)
    last = rate.lr_at(job.steps)
    how = f"{rate.shape}, from {rate.peak:.2e} to {last:.2e} at step {job.steps:,}, which is the last"
    yield Check("schedule", how if rate.shape != "constant" else f"constant at {rate.peak:.2e}: it never falls")


def _saves(plan: Plan) -> Iterator[Check]:
    job, hours = plan.job, plan.between_saves_h
    due = [f"every {job.save_every_steps:,} steps"] if job.save_every_steps else []
    due += [f"every {job.save_every_s:g} s"] if job.save_every_s else []
    lost = f"{hours * 60:,.1f} min" if hours < 2 else f"{hours:,.1f} h"
    cost = f"${hours * job.usd_per_hour:,.2f}" if job.usd_per_hour is not None else lost
    none = hours >= plan.hours and plan.hours > 1 / 6
    words = f"{' or '.join(due) or 'only at the end'}: a crash can cost {cost}"
    dear = none or (hours > DEAR_CRASH * plan.hours and plan.hours > 2)
    yield Check("saves", words + (" (save.every_s 600 would be ten minutes)" if dear else ""), dear)


def _validation(plan: Plan) -> Iterator[Check]:
    job = plan.job
    if job.text is None or job.text.val_tokens is None:
        return
    held = job.text.val_tokens
    windows = -(-held // job.seq_len)
    used = min(windows, job.eval_windows) if job.eval_windows else windows
    tokens = min(held, used * job.seq_len)
    times = job.steps // job.eval_every_steps if job.eval_every_steps else 1
    share = times * tokens / 3 / max(1, job.tokens)  # a forward pass alone is a third of the work
    words = f"{tokens:,} of {held:,} tokens, {max(1, times):,} times: {share:.1%} of the work"
    if not held:
        yield Check("validation", "nothing is held back: nobody will know whether it learns (data.val_fraction)", True)
    elif held < LITTLE_VALIDATION:
        yield Check("validation", f"{words}; so few tokens are a coarse measure (data.val_fraction)", True)
    elif share > MUCH_VALIDATION:
        yield Check("validation", f"{words}; fewer eval.windows, or a larger eval.every_steps", True)
    else:
        yield Check("validation", words)


def _data(plan: Plan) -> Iterator[Check]:
    job = plan.job
    if job.epochs is not None and job.text is not None:
        words = f"{job.epochs:.1f} over {job.text.tokens:,} tokens"
        many = job.epochs > MANY_EPOCHS
        advice = f"; 1 to 4 are usual: --train.epochs 3 is {job.steps * 3 / job.epochs:,.0f} steps" if many else ""
        yield Check("epochs", words + advice, many)
    if job.text is not None and job.text.padding > MUCH_PADDING:
        words = f"{job.text.padding:.0%} of the positions that are computed are padding"
        yield Check("padding", f"{words}: a smaller data.seq_len, or --data.packing packed", True)
    elif job.text is not None:
        yield Check("padding", f"{job.text.padding:.1%} of the positions")


def _vocabulary(plan: Plan) -> Iterator[Check]:
    known, given = plan.job.shape.vocab_size, plan.job.tokenizer_vocab
    if given is None:
        return
    words = f"the tokenizer has {given:,} tokens, the model {known:,}"
    if given < known * (1 - UNUSED_ROWS):
        yield Check("vocabulary", f"{words}: {1 - given / known:.0%} of the embedding is never used", True)
    else:
        yield Check("vocabulary", words)


def _size(plan: Plan) -> Iterator[Check]:
    ratio = plan.job.tokens / plan.params
    words = f"{ratio:.1f} tokens per parameter; about {TOKENS_PER_PARAMETER} is balanced (Hoffmann et al. 2022, arXiv:2203.15556)"
    few = ratio < TOKENS_PER_PARAMETER / 10
    yield Check("balance", words + ("; more text, or a smaller model" if few else ""), few)
