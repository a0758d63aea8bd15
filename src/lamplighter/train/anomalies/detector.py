"""Which red flags are up: each is said once when it goes up, stays while it holds, and is well again when it does not.

In:  the record of each step, validations, samples; after a restart the records of metrics.jsonl.
Out: verdicts and "well again" events through report; the flags that stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lamplighter import read_back, report
from lamplighter.report import Verdict
from lamplighter.rundir import RunDir, read_last_lines
from lamplighter.train.anomalies import learning, preferences, throughput
from lamplighter.train.anomalies.history import Facts, History

_Rule = Callable[[History], Verdict | None]
_RECALL_BYTES = 1 << 26  # some 150,000 steps
_WELL_BLOCKS = 5  # a flag comes down after so long without its cause,
LONG_STEPS, LONG_SHARE = 200, 0.1  # and is said again only after it was well for this long

EACH_STEP: dict[str, _Rule] = {"lr_zero": learning.rate_near_zero, "loss_spike": learning.spike}
EACH_BLOCK: dict[str, _Rule] = {
    "starts_high": learning.starts_high,
    "not_learning": learning.not_learning,
    "too_good": learning.too_good,
    "loss_rising": learning.loss_rising,
    "gradients_explode": learning.gradients_explode,
    "overfitting": learning.overfitting,
    "gap_grows": learning.gap_grows,
    "no_context": learning.no_context,
    "gradients_vanish": learning.gradients_vanish,
    "clipped_always": learning.clipped_always,
    "above_band": learning.above_band,
    "plateau": learning.plateau,
    "data_repeats": learning.data_repeats,
    "sample_degenerate": learning.degenerate_samples,
    "data_wait": throughput.data_wait,
    "step_time_grows": throughput.step_time_grows,
    "throughput_collapsed": throughput.throughput_collapsed,
    "mfu_low": throughput.mfu_low,
    "padding": throughput.padding,
}
OF_PAIRS: dict[str, _Rule] = {  # in place of those of the same name; what is about the loss of tokens is left out
    "not_learning": preferences.nothing_preferred,
    "margin_negative": preferences.margin_negative,
    "chosen_falls": preferences.chosen_falls,
    "too_good": preferences.told_apart_at_once,
}
_OF_TOKENS = {"starts_high", "no_context", "above_band", "plateau", "data_repeats", "loss_rising"}
EXPLAINS: dict[str, set[str]] = {  # where one stands, those that follow from it are not said as well
    "lr_zero": {"not_learning", "no_context", "plateau"},
    "starts_high": {"not_learning", "no_context", "clipped_always", "gradients_explode"},
    "margin_negative": {"not_learning"},
    "not_learning": {"no_context", "plateau", "above_band", "clipped_always", "sample_degenerate", "data_repeats"},
    "no_context": {"plateau", "above_band", "clipped_always", "data_repeats", "sample_degenerate"},
    "too_good": {"plateau", "overfitting", "data_repeats", "sample_degenerate", "gradients_vanish"},
    "loss_rising": {"loss_spike", "plateau", "above_band", "no_context", "not_learning", "gradients_explode"},
    "gradients_explode": {"loss_spike", "clipped_always"},
    "overfitting": {"data_repeats", "plateau"},
    "plateau": {"data_repeats"},
    "data_wait": {"step_time_grows", "throughput_collapsed", "mfu_low"},
    "step_time_grows": {"throughput_collapsed", "mfu_low"},
    "throughput_collapsed": {"mfu_low", "step_time_grows"},
}


@dataclass
class Standing:
    """A flag that is up."""

    verdict: Verdict
    since_step: int
    held_step: int  # the last step at which its rule held


@dataclass(frozen=True)
class FlagChange:
    """A flag went up or came down."""

    up: bool
    verdict: Verdict
    step: int
    since_step: int
    again: bool = False  # it came back soon, or was said before a restart: shown, not said


class Detector:
    """The red flags of one run."""

    def __init__(self, facts: Facts, said_before: Mapping[str, int] | None = None) -> None:
        self.history = History(facts)
        self.each_block = EACH_BLOCK
        if facts.objective == "dpo":
            self.each_block = {name: rule for name, rule in EACH_BLOCK.items() if name not in _OF_TOKENS} | OF_PAIRS
        self.up: dict[str, Standing] = {}
        self.down_at: dict[str, int] = {}
        self.said_before = dict(said_before or {})  # cause -> the last step at which it was said, then lost in a kill
        self.well_after = _WELL_BLOCKS * facts.block
        self.long = max(LONG_STEPS, round(LONG_SHARE * facts.steps))

    def step(self, step: int, values: Mapping[str, float | None]) -> list[FlagChange]:
        """After an optimizer step."""
        if self.history.add(step, values):
            return self._look(EACH_STEP) + self._look(self.each_block)
        low, spiking = self.history.low_rates >= learning.LR_STEPS, self.history.spiking
        if (low and "lr_zero" not in self.up) or (spiking and "loss_spike" not in self.up):
            return self._look(EACH_STEP)
        return []

    def validated(self, step: int, loss: float | None) -> list[FlagChange]:
        self.history.validated(step, loss)
        return self._look(self.each_block) if self.history.blocks else []

    def sampled(self, step: int, repeat: float | None) -> list[FlagChange]:
        self.history.sampled(step, repeat)
        return self._look({"sample_degenerate": learning.degenerate_samples})

    def _look(self, rules: Mapping[str, _Rule]) -> list[FlagChange]:
        return [change for cause, rule in rules.items() if (change := self._judge(cause, rule))]

    def _judge(self, cause: str, rule: _Rule) -> FlagChange | None:
        now, standing = self.history.step, self.up.get(cause)
        if standing is None and any(cause in EXPLAINS.get(other, ()) for other in self.up):
            return None
        verdict = rule(self.history)
        if verdict is not None and standing is None:
            self.up[cause] = Standing(verdict, now, now)
            soon = cause in self.down_at and now - self.down_at[cause] < self.long
            return FlagChange(True, verdict, now, now, again=soon or now <= self.said_before.get(cause, 0))
        if standing is None:
            return None
        if verdict is not None:
            standing.held_step = now
        elif now - standing.held_step >= self.well_after:
            del self.up[cause]
            self.down_at[cause] = now
            return FlagChange(False, standing.verdict, now, standing.since_step)
        return None


# ---------------------------------------------------------------- words


def announce(changes: Iterable[FlagChange]) -> None:
    """Through report: a verdict that stands, or that it is well again."""
    for change in changes:
        verdict = change.verdict
        if change.up:
            report.verdict(verdict, flag=True, step=change.step, **({"said": True} if change.again else {}))
        else:
            report.event("well again", cause=verdict.cause, step=change.step, since_step=change.since_step)


# ---------------------------------------------------------------- after a restart


def replay(detector: Detector, records: Iterable[Mapping[str, Any]], last_step: int) -> list[FlagChange]:
    """What the records of a run would have raised, up to a step; of a step that was done twice, the last record counts."""
    steps: dict[int, Mapping[str, Any]] = {}
    looks: dict[int, Mapping[str, Any]] = {}
    for record in records:
        step = record.get("step")
        if not isinstance(step, int) or step > last_step:
            continue
        if record.get("train/lr") is not None and record.get("train/loss") is not None:
            steps[step] = record
        elif "eval/val_loss" in record or "eval/sample_repeat" in record:
            looks[step] = {**looks.get(step, {}), **record}
    changes: list[FlagChange] = []
    for step in sorted(steps.keys() | looks.keys()):
        if step in steps:
            changes += detector.step(step, steps[step])
        if "eval/val_loss" in looks.get(step, {}):
            changes += detector.validated(step, looks[step]["eval/val_loss"])
        if "eval/sample_repeat" in looks.get(step, {}):
            changes += detector.sampled(step, looks[step]["eval/sample_repeat"])
    return changes


def recall(facts: Facts, folder: RunDir, last_step: int) -> Detector:
    """The detector as it stood after a step, from metrics.jsonl: a restart neither forgets nor repeats."""
    if not last_step:
        return Detector(facts)
    said: dict[str, int] = {}
    for event in read_last_lines(folder.rank_events(0)):
        if not read_back.is_event(event) or event["type"] != "verdict" or not event.get("flag"):
            continue
        if event["step"] > last_step:
            said[event["cause"]] = max(said.get(event["cause"], 0), int(event["step"]))
    detector = Detector(facts, said)
    replay(detector, filter(read_back.is_metric, read_last_lines(folder.metrics, _RECALL_BYTES)), last_step)
    report.event("flags", standing=[_standing_record(one) for one in detector.up.values()])
    return detector


def _standing_record(one: Standing) -> dict[str, Any]:
    found = one.verdict
    return {"cause": found.cause, "state": found.state, "why": found.why, "next": found.next, "step": one.since_step}
