"""One checkpoint written by several ranks: the bytes of one, no part of a stranger or of half a file, and a rank that never comes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lamplighter.errors import CannotWrite
from lamplighter.model.weights import rows_of
from lamplighter.rundir import RunDir, write_json
from lamplighter.train import parts, tensorfile
from lamplighter.train.parts import Part, Standing

WHOLE = {"a.weight": torch.randn(7, 3), "b.bias": torch.randn(2), "step.b.bias": torch.tensor(5.0)}
SHAPES = {"a.weight": (7, 3), "b.bias": (2,)}


NAME = "x.safetensors"


def part(rank: int, size: int, attempt: int = 1, apart: frozenset[int] = frozenset()) -> Part:
    return Part(rank, size, attempt, leader=4242, shapes=SHAPES, apart=apart)


def collect(folder: Path, size: int, own_s: float = 0.0, apart: frozenset[int] = frozenset()) -> str:
    return part(0, size, apart=apart).collect(folder, {NAME: held(0, size)}, own_s, lambda count, name: None)


def held(rank: int, size: int) -> dict[str, torch.Tensor]:
    return {name: one[rows_of(len(one), size, rank)] if one.dim() else one for name, one in WHOLE.items()}


def opened(place: Path, size: int, attempt: int = 1) -> tuple[Path, Path]:
    """The folder as rank 0 has opened it; with four ranks the last one has no row of either tensor's."""
    final = place / "checkpoint-5"
    folder = part(0, size).temporary(final)
    folder.mkdir()
    part(0, size, attempt).lay_out(folder, {"x.safetensors": held(0, size)})
    return final, folder


@pytest.mark.parametrize("size, apart", [(2, ()), (3, ()), (4, ()), (2, (1,)), (3, (1, 2)), (5, (3, 4))])
def test_parts_make_the_bytes_of_one_file(tmp_path: Path, size: int, apart: tuple[int, ...]) -> None:
    """Also where ranks on another machine write theirs apart: of five, the last one has no row at all."""
    final, folder = opened(tmp_path, size)

    def hand_in(rank: int) -> None:
        bad = "b.bias" if rank == 1 else ""
        here = part(rank, size, apart=frozenset(apart))
        here.hand_in(final, {"x.safetensors": held(rank, size)}, bad, lambda count, name: None)

    threads = [threading.Thread(target=hand_in, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    part(0, size).write(folder, {"x.safetensors": held(0, size)}, lambda count, name: None)
    assert collect(folder, size, 0.1, frozenset(apart)) == "b.bias", "what is not finite on another rank is heard of"
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
            collect(folder, 2)
    write_json(folder / parts.PLACE / "rank1.json", {"attempt": 1, "world": 2, "bad": ""})
    assert collect(folder, 2) == ""


APART = frozenset({1})


def handed_in_apart(place: Path, attempt: int = 1) -> tuple[Path, Path]:
    """Rank 1, on another machine, has written its files and its word; rank 0 has not copied them."""
    final, folder = opened(place, 2, attempt)
    part(0, 2).write(folder, {NAME: held(0, 2)}, lambda count, name: None)
    before = (folder / NAME).read_bytes()
    part(1, 2, attempt, APART).hand_in(final, {NAME: held(1, 2)}, "", lambda count, name: None)
    assert (folder / NAME).read_bytes() == before, "it has touched no file that another machine writes"
    return folder, folder / parts.PLACE / f"rank1.{NAME}"


def test_a_part_that_was_written_apart_is_a_file_as_any_other(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    _, source = handed_in_apart(tmp_path)
    found, mine = load_file(source), held(1, 2)
    assert found.keys() == {"a.weight", "b.bias"}, "counters are rank 0's to write"
    assert all(torch.equal(found[name], mine[name]) for name in found)


@pytest.mark.parametrize("fault, words", [
    ("a bit", "has the checksum"), ("cut short", "bytes, and should have"), ("longer", "bytes, and should have"),
    ("other tensors", "holds other tensors than were expected"), ("gone", "is not there"), ("no checksum", "was written with None"),
])  # fmt: skip
def test_a_part_that_has_not_come_whole_makes_no_checkpoint(tmp_path: Path, fault: str, words: str) -> None:
    folder, source = handed_in_apart(tmp_path)
    data = bytearray(source.read_bytes())
    if fault == "a bit":
        data[-3] ^= 4
    elif fault == "other tensors":
        data[data.index(b"a.weight")] ^= 1
    elif fault == "no checksum":
        write_json(folder / parts.PLACE / "rank1.json", {"attempt": 1, "world": 2, "bad": ""})
    source.write_bytes(bytes(data)[:-8] if fault == "cut short" else bytes(data) + b"12345678" * (fault == "longer"))
    if fault == "gone":
        source.unlink()
    with pytest.raises(CannotWrite, match="the part of rank 1 has not come whole") as error:
        collect(folder, 2, apart=APART)
    assert words in error.value.why and f"rank1.{NAME}" in error.value.why
    assert "the checkpoints that exist are intact" in error.value.next


def test_a_part_apart_of_another_attempt_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "DEADLINE_S", 0.2)
    folder, source = handed_in_apart(tmp_path, attempt=2)
    with pytest.raises(CannotWrite, match="rank 1 has not written its part"):
        collect(folder, 2, apart=APART)
    assert source.exists()


def test_looking_anew_leaves_nothing_and_forgives_a_folder_that_is_not_there(tmp_path: Path) -> None:
    parts.see_anew(tmp_path)
    parts.see_anew(tmp_path / "not there")
    assert not list(tmp_path.iterdir())


def test_a_rank_waits_for_a_folder_of_its_own_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "DEADLINE_S", 0.2)
    final, _ = opened(tmp_path, 2, attempt=1)
    late = replace(part(1, 2), attempt=2)
    with pytest.raises(CannotWrite, match="rank 1 cannot write its part"):
        late.hand_in(final, {"x.safetensors": held(1, 2)}, "", lambda count, name: None)


def test_ranks_that_stop_one_step_apart_hear_of_the_newest(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.slots.mkdir()
    first, second = (Standing(run, part(rank, 2)) for rank in range(2))
    first.tell(7)
    assert first.newest() is None, "one has not told"
    second.tell(6)
    assert first.newest() == second.newest() == 7
    second.tell(7)
    assert second.newest() == 7
    assert Standing(run, part(0, 2, attempt=2)).newest() is None, "of an attempt before"
    assert not list(run.slots.iterdir()), "and away"


def test_on_several_machines_they_hear_it_in_the_folder_that_all_see(tmp_path: Path) -> None:
    """Each machine has slots of its own."""
    run, there = RunDir(tmp_path), RunDir(tmp_path / "nodes" / "1", whole=tmp_path)
    there.create()
    first, second = Standing(run, part(0, 2, apart=APART)), Standing(there, part(1, 2, apart=APART))
    first.tell(7)
    second.tell(6)
    assert first.newest() == second.newest() == 7
    assert there.checkpoints == run.checkpoints and there.slots != run.slots
