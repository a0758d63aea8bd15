"""A stall: nothing gets done for longer than is usual. When to look closely, when to take stacks, and what it is judged to be.

In:  a Snapshot of the process tree at each look.
Out: the finding of the moment, once the stall has lasted longer than is usual here; the evidence for it, as a file.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from lamplighter.procs import procfs, stacks, waits
from lamplighter.procs.nvml import GpuLook
from lamplighter.procs.stacks import Stacks
from lamplighter.procs.waits import Waits
from lamplighter.rundir import RunDir
from lamplighter.safe_text import safe
from lamplighter.watch.diagnosis import Diagnosis
from lamplighter.watch.evidence import GroupSample, to_json
from lamplighter.watch.process_tree import MANY, Process, ProcessTree, Snapshot, counts
from lamplighter.watch.status import duration
from lamplighter.watch.tree_diagnosis import judge, phase_from_stack

LOOK_EVERY_S = 0.25
STALL_S = 2.0
_UNCOUNTED_STALL_S = 3.0  # for a phase of ours that counts nothing (an import, a model being built)
CLOSE_LOOK_S = 1.0  # from here on every look is a close one
_MANY_TIMES_USUAL = (
    1.3  # of very many ranks only beyond what is usual: with steps of a second each would begin a close look
)
_WINDOW_S = 8.0
_WITHOUT_STACKS_S = 4.5  # if those of our own process cannot be had by then, judge without
_STOPPED_WITHOUT_STACKS_S = 3.5  # and those of a command with a stopped part, over which py-spy may take long
_TIMES_USUAL = 4.0
_LATEST_S = 5.0  # naming costs nothing: what was slow once must not keep the next hang unnamed for longer than this
_TIMES_OUTLIVED = 1.5  # what has ended by itself before is said again only when it lasts so much longer
_AGREE_S = 1.5  # another finding takes the place of the first only when it holds for so long
_OPEN_COLLECTIVE_S = 1.5  # what is usual counts for no more than this while a rank waits for another
_COMMON = ("running", "gc", "io")
_UNCOUNTED_S = 8.0  # while a script has counted nothing yet (imports), COMMON causes are status and no verdict
_MOST_STACKS = 16
_SAMPLE_S = 2.0
_WARM_S = 0.2


class StallDetector:
    """Learns how long work usually takes, in each phase of ours or in a script as a whole, and looks closely beyond that."""

    def __init__(self, run: RunDir, ours: bool) -> None:
        """`ours`: the roots are our own processes, which tell their phase and count their work."""
        self.run, self.ours = run, ours
        self.usual_gap_s: dict[str, float] = {}
        self.outlived_s: dict[str, float] = {}  # by finding: the longest stall of this kind that ended by itself
        self.begin_again()

    def begin_again(self) -> None:
        """A new attempt: what was learned stays, what was seen goes."""
        self.window: deque[Snapshot] = deque()
        self.captures: dict[int, tuple[Stacks, ...]] = {}
        self.waits = Waits()  # taken with the newest stacks
        self.cards: tuple[GpuLook, ...] = ()  # that the processes compute on, as the driver told last
        self.finding: Diagnosis | None = None
        self.other_since: float | None = None  # since when the evidence speaks for another finding
        self.proved_at: float | None = None  # since when every look has proved it
        self.named: set[str] = set()  # in this stall
        self.phase = ""
        self.phase_ticks = 0
        self.gap_s = 0.0
        self.counted = False  # whether any work was ever counted
        self.worked_at = time.monotonic()
        self.next_capture_s = 0.0
        self.capturing: threading.Thread | None = None
        self.warmed: set[int] = set()
        self.warm_until = 0.0

    @property
    def stalled_s(self) -> float:
        return time.monotonic() - self.worked_at

    def close_look_s(self, many: bool) -> float:
        """From when on without work every look is a close one."""
        usual_s = self.usual_gap_s.get(self.phase, 0.0) if many else 0.0
        return max(CLOSE_LOOK_S, min(_MANY_TIMES_USUAL * usual_s, _LATEST_S))

    @property
    def inferred_phase(self) -> str:
        """What a script is in, by the stack of its first process; empty outside a stall."""
        first = self.window[-1].processes[0].pid if self.window else 0
        taken = self.captures.get(first, ())
        return phase_from_stack(taken[-1].threads[0]) if taken else ""

    def look(self, tree: ProcessTree, snapshot: Snapshot) -> None:
        """One look more; updates `finding`."""
        main = snapshot.processes[0] if snapshot.processes else None
        if main is None:
            return
        self._notice_work(snapshot, main)
        prompting = main.slot is not None and main.slot.prompting
        if prompting or self.gap_s < self.close_look_s(len(tree.own) > MANY) or self._is_warming(tree, snapshot):
            return
        self.window.append(snapshot)
        while snapshot.at - self.window[0].at > _WINDOW_S:
            self.window.popleft()
        halted = self._halted()
        if not halted and self.gap_s < self._patience_s(snapshot, main):
            return
        if not self.ours and len(self.window) < 2:
            return
        compiling = self.ours and main.slot is not None and bool(main.slot.compiling)
        if not compiling:
            self._capture_when_due(tree, snapshot)
        late = self.ours and (compiling or self.gap_s > _WITHOUT_STACKS_S)
        if self.captures or late or (halted and not self.ours and self.gap_s > _STOPPED_WITHOUT_STACKS_S):
            self._settle(judge(self.sample()), snapshot.at)

    @property
    def proved_s(self) -> float:
        """For how long every look has found the same: nobody can end this wait."""
        return self.window[-1].at - self.proved_at if self.proved_at is not None and self.window else 0.0

    def _settle(self, found: Diagnosis | None, now: float) -> None:
        """One verdict at a time: it changes when the evidence has changed for a while, or when there is a proof."""
        if found is None:
            return
        self.proved_at = (self.proved_at or now) if found.provable else None
        standing = self.finding
        if standing is None or found.provable or standing.provable or found.key == standing.key:
            self.finding, self.other_since = found, None  # a proof that does not hold any more goes at once
        elif self.other_since is None:
            self.other_since = now
        elif now - self.other_since >= _AGREE_S:
            self.finding, self.other_since = found, None

    def sample(self) -> GroupSample:
        """The last two seconds: what was before them may have been work that nobody counts."""
        last = self.window[-1]
        first = next((one for one in reversed(self.window) if last.at - one.at >= _SAMPLE_S), self.window[0])
        usual_s = self.usual_gap_s.get(self.phase, 0.0)
        return GroupSample(first, last, dict(self.captures), usual_s, self.waits, self.cards)

    def unnamed_finding(self) -> Diagnosis | None:
        """The finding, if this stall was not called so yet."""
        if self.finding is None:
            return None
        named = f"{self.finding.key} {self.finding.left_s is not None}"
        early = not self.ours and not self.counted and self.gap_s < _UNCOUNTED_S
        outlived_s = self.outlived_s.get(self.finding.kind, 0.0)
        expected = not self.finding.provable and self.gap_s < _TIMES_OUTLIVED * outlived_s
        if named in self.named or expected or (early and self.finding.verdict.cause in _COMMON):
            return None
        self.named.add(named)
        return self.finding

    def keep_evidence(self, finding: Diagnosis) -> str | None:
        """What the verdict was judged from, as a file: it can be judged again."""
        path = keep_text(self.run, f"{finding.verdict.cause}.json", to_json(self.sample()))
        return path.name if path else None

    def is_unanswered(self, pid: int) -> bool:
        """Whether two requests in a row got no answer: C code holds the GIL, or the process is stopped."""
        taken = self.captures.get(pid, ())
        return len(taken) >= 2 and all(one.sampler_silent for one in taken)

    # -- what is usual

    def _notice_work(self, snapshot: Snapshot, main: Process) -> None:
        slot = main.slot
        if self.ours and slot is not None and slot.phase != self.phase:
            self.phase, self.phase_ticks, self.gap_s = slot.phase, slot.ticks, 0.0
        if snapshot.worked_at > self.worked_at:
            gap_s = self.gap_s if self.ours else snapshot.worked_at - self.worked_at
            usual_s = max(self.usual_gap_s.get(self.phase, 0.0) * 0.98, gap_s)
            self.usual_gap_s[self.phase] = usual_s if self.ours or self.counted else 0.0
            if self.finding is not None:
                kind = self.finding.kind
                self.outlived_s[kind] = max(self.outlived_s.get(kind, 0.0), gap_s)
            self.worked_at = snapshot.worked_at
            self.window.clear()
            self.named.clear()
            self.captures, self.waits, self.finding, self.next_capture_s = {}, Waits(), None, 0.0
            self.other_since = self.proved_at = None
        # only now: what came before the first unit of work (imports) says nothing about how long one takes
        self.counted = self.counted or any(process.slot and counts(process.slot) for process in snapshot.processes)
        self.gap_s = snapshot.stalled_s

    def _patience_s(self, snapshot: Snapshot, main: Process) -> float:
        usual_s = self.usual_gap_s.get(self.phase, 0.0)
        if any(process.slot and process.slot.in_coll for process in snapshot.processes):
            usual_s = min(usual_s, _OPEN_COLLECTIVE_S)
        counted = not self.ours or (main.slot is not None and main.slot.ticks > self.phase_ticks + 1)
        least_s = STALL_S if counted else _UNCOUNTED_STALL_S
        return max(least_s, min(_TIMES_USUAL * usual_s, _LATEST_S))

    def _halted(self) -> bool:
        """Stopped by a signal, or asleep in the kernel: no patience is needed to see that."""
        if self.ours:
            return all(any(p.look.state in "TD" for p in one.processes) for one in list(self.window)[-2:])
        stopped = [process.look.stopped for process in self.window[-1].processes]
        return any(stopped) and not all(stopped)  # all of a command: its user's Ctrl+Z

    # -- stacks

    def _is_warming(self, tree: ProcessTree, snapshot: Snapshot) -> bool:
        """The first question makes a watched process load what it answers with: asked early, so that no byte of that counts."""
        if self.ours:
            return False
        fresh = [p for p in snapshot.processes if p.slot is not None and not p.slot.answers and not p.look.stopped]
        for process in [p for p in fresh if p.pid not in self.warmed][:_MOST_STACKS]:
            self.warmed.add(process.pid)
            path = tree.slot_path(process.pid)
            threading.Thread(target=stacks.ask, args=(path, _WARM_S), name="lamp-warm", daemon=True).start()
            self.warm_until = snapshot.at + 2 * LOOK_EVERY_S
        return snapshot.at < self.warm_until

    def _capture_when_due(self, tree: ProcessTree, snapshot: Snapshot) -> None:
        """At once, a second time after a second (two samples must agree), then less and less often."""
        if self.gap_s < self.next_capture_s or (self.capturing is not None and self.capturing.is_alive()):
            return
        self.next_capture_s = self.gap_s + (1.0 if not self.captures else min(30.0, max(2.0, self.gap_s / 2)))
        self.capturing = threading.Thread(target=self._capture, args=(tree, snapshot), name="lamp-capture", daemon=True)
        self.capturing.start()

    def _capture(self, tree: ProcessTree, snapshot: Snapshot) -> None:
        """In a thread of its own: py-spy may take its two seconds, and the console must not wait."""
        taken = take_all(tree, snapshot.processes, everybody=not self.ours)
        answered = {pid: found for pid, found in taken.items() if found is not None and found.threads}
        if self.worked_at == snapshot.worked_at and answered:
            self.captures = {pid: (*self.captures.get(pid, ())[-1:], one) for pid, one in answered.items()}
            pids = [process.pid for process in snapshot.processes if process.pid in tree.parents]
            traced = any(one.source == "py-spy" for one in answered.values())
            look = waits.look_when_settled if traced else waits.look_at_waits
            self.waits = look(pids, stacks.tried_files(answered.values()))
            keep_text(
                self.run,
                f"{time.monotonic_ns() % 1000:03}.txt",
                explain(f"no work for {snapshot.stalled_s:.1f} s", snapshot, taken, None),
            )


def take_all(tree: ProcessTree, processes: tuple[Process, ...], everybody: bool) -> dict[int, Stacks | None]:
    """The stacks of every process that reports, or of every Python; None where they cannot be had."""
    wanted = [p.pid for p in processes if p.slot is not None or (everybody and procfs.is_python(p.pid))]
    others = tree.elsewhere.take(wanted[:_MOST_STACKS]) if tree.elsewhere is not None else {}
    here = [pid for pid in wanted[:_MOST_STACKS] if pid not in others]
    return {pid: stacks.take(tree.slot_path(pid), pid, ours=pid in tree.own) for pid in here} | others


def explain(line: str, snapshot: Snapshot, taken: Mapping[int, Stacks | None], finding: Diagnosis | None) -> str:
    """The line of now, the verdict, then every process with its phase and its stacks."""
    lines = [line]
    if finding is not None:
        lines += [f"{finding.verdict.state}: {finding.verdict.why}", f"next: {finding.verdict.next}"]
    for process in snapshot.processes:
        slot, look = process.slot, process.look
        lines.append(f"\n{process.words}: {look.words}, {look.threads} threads, {look.rss_bytes / 1e9:.2f} GB")
        if slot is not None and slot.phase:
            inside = f" > {slot.span}" if slot.span else ""
            lines.append(f"phase: {slot.phase}{inside}; last unit of work {duration(snapshot.stalled_s)} ago")
        if found := taken.get(process.pid):
            lines.append(f"stacks (by {found.source}):\n\n{found.text()}")
        elif process.pid in taken:
            lines.append("stacks: could not be read (it is gone, stopped, or may not be traced)")
    return "\n".join(lines)


def keep_text(run: RunDir, name: str, text: str) -> Path | None:
    """A file in stacks/: one per capture, and one per verdict."""
    path = run.stacks / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    try:
        path.write_text(safe(text))
    except OSError:  # a full disk: the sentence is still said
        return None
    return path
