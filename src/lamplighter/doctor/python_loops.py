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


@dataclass(frozen=True)
class HotLoop:
    """A line that runs for every token."""

    place: Frame  # the loop
    runs: float  # in one forward pass, per token
    share: float  # of the time of a forward pass


class Counting:
    """Counts how often each line of the user's code runs."""

    def __init__(self) -> None:
        self.lines: Counter[tuple[str, int, str]] = Counter()

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if stacks.is_users(frame.f_code.co_filename) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.lines[frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name] += 1
        return self._line

    def count(self, work: Callable[[], object]) -> Counter[tuple[str, int, str]]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            work()
        finally:
            sys.settrace(before)
        return self.lines


class Sampling:
    """Looks at the main thread a thousand times a second: which lines of the user's are on its stack."""

    def __init__(self) -> None:
        self.on_stack: Counter[tuple[str, int]] = Counter()
        self.samples = 0
        self._ident = threading.get_ident()
        self._over = threading.Event()

    def _look_on(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            frame = sys._current_frames().get(self._ident)
            self.samples += 1
            seen = set()
            while frame is not None:
                seen.add((frame.f_code.co_filename, frame.f_lineno))
                frame = frame.f_back
            self.on_stack.update(place for place in seen if stacks.is_users(place[0]))

    def of(self, work: Callable[[], object], seconds: float = _LOOK_S) -> Sampling:
        """While `work` is done again and again."""
        thread = threading.Thread(target=self._look_on, daemon=True)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SAMPLE_S / 2)
        thread.start()
        until = time.monotonic() + seconds
        try:
            work()
            while time.monotonic() < until:
                work()
        finally:
            self._over.set()
            thread.join()
            sys.setswitchinterval(interval)
        return self


def find(forward: Callable[[int], object], short: int, long: int) -> HotLoop | None:
    """Count lines at two lengths: what grows with the tokens runs for each of them. Then sample its share of the time."""
    few, many = (Counting().count(lambda length=length: forward(length)) for length in (short, long))  # type: ignore[misc]
    grows = {key: (many[key] - few[key]) / (long - short) for key in many}
    hot = {key: per for key, per in grows.items() if per >= _PER_TOKEN}
    if not hot:
        return None
    loops: dict[tuple[str, int, str], list[tuple[int, float]]] = {}
    for (file, line, func), per in hot.items():
        head = _loop_around(file, line)
        loops.setdefault((file, head, func), []).append((line, per))
    sampled = Sampling().of(lambda: forward(long))
    best: HotLoop | None = None
    for (file, head, func), body in loops.items():
        inside = _lines_of_loop(file, head) or {line for line, _ in body}
        hits = sum(sampled.on_stack[file, line] for line in inside)
        share = min(1.0, hits / max(1, sampled.samples))
        found = HotLoop(Frame(file, head, func), max(per for _, per in body), share)
        best = found if best is None or found.share > best.share else best
    return best


def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):  # no source that can be read: no loop to name
        return None


def _loops(file: str) -> list[ast.For | ast.While | ast.comprehension | ast.expr]:
    tree = _tree(file)
    kinds = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)] if tree is not None else []


def _loop_around(file: str, line: int) -> int:
    """The innermost loop that holds the line; the line itself where there is none (a function called per token)."""
    holding = [
        node.lineno  # type: ignore[union-attr]
        for node in _loops(file)
        if node.lineno <= line <= (node.end_lineno or node.lineno)  # type: ignore[union-attr]
    ]
    return max(holding, default=line)


def _lines_of_loop(file: str, head: int) -> set[int]:
    for node in _loops(file):
        if node.lineno == head:  # type: ignore[union-attr]
            return set(range(head, (node.end_lineno or head) + 1))  # type: ignore[union-attr]
    return set()
