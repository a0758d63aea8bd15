"""What starts processes: Memory on paper against what autograd really keeps, and against the memory of a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict

import pytest
from test_plan_memory import CASES, CPU, compare_layer

from lamplighter.config import resolve
from lamplighter.model.shape import Shape
from lamplighter.plan import dry_run
from lamplighter.plan.job import Job
from lamplighter.plan.memory import memory
from lamplighter.procs import child
from lamplighter.train.bf16 import make_it_work

NO_BF16 = 3


def test_a_layer_keeps_what_is_written_down_in_bf16() -> None:
    """In a process of its own: some CPUs die of bf16."""
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    if done.returncode == NO_BF16:
        pytest.skip("this CPU has no bf16 that works")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_peak_on_paper_is_near_the_peak_of_a_real_process() -> None:
    words = {"model.layers": "4", "model.width": "256", "model.heads": "4", "tokenizer.vocab_size": "8000",
             "train.batch_size": "8", "train.dtype": "fp32", "train.threads": "1"}  # fmt: skip
    run = resolve(None, None, {name: [value] for name, value in words.items()}).run
    request = {"run": asdict(run), "vocab_size": 8000, "micro_batch": 8, "warm_up": 1, "rounds": 1, "seconds": 60}
    real = child.run(dry_run.STEPS, request).records[-1]
    job = Job(Shape("gpt2", 8000, 256, 4, 256, 4), 256, 8, 8, 10)
    assert real["fits"] and real["parameters"] == job.params and real["step_s"] > 0
    assert memory(job, CPU).training == pytest.approx(real["peak_bytes"], rel=0.25)


if __name__ == "__main__":
    if not make_it_work():
        sys.exit(NO_BF16)
    for kind in ("gpt2", "llama"):
        for case in CASES:
            compare_layer(kind, "bf16", *case)
        for length in (256, 520):  # attention in blocks that keep their probabilities; torch's
            compare_layer(kind, "bf16", 0.0, False, length, heads=1)
