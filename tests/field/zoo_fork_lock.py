"""A thread of the main process holds a lock while the workers of the second epoch are forked; the dataset needs it."""

import threading
import time

import torch
import torch.nn as nn
from marking import mark
from torch.utils.data import DataLoader, Dataset


class Table:
    """A small cache that a thread renews now and then."""

    def __init__(self):
        self.lock, self.held, self.renewing = threading.Lock(), threading.Event(), False
        self.rows = {index: torch.arange(index, index + 33) % 256 for index in range(160)}

    def renew(self):
        with self.lock:  # taken here
            self.held.set()
            time.sleep(1.0)

    def row(self, index):
        if self.renewing and index == 0:
            mark("fault")
        with self.lock:  # the culprit
            return self.rows[index]


class Lines(Dataset):
    def __init__(self, table):
        self.table = table

    def __len__(self):
        return len(self.table.rows)

    def __getitem__(self, index):
        return self.table.row(index)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a tiny model gains nothing from more, and loses much on a busy machine
    table = Table()
    loader = DataLoader(Lines(table), batch_size=4, num_workers=2)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in (1, 2):
        if epoch == 2:
            table.renewing = True
            threading.Thread(target=table.renew, name="renew").start()
            table.held.wait()
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.01)  # stands for a larger model
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
