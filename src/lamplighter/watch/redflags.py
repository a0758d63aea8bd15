"""Red flags as a reader sees them: which stand now, and which were up when, from the events of a run.

In:  verdicts with `flag`, "well again" and "flags" events of train/anomalies.
Out: the flags that stand, words for them, and the section of report.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lamplighter.watch.status import Flag, clean, duration


def hear(standing: dict[str, Flag], event: dict[str, Any]) -> None:
    """What an event changes."""
    kind = event.get("type")
    if kind == "verdict" and event.get("flag"):
        standing[event["cause"]] = {name: event.get(name) for name in ("cause", "state", "why", "next", "step")}
    elif kind == "well again":
        standing.pop(event["cause"], None)
    elif kind == "flags":  # a new attempt says which still stand
        standing.clear()
        standing |= {flag["cause"]: flag for flag in event.get("standing", [])}


def recall(status: dict[str, Any]) -> dict[str, Flag]:
    """Those that a status.json names."""
    found = status.get("flags")
    flags = [flag for flag in found if isinstance(flag, dict)] if isinstance(found, list) else []
    return {str(flag.get("cause")): flag for flag in flags}


def tell(standing: dict[str, Flag]) -> list[str]:
    """verdict / why / next of each."""
    lines = []
    for flag in standing.values():
        lines += [
            f"red flag since step {flag['step']}: {flag['cause']}",
            f"why:  {clean(flag['why'])}",
            f"next: {flag['next']}",
        ]
    return lines


# ---------------------------------------------------------------- report.md


@dataclass
class Spell:
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


def spells(events: Iterable[dict[str, Any]]) -> list[Spell]:
    """Every flag that was ever up, in order; one that was raised again in steps done twice is the same."""
    found: list[Spell] = []
    up: dict[str, Spell] = {}
    last_t, last_step = 0.0, 0
    for event in events:
        kind, last_t = event.get("type"), max(last_t, float(event.get("t", 0.0)))
        if isinstance(event.get("step"), int):
            last_step = int(event["step"])
        if kind == "verdict" and event.get("flag") and event["cause"] not in up:
            up[event["cause"]] = spell = Spell(
                event["cause"],
                event["why"],
                event["next"],
                int(event["step"]),
                last_t,
                evidence=list(event.get("evidence", [])),
            )
            found.append(spell)
        elif kind == "well again" and event["cause"] in up:
            spell = up.pop(event["cause"])
            spell.end_step, spell.end_t, spell.well = int(event["step"]), last_t, True
    for spell in up.values():
        spell.end_step, spell.end_t = max(last_step, spell.step), last_t
    return found


def section(events: Iterable[dict[str, Any]]) -> list[str]:
    """The lines of report.md: which, when, how long, the numbers; or none."""
    found = spells(events)
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
