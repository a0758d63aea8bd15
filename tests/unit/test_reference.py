"""What an export is compared by: near ties are counted, real differences refused, half characters left out."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from lamplighter.errors import CannotWrite, UsageError
from lamplighter.export import place
from lamplighter.export.opened import ExportFailed
from lamplighter.export.reference import Greedy, Reference, Scored, compare_greedy, compare_ids, compare_scores


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
    assert "0.00% apart" in compare_scores(known, [([-1.0, -2.0, -3.0], [2, 3, 4])], 0.005, 0.95)
    with pytest.raises(ExportFailed, match="no number"):
        compare_scores(known, [([-1.0, math.nan, -3.0], [2, 3, 4])], 0.005, 0.95)
    for theirs in (([-1.0, -2.0, -3.1], [2, 3, 4]), ([-1.0, -2.0, -3.0], [2, 3, 5])):
        with pytest.raises(ExportFailed, match="not near enough"):
            compare_scores(known, [theirs], 0.005, 0.95)


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
