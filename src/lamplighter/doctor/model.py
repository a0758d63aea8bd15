"""Model probes: one real step in pieces, and whether the model can learn.

In:  a ProbeContext.
Out: Findings: true parameters, time of a step, slow modules and loops by their line; parameters without a gradient, the first
     position that sees the future, a loss that does not fall.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch

from lamplighter.data.batches import Batch
from lamplighter.doctor import python_loops
from lamplighter.doctor.model_fixture import SHORT, ModelFixture, no_gradient_at_all, prepare, prepare_again
from lamplighter.doctor.probe import Finding, ProbeContext, failed, fault, finding, ok, warn
from lamplighter.model.transformer import Transformer
from lamplighter.procs import stacks
from lamplighter.train import hardware as machines
from lamplighter.train import optimizers

_MUCH_TIME = 0.3  # of a forward pass in one Python loop
_LENGTH, _ROWS = 64, 4  # of the batches that are learned, at most
_STEPS, _OVERFIT_S = 60, 6.0
ENOUGH, AT_MOST_S = 12, 25.0  # steps to judge by, and how long they may take
SLOW_S = 0.5  # a step: a smaller batch then
_OVERFIT_LR = 1e-3
_FALLEN = 0.75  # of the first loss
_SHOWN = 6
_MODEL_FAILS = (RuntimeError, IndexError, TypeError, ValueError)  # what a model raises that does not fit its input


# ---------------------------------------------------------------- one step


def one_step(context: ProbeContext) -> Iterator[Finding]:
    """Forward, backward and optimizer, uncompiled, on the run's own data."""
    fixture = prepare(context)
    yield from fixture.remarks
    yield _parameters(fixture)
    yield from _step(fixture, context)


def _parameters(fixture: ModelFixture) -> Finding:
    """The true count, whatever the name says."""
    total = fixture.built.parameters
    frozen = sum(p.numel() for p in fixture.model.parameters() if not p.requires_grad)
    what = f"{total:,} parameters, {total / 1e6:.1f}M" + (f", of which {frozen:,} are frozen" if frozen else "")
    why = f"counted, with a vocabulary of {fixture.built.vocab_size:,} and {fixture.built.positions:,} positions"
    return ok(what, why, figures={"parameters": float(total)})


def _step(fixture: ModelFixture, context: ProbeContext) -> Iterator[Finding]:
    context.now("a first, short forward pass")
    if (small_vocabulary := _vocabulary(fixture)) is not None:
        yield small_vocabulary
        return
    try:
        small = fixture.loss(fixture.piece(1, SHORT))
    except _MODEL_FAILS as error:
        yield failed(error, f"a forward pass of 1 x {SHORT} tokens fails")
        return
    if not math.isfinite(first := float(small.detach())):
        yield fault(f"the first loss is {first}", "before any step", "check the init", "nan_batch")
        return
    if not small.requires_grad:
        yield no_gradient_at_all()
        return
    yield from _loop(fixture, context)
    context.now("one forward, backward and step")
    batch, words = fixture.quick_rows()
    yield _timed(fixture, batch, words)
    yield _slowest_modules(fixture, batch)


@torch.no_grad()
def _vocabulary(fixture: ModelFixture) -> Finding | None:
    """The highest id goes in, and as many logits come out."""
    size, length = fixture.built.vocab_size, min(SHORT, fixture.run.data.seq_len)
    advice = "give the embedding and the head vocab_size rows"
    try:
        shape = tuple(fixture.logits(torch.full((1, length), size - 1)).shape)
    except IndexError as error:
        place = stacks.line_to_name(stacks.frames_of_error(error))
        where = f", at {place.place}" if place else ""
        what = f"the embedding is smaller than the vocabulary: id {size - 1:,} of {size:,} cannot be looked up{where}"
        return fault(what, str(error), advice, "token_range", at=place)
    except _MODEL_FAILS as error:
        return failed(error, f"a forward pass of 1 x {length} tokens fails")
    if shape != (1, length, size):
        what = f"the model gives logits of shape {shape}, wanted {(1, length, size)}: [batch, time, vocabulary]"
        return fault(what, f"the tokenizer has {size:,} tokens", advice, "token_range")
    return None


def _timed(fixture: ModelFixture, batch: Batch, words: str) -> Finding:
    """The second of two steps: the first one allocates."""
    optimizer = optimizers.make_optimizer(fixture.model, fixture.run.train)
    for _ in range(2):
        marks = [time.perf_counter()]
        loss = fixture.loss(batch)
        fixture.wait()
        marks.append(time.perf_counter())
        loss.backward()  # type: ignore[no-untyped-call]
        fixture.wait()
        marks.append(time.perf_counter())
        optimizer.step(1e-9)
        optimizer.zero_grad()
        fixture.wait()
        marks.append(time.perf_counter())
    forward, backward, update = (after - before for before, after in pairwise(marks))
    sequences = fixture.run.train.batch_size
    tokens = sequences * fixture.run.data.seq_len
    step_s = update + (forward + backward) * tokens / batch.inputs.size
    rate = tokens / step_s
    mfu = rate * fixture.built.flops_per_token(batch.inputs.shape[1]) / max(1.0, fixture.machine.peak_flops)
    parts = f"forward {forward * 1000:,.0f} ms, backward {backward * 1000:,.0f} ms, optimizer {update * 1000:,.0f} ms"
    figures = {"step_s": step_s, "tokens_per_s": rate, "mfu": mfu}
    return ok(
        f"one step, uncompiled, {fixture.machine.dtype_name}: {parts}; {rate:,.0f} tokens/s, {mfu:.0%} of the peak",
        f"{words}, {fixture.words}; a whole step of {sequences} sequences takes about {step_s:.2f} s",
        figures={**figures, "forward_s": forward, "backward_s": backward, "optimizer_s": update},
    )


def _slowest_modules(fixture: ModelFixture, batch: Batch) -> Finding:
    """Time of each module in a forward pass, its children apart."""
    spent: dict[str, float] = defaultdict(float)
    began: list[float] = []
    inner = [0.0]  # by depth: seconds spent in the modules below

    def enter(*_: object) -> None:
        inner.append(0.0)
        began.append(time.perf_counter())

    def leave(name: str, *_: object) -> None:
        fixture.wait()
        took = time.perf_counter() - began.pop()
        spent[name] += took - inner.pop()
        inner[-1] += took

    handles = []
    for name, module in fixture.model.named_modules():
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(partial(leave, name or type(module).__name__)))
    try:
        with torch.no_grad():
            fixture.loss(batch)
    finally:
        for handle in handles:
            handle.remove()
    total = sum(spent.values()) or 1e-9
    shares = {name: spent[name] / total for name in sorted(spent, key=lambda name: -spent[name])[:4]}
    shown = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    figures = {f"share:{name}": share for name, share in shares.items()}
    return ok(f"the slowest modules of a forward pass ({total * 1000:,.0f} ms): {shown}", figures=figures)


def _loop(fixture: ModelFixture, context: ProbeContext) -> Iterator[Finding]:
    """A Python loop over tokens, which no device makes fast."""
    if isinstance(fixture.model, Transformer):
        return
    context.now("lines of the model that run once per token")

    def forward(length: int) -> None:
        with torch.no_grad():
            fixture.loss(fixture.piece(1, length))

    tokens = fixture.run.data.seq_len
    length = min(2 * SHORT, tokens)
    try:
        found = python_loops.find(forward, max(8, length // 2), length)
    except (RuntimeError, IndexError) as error:
        yield failed(error, "the model takes no shorter input than data.seq_len, so its loops were not counted")
        return
    if found is None:
        yield ok("no line of the model runs once per token")
        return
    runs, place = round(found.runs * tokens), found.place
    yield finding(
        "fault" if found.share > _MUCH_TIME else "warn",
        f"a Python loop over tokens: {place.place} runs {runs:,} times per forward, {found.share:.0%} of its time",
        f"{place.text} is run for every token ({tokens:,} in a sequence), and each turn waits for the one before it; it"
        " looks like a hang, and a compiler unrolls it",
        "compute all positions at once (one matrix product, a scan or a cumulative sum); --train.compile false until then",
        "python_loop",
        at=place,
        settings={"train.compile": False} if fixture.run.train.compile else {},
        figures={"runs": runs, "share": found.share},
    )


# ---------------------------------------------------------------- learning


def learning(context: ProbeContext) -> Iterator[Finding]:
    """Small but real batches of the run's own model."""
    fixture = prepare_again(context)
    try:
        yield from _examine(fixture, context)
    except _MODEL_FAILS as error:
        yield failed(error, "the model fails on a short batch")


def _examine(fixture: ModelFixture, context: ProbeContext) -> Iterator[Finding]:
    context.now("the first loss, and its gradients")
    machines.seed_step(fixture.run.train.seed, 1, 0)
    first = fixture.loss(fixture.piece(_ROWS, min(2 * _LENGTH, fixture.run.data.seq_len)))
    loss = float(first.detach())
    yield first_loss(fixture, loss)
    if not math.isfinite(loss):
        return
    if not first.requires_grad:
        yield no_gradient_at_all()
        return
    first.backward()  # type: ignore[no-untyped-call]
    yield _gradients(fixture)
    fixture.model.zero_grad(set_to_none=True)
    context.now("a change at t must move nothing before t")
    yield _causality(fixture)
    yield _same_answer_twice(fixture)
    yield _overfit_one_batch(fixture, context)


def first_loss(fixture: ModelFixture, loss: float) -> Finding:
    """A model that knows nothing gives every token the same chance: ln(vocab)."""
    guess, given = math.log(fixture.built.vocab_size), fixture.run.model.init_from
    figures = {"loss": loss, "ln_vocab": guess}
    what = f"the first loss is {loss:.3f}, ln(vocab {fixture.built.vocab_size:,}) = {guess:.3f}"
    if not math.isfinite(loss):
        why, advice = "not a number before any step", "check the init, and divisions and logarithms in the model"
        return fault(what, why, advice, "nan_batch")
    if given is not None and loss > guess:
        why = "a trained model that guesses worse than chance: weights or tokenizer do not belong to it"
        return fault(what, why, f"--tokenizer.path {given}", "tokenizer_differs", figures=figures)
    if given is not None:
        return ok(f"{what}: it knows something already", f"of {given}", figures=figures)
    if loss < 0.5 * guess:
        why = "a new model cannot know so much: it sees its targets"
        return fault(what, why, "look at the mask and the shift of the targets", "too_good", figures=figures)
    if loss > 1.25 * guess + 0.5:
        why = "worse than guessing: the weights begin too large, so the first steps only shrink them"
        return warn(what, why, "an init of about 0.02", "init_too_large", figures=figures)
    return ok(f"{what}: as of a model that knows nothing", figures=figures)


def _gradients(fixture: ModelFixture) -> Finding:
    """Every parameter that may learn must hear from the loss."""
    named = [(name, p) for name, p in fixture.model.named_parameters() if p.requires_grad]
    without = [(name, p) for name, p in named if p.grad is None or not bool((p.grad != 0).any())]
    bad = [name for name, p in named if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
    if bad:
        why, advice = f"in {', '.join(bad[:_SHOWN])}", "look at what these compute"
        return fault(f"{len(bad)} gradients are not finite before any step", why, advice, "nan_batch")
    if not without:
        return ok(f"gradients reach all {len(named)} parameter tensors")
    share = sum(p.numel() for _, p in without) / max(1, sum(p.numel() for _, p in named))
    names = ", ".join(name for name, _ in without[:_SHOWN])
    names += f" and {len(without) - _SHOWN} more" if len(without) > _SHOWN else ""
    return finding(
        "fault" if share > 0.1 else "warn",
        f"{len(without)} of {len(named)} parameter tensors get no gradient ({share:.0%} of the weights): {names}",
        "they will stay as they are: a detach(), a no_grad(), an argmax or an unused part stands between them and the loss",
        "look for detach, no_grad, .data and .item() in forward; freeze on purpose with requires_grad_(False)",
        "no_gradient",
        culprit={"module": without[0][0]},
        figures={"without_gradient": float(len(without)), "share": share},
    )


@contextmanager
def _in_eval(fixture: ModelFixture) -> Iterator[None]:
    fixture.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        fixture.model.train()


def _causality(fixture: ModelFixture) -> Finding:
    """Change one token; no logits before it may move."""
    ids, vocab_size = torch.from_numpy(fixture.piece(1, _LENGTH).inputs), fixture.built.vocab_size
    length = ids.shape[1]
    with _in_eval(fixture):
        before = fixture.logits(ids)
        noise = float((fixture.logits(ids) - before).abs().max())
        limit = 1e-3 * float(before.std()) + 4 * noise
        for at in sorted({1, length // 2, length - 1}):
            other = ids.clone()
            other[0, at] = (other[0, at] + 1 + vocab_size // 3) % vocab_size
            moved = (fixture.logits(other) - before).abs().amax(-1)[0, :at] > limit
            if bool(moved.any()):
                return _leak(int(moved.nonzero()[0]), at, int(moved.sum()))
    return ok(f"causal: a change at t moves nothing before t (1 x {length} tokens, three places)")


def _leak(first: int, at: int, count: int) -> Finding:
    return fault(
        f"the future leaks: a change at position {at} moves the logits of position {first} ({count} of {at} before it)",
        "the model sees the tokens that it is to predict: its loss will fall to almost nothing, and it will not write",
        "a causal mask (is_causal=True), and targets shifted by one",
        "future_leak",
        culprit={"position": first, "changed": at},
        figures={"first_position": float(first), "changed": float(at)},
    )


def _same_answer_twice(fixture: ModelFixture) -> Finding:
    """In eval mode the same input gives the same answer."""
    ids = torch.from_numpy(fixture.piece(1, SHORT).inputs)
    with _in_eval(fixture):
        first, second = fixture.logits(ids), fixture.logits(ids)
    apart = float((first - second).abs().max())
    if apart <= 1e-4 * float(first.std()):
        return ok("the same input gives the same answer in eval mode")
    why = f"logits differ by up to {apart:.3g} between two equal calls in eval mode"
    advice = "functional dropout needs training=self.training"
    return warn("the model is random in eval mode", why, advice, "eval_random")


def _overfit_one_batch(fixture: ModelFixture, context: ProbeContext) -> Finding:
    """A model that can learn at all learns a few lines by heart within seconds."""
    batch = fixture.piece(_ROWS, _LENGTH)
    if fixture.seconds_of(batch) > SLOW_S:
        batch = fixture.piece(1, SHORT)
    optimizer = optimizers.make_optimizer(fixture.model, fixture.run.train)
    first = last = math.nan
    began, step = time.monotonic(), 0
    for step in range(1, _STEPS + 1):
        machines.seed_step(fixture.run.train.seed, step, 0)
        loss = fixture.loss(batch)
        last = float(loss.detach())
        first = last if step == 1 else first
        context.now(f"one batch by heart: step {step} of {_STEPS}, loss {last:.3f}")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(_OVERFIT_LR, optimizers.clip_factor(float(optimizer.grad_norm()), fixture.run.train.grad_clip))
        optimizer.zero_grad()
        spent = time.monotonic() - began
        if last < 0.5 * first or not math.isfinite(last) or spent > (_OVERFIT_S if step >= ENOUGH else AT_MOST_S):
            break
    rows, length = batch.inputs.shape
    words = f"{first:.3f} -> {last:.3f} in {step} steps at a rate of {_OVERFIT_LR:g}, {rows} x {length} tokens"
    figures = {"first_loss": first, "last_loss": last, "steps": float(step)}
    if last <= _FALLEN * first:
        return ok(f"learns one batch by heart: {words}", figures=figures)
    if not math.isfinite(last):
        return fault(f"diverges on one small batch: {words}", "", "a smaller train.lr", "nan_batch", figures=figures)
    if step < ENOUGH or (step < _STEPS and last < 0.97 * first):
        what = f"one batch by heart: {words}; there was time for {step} steps only, too few to judge by"
        return ok(what, figures=figures)
    guess = math.log(fixture.built.vocab_size)
    near = f"; the loss stays at ln(vocab) = {guess:.3f}" if abs(last - guess) < 0.1 * guess else ""
    return fault(
        f"cannot learn one batch by heart: {words}{near}",
        "a few lines again and again are learned by any model that can learn: the loss does not reach the weights that matter",
        "see the parameters without a gradient; a loss at ln(vocab) means that nothing is learned",
        "not_learning",
        figures=figures,
    )
