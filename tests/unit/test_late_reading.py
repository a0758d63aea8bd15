"""Loss and norm of a step are read while the next one is computed: the same records, weights and decisions as when read at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lamplighter import report
from lamplighter.commands.start_up import prepare
from lamplighter.config import Run, parse_overrides, resolve
from lamplighter.errors import Diverged
from lamplighter.rundir import RunDir, newest_first
from lamplighter.train import gradients, loop
from lamplighter.train.loop import training

STEPS = 14


def _run(**more: object) -> Run:
    words = {
        "train.steps": STEPS, "train.lr": 0.01, "train.batch_size": 4, "train.micro_batch": 2, "train.threads": 1, "train.dtype": "fp32",
        "train.compile": "false", "train.grad_clip": 0.3, "data.seq_len": 16, "data.embedded_documents": 200, "tokenizer.kind": "bytes",
        "data.workers": 1, "model.layers": 1, "model.width": 16, "model.heads": 2, "model.dropout": 0.1, "eval.every_steps": 6,
        "eval.windows": 2, "eval.sample_every_steps": 0, "save.every_steps": 4, "save.staged": "false", "save.keep": 100,
        **{name.replace("__", "."): value for name, value in more.items()},
    }  # fmt: skip
    given = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return resolve(overrides=parse_overrides(given)[1]).run


@dataclass
class Made:
    """What a run has left."""

    records: list[tuple[int, str, str]]
    metrics: list[tuple[int, dict[str, Any]]]
    verdicts: list[str]
    folder: RunDir
    diverged: bool = False

    def weights(self) -> dict[str, torch.Tensor]:
        newest = newest_first(self.folder.checkpoints)[0]
        return {**load_file(newest / "model.safetensors"), **load_file(newest / "training" / "optimizer.safetensors")}

    def logged(self) -> list[tuple[int, Any, Any]]:
        found = [(step, values) for step, values in self.metrics if "train/loss" in values]
        return [(step, repr(values["train/loss"]), repr(values.get("train/grad_norm"))) for step, values in found]


def _train(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    late: bool,
    bad: Iterable[int] = (),
    leave_after: int = 0,
    **more: object,
) -> Made:
    """Steps whose loss is made not finite; `leave_after` so many records the loop is left, as by a stop."""
    run, place = _run(**more), RunDir(folder / "runs" / "r")
    place.create()
    metrics: list[tuple[int, dict[str, Any]]] = []
    verdicts: list[str] = []
    monkeypatch.setattr(report, "metric", lambda step, values: metrics.append((step, dict(values))))
    monkeypatch.setattr(report, "verdict", lambda one, **_: verdicts.append(f"{one.cause} {one.action}: {one.why}"))
    real = gradients.micro_loss
    wrong = set(bad)

    def spoiled(context: Any, batch: Any, rows: slice, *more: Any) -> torch.Tensor:
        found = real(context, batch, rows, *more)
        return found * float("nan") if batch.step in wrong else found

    monkeypatch.setattr(gradients, "micro_loss", spoiled)
    try:
        context, state = prepare(run, place, {})
        context = replace(context, machine=replace(context.machine, reads_late=late))
        records: list[tuple[int, str, str]] = []
        diverged = False
        try:
            with training(context, state) as steps:
                for record in itertools.islice(steps, leave_after or None):
                    records.append((record.step, record.loss.hex(), record.grad_norm.hex()))
        except Diverged:
            diverged = True
        return Made(records, metrics, verdicts, place, diverged)
    finally:
        monkeypatch.setattr(gradients, "micro_loss", real)


def _same(one: Made, two: Made) -> None:
    assert one.records == two.records and one.logged() == two.logged() and one.verdicts == two.verdicts
    first, second = one.weights(), two.weights()
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert one.diverged == two.diverged


@pytest.mark.parametrize(
    "bad",
    [(), (3,), (4,), (STEPS,), (7, 8), (5, 6, 7, 9)],
    ids=["none", "one", "at a save", "the last", "in a row", "rolled back"],
)
def test_the_same_as_when_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...]) -> None:
    at_once = _train(tmp_path / "a", monkeypatch, late=False, bad=bad)
    late = _train(tmp_path / "b", monkeypatch, late=True, bad=bad)
    assert len(at_once.records) >= STEPS and not at_once.diverged
    assert [one for one in at_once.verdicts if "nan_batch" in one] if bad else not at_once.verdicts
    _same(at_once, late)


def test_a_loop_that_is_left_between_a_step_and_its_numbers_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _train(tmp_path / "a", monkeypatch, late=False)
    first = _train(tmp_path / "b", monkeypatch, late=True, leave_after=6)
    step = int(newest_first(first.folder.checkpoints)[0].name.rpartition("-")[2])
    assert step >= 6 and max(step for step, *_ in first.logged()) == step, "what was made is saved and logged"
    second = _train(tmp_path / "b", monkeypatch, late=True)
    assert second.records[0][0] == step + 1
    assert first.logged()[:step] + second.logged() == whole.logged()
    one, two = whole.weights(), second.weights()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_save_from_beside_waits_for_the_numbers_and_keeps_no_bad_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked from another thread between the update and the reading: the counters are those of the weights."""
    seen: list[tuple[int, int, bool]] = []
    real = loop._Loop._is_due

    def look(self: Any, step: int) -> bool:
        progress = self.state.progress
        seen.append((step, progress.step, self.state.unread is not None))
        return real(self, step)

    monkeypatch.setattr(loop._Loop, "_is_due", look)
    _train(tmp_path, monkeypatch, late=True, bad=(5,))
    assert (5, 4, True) in seen, "a bad step is not counted, as its update has changed nothing"
    assert all(step == counted for step, counted, _ in seen if step != 5)
