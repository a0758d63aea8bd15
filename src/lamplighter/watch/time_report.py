"""The report of a run: where every second (and cent) went, over all its attempts, and which red flags were up.

In:  events.jsonl of a run folder.
Out: seconds by name, and report.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lamplighter.config import Budget
from lamplighter.rundir import RunDir, human_bytes, read_events, unread_events, write_atomic
from lamplighter.safe_text import clean, safe
from lamplighter.watch.status import duration


@dataclass
class TimeReport:
    """Seconds by name; `wall_s` is what they are measured against."""

    wall_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    attempts: int = 0
    redone_steps: int = 0  # after a kill
    returned_steps: int = 0  # after --resume checkpoint-N
    unread_bytes: int = 0  # of events.jsonl, before what was read: the oldest attempts are not in here

    @property
    def unexplained_s(self) -> float:
        return max(0.0, self.wall_s - sum(self.seconds.values()))


@dataclass
class _Attempt:
    start: float
    last: float
    number: int = 0  # as its own events have it
    child_start: float = 0.0
    child_end: float = 0.0
    told_all: bool = False
    was_stuck: bool = False
    seconds: dict[str, float] = field(default_factory=dict)


def read_time_report(run: RunDir) -> TimeReport:
    """Add up the attempts."""
    attempts: list[_Attempt] = []
    redone = returned = last_redone = 0
    for event in read_events(run):
        kind, t = event.get("type"), float(event.get("t", 0.0))
        if kind == "start":
            attempts.append(_Attempt(event.get("began") or t, t, event.get("attempt") or 0))
        if not attempts:
            continue
        now = attempts[-1]
        now.last = max(now.last, t)
        if kind == "hello" and not event.get("rank"):  # the times are those of rank 0
            now.child_start = t
        elif kind == "ledger" and (place := _before(event, attempts)) is not None:
            _end_late(attempts, place, event)
        elif kind == "ledger":
            now.seconds, now.told_all = event["seconds"], bool(event.get("final"))
        elif kind == "child_end":
            now.child_end = t
        elif (
            kind == "verdict" and event.get("state") in ("stuck", "slow") and event.get("action") in ("restart", "stop")
        ):
            now.was_stuck = True
        elif kind == "resumed":
            redone += (last_redone := event.get("redone_steps") or 0)
        elif kind == "went back":  # follows `resumed`: it was asked for
            redone, returned, last_redone = redone - last_redone, returned + last_redone, 0
    times = TimeReport(
        attempts=len(attempts), redone_steps=redone, returned_steps=returned, unread_bytes=unread_events(run)
    )
    for one in attempts:
        _add(times, one)
    return times


def _before(event: dict[str, Any], attempts: list[_Attempt]) -> int | None:
    """Which earlier attempt these times are of, where they are not of the newest."""
    wanted = event.get("attempt")
    if not wanted or attempts[-1].number == wanted:
        return None
    return next((place for place in reversed(range(len(attempts) - 1)) if attempts[place].number == wanted), None)


def _end_late(attempts: list[_Attempt], place: int, event: dict[str, Any]) -> None:
    """The last times of an earlier attempt. Where its process goes on, they reach into the newer ones, which begin there."""
    one, t = attempts[place], float(event["t"])
    one.seconds = event["seconds"]
    if t < attempts[place + 1].start:  # it has ended, and its last words were read late
        return
    one.told_all, one.child_end, one.last = True, 0.0, t
    for later in attempts[place + 1 :]:
        later.start, later.last = max(later.start, t), max(later.last, t)


def _add(times: TimeReport, one: _Attempt) -> None:
    times.wall_s += one.last - one.start
    for name, seconds in one.seconds.items():
        _charge(times, name, seconds)
    if one.child_start:
        _charge(times, "start of the process", max(0.0, one.child_start - one.start))
        told = sum(one.seconds.values())
        rest = max(0.0, one.child_end - one.child_start - told) if one.child_end else 0.0
        if rest and one.told_all:
            _charge(times, "end of the process", rest)
        elif rest and one.was_stuck:
            _charge(times, "stuck, until it was restarted", rest)
        elif rest:  # its last word was up to 5 s old
            _charge(times, "the last seconds before a kill", rest)
    if one.child_end:
        _charge(times, "closing", max(0.0, one.last - one.child_end))


def _charge(times: TimeReport, name: str, seconds: float) -> None:
    times.seconds[name] = times.seconds.get(name, 0.0) + seconds


def lines(times: TimeReport, budget: Budget, most: int | None = None) -> list[str]:
    """The table that people read; with `most`, so many names, and the others as one sum."""
    wall = times.wall_s or 1e-9
    rows = [
        (name, seconds)
        for name, seconds in sorted(times.seconds.items(), key=lambda row: -row[1])
        if seconds / wall > 0.0005
    ]
    if most is not None and len(rows) > most:
        rest = rows[most - 1 :]
        rows = [*rows[: most - 1], (f"{len(rest)} more, in report.md", sum(seconds for _, seconds in rest))]
    rows.append(("unexplained", times.unexplained_s))
    table = [
        f"{name:<32} {duration(seconds):>9}  {seconds / wall:6.1%}{_cents(seconds, budget)}" for name, seconds in rows
    ]
    table.append(f"{'all':<32} {duration(times.wall_s):>9}  100.0%{_cents(times.wall_s, budget)}")
    if times.redone_steps:
        table.append(f"{times.redone_steps} steps were done twice, because of a kill between two saves")
    if times.returned_steps:
        table.append(
            f"{times.returned_steps} steps were done twice, because --resume went back to an earlier checkpoint"
        )
    if times.unread_bytes:
        table.append(
            f"without the oldest {human_bytes(times.unread_bytes)} of events.jsonl, which are too many to read"
        )
    return table


def _cents(seconds: float, budget: Budget) -> str:
    return f"  ${budget.spent_usd(seconds):.4f}" if budget.usd_per_hour is not None else ""


# ---------------------------------------------------------------- red flags


@dataclass
class _FlagPeriod:
    """From up to down."""

    cause: str
    why: str
    next: str
    step: int
    t: float
    end_step: int = 0
    end_t: float = 0.0
    well: bool = False
    evidence: list[str] = field(default_factory=list)


def _flag_periods(events: Iterable[dict[str, Any]]) -> list[_FlagPeriod]:
    """Every flag that was ever up, in order; one that was raised again in steps done twice is the same."""
    found: list[_FlagPeriod] = []
    up: dict[str, _FlagPeriod] = {}
    last_t, last_step = 0.0, 0
    for event in events:
        kind, last_t = event.get("type"), max(last_t, float(event.get("t", 0.0)))
        if isinstance(event.get("step"), int):
            last_step = int(event["step"])
        if kind == "verdict" and event.get("flag") and event["cause"] not in up:
            up[event["cause"]] = period = _FlagPeriod(
                event["cause"],
                event["why"],
                event["next"],
                int(event["step"]),
                last_t,
                evidence=list(event.get("evidence") or []),
            )
            found.append(period)
        elif kind == "well again" and event["cause"] in up:
            period = up.pop(event["cause"])
            period.end_step, period.end_t, period.well = int(event["step"]), last_t, True
    for period in up.values():
        period.end_step, period.end_t = max(last_step, period.step), last_t
    return found


def flags_section(events: Iterable[dict[str, Any]]) -> list[str]:
    """The lines of report.md: which, when, how long, the numbers; or none."""
    found = _flag_periods(events)
    lines = ["## Red flags", ""]
    if not found:
        return [*lines, "none", ""]
    lines += ["| flag | from step | to | why | next | numbers |", "|---|---|---|---|---|---|"]
    for one in found:
        how_long = f"{one.end_step - one.step} steps, {duration(max(0.0, one.end_t - one.t))}"
        end = f"step {one.end_step}, then well again ({how_long})" if one.well else f"the end ({how_long})"
        cells = (one.cause, str(one.step), end, one.why, one.next, "; ".join(one.evidence))
        lines.append("| " + " | ".join(clean(cell).replace("|", "/") for cell in cells) + " |")
    return [*lines, ""]


# ---------------------------------------------------------------- report.md


def write_report(run: RunDir, times: TimeReport, budget: Budget, outcome: str, facts: dict[str, Any]) -> str:
    """report.md: the outcome, the facts, the red flags, the times. Empty, or why it cannot be written."""
    parts = [f"# {run.name}", "", outcome, ""]
    parts += [f"- {name}: {value}" for name, value in facts.items()]
    if (run.path / "curves.svg").exists():
        parts += [
            "",
            "![loss, learning rate and tokens per second](curves.svg)",
            "",
            "The curves to look into: [report.html](report.html)",
        ]
    parts += ["", *flags_section(read_events(run))]
    parts += [f"## Where the time went ({times.attempts} attempt{'s' if times.attempts != 1 else ''})", "", "```"]
    parts += [*lines(times, budget), "```", ""]
    try:
        write_atomic(run.report, safe("\n".join(parts)).encode("utf-8", "replace"), durable=False)
    except OSError as error:  # a full disk: what was done is safe all the same
        return error.strerror or str(error)
    return ""
