"""What it costs a script to be watched, and what the watcher uses itself.

In:  seconds (default 30) of a plain training loop of about 15 ms a step, with and without `lamp watch`, interleaved.
Out: CPU microseconds a step by microbenchmark of what the agent adds, CPU share of the watcher and of the proxy.

Run: .venv/bin/python benchmarks/attending.py [SECONDS]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measured

SCRIPT = """
import resource, sys, time, torch
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
data = torch.utils.data.TensorDataset(torch.randn(64, 512))
loader = torch.utils.data.DataLoader(data, batch_size=8)
optimizer = torch.optim.AdamW(model.parameters())
until, steps = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < until:
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
used = resource.getrusage(resource.RUSAGE_SELF)
print("STEPS", steps, used.ru_utime + used.ru_stime)
"""
HOOK = """
import sys, time, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
loader = torch.utils.data.DataLoader(torch.arange(40000), batch_size=None)
def timed():
    best = 1e9
    for _ in range(7):
        start = time.process_time()
        for _ in range(3000):
            optimizer.step()
        best = min(best, (time.process_time() - start) / 3000)
    fetch = 1e9
    for _ in range(3):
        start = time.process_time()
        for _ in loader:
            pass
        fetch = min(fetch, (time.process_time() - start) / 40000)
    return best * 1e6, fetch * 1e6
print("HOOK", *timed())
"""


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def value(text: str, word: str) -> list[float]:
    line = next(line for line in text.splitlines() if line.startswith(word))
    return [float(part) for part in line.split()[1:]]


def watched(cwd: Path, words: list[str]) -> tuple[str, float, float]:
    """(stdout, CPU share of the watcher, of the proxy)."""
    began = time.monotonic()
    command = [sys.executable, "-m", "lamplighter", "watch", "--", *words]
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    time.sleep(4)  # past the start
    first, then = cpu_s(process.pid), time.monotonic()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    proxy = next((int(pid) for pid in children if "pty_proxy" in Path(f"/proc/{pid}/cmdline").read_text()), 0)
    proxy_first, last, proxy_last, at = cpu_s(proxy) if proxy else 0.0, first, 0.0, then
    while process.poll() is None:
        try:
            last, at = cpu_s(process.pid), time.monotonic()
            proxy_last = cpu_s(proxy) if proxy else 0.0
        except OSError:
            break
        time.sleep(0.2)
    out = process.stdout.read() if process.stdout else ""
    process.wait()
    assert time.monotonic() > began
    return out, (last - first) / (at - then), (proxy_last - proxy_first) / (at - then)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="?", default="30")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    wanted = parser.parse_args()
    seconds = wanted.seconds
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        (cwd / "script.py").write_text(SCRIPT)
        (cwd / "hook.py").write_text(HOOK)
        bare, ours = [], []
        for _ in range(3):
            done = subprocess.run([sys.executable, "hook.py"], cwd=cwd, capture_output=True, text=True, check=True)
            bare.append(value(done.stdout, "HOOK"))
            ours.append(value(watched(cwd, [sys.executable, "hook.py"])[0], "HOOK"))
        step = statistics.median(b[0] for b in ours) - statistics.median(b[0] for b in bare)
        fetch = statistics.median(b[1] for b in ours) - statistics.median(b[1] for b in bare)
        out, watcher, proxy = watched(cwd, [sys.executable, "script.py", seconds])
        steps, used = value(out, "STEPS")
        measured.say_machine()
        print(f"the script pays {step:.2f} us a step and {fetch:.2f} us a batch (CPU time, median of 3 interleaved)")
        print(f"a step of {used / steps * 1000:.1f} ms: {(step + fetch) / (used / steps * 1e6):.3%}")
        print(f"the watcher uses {watcher:.2%} of a core, the proxy {proxy:.2%}; {os.cpu_count()} cores")
    measured.keep(wanted.json, {
        "step_us": step, "batch_us": fetch, "step_percent": (step + fetch) / (used / steps * 1e4), "watcher_percent": 100 * watcher,
    })  # fmt: skip


if __name__ == "__main__":
    main()
