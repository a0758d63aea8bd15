"""Ranks: what the same bits cost, how soon a run goes on after a rank is lost, and whether it ends in the same bits.

In:  nothing; a tiny run by the real command over gloo, and a model of some millions of parameters for the reduction.
Out: the tree against torch's all_reduce and against DDP, for 2 and 4 ranks; seconds from SIGKILL and SIGSTOP to the next finished
     step, with and without a process that stands by; useful time at a fault every so often; the bits after random kills.

Run: .venv/bin/python benchmarks/ranks.py [--only reduce|recovery|faults|kills|memory] [--kills 50] [--between 400] [--seed 7] [--shard full] [--minutes 10] [--json FILE]
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measured

from lamplighter.rundir import RunDir, newest_first, read_lines, read_status
from lamplighter.slot import read_slot

SETTINGS = [
    "--tokenizer.kind",
    "bytes",
    "--model.family",
    "gpt2",
    "--model.layers",
    "2",
    "--model.width",
    "32",
    "--model.heads",
    "2",
    "--data.seq_len",
    "32",
    "--train.batch_size",
    "6",
    "--train.micro_batch",
    "2",
    "--train.dtype",
    "fp32",
    "--train.threads",
    "1",
    "--data.embedded_documents",
    "300",
    "--data.val_fraction",
    "0.05",
    "--eval.windows",
    "4",
    "--eval.sample_every_steps",
    "0",
    "--model.dropout",
    "0.1",
    "--save.every_steps",
    "200",
    "--eval.every_steps",
    "300",
]

# ---------------------------------------------------------------- the price of one order of sums

_WORKER = """
import json, os, sys, time
rank, world, place, rounds, wide = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
import torch, torch.distributed as dist
torch.set_num_threads(1)
from torch.nn.parallel import DistributedDataParallel
from lamplighter.config import Model
from lamplighter.model.build import build
from lamplighter.model.transformer import token_loss
from lamplighter.train import ranks
from lamplighter.train.gradient_tree import GradientTree
from pathlib import Path
here = ranks.World(rank, world)
ranks.meet(here, Path(place), "gloo")
model = build(Model(family="llama", layers=4, width=wide, heads=8), 4096, 128, 0, 1).model
parameters = list(model.parameters())
ids = torch.randint(0, 4096, (2, 128), generator=torch.Generator().manual_seed(rank))
wrapped = DistributedDataParallel(model)
def compute():
    for parameter in parameters: parameter.grad = None
    token_loss(model, ids, ids).backward()
def tree():
    compute(); began = time.perf_counter()
    made = GradientTree(parameters, world); made.add(rank, torch.zeros(()))
    ranks.reduce(here, made, [0.0])
    return time.perf_counter() - began
def native():
    compute(); began = time.perf_counter()
    flat = torch.cat([p.grad.reshape(-1) for p in parameters]); dist.all_reduce(flat)
    for p, g in zip(parameters, flat.split([p.numel() for p in parameters])): p.grad = g.view_as(p)
    return time.perf_counter() - began
def ours_step():
    began = time.perf_counter(); tree(); return time.perf_counter() - began
def ddp_step():
    for parameter in parameters: parameter.grad = None
    began = time.perf_counter(); token_loss(wrapped, ids, ids).backward(); return time.perf_counter() - began
found = {name: [] for name in ("tree", "native", "step with the tree", "step with DDP")}
for number in range(rounds + 1):
    for name, act in zip(found, (tree, native, ours_step, ddp_step)):
        dist.barrier(); took = act()
        if number: found[name].append(took)
if rank == 0:
    print(json.dumps({"parameters": sum(p.numel() for p in parameters), **found}))
os._exit(0)
"""


def reduction(world: int, rounds: int, wide: int) -> dict[str, Any]:
    """Seconds of each, in turn, in the same processes."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", _WORKER]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(measured.ROOT / "src")}
        going = [
            subprocess.Popen(
                [*words, str(rank), str(world), f"{folder}/meeting", str(rounds), str(wide)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        said = [process.communicate()[0] for process in going]
    found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return found


def show_reduction(rounds: int, wide: int) -> dict[str, Any]:
    kept = {}
    for world in (2, 4):
        found = reduction(world, rounds, wide)
        middle = {name: statistics.median(found[name]) for name in found if name != "parameters"}
        ratios = sorted(a / b for a, b in zip(found["tree"], found["native"], strict=True))
        steps = sorted(a / b for a, b in zip(found["step with the tree"], found["step with DDP"], strict=True))
        share = middle["tree"] / middle["step with the tree"]
        print(
            f"{world} ranks, {found['parameters'] / 1e6:.1f}M parameters: tree {1e3 * middle['tree']:.0f} ms, all_reduce"
            f" {1e3 * middle['native']:.0f} ms, ratio {_spread(ratios)}; forward and backward with it"
            f" {1e3 * middle['step with the tree']:.0f} ms, DDP {1e3 * middle['step with DDP']:.0f} ms, ratio {_spread(steps)};"
            f" the tree is {share:.1%} of it"
        )
        kept[str(world)] = {**middle, "ratio": statistics.median(ratios), "against_ddp": statistics.median(steps)}
    return kept


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


# ---------------------------------------------------------------- a run by the real command


class Going:
    """A run, and what is known of it from outside."""

    def __init__(self, cwd: Path, name: str, *words: str) -> None:
        self.cwd, self.words, self.run = cwd, words, RunDir(cwd / "runs" / name)
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        with open(self.cwd / f"{self.run.name}.txt", "ab") as out:
            words = [sys.executable, "-m", "lamplighter", "train", "--run", self.run.name, *SETTINGS, *self.words]
            return subprocess.Popen(words, cwd=self.cwd, stdout=out, stderr=out)

    def status(self) -> dict[str, Any]:
        return read_status(self.run)

    def pids(self) -> list[int]:
        status = self.status()
        return [one["pid"] for one in status.get("ranks") or [{"pid": status.get("child_pid")}] if one["pid"]]

    def until(self, met: Callable[[], bool], within_s: float = 120.0) -> bool:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and self.process.poll() is None:
            if met():
                return True
            time.sleep(0.01)
        return False

    def trains(self, ranks: int, ready: bool) -> bool:
        """All ranks are there and train; with a process that stands by, where one is wanted."""
        status, waits = self.status(), read_slot(self.run.standby_slot)
        whole = len(status.get("ranks") or [0]) == ranks and str(status.get("phase")).startswith("train")
        fresh = status.get("state") == "running" and time.time() - status.get("t", 0.0) < 3
        return whole and fresh and (not ready or (waits is not None and waits.phase == "standby"))

    def next_step(self, attempt: int) -> Callable[[], bool]:
        """A step that was finished in a later attempt."""

        def met() -> bool:
            last = 0
            with open(self.run.metrics, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
                for line in file.read().split(b"\n"):
                    with contextlib.suppress(ValueError):  # the first one is cut
                        last = max(last, json.loads(line)["attempt"])
            return last > attempt

        return met

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


def recovery(faults: int) -> dict[str, Any]:
    """From the signal to the next finished step."""
    kept = {}
    for ranks, spare in ((1, 0), (1, 1), (2, 0), (2, 1)):
        faults_of = [("SIGKILL", 1), *([("SIGSTOP", 1), ("SIGKILL", ranks)] if ranks > 1 else [])]
        for which, hit in faults_of:
            with tempfile.TemporaryDirectory() as folder:
                words = ("--train.steps", "1000000", "--train.ranks", str(ranks), "--launch.spare", str(spare))
                going = Going(Path(folder), "r", *words)
                took = []
                rng = random.Random(1)
                for _ in range(faults):
                    going.until(functools.partial(going.trains, ranks, bool(spare)))  # the world has grown back
                    time.sleep(1 + rng.random())
                    attempt, victims = int(going.status().get("attempt") or 1), going.pids()
                    began = time.monotonic()
                    for victim in rng.sample(victims, min(hit, len(victims))):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(victim, getattr(signal, which))
                    if going.until(going.next_step(attempt)):
                        took.append(time.monotonic() - began)
                going.end()
            took.sort()
            name = f"{ranks} rank{'s' * (ranks > 1)}, {'one stands by' if spare else 'none stands by'}, {which}"
            name += " of all" if hit == ranks > 1 else ""
            p95 = took[min(len(took) - 1, int(0.95 * len(took)))] if took else float("nan")
            print(f"{name}: {len(took)} faults, p50 {statistics.median(took):.2f} s, p95 {p95:.2f} s", flush=True)
            kept[name] = {"faults": len(took), "p50": statistics.median(took), "p95": p95}
    return kept


def faults_a_minute(minutes: float, every_s: float, ranks: int) -> dict[str, Any]:
    """Useful time: steps that counted, at the speed of the steps between the faults."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("--train.steps", "1000000", "--train.ranks", str(ranks), "--launch.spare", "1")
        going, rng = Going(Path(folder), "r", *words), random.Random(2)
        going.until(lambda: going.trains(ranks, True))
        began, first = time.time(), int(going.status()["step"])
        made = 0
        while time.time() - began < 60 * minutes:
            time.sleep(every_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(going.pids()), signal.SIGKILL)
                made += 1
        seconds, last = time.time() - began, int(going.status()["step"])
        going.end()
        records = [one for one in read_lines(going.run.metrics) if "train/loss" in one and one["t"] >= began]
        gaps = sorted(b["t"] - a["t"] for a, b in itertools.pairwise(records))
        usual = statistics.median(gaps)
        lost = sum(gap - usual for gap in gaps if gap > 20 * usual and gap > 0.1)
        redone = (len(records) - len({one["step"] for one in records})) * usual
        useful = 1 - (lost + redone) / seconds
        print(
            f"{made} faults in {seconds / 60:.1f} min on {ranks} rank(s): {last - first} steps, {lost:.1f} s in pauses, {redone:.2f} s"
            f" done twice: {useful:.1%} useful time"
        )
    return {"faults": made, "useful": useful}


# ---------------------------------------------------------------- the bits


def kills(count: int, ranks: int, shard: str, between: int, seed: int) -> dict[str, Any]:
    """Random kills of ranks, of all of them and of the parent, and stops; against one rank, unbroken."""
    rng, steps = random.Random(seed), 300 + between * count
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        whole = Going(cwd, "whole", "--train.steps", str(steps))
        whole.process.wait()
        words = ("--train.ranks", str(ranks), "--launch.spare", "1", "--train.shard", shard)
        broken = Going(cwd, "broken", "--train.steps", str(steps), *words)
        made: dict[str, int] = {}
        while sum(made.values()) < count and broken.process.poll() in (None, 75):
            if not broken.until(lambda: str(broken.status().get("phase")).startswith("train")):
                break
            time.sleep(2.5 * rng.random())
            pids = broken.pids()
            kind = rng.choice(["a rank"] * 6 + ["all ranks", "the parent", "SIGTERM", "SIGSTOP"])
            attempt = int(broken.status().get("attempt") or 1)
            with contextlib.suppress(ProcessLookupError):
                if kind == "the parent":
                    broken.process.kill()
                elif kind == "SIGTERM":
                    broken.process.terminate()
                else:
                    for pid in pids if kind == "all ranks" else [rng.choice(pids)]:
                        os.kill(pid, signal.SIGSTOP if kind == "SIGSTOP" else signal.SIGKILL)
            if kind in ("the parent", "SIGTERM"):
                broken.process.wait()
                broken.process = broken.start()
            made[kind] = made.get(kind, 0) + 1
            broken.until(broken.next_step(attempt), 60)
        while broken.process.wait() != 0:
            broken.process = broken.start()
        same = _bits(broken.run) == _bits(whole.run)
        words = ", ".join(f"{number} of {kind}" for kind, number in sorted(made.items()))
        print(
            f"{sum(made.values())} faults on {ranks} ranks, train.shard {shard} ({words}): {'equal to the bit' if same else 'DIFFERENT'}"
        )
    return {"faults": sum(made.values()), "equal": same, "kinds": made}


def memory(ranks: int) -> dict[str, Any]:
    """Bytes that a rank takes at most, replicated and sharded: some steps of a model whose weights are most of it."""
    kept = {}
    for shard in ("none", "full"):
        with tempfile.TemporaryDirectory() as folder:
            sizes = ("--model.layers", "8", "--model.width", "512", "--model.heads", "8", "--model.dropout", "0", "--train.micro_batch", "1", "--train.batch_size", str(ranks))  # fmt: skip
            words = (*sizes, "--train.steps", "6", "--train.ranks", str(ranks), "--launch.spare", "0", "--train.shard", shard, "--save.memory", "false")  # fmt: skip
            going, most = Going(Path(folder), "r", *words), 0
            while going.process.poll() is None:
                for pid in going.pids():
                    with contextlib.suppress(OSError, StopIteration):
                        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                        most = max(most, int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10)
                time.sleep(0.1)
        print(f"{ranks} ranks, train.shard {shard}: a rank takes {most / 1e9:.2f} GB at most", flush=True)
        kept[shard] = most
    return kept


def _bits(run: RunDir) -> tuple[dict[tuple[int, str], set[str]], list[bytes]]:
    """Every loss that was ever logged, and the last checkpoint."""
    found: dict[tuple[int, str], set[str]] = {}
    for record in read_lines(run.metrics):
        for name in ("train/loss", "eval/val_loss"):
            if name in record:
                found.setdefault((record["step"], name), set()).add(float(record[name]).hex())
    newest = newest_first(run.checkpoints)[0]
    return found, [(newest / name).read_bytes() for name in ("model.safetensors", "training/optimizer.safetensors")]


def _flat(kept: dict[str, Any], before: str = "") -> dict[str, float]:
    """By names that a document can quote."""
    found: dict[str, float] = {}
    for name, value in kept.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{name}, ")
        else:
            found[f"{before}{name}"] = value
    return found


def main() -> None:
    parser = measured.arguments(__doc__, rounds=20)
    parser.add_argument("--only", choices=["reduce", "recovery", "faults", "kills", "memory"])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--between", type=int, default=400, help="steps for each kill; fewer where a machine is slow")
    parser.add_argument("--seed", type=int, default=7, help="of the kills: several short runs make other ones")
    parser.add_argument("--shard", choices=["none", "full"], default="none", help="of the kills")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--wide", type=int, default=512)
    wanted = parser.parse_args()
    kept: dict[str, Any] = {}
    if wanted.only in (None, "reduce"):
        kept["reduce"] = show_reduction(2 if wanted.quick else wanted.rounds, 128 if wanted.quick else wanted.wide)
    if wanted.only in (None, "recovery"):
        kept["recovery"] = recovery(2 if wanted.quick else wanted.rounds)
    if wanted.only in (None, "faults"):
        minutes, every_s = (1.0, 20.0) if wanted.quick else (wanted.minutes, 60.0)
        kept["faults"] = {f"{n} ranks": faults_a_minute(minutes, every_s, n) for n in (1, 2)}
    if wanted.only in (None, "kills"):
        kept["kills"] = kills(4 if wanted.quick else wanted.kills, 2, wanted.shard, wanted.between, wanted.seed)
    if wanted.only in (None, "memory"):
        kept["memory"] = memory(2)
    measured.say_machine()
    measured.keep(wanted.json, _flat(kept))


if __name__ == "__main__":
    main()
