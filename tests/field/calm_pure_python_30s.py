"""Counts pairs of letters in pure Python for half a minute and says nothing meanwhile."""

import argparse
import collections
import time

from marking import mark

TEXT = "the lamp is lit at dusk and put out at dawn "


def count_pairs(seconds):
    pairs, until = collections.Counter(), time.monotonic() + seconds
    for position in range(10**9):  # the long part
        left = position % len(TEXT)
        pairs[TEXT[left], TEXT[(left + 1) % len(TEXT)]] += 1
        if time.monotonic() > until:
            break  # the long part ends
    return pairs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    mark("fault")
    pairs = count_pairs(args.seconds)
    mark("over")
    print(f"done: {sum(pairs.values())} pairs")


if __name__ == "__main__":
    main()
