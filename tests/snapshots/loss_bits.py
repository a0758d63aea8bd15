"""The loss of every step of 20-step runs, bit for bit, through the real command; two source trees can be compared.

In:  nothing (the `lamplighter` that Python finds), or `--against SRC`: another tree's src folder.
Out: JSON on stdout: the machine, and for each run the losses as hexadecimal floats; with --against, a line for each run
     and exit code 1 where one differs. The words of the runs are also those of tests/run/test_snapshots.py.

    python tests/snapshots/loss_bits.py                          # this tree
    PYTHONPATH=OLD/src python tests/snapshots/loss_bits.py       # another one
    python tests/snapshots/loss_bits.py --against OLD/src        # both, compared
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 20
COMMON = [
    "--tokenizer.kind", "bytes", "--model.family", "gpt2", "--model.layers", "2", "--model.width", "32", "--model.heads", "2",
    "--train.batch_size", "4", "--train.device", "cpu", "--train.dtype", "fp32", "--train.threads", "1",
    "--train.steps", str(STEPS), "--data.embedded_documents", "300", "--data.val_fraction", "0.05",
    "--eval.windows", "4", "--eval.every_steps", "10", "--eval.sample_every_steps", "10", "--eval.sample_tokens", "8",
    "--save.every_steps", "10", "--save.staged", "false",
]  # fmt: skip
CACHE = ["--data.seq_len", "32"]
ROWS = ["--data.seq_len", "96", "--data.paths", "rows.jsonl", "--data.packing", "packed"]
GROUPED = ["--data.seq_len", "96", "--data.paths", "rows.jsonl", "--data.packing", "grouped"]
STREAM = ["--data.seq_len", "32", "--data.stream", "true", "--data.tokens_per_chunk", "2000"]
LLAMA = ["--model.family", "llama", "--model.kv_heads", "1"]
DROPOUT = ["--model.dropout", "0.1"]
LARGER = ["--data.seq_len", "128", "--model.width", "128", "--model.heads", "4", "--train.batch_size", "8",
          "--train.threads", "2"]  # fmt: skip

RUNS: dict[str, list[str]] = {
    "cache": CACHE,
    "cache-dropout": [*CACHE, *DROPOUT],
    "cache-llama": [*CACHE, *LLAMA],
    "cache-llama-dropout": [*CACHE, *LLAMA, *DROPOUT],
    "rows": ROWS,
    "rows-dropout": [*ROWS, *DROPOUT],
    "rows-llama": [*ROWS, *LLAMA],
    "rows-llama-dropout": [*ROWS, *LLAMA, *DROPOUT],
    "rows-grouped": [*GROUPED, *DROPOUT],
    "stream": [*STREAM, *DROPOUT],
    "micro-batches": [*CACHE, *DROPOUT, "--train.micro_batch", "2"],
    "recompute": [*CACHE, *LLAMA, *DROPOUT, "--train.recompute", "true"],
    "whole-loss": [*CACHE, "--train.loss", "whole"],
    "async-save": [*CACHE, *DROPOUT, "--save.staged", "true"],
    "bf16": [*CACHE, *LLAMA, "--train.dtype", "bf16"],
    "larger-two-threads": LARGER,
    "larger-llama-bf16": [*LARGER, *LLAMA, "--train.dtype", "bf16"],
}


def write_rows(folder: Path) -> None:
    """144 questions and answers, the same on every machine."""
    pairs = [(a, b) for a in range(1, 13) for b in range(1, 13)]
    rows = [{"prompt": f"What is {a} plus {b}?", "completion": f"{a} plus {b} is {a + b}."} for a, b in pairs]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train_words(name: str) -> list[str]:
    """The command line of one run; in its folder `write_rows` has been called."""
    return ["train", "--run", name, *COMMON, *RUNS[name]]


def losses(run: Path) -> list[str]:
    """The loss of each step in order, as hexadecimal."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {record["step"]: float(record["train/loss"]).hex() for record in records if "train/loss" in record}
    assert sorted(found) == list(range(1, STEPS + 1)), f"{run.name}: steps {sorted(found)}"
    return [found[step] for step in sorted(found)]


def machine() -> dict[str, str]:
    """What the bits may depend on besides the code."""
    page = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in page.splitlines())}
    named = [fields[name] for name in ("model name", "cpu family", "model") if name in fields]
    flags = fields.get("flags", "").split()
    return {
        "cpu": " ".join(named) or platform.processor(),
        "vector_instructions": next((name for name in ("avx512f", "avx2") if name in flags), "other"),
        "torch": importlib.metadata.version("torch"),
    }


def measure(names: list[str], source: Path | None = None) -> dict[str, list[str]]:
    """Each run in a fresh folder, by the tree that Python finds or by `source`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAMP_")}
    module = "lamplighter"
    if source:
        environment["PYTHONPATH"] = str(source)
        module = "lamplighter" if (source / "lamplighter" / "commands").is_dir() else "lamplighter.cli"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder))
        for name in names:
            done = subprocess.run([sys.executable, "-m", module, *train_words(name)], cwd=folder, env=environment,
                                  capture_output=True, text=True, check=False)  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"{name}: exit {done.returncode}\n{done.stdout}{done.stderr}")
            found[name] = losses(Path(folder) / "runs" / name)
            sys.stderr.write(f"{name} is measured{f' ({source})' if source else ''}\n")
    return found


def compare(names: list[str], source: Path) -> int:
    """A line for each run; 1 where the bits differ."""
    differ = 0
    for name in names:
        mine, theirs = measure([name])[name], measure([name], source)[name]
        first = next((step for step, pair in enumerate(zip(mine, theirs, strict=True), 1) if pair[0] != pair[1]), None)
        differ += first is not None
        sys.stdout.write(f"{name:<22} {'the same' if first is None else f'DIFFERS from step {first} on'}\n")
    return 1 if differ else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the src folder of another tree")
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS), help="some of the runs")
    given = parser.parse_args()
    if given.against:
        return compare(given.only, given.against.resolve())
    result: dict[str, Any] = {"machine": machine(), "losses": measure(given.only)}
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
