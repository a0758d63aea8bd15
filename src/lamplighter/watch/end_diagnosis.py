"""Verdicts on what has happened, not on what is waited for: a process that ended, an error, a storm of compiles.

In:  an Exit, an exit code, the slot of a process that raised.
Out: a Verdict; None where the end of a process is somebody's own business. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lamplighter.procs.stacks import Stacks, users_frame
from lamplighter.report import Verdict
from lamplighter.slot import Slot
from lamplighter.watch.evidence import how_it_ended
from lamplighter.watch.process_tree import Exit, Process
from lamplighter.watch.status import duration


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
    if was_interrupted(slot):
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


def was_interrupted(slot: Slot) -> bool:
    """Its user's Ctrl+C reached it: that is no fault of its own, and of the item that a worker had in hand neither."""
    return re.match(r"(item [^:]*: )?KeyboardInterrupt", slot.error) is not None


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


def storm_verdict(process: Process, count: int, seconds: float, taken: Stacks | None) -> Verdict:
    """Many compiles in a short time: each new shape costs one."""
    frame = users_frame(taken.threads[0]) if taken and taken.threads else None
    where = f" at {frame.short}" if frame else ""
    now = process.slot.compile_id if process.slot else ""
    culprit = {"pid": process.pid, **(frame.fields() if frame else {})}
    why = f"recompiled {count} times within {duration(seconds)}{where} (now {now}): a new shape or value each time"
    advice = "feed a few fixed lengths (buckets), or torch._dynamo.mark_dynamic; TORCH_LOGS=recompiles shows the guard"
    return Verdict("slow", "recompile_storm", why, advice, "none", evidence=(), culprit=culprit)
