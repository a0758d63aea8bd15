"""Every command of the README runs; its numbers are true."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from lamplighter import commands as cli
from lamplighter import errors
from lamplighter.config import preset_names, resolve
from lamplighter.config.names import nearest
from lamplighter.data.sources import EmbeddedCorpus
from lamplighter.model.shape import Shape, count_parameters
from lamplighter.rundir import RunDir, read_json
from pictures import CHECKS, MOST_BYTES, last_screen
from running import TINY, Command, lamp, slot_of, start_lamp, wait_for
from server import serving

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import readme  # noqa: E402

README = (ROOT / "README.md").read_text()
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def bash_lines(*sections: str) -> list[str]:
    """The commands in those sections of the README."""
    parts = re.split(r"^## (.*)$", README, flags=re.MULTILINE)
    return commands_of("".join(body for title, body in zip(parts[1::2], parts[2::2], strict=True) if title in sections))


def commands_of(text: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [line.split(" #")[0].strip() for block in blocks for line in block.splitlines() if line.startswith("lamp ")]


def words_of(lines: list[str]) -> list[list[str]]:
    return [shlex.split(line, comments=True)[1:] for line in lines]


def table_commands() -> list[str]:
    rows = re.findall(r"^\| (`lamp [^|]*) \|", README, re.MULTILINE)
    return [command for row in rows for command in re.findall(r"`(lamp [^`]+)`", row)]


def test_every_command_in_the_documents_names_a_verb_and_flags_that_exist() -> None:
    known = " ".join(cli.VERB_HELP.values()) + " --help"
    for path in DOCS:
        for command in re.findall(r"`(lamp [a-z][^`]*)`", path.read_text()):
            words = command.split()
            assert all(part in cli.VERBS for part in words[1].split("|")) or "|" in command, f"{path}: {command}"
            for flag in re.findall(r"--[a-z-]+(?![\w.])", command):
                assert flag in known, f"{path}: {command}"


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """`make docs`: every link leads to a page, every anchor to a heading, every decision is listed."""
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    listed = (ROOT / "docs/decisions/index.md").read_text()
    for decision in (ROOT / "docs/decisions").glob("0*.md"):
        assert f"({decision.name})" in listed, f"docs/decisions/index.md does not list {decision.name}"


def test_every_exit_code_is_explained() -> None:
    codes = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    codes |= {found.code for found in vars(errors).values() if isinstance(found, type) and hasattr(found, "code")}
    codes -= {errors.FAULTS_FOUND}  # from a child to its parent only
    page = (ROOT / "docs/troubleshooting.md").read_text()
    assert codes == {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}


def test_every_file_that_the_documents_name_exists() -> None:
    pages = [page for page in DOCS if page.name != "MAP.md" and page.parent.name != "decisions"]  # those are history
    for path in (ROOT / "CONTRIBUTING.md", *pages):
        text = path.read_text()
        for name in re.findall(r"(?:(?<=`)|(?<= ))((?:src|tests|benchmarks|docs)/[\w./]*\w)(?=[` ])", text):
            placeholder = re.search(r"NAME|_X\b", name)
            assert placeholder or (ROOT / name).exists(), f"{path}: {name}"
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text):
            assert (ROOT / name).exists() or (ROOT / "src/lamplighter" / name).exists(), f"{path}: {name}"


def test_the_table_of_presets_is_true() -> None:
    tables = README + (ROOT / "docs" / "recipe.md").read_text()
    for name in preset_names():
        run = resolve(name).run
        shape = Shape(run.model.family, run.tokenizer.vocab_size, run.data.seq_len, run.model.layers, run.model.width,  # type: ignore[arg-type]
                      run.model.heads, run.model.kv_heads or 0, tie_embeddings=run.model.tie_embeddings)  # fmt: skip
        assert re.search(rf"`{name}` \|.*\| {count_parameters(shape):,} \|", tables), (
            f"{name}: {count_parameters(shape):,}"
        )


def test_the_run_file_of_the_readme_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my.yaml").write_text(text)
    run = resolve(None, tmp_path / "my.yaml").run
    assert run.train.epochs == 3
    assert run.budget.usd == 12


def test_the_readme_is_short_and_its_figures_are_those_of_the_results() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 10_000
    found = readme.results()
    assert readme.fill(README, found) == README, "next: make readme"
    assert len(readme.SPAN.findall(README)) >= 30
    for name, result in found.items():
        assert result.keys() >= {"machine", "date", "commit", "command", "figures"}, name


@pytest.mark.parametrize("scene", CHECKS)
def test_the_looping_pictures_show_what_the_readme_says_of_them(scene: str) -> None:
    """A recording of the real commands (tests/zoo/test_pictures.py makes them anew); the verdict's line is one of today's scripts."""
    picture = ROOT / "docs" / f"{scene}.svg"
    assert f"](docs/{scene}.svg)" in README and picture.stat().st_size < MOST_BYTES
    CHECKS[scene](last_screen(picture.read_text()))


def test_a_stale_figure_is_found() -> None:
    found = readme.results()
    found["training"]["figures"]["ratio_trainer"] = 0.5
    assert "<!-- training.ratio_trainer .2f -->0.50<!-- / -->" in readme.fill(README, found)
    with pytest.raises(SystemExit, match=r"quotes kills\."):
        readme.fill(README, {**found, "kills": {"figures": {}}})


@pytest.mark.parametrize(("preset", "device"), [("slm", "rtx4090"), ("modern", "t4")])
def test_what_fits_where_is_what_the_plan_says(preset: str, device: str) -> None:
    stored = readme.results()["plan"]["figures"]
    for name, value in readme.plans((preset,), (device,)).items():
        assert value == pytest.approx(stored[name], rel=0.005), f"{name}; next: make readme"


def test_names_from_elsewhere_are_understood_as_the_readme_says() -> None:
    (table,) = re.findall(r"^\| Trainer \|.*?\n\n", README, re.MULTILINE | re.DOTALL)
    seen = 0
    for row in table.splitlines()[2:]:
        *theirs, ours = row.strip("| ").split(" | ")
        for name in re.findall(r"`(\w+)`", " ".join(theirs)):
            if name in ("batch_size", "resume_from_checkpoint"):  # another meaning there; nothing to write here
                continue
            seen += 1
            assert f"`{nearest(name)}`" in ours, f"{name}: {nearest(name)}, the README says {ours}"
    assert seen > 15


@pytest.mark.slow
def test_the_way_of_text_and_the_hanging_script(tmp_path: Path) -> None:
    """Each line of two sections as it stands; the long one is stopped when it trains."""
    (tmp_path / "raw").mkdir()
    letters = list(EmbeddedCorpus(0, 400).documents())
    for number in range(4):
        (tmp_path / "raw" / f"{number}.txt").write_text("\n\n".join(letters[number * 100 : number * 100 + 100]))
    (tmp_path / "my.yaml").write_text("train: {steps: 5}\n")
    (tmp_path / "train.py").write_text("print('a script of somebody else')\n")
    clean, stats, small, real = words_of(bash_lines("I have text"))
    watched, why, doctor = words_of(bash_lines("My script hangs"))
    done = lamp(*[sys.executable if word == "python" else word for word in watched], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "a script of somebody else\n"), done.stderr
    assert lamp(*[str(os.getpid()) if word.isdecimal() else word for word in why], cwd=tmp_path).returncode == 0
    assert doctor[0] == "doctor" and resolve(None, tmp_path / doctor[1])
    for words in (clean, stats, small, ["train", "my.yaml", "--print-config"]):
        done = lamp(*words, cwd=tmp_path)
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    run = RunDir(tmp_path / "runs" / "slm")
    going = start_lamp(*real, cwd=tmp_path)
    wait_for(lambda: slot_of(run).phase in ("compile", "first step", "train"), 300, going)
    wait_for(lambda: "parameters (gpt2)" in (tmp_path / "out.txt").read_text(), 10, going)
    going.send_signal(signal.SIGTERM)
    assert going.wait(40) == 75
    assert not [p for p in run.checkpoints.glob("checkpoint-*") if not (p / "manifest.json").exists()]


@pytest.mark.slow
def test_from_raw_text_to_a_model_that_answers(tmp_path: Path, here: Command) -> None:
    """The lines of the manual's first page and of the README's questions and answers, with a small model and a server of our own."""
    raw = tmp_path / "raw"
    raw.mkdir()
    letters = [{"text": text} for text in EmbeddedCorpus(0, 400).documents()]
    (raw / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in letters))
    asked = [{"prompt": f"What is {n} and one?", "completion": f"It is {n + 1}."} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    small = [word for word in TINY if word not in ("--tokenizer.kind", "bytes")]
    lines = words_of(commands_of((ROOT / "docs/index.md").read_text()))
    assert [line[0] for line in lines] == ["data", "data", "tokenizer", "data", "train", "train"]
    lines += words_of(bash_lines("I have questions and answers"))
    assert [line[0] for line in lines[6:]] == ["data", "train", "generate"]
    with serving() as server:
        url, _ = server.put("a.jsonl.zst", zstandard.compress((raw / "letters.jsonl").read_bytes()))
        model = str(tmp_path / "runs/train/checkpoints/checkpoint-3")
        for number, words in enumerate(lines):
            words = [url if word.startswith("https:") else model if word == "DIR" else word for word in words]
            if words[1] == "prepare":
                words += ["--data.val_fraction", "0.05"]  # as in what follows
            if words[0] == "train":
                words += [*small, "--data.seq_len", "96", "--train.steps", "3"]
                words += [] if "--run" in words else ["--run", "train" if number == 4 else f"run{number}"]
            call = here if words[0] in ("train", "generate") else lamp  # the others start workers
            done = call(*words, cwd=tmp_path)
            assert done.returncode == 0, f"{words}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    assert "token cache reused" in (tmp_path / "runs/train/console.log").read_text()
    assert "chatml" in (tmp_path / "runs/helper/console.log").read_text()


def test_the_commands_for_another_terminal(tmp_path: Path) -> None:
    """Each of the table, while a run goes on: what it answers, and how the run ends."""
    run = RunDir(tmp_path / "runs" / "slm")
    words = ["--train.steps", "1000000", "--save.every_steps", "500000"]
    going = start_lamp("train", "--run", "slm", *TINY, *words, cwd=tmp_path)
    wait_for(lambda: slot_of(run).step > 20, process=going)
    commands = table_commands()
    assert len(commands) == 7
    said = {}
    for command in sorted(commands, key=lambda command: "stop" in command):
        words = shlex.split(command)[1:]
        if words[0] == "watch":
            watcher = start_lamp(*words, cwd=tmp_path)
            wait_for(lambda: "watching slm" in (tmp_path / "out.txt").read_text(), process=watcher)
            watcher.send_signal(signal.SIGINT)
            assert watcher.wait(10) == 0
            continue
        done = lamp(*words, cwd=tmp_path)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        said[words[0]] = done.stdout
        if words[0] == "save":
            assert slot_of(run).durable_step > 0
    assert all(words in said["why"] for words in ("phase: train", "thread MainThread", "loop.py"))
    assert re.search(r"^slm +running", said["runs"], re.MULTILINE)
    assert "lamp stop" in said["stop"]
    assert going.wait(20) == 75
    status = read_json(run.status)
    assert {"state", "phase", "step", "steps", "tokens", "tokens_per_s", "eta_s", "usd", "durable_step", "last_progress_s", "host",
            "boot_id", "pid", "pid_start"} <= set(status)  # fmt: skip
    assert (status["state"], status["step"]) == ("stopped", status["durable_step"])
    after = lamp("why", "slm", cwd=tmp_path)
    assert after.returncode == 66
    assert "not running" in after.stderr
    assert list(run.ask.iterdir()) == []
