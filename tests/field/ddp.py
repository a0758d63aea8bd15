"""DistributedDataParallel on two ranks over gloo; rank 0 evaluates alone. Start with torchrun, two processes."""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from marking import mark
from torch.nn.parallel import DistributedDataParallel


def evaluate(model, data, seconds):
    """Scores the held-out rows one by one, on rank 0, while the others wait at the barrier."""
    mark("fault")
    until, total = time.monotonic() + seconds, 0.0
    with torch.no_grad():
        for row in range(10**9):  # the culprit of slow
            total += sum(model(data[row % len(data)]).tolist())
            if time.monotonic() > until:
                break  # the culprit of slow ends
    mark("over")
    return total / (row + 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("healthy", "slow", "stuck"), default="healthy")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long the slow evaluation takes")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # 121 batches for two ranks and no drop_last: rank 0 has one more.
    batches = 61 if args.mode == "stuck" and rank == 0 else 60
    data = torch.randn(512, 32)
    for step in range(1, batches + 1):
        x = data[torch.randint(len(data), (8,))]
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # the one who waits
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        if step == 40:
            if rank == 0 and args.mode == "slow":
                print(f"held out: {evaluate(model.module, data, args.seconds):.3f}", flush=True)
            dist.barrier()
    if args.mode == "stuck" and rank == 1:
        mark("fault")
    dist.barrier()  # the culprit of stuck
    if rank == 0:
        print(f"done: {batches} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
