"""What being watched costs a step: blocks with and without report, interleaved, while a parent looks on.

In:  a step of about 15 ms (matrix products in numpy, one thread).
Out: microseconds per step and the share of the step, median over the pairs; CPU share of the observer.

Run: .venv/bin/python benchmarks/watching.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measured

PAIRS, STEPS, STEP_MS = 40, 60, 15.0


def step(matrix: object, repeat: int) -> None:
    for _ in range(repeat):
        matrix @ matrix  # type: ignore[operator]


def watched_step(number: int, matrix: object, repeat: int) -> None:
    """What train/loop.py reports in one step."""
    from lamplighter import report

    with report.span("data wait"):
        pass
    with report.span("compute"):
        step(matrix, repeat)
    with report.span("optimizer"):
        pass
    report.metric(number, {"train/loss": 3.2101, "train/lr": 3e-4, "train/grad_norm": 0.71, "train/iter": number, "train/dt_ms": 15.1,
                           "train/tok_per_sec": 27123.4, "train/mfu": 0.41, "train/tokens": number * 2048, "train/epoch": 0.13,
                           "train/pad_frac": 0.0, "train/data_wait_ms": 0.02})  # fmt: skip


def child(folder: str) -> None:
    import numpy as np

    from lamplighter import report
    from lamplighter.rundir import RunDir

    report.start(RunDir(Path(folder)))
    matrix = np.ones((256, 256), np.float32)
    started = time.perf_counter()
    step(matrix, 200)
    repeat = max(1, round(STEP_MS / 1000 / ((time.perf_counter() - started) / 200)))
    number, plain, watched, wall = 0, [], [], []
    with report.phase("train", total=PAIRS * STEPS, unit="steps"):
        for _ in range(PAIRS):
            cpu = time.thread_time()
            for _ in range(STEPS):
                step(matrix, repeat)
            plain.append((time.thread_time() - cpu) / STEPS)
            cpu, began = time.thread_time(), time.perf_counter()
            for _ in range(STEPS):
                number += 1
                watched_step(number, matrix, repeat)
            watched.append((time.thread_time() - cpu) / STEPS)
            wall.append((time.perf_counter() - began) / STEPS)
    empty = time.thread_time()
    for n in range(5000):
        watched_step(n, matrix, 0)
    alone_us = (time.thread_time() - empty) / 5000 * 1e6
    os.write(1, json.dumps({"plain": plain, "watched": watched, "alone_us": alone_us}).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="of the child; not for people")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    wanted = parser.parse_args()
    if wanted.folder:
        child(wanted.folder)
        return
    from lamplighter.config import Budget
    from lamplighter.rundir import RunDir
    from lamplighter.watch.process_tree import ProcessTree
    from lamplighter.watch.stall import StallDetector
    from lamplighter.watch.status import Observer

    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        run.create()
        os.mkfifo(run.fifo(0))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, __file__, folder], stdout=subprocess.PIPE, env=environment)
        observer, stall = Observer(run, [run.rank_events(0)], Budget()), StallDetector(run, ours=True)
        tree = ProcessTree([process.pid], run.slots, {process.pid: run.slot(0)})
        began, cpu = time.perf_counter(), time.process_time()
        while process.poll() is None:
            snapshot = tree.look(closely=False, calm=True)
            stall.look(tree, snapshot)
            observer.look(snapshot.processes[0].slot, snapshot.processes[0].look, snapshot.stalled_s, 0.0)
            time.sleep(0.25)
        share = (time.process_time() - cpu) / (time.perf_counter() - began)
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
    ratios = [b / a - 1 for a, b in zip(found["plain"], found["watched"], strict=True)]
    plain_ms = statistics.median(found["plain"]) * 1000
    measured.say_machine()
    print(f"a plain step: {plain_ms:.2f} ms of CPU; {PAIRS} pairs of {STEPS} steps, interleaved")
    print(
        f"the reporting of a step by itself: {found['alone_us']:.1f} us of CPU = {found['alone_us'] / plain_ms / 10:.3f} % of that step"
    )
    low, high = sorted(ratios)[len(ratios) // 4], sorted(ratios)[3 * len(ratios) // 4]
    print(f"watched against plain: {statistics.median(ratios):+.3%} of CPU time (quartiles {low:+.3%} to {high:+.3%})")
    print(f"the observer, looking 4 times a second: {share:.2%} of one core")
    measured.keep(wanted.json, {
        "step_us": found["alone_us"], "step_percent": found["alone_us"] / plain_ms / 10, "observer_percent": 100 * share,
    })  # fmt: skip


if __name__ == "__main__":
    main()
