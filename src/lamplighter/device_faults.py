"""What a failing GPU means: from the words of an error, an Xid, the card's own state to a cause, an action, a sentence, an advice.

In:  the text of an exception (and its class), a line of the kernel's log, an Xid, what NVML says of a card. No torch.
Out: a Fault; None where it is nothing of a GPU's. Pure functions; the table is in docs/gpu.md.

What is asked of the words is only what their authors wrote: CUDA's own sentences, torch's report of its allocator, NCCL's last
error, the driver's log. The order of the rules carries the meaning: a text often names a consequence too (a watchdog that
tells of an illegal access), so a broken card comes before a broken kernel, and that before a collective that waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Action = Literal["restart", "stop", "flag"]
# restart: a fresh process may not meet it again; stop: it needs a person first; flag: the run goes on


@dataclass(frozen=True)
class Fault:
    """What has happened, and what is to be done about it."""

    cause: str
    action: Action
    why: str
    advice: str
    dead: bool = False  # the CUDA context is gone: nothing can be read from the card any more, so nothing is saved
    rank: int | None = None  # who said it, of many


_SMALLER = "train.recompute gives the same bits in less memory, a smaller train.micro_batch the same result but for rounding; `lamp plan` shows what fits"
_BLOCKING = "CUDA_LAUNCH_BLOCKING=1 names the line (errors are told late); "

FAULTS = {
    fault.cause: fault
    for fault in (
        Fault("out_of_memory", "restart", "the GPU's memory is full", _SMALLER),
        Fault("out_of_memory_fragmented", "restart", "the GPU's memory is in pieces: enough is reserved and none of it in one piece",
              "a smaller train.micro_batch; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is set unless you have set that variable"),
        Fault("out_of_memory_shared", "restart", "the GPU's memory is full, and others hold much of it",
              "look who they are (nvidia-smi) and end them, or choose another card (CUDA_VISIBLE_DEVICES)"),
        Fault("device_assert", "restart", "a check inside a GPU kernel has failed: mostly an index out of range, such as a token id beyond the vocabulary",
              "the batch is tried again on the CPU, which names a wrong index; CUDA_LAUNCH_BLOCKING=1 names the line", dead=True),
        Fault("illegal_access", "restart", "a GPU kernel has touched memory that is not its own",
              f"{_BLOCKING}with a card, a driver and a build of torch that are known to be good it is a bug in a kernel: report it", dead=True),
        Fault("kernel_failed", "restart", "a GPU kernel has failed",
              f"{_BLOCKING}the kernel's log (dmesg | grep Xid) tells whether the card is to blame", dead=True),
        Fault("not_deterministic", "stop", "train.exact asks for kernels that give the same bits each time, and an operation of this model has none",
              "--train.exact false: close, not bit-identical, and nothing else changes"),
        Fault("hung_kernel", "restart", "a GPU kernel did not end",
              "look at the line that waits for it; a card that also draws a screen ends kernels after some seconds", dead=True),
        Fault("ecc", "restart", "the GPU's memory has an error that cannot be corrected",
              "reset the card (nvidia-smi --gpu-reset) or reboot; the second time, have the card replaced", dead=True),
        Fault("ecc_uncontained", "stop", "the GPU's memory has an error that may have reached every process on it",
              "reset the card (nvidia-smi --gpu-reset) or reboot before anything runs on it again", dead=True),
        Fault("rows_remapped", "flag", "bad rows of the GPU's memory were replaced by spare ones",
              "nothing now; reset the card when the run is over, so that the spare rows are used"),
        Fault("rows_used_up", "stop", "bad rows of the GPU's memory could not be replaced: the spare ones are used up",
              "have the card replaced", dead=True),
        Fault("off_the_bus", "stop", "the GPU has fallen off the bus: the machine does not see it any more",
              "reboot; then power supply, cooling and the slot; resume on another card meanwhile", dead=True),
        Fault("nvlink", "stop", "the link between GPUs has failed",
              "reset the cards or reboot; `nvidia-smi nvlink -e` counts the errors; NCCL_P2P_DISABLE=1 does without, slowly", dead=True),
        Fault("driver_stuck", "stop", "the GPU's driver or its firmware does not answer",
              "reboot (a process inside the driver cannot be killed); the kernel's log: dmesg | grep -i -e nvrm -e xid", dead=True),
        Fault("driver_mismatch", "stop", "the kernel's part of the driver and its libraries do not fit, or the driver is not loaded",
              "reboot after a driver update; in a container, let it have the host's driver (--gpus all)", dead=True),
        Fault("driver_too_old", "stop", "the driver is older than what this build of torch needs",
              "update the driver, or install a torch built for an older CUDA (pytorch.org names the index)", dead=True),
        Fault("wrong_build", "stop", "this build of torch has no code for this GPU",
              "install the torch that is built for this card and its CUDA (pytorch.org/get-started)", dead=True),
        Fault("no_gpu", "stop", "no GPU is to be seen, or not the one that was asked for",
              "look at nvidia-smi and CUDA_VISIBLE_DEVICES; in a container --gpus all; or train on the CPU with gloo", dead=True),
        Fault("gpu_taken", "stop", "the GPU is taken: it allows one process at a time, or is not available",
              "look who has it (nvidia-smi); compute mode: nvidia-smi -c DEFAULT", dead=True),
        Fault("cuda_in_fork", "stop", "CUDA was used in a process that was forked after CUDA had been used",
              "start such processes by spawn (multiprocessing_context='spawn'), or keep tensors of a loader on the CPU", dead=True),
        Fault("nccl_timeout", "restart", "a collective did not end in time: a rank did not come to it, or the network lost it",
              "the rank that did not come is the culprit: look at what it did (lamp why)", dead=True),
        Fault("nccl_error", "restart", "the ranks could not talk to each other (NCCL)",
              "NCCL_DEBUG=WARN names the cause; a rank that died, the interface (NCCL_SOCKET_IFNAME), /dev/shm that is too small", dead=True),
        Fault("throttled", "flag", "the GPU is slowed down", "look at cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"),
        Fault("gpu_unused", "flag", "a GPU is not used", "start one rank for each, or leave the card to others (CUDA_VISIBLE_DEVICES)"),
        Fault("low_utilisation", "flag", "the GPU is idle for much of the time", "look at where a step spends its time: report.md"),
    )
}  # fmt: skip


# ---------------------------------------------------------------- from words

_MEMORY = r"out of memory|OutOfMemoryError|outofmemory|ALLOC_FAILED|cudaErrorMemoryAllocation|ERROR_OUT_OF_MEMORY"
_RULES: tuple[tuple[str, str], ...] = (
    ("off_the_bus", r"fallen off (?:of )?the bus|GPU is lost|Unable to determine the device handle|device is lost|NVML_ERROR_GPU_IS_LOST|cudaErrorDeviceUnavailable.*lost"),
    ("ecc_uncontained", r"uncontained ECC"),
    ("ecc", r"ECC error|ECC_UNCORRECTABLE|EccUncorrectable|double.?bit (?:ECC )?error"),
    ("rows_used_up", r"row remapp\w+ fail|failed to remap|remapping failure occurred\s*:\s*yes"),
    ("rows_remapped", r"row remapp|remapped rows[\s\S]{0,200}?pending\s*:\s*yes"),
    ("nvlink", r"nvlink.*(?:error|fatal|inactive)|NvlinkUncorrectable"),
    ("driver_mismatch", r"driver/library version mismatch|NVML/RM version mismatch|couldn\W?t communicate with the NVIDIA driver|forward compatibility was attempted"
                        r"|NVML: Driver Not Loaded|SYSTEM_DRIVER_MISMATCH|system has unsupported display driver"),
    ("driver_too_old", r"driver version is insufficient|NVIDIA driver on your system is too old|unsupported toolchain|requires a driver version"
                       r"|please update your (?:GPU|NVIDIA) driver|unsatisfied condition: cuda"),
    ("wrong_build", r"no kernel image is available|is not compatible with the current PyTorch|invalid device function|not compiled with CUDA"
                    r"|no longer supports this GPU|kernel `\w+` is for sm\d+.*but was built for|invalid kernel file|cudaErrorNoKernelImageForDevice"),
    ("cuda_in_fork", r"re-initialize CUDA in forked|CUDA error: initialization error|cuda runtime error \(3\)"),
    ("no_gpu", r"only supported with GPUs|No CUDA GPUs are available|no CUDA-capable device|Found no NVIDIA driver|invalid device ordinal"
               r"|might not have a CUDA gpu|CUDA driver initialization failed|No devices were found|GPU (?:is )?not available|Attempting to deserialize object on a? ?CUDA device"
               r"|torch\.cuda\.is_available\(\) (?:is|returned) False"),
    ("gpu_taken", r"busy or unavailable|DevicesUnavailable|exclusive.?process"),
    ("driver_stuck", r"GSP (?:task exception|timeout|RPC)|Timeout (?:after \d+s )?(?:of )?waiting for RPC|Unknown Error\b.*NVML|NVML: Unknown Error"
                     r"|CUDA unknown error|system not yet initialized|GPU requires reset|Reset required|PMU halt"),
    ("not_deterministic", r"does not have a deterministic implementation"),
    ("device_assert", r"device-side assert triggered|DeviceAssert|\bthread: \[\d+,\d+,\d+\] Assertion .* failed"),
    ("illegal_access", r"illegal memory access|IllegalAddress|ILLEGAL_ADDRESS|MMU fault"),
    ("hung_kernel", r"launch timed out|LaunchTimeout|LAUNCH_TIMEOUT|CTX SWITCH TIMEOUT"),
    ("out_of_memory", rf"(?:CUDA|HIP|cu\w+|GPU|torch|accelerator|NCCL).*(?:{_MEMORY})|^(?:{_MEMORY})|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
                      r"|CUBLAS_STATUS_NOT_INITIALIZED|NVML_SUCCESS == r INTERNAL ASSERT"),
    ("nccl_timeout", r"Watchdog caught collective operation timeout|watchdog got stuck|collective operation timed? ?out"
                     r"|timed out.*(?:ProcessGroupNCCL|NCCL)|NCCL.*(?:timed out|timeout)"),
    ("kernel_failed", r"unspecified launch failure|illegal instruction was encountered|misaligned address|hardware stack error|invalid program counter"
                      r"|CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED|MAPPING_ERROR)|CUDA driver error|Graphics (?:SM |Exception)"
                      r"|CUDA error: (?:unknown error|invalid argument|invalid configuration|operation not)|Xid .*: (?:13|32|43|69),"),
    ("nccl_error", r"NCCL (?:error|failure)|ncclComm\w+ failed|nccl(?:Internal|System|UnhandledCuda|Remote|Invalid\w+)Error|NCCL WARN|DistBackendError|NCCL communicator (?:was|has been) aborted"
                   r"|ncclRemoteError"),
    ("gpu_unused", r"GPU available but not used"),
    ("throttled", r"(?:SW Power Cap|HW Slowdown|HW Thermal Slowdown|HW Power Brake Slowdown|SW Thermal Slowdown)\s*:\s*Active"),
)  # fmt: skip
_COMPILED = tuple((cause, re.compile(pattern, re.IGNORECASE | re.MULTILINE)) for cause, pattern in _RULES)
_RANK = re.compile(r"\[?rank\s?(\d+)\b", re.IGNORECASE)
_XID = re.compile(r"\bXid\b\s*(?:\([^)]*\))?\s*:?\s*(\d+)", re.IGNORECASE)
_NO_FAILURE = re.compile(r"caller indicates that this is not a failure")  # TensorFlow's allocator, which tries again
# What the user's own code raises: its words may quote anything, and are no word of a GPU's.
_NOT_OF_A_GPU = (ValueError, TypeError, LookupError, OSError, ArithmeticError, AttributeError, NameError, SyntaxError)
_CUDA_KINDS = ("AcceleratorError", "CudaError", "CUDAError")


def from_text(text: str, kind: str = "") -> Fault | None:
    """By what an error or a line of a log says; `kind`: the name of the exception's class."""
    if _NO_FAILURE.search(text):
        return None
    numbers = [int(number) for number in _XID.findall(text)]
    found = next((fault for number in numbers if (fault := from_xid(number)) is not None), None)
    if found is None:
        named = next((cause for cause, pattern in _COMPILED if pattern.search(text)), "")
        if not named and kind == "OutOfMemoryError":
            named = "out_of_memory"
        if not named and (kind in _CUDA_KINDS or re.search(r"\bCUDA (?:runtime )?error\b", text, re.IGNORECASE)):
            named = "kernel_failed"
        if not named:
            return None
        found = _memory(text) if named == "out_of_memory" else FAULTS[named]
    said = _RANK.search(text)
    if said is None:
        return found
    rank = int(said.group(1))
    return replace(found, rank=rank, why=f"{found.why} (told by rank {rank})")


def of_error(error: BaseException) -> Fault | None:
    """The first of a chain of exceptions that is a GPU's: those after it (a save that failed too) only follow from it."""
    return next((fault for one in _chain(error) if (fault := _of_one(one)) is not None), None)


def first_error(error: BaseException) -> BaseException:
    """The exception to tell of: the first that is a GPU's, else the one that arrived."""
    return next((one for one in _chain(error) if _of_one(one) is not None), error)


def _of_one(error: BaseException) -> Fault | None:
    return None if isinstance(error, _NOT_OF_A_GPU) else from_text(str(error), type(error).__name__)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """From the first to the last; each came while the one before was dealt with."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or one.__context__
    return reversed(chain)


# ---------------------------------------------------------------- memory: torch's own report of it

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB|TiB)"
_CONTEXT_BYTES = 1 << 30  # a context and its libraries: less than that beside the allocator is nobody else's
_GIB = 1 << 30


def _bytes(text: str, *patterns: str) -> int | None:
    """By the first pattern that is there; torch has worded its report in two ways."""
    found = next((one for pattern in patterns if (one := re.search(pattern.replace("SIZE", _SIZE), text))), None)
    return int(float(found.group(1)) * _UNITS[found.group(2)]) if found else None


def _memory(text: str) -> Fault:
    """In pieces (what is reserved and not in use would do), held by others, or simply full."""
    asked = _bytes(text, "Tried to allocate SIZE")
    total = _bytes(text, r"total capac\w+ of SIZE", "SIZE total capacity")
    free = _bytes(text, "of which SIZE is free", "SIZE free")
    allocated = _bytes(text, "SIZE is allocated by PyTorch", "SIZE already allocated")
    spare = _bytes(text, "SIZE is reserved by PyTorch but unallocated")
    reserved = _bytes(text, "SIZE reserved in total")
    if spare is None and reserved is not None and allocated is not None:
        spare = reserved - allocated
    if spare is None:
        spare = _bytes(text, "SIZE cached")
    if asked is None or spare is None or allocated is None:
        return FAULTS["out_of_memory"]
    ours = allocated + spare
    sizes = f"{_gib(asked)} were asked for, {_gib(allocated)} are in use, {_gib(spare)} reserved and not in use"
    if spare >= asked:
        return _more("out_of_memory_fragmented", sizes)
    others = _others(text, ours)
    if others is None and total is not None and free is not None:
        others = max(0, total - free - ours - _CONTEXT_BYTES), ""
    if others is not None and others[0] >= max(asked, _CONTEXT_BYTES):
        return _more("out_of_memory_shared", f"{sizes}; {_gib(others[0])} are held by {others[1] or 'somebody else'}")
    return _more("out_of_memory", sizes + (f", of {_gib(total)}" if total else ""))


def _others(text: str, ours: int) -> tuple[int, str] | None:
    """What other processes hold, by torch's words; in a container our own process has another number there."""
    named = re.findall(rf"Process (\d+) has {_SIZE} memory in use", text)
    if not named:
        return (0, "") if "this process has" in text else None
    held = {pid: int(float(size) * _UNITS[unit]) for pid, size, unit in named}
    if "this process has" not in text:
        own = min(held, key=lambda pid: abs(held[pid] - ours))
        del held[own]
    return sum(held.values()), ", ".join(f"process {pid} ({_gib(size)})" for pid, size in held.items())


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _more(cause: str, words: str) -> Fault:
    fault = FAULTS[cause]
    return replace(fault, why=f"{fault.why}: {words}")


# ---------------------------------------------------------------- from the driver's numbers

_XIDS = {
    8: "hung_kernel", 13: "kernel_failed", 31: "illegal_access", 32: "kernel_failed", 43: "kernel_failed", 48: "ecc",
    61: "driver_stuck", 62: "driver_stuck", 63: "rows_remapped", 64: "rows_used_up", 69: "kernel_failed", 74: "nvlink",
    79: "off_the_bus", 94: "ecc", 95: "ecc_uncontained", 109: "hung_kernel", 119: "driver_stuck", 120: "driver_stuck",
    140: "ecc_uncontained", 154: "driver_stuck", **dict.fromkeys(range(144, 151), "nvlink"),
}  # fmt: skip


def from_xid(number: int) -> Fault | None:
    """An Xid of the driver; None for those that only follow from another one, or that nobody can act on."""
    return _more(_XIDS[number], f"Xid {number}") if number in _XIDS else None


# what slows a clock down, by NVML's bits; idle, application clocks and sync boost are somebody's wish
_REASONS = {0x8: "hardware slowdown", 0x20: "too hot (driver)", 0x40: "too hot (hardware)", 0x80: "power brake"}
_POWER_CAP, _SLOW_SHARE = 0x4, 0.7


def reasons_in_words(mask: int) -> list[str]:
    """Why the clock is not at its highest."""
    named = {1: "idle", 2: "application clocks", 4: "power cap", 16: "sync boost", **_REASONS, 256: "display"}
    return [named[bit] for bit in sorted(named) if mask & bit]


def throttling(mask: int, clock_mhz: float, most_mhz: float, temperature_c: float) -> Fault | None:
    """By heat or hardware; by the power limit only where it costs much: most cards run at that limit by right."""
    share = clock_mhz / most_mhz if most_mhz else 1.0
    held = [words for bit, words in _REASONS.items() if mask & bit]
    if mask & _POWER_CAP and share < _SLOW_SHARE:
        held.append("power cap")
    if not held:
        return None
    return _more("throttled", f"{', '.join(held)}; {clock_mhz:.0f} of {most_mhz:.0f} MHz, {temperature_c:.0f} C")


def low_utilisation(util: float, data_wait: float, memory_share: float, main_cpu: float) -> Fault:
    """Why a card is idle: shares of the time the steps wait for data, of its memory in use, of a core that the main thread uses."""
    idle = f"in use for {util:.0%} of the time"
    if data_wait > 0.25:
        return replace(
            _more("low_utilisation", f"{idle}; the steps wait for data {data_wait:.0%} of the time"),
            advice="a faster disk, a token cache instead of a stream, or more workers for your source",
        )
    if memory_share < 0.5:
        return replace(
            _more(
                "low_utilisation", f"{idle}; {memory_share:.0%} of its memory is in use: the micro-batches are small"
            ),
            advice="a larger train.micro_batch: the same result in fewer, larger pieces",
        )
    if main_cpu > 0.8:
        return replace(
            _more(
                "low_utilisation",
                f"{idle}; the main thread is at {main_cpu:.0%} of a core: launching kernels takes the time",
            ),
            advice="train.compile, or a larger train.micro_batch",
        )
    return _more("low_utilisation", idle)


def unused(used: Sequence[bool]) -> Fault | None:
    """One GPU of two in use."""
    if not used or all(used) or not any(used):
        return None
    idle = ", ".join(str(index) for index, one in enumerate(used) if not one)
    return _more("gpu_unused", f"{sum(used)} of {len(used)} in use, idle: GPU {idle}")


def silent(state: str, seconds: float) -> Fault:
    """NVML has not answered; `state`: of the process that asked it, as /proc has it."""
    asleep = ", asleep inside the kernel, where no signal reaches it" if state == "D" else ""
    return replace(_more("driver_stuck", f"no answer for {seconds:.0f} s{asleep}"), action="flag")


def unanswered(said: str) -> Fault:
    """The driver has refused to tell of the cards, in words that no rule knows."""
    return replace(_more("driver_stuck", said[:200]), action="flag")
