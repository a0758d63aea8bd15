"""What padding costs: real tokens per second of one small model, the same examples laid out in five ways, in one run.

    python benchmarks/packing.py [--rounds 5] [--seconds 2] [--layers 4] [--width 256] [--vocab 8192] [--threads 1]

Examples are made up with the lengths of a fine-tuning set that was padded to 1024 (mean 34 tokens, p95 44, max 67).
Each way takes its turn in each round, so that a busy machine slows all of them; medians and ratios are printed. A token
counts as real if it is not padding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from lamplighter.data.batches import Batch, permute
from lamplighter.data.chat.examples import LEARNED, Side
from lamplighter.data.chat.packing import Packing
from lamplighter.data.feed import Fitted, example_feed, fit, lay_out
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer, init_weights, next_token_loss
from lamplighter.train.score import look


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


def take_step(model: Transformer, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Seconds of one optimizer step."""
    began = time.perf_counter()
    logits = look(model, torch.from_numpy(batch.inputs), batch.segments)
    loss = next_token_loss(logits, torch.from_numpy(batch.targets)) / batch.real_tokens
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - began


def padding_of(make: Callable[[int], Batch], steps: int = 60) -> float:
    batches = [make(step) for step in range(1, steps + 1)]
    return 1 - sum(batch.filled for batch in batches) / sum(batch.targets.size for batch in batches)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("rounds", 5), ("layers", 4), ("width", 256), ("vocab", 8192), ("seconds", 2), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    side = made_up(2000, wanted.vocab)
    long, short = (fit(side, seq_len, "truncate", learn_all=True) for seq_len in (1024, 256))
    ways: dict[str, Callable[[int], Batch]] = {
        "padded to 1024, batch 2": example_feed(long, long, "windows", 1, 2, 1024, 0).make,
        "dynamic, batch 2": dynamic(long, 2),
        "dynamic, batch 32": dynamic(long, 32),
        "grouped, batch 32": example_feed(long, long, "grouped", 1, 32, 1024, 0).make,
        "packed, 8 x 256": example_feed(short, short, "packed", 1, 8, 256, 0).make,
    }
    shape = Shape(
        family="llama", vocab_size=wanted.vocab, positions=1024, layers=wanted.layers, width=wanted.width, heads=4
    )
    model = Transformer(shape)
    init_weights(model, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    padding = {name: padding_of(make) for name, make in ways.items()}
    for turn in range(wanted.rounds + 1):
        for name, make in ways.items():
            tokens, seconds, step = 0, 0.0, turn * 1000
            while seconds < wanted.seconds:
                step += 1
                batch = make(step)
                seconds += take_step(model, optimizer, batch)
                tokens += batch.filled
            if turn:  # the first round warms up
                rates[name].append(tokens / seconds)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{parameters:,} parameters, torch {torch.__version__}, {torch.get_num_threads()} threads, {wanted.rounds} rounds"
    )
    first = statistics.median(next(iter(rates.values())))
    print(f"{'':<26} {'padding':>8} {'real tok/s':>11} {'(min - max)':>18} {'ratio':>7}")
    for name, found in rates.items():
        middle, spread = statistics.median(found), f"({min(found):,.0f} - {max(found):,.0f})"
        print(f"{name:<26} {padding[name]:>8.1%} {middle:>11,.0f} {spread:>18} {middle / first:>6.1f}x")


if __name__ == "__main__":
    main()
