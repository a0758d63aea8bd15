"""A sentencepiece file (tokenizer.model) as the content of a tokenizer.json: converted, and compared with sentencepiece itself.

In:  the bytes of a model that sentencepiece trained, BPE or unigram.
Out: the content of a tokenizer.json that gives the very same ids on dirty text; a refusal with the first text that differs, or
     with what is missing. A tiktoken file is refused: how it splits text stands in the code of its model.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers

from lamplighter.errors import BadData, InputMissing

NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_KINDS = {1: "Unigram", 2: "BPE"}
_SPACE = "▁"
_DIRTY = (
    "Hello world", " leading and trailing ", "don't   wait!!  it's 1,837 LAMPS\tand\ttabs", "line\nbreaks\r\n\r\n  and   spaces\n",
    "£5 œuvre naïve — “quote” … e\u0301 ﬁne ½ Ⅳ", "日本語 한국어 Ελλάδα Россия العربية हिन्दी", "🙂👩‍👩‍👧\u200d\u00a0\u3000 x\u0007y", "if x_1 == 'a':\n        return  {}\n",
    "https://example.org/?q=%20&r=3.14159", "1234567890", "a" * 50, "x\n\n\n\ny", "", " ", "   ", "▁", "▁x ▁", "ALL CAPS and snake_case",
)  # fmt: skip


@dataclass(frozen=True)
class _Model:
    """What is read of the file."""

    pieces: list[tuple[str, float, int]]  # text, score, type
    kind: int
    charsmap: bytes
    adds_space: bool
    removes_spaces: bool


def convert(data: bytes, where: str) -> dict[str, Any]:
    """The content of a tokenizer.json; every refusal says why."""
    if _is_tiktoken(data):
        raise tiktoken_refused(where)
    try:
        import sentencepiece
    except ImportError as error:
        raise InputMissing(
            f"the tokenizer in {where} is a sentencepiece file",
            f"a conversion is compared with sentencepiece itself, which is missing ({error})",
            "pip install sentencepiece",
        ) from error
    try:
        model = _read(data)
        original = sentencepiece.SentencePieceProcessor(model_proto=data)
    except (ValueError, RuntimeError, IndexError, struct.error, UnicodeDecodeError) as error:
        why = f"it cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise BadData(f"{where} is no whole sentencepiece file", why, "fetch or save it again") from error
    if model.kind not in _KINDS:
        why = "models of words or characters are not converted; BPE and unigram are"
        raise BadData(f"the tokenizer in {where} is a sentencepiece file of another kind", why, "use a tokenizer.json")
    content = _content(model)
    converted = tokenizers.Tokenizer.from_str(json.dumps(content))
    converted.encode_special_tokens = True
    marks = " ".join(text for text, _, kind in model.pieces if kind in (_UNKNOWN, _CONTROL))  # as text they are text
    for text in (*_DIRTY, marks):
        ours, theirs = converted.encode(text, add_special_tokens=False).ids, list(original.encode(text))
        if ours != theirs:
            raise BadData(
                f"the tokenizer in {where} cannot be converted to a tokenizer.json",
                f"{text[:40]!r} would have other ids: {ours[:8]} instead of {theirs[:8]}",
                "use a folder of this model that has a tokenizer.json",
            )
    return content


def tiktoken_refused(where: str) -> InputMissing:
    return InputMissing(
        f"the tokenizer in {where} is a tiktoken file",
        "it holds the tokens, but not how text is split before: that stands in the code of its model, which is never run",
        "use a folder of this model that has a tokenizer.json",
    )


def _is_tiktoken(data: bytes) -> bool:
    """Lines of a token in base64 and its rank; Llama 3 calls such a file tokenizer.model, too."""
    first = data[:200].split(b"\n", 1)[0].split(b" ")
    try:
        return len(first) == 2 and first[1].isdigit() and bool(base64.b64decode(first[0], validate=True))
    except binascii.Error:  # that is the answer
        return False


# ---------------------------------------------------------------- reading: four fields of a protocol buffer


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message, nested ones as bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
        elif wire == 2:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("it ends in the middle")
            yield number, data[at : at + size]
            at += size
        elif wire == 5:
            yield number, struct.unpack_from("<f", data, at)[0]
            at += 4
        elif wire == 1:
            at += 8
        else:
            raise ValueError(f"a field of kind {wire}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number without an end")


def _read(data: bytes) -> _Model:
    pieces, kind, normalizer = [], 1, {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            pieces.append((piece.get(1, b"").decode(), float(piece.get(2, 0.0)), int(piece.get(3, 1))))
        elif number == 2:
            kind = int(dict(_fields(value)).get(3, 1))
        elif number == 3:
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("it has no pieces")
    return _Model(pieces, kind, normalizer.get(2, b""), bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1)))


# ---------------------------------------------------------------- writing


def _content(model: _Model) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": text, "special": kind != _USER_DEFINED, **flags}
        for number, (text, _, kind) in enumerate(model.pieces)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    unknown = next((number for number, (_, _, kind) in enumerate(model.pieces) if kind == _UNKNOWN), None)
    has_bytes = any(kind == _BYTE for _, _, kind in model.pieces)
    if _KINDS[model.kind] == "Unigram":
        never = min(score for _, score, _ in model.pieces) - 1e4  # text is never read as a control token
        vocab = [[text, never if kind in (_UNKNOWN, _CONTROL) else score] for text, score, kind in model.pieces]
        inner: dict[str, Any] = {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": has_bytes}
    else:
        names = {text: number for number, (text, _, _) in enumerate(model.pieces)}
        unknown_name = None if unknown is None else model.pieces[unknown][0]
        inner = {"type": "BPE", "dropout": None, "unk_token": unknown_name, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                 "fuse_unk": True, "byte_fallback": has_bytes, "ignore_merges": False, "vocab": names, "merges": _merges(model)}  # fmt: skip
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.removes_spaces:
        steps.append(
            {"type": "Replace", "pattern": {"Regex": "^ +| +$"}, "content": ""}
        )  # not of lines: of spaces alone
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.adds_space:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    decoder: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.adds_space:
        decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoder}, "model": inner,
    }  # fmt: skip


def _merges(model: _Model) -> list[list[str]]:
    """Sentencepiece keeps no merges: two pieces that make a third are joined, the third with the best score first."""
    ids = {
        text: number for number, (text, _, kind) in enumerate(model.pieces) if kind not in (_CONTROL, _UNKNOWN, _BYTE)
    }
    found: list[tuple[float, int, str, str]] = []
    for text, number in ids.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                found.append((-model.pieces[number][1], ids[left], left, right))
    return [[left, right] for _, _, left, right in sorted(found)]
