"""Names that people bring from other tools, and the nearest match for a name that does not exist.

In:  a flag or a field that is not ours.
Out: the error that says which one was probably meant.
"""

from __future__ import annotations

import difflib

from lamplighter.config.schema import SECTIONS, fields
from lamplighter.errors import LampError, UsageError

_ELSEWHERE = {
    "fsdp": "train.shard", "fully_shard": "train.shard", "zero_stage": "train.shard",
    "max_seq_length": "data.seq_len", "max_length": "data.seq_len", "block_size": "data.seq_len",
    "seq_length": "data.seq_len", "context_length": "data.seq_len", "max_seq_len": "data.seq_len",
    "learning_rate": "train.lr", "max_steps": "train.steps", "max_iters": "train.steps", "num_steps": "train.steps",
    "iterations": "train.steps", "num_train_epochs": "train.epochs", "num_epochs": "train.epochs",
    "per_device_train_batch_size": "train.micro_batch", "micro_batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.micro_batch", "grad_accum": "train.micro_batch",
    "warmup": "train.warmup_steps", "warmup_iters": "train.warmup_steps", "lr_scheduler_type": "train.schedule",
    "max_grad_norm": "train.grad_clip", "bf16": "train.dtype", "fp16": "train.dtype", "precision": "train.dtype",
    "no_compile": "train.compile", "torch_compile": "train.compile", "save_steps": "save.every_steps",
    "save_interval": "save.every_steps", "save_every": "save.every_steps", "checkpoint_interval": "save.every_steps",
    "save_total_limit": "save.keep", "keep_last": "save.keep", "eval_steps": "eval.every_steps",
    "eval_interval": "eval.every_steps", "sample_interval": "eval.sample_every_steps", "n_layer": "model.layers",
    "num_layers": "model.layers", "num_hidden_layers": "model.layers", "n_embd": "model.width", "d_model": "model.width",
    "hidden_size": "model.width", "dim": "model.width", "n_head": "model.heads", "num_heads": "model.heads",
    "num_attention_heads": "model.heads", "n_kv_head": "model.kv_heads", "model_name_or_path": "model.init_from",
    "model_name": "model.init_from", "model_size": "--preset", "preset_name": "--preset", "size": "--preset",
    "output_dir": "--runs-dir", "out_dir": "--runs-dir", "resume_from_checkpoint": "--resume", "checkpoint": "--resume",
    "resume_from": "--resume", "run_name": "--run", "name": "--run", "dry_run": "--test", "test_mode": "--test",
    "use_pretokenized": "data.cache", "no_pretokenized": "data.cache", "dataset": "data.paths", "data_path": "data.paths",
    "data_dir": "data.paths", "train_file": "data.paths", "input": "data.paths", "tokenizer_path": "tokenizer.path",
    "tokenizer_dir": "tokenizer.path", "vocab": "tokenizer.vocab_size", "max_cost": "budget.usd", "budget": "budget.usd",
    "hourly_rate": "budget.usd_per_hour", "max_hours": "budget.hours", "val_split": "data.val_fraction",
    "min_lr": "train.min_lr_ratio", "wd": "train.weight_decay", "num_workers": "data.workers", "streaming": "data.stream",
    "chat_template": "data.template", "sequence_len": "data.seq_len", "base_model": "model.init_from",
    "sample_packing": "data.packing", "train_on_inputs": "data.loss_on", "val_set_size": "data.val_fraction",
    "gradient_checkpointing": "train.recompute", "activation_checkpointing": "train.recompute",
    "optim": "train.optimizer", "lora_r": "lora.r", "lora_rank": "lora.r", "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout", "target_modules": "lora.targets", "lora_target": "lora.targets",
    "lora_target_modules": "lora.targets", "load_in_8bit": "lora.base_dtype", "load_in_4bit": "lora.base_dtype",
    "use_lora": "lora.r", "adapter": "lora.r", "beta": "train.dpo_beta", "rl_beta": "train.dpo_beta",
    "pref_beta": "train.dpo_beta", "rl": "train.objective", "loss_type": "train.objective", "stage": "train.objective",
}  # fmt: skip


_RANKS = [
    "ddp",
    "fsdp",
    "deepspeed",
    "accelerate",
    "nproc_per_node",
    "nnodes",
    "num_gpus",
    "gpus",
    "n_gpus",
    "devices",
    "num_devices",
    "world_size",
    "ranks",
]
_RANKS += [
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "distributed",
    "strategy",
    "local_rank",
    "num_processes",
]
_SHORTEST = 3  # letters of a name that can be like another one: `r` is not like `lr`
_FILES = ["config", "config_file", "cfg", "yaml", "config_path"]


def _explained(name: str) -> tuple[str, str] | None:
    """(why, next) for a name that has no counterpart here."""
    leaf = name.lstrip("-").replace("-", "_").rsplit(".", 1)[-1]
    if leaf in _RANKS:
        return "a run has one process for each GPU by itself", "--train.ranks 2, or leave it out"
    if leaf in _FILES:
        return "a file of settings stands without a flag", "lamp train run.yaml"
    return None


def known_by(name: str) -> str | None:
    """The field or flag that other tools call so, or whose last part it is."""
    leaf = name.lstrip("-").replace("-", "_").rsplit(".", 1)[-1]
    return _ELSEWHERE.get(leaf) or next((field for field in fields() if field.rsplit(".", 1)[1] == leaf), None)


def nearest(name: str, extra: list[str] | None = None) -> str | None:
    """The field or flag that was probably meant."""
    plain = name.lstrip("-").replace("-", "_")
    leaf = plain.rsplit(".", 1)[-1]
    known = list(fields())
    if exact := known_by(name):
        return exact
    candidates = {field: field for field in known} | {field.rsplit(".", 1)[1]: field for field in known}
    candidates |= {flag.lstrip("-").replace("-", "_"): flag for flag in extra or []}
    candidates |= {old: new for old, new in _ELSEWHERE.items() if len(old) > 4}
    best = difflib.get_close_matches(plain, candidates, 1, 0.6)
    if not best and len(leaf) >= _SHORTEST:
        best = difflib.get_close_matches(leaf, candidates, 1, 0.6)
    return candidates[best[0]] if best else None


def unknown(
    name: str, where: str, error: type[LampError], extra: list[str] | None = None, flags_in: str = "lamp train --help"
) -> LampError:
    """The three lines for a name that does not exist; `extra`: the flags of the verb, `flags_in`: what lists them."""
    as_flag = error is UsageError
    if (told := _explained(name)) is not None:
        return error(f"{name} is not {'a flag' if as_flag else 'a field'}" + (f" ({where})" if where else ""), *told)
    meant = nearest(name, extra)
    if extra and meant is not None and meant.startswith("--") and meant not in extra:
        meant = None  # a flag of other verbs
    suggestion = (meant if meant is None or meant.startswith("--") else f"--{meant}") if as_flag else meant
    section = name.lstrip("-").partition(".")[0]
    no_section = f"; the sections are {', '.join(SECTIONS)}" if "." in name and section not in SECTIONS else ""
    info = fields().get((suggestion or "").lstrip("-"))
    every = "lamp train --help lists every field"
    lists = every if flags_in == "lamp train --help" else f"{flags_in}; {every}"
    return error(
        f"{name} is not {'a flag' if as_flag else 'a field'}" + (f" ({where})" if where else ""),
        f"did you mean {suggestion}?" if suggestion else f"nothing has a name like it{no_section}",
        f"{suggestion}: {info.description}" if info else lists,
    )
