"""What a micro-batch does, op by op: nothing that makes a GPU wait, and nothing that strict deterministic mode refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lamplighter.config import Train
from lamplighter.data.batches import Batch
from lamplighter.model.chunked_loss import LossBuffers, chunked_loss
from lamplighter.model.generate import stream
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer
from lamplighter.model.weights import init_weights
from lamplighter.train.gradients import batch_loss
from lamplighter.train.hardware import Machine
from lamplighter.train.optimizers import adamw, clip_factor, clip_scale, not_finite
from lamplighter.train.validation import validate

CPU = Machine(torch.device("cpu"), torch.float32, 1, "a CPU", peak_flops=1e9, reasons=())
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "masked_select", "unique"}
# Of torch.use_deterministic_algorithms' list: what raises on a GPU and a language model could come to.
REFUSED = {"cumsum", "put_", "histc", "bincount", "kthvalue", "median", "scatter_reduce", "_ctc_loss", "grid_sampler_2d_backward",
           "max_unpool2d", "nll_loss2d_forward", "_embedding_bag_max_backward", "resize_"}  # fmt: skip


class Ops(TorchDispatchMode):
    """The names of all ops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.each: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        self.each.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _model(family: str) -> Transformer:
    model = Transformer(Shape(family, 61, 32, 2, 32, 4, kv_heads=2 if family == "llama" else 4, dropout=0.0))  # type: ignore[arg-type]
    init_weights(model, 1)
    return model


def _batch(packed: bool) -> Batch:
    ids = (np.arange(2 * 24, dtype=np.int64) * 7 % 61).reshape(2, 24)
    targets = ids.copy()
    if packed:
        targets[:, ::3] = -1  # questions are not learned
    segments = (np.arange(24, dtype=np.int64) // 9)[None].repeat(2, 0) if packed else None
    return Batch(1, ids, targets, segments, np.arange(2), epoch=0.0, real_tokens=int((targets >= 0).sum()))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_micro_batch_waits_for_nothing(family: str, packed: bool) -> None:
    model, batch = _model(family), _batch(packed)
    with Ops() as ops:
        loss = batch_loss(model, batch, CPU, scale=1 / batch.real_tokens)
    assert "mm" in ops.seen or "addmm" in ops.seen, "it was seen"
    assert not ops.seen & WAITS
    with Ops() as back:
        loss.backward()  # type: ignore[no-untyped-call]
    assert not (back.seen - {"_local_scalar_dense"}) & WAITS, (
        "on a CPU the factor of the loss is looked at; on a GPU it is multiplied"
    )
    assert not (ops.seen | back.seen) & REFUSED


def test_an_update_waits_for_nothing_and_a_bad_step_changes_nothing() -> None:
    """Clipped by a tensor, skipped by a tensor."""
    model, batch = _model("gpt2"), _batch(packed=False)
    optimizer = adamw(model, Train(steps=1))
    for bad in (False, True):
        loss = batch_loss(model, batch, CPU, scale=float("nan") if bad else 1 / batch.real_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        before = {
            name: tensor.clone() for name, tensor in [*model.named_parameters(), *optimizer.state_tensors().items()]
        }
        with Ops() as ops:
            numbers = torch.stack((loss.detach(), optimizer.grad_norm()))
            optimizer.step(0.1, clip_scale(numbers[1], 0.3), not_finite(numbers))
            optimizer.zero_grad()
        assert "_fused_adamw_" in ops.seen and not ops.seen & WAITS
        after = dict([*model.named_parameters(), *optimizer.state_tensors().items()])
        assert all(torch.equal(before[name], after[name]) for name in before) is bad, (
            "nothing was changed" if bad else "it learned"
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_found_without_a_wait(bad: float) -> None:
    good = torch.tensor([3.0e38, 3.0e38])
    with Ops() as ops:
        found = [not_finite(good), *(not_finite(torch.tensor(pair)) for pair in ([bad, 1.0], [1.0, bad], [bad, bad]))]
    assert [one.item() for one in found] == [0.0, 1.0, 1.0, 1.0] and not ops.seen & WAITS


VIEWS = {"detach", "view", "t", "select", "unbind", "empty", "_record_function_enter_new", "_record_function_exit"}


def test_an_update_has_five_small_kernels_more_than_a_tuned_loop() -> None:
    """Than clip_grad_norm_ and torch's fused AdamW in the same two groups. They make that a bad step changes nothing and that
    nobody waits: loss and norm in one tensor, three to see whether they are finite, two that take back the count of steps;
    gradients are clipped inside the update, which saves one that goes over all of them.
    """
    batch, counts = _batch(packed=False), []
    for ours in (True, False):
        model = _model("llama")
        mine, kinds = adamw(model, Train(steps=1)), [[], []]  # type: ignore[var-annotated]
        for parameter in model.parameters():
            kinds[parameter.dim() > 1].append(parameter)
        peer = torch.optim.AdamW([{"params": kind} for kind in kinds], lr=0.1, fused=True)
        for _ in range(2):  # the state is made in the first
            loss = batch_loss(model, batch, CPU, scale=1 / batch.real_tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            with Ops() as ops:
                if ours:
                    numbers = torch.stack((loss.detach(), mine.grad_norm()))
                    mine.step(0.1, clip_scale(numbers[1], 0.3), not_finite(numbers))
                    mine.zero_grad()
                else:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                    peer.step()
                    peer.zero_grad()
        counts.append([name for name in ops.each if name not in VIEWS])
    assert len(counts[0]) - len(counts[1]) == 5, counts


def test_a_validation_waits_once_at_its_end() -> None:
    model, batches = _model("gpt2"), [_batch(packed=True), _batch(packed=False)]
    held_out = SimpleNamespace(samples=4, documents=4, text_bytes=400.0)
    source: Any = SimpleNamespace(
        describe=lambda: SimpleNamespace(held_out=held_out, noun="windows"),
        validation=lambda rows, limit: iter(batches),
    )
    with Ops() as ops:
        found = validate(model, source, lambda batch: batch_loss(model, batch, CPU), rows=2, windows=0)
    one_by_one = sum(batch_loss(model.eval(), batch, CPU).item() for batch in batches)
    assert found.loss == one_by_one / sum(batch.real_tokens for batch in batches)
    assert "mm" in ops.seen or "addmm" in ops.seen
    assert not ops.seen & (WAITS | REFUSED)


def test_a_clip_that_is_a_tensor_is_the_clip_that_is_read() -> None:
    for norm in (0.1, 0.3, 0.300001, 7.7, 1e9):
        read, unread = clip_factor(torch.tensor(norm).item(), 0.3), clip_scale(torch.tensor(norm), 0.3)
        assert unread is not None and unread.item() == (1.0 if read is None else read.item())
    assert clip_scale(torch.tensor(5.0), 0.0) is None


def test_places_that_are_known_give_the_bits_of_places_that_are_looked_for() -> None:
    model, batch = _model("gpt2"), _batch(packed=True)
    known = batch_loss(model, batch, CPU)
    x, weight = torch.randn(2, 24, 8), torch.randn(61, 8)
    targets = torch.from_numpy(batch.targets)
    looked_for = model(torch.from_numpy(batch.inputs), segments_BT=torch.from_numpy(batch.segments), targets_BT=targets)  # type: ignore[arg-type]
    assert known.item().hex() == looked_for.item().hex()
    with Ops() as ops:
        chunked_loss(x, weight, targets, 1.0, buffers=LossBuffers())
    assert ops.seen & WAITS, "the control: without them it is waited for"


def test_a_sample_draws_on_the_cpu() -> None:
    """Its running sums are refused on a GPU: the logits are copied first."""
    with Ops() as ops:
        drawn = list(stream(_model("gpt2"), [1, 2, 3], max_tokens=3, temperature=0.8, top_p=0.9, seed=1))
    assert len(drawn) == 3 and "cumsum" in ops.seen, "the control: that is what is copied for"
