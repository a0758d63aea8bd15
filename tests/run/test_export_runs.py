"""lamp export by the real command: opened again by transformers, peft, llama.cpp and a server that speaks Ollama's API; or not there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_chat import change

from lamplighter.export import gguf_file, hugging_face, llama_cpp, reference
from lamplighter.export.opened import ExportFailed, open_model
from lamplighter.export.vocabulary import vocabulary_of
from lamplighter.rundir import RunDir
from running import LONG, Command, copy_run, lamp, shared, start_lamp, wait_for

ROWS = [{"question": f"Add {a} and {b}.", "answer": f"{a} and {b} is {a + b}."} for a in range(12) for b in range(12)]
QUICK = [
    "--data.paths", "rows.jsonl", "--model.init_from", str(shared("models", "stories260K_hf_llama")), "--data.template", "chatml", "--data.seq_len", "128",
    "--train.batch_size", "4", "--train.threads", "1", "--train.dtype", "fp32", "--train.steps", "10", "--train.lr", "5e-3",
    "--eval.every_steps", "0", "--eval.sample_every_steps", "0",
]  # fmt: skip


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("export")
    (cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = lamp("train", "--run", "r", *QUICK, "--lora.r", "4", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd


@pytest.fixture
def run(tuned: Path, tmp_path: Path) -> RunDir:
    copy_run(tuned / "runs", tmp_path / "runs")
    return RunDir(tmp_path / "runs" / "r")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer questions: the comparison is the same."""
    monkeypatch.setattr(reference, "_TEXTS", 2)
    monkeypatch.setattr(reference, "_TEXT_TOKENS", 25)
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.1:9")


def nothing_left(place: Path) -> bool:
    return not place.exists() or not any(place.iterdir())


def test_adapters_become_a_folder_of_peft_or_merged_a_model_of_transformers(run: RunDir, here: Command) -> None:
    cwd = run.path.parent.parent
    done = here("export", "r", "--to", "hf", cwd=cwd)
    assert done.returncode == 0, done.stderr
    adapter = Path(done.stdout.strip())
    assert adapter == run.path / "export" / "r-adapter" and "logits within" in done.stderr
    assert not (adapter / "training").exists() and (adapter / "adapter_model.safetensors").exists()
    done = here("export", "r", "--to", "hf", "--merge", cwd=cwd)
    assert done.returncode == 0 and "logits within" in done.stderr, done.stderr
    merged = Path(done.stdout.strip())
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, 500, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(merged)(ids).logits
        theirs = AutoPeftModelForCausalLM.from_pretrained(adapter)(ids).logits
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert (
        here(
            "generate", str(merged), "--prompt", "Add 1 and 2.", "--max-tokens", "4", "--threads", "1", cwd=cwd
        ).returncode
        == 0
    )
    again = here("export", "r", "--to", "hf", "--merge", cwd=cwd)
    assert again.returncode == 2 and "--force" in again.stderr
    half = here("export", "r", "--to", "hf", "--merge", "--quantize", "bf16", "--force", cwd=cwd)
    assert half.returncode == 0 and "perplexity" in half.stderr, half.stderr
    assert json.loads((merged / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.zoo
def test_adapters_of_a_base_in_int8_are_compared_on_the_whole_base(tuned: Path, here: Command) -> None:
    made = lamp("train", "--run", "narrow", *QUICK, "--lora.r", "4", "--lora.base_dtype", "int8", cwd=tuned)
    assert made.returncode == 0, made.stdout + made.stderr
    done = here("export", "narrow", "--to", "hf", cwd=tuned)
    assert done.returncode == 0 and "on the whole base, logits within" in done.stderr, done.stderr
    place = tuned / "runs" / "narrow" / "export" / "narrow-adapter" / "adapter_model.safetensors"
    assert place.is_file()


@pytest.mark.parametrize("quantize", ["f32", "q8_0"])
def test_a_gguf_is_run_by_llama_cpp_and_says_the_same(run: RunDir, here: Command, quantize: str) -> None:
    done = here("export", "r", "--to", "gguf", "--quantize", quantize, cwd=run.path.parent.parent)
    assert done.returncode == 0, done.stderr
    file = Path(done.stdout.strip())
    assert file.name == f"r-{quantize}.gguf" and file.read_bytes()[:4] == b"GGUF"
    assert "the same token ids on 17 dirty texts and 2 chat prompts" in done.stderr
    assert ("the same words to 20 prompts" if quantize == "f32" else "q8_0: perplexity") in done.stderr
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    if quantize == "f32":
        done = here("export", "r", "--to", "gguf", "--quantize", quantize, cwd=run.path.parent.parent)
        assert done.returncode == 2 and f"{file} exists already" in done.stderr
        assert "done  model" not in done.stderr, "said before a model is opened, which may take minutes"


@pytest.mark.parametrize("quantize", ["f32", "f16", "bf16", "q8_0"])
def test_rows_that_are_converted_apart_are_the_same_file(
    quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_model(shared("models", "stories260K_hf_llama"), "tiny", None, "lamp export")
    vocabulary = vocabulary_of(opened.tokenizer, opened.built.vocab_size)
    gguf_file.write_gguf(tmp_path / "whole", opened, vocabulary, quantize)
    monkeypatch.setattr(gguf_file, "_AT_ONCE", 300)  # a few rows each
    gguf_file.write_gguf(tmp_path / "rows", opened, vocabulary, quantize)
    assert (tmp_path / "rows").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_model_with_weights_that_are_no_numbers_is_refused(tmp_path: Path, here: Command) -> None:
    base = tmp_path / "base"
    shutil.copytree(shared("models", "stories260K_hf_llama"), base)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    for to in ("hf", "gguf"):
        done = here("export", "base", "--to", to, "--quantize", "f32", cwd=tmp_path)
        assert done.returncode == 65 and "model.norm.weight holds infinite numbers, or none" in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("answer", [float("nan"), float("-inf"), None])
def test_a_probability_that_is_no_number_is_a_failure_and_is_not_left_out(answer: float | None) -> None:
    said = reference.Reference([], [], scored=[reference.Scored([1, 2, 3], 1, [-1.0, -2.0], [2, 3])])
    with pytest.raises(ExportFailed, match="no number"):
        reference.compare_scores(said, [([-1.0, answer], [2, 3])], reference.Limits(0.01, 0.95))  # type: ignore[list-item]
    assert "the same first choice in 100.0%" in reference.compare_scores(
        said, [([-1.0, -2.0], [2, 3])], reference.Limits(0.01, 0.95)
    )


def test_killed_in_mid_export_it_leaves_nothing(run: RunDir) -> None:
    export = run.path / "export"
    process = start_lamp("export", "r", "--to", "gguf", cwd=run.path.parent.parent)
    wait_for(lambda: export.is_dir() and any(export.glob(".writing-*")), process=process)
    (found, *_) = export.glob(".writing-*")
    os.kill(int(found.name.split("-")[1]), signal.SIGKILL)
    assert process.wait(60) == 71 and nothing_left(export)


@LONG
def test_what_differs_is_not_there(run: RunDir, here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check is made to fire: wrong numbers, a wrong template, wrong ids, a file that llama.cpp cannot read."""
    cwd, place = run.path.parent.parent, run.path / "export"
    plain = gguf_file._interleaved
    monkeypatch.setattr(gguf_file, "_interleaved", lambda weight, heads: weight)  # the classic mistake
    done = here("export", "r", "--to", "gguf", "--quantize", "f32", cwd=cwd)
    assert done.returncode == 65 and "says something else" in done.stderr and nothing_left(place)
    done = here("export", "r", "--to", "gguf", "--quantize", "q8_0", cwd=cwd)
    assert done.returncode == 65 and "is not near enough" in done.stderr and nothing_left(place)
    monkeypatch.setattr(gguf_file, "_interleaved", plain)

    def torn(path: Path, *rest: Any) -> None:
        path.write_bytes(b"GGUF" + bytes(100))

    monkeypatch.setattr(gguf_file, "write_gguf", torn)
    done = here("export", "r", "--to", "gguf", cwd=cwd)
    assert done.returncode == 65 and "llama.cpp cannot use the file" in done.stderr and nothing_left(place)
    tensors = hugging_face.weights
    monkeypatch.setattr(hugging_face, "weights", lambda model: {n: t + 1e-2 for n, t in tensors(model).items()})
    done = here("export", "r", "--to", "hf", "--merge", cwd=cwd)
    assert done.returncode == 65 and "gives other logits" in done.stderr and nothing_left(place)


def test_a_template_that_is_not_the_one_of_training_is_refused_with_both_texts(run: RunDir, here: Command) -> None:
    change(run.checkpoint(10) / "tokenizer_config.json", chat_template="{{ messages[0].content }} other")
    for to in ("hf", "gguf", "ollama"):
        done = here("export", "r", "--to", to, cwd=run.path.parent.parent)
        assert done.returncode == 78 and "is not the one that this model was trained with" in done.stderr
        assert "in training" in done.stderr and "other" in done.stderr and nothing_left(run.path / "export")


def test_usage(command: Command, tmp_path: Path) -> None:
    assert command("export", "nowhere", cwd=tmp_path).returncode == 66
    assert command("export", ".", "--to", "onnx", cwd=tmp_path).returncode == 2
    assert command("export", ".", "--to", "hf", "--quantize", "q8_0", cwd=tmp_path).returncode == 2


@LONG
def test_k_quants_need_the_users_own_tool_and_are_compared_like_all(
    run: RunDir, here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cwd = run.path.parent.parent
    done = here("export", "r", "--to", "gguf", "--quantize", "q4_k_m", cwd=cwd)
    assert done.returncode == 78 and "needs llama-quantize" in done.stderr
    tool = tmp_path / "bin" / "llama-quantize"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\n[ "$3" = Q4_K_M ] || exit 3\ncp "$1" "$2"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    done = here("export", "r", "--to", "gguf", "--quantize", "Q4_K_M", cwd=cwd)
    assert done.returncode == 0 and "q4_k_m: perplexity" in done.stderr, done.stderr
    tool.write_text('#!/bin/sh\nhead -c 1000 "$1" > "$2"\n')
    done = here("export", "r", "--to", "gguf", "--quantize", "q4_k_m", "--force", cwd=cwd)
    assert done.returncode == 65 and (run.path / "export" / "r-q4_k_m.gguf").stat().st_size > 100_000, (
        "the good one stays"
    )


# ---------------------------------------------------------------- Ollama


class FakeOllama(BaseHTTPRequestHandler):
    """The part of Ollama's API that is used; it keeps what it was told."""

    told: dict[str, Any] = {}
    answer = "The lamp-lighter does."
    refuses = ""

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _reply(self, code: int, body: Any = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._reply(200, {"version": "0.12.0"})

    def do_HEAD(self) -> None:
        self._reply(200 if self.path.rsplit("/", 1)[-1] in self.told else 404)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/api/blobs/"):
            self.told[self.path.rsplit("/", 1)[-1]] = data
            self._reply(201)
        elif self.path == "/api/create":
            self.told["create"] = json.loads(data)
            self._reply(400, {"error": self.refuses}) if self.refuses else self._reply(200, {"status": "success"})
        else:
            self.told["chat"] = json.loads(data)
            self._reply(200, {"message": {"role": "assistant", "content": self.answer}})


@contextmanager
def fake_ollama(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeOllama]]:
    handler = type("Handler", (FakeOllama,), {"told": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{server.server_port}")
    try:
        yield handler
    finally:
        server.shutdown()


@LONG
def test_ollama_gets_the_file_the_template_and_the_stops(
    run: RunDir, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    cwd = run.path.parent.parent
    with fake_ollama(monkeypatch) as server:
        done = here("export", "r", "--to", "ollama", "--quantize", "q8_0", cwd=cwd)
        assert done.returncode == 0 and "The lamp-lighter does." in done.stderr, done.stderr
        folder = Path(done.stdout.strip())
        text = (folder / "Modelfile").read_text()
        assert text.startswith("FROM ./r-q8_0.gguf\nTEMPLATE ") and 'PARAMETER stop "</s>"' in text
        told = server.told["create"]
        ((name, blob),) = told["files"].items()
        assert server.told[blob] == (folder / name).read_bytes()
        assert told["parameters"]["stop"] == ["</s>"] and told["template"] in text
        server.answer = "yes</s> and on it goes"
        over = here("export", "r", "--to", "ollama", "--quantize", "q8_0", "--force", cwd=cwd)
        assert over.returncode == 78 and "runs over its end mark" in over.stderr
        server.refuses = "unsupported architecture"
        refused = here("export", "r", "--to", "ollama", "--quantize", "q8_0", "--force", cwd=cwd)
        assert refused.returncode == 67 and "unsupported architecture" in refused.stderr


@LONG
def test_without_ollama_the_folder_is_made_and_the_next_line_says_what_to_do(run: RunDir, here: Command) -> None:
    done = here("export", "r", "--to", "ollama", cwd=run.path.parent.parent)
    assert done.returncode == 0 and "ollama create r -f Modelfile" in done.stderr
    assert llama_cpp.ask(next(Path(done.stdout.strip()).glob("*.gguf")), texts=["hi"]).ids
