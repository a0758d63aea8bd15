"""Real steps before the real run: started in a process that may die of memory, and what became of it. No torch here.

In:  a run, its vocabulary, a micro-batch.
Out: Measured: seconds of a step and the peak of memory, or that it does not fit; the largest micro-batch that does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lamplighter import report
from lamplighter.config import Run
from lamplighter.errors import ChildLost
from lamplighter.plan.devices import host_room
from lamplighter.plan.job import Measured
from lamplighter.plan.memory import GIB
from lamplighter.procs import child

STEPS = "lamplighter.commands.plan:real_steps"  # by name: it needs torch, and runs in a process of its own
_WARM_UP, _ROUNDS, _SECONDS = 2, 5, 20.0
_SPARE = 0.95  # of what is free: others live here too
_MOST_TRIES = 12


@dataclass(frozen=True)
class Trial:
    """What became of one."""

    measured: Measured
    told: dict[str, Any]  # its last words; of one that does not fit, as far as it came


def attempt(run: Run, vocab_size: int, micro_batch: int, rounds: int = _ROUNDS, warm_up: int = _WARM_UP) -> Trial:
    """A few steps with a micro-batch; a death by memory is an answer, any other one an error."""
    request = {
        "run": asdict(run),
        "vocab_size": vocab_size,
        "micro_batch": micro_batch,
        "warm_up": warm_up,
        "rounds": rounds,
        "seconds": _SECONDS,
        "bytes": int(host_room().bytes * _SPARE),
    }
    told: dict[str, Any] = {}
    with report.phase(f"try micro-batch {micro_batch}") as phase:

        def hear(record: dict[str, Any]) -> None:
            told.clear()
            told.update(record)
            phase.tick(1, str(record.get("doing", "")))

        ended = child.run(STEPS, request, on_record=hear)
    last = ended.last_line
    if "fits" in told:
        return Trial(_measured(told, micro_batch), told)
    if ended.code == -9 or "allocate" in last or "MemoryError" in last:
        why = "the kernel ended it for memory" if ended.code == -9 else last[:200]
        return Trial(_measured({"fits": False, "why": why}, micro_batch), told)
    why = f"it {ended.how()}" + (f": {last[:200]}" if last and not ended.error else "")
    raise ChildLost("a few steps on trial did not work", why, "lamp train --test tries the whole path, small")


def _measured(told: dict[str, Any], micro_batch: int) -> Measured:
    return Measured(
        step_s=told.get("step_s", 0.0),
        peak_gib=told.get("peak_bytes", 0) / GIB,
        micro_batch=micro_batch,
        steps=told.get("steps", 0),
        dtype=told.get("dtype", "fp32"),
        fits=told["fits"],
        why=told.get("why", ""),
    )


def largest_that_fits(run: Run, vocab_size: int, found: Measured) -> int:
    """By doubling and bisection from what was tried already, each try in a process of its own; 0 where not one row fits.

    Batch size and learning rate are not touched.
    """
    batch = run.train.batch_size
    good, bad = 0, batch + 1
    for _ in range(_MOST_TRIES):
        size = found.micro_batch
        words = f"{found.peak_gib:.2f} GiB" if found.fits else f"does not fit ({found.why})"
        report.note(f"micro-batch {size}: {words}")
        good, bad = (size, bad) if found.fits else (good, size)
        if good + 1 >= bad:
            break
        size = min(batch, 2 * good) if bad > batch else (good + bad) // 2
        found = attempt(run, vocab_size, size, rounds=1, warm_up=1).measured
    return good
