"""Slow, stuck or dead, for one process of a tree: pure functions from what was seen to what it means.

In:  Evidence: a GroupSample (two looks at the tree, the stacks taken between them) and the process that is asked about.
Out: a Diagnosis: a verdict in the form of every verdict, and whether it is proved that nobody can end the wait.

`judge_process` asks RULES in order, and the first that fits wins. The order carries the meaning: what needs no stacks comes
first (stopped, uninterruptible, compiling, collecting garbage), then a GIL that is held, then bytes that move, then CPU that
is used, and only when the whole tree is asleep a deadlock or a plain wait. A rule reads nothing but its Evidence and the
source of the lines that the stacks name, so that a verdict can be given again from the file that evidence.py keeps.

*Provable* means that the policy may act after a short grace; all other findings only after the user's patience.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from lamplighter.procs.procfs import COMPILERS, FUTEX, NANOSLEEP, ProcessLook, ThreadLook, not_known
from lamplighter.procs.stacks import OUR_THREADS, Frame, Stacks, ThreadStack, culprit, users_frame
from lamplighter.report import Verdict
from lamplighter.slot import Slot
from lamplighter.watch.evidence import GroupSample
from lamplighter.watch.process_tree import Process, counts
from lamplighter.watch.status import duration

_UNTIMED_WAIT = re.compile(r"\.(acquire|join|get|wait|result)\(\s*(?:True\s*|block(?:ing)?=True\s*)?\)")
_WORKERS = {"data/stream.py": "lamp-stream", "train/checkpointer.py": "lamp-writer"}  # who works while this file waits
BUSY = 0.03  # share of one core that counts as running
_SLOW_BYTES_PER_S = 2e6
SOFT_WAITS = ("wait", "get", "result", "join")  # a signal handler, a timer or a native thread may end them
_STARVED = 2.0  # times longer waiting for a core than running


@dataclass(frozen=True)
class Diagnosis:
    """A verdict, and whether it may be acted on soon (`provable`) or only after long patience."""

    verdict: Verdict
    provable: bool = False
    asleep: bool = False  # a compiler that does not compute
    left_s: float | None = None  # until the loop that it is in ends

    @property
    def key(self) -> str:
        """The same culprit twice is a bug, not chance."""
        where = self.verdict.culprit
        return f"{self.verdict.cause} {where.get('file')}:{where.get('line')}"


@dataclass(frozen=True)
class Evidence:
    """What a rule sees: the process in question, with the CPU and the bytes of the whole tree around it."""

    sample: GroupSample
    process: Process  # at the last look

    @property
    def before(self) -> Process:
        return self.sample.first.process(self.process.pid) or self.process

    @property
    def look(self) -> ProcessLook:
        return self.process.look

    @property
    def slot(self) -> Slot:
        """A process without a slot is a script that counts nothing."""
        return self.process.slot or Slot(span="compute")

    @property
    def counts(self) -> bool:
        """Whether it has ever told us of work."""
        return bool(self.slot.ticks or self.slot.phase) or counts(self.slot)

    @property
    def seconds(self) -> float:
        return self.sample.seconds

    @property
    def cpu_share(self) -> float:
        return max(0.0, self.sample.last.cpu_s - self.sample.first.cpu_s) / self.seconds  # less when a child has ended

    @property
    def bytes_per_s(self) -> float:
        return max(0, self.sample.last.moved_bytes - self.sample.first.moved_bytes) / self.seconds

    @property
    def compilers(self) -> list[ProcessLook]:
        others = (process.look for process in self.sample.last.processes if process.pid != self.process.pid)
        return [look for look in others if look.name in COMPILERS]

    @property
    def main_thread(self) -> ThreadLook | None:
        return next((thread for thread in self.look.each if thread.tid == self.look.pid), None)

    @property
    def stacks(self) -> tuple[Stacks, ...]:
        return tuple(self.sample.stacks.get(self.process.pid, ())[-2:])

    @property
    def newest(self) -> Stacks | None:
        return self.stacks[-1] if self.stacks else None

    @property
    def main_stack(self) -> ThreadStack | None:
        """The thread whose work is waited for: the main one, or the one that reads or writes for it."""
        if not self.newest or not self.newest.threads:
            return None
        main, *others = self.newest.threads
        for file, name in _WORKERS.items():
            if any(frame.file.endswith(file) for frame in main.frames):
                return next((thread for thread in others if thread.name == name), main)
        return main

    @property
    def frame(self) -> Frame | None:
        return culprit(self.main_stack) if self.main_stack else None

    @property
    def sampler_silent(self) -> bool:
        return self.sample.is_silent(self.process)

    @property
    def usual_s(self) -> float:
        return self.sample.usual_s

    @property
    def stalled_s(self) -> float:
        return self.sample.last.stalled_s

    def words(self) -> str:
        return self.sample.words()

    def usually(self) -> str:
        return f", usually {duration(self.usual_s)} at most" if self.usual_s > 0.1 else ""


def judge_process(sample: GroupSample, process: Process) -> Diagnosis | None:
    """The first rule that fits; None where nothing can be said yet."""
    evidence = Evidence(sample, process)
    return next((found for rule in _RULES if (found := rule(evidence)) is not None), None)


def _finding(
    evidence: Evidence, state: str, cause: str, why: str, next: str, provable: bool = False, **culprit_fields: object
) -> Diagnosis:
    where = evidence.sample.culprit(evidence.process, evidence.frame)
    seen = [
        f"process {evidence.look.words}, {evidence.cpu_share:.0%} of a core",
        not_known(evidence.look) or f"{evidence.bytes_per_s:,.0f} bytes/s moved",
        f"phase {evidence.slot.phase or 'script'} {evidence.slot.span}".strip(),
    ]
    if evidence.look.wchan.strip("0"):
        seen.append(f"waits in {evidence.look.wchan}")
    since_s = round(evidence.stalled_s, 2)
    return Diagnosis(
        Verdict(
            state, cause, why, next, "none", evidence=tuple(seen), culprit={**where, **culprit_fields}, since_s=since_s
        ),
        provable,
    )


# ---------------------------------------------------------------- the rules, in order


def _stopped(evidence: Evidence) -> Diagnosis | None:
    halted = [process.look for process in evidence.sample.last.processes if process.look.stopped]
    if not halted:
        return None
    one = halted[0]
    return _finding(
        evidence,
        "stuck",
        "stopped",
        f"process {one.pid} ({one.name}) is stopped by a signal",
        f"kill -CONT {one.pid}",
        pid=one.pid,
    )


def _uninterruptible(evidence: Evidence) -> Diagnosis | None:
    asleep_throughout = evidence.before.look.state == evidence.look.state == "D" and evidence.seconds >= 0.9
    if not asleep_throughout or evidence.bytes_per_s > 0:
        return None
    where = f" at {evidence.frame.short}" if evidence.frame else ""
    why = f"the process is in uninterruptible sleep ({evidence.look.wchan or 'kernel'}){where}, {evidence.words()}; it cannot be killed"
    return _finding(evidence, "stuck", "d_state", why, "wait, or look at the disk or the mount behind it (dmesg)")


def _compiling(evidence: Evidence) -> Diagnosis | None:
    flagged = any(process.slot and process.slot.compiling for process in evidence.sample.last.processes)
    if not flagged and not evidence.compilers:
        return None
    if evidence.seconds > 0.9 and evidence.cpu_share < BUSY and evidence.bytes_per_s <= 0:
        return _compile_asleep(evidence)
    child = f" ({evidence.compilers[0].name}, process {evidence.compilers[0].pid})" if evidence.compilers else ""
    why = f"compiling for {duration(evidence.stalled_s)}{child}{evidence.usually()}"
    return _finding(evidence, "slow", "compile_slow", why, "wait: the second start finds the result in the cache")


def _compile_asleep(evidence: Evidence) -> Diagnosis:
    """Nobody computes: a compiler that waits. Named as slow, and given the patience of all that cannot be proved."""
    names = (
        ", ".join(f"{process.look.name} {process.pid}" for process in evidence.sample.last.processes[1:4])
        or "no child process"
    )
    why = f"compiling for {duration(evidence.stalled_s)}, and nothing computes ({names}){evidence.usually()}"
    found = _finding(evidence, "slow", "compile_slow", why, "wait; given up for uncompiled code after watch.patience_s")
    return replace(found, asleep=True)


def _collecting(evidence: Evidence) -> Diagnosis | None:
    if not evidence.slot.collecting:
        return None
    return _finding(
        evidence, "slow", "gc", f"Python collects garbage, {evidence.words()}", "wait; gc.freeze() after loading helps"
    )


def _moving_slowly(evidence: Evidence) -> Diagnosis | None:
    """Bytes move, the process mostly waits for them: input-bound."""
    if evidence.bytes_per_s <= 0 or evidence.cpu_share > 0.5 or evidence.seconds < 0.9:
        return None
    if evidence.bytes_per_s > _SLOW_BYTES_PER_S:
        return _finding(
            evidence, "slow", "io", f"{evidence.bytes_per_s / 1e6:.1f} MB/s are moved, {evidence.words()}", "wait"
        )
    path = evidence.look.waits_on or evidence.slot.phase_item
    where = f" at {evidence.frame.short}" if evidence.frame else ""
    why = f"input-bound: {evidence.bytes_per_s / 1e6:.3f} MB/s from {path or 'a file'}{where}; the process waits {1 - evidence.cpu_share:.0%} of the time"
    return _finding(evidence, "slow", "slow_disk", why, "copy the data to a faster disk", path=path)


def _holding_the_gil(evidence: Evidence) -> Diagnosis | None:
    """The listener cannot answer: a C call keeps the GIL, asleep or busy."""
    main = evidence.main_stack
    if not evidence.sampler_silent or main is None or main.holds_gil is False or evidence.frame is None:
        return None
    why = f"the GIL is held by a C call at {evidence.frame.short}, process {evidence.look.words}, {evidence.words()}{evidence.usually()}"
    return _finding(evidence, "slow", "gil_hold", why, "nothing can be saved until it returns; look at that line")


def _running(evidence: Evidence) -> Diagnosis | None:
    if evidence.cpu_share < BUSY or evidence.frame is None:
        return None
    counted = _loop_progress(evidence)
    far = counted.words() if counted else evidence.usually()
    here = f"at {evidence.frame.short}, {evidence.cpu_share:.0%} of a core, {evidence.words()}{far}"
    if _starved(evidence):
        return _finding(
            evidence,
            "slow",
            "starved",
            f"other programs take the cores: running {here}",
            "stop them, or train.threads 1",
        )
    loop = enclosing_loop(evidence.frame.file, evidence.frame.line)
    if loop is not None and loop.kind == "while":
        why = f"busy in a while loop (line {loop.line}) {here}"
        return _finding(evidence, "slow", "livelock", why, "if this loop cannot end, fix it; it is given patience")
    if loop is not None and evidence.slot.span == "compute":
        why = f"alive: a Python loop over `{loop.text}` (line {loop.line}) in {evidence.frame.func} runs {here}"
        advice = "replace the loop by tensor operations: it runs once per step for every item"
        return replace(
            _finding(evidence, "slow", "python_loop", why, advice), left_s=counted.left_s if counted else None
        )
    found = _finding(evidence, "slow", "running", f"alive, running {here}", "wait, or look at that line")
    return replace(found, left_s=counted.left_s if counted else None)


def _deadlocked(evidence: Evidence) -> Diagnosis | None:
    """Every thread of the user's waits for a lock without a time limit, and nothing moves."""
    if evidence.newest is None or evidence.seconds < 0.9 or evidence.sampler_silent or len(evidence.stacks) < 2:
        return None
    main, *others = evidence.newest.threads
    mine = [main, *(t for t in others if t.name not in OUR_THREADS and not _only_waits(t))]
    before = {thread.name: thread.frames[:1] for thread in evidence.stacks[0].threads}
    if any(before.get(thread.name) != thread.frames[:1] for thread in mine):
        return None
    if evidence.main_thread is None or not _waits_for_a_lock(evidence.main_thread):
        return None
    waiting = [(thread.name, frame) for thread in mine if (frame := culprit(thread)) is not None]
    if not all(_acquires(thread) for thread in mine):
        return None
    alone_on_a_soft_wait = len(waiting) == 1 and text_of_wait(waiting[0][1]) in SOFT_WAITS
    if alone_on_a_soft_wait and not evidence.counts:
        return None  # a script that has never counted any work: a daemon that waits for a signal looks the same
    lines = "; ".join(f"{name} at {frame.short}" for name, frame in waiting)
    kind = (
        f"{len(waiting)} threads wait for each other's locks"
        if len(waiting) > 1
        else "the only thread waits for a lock that nobody holds"
    )
    why, proved = f"{kind}: {lines}; {evidence.words()}", not alone_on_a_soft_wait
    return _finding(evidence, "stuck", "deadlock", why, "take the locks in one order", provable=proved)


def _asleep(evidence: Evidence) -> Diagnosis | None:
    if evidence.frame is None or evidence.seconds < 0.9:
        return None
    sleeping = evidence.main_thread is not None and evidence.main_thread.syscall in NANOSLEEP
    behind = f", waiting for {evidence.look.waits_on}" if evidence.look.waits_on else ""
    how = "sleeping" if sleeping else "asleep"
    why = f"{how} at {evidence.frame.short}{behind}, {evidence.words()}{evidence.usually()}"
    return _finding(
        evidence, "slow", "sleep" if sleeping else "waiting", why, "look at that line", path=evidence.look.waits_on
    )


_RULES: tuple[Callable[[Evidence], Diagnosis | None], ...] = (
    _stopped, _uninterruptible, _compiling, _collecting, _holding_the_gil, _moving_slowly, _running, _deadlocked, _asleep,
)  # fmt: skip


# ---------------------------------------------------------------- what the rules ask


def _starved(evidence: Evidence) -> bool:
    before = {thread.tid: thread for thread in evidence.before.look.each}
    ran = starved = 0
    for thread in evidence.look.each:
        earlier = before.get(thread.tid)
        if earlier is not None:
            ran += thread.cpu_ns - earlier.cpu_ns
            starved += thread.starved_ns - earlier.starved_ns
    return starved > _STARVED * max(ran, 1) and starved > 0.2e9 * evidence.seconds


def _only_waits(thread: ThreadStack) -> bool:
    """A library's own thread (a progress bar's, a pool's) that itself waits for a lock: it will not wake anybody."""
    if users_frame(thread) is not None or not thread.frames:
        return False
    innermost = thread.frames[0]
    untimed = innermost.file.endswith(("/threading.py", "/queue.py")) and text_of_wait(innermost) != ""
    return untimed or thread.name == "tqdm_monitor"  # that one looks at its bars every ten seconds, and wakes nobody


def _waits_for_a_lock(thread: ThreadLook) -> bool:
    return thread.syscall == FUTEX or "futex" in thread.wchan


def _acquires(thread: ThreadStack) -> bool:
    """Whether it stands in an untimed wait, as far as the text of its line tells; `with` counts for a lock only."""
    frame = culprit(thread)
    text = text_of_wait(frame) if frame is not None else ""
    return text != "" and (text != "with" or thread.frames[0] == frame or thread.frames[0].func == "acquire")


def text_of_wait(frame: Frame) -> str:
    """The call on this line that waits for another thread without a time limit; empty where there is none."""
    text = _source_line(frame.file, frame.line)
    found = _UNTIMED_WAIT.search(text)
    return "with" if text.startswith("with ") else found.group(1) if found else ""


@dataclass(frozen=True)
class Loop:
    """The innermost loop around a line."""

    kind: str  # for or while
    line: int
    text: str
    counter: str = ""  # the variable of a `for`
    node: ast.For | ast.While | None = field(default=None, compare=False)


@dataclass(frozen=True)
class _LoopProgress:
    """How far a loop has come between two stacks."""

    counter: str
    value: int
    per_s: float
    end: int | None

    @property
    def left_s(self) -> float | None:
        return (self.end - self.value) / self.per_s if self.end is not None and self.per_s > 0 else None

    def words(self) -> str:
        count = f", {self.counter} = {self.value:,}" + (f" of {self.end:,}" if self.end is not None else "")
        left = f", about {duration(self.left_s)} left" if self.left_s is not None else f", {self.per_s:,.0f} a second"
        return count + left


def _loop_progress(evidence: Evidence) -> _LoopProgress | None:
    """From the loop's counter in two stacks; None where it cannot be seen or does not move."""
    if len(evidence.stacks) < 2 or not all(taken.threads for taken in evidence.stacks):
        return None
    for frame in evidence.stacks[-1].threads[0].frames:
        before = next(
            (f for f in evidence.stacks[0].threads[0].frames if (f.file, f.func) == (frame.file, frame.func)), None
        )
        loop = enclosing_loop(frame.file, frame.line) if frame.numbers and before else None
        if loop is None or before is None or loop.counter not in frame.numbers or loop.counter not in before.numbers:
            continue
        seconds = evidence.stacks[-1].at - evidence.stacks[0].at
        moved = frame.numbers[loop.counter] - before.numbers[loop.counter]
        if seconds > 0.1 and moved > 0:
            end = _range_end(loop.node, frame.numbers)
            return _LoopProgress(loop.counter, frame.numbers[loop.counter], moved / seconds, end)
    return None


def _range_end(node: ast.For | ast.While | None, numbers: Mapping[str, int]) -> int | None:
    """The end of `range(...)`, where it is written as a number or as a variable that the stack shows."""
    call = node.iter if isinstance(node, ast.For) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range" and call.args):
        return None
    end = call.args[min(1, len(call.args) - 1)]
    if isinstance(end, ast.Constant) and isinstance(end.value, int):
        return end.value
    return numbers.get(end.id) if isinstance(end, ast.Name) else None


@lru_cache(maxsize=64)
def _parsed(file: str) -> tuple[ast.Module, list[str]] | None:
    try:
        text = Path(file).read_text()
        return ast.parse(text), text.splitlines()
    except (OSError, SyntaxError, UnicodeDecodeError):  # not there, or no Python: no loop is known then
        return None


def _source_line(file: str, line: int) -> str:
    parsed = _parsed(file)
    return parsed[1][line - 1].strip() if parsed and 0 < line <= len(parsed[1]) else ""


def enclosing_loop(file: str, line: int) -> Loop | None:
    """The innermost `for` or `while` whose body or head holds the line."""
    parsed = _parsed(file)
    if parsed is None:
        return None
    found: Loop | None = None
    for node in ast.walk(parsed[0]):
        if isinstance(node, ast.For | ast.While) and node.lineno <= line <= (node.end_lineno or node.lineno):
            kind = "for" if isinstance(node, ast.For) else "while"
            text = ast.unparse(node.iter) if isinstance(node, ast.For) else ast.unparse(node.test)
            if found is None or node.lineno >= found.line:
                target = node.target if isinstance(node, ast.For) else None
                found = Loop(kind, node.lineno, text, target.id if isinstance(target, ast.Name) else "", node)
    return found
