"""The child's verb doctor: the probes one after the other, each in a process of its own.

In:  the run's settings (or why they cannot be read), and which probes.
Out: the chart on stdout as a table, as JSON, or as the settings with its advice applied; FAULTS_FOUND where there are some.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.errors import DONE, FAULTS_FOUND, STOPPED_EARLY
from lamplighter.rundir import RunDir

if TYPE_CHECKING:
    from lamplighter.doctor.findings import Chart


def doctor(folder: RunDir, request: dict[str, Any]) -> int:
    """Every chosen probe; a failure of one never ends the rounds."""
    began = time.monotonic()
    with report.phase("import"):
        from lamplighter.doctor import findings, runner
        from lamplighter.doctor import stages as rounds
    stages = rounds.choose(request["only"], readable=not request["unread"])
    case = runner.Case(folder.config, request["preset"], Path(request["runs_dir"]), folder.path / "scratch")
    runner.adopt_orphans()
    report.when_asked(_stop, None)
    visits = [_unread(request["unread"])] if request["unread"] else []
    with report.phase("doctor", total=len(stages), unit="probes") as phase:
        for number, stage in enumerate(stages):
            seen = runner.visit(stage, case, lambda text, n=number, name=stage.name: phase.set(n, f"{name}: {text}"))  # type: ignore[misc]
            phase.set(number + 1)
            report.note(f"{findings.worst(seen):<5}  {stage.name}  ({seen.seconds:.1f} s)")
            visits.append(seen)
    whole = findings.Chart(tuple(visits), time.monotonic() - began)
    if request["print_config"]:
        _print_config(folder, whole, request)
    else:
        report.result(findings.as_json(whole) if request["json"] else findings.table(whole))
    return DONE if whole.ok else FAULTS_FOUND


def _unread(error: dict[str, str]) -> Any:
    """The settings could not be read: that is a finding, and nothing of a run is looked at in its stead."""
    from lamplighter.doctor.probe import Finding, Stage
    from lamplighter.doctor.runner import Visit

    fault = Finding("fault", error["what"], error["why"], error["next"], "bad_config")
    rest = Finding("warn", "the probes of the run were not made: its settings cannot be read", "", "mend that first")
    return Visit(Stage("settings / readable", "", 0.0), (fault, rest), 0.0)


def _stop() -> None:
    """Asked to stop: the probe that is going on, and what it started, end before us."""
    import psutil

    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            one.kill()
    report.leave(STOPPED_EARLY)


def _print_config(folder: RunDir, whole: Chart, request: dict[str, Any]) -> None:
    """The settings with each advice that can be followed, said where it came from."""
    from lamplighter.config import Resolved, dump, load_dump, with_change
    from lamplighter.doctor.findings import advice
    from lamplighter.errors import BadConfig

    resolved = Resolved(load_dump(folder.config), request["origin"], request["preset"])
    for name, one in advice(whole).items():
        try:
            resolved = with_change(resolved, name, one.value, f"doctor: {one.why}")
        except BadConfig as error:
            report.warn(f"{one.probe} advises {name} {one.value}, which does not fit the rest: {error.what}")
    report.result(dump(resolved))
    for probe, finding in whole.findings("fault", "warn"):
        report.note(f"{finding.level}: {probe}: {finding.what}")
