"""Runs each probe in a child process of its own, with a deadline, and says how it ended.

In:  a Probe, and the ProbeConfig that all probes of one examination share.
Out: a ProbeResult: what was found, in how many seconds. A probe that hangs, dies, raises or eats the memory is a finding too.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lamplighter.config import load_dump
from lamplighter.doctor.probe import Finding, Probe, ProbeContext, fault, findings_of, first_line, ok, warn
from lamplighter.procs import child, procfs, stacks
from lamplighter.procs.child import Outcome, Say
from lamplighter.procs.pool import usable_cores
from lamplighter.procs.signals import signal_name
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
        last = tuple(_how_it_ended(outcome, heard, most))
    except OSError as error:  # no more processes, files or memory to be had: that is a finding too
        what, why = f"the probe could not be started: {error.strerror or error}", "no process, file or memory is left"
        last = (fault(what, why, "lamp doctor --only limits; ulimit -a", "not_started"),)
    return ProbeResult(probe, (*heard.findings, *last), time.monotonic() - started)


def examine(request: dict[str, Any], say: Say) -> None:
    """In the child: one JSON record for each finding, and for what the probe is at."""
    run, runs_dir, scratch = load_dump(Path(request["config"])), Path(request["runs_dir"]), Path(request["scratch"])
    context = ProbeContext(run, request["preset"], runs_dir, scratch, lambda text: say(now=text))
    module, _, name = request["function"].partition(":")
    for found in findings_of(getattr(importlib.import_module(module), name), context):
        say(finding=asdict(found))


# ---------------------------------------------------------------- how it ended, as findings


def _how_it_ended(outcome: Outcome, heard: _Heard, most: int) -> Iterator[Finding]:
    if heard.left_out:
        yield warn(f"{heard.left_out:,} more findings like these were left out")
    if outcome.unreadable:
        what = f"{outcome.unreadable:,} lines of the probe could not be read"
        yield fault(what, "what they would have said is not known", cause="garbled")
    if outcome.ended_for == "memory":
        yield _too_heavy(outcome, heard.now, most)
    elif outcome.ended_for:
        yield _too_late(outcome, heard.now)
    elif outcome.error:
        yield _raised(outcome, heard.now)
    elif not outcome.done:
        yield _died(outcome, heard.now)
    elif not heard.findings and not outcome.unreadable:
        yield ok("nothing amiss")


def _frames(outcome: Outcome) -> list[Frame]:
    taken = outcome.stacks.get(outcome.pid)
    return list(taken.main) if taken else []


def _with_place(what: str, frames: list[Frame]) -> str:
    found = stacks.line_to_name(frames)
    return f"{what}, at {found}" if found else what


def _too_heavy(outcome: Outcome, now: str, most: int) -> Finding:
    taken, frames = human_bytes(outcome.peak_bytes), _frames(outcome)
    what = _with_place(f"out of memory: {taken} were taken while {now}, {human_bytes(most)} may be", frames)
    why = "more would have brought the machine down, so the probe was ended"
    advice = "a smaller train.micro_batch, data.seq_len or model; fewer workers"
    where, figures = stacks.culprit_fields(frames), {"bytes": float(outcome.peak_bytes)}
    return fault(what, why, advice, "rss_oom", culprit=where, figures=figures)


def _too_late(outcome: Outcome, now: str) -> Finding:
    """Beyond its deadline: where it was, from its own stack."""
    frames = _frames(outcome)
    what = _with_place(f"no answer in {outcome.seconds:.0f} s, {outcome.state}, while {now}", frames)
    inside = frames[0] if frames and frames[0] != stacks.line_to_name(frames) else None
    why = f"inside {inside.place}" if inside else "" if frames else "its stack could not be read"
    advice = "look at that line; lamp watch -- CMD names what a whole script waits for"
    return fault(what, why, advice, "hang", culprit={"pid": outcome.pid, **stacks.culprit_fields(frames)})


def _raised(outcome: Outcome, now: str) -> Finding:
    frames, said = list(outcome.frames), outcome.output.strip().splitlines()
    first = first_line(outcome.error)[:400]
    why = f"while {now}; the whole: {' | '.join(said[-3:])[:600]}" if said else f"while {now}"
    missing = first.startswith("ModuleNotFoundError")
    advice = "install it, or check PYTHONPATH" if missing else "mend what that line does"
    return fault(_with_place(first, frames), why, advice, "raised", culprit=stacks.culprit_fields(frames))


def _died(outcome: Outcome, now: str) -> Finding:
    """Killed, or gone by os._exit."""
    pid, last = {"pid": outcome.pid}, outcome.last_line
    why = f"its last words: {last[:300]}" if last else "it said nothing"
    if outcome.code >= 0:
        what = f"left with exit code {outcome.code} before its end, while {now}"
        return fault(what, why, "something called os._exit; a library, or your own code", "exit", culprit=pid)
    what = f"killed by {signal_name(-outcome.code)} (signal {-outcome.code}) while {now}"
    if outcome.out_of_memory:
        why += "; the kernel killed a process for memory meanwhile"
    cause = "rss_oom" if outcome.out_of_memory else "killed"
    advice, figures = "lamp watch -- CMD keeps the evidence of such a death", {"peak_bytes": float(outcome.peak_bytes)}
    return fault(what, why, advice, cause, culprit=pid, figures=figures)
