"""Tokens a second and memory of training, against Hugging Face's Trainer, Lightning, litgpt and a plain loop.

In:  a made-up corpus of 30,000 words; a GPT-2 of 6 layers, width 384 (--layers, --width, --vocab, --length, --batch).
Out: a table of ratios, the share of the matrix product's peak, peak memory, and whether the losses agree step by step.

    python benchmarks/training.py [--rounds 5] [--steps 6] [--only lamp "plain compiled"] [--dtypes fp32 bf16]

Same weights, same batches for everybody but litgpt, whose own model of the same sizes starts from its own (it has
rotary positions and a head that is not tied). Everybody works in a process of their own and takes turns of a few
steps. A peer gets its defaults in one row and its best settings in another (fused AdamW, torch.compile, bf16 where
this processor has it; where bf16 works only without AMX, nobody uses AMX, decision 004). Ours is the product's own loop as
`lamp train` runs it, with its saves and its validation out of the way, as the peers' are; what being watched costs is in watching.py.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import measured
import peers
from trainers import LIGHTNING, LITGPT, OURS, PLAIN, TRAINER

LR, CLIP = 3e-4, 1.0


def make_text(path: Path, words: int, megabytes: float) -> None:
    """Made-up words by Zipf's law, each followed by one of a few: there is something to learn."""
    import numpy as np

    rng = np.random.default_rng(0)
    parts = np.array(
        [
            a + b
            for a in ["b", "c", "d", "f", "g", "l", "m", "n", "p", "r", "s", "t", "v"]
            for b in ["a", "e", "i", "o", "u", "ai", "ou"]
        ]
    )
    names = np.array(["".join(rng.choice(parts, 2 + number % 3)) for number in range(words)])
    share = 1 / np.arange(1, words + 1)
    share /= share.sum()
    follows = rng.choice(words, (words, 4), p=share)
    with open(path, "w") as out:
        while out.tell() < megabytes * 1e6:
            fresh = rng.choice(words, 400, p=share)
            order = [int(fresh[0])]
            for number in range(1, 400):
                order.append(int(follows[order[-1], number % 4]) if number % 3 else int(fresh[number]))
            out.write(" ".join(names[order]) + "\n\n")


def prepare_case(wanted: Any, place: Path) -> dict[str, Any]:
    """Text, tokenizer, initial weights and our own batches, for everybody."""
    import numpy as np
    from safetensors.torch import save_file

    from lamplighter.commands.start_up import prepare
    from lamplighter.config import dump, resolve
    from lamplighter.rundir import RunDir

    make_text(place / "text.txt", wanted.vocab, 1.0 if wanted.quick else 12.0)
    common = {
        "data.paths": [str(place / "text.txt")], "data.separator": ["\n\n"], "data.seq_len": [str(wanted.length)],
        "tokenizer.vocab_size": [str(wanted.vocab)], "model.family": ["gpt2"], "model.layers": [str(wanted.layers)], "model.width": [str(wanted.width)],
        "model.heads": [str(wanted.width // 64)], "train.batch_size": [str(wanted.batch)], "train.steps": ["100000"],
        "train.lr": [str(LR)], "train.warmup_steps": ["0"], "train.schedule": ["constant"], "train.grad_clip": [str(CLIP)],
        "train.threads": [str(wanted.threads)], "eval.every_steps": ["0"], "eval.sample_every_steps": ["0"],
        "save.every_steps": ["0"], "save.every_s": ["7200"],
    }  # fmt: skip
    folder = RunDir(place / "runs" / "first")
    folder.create()
    first = {**common, "train.dtype": ["fp32"], "train.compile": ["false"]}
    context, _ = prepare(resolve(None, None, first).run, folder, {})
    model = place / "model"
    model.mkdir()
    from lamplighter.model.weights import weights
    from lamplighter.train.checkpointer import TokenizerFiles

    save_file(weights(context.model), model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(context.built.config))
    TokenizerFiles(context.tokenizer).save(model)
    count = (wanted.rounds + 2) * wanted.steps + 8
    context.source.start(1, None)
    batches = [context.source.next(step) for step in range(1, count + 1)]
    context.source.close()
    rows = [np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1) for batch in batches]
    np.save(place / "batches.npy", np.stack(rows).astype(np.int32))
    runs = {}
    for name, extra in {"lamp fp32": ["fp32", "false"], "lamp fp32 compiled": ["fp32", "true"], "lamp bf16": ["bf16", "false"],
                        "lamp bf16 compiled": ["bf16", "true"], "lamp": ["auto", "true"]}.items():  # fmt: skip
        run = RunDir(place / "runs" / name.replace(" ", "-"))
        run.create()
        settings = {**common, "train.dtype": [extra[0]], "train.compile": [extra[1]]}
        run.config.write_text(dump(resolve(None, None, settings)))
        runs[name] = str(run.path)
    flops = context.built.flops_per_token(wanted.length)
    return {"model": str(model), "batches": str(place / "batches.npy"), "runs": runs, "flops": flops,
            "parameters": context.built.parameters}  # fmt: skip


def contestants(wanted: Any, case: dict[str, Any], place: Path) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Name -> (interpreter, program, first request)."""
    found: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for dtype in wanted.dtypes:
        for how in ("", " compiled"):
            found[f"lamp {dtype}{how}"] = (sys.executable, OURS, {"run": case["runs"][f"lamp {dtype}{how}"]})
    if not wanted.no_peers:
        theirs = str(peers.python("hf"))
        common = {"folder": case["model"], "batches": case["batches"], "threads": wanted.threads, "batch": wanted.batch,
                  "lr": LR, "clip": CLIP, "out": str(place / "out")}  # fmt: skip
        found["Trainer, its defaults"] = (
            theirs,
            TRAINER,
            {**common, "best": False, "compile": False, "dtype": "fp32"},
        )
        for dtype in wanted.dtypes:
            for compiled in (False, True):
                how = f"{dtype}{' compiled' if compiled else ''}"
                ask = {**common, "best": True, "compile": compiled, "dtype": dtype}
                found[f"Trainer, fused, {how}"] = (theirs, TRAINER, ask)
                found[f"plain loop, {how}"] = (theirs, PLAIN, ask)
            for group, name, program in (("lightning", "Lightning", LIGHTNING), ("litgpt", "litgpt", LITGPT)):
                try:  # with its best settings: compiled
                    found[f"{name}, {dtype} compiled"] = (str(peers.python(group)), program, {**ask, "compile": True})
                except peers.NoPeer as error:
                    print(f"left out: {name}: {error}")
    if wanted.only:
        found = {name: what for name, what in found.items() if any(part in name for part in wanted.only)}
    return found


def environment(ours: bool) -> dict[str, str]:
    from lamplighter.watch.launcher import threads_wait

    return {
        **os.environ,
        **(threads_wait(os.environ) if ours else {}),
        "PYTHONPATH": str(measured.ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def race(wanted: Any, case: dict[str, Any], place: Path) -> dict[str, float]:
    """The table, and the figures of it that a document quotes."""
    chosen = contestants(wanted, case, place)
    tokens = wanted.steps * wanted.batch * wanted.length
    workers = {
        name: peers.Worker(python, program, place / f"{number}.log", environment(program is OURS))
        for number, (name, (python, program, _)) in enumerate(chosen.items())
    }
    losses: dict[str, list[float]] = {name: [] for name in workers}
    memory: dict[str, float] = {}
    used: dict[str, list[float]] = {name: [] for name in workers}

    def turn(name: str) -> float:
        told = workers[name].ask({"steps": wanted.steps})
        losses[name] += told["losses"]
        memory[name] = told["mb"]
        used[name].append(told["cpu_s"])
        return tokens / float(told["s"])

    try:
        for name, (_, _, ask) in chosen.items():
            print(f"starting {name}", flush=True)
            workers[name].ask(ask)
            turn(name)  # its first steps, and all compiling
        found = measured.in_turn({name: lambda name=name: turn(name) for name in workers}, wanted.rounds)  # type: ignore[misc]
    finally:
        for worker in workers.values():
            worker.__exit__(None, None, None)
    peaks = {
        "bf16": measured.gemm_gflops("bfloat16") if "bf16" in wanted.dtypes else 0.0,
        "fp32": measured.gemm_gflops(),
    }
    rows = []
    for name, values in found.items():
        dtype = "bf16" if "bf16" in name else "fp32"
        share = statistics.median(values) * case["flops"] / 1e9 / peaks[dtype]
        cpu = statistics.median(used[name]) / wanted.steps
        worst = farthest(losses[name], losses[next(iter(losses))])
        extra = f"{memory[name]:,.0f} MB  {share:.0%} of {dtype} GEMM  {cpu:.2f} CPU-s a step  losses {worst}"
        rows.append(measured.Row(name, values, True, extra))
    base = next((row.name for row in rows if row.name.startswith("Trainer, fused") and "compiled" in row.name), None)
    told = [
        f"{peak:.0f} GFLOP/s {name} = {peak * 1e9 / case['flops']:,.0f} tokens/s"
        for name, peak in peaks.items()
        if peak
    ]
    limit = "; ".join(told)
    sizes = f"{case['parameters']:,} parameters, {wanted.batch} x {wanted.length} tokens a step"
    measured.show(f"training, {sizes}", "tokens/s", rows, base, limit)
    ours, figures = rows[0], {"tokens_per_s": rows[0].middle}
    for row in rows[1:]:
        key = {base: "trainer", f"plain loop, {wanted.dtypes[0]} compiled": "plain_loop"}.get(row.name)
        if key:
            low, high = measured.interval(ours, row) or (0.0, 0.0)
            figures |= {f"ratio_{key}": ours.middle / row.middle, f"low_{key}": low, f"high_{key}": high}
    return figures


def farthest(mine: list[float], first: list[float]) -> str:
    """How far two curves are apart at most, and where they begin and end."""
    apart = max((abs(a - b) for a, b in zip(mine, first, strict=False)), default=math.nan)
    return f"{mine[0]:.3f} to {mine[-1]:.3f}, at most {apart:.4f} apart" if mine else "unknown"


def main() -> None:
    parser = measured.arguments(__doc__ or "", rounds=5)
    for name, value in {"steps": 5, "layers": 6, "width": 384, "vocab": 30_000, "length": 256, "batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--dtypes", nargs="+", choices=["fp32", "bf16"], help="bf16 where the processor has it, else fp32"
    )
    parser.add_argument("--only", nargs="+", help="contestants whose name holds one of these")
    wanted = parser.parse_args()
    if wanted.quick:
        wanted.layers, wanted.width, wanted.vocab, wanted.length, wanted.batch = 2, 64, 1000, 32, 4
        wanted.rounds, wanted.steps = 1, 2
    import torch

    from lamplighter.train.bf16 import cpu_has_it, make_it_work

    wanted.dtypes = wanted.dtypes or [
        "bf16" if cpu_has_it() and make_it_work() else "fp32"
    ]  # it may limit the instructions for all
    torch.set_num_threads(wanted.threads)
    measured.say_machine()
    with tempfile.TemporaryDirectory(prefix="lamp-bench-") as place:
        figures = race(wanted, prepare_case(wanted, Path(place)), Path(place))
    measured.keep(wanted.json, figures)


if __name__ == "__main__":
    main()
