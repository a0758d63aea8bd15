"""Batches of 16 MB through shared memory. Run it where /dev/shm holds 8 MB, as in a container with a small one."""

import torch
from marking import mark
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((1 << 20,), float(index))


def main():
    loader = DataLoader(Images(), batch_size=4, num_workers=2)
    mark("fault")
    for step, batch in enumerate(loader, 1):  # the culprit
        print(f"step {step}: mean {batch.mean():.1f}", flush=True)
    print(f"done: {step} steps")


if __name__ == "__main__":
    main()
