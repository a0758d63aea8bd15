"""What starts processes: What is chosen for a run, and why: dtype, threads, memory, compiling."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lamplighter.train import bf16


def test_freed_memory_is_kept_while_training_and_given_back_after_it() -> None:
    program = """
import ctypes, psutil, torch
from lamplighter.train.hardware import kept_memory
here = psutil.Process()
def faults():
    return int(open("/proc/self/stat").read().rpartition(")")[2].split()[7])
def use():
    torch.ones(50_000_000)  # 200 MB
def cost():
    use()
    before = faults()
    for _ in range(10):  # glibc may take another place or two before it settles
        use()
    return (faults() - before) // 10
plain = cost()
with kept_memory(torch.device("cpu")):
    kept, inside = cost(), here.memory_info().rss
after = here.memory_info().rss
with kept_memory(torch.device("cuda")):
    pass
print(plain, kept, (inside - after) // 10**6)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    plain, kept, given_back_mb = map(int, told.stdout.split())
    assert plain > 10_000, "otherwise there is nothing to gain here"
    assert kept < plain / 3
    assert given_back_mb > 150


def test_a_trial_that_dies_raises_or_hangs_is_not_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "_DEADLINE_S", 1.0)
    trials = {lambda: None: True, lambda: os.kill(os.getpid(), signal.SIGKILL): False, lambda: 1 / 0: False}
    for trial, survived in {**trials, signal.pause: False}.items():
        monkeypatch.setattr(bf16, "_trial", trial)
        assert bf16._survives_trial() is survived
