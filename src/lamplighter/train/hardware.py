"""What we compute on: device, dtype, threads, peak FLOP/s. The only file that will know process groups.

In:  the train section.
Out: a Machine, each choice with its reason in words.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lamplighter import gpus
from lamplighter.config import Train
from lamplighter.errors import BadConfig
from lamplighter.model import cpu, varlen
from lamplighter.model.shape import BLOCK_ATTENTION_TOKENS, FAMILIES, Shape
from lamplighter.procs import procfs
from lamplighter.procs.pool import usable_cores
from lamplighter.train import bf16
from lamplighter.train.ranks import ALONE, World

_COMPILE_COSTS_S = 60.0  # half a minute, and it should be worth the trouble
_LLAMA_COMPILE_GAIN = 0.05  # with torch's attention, on a CPU: docs/decisions/021-kernels.md
_QWEN3_COMPILE_GAIN = 0.1  # norms of queries and keys are small passes that a compiled block does at once
_GPU_COMPILE_GAIN = 0.1
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt(3), with what they are by default
TRIM_THRESHOLD, MMAP_MAX = 128 * 1024, 65_536
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_GEMM_SIZE = {"cpu": 1024, "cuda": 8192}  # large enough to keep all of a card busy
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Machine:
    """Where and how the arithmetic is done."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    name: str
    peak_flops: float
    reasons: tuple[str, ...]
    reads_late: bool = False  # loss and norm of a step are read while the next one is computed: nothing waits for a GPU
    exact: bool = True  # kernels that give the same bits each time are asked for
    newton_schulz: torch.dtype | None = None  # what the products of an optimizer are computed in, if it has any

    @property
    def dtype_name(self) -> str:
        return DTYPE_NAMES[self.dtype]

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """bf16 and fp16 mean autocast; parameters and optimizer state stay fp32."""
        if self.dtype != torch.float32:
            with torch.autocast(self.device.type, dtype=self.dtype):
                yield
        else:
            yield

    def copied(self, *parts: npt.NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
        """On the device; to a GPU all in one copy, from pinned memory and on a stream of its own: it goes on beside the
        step before, and is waited for by no one but the kernels that need it.
        """
        if self.device.type != "cuda":
            return tuple(torch.from_numpy(part).to(self.device) for part in parts)
        pinned = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts])).pin_memory()
        beside, now = _copy_stream(self.device), torch.cuda.current_stream(self.device)
        with torch.cuda.stream(beside):
            flat = pinned.to(self.device, non_blocking=True)
        now.wait_stream(beside)
        flat.record_stream(now)  # its memory is not given away before the step has used it
        pieces = torch.split(flat, [part.size for part in parts])
        return tuple(piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True))

    def has_varlen(self, shape: Shape) -> bool:
        """Whether attention over packed rows of such a model needs no mask."""
        return varlen.is_available(self.device, self.dtype, shape.head_width, shape.dropout)

    def facts(self) -> dict[str, Any]:
        """What bit-identity depends on: recorded with each checkpoint, compared at resume."""
        return {
            "device": self.device.type,
            "device_name": self.name,
            "dtype": self.dtype_name,
            "threads": self.threads,
            "torch": torch.__version__,
            "cpu": platform.machine(),
            "processor": bf16.processor(),
            "isa_limit": os.environ.get(bf16.ISA_LIMIT, ""),
            **({"newton_schulz": DTYPE_NAMES[self.newton_schulz]} if self.newton_schulz is not None else {}),
            **({"attention": cpu.attention()} if self.device.type == "cpu" else {}),
            **(_card_facts(self.device, self.exact) if self.device.type == "cuda" else {}),
        }


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """For batches on their way to the device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _card_facts(device: torch.device, exact: bool) -> dict[str, Any]:
    card = torch.cuda.get_device_properties(device)
    return {
        "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "driver": procfs.nvidia_driver(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "exact": exact,
    }


def detect(
    section: Train, before: dict[str, Any] | None = None, shape: Shape | None = None, world: World = ALONE
) -> Machine:
    """Choose the device, the dtype (for a model of this shape) and the threads; a resumed run keeps what it had."""
    before = before or {}
    if limit := before.get("isa_limit"):  # set for a trial of bf16, and it holds for fp32 too
        os.environ.setdefault(bf16.ISA_LIMIT, limit)
    reasons: list[str] = []
    device = _choose_device(section, reasons, world)
    told = int(
        os.environ.get("LAMP_THREADS", "0")
    )  # by the parent, where ranks of several machines must have equally many
    threads = section.threads or before.get("threads") or told or max(1, usable_cores() // world.size)
    torch.set_num_threads(threads)
    why = "train.threads" if section.threads else "as before" if before else "the cores this process may use"
    if world.size > 1 and why.startswith("the cores"):
        why = "what every node has for each of its ranks" if told else f"{usable_cores()} cores for {world.size} ranks"
    reasons.append(f"{threads} thread{'s' if threads != 1 else ''}: {why}")
    allowed = os.environ.get(bf16.ISA_LIMIT)
    dtype = _choose_dtype(section, device, before.get("dtype"), shape, reasons)
    if os.environ.get(bf16.ISA_LIMIT) != allowed:
        reasons.append("without AMX: bf16 crashes with it on this CPU (a trial process died)")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    peak, how = _peak(device, dtype, name)
    reasons.append(f"peak {peak / 1e9:,.0f} GFLOP/s in {DTYPE_NAMES[dtype]}: {how}")
    late = device.type == "cuda"
    if device.type == "cpu":
        cpu.go_on_with(str(before.get("attention", "")))
    return Machine(
        device,
        dtype,
        threads,
        name,
        peak_flops=peak,
        reasons=tuple(reasons),
        reads_late=late,
        newton_schulz=_newton_schulz(section, device, dtype, before),
    )


def _newton_schulz(
    section: Train, device: torch.device, dtype: torch.dtype, before: dict[str, Any]
) -> torch.dtype | None:
    """Where the step computes in bf16, so do these products: half the time on a CPU, and the update is as good. A resumed run
    keeps what it had; one that did not say had float32 on a CPU, bf16 on a GPU.
    """
    if not section.optimizer_kind.orthogonalises:
        return None
    if then := before.get("newton_schulz"):
        return _DTYPES[then]
    if before:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def choose_compile(
    section: Train,
    where: Machine,
    family: str,
    *,
    before: bool | None,
    expected_s: float,
    one_shape: bool,
    seq_len: int,
) -> tuple[bool, str]:
    """Whether to compile the blocks, and why; a resumed run keeps what it had."""
    if section.compile != "auto":
        return section.compile, "train.compile"
    if before is not None:
        return before, "as before"
    if family not in FAMILIES:
        return False, "a model of your own is compiled if you ask for it"
    if not one_shape:
        return False, "every length would be compiled"
    on_cpu = where.device.type == "cpu"
    gain = _cpu_compile_gain(family, where.dtype_name, seq_len) if on_cpu else _GPU_COMPILE_GAIN
    if not gain:
        return False, f"it gains a {family} nothing in {where.dtype_name} on a CPU (docs/performance.md)"
    if expected_s * gain < _COMPILE_COSTS_S:
        return False, f"it pays from about {_COMPILE_COSTS_S / gain / 60:.0f} min of training on"
    if on_cpu and not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        return False, "there is no C++ compiler (g++), which it needs"
    return True, f"the run is long enough to pay for it (about {expected_s / 3600:.1f} h)"


def _cpu_compile_gain(family: str, dtype_name: str, seq_len: int) -> float:
    """Share of the time that it saves; a Llama's is lost where attention is a kernel of our own, which a compiled block does not use."""
    if family == "qwen3":
        return _QWEN3_COMPILE_GAIN
    own_attention = dtype_name == "bf16" and seq_len <= BLOCK_ATTENTION_TOKENS
    return _LLAMA_COMPILE_GAIN if family != "gpt2" and not own_attention else 0.0


def may_use_gpu(section: Train) -> bool:
    """Whether a GPU would be chosen; this makes no context on it."""
    return section.device == "cuda" or (section.device == "auto" and torch.cuda.is_available())


def _choose_device(section: Train, reasons: list[str], world: World) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if section.device == "cuda" and not count:
        raise BadConfig(
            "train.device is cuda, but torch sees no GPU", f"torch {torch.__version__}", "--train.device auto"
        )
    if section.device == "cpu" or not count:
        why = "the Apple GPU is not supported yet" if torch.backends.mps.is_available() else "no GPU found"
        reasons.append("on the CPU: " + ("train.device" if section.device == "cpu" else why))
        return torch.device("cpu")
    local = int(os.environ.get("LAMP_LOCAL_RANK", world.rank))  # of this machine, where the run has several
    here = 1 + local if "LAMP_LOCAL_RANK" in os.environ else world.size
    if here > count:
        raise BadConfig(
            f"{here} ranks, and torch sees {count} GPUs", "a rank needs one of its own", f"--train.ranks {count}"
        )
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.cuda.set_device(local)
    reasons.append(f"{count} GPU{'s' if count > 1 else ''} found, using {here}: {torch.cuda.get_device_name(local)}")
    return torch.device("cuda", local)


def _choose_dtype(
    section: Train, device: torch.device, before: str | None, shape: Shape | None, reasons: list[str]
) -> torch.dtype:
    wanted = section.dtype if section.dtype != "auto" else before
    why = "train.dtype" if section.dtype != "auto" else "as before"
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if wanted is None:
            wanted = "bf16" if has_bf16 else "fp16"
            why = "the GPU has it" if has_bf16 else "the GPU has no bf16; with a loss scale"
        elif wanted == "bf16" and not has_bf16:
            raise BadConfig(
                "this GPU has no bf16",
                f"{torch.cuda.get_device_name(device)} would emulate it, slower than fp32",
                "--train.dtype fp16",
            )
    elif wanted is None:
        wanted, why = bf16.choose(shape or bf16.SOME_MODEL)
    elif wanted == "bf16" and not bf16.make_it_work():
        raise BadConfig(
            "this CPU cannot compute in bf16", "a small product crashed in a trial process", "--train.dtype fp32"
        )
    elif wanted == "fp16":
        why += "; on a CPU it is slow, and good for trying out only"
    reasons.append(f"{wanted}: {why}")
    return _DTYPES[wanted]


def _peak(device: torch.device, dtype: torch.dtype, name: str) -> tuple[float, str]:
    if device.type == "cuda":
        known = gpus.peak_of_card(name, DTYPE_NAMES[dtype])
        if known is not None:
            return known, "data sheet"
    return _measured_gemm(device, dtype), "measured on a matrix product"


def _measured_gemm(device: torch.device, dtype: torch.dtype, budget_s: float = 0.25) -> float:
    """The best rate of a square matrix product within a short time; on a CPU, time that other processes took is not counted."""
    size = _GEMM_SIZE[device.type]
    if device.type == "cpu" and _is_slow(dtype, size, budget_s):
        size //= 4
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


def _is_slow(dtype: torch.dtype, size: int, budget_s: float) -> bool:
    """Whether one product would take far longer than may be spent, by a small one: fp16 on many processors, seconds for 1024."""
    a = torch.ones(size // 8, size // 8, dtype=dtype)
    a @ a
    worked = time.process_time()
    a @ a
    return 8**3 * (time.process_time() - worked) / torch.get_num_threads() > 4 * budget_s


def attention_kernel(where: Machine, compiled: bool, seq_len: int, dropout: float, ours: bool) -> str:
    """Which one the layers of a model get to, in words."""
    if not ours:
        return "the model's own code"
    if compiled:
        return "the compiler"
    if (
        where.device.type == "cpu"
        and where.dtype == torch.bfloat16
        and not dropout
        and seq_len <= BLOCK_ATTENTION_TOKENS
    ):
        return "block products" if "attention" in cpu.enabled else "torch"
    return "torch"


def seed_step(seed: int, step: int, micro: int, rank: int = 0) -> None:
    """All random numbers of a step (dropout) come from (seed, step, micro-batch, rank)."""
    mixed = 0x9E3779B97F4A7C15
    for part in (seed, step, micro, rank):
        mixed = ((mixed ^ part) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
        mixed ^= mixed >> 31
    torch.manual_seed(mixed & (2**63 - 1))


def memory_gb(device: torch.device) -> dict[str, float]:
    """Resident memory now, by the field's names."""
    found = {"sys/ram_gb": procfs.own_memory()[0] / 1e9}
    if device.type == "cuda":
        found["sys/gpu_peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9  # since the start
        found["sys/gpu_mem_gb"] = torch.cuda.memory_allocated(device) / 1e9
        found["sys/gpu_reserved_gb"] = torch.cuda.memory_reserved(device) / 1e9
    return found


@contextlib.contextmanager
def kept_memory(device: torch.device) -> Iterator[None]:
    """On a CPU: freed memory stays with the process while it trains. By default the C library returns large pieces to the
    system and has them mapped and zeroed anew in every step: a sixth of the time of a bf16 step. Settings that the user made
    for the allocator are respected.
    """
    user_set = "malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )
    setting = _mallopt() if device.type == "cpu" and not user_set else None
    if setting is None:
        yield
        return
    setting(M_MMAP_MAX, 0)
    setting(M_TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        setting(M_MMAP_MAX, MMAP_MAX)
        setting(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
        ctypes.CDLL(None).malloc_trim(0)


def _mallopt() -> Callable[[int, int], object] | None:
    """None where the C library is another than glibc."""
    return getattr(ctypes.CDLL(None), "mallopt", None)
