"""Everything that is read back from a folder: damaged in two thousand ways, and each time named or passed over."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamplighter import own_stacks, read_back, report
from lamplighter.commands.runs import _row
from lamplighter.config import Budget, load_dump, resolve
from lamplighter.config.recorded import dump
from lamplighter.data import tokenizer
from lamplighter.data.cache_location import CacheLocation, find_fault, locked
from lamplighter.data.chat.template import own_template
from lamplighter.data.token_cache.reader import KIND, open_tokens
from lamplighter.errors import LampError
from lamplighter.procs import stacks
from lamplighter.procs.lock import is_held, open_lock
from lamplighter.rundir import (
    RunDir,
    identity,
    is_alive,
    is_running,
    newer_format,
    read_events,
    read_last_lines,
    read_lines,
    read_status,
    sealed,
    take_lock,
    verify_manifest,
    write_json,
    write_manifest,
)
from lamplighter.slot import SlotWriter, read_slot
from lamplighter.train import checkpoint
from lamplighter.train.anomalies.detector import Facts, recall
from lamplighter.watch import time_report
from lamplighter.watch.status import Observer, line, standing_flags, tell, tell_flags, tell_step
from mutations import mutate

EACH = 130
FLAG = {"cause": "plateau", "state": "waste", "why": "no progress", "next": "lower lr", "step": 4}


def status_of(run: RunDir) -> dict[str, Any]:
    return {"format": 1, "numerics": 2, "state": "finished", "verb": "train", "now": "step 8/8", "phase": "train", "step": 8, "steps": 8,
            "tokens": 1024, "tokens_per_s": 10.5, "loss": 3.2, "val_loss": None, "eta_s": None, "usd": 0.0, "durable_step": 8, "spent_s": 4.5,
            "flags": [FLAG], "ended_early": {"step": 8, "steps": 9, "since_best": 2, "best_step": 6, "why": "x"}, "last_progress_s": 0.1,
            "attempt": 1, "stall": "", "t": 1.7e9, **identity(), "child_pid": 4, "exit_code": 0, "outcome": "finished r"}  # fmt: skip


EVENTS: list[dict[str, Any]] = [
    {"type": "start", "t": 1.0, "attempt": 1, "began": 0.5, "verb": "train", "pid": 4},
    {"type": "hello", "t": 1.1, "pid": 5, "attempt": 1},
    {"type": "phase", "t": 1.2, "name": "cache", "state": "end", "path": "cache", "seconds": 0.5, "done": 9.0, "unit": "B"},
    {"type": "note", "t": 1.3, "text": "a note"},
    {"type": "warning", "t": 1.4, "text": "a warning"},
    {"type": "checkpoint", "t": 1.5, "step": 4, "path": "checkpoints/checkpoint-4", "bytes": 99, "seconds": 0.1, "blocked_s": 0.0},
    {"type": "eval", "t": 1.6, "step": 4, "text": "val 3.1"},
    {"type": "sample", "t": 1.7, "step": 4, "text": "It was\nnight"},
    {"type": "verdict", "t": 1.8, **FLAG, "action": "none", "evidence": ["a"], "culprit": {}, "since_s": 0.0, "waits_for": {}, "flag": True},
    {"type": "well again", "t": 1.9, "cause": "plateau", "step": 6, "since_step": 4},
    {"type": "flags", "t": 2.0, "standing": [FLAG]},
    {"type": "floor", "t": 2.1, "nats_per_token": 0.9},
    {"type": "error", "t": 2.2, "lines": ["error: x"], "code": 1},
    {"type": "ended early", "t": 2.3, "step": 8, "steps": 9, "since_best": 2, "best_step": 6, "why": "x"},
    {"type": "ledger", "t": 2.4, "attempt": 1, "final": True, "seconds": {"compute": 0.5}},
    {"type": "resumed", "t": 2.5, "step": 4, "redone_steps": 2},
    {"type": "child_end", "t": 2.6, "code": 0, "attempt": 1},
]  # fmt: skip
METRICS = [{"step": n, "attempt": 1, "t": 1.0, "train/loss": 3.0, "train/lr": 1e-3, "train/grad_norm": 1.0, "train/dt_ms": 9.0, "train/tok_per_sec": 9.0,
            "train/data_wait_ms": 1.0, **({"eval/val_loss": 3.1} if n == 4 else {})} for n in range(1, 9)]  # fmt: skip


STACKS = json.loads(own_stacks.answer_as_json(threading.main_thread().ident or 0))


def lines_of(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


# ---------------------------------------------------------------- what each file is read by


def look_at_status(run: RunDir) -> None:
    status = read_status(run)
    assert _row({**status, "run": "r", "state": "x", "age_s": 1.0}).count("\n") == 1
    tell_flags(standing_flags(status))
    is_running(run)


def look_at_lock(run: RunDir) -> None:
    is_alive(read_back.read_object(run.lock, read_back.HOLDER)[0])
    os.close(take_lock(run))


def look_at_cache_lock(run: RunDir) -> None:
    with locked(run.path):
        assert not is_held(run.path / "elsewhere")


def look_at_events(run: RunDir) -> None:
    times = time_report.read_time_report(run)
    assert time_report.lines(times, Budget())
    assert time_report.write_report(run, times, Budget(), "finished", {}) == ""
    observer = Observer(run, [run.events], Budget())
    observer.events[0].offset = 0
    for _, event in observer.look(None, None, 0.0, 0.0):
        for text, _ in tell(event):
            assert isinstance(text, str)
    assert isinstance(line(observer.status), str)


def look_at_metrics(run: RunDir) -> None:
    observer = Observer(run, [run.events], Budget())
    observer.metrics.offset = 0
    observer.look(None, None, 0.0, 0.0)
    assert all(isinstance(tell_step(record), str) for record in observer.fresh)
    recall(Facts(vocab_size=257, steps=8, warmup=2, peak_lr=1e-3), run, 8)


def look_at_best(run: RunDir) -> None:
    found = checkpoint.best_of(run.checkpoints)
    assert found is None or (found[0] >= 0 and isinstance(found[1], float))
    read_back.read_object(run.checkpoints / "latest.json", read_back.LATEST)


def look_at_state(run: RunDir) -> None:
    folder = run.checkpoint(4)
    write_manifest(folder, step=4)  # the damage is not found by its checksum
    with contextlib.suppress(LampError):
        state = checkpoint.read_state(folder)
        names = checkpoint.Progress.__dataclass_fields__
        progress = checkpoint.Progress(**{name: state[name] for name in names if name in state})
        assert progress.step >= 0
        progress.scored(9, 1.0)


def look_at_manifest(run: RunDir) -> None:
    folder = run.checkpoint(4)
    if verify_manifest(folder) is None:  # then only its spaces differ
        assert json.loads((folder / "manifest.json").read_bytes()) == json.loads(GOOD["manifest"])
    assert newer_format(folder) is None


def look_at_config(run: RunDir) -> None:
    with contextlib.suppress(LampError):
        assert load_dump(run.config).train.batch_size > 0


def look_at_request(run: RunDir) -> None:
    who, _ = read_back.read_object(run.ask / "x.stop", read_back.HOLDER)
    assert f"process {who.get('pid', '?')} on {who.get('host', '?')}"


def look_at_slot(run: RunDir) -> None:
    found = read_slot(run.slots / "x.slot")
    assert found is None or isinstance(found.phase, str)


def look_at_stacks(run: RunDir) -> None:
    found = stacks._answer(run.slots / "x.slot", 7, 0.0)
    assert found is None or isinstance(found.text(), str)


def look_at_tokenizer(run: RunDir) -> None:
    with contextlib.suppress(LampError):
        found = tokenizer.load(run.path / "tok")
        own_template(found.files)


def look_at_cache(run: RunDir) -> None:
    folder = run.path / "cache"
    fault = find_fault(folder, KIND)
    parts = {"tokenizer": {"fingerprint": "z", "content": "c"}}
    assert isinstance(CacheLocation(run.path, KIND, parts).near, str)
    with contextlib.suppress(LampError):
        tokens = open_tokens(folder)
        assert fault is None
        assert tokens.train.read(0, len(tokens.train)).tolist() == [256, 1, 2, 3]


GOOD: dict[str, bytes] = {}


def write_all(run: RunDir) -> dict[str, tuple[Path, Callable[[RunDir], None]]]:
    """A folder with one of each, and who reads it."""
    run.create()
    write_json(run.status, status_of(run))
    write_json(run.lock, {**identity(), "t": 1.0})
    write_json(run.path / "lock", {**identity(), "t": 1.0})
    run.events.write_bytes(lines_of(EVENTS))
    run.rank_events(0).write_bytes(lines_of(EVENTS))
    run.metrics.write_bytes(lines_of(METRICS))
    for name in ("latest", "best"):
        write_json(run.checkpoints / f"{name}.json", {"step": 4, "val_loss": 3.1, "path": "checkpoint-4", "t": 1.0})
    folder = run.checkpoint(4)
    (folder / "training").mkdir(parents=True)
    state = {"format": 1, "numerics": 2, **asdict(checkpoint.Progress(4, 512, 3.1)), "machine": {"device": "cpu"}, "cache": "c", "seed": 1,
             "steps": 8, "compiled": False, "t": 1.0}  # fmt: skip
    write_json(folder / "training" / "state.json", state)
    write_manifest(folder, step=4)
    run.config.write_text(dump(resolve("demo")))
    write_json(run.ask / "x.stop", {**identity(), "t": 1.0})
    SlotWriter().publish(str(run.slots / "x"))
    write_json(run.slots / "x.stacks.json", {"id": 7, "answer": STACKS})
    (run.path / "tok").mkdir()
    tokenizer.byte_level().save(run.path / "tok")
    cache = run.path / "cache"
    cache.mkdir()
    np.array([1, 2, 3], "<u2").tofile(cache / "train-00000.bin")
    side = {"tokens": 4, "documents": 1, "text_bytes": 3, "shards": [{"file": "train-00000.bin", "tokens": 3}]}
    none = {"tokens": 0, "documents": 0, "text_bytes": 0, "shards": []}
    manifest = {"format": KIND.format, "parts": {"tokenizer": {"fingerprint": "a", "content": "b"}}, "vocab_size": 257, "end_of_text": 256,
                "dtype": "<u2", "divided_by": "documents", "empty_documents": 0, "splits": {"train": side, "val": none},
                "files": {"train-00000.bin": {"bytes": 6, "sha256": "0"}}}  # fmt: skip
    write_json(cache / "manifest.json", sealed(manifest))
    return {
        "status": (run.status, look_at_status),
        "lock": (run.lock, look_at_lock),
        "cache lock": (run.path / "lock", look_at_cache_lock),
        "events": (run.events, look_at_events),
        "rank events": (run.rank_events(0), look_at_metrics),
        "metrics": (run.metrics, look_at_metrics),
        "latest": (run.checkpoints / "latest.json", look_at_best),
        "best": (run.checkpoints / "best.json", look_at_best),
        "state": (folder / "training" / "state.json", look_at_state),
        "manifest": (folder / "manifest.json", look_at_manifest),
        "config": (run.config, look_at_config),
        "request": (run.ask / "x.stop", look_at_request),
        "slot": (run.slots / "x.slot", look_at_slot),
        "stacks": (run.slots / "x.stacks.json", look_at_stacks),
        "tokenizer": (run.path / "tok" / "tokenizer.json", look_at_tokenizer),
        "tokenizer config": (run.path / "tok" / "tokenizer_config.json", look_at_tokenizer),
        "cache": (cache / "manifest.json", look_at_cache),
    }


NAMES = ["status", "lock", "cache lock", "events", "rank events", "metrics", "latest", "best", "state", "manifest", "config", "request", "slot", "stacks",
         "tokenizer", "tokenizer config", "cache"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_damage_of_any_kind_is_named_or_passed_over(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No exception but our own, no long wait, no code: the numbers of the run are the seed."""
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "r")
    path, look = write_all(run)[name]
    whole = path.read_bytes()
    GOOD["manifest"] = (run.checkpoint(4) / "manifest.json").read_bytes()
    look(run)
    few = 40 if name in ("config", "tokenizer") else EACH  # these take longer to read
    for seed in range(few):
        damaged = mutate(whole, random.Random(f"{name} {seed}"))
        path.write_bytes(damaged)
        began = time.process_time()
        try:
            look(run)
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}: {damaged[:300]!r}") from error
        assert time.process_time() - began < 5, f"{name}, seed {seed}"
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- things that are no files, and files that are too large


@pytest.mark.parametrize(
    "name", ["status", "lock", "events", "metrics", "best", "state", "manifest", "config", "request", "cache"]
)
def test_a_pipe_in_place_of_a_file_is_never_waited_for(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path / "r")
    path, look = write_all(run)[name]
    path.unlink()
    os.mkfifo(path)
    with contextlib.suppress(LampError):
        look(run)


def test_the_damage_is_said_in_words(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_status(run)["damage"] == ""
    os.mkfifo(run.status)
    assert read_status(run)["damage"] == "status.json is a named pipe, not a file"
    run.status.unlink()
    run.status.write_text('{"step": "x", "state": "finished"}')
    found = read_status(run)
    assert found["damage"] == "status.json is damaged: step is not a whole number from 0 on"
    assert (found["state"], "step" in found) == ("finished", False)
    run.status.write_text("[1]")
    assert "not a JSON object" in read_status(run)["damage"]


def test_a_huge_status_is_refused_before_it_is_read(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with open(run.status, "wb") as file:
        file.truncate(150 << 20)
    began = time.process_time()
    assert "157.3 MB" in read_status(run)["damage"]
    assert time.process_time() - began < 0.05


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_back, "LINE_BYTES", 1000)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": "' + b"x" * 5000 + b'"}\n{"b": 1}\n')
    assert {"b": 1} in list(read_lines(path))
    assert {"b": 1} in list(read_last_lines(path))


def test_locks_and_logs_are_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(OSError, match="named pipe"):
        open_lock(tmp_path / "lock")
    assert not is_held(tmp_path / "lock")


def test_events_that_lack_what_they_need_are_left_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.events.write_bytes(
        lines_of([*EVENTS, {"type": "note", "t": 3.0}, {"type": "eval", "t": 3.0, "step": -1, "text": "x"}, {"t": 1}])
    )
    assert len(list(read_events(run))) == len(EVENTS)


def test_every_flipped_bit_of_a_cache_manifest_is_found(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    path, _ = write_all(run)["cache"]
    whole = path.read_bytes()
    assert find_fault(path.parent, KIND) is None
    for bit in range(0, 8 * len(whole), 29):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        if find_fault(path.parent, KIND) is None:  # the name of the checksum itself is lost, or a space is another
            assert open_tokens(path.parent).train.read(0, 4).tolist() == [256, 1, 2, 3]
            assert b'"check"' not in flipped or json.loads(flipped) == json.loads(whole)


def test_requests_that_are_none_leave_the_listener_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real-time signal with a handler arrives in the same pipe; its number was taken for the beginning of a request."""
    heard: list[str] = []
    monkeypatch.setattr(report, "_answer", heard.append)
    reading, writing = os.pipe()
    os.write(writing, bytes([34, 10, 64]) + b"stop now\n" + bytes([50]) + b"stacks x\nnonsense\n")
    os.close(writing)
    given = iter([os.read(reading, 4096)])

    def read(_: int, __: int) -> bytes:
        return next(given)

    monkeypatch.setattr(os, "read", read)
    with pytest.raises(StopIteration):
        report._answer_all(0, set())
    assert heard == ["stop now", "stacks x", "nonsense"]


def test_an_unreadable_number_is_no_request(tmp_path: Path) -> None:
    report._answer("stacks x")
    report._answer("stacks \u00b2")
