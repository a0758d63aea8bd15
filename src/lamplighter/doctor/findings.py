"""The chart: all findings as a table for people, as JSON for scripts, and as advice on the settings.

In:  Visits.
Out: text; 'ok' means that no fault was found (warnings do not count).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lamplighter.doctor.probe import Finding
from lamplighter.doctor.runner import Visit

SHOWN = {"ok": "ok", "warn": "warn", "fault": "FAULT"}
WEIGHT = {"ok": 0, "warn": 1, "fault": 2}
MOST_ROWS = 8  # of one probe
STRANGE = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160))}


@dataclass(frozen=True)
class Chart:
    """A whole examination."""

    visits: tuple[Visit, ...]
    seconds: float

    def findings(self, *levels: str) -> Iterator[tuple[str, Finding]]:
        """(probe, finding), in the order they were made."""
        for visit in self.visits:
            for finding in visit.findings:
                if not levels or finding.level in levels:
                    yield visit.stage.name, finding

    @property
    def ok(self) -> bool:
        return not any(self.findings("fault"))


@dataclass(frozen=True)
class Advice:
    """A setting that a probe would change, and why."""

    value: Any
    why: str
    probe: str


def worst(visit: Visit) -> str:
    return SHOWN[max((finding.level for finding in visit.findings), key=lambda level: WEIGHT[level], default="ok")]


def advice(chart: Chart) -> dict[str, Advice]:
    """By field. Where two probes advise on one field, a fault counts more than a warning, a later one more than an earlier."""
    found: dict[str, Advice] = {}
    for level in ("ok", "warn", "fault"):
        for probe, finding in chart.findings(level):
            for name, value in finding.settings.items():
                found[name] = Advice(value, _one_line(finding.what), probe)
    return found


# ---------------------------------------------------------------- for people


def table(chart: Chart) -> str:
    """One row a finding, then verdict / why / next of each that is not as it should be."""
    wide = max([len(visit.stage.name) for visit in chart.visits], default=5)
    rows = []
    for visit in chart.visits:
        name = visit.stage.name
        by_weight = sorted(visit.findings, key=lambda finding: -WEIGHT[finding.level])
        for finding in by_weight[:MOST_ROWS]:
            rows.append(f"{name:<{wide}}  {SHOWN[finding.level]:<5}  {_one_line(finding.what)}")
            name = ""
        if len(by_weight) > MOST_ROWS:
            rows.append(f"{'':<{wide}}  {'':<5}  and {len(by_weight) - MOST_ROWS} more (--json has all)")
    return "\n".join([*rows, *_details(chart), "", _sum(chart), ""])


def _details(chart: Chart) -> Iterator[str]:
    for probe, finding in [*chart.findings("fault"), *chart.findings("warn")]:
        yield ""
        yield f"{SHOWN[finding.level]}: {probe}"
        yield f"  verdict  {_one_line(finding.what)}"
        if finding.why:
            yield f"  why      {_one_line(finding.why)}"
        if finding.next:
            yield f"  next     {_one_line(finding.next)}"


def _sum(chart: Chart) -> str:
    faults, warnings = len(list(chart.findings("fault"))), len(list(chart.findings("warn")))
    counted = f"{_count(faults, 'fault')}, {_count(warnings, 'warning')} by {_count(len(chart.visits), 'probe')} in {chart.seconds:.0f} s"
    if advice(chart):
        return f"{counted}; next: the same words with --print-config give a run.yaml with this advice applied"
    return f"{counted}; next: lamp train with the same words" if not faults else counted


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _one_line(text: str) -> str:
    return " ".join(text.split()).translate(STRANGE)


# ---------------------------------------------------------------- for scripts


def as_json(chart: Chart) -> str:
    """Stable keys: ok, seconds, probes, findings, advice."""
    record = {
        "ok": chart.ok,
        "seconds": round(chart.seconds, 2),
        "probes": [
            {"probe": v.stage.name, "seconds": round(v.seconds, 2), "level": worst(v).lower()} for v in chart.visits
        ],
        "findings": [{"probe": probe, **asdict(finding)} for probe, finding in chart.findings()],
        "advice": {name: asdict(one) for name, one in advice(chart).items()},
    }
    return json.dumps(_finite(record), indent=1, default=str, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
