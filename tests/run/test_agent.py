"""The shim in real processes: what it counts, how it answers, and that a script cannot tell that it is there."""

from __future__ import annotations

import ast
import json
import os
import socket
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import lamplighter
from lamplighter.procs import stacks as procs_stacks
from lamplighter.procs.stacks import Stacks, ThreadStack
from lamplighter.slot import AT, MAGIC, SLOT_BYTES, TEXTS, Slot, read_slot
from lamplighter.watch.agent import PATH, environment
from lamplighter.watch.process_tree import read_slots as read_all
from running import LONG, STARTED, clean_env, shared, wait_for

SRC = Path(lamplighter.__file__).parents[1]
PYTHONS = sorted((Path.home() / ".pyenv" / "versions").glob("*/bin/python"))


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    folder = tmp_path / "slots"
    folder.mkdir()
    return folder


def bare(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in clean_env().items() if not name.startswith(("PYTHON", "RANK", "WORLD_SIZE"))}
    return {**kept, "OMP_NUM_THREADS": "1", **extra}


def script(folder: Path, code: str, name: str = "job.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(code))
    return path


def run(slots: Path, *words: object, timeout: float = 120, **extra: str) -> subprocess.CompletedProcess[str]:
    """A watched Python to its end, from the folder that holds the slots."""
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=slots.parent, env=environment(slots, bare(**extra)),
        capture_output=True, text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def start(slots: Path, *words: object, **extra: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=slots.parent, env=environment(slots, bare(**extra)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    STARTED.append(process)
    return process


def is_silent_success(done: subprocess.CompletedProcess[str], said: str = "") -> bool:
    assert (done.returncode, done.stdout, done.stderr) == (0, said, ""), done
    return True


def numbers(thread: ThreadStack) -> dict[str, int]:
    """The counters of the user's innermost frame."""
    return next((dict(frame.numbers) for frame in thread.frames if frame.numbers), {})


def ask_stacks(slots: Path, pid: int, deadline_s: float) -> Stacks | None:
    return procs_stacks.ask(slots / f"p{pid}.slot", deadline_s)


def ask(slots: Path, pid: int, deadline_s: float = 5.0) -> Stacks:
    stacks = ask_stacks(slots, pid, deadline_s)
    assert stacks is not None, "nobody answered"
    return stacks


def the_only(slots: Path) -> Slot:
    (slot,) = read_all(slots).values()
    return slot


# ---------------------------------------------------------------- getting in


def test_the_reader_knows_every_field_of_the_slot() -> None:
    assert list(Slot.__annotations__) == [*AT, *TEXTS]
    assert 8 * max(AT.values()) + 8 <= min(at for at, _ in TEXTS.values())
    assert max(at + size for at, size in TEXTS.values()) <= SLOT_BYTES


def test_importing_the_inside_does_nothing() -> None:
    code = "import sys, gc; n = len(sys.meta_path), len(gc.callbacks), sys.excepthook; import lamplighter.slot; sys.modules['_lamplighter_slot'] = lamplighter.slot; import lamplighter.watch.agent.bootstrap as i;"
    code += "sys.exit(n != (len(sys.meta_path), len(gc.callbacks), sys.excepthook) or i.slot.get('pid') != 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=bare(PYTHONPATH=str(SRC))).returncode == 0


def test_it_gets_in_where_there_is_no_proc(slots: Path) -> None:
    """macOS: the slot is opened all the same, and the thread answers."""
    code = f"""
        import os, runpy
        real = os.open
        def without_proc(path, *rest, **named):
            if str(path).startswith("/proc/"):
                raise FileNotFoundError(path)
            return real(path, *rest, **named)
        os.open = without_proc
        os.environ["LAMP_WATCH"] = {str(slots)!r}
        runpy.run_path({str(PATH / "sitecustomize.py")!r})
    """
    path = script(slots.parent, code)
    done = subprocess.run([sys.executable, path], env=bare(), capture_output=True, text=True, check=False)
    assert is_silent_success(done)
    slot = the_only(slots)
    assert slot.pid and slot.pid_start == 0 and (slots / f"p{slot.pid}.ask").exists()


def test_the_environment_is_added_to_and_nothing_is_taken_away(tmp_path: Path) -> None:
    made = environment(tmp_path, {"PYTHONPATH": "a::b", "HOME": "/x"})
    assert made["PYTHONPATH"] == f"{PATH}:a::b"
    assert environment(tmp_path, made)["PYTHONPATH"] == made["PYTHONPATH"]
    assert environment(tmp_path, {})["PYTHONPATH"] == str(PATH)
    assert made["HOME"] == "/x"
    assert made["LAMP_WATCH"] == str(tmp_path)


@pytest.mark.parametrize("how", ["file", "module", "code", "no bytecode"])
def test_every_start_says_hello(slots: Path, how: str) -> None:
    path = script(slots.parent, "import os; print(os.getpid())", "job.py")
    words = {"file": [path], "module": ["-m", "job"], "code": ["-c", path.read_text()], "no bytecode": ["-B", path]}[
        how
    ]
    extra = {"PYTHONDONTWRITEBYTECODE": "1"} if how == "no bytecode" else {}
    before = time.monotonic_ns()
    done = run(slots, *words, **extra)
    slot = the_only(slots)
    assert is_silent_success(done, f"{slot.pid}\n")
    assert before < slot.hello_ns < time.monotonic_ns()
    assert slot.ppid == os.getpid()
    assert slot.forked == 0
    assert slot.pid_start > 0
    assert slot.python == ".".join(map(str, sys.version_info[:3]))
    assert sys.executable in slot.argv
    assert slot.rank == slot.worker == -1


def test_rank_and_world_come_from_the_launcher(slots: Path) -> None:
    assert is_silent_success(run(slots, "-c", "pass", RANK="3", WORLD_SIZE="8"))
    assert (the_only(slots).rank, the_only(slots).world) == (3, 8)


def test_a_python_that_ignores_the_environment_leaves_no_slot(slots: Path) -> None:
    for flag in ("-I", "-E", "-S"):
        assert is_silent_success(run(slots, flag, "-c", "pass"))
    assert read_all(slots) == {}
    assert is_silent_success(run(slots, "-s", "-c", "pass"))
    assert len(read_all(slots)) == 1


def test_exec_in_the_same_process_starts_a_new_slot(slots: Path) -> None:
    path = script(
        slots.parent,
        """
        import os, sys
        if len(sys.argv) == 1:
            sys.modules["_lamplighter_bootstrap"].phase_begin("first")
            os.execv(sys.executable, [sys.executable, __file__, "again"])
        print(os.getpid())
        """,
    )
    done = run(slots, path)
    slot = the_only(slots)
    assert is_silent_success(done, f"{slot.pid}\n")
    assert slot.phase == ""
    assert slot.argv.endswith("again")


@pytest.mark.parametrize("folder", ["/proc", "/nowhere/at/all", "file"])
def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" if folder == "file" else Path(folder)
    env = environment(where, bare())
    code = "import os, sys, gc; print(len(gc.callbacks), sys.excepthook is sys.__excepthook__, len(os.listdir('/proc/self/fd')))"
    outputs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=each, check=False)
        for each in (env, bare())
    ]
    assert (outputs[0].returncode, outputs[0].stdout, outputs[0].stderr) == (0, outputs[1].stdout, "")


SITECUSTOMIZES = {
    "good": "import sys; sys.marked = 42; print('hello from', __name__, __file__ == sys.modules['sitecustomize'].__file__)",
    "raises": "raise ValueError('mine is broken')",
    "import error": "import not_a_module_of_anybody",
    "syntax error": "def (",
}


@pytest.mark.parametrize("kind", SITECUSTOMIZES)
def test_the_users_own_sitecustomize_runs_as_it_would_without_us(slots: Path, kind: str) -> None:
    own = slots.parent / "own"
    own.mkdir()
    script(own, SITECUSTOMIZES[kind], "sitecustomize.py")
    words = [sys.executable, "-c", "import sys; print(getattr(sys, 'marked', 0), 'sitecustomize' in sys.modules)"]
    base = bare(PYTHONPATH=str(own))
    without, with_us = (
        subprocess.run(words, capture_output=True, env=env, cwd=slots.parent, check=False)
        for env in (base, environment(slots, base))
    )
    assert (with_us.returncode, with_us.stdout, with_us.stderr) == (without.returncode, without.stdout, without.stderr)
    assert len(read_all(slots)) == 1


def test_the_door_speaks_the_oldest_python() -> None:
    tree = ast.parse((PATH / "sitecustomize.py").read_text())
    assert [path.name for path in PATH.iterdir() if path.name != "__pycache__" and path.suffix != ".pyc"] == [
        "sitecustomize.py"
    ]
    for node in ast.walk(tree):
        assert not isinstance(
            node, ast.JoinedStr | ast.AnnAssign | ast.NamedExpr | ast.AsyncFunctionDef | ast.Starred
        ) or (isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Load))
        if isinstance(node, ast.FunctionDef):
            given = [*node.args.posonlyargs, *node.args.kwonlyargs, *(a for a in node.args.args if a.annotation)]
            assert node.returns is None
            assert not given
        if isinstance(node, ast.Call):
            assert sum(isinstance(each, ast.Starred) for each in node.args) <= 1
        if isinstance(node, ast.Raise):
            assert node.cause is None


@pytest.mark.skipif(not PYTHONS, reason="no other Python is installed here")
@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.parents[1].name)
def test_other_pythons_are_counted_or_left_alone(slots: Path, python: Path) -> None:
    own = slots.parent / "own"
    own.mkdir()
    script(own, "import sys; sys.stdout.write('own ')", "sitecustomize.py")
    code = "import os, sys; sys.stdout.write(str(os.getpid()))"
    env = environment(slots, bare(PYTHONPATH=str(own)))
    done = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, check=False)
    version = tuple(int(part) for part in python.parents[1].name.split(".")[:2])
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "own", "")
    assert list(read_all(slots)) == ([int(done.stdout.split()[1])] if version >= (3, 9) else [])
    if version >= (3, 9):
        process = subprocess.Popen(
            [python, "-c", "n = 41 + 1\nimport time; time.sleep(60)"], env=env, stdout=subprocess.DEVNULL
        )
        STARTED.append(process)
        wait_for(lambda: process.pid in read_all(slots))
        stacks = wait_for(lambda: (got := ask_stacks(slots, process.pid, 5.0)) and numbers(got.threads[0]) and got)
        assert numbers(stacks.threads[0]) == {"n": 42}


# ---------------------------------------------------------------- children


def test_a_forked_child_has_a_slot_of_its_own(slots: Path) -> None:
    path = script(
        slots.parent,
        """
        import os, sys, time
        inside = sys.modules["_lamplighter_bootstrap"]
        inside.phase_begin("parent", 5); inside.phase_tick(2)
        child = os.fork()
        if child == 0:
            inside.phase_begin("child"); inside.phase_tick(1)
            time.sleep(60)
        print(child, flush=True)
        time.sleep(60)
        """,
    )
    process = start(slots, path)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        slot = wait_for(lambda: (got := read_all(slots).get(child)) and got.done == 1.0 and got, process=process)
        parent = read_all(slots)[process.pid]
        assert (slot.forked, slot.ppid, slot.phase, slot.pid) == (1, process.pid, "child", child)
        assert (parent.forked, parent.phase, parent.done, parent.total) == (0, "parent", 2.0, 5.0)
        assert ask(slots, child).threads[0].frames[0].line == 8
        assert ask(slots, process.pid).threads[0].frames[0].line == 10
        dump = slots / f"p{child}.dump"
        os.kill(child, 23)
        text = wait_for(lambda: dump.read_text())
        assert 'job.py", line 8' in text
        assert (slots / f"p{process.pid}.dump").read_text() == ""
    finally:
        os.kill(child, 9)


POOL = """
    import multiprocessing, os, sys

    def work(n):
        return os.getpid(), n * n

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        with context.Pool(2) as pool:
            found = pool.map(work, range(8), chunksize=1)
        print(*sorted({pid for pid, _ in found}), sum(square for _, square in found))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pool_works_and_its_workers_have_slots(slots: Path, method: str) -> None:
    done = run(slots, script(slots.parent, POOL), method)
    assert done.stderr == ""
    *pids, total = map(int, done.stdout.split())
    assert total == 140
    found = read_all(slots)
    assert set(pids) <= set(found)
    assert all(found[pid].forked == (method != "spawn") for pid in pids)


def test_where_the_other_threads_were_at_a_fork(slots: Path) -> None:
    path = script(
        slots.parent,
        """
        import os, threading, time
        lock = threading.Lock()
        def hold():
            with lock:
                ready.set(); time.sleep(60)
        ready = threading.Event()
        threading.Thread(target=hold, name="holder", daemon=True).start()
        ready.wait()
        child = os.fork()
        if child == 0:
            lock.acquire()
        print(child, flush=True)
        time.sleep(60)
        """,
    )
    process = start(slots, path)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        slot = wait_for(lambda: read_all(slots).get(child))
        beside = wait_for(lambda: read_all(slots)[child].forked_beside)
        assert beside == f"{path}:6 (holder)"
        assert slot.forked == 1
        assert read_all(slots)[process.pid].forked_beside == ""
        assert wait_for(lambda: (got := ask(slots, child)).threads[0].frames[0].line == 12 and got)
    finally:
        os.kill(child, 9)


def test_a_script_that_closes_all_descriptors_keeps_its_own(slots: Path) -> None:
    path = script(
        slots.parent,
        """
        import os, sys
        os.closerange(3, 100)
        reading, writing = os.pipe()
        more = [os.open("/dev/null", os.O_RDONLY) for _ in range(6)]
        print(flush=True)
        sys.stdin.readline()
        os.write(writing, b"stacks 1\\nmine")
        print(os.read(reading, 100), flush=True)
        if os.fork() == 0:
            os.write(writing, b"child's")
            print(os.read(reading, 100), flush=True)
            os._exit(0)
        os.wait()
        """,
    )
    process = subprocess.Popen([sys.executable, path], env=environment(slots, bare()), stdin=-1, stdout=-1, text=True)
    STARTED.append(process)  # type: ignore[arg-type]
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    ask_stacks(slots, process.pid, 1.0)  # the last that this thread can hear
    out, _ = process.communicate("\n", timeout=30)
    assert out == "b'stacks 1\\nmine'\nb\"child's\"\n"


# ---------------------------------------------------------------- stacks


def test_the_stack_of_a_sleeping_process(slots: Path) -> None:
    path = script(
        slots.parent,
        """
        import time
        def nap(seconds, count=7, secret="text", ratio=0.5, on=True):
            time.sleep(seconds)
        nap(60)
        """,
    )
    process = start(slots, path)
    wait_for(lambda: process.pid in read_all(slots))
    stacks = wait_for(lambda: (got := ask(slots, process.pid)).threads[0].frames[0].func == "nap" and got)
    (main,) = stacks.threads
    assert stacks.source == "listener"
    assert [(frame.file, frame.line, frame.func) for frame in main.frames] == [
        (str(path), 4, "nap"), (str(path), 5, "<module>"),
    ]  # fmt: skip
    assert (main.name, main.tid) == ("MainThread", process.pid)
    assert numbers(main) == {"seconds": 60, "count": 7, "on": True}
    slot = read_all(slots)[process.pid]
    assert slot.answers >= 2 and slot.answers % 2 == 0, "begun and ended"
    assert ask_stacks(slots, 2**22 + 1, 0.1) is None


def test_looking_at_variables_keeps_nothing_alive(slots: Path) -> None:
    path = script(
        slots.parent,
        """
        import sys, time, weakref
        class Big: pass
        def work():
            big, n = Big(), 1
            alive = weakref.ref(big)
            print(flush=True); sys.stdin.readline()
            del big
            return alive() is None
        def snapshot():
            held = locals()
            fresh = 1
            print(flush=True); sys.stdin.readline()
            return list(held)
        print(work(), snapshot(), flush=True)
        """,
    )
    process = subprocess.Popen([sys.executable, path], env=environment(slots, bare()), stdin=-1, stdout=-1, text=True)
    STARTED.append(process)  # type: ignore[arg-type]
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "\n"
        answer = ask(slots, process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.stdout.readline() == "True []\n"
    assert numbers(answer.threads[0]) == {} or sys.version_info >= (3, 13)


def test_three_hundred_asks_do_not_hurt_a_busy_process_with_threads(slots: Path) -> None:
    path = script(
        slots.parent,
        """
        import threading
        def fib(n):
            return n if n < 2 else fib(n - 1) + fib(n - 2)
        def spin():
            while True:
                fib(12)
        for place in range(2):
            threading.Thread(target=spin, name=f"spin-{place}", daemon=True).start()
        turn = 0
        while True:
            turn += 1
            fib(10)
        """,
    )
    process = start(slots, path)
    wait_for(lambda: process.pid in read_all(slots))
    wait_for(lambda: len(ask(slots, process.pid).threads) == 3)
    seen = [ask(slots, process.pid) for _ in range(300)]
    assert process.poll() is None
    assert {thread.name for thread in seen[-1].threads} == {"MainThread", *(f"spin-{place}" for place in range(2))}
    assert seen[0].threads[0].name == "MainThread"
    turns = [numbers(got.threads[0])["turn"] for got in seen if "turn" in numbers(got.threads[0])]
    assert turns == sorted(turns)
    assert read_all(slots)[process.pid].answers >= 300


def test_a_signal_that_the_script_waits_for_still_reaches_it(slots: Path) -> None:
    path = script(
        slots.parent,
        """
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        print(flush=True)
        print(signal.sigwait({signal.SIGTERM}).name)
        """,
    )
    process = start(slots, path)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    process.terminate()
    assert process.communicate(timeout=30)[0] == b"SIGTERM\n"
    assert process.returncode == 0


# ---------------------------------------------------------------- counters


TRAIN = """
    import torch, warnings
    from torch.utils.data import DataLoader

    class Numbers(torch.utils.data.Dataset):
        def __len__(self): return 40
        def __getitem__(self, n): return torch.full((4,), float(n))

    if __name__ == "__main__":
        model = torch.nn.Linear(4, 1)
        first, second = torch.optim.SGD(model.parameters(), 0.01), torch.optim.AdamW(model.parameters())
        loader = DataLoader(Numbers(), batch_size=4)
        for epoch in range(2):
            for batch in loader:
                model(batch).mean().backward()
                first.step(); first.zero_grad()
        second.step()
"""


def test_steps_and_fetches_are_counted_exactly(slots: Path) -> None:
    done = run(slots, script(slots.parent, TRAIN))
    slot = the_only(slots)
    assert is_silent_success(done)
    assert (slot.step, slot.optimizers, slot.fetches, slot.items) == (21, 2, 20, 20)
    assert (slot.loader_len, slot.loader_workers, slot.wait_worker, slot.worker) == (10, 0, -1, -1)
    assert (slot.in_fetch, slot.in_item, slot.item) == (0, 0, "36..39")
    assert slot.hello_ns < slot.step_first_ns < slot.step_ns < time.monotonic_ns()
    assert 0 < slot.fetch_wait_ns < slot.step_ns - slot.hello_ns


WORKERS = """
    import sys, time, torch
    from torch.utils.data import DataLoader

    class Sleepy(torch.utils.data.Dataset):
        def __len__(self): return 24
        def __getitem__(self, n):
            if n == 10: time.sleep(60)
            return n

    if __name__ == "__main__":
        for batch in DataLoader(Sleepy(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1]): pass
"""


@pytest.mark.parametrize(
    "method", ["fork", "spawn", pytest.param("forkserver", marks=LONG)]
)  # the pool above has all three
def test_the_worker_that_is_waited_for_and_its_item(slots: Path, method: str) -> None:
    process = start(slots, script(slots.parent, WORKERS), method)

    def asleep() -> Any:
        found = read_all(slots)
        main = found.get(process.pid)
        readers = [slot for slot in found.values() if slot.in_item]
        both = {slot.worker for slot in found.values() if slot.items} == {0, 1}
        there = main and main.in_fetch and main.fetches == 2 and both
        return there and [slot.item for slot in readers] == ["8..11"] and found

    found = wait_for(asleep, 60, process)
    main = found[process.pid]
    (reader,) = (slot for slot in found.values() if slot.in_item)
    assert (main.loader_workers, main.loader_len, main.wait_worker) == (2, 6, 0)
    assert (reader.worker, reader.items, reader.steps) == (0, 1, 0)
    assert main.fetch_since_ns > main.hello_ns
    frames = ask(slots, reader.pid).threads[0].frames
    assert (frames[0].func, frames[0].line) == ("__getitem__", 8)
    assert {slot.worker for slot in found.values() if slot.items} == {0, 1}


def test_an_iterable_dataset_goes_by_running_numbers(slots: Path) -> None:
    code = """
        import torch
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self): return iter(range(10))
        for batch in torch.utils.data.DataLoader(Stream(), batch_size=4): pass
    """
    assert is_silent_success(run(slots, script(slots.parent, code)))
    slot = the_only(slots)
    assert (slot.fetches, slot.items, slot.loader_len, slot.item) == (3, 3, -1, "batch 3")


def test_progress_bars(slots: Path) -> None:
    code = """
        import sys, time
        from tqdm import tqdm, trange
        for n in tqdm(range(500), desc="reading", file=open("/dev/null", "w")): pass
        with tqdm(total=70, desc="writing", file=open("/dev/null", "w")) as bar:
            for n in range(7): bar.update(10)
            print(flush=True); sys.stdin.readline()
        for n in tqdm((n for n in range(30)), file=open("/dev/null", "w")): pass
        hidden = tqdm(total=3, disable=True); hidden.update(3); hidden.close()
    """
    process = subprocess.Popen(
        [sys.executable, script(slots.parent, code)], env=environment(slots, bare()), stdin=-1, stdout=-1, stderr=-2
    )
    STARTED.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    slot = the_only(slots)
    assert (slot.bar, slot.bar_n, slot.bar_total) == ("writing", 70, 70)
    assert process.communicate(b"\n", timeout=30)[0] == b""
    after = the_only(slots)
    assert (after.bar, after.bar_n, after.bar_total) == ("", 30, -1)
    assert after.bar_ns > slot.bar_ns


def test_compiling_is_seen_to_start_and_to_end(slots: Path) -> None:
    code = """
        import sys, torch
        slot = sys.modules["_lamplighter_bootstrap"].slot
        seen = []
        def backend(graph, inputs):
            seen.append(slot.get("compiling"))
            return graph.forward
        f = torch.compile(lambda x: x * 2 + 1, backend=backend, dynamic=False)
        f(torch.ones(3)); f(torch.ones(3)); f(torch.ones(4))
        torch._dynamo.reset()
        f(torch.ones(5))
        model = torch.nn.Linear(2, 2); opt = torch.optim.SGD(model.parameters(), 0.1)
        step = torch.compile(lambda: opt.step(), backend=backend)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward(); step()
        print(seen[:3], slot.get("compiling"))
    """
    done = run(slots, script(slots.parent, code), timeout=180)
    slot = the_only(slots)
    assert (done.returncode, done.stdout) == (0, "[1, 1, 1] 0\n"), done.stderr
    said = [line for line in done.stderr.splitlines() if "Profiler record function" not in line]  # torch's own word
    assert said == []
    assert slot.compiles >= 4
    assert slot.recompiles >= 1
    assert slot.compile_since_ns > slot.hello_ns
    assert slot.step == 3


def test_collectives_of_two_ranks_with_their_lines(slots: Path) -> None:
    code = """
        import os, sys, time, torch, torch.distributed as dist
        rank = int(sys.argv[1])
        dist.init_process_group("gloo", rank=rank, world_size=2)
        ones = torch.ones(10, 100)
        for _ in range(3):
            dist.all_reduce(ones)
        said = [None, None]
        dist.all_gather_object(said, rank)
        assert said == [0, 1] and ones[0, 0] == 8, (said, ones[0, 0])
        @torch.compile(fullgraph=True, backend="eager")
        def compiled(x):
            dist.all_reduce(x)
            return x + 1
        assert compiled(torch.ones(2))[0] == 3
        import inspect, pickle
        assert list(inspect.signature(dist.all_reduce).parameters)[0] == "tensor"
        assert pickle.loads(pickle.dumps(dist.all_reduce)) is dist.all_reduce
        if rank == 1:
            time.sleep(60)
        dist.barrier()
    """
    path = script(slots.parent, code)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [start(slots, path, rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in range(2)]

    def both() -> Any:
        found = read_all(slots)
        pair = [found.get(process.pid) for process in ranks]
        return all(pair) and pair[0].in_coll and pair[0].coll_seq >= 5 and pair  # type: ignore[union-attr]

    waiting, late = wait_for(both, 90, ranks[0])
    wait_for(lambda: ask(slots, ranks[1].pid).threads[0].frames[0].line == 20)
    late = read_all(slots)[ranks[1].pid]
    assert (waiting.rank, waiting.world, late.rank, late.world) == (0, 2, 1, 2)
    assert waiting.coll_seq == late.coll_seq + 1
    assert late.coll_seq == 4
    assert (waiting.coll, waiting.coll_at) == ("barrier", f"{path}:21")
    assert (late.in_coll, late.coll, late.coll_at) == (0, "all_gather_object", f"{path}:9")
    for process in ranks:
        assert process.poll() is None


def test_a_collective_is_named_with_its_tensor(slots: Path) -> None:
    code = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        dist.all_reduce(torch.ones(1000))
        dist.all_gather([torch.ones(2, dtype=torch.int64)], torch.ones(2, dtype=torch.int64))
        try:
            dist.broadcast(torch.ones(1), src=5)
        except Exception as error:
            assert "inside" not in str(error)
        dist.destroy_process_group()
    """
    path = script(slots.parent, code)
    done = run(slots, path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    slot = the_only(slots)
    assert (slot.coll_seq, slot.in_coll, slot.coll, slot.coll_at) == (3, 0, "broadcast [1] float32", f"{path}:7")


def test_what_cannot_be_pickled_is_named(slots: Path) -> None:
    code = """
        import torch
        from torch.utils.data import DataLoader

        class Texts(torch.utils.data.Dataset):
            def __init__(self):
                self.names = ["a"]
                self.transforms = [str, lambda text: text]
            def __len__(self): return 4
            def __getitem__(self, n): return n

        if __name__ == "__main__":
            for batch in DataLoader(Texts(), num_workers=1, multiprocessing_context="spawn"): pass
    """
    path = script(slots.parent, code)
    done = run(slots, path)
    without = subprocess.run([sys.executable, path], env=bare(), capture_output=True, text=True, check=False)
    assert done.returncode == without.returncode == 1
    assert done.stderr.splitlines()[-1] == without.stderr.splitlines()[-1]
    assert "lambda" in done.stderr.splitlines()[-1]
    errors = [slot.error for slot in read_all(slots).values() if slot.error]
    assert errors == ["dataset.transforms[1]: <function <lambda> at job.py:8>"]


def test_an_uncaught_error_is_kept_and_printed_as_ever(slots: Path) -> None:
    path = script(slots.parent, "import json\ndef f():\n    json.loads('{')\nf()\n")
    done = run(slots, path)
    without = subprocess.run([sys.executable, path], env=bare(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, without.stderr)
    assert the_only(slots).error.startswith("JSONDecodeError: Expecting property name")
    assert the_only(slots).error.endswith(f"({path}:3)")


def test_a_full_collection_is_seen(slots: Path) -> None:
    code = """
        import gc, sys
        slot = sys.modules["_lamplighter_bootstrap"].slot
        class Cycle:
            def __del__(self): print(slot.get("collecting"))
        one = Cycle(); one.me = one; del one
        gc.collect(0)
        one = Cycle(); one.me = one; del one
        gc.collect()
        print(slot.get("collecting"), slot.get("gc_since_ns") > 0)
    """
    assert is_silent_success(run(slots, script(slots.parent, code)), "0\n1\n0 True\n")


def test_modules_do_not_see_that_they_were_counted_in(slots: Path) -> None:
    code = """
        import importlib, inspect, multiprocessing.reduction as reduction, tqdm.std, importlib.util
        for module in (reduction, tqdm.std):
            assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"
            assert importlib.util.find_spec(module.__name__).loader.get_filename() == module.__file__
        before = tqdm.std.tqdm.update
        importlib.reload(reduction); importlib.reload(tqdm.std)
        assert tqdm.std.tqdm.update.__wrapped__.__name__ == "update" and not hasattr(tqdm.std.tqdm.update.__wrapped__, "__wrapped__")
        assert "self, n=1" in str(inspect.signature(tqdm.std.tqdm.update)), inspect.signature(tqdm.std.tqdm.update)
    """
    assert is_silent_success(run(slots, script(slots.parent, code)))


# ---------------------------------------------------------------- what a script says itself


PHASES = """
    import lamplighter as lamp, sys
    with lamp.phase("prepare", total=10, unit="files") as p:
        p.tick(3, "a.txt")
        with lamp.phase("inner") as q:
            q.tick(0.5)
            print(flush=True); sys.stdin.readline()
        p.tick()
        print(flush=True); sys.stdin.readline()
    assert not {"torch", "numpy", "pydantic", "lamplighter.report"} & set(sys.modules)
"""


@pytest.mark.parametrize("watched", [True, False])
def test_a_script_says_its_phases(slots: Path, watched: bool) -> None:
    base = bare(PYTHONPATH=str(SRC))
    env = environment(slots, base) if watched else base
    process = subprocess.Popen([sys.executable, script(slots.parent, PHASES)], env=env, stdin=-1, stdout=-1, stderr=-2)
    STARTED.append(process)
    assert process.stdin is not None
    assert process.stdout is not None
    for expected in [("prepare > inner", 0.5, -1.0, "", ""), ("prepare", 4.0, 10.0, "files", "a.txt")]:
        assert process.stdout.readline() == b"\n"
        if watched:
            slot = the_only(slots)
            assert (slot.phase, slot.done, slot.total, slot.unit, slot.phase_item) == expected
            assert slot.phase_since_ns > slot.hello_ns
        process.stdin.write(b"\n")
        process.stdin.flush()
    assert process.communicate(timeout=30)[0] == b""
    assert process.returncode == 0
    assert [(slot.phase, slot.phase_since_ns) for slot in read_all(slots).values()] == ([("", 0)] if watched else [])


def test_under_lamp_train_a_phase_goes_to_its_report() -> None:
    from lamplighter import report

    assert isinstance(lamplighter.phase("x", 3, "files"), report.Phase)


def test_the_trainer_callback_without_transformers_gives_one_clear_error(slots: Path) -> None:
    code = "import sys; sys.modules['transformers'] = None\nimport lamplighter\nlamplighter.TrainerCallback"
    done = run(slots, "-c", code, PYTHONPATH=str(SRC))
    assert done.returncode == 1
    assert "ImportError: lamplighter.TrainerCallback needs transformers" in done.stderr.splitlines()[-1]
    with pytest.raises(AttributeError, match="no_such_name"):
        lamplighter.no_such_name  # noqa: B018


TRAINER = """
    import json, logging, sys, torch, transformers, lamplighter
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
    rows = [{"input_ids": list(range(3, 19)), "labels": list(range(3, 19))} for _ in range(48)]
    inside = sys.modules["_lamplighter_bootstrap"]
    seen = []
    class Before(transformers.TrainerCallback):
        def on_save(self, *a, **k): seen.append([p[0] for p in inside._phases])
    class Spy(transformers.TrainerCallback):
        def on_prediction_step(self, *a, **k): seen.append([p[0] for p in inside._phases])
        def on_step_end(self, args, state, control, **k):
            seen.append([p[0] for p in inside._phases]); steps.append((state.global_step, inside._phases[0][3]))
    steps = []
    args = transformers.TrainingArguments("out", max_steps=12, per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
        save_steps=6, eval_strategy="steps", eval_steps=4, logging_steps=3, use_cpu=True, disable_tqdm=False)
    callbacks = [Before(), lamplighter.TrainerCallback(), Spy()]
    transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8], callbacks=callbacks).train()
    print("SEEN", json.dumps([seen, steps, inside._phases]))
"""


@pytest.mark.slow
def test_a_hugging_face_trainer_is_counted_exactly(slots: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = shared("models", "stories260K_hf_llama")
    done = run(
        slots, script(slots.parent, TRAINER), model, timeout=240, PYTHONPATH=str(SRC), TOKENIZERS_PARALLELISM="false"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen, steps, left = json.loads(done.stdout.rpartition("SEEN ")[2])
    slot = next(slot for slot in read_all(slots).values() if slot.step)
    assert slot.step == 12
    assert slot.fetches >= 24
    assert ["train", "evaluate"] in seen
    assert ["train", "save"] in seen
    assert steps == [[n, float(n)] for n in range(1, 13)]
    assert left == []


# ---------------------------------------------------------------- the price


def test_the_price_of_a_start_and_of_a_step(slots: Path, record_property: Any) -> None:
    """Measured and shown, not judged: a shared machine is no place to judge milliseconds."""
    base = bare()
    environments = {"bare": base, "watched": environment(slots, base)}
    taken: dict[str, list[float]] = {name: [] for name in environments}
    for _ in range(10):
        for name, env in environments.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", "pass"], env=env, check=True)
            taken[name].append(1e3 * (time.perf_counter() - started))
    assert len(read_all(slots)) == 10
    code = """
        import sys, timeit, torch.optim
        counters = sys.modules["_lamplighter_hooks"]
        optimizer = object()
        print(min(timeit.repeat(lambda: counters._on_step(optimizer, (), {}), number=20000, repeat=5)) / 20000 * 1e6)
    """
    step_us = float(run(slots, script(slots.parent, code)).stdout)
    assert 0 < step_us < 50
    middle = {name: statistics.median(values) for name, values in taken.items()}
    record_property("start_ms", middle)
    sys.stderr.write(
        f"\npython -c pass: {middle['bare']:.1f} ms, watched {middle['watched']:.1f} ms; a step: {step_us:.2f} us\n"
    )


def test_a_slot_that_is_not_one_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "p1.slot").write_bytes(b"x" * SLOT_BYTES)
    (tmp_path / "p2.slot").write_bytes(MAGIC)
    assert read_all(tmp_path) == {}
    assert read_slot(tmp_path / "p3.slot") is None
