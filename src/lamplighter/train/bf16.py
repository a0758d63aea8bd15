"""bf16 on a CPU: whether it works here, and whether it is worth it for this model.

In:  the shape of the model.
Out: bf16 made to work where that can be (decision 004); fp32 or bf16, by the time that such a block takes in each.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import time

import torch
from torch.nn import functional

from lamplighter.model.shape import Shape
from lamplighter.model.transformer import attend
from lamplighter.procs import prctl, procfs

_GAIN = 1.1  # bf16 costs accuracy: it must be worth it
ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
_TOKENS = 256  # of the block that is timed
_TRIAL_S = 0.1
_DEADLINE_S = 20.0  # of the process that tries bf16; it takes milliseconds


SOME_MODEL = Shape(
    "gpt2", vocab_size=512, positions=_TOKENS, layers=1, width=1024, heads=16
)  # where the shape is not known


def choose(shape: Shape) -> tuple[str, str]:
    """bf16 only where it works and is clearly faster, and why."""
    if not cpu_has_it():
        return "fp32", "the CPU has no bf16 instructions"
    if not make_it_work():
        return "fp32", "bf16 crashes on this CPU (a trial process died)"
    block = _block(shape)
    plain_s, low_s = block_seconds(block, torch.float32), block_seconds(block, torch.bfloat16)
    words = f"a block of this model takes {low_s * 1000:.1f} ms in bf16, {plain_s * 1000:.1f} in fp32"
    return ("bf16" if low_s * _GAIN < plain_s else "fp32"), words


Block = tuple[torch.Tensor, list[torch.Tensor], int]  # rows, weights, heads


def _block(shape: Shape) -> Block:
    """Numbers like those of one transformer block."""
    width, length = shape.width, min(shape.positions, _TOKENS)
    sizes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    weights = [torch.full(size, 0.01).requires_grad_() for size in sizes]
    return torch.ones(_TOKENS // length, length, width), weights, shape.heads


def block_seconds(block: Block, dtype: torch.dtype) -> float:
    """Forward and backward, as training does it: the best within a short time; time that other processes took is not counted."""
    best, tries, until = float("inf"), 0, time.perf_counter() + _TRIAL_S
    while tries < 2 or time.perf_counter() < until:  # the first one sets things up
        began, worked = time.perf_counter(), time.process_time()
        _forward_backward(block, dtype)
        took = time.perf_counter() - began
        took = min(took, (time.process_time() - worked) / torch.get_num_threads() or took)
        best, tries = min(best, took), tries + 1
    return best


def _forward_backward(block: Block, dtype: torch.dtype) -> None:
    x_BTC, (w_qkv, w_out, w_up, w_down), heads = block
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        q, k, v = (part.view(*x_BTC.shape[:2], heads, -1).transpose(1, 2) for part in (x_BTC @ w_qkv.t()).chunk(3, -1))
        x_BTC = x_BTC + attend(q, k, v, None, 0.0) @ w_out.t()
        x_BTC = x_BTC + functional.gelu(x_BTC @ w_up.t(), approximate="tanh") @ w_down.t()
    torch.autograd.grad(x_BTC.sum(), block[1])


def cpu_has_it() -> bool:
    flags = procfs.of_processor("flags")
    return "avx512_bf16" in flags or "amx_bf16" in flags


def processor() -> str:
    """Its name: another one may round otherwise."""
    return procfs.of_processor("model name")


@functools.cache
def make_it_work() -> bool:
    """Some virtual machines announce AMX and die of it (SIGILL): try in a forked process; then without AMX. Asked before
    the first product, and remembered: a fork after it would hang.
    """
    if _survives_trial():
        return True
    os.environ[ISA_LIMIT] = "AVX512_CORE_BF16"  # read by the library at its first product, which is still to come
    if _survives_trial():
        return True
    del os.environ[ISA_LIMIT]
    return False


def _trial() -> None:
    """Products whose results are known, of sizes that fill a tile of AMX and others, and attention forward and backward."""
    for m, k, n in ((64, 64, 64), (65, 70, 33)):
        a, b = ((torch.arange(x * k).reshape(x, k) % 7 - 3).float() for x in (m, n))
        right = a @ b.T
        for product in (a.bfloat16() @ b.bfloat16().T, a.bfloat16() @ b.T.contiguous().bfloat16(),
                        a.T.contiguous().bfloat16().T @ b.bfloat16().T):  # fmt: skip
            if not torch.equal(product, right.bfloat16()):
                raise ArithmeticError("a bf16 product is wrong")
    q = (torch.arange(2 * 65 * 64).reshape(1, 2, 65, 64) % 7 - 3).bfloat16().requires_grad_()
    functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()  # type: ignore[no-untyped-call]
    if q.grad is None or not q.grad.isfinite().all():
        raise ArithmeticError("a bf16 attention is wrong")


def _survives_trial() -> bool:
    """In a process that may die, or hang.

    Forked, unlike all other children (procs/child.py): torch is loaded already, so this takes 25 ms of the start, and 1 s in
    a process that must load it again.
    """
    process = multiprocessing.get_context("fork").Process(target=_trial_in_fork, args=(os.getpid(),))
    process.start()
    process.join(_DEADLINE_S)
    process.kill()  # where it has not ended by itself
    process.join()
    return process.exitcode == 0


def _trial_in_fork(parent: int) -> None:
    prctl.belong_to(parent)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # what it says when it dies is for nobody
    faulthandler.disable()
    torch.set_num_threads(1)
    _trial()
