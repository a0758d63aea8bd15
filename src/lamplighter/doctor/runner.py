"""Runs each probe in a child process of its own, with a deadline, and says how it ended.

In:  a Probe, and the ProbeConfig that all probes of one examination share.
Out: a ProbeResult: what was found, in how many seconds. A probe that hangs, dies, raises or eats the memory is a finding too.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lamplighter.config import load_dump
from lamplighter.doctor.probe import Finding, Probe, ProbeContext, ProbeFunction, as_finding, fault, ok, warn
from lamplighter.errors import LampError
from lamplighter.procs import child, procfs, stacks
from lamplighter.procs.child import Outcome, Say
from lamplighter.procs.pool import usable_cores
from lamplighter.procs.stacks import Frame
from lamplighter.rundir import human_bytes

MOST_FINDINGS = 200
_MEMORY_SHARE = 0.85  # of what is free at the start
_MOST_PATIENCE = 4.0


@dataclass(frozen=True)
class ProbeConfig:
    """What all probes of one examination share."""

    config: Path
    preset: str | None
    runs_dir: Path
    scratch: Path
    memory_bytes: int | None = None  # what a probe and its children may take; none: most of what is free


@dataclass(frozen=True)
class ProbeResult:
    """One probe, run."""

    probe: Probe
    findings: tuple[Finding, ...]
    seconds: float


def patience() -> float:
    """Deadlines are for a calm machine: on a crowded one they grow with the crowd, at most fourfold."""
    return min(_MOST_PATIENCE, max(1.0, os.getloadavg()[0] / usable_cores()))


class _Heard:
    """What a probe has said so far."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.left_out = 0
        self.now = "starting"

    def record(self, record: dict[str, Any]) -> None:
        if "now" in record:
            self.now = str(record["now"])
        elif len(self.findings) < MOST_FINDINGS or record["finding"]["level"] == "fault":
            self.findings.append(Finding(**record["finding"]))
        else:
            self.left_out += 1


def run(probe: Probe, config: ProbeConfig, tell: Callable[[str], None] = lambda _: None) -> ProbeResult:
    """One probe from its start to its end, whatever that is; `tell` gets the live line ten times a second."""
    started, deadline_s, heard = time.monotonic(), probe.deadline_s * patience(), _Heard()
    most = config.memory_bytes or int(_MEMORY_SHARE * procfs.memory_available())
    request = {**{name: value and str(value) for name, value in asdict(config).items()}, "function": probe.function}
    try:
        config.scratch.mkdir(parents=True, exist_ok=True)
        outcome = child.run(
            "lamplighter.doctor.runner:examine",
            request,
            deadline_s=deadline_s,
            memory_bytes=most,
            on_record=heard.record,
            on_tick=lambda spent: tell(f"{heard.now} ({spent:.0f} s of at most {deadline_s:.0f})"),
        )
    except OSError as error:  # no more processes, files or memory to be had: that is a finding too
        return ProbeResult(probe, (_not_started(error),), time.monotonic() - started)
    last = _how_it_ended(outcome, heard, most)
    return ProbeResult(probe, (*heard.findings, *_about_its_words(outcome, heard), *last), time.monotonic() - started)


def examine(request: dict[str, Any], say: Say) -> None:
    """In the child: one JSON record for each finding, and for what the probe is at."""
    context = ProbeContext(
        load_dump(Path(request["config"])),
        request["preset"],
        Path(request["runs_dir"]),
        Path(request["scratch"]),
        lambda text: say(now=text),
    )
    module, _, name = request["function"].partition(":")
    function: ProbeFunction = getattr(importlib.import_module(module), name)
    try:
        for finding in function(context):
            say(finding=asdict(finding))
    except LampError as error:
        say(finding=asdict(as_finding(error)))


# ---------------------------------------------------------------- how it ended, as findings


def _not_started(error: OSError) -> Finding:
    what = f"the probe could not be started: {error.strerror or error}"
    why = "no process, file or memory could be had for it"
    return fault(what, why, "lamp doctor --only limits; ulimit -a", "not_started")


def _how_it_ended(outcome: Outcome, heard: _Heard, most: int) -> list[Finding]:
    """Nothing to say about a probe that came to its end."""
    if outcome.ended_for == "memory":
        return [_too_heavy(outcome, heard, most)]
    if outcome.ended_for:
        return [_too_late(outcome, heard)]
    if outcome.error:
        return [_raised(outcome, heard)]
    pid, last = {"pid": outcome.pid}, outcome.last_line
    last = f"its last words: {last[:300]}" if last else "it said nothing"
    if outcome.code < 0:
        name = signal.Signals(-outcome.code).name
        what = f"killed by {name} (signal {-outcome.code}) while {heard.now}"
        why = last + ("; the kernel killed a process for memory meanwhile" if outcome.out_of_memory else "")
        cause = "rss_oom" if outcome.out_of_memory else "killed"
        advice = "lamp watch -- CMD keeps the evidence of such a death"
        return [fault(what, why, advice, cause, culprit=pid, figures={"peak_bytes": float(outcome.peak_bytes)})]
    if not outcome.done:
        what = f"left with exit code {outcome.code} before its end, while {heard.now}"
        return [fault(what, last, "something called os._exit; a library, or your own code", "exit", culprit=pid)]
    return [] if heard.findings or outcome.unreadable else [ok("nothing amiss")]


def _frames(outcome: Outcome) -> list[Frame]:
    taken = outcome.stacks.get(outcome.pid)
    return list(taken.main) if taken else []


def _with_place(what: str, frames: list[Frame]) -> str:
    found = stacks.line_to_name(frames)
    return f"{what}, at {found}" if found else what


def _too_heavy(outcome: Outcome, heard: _Heard, most: int) -> Finding:
    taken, frames = human_bytes(outcome.peak_bytes), _frames(outcome)
    what = _with_place(f"out of memory: {taken} were taken while {heard.now}, {human_bytes(most)} may be", frames)
    why = "more would have brought the machine down, so the probe was ended"
    advice = "a smaller train.micro_batch, data.seq_len or model; fewer workers"
    where, figures = stacks.culprit_fields(frames), {"bytes": float(outcome.peak_bytes)}
    return fault(what, why, advice, "rss_oom", culprit=where, figures=figures)


def _too_late(outcome: Outcome, heard: _Heard) -> Finding:
    """Beyond its deadline: where it was, from its own stack."""
    frames = _frames(outcome)
    what = _with_place(f"no answer in {outcome.seconds:.0f} s, {outcome.state}, while {heard.now}", frames)
    inside = frames[0] if frames and frames[0] != stacks.line_to_name(frames) else None
    why = f"inside {inside.place}" if inside else "" if frames else "its stack could not be read"
    words = "look at that line; lamp watch -- CMD names what a whole script waits for"
    return fault(what, why, words, "hang", culprit={"pid": outcome.pid, **stacks.culprit_fields(frames)})


def _raised(outcome: Outcome, heard: _Heard) -> Finding:
    frames, said = list(outcome.frames), outcome.output.strip().splitlines()
    first = outcome.error.splitlines()[0][:400]
    why = f"while {heard.now}; the whole: {' | '.join(said[-3:])[:600]}" if said else f"while {heard.now}"
    missing = first.startswith("ModuleNotFoundError")
    remedy = "install it, or check PYTHONPATH" if missing else "mend what that line does"
    return fault(_with_place(first, frames), why, remedy, "raised", culprit=stacks.culprit_fields(frames))


def _about_its_words(outcome: Outcome, heard: _Heard) -> list[Finding]:
    found = []
    if heard.left_out:
        found.append(warn(f"{heard.left_out:,} more findings like these were left out"))
    if outcome.unreadable:
        what = f"{outcome.unreadable:,} lines of the probe could not be read"
        found.append(fault(what, "what they would have said is not known", cause="garbled"))
    return found
