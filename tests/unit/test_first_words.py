"""What a command says before its console speaks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamplighter import first_words
from lamplighter.commands import human


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    monkeypatch.setattr(first_words, "_EVERY_S", 0.05)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    yield reading, writing
    first_words.end()
    os.close(reading)
    os.close(writing)


def _heard(reading: int) -> list[str]:
    try:
        return os.read(reading, 65536).decode().splitlines()
    except BlockingIOError:
        return []


def _compute(until: float) -> None:
    while time.monotonic() < until:
        pass


def test_a_line_at_once_and_more_of_them_while_the_main_thread_computes(pipe: tuple[int, int]) -> None:
    first_words.begin(pipe[1], "plan")
    assert [line[10:] for line in _heard(pipe[0])] == ["lamp plan: reading the request"]
    first_words.doing("measuring this machine")
    lines: list[str] = []
    deadline = time.monotonic() + 20
    while len(lines) < 3 and time.monotonic() < deadline:
        _compute(time.monotonic() + 0.1)
        lines += _heard(pipe[0])
    assert len(lines) >= 3
    assert all("lamp plan: measuring this machine, for " in line for line in lines)


def test_nothing_is_said_after_the_end(pipe: tuple[int, int]) -> None:
    first_words.begin(pipe[1], "runs")
    first_words.end()
    _heard(pipe[0])
    time.sleep(0.3)
    assert _heard(pipe[0]) == []


def test_a_question_to_a_person_is_not_spoken_into(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Slow:
        def readline(self) -> str:
            _heard(pipe[0])
            time.sleep(0.3)
            return "q\n"

    monkeypatch.setattr(sys, "stdin", Slow())
    first_words.begin(pipe[1], "eval")
    human._choose_by_terminal(
        human.Comparison(tmp_path, ("a", "b"), [human.BlindPair(0, "p", ("x", "y"), (0, 1))], {}, ({}, {}))
    )
    assert _heard(pipe[0]) == []


def test_words_of_somebody_else_put_ours_off(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_words, "_EVERY_S", 30.0)
    first_words.begin(pipe[1], "train")
    before = first_words.last_s()
    first_words.spoke()
    assert before < first_words.last_s() <= time.monotonic()


def test_a_reader_that_is_gone_does_not_end_the_command() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    first_words.begin(writing, "runs")
    first_words.end()
    os.close(writing)
    assert first_words.last_s() <= time.monotonic()
