"""The loss in blocks of rows is the plain loss, and so are its gradients; rows without a target cost nothing."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lamplighter.model import shape
from lamplighter.model.chunked_loss import LossBuffers, chunked_loss
from lamplighter.model.shape import Shape, block_rows
from lamplighter.model.transformer import Transformer, next_token_loss
from lamplighter.model.weights import init_weights

VOCAB = 397


def model_of(family: str, tied: bool) -> Transformer:
    model = Transformer(Shape(family, VOCAB, 16, 2, 32, 2, tie_embeddings=tied))  # type: ignore[arg-type]
    init_weights(model, 3)
    return model


def batch(masked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (12, 16), generator=rng)
    targets = torch.randint(0, VOCAB, (12, 16), generator=rng)
    if masked:
        targets[:, ::3] = -1
        targets[4] = -100
    return ids, targets


def gradients(model: Transformer) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_blocks_give_the_plain_loss_and_its_gradients(
    family: str, tied: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape, "CPU_BLOCK_BYTES", 4 * VOCAB * 64)  # 64 rows: three blocks
    model, (ids, targets) = model_of(family, tied), batch(masked)
    plain = next_token_loss(model(ids), targets) / 7
    plain.backward()  # type: ignore[no-untyped-call]
    wanted = gradients(model)
    loss = model(ids, targets_BT=targets, scale=1 / 7)
    loss.backward()
    found = gradients(model)
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-6)
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-5, atol=2e-6, msg=name)


def test_an_upstream_factor_reaches_both_gradients() -> None:
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    targets = torch.arange(6)
    once = torch.autograd.grad(chunked_loss(x[None], weight, targets[None], 1.0, buffers=LossBuffers()), (x, weight))
    thrice = torch.autograd.grad(
        3 * chunked_loss(x[None], weight, targets[None], 1.0, buffers=LossBuffers()), (x, weight)
    )
    for one, three in zip(once, thrice, strict=True):
        torch.testing.assert_close(3 * one, three)


def test_no_target_at_all_is_a_loss_of_zero() -> None:
    model, (ids, targets) = model_of("gpt2", True), batch(False)
    loss = model(ids, targets_BT=torch.full_like(targets, -1))
    loss.backward()
    assert float(loss.detach()) == 0.0 and all(float(g.abs().max()) == 0.0 for g in gradients(model).values())


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch says so whenever oneDNN is switched
def test_bf16_is_as_near_to_fp32_as_plain_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "CPU_BLOCK_BYTES", 4 * VOCAB * 64)
    x, weight = torch.randn(1, 192, 32, requires_grad=True), (torch.randn(VOCAB, 32) * 0.3).requires_grad_()
    targets = torch.randint(0, VOCAB, (1, 192))
    exact = torch.autograd.grad(next_token_loss(x @ weight.t(), targets), (x, weight))

    def low(loss_of: str) -> tuple[torch.Tensor, ...]:
        # oneDNN is off: virtual machines exist that announce AMX and then die of SIGILL in its bfloat16 kernels.
        with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
            if loss_of == "blocks":
                loss = chunked_loss(x, weight, targets, 1.0, buffers=LossBuffers())
            else:
                loss = next_token_loss(torch.nn.functional.linear(x, weight), targets)
            return torch.autograd.grad(loss, (x, weight))

    for ours, plain, true in zip(low("blocks"), low("plain"), exact, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - true).norm()) < 1.5 * float((plain - true).norm())


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numbers = max(self.numbers, made.numel())
        return made


def test_no_tensor_of_all_logits_is_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "CPU_BLOCK_BYTES", 4 * VOCAB * 64)
    model, (ids, targets) = model_of("gpt2", True), batch(False)
    with Largest() as seen:
        model(ids, targets_BT=targets).backward()
    assert 64 * VOCAB <= seen.numbers < ids.numel() * VOCAB
    with Largest() as seen:
        next_token_loss(model(ids), targets).backward()  # type: ignore[no-untyped-call]
    assert seen.numbers >= ids.numel() * VOCAB


def test_rows_without_a_target_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "CPU_BLOCK_BYTES", 4 * VOCAB * 64)
    blocks: list[int] = []
    take = LossBuffers.take
    monkeypatch.setattr(LossBuffers, "take", lambda self, rows, *more: blocks.append(rows) or take(self, rows, *more))  # type: ignore[func-returns-value]
    model, (ids, targets) = model_of("gpt2", True), batch(False)
    targets[1:] = -1
    model(ids, targets_BT=targets)
    assert blocks == [16]  # one row of the batch, one block


def test_without_gradients_none_are_worked_out() -> None:
    model, (ids, targets) = model_of("llama", False), batch(True)
    with torch.no_grad():
        loss = model(ids, targets_BT=targets)
        torch.testing.assert_close(loss, next_token_loss(model(ids), targets), rtol=1e-6, atol=1e-6)
    model.lm_head.weight.requires_grad_(False)
    model(ids, targets_BT=targets).backward()
    assert model.lm_head.weight.grad is None and model.model.embed_tokens.weight.grad is not None


def test_a_block_is_a_function_of_vocabulary_and_device() -> None:
    assert block_rows(30_000, "cpu") == 512 and block_rows(1_000_000, "cpu") == 64
    assert block_rows(50_257, "cuda") > block_rows(50_257, "cpu")
