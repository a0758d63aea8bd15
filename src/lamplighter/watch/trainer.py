"""Our own processes as a target of the supervisor: one per rank, each with a slot, a FIFO and an event file of its own.

In:  a run folder, the verb and its request (ChildSpec), a console.
Out: processes of `python -m lamplighter.commands.child_main`, what they report in words, and what their end means.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lamplighter import device_faults, read_back
from lamplighter.config import Budget
from lamplighter.device_faults import Fault
from lamplighter.errors import (
    CHILD_LOST,
    CRASHED,
    DONE,
    FAULTS_FOUND,
    LEFT_AT_ONCE,
    STOPPED_EARLY,
    STUCK,
    CannotWrite,
    NoCheckpoint,
    RefusedByPlan,
)
from lamplighter.procs import prctl, procfs, signals
from lamplighter.report import Verdict
from lamplighter.rundir import LineFile, RunDir, Tail, number, read_status
from lamplighter.safe_text import clean
from lamplighter.slot import OF_ALL_RANKS, Slot, differing_calls
from lamplighter.watch import time_report
from lamplighter.watch.console import Console
from lamplighter.watch.curves import CurveSketch
from lamplighter.watch.elsewhere import Elsewhere, RemoteProcess
from lamplighter.watch.launcher import Launcher, memory_files
from lamplighter.watch.process_tree import Snapshot
from lamplighter.watch.rank_series import RankSeries
from lamplighter.watch.restart_policy import OF_THE_CODE
from lamplighter.watch.stall import StallDetector
from lamplighter.watch.status import Observer, duration, line, tell, tell_step
from lamplighter.watch.supervisor import Death, Ending, Root, RunOutcome, TargetFacts, TargetState

_OUTPUT_LINES = 40
_LEDGER_NAMES = 5  # on the screen, where the last validation and sample must stay in sight; report.md has all
_BUDGET_BACKSTOP_S = 5.0
_STANDBY_PAYS_S = 300.0  # auto: a run that lasts at least so much longer gets a process that stands by
_STANDBY_SPARE = 2.0  # and this many times what a rank takes must be free
_OF_EVERY_RANK = ("hello", "error")
_NO_WORD = "it did not say that it was done; your code or a library may have called os._exit"
_STATES = {
    DONE: "finished",
    STUCK: "stuck",
    STOPPED_EARLY: "stopped",
    CHILD_LOST: "lost",
    76: "diverged",
    LEFT_AT_ONCE: "stopped",
}
_STYLES = {DONE: "bold green", STOPPED_EARLY: "bold yellow"}
_NOT_BY_RESUMING = (65, 66, 77, 78)  # these need another input, not the same command again


@dataclass(frozen=True)
class ChildSpec:
    """What the processes shall do, and under which conditions."""

    verb: str
    request: dict[str, Any]
    resume_command: str = ""
    left_out: str = ""  # in words, what of it is to be given again
    steps: int | None = None  # as they were given, where they were
    budget: Budget = field(default_factory=Budget)
    grace_s: float = 30.0
    began: float = field(default_factory=time.time)
    lock_fd: int = -1
    verbose: bool = False
    keeps_report: bool = True  # a training run has a time report; `generate` has not
    result_fd: int = -1
    child_stdin: int = subprocess.DEVNULL
    ranks: int = 1
    elastic: bool = False  # ranks can go on without one that died
    spare: str | int = 0  # processes that stand by
    restarts: bool = False  # a child that dies is started again, though it trains nothing: a server
    elsewhere: Elsewhere = field(default_factory=Elsewhere)  # the other nodes of the run
    told: dict[str, str] = field(default_factory=dict)  # more for the environment of every rank


class Trainer:
    """The processes of one run of ours, and what they have said."""

    def __init__(self, run: RunDir, spec: ChildSpec, console: Console) -> None:
        self.run, self.spec, self.console = run, spec, console
        self.request = dict(spec.request)
        self.facts = TargetFacts(spec.verb, True, spec.grace_s, spec.began)
        self.began = time.monotonic() - max(0.0, time.time() - spec.began)
        self.last_status = read_status(run)
        self.spent_before_s = number(self.last_status.get("spent_s"))
        self.durable_before = self._durable_on_disk()
        self.launcher = Launcher(
            run,
            spec.verb,
            spec.ranks,
            spec.lock_fd,
            spec.result_fd,
            spec.child_stdin,
            spec.elastic and spec.ranks > 1,
            memory_files() if spec.keeps_report else [],
            elsewhere=spec.elsewhere,
        )
        self.standby_said: set[str] = set()
        self.stayed: set[int] = set()  # processes that go on from the attempt before
        self.failed: list[int] = []  # ranks that have ended in a way that ends all of them
        self.observer = Observer(run, [run.rank_events(rank) for rank in range(spec.ranks)], spec.budget)
        self.status = self.observer.status
        self.status.started = self.began
        self.output = Tail(run.output, from_end=True)
        self.sketch = CurveSketch(run) if spec.keeps_report else None
        self.series, self.attempt = RankSeries(run), 1
        self.interrupts, self.signalled = 0, ""
        self.event_files: dict[int, LineFile] = {}  # of ranks of other nodes
        self.oom_before = procfs.oom_kills()
        self.peak_bytes = 0
        self.error_heard = False
        self.errors_said: set[tuple[str, ...]] = set()
        self.ended_early: dict[str, Any] = {}
        self.foretold_s = 0.0  # what the whole run will have taken, as it was last known
        self.stopped_by: dict[str, Any] = {}  # the verdict by which the child stopped itself
        self.overflows = 0  # of fp16
        self.ended = False  # from then on the disk is asked too: a slot may have been deleted under the run
        self.fault: Fault | None = None  # of a GPU, by which the last attempt ended
        self.stop_heard = ""  # why it stops, in its own words: a signal that reached it and not us

    @property
    def spent_s(self) -> float:
        return self.spent_before_s + time.monotonic() - self.began

    @property
    def processes(self) -> list[subprocess.Popen[bytes] | RemoteProcess]:
        """By rank."""
        return self.launcher.processes

    @property
    def ranks(self) -> range:
        """That there are now."""
        return range(len(self.processes))

    @property
    def slot(self) -> Slot | None:
        """Of the first rank."""
        return self.status.slot

    def say(self, text: str, style: str = "", urgent: bool = False) -> None:
        self.console.say(text, style)

    # ---------------------------------------------------------------- start

    def start(self, attempt: int, eager: bool) -> list[Root]:
        """One process for each rank; again from the newest step, without the compiler where that was given up."""
        where = ""
        if self.processes:
            self.oom_before = procfs.oom_kills()
            self.last_status = read_status(self.run)
            self.durable_before = self._durable_on_disk()
            self.request |= {"resume": "auto", "eager": eager, "same_settings": True}
            kept = self.slot.memory_step if self.slot else 0
            where = f"going on from step {max(kept, self.durable_before)}"
            where += ", which is in memory" if kept > self.durable_before else ""
            self.observer.begin_again()
        prctl.adopt_orphans()
        again, self.failed, self.attempt, self.errors_said = bool(self.processes), [], attempt, set()
        before = {process.pid for process in self.processes}
        how = self.launcher.start(self.request, attempt, self._times())
        self.stayed = before & {process.pid for process in self.processes}
        if again:
            self.say(f"attempt {attempt}: {how or where}", "bold")
        if self.spec.keeps_report:
            threading.Thread(
                target=self._record_environment, args=(attempt,), name="lamp-environment", daemon=True
            ).start()
        return [self._root(rank, process) for rank, process in enumerate(self.processes)]

    def _root(self, rank: int, process: subprocess.Popen[bytes] | RemoteProcess) -> Root:
        if isinstance(process, RemoteProcess):
            return Root(process, end_fd=process.open_end())
        return Root(process, self.run.slot(rank))

    def _times(self) -> dict[str, str]:
        return {**self.spec.told, "LAMP_SPENT_S": str(self.spent_before_s), "LAMP_STARTED_MONOTONIC": str(self.began)}

    def _tend_standby(self) -> None:
        """Have a process ready for the next death, where that is wanted and pays."""
        slot, spare = self.slot, self.spec.spare
        trains = slot is not None and slot.phase.startswith("train") and (slot.memory_step or slot.durable_step)
        missing = (
            self.launcher.elastic and len(self.processes) < self.launcher.ranks
        )  # one is wanted then, whatever is set
        if (
            not (spare or missing)
            or not trains
            or self.signalled
            or self.status.stopping
            or self.launcher.standby_is_ready
        ):
            return
        if spare == "auto" and not missing and self.launcher.standby is None:
            if (self.status.eta_s or 0.0) < _STANDBY_PAYS_S:
                return
            need = _STANDBY_SPARE * self.peak_bytes
            if (left := procfs.memory_left()) < need:
                self.standby_words(
                    f"no process stands by: {need / 1e9:.1f} GB for it, and {left / 1e9:.1f} GB are free"
                )
                return
        request = {**self.request, "resume": "auto", "same_settings": True}
        if problem := self.launcher.stand_by(request, self.attempt, self._times()):
            self.standby_words(problem)

    def standby_words(self, words: str) -> None:
        if words not in self.standby_said:
            self.standby_said.add(words)
            self.say(f"note  {words}")

    def _record_environment(self, attempt: int) -> None:
        """Beside the start of the child: git may take a while."""
        from lamplighter.watch import environment

        changed = environment.record(self.run, attempt, Path.cwd())
        if changed and not self.ended:  # the last words of a short run come last
            self.say(environment.told_changes(changed))

    # ---------------------------------------------------------------- signals and stopping

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Ctrl+C, TERM and whatever else would end us (unless ignored, as HUP under nohup) ask for a stop; a second Ctrl+C
        leaves at once."""
        caught = {signal.SIGINT, signal.SIGTERM, *signals.requests_to_stop()}
        before = {which: signal.signal(which, self._on_signal) for which in caught}
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)

    def _on_signal(self, which: int, _frame: object) -> None:
        """Only notes it: the loop, woken at once, does the rest (a handler must not take locks)."""
        self.interrupts += which == signal.SIGINT
        self.signalled = self.signalled or ("Ctrl+C" if which == signal.SIGINT else signals.signal_name(which))

    def ask_stop(self, reason: str, again: bool) -> None:
        """Tell every rank to save the last completed step and leave; again, while it had not opened its FIFO yet."""
        for rank in self.ranks:
            slot = self.launcher.slot_of(rank) if again else None
            if slot is None or not slot.stopping:
                self.launcher.tell(rank, f"stop {reason}")
        if not again:
            what = ": saving the last completed step" if self.spec.keeps_report else ""
            self.say(f"stopping ({reason}){what}; Ctrl+C again leaves at once", "bold")

    def ask_save(self) -> int:
        for rank in self.ranks:
            self.launcher.tell(rank, "save")
        return self.slot.step if self.slot else 0

    def kill(self, snapshot: Snapshot | None, culprit: int = 0) -> None:
        """The ranks and everything that they started; the culprit alone, where the others can go on without it."""
        if not self.failed:
            self.failed = [rank for rank in self.ranks if self.processes[rank].poll()]
        one = [rank for rank in self.ranks if self.processes[rank].pid == culprit]
        self.launcher.kill(one if one and self.launcher.elastic else list(self.ranks))

    @property
    def goes_on_with(self) -> bool:
        """Whether ranks that are left go on in the next attempt, with their memory."""
        return self.launcher.elastic and bool(self.launcher.survivors)

    @property
    def grows(self) -> bool:
        return self.launcher.grows

    @property
    def elsewhere(self) -> Elsewhere | None:
        """Ranks of other nodes."""
        return self.spec.elsewhere if self.spec.elsewhere.nodes else None

    # ---------------------------------------------------------------- what they report

    def hear(self, snapshot: Snapshot, stall: StallDetector) -> Iterator[dict[str, Any]]:
        """Merge the ranks' events, and say what has words."""
        first = snapshot.processes[0]
        if self.elsewhere is not None:
            self._hear_other_nodes()
        self.series.look(snapshot, self.attempt)
        self.peak_bytes = max(self.peak_bytes, first.look.rss_bytes)
        finding = stall.finding
        self.status.stall_words = f"{finding.verdict.state}: {finding.verdict.why}" if finding else ""
        for rank, event in self.observer.look(first.slot, first.look, snapshot.stalled_s, self.spent_s):
            if rank > 0 and event.get("type") not in _OF_EVERY_RANK:
                continue  # all ranks do the same, and the first one speaks; the others' words are in their own files
            self._take_in(event)
            for text, style in [] if self._said_already(event) else tell(self._of_rank(rank, event)):
                self.say(text, style)
            yield {**event, "rank": rank}
        self.foretold_s = self.status.end_s or self.foretold_s
        self._tend_standby()
        if self.sketch is not None:
            self.sketch.look(self.status.floor)
        for record in self.observer.fresh if self.spec.verbose else []:
            self.say(tell_step(record), "dim")
        fresh = self.output.lines()
        for printed in filter(_is_worth_showing, fresh[:_OUTPUT_LINES]):
            self.say(f"  | {clean(printed)}", "dim")
        if len(fresh) > _OUTPUT_LINES:
            self.say(f"  | ... {len(fresh) - _OUTPUT_LINES} more lines in {self.run.output}", "dim")

    def _said_already(self, event: dict[str, Any]) -> bool:
        """Ranks that end together end by the same error."""
        if event.get("type") != "error":
            return False
        lines = tuple(map(str, event.get("lines") or ()))
        self.errors_said, before = {*self.errors_said, lines}, self.errors_said
        return lines in before

    def _of_rank(self, rank: int, event: dict[str, Any]) -> dict[str, Any]:
        """Of several ranks, an error with the one that had it."""
        if event.get("type") != "error" or self.spec.ranks == 1 or not event.get("lines"):
            return event
        first, *more = map(str, event["lines"])
        if "rank " not in first:
            first = first.replace("error: ", f"error: rank {rank}: ", 1)
        return {**event, "lines": [first, *more]}

    def _hear_other_nodes(self) -> None:
        """Their lines of events go into files here, which are read as those of our own ranks are."""
        self.launcher.pass_on_meeting(self.attempt)
        events, output = self.spec.elsewhere.drain()
        for rank, text in events:
            if rank not in self.event_files:
                self.event_files[rank] = LineFile(self.run.rank_events(rank))
            self.event_files[rank].write(text)
        for host, text in output[:_OUTPUT_LINES]:
            if _is_worth_showing(text):
                self.say(f"  | {host}: {clean(text)}", "dim")
        for words in self.spec.elsewhere.fresh_words():
            self.say(words, "bold yellow")
        self.signalled = self.signalled or self.spec.elsewhere.wants_stop()

    def _take_in(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        self.error_heard = self.error_heard or kind == "error"
        if kind == "ended early":
            self.ended_early = {name: event.get(name) for name in ("step", "steps", "since_best", "best_step", "why")}
        elif kind == "verdict" and event.get("cause") == "budget":
            self.stopped_by = event
        elif kind == "sharded":  # no rank holds what another has lost: all start again
            self.launcher.elastic, self.spec = False, replace(self.spec, spare=0)
        elif kind == "overflow":
            self.overflows = int(number(event.get("count")))
        elif kind == "stopping":
            self.stop_heard = str(event.get("reason") or "")

    def show(self, stopping_s: float | None) -> None:
        words = (
            f"stopping for {duration(stopping_s)}, at most {self.facts.grace_s:.0f} s" if stopping_s is not None else ""
        )
        self.status.stopping = words
        self.console.show(self.status)

    def state(self) -> TargetState:
        step, durable = self._standing()
        spent = self.spec.budget.left_s(self.spent_s) < -_BUDGET_BACKSTOP_S
        return TargetState(
            step,
            durable,
            may_grow=self.slot is None or not self.slot.phase.startswith("train"),
            stop_wanted=self.signalled or ("the budget is spent" if spent else ""),
            at_once=self.interrupts > 1,
            data_wait=self.status.data_wait,
            memory_step=self.slot.memory_step if self.slot else 0,
        )

    def status_fields(self) -> dict[str, Any]:
        slot, before = self.slot, self.last_status
        step, durable = self._standing()
        told = slot is not None and slot.steps > 0
        return {
            "now": line(self.status),
            "phase": slot.phase if slot else "start",
            "step": step,
            "steps": slot.steps if slot and told else self.spec.steps or before.get("steps") or 0,
            "tokens": slot.tokens if slot and told else before.get("tokens") or 0,
            "tokens_per_s": round(slot.tokens_per_s, 1) if slot else 0.0,
            "documents": slot.documents if slot and told else int(number(before.get("documents"))),
            "loss": slot.loss if slot and slot.loss == slot.loss else None,
            "mean_loss": slot.mean_loss if slot and slot.mean_loss == slot.mean_loss else self._before("mean_loss"),
            "val_loss": self._val_loss(),
            "best_val_loss": slot.best_loss if slot and slot.best_step else self._before("best_val_loss"),
            "best_step": slot.best_step if slot and told else int(number(before.get("best_step"))),
            "eta_s": round(self.status.eta_s, 1) if self.status.eta_s is not None else None,
            "usd": round(self.spec.budget.spent_usd(self.spent_s), 6),
            **self._forecast(),
            "durable_step": durable,
            **({"memory_step": slot.memory_step} if slot and slot.memory_step else {}),
            **({"mirrored_step": found} if (found := self.status.mirrored_step) is not None else {}),
            "spent_s": round(self.spent_s, 2),
            "flags": list(self.status.flags.values()),
            **{name: words for name in ("exact", "path") if (words := getattr(self.status, name))},
            **({"ended_early": self.ended_early} if self.ended_early else {}),
            **({"ranks": self._rank_records()} if self.spec.ranks > 1 else {}),
            **({"nodes": self.spec.elsewhere.records()} if self.elsewhere is not None else {}),
            **self._budget_spent(),
        }

    def _rank_records(self) -> list[dict[str, Any]]:
        done = [rank for rank in self.ranks if self.processes[rank].poll() == DONE]
        return self.series.now([one.pid for one in self.processes], done)

    def _val_loss(self) -> float | None:
        """Of this attempt, else the last that is known."""
        found = self.status.val_loss
        return found if found is not None else self._before("val_loss")

    def _before(self, name: str) -> float | None:
        """A number of the attempt before, where it said one."""
        found = number(self.last_status.get(name), math.nan)
        return None if math.isnan(found) else found

    @property
    def _spent_all(self) -> bool:
        return bool(self.stopped_by) or self.spec.budget.left_s(self.spent_s) < 0

    def _budget_spent(self) -> dict[str, float]:
        """The limit in seconds that has stopped it, and what the whole run would have taken: what a next start must know."""
        if not self._spent_all:
            return {}
        return {"budget_spent": self.spec.budget.left_s(0.0), "end_hours_told": round(self.foretold_s / 3600, 4)}

    def _forecast(self) -> dict[str, Any]:
        """Hours and dollars of the whole run, and what of them the budget lacks; null until ten steps are measured."""
        status, budget = self.status, self.spec.budget
        end_s, short_s = status.end_s, status.short_s
        known = end_s is not None
        return {
            "end_hours": round(end_s / 3600, 4) if end_s is not None else None,
            "end_usd": round(budget.spent_usd(end_s), 4) if end_s is not None and budget.usd_per_hour else None,
            "short_hours": round(short_s / 3600, 4) if known else None,
            "short_usd": round(budget.spent_usd(short_s), 4) if known and budget.usd_per_hour else None,
        }

    def _standing(self) -> tuple[int, int]:
        """(last step, durable step): the child's own word, or what is on disk until it has spoken."""
        if self.slot is not None and self.slot.steps > 0:
            durable = max(self.slot.durable_step, self._durable_on_disk()) if self.ended else self.slot.durable_step
            return max(self.slot.step, durable), durable
        return max(self.durable_before, int(number(self.last_status.get("step")))), self.durable_before

    def _durable_on_disk(self) -> int:
        latest, _ = read_back.read_object(self.run.checkpoints / "latest.json", read_back.LATEST)
        return int(latest.get("step") or 0)

    # ---------------------------------------------------------------- the end

    def death(self, code: int) -> Death | None:
        """A process that is gone without having ended, or by an error that may pass: another attempt may outlive that."""
        slot, (step, _) = self.slot, self._standing()
        culprit: dict[str, object]
        if code == CHILD_LOST and (lost := self._lost_node(step)) is not None:
            return lost
        if code in (STUCK, -signal.SIGABRT) and (found := self._different_calls()) is not None:
            return found
        left = self._slot_of(code)
        passing = code == CRASHED and left is not None and bool(left.passing)
        if (
            not (self._lost(code) or passing)
            or not (self.spec.keeps_report or self.spec.restarts)
            or self.interrupts > 1
        ):
            return None
        fault = _fault_of(left.error) if left is not None and passing else None
        if left is not None and fault is not None:
            self.fault = fault
            why = f"at step {step}: {left.error.replace('error: ', '', 1).splitlines()[0]}"
            culprit = {"pid": left.pid, "rank": left.rank if fault.rank is None else fault.rank, "step": step}
            verdict = Verdict("dead", fault.cause, f"{fault.why}; {why}", "", culprit=culprit)
            by_plan = lighter_by_plan(self.run) if fault.cause == "out_of_memory" else ""
            return Death(fault.cause, verdict, compiling=False, advice="; ".join(filter(None, (by_plan, fault.advice))))
        if left is not None and passing:
            self.launcher.all_again = left.passing == OF_ALL_RANKS
            said = left.error.replace("error: ", "", 1).replace("\nwhy:   ", ", ")
            who = f"rank {left.rank}" if self.spec.ranks > 1 else "the process"
            why = f"{who} ended at step {step} by an error that a second try may not meet: {said}"
            verdict = Verdict("dead", "exception", why, "", culprit={"pid": left.pid, "rank": left.rank, "step": step})
            return Death(said, verdict, compiling=False)
        compiling = slot is not None and bool(slot.compiling)
        memory = code < 0 and procfs.oom_kills() > self.oom_before
        how = f"killed by {signals.signal_name(-code)}" if code < 0 else f"left with exit code {code}"
        evidence: tuple[str, ...] = (f"its last phase was {slot.phase}",) if slot else ()
        failed = self._rank_that_left(code)
        who = f"rank {failed} (process {self.processes[failed].pid})" if self.spec.ranks > 1 else "the process"
        if code < 0:
            why = f"{who} was {how} (signal {-code}) at step {step}" + (", out of memory" if memory else "")
            why += self._died_too(failed)
            evidence = (f"largest seen {self.peak_bytes / 1e9:.2f} GB", f"{procfs.memory_left() / 1e9:.2f} GB free now")
        else:
            why = f"{who} {how} at step {step}, in the middle of its work: {_NO_WORD}"
        cause = "rss_oom" if memory else "killed" if code < 0 else "exit"
        culprit = {"pid": self.processes[failed].pid, "rank": failed, "step": step}
        same = how if self.spec.ranks == 1 else f"rank {failed}, {how}"  # two ranks may die in one instant
        if self.processes[failed].pid in self.stayed:  # killed with another one, whose number it may have by now
            same += f", process {self.processes[failed].pid}"
        return Death(same, Verdict("dead", cause, why, "", evidence=evidence, culprit=culprit), compiling)

    def _died_too(self, named: int) -> str:
        """The others that were killed in the same moment."""
        gone = self.failed or [rank for rank in self.ranks if self.processes[rank].poll()]
        others = [rank for rank in gone if rank != named and (self.processes[rank].returncode or 0) < 0]
        told = [f"rank {rank} (process {self.processes[rank].pid})" for rank in others]
        return f"; so {'were' if len(told) > 1 else 'was'} {' and '.join(told)}" if told else ""

    def _different_calls(self) -> Death | None:
        """By what the ranks have said last: the user's own code made them call different collectives, of which gloo dies."""
        every = {rank: slot for rank in self.ranks if (slot := self.launcher.slot_of(rank)) is not None}
        cause, told = differing_calls(every)
        if not cause:
            return None
        why = f"the ranks call different collectives: {told}"
        return Death(cause, Verdict("broken", cause, why, ""), compiling=False, hopeless=OF_THE_CODE)

    def _lost_node(self, step: int) -> Death | None:
        """Ranks that have ended for us because their whole node cannot be reached."""
        ranks = {
            rank: one for rank, one in enumerate(self.processes) if isinstance(one, RemoteProcess) and one.node.lost
        }
        if not ranks:
            return None
        nodes = {one.node.number: one.node for one in ranks.values()}
        who = " and ".join(f"{node.words}: {node.lost}" for node in nodes.values())
        which = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        why = f"{who}; {which} went with it at step {step}"
        evidence = tuple(f"{node.words} said its last word {node.last_word_s:.1f} s ago" for node in nodes.values())
        culprit = {"rank": min(ranks), "node": min(nodes), "host": nodes[min(nodes)].host}
        verdict = Verdict("dead", "node_lost", why, "", evidence=evidence, culprit=culprit)
        kind = "sharded ranks" if self.spec.elastic else "ranks on GPUs"
        advice = "" if self.launcher.elastic else f"{kind} cannot go on without the others"
        return Death(f"node {min(nodes)} was lost", verdict, compiling=False, advice=advice)

    def _lost(self, code: int) -> bool:
        """Whether the child is gone without having ended: killed, or left with a code that is not its own last word.

        Success is proved: `done` needs the child's word and the last step (or an early end that it told), `stopped early`
        needs its word, which follows the save. A crash needs no proof, nor does a disk on which not even a slot can be made.
        """
        slot = self._slot_of(code)
        if code == CRASHED or (code == CannotWrite.code and slot is None):  # it could not even open its slot
            return False
        if code < 0 or slot is None or not slot.closed_with(code):
            return True
        if code == DONE and self.spec.keeps_report:
            return not (self.ended_early or slot.step >= slot.steps > 0)
        return False

    def _slot_of(self, code: int) -> Slot | None:
        """The slot of the rank that left with this code: its own last word is what counts, not that of rank 0."""
        rank = self._rank_that_left(code)
        return self.slot if rank == 0 else self.launcher.slot_of(rank)

    def _rank_that_left(self, code: int) -> int:
        """Those that failed by themselves come before those that were ended with them."""
        return next((rank for rank in [*self.failed, *self.ranks] if self.processes[rank].returncode == code), 0)

    def outcome(self, ending: Ending) -> RunOutcome:
        slot = self.slot
        if slot is not None and slot.error and not self.error_heard:
            self.say(slot.error, "bold red")  # the event was lost: a full disk
        self.ended = True
        code, words = self._judge(ending, ending.code)
        return RunOutcome(code, _STATES.get(code, "failed"), words)

    def _judge(self, ending: Ending, child_code: int) -> tuple[int, str]:
        """The exit code of the command, and the sentence for it."""
        step, durable = self._standing()
        name, safe = self.run.name, self._safe()
        if ending.folder_lost:
            return CannotWrite.code, (
                f"the folder {self.run.path} was deleted or moved away at step {step}: nothing could be saved any more; if it"
                " was moved, what was saved before is in it: put it back and run the same command again"
            )
        if ending.planned == "stop":
            return STUCK, f"stuck, and stopped: {ending.planned_why}{safe}"
        if self.interrupts > 1 and ending.killed:
            return LEFT_AT_ONCE, f"left at once (second Ctrl+C){safe}"
        lost = self._lost(child_code)
        if ending.stop_reason and child_code == DONE and not lost:
            return DONE, f"finished {name} before the stop took effect"
        nothing_lost = ending.killed or not self.spec.keeps_report or durable >= step
        killed = child_code in (-signal.SIGKILL, -signal.SIGTERM) and nothing_lost
        if ending.stop_reason and (killed or (child_code == STOPPED_EARLY and not lost)):
            where = f" {self._where()}{safe}" if self.spec.keeps_report else ""
            return STOPPED_EARLY, f"stopped early ({ending.stop_reason}){where}"
        if child_code < 0:
            memory = "; the kernel killed a process for memory" if procfs.oom_kills() > self.oom_before else ""
            how = f"killed by {signals.signal_name(-child_code)} (signal {-child_code}){memory}"
            return CHILD_LOST, f"the process was {how}{safe}"
        if lost:
            return CHILD_LOST, f"the process left with exit code {child_code} in the middle: {_NO_WORD}{safe}"
        return child_code, self._words_of_code(child_code)

    def _words_of_code(self, code: int) -> str:
        """Of a child that has said itself how it ended."""
        safe, early = self._safe(), self.ended_early
        if code == DONE and early:
            best = f"; use checkpoint-{early['best_step']}" if early["best_step"] else ""
            return f"finished {self.run.name} early, at step {early['step']} of {early['steps']}: {early['why']}{best}"
        where = f"; the traceback is in {self.run.output}" if self.spec.keeps_report else ""
        why = " (the budget is spent)" if self._spent_all else f" ({self.stop_heard})" if self.stop_heard else ""
        who = f"rank {self._rank_that_left(CRASHED)}" if self.spec.ranks > 1 else "the process"
        words = {
            DONE: f"finished {self.run.name}",
            STOPPED_EARLY: f"stopped early{why} {self._where()}{safe}",
            CRASHED: f"{who} crashed{where}{safe}",
            FAULTS_FOUND: f"faults were found{safe}",
            RefusedByPlan.code: f"refused by the plan{safe}",
            NoCheckpoint.code: self._no_checkpoint(),
        }
        return words.get(code, f"ended with exit code {code}{safe}")

    def _where(self) -> str:
        """Of a stop. Before the child has spoken, the last step that is known is of an earlier start, or of another machine."""
        spoke = self.slot is not None and self.slot.steps > 0
        step = self._standing()[0]
        return f"at step {step}" if spoke or not step else "before another step was made"

    def _no_checkpoint(self) -> str:
        asked = self.spec.request.get("resume", "auto")
        return f"it cannot go on from {asked}" if asked != "auto" else "there is no valid checkpoint to go on from"

    def _safe(self) -> str:
        """What of a training is on the disk; other verbs know themselves what they have written."""
        step, durable = self._standing()
        if not self.spec.keeps_report:
            return ""
        if durable:
            return f"; step {durable} is safe"
        return "; no checkpoint was made yet" if step else "; no step had been made"

    def report(self, outcome: RunOutcome, attempts: int) -> None:
        """report.md, the table of it in words, and the outcome."""
        if self.spec.keeps_report:
            self._report_times(outcome)
        if outcome.code != DONE or self.spec.keeps_report:
            self.say(outcome.words, _STYLES.get(outcome.code, "bold red"))

    def _report_times(self, outcome: RunOutcome) -> None:
        times = time_report.read_time_report(self.run)
        facts = {**self._statistics(), "attempts": str(times.attempts)}
        if self.status.path:
            facts["computed in"] = self.status.path
        if self.overflows:
            facts["steps passed over for the loss scale of fp16"] = str(self.overflows)
        if self.status.exact:
            facts["the same bits each time"] = self.status.exact
        if self.status.flags:
            facts["red flags at the end"] = named = ", ".join(self.status.flags)
            self.say(f"red flags at the end: {named} (numbers in {self.run.report})", "bold yellow")
        for text in time_report.lines(times, self.spec.budget, most=_LEDGER_NAMES):
            self.say(f"   {text}", "dim")
        self.say("; ".join(f"{name} {value}" for name, value in self._statistics().items()))
        if not self.run.path.is_dir():  # taken away: the words above are all that is left
            return
        if self.sketch is not None:
            self.sketch.write_all(self.status.floor)
        if problem := time_report.write_report(self.run, times, self.spec.budget, outcome.words, facts):
            self.say(f"WARNING  {self.run.report} cannot be written: {problem}", "bold yellow")

    def _statistics(self) -> dict[str, str]:
        """What the run adds up to, over all its attempts; however it ended."""
        slot, told, budget = self.slot or Slot(), self.status_fields(), self.spec.budget
        facts = {"steps": f"{told['step']} of {told['steps'] or '?'}", "tokens": f"{told['tokens']:,}"}
        if told["documents"]:
            facts["documents"] = f"{told['documents']:,}"
        if slot.mean_tokens_per_s:
            facts["tokens/s"] = f"{slot.mean_tokens_per_s:,.0f}"
        if told["mean_loss"] is not None:
            facts["average loss"] = f"{told['mean_loss']:.4f}"
        if told["loss"] is not None:
            facts["last loss"] = f"{told['loss']:.4f}"
        if self.status.val_loss is not None:
            facts["validation"] = f"{self.status.val_loss:.4f} (step {self.status.val_step})"
        if told["best_step"]:
            facts["best"] = f"{number(told['best_val_loss']):.4f} (step {told['best_step']})"
        cost = f", ${budget.spent_usd(self.spent_s):.4f}" if budget.usd_per_hour is not None else ""
        facts["spent"] = f"{duration(self.spent_s)}{cost}"
        return facts

    def _words_for_nodes(self, outcome: RunOutcome) -> str:
        """What node 0 says of the end, with the error that it shows only on its own screen."""
        error = self.slot.error.removeprefix("error: ").replace("\nwhy:   ", ": ") if self.slot else ""
        return f"{outcome.words}; {error}" if error and outcome.code not in (DONE, STOPPED_EARLY) else outcome.words

    def close(self, outcome: RunOutcome) -> None:
        """What to run next."""
        self.launcher.close()
        for node in self.spec.elsewhere.nodes:
            node.close(outcome.code, self._words_for_nodes(outcome))
        if outcome.code != DONE and self.spec.resume_command and outcome.code not in _NOT_BY_RESUMING:
            more = self.spec.budget.enough_for(self.foretold_s or 2 * self.spent_s) if self._spent_all else ""
            until = self.spec.budget.until_step
            more = more or ("--budget.until_step none" if until is not None and self._standing()[1] >= until else "")
            self.say(f"next: {with_settings(self.spec.resume_command, more)}", "bold")
            if self.spec.left_out:
                self.say(self.spec.left_out)


def _is_worth_showing(printed: str) -> bool:
    """Not what torch says of every peer whose address has no name; output.log has it."""
    return "[c10d] The hostname of the client socket cannot be retrieved" not in printed


def _fault_of(last_words: str) -> Fault | None:
    """By the error itself, "error: AcceleratorError: CUDA error: ...", without the words that the child has put below it."""
    kind, _, said = last_words.split("\nwhy:", 1)[0].removeprefix("error: ").partition(": ")
    return device_faults.from_text(said, kind)


def lighter_by_plan(run: RunDir) -> str:
    """What would take less memory, by the plan of this run; empty where it says nothing."""
    plan, _ = read_back.read_object(run.path / "plan.json", read_back.PLAN)
    options = [f"{one['settings']} takes {one['gib']:.1f} GiB" for one in plan.get("lighter") or ()]
    if not options:
        return ""
    return f"by the plan this takes {number(plan.get('memory_gib')):.1f} GiB; {' and '.join(options)}, with the same losses"


def with_settings(command: str, settings: str) -> str:
    """The command with these settings instead of what it says of them."""
    words, new = shlex.split(command), shlex.split(settings)
    for flag in new[::2]:
        words = [word for word in words if not word.startswith(f"{flag}=")]
        while flag in words:
            at = words.index(flag)
            del words[at : at + 2]
    return shlex.join([*words, *new])
