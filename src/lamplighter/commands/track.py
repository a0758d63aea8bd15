"""lamp track: tell a tracker all about a run, one that has ended or one that goes on.

In:  a run's name, and where to: tensorboard, wandb, trackio, csv.
Out: the tracker's own runs; each step once, also where some of it was sent before. A run that goes on is followed to its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamplighter import report
from lamplighter.commands.arguments import find_run, many, parse
from lamplighter.errors import DONE, AlreadyRunning, ChildLost, UsageError
from lamplighter.rundir import RunDir, is_running, number, read_last_lines, read_status

_TRACKERS = ("tensorboard", "wandb", "trackio", "csv")


def _track_flags(
    run: str,
    /,
    *,
    project: str | None = None,
    name: str | None = None,
    group: str | None = None,
    offline: bool = False,
    follow: bool = True,
    runs_dir: Path = Path("runs"),
) -> None:
    """Where to, and under which name; what is not given is as the run has it."""


def track(words: list[str]) -> int:
    """One child that follows the run for each tracker in turn, or, of a run that goes on, for one."""
    from lamplighter.commands.session import session

    rest, several = many(words, "to", "tags")
    flags = parse("track", _track_flags, rest)
    run = find_run(flags["run"], flags["runs_dir"])
    chosen = list(dict.fromkeys(several["to"]))
    if not chosen or (wrong := [one for one in chosen if one not in _TRACKERS]):
        what = f"there is no tracker {wrong[0]}" if chosen else "no tracker was named"
        raise UsageError(what, f"choose from: {', '.join(_TRACKERS)}", f"lamp track {run.address} --to tensorboard")
    given = {name: flags[name] for name in ("project", "name", "group", "offline") if flags[name]}
    request = {
        "run": str(run.path.resolve()),
        "to": chosen,
        **given,
        "tags": several["tags"],
        "follow": flags["follow"],
    }
    return session("track", request)


# ---------------------------------------------------------------- in the child


def track_child(_: RunDir, request: dict[str, Any]) -> int:
    """Each tracker in turn; a run that goes on can be followed for one only."""
    from lamplighter.config import Track, load_dump
    from lamplighter.errors import LampError

    run = RunDir(Path(request["run"]))
    names = ("project", "name", "group", "offline", "tags")
    given = {name: request[name] for name in names if request.get(name)}
    try:
        before = load_dump(run.config).track
    except LampError:  # a watched command has no settings; a damaged file says nothing
        before = Track()
    kept = {name: getattr(before, name) for name in names}
    for place, to in enumerate(request["to"]):
        last = place == len(request["to"]) - 1
        _track_one(run, to, Track(**{**kept, **given}), follow=request["follow"] and last)
    return DONE


def _track_one(run: RunDir, to: str, track: Any, follow: bool) -> None:
    from lamplighter.procs.lock import hold
    from lamplighter.watch.trackers.follower import Follower, state_path
    from lamplighter.watch.trackers.following import setting_of

    setting = setting_of(run, track)
    total = _last_step(run)
    with report.phase(f"track {to}", total=total or None, unit="steps") as phase:
        from dataclasses import replace

        (run.path / "track").mkdir(exist_ok=True)
        lock = hold(state_path(run, to).with_suffix(".lock"))
        if lock is None:
            raise AlreadyRunning(f"{to} is already told of {run.name}", "another follower of this run works", f"lamp watch {run.address} shows its lag")  # fmt: skip
        follower = Follower(run, to, replace(setting, folder=run.path / "track" / to), report.note)
        for progress in follower.follow(until_end=follow and is_running(run)):
            phase.set(progress.step)
    now = follower.now
    if not follower.complete:
        raise ChildLost(
            f"{to} did not take all of {run.name}", now.problem or "it gave no reason", f"later: lamp track {run.address} --to {to}"
        )  # fmt: skip
    where = now.url or {"tensorboard": f"tensorboard --logdir {run.path / 'track' / 'tensorboard'}", "csv": str(run.path / "track" / "csv"),
                        "trackio": "trackio show", "wandb": f"wandb sync {run.path}/track/wandb/wandb/offline-run-*"}[to]  # fmt: skip
    runs = "" if now.branch == 1 else f" in {now.branch} linked runs"
    report.result(f"made: {now.entries:,} records up to step {now.step}{runs} in {to}; next: {where}\n")


def _last_step(run: RunDir) -> int:
    steps = [int(number(one.get("step"))) for one in read_last_lines(run.metrics, 1 << 16)]
    return max([*steps, int(number(read_status(run).get("step")))], default=0)
