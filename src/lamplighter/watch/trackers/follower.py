"""The process that follows a run for one tracker: it alone loads the tracker's library, and may hang, fail or die.

In:  a run folder and what is to be called how (a JSON object as its argument); metrics.jsonl, events.jsonl and evaluations/.
Out: the tracker's own files or its server; RUN/track/NAME.json, which says how far it has come and what is wrong.

The trainer knows nothing of it. It ends when the run has ended and everything is sent, or when it is asked to (SIGTERM): then it
sends what is there and leaves. Whatever was not sent is sent by the next follower, or by `lamp track RUN --to NAME`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lamplighter import read_back, report
from lamplighter.errors import InputMissing, LampError
from lamplighter.procs.lock import hold
from lamplighter.rundir import RunDir, Tail, is_running, parse_record, write_atomic
from lamplighter.safe_text import clean, mask, mask_record
from lamplighter.watch.trackers.history import Branch, RunHistory, TrackerEntry
from lamplighter.watch.trackers.writers import Setting, Writer, is_gone, open_writer

_EVERY_S = 1.0
_SELDOM_S = {
    "wandb": 10.0,
    "trackio": 5.0,
    "mlflow": 10.0,
}  # rows in bursts cost a third: one of W&B's wakes two processes, of trackio's or MLflow's a database
_PAUSES_S = (5.0, 20.0, 60.0, 300.0)  # before a tracker that failed is tried again
_LINES_AT_ONCE = 20_000
_BATCH_S = 3.0  # then what was sent is marked as safe, for which some trackers take a second
_ORPHAN_S = 60.0  # for what is left to be sent when the run's parent was killed
_MOST_TEXT = 20_000
_KEPT = 3  # marks of tracker runs that are kept in the state: only the newest can be gone on with
STATE: read_back.Fields = {
    **dict.fromkeys(("tracker", "problem", "url", "doing"), read_back.TEXT),
    **dict.fromkeys(("lines", "events", "step", "branch", "entries"), read_back.COUNT),
    **dict.fromkeys(("t", "since"), read_back.TIME),
    **dict.fromkeys(("marks", "ids", "from_steps"), read_back.OBJECT),
    "evaluations": read_back.TEXTS,
    "done": read_back.FLAG,
}


@dataclass
class TrackerState:
    """How far a follower has come: what is in RUN/track/NAME.json."""

    tracker: str
    lines: int = 0  # of metrics.jsonl
    events: int = 0  # bytes of events.jsonl
    step: int = 0  # the newest that is safe with the tracker
    branch: int = 1
    entries: int = 0
    evaluations: list[str] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)
    from_steps: dict[str, int] = field(default_factory=dict)
    marks: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    doing: str = ""
    since: float = 0.0  # when what it does now began
    url: str = ""
    done: bool = False
    t: float = 0.0


def state_path(run: RunDir, tracker: str) -> Path:
    return run.path / "track" / f"{tracker}.json"


def read_state(run: RunDir, tracker: str) -> TrackerState:
    """As the last follower left it; from the beginning where it is damaged."""
    found, _ = read_back.read_object(state_path(run, tracker), STATE)
    known = {
        name: value for name, value in found.items() if name in TrackerState.__dataclass_fields__ and value is not None
    }
    known |= {"tracker": tracker}
    return TrackerState(**known)


class Follower:
    """One run, one tracker."""

    def __init__(self, run: RunDir, tracker: str, setting: Setting, say: Callable[[str], None]) -> None:
        self.run, self.tracker, self.setting, self.say = run, tracker, setting, say
        self.path = state_path(run, tracker)
        self.path.parent.mkdir(exist_ok=True)
        self.now = replace(read_state(run, tracker), problem="", done=False)
        if self._is_gone():
            self.say(f"{tracker}: what was written of {run.name} before is no longer there: it is written again")
            self.now = TrackerState(tracker)
        self.asked_to_end = threading.Event()
        self.writing = threading.Lock()
        self.complete = False  # everything was sent
        self.more = False
        self._forget()

    def _is_gone(self) -> bool:
        """A file of an earlier follower was removed: what it had marked as sent is nowhere."""
        opened = [int(one) for one in self.now.ids if one.isdecimal()] if self.now.lines or self.now.events else []
        return any(
            is_gone(self.tracker, replace(self.setting, branch=one), self.now.marks.get(str(one)) or {})
            for one in opened
            if one < self.now.branch or str(one) in self.now.marks  # else opened, and killed before its first mark
        )

    def _forget(self) -> None:
        """Begin from what the tracker has for sure."""
        self.history = RunHistory()
        self.damaged = 0  # lines of metrics.jsonl that are no records
        self.sent = copy.deepcopy(self.now)
        self.writer: Writer | None = None
        self.metrics = _LineReader(self.run.metrics, 0)
        for _ in range(self.now.lines):  # as it was: nothing of it is sent again
            line = next(self.metrics, None)
            if line is None:
                break
            self._fold(line[0])
        for name in self.now.evaluations:
            if (told := read_evaluation(self.run.path / "evaluations" / name)) is not None:
                self.history.scored.add(told[0])

    def _fold(self, line: bytes) -> list[Branch | TrackerEntry]:
        record = parse_record(line)
        self.damaged += record is None and bool(line.strip())
        return self.history.take(record) if record is not None else []

    # ---------------------------------------------------------------- life

    def follow(self, until_end: bool) -> Iterator[TrackerState]:
        """Until the run has ended (or only what is there now) and all is sent, or cannot be; yields after each batch."""
        failures = 0
        while True:
            ended = not until_end or self.asked_to_end.is_set() or not is_running(self.run)
            try:
                more = self._send_some()
                if not more and ended:
                    self._finish()
                    self.complete = True
                    return
                failures = 0
            except InputMissing as error:  # not installed: no second try will help
                self._tell_problem(f"{error.what}: {error.next}")
                return
            except Exception as error:  # noqa: BLE001  whatever a tracker raises is its own, said once and tried again
                self._tell_problem(f"{type(error).__name__}: {error}")
                self._drop_writer()
                self._forget()
                if ended and failures:
                    return
                self.asked_to_end.wait(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)] if not ended else 0.5)
                failures += 1
                continue
            yield self.now
            if not more:
                self.asked_to_end.wait(_SELDOM_S.get(self.tracker, _EVERY_S))

    def _send_some(self) -> bool:
        """One round; whether there may be more at once."""
        self.more = False
        count = self._send_metrics()
        count += self._send_events() if self.writer is not None else 0
        count += self._send_evaluations() if self.writer is not None else 0
        if count:
            self._commit()
        return self.more

    def _send_metrics(self) -> int:
        count, until = 0, time.monotonic() + _BATCH_S
        for line, _ in self.metrics:
            for told in self._fold(line):
                if isinstance(told, Branch):
                    self._send_events(before=told.t)  # what was said until then belongs to the run until then
                    self._commit()
                    self._begin_branch(told)
                else:
                    self._opened().log(told)
                    self.sent.entries += 1
                    self.sent.step = max(self.sent.step, told.step) if not told.late else self.sent.step
            self.sent.lines += 1
            count += 1
            if count >= _LINES_AT_ONCE or time.monotonic() > until:
                self.more = True
                break
        return count

    def _opened(self) -> Writer:
        if self.writer is None:
            branch = str(self.sent.branch)
            mark = self.now.marks.get(branch) or {"open": branch in self.sent.ids}  # opened, and killed before a mark
            number = self.sent.ids.setdefault(branch, self._new_id())
            setting = replace(
                self.setting, branch=self.sent.branch, from_step=int(self.sent.from_steps.get(branch, 0)), id=number
            )
            self._doing(f"opening {self.tracker}")
            self._save(self.sent.ids)
            with report.phase(
                f"open {self.tracker}"
            ):  # W&B alone may take ten seconds; said where `lamp track` looks on
                self.writer = open_writer(self.tracker, setting, mark)
            self._doing("")
            if not self.now.marks.get(branch):
                self._describe(self.writer)
        return self.writer

    def _new_id(self) -> str:
        given = os.environ.get("WANDB_RUN_ID") if self.tracker == "wandb" and self.sent.branch == 1 else None
        return given or secrets.token_hex(4)

    def _describe(self, writer: Writer) -> None:
        """The plan goes along with the first record; the settings are given when the tracker run is opened."""
        with contextlib.suppress(OSError):  # a run without a plan
            plan = read_back.read_whole(self.run.path / "plan.txt", read_back.SMALL_BYTES).decode("utf-8", "replace")
            writer.tell("plan", 0, f"the plan of {self.run.name}", plan[:_MOST_TEXT])

    def _begin_branch(self, told: Branch) -> None:
        """The old tracker run stays as it is; the new one says why there are two."""
        self._drop_writer()
        self.sent.branch, self.sent.step = told.number, max(0, told.from_step - 1)
        self.sent.from_steps[str(told.number)] = told.from_step
        title = f"{self.run.name}~{told.number} begins at step {told.from_step}"
        self._opened().tell("alert", told.from_step, title, told.why)
        self.say(f"{self.tracker}: {title}: {told.why}")

    def _send_events(self, before: float = float("inf")) -> int:
        """Verdicts as alerts, samples and checkpoints; the report at the end."""
        count = 0
        for line, offset in _LineReader(self.run.events, self.sent.events):
            event = parse_record(line)
            if event is not None and read_back.is_event(event) and event["t"] >= before:
                break
            self.sent.events = offset
            if event is None or not read_back.is_event(event):
                continue
            told = _text_of(event)
            if told is not None:
                kind, title, text = told
                step = int(event.get("step") or self.sent.step)
                self._opened().tell(kind, step, clean(title), mask(text)[:_MOST_TEXT])
                count += 1
            if count >= _LINES_AT_ONCE:
                self.more = True
                break
        return count

    def _send_evaluations(self) -> int:
        """One file per evaluation, made whole: each is sent once, at the step of its checkpoint."""
        folder, count = self.run.path / "evaluations", 0
        known = set(self.sent.evaluations)
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            if path.name in known or len(known) > 10_000:
                continue
            values = read_evaluation(path)
            if values is not None:
                step, t, scores = values
                late = step < self.history.newest
                named = {} if step in self.history.scored else {"eval/iter": float(step)}
                self._opened().log(TrackerEntry(self.sent.branch, step, t, {**scores, **named}, late))
                self.history.scored.add(step)
                count += 1
            self.sent.evaluations.append(path.name)
        return count

    def _commit(self) -> None:
        """What was given is safe with the tracker: the next follower begins after it."""
        if self.writer is not None:
            self._doing(f"waiting for {self.tracker}")
            self.sent.marks[str(self.sent.branch)] = mark = self.writer.mark()
            self.sent.url = str(mark.get("url") or self.sent.url)
            for old in sorted(map(int, self.sent.marks))[:-_KEPT]:
                del self.sent.marks[str(old)]
        if self.now.problem:
            self.say(f"{self.tracker} works again")
        self.now = replace(copy.deepcopy(self.sent), problem="", doing="", since=0.0)
        self._write()

    def _finish(self) -> None:
        if self.damaged:
            lines = f"{self.damaged} line{'s' * (self.damaged != 1)} of metrics.jsonl"
            self.say(f"{self.tracker}: {lines} cannot be read and {'is' if self.damaged == 1 else 'are'} left out")
        if self.writer is not None:
            with contextlib.suppress(OSError):  # a run that has not ended has none yet
                text = read_back.read_whole(self.run.report, read_back.SMALL_BYTES).decode("utf-8", "replace")
                self.writer.tell("report", self.sent.step, f"the report of {self.run.name}", text[:_MOST_TEXT])
            self._doing(f"closing {self.tracker}")
            self.sent.marks[str(self.sent.branch)] = self.writer.mark()
            self.writer.close()
            self.writer = None
        if self.tracker == "tensorboard":  # its last bytes are written when it closes
            self.sent.marks[str(self.sent.branch)] = _sizes(
                self.path.parent / "tensorboard", self.setting, self.sent.branch
            )
        self.now = replace(copy.deepcopy(self.sent), problem="", doing="", done=True)
        self._write()

    def _drop_writer(self) -> None:
        writer, self.writer = self.writer, None
        if writer is not None:
            with contextlib.suppress(Exception):  # it has failed, and that was said
                writer.close()

    # ---------------------------------------------------------------- what the parent reads

    def _doing(self, words: str) -> None:
        self.now.doing, self.now.since = words, time.time()
        self._write()

    def _save(self, ids: Mapping[str, str]) -> None:
        """The name of a tracker run is kept before it is used: a killed follower goes on with the same one."""
        self.now.ids = dict(ids)
        self.now.branch, self.now.from_steps = self.sent.branch, dict(self.sent.from_steps)
        self._write()

    def _tell_problem(self, words: str) -> None:
        words = mask(clean(" ".join(words.split())))[:300]
        if words != self.now.problem:
            self.say(f"{self.tracker} does not take what the run says ({words}); the run goes on, and it is sent later")
        self.now.problem = words
        self._write()

    def _write(self) -> None:
        self.now.t = time.time()
        record = {**mask_record(vars(self.now)), "format": 1}
        with self.writing, contextlib.suppress(OSError):  # a full disk: the next one is as good
            write_atomic(self.path, json.dumps(record) + "\n", durable=False, mode=0o600)


def _sizes(folder: Path, setting: Setting, branch: int) -> dict[str, Any]:
    files = (folder / replace(setting, branch=branch).title).glob("events.out.tfevents.*")
    return {"files": {path.name: path.stat().st_size for path in files}}


class _LineReader(Iterator[tuple[bytes, int]]):
    """Whole lines from a place on, each with the place behind it; asked again after its end, it goes on with what is new."""

    def __init__(self, path: Path, start: int) -> None:
        self.tail, self.at = Tail(path, start=start), start
        self.waiting: list[bytes] = []

    def __next__(self) -> tuple[bytes, int]:
        if not self.waiting:
            before = self.tail.replaced
            self.waiting = next(self.tail.blocks(), [])[::-1]
            self.at = self.at if self.tail.replaced == before else 0
        if not self.waiting:
            raise StopIteration
        line = self.waiting.pop()
        self.at += len(line) + 1
        return line, self.at


def read_evaluation(path: Path) -> tuple[int, float, dict[str, float]] | None:
    """Step, time and scores of one file of evaluations/; None where it is damaged."""
    try:
        record = read_back.parse_object(read_back.read_whole(path, read_back.SMALL_BYTES))
    except OSError:  # it is being removed
        return None
    if record is None or not read_back.COUNT.fits(record.get("step")) or not isinstance(record.get("scores"), list):
        return None
    task = clean(str(record.get("task") or path.stem))[:80]
    scores: dict[str, float] = {}
    for one in record["scores"]:
        if isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("value"), int | float):
            scores[f"eval/{task}/{clean(one['name'])[:80]}"] = float(one["value"])
            if isinstance(one.get("stderr"), int | float):
                scores[f"eval/{task}/{clean(one['name'])[:80]}_stderr"] = float(one["stderr"])
    t = record.get("t")
    return (int(record["step"] or 0), float(t) if isinstance(t, int | float) else 0.0, scores) if scores else None


def _text_of(event: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Kind, title and text of an event that a tracker shows."""
    kind = event["type"]
    if kind == "verdict" and event.get("action") != "skip":
        title = f"{event['state']}: {event['cause']}"
        return "alert", title, f"{event['why']}\nnext: {event['next']}"
    if kind == "sample":
        return "sample", f"sample at step {event['step']}", str(event["text"])
    if kind == "checkpoint":
        return "checkpoint", str(event["path"]).rsplit("/", 1)[-1], f"{event['bytes']} bytes, {event['seconds']} s"
    return None


# ---------------------------------------------------------------- the process


def main(words: list[str]) -> int:
    """`python -m lamplighter.watch.trackers.follower FOLDER NAME SETTING`: started by the parent of a run."""
    run, tracker, request = RunDir(Path(words[0])), words[1], json.loads(words[2])
    setting = Setting(**{**request, "folder": run.path / "track" / tracker, "tags": tuple(request["tags"])})
    os.environ.setdefault("WANDB_SILENT", "true")
    parent = os.getppid()
    run.path.joinpath("track").mkdir(exist_ok=True)
    lock = hold(state_path(run, tracker).with_suffix(".lock"))
    while lock is None:  # the follower of an earlier attempt still sends
        time.sleep(0.3)
        if os.getppid() != parent:
            return 0
        lock = hold(state_path(run, tracker).with_suffix(".lock"))
    follower = Follower(run, tracker, setting, _log)
    signal.signal(signal.SIGTERM, lambda *_: follower.asked_to_end.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(parent, follower), name="lamp-orphan", daemon=True).start()
    try:
        for _ in follower.follow(until_end=True):
            pass
        return 0 if follower.complete else 3
    except LampError as error:
        sys.stderr.write("\n".join(error.lines()) + "\n")
        return error.code


def _log(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {text}\n")


def _leave_with(parent: int, follower: Follower) -> None:
    """A killed parent: what is there is sent, for a while; a tracker that hangs must not be left behind."""
    while os.getppid() == parent:
        time.sleep(0.5)
    follower.asked_to_end.set()
    time.sleep(_ORPHAN_S)
    os._exit(4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
