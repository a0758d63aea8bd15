"""Lamplighter: language-model training that never goes dark.

In:  a script of yours that wants to say what it is doing: `with lamp.phase("tokenise", total=n) as p: p.tick()`.
Out: the watcher knows it, under `lamp watch` and under `lamp train`; anywhere else nothing happens, and it costs nothing.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol

__version__ = "0.1.0"
__all__ = ["PhaseLike", "__version__", "phase"]


class PhaseLike(Protocol):
    """A named stretch of work with a count: a report.Phase in a process of `lamp train`, else one of a watched script."""

    def __enter__(self) -> PhaseLike: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def tick(self, n: float = 1, item: str | None = None) -> None:
        """`n` more units are done; `item` is what is being worked on now."""


class _Watched:
    """A phase that goes into the slot of a watched process; without an agent, one that goes nowhere."""

    def __init__(self, agent: Any, name: str, total: float | None, unit: str) -> None:
        self._agent, self._begin = agent, (name, total, unit)

    def __enter__(self) -> _Watched:
        if self._agent is not None:
            self._agent.phase_begin(*self._begin)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._agent is not None:
            self._agent.phase_end()

    def tick(self, n: float = 1, item: str | None = None) -> None:
        if self._agent is not None:
            self._agent.phase_tick(n, item)


def phase(name: str, total: float | None = None, unit: str = "") -> PhaseLike:
    """Say what the script does now and how much of it there is; use as a context manager."""
    agent = sys.modules.get("_lamplighter_bootstrap")
    report: Any = sys.modules.get("lamplighter.report")  # loaded in every process that `lamp train` starts
    if agent is None and report is not None:
        reported: PhaseLike = report.phase(name, total, unit)
        return reported
    return _Watched(agent, name, total, unit)


def __getattr__(name: str) -> Any:
    if name == "TrainerCallback":
        from lamplighter.watch.callback import trainer_callback

        return trainer_callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
