"""The batch on which a check inside a GPU kernel has failed, once more on the CPU, where the wrong index is named.

In:  a RunContext whose CUDA context is dead, and the batches that may have been in work.
Out: the error to tell of instead: which id, in which row, or the line of one's own model; None where the CPU has no complaint.

A kernel's assert says neither the index nor the line, and it is told late: with the loss read one step later, the batch before
the one at hand may be to blame. Nothing can be read from the card any more, so the model is built anew with first weights,
which do for an index.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable

import numpy as np
import torch

from lamplighter import device_faults, report
from lamplighter.data.batches import Batch
from lamplighter.errors import BadData
from lamplighter.model.build import Built, build
from lamplighter.procs import procfs
from lamplighter.procs.stacks import is_users
from lamplighter.train.gradients import batch_loss
from lamplighter.train.hardware import Machine
from lamplighter.train.state import RunContext

_DEADLINE_S = 60.0  # after that the process ends as it would have without this
_SPARE = 1.5  # times the weights must be free: activations of one row come on top


def explain_assert(context: RunContext, batches: Iterable[Batch]) -> BadData | None:
    """What the CPU says of these batches."""
    at_hand = list(batches)
    for batch in at_hand:
        if found := _wrong_id(batch, context.built):
            return found
    with report.phase("replay on the CPU", total=sum(len(batch.inputs) for batch in at_hand), unit="rows") as phase:
        if procfs.memory_left() < _SPARE * 4 * context.built.parameters:
            report.note("the batch is not tried on the CPU: the model does not fit into what memory is free")
            return None
        model = _model_on_cpu(context)
        cpu = Machine(torch.device("cpu"), torch.float32, context.machine.threads, "CPU", peak_flops=1.0, reasons=())
        until = time.monotonic() + _DEADLINE_S
        for batch in at_hand:
            for row in range(len(batch.inputs)):
                if time.monotonic() > until:
                    report.note(
                        f"the replay on the CPU was left after {_DEADLINE_S:.0f} s: no fault in the rows so far"
                    )
                    return None
                try:
                    with torch.no_grad():
                        batch_loss(model, batch, cpu, whole=context.run.train.loss == "whole", rows=slice(row, row + 1))
                except (IndexError, RuntimeError, ValueError) as error:
                    is_gpus = device_faults.from_text(str(error), type(error).__name__) is not None
                    return None if is_gpus else _told(error, batch, row)
                phase.tick()
    report.note(
        "the batch passes on the CPU, so no index is out of range there: the kernel or the card may be to blame"
    )
    return None


def _wrong_id(batch: Batch, built: Built) -> BadData | None:
    """A token beyond the vocabulary, or a row longer than the table of positions: seen without any model."""
    for name, ids in (("token", batch.inputs), ("target", batch.targets)):
        if ids.max(initial=-1) >= built.vocab_size:
            row, column = np.unravel_index(int(ids.argmax()), ids.shape)
            what = f"{name} id {ids[row, column]} at position {column} of row {row} is beyond the vocabulary of {built.vocab_size}"
            return _error(
                batch, int(row), what, "the tokenizer and the model do not belong together: lamp doctor looks at both"
            )
    if batch.inputs.shape[1] > built.positions > 0:
        what = f"a row has {batch.inputs.shape[1]} tokens, and the model {built.positions} positions"
        return _error(batch, 0, what, "a smaller data.seq_len")
    return None


def _told(error: Exception, batch: Batch, row: int) -> BadData:
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((one for one in reversed(frames) if is_users(one.filename)), frames[-1])
    what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}, at {frame.filename}:{frame.lineno} in {frame.name}"
    return _error(batch, row, what, "mend that line, or the row that it does not take")


def _error(batch: Batch, row: int, what: str, advice: str) -> BadData:
    sample = f"sample {batch.samples[row]}" if row < len(batch.samples) else f"row {row}"
    why = f"a check inside a GPU kernel failed; on the CPU the same batch says: {what} ({sample})"
    return BadData(f"step {batch.step} cannot be computed", why, advice)


def _model_on_cpu(context: RunContext) -> torch.nn.Module:
    run, tokenizer = context.run, context.tokenizer
    sizes = (tokenizer.vocab_size, run.data.seq_len, tokenizer.end_of_text, run.train.seed)
    return build(run.model, *sizes, lora=run.lora).model.train()
