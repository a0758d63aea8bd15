"""Followers of a run, in this process: each step once and in order, whatever became of the run and of the follower."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from lamplighter.config import Track
from lamplighter.errors import InputMissing
from lamplighter.watch.trackers import follower as follower_module
from lamplighter.watch.trackers.follower import Follower, TrackerState, read_evaluation, read_state
from lamplighter.watch.trackers.following import SILENT_S, _silence, setting_of
from lamplighter.watch.trackers.history import Branch, RunHistory, TrackerEntry
from lamplighter.watch.trackers.writers import Setting
from tracked import (
    assert_same,
    merge,
    read_csv,
    read_tensorboard,
    read_trackio,
    record,
    validation,
    write_killed_run,
)


def _follower(run_path: Path, tracker: str = "csv") -> Follower:
    from lamplighter.rundir import RunDir

    run = RunDir(run_path)
    return Follower(run, tracker, Setting(run.name, run.path / "track" / tracker), lambda _: None)


def _send_all(one: Follower) -> Follower:
    for _ in one.follow(until_end=False):
        pass
    assert one.complete, one.now.problem
    return one


def test_steps_that_were_redone_alike_are_sent_once_and_others_begin_a_linked_run() -> None:
    history = RunHistory()
    sent: list[Branch | TrackerEntry] = []
    for line in (record(1, 1), record(2, 1), validation(2, 1), record(2, 2), validation(2, 2), record(3, 2), record(3, 3, seed=9), record(4, 3)):  # fmt: skip
        sent += history.take(line)
    steps = [(one.branch, one.step) for one in sent if isinstance(one, TrackerEntry)]
    assert steps == [(1, 1), (1, 2), (1, 2), (1, 3), (2, 3), (2, 4)]
    assert [(one.number, one.from_step) for one in sent if isinstance(one, Branch)] == [(2, 3)]


def test_a_loss_that_is_not_finite_is_a_result_like_any_other() -> None:
    history = RunHistory()
    lost = {**record(1, 1), "train/loss": None}
    (first,) = history.take(lost)
    assert isinstance(first, TrackerEntry) and math.isnan(first.values["train/loss"])
    assert history.take({**lost, "attempt": 2, "train/dt_ms": 1.0}) == []
    assert isinstance(history.take(record(1, 3))[0], Branch)


def test_an_evaluation_of_an_earlier_step_is_late() -> None:
    history = RunHistory()
    for step in range(1, 6):
        history.take(record(step, 1))
    (late,) = history.take(validation(2, 1))
    (now,) = history.take(validation(5, 1))
    assert isinstance(late, TrackerEntry) and late.late and isinstance(now, TrackerEntry) and not now.late


def test_lines_that_are_no_records_are_passed_over() -> None:
    history = RunHistory()
    for wrong in (
        {},
        {"step": -1, "train/loss": 1.0},
        {"step": 1},
        {"step": 1, "train/loss": "x"},
        {"step": True, "train/loss": 1},
    ):
        assert history.take(wrong) == []


def test_a_killed_run_reads_back_from_csv_as_it_was(tmp_path: Path) -> None:
    run = write_killed_run(tmp_path / "r")
    one = _send_all(_follower(run.path))
    folders = [run.path / "track" / "csv" / name for name in ("r", "r~2", "r~3")]
    assert one.now.branch == 3 and not (run.path / "track" / "csv" / "r~4").exists()
    assert_same(merge([read_csv(folder) for folder in folders]), run)
    texts = (folders[0] / "texts.csv").read_text()
    assert "a <b>sample</b>" in texts and "deadlock" in texts + (folders[2] / "texts.csv").read_text()
    linked = json.loads((folders[1] / "config.json").read_text())["lamp"]
    assert linked["continues"] == "r" and linked["from_step"] == 195


def test_a_killed_run_reads_back_from_tensorboard_as_it_was(tmp_path: Path) -> None:
    run = write_killed_run(tmp_path / "r")
    _send_all(_follower(run.path, "tensorboard"))
    read = [read_tensorboard(run.path / "track" / "tensorboard" / name) for name in ("r", "r~2", "r~3")]
    assert_same(merge([points for points, _ in read]), run, digits=6)  # TensorBoard keeps 32 bits
    assert {"text/sample", "text/alert"} <= {tag for _, tags in read for tag in tags}


@pytest.mark.parametrize("tracker", ["csv", "tensorboard"])
def test_a_follower_that_is_killed_leaves_nothing_twice(
    tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its kills comes after something was written and before that was marked as safe."""
    run = write_killed_run(tmp_path / "r", steps=120, kills=3)
    monkeypatch.setattr(follower_module, "_LINES_AT_ONCE", 17)
    for kill in range(12):
        one = _follower(run.path, tracker)
        for _ in range(kill % 3):
            one._send_some()
        for _ in range(5):  # written, flushed, and never marked
            one._send_metrics()
            if one.writer is not None:
                one.writer.mark()
        assert read_state(run, tracker).lines <= one.sent.lines
    _send_all(_follower(run.path, tracker))
    folder = run.path / "track" / tracker
    read = [read_csv(path) if tracker == "csv" else read_tensorboard(path)[0] for path in sorted(folder.glob("r*"))]
    assert_same(merge(read), run, digits=6)


def test_a_run_that_went_on_is_gone_on_with(tmp_path: Path) -> None:
    run = write_killed_run(tmp_path / "r", steps=60, kills=2)
    before = _send_all(_follower(run.path))
    assert _send_all(_follower(run.path)).now.entries == before.now.entries, "nothing new, nothing sent"
    run.metrics.write_text(run.metrics.read_text().rpartition("\n")[0] + "\n" + json.dumps(record(61, 9)) + "\n")
    after = _send_all(_follower(run.path))
    assert after.now.entries == before.now.entries + 1 and after.now.step == 61 and after.now.ids == before.now.ids
    assert_same(merge([read_csv(path) for path in sorted((run.path / "track" / "csv").glob("r*"))]), run)


def test_a_tracker_that_fails_is_tried_again_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_killed_run(tmp_path / "r", steps=60, kills=2)
    from lamplighter.watch.trackers.writers import Csv

    failures, log = [1], Csv.log

    def sometimes(self: Csv, entry: TrackerEntry) -> None:
        if entry.step == 30 and failures:
            raise ConnectionError(f"refused {failures.pop()}")
        log(self, entry)

    monkeypatch.setattr(Csv, "log", sometimes)
    said: list[str] = []
    one = Follower(run, "csv", Setting("r", run.path / "track" / "csv"), said.append)
    _send_all(one)
    assert sum("refused 1" in line for line in said) == 1 and any("works again" in line for line in said)
    assert_same(merge([read_csv(path) for path in sorted((run.path / "track" / "csv").glob("r*"))]), run)


def test_an_evaluation_that_was_given_and_not_marked_is_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_killed_run(tmp_path / "r", steps=60, kills=2)
    from lamplighter.watch.trackers.writers import Csv

    failures, given, mark, log = [1], [], Csv.mark, Csv.log

    def note(self: Csv, entry: TrackerEntry) -> None:
        given.extend(name for name in entry.values if "hellaswag" in name)
        log(self, entry)

    def sometimes(self: Csv) -> dict[str, object]:
        if given and failures:
            raise ConnectionError(f"refused {failures.pop()}")
        return mark(self)

    monkeypatch.setattr(Csv, "log", note)
    monkeypatch.setattr(Csv, "mark", sometimes)
    _send_all(_follower(run.path))
    read = merge([read_csv(path) for path in sorted((run.path / "track" / "csv").glob("r*"))])
    assert_same(read, run)
    assert ("eval/hellaswag/acc_norm", 15) in read and not failures


@pytest.mark.parametrize("tracker", ["csv", "tensorboard"])
@pytest.mark.parametrize("gone", ["", "r", "r~3"])
def test_output_that_was_removed_is_written_again_and_that_is_said(tmp_path: Path, tracker: str, gone: str) -> None:
    run = write_killed_run(tmp_path / "r", steps=120, kills=3)
    before = _send_all(_follower(run.path, tracker)).now.entries
    folder = run.path / "track" / tracker
    shutil.rmtree(folder / gone)
    said: list[str] = []
    again = _send_all(Follower(run, tracker, Setting("r", folder), said.append))
    assert again.now.entries == before and sum("no longer there" in line for line in said) == 1
    read = [read_csv(path) if tracker == "csv" else read_tensorboard(path)[0] for path in sorted(folder.glob("r*"))]
    assert len(read) == 3
    assert_same(merge(read), run, digits=6)
    said.clear()
    _send_all(Follower(run, tracker, Setting("r", folder), said.append))
    assert not any("no longer there" in line for line in said)


def test_what_trackio_does_not_store_is_not_marked_as_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It only warns of a failed write, and goes on."""
    from trackio import sqlite_storage

    from lamplighter.watch.trackers import writers

    patience_s = writers._STORED_S
    monkeypatch.setattr(writers, "_STORED_S", 0.1)
    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    stores, run = [False], write_killed_run(tmp_path / "r", steps=20, kills=1)
    bulk_log = sqlite_storage.SQLiteStorage.bulk_log

    def sometimes(*given: object, **named: object) -> object:
        if not stores[0]:
            raise OSError("no space left on the device")
        return bulk_log(*given, **named)

    monkeypatch.setattr(sqlite_storage.SQLiteStorage, "bulk_log", staticmethod(sometimes))
    said: list[str] = []
    one = Follower(run, "trackio", Setting("r", run.path / "track" / "trackio"), said.append)
    with pytest.warns(UserWarning, match="no space left"):
        assert not list(one.follow(until_end=False)) and not one.complete
    assert len(said) == 1 and "are not in" in said[0]
    kept = read_state(run, "trackio")
    assert not kept.done and kept.lines == 0 and kept.entries == 0
    stores[0] = True
    monkeypatch.setattr(writers, "_STORED_S", patience_s)
    _send_all(_follower(run.path, "trackio"))
    names = ("r", "r~2", "r~3")
    assert_same(merge([read_trackio(tmp_path / "trackio" / "lamplighter.db", name)[0] for name in names]), run)


def test_a_place_where_trackio_cannot_store_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trackio import sqlite_storage

    (tmp_path / "plain").write_text("")
    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "plain")
    run, said = write_killed_run(tmp_path / "r", steps=20, kills=1), []
    one = Follower(run, "trackio", Setting("r", run.path / "track" / "trackio"), said.append)
    assert not list(one.follow(until_end=False)) and not one.complete
    assert len(said) == 1 and "plain" in said[0] and not read_state(run, "trackio").done


def test_a_library_that_is_not_installed_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_killed_run(tmp_path / "r", steps=20, kills=1)
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    said: list[str] = []
    one = Follower(run, "wandb", Setting("r", run.path / "track" / "wandb"), said.append)
    assert not list(one.follow(until_end=False)) and not one.complete
    assert len(said) == 1 and "pip install" in said[0]
    assert "not installed" in read_state(run, "wandb").problem
    from lamplighter.watch.trackers.writers import open_writer

    with pytest.raises(InputMissing):
        open_writer("wandb", Setting("r", tmp_path), {})


def test_lines_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    run = write_killed_run(tmp_path / "r", steps=20, kills=1)
    run.metrics.write_text("garbage\n\n\x00\x00\n" + run.metrics.read_text())
    said: list[str] = []
    _send_all(Follower(run, "csv", Setting("r", run.path / "track" / "csv"), said.append))
    assert [line for line in said if "cannot be read" in line] == [
        "csv: 2 lines of metrics.jsonl cannot be read and are left out"
    ]


def test_a_damaged_state_or_evaluation_harms_nobody(tmp_path: Path) -> None:
    run = write_killed_run(tmp_path / "r", steps=20, kills=1)
    (run.path / "track").mkdir()
    (run.path / "track" / "csv.json").write_text('{"lines": "many", "marks": [], "step": 3')
    for name, text in (("a", "[]"), ("b", '{"step": "x"}'), ("c", '{"step": 1, "scores": [{"name": 3}]}')):
        (run.path / "evaluations" / f"{name}.json").write_text(text)
        assert read_evaluation(run.path / "evaluations" / f"{name}.json") is None
    _send_all(_follower(run.path))
    assert read_state(run, "csv").done


def test_silence_is_told_after_a_while_and_secrets_stay_here(tmp_path: Path) -> None:
    import time

    assert not _silence(TrackerState("wandb", doing="opening wandb", since=time.time()))
    assert "opening wandb for" in _silence(
        TrackerState("wandb", doing="opening wandb", since=time.time() - SILENT_S - 1)
    )
    run = write_killed_run(tmp_path / "r", steps=20, kills=1)
    from lamplighter.config import dump, resolve

    resolved = resolve("demo", None, {"watch.notify": ["https://hooks.slack.com/services/T/B/geheim"]})
    run.config.write_text(dump(resolved))
    assert "geheim" not in json.dumps(setting_of(run, Track()).config)
