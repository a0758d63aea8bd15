"""How true the time left is: ten different runs with validations, samples, saves and kills, looked at from outside.

In:  nothing; each run is the real command with a model that sleeps, so that the figure is about the arithmetic and not about
     who else uses the machine.
Out: for each run the error of the time left against the real end, at every look from the tenth step on (after a resume:
     from the first one on) with more than a second to go; `--json` writes the figures.

    python benchmarks/time_left.py
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import measured

from lamplighter.rundir import RunDir, read_lines
from lamplighter.slot import SURE_STEPS, read_slot
from lamplighter.watch.status import Status

LAMP = [sys.executable, "-m", "lamplighter", "train", "--run", "r", "--train.threads", "1", "--train.dtype", "fp32",
        "--tokenizer.kind", "bytes", "--data.seq_len", "32", "--train.batch_size", "4", "--data.embedded_documents", "300",
        "--data.val_fraction", "0.05", "--model.width", "16", "--model.heads", "2"]  # fmt: skip
MODEL = """
import time, torch
class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(vocab_size, width), torch.nn.Linear(width, vocab_size)
    def forward(self, ids):
        time.sleep({step_s} if self.training else {look_s})
        return self.head(self.embed(ids))
"""
LOOK_EVERY_S = 0.2
LEAST_LEFT_S = 1.0


@dataclass(frozen=True)
class Case:
    """One run: how long its parts take, how often they come, where it is killed."""

    steps: int
    step_s: float
    look_s: float  # of one batch of a validation, or one token of a sample
    every: int
    sample: int = 0
    save: int = 0
    kills: tuple[int, ...] = ()

    def words(self) -> list[str]:
        return [
            *("--model.family", "own:Model", "--train.steps", str(self.steps), "--eval.windows", "8"),
            *("--eval.every_steps", str(self.every), "--eval.sample_every_steps", str(self.sample)),
            *("--eval.sample_tokens", "10", "--save.every_steps", str(self.save)),
        ]


CASES = (
    Case(200, 0.05, 0.02, 50),
    Case(150, 0.08, 0.2, 30, save=30),
    Case(400, 0.02, 0.02, 100, 200, 100),
    Case(100, 0.1, 0.3, 10),
    Case(200, 0.05, 0.05, 50, 50, 25, kills=(60,)),
    Case(150, 0.08, 0.1, 40, save=20, kills=(30, 70)),
    Case(60, 0.2, 0.5, 20, 30, 10, kills=(25,)),
    Case(20, 1.5, 1.0, 8, save=4),
    Case(300, 0.03, 0.01, 0, 100, 50, kills=(120,)),
    Case(120, 0.1, 0.05, 120, 20, 60),
)


def start(folder: Path, case: Case) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*LAMP, *case.words()], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def kill(process: subprocess.Popen[bytes], child: int) -> None:
    for pid in (process.pid, child):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def errors(folder: Path, case: Case) -> list[float]:
    """Every look of the last attempt, as a share of what was really left."""
    (folder / "own.py").write_text(MODEL.format(step_s=case.step_s, look_s=case.look_s))
    run, kills, looks = RunDir(folder / "runs" / "r"), list(case.kills), list[tuple[float, float]]()
    process, resumed = start(folder, case), False
    while process.poll() is None:
        time.sleep(LOOK_EVERY_S)
        slot = read_slot(run.slot(0))
        if slot is None:
            continue
        if kills and slot.step >= kills[0] and slot.durable_step:
            kill(process, slot.pid)
            kills.pop(0)
            run.slot(0).unlink()
            process, resumed, looks = start(folder, case), True, []
            continue
        left = Status("r", slot=slot).eta_s
        if left is not None and (resumed or slot.measured >= SURE_STEPS):
            looks.append((time.time(), left))
    assert process.returncode == 0, f"the run ended with {process.returncode}"
    end = next(event["t"] for event in read_lines(run.rank_events(0)) if event.get("type") == "finished")
    return [abs(left - (end - at)) / (end - at) for at, left in looks if end - at > LEAST_LEFT_S]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: list[float] = []
    print(f"{'run':<64} {'looks':>6} {'median':>7} {'p95':>7} {'worst':>7} {'within 20 %':>12}")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            seen = sorted(errors(Path(folder), case))
        found += seen
        name = f"{case.steps} x {case.step_s} s, every {case.every}/{case.sample}/{case.save}, killed at {case.kills or '-'}"
        share = sum(one <= 0.2 for one in seen) / len(seen)
        print(f"{name:<64} {len(seen):>6} {statistics.median(seen):>7.1%} {seen[int(0.95 * len(seen))]:>7.1%}"
              f" {seen[-1]:>7.1%} {share:>12.1%}", flush=True)  # fmt: skip
    found.sort()
    figures = {
        "runs": len(CASES),
        "looks": len(found),
        "median_percent": 100 * statistics.median(found),
        "p95_percent": 100 * found[int(0.95 * len(found))],
        "within_fifth_percent": 100 * sum(one <= 0.2 for one in found) / len(found),
    }
    print(figures)
    measured.keep(args.json, figures)


if __name__ == "__main__":
    main()
