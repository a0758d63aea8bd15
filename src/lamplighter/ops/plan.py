"""Memory, time, money and disk before they are spent: go or no-go, with the arithmetic line by line. No torch.

In:  a Job (what is to be trained) and a Device (on what).
Out: a Plan: every figure with its arithmetic, the reasons against it, the cheapest changes that would make it go.

Bytes of one micro-batch, eager, as this package's own transformer saves them for the backward pass (C width, M MLP width,
per token and layer): gpt2 8C + 2M numbers, llama 10C + 4M; bf16 keeps the residual stream in fp32. Logits: 12 bytes a
number in fp32 (log-softmax, its gradient, the gradient of the logits), 14 in bf16. Gradients and activations are not at
their largest at the same time, unless gradients of an earlier micro-batch are being added up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lamplighter.config import Run
from lamplighter.model.shape import Shape, count_parameters, flops_per_token
from lamplighter.ops.devices import Device

GIB = 1 << 30
GPU_OWN_GIB = 0.8  # context, kernels and the allocator's spare
HOST_OWN_GIB = 0.3  # Python and torch
FRAGMENTS = 1.3  # on a CPU the allocator keeps holes; measured 1.05 to 1.6 of what lives at once
SPARE = 0.92  # of the memory that may be planned for
MOST_CHANGES = 4
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv:2203.15556


@dataclass(frozen=True)
class Job:
    """What is to be trained, as far as arithmetic needs it."""

    shape: Shape
    seq_len: int
    batch_size: int
    micro_batch: int
    steps: int
    dtype: str = "fp32"
    data_tokens: int | None = None
    keep: int = 3
    save_every_steps: int = 500
    save_every_s: float = 600.0
    budget_usd: float | None = None
    budget_hours: float | None = None
    usd_per_hour: float | None = None

    @property
    def step_tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def tokens(self) -> int:
        return self.steps * self.step_tokens

    @property
    def accumulation(self) -> int:
        return math.ceil(self.batch_size / self.micro_batch)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the worst moment."""

    weights: int
    gradients: int
    optimizer: int
    cast: int  # bf16 copies of the weights during a step
    activations: int
    logits: int
    own: int
    gradients_meanwhile: bool
    holes: float = 1.0

    @property
    def peak(self) -> int:
        """Gradients grow while activations shrink; only earlier micro-batches leave theirs lying about."""
        fixed = self.weights + self.optimizer + self.cast + self.own
        at_logits = int(self.holes * (self.activations + self.logits)) + (
            self.gradients if self.gradients_meanwhile else 0
        )
        return fixed + max(at_logits, self.gradients + self.activations // 8)

    @property
    def peak_gib(self) -> float:
        return self.peak / GIB


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
    params: int
    memory: Memory
    flops: float
    hours: float
    usd: float | None
    disk_bytes: int
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    changes: tuple[Change, ...] = field(default=())

    @property
    def go(self) -> bool:
        return not self.reasons


# ---------------------------------------------------------------- from a run to a job


def job_of(run: Run, shape: Shape, steps: int, data_tokens: int | None, dtype: str) -> Job:
    """What a resolved run asks for."""
    train, save, budget = run.train, run.save, run.budget
    return Job(
        shape=shape,
        seq_len=run.data.seq_len,
        batch_size=train.batch_size,
        micro_batch=train.micro_batch or train.batch_size,
        steps=steps,
        dtype=dtype,
        data_tokens=data_tokens,
        keep=save.keep,
        save_every_steps=save.every_steps,
        save_every_s=save.every_s,
        budget_usd=budget.usd,
        budget_hours=budget.hours,
        usd_per_hour=budget.usd_per_hour,
    )


# ---------------------------------------------------------------- arithmetic


def layer_bytes(shape: Shape, dtype: str) -> int:
    """What one layer keeps of one token for the backward pass."""
    C, M = shape.width, shape.mlp_width
    if shape.family == "gpt2":
        return 32 * C + 8 * M if dtype == "fp32" else 20 * C + 4 * M
    return 40 * C + 16 * M if dtype == "fp32" else 34 * C + 8 * M


def memory(job: Job, device: Device) -> Memory:
    """Bytes on one device; every device holds the whole model and its own micro-batch."""
    params = count_parameters(job.shape)
    tokens = job.micro_batch * job.seq_len
    per_layer = tokens * layer_bytes(job.shape, job.dtype)
    ends = tokens * job.shape.width * 4 * 2  # the last norm and its input
    return Memory(
        weights=4 * params,
        gradients=4 * params,
        optimizer=8 * params,
        cast=2 * params if job.dtype == "bf16" else 0,
        activations=job.shape.layers * per_layer + ends,
        logits=tokens * job.shape.vocab_size * (14 if job.dtype == "bf16" else 12),
        own=int((HOST_OWN_GIB if device.name == "cpu" else GPU_OWN_GIB) * GIB),
        gradients_meanwhile=job.accumulation > 1,
        holes=FRAGMENTS if device.name == "cpu" else 1.0,
    )


def total_flops(job: Job) -> float:
    """6N + attention for each token."""
    return flops_per_token(job.shape, job.seq_len) * job.tokens


def hours(job: Job, device: Device) -> float:
    return total_flops(job) / (device.peak(job.dtype) * device.mfu) / 3600


def checkpoint_bytes(job: Job) -> int:
    return 12 * count_parameters(job.shape)


def make(job: Job, device: Device, free_disk: int | None = None, with_changes: bool = True) -> Plan:
    """All figures, the reasons against, and (where there are some) what would help."""
    took = hours(job, device)
    usd = took * job.usd_per_hour if job.usd_per_hour is not None else None
    disk = checkpoint_bytes(job) * (job.keep + 2) + 2 * (job.data_tokens or 0)
    plan = Plan(job, device, count_parameters(job.shape), memory(job, device), total_flops(job), took, usd, disk)
    plan = replace(plan, reasons=tuple(_against(plan, free_disk)), warnings=tuple(_doubts(plan)))
    return replace(plan, changes=tuple(_changes(plan, free_disk))) if plan.reasons and with_changes else plan


def _against(plan: Plan, free_disk: int | None) -> Iterator[str]:
    job, device = plan.job, plan.device
    need, have = plan.memory.peak_gib, _usable(device)
    if need > have:
        yield (
            f"memory: {need:.1f} GiB are needed on each {device.name}, {device.memory_gib:.1f} GiB are there"
            f" ({have:.1f} may be planned for)"
        )
    if job.budget_usd is not None and plan.usd is not None and plan.usd > job.budget_usd:
        yield f"money: ${plan.usd:,.2f} ({plan.hours:,.1f} h x ${job.usd_per_hour}/h), the budget is ${job.budget_usd:,.2f}"
    limit = _limit_hours(job)
    if plan.hours > limit:
        wanted = plan.flops / (limit * 3600)
        yield (
            f"time: {plan.hours:,.1f} h, the budget allows {limit:,.1f} h; that would take {wanted / 1e12:,.2f} TFLOP/s,"
            f" {wanted / device.peak(job.dtype):.1f} times the peak of {device}"
        )
    if free_disk is not None and plan.disk_bytes > free_disk:
        yield f"disk: {plan.disk_bytes / GIB:.1f} GiB are needed, {free_disk / GIB:.1f} GiB are free"


def _usable(device: Device) -> float:
    return device.memory_gib * SPARE


def _doubts(plan: Plan) -> Iterator[str]:
    job = plan.job
    if job.data_tokens:
        epochs = job.tokens / job.data_tokens
        if epochs > 5:
            yield f"{epochs:.0f} epochs: {job.tokens:,} tokens out of {job.data_tokens:,}; 1 to 4 are usual"
    ratio = job.tokens / plan.params
    if ratio < TOKENS_PER_PARAMETER / 10:
        yield f"{ratio:.1f} tokens per parameter; about {TOKENS_PER_PARAMETER} is where more parameters stop helping"
    lost = _loss_of_a_crash(plan)
    if plan.usd and lost * (job.usd_per_hour or 0) > 0.05 * plan.usd:
        yield f"a crash can cost ${lost * (job.usd_per_hour or 0):.2f}: save more often (save.every_s)"


def _loss_of_a_crash(plan: Plan) -> float:
    """Hours between two saves."""
    job = plan.job
    step_h = plan.hours / max(1, job.steps)
    by_steps = job.save_every_steps * step_h if job.save_every_steps else math.inf
    by_time = job.save_every_s / 3600 if job.save_every_s else math.inf
    return min(by_steps, by_time, plan.hours)


# ---------------------------------------------------------------- what would help


@dataclass(frozen=True)
class Option:
    """A job that differs a little, and in what."""

    settings: str
    what: str
    job: Job


def _changes(plan: Plan, free_disk: int | None) -> Iterator[Change]:
    """The cheapest that make it go: first one setting alone, then one for the memory with one for the time."""
    job, found = plan.job, 0
    for option in _options(job, plan):
        if (made := make(option.job, plan.device, free_disk, with_changes=False)).go:
            found += 1
            yield Change(option.settings, option.what, made.hours, made.usd, made.memory.peak_gib)
        if found == MOST_CHANGES:
            return


def _options(job: Job, plan: Plan) -> Iterator[Option]:
    """Ordered by what they change: nothing of the result, then the length of the run, then the model."""
    fits = next((o for o in _for_memory(job) if memory(o.job, plan.device).peak_gib <= _usable(plan.device)), None)
    if fits is not None:
        yield fits
    for base in [Option("", "", job), *([fits] if fits else [])]:
        for change in (_fewer_steps, _smaller_model, _shorter_window):
            for option in change(base.job, plan):
                both = f"{base.settings} {option.settings}".strip()
                words = f"{base.what}, and {option.what}" if base.what else option.what
                if make(option.job, plan.device, with_changes=False).go:
                    yield Option(both, words, option.job)
                    break


def _for_memory(job: Job) -> Iterator[Option]:
    """Batch and learning rate untouched."""
    size = job.micro_batch // 2
    while size >= 1:
        words = f"micro-batch {size}, the same batch of {job.batch_size}"
        yield Option(f"--train.micro_batch {size}", words, replace(job, micro_batch=size))
        size //= 2


def _limit_hours(job: Job) -> float:
    by_money = job.budget_usd / job.usd_per_hour if job.budget_usd is not None and job.usd_per_hour else math.inf
    return min(job.budget_hours or math.inf, by_money)


def _fewer_steps(job: Job, plan: Plan) -> Iterator[Option]:
    took, limit = hours(job, plan.device), _limit_hours(job)
    steps = int(job.steps * limit / took * 0.98) if took and limit < math.inf else 0
    if 1 <= steps < job.steps:
        yield Option(f"--train.steps {steps}", f"{steps / job.steps:.1%} of the steps", replace(job, steps=steps))


def _shorter_window(job: Job, _: Plan) -> Iterator[Option]:
    """As many windows, each shorter: less text in all."""
    length = job.seq_len // 2
    while length >= 128:
        shorter = replace(job, seq_len=length, shape=replace(job.shape, positions=length))
        yield Option(f"--data.seq_len {length}", f"windows of {length} tokens", shorter)
        length //= 2


def _smaller_model(job: Job, _: Plan) -> Iterator[Option]:
    shape = job.shape
    for layers in range(shape.layers - 1, 0, -1):
        unit = 2 * shape.heads
        width = max(unit, round(shape.width * layers / shape.layers / unit) * unit)
        mlp = max(8, round(shape.mlp_width * width / shape.width))
        smaller = replace(shape, layers=layers, width=width, mlp_width=mlp)
        params = count_parameters(smaller) / 1e6
        settings = f"--model.layers {layers} --model.width {width}"
        yield Option(settings, f"a model of {params:,.0f}M parameters", replace(job, shape=smaller))


# ---------------------------------------------------------------- as JSON


def as_json(plan: Plan) -> dict[str, Any]:
    """Stable keys, for scripts."""
    return {
        "go": plan.go,
        "device": str(plan.device),
        "params": plan.params,
        "tokens": plan.job.tokens,
        "steps": plan.job.steps,
        "epochs": plan.job.tokens / plan.job.data_tokens if plan.job.data_tokens else None,
        "flops": plan.flops,
        "flops_per_token": flops_per_token(plan.job.shape, plan.job.seq_len),
        "hours": plan.hours,
        "usd": plan.usd,
        "memory_gib": plan.memory.peak_gib,
        "logits_gib": plan.memory.logits / GIB,
        "disk_gib": plan.disk_bytes / GIB,
        "reasons": list(plan.reasons),
        "warnings": list(plan.warnings),
        "changes": [vars(change) for change in plan.changes],
    }
