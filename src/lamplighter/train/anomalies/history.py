"""What the rules look at: blocks of steps, validations and samples, from the records of metrics.jsonl.

In:  the record of each step, by the field's names (from the loop, or read back after a restart).
Out: medians and spreads of blocks; a few numbers that change with every step. No clock and no random number is used:
     the same records make the same history.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

LEAST_BLOCK, LARGEST_BLOCK = 20, 100
_BLOCKS_KEPT = 4000
RECENT = 100
_NORMAL = 1.4826  # median distance -> standard deviation, for a bell curve
LR_NEAR_ZERO = 0.001  # of the peak
SPIKE_SIGMAS, SPIKE_SHARE = 8.0, 0.05
SPIKE_OF, SPIKE_LAST = 3, 5  # so many of the last few losses
_SPIKE_BITS = (1 << SPIKE_LAST) - 1


@dataclass(frozen=True)
class Facts:
    """What of a run does not change, as far as the rules need it."""

    vocab_size: int
    steps: int
    warmup: int
    peak_lr: float
    grad_clip: float = 1.0
    parameters: int = 0
    device: str = "cpu"
    from_scratch: bool = True
    chat: bool = False
    objective: str = "sft"  # or dpo: a loss of pairs
    unigram_nats: float | None = None  # what counting tokens achieves
    floor_nats: float | None = None  # what nobody can beat, and
    floor_error: float = 0.0

    @property
    def chance(self) -> float:
        """The loss of knowing nothing: of tokens, of the better of two answers."""
        return math.log(2 if self.objective == "dpo" else self.vocab_size)

    @property
    def block(self) -> int:
        return max(LEAST_BLOCK, min(LARGEST_BLOCK, self.steps // 100))


@dataclass(frozen=True)
class Block:
    """Some consecutive steps, in robust numbers."""

    first: int
    last: int
    loss: float
    spread: float  # of one step's loss, as a standard deviation
    losses: int
    grad_norm: float
    clipped: float  # share of the steps whose gradient was cut to less than a fifth
    lr: float
    seconds: float
    step_s: float
    wait: float  # share of the time
    padding: float
    mfu: float
    tokens_per_s: float
    ram_gb: float
    epoch: float
    margin: float = math.nan  # of preference pairs: the mean reward of the chosen answer less that of the rejected one
    accuracy: float = math.nan  # pairs whose chosen answer has the higher reward
    logp_chosen: float = math.nan
    logp_rejected: float = math.nan

    @property
    def error(self) -> float:
        """Standard error of the median loss."""
        return 1.2533 * self.spread / math.sqrt(max(1, self.losses))


@dataclass(frozen=True)
class Validation:
    """One look at what was held back, and the training loss of that time."""

    step: int
    loss: float
    train_loss: float
    epoch: float


@dataclass(frozen=True)
class Sample:
    """How much of a sample was one short cycle, again and again."""

    step: int
    repeat: float


def spread_of(values: Sequence[float], middle: float) -> float:
    return _NORMAL * median(abs(value - middle) for value in values)


@dataclass
class History:
    """All that is remembered of a run; `add` is called once per step, `validated` and `sampled` now and then."""

    facts: Facts
    step: int = 0
    blocks: deque[Block] = field(default_factory=lambda: deque(maxlen=_BLOCKS_KEPT))
    validations: list[Validation] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    first_loss: float | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    last_losses: deque[float] = field(default_factory=lambda: deque(maxlen=SPIKE_LAST))
    usual: tuple[float, float] | None = None  # median and spread of the recent losses, before this block
    spike_limit: float = math.inf  # above it a loss is far outside of them
    highs: int = 0  # one bit for each of the last losses: above that limit
    low_rates: int = 0  # consecutive steps with a learning rate near zero
    ram_gb: float = math.nan
    _open: list[Mapping[str, float | None]] = field(default_factory=list)

    def add(self, step: int, values: Mapping[str, float | None]) -> bool:
        """A finished step; True where it closes a block."""
        self.step = step
        loss = values.get("train/loss")
        if loss is not None and math.isfinite(loss):
            if self.first_loss is None and step == 1:
                self.first_loss = loss
            self.recent.append(loss)
            self.last_losses.append(loss)
            self.highs = (self.highs << 1 | (loss > self.spike_limit)) & _SPIKE_BITS
        lr = values.get("train/lr")
        if lr is not None:
            self.low_rates = self.low_rates + 1 if lr < LR_NEAR_ZERO * self.facts.peak_lr else 0
            self._open.append(values)
        ram = values.get("sys/ram_gb")
        if ram is not None:
            self.ram_gb = ram
        if step % self.facts.block:
            return False
        return self._close()

    def validated(self, step: int, loss: float | None) -> None:
        """The validation after a step; said again (after a restart) it counts once."""
        if loss is None or not math.isfinite(loss) or (self.validations and self.validations[-1].step >= step):
            return
        losses = list(self.recent)[-self.facts.block :]
        epoch = self._open[-1].get("train/epoch") if self._open else self.blocks[-1].epoch if self.blocks else 0.0
        self.validations.append(Validation(step, loss, median(losses) if losses else math.nan, epoch or 0.0))

    def sampled(self, step: int, repeat: float | None) -> None:
        if repeat is not None and not (self.samples and self.samples[-1].step >= step):
            self.samples.append(Sample(step, repeat))

    @property
    def spiking(self) -> bool:
        """Three of the last five losses are far outside of what the last hundred were."""
        return self.highs.bit_count() >= SPIKE_OF

    @property
    def settled(self) -> int:
        """From this step on the rate has been high for a while: what was learned shows."""
        return self.facts.warmup + max(100, min(self.facts.warmup, self.facts.steps // 10))

    def last(self, steps: int, seconds: float = 0.0) -> list[Block]:
        """The newest blocks that cover so many steps and so much time; [] where there are not enough."""
        found: list[Block] = []
        covered, took = 0, 0.0
        for block in reversed(self.blocks):
            found.append(block)
            covered += block.last - block.first + 1
            took += block.seconds
            if covered >= steps and took >= seconds:
                return found[::-1]
        return []

    def _close(self) -> bool:
        rows, self._open = self._open, []
        losses = [x for row in rows if (x := row.get("train/loss")) is not None and math.isfinite(x)]
        if not losses:
            return False
        self.blocks.append(_block(self.facts, self.step, rows, losses, self.ram_gb))
        if len(self.recent) >= RECENT and not self.spiking:  # a spike is no measure for the next one
            usual = median(self.recent)
            self.usual = (usual, spread_of(self.recent, usual))
            self.spike_limit = usual + max(SPIKE_SIGMAS * self.usual[1], SPIKE_SHARE * self.facts.chance)
        return True


def _block(facts: Facts, step: int, rows: list[Mapping[str, float | None]], losses: list[float], ram: float) -> Block:
    def column(name: str) -> list[float]:
        return [float(x) for row in rows if (x := row.get(name)) is not None]

    norms, times, waits = column("train/grad_norm"), column("train/dt_ms"), column("train/data_wait_ms")
    hard = 5 * facts.grad_clip if facts.grad_clip else math.inf
    whole, middle = sum(times), median(losses)
    return Block(
        first=step - len(rows) + 1,
        last=step,
        loss=middle,
        spread=spread_of(losses, middle),
        losses=len(losses),
        grad_norm=_middle(norms),
        clipped=sum(norm > hard for norm in norms) / max(1, len(norms)),
        lr=_last(column("train/lr")),
        seconds=whole / 1000,
        step_s=_middle(times) / 1000,
        wait=sum(waits) / whole if whole else 0.0,
        padding=_mean(column("train/pad_frac")),
        mfu=_middle(column("train/mfu")),
        tokens_per_s=_middle(column("train/tok_per_sec")),
        ram_gb=ram,
        epoch=_last(column("train/epoch")),
        margin=_middle(column("train/reward_margin")),
        accuracy=_mean(column("train/reward_accuracy")),
        logp_chosen=_middle(column("train/logp_chosen")),
        logp_rejected=_middle(column("train/logp_rejected")),
    )


def _middle(values: list[float]) -> float:
    return median(values) if values else math.nan


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _last(values: list[float]) -> float:
    return values[-1] if values else 0.0


def repeat_share(ids: Sequence[int], longest_cycle: int = 8) -> float | None:
    """Share of a sample that is one token, or one short cycle, at least four times in a row; None of a short one."""
    if len(ids) < 16:
        return None
    most = 0
    for period in range(1, longest_cycle + 1):
        run = 0
        for here, before in zip(ids[period:], ids, strict=False):
            run = run + 1 if here == before else 0
            if run >= 3 * period:
                most = max(most, run + period)
    return most / len(ids)
