"""Makes steps durable: for the loop, on request, or for a stop while the loop is busy in a long call.

In:  a RunContext, the TrainState; which step is due.
Out: checkpoints, written beside the steps (async_save) or while they wait; the durable step; failures, reported to the loop.

Who may do what. The weights are constant outside of `optimizer_update`, so any thread may save the last completed step
while it holds `lock`. There is one save at a time (`pending`); the next one waits for it, so that a step that is due is
saved and never passed over. Nobody waits for a write while holding the lock, because the write needs it at its end:
`alone` waits first and then takes the lock.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lamplighter import report
from lamplighter.data.chat.template import ChatTemplate
from lamplighter.data.chat.template import keep as keep_template
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import STOPPED_EARLY, CannotWrite, LampError
from lamplighter.model.weights import stored_buffers
from lamplighter.procs import procfs
from lamplighter.rundir import VERSIONS
from lamplighter.train import async_save, checkpoint, guard, memory_copy, parts
from lamplighter.train.async_save import AsyncSaver, PendingSave, Tensors
from lamplighter.train.checkpoint import Contents, Progress
from lamplighter.train.state import RunContext, TrainState

_STOP_PATIENCE_S = 1.0  # how long a stop waits for the step to end by itself before it saves from beside it
_STOP_DEADLINE_S = 10.0  # how long it then waits for a GPU to end the last update
_LOOK_S = 0.1
_LONG_WAIT_S = 1.0  # a wait for the save before that is worth a word
_COPY_SHARE = 0.01  # of the time may go into copies between the saves
_LEAST_BETWEEN_S = 0.2  # two of them


class Checkpointer:
    """The saves of one run."""

    def __init__(self, context: RunContext, state: TrainState) -> None:
        self.context, self.state = context, state
        self.tokenizer_files = TokenizerFiles(context.tokenizer, context.chat)
        self.owner = os.getpid()
        self.lock = threading.RLock()
        self.durable = state.progress.step if state.from_disk else checkpoint.latest_step(context.folder.checkpoints)
        self.protect = {self.durable} if self.durable else set[int]()
        self.saved_at = time.monotonic()
        self.save_s = 0.0
        self.stopped = threading.Event()
        self.in_update = False  # the weights are neither those before the step nor those after it
        self.last_update = async_save.LastUpdate(context.machine.device)
        self.async_saver: AsyncSaver | None = None
        self.chosen = False
        self.pending: PendingSave | None = None
        self.copying: PendingSave | None = None  # a copy between two saves
        self.copied_at = 0.0
        self.best: Progress | None = None  # to be marked when it is durable
        self.saving, self.counting = 0, threading.Lock()  # threads that save or wait to
        self.said_slow = False
        self.part = context.shards.part if context.shards is not None else None
        self.standing = parts.Standing(context.folder, self.part) if self.part is not None else None
        self.asked, self.voted = False, 0.0  # of a sharded run: a save that is not due by steps is agreed by a vote

    def vote(self) -> float:
        """Of a sharded run, before a step: whether to save after it. Its ranks save together, and only rank 0 looks at the time."""
        return float(self.part is not None and self.context.world.leads and (self.asked or self._by_time()))

    def _by_time(self) -> bool:
        section, idle = self.context.run.save, self.pending is None or not self.pending.in_progress
        return section.every_s > 0 and idle and time.monotonic() - self.saved_at >= section.every_s

    def due(self, step: int) -> bool:
        """By steps, by time since the last one was durable, and at the end; rank 0 saves for all, as all hold the same, or all
        ranks of a sharded run their parts.
        """
        if not self._saves:
            return False
        section = self.context.run.save
        by_steps = section.every_steps > 0 and step % section.every_steps == 0
        now = bool(self.voted) if self.part is not None else self._by_time()
        return by_steps or now or step == self.state.steps

    @property
    def _saves(self) -> bool:
        return self.context.world.leads or self.part is not None

    # ---------------------------------------------------------------- for the loop

    def begin(self, for_loop: bool = True) -> PendingSave | None:
        """Start to make the last completed step durable, and let the steps go on; None if it is durable already."""
        started, current = time.monotonic(), self.pending
        if current is not None and current.in_progress and current.step == self.state.progress.step:
            current.for_loop |= for_loop
            return current
        with self._saving(), self.alone() as waited_s:
            save = None if self._unreported() else self._new_save(for_loop)
            if save is None:
                return None
            self._warn_if_slow(waited_s)
            if self._is_async():
                self._start_async(save)
            else:
                self._write_now(save)
            save.blocked_s += time.monotonic() - started if for_loop else 0.0
            return save

    def save(self) -> report.Verdict | None:
        """Make the last completed step durable before anything else; a verdict if its weights are not finite."""
        with self._saving(), self.alone():
            before = self._unreported()
            if before is not None:
                before.reported = True
                if before.bad:
                    return before.bad
            save = self._new_save(for_loop=True)
            if save is None:
                return None
            self._write_now(save)
            save.reported = True
            if save.error:
                raise save.error
            if before is not None and before.error:
                report.warn(f"the save of step {before.step} failed ({before.error}); step {save.step} is saved now")
            return save.bad

    def save_or_report(self) -> None:
        """`save`, where there is nothing left to do about bad weights but to say so."""
        if bad := self.save():
            report.verdict(bad)

    def failure(self, wait: bool = False) -> PendingSave | None:
        """The last save, if it is known by now that its weights are not finite; raises what kept it from being written."""
        if wait:
            self.wait()
        save = self._unreported()
        if save is None:
            return None
        save.reported = True
        if save.error:
            raise save.error
        return save

    @contextlib.contextmanager
    def optimizer_update(self) -> Iterator[None]:
        """The one place where weights change, after what is left of a copy. Left by an error, they are half-changed."""
        with self.lock:
            for copy in (self.pending, self.copying):
                if copy is not None and self.async_saver is not None and not copy.copied.is_set():
                    started = time.monotonic()
                    with report.span("save"):
                        self.async_saver.wait_for_copy(copy)
                    copy.blocked_s += time.monotonic() - started
            self.in_update = True
            yield
            self.last_update.queued()
            self.in_update = False

    def remember_due(self) -> bool:
        """Whether it is time for a copy between two saves: as often as that costs a hundredth of the time."""
        if not self.context.world.leads or self.part is not None or not self._is_async():
            return False
        assert self.async_saver is not None
        if not self.async_saver.outlives or self.async_saver.free() is None:
            return False
        between_s = max(_LEAST_BETWEEN_S, self.async_saver.copy_s / _COPY_SHARE)
        return time.monotonic() - self.copied_at >= between_s

    def remember(self) -> None:
        """Copy the last completed step, beside the next one, to memory that outlives this process."""
        with self.lock:
            copying = self.copying is not None and self.copying.in_progress
            if copying or self.in_update or os.getpid() != self.owner or not self.remember_due():
                return
            self.copying = self._copied(PendingSave(self.state.progress.step, 0, for_loop=False), None)

    def keep_best(self) -> None:
        """This step has the best score: save it, and mark it as soon as it is durable."""
        with self.lock:
            self.best = self.state.progress
        self.begin()
        with self.lock:
            self._mark_best()

    def follow_world(self) -> None:
        """Other ranks than before: who saves from now on knows by the disk what is durable."""
        root = self.context.folder.checkpoints
        if self.context.world.leads and self.pending is None:
            self.durable = checkpoint.latest_step(root)
            self.protect |= {self.durable}

    def rolled_back(self) -> None:
        """The newest step is an older one again."""
        self.durable = self.state.progress.step
        self.protect = {self.durable}
        self.best = None
        if self.async_saver is not None:
            self.async_saver.forget()
        report.number(step=self.durable, durable_step=self.durable)

    def wait(self) -> None:
        """Until the pending save is over, however it ends."""
        save = self.pending
        if save is None or not save.in_progress:
            return
        with report.phase("save", total=save.bytes, unit="B") as phase:
            while not save.done.wait(_LOOK_S):
                its = save.phase
                if its is not None and (its.done, its.item) != (phase.done, phase.item):
                    phase.set(its.done, its.item)

    @contextlib.contextmanager
    def alone(self) -> Iterator[float]:
        """The lock, with no save in progress; gives the seconds that this took."""
        started = time.monotonic()
        while True:
            self.wait()
            with self.lock:
                if self.pending is None or not self.pending.in_progress:
                    yield time.monotonic() - started
                    return

    # ---------------------------------------------------------------- on request, in threads of their own

    def stop(self) -> None:
        """Asked to stop: let the loop do it; if it is busy for longer, save from here and leave.

        On a GPU what is queued behind the last update is not waited for. One that does not even end that update cannot be
        read: the durable step counts, and that is said.
        """
        if not self._saves or self.stopped.wait(_STOP_PATIENCE_S):
            return
        if not self.last_update.is_made(_STOP_DEADLINE_S):
            words = f"the GPU has not ended the last update within {_STOP_DEADLINE_S:.0f} s, so it cannot be saved"
            report.warn(f"{words}: step {self.durable} is durable")
            report.leave(STOPPED_EARLY)
            return
        with self._saving(), self._at_one_step() as together:
            if self.stopped.is_set():
                return
            if not together:
                words = f"the ranks have not come to one step within {_STOP_DEADLINE_S:.0f} s"
                report.warn(f"{words}: step {self.durable} is durable")
                report.leave(STOPPED_EARLY)
                return
            try:
                with self.last_update.read_beside():
                    self.save_or_report()
            except LampError as error:
                report.last_words(error.lines(), error.code)
                report.leave(CannotWrite.code)
                return
            report.leave(STOPPED_EARLY)

    def tell_standing(self) -> None:
        """Of a sharded run that stops: which step this rank will save."""
        if self.standing is not None:
            self.standing.tell(self.state.progress.step)

    @contextlib.contextmanager
    def _at_one_step(self) -> Iterator[bool]:
        """The lock, as `alone` has it; of a sharded run when all ranks have the same step in their hands, or False where they do
        not come to one in time. They stand one apart at most: who is behind goes on to where another is already.
        """
        until = time.monotonic() + _STOP_DEADLINE_S
        while True:
            with self.alone():
                self.tell_standing()
                while not self.stopped.is_set() and self.standing is not None and time.monotonic() < until:
                    newest = self.standing.newest()
                    if newest is not None:
                        break
                    time.sleep(_LOOK_S / 5)
                else:
                    newest = self.state.progress.step if self.part is None else None
                if self.stopped.is_set() or newest is None or self.state.progress.step >= newest:
                    yield newest is not None
                    return
            while self.state.progress.step < newest and not self.stopped.is_set() and time.monotonic() < until:
                time.sleep(_LOOK_S / 5)  # the loop ends its step
            if time.monotonic() >= until:
                with self.alone():
                    yield False
                return

    def save_for_others(self) -> None:
        """Asked to save: what goes wrong is said, and the loop goes on."""
        if self.part is not None:
            self.asked = True
            return
        save = self.begin(for_loop=False)
        if save is None:
            return
        save.done.wait()
        if save.for_loop:  # it was in progress already, and the loop hears of it
            return
        if isinstance(save.error, LampError):
            report.last_words(save.error.lines(), save.error.code)
        elif save.error:
            raise save.error
        if save.bad:
            report.verdict(save.bad)

    # ---------------------------------------------------------------- one save

    def _unreported(self) -> PendingSave | None:
        """A save of the loop's that failed, and the loop does not know it yet."""
        save = self.pending
        if save is None or save.in_progress or save.reported or not save.for_loop:
            return None
        return save if save.bad or save.error else None

    def _new_save(self, for_loop: bool) -> PendingSave | None:
        step = self.state.progress.step
        if not self._saves or step in (self.durable, 0):
            return None
        if os.getpid() != self.owner:  # a process forked off by the user's code saves nothing
            return None
        self.asked = False
        if self.in_update:
            report.warn("the optimizer was interrupted in the middle of a step: its half-changed weights are not saved")
            return None
        tensors = [*self.context.stored().values(), *self.context.optimizer.state_tensors().values()]
        return PendingSave(step, sum(tensor.nbytes for tensor in tensors), for_loop)

    def _is_async(self) -> bool:
        """Decided at the first save, when a step has shown what memory it needs."""
        if not self.chosen:
            self.chosen = True
            wanted, why = async_save.choose(self.context.run.save.staged, self._copy_bytes(), procfs.memory_left())
            report.note(why)
            self.async_saver = AsyncSaver(self._memory()) if wanted else None
        return self.async_saver is not None

    def _memory(self) -> list[memory_copy.MemoryCopy]:
        """What the parent keeps for the state, where it fits."""
        copies = memory_copy.given(os.environ) if self.context.world.leads and self.part is None else []
        if not copies:
            return []
        wanted, why = async_save.outlives(self.context.run.save.memory, self._copy_bytes(), procfs.memory_left())
        if why:
            report.note(why)
        return copies if wanted else []

    def _copy_bytes(self) -> int:
        """What the copy of an asynchronous save takes, by the same table that the plan and the doctor read."""
        built = self.context.built
        whole = self.context.run.train.optimizer_kind.checkpoint(built.trained, built.hidden)
        return whole if self.part is None else whole // self.part.size

    def _start_async(self, save: PendingSave) -> None:
        """Copy and write beside the steps."""
        save.is_async = True
        progress = self._progress()

        def write(kept_model: Tensors, kept_optimizer: Tensors) -> None:
            with self._saving():
                self._write(save, progress, self._contents(kept_model, kept_optimizer))

        if self.copying is not None:  # it is nearly made, and one of the two must stay whole
            self.copying.done.wait()
        self.pending = self._copied(save, write)

    def _copied(self, save: PendingSave, write: Callable[[Tensors, Tensors], None] | None) -> PendingSave:
        assert self.async_saver is not None
        owed = self.pending.step if self.pending is not None and self.pending.in_progress else 0
        about = {"progress": asdict(self._progress()), "facts": {**VERSIONS, **self._facts()}, "owed": owed}
        model = self.context.stored()
        buffers = stored_buffers(self.context.model) if self.part is None else set()
        self.copied_at = time.monotonic()
        self.async_saver.begin(save, model, self.context.optimizer.state_tensors(), buffers, write, about)
        return save

    def _write_now(self, save: PendingSave) -> None:
        """From the live tensors, while holding the lock: the steps wait."""
        save.copied.set()
        self.pending = save
        try:
            model = {name: tensor.contiguous() for name, tensor in self.context.stored().items()}
            contents = self._contents(model, self.context.optimizer.state_tensors())
            self._write(save, self._progress(), contents)
        except LampError as error:
            save.error = error
        finally:
            save.done.set()

    def _write(self, save: PendingSave, progress: Progress, contents: Contents) -> None:
        """Check, write, report. Only then is the step durable."""
        bad = checkpoint.first_not_finite(contents.model)
        if self.part is not None and not self.context.world.leads:
            self._hand_in(save, contents, bad or "")
            return
        save.bad = guard.check_weights(progress.step, bad)
        if save.bad and self.part is None:
            return
        contents = replace(contents, bad=bad or "")
        root, keep = self.context.folder.checkpoints, self.context.run.save.keep
        with report.phase("save", total=contents.bytes, unit="B") as phase:
            save.phase = phase
            try:
                path = checkpoint.save(root, progress, contents, phase, keep=keep, protect=self.protect)
            except checkpoint.BadPart as error:  # of any rank
                save.bad = guard.check_weights(progress.step, str(error))
                return
        with self.lock:
            self.durable, self.saved_at = progress.step, time.monotonic()
            self.save_s = self.saved_at - save.started
        report.number(durable_step=progress.step)
        told = {"step": progress.step, "path": str(path), "bytes": contents.made_bytes, "seconds": self.save_s}
        report.event("checkpoint", **told, blocked_s=save.blocked_s if save.is_async else self.save_s)
        with self.lock:
            self._mark_best()

    def _hand_in(self, save: PendingSave, contents: Contents, bad: str) -> None:
        """This rank's part. Rank 0 makes it durable, and finds in it what is bad; it is not done again here."""
        assert self.part is not None
        with report.phase("save", total=contents.bytes, unit="B") as phase:
            save.phase = phase
            self.part.hand_in(self.context.folder.checkpoint(save.step), contents.files, bad, phase.tick)
        with self.lock:
            self.durable, self.saved_at = save.step, time.monotonic()
            self.save_s = self.saved_at - save.started

    def _mark_best(self) -> None:
        if self.context.world.leads and self.best is not None and self.best.best_step == self.durable:
            checkpoint.mark_best(self.context.folder.checkpoints, self.best)
            self.best = None

    def _progress(self) -> Progress:
        """The counters, with what the batches need to go on from there."""
        progress = self.state.progress
        return replace(progress, stream=self.context.source.state(progress.step))

    def _contents(self, model: Tensors, optimizer: Tensors) -> Contents:
        built = self.context.built
        base = built.base.record() if built.base is not None else None
        return Contents(
            model,
            optimizer,
            built.config,
            self.tokenizer_files.save,
            self._facts(),
            adapter=built.adapter,
            base=base,
            part=self.part,
        )

    def _facts(self) -> dict[str, Any]:
        return {**self.context.recorded, "compiled": self.state.compiled}

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """The flag that gives a stop its time: up while any thread saves or waits to."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self.counting:
            self.saving += change
            report.flag("saving", self.saving > 0)

    def _warn_if_slow(self, waited_s: float) -> None:
        """Once: saves take longer than the time between them."""
        if waited_s > _LONG_WAIT_S and not self.said_slow:
            self.said_slow = True
            report.warn(
                f"a save takes {self.save_s:.1f} s, longer than the time between two saves: the steps waited"
                f" {waited_s:.1f} s for the one before; raise save.every_steps, or use a faster disk"
            )


class TokenizerFiles:
    """The tokenizer, and a chat model's template, as they go into each checkpoint."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate | None = None) -> None:
        self.tokenizer, self.chat = tokenizer, chat

    def save(self, folder: Path) -> None:
        for name, data in self._files.items():
            (folder / name).write_bytes(data)
        if self.chat is not None:
            keep_template(self.chat, folder)

    @cached_property
    def _files(self) -> dict[str, bytes]:
        """Made once: a large vocabulary takes a while to serialise, and steps would compete with that for the GIL."""
        with tempfile.TemporaryDirectory() as place:
            self.tokenizer.save(Path(place))
            return {path.name: path.read_bytes() for path in sorted(Path(place).iterdir())}
