"""The state of the GPUs by NVML, said by a small process of its own: a call into a driver that is stuck never returns.

In:  libnvidia-ml.so.1 by the package nvidia-ml-py (the extra `gpu`); without that package, the command nvidia-smi.
Out: one JSON line for every look on standard output: {"gpus": [...], "xids": [...]} or {"error": "..."}; GpuLook for readers.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lamplighter.errors import BadConfig
from lamplighter.procs import prctl

EVERY_S = 2.0
_LIBRARY = "libnvidia-ml.so.1"
_SMI_DEADLINE_S = 10.0
_CARDS_S = 1.5  # a driver that does not answer is no reason to wait
_SMI_FIELDS = ("index", "uuid", "utilization.gpu", "memory.used", "memory.total", "clocks.sm", "clocks.max.sm",
               "temperature.gpu", "power.draw", "clocks_throttle_reasons.active", "name")  # fmt: skip
_MIB = 1 << 20


@dataclass(frozen=True)
class GpuLook:
    """One card at one moment; what it does not tell is 0 or empty."""

    index: int
    uuid: str = ""
    name: str = ""
    util: float = 0.0  # share of the time in which any kernel ran
    memory_used: int = 0
    memory_total: int = 0
    clock_mhz: float = 0.0
    most_mhz: float = 0.0
    temperature_c: float = 0.0
    power_w: float = 0.0
    reasons: int = 0  # why the clock is not at its highest, NVML's bits
    processes: tuple[tuple[int, int], ...] = ()  # (pid, bytes)
    ecc: int = 0  # errors since the driver was loaded that could not be corrected


def read_look(fields: dict[str, Any]) -> GpuLook:
    """From a line that the process has said."""
    held = tuple((int(pid), int(size)) for pid, size in fields.get("processes", ()))
    return GpuLook(**{**fields, "processes": held})


def is_there() -> bool:
    """Whether anything of a driver is to be found; asks no driver."""
    paths = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    found = any(Path(folder, _LIBRARY).exists() for folder in paths if folder)
    return (
        found or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists() or shutil.which("nvidia-smi") is not None
    )


def visible(asked: str | None, uuids: Sequence[str]) -> list[int]:
    """The cards that CUDA_VISIBLE_DEVICES leaves to a program, in its order: by index, or by the beginning of their UUID.

    As the driver reads it: the list ends at the first word that is no card, and a card that is named twice spoils it all.
    """
    if asked is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for word in (part.strip() for part in asked.split(",")):
        if word.isdecimal():
            card = int(word) if int(word) < len(uuids) else -1
        else:
            named = [place for place, uuid in enumerate(uuids) if word.startswith("GPU-") and uuid.startswith(word)]
            card = named[0] if len(named) == 1 else -1
        if card < 0:
            break
        if card in found:
            return []
        found.append(card)
    return found


def count_ranks(asked: int | str, device: str) -> tuple[int, str]:
    """How many processes share out a step (train.ranks, train.device), and why."""
    if isinstance(asked, int):
        return asked, "train.ranks"
    cards = len(cards_here()) if device != "cpu" else 0
    return max(1, cards), "every GPU of this machine" if cards else "on a CPU"


def cards_here() -> list[tuple[str, float]]:
    """Name and memory (GiB) of every GPU of this machine that CUDA_VISIBLE_DEVICES leaves us, as the driver tells."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    words = [tool, "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=_CARDS_S, check=True).stdout
        rows = [[cell.strip() for cell in row.split(",", 3)] for row in said.splitlines() if row.strip()]
        cards = sorted((int(index), uuid, float(mebibytes) / 1024, name) for index, uuid, mebibytes, name in rows)
    except subprocess.CalledProcessError:  # a driver without a card
        return []
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        raise BadConfig("nvidia-smi does not tell of the cards", why, "--train.device cpu does without them") from error
    ours = visible(os.environ.get("CUDA_VISIBLE_DEVICES"), [uuid for _, uuid, _, _ in cards])
    return [(name, memory_gib) for _, _, memory_gib, name in (cards[place] for place in ours)]


def has_card_open(pid: int) -> bool:
    """Whether a process computes on some card: it holds /dev/nvidia0 or another one. False where that may not be read."""
    try:
        opened = [str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:  # it has ended, or is somebody else's
        return False
    return any(path.removeprefix("/dev/nvidia").isdecimal() for path in opened if path.startswith("/dev/nvidia"))


# ---------------------------------------------------------------- inside the process


def main() -> None:
    """Called as `python -m lamplighter.procs.nvml PARENT`; ends with its parent, or when nobody reads it any more."""
    prctl.belong_to(int(sys.argv[1]))
    try:
        _by_library()
    except (
        ImportError
    ):  # the extra `gpu` is not installed, or finds no library: the driver's own command tells most of it
        _by_command()


def _say(**record: Any) -> None:
    os.write(1, json.dumps(record).encode() + b"\n")


def _by_library() -> None:
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            raise ImportError(str(error)) from error  # the driver's own command may be there all the same
        _say(error=f"NVML: {error}")
        return
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        _say(error=f"NVML: {error}")
        return
    events = _register(nvml, handles)
    while True:
        lost = ""
        gpus = []
        for index, handle in enumerate(handles):
            try:
                nvml.nvmlDeviceGetUtilizationRates(handle)
            except nvml.NVMLError as error:
                lost = f"GPU {index}: {error}" if error.value == nvml.NVML_ERROR_GPU_IS_LOST else lost
            gpus.append(asdict(_look(nvml, index, handle)))
        xids = _wait(nvml, events, handles)
        _say(gpus=gpus, xids=xids, **({"error": lost} if lost else {}))


def _look(nvml: Any, index: int, handle: Any) -> GpuLook:
    def ask(function: str, *more: Any) -> Any:
        """What this card or this driver does not tell is None."""
        try:
            return getattr(nvml, function)(handle, *more)
        except nvml.NVMLError:  # not supported here
            return None

    util, memory, name = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetName")
    processes = ask("nvmlDeviceGetComputeRunningProcesses") or []
    return GpuLook(
        index,
        uuid=str(ask("nvmlDeviceGetUUID") or ""),
        name=str(name or ""),
        util=util.gpu / 100 if util else 0.0,
        memory_used=int(memory.used) if memory else 0,
        memory_total=int(memory.total) if memory else 0,
        clock_mhz=float(ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM) or 0),
        most_mhz=float(ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM) or 0),
        temperature_c=float(ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU) or 0),
        power_w=float(ask("nvmlDeviceGetPowerUsage") or 0) / 1000,
        reasons=int(ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0),
        processes=tuple((int(one.pid), int(one.usedGpuMemory or 0)) for one in processes),
        ecc=int(
            ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC) or 0
        ),
    )


def _register(nvml: Any, handles: list[Any]) -> Any:
    """For Xids; None where the driver has no events."""
    try:
        events = nvml.nvmlEventSetCreate()
        for handle in handles:
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError:  # not supported here: Xids are then in the kernel's log alone
        return None
    return events


def _wait(nvml: Any, events: Any, handles: list[Any]) -> list[tuple[int, int]]:
    """Until the next look is due; (card, Xid) of each that has come, once: a card may send the same one again and again."""
    until, found = time.monotonic() + EVERY_S, set[tuple[int, int]]()
    while (left_s := until - time.monotonic()) > 0:
        if events is None:
            time.sleep(left_s)
            continue
        try:
            event = nvml.nvmlEventSetWait(events, max(1, int(left_s * 1000)))
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_TIMEOUT:
                time.sleep(left_s)
            break
        found.add((_index_of(nvml, event.device, handles), int(event.eventData)))
        time.sleep(min(left_s, 0.1))
    return sorted(found)


def _index_of(nvml: Any, device: Any, handles: list[Any]) -> int:
    """Of the card that an event is about; -1 where the driver does not say."""
    address = ctypes.cast(device, ctypes.c_void_p).value
    known = [ctypes.cast(handle, ctypes.c_void_p).value for handle in handles]
    if address in known:
        return known.index(address)
    try:
        return int(nvml.nvmlDeviceGetIndex(device))
    except nvml.NVMLError:  # a card that is off the bus may have none any more
        return -1


def _by_command() -> None:
    words = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    while True:
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_SMI_DEADLINE_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            _say(error=f"nvidia-smi: {error}")
            return
        if done.returncode:
            _say(error=(done.stdout + done.stderr).strip()[:500])
            return
        _say(gpus=[asdict(_of_row(row)) for row in done.stdout.strip().splitlines()], xids=[])
        time.sleep(EVERY_S)


def _of_row(row: str) -> GpuLook:
    cells = [cell.strip() for cell in row.split(",", len(_SMI_FIELDS) - 1)]  # a name may hold a comma
    index, uuid, util, used, total, clock, most, temperature, power, reasons, name = cells

    def number(text: str, read: Callable[[str], float] = float) -> float:
        try:
            return read(text)
        except ValueError:  # "[N/A]": this card does not tell it
            return 0.0

    return GpuLook(
        int(index),
        uuid=uuid,
        name=name,
        util=number(util) / 100,
        memory_used=int(number(used) * _MIB),
        memory_total=int(number(total) * _MIB),
        clock_mhz=number(clock),
        most_mhz=number(most),
        temperature_c=number(temperature),
        power_w=number(power),
        reasons=int(number(reasons, lambda text: int(text, 16))),
    )


if __name__ == "__main__":
    main()
