"""A .safetensors file written straight from memory, with its checksum on the way.

In:  tensors by name; the type to write floating-point numbers in, if it is another than theirs.
Out: the file, byte for byte what safetensors.torch.save_file writes, and its XXH3.

The library's own writer takes 1.5 to 3.5 s of processor for 1.5 GB, plain writes 0.4: a save beside the steps takes its time from
them. Reading is the library's.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import xxhash

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
_RANKS = [
    "BOOL",
    "U8",
    "I8",
    "F8_E5M2",
    "F8_E4M3",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "C64",
    "F64",
    "I64",
    "U64",
]  # the library's order
_PIECE = 1 << 20  # stays in the processor's cache between the checksum and the write


def write(
    path: Path,
    tensors: dict[str, torch.Tensor],
    tick: Callable[[int], None] = lambda _: None,
    dtype: torch.dtype | None = None,
) -> str:
    """The checksum of the file; `tick` gets the bytes as they are written. OSError as the system says it.

    One tensor at a time is in another type: no second copy of a model is held.
    """
    kinds = {name: dtype if dtype and tensor.is_floating_point() else tensor.dtype for name, tensor in tensors.items()}
    order = _order(kinds)
    digest = xxhash.xxh3_128()
    with open(path, "wb", buffering=0) as file:

        def put(data: memoryview) -> None:
            digest.update(data)
            while data:
                count = file.write(data) or 0
                data = data[count:]

        put(memoryview(_header(order, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, kinds)[0]))
        for name in order:
            data = _bytes_of(tensors[name].to(kinds[name])).data
            for start in range(0, len(data), _PIECE):
                put(data[start : start + _PIECE])
                tick(min(_PIECE, len(data) - start))
    return digest.hexdigest()


def _order(kinds: dict[str, torch.dtype]) -> list[str]:
    return sorted(kinds, key=lambda name: (-_RANKS.index(NAMES[kinds[name]]), name))


def _header(
    order: list[str], shapes: dict[str, tuple[int, ...]], kinds: dict[str, torch.dtype]
) -> tuple[bytes, dict[str, int]]:
    """And where each tensor begins in the file, with the end of all under the empty name."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, place = {}, 0
    for name in order:
        starts[name], start = place, place
        place += math.prod(shapes[name]) * kinds[name].itemsize
        entries[name] = {"dtype": NAMES[kinds[name]], "shape": list(shapes[name]), "data_offsets": [start, place]}
    words = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    words += b" " * (-len(words) % 8)
    head = len(words).to_bytes(8, "little") + words
    return head, {name: len(head) + start for name, start in {**starts, "": place}.items()}


def lay_out(path: Path, tensors: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
    """The file with room for whole tensors of these shapes, of which nothing is written yet. OSError where there is none."""
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    head, starts = _header(_order(kinds), shapes, kinds)
    with open(path, "wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, starts[""])
        file.write(head)


def write_rows(
    path: Path,
    tensors: dict[str, torch.Tensor],
    shapes: dict[str, tuple[int, ...]],
    first_rows: dict[str, int],
    tick: Callable[[int], None] = lambda _: None,
) -> None:
    """Some rows of each tensor, into a file that was laid out for the whole ones; until they are on the disk."""
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    _, starts = _header(_order(kinds), shapes, kinds)
    with open(path, "r+b", buffering=0) as file:
        for name, first in first_rows.items():
            data = _bytes_of(tensors[name]).data
            place = starts[name] + first * math.prod(shapes[name][1:]) * kinds[name].itemsize
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                while piece:
                    count = os.pwrite(file.fileno(), piece, place)
                    piece, place = piece[count:], place + count
                    tick(count)
        os.fsync(file.fileno())


def copy_rows(
    source: Path,
    path: Path,
    tensors: dict[str, torch.Tensor],
    shapes: dict[str, tuple[int, ...]],
    rows: dict[str, range],
) -> str:
    """What another process has written of some rows, as a file of its own, into a file that was laid out; the checksum of what
    was read. ValueError where it is no such file."""
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    _, starts = _header(_order(kinds), shapes, kinds)
    theirs = {name: kinds[name] for name in rows}
    order = _order(theirs)
    head, ends = _header(order, {name: (len(rows[name]), *shapes[name][1:]) for name in order}, theirs)
    digest = xxhash.xxh3_128()
    with open(source, "rb", buffering=0) as given, open(path, "r+b", buffering=0) as file:
        if (size := os.fstat(given.fileno()).st_size) != ends[""]:
            raise ValueError(f"{source.name} has {size:,} bytes, and should have {ends['']:,}")
        if (found := _read(given, len(head))) != head:
            raise ValueError(f"{source.name} holds other tensors than were expected")
        digest.update(found)
        for name in order:
            place = starts[name] + rows[name].start * math.prod(shapes[name][1:]) * kinds[name].itemsize
            left = len(rows[name]) * math.prod(shapes[name][1:]) * kinds[name].itemsize
            while left:
                piece = memoryview(_read(given, min(_PIECE, left)))
                if not piece:
                    raise ValueError(f"{source.name} ends within {name}")
                digest.update(piece)
                left -= len(piece)
                while piece:
                    count = os.pwrite(file.fileno(), piece, place)
                    piece, place = piece[count:], place + count
    return digest.hexdigest()


def _read(file: io.FileIO, count: int) -> bytes:
    """So many bytes; fewer at the end of the file."""
    found = bytearray()
    while len(found) < count and (piece := file.read(count - len(found))):
        found += piece
    return bytes(found)


def checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    found: np.ndarray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return found
