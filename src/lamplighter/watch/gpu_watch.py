"""The GPUs beside a run: asks a small process (procs/nvml.py), keeps what it says, and names what is wrong.

In:  that process's lines; the step and the attempt of the run.
Out: `now`, the cards as they were last seen; system.jsonl (`sys/gpu_*`); a verdict for a new Xid, a card that is slowed down or
     not used, a driver that does not answer. Nothing is started where there is no driver.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from lamplighter import device_faults, read_back
from lamplighter.device_faults import Fault
from lamplighter.procs import nvml, procfs
from lamplighter.procs.nvml import GpuLook
from lamplighter.report import Verdict
from lamplighter.rundir import LineFile, RunDir

_SILENT_S = 10.0  # five times what it should take
_START_S = 20.0  # the first answer: the driver may have to wake the cards
_STEADY = 5  # looks in a row before a card is called slowed down or unused
_LOOKS, _IDLE_BELOW = 15, 0.5  # half a minute in which a card was in use for less than this share of the time
_MOST_BYTES = 1 << 20
_END_S = 0.2


@dataclass(frozen=True)
class RunLook:
    """The run at one moment, as far as its cards are judged by it."""

    pids: frozenset[int]
    step: int
    attempt: int
    data_wait: float = 0.0  # share of a step
    cpu_s: float = 0.0  # of its first process, so far


@dataclass(frozen=True)
class _Busy:
    """A card of the run at one look."""

    t: float
    util: float
    step: int
    cpu_s: float


class GpuWatch:
    """One for a run; it holds the process that asks, and that process holds nothing of ours."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.process: subprocess.Popen[bytes] | None = None
        self.tried = False
        self.heard_at = 0.0
        self.heard = False
        self.pending = b""
        self.now: tuple[GpuLook, ...] = ()
        self.faults: list[Fault] = []  # that the driver has told, in this attempt
        self.xids: set[tuple[int, int]] = set()  # (card, number) that were said in this attempt
        self.held: dict[str, int] = {}  # for how many looks in a row
        self.busy: dict[int, deque[_Busy]] = {}  # by card, the latest looks
        self.file: LineFile | None = None

    def look(self, run: RunLook) -> list[Verdict]:
        """What is new."""
        if not self.tried:
            self.tried = True
            self._start()
        found: list[Fault] = []
        for record in self._lines():
            found += self._take_in(record, run)
        if silent := self._silence():
            found.append(silent)
        self.faults += [fault for fault in found if fault.action != "flag"]
        return [Verdict("broken" if f.action != "flag" else "waste", f.cause, f.why, f.advice) for f in found]

    def cards_of(self, pids: Iterable[int]) -> tuple[GpuLook, ...]:
        """The cards that these processes compute on, as they were seen last; nothing where the driver has fallen silent.

        In a container the driver calls processes by other numbers: then every visible card of a process that has one open.
        """
        if self.process is None:
            return ()
        wanted = set(pids)
        ours = tuple(gpu for gpu in self.now if any(pid in wanted for pid, _ in gpu.processes))
        if ours or not any(map(nvml.has_card_open, wanted)):
            return ours
        return tuple(replace(gpu, processes=()) for gpu in self._visible())

    def begin_again(self) -> None:
        """A new attempt."""
        self.faults, self.held, self.busy = [], {}, {}
        self.xids.clear()

    def hopeless(self) -> Fault | None:
        """What the driver has told of that needs a person, whatever the process said when it died."""
        return next((fault for fault in self.faults if fault.action == "stop"), None)

    def fields(self) -> dict[str, Any]:
        """Its part of status.json; nothing where there is no GPU."""
        return {"gpus": [_record(gpu) | {"gpu": gpu.index, "name": gpu.name} for gpu in self.now]} if self.now else {}

    def close(self) -> None:
        """A process that is asleep inside the driver cannot be ended, and is not waited for."""
        if self.process is None:
            return
        self.process.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver: it ends when that lets it go
            self.process.wait(_END_S)
        self.process = None

    # ---------------------------------------------------------------- the process

    def _start(self) -> None:
        if not nvml.is_there():
            return
        self.heard_at = time.monotonic()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lamplighter.procs.nvml", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:  # no process to be had: the run is not to suffer from that
            return
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    def _lines(self) -> list[dict[str, Any]]:
        if self.process is None or self.process.stdout is None:
            return []
        fd = self.process.stdout.fileno()
        if not select.select([fd], [], [], 0)[0]:
            return []
        data = os.read(fd, _MOST_BYTES)
        if not data:  # it has ended by itself, and has said why
            self.close()
            return []
        *lines, self.pending = (self.pending + data)[-_MOST_BYTES:].split(b"\n")
        return [record for line in lines if (record := read_back.parse_object(line)) is not None]

    def _silence(self) -> Fault | None:
        """Said once: the driver does not answer."""
        if self.process is None or time.monotonic() - self.heard_at < (_SILENT_S if self.heard else _START_S):
            return None
        fault = device_faults.silent(procfs.look(self.process.pid).state, time.monotonic() - self.heard_at)
        self.close()
        return fault

    # ---------------------------------------------------------------- what it says

    def _take_in(self, record: dict[str, Any], run: RunLook) -> list[Fault]:
        self.heard_at, self.heard = time.monotonic(), True
        found: list[Fault] = []
        if said := str(record.get("error") or ""):
            found.append(device_faults.from_text(said) or device_faults.unanswered(said))
        if "gpus" in record:
            self.now = tuple(nvml.read_look(one) for one in record["gpus"])
            self._keep(run.step, run.attempt)
            found += self._judge(run)
        return found + self._new_xids(record.get("xids", ()), run)

    def _new_xids(self, xids: Iterable[tuple[int, int]], run: RunLook) -> list[Fault]:
        """Of the cards that the run may use, each number once in an attempt; -1: the driver did not say of which."""
        ours = {gpu.index for gpu in self._seen(run)}
        found = []
        for card, number in xids:
            fault = device_faults.from_xid(int(number))
            if fault is None or (card >= 0 and card not in ours) or (card, number) in self.xids:
                continue
            self.xids.add((card, number))
            found.append(replace(fault, why=f"{fault.why} (GPU {card})") if card >= 0 else fault)
        return found

    def _seen(self, run: RunLook) -> tuple[GpuLook, ...]:
        """The cards of this run: those it computes on; until that is known, those it may."""
        used = tuple(gpu for gpu in self.now if any(pid in run.pids for pid, _ in gpu.processes))
        return used or self._visible()

    def _visible(self) -> tuple[GpuLook, ...]:
        """To the run: it has our own CUDA_VISIBLE_DEVICES."""
        cards = sorted(self.now, key=lambda gpu: gpu.index)
        ours = nvml.visible(os.environ.get("CUDA_VISIBLE_DEVICES"), [gpu.uuid for gpu in cards])
        return tuple(cards[place] for place in ours)

    def _judge(self, run: RunLook) -> list[Fault]:
        """What holds for some looks in a row, said when it begins to."""
        states: dict[str, Fault | None] = {}
        for gpu in self._seen(run):
            slowed = device_faults.throttling(gpu.reasons, gpu.clock_mhz, gpu.most_mhz, gpu.temperature_c)
            states[f"throttled {gpu.index}"] = slowed and replace(slowed, why=f"{slowed.why} (GPU {gpu.index})")
        ours = [any(pid in run.pids for pid, _ in gpu.processes) for gpu in self.now]
        seen = [any(pid in run.pids for pid, _ in gpu.processes) for gpu in self._visible()]
        states["unused"] = device_faults.unused(seen) if run.step else None
        for gpu, used in zip(self.now, ours, strict=True):
            states[f"idle {gpu.index}"] = self._idle(gpu, run) if used else None
        found = []
        for name, fault in states.items():
            self.held[name] = self.held.get(name, 0) + 1 if fault else 0
            if fault is not None and self.held[name] == _STEADY:
                found.append(fault)
        return found

    def _idle(self, gpu: GpuLook, run: RunLook) -> Fault | None:
        """A card that is in use for less than half of the time while steps are made, and why."""
        seen = self.busy.setdefault(gpu.index, deque(maxlen=_LOOKS))
        seen.append(_Busy(time.monotonic(), gpu.util, run.step, run.cpu_s))
        util = sum(one.util for one in seen) / len(seen)
        first, last = seen[0], seen[-1]
        if len(seen) < _LOOKS or util >= _IDLE_BELOW or last.step <= first.step:
            return None
        cpu = (last.cpu_s - first.cpu_s) / max(1e-3, last.t - first.t)
        memory = gpu.memory_used / gpu.memory_total if gpu.memory_total else 1.0
        return device_faults.low_utilisation(util, run.data_wait, memory, cpu)

    def _keep(self, step: int, attempt: int) -> None:
        """One record per card and look; a full disk loses some, and the run goes on."""
        try:
            self.file = self.file or LineFile(self.run.system)
        except OSError:  # the folder is gone, or the disk is full: status.json has the newest
            return
        for gpu in self.now:
            self.file.write(
                json.dumps({"t": time.time(), "step": step, "attempt": attempt, "gpu": gpu.index, **_record(gpu)})
            )


def _record(gpu: GpuLook) -> dict[str, Any]:
    return {
        "sys/gpu_util": gpu.util,
        "sys/gpu_mem_gb": round(gpu.memory_used / 1e9, 3),
        "sys/gpu_mem_total_gb": round(gpu.memory_total / 1e9, 3),
        "sys/gpu_clock_mhz": gpu.clock_mhz,
        "sys/gpu_temp_c": gpu.temperature_c,
        "sys/gpu_power_w": gpu.power_w,
        "sys/gpu_slowed_by": ", ".join(device_faults.reasons_in_words(gpu.reasons)),
        "sys/gpu_processes": {str(pid): round(size / 1e9, 3) for pid, size in gpu.processes},
    }
