"""Attention by plain products is attention, and so are its gradients: any length, any mask, any type."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lamplighter.model import cpu, shape, transformer

Way = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def layer_output(samples: int, heads: int, length: int, width: int) -> list[Tensor]:
    """Strided, as they come out of a layer."""
    rng = torch.Generator().manual_seed(7)
    whole = torch.randn(samples, length, 3 * heads * width, generator=rng)
    return [part.view(samples, length, heads, width).transpose(1, 2) for part in whole.chunk(3, -1)]


def there_and_back(way: Way, inputs: list[Tensor], mask: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    own = [part.to(dtype).requires_grad_() for part in inputs]
    mixed = way(own[0], own[1], own[2], mask)
    upstream = torch.sin(torch.arange(mixed.numel(), dtype=torch.float32)).view(mixed.shape).to(dtype)
    return [mixed.detach(), *torch.autograd.grad(mixed, own, upstream)]


def documents(samples: int, length: int) -> Tensor:
    """Each sample holds a few documents that may not see each other."""
    segments = torch.arange(length)[None] // torch.tensor([[3 + 5 * number] for number in range(samples)])
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return (causal & (segments[:, :, None] == segments[:, None, :]))[:, None]


@pytest.mark.parametrize("length", [1, 5, 256, 257, 600])
@pytest.mark.parametrize("masked", [False, True])
def test_products_give_torchs_attention_and_its_gradients(length: int, masked: bool) -> None:
    inputs, mask = layer_output(3, 2, length, 16), documents(3, length) if masked else None
    wanted = there_and_back(plain, inputs, mask, torch.float32)
    found = there_and_back(cpu.block_attention, inputs, mask, torch.float32)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("heads_at_once", [1, 3, 4, 100])
def test_heads_of_a_sample_stay_together_where_samples_have_masks_of_their_own(
    heads_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, mask = layer_output(3, 2, 20, 8), documents(3, 20)
    wanted = there_and_back(plain, inputs, mask, torch.float32)
    monkeypatch.setattr(cpu, "SCORES", heads_at_once * 16 * 20)
    monkeypatch.setattr(cpu, "BLOCK_QUERIES", 16)
    found = there_and_back(cpu.block_attention, inputs, mask, torch.float32)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_a_mask_for_all_samples_and_blocks_of_a_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, mask = layer_output(5, 2, 40, 8), documents(1, 40)
    wanted = there_and_back(plain, inputs, mask, torch.float32)
    monkeypatch.setattr(cpu, "SCORES", 2 * 2 * 16 * 40)
    monkeypatch.setattr(cpu, "BLOCK_QUERIES", 16)
    heads = inputs[0].reshape(-1, 40, 8)
    assert len(cpu._query_blocks(heads, mask)) == 9  # 4, 4 and 2 heads, three times 16 queries or less
    found = there_and_back(cpu.block_attention, inputs, mask, torch.float32)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_kept_or_worked_out_again_is_the_same_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = layer_output(2, 2, 300, 64)
    found = []
    for kept in (0, 1 << 20):
        monkeypatch.setattr(shape, "KEPT_BYTES", kept)
        found.append(there_and_back(cpu.block_attention, inputs, None, torch.float32))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_each_kernel_has_a_switch() -> None:
    assert cpu.chosen_kernels("") == set(cpu.KERNELS) and cpu.chosen_kernels("none") == set()
    assert cpu.chosen_kernels("attention, decode_pieces") == {"attention", "decode_pieces"}
    assert cpu.chosen_kernels("-attention") == set(cpu.KERNELS) - {"attention"}
    with pytest.raises(ValueError, match="warp is no kernel"):
        cpu.chosen_kernels("warp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_that_is_added_is_the_same_mask(dtype: torch.dtype) -> None:
    """Made once for all layers of a GPU, in the type that is computed in."""
    inputs, mask = layer_output(3, 2, 40, 16), documents(3, 40)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        added = transformer.as_added(mask)
    assert added.dtype == dtype and torch.equal(added == 0, mask) and torch.isinf(added[~mask]).all()
    for one, other in zip(
        there_and_back(plain, inputs, mask, dtype), there_and_back(plain, inputs, added, dtype), strict=True
    ):
        torch.testing.assert_close(one, other)
