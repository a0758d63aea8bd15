"""A command behaves at the person's terminal as it does without us, and better where the terminal fails it."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamplighter.watch import pty_proxy
from person import COLUMNS, Page, Person, cpu_s, sleep_until_quiet, state_of
from running import wait_for

PERSONS: list[Person] = []


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    while PERSONS:
        PERSONS.pop().clean_up()


def start(*command: str, **options: Any) -> Person:
    person = Person(*command, **options)
    PERSONS.append(person)
    return person


def python(code: str, *words: str, **options: Any) -> Person:
    return start(sys.executable, "-u", "-c", code, *words, **options)


def both(code: str, folder: Path, **options: Any) -> tuple[bytes, bytes]:
    """What the person sees without us, and with us."""
    bare, watched = python(code, **options), python(code, folder=folder, **options)
    assert bare.code() == watched.code()
    return bare.finish(), watched.finish()


# ---------------------------------------------------------------- byte for byte

BAR = """
import sys
from tqdm import tqdm
for i in tqdm(range(40), bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}", mininterval=0): pass
print("done", flush=True)
"""
COLOURS = r"""
print("\x1b[31mred\x1b[0m \x1b[1;38;5;208mbright\x1b[0m\n\tand a tab")
print("\x1b]8;;http://example.org\x07link\x1b]8;;\x07 wärme 暖")
"""
MIXED = """
import random, os
data = random.Random(3).randbytes(2 << 20)
while data: data = data[os.write(1, data):]
"""
UNENDED = "import sys; sys.stdout.write('one\\ntwo'); sys.stdout.flush()"
CRLF = "import os; os.write(1, b'a\\r\\nb\\rc\\n\\n\\r\\nd\\n')"
STREAMS = """
import os
for i in range(2000): os.write(1 + i % 2, b'%d\\n' % i if i % 3 else b'%d ' % i)
"""


@pytest.mark.parametrize("code", [BAR, COLOURS, MIXED, UNENDED, CRLF, STREAMS, "pass"],
                         ids=["bar", "colours", "mixed", "unended", "crlf", "streams", "nothing"])  # fmt: skip
def test_what_is_seen_is_the_same_byte_for_byte(code: str, tmp_path: Path) -> None:
    bare, watched = both(code, tmp_path)
    assert watched == bare
    log = (tmp_path / "output.log").read_bytes()
    assert int((tmp_path / "bytes").read_text()) == len(log)
    assert log.replace(b"\n", b"\r\n") == bare


def test_the_command_sees_the_terminal_it_would_see(tmp_path: Path) -> None:
    code = "import os; print([os.isatty(i) for i in (0, 1, 2)], os.get_terminal_size(1), os.get_terminal_size(2))"
    bare, watched = both(code, tmp_path)
    assert watched == bare
    assert b"[True, True, True]" in bare and f"columns={COLUMNS}".encode() in bare


def test_a_new_window_size_arrives(tmp_path: Path) -> None:
    code = """
import os, signal, time
signal.signal(signal.SIGWINCH, lambda *_: print("size", os.get_terminal_size(1).columns))
print("ready")
while os.get_terminal_size(1).columns != 77: time.sleep(0.02)
time.sleep(0.5)
"""
    person = python(code, folder=tmp_path)
    person.sees(b"ready")
    person.resize(77)
    assert person.code() == 0
    assert b"size 77" in person.finish()


# ---------------------------------------------------------------- keys

COUNT_INTERRUPTS = """
import signal, sys, time
hits = []
signal.signal(signal.SIGINT, lambda *_: hits.append(1))
print("ready")
while not hits: time.sleep(0.01)
time.sleep(0.8)
print("interrupts", len(hits))
sys.exit(7)
"""


def test_ctrl_c_reaches_the_command_exactly_once(tmp_path: Path) -> None:
    person = python(COUNT_INTERRUPTS, folder=tmp_path)
    person.sees(b"ready")
    person.type(b"\x03")
    assert person.code() == 7
    assert b"interrupts 1\r\n" in person.finish()


def test_ctrl_c_at_a_plain_script_looks_and_ends_as_without_us(tmp_path: Path) -> None:
    ends = []
    for folder in (None, tmp_path):
        person = python("import time; print('ready'); time.sleep(60)", folder=folder)
        person.sees(b"ready\r\n")
        person.type(b"\x03")
        ends.append((person.code(), person.finish()))
    assert ends[0] == ends[1]
    assert ends[0][0] == -signal.SIGINT and b"KeyboardInterrupt" in ends[0][1]


@pytest.mark.parametrize("to_group", [False, True], ids=["watcher alone", "group"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_is_heard_once_whoever_it_was_sent_to(number: int, to_group: bool, tmp_path: Path) -> None:
    person = python(COUNT_INTERRUPTS.replace("signal.SIGINT", str(int(number))), folder=tmp_path)
    person.sees(b"ready")
    (os.killpg if to_group else os.kill)(person.watcher(), number)
    assert person.code() == 7
    assert b"interrupts 1\r\n" in person.finish()


def bash(folder: Path, code: str, after: str = "", before: str = "") -> Person:
    """A real shell with job control, and our driver typed into it."""
    script = folder / "script.py"
    script.write_text(code)
    person = start("bash", "--norc", "-i", shell=True)
    person.type(f"{before}\n".encode())
    person.watch_in_bash(script, after)
    return person


def stopped(*pids: int) -> bool:
    return all(state_of(pid) == "T" for pid in pids)


def test_ctrl_z_and_fg_in_a_real_shell(tmp_path: Path) -> None:
    person = bash(tmp_path, "import time\nfor i in range(10**6): print('tick', i); time.sleep(0.05)")
    person.sees(b"tick 3\r\n")
    command, carrier = person.pids()
    person.type(b"\x1a")
    person.sees(b"Stopped")
    wait_for(lambda: stopped(command, carrier))
    person.type(b"echo quiet''now\n")
    person.sees(b"quietnow")
    before = len(person.seen)
    person.type(b"fg\n")
    wait_for(lambda: person.seen.count(b"tick", before) > 3)
    person.type(b"\x03")
    person.sees(b"KeyboardInterrupt")
    person.type(b"echo code=$?\n")
    person.sees(b"code=130")
    person.type(b"exit\n")
    person.finish()
    assert state_of(command) == state_of(carrier) == "gone"


def test_a_footer_left_behind_by_ctrl_z_is_not_cleared_under_the_shells_prompt(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("0 footer FOOTER\n")
    person = bash(tmp_path, "import time\nfor i in range(12): print('tick', i); time.sleep(0.5)")
    person.sees(b"tick 1\r\nFOOTER")
    person.type(b"\x1a")
    wait_for(lambda: stopped(*person.pids(), person.watcher()))
    before = len(person.seen)
    person.type(b"bg\n")
    person.sees(b"tick 11\r\n")
    assert pty_proxy.CLEAR in person.seen[:before]
    assert pty_proxy.CLEAR not in person.seen[before:]
    person.type(b"\nexit\n")
    person.finish()


def test_a_job_in_the_background_draws_no_footer_but_its_output_comes(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("0 footer FOOTER\n")
    person = bash(tmp_path, "import time; print('one'); time.sleep(1); print('last')", "&")
    person.sees(b"\nlast")
    person.type(b"\nexit\n")
    assert b"FOOTER" not in person.finish()


def test_stty_tostop_stops_a_background_job_for_its_own_words_and_not_for_ours(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("0.2 say SAID\n")
    code = "import time; time.sleep(1.5); print('output'); time.sleep(1)"
    person = bash(tmp_path, code, "&", before="stty tostop")
    command, carrier = person.pids()
    person.sees(b"SAID")
    assert state_of(command) == "S"
    wait_for(lambda: stopped(command, carrier, person.watcher()))  # the shell knows the job by the last of them
    assert b"\noutput" not in person.seen
    person.type(b"fg\n")
    person.sees(b"\noutput")
    person.type(b"exit\n")
    person.finish()


def test_input_and_the_debugger_read_from_the_terminal(tmp_path: Path) -> None:
    code = "name = input('name? ')\nprint('hello', name)\nimport pdb; pdb.set_trace()\nprint('after')"
    script = tmp_path / "asks.py"
    script.write_text(code)
    (tmp_path / "words").write_text("0 footer FOOTER\n")
    person = start(sys.executable, str(script), folder=tmp_path)
    person.sees(b"name? ")
    person.type(b"Ada\n")
    person.sees(b"hello Ada\r\n")
    person.sees(b"(Pdb) ")
    person.type(b"p 6 * 7\n")
    person.sees(b"42\r\n")
    person.type(b"c\n")
    assert person.code() == 0
    assert b"after" in person.finish()


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("code, expected", [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9),
                                            ("import os; os.kill(os.getpid(), 11)", -11), ("import os, signal; signal.signal(2, signal.SIG_DFL); os.kill(os.getpid(), 2)", -2)])  # fmt: skip
@pytest.mark.parametrize("streams", [{}, {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}], ids=["tty", "null"])  # fmt: skip
def test_the_end_is_the_commands_own(code: str, expected: int, streams: dict[str, Any], tmp_path: Path) -> None:
    person = python(code, folder=tmp_path, **streams)
    assert person.code() == expected
    assert person.finish() == b""


def test_a_daemon_left_behind_does_not_keep_us_waiting_and_still_reaches_the_terminal(tmp_path: Path) -> None:
    code = """
import os, sys, time
print("main")
if os.fork() == 0:
    time.sleep(2); print("from the grandchild"); os._exit(0)
sys.exit(3)
"""
    person = python(code, folder=tmp_path)
    person.sees(b"main")
    assert person.code() == 3
    assert b"grandchild" not in person.seen, "waited for the grandchild"
    person.sees(b"from the grandchild\r\n")
    person.finish()


# ---------------------------------------------------------------- a terminal that fails

LINES = """
import os, sys
for i in range(int(sys.argv[1]) * 100): os.write(1, (b"x" * 99 + b"\\n") * 100)
os.write(1, b"the last line\\n")
"""
NOTE = re.compile(rb"\n\.\.\. (\d+) bytes not shown while the terminal was stopped; all of it is in output.log\n")


def test_a_terminal_that_is_not_read_does_not_stop_the_command(tmp_path: Path) -> None:
    person = python(LINES, "20", folder=tmp_path, looking=False)
    assert person.code() == 0
    assert (tmp_path / "output.log").stat().st_size == 20_000_000 + 14
    person.looking.set()
    person.sees(b"the last line\r\n")
    seen = person.finish().replace(b"\r", b"")
    notes = NOTE.findall(seen)
    assert len(notes) == 1
    assert len(NOTE.sub(b"", seen)) + int(notes[0]) == 20_000_014


def test_ctrl_s_does_not_stop_training_and_ctrl_q_shows_it(tmp_path: Path) -> None:
    person = python(
        "print('ready'); input()\nfor i in range(200_000): print('step', i)",
        folder=tmp_path,
        env={"PYTHONUNBUFFERED": ""},
    )
    person.sees(b"ready")
    person.type(b"\x13\n")
    assert person.code() == 0
    assert b"step 5" not in person.seen
    _, carrier = person.pids()
    before = cpu_s(carrier)
    time.sleep(1)
    assert cpu_s(carrier) - before < 0.2, "it does not wait, it spins"
    person.type(b"\x11")
    person.sees(b"step 199999\r\n")
    assert (tmp_path / "output.log").read_bytes().endswith(b"step 199999\n")
    person.finish()


def test_fifty_megabytes_are_complete(tmp_path: Path) -> None:
    took = []
    for folder in (None, tmp_path):
        began = time.monotonic()
        person = python(LINES, "50", folder=folder)
        assert person.code() == 0
        took.append(time.monotonic() - began)
        assert len(person.finish()) == 50_500_000 + 15
    assert (tmp_path / "output.log").stat().st_size == 50_000_014
    sys.stdout.write(f"\n50 MB of lines: bare {took[0]:.2f} s, watched {took[1]:.2f} s\n")


def test_a_closed_terminal_leaves_a_nohup_command_and_its_log_alone(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("".join(f"{i / 10} footer FOOTER {i}\n0 say SAID\n" for i in range(40)))
    code = "import time\nprint('ready')\nfor i in range(100): print('step', i); time.sleep(0.01)\ntime.sleep(2); print('done')"
    person = python(code, folder=tmp_path, nohup=True)
    person.sees(b"step 3")
    command, carrier = person.pids()
    person.hang_up()
    os.killpg(os.getpgid(command), signal.SIGHUP)  # as a shell does with its jobs
    wait_for(lambda: "step 99" in (tmp_path / "output.log").read_text())
    before = cpu_s(carrier)
    time.sleep(1.5)
    assert cpu_s(carrier) - before < 0.3, "it does not wait, it spins"
    assert person.code() == 0
    assert (tmp_path / "output.log").read_text().split("\n")[-3:] == ["step 99", "done", ""]
    assert b"step 99" not in person.finish()


# ---------------------------------------------------------------- a watcher that fails

LONG = "import time\nfor i in range(60): print('step', i); time.sleep(0.03)\nprint('done')"


def kill_the_watcher(person: Person) -> None:
    command, _ = person.pids()
    os.kill(person.watcher(), signal.SIGKILL)
    assert person.code() == -signal.SIGKILL
    assert state_of(command) != "gone"


def test_a_killed_watcher_does_not_harm_the_run(tmp_path: Path) -> None:
    person = python(LONG, folder=tmp_path)
    person.sees(b"step 5\r\n")
    kill_the_watcher(person)
    person.sees(b"done\r\n")
    seen = person.finish()
    assert seen.decode().split("\r\n") == [*(f"step {i}" for i in range(60)), "done", ""]
    assert (tmp_path / "output.log").read_bytes().replace(b"\n", b"\r\n") == seen


def test_a_killed_watcher_does_not_harm_a_run_into_a_file(tmp_path: Path) -> None:
    with open(tmp_path / "out.txt", "wb") as out:
        person = python(LONG, folder=tmp_path, stdout=out, stderr=out)
    wait_for(lambda: b"step 5\n" in (tmp_path / "out.txt").read_bytes())
    kill_the_watcher(person)
    person.finish()
    assert (tmp_path / "out.txt").read_text().split("\n") == [*(f"step {i}" for i in range(60)), "done", ""]
    assert not (tmp_path / "output.log").exists()


def test_a_killed_proxy_is_replaced_and_no_byte_is_lost_after(tmp_path: Path) -> None:
    person = python(LONG, folder=tmp_path)
    person.sees(b"step 5\r\n")
    _, carrier = person.pids()
    sleep_until_quiet(person, 0.01)
    os.kill(carrier, signal.SIGKILL)
    assert person.code() == 0
    seen = person.finish()
    assert seen.endswith(b"done\r\n")
    assert [int(n) for n in re.findall(rb"step (\d+)\r\n", seen)] == list(range(60))


# ---------------------------------------------------------------- our own words

SPOKEN = """
import sys, time
print("first"); time.sleep(0.7)
print("second"); time.sleep(0.7)
sys.stdout.write("\\r 10%"); time.sleep(0.7)
sys.stdout.write("\\r 20%"); time.sleep(0.7)
sys.stdout.write("\\n"); time.sleep(0.7)
print("last")
"""


def test_the_footer_is_drawn_on_lines_of_its_own_and_taken_away(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("".join(f"{i / 10} footer FOOTER {i}\n" for i in range(34)))
    bare, watched = both(SPOKEN, tmp_path)
    drawn = [match.start() for match in re.finditer(rb"(?<!;)FOOTER", watched)]
    assert 4 <= len(drawn) <= 4 * 5
    for at in drawn:
        page = Page(watched[:at])
        assert page.column == 0 and page.rows[page.row] == "", page.text()
    assert Page(watched).text() == Page(bare).text()
    assert b"FOOTER" not in (tmp_path / "output.log").read_bytes()
    bar = watched[watched.index(b" 10%") : watched.index(b" 20%")]
    assert re.fullmatch(rb" 10%(\x1b\[22;2t)?(\x1b\]2;FOOTER \d+\x07)+\r", bar), bar


def test_said_lines_wait_for_the_commands_line_to_end(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("0.8 say SAID\n")
    code = "import sys, time\nsys.stdout.write('\\rbar 1'); time.sleep(1.5); print('\\rbar 2'); time.sleep(0.3); print('x')"
    person = python(code, folder=tmp_path)
    assert person.code() == 0
    assert Page(person.finish()).text() == ["bar 2", "SAID", "x", ""]


def test_a_verdict_waits_three_seconds_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("2 say! VERDICT\n")  # by then the bar stands, on a busy machine too
    code = "import sys, time\nsys.stdout.write('\\rbar 1'); time.sleep(9); print('\\rbar 2')"
    person = python(code, folder=tmp_path)
    person.sees(b"bar 1")
    began = time.monotonic()
    person.sees(b"VERDICT")
    assert 2.0 < time.monotonic() - began < 7
    assert person.code() == 0
    assert Page(person.finish()).text() == ["bar 1", "VERDICT", "bar 2", ""]


def test_the_last_words_come_after_the_last_output(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("1000 say SAID\n")
    person = python(UNENDED, folder=tmp_path)
    assert person.code() == 0
    assert Page(person.finish()).text() == ["one", "two", "SAID", ""]


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=["dumb", "no colour"])
def test_a_plain_terminal_gets_no_escape_codes_but_our_lines(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "words").write_text("0 footer FOOTER\n0.1 say SAID\n0.5 footer FOOTER 2\n")
    code = "import time; print('first'); time.sleep(0.7); print('last')"
    person = python(code, folder=tmp_path, env=env)
    assert person.code() == 0
    seen = person.finish()
    assert b"\x1b" not in seen and b"FOOTER" not in seen and b"SAID" in seen


@pytest.mark.parametrize("to_file", ["stdout", "stderr"])
def test_one_stream_in_a_file_and_the_other_on_the_terminal(to_file: str, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("0 footer FOOTER\n0.2 say SAID\n")
    code = "import os, time\nos.write(1, b'out\\n'); os.write(2, b'err\\n'); time.sleep(0.8); os.write(2, b'end\\n')\nprint(os.isatty(1), os.isatty(2))"
    with open(tmp_path / "file.txt", "wb") as file:
        person = python(code, folder=tmp_path, **{to_file: file})
    assert person.code() == 0
    seen, kept = person.finish(), (tmp_path / "file.txt").read_text()
    if to_file == "stdout":
        assert kept == "out\nFalse True\n"
        assert Page(seen).text() == ["err", "SAID", "end", ""]
    else:
        assert kept == "err\nend\n"
        assert Page(seen).text() == ["out", "SAID", "True False", ""]
    assert b"FOOTER" in seen
    assert int((tmp_path / "bytes").read_text()) == len(kept) + len((tmp_path / "output.log").read_bytes())


def test_words_into_a_file_start_on_a_new_line(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("1.2 say SAID\n")
    code = (
        "import sys, time\nsys.stderr.write('half'); sys.stderr.flush(); time.sleep(2); print(' rest', file=sys.stderr)"
    )
    with open(tmp_path / "err.txt", "wb") as file:
        person = python(code, folder=tmp_path, stdout=subprocess.DEVNULL, stderr=file)
    assert person.code() == 0
    person.finish()
    assert (tmp_path / "err.txt").read_text() == "half\nSAID\n rest\n"


def test_a_pipe_that_nobody_reads_blocks_neither_words_nor_watcher(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("".join(f"0 say {'y' * 1000}\n" for _ in range(300)))
    reading, writing = os.pipe()
    person = python("import time; time.sleep(1)", folder=tmp_path, stdout=writing, stderr=writing)
    os.close(writing)
    assert person.code() == 0
    assert (tmp_path / "bytes").read_text() == "-1"
    os.close(reading)
    person.finish()


def test_a_footer_fits_the_window_whatever_its_letters() -> None:
    assert pty_proxy.fit("ab\x1b[31mc\n", 20) == "ab [31mc "
    assert pty_proxy.fit("暖暖暖", 5) == "暖暖"
    assert pty_proxy.fit("e\u0301e\u0301e", 2) == "e\u0301e\u0301"


def test_a_terminal_that_cannot_be_opened_anew_is_written_by_a_thread() -> None:
    master, slave = pty.openpty()
    screen = pty_proxy.Screen(slave, "plain", line_open=False)
    screen.carry(b"hello", time.monotonic())
    assert os.read(master, 100) == b"hello"
    assert os.get_blocking(slave)
    os.close(master)
    os.close(slave)
