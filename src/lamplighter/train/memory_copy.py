"""The newest state of a run in memory that outlives the process: a killed trainer goes on from it without reading a disk.

In:  descriptors of two files without a name (memfd), made by the parent, which keeps them open and never looks inside.
Out: places for the copies that asynchronous saves are written from (async_save.py); after a death, the newest whole one.

Two of them take turns, so that one is whole while the other is written. A copy counts only with its header, which is written
last: a process that dies in the middle of a copy leaves none. What is in memory is never called durable.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_HEADER = struct.Struct("=8sqQQQ")  # magic, step, sum of the words, bytes of the tensors, bytes of their table
_MAGIC = b"lampcopy"
_HEAD_BYTES = 4096
_WORD = 8


@dataclass(frozen=True)
class Restored:
    """A state as it was copied: the tensors lie in the shared memory itself."""

    step: int
    progress: dict[str, Any]
    facts: dict[str, Any]  # of the run, as a checkpoint has them
    owed: int  # a save that was on its way when this was copied; 0: none
    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]


class MemoryCopy:
    """One of the two files."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.map: mmap.mmap | None = None

    def resize(self, count: int) -> torch.Tensor:
        """So many bytes for tensors, taken now: OSError where the memory is not there, rather than a kill at first use."""
        self._map(_HEAD_BYTES + count)
        assert self.map is not None
        self.invalidate()
        return torch.frombuffer(self.map, dtype=torch.uint8, offset=_HEAD_BYTES, count=count)

    def _map(self, size: int) -> None:
        if os.fstat(self.fd).st_size < size:
            os.posix_fallocate(self.fd, 0, size)
        self.map = mmap.mmap(self.fd, os.fstat(self.fd).st_size)

    def invalidate(self) -> None:
        """Before anything in it is changed."""
        if self.map is None and os.fstat(self.fd).st_size >= _HEAD_BYTES:
            self._map(_HEAD_BYTES)
        if self.map is not None:
            self.map[: _HEADER.size] = bytes(_HEADER.size)

    def publish(self, step: int, memory: torch.Tensor, about: Mapping[str, Any]) -> None:
        """The tensors are in: now it counts."""
        assert self.map is not None
        text = json.dumps(about).encode()
        start = _HEAD_BYTES + memory.nbytes
        if len(self.map) < start + len(text):  # mapped anew for this write alone: the tensors stay where they are
            os.posix_fallocate(self.fd, 0, start + 2 * len(text))
        os.pwrite(self.fd, text, start)
        self.map[: _HEADER.size] = _HEADER.pack(_MAGIC, step, _sum_of(memory.numpy()), memory.nbytes, len(text))

    def read(self) -> Restored | None:
        """What is in it, if it is whole."""
        if os.fstat(self.fd).st_size < _HEAD_BYTES:
            return None
        self._map(_HEAD_BYTES)
        assert self.map is not None
        magic, step, words, count, said = _HEADER.unpack(self.map[: _HEADER.size])
        if magic != _MAGIC or step <= 0 or _HEAD_BYTES + count + said > len(self.map):
            return None
        memory = torch.frombuffer(self.map, dtype=torch.uint8, offset=_HEAD_BYTES, count=count)
        if _sum_of(memory.numpy()) != words:
            return None
        about = json.loads(self.map[_HEAD_BYTES + count : _HEAD_BYTES + count + said])
        parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
        for part, name, kind, shape, start in about["tensors"]:
            dtype = getattr(torch, kind)
            length = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            parts[part][name] = memory[start : start + length].view(dtype).view(shape)
        return Restored(step, about["progress"], about["facts"], about["owed"], parts["model"], parts["optimizer"])


def _sum_of(memory: np.ndarray) -> int:
    """Of all words, by one thread: a copy that is torn has another one."""
    return int(np.add.reduce(memory.view(np.uint64), dtype=np.uint64)) if len(memory) else 0


def given(environ: Mapping[str, str]) -> list[MemoryCopy]:
    """Those that the parent keeps for this run; none where it keeps none."""
    return [MemoryCopy(int(fd)) for fd in environ.get("LAMP_MEMORY", "").split(",") if fd]


def newest(copies: list[MemoryCopy], durable: set[int]) -> Restored | None:
    """The newest whole copy that no save is missing before: going on from it, that checkpoint would never be made."""
    found = sorted((one for copy in copies if (one := copy.read())), key=lambda one: -one.step)
    return next((one for one in found if not one.owed or one.owed in durable), None)
