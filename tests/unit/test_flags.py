"""Red flags: recorded curves of healthy runs raise none, those of sick runs raise the right one; and early stopping."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamplighter.config import validated
from lamplighter.data.batch_source import entropy
from lamplighter.rundir import RunDir
from lamplighter.train.anomalies.detector import (
    EACH_BLOCK,
    EACH_STEP,
    EXPLAINS,
    OF_PAIRS,
    Detector,
    FlagChange,
    recall,
    replay,
)
from lamplighter.train.anomalies.history import Facts, repeat_share
from lamplighter.train.checkpoint import Progress
from lamplighter.watch.status import Status, alert, hear_flag, standing_flags, tell
from lamplighter.watch.time_report import flags_section

CURVES = Path(__file__).parents[1] / "recordings" / "curves"
HEALTHY = sorted(path.stem for path in CURVES.glob("healthy_*.json"))
SICK = {
    "sick_rate_too_low": ("not_learning", 100),
    "sick_rate_too_high": ("no_context", 140),
    "sick_shuffled": ("no_context", 140),
    "sick_overfitting": ("overfitting", 650),
    "sick_slow_source": ("data_wait", 480),
    "sick_collapse": ("throughput_collapsed", 620),
    "sick_sees_targets": ("too_good", 500),
    "sick_finetuning_at_rest": ("no_context", 140),
    "sick_leak": ("step_time_grows", 625),
}


def load(name: str) -> tuple[Facts, list[dict[str, Any]]]:
    """The facts of a recorded run, and its records as they were in metrics.jsonl."""
    kept = json.loads((CURVES / f"{name}.json").read_text())
    columns, tokens, mfu = kept["columns"], kept["tokens_per_step"], kept["mfu_per_token_per_s"]
    count = max(len(column) for column in columns.values() if isinstance(column, list))
    looks: dict[int, dict[str, float]] = {}
    for step, key, value in kept["looks"]:
        looks.setdefault(step, {})[key] = value
    records: list[dict[str, Any]] = []
    for n in range(count):
        row = {key: column[n] if isinstance(column, list) else column for key, column in columns.items()}
        rate = tokens / row["train/dt_ms"] * 1000
        row |= {"step": n + 1, "train/tok_per_sec": rate, "train/mfu": rate * mfu}
        extra = looks.get(n + 1, {})
        if "sys/ram_gb" in extra:
            row["sys/ram_gb"] = extra.pop("sys/ram_gb")
        records.append(row)
        if extra:
            records.append({"step": n + 1, **extra})
    return Facts(**kept["facts"]), records


def raised(changes: list[FlagChange]) -> list[tuple[str, int]]:
    return [(change.verdict.cause, change.step) for change in changes if change.up]


def run_curve(facts: Facts, losses: list[float], **more: Any) -> list[FlagChange]:
    records = [{"step": n, "train/loss": x, "train/lr": facts.peak_lr, "train/grad_norm": 0.5, "train/dt_ms": 10.0,
                "train/tok_per_sec": 1e4, "train/mfu": 0.3, "train/epoch": n / 1e4, **{k: v(n) for k, v in more.items()}}
               for n, x in enumerate(losses, 1)]  # fmt: skip
    return replay(Detector(facts), records, len(losses))


# ---------------------------------------------------------------- recorded runs


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_nothing(name: str) -> None:
    facts, records = load(name)
    assert raised(replay(Detector(facts), records, facts.steps)) == []


@pytest.mark.parametrize(("name", "expected"), SICK.items())
def test_a_sick_run_raises_the_right_flag_and_only_that_one(name: str, expected: tuple[str, int]) -> None:
    facts, records = load(name)
    detector = Detector(facts)
    changes = replay(detector, records, facts.steps)
    assert raised(changes) == [expected]
    assert list(detector.up) == [expected[0]], "it stands to the end"
    (change,) = changes
    assert change.verdict.evidence and any(c.isdigit() for c in change.verdict.why)


def test_validation_that_rises_within_the_first_pass_is_another_flag() -> None:
    """The curve of an overfitting run, as if its text had been new all the way."""
    facts, records = load("sick_overfitting")
    fresh = [
        {**record, "train/epoch": record["train/epoch"] / 100} if "train/epoch" in record else record
        for record in records
    ]
    assert raised(replay(Detector(facts), fresh, facts.steps)) == [("gap_grows", 800)]


def test_all_recordings_are_used() -> None:
    assert len(HEALTHY) >= 4
    assert set(SICK) == {path.stem for path in CURVES.glob("sick_*.json")}


@pytest.mark.parametrize("name", [*HEALTHY[:1], "sick_overfitting"])
def test_a_restart_neither_forgets_nor_repeats(name: str, tmp_path: Path) -> None:
    """Killed after step 720 with 700 durable: steps 701 to 720 are on record twice in the end."""
    facts, records = load(name)
    run = RunDir(tmp_path / "r")
    run.create()
    cut = min(720, facts.steps - 20)
    lines = [{**record, "attempt": 1} for record in records if record["step"] <= cut]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = Detector(facts)
    replay(whole, records, cut - 20)
    again = recall(facts, run, cut - 20)
    assert list(again.up) == list(whole.up)
    assert list(again.history.blocks) == list(whole.history.blocks)
    assert again.history.validations == whole.history.validations
    later = [record for record in records if record["step"] > cut - 20]
    assert raised(replay(again, later, facts.steps)) == raised(replay(whole, later, facts.steps)) == []


def test_a_flag_raised_in_lost_steps_is_shown_again_but_not_said_again(tmp_path: Path) -> None:
    facts, records = load("sick_overfitting")
    run = RunDir(tmp_path / "r")
    run.create()
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records if record["step"] <= 660))
    said = {"type": "verdict", "t": 1.0, "flag": True, "state": "waste", "cause": "overfitting", "step": 650}
    said |= {"why": "validation rose", "next": "stop"}
    run.rank_events(0).write_text(json.dumps(said) + "\n")
    detector = recall(facts, run, 600)
    assert not detector.up
    (change,) = replay(detector, [record for record in records if record["step"] > 600], 660)
    assert change.up and change.again and change.step == 650


# ---------------------------------------------------------------- rules that no recording shows

PLAIN = Facts(1000, 2000, 50, 1e-3, unigram_nats=6.0)
NOISE = np.random.default_rng(5).normal(0, 0.05, 4000)


def falling(steps: int) -> list[float]:
    """As losses fall: 6.9, then ever slower: 4.0 at step 400, 3.3 at step 1,600."""
    return [2.0 + 4.9 / (1 + n / 60) ** 0.4 + NOISE[n] for n in range(steps)]


def test_a_loss_that_rises_beyond_noise_is_named_with_the_step_before_it() -> None:
    losses = [*falling(1200), *(3.45 + 0.003 * n + NOISE[n] for n in range(600))]
    changes = run_curve(PLAIN, losses)
    assert raised(changes)[0][0] == "loss_rising"
    assert 1200 < changes[0].step < 1800
    assert raised(run_curve(PLAIN, falling(1800))) == []


def test_a_spike_is_named_in_its_steps_and_is_well_again() -> None:
    losses = falling(1000)
    losses[700] += 3  # one odd batch is none
    assert raised(run_curve(PLAIN, losses)) == []
    for n in range(800, 812):
        losses[n] += 1.5
    changes = run_curve(PLAIN, losses)
    assert [(c.up, c.verdict.cause) for c in changes] == [(True, "loss_spike"), (False, "loss_spike")]
    assert changes[0].step == 803
    assert changes[1].since_step == 803


def test_a_plateau_is_said_only_where_the_numbers_are_sure() -> None:
    flat = [max(3.5, 7 - 0.02 * n) + NOISE[n] for n in range(1500)]
    assert [cause for cause, _ in raised(run_curve(PLAIN, flat))] == ["plateau"]
    noisy = [max(3.5, 7 - 0.02 * n) + 30 * NOISE[n] for n in range(1500)]
    assert "plateau" not in dict(raised(run_curve(PLAIN, noisy)))
    low_rate = run_curve(PLAIN, flat, **{"train/lr": lambda n: 1e-4})
    assert raised(low_rate) == [], "at the end of a schedule a plateau is meant"


def test_gradients_that_explode_or_vanish_against_the_run_itself() -> None:
    loud = run_curve(PLAIN, falling(600), **{"train/grad_norm": lambda n: 0.5 if n < 500 else 20.0})
    assert raised(loud) == [("gradients_explode", 520)]
    mute = run_curve(PLAIN, falling(600), **{"train/grad_norm": lambda n: 0.5 if n < 500 else 1e-5})
    assert raised(mute) == [("gradients_vanish", 520)]
    cut = run_curve(PLAIN, falling(1000), **{"train/grad_norm": lambda n: 9.0})
    assert [cause for cause, _ in raised(cut)] == ["clipped_always"]


def test_the_first_loss_far_above_chance_is_named() -> None:
    assert raised(run_curve(PLAIN, [60.0 * math.exp(-n / 40) + 3 for n in range(300)]))[0] == ("starts_high", 20)


def test_at_chance_and_too_good() -> None:
    chance = math.log(1000)
    assert raised(run_curve(PLAIN, [chance + 0.01 * (-1) ** n for n in range(400)])) == [("not_learning", 100)]
    assert [cause for cause, _ in raised(run_curve(PLAIN, [5 * math.exp(-n / 20) for n in range(600)]))] == ["too_good"]


def test_the_band_is_said_only_of_sizes_that_it_is_known_for() -> None:
    slm = Facts(30_000, 2000, 100, 3e-4, parameters=108_489_216, unigram_nats=7.3)
    high = [7.0 + 3.3 * math.exp(-n / 50) + NOISE[n] - 0.0005 * n for n in range(700)]
    assert [cause for cause, _ in raised(run_curve(slm, high))] == ["above_band"]
    small = Facts(30_000, 2000, 100, 3e-4, parameters=10_000_000, unigram_nats=7.3)
    assert raised(run_curve(small, high)) == []


def test_a_rate_near_zero_outside_of_the_end() -> None:
    assert raised(run_curve(PLAIN, falling(60), **{"train/lr": lambda n: 1e-7})) == [("lr_zero", 20)]
    end = {"train/lr": lambda n: 1e-7 if n > 1950 else 1e-3}
    assert raised(run_curve(PLAIN, falling(2000), **end)) == []


def test_steps_that_grow_slower_and_memory_that_grows_with_them() -> None:
    slow = {"train/dt_ms": lambda n: 100 + 0.3 * n}
    leak = run_curve(PLAIN, falling(800), **slow, **{"sys/ram_gb": lambda n: 1 + n / 1000})
    assert raised(leak)[0][0] == "step_time_grows"
    assert "a leak" in leak[0].verdict.why
    alone = run_curve(PLAIN, falling(2000), **slow)
    assert alone[0].verdict.cause == "step_time_grows"
    assert alone[0].step > 2 * leak[0].step, "without memory that grows it could be a neighbour: it takes minutes"
    jump = run_curve(PLAIN, falling(2000), **{"train/dt_ms": lambda n: 200 if n < 1000 else 350})
    assert raised(jump) == [], "a jump is no growth"


def test_padding_passes_and_a_device_that_idles() -> None:
    assert raised(run_curve(PLAIN, falling(300), **{"train/pad_frac": lambda n: 0.8})) == [("padding", 60)]
    assert raised(run_curve(PLAIN, falling(300), **{"train/epoch": lambda n: n / 50})) == [("data_repeats", 260)]
    big = Facts(1000, 2000, 50, 1e-3, parameters=120_000_000, device="cuda")
    idle = {"train/mfu": lambda n: 0.015, "train/dt_ms": lambda n: 500.0}
    assert [cause for cause, _ in raised(run_curve(big, falling(400), **idle))] == ["mfu_low"]
    assert raised(run_curve(PLAIN, falling(400), **idle)) == [], "a tiny model on a CPU cannot fill it"


def test_samples_that_go_round_in_circles() -> None:
    assert repeat_share([7] * 40) == 1.0
    assert repeat_share([1, 2, 3] * 20) == 1.0
    assert repeat_share(list(range(60))) == 0.0
    assert repeat_share([1, 2, 3]) is None
    assert repeat_share([*range(30), *([5, 6] * 15)]) == pytest.approx(0.5)
    detector = Detector(PLAIN)
    replay(detector, [{"step": n, "train/loss": 3.0, "train/lr": 1e-3} for n in range(1, 301)], 300)
    assert detector.sampled(300, 0.9) == []
    (change,) = detector.sampled(300 + 1, 0.9)
    assert change.verdict.cause == "sample_degenerate"


def test_counting_tokens_gives_the_entropy() -> None:
    assert entropy(np.arange(1 << 16) % 256) == pytest.approx(math.log(256), abs=0.01)
    rng = np.random.default_rng(0)
    few = entropy(rng.integers(0, 500, 2000))
    assert few == pytest.approx(math.log(500), abs=0.03), "a small sample is corrected"


def test_every_flag_has_its_row_in_the_documents() -> None:
    text = (Path(__file__).parents[2] / "docs" / "redflags.md").read_text()
    causes = {*EACH_STEP, *EACH_BLOCK, *OF_PAIRS}
    assert {cause for cause in causes if f"| `{cause}` |" not in text} == set()
    assert set(EXPLAINS) | set().union(*EXPLAINS.values()) <= causes


def test_what_a_reader_sees_of_a_flag() -> None:
    picture = Status("r")
    event = {"type": "verdict", "t": 10.0, "flag": True, "state": "waste", "cause": "plateau", "why": "w | 1", "next": "n", "step": 40,
             "evidence": ["e"]}  # fmt: skip
    hear_flag(picture.flags, event)
    assert "plateau since step 40" in alert(picture)
    assert standing_flags({"flags": list(picture.flags.values())}) == picture.flags
    well = {"type": "well again", "t": 70.0, "cause": "plateau", "step": 90, "since_step": 40}
    rows = flags_section([event, event, well])
    assert len([row for row in rows if "plateau" in row]) == 1
    assert "step 90, then well again (50 steps, 1:00)" in rows[-2]
    assert tell(well)[0][0].startswith("well again: plateau")
    hear_flag(picture.flags, well)
    assert alert(picture) == ""
    assert "none" in flags_section([])


# ---------------------------------------------------------------- real runs


def test_patience_without_validations_is_refused() -> None:
    with pytest.raises(ValueError, match="patience counts validations"):
        validated({"eval": {"patience": 3, "every_steps": 0}})
    assert validated({"eval": {"patience": 3}}).eval.patience == 3


def test_a_validation_counts_once() -> None:
    progress = Progress().scored(10, 3.0).scored(20, 3.1).scored(20, 3.1).scored(10, 2.0)
    assert (progress.best_step, progress.since_best, progress.scored_step) == (10, 1, 20)
    assert progress.scored(30, math.nan).since_best == 2
    assert progress.scored(30, 2.9).since_best == 0
