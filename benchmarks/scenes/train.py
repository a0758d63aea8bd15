"""An ordinary training script: a DataLoader with two workers, a small model, a line every ten steps."""

import socket
import time

import torch
from data import Reviews
from torch.utils.data import DataLoader


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    server = socket.create_server(("127.0.0.1", 0))  # the kernel accepts for it; nobody ever answers
    loader = DataLoader(Reviews(server.getsockname()), batch_size=8, num_workers=2)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (x, y) in enumerate(loader, start=1):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)  # a model of this size would be done before anybody could look
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
