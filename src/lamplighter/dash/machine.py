"""The cards and the ranks of a run: panels by the clock with what is normal there and what was seen, a table of the cards.

In:  system.jsonl as columns; status.json for the names of the cards.
Out: panels as those of panels.py; one row for each card; when a card was slowed down, and by what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamplighter.dash.series import RunSeries
from lamplighter.dash.system_series import MemberSeries
from lamplighter.rundir import number, read_record
from lamplighter.safe_text import clean

_MOST_BANDS = 200  # in one picture


@dataclass(frozen=True)
class MachinePanel:
    """One chart with a curve for each card, or for each rank."""

    id: str
    title: str
    kind: str  # gpu or rank
    name: str
    unit: str
    normal: str
    watched_by: tuple[str, ...] = ()
    scale: float = 1.0


PANELS = (
    MachinePanel("gpu_util", "GPU utilisation", "gpu", "sys/gpu_util", "% of the time",
                 "Above 90 % while steps are made: the share of the time in which any kernel ran. Zero in saves, validations and restarts. All cards alike.",
                 ("low_utilisation", "unused"), 100.0),
    MachinePanel("gpu_mem", "GPU memory", "gpu", "sys/gpu_mem_gb", "GB",
                 "Flat after the first steps; under 95 % of the card. A slope that does not end is a leak.", ("out_of_memory",)),
    MachinePanel("gpu_power", "GPU power", "gpu", "sys/gpu_power_w", "W",
                 "Near the card's limit while it computes. A card that takes much less than the others has less to do, or is slowed down."),
    MachinePanel("gpu_temp", "GPU temperature", "gpu", "sys/gpu_temp_c", "°C",
                 "Rises in the first minutes, then even: 60 to 80 °C with air. Above about 85 °C the card slows itself down.", ("throttled",)),
    MachinePanel("gpu_clock", "GPU clock", "gpu", "sys/gpu_clock_mhz", "MHz",
                 "Even and near its highest. Shaded: slowed down by heat, hardware or the power limit.", ("throttled",)),
    MachinePanel("rank_step", "Steps by rank", "rank", "train/iter", "steps",
                 "All ranks on one line: a rank that stays behind holds up all the others.", ("rank_stuck",)),
    MachinePanel("rank_coll", "In a collective", "rank", "sys/in_collective", "% of the time",
                 "Even over the ranks. The rank that is there least is the one that the others wait for.", (), 100.0),
    MachinePanel("rank_wait", "Data wait by rank", "rank", "sys/data_wait", "% of the time",
                 "Near zero: the next batch is ready before it is wanted.", ("data_wait",), 100.0),
    MachinePanel("rank_cpu", "Cores by rank", "rank", "sys/cpu_cores", "cores", "Even over the ranks, and no more in sum than the machine has."),
    MachinePanel("rank_ram", "Memory by rank", "rank", "sys/ram_gb", "GB", "Flat after the first steps, and even over the ranks."),
)  # fmt: skip


def machine_panels(series: RunSeries) -> list[dict[str, Any]]:
    """Those that have numbers."""
    found = []
    for panel in PANELS:
        members = {name: one for name, one in series.system.named(panel.kind).items() if panel.name in one.columns}
        if not members or (panel.id == "rank_wait" and not any(np.any(one.of(panel.name) > 0) for one in members.values())):  # fmt: skip
            continue
        bands = _bands(members, series.began) if panel.id == "gpu_clock" else []
        found.append({"id": panel.id, "title": panel.title, "unit": panel.unit, "scale": panel.scale, "by": "wall", "group": panel.kind,
                      "curves": [f"{panel.name}@{name}" for name in members], "flags": list(panel.watched_by), "normal": panel.normal,
                      "seen": _seen(panel, members), "bands": bands})  # fmt: skip
    return found


def _bands(members: Mapping[str, MemberSeries], began: float) -> list[dict[str, Any]]:
    found = [{"from": (one.begin - began) / 3600, "to": (max(one.end, one.begin + 2.0) - began) / 3600, "label": f"{_called(name)}: {one.by}"}
             for name, member in members.items() for one in member.slowed]  # fmt: skip
    return found[-_MOST_BANDS:]


def _called(member: str) -> str:
    return member.replace("gpu", "card ").replace("rank", "rank ")


def _seen(panel: MachinePanel, members: Mapping[str, MemberSeries]) -> str:
    """Each member's mean, and who is unlike the others."""
    means = {name: _mean(one, panel.name) * panel.scale for name, one in members.items()}
    known = {name: value for name, value in means.items() if not math.isnan(value)}
    if not known:
        return "Nothing finite yet."
    words = ", ".join(f"{_called(name)} {value:.3g}" for name, value in list(known.items())[:16])
    if len(known) > 16:
        words += f" and {len(known) - 16} more"
    low, high = min(known, key=lambda one: known[one]), max(known, key=lambda one: known[one])
    told = f"On average: {words} {panel.unit.split(' ')[0]}."
    if panel.id == "rank_coll" and known[high] - known[low] > 10:
        return f"{told} {_called(low).capitalize()} is there least: the others wait for it."
    if panel.id == "rank_step":
        last = {name: one.of(panel.name)[-1] for name, one in members.items() if len(one.times)}
        behind = max(last.values()) - min(last.values())
        return f"At the newest look they are {int(behind)} steps apart."
    if panel.id == "gpu_util" and known[high] > 10 and known[low] < 0.8 * known[high]:
        return f"{told} {_called(low).capitalize()} has less to do than {_called(high)}."
    return told


def _mean(one: MemberSeries, name: str) -> float:
    values = one.of(name)
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else math.nan


def cards(series: RunSeries) -> list[dict[str, Any]]:
    """A row for each card: as it was last seen, and over the whole run."""
    known = {number(one.get("gpu"), -1): one for one in _told(series)}
    rows = []
    for name, one in series.system.named("gpu").items():
        index = int(name.removeprefix("gpu"))
        last = {column: float(values[-1]) for column, values in one.columns.items() if len(values)}
        temperature, power = one.of("sys/gpu_temp_c"), one.of("sys/gpu_power_w")
        slowed: dict[str, float] = {}
        for period in one.slowed:
            slowed[period.by] = slowed.get(period.by, 0.0) + max(2.0, period.end - period.begin)
        rows.append({
            "card": index, "name": clean(str(known.get(index, {}).get("name") or ""))[:80],
            "util": _finite(last.get("sys/gpu_util")), "mean_util": _finite(_mean(one, "sys/gpu_util")),
            "memory_gb": _finite(last.get("sys/gpu_mem_gb")), "total_gb": _finite(last.get("sys/gpu_mem_total_gb")),
            "hottest_c": _finite(float(np.nanmax(temperature))) if np.any(np.isfinite(temperature)) else None,
            "kwh": _energy(np.array(one.times), power), "slowed": [{"by": by, "seconds": seconds} for by, seconds in slowed.items()],
            "t": one.times[-1],
        })  # fmt: skip
    return rows


def _told(series: RunSeries) -> Sequence[Mapping[str, Any]]:
    found = read_record(series.run.status).get("gpus")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _energy(times: Any, power: Any) -> float | None:
    """By the power between two looks; pauses of over a minute are between two attempts."""
    if len(times) < 2 or len(power) != len(times):
        return None
    passed = np.diff(times)
    joules = np.where((passed > 0) & (passed < 60), passed * np.nan_to_num(power[1:]), 0.0).sum()
    return float(joules / 3.6e6)
