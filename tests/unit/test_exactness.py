"""Exactness is tried: a probe that differs is named, a changed machine is told from chance, redone steps are compared."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lamplighter import report
from lamplighter.config import Train
from lamplighter.data.batches import Batch
from lamplighter.errors import NoCheckpoint
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer, token_loss
from lamplighter.model.weights import init_weights
from lamplighter.rundir import write_json
from lamplighter.train import checkpoint, exactness
from lamplighter.train.exactness import GradientProbe, Gradients, Place, Redone, Size
from lamplighter.train.hardware import Machine

SIZE = Size(2, 24, 61, segments=False)
CPU = Machine(torch.device("cpu"), torch.float32, 1, "a CPU", peak_flops=1e9, reasons=())
GPU = replace(CPU, device=torch.device("cuda", 0), exact=False)
PHASE = report.phase("exactness")


def _gradients(size: Size = SIZE, noise: float = 0.0, seed: int = 1) -> Gradients:
    model = Transformer(Shape(family="gpt2", vocab_size=61, positions=32, layers=1, width=16, heads=2, kv_heads=2))
    init_weights(model, seed)

    def loss(batch: Batch) -> torch.Tensor:
        segments = None if batch.segments is None else torch.from_numpy(batch.segments)
        found = token_loss(model, torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets), segments)
        return found + noise * torch.rand(()) * model.get_parameter("transformer.wpe.weight").sum()

    return Gradients(model, size, loss, lambda: None)


def test_three_passes_the_first_time_one_where_the_answer_is_known(tmp_path: Path) -> None:
    place = Place(tmp_path, {"seed": 1})
    first = exactness.probe(_gradients(), None, place, PHASE)
    assert first.equal and first.passes == 3
    again = exactness.probe(_gradients(), None, place, PHASE)
    assert (again.hash, again.passes, again.equal) == (first.hash, 4, True), "known from the cache: one more"
    other = exactness.probe(_gradients(seed=2), None, Place(tmp_path, {"seed": 2}), PHASE)
    assert other.hash != first.hash, "the hash is of the gradients"
    resumed = exactness.probe(_gradients(), {"hash": first.hash, "rows": 2, "tokens": 24}, Place(tmp_path, {}), PHASE)
    assert resumed.equal and resumed.passes == 1, "known from the checkpoint"


def test_a_pass_that_differs_names_the_parameter_and_is_not_kept(tmp_path: Path) -> None:
    place = Place(tmp_path, {})
    found = exactness.probe(_gradients(noise=1.0), None, place, PHASE)
    assert found.differs == "transformer.wpe.weight" and not found.equal and not place.file.exists()
    told = exactness.words(found, Redone(), GPU)
    assert told.startswith(
        "close, not bit-identical: the gradient of transformer.wpe.weight differs between two passes on this GPU"
    )
    assert "nothing is lost" in told and "--train.exact true" in told
    assert "--train.exact" not in exactness.words(found, Redone(), replace(GPU, exact=True)), "it is asked for already"


def test_another_machine_is_told_from_chance(tmp_path: Path) -> None:
    then = {"hash": "0" * 32, "rows": 2, "tokens": 24}
    found = exactness.probe(_gradients(), then, Place(tmp_path, {}), PHASE)
    assert found.other_than_then and not found.differs and found.passes == 3
    assert "than where the run began" in exactness.words(found, Redone(), CPU)


def test_gradients_leave_the_model_as_it_was(tmp_path: Path) -> None:
    made = _gradients()
    made.model.eval()
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    made.hashes()
    assert not made.model.training and all(p.grad is None for p in made.model.parameters())
    assert all(torch.equal(before[name], p) for name, p in made.model.named_parameters())


def test_the_probe_works_on_rows_that_it_can_afford() -> None:
    size = Size(8, 1024, 61, segments=False)
    assert exactness.affordable(size, 0.1, 60.0) == size
    short = exactness.affordable(size, 10.0, 1e6)  # 30 s of passes, and nobody waits longer than 10
    assert (short.rows, short.tokens) == (2, 1024)
    shorter = exactness.affordable(size, 300.0, 600.0)
    assert shorter.rows == 1 and shorter.tokens < 64 and 3 * 300 * shorter.tokens / 8192 <= 6
    assert Size(3, 30, 61, segments=True).batch().segments is not None


def test_redone_steps_are_compared_bit_for_bit() -> None:
    records = [
        {"step": 3, "train/loss": 2.0, "train/grad_norm": 1.0},
        {"step": 5, "train/loss": 9.0, "train/grad_norm": 1.0},
        {"step": 5, "train/loss": 1.5, "train/grad_norm": 1.0},
        {"step": 6, "train/loss": None, "train/grad_norm": 1.0},
        {"step": 6, "eval/val_loss": 1.0},
        {"step": 7, "train/loss": 1.25, "train/grad_norm": 1.0},
    ]
    redone = Redone.of(records, 4)
    assert set(redone.before) == {5, 7}, "the last record of a step counts, and only those after the checkpoint"
    assert redone.compare(5, 1.5, 1.0) == "" and redone.equal == 1
    other = redone.compare(7, math.nextafter(1.25, 2.0), 1.0)
    assert "the loss of step 7 was 1.25 and is 1.25000000000000" in other and redone.first_other == 7
    assert "step 7, done again, is not what it was" in exactness.words(GradientProbe("", 1, 1, 3), redone, CPU)
    line = [{"step": step, "train/loss": loss, "train/grad_norm": 1.0} for step, loss in ((5, 2.0), (6, 1.9), (7, 1.8))]
    again = [{**line[0]}, {**line[1], "train/loss": 1.85}]
    assert Redone.of([*line, line[0]], 4).before.keys() == {5, 6, 7}, (
        "killed in mid-way: what is beyond is still the same"
    )
    assert Redone.of([*line, *again], 4).before == {5: (2.0, 1.0), 6: (1.85, 1.0)}, "step 7 is of another schedule"
    later = Redone({5: (1.0, 1.0), 9: (1.0, 1.0)})
    later.forget_from(6)
    assert set(later.before) == {5}, "after a roll-back other batches are seen"


def test_what_is_proved_is_said_in_one_line() -> None:
    assert exactness.words(GradientProbe("", 1, 1, 3), Redone(), CPU) == "exact: proved here (probe 3 of 3)"
    assert (
        exactness.words(GradientProbe("", 1, 1, 3), Redone(equal=41), CPU)
        == "exact: proved here (probe 3 of 3, 41 redone steps equal)"
    )
    assert exactness.words(None, Redone(equal=1), CPU) == "exact: 1 redone step equal"
    assert exactness.words(None, Redone(), CPU).startswith("exact: not tried, as code of your own is called for steps")
    assert "none holds the whole model" in exactness.words(None, Redone(), CPU, sharded=True)


@pytest.mark.parametrize(("cost", "chosen"), [(None, True), (0.1, True), (0.2, False)])
def test_auto_asks_for_exact_kernels_unless_they_were_measured_to_be_dear(
    tmp_path: Path, cost: float | None, chosen: bool
) -> None:
    if cost is not None:
        write_json(tmp_path / exactness.SELFTEST, {f"a card {torch.__version__} gpt2": {"exact_cost": cost}})
    exact, why = exactness.choose(Train(steps=1), GPU.device, "a card", tmp_path, "gpt2")
    assert exact is chosen and (f"{cost:.0%}" in why if cost is not None else "not measured" in why)
    assert exactness.choose(Train(steps=1, exact=False), GPU.device, "a card", tmp_path, "gpt2") == (
        False,
        "train.exact",
    )
    assert exactness.choose(Train(steps=1), CPU.device, "a CPU", tmp_path, "gpt2")[0]


@pytest.mark.parametrize("kept", [5, [], {"rows": "many"}, {"rows": -1}, {"hash": 7}])
def test_a_damaged_record_of_the_probe_is_found_before_it_is_used(tmp_path: Path, kept: object) -> None:
    (tmp_path / "training").mkdir()
    state = tmp_path / "training" / "state.json"
    write_json(state, {"step": 1, "exact": {"hash": "0", "rows": 2, "tokens": 24}})
    assert checkpoint.read_state(tmp_path)["exact"]["rows"] == 2
    write_json(state, {"step": 1, "exact": kept})
    with pytest.raises(NoCheckpoint) as caught:
        checkpoint.read_state(tmp_path)
    assert "exact" in caught.value.why
