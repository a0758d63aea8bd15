"""lamp track: tell a tracker all about a run, one that has ended or one that goes on.

In:  a run's name, and where to: tensorboard, wandb, trackio, mlflow, csv.
Out: the tracker's own runs; each step once, also where some of it was sent before. A run that goes on is followed to its end.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.commands.arguments import find_run, many, parse
from lamplighter.errors import DONE, AlreadyRunning, ChildLost, UsageError
from lamplighter.rundir import RunDir, is_running, number, read_last_lines, read_status

if TYPE_CHECKING:
    from lamplighter.watch.trackers.follower import TrackerState

_LOOK_S = 0.5
_TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "csv")


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
    """One child that follows the run for each tracker in turn, or, of a run that goes on, for all of them at once."""
    from lamplighter.commands.session import session

    rest, several = many(words, "to", "tags")
    flags = parse("track", _track_flags, rest)
    run = find_run(flags["run"], flags["runs_dir"])
    chosen = list(dict.fromkeys(one for word in several["to"] for one in word.replace(",", " ").split()))
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
    """Each tracker in turn; a run that goes on is followed for all of them beside each other, each in a process of its own."""
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
    chosen, wanted = list(request["to"]), {**kept, **given}
    if len(chosen) > 1 and request["follow"] and is_running(run):
        _follow_all(run, Track(**wanted, to=chosen))
        return DONE
    for to in chosen:
        _track_one(run, to, Track(**wanted), follow=request["follow"])
    return DONE


def _follow_all(run: RunDir, track: Any) -> None:
    """As the parent of a training run follows it."""
    import time

    from lamplighter.watch.trackers.follower import read_state
    from lamplighter.watch.trackers.following import Following

    for to in track.to:
        os.close(_hold(run, to))  # said at once where another one works
    with report.phase(f"track {', '.join(track.to)}", total=_planned(run), unit="steps") as phase:
        following = Following(run, track, lambda text, _: report.note(text))
        while any(process.poll() is None for process in following.processes.values()):
            following.look()
            phase.set(min((now.step for now in following.progress.values()), default=0))
            time.sleep(_LOOK_S)
    for to in track.to:
        _say_made(run, to, read_state(run, to))


def _planned(run: RunDir) -> int | None:
    """How many steps a run that goes on will have, where that is known."""
    return int(number(read_status(run).get("steps"))) or None


def _hold(run: RunDir, to: str) -> int:
    from lamplighter.procs.lock import hold
    from lamplighter.watch.trackers.follower import state_path

    (run.path / "track").mkdir(exist_ok=True)
    lock = hold(state_path(run, to).with_suffix(".lock"))
    if lock is None:
        raise AlreadyRunning(f"{to} is already told of {run.name}", "another follower of this run works", f"lamp watch {run.address} shows its lag")  # fmt: skip
    return lock


def _track_one(run: RunDir, to: str, track: Any, follow: bool) -> None:
    from lamplighter.watch.trackers.follower import Follower
    from lamplighter.watch.trackers.following import setting_of

    setting = setting_of(run, track)
    live = follow and is_running(run)
    total = _planned(run) if live else _last_step(run)
    with report.phase(f"track {to}", total=total or None, unit="steps") as phase:
        from dataclasses import replace

        _hold(run, to)  # until this process ends
        follower = Follower(run, to, replace(setting, folder=run.path / "track" / to), report.note)
        for progress in follower.follow(until_end=live):
            phase.set(progress.step)
        phase.set(follower.now.step)
    _say_made(run, to, follower.now)


def _say_made(run: RunDir, to: str, now: TrackerState) -> None:
    if not now.done:
        raise ChildLost(
            f"{to} did not take all of {run.name}", now.problem or "it gave no reason", f"later: lamp track {run.address} --to {to}"
        )  # fmt: skip
    where = now.url or {"tensorboard": f"tensorboard --logdir {run.path / 'track' / 'tensorboard'}", "csv": str(run.path / "track" / "csv"),
                        "trackio": "trackio show", "mlflow": f"mlflow ui --backend-store-uri sqlite:///{run.path.parent / '.mlflow' / 'mlflow.db'}", "wandb": f"wandb sync {run.path}/track/wandb/wandb/offline-run-*"}[to]  # fmt: skip
    runs = "" if now.branch == 1 else f" in {now.branch} linked runs"
    report.result(f"made: {now.entries:,} records up to step {now.step}{runs} in {to}; next: {where}\n")


def _last_step(run: RunDir) -> int:
    steps = [int(number(one.get("step"))) for one in read_last_lines(run.metrics, 1 << 16)]
    return max([*steps, int(number(read_status(run).get("step")))], default=0)
