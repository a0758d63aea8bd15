"""Whose code a line is: the user's, a library's, or ours; and where a thread of this or another process stands.

In:  frames, threads, process numbers.
Out: Places (file, line, function): the innermost one of the user's code first.
"""

from __future__ import annotations

import json
import linecache
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

OURS = str(Path(__file__).parents[2])
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
PYSPY_S = 5.0


@dataclass(frozen=True)
class Place:
    """A line of code."""

    file: str
    line: int
    func: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.func})"

    @property
    def text(self) -> str:
        """The line itself."""
        return linecache.getline(self.file, self.line).strip()

    def fields(self) -> dict[str, Any]:
        """As a culprit."""
        return asdict(self)


def is_users(file: str) -> bool:
    """Neither Python's, nor an installed library's, nor ours."""
    if file.startswith(("<", OURS)) or "site-packages" in file or "dist-packages" in file:
        return False
    return not file.startswith(LIBRARIES) and "/lib/python3" not in file


def stack_of(frame: FrameType | None) -> list[Place]:
    """The innermost first."""
    found = []
    while frame is not None:
        found.append(Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def innermost(stack: Iterable[Place]) -> Place | None:
    """Of the user's code; else the innermost at all."""
    stack = list(stack)
    return next((place for place in stack if is_users(place.file)), stack[0] if stack else None)


def place_of(thread: threading.Thread) -> Place | None:
    """Where a thread of this process stands now."""
    return innermost(stack_of(sys._current_frames().get(thread.ident or 0)))


def raised_at(error: BaseException) -> Place | None:
    """The user's line that an error came from."""
    found, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append(Place(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return innermost(reversed(found))


def threads_of(pid: int) -> list[tuple[str, list[Place]]]:
    """The stacks of another process of ours, by py-spy; none where that is not allowed."""
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return []
    command = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PYSPY_S, check=True)
        dumped = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError, OSError):
        return []  # said by whoever asked: "its stack could not be read"
    return [
        (
            str(item.get("thread_name") or item["thread_id"]),
            [Place(frame["filename"], frame["line"], frame["name"]) for frame in item["frames"]],
        )
        for item in dumped
    ]
