"""python -m lamplighter.doctor.rank_child REQUEST: one of the two ranks that try the collectives.

In:  its number, where to meet, and a descriptor to answer on.
Out: one JSON line before and after each act: rendezvous, all-reduce, barrier, broadcast; each result is checked.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any

PR_SET_PDEATHSIG = 1
NUMBERS = 1 << 16


def main() -> int:
    request = json.loads(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    rank, ranks = request["rank"], request["ranks"]

    def say(**record: Any) -> None:
        os.write(request["fd"], json.dumps({"rank": rank, **record}).encode() + b"\n")

    say(at="import")
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=request["act_s"])
    act = "import"
    try:
        say(at=(act := "rendezvous"))
        store = dist.TCPStore(  # type: ignore[attr-defined]
            request["address"], request["port"], ranks, is_master=rank == 0, timeout=limit
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        say(at=(act := "all-reduce"))
        numbers = torch.full((NUMBERS,), float(rank + 1))
        dist.all_reduce(numbers)
        wanted = ranks * (ranks + 1) / 2
        if not bool((numbers == wanted).all()):
            raise ArithmeticError(f"1 + 2 gave {numbers[0].item()}")
        say(at=(act := "barrier"))
        dist.barrier()
        say(at=(act := "broadcast"))
        sent = torch.arange(NUMBERS) if rank == 0 else torch.zeros(NUMBERS, dtype=torch.int64)
        dist.broadcast(sent, src=0)
        if not torch.equal(sent, torch.arange(NUMBERS)):
            raise ArithmeticError("what arrived is not what was sent")
        say(at=(act := "end"))
        dist.barrier()  # rank 0 keeps the store: it may not leave before the other has done
    except Exception as error:  # noqa: BLE001  whatever it is, it is told
        say(failed=act, error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        os._exit(1)
    say(done=True)
    os._exit(0)  # at once: torch takes a second to unload itself


if __name__ == "__main__":
    sys.exit(main())
