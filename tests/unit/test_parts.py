"""One checkpoint written by several ranks: the bytes of one, no part of a stranger, and a rank that never comes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lamplighter.errors import CannotWrite
from lamplighter.model.weights import rows_of
from lamplighter.rundir import write_json
from lamplighter.train import parts, tensorfile
from lamplighter.train.parts import Part, Standing

WHOLE = {"a.weight": torch.randn(7, 3), "b.bias": torch.randn(2), "step.b.bias": torch.tensor(5.0)}
SHAPES = {"a.weight": (7, 3), "b.bias": (2,)}


def part(rank: int, size: int, attempt: int = 1) -> Part:
    return Part(rank, size, attempt, leader=4242, shapes=SHAPES)


def held(rank: int, size: int) -> dict[str, torch.Tensor]:
    return {name: one[rows_of(len(one), size, rank)] if one.dim() else one for name, one in WHOLE.items()}


def opened(place: Path, size: int, attempt: int = 1) -> tuple[Path, Path]:
    """The folder as rank 0 has opened it; with four ranks the last one has no row of either tensor's."""
    final = place / "checkpoint-5"
    folder = part(0, size).temporary(final)
    folder.mkdir()
    part(0, size, attempt).lay_out(folder, {"x.safetensors": held(0, size)})
    return final, folder


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_make_the_bytes_of_one_file(tmp_path: Path, size: int) -> None:
    final, folder = opened(tmp_path, size)

    def hand_in(rank: int) -> None:
        bad = "b.bias" if rank == 1 else ""
        part(rank, size).hand_in(final, {"x.safetensors": held(rank, size)}, bad, lambda count, name: None)

    threads = [threading.Thread(target=hand_in, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    part(0, size).write(folder, {"x.safetensors": held(0, size)}, lambda count, name: None)
    assert part(0, size).collect(folder, 0.1) == "b.bias", "what is not finite on another rank is heard of"
    tensorfile.write(tmp_path / "alone", WHOLE)
    assert (folder / "x.safetensors").read_bytes() == (tmp_path / "alone").read_bytes()
    assert tensorfile.checksum(folder / "x.safetensors") == tensorfile.write(tmp_path / "again", WHOLE)
    assert [path.name for path in folder.iterdir()] == ["x.safetensors"], "what was only said among the ranks is gone"


def test_a_part_of_another_attempt_or_world_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "DEADLINE_S", 0.2)
    _, folder = opened(tmp_path, 2)
    for stamp in ({"attempt": 0, "world": 2}, {"attempt": 1, "world": 3}, {}):
        write_json(folder / parts.PLACE / "rank1.json", {**stamp, "bad": ""})
        with pytest.raises(CannotWrite, match="rank 1 has not written its part"):
            part(0, 2).collect(folder, 0.0)
    write_json(folder / parts.PLACE / "rank1.json", {"attempt": 1, "world": 2, "bad": ""})
    assert part(0, 2).collect(folder, 0.0) == ""


def test_a_rank_waits_for_a_folder_of_its_own_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "DEADLINE_S", 0.2)
    final, _ = opened(tmp_path, 2, attempt=1)
    late = replace(part(1, 2), attempt=2)
    with pytest.raises(CannotWrite, match="rank 1 cannot write its part"):
        late.hand_in(final, {"x.safetensors": held(1, 2)}, "", lambda count, name: None)


def test_ranks_that_stop_one_step_apart_hear_of_the_newest(tmp_path: Path) -> None:
    first, second = (Standing(tmp_path, part(rank, 2)) for rank in range(2))
    first.tell(7)
    assert first.newest() is None, "one has not told"
    second.tell(6)
    assert first.newest() == second.newest() == 7
    second.tell(7)
    assert second.newest() == 7
    assert Standing(tmp_path, part(0, 2, attempt=2)).newest() is None, "of an attempt before"
