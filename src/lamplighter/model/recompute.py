"""Activation recomputation: the blocks of a model keep nothing but their input, and compute the rest again for the backward pass.

In:  a model with a list of blocks (torch.nn.ModuleList); the longest one counts.
Out: the same model, with the same numbers to the last bit: random state and autocast are restored for the second forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from lamplighter.errors import BadConfig
from lamplighter.model.transformer import Transformer


class RecomputedForward:
    """The forward of one block, run again when its gradient is wanted. `forward` may be the compiled one, `plain` is not."""

    def __init__(self, forward: Callable[..., Any], is_random: bool) -> None:
        self.forward = self.plain = forward
        self.is_random = is_random  # then the random state is kept and restored, for which a GPU is waited for

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **named)
        return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=self.is_random, **named)


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The longest list of modules; none where the model has no such list."""
    lists = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def _is_random(model: torch.nn.Module) -> bool:
    """Whether a forward pass may draw random numbers; of code that is not ours, always."""
    return not isinstance(model, Transformer) or any(getattr(module, "dropout", 0.0) for module in model.modules())


def recompute_blocks(model: torch.nn.Module) -> int:
    """Make every block recompute its activations; gives how many there are."""
    blocks = blocks_of(model)
    if not blocks:
        raise BadConfig(
            f"train.recompute is set, and {type(model).__name__} has no blocks to compute again",
            "a list of blocks is looked for: torch.nn.ModuleList",
            "keep the blocks in a ModuleList, or leave train.recompute out",
        )
    for block in blocks:
        if not isinstance(block.forward, RecomputedForward):
            block.forward = RecomputedForward(block.forward, _is_random(model))
    return len(blocks)
