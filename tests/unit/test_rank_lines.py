"""A line for each rank: what it shows, which one is marked as the slowest, and what a damaged status does to it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lamplighter.commands.runs import _table
from lamplighter.procs import procfs
from lamplighter.procs.procfs import ProcessLook
from lamplighter.read_back import STATUS, find_damage, without_damage
from lamplighter.rundir import RunDir
from lamplighter.slot import Slot, SlotWriter
from lamplighter.watch.command import stepped_at
from lamplighter.watch.elsewhere import RemotePid
from lamplighter.watch.process_tree import Process, ProcessTree, Snapshot
from lamplighter.watch.rank_lines import rank_lines, ranks_of, slowest
from lamplighter.watch.rank_series import RankSeries


def _rank(rank: int, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "pid": 100 + rank, "host": "node-1", "state": "", "step": 7, "phase": "train", "span": "gradients",
            "collectives": 20, "waiting_s": 0.0, "in_collective": 0.3, "tokens_per_s": 1234.5, "ram_gb": 1.5, **more}  # fmt: skip


def test_a_line_has_step_phase_speed_memory_and_host() -> None:
    (line, _) = rank_lines([_rank(0), _rank(1)])
    for words in (
        "rank 0",
        "step 7",
        "train > gradients",
        "1,234 tok/s",
        "30% waiting",
        "1.50 GB",
        "node-1",
        "process 100",
    ):
        assert words in line, words
    assert "slowest" not in line, "they are even"


def test_two_nodes_that_share_a_hosts_name_are_told_apart(tmp_path: Path) -> None:
    series = RankSeries(RunDir(tmp_path))
    ranks = series.now([os.getpid(), RemotePid.of(1, 55, series.host)])
    assert not find_damage({"ranks": ranks}, STATUS)
    first, second = rank_lines(ranks)
    assert f"node 0, {series.host}, process {os.getpid()}" in first
    assert f"node 1, {series.host}, process 55" in second
    assert "node" not in series.now([os.getpid()])[0], "of one machine it says nothing"


def test_the_rank_that_the_others_wait_for_is_marked() -> None:
    stopped = [_rank(0, waiting_s=9.0), _rank(1, state="stopped")]
    assert slowest(stopped) == (1, "stopped by a signal; go on with: kill -CONT 101")
    late = [_rank(0, waiting_s=2.5, collectives=21), _rank(1), _rank(2, waiting_s=2.4, collectives=21)]
    assert slowest(late) == (1, "2 of 3 wait for it, for 2.5 s")
    uneven = [_rank(0, in_collective=0.5), _rank(1, in_collective=0.1), _rank(2, in_collective=0.4)]
    assert slowest(uneven) == (1, "it waits 10% of the time, every other at least 40%")
    assert slowest([_rank(0, in_collective=0.2), _rank(1, in_collective=0.3)]) is None
    assert slowest([_rank(0, in_collective=0.2), _rank(1, state="ended")]) is None, "the last save is still written"
    assert slowest([_rank(0, state="ended"), _rank(1, state="ended")]) is None
    assert [("slowest" in line) for line in rank_lines(uneven)] == [False, True, False]


def test_of_many_ranks_the_slowest_is_always_shown() -> None:
    many = [_rank(rank, in_collective=0.1 if rank == 700 else 0.6) for rank in range(1000)]
    lines = rank_lines(many, most=4)
    assert (
        len(lines) == 5 and lines[3].startswith("rank 700") and "slowest" in lines[3] and "996 more ranks" in lines[4]
    )


def test_a_damaged_list_is_no_list() -> None:
    for damage in ("x", [1], [{"rank": "0"}], [{"rank": 0, "pid": "7"}], [{}]):
        assert find_damage({"ranks": damage}, STATUS) and not ranks_of(without_damage({"ranks": damage}, STATUS))
        assert not ranks_of({"ranks": damage})
    (line,) = rank_lines(ranks_of({"ranks": [{"rank": 0, "phase": "\x1b[2J", "host": None}]}))
    assert "\x1b" not in line


def test_a_table_of_runs_has_the_ranks_of_those_that_go_on(tmp_path: Path) -> None:
    row = {
        "run": "r",
        "state": "running",
        "live": True,
        "age_s": 1.0,
        "damage": "",
        "ranks": [_rank(0), _rank(1, state="stopped")],
    }
    text = _table(tmp_path, [row])
    assert "\n    rank 0 " in text and "\n    rank 1 " in text and text.count("slowest") == 1
    assert "rank 0" not in _table(tmp_path, [{**row, "live": False}])


def test_speed_is_that_of_its_own_part_while_it_computes(tmp_path: Path) -> None:
    """Two ranks, 1,000 tokens a second in all; rank 0 waits for half of the time."""
    series = RankSeries(RunDir(tmp_path))
    for look in range(20):
        at = 50 + look / 4
        found = [
            Process(ProcessLook(100 + rank, "T" if rank else "S", rss_bytes=10**9),
                    Slot(rank=rank, world=2, tokens=250 * look, step=look, phase="train", coll="gradients", in_coll=1 - rank,
                         coll_since_ns=int(at * 1e9), coll_ns=int((0.125 if rank == 0 else 0.0) * look * 1e9)))
            for rank in (0, 1)
        ]  # fmt: skip
        series.look(Snapshot(at, tuple(found), 0.0), attempt=1)
    one, two = series.now([100, 101])
    assert (one["tokens_per_s"], one["in_collective"]) == (1000.0, 0.5) and two["tokens_per_s"] == 500.0
    assert (one["state"], two["state"], one["span"], two["span"]) == ("", "stopped", "gradients", "")
    assert series.now([100, 101, 102])[2]["state"] == "gone" and one["host"]


def test_a_rank_that_has_ended_is_not_drawn_down_to_zero(tmp_path: Path) -> None:
    """A zombie has neither memory nor a core: that is no fact about the rank."""
    series = RankSeries(RunDir(tmp_path))
    for at in range(0, 12, 3):
        looks = [
            ProcessLook(100, "S", rss_bytes=10**9),
            ProcessLook(101, "Z" if at > 5 else "S", rss_bytes=0 if at > 5 else 10**9),
        ]
        found = [Process(look, Slot(rank=rank, world=2, step=at)) for rank, look in enumerate(looks)]
        series.look(Snapshot(50.0 + at, tuple(found), 0.0), attempt=1)
    rows = [json.loads(line) for line in RunDir(tmp_path).system.read_text().splitlines()]
    assert {row["rank"] for row in rows} == {0, 1} and all(row["sys/ram_gb"] == 1.0 for row in rows)
    assert len([row for row in rows if row["rank"] == 1]) < len([row for row in rows if row["rank"] == 0])


def test_what_a_script_does_after_its_last_step_is_no_time_of_a_step() -> None:
    def snapshot(*step_ns: int) -> Snapshot:
        return Snapshot(60.0, tuple(Process(ProcessLook(100, "S"), Slot(step=4, step_ns=one)) for one in step_ns), 0.0)

    assert stepped_at(snapshot(int(59.25e9), int(59.5e9)), since=59.0) == 59.5
    assert stepped_at(snapshot(0), since=59.0) == stepped_at(snapshot(), since=59.0) == 60.0, "nothing says when"
    assert stepped_at(snapshot(int(58e9)), since=59.0) == 60.0, "of an attempt before"


def test_of_many_ranks_every_one_is_seen_and_a_stall_is_looked_at_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 ranks: in calm times a part of the slots is read at a look; outside of them all are."""
    pids = range(1000, 1100)
    writers = []
    for rank, pid in enumerate(pids):
        slot = SlotWriter()
        slot.set("pid", pid)
        slot.set("rank", rank)
        writers.append(slot.publish(str(tmp_path / f"rank{rank}")))
    asked: list[int] = []
    monkeypatch.setattr(procfs, "parents", lambda root: {root: 0, 10 * root: root})
    monkeypatch.setattr(procfs, "look", lambda pid: asked.append(pid) or ProcessLook(pid, "S"))
    tree = ProcessTree(pids, tmp_path, {pid: tmp_path / f"rank{rank}.slot" for rank, pid in enumerate(pids)})

    def steps(calm: bool) -> list[int]:
        found = tree.look(closely=False, calm=calm).processes
        return [one.slot.step for one in found if one.slot and one.rank >= 0]

    assert steps(calm=False) == [0] * 100, "more than the 64 processes of somebody else's tree"
    assert len(tree._watched()) == 164, "of the others the first ones"
    for writer in writers:
        writer.set("step", 7)
    asked.clear()
    first = steps(calm=True)
    assert first[0] == 7 and first.count(7) < 60 and not asked, "rank 0 always; /proc is not asked again"
    assert [steps(calm=True) for _ in range(3)][-1] == [7] * 100, "everybody within four looks"
    for writer in writers:
        writer.set("step", 8)
    assert steps(calm=False) == [8] * 100 and len(asked) == 164, "in a stall every look is whole"
