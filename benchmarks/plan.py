"""Paper against reality: step time and peak memory of a grid of models on this CPU, as `lamp plan` predicts them and as they are.

    python benchmarks/plan.py [--rounds 3] [--warm-up 2] [--dtypes fp32 bf16] [--shapes 0 4 9] [--recompute both|no|yes]
                             [--out results.jsonl]

Each row is a real model in a process of its own (the one that `lamp plan --measure` uses): two steps to warm up, then a few, medians.
The prediction uses the matrix product that the same process measured and one stream of numbers; it has not seen the step.
Two real times are shown: seconds that passed, and seconds that the threads worked over their number. On a machine that others
use too the second is the one to look at. Goals: time within 25 %, memory within 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from lamplighter.config import resolve
from lamplighter.gpus import Rates
from lamplighter.model.shape import Shape
from lamplighter.plan.devices import cpu, stream_rate
from lamplighter.plan.dry_run import attempt
from lamplighter.plan.job import Job
from lamplighter.plan.memory import GIB, memory
from lamplighter.plan.speed import cpu_step_seconds
from lamplighter.watch.launcher import threads_wait

# family, layers, width, heads, length, vocabulary, batch, micro-batch, dropout
GRID = [
    ("gpt2", 2, 128, 4, 256, 1024, 8, 8, 0.0),
    ("gpt2", 6, 384, 6, 256, 8192, 16, 16, 0.0),
    ("gpt2", 6, 384, 6, 256, 8192, 16, 4, 0.0),
    ("gpt2", 4, 256, 4, 512, 30000, 8, 8, 0.0),
    ("gpt2", 12, 768, 12, 512, 30000, 2, 2, 0.0),
    ("gpt2", 4, 512, 8, 1024, 8192, 4, 4, 0.0),
    ("gpt2", 6, 384, 6, 512, 8192, 4, 4, 0.1),
    ("llama", 6, 384, 6, 256, 8192, 16, 16, 0.0),
    ("llama", 4, 512, 8, 1024, 8192, 4, 2, 0.0),
    ("llama", 12, 768, 12, 512, 32000, 2, 2, 0.0),
    ("llama", 8, 512, 8, 256, 50000, 8, 8, 0.0),
]


@dataclass(frozen=True)
class Row:
    """One shape: on paper, and as it was."""

    name: str
    paper_s: float
    wall_s: float
    worked_s: float
    paper_gib: float
    real_gib: float
    gemm_flops: float
    bytes_per_s: float


def look(
    shape: tuple[str, int, int, int, int, int, int, int, float], dtype: str, again: bool, rounds: int, warm_up: int
) -> Row:
    family, layers, width, heads, length, vocab, batch, micro, dropout = shape
    words = {
        "model.family": family, "model.layers": layers, "model.width": width, "model.heads": heads,
        "model.dropout": dropout, "data.seq_len": length, "tokenizer.vocab_size": vocab, "train.batch_size": batch,
        "train.micro_batch": micro, "train.dtype": dtype, "train.recompute": again,
    }  # fmt: skip
    run = resolve(None, None, {name: [str(value)] for name, value in words.items()}).run
    tried = attempt(run, vocab, micro, rounds, warm_up).told
    model = Shape(family, vocab, length, layers, width, heads, dropout=dropout)  # type: ignore[arg-type]
    job = Job(model, length, batch, micro, 100, dtype, recompute=again)
    rates = Rates(tried["peak_flops"], stream_rate())
    name = f"{family:<5} {layers:>2} x {width:<3} T {length:<4} V {vocab:<5} {batch:>2}/{micro:<2} {dtype}"
    name += (" dropout" if dropout else "") + (" recompute" if again else "")
    paper = memory(job, cpu(rates)).training / GIB
    return Row(
        name,
        cpu_step_seconds(job, rates),
        tried["step_s"],
        tried["step_cpu_s"],
        paper,
        tried["peak_bytes"] / GIB,
        rates.gemm_flops,
        rates.bytes_per_s,
    )


def machine() -> str:
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_", "not set")
    return (
        f"{platform.machine()}, {model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f};"
        f" MALLOC_MMAP_THRESHOLD_ {threshold}"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--warm-up", type=int, default=2)
    options.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    options.add_argument("--shapes", type=int, nargs="+", default=range(len(GRID)), help="numbers of the grid, from 0")
    options.add_argument("--recompute", choices=["both", "no", "yes"], default="both")
    options.add_argument("--out", type=Path, help="one line of JSON for each row")
    chosen = options.parse_args()
    os.environ.update(threads_wait(os.environ))  # as lamp starts its own
    print(machine())
    print(f"{'':<58}{'paper s':>9}{'passed':>9}{'worked':>9}{'ratio':>7}   {'paper GiB':>9}{'real':>7}{'ratio':>7}")
    rows = []
    for dtype in chosen.dtypes:
        for again in {"both": (False, True), "no": (False,), "yes": (True,)}[chosen.recompute]:
            for shape in (GRID[number] for number in chosen.shapes):
                row = look(shape, dtype, again, chosen.rounds, chosen.warm_up)
                rows.append(row)
                print(
                    f"{row.name:<58}{row.paper_s:>9.3f}{row.wall_s:>9.3f}{row.worked_s:>9.3f}{row.paper_s / row.worked_s:>7.2f}"
                    f"   {row.paper_gib:>9.2f}{row.real_gib:>7.2f}{row.paper_gib / row.real_gib:>7.2f}",
                    flush=True,
                )
                if chosen.out:
                    with open(chosen.out, "a") as file:
                        file.write(json.dumps({**vars(row), "shape": shape, "dtype": dtype, "again": again}) + "\n")
    for what, ratios, goal in (
        ("time, of what was worked", [row.paper_s / row.worked_s for row in rows], 0.25),
        ("time, of what has passed", [row.paper_s / row.wall_s for row in rows], 0.25),
        ("memory", [row.paper_gib / row.real_gib for row in rows], 0.15),
    ):
        within = sum(abs(ratio - 1) <= goal for ratio in ratios)
        print(f"{what}: {min(ratios):.2f} to {max(ratios):.2f}; {within} of {len(ratios)} within {goal:.0%}")
    print(machine())


if __name__ == "__main__":
    main()
