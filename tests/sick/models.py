"""Models that are ill, each as one of the source systems was; and one that is well."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Well(nn.Module):
    """Embedding, one causal attention, a head."""

    causal = True

    def __init__(self, vocab_size: int, width: int, **_: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.mix = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab_size)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.mix(x).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: torch.Tensor = self.head(x)
        return out


class Detached(Well):
    """System A: its loss stands at ln(vocab), and nothing is learned."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).detach() + self.scale


class Leaky(Well):
    """System B: sees the future, token by token, in Python."""

    causal = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.mix(x).chunk(3, -1)
        out = []
        for t in range(ids.shape[1]):  # the loop
            row = (q[:, t : t + 1] @ k.transpose(1, 2)).softmax(-1) @ v
            out.append(self.head(x[:, t] + row[:, 0]))
        return torch.stack(out, 1)


class Looped(Well):
    """System D: causal, but one token at a time; under the compiler each turn is unrolled."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        state = torch.zeros_like(x[:, 0])
        out = []
        for t in range(ids.shape[1]):  # the loop
            state = torch.tanh(self.mix(x[:, t] + state)[..., : x.shape[-1]])
            out.append(self.head(state))
        return torch.stack(out, 1)


class Unused(Well):
    """One part is never used, dropout is never applied, and eval is random."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.forgotten = nn.Linear(options["width"], options["width"])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(ids), 0.5)


class Large(Well):
    """Begins with weights that are far too large."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        nn.init.normal_(self.head.weight, std=5.0)


class Broken(Well):
    """Not a number from the first pass on."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) / 0.0 * 0.0


class Small(Well):
    """Its embedding has fewer rows than the tokenizer has tokens."""

    def __init__(self, vocab_size: int, **options: Any) -> None:
        super().__init__(vocab_size=vocab_size - 7, **options)


class Narrow(Well):
    """Its head gives fewer logits than the tokenizer has tokens."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids)[..., :-7]


class Frozen(Well):
    """Nothing of it can learn."""

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids)
