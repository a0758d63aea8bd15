"""What the model probes examine: the run's own model on this machine, with real batches of its own data.

In:  a ProbeContext.
Out: a ModelFixture: model, machine, batches that are small enough for a quick look; how small, and of what, is said.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from lamplighter.config import Model, Run
from lamplighter.data.batches import NO_TARGET, Batch
from lamplighter.data.setup import OpenedText, choose_template, open_batches, open_text
from lamplighter.doctor.probe import Finding, ProbeContext, as_finding, failed, fault, warn
from lamplighter.doctor.sample_data import NoSample, take
from lamplighter.errors import LampError
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


@dataclass
class ModelFixture:
    """The context's model, ready to be examined."""

    run: Run
    machine: Machine
    built: Built
    batch: Batch
    words: str
    """What the batch is made of."""
    remarks: list[Finding] = field(default_factory=list)
    """What was met on the way."""

    @property
    def model(self) -> torch.nn.Module:
        return self.built.model

    @property
    def rows(self) -> int:
        """Of a micro-batch."""
        return self.run.train.micro_batch or self.run.train.batch_size

    def piece(self, rows: int, length: int | None = None) -> Batch:
        """The first rows of the batch, and of them the first positions."""
        batch, end = self.batch, length or self.batch.inputs.shape[1]
        rows = min(rows, len(batch.inputs))
        targets = batch.targets[:rows, :end].copy()
        if not (targets != NO_TARGET).any():  # nothing is learned in so short a piece: the questions then
            targets[:, :-1] = batch.inputs[:rows, 1:end]
        segments = None if batch.segments is None else batch.segments[:rows, :end].copy()
        inputs = batch.inputs[:rows, :end].copy()
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


def prepare(context: ProbeContext, quick_dtype: bool = True) -> ModelFixture:
    """Build the model as training would; a LampError where that fails."""
    remarks: list[Finding] = []
    context.now("the data")
    made: tuple[Any, Any, Any, int] | None = None
    try:
        made = _data(context)
    except NoSample as error:
        remarks.append(_random_ids(context.run, str(error)))
    except LampError as error:
        remarks.append(_random_ids(context.run, as_finding(error).what))
    run = context.run
    vocab = made[3] if made else run.tokenizer.vocab_size if run.tokenizer.kind == "bpe" else 257
    end = made[0].end_of_text if made else 0
    context.now("the model")
    section = replace(run.train, dtype="fp32") if quick_dtype and run.train.dtype == "auto" else run.train
    where = machines.detect(section, shape=known_shape(run))
    section_of_model, fewer = _layers_that_fit(run, vocab)
    remarks += fewer
    built = build(section_of_model, vocab, run.data.seq_len, end, run.train.seed)
    built.model.to(where.device)
    built.model.train()
    if made is None:
        return ModelFixture(run, where, built, _random_batch(run, built.vocab_size), "random ids", remarks=remarks)
    _, lay_out, sample, _ = made
    source = lay_out(built.takes_segments)
    source.start(1, None)
    batch = source.next(1)
    source.close()
    return ModelFixture(run, where, built, batch, f"a batch out of {sample.words}", remarks=remarks)


def available_bytes() -> int:
    """Of memory, for a model that is still to be built."""
    return procfs.memory_available()


def _layers_that_fit(run: Run, vocab: int) -> tuple[Model, list[Finding]]:
    """Weights, gradients and optimizer must fit; where they do not, as many layers as do, and that is said."""
    section, have = run.model, available_bytes()
    if section.init_from is not None or ":" in section.family:
        return section, []
    shape = shape_of(run, vocab)
    each = run.train.optimizer_kind.training_bytes
    need = each * count_parameters(shape)
    layers = section.layers
    while layers > 1 and each * count_parameters(replace(shape, layers=layers)) > _FITS * have:
        layers = max(1, layers // 2)
    if layers == section.layers:
        return section, []
    what = f"the model is examined with {layers} of its {section.layers} layers"
    why = f"all of it takes {human_bytes(need)} for weights, gradients and optimizer; {human_bytes(have)} are free here"
    return replace(section, layers=layers), [warn(what, why, "lamp plan", "rss_oom")]


def _data(context: ProbeContext) -> tuple[Any, Any, Any, int]:
    """The tokenizer, what lays the data out in batches, the sample; and the vocabulary that the model will have."""
    sample = take(context)
    source, tokenizer = open_text(sample.run, sample.cache)
    template = choose_template(sample.run, source, tokenizer)
    few = replace(sample.run, data=replace(sample.run.data, workers=1, cache="auto"))
    lay_out = open_batches(few, sample.cache, sample.cache, OpenedText(source, tokenizer, template))
    section = context.run.tokenizer
    is_trained = section.path is None and context.run.model.init_from is None and section.kind == "bpe"
    return tokenizer, lay_out, sample, max(tokenizer.vocab_size, section.vocab_size if is_trained else 0)


def _random_ids(run: Run, why: str) -> Finding:
    return warn("the model is examined on random ids", f"the data could not be used: {why}")


def _random_batch(run: Run, vocab_size: int) -> Batch:
    size = (run.train.batch_size, run.data.seq_len + 1)
    ids = np.random.default_rng(run.train.seed).integers(0, vocab_size, size, dtype=np.int64)
    samples = np.arange(size[0], dtype=np.int64)
    return Batch(
        1, ids[:, :-1].copy(), ids[:, 1:].copy(), None, samples, epoch=0.0, real_tokens=size[0] * run.data.seq_len
    )


def fixtures(context: ProbeContext, quick_dtype: bool = True) -> Iterator[ModelFixture | Finding]:
    """The fixture, after what was met while making it; no fixture where the model cannot be built."""
    try:
        fixture = prepare(context, quick_dtype)
    except LampError as error:
        yield as_finding(error)
        return
    except (RuntimeError, TypeError, ValueError, AttributeError, ImportError) as error:  # the user's own model
        yield failed(error, "the model cannot be built")
        return
    yield from fixture.remarks
    yield fixture


def no_gradient_at_all() -> Finding:
    """Of a loss without any gradient."""
    what = "the loss hangs on no parameter: nothing can be learned"
    why = "no_grad, detach or requires_grad_(False) stands over all of the forward pass"
    return fault(what, why, "look for these in the model", "not_learning")


# ---------------------------------------------------------------- how much can be looked at quickly


def seconds_of(fixture: ModelFixture, batch: Batch, dtype: torch.dtype | None = None) -> float:
    """One forward and backward."""
    began = time.perf_counter()
    fixture.loss(batch, dtype).backward()  # type: ignore[no-untyped-call]
    fixture.wait()
    spent = time.perf_counter() - began
    fixture.model.zero_grad(set_to_none=True)
    return spent


def quick_rows(fixture: ModelFixture) -> tuple[Batch, str]:
    """As much of the micro-batch as takes about STEP_S: shorter rows of a slow model, else whole rows, found by doubling."""
    whole = fixture.batch.inputs.shape[1]
    length = min(whole, 2 * SHORT)
    spent = min(seconds_of(fixture, fixture.piece(1, length)) for _ in range(2))  # the first one allocates
    fits = int(length * _STEP_S / max(1e-9, spent))
    length = whole if fits >= whole else max(SHORT, fits)
    rows, batch = 1, fixture.piece(1, length)
    spent = seconds_of(fixture, batch)
    most = min(fixture.rows, len(fixture.batch.inputs))
    while rows < most and spent * 2 < _STEP_S:
        rows = min(2 * rows, most)
        batch = fixture.piece(rows, length)
        spent = seconds_of(fixture, batch)
    if (rows, length) == (fixture.rows, whole):
        return batch, f"{rows} x {length} tokens, the whole micro-batch"
    return batch, f"{rows} x {length} tokens of the micro-batch of {fixture.rows} x {whole}"
