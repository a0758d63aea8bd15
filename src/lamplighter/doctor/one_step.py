"""Model probe: one real step in pieces, its layers and its lines.

In:  a Patient.
Out: Findings: true parameters, time of a step, the slowest modules, a Python loop over tokens by its line.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from lamplighter.data.batches import Batch
from lamplighter.doctor import python_loops
from lamplighter.doctor.code_owner import raised_at
from lamplighter.doctor.model_fixture import SHORT, Bed, hangs_on_nothing, lay_down, quick_rows
from lamplighter.doctor.probe import Finding, Level, Patient
from lamplighter.doctor.sample_data import failed
from lamplighter.model.transformer import Transformer
from lamplighter.rundir import read_record, write_json
from lamplighter.train import optimizers

MUCH_TIME = 0.3  # of a forward pass in one Python loop


def one_step(patient: Patient) -> Iterator[Finding]:
    """Forward, backward and optimizer, uncompiled, on the run's own data."""
    for found in lay_down(patient):
        if isinstance(found, Finding):
            yield found
        else:
            yield _parameters(found)
            yield from _step(found, patient)


def _parameters(bed: Bed) -> Finding:
    """The true count, whatever the name says."""
    total = bed.built.parameters
    frozen = sum(p.numel() for p in bed.model.parameters() if not p.requires_grad)
    words = f"{total:,} parameters, {total / 1e6:.1f}M"
    return Finding(
        "ok",
        words + (f", of which {frozen:,} are frozen" if frozen else ""),
        f"counted, with a vocabulary of {bed.built.vocab_size:,} and {bed.built.positions:,} positions",
        figures={"parameters": float(total)},
    )


def _step(bed: Bed, patient: Patient) -> Iterator[Finding]:
    patient.now("a first, short forward pass")
    if (small_vocabulary := _vocabulary(bed)) is not None:
        yield small_vocabulary
        return
    try:
        small = bed.loss(bed.piece(1, SHORT))
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        yield failed(error, f"a forward pass of 1 x {SHORT} tokens fails")
        return
    if not math.isfinite(float(small.detach())):
        yield Finding(
            "fault", f"the first loss is {float(small.detach())}", "before any step", "check the init", "nan_batch"
        )
        return
    if not small.requires_grad:
        yield hangs_on_nothing()
        return
    yield from _loop(bed, patient)
    patient.now("one forward, backward and step")
    optimizer = optimizers.make_optimizer(bed.model, bed.run.train)
    batch, words = quick_rows(bed)
    times = _timed(bed, batch, optimizer)
    whole = sum(times.values())
    tokens = batch.inputs.size
    step_s = (
        times["optimizer"] + (whole - times["optimizer"]) * bed.run.train.batch_size * bed.run.data.seq_len / tokens
    )
    rate = bed.run.train.batch_size * bed.run.data.seq_len / step_s
    write_json(patient.scratch / "step.json", {"step_s": step_s, "tokens_per_s": rate}, durable=False)
    mfu = rate * bed.built.flops_per_token(batch.inputs.shape[1]) / max(1.0, bed.machine.peak_flops)
    parts = ", ".join(f"{name} {seconds * 1000:,.0f} ms" for name, seconds in times.items())
    yield Finding(
        "ok",
        f"one step, uncompiled, {bed.machine.dtype_name}: {parts}; {rate:,.0f} tokens/s, {mfu:.0%} of the peak",
        f"{words}, {bed.words}; a whole step of {bed.run.train.batch_size} sequences takes about {step_s:.2f} s",
        figures={"step_s": step_s, "tokens_per_s": rate, "mfu": mfu, **{f"{k}_s": v for k, v in times.items()}},
    )
    yield _layers(bed, batch)
    yield from _input_speed(patient, step_s)


@torch.no_grad()
def _vocabulary(bed: Bed) -> Finding | None:
    """The highest id goes in, and as many logits come out."""
    size = bed.built.vocab_size
    ids = torch.full((1, min(SHORT, bed.run.data.seq_len)), size - 1)
    advice = "give the embedding and the head vocab_size rows"
    try:
        shape = tuple(bed.logits(ids).shape)
    except IndexError as error:
        place = raised_at(error)
        where = f", at {place}" if place else ""
        what = f"the embedding is smaller than the vocabulary: id {size - 1:,} of {size:,} cannot be looked up{where}"
        return Finding("fault", what, str(error), advice, "token_range", place.fields() if place else {})
    except (RuntimeError, TypeError, ValueError) as error:
        return failed(error, f"a forward pass of 1 x {ids.shape[1]} tokens fails")
    if shape != (*ids.shape, size):
        what = f"the model gives logits of shape {shape}, wanted {(*ids.shape, size)}: [batch, time, vocabulary]"
        return Finding("fault", what, f"the tokenizer has {size:,} tokens", advice, "token_range")
    return None


def _timed(bed: Bed, batch: Batch, optimizer: optimizers.Optimizer) -> dict[str, float]:
    """The second of two steps: the first one allocates."""
    times: dict[str, float] = {}
    for _ in range(2):
        marks = [time.perf_counter()]
        loss = bed.loss(batch)
        bed.wait()
        marks.append(time.perf_counter())
        loss.backward()  # type: ignore[no-untyped-call]
        bed.wait()
        marks.append(time.perf_counter())
        optimizer.step(1e-9)
        optimizer.zero_grad()
        bed.wait()
        marks.append(time.perf_counter())
        times = {name: marks[n + 1] - marks[n] for n, name in enumerate(("forward", "backward", "optimizer"))}
    return times


def _layers(bed: Bed, batch: Batch) -> Finding:
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
            bed.wait()
            took = time.perf_counter() - began[name]
            spent[name] += took - inner.pop()
            inner[-1] += took

        return hook

    for name, module in bed.model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave(name)))
    try:
        with torch.no_grad():
            bed.loss(batch)
    finally:
        for handle in handles:
            handle.remove()
    total = sum(spent.values()) or 1e-9
    names = {name: type(module).__name__ for name, module in bed.model.named_modules()}
    slowest = sorted(spent.items(), key=lambda item: -item[1])[:4]
    shown = ", ".join(f"{name or names[name]} {seconds / total:.0%}" for name, seconds in slowest)
    return Finding(
        "ok",
        f"the slowest modules of a forward pass ({total * 1000:,.0f} ms): {shown}",
        figures={f"share:{name or names[name]}": seconds / total for name, seconds in slowest},
    )


def _loop(bed: Bed, patient: Patient) -> Iterator[Finding]:
    """A Python loop over tokens, which no device makes fast."""
    if isinstance(bed.model, Transformer):
        return
    patient.now("lines of the model that run once per token")

    def forward(length: int) -> None:
        with torch.no_grad():
            bed.loss(bed.piece(1, length))

    length = min(2 * SHORT, bed.run.data.seq_len)
    try:
        found = python_loops.find(forward, max(8, length // 2), length)
    except (RuntimeError, IndexError) as error:
        yield failed(error, "the model takes no shorter input than data.seq_len, so its loops were not counted")
        return
    if found is None:
        yield Finding("ok", "no line of the model runs once per token")
        return
    runs = round(found.runs * bed.run.data.seq_len)
    level: Level = "fault" if found.share > MUCH_TIME else "warn"
    yield Finding(
        level,
        f"a Python loop over tokens: {found.place} runs {runs:,} times per forward, {found.share:.0%} of its time",
        f"{found.place.text} is run for every token ({bed.run.data.seq_len:,} in a sequence), and each turn waits for the"
        " one before it; it looks like a hang, and a compiler unrolls it",
        "compute all positions at once (one matrix product, a scan or a cumulative sum); --train.compile false until then",
        "python_loop",
        found.place.fields(),
        {"train.compile": False} if bed.run.train.compile else {},
        {"runs": runs, "share": found.share},
    )


def _input_speed(patient: Patient, step_s: float) -> Iterator[Finding]:
    """Of a stream: whether text comes as fast as it is trained on."""
    read = read_record(patient.scratch / "speed.json").get("bytes_per_s")
    if not patient.run.data.stream or not read:
        return
    need = patient.run.train.batch_size * patient.run.data.seq_len * 4 / step_s  # about four bytes a token
    level: Level = "ok" if read > need else "warn"
    what = f"a step needs {need / 1e6:.2f} MB/s of text, the source gives {read / 1e6:.2f} MB/s"
    yield Finding(
        level,
        what,
        "at about 4 bytes a token",
        "" if level == "ok" else "--data.stream false",
        "" if level == "ok" else "slow_disk",
    )
