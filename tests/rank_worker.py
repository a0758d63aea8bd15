"""Several processes over gloo that serve worlds of 1 to 8 ranks one after another; a hash for each is printed.

In:  how many processes, a folder to meet in, kinds of runs and sizes of worlds as JSON.
Out: by rank 0 a line of JSON for each: kind, world, sharded or not, losses and norms, hash of weights and optimizer.

Run by tests/run/test_rank_bits.py. The processes are forked once torch is imported, which costs more than all that they compute.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lamplighter.config import Model, Train
from lamplighter.data.batches import Batch
from lamplighter.model.build import build
from lamplighter.model.recompute import recompute_blocks
from lamplighter.model.weights import stored_tensors
from lamplighter.train import gradients, hardware, optimizers, ranks
from lamplighter.train.ranks import World
from lamplighter.train.sharding import Shards

WORDS, LENGTH, STEPS = 301, 32, 3  # rows and numbers that no world divides evenly
CPU = torch.device("cpu")


def batch(step: int, rows: int, packed: bool) -> Batch:
    """Noise; packed: two examples in each row, and a prompt that is not learned from."""
    draw = np.random.default_rng(step)
    ids = draw.integers(0, WORDS, (rows, LENGTH + 1))
    targets, segments = ids[:, 1:].copy(), None
    if packed:
        cuts = draw.integers(5, LENGTH - 5, rows)
        segments = (np.arange(LENGTH)[None, :] >= cuts[:, None]).astype(np.int64)
        targets[:, :4] = -1
    return Batch(step, ids[:, :-1].copy(), targets, segments, np.arange(rows), 0.0, int((targets >= 0).sum()))


def trained(kind: dict[str, Any], world: World, sharded: bool) -> dict[str, Any]:
    llama = kind.get("family", "gpt2") != "gpt2"
    sizes = {"layers": 3, "width": 36, "heads": 4 if not llama else 6, "kv_heads": 2 if llama else None}
    built = build(
        Model(family=kind.get("family", "gpt2"), dropout=kind.get("dropout", 0.0), **sizes), WORDS, LENGTH, 0, 1
    )
    leaves, dtype = kind.get("leaves", 8), torch.bfloat16 if kind.get("bf16") else torch.float32
    train = Train(steps=STEPS, batch_size=2 * leaves, micro_batch=2, tree=kind.get("tree", 8), grad_clip=0.5)
    train = replace(train, optimizer=kind.get("optimizer", "adamw"))
    machine = hardware.Machine(CPU, dtype, 1, "CPU", peak_flops=1.0, reasons=())
    built.model.train()
    if kind.get("recompute"):
        recompute_blocks(built.model)
    shards = Shards(built.model, world, CPU, native=False) if sharded else None
    optimizer = optimizers.make_optimizer(built.model, train, dtype if train.optimizer == "muon" else None)
    context: Any = SimpleNamespace(
        run=SimpleNamespace(train=train), model=built.model, machine=machine, loss_scale=None, world=world
    )
    numbers = []
    for step in range(1, STEPS + 1):
        here = batch(step, 2 * leaves, kind.get("packed", False))
        if shards is not None:
            loss, norm, _ = shards.step(context, here, [0.0])
        else:
            loss, _ = ranks.reduce(world, gradients.forward_backward(context, here), [0.0])
            norm = optimizer.grad_norm()
        numbers += [float(loss).hex(), float(norm).hex()]
        scale = optimizers.clip_factor(float(norm), 0.5)
        if isinstance(optimizer, optimizers.Shares):
            optimizer.share(world, scale)
        optimizer.step(1e-2, scale)
        optimizer.zero_grad()
    held = stored_tensors(built.model) if shards is None else shards.held()
    digest = hashlib.sha256()
    for _, tensor in sorted({**held, **optimizer.state_tensors()}.items()):
        digest.update(whole(tensor, world, sharded).detach().contiguous().numpy().tobytes())
    return {"numbers": numbers, "hash": digest.hexdigest()}


def whole(tensor: torch.Tensor, world: World, sharded: bool) -> torch.Tensor:
    if not sharded or not tensor.dim():
        return tensor
    parts: list[Any] = [None] * world.size
    dist.all_gather_object(parts, tensor.detach().clone())
    return torch.cat(parts)


def serve(rank: int, place: Path) -> None:
    torch.set_num_threads(1)
    for name, kind in json.loads(sys.argv[3]).items():
        for size, sharded in json.loads(sys.argv[4]):
            if rank >= size or (sharded and "optimizer" in kind):  # whole matrices
                continue
            world = World(rank, size)
            ranks.meet(world, place / f"{name}-{size}-{sharded}", "gloo")
            found = trained(kind, world, sharded)
            if rank == 0:
                sys.stdout.write(json.dumps({"kind": name, "world": size, "sharded": sharded, **found}) + "\n")
                sys.stdout.flush()


def fork(rank: int, place: Path) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        serve(rank, place)
        code = 0
    except Exception:  # noqa: BLE001  whatever it is, the test shall read it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # no teardown: the others may still be at work


def main() -> int:
    left = {fork(rank, Path(sys.argv[2])) for rank in range(int(sys.argv[1]))}
    while left:
        child, status = os.wait()
        left.discard(child)
        if status:  # the others would wait for it
            for other in left:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
