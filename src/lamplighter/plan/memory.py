"""Bytes at the worst moment of a step: weights, gradients, optimizer, activations, logits, and what a save stages. No torch.

In:  a Job, a Device.
Out: a Memory, part by part; its peak, and the least that is sure.

What one layer keeps of one token for the backward pass, as this package's own transformer does it (C width, M width of the
MLP, H heads, T length; counted with torch's hooks, see tests/unit/test_plan_memory.py): gpt2 8C + 2M numbers, llama 10C + 4M, qwen3 4C more; bf16
keeps the residual stream in fp32. With train.recompute a layer keeps its input alone, and one layer at a time is whole.
Logits as a whole: 12 bytes a number (log-softmax, its gradient, the gradient of the logits; in fp32 also under bf16). In blocks
(train.loss, model/chunked_loss.py): one block, and the gradients of the head, which are ready before the backward pass. Gradients and
activations are not at their largest together, unless gradients of an earlier micro-batch are being added up. The tree that sums
them (train.tree, train/gradients.py) holds one more set of gradients for each of its levels.

On several devices: replicated, each holds all of this, and for the reduction a few more sets of gradients (plan/ranks.py).
Sharded, each holds its part of weights, gradients and optimizer, and gathered for a while the embedding and head, the block that is
computed and the one after it; 16-bit copies of all weights are kept for the backward pass unless blocks are computed again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lamplighter.config import GRADIENT_BYTES, WEIGHT_BYTES
from lamplighter.gpus import Device
from lamplighter.model.shape import (
    BLOCK_ATTENTION_TOKENS,
    BLOCK_QUERIES,
    Shape,
    block_linears,
    block_parameters,
    block_rows,
    keeps_probabilities,
    matmul_parameters_per_layer,
)
from lamplighter.plan.job import Job
from lamplighter.plan.ranks import kept_sets, kept_sums, reduction_sets, rows_of_nodes

GIB = 1 << 30
_GPU_OWN_GIB = 0.8  # context, kernels and the allocator's spare
_GAP_BYTES = 32 << 20  # glibc's largest threshold for memory of its own (M_MMAP_THRESHOLD)
_HOST_OWN_GIB = 0.30  # Python and torch
_HOLES = {
    "gpt2": 1.22,
    "llama": 1.42,
    "qwen3": 1.42,
}  # on a CPU the allocator keeps holes between what lives: activations and logits
LOGIT_BYTES = 12


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the worst moment; `staging` is host memory."""

    weights: int
    gradients: int
    optimizer: int
    cast: int  # bf16 copies of the weights during a step
    activations: int
    layer: int  # with recompute: the one layer that is whole
    logits: int  # what they would take as a whole
    held: int  # what is there of them at once, with the gradients that are worked out beside
    own: int
    embedding: int  # the gradient of the embedding stands beside the sum for a moment
    gradients_meanwhile: bool
    staging: int
    staging_here: bool  # on a CPU the copy lies in the same memory
    holes: float = 1.0
    sums: int = 0  # gradients of earlier micro-batches, in the tree that adds them up
    reduction: int = 0  # sets of gradients while ranks add them up: in place of activations
    buffers: int = 0  # of the reduction, where they stay from step to step
    gathered: int = 0  # sharded: whole weights of a few units, and the gradients of one on their way
    loading: int = 0  # while it is opened: other families are wide before their frozen matrices are narrowed

    @property
    def fixed(self) -> int:
        here = self.staging if self.staging_here else 0
        return self.weights + self.optimizer + self.cast + self.sums + self.buffers + self.gathered + self.own + here

    def _peak(self, holes: float) -> int:
        """Gradients grow while activations shrink; only earlier micro-batches leave theirs lying about.

        An allocator with holes also keeps what was freed: the place of the last step's gradients and of the layer that was
        whole is still taken when the logits come, unless activations have moved in.
        """
        kept = self.gradients if self.gradients_meanwhile else 0
        left = max(kept, self.gradients - self.activations) + 4 * self.layer if holes > 1 else kept
        at_logits = int(holes * (self.activations + self.held)) + left
        at_last_layer = int(holes * (self.activations + self.layer)) + kept
        at_end = self.gradients + self.embedding + int(holes * self.layer)
        # activations and 16-bit copies are gone; sums and buffers are part of it
        at_reduction = self.reduction - self.sums - self.buffers - self.cast
        return self.fixed + max(at_logits, at_last_layer, at_end, at_reduction)

    @property
    def peak(self) -> int:
        return max(self._peak(self.holes), self.loading)

    @property
    def training(self) -> int:
        """The peak of the steps alone, without a save beside them."""
        return self.peak - (self.staging if self.staging_here else 0)

    @property
    def least(self) -> int:
        """What is sure: no holes, no copy for a save, nothing for Python and torch."""
        return self._peak(1.0) - self.own - (self.staging if self.staging_here else 0)

    @property
    def peak_gib(self) -> float:
        return self.peak / GIB


def layer_bytes(shape: Shape, dtype: str, on_cpu: bool = True, segments: bool = False, seq_len: int = 0) -> int:
    """What one layer keeps of one token for the backward pass, without copies of the weights."""
    C, M, H, T = shape.width, shape.mlp_width, shape.heads, seq_len
    number = 4 if dtype == "fp32" else 2
    by_blocks = on_cpu and dtype == "bf16" and not shape.dropout and T <= BLOCK_ATTENTION_TOKENS  # model/cpu.py
    if shape.family == "gpt2":
        kept = 32 * C + 8 * M if dtype == "fp32" else 20 * C + 4 * M
        noise = 2 * C  # after attention and after the MLP
    else:
        kept = 40 * C + 16 * M if dtype == "fp32" else 34 * C + 8 * M
        noise = 0
    if shape.family == "qwen3":  # what is normalised and what comes of it, of queries and keys
        normed = C + shape.kv_heads * shape.head_width
        kept += (8 * normed if dtype == "fp32" else 6 * normed - 8 * C) + 4 * (H + shape.kv_heads)
    kept += 16  # norms
    if not by_blocks:
        kept += 4 * H  # the sums of attention
    elif keeps_probabilities(T, shape.head_width, number):
        kept += number * H * min(T, (T + BLOCK_QUERIES) // 2)
    if shape.dropout > 0:
        kept += noise * (number if on_cpu else 1)
        if on_cpu:  # no fused kernel drops out on a CPU: scores, noise and their product are kept, in fp32
            kept += 12 * H * T + (6 * C if dtype == "bf16" else 0)
    elif segments and not by_blocks:
        kept += number * T  # the mask as numbers
    return kept


def memory(job: Job, device: Device) -> Memory:
    """Bytes on one device: of the whole model or its part of it, and its own micro-batch."""
    shape, on_cpu = job.shape, device.is_cpu
    parts = device.count if job.sharded else 1
    gradients = GRADIENT_BYTES * job.trained
    tokens = job.micro_batch * job.seq_len
    each = 0 if job.own_params else tokens * layer_bytes(shape, job.dtype, on_cpu, job.segments, job.seq_len)
    copies = 2 * matmul_parameters_per_layer(shape) if job.dtype != "fp32" else 0
    ends = tokens * shape.width * (8 if shape.family == "gpt2" else 12)  # the last norm, its input and its output
    if shape.dropout > 0 and shape.family == "gpt2":
        ends += tokens * shape.width * (4 if on_cpu else 1)
    kept = shape.layers * (tokens * shape.width * 4 if job.recompute else each)
    head = 2 * shape.vocab_size * shape.width if job.dtype != "fp32" else 0
    if job.lora.r is not None and job.lora.base_dtype != "fp32":
        copies = 0  # widened or narrowed for each product, and not kept
        loading = WEIGHT_BYTES * job.params if job.counted_params else 0  # ours are narrowed as they are read
    else:
        loading = 0
    if job.sharded and on_cpu:
        loading = max(loading, job.weight_bytes)  # every rank builds it whole before it keeps its part
    own = int((_HOST_OWN_GIB if on_cpu else _GPU_OWN_GIB) * GIB)
    widened = _widened(job, on_cpu)
    cast = head + widened + (0 if job.recompute else shape.layers * copies)
    return Memory(
        weights=job.weight_bytes // parts,
        gradients=gradients // (1 if job.accumulation > job.nodes else parts),  # whole while several leaves are added
        optimizer=job.optimizer.state(job.trained, job.hidden) // parts,
        cast=cast,
        activations=0 if job.own_params else kept + ends,
        layer=each + copies if job.recompute else 0,
        logits=tokens * shape.vocab_size * LOGIT_BYTES,
        held=_held_logits(job, on_cpu),
        own=own,
        embedding=4 * shape.vocab_size * shape.width if job.lora.r is None else 0,
        gradients_meanwhile=job.accumulation > job.nodes,
        sums=_sharded_sums(job, parts, gradients) if job.sharded else gradients * kept_sums(job, device.count),
        reduction=3 * gradients // parts if job.sharded else int(gradients * reduction_sets(job, device.count)),
        buffers=int(gradients * kept_sets(job, device.count)) if on_cpu and not job.sharded else 0,
        gathered=_gathered(job) if job.sharded else 0,
        staging=job.optimizer.checkpoint(job.trained, job.hidden) // parts,
        staging_here=on_cpu,
        holes=_HOLES[shape.family] if on_cpu else 1.0,
        loading=loading + own if loading and on_cpu else 0,
    )


def _widened(job: Job, on_cpu: bool) -> int:
    """Of a frozen base that is narrower than fp32 arithmetic: a matrix in fp32 and its product, for as long as they are needed.

    On a CPU the C library takes what is under 32 MiB from the place between the activations, where the gaps stay: as if every
    layer kept its own.
    """
    if job.lora.r is None or job.lora.base_dtype == "fp32" or job.dtype != "fp32":
        return 0
    sizes = [WEIGHT_BYTES * rows * columns for rows, columns in block_linears(job.shape).values()]
    gaps = sum(size for size in sizes if size <= _GAP_BYTES) if on_cpu else 0
    return job.shape.layers * gaps + 2 * max(sizes)


def _sharded_sums(job: Job, parts: int, gradients: int) -> int:
    """One of a rank's rows for each level of the tree above a row of base nodes."""
    return (rows_of_nodes(job, parts) - 1).bit_length() * gradients // parts


def _gathered(job: Job) -> int:
    """Whole at once: what is outside the blocks, two blocks, and twice the gradients of the largest unit on their way."""
    if job.own_params:  # what it is made of is not known on paper
        return job.weight_bytes + 2 * GRADIENT_BYTES * job.trained
    share = job.weight_bytes / job.params  # a frozen base may be narrower
    block = block_parameters(job.shape)
    ends = max(0, job.params - job.shape.layers * block)
    flying = GRADIENT_BYTES * job.trained / job.params * max(block, ends)
    return int(share * (ends + 2 * block) + 2 * flying)


def _held_logits(job: Job, on_cpu: bool) -> int:
    """One block of logits with the gradients of the head, or all of them."""
    shape, tokens = job.shape, job.micro_batch * job.seq_len
    if job.whole_logits:
        return tokens * shape.vocab_size * LOGIT_BYTES
    rows = min(tokens, block_rows(shape.vocab_size, "cpu" if on_cpu else "cuda"))
    number = 4 if job.dtype == "fp32" else 6
    head = shape.vocab_size if job.lora.r is None else 0  # a frozen one has no gradient
    return rows * shape.vocab_size * number + 4 * shape.width * (head + tokens)


def host_gib(job: Job, device: Device) -> float:
    """Memory of the machine around its GPUs: the copy that a save stages (rank 0's, or a part on each), and Python for each rank.
    Mapped text is the kernel's to drop.
    """
    if device.is_cpu:
        return memory(job, device).peak_gib
    return job.optimizer.checkpoint(job.trained, job.hidden) / GIB + _HOST_OWN_GIB * 4 * math.ceil(
        device.count / device.nodes
    )
