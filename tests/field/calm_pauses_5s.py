"""Looks at a queue of jobs every five seconds and prints what it saw."""

import argparse
import time

from marking import mark


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0, help="between two looks")
    args = parser.parse_args()
    mark("fault")
    for look in range(1, 5):
        print(f"look {look}: 3 jobs wait", flush=True)
        time.sleep(args.seconds)  # the long part
    mark("over")
    print("done: 4 looks")


if __name__ == "__main__":
    main()
