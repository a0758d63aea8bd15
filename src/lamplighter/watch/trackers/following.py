"""The parent's side of trackers: starts one follower for each, reads how far they are, says once what is wrong, never waits for them.

In:  the run folder and its `track` section.
Out: processes of trackers/follower.py; the lag of each in steps for status.json; sentences for people.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from lamplighter.config import Track
from lamplighter.rundir import RunDir
from lamplighter.watch.trackers.follower import TrackerState, read_state
from lamplighter.watch.trackers.writers import TRACKERS, Setting

SILENT_S = 20.0  # so long may a tracker take for one answer before that is said
_LAST_S = 15.0  # for what is still to be sent when the run has ended
_HUNG_S = 5.0  # of them, for one that has not come back from its library all the while
_LOOK_S = 1.0


class Following:
    """The followers of one run."""

    def __init__(self, run: RunDir, track: Track, say: Callable[[str, str], None]) -> None:
        self.run, self.say = run, say
        self.setting = setting_of(run, track)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.said: dict[str, str] = {}
        self.progress: dict[str, TrackerState] = {}
        self.looked_at = 0.0
        for tracker in dict.fromkeys(track.to):
            self._start(tracker)

    def _start(self, tracker: str) -> None:
        request = {
            name: value
            for name, value in asdict(self.setting).items()
            if name not in ("folder", "branch", "from_step", "id")
        }
        (self.run.path / "track").mkdir(exist_ok=True)
        log = os.open(
            self.run.path / "track" / f"{tracker}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        try:
            self.processes[tracker] = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "lamplighter.watch.trackers.follower",
                    str(self.run.path),
                    tracker,
                    json.dumps(request),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:  # no process to be had: the run goes on
            self.say(f"WARNING  {tracker} cannot be followed: {error.strerror}", "bold yellow")
        finally:
            os.close(log)

    def look(self) -> None:
        """How far they are; what is wrong is said once."""
        if time.monotonic() - self.looked_at < _LOOK_S:
            return
        self.looked_at = time.monotonic()
        for tracker, process in self.processes.items():
            now = self.progress[tracker] = read_state(self.run, tracker)
            problem = now.problem or _silence(now)
            if not problem and process.poll() not in (None, 0):
                problem = f"its process ended with {process.returncode}; see {self.run.path / 'track' / tracker}.log"
            if problem and problem.split(" for ")[0] != self.said.get(tracker):
                self.said[tracker] = problem.split(" for ")[0]
                self.say(
                    f"WARNING  {tracker}: {problem}; training is not touched by it, and what is not sent is sent later",
                    "bold yellow",
                )
            elif not problem and self.said.pop(tracker, ""):
                self.say(f"{tracker} works again, at step {now.step}", "")

    def status(self, step: int) -> list[dict[str, Any]]:
        """For status.json: each with its lag in steps."""
        return [_standing(now, step, live=True) for now in self.progress.values()]

    def close(self, step: int) -> None:
        """The last words go out, for some seconds; one that hangs is ended, and said how to send the rest."""
        waiting = {tracker: process for tracker, process in self.processes.items() if process.poll() is None}
        for process in waiting.values():
            process.terminate()
        deadline, said = time.monotonic() + _LAST_S, time.monotonic()
        while waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            waiting = {tracker: process for tracker, process in waiting.items() if process.poll() is None}
            if deadline - time.monotonic() < _LAST_S - _HUNG_S and all(self._is_hung(tracker) for tracker in waiting):
                break
            if waiting and time.monotonic() - said > 1.5:
                said = time.monotonic()
                left = ", ".join(f"{one} at step {read_state(self.run, one).step} of {step}" for one in waiting)
                self.say(f"sending the last records: {left}; at most {deadline - said:.0f} s more", "dim")
        for process in waiting.values():
            with contextlib.suppress(OSError):  # it has just ended
                process.kill()
            process.wait()
        self.progress |= {tracker: read_state(self.run, tracker) for tracker in self.processes}
        for tracker, now in ((tracker, now) for tracker, now in self.progress.items() if not now.done):
            self.say(
                f"{tracker} has what was up to step {now.step} of {step}; the rest: lamp track {self.run.address} --to {tracker}",
                "bold yellow",
            )

    def _is_hung(self, tracker: str) -> bool:
        now = read_state(self.run, tracker)
        return bool(now.doing) and time.time() - now.since > _HUNG_S


def _standing(now: TrackerState, step: int, live: bool) -> dict[str, Any]:
    problem = now.problem or (_silence(now) if live else "")
    lag = 0 if now.done else max(0, step - now.step)
    return {"to": now.tracker, "step": now.step, "lag": lag, "problem": problem, "url": now.url}


def tracking(run: RunDir, step: int, told: Sequence[Any], live: bool) -> list[dict[str, Any]]:
    """How far every tracker of a run is, by its own file: `lamp track` may have gone on where the run's parent left off.

    `told`: what status.json says of them, which counts where a follower has left no file.
    """
    known = {one["to"]: one for one in told if isinstance(one, dict) and isinstance(one.get("to"), str)}
    folder = run.path / "track"
    there = [name for name in TRACKERS if (folder / f"{name}.json").is_file()] if folder.is_dir() else []
    return list((known | {name: _standing(read_state(run, name), step, live) for name in there}).values())


def _silence(now: TrackerState) -> str:
    waited_s = time.time() - now.since if now.doing else 0.0
    return f"{now.doing} for {waited_s:.0f} s without an answer" if waited_s > SILENT_S else ""


def setting_of(run: RunDir, track: Track) -> Setting:
    """What a tracker is told at its start; addresses and secrets of the settings stay here."""
    from lamplighter.config import load_dump
    from lamplighter.errors import LampError
    from lamplighter.safe_text import mask_record

    try:
        found = asdict(load_dump(run.config))
        found.get("watch", {}).pop("notify", None)  # its path is often the password
        config = mask_record(found)
    except LampError:  # a watched command, which has none
        config = {}
    return Setting(
        run.name,
        run.path / "track",
        project=track.project or "",
        name=track.name or "",
        tags=tuple(track.tags),
        group=track.group or "",
        offline=track.offline,
        config=config,
    )
