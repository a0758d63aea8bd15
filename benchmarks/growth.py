"""How time and memory grow: layers, width, length, vocabulary of a model; megabytes and documents of a corpus.

In:  nothing (the text is made up).
Out: milliseconds and peak memory of a training step, seconds and peak memory of `lamp data prepare`, row by row, each
     beside the first row and beside what the arithmetic expects (FLOPs for a step, bytes for a corpus).

    python benchmarks/growth.py [--only layers width length vocabulary corpus documents] [--mb 10 100 1000]

A model's row is a process of its own: a step as `lamp train` takes it (not compiled), the median of its steps; the rows
take turns. A corpus's row is the whole command, once (two minutes for all with 1 GB).
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import measured
import peers
import prepare

FIRST = {"layers": 4, "width": 256, "length": 256, "vocabulary": 8192}
MODELS = {
    "layers": [2, 4, 8, 16],
    "width": [128, 256, 512, 1024],
    "length": [128, 256, 512, 1024],
    "vocabulary": [1024, 8192, 32_768, 131_072],
}
DOCUMENTS = [100, 10_000, 1_000_000]
STEP = """
import contextlib, statistics, torch
from lamplighter.config import Train
from lamplighter.model.shape import Shape, flops_per_token
from lamplighter.model.transformer import Transformer
from lamplighter.model.weights import init_weights
from lamplighter.train.bf16 import make_it_work
from lamplighter.train.hardware import kept_memory
from lamplighter.train.optimizers import make_optimizer

def answer(ask):
    global model, optimizer, shape, low, room
    if "layers" in ask:
        torch.set_num_threads(ask["threads"])
        low = ask["dtype"] == "bf16"
        if low and not make_it_work():
            raise SystemExit("bf16 does not work on this processor: --dtype fp32")
        shape = Shape(family="gpt2", vocab_size=ask["vocabulary"], positions=ask["length"], layers=ask["layers"],
                      width=ask["width"], heads=ask["width"] // 64)
        model = Transformer(shape)
        init_weights(model, 1)
        optimizer, room = make_optimizer(model, Train(steps=1)), contextlib.ExitStack()
        room.enter_context(kept_memory(torch.device("cpu")))
        return {"flops": flops_per_token(shape, ask["length"]), "parameters": sum(p.numel() for p in model.parameters())}
    times = []
    ids = torch.randint(0, shape.vocab_size, (ask["rows"], shape.positions + 1))
    for _ in range(ask["steps"]):
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = model(ids[:, :-1].contiguous(), targets_BT=ids[:, 1:].contiguous(), scale=1 / ids.numel())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(1e-4)
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    peak = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) / 1024
    return {"ms": statistics.median(times) * 1000, "mb": peak}
"""


def grow_model(what: str, sizes: list[int], wanted: Any, place: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(measured.ROOT / "src")}
    workers, facts, memory = {}, {}, {}
    try:
        for size in sizes:
            workers[f"{what} {size:,}"] = worker = peers.Worker(sys.executable, STEP, place / "log", environment)
            case = {**FIRST, what: size, "threads": wanted.threads, "dtype": wanted.dtype}
            facts[f"{what} {size:,}"] = worker.ask(case) | {"tokens": wanted.rows * case["length"]}

        def turn(name: str) -> float:
            done = workers[name].ask({"rows": wanted.rows, "steps": 1 if wanted.quick else 2})
            memory[name] = done["mb"]
            return float(done["ms"])

        found = measured.in_turn({name: (lambda name=name: turn(name)) for name in workers}, wanted.rounds)
    finally:
        for worker in workers.values():
            worker.__exit__(None, None, None)
    work = {name: fact["flops"] * fact["tokens"] for name, fact in facts.items()}
    least = next(iter(work.values()))
    rows = []
    for name, values in found.items():
        told = f"FLOPs {work[name] / least:.2f} x the first; {memory[name]:,.0f} MB at most; {facts[name]['parameters'] / 1e6:.1f}M parameters"
        rows.append(measured.Row(name, values, more_is_better=False, extra=told))
    held = ", ".join(f"{name} {size:,}" for name, size in FIRST.items() if name != what)
    measured.show(f"a training step of {wanted.rows} rows in {wanted.dtype}, more {what} ({held})", "ms", rows)


def write_corpus(path: Path, size: int, documents: int) -> None:
    """About so many bytes of made-up words, in so many documents: JSON lines."""
    rng = random.Random(1)
    pool = [" ".join(rng.choices(measured.WORDS, k=12)) + f" {number}. " for number in range(20_000)]
    each = max(1, size // documents)
    with open(path, "w") as out:
        for number in range(documents):
            text, left = [f"{number} "], each
            while left > 0:
                text.append(pool[rng.randrange(len(pool))])
                left -= len(text[-1])
            out.write('{"text": "' + "".join(text) + '"}\n')


def grow_corpus(what: str, cases: list[tuple[str, int, int]], place: Path) -> None:
    from lamplighter.data.tokenizer import train

    tokenizer = place / "words"
    write_corpus(place / "sample.jsonl", 4_000_000, 1000)
    with open(place / "sample.jsonl") as rows_of_text:
        train([json.loads(line)["text"] for line in rows_of_text], 4096).save(tokenizer)
    rows = []
    for name, size, documents in cases:
        path = place / "corpus.jsonl"
        write_corpus(path, size, documents)
        done = prepare.prepare(path, tokenizer, place / f"runs-{len(rows)}-{what}", None)
        real = path.stat().st_size
        told = f"{real / 1e6:,.0f} MB, {documents:,} documents: {real / 1e6 / done['whole_s']:,.0f} MB/s, {done['peak'] / 1e6:,.0f} MB of memory at most"
        rows.append(measured.Row(name, [done["whole_s"]], more_is_better=False, extra=told))
        path.unlink()
    measured.show(f"lamp data prepare, more {what}", "seconds", rows)


def main() -> None:
    parser = measured.arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=[*MODELS, "corpus", "documents"])
    parser.add_argument("--mb", type=float, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    wanted = parser.parse_args()
    parts = wanted.only or [*MODELS, "corpus", "documents"]
    if wanted.quick:
        wanted.rounds, wanted.mb, parts = 1, [0.1, 1], wanted.only or ["layers", "corpus"]
    measured.say_machine()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for what in (part for part in parts if part in MODELS):
            grow_model(what, MODELS[what][: 2 if wanted.quick else None], wanted, place)
        if "corpus" in parts:
            sizes = [(f"{mb:g} MB", int(mb * 1e6), max(1, int(mb * 200))) for mb in wanted.mb]
            grow_corpus("text", sizes, place)
        if "documents" in parts:
            grow_corpus("documents", [(f"{count:,} documents", 50_000_000, count) for count in DOCUMENTS], place)
    measured.keep(wanted.json)


if __name__ == "__main__":
    main()
