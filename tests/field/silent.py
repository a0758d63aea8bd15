"""Trains and never says a word: batches come from a reader thread through a queue, the result goes into a file."""

import argparse
import queue
import tempfile
import threading
import time

import numpy as np
import torch
import torch.nn as nn
from marking import mark

PIECE_BYTES = 512


def read_slowly(path, size):
    """In small pieces, at the 40 kB/s that a busy file server grants."""
    mark("fault")
    pieces = []
    with open(path, "rb", buffering=0) as file:  # the culprit of slow
        while sum(map(len, pieces)) < size:
            pieces.append(file.read(PIECE_BYTES))
            time.sleep(PIECE_BYTES / 40_000)  # the culprit of slow ends
    mark("over")
    return b"".join(pieces)


def produce(path, batches, fail_at):
    """Reads window after window; a window beyond the end of the file ends the thread, and nobody is told."""
    tokens = np.fromfile(path, dtype=np.uint8)
    for number in range(10**6):
        try:
            if number == fail_at:
                raise OSError("window beyond the end")
            start = number * 64 % (len(tokens) - 520)
            batches.put(torch.from_numpy(tokens[start : start + 520].astype(np.int64)).view(8, 65))
        except OSError:
            return


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("healthy", "slow", "stuck"), default="healthy")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long the slow read takes")
    parser.add_argument("--out", default="silent_model.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # a tiny model gains nothing from more, and loses much on a busy machine
    with tempfile.NamedTemporaryFile(suffix=".bin") as shard:
        np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.uint8).tofile(shard.name)
        batches = queue.Queue(maxsize=4)
        fail_at = 100 if args.mode == "stuck" else -1
        reader = threading.Thread(target=produce, args=(shard.name, batches, fail_at), daemon=True, name="reader")
        reader.start()
        model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(150):
            if args.mode == "slow" and step == 100:
                read_slowly(shard.name, int(args.seconds * 40_000))
            if fail_at == step:
                mark("fault")
            batch = batches.get()  # the culprit of stuck
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.005)  # stands for a larger model
        torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
