"""LoRA on short rows: real tokens a second and memory, against peft with Hugging Face's Trainer, and against TRL.

In:  made-up questions and answers of about 45 tokens, a Llama with random weights (--layers, --width), or a folder (--model).
Out: a table of ratios with their spread, each contestant's padding and peak memory; what packing gains by itself.

    python benchmarks/finetune.py [--rounds 5] [--steps 2] [--layers 12] [--width 576] [--model FOLDER]

The same rows, the same template, adapters of rank 16 beside the same layers, fp32, fused AdamW, as many examples a step (about
32). Everybody works in a process of their own and takes turns of a few steps. The peers are tuned: rows tokenised before
the clock starts (Trainer), batches of like length, no logging, no saving, threads that sleep while they wait (as ours). A token is real if it is not
padding. "Padded" is a window for each example, as many positions a step as packed: what packing and grouping gain by themselves. TRL packs, too
(packing=True); on a processor it has no attention that keeps the packed examples apart, so in that row each example sees those before it: it
is fast, and it is another training.
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
from trainers import PEAK, TURNS

EXAMPLES, LENGTH, RANK, LR = 32, 256, 16, 2e-4
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OURS = (
    PEAK
    + """
from pathlib import Path
from lamplighter.config import load_dump
from lamplighter.rundir import RunDir
from lamplighter.commands.start_up import prepare
from lamplighter.train.loop import training

def start(ask):
    folder = RunDir(Path(ask["run"]))
    context, state = prepare(load_dump(folder.config), folder, {})
    ask["padding"] = context.source.describe().padding
    with training(context, state) as steps:
        yield "ready"
        while True:
            yield [next(steps) for _ in range(ask["now"])]

def answer(ask):
    global run, given
    if "run" in ask:
        given, run = ask, start(ask)
        return next(run)
    given["now"] = ask["steps"]
    began, used = time.perf_counter(), time.process_time()
    records = next(run)
    s, cpu_s = time.perf_counter() - began, time.process_time() - used
    return {"s": s, "cpu_s": cpu_s, "tokens": sum(r.tokens for r in records), "padding": given["padding"], "mb": peak_mb(), "loss": records[-1].loss}
"""
)
# What a batch holds is counted where every trainer of transformers passes: training_step.
COUNTED = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

real = positions = 0

class Watch(TrainerCallback):
    def on_step_begin(self, *_, **__):
        turns.begin()
    def on_step_end(self, *_, **__):
        turns.end(0.0)

def counted(kind):
    class Counted(kind):
        def training_step(self, model, inputs, *rest, **more):
            global real, positions
            mask = inputs.get("attention_mask")
            positions += inputs["input_ids"].numel()
            real += int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
            return super().training_step(model, inputs, *rest, **more)
    return Counted

def take(ask):
    global real, positions
    real = positions = 0
    told = turns.take(ask["steps"])
    return {"s": told["s"], "cpu_s": told["cpu_s"], "tokens": real, "padding": 1 - real / positions, "mb": told["mb"]}

def common(ask):
    torch.set_num_threads(ask["threads"])
    return dict(per_device_train_batch_size=ask["examples"], max_steps=10**6, learning_rate=ask["lr"], lr_scheduler_type="constant",
                weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch_fused", logging_strategy="no", save_strategy="no", report_to=[],
                use_cpu=True, disable_tqdm=True, dataloader_drop_last=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False)

def lora(ask):
    from peft import LoraConfig
    return LoraConfig(r=ask["rank"], lora_alpha=2 * ask["rank"], target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
"""
TRAINER = (
    PEAK
    + TURNS
    + COUNTED
    + """
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

def answer(ask):
    if "folder" not in ask:
        return take(ask)
    from peft import get_peft_model
    tokenizer = AutoTokenizer.from_pretrained(ask["folder"])
    rows = []
    for line in open(ask["rows"]):
        row = json.loads(line)
        asked = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
        ids, before = tokenizer(whole).input_ids, len(tokenizer(asked).input_ids)
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * before + ids[before:], "length": len(ids)})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(ask["folder"], dtype=torch.float32), lora(ask))
    arguments = TrainingArguments(ask["out"], train_sampling_strategy="group_by_length", length_column_name="length", **common(ask))
    trainer = counted(Trainer)(model=model, args=arguments, train_dataset=rows, data_collator=DataCollatorForSeq2Seq(tokenizer), callbacks=[Watch()])
    turns.start(trainer.train)
    return "ready"
"""
)
TRL = (
    PEAK
    + TURNS
    + COUNTED
    + """
def answer(ask):
    if "folder" not in ask:
        return take(ask)
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer
    rows = load_dataset("json", data_files=ask["rows"], split="train")
    settings = {**common(ask), "max_length": ask["length"], "completion_only_loss": True}
    if ask["packing"]:
        settings |= {"packing": True, "packing_strategy": "bfd", "padding_free": False, "per_device_train_batch_size": ask["windows"]}
    else:
        settings |= {"train_sampling_strategy": "group_by_length"}
    model = AutoModelForCausalLM.from_pretrained(ask["folder"], dtype=torch.float32)
    trainer = counted(SFTTrainer)(model=model, args=SFTConfig(ask["out"], **settings), train_dataset=rows, peft_config=lora(ask),
                                  processing_class=AutoTokenizer.from_pretrained(ask["folder"]), callbacks=[Watch()])
    turns.start(trainer.train)
    return "ready"
"""
)


def made_up_rows(count: int) -> list[dict[str, Any]]:
    """A question and an answer, 15 to 60 words of the template and all."""
    rng = random.Random(1)
    found = []
    for number in range(count):
        asked = " ".join(rng.choices(measured.WORDS, k=rng.randint(6, 22)))
        said = " ".join(rng.choices(measured.WORDS, k=rng.randint(4, 16)))
        found.append({"prompt": [{"role": "user", "content": f"{number}: {asked}?"}],
                      "completion": [{"role": "assistant", "content": f"{said}."}]})  # fmt: skip
    return found


def prepare_case(wanted: Any, place: Path) -> dict[str, Any]:
    """Rows, a base with its tokenizer, and a run folder for each of our ways."""
    rows = made_up_rows(400 if wanted.quick else 4000)
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = wanted.model or random_base(wanted, place, rows)
    runs = {}
    for name, packing in {
        "lamp, packed": "packed",
        "lamp, grouped by length": "grouped",
        "lamp, padded": "windows",
    }.items():
        runs[name] = _run(wanted, place, folder, packing)
    return {"folder": str(folder), "rows": str(place / "rows.jsonl"), "runs": runs}


def random_base(wanted: Any, place: Path, rows: list[dict[str, Any]]) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = (m["content"] for row in rows for side in row.values() for m in side)
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1024, special_tokens=marks, initial_alphabet=alphabet)
    )
    folder = place / "base"
    torch.manual_seed(1)
    heads = wanted.width // 64
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=wanted.vocab,
            hidden_size=wanted.width,
            num_hidden_layers=wanted.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 3 if heads % 3 == 0 else heads,
            intermediate_size=wanted.width * 8 // 3,
            max_position_embeddings=2048,
            eos_token_id=2,
            bos_token_id=0,
            tie_word_embeddings=True,
        )
    ).save_pretrained(folder)
    bpe.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _run(wanted: Any, place: Path, folder: Path, packing: str) -> str:
    from lamplighter.config import dump, resolve
    from lamplighter.rundir import RunDir

    size = EXAMPLES if packing == "grouped" else wanted.windows  # as many positions, whatever is in them
    settings = {
        "data.paths": [str(place / "rows.jsonl")], "model.init_from": [str(folder)], "lora.r": [str(RANK)], "data.seq_len": [str(LENGTH)],
        "data.packing": [packing], "train.batch_size": [str(size)], "train.steps": ["100000"], "train.lr": [str(LR)], "train.warmup_steps": ["0"],
        "train.schedule": ["constant"], "train.grad_clip": ["1.0"], "train.weight_decay": ["0"], "train.threads": [str(wanted.threads)], "train.dtype": ["fp32"],
        "eval.every_steps": ["0"], "eval.sample_every_steps": ["0"], "save.every_steps": ["0"], "save.every_s": ["7200"],
    }  # fmt: skip
    run = RunDir(place / "runs" / packing)
    run.create()
    run.config.write_text(dump(resolve(None, None, settings)))
    return str(run.path)


def contestants(wanted: Any, case: dict[str, Any], place: Path) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Name -> (interpreter, program, first request)."""
    found = {name: (sys.executable, OURS, {"run": run}) for name, run in case["runs"].items()}
    if wanted.no_peers:
        return found
    ask = {"folder": case["folder"], "rows": case["rows"], "threads": wanted.threads, "examples": EXAMPLES, "windows": wanted.windows,
           "length": LENGTH, "rank": RANK, "lr": LR}  # fmt: skip
    try:
        theirs = str(peers.python("trl"))
    except peers.NoPeer as error:
        print(f"left out: peft + Trainer, TRL: {error}")
        return found
    found["peft + Trainer, by length"] = (theirs, TRAINER, {**ask, "out": str(place / "trainer")})
    found["TRL, by length"] = (theirs, TRL, {**ask, "packing": False, "out": str(place / "trl")})
    found["TRL, packing (not apart)"] = (theirs, TRL, {**ask, "packing": True, "out": str(place / "packing")})
    return found


def race(wanted: Any, case: dict[str, Any], place: Path) -> dict[str, float]:
    from lamplighter.watch.launcher import threads_wait

    chosen = contestants(wanted, case, place)
    common = {**os.environ, "PYTHONPATH": str(measured.ROOT / "src"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(place / "hf"),
              **threads_wait(os.environ)}  # fmt: skip  # as lamp starts itself: threads that spin lose most on a busy machine
    workers: dict[str, peers.Worker] = {}
    told: dict[str, dict[str, Any]] = {}
    by_cpu: dict[str, list[float]] = {name: [] for name in chosen}

    def turn(name: str) -> float:
        told[name] = workers[name].ask({"steps": wanted.steps})
        by_cpu[name].append(told[name]["tokens"] / told[name]["cpu_s"])
        return float(told[name]["tokens"] / told[name]["s"])

    try:
        for number, (name, (python, program, ask)) in enumerate(chosen.items()):
            workers[name] = peers.Worker(python, program, place / f"{number}.log", common)
            workers[name].ask(ask)
        found = measured.in_turn({name: (lambda name=name: turn(name)) for name in chosen}, wanted.rounds)  # type: ignore[misc]
    finally:
        for worker in workers.values():
            worker.process.kill()
            worker.process.wait()
    rows = [
        measured.Row(name, rates, extra=f"{told[name]['padding']:.0%} padding, {told[name]['mb']:,.0f} MB at most")
        for name, rates in found.items()
    ]
    against = next((name for name in ("TRL, by length", "lamp, grouped by length") if name in found), "lamp, packed")
    measured.show("LoRA on short rows: real tokens a second", "tokens/s", rows, against=against)
    rows_by_cpu = [measured.Row(name, rates[-wanted.rounds :]) for name, rates in by_cpu.items()]
    measured.show(
        "the same by the processor's seconds, for a busy machine", "tokens/cpu s", rows_by_cpu, against=against
    )
    middle = {row.name: row.middle for row in rows}
    figures = {
        "gain_of_packing": middle["lamp, packed"] / middle["lamp, padded"],
        "gain_of_grouping": middle["lamp, grouped by length"] / middle["lamp, padded"],
    }
    if "TRL, by length" in middle:
        figures["against_trl"] = middle["lamp, packed"] / middle["TRL, by length"]
        figures["against_trainer"] = middle["lamp, packed"] / middle["peft + Trainer, by length"]
    return figures


def main() -> None:
    parser = measured.arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=576, help="a multiple of 64")
    parser.add_argument("--vocab", type=int, default=49_152, help="rows of the embedding")
    parser.add_argument("--windows", type=int, default=6, help="windows of a packed batch: about 32 examples")
    parser.add_argument("--model", type=Path, help="a Llama folder with a chat template, instead of random weights")
    wanted = parser.parse_args()
    if wanted.quick:
        wanted.layers, wanted.width, wanted.vocab, wanted.rounds, wanted.steps = 2, 192, 2048, 2, 1
    measured.say_machine()
    with tempfile.TemporaryDirectory(prefix="lamp-finetune-") as place:
        case = prepare_case(wanted, Path(place))
        figures = race(wanted, case, Path(place))
    measured.keep(wanted.json, figures)


if __name__ == "__main__":
    main()
