"""Attention over packed rows without a mask: torch's variable-length kernel, where a GPU and this torch have it.

In:  the segments of packed rows, as numpy; queries, keys and values.
Out: what the masked path gives, to rounding; nothing of the size of a mask (8.6 GB at 8 rows of 4,096 tokens and 32 layers).

Everything that the kernel must know of the rows is worked out before they are copied: a GPU is never asked for it.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MOST_HEAD_WIDTH = 256  # of the kernel
_LEAST_CAPABILITY = (8, 0)


class VarlenRows(NamedTuple):
    """Where the examples of packed rows begin."""

    positions: Tensor  # BT, within its example
    bounds: Tensor  # of the flattened rows: where each example begins, then the end; int32
    longest: int  # no example is longer


def layout(segments_BT: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions and bounds of packed rows. Examples of no tokens are put behind the last until the bounds are 2^n + 1:
    a compiled block meets few different shapes.
    """
    rows, length = segments_BT.shape
    begins = np.ones((rows, length), dtype=bool)
    begins[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    starts = np.flatnonzero(begins)
    count = np.diff(np.append(starts, rows * length))
    positions = np.arange(rows * length, dtype=np.int64) - np.repeat(starts, count)
    bounds = np.full((1 << (len(starts) - 1).bit_length()) + 1, rows * length, dtype=np.int64)
    bounds[: len(starts)] = starts
    return positions.reshape(rows, length), bounds


def is_available(device: torch.device, dtype: torch.dtype, head_width: int, dropout: float) -> bool:
    """Whether torch's kernel takes such a model; it comes with 2.10, and with the arguments that are used here later."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or dropout:
        return False
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY or head_width > _MOST_HEAD_WIDTH or head_width % 8:
        return False
    kernel = _kernel()
    return kernel is not None and {"window_size", "enable_gqa"} <= inspect.signature(kernel).parameters.keys()


def attend_varlen(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, rows: VarlenRows) -> Tensor:
    """Causal attention inside each example."""
    kernel = _kernel()
    assert kernel is not None
    B, H, T, _ = q_BHTD.shape
    flat = [x_BHTD.transpose(1, 2).flatten(0, 1) for x_BHTD in (q_BHTD, k_BHTD, v_BHTD)]
    grouped = k_BHTD.shape[1] != H
    mixed: Tensor = kernel(
        *flat, rows.bounds, rows.bounds, rows.longest, rows.longest, window_size=(-1, 0), enable_gqa=grouped
    )
    return mixed.reshape(B, T, -1)


def _kernel() -> Any:
    """None where this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn
