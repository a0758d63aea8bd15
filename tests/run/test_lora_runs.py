"""Adapters by the real command: a PEFT folder as checkpoint, killed and resumed to the bit, a base that moved or changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from lamplighter.rundir import RunDir, read_lines
from running import Command, lamp, losses_of, shared, slot_of, start_lamp, wait_for
from serving import ask, serving

ROWS = [{"question": f"Add {a} and {b}.", "answer": f"{a} and {b} is {a + b}."} for a in range(14) for b in range(14)]
LORA = [
    "--lora.r", "4", "--lora.dropout", "0.1", "--data.template", "plain", "--data.seq_len", "128", "--train.batch_size", "4",
    "--train.micro_batch", "2", "--train.dtype", "fp32", "--train.threads", "1", "--train.lr", "5e-3", "--train.steps", "30",
    "--eval.every_steps", "15", "--eval.sample_every_steps", "0", "--save.every_steps", "5", "--save.every_s", "0",
    "--watch.on_stuck", "stop",
]  # fmt: skip


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base of its own and a finished run `whole`."""
    cwd = tmp_path_factory.mktemp("lora")
    shutil.copytree(shared("models", "stories260K_hf_llama"), cwd / "base", copy_function=shutil.copyfile)
    os.chmod(cwd / "base", 0o755)  # noqa: PTH101
    (cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = lamp("train", "--run", "whole", *LORA, "--data.paths", "rows.jsonl", "--model.init_from", "base", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd


def test_a_run_says_what_is_trained_and_learns(tuned: Path) -> None:
    run = RunDir(tuned / "runs" / "whole")
    said = run.console.read_text()
    assert "are trained (3.33%), in 20 layers of rank 4" in said and "every parameter and buffer is on cpu" in said
    losses = [record["train/loss"] for record in read_lines(run.metrics) if "train/loss" in record]
    assert len(losses) == 30 and losses[-1] < 0.8 * losses[0]
    names = {path.name for path in run.checkpoint(30).iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "base.json", "training", "tokenizer.json"}
    assert not names & {"model.safetensors", "config.json"}
    assert sum(file.stat().st_size for file in run.checkpoint(30).rglob("*safetensors")) < 200_000


def test_killed_and_resumed_it_is_bit_identical(tuned: Path) -> None:
    run = RunDir(tuned / "runs" / "broken")
    words = ["train", "--run", "broken", *LORA, "--data.paths", "rows.jsonl", "--model.init_from", "base"]
    process = start_lamp(*words, cwd=tuned)
    wait_for(lambda: run.slot(0).exists() and slot_of(run).durable_step >= 10, process=process)
    os.kill(slot_of(run).pid, signal.SIGKILL)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = lamp(*words, cwd=tuned)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from checkpoint-" in done.stdout
    mine, whole = losses_of(run), losses_of(RunDir(tuned / "runs" / "whole"))
    assert sorted(mine) == list(range(1, 31)) and mine == whole
    for name in ("adapter_model.safetensors", "training/optimizer.safetensors"):
        assert (run.checkpoint(30) / name).read_bytes() == (
            RunDir(tuned / "runs" / "whole").checkpoint(30) / name
        ).read_bytes()


def test_transformers_and_peft_open_the_checkpoint_and_say_what_generate_says(tuned: Path, here: Command) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    place = RunDir(tuned / "runs" / "whole").checkpoint(30)
    model, tokenizer = AutoPeftModelForCausalLM.from_pretrained(place).eval(), AutoTokenizer.from_pretrained(place)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Add 2 and 3."}], tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    theirs = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=2
    )
    done = here(
        "generate",
        "whole",
        "--prompt",
        "Add 2 and 3.",
        "--temperature",
        "0",
        "--max-tokens",
        "20",
        "--threads",
        "1",
        cwd=tuned,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == tokenizer.decode(theirs[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_an_adapter_is_evaluated_and_served_as_the_model_that_it_is_merged_into(tuned: Path, here: Command) -> None:
    """As a folder of peft's, which knows nothing of us; by its name alone it would be the base."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    kept = shutil.ignore_patterns("training", "manifest.json", "base.json")
    shutil.copytree(RunDir(tuned / "runs" / "whole").checkpoint(30), tuned / "adapter", ignore=kept)
    AutoPeftModelForCausalLM.from_pretrained(tuned / "adapter").merge_and_unload().save_pretrained(tuned / "merged")
    AutoTokenizer.from_pretrained(tuned / "adapter").save_pretrained(tuned / "merged")
    (tuned / "tasks" / "lambada").mkdir(parents=True)
    (tuned / "tasks" / "lambada" / "t.jsonl").write_text("".join(json.dumps({"text": f"One day {n} and {n} made a big red ball"}) + "\n" for n in range(4)))  # fmt: skip
    nats = {}
    for name in ("adapter", "merged", "base"):
        done = here("eval", name, "--data", "tasks", "--tasks", "lambada", cwd=tuned)
        assert done.returncode == 0, done.stderr
        [items] = (tuned / "runs" / ".evaluations" / name / "evaluations" / "items").glob("lambada-*.jsonl")
        nats[name] = [one["nats"][0] for one in read_lines(items) if "item" in one]
    assert nats["adapter"] == pytest.approx(nats["merged"], abs=1e-3) and len(nats["adapter"]) == 4
    assert max(abs(mine - plain) for mine, plain in zip(nats["adapter"], nats["base"], strict=True)) > 0.1
    done = here("generate", "merged", "--raw", "--prompt", "Add 2", "--temperature", "0", "--max-tokens", "12", cwd=tuned)  # fmt: skip
    with serving(tuned, "adapter") as (port, _):
        code, told = ask(port, "/v1/completions", {"model": "adapter", "prompt": "Add 2", "max_tokens": 12, "temperature": 0})  # fmt: skip
    assert code == 200 and done.returncode == 0, done.stderr
    assert told["choices"][0]["text"] in done.stdout and told["choices"][0]["text"].strip()


def test_a_base_that_moved_is_named_again_and_one_that_changed_is_refused(
    tuned: Path, here: Command, tmp_path: Path
) -> None:
    shutil.copytree(tuned, tmp_path / "w", ignore=shutil.ignore_patterns("slots", "broken"))
    cwd = tmp_path / "w"
    base = json.loads((cwd / "runs/whole/checkpoints/checkpoint-30/base.json").read_text())
    assert base["path"] == str(tuned / "base")  # the copy still finds the one of then
    (cwd / "base").rename(cwd / "elsewhere")
    words = ["train", "--run", "whole", "--train.steps", "32", "--data.paths", "rows.jsonl"]
    gone = here(*words, cwd=cwd)
    assert gone.returncode == 66 and "--model.init_from FOLDER" in gone.stdout + gone.stderr
    other = cwd / "other"
    shutil.copytree(cwd / "elsewhere", other)
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    refused = here(*words, "--model.init_from", "other", cwd=cwd)
    assert (
        refused.returncode == 78
        and "is not the base that checkpoint-30 was trained on" in refused.stdout + refused.stderr
    )
    moved = here(*words, "--model.init_from", "elsewhere", cwd=cwd)
    assert moved.returncode == 0 and "step 31 is next" in moved.stdout, moved.stdout + moved.stderr
    asked = here(
        "generate",
        "whole",
        "--prompt",
        "Hi",
        "--max-tokens",
        "3",
        "--model.init_from",
        "other",
        "--threads",
        "1",
        cwd=cwd,
    )
    assert asked.returncode == 78
    (cwd / "elsewhere").rename(cwd / "again")
    (cwd / "text.txt").write_text("One day Lily saw a big red ball. " * 8)
    words = ["eval", "whole", "--tasks", "text", "--data", ".", "--threads", "1"]
    gone = here(*words, cwd=cwd)
    assert gone.returncode == 66 and "--model.init_from FOLDER" in gone.stderr, gone.stderr
    assert here(*words, "--model.init_from", "again", cwd=cwd).returncode == 0
    with serving(cwd, "whole", "--model.init_from", "again") as (port, _):
        code, _told = ask(port, "/v1/completions", {"model": "whole", "prompt": "Add 2", "max_tokens": 2})
    assert code == 200


def test_an_adapter_or_a_run_in_the_place_of_a_model_is_told_as_that(tuned: Path, here: Command) -> None:
    words = ["train", "--run", "more", "--data.paths", "rows.jsonl", "--lora.r", "4", "--model.init_from"]
    adapter = here(*words, "runs/whole/checkpoints/checkpoint-30", cwd=tuned)
    assert adapter.returncode == 78 and "is an adapter" in adapter.stderr + adapter.stdout
    assert (
        "lamp export runs/whole/checkpoints/checkpoint-30 --to hf --merge --out DIR" in adapter.stderr + adapter.stdout
    )
    run = here(*words, "runs/whole", cwd=tuned)
    assert run.returncode == 78 and "is an adapter" in run.stderr + run.stdout


def test_the_section_alone_is_refused(command: Command, tmp_path: Path) -> None:
    assert command("train", "--lora.alpha", "3", cwd=tmp_path).returncode == 78
    done = command("train", "--lora.r", "3", cwd=tmp_path)
    assert done.returncode == 78 and "needs model.init_from" in done.stderr
    assert "--lora.targets" in command("train", "--target_modules", "q_proj", cwd=tmp_path).stderr
