"""What starts processes: What is chosen for a run, and why: dtype, threads, memory, compiling."""

from __future__ import annotations

import subprocess
import sys


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
    for _ in range(30):  # glibc may take another place or two before it settles
        use()
    return (faults() - before) // 30
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
