"""Packed files: gzip and zstd, unpacked as a stream, from any place on.

In:  the bytes of a .gz or .zst file, of one or more members (gzip) or frames (zstd).
Out: the unpacked bytes in blocks of bounded size. A torn end is an error, not the end. Where members begin is remembered, so
     that a later reading starts at the nearest one before its place.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from lamplighter import report
from lamplighter.errors import BadData

PACKED_SUFFIXES = {".gz", ".zst"}
OUT_BYTES = 1 << 18
_ZSTD_IN_BYTES = 1 << 10  # unpacks to 32 MB at the very most: one byte, repeated


class Unpacked:
    """One reading of a packed file."""

    def __init__(self, raw: Callable[[int], Iterator[bytes]], name: str, start: dict[str, Any]) -> None:
        self.raw, self.name = raw, name
        self.gz = name.lower().endswith(".gz")
        self.members: list[tuple[int, int]] = [tuple(start.get("member", (0, 0)))]

    def blocks(self, at: int) -> Iterator[bytes]:
        """The unpacked bytes from `at` on."""
        blocks = _gathered(self._unpack(*self.members[0]))
        if over := at - self.members[0][1]:
            yield self._skip(blocks, over)
        yield from blocks

    def _skip(self, blocks: Iterator[bytes], over: int) -> bytes:
        with report.phase("skip to where it stopped", total=over, unit="B") as p:
            p.tick(0, self.name)
            for block in blocks:
                if len(block) > over:
                    return block[over:]
                over -= len(block)
                p.tick(len(block))
        if over:
            raise BadData(f"shorter than it was: {self.name}", f"{over:,} unpacked bytes are missing", "put it back")
        return b""

    def note(self, at: int) -> dict[str, Any]:
        """What a cursor at an unpacked offset adds: the last member before it."""
        member = self.members[bisect_right(self.members, at, key=lambda pair: pair[1]) - 1]
        return {"member": list(member)} if member[0] else {}

    def _unpack(self, packed: int, unpacked: int) -> Iterator[bytes]:
        import zstandard

        unpacker: Any = None
        try:
            for block in self.raw(packed):
                packed += len(block)
                while block and (unpacker or block.strip(b"\0")):  # zeros after the end are padding
                    if unpacker is None:
                        unpacker = self._unpacker()
                        if packed - len(block) > self.members[-1][0]:
                            self.members.append((packed - len(block), unpacked))
                    for piece in self._pieces(unpacker, block):
                        unpacked += len(piece)
                        yield piece
                    block, unpacker = (unpacker.unused_data + self._left, None) if unpacker.eof else (b"", unpacker)
        except (zlib.error, zstandard.ZstdError) as error:
            why = f"{error}, at or before byte {packed:,}"
            raise BadData(f"cannot unpack {self.name}", why, "fetch or write the file again") from error
        if unpacker is not None:
            why = f"the packed data ends in the middle, after {packed:,} bytes"
            raise BadData(f"cut short: {self.name}", why, "fetch or write the file again")

    def _unpacker(self) -> Any:
        import zstandard

        if self.gz:
            return zlib.decompressobj(31)
        return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()

    def _pieces(self, unpacker: Any, block: bytes) -> Iterator[bytes]:
        """The block, unpacked; `_left` is what was not given to the unpacker after its end."""
        self._left = b""
        if self.gz:
            while block and not unpacker.eof:
                yield unpacker.decompress(block, OUT_BYTES)
                block = unpacker.unconsumed_tail
            return
        for begin in range(0, len(block), _ZSTD_IN_BYTES):
            yield unpacker.decompress(block[begin : begin + _ZSTD_IN_BYTES])
            if unpacker.eof:
                self._left = block[begin + _ZSTD_IN_BYTES :]
                return


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Small pieces joined, large ones cut; what came before a tear is handed on before the tear is told."""
    held: list[bytes] = []
    size = 0
    try:
        for piece in pieces:
            held.append(piece)
            size += len(piece)
            if size >= OUT_BYTES:
                whole = b"".join(held)
                held, size = [], 0
                for begin in range(0, len(whole), OUT_BYTES):
                    yield whole[begin : begin + OUT_BYTES]
    except BadData:
        if size:
            yield b"".join(held)
        raise
    if size:
        yield b"".join(held)
