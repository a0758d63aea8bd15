"""The engine of the server: newer weights while texts are written, with room for both and without; nothing is kept that is let go."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sample import LLAMA, a_model

from lamplighter import report
from lamplighter.commands.serve import _has_room
from lamplighter.data.tokenizer import byte_level
from lamplighter.model.build import Built
from lamplighter.procs.procfs import pid_start
from lamplighter.rundir import write_manifest
from lamplighter.serve import app
from lamplighter.serve import engine as engines
from lamplighter.serve.bridge import Bridge
from lamplighter.serve.engine import Engine, Loaded
from lamplighter.serve.protocol import Asked


def loaded(folder: Path) -> Loaded:
    tokenizer = byte_level()
    shape = replace(LLAMA, vocab_size=tokenizer.vocab_size, positions=64, dropout=0.0)
    built = Built(a_model(shape), {}, shape.vocab_size, 64)
    return Loaded(built, tokenizer, None, "r", int(folder.name.split("-")[1]), folder)


class Running:
    """An engine in a thread, and what it sends."""

    def __init__(self, root: Path, has_room: bool, load: Callable[[Path], Loaded] = loaded) -> None:
        self.root, self.sent = root, list[dict[str, Any]]()
        self.save(1)
        self.engine = Engine(load(root / "checkpoint-1"), 2, 64, self.sent.append)
        self.phase = report.Phase("serve", None, "tokens")
        follow = (root, load, lambda _: has_room)
        self.threads = [
            threading.Thread(target=self.engine.run, args=(self.phase,), daemon=True),
            threading.Thread(target=self.engine.follow, args=follow, daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def save(self, step: int) -> None:
        folder = self.root / f".writing-{step}"
        folder.mkdir()
        (folder / "weights").write_text(str(step))
        write_manifest(folder, {}, step=step)
        folder.rename(self.root / f"checkpoint-{step}")

    def ask(self, key: int, most: int) -> None:
        record = Asked(prompt="The", max_tokens=most, temperature=0.0).record()
        self.engine.inbox.put({"op": "add", "key": key, **record})

    def wait(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline and self.threads[0].is_alive(), self.sent[-5:]
            time.sleep(0.01)

    def ended(self, key: int) -> bool:
        return any(one.get("key") == key and one.get("end") for one in self.sent)

    def model_of(self, key: int) -> str:
        return str(next(one["model"] for one in self.sent if one.get("key") == key and "model" in one))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_FOLLOW_S", 0.02)
    monkeypatch.setattr(report, "stopping", lambda: False)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("has_room", [True, False])
def test_texts_end_on_the_weights_that_they_began_with(tmp_path: Path, has_room: bool) -> None:
    there: list[bool] = []
    olds: list[weakref.ref[Any]] = []

    def load(folder: Path) -> Loaded:
        gc.collect()
        there.extend(one() is not None for one in olds)
        return loaded(folder)

    going = Running(tmp_path, has_room, load)
    olds.append(old := weakref.ref(going.engine.current.loaded.built.model))
    going.ask(1, 50)
    going.wait(lambda: any(one.get("key") == 1 for one in going.sent))
    going.save(2)
    going.ask(2, 3)
    going.wait(lambda: any("ready" in one for one in going.sent) and going.ended(1) and going.ended(2))
    going.ask(3, 3)
    going.wait(lambda: going.ended(3))
    assert going.model_of(1) == "r:checkpoint-1" and going.model_of(3) == "r:checkpoint-2"
    going.wait(lambda: len(going.engine.servings) == 1)
    going.engine.inbox.put(None)
    going.threads[0].join(10)
    gc.collect()
    assert old() is None, "the old weights are still in memory"
    assert there == [has_room], "without room for both, the old weights go first"
    assert not engines.held.is_ours(tmp_path / "checkpoint-1") and engines.held.is_ours(tmp_path / "checkpoint-2")
    engines.held.let_go(tmp_path / "checkpoint-2")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", [ValueError("not for us"), torch.OutOfMemoryError("no memory for them")])
def test_weights_that_cannot_be_loaded_leave_the_old_ones(tmp_path: Path, error: Exception) -> None:
    def load(folder: Path) -> Loaded:
        if folder.name == "checkpoint-2":
            raise error
        return loaded(folder)

    going = Running(tmp_path, False, load)
    going.save(2)
    going.wait(lambda: any("ready" in one for one in going.sent))  # drained, tried, and back again
    going.ask(1, 3)
    going.wait(lambda: going.ended(1))
    assert going.model_of(1) == "r:checkpoint-1"
    going.save(3)  # and it goes on following
    going.wait(lambda: any(one.get("ready", {}).get("step") == 3 for one in going.sent))
    going.engine.inbox.put(None)
    going.threads[0].join(10)


def test_on_a_gpu_its_own_memory_says_whether_both_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr("lamplighter.commands.model_folder.refuse_without_memory", lambda *_, base: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for free, fits in ((1 << 40, True), (2000 + (256 << 20), False), (0, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 1 << 40))
        assert _has_room(tmp_path, 1000, None) is fits


@pytest.mark.usefixtures("quick")
def test_a_text_that_is_asked_for_twice_is_written_once(tmp_path: Path) -> None:
    going = Running(tmp_path, True)
    going.ask(1, 30)
    going.ask(1, 30)
    going.wait(lambda: going.ended(1))
    assert sum(one.get("tokens", 0) for one in going.sent) <= 30
    going.engine.inbox.put(None)
    going.threads[0].join(10)


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_BODY_S", 0.02)
    sent: list[Any] = []

    async def nothing() -> Any:
        await asyncio.sleep(60)

    async def take(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"host", b"127.0.0.1")], "query_string": b""}  # fmt: skip
    asyncio.run(asyncio.wait_for(app.make_app(Bridge(-1, 4), 10.0)(scope, nothing, take), 20))
    assert sent[0]["status"] == 408 and b"did not arrive" in sent[1]["body"]


def a_bridge(most: int) -> Bridge:
    """Before a child that is this process, and says what the test makes it say."""
    facts = {"model": "m", "name": "m", "pid": os.getpid(), "pid_start": pid_start(os.getpid())}
    return Bridge(-1, most, facts)


def asked_of(bridge: Bridge, body: dict[str, Any], said: list[dict[str, Any]], leaves: bool) -> list[Any]:
    """The answer to one request, whose text is `said`; the client leaves then, or waits for the end."""
    sent: list[Any] = []

    async def ask() -> None:
        gone, first = asyncio.Event(), [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            if first:
                return first.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"host", b"127.0.0.1")], "query_string": b""}  # fmt: skip
        task = asyncio.create_task(app.make_app(bridge, 10.0)(scope, receive, send))
        while not bridge.waiting and not task.done():
            await asyncio.sleep(0.001)
        for one in said:
            bridge._hear({"key": 1, **one})
        while leaves and not any(message.get("body") for message in sent):
            await asyncio.sleep(0.001)
        if leaves:
            gone.set()
        await asyncio.wait_for(task, 10)

    asyncio.run(ask())
    return sent


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_leaves_its_stream_is_counted(leaves: bool) -> None:
    bridge = a_bridge(4)
    said = [{"text": "a", "tokens": 1}, *([] if leaves else [{"text": "b", "end": "stop"}])]
    sent = asked_of(bridge, {"prompt": "x", "stream": True}, said, leaves)
    assert sent[0]["status"] == 200 and not bridge.waiting
    assert f"lamp_serve_gone_total {int(leaves)}\n" in app._prometheus(bridge)


def test_more_texts_than_there_ever_is_room_for_are_a_mistake_and_no_load() -> None:
    bridge = a_bridge(3)
    sent = asked_of(bridge, {"prompt": "x", "n": 4}, [], leaves=False)
    assert sent[0]["status"] == 400 and json.loads(sent[1]["body"])["error"]["param"] == "n"
    assert not bridge.waiting and not bridge.counts["refused"]


def test_connections_that_ask_for_nothing_make_room_and_go() -> None:
    uvicorn = pytest.importorskip("uvicorn")
    from lamplighter.serve.connections import BoundedProtocol

    class Small(BoundedProtocol):
        most, ask_s = 8, 0.3

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.8)  # longer than a connection may be idle
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as opened:
        port = listening.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(slow, http=Small, ws="none", lifespan="off", log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()

        def asked() -> socket.socket:
            one = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            one.settimeout(20)
            one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return one

        healthy = [asked() for _ in range(4)]
        idle = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(30)]
        trickle = idle[-1]
        trickle.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")  # its head never ends
        healthy.append(asked())
        endless = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        endless.settimeout(20)
        with contextlib.suppress(OSError):  # it is closed while we still send
            endless.sendall(b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 5_000_000)
        with contextlib.suppress(ConnectionResetError):
            assert endless.recv(100)[:12] in (b"HTTP/1.1 400", b"")
        for one in healthy:
            assert one.recv(1000).startswith(b"HTTP/1.1 200")
        for one in idle:  # closed: for want of room, or after a while
            one.settimeout(20)
            assert one.recv(1) == b""
        server.should_exit = True
        thread.join(10)
