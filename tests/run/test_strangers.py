"""What a folder, a file or a name of somebody else cannot do: run code, take all memory, write on a terminal, read a secret."""

from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lamplighter.data.chat import rendering
from lamplighter.data.chat.template import ChatTemplate, load_template
from lamplighter.data.tokenizer import byte_level
from lamplighter.errors import BadConfig, BadData, InputMissing, LampError
from running import LAMP, SIZES, TINY, Command, Finished, clean_env

EIGHT = [*TINY, "--train.steps", "8", "--save.every_steps", "4"]
TOUCH = "import pathlib; pathlib.Path(__file__).with_name('imported').touch()\n"
LIBRARIES = ("signal", "numpy", "yaml", "xxhash", "psutil", "rich", "pydantic_core", "tokenizers", "jinja2", "safetensors", "torch", "gigatoken",
             "zstandard", "pyarrow", "fsspec", "packaging", "sitecustomize", "usercustomize", "datasets", "transformers")  # fmt: skip
TITLE = "\x1b]0;owned\x07"  # sets the title of a terminal's window


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder with a file in the name of every library."""
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").write_text(TOUCH)
    return tmp_path


# ---------------------------------------------------------------- no code out of the current folder


@pytest.mark.parametrize(
    "words",
    [["runs"], ["plan"], ["train", "run.yaml", "--print-config"], ["checkpoints", "r"],
     ["tokenizer", "show", "runs/r", "--text", "a"], ["doctor", "--only", "limits"]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_file_in_the_name_of_a_library_is_not_loaded(trap: Path, finished: Finished, words: list[str]) -> None:
    """By the parent, by its child, and by a child of that (the doctor's probes); `-m` puts the folder first on the path."""
    finished(*EIGHT)
    (trap / "run.yaml").write_text("train: {lr: 1e-4}\n")
    said = subprocess.run([*LAMP, *words], cwd=trap, env=clean_env(), capture_output=True, text=True, check=False)
    assert said.returncode in (0, 1), said.stderr  # 1: the doctor found something about this machine
    assert said.stdout
    assert not (trap / "imported").exists()


def tokens_of(prepared: subprocess.CompletedProcess[str]) -> int:
    return int(json.loads(prepared.stdout)["splits"]["train"]["tokens"])


def test_the_user_s_own_module_is_looked_for_last(
    tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the run.yaml, then in the current folder; never in the place of something installed."""
    monkeypatch.setenv("LAMP_CODE_FOLDER", "")
    (tmp_path / "conf").mkdir()
    words = ["data", "prepare", "conf/my.yaml", "--tokenizer.kind", "bytes", "--json"]
    text = "def documents():\n    return [{!r} * 40, 'b' * 40]\n"
    (tmp_path / "conf" / "my.yaml").write_text("data: {source: 'owntexts:documents', val_fraction: 0.0}\n")
    (tmp_path / "owntexts.py").write_text(text.format("here "))
    in_current = here(*words, cwd=tmp_path)
    assert in_current.returncode == 0, in_current.stderr
    del sys.modules["owntexts"]
    (tmp_path / "conf" / "owntexts.py").write_text(text.format("beside the file "))
    beside = here(*words, cwd=tmp_path)
    assert beside.returncode == 0, beside.stderr
    assert tokens_of(beside) > tokens_of(in_current)
    for folder in (tmp_path, tmp_path / "conf"):
        (folder / "colorsys.py").write_text(TOUCH + text.format("x"))
    installed = here(*words, "--data.source", "colorsys:documents", cwd=tmp_path)
    assert installed.returncode == 78, installed.stderr
    assert "no documents in module colorsys" in installed.stderr
    assert not list(tmp_path.rglob("imported"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("data.source", "evil:documents"), ("model.family", "evil:Model"), ("watch.notify", "touch imported"),
     ("data.paths", "['source:evil:documents']"), ("data.paths", "['http://127.0.0.1:9/x.jsonl']")],
)  # fmt: skip
def test_the_settings_of_a_run_folder_name_no_code(
    tmp_path: Path, finished: Finished, command: Command, name: str, value: str
) -> None:
    """`lamp train runs/r/config.yaml`: the file of a run folder is not the user's own word; said again, it is."""
    config = finished(*EIGHT).config
    section, leaf = name.split(".")
    lines = [
        f"  {leaf}: {value}" if line.startswith(f"  {leaf}: ") else line for line in config.read_text().splitlines()
    ]
    assert f"  {leaf}: {value}" in lines and section
    config.write_text("\n".join(lines) + "\n")
    refused = command("train", str(config), "--print-config", cwd=tmp_path)
    assert refused.returncode == 78, refused.stderr
    assert f"{name} is not taken from a run folder" in refused.stderr
    again = ["--data.paths", "x.txt"] if name == "data.paths" else [f"--{name}", value]
    assert command("train", str(config), "--print-config", *again, cwd=tmp_path).returncode == 0
    config.rename(tmp_path / "mine.yaml")
    assert command("train", "mine.yaml", "--print-config", cwd=tmp_path).returncode == 0


def test_a_run_of_the_user_s_own_code_is_not_resumed_by_what_its_folder_names(
    tmp_path: Path, finished: Finished, command: Command
) -> None:
    """Without the name, the same command is refused before anything of the run is loaded."""
    config = finished(*EIGHT).config
    config.write_text(config.read_text().replace("  family: gpt2 ", "  family: evil:Model "))
    (tmp_path / "evil.py").write_text(TOUCH)
    (tmp_path / "runs" / "r" / "status.json").unlink()
    refused = command("train", "--run", "r", *SIZES, "--train.steps", "12", cwd=tmp_path)
    assert refused.returncode == 78, refused.stdout
    assert "--model.family evil:Model" in refused.stderr
    assert not (tmp_path / "imported").exists()


# ---------------------------------------------------------------- no code, and no memory, for a model folder


@pytest.fixture
def model(finished: Finished) -> Path:
    return finished(*EIGHT).checkpoints / "checkpoint-8"


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(folder: Path) -> None:
    from lamplighter.data import tokenizer
    from lamplighter.model.build import load_folder

    load_folder(folder)
    tokenizer.load(folder)


class _Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch imported",)


def test_remote_code_and_pickles_of_a_model_folder_are_left_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    Path("evil.py").write_text(TOUCH)
    remote = {
        "auto_map": {"AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", None]},
        "trust_remote_code": True,
    }
    change(model / "config.json", **remote, architectures=["evil.Model"], transformers_version="evil:x")
    change(model / "tokenizer_config.json", **remote, tokenizer_class="evil.T")
    load(model)
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "optimizer.pt"):
        Path(name).write_bytes(pickle.dumps(_Evil()))
    load(model)
    Path("model.safetensors").unlink()
    with pytest.raises(InputMissing, match="no weights"):
        load(model)
    Path("model.safetensors").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(BadData):
        load(model)
    assert not Path("imported").exists()


@pytest.mark.parametrize(
    "sizes",
    [{"vocab_size": 10**6, "n_embd": 65_536}, {"n_positions": 10**12}, {"n_layer": 10**9}, {"n_inner": 10**9},
     {"n_layer": 10**30}, {"n_embd": "32"}, {"n_head": None}, {"vocab_size": True}, {"n_layer": 2.5}, {"embd_pdrop": [1]},
     {"layer_norm_epsilon": None}, {"eos_token_id": "x"}, {"n_inner": "x"}, {"model_type": ["gpt2"]}],
    ids=str,
)  # fmt: skip
def test_sizes_are_compared_with_the_weights_before_memory_is_taken(model: Path, sizes: dict[str, Any]) -> None:
    """262 GB, a billion layers, or no number at all."""
    change(model / "config.json", **sizes)
    import torch

    def taken(*_: object, **__: object) -> None:
        raise AssertionError("memory was taken")

    with pytest.MonkeyPatch.context() as patch, pytest.raises((BadConfig, BadData)) as caught:
        patch.setattr(torch.nn.Module, "__init__", taken)
        load(model)
    assert "config.json" in " ".join(caught.value.lines())


@pytest.mark.parametrize(
    "index",
    ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../model.safetensors"}}', '{"weight_map": {"a": "/etc/passwd"}}',
     '{"weight_map": {"a": ["x"]}}', '{"weight_map": [1]}', "[" * 99_999, '{"weight_map": {"a": "x\\u0000"}}',
     '{"weight_map": {"a": "config.json"}}', '{"weight_map": {"a": ".."}}'],
)  # fmt: skip
def test_an_index_of_weights_names_files_beside_it(model: Path, index: str) -> None:
    (model / "model.safetensors.index.json").write_text(index)
    with pytest.raises((BadData, InputMissing)):
        load(model)


# ---------------------------------------------------------------- templates


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "DEADLINE_S", 1.0)
    with pytest.raises(BadConfig, match="takes too long") as caught:
        ChatTemplate("of the tokenizer", ENDLESS, byte_level())
    assert "loop without end" in caught.value.why


def test_a_template_gets_neither_all_memory_nor_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process for all of them: a refusal is not the end of it."""
    monkeypatch.chdir(tmp_path)
    probe = [([{"role": "user", "content": "x"}], [(1, True)])]
    apart = rendering.Elsewhere("")
    for text, why in (
        ("{{ 'a' * 10**10 }}", "memory"),
        ("{{ 'a' | center(10**10) }}", "memory"),
        ("{% for a in range(99999) %}{{ 'a' * 10000 }}{% endfor %}", "longer than"),
        ("{{ cycler.__init__.__globals__.os.system('touch imported') }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "TypeError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ):
        apart.text = text
        (found,) = apart.render(probe, {})
        assert isinstance(found, rendering.Refused) and why in str(found), (text, found)
    apart.text = "{{ messages[0].content }}!"
    assert apart.render(probe, {}) == [["x!"]]
    apart.close()
    assert not list(tmp_path.iterdir())


def test_only_templates_of_ours_are_rendered_in_this_process(model: Path) -> None:
    assert isinstance(load_template("chatml", byte_level())._renderer, rendering.Here)
    assert isinstance(load_template("chatml", byte_level())._renderer, rendering.Here)
    mine = model / "mine.jinja"
    mine.write_text("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    template = load_template(str(mine), byte_level())
    assert isinstance(template._renderer, rendering.Elsewhere)
    template.close()


# ---------------------------------------------------------------- terminals


def hostile(run: Path) -> None:
    """A run whose every text is for the terminal."""
    status = json.loads((run / "status.json").read_text())
    lies = {name: f"{TITLE}{value}\r" for name, value in status.items() if isinstance(value, str)}
    (run / "status.json").write_text(json.dumps({**status, **lies, "outcome": f"well{TITLE}"}))


def test_no_word_of_a_run_folder_is_obeyed_by_a_terminal(tmp_path: Path, finished: Finished, here: Command) -> None:
    """runs, watch, why, stop, checkpoints: what is not printable is shown."""
    run = finished(*EIGHT).path
    hostile(run)
    named = run.with_name(f"r{TITLE}\udc9b")
    run.rename(named)
    manifest = named / "checkpoints" / "checkpoint-8" / "manifest.json"
    manifest.write_text(json.dumps({"step": 8, "files": {f"{TITLE}.bin": {"bytes": 1, "xxh3_128": ""}}}))
    for words in (["runs"], ["checkpoints", named.name], ["watch", named.name], ["why", named.name], ["stop", "r"]):
        said = here(*words, cwd=tmp_path)
        both = said.stdout + said.stderr
        assert not {c for c in both if ord(c) < 32} - {"\n"}, (words, both)
        assert "\\x1b]0;owned" in both, words


def test_a_model_s_text_is_escaped_on_a_terminal_and_raw_in_a_pipe(
    tmp_path: Path, finished: Finished, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(*EIGHT)
    words = ["generate", "r", "--prompt", f"A{TITLE}B", "--max-tokens", "1"]
    for samples in (["--num-samples", "1"], ["--num-samples", "2"]):
        assert f"A{TITLE}B" in here(*words, *samples, cwd=tmp_path).stdout
        with monkeypatch.context() as terminal:
            terminal.setattr(type(sys.stdout), "isatty", lambda _: True, raising=False)
            shown = here(*words, *samples, cwd=tmp_path).stdout
        assert "A\\x1b]0;owned\\x07B" in shown and "\x1b" not in shown


@pytest.mark.parametrize("name", [f"a{TITLE}", "a\nb", "a\tb", "a\x9bb", "a\u202eb", "a\udc80b"])
def test_a_run_s_name_has_no_control_characters(tmp_path: Path, command: Command, name: str) -> None:
    for words in (["train", "--run", name], ["watch", "--run", name, "--", "true"]):
        refused = command(*words, cwd=tmp_path)
        assert refused.returncode == 78, refused.stderr
        assert "cannot be a run's name" in refused.stderr and "\x1b" not in refused.stderr
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------- secrets


def test_secrets_are_in_no_file_but_the_settings_and_nobody_else_reads_those(tmp_path: Path, here: Command) -> None:
    """A run that is told of, fails to tell, and ends with an error that holds the address."""
    (tmp_path / "a.txt").write_text("word and another one\n\n" * 300)
    secret = "s3cr3tw0rd"
    notify = f"http://127.0.0.1:9/{secret}?token={secret}"
    bad = f"s3cret://me:{secret}@host/x.jsonl?sig={secret}"
    words = ["train", "--run", "r", *EIGHT, "--data.paths", "a.txt", "--watch.notify", notify]
    done = here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    refused = here(*words, "--data.paths", bad, "--run", "q", cwd=tmp_path)
    assert refused.returncode != 0
    run = tmp_path / "runs" / "r"
    assert secret in (run / "config.yaml").read_text()
    told = done.stdout + done.stderr + refused.stdout + refused.stderr
    for path in [*run.rglob("*"), *(tmp_path / "runs" / "q").rglob("*")]:
        if path.is_file() and path.name not in ("config.yaml", "output.log"):
            told += path.read_text("utf-8", "replace")
    assert secret not in told
    assert "watch.notify does not work" in told
    shown = here(*words, "--print-config", cwd=tmp_path)
    assert secret not in shown.stdout and "http://127.0.0.1:9/***" in shown.stdout
    (tmp_path / "printed.yaml").write_text(shown.stdout)
    again = here("train", "printed.yaml", "--print-config", cwd=tmp_path)
    assert again.returncode == 78 and "a secret is missing" in again.stderr


def test_what_may_hold_a_secret_is_for_its_owner_alone(finished: Finished) -> None:
    run = finished(*EIGHT)
    for path in (run.config, run.output):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_errors_are_escaped_and_masked() -> None:
    error = LampError(f"cannot read {TITLE}", "https://me:word@host/x?token=abc", "give HF_TOKEN=hf_0123456789abcdef")
    assert error.lines() == [
        "error: cannot read \\x1b]0;owned\\x07",
        "why:   https://***@host/x?token=***",
        "next:  give HF_TOKEN=***",
    ]


def test_a_refused_template_leaves_no_process_and_nothing_for_python_to_report(tmp_path: Path) -> None:
    """Its process was still there when ours left at once, and Python's own wrote of leaked semaphores into the output."""
    ending = (
        ""
        if sys.platform != "linux"
        else "assert not multiprocessing.active_children(), multiprocessing.active_children()\n"
    )
    (tmp_path / "refused.py").write_text(
        "import multiprocessing, os\n"
        "from lamplighter.data.chat.template import ChatTemplate\n"
        "from lamplighter.data.tokenizer import byte_level\n"
        "from lamplighter.errors import BadConfig\n"
        "from lamplighter.procs.pool import Apart\n"
        "if __name__ == '__main__':\n"
        "    refused = ''\n"
        "    try:\n"
        "        ChatTemplate('x', '{{ raise_exception(1) }}', byte_level())\n"
        "    except BadConfig as error:\n"
        "        refused = error.what\n"
        "    kept = Apart(len, 1 << 30)\n"
        "    print(refused, kept.call('abc', 20.0), flush=True)\n"
        "    Apart.close_all()\n"
        f"    {ending}"
        "    os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "refused.py"], cwd=tmp_path, env=clean_env(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "cannot render a question and its answer 3" in done.stdout
    assert done.stderr == ""
