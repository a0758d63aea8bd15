"""Data parallel by hand: each rank computes its gradients, all_reduce adds them. Start with torchrun, two processes."""

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from marking import mark

BAD_STEP = 40


def pack(rank, step, seconds):
    """Builds the batch; once in a while a rank draws a batch that has to be packed document by document."""
    if rank == 1 and step == BAD_STEP and seconds:
        mark("fault")
        until, filled = time.monotonic() + seconds, 0
        for document in range(10**9):  # the culprit of slow
            filled = (filled + document * 7) % 4096
            if time.monotonic() > until:
                break  # the culprit of slow ends
        mark("over")
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 32, generator=generator)


def fetch_shard(mode):
    """One rank is late, stopped, or killed before a collective."""
    mark("fault")
    if mode == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)  # the culprit of sigstop
    if mode == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)  # the culprit of sigkill
    time.sleep(3600)  # the culprit of stuck


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("healthy", "slow", "stuck", "sigstop", "sigkill"), default="healthy")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long the slow batch takes")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1, 81):
        x = pack(rank, step, args.seconds if args.mode == "slow" else 0.0)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        if args.mode not in ("healthy", "slow") and rank == 1 and step == BAD_STEP:
            fetch_shard(args.mode)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # the one who waits
            parameter.grad /= ranks
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if rank == 0:
        print("done: 80 steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
