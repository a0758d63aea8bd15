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

from lamplighter.procs.procfs import NANOSLEEP, not_known
from lamplighter.procs.stacks import Stacks, ThreadStack, is_users, own_frames, users_frame
from lamplighter.report import Verdict
from lamplighter.slot import Slot
from lamplighter.watch.diagnosis import BUSY, Diagnosis, judge_process
from lamplighter.watch.evidence import GroupSample, how_it_ended
from lamplighter.watch.process_tree import Exit, Process, Snapshot, counts
from lamplighter.watch.status import duration
from lamplighter.watch.wait_graph import WaitChain, chain_words, closed, follow

_SAME_EVERYWHERE = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "barrier", "reduce")
_MEETING = "init_process_group"
_FREEZERS = ("__refrigerator", "do_freezer_trap")  # where a frozen process sleeps, in both versions of control groups
_OPEN_S = 1.8  # a fetch or a collective that lasts so long, while nothing else is counted, is what is waited for
_ASLEEP_S = 0.9  # two looks at least so far apart
_STARVED_SHARE, _STARVED_TIMES = 0.3, 1.5  # of the time, and as long as it ran


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
    """Part of the tree is stopped by a signal. Where all of a command is, a person may have pressed Ctrl+Z."""
    halted = [process for process in sample.last.processes if process.look.stopped]
    ours = any(process.is_ours for process in halted)
    if not halted or (len(halted) == len(sample.last.processes) and not ours):
        return None
    one = halted[0]
    cause = "worker_sigstop" if one.worker >= 0 else "rank_sigstop" if one.rank >= 0 else "stopped"
    waiting = next(
        (m for m in sample.last.processes if m.slot and (m.slot.in_fetch or m.slot.in_coll) and m not in halted), None
    )
    waiting = waiting or _who_waits_for(sample, one)
    waits = f"; {waiting.words} waits for it{_in_what(waiting)}{sample.at(waiting)}" if waiting else ""
    item = f" in item {one.slot.item}" if one.slot and one.slot.in_item else ""
    why = f"{one.words} is stopped by a signal{item}{waits}"
    found = _finding(sample, one, "stopped", cause, why, next=f"kill -CONT {one.pid}")
    line = (
        sample.frame(waiting) if waiting and sample.frame(one) is None else None
    )  # a program that is no Python has no line
    culprit = {**found.verdict.culprit, **(line.fields() if line else {})}
    holder = {"kind": "child", "what": one.words, "holder": "whoever sent it SIGSTOP"}
    return replace(found, verdict=replace(found.verdict, culprit=culprit, waits_for=holder))


def _frozen(sample: GroupSample) -> Diagnosis | None:
    """Its control group was frozen: nothing in it runs until somebody thaws it."""
    one = next((process for process in sample.last.processes if process.look.wchan in _FREEZERS), None)
    if one is None:
        return None
    why = f"the control group of {one.words} is frozen{sample.at(one)}, {sample.words()}"
    advice = "thaw it: docker unpause, systemctl thaw, or echo 0 > cgroup.freeze"
    found = _finding(sample, one, "stopped", "frozen", why, next=advice)
    return replace(found, verdict=replace(found.verdict, waits_for={"kind": "cgroup", "holder": "whoever froze it"}))


def _who_waits_for(sample: GroupSample, process: Process) -> Process | None:
    for other in _by_interest(sample):
        chain = follow(sample.graph, other.pid, other.pid) if other is not process else None
        if chain is not None and any(
            process.pid in link.thread.wait.peers or link.thread.wait.pid == process.pid for link in chain.links
        ):
            return other
    return None


def _starved(sample: GroupSample) -> Diagnosis | None:
    """Ready to run, and no core is free: other programs have them. Asked before all that time alone would explain."""
    waited = {process.pid: _waited_for_a_core(sample, process) for process in sample.last.processes}
    process = max(sample.last.processes, key=lambda one: waited[one.pid][1])
    ran_s, starved_s = waited[process.pid]
    if starved_s < _STARVED_SHARE * sample.seconds or starved_s < _STARVED_TIMES * ran_s:
        return None
    why = (
        f"other programs take the cores: {process.words} ran for {ran_s:.1f} of the last {sample.seconds:.1f} s and waited for a"
        f" core for {starved_s:.1f} s{sample.at(process)}, {sample.words()}"
    )
    return _finding(
        sample,
        process,
        "starved",
        "starved",
        why,
        next="stop them (top shows who they are), or give it cores of its own",
    )


def _waited_for_a_core(sample: GroupSample, process: Process) -> tuple[float, float]:
    """Seconds that its busiest thread ran, and that it was ready to run."""
    before = sample.first.process(process.pid)
    earlier = {thread.tid: thread for thread in before.look.each} if before else {}
    pairs = [(thread, earlier[thread.tid]) for thread in process.look.each if thread.tid in earlier]
    found = [((now.cpu_ns - then.cpu_ns) / 1e9, (now.starved_ns - then.starved_ns) / 1e9) for now, then in pairs]
    return max(found, key=lambda one: one[1], default=(0.0, 0.0))


def _meeting(sample: GroupSample) -> Diagnosis | None:
    """Ranks wait in init_process_group until all of them are there: who is missing, and where those stand that exist."""
    there = [m for m in sample.last.processes if m.slot and m.slot.in_coll and m.slot.coll.startswith(_MEETING)]
    waiting = [m for m in there if m.slot and sample.last.at - m.slot.coll_since_ns / 1e9 > _OPEN_S]
    if not waiting or any(_is_busy(sample, m) for m in sample.last.processes):
        return None
    one = waiting[0]
    assert one.slot is not None
    missing = sorted(set(range(one.slot.world)) - {m.rank for m in there})
    known = {m.rank: m for m in _ranks_of(sample.last)}
    words = [f"rank {rank} is at{sample.at(known[rank])[3:]}" if rank in known and sample.at(known[rank]) else f"rank {rank} has not come"
             for rank in missing[:4]]  # fmt: skip
    address = one.slot.coll.removeprefix(_MEETING).removeprefix(" at ")
    why = (
        f"{one.words} waits{sample.at(one)} in the rendezvous at {address} for the other ranks:"
        f" {'; '.join(words) if words else f'all of {one.slot.world} are there, and do not reach each other'}, {sample.words()}"
    )
    advice = "start the missing ranks with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE; is the port open between the machines?"
    found = _finding(sample, one, "waiting", "no_peer", why, next=advice)
    holder = ", ".join(f"rank {rank}" for rank in missing[:4]) or "the other ranks"
    return replace(
        found, verdict=replace(found.verdict, waits_for={"kind": "rendezvous", "what": address, "holder": holder})
    )


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
    return _rank_late(sample, one, ahead, busy=busy, why=why, advice=advice)


def _rank_late(sample: GroupSample, one: Process, other: Process, busy: bool, why: str, advice: str) -> Diagnosis:
    """A rank that computes is slow; one that sleeps is waited for, and what it waits for itself is told."""
    chain = follow(sample.graph, one.pid, one.pid)
    proved = not busy and chain is not None and closed(chain.links, sample.unending)
    if chain is not None and not busy and chain.last.kind not in ("timer", "running"):
        why += f"; rank {one.rank} {chain_words(chain)}"
    found = _finding(
        sample,
        one,
        "slow" if busy else "stuck" if proved else "waiting",
        "rank_late",
        why,
        next=advice,
        provable=proved,
        waits=other.rank,
    )
    waits_for = {"kind": "collective", "holder": f"rank {one.rank} (process {one.pid})"}
    return replace(found, verdict=replace(found.verdict, waits_for=waits_for))


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
    return _rank_late(sample, one, other, busy=busy, why=why, advice=advice)


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
    return _about_sleeping_worker(sample, worker, where, waits)


def _about_sleeping_worker(sample: GroupSample, worker: Process, where: str, waits: str) -> Diagnosis:
    """What the worker itself waits for is what everybody waits for."""
    assert worker.slot is not None
    chain = follow(sample.graph, worker.pid, worker.pid)
    proved = chain is not None and closed(chain.links, sample.unending)
    cause, advice = "worker_hang", f"look at item {worker.slot.item} and at that line"
    doing = ", asleep"
    if chain is not None and chain.last.kind != "running":
        doing = f": it {chain_words(chain)}"
        if _cause_of(sample, chain, proved)[0] == "fork_lock":
            cause, advice = "fork_lock", "start the workers before the threads, or use multiprocessing_context='spawn'"
    found = _finding(
        sample,
        worker,
        "stuck" if proved else "waiting",
        cause,
        f"{where}{doing}; {waits}",
        next=advice,
        provable=proved,
    )
    return replace(found, verdict=replace(found.verdict, waits_for=chain.last.fields() if chain else {"kind": "child"}))


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


def _somebody_works(sample: GroupSample) -> Diagnosis | None:
    """The busiest process, or one that compiles, collects garbage, holds the GIL or moves bytes: the rules for one process."""
    processes = [m for m in sample.last.processes if m.slot is not None or m.pid in sample.stacks]
    processes.sort(key=sample.cpu_share, reverse=True)
    for process in processes or sample.last.processes[:1]:
        found = judge_process(sample, process)
        if found is not None:
            return _in_words_of(sample, process, found)
    return None


def _in_words_of(sample: GroupSample, process: Process, found: Diagnosis) -> Diagnosis:
    who = f"{process.words}: " if process.pid != sample.last.processes[0].pid else ""
    stack = sample.main_stack(process)
    says_itself = process.slot is not None and bool(process.slot.phase)
    phase = phase_from_stack(stack) if stack and not says_itself else ""
    verdict = replace(found.verdict, why=who + (f"{phase}: " if phase else "") + found.verdict.why)
    return replace(found, verdict=verdict)


def _all_asleep(sample: GroupSample) -> Diagnosis | None:
    """Nobody works: what is waited for, who has it, and whether anybody is left who could end it."""
    if sample.seconds < _ASLEEP_S:
        return None
    chains = [
        (process, chain)
        for process in _by_interest(sample)
        if (chain := follow(sample.graph, process.pid, process.pid))
    ]
    if not chains:
        return _asleep_somewhere(sample)
    proofs = [one for one in chains if closed(one[1].links, sample.unending)]
    process, chain = (proofs or chains)[0]
    proved = bool(proofs)
    cause, advice = _cause_of(sample, chain, proved)
    links = (
        chain.links if chain.is_cycle else tuple(reversed(chain.links))
    )  # of a cycle the first, else the end of the chain
    named = next((link.thread for link in links if link.thread.frame is not None), None)
    frame = named.frame if named else None
    who = f"{process.words}: " if process.pid != sample.last.processes[0].pid else ""
    whole = f"; {_nobody_left(sample, chain)}" if proved else ""
    lost = _lost(sample, chain)
    why = f"{who}{chain_words(chain)}{lost}{whole}, {sample.words()}{_usually(sample)}"
    found = _finding(sample, process, "stuck" if proved else "waiting", cause, why, next=advice, provable=proved)
    more = {**found.verdict.culprit, **(frame.fields() if frame else {}), **({"pid": named.pid} if named else {})}
    if chain.last.path:
        more["path"] = chain.last.path
    return replace(found, verdict=replace(found.verdict, culprit=more, waits_for=chain.last.fields()))


def _asleep_somewhere(sample: GroupSample) -> Diagnosis | None:
    """Where the system does not tell what a thread waits for: the line alone."""
    process = _by_interest(sample)[0]
    if sample.frame(process) is None:
        return None
    main = next((thread for thread in process.look.each if thread.tid == process.pid), None)
    sleeps = main is not None and main.syscall in NANOSLEEP
    behind = f", waiting for {process.look.waits_on}" if process.look.waits_on else ""
    why = f"{'sleeping' if sleeps else 'asleep'}{sample.at(process)}{behind}, {sample.words()}{_usually(sample)}"
    return _finding(sample, process, "waiting", "sleep" if sleeps else "waiting", why, next="look at that line")


def _by_interest(sample: GroupSample) -> list[Process]:
    """Those that stand in the user's code: first who counts work, then the outermost."""
    standing = [m for m in sample.last.processes if sample.frame(m) is not None]
    standing.sort(key=lambda m: (m.worker >= 0, not (m.slot is not None and counts(m.slot))))
    return standing or list(sample.last.processes[:1])


def _nobody_left(sample: GroupSample, chain: WaitChain) -> str:
    if chain.is_cycle:
        return f"{len(chain.links)} threads wait for each other" if len(chain.links) > 1 else "it waits for itself"
    return "nobody is left who could end it"


def _lost(sample: GroupSample, chain: WaitChain) -> str:
    """A process whose end may be the reason: it was to answer, or to put into a queue."""
    if chain.last.kind not in (
        "pool",
        "queue",
        "process queue",
        "pipe",
        "lock",
        "connection",
        "manager",
        "future",
        "socket",
    ):
        return ""
    gone = sample.graph.gone
    return f"; process {gone[-1].pid} {gone[-1].words} {duration(gone[-1].ago_s)} ago" if gone else ""


def _usually(sample: GroupSample) -> str:
    return f", usually {duration(sample.usual_s)} at most" if sample.usual_s > 0.1 else ""


_ADVICE = {  # by the last link of a chain: cause, advice
    "timer": ("sleep", "look at that line"),
    "thread": ("thread", "look at what that thread does"),
    "child": ("child", "look at what that process does: lamp why PID"),
    "stdin": ("prompt", "answer it, or start the command with its stdin from a file: < /dev/null"),
    "debugger": ("debugger", "type c and Enter at its prompt, or take breakpoint() out"),
    "file lock": ("file_lock", "let that process end or release the lock; lsof shows who has the file open"),
    "import lock": ("import_lock", "import the module in one thread before the others start"),
    "queue": ("dead_producer", "look at who should put into it, or take out of it"),
    "process queue": ("dead_producer", "look at the process that should put into it; get(timeout=...) notices its end"),
    "pool": ("pool", "look at the processes of the pool: lamp why PID"),
    "future": ("future", "look at who should set it; an executor that waits for itself needs more workers"),
    "event": ("event", "look at who should set it"),
    "condition": ("condition", "look at who should notify it"),
    "semaphore": ("semaphore", "look at who should release it"),
    "barrier": ("barrier", "every party must reach it: look at those that have not"),
    "task": ("asyncio", "look at the line that awaits, and at who should wake it"),
    "pipe": ("pipe", "look at the process at the other end"),
    "fifo": ("fifo", "open its other end"),
    "socket": ("socket", "look at the other end; a timeout would notice that it is silent"),
    "connect": ("connect", "is that address right, and does somebody listen there?"),
    "listen": ("listen", "start who should connect, or look at why it does not"),
    "signal": ("signal", "it waits until a signal comes"),
    "lock": ("lock", "look at who holds it"),
}


def _cause_of(sample: GroupSample, chain: WaitChain, proved: bool) -> tuple[str, str]:
    """What is waited for at the end of the chain, by name, and what to do about it."""
    last = chain.last
    locks = all(link.kind in ("lock", "thread", "import lock") for link in chain.links)
    if locks and (chain.is_cycle or proved) and "forked" not in last.holder:
        return "deadlock", "take the locks in one order, and wait for no thread while holding one"
    if last.kind == "lock" and "forked" in last.holder:
        return "fork_lock", "start processes before threads, or use the spawn start method"
    if last.kind == "pool" and sample.graph.gone:
        return (
            "pool_child_lost",
            "find out why it died (memory?); concurrent.futures raises BrokenProcessPool instead of waiting",
        )
    return _ADVICE.get(last.kind, ("waiting", "look at that line"))


_RULES: tuple[Callable[[GroupSample], Diagnosis | None], ...] = (
    _part_stopped, _frozen, _starved, _meeting, _late_rank, _outlier_rank, _waiting_for_worker, _somebody_works, _all_asleep,
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
    ("torch/distributed/distributed_c10d.py", "", "in a collective"),
    ("torch/nn/parallel/distributed.py", "", "in a collective"),
    ("", "evaluation_loop", "evaluating"),
    ("", "evaluate", "evaluating"),
)


def phase_from_stack(stack: ThreadStack) -> str:
    """What a script is in, by the libraries and functions that it stands in; empty where none tells."""
    frames = own_frames(stack)
    importing = next((place for place, frame in enumerate(frames) if "importlib" in frame.file), None)
    if importing is not None and not any(is_users(frame.file) for frame in frames[:importing]):
        return "importing"  # names of libraries below it are their files, and nothing that they do
    for frame in frames:
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


def killed_verdict(pid: int, code: int, out_of_memory: bool, largest_bytes: int) -> Verdict:
    """The command itself was killed: by whom, as far as the kernel's counters tell."""
    memory = (
        f"; the kernel killed a process for memory then, and it had {largest_bytes / 1e9:.2f} GB"
        if out_of_memory
        else ""
    )
    why = f"the command (process {pid}) was killed by signal {-code}{memory}"
    cause = "rss_oom" if out_of_memory else "killed"
    return Verdict("dead", cause, why, _advice(cause), culprit={"pid": pid, "signal": -code})


def failing_children_verdict(main: Process, ended: Sequence[Exit], seconds: float, taken: Stacks | None) -> Verdict:
    """Processes end with an error as fast as they are started: a pool whose initializer fails starts new ones for ever."""
    frame = users_frame(taken.threads[0]) if taken and taken.threads else None
    said = next((one.slot.error for one in reversed(ended) if one.slot and one.slot.error), "")
    why = (
        f"processes are started and end at once, {len(ended)} within {seconds:.0f} s: each {how_it_ended(ended[-1])}"
        f"{f' ({said})' if said else ''}; {main.words} waits{f' at {frame.short}' if frame else ''} for work that they cannot do"
    )
    advice = "look at what they print: the initializer of a pool, or the start of its target, fails again and again"
    culprit = {"pid": main.pid, **(frame.fields() if frame else {})}
    waits_for = {
        "kind": "child",
        "what": "a process of the pool that works",
        "holder": f"processes such as {ended[-1].pid}",
    }
    return Verdict("waiting", "pool_init_fails", why, advice, culprit=culprit, waits_for=waits_for)


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
        why = f"worker {slot.worker} (process {ended.pid}) {how_it_ended(ended)} at item {slot.item}"
        return Verdict("dead", cause, why, _advice(cause), "none", evidence=(), culprit=culprit)
    why = f"rank {slot.rank} (process {ended.pid}) {how_it_ended(ended)} after {slot.step} steps, collective {slot.coll_seq}"
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
        "killed": "look for who sent it: a person, a job limit, the kernel's log (dmesg)",
        "exception": "look at that line",
        "shm_small": "enlarge /dev/shm (docker run --shm-size=2g), fewer workers, or smaller batches",
    }.get(cause, "look at that item")


def _short(place: str) -> str:
    """/long/way/to/train.py:88 -> to/train.py:88."""
    return "/".join(Path(place).parts[-2:])
