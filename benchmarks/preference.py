"""DPO here and TRL's DPOTrainer: the same pairs in the same batches, step by step.

In:  made-up pairs; a Llama with random weights (--layers, --width), or a folder (--model).
Out: the largest difference of loss, reward margin and log-probabilities over the steps; LoRA of rank 8, or all weights (--full).

    python benchmarks/preference.py [--steps 20] [--full] [--model FOLDER]

Both begin from the same weights (with LoRA: ours adapter is saved and loaded by peft), fp32, AdamW with the same betas, a constant
rate, no warm-up. What stands in each of our batches is written down as token ids, and TRL gets those, in that order. The
benchmark fails where anything differs by more than 1e-3.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import finetune
import measured
import peers
from trainers import PEAK

LIMIT = 1e-3
PAIRS, LENGTH, RANK, BETA = 4, 128, 8, 0.1
OURS = (
    PEAK
    + """
import os
from pathlib import Path
from safetensors.torch import save_file
from lamplighter.commands.start_up import prepare
from lamplighter.config import load_dump
from lamplighter.data.chat.example_cache import LEARNED
from lamplighter.model.weights import weights
from lamplighter import report
from lamplighter.rundir import RunDir, write_json
from lamplighter.train.loop import training

def ids_of(side, answer):
    fitted = side.fitted
    begin, length = int(fitted.begin[answer]), int(fitted.positions[answer]) + 1
    return (fitted.side.tokens[begin : begin + length] & ~LEARNED).astype("int64").tolist(), int(fitted.side.first_answer[fitted.chosen[answer]])

def answer(ask):
    folder = RunDir(Path(ask["run"]))
    context, state = prepare(load_dump(folder.config), folder, {})
    if context.built.adapter is not None:  # as it begins: A is drawn, B is zero
        place = Path(ask["adapter"])
        place.mkdir()
        save_file({k: v.contiguous() for k, v in weights(context.model).items()}, place / "adapter_model.safetensors")
        write_json(place / "adapter_config.json", {**context.built.adapter, "inference_mode": False})
    side, rows, batches = context.data.pairs.train, [], []
    context.source.start(1, None)
    for step in range(1, ask["steps"] + 1):
        pairs = context.source.next(step).samples.tolist()
        for pair in pairs:
            (chosen, at), (rejected, other) = ids_of(side, 2 * pair), ids_of(side, 2 * pair + 1)
            assert chosen[:at] == rejected[:other]
            rows.append({"prompt_ids": chosen[:at], "chosen_ids": chosen[at:], "rejected_ids": rejected[other:]})
    told = []
    report.metric = lambda step, values: told.append(values)  # what would go to metrics.jsonl
    began = time.perf_counter()
    with training(context, state) as steps:
        for _ in steps:
            pass
    steps = [one for one in told if "train/loss" in one]
    return {"rows": rows, "s": time.perf_counter() - began, "mb": peak_mb(), "steps": steps}
"""
)
TRL = (
    PEAK
    + """
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

def answer(ask):
    torch.set_num_threads(ask["threads"])
    seen = []

    class Seen(DPOTrainer):
        def _prepare_dataset(self, dataset, *_):
            return dataset  # ids already
        def compute_loss(self, *args, **more):
            loss = super().compute_loss(*args, **more)
            found = loss[0] if isinstance(loss, tuple) else loss
            metrics = self._metrics["train"]
            seen.append({"train/loss": float(found), **{
                ours: metrics[theirs][-1]
                for ours, theirs in (("train/reward_margin", "rewards/margins"), ("train/reward_accuracy", "rewards/accuracies"),
                                     ("train/reward_chosen", "rewards/chosen"), ("train/reward_rejected", "rewards/rejected"),
                                     ("train/logp_chosen", "logps/chosen"), ("train/logp_rejected", "logps/rejected"))
            }})
            return loss

    model = AutoModelForCausalLM.from_pretrained(ask["folder"], dtype=torch.float32)
    if ask["adapter"]:
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
        from safetensors.torch import load_file
        settings = LoraConfig.from_pretrained(ask["adapter"])
        settings.inference_mode = False
        model = get_peft_model(model, settings)
        set_peft_model_state_dict(model, load_file(ask["adapter"] + "/adapter_model.safetensors"))
    arguments = DPOConfig(
        ask["out"], beta=ask["beta"], per_device_train_batch_size=ask["pairs"], max_steps=ask["steps"], learning_rate=ask["lr"],
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=ask["eps"],
        optim="adamw_torch", train_sampling_strategy="sequential", max_length=None, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False, disable_dropout=True)
    trainer = Seen(model=model, args=arguments, train_dataset=Dataset.from_list(ask["rows"]),
                   processing_class=AutoTokenizer.from_pretrained(ask["folder"]))
    began = time.perf_counter()
    trainer.train()
    return {"s": time.perf_counter() - began, "mb": peak_mb(), "steps": seen}
"""
)


def made_up_pairs(count: int) -> list[dict[str, Any]]:
    """A question with a longer and a shorter answer, conversational as in TRL."""
    rng = random.Random(2)
    found = []
    for number in range(count):
        asked, liked, disliked = (" ".join(rng.choices(measured.WORDS, k=rng.randint(4, n))) for n in (14, 16, 10))
        found.append({"prompt": [{"role": "user", "content": f"{number}: {asked}?"}],
                      "chosen": [{"role": "assistant", "content": f"{liked}."}],
                      "rejected": [{"role": "assistant", "content": f"{disliked}!"}]})  # fmt: skip
    return found


def prepare_case(wanted: Any, place: Path) -> dict[str, Any]:
    from lamplighter.config import dump, resolve
    from lamplighter.rundir import RunDir

    rows = made_up_pairs(PAIRS * wanted.steps)
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = wanted.model or finetune.random_base(wanted, place, rows)
    settings = {
        "data.paths": [str(place / "rows.jsonl")], "model.init_from": [str(folder)], "data.seq_len": [str(LENGTH)], "data.packing": ["grouped"],
        "data.val_fraction": ["0"], "train.objective": ["dpo"], "train.dpo_beta": [str(BETA)], "train.batch_size": [str(PAIRS)],
        "train.steps": [str(wanted.steps)], "train.lr": [str(wanted.lr)], "train.warmup_steps": ["0"], "train.schedule": ["constant"],
        "train.weight_decay": ["0"], "train.threads": [str(wanted.threads)], "train.dtype": ["fp32"], "eval.every_steps": ["0"],
        "eval.sample_every_steps": ["0"], "save.every_steps": ["0"], "save.every_s": ["7200"],
    }  # fmt: skip
    if not wanted.full:
        settings["lora.r"] = [str(RANK)]
    run = RunDir(place / "runs" / "dpo")
    run.create()
    run.config.write_text(dump(resolve(None, None, settings)))
    return {"folder": str(folder), "run": str(run.path)}


def ask_once(python: str, program: str, request: dict[str, Any], log: Path) -> dict[str, Any]:
    common = {
        **os.environ,
        "PYTHONPATH": str(measured.ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    worker = peers.Worker(python, program, log, common)
    try:
        told: dict[str, Any] = worker.ask(request)
        return told
    finally:
        worker.process.kill()
        worker.process.wait()


def compare(wanted: Any, place: Path) -> dict[str, float]:
    case = prepare_case(wanted, place)
    adapter = "" if wanted.full else str(place / "adapter")
    ours = ask_once(
        sys.executable, OURS, {"run": case["run"], "steps": wanted.steps, "adapter": adapter}, place / "ours.log"
    )
    request = {"folder": case["folder"], "rows": ours["rows"], "adapter": adapter, "out": str(place / "trl"), "beta": BETA, "eps": 1e-8,
               "pairs": PAIRS, "steps": wanted.steps, "lr": wanted.lr, "threads": wanted.threads}  # fmt: skip
    theirs = ask_once(str(peers.python("trl")), TRL, request, place / "trl.log")
    names = [name for name in theirs["steps"][0] if name != "train/loss"]
    apart = {
        name: max(abs(a[name] - b[name]) for a, b in zip(ours["steps"], theirs["steps"], strict=True))
        for name in ("train/loss", *names)
    }
    print(
        f"{wanted.steps} steps of {PAIRS} pairs, {'all weights' if wanted.full else f'LoRA of rank {RANK}'}, rate {wanted.lr:g}"
    )
    print(f"{'step':>6}{'loss here':>14}{'TRL':>14}{'margin here':>14}{'TRL':>14}")
    for number in sorted({0, 1, wanted.steps // 2, wanted.steps - 1}):
        a, b = ours["steps"][number], theirs["steps"][number]
        cells = (a["train/loss"], b["train/loss"], a["train/reward_margin"], b["train/reward_margin"])
        print(f"{number + 1:>6}" + "".join(f"{cell:>14.7f}" for cell in cells))
    for name, most in apart.items():
        print(f"{name.removeprefix('train/'):<18} at most {most:.2e} apart")
    print(
        f"{ours['s']:.1f} s here with start of saving and all, {theirs['s']:.1f} s in TRL; {ours['mb']:,.0f} MB and {theirs['mb']:,.0f} MB at most"
    )
    worst = max(most for name, most in apart.items() if "logp" not in name)
    if worst > LIMIT:
        raise SystemExit(f"they differ by {worst:.2e}, more than {LIMIT:g}")
    return {
        "loss_apart": apart["train/loss"],
        "margin_apart": apart["train/reward_margin"],
        "seconds": theirs["s"] / ours["s"],
    }


def main() -> None:
    parser = measured.arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192, help="a multiple of 64")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--full", action="store_true", help="all weights, without adapters")
    parser.add_argument("--model", type=Path, help="a model folder with a chat template, instead of random weights")
    wanted = parser.parse_args()
    measured.say_machine()
    with tempfile.TemporaryDirectory(prefix="lamp-preference-") as place:
        figures = compare(wanted, Path(place))
    measured.keep(wanted.json, figures)


if __name__ == "__main__":
    main()
