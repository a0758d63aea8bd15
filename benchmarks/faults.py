"""One recoverable fault a minute: how much of the time is useful work all the same.

In:  minutes (default 10), one fault in each: a kill, a deadlock, a kill during a save, a bad batch, a stopped process.
Out: the share of wall time in steps that count, the ledger's explained share, each verdict and what was done.

Run: .venv/bin/python benchmarks/faults.py [MINUTES] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import measured

from lamplighter.rundir import RunDir, read_lines
from lamplighter.slot import Slot, read_slot
from lamplighter.watch.time_report import read_time_report

FAULT_AT_S = 30.0  # after the beginning of each minute
MODEL = """
import os, threading, time, torch

def once(name):
    try:
        os.unlink(name)
        return True
    except FileNotFoundError:
        return False

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.inner = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(8)])
        self.head = torch.nn.Linear(width, vocab_size)

    def forward(self, ids):
        if self.training and once("deadlock"):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        scale = float("inf") if self.training and once("nan") else 1.0
        return self.head(self.inner(self.embed(ids))) * scale
"""
SETTINGS = [
    "--tokenizer.kind",
    "bytes",
    "--model.family",
    "model:Model",
    "--model.width",
    "256",
    "--model.heads",
    "4",
    "--data.seq_len",
    "128",
    "--train.batch_size",
    "8",
    "--train.dtype",
    "fp32",
    "--data.embedded_documents",
    "3000",
    "--eval.every_steps",
    "0",
    "--eval.sample_every_steps",
    "0",
    "--train.steps",
    "10000000",
    "--save.every_steps",
    "0",
    "--save.every_s",
    "4",
    "--force",
]


def kill(cwd: Path, run: RunDir, slot: Slot) -> None:
    os.kill(slot.pid, signal.SIGKILL)


def kill_in_save(cwd: Path, run: RunDir, slot: Slot) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        now = read_slot(run.slot(0))
        if now is not None and now.saving:
            return kill(cwd, run, now)
        time.sleep(0.001)
    return kill(cwd, run, slot)


def stop_and_go_on(cwd: Path, run: RunDir, slot: Slot) -> None:
    os.kill(slot.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(slot.pid, signal.SIGCONT)


FAULTS: tuple[tuple[str, Callable[[Path, RunDir, Slot], None]], ...] = (
    ("kill", kill),
    ("deadlock", lambda cwd, run, slot: (cwd / "deadlock").touch()),
    ("kill in a save", kill_in_save),
    ("bad batch", lambda cwd, run, slot: (cwd / "nan").touch()),
    ("stopped for 3 s", stop_and_go_on),
)


def useful_seconds(run: RunDir) -> float:
    """Seconds of every step that counts (the last record of each), and those that steps waited for a save."""
    steps = {r["step"]: r.get("train/dt_ms", 0.0) / 1000 for r in read_lines(run.metrics) if "train/loss" in r}
    saves = sum(e.get("blocked_s", 0.0) for e in read_lines(run.events) if e.get("type") == "checkpoint")
    return sum(steps.values()) + saves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float, nargs="?", default=10.0)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    wanted = parser.parse_args()
    minutes = wanted.minutes
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        (cwd / "model.py").write_text(MODEL)
        run = RunDir(cwd / "runs" / "f")
        words = ["train", "--run", "f", *SETTINGS, "--budget.hours", str(minutes / 60)]
        began = time.monotonic()
        with open(cwd / "out.txt", "ab") as out:
            process = subprocess.Popen([sys.executable, "-m", "lamplighter", *words], cwd=cwd, stdout=out, stderr=out)
        for minute in range(int(minutes)):
            time.sleep(max(0.0, began + 60 * minute + FAULT_AT_S - time.monotonic()))
            name, fault = FAULTS[minute % len(FAULTS)]
            slot = read_slot(run.slot(0))
            if slot is None or process.poll() is not None:
                print((cwd / "out.txt").read_text()[-3000:])
                raise SystemExit("the run has ended before its time")
            print(f"minute {minute + 1}: {name} at step {slot.step}", flush=True)
            fault(cwd, run, slot)
        code = process.wait()
        wall = time.monotonic() - began
        for event in read_lines(run.events):
            if event.get("type") == "verdict":
                print(f"  {event['state']} {event['cause']} {event['action']}: {event['why'][:150]}")
        ledger, useful = read_time_report(run), useful_seconds(run)
        explained = 1 - ledger.unexplained_s / ledger.wall_s
        print(f"exit {code}; {wall:.0f} s, {ledger.attempts} attempts, {ledger.redone_steps} steps done twice")
        print(f"useful time {useful / wall:.1%}; explained by the ledger {explained:.2%}; {os.cpu_count()} cores")
        print(
            "\n".join(
                f"  {name:<34} {seconds:7.1f} s"
                for name, seconds in sorted(ledger.seconds.items(), key=lambda r: -r[1])[:14]
            )
        )
    measured.keep(
        wanted.json, {"minutes": minutes, "useful_percent": 100 * useful / wall, "explained_percent": 100 * explained}
    )


if __name__ == "__main__":
    main()
