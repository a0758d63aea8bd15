"""A worker leaves with code 3 at a known item, as a C library does that calls exit()."""

import os
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

BAD_ITEM = 85  # batch 21 of four items: worker 1 has it


def mark(what, path=os.environ.get("LAMP_FIELD_MARK")):
    open(path or os.devnull, "a").write(f"{what} {time.time():.3f} {os.getpid()}\n")


class Lines(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        if index == BAD_ITEM:
            mark("fault")
            os._exit(3)  # the culprit
        return torch.arange(index, index + 33) % 256


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a tiny model gains nothing from more, and loses much on a busy machine
    loader = DataLoader(Lines(), batch_size=4, num_workers=2)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.01)  # stands for a larger model
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    print("done")


if __name__ == "__main__":
    main()
