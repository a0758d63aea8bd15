"""Lamplighter: language-model training that never goes dark.

In:  a script of yours that wants to say what it is doing: `with lamp.phase("tokenise", total=n) as p: p.tick()`.
Out: the watcher knows it, under `lamp watch` and under `lamp train`; anywhere else nothing happens, and it costs nothing.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

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
    """A run's page as a notebook shows it: a frame of its own, which asks nobody for anything; made anew while the run goes on."""

    def __init__(self, path: Path, every_s: float = 5.0) -> None:
        self.path, self.every_s = path, every_s

    def _repr_html_(self) -> str:
        import html

        from lamplighter.dash.report_page import build
        from lamplighter.rundir import RunDir, is_running

        run = RunDir(self.path)
        source = html.escape(build(run, live=is_running(run)), quote=True)
        frame = f'<iframe srcdoc="{source}" sandbox="allow-scripts" style="width:100%;height:900px;border:0"></iframe>'
        return f"<div>{frame}</div>"  # a frame alone makes IPython print a warning

    def _ipython_display_(self) -> None:
        """What IPython calls where it is there; any other notebook takes _repr_html_, once."""
        import threading

        from IPython.display import HTML, display

        shown = display(HTML(self._repr_html_()), display_id=True)
        if shown is not None and self.every_s > 0:
            follow = threading.Thread(target=self._follow, args=(HTML, shown), name="lamp-show", daemon=True)
            follow.start()

    def _follow(self, html: Any, shown: Any) -> None:
        import time

        from lamplighter import rundir

        run = rundir.RunDir(self.path)
        live = rundir.is_running(run)
        while live:
            time.sleep(self.every_s)
            live = rundir.is_running(run)  # asked first: the last picture shows the end
            shown.update(html(self._repr_html_()))


def show(run: str, every_s: float = 5.0) -> Shown:
    """In a notebook: the panels of a run, by the path of its folder or its name in runs/; anew every so many seconds while it goes on."""
    from pathlib import Path

    from lamplighter.errors import InputMissing

    for path in (Path(run), Path("runs") / run):
        if (path / "events.jsonl").exists():
            return Shown(path, every_s)
    raise InputMissing(f"there is no run {run}", "neither by that path nor in runs/", "lamp runs lists them")
