"""Somebody else's command as a target of the supervisor: nothing is changed but the agent that is injected at its start.

In:  the words of a command, a run folder.
Out: the command with its own output, signals and exit code; what its processes count, in words.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lamplighter.config import Budget
from lamplighter.errors import STUCK, BadConfig, InputMissing
from lamplighter.procs import procfs
from lamplighter.report import Verdict
from lamplighter.rundir import LineFile, RunDir
from lamplighter.watch import agent, time_report
from lamplighter.watch.console import CALM_AFTER_S, CALM_EVERY_S, FRAME_EVERY_S, LINE_EVERY_S
from lamplighter.watch.diagnosis import Diagnosis
from lamplighter.watch.process_tree import HELLO_S, Snapshot
from lamplighter.watch.progress import ScriptProgress
from lamplighter.watch.restart_policy import RestartPolicy
from lamplighter.watch.stall import STALL_S, StallDetector
from lamplighter.watch.status import clean, duration
from lamplighter.watch.supervisor import Death, Ending, RunOutcome
from lamplighter.watch.terminal import Terminal
from lamplighter.watch.trainer import signal_name

_GRACE_S = 10.0
_LOADING_S = 60.0
POLICIES = {"report": "report", "stop": "stop", "restart": "recover"}  # --on-stuck -> watch.on_stuck


class WatchedCommand:
    """One command, the terminal that it writes to, and how far it has come."""

    ours = False
    verb = "watch"
    grace_s = _GRACE_S

    def __init__(self, run: RunDir, words: list[str], again: bool) -> None:
        """`again`: it may be started more than once, so its side of the terminal stays open."""
        self.run, self.words = run, words
        for stale in run.slots.glob("p*"):
            stale.unlink(missing_ok=True)
        self.terminal = Terminal.open(run.output)
        self.log = LineFile(run.console)
        self.streams = [os.dup(fd) if again else fd for fd in (self.terminal.stdout, self.terminal.stderr)]
        self.again = again
        self.began = time.monotonic()
        self.child: subprocess.Popen[bytes] | None = None
        self.progress = ScriptProgress()
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
        lines = "\n".join(f"lamp {stamp}  {line}" for line in text.splitlines())
        self.log.write(lines)
        self.terminal.say(lines, urgent)
        self.spoke_at = time.monotonic()

    # ---------------------------------------------------------------- start and stop

    def signals(self) -> AbstractContextManager[None]:
        return self.terminal.signals()

    def wake_fd(self) -> int:
        return -1

    def stop_wanted(self) -> str:
        return ""  # signals to us are handed on to the command

    def leaves_at_once(self) -> bool:
        return False

    def start_fields(self, attempt: int) -> dict[str, Any]:
        return {"began": time.time(), "verb": self.verb, "command": self.words}

    def spawn(self, attempt: int) -> list[subprocess.Popen[bytes]]:
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
        return [self.child]

    def slots(self) -> dict[int, Path]:
        return {}

    def begin_again(self, attempt: int, policy: RestartPolicy) -> None:
        self.progress, self.snapshot, self.finding = ScriptProgress(), None, None
        self.say(f"attempt {attempt}: the command is started again; it must resume by itself")

    def ask_stop(self, reason: str, again: bool) -> None:
        """TERM to the command; the supervisor kills all of it if that does not end it."""
        if not again and self.child is not None:
            self.say(f"the command is asked to end (SIGTERM); in {_GRACE_S:.0f} s it is killed")
            self.child.terminate()

    def ask_save(self) -> int:
        self.say("asked to save: this command is not ours, and saves when it does")
        return 0

    def save_before_kill(self) -> int:
        return 0

    def kill(self, snapshot: Snapshot | None) -> None:
        for process in reversed(snapshot.processes if snapshot else ()):
            with contextlib.suppress(OSError):  # it has just ended
                os.kill(process.pid, signal.SIGKILL)

    # ---------------------------------------------------------------- what it does

    def output_bytes(self) -> int:
        return self.terminal.output_bytes()

    def phase_usual_s(self) -> float:
        return 0.0

    def hear(self, snapshot: Snapshot, stall: StallDetector) -> Iterator[dict[str, Any]]:
        """It has no events; what its processes count is taken in."""
        if self.snapshot is None or any(process.look.state not in "XZ" for process in snapshot.processes):
            self.snapshot = snapshot  # the last one that shows it alive
        self.finding = stall.finding
        self.progress.inferred = stall.inferred_phase
        self.progress.look(snapshot)
        self._notice_uninstrumented(snapshot)
        return iter(())

    def _notice_uninstrumented(self, snapshot: Snapshot) -> None:
        """A Python that has not opened its slot after a while has no agent: said once."""
        for process in snapshot.processes:
            if process.slot is None and procfs.is_python(process.pid):
                self.without_agent.setdefault(process.pid, snapshot.at)
            else:
                self.without_agent.pop(process.pid, None)
        late = [pid for pid, since in self.without_agent.items() if snapshot.at - since > HELLO_S]
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
                self.terminal.footer(f"lamp  {self.line()}")
                self.footer_at = now
            return
        calm = now - self.began > CALM_AFTER_S and self.finding is None
        if now - self.spoke_at > (CALM_EVERY_S if calm else LINE_EVERY_S):
            self.say(self.line())

    def line(self) -> str:
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

    def why(self) -> list[str]:
        return []

    def status_fields(self) -> dict[str, Any]:
        return {
            "command": self.words,
            "phase": self.progress.phase,
            "step": self.progress.steps,
            "steps": self.progress.total,
            "eta_s": self.progress.left_s,
            "spent_s": round(time.monotonic() - self.began, 2),
            "durable_step": 0,
        }

    def standing(self) -> tuple[int, int]:
        """Whether it saves is its own business: there is always something to go back to, its own beginning at least."""
        return self.progress.steps, max(1, self.progress.steps)

    def may_grow(self) -> bool:
        """Loading grows by right."""
        return not self.progress.counts and time.monotonic() - self.began < _LOADING_S

    def resource_verdicts(self, snapshot: Snapshot) -> list[Verdict | None]:
        return []

    # ---------------------------------------------------------------- the end

    def death(self, code: int) -> Death | None:
        return None  # its end is its own

    def outcome(self, ending: Ending) -> RunOutcome:
        """The command's own exit code, or 70 if we stopped it."""
        code, spent = ending.code, duration(time.monotonic() - self.began)
        if ending.planned == "stop":
            return RunOutcome(STUCK, "stuck", f"stuck, and stopped: {ending.planned_why}")
        if code < 0:
            memory = ", out of memory" if procfs.oom_kills() > self.oom_before else ""
            words = f"the command was killed by {signal_name(-code)} (signal {-code}{memory}) after {spent}"
            state = "lost"
        else:
            words = f"the command ended with exit code {code} after {spent}"
            state = "finished" if code == 0 else "failed"
        if ending.stop_reason:
            return RunOutcome(code, "stopped", f"{words}; asked to stop ({ending.stop_reason})")
        return RunOutcome(code, state, words)

    def report(self, outcome: RunOutcome, attempts: int) -> None:
        """report.md, and what to run next."""
        times = time_report.TimeReport(time.monotonic() - self.began, self.progress.seconds, attempts)
        facts = {"command": " ".join(self.words), "steps": self.progress.steps, "attempts": attempts}
        time_report.write_report(self.run, times, Budget(), outcome.words, {**facts, **self.progress.facts()})
        made = f"made: {self.run.report}; next: lamp runs, or: less {self.run.console}"
        self.say(f"{outcome.words}; {self.progress.summary()}\n{made}")

    def close(self, outcome: RunOutcome) -> None:
        if self.again:
            for fd in self.streams:
                os.close(fd)
        self.terminal.finish()
