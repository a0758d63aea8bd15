"""lamp compare: runs beside each other in the terminal.

In:  names of runs.
Out: a table, sentences and curves, or JSON. The folders are read in a child, under watch.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lamplighter import report
from lamplighter.commands.arguments import find_run, named_again, parse
from lamplighter.errors import DONE, UsageError
from lamplighter.rundir import RunDir

_WIDE, _HIGH = 60, 6
_MOST_RUNS = 12  # as on the page


def _compare_flags(*runs: str, json: bool = False, runs_dir: Path = Path("runs")) -> None:
    """Two runs or more."""


def compare(words: list[str]) -> int:
    """The comparison of two runs or more."""
    from lamplighter.commands.session import session

    flags = parse("compare", _compare_flags, words)
    if len(flags["runs"]) < 2:
        raise UsageError("lamp compare needs two runs or more", f"{len(flags['runs'])} given", "lamp compare RUN RUN; lamp runs lists them")  # fmt: skip
    if len(flags["runs"]) > _MOST_RUNS:
        raise UsageError(f"lamp compare takes at most {_MOST_RUNS} runs", f"{len(flags['runs'])} given", "compare those that matter; lamp runs lists them")  # fmt: skip
    runs = [str(find_run(name, flags["runs_dir"]).path.resolve()) for name in flags["runs"]]
    if len(set(runs)) < len(runs):
        raise UsageError("a run cannot be compared with itself", f"the same run stands twice: {' '.join(flags['runs'])}", "lamp compare RUN RUN; lamp runs lists them")  # fmt: skip
    return session("compare", {"runs": runs, "json": flags["json"], "next": shlex.join(["lamp", "dash", *named_again(flags["runs_dir"])])})  # fmt: skip


# ---------------------------------------------------------------- in the child


def compare_child(_: RunDir, request: dict[str, Any]) -> int:
    """Read the runs, one after another, and put them beside each other."""
    from lamplighter.dash.comparison import compare as compared
    from lamplighter.dash.series import SeriesCache

    runs, cache = [RunDir(Path(one)) for one in request["runs"]], SeriesCache()
    with report.phase("read", total=len(runs), unit="runs") as phase:
        for run in runs:
            cache.of(run)
            phase.tick(1, run.name)
    told = compared([(run, cache) for run in runs])
    pictures = _curves([(run.name, cache.of(run)) for run in runs])
    report.result(json.dumps(told, indent=1) + "\n" if request["json"] else _words(told, pictures, request["next"]))
    return DONE


def _words(told: dict[str, Any], pictures: list[str], following: str) -> str:
    names = told["names"]
    rows = [["", *names, "difference"]]
    rows += [
        [
            row["name"],
            *(f"{text} *" if i in row["best"] else text for i, text in enumerate(row["words"])),
            row["difference"],
        ]
        for row in told["rows"]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines += ["", *(f"{one['name']}: {one['text']}" for one in told["says"]), "", *pictures]
    if told["unread_settings"]:
        lines += [
            "",
            f"the settings are not compared: config.yaml of {', '.join(told['unread_settings'])} cannot be read",
        ]
    for title, found in (("settings", told["config"]), ("environment", told["environment"])):
        if found:
            lines += ["", f"what differs in the {title}:"]
            lines += [f"  {row['name']}: {' | '.join(row['values'])}" for row in found[:40]]
    return "\n".join([*lines, "", f"next: {following} shows the curves over each other", ""])


def _curves(found: Sequence[tuple[str, Any]]) -> list[str]:
    """The training loss of each, to the same scales of loss and of steps, as characters."""
    import numpy as np

    from lamplighter.braille import chart

    sampled = []
    longest = max((series.steps[-1] for _, series in found if series.steps), default=1)
    for name, series in found:
        loss = np.array(series.columns.get("train/loss", []), dtype=float)
        loss = loss[np.isfinite(loss)]
        if len(loss) > 1:
            wide = max(2, round(2 * _WIDE * series.steps[-1] / longest)) if longest else 2
            edges = np.arange(wide + 1) * len(loss) // wide  # fewer losses than places: some stand twice
            sampled.append(
                (
                    name,
                    [float(np.mean(loss[a : max(b, a + 1)])) for a, b in itertools.pairwise(edges)],
                    int(series.steps[-1]),
                )
            )
    if not sampled:
        return []
    low, high = min(min(values) for _, values, _ in sampled), max(max(values) for _, values, _ in sampled)
    lines = []
    for name, values, last in sampled:
        lines += chart(values, _HIGH, (low, high))
        lines += [f"{'':>8} └ {name}: training loss to step {last:,}", ""]
    return lines
