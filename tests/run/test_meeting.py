"""Ranks that meet while another one dies, or gets no core: nobody is left waiting where no word of the parent arrives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from running import clean_env

RANK = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from lamplighter.train import ranks

rank, place, short = int(sys.argv[1]), Path(sys.argv[2]), timedelta(seconds=0.5)
ranks._CONNECT = short
if rank == 0:
    dies = dist.PrefixStore("meeting 0", dist.FileStore(str(place / "first"), 2))
    dies.set("here1", "yes")  # before it has an address
    def told():
        if time.monotonic() > began + 2 * short.total_seconds():
            raise ranks.PeerLost("the parent makes another world")
    began, ranks._leave_if_told = time.monotonic(), told
    try:
        ranks.meet(ranks.World(0, 2), place / "first", "gloo")
    except ranks.PeerLost as error:
        print("left:", error)
    ranks._leave_if_told = lambda: None
else:  # the first time it connects it gets no core, longer than the timer
    whole = dist.init_process_group
    def slow(*words, **named):
        dist.init_process_group = whole
        time.sleep(2 * short.total_seconds())
        whole(*words, **named)
    dist.init_process_group = slow
ranks.meet(ranks.World(rank, 2), place / "second", "gloo")
if rank == 1:
    time.sleep(2 * short.total_seconds())  # a slow step is no loss
total = torch.tensor([1.0 + rank])
dist.all_reduce(total)
print("sum", total.item())
"""


def test_a_meeting_is_left_when_a_rank_dies_and_held_again_when_one_is_slow(tmp_path: Path) -> None:
    environment = {**clean_env(), "PYTHONPATH": os.pathsep.join(sys.path)}
    going = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=120)[0].splitlines() for process in going]
    assert said[0][0].startswith("left: rank 0 of 2 lost its peers in rendezvous")
    assert said[0][1:] == ["sum 3.0"] and said[1] == ["sum 3.0"]
