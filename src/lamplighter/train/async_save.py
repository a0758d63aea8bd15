"""Asynchronous saves: the state is copied into kept memory while the next step computes, and written to disk from that copy.

In:  the live tensors after a step, which only the optimizer changes; the write to do with their copy.
Out: a PendingSave: `copied` (the optimizer may change the weights again), `done` (durable, or what went wrong).

How one save goes. Between two optimizer updates the weights are constant, so they can be read while the next step
runs its forward and backward pass:

    loop thread     update 7 | begin(save of 7) | forward, backward of 8 | wait_for_copy | update 8 | ...
    writer thread                | copy ................................ | copied.set() | write, fsync, rename | done.set()

On a CPU the writer thread copies. On a GPU the copy is queued on a CUDA stream of its own, and `wait_for_copy` makes the
compute stream wait for it, so that the CPU is never blocked. Buffers are different: a forward pass may change them (a
running mean), so they are copied at once, before the next step begins.

The copy is as large as a checkpoint (`checkpoint_bytes` of config.OPTIMIZERS for each parameter). It is allocated at the
first save and used again for each; there is only ever one save at a time (checkpointer.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from lamplighter.report import Phase, Verdict
from lamplighter.rundir import human_bytes

_WRITER_THREAD = "lamp-writer"
_NICENESS = 5  # of the write. The copy keeps its full priority: a step may be waiting for it
_LEAST_SPARE = 2.0  # auto: this many times the copy must be free, so that it is not the copy that exhausts the memory
Tensors = dict[str, torch.Tensor]


@dataclass
class PendingSave:
    """One save: of which step, how far it is, and what became of it."""

    step: int
    bytes: int
    for_loop: bool  # the loop began it, and must hear of a failure
    started: float = field(default_factory=time.monotonic)
    blocked_s: float = 0.0  # how long the loop waited for it
    is_async: bool = False
    phase: Phase | None = None  # of the write: how far it is
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    bad: Verdict | None = None  # its weights are not finite
    error: BaseException | None = None  # it could not be written
    reported: bool = False

    @property
    def in_progress(self) -> bool:
        return not self.done.is_set()


class AsyncSaver:
    """The kept copies of the weights and the optimizer's state, and the thread that fills them and writes from them."""

    def __init__(self) -> None:
        self.model: Tensors = {}
        self.optimizer: Tensors = {}
        self.copy_stream: torch.cuda.Stream | None = None
        self.copy_queued: torch.cuda.Event | None = None

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for part in (self.model, self.optimizer) for tensor in part.values())

    def begin(
        self,
        save: PendingSave,
        model: Tensors,
        optimizer: Tensors,
        buffers: set[str],
        write: Callable[[Tensors, Tensors], None],
    ) -> None:
        """Copy the buffers now and the rest beside the next step; then call `write` with the copies, in a thread."""
        to_model, to_optimizer = _allocate(self.model, model), _allocate(self.optimizer, optimizer)
        pairs = [(model[name], to_model[name]) for name in model if name not in buffers]
        pairs += [(optimizer[name], to_optimizer[name]) for name in optimizer]
        for name in buffers:
            to_model[name].copy_(model[name])
        if any(tensor.is_cuda for tensor in model.values()):
            self._queue_copy(pairs)

        def work() -> None:
            try:
                self._copy(pairs)
                save.copied.set()
                _lower_priority()
                write(to_model, to_optimizer)
            except BaseException as error:  # noqa: BLE001  carried to the thread that asks, and raised there
                save.error = error
            finally:
                save.copied.set()
                save.done.set()

        threading.Thread(target=work, name=_WRITER_THREAD, daemon=True).start()

    def wait_for_copy(self, save: PendingSave) -> None:
        """Return when the weights may change: the copy is made (CPU), or comes first in the order of the GPU's work."""
        if self.copy_queued is not None:
            torch.cuda.current_stream().wait_event(self.copy_queued)
            return
        while not save.copied.wait(1.0):
            pass

    def _queue_copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """On a GPU: copies to pinned memory, in order after the last update, on a stream beside the next step."""
        self.copy_stream = self.copy_stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copy_stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            self.copy_queued = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copy_queued.record(self.copy_stream)

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self.copy_queued is not None:
            self.copy_queued.synchronize()
            return
        for source, target in pairs:  # by one thread, without the GIL: the cores belong to the step
            np.copyto(_bytes_of(target), _bytes_of(source.detach().contiguous()))


def _allocate(kept: Tensors, tensors: Tensors) -> Tensors:
    """A kept tensor for each of these; a new one only where there is none of its shape."""
    for name, tensor in tensors.items():
        have = kept.get(name)
        if have is None or have.shape != tensor.shape or have.dtype != tensor.dtype:
            kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return {name: kept[name] for name in tensors}


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous tensor of any dtype."""
    found: np.ndarray = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


def _lower_priority() -> None:
    """The writer takes what the step leaves of the cores; its disk priority follows (on Linux a thread has its own)."""
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):  # a sandbox that forbids it: a courtesy, not a need
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def choose(section: bool | str, need: int, left: int) -> tuple[bool, str]:
    """Whether to save asynchronously, and why, in words; `left` is the memory that can still be had."""
    costs = f"{human_bytes(need)} of memory are kept for the copy"
    if section is True:
        return True, f"saves are written beside the steps (save.staged): {costs}"
    if section is False:
        return False, "steps wait for each save (save.staged false)"
    if left >= _LEAST_SPARE * need:
        return True, f"saves are written beside the steps: {costs}, {human_bytes(left)} are free"
    return False, (
        f"steps wait for each save: a copy of {human_bytes(need)} would be too much for the {human_bytes(left)}"
        " that are free (save.staged true insists)"
    )
