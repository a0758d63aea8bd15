"""What is chosen for a run, and why: whether to compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lamplighter.config import Train
from lamplighter.train import machine
from lamplighter.train.machine import Machine, choose_compile

LOW = Machine(torch.device("cpu"), torch.bfloat16, 2, "a CPU", 1e11, ())
PLAIN = replace(LOW, dtype=torch.float32)
HOUR = 3600.0


def chosen(section: Train, before: bool | None, expected_s: float, where: Machine, own: bool, one: bool) -> bool:
    found, why = choose_compile(section, before, expected_s, where, own, one)
    assert why
    return found


def test_compiling_is_chosen_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++")
    auto = Train(steps=10)
    assert chosen(auto, None, HOUR, LOW, False, True)
    assert not chosen(auto, None, 60.0, LOW, False, True), "a minute does not pay for it"
    assert not chosen(auto, None, HOUR, PLAIN, False, True), "fp32 gains nothing"
    assert not chosen(auto, None, HOUR, LOW, True, True), "a model of one's own, unasked"
    assert not chosen(auto, None, HOUR, LOW, False, False), "every length anew"
    assert chosen(auto, None, HOUR, replace(PLAIN, device=torch.device("cuda")), False, True)


def test_what_is_asked_for_or_was_before_holds() -> None:
    assert chosen(Train(steps=10, compile=True), None, 1.0, PLAIN, True, False)
    assert not chosen(Train(steps=10, compile=False), True, HOUR, LOW, False, True)
    for before in (True, False):
        assert chosen(Train(steps=10), before, HOUR, PLAIN, False, True) is before, "to the bit as before"


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    found, why = choose_compile(Train(steps=10), None, HOUR, LOW, False, True)
    assert not found and "C++ compiler" in why
