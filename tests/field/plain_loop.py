"""A character model in one file: a loop, a print every ten steps, no framework."""

import argparse
import threading
import time

import torch
import torch.nn as nn
from marking import mark
from torch.nn.functional import cross_entropy

SENTENCE = "The lamp is lit at dusk and put out at dawn, and in between somebody walks the street and looks. "


class MetricLog:
    """Collects losses from any thread and empties itself when it is full."""

    def __init__(self, size):
        self.size, self.rows, self.lock = size, [], threading.Lock()

    def flush(self):
        with self.lock:  # the culprit of stuck
            self.rows.clear()

    def add(self, step, loss):
        with self.lock:
            self.rows.append((step, loss))
            if len(self.rows) >= self.size:
                mark("fault")
                self.flush()


class TinyModel(nn.Module):
    def __init__(self, vocab_size, width=64):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocab_size)
        self.slow_s = 0.0

    def count_repeats(self, ids):
        mark("fault")
        until, seen, repeats = time.monotonic() + self.slow_s, {}, 0
        for t in range(10**9):  # the culprit of slow
            token = int(ids.view(-1)[t % ids.numel()])
            repeats += token in seen
            seen[token] = t
            if time.monotonic() > until:
                break  # the culprit of slow ends
        mark("over")
        return repeats

    def forward(self, ids):
        if self.slow_s:
            self.count_repeats(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.block(self.embed(ids), src_mask=mask, is_causal=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("healthy", "slow", "stuck"), default="healthy")
    parser.add_argument("--text", help="a text file; a sentence again and again without it")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=12.0, help="how long the slow step lasts")
    args = parser.parse_args()

    torch.manual_seed(1337)
    torch.set_num_threads(1)  # a tiny model gains nothing from more, and loses much on a busy machine
    text = open(args.text, encoding="utf-8").read() if args.text else SENTENCE * 200
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    model = TinyModel(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = MetricLog(size=60 if args.mode == "stuck" else 10_000)
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(data) - 65, (8,))
        x = torch.stack([data[i : i + 64] for i in starts])
        y = torch.stack([data[i + 1 : i + 65] for i in starts])
        model.slow_s = args.seconds if args.mode == "slow" and step == 60 else 0.0
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        log.add(step, loss.item())
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    print(f"done: {args.steps} steps")


if __name__ == "__main__":
    main()
