"""A few real steps of a run's model on made-up tokens, in a process of its own that may die of memory.

In:  `python -m lamplighter.plan.dry_run_child REQUEST`: the run, the vocabulary, a micro-batch, how many rounds, how many bytes.
Out: one line of JSON for each thing that happened; the last one says whether it fitted, how long a step takes, the peak.

The process is the first that the kernel takes when memory ends (its OOM score is raised), and on a CPU it may not take more
than it was given (RLIMIT_AS): so a trial that does not fit ends itself, and nothing else on the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lamplighter.train.hardware import Machine
    from lamplighter.train.optimizers import Optimizer

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Took:
    """Seconds that have passed, and seconds that all threads have worked: on a shared machine they differ."""

    wall_s: float
    cpu_s: float


class Clock:
    """Two clocks, started together."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def took(self) -> Took:
        return Took(time.perf_counter() - self.wall, time.process_time() - self.cpu)


def main() -> int:
    """Build, step, tell."""
    request: dict[str, Any] = json.loads(sys.argv[1])
    _die_first()
    _say(doing="importing torch")
    import torch

    try:
        _say(**_try(request))
    except (torch.OutOfMemoryError, MemoryError) as error:
        _say(fits=False, why=_first_line(error))
    except RuntimeError as error:
        if "allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        _say(fits=False, why=_first_line(error))
    return 0


def _die_first() -> None:
    """With the process that started it, and before every other one when memory ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with contextlib.suppress(OSError):  # not on every system, and then nothing is lost
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit(more_bytes: int) -> None:
    """From here on, so many bytes more and no further."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = now + more_bytes
    for known in (soft, hard):
        wanted = min(wanted, known) if known != resource.RLIM_INFINITY else wanted
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _say(**words: Any) -> None:
    os.write(1, (json.dumps(words) + "\n").encode())


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def _try(request: dict[str, Any]) -> dict[str, Any]:
    """The model as the run would build it, and rounds of at most two micro-batches and one optimizer step."""
    import torch

    from lamplighter.config import Run
    from lamplighter.model.build import build
    from lamplighter.model.recompute import recompute_blocks
    from lamplighter.plan.job import known_shape
    from lamplighter.train import hardware, optimizers

    run = Run.model_validate(request["run"])
    where = hardware.detect(run.train, shape=known_shape(run))
    if where.device.type == "cpu" and sys.platform == "linux" and request.get("bytes"):
        _limit(int(request["bytes"]))
    _say(doing="building the model")
    built = build(run.model, request["vocab_size"], run.data.seq_len, 0, run.train.seed)
    if run.train.recompute:
        recompute_blocks(built.model)
    model = built.model.to(where.device)
    model.train()
    optimizer = optimizers.make_optimizer(model, run.train)
    rows, warm_up, rounds = int(request["micro_batch"]), int(request["warm_up"]), int(request["rounds"])
    accumulation = math.ceil(run.train.batch_size / rows)
    micros: list[Took] = []
    ends: list[Took] = []
    until = time.perf_counter() + float(request["seconds"])
    for number in range(warm_up + rounds):
        for _ in range(min(2, accumulation)):
            whole = run.train.loss == "whole"
            micros.append(_micro_batch(model, where, rows, run.data.seq_len, request["vocab_size"], whole))
            _say(doing=f"step {number + 1} of {warm_up + rounds}", seconds=round(micros[-1].wall_s, 4))
        ends.append(_optimizer_step(optimizer, run.train.grad_clip, where))
        if time.perf_counter() > until and number >= 1:
            break
    first = min(warm_up, len(ends) - 1)
    micro, end = _middle(micros[min(2, accumulation) * first :]), _middle(ends[first:])
    return {
        "fits": True,
        "micro_batch": rows,
        "steps": len(ends),
        "micro_s": micro.wall_s,
        "optimizer_s": end.wall_s,
        "step_s": accumulation * micro.wall_s + end.wall_s,
        "step_cpu_s": (accumulation * micro.cpu_s + end.cpu_s) / where.threads,
        "peak_bytes": _peak_bytes(where),
        "parameters": built.parameters,
        "dtype": where.dtype_name,
        "device": where.name,
        "on_cpu": where.device.type == "cpu",
        "peak_flops": where.peak_flops,
        "memory_bytes": None
        if where.device.type == "cpu"
        else torch.cuda.get_device_properties(where.device).total_memory,
    }


def _micro_batch(model: torch.nn.Module, where: Machine, rows: int, length: int, vocabulary: int, whole: bool) -> Took:
    """Forward and backward as the loop does them."""
    import torch

    ids = torch.randint(0, vocabulary, (rows, length)).to(where.device)
    clock = Clock()
    _loss(model, where, ids, whole).backward()  # type: ignore[no-untyped-call]
    _wait(where)
    return clock.took()


def _loss(model: torch.nn.Module, where: Machine, ids: torch.Tensor, whole: bool) -> torch.Tensor:
    """In a function of its own, as in the loop: the logits are let go before the backward pass."""
    from lamplighter.train import validation

    with where.precision():
        return validation.nats(model, ids, ids, None, whole, 1 / ids.numel())


def _optimizer_step(optimizer: Optimizer, clip: float, where: Machine) -> Took:
    from lamplighter.train.optimizers import clip_factor

    clock = Clock()
    optimizer.step(0.0, clip_factor(float(optimizer.grad_norm()), clip))
    optimizer.zero_grad()
    _wait(where)
    return clock.took()


def _wait(where: Machine) -> None:
    import torch

    if where.device.type == "cuda":
        torch.cuda.synchronize(where.device)


def _middle(times: list[Took]) -> Took:
    return sorted(times, key=lambda took: took.wall_s)[len(times) // 2]


def _peak_bytes(where: Machine) -> int:
    """Of the device: what torch took at most; of a CPU, the resident memory of this process at its highest."""
    import torch

    if where.device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(where.device))
    if sys.platform == "linux":  # rusage would also count what started this process
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    os._exit(main())  # at once: all is said, and torch takes a second to unload itself
