"""Model probes: whether bf16 works and is worth it, and whether the longest micro-batch fits into memory.

In:  a ProbeContext.
Out: Findings with both times, both losses; peak and available memory, measured or from smaller batches, and said which.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from lamplighter.data.batches import NO_TARGET, Batch
from lamplighter.doctor.model_fixture import ModelFixture, fixtures, quick_rows, seconds_of
from lamplighter.doctor.probe import Finding, ProbeContext, fault, ok, warn
from lamplighter.gpus import Device
from lamplighter.model.transformer import Transformer
from lamplighter.plan.job import job_of
from lamplighter.plan.memory import GIB
from lamplighter.plan.memory import memory as memory_of
from lamplighter.procs import procfs
from lamplighter.rundir import human_bytes
from lamplighter.train import bf16, optimizers

_MEMORY_S = 20.0  # so long the longest micro-batch may take for real
_MARGIN = 0.92  # of the available memory
_WORTH = 1.1


# ---------------------------------------------------------------- precision


def precision(context: ProbeContext) -> Iterator[Finding]:
    """bf16 against fp32: does it work, is it faster, does it give the same loss."""
    wanted = context.run.train.dtype
    is_cpu = context.run.train.device == "cpu" or not torch.cuda.is_available()
    if is_cpu and not bf16.cpu_has_it():
        yield _no_bf16(wanted, "the CPU has no bf16 instructions: each product would be emulated")
        return
    context.now("bf16 in a process that may die")
    if is_cpu and not bf16.make_it_work():  # before the first product: a fork after it would hang
        yield _no_bf16(wanted, "bf16 crashes on this CPU: a trial process died")
        return
    if not is_cpu and not torch.cuda.is_bf16_supported():
        yield _no_bf16(wanted, "the GPU has no bf16")
        return
    for found in fixtures(context):
        if not isinstance(found, Finding):  # those are told by the first model probe
            yield _compare(found, context)


def _compare(fixture: ModelFixture, context: ProbeContext) -> Finding:
    wanted = fixture.run.train.dtype
    context.now("one step in fp32 and in bf16")
    batch, words = quick_rows(fixture)
    spent = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        seconds_of(fixture, batch, dtype)
        spent[name] = min(seconds_of(fixture, batch, dtype) for _ in range(2))
    with torch.no_grad():
        loss = {"fp32": float(fixture.loss(batch, torch.float32)), "bf16": float(fixture.loss(batch, torch.bfloat16))}
    gain = spent["fp32"] / spent["bf16"]
    what = f"bf16 {spent['bf16'] * 1000:,.0f} ms against fp32 {spent['fp32'] * 1000:,.0f} ms: {gain:.2f} x"
    why = f"forward and backward of {words}; loss {loss['bf16']:.4f} against {loss['fp32']:.4f}"
    figures = {"bf16_s": spent["bf16"], "fp32_s": spent["fp32"], "gain": gain}
    if not math.isfinite(loss["bf16"]) or abs(loss["bf16"] - loss["fp32"]) > 0.05 * abs(loss["fp32"]):
        return Finding(
            "fault" if wanted == "bf16" else "warn",
            f"bf16 gives another loss: {why}",
            what,
            "--train.dtype fp32",
            "bf16_differs",
            settings={"train.dtype": "fp32"},
            figures=figures,
        )
    best = "bf16" if gain > _WORTH else "fp32"
    if wanted in ("auto", best):
        return ok(what, why, figures=figures)
    return warn(
        f"{what}, and train.dtype is {wanted}",
        why,
        f"--train.dtype {best}",
        settings={"train.dtype": best},
        figures=figures,
    )


def _no_bf16(wanted: str, why: str) -> Finding:
    if wanted == "bf16":
        return fault(
            "train.dtype is bf16, and it does not work here",
            why,
            "--train.dtype fp32",
            settings={"train.dtype": "fp32"},
        )
    return ok(f"fp32: {why}")


# ---------------------------------------------------------------- memory


def memory(context: ProbeContext) -> Iterator[Finding]:
    """The longest micro-batch, for real where that is quick and safe; else from smaller ones."""
    for found in fixtures(context, quick_dtype=False):
        if isinstance(found, Finding):
            continue
        yield _longest(found, context)


def _available(fixture: ModelFixture) -> int:
    if fixture.machine.device.type == "cuda":
        return int(torch.cuda.mem_get_info(fixture.machine.device)[0])
    return procfs.memory_available() + procfs.own_memory()[0]


def _longest(fixture: ModelFixture, context: ProbeContext) -> Finding:
    have, wanted = _available(fixture), fixture.rows
    paper = _on_paper(fixture, have)
    sums = f"by arithmetic {human_bytes(paper)}" if paper else "of a model of your own there is no arithmetic"
    if paper and paper > _MARGIN * have:
        return _too_much(
            fixture, paper, have, f"{sums}: weights, gradients, optimizer, activations and logits; not tried"
        )
    peaks: dict[int, int] = {}
    rows, spent = 1, 0.0
    while True:
        context.now(f"{rows} x {fixture.run.data.seq_len} tokens, the memory of a step")
        began = time.monotonic()
        peaks[rows] = _peak(fixture, rows)
        spent = time.monotonic() - began
        if rows == wanted:
            return _told(fixture, peaks[rows], have, f"measured on the whole micro-batch of {wanted}; {sums}")
        each = (peaks[rows] - peaks[rows // 2]) / (rows - rows // 2) if rows > 1 else 0.0
        guess = int(peaks[rows] + each * (wanted - rows))
        if rows > 1 and (guess > _MARGIN * have or spent * 2 > _MEMORY_S):
            why = f"from {rows // 2} and {rows} rows, {human_bytes(int(each))} a row; {sums}"
            return _too_much(fixture, guess, have, why) if guess > _MARGIN * have else _told(fixture, guess, have, why)
        rows = min(2 * rows, wanted)


def _on_paper(fixture: ModelFixture, have: int) -> int:
    """The plan's arithmetic, which knows the built-in families."""
    if not isinstance(fixture.model, Transformer):
        return 0
    shape = (
        replace(fixture.model.shape, layers=fixture.run.model.layers)
        if not fixture.run.model.init_from
        else fixture.model.shape
    )
    job = job_of(fixture.run, shape, fixture.run.train.steps or 1, fixture.machine.dtype_name)
    name = "cpu" if fixture.machine.device.type == "cpu" else fixture.machine.name
    device = Device(name, have / GIB, None, fixture.machine.peak_flops)
    return memory_of(job, device).training


def _peak(fixture: ModelFixture, rows: int) -> int:
    """Of one step of so many rows: the device's own count, or how high the resident memory rose."""
    optimizer = optimizers.make_optimizer(fixture.model, fixture.run.train)
    batch = fixture.piece(rows)
    if len(batch.inputs) < rows:  # the data has fewer: repeat them
        batch = _repeated(batch, rows)
    cuda = fixture.machine.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(fixture.machine.device)
    watch = _PeakMemory()
    with watch:
        fixture.loss(batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step(1e-9)
        optimizer.zero_grad()
        fixture.wait()
    return int(torch.cuda.max_memory_allocated(fixture.machine.device)) if cuda else watch.highest


def _repeated(batch: Batch, rows: int) -> Batch:
    times = -(-rows // len(batch.inputs))
    inputs, targets = (np.tile(part, (times, 1))[:rows].copy() for part in (batch.inputs, batch.targets))
    segments = None if batch.segments is None else np.tile(batch.segments, (times, 1))[:rows].copy()
    return Batch(1, inputs, targets, segments, batch.samples, epoch=0.0, real_tokens=int((targets != NO_TARGET).sum()))


class _PeakMemory:
    """How high the resident memory of this process rises, looked at every few milliseconds."""

    def __enter__(self) -> _PeakMemory:
        self.highest, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()
        return self

    def _look_on(self) -> None:
        while not self._over.wait(0.002):
            self.highest = max(self.highest, procfs.own_memory()[0])

    def __exit__(self, *_: object) -> None:
        self.highest = max(self.highest, procfs.own_memory()[0])
        self._over.set()
        self._thread.join()


def _told(fixture: ModelFixture, peak: int, have: int, why: str) -> Finding:
    what = f"the longest micro-batch, {fixture.rows} x {fixture.run.data.seq_len} tokens, takes {human_bytes(peak)} of {human_bytes(have)}"
    return ok(what, why, figures={"peak_bytes": float(peak), "available_bytes": float(have)})


def _too_much(fixture: ModelFixture, need: int, have: int, why: str) -> Finding:
    smaller = max(1, fixture.rows // 2 ** max(1, math.ceil(math.log2(need / (_MARGIN * have)))))
    return fault(
        f"the longest micro-batch, {fixture.rows} x {fixture.run.data.seq_len} tokens, needs {human_bytes(need)};"
        f" {human_bytes(have)} are available",
        why,
        f"--train.micro_batch {smaller} (the batch of {fixture.run.train.batch_size} stays)",
        "rss_oom",
        settings={"train.micro_batch": smaller},
        figures={"peak_bytes": float(need), "available_bytes": float(have)},
    )
