"""Which class transformers makes of a tokenizer's files: settled so that AutoTokenizer gives the ids of its tokenizer.json.

In:  a Tokenizer and the config.json that lies beside it.
Out: the tokenizer with a class under which the ids are equal; or the name of the class that gives others, whatever is written.

For some kinds of model (qwen2 ...) AutoTokenizer builds a class of its own whatever tokenizer_config.json says, and takes no more
than the vocabulary and the merges out of tokenizer.json: how a text is normalised and divided, that class knows better. The
model was trained with the file. A class that is chosen by comparing ids is as safe as a pre-tokenizer of GGUF that is.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamplighter.data.tokenizer import Tokenizer
from lamplighter.export.reference import DIRTY

# Under this name a byte-level file is taken as it is, for every kind of model.
_AS_THE_FILE_SAYS = "LlamaTokenizerFast"
_SETTINGS = "tokenizer_config.json"


@dataclass(frozen=True)
class Differs:
    """What AutoTokenizer makes of the files, and the first text that it divides otherwise."""

    made: str
    text: str
    ours: list[int]
    theirs: list[int]

    def __str__(self) -> str:
        return f"AutoTokenizer makes a {self.made} of it: {self.text[:30]!r} is {self.theirs[:8]} there, {self.ours[:8]} by tokenizer.json"


def settle_class(tokenizer: Tokenizer, config: dict[str, Any]) -> Differs | None:
    """Change the tokenizer's class where that helps; what differs, if nothing does."""
    with tempfile.TemporaryDirectory(prefix="lamp-tokenizer-") as scratch:
        place = Path(scratch)
        (place / "config.json").write_text(json.dumps(config))
        tokenizer.save(place)
        differs = compare_tokens(tokenizer, place)
        if differs is None or not tokenizer.is_byte_level:
            return differs
        settings = json.loads((place / _SETTINGS).read_text())
        changed = json.dumps({**settings, "tokenizer_class": _AS_THE_FILE_SAYS}, ensure_ascii=False, indent=1) + "\n"
        (place / _SETTINGS).write_text(changed)
        if compare_tokens(tokenizer, place) is not None:
            return differs
    tokenizer.files[_SETTINGS] = changed.encode()
    return None


def compare_tokens(tokenizer: Tokenizer, place: Path) -> Differs | None:
    """Dirty texts without control tokens, which AutoTokenizer reads as such and a text here never becomes."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    for text in DIRTY:
        if any(name in text for name in tokenizer.added.values()):
            continue
        ours, other = tokenizer.encode(text).tolist(), list(theirs(text, add_special_tokens=False)["input_ids"])
        if ours != other:
            return Differs(type(theirs).__name__, text, ours, other)
    return None
