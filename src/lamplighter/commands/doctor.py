"""lamp doctor: what is wrong with this machine and this run, before anything is spent.

In:  a run as `lamp train` takes it; which probes.
Out: a table, JSON, or the settings with the advice applied; 0 where no fault was found, 1 where there is one. The probes
     run in children of a child, under watch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import own_code, report
from lamplighter.commands.arguments import many, parse
from lamplighter.errors import (
    CRASHED,
    DONE,
    FAULTS_FOUND,
    STOPPED_EARLY,
    BadConfig,
    InputMissing,
    LampError,
    UsageError,
)
from lamplighter.procs import prctl, procfs
from lamplighter.rundir import RunDir, write_atomic

if TYPE_CHECKING:
    from lamplighter.doctor.findings import Report


def _doctor_flags(
    run_yaml: Path | None = None,
    /,
    *,
    preset: str | None = None,
    only: str = "",
    json: bool = False,
    print_config: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp doctor` takes besides fields; --only takes several words, and is taken out before."""


def doctor(words: list[str]) -> int:
    """Every probe. Settings that cannot be read are a finding; a word that is no flag is an error, as everywhere."""
    from lamplighter.commands.session import session
    from lamplighter.config import Resolved, dump, parse_overrides, resolve

    rest, overrides = parse_overrides(words)
    rest, lists = many(rest, "only")
    flags = parse("doctor", _doctor_flags, rest)
    if flags["json"] and flags["print_config"]:
        raise UsageError("--json and --print-config", "one result at a time", "give one of them")
    unread: dict[str, str] = {}
    try:
        resolved = resolve(flags["preset"], flags["run_yaml"], overrides)
    except (BadConfig, InputMissing) as error:
        if flags["print_config"]:
            raise  # there is nothing to apply advice to
        unread = {"what": error.what, "why": error.why, "next": error.next}
        resolved = Resolved(resolve(None).run)
    own_code.look_beside(flags["run_yaml"])
    request = {
        "only": lists["only"],
        "json": flags["json"],
        "print_config": flags["print_config"],
        "runs_dir": str(flags["runs_dir"].absolute()),
        "preset": resolved.preset,
        "origin": resolved.origin,
        "unread": unread,
    }
    code = session("doctor", request, config=dump(resolved))
    return CRASHED if code == FAULTS_FOUND else code


# ---------------------------------------------------------------- in the child


def doctor_child(folder: RunDir, request: dict[str, Any]) -> int:
    """Every chosen probe; a failure of one never ends the others."""
    began = time.monotonic()
    with report.phase("import"):
        from lamplighter.doctor import findings, probe, runner
    prctl.adopt_orphans()
    report.when_asked(end_probes, None)
    settings = _with_local_model(folder, request)
    probes = probe.choose(request["only"], readable=not request["unread"])
    config = runner.ProbeConfig(settings, request["preset"], Path(request["runs_dir"]), folder.path / "scratch")
    results = [_unread(request["unread"])] if request["unread"] else []
    with report.phase("doctor", total=len(probes), unit="probes") as phase:
        for number, one in enumerate(probes):
            seen = runner.run(one, config, lambda text, n=number, name=one.name: phase.set(n, f"{name}: {text}"))  # type: ignore[misc]
            phase.set(number + 1)
            report.note(f"{findings.worst(seen):<10}  {one.name}  ({seen.seconds:.1f} s)")
            results.append(seen)
    whole = findings.Report(tuple(results), time.monotonic() - began)
    if request["print_config"]:
        _print_config(folder, whole, request)
    else:
        report.result(findings.as_json(whole) if request["json"] else findings.table(whole))
    return DONE if whole.ok else FAULTS_FOUND


def _with_local_model(folder: RunDir, request: dict[str, Any]) -> Path:
    """The settings for the probes, with a model of the hub as a folder of this machine; that it cannot be had is a finding."""
    from lamplighter.config import Resolved, dump, load_dump
    from lamplighter.model.origin import is_hub_name, with_local_model

    run = load_dump(folder.config)
    if request["unread"] or not is_hub_name(run.model.init_from or ""):
        return folder.config
    try:
        local = with_local_model(run, folder.path)
    except LampError as error:
        request["unread"] = {"what": error.what, "why": error.why, "next": error.next}
        return folder.config
    place = folder.path / "probed.yaml"
    write_atomic(place, dump(Resolved(local, request["origin"], request["preset"])), mode=0o600)
    return place


def _unread(error: dict[str, str]) -> Any:
    """The settings could not be read: that is a finding, and nothing of a run is looked at in its stead."""
    from lamplighter.doctor.probe import Finding, Probe
    from lamplighter.doctor.runner import ProbeResult

    fault = Finding("fault", error["what"], error["why"], error["next"], "bad_config")
    rest = Finding("warn", "the probes of the run were not made: its settings cannot be read", "", "mend that first")
    return ProbeResult(Probe("settings / readable", "", 0.0), (fault, rest), 0.0)


def end_probes() -> None:
    """Asked to stop: the probe that is going on, and what it started, end before us."""
    for pid in procfs.tree(os.getpid())[1:]:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, signal.SIGKILL)
    report.leave(STOPPED_EARLY)


def _print_config(folder: RunDir, whole: Report, request: dict[str, Any]) -> None:
    """The settings with each advice that can be followed, said where it came from."""
    from lamplighter.config import Resolved, load_dump, shown, with_change
    from lamplighter.doctor.findings import advice

    resolved = Resolved(load_dump(folder.config), request["origin"], request["preset"])
    for name, one in advice(whole).items():
        try:
            resolved = with_change(resolved, name, one.value, f"doctor: {one.why}")
        except BadConfig as error:
            report.warn(f"{one.probe} advises {name} {one.value}, which does not fit the rest: {error.what}")
    report.result(shown(resolved))
    for probe, finding in whole.findings("fault", "warn"):
        report.note(f"{finding.level}: {probe}: {finding.what}")
