"""Somebody else's command as a target of the supervisor: nothing is changed but the agent that is injected at its start.

In:  the words of a command, a run folder.
Out: the command with its own output, signals and exit code; what its processes count, how fast, what is left, and where
     the time went, in words.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lamplighter.config import Budget
from lamplighter.errors import STUCK, BadConfig, InputMissing
from lamplighter.procs import procfs
from lamplighter.procs.signals import signal_name
from lamplighter.rundir import LineFile, RunDir
from lamplighter.safe_text import clean, mask, safe
from lamplighter.watch import agent, time_report
from lamplighter.watch.console import CALM_AFTER_S, CALM_EVERY_S, FRAME_EVERY_S, LINE_EVERY_S
from lamplighter.watch.curves import CurveSketch
from lamplighter.watch.diagnosis import Diagnosis
from lamplighter.watch.evidence import BUSY
from lamplighter.watch.process_tree import Process, Snapshot, counts
from lamplighter.watch.rank_series import RankSeries
from lamplighter.watch.stall import STALL_S, StallDetector
from lamplighter.watch.status import Rate, amount, duration
from lamplighter.watch.supervisor import Death, Ending, Root, RunOutcome, TargetFacts, TargetState
from lamplighter.watch.terminal import Terminal

_GRACE_S = 10.0
_LOADING_S = 60.0
_LEDGER_EVERY_S = 5.0
_HELLO_S = 1.5  # a Python that has not opened its slot by then has no agent
POLICIES = {"report": "report", "stop": "stop", "restart": "recover"}  # --on-stuck -> watch.on_stuck


class WatchedCommand:
    """One command, the terminal that it writes to, and how far it has come."""

    goes_on_with = grows = False  # somebody else's processes start and end by themselves

    def __init__(self, run: RunDir, words: list[str], again: bool) -> None:
        """`again`: it may be started more than once, so its side of the terminal stays open."""
        self.run, self.words = run, words
        self.facts = TargetFacts("watch", False, _GRACE_S, command=tuple(words))
        for stale in run.slots.glob("p*"):
            stale.unlink(missing_ok=True)
        self.terminal = Terminal.open(run.output)
        self.log = LineFile(run.console)
        self.metrics = LineFile(run.metrics)
        self.ranks = RankSeries(run)
        self.sketch = CurveSketch(run)
        self.changed = ""  # since the attempt before, in words
        self.recorded_step, self.recorded_at, self.attempt = 0, 0.0, 1
        self.ledger_at = time.monotonic()
        self.streams = [os.dup(fd) if again else fd for fd in (self.terminal.stdout, self.terminal.stderr)]
        self.again = again
        self.began = time.monotonic()
        self.child: subprocess.Popen[bytes] | None = None
        self.progress = _ScriptProgress()
        self.snapshot: Snapshot | None = None
        self.finding: Diagnosis | None = None
        self.oom_before = procfs.oom_kills()
        self.without_agent: dict[int, float] = {}
        self.said_without = False
        self.spoke_at = self.footer_at = 0.0
        self.stopping_s: float | None = None

    def say(self, text: str, style: str = "", urgent: bool = False) -> None:
        """Lines of ours that stay: on stderr, and in console.log."""
        stamp = time.strftime("%H:%M:%S")
        lines = "\n".join(f"lamp {stamp}  {line}" for line in safe(text).splitlines())
        self.log.write(lines)
        self.terminal.say(lines, urgent)
        self.spoke_at = time.monotonic()

    # ---------------------------------------------------------------- start and stop

    def signals(self) -> AbstractContextManager[None]:
        return self.terminal.signals()

    def start(self, attempt: int, eager: bool) -> list[Root]:
        self.attempt, self.recorded_step = attempt, 0
        if self.child is not None:
            self.progress, self.snapshot, self.finding = _ScriptProgress(), None, None
            self.say(f"attempt {attempt}: the command is started again; it must resume by itself")
        environment = agent.environment(self.run.slots, os.environ)
        try:
            self.child = subprocess.Popen(self.words, stdout=self.streams[0], stderr=self.streams[1], env=environment)
        except (FileNotFoundError, NotADirectoryError) as error:
            self.terminal.finish()
            raise InputMissing(f"no such command: {self.words[0]}", str(error), "check the words after --") from error
        except OSError as error:
            self.terminal.finish()
            raise BadConfig(f"cannot start {self.words[0]}", str(error), "is it executable?") from error
        self.terminal.started(self.child.pid)
        threading.Thread(target=self._record_environment, args=(attempt,), name="lamp-environment", daemon=True).start()
        return [Root(self.child)]

    def _record_environment(self, attempt: int) -> None:
        """Beside its start: git may take a while."""
        from lamplighter.watch import environment

        if changed := environment.record(self.run, attempt, Path.cwd(), self.words):
            self.changed = environment.told_changes(changed)

    def ask_stop(self, reason: str, again: bool) -> None:
        """TERM to the command; the supervisor kills all of it if that does not end it."""
        if not again and self.child is not None:
            self.say(f"the command is asked to end (SIGTERM); in {_GRACE_S:.0f} s it is killed")
            self.child.terminate()

    def ask_save(self) -> int:
        self.say("asked to save: this command is not ours, and saves when it does")
        return 0

    def kill(self, snapshot: Snapshot | None, culprit: int = 0) -> None:
        for process in reversed(snapshot.processes if snapshot else ()):
            with contextlib.suppress(OSError):  # it has just ended
                os.kill(process.pid, signal.SIGKILL)

    # ---------------------------------------------------------------- what it does

    def hear(self, snapshot: Snapshot, stall: StallDetector) -> Iterator[dict[str, Any]]:
        """What its processes count is taken in; its only event says where the time went."""
        if self.snapshot is None or any(process.look.state not in "XZ" for process in snapshot.processes):
            self.snapshot = snapshot  # the last one that shows it alive
        self.finding = stall.finding
        self.progress.inferred = stall.inferred_phase
        self.progress.look(snapshot)
        self._notice_uninstrumented(snapshot)
        self._record(snapshot)
        self.ranks.look(snapshot, self.attempt)
        self.sketch.look()
        if changed := self.changed:
            self.changed = ""
            self.say(changed)
        ended = self.child is not None and self.child.returncode is not None
        if ended or snapshot.at - self.ledger_at > _LEDGER_EVERY_S:
            self.ledger_at = snapshot.at
            seconds = {name: round(value, 3) for name, value in self.progress.seconds.items()}
            yield {"type": "ledger", "t": time.time(), "attempt": self.attempt, "final": ended, "seconds": seconds}

    def _record(self, snapshot: Snapshot) -> None:
        """A line of metrics.jsonl where steps were made since the last look: what trackers and pages show of it."""
        made = self.progress.steps - self.recorded_step
        if made <= 0:
            return
        at = stepped_at(snapshot, self.recorded_at)
        passed_s = at - self.recorded_at
        values: dict[str, float] = {"train/iter": self.progress.steps, "sys/ram_gb": snapshot.rss_bytes / 1e9}
        if self.recorded_step:
            values |= {"train/dt_ms": 1000 * passed_s / made, "time/steps_per_s": made / max(passed_s, 1e-9)}
        losses = [
            one.slot.loss for one in snapshot.processes if one.slot is not None and one.slot.loss == one.slot.loss
        ]
        values |= {"train/loss": losses[0]} if losses else {}
        record = {"step": self.progress.steps, "attempt": self.attempt, "t": time.time(), **values}
        self.metrics.write(json.dumps(record))
        self.recorded_step, self.recorded_at = self.progress.steps, at

    def _notice_uninstrumented(self, snapshot: Snapshot) -> None:
        """A Python that has not opened its slot after a while has no agent: said once."""
        for process in snapshot.processes:
            if process.slot is None and procfs.is_python(process.pid):
                self.without_agent.setdefault(process.pid, snapshot.at)
            else:
                self.without_agent.pop(process.pid, None)
        late = [pid for pid, since in self.without_agent.items() if snapshot.at - since > _HELLO_S]
        if late and not self.said_without:
            self.said_without = True
            pids = ", ".join(map(str, sorted(late)))
            self.say(
                f"process {pids} is Python, but not instrumented (python -I, or PYTHONPATH replaced): watched from outside"
            )

    def show(self, stopping_s: float | None) -> None:
        """A footer on a terminal; elsewhere a line where the command has said nothing for as long as a person waits."""
        self.stopping_s = stopping_s
        now = time.monotonic()
        if self.terminal.is_tty:
            if now - self.footer_at > FRAME_EVERY_S:
                self.terminal.footer(mask(f"lamp  {self._line()}"))
                self.footer_at = now
            return
        calm = now - self.began > CALM_AFTER_S and self.finding is None
        if now - self.spoke_at > (CALM_EVERY_S if calm else LINE_EVERY_S):
            self.say(self._line())

    def _line(self) -> str:
        """Now, in one line; something in it changes every time."""
        snapshot, finding = self.snapshot, self.finding
        if snapshot is None:
            return "starting"
        parts = [self.progress.words(snapshot), f"for {duration(snapshot.at - self.began)}"]
        if finding is not None and snapshot.stalled_s > STALL_S:
            parts.append(f"{finding.verdict.state}: {clean(finding.verdict.why)}")
        elif snapshot.stalled_s > 2 and self.progress.counts:
            parts.append(f"quiet for {duration(snapshot.stalled_s)}")
        if self.stopping_s is not None:
            parts.append(f"stopping for {duration(self.stopping_s)}")
        return " · ".join(parts)

    def status_fields(self) -> dict[str, Any]:
        return {
            "now": self._line(),
            "command": self.words,
            "phase": self.progress.phase,
            "step": self.progress.steps,
            "steps": self.progress.total,
            "eta_s": self.progress.left_s,
            "spent_s": round(time.monotonic() - self.began, 2),
            "durable_step": 0,
        }

    def state(self) -> TargetState:
        """Whether it saves is its own business: there is always something to go back to, its own beginning at least."""
        steps = self.progress.steps
        may_grow = not self.progress.counts and time.monotonic() - self.began < _LOADING_S
        return TargetState(steps, max(1, steps), may_grow, output_bytes=self.terminal.output_bytes())

    # ---------------------------------------------------------------- the end

    @property
    def elsewhere(self) -> None:
        """All of its processes are here."""
        return None

    def death(self, code: int) -> Death | None:
        return None  # its end is its own

    def outcome(self, ending: Ending) -> RunOutcome:
        """The command's own exit code, or 70 if we stopped it."""
        code, spent = ending.code, duration(time.monotonic() - self.began)
        if ending.planned == "stop":
            return RunOutcome(STUCK, "stuck", f"stuck, and stopped: {ending.planned_why}")
        if code < 0:
            memory = ", out of memory" if procfs.oom_kills() > self.oom_before else ""
            asked = -code in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # by its user, or by who runs the machine
            how = "was interrupted" if asked else "was killed"
            words = f"the command {how} by {signal_name(-code)} (signal {-code}{memory}) after {spent}"
            state = "stopped" if asked else "lost"
        else:
            words = f"the command ended with exit code {code} after {spent}"
            state = "finished" if code == 0 else "failed"
        if ending.stop_reason:
            return RunOutcome(code, "stopped", f"{words}; asked to stop ({ending.stop_reason})")
        return RunOutcome(code, state, words)

    def report(self, outcome: RunOutcome, attempts: int) -> None:
        """report.md, and what to run next."""
        if self.sketch.last:  # it has told its losses
            self.sketch.write_all()
        times = time_report.read_time_report(self.run)
        facts = {"command": " ".join(self.words), "steps": self.progress.steps, "attempts": attempts}
        time_report.write_report(self.run, times, Budget(), outcome.words, {**facts, **self.progress.facts()})
        made = f"made: {self.run.report}; next: lamp runs, or: less {shlex.quote(str(self.run.console))}"
        self.say(f"{outcome.words}; {self.progress.summary()}\n{made}")

    def close(self, outcome: RunOutcome) -> None:
        if self.again:
            for fd in self.streams:
                os.close(fd)
        self.terminal.finish()


# ---------------------------------------------------------------- how far it has come


class _ScriptProgress:
    """Remembers the last seconds, and adds up where they went."""

    def __init__(self) -> None:
        self.counted = Rate()
        self.done = 0.0
        self.unit = ""
        self.steps = self.total = self.loaders = 0
        self.phase = "start"
        self.inferred = ""  # from stacks, during a stall
        self.rate = 0.0
        self.left_s: float | None = None
        self.seconds: dict[str, float] = {}
        self.before: Snapshot | None = None
        self.counts = False
        self.peak_bytes = 0

    def look(self, snapshot: Snapshot) -> None:
        """One more snapshot."""
        self.peak_bytes = max(self.peak_bytes, snapshot.rss_bytes)
        self.counts = self.counts or any(process.slot and counts(process.slot) for process in snapshot.processes)
        self._charge(snapshot)
        leader = self._leader(snapshot)
        if leader is None or leader.slot is None:
            return
        slot = leader.slot
        self.steps, self.loaders = max(self.steps, slot.step), slot.loader_workers
        self.done, total, self.unit = _count(leader)
        self.rate = self.counted.add(self.unit, snapshot.at, self.done)
        self.total = int(total) if total > 0 else 0
        left = total - self.done
        self.left_s = round(left / self.rate, 1) if left > 0 and self.rate > 0 else None

    def _leader(self, snapshot: Snapshot) -> Process | None:
        """The process whose counters tell the most: rank 0 or the one that steps."""
        counted = [m for m in snapshot.processes if m.slot is not None and m.worker < 0]
        return max(counted, key=_worth, default=None)

    def _charge(self, snapshot: Snapshot) -> None:
        """The time since the last look, by what the leader was doing in it."""
        before, self.before = self.before, snapshot
        if before is None:
            return
        leader = self._leader(snapshot) or snapshot.processes[0]
        then = before.process(leader.pid)
        slice_s = snapshot.at - before.at
        self.phase = _phase_of(leader, snapshot)
        if then is not None and leader.slot is not None and then.slot is not None:
            waited = min(slice_s, max(0.0, (leader.slot.fetch_wait_ns - then.slot.fetch_wait_ns) / 1e9))
            if leader.slot.in_fetch and leader.slot.fetch_since_ns <= then.slot.fetch_since_ns:
                waited = slice_s
            if waited > 0:
                self._add("data wait", waited)
                slice_s -= waited
        name = self.inferred or self.phase
        if name == "script":
            busy = snapshot.cpu_s - before.cpu_s
            worked = snapshot.worked_at > before.worked_at or busy > BUSY * (snapshot.at - before.at)
            name = "compute" if worked and self.counts else "running, nothing counted yet" if worked else "asleep"
        self._add(name, slice_s)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    # -- words

    def words(self, snapshot: Snapshot) -> str:
        parts = []
        if self.unit:
            of = f" of {amount(self.total, '')}" if self.total else ""
            parts.append(f"{self.unit} {amount(self.done, '')}{of}")
            if self.rate:
                parts.append(f"{self.rate:.1f}/s" if self.rate < 100 else f"{self.rate:,.0f}/s")
            if self.left_s is not None:
                parts.append(f"{duration(self.left_s)} left")
        if self.phase != "script" or self.inferred:
            parts.append(self.inferred or self.phase)
        wait = self.seconds.get("data wait", 0.0) / max(1e-9, sum(self.seconds.values()))
        if wait > 0.02:
            parts.append(f"data wait {wait:.0%}")
        memory = snapshot.rss_bytes
        others = f" in {len(snapshot.processes)} processes" if len(snapshot.processes) > 1 else ""
        parts.append(f"{memory / 1e9:.2f} GB{others}")
        return " · ".join(parts)

    def facts(self) -> dict[str, str]:
        return {"largest memory": f"{self.peak_bytes / 1e9:.2f} GB"}

    def summary(self) -> str:
        whole = sum(self.seconds.values()) or 1e-9
        rows = sorted(self.seconds.items(), key=lambda row: -row[1])[:4]
        return ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in rows)


def stepped_at(snapshot: Snapshot, since: float) -> float:
    """When the newest step ended: what a script does after it is no time of a step. The look itself where no slot says it."""
    newest = max((one.slot.step_ns / 1e9 for one in snapshot.processes if one.slot is not None), default=0.0)
    return newest if since < newest <= snapshot.at else snapshot.at


def _worth(process: Process) -> tuple[int, int, int, int]:
    slot = process.slot
    assert slot is not None
    return (slot.step, int(slot.done > 0 or bool(slot.phase)), slot.bar_n + slot.fetches, -process.pid)


def _count(process: Process) -> tuple[float, float, str]:
    """(done, total or -1, what is counted): the script's own phase, a bar with a total, steps, fetches."""
    slot = process.slot
    assert slot is not None
    if slot.phase and slot.done:
        return slot.done, slot.total, clean(f"{slot.phase} {slot.unit}".strip())
    if slot.bar_n and slot.bar_total > 0:
        return slot.bar_n, slot.bar_total, clean(slot.bar.rstrip(": ")) or ("step" if slot.step else "bar")
    if slot.step:
        return slot.step, -1, "step"
    if slot.bar_n:
        return slot.bar_n, -1, clean(slot.bar.rstrip(": ")) or "bar"
    return (slot.fetches, slot.loader_len, "batch") if slot.fetches else (0, -1, "")


def _phase_of(leader: Process, snapshot: Snapshot) -> str:
    """From the counters alone: what the script is in."""
    slot = leader.slot
    if leader.look.stopped:
        return "stopped"
    if any(m.slot and m.slot.compiling for m in snapshot.processes):
        return "compiling"
    if slot is None:
        return "script"
    if slot.collecting:
        return "collecting garbage"
    if slot.in_coll:
        return f"in a collective ({slot.coll.split()[0]})" if slot.coll else "in a collective"
    if slot.in_fetch:
        waits = f" for worker {slot.wait_worker}" if slot.wait_worker >= 0 else ""
        return f"waiting{waits}" if slot.loader_workers else "loading a batch"
    return "script"
