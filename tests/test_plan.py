"""The plan on paper: true parameters, memory within what was measured, refusals with their arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import lamp
from lamplighter.errors import UsageError
from lamplighter.model.shape import Shape
from lamplighter.ops.devices import TABLE, Device, find
from lamplighter.ops.plan import GIB, Job, as_json, layer_bytes, make, memory
from lamplighter.ops.told import tell

SMALL = Shape("gpt2", 30_000, 512, 12, 768, 12)
SLM = Job(SMALL, 512, 36, 18, 60_000, "bf16")
# The plan of system D, as its post-mortem tells it: long windows, a large vocabulary, fifteen dollars.
LONG = Job(Shape("llama", 128_000, 32_768, 24, 2048, 16), 32_768, 8, 4, 20_000, "bf16", budget_usd=15, usd_per_hour=1.8)


def test_a_run_that_fits_goes() -> None:
    plan = make(SLM, find("a100-80gb"))
    assert plan.go and not plan.reasons and plan.params == 108_489_216
    assert plan.flops == pytest.approx(
        60_000 * 36 * 512 * (6 * (12 * 12 * 768**2 + 30_000 * 768) + 12 * 12 * 768 * 512)
    )
    assert plan.hours == pytest.approx(plan.flops / (312e12 * 0.4) / 3600)


def test_what_cannot_be_is_refused_with_the_arithmetic() -> None:
    plan = make(LONG, find("a100-80gb"))
    kinds = [reason.split(":")[0] for reason in plan.reasons]
    assert kinds == ["memory", "money", "time"]
    assert "times the peak" in plan.reasons[2] and "$15.00" in plan.reasons[1]
    assert plan.memory.logits == 4 * 32_768 * 128_000 * 14
    for change in plan.changes:
        assert (
            change.usd is not None
            and change.usd <= 15
            and change.memory_gib < 79.2
            and change.settings.startswith("--")
        )
    assert plan.changes, "it says what would go"


def test_the_smallest_change_for_memory_leaves_the_batch_alone() -> None:
    tight = replace(SLM, micro_batch=36, batch_size=36)
    card = replace(find("a10"), memory_gib=8.0)
    plan = make(tight, card)
    assert not plan.go and plan.reasons[0].startswith("memory")
    first = plan.changes[0]
    size = int(first.settings.split()[1])
    assert first.settings.startswith("--train.micro_batch") and size < 36
    assert memory(replace(tight, micro_batch=2 * size), card).peak_gib > 8.0 * 0.92, "the largest that fits"


@pytest.mark.parametrize(("family", "dtype", "per_token"), [("gpt2", "fp32", 64), ("gpt2", "bf16", 36), ("llama", "fp32", 84), ("llama", "bf16", 56)])  # fmt: skip
def test_the_bytes_of_a_layer_are_those_that_autograd_keeps(family: str, dtype: str, per_token: int) -> None:
    """In units of the width, as counted with torch's saved_tensors_hooks (bf16: without the copies of the weights)."""
    shape = Shape(family, 1000, 512, 2, 512, 8)  # type: ignore[arg-type]
    assert layer_bytes(shape, dtype) == pytest.approx(per_token * 512, rel=0.01)


MEASURE = """
import sys, torch
from lamplighter.config import Train
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer, init_weights, next_token_loss
from lamplighter.train import optim
torch.set_num_threads(1)
model = Transformer(Shape("gpt2", 8000, 256, 4, 256, 4))
init_weights(model, 1)
optimizer = optim.make_optimizer(model, Train())
for _ in range(2):
    ids = torch.randint(0, 8000, (8, 256))
    (next_token_loss(model(ids), ids) / ids.numel()).backward()
    optimizer.step(1e-4)
    optimizer.zero_grad()
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def test_memory_on_paper_is_near_the_memory_that_is_used() -> None:
    real = (
        int(subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True).stdout) * 1024
    )
    job = Job(Shape("gpt2", 8000, 256, 4, 256, 4), 256, 8, 8, 10)
    assert memory(job, Device("cpu", 24, None, 1e11)).peak == pytest.approx(real, rel=0.25)


def test_the_table_of_devices() -> None:
    wanted = {"t4", "l4", "a10", "l40s", "a100-40gb", "a100-80gb", "h100-80gb", "rtx3090", "rtx4090"}
    assert wanted <= set(TABLE)
    assert find("A100-80GB:2").count == 2 and find("a100-80gb:2").peak("bf16") == 624e12
    assert find("t4").dtype == "fp32"
    for bad in ("a100", "b1000", "t4:0", "t4:x"):
        with pytest.raises(UsageError) as caught:
            find(bad)
        assert caught.value.next


def test_json_has_what_scripts_need() -> None:
    found = json.loads(json.dumps(as_json(make(LONG, find("t4")))))
    wanted = {"go", "params", "tokens", "flops", "hours", "usd", "memory_gib", "logits_gib", "reasons"}
    assert wanted <= set(found) and found["go"] is False
    assert found["logits_gib"] == pytest.approx(4 * 32_768 * 128_000 * 12 / GIB) or found["logits_gib"] > 100


def test_the_words_say_every_figure() -> None:
    text = "\n".join(tell(make(replace(SLM, usd_per_hour=2.0, budget_usd=10.0), find("l4"))))
    for word in ("parameters", "per token", "tokens", "work", "time", "money", "memory", "disk", "GO", "of $10.00"):
        assert word in text


def test_the_command_refuses_with_77_and_loads_no_torch(tmp_path: Path) -> None:
    done = lamp("plan", "--preset", "slm", "--on", "a100-80gb", "--what-if", cwd=tmp_path)
    assert done.returncode == 0 and "GO" in done.stdout and "h100-80gb" in done.stdout, done.stderr
    dear = ["plan", "--preset", "slm", "--on", "t4", "--budget.usd", "2", "--budget.usd_per_hour", "0.5"]
    done = lamp(*dear, cwd=tmp_path)
    assert done.returncode == 77 and "NO GO" in done.stdout and "--train.steps" in done.stdout
    done = lamp(*dear, "--json", cwd=tmp_path)
    assert done.returncode == 77 and json.loads(done.stdout)["reasons"]
    assert lamp("plan", "--preset", "slm", "--on", "a100", cwd=tmp_path).returncode == 2
    assert lamp("plan", "--train.epochs", "3", "--on", "l4", cwd=tmp_path).returncode == 78
    assert not (tmp_path / "runs").exists(), "nothing is written"
    code = "import sys, lamplighter.cli.plans; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
