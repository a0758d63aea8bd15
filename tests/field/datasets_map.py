"""Tokenise with datasets.map in two processes, then train a little on the result."""

import argparse
import fcntl
import os
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn as nn
from datasets import Dataset
from marking import mark

BAD_DOCUMENT = 310  # in the second half: process 1 has it


def normalise(text, seconds):
    mark("fault")
    until, kept = time.monotonic() + seconds, 0
    for position in range(10**9):  # the culprit of slow
        kept += text[position % len(text)].isalpha()
        if time.monotonic() > until:
            break  # the culprit of slow ends
    mark("over")
    return kept


def extend_vocabulary(lock_path):
    with open(lock_path) as lock:
        mark("fault")
        fcntl.flock(lock, fcntl.LOCK_EX)  # the culprit of stuck


def tokenise(row, index, mode, seconds, lock_path):
    time.sleep(0.002)  # stands for a real tokeniser
    if index == BAD_DOCUMENT and mode == "slow":
        normalise(row["text"], seconds)
    if index == BAD_DOCUMENT and mode == "stuck":
        extend_vocabulary(lock_path)
    return {"ids": list(row["text"].encode()[:64])}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("healthy", "slow", "stuck"), default="healthy")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long the slow document takes")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # a tiny model gains nothing from more, and loses much on a busy machine
    documents = Dataset.from_dict(
        {"text": [f"Document {n} of the night watch, lamp by lamp. " * 4 for n in range(400)]}
    )
    with tempfile.NamedTemporaryFile(suffix=".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other side: one preparation at a time
        given = {"mode": args.mode, "seconds": args.seconds, "lock_path": lock.name}
        tokens = documents.map(tokenise, with_indices=True, num_proc=2, fn_kwargs=given, remove_columns=["text"])
    x = torch.tensor(tokens["ids"][:])
    print(f"tokenised {len(tokens)} documents, {x.numel()} tokens", flush=True)

    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for start in range(0, len(x), 10):
        batch = x[start : start + 10]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"done: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
