"""How llama.cpp divides a text before its merges: chosen by comparing token ids, never by a name in a config.

In:  a Vocabulary; dirty texts with the ids that the checkpoint's own tokenizer gives them.
Out: the Vocabulary with the first name that gives the very same ids, or a refusal with the nearest.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lamplighter import report
from lamplighter.export.gguf_file import write_probe
from lamplighter.export.llama_cpp import ask
from lamplighter.export.vocabulary import Vocabulary, no_way

# Names that llama.cpp knows; those with which most models go come first.
PRE_TOKENIZERS = [
    "gpt-2", "llama-bpe", "qwen2", "smollm", "gpt-4o", "starcoder", "refact", "command-r", "olmo", "stablelm2", "dbrx",
    "tekken", "deepseek-llm", "deepseek-coder", "deepseek-v3", "falcon", "mpt", "smaug-bpe", "poro-chat", "jais", "codeshell",
    "bloom", "gpt3-finnish", "exaone", "viking", "chameleon", "minerva-7b", "superbpe", "trillion", "seed-coder", "llama4",
    "default",
]  # fmt: skip


def choose_pre_tokenizer(found: Vocabulary, texts: list[str], ids: list[list[int]], scratch: Path) -> Vocabulary:
    """Try the names, one after the other, in a model of one small layer with this vocabulary; none that fits: refused."""
    names = PRE_TOKENIZERS if found.model == "gpt2" else ["default"]
    nearest: tuple[int, str] = (0, "")
    with report.phase("pre-tokenizer", total=len(names), unit="names") as phase:
        for name in names:
            phase.tick(0, name)
            probe = replace(found, pre=name)
            path = scratch.with_name(f"{scratch.name}.probe")
            try:
                write_probe(path, probe)
                theirs = ask(path, texts=texts, context=64).ids
            finally:
                path.unlink(missing_ok=True)
            phase.tick()
            same = sum(ours == other for ours, other in zip(ids, theirs, strict=True))
            if same == len(ids):
                report.note(
                    f"pre-tokenizer {name}: the same token ids on {same} dirty texts"
                    if found.model == "gpt2"
                    else f"pieces with scores: the same token ids on {same} dirty texts"
                )
                return probe
            at = next(n for n, (ours, other) in enumerate(zip(ids, theirs, strict=True)) if ours != other)
            nearest = max(
                nearest, (same, f"{name} differs on {texts[at][:30]!r}: here {ids[at][:8]}, there {theirs[at][:8]}")
            )
    raise no_way(f"no pre-tokenizer of llama.cpp gives its token ids; the nearest, {nearest[1]}")
