"""Gradients of micro-batches are summed by a fixed tree, in fp16 with a loss scale: which bits come out, and what they depend on."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lamplighter import report
from lamplighter.commands.start_up import prepare
from lamplighter.config import Run, Train, load_dump, parse_overrides, resolve
from lamplighter.errors import Diverged
from lamplighter.rundir import RunDir, newest_first
from lamplighter.train import loss_scale
from lamplighter.train.gradient_tree import GradientTree, nodes, owned_nodes, subtrees, sum_of
from lamplighter.train.loop import training
from lamplighter.train.loss_scale import LossScale, ScaledOptimizer
from lamplighter.train.optimizers import adamw


def _run(**more: object) -> Run:
    words = {
        "train.steps": 10, "train.lr": 0.01, "train.batch_size": 6, "train.micro_batch": 2, "train.threads": 1, "train.dtype": "fp32",
        "train.compile": "false", "data.seq_len": 16, "data.embedded_documents": 200, "tokenizer.kind": "bytes",
        "data.workers": 1, "model.family": "gpt2", "model.layers": 1, "model.width": 16, "model.heads": 2, "eval.every_steps": 0, "eval.windows": 2,
        "eval.sample_every_steps": 0, "save.every_steps": 4, "save.staged": "false", "save.keep": 100,
        **{name.replace("__", "."): value for name, value in more.items()},
    }  # fmt: skip
    given = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return resolve(overrides=parse_overrides(given)[1]).run


def _weights(place: RunDir) -> dict[str, torch.Tensor]:
    newest = newest_first(place.checkpoints)[0]
    return {**load_file(newest / "model.safetensors"), **load_file(newest / "training" / "optimizer.safetensors")}


# ---------------------------------------------------------------- the tree


def _by_definition(parts: list[np.ndarray]) -> np.ndarray:
    """The left part of every pair is the largest power of two that is below."""
    if len(parts) == 1:
        return parts[0]
    left = 1 << (len(parts) - 1).bit_length() - 1
    return _by_definition(parts[:left]) + _by_definition(parts[left:])


@pytest.mark.parametrize("count", range(1, 14))
def test_nodes_are_added_as_a_binary_tree(count: int) -> None:
    rng = np.random.default_rng(count)
    parts = [(rng.standard_normal(200) * 10.0 ** rng.integers(-3, 3)).astype(np.float32) for _ in range(count)]
    parameter = torch.nn.Parameter(torch.zeros(200))
    tree, held = GradientTree([parameter], count), 0
    for index, part in enumerate(parts):
        parameter.grad = torch.from_numpy(part.copy())
        tree.add(index, torch.tensor(float(index)))
        held = max(held, len(tree.sums))
    loss = tree.finish()
    assert parameter.grad is not None and np.array_equal(parameter.grad.numpy(), _by_definition(parts))
    assert loss.item() == sum(range(count))
    assert held <= max(1, count.bit_length()), "the memory that the plan counts"


def test_a_sum_by_the_tree_is_not_the_sum_of_one_after_another() -> None:
    """The control: otherwise the test above could not fail."""
    parts = [np.random.default_rng(7 + i).standard_normal(200).astype(np.float32) for i in range(5)]
    assert not np.array_equal(_by_definition(parts), functools.reduce(np.add, parts))


@pytest.mark.parametrize(("leaves", "most"), [*itertools.product((1, 2, 3, 7, 8, 9, 64), (1, 2, 8))])
def test_every_leaf_is_in_one_node_and_in_order(leaves: int, most: int) -> None:
    found = nodes(leaves, most)
    assert [leaf for node in found for leaf in node] == list(range(leaves))
    assert len(found) == min(leaves, most) and max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(("count", "world"), [*itertools.product((1, 2, 3, 4, 5, 7, 8, 13), (1, 2, 3, 4, 8))])
def test_what_ranks_have_summed_up_adds_up_to_the_whole_tree(count: int, world: int) -> None:
    """Each adds what it can; the rest is added in the order of the tree: the same bits as on one."""
    rng = np.random.default_rng(count)
    parts = [(rng.standard_normal(50) * 10.0 ** rng.integers(-3, 3)).astype(np.float32) for _ in range(count)]
    found = {}
    for rank in range(world):
        own = owned_nodes(count, world, rank)
        parameter = torch.nn.Parameter(torch.zeros(50))
        tree = GradientTree([parameter], count)
        for place in own:
            parameter.grad = torch.from_numpy(parts[place].copy())
            tree.add(place, torch.tensor(0.0))
        for node in subtrees(count, own):
            gradient = tree.take(node)[1]
            assert gradient is not None
            found[node] = gradient
        assert count == 1 or not tree.sums, "nothing else is held"
    owned = [place for rank in range(world) for place in owned_nodes(count, world, rank)]
    assert owned == list(range(count)) and len(owned_nodes(count, world, 0)) > 0
    assert np.array_equal(sum_of(found, (0, count)).numpy(), _by_definition(parts))


def test_a_parameter_without_a_gradient_in_some_nodes_has_the_sum_of_the_others() -> None:
    one, two, never = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    tree = GradientTree([one, two, never], 3)
    for index in range(3):
        one.grad = torch.full((2,), 1.0)
        two.grad = torch.full((2,), 5.0) if index == 1 else None
        tree.add(index, torch.tensor(1.0))
    tree.finish()
    assert one.grad is not None and two.grad is not None
    assert one.grad.tolist() == [3.0, 3.0] and two.grad.tolist() == [5.0, 5.0] and never.grad is None


def test_runs_from_before_the_tree_keep_their_sums(tmp_path: Path) -> None:
    """Their config.yaml does not name train.tree: gradients are added one after another, as they were."""
    file = tmp_path / "config.yaml"
    file.write_text("train:\n  steps: 3  # default\n")
    assert load_dump(file).train.tree == 1 and Train().tree == 8


# ---------------------------------------------------------------- fp16


def _train(
    folder: Path, monkeypatch: pytest.MonkeyPatch, late: bool, leave_after: int = 0, **more: object
) -> tuple[list[tuple[Any, ...]], RunDir, list[str], list[dict[str, Any]]]:
    place = RunDir(folder / "runs" / "r")
    place.create()
    metrics: list[dict[str, Any]] = []
    verdicts: list[str] = []
    monkeypatch.setattr(report, "metric", lambda step, values: metrics.append({"step": step, **values}))
    monkeypatch.setattr(report, "verdict", lambda one, **_: verdicts.append(one.cause))
    context, state = prepare(_run(train__dtype="fp16", **more), place, {})
    context = replace(context, machine=replace(context.machine, reads_late=late))
    with training(context, state) as steps:
        records = [
            (one.step, one.loss.hex(), one.grad_norm.hex(), one.loss_scale)
            for one in itertools.islice(steps, leave_after or None)
        ]
    return records, place, verdicts, metrics


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.zoo), True])  # both have the same bits, below
def test_fp16_overflows_are_counted_apart_and_a_resumed_run_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**26)
    monkeypatch.setattr(loss_scale, "GROW_AFTER", 4)
    whole, place, verdicts, metrics = _train(tmp_path / "a", monkeypatch, late)
    assert [step for step, *_ in whole] == list(range(1, 11)) and not verdicts, "an overflow is no bad batch"
    over = [one for one in metrics if "train/overflows" in one]
    assert over and over[0]["step"] == 1, "the scale is too large at first"
    assert over[-1]["train/overflows"] == len(over) and len(over) < 10
    scales = [scale for *_, scale in whole]
    assert scales[0] == 2.0**26 and scales[len(over)] == 2.0 ** (26 - len(over)), "halved by each"
    losses = [float.fromhex(loss) for _, loss, _, _ in whole]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    first, half, _, _ = _train(tmp_path / "b", monkeypatch, late, leave_after=5)
    again, _, _, _ = _train(tmp_path / "b", monkeypatch, late)
    done = again[0][0] - 1
    assert whole[: len(first)] == first and whole[done:] == again, "killed and resumed: the same bits, the same scale"
    one, two = _weights(place), _weights(half)
    assert "loss_scale.scale" in one and all(torch.equal(one[name], two[name]) for name in one)


def test_late_reading_has_the_bits_of_reading_at_once_in_fp16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**26)
    at_once, one, *_ = _train(tmp_path / "a", monkeypatch, late=False)
    late, two, *_ = _train(tmp_path / "b", monkeypatch, late=True)
    assert at_once == late
    left, right = _weights(one), _weights(two)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_scale_that_falls_below_one_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "FIRST", 1.0)
    norm = ScaledOptimizer.grad_norm
    monkeypatch.setattr(ScaledOptimizer, "grad_norm", lambda self: norm(self) * float("inf"))
    _, _, verdicts, metrics = _train(tmp_path, monkeypatch, late=False)
    assert verdicts == ["loss_scale"], "once"
    assert [one["train/overflows"] for one in metrics if "train/overflows" in one] == list(range(1, 11))


def test_gradients_that_fit_at_no_scale_are_a_bad_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "FIRST", 2 * loss_scale.LEAST)
    norm = ScaledOptimizer.grad_norm
    monkeypatch.setattr(ScaledOptimizer, "grad_norm", lambda self: norm(self) * float("inf"))
    with pytest.raises(Diverged):
        _train(tmp_path, monkeypatch, late=False)


def test_a_loss_that_is_not_finite_leaves_the_scale_alone() -> None:
    scale = LossScale(torch.device("cpu"))
    for finite, expected in (((False, False), 1.0), ((True, True), 1.0), ((True, False), 0.5), ((False, True), 0.5)):
        scale.update(torch.tensor(finite))
        assert scale.scale.item() == loss_scale.FIRST * expected


def test_the_scale_grows_after_so_many_good_steps_and_counts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROW_AFTER", 3)
    scale, seen = LossScale(torch.device("cpu")), []
    for good in (True, True, True, True, False, True, True, True):
        scale.update(torch.tensor((True, good)))
        seen.append(scale.scale.item() / loss_scale.FIRST)
    assert seen == [1, 1, 2, 2, 1, 1, 1, 2]


def test_scaled_gradients_give_the_update_of_plain_ones() -> None:
    """Powers of two: not a bit of the update changes."""
    models = []
    for scaled in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(5, 3)
        optimizer: Any = adamw(model, Train(steps=1))
        scale = LossScale(torch.device("cpu"))
        if scaled:
            optimizer = ScaledOptimizer(optimizer, scale)
        for _ in range(3):
            loss = model(torch.ones(2, 5)).square().sum()
            (loss * scale.scale if scaled else loss).backward()
            models.append(optimizer.grad_norm().item())
            optimizer.step(0.1, torch.tensor(1.5))
            optimizer.zero_grad()
        models.append(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())
    assert models[:4] == models[4:]
