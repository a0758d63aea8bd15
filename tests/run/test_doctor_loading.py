"""lamp doctor, loading: a user's own Dataset with real workers, each fault of the zoo injected into the dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

from doctor_context import SICK, all_of, context, examine, line_of
from lamplighter.doctor import loading
from lamplighter.doctor.probe import Finding
from running import LONG


@pytest.fixture(autouse=True)
def among_the_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SICK)
    monkeypatch.setattr(loading, "QUIET_S", 2.0)
    monkeypatch.setattr(loading, "SILENT_S", 1.5)
    monkeypatch.setattr(loading, "START_S", 150.0)


def one(folder: Path, dataset: str, method: str = "fork") -> Finding:
    """The single finding of a trial with two workers."""
    who = context(folder, "--data.source", f"sick_datasets:{dataset}", "--data.workers", "2")
    (found,) = loading.with_workers(who, method)
    return found


# ---------------------------------------------------------------- in this process


def test_items_batch_memory_and_pickling_of_a_sound_dataset(tmp_path: Path) -> None:
    found = all_of(loading.here, context(tmp_path, "--data.source", "sick_datasets:Well"))
    assert [one.level for one in found] == ["ok", "ok", "ok"]
    assert found[0].figures["batch_bytes"] == 4 * 16 * 8
    assert found[1].figures["need_bytes"] == 2 * 2 * 4 * 16 * 8


def test_an_iterable_dataset_is_taken_too(tmp_path: Path) -> None:
    assert not examine(loading.here, context(tmp_path, "--data.source", "sick_datasets:Stream"))


def test_a_function_and_a_whole_dataloader_are_taken_too() -> None:
    assert loading.is_torch(loading.find("sick_datasets:make"))
    found = loading.make(loading.find("sick_datasets:LOADER"), 4, None)
    assert (found.batch_size, found.workers, found.is_map, found.prefetch) == (3, 1, True, 2)
    assert not loading.is_torch(loading.find("streams:blocks"))


def test_a_source_of_texts_is_not_loaded_by_workers(tmp_path: Path) -> None:
    found = list(loading.by_fork(context(tmp_path, "--data.source", "streams:raises")))
    assert [one.level for one in found] == ["skip"]
    assert not examine(loading.here, context(tmp_path, "--data.source", "streams:raises"))


def test_an_item_that_raises_is_named_by_its_line(tmp_path: Path) -> None:
    found = all_of(loading.here, context(tmp_path, "--data.source", "sick_datasets:Raises"))[0]
    assert found.level == "fault"
    assert "item 0" in found.what
    assert found.culprit["line"] == line_of("sick_datasets.py", "raises here")


def test_a_module_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    found = all_of(loading.here, context(tmp_path, "--data.source", "nothing_here:Data"))[0]
    assert found.level == "fault"
    assert "nothing_here" in found.what


def test_a_lambda_is_named_by_attribute_and_line(tmp_path: Path) -> None:
    """Zoo 8."""
    found = examine(loading.here, context(tmp_path, "--data.source", "sick_datasets:HasLambda"))["spawn_pickle"]
    assert found.culprit["attribute"] == "dataset.options['transform']"
    assert found.culprit["line"] == line_of("sick_datasets.py", "# the lambda")


def test_a_lock_in_an_attribute_is_named_by_the_line_that_sets_it() -> None:
    made = loading.make(loading.find("sick_datasets:HoldsLock"), 4, 2)
    found = loading.unpicklable(made.dataset)
    assert found is not None
    assert found.path == "dataset.lock"
    assert found.place is not None
    assert found.place.line == line_of("sick_datasets.py", "self.lock = threading.Lock()")


def test_too_little_shared_memory_is_told_with_the_arithmetic(tmp_path: Path) -> None:
    """Zoo 9."""
    found = loading.shared_memory(8, 2, 10**15, tmp_path)
    assert found.level == "fault"
    assert found.cause == "shm_small"
    assert found.figures["need_bytes"] == 16e15
    assert loading.shared_memory(2, 2, 1000, tmp_path).level == "ok"
    assert loading.shared_memory(2, 2, 1000, tmp_path / "absent").level == "fault"


# ---------------------------------------------------------------- with workers


def test_sound_workers_give_batches(tmp_path: Path) -> None:
    found = one(tmp_path, "Well")
    assert found.level == "ok"
    assert "2 workers by fork: 12 batches" in found.what


def test_a_worker_that_hangs_is_named_by_line_and_item(tmp_path: Path) -> None:
    """Zoo 4."""
    found = one(tmp_path, "Hangs")
    assert found.cause == "worker_hang"
    assert found.culprit["line"] == line_of("sick_datasets.py", "# hangs here")
    assert (found.culprit["item"], found.culprit["worker"]) == (5, 1)


def test_a_worker_that_holds_the_gil_is_named_by_its_line(tmp_path: Path) -> None:
    """Zoo 5."""
    found = one(tmp_path, "HoldsGil")
    assert found.cause == "worker_gil"
    assert found.culprit["item"] == 5 or found.culprit["worker"] == 1
    assert found.culprit["line"] == line_of("sick_datasets.py", "# holds the GIL here")


def test_a_worker_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    """Zoo 1."""
    found = one(tmp_path, "Killed")
    assert found.cause == "worker_sigkill"
    assert "signal 9" in found.what
    assert found.culprit["worker"] == 1


def test_a_lock_that_was_held_across_fork_is_named_with_both_lines(tmp_path: Path) -> None:
    """Zoo 7."""
    found = one(tmp_path, "HoldsLock")
    assert found.cause == "fork_lock"
    assert found.culprit["line"] == line_of("sick_datasets.py", "# waits for the lock here")
    assert found.culprit["taken_line"] == line_of("sick_datasets.py", "# holds the lock here")


def test_a_lambda_stops_workers_by_spawn(tmp_path: Path) -> None:
    """Zoo 8."""
    assert one(tmp_path, "HasLambda", "spawn").cause == "spawn_pickle"


@LONG
def test_a_worker_that_exits_or_is_out_of_memory(tmp_path: Path) -> None:
    """Zoo 2 and 3."""
    left = one(tmp_path, "Exits")
    assert left.cause == "worker_exit"
    assert "code 3" in left.what
    full = one(tmp_path, "OutOfMemory")
    assert full.cause == "worker_oom"
    assert full.culprit["worker"] == 1


@LONG
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_sound_workers_by_the_other_methods(tmp_path: Path, method: str) -> None:
    assert one(tmp_path, "Well", method).level == "ok"
