"""Million tokens a second from a token file to a batch, and the time to the first one, against what peers do.

In:  made-up tokens (50 million of 16 bits).
Out: ratios to a nanoGPT-style memmap, a DataLoader, Hugging Face datasets and litdata; the limit is a copy in memory.

    python benchmarks/batches.py [--rows 8] [--length 256] [--tokens 50000000] [--batches 2000]

Every contestant is a process of its own, is told the same window numbers, and must return the same inputs and targets
(by their sums). litdata chooses its order itself, so only its count is checked. Each turn begins with opening the files
anew: the first batch is timed from there, imports not counted.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import measured
import numpy as np
import peers

OURS = """
import numpy as np
from pathlib import Path
from lamplighter.data.batches import BatchLayout, make_batch
from lamplighter.data.token_cache.reader import CachedStream

def batch_of(step):
    made = make_batch(split, BatchLayout(1, rows, length, 0), step)
    return made.inputs, made.targets

def answer(ask):
    global split, rows, length
    if "folder" in ask:
        rows, length = ask["rows"], ask["length"]
        began = time.perf_counter()
        folder = Path(ask["folder"])
        split = CachedStream(folder, "train", json.loads((folder / "manifest.json").read_text()))
        batch_of(1)
        return {"s": time.perf_counter() - began}
    began, total = time.perf_counter(), 0
    for step in range(1, ask["batches"] + 1):
        inputs, targets = batch_of(step)
    seconds = time.perf_counter() - began
    for step in range(1, ask["batches"] + 1, 50):
        inputs, targets = batch_of(step)
        total += int(inputs.sum()) + 3 * int(targets.sum())
    return {"s": seconds, "sum": total}
"""
# The peers' common part: `windows` has one row of window numbers per batch; batch_of(step) returns inputs and targets.
THEIRS = """
import numpy as np

def answer(ask):
    global rows, length, windows
    if "folder" in ask:
        rows, length = ask["rows"], ask["length"]
        windows = np.load(ask["folder"] + "/windows.npy")
        began = time.perf_counter()
        start(ask["folder"])
        batch_of(0)
        return {"s": time.perf_counter() - began}
    began, total = time.perf_counter(), 0
    for step in range(ask["batches"]):
        batch_of(step)
    seconds = time.perf_counter() - began
    for step in range(0, ask["batches"], 50):
        inputs, targets = batch_of(step)
        total += int(inputs.sum()) + 3 * int(targets.sum())
    return {"s": seconds, "sum": total}
"""
NANOGPT = """
import torch

def start(folder):
    global path
    path = folder + "/train.bin"

def batch_of(step):
    data = np.memmap(path, dtype=np.uint16, mode="r")  # anew for each batch, as nanoGPT does against a leak
    ix = windows[step] * length
    x = torch.stack([torch.from_numpy(data[i : i + length].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + length].astype(np.int64)) for i in ix])
    return x, y
"""
LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset

class Windows(Dataset):
    def __init__(self, path):
        self.data = np.memmap(path, dtype=np.uint16, mode="r")
    def __len__(self):
        return (len(self.data) - 1) // length
    def __getitem__(self, i):
        ids = torch.from_numpy(self.data[i * length : (i + 1) * length + 1].astype(np.int64))
        return ids[:-1], ids[1:]

def start(folder):
    global found, batches
    found = Windows(folder + "/train.bin")
    batches = None

def batch_of(step):
    global batches, expected
    if batches is None or step != expected:
        order = windows[step:].tolist()
        batches, expected = iter(DataLoader(found, batch_sampler=order, num_workers=WORKERS)), step
    expected += 1
    return next(batches)
"""
DATASETS = """
import datasets

def start(folder):
    global found
    found = datasets.load_from_disk(folder + "/arrow").with_format("numpy")

def batch_of(step):
    ids = found[windows[step].tolist()]["ids"].astype(np.int64)
    return ids[:, :-1], ids[:, 1:]
"""
MAKE_ARROW = """
import sys, numpy as np, datasets
folder, length = sys.argv[1], int(sys.argv[2])
ids = np.fromfile(folder + "/train.bin", np.uint16)
count = (len(ids) - 1) // length
rows = np.lib.stride_tricks.sliding_window_view(ids, length + 1)[: count * length : length]
kind = datasets.Features({"ids": datasets.List(datasets.Value("uint16"), length=length + 1)})
datasets.Dataset.from_dict({"ids": rows}, features=kind).save_to_disk(folder + "/arrow")
"""
LITDATA = """
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

def answer(ask):
    global rows, length, place
    if "folder" in ask:
        rows, length, place = ask["rows"], ask["length"], ask["folder"] + "/lit"
        began = time.perf_counter()
        next(batches())
        return {"s": time.perf_counter() - began}
    made, count = batches(), 0
    began = time.perf_counter()
    for _ in range(ask["batches"] // 10):
        ids = next(made)
        inputs, targets = ids[:, :-1].long(), ids[:, 1:].long()
        count += inputs.numel()
    return {"s": (time.perf_counter() - began) * 10, "count": count * 10}

def batches():
    found = StreamingDataset(place, item_loader=TokensLoader(block_size=length + 1), shuffle=True)
    return iter(StreamingDataLoader(found, batch_size=rows, num_workers=0))
"""
MAKE_LIT = """
import sys, numpy as np, torch
from litdata import optimize, TokensLoader
folder, length = sys.argv[1], int(sys.argv[2])
def pieces(start):
    ids = np.fromfile(folder + "/train.bin", np.uint16)[start : start + 5_000_000]
    yield torch.from_numpy(ids.astype(np.int32))
if __name__ == "__main__":
    size = np.fromfile(folder + "/train.bin", np.uint16).size
    optimize(pieces, list(range(0, size, 5_000_000)), output_dir=folder + "/lit", num_workers=1, chunk_size=(length + 1) * 8192,
             item_loader=TokensLoader(block_size=length + 1))
"""


def make_files(folder: Path, wanted: Any) -> None:
    """The token file, what our reader needs beside it, and the windows of each batch, in our order."""
    from lamplighter.data.batches import BatchLayout, count_windows, make_batch
    from lamplighter.data.token_cache.reader import CachedStream

    ids = np.random.default_rng(1).integers(0, 30_000, wanted.tokens + 1).astype(np.uint16)
    ids.tofile(folder / "train.bin")
    ids[1:].tofile(folder / "ours.bin")  # our stream begins with a mark that is in no file: here the first token
    shards = [{"file": "ours.bin"}]
    side = {"tokens": len(ids), "documents": 1, "text_bytes": 0, "shards": shards}
    manifest = {"splits": {"train": side}, "dtype": "uint16", "end_of_text": int(ids[0])}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    split = CachedStream(folder, "train", manifest)
    assert count_windows(len(split), wanted.length) >= wanted.rows
    steps = range(1, wanted.batches + 1)
    chosen = [make_batch(split, BatchLayout(1, wanted.rows, wanted.length, 0), step).samples for step in steps]
    np.save(folder / "windows.npy", np.array(chosen))


def contestants(folder: Path, wanted: Any) -> dict[str, tuple[str, str]]:
    """Name -> interpreter and program; one that cannot be had is said, and left out."""
    import subprocess

    found = {"lamp": (sys.executable, OURS)}
    if wanted.no_peers:
        return found
    theirs = str(peers.python("hf"))
    found["memmap, nanoGPT-style"] = (theirs, NANOGPT + THEIRS)
    found["DataLoader, 0 workers"] = (theirs, "WORKERS = 0\n" + LOADER + THEIRS)
    found["DataLoader, 2 workers"] = (theirs, "WORKERS = 2\n" + LOADER + THEIRS)
    made = subprocess.run([theirs, "-c", MAKE_ARROW, str(folder), str(wanted.length)], capture_output=True, check=False)
    if made.returncode == 0:
        found["datasets"] = (theirs, DATASETS + THEIRS)
    else:
        print(f"left out: datasets: {made.stderr.decode().strip().splitlines()[-1]}")
    try:
        lit = str(peers.python("litdata"))
        script = folder / "make_lit.py"
        script.write_text(MAKE_LIT)
        words = [lit, str(script), str(folder), str(wanted.length)]
        subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
        found["litdata"] = (lit, LITDATA)
    except (peers.NoPeer, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        print(f"left out: litdata: {detail}")
    return found


def main() -> None:
    parser = measured.arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--batches", type=int, default=2000)
    wanted = parser.parse_args()
    if wanted.quick:
        wanted.rounds, wanted.tokens, wanted.batches = 1, 200_000, 100
    wanted.tokens -= wanted.tokens % wanted.length  # no window is shorter than the others
    measured.say_machine()
    environment = {**os.environ, "PYTHONPATH": str(measured.ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_files(folder, wanted)
        chosen = contestants(folder, wanted)
        first: dict[str, list[float]] = {name: [] for name in chosen}
        sums: dict[str, int] = {}
        tokens = wanted.batches * wanted.rows * wanted.length

        workers = {name: peers.Worker(*chosen[name], folder / f"{number}.log", environment)
                   for number, name in enumerate(chosen)}  # fmt: skip

        def turn(name: str) -> float:
            opened = workers[name].ask({"folder": str(folder), "rows": wanted.rows, "length": wanted.length})
            first[name].append(opened["s"] * 1000)
            done = workers[name].ask({"batches": wanted.batches})
            assert done.get("count", tokens) == tokens
            sums[name] = done.get("sum", 0)
            return tokens / float(done["s"]) / 1e6

        try:
            found = measured.in_turn({name: (lambda name=name: turn(name)) for name in chosen}, wanted.rounds)
        finally:
            for worker in workers.values():
                worker.__exit__(None, None, None)
    for name, total in sums.items():
        assert name == "litdata" or total == sums["lamp"], f"{name} made other batches than lamp"
    against = "memmap, nanoGPT-style" if len(chosen) > 1 else "lamp"
    copying = measured.copy_gb_s(wanted.rows * wanted.length * 8, 0.05 if wanted.quick else 0.5)
    limit = f"{copying * 1000 / 16:,.0f} M tokens/s: inputs and targets of 8 bytes each, copied once"
    rows = [measured.Row(name, rates) for name, rates in found.items()]
    measured.show(f"batches of {wanted.rows} x {wanted.length}", "M tokens/s", rows, against, limit)
    rows = [measured.Row(name, values[1:], more_is_better=False) for name, values in first.items()]
    measured.show("files opened and first batch made", "ms", rows, against)
    measured.keep(wanted.json)


if __name__ == "__main__":
    main()
