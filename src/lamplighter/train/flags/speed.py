"""Rules on time: waiting for data, padding, steps that grow slower, a collapse, a device that idles. Pure functions.

In:  the Memory of a run (its seconds are those of the records, not of a clock).
Out: a Verdict while a rule holds, None while it does not.

Each needs minutes of evidence: a neighbour who takes the machine for a moment is weather.
"""

from __future__ import annotations

import math
from statistics import median

from lamplighter.report import Verdict
from lamplighter.train.flags.memory import Block, Memory

LEAST_STEPS = 60
WAIT_SHARE, WAIT_S = 0.30, 30.0
PADDING_SHARE = 0.5
GROWTH, GROWTH_ORDER, GROWTH_S, GROWTH_BLOCKS = 0.30, 0.7, 30.0, 12
COLLAPSE, COLLAPSE_S = 0.4, 120.0
MFU_S = 120.0
MFU_LEAST = {"cuda": (30e6, 0.15), "cpu": (10e6, 0.05)}  # of models from so many parameters on


def data_wait(memory: Memory) -> Verdict | None:
    """The device waits for batches."""
    blocks = memory.last(LEAST_STEPS, WAIT_S)
    if not blocks:
        return None
    whole = sum(block.seconds for block in blocks)
    share = sum(block.wait * block.seconds for block in blocks) / whole
    if share < WAIT_SHARE:
        return None
    return Verdict(
        "slow",
        "data_wait",
        f"{share:.0%} of the last {whole:.0f} s went into waiting for data",
        "prepare a token cache (data.stream false, lamp data prepare), or read from a faster place",
        evidence=(f"{share * whole:.1f} s of {whole:.1f} s over {_steps(blocks)} steps",),
    )


def padding(memory: Memory) -> Verdict | None:
    """More than half of what is computed is filler."""
    blocks = memory.last(LEAST_STEPS)
    if not blocks:
        return None
    share = sum(block.padding for block in blocks) / len(blocks)
    if share < PADDING_SHARE:
        return None
    return Verdict(
        "waste",
        "padding",
        f"{share:.0%} of the last {_steps(blocks)} steps was padding: so much of the time and money is spent on nothing",
        "data.packing packed (several examples in a window), or a smaller data.seq_len",
        evidence=(f"padding share {share:.3f}",),
    )


def step_time_grows(memory: Memory) -> Verdict | None:
    """Each stretch is slower than the one before it: something accumulates."""
    blocks = _thinned(memory.last(200, GROWTH_S), memory)
    if len(blocks) < GROWTH_BLOCKS:
        return None
    times = [block.step_s for block in blocks]
    quarter = len(times) // 4
    then, now = median(times[:quarter]), median(times[-quarter:])
    order = _order(times)
    if now < (1 + GROWTH) * then or order < GROWTH_ORDER:
        return None
    middle = [(block.first + block.last) / 2 for block in blocks]
    slope = median((b - a) / (y - x) for (x, a), (y, b) in _pairs(list(zip(middle, times, strict=True))))
    ram = [block.ram_gb for block in blocks if math.isfinite(block.ram_gb)]
    grown = f"memory {ram[0]:.2f} -> {ram[-1]:.2f} GB" if len(ram) > 1 else "memory not measured"
    leak = "; memory grows too: a leak" if len(ram) > 1 and ram[-1] > 1.1 * ram[0] else ""
    return Verdict(
        "slow",
        "step_time_grows",
        f"a step took {then * 1000:.0f} ms, now {now * 1000:.0f} ms, and grows by {slope * 1e6:.1f} us each step{leak}",
        "look for lists that keep tensors or records; a resume starts fresh: lamp stop, then the same command",
        evidence=(f"rank correlation with time {order:.2f}", grown, f"{_steps(blocks)} steps"),
    )


def throughput_collapsed(memory: Memory) -> Verdict | None:
    """For minutes far below what this very run could do."""
    blocks = memory.last(LEAST_STEPS, COLLAPSE_S)
    if not blocks or len(memory.blocks) <= len(blocks) + 2:
        return None
    rates = sorted(block.tokens_per_s for block in memory.blocks)
    best, now = rates[int(0.9 * (len(rates) - 1))], median(block.tokens_per_s for block in blocks)
    best = max(best, median(block.tokens_per_s for block in list(memory.blocks)[: -len(blocks)]))
    if now > COLLAPSE * best:
        return None
    return Verdict(
        "slow",
        "throughput_collapsed",
        f"{now:,.0f} tokens a second over the last {sum(b.seconds for b in blocks):.0f} s; this run did {best:,.0f}",
        "does something else use the machine (top, nvidia-smi), or is it throttled? lamp why shows where the time goes",
        evidence=(f"{now / best:.0%} of its own best", f"data wait {blocks[-1].wait:.0%}"),
    )


def mfu_low(memory: Memory) -> Verdict | None:
    """The device idles; said only of models that are large enough to fill one."""
    facts = memory.facts
    parameters, least = MFU_LEAST.get(facts.device, (math.inf, 0.0))
    blocks = memory.last(LEAST_STEPS, MFU_S) if facts.parameters >= parameters else []
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


def _thinned(enough: list[Block], memory: Memory) -> list[Block]:
    """About 24 blocks, spread over the newest part of the run that is long enough to tell."""
    if not enough:
        return []
    found = list(memory.blocks)[-max(len(enough), 24) :]
    every = max(1, len(found) // 24)
    return found[::-every][::-1]


def _pairs(points: list[tuple[float, float]]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Each point with the one half a span later (Theil and Sen, thinned)."""
    half = len(points) // 2
    return list(zip(points, points[half:], strict=False))


def _order(values: list[float]) -> float:
    """Kendall's rank correlation with time: 1 = grows always, 0 = no order."""
    signs = [math.copysign(1, b - a) if a != b else 0 for n, a in enumerate(values) for b in values[n + 1 :]]
    return sum(signs) / max(1, len(signs))
