"""What the red flags cost: CPU time per step, over the recorded curves. Run: python benchmarks/flags.py

Prints mean and median in microseconds of this thread's CPU time; validations are counted in.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))
from test_flags import CURVES, load

from lamplighter.train.anomalies.detector import Detector


def measure(name: str) -> tuple[int, float, float, float]:
    """(steps, mean, median and largest microseconds of a step)."""
    facts, records = load(name)
    detector, times = Detector(facts), []
    for record in records:
        began = time.thread_time()
        if "train/lr" in record:
            detector.step(record["step"], record)
            times.append(0.0)
        elif "eval/val_loss" in record:
            detector.validated(record["step"], record["eval/val_loss"])
        times[-1] += 1e6 * (time.thread_time() - began)
    return len(times), sum(times) / len(times), median(times), max(times)


def main() -> None:
    print(f"{'curve':<28} {'steps':>6} {'mean us':>8} {'median':>8} {'largest':>8}")
    for path in sorted(CURVES.glob("*.json")):
        steps, mean, middle, largest = measure(path.stem)
        print(f"{path.stem:<28} {steps:>6} {mean:>8.1f} {middle:>8.1f} {largest:>8.0f}")


if __name__ == "__main__":
    main()
