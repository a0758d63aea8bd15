"""Model probe: whether it can learn. First loss, gradients, causality, the same answer twice, one batch by heart.

In:  a Patient.
Out: Findings: parameters without a gradient by name, the first position that sees the future, a loss that does not fall.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch

from lamplighter.doctor.model_fixture import SHORT, Bed, hangs_on_nothing, lay_down, seconds_of
from lamplighter.doctor.probe import Finding, Level, Patient
from lamplighter.doctor.sample_data import failed
from lamplighter.train import hardware as machines
from lamplighter.train import optimizers

LENGTH = 64  # positions of these probes, at most
ROWS = 4
STEPS, OVERFIT_S = 60, 6.0
ENOUGH, AT_MOST_S = 12, 25.0  # steps to judge by, and how long they may take
SLOW_S = 0.5  # a step: a smaller batch then
OVERFIT_LR = 1e-3
FALLEN = 0.75  # of the first loss
SHOWN = 6


def learning(patient: Patient) -> Iterator[Finding]:
    """Small but real batches of the run's own model."""
    for found in lay_down(patient):
        if isinstance(found, Finding):
            continue  # told by the first model probe
        try:
            yield from _examine(found, patient)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            yield failed(error, "the model fails on a short batch")


def _examine(bed: Bed, patient: Patient) -> Iterator[Finding]:
    patient.now("the first loss, and its gradients")
    machines.seed_step(bed.run.train.seed, 1, 0)
    first = bed.loss(bed.piece(ROWS, min(2 * LENGTH, bed.run.data.seq_len)))
    loss = float(first.detach())
    yield _first_loss(bed, loss)
    if not math.isfinite(loss):
        return
    if not first.requires_grad:
        yield hangs_on_nothing()
        return
    first.backward()  # type: ignore[no-untyped-call]
    yield _gradients(bed)
    bed.model.zero_grad(set_to_none=True)
    patient.now("a change at t must move nothing before t")
    yield _causality(bed)
    yield from _twice(bed)
    yield _by_heart(bed, patient)


# ---------------------------------------------------------------- the first loss


def _first_loss(bed: Bed, loss: float) -> Finding:
    """A model that knows nothing gives every token the same chance: ln(vocab)."""
    guess, given = math.log(bed.built.vocab_size), bed.run.model.init_from is not None
    figures = {"loss": loss, "ln_vocab": guess}
    what = f"the first loss is {loss:.3f}, ln(vocab {bed.built.vocab_size:,}) = {guess:.3f}"
    if not math.isfinite(loss):
        why, advice = "not a number before any step", "check the init, and divisions and logarithms in the model"
        return Finding("fault", what, why, advice, "nan_batch")
    if given:
        if loss > guess:
            why = "a trained model that guesses worse than chance: weights or tokenizer do not belong to it"
            return Finding(
                "fault", what, why, f"--tokenizer.path {bed.run.model.init_from}", "tokenizer_differs", figures=figures
            )
        return Finding("ok", f"{what}: it knows something already", f"of {bed.run.model.init_from}", figures=figures)
    if loss < 0.5 * guess:
        why = "a new model cannot know so much: it sees its targets"
        return Finding("fault", what, why, "look at the mask and the shift of the targets", "too_good", figures=figures)
    if loss > 1.25 * guess + 0.5:
        why = "worse than guessing: the weights begin too large, so the first steps only shrink them"
        return Finding("warn", what, why, "an init of about 0.02", "init_too_large", figures=figures)
    return Finding("ok", f"{what}: as of a model that knows nothing", figures=figures)


# ---------------------------------------------------------------- gradients


def _gradients(bed: Bed) -> Finding:
    """Every parameter that may learn must hear from the loss."""
    named = [(name, p) for name, p in bed.model.named_parameters() if p.requires_grad]
    deaf = [(name, p) for name, p in named if p.grad is None or not bool((p.grad != 0).any())]
    bad = [name for name, p in named if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
    if bad:
        why, advice = f"in {', '.join(bad[:SHOWN])}", "look at what these compute"
        return Finding("fault", f"{len(bad)} gradients are not finite before any step", why, advice, "nan_batch")
    if not deaf:
        return Finding("ok", f"gradients reach all {len(named)} parameter tensors")
    share = sum(p.numel() for _, p in deaf) / max(1, sum(p.numel() for _, p in named))
    names = ", ".join(name for name, _ in deaf[:SHOWN]) + (
        f" and {len(deaf) - SHOWN} more" if len(deaf) > SHOWN else ""
    )
    level: Level = "fault" if share > 0.1 else "warn"
    return Finding(
        level,
        f"{len(deaf)} of {len(named)} parameter tensors get no gradient ({share:.0%} of the weights): {names}",
        "they will stay as they are: a detach(), a no_grad(), an argmax or an unused part stands between them and the loss",
        "look for detach, no_grad, .data and .item() in forward; freeze on purpose with requires_grad_(False)",
        "no_gradient",
        {"module": deaf[0][0]},
        figures={"without_gradient": float(len(deaf)), "share": share},
    )


# ---------------------------------------------------------------- causality, and the same answer twice


@torch.no_grad()
def _causality(bed: Bed) -> Finding:
    """Change one token; no logits before it may move."""
    was = bed.model.training
    bed.model.eval()
    try:
        length = min(LENGTH, bed.run.data.seq_len)
        ids = torch.from_numpy(bed.piece(1, length).inputs)
        length = ids.shape[1]
        before = bed.logits(ids)
        noise = float((bed.logits(ids) - before).abs().max())
        limit = 1e-3 * float(before.std()) + 4 * noise
        for at in sorted({1, length // 2, length - 1}):
            other = ids.clone()
            other[0, at] = (other[0, at] + 1 + bed.built.vocab_size // 3) % bed.built.vocab_size
            moved = (bed.logits(other) - before).abs().amax(-1)[0, :at] > limit
            if bool(moved.any()):
                return _leak(int(moved.nonzero()[0]), at, int(moved.sum()))
    finally:
        bed.model.train(was)
    return Finding("ok", f"causal: a change at t moves nothing before t (1 x {length} tokens, three places)")


def _leak(first: int, at: int, count: int) -> Finding:
    return Finding(
        "fault",
        f"the future leaks: a change at position {at} moves the logits of position {first} ({count} of {at} before it)",
        "the model sees the tokens that it is to predict: its loss will fall to almost nothing, and it will not write",
        "a causal mask (is_causal=True), and targets shifted by one",
        "future_leak",
        {"position": first, "changed": at},
        figures={"first_position": float(first), "changed": float(at)},
    )


@torch.no_grad()
def _twice(bed: Bed) -> Iterator[Finding]:
    """In eval the same input gives the same answer; in training dropout makes it differ."""
    was = bed.model.training
    ids = torch.from_numpy(bed.piece(1, min(SHORT, bed.run.data.seq_len)).inputs)
    try:
        bed.model.eval()
        first, second = bed.logits(ids), bed.logits(ids)
        apart = float((first - second).abs().max())
        bed.model.train()
        dropped = float((bed.logits(ids) - bed.logits(ids)).abs().max())
    finally:
        bed.model.train(was)
    if apart > 1e-4 * float(first.std()):
        why = f"logits differ by up to {apart:.3g} between two equal calls in eval mode"
        yield Finding(
            "warn",
            "the model is random in eval mode",
            why,
            "functional dropout needs training=self.training",
            "eval_random",
        )
    elif bed.run.model.dropout > 0 and dropped == 0.0:
        what = f"model.dropout is {bed.run.model.dropout:g}, but nothing is dropped in training mode"
        yield Finding(
            "warn", what, "two equal calls give equal logits", "use the dropout argument in the model", "no_dropout"
        )
    else:
        yield Finding("ok", "the same input gives the same answer in eval mode")


# ---------------------------------------------------------------- one batch by heart


def _by_heart(bed: Bed, patient: Patient) -> Finding:
    """A model that can learn at all learns a few lines by heart within seconds."""
    batch = bed.piece(ROWS, min(LENGTH, bed.run.data.seq_len))
    if seconds_of(bed, batch) > SLOW_S:
        batch = bed.piece(1, min(SHORT, bed.run.data.seq_len))
    optimizer = optimizers.make_optimizer(bed.model, bed.run.train)
    first = last = math.nan
    began, step = time.monotonic(), 0
    for step in range(1, STEPS + 1):
        machines.seed_step(bed.run.train.seed, step, 0)
        loss = bed.loss(batch)
        last = float(loss.detach())
        first = last if step == 1 else first
        patient.now(f"one batch by heart: step {step} of {STEPS}, loss {last:.3f}")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(OVERFIT_LR, optimizers.clip_factor(float(optimizer.grad_norm()), bed.run.train.grad_clip))
        optimizer.zero_grad()
        spent = time.monotonic() - began
        if last < 0.5 * first or not math.isfinite(last) or spent > (OVERFIT_S if step >= ENOUGH else AT_MOST_S):
            break
    words = f"{first:.3f} -> {last:.3f} in {step} steps at a rate of {OVERFIT_LR:g}, {batch.inputs.shape[0]} x {batch.inputs.shape[1]} tokens"
    figures = {"first_loss": first, "last_loss": last, "steps": float(step)}
    guess = math.log(bed.built.vocab_size)
    if last <= FALLEN * first:
        return Finding("ok", f"learns one batch by heart: {words}", figures=figures)
    if not math.isfinite(last):
        return Finding(
            "fault", f"diverges on one small batch: {words}", "", "a smaller train.lr", "nan_batch", figures=figures
        )
    near = abs(last - guess) < 0.1 * guess
    if step < ENOUGH or (step < STEPS and last < 0.97 * first):
        what = f"one batch by heart: {words}; there was time for {step} steps only, too few to judge by"
        return Finding("ok", what, figures=figures)
    return Finding(
        "fault",
        f"cannot learn one batch by heart: {words}" + (f"; the loss stays at ln(vocab) = {guess:.3f}" if near else ""),
        "a few lines again and again are learned by any model that can learn: the loss does not reach the weights that matter",
        "see the parameters without a gradient; a loss at ln(vocab) means that nothing is learned",
        "not_learning",
        figures=figures,
    )
