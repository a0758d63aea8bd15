"""What a training loop works with: a RunContext that never changes, and a TrainState, the only thing that does.

In:  what the start-up phases made: model, optimizer, data, tokenizer, sections.
Out: both, for `train.loop.training`; made by `lamp train`, a notebook or a test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lamplighter.config import Run
from lamplighter.data.batch_source import BatchSource, DataFacts
from lamplighter.data.batches import Batch
from lamplighter.data.chat.template import ChatTemplate
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.model.build import Built
from lamplighter.model.weights import stored_tensors
from lamplighter.rundir import RunDir
from lamplighter.train.anomalies.detector import Detector
from lamplighter.train.checkpoint import Progress
from lamplighter.train.exactness import GradientProbe, Redone
from lamplighter.train.hardware import Machine
from lamplighter.train.loss_scale import LEAST, LossScale
from lamplighter.train.optimizers import Optimizer, Schedule
from lamplighter.train.pace import Smaller
from lamplighter.train.parts import Sharded
from lamplighter.train.ranks import World
from lamplighter.train.validation import EntropyBound

if TYPE_CHECKING:
    from lamplighter.train.compiled import Compiled


@dataclass(frozen=True)
class RunContext:
    """All of a run that stays as it is from the first step to the last."""

    run: Run
    folder: RunDir
    machine: Machine
    built: Built
    optimizer: Optimizer
    schedule: Schedule
    source: BatchSource
    tokenizer: Tokenizer
    recorded: dict[str, Any]  # goes into state.json and is compared at resume: machine, data, seed, length
    planned_step_s: float = 0.0
    smaller: tuple[Smaller, ...] = ()  # models that would take less time, largest first
    chat: ChatTemplate | None = None
    entropy_bound: EntropyBound | None = None
    loss_scale: LossScale | None = None  # of fp16; the optimizer divides it out
    world: World = field(default_factory=World)
    shards: Sharded | None = None  # where each rank holds a part of the model

    def stored(self) -> dict[str, torch.Tensor]:
        """What this process holds of the tensors to store; asked by any thread."""
        return stored_tensors(self.model) if self.shards is None else self.shards.held()

    @property
    def model(self) -> torch.nn.Module:
        return self.built.model

    @property
    def data(self) -> DataFacts:
        return self.source.describe()


class UnreadStep:
    """A step whose weights are changed and whose loss and gradient norm nobody has read yet: a GPU is still at it.

    Where they are not finite, the update has changed nothing; then the counters are those before the step.
    """

    def __init__(
        self, batch: Batch, before: Progress, numbers: torch.Tensor, *, waited_s: float, started: float
    ) -> None:
        self.batch, self.before, self.waited_s, self.started = batch, before, waited_s, started
        self.copied: torch.cuda.Event | None = None
        self.numbers = numbers
        if numbers.device.type == "cuda":
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record()

    def read(self) -> tuple[float, float]:
        """Loss and gradient norm; waits for them. May be asked by any thread, and again."""
        if self.copied is not None:
            self.copied.synchronize()
        loss, grad_norm = self.numbers.tolist()[:2]
        return loss, grad_norm

    def scale(self) -> float | None:
        """The loss scale of fp16 that the step was made with; asked after `read`."""
        return self.numbers[2].item() if len(self.numbers) > 2 else None

    @property
    def overflowed(self) -> bool:
        """In fp16: the batch is good, and its gradients did not fit at this loss scale."""
        loss, grad_norm = self.read()
        scale = self.scale()
        return scale is not None and scale > LEAST and math.isfinite(loss) and not math.isfinite(grad_norm)

    def after(self) -> Progress:
        loss, grad_norm = self.read()
        if self.overflowed:
            return self.before.overflowed(self.batch.step, self.batch.filled)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self.before
        return self.before.learned(self.batch.step, self.batch.filled, loss)


@dataclass
class TrainState:
    """All of a run that changes. `progress` is replaced as a whole, so another thread always sees one step's counters."""

    steps: int  # of the run; fewer where a stream ended before
    compiled: bool = False  # whether the blocks are compiled, or are to be at the first step
    settled: Progress = field(default_factory=Progress)  # without the step that is not read yet
    unread: UnreadStep | None = None
    compiler: Compiled | None = None
    probe: GradientProbe | None = None  # of exactness, at this start
    redone: Redone = field(default_factory=Redone)
    anomalies: Detector | None = None
    from_disk: bool = True  # where it begins is durable; else it comes out of memory
    whole: bool = True  # weights and optimizer are of one step; not while another rank hands them over

    @property
    def progress(self) -> Progress:
        """The counters after the last step; waits for its numbers where they are not read yet."""
        unread = self.unread
        return self.settled if unread is None else unread.after()

    @progress.setter
    def progress(self, now: Progress) -> None:
        self.settled, self.unread = now, None

    @property
    def step(self) -> int:
        """The last step that was made; nothing is waited for."""
        unread = self.unread
        return self.settled.step if unread is None else unread.batch.step
