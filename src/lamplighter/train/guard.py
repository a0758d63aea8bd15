"""Verdicts on numbers that cannot wait: non-finite, warm-up, long runs, budget. Pure functions; trends are in anomalies/.

In:  losses, gradient norms, the schedule, the money.
Out: verdicts in the form of every other verdict (state, cause, why, next, action); the loop acts on them.
"""

from __future__ import annotations

import math

from lamplighter import report
from lamplighter.config import Budget, Run, Save
from lamplighter.config.recipe import misfits
from lamplighter.errors import BadConfig
from lamplighter.report import Verdict
from lamplighter.rundir import dollars
from lamplighter.schedule import Schedule

_LONG_RUN_S = 2 * 3600
WARMUP_SHARE = 0.30
SKIPS, SKIP_WINDOW = 3, 100  # so many bad batches within so many steps are skipped before it is rolled back


def check_finite(step: int, loss: float, grad_norm: float, samples: list[int], module: str = "") -> Verdict | None:
    """Before the optimizer step: a number that is not finite must never reach the weights."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return None
    first = f", first in {module}" if module else ""
    what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {grad_norm}"
    return Verdict(
        "diverged",
        "nan_batch",
        f"{what} at step {step} (windows {_some(samples)}{first}); the weights were not touched",
        "look at that data; lower train.lr; resume goes on from the last good checkpoint",
        "stop",
        evidence=(f"loss {loss}", f"grad_norm {grad_norm}"),
        culprit={"step": step, "item": samples[:8], "module": module},
    )


def check_weights(step: int, tensor: str | None) -> Verdict | None:
    """Weights that are not finite are never saved over good ones."""
    if tensor is None:
        return None
    return Verdict(
        "diverged",
        "nan_weights",
        f"after step {step} the weights of {tensor} are not finite; they were not saved",
        "lower train.lr; resume goes on from the last good checkpoint",
        "stop",
        culprit={"step": step, "module": tensor},
    )


def _some(samples: list[int]) -> str:
    return ", ".join(map(str, samples[:6])) + (", ..." if len(samples) > 6 else "")


def explain_schedule(schedule: Schedule) -> None:
    """A low rate at step 1 is warm-up, and is said to be; too much of it is warned about."""
    share = schedule.warmup / schedule.steps
    if share > 1:
        raise BadConfig(
            f"warm-up of {schedule.warmup} steps never ends in a run of {schedule.steps}",
            "both are counted in optimizer steps; the peak rate would never be reached",
            f"--train.warmup_steps {max(1, schedule.steps // 20)}",
        )
    if schedule.warmup > 1:
        report.note(
            f"learning rate: {schedule.lr_at(1):.2e} at step 1 is warm-up; {schedule.peak:.2e} from step {schedule.warmup}"
            f" ({share:.1%} of the run, counted in optimizer steps), then {schedule.shape}"
        )
    if share > WARMUP_SHARE and schedule.warmup > max(1, schedule.steps // 20):
        report.warn(
            f"warm-up takes {share:.0%} of the run ({schedule.warmup} of {schedule.steps} optimizer steps);"
            f" under 10 % is usual: --train.warmup_steps {max(1, schedule.steps // 20)}"
        )


def warn_misfits(run: Run, flops_per_token: float, steps: int, step_tokens: float) -> None:
    """Batch, rate and steps that do not fit each other."""
    train = run.train
    if run.model.init_from is None:
        for words in misfits(
            optimizer=train.optimizer, lr=train.lr, batch_size=train.batch_size, flops_per_token=flops_per_token,
            steps=steps, step_tokens=step_tokens,
        ):  # fmt: skip
            report.warn(words)


def refuse_long_runs(save: Save, preset: str | None, expected_s: float, steps: int, force: bool) -> None:
    """No save due, or a toy preset, in a run of hours: refused unless forced."""
    if expected_s < _LONG_RUN_S or force:
        return
    hours = f"the run is expected to last {expected_s / 3600:.1f} hours"
    by_steps = 0 < save.every_steps < steps
    by_time = 0 < save.every_s < expected_s
    if not by_steps and not by_time:
        raise BadConfig("no save is due during this run", hours, "set save.every_s 600, or insist with --force")
    if preset == "demo":
        raise BadConfig("the demo preset is a toy", hours, "choose --preset slm, or insist with --force")


def budget_reached(budget: Budget, spent_s: float, save_s: float, step_s: float) -> Verdict | None:
    """Stop while there is still time for one more step's worth and the save itself."""
    reserve_s = 2 * save_s + 2 * step_s + 0.5
    left_s = budget.left_s(spent_s)
    if left_s > reserve_s:
        return None
    usd = f", {dollars(budget.spent_usd(spent_s))} of {dollars(budget.usd)}" if budget.usd is not None else ""
    return Verdict(
        "waste",
        "budget",
        f"the budget is nearly spent ({spent_s:,.0f} s{usd}); {left_s:.1f} s left, a save takes {save_s:.1f} s",
        "raise budget.usd or budget.hours and run the same command again to go on",
        "stop",
    )
