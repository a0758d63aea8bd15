"""The same bits on any number of ranks, replicated and sharded: one spawn of processes serves all worlds, over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from running import LONG, clean_env

WORKER = Path(__file__).parents[1] / "rank_worker.py"
KINDS = {
    "dropout": {"dropout": 0.1},
    "bf16": {"family": "llama", "bf16": True},
    "bf16 with dropout": {"dropout": 0.1, "bf16": True, "leaves": 5},
    "packed": {"family": "llama", "packed": True, "leaves": 6},
    "recomputed": {"dropout": 0.1, "recompute": True},
    "several leaves in a node": {"leaves": 11, "tree": 4},
    "a single leaf": {"leaves": 1},
    "muon": {"family": "qwen3", "optimizer": "muon", "leaves": 3},
    "muon in bf16": {"optimizer": "muon", "bf16": True},
    "three leaves": {"family": "llama", "leaves": 3},
}


def _found(place: Path, processes: int, kinds: dict[str, Any], worlds: list[tuple[int, bool]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            str(WORKER),
            str(processes),
            str(place),
            json.dumps(kinds),
            json.dumps(worlds),
        ],
        env={**clean_env(), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _refuse_other_bits(found: list[dict[str, Any]], expected: int) -> None:
    assert len(found) == expected
    alone = {one["kind"]: one for one in found if one["world"] == 1}
    other = [
        (one["kind"], one["world"], one["sharded"])
        for one in found
        if (one["hash"], one["numbers"]) != (alone[one["kind"]]["hash"], alone[one["kind"]]["numbers"])
    ]
    assert not other, other
    hashes = {name: one["hash"] for name, one in alone.items()}
    same = hashes.pop("recomputed", None)
    assert same in (None, hashes.get("dropout")), "computing activations again changes no bit"
    assert len(set(hashes.values())) == len(hashes), "each kind is another run"


def _count(kinds: dict[str, Any], worlds: list[tuple[int, bool]]) -> int:
    """Muon is not sharded."""
    return sum(not (sharded and "optimizer" in kind) for kind in kinds.values() for _, sharded in worlds)


def test_two_and_three_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    kinds = {name: KINDS[name] for name in ("bf16 with dropout", "several leaves in a node", "muon in bf16")}
    worlds = [(1, False), (2, True), (3, False), (3, True)]
    _refuse_other_bits(_found(tmp_path, 3, kinds, worlds), _count(kinds, worlds))


@LONG
def test_eight_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    worlds = [(1, False), *((size, sharded) for size in (2, 3, 4, 8) for sharded in (False, True))]
    _refuse_other_bits(_found(tmp_path, 8, KINDS, worlds), _count(KINDS, worlds))
