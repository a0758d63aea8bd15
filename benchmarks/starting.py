"""How long a command takes to answer: lamp --help and --version, against litgpt --help and imports of peers.

In:  nothing.
Out: seconds of each from a cold process, median and spread; the limit is a Python that does nothing.

    python benchmarks/starting.py [--rounds 5] [--no-peers]

Each command is a process of its own; files are in the page cache after the first round, which is not counted. The first
batch of a token cache is in batches.py. Processor time is told as well: on a busy machine it says more than the clock.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measured
import peers

# What the console script of an installed package does: its own few lines, then lamplighter.commands:main.
SCRIPT = "import re, sys\nfrom lamplighter.commands import main\nsys.exit(main())\n"


def commands(no_peers: bool, script: Path) -> dict[str, list[str]]:
    ours = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "lamp --help": [sys.executable, str(script), "--help"],
        "lamp --version": [sys.executable, str(script), "--version"],
        "lamp train --help": [sys.executable, str(script), "train", "--help"],
        "import torch": [sys.executable, "-c", "import torch"],
    }
    if no_peers:
        return ours
    for group, name, words in (
        ("hf", "import transformers.Trainer", ["-c", "from transformers import Trainer"]),
        ("hf", "transformers --help", ["-m", "transformers.cli.transformers", "--help"]),
        ("litgpt", "litgpt --help", ["-m", "litgpt", "--help"]),
    ):
        try:
            command = [str(peers.python(group)), *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except peers.NoPeer as error:
            print(f"left out: {name}: {error}")
            continue
        if done.returncode:
            print(f"left out: {name}: it ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
            continue
        ours[name] = command
    return ours


def main() -> None:
    wanted = measured.arguments(__doc__ or "").parse_args()
    rounds = 1 if wanted.quick else wanted.rounds
    measured.say_machine()
    environment = {**os.environ, "PYTHONPATH": str(measured.ROOT / "src")}

    used: dict[str, list[float]] = {}

    def turn(name: str, command: list[str]) -> float:
        began, before = time.perf_counter(), os.times()
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds, after = time.perf_counter() - began, os.times()
        cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
        used.setdefault(name, []).append(cpu_s)
        return seconds

    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "lamp"
        script.write_text(SCRIPT)
        chosen = commands(wanted.no_peers or wanted.quick, script)
        if wanted.quick:
            chosen = {name: chosen[name] for name in ("python -c pass", "lamp --help")}
        found = measured.in_turn({name: (lambda name=name, c=c: turn(name, c)) for name, c in chosen.items()}, rounds)
    rows = []
    for name, values in found.items():
        told = f"{statistics.median(used[name][1:]):.2f} s of processor"
        rows.append(measured.Row(name, values, more_is_better=False, extra=told))
    measured.show("from the command to its end", "seconds", rows, "lamp --help", limit="python -c pass")
    measured.keep(wanted.json)


if __name__ == "__main__":
    main()
