"""A checkpoint that somebody reads is not pruned; two more than are kept at most, and none on a full disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lamplighter.train import checkpoint, held


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    for step in range(1, 7):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "manifest.json").write_text("{}")
    yield tmp_path
    for path in list(held._HELD):
        held.let_go(path)


def left(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in root.iterdir())


def test_what_is_read_stays_until_it_is_let_go(root: Path) -> None:
    assert held.hold(root / "checkpoint-2")
    checkpoint.prune(root, 2, set())
    assert left(root) == [2, 5, 6]
    held.let_go(root / "checkpoint-2")
    checkpoint.prune(root, 2, set())
    assert left(root) == [5, 6]


def test_two_more_at_most_and_none_where_there_is_no_room(root: Path) -> None:
    for step in (1, 2, 3):
        assert held.hold(root / f"checkpoint-{step}")
    checkpoint.prune(root, 1, set())
    assert left(root) == [2, 3, 6]
    checkpoint.prune(root, 1, set(), most_read=0)
    assert left(root) == [6]
    assert not held.is_ours(root / "checkpoint-3")


def test_what_is_gone_cannot_be_held(root: Path) -> None:
    assert held.hold(root / "checkpoint-1") and held.hold(root / "checkpoint-1")
    checkpoint._remove(root / "checkpoint-1")
    assert not held.hold(root / "checkpoint-1")
    (root / "checkpoint-4" / "manifest.json").unlink()
    assert not held.hold(root / "checkpoint-4")  # a save that did not finish
    checkpoint.prune(root, 2, set())
    assert left(root) == [5, 6]
