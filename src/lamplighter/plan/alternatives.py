"""What would make a plan go: the cheapest changes, each with its new figures. No torch.

In:  a Plan with reasons against it.
Out: the same Plan with its changes: first those that leave the result as it is, then shorter runs, then smaller models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lamplighter.model.shape import count_parameters
from lamplighter.plan.estimate import SPARE, Change, Plan, make
from lamplighter.plan.job import Job
from lamplighter.plan.memory import memory
from lamplighter.plan.speed import step_seconds
from lamplighter.train.gpus import Device

MOST_CHANGES = 4


@dataclass(frozen=True)
class Option:
    """A job that differs a little, and in what."""

    settings: str
    what: str
    job: Job


def completed(plan: Plan) -> Plan:
    """With what would help, where it is needed."""
    return replace(plan, changes=tuple(_changes(plan))) if plan.reasons else plan


def _changes(plan: Plan) -> Iterator[Change]:
    found = 0
    for option in _options(plan.job, plan.device):
        made = make(option.job, plan.device, plan.free_disk)
        if made.go and found < MOST_CHANGES:
            found += 1
            yield Change(option.settings, option.what, made.hours, made.usd, made.memory.peak_gib)


def _options(job: Job, device: Device) -> Iterator[Option]:
    """Ordered by what they change: nothing of the result, then the length of the run, then the model."""
    for_memory = list(_for_memory(job, device))
    yield from for_memory
    for base in [Option("", "", job), *for_memory[:1]]:
        for change in (_fewer_steps, _smaller_model, _shorter_window):
            for option in change(base.job, device):
                if make(option.job, device).go:
                    both = f"{base.settings} {option.settings}".strip()
                    words = f"{base.what}, and {option.what}" if base.what else option.what
                    yield Option(both, words, option.job)
                    break


def fits(job: Job, device: Device) -> bool:
    return memory(job, device).peak_gib <= device.memory_gib * SPARE


def largest_micro_batch(job: Job, device: Device) -> int | None:
    """On paper; None where not even one row fits."""
    low, high = 0, job.batch_size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(replace(job, micro_batch=middle), device) else (low, middle - 1)
    return low or None


def _for_memory(job: Job, device: Device) -> Iterator[Option]:
    """Batch and learning rate untouched, and the losses too: smaller pieces, or activations computed again."""
    if fits(job, device):
        return
    blocks = ""
    if job.whole_logits and not job.own_params:
        job, blocks = replace(job, whole_logits=False), "--train.loss blocks "
        if fits(job, device):
            yield Option(blocks.strip(), "logits a few rows at a time", job)
            return
    if (size := largest_micro_batch(job, device)) is not None:
        size = _even(size, job.batch_size)
        words = f"micro-batch {size}, the same batch of {job.batch_size}"
        yield Option(f"{blocks}--train.micro_batch {size}", words, replace(job, micro_batch=size))
    if job.recompute or job.own_params:
        return
    again = replace(job, recompute=True)
    slower = step_seconds(again, device) / step_seconds(job, device) - 1
    words = f"activations computed again (the same losses, {slower:.0%} more time)"
    if fits(again, device):
        yield Option(f"{blocks}--train.recompute true", words, again)
    elif (size := largest_micro_batch(again, device)) is not None:
        size = _even(size, job.batch_size)
        settings = f"{blocks}--train.recompute true --train.micro_batch {size}"
        yield Option(settings, f"{words}, micro-batch {size}", replace(again, micro_batch=size))


def _even(size: int, batch_size: int) -> int:
    """The smallest piece that needs no more pieces: 5 of 16 are four pieces, and so are 4."""
    return math.ceil(batch_size / math.ceil(batch_size / size))


def _fewer_steps(job: Job, device: Device) -> Iterator[Option]:
    took, limit = step_seconds(job, device) * job.steps / 3600, job.limit_hours
    steps = int(job.steps * limit / took * 0.98) if took and limit < math.inf else 0
    if 1 <= steps < job.steps:
        yield Option(f"--train.steps {steps}", f"{steps / job.steps:.1%} of the steps", replace(job, steps=steps))


def _shorter_window(job: Job, _: Device) -> Iterator[Option]:
    """As many windows, each shorter: less text in all."""
    length = job.seq_len // 2
    while length >= 128:
        shorter = replace(job, seq_len=length, row_tokens=None, shape=replace(job.shape, positions=length))
        yield Option(f"--data.seq_len {length}", f"windows of {length} tokens", shorter)
        length //= 2


def _smaller_model(job: Job, _: Device) -> Iterator[Option]:
    if job.own_params:
        return
    shape = job.shape
    for layers in range(shape.layers - 1, 0, -1):
        unit = 2 * shape.heads
        width = max(unit, round(shape.width * layers / shape.layers / unit) * unit)
        mlp = max(8, round(shape.mlp_width * width / shape.width))
        smaller = replace(shape, layers=layers, width=width, mlp_width=mlp)
        settings = f"--model.layers {layers} --model.width {width}"
        params = count_parameters(smaller) / 1e6
        yield Option(settings, f"a model of {params:,.0f}M parameters", replace(job, shape=smaller))
