"""What a probe gets and what it gives, and the table of all probes: from the machine to the model, then the ranks.

In:  the resolved run, where its runs live, and a folder to scratch in.
Out: Findings in the form verdict / why / next, each one JSON record; `now` says what the probe is at, for the live line.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lamplighter.config import Run
from lamplighter.errors import LampError, UsageError
from lamplighter.procs import stacks
from lamplighter.procs.stacks import Frame

Level = Literal["skip", "ok", "warn", "fault"]  # skip: nothing was tested, and why


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, and what it is like."""

    level: Level
    what: str  # the verdict, one sentence with its numbers
    why: str = ""
    next: str = ""  # one command or setting
    cause: str = ""  # the zoo's name where there is one
    culprit: dict[str, Any] = field(default_factory=dict)  # file, line, path, pid, worker, rank, module
    settings: dict[str, Any] = field(default_factory=dict)  # advice as fields: {"train.micro_batch": 4}
    figures: dict[str, float] = field(default_factory=dict)  # for --json


def finding(
    level: Level,
    what: str,
    why: str = "",
    next: str = "",
    cause: str = "",
    *,
    at: Frame | None = None,
    culprit: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    figures: dict[str, float] | None = None,
) -> Finding:
    """A Finding whose culprit is the line `at`, and whose next step, where none is given, is to take its settings."""
    where = {**(at.fields() if at else {}), **(culprit or {})}
    steps, changes = next or as_flags(settings or {}), settings or {}
    return Finding(level, what, why, steps, cause, culprit=where, settings=changes, figures=figures or {})


skip, ok = partial(finding, "skip"), partial(finding, "ok")
warn, fault = partial(finding, "warn"), partial(finding, "fault")


def as_flags(settings: dict[str, Any]) -> str:
    """Settings as they are typed: --train.compile false --save.every_s 600."""
    return " ".join(f"--{name} {_as_word(value)}" for name, value in settings.items())


def _as_word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def as_finding(error: LampError, cause: str = "", culprit: dict[str, Any] | None = None) -> Finding:
    """An error of another room, as a fault."""
    return fault(error.what, error.why, error.next, cause or error.cause, culprit=culprit)


def failed(error: BaseException, what: str, advice: str = "mend that line") -> Finding:
    """The fault for the user's own code that raises."""
    frame = stacks.users_line(frames := stacks.frames_of_error(error)) or next(iter(frames), None)
    why = f"{type(error).__name__}: {error}" + (f", raised at {frame.place}" if frame else "")
    return fault(what, why, advice, at=frame)


def first_line(text: object) -> str:
    """Of an error that may have many, or none."""
    return (str(text).strip().splitlines() or [""])[0]


@dataclass(frozen=True)
class ProbeContext:
    """What a probe may look at. It changes nothing outside `scratch`."""

    run: Run
    preset: str | None
    runs_dir: Path
    scratch: Path
    now: Callable[[str], None] = print  # the live line


ProbeFunction = Callable[[ProbeContext], Iterator[Finding]]


class CannotExamine(Exception):
    """There is nothing for a probe to look at; the finding says why, and is its last one."""

    def __init__(self, found: Finding) -> None:
        super().__init__(found.what)
        self.found = found


def findings_of(function: ProbeFunction, context: ProbeContext) -> Iterator[Finding]:
    """What a probe finds; an error that has a name is a finding too, and ends it."""
    try:
        yield from function(context)
    except CannotExamine as end:
        yield end.found
    except LampError as error:
        yield as_finding(error)


@dataclass(frozen=True)
class Probe:
    """One question, answered in a child of its own with a deadline."""

    name: str  # "data / files"
    function: str  # "lamplighter.doctor.data_probes:files"
    deadline_s: float


def _probe(name: str, function: str, deadline_s: float) -> Probe:
    return Probe(name, f"lamplighter.doctor.{function}", deadline_s)


_MACHINE = (
    _probe("environment / torch and driver", "system:torch_and_driver", 90),
    _probe("environment / packages", "system:packages", 90),
    _probe("environment / clock and language", "system:clock_and_language", 20),
    _probe("environment / processors", "system:processors", 20),
    _probe("environment / limits", "system:limits", 20),
    _probe("environment / tracing", "system:tracing", 30),
    _probe("environment / leftovers", "system:leftovers", 30),
)
_RUN = (
    _probe("settings / plan", "settings:planned", 60),
    _probe("settings / schedule and saves", "settings:schedule_and_saves", 60),
    _probe("settings / threads", "settings:threads", 20),
    _probe("settings / disk", "settings:disk", 60),
    _probe("data / files", "data_probes:files", 40),
    _probe("data / tokenizer", "data_probes:tokenizer", 40),
    _probe("data / cache", "data_probes:cache", 40),
    _probe("data / documents", "document_probe:documents", 40),
    _probe("loading / in this process", "loading:here", 60),
    _probe("loading / workers by fork", "loading:by_fork", 90),
    _probe("loading / workers by spawn", "loading:by_spawn", 90),
    _probe("loading / workers by forkserver", "loading:by_forkserver", 90),
    _probe("model / one step", "model_cost:one_step", 90),
    _probe("model / learning", "model:learning", 90),
    _probe("model / precision", "model_cost:precision", 60),
    _probe("model / memory", "model_cost:memory", 90),
    _probe("model / compile", "model_cost:compiling", 90),
)
_RANKS = (
    _probe("collectives / address and port", "collectives:address_and_port", 30),
    _probe("collectives / ranks of this run", "collectives:ranks_of_run", 180),
)
_ALL = (*_MACHINE, *_RUN, *_RANKS)
SELF_TESTS = (
    _probe("the machine", "system:torch_and_driver", 90),
    _probe("kill and resume", "self_tests:kill_and_resume", 600),
    _probe("generation", "self_tests:generation", 240),
    _probe("attention", "self_tests:attention", 120),
    _probe("speed", "self_tests:speed", 240),
    _probe("memory", "model_cost:memory", 240),
    _probe("planted faults", "self_tests:planted_faults", 480),
    _probe("heat and power", "self_tests:cards", 60),
)  # of lamp selftest, in this order: a later one may use the run of an earlier one


def choose(only: list[str], readable: bool) -> tuple[Probe, ...]:
    """All, or those whose name holds one of the words; without readable settings those of the machine alone."""
    for word in only:
        if not any(_fits(probe, word) for probe in _ALL):
            raise _nothing_like(word)
    probes = _ALL if readable else (*_MACHINE, *_RANKS)
    return tuple(probe for probe in probes if not only or any(_fits(probe, word) for word in only))


def _fits(probe: Probe, word: str) -> bool:
    return word.lower().strip() in probe.name.lower()


def _nothing_like(word: str) -> UsageError:
    names = [probe.name for probe in _ALL]
    near = difflib.get_close_matches(word, sorted({part for name in names for part in name.split()}), 1, 0.5)
    why = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
    return UsageError(f"no probe is called {word}", why, "lamp doctor --only environment collectives")
