"""Beside a run that goes on: twenty newer checkpoints are swapped in under load, nothing that is read is pruned, evaluation yields."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lamplighter.rundir import RunDir, newest_first, step_of
from running import LONG, TINY, start_lamp, wait_for
from serving import ask, serving

pytestmark = LONG
SWAPS = 20
LIVE = [
    *TINY, "--data.seq_len", "256", "--model.family", "llama", "--train.steps", "1000000", "--save.every_s", "0.7", "--save.keep", "1",
    "--train.compile", "false",
]  # fmt: skip


@pytest.fixture
def live(tmp_path: Path) -> Iterator[RunDir]:
    """A run that is being trained, saves all the time and keeps one checkpoint."""
    process = start_lamp("train", "--run", "r", *LIVE, cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "r")
    wait_for(lambda: newest_first(run.checkpoints), 180, process)
    yield run
    process.terminate()
    assert process.wait(30) == 75


def one_text(port: int, number: int) -> set[str]:
    """A stream to its end: the models that its events name, which must be one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"prompt": f"The fog of {number}", "max_tokens": 60, "stream": True, "seed": number}
    connection.request("POST", "/v1/completions", json.dumps(body).encode())
    reply = connection.getresponse()
    lines = reply.read().decode().strip().split("\n\n")
    connection.close()
    assert reply.status == 200 and lines[-1] == "data: [DONE]", lines[-2:]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert not [event for event in events if "error" in event], events[-1]
    assert events[-1]["choices"][0]["finish_reason"] in ("length", "stop")
    return {event["model"] for event in events}


def test_twenty_swaps_under_load_fail_no_request(live: RunDir, tmp_path: Path) -> None:
    with serving(tmp_path, "r", "--follow", "--max-batch", "4") as (port, process):
        models: list[set[str]] = []
        over, memory = threading.Event(), list[int]()

        def client(first: int) -> int:
            count = 0
            while not over.is_set():
                models.append(one_text(port, first * 100_000 + count))
                count += 1
            return count

        def swaps() -> int:
            found = re.search(r"^lamp_serve_swaps_total (\d+)", ask(port, "/metrics")[1], re.MULTILINE)
            assert found
            return int(found[1])

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(client, number) for number in range(4)]
            try:
                for aim in (2, SWAPS):
                    wait_for(lambda aim=aim: swaps() >= aim or any(one.done() for one in clients), 180, process)  # type: ignore[misc]
                    [child] = psutil.Process(process.pid).children()
                    memory.append(child.memory_info().rss)
            finally:
                over.set()
            answered = sum(one.result() for one in clients)  # raises what failed
        assert all(len(one) == 1 for one in models), "a text changed its weights"
        assert len(set.union(*models)) >= SWAPS // 2
        assert answered == len(models) > SWAPS
        assert memory[1] < memory[0] * 1.15 + 30e6, memory
        (tmp_path / "figures.txt").write_text(
            f"{answered} texts, {len(set.union(*models))} checkpoints, {memory} bytes\n"
        )


def test_what_a_server_reads_is_not_pruned(live: RunDir, tmp_path: Path) -> None:
    with serving(tmp_path, "r") as (port, process):
        step = ask(port, "/health")[1]["step"]

        def newer() -> int:
            return sum(step_of(path) > step for path in newest_first(live.checkpoints))

        before = step_of(newest_first(live.checkpoints)[0])
        wait_for(lambda: newer() and step_of(newest_first(live.checkpoints)[0]) > before + 2, 60, process)
        time.sleep(2)  # some saves, each of which prunes
        assert (live.checkpoint(step) / "model.safetensors").is_file()
        assert len(newest_first(live.checkpoints)) <= 4  # the newest, this one, one that is being verified or replaced
    wait_for(lambda: not live.checkpoint(step).exists(), 60)


def test_an_evaluation_beside_a_training_yields(live: RunDir, tmp_path: Path) -> None:
    rows = [{"goal": f"Light the lamp number {n}" * 6, "sol1": "with a match", "sol2": "never", "label": 0} for n in range(3000)]  # fmt: skip
    (tmp_path / "data" / "piqa").mkdir(parents=True)
    (tmp_path / "data" / "piqa" / "valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = psutil.Process().nice()
    process = start_lamp("eval", "r", "--data", "data", "--tasks", "piqa", cwd=tmp_path)

    def child() -> psutil.Process | None:
        found = psutil.Process(process.pid).children()
        return next((one for one in found if "child_main" in " ".join(one.cmdline())), None)

    wait_for(lambda: (one := child()) and one.nice() == min(19, own + 10), 60, process)
    [held] = wait_for(lambda: (one := child()) and _held_by(one.pid, live), 60, process)
    time.sleep(3)
    assert held.is_file()  # saves went on and pruned, but not this
    assert process.wait(180) == 0, (tmp_path / "out.txt").read_text()[-2000:]
    assert "r is being trained: this yields to it" in (tmp_path / "out.txt").read_text()
    assert list((live.path / "evaluations").glob("piqa-*.json"))


def _held_by(pid: int, run: RunDir) -> list[Path]:
    """The manifest that a process has open."""
    links = [path.resolve() for path in Path(f"/proc/{pid}/fd").iterdir()]
    return [path for path in links if path.name == "manifest.json" and run.path.resolve() in path.parents][:1]
