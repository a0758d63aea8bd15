"""Preference pairs by the real command: the first loss, the cached reference, kills and ranks to the bit, what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from lamplighter.rundir import RunDir, read_json, read_lines
from lamplighter.train import bf16
from running import Command, lamp, losses_of, shared, slot_of, start_lamp, wait_for

ROWS = [
    {
        "prompt": f"Add {a} and {b}.",
        "chosen": f"{a} and {b} is {a + b}.",
        "rejected": "No idea" + ", none" * (b % 4) + ".",
    }
    for a in range(10)
    for b in range(10)
]
DPO = [
    "--train.objective", "dpo", "--lora.r", "4", "--data.paths", "rows.jsonl", "--model.init_from", "base", "--data.template", "plain",
    "--data.seq_len", "192", "--train.batch_size", "6", "--train.micro_batch", "2", "--train.dtype", "fp32", "--train.threads", "1",
    "--train.lr", "1e-3", "--train.steps", "24", "--eval.every_steps", "12", "--eval.sample_every_steps", "0", "--save.every_steps",
    "4", "--save.every_s", "0", "--watch.on_stuck", "stop",
]  # fmt: skip


@pytest.fixture(scope="module")
def preferred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base of its own and a finished run `whole`, on one rank."""
    cwd = tmp_path_factory.mktemp("dpo")
    shutil.copytree(shared("models", "stories260K_hf_llama"), cwd / "base", copy_function=shutil.copyfile)
    os.chmod(cwd / "base", 0o755)  # noqa: PTH101
    (cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = lamp("train", "--run", "whole", *DPO, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd


def test_the_first_loss_is_ln_2_and_the_margin_grows(preferred: Path) -> None:
    run = RunDir(preferred / "runs" / "whole")
    records = [record for record in read_lines(run.metrics) if "train/loss" in record]
    assert records[0]["train/loss"] == pytest.approx(0.693147181, abs=1e-7) and records[0]["train/reward_margin"] == 0
    assert records[-1]["train/loss"] < 0.6 and records[-1]["train/reward_margin"] > 0.2
    assert records[-1]["train/reward_accuracy"] > 0.9 and records[-1]["train/logp_chosen"] < 0
    validated = [record for record in read_lines(run.metrics) if "eval/val_loss" in record]
    assert "eval/reward_margin" in validated[-1] and "eval/val_ppl" not in validated[-1], (
        "perplexity means nothing here"
    )
    said = run.console.read_text()
    assert "100 pairs of 100 rows" in said and "of the pairs as in the data" in said
    assert "building the reference log-probabilities" in said and "the first for this base and these pairs" in said


def test_killed_on_three_ranks_and_resumed_on_two_it_has_the_bits_of_one(preferred: Path) -> None:
    run = RunDir(preferred / "runs" / "broken")
    words = ["train", "--run", "broken", *DPO]
    process = start_lamp(*words, "--train.ranks", "3", cwd=preferred)
    wait_for(lambda: run.slot(0).exists() and slot_of(run).durable_step >= 8, 200, process)
    victims = [one["pid"] for one in read_json(run.status)["ranks"]]
    os.kill(process.pid, signal.SIGKILL)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    done = lamp(*words, "--train.ranks", "2", cwd=preferred)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from checkpoint-" in done.stdout and "reference log-probabilities reused" in done.stdout
    whole = RunDir(preferred / "runs" / "whole")
    assert losses_of(run) == losses_of(whole) and len(losses_of(run)) == 24
    margins = [
        {record["step"]: record["train/reward_margin"] for record in read_lines(one.metrics) if "train/loss" in record}
        for one in (run, whole)
    ]
    assert margins[0] == margins[1], "what is told besides, too"
    for name in ("adapter_model.safetensors", "training/optimizer.safetensors"):
        assert (run.checkpoint(24) / name).read_bytes() == (whole.checkpoint(24) / name).read_bytes()


def _with(words: list[str], rows: str) -> list[str]:
    """The same settings, on other rows."""
    return [rows if word == "rows.jsonl" else word for word in words]


def test_the_reference_is_kept_for_this_base_and_these_pairs_alone(preferred: Path, here: Command) -> None:
    """The same pairs, all weights instead of adapters: the same reference. Other rows: another."""
    full = [*DPO[:2], *DPO[4:], "--train.steps", "1", "--eval.every_steps", "0"]
    done = here("train", "--run", "full", *full, cwd=preferred)
    assert done.returncode == 0, done.stdout
    assert "reference log-probabilities reused" in done.stdout
    losses = [
        record["train/loss"]
        for record in read_lines(RunDir(preferred / "runs" / "full").metrics)
        if "train/loss" in record
    ]
    assert losses == pytest.approx([0.693147181], abs=1e-7)
    (preferred / "fewer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:40]))
    done = here("train", "--run", "fewer", *_with(full, "fewer.jsonl"), cwd=preferred)
    assert done.returncode == 0 and "building the reference log-probabilities" in done.stdout, done.stdout
    assert "pairs changed" in done.stdout


def test_in_bf16_too_the_first_loss_is_ln_2_and_so_is_that_of_a_validation(preferred: Path, here: Command) -> None:
    """A step and a validation read by other kernels there, which round differently."""
    if not bf16.cpu_has_it():
        pytest.skip("this CPU has no bf16")
    words = [*DPO, "--train.dtype", "bf16", "--train.steps", "2", "--eval.every_steps", "1", "--train.lr", "1e-12"]
    done = here("train", "--run", "bf16", *words, cwd=preferred)
    assert done.returncode == 0, done.stdout
    records = list(read_lines(RunDir(preferred / "runs" / "bf16").metrics))
    losses = [one[name] for one in records for name in ("train/loss", "eval/val_loss") if name in one]
    assert len(losses) >= 3 and losses == pytest.approx([0.693147181] * len(losses), abs=1e-4), losses


def test_the_card_of_a_model_of_preference_pairs_tells_of_pairs_and_of_no_perplexity(preferred: Path) -> None:
    from lamplighter.config import load_dump
    from lamplighter.export import model_card

    run = RunDir(preferred / "runs" / "whole")
    facts = model_card.Published("me/preferred", run.checkpoint(24), 9, 9, is_adapter=False, base=None, license="mit", template=None)  # fmt: skip
    card = model_card.write_card(run, load_dump(run.config), "", facts)
    assert "preference pairs (DPO, beta 0.1)" in card and "perplexity" not in card
    assert "| loss of a pair (0.6931: no preference) |" in card and "has the larger reward" in card
    assert "loss of a preference pair" in model_card.draw_curves(run)


def test_objective_and_rows_that_do_not_go_together_are_refused(
    preferred: Path, here: Command, command: Command
) -> None:
    done = here("train", "--run", "sft", *DPO[2:], cwd=preferred)
    assert done.returncode == 78 and "--train.objective dpo" in done.stdout
    (preferred / "plain.jsonl").write_text(json.dumps({"prompt": "Who?", "completion": "Me."}) + "\n")
    done = here("train", "--run", "plain", *_with(DPO, "plain.jsonl"), cwd=preferred)
    assert done.returncode == 78 and "needs preference pairs" in done.stdout
    done = command("train", "--train.objective", "dpo", "--data.paths", "rows.jsonl", cwd=preferred)
    assert done.returncode == 78 and "needs model.init_from" in done.stdout + done.stderr
