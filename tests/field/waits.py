"""What the programs that wait have in common: some training before, the truth beside each, a command line.

In:  `python waits_locks.py NAME --seconds S`, or python -m torch.distributed.run before it.
Out: a function under @hang stands still at the line marked "# HANG"; one under @healthy or @public prints DONE and ends
     with 0 after about S seconds. It is a Program: its name, its lines, and what a watcher may say of it.

Right before it stands still a program says mark("fault"); mark("holder", pid) tells who has what it waits for. A line marked
"# HANG-ALSO" may be named too: the other side of a cycle, main's join. Outside the program's own function a marker is
followed by the program's name.
"""

import argparse
import inspect
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent
NOBODY = (
    "nobody|no (other|live|running|one|thread|process)|none|only thread|itself|same thread"
    "|ended|gone|dead|died|killed|finished|exited|never"
)
PROVED = ("stuck",)  # nobody alive, no timer and no peer can end the wait
OUTSIDE = ("waiting",)  # somebody alive, or a timer, may end it
EITHER = ("stuck", "waiting")
ASLEEP = ("waiting", "slow")
BUSY = ("slow",)
PLAIN = ("{python}", "{script}", "{name}", "--seconds", "{seconds}")
TORCHRUN = ("{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *PLAIN[1:])
WAIT = 0.45  # of the seconds of a healthy program is each of its two waits; the rest is training


@dataclass(frozen=True)
class Program:
    """A program and the truth about it.

    what    what is waited for: a regular expression for the cause, the sentence and waits_for of a verdict
    who     who has it, likewise; {holder} stands for the pid that the program marked
    states  those that are right
    stdin   null; a terminal at which nobody types; a pipe whose other end the test keeps open
    heavy   a hang that keeps a core busy: beside others it would be starved instead
    """

    run: Callable[..., None]
    kind: Literal["hang", "healthy", "public"]
    what: str = ""
    who: str = ""
    states: tuple[str, ...] = PROVED
    stdin: Literal["null", "terminal", "pipe"] = "null"
    start: tuple[str, ...] = PLAIN
    heavy: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def script(self) -> Path:
        return Path(self.run.__code__.co_filename)

    def command(self, python: str, seconds: float) -> list[str]:
        facts = {"python": python, "script": self.script, "name": self.name, "seconds": f"{seconds:g}"}
        return [word.format(**facts, wait=f"{seconds * WAIT:g}") for word in self.start]

    def lines(self) -> dict[tuple[str, int], bool]:
        """(file, line) of each that may be named; true for the one that should be."""
        source, first = inspect.getsourcelines(self.run)
        found = {(self.script.name, first + n): text for n, text in enumerate(source)}
        bare = {place: text for place, text in found.items() if re.search(r"# HANG(-ALSO)?$", text.rstrip())}
        for path in HERE.glob("waits_*.py"):
            for n, text in enumerate(path.read_text().splitlines(), 1):
                if re.search(rf"# HANG(-ALSO)? {self.name}$", text):
                    bare[path.name, n] = text
        return {place: "HANG-ALSO" not in text for place, text in bare.items()}


def hang(what: str, who: str = "", **rest: Any) -> Callable[[Callable[[], None]], Program]:
    return lambda run: Program(run, "hang", what, who, **rest)


def healthy(*start: str) -> Callable[[Callable[[float], None]], Program]:
    return lambda run: Program(run, "healthy", start=start or PLAIN)


def public(*start: str) -> Callable[[Callable[[float], None]], Program]:
    return lambda run: Program(run, "public", start=start or PLAIN)


def programs_in(names: dict[str, Any]) -> list[Program]:
    return [value for value in names.values() if isinstance(value, Program)]


def main(names: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[program.name for program in programs_in(names)])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long a healthy program lasts")
    args = parser.parse_args()
    program = names[args.name]
    if program.kind == "hang":
        program.run()
    else:
        program.run(args.seconds * WAIT if program.kind == "healthy" else args.seconds)
        if os.environ.get("RANK", "0") == "0":
            print("DONE", flush=True)


# ---------------------------------------------------------------- what the programs do besides waiting


def train(steps=40):
    """As a plain script prints its steps: 0.04 s each."""
    weights = [float(n) for n in range(256)]
    for step in range(1, steps + 1):
        loss = sum(x * x for x in weights) / len(weights)
        weights = [x - 0.02 * x for x in weights]
        time.sleep(0.04)
        print(f"step {step} loss {loss:.4f}", flush=True)


def train_arrays(steps=60):
    """With numpy, which brings threads of its own, and another way of printing."""
    import numpy as np

    generator = np.random.default_rng(0)
    x, w = generator.normal(size=(256, 32)), np.zeros(32)
    y = x @ generator.normal(size=32)
    for step in range(steps):
        error = x @ w - y
        w -= 0.05 * x.T @ error / len(y)
        time.sleep(0.03)
        print(f"iter {step}: loss {float((error**2).mean()):.5f}, time 30.0ms", flush=True)


class Trainer:
    """With a class that counts for itself."""

    def __init__(self):
        self.weight, self.seen = 3.0, 0

    def fit(self, steps=40):
        for _ in range(steps):
            self.seen += 1
            time.sleep(0.05)
            self.weight -= 0.2 * self.weight
            sys.stdout.write(f"[{self.seen}] train_loss={self.weight**2:.6f}\n")
            sys.stdout.flush()


def python(code, *words, **extra):
    """Another Python that does this, as our child."""
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *map(str, words)], **extra)


def outside(code, *words):
    """Another Python that does this and is no descendant of ours: the one that started it has ended. Its pid."""
    start = """
        import subprocess, sys
        nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        print(subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], start_new_session=True, **nothing).pid)
    """
    between = python(start, textwrap.dedent(code), *words, stdout=subprocess.PIPE, text=True)
    return int(between.communicate()[0])
