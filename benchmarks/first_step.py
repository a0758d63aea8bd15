"""Seconds from the command to the end of the first step, against Hugging Face's Trainer: eager, compiled cold, compiled warm.

In:  the model and the batches of training.py (6 layers, width 384, 30,000 words, 8 x 256 tokens).
Out: a table; the token cache and the tokenizer exist for everybody, as in the second start of a day.

    python benchmarks/first_step.py [--rounds 5] [--only eager cold warm]

Each start is a process of its own: ours is the whole command `lamp train`, its checks and its plan included, and ends when
the first step stands in metrics.jsonl; theirs is a script with Trainer that ends in on_step_end. Cold: the compiler's
cache is an empty folder; warm: that of the start before.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measured
import peers
import psutil
from trainers import TRAINER
from training import CLIP, LR, environment, prepare_case

SCRIPT = (
    TRAINER.partition("def answer(ask):")[0]
    + """
import sys, json
ask = json.loads(sys.argv[1])
torch.set_num_threads(ask["threads"])
model = AutoModelForCausalLM.from_pretrained(ask["folder"], dtype=torch.float32)
model.config.use_cache = False
class Leave(TrainerCallback):
    def on_step_end(self, *_, **__):
        os._exit(0)
best = {"optim": "adamw_torch_fused", "torch_compile": True} if ask["compile"] else {}
arguments = TrainingArguments(ask["out"], per_device_train_batch_size=ask["batch"], max_steps=10**6, learning_rate=ask["lr"],
    lr_scheduler_type="constant", max_grad_norm=ask["clip"], save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    remove_unused_columns=False, **best)
InOrder(model=model, args=arguments, train_dataset=Rows(ask["batches"]), callbacks=[Leave()]).train()
"""
)


def ours(case: dict[str, Any], place: Path, compiled: bool, number: int) -> float:
    """The real command on a run folder of its own, stopped after its first step."""
    name = "lamp fp32 compiled" if compiled else "lamp fp32"
    config = Path(case["runs"][name]) / "config.yaml"
    run = f"first-{number}-{int(compiled)}"
    command = [
        sys.executable,
        "-m",
        "lamplighter",
        "train",
        str(config),
        "--run",
        run,
        "--runs-dir",
        str(place / "runs"),
    ]
    began = time.time()
    with open(place / f"{run}.log", "w") as log:
        child = subprocess.Popen(
            [*command, "--train.steps", "1000000"], stdout=log, stderr=log, env=warm_or_cold(place, "ours")
        )
    try:
        return first_record(place / "runs" / run / "metrics.jsonl", child, place / f"{run}.log") - began
    finally:
        everybody = [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]
        for process in everybody:  # the next one must have the machine for itself
            process.kill()
        psutil.wait_procs(everybody[:-1], timeout=30)
        child.wait()


def first_record(metrics: Path, child: subprocess.Popen[bytes], log: Path) -> float:
    """When the first step was written down."""
    while child.poll() is None:
        if metrics.exists() and (line := metrics.read_text().partition("\n"))[1]:
            return float(json.loads(line[0])["t"])
        time.sleep(0.01)
    raise RuntimeError(f"it ended with {child.returncode}:\n{log.read_text()[-1500:]}")


def theirs(case: dict[str, Any], wanted: Any, place: Path, compiled: bool) -> float:
    ask = {"folder": case["model"], "batches": case["batches"], "threads": wanted.threads, "batch": wanted.batch, "lr": LR,
           "clip": CLIP, "out": str(place / "out"), "compile": compiled}  # fmt: skip
    began = time.perf_counter()
    command = [str(peers.python("hf")), "-c", "import time, os\n" + SCRIPT, json.dumps(ask)]
    subprocess.run(command, check=True, capture_output=True, env=warm_or_cold(place, "theirs"))
    return time.perf_counter() - began


def warm_or_cold(place: Path, who: str) -> dict[str, str]:
    return {**environment(False), "TORCHINDUCTOR_CACHE_DIR": str(place / f"compiled-{who}")}


def forget(place: Path) -> None:
    for who in ("ours", "theirs"):
        shutil.rmtree(place / f"compiled-{who}", ignore_errors=True)


def main() -> None:
    parser = measured.arguments(__doc__ or "", rounds=5)
    for name, value in {"steps": 1, "layers": 6, "width": 384, "vocab": 30_000, "length": 256, "batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs="+", default=["eager", "cold", "warm"], choices=["eager", "cold", "warm"])
    wanted = parser.parse_args()
    if wanted.quick:
        wanted.layers, wanted.width, wanted.vocab, wanted.length, wanted.batch, wanted.only = (
            2,
            64,
            1000,
            32,
            4,
            ["eager"],
        )
    measured.say_machine()
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    with tempfile.TemporaryDirectory(prefix="lamp-bench-") as name:
        place, number = Path(name), 0
        case = prepare_case(wanted, place)
        for kind in wanted.only:
            found: dict[str, list[float]] = {"lamp train": [], "Trainer": []}
            for turn in range(wanted.rounds + (kind != "cold")):
                if kind == "cold":
                    forget(place)
                number += 1
                mine = ours(case, place, kind != "eager", number)
                other = None if wanted.no_peers else theirs(case, wanted, place, kind != "eager")
                if turn or kind == "cold":
                    found["lamp train"].append(mine)
                    found["Trainer"] += [] if other is None else [other]
            rows = [measured.Row(who, times, False) for who, times in found.items() if times]
            measured.show(f"end of the first step, {kind}", "seconds", rows, "Trainer" if not wanted.no_peers else None)
    measured.keep(wanted.json)


if __name__ == "__main__":
    main()
