"""Run folder: atomic files, lock, manifests, identity."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

import pytest

from lamplighter import rundir
from lamplighter.commands.checkpoints import _table
from lamplighter.commands.session import scratch_folder
from lamplighter.config import Budget
from lamplighter.errors import AlreadyRunning, CannotWrite
from lamplighter.procs import lock
from lamplighter.rundir import RunDir
from lamplighter.watch.time_report import lines, read_time_report


def test_a_live_heartbeat_from_another_host_counts_and_an_old_one_does_not(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create()
    rundir.write_json(run.status, {"host": "elsewhere", "state": "running", "pid": 1})
    with pytest.raises(AlreadyRunning):
        rundir.take_lock(run)
    old = time.time() - 60
    os.utime(run.status, (old, old))
    assert rundir.take_lock(run) > 0


def test_a_folder_in_the_place_of_a_file_is_kept_and_the_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "latest.json").mkdir()
    (tmp_path / "latest.json" / "mine").write_text("kept")
    rundir.write_json(tmp_path / "latest.json", {"step": 1})
    assert rundir.read_json(tmp_path / "latest.json") == {"step": 1}
    assert (tmp_path / "latest.json.1" / "mine").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "latest.json.1"]


def test_the_folder_of_a_killed_command_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    long_ago = time.time() - 3600
    for name in ("lamp-eval-killed01", "lamp-eval-justmade", "lamp-serve-running1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        if not name.endswith("justmade"):
            os.utime(tmp_path / name / "lock", (long_ago, long_ago))
    for name in ("lamp-crash-keptlogs", "lamp-of-somebody"):  # no command's: they hold no lock
        (tmp_path / name).mkdir()
    running = lock.hold(tmp_path / "lamp-serve-running1" / "lock")
    assert running is not None
    run, held = scratch_folder("eval")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        run.path.name,
        "lamp-eval-justmade",
        "lamp-serve-running1",
        "lamp-crash-keptlogs",
        "lamp-of-somebody",
    }
    assert lock.is_held(run.lock)
    for fd in (running, held):
        os.close(fd)


def test_dollars_have_as_many_digits_as_say_something() -> None:
    amounts = {
        1234.5: "$1,234.50",
        0.42: "$0.42",
        0.042: "$0.042",
        0.00018: "$0.00018",
        0.0: "$0.00",
        1e-12: "$0.000000000",
    }
    assert {amount: rundir.dollars(amount) for amount in amounts} == amounts


def test_a_manifest_of_an_earlier_version_still_finds_damage(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    entry = {"bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    rundir.write_json(tmp_path / "manifest.json", {"step": 1, "files": {"model.bin": entry}})
    assert rundir.verify_manifest(tmp_path) is None
    (tmp_path / "model.bin").write_bytes(b"wrights")
    assert rundir.verify_manifest(tmp_path) == "model.bin does not match its checksum"


def test_a_manifest_finds_every_kind_of_damage(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    (folder / "training").mkdir(parents=True)
    (folder / "model.bin").write_bytes(bytes(range(256)) * 100)
    (folder / "training" / "state.json").write_text("{}")
    assert "missing" in str(rundir.verify_manifest(folder))
    rundir.write_manifest(folder, step=1)
    assert rundir.verify_manifest(folder) is None
    whole = (folder / "model.bin").read_bytes()
    (folder / "model.bin").write_bytes(whole[:-1])
    assert "25,599 bytes, expected 25,600" in str(rundir.verify_manifest(folder))
    flipped = bytearray(whole)
    flipped[777] ^= 1
    (folder / "model.bin").write_bytes(flipped)
    assert "checksum" in str(rundir.verify_manifest(folder))
    assert rundir.verify_manifest(folder, deep=False) is None
    (folder / "model.bin").unlink()
    assert "model.bin is missing" in str(rundir.verify_manifest(folder))
    (folder / "manifest.json").write_text('{"files"')
    assert "damaged" in str(rundir.verify_manifest(folder))


def test_events_without_end_are_read_from_their_newest_part(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with open(run.events, "wb") as file:
        file.write(b'{"type":"start","t":1,"began":1,"attempt":1}\n')
        file.truncate(8 << 30)  # nothing of it is on the disk
        file.seek(0, 2)
        file.write(b'\n{"type":"start","t":101,"began":100,"attempt":7}\n{"type":"stop","t":103}\n')
    began = time.monotonic()
    assert rundir.last_attempt(run) == 7
    times = read_time_report(run)
    assert time.monotonic() - began < 2.5
    assert times.attempts == 1 and times.wall_s == 3
    assert "without the oldest 8.5 GB of events.jsonl, which are too many to read" in lines(times, Budget())
    run.events.write_text('{"type":"start","t":1,"attempt":1}\n{"type":"start","t":2,"attempt":5}\n{"typ')
    assert rundir.last_attempt(run) == 2, "counted where all of them are there"
    assert read_time_report(run).unread_bytes == 0
    assert rundir.last_attempt(RunDir(tmp_path / "none")) == 0


def test_of_the_ledgers_of_an_attempt_the_last_is_read(tmp_path: Path) -> None:
    run, at = RunDir(tmp_path), 100.0
    with open(run.events, "w") as file:
        for attempt in (1, 2):
            told = [("start", {"began": at}), ("hello", {}), *[("ledger", {"seconds": {"compute": n}}) for n in range(50_000)],
                    ("note", {"text": "x"}), ("child_end", {}), ("stop", {})]  # fmt: skip
            for kind, more in told:
                file.write(json.dumps({"type": kind, "t": (at := at + 1), "attempt": attempt, **more}) + "\n")
        file.write('{"type": "ledger", "t": 1')  # torn
    kinds = [event["type"] for event in rundir.read_events(run)]
    assert kinds == 2 * ["start", "hello", "note", "ledger", "child_end", "stop"]
    times = read_time_report(run)
    assert times.seconds["compute"] == 2 * 49_999 and times.attempts == 2


def test_times_of_a_rank_that_goes_on_are_counted_once(tmp_path: Path) -> None:
    """Rank 1 dies after 100 s, is waited for until 101 and comes back at 103, when 0 has gone on; each attempt has its own times."""
    run = RunDir(tmp_path)
    told: list[tuple[str, float, dict[str, object]]] = [
        ("start", 0, {"began": 0, "attempt": 1}), ("hello", 1, {"rank": 0, "attempt": 1}), ("hello", 2, {"rank": 1, "attempt": 1}),
        ("ledger", 98, {"rank": 0, "attempt": 1, "seconds": {"compute": 97}}), ("child_end", 100, {"attempt": 1}),
        ("start", 100, {"began": 100, "attempt": 2}), ("ledger", 101, {"rank": 0, "attempt": 1, "seconds": {"compute": 99, "ranks": 1}}),
        ("hello", 101, {"rank": 0, "attempt": 2}), ("start", 102, {"began": 102, "attempt": 3}),
        ("hello", 102.5, {"rank": 1, "attempt": 3}), ("ledger", 103, {"rank": 0, "attempt": 2, "seconds": {"compute": 2}}),
        ("hello", 103, {"rank": 0, "attempt": 3}), ("ledger", 203, {"rank": 0, "attempt": 3, "seconds": {"compute": 100}, "final": True}),
        ("child_end", 203, {"attempt": 3}), ("stop", 203, {}),
    ]  # fmt: skip
    run.events.write_text("".join(json.dumps({"type": kind, "t": t, **more}) + "\n" for kind, t, more in told))
    times = read_time_report(run)
    assert times.wall_s == 203 and times.attempts == 3 and times.unexplained_s == 0
    assert {name: s for name, s in times.seconds.items() if s} == {
        "compute": 201,
        "ranks": 1,
        "start of the process": 1,
    }


def test_only_whole_lines_of_the_newest_part_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a":1}\n{"a":2}\n{"a":3}\n')
    assert [list(rundir.read_lines(path, most)) for most in (7, 8, 9, 16, 24)] == [
        [], [{"a": 3}], [{"a": 3}], [{"a": 2}, {"a": 3}], [{"a": 1}, {"a": 2}, {"a": 3}],
    ]  # fmt: skip


def test_move_aside_takes_the_first_free_number(tmp_path: Path) -> None:
    for expected in ("demo.1", "demo.2"):
        (tmp_path / "demo").mkdir()
        assert rundir.move_aside(tmp_path / "demo").name == expected


def test_a_folder_that_cannot_be_made_is_said_in_three_lines(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite) as caught:
        RunDir(tmp_path / "file" / "run").create()
    assert caught.value.code == 73
    assert len(caught.value.lines()) == 3


def test_identity_names_a_process_for_ever() -> None:
    me = rundir.identity()
    assert rundir.is_alive(me)
    assert not rundir.is_alive({**me, "pid_start": me["pid_start"] - 1})
    assert not rundir.is_alive({**me, "boot_id": "another boot"})


def test_the_table_of_checkpoints_recommends_the_newest_valid_one() -> None:
    sizes = {"loss": 1.0, "val_loss": None, "bytes": 10, "age_s": 5.0, "best": False}
    good = {**sizes, "checkpoint": "checkpoint-4", "valid": True, "reason": None}
    torn = {**sizes, "checkpoint": "checkpoint-8", "valid": False, "reason": "model.safetensors is cut short"}
    run = RunDir(Path("runs/a"))
    assert _table(run, [good, torn]).splitlines()[-1] == "next: lamp generate a --checkpoint checkpoint-4"
    assert "none of them is valid" in _table(run, [torn]).splitlines()[-1]
