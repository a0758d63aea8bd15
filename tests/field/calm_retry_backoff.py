"""Asks a service that is busy at first: waits 1, 2, 4 and 8 seconds between the attempts, and says so."""

import argparse
import time

from marking import mark


def ask(attempt):
    if attempt < 5:
        raise ConnectionError("503 busy")
    return "shard list"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0, help="all pauses together")
    args = parser.parse_args()
    mark("fault")
    for attempt in range(1, 6):
        try:
            answer = ask(attempt)
        except ConnectionError as error:
            pause_s = args.seconds / 15 * 2 ** (attempt - 1)
            print(f"attempt {attempt}: {error}; again in {pause_s:.1f} s", flush=True)
            time.sleep(pause_s)  # the long part
    mark("over")
    print(f"done: {answer}")


if __name__ == "__main__":
    main()
