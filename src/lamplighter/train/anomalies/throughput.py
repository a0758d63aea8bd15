"""Rules on time: waiting for data, padding, steps that grow slower, a collapse, a device that idles. Pure functions.

In:  the History of a run (its seconds are those of the records, not of a clock).
Out: a Verdict while a rule holds, None while it does not.

Each needs minutes of evidence: another process that takes the machine for a moment is no anomaly.
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median, median_low

from lamplighter.report import Verdict
from lamplighter.train.anomalies.history import Block, History

_LEAST_STEPS = 60
WAIT_SHARE, WAIT_S, WAIT_STEP_S = 0.30, 60.0, 0.02  # less than that a step is the changing of threads
_PADDING_SHARE = 0.5
GROWTH, GROWTH_EACH, GROWTH_ORDER = (
    0.30,
    0.05,
    0.6,
)  # from first to last quarter, from each to the next, rank correlation
_JUMP = 0.7  # of all growth between two quarters: that is no growth
GROWTH_BLOCKS, GROWTH_LOOK = 12, 24
GROWTH_S, GROWTH_ALONE_S = 60.0, 300.0  # with memory that grows too; without, it could be a busy neighbour
_RAM_EACH = 0.02  # from each quarter to the next
COLLAPSE, COLLAPSE_S = 0.4, 180.0
_MFU_S = 120.0
_MFU_LEAST = {
    "cuda": (30e6, 0.15),
    "cpu": (10e6, 0.02),
}  # of models from so many parameters on; with matrix tiles (AMX) 10 to 25 % is usual


def data_wait(history: History) -> Verdict | None:
    """The device waits for batches."""
    blocks = history.last(_LEAST_STEPS, WAIT_S)
    if not blocks:
        return None
    whole = sum(block.seconds for block in blocks)
    share = sum(block.wait * block.seconds for block in blocks) / whole
    if share < WAIT_SHARE or share * whole < WAIT_STEP_S * _steps(blocks):
        return None
    return Verdict(
        "slow",
        "data_wait",
        f"{share:.0%} of the last {whole:.0f} s went into waiting for data",
        "prepare a token cache (data.stream false, lamp data prepare), or read from a faster place",
        evidence=(f"{share * whole:.1f} s of {whole:.1f} s over {_steps(blocks)} steps",),
    )


def padding(history: History) -> Verdict | None:
    """More than half of what is computed is filler."""
    blocks = history.last(_LEAST_STEPS)
    if not blocks:
        return None
    share = sum(block.padding for block in blocks) / len(blocks)
    if share < _PADDING_SHARE:
        return None
    return Verdict(
        "waste",
        "padding",
        f"{share:.0%} of the last {_steps(blocks)} steps was padding: so much of the time and money is spent on nothing",
        "data.packing packed (several examples in a window), or a smaller data.seq_len",
        evidence=(f"padding share {share:.3f}",),
    )


def step_time_grows(history: History) -> Verdict | None:
    """Each stretch is slower than the one before it: something accumulates."""
    every = list(history.blocks)
    found = [some for some in (every[-GROWTH_LOOK:], _thinned(every)) if _grows(some)]
    if not found:
        return None
    blocks = found[0]
    ram, took = (
        [block.ram_gb for block in blocks],
        sum(block.seconds for block in every if block.first >= blocks[0].first),
    )
    leak = all(map(math.isfinite, ram)) and _rises(ram, _RAM_EACH)
    if took < (GROWTH_S if leak else GROWTH_ALONE_S):
        return None
    times = [block.step_s for block in blocks]
    quarter = len(times) // 4
    then, now, order = median(times[:quarter]), median(times[-quarter:]), _order(times)
    middle = [(block.first + block.last) / 2 for block in blocks]
    slope = median((b - a) / (y - x) for (x, a), (y, b) in _pairs(list(zip(middle, times, strict=True))))
    return Verdict(
        "slow",
        "step_time_grows",
        f"a step took {then * 1000:.0f} ms, now {now * 1000:.0f} ms, and grows by {slope * 1e6:.1f} us each step"
        + (f"; memory grows with it ({ram[0]:.2f} to {ram[-1]:.2f} GB): a leak" if leak else ""),
        "look for lists that keep tensors or records; a resume starts fresh: lamp stop, then the same command",
        evidence=(
            f"rank correlation with time {order:.2f}",
            f"memory {ram[0]:.2f} -> {ram[-1]:.2f} GB",
            f"{_steps(blocks)} steps",
        ),
    )


def throughput_collapsed(history: History) -> Verdict | None:
    """For minutes far below what this very run could do."""
    blocks = history.last(_LEAST_STEPS, COLLAPSE_S)
    if not blocks or len(history.blocks) <= len(blocks) + 2:
        return None
    rates = sorted(block.tokens_per_s for block in history.blocks)
    best, now = rates[int(0.9 * (len(rates) - 1))], median(block.tokens_per_s for block in blocks)
    best = max(best, median(block.tokens_per_s for block in list(history.blocks)[: -len(blocks)]))
    if now > COLLAPSE * best:
        return None
    return Verdict(
        "slow",
        "throughput_collapsed",
        f"{now:,.0f} tokens a second over the last {sum(b.seconds for b in blocks):.0f} s; this run did {best:,.0f}",
        "does something else use the machine (top, nvidia-smi), or is it throttled? lamp why shows where the time goes",
        evidence=(f"{now / best:.0%} of its own best", f"data wait {blocks[-1].wait:.0%}"),
    )


def mfu_low(history: History) -> Verdict | None:
    """The device idles; said only of models that are large enough to fill one."""
    facts = history.facts
    parameters, least = _MFU_LEAST.get(facts.device, (math.inf, 0.0))
    blocks = history.last(_LEAST_STEPS, _MFU_S) if facts.parameters >= parameters else []
    if not blocks:
        return None
    now = median(block.mfu for block in blocks)
    if not now < least:
        return None
    return Verdict(
        "slow",
        "mfu_low",
        f"{now:.1%} of the {facts.device}'s peak is used (MFU); {least:.0%} is the least to expect of"
        f" {facts.parameters / 1e6:.0f}M parameters",
        "a larger train.micro_batch, train.dtype bf16, train.compile true; lamp doctor finds a slow path in the model",
        evidence=(f"median of {_steps(blocks)} steps {now:.4f}", f"data wait {blocks[-1].wait:.0%}"),
    )


# ---------------------------------------------------------------- arithmetic


def _steps(blocks: list[Block]) -> int:
    return blocks[-1].last - blocks[0].first + 1


def _thinned(blocks: list[Block]) -> list[Block]:
    """About as many blocks as one look takes, spread over the whole run."""
    return blocks[:: -max(1, len(blocks) // GROWTH_LOOK)][::-1]


def _grows(blocks: list[Block]) -> bool:
    """Each quarter is slower than the one before it (a jump is none), and nearly every block than those before."""
    if len(blocks) < GROWTH_BLOCKS:
        return False
    times = [block.step_s for block in blocks]
    quarters = _quarters(times)
    growth = quarters[3] - quarters[0]
    if growth < GROWTH * quarters[0] or max(b - a for a, b in pairwise(quarters)) > _JUMP * growth:
        return False
    return _rises(times, GROWTH_EACH) and _order(times) > GROWTH_ORDER


def _quarters(values: list[float]) -> list[float]:
    size = len(values) // 4
    return [median_low(values[n * size : (n + 1) * size if n < 3 else None]) for n in range(4)]


def _rises(values: list[float], share: float) -> bool:
    return all(b > (1 + share) * a for a, b in pairwise(_quarters(values)))


def _pairs(points: list[tuple[float, float]]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Each point with the one half a span later (Theil and Sen, thinned)."""
    half = len(points) // 2
    return list(zip(points, points[half:], strict=False))


def _order(values: list[float]) -> float:
    """Kendall's rank correlation with time: 1 = grows always, 0 = no order."""
    signs = [math.copysign(1, b - a) if a != b else 0 for n, a in enumerate(values) for b in values[n + 1 :]]
    return sum(signs) / max(1, len(signs))
