"""The only training loop in the product: pre-training and fine-tuning, driven by the CLI, a notebook or a test.

In:  a RunContext, and a TrainState to go on from.
Out: one record per optimizer step; `with training(context, state) as steps: for record in steps: ...`.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lamplighter import device_faults, read_back, report
from lamplighter.data.batches import Batch
from lamplighter.errors import BadData, Diverged, StoppedEarly
from lamplighter.model.weights import load_weights
from lamplighter.rundir import CACHE_NAME, free_bytes, read_last_lines, step_of
from lamplighter.train import (
    checkpoint,
    exactness,
    guard,
    hardware,
    joining,
    loss_scale,
    path,
    preference,
    ranks,
    replay,
    replicas,
)
from lamplighter.train.anomalies.detector import announce, recall
from lamplighter.train.anomalies.history import Facts
from lamplighter.train.async_save import PendingSave
from lamplighter.train.checkpointer import Checkpointer
from lamplighter.train.gradients import batch_loss, first_bad_module, forward_backward, micro_batches, micro_loss
from lamplighter.train.optimizers import Shares, clip_factor, clip_scale, not_finite
from lamplighter.train.pace import Course, Pace
from lamplighter.train.samples import show_sample
from lamplighter.train.state import RunContext, TrainState, UnreadStep
from lamplighter.train.validation import validate

_SYSTEM_EVERY_STEPS = 10
_EPOCHS_SAID = 5


@dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    tokens: int
    loss_scale: float | None = None  # of fp16


@contextlib.contextmanager
def training(context: RunContext, state: TrainState) -> Iterator[Iterator[StepRecord]]:
    """Hand out the steps; leaving the block makes the last completed one durable."""
    context.source.start(state.progress.step + 1, state.progress.stream)
    checkpointer = Checkpointer(context, state)
    report.when_asked(stop=checkpointer.stop, save=checkpointer.save_for_others)
    context.model.train()
    good, loop = True, _Loop(context, state, checkpointer)
    try:
        with hardware.kept_memory(context.machine.device):
            yield loop.steps()
    except Diverged:
        good = False
        raise
    except ranks.PeerLost:
        good = False  # rank 0 may be in the middle of a save, and the durable step counts
        if report.stopping():  # rank 0 has saved and left
            raise StoppedEarly(report.stop_reason()) from None
        raise
    except Exception as error:
        fault = device_faults.of_error(error)
        good = fault is None or not fault.dead  # out of a dead context nothing can be read, and the attempt may hang
        good = good and context.shards is None  # the others' parts would be missing, as nobody has asked them for any
        is_assert = fault is not None and fault.cause == "device_assert"
        if is_assert and (named := replay.explain_assert(context, loop.batches_in_work())):
            raise named from error
        raise
    finally:
        context.source.close()
        if good:
            loop.log_unread()
            checkpointer.save_or_report()
        checkpointer.wait()
        checkpointer.stopped.set()
        report.when_asked(None, None)


class _Loop:
    """The steps of one run. It calls things by name, in order: no callbacks."""

    def __init__(self, context: RunContext, state: TrainState, checkpointer: Checkpointer) -> None:
        self.context, self.state, self.checkpointer = context, state, checkpointer
        self.model, self.optimizer = context.model, context.optimizer
        self.train, self.eval = context.run.train, context.run.eval
        self.pace = self._pace()
        self.seconds, self.tokens = 0.0, 0  # of the steps of this attempt
        self.first_step = state.progress.step + 1
        self.read_at = 0.0  # when the numbers of a step were last read
        self.batch: Batch | None = None  # the newest one
        self.spent: report.Verdict | None = None  # the budget is nearly, said when all ranks stop
        self.stop_votes = 0.0
        self.equal_at = state.progress.step  # after which all ranks were known to hold the same weights
        self.times_differed = 0
        self.told: dict[int, dict[str, float]] = {}  # of preference pairs, by step, until it is logged
        self.bad_save: PendingSave | None = None  # found by this rank, and not voted on yet
        self.scale_fell = False  # the loss scale of fp16 is below 1, and that was said
        self.finished: deque[StepRecord] = deque()  # read while the next step was computed, and not handed out yet

    def steps(self) -> Iterator[StepRecord]:
        """Every step that is left, one after the other; where a rank is lost, with those that go on."""
        while True:
            try:
                return (yield from self._steps())
            except ranks.PeerLost:
                self.optimizer.zero_grad()
                self.log_unread()
                if not ranks.next_world(self.context.world, self.context.folder) or self.context.shards is not None:
                    raise
            self._go_on_with_others()

    def _go_on_with_others(self) -> None:
        """The ranks that are left, or there again: the newest state that one of them holds, and the batch after it."""
        context, state = self.context, self.state
        joining.join(context, state)
        self.checkpointer.follow_world()
        progress = state.progress
        self.stop_votes, self.equal_at = 0.0, progress.step
        context.source.start(progress.step + 1, progress.stream)
        size = context.world.size
        context.recorded["ranks"] = size
        other = ", no longer bit-identical (train.reduction native)" if self.train.reduction == "native" else ""
        report.note(f"{size} rank{'s go' if size > 1 else ' goes'} on with step {progress.step + 1}{other}")

    def _show_numbers(self) -> None:
        """Where it stands, in the slot."""
        progress = self.state.progress
        report.number(steps=self.state.steps, step=progress.step, durable_step=self.checkpointer.durable)
        report.number(tokens=progress.tokens, mean_loss=progress.mean_loss, best_step=progress.best_step)
        if progress.best_val_loss is not None:
            report.number(best_loss=progress.best_val_loss)

    def _steps(self) -> Iterator[StepRecord]:
        state, source = self.state, self.context.source
        self._show_numbers()
        self._init_anomalies()
        if not state.from_disk:
            self.checkpointer.begin()  # it stands in memory alone
        self._catch_up()
        if state.progress.step >= state.steps or self._out_of_patience():
            return
        self.pace.show(state.progress.step)
        with report.phase("first batch"):
            batch = source.next(state.progress.step + 1)
        if batch is None:
            return self._end_of_data()
        begun = self._compile(batch) if state.compiled and state.compiler is None else None
        with report.phase("first step"):
            record = self._step(batch, 0.0, begun)
        with report.phase("train", total=state.steps, unit="steps"):
            while True:
                while self.finished:
                    self._foretell(self.finished[0].step)
                    yield self.finished.popleft()
                if record is not None and self._save_and_evaluate(record):
                    self._foretell(record.step)
                    yield record
                    self._check_stop(record)
                if state.step >= state.steps or self._out_of_patience():
                    return
                started = time.perf_counter()
                with report.span("data wait"):
                    batch = source.next(state.step + 1)
                if batch is None:
                    if state.unread is not None and (record := self._read_step()) is not None:
                        yield record
                    return self._end_of_data()
                record = self._step(batch, time.perf_counter() - started)
                self.pace.step(time.perf_counter() - started)

    # ---------------------------------------------------------------- one step

    def _step(self, batch: Batch, waited_s: float, begun: torch.Tensor | None = None) -> StepRecord | None:
        """One optimizer step, read left to right; None where it was rolled back instead. `begun`: the loss of its first
        micro-batch, whose gradients are there already.
        """
        started, self.batch = time.perf_counter(), batch
        step, progress = batch.step, self.state.settled
        if progress.passed_from <= step <= progress.passed_to:
            self.optimizer.zero_grad()
            if self.state.unread is not None:
                if (record := self._read_step()) is None:
                    return None
                self.finished.append(record)
            return self._skip_step(batch, waited_s)
        with report.span("compute"):
            numbers, told = self._gradients(batch, begun)
            self.stop_votes, regroups, bad_step, self.checkpointer.voted, *sums = told
            if regroups:  # a rank is there again: all leave this step together
                raise ranks.PeerLost("the parent makes another world")
        if bad_step:
            self.optimizer.zero_grad()
            self._back_before(int(bad_step))
            return None
        if any(sums) and self._differ(sums, step):
            return None
        if self.context.machine.reads_late or self.context.loss_scale is not None:
            return self._update_unread(batch, numbers, waited_s, started)
        with report.span("compute"):
            loss, grad_norm = numbers.tolist()  # both are judged before the weights are touched
        lr = self.context.schedule.lr_at(step)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            seconds = waited_s + time.perf_counter() - started
            self.optimizer.zero_grad()
            return self._nonfinite(batch, StepRecord(step, loss, grad_norm, lr, seconds=seconds, tokens=batch.filled))
        scale = clip_factor(grad_norm, self.train.grad_clip)
        if isinstance(self.optimizer, Shares):
            self.optimizer.share(self.context.world, scale)
        with report.span("optimizer"), self.checkpointer.optimizer_update():
            self.optimizer.step(lr, scale)
            self.optimizer.zero_grad()
            self.state.progress = self.state.progress.learned(step, batch.filled, loss)
        seconds = waited_s + time.perf_counter() - started
        record = StepRecord(step, loss, grad_norm, lr, seconds=seconds, tokens=batch.filled)
        self._log_step(batch, record, waited_s)
        return record

    def _gradients(self, batch: Batch, begun: torch.Tensor | None) -> tuple[torch.Tensor, list[float]]:
        """Of all ranks, into the parameters; loss and norm on their device, and the sums of the votes."""
        context, bad = self.context, self.bad_save
        notes = preference.Notes()
        tree = None if context.shards is not None else forward_backward(context, batch, begun, notes)
        votes = [self._stop_vote(), float(report.has_orders()), float(bad.step if bad else 0), self.checkpointer.vote()]
        if context.shards is not None:
            loss, norm, told = context.shards.step(context, batch, votes)
            if context.loss_scale is not None:  # the gradients carry it, as where the optimizer takes their norm
                norm = norm / context.loss_scale.scale
            return self._loss_and_norm(loss, norm), told
        assert tree is not None
        votes += replicas.votes(context.world, batch.step, self.model)
        loss, told = ranks.reduce(context.world, tree, votes, self.train.reduction == "native")
        if batch.pairs is not None and not told[1]:  # a rank that is there again is met first
            leaves = len(micro_batches(batch, self.rows_at_once))
            self.told[batch.step] = notes.means(context.world, leaves, context.machine.device)
        return self._loss_and_norm(loss, self.optimizer.grad_norm()), told

    def _update_unread(self, batch: Batch, numbers: torch.Tensor, waited_s: float, started: float) -> StepRecord | None:
        """The update of a step whose numbers stay on the GPU; where they are not finite it changes nothing by itself.

        Those of the step before are read first, while its weights are still there. The record of this one, if something
        is due after it; else None, and it is read with the next.
        """
        if self.state.unread is not None:
            record = self._read_step()
            if record is None:  # rolled back: these gradients are of weights that are gone
                self.optimizer.zero_grad()
                return None
            self.finished.append(record)
        scale = clip_scale(numbers[1], self.train.grad_clip)
        if isinstance(self.optimizer, Shares):
            self.optimizer.share(self.context.world, scale)
        with report.span("optimizer"), self.checkpointer.optimizer_update():
            lr = self.context.schedule.lr_at(batch.step)
            self.optimizer.step(lr, scale, not_finite(numbers))
            self.optimizer.zero_grad()
            if self.context.loss_scale is not None:
                self.context.loss_scale.update(torch.isfinite(numbers))
            before = self.state.settled
            self.state.unread = UnreadStep(batch, before, numbers, waited_s=waited_s, started=started)
        return self._read_step() if self._is_due(batch.step) else None

    def _read_step(self) -> StepRecord | None:
        """Wait for the numbers of the step that was made last, and log it; None where it was rolled back."""
        unread = self.state.unread
        assert unread is not None
        with report.span("compute"):
            loss, grad_norm = unread.read()
            scale = unread.scale()
        now, step = time.perf_counter(), unread.batch.step
        seconds, self.read_at = now - max(unread.started - unread.waited_s, self.read_at), now
        lr, tokens = self.context.schedule.lr_at(step), unread.batch.filled
        record = StepRecord(step, loss, grad_norm, lr, seconds=seconds, tokens=tokens, loss_scale=scale)
        with self.checkpointer.lock:
            self.state.progress = unread.after()
        if unread.overflowed:
            return self._overflowed(record)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self._nonfinite(unread.batch, record)
        self._log_step(unread.batch, record, unread.waited_s)
        return record

    def _loss_and_norm(self, total: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Both, on their device; in fp16 without the loss scale, which is the third number."""
        scale = self.context.loss_scale
        if scale is None:
            return torch.stack((total, norm))
        return torch.stack((total / scale.scale, norm, scale.scale))

    def _overflowed(self, record: StepRecord) -> StepRecord:
        """fp16: the gradients did not fit at this loss scale. The step is passed over, counted apart, and no bad batch."""
        assert record.loss_scale is not None
        count = self.state.progress.overflows
        values = {"train/loss": record.loss, "train/iter": record.step, "train/loss_scale": record.loss_scale}
        report.metric(record.step, {**values, "train/overflows": count})
        if record.loss_scale / 2 < 1 <= record.loss_scale:
            self.scale_fell = True
            report.verdict(loss_scale.collapsed(record.step, record.loss_scale / 2), flag=True, step=record.step)
        report.event("overflow", step=record.step, count=count, scale=record.loss_scale / 2)
        return record

    def batches_in_work(self) -> list[Batch]:
        """Those whose kernels may still run: the newest one, and before it the one whose numbers are not read yet."""
        unread = self.state.unread
        return [batch for batch in (unread.batch if unread else None, self.batch) if batch is not None]

    def log_unread(self) -> None:
        """The loop is left with a step that nobody has read: it was made, so it is logged. A bad one is made again."""
        unread = self.state.unread
        if unread is not None and unread.after() is not unread.before:
            self._read_step()

    def _is_due(self, step: int) -> bool:
        """Whether anything comes after this step that needs its numbers: a save, a validation, a sample, a stop, the end."""
        section, last = self.eval, self.finished[-1].seconds if self.finished else 1.0
        looks = (section.every_steps, section.sample_every_steps)
        save_s = max(self.checkpointer.save_s, 0.2)
        return (
            not self.context.machine.reads_late
            or step == self.state.steps
            or step == self.first_step
            or self._pauses_after(step)
            or self.checkpointer.due(step)
            or self.checkpointer.remember_due()
            or any(every and step % every == 0 for every in looks)
            or report.stopping()
            or guard.budget_reached(self.context.run.budget, report.spent_s(), save_s, last) is not None
        )

    @property
    def rows_at_once(self) -> int:
        return self.train.micro_batch or self.train.batch_size

    def _skip_step(self, batch: Batch, waited_s: float) -> StepRecord:
        """A step whose batch was bad before the roll-back: it counts, and nothing is learned from it."""
        report.metric(batch.step, {"train/loss": math.nan, "train/iter": batch.step, "train/passed_over": 1})
        with self.checkpointer.lock:
            tokens = self.state.progress.tokens + batch.filled
            self.state.progress = replace(self.state.progress, step=batch.step, tokens=tokens)
        return StepRecord(batch.step, math.nan, math.nan, 0.0, seconds=waited_s, tokens=batch.filled)

    def _log_step(self, batch: Batch, record: StepRecord, waited_s: float) -> None:
        """The record of the step, by the field's names; then what stands out in it."""
        context = self.context
        tokens_per_s = record.tokens / record.seconds
        flops = context.built.flops_per_token(context.run.data.seq_len)
        values = {
            "train/loss": record.loss,
            "train/lr": record.lr,
            "train/grad_norm": record.grad_norm,
            "train/iter": record.step,
            "train/dt_ms": record.seconds * 1000,
            "train/tok_per_sec": tokens_per_s,
            "train/mfu": tokens_per_s * flops / (context.world.peak_flops or context.machine.peak_flops),
            "train/tokens": self.state.progress.tokens,
            "train/epoch": batch.epoch,
            "train/pad_frac": 1 - batch.filled / batch.targets.size,
            "train/data_wait_ms": waited_s * 1000,
        }
        values |= {f"train/{name}": value for name, value in self.told.pop(record.step, {}).items()}
        if record.loss_scale is not None:
            values["train/loss_scale"] = record.loss_scale
            if self.scale_fell and record.loss_scale >= 1:
                self.scale_fell = False
                report.event("well again", cause="loss_scale", step=record.step)
        budget = context.run.budget
        if budget.usd_per_hour is not None:
            values["cost/usd"] = budget.spent_usd(report.spent_s())
        if record.step % _SYSTEM_EVERY_STEPS == 0:
            values |= hardware.memory_gb(context.machine.device)
            values["sys/disk_free_gb"] = free_bytes(context.folder.path) / 1e9
        report.metric(record.step, values)
        self._compare_redone(record)
        self._count(record)
        self._announce_epoch(batch.step)
        if self.state.anomalies is not None:
            announce(self.state.anomalies.step(record.step, values))
        if self.state.compiler and (verdict := self.state.compiler.check_recompiles(record.step)):
            report.verdict(verdict)

    def _compare_redone(self, record: StepRecord) -> None:
        """A step that an earlier attempt had done already must be the same, bit for bit."""
        redone = self.state.redone
        if not redone.before:
            return
        if other := redone.compare(record.step, record.loss, record.grad_norm):
            report.verdict(exactness.verdict(other, record.step), step=record.step)
        if not redone.before:
            exactness.say(exactness.words(self.state.probe, redone, self.context.machine), self.state.probe, redone)

    def _count(self, record: StepRecord) -> None:
        """What the whole run adds up to, for whoever looks."""
        self.seconds, self.tokens = self.seconds + record.seconds, self.tokens + record.tokens
        report.number(mean_loss=self.state.progress.mean_loss, mean_tokens_per_s=self.tokens / self.seconds)
        data, step = self.context.data, record.step
        if data.samples:
            report.number(documents=round(data.epochs(step) * data.documents))
        elif step % _SYSTEM_EVERY_STEPS == 0 or step == self.state.steps:
            stream = self.context.source.state(step)  # of a stream, those before the chunk that is at hand
            report.number(documents=int((stream or {}).get("document", 0)))

    def _announce_epoch(self, step: int) -> None:
        """The end of the data is an epoch, and is said (the first few times): nothing is ever made up to fill a batch."""
        data = self.context.data
        if not data.samples:
            return  # a stream says it itself, where it happens
        done, before = int(data.epochs(step)), int(data.epochs(step - 1))
        if done > before:
            report.event("epoch", step=step, epochs=done)
            if before < _EPOCHS_SAID:
                report.note(
                    f"epoch {done} is done at step {step}: every one of the {data.samples:,} {data.noun} was seen"
                    f" {done} time(s)"
                )

    # ---------------------------------------------------------------- compiling

    def _compile(self, batch: Batch) -> torch.Tensor | None:
        """The first micro-batch of the first step, forward and backward: all compiling happens here, under its name.

        Gives its loss, with the gradients in place; None where compiling failed.
        """
        with report.phase("compile"):
            from lamplighter.train.compiled import Compiled, CompileError

            compiler = Compiled(self.model)
            try:
                compiler.compile(self.context.folder.path.parent / CACHE_NAME / "compiled")
                loss = self._first_leaf(batch)
            except Exception as error:
                if device_faults.of_error(error) is not None:
                    raise  # a full or failing device is not the compiler's doing
                compiler.undo()
                self.optimizer.zero_grad()
                if not isinstance(error, CompileError):
                    # A mistake in the model's own code is raised again here, by its own line.
                    micro_loss(self.context, batch, micro_batches(batch, self.rows_at_once)[0])
                first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
                self._go_eager(first_line, batch.step)
                return None
            compiler.ready()
            self.state.compiler = compiler
            report.note(f"compiled {len(compiler.blocks)} blocks with torch.compile, in {compiler.compiles} compiles")
            loss = self._try_again(batch, loss)
            if self.context.world.leads:
                return loss
            self.optimizer.zero_grad()  # the first micro-batch is rank 0's
            return None

    def _first_leaf(self, batch: Batch) -> torch.Tensor:
        """Forward and backward of the first micro-batch."""
        hardware.seed_step(self.train.seed, batch.step, 0)
        loss = micro_loss(self.context, batch, micro_batches(batch, self.rows_at_once)[0])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _try_again(self, batch: Batch, loss: torch.Tensor) -> torch.Tensor:
        """Compiled code is other code than what the probe of exactness has tried: the same micro-batch once more."""
        state, first = self.state, exactness.gradient_hashes(self.model)
        if state.probe is None:  # code of one's own is called for steps alone
            return loss
        self.optimizer.zero_grad()
        loss = self._first_leaf(batch)
        again = exactness.gradient_hashes(self.model)
        differs = next((name for name in first if first[name] != again.get(name)), "")
        if differs and not state.probe.differs:
            state.probe = replace(state.probe, differs=f"{differs} (compiled)")
            exactness.say(exactness.words(state.probe, state.redone, self.context.machine), state.probe, state.redone)
        return loss

    def _go_eager(self, reason: str, step: int) -> None:
        """Without the compiler it is slower, and no longer bit-identical to a compiled run."""
        self.state.compiled = False
        path.say_path(self.context, compiled=False, fell_back="from torch.compile")
        why = f"torch.compile failed ({reason}); running uncompiled, so from step {step} on not bit-identical to a compiled run"
        advice = "look at the traceback with TORCHDYNAMO_VERBOSE=1, or set --train.compile false"
        report.verdict(report.Verdict("broken", "compile_failed", why, advice, "fallback", culprit={"step": step}))

    # ---------------------------------------------------------------- numbers that are not finite

    def _nonfinite(self, batch: Batch, record: StepRecord) -> StepRecord | None:
        """A bad batch: skip it; too many of them, or bad weights: roll back once; then stop. The weights are never touched."""
        late = self.checkpointer.failure(wait=True)
        before = late.step if late is not None else 0
        if before := ranks.told_by_first(self.context.world, before, self.context.machine.device):
            self.bad_save = late
            self._back_before(before)  # the weights were bad before this batch
            return None
        step, progress = batch.step, self.state.progress
        module = first_bad_module(self.context, batch)
        verdict = guard.check_finite(step, record.loss, record.grad_norm, batch.samples.tolist(), module)
        assert verdict is not None
        recent = [bad for bad in progress.skipped if bad > step - guard.SKIP_WINDOW]
        bad_weights = guard.check_weights(step - 1, self._first_bad_weights())
        may_skip = self.train.on_nonfinite == "skip" and len(recent) < guard.SKIPS and bad_weights is None
        report.metric(step, {"train/loss": record.loss, "train/grad_norm": record.grad_norm, "train/iter": step})
        if not may_skip:
            first_bad = step - 1 if bad_weights else min([*recent, step])
            self._rollback(first_bad, step, bad_weights or verdict)
            return None
        advice = f"skipped ({len(recent) + 1} of {guard.SKIPS} within {guard.SKIP_WINDOW} steps)"
        report.verdict(replace(verdict, action="skip", next=advice))
        with self.checkpointer.lock:
            tokens, skipped = progress.tokens + batch.filled, (*recent, step)
            self.state.progress = replace(progress, step=step, tokens=tokens, skipped=skipped)
        return record

    def _first_bad_weights(self) -> str | None:
        """The first tensor of the model that is not finite, wherever its rows are."""
        context, tensors = self.context, self.context.stored()
        own = checkpoint.first_not_finite(tensors)
        names = list(tensors)
        place = len(names) if own is None else names.index(own)
        first = min(ranks.every(context.world, place, context.machine.device))
        return names[first] if first < len(names) else None

    def _differ(self, sums: list[float], step: int) -> bool:
        """Ranks that do not hold the same weights: what they have added up since the last comparison is of no model. All go
        back to a checkpoint of before, once; where there is none, and from then on, all take the weights of one.
        """
        context, root = self.context, self.context.folder.checkpoints
        verdict = replicas.judge(sums, step, self.equal_at)
        if verdict is None:
            self.equal_at = step - 1
            return False
        self.optimizer.zero_grad()
        self.times_differed += 1
        with self.checkpointer.alone():
            found = None
            if self.times_differed == 1:
                found = self._agreed(checkpoint.find_before(root, self.equal_at + 1) if context.world.leads else None)
            if found is not None:
                self._go_back_to(found, self.equal_at + 1, verdict, "")
            else:
                self._take_weights(verdict, replicas.usual(sums), step)
        self.equal_at = self.state.progress.step
        return True

    def _take_weights(self, verdict: report.Verdict, holder: int, step: int) -> None:
        """Of one rank, on all; the step is computed again. Said the first two times: a machine that rounds otherwise does it for ever."""
        context, state = self.context, self.state
        self.log_unread()
        with self.checkpointer.optimizer_update():
            joining.take_over(context, state, holder, takes=context.world.rank != holder)
        words = f"all go on with the weights of rank {holder}, no longer bit-identical; {verdict.next}"
        if self.times_differed <= 2:
            report.verdict(replace(verdict, action="restart", next=words))
        report.event("weights taken over", step=step, holder=holder)
        context.source.start(state.progress.step + 1, state.progress.stream)

    def _rollback(self, first_bad: int, last_bad: int, verdict: report.Verdict) -> None:
        """Back to the checkpoint before the trouble, once, skipping its batches; a second time is divergence (76)."""
        context, state, root = self.context, self.state, self.context.folder.checkpoints
        with self.checkpointer.alone():
            found = self._agreed(checkpoint.find_before(root, first_bad) if context.world.leads else None)
            if state.progress.passed_to or self.train.on_nonfinite != "skip" or found is None:
                report.verdict(verdict)
                raise Diverged(f"diverged at step {last_bad}", verdict.why, verdict.next)
            words = f"the batches of steps {first_bad} to {last_bad} will be passed over"
            self._go_back_to(found, first_bad, verdict, words, passed_from=first_bad, passed_to=last_bad)

    def _go_back_to(self, found: Path, first_bad: int, verdict: report.Verdict, words: str, **passed: Any) -> None:
        """All ranks, to this checkpoint; newer ones are set aside."""
        context, state = self.context, self.state
        with report.phase("roll back"):
            progress = self._load(found)
            advice = f"rolled back to step {progress.step}; {words or verdict.next}"
            report.verdict(replace(verdict, action="restart", next=advice))
            state.progress = replace(progress, **passed)
            moved = checkpoint.go_back(context.folder.checkpoints, state.progress) if context.world.leads else []
            self.checkpointer.rolled_back()
            self._init_anomalies()
        context.source.start(progress.step + 1, progress.stream)
        state.redone.forget_from(first_bad)
        if moved:
            report.note(f"set aside (not deleted): {', '.join(moved)}")
        report.event("rolled back", step=progress.step, **passed)

    def _load(self, found: Path) -> checkpoint.Progress:
        """Weights and optimizer of a checkpoint; from rank 0, where a rank may be on a machine that does not have it."""
        several = "LAMP_NODES" in os.environ and self.context.shards is None
        if not several or self.context.world.leads:
            progress, tensors, _ = checkpoint.load_state(found)
            load_weights(self.model, found)
            self.optimizer.load_state_tensors(tensors)
            self.state.progress = progress
        if several:
            joining.take_over(self.context, self.state, 0, takes=not self.context.world.leads)
        return self.state.progress

    def _agreed(self, found: Path | None) -> Path | None:
        """The checkpoint that rank 0 has found."""
        context = self.context
        step = ranks.told_by_first(context.world, step_of(found) if found else -1, context.machine.device)
        return context.folder.checkpoint(step) if step >= 0 else None

    # ---------------------------------------------------------------- between two steps

    def _save_and_evaluate(self, record: StepRecord) -> bool:
        """Save before you score; score before you sample. False where saved weights were bad and it was rolled back.

        That may be found some steps later, as the save goes on beside them; which batches are skipped does not depend on it.
        """
        if self.checkpointer.due(record.step):
            with report.span("save"), self.pace.timing("save", record.step):
                self.checkpointer.begin()
        elif self.checkpointer.remember_due():
            self.checkpointer.remember()
        late = self.checkpointer.failure()
        if late is None:
            self._evaluate_if_due(record.step)
            late = self.checkpointer.failure(wait=record.step >= self.state.steps)
        if late is not None:
            self._bad_save(late)
        return late is None

    def _bad_save(self, late: PendingSave) -> None:
        """Weights that were not finite when they were saved. Rank 0 alone knows it, and ranks go back together."""
        assert late.bad is not None
        if self.context.world.size > 1 and self.state.step < self.state.steps:
            self.bad_save = late  # they hear of it by the vote of the next step
        elif self.context.world.size > 1:
            report.verdict(late.bad)
            raise Diverged(f"diverged at step {late.step}", late.bad.why, late.bad.next)
        else:
            self._rollback(late.step, late.step, late.bad)

    def _back_before(self, step: int) -> None:
        """Rank 0 has found that the weights of this step were not finite: all ranks go back."""
        late, self.bad_save = self.bad_save, None
        known = late.bad if late is not None else guard.check_weights(step, "a module that rank 0 has named")
        assert known is not None
        self._rollback(step, step, known)

    def _stop_vote(self) -> float:
        """Whether this rank wants to stop after this step: it rides in the step's own reduction."""
        return float(self.context.world.size > 1 and (report.stopping() or self.spent is not None))

    def _check_stop(self, record: StepRecord) -> None:
        """A request to stop, or a budget that is nearly spent. Several ranks stop after the step in which one of them has
        voted for it: all after the same.
        """
        budget, save_s = self.context.run.budget, max(self.checkpointer.save_s, 0.2)
        if self.spent is None:
            self.spent = guard.budget_reached(budget, report.spent_s(), save_s, record.seconds)
        wanted = self.stop_votes if self.context.world.size > 1 else self.spent is not None or report.stopping()
        pauses = self._pauses_after(record.step)  # which all ranks know by themselves
        if not (wanted or pauses) or record.step >= self.state.steps:
            return
        if self.spent is not None:
            report.verdict(self.spent)
        self.checkpointer.tell_standing()
        self.checkpointer.save_or_report()
        self.checkpointer.stopped.set()
        paused = f"step {record.step} is reached (budget.until_step)" if pauses else "another rank was asked to stop"
        raise StoppedEarly(self.spent.why if self.spent else report.stop_reason() or paused)

    def _pauses_after(self, step: int) -> bool:
        until = self.context.run.budget.until_step
        return until is not None and step >= until

    def _evaluate_if_due(self, step: int) -> None:
        section, last = self.eval, step == self.state.steps or self._pauses_after(step)
        if self.context.data.held_out.samples and (last or (section.every_steps and step % section.every_steps == 0)):
            with self.pace.timing("validation", step):
                self._validate(step)
        if section.sample_every_steps and (last or step % section.sample_every_steps == 0):
            with self.pace.timing("sample", step):
                if self.context.world.leads and self.context.shards is None:
                    show_sample(self.context, self.state, step)

    def _validate(self, step: int) -> None:
        context, state = self.context, self.state
        whole, notes = self.train.loss == "whole", preference.Notes()
        found = validate(
            self.model,
            context.source,
            lambda batch: batch_loss(self.model, batch, context.machine, whole=whole, notes=notes, leaf=batch.step - 1),
            rows=self.rows_at_once,
            windows=self.eval.windows,
            world=context.world,
            shards=context.shards,
        )
        values = {"eval/val_loss": found.loss, "eval/iter": step}
        if context.data.pairs is not None:
            means = notes.means(context.world, found.batches, context.machine.device)
            values |= {f"eval/{name}": value for name, value in means.items()}
            text = preference.words(found.loss, means)
        else:
            bpb = found.bits_per_byte(context.data.held_out.targets)
            values |= {"eval/val_ppl": found.perplexity, "eval/val_bpb": bpb}
            text = found.words(context.entropy_bound, bpb)
        if state.progress.loss is not None:
            values["eval/train_loss"] = state.progress.loss
        report.metric(step, values)
        if state.anomalies is not None:
            announce(state.anomalies.validated(step, found.loss))
        with self.checkpointer.lock:
            state.progress = state.progress.scored(step, found.loss)
        best = state.progress.best_step == step
        self._show_best()
        if best:
            with report.span("save"):
                self.checkpointer.keep_best()  # also where no save was due at this step
        text += " (best so far)" if best else ""
        report.event("eval", step=step, text=text, loss=found.loss, nats_per_document=found.nats_per_document)

    def _show_best(self) -> None:
        now = self.state.progress
        if now.best_val_loss is not None:
            report.number(best_loss=now.best_val_loss, best_step=now.best_step)

    # ---------------------------------------------------------------- how long it still takes

    def _pace(self) -> Pace:
        """With what earlier attempts have measured."""
        context, data = self.context, self.context.data
        held_out = data.held_out
        used = min(1.0, self.eval.windows / held_out.samples) if self.eval.windows and held_out.samples else 1.0
        worth = used * held_out.targets / max(1.0, data.positions_per_step) if held_out.samples else 0.0
        course = Course(self.state.steps, self.eval, context.run.save, context.planned_step_s, held_out_steps=worth)
        pace = Pace(course, context.run.budget, context.smaller)
        if self.state.progress.step:
            pace.recall(read_last_lines(context.folder.metrics), read_last_lines(context.folder.rank_events(0)))
        return pace

    def _foretell(self, step: int) -> None:
        self.pace.show(step)
        self.pace.check_budget(step, report.spent_s())

    # ---------------------------------------------------------------- the beginning and the end

    def _init_anomalies(self) -> None:
        """The anomaly detector as it stood after the last step, and what the loss must get below."""
        context, state, schedule, bound = self.context, self.state, self.context.schedule, self.context.entropy_bound
        if self.eval.patience and not context.data.held_out.samples:
            report.warn("eval.patience has no effect: nothing is held back to validate on (data.val_fraction)")
        with report.phase("red flags"):
            unigram = context.data.unigram_loss
            if unigram is not None and not state.progress.step:
                report.note(
                    f"counting single tokens alone gives a loss of {unigram:.3f}"
                    f" (chance {math.log(context.built.vocab_size):.3f}): a model that learns from context gets below it"
                )
            facts = Facts(
                vocab_size=context.built.vocab_size,
                steps=state.steps,
                warmup=schedule.warmup,
                peak_lr=schedule.peak,
                grad_clip=self.train.grad_clip,
                parameters=context.built.parameters,
                device=context.machine.device.type,
                from_scratch=context.run.model.init_from is None,
                chat=context.chat is not None,
                objective=self.train.objective,
                unigram_nats=unigram,
                floor_nats=bound.nats_per_token if bound else None,
                floor_error=bound.nats_per_token * bound.standard_error / bound.nats_per_document if bound else 0.0,
            )
            state.anomalies = recall(facts, context.folder, state.progress.step) if context.world.leads else None

    def _catch_up(self) -> None:
        """A kill between the save and the validation of a step: validate it now, so that none is missing."""
        state, folder = self.state, self.context.folder
        step = state.progress.step
        found = [
            record["eval/val_loss"]
            for record in read_last_lines(folder.metrics)
            if "eval/val_loss" in record and read_back.is_metric(record) and record["step"] == step
        ]
        if step and not found:
            self._evaluate_if_due(step)
        elif step:  # it was saved before it was scored
            state.progress = state.progress.scored(step, math.nan if found[-1] is None else found[-1])
            if state.progress.best_step == step:
                self.checkpointer.keep_best()

    def _out_of_patience(self) -> bool:
        """eval.patience: so many validations without a new best end the run, as finished."""
        patience, now, steps = self.eval.patience, self.state.settled, self.state.steps
        if not patience or now.since_best < patience or now.step >= steps:
            return False
        best = "no validation was a number"
        if now.best_val_loss is not None:
            best = f"{now.best_val_loss:.4f} at step {now.best_step}"
        why = f"{now.since_best} validations without a new best (eval.patience {patience}); the best was {best}"
        told = {"since_best": now.since_best, "best_step": now.best_step, "why": why}
        report.event("ended early", step=now.step, steps=steps, **told)
        self.checkpointer.save_or_report()
        return True

    def _end_of_data(self) -> None:
        """There is no more text, as the settings said: what is learned is saved and scored, and the run is finished."""
        state, step = self.state, self.state.progress.step
        if not step:
            raise BadData("no text to train on", "the source ended before the first batch", "check data.paths")
        report.note(f"the data ended after step {step} of {state.steps}: that is the end of the run")
        already = step == state.steps
        state.steps = step
        report.number(steps=step, left_s=0.0)
        self.checkpointer.save_or_report()
        every = self.eval.every_steps
        if not already and not (every and step % every == 0):  # it was due, and is done
            self._evaluate_if_due(step)
