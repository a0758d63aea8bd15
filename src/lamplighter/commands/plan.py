"""lamp plan: memory, time, money and disk of a run, before anything is started.

In:  a run as `lamp train` takes it, and a device.
Out: the arithmetic on stdout (or JSON); 0 for go, 77 for no-go. On paper it happens here, without torch and in a second; where
     there is text to count, or steps to measure, in a child under watch. Nothing is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamplighter.commands import parse
from lamplighter.config import Resolved, dump, parse_overrides, resolve
from lamplighter.errors import UsageError
from lamplighter.plan import request as paper


def _plan_flags(
    run_yaml: Path | None = None,
    /,
    *,
    preset: str | None = None,
    on: str | None = None,
    mfu: float | None = None,
    measure: bool = False,
    fit: bool = False,
    what_if: bool = False,
    json: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp plan` takes besides fields."""


def plan(words: list[str]) -> tuple[str, int]:
    """What to say, and the exit code; a child that has said it all leaves the text empty."""
    rest, overrides = parse_overrides(words)
    flags = parse("plan", _plan_flags, rest)
    resolved = resolve(flags.get("preset"), flags.get("run_yaml"), overrides)
    wish = paper.Wish(
        on=flags.get("on"),
        mfu=flags.get("mfu"),
        what_if=flags.get("what_if", False),
        as_json=flags.get("json", False),
        runs_dir=str(flags.get("runs_dir", Path("runs"))),
    )
    tries = flags.get("measure", False) or flags.get("fit", False)
    if tries and wish.on:
        why = "a few real steps can only be made on this machine"
        raise UsageError("--measure and --fit do not go with --on", why, "leave one of them out")
    data = resolved.run.data
    if tries or data.paths or data.source or paper.is_own(resolved.run):
        return "", _in_child(resolved, wish, flags)
    return paper.page(resolved.run, wish)


def _in_child(resolved: Resolved, wish: paper.Wish, flags: dict[str, Any]) -> int:
    from dataclasses import asdict

    from lamplighter.watch.run_commands import session

    request = {"wish": asdict(wish), "measure": flags.get("measure", False), "fit": flags.get("fit", False)}
    return session("plan", request, config=dump(resolved))
