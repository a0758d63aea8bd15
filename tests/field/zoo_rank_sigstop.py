"""Rank 1 is stopped before a collective. Start with torchrun, two processes."""

import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn as nn

BAD_STEP = 40


def mark(what, path=os.environ.get("LAMP_FIELD_MARK")):
    open(path or os.devnull, "a").write(f"{what} {time.time():.3f} {os.getpid()}\n")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1, 81):
        x = torch.randn(8, 32)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        if rank == 1 and step == BAD_STEP:
            mark("fault")
            os.kill(os.getpid(), signal.SIGSTOP)  # the culprit
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # the one who waits
            parameter.grad /= 2
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
