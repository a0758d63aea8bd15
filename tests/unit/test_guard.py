"""Guard: alarms that fire when they should and stay silent when they should."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lamplighter.config import Budget, Run, validated
from lamplighter.errors import BadConfig
from lamplighter.train import guard
from lamplighter.train.optimizers import schedule


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_non_finite_numbers_name_the_step_and_the_samples(loss: float, norm: float) -> None:
    verdict = guard.check_finite(7, loss, norm, [3, 9, 12])
    assert verdict is not None
    assert verdict.state == "diverged"
    assert "step 7" in verdict.why
    assert "3, 9, 12" in verdict.why
    assert guard.check_finite(7, 1.0, 1.0, [3]) is None


def test_long_runs_need_saves_and_no_toys() -> None:
    run = validated({"save": {"every_steps": 0, "every_s": 0}})
    with pytest.raises(BadConfig, match="no save"):
        guard.refuse_long_runs(run.save, None, 3 * 3600, 10_000, force=False)
    guard.refuse_long_runs(run.save, None, 3 * 3600, 10_000, force=True)
    guard.refuse_long_runs(run.save, None, 3600, 10_000, force=False)
    with pytest.raises(BadConfig, match="toy"):
        guard.refuse_long_runs(Run().save, "demo", 3 * 3600, 10_000, force=False)
    guard.refuse_long_runs(Run().save, "slm", 3 * 3600, 10_000, force=False)


def test_the_budget_leaves_time_for_the_save() -> None:
    budget = Budget(usd=1.0, usd_per_hour=1.0)
    assert guard.budget_reached(budget, 3500, save_s=10, step_s=1) is None
    verdict = guard.budget_reached(budget, 3580, save_s=10, step_s=1)
    assert verdict is not None
    assert verdict.action == "stop"
    assert guard.budget_reached(Budget(), 1e9, save_s=10, step_s=1) is None


def test_the_rate_is_a_pure_function_of_the_optimizer_step() -> None:
    plan = schedule(replace(Run().train, lr=1e-3, warmup_steps=10), 110)
    assert plan.lr_at(1) == pytest.approx(1e-4)
    assert plan.lr_at(10) == pytest.approx(1e-3)
    assert plan.lr_at(60) == pytest.approx(1e-3 * (0.1 + 0.9 * 0.5))
    assert plan.lr_at(110) == pytest.approx(1e-4)
    assert all(plan.lr_at(n) > plan.lr_at(n + 1) for n in range(10, 110))
    constant = schedule(replace(Run().train, schedule="constant", warmup_steps=0), 50)
    assert {constant.lr_at(n) for n in range(1, 51)} == {3e-4}
