"""The one supervisor: starts a process tree, looks at it four times a second, judges, speaks, answers requests, acts, ends.

In:  a run folder, a target (our own ranks: trainer.py; somebody else's command: command.py), a restart policy.
Out: the exit code; status.json, events.jsonl, console.log, stacks/ and report.md in the folder.

What the two kinds of target have in common is here, once: the loop, attempts, verdicts and what is done about them,
requests of readers, status and events. What differs is behind `Target`: how it is started and asked to stop, how it
reports, what it says about itself, and what its end means.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lamplighter import first_words, read_back
from lamplighter.errors import DONE, STOPPED_EARLY
from lamplighter.procs import procfs
from lamplighter.report import Verdict
from lamplighter.rundir import VERSIONS, LineFile, RunDir, cannot_write, identity, last_attempt, write_json
from lamplighter.safe_text import mask_record
from lamplighter.slot import read_slot
from lamplighter.watch import end_diagnosis
from lamplighter.watch.elsewhere import shown_pids
from lamplighter.watch.gpu_watch import GpuWatch, RunLook
from lamplighter.watch.notify import Notifier
from lamplighter.watch.process_tree import MANY, OtherMachines, ProcessTree, Snapshot, open_pidfd, read_slots
from lamplighter.watch.resources import ResourceWatch
from lamplighter.watch.restart_policy import Decision, RestartPolicy
from lamplighter.watch.stall import LOOK_EVERY_S, STALL_S, StallDetector, explain, keep_text, take_all
from lamplighter.watch.status import standing_flags, tell, tell_flags

if TYPE_CHECKING:
    from lamplighter.config import Track
    from lamplighter.watch.trackers.following import Following

_PROVED_S = 1.5  # every look for so long must find the same proof before anything is done about it
_STATUS_EVERY_S = 0.9
_ASKED_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
_SAVE_S = 2.0  # for a save before a kill
_REQUESTS = (".why", ".stop", ".save")
_MOST_REQUESTS = 20  # in one look; the others wait for the next
_DIE_TOGETHER_S = 0.03  # several ranks that end by one cause
_FOLDER_LOST_S = 1.0  # so long must the run's folder be away before anything is done about it


# ---------------------------------------------------------------- what is supervised


@dataclass(frozen=True)
class TargetFacts:
    """What is known of a target before it is started."""

    verb: str
    ours: bool  # the roots are our own processes: each has a slot of its own, and a fault of the supervisor may end it
    grace_s: float  # between the request to stop and the kill
    began: float = field(default_factory=time.time)
    command: tuple[str, ...] = ()  # of somebody else


class RootProcess(Protocol):
    """As subprocess.Popen has it."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(frozen=True)
class Root:
    """A process that the target has started, or that ran already."""

    process: RootProcess
    slot: Path | None = None  # of our own; the agent has its own names for those of a command
    end_fd: int = -1  # of one on another machine: it becomes readable when that has ended


@dataclass(frozen=True)
class TargetState:
    """Where a target stands."""

    step: int
    durable_step: int
    may_grow: bool  # it loads: its memory grows by right
    stop_wanted: str = ""  # why it should stop: a signal to us, a budget that is spent
    at_once: bool = False  # without waiting for a save
    output_bytes: int = -1  # that count as work
    data_wait: float = 0.0  # share of a step, where it is known
    memory_step: int = 0  # that another attempt can go on from, though it is not durable

    @property
    def kept_step(self) -> int:
        """The newest that another attempt goes on from."""
        return max(self.durable_step, self.memory_step)


@dataclass(frozen=True)
class Ending:
    """What the supervisor knows when the processes have ended."""

    code: int  # of the process that decides
    stop_reason: str
    planned: str  # stop, where we gave up
    planned_why: str
    killed: bool  # by us, because a stop took too long
    folder_lost: bool = False  # the run's folder was deleted or moved while it ran


@dataclass(frozen=True)
class RunOutcome:
    """How a run has ended: the exit code of our command, the state for status.json, a sentence."""

    code: int
    state: str
    words: str


@dataclass(frozen=True)
class Death:
    """The end of a process that another attempt may outlive."""

    how: str  # the same twice at the same step is a bug
    verdict: Verdict  # what is done about it is not decided yet
    compiling: bool
    advice: str = ""  # for the second time, when another attempt is of no use
    hopeless: str = ""  # why another attempt is of no use the first time either


class Target(Protocol):
    """What is supervised, and all that differs between our own processes and somebody else's command."""

    @property
    def facts(self) -> TargetFacts: ...
    def say(self, text: str, style: str = "", urgent: bool = False) -> None: ...
    def show(self, stopping_s: float | None) -> None:
        """Now, to whoever looks."""
        ...

    def signals(self) -> AbstractContextManager[None]: ...
    def start(self, attempt: int, eager: bool) -> list[Root]:
        """The first time, or again; `eager`: the compiler was given up."""
        ...

    def hear(self, snapshot: Snapshot, stall: StallDetector) -> Iterable[dict[str, Any]]:
        """Take in what is new; the events are written into events.jsonl."""
        ...

    def state(self) -> TargetState: ...
    def status_fields(self) -> dict[str, Any]:
        """Its part of status.json; `now` is the line for people."""
        ...

    def ask_stop(self, reason: str, again: bool) -> None: ...
    def ask_save(self) -> int:
        """The step that will be saved; 0 where there is none."""
        ...

    def kill(self, snapshot: Snapshot | None, culprit: int = 0) -> None:
        """All of it; the culprit alone, where the others can go on without it."""
        ...

    @property
    def goes_on_with(self) -> bool:
        """Whether processes that are left stay for the next attempt."""
        ...

    @property
    def grows(self) -> bool:
        """Whether a process that was lost can be replaced now: the next attempt begins, though nothing has failed."""
        ...

    @property
    def elsewhere(self) -> OtherMachines | None:
        """Those of its processes that run on other machines."""
        ...

    def death(self, code: int) -> Death | None: ...
    def outcome(self, ending: Ending) -> RunOutcome: ...
    def report(self, outcome: RunOutcome, attempts: int) -> None: ...
    def close(self, outcome: RunOutcome) -> None: ...


class Supervisor:
    """One process tree and all that is known about it."""

    def __init__(
        self, run: RunDir, target: Target, policy: RestartPolicy, notify: str | None = None, track: Track | None = None
    ) -> None:
        self.run, self.target, self.policy, self.facts = run, target, policy, target.facts
        for stale in run.ask.iterdir():  # requests to an attempt that is over
            with contextlib.suppress(OSError):  # a folder, which is no request
                stale.unlink(missing_ok=True)
        self.attempt = 1 + last_attempt(run)
        self.events = LineFile(run.events)
        self.notifier = Notifier(notify, run.name, lambda text: target.say(text, "bold yellow"), run)
        self.track = track
        self.following: Following | None = None
        self.stall = StallDetector(run, self.facts.ours)
        self.processes: list[RootProcess] = []
        self.pidfds: list[int] = []
        self.tree = ProcessTree((), run.slots)
        self.snapshot: Snapshot | None = None
        self.exits_heard = 0
        self.died = False
        self.stop_reason, self.stop_at = "", 0.0
        self.planned = self.planned_why = ""  # restart, fallback or stop, decided by us
        self.killed = False
        self.code = 0
        self.resources = ResourceWatch()
        self.gpus = GpuWatch(run)
        self.warned: set[str] = set()
        self.oom_kills = procfs.oom_kills()
        self.largest_bytes = 0
        self.status_at = 0.0
        self.wake = -1
        self.lock_place = _place(run.lock)
        self.folder_lost_at: float | None = None

    # ---------------------------------------------------------------- life

    def supervise(self) -> int:
        """Start the processes, stay with them, and return the exit code."""
        with self.target.signals(), self._woken_by_signals():
            while True:
                self._start()
                self._guarded(self._look)
                while not self._ended():
                    self._guarded(self._look)
                self._guarded(self._last_look)
                if not self._goes_on():
                    return self._close()
                self._begin_again()

    @contextlib.contextmanager
    def _woken_by_signals(self) -> Iterator[None]:
        """A signal to us ends the wait for the next look."""
        self.wake, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            os.close(self.wake)
            os.close(writing)

    def _start(self) -> None:
        facts = self.facts
        began = facts.began if not self.processes else time.time()
        command = {"command": facts.command} if facts.command else {}
        self._event("start", attempt=self.attempt, began=began, verb=facts.verb, **command, **identity())
        first_words.end()  # from here on the loop speaks, and somebody else's command
        roots = self.target.start(self.attempt, self.policy.eager)
        self.processes = [root.process for root in roots]
        pids = [root.process.pid for root in roots if root.end_fd < 0]
        self.pidfds = [fd for pid in pids if (fd := open_pidfd(pid)) >= 0]
        self.pidfds += [root.end_fd for root in roots if root.end_fd >= 0]
        own = {root.process.pid: root.slot for root in roots if root.slot is not None}
        self.tree = ProcessTree(pids, self.run.slots, own)
        self.tree.elsewhere = self.target.elsewhere
        if self.track is not None and self.track.to and self.following is None:
            from lamplighter.watch.trackers.following import Following  # few runs have a tracker

            self.following = Following(self.run, self.track, self.target.say)

    def _ended(self) -> bool:
        """Wait for the next look, a signal or the end. While a script counts its work, half as often is enough."""
        calm = not self.facts.ours and self.stall.counted and self.stall.stalled_s < LOOK_EVERY_S
        ready, _, _ = select.select([*self.pidfds, self.wake], [], [], 2 * LOOK_EVERY_S if calm else LOOK_EVERY_S)
        if self.wake in ready:
            os.read(self.wake, 64)
        self._guarded(self._heed_stop)
        codes = [process.poll() for process in self.processes]
        if self.target.grows and not self.stop_reason:
            return True
        failed = any(code not in (None, DONE, STOPPED_EARLY) for code in codes)  # one rank that failed ends the group
        return failed or all(code is not None for code in codes)

    def _heed_stop(self) -> None:
        if reason := self.target.state().stop_wanted:
            self._ask_stop(reason)

    def _guarded(self, act: Callable[[], None]) -> None:
        """A fault of ours (a folder that was deleted, a full table of files) must never end somebody's command: said once."""
        try:
            act()
        except Exception as error:
            if self.facts.ours:
                raise
            if "fault" not in self.warned:
                self.warned.add("fault")
                self.target.say(
                    f"a look has failed ({type(error).__name__}: {error}); the command goes on, and so do we"
                )

    def _look(self) -> None:
        """One round: look, hear, judge, speak, write, answer, act."""
        self._notice_lost_folder()
        if self.folder_lost_at is not None and self.facts.ours:
            return  # nothing can be read or written there
        stalled_s, before, state = self.stall.stalled_s, self.snapshot, self.target.state()
        loads = before is not None and any(p.slot and p.slot.loader_workers for p in before.processes)
        close_look_s = self.stall.close_look_s(len(self.processes) > MANY)
        calm = stalled_s < close_look_s and self.stall.counted and not loads
        self.snapshot = self.tree.look(stalled_s > close_look_s, state.output_bytes, calm)
        self.largest_bytes = max(self.largest_bytes, self.snapshot.rss_bytes)
        if stalled_s > close_look_s:
            self.stall.cards = self.gpus.cards_of(process.pid for process in self.snapshot.processes)
        self.stall.look(self.tree, self.snapshot)
        self._hear()
        self._name_stall()
        if self.following is not None:
            self.following.look()
        self.target.show(time.monotonic() - self.stop_at if self.stop_reason else None)
        if time.monotonic() - self.status_at > _STATUS_EVERY_S:
            self._write_status("stopping" if self.stop_reason else "running")
        self._answer_requests()
        self._act()
        for verdict in self.resources.look(self.tree, self.snapshot, self.target.state().may_grow, self.run.path):
            self._say_verdict(verdict)
        pids = frozenset(process.pid for process in self.snapshot.processes)
        cpu_s = self.snapshot.processes[0].look.cpu_s if self.snapshot.processes else 0.0
        for verdict in self.gpus.look(RunLook(pids, state.step, self.attempt, state.data_wait, cpu_s)):
            self._say_verdict(verdict)
        self._enforce_stop()

    def _has_folder(self) -> bool:
        """Whether the events that we write are still where readers look for them, or at least the lock beside them."""
        ours = os.fstat(self.events.fd)
        try:
            if _place(self.run.events) == (ours.st_dev, ours.st_ino):
                return True
            return self.lock_place is not None and _place(self.run.lock) == self.lock_place
        except OSError:  # a disk that does not answer proves nothing
            return True

    def _notice_lost_folder(self) -> None:
        """Deleted or moved under a run: of ours nothing can be saved any more, so it ends; somebody's command goes on."""
        if self._has_folder():
            self.folder_lost_at = None
            return
        now = time.monotonic()
        self.folder_lost_at = self.folder_lost_at or now
        if now - self.folder_lost_at < _FOLDER_LOST_S or "folder" in self.warned:
            return
        self.warned.add("folder")
        lost = f"the folder {self.run.path} was deleted or moved away"
        if not self.facts.ours:
            self.target.say(f"{lost}: the command goes on and is watched, but nothing more is kept of it", urgent=True)
            return
        self.target.say(f"{lost}: nothing can be saved any more, so the process is ended", "bold red", urgent=True)
        self.planned = "stop"
        self.target.kill(self.snapshot)

    def _last_look(self) -> None:
        """The roots have ended: their last counters and words, and who ended with them."""
        self.snapshot = self.tree.look(closely=False)
        self._hear()
        self._say_error()
        if self.stop_reason and not self.facts.ours:
            self.tree.end_survivors()

    def _goes_on(self) -> bool:
        """Was this end a restart of ours, or a death that another attempt may outlive?"""
        if self.target.goes_on_with:
            time.sleep(_DIE_TOGETHER_S)
        ended = [code for process in self.processes if (code := process.poll()) is not None]
        if self.target.grows and not ended:  # nothing has failed
            self._forget_processes(all_of_them=False)
            return True
        stays = self.target.goes_on_with and not self.stop_reason and self.planned != "stop"
        if not stays:
            self._forget_processes()
        elif failed := [code for code in ended if code]:
            self.code = failed[0]
        goes_on = self._is_outlived()
        if stays:
            self._forget_processes(all_of_them=not goes_on)
        return goes_on

    def _is_outlived(self) -> bool:
        """Whether another attempt follows; the verdict on a death says it."""
        if self.facts.ours and not self._has_folder():  # the process noticed it first: there is nothing to go on from
            return False
        if self.planned in ("restart", "fallback"):
            return True
        death = self.target.death(self.code) if not self.stop_reason and self.planned != "stop" else None
        if death is None:
            return False
        state = self.target.state()
        decision = self.policy.dead(death.how, state.step, state.kept_step, death.compiling)
        if death.hopeless:
            self._save_before_kill(state.step)
            decision = Decision("stop", death.hopeless)
            self.planned, self.planned_why = "stop", f"{death.verdict.why}; {death.hopeless}"
        if broken := self.gpus.hopeless():  # another attempt would meet the same card
            decision = Decision("stop", f"{broken.why}; {broken.advice}")
        advice = decision.why or "run the same command again"
        if decision.action == "stop" and death.advice:
            advice = f"{decision.why}; {death.advice}"
        self._say_verdict(replace(death.verdict, next=advice, action=decision.action))
        return decision.action in ("restart", "fallback")

    def _forget_processes(self, all_of_them: bool = True) -> None:
        """Those that are left are ended, unless they stay; the code of the first that failed by itself decides."""
        failed = [code for process in self.processes if (code := process.poll())]
        if all_of_them:
            self.target.kill(None)
        self.tree.close()
        for fd in self.pidfds:
            os.close(fd)
        self.pidfds = []
        for process in self.processes:
            if not all_of_them and process.poll() is None:
                continue
            pid = {} if self.facts.ours else {"pid": process.pid}
            self._event("child_end", **pid, code=process.wait(), attempt=self.attempt)
        if failed:
            self.code = failed[0]
        elif all_of_them:
            self.code = self.processes[0].wait()

    def _begin_again(self) -> None:
        """The next attempt; of ours, from the durable step."""
        self.attempt += 1
        self.planned = self.stop_reason = ""
        self.died, self.exits_heard, self.snapshot = False, 0, None
        self.stall.begin_again()
        self.resources.begin_again()
        self.gpus.begin_again()
        self.warned.clear()

    # ---------------------------------------------------------------- events and verdicts

    def _event(self, type: str, **fields: Any) -> None:
        """A line of the parent's own in events.jsonl."""
        self._write_event({"type": type, "t": time.time(), **fields})

    def _write_event(self, record: dict[str, Any]) -> None:
        if not self.events.write(json.dumps(mask_record(record), default=str)):
            self._say_unwritten(f"{self.run.events} cannot be written; is the disk full?")

    def _say_unwritten(self, problem: str) -> None:
        if self.facts.ours and "unwritten" not in self.warned:
            self.warned.add("unwritten")
            self.target.say(f"WARNING  {problem}", "bold yellow")

    def _say_verdict(self, verdict: Verdict, **more: Any) -> None:
        event = {"type": "verdict", "t": time.time(), **asdict(verdict), "culprit": shown_pids(verdict.culprit), **more}
        self._write_event(event)
        told = tell(event)
        self.target.say("\n".join(text for text, _ in told), told[0][1], urgent=True)
        told_more = {"cause": verdict.cause, "action": verdict.action, "next": verdict.next}
        self.notifier.tell_verdict(verdict.state, verdict.why, **told_more, **self._outlook())

    def _hear(self) -> None:
        """What the processes report, and who of those that they started has ended."""
        assert self.snapshot is not None
        for event in self.target.hear(self.snapshot, self.stall):
            self._write_event(event)
            self.resources.hear(event)
            if event.get("type") == "verdict" and not event.get("said"):
                kind = "budget" if event.get("cause") in ("budget", "budget_short") else event.get("state", "")
                advice = {"cause": event.get("cause"), "next": event.get("next", "")}
                self.notifier.tell(kind, event.get("why", ""), **advice, **self._outlook())
        if not self.facts.ours:
            self._hear_exits()

    def _outlook(self) -> dict[str, Any]:
        """How far it is and when it will end, for those who are told and do not look."""
        told = self.target.status_fields()
        names = ("step", "eta_s", "end_hours", "end_usd", "short_hours", "short_usd")
        return {name: told[name] for name in names if told.get(name) is not None}

    def _hear_exits(self) -> None:
        """Of a command, every end is an event, and that of a worker or a rank a verdict; what a launcher clears away is not."""
        fresh = self.tree.exits[self.exits_heard :]
        for ended in sorted(fresh, key=lambda one: one.code == -15):
            self._event("child_end", pid=ended.pid, code=ended.code, rank=ended.slot.rank if ended.slot else -1)
            verdict = end_diagnosis.death_verdict(ended)
            cleared_away = self.died and ended.code == -15
            if verdict is not None and not cleared_away and not self.stop_reason:
                self.died = True
                self._say_verdict(verdict)
        self.exits_heard = len(self.tree.exits)

    def _say_error(self) -> None:
        """An uncaught exception of a command, in the words of the process that had it."""
        if self.facts.ours or self.processes[0].poll() == 0 or self.stop_reason or self.died:
            return
        root = self.processes[0]
        code = root.poll() or 0
        if code < 0 and -code not in _ASKED_TO_END:
            memory = code == -signal.SIGKILL and procfs.oom_kills() > self.oom_kills
            self._say_verdict(end_diagnosis.killed_verdict(root.pid, code, memory, self.largest_bytes))
            return
        slots = read_slots(self.run.slots)
        failed = [slot for slot in slots.values() if slot.error and not end_diagnosis.was_interrupted(slot)]
        if failed:
            first = next((slot for slot in failed if slot.worker >= 0), min(failed, key=lambda slot: slot.pid))
            self._say_verdict(end_diagnosis.error_verdict(first, slots))

    def _name_stall(self) -> None:
        """Once per stall and cause: a verdict, with the evidence for it in a file."""
        finding = self.stall.unnamed_finding() if not self.planned else None
        if finding is not None:
            kept = self.stall.keep_evidence(finding)
            self._say_verdict(finding.verdict, provable=finding.provable, left_s=finding.left_s, kept=kept)

    # ---------------------------------------------------------------- acting

    def _act(self) -> None:
        """Recover or stop, only by the policy, and only by the rules of what is proved."""
        finding = self.stall.finding
        if finding is None or self.planned or self.stop_reason or self.stall.gap_s < STALL_S:
            return
        finding = replace(finding, verdict=replace(finding.verdict, since_s=round(self.stall.gap_s, 2)))
        state = self.target.state()
        if finding.provable and self.stall.proved_s < _PROVED_S:
            return
        decision = self.policy.stuck(finding, state.step, state.kept_step)
        if decision.action == "none" or (decision.action == "fallback" and not self.facts.ours):
            return
        hung = finding.verdict.cause == "hung_kernel"  # nothing can be read from a card that does not answer
        saved = state.durable_step if hung else self._save_before_kill(state.step) if self.facts.ours else 0
        state_now = "stuck" if finding.verdict.state in ("waiting", "slow") else finding.verdict.state  # after patience
        verdict = replace(finding.verdict, state=state_now, action=decision.action, next=decision.why)
        self._say_verdict(verdict, provable=finding.provable)
        self.planned = decision.action
        if self.facts.ours:
            self.target.say(f"step {saved} is safe; the process is killed ({decision.action})", "bold")
            self.planned_why = f"{finding.verdict.why}; {decision.why}"
            culprit = finding.verdict.culprit.get("pid") if decision.action == "restart" else 0
            self.target.kill(self.snapshot, culprit if isinstance(culprit, int) else 0)
        else:  # a command of somebody else is asked to end first
            self.planned_why = decision.why
            self._ask_stop(finding.verdict.why, by_us=True)

    def _save_before_kill(self, step: int) -> int:
        """Ask the saver threads, which work even while a main thread is stuck; the step that is safe then."""
        deadline, durable = time.monotonic() + _SAVE_S, 0
        pid, first = next(iter(self.tree.own.items()))
        process = self.snapshot.process(pid) if self.snapshot else None
        if (
            process is None or process.look.stopped or process.look.state in "ZX"
        ):  # it cannot answer, and is not waited for
            seen = read_slot(first)
            return seen.durable_step if seen else 0
        self.target.ask_save()
        while time.monotonic() < deadline and durable < step:
            time.sleep(0.05)
            seen = read_slot(first)
            durable = seen.durable_step if seen else durable
        return durable

    def _ask_stop(self, reason: str, by_us: bool = False) -> None:
        """Ask the processes to end; a stop that somebody wants cancels a restart of ours."""
        if not by_us and self.planned != "stop":
            self.planned = ""
        if not self.stop_reason:
            self.stop_reason, self.stop_at = reason, time.monotonic()
            self.target.ask_stop(reason, again=False)

    def _enforce_stop(self) -> None:
        if not self.stop_reason or (self.killed and self.facts.ours):
            return
        waited_s = time.monotonic() - self.stop_at
        self.target.ask_stop(self.stop_reason, again=True)
        state = self.target.state()
        if state.at_once or (waited_s > self.facts.grace_s and not self._is_saving()):
            if not self.killed:
                why = "left at once" if state.at_once else f"no answer in {waited_s:.0f} s"
                safe = f"the process is killed; step {state.durable_step} is safe"
                self.target.say(f"{why}: {safe if self.facts.ours else 'the command is killed'}", "bold")
            self.killed = True
            self.target.kill(self.snapshot)

    def _is_saving(self) -> bool:
        """Whether a process saves, and can: not while C code holds the GIL."""
        processes = self.snapshot.processes if self.snapshot else ()
        return any(p.slot and p.slot.saving and not self.stall.is_unanswered(p.pid) for p in processes)

    # ---------------------------------------------------------------- requests of readers

    def _answer_requests(self) -> None:
        names = sorted(name for name in procfs.listed(str(self.run.ask)) if name.endswith(_REQUESTS))
        for path in (self.run.ask / name for name in names[:_MOST_REQUESTS]):
            kind, target = path.suffix[1:], path.with_suffix(".answer")
            who, _ = read_back.read_object(path, read_back.HOLDER)
            try:
                path.unlink()
            except OSError:  # taken back by the asker, or a folder, which is no request
                continue
            self._event("asked", kind=kind, by=who)
            if kind == "why":
                threading.Thread(target=self._answer_why, args=(target,), name="lamp-why", daemon=True).start()
                continue
            if kind == "stop":
                self._ask_stop(f"lamp stop, by process {who.get('pid', '?')} on {who.get('host', '?')}")
            self._answer(target, {"kind": kind, "step": self.target.ask_save() if kind == "save" else 0})

    def _answer_why(self, target: Path) -> None:
        self._answer(target, {"kind": "why", "text": self._explain()})

    def _answer(self, target: Path, answer: dict[str, Any]) -> None:
        try:
            write_json(target, answer, durable=False)
        except OSError as error:  # a full disk: the asker waits in vain and says so; the work goes on
            self._say_unwritten(f"a request could not be answered: {error.strerror}")

    def _explain(self) -> str:
        """Now, in a line; the verdict; every process with its phase and the stacks of its threads."""
        snapshot, told = self.snapshot, self.target.status_fields()
        if snapshot is None:
            return f"{told['now']}\nthe process has not reported yet"
        taken = take_all(self.tree, snapshot.processes, everybody=True)
        line = "\n".join([told["now"], *tell_flags(standing_flags(told))])
        text = explain(line, snapshot, taken, self.stall.finding)
        kept = keep_text(self.run, "why.txt", text) if any(taken.values()) else None
        return text + (f"\nkept in {kept}" if kept else "")

    # ---------------------------------------------------------------- status and end

    def _write_status(self, state: str, **extra: Any) -> None:
        self.status_at = time.monotonic()
        finding = self.stall.finding
        status = {
            **VERSIONS,
            "state": state,
            "verb": self.facts.verb,
            **self.target.status_fields(),
            **self.gpus.fields(),
            "last_progress_s": round(self.snapshot.stalled_s, 2) if self.snapshot else 0.0,
            "attempt": self.attempt,
            "stall": f"{finding.verdict.state}: {finding.verdict.why}" if finding else "",
            "t": time.time(),
            **identity(),
            "child_pid": self.processes[0].pid if self.processes else None,
            **extra,
        }
        if self.following is not None:
            status["track"] = self.following.status(int(status["step"]))
        status["eta_s"] = status["eta_s"] if state == "running" else None
        ranks = (
            {"ranks": status.pop("ranks")} if "ranks" in status else {}
        )  # numbers, and words of ours: nothing to mask
        indent = (
            None if len(self.processes) > MANY else 1
        )  # what json indents, Python writes, and a thousand ranks are long
        try:
            write_json(self.run.status, {**mask_record(status), **ranks}, durable=False, indent=indent)
        except OSError as error:  # a full disk must not end the supervision
            self._say_unwritten(f"{self.run.status} cannot be written: {error.strerror}")

    def _close(self) -> int:
        """What became of it: the last status and event, the report, the last words."""
        self.gpus.close()
        lost = self.facts.ours and not self._has_folder()
        ending = Ending(
            self.code, self.stop_reason, self.planned, self.planned_why, killed=self.killed, folder_lost=lost
        )
        outcome = self.target.outcome(ending)
        self._guarded(lambda: self._write_end(outcome))
        self.notifier.tell_end(outcome.state, outcome.words, self.facts.ours, code=outcome.code)
        self.notifier.close()
        if self.following is not None:
            self.following.close(self.target.state().step)
            if self._has_folder():  # how far they came is known only now
                self._guarded(lambda: self._write_status(outcome.state, exit_code=outcome.code, outcome=outcome.words))
        self.target.close(outcome)
        return outcome.code

    def _write_end(self, outcome: RunOutcome) -> None:
        if not self._has_folder():
            if self.facts.ours:
                self.target.report(outcome, self.attempt)
            else:
                self.target.say(outcome.words)
            return
        self._write_status(outcome.state, exit_code=outcome.code, outcome=outcome.words)
        self._event("stop", code=outcome.code, state=outcome.state, outcome=outcome.words, reason=self.stop_reason)
        self.target.report(outcome, self.attempt)


def _place(path: Path) -> tuple[int, int] | None:
    """Which file is there now; None for no file."""
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):  # that is the answer
        return None
    return facts.st_dev, facts.st_ino


def ask(run: RunDir, kind: str, deadline_s: float = 5.0) -> dict[str, Any] | None:
    """Put a request into the run's ask/ folder and wait for the parent's answer."""
    me = identity()
    name = f"{me['host']}-{me['pid']}-{time.monotonic_ns()}"
    request, answer = run.ask / f"{name}.{kind}", run.ask / f"{name}.answer"
    try:
        write_json(request, {**me, "t": time.time()}, durable=False)
    except OSError as error:
        raise cannot_write(request, error) from error
    deadline = time.monotonic() + deadline_s
    try:
        while time.monotonic() < deadline:
            if answer.exists():
                return read_back.read_object(answer, read_back.ANSWER, read_back.MOST_BYTES)[0]
            time.sleep(0.03)
        return None
    finally:  # also when the asker is interrupted: a request must not outlive it
        request.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
