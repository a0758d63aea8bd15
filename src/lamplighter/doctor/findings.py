"""The report: all findings as a table for people, as JSON for scripts, and as advice on the settings.

In:  ProbeResults.
Out: text; 'ok' means that no fault was found (warnings do not count).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lamplighter.doctor.probe import Finding
from lamplighter.doctor.runner import ProbeResult

_SHOWN = {"skip": "not tested", "ok": "ok", "warn": "warn", "fault": "FAULT"}  # from nothing to bad
_ORDER = list(_SHOWN)
_MOST_ROWS = 8  # of one probe
_STRANGE = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160))}


@dataclass(frozen=True)
class Report:
    """A whole examination."""

    results: tuple[ProbeResult, ...]
    seconds: float

    def findings(self, *levels: str) -> Iterator[tuple[str, Finding]]:
        """(probe, finding), in the order they were made."""
        for result in self.results:
            for finding in result.findings:
                if not levels or finding.level in levels:
                    yield result.probe.name, finding

    @property
    def ok(self) -> bool:
        return not any(self.findings("fault"))


@dataclass(frozen=True)
class Advice:
    """A setting that a probe would change, and why."""

    value: Any
    why: str
    probe: str


def worst(result: ProbeResult) -> str:
    return _SHOWN[max((finding.level for finding in result.findings), key=_ORDER.index, default="ok")]


def advice(report: Report) -> dict[str, Advice]:
    """By field. Where two probes advise on one field, a fault counts more than a warning, a later one more than an earlier."""
    return {
        name: Advice(value, _one_line(finding.what), probe)
        for level in _ORDER
        for probe, finding in report.findings(level)
        for name, value in finding.settings.items()
    }


# ---------------------------------------------------------------- for people


def table(report: Report, next: str = "lamp train with the same words") -> str:
    """One row a finding, then verdict / why / next of each that is not as it should be."""
    wide = max([len(result.probe.name) for result in report.results], default=5)
    rows = []
    for result in report.results:
        name = result.probe.name
        worst_first = sorted(result.findings, key=lambda finding: -_ORDER.index(finding.level))
        for finding in worst_first[:_MOST_ROWS]:
            rows.append(f"{name:<{wide}}  {_SHOWN[finding.level]:<10}  {_one_line(finding.what)}")
            name = ""
        if len(worst_first) > _MOST_ROWS:
            rows.append(f"{'':<{wide}}  {'':<10}  and {len(worst_first) - _MOST_ROWS} more (--json has all)")
    for probe, finding in [*report.findings("fault"), *report.findings("warn")]:
        rows += ["", f"{_SHOWN[finding.level]}: {probe}"]
        named = (("verdict", finding.what), ("why", finding.why), ("next", finding.next))
        rows += [f"  {name:<7}  {_one_line(text)}" for name, text in named if text]
    return "\n".join([*rows, "", _sum(report, next), ""])


def _sum(report: Report, next: str) -> str:
    faults, warnings = len(list(report.findings("fault"))), len(list(report.findings("warn")))
    found = f"{_count(faults, 'fault')}, {_count(warnings, 'warning')}"
    idle = sum(worst(one) == _SHOWN["skip"] for one in report.results)
    untested = f", {idle} of them not tested" if idle else ""
    counted = f"{found} by {_count(len(report.results), 'probe')}{untested} in {report.seconds:.0f} s"
    if advice(report):
        return f"{counted}; next: the same words with --print-config give a run.yaml with this advice applied"
    return f"{counted}; next: {next}" if not faults else counted


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _one_line(text: str) -> str:
    return " ".join(text.split()).translate(_STRANGE)


# ---------------------------------------------------------------- for scripts


def as_json(report: Report) -> str:
    """Stable keys: ok, seconds, probes, findings, advice."""
    record = {
        "ok": report.ok,
        "seconds": round(report.seconds, 2),
        "probes": [
            {"probe": one.probe.name, "seconds": round(one.seconds, 2), "level": worst(one).lower()}
            for one in report.results
        ],
        "findings": [{"probe": probe, **asdict(finding)} for probe, finding in report.findings()],
        "advice": {name: asdict(one) for name, one in advice(report).items()},
    }
    return json.dumps(_finite(record), indent=1, default=str, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
