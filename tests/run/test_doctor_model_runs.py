"""What starts processes: lamp doctor, model: real models on real batches, each ill in one way; the five source systems are named by what ailed them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from doctor_context import SICK, context
from lamplighter.doctor import model_cost
from running import LONG


@pytest.fixture(autouse=True)
def among_the_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SICK)
    torch.set_num_threads(1)


@LONG
def test_a_loop_under_the_compiler_does_not_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """System D, for real."""
    monkeypatch.setattr(model_cost, "COMPILE_S", 30.0)
    words = ["--model.family", "models:Looped", "--data.seq_len", "512", "--train.compile", "true"]
    (found,) = model_cost.compiling(context(tmp_path, *words))
    assert found.cause == "compile_slow"
    assert found.settings == {"train.compile": False}


@LONG
def test_the_compiler_is_tried_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cost, "COMPILE_S", 300.0)
    (found,) = model_cost.compiling(context(tmp_path, "--train.compile", "true"))
    assert found.figures["compile_s"] > 0
    assert found.figures["compiled_s"] > 0
