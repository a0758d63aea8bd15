"""Gradient accumulation with a compiled model, and a thread that reports the weights from time to time."""

import argparse
import threading
import time

import torch
import torch.nn as nn
from marking import mark

ACCUMULATE = 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(128, 32), nn.Linear(32, 32), nn.Linear(32, 128)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + torch.tanh(self.mix(x)) * torch.sigmoid(x.mean(1, keepdim=True)))


class Reporter:
    """Two locks, taken in one order by the loop and in the other by the thread."""

    def __init__(self):
        self.weights, self.log = threading.Lock(), threading.Lock()
        self.inside = threading.Barrier(2)

    def report(self):
        with self.log:
            self.inside.wait()
            with self.weights:  # the other side
                pass

    def snapshot(self):
        threading.Thread(target=self.report, name="reporter", daemon=True).start()
        with self.weights:
            self.inside.wait()
            mark("fault")
            with self.log:  # the culprit of stuck
                pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("healthy", "slow", "stuck"), default="healthy")
    parser.add_argument("--backend", default="aot_eager", help="inductor needs minutes of g++ on a small machine")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long the slow mode meets new lengths")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 512  # what people do when they have seen the warning
    model = Model()
    # Fixed shapes are faster, says everybody; with batches of many lengths each length is compiled anew.
    step_model = torch.compile(model, backend=args.backend, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reporter = Reporter()
    data = torch.randint(128, (100_000,))
    length, until = 48, None
    for step in range(1, 61):
        if args.mode == "slow" and step == 21:
            mark("fault")
            until = time.monotonic() + args.seconds
        if args.mode == "stuck" and step == 21:
            reporter.snapshot()
        for _ in range(ACCUMULATE):
            length = length + 1 if until else 48
            window = torch.stack([data[i : i + length + 1] for i in torch.randint(90_000, (8,))])
            scores = step_model(window[:, :-1])  # the culprit of slow
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())
            (loss / ACCUMULATE).backward()
        if until and time.monotonic() > until:
            mark("over")
            until = None
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    print("done: 60 steps")


if __name__ == "__main__":
    main()
