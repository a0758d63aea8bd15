"""Cards and ranks on the page: recorded series as columns by the clock, who is unlike the others, when a card was slowed down; damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lamplighter.dash import facts, report_page, system_series
from lamplighter.dash.facts import RunsDir
from lamplighter.dash.machine import cards, machine_panels
from lamplighter.dash.panels import panels_of
from lamplighter.dash.series import RunSeries
from lamplighter.procs.procfs import ProcessLook
from lamplighter.rundir import RunDir, read_lines
from lamplighter.slot import Slot
from lamplighter.watch.process_tree import Process, Snapshot
from lamplighter.watch.rank_series import RankSeries
from tracked import write_cards, write_killed_run


def _series(run: RunDir) -> RunSeries:
    series = RunSeries(run)
    series.update()
    return series


def test_every_card_is_seen_with_what_slowed_it_down(tmp_path: Path) -> None:
    run = write_killed_run(tmp_path / "runs" / "r", steps=120, kills=1)
    write_cards(run, cards=8)
    series = _series(run)
    panels = {one["id"]: one for one in machine_panels(series)}
    assert list(panels) == ["gpu_util", "gpu_mem", "gpu_power", "gpu_temp", "gpu_clock"]
    assert panels["gpu_util"]["curves"] == [f"sys/gpu_util@gpu{card}" for card in range(8)]
    assert panels["gpu_util"]["seen"].endswith("Card 7 has less to do than card 0.")
    (band,) = panels["gpu_clock"]["bands"]
    assert band["label"] == "card 7: too hot (driver)" and (band["from"] * 3600, band["to"] * 3600) == pytest.approx((60, 118))  # fmt: skip
    x, y = series.points("sys/gpu_clock_mhz@gpu7", series.x_of("wall", 0.0))
    assert len(x) == 60 and x[-1] * 3600 == pytest.approx(118) and (y.min(), y.max()) == (1200.0, 1980.0)
    hot = cards(series)[7]
    assert hot["name"] == "NVIDIA H100" and hot["hottest_c"] == 88.0
    assert hot["slowed"] == [{"by": "too hot (driver)", "seconds": pytest.approx(58)}], "idle is nobody's fault"
    assert hot["kwh"] == pytest.approx((29 * 690 + 30 * 340) * 2 / 3.6e6)
    told = facts.describe(RunsDir(0, tmp_path / "runs"), run, series)
    (xid,) = [one for one in told["timeline"] if "Xid 63" in str(one.get("why"))]
    assert xid["at"]["wall"] * 3600 == pytest.approx(60) and xid["at"]["step"] == pytest.approx(60, abs=8)


def test_the_report_has_the_cards_too_and_stays_small(tmp_path: Path) -> None:
    run = write_killed_run(tmp_path / "runs" / "r", steps=60, kills=1)
    write_cards(run, cards=16, looks=1000)
    page = report_page.build(run)
    data = json.loads(page.split('id="data">', 1)[1].split("</script>", 1)[0])
    assert len(page) < 2_000_000
    assert len(data["by_clock"]["sys/gpu_temp_c@gpu15"]["x"]) > 60 and max(data["by_clock"]["sys/gpu_temp_c@gpu15"]["y"]) == 88  # fmt: skip


def test_damaged_lines_and_endless_series_harm_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_series, "_MOST_ROWS", 100)
    run = write_killed_run(tmp_path / "runs" / "r", steps=20, kills=1)
    write_cards(run, cards=1, looks=350)
    with open(run.system, "a") as file:
        file.write('{"gpu": 0}\n{"gpu": true, "t": 1}\n[1]\n{"gpu": -1, "t": 5, "sys/gpu_util": 1}\n')
        file.write(
            '{"gpu": 1, "t": 1.7e9, "sys/gpu_util": "much", "sys/gpu_slowed_by": ["x"], "sys/gpu_temp_c": 1e999}\n'
        )
        file.writelines(f'{{"gpu": {number}, "t": 1.7e9, "sys/gpu_util": 0.5}}\n' for number in range(2, 200))
        file.write('{"gpu": 0, "t": 1.')
    series = _series(run)
    system = series.system
    assert system.damaged == 4 and len(system.members) == 72
    assert len(system.members["gpu0"].times) <= 100 and system.members["gpu0"].times[0] == 1.7e9
    assert not system.members["gpu1"].columns and not system.members["gpu1"].slowed
    told = facts.describe(RunsDir(0, tmp_path / "runs"), run, series)
    assert panels_of(series, told) and len(told["cards"]) == 72


def _rank(rank: int, step: int, cpu_s: float, collective_s: float) -> Process:
    return Process(
        ProcessLook(100 + rank, "R", cpu_s=cpu_s, rss_bytes=2 * 10**9),
        Slot(rank=rank, step=step, coll_ns=int(1e9 * collective_s)),
    )


def test_a_rank_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create()
    ranks = RankSeries(run)
    for look in range(40):  # every 250 ms; rank 1 is hardly ever in a collective, rank 0 most of the time
        found = (_rank(0, look, 0.05 * look, 0.75 * look / 4), _rank(1, look - look // 10, 0.24 * look, 0))
        ranks.look(Snapshot(100 + look / 4, found, 0.0), attempt=1)
    lines = list(read_lines(run.system))
    assert len(lines) == 8 and {one["rank"] for one in lines} == {0, 1}
    last = {one["rank"]: one for one in lines}
    assert last[1]["sys/cpu_cores"] == pytest.approx(0.96) and last[0]["sys/in_collective"] == pytest.approx(0.75)  # fmt: skip
    panels = {one["id"]: one for one in machine_panels(_series(run))}
    assert panels["rank_coll"]["seen"].endswith("Rank 1 is there least: the others wait for it.")
    assert "steps apart" in panels["rank_step"]["seen"] and "rank_wait" not in panels
    RankSeries(RunDir(tmp_path / "none")).look(Snapshot(1.0, (_rank(0, 1, 0.0, 0),), 0.0), 1)
    assert not (tmp_path / "none").exists(), "one rank is no series"


def test_the_phase_of_now_is_the_innermost_that_has_not_ended() -> None:
    def phase(path: str, t: float, seconds: float | None = None) -> dict[str, object]:
        ended = {} if seconds is None else {"seconds": seconds}
        return {"type": "phase", "t": t, "path": path, "name": path, "state": "start" if seconds is None else "end", **ended}  # fmt: skip

    events = [{"type": "start", "t": 0.0}, phase("train", 1.0), phase("train > evaluate", 2.0), phase("train > evaluate", 5.0, 3.0)]  # fmt: skip
    assert facts._phases(events) == {"current": "train", "since": 1.0, "usual_s": None}
    assert facts._phases([*events, phase("beside > save", 6.0)])["current"] == "train"
    again = facts._phases([*events, phase("train > evaluate", 9.0)])
    assert again == {"current": "train > evaluate", "since": 9.0, "usual_s": 3.0}
    assert facts._phases([*events, {"type": "start", "t": 10.0}])["current"] == "", "the attempt before was killed"
