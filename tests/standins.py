"""Small stand-ins for the shared data, so that a clone without it runs the same tests: made once for all tests of a session.

In:  the path of a file or folder below shared/data.
Out: a made-up one of the same kind in a temporary folder, or None. A stand-in has the layout, sizes of vocabulary where
     tests name them, and faults of the real one; it has none of its text.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lamplighter.data.sources import EmbeddedCorpus

VERSION = "5"  # a new one where what is made here changes
BOS, EOS = 1, 2


def find(*parts: str) -> Path | None:
    """The stand-in for shared/data/PARTS, made at its first use by any worker of pytest-xdist."""
    folder = Path(tempfile.gettempdir()) / f"lamplighter-standins-{os.getuid()}-{VERSION}"
    for name, make in MAKERS.items():
        kind = Path(*parts)
        if Path(name) != kind and Path(name) not in kind.parents:
            continue
        place = folder / name
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / f"{name.replace('/', '-')}.done").exists():
                (place.parent if place.suffix else place).mkdir(parents=True, exist_ok=True)
                make(place)
                (folder / f"{name.replace('/', '-')}.done").touch()
        return folder / kind if (folder / kind).exists() else None
    return None


def corpus(count: int) -> list[str]:
    return list(EmbeddedCorpus(0, count).documents())


def shakespeare(path: Path) -> None:
    path.write_text("\n\n".join(corpus(3000)))


def instructions(path: Path) -> None:
    """1,100 short rows, as the file that they stand for: most below 64 tokens, some with an input."""
    words = "\n".join(corpus(200)).split()
    rows = []
    for number in range(1100):
        begin, length = number * 7, number * number % 16
        row = {"instruction": f"Line {number}?" if number % 4 else f"What is line {number}, please?"}
        row["input"] = "" if number % 3 else " ".join(words[begin : begin + length // 2])
        row["output"] = " ".join([*words[begin + 5 : begin + 5 + length], f"{number}."])
        rows.append(row)
    path.write_text(json.dumps(rows, indent=1))


def gpt2(folder: Path) -> None:
    """Byte-level BPE of 2,000 tokens in all three files."""
    from lamplighter.data.tokenizer import train

    content = train(
        [*corpus(2000), "A line.\n\nAnother line.\n\n" * 50, "<|im_start|>assistant user system<|im_end|>\n" * 300],
        2000,
    ).content
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")


def london(folder: Path) -> None:
    """Words and pieces of words (`##`), white space lost, special tokens first, and a template that adds two of them."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    special = ["<|endoftext|>", "<|startoftext|>", "<|pad|>", "<|unk|>"]
    made = tokenizers.Tokenizer(models.BPE(continuing_subword_prefix="##"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(prefix="##")
    letters = sorted({letter for text in corpus(500) for letter in text} | set("Helowrdt"))
    trainer = trainers.BpeTrainer(
        vocab_size=3000, special_tokens=special, initial_alphabet=letters, continuing_subword_prefix="##",
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([*corpus(500), "Hello the old world " * 50], trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A <|endoftext|>", special_tokens=[("<|startoftext|>", 1), ("<|endoftext|>", 0)]
    )
    made.save(str(folder / "tokenizer.json"))


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 172,
    "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "bos_token_id": BOS, "eos_token_id": EOS, "torch_dtype": "float32",
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def llama(folder: Path) -> None:
    """A Llama of 260,032 random weights (seed 0) and a BPE of 512 tokens that falls back to bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "tokenizer.json").write_text(json.dumps(llama_tokenizer()))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "model_max_length": 512}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
        tensors = {
            name: tensor.contiguous().clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def llama_tokenizer() -> dict[str, Any]:
    import tokenizers
    from tokenizers import models, normalizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"]
    pieces = [piece for text in [*corpus(300), "time " * 500] for piece in text.split()]
    made.train_from_iterator(pieces, trainers.BpeTrainer(vocab_size=256, special_tokens=special, show_progress=False))
    content: dict[str, Any] = json.loads(made.to_str())
    own = [name for name in content["model"]["vocab"] if name not in special]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *own]
    content["model"] |= {
        "vocab": {name: number for number, name in enumerate(names)}, "unk_token": "<unk>", "fuse_unk": True,
        "byte_fallback": True,
    }  # fmt: skip
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": [begin, sequence],
        "pair": [begin, sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
    }  # fmt: skip
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }  # fmt: skip
    return content


def web(folder: Path) -> None:
    """Three packed files of 201 rows each; of every 20 rows two are copies of earlier ones, and some are long."""
    import zstandard

    texts = [text if n % 40 else " ".join([text] * 20) for n, text in enumerate(corpus(603))]
    for number in range(20, 600, 20):
        texts[number] = texts[number - 7]
        texts[number + 1] = texts[number - 3]
    for part in range(3):
        rows = "".join(json.dumps({"text": text, "meta": {"part": part}}) + "\n" for text in texts[part * 201 :][:201])
        (folder / f"part-{part}.jsonl.zst").write_bytes(zstandard.compress(rows.encode()))


def books(folder: Path) -> None:
    """Three texts of different lengths, one with a byte-order mark; and one in Latin-1."""
    for number, name in enumerate(BOOKS):
        text = "\n\n".join(corpus(2000 + 1000 * number))
        (folder / name).write_text(text, encoding="utf-8-sig" if number == 1 else "utf-8")
    (folder / "defoe_plague_17221-8.txt").write_text("A line.\nCaf\u00e9, and so on.\n" * 50, encoding="latin-1")


def accounts(folder: Path) -> None:
    for number, text in enumerate(corpus(60)):
        (folder / f"OA{number:03d}.txt").write_text(f"{text}\n\n{text.upper()}")


BOOKS = ("dickens_dombey_821-0.txt", "evelyn_diary_v1_41218-0.txt", "london_people_of_the_abyss_1688.txt")
MAKERS: dict[str, Callable[[Path], None]] = {
    "tinyshakespeare/input.txt": shakespeare,
    "finetune/instruction-data-short.json": instructions,
    "tokenizers/gpt2": gpt2,
    "tokenizers/hellolondon": london,
    "models/stories260K_hf_llama": llama,
    "web/slimpajama_like": web,
    "london/gutenberg_raw": books,
    "london/ordinarys_accounts_txt": accounts,
}
