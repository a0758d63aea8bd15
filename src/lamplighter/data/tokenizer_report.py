"""A tokenizer for people: what it is, how it cuts a text, what it makes of some data, beside another one.

In:  a tokenizer on disk, perhaps a text, perhaps a source, perhaps other tokenizers.
Out: a record for --json, and the words for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lamplighter.data import tokenizer as tokenizers
from lamplighter.data import tokenizer_training
from lamplighter.data.chat.template import own_template
from lamplighter.data.sampling import take
from lamplighter.data.sources import Source
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.data.tokenizer_training import escaped
from lamplighter.errors import InputMissing
from lamplighter.rundir import human_bytes, newest_first

_PIECES = 2000  # shown of a text; the counts are of all of it
_SPECIALS = 24
_COLOURS = ("\x1b[7m", "\x1b[4m")
_PLAIN = "\x1b[0m"


def _tokenizer_file(path: Path) -> Path:
    """The folder or file of the tokenizer: as given, or of a run's newest checkpoint."""
    if (path / "checkpoints").is_dir():
        found = [entry for entry in newest_first(path / "checkpoints") if (entry / "tokenizer.json").exists()]
        if not found:
            why = "it has no checkpoint with a tokenizer yet"
            raise InputMissing(f"no tokenizer in run {path}", why, "its tokenizer is in the .cache folder beside it")
        return found[0]
    return path


def portray(
    path: Path, text: str | None, source: Source | None, sample_bytes: int, compare: Sequence[Path] = ()
) -> dict[str, Any]:
    """All that can be said."""
    found = _tokenizer_file(path)
    tokenizer = tokenizers.load(found)
    others = {str(one): tokenizers.load(_tokenizer_file(one)) for one in compare}
    record: dict[str, Any] = {
        "path": str(found),
        "kind": _kind(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": {"text": tokenizer.end_name, "id": tokenizer.end_of_text},
        "special": {name: i for i, name in tokenizer.special.items()},
        "added": {name: i for i, name in tokenizer.added.items() if i not in tokenizer.special},
        "backend": tokenizer.backend,
        "backend_reason": tokenizer.backend_reason,
        "chat_template": own_template(tokenizer.files) is not None,
        "fingerprint": tokenizer.fingerprint(),
    }
    if text is not None:
        record["text"] = {name: _cut(one, text) for name, one in {str(found): tokenizer, **others}.items()}
    if source is not None:
        sample = take(source, sample_bytes)
        record["data"] = {"source": str(source), "measured_on": sample.words}
        record["measured"] = {
            name: asdict(tokenizer_training.measure(one, sample.texts, sample.places, f" by {name}"))
            for name, one in {str(found): tokenizer, **others}.items()
        }
    return record


def _kind(tokenizer: Tokenizer) -> str:
    model = str(tokenizer.content["model"].get("type", "?"))
    return f"byte-level {model}" if tokenizer.is_byte_level else model


def _cut(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    ids = tokenizer.encode(text).tolist()
    back = tokenizer.decode(ids)
    return {
        "tokens": len(ids),
        "bytes": len(text.encode()),
        "bytes_per_token": len(text.encode()) / max(1, len(ids)),
        "ids": ids[:_PIECES],
        "pieces": [escaped(tokenizer.token_bytes(i)) for i in ids[:_PIECES]],
        "comes_back": back == text,
        "difference": "" if back == text else tokenizer_training.difference(text, back),
    }


# ---------------------------------------------------------------- words


def told(record: dict[str, Any], colour: bool) -> str:
    """The portrait, for people."""
    special = [f"{escaped(name)} = {i}" for name, i in record["special"].items()]
    more = f" and {len(special) - _SPECIALS} more" if len(special) > _SPECIALS else ""
    end = record["end_of_text"]
    lines = [
        f"tokenizer      {escaped(record['path'])}",
        f"kind           {escaped(record['kind'])}, {record['vocab_size']:,} tokens",
        f"end of text    {escaped(end['text'])} = {end['id']}",
        f"control tokens {', '.join(special[:_SPECIALS]) or 'none'}{more}",
        f"encodes by     {record['backend']}: {escaped(record['backend_reason'])}",
        f"chat template  {'yes' if record['chat_template'] else 'no'}",
    ]
    if record["added"]:
        lines.append(f"added tokens   {len(record['added']):,} that are ordinary text")
    for name, cut in record.get("text", {}).items():
        lines += ["", *_cut_lines(name, cut, colour)]
    if "measured" in record:
        lines += ["", f"on {record['data']['measured_on']}, from {escaped(str(record['data']['source']))}"]
        for name, one in record["measured"].items():
            lines += [f"{escaped(name)}:", *tokenizer_training.measured_lines(one)]
    if "text" not in record and "measured" not in record:
        lines.append('next           lamp tokenizer show DIR --text "..." or --data.paths FILE... shows what it does')
    return "\n".join(lines) + "\n"


def _cut_lines(name: str, cut: dict[str, Any], colour: bool) -> list[str]:
    if colour:
        pieces = "".join(f"{_COLOURS[n % 2]}{piece}{_PLAIN}" for n, piece in enumerate(cut["pieces"]))
    else:
        pieces = "".join(f"[{piece}]" for piece in cut["pieces"])
    left = cut["tokens"] - len(cut["pieces"])
    back = "comes back as it was" if cut["comes_back"] else f"does NOT come back: {escaped(cut['difference'])}"
    return [
        f"{escaped(name)}: {cut['tokens']:,} tokens, {human_bytes(cut['bytes'])}, {cut['bytes_per_token']:.2f} bytes per token; {back}",
        f"  {pieces}" + (f" and {left:,} more" if left else ""),
        "  " + " ".join(map(str, cut["ids"])) + (" ..." if left else ""),
    ]
