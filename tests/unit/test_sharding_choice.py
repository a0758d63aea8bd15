"""Whether a run is sharded: chosen by the plan's memory, refused in words, and said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lamplighter import report
from lamplighter.commands import start_up
from lamplighter.config import Model, Run, resolve
from lamplighter.errors import BadConfig
from lamplighter.gpus import find
from lamplighter.model.build import build
from lamplighter.model.shape import Shape
from lamplighter.plan.estimate import Plan, make
from lamplighter.plan.job import Job
from lamplighter.rundir import RunDir
from lamplighter.train import joining, ranks
from lamplighter.train.ranks import World

BILLION = Job(Shape("llama", 32_000, 2048, 24, 2048, 16), 2048, 64, 2, 1000, "bf16", tree=8)
GPT2 = build(Model(layers=1, width=16, heads=2), 50, 8, 0, 1).model


def planned(memory_gib: float, shard: str = "auto") -> Plan:
    return make(replace(BILLION, shard=shard), replace(find("a100-80gb:8"), memory_gib=memory_gib))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ranks have met, and hear what rank 0 has planned."""
    found: list[str] = []
    monkeypatch.setattr(joining, "meet", lambda *_: None)
    monkeypatch.setattr(ranks, "told_by_first", lambda _world, value, _device: value)
    for name in ("note", "warn", "event"):
        monkeypatch.setattr(report, name, lambda text, **_: found.append(text))
    return found


def chosen(run: Run, plan: Plan, model: torch.nn.Module = GPT2) -> bool:
    built: Any = SimpleNamespace(model=model)
    where: Any = SimpleNamespace(device=torch.device("cpu"))
    return start_up._agreed_to_shard(run, RunDir(Path("r")), built, where, World(0, 8), plan)


def test_a_small_memory_shards_and_a_large_one_does_not(said: list[str]) -> None:
    run = resolve("slm").run
    assert not chosen(run, planned(80)) and not said
    assert chosen(run, planned(20))
    assert "sharded: each of 8 ranks holds its rows" in said[0] and "train.shard auto" in said[0]
    assert "whole it would be" in said[0] and f"{planned(20).usable_gib:.2f} may be taken" in said[0]
    assert "nobody stands by (launch.spare)" in said[1]
    assert said[2] == "sharded", "what the parent hears, so that it keeps nobody standing by"


NARROW = ("a base that is narrow", {"r": 2, "base_dtype": "bf16"}, GPT2, "narrow")
OTHER = ("another family", {}, torch.nn.Linear(2, 2), "none of the families that are built here")


@pytest.mark.parametrize(("name", "lora", "model", "words"), [NARROW, OTHER], ids=["narrow", "family"])
def test_what_cannot_be_sharded_is_refused_or_said(
    said: list[str], name: str, lora: dict[str, Any], model: torch.nn.Module, words: str
) -> None:
    run = resolve("slm").run
    base = replace(run.model, init_from="base") if lora else run.model
    run = replace(run, model=base, lora=replace(run.lora, **lora))
    assert not chosen(run, planned(20), model), name
    assert "every rank holds the whole model, which may not fit" in said[0] and words in said[0]
    asked = replace(run, train=replace(run.train, shard="full"))
    with pytest.raises(BadConfig, match="this run cannot be sharded") as error:
        chosen(asked, planned(20, "full"), model)
    assert words in error.value.why


def test_a_base_in_fp32_is_sharded(said: list[str]) -> None:
    run = resolve("slm").run
    base, lora = replace(run.model, init_from="base"), replace(run.lora, r=2, base_dtype="fp32")
    assert chosen(replace(run, model=base, lora=lora), planned(20))
    assert said[-1] == "sharded"


def test_pairs_are_refused(said: list[str]) -> None:
    run = resolve("slm").run
    train = replace(run.train, shard="full", objective="dpo")
    pairs = replace(run, model=replace(run.model, init_from="base"), train=train)
    with pytest.raises(BadConfig, match="this run cannot be sharded") as error:
        chosen(pairs, planned(20, "full"))
    assert "the reference of preference pairs" in error.value.why
