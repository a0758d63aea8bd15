"""What a probe gets and what it gives: a Patient, and Findings in the form verdict / why / next.

In:  the resolved run, where its runs live, and a folder to scratch in.
Out: Findings that go over a pipe as one JSON line each; `now` says what the probe is at, for the live line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lamplighter.config import Run

Level = Literal["ok", "warn", "fault"]


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


@dataclass(frozen=True)
class Patient:
    """What a probe may look at. It changes nothing outside `scratch`."""

    run: Run
    preset: str | None
    runs_dir: Path
    scratch: Path
    now: Callable[[str], None] = print  # the live line


Probe = Callable[[Patient], Iterator[Finding]]


@dataclass(frozen=True)
class Stage:
    """One probe, run in a child of its own with a deadline."""

    name: str  # "data / ids in range"
    function: str  # "lamplighter.doctor.data:ids_in_range"
    deadline_s: float
