"""What people read: words that are safe, change, and do not block the speaker."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from lamplighter.commands import child_main
from lamplighter.config import Budget
from lamplighter.data import tokenizer
from lamplighter.procs.procfs import ProcessLook
from lamplighter.procs.stacks import Frame, ThreadStack, culprit
from lamplighter.rundir import RunDir
from lamplighter.safe_text import clean
from lamplighter.slot import Slot
from lamplighter.watch import status
from lamplighter.watch.console import Console
from lamplighter.watch.status import Observer, Status, Tail, duration, line, sparkline, tell
from lamplighter.watch.time_report import read_time_report


def test_text_from_models_cannot_steer_the_terminal() -> None:
    assert clean("a\x1b[2Jb\r\x07\u202ec") == "a\\x1b[2Jb\\r\\x07\\u202ec"
    event = {"type": "sample", "step": 3, "text": "one\x1b[31m\ntwo"}
    assert all("\x1b" not in text for text, _ in tell(event))


@pytest.mark.parametrize(("seconds", "text"), [(0.31, "0.3 s"), (42.7, "42 s"), (75, "1:15"), (3725, "1:02:05")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_sparkline_has_the_shape_of_the_curve() -> None:
    assert sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert len(sparkline(range(1000), 40)) == 40
    assert sparkline([1.0], 10) == ""


def test_the_sentence_of_a_stopped_process_says_how_to_go_on() -> None:
    picture = Status("r", slot=Slot(phase="train", step=3, steps=9), process=ProcessLook(77, "T"))
    assert "the process is stopped" in line(picture)
    assert "kill -CONT 77" in line(picture)


def test_a_reader_that_stops_reading_does_not_stop_the_speaker(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    console = os.open(tmp_path / "console.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    voice = Console(writing, live=False, log_fd=console)
    started = time.monotonic()
    for number in range(5000):
        voice.say(f"line {number} " + "x" * 80)
    assert time.monotonic() - started < 5
    assert voice.stream.lost > 0
    assert (tmp_path / "console.log").read_text().count("\n") == 5000
    deadline = time.monotonic() + 6
    while "blocked" not in (tmp_path / "console.log").read_text() and time.monotonic() < deadline:
        voice.show(Status("r"))
        time.sleep(0.05)
    assert "output is blocked" in (tmp_path / "console.log").read_text()
    os.close(reading)
    voice.close()


def test_a_tail_hands_out_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    tail = Tail(path)
    assert tail.records() == []
    with open(path, "ab", buffering=0) as file:
        file.write(b'{"a": 1}\n{"b"')
        assert tail.records() == [{"a": 1}]
        file.write(b": 2}\n")
        assert tail.records() == [{"b": 2}]
        file.write(b'{"torn\n{"c": 3}\n')
        assert tail.records() == [{"c": 3}]


def test_the_events_of_all_ranks_are_heard_with_their_rank(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    observer = Observer(run, [run.rank_events(rank) for rank in range(3)], Budget())
    for rank in (2, 0):
        run.rank_events(rank).write_text(f'{{"type": "note", "t": 1, "text": "rank {rank}"}}\n')
    assert [(rank, event["text"]) for rank, event in observer.look(None, None, 0.0, 0.0)] == [
        (0, "rank 0"),
        (2, "rank 2"),
    ]


def test_the_culprit_is_the_users_innermost_line() -> None:
    frames = (
        Frame("/usr/lib/python3.11/socket.py", 5, "recv"),
        Frame("/home/me/data.py", 88, "read"),
        Frame("/home/me/train.py", 3, "main"),
    )
    assert culprit(ThreadStack("MainThread", frames)) == frames[1]
    assert culprit(ThreadStack("MainThread", frames[:1])) == frames[0]
    assert culprit(ThreadStack("MainThread", ())) is None


def test_the_ledger_adds_up_over_attempts_and_counts_what_was_redone(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    run.events.write_text(
        '{"type":"start","t":101,"began":100}\n{"type":"hello","t":102}\n{"type":"ledger","t":110,"final":false,"seconds":{"compute":7}}\n'
        '{"type":"child_end","t":112}\n{"type":"stop","t":112}\n'
        '{"type":"start","t":201,"began":200}\n{"type":"hello","t":202}\n{"type":"resumed","t":203,"redone_steps":2}\n{"type":"ledger","t":220,"final":true,"seconds":{"compute":17}}\n'
        '{"type":"child_end","t":221}\n{"type":"stop","t":222}\n'
    )
    found = read_time_report(run)
    assert (found.attempts, found.redone_steps) == (2, 2)
    assert found.wall_s == 12 + 22
    assert found.seconds["compute"] == 24
    assert found.seconds["the last seconds before a kill"] == pytest.approx(
        3
    )  # after the last word of the first attempt
    assert found.unexplained_s == pytest.approx(0)


def test_a_neighbour_that_is_being_removed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is still listed when it is looked for, and it is gone when it is looked at."""
    run = RunDir(tmp_path / "r")
    run.create()
    gone = tmp_path / "gone" / "events.jsonl"
    listed = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [*listed(self, pattern), gone])
    assert status._phase_history(run) == {}


def test_what_a_library_warns_of_is_kept_and_not_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kept: list[dict[str, Any]] = []
    monkeypatch.setattr(child_main.report, "event", lambda type, **fields: kept.append({"type": type, **fields}))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = child_main._hear_warning
        warnings.warn_explicit("slow path", UserWarning, "/x/lib/python3.11/site-packages/torch/nn.py", 7)
        assert capfd.readouterr().err == ""
        warnings.warn_explicit("mine", UserWarning, "/home/me/train.py", 3)
    assert capfd.readouterr().err == "/home/me/train.py:3: UserWarning: mine\n"
    (event,) = kept
    assert event["text"] == "slow path" and event["line"] == 7 and status.tell(event) == []


def test_what_the_tokenizer_library_prints_is_shown_only_if_it_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with tokenizer._printing_aside():
        os.write(1, b"Starting merges\n")
        os.write(2, b"5 unique words\n")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(RuntimeError), tokenizer._printing_aside():
        os.write(1, b"Starting merges\n")
        raise RuntimeError
    os.write(1, b"as before\n")
    assert capfd.readouterr() == ("as before\n", "Starting merges\n")
