"""How long a step takes: work over peak x MFU on a GPU; on a processor summed up from its two measured rates. No torch.

In:  a Job, a Device.
Out: FLOPs, seconds of a step, the least that can be hoped for, and hours in words.
"""

from __future__ import annotations

from dataclasses import replace

from lamplighter.config import Lora
from lamplighter.gpus import Device, Rates
from lamplighter.model.shape import matmul_parameters_per_layer
from lamplighter.plan.job import Job
from lamplighter.plan.memory import layer_bytes
from lamplighter.plan.ranks import reduction, share

_BEST_GPU_MFU, _BEST_CPU_MFU = 0.6, 0.8  # nobody does better: what needs more than this cannot be

# Of a processor, in units of its measured rates; fitted to benchmarks/plan.py.
_GEMM_SHARE = 0.88
_ATTENTION_SHARE = 0.5
_LAYER_PASSES = 3.0  # bytes moved for each byte that a layer keeps
_LOGIT_BYTES_MOVED = {"whole": 40, "blocks": 24}
_LAYER_S = 0.002  # calls, once for each layer and micro-batch

# Of a GPU: the least that launching takes, forward and backward, however small the work; a rule of thumb for small
# models (10 to 25 ms a step for 12 layers), not measured here.
_LAUNCH_LAYER_S = 0.001  # for each layer and micro-batch
_LAUNCH_STEP_S = 0.002  # the embedding, the head, the optimizer


def total_flops(job: Job) -> float:
    """6N + attention for each token: what is learned from, not what is computed twice."""
    return job.flops_per_token * job.tokens


def recompute_flops(job: Job) -> float:
    """What train.recompute adds: the forward pass of every layer once more."""
    if not job.recompute:
        return 0.0
    if job.own_params:
        return 2.0 * job.own_params * job.tokens
    shape = job.shape
    return shape.layers * (2.0 * matmul_parameters_per_layer(shape) + 4.0 * shape.width * job.seq_len) * job.tokens


def reference_flops(job: Job) -> float:
    """Of preference pairs: one forward pass of the model as it begins over all pairs, a third of training on them in full."""
    return replace(job, lora=Lora()).flops_per_token / 3 * job.reference_positions


def reference_seconds(job: Job, device: Device) -> float:
    """One rank makes it, and the others wait."""
    if not job.reference_positions:
        return 0.0
    if device.rates is not None:
        return cpu_forward_seconds(job, device.rates) / job.step_tokens * job.reference_positions
    return reference_flops(job) / (device.peak(job.dtype) / device.count * device.mfu)


def step_seconds(job: Job, device: Device) -> float:
    """One optimizer step: what the busiest device computes, then the reduction."""
    return compute_seconds(job, device) + reduction(job, device).seconds


def compute_seconds(job: Job, device: Device) -> float:
    job = replace(job, optimizer_ranks=device.count)
    if device.rates is not None and not job.own_params:
        return cpu_step_seconds(replace(job, batch_size=share(job, device.count).rows), device.rates)
    return max(_work_seconds(job, device), launch_seconds(job, device))


def _work_seconds(job: Job, device: Device) -> float:
    """Of the device that has the most rows."""
    part = share(job, device.count).rows / job.batch_size
    each = device.peak(job.dtype) / device.count * device.mfu
    return ((total_flops(job) + recompute_flops(job)) / job.steps * part + job.optimizer_flops) / each


def launch_seconds(job: Job, device: Device) -> float:
    """The floor of a step on a GPU; a processor's calls are in its own sum."""
    if device.is_cpu:
        return 0.0
    layers = 0 if job.own_params else job.shape.layers  # what a model of one's own is made of is not known on paper
    return share(job, device.count).leaves * layers * _LAUNCH_LAYER_S + _LAUNCH_STEP_S


def is_launch_bound(job: Job, device: Device) -> bool:
    """Whether the device waits for its next kernel rather than for the work."""
    return launch_seconds(job, device) > _work_seconds(job, device)


def least_hours(job: Job, device: Device) -> float:
    """At the best MFU that could be hoped for."""
    best = _BEST_CPU_MFU if device.is_cpu else _BEST_GPU_MFU
    flops = total_flops(job) + recompute_flops(job) + reference_flops(job) * device.count
    return flops / (device.peak(job.dtype) * best) / 3600


def cpu_forward_seconds(job: Job, rates: Rates) -> float:
    """Of as many tokens as a step has: a third of training on them in full, without the optimizer."""
    plain = replace(job, lora=Lora(), recompute=False)
    whole = cpu_step_seconds(plain, rates) - plain.trained * plain.optimizer.moved_bytes / rates.bytes_per_s
    narrow = job.lora.r is not None and job.lora.base_dtype != "fp32"
    matrices = job.shape.layers * matmul_parameters_per_layer(job.shape)
    return whole / 3 + (8.0 * matrices * job.accumulation / rates.bytes_per_s if narrow else 0.0)


def cpu_step_seconds(job: Job, rates: Rates) -> float:
    """Matrix products, attention, everything that only moves numbers, and the optimizer."""
    shape, T = job.shape, job.row_tokens or job.seq_len
    tokens = job.batch_size * T
    forwards = 4 / 3 if job.recompute else 1.0
    passes = 6.0 if job.lora.r is None else 4.0  # frozen matrices get no gradient
    matrices = shape.layers * matmul_parameters_per_layer(shape)
    products = passes * tokens * (matrices * forwards + shape.vocab_size * shape.width)
    products += 0.0 if job.lora.r is None else 6.0 * tokens * job.trained * forwards
    attention = 12.0 * tokens * shape.layers * shape.width * T / 2 * forwards  # the causal half is what is computed
    moved = tokens * shape.layers * layer_bytes(shape, "fp32", True, job.segments, int(T)) * _LAYER_PASSES * forwards
    moved += tokens * shape.vocab_size * _LOGIT_BYTES_MOVED["whole" if job.whole_logits else "blocks"]
    moved += job.trained * job.optimizer.moved_bytes
    if job.lora.r is not None and job.lora.base_dtype != "fp32":  # each matrix is widened for each pass of each piece
        moved += 8.0 * matrices * job.accumulation * (3 if job.recompute else 2)
    return (
        (products + job.optimizer_flops) / (rates.gemm_flops * _GEMM_SHARE)
        + attention / (rates.gemm_flops * _ATTENTION_SHARE)
        + moved / rates.bytes_per_s
        + job.accumulation * shape.layers * _LAYER_S
    )


def as_hours(hours: float) -> str:
    """For arithmetic: 261.2 h, and of less than one as minutes or seconds."""
    return span(hours) if hours < 1 else f"{hours:,.2f} h" if hours < 100 else f"{hours:,.1f} h"


def span(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.2g} s"
    return f"{hours * 60:.0f} min" if hours < 2 else f"{hours:,.1f} h" if hours < 72 else f"{hours / 24:,.1f} days"
