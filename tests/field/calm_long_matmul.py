"""One native call that lasts: a singular value decomposition, sized by a small one so that it takes about as told."""

import argparse
import time

import torch
from marking import mark

SMALL = 700


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.linalg.svd(torch.randn(64, 64))  # loads the library
    started = time.monotonic()
    torch.linalg.svd(torch.randn(SMALL, SMALL))
    took = time.monotonic() - started
    size = int(SMALL * (1.5 * args.seconds / took) ** (1 / 3))  # large ones use the cores better
    matrix = torch.randn(size, size)
    mark("fault")
    values = torch.linalg.svd(matrix).S  # the long part
    mark("over")
    print(f"done: {size} x {size}, largest value {values[0]:.1f}")


if __name__ == "__main__":
    main()
