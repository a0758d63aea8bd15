"""Makes steps durable: for the loop, for a request, or for a stop while the loop is busy in a long call.

In:  the parts of a run; which step is due.
Out: checkpoints, written beside the steps (staging) or while they wait; the durable step; what went wrong, told to the loop.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

from lamplighter import report
from lamplighter.data.batches import BatchStream
from lamplighter.data.stream import ChunkStream
from lamplighter.errors import STOPPED_EARLY, CannotWrite, LampError
from lamplighter.model.transformer import stored_tensors, weights
from lamplighter.procs import procfs
from lamplighter.train import async_save, checkpoint, guard
from lamplighter.train.async_save import Flight, Staging, Tensors
from lamplighter.train.checkpoint import Contents, Progress
from lamplighter.train.state import Parts

STOP_PATIENCE_S = 1.0  # how long a stop waits for the step to end by itself before it saves from beside it
LOOK_S = 0.1
LONG_WAIT_S = 1.0  # a wait for the save before that is worth a word


class Keeper:
    """One save at a time. The second one waits for the first: a step that is due is saved, never passed over.

    State is constant outside `changing`, so another thread may save the last completed step whenever it holds the lock.
    Nobody waits for a write with the lock in hand: the write needs it at its end.
    """

    def __init__(self, parts: Parts, stream: BatchStream | ChunkStream) -> None:
        self.parts, self.stream = parts, stream
        self.lock = threading.RLock()
        self.durable = parts.progress.step
        self.protect = {parts.progress.step} if parts.progress.step else set[int]()
        self.saved_at = time.monotonic()
        self.save_s = 0.0
        self.stopped = threading.Event()
        self.in_step = False  # weights are neither before nor after
        self.staging: Staging | None = None
        self.chosen = False
        self.flight: Flight | None = None
        self.best: Progress | None = None  # to be marked when it is durable
        self.saving, self.counting = 0, threading.Lock()  # threads that save or wait to
        self.said_slow = False

    def due(self, step: int) -> bool:
        """By steps, by time since the last one was durable, and at the end."""
        section = self.parts.run.save
        by_steps = section.every_steps > 0 and step % section.every_steps == 0
        resting = self.flight is None or not self.flight.in_the_air
        by_time = section.every_s > 0 and resting and time.monotonic() - self.saved_at >= section.every_s
        return by_steps or by_time or step == self.parts.steps

    # ---------------------------------------------------------------- for the loop

    def begin(self, for_loop: bool = True) -> Flight | None:
        """Start to make the last completed step durable, and let the steps go on; None if it is durable already."""
        started, going = time.monotonic(), self.flight
        if going is not None and going.in_the_air and going.step == self.parts.progress.step:
            going.for_loop |= for_loop
            return going
        with self._saving(), self.alone() as waited_s:
            flight = None if self._untold() else self._new_flight(for_loop)
            if flight is None:
                return None
            self._say_slow(waited_s)
            if self._staged(flight):
                self._take_off(flight)
            else:
                self._write_now(flight)
            flight.blocked_s += time.monotonic() - started if for_loop else 0.0
            return flight

    def save(self) -> report.Verdict | None:
        """Make the last completed step durable before anything else; a verdict if its weights are not finite."""
        with self._saving(), self.alone():
            before = self._untold()
            if before is not None:
                before.told = True
                if before.bad:
                    return before.bad
            flight = self._new_flight(for_loop=True)
            if flight is None:
                return None
            self._write_now(flight)
            flight.told = True
            if flight.error:
                raise flight.error
            if before is not None and before.error:
                report.warn(f"the save of step {before.step} failed ({before.error}); step {flight.step} is saved now")
            return flight.bad

    def trouble(self, wait: bool = False) -> Flight | None:
        """The save that was begun, if it is known by now that its weights are not finite; raises what stopped it."""
        if wait:
            self.wait()
        flight = self._untold()
        if flight is None:
            return None
        flight.told = True
        if flight.error:
            raise flight.error
        return flight

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """The one place where weights change; what is left of a copy comes first. Left by an error, they are neither."""
        with self.lock:
            if self.flight is not None and self.staging is not None and not self.flight.copied.is_set():
                started = time.monotonic()
                with report.span("save"):
                    self.staging.hold_back(self.flight)
                self.flight.blocked_s += time.monotonic() - started
            self.in_step = True
            yield
            self.in_step = False

    def keep_best(self) -> None:
        """This step has the best score: save it, and mark it as soon as it is durable."""
        with self.lock:
            self.best = self.parts.progress
        self.begin()
        with self.lock:
            self._mark_best()

    def went_back(self) -> None:
        """The newest step is an older one again."""
        self.durable = self.parts.progress.step
        self.protect = {self.durable}
        self.best = None
        report.number(step=self.durable, durable_step=self.durable)

    def wait(self) -> None:
        """Until the save under way is over, however it ends."""
        flight = self.flight
        if flight is None or not flight.in_the_air:
            return
        with report.phase("save", total=flight.bytes, unit="B") as phase:
            while not flight.done.wait(LOOK_S):
                its = flight.phase
                if its is not None and (its.done, its.item) != (phase.done, phase.item):
                    phase.set(its.done, its.item)

    @contextlib.contextmanager
    def alone(self) -> Iterator[float]:
        """The lock, with no save under way; gives the seconds that this took."""
        started = time.monotonic()
        while True:
            self.wait()
            with self.lock:
                if self.flight is None or not self.flight.in_the_air:
                    yield time.monotonic() - started
                    return

    # ---------------------------------------------------------------- for others

    def stop(self) -> None:
        """Asked to stop: let the loop do it; if it is busy for longer, save from here and leave."""
        if self.stopped.wait(STOP_PATIENCE_S):
            return
        with self._saving(), self.alone():
            if self.stopped.is_set():
                return
            try:
                bad = self.save()
            except LampError as error:
                report.last_words(error.lines(), error.code)
                report.leave(CannotWrite.code)
                return
            if bad:
                report.verdict(bad)
            report.leave(STOPPED_EARLY)

    def save_for_others(self) -> None:
        """Asked to save, in a thread of its own: what goes wrong is said, and the loop goes on."""
        flight = self.begin(for_loop=False)
        if flight is None:
            return
        flight.done.wait()
        if flight.for_loop:  # it was under way already, and the loop hears of it
            return
        if isinstance(flight.error, LampError):
            report.last_words(flight.error.lines(), flight.error.code)
        elif flight.error:
            raise flight.error
        if flight.bad:
            report.verdict(flight.bad)

    # ---------------------------------------------------------------- one save

    def _untold(self) -> Flight | None:
        """A save of the loop's that went wrong, and the loop does not know it yet."""
        flight = self.flight
        if flight is None or flight.in_the_air or flight.told or not flight.for_loop:
            return None
        return flight if flight.bad or flight.error else None

    def _new_flight(self, for_loop: bool) -> Flight | None:
        step = self.parts.progress.step
        if step in (self.durable, 0):
            return None
        if self.in_step:
            report.warn("the optimizer was interrupted in the middle of a step: its half-changed weights are not saved")
            return None
        tensors = [*stored_tensors(self.parts.model).values(), *self.parts.optimizer.state_tensors().values()]
        return Flight(step, sum(tensor.nbytes for tensor in tensors), for_loop)

    def _staged(self, flight: Flight) -> bool:
        """Decided at the first save, when a step has shown what it needs."""
        if not self.chosen:
            self.chosen = True
            wanted, why = async_save.choose(self.parts.run.save.staged, flight.bytes, procfs.memory_left())
            self.staging = Staging() if wanted else None
            report.note(why)
        return self.staging is not None

    def _take_off(self, flight: Flight) -> None:
        """Copy and write beside the steps."""
        assert self.staging is not None
        flight.staged = True
        model, progress = stored_tensors(self.parts.model), self._progress()
        buffers = model.keys() - {name for name, _ in self.parts.model.named_parameters()}

        def write(kept_model: Tensors, kept_optimizer: Tensors) -> None:
            with self._saving():
                self._write(flight, progress, self._contents(kept_model, kept_optimizer))

        self.flight = flight
        self.staging.take(flight, model, self.parts.optimizer.state_tensors(), set(buffers), write)

    def _write_now(self, flight: Flight) -> None:
        """From the live tensors, with the lock in hand: the steps wait."""
        flight.copied.set()
        self.flight = flight
        try:
            self._write(
                flight,
                self._progress(),
                self._contents(weights(self.parts.model), self.parts.optimizer.state_tensors()),
            )
        except LampError as error:
            flight.error = error
        finally:
            flight.done.set()

    def _write(self, flight: Flight, progress: Progress, contents: Contents) -> None:
        """Look, write, tell. Only now the step is durable."""
        flight.bad = guard.check_weights(progress.step, checkpoint.first_not_finite(contents.model))
        if flight.bad:
            return
        root, keep = self.parts.folder.checkpoints, self.parts.run.save.keep
        with report.phase("save", total=contents.bytes, unit="B") as phase:
            flight.phase = phase
            path = checkpoint.save(root, progress, contents, keep, self.protect, phase)
        with self.lock:
            self.durable, self.saved_at = progress.step, time.monotonic()
            self.save_s = self.saved_at - flight.started
        report.number(durable_step=progress.step)
        told = {"step": progress.step, "path": str(path), "bytes": contents.bytes, "seconds": self.save_s}
        report.event("checkpoint", **told, blocked_s=flight.blocked_s if flight.staged else self.save_s)
        with self.lock:
            self._mark_best()

    def _mark_best(self) -> None:
        if self.best is not None and self.best.best_step == self.durable:
            checkpoint.mark_best(self.parts.folder.checkpoints, self.best)
            self.best = None

    def _progress(self) -> Progress:
        progress = self.parts.progress
        if isinstance(self.stream, ChunkStream):
            return replace(progress, stream=self.stream.state_after(progress.step).dump())
        return progress

    def _contents(self, model: Tensors, optimizer: Tensors) -> Contents:
        parts = self.parts
        return Contents(model, optimizer, parts.built.config, parts.save_tokenizer, dict(parts.facts))

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """The flag that gives a stop its time: up while anybody saves or waits to."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self.counting:
            self.saving += change
            report.flag("saving", self.saving > 0)

    def _say_slow(self, waited_s: float) -> None:
        """Once: saves take longer than the time between them."""
        if waited_s > LONG_WAIT_S and not self.said_slow:
            self.said_slow = True
            report.warn(
                f"a save takes {self.save_s:.1f} s, longer than the time between two saves: the steps waited"
                f" {waited_s:.1f} s for the one before; raise save.every_steps, or use a faster disk"
            )
