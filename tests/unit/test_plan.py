"""The plan on paper: true parameters, refusals with their arithmetic, changes, sanity, curves, devices, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lamplighter.config import Budget, Lora, drift, resolve
from lamplighter.errors import UsageError
from lamplighter.gpus import TABLE, Device, Rates, find, of_card
from lamplighter.model.shape import Shape
from lamplighter.plan import estimate
from lamplighter.plan.estimate import Plan, completed, largest_micro_batch, lighter, make, sure_reasons
from lamplighter.plan.job import Job, Measured, Text, job_of, shape_of
from lamplighter.plan.memory import GIB, memory
from lamplighter.plan.render import as_json, curve, draw, short, table, tell
from lamplighter.plan.speed import recompute_flops, step_seconds, total_flops
from lamplighter.procs.nvml import visible
from lamplighter.rundir import RunDir
from lamplighter.watch.trainer import lighter_by_plan

SMALL = Shape("gpt2", 30_000, 512, 12, 768, 12)
SLM = Job(SMALL, 512, 36, 18, 60_000, "bf16")
# System D: 1.4 thousand million parameters, long windows, a large vocabulary, 18,968 steps, five hours for $7.85.
LONG = Job(
    Shape("llama", 128_000, 8192, 24, 2048, 16), 8192, 64, 16, 18_968, "bf16", whole_logits=True,
    budget=Budget(usd=7.85, usd_per_hour=1.57),
)  # fmt: skip
CPU = Device("cpu", 20.0, None, 100e9, mfu=0.5, rates=Rates(100e9, 6e9))


def test_a_run_that_fits_goes() -> None:
    plan = make(SLM, find("a100-80gb"))
    assert plan.go and plan.params == 108_489_216
    assert plan.flops == pytest.approx(
        60_000 * 36 * 512 * (6 * (12 * 12 * 768**2 + 30_000 * 768) + 12 * 12 * 768 * 512)
    )
    assert plan.hours == pytest.approx(plan.flops / (312e12 * 0.4) / 3600)


@pytest.mark.parametrize("device", [CPU, find("a100-80gb"), replace(find("a100-80gb"), count=4)])
def test_the_reference_pass_of_pairs_is_counted_once(device: Device) -> None:
    text = Text(900_000, "counted", True, val_tokens=100_000, padding=0.2)
    plain = replace(SLM, steps=50, dtype="fp32", text=text, lora=Lora(r=8))
    pairs = replace(plain, pairs=True)
    assert pairs.reference_positions == 1_250_000 and plain.reference_positions == 0
    sft, dpo, longer = (make(job, device) for job in (plain, pairs, replace(pairs, steps=500)))
    assert sft.reference_s == 0 and dpo.reference_s == longer.reference_s > 0 and sft.step_s == dpo.step_s
    assert dpo.hours == pytest.approx(sft.hours + dpo.reference_s / 3600) and dpo.mfu == sft.mfu
    assert any("reference" in line and "1.25 M positions, once" in line for line in tell(dpo))
    assert not any("reference" in line for line in tell(sft)) and as_json(dpo)["reference_s"] == dpo.reference_s
    one_rank = replace(device, count=1)
    full = replace(pairs, lora=Lora(), optimizer=replace(pairs.optimizer, moved_bytes=0))
    epoch_s = step_seconds(full, one_rank) / pairs.step_tokens * pairs.reference_positions
    assert dpo.reference_s == pytest.approx(epoch_s / 3, rel=0.01), "a forward pass is a third of training in full"
    tried = make(pairs, device, measured=Measured(10 * sft.step_s, 1.0, 18, 3, "fp32"))
    assert tried.reference_s > dpo.reference_s, "as the measured steps say"


def test_what_cannot_be_is_refused_with_the_arithmetic() -> None:
    """Situation 11: system D's plan."""
    plan = completed(make(LONG, find("l40s")))
    kinds = [reason.split(":")[0] for reason in plan.reasons]
    assert kinds == ["memory", "money", "time"]
    assert "times the peak" in plan.reasons[2] and "$7.85" in plan.reasons[1]
    times = float(plan.reasons[2].split(" times the peak")[0].split()[-1])
    assert times > 14, "it needed more than fourteen times the peak"
    assert plan.memory.logits == 16 * 8192 * 128_000 * 12 and plan.memory.logits / GIB > plan.device.memory_gib
    assert [reason.split(":")[0] for reason in sure_reasons(plan)] == ["memory", "money", "time"], "sure in every point"
    assert plan.changes, "it says what would go"
    for change in plan.changes:
        assert change.usd is not None and change.usd <= 7.85 and change.memory_gib < 45
        assert change.settings.startswith("--")


def test_the_changes_make_it_go_when_they_are_taken() -> None:
    plan = completed(make(replace(SLM, budget=Budget(usd=3.0, usd_per_hour=2.0)), find("l4")))
    assert not plan.go and plan.changes
    steps = int(plan.changes[0].settings.split()[1])
    assert make(replace(plan.job, steps=steps), plan.device).go


def test_changes_for_memory_leave_batch_and_losses_alone() -> None:
    tight = replace(SLM, micro_batch=36)
    card = replace(find("a10"), memory_gib=8.0)
    plan = completed(make(tight, card))
    assert not plan.go and plan.reasons[0].startswith("memory")
    first, second = plan.changes[:2]
    size = int(first.settings.split()[1])
    assert first.settings.startswith("--train.micro_batch") and size < 36
    pieces = -(-36 // size)
    largest = largest_micro_batch(tight, card)
    assert largest is not None and size <= largest and -(-36 // largest) == pieces, "no more pieces than needed"
    assert memory(replace(tight, micro_batch=largest + 1), card).peak_gib > 8.0 * 0.92, "the largest that fits"
    assert "--train.recompute true" in second.settings and "more time" in second.what
    assert second.hours > first.hours and second.memory_gib < 8


def test_recompute_costs_about_a_third_more_work() -> None:
    again = replace(SLM, recompute=True)
    assert total_flops(again) == total_flops(SLM), "what is learned from stays the same"
    assert 0.2 < recompute_flops(again) / total_flops(again) < 1 / 3
    device = find("a100-80gb")
    ratio = step_seconds(again, device) / step_seconds(SLM, device)
    assert ratio == pytest.approx(1 + recompute_flops(again) / total_flops(SLM))
    assert "compute the layers again" in "\n".join(tell(make(again, device)))


def test_a_generous_bound_is_kept_for_refusals() -> None:
    """Between hope and expectation there is only a warning: the budget stops and saves."""
    device = find("a100-80gb")
    expected = make(SLM, device).hours
    near = replace(SLM, budget=Budget(hours=expected * 0.8))
    far = replace(SLM, budget=Budget(hours=expected * 0.5))
    assert not make(near, device).go and not sure_reasons(make(near, device))
    assert [reason.split(":")[0] for reason in sure_reasons(make(far, device))] == ["time"]


def test_a_small_budget_is_said_in_figures_that_say_something() -> None:
    """It was "$0.00 (0.0 h), the budget is $0.00; the budget allows 0.00 h", with steps for money that was spent."""
    device = find("a100-80gb")
    small = replace(SLM, steps=2000, budget=Budget(usd=0.012, usd_per_hour=1.0))
    fresh, begun, late = (completed(make(replace(small, spent_s=spent), device)) for spent in (0.0, 20.0, 61.0))
    assert all("0.00 h" not in reason and "$0.00 " not in reason for plan in (fresh, begun) for reason in plan.reasons)
    assert "the budget is $0.012" in fresh.reasons[0] and "$0.0056 are spent" in begun.reasons[0]

    def steps(plan: Plan) -> list[int]:
        return [
            int(change.settings.split()[1]) for change in plan.changes if change.settings.startswith("--train.steps")
        ]

    assert steps(begun)[0] < steps(fresh)[0], "what is spent cannot be spent again"
    again = replace(begun.job, steps=steps(begun)[0])
    assert make(again, device).go and make(again, device).hours * 3600 + 20 <= 0.012 * 3600
    assert not steps(late) and "the budget is spent: 1 min" in late.reasons[1]


def test_measured_steps_are_believed_over_paper() -> None:
    measured = Measured(2.0, 3.3, 18, 5, "bf16")
    plan = make(SLM, replace(find("l4"), memory_gib=5.0), measured=measured)
    assert plan.go and plan.hours == pytest.approx(2.0 * 60_000 / 3600), "it was tried, and it fits"
    assert "measured over 5 real steps" in "\n".join(tell(plan))
    dead = Measured(0.0, 0.0, 18, 0, "bf16", fits=False, why="killed")
    plan = make(SLM, find("l4"), measured=dead)
    assert not plan.go and "does not fit" in plan.reasons[0] and plan.hours > 0


def test_the_time_of_a_processor_is_summed_up_from_its_rates() -> None:
    job = Job(Shape("gpt2", 8000, 256, 4, 256, 4), 256, 8, 8, 10)
    base = step_seconds(job, CPU)
    faster = step_seconds(job, replace(CPU, rates=Rates(200e9, 12e9)))
    assert 0.4 * base < faster < 0.6 * base
    assert step_seconds(replace(job, recompute=True), CPU) > 1.1 * base
    assert 1.8 * base < step_seconds(replace(job, batch_size=16), CPU) < 2.1 * base


# ---------------------------------------------------------------- sanity


def warned(job: Job, device: Device | None = None) -> str:
    return "\n".join(estimate.warnings(make(job, device or find("l4"))))


def from_words(*words: str, text: Text | None = None) -> Job:
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    run = resolve("slm", None, {name: [value] for name, value in pairs.items()}).run
    assert run.train.steps is not None
    return job_of(run, shape_of(run), run.train.steps, "bf16", text, tokenizer_vocab=run.tokenizer.vocab_size)


def test_warm_up_has_a_share_and_a_unit() -> None:
    """Situation 13."""
    said = warned(from_words("train.warmup_steps", "40000"))
    assert "67% of the run" in said and "optimizer steps" in said and "not micro-batches: 2" in said
    assert "never be reached" in warned(from_words("train.warmup_steps", "70000"))
    assert "warm-up" not in warned(from_words())


def test_forty_epochs_are_not_three() -> None:
    text = Text(30_000_000, "counted", True, 500_000)
    said = warned(from_words("train.steps", "60000", text=text))
    assert "epochs: 36.9 over 30,000,000" in said and "--train.epochs 3 is 4,883 steps" in said
    assert "epochs" not in warned(from_words("train.steps", "4000", text=text))


def test_a_crash_has_a_price_and_padding_is_seen() -> None:
    dear = from_words("save.every_s", "0", "save.every_steps", "30000", "budget.usd_per_hour", "2")
    said = warned(dear)
    assert "saves: every 30,000 steps: a crash can cost $4.47" in said
    assert "padding: 97% of the positions" in warned(from_words(text=Text(10**9, "counted", True, 10**6, padding=0.97)))
    assert "nothing is held back" in warned(from_words(text=Text(10**9, "counted", True, 0)))
    assert "coarse measure" in warned(from_words(text=Text(10**9, "counted", True, 900)))


def test_the_vocabulary_must_be_the_tokenizers() -> None:
    job = from_words()
    few = make(replace(job, tokenizer_vocab=50_257), find("l4"))
    assert not few.go and "vocabulary: the tokenizer has 50,257 tokens, the model knows 30,000" in few.reasons[0]
    assert "never used" in warned(replace(job, tokenizer_vocab=300))
    assert "longer than the 512 positions" in make(replace(job, seq_len=1024), find("l4")).reasons[0]


def test_tokens_per_parameter_come_with_their_source() -> None:
    text = "\n".join(tell(make(from_words(), find("l4"))))
    assert "10.2 tokens per parameter" in text and "arXiv:2203.15556" in text
    assert "balance" in warned(from_words("train.steps", "500"))


# ---------------------------------------------------------------- pictures and words


def test_a_curve_begins_and_ends_where_it_should() -> None:
    rows = curve([0.0, 1.0] * 1 + [0.5] * 6 + [0.0, 0.0], 1.0, high=2)
    assert len(rows) == 2 and len(rows[0]) == 5
    dots = [[ord(cell) - 0x2800 for cell in row] for row in rows]
    assert dots[0][0] & 0x08, "the second value is at the top"
    assert dots[1][0] & 0x40 and dots[1][4] & 0x80, "the first and the last are at the bottom"
    assert not dots[0][4]


def test_the_rate_and_the_spending_are_drawn() -> None:
    job = from_words("budget.usd_per_hour", "1.8", "budget.usd", "4")
    lines = draw(make(job, find("l4")))
    assert lines[0].startswith("  learning rate  3.0e-04") and any(line.startswith("  spending") for line in lines)
    assert "the budget of $4.00 ends at step 29," in lines[-1] and "50% of the run" in lines[-1]
    assert any("⠉" in line or "⠒" in line for line in lines)


def test_the_words_say_every_figure() -> None:
    plan = make(replace(from_words(), budget=Budget(usd=10.0, usd_per_hour=2.0)), find("l4"))
    text = "\n".join(tell(plan))
    for word in ("parameters", "per token", "tokens", "work", "time", "money", "memory", "logits", "host RAM", "disk",
                 "warm-up", "schedule", "saves", "vocabulary", "balance", "GO", "of $10.00", "copy that a save stages"):  # fmt: skip
        assert word in text, word
    assert "copy for a save" in "\n".join(tell(make(SLM, CPU))), "on a processor it lies in the same memory"
    assert 5 <= len(short(plan)) <= 8
    assert "a crash can cost $" in "\n".join(short(plan))


def test_json_has_what_scripts_need() -> None:
    plan = completed(make(LONG, find("t4")))
    found = json.loads(json.dumps(as_json(plan)))
    wanted = {"go", "params", "tokens", "flops", "hours", "usd", "memory_gib", "logits_gib", "reasons"}
    assert wanted <= set(found) and found["go"] is False and found["warnings"] == estimate.warnings(plan)
    assert found["logits_gib"] == pytest.approx(16 * 8192 * 128_000 * 12 / GIB)
    assert found["memory_parts_gib"]["held"] == found["logits_held_gib"] == found["logits_gib"]


def test_the_table_says_why_not() -> None:
    rows: list[tuple[str, Plan]] = [("this run", make(LONG, find(name))) for name in ("t4", "l40s")]
    assert all("no: memory, money, time" in line for line in table(rows)[1:])


# ---------------------------------------------------------------- devices and places


def test_the_table_of_devices() -> None:
    wanted = {"t4", "l4", "a10", "l40s", "a100-40gb", "a100-80gb", "h100-80gb", "rtx3090", "rtx4090"}
    assert wanted <= set(TABLE)
    assert find("A100-80GB").peak("bf16") == find("a100-80gb:1").peak("bf16") == 312e12
    assert find("t4").dtype == "fp16" and find("v100-16gb").peak("fp16") == 125e12
    for bad in ("a100", "b1000", "t4:0", "t4:x"):
        with pytest.raises(UsageError) as caught:
            find(bad)
        assert caught.value.next


def test_a_step_on_a_gpu_has_a_floor_that_no_small_work_gets_below() -> None:
    """343 steps of a toy in 0.042 s on an L40S is no plan."""
    toy = replace(LONG, shape=replace(LONG.shape, layers=2, width=64, vocab_size=1024), seq_len=64, batch_size=4,
                  micro_batch=4, steps=343, whole_logits=False)  # fmt: skip
    made = make(toy, find("l40s"))
    assert made.hours * 3600 == pytest.approx(343 * (2 * 0.001 + 0.002))
    assert "launching a step takes longer than its work" in "\n".join(tell(made))
    twice = make(replace(toy, micro_batch=2), find("l40s"))
    assert twice.step_s == pytest.approx(2 * 2 * 0.001 + 0.002), "every micro-batch is launched"
    assert make(LONG, find("l40s")).step_s > 1, "large work is not touched by it"


@pytest.mark.parametrize(
    ("card", "name"),
    [("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"),
     ("Tesla T4", "t4"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("NVIDIA A30", "a30"),
     ("NVIDIA L40", None), ("NVIDIA T400", None), ("NVIDIA RTX A1000", None), ("NVIDIA A10G", None), ("NVIDIA H100 NVL", None),
     ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 4090 D", None), ("Tesla V100-PCIE-16GB", None)],
)  # fmt: skip
def test_a_card_is_known_by_its_own_name(card: str, name: str | None) -> None:
    """Situation 26: the peak is that of the device that was found; a namesake with another data sheet is measured."""
    found = of_card(card)
    assert (found.name if found else None) == name


def test_a_card_has_a_peak_for_each_number_format() -> None:
    a100, t4 = find("a100-80gb"), find("t4")
    assert [a100.peak(dtype) / 1e12 for dtype in ("bf16", "fp16", "fp32")] == [312, 312, 156], "fp32 is TF32 there"
    assert [t4.peak(dtype) / 1e12 for dtype in ("fp16", "fp32")] == [65, 8.1] and t4.dtype == "fp16"
    assert CPU.peak("fp16") == CPU.peak("bf16") == 100e9 and CPU.dtype == "fp32"


@pytest.mark.parametrize(
    ("asked", "seen"),
    [(None, [0, 1, 2]), ("", []), ("1", [1]), ("2,0", [2, 0]), ("-1", []), ("0,-1,2", [0]), ("GPU-bb", [1]), ("7,0", []),
     ("GPU-aa11, GPU-cc", [0, 2]), ("nonsense", []), ("0,nonsense,1", [0]), ("MIG-GPU-bb/1/0", []), ("1,1", []), ("GPU-", [])],
)  # fmt: skip
def test_cards_are_seen_by_index_and_by_uuid_in_the_order_given(asked: str | None, seen: list[int]) -> None:
    """As the driver reads CUDA_VISIBLE_DEVICES: it ends at the first word that is no card."""
    assert visible(asked, ["GPU-aa11", "GPU-bb22", "GPU-cc33"]) == seen


def test_a_run_that_did_not_fit_is_told_what_would_by_the_plan(tmp_path: Path) -> None:
    """The words of a run that ran out of memory though the plan let it begin."""
    made = make(replace(LONG, whole_logits=False, micro_batch=8, batch_size=8), find("a100-80gb"))
    options = lighter(made.job, made.device)
    assert [settings for settings, _ in options] == ["--train.micro_batch 4", "--train.recompute true"]
    assert all(gib < made.memory.peak_gib for _, gib in options)
    (tmp_path / "plan.json").write_text(json.dumps(as_json(made)))
    words = lighter_by_plan(RunDir(tmp_path))
    assert f"by the plan this takes {made.memory.peak_gib:.1f} GiB; --train.micro_batch 4 takes" in words
    (tmp_path / "plan.json").write_text('{"lighter": [{"settings": 5}], "memory_gib": "much"}')
    assert lighter_by_plan(RunDir(tmp_path)) == ""


def test_sums_one_after_another_are_offered_where_their_tree_does_not_fit() -> None:
    job = replace(SLM, batch_size=64, micro_batch=4, tree=8)
    room = (memory(job, find("t4")).peak + memory(replace(job, tree=1), find("t4")).peak) / 2 / GIB
    options = [option.settings for option in estimate._for_memory(job, replace(find("t4"), memory_gib=room))]
    assert "--train.tree 1" in options


def test_less_memory_does_not_cost_a_run() -> None:
    """The remedies for a full GPU may be given at resume; what changes the result may not."""
    old = resolve("slm").run
    smaller = replace(old, train=replace(old.train, micro_batch=2, tree=1, recompute=True))
    assert not drift(old, smaller)
    assert drift(old, replace(old, train=replace(old.train, batch_size=72)))
