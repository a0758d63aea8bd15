"""Naming is not killing: when to act on a finding, and when the same end twice is a bug and no chance.

In:  findings and deaths, with the step and the durable step.
Out: a Decision: nothing, restart from the durable step, or stop; with the reason in words.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lamplighter.watch.diagnosis import Diagnosis

_GRACE_S = 4.0  # for what is proved
_STOPPED_RANK_S = 2.5  # the same for a rank that is stopped while the others wait for it
_WITHOUT_PROGRESS = 3
_OF_THE_CODE = ("rank_order", "rank_shape")
OF_THE_CODE = "a bug in the code, which every attempt would meet again"  # the data of a step are the same each time
_NEVER = (
    "compile_slow",
    "gc",
    "slow_disk",
    "slow_output",
    "io",
    "starved",
    "stopped",
    "frozen",
    "d_state",
    "gpu_wait",
)  # healthy, or nobody's to kill


@dataclass(frozen=True)
class Decision:
    """What to do now."""

    action: str = "none"  # none, fallback (restart without the compiler), restart, stop
    why: str = ""


@dataclass
class RestartPolicy:
    """Remembers what was tried."""

    policy: str = "recover"  # recover, report, stop
    patience_s: float = 600.0
    tried: set[tuple[str, int]] = field(default_factory=set)
    since_progress: int = 0
    durable: int = -1
    eager: bool = False  # the compiler was given up

    def stuck(self, finding: Diagnosis, step: int, durable: int) -> Decision:
        """A live process: proved causes after a short grace, all others after the patience that was asked for."""
        cause, quiet_s = finding.verdict.cause, finding.verdict.since_s
        grace_s = _STOPPED_RANK_S if cause == "rank_sigstop" else _GRACE_S
        patience_s = min(grace_s, self.patience_s) if finding.provable else self.patience_s
        if self.policy == "report" or (cause in _NEVER and not finding.asleep) or quiet_s < patience_s:
            return Decision()
        if self.policy == "stop":
            ground = "nobody can end it" if finding.provable else f"the patience of {patience_s:.0f} s is over"
            return Decision("stop", f"stopped after {quiet_s:.0f} s ({cause}): {ground}, and on_stuck is stop")
        if finding.provable and cause in _OF_THE_CODE:
            return Decision("stop", f"stopped after {quiet_s:.0f} s: {OF_THE_CODE}")
        if cause == "compile_slow":
            return self._fall_back(step, durable)
        if durable <= 0 and not finding.provable:
            return Decision()  # nothing to go back to, and it may end by itself: keep saying it
        return self._restart(finding.key, step, durable)

    def dead(self, how: str, step: int, durable: int, compiling: bool = False) -> Decision:
        """A process that is gone: there is nothing left to lose by starting again."""
        if compiling and self.policy == "recover" and not self.eager:
            return self._fall_back(step, durable)
        return self._restart(how, step, durable) if self.policy == "recover" else Decision()

    def _fall_back(self, step: int, durable: int) -> Decision:
        if self.eager or (durable <= 0 and step > 0):
            return Decision()
        self.eager = True
        return Decision("fallback", f"starting again from step {durable} without the compiler (eager)")

    def _restart(self, key: str, step: int, durable: int) -> Decision:
        if durable > self.durable:
            self.since_progress, self.durable = 0, durable
        if (key, step) in self.tried:
            what = "it does not fit" if key.startswith("out_of_memory") else "a bug in code or data, not chance"
            return Decision("stop", f"the same at step {step} for the second time ({key}): {what}")
        if self.since_progress >= _WITHOUT_PROGRESS:
            return Decision("stop", f"{_WITHOUT_PROGRESS} restarts without progress beyond step {durable}")
        self.tried.add((key, step))
        self.since_progress += 1
        where = f"from step {durable}" if durable > 0 else "from the beginning: nothing was saved yet"
        return Decision("restart", f"restarting {where}")
