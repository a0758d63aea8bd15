"""A tokenizer as GGUF has it: tokens, their types, merges or scores.

In:  a Tokenizer, the size of the model's vocabulary.
Out: a Vocabulary, and the fields of a file that it becomes; a refusal where GGUF has no such tokenizer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import BadConfig

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True)
class Vocabulary:
    """What goes into the tokenizer's part of a GGUF file."""

    model: str  # "gpt2": byte-level BPE; "llama": pieces with scores
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    end_of_text: int
    bos: int | None
    unknown: int | None
    space_prefix: bool
    pre: str = "default"


def vocabulary_of(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The tokenizer's tokens, filled up to the rows of the model's embedding."""
    content, model = tokenizer.content, tokenizer.content["model"]
    kind = model.get("type")
    if kind != "BPE" or not isinstance(model.get("vocab"), dict):
        raise no_way(f"its tokenizer is of the kind {kind}")
    is_pieces = bool(model.get("byte_fallback"))
    if not tokenizer.is_byte_level and not is_pieces:
        raise no_way("its BPE is neither byte-level nor one of pieces with byte tokens")
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges", [])]
    if not merges:
        raise no_way("its tokenizer has no merges (single bytes), and llama.cpp wants some")
    by_id = {number: name for name, number in model["vocab"].items()}
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    tokens, types = [], []
    for number in range(size):
        name, token = by_id.get(number), added.get(number)
        if token is not None:
            name, kind_of = token["content"], CONTROL if token.get("special") else USER_DEFINED
        elif name is None:
            name, kind_of = f"[PAD{number}]", UNUSED
        else:
            kind_of = BYTE if is_pieces and re.fullmatch(r"<0x[0-9A-F]{2}>", name) else NORMAL
        if name == model.get("unk_token") and is_pieces:
            kind_of = UNKNOWN
        tokens.append(str(name))
        types.append(kind_of)
    rank = {"".join(one.split(" ", 1)): place for place, one in reversed(list(enumerate(merges)))}
    scores = [
        -float(rank[name]) - 1 if name in rank else -1e6 if kind_of == NORMAL else 0.0
        for name, kind_of in zip(tokens, types, strict=True)
    ]
    return Vocabulary(
        "llama" if is_pieces else "gpt2",
        tokens,
        types,
        merges,
        scores,
        end_of_text=tokenizer.end_of_text,
        bos=_named(tokenizer, "bos_token"),
        unknown=model["vocab"].get(model.get("unk_token")),
        space_prefix="Prepend" in json.dumps(content.get("normalizer"))
        or '"prepend_scheme": "first"' in json.dumps(content.get("pre_tokenizer")),
    )


def _named(tokenizer: Tokenizer, role: str) -> int | None:
    config = json.loads(tokenizer.files.get("tokenizer_config.json") or b"{}")
    name = config.get(role)
    name = name.get("content") if isinstance(name, dict) else name
    return next((number for number, text in tokenizer.added.items() if text == name), None)


def no_way(why: str) -> BadConfig:
    return BadConfig("this model cannot be a GGUF file", why, "lamp export RUN --to hf")


def as_fields(found: Vocabulary, stop: int | None, template: str | None) -> dict[str, Any]:
    """By the names of gguf.GGUFWriter's methods."""
    fields: dict[str, Any] = {
        "tokenizer_model": found.model,
        "tokenizer_pre": found.pre,
        "token_list": found.tokens,
        "token_types": found.types,
        "eos_token_id": found.end_of_text,
        "add_bos_token": False,  # nothing is added to a text, here as there
        "add_eos_token": False,
    }
    if found.model == "gpt2":
        fields["token_merges"] = found.merges
    else:
        fields |= {"token_scores": found.scores, "add_space_prefix": found.space_prefix}
    if found.bos is not None:
        fields["bos_token_id"] = found.bos
    if found.unknown is not None and found.model == "llama":
        fields["unk_token_id"] = found.unknown
    if stop is not None:
        fields["eot_token_id"] = stop
    if template:
        fields["chat_template"] = template
    return fields
