"""Tokens a second of generation, against transformers with its cache: the same weights, the same greedy text.

In:  models of made-up weights (30M and 124M of the GPT-2 family, 30M of Llama's), or folders that are given.
Out: ratio to transformers.generate, for one sample and for eight, and the time from a cold start to the first token.

    python benchmarks/generation.py [--models 30M 124M] [--folders DIR] [--batches 1 8] [--tokens 96] [--bf16] [--compile]

Both work in processes of their own and take turns; their greedy ids must be equal in float32 (in bfloat16 two likeliest
tokens are often a tie, so the share of equal ids is told). --compile adds transformers with a static cache and
torch.compile, its best setting for a server that stays up: its compilation, which takes a minute, is not counted. The
processor time of both is told as well: on a machine that others use it says more than the clock. The limit is how often
a second the weights can be read from memory, times the samples.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measured
import peers

SHAPES = {
    "30M": {"family": "gpt2", "vocab_size": 30_000, "positions": 512, "layers": 6, "width": 384, "heads": 6},
    "124M": {"family": "gpt2", "vocab_size": 50_257, "positions": 1024, "layers": 12, "width": 768, "heads": 12},
    "30M llama": {"family": "llama", "vocab_size": 30_000, "positions": 512, "layers": 6, "width": 384, "heads": 6},
    "tiny": {"family": "llama", "vocab_size": 512, "positions": 512, "layers": 5, "width": 64, "heads": 8},
}
PROMPT = [5 + 7 * number % 400 for number in range(64)]
ISA_LIMIT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}  # some virtual machines announce AMX and die of it

OURS = """
import torch
from pathlib import Path
from lamplighter.model.build import load_folder
from lamplighter.model.generate import stream

def answer(ask):
    global model
    if "folder" in ask:
        torch.set_num_threads(ask["threads"])
        model = load_folder(Path(ask["folder"])).model.to(getattr(torch, ask["dtype"]))
        return "ready"
    began, used = time.perf_counter(), time.process_time()
    steps = list(stream(model, ask["prompt"], samples=ask["batch"], max_tokens=ask["tokens"], temperature=0.0))
    return {"s": time.perf_counter() - began, "cpu_s": time.process_time() - used, "ids": list(zip(*steps))}
"""
THEIRS = """
import torch
from transformers import AutoModelForCausalLM

def answer(ask):
    global model, how
    if "folder" in ask:
        torch.set_num_threads(ask["threads"])
        model = AutoModelForCausalLM.from_pretrained(ask["folder"], dtype=getattr(torch, ask["dtype"])).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        how = {}
        if ask["compile"]:
            model.forward = torch.compile(model.forward)
            how = {"cache_implementation": "static"}
        return "ready"
    began, used = time.perf_counter(), time.process_time()
    ids = torch.tensor([ask["prompt"]] * ask["batch"])
    with torch.inference_mode():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ask["tokens"], do_sample=False, **how)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - used
    return {"s": seconds, "cpu_s": cpu_s, "ids": made[:, ids.shape[1]:].tolist()}
"""
COLD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("the", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=1, do_sample=False)[0]), flush=True)
"""


def make_folder(name: str, place: Path) -> Path:
    """A model folder with made-up weights and a tokenizer of bytes."""
    from safetensors.torch import save_file

    from lamplighter.data.tokenizer import byte_level
    from lamplighter.model.shape import Shape, shape_to_hf
    from lamplighter.model.transformer import Transformer
    from lamplighter.model.weights import init_weights, weights

    folder, shape = place / name.replace(" ", "-"), Shape(**SHAPES[name])  # type: ignore[arg-type]
    model = Transformer(shape)
    init_weights(model, 0)
    folder.mkdir()
    byte_level().save(folder)
    save_file(weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape_to_hf(shape)))
    return folder


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def environment(bf16: bool) -> dict[str, str]:
    kept = {**os.environ, "PYTHONPATH": str(measured.ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    return {**kept, **(ISA_LIMIT if bf16 else {})}


def compare(folder: Path, wanted: Any, dtype: str, log: Path, reading_gb_s: float) -> None:
    """One model in one type: every batch, all contestants in turn."""
    chosen = {"lamp": (sys.executable, OURS, False)}
    if not wanted.no_peers:
        theirs = peers.python("hf")
        chosen["transformers"] = (str(theirs), THEIRS, False)
        if wanted.compile:
            chosen["transformers, static, compiled"] = (str(theirs), THEIRS, True)
    workers = {name: peers.Worker(python, program, log / f"{number}.log", environment(dtype != "float32"))
               for number, (name, (python, program, _)) in enumerate(chosen.items())}  # fmt: skip
    try:
        for name, worker in workers.items():
            compiled = chosen[name][2]
            worker.ask({"folder": str(folder), "threads": wanted.threads, "dtype": dtype, "compile": compiled})
        for batch in wanted.batches:
            one_batch(folder, workers, batch, wanted, dtype, reading_gb_s)
    finally:
        for worker in workers.values():
            worker.__exit__(None, None, None)


def one_batch(
    folder: Path, workers: dict[str, peers.Worker], batch: int, wanted: Any, dtype: str, reading_gb_s: float
) -> None:
    last: dict[str, Any] = {}
    used: dict[str, list[float]] = {name: [] for name in workers}

    def turn(name: str) -> float:
        last[name] = workers[name].ask({"prompt": PROMPT, "batch": batch, "tokens": wanted.tokens})
        used[name].append(last[name]["cpu_s"])
        return batch * wanted.tokens / float(last[name]["s"])

    found = measured.in_turn({name: (lambda name=name: turn(name)) for name in workers}, wanted.rounds)
    against = "transformers" if "transformers" in workers else "lamp"
    cpu = {name: statistics.median(values[1:]) / wanted.tokens * 1000 for name, values in used.items()}
    rows = []
    for name, rates in found.items():
        pairs = zip(last[name]["ids"], last["lamp"]["ids"], strict=True)
        same = statistics.mean(a == b for row, ours in pairs for a, b in zip(row, ours, strict=True))
        assert dtype != "float32" or same == 1.0, f"{name} and lamp wrote different texts"
        told = f"{cpu[name]:.1f} ms of processor a step ({cpu[against] / cpu[name]:.2f}x), {same:.0%} the same ids"
        rows.append(measured.Row(name, rates, extra=told))
    size = weight_bytes(folder) / (2 if dtype == "bfloat16" else 1)
    limit = f"{batch * reading_gb_s * 1e9 / size:,.0f} tokens/s if weights were read at {reading_gb_s:.0f} GB/s"
    title = f"generation: {folder.name}, {dtype}, batch {batch}, {len(PROMPT)} + {wanted.tokens} tokens, {wanted.threads} threads"
    measured.show(title, "tokens/s", rows, against, limit)


def cold(folder: Path, wanted: Any) -> None:
    """From the command to its first token on stdout."""
    lamp = ["-m", "lamplighter", "generate", str(folder), "--prompt", "the", "--max-tokens", "1", "--raw"]
    commands = {"lamp generate": [sys.executable, *lamp, "--temperature", "0"]}
    if not wanted.no_peers:
        commands["transformers, python -c"] = [str(peers.python("hf")), "-c", COLD, str(folder)]

    def turn(command: list[str]) -> float:
        began = time.perf_counter()
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(False)
        )
        return time.perf_counter() - began

    found = measured.in_turn({name: (lambda c=command: turn(c)) for name, command in commands.items()}, wanted.rounds)
    rows = [measured.Row(name, values, more_is_better=False) for name, values in found.items()]
    measured.show(f"one token from a cold start: {folder.name}", "seconds", rows, list(commands)[-1])


def main() -> None:
    parser = measured.arguments(__doc__ or "")
    parser.add_argument("--models", nargs="*", choices=list(SHAPES), default=["tiny", "30M", "30M llama", "124M"])
    parser.add_argument("--folders", nargs="*", type=Path, default=[], help="model folders of your own")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--bf16", action="store_true", help="in bfloat16 as well")
    parser.add_argument("--compile", action="store_true", help="add the compiled peer")
    parser.add_argument("--no-cold", action="store_true", help="leave the cold starts out")
    wanted = parser.parse_args()
    if wanted.quick:
        wanted.models, wanted.rounds, wanted.tokens, wanted.batches = ["tiny"], 1, 8, [2]
    import torch

    torch.set_num_threads(wanted.threads)
    measured.say_machine()
    reading = measured.read_gb_s(0.1 if wanted.quick else 1.0, 64 if wanted.quick else 512)
    with tempfile.TemporaryDirectory() as place:
        folders = [make_folder(name, Path(place)) for name in wanted.models] + wanted.folders
        for folder in folders:
            for dtype in ("float32", "bfloat16") if wanted.bf16 else ("float32",):
                compare(folder, wanted, dtype, Path(place), reading)
        if not wanted.no_cold and not wanted.quick:
            cold(folders[0], wanted)
    measured.keep(wanted.json)


if __name__ == "__main__":
    main()
