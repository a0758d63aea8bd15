"""What a file's content is known by: a hash of every byte, as fast as the bytes can be read.

In:  a path.
Out: "xxh3:" and 128 bits. It tells whether a content changed; it is no proof against somebody who wants two contents to
     look the same (sha256 would be, at five times the time, before anything else can begin).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from xxhash import xxh3_128

NAME = "xxh3:"
BLOCK_BYTES = 1 << 20


def hash_content(path: Path, tick: Callable[[int], None]) -> str:
    """The hash of a file, in blocks; `tick` gets the bytes as they pass."""
    digest, buffer = xxh3_128(), bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            tick(count)
    return NAME + digest.hexdigest()
