"""The only training loop in the product: pre-training and fine-tuning, driven by the CLI, a notebook or a test.

In:  Parts: model, optimizer, data, sections, and the counters to go on from.
Out: one record per optimizer step; `with training(parts) as steps: for record in steps: ...`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from lamplighter import report
from lamplighter.data.batches import Batch, BatchStream
from lamplighter.data.chat.example_cache import Examples
from lamplighter.data.stream import ChunkStream, Filler, load_state
from lamplighter.data.unigrams import count as count_unigrams
from lamplighter.errors import BadData, Diverged, StoppedEarly
from lamplighter.model.generate import stream as sample_stream
from lamplighter.model.transformer import load_weights, weights
from lamplighter.rundir import CACHE_NAME, free_bytes, read_last_lines
from lamplighter.train import checkpoint, guard, hardware, optimizers, validation
from lamplighter.train.anomalies.detector import Board, announce, recall
from lamplighter.train.anomalies.history import Facts, repeat_share
from lamplighter.train.checkpointer import Keeper
from lamplighter.train.state import Parts

SYSTEM_EVERY_STEPS = 10
SAMPLE_TEMPERATURE = 0.8
EPOCHS_SAID = 5


@dataclass(frozen=True)
class Record:
    """One finished optimizer step."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    tokens: int


@contextlib.contextmanager
def training(parts: Parts) -> Iterator[Iterator[Record]]:
    """Hand out the steps; leaving the block makes the last completed one durable."""
    stream = _open_stream(parts)
    keeper = Keeper(parts, stream)
    report.number(steps=parts.steps, step=parts.progress.step, durable_step=keeper.durable)
    report.when_asked(stop=keeper.stop, save=keeper.save_for_others)
    parts.model.train()
    good = True
    try:
        with hardware.kept_memory(parts.machine.device):
            yield _steps(parts, keeper, stream)
    except Diverged:
        good = False
        raise
    finally:
        stream.close()
        if good and (bad := keeper.save()):
            report.verdict(bad)
        keeper.wait()
        keeper.stopped.set()
        report.when_asked(None, None)


def _open_stream(parts: Parts) -> BatchStream | ChunkStream:
    """Where the batches come from, from the next step on."""
    first = parts.progress.step + 1
    if isinstance(parts.feed.make, Filler):
        return ChunkStream(parts.feed.make, first, load_state(parts.progress.stream))
    return BatchStream(parts.feed.make, first)


def _next_batch(parts: Parts, stream: BatchStream | ChunkStream) -> Batch | None:
    """None where a stream that may end has ended."""
    step = parts.progress.step + 1
    if isinstance(stream, ChunkStream):
        return stream.next(step, load_state(parts.progress.stream))
    return stream.next(step)


def _end_of_data(parts: Parts, keeper: Keeper) -> None:
    """There is no more text, as the settings said: what is learned is saved and scored, and the run is finished."""
    step = parts.progress.step
    if not step:
        raise BadData("no text to train on", "the source ended before the first batch", "check data.paths")
    report.note(f"the data ended after step {step} of {parts.steps}: that is the end of the run")
    already = step == parts.steps
    parts.steps = step
    report.number(steps=step)
    if bad := keeper.save():
        report.verdict(bad)
    every = parts.run.eval.every_steps
    if not already and not (every and step % every == 0):  # it was due, and is done
        _look_at_model(parts, keeper, step)


def _out_of_patience(parts: Parts, keeper: Keeper) -> bool:
    """eval.patience: so many validations without a new best end the run, as finished."""
    patience, now = parts.run.eval.patience, parts.progress
    if not patience or now.since_best < patience or now.step >= parts.steps:
        return False
    best = (
        "no validation was a number"
        if now.best_val_loss is None
        else f"{now.best_val_loss:.4f} at step {now.best_step}"
    )
    why = f"{now.since_best} validations without a new best (eval.patience {patience}); the best was {best}"
    report.event("ended early", step=now.step, steps=parts.steps, since_best=now.since_best, best_step=now.best_step,
                 why=why)  # fmt: skip
    if bad := keeper.save():
        report.verdict(bad)
    return True


def _look_out(parts: Parts) -> Board:
    """The board of red flags as it stood after the last step, and what the loss must get below."""
    schedule, floor = parts.schedule, parts.floor
    if parts.run.eval.patience and not parts.feed.held.samples:
        report.warn("eval.patience has no effect: nothing is held back to validate on (data.val_fraction)")
    with report.phase("red flags"):
        unigrams = count_unigrams(parts.tokens, parts.run.data.loss_on == "all")
        if unigrams is not None and not parts.progress.step:
            report.note(
                f"counting single tokens alone gives a loss of {unigrams.nats:.3f} (chance {math.log(parts.built.vocab_size):.3f}):"
                " a model that learns from context gets below it"
            )
        facts = Facts(
            parts.built.vocab_size, parts.steps, schedule.warmup, schedule.peak, parts.run.train.grad_clip,
            parts.built.parameters, parts.machine.device.type, parts.run.model.init_from is None, parts.chat is not None,
            unigrams.nats if unigrams else None, floor.nats_per_token if floor else None,
            floor.nats_per_token * floor.standard_error / floor.nats_per_document if floor else 0.0,
        )  # fmt: skip
        return recall(facts, parts.folder, parts.progress.step)


def _steps(parts: Parts, keeper: Keeper, stream: BatchStream | ChunkStream) -> Iterator[Record]:
    first = parts.progress.step + 1
    parts.flags = _look_out(parts)
    _catch_up(parts, keeper)
    if first > parts.steps or _out_of_patience(parts, keeper):
        return
    with report.phase("first batch"):
        batch = _next_batch(parts, stream)
    if batch is None:
        return _end_of_data(parts, keeper)
    begun = _compile(parts, batch) if parts.facts["compiled"] else None
    with report.phase("first step"):
        record = _step(parts, keeper, batch, 0.0, begun)
    with report.phase("train", total=parts.steps, unit="steps"):
        while True:
            if record is not None and _after(parts, keeper, record):
                yield record
                _heed(parts, keeper, record)
            if parts.progress.step >= parts.steps or _out_of_patience(parts, keeper):
                return
            started = time.perf_counter()
            with report.span("data wait"):
                batch = _next_batch(parts, stream)
            if batch is None:
                return _end_of_data(parts, keeper)
            record = _step(parts, keeper, batch, time.perf_counter() - started)


def _compile(parts: Parts, batch: Batch) -> torch.Tensor | None:
    """The first micro-batch of the first step, there and back: all compiling happens here, under its name.

    Gives its loss, with the gradients in place; None where compiling failed.
    """
    with report.phase("compile"):
        from lamplighter.train.compiled import Compiled, CompileError

        compiled = Compiled(parts.model)
        try:
            compiled.begin(parts.folder.path.parent / CACHE_NAME / "compiled")
            hardware.seed_step(parts.run.train.seed, batch.step, 0)
            loss = _micro_loss(parts, batch, _micro_rows(parts, batch)[0])
            loss.backward()  # type: ignore[no-untyped-call]
        except CompileError as error:
            compiled.undo()
            parts.optimizer.zero_grad()
            _go_eager(parts, str(error).strip().splitlines()[0], batch.step)
            return None
        compiled.ready()
        parts.compiled = compiled
        report.note(f"compiled {len(compiled.blocks)} blocks with torch.compile, in {compiled.compiles} compiles")
        return loss.detach()


def _go_eager(parts: Parts, reason: str, step: int) -> None:
    """The first rung of recovery: without the compiler it is slower, and no longer bit-identical to a compiled run."""
    parts.facts["compiled"] = False
    report.verdict(
        report.Verdict(
            "broken",
            "compile_failed",
            f"torch.compile failed ({reason}); running uncompiled, so from step {step} on not bit-identical to a compiled run",
            "look at the traceback with TORCHDYNAMO_VERBOSE=1, or set --train.compile false",
            "fallback",
            culprit={"step": step},
        )
    )


def _micro_rows(parts: Parts, batch: Batch) -> list[slice]:
    size = parts.run.train.micro_batch or parts.run.train.batch_size
    return [slice(start, start + size) for start in range(0, len(batch.inputs), size)]


def _micro_loss(parts: Parts, batch: Batch, rows: slice) -> torch.Tensor:
    """The share of these rows in the mean loss over all real tokens of the step."""
    device = parts.machine.device
    ids = torch.from_numpy(batch.inputs[rows]).to(device, non_blocking=True)
    targets = torch.from_numpy(batch.targets[rows]).to(device, non_blocking=True)
    whole, share = parts.run.train.loss == "whole", 1 / batch.real_tokens
    with parts.machine.precision():
        return validation.nats(parts.model, ids, targets, batch.segments, whole, share, rows)


def _step(
    parts: Parts, keeper: Keeper, batch: Batch, waited_s: float, begun: torch.Tensor | None = None
) -> Record | None:
    """One optimizer step, read left to right; None where it was rolled back instead. `begun`: the loss of its first
    micro-batch, whose gradients are there already.
    """
    started = time.perf_counter()
    step, train = batch.step, parts.run.train
    if parts.progress.passed_from <= step <= parts.progress.passed_to:
        parts.optimizer.zero_grad()
        return _pass_over(parts, keeper, batch, waited_s)
    total = begun
    with report.span("compute"):
        for micro, rows in enumerate(_micro_rows(parts, batch)):
            if micro == 0 and begun is not None:
                continue
            hardware.seed_step(train.seed, step, micro)
            part = _micro_loss(parts, batch, rows)
            part.backward()  # type: ignore[no-untyped-call]
            total = part.detach() if total is None else total + part.detach()
        assert total is not None
        # The one time a step that a GPU is waited for: both are judged before the weights are touched.
        loss, grad_norm = torch.stack((total, parts.optimizer.grad_norm())).tolist()
    lr = parts.schedule.lr_at(step)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return _nonfinite(parts, keeper, batch, loss, grad_norm, lr, waited_s + time.perf_counter() - started)
    with report.span("optimizer"), keeper.changing():
        parts.optimizer.step(lr, optimizers.clip_factor(grad_norm, train.grad_clip))
        parts.optimizer.zero_grad()
        tokens = parts.progress.tokens + batch.filled
        parts.progress = replace(parts.progress, step=step, tokens=tokens, loss=loss)
    seconds = waited_s + time.perf_counter() - started
    values = _tell(parts, batch, Record(step, loss, grad_norm, lr, seconds, batch.filled), waited_s)
    if parts.flags is not None:
        announce(parts.flags.step(step, values))
    if parts.compiled and (verdict := parts.compiled.look(step)):
        report.verdict(verdict)
    return Record(step, loss, grad_norm, lr, seconds, batch.filled)


def _nonfinite(
    parts: Parts, keeper: Keeper, batch: Batch, loss: float, grad_norm: float, lr: float, seconds: float
) -> Record | None:
    """A bad batch: skip it; too many of them, or bad weights: roll back once; then stop. The weights are never touched."""
    if late := keeper.trouble(wait=True):  # the weights were bad before this batch
        assert late.bad is not None
        _turn_back(parts, keeper, late.step, late.step, late.bad)
        return None
    verdict = guard.check_finite(batch.step, loss, grad_norm, batch.samples.tolist(), first_bad_module(parts, batch))
    assert verdict is not None
    parts.optimizer.zero_grad()
    recent = [step for step in parts.progress.skipped if step > batch.step - guard.SKIP_WINDOW]
    bad_weights = guard.check_weights(batch.step - 1, checkpoint.first_not_finite(weights(parts.model)))
    may_skip = parts.run.train.on_nonfinite == "skip" and len(recent) < guard.SKIPS and bad_weights is None
    report.metric(batch.step, {"train/loss": loss, "train/grad_norm": grad_norm, "train/iter": batch.step})
    if not may_skip:
        first_bad = batch.step - 1 if bad_weights else min([*recent, batch.step])
        _turn_back(parts, keeper, first_bad, batch.step, bad_weights or verdict)
        return None
    report.verdict(
        replace(
            verdict,
            action="skip",
            next=f"skipped ({len(recent) + 1} of {guard.SKIPS} within {guard.SKIP_WINDOW} steps)",
        )
    )
    with keeper.lock:
        tokens, skipped = parts.progress.tokens + batch.filled, (*recent, batch.step)
        parts.progress = replace(parts.progress, step=batch.step, tokens=tokens, skipped=skipped)
    return Record(batch.step, loss, grad_norm, lr, seconds, batch.filled)


def _turn_back(parts: Parts, keeper: Keeper, first_bad: int, last_bad: int, verdict: report.Verdict) -> None:
    """Back to the checkpoint before the trouble, once, passing over its batches; a second time is divergence (76)."""
    with keeper.alone():
        found = checkpoint.find_before(parts.folder.checkpoints, first_bad)
        if parts.progress.passed_to or parts.run.train.on_nonfinite != "skip" or found is None:
            report.verdict(verdict)
            raise Diverged(f"diverged at step {last_bad}", verdict.why, verdict.next)
        with report.phase("roll back"):
            progress, tensors, _ = checkpoint.load_state(found)
            advice = f"rolled back to step {progress.step}; the batches of steps {first_bad} to {last_bad} will be passed over"
            report.verdict(replace(verdict, action="restart", next=advice))
            load_weights(parts.model, found)
            parts.optimizer.load_state_tensors(tensors)
            parts.progress = replace(progress, passed_from=first_bad, passed_to=last_bad)
            moved = checkpoint.go_back(parts.folder.checkpoints, parts.progress)
            keeper.went_back()
            parts.flags = _look_out(parts)
    if moved:
        report.note(f"set aside (not deleted): {', '.join(moved)}")
    report.event("rolled back", step=progress.step, passed_from=first_bad, passed_to=last_bad)


def _pass_over(parts: Parts, keeper: Keeper, batch: Batch, waited_s: float) -> Record:
    """A step whose batch made trouble before the roll-back: it counts, and nothing is learned from it."""
    report.metric(batch.step, {"train/loss": math.nan, "train/iter": batch.step, "train/passed_over": 1})
    with keeper.lock:
        tokens = parts.progress.tokens + batch.filled
        parts.progress = replace(parts.progress, step=batch.step, tokens=tokens)
    return Record(batch.step, math.nan, math.nan, 0.0, waited_s, batch.filled)


@torch.no_grad()
def first_bad_module(parts: Parts, batch: Batch) -> str:
    """The first module whose output is not finite, found by one more forward pass with the same random numbers."""
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, _inputs: object, output: object) -> None:
            if not found and isinstance(output, torch.Tensor) and not bool(torch.isfinite(output).all()):
                found.append(name or type(parts.model).__name__)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in parts.model.named_modules()]
    try:
        for micro, rows in enumerate(_micro_rows(parts, batch)):
            hardware.seed_step(parts.run.train.seed, batch.step, micro)
            _micro_loss(parts, batch, rows)
            if found:
                break
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""


def _tell(parts: Parts, batch: Batch, record: Record, waited_s: float) -> dict[str, float]:
    """The record of the step, by the field's names."""
    tokens_per_s = record.tokens / record.seconds
    flops = parts.built.flops_per_token(parts.run.data.seq_len)
    values = {
        "train/loss": record.loss,
        "train/lr": record.lr,
        "train/grad_norm": record.grad_norm,
        "train/iter": record.step,
        "train/dt_ms": record.seconds * 1000,
        "train/tok_per_sec": tokens_per_s,
        "train/mfu": tokens_per_s * flops / parts.machine.peak_flops,
        "train/tokens": parts.progress.tokens,
        "train/epoch": batch.epoch,
        "train/pad_frac": 1 - batch.filled / batch.targets.size,
        "train/data_wait_ms": waited_s * 1000,
    }
    budget = parts.run.budget
    if budget.usd_per_hour is not None:
        values["cost/usd"] = budget.spent_usd(report.spent_s())
    if record.step % SYSTEM_EVERY_STEPS == 0:
        values |= hardware.memory_gb(parts.machine.device)
        values["sys/disk_free_gb"] = free_bytes(parts.folder.path) / 1e9
    report.metric(record.step, values)
    _declare_epoch(parts, batch)
    return values


def _declare_epoch(parts: Parts, batch: Batch) -> None:
    """The end of the data is an epoch, and is said (the first few times): nothing is ever made up to fill a batch."""
    feed = parts.feed
    if not feed.samples:
        return  # a stream says it itself, where it happens
    done, before = int(feed.epochs(batch.step)), int(feed.epochs(batch.step - 1))
    if done > before:
        report.event("epoch", step=batch.step, epochs=done)
        if before < EPOCHS_SAID:
            report.note(
                f"epoch {done} is done at step {batch.step}: every one of the {feed.samples:,} {feed.noun} was seen {done} time(s)"
            )


def _heed(parts: Parts, keeper: Keeper, record: Record) -> None:
    """Between two steps: a request to stop, or a budget that is nearly spent."""
    verdict = guard.budget_reached(parts.run.budget, report.spent_s(), max(keeper.save_s, 0.2), record.seconds)
    if verdict is not None:
        report.verdict(verdict)
    if verdict is None and not report.stopping():
        return
    if record.step >= parts.steps:
        return
    if bad := keeper.save():
        report.verdict(bad)
    keeper.stopped.set()
    raise StoppedEarly(verdict.why if verdict else report.stop_reason())


def _after(parts: Parts, keeper: Keeper, record: Record) -> bool:
    """Save before you score; score before you sample. False where saved weights were bad and it was rolled back.

    That may be found some steps later, as the save goes on beside them; which batches are passed over does not depend on it.
    """
    if keeper.due(record.step):
        with report.span("save"):
            keeper.begin()
    late = keeper.trouble()
    if late is None:
        _look_at_model(parts, keeper, record.step)
        late = keeper.trouble(wait=record.step >= parts.steps)
    if late is not None:
        assert late.bad is not None
        _turn_back(parts, keeper, late.step, late.step, late.bad)
    return late is None


def _look_at_model(parts: Parts, keeper: Keeper, step: int) -> None:
    section, last = parts.run.eval, step == parts.steps
    if parts.feed.held.samples and (last or (section.every_steps and step % section.every_steps == 0)):
        _score(parts, keeper, step)
    if section.sample_every_steps and (last or step % section.sample_every_steps == 0):
        show_sample(parts, step)


def _catch_up(parts: Parts, keeper: Keeper) -> None:
    """A kill between the save and the score of a step: score it now, so that no validation is missing."""
    step = parts.progress.step
    found = [
        record["eval/val_loss"]
        for record in read_last_lines(parts.folder.metrics)
        if "eval/val_loss" in record and record["step"] == step
    ]
    if step and not found:
        _look_at_model(parts, keeper, step)
    elif step:  # it was saved before it was scored
        parts.progress = parts.progress.scored(step, math.nan if found[-1] is None else found[-1])
        if parts.progress.best_step == step:
            checkpoint.mark_best(parts.folder.checkpoints, parts.progress)


def _score(parts: Parts, keeper: Keeper, step: int) -> None:
    train, section = parts.run.train, parts.run.eval
    size = train.micro_batch or train.batch_size
    whole = train.loss == "whole"
    found = validation.validate(parts.model, parts.feed, parts.machine, size, section.windows, whole)
    bpb = found.bits_per_byte(parts.feed.held.targets)
    values = {"eval/val_loss": found.loss, "eval/val_ppl": found.perplexity, "eval/val_bpb": bpb, "eval/iter": step}
    if parts.progress.loss is not None:
        values["eval/train_loss"] = parts.progress.loss
    report.metric(step, values)
    if parts.flags is not None:
        announce(parts.flags.validated(step, found.loss))
    with keeper.lock:
        parts.progress = parts.progress.scored(step, found.loss)
    best = parts.progress.best_step == step
    if best:
        with report.span("save"):
            keeper.keep_best()  # also where no save was due at this step
    text = found.words(parts.floor, bpb) + (" (best so far)" if best else "")
    report.event("eval", step=step, text=text, loss=found.loss, nats_per_document=found.nats_per_document)


def show_sample(parts: Parts, step: int) -> None:
    """A few words from the model, for people."""
    section, tokenizer = parts.run.eval, parts.tokenizer
    end = tokenizer.end_of_text if parts.chat is None else parts.chat.stop_id
    made: list[int] = []
    with report.phase("sample", total=section.sample_tokens, unit="tokens") as phase:
        ids, shown = _sample_prompt(parts)
        choice = {"max_tokens": section.sample_tokens, "seed": step, "stop_id": end, "window": parts.built.positions}
        for (token,) in sample_stream(parts.model, ids, temperature=SAMPLE_TEMPERATURE, **choice):
            phase.tick()
            if token is None or token == end:
                break
            made.append(token)
    if parts.flags is not None and (repeat := repeat_share(made)) is not None:
        report.metric(step, {"eval/sample_repeat": repeat, "eval/iter": step})
        announce(parts.flags.sampled(step, repeat))
    report.event("sample", step=step, text=tokenizer.decode([*shown, *made]))


def _sample_prompt(parts: Parts) -> tuple[list[int], list[int]]:
    """What a sample begins with, and what of it is shown: of a chat model a question that was held back."""
    prompt, end = parts.run.eval.sample_prompt, parts.tokenizer.end_of_text
    if parts.chat is None or not isinstance(parts.tokens, Examples):
        ids = [end, *parts.tokenizer.encode(prompt).tolist()]
        return ids, ids[1:]
    if prompt:
        ids = parts.chat.prompt_ids([{"role": "user", "content": prompt}])
    else:
        side = parts.tokens.val if parts.tokens.val.examples else parts.tokens.train
        ids = side.ids(0)[: int(side.first_answer[0])].tolist()
    return ids, ids
