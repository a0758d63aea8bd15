"""Ranks that meet while another one dies: nobody is left waiting where no word of the parent arrives."""

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

rank, place, short = int(sys.argv[1]), Path(sys.argv[2]), timedelta(seconds=4)
ranks._CONNECT = short
if rank == 0:
    dist.FileStore(str(place / "first"), 2).set("rank1", "here")  # which then dies, before it has an address
    try:
        ranks.meet(ranks.World(0, 2), place / "first", "gloo")
    except ranks.PeerLost as error:
        print("left:", error)
ranks.meet(ranks.World(rank, 2), place / "second", "gloo")
if rank == 1:
    time.sleep(2 * short.total_seconds())  # a slow step is no loss
total = torch.tensor([1.0 + rank])
dist.all_reduce(total)
print("sum", total.item())
"""


def test_a_rank_that_dies_while_all_connect_is_left_and_the_next_meeting_has_no_timer(tmp_path: Path) -> None:
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
