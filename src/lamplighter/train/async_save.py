"""Asynchronous saves: the state is copied into kept memory while the next step computes, and written to disk from that copy.

In:  the live tensors after a step, which only the optimizer changes; the write to do with their copy.
Out: a PendingSave: `copied` (the optimizer may change the weights again), `done` (durable, or what went wrong).

How one save goes. Between two optimizer updates the weights are constant, so they can be read while the next step
runs its forward and backward pass:

    loop thread     update 7 | begin(save of 7) | forward, backward of 8 | wait_for_copy | update 8 | ...
    writer thread                | copy ................................ | copied.set() | write, fsync, rename | done.set()

On a CPU the writer thread copies. On a GPU the copy is queued on a CUDA stream of its own, and `wait_for_copy` makes the
compute stream wait for it, so that the CPU is never blocked; where the copy's memory cannot be pinned, the writer thread copies
there too. Buffers are different: a forward pass may change them (a
running mean), so they are copied at once, before the next step begins.

The copy is as large as a checkpoint (`checkpoint` of config.OPTIMIZERS), in one piece. It is allocated
at the first save and used again for each; there is only ever one save at a time (checkpointer.py). Where the parent keeps
memory for it (memory_copy.py) there are two, which outlive this process; then steps between the saves are copied too, as
often as that costs next to nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from lamplighter import report
from lamplighter.report import Phase, Verdict
from lamplighter.rundir import human_bytes
from lamplighter.train.memory_copy import MemoryCopy

_WRITER_THREAD = "lamp-writer"
_NICENESS = 5  # of the write. The copy keeps its full priority: a step may be waiting for it
_LEAST_SPARE = 2.0  # auto: this many times the copy must be free, so that it is not the copy that exhausts the memory
_ALIGNED = 64  # bytes
_LOOK_S = 0.05
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


class _Buffer:
    """Memory for one copy, and a place in it for each tensor."""

    def __init__(self, shared: MemoryCopy | None = None) -> None:
        self.shared = shared
        self.memory = torch.empty(0, dtype=torch.uint8)  # all of it, in one piece
        self.layout: list[tuple[torch.Size, torch.dtype]] = []
        self.starts: list[int] = []
        self.pinned = False
        self.model: Tensors = {}
        self.optimizer: Tensors = {}
        self.step = 0  # whose copy is in it and whole
        self.in_use = False  # it is being filled, or a save is written from it

    def fit(self, model: Tensors, optimizer: Tensors) -> None:
        """A place for each of these tensors; the memory is taken anew only where their shapes are others."""
        live = [*model.values(), *optimizer.values()]
        layout = [(tensor.shape, tensor.dtype) for tensor in live]
        if layout != self.layout:
            self.starts = list(accumulate((-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in live), initial=0))
            if self.pinned:
                torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())  # type: ignore[no-untyped-call]
            self.memory = self._take(self.starts[-1])
            self.pinned = any(tensor.is_cuda for tensor in live) and _pin(self.memory)
            views = [
                self.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                for start, tensor in zip(self.starts, live, strict=False)
            ]
            self.layout = layout
        else:
            views = [*self.model.values(), *self.optimizer.values()]
        self.model = dict(zip(model, views, strict=False))
        self.optimizer = dict(zip(optimizer, views[len(model) :], strict=True))
        self.step = 0
        if self.shared is not None:
            self.shared.invalidate()

    def _take(self, count: int) -> torch.Tensor:
        if self.shared is not None:
            try:
                return self.shared.resize(count)
            except OSError as error:
                report.note(f"the state is not kept in memory that outlives this process: {error.strerror}")
                self.shared = None
        return torch.empty(count, dtype=torch.uint8)

    def publish(self, step: int, about: Mapping[str, Any]) -> None:
        """The copy is whole."""
        self.step = step
        if self.shared is None:
            return
        names = [*(("model", name) for name in self.model), *(("optimizer", name) for name in self.optimizer)]
        table = [
            [part, name, str(dtype).removeprefix("torch."), list(shape), start]
            for (part, name), (shape, dtype), start in zip(names, self.layout, self.starts, strict=False)
        ]
        self.shared.publish(step, self.memory, {**about, "tensors": table})
        report.number(memory_step=step)


class AsyncSaver:
    """The kept copies of the weights and the optimizer's state, and the thread that fills them and writes from them."""

    def __init__(self, shared: list[MemoryCopy] | None = None) -> None:
        self.buffers = [_Buffer(one) for one in shared] if shared else [_Buffer()]
        self.pinned = False
        self.copy_stream: torch.cuda.Stream | None = None
        self.copy_queued: torch.cuda.Event | None = None
        self.copy_s = 0.0  # what the last copy has cost

    @property
    def bytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self.buffers)

    @property
    def outlives(self) -> bool:
        """Whether a copy is still there when this process is gone."""
        return len(self.buffers) > 1 and all(buffer.shared is not None for buffer in self.buffers)

    def free(self) -> _Buffer | None:
        """The one to copy to: not that which a save is written from, and of two the older."""
        return min((one for one in self.buffers if not one.in_use), key=lambda one: one.step, default=None)

    def begin(
        self,
        save: PendingSave,
        model: Tensors,
        optimizer: Tensors,
        buffers: set[str],
        write: Callable[[Tensors, Tensors], None] | None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy the buffers now and the rest beside the next step; then call `write` with the copies, in a thread.

        Without a `write` the copy is all.
        """
        buffer = self.free()
        assert buffer is not None, "one save at a time"
        buffer.in_use = True
        buffer.fit(model, optimizer)
        self.pinned = buffer.pinned
        to_model, to_optimizer = dict(buffer.model), dict(buffer.optimizer)
        pairs = [(model[name], to_model[name]) for name in model if name not in buffers]
        pairs += [(optimizer[name], to_optimizer[name]) for name in optimizer]
        for name in buffers:
            to_model[name].copy_(model[name])
        self.copy_queued = None
        on_gpu = any(tensor.is_cuda for tensor in model.values())
        if on_gpu:
            self._queue_copy(pairs if self.pinned else [])
        clock = time.monotonic if on_gpu else time.thread_time

        def work() -> None:
            try:
                began = clock()
                self._copy(pairs)
                save.copied.set()
                buffer.publish(save.step, about or {})
                self.copy_s = clock() - began
                if write is not None:
                    _lower_priority()
                    write(to_model, to_optimizer)
            except BaseException as error:  # noqa: BLE001  carried to the thread that asks, and raised there
                save.error = error
            finally:
                buffer.in_use = False
                save.copied.set()
                save.done.set()

        threading.Thread(target=work, name=_WRITER_THREAD, daemon=True).start()

    def forget(self) -> None:
        """The run goes back to an older step."""
        for buffer in self.buffers:
            buffer.step = 0
            if buffer.shared is not None:
                buffer.shared.invalidate()

    def wait_for_copy(self, save: PendingSave) -> None:
        """Return when the weights may change: the copy is made (CPU), or comes first in the order of the GPU's work."""
        if self.copy_queued is not None and self.pinned:
            torch.cuda.current_stream().wait_event(self.copy_queued)
            return
        while not save.copied.wait(1.0):
            pass

    def _queue_copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """On a GPU: copies to pinned memory, in order after the last update, on a stream beside the next step.

        Without any, the stream only knows what it comes after: to memory that is not pinned the writer thread copies.
        """
        self.copy_stream = self.copy_stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copy_stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            self.copy_queued = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copy_queued.record(self.copy_stream)

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self.copy_queued is not None and self.pinned:
            self.copy_queued.synchronize()
            return
        if self.copy_stream is not None:
            with torch.cuda.stream(self.copy_stream):
                for source, target in pairs:
                    target.copy_(source)
            return
        for source, target in pairs:  # by one thread, without the GIL: the cores belong to the step
            np.copyto(_bytes_of(target), _bytes_of(source.detach().contiguous()))


def _pin(memory: torch.Tensor) -> bool:
    """Page-locked where it is, so that a GPU can write to it by itself. torch's own pinned memory is rounded up to a power of
    two: 2.1 GB for a copy of 1.3. False where the system refuses (a limit on locked memory, too little of it).
    """
    failed = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]
    if failed:
        report.note(f"the copy for saves is not in pinned memory (CUDA error {failed}): it takes a little longer")
    return not failed


class LastUpdate:
    """How far a GPU is: whether it has made the last update of the weights. On a CPU it always has."""

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        self.device = device

    def queued(self) -> None:
        """Called after the kernels of an update."""
        if self.device.type == "cuda":
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()

    def is_made(self, within_s: float) -> bool:
        """Looked at without a wait that could not be left."""
        until = time.monotonic() + within_s
        while self.event is not None and not self.event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK_S)
        return True

    @contextlib.contextmanager
    def read_beside(self) -> Iterator[None]:
        """The weights after the last update, read on a stream of its own: what is queued behind it is not waited for."""
        if self.event is None:
            yield
            return
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_event(self.event)
        with torch.cuda.stream(stream):
            yield


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


def outlives(section: bool | str, need: int, left: int) -> tuple[bool, str]:
    """Whether the state is kept in memory that outlives the process, in two copies, and why, in words."""
    costs = f"{human_bytes(2 * need)} of memory"
    if section is False:
        return False, ""
    if section is True or left >= _LEAST_SPARE * 2 * need:
        return True, f"the newest step is kept in {costs} that outlive the process: a killed one goes on from there"
    return False, (
        f"the newest step is not kept in memory: two copies take {costs}, and {human_bytes(left)} are free"
        " (save.memory true insists)"
    )
