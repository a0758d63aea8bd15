"""Keys and values of several texts at once, each at a place of its own, in memory that is taken once.

In:  a Shape, how many rows, how long a row may become.
Out: RowCache: the rows in use are the first ones; a row that ends makes room for the last.

Tensors carry their axes as a suffix: B rows in use, K key heads, S time, D head width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lamplighter.model.shape import Shape


def cache_bytes(shape: Shape, rows: int, length: int, number_bytes: int = 4) -> int:
    """The memory that a cache of these sizes takes."""
    return shape.layers * rows * 2 * shape.kv_heads * length * shape.head_width * number_bytes


class RowCache:
    """`lengths[row]` tokens of each row in use are stored. A decoder adds one to each row, a prefill many to one row."""

    def __init__(self, shape: Shape, rows: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        size = (shape.layers, rows, 2, shape.kv_heads, length, shape.head_width)  # 2: keys, values
        self.stored = _zeros(size, device, dtype)
        self.rows, self.length = rows, length
        self.lengths: list[int] = []
        self.ready = 0  # rows that have read their prompt: the first ones
        self.position = torch.zeros(0, dtype=torch.long, device=device)
        self.mask: Tensor | None = None

    @property
    def furthest(self) -> int:
        return max(self.lengths[: self.ready], default=0)

    def take_row(self) -> int:
        """One more row, the last in use."""
        self.lengths.append(0)
        return len(self.lengths) - 1

    def move(self, source: int, target: int) -> None:
        """What row `source` holds is copied over `target`."""
        length = self.lengths[source]
        self.stored[:, target, :, :, :length] = self.stored[:, source, :, :, :length]
        self.lengths[target] = length

    def swap(self, one: int, other: int) -> None:
        """Two rows change places."""
        length = max(self.lengths[one], self.lengths[other])
        kept = self.stored[:, one, :, :, :length].clone()
        self.stored[:, one, :, :, :length] = self.stored[:, other, :, :, :length]
        self.stored[:, other, :, :, :length] = kept
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]

    def drop_last(self) -> None:
        self.lengths.pop()
        self.ready = min(self.ready, len(self.lengths))

    def begin_step(self, ready: int) -> None:
        """Before one token is added to each of the first `ready` rows: where it goes, and what each may see."""
        self.ready, device = ready, self.stored.device
        self.position = torch.tensor(self.lengths[:ready], dtype=torch.long, device=device)
        alike = len(set(self.lengths[:ready])) == 1
        if alike:
            self.mask = None
        else:
            times_S = torch.arange(self.furthest + 1, device=device)
            self.mask = (times_S[None, :] <= self.position[:, None])[:, None, None, :]
        self._every = torch.arange(ready, device=device)

    def put(self, layer: int, kv_B2KD: Tensor) -> tuple[Tensor, Tensor]:
        """Store one key and value per row; all of the layer up to the furthest row."""
        rows_B2KSD = self.stored[layer, : self.ready]
        if self.mask is None:
            rows_B2KSD.select(3, self.lengths[0]).copy_(kv_B2KD)
        else:
            rows_B2KSD[self._every, :, :, self.position] = kv_B2KD
        k_BKSD, v_BKSD = rows_B2KSD.narrow(3, 0, self.furthest + 1).unbind(1)
        return k_BKSD, v_BKSD

    def advance(self) -> None:
        for row in range(self.ready):
            self.lengths[row] += 1


def _zeros(size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros (what is masked must not be NaN); on a CPU by pages that the system clears when they are first used."""
    if device.type == "cpu" and dtype == torch.float32:
        return torch.from_numpy(np.zeros(size, np.float32))
    return torch.zeros(size, device=device, dtype=dtype)


class OneRow:
    """One row of a RowCache as the model's own forward pass fills it: a prompt, a stretch at a time."""

    def __init__(self, cache: RowCache, row: int) -> None:
        self.cache, self.row = cache, row

    def extend(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        begin = self.cache.lengths[self.row]
        end = begin + k_BHTD.shape[2]
        here = self.cache.stored[layer, self.row]
        here[0, :, begin:end] = k_BHTD[0]
        here[1, :, begin:end] = v_BHTD[0]
        return here[None, 0, :, :end], here[None, 1, :, :end]
