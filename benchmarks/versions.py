"""Two checkouts of this project against each other, through the real command: training, first step, saves, generation.

In:  another checkout (`--before ../old`, e.g. a git worktree of an earlier commit) and this one.
Out: a table per question, the older checkout as the base, and whether the losses of both are equal to the bit.

    python benchmarks/versions.py --before ../old [--rounds 5] [--steps 40] [--set model.family=llama] [--json FILE]

Each round trains a fresh run with each checkout in turn on the same text, saves in it every ten steps, and generates
from what it made. Nothing of either checkout is imported here, so that any two versions can be compared.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measured
from training import make_text

WARM_STEPS = 5


class Checkout:
    """One version, as a command."""

    def __init__(self, name: str, root: Path, place: Path, settings: list[str]) -> None:
        self.name, self.place, self.settings = name, place, settings
        self.runs = place / name
        entry = "lamplighter" if (root / "src/lamplighter/commands").is_dir() else "lamplighter.cli"
        self.command = [sys.executable, "-m", entry]
        self.env = {**os.environ, "PYTHONPATH": str(root / "src")}
        self.round = 0
        self.found: dict[str, list[float]] = {name: [] for name in ("tokens", "first", "blocked", "generated")}
        self.losses: list[str] = []

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*self.command, *words], env=self.env, capture_output=True, text=True, cwd=self.place)
        if done.returncode:
            raise SystemExit(
                f"{self.name}: {' '.join(words)} ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        return done

    def turn(self) -> float:
        """One run and what was seen of it; the seconds of all of it."""
        self.round += 1
        run, began = f"r{self.round}", time.time()
        self.run("train", "--run", run, "--runs-dir", str(self.runs), *self.settings)
        spent = time.time() - began
        folder = self.runs / run
        steps = [r for r in _lines(folder / "metrics.jsonl") if "train/loss" in r]
        self.losses = [float(record["train/loss"]).hex() for record in steps]
        self.found["tokens"].append(statistics.median(record["train/tok_per_sec"] for record in steps[WARM_STEPS:]))
        self.found["first"].append(steps[0]["t"] - began)
        saves = [event["blocked_s"] for event in _lines(folder / "events.jsonl") if event.get("type") == "checkpoint"]
        self.found["blocked"].append(statistics.median(saves[:-1]) if len(saves) > 1 else saves[0])
        told = self.run("generate", run, "--runs-dir", str(self.runs), "--max-tokens", "200", "--prompt", "the")
        rate = re.search(r": ([\d,.]+) tokens per second", told.stdout + told.stderr)
        self.found["generated"].append(float(rate[1].replace(",", "")) if rate else float("nan"))
        return spent


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def settings(wanted: Any, place: Path) -> list[str]:
    """The same run for both, on text and a tokenizer cache of its own folder; saves every ten steps."""
    values = {
        "data.paths": str(place / "text.txt"), "data.separator": "\n\n", "data.seq_len": wanted.length,
        "tokenizer.vocab_size": wanted.vocab, "model.family": "gpt2", "model.layers": wanted.layers, "model.width": wanted.width,
        "model.heads": max(1, wanted.width // 64), "train.batch_size": wanted.batch, "train.steps": wanted.steps,
        "train.compile": "false", "train.threads": wanted.threads, "train.dtype": wanted.dtype, "eval.every_steps": 0,
        "eval.sample_every_steps": 0, "save.every_steps": 10, **dict(pair.split("=", 1) for pair in wanted.set),
    }  # fmt: skip
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def main() -> None:
    parser = measured.arguments(__doc__ or "", rounds=5)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    for name, value in {"steps": 40, "layers": 6, "width": 384, "vocab": 8192, "length": 256, "batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="fp32", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--set", nargs="*", default=[], help="more settings of the run, e.g. model.family=llama")
    wanted = parser.parse_args()
    if wanted.quick:
        wanted.layers, wanted.width, wanted.vocab, wanted.length, wanted.batch, wanted.steps = 2, 64, 1000, 32, 4, 12
        wanted.rounds = 1
    measured.say_machine()
    with tempfile.TemporaryDirectory(prefix="lamp-versions-") as folder:
        place = Path(folder)
        make_text(place / "text.txt", wanted.vocab, 1.0 if wanted.quick else 4.0)
        roots = {"before": wanted.before.resolve(), "now": measured.ROOT}
        both = {name: Checkout(name, root, place, settings(wanted, place)) for name, root in roots.items()}
        whole = measured.in_turn({name: one.turn for name, one in both.items()}, wanted.rounds)
    questions = {
        "tokens": ("training", "tokens/s", True), "first": ("command to first step, caches warm", "s", False),
        "blocked": ("a save blocks the loop", "s", False), "generated": ("generation", "tokens/s", True),
    }  # fmt: skip
    for key, (title, unit, more) in questions.items():
        rows = [measured.Row(name, one.found[key][1:], more) for name, one in both.items()]
        measured.show(title, unit, rows, "before")
    measured.show("whole command", "s", [measured.Row(name, values, False) for name, values in whole.items()], "before")
    same = both["before"].losses == both["now"].losses
    print(f"\nlosses of {len(both['now'].losses)} steps: {'equal to the bit' if same else 'NOT EQUAL'}")
    measured.keep(wanted.json)


if __name__ == "__main__":
    main()
