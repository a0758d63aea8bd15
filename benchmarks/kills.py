"""Random SIGKILLs: a run that is killed again and again, against the unbroken one, bit for bit.

In:  the number of kills (default 100) in 2,000 steps of a tiny model with dropout.
Out: whether every loss, the final weights and the optimizer are equal; steps done twice; time per recovery.

Run: .venv/bin/python benchmarks/kills.py [KILLS] [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measured

from lamplighter.rundir import RunDir, read_lines
from lamplighter.slot import read_slot

STEPS, EVERY = 2000, 10
SETTINGS = (
    "--tokenizer.kind bytes --model.family gpt2 --model.layers 2 --model.width 32 --model.heads 2 --data.seq_len 32 --train.batch_size 4 --train.dtype fp32"
    " --train.threads 1 --data.embedded_documents 300 --data.val_fraction 0.05 --eval.windows 4 --eval.sample_every_steps 0"
    f" --eval.every_steps 0 --model.dropout 0.1 --train.steps {STEPS} --save.every_steps {EVERY} --save.every_s 0"
).split()


def start(cwd: Path, run: str) -> subprocess.Popen[bytes]:
    with open(cwd / "out.txt", "ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "lamplighter", "train", "--run", run, *SETTINGS],
            cwd=cwd,
            stdout=out,
            stderr=out,
        )


def losses(run: RunDir) -> dict[int, str]:
    return {r["step"]: float(r["train/loss"]).hex() for r in read_lines(run.metrics) if "train/loss" in r}


def final_hash(run: RunDir) -> str:
    digest = hashlib.sha256()
    for name in ("model.safetensors", "training/optimizer.safetensors"):
        digest.update((run.checkpoints / f"checkpoint-{STEPS}" / name).read_bytes())
    return digest.hexdigest()


def torture(cwd: Path, run: RunDir, kills: int, rng: random.Random) -> int:
    """Kill the child (the parent outlives it), and every tenth time the parent as well; how many kills were made."""
    targets = sorted(rng.sample(range(5, STEPS - 5), kills))
    process = start(cwd, run.name)
    made = 0
    for number, target in enumerate(targets):
        while True:
            slot = read_slot(run.slot(0))
            if slot is not None and slot.step >= target and slot.steps:
                break
            if process.poll() is not None:
                process = start(cwd, run.name)
            time.sleep(0.002)
        if number % 10 == 9:
            process.kill()
            process.wait()
            process = start(cwd, run.name)
        else:
            try:
                os.kill(slot.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        made += 1
        run.slot(0).unlink(missing_ok=True)
    while process.wait() != 0:
        process = start(cwd, run.name)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, nargs="?", default=100)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    wanted = parser.parse_args()
    kills = wanted.kills
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        whole, broken = RunDir(cwd / "runs" / "whole"), RunDir(cwd / "runs" / "broken")
        start(cwd, "whole").wait()
        began = time.monotonic()
        made = torture(cwd, broken, kills, random.Random(7))
        seconds = time.monotonic() - began
        mine, theirs = losses(broken), losses(whole)
        lines = sum("train/loss" in record for record in read_lines(broken.metrics))
        equal = sum(mine.get(step) == loss for step, loss in theirs.items())
        same = final_hash(broken) == final_hash(whole)
        a_kill, twice = seconds / max(1, made), (lines - len(mine)) / max(1, made)
        print(f"{made} kills in {STEPS} steps, {seconds:.0f} s, {a_kill:.1f} s a kill with its recovery")
        print(f"losses: {equal} of {len(theirs)} equal to the last bit")
        print(f"final weights and optimizer: {'hash-equal' if same else 'DIFFERENT'}")
        print(
            f"steps done twice: {lines - len(mine)} ({twice:.1f} a kill, at most {2 * EVERY}: one save may be under way)"
        )
    measured.keep(wanted.json, {
        "kills": made, "steps": len(theirs), "equal": equal, "weights_equal": same, "seconds_a_kill": a_kill, "redone_a_kill": twice,
    })  # fmt: skip


if __name__ == "__main__":
    main()
