"""`lamp watch -- CMD` and `lamp why PID` as people use them: the command's own behaviour, ours beside it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lamplighter.procs.procfs import look
from lamplighter.rundir import RunDir, is_running, read_json, read_lines
from lamplighter.watch.console import Console
from lamplighter.watch.restart_policy import RestartPolicy
from lamplighter.watch.supervisor import Supervisor
from lamplighter.watch.trainer import ChildSpec, Trainer
from running import LAMP, LONG, clean_env, lamp, start_lamp, wait_for

HANG = """
import threading, time
print("step 1", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()  # the culprit
"""


def verdicts(run: RunDir) -> list[dict[str, Any]]:
    return [event for event in read_lines(run.events) if event.get("type") == "verdict"] if run.events.exists() else []


def script(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(text)
    return name


def test_output_exit_code_and_folder(tmp_path: Path) -> None:
    name = script(tmp_path, "import sys\nprint('out', *sys.argv[1:])\nsys.stderr.write('err\\n')\nsys.exit(7)\n")
    done = lamp("watch", "--", sys.executable, name, "--help", cwd=tmp_path)
    assert done.returncode == 7
    assert done.stdout == "out --help\n", "stdout is the script's alone"
    assert "err\n" in done.stderr
    run = RunDir(tmp_path / "runs" / "train")
    assert read_json(run.status)["exit_code"] == 7
    assert "exit code 7" in run.report.read_text()
    rows = json.loads(lamp("runs", "--json", cwd=tmp_path).stdout)
    assert [(row["run"], row["state"]) for row in rows] == [("train", "failed")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_death_by_a_signal_is_kept(tmp_path: Path, number: signal.Signals) -> None:
    name = script(tmp_path, f"import os\nos.kill(os.getpid(), {int(number)})\n")
    assert lamp("watch", "--", sys.executable, name, cwd=tmp_path).returncode == -number
    asked = number == signal.SIGTERM  # by its user, or by who runs the machine
    assert read_json(tmp_path / "runs" / "train" / "status.json")["state"] == ("stopped" if asked else "lost")


def test_mistakes_are_three_lines(tmp_path: Path) -> None:
    done = lamp("watch", "--", "no-such-program", cwd=tmp_path)
    assert done.returncode == 66
    assert "no such command" in done.stderr
    assert lamp("watch", "--", cwd=tmp_path).returncode == 2
    done = lamp("watch", "--on-stuk", "stop", "--", "true", cwd=tmp_path)
    assert done.returncode == 2
    assert "--on-stuck" in done.stderr


def test_a_hang_is_named_and_by_default_left_alone(tmp_path: Path) -> None:
    name = script(tmp_path, HANG)
    run = RunDir(tmp_path / "runs" / "train")
    going = start_lamp("watch", "--", sys.executable, name, cwd=tmp_path)
    found = wait_for(lambda: [v for v in verdicts(run) if v["cause"] == "deadlock"], 15, going)[0]
    assert found["culprit"]["line"] == 6
    assert found["since_s"] < 7
    answer = lamp("why", "train", cwd=tmp_path).stdout
    assert "train.py:6" in answer and "stuck" in answer
    time.sleep(6)
    assert going.poll() is None, "report touches nothing"
    assert lamp("stop", "train", cwd=tmp_path).returncode == 0
    going.wait(15)
    assert read_json(run.status)["state"] == "stopped"


def test_on_stuck_stop_ends_with_70(tmp_path: Path) -> None:
    name = script(tmp_path, HANG)
    told = tmp_path / "told.txt"
    words = ["watch", "--on-stuck", "stop", "--notify", f"cat >> {told}", "--", sys.executable, name]
    done = lamp(*words, cwd=tmp_path, timeout=60)
    assert done.returncode == 70, done.stderr
    assert "train.py:6" in done.stderr
    assert '"stuck"' in told.read_text()
    assert told.read_text().count('"next"') == told.read_text().count('"kind"') > 1, "also of the end"


def test_on_stuck_restart_starts_it_again(tmp_path: Path) -> None:
    """The second time it finds what the first has left, and goes on."""
    name = script(
        tmp_path,
        "import os\nif os.path.exists('state'):\n    print('resumed')\n    raise SystemExit(0)\nopen('state', 'w').close()\n"
        + HANG,
    )
    done = lamp("watch", "--on-stuck", "restart", "--", sys.executable, name, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "resumed" in done.stdout
    run = RunDir(tmp_path / "runs" / "train")
    assert [event["attempt"] for event in read_lines(run.events) if event["type"] == "start"] == [1, 2]


@LONG
def test_a_restart_on_a_terminal_lives_as_long_as_it_likes(tmp_path: Path) -> None:
    from running import listen

    long = "import os, time\nif os.path.exists('state'):\n    time.sleep(13)\n    print('resumed')\n    raise SystemExit(3)\n"
    name = script(tmp_path, long + "open('state', 'w').close()\n" + HANG)
    heard = listen([*LAMP, "watch", "--on-stuck", "restart", "--", sys.executable, name], tmp_path, on_pty=True)
    assert heard.code == 3, heard.text
    assert "resumed" in heard.text


def test_without_the_agent_it_says_so_and_watches_from_outside(tmp_path: Path) -> None:
    name = script(tmp_path, HANG)
    run = RunDir(tmp_path / "runs" / "train")
    going = start_lamp("watch", "--", sys.executable, "-I", name, cwd=tmp_path)
    found = wait_for(lambda: [v for v in verdicts(run) if v["cause"] in ("deadlock", "waiting")], 15, going)[0]
    assert found["culprit"]["line"] == 6
    assert "not instrumented" in (tmp_path / "out.txt").read_text()
    going.terminate()
    going.wait(15)


def test_without_ptrace_the_agent_is_enough(tmp_path: Path) -> None:
    """A process that may not be traced or looked into (not dumpable, another user's): its own thread answers."""
    name = script(tmp_path, "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n" + HANG)
    run = RunDir(tmp_path / "runs" / "train")

    def drop() -> None:
        """Root may trace anybody: take that right away (CAP_SYS_PTRACE from the bounding set)."""
        ctypes.CDLL(None).prctl(24, 19, 0, 0, 0)

    going = start_lamp("watch", "--", sys.executable, name, cwd=tmp_path, preexec_fn=drop)
    found = wait_for(lambda: [v for v in verdicts(run) if v["culprit"].get("line")], 15, going)[0]
    assert found["culprit"]["line"] == 8
    going.terminate()
    going.wait(15)


def test_a_killed_watcher_does_not_harm_the_run(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        "import time\nfor i in range(30):\n    print(i, flush=True)\n    time.sleep(0.1)\nopen('done', 'w').close()\n",
    )
    going = start_lamp("watch", "--", sys.executable, name, cwd=tmp_path)
    wait_for(lambda: "5\n" in (tmp_path / "out.txt").read_text(), process=going)
    going.kill()
    going.wait()
    wait_for((tmp_path / "done").exists, 10)
    assert "29\n" in (tmp_path / "out.txt").read_text()
    wait_for(lambda: not is_running(RunDir(tmp_path / "runs" / "train")), 5)


def test_fifty_megabytes_pass_untouched(tmp_path: Path) -> None:
    name = script(
        tmp_path, "import sys\nline = 'x' * 99 + '\\n'\nfor _ in range(500_000):\n    sys.stdout.write(line)\n"
    )
    with open(tmp_path / "big.txt", "wb") as out:
        code = subprocess.run(
            [*LAMP, "watch", "--", sys.executable, name], cwd=tmp_path, stdout=out, env=clean_env(), check=False,
            stderr=subprocess.DEVNULL,
        ).returncode  # fmt: skip
    assert code == 0
    assert (tmp_path / "big.txt").stat().st_size == 50_000_000


EIGHT = """
import multiprocessing, os, time
def work(number):
    if number == 5:
        time.sleep(600)  # the culprit
    return sum(range(10_000))
if __name__ == "__main__":
    with multiprocessing.Pool(8) as pool:
        print(sum(pool.imap_unordered(work, range(64))))
"""


def test_eight_children_and_the_one_that_sleeps(tmp_path: Path) -> None:
    name = script(tmp_path, EIGHT)
    run = RunDir(tmp_path / "runs" / "train")
    going = start_lamp("watch", "--", sys.executable, name, cwd=tmp_path, start_new_session=True)
    found = wait_for(lambda: [v for v in verdicts(run) if v["culprit"].get("line") == 5], 15, going)[0]
    assert found["culprit"]["pid"] != read_json(run.status)["child_pid"]
    os.killpg(going.pid, signal.SIGKILL)


def test_phases_of_the_script_are_shown(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        "import time\nimport lamplighter as lamp\nwith lamp.phase('tokenise', total=40, unit='documents') as p:\n"
        "    for i in range(40):\n        time.sleep(0.1)\n        p.tick()\n",
    )
    done = lamp("watch", "--", sys.executable, name, cwd=tmp_path)
    assert done.returncode == 0
    assert "tokenise documents" in done.stderr
    assert " left" in done.stderr
    assert subprocess.run([sys.executable, name], cwd=tmp_path, check=False).returncode == 0, "and without us"


def test_why_pid_looks_at_a_process_of_somebody_else(tmp_path: Path) -> None:
    name = script(tmp_path, HANG)
    with subprocess.Popen([sys.executable, name], cwd=tmp_path, stdout=subprocess.PIPE) as going:
        assert going.stdout is not None
        going.stdout.readline()
        done = lamp("why", str(going.pid), cwd=tmp_path)
        going.kill()
    assert done.returncode == 0, done.stderr
    assert "train.py:6" in done.stdout
    assert "lamp watch -- CMD" in done.stdout
    assert lamp("why", "999999999", cwd=tmp_path).returncode == 66


def test_a_second_watch_of_the_same_script_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    name = script(tmp_path, "import time\ntime.sleep(3)\n")
    first = start_lamp("watch", "--", sys.executable, name, cwd=tmp_path)
    wait_for(lambda: (tmp_path / "runs" / "train" / "status.json").exists(), process=first)
    assert lamp("watch", "--", sys.executable, name, cwd=tmp_path).returncode == 0
    assert (tmp_path / "runs" / "train-2" / "report.md").exists()
    assert first.wait(20) == 0


def test_something_to_read_every_two_seconds(tmp_path: Path) -> None:
    from running import bare_start_s, listen

    name = script(tmp_path, "import time\ntime.sleep(7)\n")
    heard = listen([*LAMP, "watch", "--", sys.executable, name], tmp_path, on_pty=False)
    assert heard.code == 0
    assert heard.first_s < 0.5 + bare_start_s()
    assert heard.longest_gap_s < 2.5, heard.before_gap


STEPS = """
import time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(25):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.1)
"""


@pytest.mark.parametrize("start", ["bash", pytest.param("accelerate", marks=LONG)])
def test_launchers_bring_their_scripts_along(tmp_path: Path, start: str) -> None:
    script(tmp_path, STEPS)
    (tmp_path / "run.sh").write_text(f"export PYTHONPATH=$PWD:$PYTHONPATH\n{sys.executable} train.py\n")
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "train.py"]
    words = ["bash", "run.sh"] if start == "bash" else accelerate
    done = lamp("watch", "--run", "w", "--", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_json(tmp_path / "runs" / "w" / "status.json")["step"] == 25, done.stderr


def test_on_a_terminal_the_footer_is_ours_and_the_output_its_own(tmp_path: Path) -> None:
    from running import listen

    name = script(tmp_path, "import time\nfor i in range(4):\n    print('line', i, flush=True)\n    time.sleep(1.2)\n")
    heard = listen([*LAMP, "watch", "--", sys.executable, name], tmp_path, on_pty=True)
    assert heard.code == 0
    assert heard.longest_gap_s < 2.5, heard.before_gap
    assert "GB" in heard.text, "the footer"
    assert (tmp_path / "runs" / "train" / "output.log").read_text() == "".join(f"line {i}\n" for i in range(4))


SERVERS = {
    "a thread serves": "import http.server, threading\n"
    "server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\n"
    "threading.Thread(target=server.serve_forever, daemon=True).start()\n"
    "threading.Event().wait()\n",
    "an idle loop": "import asyncio\nasyncio.run(asyncio.sleep(600))\n",
    "a pause": "import signal\nsignal.pause()\n",
    "a child": "import subprocess\nsubprocess.run(['sleep', '600'])\n",
    "a prompt": "input()\n",
}


@pytest.mark.parametrize(
    "name", ["a thread serves", "a prompt", *(pytest.param(n, marks=LONG) for n in list(SERVERS)[1:4])]
)
def test_who_waits_for_the_world_is_not_stuck(tmp_path: Path, name: str) -> None:
    script(tmp_path, SERVERS[name])
    run = RunDir(tmp_path / "runs" / "train")
    with subprocess.Popen(
        [*LAMP, "watch", "--", sys.executable, "train.py"], cwd=tmp_path, stdin=subprocess.PIPE, env=clean_env(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    ) as going:  # fmt: skip
        try:
            wait_for(lambda: verdicts(run), 15, going)
            time.sleep(3)
        finally:
            os.killpg(going.pid, signal.SIGKILL)
    assert {verdict["state"] for verdict in verdicts(run)} == {"waiting"}


def test_odd_ends_and_odd_words_keep_the_exit_code(tmp_path: Path) -> None:
    assert lamp("watch", "--", "bash", "-c", "kill -40 $$", cwd=tmp_path).returncode == -40
    words = [*map(os.fsencode, [*LAMP, "watch", "--run", "odd", "--", "true"]), b"\xff"]
    assert subprocess.run(words, cwd=tmp_path, env=clean_env(), capture_output=True, check=False).returncode == 0


def test_a_deleted_folder_does_not_end_the_watching(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        "import pathlib, shutil, time\ntime.sleep(1)\n"
        "while pathlib.Path('runs').exists():\n    shutil.rmtree('runs', ignore_errors=True)\n"  # a file may come while it goes
        "time.sleep(2)\nraise SystemExit(5)\n",
    )
    done = lamp("watch", "--", sys.executable, name, cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr


DAEMONS = {
    "a signal ends the wait": "import signal, threading\nstop = threading.Event()\n"
    "signal.signal(signal.SIGALRM, lambda *_: stop.set())\nsignal.alarm(9)\nstop.wait()\n",
    "a pool is left": "import concurrent.futures, threading\nevent = threading.Event()\n"
    "with concurrent.futures.ThreadPoolExecutor(1) as pool:\n    pool.submit(event.wait, 9)\n",
    "a timer ends it": "import threading\ntimer = threading.Timer(9, print)\ntimer.start()\ntimer.join()\n",
}


@pytest.mark.parametrize(
    "name", ["a pool is left", *(pytest.param(n, marks=LONG) for n in ("a signal ends the wait", "a timer ends it"))]
)
def test_a_wait_that_somebody_will_end_is_never_stopped(tmp_path: Path, name: str) -> None:
    script(tmp_path, DAEMONS[name])
    done = lamp("watch", "--on-stuck", "stop", "--", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_stop_leaves_nobody_behind(tmp_path: Path) -> None:
    script(tmp_path, HANG)
    (tmp_path / "run.sh").write_text(f"{sys.executable} train.py & echo $! > pid; wait\n")
    done = lamp("watch", "--on-stuck", "stop", "--", "bash", "run.sh", cwd=tmp_path, timeout=60)
    assert done.returncode == 70, done.stderr
    assert look(int((tmp_path / "pid").read_text())).state in "XZ"


def test_a_zombie_is_buried_once(tmp_path: Path) -> None:
    name = script(
        tmp_path, "import subprocess, time\nchild = subprocess.Popen(['true'])\ntime.sleep(3)\nchild.wait()\n"
    )
    assert lamp("watch", "--", sys.executable, name, cwd=tmp_path).returncode == 0
    run = RunDir(tmp_path / "runs" / "train")
    ends = [event["pid"] for event in read_lines(run.events) if event["type"] == "child_end"]
    assert len(ends) == len(set(ends)) == 2


def test_a_fault_of_ours_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    name = script(tmp_path, "import time\ntime.sleep(4)\nraise SystemExit(6)\n")
    broken = "import lamplighter.watch.command as p, lamplighter.commands as c, sys\np._ScriptProgress.words = lambda *_: 1 / 0\nsys.exit(c.main())\n"
    script(tmp_path, broken, "broken.py")
    words = [sys.executable, "broken.py", "watch", "--", sys.executable, name]
    done = subprocess.run(words, cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 6, done.stderr
    assert done.stderr.count("a look has failed (ZeroDivisionError") == 1


def test_why_pid_says_what_it_may_not_see(tmp_path: Path) -> None:
    name = script(tmp_path, "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n" + HANG)
    with subprocess.Popen([sys.executable, name], cwd=tmp_path, stdout=subprocess.PIPE) as going:
        assert going.stdout is not None
        going.stdout.readline()
        done = lamp("why", str(going.pid), cwd=tmp_path, preexec_fn=lambda: ctypes.CDLL(None).prctl(24, 19, 0, 0, 0))
        going.kill()
    assert done.returncode == 0, done.stderr
    assert "not seen: the stacks of" in done.stdout


@LONG
def test_lamp_stop_cancels_a_restart(tmp_path: Path) -> None:
    name = script(tmp_path, "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HANG)
    run = RunDir(tmp_path / "runs" / "train")
    going = start_lamp("watch", "--on-stuck", "restart", "--", sys.executable, name, cwd=tmp_path)
    wait_for(lambda: any(v["action"] == "restart" for v in verdicts(run)), 20, going)
    lamp("stop", "train", cwd=tmp_path)
    going.wait(30)
    assert [event["attempt"] for event in read_lines(run.events) if event["type"] == "start"] == [1]


def test_two_ranks_are_two_roots_and_the_first_failure_ends_both(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create()
    spec = ChildSpec("tokenizer-show", {}, keeps_report=False, ranks=2)  # there is no config.yaml: each ends with 66
    code = Supervisor(run, Trainer(run, spec, Console(2, live=False)), RestartPolicy("report")).supervise()
    assert code == 66
    ends = [event for event in read_lines(run.events) if event["type"] == "child_end"]
    assert len(ends) == 2 and 66 in [event["code"] for event in ends]
    assert run.fifo(0).exists() and run.fifo(1).exists()
    assert {event["rank"] for event in read_lines(run.events) if event["type"] == "hello"} <= {0, 1}
