"""Our own processes as a target of the supervisor: one per rank, each with a slot, a FIFO and an event file of its own.

In:  a run folder, the verb and its request (ChildSpec), a console.
Out: processes of `python -m lamplighter.commands.child_main`, what they report in words, and what their end means.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
from lamplighter.procs import prctl, procfs, signals, stacks
from lamplighter.report import Verdict
from lamplighter.rundir import RunDir, number, open_lines, read_status
from lamplighter.safe_text import clean
from lamplighter.slot import Slot, read_slot
from lamplighter.watch import time_report
from lamplighter.watch.console import Console
from lamplighter.watch.curves import CurveSketch
from lamplighter.watch.process_tree import Snapshot
from lamplighter.watch.rank_series import RankSeries
from lamplighter.watch.stall import StallDetector
from lamplighter.watch.status import Observer, Tail, duration, line, tell, tell_step
from lamplighter.watch.supervisor import Death, Ending, Root, RunOutcome, TargetFacts, TargetState

_OUTPUT_LINES = 40
_LEDGER_NAMES = 5  # on the screen, where the last validation and sample must stay in sight; report.md has all
_BUDGET_BACKSTOP_S = 5.0
_SPIN = "3000"  # turns of waiting before a thread sleeps: chosen by measurement, decision 005
_ALLOCATOR, _PRODUCTS = "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"
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
    restarts: bool = False  # a child that dies is started again, though it trains nothing: a server


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
        self.ranks = range(spec.ranks)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.failed: list[int] = []  # ranks that have ended in a way that ends all of them
        self.observer = Observer(run, [run.rank_events(rank) for rank in self.ranks], spec.budget)
        self.status = self.observer.status
        self.status.started = self.began
        self.output = Tail(run.output, from_end=True)
        self.sketch = CurveSketch(run) if spec.keeps_report else None
        self.series, self.attempt = RankSeries(run), 1
        self.interrupts, self.signalled = 0, ""
        self.oom_before = procfs.oom_kills()
        self.peak_bytes = 0
        self.error_heard = False
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
    def slot(self) -> Slot | None:
        """Of the first rank."""
        return self.status.slot

    def say(self, text: str, style: str = "", urgent: bool = False) -> None:
        self.console.say(text, style)

    # ---------------------------------------------------------------- start

    def start(self, attempt: int, eager: bool) -> list[Root]:
        """One process for each rank; again from the durable step, without the compiler where that was given up."""
        if self.processes:
            self.oom_before = procfs.oom_kills()
            self.last_status = read_status(self.run)
            self.durable_before = self._durable_on_disk()
            self.request |= {"resume": "auto", "eager": eager, "same_settings": True}
            self.observer.begin_again()
            self.say(f"attempt {attempt}: going on from step {self.durable_before}", "bold")
        prctl.adopt_orphans()
        for stale in self.run.slots.glob("meeting-*"):  # where ranks of an earlier attempt have met
            stale.unlink(missing_ok=True)
        self.failed, self.attempt = [], attempt
        self.processes = [self._spawn_rank(rank, attempt) for rank in self.ranks]
        if self.spec.keeps_report:
            threading.Thread(
                target=self._record_environment, args=(attempt,), name="lamp-environment", daemon=True
            ).start()
        return [Root(process, self.run.slot(rank)) for rank, process in enumerate(self.processes)]

    def _record_environment(self, attempt: int) -> None:
        """Beside the start of the child: git may take a while."""
        from lamplighter.watch import environment

        changed = environment.record(self.run, attempt, Path.cwd())
        if changed and not self.ended:  # the last words of a short run come last
            more = f" and {len(changed) - 8} more, in environment.json" if len(changed) > 8 else ""
            self.say(f"note  changed since the attempt before: {'; '.join(changed[:8])}{more}")

    def _spawn_rank(self, rank: int, attempt: int) -> subprocess.Popen[bytes]:
        spec, fifo = self.spec, self.run.fifo(rank)
        for stale in self.run.slots.glob(f"rank{rank}.*"):  # of an earlier attempt, or no pipe where one is needed
            stale.unlink(missing_ok=True)
        os.mkfifo(fifo, 0o600)
        output = open_lines(self.run.output, mode=0o600)  # whatever it prints is in there
        request = json.dumps(
            {**self.request, "folder": str(self.run.path), "result_fd": spec.result_fd, "lock_fd": spec.lock_fd}
        )
        try:
            return subprocess.Popen(
                # -P: what lies in the current folder (a model folder, say) is not imported in a library's place
                [sys.executable, "-P", "-m", "lamplighter.commands.child_main", spec.verb, request],
                stdin=spec.child_stdin,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=[fd for fd in (spec.lock_fd, spec.result_fd) if fd >= 0],
                env=self._environment(rank, attempt),
            )
        finally:
            os.close(output)

    def _environment(self, rank: int, attempt: int) -> dict[str, str]:
        return {
            **os.environ,
            **threads_wait(os.environ),
            _PRODUCTS: os.environ.get(_PRODUCTS, ":4096:8"),  # read once, before the first product; exact ones need it
            _ALLOCATOR: os.environ.get(_ALLOCATOR, "expandable_segments:True"),  # fewer holes; changes no number
            "PYTHONUNBUFFERED": "1",
            "LAMP_RANK": str(rank),
            "LAMP_WORLD": str(self.spec.ranks),
            "LAMP_ATTEMPT": str(attempt),
            "LAMP_PARENT_PID": str(os.getpid()),
            "LAMP_SPENT_S": str(self.spent_before_s),
            "LAMP_STARTED_MONOTONIC": str(self.began),
        }

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
            slot = read_slot(self.run.slot(rank)) if again else None
            if slot is None or not slot.stopping:
                stacks.send(self.run.slot(rank), f"stop {reason}")
        if not again:
            what = ": saving the last completed step" if self.spec.keeps_report else ""
            self.say(f"stopping ({reason}){what}; Ctrl+C again leaves at once", "bold")

    def ask_save(self) -> int:
        for rank in self.ranks:
            stacks.send(self.run.slot(rank), "save")
        return self.slot.step if self.slot else 0

    def kill(self, snapshot: Snapshot | None) -> None:
        """The ranks and everything that they started (each has a session of its own)."""
        if not self.failed:
            self.failed = [rank for rank in self.ranks if self.processes[rank].poll()]
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # nobody is left in that session
                os.killpg(process.pid, signal.SIGKILL)

    # ---------------------------------------------------------------- what they report

    def hear(self, snapshot: Snapshot, stall: StallDetector) -> Iterator[dict[str, Any]]:
        """Merge the ranks' events, and say what has words."""
        first = snapshot.processes[0]
        self.series.look(snapshot, self.attempt)
        self.peak_bytes = max(self.peak_bytes, first.look.rss_bytes)
        finding = stall.finding
        self.status.stall_words = f"{finding.verdict.state}: {finding.verdict.why}" if finding else ""
        for rank, event in self.observer.look(first.slot, first.look, snapshot.stalled_s, self.spent_s):
            if rank > 0 and event.get("type") not in _OF_EVERY_RANK:
                continue  # all ranks do the same, and the first one speaks; the others' words are in their own files
            self._take_in(event)
            for text, style in tell(event):
                self.say(text, style)
            yield {**event, "rank": rank}
        self.foretold_s = self.status.end_s or self.foretold_s
        if self.sketch is not None:
            self.sketch.look(self.status.floor)
        for record in self.observer.fresh if self.spec.verbose else []:
            self.say(tell_step(record), "dim")
        fresh = self.output.lines()
        for printed in fresh[:_OUTPUT_LINES]:
            self.say(f"  | {clean(printed)}", "dim")
        if len(fresh) > _OUTPUT_LINES:
            self.say(f"  | ... {len(fresh) - _OUTPUT_LINES} more lines in {self.run.output}", "dim")

    def _take_in(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        self.error_heard = self.error_heard or kind == "error"
        if kind == "ended early":
            self.ended_early = {name: event.get(name) for name in ("step", "steps", "since_best", "best_step", "why")}
        elif kind == "verdict" and event.get("cause") == "budget":
            self.stopped_by = event
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
            "spent_s": round(self.spent_s, 2),
            "flags": list(self.status.flags.values()),
            **{name: words for name in ("exact", "path") if (words := getattr(self.status, name))},
            **({"ended_early": self.ended_early} if self.ended_early else {}),
            **({"ranks": list(map(self._rank_fields, self.ranks))} if self.spec.ranks > 1 else {}),
            **self._budget_spent(),
        }

    def _rank_fields(self, rank: int) -> dict[str, Any]:
        """One rank at this moment."""
        slot = read_slot(self.run.slot(rank)) or Slot()
        look = procfs.look(slot.pid) if slot.pid else None
        return {
            "rank": rank,
            "pid": slot.pid,
            "step": slot.step,
            "phase": slot.phase,
            "span": slot.coll if slot.in_coll else slot.span,
            "ram_gb": round(look.rss_bytes / 1e9, 3) if look else 0.0,
        }

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
        passing = code == CRASHED and slot is not None and bool(slot.passing)
        if (
            not (self._lost(code) or passing)
            or not (self.spec.keeps_report or self.spec.restarts)
            or self.interrupts > 1
        ):
            return None
        fault = _fault_of(slot.error) if slot is not None and passing else None
        if slot is not None and fault is not None:
            self.fault = fault
            why = f"at step {step}: {slot.error.replace('error: ', '', 1).splitlines()[0]}"
            culprit = {"pid": slot.pid, "rank": slot.rank if fault.rank is None else fault.rank, "step": step}
            verdict = Verdict("dead", fault.cause, f"{fault.why}; {why}", "", culprit=culprit)
            by_plan = lighter_by_plan(self.run) if fault.cause == "out_of_memory" else ""
            return Death(fault.cause, verdict, compiling=False, advice="; ".join(filter(None, (by_plan, fault.advice))))
        if slot is not None and passing:
            said = slot.error.replace("error: ", "", 1).replace("\nwhy:   ", ", ")
            why = f"the process ended at step {step} by an error that a second try may not meet: {said}"
            verdict = Verdict("dead", "exception", why, "", culprit={"pid": slot.pid, "rank": slot.rank, "step": step})
            return Death(said, verdict, compiling=False)
        compiling = slot is not None and bool(slot.compiling)
        memory = code < 0 and procfs.oom_kills() > self.oom_before
        how = f"killed by {signals.signal_name(-code)}" if code < 0 else f"left with exit code {code}"
        evidence: tuple[str, ...] = (f"its last phase was {slot.phase}",) if slot else ()
        failed = self._rank_that_left(code)
        who = f"rank {failed} (process {self.processes[failed].pid})" if self.spec.ranks > 1 else "the process"
        if code < 0:
            why = f"{who} was {how} (signal {-code}) at step {step}" + (", out of memory" if memory else "")
            evidence = (f"largest seen {self.peak_bytes / 1e9:.2f} GB", f"{procfs.memory_left() / 1e9:.2f} GB free now")
        else:
            why = f"{who} {how} at step {step}, in the middle of its work: {_NO_WORD}"
        cause = "rss_oom" if memory else "killed" if code < 0 else "exit"
        culprit = {"pid": self.processes[failed].pid, "rank": failed, "step": step}
        return Death(how, Verdict("dead", cause, why, "", evidence=evidence, culprit=culprit), compiling)

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
        return self.slot if rank == 0 else read_slot(self.run.slot(rank))

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
            where = f" at step {step}{safe}" if self.spec.keeps_report else ""
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
        step, safe, early = self._standing()[0], self._safe(), self.ended_early
        if code == DONE and early:
            best = f"; use checkpoint-{early['best_step']}" if early["best_step"] else ""
            return f"finished {self.run.name} early, at step {early['step']} of {early['steps']}: {early['why']}{best}"
        where = f"; the traceback is in {self.run.output}" if self.spec.keeps_report else ""
        why = " (the budget is spent)" if self._spent_all else f" ({self.stop_heard})" if self.stop_heard else ""
        words = {
            DONE: f"finished {self.run.name}",
            STOPPED_EARLY: f"stopped early{why} at step {step}{safe}",
            CRASHED: f"the process crashed{where}{safe}",
            FAULTS_FOUND: f"faults were found{safe}",
            RefusedByPlan.code: f"refused by the plan{safe}",
            NoCheckpoint.code: self._no_checkpoint(),
        }
        return words.get(code, f"ended with exit code {code}{safe}")

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

    def close(self, outcome: RunOutcome) -> None:
        """What to run next."""
        if outcome.code != DONE and self.spec.resume_command and outcome.code not in _NOT_BY_RESUMING:
            more = self.spec.budget.enough_for(self.foretold_s or 2 * self.spent_s) if self._spent_all else ""
            self.say(f"next: {with_settings(self.spec.resume_command, more)}", "bold")
            if self.spec.left_out:
                self.say(self.spec.left_out)


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


def threads_wait(environ: Mapping[str, str]) -> dict[str, str]:
    """Threads that wait for each other spin a little and then sleep; who has said otherwise is heard."""
    said = "OMP_WAIT_POLICY" in environ or "GOMP_SPINCOUNT" in environ
    return {} if said else {"GOMP_SPINCOUNT": _SPIN}
