"""A save beside the steps: the state copied into kept memory while the next step computes, and a write from there.

In:  the live tensors after a step, which only the optimizer changes; the write to do with their copy.
Out: a Flight: `copied` (the optimizer may go on), `done` (durable, or what went wrong).

The kept memory is as large as the checkpoint: `checkpoint_bytes` of config.OPTIMIZERS for each parameter. It is allocated at the first save and used again at each.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from lamplighter.report import Phase, Verdict
from lamplighter.rundir import human_bytes

WRITER_THREAD = "lamp-writer"
NICENESS = 5  # of the write; the copy is not: a step may be waiting for it
LEAST_SPARE = 2.0  # auto: so many times the copy must be free, so that the copy does not become the straw
Tensors = dict[str, torch.Tensor]


class Flight:
    """One save: of which step, how far it is, and what became of it."""

    def __init__(self, step: int, bytes: int, for_loop: bool) -> None:
        self.step, self.bytes, self.for_loop = step, bytes, for_loop
        self.started = time.monotonic()
        self.blocked_s = 0.0  # of the loop
        self.staged = False
        self.phase: Phase | None = None  # of the write: how far it is
        self.copied, self.done = threading.Event(), threading.Event()
        self.bad: Verdict | None = None  # its weights are not finite
        self.error: Exception | None = None  # it could not be written
        self.told = False

    @property
    def in_the_air(self) -> bool:
        return not self.done.is_set()


class Staging:
    """The kept copies of the weights and the optimizer's state, and the thread that fills them and writes from them."""

    def __init__(self) -> None:
        self.model: Tensors = {}
        self.optimizer: Tensors = {}
        self.side: torch.cuda.Stream | None = None
        self.sent: torch.cuda.Event | None = None

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for part in (self.model, self.optimizer) for tensor in part.values())

    def take(
        self,
        flight: Flight,
        model: Tensors,
        optimizer: Tensors,
        changing: set[str],
        write: Callable[[Tensors, Tensors], None],
    ) -> None:
        """Begin: what a forward pass may change (`changing`: buffers) is copied now, the rest beside the next step."""
        to_model, to_optimizer = _fit(self.model, model), _fit(self.optimizer, optimizer)
        pairs = [(model[name], to_model[name]) for name in model if name not in changing]
        pairs += [(optimizer[name], to_optimizer[name]) for name in optimizer]
        for name in changing:
            to_model[name].copy_(model[name])
        if any(tensor.is_cuda for tensor in model.values()):
            self._send(pairs)

        def work() -> None:
            try:
                self._copy(pairs)
                flight.copied.set()
                _step_back()
                write(to_model, to_optimizer)
            except Exception as error:  # noqa: BLE001  carried to the thread that asks, and raised there
                flight.error = error
            finally:
                flight.copied.set()
                flight.done.set()

        threading.Thread(target=work, name=WRITER_THREAD, daemon=True).start()

    def hold_back(self, flight: Flight) -> None:
        """Return when the weights may change: the copy is made (CPU), or comes first in the order of the GPU's work."""
        if self.sent is not None:
            torch.cuda.current_stream().wait_event(self.sent)
            return
        while not flight.copied.wait(1.0):
            pass

    def _send(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """On a GPU: copies to pinned memory, in order after the step that was made, on a stream beside the next one."""
        self.side = self.side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            self.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.sent.record(self.side)

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self.sent is not None:
            self.sent.synchronize()
            return
        for source, target in pairs:  # by one thread, without the GIL: the cores belong to the step
            np.copyto(_bytes_of(target), _bytes_of(source.detach().contiguous()))


def _fit(kept: Tensors, tensors: Tensors) -> Tensors:
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


def _step_back() -> None:
    """This thread takes what the step leaves of the cores; its disk priority follows (Linux: a thread has its own)."""
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):  # a sandbox that forbids it: a courtesy, not a need
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def choose(section: bool | str, need: int, left: int) -> tuple[bool, str]:
    """Whether to stage, and why, in words; `left` is the memory that can still be had."""
    costs = f"{human_bytes(need)} of memory are kept for the copy"
    if section is True:
        return True, f"saves are written beside the steps (save.staged): {costs}"
    if section is False:
        return False, "steps wait for each save (save.staged false)"
    if left >= LEAST_SPARE * need:
        return True, f"saves are written beside the steps: {costs}, {human_bytes(left)} are free"
    return False, (
        f"steps wait for each save: a copy of {human_bytes(need)} would be too much for the {human_bytes(left)}"
        " that are free (save.staged true insists)"
    )
