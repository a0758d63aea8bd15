"""Owning a child: start it, look at it four times a second, speak, answer requests, stop it, and say how it ended.

In:  a run folder, the verb and its request, a console.
Out: the exit code; status.json, events.jsonl, console.log and report.md in the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lamplighter.config import Budget
from lamplighter.errors import (
    CHILD_LOST,
    CRASHED,
    DONE,
    FAULTS_FOUND,
    LEFT_AT_ONCE,
    STOPPED_EARLY,
    STUCK,
    CannotWrite,
    RefusedByPlan,
)
from lamplighter.procs import prctl, procfs, stacks
from lamplighter.report import Verdict
from lamplighter.rundir import (
    VERSIONS,
    LineFile,
    RunDir,
    cannot_write,
    free_bytes,
    identity,
    number,
    open_lines,
    read_lines,
    read_record,
    write_json,
)
from lamplighter.slot import read_slot
from lamplighter.watch import redflags, spawn, time_report
from lamplighter.watch.console import Console
from lamplighter.watch.notify import Notifier
from lamplighter.watch.observe import Observer, Tail
from lamplighter.watch.resources import disk_verdict, memory_verdict
from lamplighter.watch.restart_policy import RestartPolicy
from lamplighter.watch.stall import keep
from lamplighter.watch.status import clean, duration, line, tell, tell_step

LOOK_EVERY_S = 0.25
RESOURCES_EVERY_S = 2.5
STATUS_EVERY_S = 0.9
OUTPUT_LINES = 40
BUDGET_BACKSTOP_S = 5.0
NO_WORD = "it did not say that it was done; your code or a library may have called os._exit"
OUTCOMES = {
    DONE: "finished",
    STUCK: "stuck",
    STOPPED_EARLY: "stopped",
    CHILD_LOST: "lost",
    76: "diverged",
    LEFT_AT_ONCE: "stopped",
}


@dataclass
class ChildSpec:
    """What the child shall do, and under which conditions."""

    verb: str
    request: dict[str, Any]
    resume_command: str = ""
    budget: Budget = field(default_factory=Budget)
    recovery: RestartPolicy = field(default_factory=lambda: RestartPolicy("report"))
    notify: str | None = None
    grace_s: float = 30.0
    began: float = field(default_factory=time.time)
    lock_fd: int = -1
    verbose: bool = False
    keeps_books: bool = True  # a training run has a ledger; `generate` has not
    result_fd: int = -1
    child_stdin: int = subprocess.DEVNULL


class Supervisor:
    """One child and all that is known about it."""

    def __init__(self, run: RunDir, order: ChildSpec, console: Console) -> None:
        self.run, self.order, self.console = run, order, console
        self.began = time.monotonic() - max(0.0, time.time() - order.began)
        self.attempt = 1 + sum(event.get("type") == "start" for event in read_lines(run.events))
        self.last_status = read_record(run.status)
        self.durable_before = int(number(read_record(run.checkpoints / "latest.json").get("step")))
        for stale in run.ask.iterdir():  # requests to an attempt that is over
            stale.unlink(missing_ok=True)
        self.spent_before_s = number(read_record(run.status).get("spent_s"))
        self.events = LineFile(run.events)
        self.observer = Observer(run, run.rank_events(0), order.budget, fresh=True)
        self.observer.picture.started = self.began
        self.output = Tail(run.output, from_end=True)
        self.child: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.stop_reason = ""
        self.stop_at = 0.0
        self.interrupts = 0
        self.signalled = ""
        self.quiet_named = ""
        self.wake = -1
        self.killed_by_us = False
        self.leave_now = False
        self.status_at = 0.0
        self.oom_before = procfs.oom_kills()
        self.error_told = False
        self.error_heard = False
        self.notifier = Notifier(order.notify, run.name, lambda text: console.say(text, "bold yellow"))
        self.memory: deque[tuple[float, float]] = deque(maxlen=240)
        self.resources_at = time.monotonic()
        self.checkpoint_bytes = 0
        self.warned: set[str] = set()
        self.planned = self.planned_why = ""  # restart or stop, decided by us
        self.peak_bytes = 0
        self.ended_early: dict[str, Any] = {}

    @property
    def spent_s(self) -> float:
        return self.spent_before_s + time.monotonic() - self.began

    def event(self, type: str, **fields: Any) -> None:
        """A line of the parent's own in events.jsonl; a full disk is said by the console, once, through status."""
        self._write_event({"type": type, "t": time.time(), **fields})

    def _write_event(self, record: dict[str, Any]) -> None:
        if not self.events.write(json.dumps(record)) and not self.error_told:
            self.error_told = True
            self.console.say(f"WARNING  {self.run.events} cannot be written; is the disk full?", "bold yellow")

    # ---------------------------------------------------------------- life

    def supervise(self) -> int:
        """Start the child, stay with it, and return the exit code."""
        self.event("start", attempt=self.attempt, began=self.order.began, verb=self.order.verb, **identity())
        with self._signals():
            while True:
                self._spawn()
                while not self._ended():
                    self._look()
                if not self._goes_on():
                    return self._close()
                self._begin_again()

    def _goes_on(self) -> bool:
        """The child has ended: was it a restart of ours, or a death that another attempt may outlive?"""
        assert self.child is not None
        self._hear()
        code = self.child.returncode
        if self.stop_reason or self.leave_now or self.planned == "stop":
            return False
        if self.planned in ("restart", "fallback"):
            return True
        if not self._lost(code) or not self.order.keeps_books:
            return False
        step, durable = self._where_it_stands()
        slot = self.observer.picture.slot
        compiling = slot is not None and bool(slot.compiling)
        memory = code < 0 and procfs.oom_kills() > self.oom_before
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        decision = self.order.recovery.dead(how, step, durable, compiling)
        evidence: tuple[str, ...] = (f"its last phase was {slot.phase}",) if slot else ()
        if code < 0:
            why = f"the process was {how} (signal {-code}) at step {step}" + (", out of memory" if memory else "")
            evidence = (f"largest seen {self.peak_bytes / 1e9:.2f} GB", f"{procfs.memory_left() / 1e9:.2f} GB free now")
        else:
            why = f"the process {how} at step {step}, in the middle of its work: {NO_WORD}"
        advice = decision.why or "run the same command again"
        cause = "rss_oom" if memory else "killed" if code < 0 else "exit"
        self._say_verdict(
            Verdict(
                "dead", cause, why, advice, decision.action, evidence, {"pid": self.child.pid, "rank": 0, "step": step}
            )
        )
        return decision.action in ("restart", "fallback")

    def _lost(self, code: int) -> bool:
        """Whether the child is gone without having ended: killed, or left with a code that is not its own last word.

        Success is proved: `done` needs the child's word and the last step (or an early end that it told), `stopped early`
        needs its word, which follows the save. A crash and a disk that cannot be written need no proof.
        """
        if code in (CRASHED, CannotWrite.code):
            return False
        slot = self.observer.picture.slot
        if code < 0 or slot is None or not slot.closed_with(code):
            return True
        if code == DONE and self.order.keeps_books:
            return not (self.ended_early or slot.step >= slot.steps > 0)
        return False

    def _begin_again(self) -> None:
        """The next attempt, from the durable step."""
        assert self.child is not None
        self._kill_all()
        self.event("child_end", code=self.child.returncode, attempt=self.attempt)
        os.close(self.pidfd)
        self.attempt += 1
        self.planned = ""
        self.oom_before = procfs.oom_kills()
        self.last_status = read_record(self.run.status)
        self.durable_before = int(number(read_record(self.run.checkpoints / "latest.json").get("step")))
        self.order.request["resume"] = "auto"
        self.order.request["eager"] = self.order.recovery.eager
        self.observer.begin_again()
        self.memory.clear()
        self.warned.clear()
        self.console.say(f"attempt {self.attempt}: going on from step {self.durable_before}", "bold")
        self.event("start", attempt=self.attempt, began=time.time(), verb=self.order.verb, **identity())

    def _say_verdict(self, verdict: Verdict, **more: Any) -> None:
        event = {"type": "verdict", "t": time.time(), **asdict(verdict), **more}
        self._write_event(event)
        for text, style in tell(event):
            self.console.say(text, style)
        self.notifier.tell(verdict.state, verdict.why, cause=verdict.cause, action=verdict.action)

    def _watch_resources(self) -> None:
        """Every few seconds: does memory or disk run out? Each is said once per attempt."""
        now, process = time.monotonic(), self.observer.picture.process
        slot = self.observer.picture.slot
        if slot is None or not slot.phase.startswith("train"):  # loading grows by right
            self.memory.clear()
        if now - self.resources_at < RESOURCES_EVERY_S or process is None:
            return
        self.resources_at = now
        self.memory.append((now, float(process.rss_bytes)))
        found = [
            memory_verdict(list(self.memory), procfs.memory_left()),
            disk_verdict(free_bytes(self.run.path), self.checkpoint_bytes),
        ]
        for verdict in found:
            if verdict is not None and verdict.cause not in self.warned:
                self.warned.add(verdict.cause)
                self._say_verdict(verdict)

    def _spawn(self) -> None:
        prctl.adopt_orphans()
        fifo = self.run.fifo(0)
        if not fifo.exists():
            os.mkfifo(fifo, 0o600)
        self.run.slot(0).unlink(missing_ok=True)
        output = open_lines(self.run.output)
        request = json.dumps({**self.order.request, "folder": str(self.run.path), "result_fd": self.order.result_fd})
        self.child = subprocess.Popen(
            # -P: what lies in the current folder (a model folder, say) is not imported in a library's place
            [sys.executable, "-P", "-m", "lamplighter.commands.child", self.order.verb, request],
            stdin=self.order.child_stdin,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=[fd for fd in (self.order.lock_fd, self.order.result_fd) if fd >= 0],
            env=spawn.environment(self.attempt, self.spent_before_s, self.began),
        )
        os.close(output)
        self.observer.started(self.child.pid)
        self.pidfd = os.pidfd_open(self.child.pid) if hasattr(os, "pidfd_open") else -1

    def _ended(self) -> bool:
        assert self.child is not None
        ready, _, _ = select.select([fd for fd in (self.pidfd, self.wake) if fd >= 0], [], [], LOOK_EVERY_S)
        if self.wake in ready:
            os.read(self.wake, 64)
        if self.signalled:
            self.ask_stop(self.signalled)
        return self.child.poll() is not None

    def _look(self) -> None:
        """One round: see, speak, write the status, answer, and push on a stop that takes too long."""
        self._hear()
        picture = self.observer.picture
        picture.stopping = self._stopping_words()
        self.console.show(picture)
        if time.monotonic() - self.status_at > STATUS_EVERY_S:
            self._write_status("stopping" if self.stop_reason else "running")
        self._answer_requests()
        self._act_on_finding()
        self._watch_resources()
        if picture.process is not None:
            self.peak_bytes = max(self.peak_bytes, picture.process.rss_bytes)
        if self.order.budget.left_s(self.spent_s) < -BUDGET_BACKSTOP_S and not self.stop_reason:
            self.ask_stop("the budget is spent")
        self._enforce_stop()

    def _hear(self) -> None:
        """Merge the child's events into events.jsonl, and say what has words."""
        for event in self.observer.look(self.spent_s):
            self._write_event({**event, "rank": 0})
            self.error_heard = self.error_heard or event.get("type") == "error"
            if event.get("type") == "checkpoint":
                self.checkpoint_bytes = event.get("bytes", 0)
            if event.get("type") == "ended early":
                self.ended_early = {
                    name: event.get(name) for name in ("step", "steps", "since_best", "best_step", "why")
                }
            if event.get("type") == "verdict" and not event.get("said"):
                kind = "budget" if event.get("cause") == "budget" else event.get("state", "")
                self.notifier.tell(kind, event.get("why", ""), cause=event.get("cause"))
            for text, style in tell(event):
                self.console.say(text, style)
        for record in self.observer.fresh if self.order.verbose else []:
            self.console.say(tell_step(record), "dim")
        self._name_quiet()
        fresh = self.output.lines()
        for printed in fresh[:OUTPUT_LINES]:
            self.console.say(f"  | {clean(printed)}", "dim")
        if len(fresh) > OUTPUT_LINES:
            self.console.say(f"  | ... {len(fresh) - OUTPUT_LINES} more lines in {self.run.output}", "dim")

    def _name_quiet(self) -> None:
        """Once per quiet spell and cause: a line that stays and an event."""
        finding = self.observer.quiet.finding if not self.planned else None
        named = f"{finding.key} {finding.left_s is not None}" if finding else ""
        if finding is not None and named != self.quiet_named:
            kept = self.observer.quiet.keep_evidence(finding)
            self._say_verdict(finding.verdict, provable=finding.provable, left_s=finding.left_s, kept=kept)
        self.quiet_named = named

    def _act_on_finding(self) -> None:
        """Recover or stop, if the rules say so; the saver thread is asked first, so that nothing done is redone."""
        finding, slot = self.observer.quiet.finding, self.observer.picture.slot
        if finding is None or slot is None or self.planned or self.stop_reason:
            return
        step, durable = self._where_it_stands()
        longest_s = self.observer.quiet.longest_gap_s.get(slot.phase, 0.0)
        decision = self.order.recovery.stuck(finding, longest_s, step, durable)
        if decision.action == "none":
            return
        saved = self._ask_save(step)
        self._say_verdict(
            replace(finding.verdict, action=decision.action, next=decision.why), provable=finding.provable
        )
        self.console.say(f"step {saved} is safe; the process is killed ({decision.action})", "bold")
        self.planned, self.planned_why = decision.action, f"{finding.verdict.why}; {decision.why}"
        self._kill_all()

    def _ask_save(self, step: int, deadline_s: float = 2.0) -> int:
        """Ask the saver thread, which works even while the main thread is stuck; the step that is safe then."""
        stacks.send(self.run.slot(0), "save")
        deadline = time.monotonic() + deadline_s
        durable = 0
        while time.monotonic() < deadline and durable < step:
            time.sleep(0.05)
            seen = read_slot(self.run.slot(0))
            durable = seen.durable_step if seen else durable
        return durable

    # ---------------------------------------------------------------- stopping

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl+C, TERM and HUP (unless ignored, as under nohup) ask for a stop; a second Ctrl+C leaves at once."""
        caught = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            caught.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in caught}
        self.wake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        """Only notes it: the loop, woken at once, does the rest (a handler must not take locks)."""
        self.interrupts += number == signal.SIGINT
        self.leave_now = self.interrupts > 1
        self.signalled = self.signalled or ("Ctrl+C" if number == signal.SIGINT else signal.Signals(number).name)

    def ask_stop(self, reason: str) -> None:
        """Tell the child to save the last completed step and leave."""
        if self.stop_reason:
            return
        self.stop_reason, self.stop_at = reason, time.monotonic()
        stacks.send(self.run.slot(0), f"stop {reason}")
        self.console.say(f"stopping ({reason}): saving the last completed step; Ctrl+C again leaves at once", "bold")

    def _stopping_words(self) -> str:
        if not self.stop_reason:
            return ""
        return f"stopping for {duration(time.monotonic() - self.stop_at)}, at most {self.order.grace_s:.0f} s"

    def _enforce_stop(self) -> None:
        if not self.stop_reason or self.killed_by_us:
            return
        waited = time.monotonic() - self.stop_at
        slot = self.observer.picture.slot
        if slot is None or not slot.stopping:  # it had not opened its FIFO yet when it was asked
            stacks.send(self.run.slot(0), f"stop {self.stop_reason}")
        if self.leave_now or (waited > self.order.grace_s and not (slot and slot.saving and self._can_save())):
            _, durable = self._where_it_stands()
            why = "left at once" if self.leave_now else f"no answer in {waited:.0f} s"
            self.console.say(f"{why}: the process is killed; step {durable} is safe", "bold")
            self.killed_by_us = True
            self._kill_all()

    def _can_save(self) -> bool:
        """Not while C code holds the GIL: two samples in a row went unanswered."""
        silent = [taken.sampler_silent for taken in self.observer.quiet.captures]
        return len(silent) < 2 or not all(silent)

    def _kill_all(self) -> None:
        """The child and everything that it started (it has a session of its own)."""
        if self.child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)

    # ---------------------------------------------------------------- requests of readers

    def _answer_requests(self) -> None:
        for path in (
            sorted(self.run.ask.glob("*.why"))
            + sorted(self.run.ask.glob("*.stop"))
            + sorted(self.run.ask.glob("*.save"))
        ):
            kind = path.suffix[1:]
            who = read_record(path)
            path.unlink(missing_ok=True)
            answer: dict[str, Any] = {"kind": kind}
            self.event("asked", kind=kind, by=who)
            if kind == "why":
                target = path.with_suffix(".answer")
                threading.Thread(target=self._answer_why, args=(target,), name="lamp-why", daemon=True).start()
                continue
            if kind == "stop":
                self.ask_stop(f"lamp stop, by process {who.get('pid', '?')} on {who.get('host', '?')}")
            else:
                slot = self.observer.picture.slot
                answer["step"] = slot.step if slot else 0
                answer["asked"] = stacks.send(self.run.slot(0), "save")
            self._answer(path.with_suffix(".answer"), answer)

    def _answer_why(self, target: Path) -> None:
        self._answer(target, {"kind": "why", "text": self.explain()})

    def _answer(self, target: Path, answer: dict[str, Any]) -> None:
        try:
            write_json(target, answer, durable=False)
        except OSError as error:  # a full disk: the asker waits in vain and says so; the run goes on
            self.console.say(f"WARNING  a request could not be answered: {error.strerror}", "bold yellow")

    def explain(self) -> str:
        """Phase path, process state, stacks of every thread."""
        picture = self.observer.picture
        slot, process = picture.slot, picture.process
        lines = [line(picture)]
        if slot is None or process is None:
            return lines[0] + "\nthe process has not reported yet"
        inside = f" > {slot.span}" if slot.span else ""
        lines.append(f"phase: {slot.phase}{inside}; last unit of work {duration(picture.quiet_s)} ago")
        lines.append(
            f"process {process.pid}: {process.words}, {process.threads} threads, {process.rss_bytes / 1e9:.2f} GB"
        )
        lines += redflags.tell(picture.flags)
        taken = stacks.take(self.run.slot(0), slot.pid, ours=True)
        if taken is None:
            lines.append("stacks: could not be read (the process is gone, stopped, or may not be traced)")
        else:
            kept = keep(self.run, taken, slot)
            lines += [f"stacks (by {taken.source}; kept in {kept}):", "", taken.text()]
        return "\n".join(lines)

    # ---------------------------------------------------------------- status and end

    def _write_status(self, state: str, **extra: Any) -> None:
        self.status_at = time.monotonic()
        picture = self.observer.picture
        slot = picture.slot
        step, durable = self._where_it_stands()
        before = self.last_status
        told = slot is not None and slot.steps > 0
        status = {
            **VERSIONS,
            "state": state,
            "verb": self.order.verb,
            "phase": slot.phase if slot else "start",
            "step": step,
            "steps": slot.steps if slot and told else before.get("steps", 0),
            "tokens": slot.tokens if slot and told else before.get("tokens", 0),
            "tokens_per_s": round(slot.tokens_per_s, 1) if slot else 0.0,
            "loss": slot.loss if slot and slot.loss == slot.loss else None,
            "val_loss": picture.val_loss,
            "eta_s": round(picture.eta_s, 1) if picture.eta_s is not None and state == "running" else None,
            "usd": round(self.order.budget.spent_usd(self.spent_s), 6),
            "durable_step": durable,
            "last_progress_s": round(picture.quiet_s, 2),
            "spent_s": round(self.spent_s, 2),
            "attempt": self.attempt,
            "now": line(picture),
            "flags": list(picture.flags.values()),
            **({"ended_early": self.ended_early} if self.ended_early else {}),
            "t": time.time(),
            **identity(),
            "child_pid": self.child.pid if self.child else None,
            **extra,
        }
        try:
            write_json(self.run.status, status, durable=False)
        except OSError as error:
            if not self.error_told:
                self.error_told = True
                self.console.say(f"WARNING  {self.run.status} cannot be written: {error.strerror}", "bold yellow")

    def _where_it_stands(self) -> tuple[int, int]:
        """(last step, durable step): the child's own word, or what is on disk until it has spoken."""
        slot = self.observer.picture.slot
        if slot is not None and slot.steps > 0:
            return slot.step, slot.durable_step
        return max(self.durable_before, int(number(self.last_status.get("step")))), self.durable_before

    def _close(self) -> int:
        """The last words of the child, then ours."""
        assert self.child is not None
        child_code = self.child.returncode
        self._kill_all()
        self._hear()
        slot = self.observer.picture.slot
        if slot is not None and slot.error and not self.error_heard:
            for told in slot.error.splitlines():  # the event was lost: a full disk
                self.console.say(told, "bold red")
        self.event("child_end", code=child_code, attempt=self.attempt)
        code, outcome = self._judge(child_code)
        state = OUTCOMES.get(code, "failed")
        self._write_status(state, exit_code=code, outcome=outcome)
        self.event("stop", code=code, state=state, outcome=outcome, reason=self.stop_reason)
        if self.order.keeps_books:
            self._keep_books(outcome)
        style = "bold green" if code == DONE else "bold yellow" if code == STOPPED_EARLY else "bold red"
        if code != DONE or self.order.keeps_books:
            self.console.say(outcome, style)
        self.notifier.tell(state, outcome, code=code)
        self.notifier.close()
        if code != DONE and self.order.resume_command and code not in (65, 66, 77, 78):
            self.console.say(f"next: {self.order.resume_command}", "bold")
        return code

    def _judge(self, child_code: int) -> tuple[int, str]:
        """The exit code of the command, and the sentence for it."""
        step, durable = self._where_it_stands()
        safe = (
            f"step {durable} is safe"
            if durable
            else "no step had been made"
            if not step
            else "no checkpoint was made yet"
        )
        if not self.order.keeps_books:
            safe = "nothing was changed"
        if self.planned == "stop":
            return STUCK, f"stuck, and stopped: {self.planned_why}; {safe}"
        if self.leave_now and self.killed_by_us:
            return LEFT_AT_ONCE, f"left at once (second Ctrl+C); {safe}"
        lost = self._lost(child_code)
        if self.stop_reason and child_code == DONE and not lost:
            return DONE, f"finished {self.run.name} before the stop took effect"
        nothing_lost = self.killed_by_us or not self.order.keeps_books or durable >= step
        killed = child_code in (-signal.SIGKILL, -signal.SIGTERM) and nothing_lost
        if self.stop_reason and (killed or (child_code == STOPPED_EARLY and not lost)):
            return STOPPED_EARLY, f"stopped early ({self.stop_reason}) at step {step}; {safe}"
        if child_code < 0:
            name = signal.Signals(-child_code).name
            memory = "; the kernel killed a process for memory" if procfs.oom_kills() > self.oom_before else ""
            return CHILD_LOST, f"the process was killed by {name} (signal {-child_code}){memory}; {safe}"
        if lost:
            return CHILD_LOST, f"the process left with exit code {child_code} in the middle: {NO_WORD}; {safe}"
        if child_code == STOPPED_EARLY:
            return STOPPED_EARLY, f"stopped early at step {step}; {safe}"
        if child_code == CRASHED:
            where = f"; the traceback is in {self.run.output}" if self.order.keeps_books else ""
            return CRASHED, f"the process crashed{where}; {safe}"
        if child_code == DONE and self.ended_early:
            early = self.ended_early
            best = f"; use checkpoint-{early['best_step']}" if early["best_step"] else ""
            return (
                DONE,
                f"finished {self.run.name} early, at step {early['step']} of {early['steps']}: {early['why']}{best}",
            )
        if child_code == DONE:
            return DONE, f"finished {self.run.name}"
        if child_code == FAULTS_FOUND:
            return FAULTS_FOUND, f"faults were found; {safe}"
        if child_code == RefusedByPlan.code:
            return child_code, f"refused by the plan; {safe}"
        return child_code, f"ended with exit code {child_code}; {safe}"

    def _keep_books(self, outcome: str) -> None:
        books = time_report.read_time_report(self.run)
        picture = self.observer.picture
        slot = picture.slot
        facts: dict[str, Any] = {"steps": f"{slot.step} of {slot.steps}" if slot else "0", "attempts": books.attempts}
        if slot and slot.loss == slot.loss:
            facts["last training loss"] = f"{slot.loss:.4f}"
        if picture.val_loss is not None:
            facts["validation loss"] = f"{picture.val_loss:.4f} (step {picture.val_step})"
        if self.order.budget.usd_per_hour is not None:
            facts["spent"] = f"${self.order.budget.spent_usd(self.spent_s):.4f}"
        if picture.flags:
            facts["red flags at the end"] = ", ".join(picture.flags)
            self.console.say(
                f"red flags at the end: {', '.join(picture.flags)} (numbers in {self.run.report})", "bold yellow"
            )
        for text in time_report.lines(books, self.order.budget):
            self.console.say(f"   {text}", "dim")
        try:
            time_report.write_report(self.run, books, self.order.budget, outcome, facts)
        except OSError as error:
            self.console.say(f"WARNING  {self.run.report} cannot be written: {error.strerror}", "bold yellow")


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
                return read_record(answer)
            time.sleep(0.03)
        return None
    finally:  # also when the asker is interrupted: a request must not outlive it
        request.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
