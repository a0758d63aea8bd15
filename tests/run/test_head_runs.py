"""What starts processes: The loss in blocks of rows is the plain loss, and so are its gradients; rows without a target cost nothing."""

from __future__ import annotations

import pytest
import torch
from test_head import VOCAB

from lamplighter.model import shape
from lamplighter.model.chunked_loss import LossBuffers, chunked_loss
from lamplighter.train.bf16 import make_it_work


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strips_and_blocks_change_no_bit_of_a_row(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == torch.bfloat16 and not make_it_work():
        pytest.skip("no bf16 here")
    rng = torch.Generator().manual_seed(2)
    x, weight = torch.randn(200, 32, generator=rng), torch.randn(VOCAB, 32, generator=rng)
    targets = torch.randint(0, VOCAB, (200,), generator=rng)
    found = []
    for rows in (16, 64, 512):
        monkeypatch.setattr(shape, "BLOCK_ROWS", rows)
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = chunked_loss(a[None], w, targets[None], 0.3, buffers=LossBuffers())
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((loss.detach(), a.grad, w.grad))
    for other in found[1:]:  # one block each: only the strips differ
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))  # type: ignore[arg-type]
