"""A lambda in the dataset, and workers that are spawned: it cannot be sent to them."""

import torch
from marking import mark
from torch.utils.data import DataLoader, Dataset


class Lines(Dataset):
    def __init__(self, size):
        self.size = size
        self.transform = lambda row: row % 256  # defined here

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.transform(torch.arange(index, index + 33))


def main():
    loader = DataLoader(Lines(320), batch_size=4, num_workers=2, multiprocessing_context="spawn")
    print(f"{len(loader)} batches", flush=True)
    mark("fault")
    for step, batch in enumerate(loader, 1):  # the culprit
        print(f"step {step}: {batch.float().mean():.1f}", flush=True)


if __name__ == "__main__":
    main()
