"""Saves beside the steps: of the right step, whole or not there, one at a time, from memory that is kept; faults reach the loop."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from lamplighter.train import async_save, checkpointer
from lamplighter.train.async_save import AsyncSaver, PendingSave, choose
from lamplighter.train.ranks import ALONE
from lamplighter.train.state import TrainState

GIB = 1 << 30


# ---------------------------------------------------------------- the copy


def state(size: int, value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((size, 64), value), "b": torch.full((), value), "half": torch.full((5,), value).bfloat16()}


def finish(save: PendingSave) -> None:
    assert save.done.wait(60)
    assert save.error is None


def test_the_copy_is_of_its_step_though_the_optimizer_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that lags behind, and weights that change as soon as they may: would fail if `wait_for_copy` did not wait."""
    slow = np.copyto

    def lagging(target: np.ndarray, source: np.ndarray) -> None:
        time.sleep(0.02)
        slow(target, source)

    monkeypatch.setattr(async_save.np, "copyto", lagging)
    live, moments, kept = state(1000, 1.0), state(500, 1.0), AsyncSaver()
    for number in range(1, 4):
        seen: dict[str, torch.Tensor] = {}
        save = PendingSave(number, 0, for_loop=True)

        def write(model: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor], seen: dict = seen) -> None:
            time.sleep(0.05)  # the weights have long changed
            seen |= {f"m.{name}": tensor.clone() for name, tensor in model.items()}
            seen |= {f"o.{name}": tensor.clone() for name, tensor in optimizer.items()}

        kept.begin(save, live, moments, set(), write)
        assert not save.copied.is_set(), "the loop is not held up by the copy"
        kept.wait_for_copy(save)
        for tensor in [*live.values(), *moments.values()]:
            tensor.fill_(number + 1.0)  # in place, as an optimizer does
        finish(save)
        assert len(seen) == 6
        assert all(bool((tensor == float(number)).all()) for tensor in seen.values())


def test_buffers_that_a_forward_pass_may_change_are_copied_before_it() -> None:
    live, kept, save = (
        {"weight": torch.ones(4), "running_mean": torch.ones(4)},
        AsyncSaver(),
        PendingSave(1, 0, for_loop=True),
    )
    may_go_on, seen = threading.Event(), {}

    def write(model: dict[str, torch.Tensor], _: dict[str, torch.Tensor]) -> None:
        may_go_on.wait(30)
        seen.update({name: tensor.clone() for name, tensor in model.items()})

    kept.begin(save, live, {}, {"running_mean"}, write)
    live["running_mean"].fill_(2.0)  # the next forward pass
    may_go_on.set()
    finish(save)
    assert seen["running_mean"].tolist() == [1.0] * 4


def test_the_memory_is_allocated_once_and_used_again() -> None:
    live, kept, places = state(100_000, 1.0), AsyncSaver(), set()
    for number in range(22):
        if number == 2:
            before = psutil.Process().memory_info().rss
        save = PendingSave(number, 0, for_loop=True)
        kept.begin(save, live, {"x": live["a"]}, set(), lambda model, optimizer: None)
        finish(save)
        (buffer,) = kept.buffers
        places.add(tuple(t.data_ptr() for part in (buffer.model, buffer.optimizer) for t in part.values()))
    assert len(places) == 1
    assert psutil.Process().memory_info().rss - before < live["a"].nbytes / 2, "20 saves cost no memory"
    need = sum(tensor.nbytes for tensor in live.values()) + live["a"].nbytes
    assert need <= kept.bytes <= need + 4 * 64, "aligned"


def test_an_error_of_the_copy_lets_the_optimizer_go_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no memory for the copy")

    monkeypatch.setattr(async_save.np, "copyto", broken)
    save, kept = PendingSave(1, 0, for_loop=True), AsyncSaver()
    kept.begin(save, state(4, 1.0), {}, set(), lambda model, optimizer: None)
    kept.wait_for_copy(save)
    assert save.done.wait(30)
    assert isinstance(save.error, MemoryError)


def test_staging_is_chosen_by_the_memory_that_is_free_and_says_why() -> None:
    assert choose("auto", GIB, 20 * GIB) == (True, "saves are written beside the steps: 1.1 GB of memory are kept for the copy, 21.5 GB are free")  # fmt: skip
    wanted, why = choose("auto", GIB, GIB)
    assert not wanted
    assert "save.staged true insists" in why
    assert choose(True, GIB, 0)[0]
    assert not choose(False, GIB, 100 * GIB)[0]


# ---------------------------------------------------------------- whole runs

# A model with buffers, and saves that can be slow or fail: `after(path)` runs in the thread that writes, after each file.


# ---------------------------------------------------------------- a GPU that does not answer


class _Event:
    """A CUDA event that is never reached, or only after some looks."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks <= 0


def test_an_update_that_a_gpu_has_not_made_is_waited_for_and_not_for_ever() -> None:
    last = async_save.LastUpdate(torch.device("cpu"))
    assert last.is_made(0.0), "a CPU has made what it was told"
    last.event = _Event(3)  # type: ignore[assignment]
    assert last.is_made(30.0)
    last.event = _Event(float("inf"))  # type: ignore[assignment]
    assert not last.is_made(0.2)


def test_a_stop_leaves_a_gpu_that_hangs_with_the_durable_step(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    left: list[int] = []
    monkeypatch.setattr(checkpointer.report, "warn", said.append)
    monkeypatch.setattr(checkpointer.report, "leave", left.append)
    monkeypatch.setattr(checkpointer, "_STOP_PATIENCE_S", 0.0)
    monkeypatch.setattr(checkpointer, "_STOP_DEADLINE_S", 0.2)
    context: Any = SimpleNamespace(
        machine=SimpleNamespace(device=torch.device("cpu")), tokenizer=None, chat=None, world=ALONE, shards=None
    )
    one = checkpointer.Checkpointer(context, TrainState(10))
    one.durable, one.last_update.event = 7, _Event(float("inf"))  # type: ignore[assignment]
    one.stop()
    assert left == [75] and "step 7 is durable" in said[0]
