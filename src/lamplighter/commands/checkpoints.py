"""lamp checkpoints: every checkpoint of a run, verified against its manifest.

In:  a run's name.
Out: a table or JSON: step, losses, size, age, valid or not. The hashing happens in a child, under watch.
"""

from __future__ import annotations

import json
import math
import shlex
import time
from pathlib import Path
from typing import Any

from lamplighter import read_back, report
from lamplighter.commands.arguments import find_run, parse
from lamplighter.commands.model_folder import own_family
from lamplighter.errors import DONE
from lamplighter.rundir import (
    RunDir,
    human_bytes,
    newest_first,
    number,
    read_lines,
    read_record,
    step_of,
    verify_manifest,
)


def _checkpoints_flags(run: str, /, *, json: bool = False, runs_dir: Path = Path("runs")) -> None:
    """The checkpoints of a run."""


def checkpoints(words: list[str]) -> int:
    """The table, or JSON."""
    from lamplighter.commands.session import session

    loose = [at for at, word in enumerate(words) if word == "test"]
    if loose and loose[0] > 0:
        from lamplighter.commands.checkpoint_test import test

        return test(words[: loose[0]] + words[loose[0] + 1 :])
    flags = parse("checkpoints", _checkpoints_flags, words)
    run = find_run(flags["run"], flags["runs_dir"])
    return session("checkpoints", {"run": str(run.path.resolve()), "json": flags["json"]})


# ---------------------------------------------------------------- in the child


def checkpoints_child(_: RunDir, request: dict[str, Any]) -> int:
    """Every checkpoint of a run, verified against its manifest."""
    run = RunDir(Path(request["run"]))
    scored = (r for r in read_lines(run.metrics) if "eval/val_loss" in r and read_back.is_metric(r))
    losses = {r["step"]: r["eval/val_loss"] for r in scored}
    best = read_back.read_object(run.checkpoints / "best.json", read_back.BEST)[0].get("step")
    rows = []
    for path in reversed(newest_first(run.checkpoints)):
        total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        with report.phase("verify", total=total, unit="B") as phase:
            reason = verify_manifest(path, tick=lambda n, phase=phase, path=path: phase.tick(n, path.name))  # type: ignore[misc]
        state = read_record(path / "training" / "state.json")
        step = step_of(path)
        rows.append({"checkpoint": path.name, "step": step, "loss": state.get("loss"), "val_loss": losses.get(step),
                     "bytes": total, "age_s": time.time() - path.stat().st_mtime, "valid": reason is None,
                     "reason": reason, "best": step == best})  # fmt: skip
    report.result(json.dumps(rows, indent=1) + "\n" if request["json"] else _table(run, rows))
    return DONE


def _table(run: RunDir, rows: list[dict[str, Any]]) -> str:
    if not rows:
        return f"no checkpoints in {run.checkpoints}\n"
    lines = [f"{'checkpoint':<20} {'loss':>8} {'val':>8} {'size':>10} {'age':>9}  state"]
    for row in rows:
        known = [number(row[name], math.nan) for name in ("loss", "val_loss")]
        loss, val = ("-" if math.isnan(value) else f"{value:.4f}" for value in known)
        state = ("valid" + (", best" if row["best"] else "")) if row["valid"] else f"invalid: {row['reason']}"
        size, age = human_bytes(row["bytes"]), _hours(row["age_s"])
        lines.append(f"{row['checkpoint']:<20} {loss:>8} {val:>8} {size:>10} {age:>9}  {state}")
    newest = next((row["checkpoint"] for row in reversed(rows) if row["valid"]), None)
    advice = (
        shlex.join(
            [
                "lamp",
                "generate",
                *shlex.split(run.address),
                "--checkpoint",
                newest,
                *own_family(run.checkpoints / newest),
            ]
        )
        if newest
        else "none of them is valid: begin anew with --resume never"
    )
    return "\n".join([*lines, f"next: {advice}", ""])


def _hours(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
