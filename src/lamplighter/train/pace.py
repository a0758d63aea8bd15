"""How long a run still takes, from the steps, validations, samples and saves that it has measured itself.

In:  what each of them took, in this attempt and (until there is enough of it) in those before; how many are still to come.
Out: the seconds left, in the slot, so that whoever looks says the same; a verdict where the budget will not do.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lamplighter import report
from lamplighter.config import Budget, Eval, Save
from lamplighter.report import Verdict
from lamplighter.rundir import dollars
from lamplighter.slot import SURE_STEPS

Kind = Literal["save", "validation", "sample"]
_KINDS: tuple[Kind, ...] = ("save", "validation", "sample")  # in their order after a step

_RECENT_STEPS = 64
_RECENT = 5  # of validations, samples and saves
_ENOUGH = 5  # steps of this attempt, from which on those of the attempts before no longer count
_FORWARD_SHARE = 0.35  # of a step's time, for as many tokens
_TOKEN_SHARE = 0.02  # of a step's time, for one token of a sample: a guess until the first one is measured
_OVER, _UNDER = 1.02, 0.98  # of the budget: a forecast on the edge does not raise and lower its flag at every step
_SAFE_SHARE = 0.97  # of what is left of the budget that is offered


@dataclass(frozen=True)
class Smaller:
    """A smaller model by the plan's arithmetic: how to ask for it, and its time as a share of this one's."""

    settings: str
    what: str
    share: float


@dataclass(frozen=True)
class Course:
    """What a run does besides its steps, and when."""

    steps: int
    eval: Eval
    save: Save
    planned_step_s: float
    held_out_steps: float = 0.0  # what a validation looks at, in steps' worth of tokens; 0 = nothing is held out

    def to_come(self, kind: Kind, step: int) -> int:
        """How many at later steps."""
        every = {
            "save": self.save.every_steps,
            "validation": self.eval.every_steps,
            "sample": self.eval.sample_every_steps,
        }[kind]
        if (kind == "sample" and not every) or (kind == "validation" and not self.held_out_steps):
            return 0
        in_between = self.steps // every - step // every if every else 0
        at_the_end = step < self.steps and not (every and self.steps % every == 0)
        return in_between + at_the_end

    def at(self, kind: Kind, step: int) -> bool:
        """Whether it is due at this very step."""
        return self.to_come(kind, step - 1) > self.to_come(kind, step)

    def guess_s(self, kind: Kind, step_s: float) -> float:
        """Until one was measured."""
        if kind == "validation":
            return self.held_out_steps * _FORWARD_SHARE * step_s
        return self.eval.sample_tokens * _TOKEN_SHARE * step_s if kind == "sample" else 0.0


@dataclass
class Pace:
    """What was measured, and what follows from it."""

    course: Course
    budget: Budget = field(default_factory=Budget)
    smaller: tuple[Smaller, ...] = ()
    before: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))  # steps of earlier attempts
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    others: dict[Kind, deque[float]] = field(default_factory=dict)
    measured: int = 0
    short_since: int = 0  # the step since which the budget will not do; 0: it will

    def recall(self, metrics: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> None:
        """What the attempts before have measured."""
        for record in metrics:
            if isinstance(took_ms := record.get("train/dt_ms"), int | float):
                self.before.append(took_ms / 1000)
        kinds: dict[str, Kind] = {"evaluate": "validation", "sample": "sample"}
        for event in events:
            seconds, kind = event.get("seconds"), kinds.get(str(event.get("name")))
            if event.get("type") == "phase" and kind is not None and isinstance(seconds, int | float):
                self._took(kind, float(seconds))
            elif event.get("type") == "checkpoint" and isinstance(waited := event.get("blocked_s"), int | float):
                self._took("save", float(waited))

    def step(self, seconds: float) -> None:
        """One more was made, its wait for data and its record included."""
        self.steps.append(seconds)
        self.measured += 1

    @contextlib.contextmanager
    def timing(self, kind: Kind, step: int) -> Iterator[None]:
        """Something that the steps wait for."""
        started = time.monotonic()
        after = [one for one in _KINDS[_KINDS.index(kind) + 1 :] if self.course.at(one, step)]
        self.show(step, (kind, *after))
        yield
        self._took(kind, time.monotonic() - started)

    def _took(self, kind: Kind, seconds: float) -> None:
        self.others.setdefault(kind, deque(maxlen=_RECENT)).append(seconds)

    @property
    def step_s(self) -> float:
        """On average, of the latest; before the first one as it was in earlier attempts, else as planned."""
        known = self.steps if len(self.steps) >= _ENOUGH or not self.before else self.before
        return sum(known) / len(known) if known else self.course.planned_step_s

    def usual_s(self, kind: Kind) -> float:
        known = self.others.get(kind)
        return sum(known) / len(known) if known else self.course.guess_s(kind, self.step_s)

    def left_s(self, step: int) -> float:
        """From the end of a step to the end of the run: steps, validations, samples and saves to come."""
        others = sum(self.course.to_come(kind, step) * self.usual_s(kind) for kind in _KINDS)
        left = (self.course.steps - step) * self.step_s + others
        if self.course.save.every_s:
            left += left / self.course.save.every_s * self.usual_s("save")
        return left

    def show(self, step: int, first: Sequence[Kind] = ()) -> None:
        """Into the slot: what is left from here, and how much of it is what is going on now (`first`, else a step)."""
        waits_s = [self.usual_s(kind) for kind in first]
        report.number(
            left_s=self.left_s(step) + sum(waits_s),
            left_now_s=waits_s[0] if waits_s else self.step_s,
            left_ns=time.monotonic_ns(),
            measured=self.measured,
        )

    # ---------------------------------------------------------------- against the budget

    def check_budget(self, step: int, spent_s: float) -> None:
        """From the tenth measured step on: said once when the run will not end within its budget, and once when it will."""
        limit_s = self.budget.left_s(0.0)
        if self.measured < SURE_STEPS or math.isinf(limit_s) or step >= self.course.steps:
            return
        end_s = spent_s + self.left_s(step)
        if end_s > _OVER * limit_s and not self.short_since:
            self.short_since = step
            report.verdict(self._shortfall(step, spent_s, end_s), flag=True, step=step)
        elif end_s < _UNDER * limit_s and self.short_since:
            report.event("well again", cause="budget_short", step=step, since_step=self.short_since)
            self.short_since = 0

    def _shortfall(self, step: int, spent_s: float, end_s: float) -> Verdict:
        limit_s, budget = self.budget.left_s(0.0), self.budget
        of = f"{dollars(budget.usd)}, " if budget.usd is not None else ""
        why = (
            f"at the pace of {self.measured} measured steps the run needs {_cost(budget, end_s)};"
            f" the budget is {of}{_hours(limit_s)}: {_cost(budget, end_s - limit_s)} short"
        )
        fits = self.steps_that_fit(step, spent_s)
        ways = [f"--train.steps {fits} ({fits / self.course.steps:.0%} of them)"] if fits > step else []
        if smaller := self.size_that_fits(end_s):
            ways.append(f"a new run with {smaller.settings} ({smaller.what})")
        ways.append(budget.enough_for(end_s))
        return Verdict("waste", "budget_short", why, "what would fit: " + ", or ".join(ways))

    def steps_that_fit(self, step: int, spent_s: float) -> int:
        """In what is left of the budget, validations and saves included."""
        each_s = self.left_s(step) / max(1, self.course.steps - step)
        return min(
            self.course.steps, step + int(_SAFE_SHARE * self.budget.left_s(spent_s) / each_s) if each_s else step
        )

    def size_that_fits(self, whole_s: float) -> Smaller | None:
        """The largest model that would have ended within the budget, had the run begun with it."""
        limit_s = _SAFE_SHARE * self.budget.left_s(0.0)
        return next((one for one in self.smaller if one.share * whole_s <= limit_s), None)


def _cost(budget: Budget, seconds: float) -> str:
    price = f" and {dollars(budget.spent_usd(seconds))}" if budget.usd_per_hour is not None else ""
    return f"{_hours(seconds)}{price}"


def _hours(seconds: float) -> str:
    return (
        f"{seconds / 3600:.2f} h"
        if seconds >= 360
        else f"{seconds / 60:.1f} min"
        if seconds >= 60
        else f"{seconds:.1f} s"
    )
