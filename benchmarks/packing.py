"""What padding costs: real tokens per second of one model, the same examples laid out in seven ways, in one run.

    python benchmarks/packing.py [--rounds 5] [--dtype bf16] [--seconds 6] [--threads 2]
                                 [--family llama] [--layers 4] [--width 256] [--vocab 8192]

The model is that of training.py: a GPT-2 of 6 layers, width 384 and 30,000 words. Examples are made up with the lengths of
a fine-tuning set that was padded to 1024 (mean 34 tokens, p95 44, max 67); 64 of them, or eight rows of 256 packed ones, take
as many positions as two padded ones.
Each way is a process of its own and takes its turn in each round, so that a busy machine slows all of them. A token
counts as real if it is not padding. Rows named lamp take the step of `lamp train`, the others that of a plain script with a
fused AdamW; both clip their gradients, and both keep their memory as `lamp train` does. Positions of rows without a target
cost the model, but not its last matrix, in lamp's step.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measured
import numpy as np
import peers
import torch

from lamplighter.config import Train
from lamplighter.data.batches import Batch, BatchLayout, permute
from lamplighter.data.chat.example_cache import LEARNED, Side
from lamplighter.data.chat.packing import Fitted, Packing, example_batches, fit, lay_out
from lamplighter.model import cpu
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer, next_token_loss, token_loss
from lamplighter.model.weights import init_weights
from lamplighter.train.bf16 import make_it_work
from lamplighter.train.hardware import kept_memory
from lamplighter.train.optimizers import Optimizer, clip_factor, make_optimizer
from lamplighter.watch.launcher import threads_wait

CLIP = 1.0


def made_up(count: int, vocab: int) -> Side:
    rng = np.random.default_rng(5)
    lengths = np.clip(rng.normal(33.6, 6.2, count).round().astype(np.int64), 18, 60)
    lengths[:3] = 67
    tokens = rng.integers(2, vocab, int(lengths.sum())).astype(np.uint32) | LEARNED
    begin = np.cumsum(lengths) - lengths
    one = np.ones_like(lengths)
    return Side("train", tokens, begin, lengths, one, lengths - 1, lengths - 1, lengths * 4, lengths * 4)


def dynamic(fitted: Fitted, batch_size: int) -> Callable[[int], Batch]:
    """Examples in random order, each batch padded to its longest."""

    def make(step: int) -> Batch:
        numbers = np.arange((step - 1) * batch_size, step * batch_size, dtype=np.int64) % len(fitted)
        members = permute(1, np.zeros_like(numbers), numbers, len(fitted))
        each = Packing(members, np.arange(len(members) + 1, dtype=np.int64))
        return lay_out(fitted, each, int(fitted.positions[members].max()), 0, with_segments=False)

    return make


def plain_step(model: Transformer, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """As a script does it: logits of every position, and the loss of those that have a target."""
    segments = None if batch.segments is None else torch.from_numpy(batch.segments)
    logits = model(torch.from_numpy(batch.inputs), segments_BT=segments)
    loss = next_token_loss(logits, torch.from_numpy(batch.targets)) / batch.real_tokens
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def lamp_step(model: Transformer, optimizer: Optimizer, batch: Batch) -> None:
    """As `lamp train` does it."""
    ids, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
    segments = None if batch.segments is None else torch.from_numpy(batch.segments)
    token_loss(model, ids, targets, segments, scale=1 / batch.real_tokens).backward()  # type: ignore[no-untyped-call]
    optimizer.step(1e-4, clip_factor(float(optimizer.grad_norm()), CLIP))
    optimizer.zero_grad()


def padding_of(make: Callable[[int], Batch], steps: int = 60) -> float:
    batches = [make(step) for step in range(1, steps + 1)]
    return 1 - sum(batch.filled for batch in batches) / sum(batch.targets.size for batch in batches)


class Contestant:
    """One way, in a process of its own, as a run is."""

    def __init__(self, ask: dict[str, Any]) -> None:
        if ask["dtype"] == "bf16" and not make_it_work():
            raise SystemExit("bf16 does not work on this processor")
        torch.set_num_threads(ask["threads"])
        self.low, self.seconds, self.step = ask["dtype"] == "bf16", ask["seconds"], 0
        self.lamp = ask["way"].startswith("lamp")
        if not self.lamp:
            cpu.enabled.clear()  # a script has torch's own attention
        self.make = way_of(ask["way"], made_up(2000, ask["vocab"]))
        heads = ask["width"] // 64
        shape = Shape(
            ask["family"],
            vocab_size=ask["vocab"],
            positions=1024,
            layers=ask["layers"],
            width=ask["width"],
            heads=heads,
        )
        self.model = Transformer(shape)
        init_weights(self.model, 1)
        self.plain = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ours = make_optimizer(self.model, Train(steps=1))
        self.kept = contextlib.ExitStack()
        self.kept.enter_context(kept_memory(torch.device("cpu")))  # for everybody

    def turn(self) -> float:
        """Real tokens a second, over a few seconds."""
        tokens, seconds = 0, 0.0
        while seconds < self.seconds:
            self.step += 1
            batch = self.make(self.step)
            began = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=self.low):
                if self.lamp:
                    lamp_step(self.model, self.ours, batch)
                else:
                    plain_step(self.model, self.plain, batch)
            seconds += time.perf_counter() - began
            tokens += batch.filled
        return tokens / seconds


PROGRAM = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
import packing

def answer(ask):
    global contestant
    if "way" in ask:
        contestant = packing.Contestant(ask)
        return {{"padding": packing.padding_of(contestant.make), "parameters": sum(p.numel() for p in contestant.model.parameters())}}
    return contestant.turn()
"""


def way_of(name: str, side: Side) -> Callable[[int], Batch]:
    seq_len = 256 if "256" in name else 1024
    fitted = fit(side, seq_len, "truncate", learn_all=True)
    if name.startswith("dynamic"):
        return dynamic(fitted, int(name.split()[-1]))
    if "packed" in name:
        return example_batches(fitted, fitted, "packed", BatchLayout(1, 8, seq_len, 0)).make
    how = "grouped" if "grouped" in name else "windows"
    return example_batches(fitted, fitted, how, BatchLayout(1, int(name.split()[-1]), seq_len, 0)).make


WAYS = (
    "padded to 1024, batch 2",
    "dynamic, batch 2",
    "dynamic, batch 32",
    "lamp, grouped, batch 2",
    "lamp, grouped, batch 32",
    "lamp, grouped, batch 64",
    "lamp, packed, 8 x 256",
)


def main() -> None:
    parser = measured.arguments(__doc__ or "")
    for name, value in (("layers", 6), ("width", 384), ("vocab", 30_000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--family", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each turn")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="for everybody")
    wanted = parser.parse_args()
    if wanted.quick:
        wanted.rounds, wanted.layers, wanted.width, wanted.vocab, wanted.seconds = 1, 1, 64, 256, 0.05
    measured.say_machine()
    environment = {**os.environ, **threads_wait(os.environ), "PYTHONPATH": str(measured.ROOT / "src")}
    with tempfile.TemporaryDirectory() as place:
        workers = {name: peers.Worker(sys.executable, PROGRAM, Path(place) / f"{number}.log", environment)
                   for number, name in enumerate(WAYS)}  # fmt: skip
        sizes = {
            name: getattr(wanted, name)
            for name in ("family", "layers", "width", "vocab", "seconds", "dtype", "threads")
        }
        try:
            facts = {name: worker.ask({"way": name, **sizes}) for name, worker in workers.items()}
            turns = {name: (lambda name=name: float(workers[name].ask({}))) for name in WAYS}
            found = measured.in_turn(turns, wanted.rounds)
        finally:
            for worker in workers.values():
                worker.__exit__(None, None, None)
    rows = [measured.Row(name, rates, extra=f"{facts[name]['padding']:.1%} padding") for name, rates in found.items()]
    title = f"short examples, {wanted.family} of {facts[WAYS[0]]['parameters']:,} parameters, {wanted.threads} threads, {wanted.dtype}"
    measured.show(title, "real tok/s", rows, WAYS[0])
    measured.keep(wanted.json)


if __name__ == "__main__":
    main()
