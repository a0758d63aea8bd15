"""The panels of a run, each with what is normal there, what was seen in this run, and which red flags watch it.

In:  the columns of a run and what is known of it.
Out: for each panel that has numbers: its curves, its unit, and three short texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamplighter.dash.machine import machine_panels
from lamplighter.dash.series import Floats, RunSeries


@dataclass(frozen=True)
class Panel:
    """One chart: its curves by their names in metrics.jsonl."""

    id: str
    title: str
    curves: tuple[str, ...]
    unit: str = ""
    flags: tuple[str, ...] = ()
    scale: float = 1.0
    by: str = ""  # the x that it always has, whatever the page shows


PANELS = (
    Panel("loss", "Loss", ("train/loss", "eval/val_loss"), "nats per token",
          ("not_learning", "no_context", "above_band", "too_good", "loss_rising", "loss_spike", "plateau", "overfitting", "gap_grows", "starts_high")),
    Panel("margin", "Reward margin", ("train/reward_margin", "eval/reward_margin"), "chosen - rejected", ("margin_negative",)),
    Panel("rewards", "Rewards", ("train/reward_chosen", "train/reward_rejected", "eval/reward_chosen", "eval/reward_rejected"), "beta x (log p - reference)", ("chosen_falls",)),
    Panel("preferred", "Pairs as in the data", ("train/reward_accuracy", "eval/reward_accuracy"), "% of the pairs", (), 100.0),
    Panel("logps", "Log-probability of the answers", ("train/logp_chosen", "train/logp_rejected", "eval/logp_chosen", "eval/logp_rejected"), "nats an answer", ()),
    Panel("mfu", "MFU", ("train/mfu",), "% of the peak", (), 100.0),
    Panel("lr", "Learning rate", ("train/lr",), "", ("lr_zero",)),
    Panel("iter", "Iterations", ("train/iter",), "steps by the clock", (), by="wall"),
    Panel("dt", "Step time", ("train/dt_ms",), "ms", ()),
    Panel("tok", "Tokens per second", ("train/tok_per_sec",), "tokens/s", ()),
    Panel("grad", "Gradient norm", ("train/grad_norm",), "", ("gradients_explode", "gradients_vanish", "clipped_always")),
    Panel("memory", "Memory", ("sys/ram_gb", "sys/gpu_mem_gb"), "GB", ()),
    Panel("wait", "Data wait", ("train/data_wait_ms",), "ms a step", ("data_wait",)),
    Panel("pad", "Padding", ("train/pad_frac",), "% of the positions", ("padding",), 100.0),
    Panel("bpb", "Bits per byte", ("eval/val_bpb",), "validation", ()),
    Panel("cost", "Cost", ("cost/usd",), "$", ()),
    Panel("repeat", "Repetition in samples", ("eval/sample_repeat",), "% of the tokens", ("sample_degenerate",), 100.0),
)  # fmt: skip


_TITLES = {"time/steps_per_s": "Steps per second"}
_TWICE = ("eval/iter", "eval/val_ppl", "eval/train_loss")  # in the panels above already, in another form


def panels_of(series: RunSeries, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those that have numbers; evaluations, costs and times that the run reports get panels of their own."""
    known = {*series.columns, *series.scores}
    found = []
    for panel in PANELS:
        curves = [name for name in panel.curves if name in known]
        if curves:
            found.append({**vars(panel), "curves": curves, "flags": list(panel.flags), **explain(panel, series, facts)})
    named = {name for panel in PANELS for name in panel.curves}
    for name in sorted(known - named):
        if name.startswith(("eval/", "cost/", "time/")) and name not in _TWICE:
            panel = Panel(name, _TITLES.get(name, name), (name,))
            found.append({**vars(panel), "curves": [name], "flags": [], **explain(panel, series, facts)})
    return [*found, *machine_panels(series)]


def explain(panel: Panel, series: RunSeries, facts: Mapping[str, Any]) -> dict[str, str]:
    """What is normal, and what was seen, in this run's own numbers."""
    y = series.finite(panel.curves[0])
    seen = _seen(panel, series, y)
    return {"normal": _normal(panel.id, facts, y), "seen": seen}


def _seen(panel: Panel, series: RunSeries, y: Floats) -> str:
    if not len(y):
        return "Nothing finite yet."
    tail = y[-max(1, len(y) // 20) :] * panel.scale
    first, last = y[0] * panel.scale, float(np.median(tail))
    words = f"From {_short(first)} to {_short(last)} (median of the newest twentieth); lowest {_short(y.min() * panel.scale)}, highest {_short(y.max() * panel.scale)}."
    if panel.id == "loss" and series.scores.get("eval/val_loss"):
        steps, losses = zip(*sorted(series.scores["eval/val_loss"].items()), strict=True)
        best = int(np.nanargmin(losses)) if not all(math.isnan(one) for one in losses) else 0
        words += f" Validation is best at step {steps[best]}: {losses[best]:.3f}."
    spread = (
        float(np.percentile(y, 90) - np.percentile(y, 10)) / abs(float(np.median(y)))
        if len(y) > 20 and np.median(y)
        else 0.0
    )
    if panel.id in ("dt", "tok") and spread > 0.5:
        words += f" It varies by {spread:.0%}: something else uses the machine, or the data is uneven."
    return words


def _normal(panel: str, facts: Mapping[str, Any], y: Floats) -> str:
    config = facts.get("config") or {}
    train, steps = config.get("train", {}), facts.get("steps") or 0
    floor, vocabulary = facts.get("floor"), facts.get("vocab_size")
    if panel == "loss" and train.get("objective") == "dpo":
        return f"Of preference pairs: it begins at ln 2 = {math.log(2):.3f}, where both answers are alike, and falls as the margin grows. Validation stays above training; a gap that grows means that pairs are learned by heart."
    if panel == "loss":
        begin = (
            f"A new model begins near ln(vocabulary) = {math.log(vocabulary):.2f} and falls fast at first, then slowly. "
            if vocabulary and vocabulary > 1 and not config.get("model", {}).get("init_from")
            else ""
        )
        bound = f"It cannot go below {floor:.3f} on this text (its entropy). " if isinstance(floor, float) else ""
        return f"{begin}{bound}Validation stays a little above training; a gap that grows means that text is learned by heart."
    if panel == "lr":
        warm, peak = train.get("warmup_steps"), train.get("lr")
        shape = f"up to {peak:g} " if isinstance(peak, int | float) else "up to its peak "
        shape += f"in {warm} steps" if warm is not None else "in the first 5 % of the run (at most 2,000 steps)"
        return f"Rises {shape}, then {_fall_of_rate(train, int(steps))}. A low rate at the start is warm-up."
    texts = {
        "margin": "Zero at the first step (the model is its own reference), then it grows; validation a little below training. A margin that stays below zero: the answers may be the wrong way round.",
        "rewards": "Both begin at zero. Chosen rises or stays near zero, rejected falls. Often both fall a little; if chosen falls far, the model unlearns the good answers too: a lower rate, or a higher train.dpo_beta.",
        "preferred": "Begins near zero (a tie counts as wrong) or 50 %, then rises; 60 to 90 % is usual. Nearly 100 % from the first steps on: something beside the answers tells the pairs apart, such as their length.",
        "logps": "Summed over an answer, so long answers are lower. Rejected falls; chosen should stay about where it began.",
        "mfu": "30 to 50 % is good on a GPU, 10 to 70 % on a CPU; it is 6 x parameters + attention, divided by what the device can do.",
        "iter": "A straight line: as many steps in each minute. A flat stretch is a save, a validation, a pause or a restart.",
        "dt": "Even, with single peaks where a checkpoint is saved or validated. The first step is slower.",
        "tok": "Even. A fall that stays means heat, another process, slow data or swapped memory.",
        "grad": f"Falls and then stays below the clipping norm ({train.get('grad_clip', 1.0)}); single peaks are cut.",
        "memory": "Flat after the first steps. A slope that does not end is a leak.",
        "wait": "Near zero: the next batch is ready before it is wanted.",
        "pad": "Zero for text; under 10 % for packed instruction rows.",
        "cost": "A straight line, at the price of budget.usd_per_hour; steeper is not possible, a step upwards is a pause that was paid for.",
        "repeat": "Under 50 %: the share of a sample that is one token, or a cycle of up to 8, again and again.",
        "bpb": "As the validation loss, but the same for every tokenizer: this is what may be compared between runs.",
    }
    return texts.get(panel, "")


def _fall_of_rate(train: Mapping[str, Any], steps: int) -> str:
    """What the rate does after its warm-up, by the schedule of this run."""
    end = f"step {steps}" if steps else "the end"
    if train.get("schedule") == "constant":
        return f"stays to {end}"
    if train.get("schedule") == "wsd":
        share = train.get("decay_ratio")
        if not steps or not isinstance(share, int | float):
            return f"stays, and at last falls in a straight line to {end}"
        return f"stays to step {steps - round(share * steps)}, and falls in a straight line to {end}"
    return f"falls along a cosine to {end}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
