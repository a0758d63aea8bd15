"""Builds millions of small objects and has them all looked at by the garbage collector, again and again."""

import argparse
import gc
import time

from marking import mark


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    gc.disable()
    rows = [[number] for number in range(int(6_000_000 * min(1.0, args.seconds / 8.0)))]
    gc.enable()
    mark("fault")
    until, pauses = time.monotonic() + args.seconds, 0
    while time.monotonic() < until:
        gc.collect()  # the long part
        pauses += 1
    mark("over")
    print(f"done: {pauses} pauses over {len(rows)} rows")


if __name__ == "__main__":
    main()
