"""Models of the hub, in and out, with the real client against a local server: fetched, cut off, offline; published, broken off, resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from hub_server import COMMIT, Hub, hub_server
from lamplighter.rundir import RunDir
from running import LONG, lamp, shared

ROWS = [
    {"question": f"Add {a} and {b}.", "answer": f"{a} and {b} is {a + b}.", "license": "cc-by-4.0"}
    for a in range(10)
    for b in range(10)
]
QUICK = [
    "--data.paths", "rows.jsonl", "--data.template", "chatml", "--data.seq_len", "128", "--train.batch_size", "4", "--train.threads", "1",
    "--train.dtype", "fp32", "--train.steps", "4", "--eval.sample_every_steps", "0", "--eval.every_steps", "2", "--lora.r", "2",
]  # fmt: skip


def use(hub: Hub | None, monkeypatch: pytest.MonkeyPatch, cwd: Path) -> None:
    """The real client speaks to this server alone."""
    monkeypatch.setenv("HF_ENDPOINT", hub.address if hub else "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(cwd / "hf"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # of other tests of this process
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecretsecret")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose base came from the hub."""
    cwd = tmp_path_factory.mktemp("hub")
    (cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with (
        hub_server(tiny__stories=shared("models", "stories260K_hf_llama")) as hub,
        pytest.MonkeyPatch.context() as patch,
    ):
        use(hub, patch, cwd)
        done = lamp("train", "--run", "r", *QUICK, "--model.init_from", "tiny/stories", cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"tiny/stories at commit {COMMIT[:12]}" in done.stdout and "in 4 files" in done.stdout
    return cwd


def test_a_hub_name_is_resolved_once_and_then_needs_no_hub(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tuned / "runs" / "r")
    kept = json.loads((run.path / "model_source.json").read_text())
    assert kept["commit"] == COMMIT
    base = json.loads((run.checkpoint(4) / "base.json").read_text())
    assert (base["name"], base["commit"]) == ("tiny/stories", COMMIT)
    settings = json.loads((run.checkpoint(4) / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "tiny/stories" and settings["revision"] == COMMIT
    use(None, monkeypatch, tuned)
    done = lamp("train", "--run", "r", "--data.paths", "rows.jsonl", "--train.steps", "6", cwd=tuned)
    assert done.returncode == 0 and "step 5 is next" in done.stdout, done.stdout + done.stderr
    assert lamp("generate", "r", "--prompt", "Hi", "--max-tokens", "3", cwd=tuned).returncode == 0


def test_plan_stats_and_doctor_know_a_hub_name_as_train_does(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copyfile(tuned / "rows.jsonl", tmp_path / "rows.jsonl")
    words = ["--model.init_from", "tiny/stories", "--data.paths", "rows.jsonl", "--data.template", "chatml"]
    with hub_server(tiny__stories=shared("models", "stories260K_hf_llama")) as hub:
        use(hub, monkeypatch, tmp_path)
        plan = lamp("plan", *words, "--train.steps", "4", "--lora.r", "2", cwd=tmp_path)
        assert plan.returncode == 0 and "trained" in plan.stdout and "tiny/stories at commit" in plan.stderr, (
            plan.stderr
        )
        stats = lamp("data", "stats", *words, cwd=tmp_path)
        assert stats.returncode == 0 and "examples    100" in stats.stdout, stats.stderr
        assert not any(one.startswith("GET") and one.endswith(".safetensors") for one in hub.asked), (
            "the small files alone"
        )
        doctor = lamp("doctor", *words, "--only", "tokenizer", cwd=tmp_path)
        assert "no readable config.json" not in doctor.stdout + doctor.stderr and doctor.returncode == 0, doctor.stdout
        assert any(one.startswith("GET") and one.endswith(".safetensors") for one in hub.asked)
        doctor = lamp("doctor", *words[2:], "--model.init_from", "tiny/storeys", "--only", "tokenizer", cwd=tmp_path)
        assert doctor.returncode == 1 and "there is no tiny/storeys on the hub" in doctor.stdout


def test_offline_or_wrong_it_is_said_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    use(None, monkeypatch, tmp_path)
    done = lamp("train", "--run", "x", *QUICK, "--model.init_from", "tiny/stories", cwd=tmp_path, timeout=60)
    assert (
        done.returncode == 67 and "the hub cannot be reached, and it is not in the cache" in done.stdout + done.stderr
    )
    with hub_server(tiny__stories=shared("models", "stories260K_hf_llama")) as hub:
        use(hub, monkeypatch, tmp_path)
        done = lamp("train", "--run", "x", *QUICK, "--model.init_from", "tiny/storeys", cwd=tmp_path)
        assert done.returncode == 66 and "there is no tiny/storeys on the hub" in done.stdout + done.stderr


@LONG
def test_a_download_that_breaks_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with hub_server(tiny__stories=shared("models", "stories260K_hf_llama")) as hub:
        use(hub, monkeypatch, tmp_path)
        hub.cut_download = 300_000  # the weights break off, again and again
        done = lamp("train", "--run", "x", *QUICK, "--model.init_from", "tiny/stories", cwd=tmp_path)
        assert done.returncode == 67 and "the same command goes on where it stopped" in done.stdout + done.stderr
        hub.cut_download = 0
        done = lamp("train", "--run", "x", *QUICK, "--model.init_from", "tiny/stories", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        asked = [one for one in hub.asked if one.startswith("GET") and one.endswith("/tokenizer.json")]
        assert len(asked) == 1, "a file that had come is not fetched again"
        words = ["--model.init_from", "tiny/stories", "--model.revision", "v9"]
        done = lamp("train", "--run", "y", *QUICK, *words, cwd=tmp_path)
        assert done.returncode == 66 and "has no revision v9" in done.stdout + done.stderr


def test_publish_writes_a_card_and_uploads_what_belongs_there(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tuned / "runs" / "r")
    folder = run.path / "evaluations"
    folder.mkdir(exist_ok=True)
    score = {"name": "acc_norm", "value": 0.31, "stderr": 0.01, "n": 500, "chance": 0.25, "higher_is_better": True}
    (folder / "h.json").write_text(
        json.dumps({"format": 1, "task": "hellaswag", "checkpoint": "checkpoint-4", "step": 4, "scores": [score]})
    )
    with hub_server() as hub:
        use(hub, monkeypatch, tuned)
        dry = lamp("publish", "r", "--to", "me/tuned", "--dry-run", "--license", "mit", cwd=tuned)
        assert dry.returncode == 0 and not hub.asked, dry.stderr
        card = (Path(dry.stdout.strip()) / "README.md").read_text()
        front = yaml.safe_load(card.split("---")[1])
        assert front["license"] == "mit" and front["base_model"] == "tiny/stories" and front["library_name"] == "peft"
        assert front["model-index"][0]["results"][0]["metrics"] == [{"type": "acc_norm", "value": 0.31}]
        for words in (
            "0.3100 ± 0.0100",
            "chance 0.250",
            "licence: cc-by-4.0",
            "LoRA adapter (rank 2",
            "curves.svg",
            "hours",
            "lora:",
            "tokens",
        ):
            assert words in card, words
        from huggingface_hub import ModelCard

        assert ModelCard(card).data.base_model == "tiny/stories", "the hub's own reader takes the front matter"
        hub.fail_commit = 1
        broken = lamp("publish", "r", "--to", "me/tuned", "--license", "mit", cwd=tuned)
        assert broken.returncode == 67 and "the same command goes on" in broken.stderr and not hub.commits
        sent = hub.sent
        assert sent > 1000, (hub.asked, broken.stderr)
        done = lamp("publish", "r", "--to", "me/tuned", "--license", "mit", cwd=tuned)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"{hub.address}/me/tuned" and hub.sent == sent, "what was there is not sent again"
        (files,) = hub.commits
    assert set(files) >= {
        "README.md",
        "curves.svg",
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
    }
    assert not any("training" in name or "optimizer" in name or name == "manifest.json" for name in files)
    everything = b"".join(files.values())
    assert b"hf_secret" not in everything and str(tuned).encode() not in files["base.json"]
    assert files["curves.svg"].startswith(b"<svg")


def test_publish_asks_nothing_and_says_what_is_missing(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(None, monkeypatch, tuned)
    assert lamp("publish", "r", cwd=tuned).returncode == 2
    monkeypatch.delenv("HF_TOKEN")
    done = lamp("publish", "r", "--to", "me/x", cwd=tuned, stdin=None)
    assert done.returncode == 66 and "there is no token" in done.stderr
