"""The way that the arithmetic of a run takes, in one sentence: precision, compiled or not, kernels, order of sums.

In:  a RunContext; what was fallen back from.
Out: an event, shown in the status and the report.
"""

from __future__ import annotations

import math

from lamplighter import report
from lamplighter.model.transformer import Transformer
from lamplighter.train import hardware
from lamplighter.train.state import RunContext


def say_path(context: RunContext, compiled: bool, fell_back: str = "") -> None:
    """The way that the arithmetic takes, in the status and the report; with what it has fallen back from."""
    run, machine, model = context.run, context.machine, context.model
    packed = bool(context.data.fingerprint) and not context.data.whole_batches
    if packed and isinstance(model, Transformer) and machine.has_varlen(model.shape):
        kernel = "torch's variable-length kernel"
    else:
        dropout, ours = run.model.dropout or 0.0, isinstance(model, Transformer)
        kernel = hardware.attention_kernel(machine, compiled, run.data.seq_len, dropout, ours)
    scaled = " with a loss scale" if context.loss_scale is not None else ""
    parts = [f"{machine.dtype_name}{scaled}", "compiled" if compiled else "not compiled", f"attention by {kernel}"]
    own = machine.newton_schulz
    parts.append(f"fused {run.train.optimizer}" + (f" (Newton-Schulz in {hardware.DTYPE_NAMES[own]})" if own else ""))
    leaves = math.ceil(run.train.batch_size / (run.train.micro_batch or run.train.batch_size))
    if leaves > 1:
        how = f"a tree of {min(leaves, run.train.tree)}" if run.train.tree > 1 else "one after another"
        parts.append(
            f"{leaves} micro-batches summed by {how}" if run.train.tree > 1 else f"{leaves} micro-batches {how}"
        )
    if machine.device.type == "cuda":
        parts.append("exact kernels" if machine.exact else "fastest kernels")
    text = ", ".join(parts) + (f"; fallen back {fell_back}" if fell_back else "")
    report.event("path", text=text)
