"""The learning rate and the spending of a run as small pictures of characters. No torch, no colours.

In:  a Plan.
Out: lines; each curve has its largest and smallest value beside it and the steps below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lamplighter.plan.estimate import Plan

WIDE, HIGH = 56, 4  # in characters; each is 2 x 4 dots
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character, by column and row


def curve(values: Sequence[float], top: float, high: int = HIGH) -> list[str]:
    """Two values to a character, `top` at the upper edge."""
    wide = -(-len(values) // 2)
    cells = [[0] * wide for _ in range(high)]
    last: int | None = None
    for x, value in enumerate(values):
        y = min(4 * high - 1, max(0, round((1 - value / top) * (4 * high - 1)) if top > 0 else 4 * high - 1))
        for row in range(min(y, last if last is not None else y), max(y, last if last is not None else y) + 1):
            cells[row // 4][x // 2] |= DOTS[x % 2][row % 4]
        last = y
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]


def draw(plan: Plan) -> list[str]:
    """The rate, and what is spent by when; the budget is a line where there is one."""
    job = plan.job
    lines: list[str] = []
    if job.rate is not None:
        rate = job.rate
        lines += _picture("learning rate", _sampled(rate.lr_at, job.steps), rate.peak, f"{rate.peak:.1e}", job.steps)
    if job.usd_per_hour is not None and plan.usd:
        price = plan.usd / job.steps
        top = max(plan.usd, job.budget_usd or 0.0)
        lines += _picture("spending", _sampled(lambda step: price * step, job.steps), top, f"${top:,.2f}", job.steps)
        if job.budget_usd is not None:
            lines.append(f"{'':<14}{_budget_words(job.budget_usd, plan.usd, job.steps)}")
    return lines


def _sampled(at: Callable[[int], float], steps: int) -> list[float]:
    return [at(max(1, round(steps * (x + 1) / (2 * WIDE)))) for x in range(2 * WIDE)]


def _picture(name: str, values: list[float], top: float, most: str, steps: int) -> list[str]:
    rows = curve(values, top)
    marks = [most, *[""] * (len(rows) - 2), "0"]
    names = [name, *[""] * (len(rows) - 1)]
    lines = [f"  {n:<13}{mark:>9} ┤{row}" for n, mark, row in zip(names, marks, rows, strict=True)]
    foot = f"{steps:,} steps"
    return [*lines, f"{'':<24} └1{foot:>{WIDE - 1}}"]


def _budget_words(budget: float, usd: float, steps: int) -> str:
    if usd <= budget:
        return f"the budget of ${budget:,.2f} is not reached; ${budget - usd:,.2f} are left"
    return f"the budget of ${budget:,.2f} ends at step {int(steps * budget / usd):,}, {budget / usd:.0%} of the run"
