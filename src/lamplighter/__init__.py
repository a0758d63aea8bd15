"""Lamplighter: language-model training that never goes dark.

In:  a script of yours that wants to say what it is doing: `with lamp.phase("tokenise", total=n) as p: p.tick()`.
Out: the watcher knows it, under `lamp watch` and under `lamp train`; anywhere else nothing happens, and it costs nothing.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol

__version__ = "0.1.0"
__all__ = ["PhaseLike", "__version__", "phase", "show"]


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


class Shown:
    """A run's page as a notebook shows it: a frame of its own, which asks nobody for anything."""

    def __init__(self, page: str) -> None:
        self.page = page

    def _repr_html_(self) -> str:
        import html

        source = html.escape(self.page, quote=True)
        return f'<iframe srcdoc="{source}" sandbox="allow-scripts" style="width:100%;height:900px;border:0"></iframe>'


def show(run: str) -> Shown:
    """In a notebook: the panels of a run as they are now, by the path of its folder or its name in runs/."""
    from pathlib import Path

    from lamplighter.dash.report_page import build
    from lamplighter.errors import InputMissing
    from lamplighter.rundir import RunDir

    for path in (Path(run), Path("runs") / run):
        if (path / "events.jsonl").exists():
            return Shown(build(RunDir(path)))
    raise InputMissing(f"there is no run {run}", "neither by that path nor in runs/", "lamp runs lists them")
