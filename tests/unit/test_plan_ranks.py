"""The plan for several devices: shares, buffers as ranks really allocate them, traffic, time, money, sharded or not, what would go."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lamplighter.commands import plan as commands_plan
from lamplighter.config import OPTIMIZERS, Budget, resolve
from lamplighter.config.resolve import preset_names
from lamplighter.errors import BadConfig
from lamplighter.gpus import NVLINK3, PCIE4, Device, Rates, find, of_card
from lamplighter.leaves import leaf_size, most_sums, nodes, owned_nodes
from lamplighter.model.shape import Shape, block_parameters, count_parameters
from lamplighter.plan import devices
from lamplighter.plan.estimate import check, completed, make, placed
from lamplighter.plan.job import Job, Known, Measured, job_on, on_devices
from lamplighter.plan.memory import GIB
from lamplighter.plan.ranks import idle, idle_words, kept_sums, reduction, reduction_sets, share, without_idle
from lamplighter.plan.render import PlanRequest, as_json, page, tell
from lamplighter.plan.speed import compute_seconds
from lamplighter.train import ranks
from lamplighter.train.gradient_tree import GradientTree
from lamplighter.train.hardware import Machine

SMALL = Job(Shape("gpt2", 30_000, 512, 12, 768, 12), 512, 64, 8, 1000, "bf16", tree=8)
BILLION = Job(Shape("llama", 32_000, 2048, 24, 2048, 16), 2048, 64, 2, 1000, "bf16", tree=8)


# ---------------------------------------------------------------- who computes what


def test_the_busiest_rank_sets_the_pace() -> None:
    assert share(SMALL, 8).rows == 8 and share(SMALL, 3).rows == 24 and share(SMALL, 1).rows == 64
    a100 = find("a100-80gb:8")
    alone = compute_seconds(SMALL, find("a100-80gb"))
    assert compute_seconds(SMALL, a100) == pytest.approx(alone / 8)
    assert compute_seconds(SMALL, replace(a100, count=3)) == pytest.approx(alone * 3 / 8), "3 + 3 + 2 of eight nodes"


def test_idle_ranks_are_said_with_the_setting() -> None:
    job = replace(SMALL, micro_batch=16)
    assert idle(job, 8) == 4 and without_idle(job, 8) == "--train.micro_batch 8"
    assert (
        idle(replace(job, micro_batch=1), 16) == 8
        and without_idle(replace(job, micro_batch=1), 16) == "--train.tree 16"
    )
    assert without_idle(replace(job, batch_size=4, micro_batch=1), 8) == "--train.batch_size 8 --train.micro_batch 1"
    said = [found.text for found in check(make(job, find("a100-80gb:8"))) if found.name == "ranks"]
    assert said == ["4 of 8 stay idle: a step has 4 micro-batches; for a new run --train.micro_batch 8"]
    for setting, value in (pair.split() for pair in without_idle(job, 8).split("--train.")[1:]):
        job = replace(job, **{setting: int(value)})
    assert idle(job, 8) == 0, "the setting does it"


@pytest.mark.parametrize("preset", preset_names())
def test_more_ranks_than_a_preset_has_parts_to_share_out(preset: str) -> None:
    """With its own batch, and micro-batches as it has them or as they are derived at a run's first start."""
    run = resolve(preset).run
    a100 = find("a100-80gb")
    for count in (2, 3, 4, 8, 16):
        job = job_on(run, replace(a100, count=count), Known())
        working = [rank for rank in range(count) if owned_nodes(job.nodes, count, rank)]
        assert working == list(range(min(count, job.nodes))), "the last ones are those that idle"
        every = [node for rank in range(count) for node in owned_nodes(job.nodes, count, rank)]
        assert every == list(range(job.nodes)), "nothing is left out or computed twice"
        said, setting = idle_words(job, count), without_idle(job, count)
        if len(working) == count:
            assert not said
            continue
        which = f"ranks {len(working)} to {count - 1} stay" if count - len(working) > 1 else f"rank {count - 1} stays"
        assert said.startswith(f"{which} idle, as a step has {job.accumulation} micro-batches") and setting in said
        for name, value in (pair.split() for pair in setting.split("--train.")[1:]):
            job = replace(job, **{name: int(value)})
        assert idle(job, count) == 0, f"{setting} does it"


def test_a_leaf_follows_the_number_of_devices_unless_it_is_given() -> None:
    run = resolve("slm").run
    run = replace(run, train=replace(run.train, batch_size=64, micro_batch=None))
    device = find("a100-80gb:8")
    job = job_on(run, device, Known())
    assert job.micro_batch == leaf_size(64, 8) == 8 and not job.leaf_given
    assert on_devices(job, device, replace(device, count=2)).micro_batch == 32
    assert on_devices(replace(job, leaf_given=True), device, replace(device, count=2)).micro_batch == 8


# ---------------------------------------------------------------- memory


def real_sets(count: int, world: int, rank: int) -> float:
    """Sets of gradients that the tree and the reduction of one rank allocate at most, counted by torch's profiler."""
    parameters = [torch.nn.Parameter(torch.zeros(400_000)) for _ in range(3)]
    one_set = sum(4 * parameter.numel() for parameter in parameters)
    with torch.profiler.profile(profile_memory=True) as profiler:
        tree = GradientTree(parameters, count)
        for place in owned_nodes(count, world, rank):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            tree.add(place, torch.ones(()))
        ranks.reduce(ranks.World(rank, world), tree, [0.0])
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most / one_set


@pytest.mark.parametrize(("count", "world"), [(2, 2), (8, 2), (8, 3), (8, 4), (8, 8), (4, 8), (1, 2), (1, 4)])
def test_the_buffers_of_the_reduction_are_those_that_ranks_allocate(count: int, world: int) -> None:
    """The real reduce() of every rank, over a group that only pretends to send."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        real = max(real_sets(count, world, rank) for rank in range(min(count, world)))
    finally:
        dist.destroy_process_group()
    job = replace(SMALL, batch_size=count, micro_batch=1)
    planned = max(reduction_sets(job, world), kept_sums(job, world) + 1)
    assert planned == pytest.approx(real, rel=0.1), "as allocated"


def test_sums_wait_in_the_tree_of_a_rank() -> None:
    assert [most_sums(8, range(8)), most_sums(8, range(4)), most_sums(8, range(1)), most_sums(1, range(1))] == [
        3,
        2,
        0,
        0,
    ]
    assert [kept_sums(SMALL, world) for world in (1, 2, 4, 8)] == [3, 2, 1, 0]
    assert all(most_sums(count, range(count)) == count.bit_length() - 1 for count in range(1, 33)), "one for each level"
    assert nodes(5, 8) == [range(n, n + 1) for n in range(5)]


def test_replicated_where_it_fits_else_sharded_else_no() -> None:
    at = find("a100-80gb:8")
    assert not placed(BILLION, at).sharded, "replicated fits"
    tight = replace(at, memory_gib=30.0)
    made = make(BILLION, tight)
    assert made.go and made.job.sharded, "sharded alone fits"
    assert made.memory.weights == BILLION.weight_bytes // 8 and made.memory.optimizer == 8 * BILLION.params // 8
    block = block_parameters(BILLION.shape)
    ends = BILLION.params - 24 * block
    assert ends == 32_000 * 2048 + 2048 and count_parameters(BILLION.shape) == BILLION.params
    assert made.memory.gathered == 4 * (ends + 2 * block) + 2 * 4 * max(ends, block)
    assert not make(replace(BILLION, shard="none"), tight).go, "as it is asked for"
    assert make(replace(BILLION, shard="full"), at).job.sharded
    assert not make(replace(BILLION, shard="full"), find("a100-80gb")).job.sharded, "one device has nothing to share"
    assert not make(BILLION, replace(at, memory_gib=4.0)).go
    assert "--train.shard full" in [
        change.settings for change in completed(make(replace(BILLION, shard="none"), tight)).changes
    ]


def test_a_save_is_staged_once_and_every_rank_has_a_python() -> None:
    one, eight = (as_json(make(SMALL, find(name)))["host_gib"] for name in ("a100-80gb", "a100-80gb:8"))
    assert eight - one == pytest.approx(7 * 1.2)


# ---------------------------------------------------------------- traffic, time, money


def test_bytes_on_the_link_are_those_of_the_collectives() -> None:
    at, gradients = find("a100-80gb:8"), 4 * SMALL.params
    assert reduction(SMALL, find("a100-80gb")).bytes == 0
    assert reduction(SMALL, at).bytes == pytest.approx(2 * gradients * 7 / 8), "a ring's bytes"
    assert reduction(SMALL, replace(at, count=2)).bytes == gradients, "two ranks with one sum each: an all-reduce"
    assert reduction(SMALL, replace(at, count=3)).bytes == pytest.approx(gradients * (2 * 2 / 3 + 2 / 3)), (
        "two sums each"
    )
    sharded = reduction(replace(SMALL, sharded=True), at)
    assert sharded.bytes == pytest.approx(gradients * (3 * 7 / 8 + 1 / 8)), (
        "gathered twice, reduced and scattered; and for the norm"
    )
    assert reduction(SMALL, at).seconds == pytest.approx(2 * gradients * 7 / 8 / (300e9 * 0.7))


def test_ranks_share_out_the_matrices_of_muon_and_gather_their_updates() -> None:
    kind, at = OPTIMIZERS["muon"], find("a100-80gb:8")
    muon = replace(SMALL, optimizer=kind)
    assert muon.optimizer_flops > 0 and replace(muon, optimizer_ranks=8).optimizer_flops == muon.optimizer_flops / 8
    assert compute_seconds(muon, at) == pytest.approx(compute_seconds(muon, find("a100-80gb")) / 8)
    more = reduction(muon, at).bytes - reduction(SMALL, at).bytes
    assert (
        more == pytest.approx(2 * muon.hidden * 7 / 8) and "updates of matrices gathered" in reduction(muon, at).words
    )
    assert reduction(muon, find("a100-80gb")).bytes == 0


def test_nothing_is_overlapped_and_the_peak_is_that_of_all() -> None:
    at = find("l40s:8")
    made = make(SMALL, at)
    assert made.step_s == pytest.approx(compute_seconds(SMALL, at) + reduction(SMALL, at).seconds)
    assert made.tokens_per_s == pytest.approx(64 * 512 / made.step_s)
    assert made.mfu == pytest.approx(made.flops / 1000 / made.step_s / (8 * 362e12)) and made.mfu < 0.4


def test_devices_elsewhere_cost_one_price_each() -> None:
    run = resolve("slm").run
    run = replace(run, budget=Budget(usd=1000.0, usd_per_hour=2.0))
    one, eight = (make(job_on(run, find(name), Known()), find(name)) for name in ("a100-80gb", "a100-80gb:8"))
    assert one.usd == pytest.approx(one.hours * 2) and eight.usd == pytest.approx(eight.hours * 16)
    assert eight.job.limit_hours == pytest.approx(1000 / 16), "the budget is spent eight times as fast"
    assert "$16/h (8 x $2; for lamp train on that machine --budget.usd_per_hour 16)" in "\n".join(tell(eight))
    here = replace(find("a100-80gb:8"), host_gib=500.0)
    assert make(job_on(run, here, Known()), here).job.budget.usd_per_hour == 2.0, "a machine that is here has one price"


def test_the_fewest_devices_that_would_do_are_offered() -> None:
    job = replace(BILLION, micro_batch=64, leaf_given=False, budget=Budget(hours=10.0))
    made = completed(make(job, find("a100-80gb")))
    assert not made.go
    offered = [change for change in made.changes if change.settings.startswith("--on ")]
    assert [change.settings for change in offered] == ["--on a100-80gb:8"] and "more devices" in offered[0].what
    at, one = find("l4:8"), find("l4")
    priced = replace(SMALL, leaf_given=False, budget=Budget(usd_per_hour=16.0))
    most, least = make(priced, at).usd, make(on_devices(priced, at, one), one).usd
    assert most is not None and least is not None and most > least, "a slow link costs money"
    dear = replace(priced, budget=Budget(usd=(most + least) / 2, usd_per_hour=16.0))
    assert "--on l4:1" in [change.settings for change in completed(make(dear, at)).changes]
    assert not any(
        change.settings.startswith("--on")
        for change in completed(make(job, replace(find("a100-80gb"), host_gib=90.0))).changes
    )


def test_measured_steps_are_shared_out_over_gpus() -> None:
    found = Measured(step_s=8.0, peak_gib=3.0, micro_batch=8, steps=5, dtype="bf16")
    at = replace(find("a100-80gb:8"), host_gib=500.0)
    assert make(SMALL, at, measured=found).step_s == pytest.approx(1.0 + reduction(SMALL, at).seconds)


# ---------------------------------------------------------------- the devices and the page


def test_a_card_without_nvlink_has_the_link_of_its_slot() -> None:
    sxm, slot = of_card("NVIDIA A100-SXM4-80GB"), of_card("NVIDIA A100 80GB PCIe")
    assert sxm is not None and slot is not None and (sxm.link, slot.link) == (NVLINK3, PCIE4)


def test_a_config_with_ranks_is_planned_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    run = resolve("slm").run
    four = replace(run.train, ranks=4)
    assert devices.choose("l4", None, four).count == 4 and devices.choose("l4:8", None, four).count == 8
    cpu = Device("cpu", 20.0, None, 100e9, mfu=0.5, rates=Rates(100e9, 6e9), host_gib=20.0, total_gib=24.0)
    monkeypatch.setattr(devices, "_this_cpu", lambda threads, ranks: cpu)
    monkeypatch.setattr(devices.nvml, "cards_here", lambda: [])
    here = devices.choose(None, None, four)
    assert (here.count, here.memory_gib, here.total_gib) == (4, 5.0, 6.0), "ranks share one processor's memory"
    both = devices.choose(None, None, four, nodes=2)
    assert (both.count, both.memory_gib, str(both)) == (8, 5.0, "8 x cpu on 2 machines"), "each node has its own memory"
    monkeypatch.setattr(devices.nvml, "cards_here", lambda: [("NVIDIA L4", 22.0)] * 2)
    assert devices.choose(None, None, run.train).count == 2, "auto: every GPU"
    with pytest.raises(BadConfig, match="4 ranks, and this machine has 2 GPUs"):
        devices.choose(None, None, four)


def test_nodes_are_planned_at_the_price_of_each_with_their_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.nvml, "cards_here", lambda: [("NVIDIA L4", 22.0)] * 2)
    run = replace(resolve("slm").run, budget=Budget(usd_per_hour=2.0))
    two = replace(run, launch=replace(run.launch, nodes=2))
    plans = [json.loads(page(one, PlanRequest(as_json=True, runs_dir=str(tmp_path)))[0]) for one in (run, two)]
    assert [plan["devices"] for plan in plans] == [2, 4]
    assert plans[1]["usd"] == pytest.approx(2 * 2.0 * plans[1]["hours"])
    assert plans[1]["memory_by_shard_gib"]["full"] < plans[0]["memory_by_shard_gib"]["full"]
    assert "2 machines: the network between them is not counted" in "".join(plans[1]["warnings"])
    assert devices.choose("l4:8", None, run.train, nodes=2).count == 8, "--on says how many there are in all"


def test_the_page_says_it_for_each_device(tmp_path: Path) -> None:
    run = replace(resolve("slm").run, budget=Budget(usd_per_hour=2.0))
    request = PlanRequest(on="l40s:8", what_if=True, runs_dir=str(tmp_path))
    text, code = page(run, request)
    assert code == 0 and text.startswith("plan on 8 x l40s")
    for words in ("tokens/s", "no overlap is counted", "PCIe 4.0 x16, 32 GB/s each way", "replicated is planned (train.shard auto: it fits)",
                  "; sharded ", "8 x h100-80gb", "2 x l40s"):  # fmt: skip
        assert words in text, words
    found = json.loads(page(run, replace(request, as_json=True))[0])
    assert found["devices"] == 8 and found["shard"] == "none" and set(found["memory_by_shard_gib"]) == {"none", "full"}
    assert found["link_bytes_per_step"] > 0 and found["reduction_s"] > 0 and len(found["what_if"]) > 12
    assert (
        found["memory_by_shard_gib"]["none"]
        == found["memory_gib"]
        == make(job_on(run, find("l40s:8"), Known()), find("l40s:8")).memory.peak / GIB
    )
    many = check(make(SMALL, find("l40s:16")))
    assert any(found.name == "link" and "the network between machines is not counted" in found.text for found in many)


def test_the_peak_of_a_machine_with_ranks_is_that_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine says the peak of one rank, and so do the rates of the plan's device."""
    monkeypatch.setattr(devices, "stream_rate", lambda _budget_s: 5e9)
    machine = Machine(torch.device("cpu"), torch.float32, 1, "x CPU", peak_flops=20e9, reasons=())
    device = commands_plan._device(machine, ranks=4)
    assert device.count == 4 and device.peak("fp32") == 80e9
    assert device.rates is not None and device.rates.gemm_flops == 20e9
