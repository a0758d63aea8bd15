"""The run's own model on this machine, with real batches of its own data; and whether it can learn.

In:  a ProbeContext.
Out: a ModelFixture for all model probes: model, machine, batches that are small enough for a quick look; how small, and of what,
     is said. Findings: the first loss, parameters without a gradient, the first position that sees the future, a loss that does
     not fall.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from lamplighter.config import Model, Run
from lamplighter.data.batch_source import BatchSource
from lamplighter.data.batches import NO_TARGET, Batch, Pairs
from lamplighter.data.setup import OpenedText, choose_template, open_batches, open_text
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.doctor.probe import (
    CannotExamine,
    Finding,
    ProbeContext,
    as_finding,
    failed,
    fault,
    finding,
    ok,
    skip,
    warn,
)
from lamplighter.doctor.sample_data import SampledRun, take
from lamplighter.errors import BadData, LampError
from lamplighter.model.build import Built, build
from lamplighter.model.lora import adapters_of, check_targets
from lamplighter.model.shape import count_parameters, hidden_parameters
from lamplighter.plan.job import known_shape, shape_of
from lamplighter.procs import procfs
from lamplighter.rundir import human_bytes
from lamplighter.train import hardware as machines
from lamplighter.train import optimizers, preference
from lamplighter.train.gradients import answer_nats, batch_loss
from lamplighter.train.hardware import Machine

_STEP_S = 1.5  # about so long may one forward and backward of a probe take
_FITS = 0.6  # of the free memory: activations come on top
SHORT = 32  # positions of the first, careful look
_LENGTH, _ROWS = 64, 4  # of the batches that are learned, at most
_STEPS, OVERFIT_S = 60, 6.0
ENOUGH, AT_MOST_S = 12, 25.0  # steps to judge by, and how long they may take
SLOW_S = 0.5  # a step: a smaller batch then
_OVERFIT_LR = 1e-3
_FALLEN = 0.75  # of the first loss
_SHOWN = 6
MODEL_FAILS = (RuntimeError, IndexError, TypeError, ValueError)  # what a model raises that does not fit its input


@dataclass(frozen=True)
class ModelFixture:
    """The context's model, ready to be examined."""

    run: Run
    machine: Machine
    built: Built
    batch: Batch
    words: str  # what the batch is made of
    remarks: tuple[Finding, ...] = ()  # what was met on the way

    @property
    def model(self) -> torch.nn.Module:
        return self.built.model

    @property
    def rows_each(self) -> int:
        """Of a preference pair whose answers stand in rows of their own: two."""
        return self.batch.pairs.rows_each if self.batch.pairs is not None else 1

    @property
    def rows(self) -> int:
        """Of a micro-batch."""
        return (self.run.train.micro_batch or self.run.train.batch_size) * self.rows_each

    def piece(self, rows: int, length: int | None = None) -> Batch:
        """The first rows of the batch, again and again where it has fewer; and of them the first positions.

        Preference pairs, which cannot be cut, become the tokens of their answers: as much work, and what tells a sound model.
        """
        batch, end = self.batch, length or self.batch.inputs.shape[1]
        which = np.arange(rows) % len(batch.inputs)
        inputs, targets = batch.inputs[which, :end], batch.targets[which, :end]
        segments = None if batch.segments is None else batch.segments[which, :end]
        if not (targets != NO_TARGET).any():  # nothing is learned in so short a piece: the questions then
            targets[:, :-1] = inputs[:, 1:]
        real = int((targets != NO_TARGET).sum())
        return Batch(1, inputs, targets, segments, batch.samples[:rows], epoch=0.0, real_tokens=real)

    def loss(self, batch: Batch, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The mean loss of a batch, as in training."""
        machine = replace(self.machine, dtype=dtype or self.machine.dtype)
        whole, scale = self.run.train.loss == "whole", 1 / batch.real_tokens
        return batch_loss(self.model, batch, machine, whole=whole, scale=scale)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """In fp32, for comparing."""
        found: torch.Tensor = self.model(ids.to(self.machine.device))
        return found.float()

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.machine.device.type == "cuda":
            torch.cuda.synchronize(self.machine.device)

    def seconds_of(self, batch: Batch, dtype: torch.dtype | None = None) -> float:
        """One forward and backward."""
        began = time.perf_counter()
        self.loss(batch, dtype).backward()  # type: ignore[no-untyped-call]
        self.wait()
        spent = time.perf_counter() - began
        self.model.zero_grad(set_to_none=True)
        return spent

    def quick_rows(self) -> tuple[Batch, str]:
        """As much of the micro-batch as takes about STEP_S: shorter rows of a slow model, else whole rows, found by doubling."""
        whole = self.batch.inputs.shape[1]
        length = min(whole, 2 * SHORT)
        spent = min(self.seconds_of(self.piece(1, length)) for _ in range(2))  # the first one allocates
        fits = int(length * _STEP_S / max(1e-9, spent))
        length = whole if fits >= whole else max(SHORT, fits)
        rows, batch = 1, self.piece(1, length)
        spent = self.seconds_of(batch)
        while rows < self.rows and spent * 2 < _STEP_S:
            rows = min(2 * rows, self.rows)
            batch = self.piece(rows, length)
            spent = self.seconds_of(batch)
        if (rows, length) == (self.rows, whole):
            return batch, f"{rows} x {length} tokens, the whole micro-batch"
        return batch, f"{rows} x {length} tokens of the micro-batch of {self.rows} x {whole}"


# ---------------------------------------------------------------- made as training makes it


def prepare(context: ProbeContext, quick_dtype: bool = True) -> ModelFixture:
    """Build the model as training would; CannotExamine where that fails."""
    try:
        return _prepare(context, quick_dtype)
    except LampError as error:
        raise CannotExamine(as_finding(error)) from error
    except (RuntimeError, TypeError, ValueError, AttributeError, ImportError) as error:  # the user's own model
        raise CannotExamine(failed(error, "the model cannot be built")) from error


def prepare_again(context: ProbeContext, quick_dtype: bool = True) -> ModelFixture:
    """For the probes after the first one, which has told what is wrong with the model."""
    try:
        return prepare(context, quick_dtype)
    except CannotExamine as end:
        raise CannotExamine(skip("there is no model to examine: see model / one step")) from end


def _prepare(context: ProbeContext, quick_dtype: bool) -> ModelFixture:
    run, remarks = context.run, list[Finding]()
    data: _Data | None = None
    vocab_size, end_of_text = run.tokenizer.vocab_size if run.tokenizer.kind == "bpe" else 257, 0
    context.now("the data")
    try:
        data = _open_data(context)
        vocab_size, end_of_text = data.vocab_size, data.tokenizer.end_of_text
    except (CannotExamine, LampError) as error:
        remarks.append(warn("the model is examined on random ids", f"the data could not be used: {error}"))
    context.now("the model")
    section = replace(run.train, dtype="fp32") if quick_dtype and run.train.dtype == "auto" else run.train
    machine = machines.detect(section, shape=known_shape(run))
    layers = _layers_that_fit(run, vocab_size, remarks)
    built = build(layers, vocab_size, run.data.seq_len, end_of_text, run.train.seed, lora=run.lora)
    if built.adapter is not None:
        check_targets(built.model, run.lora.targets)
    built.model.to(machine.device)
    built.model.train()
    if data is None:
        made_up = _random_batch(run, built.vocab_size)
        return ModelFixture(run, machine, built, made_up, "random ids", remarks=tuple(remarks))
    source = data.lay_out(built.takes_segments)
    source.start(1, None)
    batch = source.next(1)
    source.close()
    if batch is None:
        raise BadData("the sample of the data does not fill one batch", data.sample.words, "more text")
    return ModelFixture(run, machine, built, batch, f"a batch out of {data.sample.words}", remarks=tuple(remarks))


@dataclass(frozen=True)
class _Data:
    """The sample, ready to be laid out in batches."""

    sample: SampledRun
    tokenizer: Tokenizer
    vocab_size: int  # that the model of the run will have
    lay_out: Callable[[bool], BatchSource]


def _open_data(context: ProbeContext) -> _Data:
    sample, section = take(context), context.run.tokenizer
    source, tokenizer = open_text(sample.run, sample.cache)
    template = choose_template(sample.run, source, tokenizer)
    few = replace(sample.run, data=replace(sample.run.data, workers=1, cache="auto"))
    lay_out = open_batches(few, sample.cache, sample.cache, OpenedText(source, tokenizer, template))
    is_trained = section.path is None and context.run.model.init_from is None and section.kind == "bpe"
    return _Data(sample, tokenizer, max(tokenizer.vocab_size, section.vocab_size if is_trained else 0), lay_out)


def available_bytes() -> int:
    """Of memory, for a model that is still to be built."""
    return procfs.memory_available()


def _layers_that_fit(run: Run, vocab_size: int, remarks: list[Finding]) -> Model:
    """Weights, gradients and optimizer must fit; where they do not, as many layers as do, and that is said."""
    section, have = run.model, available_bytes()
    if section.init_from is not None or ":" in section.family:
        return section
    shape, layers = shape_of(run, vocab_size), section.layers

    def need_of(some: int) -> int:
        cut = replace(shape, layers=some)
        return run.train.optimizer_kind.training(count_parameters(cut), hidden_parameters(cut))

    while layers > 1 and need_of(layers) > _FITS * have:
        layers = max(1, layers // 2)
    if layers < section.layers:
        need = human_bytes(need_of(section.layers))
        what = f"the model is examined with {layers} of its {section.layers} layers"
        why = f"all of it takes {need} for weights, gradients and optimizer; {human_bytes(have)} are free here"
        remarks.append(warn(what, why, "lamp plan", "rss_oom"))
    return replace(section, layers=layers)


def _random_batch(run: Run, vocab_size: int) -> Batch:
    rows, length = run.train.batch_size, run.data.seq_len
    ids = np.random.default_rng(run.train.seed).integers(0, vocab_size, (rows, length + 1), dtype=np.int64)
    inputs, targets, samples = ids[:, :-1].copy(), ids[:, 1:].copy(), np.arange(rows, dtype=np.int64)
    return Batch(1, inputs, targets, None, samples, epoch=0.0, real_tokens=rows * length)


def no_gradient_at_all() -> Finding:
    """Of a loss without any gradient."""
    what = "the loss hangs on no parameter: nothing can be learned"
    why = "no_grad, detach or requires_grad_(False) stands over all of the forward pass"
    return fault(what, why, "look for these in the model", "not_learning")


# ---------------------------------------------------------------- learning


def learning(context: ProbeContext) -> Iterator[Finding]:
    """Small but real batches of the run's own model."""
    fixture = prepare_again(context)
    try:
        yield from _examine(fixture, context)
    except MODEL_FAILS as error:
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
    if fixture.batch.pairs is not None:
        context.now("the first loss of pairs")
        yield _first_loss_of_pairs(fixture, fixture.batch.pairs)
    context.now("a change at t must move nothing before t")
    yield _causality(fixture)
    yield _same_answer_twice(fixture)
    yield _overfit_one_batch(fixture, context)


def first_loss(fixture: ModelFixture, loss: float) -> Finding:
    """A model that knows nothing gives every token the same chance: ln(vocab)."""
    guess, given = math.log(fixture.built.vocab_size), fixture.run.model.init_from
    figures = {"loss": loss, "ln_vocab": guess}
    of = " of the answers' tokens" if fixture.run.train.objective == "dpo" else ""
    what = f"the first loss{of} is {loss:.3f}, ln(vocab {fixture.built.vocab_size:,}) = {guess:.3f}"
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


def _first_loss_of_pairs(fixture: ModelFixture, pairs: Pairs) -> Finding:
    """Measured against itself a model prefers nothing: ln 2, and the gradient lifts the chosen answers."""
    few = slice(0, min(len(fixture.batch.inputs), _ROWS * pairs.rows_each))
    whole = fixture.run.train.loss == "whole"
    fixture.model.eval()  # without dropout, as the reference is made
    nats_N, answers_N = answer_nats(fixture.model, fixture.batch, fixture.machine, whole=whole, rows=few)
    numbers, logps = preference.answer_logps(nats_N.detach(), answers_N)
    known = np.zeros(int(numbers.max()) + 1)
    known[numbers] = logps.cpu().numpy()
    batch = replace(fixture.batch, pairs=replace(pairs, reference=known))
    count = len(numbers) // 2
    loss = batch_loss(fixture.model, batch, fixture.machine, whole=whole, scale=1 / count, rows=few)
    first, learns = float(loss.detach()), loss.requires_grad
    if learns:
        loss.backward()  # type: ignore[no-untyped-call]
        learns = any(p.grad is not None and bool((p.grad != 0).any()) for p in fixture.model.parameters())
    fixture.model.zero_grad(set_to_none=True)
    fixture.model.train()
    figures = {"pair_loss": first, "ln_2": preference.CHANCE}
    what = f"the first loss of {count} pairs is {first:.6f}, ln 2 = {preference.CHANCE:.6f}"
    if not abs(first - preference.CHANCE) <= 1e-4:
        why = "the same weights gave the same answers other probabilities the second time"
        return fault(what, why, "functional dropout needs training=self.training", "eval_random", figures=figures)
    if not learns:
        return fault(
            f"{what}, without a gradient", "chosen and rejected would never part", "look at the rows", "not_learning"
        )
    return ok(f"{what}: no preference before the first step", figures=figures)


def _gradients(fixture: ModelFixture) -> Finding:
    """Every parameter that may learn must hear from the loss. Of an adapter that is B: as long as B is zero, A hears nothing."""
    waiting = {
        id(layer.lora_A.weight)
        for layer in adapters_of(fixture.model).values()
        if not bool(layer.lora_B.weight.any()) and layer.lora_B.weight.grad is not None
    }
    named = [(name, p) for name, p in fixture.model.named_parameters() if p.requires_grad and id(p) not in waiting]
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
    optimizer = optimizers.make_optimizer(fixture.model, fixture.run.train, fixture.machine.newton_schulz)
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
        if last < 0.5 * first or not math.isfinite(last) or spent > (OVERFIT_S if step >= ENOUGH else AT_MOST_S):
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
