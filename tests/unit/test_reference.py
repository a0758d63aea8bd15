"""What an export is compared by: near ties are counted, real differences refused, what is no number refused."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from lamplighter.errors import CannotWrite, UsageError
from lamplighter.export import place
from lamplighter.export.opened import ExportFailed
from lamplighter.export.reference import (
    Greedy,
    Limits,
    Reference,
    Scored,
    compare_greedy,
    compare_ids,
    compare_scores,
    is_close_to_a_limit,
)


def test_greedy_answers_differ_only_where_two_tokens_are_nearly_equal() -> None:
    known = Reference([], [], greedy=[Greedy([1], [5, 6, 7], [1.0, 0.0005, 2.0])])
    assert compare_greedy(known, [[5, 6, 7]]) == "the same words to 1 prompts"
    assert "near tie" in compare_greedy(known, [[5, 9, 9]])
    with pytest.raises(ExportFailed, match="says something else"):
        compare_greedy(known, [[4, 6, 7]])
    with pytest.raises(ExportFailed, match="says something else"):
        compare_greedy(known, [[5, 6]])


def test_scores_are_compared_by_perplexity_and_first_choice() -> None:
    known = Reference([], [], scored=[Scored([1, 2, 3, 4], 1, [-1.0, -2.0, -3.0], [2, 3, 4])])
    assert "0.00% apart" in compare_scores(known, [([-1.0, -2.0, -3.0], [2, 3, 4])], Limits(0.005, 0.95))
    with pytest.raises(ExportFailed, match="no number"):
        compare_scores(known, [([-1.0, math.nan, -3.0], [2, 3, 4])], Limits(0.005, 0.95))
    for theirs in (([-1.0, -2.0, -3.1], [2, 3, 4]), ([-1.0, -2.0, -3.0], [2, 3, 5])):
        with pytest.raises(ExportFailed, match="not near enough"):
            compare_scores(known, [theirs], Limits(0.005, 0.95))


def test_near_ties_are_counted_apart_and_decide_nothing() -> None:
    gaps = [0.05, 0.2, 3.0]
    known = Reference([], [], scored=[Scored([1, 2, 3, 4], 1, [-1.0, -2.0, -3.0], [2, 3, 4], gaps)])
    said = compare_scores(known, [([-1.0, -2.0, -3.0], [9, 3, 4])], Limits(0.01, 0.95, 0.1))
    assert "100.0% of 2 places (1 more differ where the two best tokens are within 0.1)" in said
    for firsts, tie in (([2, 9, 4], 0.1), ([9, 3, 4], 0.001)):
        with pytest.raises(ExportFailed, match="not near enough"):
            compare_scores(known, [([-1.0, -2.0, -3.0], firsts)], Limits(0.01, 0.95, tie))


def test_few_places_decide_only_far_from_the_limits() -> None:
    """94.3 % of 264 places was refused, of a file that has 95.2 % of a thousand."""

    def is_close(places: int, other: int, apart: float = 0.0) -> bool:
        known = Reference([], [], scored=[Scored([0] * places, 0, [-2.0] * places, [1] * places)])
        firsts = [2] * other + [1] * (places - other)
        return is_close_to_a_limit(known, [([-2.0 - apart] * places, firsts)], Limits(0.01, 0.95))

    assert is_close(264, 15) and is_close(264, 8), "94.3 % and 97.0 %"
    assert not is_close(264, 2) and not is_close(264, 40) and not is_close(2000, 40)
    assert is_close(264, 0, 0.008) and is_close(264, 0, 0.012)
    assert not is_close(264, 0, 0.002) and not is_close(264, 0, 0.1)


def test_other_ids_are_refused_with_both() -> None:
    with pytest.raises(ExportFailed) as error:
        compare_ids(Reference(["ab"], [[1, 2]]), [[3]])
    assert "here [1, 2], there [3]" in error.value.why


def test_what_a_killed_export_left_is_swept_and_one_that_goes_on_keeps_its_own(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), place.written(tmp_path / "a.gguf", 0, False) as temporary:
        temporary.write_bytes(b"x")
        place.sweep(tmp_path)
        assert temporary.exists(), "we are alive"
        1 / 0  # noqa: B018
    assert not any(tmp_path.iterdir())
    dead = tmp_path / temporary.name.replace(f"-{os.getpid()}-", "-999999999-")
    elsewhere = tmp_path / ".writing-999999999-anotherhost-a.gguf"
    dead.mkdir()
    (dead / "model.safetensors").write_bytes(b"x")
    elsewhere.write_bytes(b"x")
    with place.written(tmp_path / "a.gguf", 0, False) as temporary:
        temporary.write_bytes(b"whole")
    assert not dead.exists() and elsewhere.exists() and (tmp_path / "a.gguf").read_bytes() == b"whole"
    with pytest.raises(UsageError), place.written(tmp_path / "a.gguf", 0, False):
        pass
    with place.written(tmp_path / "a.gguf", 0, True) as temporary:
        temporary.write_bytes(b"other")
    assert (tmp_path / "a.gguf").read_bytes() == b"other" and not list(tmp_path.glob(".writing-*before"))
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_bytes(b"x")
    with pytest.raises(UsageError, match="is no export"), place.written(tmp_path / "work", 0, True):
        pass
    with pytest.raises(CannotWrite, match="no room"), place.written(tmp_path / "b.gguf", 1 << 60, False):
        pass
