"""What padding costs: real tokens per second of one small model, the same examples laid out in six ways, in one run.

    python benchmarks/packing.py [--rounds 5] [--dtype bf16] [--seconds 2] [--layers 4] [--width 256] [--vocab 8192] [--threads 2]

Examples are made up with the lengths of a fine-tuning set that was padded to 1024 (mean 34 tokens, p95 44, max 67).
Each way takes its turn in each round, so that a busy machine slows all of them; medians and ratios are printed. A token
counts as real if it is not padding. Rows named lamp take the step of `lamp train`, the others that of a plain script with a
fused AdamW. Positions of rows without a target cost the model, but not its last matrix, in lamp's step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import measured
import numpy as np
import torch

from lamplighter.config import Train
from lamplighter.data.batches import Batch, permute
from lamplighter.data.chat.examples import LEARNED, Side
from lamplighter.data.chat.packing import Packing
from lamplighter.data.feed import Fitted, example_feed, fit, lay_out
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer, init_weights, next_token_loss
from lamplighter.train.bf16 import make_it_work
from lamplighter.train.machine import kept_memory
from lamplighter.train.optim import AdamW, make_optimizer
from lamplighter.train.score import look, nats


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
    logits = look(model, torch.from_numpy(batch.inputs), batch.segments)
    loss = next_token_loss(logits, torch.from_numpy(batch.targets)) / batch.real_tokens
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def lamp_step(model: Transformer, optimizer: AdamW, batch: Batch) -> None:
    """As `lamp train` does it."""
    ids, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
    rows = slice(0, len(ids))
    nats(model, ids, targets, batch.segments, False, 1 / batch.real_tokens, rows).backward()  # type: ignore[no-untyped-call]
    optimizer.step(1e-4)
    optimizer.zero_grad()


def padding_of(make: Callable[[int], Batch], steps: int = 60) -> float:
    batches = [make(step) for step in range(1, steps + 1)]
    return 1 - sum(batch.filled for batch in batches) / sum(batch.targets.size for batch in batches)


def main() -> None:
    parser = measured.arguments(__doc__ or "")
    for name, value in (("layers", 4), ("width", 256), ("vocab", 8192)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="for everybody")
    wanted = parser.parse_args()
    if wanted.quick:
        wanted.rounds, wanted.layers, wanted.width, wanted.vocab, wanted.seconds = 1, 1, 64, 256, 0.05
    if wanted.dtype == "bf16" and not make_it_work():
        raise SystemExit("bf16 does not work on this processor")
    torch.set_num_threads(wanted.threads)
    side = made_up(2000, wanted.vocab)
    long, short = (fit(side, seq_len, "truncate", learn_all=True) for seq_len in (1024, 256))
    ways: dict[str, Callable[[int], Batch]] = {
        "padded to 1024, batch 2": example_feed(long, long, "windows", 1, 2, 1024, 0).make,
        "dynamic, batch 2": dynamic(long, 2),
        "dynamic, batch 32": dynamic(long, 32),
        "lamp, grouped, batch 2": example_feed(long, long, "grouped", 1, 2, 1024, 0).make,
        "lamp, grouped, batch 32": example_feed(long, long, "grouped", 1, 32, 1024, 0).make,
        "lamp, packed, 8 x 256": example_feed(short, short, "packed", 1, 8, 256, 0).make,
    }
    shape = Shape(
        family="llama", vocab_size=wanted.vocab, positions=1024, layers=wanted.layers, width=wanted.width, heads=4
    )
    model = Transformer(shape)
    init_weights(model, 1)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ours = make_optimizer(model, Train(steps=1))
    padding = {name: padding_of(make) for name, make in ways.items()}
    turns = dict.fromkeys(ways, 0)

    def turn(name: str) -> float:
        """Real tokens a second, over a few seconds."""
        tokens, seconds, step = 0, 0.0, turns[name] * 1000
        turns[name] += 1
        while seconds < wanted.seconds:
            step += 1
            batch = ways[name](step)
            began = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=wanted.dtype == "bf16"):
                if name.startswith("lamp"):
                    lamp_step(model, ours, batch)
                else:
                    plain_step(model, plain, batch)
            seconds += time.perf_counter() - began
            tokens += batch.filled
        return tokens / seconds

    with kept_memory(torch.device("cpu")):  # for everybody
        found = measured.in_turn({name: (lambda name=name: turn(name)) for name in ways}, wanted.rounds)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    measured.say_machine()
    rows = [measured.Row(name, rates, extra=f"{padding[name]:.1%} padding") for name, rates in found.items()]
    title = f"short examples, {parameters:,} parameters, {wanted.threads} threads, {wanted.dtype}"
    measured.show(title, "real tok/s", rows, next(iter(ways)))
    measured.keep(wanted.json)


if __name__ == "__main__":
    main()
