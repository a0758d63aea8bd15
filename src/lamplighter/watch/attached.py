"""A process that runs already as a target of the supervisor: `lamp watch PID`. It is looked at from outside, and nothing is changed.

In:  a pid, a run folder.
Out: lines about it until it ends or the person leaves; verdicts with the line, what is waited for and who holds it.
"""

from __future__ import annotations

import contextlib
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from lamplighter.config import Budget
from lamplighter.errors import STUCK, InputMissing
from lamplighter.procs import procfs
from lamplighter.rundir import LineFile, RunDir
from lamplighter.safe_text import clean, safe
from lamplighter.watch import time_report
from lamplighter.watch.console import LINE_EVERY_S
from lamplighter.watch.diagnosis import Diagnosis
from lamplighter.watch.process_tree import Snapshot, exit_code_of, open_pidfd, send_signal
from lamplighter.watch.stall import StallDetector
from lamplighter.watch.status import duration
from lamplighter.watch.supervisor import Death, Ending, Root, RunOutcome, TargetFacts, TargetState

_GRACE_S = 10.0


class RunningProcess:
    """What the supervisor needs of a process that somebody else has started: whether it lives, and how it ended."""

    def __init__(self, pid: int) -> None:
        self.pid, self.pidfd = pid, open_pidfd(pid)
        self.left = threading.Event()  # the person has gone; the process goes on
        self.code: int | None = None  # where the kernel tells it
        self.over = False

    def poll(self) -> int | None:
        """0 as well where nobody can know how it ended."""
        if self.left.is_set():
            return 0
        if not self.over and self._has_ended():
            self.over, self.code = True, exit_code_of(self.pidfd, self.pid)
        return (self.code or 0) if self.over else None

    def wait(self, timeout: float | None = None) -> int:
        return self.poll() or 0

    def _has_ended(self) -> bool:
        if self.pidfd < 0:
            return procfs.look(self.pid).state in "XZ"
        return bool(select.select([self.pidfd], [], [], 0)[0])


class AttachedProcess:
    """One process and its descendants, which know nothing of us."""

    goes_on_with = grows = False  # somebody else's processes start and end by themselves

    def __init__(self, run: RunDir, pid: int) -> None:
        if procfs.look(pid).state in "XZ":
            raise InputMissing(
                f"there is no process {pid}", "it has ended, or never was", "lamp runs lists our own runs"
            )
        self.run, self.pid = run, pid
        self.facts = TargetFacts("watch", ours=False, grace_s=_GRACE_S, command=tuple(procfs.command(pid).split()))
        self.process = RunningProcess(pid)
        self.log = LineFile(run.console)
        self.began = time.monotonic()
        self.spoke_at = 0.0
        self.snapshot: Snapshot | None = None
        self.finding: Diagnosis | None = None

    def say(self, text: str, style: str = "", urgent: bool = False) -> None:
        stamp = time.strftime("%H:%M:%S")
        lines = "\n".join(f"lamp {stamp}  {line}" for line in safe(text).splitlines())
        self.log.write(lines)
        with contextlib.suppress(OSError):  # a terminal that is gone: the log has it
            sys.stderr.write(lines + "\n")
            sys.stderr.flush()
        self.spoke_at = time.monotonic()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Ctrl+C leaves, and the process goes on."""
        before = {
            number: signal.signal(number, self._leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _leave(self, number: int, frame: object) -> None:
        self.process.left.set()

    def start(self, attempt: int, eager: bool) -> list[Root]:
        self.say(f"watching process {self.pid} ({procfs.command(self.pid)}) from outside; Ctrl+C leaves it alone")
        return [Root(self.process)]

    def hear(self, snapshot: Snapshot, stall: StallDetector) -> Iterator[dict[str, Any]]:
        self.snapshot, self.finding = snapshot, stall.finding
        return iter(())

    def show(self, stopping_s: float | None) -> None:
        if time.monotonic() - self.spoke_at > LINE_EVERY_S:
            self.say(self._line())

    def _line(self) -> str:
        """Now, in one line; something in it changes every time."""
        parts = [f"process {self.pid}", f"watched for {duration(time.monotonic() - self.began)}"]
        if self.snapshot is not None:
            others = f" in {len(self.snapshot.processes)} processes" if len(self.snapshot.processes) > 1 else ""
            parts.append(f"{self.snapshot.rss_bytes / 1e9:.2f} GB{others}")
        if self.finding is not None:
            parts.append(f"{self.finding.verdict.state}: {clean(self.finding.verdict.why)}")
        return " · ".join(parts)

    def status_fields(self) -> dict[str, Any]:
        spent_s = round(time.monotonic() - self.began, 2)
        fields = {"now": self._line(), "command": list(self.facts.command), "phase": "attached", "step": 0, "steps": 0}
        return {**fields, "eta_s": None, "spent_s": spent_s, "durable_step": 0}

    def state(self) -> TargetState:
        return TargetState(step=0, durable_step=1, may_grow=True)

    def ask_stop(self, reason: str, again: bool) -> None:
        if not again:
            self.say(f"process {self.pid} is asked to end (SIGTERM); in {_GRACE_S:.0f} s it is killed")
            send_signal(self.process.pidfd, signal.SIGTERM)

    def ask_save(self) -> int:
        self.say("asked to save: this process is not ours, and saves when it does")
        return 0

    def kill(self, snapshot: Snapshot | None, culprit: int = 0) -> None:
        if snapshot is not None:
            send_signal(self.process.pidfd, signal.SIGKILL)

    @property
    def elsewhere(self) -> None:
        """All of its processes are here."""
        return None

    def death(self, code: int) -> Death | None:
        return None  # its end is its own

    def outcome(self, ending: Ending) -> RunOutcome:
        spent = duration(time.monotonic() - self.began)
        if self.process.left.is_set():
            return RunOutcome(0, "left", f"left after {spent}; process {self.pid} goes on")
        if ending.planned == "stop":
            return RunOutcome(STUCK, "stuck", f"stuck, and stopped: {ending.planned_why}")
        code = self.process.code
        how = (
            "how, the kernel does not say"
            if code is None
            else f"killed by signal {-code}"
            if code < 0
            else f"exit code {code}"
        )
        return RunOutcome(
            0, "finished" if not code else "failed", f"process {self.pid} has ended ({how}) after {spent} of watching"
        )

    def report(self, outcome: RunOutcome, attempts: int) -> None:
        times = time_report.TimeReport(
            time.monotonic() - self.began, {"watched": time.monotonic() - self.began}, attempts
        )
        time_report.write_report(self.run, times, Budget(), outcome.words, {"command": " ".join(self.facts.command)})
        self.say(
            f"{outcome.words}\nmade: {self.run.report}; next: lamp why {self.pid}, or: less {shlex.quote(str(self.run.console))}"
        )

    def close(self, outcome: RunOutcome) -> None:
        """There is nothing of the process's that would have to be given back."""
