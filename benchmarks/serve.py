"""Tokens a second and time to the first token of lamp serve, beside transformers serve and llama.cpp's server; and a soak.

In:  a model folder, the GGUF with the same weights (for llama.cpp, by xllamacpp; it is written out as F32 first).
Out: tables for 1, 4 and 16 clients at a time. All servers are up; in each round each has the machine for itself in its turn.

    python benchmarks/serve.py --folder DIR [--gguf FILE] [--clients 1 4 16] [--tokens 32] [--threads 1] [--without NAME ...]
    python benchmarks/serve.py --folder DIR --soak 60

The soak sends, for so many seconds, healthy requests beside clients that vanish, garbage, prompts that are too long and more
connections than are taken: the server must not die, every healthy request must be answered, and its memory must stay flat.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measured
import peers

PROMPT = "The lamplighter went from street to street in the fog, and at every corner he thought of the letter in his coat. " * 2  # fmt: skip
LLAMA_CPP = """
import sys, time, xllamacpp as x
p = x.CommonParams()
p.model.path, p.hostnames, p.port = sys.argv[1], ["127.0.0.1"], int(sys.argv[2])
p.n_ctx, p.n_parallel = 16 * 512, 16
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[3])
s = x.Server(p)
print(s.listening_address, flush=True)
time.sleep(10**6)
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def start(name: str, wanted: Any, port: int, work: Path, rows: tuple[int, int] = (16, 64)) -> subprocess.Popen[bytes]:
    """`rows`: of ours, the texts that are written at a time and those that may wait."""
    threads = str(wanted.threads)
    ours = [sys.executable, "-m", "lamplighter", "serve", str(wanted.folder), "--port", str(port), "--max-batch", str(rows[0]), "--max-queue", str(rows[1]), "--context", "512", "--threads", threads]  # fmt: skip
    commands = {
        "ours": ours,
        "transformers serve": [str(peers.python("serving").parent / "transformers"), "serve", str(wanted.folder), "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"],
        "llama.cpp F32": [sys.executable, "-c", LLAMA_CPP, str(work / "f32.gguf"), str(port), threads],
    }  # fmt: skip
    path = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with open(work / f"{name.split()[0]}.log", "wb") as log:
        return subprocess.Popen(commands[name], stdout=log, stderr=log, env={**os.environ, **path, **({"PYTHONPATH": str(measured.ROOT / "src")} if name == "ours" else {})}, start_new_session=True)  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """The server that was started here, and what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)  # its own session: nobody else is in it
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                continue


def request(port: int, body: dict[str, Any] | bytes, timeout: float = 600, path: str = "/v1/completions") -> http.client.HTTPResponse:  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"content-type": "application/json"})
    return connection.getresponse()


CHAT = "/v1/chat/completions"
_IDLE, _FRESH = 700, 20  # connections of the soak that say nothing, more than the server holds; new ones in each turn


def stream(port: int, body: dict[str, Any]) -> tuple[float, int, str]:
    """Seconds to the first piece, tokens, the text."""
    began, first, pieces, usage = time.perf_counter(), 0.0, [], 0
    reply = request(port, {**body, "stream": True, "stream_options": {"include_usage": True}}, path=CHAT)
    if reply.status != 200:
        raise RuntimeError(reply.read()[:300])
    for line in reply:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            usage = (event.get("usage") or {}).get("completion_tokens") or usage
            piece = event["choices"][0]["delta"].get("content") if event.get("choices") else None
            if piece:
                first = first or time.perf_counter() - began
                pieces.append(piece)
    return first, usage or len(pieces), "".join(pieces)


def wait_ready(port: int, body: dict[str, Any], process: subprocess.Popen[bytes], deadline_s: float = 300) -> None:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode}")
        try:
            reply = request(port, {**body, "max_tokens": 1}, 120, CHAT if "messages" in body else "/v1/completions")
            reply.read()
            if reply.status == 200:
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise RuntimeError("it was not ready in time")


def f32_gguf(source: Path, target: Path) -> None:
    """The same weights as F32, everything else as it is."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in (
            "general.architecture",
            "general.file_type",
            "general.quantization_version",
        ):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub)
    for tensor in reader.tensors:
        plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        writer.add_tensor(tensor.name, plain.reshape([int(n) for n in reversed(tensor.shape)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def race(wanted: Any) -> None:
    names = [name for name in ("ours", "transformers serve", "llama.cpp F32") if name.split()[0] not in wanted.without]
    if wanted.gguf is None:
        names = [name for name in names if not name.startswith("llama")]
    body = {"model": str(wanted.folder), "messages": [{"role": "user", "content": PROMPT}], "max_tokens": wanted.tokens, "temperature": 0}  # fmt: skip
    ports: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        work = Path(folder)
        if wanted.gguf is not None:
            f32_gguf(wanted.gguf, work / "f32.gguf")
        for name in names:
            port = free_port()
            process = start(name, wanted, port, work)
            running.callback(end, process)
            try:
                wait_ready(port, _to(name, body), process)
                ports[name] = port
            except (RuntimeError, OSError) as error:
                log = (work / f"{name.split()[0]}.log").read_text(errors="replace")
                print(f"{name}: left out, {error}\n{log[-600:]}", flush=True)
        for count in wanted.clients:
            _race_of(count, ports, body, wanted)


def _to(name: str, body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "model": "default"} if name == "ours" else body


def _race_of(count: int, ports: dict[str, int], body: dict[str, Any], wanted: Any) -> None:
    """So many clients at once, each server in its turn, so many rounds."""
    firsts: dict[str, list[float]] = {name: [] for name in ports}
    texts: dict[str, set[str]] = {name: set() for name in ports}

    def rate(name: str) -> float:
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            began = time.perf_counter()
            turn = len(firsts[name])  # every prompt is a new one, the same for all: nobody answers from what it kept
            asked = [{**_to(name, body), "messages": [{"role": "user", "content": f"({count}.{turn}.{n}) {PROMPT}"}]} for n in range(count)]  # fmt: skip
            done = list(pool.map(lambda one: stream(ports[name], one), asked))
            took = time.perf_counter() - began
        firsts[name].append(sum(first for first, _, _ in done) / count)
        texts[name] |= {text for _, _, text in done}
        return sum(tokens for _, tokens, _ in done) / took

    rates = measured.in_turn({name: lambda name=name: rate(name) for name in ports}, wanted.rounds)  # type: ignore[misc]
    title = f"{count} client(s), up to {wanted.tokens} tokens each, {wanted.threads} thread(s)"
    for against in [name for name in ports if name != "ours"] or ["ours"]:
        measured.show(title, "tokens/s", [measured.Row(who, all_) for who, all_ in rates.items()], against=against)
        measured.show(f"{title}: first token", "seconds", [measured.Row(who, all_[1:], more_is_better=False) for who, all_ in firsts.items()], against=against)  # fmt: skip
    print("different texts: " + ", ".join(f"{who} {len(all_)}" for who, all_ in texts.items()), flush=True)


def soak(wanted: Any) -> None:
    """Bad clients beside good ones, for so many seconds."""
    port, rng = free_port(), random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        process = start("ours", wanted, port, Path(folder), (4, 2))
        idle: list[socket.socket] = []
        try:
            body = {"prompt": "The fog", "max_tokens": 6, "temperature": 0}
            wait_ready(port, body, process)
            idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(_IDLE)]
            before, until = _memory(process.pid), time.monotonic() + wanted.soak
            middle, good, bad, full, answers = 0, 0, 0, 0, set()
            while time.monotonic() < until:
                for one in idle[:_FRESH]:
                    one.close()
                idle = [*idle[_FRESH:], *(socket.create_connection(("127.0.0.1", port)) for _ in range(_FRESH))]
                with concurrent.futures.ThreadPoolExecutor(24) as pool:
                    wrong = [pool.submit(_misbehave, port, rng.random()) for _ in range(12)]
                    right = [pool.submit(_healthy, port, body) for _ in range(6)]
                    answers |= {text for text, _ in (one.result() for one in right)}
                    full += sum(refused for _, refused in (one.result() for one in right))
                    good, bad = good + len(right), bad + len(wrong)
                    for one in wrong:
                        one.result()
                if not middle and time.monotonic() > until - wanted.soak / 2:
                    middle = _memory(process.pid)
            after = _memory(process.pid)
            print(f"soak {wanted.soak:.0f} s: {good} healthy requests answered, {bad} bad ones, {len(answers)} different answer(s); {full} times 429 first; {_IDLE} idle connections")  # fmt: skip
            print(f"memory {before / 1e6:.0f} MB before, {middle / 1e6:.0f} MB half-way, {after / 1e6:.0f} MB after")
            if len(answers) != 1 or not full or process.poll() is not None or after > middle * 1.1 + 20e6:
                raise SystemExit("the soak failed")
        finally:
            for one in idle:
                one.close()
            end(process)


def _healthy(port: int, body: dict[str, Any]) -> tuple[str, int]:
    """Answered, if need be after some 429s, as a good client waits; how many those were."""
    for refused in range(200):
        reply = request(port, body)
        data = json.loads(reply.read())
        if reply.status == 200:
            return str(data["choices"][0]["text"]), refused
        assert reply.status == 429, data
        time.sleep(0.2)
    raise AssertionError("a healthy request was never answered")


def _misbehave(port: int, draw: float) -> None:
    if draw < 0.3:  # vanishes
        with socket.create_connection(("127.0.0.1", port)) as one:
            body = json.dumps({"prompt": "x" * 50, "max_tokens": 400, "stream": draw < 0.15}).encode()
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
            time.sleep(draw)
    elif draw < 0.5:  # no HTTP at all
        with socket.create_connection(("127.0.0.1", port)) as one:
            one.sendall(os.urandom(200))
    elif draw < 0.75:
        reply = request(port, os.urandom(100))
        assert reply.status == 400, reply.status
    else:
        reply = request(port, {"prompt": "long " * 3000, "max_tokens": 5})
        assert reply.status in (400, 429), reply.status


def _memory(pid: int) -> int:
    """Of the server and its child."""
    import psutil

    one = psutil.Process(pid)
    return sum(each.memory_info().rss for each in (one, *one.children(recursive=True)))


def main() -> None:
    arguments = measured.arguments(__doc__)
    arguments.add_argument("--folder", type=Path, required=True)
    arguments.add_argument("--gguf", type=Path)
    arguments.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    arguments.add_argument("--tokens", type=int, default=32)
    arguments.add_argument("--without", nargs="*", default=[])
    arguments.add_argument("--soak", type=float, default=0.0)
    wanted = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left behind
    soak(wanted) if wanted.soak else race(wanted)
    if wanted.json:
        measured.keep(wanted.json)


if __name__ == "__main__":
    main()
