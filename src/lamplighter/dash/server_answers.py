"""Columns as JSON: points with as many digits as a picture can show, and no number that JSON has not.

In:  the columns of a run.
Out: plain lists, for the server's answers and for report.html.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lamplighter.dash import facts
from lamplighter.dash.series import Floats, RunSeries
from lamplighter.rundir import RunDir


def points_of(
    series: RunSeries, names: list[str], kind: str, price: float, window: tuple[float, float, int]
) -> dict[str, Any]:
    """For each curve its points; how many there are in all."""
    low, high, most = window
    x = series.x_of(kind, price)
    curves = {}
    for name in names:
        at, y = series.points(name, x, low, high, most)
        if len(at):
            curves[name] = {"x": rounded(at, 9), "y": rounded(y, 6)}
    return {"curves": curves, "rows": len(series.steps), "version": series.version, "newest_t": series.newest_t}


def rounded(values: Floats, digits: int) -> list[float | None]:
    """So many significant digits; what is not finite is null."""
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.where(np.isfinite(values) & (values != 0), np.floor(np.log10(np.abs(values))), 0)
        factor = 10.0 ** np.clip(digits - 1 - size, -300, 300)
        short = np.round(values * factor) / factor
    found = np.where(np.isfinite(values), short, np.nan).tolist()
    return [None if one != one else int(one) if one == int(one) and abs(one) < 1e15 else one for one in found]


def usd_per_hour(run: RunDir) -> float:
    config, _ = facts.read_config(run)
    return facts.finite(config.get("budget", {}).get("usd_per_hour")) or 0.0


def plain(value: Any) -> Any:
    """JSON has no NaN; the page draws a gap."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value
