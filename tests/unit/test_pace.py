"""Time left and the end against the budget: from what the run has measured itself, validations and saves to come included."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import pytest

from lamplighter import report
from lamplighter.config import Budget, Eval, Save
from lamplighter.slot import Slot
from lamplighter.train.pace import Course, Kind, Pace, Smaller
from lamplighter.watch.status import Rate, Status, line
from lamplighter.watch.trainer import with_settings


def course(steps: int, **changed: Any) -> Course:
    given = {"every": 0, "sample": 0, "save": 0, "every_s": 0.0, "planned": 0.001, "held_out": 2.0, **changed}
    looks = Eval(every_steps=given["every"], sample_every_steps=given["sample"], sample_tokens=20)
    save = Save(every_steps=given["save"], every_s=given["every_s"])
    return Course(steps, looks, save, given["planned"], held_out_steps=given["held_out"])


def test_what_is_to_come_counts_the_last_step_once() -> None:
    there = course(100, every=30, sample=50, save=25)
    assert [there.to_come("validation", step) for step in (0, 29, 30, 90, 99, 100)] == [4, 4, 3, 1, 1, 0]
    assert [there.to_come("sample", step) for step in (0, 50, 99, 100)] == [2, 1, 1, 0]
    assert there.to_come("save", 0) == 4
    assert [step for step in range(1, 101) if there.at("validation", step)] == [30, 60, 90, 100]
    assert course(100, held_out=0.0).to_come("validation", 0) == 0
    assert course(100).to_come("sample", 0) == 0, "eval.sample_every_steps 0: none at the end either"


@dataclass
class Simulated:
    """A run whose parts take known times, with some noise; killed and resumed where `resumes` says."""

    steps: int
    step_s: float
    took: dict[Kind, float]
    every: int
    sample: int = 0
    save: int = 0
    noise: float = 0.1
    resumes: tuple[int, ...] = ()

    def told(self, kind: Kind) -> dict[str, Any]:
        """The event that a run leaves behind."""
        if kind == "save":
            return {"type": "checkpoint", "blocked_s": self.took[kind]}
        return {"type": "phase", "name": {"validation": "evaluate"}.get(kind, kind), "seconds": self.took[kind]}

    def errors(self) -> list[float]:
        """The error of the time left after every step from the tenth measured one on, as a share of the truth."""
        rng = random.Random(self.steps)
        there = course(self.steps, every=self.every, sample=self.sample, save=self.save, planned=self.step_s / 40)
        pace, records, events, now = Pace(there), list[Any](), list[Any](), 0.0
        told: list[tuple[float, float]] = []
        for step in range(1, self.steps + 1):
            if step in self.resumes:
                pace = Pace(there)
                pace.recall(records, events)
            seconds = self.step_s * rng.uniform(1 - self.noise, 1 + self.noise)
            now += seconds
            pace.step(seconds)
            records.append({"train/dt_ms": 1000 * seconds})
            kinds: tuple[Kind, ...] = ("save", "validation", "sample")
            for kind in kinds:
                if there.at(kind, step):
                    now += self.took[kind]
                    pace._took(kind, self.took[kind])
                    events.append(self.told(kind))
            if step >= 10:
                told.append((now, pace.left_s(step)))
        return [abs(left - (now - then)) / (now - then) for then, left in told if now - then > 3 * self.step_s]


def took(save: float, validation: float, sample: float) -> dict[Kind, float]:
    return {"save": save, "validation": validation, "sample": sample}


RUNS = [
    Simulated(200, 0.05, took(0.0, 0.04, 0.0), 50),
    Simulated(600, 0.1, took(0.02, 0.07, 0.05), 100, 200, 100),
    Simulated(60, 27.0, took(2.0, 20.0, 3.0), 20, 30, 20),  # steps over 15 s
    Simulated(1000, 0.01, took(0.3, 0.01, 0.2), 100, 500, 250),
    Simulated(300, 0.2, took(0.0, 0.15, 0.0), 25, resumes=(150,)),
    Simulated(300, 0.2, took(0.5, 0.15, 0.1), 60, 100, 50, resumes=(40, 41, 90, 200)),
    Simulated(120, 1.5, took(4.0, 1.1, 0.5), 10, 40, 10),  # saves that the steps wait for
    Simulated(80, 16.0, took(0.0, 12.0, 8.0), 8, 16, resumes=(30,)),
    Simulated(2000, 0.003, took(0.0, 0.002, 0.0), 500, 0, 500, noise=0.5),
    Simulated(400, 0.08, took(0.1, 0.05, 0.3), 400, 50, 200, noise=0.3, resumes=(399,)),
]


@pytest.mark.parametrize("run", RUNS, ids=range(10))
def test_the_time_left_is_within_a_fifth_from_the_tenth_step_on(run: Simulated) -> None:
    errors = run.errors()
    assert max(errors) < 0.2, f"worst {max(errors):.0%}, mean {sum(errors) / len(errors):.0%}"


# ---------------------------------------------------------------- what is said


def training(**values: Any) -> Status:
    slot = Slot(pid=1, phase="train", steps=100, left_ns=time.monotonic_ns(), **values)
    return Status("r", slot=slot)


def test_the_time_left_falls_while_a_long_step_goes_on_and_no_further() -> None:
    status = training(step=10, left_s=900.0, left_now_s=20.0)
    assert status.slot is not None and status.eta_s == pytest.approx(900, abs=1)
    status.slot.left_ns -= int(12e9)
    assert status.eta_s == pytest.approx(888, abs=1)
    status.slot.left_ns -= int(600e9)
    assert status.eta_s == pytest.approx(880, abs=1), "the step is late: what comes after it is still to come"


def test_the_time_left_is_there_during_a_validation_too() -> None:
    status = training(step=20, left_s=300.0, left_now_s=8.0)
    assert status.slot is not None
    status.slot.phase, status.slot.done, status.slot.total = "train > evaluate", 3, 4
    assert status.eta_s == pytest.approx(300, abs=1), "it was taken for the end of the validation"
    assert "5:00 left" in line(status) or "4:59 left" in line(status)


def test_work_in_units_of_over_fifteen_seconds_has_a_rate() -> None:
    rate, now = Rate(), 0.0
    for tick in range(400):
        now = tick * 0.25
        rate.add("probes", now, int(now / 20))
    assert rate.per_s == pytest.approx(1 / 20, rel=0.3)


# ---------------------------------------------------------------- the budget


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(report, "verdict", lambda verdict, **more: found.append((verdict, more)))
    monkeypatch.setattr(report, "event", lambda kind, **more: found.append((kind, more)))
    return found


def paced(budget: Budget, steps: int = 1000, step_s: float = 10.0, measured: int = 10) -> Pace:
    smaller = (Smaller("--model.layers 5", "5M", 0.8), Smaller("--model.layers 3", "3M", 0.5))
    pace = Pace(course(steps, held_out=0.0), budget, smaller)
    for _ in range(measured):
        pace.step(step_s)
    return pace


def test_a_budget_that_will_not_do_is_said_at_the_tenth_step_with_what_would(said: list[Any]) -> None:
    budget = Budget(usd=2.0, usd_per_hour=1.0)  # 2 of the 2.78 hours that it takes
    paced(budget, measured=9).check_budget(9, 90.0)
    assert not said, "nine steps are too few to say so"
    pace = paced(budget)
    pace.check_budget(10, 100.0)
    pace.check_budget(11, 110.0)
    ((verdict, more),) = said
    assert more == {"flag": True, "step": 10} and verdict.cause == "budget_short"
    assert verdict.why.endswith("the run needs 2.78 h and $2.78; the budget is $2.00, 2.00 h: 0.78 h and $0.78 short")
    assert "--train.steps 698" in verdict.next and "--model.layers 3 (3M)" in verdict.next
    assert "--budget.usd 2.92" in verdict.next


def test_it_is_well_again_when_the_steps_get_faster(said: list[Any]) -> None:
    pace = paced(Budget(hours=2.0))
    pace.check_budget(10, 100.0)
    for _ in range(64):
        pace.step(1.0)
    pace.check_budget(74, 164.0)
    assert [kind for kind, _ in said[1:]] == ["well again"]
    assert said[1][1] == {"cause": "budget_short", "step": 74, "since_step": 10}


def test_a_budget_that_will_do_is_not_spoken_of(said: list[Any]) -> None:
    paced(Budget(hours=3.0)).check_budget(10, 100.0)
    paced(Budget()).check_budget(10, 100.0)
    assert not said


def test_the_line_says_what_it_will_have_cost_from_the_tenth_step_on() -> None:
    status = training(step=12, left_s=3500.0, measured=9)
    status.budget, status.spent_s = Budget(usd=1.0, usd_per_hour=1.8), 100.0
    assert "at the end" not in line(status)
    assert status.slot is not None
    status.slot.measured = 10
    assert "$0.0500 of $1.00, $1.80 at the end" in line(status)
    assert status.short_s == pytest.approx(1600, abs=2)


def test_the_command_to_go_on_has_the_new_budget_instead_of_the_old_one() -> None:
    command = "lamp train --run 'my run' --budget.usd 0.5 --budget.usd_per_hour 2 --budget.usd=0.6"
    assert (
        with_settings(command, "--budget.usd 2") == "lamp train --run 'my run' --budget.usd_per_hour 2 --budget.usd 2"
    )
    assert Budget(usd=1.0, usd_per_hour=2.0, hours=3.0).enough_for(7200) == "--budget.usd 4.2 --budget.hours 2.1"
