"""Tokenise documents with a multiprocessing.Pool before training, as preparation scripts do."""

import argparse
import collections
import os
import signal
import time
import zlib
from multiprocessing import Pool

from marking import mark

BAD_DOCUMENT = 137


def merge_pairs(words, seconds):
    mark("fault")
    until, pairs = time.monotonic() + seconds, collections.Counter()
    for position in range(10**9):  # the culprit of slow
        left = words[position % len(words)]
        pairs[left, words[(position + 1) % len(words)]] += 1
        if time.monotonic() > until:
            break  # the culprit of slow ends
    mark("over")
    return pairs


def tokenise(job):
    number, text, mode, seconds = job
    time.sleep(0.004)  # stands for a real tokeniser
    words = text.split()
    if number == BAD_DOCUMENT and mode == "slow":
        merge_pairs(words, seconds)
    if number == BAD_DOCUMENT and mode == "stuck":
        mark("fault")
        os.kill(os.getpid(), signal.SIGKILL)  # what the kernel does to the largest process when memory runs out
    return [zlib.crc32(word.encode()) % 32_000 for word in words]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("healthy", "slow", "stuck"), default="healthy")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long the slow document takes")
    args = parser.parse_args()

    texts = [f"document {number} says that the lamp is lit " * 30 for number in range(400)]
    jobs = [(number, text, args.mode, args.seconds) for number, text in enumerate(texts)]
    total = 0
    with Pool(2) as pool:
        for first in range(0, len(jobs), 100):
            done = pool.map(tokenise, jobs[first : first + 100], chunksize=5)  # the one who waits
            total += sum(map(len, done))
            print(f"{first + len(done)} of {len(jobs)} documents, {total} tokens", flush=True)
    print(f"done: {total} tokens")


if __name__ == "__main__":
    main()
