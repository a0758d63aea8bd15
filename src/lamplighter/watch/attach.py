"""`lamp watch -- CMD`: somebody else's command, watched; nothing is changed but what is injected at its start.

In:  the words of a command, a run folder, a policy.
Out: the command's own exit code (70 if we stopped it); status.json, events.jsonl, console.log, report.md in the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lamplighter.config import Budget
from lamplighter.errors import STUCK, BadConfig, InputMissing
from lamplighter.procs import procfs, stacks
from lamplighter.procs.stacks import Stacks
from lamplighter.report import Verdict
from lamplighter.rundir import VERSIONS, LineFile, RunDir, identity, open_lines, read_lines, read_record, write_json
from lamplighter.watch import agent, time_report, tree_diagnosis
from lamplighter.watch.console import CALM_AFTER_S, CALM_EVERY_S, FRAME_EVERY_S, LINE_EVERY_S
from lamplighter.watch.diagnosis import Finding
from lamplighter.watch.notify import Notifier
from lamplighter.watch.process_tree import Process, ProcessTree, Snapshot, read_slots
from lamplighter.watch.progress import Progress
from lamplighter.watch.resources import memory_verdict
from lamplighter.watch.restart_policy import RestartPolicy
from lamplighter.watch.stall import CLOSE_LOOK_S, QUIET_S, TIMES_USUAL, WINDOW_S
from lamplighter.watch.status import clean, duration, tell
from lamplighter.watch.supervisor import LOOK_EVERY_S
from lamplighter.watch.terminal import Terminal

STATUS_EVERY_S = 1.4
MEMORY_EVERY_S = 2.5
STOP_GRACE_S = 10.0
MOST_STACKS = 16
WARM_S = 0.2
UNCOUNTED_S = 8.0  # while nothing was ever counted (imports), what everybody does at the start is status, no verdict
COMMON = ("running", "gc", "io")
STORM, STORM_S = 3, 10.0
LOADING_S = 60.0


@dataclass(frozen=True)
class WatchRequest:
    """What to do, and what to do about it."""

    words: list[str]
    on_stuck: str = "report"  # report, stop, restart
    patience_s: float = 600.0
    notify: str | None = None


class Attendant:
    """One command and all that is known about it."""

    def __init__(self, run: RunDir, wish: WatchRequest) -> None:
        self.run, self.wish = run, wish
        for stale in (*run.slots.glob("p*"), *run.ask.iterdir()):
            stale.unlink(missing_ok=True)
        self.terminal = Terminal.open(run.output)
        self.console = open_lines(run.console)
        self.attempt = 1 + sum(event.get("type") == "start" for event in read_lines(run.events))
        self.events = LineFile(run.events)
        self.notifier = Notifier(wish.notify, run.name, self.say)
        policy = {"report": "report", "stop": "stop", "restart": "recover"}[wish.on_stuck]
        self.recovery = RestartPolicy(policy, wish.patience_s)
        self.began = time.monotonic()
        self.stop_reason, self.stop_at = "", 0.0
        self.planned = self.planned_why = ""
        self.spoke_at = self.footer_at = self.status_at = self.memory_at = 0.0
        self.warned: set[str] = set()
        self._fresh()

    def _fresh(self) -> None:
        """What is known of one attempt."""
        self.window: deque[Snapshot] = deque()
        self.captures: dict[int, tuple[Stacks, ...]] = {}
        self.capturing: threading.Thread | None = None
        self.next_capture_s = 0.0
        self.finding: Finding | None = None
        self.named: set[str] = set()  # in this spell
        self.recompiles: deque[tuple[float, int]] = deque()
        self.died = False
        self.pace = Progress()
        self.deaths = 0
        self.warmed: set[int] = set()
        self.warm_until = 0.0
        self.worked_at = time.monotonic()
        self.usual_gap_s = self.longest_gap_s = 0.0
        self.memory: deque[tuple[float, float]] = deque(maxlen=240)
        self.snapshot: Snapshot | None = None

    # ---------------------------------------------------------------- words

    def say(self, text: str, urgent: bool = False) -> None:
        """Lines of ours that stay: on stderr, and in console.log."""
        stamp = time.strftime("%H:%M:%S")
        lines = [f"lamp {stamp}  {line}" for line in text.splitlines()]
        with contextlib.suppress(OSError):
            os.write(self.console, ("\n".join(lines) + "\n").encode("utf-8", "replace"))
        self.terminal.say("\n".join(lines), urgent)
        self.spoke_at = time.monotonic()

    def event(self, type: str, **fields: Any) -> None:
        self.events.write(json.dumps({"type": type, "t": time.time(), **fields}, default=str))

    def say_verdict(self, verdict: Verdict, **more: Any) -> None:
        event = {"type": "verdict", "t": time.time(), **asdict(verdict), **more}
        self.events.write(json.dumps(event, default=str))
        self.say("\n".join(text for text, _ in tell(event)), urgent=True)
        self.notifier.tell(verdict.state, verdict.why, cause=verdict.cause, action=verdict.action)

    # ---------------------------------------------------------------- life

    def attend(self) -> int:
        """Start the command, stay with it, and return its own code, or 70 if we stopped it."""
        with self.terminal.signals():
            again = self.wish.on_stuck == "restart"
            self.streams = [os.dup(fd) if again else fd for fd in (self.terminal.stdout, self.terminal.stderr)]
            self._spawn()
            while True:
                while self.child.poll() is None:
                    self._guarded(self._round)
                    self._wait()
                self._last_look()
                if self.planned != "restart":
                    break
                self.attempt += 1
                self.planned = self.stop_reason = ""
                self._fresh()
                self.say(f"attempt {self.attempt}: the command is started again; it must resume by itself")
                self._spawn()
            if again:
                for fd in self.streams:
                    os.close(fd)
        return self._close()

    def _spawn(self) -> None:
        environment = agent.environment(self.run.slots, os.environ)
        self.event(
            "start", attempt=self.attempt, began=time.time(), verb="watch", command=self.wish.words, **identity()
        )
        try:
            self.child = subprocess.Popen(
                self.wish.words, stdout=self.streams[0], stderr=self.streams[1], env=environment
            )
        except (FileNotFoundError, NotADirectoryError) as error:
            self.terminal.finish()
            raise InputMissing(
                f"no such command: {self.wish.words[0]}", str(error), "check the words after --"
            ) from error
        except OSError as error:
            self.terminal.finish()
            raise BadConfig(f"cannot start {self.wish.words[0]}", str(error), "is it executable?") from error
        self.terminal.started(self.child.pid)
        self.pidfd = os.pidfd_open(self.child.pid)
        self.family = ProcessTree(self.child.pid, self.run.slots)

    def _wait(self) -> None:
        """Until the next look, or the end of the command; while work is counted half as often is enough."""
        busy = self.snapshot is not None and self.snapshot.quiet_s < LOOK_EVERY_S and self.pace.counts
        select.select([self.pidfd], [], [], 2 * LOOK_EVERY_S if busy else LOOK_EVERY_S)

    def _guarded(self, act: Callable[[], None]) -> None:
        """A fault of ours (a folder that was deleted, a full table of files) must never end the watching: said once."""
        try:
            act()
        except Exception as error:  # noqa: BLE001
            if "fault" not in self.warned:
                self.warned.add("fault")
                self.say(f"a look has failed ({type(error).__name__}: {error}); the command goes on, and so do we")

    def _round(self) -> None:
        """One look: see, judge, speak, write, answer, act."""
        quiet_s = time.monotonic() - self.worked_at
        calm = quiet_s < CLOSE_LOOK_S and self.pace.counts and self.pace.loaders == 0
        self.snapshot = snapshot = self.family.look(quiet_s > CLOSE_LOOK_S, self.terminal.output_bytes(), calm)
        self._learn(snapshot)
        self.pace.look(snapshot)
        self._hear_deaths()
        self._judge(snapshot)
        self._speak(snapshot)
        if time.monotonic() - self.status_at > STATUS_EVERY_S:
            self._write_status("stopping" if self.stop_reason else "running")
        self._watch_memory(snapshot)
        self._watch_compiles(snapshot)
        self._answer_requests()
        self._act()

    def _learn(self, snapshot: Snapshot) -> None:
        """Work was counted: the spell is over, and its length is a fact about this script."""
        if snapshot.worked_at > self.worked_at:
            gap = snapshot.worked_at - self.worked_at
            self.usual_gap_s = max(self.usual_gap_s * 0.98, gap) if self.pace.counts else 0.0
            self.longest_gap_s = max(self.longest_gap_s, gap)
            self.worked_at = snapshot.worked_at
            self.window.clear()
            self.named.clear()
            self.captures, self.finding, self.next_capture_s = {}, None, 0.0
            self.pace.inferred = ""
        if snapshot.quiet_s > CLOSE_LOOK_S and not self._warming(snapshot):
            self.window.append(snapshot)
            while snapshot.at - self.window[0].at > WINDOW_S:
                self.window.popleft()

    def _warming(self, snapshot: Snapshot) -> bool:
        """The first question to a process makes it load what it answers with: asked early, so that no byte of that counts."""
        fresh = [m for m in snapshot.processes if m.slot is not None and not m.slot.answers and not m.look.stopped]
        fresh = [m for m in fresh if m.pid not in self.warmed]
        for process in fresh[:MOST_STACKS]:
            self.warmed.add(process.pid)
            threading.Thread(
                target=stacks.ask, args=(slot_path(self.run.slots, process.pid), WARM_S), name="lamp-warm", daemon=True
            ).start()
            self.warm_until = snapshot.at + 2 * LOOK_EVERY_S
        return snapshot.at < self.warm_until

    def _judge(self, snapshot: Snapshot) -> None:
        halted = [m for m in snapshot.processes if m.look.stopped]
        partly = bool(halted) and len(halted) < len(snapshot.processes)
        open_wait = any(m.slot and m.slot.in_coll for m in snapshot.processes)
        usual = self.usual_gap_s if not open_wait else min(self.usual_gap_s, 1.5)
        if not partly and snapshot.quiet_s < max(QUIET_S, TIMES_USUAL * usual):
            return
        if len(self.window) < 2:
            return
        self._capture_when_due(snapshot)
        if self.captures or partly:
            finding = tree_diagnosis.judge(list(self.window), self.captures, self.usual_gap_s)
            self.finding = finding or self.finding
        if self.finding is not None:
            named = f"{self.finding.key} {self.finding.left_s is not None}"
            new_here = not self.pace.counts and snapshot.quiet_s < UNCOUNTED_S
            if named not in self.named and not (new_here and self.finding.verdict.cause in COMMON):
                self.named.add(named)
                self.say_verdict(self.finding.verdict, provable=self.finding.provable, left_s=self.finding.left_s)

    def _capture_when_due(self, snapshot: Snapshot) -> None:
        """At once, again after a second, then less and less often; in a thread, for py-spy may take its two seconds."""
        if snapshot.quiet_s < self.next_capture_s or (self.capturing is not None and self.capturing.is_alive()):
            return
        first = not self.captures
        self.next_capture_s = snapshot.quiet_s + (1.0 if first else min(30.0, max(2.0, snapshot.quiet_s / 2)))
        self.capturing = threading.Thread(target=self._capture, args=(snapshot,), name="lamp-capture", daemon=True)
        self.capturing.start()

    def _capture(self, snapshot: Snapshot) -> None:
        taken = {pid: found for pid, found in take_all(self.run.slots, snapshot.processes).items() if found.threads}
        if self.worked_at == snapshot.worked_at:
            self.captures = {pid: (*self.captures.get(pid, ())[-1:], one) for pid, one in taken.items()}
            keep(self.run, taken, snapshot)
            main = taken.get(snapshot.processes[0].pid)
            self.pace.inferred = tree_diagnosis.phase_from_stack(main.threads[0]) if main else ""

    def _hear_deaths(self) -> None:
        for lost in sorted(self.family.lost[self.deaths :], key=lambda one: one.code == -signal.SIGTERM):
            self.event("child_end", pid=lost.pid, code=lost.code, rank=lost.slot.rank if lost.slot else -1)
            verdict = tree_diagnosis.death_verdict(lost)
            cleared_away = self.died and lost.code == -signal.SIGTERM  # by the launcher, after the first death
            if verdict is not None and not cleared_away and not self.stop_reason:
                self.died = True
                self.say_verdict(verdict)
        self.deaths = len(self.family.lost)

    def _watch_compiles(self, snapshot: Snapshot) -> None:
        """A storm of recompiles is work of a kind, and is said all the same."""
        process = max(
            (m for m in snapshot.processes if m.slot), key=lambda m: m.slot.recompiles if m.slot else 0, default=None
        )
        if process is None or process.slot is None or "storm" in self.warned:
            return
        self.recompiles.append((snapshot.at, process.slot.recompiles))
        while snapshot.at - self.recompiles[0][0] > STORM_S:
            self.recompiles.popleft()
        count = process.slot.recompiles - self.recompiles[0][1]
        if count >= STORM:
            self.warned.add("storm")
            taken = stacks.ask(slot_path(self.run.slots, process.pid), stacks.SAMPLER_DEADLINE_S)
            frame = stacks.users_frame(taken.threads[0]) if taken and taken.threads else None
            seconds = snapshot.at - self.recompiles[0][0]
            self.say_verdict(tree_diagnosis.storm_verdict(process, count, seconds, frame))

    def _watch_memory(self, snapshot: Snapshot) -> None:
        if time.monotonic() - self.memory_at < MEMORY_EVERY_S:
            return
        self.memory_at = time.monotonic()
        if not self.pace.counts and snapshot.at - self.began < LOADING_S:  # loading grows by right
            return
        self.memory.append((snapshot.at, float(sum(m.look.rss_bytes for m in snapshot.processes))))
        verdict = memory_verdict(list(self.memory), procfs.memory_left())
        if verdict is not None and verdict.cause not in self.warned:
            self.warned.add(verdict.cause)
            self.say_verdict(verdict)

    # ---------------------------------------------------------------- speaking

    def _speak(self, snapshot: Snapshot) -> None:
        """A footer on a terminal; elsewhere a line where the script has been quiet for as long as a person waits."""
        if self.family.without_shim and "shim" not in self.warned:
            self.warned.add("shim")
            pids = ", ".join(map(str, sorted(self.family.without_shim)))
            self.say(
                f"process {pids} is Python, but not instrumented (python -I, or PYTHONPATH replaced): watched from outside"
            )
        now, line = time.monotonic(), self.line(snapshot)
        if self.terminal.is_tty:
            if now - self.footer_at > FRAME_EVERY_S:
                self.terminal.footer(f"lamp  {line}")
                self.footer_at = now
            return
        calm = now - self.began > CALM_AFTER_S and self.finding is None
        if now - self.spoke_at > (CALM_EVERY_S if calm else LINE_EVERY_S):
            self.say(line)

    def line(self, snapshot: Snapshot) -> str:
        """Now, in one line; something in it changes every time."""
        parts = [self.pace.words(snapshot), f"for {duration(snapshot.at - self.began)}"]
        if self.finding is not None and snapshot.quiet_s > QUIET_S:
            parts.append(f"{self.finding.verdict.state}: {clean(self.finding.verdict.why)}")
        elif snapshot.quiet_s > 2 and self.pace.counts:
            parts.append(f"quiet for {duration(snapshot.quiet_s)}")
        if self.stop_reason:
            parts.append(f"stopping for {duration(time.monotonic() - self.stop_at)}")
        return " · ".join(parts)

    # ---------------------------------------------------------------- acting

    def _act(self) -> None:
        """Only by the policy, and only by the rules of what is proved."""
        if self.stop_reason:
            if time.monotonic() - self.stop_at > STOP_GRACE_S:
                self._signal_all(signal.SIGKILL)
            return
        if self.finding is None or self.snapshot is None or self.planned or self.snapshot.quiet_s < QUIET_S:
            return
        finding = replace(self.finding, verdict=replace(self.finding.verdict, since_s=round(self.snapshot.quiet_s, 2)))
        decision = self.recovery.stuck(finding, self.longest_gap_s, self.pace.steps, max(1, self.pace.steps))
        if decision.action not in ("restart", "stop"):
            return
        self.planned, self.planned_why = decision.action, decision.why
        self.say_verdict(replace(finding.verdict, action=decision.action, next=decision.why), provable=finding.provable)
        self.ask_stop(finding.verdict.why)

    def ask_stop(self, reason: str) -> None:
        """TERM to the command; KILL to all of it if that does not end it."""
        if not self.stop_reason:
            self.stop_reason, self.stop_at = reason, time.monotonic()
            self.say(f"the command is asked to end (SIGTERM); in {STOP_GRACE_S:.0f} s it is killed")
            with contextlib.suppress(OSError):
                os.kill(self.child.pid, signal.SIGTERM)

    def _signal_all(self, number: int) -> None:
        for process in reversed(self.snapshot.processes if self.snapshot else ()):
            with contextlib.suppress(OSError):
                os.kill(process.pid, number)

    # ---------------------------------------------------------------- readers

    def _answer_requests(self) -> None:
        names = [name for name in sorted(procfs.listed(str(self.run.ask))) if name.endswith((".why", ".stop", ".save"))]
        for path in (self.run.ask / name for name in names):
            kind, who = path.suffix[1:], read_record(path)
            path.unlink(missing_ok=True)
            target = path.with_suffix(".answer")
            self.event("asked", kind=kind, by=who)
            if kind == "why":
                threading.Thread(target=self._answer_why, args=(target,), name="lamp-why", daemon=True).start()
                continue
            if kind == "stop":
                self.planned = "" if self.planned == "restart" else self.planned
                self.ask_stop(f"lamp stop, by process {who.get('pid', '?')}")
            else:
                self.say("asked to save: this command is not ours, and saves when it does")
            with contextlib.suppress(OSError):  # the asker waits in vain and says so
                write_json(target, {"kind": kind, "step": 0}, durable=False)

    def _answer_why(self, target: Path) -> None:
        snapshot = self.snapshot
        if snapshot is None:
            return
        taken = take_all(self.run.slots, snapshot.processes)
        with contextlib.suppress(OSError):
            write_json(
                target,
                {"kind": "why", "text": explain(self.line(snapshot), snapshot, taken, self.finding)},
                durable=False,
            )

    # ---------------------------------------------------------------- status and end

    def _write_status(self, state: str, **extra: Any) -> None:
        self.status_at = time.monotonic()
        snapshot = self.snapshot
        status = {
            **VERSIONS,
            "state": state,
            "verb": "watch",
            "command": self.wish.words,
            "phase": self.pace.phase,
            "step": self.pace.steps,
            "steps": self.pace.total,
            "eta_s": self.pace.left_s,
            "last_progress_s": round(snapshot.quiet_s, 2) if snapshot else 0.0,
            "spent_s": round(time.monotonic() - self.began, 2),
            "durable_step": 0,
            "attempt": self.attempt,
            "now": self.line(snapshot) if snapshot else "starting",
            "t": time.time(),
            **identity(),
            "child_pid": self.child.pid,
            **extra,
        }
        with contextlib.suppress(OSError):  # a full disk must not end the watching
            write_json(self.run.status, status, durable=False)

    def _last_look(self) -> None:
        """The command has ended: its last counters, and whoever died with it."""
        with contextlib.suppress(OSError):
            self.family.look(closely=False)
            self._hear_deaths()
            self._say_error()
        if self.stop_reason:
            self.family.end_survivors()
        self.event("child_end", pid=self.child.pid, code=self.child.returncode, attempt=self.attempt)
        self.family.close()
        os.close(self.pidfd)

    def _say_error(self) -> None:
        """An uncaught exception, in the words of the process that had it."""
        slots = read_slots(self.run.slots)
        failed = [slot for slot in slots.values() if slot.error]
        if self.child.returncode == 0 or self.stop_reason or not failed or self.died:
            return
        first = next((slot for slot in failed if slot.worker >= 0), min(failed, key=lambda slot: slot.pid))
        self.say_verdict(tree_diagnosis.error_verdict(first, slots))

    def _close(self) -> int:
        code = self.child.returncode
        spent = duration(time.monotonic() - self.began)
        if self.planned == "stop":
            outcome, state, result = f"stuck, and stopped: {self.planned_why}", "stuck", STUCK
        elif code < 0:
            memory = ", out of memory" if procfs.oom_kills() > self.family.oom else ""
            outcome = f"the command was killed by {_signal_name(-code)} (signal {-code}{memory}) after {spent}"
            state, result = "lost", code
        else:
            outcome = f"the command ended with exit code {code} after {spent}"
            state, result = ("finished" if code == 0 else "failed"), code
        if self.stop_reason and self.planned != "stop":
            outcome, state = f"{outcome}; asked to stop ({self.stop_reason})", "stopped"
        self._guarded(lambda: self._keep_books(state, result, outcome))
        self.notifier.tell(state, outcome, code=result)
        self.notifier.close()
        self.terminal.finish()
        return result

    def _keep_books(self, state: str, result: int, outcome: str) -> None:
        """The last status, the last event, report.md, and what to run next."""
        self.event("stop", code=result, state=state, outcome=outcome)
        self._write_status(state, exit_code=result, outcome=outcome)
        books = time_report.TimeReport(time.monotonic() - self.began, self.pace.seconds, self.attempt)
        facts = {"command": " ".join(self.wish.words), "steps": self.pace.steps, "attempts": self.attempt}
        with contextlib.suppress(OSError):  # a full disk
            time_report.write_report(self.run, books, Budget(), outcome, {**facts, **self.pace.facts()})
        self.say(
            f"{outcome}; {self.pace.summary()}\nmade: {self.run.report}; next: lamp runs, or: less {self.run.console}"
        )


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in signal.Signals.__members__.values() else "a real-time signal"


# ---------------------------------------------------------------- stacks of a family


def take_all(slots: Path, processes: tuple[Process, ...]) -> dict[int, Stacks]:
    """Every Python process: its own word, else py-spy with a deadline."""
    found = {}
    for process in [m for m in processes if m.slot is not None or procfs.is_python(m.pid)][:MOST_STACKS]:
        taken = stacks.take(slot_path(slots, process.pid), process.pid, ours=False)
        if taken is not None:
            found[process.pid] = taken
    return found


def slot_path(slots: Path, pid: int) -> Path:
    return slots / f"p{pid}.slot"


def explain(line: str, snapshot: Snapshot, taken: dict[int, Stacks], finding: Finding | None) -> str:
    """For lamp why: the line of now, the verdict, then every process with its stacks."""
    lines = [line]
    if finding is not None:
        lines += [f"{finding.verdict.state}: {finding.verdict.why}", f"next: {finding.verdict.next}"]
    for process in snapshot.processes:
        memory = f"{process.look.rss_bytes / 1e9:.2f} GB"
        lines.append(f"\n{process.words}: {process.look.words}, {process.look.threads} threads, {memory}")
        if process.pid in taken:
            lines.append(f"stacks (by {taken[process.pid].source}):\n\n{taken[process.pid].text()}")
        elif process.slot is not None or procfs.is_python(process.pid):
            lines.append("stacks: could not be read (it is gone, or may not be traced)")
    return "\n".join(lines)


def keep(run: RunDir, taken: dict[int, Stacks], snapshot: Snapshot) -> None:
    """One text file per capture."""
    path = run.stacks / (time.strftime("%Y%m%d-%H%M%S") + f"-{time.monotonic_ns() % 1000:03}.txt")
    with contextlib.suppress(OSError):  # a full disk: the sentence is still said
        path.write_text(explain(f"quiet for {snapshot.quiet_s:.1f} s", snapshot, taken, None))
