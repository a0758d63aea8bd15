"""Verdicts on a process tree: who waits for whom, and which process is at the end of the chain. Pure functions.

In:  a GroupSample: two looks at the tree, the stacks of each process, what is usual.
Out: a Diagnosis whose culprit is a worker, a rank or a line. `judge` asks RULES in order, and the first that fits wins:
     those on ranks are in rank_diagnosis.py, those for one process that works in diagnosis.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lamplighter.procs.procfs import NANOSLEEP
from lamplighter.procs.stacks import ThreadStack, is_users, own_frames
from lamplighter.watch.diagnosis import Diagnosis, finding, judge_process, keeps_house, waits_for_gpu
from lamplighter.watch.evidence import GroupSample
from lamplighter.watch.process_tree import Process, counts
from lamplighter.watch.rank_diagnosis import OPEN_S, late_rank, meeting, outlier_rank
from lamplighter.watch.status import duration
from lamplighter.watch.wait_chain import WaitChain, chain_words, closed, follow, inside_call

_ASLEEP_S = 0.9  # two looks at least so far apart
_STARVED_SHARE, _STARVED_TIMES = 0.45, 1.5  # of the time, and as long as it ran
_RAN_SHARE = 0.05  # of the time that it waited for a core
_MAY_BE_THE_GPU = ("running", "python_loop", "livelock", "waiting")
_STARVED_S = 1.5  # looked at for so long: every start of a program loses a moment to its neighbours


def judge(sample: GroupSample) -> Diagnosis | None:
    """The first rule that fits; None where nothing can be said yet."""
    if not sample.last.processes or sample.last.processes[0].look.state in "ZX":
        return None  # it has just ended, and what a look still shows of it means nothing
    found = next((found for rule in _RULES if (found := rule(sample)) is not None), None)
    return None if found is None or _is_too_early(sample, found) else found


def _is_too_early(sample: GroupSample, found: Diagnosis) -> bool:
    """What a second look may change: starved for a moment; a process beside a busy card, of which one stack is taken."""
    if found.verdict.cause == "starved":
        return sample.seconds < _STARVED_S
    taken = max(map(len, sample.stacks.values()), default=0)
    return found.verdict.cause in _MAY_BE_THE_GPU and bool(sample.cards) and taken == 1


# ---------------------------------------------------------------- the rules, in order


def _part_stopped(sample: GroupSample) -> Diagnosis | None:
    """Part of the tree is stopped by a signal; or all of it, by SIGSTOP or a person's Ctrl+Z."""
    halted = [process for process in sample.last.processes if process.look.stopped]
    if not halted:
        return None
    one = halted[0]
    if len(halted) == len(sample.last.processes) and not any(process.is_ours for process in halted):
        why = f"all of the command is stopped by a signal (SIGSTOP, or Ctrl+Z){sample.at(one)}, {sample.words()}"
        pids = " ".join(str(process.pid) for process in halted)
        found = finding(sample, one, "stopped", "stopped", why, next=f"kill -CONT {pids}")
        holder = {"kind": "signal", "holder": "whoever stopped it"}
        return replace(found, verdict=replace(found.verdict, waits_for=holder))
    ranks = [process for process in sample.last.processes if process.is_ours]
    held_up = one.is_ours and any(rank not in halted for rank in ranks)  # the others cannot go on without it
    is_rank = one.rank >= 0 or held_up  # one that was alone, while the others come back, has no number yet
    cause = "worker_sigstop" if one.worker >= 0 else "rank_sigstop" if is_rank else "stopped"
    waiting = next(
        (m for m in sample.last.processes if m.slot and (m.slot.in_fetch or m.slot.in_coll) and m not in halted), None
    )
    waiting = waiting or _who_waits_for(sample, one) or _ancestor(sample, one)
    waits = f"; {waiting.words} waits for it{_in_what(waiting)}{sample.at(waiting)}" if waiting else ""
    item = f" in item {one.slot.item}" if one.slot and one.slot.in_item else ""
    why = f"{one.words} is stopped by a signal{item}{waits}"
    found = finding(sample, one, "stopped", cause, why, next=f"kill -CONT {one.pid}")
    line = (
        sample.frame(waiting) if waiting and sample.frame(one) is None else None
    )  # a program that is no Python has no line
    culprit = {**found.verdict.culprit, **(line.fields() if line else {})}
    holder = {"kind": "child", "what": one.words, "holder": "whoever sent it SIGSTOP"}
    verdict = replace(found.verdict, culprit=culprit, waits_for=holder)
    return replace(found, verdict=verdict, provable=found.provable or held_up)


def _frozen(sample: GroupSample) -> Diagnosis | None:
    """Its control group was frozen: nothing in it runs until somebody thaws it."""
    one = next((process for process in sample.last.processes if process.look.frozen), None)
    if one is None:
        return None
    why = f"the control group of {one.words} is frozen{sample.at(one)}, {sample.words()}"
    advice = "thaw it: docker unpause, systemctl thaw, or echo 0 > cgroup.freeze"
    found = finding(sample, one, "stopped", "frozen", why, next=advice)
    return replace(found, verdict=replace(found.verdict, waits_for={"kind": "cgroup", "holder": "whoever froze it"}))


def _in_what(process: Process) -> str:
    return f" in {process.slot.coll}" if process.slot and process.slot.in_coll else ""


def _who_waits_for(sample: GroupSample, process: Process) -> Process | None:
    for other in _by_interest(sample):
        chain = follow(sample.graph, other.pid, other.pid) if other is not process else None
        if chain is not None and any(
            process.pid in link.thread.wait.peers or link.thread.wait.pid == process.pid for link in chain.links
        ):
            return other
    return None


def _ancestor(sample: GroupSample, process: Process) -> Process | None:
    """The nearest one above it that stands in the user's code."""
    above = sample.last.process(process.ppid)
    while above is not None and sample.frame(above) is None:
        above = sample.last.process(above.ppid)
    return above


def _starved(sample: GroupSample) -> Diagnosis | None:
    """Ready to run, and no core is free: other programs have them. Asked before all that time alone would explain."""
    waited = {process.pid: _waited_for_a_core(sample, process) for process in sample.last.processes}
    process = max(sample.last.processes, key=lambda one: waited[one.pid][1])
    if waits_for_gpu(sample, process):  # a wait for a card may spin, and no core would make that shorter
        return None
    ran_s, starved_s = waited[process.pid][0], min(waited[process.pid][1], sample.seconds)
    if starved_s < _STARVED_SHARE * sample.seconds or starved_s < _STARVED_TIMES * ran_s:
        return None
    why = (
        f"other programs take the cores: {process.words} ran for {ran_s:.1f} of the last {sample.seconds:.1f} s and waited for a"
        f" core for {starved_s:.1f} s{sample.at(process)}, {sample.words()}"
    )
    return finding(
        sample,
        process,
        "starved",
        "starved",
        why,
        next="wait until they are done (top shows who they are), or give it cores of its own",
    )


def _waited_for_a_core(sample: GroupSample, process: Process) -> tuple[float, float]:
    """Seconds that its busiest thread ran, and that it was ready to run."""
    before = sample.first.process(process.pid)
    earlier = {thread.tid: thread for thread in before.look.each} if before else {}
    idle = {stack.tid for one in sample.stacks.get(process.pid, ())[-1:] for stack in one.threads if keeps_house(stack)}
    each = [thread for thread in process.look.each if thread.tid in earlier and thread.tid not in idle]
    pairs = [(thread, earlier[thread.tid]) for thread in each]
    found = [
        ((now.cpu_ns - then.cpu_ns) / 1e9, (now.starved_ns - then.starved_ns) / 1e9, now.state) for now, then in pairs
    ]
    # one that sleeps now and has hardly run had one wake-up that came late (to answer us, say): it is asleep, not starved
    late = [(ran_s, waited_s) for ran_s, waited_s, state in found if state == "R" or ran_s >= _RAN_SHARE * waited_s]
    return max(late, key=lambda one: one[1], default=(0.0, 0.0))


def _waiting_for_worker(sample: GroupSample) -> Diagnosis | None:
    """The main process waits for a batch: the worker that has it in hands is the end of the chain."""
    for main in sample.last.processes:
        slot = main.slot
        if slot is None or not slot.in_fetch or not slot.loader_workers:
            continue
        if sample.last.at - slot.fetch_since_ns / 1e9 < OPEN_S:
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
    busy = sample.is_busy(worker)
    if sample.is_silent(worker):
        why = f"{where}; it holds the GIL in a C call, {'busy' if busy else 'asleep'}; {waits}"
        advice = "look at that line and that item: a regular expression or a C call that takes for ever"
        return finding(sample, worker, "slow", "worker_gil", why, next=advice)
    if sample.moves_bytes(worker) and sample.cpu_share(worker) < 0.5:
        return finding(sample, worker, "slow", "slow_disk", f"{where}, reading slowly; {waits}", next="a faster disk")
    if busy:
        why = f"{where}, {sample.cpu_share(worker):.0%} of a core; {waits}"
        return finding(
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
    found = finding(
        sample,
        worker,
        "stuck" if proved else "waiting",
        cause,
        f"{where}{doing}; {waits}",
        next=advice,
        provable=proved,
    )
    return replace(found, verdict=replace(found.verdict, waits_for=chain.last.fields() if chain else {"kind": "child"}))


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
    told = found.verdict.why.startswith(phase)
    verdict = replace(found.verdict, why=who + (f"{phase}: " if phase and not told else "") + found.verdict.why)
    return replace(found, verdict=verdict)


def _all_asleep(sample: GroupSample) -> Diagnosis | None:
    """Nobody works: what is waited for, who has it, and whether anybody is left who could end it."""
    if sample.seconds < _ASLEEP_S:
        return None
    chains = [
        (process, chain)
        for process in _by_interest(sample)
        if not _launches(sample, process) and (chain := follow(sample.graph, process.pid, process.pid))
    ]
    if not chains and any(_launches(sample, process) for process in _by_interest(sample)):
        return None
    if not chains:
        return _asleep_somewhere(sample)
    proofs = [one for one in chains if closed(one[1].links, sample.unending)]
    process, chain = (proofs or chains)[0]
    proved = bool(proofs)
    cause, advice = _cause_of(sample, chain, proved)
    awaited = chain.last.thread.wait.pid or chain.last.thread.on.get("pid", 0)
    advice = advice.replace("PID", str(awaited)) if awaited else advice
    # of a cycle the first that waits for good, and not one that only looks again and again; else the end of the chain
    links = sorted(chain.links, key=lambda link: link.timed) if chain.is_cycle else reversed(chain.links)
    threads = [link.thread for link in links if link.thread.frame is not None]
    named = next((one for one in threads if one.frame and is_users(one.frame.file)), threads[0] if threads else None)
    frame = named.frame if named else None
    who = f"{process.words}: " if process.pid != sample.last.processes[0].pid else ""
    whole = f"; {_nobody_left(sample, chain)}" if proved else ""
    lost = _lost(sample, chain)
    why = f"{who}{chain_words(chain)}{lost}{whole}, {sample.words()}{_usually(sample)}"
    found = finding(sample, process, "stuck" if proved else "waiting", cause, why, next=advice, provable=proved)
    more = {**found.verdict.culprit, **(frame.fields() if frame else {}), **({"pid": named.pid} if named else {})}
    if chain.last.path:
        more["path"] = chain.last.path
    if cause == "pool_child_lost":
        lost_one = next(one for one in reversed(sample.last.exits) if one.code != 0)
        more |= {"lost": lost_one.pid, "signal": max(0, -(lost_one.code or 0))}
    return replace(found, verdict=replace(found.verdict, culprit=more, waits_for=chain.last.fields()))


def _launches(sample: GroupSample, process: Process) -> bool:
    """torchrun's own process, which looks after its ranks again and again: they are what is judged, if there are any."""
    stack = sample.main_stack(process)
    return stack is not None and any(
        frame.func.endswith("_invoke_run") and "torch/distributed/elastic" in frame.file for frame in stack.frames
    )


def _asleep_somewhere(sample: GroupSample) -> Diagnosis | None:
    """Where the system does not tell what a thread waits for: the line alone."""
    process = _by_interest(sample)[0]
    if sample.frame(process) is None:
        return None
    main = next((thread for thread in process.look.each if thread.tid == process.pid), None)
    sleeps = main is not None and main.syscall in NANOSLEEP
    behind = f", waiting for {process.look.waits_on}" if process.look.waits_on else ""
    call = inside_call(sample.main_stack(process))
    why = f"{'sleeping' if sleeps else 'asleep'}{sample.at(process)}{call}{behind}, {sample.words()}{_usually(sample)}"
    return finding(sample, process, "waiting", "sleep" if sleeps else "waiting", why, next="look at that line")


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
    if gone and f"process {gone[-1].pid} " in chain.last.holder:
        return ""
    return f"; process {gone[-1].pid} {gone[-1].words} {duration(gone[-1].ago_s)} ago" if gone else ""


def _usually(sample: GroupSample) -> str:
    return f", usually {duration(sample.usual_s)} at most" if sample.usual_s > 0.1 else ""


_ADVICE = {  # by the last link of a chain: cause, advice
    "timer": ("sleep", "look at that line"),
    "thread": ("thread", "look at what that thread does"),
    "child": ("child", "look at what that process does: lamp why PID"),
    "stdin": ("prompt", "answer it, or start the command with its stdin from a file: < /dev/null"),
    "manager": ("manager", "look at who should set, put or release it; a process that died with it never will"),
    "datagram": ("socket", "is that address right, and does anybody send to it? a timeout would notice"),
    "polling": ("polling", "look at what that line waits for, and at who should bring it"),
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
    "collective": ("collective", "every rank must call the same collectives, of the same group, in the same order"),
    "children": ("child", "wait for the one that is meant: os.waitpid(PID, 0); lamp why shows what each of them does"),
    "pty": ("pty", "look at what that program asks for: it may wait for an answer"),
}


def _cause_of(sample: GroupSample, chain: WaitChain, proved: bool) -> tuple[str, str]:
    """What is waited for at the end of the chain, by name, and what to do about it."""
    last = chain.last
    locks = all(link.kind in ("lock", "thread", "import lock") for link in chain.links)
    if locks and (chain.is_cycle or proved) and "forked" not in last.holder:
        several = chain.is_cycle and len(chain.links) > 1
        advice = "take the locks in one order, and wait for no thread while holding one"
        return (
            "deadlock",
            advice if several else "look at who took it: it was never released (use `with`, which always does)",
        )
    if last.kind == "lock" and "forked" in last.holder:
        return "fork_lock", "start processes before threads, or use the spawn start method"
    if last.kind == "pool" and sample.graph.gone:
        return (
            "pool_child_lost",
            "find out why it died (memory?); concurrent.futures raises BrokenProcessPool instead of waiting",
        )
    return _ADVICE.get(last.kind, ("waiting", "look at that line"))


_RULES: tuple[Callable[[GroupSample], Diagnosis | None], ...] = (
    _part_stopped, _frozen, _starved, meeting, late_rank, outlier_rank, _waiting_for_worker, _somebody_works, _all_asleep,
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
