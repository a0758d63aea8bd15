"""A quiet spell on paper: the observations and stacks behind a verdict, kept in the folder and read back to judge again.

In:  a window of observations, the stacks taken in it, what is usual.
Out: one JSON file; and from such a file exactly what `verdict.judge` was given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lamplighter.procs.procfs import Observation, ProcessLook, ThreadLook
from lamplighter.procs.stacks import Frame, Stacks, ThreadStack
from lamplighter.report import Slot


def to_json(window: Sequence[Observation], captures: Sequence[Stacks], usual_s: float) -> str:
    """First and last look are what the rules compare."""
    kept = [window[0], window[-1]] if len(window) > 1 else list(window)
    record = {"usual_s": usual_s, "window": [asdict(one) for one in kept], "stacks": [asdict(one) for one in captures]}
    return json.dumps(record, indent=1)


def from_json(text: str) -> tuple[list[Observation], list[Stacks], float]:
    """What `judge` was given."""
    record = json.loads(text)
    window = [Observation(o["at"], Slot(**o["slot"]), tuple(map(_process, o["tree"]))) for o in record["window"]]
    return window, [_stacks(one) for one in record["stacks"]], record["usual_s"]


def _process(fields: dict[str, Any]) -> ProcessLook:
    return ProcessLook(**{**fields, "each": tuple(ThreadLook(**thread) for thread in fields["each"])})


def _stacks(fields: dict[str, Any]) -> Stacks:
    threads = tuple(
        ThreadStack(t["name"], tuple(Frame(**frame) for frame in t["frames"]), t["holds_gil"])
        for t in fields["threads"]
    )
    return Stacks(**{**fields, "threads": threads})
