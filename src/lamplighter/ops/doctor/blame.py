"""Whose line it was: the innermost frame of the user's own code in a stack.

In:  a traceback, or the text that faulthandler wrote.
Out: frames, the innermost first, and the one to name.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

OURS = str(Path(__file__).parents[2])
LIBRARY = (sysconfig.get_paths()["stdlib"], "site-packages", "dist-packages", "<frozen", "<string>")
DUMPED = re.compile(r'File "(.+)", line (\d+) in (.+)')
DEPTH = 12


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def frames_of(tb: TracebackType | None) -> list[Frame]:
    """The stack of an exception."""
    found = traceback.extract_tb(tb)
    return [Frame(entry.filename, entry.lineno or 0, entry.name) for entry in reversed(found)]


def frames_in(dump: str) -> list[Frame]:
    """The stack that faulthandler wrote of one thread."""
    return [Frame(file, int(line), function) for file, line, function in DUMPED.findall(dump)]


def guilty(frames: list[Frame]) -> Frame | None:
    """The innermost frame of the user's code; where there is none, ours; where there is none, the innermost of all."""
    own = [frame for frame in frames if not any(part in frame.file for part in LIBRARY)]
    theirs = [frame for frame in own if not frame.file.startswith(OURS)]
    return next(iter([*theirs, *own, *frames]), None)


def culprit(frames: list[Frame]) -> dict[str, Any]:
    """The fields of a finding that say where."""
    frame = guilty(frames)
    if frame is None:
        return {}
    stack = [str(one) for one in frames[:DEPTH]]
    return {"file": frame.file, "line": frame.line, "function": frame.function, "stack": stack}
