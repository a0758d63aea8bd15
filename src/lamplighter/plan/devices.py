"""Where a run would be: this machine's memory and its processor, measured in half a second; or a device by name. No torch.

In:  nothing, or a name of the table of devices.
Out: a Device; how much memory a process may still take here, and what says so.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lamplighter import gpus
from lamplighter.config import Train
from lamplighter.errors import BadConfig, UsageError
from lamplighter.gpus import Device, Rates
from lamplighter.procs import cgroup, nvml, procfs
from lamplighter.procs.pool import usable_cores
from lamplighter.rundir import free_bytes

_GIB = 1 << 30
_GEMM_S, _COPY_S = 0.2, 0.25
_GEMM = 1024
_COPY_BYTES = 32 << 20


@dataclass(frozen=True)
class Room:
    """Bytes that a process may still take, and what sets the limit."""

    bytes: int
    by: str

    @property
    def gib(self) -> float:
        return self.bytes / _GIB


def host_room() -> Room:
    """The least of what is free, what the container allows, and what this process may map."""
    rooms = [Room(procfs.memory_available(), "free memory")]
    rooms += [room for room in (_group_room(), _limit_room()) if room is not None]
    return min(rooms, key=lambda room: room.bytes)


def host_total() -> Room:
    """What exists, whoever has it now: the memory of the machine, or what the container or ulimit allows of it."""
    rooms = [Room(procfs.memory_total(), "memory")]
    rooms += [room for room in (_group_room(total=True), _limit_room()) if room is not None]
    return min(rooms, key=lambda room: room.bytes)


def _group_room(total: bool = False) -> Room | None:
    """The tightest limit of a control group, or what it leaves."""
    found = [
        Room(one.bytes if total else one.left, f"the memory limit of {one.folder}") for one in cgroup.memory_limits()
    ]
    return min(found, key=lambda room: room.bytes, default=None)


def _limit_room() -> Room | None:
    """ulimit -v and -d: an upper bound, since libraries map more than they use."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    known = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return Room(min(known), "ulimit") if known else None


def _this_cpu(threads: int | None = None, ranks: int = 1) -> Device:
    """What a rank has of this machine's processor: memory that is free now, a matrix product and a stream of numbers, measured."""
    share = min(1 / ranks, threads / usable_cores()) if threads else 1 / ranks
    a = np.ones((_GEMM, _GEMM), np.float32)
    gemm_s = _best(lambda: a @ a, _GEMM_S, usable_cores())
    return cpu(Rates(share * 2 * _GEMM**3 / gemm_s, share * stream_rate()))


def stream_rate(budget_s: float = _COPY_S) -> float:
    """Bytes a second of reading numbers, changing them and writing them to fresh memory, by one core."""
    numbers = np.ones(_COPY_BYTES // 4, np.float32)
    return 2 * numbers.nbytes / _best(lambda: numbers + 1.0, budget_s, 1)


def cpu(rates: Rates) -> Device:
    """A processor whose speed is known."""
    room = host_room()
    total = host_total().gib
    return Device("cpu", room.gib, None, rates.gemm_flops, mfu=0.5, rates=rates, host_gib=room.gib, total_gib=total)


def _best(act: Callable[[], object], budget_s: float, threads: int) -> float:
    """The shortest of several times: what the machine can do when nobody is in the way, and what others take is not counted."""
    act()
    best, until = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < until or best == float("inf"):
        started, worked = time.perf_counter(), time.process_time()
        act()
        took = time.perf_counter() - started
        best = min(best, took, (time.process_time() - worked) / threads or took)
    return best


def _this_gpu() -> Device | None:
    """The GPUs of this machine, taken to be like the first; None where there is none."""
    if not (cards := nvml.cards_here()):
        return None
    name, memory_gib = cards[0]
    if (known := gpus.of_card(name)) is None:
        why = f"the table has {', '.join(gpus.TABLE)}; a card of another name is measured, not guessed"
        raise BadConfig(f"the speed of this machine's GPU ({name}) is not known on paper", why, "lamp plan --measure")
    return replace(known, memory_gib=memory_gib, host_gib=host_room().gib, count=len(cards))


def choose(name: str | None, mfu: float | None, train: Train, nodes: int = 1) -> Device:
    """The devices of --on, else this machine's GPUs, else its processor; as many as train.ranks says, where --on does not, on so
    many machines like it (launch.nodes); --mfu as it is stated.
    """
    device = _wanted(name, train)
    if nodes > 1 and ":" not in (name or ""):
        device = on_nodes(device, nodes)
    if mfu is None:
        return device
    if not 0 < mfu <= 1:
        raise UsageError(f"--mfu {mfu} is no share of the peak", "it is above 0 and at most 1", "--mfu 0.4")
    return replace(device, mfu=mfu, rates=None)


def _wanted(name: str | None, train: Train) -> Device:
    ranks = None if train.ranks == "auto" else train.ranks
    if name:
        device = gpus.find(name)
        return device if ":" in name else replace(device, count=ranks or 1)
    here = _this_gpu() if train.device != "cpu" else None
    if here is None:
        return for_ranks(_this_cpu(train.threads, ranks or 1), ranks or 1)
    if ranks and ranks > here.count:
        raise BadConfig(f"{ranks} ranks, and this machine has {here.count} GPUs", "a rank needs one of its own", f"--train.ranks {here.count}")  # fmt: skip
    return replace(here, count=ranks or here.count)


def for_ranks(cpu: Device, ranks: int) -> Device:
    """What each of several ranks has of one processor's memory."""
    total = cpu.total_gib / ranks if cpu.total_gib else None
    return replace(cpu, memory_gib=cpu.memory_gib / ranks, total_gib=total, count=ranks)


def on_nodes(device: Device, nodes: int) -> Device:
    """So many machines with as many of them each."""
    return replace(device, count=device.count * nodes, nodes=nodes)


def free_disk(folder: Path) -> int | None:
    """Bytes free where the runs will lie; none where no folder above it exists."""
    while not folder.exists():
        if folder == folder.parent:
            return None
        folder = folder.parent
    return free_bytes(folder)
