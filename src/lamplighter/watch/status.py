"""A run of ours now, as far as it can be seen from its folder, and the words for it.

In:  a run folder (ours, or one that another process owns), the slot of its first rank and its process.
Out: a Status, one sentence in which something changes every time, new events in words, and the red flags that stand.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import read_back
from lamplighter.procs.procfs import ProcessLook
from lamplighter.rundir import RunDir, Tail, dollars, human_bytes, read_last_lines
from lamplighter.safe_text import clean
from lamplighter.slot import SURE_STEPS, Slot

if TYPE_CHECKING:
    from lamplighter.config import Budget

_RATE_WINDOW_S = 15.0
_HISTORY_RUNS = 5
_HISTORY_BYTES = 1 << 18
_WORTH_SAYING_S = 0.05  # that steps waited for a save
_BARS = "▁▂▃▄▅▆▇█"
_Flag = dict[str, Any]  # a red flag that stands: cause, state, why, next, step


def _no_budget() -> Budget:
    """Loaded only where a status is shown: `lamp runs` needs the words of this file alone."""
    from lamplighter.config import Budget

    return Budget()


@dataclass
class Status:
    """Now, as far as it can be seen from outside."""

    name: str
    started: float = field(default_factory=time.monotonic)
    slot: Slot | None = None
    process: ProcessLook | None = None
    rate: float = 0.0  # units of the phase per second
    stalled_s: float = 0.0  # since the last unit of work
    stall_words: str = ""  # what the stall is judged to be, once it has lasted longer than usual
    stopping: str = ""
    told: str = ""  # of a command that is not ours: now, in the words of its watcher
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=4000))
    paces: deque[float] = field(
        default_factory=lambda: deque(maxlen=4000)
    )  # steps a second, of a command that is not ours
    val_loss: float | None = None
    val_step: int = 0
    floor: float | None = None  # nats per token that no model can beat
    exact: str = ""  # whether steps give the same bits here, in words
    path: str = ""  # the way that the arithmetic takes
    lr: float = 0.0
    data_wait: float = 0.0  # share of the step
    spent_s: float = 0.0
    budget: Budget = field(default_factory=_no_budget)
    durable_age_s: float | None = None
    mirrored_step: int | None = None  # the newest that is whole in save.mirror; none = there is no mirror
    usual_s: float | None = None  # what this phase took last time
    flags: dict[str, _Flag] = field(default_factory=dict)  # red flags that stand, by cause
    saves: bool = True  # here; the ranks of another node are saved by node 0
    ranks: list[dict[str, Any]] = field(default_factory=list)  # as status.json has them, for who looks from elsewhere

    @property
    def training(self) -> bool:
        return self.slot is not None and self.slot.phase.startswith("train")

    @property
    def eta_s(self) -> float | None:
        """Of a training run by its own measurements (train/pace.py), of any other phase by its rate."""
        slot = self.slot
        if slot is None:
            return None
        if self.training:
            since_s = max(0.0, (time.monotonic_ns() - slot.left_ns) / 1e9)
            return max(0.0, slot.left_s - min(since_s, slot.left_now_s)) if slot.left_s >= 0 else None
        left = slot.total - slot.done if slot.total > 0 else -1
        return left / self.rate if left > 0 and self.rate > 0 else None

    @property
    def end_s(self) -> float | None:
        """What the whole run will have taken, from the tenth measured step on."""
        if self.slot is None or self.slot.measured < SURE_STEPS or (left := self.eta_s) is None or not self.training:
            return None
        return self.spent_s + left

    @property
    def short_s(self) -> float:
        """How much longer that is than the budget allows."""
        return max(0.0, (self.end_s or 0.0) - self.budget.left_s(0.0))


# ---------------------------------------------------------------- looking at a run


class Rate:
    """How fast something is counted, over the last seconds of one phase."""

    def __init__(self) -> None:
        self.samples: deque[tuple[float, float]] = deque()
        self.counted = ""  # what is counted
        self.per_s = 0.0

    def add(self, counted: str, now: float, done: float) -> float:
        if counted != self.counted:
            self.counted = counted
            self.samples.clear()
        self.samples.append((now, done))
        while len(self.samples) > 2 and now - self.samples[1][0] > _RATE_WINDOW_S and self.samples[1][1] < done:
            self.samples.popleft()  # but not the last one from before the latest unit: work in large units has a rate too
        (then, before), seconds = self.samples[0], now - self.samples[0][0]
        self.per_s = max(0.0, done - before) / seconds if seconds > 0.4 else self.per_s if then != now else 0.0
        return self.per_s


class Observer:
    """Keeps what must be remembered between two looks."""

    def __init__(self, run: RunDir, events: Sequence[Path], budget: Budget) -> None:
        self.run, self.budget = run, budget
        self.status = Status(run.name)
        self.events = [Tail(path, from_end=True) for path in events]
        self.metrics = Tail(run.metrics, from_end=True)
        self.rate = Rate()
        self.history = _phase_history(run)
        self.durable_at: float | None = None
        self.fresh: list[dict[str, Any]] = []  # metrics of the last look

    def look(
        self, slot: Slot | None, process: ProcessLook | None, stalled_s: float, spent_s: float
    ) -> list[tuple[int, dict[str, Any]]]:
        """One look; updates `status`, returns the new events with the number of the file that they come from."""
        status = self.status
        if slot is not None and slot.pid:
            status.slot, status.process, status.stalled_s = slot, process, stalled_s
            status.rate = self.rate.add(slot.phase, time.monotonic(), slot.done)
            status.usual_s = self.history.get(slot.phase)
        self.fresh = list(filter(read_back.is_metric, self.metrics.records()))
        for record in self.fresh:
            self._learn(record)
        status.spent_s, status.budget = spent_s, self.budget
        events = [(number, event) for number, tail in enumerate(self.events) for event in tail.records()]
        events = [(number, event) for number, event in events if read_back.is_event(event)]
        for number, event in events:
            if number == 0:
                self._hear(event)
        status.durable_age_s = time.time() - self.durable_at if self.durable_at else None
        status.mirrored_step = read_back.read_object(self.run.mirror, read_back.MIRROR)[0].get("step")
        return events

    def begin_again(self) -> None:
        """A new attempt of the same run: what was learned stays, what was seen goes."""
        self.status.slot, self.status.process = None, None
        self.rate = Rate()

    def _learn(self, record: dict[str, Any]) -> None:
        status = self.status
        if record.get("train/loss") is not None:
            status.losses.append(record["train/loss"])
            status.lr = record.get("train/lr") or 0.0
            wait, whole = record.get("train/data_wait_ms") or 0.0, record.get("train/dt_ms") or 0.0
            status.data_wait = 0.9 * status.data_wait + 0.1 * (wait / whole if whole else 0.0)
        if record.get("time/steps_per_s") is not None:
            status.paces.append(record["time/steps_per_s"])
        if record.get("eval/val_loss") is not None:
            status.val_loss, status.val_step = record["eval/val_loss"], record["step"]

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("type") == "checkpoint":
            self.durable_at = event["t"]
        hear_flag(self.status.flags, event)
        if event.get("type") == "floor":
            self.status.floor = event["nats_per_token"]
        if event.get("type") == "exact":
            self.status.exact = event["text"]
        if event.get("type") == "path":
            self.status.path = event["text"]


def _phase_history(run: RunDir) -> dict[str, float]:
    """How long each phase took the last time, in this run or its newest neighbours."""
    found: dict[str, float] = {}
    neighbours = [path for path in run.path.parent.glob("*/events.jsonl") if path != run.events]
    neighbours.sort(key=_changed_at)
    for path in [*neighbours[-_HISTORY_RUNS:], run.events]:
        for event in read_last_lines(path, _HISTORY_BYTES):
            if read_back.is_event(event) and event["type"] == "phase" and event["state"] == "end":
                found[event["path"]] = event["seconds"]
    return found


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # a run that is being removed
        return 0.0


# ---------------------------------------------------------------- words


def duration(seconds: float) -> str:
    """75 -> '1:15'."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def amount(value: float, unit: str) -> str:
    return human_bytes(value) if unit == "B" else f"{value:,.0f} {unit}".rstrip()


def averaged(values: Iterable[float], width: int) -> list[float]:
    """At most so many points; none of fewer than two values."""
    points = [value for value in values if value == value]
    if len(points) < 2:
        return []
    size = max(1, len(points) / width)
    cuts = [points[int(i * size) : max(int(i * size) + 1, int((i + 1) * size))] for i in range(min(width, len(points)))]
    return [sum(cut) / len(cut) for cut in cuts if cut]


def sparkline(values: Iterable[float], width: int) -> str:
    """A curve in one row of characters, averaged to the width."""
    means = averaged(values, width)
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def line(status: Status) -> str:
    """The status of now with what must not be missed, in one line."""
    return " · ".join(part for part in (sentence(status), alert(status)) if part)


def sentence(status: Status) -> str:
    """The status of now; something in it changes every time."""
    slot = status.slot
    if status.told:
        return status.told
    if slot is None or not slot.phase:
        return f"starting ({duration(time.monotonic() - status.started)})"
    parts = _training_words(status, slot) if status.training else _phase_words(status, slot)
    return " · ".join(part for part in parts if part)


def alert(status: Status) -> str:
    """What a person must not miss, if anything."""
    slot, parts = status.slot, []
    if status.process is not None and status.process.stopped:
        parts.append(f"the process is stopped (signal); go on with: kill -CONT {status.process.pid}")
    elif status.stall_words:
        parts.append(status.stall_words)
    if status.stopping:
        parts.append(status.stopping)
    if status.flags:
        named = ", ".join(f"{flag['cause']} since step {flag['step']}" for flag in status.flags.values())
        parts.append(f"red flag{'s' * (len(status.flags) > 1)}: {named}")
    if slot is not None and slot.dropped:
        parts.append(f"{slot.dropped} log lines could not be written")
    return " · ".join(parts)


def _training_words(status: Status, slot: Slot) -> list[str]:
    """What must not be cut off stands first."""
    parts = [f"step {slot.step}/{slot.steps}" if slot.steps else f"step {slot.step}"]
    if status.eta_s is not None:
        parts.append(f"{duration(status.eta_s)} left")
    if status.saves and (slot.step or slot.durable_step):
        mirrored = f" (mirrored {status.mirrored_step})" if status.mirrored_step is not None else ""
        parts.append(f"safe to step {slot.durable_step}{mirrored}")
    if slot.phase != "train":
        inner = slot.phase.removeprefix("train > ")
        count = f" {amount(slot.done, '')}/{amount(slot.total, slot.unit)}" if slot.total > 0 else ""
        parts.append(f"{inner}{count} for {duration(_phase_age(slot))}")
    elif status.stalled_s > 1:
        parts.append(f"{slot.span or 'working'} for {duration(status.stalled_s)}")
    if slot.loss == slot.loss:
        mean = f" (average {slot.mean_loss:.3f})" if slot.mean_loss == slot.mean_loss else ""
        parts.append(f"loss {slot.loss:.3f}{mean}")
    parts += _money_words(status)
    if slot.tokens_per_s:
        parts.append(f"{slot.tokens_per_s:,.0f} tok/s")
    if slot.tokens:
        parts.append(f"{large(slot.tokens)} tokens")
    if slot.mfu:
        parts.append(f"MFU {slot.mfu:.0%}")
    return parts


def _money_words(status: Status) -> list[str]:
    """Spent, of how much, and how much it will be at the end."""
    budget, end_s = status.budget, status.end_s
    if budget.usd_per_hour is not None:
        limit = f" of {dollars(budget.usd)}" if budget.usd else ""
        end = f", {dollars(budget.spent_usd(end_s))} at the end" if end_s is not None else ""
        return [f"${budget.spent_usd(status.spent_s):.4f}{limit}{end}"]
    if budget.hours is not None:
        end = f", {end_s / 3600:.2f} h at the end" if end_s is not None else ""
        return [f"{status.spent_s / 3600:.2f} of {budget.hours:g} h{end}"]
    return []


def large(number: float) -> str:
    """1,234; 56.7k; 8.90M; 1.23G."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            unit = 1e3 if letter == "k" else size
            return f"{number / unit:.3g}{letter}"
    return f"{number:,.0f}"


def _phase_words(status: Status, slot: Slot) -> list[str]:
    parts = [slot.phase]
    if slot.total > 0:
        parts.append(f"{amount(slot.done, slot.unit)} of {amount(slot.total, slot.unit)}")
    elif slot.done:
        parts.append(amount(slot.done, slot.unit))
    if status.rate and slot.done:
        slow = status.rate < 1 and slot.unit != "B"
        parts.append(f"{1 / status.rate:.1f} s each" if slow else f"{amount(status.rate, slot.unit)}/s")
    if status.eta_s is not None:
        parts.append(f"{duration(status.eta_s)} left")
    if slot.phase_item:
        parts.append(clean(slot.phase_item))
    usual = f" (last time {duration(status.usual_s)})" if status.usual_s is not None else ""
    parts.append(f"for {duration(_phase_age(slot))}{usual}")
    if slot.done and status.stalled_s > 2:
        parts.append(f"last progress {duration(status.stalled_s)} ago")
    return parts


def _phase_age(slot: Slot) -> float:
    return max(0.0, (time.monotonic_ns() - slot.phase_since_ns) / 1e9)


def tell(event: dict[str, Any]) -> list[tuple[str, str]]:
    """An event in words, with a style for terminals; most need none."""
    kind = event.get("type")
    if kind == "phase" and event.get("state") == "end" and ">" not in event["path"] and event["name"] != "train":
        count = f"  {amount(event['done'], event['unit'])}" if event.get("done") else ""
        return [(f"done  {event['name']:<14} {event['seconds']:6.2f} s{count}", "dim")]
    if kind == "note":
        return [(f"note  {clean(event['text'])}", "")]
    if kind == "warning":
        return [(f"WARNING  {clean(event['text'])}", "bold yellow")]
    if kind == "checkpoint":
        waited_s = event.get("blocked_s", event["seconds"])
        waited = f"; steps waited {waited_s:.2f} s" if waited_s >= _WORTH_SAYING_S else ""
        name = clean(str(event["path"]).rsplit("/", 1)[-1])
        return [(f"saved {name} ({human_bytes(event['bytes'])}, {event['seconds']:.2f} s{waited})", "green")]
    if kind == "eval":
        return [(f"validation at step {event['step']}: {clean(event['text'])}", "cyan")]
    if kind == "sample":
        return [(f"sample at step {event['step']}:", "magenta")] + [
            (f"   {clean(line)}".rstrip(), "") for line in event["text"].strip("\n").split("\n")
        ]
    if kind == "verdict" and not event.get("said"):
        style = "yellow" if event["state"] == "slow" else "bold red"
        return [(f"{event['state']}: {clean(event['why'])}", style), (f"next: {event['next']}", style)]
    if kind == "well again":
        return [
            (
                f"well again: {event['cause']} (a red flag since step {event['since_step']}), at step {event['step']}",
                "green",
            )
        ]
    if kind == "ended early":
        return [(f"ended early at step {event['step']} of {event['steps']}: {event['why']}", "bold")]
    if kind == "error":
        return [(line, "bold red") for line in event["lines"]]
    return []


def tell_step(record: dict[str, Any]) -> str:
    """One step in detail (--verbose)."""
    known = {name.split("/")[-1]: value for name, value in record.items() if "/" in name and value is not None}
    return f"step {record['step']}  " + "  ".join(f"{name} {value:.5g}" for name, value in known.items())


# ---------------------------------------------------------------- red flags, from the events of a run


def hear_flag(standing: dict[str, _Flag], event: dict[str, Any]) -> None:
    """What an event changes."""
    kind = event.get("type")
    if kind == "verdict" and event.get("flag"):
        standing[event["cause"]] = {name: event.get(name) for name in ("cause", "state", "why", "next", "step")}
    elif kind == "well again":
        standing.pop(event["cause"], None)
    elif kind == "flags":  # a new attempt says which still stand
        standing.clear()
        standing |= {flag["cause"]: flag for flag in event.get("standing", [])}


def standing_flags(status: dict[str, Any]) -> dict[str, _Flag]:
    """Those that a status.json names."""
    found = status.get("flags") or []
    return {flag["cause"]: flag for flag in found} if read_back.FLAGS.fits(found) else {}


def tell_flags(standing: dict[str, _Flag]) -> list[str]:
    """verdict / why / next of each."""
    lines = []
    for flag in standing.values():
        lines += [
            f"red flag since step {flag['step']}: {flag['cause']}",
            f"why:  {clean(flag['why'])}",
            f"next: {flag['next']}",
        ]
    return lines
