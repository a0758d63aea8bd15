"""Gradient accumulation with a compiled model, and a thread that reports the weights from time to time."""

import argparse
import os
import threading
import time

import torch
import torch.nn as nn

ACCUMULATE = 4


def mark(what, path=os.environ.get("LAMP_FIELD_MARK")):
    open(path or os.devnull, "a").write(f"{what} {time.time():.3f} {os.getpid()}\n")


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
            with self.log:  # the culprit
                pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("healthy", "slow", "stuck"), default="healthy")
    parser.add_argument("--lengths", type=int, default=7, help="how many lengths the slow mode compiles")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    # Fixed shapes are faster, says everybody; with batches of many lengths each length is compiled anew.
    step_model = torch.compile(model, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reporter = Reporter()
    data = torch.randint(128, (100_000,))
    for step in range(1, 31):
        if args.mode == "slow" and step == 11:
            mark("fault")
        if args.mode == "slow" and step == 11 + args.lengths:
            mark("over")
        if args.mode == "stuck" and step == 21:
            reporter.snapshot()
        length = 48 + step if args.mode == "slow" and 11 <= step < 11 + args.lengths else 48
        for _ in range(ACCUMULATE):
            window = torch.stack([data[i : i + length + 1] for i in torch.randint(90_000, (8,))])
            scores = step_model(window[:, :-1])  # the culprit
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())
            (loss / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    print("done: 30 steps")


if __name__ == "__main__":
    main()
