"""Memory, time, money and disk before they are spent: go or no-go, with the reasons. No torch.

In:  a Job (what is to be trained) and a Device (on what); what was measured, where something was.
Out: a Plan: every figure, and what speaks against it. The changes that would make it go are in changes.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lamplighter.plan.job import Job
from lamplighter.plan.memory import GIB, Memory, host_gib, memory
from lamplighter.plan.speed import least_hours, step_seconds, total_flops
from lamplighter.train.gpus import Device

SPARE = 0.92  # of the memory that may be planned for
TOKEN_BYTES = 2


@dataclass(frozen=True)
class Measured:
    """What a few real steps took, in a process of their own."""

    step_s: float
    peak_gib: float
    micro_batch: int
    steps: int
    dtype: str
    fits: bool = True
    why: str = ""


@dataclass(frozen=True)
class Change:
    """One way to make it go."""

    settings: str
    what: str
    hours: float
    usd: float | None
    memory_gib: float


@dataclass(frozen=True)
class Plan:
    """The figures, and what speaks against it."""

    job: Job
    device: Device
    memory: Memory
    flops: float
    step_s: float
    disk_bytes: int
    free_disk: int | None = None
    measured: Measured | None = None
    largest: int | None = None  # the largest micro-batch that fits, where it was looked for
    reasons: tuple[str, ...] = ()
    changes: tuple[Change, ...] = field(default=())

    @property
    def go(self) -> bool:
        return not self.reasons

    @property
    def params(self) -> int:
        return self.job.params

    @property
    def hours(self) -> float:
        return self.step_s * self.job.steps / 3600

    @property
    def usd(self) -> float | None:
        return self.hours * self.job.usd_per_hour if self.job.usd_per_hour is not None else None

    @property
    def mfu(self) -> float:
        """That the time stands for."""
        return self.flops / (self.hours * 3600 * self.device.peak(self.job.dtype)) if self.hours else 0.0

    @property
    def usable_gib(self) -> float:
        return self.device.memory_gib * SPARE

    @property
    def between_saves_h(self) -> float:
        """What a crash can cost, at most."""
        job = self.job
        by_steps = job.save_every_steps * self.step_s / 3600 if job.save_every_steps else math.inf
        by_time = job.save_every_s / 3600 if job.save_every_s else math.inf
        return min(by_steps, by_time, self.hours)


def checkpoint_bytes(job: Job) -> int:
    return job.optimizer.checkpoint_bytes * job.params


def cache_bytes(job: Job) -> int:
    if job.text is None:
        return 0
    each = TOKEN_BYTES if job.shape.vocab_size <= 1 << 16 else 2 * TOKEN_BYTES
    return each * (job.text.tokens + (job.text.val_tokens or 0))


def make(job: Job, device: Device, free_disk: int | None = None, measured: Measured | None = None) -> Plan:
    """All figures and the reasons against."""
    step_s = measured.step_s if measured is not None and measured.fits else step_seconds(job, device)
    disk = checkpoint_bytes(job) * (job.keep + 2) + cache_bytes(job)
    plan = Plan(job, device, memory(job, device), total_flops(job), step_s, disk, free_disk, measured)
    return replace(plan, reasons=tuple(_against(plan)))


def _against(plan: Plan) -> Iterator[str]:
    yield from _misfits(plan)
    yield from _memory_against(plan)
    yield from _time_against(plan, plan.hours)
    if plan.free_disk is not None and plan.disk_bytes > plan.free_disk:
        yield f"disk: {plan.disk_bytes / GIB:.1f} GiB are needed, {plan.free_disk / GIB:.1f} GiB are free"


def _misfits(plan: Plan) -> Iterator[str]:
    job, shape = plan.job, plan.job.shape
    if job.tokenizer_vocab is not None and job.tokenizer_vocab > shape.vocab_size:
        yield (
            f"vocabulary: the tokenizer has {job.tokenizer_vocab:,} tokens, the model knows {shape.vocab_size:,};"
            " use the model's own tokenizer"
        )
    if job.seq_len > shape.positions:
        yield f"length: data.seq_len {job.seq_len:,} is longer than the {shape.positions:,} positions of the model"


def _memory_against(plan: Plan) -> Iterator[str]:
    job, device, found = plan.job, plan.device, plan.measured
    if found is not None and not found.fits:
        yield f"memory: tried with a micro-batch of {found.micro_batch}, and it does not fit ({found.why})"
        return
    if found is not None:  # real steps have been made: a peak on paper is no argument against them
        return
    need = plan.memory.peak_gib
    if need > plan.usable_gib:
        yield (
            f"memory: {need:.1f} GiB are needed on each {device.name}, {device.memory_gib:.1f} GiB are there"
            f" ({plan.usable_gib:.1f} may be planned for){_of_logits(plan)}"
        )
    if not device.is_cpu and device.host_gib is not None and host_gib(job, device) > device.host_gib:
        yield f"memory of the host: {host_gib(job, device):.1f} GiB are needed, {device.host_gib:.1f} GiB are free"


def _of_logits(plan: Plan) -> str:
    size = f"{plan.memory.logits / GIB:.1f} GiB"
    return f"; the logits alone are {size}" if plan.job.whole_logits else f" (logits as a whole would add {size})"


def _time_against(plan: Plan, hours: float) -> Iterator[str]:
    job, device = plan.job, plan.device
    usd = hours * (job.usd_per_hour or 0.0)
    if job.budget_usd is not None and usd > job.budget_usd:
        yield f"money: ${usd:,.2f} ({hours:,.1f} h x ${job.usd_per_hour}/h), the budget is ${job.budget_usd:,.2f}"
    limit = job.limit_hours
    if hours > limit:
        wanted = plan.flops / (limit * 3600)
        yield (
            f"time: {hours:,.1f} h, the budget allows {limit:,.2f} h; that would take {wanted / 1e12:,.2f} TFLOP/s,"
            f" {wanted / device.peak(job.dtype):.1f} times the peak of {device}"
        )


def sure_reasons(plan: Plan) -> list[str]:
    """What cannot be: more memory than there is, even without holes; more time or money than the budget at the best MFU."""
    found, exists = [], plan.device.total_gib or plan.device.memory_gib
    if plan.memory.least > exists * GIB:
        found.append(
            f"memory: at least {plan.memory.least / GIB:.1f} GiB are needed on {plan.device.name},"
            f" {exists:.1f} GiB exist{_of_logits(plan)}"
        )
    return [*found, *_time_against(plan, least_hours(plan.job, plan.device))]


# ---------------------------------------------------------------- as JSON


def as_json(plan: Plan, warnings: list[str]) -> dict[str, Any]:
    """Stable keys, for scripts."""
    job, parts = plan.job, plan.memory
    return {
        "go": plan.go,
        "device": str(plan.device),
        "dtype": job.dtype,
        "params": plan.params,
        "tokens": job.tokens,
        "tokens_per_param": job.tokens / plan.params,
        "data_tokens": job.text.tokens if job.text else None,
        "data_tokens_how": job.text.how if job.text else None,
        "padding": job.text.padding if job.text else None,
        "steps": job.steps,
        "epochs": job.epochs,
        "flops": plan.flops,
        "flops_per_token": job.flops_per_token,
        "step_s": plan.step_s,
        "mfu": plan.mfu,
        "hours": plan.hours,
        "usd": plan.usd,
        "memory_gib": parts.peak_gib,
        "memory_parts_gib": {
            name: value / GIB
            for name, value in asdict(parts).items()
            if type(value) is int and value and name != "logits"
        },
        "memory_there_gib": plan.device.memory_gib,
        "logits_gib": parts.logits / GIB,  # as a whole; what is there at once:
        "logits_held_gib": parts.held / GIB,
        "host_gib": host_gib(job, plan.device),
        "disk_gib": plan.disk_bytes / GIB,
        "crash_costs_h": plan.between_saves_h,
        "crash_costs_usd": plan.between_saves_h * job.usd_per_hour if job.usd_per_hour is not None else None,
        "micro_batch": job.micro_batch,
        "largest_micro_batch": plan.largest,
        "measured": asdict(plan.measured) if plan.measured else None,
        "reasons": list(plan.reasons),
        "warnings": warnings,
        "changes": [asdict(change) for change in plan.changes],
    }
