"""What every benchmark shares: rounds in turn, a table of ratios, the machine and what it can do at most.

In:  one function per contestant, each returning seconds (or a rate) of one round of equal work.
Out: median, spread and ratio per contestant, on the screen and with --json in a file.

    wanted = measured.arguments(__doc__).parse_args()
    found = measured.in_turn({"ours": ours, "peer": peer}, wanted.rounds)
    measured.show("a title", "tokens/s", [measured.Row(name, rates) for name, rates in found.items()], against="peer")

A round takes everybody once, in an order that is turned by one each time, so that a machine that is busy for a while is
busy for all of them. The first round warms up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))  # these sources, whatever is installed

# For made-up text.
WORDS = [
    "lamp",
    "street",
    "river",
    "morning",
    "house",
    "letter",
    "window",
    "candle",
    "garden",
    "bridge",
    "market",
    "winter",
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "was",
    "with",
]

_tables: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Row:
    """One contestant: its rounds, and whether more is better (a rate) or less (seconds, bytes)."""

    name: str
    values: list[float]
    more_is_better: bool = True
    extra: str = ""

    @property
    def middle(self) -> float:
        return statistics.median(self.values)


def arguments(about: str, rounds: int = 5) -> argparse.ArgumentParser:
    """The flags that all have; the rest is the benchmark's own."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="how often each contestant has its turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="for everybody")
    parser.add_argument("--json", type=Path, help="write the tables to this file as well")
    parser.add_argument("--quick", action="store_true", help="one small case, to see that it runs")
    parser.add_argument("--no-peers", action="store_true", help="only ours: nothing is installed")
    return parser


def in_turn(contestants: Mapping[str, Callable[[], float]], rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """What each returned, round by round."""
    names, found = list(contestants), {name: [] for name in contestants}  # type: dict[str, list[float]]
    for turn in range(rounds + warm):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            value = contestants[name]()
            if turn >= warm:
                found[name].append(value)
    return found


def show(title: str, unit: str, rows: list[Row], against: str | None = None, limit: str = "") -> None:
    """A table: median, smallest and largest, and how often it beats (above 1) or loses to `against`.

    Behind the ratio stand the bounds of what it was round by round: an interval for the true one (see `interval`).
    """
    base = next((row for row in rows if row.name == against), rows[0])
    width = max(28, *(len(row.name) for row in rows))
    print(f"\n{title}" + (f"   [limit: {limit}]" if limit else ""))
    print(f"{'':<{width}} {unit:>12} {'(min - max)':>22} {'ratio':>8} {'(interval)':>13}")
    told = []
    for row in rows:
        ratio = row.middle / base.middle if row.more_is_better else base.middle / row.middle
        between = interval(row, base)
        spread = f"({_short(min(row.values))} - {_short(max(row.values))})"
        bounds = f"({between[0]:.2f} - {between[1]:.2f})" if between and row is not base else ""
        print(
            f"{row.name:<{width}} {_short(row.middle):>12} {spread:>22} {ratio:>7.2f}x {bounds:>13}  {row.extra}".rstrip(),
            flush=True,
        )
        told.append({"name": row.name, "median": row.middle, "values": row.values, "extra": row.extra, "ratio": ratio,
                     "interval": between})  # fmt: skip
    _tables.append({"title": title, "unit": unit, "against": base.name, "limit": limit, "rows": told})


def interval(row: Row, base: Row) -> tuple[float, float] | None:
    """Bounds for the true ratio, from what it was in each round: those that hold the median of such ratios in 95 of 100
    cases, whatever their distribution (order statistics; with five rounds the smallest and the largest: 94 of 100).
    """
    if len(row.values) != len(base.values) or len(row.values) < 2:
        return None
    pairs = zip(row.values, base.values, strict=True)
    found = sorted(mine / other if row.more_is_better else other / mine for mine, other in pairs)
    count, outside, left = len(found), 0.0, 0
    while left < (count - 1) // 2 and 2 * (outside := outside + math.comb(count, left) / 2**count) <= 0.05:
        left += 1
    cut = max(0, left - 1)
    return found[cut], found[count - 1 - cut]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def say_machine() -> None:
    """The line that every table needs: processor, cores, memory, versions, and how busy the machine is."""
    print(machine(), flush=True)


def machine() -> str:
    import psutil

    memory = psutil.virtual_memory().total / 2**30
    load = f"{os.getloadavg()[0]:.1f}"
    torch = sys.modules.get("torch")
    versions = f"Python {platform.python_version()}" + (f", torch {torch.__version__}" if torch else "")
    cores = len(os.sched_getaffinity(0))
    return (
        f"machine: {processor()}, {cores} cores, {memory:.0f} GiB, {versions}, load {load} at {time.strftime('%H:%M')}"
    )


def processor() -> str:
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((row.partition(":")[2].strip() for row in rows if row.startswith("model name")), platform.machine())


def gemm_gflops(dtype: str = "float32", size: int = 1536, seconds: float = 1.0) -> float:
    """The best rate of a square matrix product: what no training step can beat."""
    import torch

    a = torch.ones(size, size, dtype=getattr(torch, dtype))
    best, until = 0.0, time.perf_counter() + seconds
    a @ a
    while time.perf_counter() < until:
        began = time.perf_counter()
        a @ a
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best / 1e9


def read_gb_s(seconds: float = 1.0, mb: int = 512) -> float:
    """The best rate at which torch reads memory: what no token of a model larger than the caches can beat.

    Timed in stretches of 16 MB, one after the other, so that somebody else's turn on the core spoils one of them only.
    """
    import torch

    stretches = torch.ones(mb * 250_000).split(4_000_000)
    best, until, turn = 0.0, time.perf_counter() + seconds, 0
    while time.perf_counter() < until or turn < 2:
        one = stretches[turn % len(stretches)]
        turn += 1
        began = time.perf_counter()
        one.sum()
        best = max(best, one.numel() * 4 / (time.perf_counter() - began))
    return best / 1e9


def copy_gb_s(size: int, seconds: float = 0.5) -> float:
    """The best rate of copying so many bytes, counted once."""
    import numpy as np

    a = np.ones(size, np.uint8)
    b = np.empty_like(a)
    best, until = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        np.copyto(b, a)
        best = max(best, a.nbytes / (time.perf_counter() - began))
    return best / 1e9


def keep(where: Path | None, figures: Mapping[str, float] | None = None) -> None:
    """At the end: the tables as JSON, if that was asked for, and the figures that a document may quote by name.

    A result in benchmarks/results/ is what the README quotes: `make readme` (benchmarks/readme.py).
    """
    if where is not None:
        words = [Path(sys.argv[0]).name, *(word for word in sys.argv[1:])]
        told = {
            "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit(), "machine": machine().removeprefix("machine: "),
            "command": "python benchmarks/" + " ".join(words), "figures": dict(figures or {}), "tables": _tables,
        }  # fmt: skip
        where.write_text(json.dumps(told, indent=1) + "\n")
        print(f"\nwritten: {where}")


def commit() -> str:
    """Of these sources; with a plus where they were changed since."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
