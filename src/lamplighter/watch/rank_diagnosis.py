"""Verdicts on ranks: who has not come to a collective that the others are in, who calls another one, who is missing.

In:  a GroupSample of a tree with ranks in it.
Out: a Diagnosis whose culprit is the rank that the others wait for; None where no rank waits. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lamplighter.procs.stacks import ThreadStack, users_frame
from lamplighter.slot import MEETING
from lamplighter.watch.diagnosis import Diagnosis, finding
from lamplighter.watch.evidence import GroupSample
from lamplighter.watch.process_tree import Process, Snapshot
from lamplighter.watch.wait_chain import chain_words, closed, follow

_SAME_EVERYWHERE = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "barrier", "reduce")
_MEETING = "init_process_group"
OPEN_S = 1.8  # a fetch or a collective that lasts so long, while nothing else is counted, is what is waited for


def meeting(sample: GroupSample) -> Diagnosis | None:
    """Ranks wait in init_process_group until all of them are there: who is missing, and where those stand that exist."""
    there = [m for m in sample.last.processes if m.slot and m.slot.in_coll and m.slot.coll.startswith(_MEETING)]
    waiting = [m for m in there if m.slot and sample.last.at - m.slot.coll_since_ns / 1e9 > OPEN_S]
    if not waiting or any(sample.is_busy(m) for m in sample.last.processes):
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
    found = finding(sample, one, "waiting", "no_peer", why, next=advice)
    holder = ", ".join(f"rank {rank}" for rank in missing[:4]) or "the other ranks"
    return replace(
        found, verdict=replace(found.verdict, waits_for={"kind": "rendezvous", "what": address, "holder": holder})
    )


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


def late_rank(sample: GroupSample) -> Diagnosis | None:
    """Some ranks are in a collective; the one behind them is the culprit."""
    ranks = _ranks_of(sample.last)
    waiting = [m for m in ranks if m.slot and m.slot.in_coll and sample.last.at - m.slot.coll_since_ns / 1e9 > OPEN_S]
    if not waiting or len(ranks) < 2:
        return None
    ahead = max(waiting, key=lambda m: m.slot.coll_seq if m.slot else 0)
    assert ahead.slot is not None
    behind = [m for m in ranks if m.slot and (m.slot.coll_seq < ahead.slot.coll_seq or not m.slot.in_coll)]
    if not behind:
        return _other_collective(sample, waiting)
    one = min(behind, key=lambda m: m.slot.coll_seq if m.slot else 0)
    busy = sample.is_busy(one)
    if not busy and _in_backward(sample.main_stack(one)):
        return _uneven(sample, one, ahead)
    doing = "is busy" if busy else "sleeps"
    why = (
        f"{one.words} {doing}{sample.at(one)} and has not entered collective {ahead.slot.coll_seq}"
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
    found = finding(
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
    return finding(sample, ahead, "stuck", "rank_uneven", why, next=advice, provable=True, waits=one.rank)


def _other_collective(sample: GroupSample, waiting: Sequence[Process]) -> Diagnosis | None:
    """All ranks are inside, in different ones."""
    calls = {m.slot.coll: m for m in waiting if m.slot}
    if len(waiting) > 1 and all(call.startswith("recv") for call in calls):
        return _nobody_sends(sample, waiting)
    moving = any(sample.is_busy(m) for m in waiting)
    if len(calls) < 2 or moving or any(_may_differ(call, process) for call, process in calls.items()):
        return None
    words = "; ".join(f"rank {m.rank} in {call} at {_short(m.slot.coll_at)}" for call, m in calls.items() if m.slot)
    names = {call.split()[0] for call in calls}
    cause = "rank_order" if len(names) > 1 else "rank_shape"
    advice = "make every rank call the same collective with the same shape"
    if len(names) > 1:
        advice = "make every rank call the same collectives in the same order: is one of them under `if rank == 0`?"
    one = next((m for m in reversed(waiting) if sample.frame(m) is not None), waiting[-1])
    why = f"the ranks call different collectives: {words}, {sample.words()}"
    return finding(sample, one, "stuck", cause, why, next=advice, provable=True)


def _may_differ(call: str, process: Process) -> bool:
    """Whether the others may rightly call something else meanwhile. What our own processes tell is called by all ranks."""
    return call == MEETING if process.is_ours else call.split()[0] not in _SAME_EVERYWHERE


def _nobody_sends(sample: GroupSample, waiting: Sequence[Process]) -> Diagnosis | None:
    """Every rank that is there waits to receive."""
    if len(waiting) < len(_ranks_of(sample.last)) or any(sample.is_busy(m) for m in waiting):
        return None
    words = "; ".join(f"rank {m.rank} waits in {m.slot.coll} at {_short(m.slot.coll_at)}" for m in waiting if m.slot)
    why = f"all ranks wait to receive, and none sends: {words}, {sample.words()}"
    advice = "let one of each pair send first, or use isend and irecv, and wait for both"
    found = finding(sample, waiting[0], "stuck", "rank_order", why, next=advice)
    waits_for = {"kind": "recv", "what": "a message of another rank", "holder": "no rank sends: all of them receive"}
    return replace(found, verdict=replace(found.verdict, waits_for=waits_for))


def outlier_rank(sample: GroupSample) -> Diagnosis | None:
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
    busy = sample.is_busy(one)
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


def _short(place: str) -> str:
    """/long/way/to/train.py:88 -> to/train.py:88."""
    return "/".join(Path(place).parts[-2:])
