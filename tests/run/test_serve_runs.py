"""lamp serve with real clients: openai, curl, Chromium; greedy texts equal lamp generate; deaths, swaps and garbage are survived."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lamplighter.rundir import RunDir
from running import TINY, Command, Finished, start_lamp, wait_for
from serving import ask, free_port, serving

WORDS = [*TINY, "--train.steps", "3", "--data.seq_len", "256", "--model.family", "llama", "--save.every_steps", "2"]


class Served(NamedTuple):
    """One server for all tests of this file; it follows its run, so ask it which checkpoint it has."""

    port: int
    cwd: Path
    process: subprocess.Popen[bytes]

    def model(self) -> str:
        return str(ask(self.port, "/health")[1]["model"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from running import copy_run, trained_once

    cwd = tmp_path_factory.mktemp("serve")
    copy_run(trained_once(tmp_path_factory, tuple(WORDS)) / "runs", cwd / "runs")
    from running import STARTED

    with serving(cwd, "r", "--max-batch", "4", "--max-queue", "6", "--follow") as (port, process):
        STARTED.remove(process)  # it serves all tests of this file
        yield Served(port, cwd, process)


def test_the_openai_client_gets_models_texts_streams_and_errors(served: Served) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served[0]}/v1", api_key="none", max_retries=0)
    assert [one.id for one in client.models.list()] == [served.model()]
    made = client.completions.create(model="r", prompt="The fog", max_tokens=20, temperature=0, logprobs=2)
    assert made.model == served.model()
    assert (made.usage.completion_tokens, made.choices[0].finish_reason) == (20, "length")
    assert len(made.choices[0].logprobs.token_logprobs) == 20
    pieces = list(client.completions.create(model="r", prompt="The fog", max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}))  # fmt: skip
    assert "".join(one.choices[0].text for one in pieces if one.choices) == made.choices[0].text
    assert pieces[-1].usage.total_tokens == made.usage.total_tokens
    two = client.completions.create(model="r", prompt=["a", "b"], max_tokens=4, n=2, seed=5)
    again = client.completions.create(model="r", prompt=["a", "b"], max_tokens=4, n=2, seed=5)
    assert [one.text for one in two.choices] == [one.text for one in again.choices]
    assert [one.index for one in two.choices] == [0, 1, 2, 3]
    assert two.usage.prompt_tokens == 4  # each of two prompts (a mark and a byte) once
    text = made.choices[0].text
    stopped = client.completions.create(model="r", prompt="The fog", max_tokens=20, temperature=0, stop=text[3:5])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text[: text.index(text[3:5])]
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="r", messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="does not fit") as found:
        client.completions.create(model="r", prompt="long " * 200)
    assert found.value.code == "context_length_exceeded"


def test_greedy_texts_are_those_of_generate_alone_and_in_a_full_batch(served: Served, here: Command) -> None:
    port, cwd, _ = served
    prompts = ["The fog", "My dear Aunt", "At dusk", "Coal is up"]
    alone = []
    for prompt in prompts:
        words = ("generate", "r", "--prompt", prompt, "--max-tokens", "24", "--temperature", "0", "--threads", "1")
        alone.append(here(*words, cwd=cwd).stdout.removeprefix(prompt).removesuffix("\n"))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        bodies = [{"prompt": prompt, "max_tokens": 24, "temperature": 0} for prompt in prompts]
        made = list(pool.map(lambda body: ask(port, "/v1/completions", body), bodies))
    assert [reply["choices"][0]["text"] for _, reply in made] == alone


def test_token_ids_are_continued_as_transformers_does(served: Served) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    port, cwd, _ = served
    folder = cwd / "runs" / "r" / "checkpoints" / served.model().partition(":")[2]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("The omnibus to", add_special_tokens=False)
    made = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    reply = ask(port, "/v1/completions", {"prompt": ids, "max_tokens": 24, "temperature": 0})[1]
    assert reply["choices"][0]["text"] == tokenizer.decode(made)


def test_curl_reads_a_stream_to_its_end(served: Served) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    url, body = f"http://127.0.0.1:{served[0]}/v1/completions", '{"prompt": "The", "max_tokens": 3, "stream": true}'
    done = subprocess.run(["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", body], capture_output=True, text=True, check=True)  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b"[" * 20000, "not JSON"),
        ([], "JSON object"),
        ({"prompt": {}}, "prompt must be"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "9"}, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": True}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "n": 99}, "n must be"),
        ({"prompt": "x", "stop": [1]}, "stop must be"),
        ({"prompt": "x", "stream": "yes"}, "stream must be"),
        ({"prompt": "x", "tools": [{}]}, "tools is not supported"),
        ({"prompt": "x", "min_p": 0.1}, "'min_p' is no field"),
        ({"prompt": [9999999]}, "vocabulary"),
        ({"prompt": "\ud800"}, "UTF-8"),
    ],
)  # fmt: skip
def test_garbage_is_answered_in_words(served: Served, body: Any, said: str) -> None:
    status, reply = ask(served[0], "/v1/completions", body)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error"), reply
    assert said in reply["error"]["message"]
    assert ask(served[0], "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_a_full_queue_says_429_and_strangers_stay_outside(served: Served) -> None:
    port = served.port
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        body = {"prompt": "The fog", "max_tokens": 200, "temperature": 0}
        made = list(pool.map(lambda _: ask(port, "/v1/completions", body), range(24)))
    statuses = [status for status, _ in made]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 10
    assert len({reply["choices"][0]["text"] for status, reply in made if status == 200}) == 1
    assert ask(port, "/health", None, Host="evil.example")[0] == 421
    assert ask(port, "/v1/completions", {"prompt": "x"}, Origin="https://evil.example")[0] == 403
    assert ask(port, "/v1/completions", b"x", **{"Content-Length": str(2 << 20)})[0] == 413
    assert ask(port, "/v2/nothing")[0] == 404
    assert "lamp_serve_refused_total" in ask(port, "/metrics")[1]


def test_work_ends_when_the_client_is_gone(served: Served) -> None:
    port = served.port
    before, gone = _counter(port, "tokens"), _counter(port, "gone")
    for stream in (True, False):
        with socket.create_connection(("127.0.0.1", port)) as one:
            body = json.dumps(
                {"prompt": "The fog", "max_tokens": 250, "n": 2, "stream": stream, "logprobs": 20}
            ).encode()
            one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
            if stream:
                one.recv(100)
        if stream:  # (the other one may be written before anybody looks)
            wait_for(lambda: _counter(port, "gone") - gone == 1)
    wait_for(lambda: ask(port, "/health")[1]["texts"] == 0)
    assert _counter(port, "tokens") - before < 1000  # of 4 x 250


def _counter(port: int, name: str) -> int:
    found = [line.split()[1] for line in ask(port, "/metrics")[1].splitlines() if line.startswith(f"lamp_serve_{name}_total")]  # fmt: skip
    return int(found[0])


def test_the_page_chats_in_chromium(served: Served) -> None:
    if not Path("/usr/bin/chromium").exists():
        assert os.environ.get("CI") != "true", "CI must have Chromium"
        pytest.skip("there is no Chromium here")
    from playwright.sync_api import sync_playwright

    port = served.port
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-background-networking"])  # fmt: skip
        page = browser.new_page()
        wrong: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#model", has_text=served.model().partition(":")[2]).wait_for()
        page.get_by_text("This model has no chat template").wait_for()
        page.click("#tune")
        page.fill("#most", "20")
        page.click("#tune")
        page.fill("#text", "<b>The fog</b>")
        page.press("#text", "Enter")
        page.locator(".facts", has_text=" tokens, ").wait_for(timeout=60000)  # 20, or fewer where it ends by itself
        assert page.text_content(".prompt") == "<b>The fog</b>"  # shown, not obeyed
        assert "tokens/s" in (page.text_content(".facts") or "")
        page.fill("#text", "At dusk")
        page.evaluate("for (let n = 0; n < 2; n++) document.getElementById('form').requestSubmit()")  # send, stop
        page.locator("#send", has_text="Send").wait_for()
        assert page.locator(".error").count() == 0 and page.locator(".going").count() == 0
        wait_for(lambda: ask(port, "/health")[1]["texts"] == 0)  # nobody writes for nobody
        page.click("#fresh")
        assert page.locator(".assistant").count() == 0
        browser.close()
    assert not wrong
    assert all(url.startswith(f"http://127.0.0.1:{port}/") for url in asked)


def _children(pid: int) -> list[int]:
    return [int(one) for path in Path(f"/proc/{pid}/task").iterdir() for one in (path / "children").read_text().split()]


def test_newer_checkpoints_are_followed_damaged_ones_are_not_and_a_dead_child_is_started_again(served: Served) -> None:
    port, cwd, process = served
    run = RunDir(cwd / "runs" / "r")
    assert served.model() == "r:checkpoint-3"
    shutil.copytree(run.checkpoint(2), cwd / "damaged")
    (cwd / "damaged" / "model.safetensors").write_bytes(b"torn")
    (cwd / "damaged").rename(run.checkpoint(9))
    wait_for(lambda: b"checkpoint-9 is not served" in (cwd / "out.txt").read_bytes(), 30, process)
    assert served.model() == "r:checkpoint-3"
    shutil.rmtree(run.checkpoint(9))
    shutil.copytree(run.checkpoint(2), cwd / "newer")  # other weights
    (cwd / "newer").rename(run.checkpoint(5))
    wait_for(lambda: served.model() == "r:checkpoint-5", 30, process)
    status, reply = ask(port, "/v1/completions", {"model": "r", "prompt": "x", "max_tokens": 2})
    assert (status, reply["model"]) == (200, "r:checkpoint-5")
    [child] = _children(process.pid)
    os.kill(child, signal.SIGKILL)
    states = set()

    def again() -> bool:
        status, body = ask(port, "/health")
        states.add(body["status"])
        return status == 200 and _children(process.pid) not in ([], [child])

    wait_for(again, 60, process)
    assert "restarting" in states
    assert ask(port, "/v1/completions", {"prompt": "x", "max_tokens": 2})[1]["model"] == "r:checkpoint-5"


def test_a_key_is_needed_where_one_is_set(finished: Finished, tmp_path: Path) -> None:
    finished(*WORDS)
    port = free_port()
    process = start_lamp("serve", "r", "--port", str(port), "--api-key", "secret-key-1", cwd=tmp_path)

    def up() -> bool:
        try:
            return ask(port, "/health")[0] in (200, 503)  # open to all
        except OSError:
            return False

    wait_for(up, 30, process)
    assert ask(port, "/v1/models")[0] == 401
    assert ask(port, "/v1/models", None, Authorization="Bearer wrong-key-1")[0] == 401
    assert ask(port, "/v1/models", None, Authorization="Bearer secret-key-1")[0] == 200
    wait_for(lambda: ask(port, "/health")[0] == 200, 60, process)  # a stop that comes before the session is 75
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert b"secret-key-1" not in (tmp_path / "out.txt").read_bytes().replace(b"?token=secret-key-1", b"")
