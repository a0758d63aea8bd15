"""What each CPU kernel of model/cpu.py is worth, over a grid of shapes. Run: python benchmarks/kernels.py --json kernels.json

In:  families, sizes (5M to 100M parameters), lengths (256 to 4096); the kernels' switch (LAMP_CPU_KERNELS).
Out: for each shape the tokens per second with all kernels, without attention, compiled (which uses none), of a plain compiled
     loop around transformers' own model, and of Hugging Face's Trainer with its best settings here.

A kernel stays if it is worth 5 % of a step on shapes that people train (docs/decisions/021-kernels.md). `ratio` is a contestant's
rate over that with all kernels, so a kernel that is worth 5 % shows as 0.95 in the row "without" it.

Everybody has the same weights, batches, optimizer and clipping. Contestants run a few at a time (--at-once, for memory), each
group in turn with "all kernels" among them, so every ratio is of neighbours in time.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import measured
import peers
from trainers import PEAK, PLAIN, TRAINER

SIZES = {  # layers, width; with a vocabulary of 16,384
    "5M": (6, 192),
    "17M": (6, 384),
    "50M": (8, 640),
    "100M": (12, 768),
}
VOCAB = 16_384
TOKENS = 2_048  # of a step, or one row where a row is longer
LR, CLIP = 3e-4, 1.0
BASE = "all kernels"
# Name -> (LAMP_CPU_KERNELS, compiled).
WAYS = {
    BASE: ("", False),
    "without attention": ("-attention", False),
    "compiled": ("", True),
}
PLAIN_LOOP = "plain loop, compiled"
HF_TRAINER = "Trainer, fused, compiled"
THEIRS = {PLAIN_LOOP: PLAIN, HF_TRAINER: TRAINER}
# The steps of `lamp train`, without its data, saves and records.
OURS = (
    PEAK
    + """
import numpy, torch
from lamplighter.config import Train
from lamplighter.model.build import load_folder
from lamplighter.train import bf16, hardware, optimizers
from lamplighter.model.transformer import token_loss
from pathlib import Path

def answer(ask):
    global model, optimizer, batches, place, low, clip, lr, memory
    if "folder" in ask:
        low = ask["dtype"] == "bf16"
        if low and not bf16.make_it_work():
            raise SystemExit("bf16 does not work on this processor")
        torch.set_num_threads(ask["threads"])
        model = load_folder(Path(ask["folder"])).model.train()
        if ask["compile"]:
            for block in (model.transformer.h if hasattr(model, "transformer") else model.model.layers):
                block.compile(dynamic=False)
        optimizer = optimizers.make_optimizer(model, Train())
        batches, place, clip, lr = numpy.load(ask["batches"], mmap_mode="r"), 0, ask["clip"], ask["lr"]
        memory = hardware.kept_memory(torch.device("cpu"))
        memory.__enter__()
        return "ready"
    losses, began, used = [], time.perf_counter(), time.process_time()
    for _ in range(ask["steps"]):
        rows = torch.from_numpy(batches[place % len(batches)].astype(numpy.int64))
        place += 1
        ids, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = token_loss(model, ids, targets, scale=1 / targets.numel())
        loss.backward()
        optimizer.step(lr, optimizers.clip_factor(float(optimizer.grad_norm()), clip))
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"s": time.perf_counter() - began, "cpu_s": time.process_time() - used, "losses": losses, "mb": peak_mb()}
"""
)


def prepare_case(family: str, size: str, length: int, place: Path, steps: int) -> dict[str, Any]:
    """A folder with the weights that all begin with, and the batches that all see."""
    import numpy as np
    from safetensors.torch import save_file

    from lamplighter.model.shape import Shape, count_parameters, shape_to_hf
    from lamplighter.model.transformer import Transformer
    from lamplighter.model.weights import init_weights, weights

    layers, width = SIZES[size]
    heads = width // 64
    kv_heads = heads // 2 if family != "gpt2" and heads % 2 == 0 else 0
    shape = Shape(family, VOCAB, length, layers, width, heads, kv_heads=kv_heads)  # type: ignore[arg-type]
    folder = place / "model"
    folder.mkdir()
    model = Transformer(shape)
    init_weights(model, 1)
    save_file(weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape_to_hf(shape)))
    rows = max(1, TOKENS // length)
    batches = np.random.default_rng(1).integers(0, VOCAB, (steps, rows, length + 1), dtype=np.int32)
    np.save(place / "batches.npy", batches)
    return {"folder": str(folder), "batches": str(place / "batches.npy"), "lr": LR, "clip": CLIP, "tokens": rows * length, "batch": rows, "best": True, "out": str(place / "out"),
            "parameters": count_parameters(shape)}  # fmt: skip


def environment(kernels: str) -> dict[str, str]:
    from lamplighter.watch.launcher import threads_wait

    more = {"PYTHONPATH": str(measured.ROOT / "src"), "HF_HUB_OFFLINE": "1", "LAMP_CPU_KERNELS": kernels}
    return {**os.environ, **threads_wait(os.environ), **more}


def group_rates(wanted: Any, case: dict[str, Any], names: list[str], place: Path) -> list[measured.Row]:
    """Some contestants in turn."""
    memory: dict[str, float] = {}
    cpu_s: dict[str, float] = {}  # of a step, the least: a busy machine hardly changes it
    workers: dict[str, peers.Worker] = {}

    def turn(name: str) -> float:
        told = workers[name].ask({"steps": wanted.steps})
        memory[name] = told["mb"]
        cpu_s[name] = min(cpu_s.get(name, float("inf")), told["cpu_s"] / wanted.steps)
        return float(wanted.steps * case["tokens"] / told["s"])

    try:
        for number, name in enumerate(names):
            kernels, compiled = WAYS.get(name, ("", True))
            program, python = (THEIRS[name], interpreter()) if name in THEIRS else (OURS, sys.executable)
            workers[name] = peers.Worker(python, program, place / f"{number}.log", environment(kernels))
            print(f"  starting {name}", flush=True)
            ask = {name: case[name] for name in ("folder", "batches", "lr", "clip", "batch", "best", "out")}
            workers[name].ask({**ask, "threads": wanted.threads, "dtype": wanted.dtype, "compile": compiled})
        found = measured.in_turn({name: lambda name=name: turn(name) for name in names}, wanted.rounds)  # type: ignore[misc]
    finally:
        for worker in workers.values():
            worker.__exit__(None, None, None)
    return [
        measured.Row(name, rates, extra=f"{memory[name]:,.0f} MB, {cpu_s[name]:.3f} CPU-s a step")
        for name, rates in found.items()
    ]


def interpreter() -> str:
    """One that has transformers and accelerate."""
    import importlib.util

    have = all(importlib.util.find_spec(name) for name in ("transformers", "accelerate"))
    return sys.executable if have else str(peers.python("hf"))


def main() -> None:
    parser = measured.arguments(__doc__ or "", rounds=5)
    parser.add_argument("--steps", type=int, default=4, help="of each turn")
    parser.add_argument("--families", nargs="+", default=["gpt2", "llama"], choices=["gpt2", "llama", "qwen3"])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 512, 1024, 4096])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="bf16 where the processor has it, else fp32")
    parser.add_argument("--only", nargs="+", help="contestants whose name holds one of these (all kernels always runs)")
    parser.add_argument("--at-once", type=int, default=3, help="contestants that are in memory together")
    wanted = parser.parse_args()
    if wanted.quick:
        wanted.families, wanted.sizes, wanted.lengths, wanted.steps, wanted.rounds = ["gpt2"], ["5M"], [256], 1, 1
    from lamplighter.train.bf16 import cpu_has_it, make_it_work

    wanted.dtype = wanted.dtype or ("bf16" if cpu_has_it() and make_it_work() else "fp32")
    names = [name for name in [*WAYS, *([] if wanted.no_peers else THEIRS)] if name != BASE]
    if wanted.only:
        names = [name for name in names if any(part in name for part in wanted.only)]
    measured.say_machine()
    figures: dict[str, float] = {}
    for family, size, length in itertools.product(wanted.families, wanted.sizes, wanted.lengths):
        key = f"{family}_{size}_{length}_{wanted.dtype}"
        with tempfile.TemporaryDirectory() as place:
            case = prepare_case(family, size, length, Path(place), (wanted.rounds + 2) * wanted.steps)
            others = max(1, wanted.at_once - 1)
            for first in range(0, len(names), others):
                rows = group_rates(wanted, case, [BASE, *names[first : first + others]], Path(place))
                title = f"{family}, {case['parameters']:,} parameters, T={length}, {case['tokens']} tokens a step, {wanted.dtype}"
                measured.show(title, "tokens/s", rows, BASE)
                figures |= {f"{key}: {row.name}": row.middle / rows[0].middle for row in rows[1:]}
            measured.keep(wanted.json, figures)  # after each case: a long grid may be interrupted


if __name__ == "__main__":
    main()
