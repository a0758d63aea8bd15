"""Trains a little, then evaluates for a long time without a word, then trains on."""

import argparse
import time

import torch
import torch.nn as nn
from marking import mark


@torch.no_grad()
def evaluate(model, data, seconds):
    model.eval()
    until, total, batches = time.monotonic() + seconds, 0.0, 0
    while time.monotonic() < until:  # the long part
        x = data[batches % 64 * 8 : batches % 64 * 8 + 8]
        total += nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item()
        batches += 1  # the long part ends
    model.train()
    return total / batches


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a tiny model gains nothing from more, and loses much on a busy machine
    data = torch.randn(512, 64)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, 201):
        x = data[torch.randint(512, (16,))]
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 100:
            print(f"step {step}: loss {loss.item():.3f}, evaluating", flush=True)
            mark("fault")
            score = evaluate(model, data, args.seconds)
            mark("over")
            print(f"held out: {score:.3f}", flush=True)
    print("done: 200 steps")


if __name__ == "__main__":
    main()
