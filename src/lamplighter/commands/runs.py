"""lamp runs: all runs and how they stand.

In:  a folder of runs.
Out: one row a run, newest first, or the same as JSON.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from lamplighter.commands import result, write
from lamplighter.commands.arguments import parse
from lamplighter.errors import DONE
from lamplighter.rundir import FORMAT, RunDir, is_running, number, read_status, version_of
from lamplighter.safe_text import clean
from lamplighter.watch.rank_lines import rank_lines, ranks_of
from lamplighter.watch.status import duration, standing_flags


def _runs_flags(*, json: bool = False, watch: bool = False, runs_dir: Path = Path("runs")) -> None:
    """All runs."""


def runs(words: list[str]) -> int:
    """One row a run, newest first; again and again with --watch."""
    flags = parse("runs", _runs_flags, words)
    rows = _rows(flags["runs_dir"])
    if flags["json"]:
        return result(json.dumps(rows, indent=1) + "\n")
    if flags["watch"]:
        return _watch(flags["runs_dir"])
    return result(_table(flags["runs_dir"], rows))


def _watch(runs_dir: Path) -> int:
    """The table anew every second: in place on a terminal, one below the other elsewhere; Ctrl+C leaves."""
    import signal
    import sys

    from lamplighter.procs.signals import left_by_ctrl_c

    left = left_by_ctrl_c()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is nothing to save
    while not left.is_set():
        rows = _rows(runs_dir)
        text = f"{time.strftime('%H:%M:%S')}  {sum(row['live'] for row in rows)} of {len(rows)} runs are going on; Ctrl+C leaves\n{_table(runs_dir, rows)}"
        if sys.stdout.isatty():
            write(1, "\x1b[H\x1b[2J")
        result(text)
        left.wait(1.0 if sys.stdout.isatty() else 1.8)
    return DONE


def _rows(runs_dir: Path) -> list[dict[str, Any]]:
    rows = []
    folders = {path.parent: path for name in ("status.json", "events.jsonl") for path in runs_dir.glob(f"*/{name}")}
    for path in folders.values():  # while a run waits for its nodes it has a status alone
        run = RunDir(path.parent)
        status = read_status(run)
        running = is_running(run)
        state = status.get("state", "unknown")
        if not running and state in ("running", "stopping"):
            state = "lost"  # killed with its parent: nobody wrote the end
        if (found := version_of(status)) > FORMAT:
            state = f"format {found}"  # of a newer version: only that is known
        if status["damage"]:
            state = "damaged"
        rows.append(
            {**status, "run": run.name, "state": state, "live": running, "age_s": time.time() - _changed_at(path)}
        )
    return sorted(rows, key=lambda row: float(row["age_s"]))


def _table(runs_dir: Path, rows: list[dict[str, Any]]) -> str:
    if not rows:
        return f"no runs in {runs_dir}; next: lamp demo\n"
    head = f"{'run':<24} {'state':<10} {'step':>14} {'safe to':>8} {'loss':>8} {'val':>8} {'spent':>9} {'last':>10}  red flags\n"
    return head + "".join(_row(row) + _ranks(row) for row in rows) + _foot(runs_dir, rows)


def _ranks(row: dict[str, Any]) -> str:
    """Under a run that is going on, a line for each of its ranks."""
    return "".join(f"    {line}\n" for line in rank_lines(ranks_of(row))) if row["live"] else ""


def _foot(runs_dir: Path, rows: list[dict[str, Any]]) -> str:
    """A command that can be pasted: about the newest run, or the newest of those that are running."""
    running = [row for row in rows if row["state"] in ("running", "stopping")]
    verb, others = ("watch", "why, stop or save") if running else ("checkpoints", "generate or watch")
    run = RunDir(runs_dir / (running or rows)[0]["run"])
    return f"next: lamp {verb} {run.address}\n      ({others} in the place of {verb}; any other run in the place of {clean(run.name)}; lamp compare and lamp dash show several)\n"


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # a run that is being removed, or a link to nowhere
        return 0.0


def _row(row: dict[str, Any]) -> str:
    step, steps, safe = (int(number(row.get(name))) for name in ("step", "steps", "durable_step"))
    of, known = f"{step}/{steps or '?'}", [number(row.get(name), math.nan) for name in ("loss", "val_loss")]
    loss, val = ("-" if math.isnan(value) else f"{value:.3f}" for value in known)
    spent, age = duration(number(row.get("spent_s"))), duration(row["age_s"])
    flags = f"  {', '.join([clean(name) for name in (*standing_flags(row), row['damage']) if name])}".rstrip()
    return f"{clean(row['run']):<24} {clean(str(row['state'])):<10} {of:>14} {safe:>8} {loss:>8} {val:>8} {spent:>9} {age + ' ago':>10}{flags}\n"
