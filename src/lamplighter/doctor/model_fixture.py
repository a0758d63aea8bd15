"""What the model probes examine: the run's own model on this machine, with real batches of its own data.

In:  a ProbeContext.
Out: a ModelFixture: model, machine, batches that are small enough for a quick look; how small, and of what, is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from lamplighter.config import Model, Run
from lamplighter.data.batch_source import BatchSource
from lamplighter.data.batches import NO_TARGET, Batch
from lamplighter.data.setup import OpenedText, choose_template, open_batches, open_text
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.doctor.probe import CannotExamine, Finding, ProbeContext, as_finding, failed, fault, ok, warn
from lamplighter.doctor.sample_data import SampledRun, take
from lamplighter.errors import BadData, LampError
from lamplighter.model.build import Built, build
from lamplighter.model.shape import count_parameters
from lamplighter.plan.job import known_shape, shape_of
from lamplighter.procs import procfs
from lamplighter.rundir import human_bytes
from lamplighter.train import hardware as machines
from lamplighter.train.hardware import Machine
from lamplighter.train.loop import batch_loss

_STEP_S = 1.5  # about so long may one forward and backward of a probe take
_FITS = 0.6  # of the free memory: activations come on top
SHORT = 32  # positions of the first, careful look


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
    def rows(self) -> int:
        """Of a micro-batch."""
        return self.run.train.micro_batch or self.run.train.batch_size

    def piece(self, rows: int, length: int | None = None) -> Batch:
        """The first rows of the batch, again and again where it has fewer; and of them the first positions."""
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
        raise CannotExamine(ok("there is no model to examine: see model / one step")) from end


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
    built = build(layers, vocab_size, run.data.seq_len, end_of_text, run.train.seed)
    built.model.to(machine.device)
    built.model.train()
    if data is None:
        return ModelFixture(run, machine, built, _random_batch(run, built.vocab_size), "random ids", tuple(remarks))
    source = data.lay_out(built.takes_segments)
    source.start(1, None)
    batch = source.next(1)
    source.close()
    if batch is None:
        raise BadData("the sample of the data does not fill one batch", data.sample.words, "more text")
    return ModelFixture(run, machine, built, batch, f"a batch out of {data.sample.words}", tuple(remarks))


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
    shape, each, layers = shape_of(run, vocab_size), run.train.optimizer.training_bytes, section.layers
    while layers > 1 and each * count_parameters(replace(shape, layers=layers)) > _FITS * have:
        layers = max(1, layers // 2)
    if layers < section.layers:
        need = human_bytes(each * count_parameters(shape))
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
