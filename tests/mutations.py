"""Damage of all kinds for a file that is read back: flipped bits, cut ends, wrong types, huge numbers, deep nesting, other files.

In:  the bytes of a file as it was written, a seeded generator.
Out: what a bad disk, a killed writer, another program or a hostile hand could have made of it.
"""

from __future__ import annotations

import json
import random
from typing import Any

STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(2**70), 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "0", "nan",
    "\0", "\x1b]0;own\x07\x1b[2J", "\ud800", "é" * 400, "../../x", "/etc/passwd", "os:system", "$(touch ran)", "__import__('os').system('touch ran')",
    [], [None], ["x"], [[]], {}, {"": None}, {"step": {}}, {"a": [1]}, ["x"] * 50,
]  # fmt: skip
WHOLE = [b"", b"\0" * 64, b"{}", b"[]", b"null", b"1", b'"x"', b"{", b"[" * 20_000, b'{"a":' * 20_000, b"\xff\xfe\x00", b"\n" * 99, b"!!python/object/apply:os.system ['touch ran']", b"\x80\x04]."]  # fmt: skip


def mutate(data: bytes, chance: random.Random) -> bytes:
    """One of them."""
    kind = chance.randrange(8)
    if kind == 0:
        return chance.choice(WHOLE)
    if kind == 1:  # some flipped bits
        found = bytearray(data)
        for _ in range(chance.choice([1, 1, 1, 3, 30])):
            if found:
                found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
        return bytes(found)
    at = chance.randrange(len(data) + 1)
    if kind == 2:  # cut off
        return data[:at]
    if kind == 3:  # a stretch twice, or other bytes in between
        return data[:at] + chance.choice([data[: chance.randrange(200)], b"\0" * 8, b"\n", b'"', b"}"]) + data[at:]
    return _wrong_value(data, chance)


def _wrong_value(data: bytes, chance: random.Random) -> bytes:
    """One value of a JSON object (or of one line of many) is something else, or is gone."""
    lines = data.split(b"\n")
    many = len(lines) > 2 and lines[0].startswith(b"{") and lines[0].endswith(b"}")
    number = chance.randrange(len(lines)) if many else 0
    try:
        content = json.loads(lines[number] if many else data)
    except ValueError:  # no JSON: YAML, or the blank behind the last line
        return data.replace(
            chance.choice(data.split() or [b"x"]), str(chance.choice(STRANGE)).encode("utf-8", "replace"), 1
        )
    _change(content, chance)
    text = json.dumps(content).encode()
    return b"\n".join([*lines[:number], text, *lines[number + 1 :]]) if many else text


def _change(content: Any, chance: random.Random) -> None:
    """Somewhere inside."""
    while isinstance(content, dict | list) and content:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        key = chance.choice(keys)
        inner = content[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.6:
            content = inner
            continue
        if chance.random() < 0.15:
            del content[key]
        else:
            content[key] = chance.choice(STRANGE)
        return
