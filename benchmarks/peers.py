"""Peers in virtual environments of their own, and one process each that works when it is its turn.

In:  the name of a group of packages; a program in the form of source text.
Out: the group's Python, installed at first use and reused after; answers of the program, one per line asked.

    python benchmarks/peers.py            install them all
    python benchmarks/peers.py hf         install one group

Each group is a folder of .bench-venv, so that what one peer needs cannot disturb another, or us. torch is always pinned
to the version of constraints.txt: without a pin it fetches gigabytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[1]
PLACE = ROOT / ".bench-venv"
CONSTRAINTS = ROOT / "constraints.txt"
# What to install, and whether all of constraints.txt holds for it or only the line of torch.
GROUPS: dict[str, tuple[list[str], bool]] = {
    "hf": (["torch", "transformers", "accelerate", "datasets", "tokenizers", "tiktoken", "psutil"], True),
    "trl": (["torch", "transformers", "accelerate", "datasets", "peft", "trl==1.16.0", "psutil"], True),
    "lightning": (["torch", "lightning", "transformers"], True),
    "serving": (["torch", "transformers[serving]", "accelerate"], True),
    "litgpt": (["torch", "litgpt", "requests"], False),  # it asks for older versions of what is pinned
    "litdata": (["torch", "litdata"], False),  # apart: the torchvision that it brings stops litgpt from starting
}


class NoPeer(Exception):
    """A group could not be installed here; the benchmark says so and goes on without it."""


def python(group: str) -> Path:
    """The interpreter of a group. Installs at the first call, which is said, and can take minutes."""
    packages, all_pinned = GROUPS[group]
    place = PLACE / group
    done, wanted = place / "installed.json", {"packages": packages, "torch": _torch_pin()}
    if done.exists() and json.loads(done.read_text()) == wanted:
        return place / "bin" / "python"
    print(f"installing {', '.join(packages)} into {place.relative_to(ROOT)} (once)", flush=True)
    venv.create(place, with_pip=True, clear=True)
    pins = CONSTRAINTS
    if not all_pinned:
        pins = place / "constraints.txt"
        pins.write_text(_torch_pin() + "\n")
    command = [str(place / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(pins), *packages]
    try:
        subprocess.run(command, check=True, timeout=1800, stderr=subprocess.PIPE, text=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        lines = [line for line in str(error.stderr or error).splitlines() if not line.startswith("WARNING")]
        raise NoPeer(f"{group} could not be installed: {(lines or [str(error)])[-1]}") from error
    done.write_text(json.dumps(wanted))
    return place / "bin" / "python"


def _torch_pin() -> str:
    found = re.search(r"^torch==.*$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert found, "constraints.txt does not pin torch"
    return found.group()


class Worker:
    """A process that runs one program: it reads a line of JSON, works, and answers with a line of JSON.

    The program defines `answer(request)`; what it prints goes to stderr, so that a chatty library cannot get in between.
    A program that dies is a RuntimeError with the end of its stderr, never a missing row.
    """

    def __init__(self, interpreter: Path | str, program: str, log: Path, environment: dict[str, str] | None = None):
        self.log = log
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                [str(interpreter), "-c", PREFACE + program + LOOP],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )

    def ask(self, request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died; the empty answer below says so
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise RuntimeError(f"the program ended with {code}:\n{self.log.read_text()[-1500:]}")
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()


PREFACE = "import json, os, sys, time\n_answers = os.fdopen(os.dup(1), 'w')\nos.dup2(2, 1)\n"
LOOP = """
for _line in sys.stdin:
    _answers.write(json.dumps(answer(json.loads(_line))) + "\\n")
    _answers.flush()
"""


def main() -> None:
    for group in sys.argv[1:] or GROUPS:
        try:
            print(f"{group}: {python(group)}")
        except NoPeer as error:
            print(f"{group}: {error}")


if __name__ == "__main__":
    main()
