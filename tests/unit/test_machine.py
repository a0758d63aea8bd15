"""What is chosen for a run, and why: dtype, threads, memory, compiling."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from lamplighter.config import Train
from lamplighter.errors import BadConfig
from lamplighter.train import bf16, hardware
from lamplighter.train.hardware import Machine, choose_compile
from lamplighter.watch.launcher import threads_wait

LOW = Machine(torch.device("cpu"), torch.bfloat16, 2, "a CPU", 1e11, ())
PLAIN = replace(LOW, dtype=torch.float32)
HOUR = 3600.0


def chosen(
    section: Train, before: bool | None, expected_s: float, where: Machine, family: str, one: bool, seq_len: int = 512
) -> bool:
    found, why = choose_compile(
        section, where, family, before=before, expected_s=expected_s, one_shape=one, seq_len=seq_len
    )
    assert why
    return found


def test_compiling_is_chosen_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++")
    auto = Train(steps=10)
    assert chosen(auto, None, HOUR, PLAIN, "llama", True)
    assert not chosen(auto, None, 900.0, PLAIN, "llama", True), "a quarter of an hour does not pay for it"
    assert not chosen(auto, None, HOUR, LOW, "llama", True), "in bf16 our attention is faster for short rows"
    assert chosen(auto, None, HOUR, LOW, "llama", True, seq_len=1024)
    assert not chosen(auto, None, HOUR, LOW, "gpt2", True, seq_len=1024)
    assert chosen(auto, None, HOUR, LOW, "qwen3", True), "its small norms, also beside our attention"
    assert not chosen(auto, None, 500.0, LOW, "qwen3", True)
    assert not chosen(auto, None, HOUR, PLAIN, "gpt2", True), "a gpt2 gains nothing on a CPU"
    assert not chosen(auto, None, HOUR, PLAIN, "mine.py:Model", True), "a model of one's own, unasked"
    assert not chosen(auto, None, HOUR, PLAIN, "llama", False), "every length anew"
    assert chosen(auto, None, HOUR, replace(PLAIN, device=torch.device("cuda")), "gpt2", True)


def test_what_is_asked_for_or_was_before_holds() -> None:
    assert chosen(Train(steps=10, compile=True), None, 1.0, PLAIN, "mine.py:Model", False)
    assert not chosen(Train(steps=10, compile=False), True, HOUR, LOW, "llama", True)
    for before in (True, False):
        assert chosen(Train(steps=10), before, HOUR, PLAIN, "llama", True) is before, "to the bit as before"


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(hardware.shutil, "which", lambda _: None)
    found, why = choose_compile(
        Train(steps=10), PLAIN, "llama", before=None, expected_s=HOUR, one_shape=True, seq_len=512
    )
    assert not found and "C++ compiler" in why


def test_settings_of_the_allocator_that_the_user_made_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(hardware, "_mallopt", lambda: lambda what, value: asked.append(what))
    with hardware.kept_memory(torch.device("cpu")):
        assert len(asked) == 2
    asked.clear()
    for name, value in (("MALLOC_TRIM_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with hardware.kept_memory(torch.device("cpu")):
                assert not asked, name


def test_the_dtype_is_chosen_by_a_block_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "cpu_has_it", lambda: True)
    monkeypatch.setattr(bf16, "make_it_work", lambda: True)
    seconds = {torch.float32: 0.010, torch.bfloat16: 0.008}
    monkeypatch.setattr(bf16, "block_seconds", lambda block, dtype: seconds[dtype])
    assert bf16.choose(bf16.SOME_MODEL) == ("bf16", "a block of this model takes 8.0 ms in bf16, 10.0 in fp32")
    seconds[torch.bfloat16] = 0.0095
    assert bf16.choose(bf16.SOME_MODEL)[0] == "fp32", "not worth the accuracy"
    monkeypatch.setattr(bf16, "make_it_work", lambda: False)
    assert bf16.choose(bf16.SOME_MODEL) == ("fp32", "bf16 crashes on this CPU (a trial process died)")


def test_bf16_that_dies_with_amx_is_computed_without_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bf16.ISA_LIMIT, "")
    monkeypatch.delenv(bf16.ISA_LIMIT)
    monkeypatch.setattr(bf16, "_survives_trial", lambda: "AVX512" in os.environ.get(bf16.ISA_LIMIT, ""))
    monkeypatch.setattr(bf16, "make_it_work", bf16.make_it_work.__wrapped__)
    monkeypatch.setattr(hardware, "_peak", lambda *_: (1e11, "made up"))
    where = hardware.detect(Train(dtype="bf16", device="cpu"))
    assert where.facts()["isa_limit"] == "AVX512_CORE_BF16"
    assert any(why.startswith("without AMX: bf16 crashes with it") for why in where.reasons)


def test_bf16_that_dies_in_every_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bf16.ISA_LIMIT, "")
    monkeypatch.delenv(bf16.ISA_LIMIT)
    monkeypatch.setattr(bf16, "_survives_trial", lambda: False)
    monkeypatch.setattr(bf16, "make_it_work", bf16.make_it_work.__wrapped__)
    with pytest.raises(BadConfig, match="this CPU cannot compute in bf16"):
        hardware.detect(Train(dtype="bf16", device="cpu"))
    assert bf16.ISA_LIMIT not in os.environ


def test_what_the_user_said_about_waiting_threads_holds() -> None:
    assert threads_wait({}) == {"GOMP_SPINCOUNT": "3000"}
    assert threads_wait({"OMP_WAIT_POLICY": "ACTIVE"}) == threads_wait({"GOMP_SPINCOUNT": "7"}) == {}
