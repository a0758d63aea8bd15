"""lamp generate: many prompts that go on after a kill, stops, JSON, and a conversation at a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

from running import LAMP, TINY, Command, Finished, clean_env, start_lamp, wait_for

WORDS = [*TINY, "--train.steps", "3", "--data.seq_len", "256", "--model.family", "llama", "--save.every_steps", "2"]
GREEDY = ("--temperature", "0", "--threads", "1")


def test_json_stops_and_penalties(finished: Finished, here: Command, tmp_path: Path) -> None:
    finished(*WORDS)
    plain = here("generate", "r", "--prompt", "The fog", "--max-tokens", "30", *GREEDY, cwd=tmp_path).stdout
    text = plain.removeprefix("The fog").removesuffix("\n")
    found = json.loads(
        here("generate", "r", "--prompt", "The fog", "--max-tokens", "30", *GREEDY, "--json", cwd=tmp_path).stdout
    )
    assert found == {"prompt": "The fog", "samples": [{"text": text, "tokens": 30, "finish_reason": "length"}]}
    stop = text[5:8]
    cut = here(
        "generate", "r", "--prompt", "The fog", "--max-tokens", "30", *GREEDY, "--stop", stop, cwd=tmp_path
    ).stdout
    assert cut == "The fog" + text[: text.index(stop)] + "\n"
    two = here("generate", "r", "--prompt", "The fog", "--max-tokens", "30", *GREEDY, "--stop", stop, "--num-samples", "2", "--json", cwd=tmp_path).stdout  # fmt: skip
    for sample in json.loads(two)["samples"]:
        assert (sample["text"], sample["finish_reason"]) == (text[: text.index(stop)], "stop")
        assert sample["tokens"] < 30  # and no more was written than was needed
    other = here("generate", "r", "--prompt", "The fog", "--max-tokens", "30", *GREEDY, "--repetition-penalty", "9", "--json", cwd=tmp_path).stdout  # fmt: skip
    penalised = json.loads(other)["samples"][0]["text"]
    assert len(set(penalised)) > len(set(text))
    for words, said in (
        (["--repetition-penalty", "0"], "must be above 0"),
        (["--prompts", "x", "--prompt", "y"], "goes with neither"),
        (["--out", "x"], "--out needs --prompts"),
    ):
        done = here("generate", "r", *words, cwd=tmp_path)
        assert (done.returncode, said in done.stderr) == (2, True)
    assert here("generate", "r", "--prompts", "nowhere.txt", cwd=tmp_path).returncode == 66


def test_many_prompts_are_answered_like_each_alone(finished: Finished, here: Command, tmp_path: Path) -> None:
    finished(*WORDS)
    prompts = ["The fog", "My dear Aunt", "At dusk the lamplighter", "x"]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    done = here("generate", "r", "--prompts", "asked.jsonl", "--max-tokens", "12", *GREEDY, cwd=tmp_path)
    rows = sorted(map(json.loads, done.stdout.splitlines()), key=lambda row: row["number"])
    for row, prompt in zip(rows, prompts, strict=True):
        alone = here("generate", "r", "--prompt", prompt, "--max-tokens", "12", *GREEDY, cwd=tmp_path).stdout
        assert row["prompt"] + row["samples"][0]["text"] == alone.removesuffix("\n")


def test_answers_in_a_file_survive_a_kill(finished: Finished, here: Command, tmp_path: Path) -> None:
    finished(*WORDS)
    (tmp_path / "asked.txt").write_text("".join(f"Letter number {n}\n" for n in range(100)))
    words = ("generate", "r", "--prompts", "asked.txt", "--out", "answers.jsonl", "--max-tokens", "40", *GREEDY)
    out = tmp_path / "answers.jsonl"
    process = start_lamp(*words, cwd=tmp_path)
    wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") > 8, process=process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = out.read_bytes().rpartition(b"\n")[0]
    done = here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "prompts were answered before" in done.stderr
    assert out.read_bytes().startswith(before)
    rows = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
    assert sorted(row["number"] for row in rows) == list(range(100))
    (tmp_path / "asked.txt").write_text("another\n")
    assert here(*words, cwd=tmp_path).returncode == 65


def test_a_conversation_at_a_terminal_has_commands_and_history(finished: Finished, tmp_path: Path) -> None:
    finished(*WORDS)
    main, side = pty.openpty()
    words = [*LAMP, "generate", "r", "--interactive", "--max-tokens", "8", *GREEDY]
    process = subprocess.Popen(words, cwd=tmp_path, stdin=side, stdout=side, stderr=side, env=clean_env(), start_new_session=True)  # fmt: skip
    os.close(side)
    heard = b""

    def wait_until(text: bytes, since: int) -> int:
        nonlocal heard
        deadline = time.monotonic() + 60
        while text not in heard[since:]:
            assert time.monotonic() < deadline, heard[-2000:].decode(errors="replace")
            if select.select([main], [], [], 0.2)[0]:
                heard += os.read(main, 4096)
        return heard.index(text, since) + len(text)

    try:
        at = wait_until(b"> ", 0)
        for typed, answer in (
            (b"/help", b"/retry"),
            (b"/set max_tokens 5", b"max_tokens is 5"),
            (b"The fog", b"\nThe fog"),
            (b"\x1b[A", b"\nThe fog"),  # the arrow key brings the last line back
            (b"/nonsense", b"there is no /nonsense"),
        ):
            os.write(main, typed + b"\r")
            wait_until(answer, at)
            at = wait_until(b"\n> ", at)
        wait_until(b"5 tokens in", 0)
        os.write(main, b"/quit\r")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(main)
    assert heard.count(b"\nThe fog") >= 2  # a busy terminal echoes what is typed once more


def test_no_line_ends_a_conversation_by_mistake(finished: Finished, tmp_path: Path) -> None:
    finished(*WORDS)
    words = [*LAMP, "generate", "r", "--interactive", "--max-tokens", "2", *GREEDY]
    lines = ["/load /etc/passwd", "/save /proc/nothing/here", "/set stop", "//x", "The fog"]
    done = subprocess.run(words, cwd=tmp_path, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=170, env=clean_env(), check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The fog" in done.stdout
    for said in ("/etc/passwd holds no conversation", "not saved: No such file", "stop is []"):
        assert said in done.stdout
