"""Verdicts on a process tree: who waits for whom, and which process is at the end of the chain. Pure functions.

In:  a GroupSample: two looks at the tree, the stacks of each process, what is usual.
Out: a Diagnosis whose culprit is a worker, a rank or a line. `judge` asks RULES in order, and the first that fits wins; the
     last of them asks the rules for one process (diagnosis.py). Also: verdicts on processes that have ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lamplighter.procs.procfs import not_known
from lamplighter.procs.stacks import Stacks, ThreadStack, own_frames, users_frame
from lamplighter.report import Verdict
from lamplighter.slot import Slot
from lamplighter.watch.diagnosis import BUSY, SOFT_WAITS, Diagnosis, judge_process, text_of_wait
from lamplighter.watch.evidence import GroupSample
from lamplighter.watch.process_tree import Exit, Process, Snapshot
from lamplighter.watch.status import duration

_SAME_EVERYWHERE = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "barrier", "reduce")
_OPEN_S = 1.8  # a fetch or a collective that lasts so long, while nothing else is counted, is what is waited for
_RECENT_S = 600.0


def judge(sample: GroupSample) -> Diagnosis | None:
    """The first rule that fits; None where nothing can be said yet."""
    if not sample.last.processes:
        return None
    return next((found for rule in _RULES if (found := rule(sample)) is not None), None)


def _finding(
    sample: GroupSample,
    process: Process,
    state: str,
    cause: str,
    why: str,
    next: str,
    provable: bool = False,
    **more: object,
) -> Diagnosis:
    culprit = sample.culprit(process, sample.frame(process))
    evidence = (
        f"{process.words} {process.look.words}, {sample.cpu_share(process):.0%} of a core",
        f"waits in {process.look.wchan}" if process.look.wchan.strip("0") else not_known(process.look),
    )
    verdict = Verdict(
        state, cause, why, next, "none", evidence=tuple(filter(None, evidence)), culprit={**culprit, **more}
    )
    return Diagnosis(replace(verdict, since_s=round(sample.last.stalled_s, 2)), provable)


# ---------------------------------------------------------------- the rules, in order


def _part_stopped(sample: GroupSample) -> Diagnosis | None:
    """Part of the tree is stopped by a signal. Where all of it is, a person may have pressed Ctrl+Z."""
    halted = [process for process in sample.last.processes if process.look.stopped]
    if not halted or len(halted) == len(sample.last.processes):
        return None
    one = halted[0]
    cause = "worker_sigstop" if one.worker >= 0 else "rank_sigstop" if one.rank >= 0 else "stopped"
    waiting = next(
        (m for m in sample.last.processes if m.slot and (m.slot.in_fetch or m.slot.in_coll) and m not in halted), None
    )
    waits = f"; {waiting.words} waits for it{_in_what(waiting)}{sample.at(waiting)}" if waiting else ""
    item = f" in item {one.slot.item}" if one.slot and one.slot.in_item else ""
    why = f"{one.words} is stopped by a signal{item}{waits}"
    return _finding(sample, one, "stuck", cause, why, next=f"kill -CONT {one.pid}", provable=False)


def _in_what(process: Process) -> str:
    return f" in {process.slot.coll}" if process.slot and process.slot.in_coll else ""


def _ranks_of(snapshot: Snapshot) -> list[Process]:
    """One process for each rank: the one that trains, not its loader's workers."""
    found: dict[int, Process] = {}
    for process in snapshot.processes:
        if process.slot is not None and process.rank >= 0 and process.worker < 0 and not process.slot.forked:
            known = found.get(process.rank)
            if known is None or _weight(process) > _weight(known):
                found[process.rank] = process
    return [found[rank] for rank in sorted(found)]


def _weight(process: Process) -> int:
    return process.slot.coll_seq + process.slot.step + process.slot.in_coll if process.slot else 0


def _late_rank(sample: GroupSample) -> Diagnosis | None:
    """Some ranks are in a collective; the one behind them is the culprit."""
    ranks = _ranks_of(sample.last)
    waiting = [m for m in ranks if m.slot and m.slot.in_coll and sample.last.at - m.slot.coll_since_ns / 1e9 > _OPEN_S]
    if not waiting or len(ranks) < 2:
        return None
    ahead = max(waiting, key=lambda m: m.slot.coll_seq if m.slot else 0)
    assert ahead.slot is not None
    behind = [m for m in ranks if m.slot and (m.slot.coll_seq < ahead.slot.coll_seq or not m.slot.in_coll)]
    if not behind:
        return _other_collective(sample, waiting)
    one = min(behind, key=lambda m: m.slot.coll_seq if m.slot else 0)
    busy = _is_busy(sample, one)
    if not busy and _in_backward(sample.main_stack(one)):
        return _uneven(sample, one, ahead)
    doing = "is busy" if busy else "sleeps"
    why = (
        f"rank {one.rank} {doing}{sample.at(one)} and has not entered collective {ahead.slot.coll_seq}"
        f" ({ahead.slot.coll}); rank {ahead.rank} waits in it at {_short(ahead.slot.coll_at)}, {sample.words()}"
    )
    advice = "every rank must reach the same collectives: look at that line of the late rank"
    return _finding(
        sample, one, "slow" if busy else "stuck", "rank_late", why, next=advice, provable=False, waits=ahead.rank
    )


def _uneven(sample: GroupSample, one: Process, ahead: Process) -> Diagnosis:
    """One waits in the backward pass (a collective inside C++), the other has gone on: they make different numbers of steps."""
    assert one.slot is not None and ahead.slot is not None
    why = (
        f"rank {ahead.rank} has left its loop after {ahead.slot.step} steps and waits in {ahead.slot.coll} at"
        f" {_short(ahead.slot.coll_at)}; rank {one.rank} is in the backward pass of step {one.slot.step + 1}{sample.at(one)}"
        f" and waits for it: the ranks have different numbers of batches, {sample.words()}"
    )
    advice = "give every rank the same number of batches (drop_last, DistributedSampler), or use Join"
    return _finding(sample, ahead, "stuck", "rank_uneven", why, next=advice, provable=True, waits=one.rank)


def _other_collective(sample: GroupSample, waiting: Sequence[Process]) -> Diagnosis | None:
    """All ranks are inside, in different ones."""
    calls = {m.slot.coll: m for m in waiting if m.slot}
    moving = any(_is_busy(sample, m) for m in waiting)
    if len(calls) < 2 or moving or any(call.split()[0] not in _SAME_EVERYWHERE for call in calls):
        return None
    words = "; ".join(f"rank {m.rank} in {call} at {_short(m.slot.coll_at)}" for call, m in calls.items() if m.slot)
    names = {call.split()[0] for call in calls}
    cause = "rank_order" if len(names) > 1 else "rank_shape"
    advice = "make every rank call the same collective with the same shape"
    return _finding(
        sample,
        waiting[-1],
        "stuck",
        cause,
        f"the ranks call different collectives: {words}",
        next=advice,
        provable=True,
    )


def _outlier_rank(sample: GroupSample) -> Diagnosis | None:
    """Collectives inside C++ (DDP) are not counted: group the ranks by their stacks; who stands apart is the culprit."""
    ranks = _ranks_of(sample.last)
    groups = _group_by_line([(m, sample.main_stack(m)) for m in ranks])
    if len(ranks) < 2 or len(groups) < 2:
        return None
    waits = [key for key, processes in groups.items() if any(_in_backward(sample.main_stack(m)) for m in processes)]
    apart = [key for key in groups if key not in waits]
    if not waits or not apart:
        return None
    one, other = min((groups[key] for key in apart), key=len)[0], groups[waits[0]][0]
    busy = _is_busy(sample, one)
    why = (
        f"rank {one.rank} {'is busy' if busy else 'sleeps'}{sample.at(one)}; rank {other.rank} waits for it in the"
        f" backward pass{sample.at(other)}, {sample.words()}"
    )
    advice = "every rank must make the same number of steps: look at that line of the late rank"
    return _finding(sample, one, "slow" if busy else "stuck", "rank_late", why, next=advice, waits=other.rank)


def _group_by_line(stacks: Sequence[tuple[Process, ThreadStack | None]]) -> dict[str, list[Process]]:
    """Peers that stand at the same line of the user's code belong together."""
    groups: dict[str, list[Process]] = {}
    for process, stack in stacks:
        frame = users_frame(stack) if stack else None
        if frame is not None:
            groups.setdefault(f"{frame.file}:{frame.line}", []).append(process)
    return groups


def _in_backward(stack: ThreadStack | None) -> bool:
    return stack is not None and any(frame.func in ("_engine_run_backward", "backward") for frame in stack.frames)


def _waiting_for_worker(sample: GroupSample) -> Diagnosis | None:
    """The main process waits for a batch: the worker that has it in hands is the end of the chain."""
    for main in sample.last.processes:
        slot = main.slot
        if slot is None or not slot.in_fetch or not slot.loader_workers:
            continue
        if sample.last.at - slot.fetch_since_ns / 1e9 < _OPEN_S:
            continue
        workers = [m for m in sample.last.processes if m.ppid == main.pid and m.slot and m.slot.in_item]
        wanted = [m for m in workers if m.worker == slot.wait_worker] or workers
        if wanted:
            return _about_worker(sample, main, wanted[0])
    return None


def _about_worker(sample: GroupSample, main: Process, worker: Process) -> Diagnosis | None:
    assert worker.slot is not None
    since = duration(sample.last.at - worker.slot.item_since_ns / 1e9)
    where = f"worker {worker.worker} has been{sample.at(worker)} (item {worker.slot.item}) for {since}"
    waits = f"the main process waits for it{sample.at(main)}"
    busy = _is_busy(sample, worker)
    frame = sample.frame(worker)
    if sample.is_silent(worker):
        why = f"{where}; it holds the GIL in a C call, {'busy' if busy else 'asleep'}; {waits}"
        advice = "look at that line and that item: a regular expression or a C call that takes for ever"
        return _finding(sample, worker, "slow", "worker_gil", why, next=advice)
    if _moves_bytes(sample, worker) and sample.cpu_share(worker) < 0.5:
        return _finding(sample, worker, "slow", "slow_disk", f"{where}, reading slowly; {waits}", next="a faster disk")
    if busy:
        why = f"{where}, {sample.cpu_share(worker):.0%} of a core; {waits}"
        return _finding(
            sample, worker, "slow", "slow_worker", why, next="wait, or make that item cheaper; more workers help"
        )
    if frame is not None and text_of_wait(frame) and worker.slot.forked_beside:
        taken = "; ".join(_short(place) for place in worker.slot.forked_beside.split("; "))
        why = f"{where}, waiting for a lock that was held when it was forked (taken by: {taken}); {waits}"
        advice = "start the workers before the threads, or use multiprocessing_context='spawn'"
        return _finding(sample, worker, "stuck", "fork_lock", why, next=advice, provable=True)
    why = f"{where}, asleep; {waits}"
    return _finding(
        sample, worker, "stuck", "worker_hang", why, next=f"look at item {worker.slot.item} and at that line"
    )


def _is_busy(sample: GroupSample, process: Process) -> bool:
    """It, or anybody that it has started, computes or moves bytes."""
    theirs, grew = {process.pid}, True
    while grew:
        more = {m.pid for m in sample.last.processes if m.ppid in theirs} - theirs
        theirs, grew = theirs | more, bool(more)
    family = [m for m in sample.last.processes if m.pid in theirs]
    return any(sample.cpu_share(m) > BUSY or _moves_bytes(sample, m) for m in family)


def _moves_bytes(sample: GroupSample, process: Process) -> bool:
    before = sample.first.process(process.pid)
    if before is None:
        return False
    return process.moved_bytes - before.moved_bytes > 20_000 * sample.seconds


def _child_lost(sample: GroupSample) -> Diagnosis | None:
    """Everybody sleeps, and one that was there was killed: a pool that waits for its answer for ever."""
    if sum(sample.cpu_share(m) for m in sample.last.processes) > BUSY:
        return None
    ended = [one for one in sample.last.exits if one.code != 0 and sample.last.at - one.at < _RECENT_S]
    known = [one for one in ended if one.code is not None]
    at_work = [m for m in sample.last.processes if m.ppid and sample.frame(m) is not None]
    ended = known or (ended if not at_work else [])
    for main in sample.last.processes:
        stack = sample.main_stack(main)
        waits = stack is not None and any("multiprocessing/pool.py" in f.file for f in own_frames(stack))
        if waits and ended and sample.frame(main) is not None and not _moves_bytes(sample, main):
            one = ended[-1]
            why = (
                f"a process of the pool ({one.pid}) {_how_it_ended(one)} and its answer will never come;"
                f" the main process waits{sample.at(main)}, {sample.words()}"
            )
            advice = "find out why it died (memory?); concurrent.futures raises BrokenProcessPool instead of waiting"
            return _finding(
                sample,
                main,
                "stuck",
                "pool_child_lost",
                why,
                next=advice,
                provable=True,
                lost=one.pid,
                signal=-(one.code or 0),
            )
    return None


def _anybody(sample: GroupSample) -> Diagnosis | None:
    """Nobody waits for a known unit: the busiest, else whoever stands in the user's code, deepest first."""
    processes = [m for m in sample.last.processes if m.slot is not None or m.pid in sample.stacks]
    busiest = max(processes, key=sample.cpu_share, default=None)
    if busiest is not None and sample.cpu_share(busiest) > BUSY:
        return _as_one(sample, busiest)
    standing = [m for m in processes if sample.frame(m) is not None]
    standing.sort(key=lambda m: (not _is_idle(sample, m), m.ppid != 0, m.pid), reverse=True)
    found = [finding for m in standing if (finding := _as_one(sample, m)) is not None]
    proved = next((one for one in found if one.provable), None)
    return proved or (found[0] if found else _as_one(sample, sample.last.processes[0]))


def _is_idle(sample: GroupSample, process: Process) -> bool:
    """Waiting for its own children is no fault of its own."""
    stack = sample.main_stack(process)
    words = ("subprocess.py", "multiprocessing/", "multiprocess/", "concurrent/", "popen_fork.py", "elastic/")
    return stack is not None and any(word in stack.frames[0].file for word in words if stack.frames)


def _as_one(sample: GroupSample, process: Process) -> Diagnosis | None:
    """The rules for one process, with everybody else's CPU and bytes counted in."""
    found = judge_process(sample, process)
    if found is None:
        return None
    frame = sample.frame(process)
    cause = found.verdict.cause
    if cause == "deadlock" and frame is not None and text_of_wait(frame) in SOFT_WAITS:
        cause = "dead_producer"
    who = f"{process.words}: " if process.pid != sample.last.processes[0].pid else ""
    stack = sample.main_stack(process)
    says_itself = process.slot is not None and bool(process.slot.phase)
    phase = phase_from_stack(stack) if stack and not says_itself else ""
    verdict = replace(
        found.verdict,
        cause=cause,
        why=who + (f"{phase}: " if phase else "") + found.verdict.why,
    )
    return replace(found, verdict=verdict)


_RULES: tuple[Callable[[GroupSample], Diagnosis | None], ...] = (
    _part_stopped, _late_rank, _outlier_rank, _waiting_for_worker, _child_lost, _anybody,
)  # fmt: skip


_PHASES = (  # (part of a frame's file, part of its function, what that is); the innermost frame that fits decides
    ("torch/_inductor", "", "compiling"),
    ("torch/_dynamo", "compile", "compiling"),
    ("importlib", "_find_and_load", "importing"),
    ("safetensors", "load", "loading weights"),
    ("torch/serialization", "load", "loading weights"),
    ("", "from_pretrained", "loading weights"),
    ("", "load_state_dict", "loading weights"),
    ("safetensors", "save", "saving"),
    ("torch/serialization", "save", "saving"),
    ("", "save_pretrained", "saving"),
    ("huggingface_hub/", "download", "downloading"),
    ("http/client.py", "", "downloading"),
    ("urllib", "", "downloading"),
    ("requests/", "", "downloading"),
    ("tokeniz", "", "tokenising"),
    ("", "tokenize", "tokenising"),
    ("datasets/arrow_dataset.py", "map", "mapping a dataset"),
    ("torch/utils/data", "", "waiting for a batch"),
    ("torch/distributed", "", "in a collective"),
    ("", "evaluation_loop", "evaluating"),
    ("", "evaluate", "evaluating"),
)


def phase_from_stack(stack: ThreadStack) -> str:
    """What a script is in, by the libraries and functions that it stands in; empty where none tells."""
    for frame in own_frames(stack):
        for file, func, phase in _PHASES:
            if file in frame.file and func in frame.func:
                return phase
    return ""


def storm_verdict(process: Process, count: int, seconds: float, taken: Stacks | None) -> Verdict:
    """Many compiles in a short time: each new shape costs one."""
    frame = users_frame(taken.threads[0]) if taken and taken.threads else None
    where = f" at {frame.short}" if frame else ""
    now = process.slot.compile_id if process.slot else ""
    culprit = {"pid": process.pid, **(frame.fields() if frame else {})}
    why = f"recompiled {count} times within {duration(seconds)}{where} (now {now}): a new shape or value each time"
    advice = "feed a few fixed lengths (buckets), or torch._dynamo.mark_dynamic; TORCH_LOGS=recompiles shows the guard"
    return Verdict("slow", "recompile_storm", why, advice, "none", evidence=(), culprit=culprit)


# ---------------------------------------------------------------- those who have ended


def _how_it_ended(ended: Exit) -> str:
    if ended.code is None:
        return "ended (how, the kernel does not say)"
    if ended.code < 0:
        memory = ", for memory" if ended.out_of_memory else ", not for memory"
        return f"was killed by signal {-ended.code}" + (memory if ended.code == -9 else "")
    return f"exited with {ended.code}"


def death_verdict(ended: Exit) -> Verdict | None:
    """A loader's worker or a rank that ends before its time; others are somebody's own business."""
    slot = ended.slot
    if slot is None or not ended.code or (slot.worker < 0 and slot.rank < 0):
        return None
    culprit: dict[str, object] = {"pid": ended.pid, "signal": max(0, -ended.code), "code": max(0, ended.code)}
    if slot.worker >= 0:
        cause = "worker_exit" if ended.code > 0 else "worker_sigkill"
        if ended.code == -7:
            cause = "shm_small"
        elif ended.out_of_memory:
            cause = "worker_oom"
        culprit |= {"worker": slot.worker, "item": slot.item}
        why = f"worker {slot.worker} (process {ended.pid}) {_how_it_ended(ended)} at item {slot.item}"
        return Verdict("dead", cause, why, _advice(cause), "none", evidence=(), culprit=culprit)
    why = f"rank {slot.rank} (process {ended.pid}) {_how_it_ended(ended)} after {slot.step} steps, collective {slot.coll_seq}"
    cause = "rank_sigkill" if ended.code == -9 else "rank_exit"
    return Verdict(
        "dead",
        cause,
        why,
        "look at what that rank printed last",
        "none",
        evidence=(),
        culprit={**culprit, "rank": slot.rank},
    )


_WORKER_ERROR = re.compile(r"(?:Caught (\w+) in DataLoader worker process (\d+))")


def error_verdict(slot: Slot, slots: Mapping[int, Slot]) -> Verdict:
    """An uncaught exception: named by what it says, and by whom it happened to."""
    text, cause = slot.error, "exception"
    culprit: dict[str, object] = {"pid": slot.pid}
    if place := re.search(r"\(([^()]+):(\d+)\)$", text):
        culprit |= {"file": place.group(1), "line": int(place.group(2))}
    where = _WORKER_ERROR.search(text)
    worker = int(where.group(2)) if where else slot.worker
    theirs = next((one for one in slots.values() if one.worker == worker >= 0), None)
    if theirs is not None:
        said = re.match(r"item (.*?): ", theirs.error)
        culprit |= {"worker": worker, "item": said.group(1) if said else theirs.item, "pid": theirs.pid}
        if place := re.search(r"\(([^()]+):(\d+)\)$", theirs.error):
            culprit |= {"file": place.group(1), "line": int(place.group(2))}
        text = theirs.error.split(": ", 1)[-1] if said else text
    if any(word in text for word in ("MemoryError", "allocate memory", "DefaultCPUAllocator")):
        cause = "worker_oom" if worker >= 0 else "rss_oom"
    elif any(word in text for word in ("shared memory", "shm", "Bus error")):
        cause = "shm_small"
    elif "pickle" in text.lower():
        cause = "spawn_pickle"
    who = f"worker {worker}, item {culprit.get('item')}: " if worker >= 0 else ""
    return Verdict("dead", cause, f"{who}{text}", _advice(cause), "none", evidence=(), culprit=culprit)


def _advice(cause: str) -> str:
    return {
        "worker_sigkill": "look for who sent it: the kernel's log (dmesg), a job limit, a person",
        "worker_oom": "fewer workers, or smaller items; look at memory",
        "worker_exit": "the dataset has left by itself (sys.exit, os._exit): look at that item",
        "spawn_pickle": "name the function at module level instead of a lambda, or use fork",
        "rss_oom": "a smaller batch, or a machine with more memory",
        "exception": "look at that line",
        "shm_small": "enlarge /dev/shm (docker run --shm-size=2g), fewer workers, or smaller batches",
    }.get(cause, "look at that item")


def _short(place: str) -> str:
    """/long/way/to/train.py:88 -> to/train.py:88."""
    return "/".join(Path(place).parts[-2:])
