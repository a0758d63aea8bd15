"""lamp report: one run as one HTML file.

In:  a run's name.
Out: report.html and curves.svg in the run's folder, written anew by a child, under watch.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from lamplighter import report as reporting
from lamplighter.commands.arguments import find_run, named_again, parse
from lamplighter.errors import DONE
from lamplighter.rundir import RunDir, cannot_write


def _report_flags(run: str, /, *, runs_dir: Path = Path("runs")) -> None:
    """One run."""


def report(words: list[str]) -> int:
    """Write report.html and curves.svg anew."""
    from lamplighter.commands.session import session

    flags = parse("report", _report_flags, words)
    run = find_run(flags["run"], flags["runs_dir"])
    return session("report", {"run": str(run.path.resolve()), "address": run.address, "next": shlex.join(["lamp", "dash", *named_again(flags["runs_dir"])])})  # fmt: skip


def report_child(_: RunDir, request: dict[str, Any]) -> int:
    """report.html and curves.svg of one run."""
    from lamplighter.dash import report_page
    from lamplighter.watch.curves import CurveSketch

    run = RunDir(Path(request["run"]))
    try:
        with reporting.phase("report"):
            path = report_page.write(run)
            CurveSketch(run).write_all()
    except OSError as error:
        raise cannot_write(run.path, error) from error
    size = path.stat().st_size / 1e3
    reporting.result(
        f"made: {path} ({size:,.0f} kB, opens in any browser), {run.path / 'curves.svg'}; next: {request['next']}\n"
    )
    return DONE
