"""A map dataset behind a DataLoader with two workers; the worker that meets one bad item is slow, waits, or dies in some way."""

import argparse
import os
import re
import resource
import signal
import socket
import time

import torch
import torch.nn as nn
from marking import mark
from torch.utils.data import DataLoader, Dataset

BAD_ITEM = 85  # batch 21 of four items: worker 1 has it


class Records(Dataset):
    def __init__(self, mode, seconds, address):
        self.mode, self.seconds, self.address = mode, seconds, address

    def __len__(self):
        return 320

    def __getitem__(self, index):
        if index == BAD_ITEM and self.mode != "healthy":
            FAULTS[self.mode](self, index)
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(32, generator=generator)
        return x, (x.sum() > 0).long()

    def clean(self, index):
        mark("fault")
        until, checksum = time.monotonic() + self.seconds, index
        for position in range(10**9):  # the culprit of slow
            checksum = (checksum * 31 + position) % 1_000_003
            if time.monotonic() > until:
                break  # the culprit of slow ends
        mark("over")
        return checksum

    def look_up(self, index):
        with socket.create_connection(self.address) as link:
            link.sendall(b"GET label %d\n" % index)
            mark("fault")
            return link.recv(1024)  # the culprit of stuck

    def be_killed(self, index):
        """As the kernel does when memory runs out."""
        mark("fault")
        os.kill(os.getpid(), signal.SIGKILL)  # the culprit of sigkill

    def be_stopped(self, index):
        """As by a debugger that was left, or job control gone wrong."""
        mark("fault")
        os.kill(os.getpid(), signal.SIGSTOP)  # the culprit of sigstop

    def leave(self, index):
        """As a C library does that calls exit()."""
        mark("fault")
        os._exit(3)  # the culprit of exit

    def grow_cache(self, index):
        """A cache grows until the limit of address space, 256 MB above what the worker has now, stops it."""
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * resource.getpagesize() + (256 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        mark("fault")
        return [torch.ones(16 << 20, dtype=torch.uint8) for _ in range(1000)]  # the culprit of oom

    def sleep(self, index):
        mark("fault")
        time.sleep(3600)  # the culprit of hang

    def match(self, index):
        """A line on which a careless pattern takes longer than anybody lives."""
        mark("fault")
        re.match(r"(\w+\s?)+$", "lamp" * 20 + "!")  # the culprit of gil


FAULTS = {
    "slow": Records.clean, "stuck": Records.look_up, "sigkill": Records.be_killed, "sigstop": Records.be_stopped,
    "exit": Records.leave, "oom": Records.grow_cache, "hang": Records.sleep, "gil": Records.match,
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("healthy", *FAULTS), default="healthy")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long the slow item takes")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # a tiny model gains nothing from more, and loses much on a busy machine
    # The label server listens, the kernel accepts for it, and nobody ever answers.
    server = socket.create_server(("127.0.0.1", 0))
    records = Records(args.mode, args.seconds, server.getsockname())
    loader = DataLoader(records, batch_size=4, num_workers=2)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    right = seen = 0
    for step, (x, y) in enumerate(loader, 1):
        scores = model(x)
        loss = nn.functional.cross_entropy(scores, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right, seen = right + int((scores.argmax(1) == y).sum()), seen + len(y)
        time.sleep(0.01)  # stands for a larger model
        if step % 10 == 0:
            print(f"[{step}/{len(loader)}] loss={loss.item():.3f} acc={right / seen:.2f}", flush=True)
    print(f"done: {seen} items")


if __name__ == "__main__":
    main()
