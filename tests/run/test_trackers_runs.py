"""Trackers beside real runs: killed and resumed, rolled back by hand, read back with each tracker's own reader; one that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from lamplighter.rundir import RunDir, read_status, write_atomic
from lamplighter.watch.time_report import read_time_report
from lamplighter.watch.trackers import follower
from lamplighter.watch.trackers.writers import Setting
from running import LONG, Command, events_of, lamp, processes_of, start_lamp, wait_for, write_model
from tracked import (
    assert_same,
    merge,
    read_csv,
    read_mlflow,
    read_tensorboard,
    read_trackio,
    read_wandb,
    write_evaluation,
    write_killed_run,
)


def test_all_five_read_back_as_the_run_was(tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 kills, a roll-back, --resume checkpoint-N and a late evaluation, as a run leaves them; by the command itself."""
    run = write_killed_run(tmp_path / "runs" / "r")
    usual = {"TRACKIO_DIR": str(tmp_path / "trackio"), "TRACKIO_PROJECT": "letters", "WANDB_PROJECT": "novels", "WANDB_RUN_ID": "own1"}  # fmt: skip
    for name, value in usual.items():
        monkeypatch.setenv(name, value)
    done = lamp(
        "track",
        "r",
        "--to",
        "csv",
        "tensorboard",
        "trackio",
        "wandb",
        "mlflow",
        "--offline",
        "--tags",
        "a",
        "b",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("in 3 linked runs") == 5
    names = ("r", "r~2", "r~3")
    folder = run.path / "track"
    assert_same(merge([read_csv(folder / "csv" / name) for name in names]), run)
    boards = [read_tensorboard(folder / "tensorboard" / name) for name in names]
    assert_same(merge([points for points, _ in boards]), run, digits=6)
    assert {"text/config", "text/alert", "text/sample", "text/checkpoint"} <= set(boards[0][1])
    stored = [read_trackio(tmp_path / "trackio" / "letters.db", name) for name in names]
    assert_same(merge([points for points, _ in stored]), run)
    assert "stuck: deadlock" in stored[0][1] and any("begins at step" in title for title in stored[1][1])
    with sqlite3.connect(tmp_path / "trackio" / "letters.db") as database:
        told = " ".join(
            json.dumps(json.loads(text))
            for (text,) in database.execute("SELECT metrics FROM metrics WHERE run_name = 'r'")
        )
    assert '"sample"' in told and "checkpoint-10" in told
    points, facts = read_wandb(folder / "wandb")
    assert_same(merge([points[name] for name in names]), run)
    assert any("deadlock" in title for title in facts["r"]["alerts"])
    assert facts["r~2"]["group"] == "r" and facts["r"]["tags"] == ["a", "b"]
    assert facts["r"]["project"] == "novels" and facts["r"]["id"] == "own1" != facts["r~2"]["id"], (
        "its usual variables count"
    )
    kept = [read_mlflow(tmp_path / "runs" / ".mlflow" / "mlflow.db", name) for name in names]
    assert_same(merge([points for points, _ in kept]), run)
    first, second = kept[0][1], kept[1][1]
    assert first.info.status == "FINISHED" and {"a", "b"} <= first.data.tags.keys()
    assert "begins at step" in second.data.tags["lamp_alert"] and second.data.tags["lamp_continues"] == second.data.tags["group"] == "r"  # fmt: skip
    files = {path.parent.name for path in (tmp_path / "runs" / ".mlflow" / "artifacts" / first.info.run_id).rglob("*.txt")}  # fmt: skip
    assert {"alert", "sample", "checkpoint"} <= files
    again = here("track", "r", "--to", "csv", "--no-follow", cwd=tmp_path)
    assert again.returncode == 0
    assert_same(merge([read_csv(folder / "csv" / name) for name in names]), run), "nothing twice"


def test_a_follower_of_mlflow_that_is_killed_leaves_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its kills comes after values were given and before they were marked as safe; a server's address is passed over."""
    run = write_killed_run(tmp_path / "runs" / "r", steps=120, kills=3)
    monkeypatch.setattr(follower, "_LINES_AT_ONCE", 17)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    setting = Setting("r", run.path / "track" / "mlflow", offline=True, config={"train": {"lr": 1e-3}})

    def one() -> follower.Follower:
        return follower.Follower(run, "mlflow", setting, lambda _: None)

    for kill in range(3):
        killed = one()
        for _ in range(kill):
            killed._send_some()
        for _ in range(3):
            killed._send_metrics()
        assert killed.writer is not None
        killed.writer.mark()
        assert follower.read_state(run, "mlflow").lines < killed.sent.lines
    last = one()
    assert list(last.follow(until_end=False)) and last.complete, last.now.problem
    database = tmp_path / "runs" / ".mlflow" / "mlflow.db"
    read = [read_mlflow(database, name) for name in ("r", "r~2", "r~3")]
    assert_same(merge([points for points, _ in read]), run)
    assert [one.data.params for _, one in read] == [{"train.lr": "0.001"}] * 3
    database.unlink()
    said: list[str] = []
    again = follower.Follower(run, "mlflow", setting, said.append)
    assert len(said) == 1 and "no longer there" in said[0] and again.now.lines == 0


BAD = (450, 451, 452, 453)  # by their steps, so that they are bad in every attempt
# It goes as far as the file says and waits there: whoever kills it, or looks at it, cannot come too late.
WAITS = f"""
def before(model):
    frame = sys._getframe()
    while "batch" not in frame.f_locals:
        frame = frame.f_back
    while model.training and model.calls > int(pathlib.Path("go").read_text()):
        time.sleep(0.01)
    bad = model.training and frame.f_locals["batch"].step in {BAD}
    model.head.forward = lambda x: torch.nn.functional.linear(x, model.head.weight, model.head.bias) * (float("nan") if bad else 1.0)
"""


class _Gated:
    """A run that goes so many steps further in each attempt, and is killed there with all that belongs to it."""

    def __init__(self, folder: Path, *trackers: str) -> None:
        self.folder, self.run = folder, RunDir(folder / "runs" / "r")
        family = write_model(folder, WAITS)
        self.words = ("train", "--run", "r", "--model.family", family, "--model.width", "8", "--model.heads", "2", "--data.embedded_documents", "300",
                      "--tokenizer.vocab_size", "300", "--data.seq_len", "16", "--train.batch_size", "2", "--train.steps", "5000", "--train.threads", "1",
                      "--train.dtype", "fp32", "--save.every_steps", "20", "--save.keep", "50", "--eval.every_steps", "20", "--eval.sample_every_steps", "0",
                      "--track.to", *trackers)  # fmt: skip

    def start(self, *more: str, calls: int) -> subprocess.Popen[bytes]:
        self.let_go(calls)
        return start_lamp(*self.words, *more, cwd=self.folder)

    def let_go(self, calls: int) -> None:
        write_atomic(self.folder / "go", str(calls), durable=False)

    def wait_until_safe(self, step: int, attempt: int, process: subprocess.Popen[bytes]) -> None:
        def safe() -> bool:
            told = read_status(self.run)
            return (told.get("durable_step") or 0) >= step and (told.get("attempt") or 0) >= attempt

        wait_for(safe, process=process, deadline_s=200)

    def kill_all(self, process: subprocess.Popen[bytes]) -> None:
        for pid in [process.pid, *processes_of(self.run.path)]:
            with contextlib.suppress(ProcessLookupError):  # it went with its parent
                os.kill(pid, signal.SIGKILL)
        process.wait()
        wait_for(lambda: not processes_of(self.run.path))

    def folders(self, tracker: str) -> list[Path]:
        """r, r~2, r~3 ... in the order in which they were begun."""
        found = (self.run.path / "track" / tracker).glob("r*")
        return sorted(found, key=lambda path: int(path.name.partition("~")[2] or 1))


HANGING = """
import time
class Settings:
    def __init__(self, **_): pass
def init(**_):
    time.sleep(3600)
"""


def test_a_run_that_is_killed_and_sent_back_is_followed_in_one_piece_beside_a_tracker_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything by kill -9, parent and followers too; then --resume to an earlier checkpoint. The zoo's tracker_hang goes along:
    wandb.init never comes back, and costs neither a step nor an orphan.
    """
    (tmp_path / "fake" / "wandb").mkdir(parents=True)
    (tmp_path / "fake" / "wandb" / "__init__.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    gated = _Gated(tmp_path, "csv", "tensorboard", "wandb")
    process = gated.start(calls=70)
    gated.wait_until_safe(60, 1, process)
    gated.kill_all(process)
    process = gated.start("--resume", "checkpoint-40", calls=70)
    gated.wait_until_safe(100, 2, process)

    def told() -> dict[str, dict[str, int]]:
        return {one["to"]: one for one in read_status(gated.run).get("track") or []}

    wait_for(lambda: all(told()[one]["step"] >= 100 for one in ("csv", "tensorboard") if one in told()) and len(told()) == 3, process=process)  # fmt: skip
    assert all(told()[one]["lag"] <= 10 for one in ("csv", "tensorboard")) and told()["wandb"]["step"] == 0
    gated.let_go(10_000)
    stopped = lamp("stop", "r", cwd=tmp_path)
    assert stopped.returncode == 0 and process.wait(60) == 75
    assert "lamp track r --to wandb" in (tmp_path / "out.txt").read_text(), "how the rest is sent later"
    (csv,), (board,) = gated.folders("csv"), gated.folders("tensorboard")  # redone steps are equal: one run each
    assert_same(read_csv(csv), gated.run)
    assert_same(read_tensorboard(board)[0], gated.run, digits=6)
    assert json.loads((gated.run.path / "track" / "csv.json").read_text())["done"]
    lags = {name: one["lag"] for name, one in told().items()}
    assert lags == {"csv": 0, "tensorboard": 0, "wandb": read_status(gated.run)["step"]}, "the last status is of after their end"  # fmt: skip
    assert not processes_of(gated.run.path)


@LONG  # 22 starts of a trainer
def test_twenty_kills_a_roll_back_a_resume_and_a_late_evaluation_read_back_from_all_five(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real runs throughout: the evaluation alone is a file as lamp eval leaves it."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    gated = _Gated(tmp_path, "csv", "tensorboard", "trackio", "wandb", "mlflow")
    for attempt in range(1, 21):
        process = gated.start(calls=30)
        gated.wait_until_safe(20 * attempt, attempt, process)
        gated.kill_all(process)
    process = gated.start("--resume", "checkpoint-60", calls=10_000)
    gated.wait_until_safe(500, 21, process)
    write_evaluation(gated.run, 60)
    assert lamp("stop", "r", cwd=tmp_path).returncode == 0 and process.wait(60) == 75
    (back,) = events_of(gated.run, "rolled back")
    done = lamp("track", "r", "--to", "csv", "tensorboard", "trackio", "wandb", "mlflow", "--offline", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = [path.name for path in gated.folders("csv")]
    assert_same(merge([read_csv(path) for path in gated.folders("csv")]), gated.run)
    assert_same(merge([read_tensorboard(path)[0] for path in gated.folders("tensorboard")]), gated.run, digits=6)
    stored = [read_trackio(tmp_path / "trackio" / "lamplighter.db", name)[0] for name in names]
    assert_same(merge(stored), gated.run)
    kept = [read_mlflow(tmp_path / "runs" / ".mlflow" / "mlflow.db", name)[0] for name in names]
    assert_same(merge(kept), gated.run)
    points, _ = read_wandb(gated.run.path / "track" / "wandb")
    assert_same(merge([points[name] for name in names]), gated.run)
    assert (back["passed_from"], back["passed_to"]) == (BAD[0], BAD[-1])


def test_a_watched_command_is_followed_too(tmp_path: Path) -> None:
    code = "import time, torch\nm = torch.nn.Linear(2, 2)\no = torch.optim.SGD(m.parameters(), 0.1)\nfor _ in range(24):\n    m(torch.ones(1, 2)).sum().backward(); o.step(); o.zero_grad(); time.sleep(0.05)\n"
    (tmp_path / "script.py").write_text(code)
    watched = start_lamp("watch", "--", sys.executable, "script.py", cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "script")
    wait_for(lambda: run.metrics.exists() and run.metrics.stat().st_size > 0, process=watched, deadline_s=90)
    told = lamp("track", "script", "--to", "csv", cwd=tmp_path)
    assert told.returncode == 0 and watched.wait(30) == 0, told.stderr
    points = read_csv(run.path / "track" / "csv" / "script")
    assert_same(points, run)
    assert max(step for name, step in points if name == "train/iter") >= 18
    (surroundings,) = json.loads((run.path / "environment.json").read_text())["attempts"]
    assert surroundings["packages"]["torch"] and surroundings["python"] == platform.python_version()
    times = read_time_report(run)
    assert times.unexplained_s < 0.3 * times.wall_s and times.seconds["compute"] > 0, "what the page shows of it"


def test_a_wrong_tracker_is_named(tmp_path: Path, command: Command) -> None:
    write_killed_run(tmp_path / "runs" / "r", steps=20, kills=1)
    for words, what in ((("--to", "csv,aim"), "no tracker aim"), ((), "no tracker was named")):
        done = command("track", "r", *words, cwd=tmp_path)
        assert done.returncode == 2 and what in done.stderr and "tensorboard" in done.stderr
    done = command("train", "--track.to", "aim", "--train.steps", "5", cwd=tmp_path)
    assert done.returncode == 78 and "track.to" in done.stderr
