"""What a save costs: 124M parameters with Adam (1.49 GB), ours against torch.save, safetensors and DCP async, in one run.

    python benchmarks/saving.py [--rounds 5] [--tokens 128] [--layers 12] [--vocab 50257] [--threads 2] [--plain 3] [--most 60] [--ways ours DCP] [--folder DIR]

Each way takes its turn in each round. A turn: plain steps, one save after a step, and steps until it is durable.
`blocked`: how long the loop stood still (the call, and what is left of a copy before the optimizer).
`slowed`: what the steps until it was durable took beyond plain ones, without `blocked`, as the loss of the whole turn.
`share`: blocked + slowed over 20 plain steps, that is, at one save per 20 steps.
`durable`: from the call until the save is complete, as seen at the end of a step. Only ours is hashed; ours and DCP's are flushed to the disk (fsync).
`restore`: back into the live model and optimizer, files in the page cache; ours with its hashes checked.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as in a run of ours (watch/trainer.py), before torch is there

import measured
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lamplighter.config import Train, validated
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer, next_token_loss
from lamplighter.model.weights import init_weights, load_weights, stored_tensors
from lamplighter.rundir import RunDir
from lamplighter.train import checkpoint, optimizers
from lamplighter.train.checkpoint import Progress
from lamplighter.train.checkpointer import Checkpointer
from lamplighter.train.ranks import ALONE
from lamplighter.train.state import TrainState

SHARE_STEPS = 20


class Job:
    """A model that trains on the same made-up batch, step by step."""

    def __init__(self, layers: int, tokens: int, vocab: int) -> None:
        shape = Shape(family="gpt2", vocab_size=vocab, positions=1024, layers=layers, width=768, heads=12)
        self.model = Transformer(shape)
        init_weights(self.model, 1)
        self.optimizer = optimizers.make_optimizer(self.model, Train(steps=10**6))
        ids = torch.randint(0, vocab, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
        self.ids, self.targets, self.step = ids[:, :-1], ids[:, 1:], 0

    def compute(self) -> None:
        (next_token_loss(self.model(self.ids), self.targets) / self.targets.numel()).backward()

    def change(self) -> None:
        self.optimizer.step(1e-6)
        self.optimizer.zero_grad()
        self.step += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**stored_tensors(self.model), **self.optimizer.state_tensors()}


@dataclass
class Way:
    """One way to save: `begin` gives a function that tells whether it is durable, `hold` comes before the optimizer."""

    begin: Callable[[Job, Path], Callable[[], bool]]
    restore: Callable[[Job, Path], None]
    hold: Callable[[Callable[[], None]], None] = lambda change: change()
    blocked_s: list[float] = field(default_factory=list)
    slowed_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)
    restore_s: list[float] = field(default_factory=list)


# ---------------------------------------------------------------- the ways


def ours(job: Job, folder: Path) -> Way:
    """The trainer's own checkpointer, with its hashes, its fsync and its rename."""
    run = validated({"train": {"steps": 10**6}, "save": {"staged": True, "keep": 1}})
    built = SimpleNamespace(config={"model_type": "gpt2"})
    source = SimpleNamespace(state=lambda step: None)
    context: Any = SimpleNamespace(
        run=run, folder=RunDir(folder), model=job.model, built=built, optimizer=job.optimizer, recorded={},
        source=source, machine=SimpleNamespace(device=torch.device("cpu")), tokenizer=SimpleNamespace(save=lambda _: None), chat=None, world=ALONE,
    )  # fmt: skip
    state = TrainState(10**6)
    context.folder.checkpoints.mkdir(parents=True)
    checkpointer = Checkpointer(context, state)

    def begin(job: Job, _: Path) -> Callable[[], bool]:
        state.progress = Progress(step=job.step)
        save = checkpointer.begin()
        assert save is not None

        def durable() -> bool:
            if save.error:
                raise save.error
            return not save.in_progress

        return durable

    def hold(change: Callable[[], None]) -> None:
        with checkpointer.optimizer_update():
            change()

    def restore(job: Job, _: Path) -> None:
        found = checkpoint.find(context.folder.checkpoints)
        assert found is not None
        _, tensors, _ = checkpoint.load_state(found)
        load_weights(job.model, found)
        job.optimizer.load_state_tensors(tensors)

    return Way(begin, restore, hold)


def put_back(job: Job, found: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in job.tensors().items():
            tensor.copy_(found[name])


def waiting(save: Callable[[dict[str, torch.Tensor], Path], None], load: Callable[[Path], dict[str, Any]]) -> Way:
    """The loop waits for the whole save."""

    def begin(job: Job, path: Path) -> Callable[[], bool]:
        save(job.tensors(), path)
        return lambda: True

    return Way(begin, lambda job, path: put_back(job, load(path)))


def dcp_async(stager: DefaultStager | None) -> Way:
    """torch.distributed.checkpoint, from a copy that is made before the call returns."""

    def begin(job: Job, path: Path) -> Callable[[], bool]:
        going: Any = dcp.async_save(job.tensors(), checkpoint_id=path, async_stager=stager)
        future = getattr(going, "upload_completion", going)

        def durable() -> bool:
            if future.done():
                future.result()
            return bool(future.done())

        return durable

    def restore(job: Job, path: Path) -> None:
        dcp.load(job.tensors(), checkpoint_id=path)

    return Way(begin, restore)


# ---------------------------------------------------------------- one turn


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def one_step(job: Job, way: Way) -> tuple[float, float]:
    """(seconds of the step, of them held back before the optimizer)."""
    held = 0.0

    def change() -> None:
        nonlocal held
        held = time.perf_counter() - computed
        job.change()

    began = time.perf_counter()
    job.compute()
    computed = time.perf_counter()
    way.hold(change)
    return time.perf_counter() - began, held


def take_turn(job: Job, way: Way, path: Path, plain: int, most: int) -> None:
    plain_s = statistics.median(one_step(job, way)[0] for _ in range(plain))
    began = time.perf_counter()
    is_durable = way.begin(job, path)
    blocked_s = time.perf_counter() - began
    steps, stepped_s = 0, 0.0
    durable_s = time.perf_counter() - began if is_durable() else 0.0
    while steps < most and not (steps and is_durable()):
        step_s, held_s = one_step(job, way)
        steps, stepped_s, blocked_s = steps + 1, stepped_s + step_s - held_s, blocked_s + held_s
    while not is_durable():
        time.sleep(0.01)
    durable_s = durable_s or time.perf_counter() - began
    after_s = statistics.median(one_step(job, way)[0] for _ in range(plain))
    usual_s = (plain_s + after_s) / 2
    slowed_s = stepped_s - steps * usual_s
    way.blocked_s.append(blocked_s)
    way.slowed_s.append(slowed_s)
    way.durable_s.append(durable_s)
    way.share.append((blocked_s + max(0.0, slowed_s)) / (SHARE_STEPS * usual_s))
    way.restore_s.append(timed(lambda: way.restore(job, path)))


def show(name: str, way: Way, best: Way) -> None:
    def middle(values: list[float], unit: str = "s") -> str:
        low, high = min(values), max(values)
        if unit == "%":
            return f"{statistics.median(values):6.1%} ({low:.1%} to {high:.1%})"
        return f"{statistics.median(values):6.3f} s ({low:.3f} to {high:.3f})"

    ratio = statistics.median(way.blocked_s) / statistics.median(best.blocked_s)
    print(
        f"{name:<24} blocked {middle(way.blocked_s)} = {ratio:.3f} x DCP  slowed {middle(way.slowed_s)}  share {middle(way.share, '%')}"
        f"  durable {middle(way.durable_s)}  restore {middle(way.restore_s)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plain", type=int, default=3, help="plain steps before and after each save")
    parser.add_argument("--most", type=int, default=60, help="steps beside a save; then the rest of it is waited for")
    parser.add_argument("--ways", nargs="+", default=[], help="a part of their names; all unless given")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        root = Path(place)
        dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=0, world_size=1)
        job = Job(args.layers, args.tokens, args.vocab)
        job.compute()
        job.change()
        size = sum(tensor.nbytes for tensor in job.tensors().values())
        print(f"{platform.machine()}, {args.threads} threads, torch {torch.__version__}; {size / 1e9:.2f} GB a save")
        on_cpu = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        ways = {
            "ours, beside the steps": ours(job, root / "ours"),
            "torch.save": waiting(torch.save, lambda path: torch.load(path, mmap=True)),
            "safetensors.save_file": waiting(save_file, load_file),
            "DCP async": dcp_async(None),
            "DCP async, kept copy": dcp_async(DefaultStager(on_cpu)),
        }
        ways = {name: way for name, way in ways.items() if not args.ways or any(part in name for part in args.ways)}
        for number in range(args.rounds + 1):
            for name, way in ways.items():
                path = root / f"{number}-{name.replace(' ', '-')}"
                take_turn(job, way, path, args.plain, args.most)
                if number == 0:  # buffers are allocated, files are created: not counted
                    for values in (way.blocked_s, way.slowed_s, way.durable_s, way.share, way.restore_s):
                        values.clear()
                if path.is_dir():
                    shutil.rmtree(path)
                path.unlink(missing_ok=True)
            last = {name: round(way.blocked_s[-1], 3) for name, way in ways.items() if way.blocked_s}
            print(f"round {number} of {args.rounds}: blocked {last}", flush=True)
        peers = [way for name, way in ways.items() if "DCP" in name]
        best = min(peers, key=lambda way: statistics.median(way.blocked_s))
        for name, way in ways.items():
            show(name, way, best)
        dist.destroy_process_group()
    mine = next(way for name, way in ways.items() if name.startswith("ours"))
    blocked, theirs = statistics.median(mine.blocked_s), statistics.median(best.blocked_s)
    measured.keep(args.json, {
        "gb": size / 1e9, "blocked_ms": 1000 * blocked, "worst_ms": 1000 * max(mine.blocked_s), "dcp_ms": 1000 * theirs,
        "restore_s": statistics.median(mine.restore_s),
    })  # fmt: skip


if __name__ == "__main__":
    main()
