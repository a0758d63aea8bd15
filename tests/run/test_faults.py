"""Faults that a run survives or names: signals, processes left behind, a folder that is taken away, pipes for files, a deaf webhook."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lamplighter.rundir import RunDir, read_json, read_status
from lamplighter.train import checkpoint
from lamplighter.watch import notify
from lamplighter.watch.notify import Notifier
from running import (
    LONG,
    TINY,
    Command,
    Finished,
    lamp,
    losses_of,
    slot_of,
    start_lamp,
    wait_for,
    write_model,
)

TRAIN = ["train", "--run", "r", *TINY]
TWELVE = ["--train.steps", "12", "--save.every_steps", "4", "--save.staged", "false"]
EIGHT = [*TINY, "--train.steps", "8", "--save.every_steps", "4"]
SLOW = """
def before(model):
    time.sleep(0.05)
"""

# ---------------------------------------------------------------- signals and processes left behind

LEAVES = """
def before(model):
    if model.calls == 3:
        if os.fork() == 0:          # a daemon, as a library may start one: forked twice, in a session of its own
            os.setsid()
            if os.fork() == 0:
                pathlib.Path("daemon.pid").write_text(str(os.getpid()))
                time.sleep(60)
            os._exit(0)
        os.wait()
    if model.calls == 4 and os.fork() == 0:
        sys.exit(0)                 # a forked process that runs to the end of our own code
    if model.calls == 6:
        import signal
        signal.signal(signal.SIGRTMIN + 1, lambda *_: None)
        os.kill(os.getpid(), signal.SIGRTMIN + 1)
    if model.calls == 8 and not os.path.exists("killed"):
        open("killed", "w").close()
        import signal
        os.kill(os.getpid(), signal.SIGRTMIN + 3)
"""


def test_a_run_with_strange_company(tmp_path: Path) -> None:
    """A daemon keeps no lock, a fork says nothing about the run, a real-time signal is a death with a name."""
    family = write_model(tmp_path, LEAVES)
    done = lamp(*TRAIN, *TWELVE, "--model.family", family, cwd=tmp_path)
    try:
        assert done.returncode == 0, done.stdout
        assert "SystemExit" not in done.stdout
        assert f"killed by a real-time signal (signal {signal.SIGRTMIN + 3}) at step 7" in done.stdout
        assert "restarting from step 4" in done.stdout
        run = RunDir(tmp_path / "runs" / "r")
        assert sorted(losses_of(run)) == list(range(1, 13))
        assert read_json(run.status)["exact"] == "exact: 3 redone steps equal", "steps 5 to 7, bit for bit"
        assert "exact: 3 redone steps equal" in run.report.read_text()
        os.kill(int((tmp_path / "daemon.pid").read_text()), 0)  # it is still there
        again = lamp(*TRAIN, *TWELVE, "--model.family", family, cwd=tmp_path)
        assert again.returncode == 0, again.stdout + again.stderr
        assert "is finished" in again.stdout
    finally:
        os.kill(int((tmp_path / "daemon.pid").read_text()), signal.SIGKILL)


def test_a_signal_that_would_end_the_run_is_a_request_to_save_and_stop(tmp_path: Path) -> None:
    """A real-time signal to the parent, then, in the run that goes on, the warning of a scheduler to the training process."""
    words = [
        *TRAIN,
        "--train.steps",
        "4000",
        "--save.every_steps",
        "1000",
        "--model.family",
        write_model(tmp_path, SLOW),
    ]
    run = RunDir(tmp_path / "runs" / "r")
    for number, to_child in ((signal.SIGRTMIN + 2, False), (signal.SIGUSR1, True)):
        before = read_status(run).get("step") or 0
        process = start_lamp(*words, cwd=tmp_path)
        wait_for(lambda before=before: slot_of(run).step > before + 2, process=process)
        os.kill(slot_of(run).pid if to_child else process.pid, number)
        assert process.wait(20) == 75, (tmp_path / "out.txt").read_text()
        status = read_status(run)
        assert status["state"] == "stopped"
        assert status["durable_step"] == status["step"] > before
    said = (tmp_path / "out.txt").read_text()
    assert "stopped early (a real-time signal)" in said
    assert "stopped early (SIGUSR1)" in said
    assert "Traceback" not in said


def test_a_watched_command_that_dies_by_a_real_time_signal(tmp_path: Path) -> None:
    number = signal.SIGRTMIN + 5
    said = lamp("watch", "--", "sh", "-c", f"kill -{int(number)} $$", cwd=tmp_path)
    assert said.returncode == -number, said.stderr
    assert f"(signal {int(number)})" in said.stderr
    assert "Traceback" not in said.stderr


# ---------------------------------------------------------------- a folder that is taken away


@pytest.mark.parametrize("how", ["deleted", pytest.param("moved", marks=LONG)])
def test_a_folder_that_is_taken_away_ends_the_run(tmp_path: Path, how: str) -> None:
    family = write_model(tmp_path, SLOW)
    words = ["--train.steps", "5000", "--save.every_steps", "2", "--save.staged", "false", "--model.family", family]
    process = start_lamp(*TRAIN, *words, cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "r")
    wait_for(lambda: slot_of(run).step > 2, 100, process)
    run.path.rename(tmp_path / "elsewhere")  # at once: a tree that is being written to cannot be deleted in one go
    if how == "deleted":
        shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)
    began = time.monotonic()
    assert process.wait(30) == 73
    assert time.monotonic() - began < 10
    said = (tmp_path / "out.txt").read_text()
    assert f"the folder {Path('runs') / 'r'} was deleted or moved away" in said
    assert "Traceback" not in said
    assert "; tokens " in said, "the statistics of every end"
    assert not run.path.exists(), "a save must not make half of the folder again"


def test_a_watched_command_goes_on_without_its_folder(tmp_path: Path) -> None:
    script = (
        "import shutil, time, sys; time.sleep(0.5); shutil.rmtree('runs'); time.sleep(3); print('done'); sys.exit(7)"
    )
    said = lamp("watch", "--run", "w", "--", sys.executable, "-c", script, cwd=tmp_path)
    assert said.returncode == 7, said.stderr
    assert "done" in said.stdout
    assert "was deleted or moved away: the command goes on" in said.stderr
    assert "made:" not in said.stderr
    assert "Traceback" not in said.stderr


# ---------------------------------------------------------------- pipes and wrong types in place of files


def test_one_damaged_run_does_not_hide_the_others(tmp_path: Path, finished: Finished, command: Command) -> None:
    good = finished(*EIGHT)
    for name in ("pipe", "huge", "types", "text"):
        shutil.copytree(good.path, tmp_path / "runs" / name, ignore=shutil.ignore_patterns("slots", "checkpoints"))
        (tmp_path / "runs" / name / "status.json").unlink()
    os.mkfifo(tmp_path / "runs" / "pipe" / "status.json")
    (tmp_path / "runs" / "pipe" / "lock").unlink()
    os.mkfifo(tmp_path / "runs" / "pipe" / "lock")
    with open(tmp_path / "runs" / "huge" / "status.json", "wb") as file:
        file.truncate(150 << 20)
    wrong = '{"state": ["x"], "step": {}, "steps": "8", "loss": "low", "spent_s": [], "flags": {"a": 1}, "format": "1"}'
    (tmp_path / "runs" / "types" / "status.json").write_text(wrong)
    (tmp_path / "runs" / "text" / "status.json").write_text("nothing")
    listed = command("runs", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    rows = {words[0]: " ".join(words[1:]) for words in map(str.split, listed.stdout.splitlines()[1:-1])}
    assert rows["r"].startswith("finished 8/8")
    assert all(rows[name].startswith("damaged") for name in ("pipe", "huge", "types", "text"))
    assert "named pipe" in rows["pipe"]
    assert "157.3 MB" in rows["huge"]
    assert "state is not text" in rows["types"]
    assert command("runs", "--json", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    "name", ["run.yaml", "runs/r/config.yaml", "runs/r/lock", "runs/r/events.jsonl", "runs/r/console.log"]
)
def test_a_pipe_for_a_file_is_said_and_not_waited_for(
    tmp_path: Path, finished: Finished, command: Command, name: str
) -> None:
    finished(*EIGHT)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    words = ["train", "run.yaml"] if name == "run.yaml" else TRAIN
    said = command(*words, "--train.steps", "10", cwd=tmp_path)
    assert said.returncode in (66, 73, 78), said.stdout + said.stderr
    assert f"{Path(name).name} is a named pipe, not a file" in said.stderr


def test_a_damaged_status_is_said_and_the_run_goes_on(tmp_path: Path, finished: Finished, here: Command) -> None:
    run = finished(*EIGHT)
    run.status.unlink()
    os.mkfifo(run.status)
    (run.checkpoints / "latest.json").write_text('{"step": [], "path": 7}')
    done = here(*TRAIN, "--train.steps", "10", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "status.json is a named pipe" in done.stdout
    assert read_status(run)["step"] == 10


# ---------------------------------------------------------------- going back


def test_the_same_words_go_back_once(tmp_path: Path, finished: Finished, here: Command) -> None:
    """`--resume checkpoint-4` twice: the second time it is finished, and says how to go back once more."""
    run = finished(*EIGHT)
    again = [*TRAIN, "--train.steps", "8", "--save.every_steps", "4", "--resume", "checkpoint-4"]
    first = here(*again, cwd=tmp_path)
    assert first.returncode == 0, first.stdout
    assert "set aside (not deleted): checkpoint-8" in first.stdout
    steps = len(run.metrics.read_text().splitlines())
    second = here(*again, cwd=tmp_path)
    assert second.returncode == 0, second.stdout
    assert "the run went back to checkpoint-4 before and has come to step 8 since" in second.stdout
    assert "is finished" in second.stdout
    assert len(run.metrics.read_text().splitlines()) == steps
    third = here(*again, "--force", cwd=tmp_path)
    assert third.returncode == 0, third.stdout
    assert "resumed from checkpoint-4" in third.stdout


def test_checkpoints_that_were_set_aside_are_pruned_too(tmp_path: Path) -> None:
    names = [f"aside-checkpoint-{8 + n}-{1700000000 + n}" for n in range(4)] + [
        "checkpoint-4.1",
        "checkpoint-4",
        "checkpoint-8",
        "checkpoint-12",
        "mine",
    ]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name).rename(tmp_path / "x")  # the time of the rename counts
        (tmp_path / "x").rename(tmp_path / name)
        time.sleep(0.01)
    checkpoint.prune(tmp_path, 2, {8})
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [
        "aside-checkpoint-11-1700000003",
        "aside-checkpoint-8-1700000000",
        "checkpoint-12",
        "checkpoint-4.1",
        "checkpoint-8",
        "mine",
    ]


def test_two_futures_that_are_left_within_a_second_are_both_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    for future in ("first", "second"):
        for step in (4, 8):
            (tmp_path / f"checkpoint-{step}").mkdir(exist_ok=True)
        (tmp_path / "checkpoint-8" / future).touch()
        assert checkpoint.go_back(tmp_path, checkpoint.Progress(step=4)) == ["checkpoint-8"]
    kept = {path.parent.name: path.name for path in tmp_path.glob("aside-*/*")}
    assert kept == {"aside-checkpoint-8-1700000000": "first", "aside-checkpoint-8-1700000001": "second"}


# ---------------------------------------------------------------- notify


class Hook(http.server.BaseHTTPRequestHandler):
    """Answers as its server was told."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        server = self.server
        assert isinstance(server, HookServer)
        server.heard.append(("POST", body))
        server.users.append(self.headers.get("Authorization", ""))
        how = server.how.pop(0) if len(server.how) > 1 else server.how[0]
        if how == "garbage":
            self.wfile.write(b"\x00\x01 what?\r\n\r\n")
        elif how.startswith("redirect"):
            self.send_response(int(how.split()[1]))
            self.send_header("Location", "/elsewhere")
            self.end_headers()
        else:
            self.send_response(int(how))
            self.end_headers()

    def do_GET(self) -> None:
        assert isinstance(self.server, HookServer)
        self.server.heard.append(("GET", b""))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


class HookServer(http.server.ThreadingHTTPServer):
    heard: list[tuple[str, bytes]]
    users: list[str]
    how: list[str]


@contextmanager
def hook(*how: str) -> Iterator[HookServer]:
    server = HookServer(("127.0.0.1", 0), Hook)
    server.heard, server.users, server.how = [], [], list(how)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_PAUSES_S", (0.05, 0.05))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["garbage", "redirect 302", "redirect 307", "404", "503"])
def test_an_answer_that_is_none_is_a_failure_that_is_said(how: str) -> None:
    said: list[str] = []
    with hook(how) as server:
        notifier = Notifier(f"http://127.0.0.1:{server.server_port}/", "r", said.append)
        notifier.tell("stuck", "it is stuck")
        wait_for(lambda: said, 20)
        assert notifier.thread is not None
        assert notifier.thread.is_alive()
        notifier.close()
    assert "watch.notify does not work" in said[0]
    assert said[-1] == "WARNING  1 message of watch.notify could not be delivered"
    assert {kind for kind, _ in server.heard} == {"POST"}
    assert len(server.heard) == (3 if how in ("garbage", "503") else 1), "what may pass is tried again"


@pytest.mark.usefixtures("quick")
def test_a_second_try_counts() -> None:
    said: list[str] = []
    with hook("503", "garbage", "204") as server:
        notifier = Notifier(f"http://127.0.0.1:{server.server_port}/", "r", said.append)
        notifier.tell("finished", "it is finished")
        wait_for(lambda: len(server.heard) == 3, 20)
        notifier.close()
    assert said == []
    assert all(b"it is finished" in body for _, body in server.heard)


def test_the_last_message_of_a_run_is_tried_again_too() -> None:
    said: list[str] = []
    with hook("503", "garbage", "204") as server:
        notifier = Notifier(f"http://user:p%40ss@127.0.0.1:{server.server_port}/", "r", said.append)
        notifier.tell("finished", "it is finished")
        notifier.close()
    assert said == []
    assert len(server.heard) == 3
    assert server.users == ["Basic dXNlcjpwQHNz"] * 3


def test_a_server_that_never_answers_does_not_hold_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_LAST_S", 0.5)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        notifier = Notifier(f"http://127.0.0.1:{server.getsockname()[1]}/", "r", said.append)
        notifier.tell("finished", "it is finished")
        began = time.monotonic()
        notifier.close()
        assert time.monotonic() - began < 3
    assert "not waited for" in said[0]


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_LAST_S", 0.5)
    said: list[str] = []
    notifier = Notifier(f"sleep 300 & echo $! > {tmp_path}/pid; wait", "r", said.append)
    notifier.tell("finished", "it is \0 finished")
    pid = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 20))
    began = time.monotonic()
    notifier.close()
    assert time.monotonic() - began < 3
    assert "not waited for" in said[0]
    wait_for(lambda: not Path(f"/proc/{pid}/stat").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text(), 10)


def test_a_command_hears_the_message(tmp_path: Path) -> None:
    said: list[str] = []
    notifier = Notifier(
        f'cat > {tmp_path}/in; echo "$LAMP_RUN $LAMP_KIND $LAMP_TEXT" > {tmp_path}/env', "r", said.append
    )
    notifier.tell("finished", "all is well")
    notifier.close()
    assert '"text": "all is well"' in (tmp_path / "in").read_text()
    assert (tmp_path / "env").read_text() == "r finished all is well\n"
    assert said == []
