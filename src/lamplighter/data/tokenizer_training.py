"""A tokenizer trained on a source, kept, and measured: round trip, bytes per token, how much of the vocabulary a text uses.

In:  a source, the size of the vocabulary; or a tokenizer and texts with their places.
Out: a Tokenizer in its folder; figures as frozen dataclasses, and the words for them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lamplighter import report
from lamplighter.data import tokenizer as tokenizers
from lamplighter.data.sampling import TextSample, take
from lamplighter.data.sources import Source
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import BadConfig, CannotWrite, LampError
from lamplighter.rundir import cannot_write, human_bytes, read_record, write_json
from lamplighter.safe_text import clean

_RARE = 10
"""A token that a text uses less often is learned from too few examples to be of use."""
_SHOWN = 12
_OTHER_BYTES = 10_000_000
REPORT_NAME = "tokenizer_report.json"
_RULES = "byte-level BPE 2"


@dataclass(frozen=True)
class Token:
    """One token, for people: control characters escaped."""

    id: int
    text: str
    bytes: int
    count: int


@dataclass(frozen=True)
class TokenizerMeasure:
    """What a tokenizer made of some texts."""

    texts: int
    text_bytes: int
    tokens: int
    bytes_per_token: float
    seconds: float
    """Of encoding alone."""
    round_trip_failures: int
    first_failure: str
    """Place and difference; empty where every text came back as it was."""
    vocab_size: int
    used: int
    """Tokens that occur at all."""
    rare: int
    """Tokens that occur, but less than RARE times."""
    frequent: list[Token]
    longest: list[Token]


def measure(tokenizer: Tokenizer, texts: Sequence[str], places: Sequence[str], what: str = "") -> TokenizerMeasure:
    """Encode and decode every text, and count."""
    sizes = [len(text.encode()) for text in texts]
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    failures, first, seconds = 0, "", 0.0
    with report.phase(f"round trip{what}", total=sum(sizes), unit="B") as p:
        for begin, stop in _batches(sizes, tokenizer.batch_bytes):
            p.tick(0, places[begin])
            started = time.monotonic()
            encoded = tokenizer.encode_batch(texts[begin:stop])
            seconds += time.monotonic() - started
            counts += np.bincount(encoded.ids, minlength=tokenizer.vocab_size)
            if tokenizer.decode(encoded.ids) != "".join(texts[begin:stop]):
                for number in range(begin, stop):
                    ids = encoded.ids[encoded.offsets[number - begin] : encoded.offsets[number - begin + 1]]
                    if (back := tokenizer.decode(ids)) != texts[number]:
                        failures += 1
                        first = first or f"{places[number]}: {difference(texts[number], back)}"
            p.tick(sum(sizes[begin:stop]))
    total = int(counts.sum())
    return TokenizerMeasure(
        len(texts),
        sum(sizes),
        total,
        bytes_per_token=sum(sizes) / max(1, total),
        seconds=seconds,
        round_trip_failures=failures,
        first_failure=first,
        vocab_size=tokenizer.vocab_size,
        used=int((counts > 0).sum()),
        rare=int(((counts > 0) & (counts < _RARE)).sum()),
        frequent=[_token(tokenizer, int(i), counts) for i in np.argsort(-counts, kind="stable")[:_SHOWN] if counts[i]],
        longest=_longest(tokenizer, counts),
    )


def _batches(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Stretches of texts of some `most` bytes, each of at least one text."""
    found, begin, held = [], 0, 0
    for number, size in enumerate(sizes):
        held += size
        if held >= most:
            found.append((begin, number + 1))
            begin, held = number + 1, 0
    return [*found, (begin, len(sizes))] if begin < len(sizes) else found


def _token(tokenizer: Tokenizer, i: int, counts: np.ndarray[Any, np.dtype[np.int64]]) -> Token:
    content = tokenizer.token_bytes(i)
    return Token(i, escaped(content), len(content), int(counts[i]))


def _longest(tokenizer: Tokenizer, counts: np.ndarray[Any, np.dtype[np.int64]]) -> list[Token]:
    """Of those that occur."""
    used = [int(i) for i in np.flatnonzero(counts)]
    used.sort(key=lambda i: (-len(tokenizer.token_bytes(i)), i))
    return [_token(tokenizer, i, counts) for i in used[:_SHOWN]]


def escaped(text: bytes | str) -> str:
    """Safe inside a line: control characters and broken bytes are shown, not obeyed."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    return clean(text)


def difference(text: str, back: str) -> str:
    """Where two texts part, in words."""
    at = tokenizers.first_difference(text, back)
    was, now = escaped(text[max(0, at - 8) : at + 12]), escaped(back[max(0, at - 8) : at + 12])
    return f'character {at:,}: "{was}" came back as "{now}"'


# ---------------------------------------------------------------- made once, kept


def key_of(source: Source, vocab_size: int, sample_mb: float, special: Sequence[str] = ()) -> str:
    """Names a trained tokenizer by all that decides it."""
    parts = [source.fingerprint(), vocab_size, sample_mb, _RULES, *special]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def find_trained(source: Source, vocab_size: int, sample_mb: float, cache: Path) -> Tokenizer | None:
    """The one that was trained before and kept; None where there is none. Trains nothing."""
    kept = cache / f"tokenizer-{key_of(source, vocab_size, sample_mb)}"
    return tokenizers.load(kept) if (kept / "tokenizer.json").exists() else None


def trained(
    source: Source,
    vocab_size: int,
    sample_mb: float,
    cache: Path,
    special: Sequence[str] = (),
    sample: TextSample | None = None,
) -> Tokenizer:
    """A byte-level BPE for this source, kept in `cache` for the next one who asks."""
    kept = cache / f"tokenizer-{key_of(source, vocab_size, sample_mb, special)}"
    if (kept / "tokenizer.json").exists():
        report.note(f"tokenizer kept from before: {kept}")
        return tokenizers.load(kept)
    sample = sample or take(source, int(sample_mb * 1e6))
    made = tokenizers.train(sample.texts, vocab_size, special)
    report.note(f"tokenizer trained on {sample.words}: {made.vocab_size:,} tokens")
    _place(made, kept)
    return made


def _place(made: Tokenizer, folder: Path) -> None:
    """The whole folder at once, or file by file into one that is there; tokenizer.json comes last."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        if folder.exists():
            made.save(folder)
            return
        try:
            made.save(temporary)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # it failed, or somebody was quicker with the same content
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not (folder / "tokenizer.json").exists():
            raise _cannot_write(folder, error) from error


# ---------------------------------------------------------------- lamp tokenizer train


def _refuse_other(folder: Path, key: str, force: bool) -> None:
    """Before any work: a folder that holds another tokenizer is not written over unasked."""
    if force or not (folder / "tokenizer.json").exists():
        return
    found = read_record(folder / REPORT_NAME)
    if found.get("key") == key:
        return
    why = "it was made from other text or settings" if found else "it was not made by lamp tokenizer train"
    raise BadConfig(f"{folder} holds another tokenizer", why, "choose another --out, or insist with --force")


def check_writable(folder: Path) -> None:
    """Before any work: whether a folder can be written to."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        probe = (folder if folder.exists() else folder.parent) / f".lamp-probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: OSError) -> CannotWrite:
    what = cannot_write(folder, error)
    return CannotWrite(what.what, what.why, "choose another place with --out", what.cause)


@dataclass(frozen=True)
class Wish:
    """What `lamp tokenizer train` was asked for."""

    out: Path
    vocab_size: int
    sample_mb: float
    special: tuple[str, ...] = ()
    compare: tuple[Path, ...] = ()
    force: bool = False


def make(source: Source, wish: Wish, cache: Path) -> dict[str, Any]:
    """Train (or find_trained), check by a round trip, write; the report of it, as it stands beside the tokenizer."""
    check_writable(wish.out)
    key = key_of(source, wish.vocab_size, wish.sample_mb, wish.special)
    _refuse_other(wish.out, key, wish.force)
    others = {str(path): tokenizers.load(path) for path in wish.compare}
    sample = take(source, int(wish.sample_mb * 1e6), _OTHER_BYTES)
    started = time.monotonic()
    made = trained(source, wish.vocab_size, wish.sample_mb, cache=cache, special=wish.special, sample=sample)
    train_s = time.monotonic() - started
    found = {"sample": measure(made, sample.texts, sample.places, " of the sample")}
    if sample.others:
        found["other_text"] = measure(made, sample.others, sample.other_places, " of other text")
    judged = "other_text" if sample.others else "sample"
    texts, places = (sample.others, sample.other_places) if sample.others else (sample.texts, sample.places)
    compared = {name: measure(other, texts, places, f" by {name}") for name, other in others.items()}
    there = (wish.out / "tokenizer.json").exists()
    same = there and _same_as(wish.out, made)
    moved = _keep_old(wish.out) if there and not same else None
    if not same:
        _place(made, wish.out)
    result = {
        "key": key,
        "folder": str(wish.out),
        "unchanged": same,
        "moved": str(moved) if moved else None,
        "fingerprint": made.fingerprint(),
        "vocab_size": made.vocab_size,
        "asked_vocab_size": wish.vocab_size,
        "end_of_text": made.end_of_text,
        "special": {name: i for i, name in made.special.items()},
        "source": str(source),
        "trained_on": sample.words,
        "sample_bytes": sample.bytes,
        "read_bytes": sample.read_bytes,
        "train_seconds": round(train_s, 3),
        "compared_on": judged,
        "measured": {name: asdict(one) for name, one in found.items()},
        "compared": {name: asdict(one) for name, one in compared.items()},
    }
    try:
        write_json(wish.out / REPORT_NAME, {name: value for name, value in result.items() if name != "unchanged"})
    except OSError as error:
        raise _cannot_write(wish.out, error) from error
    return result


def _same_as(folder: Path, made: Tokenizer) -> bool:
    try:
        return tokenizers.load(folder).fingerprint() == made.fingerprint()
    except LampError:  # a damaged one is another one
        return False


def _keep_old(folder: Path) -> Path:
    """The files of the tokenizer that is replaced go into a folder below; what else is there stays."""
    number = 1
    while (aside := folder / f"replaced-tokenizer.{number}").exists():
        number += 1
    try:
        aside.mkdir()
        for name in (*tokenizers.FILE_NAMES, REPORT_NAME):
            if (folder / name).is_file():
                (folder / name).rename(aside / name)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    return aside


def told(result: dict[str, Any]) -> str:
    """The report of a training, for people."""
    size, asked = result["vocab_size"], result["asked_vocab_size"]
    fewer = f" ({asked:,} were asked for; the text offers no more)" if size < asked else ""
    ends = ", ".join(f"{escaped(name)} = {i}" for name, i in result["special"].items())
    lines = [
        f"tokenizer      {size:,} tokens{fewer}; control tokens: {ends}",
        f"trained on     {result['trained_on']}, from {result['source']}",
    ]
    for name, one in result["measured"].items():
        lines += [f"on the {name.replace('_', ' ')}:", *measured_lines(one)]
    judged = result["measured"][result["compared_on"]]
    for name, other in result["compared"].items():
        ratio = judged["tokens"] / max(1, other["tokens"])
        lines.append(
            f"beside         {name}: {other['vocab_size']:,} tokens, {other['bytes_per_token']:.3f} bytes per token"
            f" on the same {human_bytes(other['text_bytes'])} of {result['compared_on'].replace('_', ' ')};"
            f" this one needs {ratio:.2f} times as many tokens"
        )
    if result["compared_on"] == "sample":
        lines.append("               (figures on the text that it was trained on: nothing was left out of the sample)")
    kept = f" (the old one is kept in {result['moved']})" if result["moved"] else ""
    state = (
        "was there already, the same to the byte" if result["unchanged"] else "opens with transformers and lamp train"
    )
    lines.append(f"made           {result['folder']}{kept}: {state}")
    lines.append(f"next           lamp train --tokenizer.path {shlex.quote(str(result['folder']))}")
    return "\n".join(lines) + "\n"


def measured_lines(one: dict[str, Any]) -> list[str]:
    """What was made of some texts, for people."""
    trip = (
        f"{one['texts']:,} texts, {human_bytes(one['text_bytes'])}: every one came back as it was"
        if not one["round_trip_failures"]
        else f"{one['round_trip_failures']:,} of {one['texts']:,} texts did NOT come back; {one['first_failure']}"
    )
    share = one["used"] / max(1, one["vocab_size"])
    rate = one["text_bytes"] / 1e6 / max(1e-6, one["seconds"])
    return [
        f"  round trip   {trip}",
        f"  size         {one['tokens']:,} tokens, {one['bytes_per_token']:.3f} bytes per token; encoded at {rate:.0f} MB/s",
        f"  vocabulary   {one['used']:,} of {one['vocab_size']:,} tokens occur ({share:.1%}),"
        f" {one['rare']:,} of them under {_RARE} times ({one['rare'] / max(1, one['vocab_size']):.1%})",
        f"  frequent     {_listed(one['frequent'])}",
        f"  longest      {_listed(one['longest'])}",
    ]


def _listed(tokens: list[dict[str, Any]]) -> str:
    return "  ".join(f"[{token['text']}] {token['count']:,}" for token in tokens[:8]) or "none"
