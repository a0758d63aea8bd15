"""What we compute on: device, dtype, threads, peak FLOP/s. The only file that will know process groups.

In:  the train section.
Out: a Machine, each choice with its reason in words.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from lamplighter import groups
from lamplighter.config import Train
from lamplighter.data.pool import usable_cores
from lamplighter.errors import BadConfig
from lamplighter.train import devices, tiles

COMPILE_PAYS_S = 600.0  # half a minute to compile, for about a tenth of each step
BF16_GAIN = 1.2  # bf16 costs accuracy: it must be worth it
ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"


@dataclass(frozen=True)
class Machine:
    """Where and how the arithmetic is done."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    name: str
    peak_flops: float
    reasons: tuple[str, ...]

    @property
    def dtype_name(self) -> str:
        return "bf16" if self.dtype == torch.bfloat16 else "fp32"

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """bf16 means autocast; parameters and optimizer state stay fp32."""
        if self.dtype == torch.bfloat16:
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                yield
        else:
            yield

    def facts(self) -> dict[str, Any]:
        """What bit-identity depends on: recorded with each checkpoint, compared at resume."""
        return {
            "device": self.device.type,
            "device_name": self.name,
            "dtype": self.dtype_name,
            "threads": self.threads,
            "torch": torch.__version__,
            "cpu": platform.machine(),
            "isa_limit": os.environ.get(ISA_LIMIT, ""),
        }


def detect(section: Train, before: dict[str, Any] | None = None) -> Machine:
    """Choose the device, the dtype and the threads; a resumed run keeps what it had."""
    before = before or {}
    if limit := before.get("isa_limit"):  # set for a trial of bf16, and it holds for fp32 too
        os.environ.setdefault(ISA_LIMIT, limit)
    reasons: list[str] = []
    device = _choose_device(section, reasons)
    threads = section.threads or before.get("threads") or usable_cores()
    torch.set_num_threads(threads)
    why = "train.threads" if section.threads else "as before" if before else "the cores this process may use"
    reasons.append(f"{threads} thread{'s' if threads != 1 else ''}: {why}")
    dtype = _choose_dtype(section, device, before.get("dtype"), reasons)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    peak, how = _peak(device, dtype, name)
    reasons.append(f"peak {peak / 1e9:,.0f} GFLOP/s in {'bf16' if dtype == torch.bfloat16 else 'fp32'}: {how}")
    return Machine(device, dtype, threads, name, peak, tuple(reasons))


def choose_compile(
    section: Train, before: bool | None, expected_s: float, where: Machine, own_model: bool, one_shape: bool
) -> tuple[bool, str]:
    """Whether to compile the blocks, and why; a resumed run keeps what it had."""
    if section.compile != "auto":
        return section.compile, "train.compile"
    if before is not None:
        return before, "as before"
    if own_model or not one_shape:
        return (
            False,
            "a model of your own is compiled if you ask for it" if own_model else "every length would be compiled",
        )
    on_cpu = where.device.type == "cpu"
    if on_cpu and where.dtype_name == "fp32":
        return False, "in fp32 on a CPU it gains nothing (docs/performance.md)"
    if expected_s < COMPILE_PAYS_S:
        return False, f"it pays from about {COMPILE_PAYS_S / 60:.0f} min of training on"
    if on_cpu and not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        return False, "there is no C++ compiler (g++), which it needs"
    return True, f"the run is long enough to pay for it (about {expected_s / 3600:.1f} h)"


def _choose_device(section: Train, reasons: list[str]) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if section.device == "cuda" and not count:
        raise BadConfig(
            "train.device is cuda, but torch sees no GPU", f"torch {torch.__version__}", "--train.device auto"
        )
    if section.device == "cpu" or not count:
        reasons.append("on the CPU: " + ("train.device" if section.device == "cpu" else "no GPU found"))
        return torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    reasons.append(f"{count} GPU{'s' if count > 1 else ''} found, using 1: {torch.cuda.get_device_name(0)}")
    return torch.device("cuda", 0)


def _choose_dtype(section: Train, device: torch.device, before: str | None, reasons: list[str]) -> torch.dtype:
    wanted = section.dtype if section.dtype != "auto" else before
    why = "train.dtype" if section.dtype != "auto" else "as before"
    if device.type == "cuda":
        if wanted is None:
            wanted = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
            why = "the GPU has it" if wanted == "bf16" else "the GPU has no bf16"
    elif wanted is None:
        wanted, why = _measured_choice()
    elif wanted == "bf16" and not make_bf16_work():
        raise BadConfig(
            "this CPU cannot compute in bf16", "a small product crashed in a trial process", "--train.dtype fp32"
        )
    reasons.append(f"{wanted}: {why}")
    return torch.bfloat16 if wanted == "bf16" else torch.float32


def _measured_choice() -> tuple[str, str]:
    """bf16 on a CPU only where it works and is clearly faster."""
    if not cpu_has_bf16():
        return "fp32", "the CPU has no bf16 instructions"
    if not make_bf16_work():
        return "fp32", "bf16 crashes on this CPU (a trial process died)"
    device = torch.device("cpu")
    fast, plain = _measured_gemm(device, torch.bfloat16), _measured_gemm(device, torch.float32)
    ratio = f"measured {fast / 1e9:.0f} against {plain / 1e9:.0f} GFLOP/s in fp32"
    return ("bf16" if fast > BF16_GAIN * plain else "fp32"), f"bf16 {ratio}"


def cpu_has_bf16() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


@functools.cache
def make_bf16_work() -> bool:
    """Some virtual machines announce AMX and die of it (SIGILL): try in a forked process; with AMX described to the
    library; without AMX. Asked before the first product, and remembered: a fork after it would hang.
    """
    if _bf16_survives(_bf16_trial):
        return True
    if tiles.missing() and _bf16_survives(_describe_tiles):
        _describe_tiles()
        return True
    os.environ[ISA_LIMIT] = "AVX512_CORE_BF16"  # read by the library at its first product, which is still to come
    if _bf16_survives(_bf16_trial):
        return True
    del os.environ[ISA_LIMIT]
    return False


def _describe_tiles() -> None:
    """What the library asks depends on the shape (sizes that fill no tile ask more): many small ones first, then others
    that must do without us.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tiles.describe(_bf16_trial)
        _bf16_trial(rows=200, inner=1001, columns=77, head=24)
    finally:
        torch.set_num_threads(threads)


def _bf16_trial(rows: int = 65, inner: int = 70, columns: int = 33, head: int = 64) -> None:
    """Products whose results are known, of sizes that fill the tiles and of given ones, and attention there and back."""
    for m, k, n in ((64, 64, 64), (rows, inner, columns)):
        a, b = ((torch.arange(x * k).reshape(x, k) % 7 - 3).float() for x in (m, n))
        right = a @ b.T
        for product in (a.bfloat16() @ b.bfloat16().T, a.bfloat16() @ b.T.contiguous().bfloat16(),
                        a.T.contiguous().bfloat16().T @ b.bfloat16().T):  # fmt: skip
            if not torch.equal(product, right.bfloat16()):
                raise ArithmeticError("a bf16 product is wrong")
    question = (torch.arange(2 * rows * head).reshape(1, 2, rows, head) % 7 - 3).bfloat16().requires_grad_()
    torch.nn.functional.scaled_dot_product_attention(question, question, question, is_causal=True).sum().backward()
    if question.grad is None or not question.grad.isfinite().all():
        raise ArithmeticError("a bf16 attention is wrong")


def _bf16_survives(trial: Callable[[], None]) -> bool:
    """The trial in a process that may die."""
    pid = os.fork()
    if pid == 0:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        torch.set_num_threads(1)
        code = 1
        try:
            trial()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def _peak(device: torch.device, dtype: torch.dtype, name: str) -> tuple[float, str]:
    if device.type == "cuda":
        known = devices.peak_of_card(name, "bf16" if dtype == torch.bfloat16 else "fp32")
        if known is not None:
            return known, "data sheet"
    return _measured_gemm(device, dtype), "measured on a matrix product"


def _measured_gemm(device: torch.device, dtype: torch.dtype, size: int = 1024, budget_s: float = 0.25) -> float:
    """The best rate of a square matrix product within a short time; on a CPU what others take away is not counted."""
    a = torch.ones(size, size, dtype=dtype, device=device)
    a @ a
    best, until = 0.0, time.perf_counter() + budget_s
    while not best or time.perf_counter() < until:  # at least once, however busy the machine is
        start, worked = time.perf_counter(), time.process_time()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = time.perf_counter() - start
        if device.type == "cpu":
            took = min(took, (time.process_time() - worked) / torch.get_num_threads() or took)
        best = max(best, 2 * size**3 / took)
    return best


def seed_step(seed: int, step: int, micro: int, rank: int = 0) -> None:
    """All random numbers of a step (dropout) come from (seed, step, micro-batch, rank)."""
    mixed = 0x9E3779B97F4A7C15
    for part in (seed, step, micro, rank):
        mixed = ((mixed ^ part) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
        mixed ^= mixed >> 31
    torch.manual_seed(mixed & (2**63 - 1))


def memory_gb(device: torch.device) -> dict[str, float]:
    """Resident memory now, by the field's names."""
    found = {"sys/ram_gb": psutil.Process().memory_info().rss / 1e9}
    if device.type == "cuda":
        found["sys/gpu_mem_gb"] = torch.cuda.memory_allocated(device) / 1e9
    return found


def memory_left() -> int:
    """Bytes that can still be had, of the machine and of the container that we are in."""
    return min([psutil.virtual_memory().available, *(limit.left for limit in groups.memory_limits())])
