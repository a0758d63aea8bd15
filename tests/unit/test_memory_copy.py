"""The newest state in memory that outlives a process: whole or not there, and never one that a missing save comes before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lamplighter.train import async_save
from lamplighter.train.async_save import AsyncSaver, PendingSave
from lamplighter.train.memory_copy import MemoryCopy, Restored, given, newest

GIB = 1 << 30


@pytest.fixture
def files() -> Iterator[list[int]]:
    """As the parent makes them."""
    made = [os.memfd_create(f"test-{number}") for number in range(2)]
    yield made
    for fd in made:
        os.close(fd)


def _copies(files: list[int]) -> list[MemoryCopy]:
    """As a process has them that was started with these descriptors."""
    return given({"LAMP_MEMORY": ",".join(map(str, files))})


def _remember(saver: AsyncSaver, step: int, value: float, owed: int = 0) -> None:
    model = {"w": torch.full((5, 3), value), "half": torch.full((7,), value, dtype=torch.bfloat16)}
    about: dict[str, Any] = {"progress": {"step": step}, "facts": {"seed": 1}, "owed": owed}
    copy = PendingSave(step, 0, for_loop=False)
    saver.begin(copy, model, {"exp_avg.w": torch.full((5, 3), -value)}, set(), None, about)
    assert copy.done.wait(30) and copy.error is None


def _found(files: list[int], durable: set[int] | None = None) -> Restored | None:
    return newest(_copies(files), durable or set())


def test_the_newest_of_two_copies_comes_back_bit_for_bit(files: list[int]) -> None:
    assert _found(files) is None, "nothing was copied yet"
    saver = AsyncSaver(_copies(files))
    for step in (3, 4, 5):
        _remember(saver, step, step + 0.1)
    found = _found(files)
    assert found is not None and (found.step, found.progress, found.facts) == (5, {"step": 5}, {"seed": 1})
    assert torch.equal(found.model["w"], torch.full((5, 3), 5.1)) and found.model["half"].dtype == torch.bfloat16
    assert torch.equal(found.optimizer["exp_avg.w"], torch.full((5, 3), -5.1))
    saver.forget()
    assert _found(files) is None, "the run went back to an older step"


def test_a_torn_copy_is_passed_over_for_the_one_before(files: list[int]) -> None:
    saver = AsyncSaver(_copies(files))
    _remember(saver, 3, 1.0)
    _remember(saver, 4, 2.0)
    torn = next(fd for fd in files if (one := MemoryCopy(fd).read()) is not None and one.step == 4)
    os.pwrite(torn, b"\x01", 4096 + 9)  # one byte of a tensor
    found = _found(files)
    assert found is not None and found.step == 3


def test_a_process_that_dies_in_the_middle_of_a_copy_leaves_the_other_whole(
    files: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = AsyncSaver(_copies(files))
    _remember(saver, 3, 1.0)
    _remember(saver, 4, 2.0)

    def dies(*_: object) -> None:
        raise MemoryError("in the middle")

    monkeypatch.setattr(async_save.np, "copyto", dies)
    copy = PendingSave(5, 0, for_loop=False)
    saver.begin(
        copy,
        {"w": torch.ones(5, 3), "half": torch.ones(7, dtype=torch.bfloat16)},
        {"exp_avg.w": torch.ones(5, 3)},
        set(),
        None,
    )
    assert copy.done.wait(30) and isinstance(copy.error, MemoryError)
    found = _found(files)
    assert found is not None and found.step == 4


def test_a_copy_that_a_missing_save_comes_before_is_not_gone_on_from(files: list[int]) -> None:
    """Step 4 was being saved when step 5 was copied: from 5 on, checkpoint-4 would never be made."""
    saver = AsyncSaver(_copies(files))
    _remember(saver, 4, 1.0)
    _remember(saver, 5, 2.0, owed=4)
    lost, made = _found(files), _found(files, {4})
    assert lost is not None and lost.step == 4
    assert made is not None and made.step == 5


def test_two_copies_are_kept_where_they_fit_and_it_is_said() -> None:
    wanted, why = async_save.outlives("auto", GIB, 8 * GIB)
    assert wanted and "2.1 GB" in why
    wanted, why = async_save.outlives("auto", GIB, 3 * GIB)
    assert not wanted and "save.memory true insists" in why
    assert async_save.outlives(True, GIB, 0)[0] and not async_save.outlives(False, GIB, 99 * GIB)[0]
