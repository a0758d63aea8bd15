"""Whose line it was: the innermost frame of the user's own code in a stack.

In:  a traceback, or the text that faulthandler wrote.
Out: places, the innermost first, and the one to name.
"""

from __future__ import annotations

import re
import traceback
from types import TracebackType
from typing import Any

from lamplighter.doctor.code_owner import OURS, Place, is_users

DUMPED = re.compile(r'File "(.+)", line (\d+) in (.+)')
DEPTH = 12


def frames_of(tb: TracebackType | None) -> list[Place]:
    """The stack of an exception."""
    return [Place(entry.filename, entry.lineno or 0, entry.name) for entry in reversed(traceback.extract_tb(tb))]


def frames_in(dump: str) -> list[Place]:
    """The stack that faulthandler wrote of one thread."""
    return [Place(file, int(line), name) for file, line, name in DUMPED.findall(dump)]


def guilty(frames: list[Place]) -> Place | None:
    """The innermost frame of the user's code; where there is none, ours; where there is none, the innermost of all."""
    theirs = [frame for frame in frames if is_users(frame.file)]
    ours = [frame for frame in frames if frame.file.startswith(OURS)]
    return next(iter([*theirs, *ours, *frames]), None)


def culprit(frames: list[Place]) -> dict[str, Any]:
    """The fields of a finding that say where."""
    frame = guilty(frames)
    return {} if frame is None else {**frame.fields(), "stack": [str(one) for one in frames[:DEPTH]]}
