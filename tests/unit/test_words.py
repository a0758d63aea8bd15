"""What people read: words that are safe, change, and do not block the speaker."""

from __future__ import annotations

import io
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyte
import pytest
from rich.console import ConsoleDimensions

from lamplighter.commands import child_main
from lamplighter.config import Budget
from lamplighter.data import tokenizer
from lamplighter.procs.procfs import ProcessLook
from lamplighter.procs.stacks import Frame, ThreadStack, culprit
from lamplighter.rundir import RunDir, Tail
from lamplighter.safe_text import clean
from lamplighter.slot import Slot
from lamplighter.watch import status
from lamplighter.watch.console import Console
from lamplighter.watch.live import Live, Page
from lamplighter.watch.status import Observer, Status, duration, line, sparkline, tell
from lamplighter.watch.time_report import TimeReport, lines, read_time_report


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
    assert tail.replaced == 0
    (tmp_path / "other").write_bytes(b'{"d": 4}\n')
    (tmp_path / "other").replace(path)
    assert tail.records() == [{"d": 4}] and tail.replaced == 1, "another file in its place"


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


# ---------------------------------------------------------------- words that fit the window


LONG_TEXT = "The lamps are lit along the embankment and the fog has come up from the river again since Sunday. " * 3


def screen_of(act: Callable[[Live], None], columns: int, rows: int = 24) -> list[str]:
    """The rows of a terminal after a display has drawn on it."""
    stream = io.StringIO()
    display = Live(stream)  # type: ignore[arg-type]
    display.console.size = ConsoleDimensions(columns, rows)
    act(display)
    screen = pyte.Screen(columns, rows)
    pyte.Stream(screen).feed(stream.getvalue().replace("\n", "\r\n"))
    return [row.rstrip() for row in screen.display]


@pytest.mark.parametrize("columns", [80, 100])
def test_a_sample_breaks_only_where_the_window_ends(columns: int) -> None:
    told = tell({"type": "sample", "step": 3, "text": f"{LONG_TEXT}\nshort"})

    def act(display: Live) -> None:
        for text, style in told:
            display.line("12:00:00  ", text, style)

    rows = [row for row in screen_of(act, columns) if row]
    assert rows[0] == "12:00:00  sample at step 3:" and rows[-1] == "12:00:00     short"
    full = rows[1:-2]
    assert full and all(len(row) > columns - 14 for row in full), "a line broke again after a word"
    assert all(row.startswith((" " * 13, "12:00:00     ")) for row in rows[1:])


@pytest.mark.parametrize("kind", [Live, Page])
@pytest.mark.parametrize("head", ["next: ", "  or: ", "r: safe to step 4; next: ", "the whole run: "])
def test_a_command_to_paste_has_no_newline_of_ours_in_it(kind: type[Live | Page], head: str) -> None:
    """A terminal that breaks a row itself gives it back as one line; a newline ends the command there."""
    command = (
        f"lamp train --preset demo --data.paths '{'a/long/way/' * 9}x y.txt' --train.steps 100 --runs-dir elsewhere"
    )
    stream = io.StringIO()
    display = kind(stream)  # type: ignore[arg-type]
    display.console.size = ConsoleDimensions(80, 24)
    display.line("12:00:00  ", head + command, "bold")
    display.close()
    assert any(command in row for row in stream.getvalue().splitlines()), stream.getvalue()


def test_a_save_is_one_line_of_80_columns() -> None:
    event = {"type": "checkpoint", "t": 1, "step": 1_200_000, "path": "/a/long/way/to/runs/r/checkpoints/checkpoint-1200000",
             "bytes": 123_456_789_012, "seconds": 123.456, "blocked_s": 12.3}  # fmt: skip
    ((text, _),) = tell(event)
    assert len(f"12:00:00  {text}") <= 80
    assert text == "saved checkpoint-1200000 (123.5 GB, 123.46 s; steps waited 12.30 s)"
    assert "waited" not in tell({**event, "blocked_s": 0.004})[0][0]


def test_at_80_columns_the_durable_step_and_the_time_left_are_never_cut() -> None:
    slot = Slot(pid=1, phase="train", step=1_234_567, steps=2_000_000, durable_step=1_234_500, loss=3.4567, mean_loss=4.5,
                left_s=359_999.0, left_ns=time.monotonic_ns(), tokens_per_s=123_456.7, mfu=0.41, tokens=98_765_432_100)  # fmt: skip
    status = Status("a-run-with-a-very-long-name-indeed-as-people-give-them", slot=slot)
    rows = screen_of(lambda display: display.frame(status), 80)
    assert "99:59:" in rows[0] and "left" in rows[0] and "safe to step 1234500" in rows[0]
    assert "average 4.500" in line(status) and "98.8G tokens" in line(status)


def test_the_ledger_has_at_most_ten_lines_and_nothing_is_left_out_of_its_sum() -> None:
    times = TimeReport(210.0, {f"phase {number}": float(number) for number in range(1, 21)}, redone_steps=3)
    table = lines(times, Budget(usd_per_hour=2.0), most=5)
    assert len(table) <= 10
    assert table[0].startswith("phase 20") and "16 more, in report.md" in table[4]
    assert "2:16" in table[4], "the sum of those that are not named"
    assert len(lines(times, Budget())) == 23, "report.md has all of them"


def test_a_slow_rate_is_said_in_seconds_and_not_as_zero() -> None:
    slot = Slot(pid=1, phase="doctor", done=3, total=26, unit="probes", phase_since_ns=time.monotonic_ns())
    said = line(Status("d", slot=slot, rate=0.31))
    assert "3.2 s each" in said and "0 probes/s" not in said


def test_an_import_has_a_spinner_and_what_it_took_the_last_time(tmp_path: Path) -> None:
    for name, t in (("before", 41.0), ("now", 0.0)):
        (tmp_path / name).mkdir()
        phase = {
            "type": "phase",
            "state": "end",
            "name": "import",
            "path": "import",
            "t": 1.7e9,
            "seconds": t,
            "done": 0,
            "unit": "",
        }
        (tmp_path / name / "events.jsonl").write_text(json.dumps(phase) + "\n" if t else "")
    observer = Observer(RunDir(tmp_path / "now"), [], Budget())
    slot = Slot(pid=1, phase="import", phase_since_ns=time.monotonic_ns() - int(3e9))
    observer.look(slot, None, 0.0, 3.0)
    assert "import" in line(observer.status) and "(last time 41 s)" in line(observer.status)
    drawn = Live(io.StringIO())  # type: ignore[arg-type]
    drawn.console.size = ConsoleDimensions(100, 12)
    seen = set()
    for _ in range(4):
        drawn.frame(observer.status)
        (head,) = drawn.console.render_lines(drawn._draw(observer.status))
        seen.add(head[0].text[0])
    drawn.close()
    assert seen == set("◐◓◑◒")


def _shown(page: Page, stream: io.StringIO, status: Status, size: ConsoleDimensions) -> list[str]:
    """One frame, as a terminal of this size shows it."""
    stream.truncate(0)
    page.console.size = size
    page.frame(status)
    screen = pyte.Screen(size.width, size.height)
    pyte.Stream(screen).feed(stream.getvalue().replace("\n", "\r\n"))
    return [row.rstrip() for row in screen.display]


def test_a_page_uses_the_height_it_has_and_survives_a_smaller_window() -> None:
    stream = io.StringIO()
    page = Page(stream)  # type: ignore[arg-type]
    slot = Slot(pid=1, phase="train", step=50, steps=100, durable_step=40, left_s=60.0, left_ns=time.monotonic_ns())
    status = Status("r", slot=slot)
    status.started -= 3725
    status.losses.extend(5 - number / 50 for number in range(100))
    page.line("11:00:00  ", "sample at step 50:", "")
    page.line("11:00:00  ", f"   {LONG_TEXT}", "")
    for number in range(40):
        page.line("11:00:01  ", f"event {number}", "")
    for columns, rows in ((100, 40), (60, 12), (120, 30)):
        shown = _shown(page, stream, status, ConsoleDimensions(columns, rows))
        assert "step 50/100" in shown[0] and "event 39" in shown[-1], "\n".join(shown)
        assert sum(bool(row) for row in shown) >= rows - 2, "it leaves rows unused"
        assert any("after 1:02:" in row for row in shown), "the run's own elapsed time"
    page.close()


@pytest.mark.parametrize("told", ["", "step 399 · 11.4/s"])
def test_a_page_draws_a_curve_with_its_numbers_over_the_rows_that_are_left(told: str) -> None:
    """Of a run of ours the loss; of a command that tells none, how many steps it makes."""
    stream = io.StringIO()
    page = Page(stream)  # type: ignore[arg-type]
    slot = None if told else Slot(pid=1, phase="train", step=50, steps=100, left_s=60.0, left_ns=time.monotonic_ns())
    status = Status("r", slot=slot, told=told)
    (status.paces if told else status.losses).extend(7.5 - number / 20 for number in range(100))
    page.line("11:00:00  ", "watching r", "")
    for columns, rows in ((100, 24), (80, 40)):
        shown = _shown(page, stream, status, ConsoleDimensions(columns, rows))
        drawn = [row for row in shown if "┤" in row and any("\u2800" < letter <= "\u28ff" for letter in row)]
        assert len(drawn) >= min(30, rows - 7), "\n".join(shown)
        assert drawn[0].split()[0] == "7.5" and float(drawn[-1].split()[0]) < 2.6, "the numbers of its axis"
        assert any(("steps a second" if told else "training loss") in row for row in shown)
        assert max(map(len, drawn)) > columns // 2 + 5, "and its width"
    page.close()
