"""Every benchmark can be asked what it does, and the small ones run, without peers: what they print is a table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import measured  # noqa: E402
import peers  # noqa: E402
import time_to_loss  # noqa: E402


def test_rounds_take_everybody_in_turn_and_the_first_is_not_counted() -> None:
    order: list[str] = []

    def turn(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = measured.in_turn({name: (lambda name=name: turn(name)) for name in "ab"}, rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"]  # nobody is always first
    assert found == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_a_table_has_medians_spreads_and_ratios_in_the_sense_of_better(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "_tables", [])
    rows = [
        measured.Row("ours", [1.0, 2.0, 9.0], more_is_better=False),
        measured.Row("peer", [4.0], more_is_better=False),
    ]
    measured.show("saving", "seconds", rows, against="peer")
    measured.keep(tmp_path / "found.json")
    assert "(1 - 9)" in capsys.readouterr().out
    (table,) = json.loads((tmp_path / "found.json").read_text())["tables"]
    assert [row["ratio"] for row in table["rows"]] == [2.0, 1.0]
    assert table["against"] == "peer"


def test_the_bounds_of_a_ratio_are_those_of_its_rounds() -> None:
    def bounds(count: int) -> tuple[float, float] | None:
        mine = measured.Row("ours", [float(number) for number in range(1, count + 1)])
        return measured.interval(mine, measured.Row("peer", [1.0] * count))

    assert bounds(1) is None
    assert bounds(5) == (1.0, 5.0)
    assert bounds(8) == (1.0, 8.0), "93 of 100 cases would be within 2 to 7"
    assert bounds(9) == (2.0, 8.0), "96 of 100"
    slower = measured.Row("ours", [2.0, 4.0], more_is_better=False)
    assert measured.interval(slower, measured.Row("peer", [1.0, 1.0], more_is_better=False)) == (0.25, 0.5)


def test_a_worker_answers_and_one_that_dies_says_why(tmp_path: Path) -> None:
    program = "def answer(ask):\n    print('chatter')\n    return 10 // ask\n"
    with peers.Worker(sys.executable, program, tmp_path / "log") as worker:
        assert worker.ask(2) == 5
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            worker.ask(0)


def test_torch_is_never_installed_without_a_pin() -> None:
    assert peers._torch_pin().startswith("torch==")
    assert all("torch" in packages for packages, _ in peers.GROUPS.values())


def test_a_loss_is_reached_where_the_mean_of_the_last_steps_is_that_low() -> None:
    """Steps of 20,000 tokens: a mean over two; five turns of two steps, two seconds each."""
    turns = [[2 * turn, 2.0 * turn] for turn in range(1, 6)]
    line = {
        "batch": 100,
        "length": 200,
        "losses": [9.0, 8.0, 7.0, 5.0, 6.0, 5.0, 4.0, 4.0, 3.0, 3.0],
        "turns": turns,
        "seconds": 10.0,
    }
    assert time_to_loss.reached(line, 6.0) == (80_000, 4.0)
    assert time_to_loss.reached(line, 5.5) == (100_000, 5.0)
    assert time_to_loss.reached(line, time_to_loss.last_loss(line)) == (200_000, 10.0)
    assert time_to_loss.reached(line, 2.9) is None


def test_recipes_that_differ_by_their_rate_are_equally_fast() -> None:
    keys = [time_to_loss.pace_key(words) for words in ("trainer lr=1e-3", "trainer batch=8 lr=2e-3", "trainer batch=4")]
    assert keys[0] == keys[1] != keys[2]
    with pytest.raises(SystemExit):
        time_to_loss.parsed("torchtune lr=1")


@pytest.mark.parametrize("name", ["starting", "batches"])
def test_a_quick_round_without_peers(name: str, tmp_path: Path) -> None:
    words = [str(BENCHMARKS / f"{name}.py"), "--quick", "--no-peers", "--json", str(tmp_path / "found.json")]
    subprocess.run([sys.executable, *words], check=True, capture_output=True, timeout=240)
    tables = json.loads((tmp_path / "found.json").read_text())["tables"]
    assert all(row["median"] > 0 for table in tables for row in table["rows"])
    assert any(row["name"].startswith("lamp") for table in tables for row in table["rows"])


@pytest.mark.parametrize("name", ["generation", "tokenising", "growth"])
def test_it_says_what_it_does(name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--help"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert "--rounds" in shown
    assert f"benchmarks/{name}.py" in shown
