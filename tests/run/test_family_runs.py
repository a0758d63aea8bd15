"""Other families the whole way: rows, stats, plan, LoRA, killed and resumed, a GGUF file, llama.cpp with the same words; or a reason why not."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from lamplighter.data.tokenizer import load
from lamplighter.export import llama_cpp, place
from lamplighter.export.reference import Greedy
from lamplighter.rundir import RunDir
from running import LONG, Command, lamp, losses_of, shared, slot_of, start_lamp, wait_for

ROWS = [{"question": f"Add {a} and {b}.", "answer": f"{a} and {b} is {a + b}."} for a in range(12) for b in range(12)]
SMALL = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
         "max_position_embeddings": 256, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
GPT2 = {
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHead", GPT2),
    "llama": ("LlamaForCausal", {**SMALL, "tie_word_embeddings": False}),
    "llama3": ("LlamaForCausal", {**SMALL, "rope_parameters": LLAMA3}),
    "mistral": ("MistralForCausal", {**SMALL, "sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2ForCausal", SMALL),
    "qwen3": ("Qwen3ForCausal", SMALL),
    "gemma": ("GemmaForCausal", SMALL),
    "gemma2": ("Gemma2ForCausal", {**SMALL, "query_pre_attn_scalar": 16, "sliding_window": 128}),
    "gemma3_text": ("Gemma3ForCausal", {**SMALL, "query_pre_attn_scalar": 16, "sliding_window": 128}),
    "phi3": ("Phi3ForCausal", SMALL),
}
QUICK = [
    "--data.paths", "rows.jsonl", "--model.init_from", "base", "--data.template", "chatml", "--data.seq_len", "128", "--lora.r", "4",
    "--lora.targets", "all-linear", "--train.batch_size", "4", "--train.threads", "1", "--train.dtype", "fp32", "--train.steps", "12", "--train.lr", "5e-3",
    "--eval.every_steps", "0", "--eval.sample_every_steps", "0", "--save.every_steps", "3", "--save.every_s", "0", "--watch.on_stuck", "stop",
]  # fmt: skip


def made(kind: str, cwd: Path) -> None:
    """Rows, and a base of this family whose random weights are large enough that no two tokens are nearly equal."""
    import transformers

    name, config = FAMILIES[kind]
    kind_of = getattr(transformers, f"{name}Model" if name.endswith("Head") else f"{name}LM")
    torch.manual_seed(3)
    model = kind_of(kind_of.config_class(**config))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4) if weight.ndim == 2 else weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(cwd / "base")
    if kind == "qwen2":  # its tokenizers are byte-level: transformers takes no other for a model of this kind
        byte_level_tokenizer(cwd / "base")
    else:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(shared("models", "stories260K_hf_llama", file), cwd / "base" / file)
    (cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def byte_level_tokenizer(folder: Path) -> None:
    """GPT-2's way to divide a text, where AutoTokenizer would divide as Qwen does."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [text for row in ROWS for text in row.values()] + [
        f"they're {number} lamps" for number in range(1800, 1900)
    ]
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, special_tokens=marks, initial_alphabet=alphabet))
    bpe.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def same_words(cwd: Path, file: Path, here: Command, run: str) -> None:
    """What lamp generate says, llama.cpp says by itself, of the file that was exported."""
    tokenizer = load(cwd / "base")
    ours = here("generate", run, "--prompt", "Add 3 and 4.", "--temperature", "0", "--max-tokens", "16", "--threads", "1", cwd=cwd)  # fmt: skip
    assert ours.returncode == 0, ours.stderr
    chat = [{"role": "user", "content": "Add 3 and 4."}]
    (prompt,) = llama_cpp.ask(file, chats=[chat]).prompts
    marks = {tokenizer.end_of_text} | {number for number, name in tokenizer.special.items() if name == "<|im_end|>"}
    (answer,) = llama_cpp.ask(file, greedy=[Greedy(prompt, [0] * 16, [])], stops=marks).greedy
    said = tokenizer.decode([token for token in answer if token not in marks])
    assert said.strip() == ours.stdout.strip()


def test_qwen_goes_from_rows_to_llama_cpp(tmp_path: Path, here: Command) -> None:
    made("qwen2", tmp_path)
    done = here("train", "--run", "r", *QUICK, cwd=tmp_path)
    assert done.returncode == 0 and "qwen2 keeps packed examples apart" in done.stdout, done.stdout + done.stderr
    out = here("export", "r", "--to", "gguf", "--quantize", "f32", cwd=tmp_path)
    assert out.returncode == 0 and "the same words to 20 prompts" in out.stderr, out.stderr
    same_words(tmp_path, Path(out.stdout.strip()), here, "r")
    merged = here("export", "r", "--to", "hf", "--merge", cwd=tmp_path)
    assert merged.returncode == 0 and "logits within" in merged.stderr, merged.stderr
    text = "they're 1837 lamps"
    ids = load(tmp_path / "base").encode(text).tolist()
    assert AutoTokenizer.from_pretrained(merged.stdout.strip())(text)["input_ids"] == ids
    assert AutoTokenizer.from_pretrained(tmp_path / "base")(text)["input_ids"] != ids


def test_a_tokenizer_that_transformers_reads_otherwise_is_refused_with_both_ids(tmp_path: Path, here: Command) -> None:
    """Of every Qwen2 folder AutoTokenizer makes a byte-level tokenizer that divides as Qwen does, whatever its file says."""
    made("qwen2", tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(shared("models", "stories260K_hf_llama", file), tmp_path / "base" / file)
    done = here("train", "--run", "r", *QUICK, "--train.steps", "1", "--data.packing", "grouped", cwd=tmp_path)
    assert done.returncode == 0 and "AutoTokenizer makes a Qwen2Tokenizer of it" in done.stdout, (
        done.stdout + done.stderr
    )
    state = json.loads(
        (tmp_path / "runs" / "r" / "checkpoints" / "checkpoint-1" / "training" / "state.json").read_text()
    )
    assert state["exact"]["tokens"] < 128, "the probe is as large as a batch of like length, not as data.seq_len allows"
    out = here("export", "r", "--to", "hf", "--merge", cwd=tmp_path)
    assert out.returncode == 65 and not any((tmp_path / "runs" / "r" / "export").iterdir()), out.stderr
    assert "transformers reads the exported tokenizer otherwise" in out.stderr and "by tokenizer.json" in out.stderr


@LONG
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_goes_the_whole_way(kind: str, tmp_path: Path, here: Command) -> None:
    made(kind, tmp_path)
    facts = ["--data.paths", "rows.jsonl", "--model.init_from", "base", "--data.template", "chatml"]
    stats = lamp("data", "stats", *facts, cwd=tmp_path)
    assert stats.returncode == 0 and "144" in stats.stdout, stats.stderr
    plan = lamp("plan", *QUICK, cwd=tmp_path)
    assert plan.returncode == 0 and "\nGO\n" in plan.stdout, plan.stdout + plan.stderr
    longer = [*QUICK, "--train.steps", "200"]
    whole = lamp("train", "--run", "whole", *longer, cwd=tmp_path)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    run = RunDir(tmp_path / "runs" / "r")
    process = start_lamp("train", "--run", "r", *longer, cwd=tmp_path)
    wait_for(lambda: run.slot(0).exists() and slot_of(run).durable_step >= 6, process=process)
    os.kill(slot_of(run).pid, signal.SIGKILL)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    resumed = lamp("train", "--run", "r", *longer, cwd=tmp_path)
    assert resumed.returncode == 0 and "resumed from checkpoint-" in resumed.stdout, resumed.stdout + resumed.stderr
    mine = losses_of(run)
    assert mine == losses_of(RunDir(tmp_path / "runs" / "whole"))
    for quantize in ("f32", "q8_0"):
        out = lamp("export", "r", "--to", "gguf", "--quantize", quantize, cwd=tmp_path)
        assert out.returncode == 0, out.stderr
        if quantize == "f32":
            assert "the same words to 20 prompts" in out.stderr
            same_words(tmp_path, Path(out.stdout.strip()), here, "r")
    merged = lamp("export", "r", "--to", "hf", "--merge", cwd=tmp_path)
    assert merged.returncode == 0 and "logits within" in merged.stderr, merged.stderr


def test_a_family_that_gguf_cannot_hold_is_refused_with_the_reason(
    tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    made("llama", tmp_path)
    small = {name: value for name, value in SMALL.items() if name not in ("head_dim", "num_key_value_heads")}
    GPTNeoXForCausalLM(GPTNeoXConfig(**small)).save_pretrained(tmp_path / "base")
    done = here("export", "base", "--to", "gguf", cwd=tmp_path)
    assert (
        done.returncode == 78 and "its family is 'gpt_neox': llama.cpp has it, but this writer does not" in done.stderr
    )
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    made("llama", tmp_path)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    strange = {**config, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}}  # fmt: skip
    (tmp_path / "base" / "config.json").write_text(json.dumps(strange))
    done = here("export", "base", "--to", "gguf", cwd=tmp_path)
    assert done.returncode == 78 and "rope scaling of type 'yarn'" in done.stderr
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(place, "free_bytes", lambda _: 1000)
    done = here("export", "base", "--to", "gguf", cwd=tmp_path)
    assert done.returncode == 73 and "are free" in done.stderr and not list(tmp_path.glob("*.gguf"))
