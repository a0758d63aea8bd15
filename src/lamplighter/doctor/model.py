"""Model probes: one real step in pieces, whether it can learn, and what the compiler makes of it.

In:  a ProbeContext.
Out: Findings: true parameters, time of a step, slow modules and loops by their line; parameters without a gradient, the first
     position that sees the future, a loss that does not fall; how long torch.compile takes and whether it is worth it.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lamplighter.config import validated
from lamplighter.data.batches import Batch
from lamplighter.doctor import python_loops
from lamplighter.doctor.model_fixture import (
    SHORT,
    ModelFixture,
    fixtures,
    no_gradient_at_all,
    prepare,
    quick_rows,
    seconds_of,
)
from lamplighter.doctor.probe import Finding, Level, ProbeContext, failed, fault, ok, warn
from lamplighter.model.transformer import Transformer
from lamplighter.procs import child, stacks
from lamplighter.procs.child import Say
from lamplighter.rundir import read_record, write_json
from lamplighter.train import hardware as machines
from lamplighter.train import optimizers

_MUCH_TIME = 0.3  # of a forward pass in one Python loop


def one_step(context: ProbeContext) -> Iterator[Finding]:
    """Forward, backward and optimizer, uncompiled, on the run's own data."""
    for found in fixtures(context):
        if isinstance(found, Finding):
            yield found
        else:
            yield _parameters(found)
            yield from _step(found, context)


def _parameters(fixture: ModelFixture) -> Finding:
    """The true count, whatever the name says."""
    total = fixture.built.parameters
    frozen = sum(p.numel() for p in fixture.model.parameters() if not p.requires_grad)
    words = f"{total:,} parameters, {total / 1e6:.1f}M"
    return ok(
        words + (f", of which {frozen:,} are frozen" if frozen else ""),
        f"counted, with a vocabulary of {fixture.built.vocab_size:,} and {fixture.built.positions:,} positions",
        figures={"parameters": float(total)},
    )


def _step(fixture: ModelFixture, context: ProbeContext) -> Iterator[Finding]:
    context.now("a first, short forward pass")
    if (small_vocabulary := _vocabulary(fixture)) is not None:
        yield small_vocabulary
        return
    try:
        small = fixture.loss(fixture.piece(1, SHORT))
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        yield failed(error, f"a forward pass of 1 x {SHORT} tokens fails")
        return
    if not math.isfinite(float(small.detach())):
        yield fault(f"the first loss is {float(small.detach())}", "before any step", "check the init", "nan_batch")
        return
    if not small.requires_grad:
        yield no_gradient_at_all()
        return
    yield from _loop(fixture, context)
    context.now("one forward, backward and step")
    optimizer = optimizers.make_optimizer(fixture.model, fixture.run.train)
    batch, words = quick_rows(fixture)
    times = _timed(fixture, batch, optimizer)
    whole = sum(times.values())
    tokens = batch.inputs.size
    step_s = (
        times["optimizer"]
        + (whole - times["optimizer"]) * fixture.run.train.batch_size * fixture.run.data.seq_len / tokens
    )
    rate = fixture.run.train.batch_size * fixture.run.data.seq_len / step_s
    write_json(context.scratch / "step.json", {"step_s": step_s, "tokens_per_s": rate}, durable=False)
    mfu = rate * fixture.built.flops_per_token(batch.inputs.shape[1]) / max(1.0, fixture.machine.peak_flops)
    parts = ", ".join(f"{name} {seconds * 1000:,.0f} ms" for name, seconds in times.items())
    yield ok(
        f"one step, uncompiled, {fixture.machine.dtype_name}: {parts}; {rate:,.0f} tokens/s, {mfu:.0%} of the peak",
        f"{words}, {fixture.words}; a whole step of {fixture.run.train.batch_size} sequences takes about {step_s:.2f} s",
        figures={"step_s": step_s, "tokens_per_s": rate, "mfu": mfu, **{f"{k}_s": v for k, v in times.items()}},
    )
    yield _layers(fixture, batch)
    yield from _input_speed(context, step_s)


@torch.no_grad()
def _vocabulary(fixture: ModelFixture) -> Finding | None:
    """The highest id goes in, and as many logits come out."""
    size = fixture.built.vocab_size
    ids = torch.full((1, min(SHORT, fixture.run.data.seq_len)), size - 1)
    advice = "give the embedding and the head vocab_size rows"
    try:
        shape = tuple(fixture.logits(ids).shape)
    except IndexError as error:
        place = stacks.line_to_name(stacks.frames_of_error(error))
        where = f", at {place.place}" if place else ""
        what = f"the embedding is smaller than the vocabulary: id {size - 1:,} of {size:,} cannot be looked up{where}"
        return fault(what, str(error), advice, "token_range", culprit=place.fields() if place else {})
    except (RuntimeError, TypeError, ValueError) as error:
        return failed(error, f"a forward pass of 1 x {ids.shape[1]} tokens fails")
    if shape != (*ids.shape, size):
        what = f"the model gives logits of shape {shape}, wanted {(*ids.shape, size)}: [batch, time, vocabulary]"
        return fault(what, f"the tokenizer has {size:,} tokens", advice, "token_range")
    return None


def _timed(fixture: ModelFixture, batch: Batch, optimizer: optimizers.Optimizer) -> dict[str, float]:
    """The second of two steps: the first one allocates."""
    times: dict[str, float] = {}
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
        times = {name: marks[n + 1] - marks[n] for n, name in enumerate(("forward", "backward", "optimizer"))}
    return times


def _layers(fixture: ModelFixture, batch: Batch) -> Finding:
    """Time of each module in a forward pass, its children apart."""
    spent: dict[str, float] = defaultdict(float)
    began: dict[str, float] = {}
    inner: list[float] = [0.0]
    handles = []

    def enter(name: str) -> Any:
        def hook(*_: object) -> None:
            inner.append(0.0)
            began[name] = time.perf_counter()

        return hook

    def leave(name: str) -> Any:
        def hook(*_: object) -> None:
            fixture.wait()
            took = time.perf_counter() - began[name]
            spent[name] += took - inner.pop()
            inner[-1] += took

        return hook

    for name, module in fixture.model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave(name)))
    try:
        with torch.no_grad():
            fixture.loss(batch)
    finally:
        for handle in handles:
            handle.remove()
    total = sum(spent.values()) or 1e-9
    names = {name: type(module).__name__ for name, module in fixture.model.named_modules()}
    slowest = sorted(spent.items(), key=lambda item: -item[1])[:4]
    shown = ", ".join(f"{name or names[name]} {seconds / total:.0%}" for name, seconds in slowest)
    return ok(
        f"the slowest modules of a forward pass ({total * 1000:,.0f} ms): {shown}",
        figures={f"share:{name or names[name]}": seconds / total for name, seconds in slowest},
    )


def _loop(fixture: ModelFixture, context: ProbeContext) -> Iterator[Finding]:
    """A Python loop over tokens, which no device makes fast."""
    if isinstance(fixture.model, Transformer):
        return
    context.now("lines of the model that run once per token")

    def forward(length: int) -> None:
        with torch.no_grad():
            fixture.loss(fixture.piece(1, length))

    length = min(2 * SHORT, fixture.run.data.seq_len)
    try:
        found = python_loops.find(forward, max(8, length // 2), length)
    except (RuntimeError, IndexError) as error:
        yield failed(error, "the model takes no shorter input than data.seq_len, so its loops were not counted")
        return
    if found is None:
        yield ok("no line of the model runs once per token")
        return
    runs = round(found.runs * fixture.run.data.seq_len)
    level: Level = "fault" if found.share > _MUCH_TIME else "warn"
    yield Finding(
        level,
        f"a Python loop over tokens: {found.place.place} runs {runs:,} times per forward, {found.share:.0%} of its time",
        f"{found.place.text} is run for every token ({fixture.run.data.seq_len:,} in a sequence), and each turn waits for the"
        " one before it; it looks like a hang, and a compiler unrolls it",
        "compute all positions at once (one matrix product, a scan or a cumulative sum); --train.compile false until then",
        "python_loop",
        culprit=found.place.fields(),
        settings={"train.compile": False} if fixture.run.train.compile else {},
        figures={"runs": runs, "share": found.share},
    )


def _input_speed(context: ProbeContext, step_s: float) -> Iterator[Finding]:
    """Of a stream: whether text comes as fast as it is trained on."""
    read = read_record(context.scratch / "speed.json").get("bytes_per_s")
    if not context.run.data.stream or not read:
        return
    need = context.run.train.batch_size * context.run.data.seq_len * 4 / step_s  # about four bytes a token
    level: Level = "ok" if read > need else "warn"
    what = f"a step needs {need / 1e6:.2f} MB/s of text, the source gives {read / 1e6:.2f} MB/s"
    yield Finding(
        level,
        what,
        "at about 4 bytes a token",
        "" if level == "ok" else "--data.stream false",
        "" if level == "ok" else "slow_disk",
    )


LENGTH = 64  # positions of these probes, at most
_ROWS = 4
STEPS, OVERFIT_S = 60, 6.0
ENOUGH, AT_MOST_S = 12, 25.0  # steps to judge by, and how long they may take
SLOW_S = 0.5  # a step: a smaller batch then
_OVERFIT_LR = 1e-3
_FALLEN = 0.75  # of the first loss
_SHOWN = 6


def learning(context: ProbeContext) -> Iterator[Finding]:
    """Small but real batches of the run's own model."""
    for found in fixtures(context):
        if isinstance(found, Finding):
            continue  # told by the first model probe
        try:
            yield from _examine(found, context)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            yield failed(error, "the model fails on a short batch")


def _examine(fixture: ModelFixture, context: ProbeContext) -> Iterator[Finding]:
    context.now("the first loss, and its gradients")
    machines.seed_step(fixture.run.train.seed, 1, 0)
    first = fixture.loss(fixture.piece(_ROWS, min(2 * LENGTH, fixture.run.data.seq_len)))
    loss = float(first.detach())
    yield _first_loss(fixture, loss)
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
    yield from _same_answer_twice(fixture)
    yield _overfit_one_batch(fixture, context)


# ---------------------------------------------------------------- the first loss


def _first_loss(fixture: ModelFixture, loss: float) -> Finding:
    """A model that knows nothing gives every token the same chance: ln(vocab)."""
    guess, given = math.log(fixture.built.vocab_size), fixture.run.model.init_from is not None
    figures = {"loss": loss, "ln_vocab": guess}
    what = f"the first loss is {loss:.3f}, ln(vocab {fixture.built.vocab_size:,}) = {guess:.3f}"
    if not math.isfinite(loss):
        why, advice = "not a number before any step", "check the init, and divisions and logarithms in the model"
        return fault(what, why, advice, "nan_batch")
    if given:
        if loss > guess:
            why = "a trained model that guesses worse than chance: weights or tokenizer do not belong to it"
            return fault(
                what, why, f"--tokenizer.path {fixture.run.model.init_from}", "tokenizer_differs", figures=figures
            )
        return ok(f"{what}: it knows something already", f"of {fixture.run.model.init_from}", figures=figures)
    if loss < 0.5 * guess:
        why = "a new model cannot know so much: it sees its targets"
        return fault(what, why, "look at the mask and the shift of the targets", "too_good", figures=figures)
    if loss > 1.25 * guess + 0.5:
        why = "worse than guessing: the weights begin too large, so the first steps only shrink them"
        return warn(what, why, "an init of about 0.02", "init_too_large", figures=figures)
    return ok(f"{what}: as of a model that knows nothing", figures=figures)


# ---------------------------------------------------------------- gradients


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
    names = ", ".join(name for name, _ in without[:_SHOWN]) + (
        f" and {len(without) - _SHOWN} more" if len(without) > _SHOWN else ""
    )
    level: Level = "fault" if share > 0.1 else "warn"
    return Finding(
        level,
        f"{len(without)} of {len(named)} parameter tensors get no gradient ({share:.0%} of the weights): {names}",
        "they will stay as they are: a detach(), a no_grad(), an argmax or an unused part stands between them and the loss",
        "look for detach, no_grad, .data and .item() in forward; freeze on purpose with requires_grad_(False)",
        "no_gradient",
        culprit={"module": without[0][0]},
        figures={"without_gradient": float(len(without)), "share": share},
    )


# ---------------------------------------------------------------- causality, and the same answer twice


@torch.no_grad()
def _causality(fixture: ModelFixture) -> Finding:
    """Change one token; no logits before it may move."""
    was = fixture.model.training
    fixture.model.eval()
    try:
        length = min(LENGTH, fixture.run.data.seq_len)
        ids = torch.from_numpy(fixture.piece(1, length).inputs)
        length = ids.shape[1]
        before = fixture.logits(ids)
        noise = float((fixture.logits(ids) - before).abs().max())
        limit = 1e-3 * float(before.std()) + 4 * noise
        for at in sorted({1, length // 2, length - 1}):
            other = ids.clone()
            other[0, at] = (other[0, at] + 1 + fixture.built.vocab_size // 3) % fixture.built.vocab_size
            moved = (fixture.logits(other) - before).abs().amax(-1)[0, :at] > limit
            if bool(moved.any()):
                return _leak(int(moved.nonzero()[0]), at, int(moved.sum()))
    finally:
        fixture.model.train(was)
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


@torch.no_grad()
def _same_answer_twice(fixture: ModelFixture) -> Iterator[Finding]:
    """In eval the same input gives the same answer; in training dropout makes it differ."""
    was = fixture.model.training
    ids = torch.from_numpy(fixture.piece(1, min(SHORT, fixture.run.data.seq_len)).inputs)
    try:
        fixture.model.eval()
        first, second = fixture.logits(ids), fixture.logits(ids)
        apart = float((first - second).abs().max())
        fixture.model.train()
        dropped = float((fixture.logits(ids) - fixture.logits(ids)).abs().max())
    finally:
        fixture.model.train(was)
    if apart > 1e-4 * float(first.std()):
        why = f"logits differ by up to {apart:.3g} between two equal calls in eval mode"
        yield warn(
            "the model is random in eval mode", why, "functional dropout needs training=self.training", "eval_random"
        )
    elif fixture.run.model.dropout > 0 and dropped == 0.0:
        what = f"model.dropout is {fixture.run.model.dropout:g}, but nothing is dropped in training mode"
        yield warn(what, "two equal calls give equal logits", "use the dropout argument in the model", "no_dropout")
    else:
        yield ok("the same input gives the same answer in eval mode")


# ---------------------------------------------------------------- one batch by heart


def _overfit_one_batch(fixture: ModelFixture, context: ProbeContext) -> Finding:
    """A model that can learn at all learns a few lines by heart within seconds."""
    batch = fixture.piece(_ROWS, min(LENGTH, fixture.run.data.seq_len))
    if seconds_of(fixture, batch) > SLOW_S:
        batch = fixture.piece(1, min(SHORT, fixture.run.data.seq_len))
    optimizer = optimizers.make_optimizer(fixture.model, fixture.run.train)
    first = last = math.nan
    began, step = time.monotonic(), 0
    for step in range(1, STEPS + 1):
        machines.seed_step(fixture.run.train.seed, step, 0)
        loss = fixture.loss(batch)
        last = float(loss.detach())
        first = last if step == 1 else first
        context.now(f"one batch by heart: step {step} of {STEPS}, loss {last:.3f}")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(_OVERFIT_LR, optimizers.clip_factor(float(optimizer.grad_norm()), fixture.run.train.grad_clip))
        optimizer.zero_grad()
        spent = time.monotonic() - began
        if last < 0.5 * first or not math.isfinite(last) or spent > (OVERFIT_S if step >= ENOUGH else AT_MOST_S):
            break
    words = f"{first:.3f} -> {last:.3f} in {step} steps at a rate of {_OVERFIT_LR:g}, {batch.inputs.shape[0]} x {batch.inputs.shape[1]} tokens"
    figures = {"first_loss": first, "last_loss": last, "steps": float(step)}
    guess = math.log(fixture.built.vocab_size)
    if last <= _FALLEN * first:
        return ok(f"learns one batch by heart: {words}", figures=figures)
    if not math.isfinite(last):
        return fault(f"diverges on one small batch: {words}", "", "a smaller train.lr", "nan_batch", figures=figures)
    near = abs(last - guess) < 0.1 * guess
    if step < ENOUGH or (step < STEPS and last < 0.97 * first):
        what = f"one batch by heart: {words}; there was time for {step} steps only, too few to judge by"
        return ok(what, figures=figures)
    return fault(
        f"cannot learn one batch by heart: {words}" + (f"; the loss stays at ln(vocab) = {guess:.3f}" if near else ""),
        "a few lines again and again are learned by any model that can learn: the loss does not reach the weights that matter",
        "see the parameters without a gradient; a loss at ln(vocab) means that nothing is learned",
        "not_learning",
        figures=figures,
    )


COMPILE_S, CURIOUS_S = 40.0, 20.0  # where the run compiles, and where it is only tried
_WORTH = 1.1


def compiling(context: ProbeContext) -> Iterator[Finding]:
    """The same step with torch.compile, in a process of its own with a deadline."""
    request = {
        "run": asdict(context.run),
        "runs_dir": str(context.runs_dir),
        "scratch": str(context.scratch),
    }
    wanted = context.run.train.compile is True
    done = child.run(
        "lamplighter.doctor.model:measure_compile",
        request,
        deadline_s=COMPILE_S if wanted else CURIOUS_S,
        on_record=lambda record: context.now(str(record.get("now", ""))),
    )
    level: Level = "fault" if wanted else "ok"
    advice = "--train.compile false" if wanted else "nothing to do: train.compile is not asked for"
    settings: dict[str, Any] = {"train.compile": False} if wanted else {}
    last = done.records[-1] if done.records else {}
    if done.ended_for:
        at = f" ({last.get('now')})" if last.get("now") else ""
        why = (
            "a Python loop in the model is unrolled, turn by turn"
            if last.get("own")
            else "a busy machine, or a slow compiler"
        )
        what = f"torch.compile had not ended after {done.seconds:.0f} s{at}"
        yield Finding(level, what, why, advice, "compile_slow", settings=settings)
    elif "error" in last:
        yield Finding(
            level,
            f"torch.compile fails: {last['error']}",
            last.get("where", ""),
            advice,
            "compile_failed",
            settings=settings,
        )
    elif done.code != 0 or "compiled_s" not in last:
        yield Finding(
            level, f"the compile trial {done.how()}", done.last_line, advice, "compile_failed", settings=settings
        )
    else:
        yield _worth(last, wanted, context)


def _worth(last: dict[str, Any], wanted: bool, context: ProbeContext) -> Finding:
    gain = last["eager_s"] / last["compiled_s"]
    what = (
        f"compiled {last['compiled_s'] * 1000:,.0f} ms against uncompiled {last['eager_s'] * 1000:,.0f} ms: {gain:.2f} x,"
        f" after {last['compile_s']:.0f} s of compiling"
    )
    why = f"forward and backward of {last['words']}"
    figures = {
        "compile_s": last["compile_s"],
        "compiled_s": last["compiled_s"],
        "eager_s": last["eager_s"],
        "gain": gain,
    }
    steps = context.run.train.steps or 0
    saved = (last["eager_s"] - last["compiled_s"]) * steps
    if wanted and gain < 1.0:
        return warn(
            f"{what}: slower",
            why,
            "--train.compile false",
            "compile_slow",
            settings={"train.compile": False},
            figures=figures,
        )
    if not wanted and gain > _WORTH and saved > 2 * last["compile_s"]:
        return ok(f"{what}; --train.compile true would save about {saved / 60:.0f} min", why, figures=figures)
    return ok(what, why, figures=figures)


def measure_compile(request: dict[str, Any], say: Say) -> None:
    """Eager first, then the same blocks compiled as lamp train would."""
    now = lambda text: say(now=text)  # noqa: E731
    scratch = Path(request["scratch"])
    context = ProbeContext(validated(request["run"]), None, Path(request["runs_dir"]), scratch, now)
    fixture = prepare(context, quick_dtype=False)
    is_own = not isinstance(fixture.model, Transformer)
    say(now="the same step, uncompiled", own=is_own)
    batch, words = quick_rows(fixture)
    eager_s = min(seconds_of(fixture, batch) for _ in range(3))
    from lamplighter.train.compiled import Compiled, CompileError

    say(now=f"compiling for {words}", own=is_own)
    blocks = Compiled(fixture.model)
    began = time.monotonic()
    try:
        blocks.compile(scratch / "compiled")
        seconds_of(fixture, batch)
        compile_s = time.monotonic() - began
        say(now="the same step, compiled", own=is_own)
        compiled_s = min(seconds_of(fixture, batch) for _ in range(3))
    except CompileError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        say(error=lines[0] if lines else type(error).__name__, where=_where(lines))
        return
    say(eager_s=eager_s, compiled_s=compiled_s, compile_s=compile_s, words=words, compiles=blocks.compiles)


def _where(lines: list[str]) -> str:
    """The user's line that the compiler complains about, where it says one."""
    return next((line.strip() for line in lines if line.strip().startswith("File ")), "")
