"""Slow, stuck or dead, for one process of a tree: pure functions from what was seen to what it means.

In:  Evidence: a GroupSample (two looks at the tree, the stacks taken between them) and the process that is asked about.
Out: a Diagnosis: a verdict in the form of every verdict, and whether it is proved that nobody can end the wait.

`judge_process` asks RULES in order, and the first that fits wins. The order carries the meaning: what needs no stacks comes
first (uninterruptible, compiling, collecting garbage), then a GIL that is held, then bytes that move, then CPU that is used.
Where none fits, everybody is asleep, and wait_chain.py tells for what. A rule reads nothing but its Evidence and the source
of the lines that the stacks name, so that a verdict can be given again from the file that evidence.py keeps.

*Provable* means that the policy may act after a short grace; all other findings only after the user's patience.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lamplighter import device_faults
from lamplighter.procs.nvml import GpuLook
from lamplighter.procs.procfs import COMPILERS, NANOSLEEP, WRITE, ProcessLook, not_known
from lamplighter.procs.stacks import Frame, Stacks, ThreadStack, culprit
from lamplighter.report import Verdict
from lamplighter.slot import Slot
from lamplighter.watch.evidence import BUSY, GroupSample
from lamplighter.watch.process_tree import Process
from lamplighter.watch.source_lines import enclosing_loop
from lamplighter.watch.status import duration

_WORKERS = {"data/stream.py": "lamp-stream", "train/checkpointer.py": "lamp-writer"}  # who works while this file waits
_SLOW_BYTES_PER_S = 2e6
_CARD_BUSY = 0.9  # a kernel that does not end keeps a card at 100 %
_KERNEL_S, _KERNEL_TIMES = 5.0, 5.0  # no step for so long, and for so many times as long as usual
_FIRST_KERNEL_S = 120.0  # where no step was made yet: first kernels are compiled, tuned and loaded
_LEAST_BYTES_PER_S = 8192.0  # less is bookkeeping, and no input that anybody waits for


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
        if self.verdict.cause == "starved":  # by whatever line it happens to be
            return "starved"
        if (
            self.verdict.cause == "rank_sigstop"
        ):  # several may be stopped at once, and one that is left becomes another rank
            return f"rank_sigstop of process {where.get('pid')}"
        return f"{self.verdict.cause} {where.get('file')}:{where.get('line')}"

    @property
    def kind(self) -> str:
        """What happens again and again in a healthy run: busy or asleep, in the same function."""
        where = self.verdict.culprit
        if self.verdict.cause == "starved":
            return "starved"
        busy = self.verdict.state in ("slow", "starved")
        return f"{'busy' if busy else 'asleep'} {where.get('file')}:{where.get('func')}"


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
    def seconds(self) -> float:
        return self.sample.seconds

    @property
    def cpu_share(self) -> float:
        return max(0.0, self.sample.last.cpu_s - self.sample.first.cpu_s) / self.seconds  # less when a child has ended

    @property
    def own_share(self) -> float:
        """Of the first process its tree's share: what it starts works for it."""
        is_first = self.process.pid == self.sample.last.processes[0].pid
        return self.cpu_share if is_first else self.sample.cpu_share(self.process)

    @property
    def bytes_per_s(self) -> float:
        return max(0, self.sample.last.moved_bytes - self.sample.first.moved_bytes) / self.seconds

    @property
    def is_writing(self) -> bool:
        """Whether its main thread was in a call that writes, at both looks."""
        return self.before.look.syscall == self.look.syscall == WRITE

    @property
    def compilers(self) -> list[ProcessLook]:
        others = (process.look for process in self.sample.last.processes if process.pid != self.process.pid)
        return [look for look in others if look.name in COMPILERS]

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
    def busiest_stack(self) -> ThreadStack | None:
        """The thread that used most of the core between the looks; the main one where it is not known."""
        before = {thread.tid: thread.cpu_ns for thread in self.before.look.each}
        used = {thread.tid: thread.cpu_ns - before.get(thread.tid, thread.cpu_ns) for thread in self.look.each}
        stacks = {thread.tid: thread for thread in self.newest.threads if thread.tid} if self.newest else {}
        busiest = max(stacks, key=lambda tid: used.get(tid, 0), default=0)
        main_ns = used.get(self.look.pid, 0)
        return stacks[busiest] if used.get(busiest, 0) > 4 * max(main_ns, 1_000_000) else self.main_stack

    @property
    def frame(self) -> Frame | None:
        return culprit(self.main_stack) if self.main_stack else None

    @property
    def busy_card(self) -> GpuLook | None:
        """The card that it computes on, if that is busy and nobody else is on it; where the driver does not say who is, a
        process that waits for a card is at least on a core itself.
        """
        pids = {process.pid for process in self.sample.last.processes}
        spins = self.own_share >= BUSY
        busy = (card for card in self.sample.cards if card.util >= _CARD_BUSY and (card.processes or spins))
        return next((card for card in busy if all(pid in pids for pid, _ in card.processes)), None)

    @property
    def stands_still(self) -> bool:
        """Whether its main thread was at the same place in two stacks."""
        if len(self.stacks) < 2 or not all(taken.threads for taken in self.stacks):
            return False
        before, now = ([(f.file, f.line, f.func) for f in taken.threads[0].frames] for taken in self.stacks)
        return before == now

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


def finding(
    sample: GroupSample,
    process: Process,
    state: str,
    cause: str,
    why: str,
    next: str,
    provable: bool = False,
    **more: object,
) -> Diagnosis:
    """One about a process of the tree, with its line as the culprit."""
    culprit = sample.culprit(process, sample.frame(process))
    evidence = (
        f"{process.words} {process.look.words}, {sample.cpu_share(process):.0%} of a core",
        f"waits in {process.look.wchan}" if process.look.wchan.strip("0") else not_known(process.look),
    )
    verdict = Verdict(
        state, cause, why, next, "none", evidence=tuple(filter(None, evidence)), culprit={**culprit, **more}
    )
    return Diagnosis(replace(verdict, since_s=round(sample.last.stalled_s, 2)), provable)


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
    child = f" (now {evidence.compilers[0].name}, process {evidence.compilers[0].pid})" if evidence.compilers else ""
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
    if not evidence.slot.collecting or (evidence.cpu_share < BUSY and evidence.seconds >= 0.9):
        return None  # asleep in the midst of it: a finaliser waits for something
    return _finding(
        evidence, "slow", "gc", f"Python collects garbage, {evidence.words()}", "wait; gc.freeze() after loading helps"
    )


def _moving_slowly(evidence: Evidence) -> Diagnosis | None:
    """Bytes move, the process mostly waits for them: input-bound."""
    if evidence.bytes_per_s < _LEAST_BYTES_PER_S or evidence.cpu_share > 0.5 or evidence.seconds < 0.9:
        return None
    if evidence.before.look.syscall in NANOSLEEP and evidence.look.syscall in NANOSLEEP:
        return None  # it sleeps by a timer, and waits for no byte
    if evidence.bytes_per_s > _SLOW_BYTES_PER_S:
        return _finding(
            evidence, "slow", "io", f"{evidence.bytes_per_s / 1e6:.1f} MB/s are moved, {evidence.words()}", "wait"
        )
    path = evidence.look.waits_on or evidence.slot.phase_item
    where = f" at {evidence.frame.short}" if evidence.frame else ""
    rate, waits = (
        f"{evidence.bytes_per_s / 1e6:.3f} MB/s",
        f"the process waits {1 - evidence.cpu_share:.0%} of the time",
    )
    if evidence.is_writing:
        why = f"output-bound: {rate} to {path or 'a file'}{where}; {waits}"
        return _finding(
            evidence, "slow", "slow_output", why, "look at who reads it, or write to a faster disk", path=path
        )
    why = f"input-bound: {rate} from {path or 'a file'}{where}; {waits}"
    return _finding(evidence, "slow", "slow_disk", why, "copy the data to a faster disk", path=path)


def _holding_the_gil(evidence: Evidence) -> Diagnosis | None:
    """The listener cannot answer: a C call keeps the GIL, asleep or busy."""
    threads = evidence.newest.threads if evidence.newest else ()
    holding = next((thread for thread in threads if thread.holds_gil), evidence.main_stack)
    frame = culprit(holding) if holding else None
    if not evidence.sampler_silent or holding is None or holding.holds_gil is False or frame is None:
        return None
    who = f" of thread {holding.name}" if holding is not evidence.main_stack else ""
    why = f"the GIL is held by a C call{who} at {frame.short}, process {evidence.look.words}, {evidence.words()}{evidence.usually()}"
    advice = "no other Python thread can run until it returns; look at that line"
    return _finding(evidence, "slow", "gil_hold", why, advice, **frame.fields())


def waits_for_gpu(sample: GroupSample, process: Process) -> bool:
    """Whether its card computes while its main thread stands still."""
    evidence = Evidence(sample, process)
    return evidence.busy_card is not None and evidence.stands_still


def _waiting_for_gpu(evidence: Evidence) -> Diagnosis | None:
    """A card computes and the thread that wants its answer stands still: a long step, or a kernel that does not end."""
    card = evidence.busy_card
    if card is None or not evidence.stands_still or evidence.frame is None:
        return None
    where, busy = evidence.frame.short, f"GPU {card.index} ({card.name}) is in use for {card.util:.0%} of the time"
    is_first = not evidence.usual_s and evidence.slot.phase != "train"
    if evidence.stalled_s < (_FIRST_KERNEL_S if is_first else max(_KERNEL_S, _KERNEL_TIMES * evidence.usual_s)):
        why = f"waits for the GPU at {where}, {evidence.words()}{evidence.usually()}; {busy}"
        found = _finding(evidence, "slow", "gpu_wait", why, "wait: the card computes")
    else:
        why = f"waits for the GPU at {where}, {evidence.words()}{evidence.usually()}: a kernel does not end, or a step is far longer than all before; {busy}"
        advice = f"wait if this step may take so long; {device_faults.FAULTS['hung_kernel'].advice}"
        found = _finding(evidence, "waiting", "hung_kernel", why, advice)
    holder = {"kind": "gpu", "holder": f"GPU {card.index}"}
    return replace(found, verdict=replace(found.verdict, waits_for=holder))


def _running(evidence: Evidence) -> Diagnosis | None:
    """The thread that uses the core is named, and not one that waits for it."""
    busiest = evidence.busiest_stack
    frame = culprit(busiest) if busiest else None
    if evidence.own_share < BUSY or busiest is None or frame is None or keeps_house(busiest):
        return None
    counted = _loop_progress(evidence)
    far = counted.words() if counted else evidence.usually()
    who = "" if busiest is evidence.main_stack else f"thread {busiest.name} "
    here = f"{who}at {frame.short}, {evidence.cpu_share:.0%} of a core, {evidence.words()}{far}"
    loop = enclosing_loop(frame.file, frame.line)
    if loop is not None and loop.kind == "while":
        why = f"busy in a while loop (line {loop.line}) {here}"
        advice = "if this loop cannot end, fix it; it is given patience"
        return _finding(evidence, "slow", "livelock", why, advice, **frame.fields())
    if loop is not None and evidence.slot.span == "compute":
        why = f"alive: a Python loop over `{loop.text}` (line {loop.line}) in {frame.func} runs {here}"
        advice = "replace the loop by tensor operations: it runs once per step for every item"
        found = _finding(evidence, "slow", "python_loop", why, advice, **frame.fields())
    else:
        found = _finding(
            evidence, "slow", "running", f"alive, running {here}", "wait, or look at that line", **frame.fields()
        )
    return replace(found, left_s=counted.left_s if counted else None)


def keeps_house(stack: ThreadStack) -> bool:
    """A thread by which a pool looks after its processes: that it runs is nobody's work."""
    return any(frame.func.endswith("_handle_workers") for frame in stack.frames)


_RULES: tuple[Callable[[Evidence], Diagnosis | None], ...] = (
    _uninterruptible, _compiling, _collecting, _waiting_for_gpu, _holding_the_gil, _moving_slowly, _running,
)  # fmt: skip


# ---------------------------------------------------------------- what the rules ask


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
