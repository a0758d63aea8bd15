"""A Python loop over tokens in a model, named: which line of the user's code runs once per token, and how long it takes.

In:  a function that runs one forward pass on a number of positions.
Out: a HotLoop: the loop's line, how often it runs in one forward pass, its share of the time.
"""

from __future__ import annotations

import ast
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lamplighter.procs import stacks
from lamplighter.procs.stacks import Frame

_SAMPLE_S = 0.001
_LOOK_S = 0.6
_PER_TOKEN = 0.9  # a line counts as run for each token from so many times per added token on
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)


@dataclass(frozen=True)
class HotLoop:
    """A line that runs for every token."""

    place: Frame  # the loop
    runs: float  # in one forward pass, per token
    share: float  # of the time of a forward pass


def find(forward: Callable[[int], object], short: int, long: int) -> HotLoop | None:
    """Count lines at two lengths: what grows with the tokens runs for each of them. Then sample its share of the time."""
    few, many = _count_lines(lambda: forward(short)), _count_lines(lambda: forward(long))
    runs: dict[tuple[str, int, int, str], float] = {}  # by loop: file, first and last line, function
    for (file, line, func), count in many.items():
        per_token = (count - few[file, line, func]) / (long - short)
        if per_token >= _PER_TOKEN:
            key = (file, *_loop_around(file, line), func)
            runs[key] = max(per_token, runs.get(key, 0.0))
    if not runs:
        return None
    on_stack, samples = _sample(lambda: forward(long))
    found = []
    for (file, first, last, func), per_token in runs.items():
        hits = sum(on_stack[file, line] for line in range(first, last + 1))
        found.append(HotLoop(Frame(file, first, func), per_token, min(1.0, hits / max(1, samples))))
    return max(found, key=lambda one: one.share)


def _count_lines(work: Callable[[], object]) -> Counter[tuple[str, int, str]]:
    """How often each line of the user's code runs."""
    lines: Counter[tuple[str, int, str]] = Counter()

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines[frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name] += 1
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line if stacks.is_users(frame.f_code.co_filename) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def _sample(work: Callable[[], object]) -> tuple[Counter[tuple[str, int]], int]:
    """Do it again and again, and look at this thread a thousand times a second: which lines of the user's are on its
    stack, and how many looks there were.
    """
    on_stack: Counter[tuple[str, int]] = Counter()
    looks, me, over = [0], threading.get_ident(), threading.Event()

    def look_on() -> None:
        while not over.wait(_SAMPLE_S):
            looks[0] += 1
            frames = stacks.frames_of(sys._current_frames().get(me))
            on_stack.update({(frame.file, frame.line) for frame in frames if stacks.is_users(frame.file)})

    thread = threading.Thread(target=look_on, daemon=True)
    interval, until = sys.getswitchinterval(), time.monotonic() + _LOOK_S
    sys.setswitchinterval(_SAMPLE_S / 2)
    thread.start()
    try:
        work()
        while time.monotonic() < until:
            work()
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    return on_stack, looks[0]


def _loop_around(file: str, line: int) -> tuple[int, int]:
    """The first and last line of the innermost loop that holds the line; the line itself where there is none, as in a
    function that is called per token.
    """
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):  # no source that can be read: no loop to name
        return line, line
    loops = [(node.lineno, node.end_lineno or node.lineno) for node in ast.walk(tree) if isinstance(node, _LOOPS)]
    return max(((first, last) for first, last in loops if first <= line <= last), default=(line, line))
