"""What the reference model gives each answer of preference pairs: worked out once, before the first step, and kept.

In:  the model as it begins (adapters add nothing yet), its base by hash, the pairs of both sides.
Out: `reference` of both sides filled in; `<cache>/reference-<fingerprint>/`, found again by base, pairs and arithmetic.

The reference is never a second model in memory. Its log-probabilities come from the same windows, with the same arithmetic and as
many at a time as in training, so the first loss is ln 2 and a run has the same bits whether they were found or made. What is
trained on is read as a step reads it, ready for a backward pass, and what is held back as validation does: in bf16 the kernels of the
two round differently. One process makes them while others wait.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lamplighter import report
from lamplighter.config import Run
from lamplighter.data.batch_source import AnswerSide, PairData
from lamplighter.data.batches import Float64s
from lamplighter.data.cache_location import CacheKind, CacheLocation, Mode, Parts, claimed, verify_hashes
from lamplighter.errors import BadData
from lamplighter.model import origin
from lamplighter.model.build import Built
from lamplighter.readers.records import digest
from lamplighter.rundir import NUMERICS, cannot_write, hash_file, sealed, write_atomic, write_json
from lamplighter.train.gradients import answer_nats
from lamplighter.train.hardware import Machine
from lamplighter.train.preference import answer_logps

KIND = CacheKind(
    name="reference log-probabilities",
    prefix="reference-",
    manifest="reference.json",
    format=1,
    first="the first for this base and these pairs",
)
_FILE = "logps.npy"  # float64: two for each pair that is trained on, then for each that is held back


def fill(run: Run, built: Built, machine: Machine, pairs: PairData, cache_root: Path) -> None:
    """Find or make them."""
    base = built.base or origin.identify(Path(str(run.model.init_from)), "fp32")
    cache = _locate(run, base, machine, pairs, cache_root)
    mode: Mode = "rebuild" if run.data.cache == "rebuild" else "auto"
    with claimed(cache, mode) as to_build:
        if to_build:
            try:
                _build(cache, run, built.model, machine, pairs)
            except OSError as error:
                raise cannot_write(cache.folder, error) from error
    verify_hashes(cache.folder, KIND)
    found = np.load(cache.folder / _FILE)
    trained = 2 * pairs.train.pairs
    for side, numbers in ((pairs.train, found[:trained]), (pairs.val, found[trained:])):
        side.beta, side.reference = run.train.dpo_beta, numbers


def _locate(run: Run, base: origin.Base, machine: Machine, pairs: PairData, cache_root: Path) -> CacheLocation:
    arithmetic: dict[str, Any] = {
        **machine.facts(),
        "rows": _rows(run),
        "loss": run.train.loss,
        "numerics": NUMERICS,
        "read": "as in steps",
    }
    parts: Parts = {
        "base": {"fingerprint": digest([base.hashes, base.dtype]), "content": f"{base.path}, matrices in {base.dtype}"},
        "pairs": {"fingerprint": pairs.fingerprint, "content": f"{pairs.train.pairs + pairs.val.pairs:,} pairs"},
        "arithmetic": {"fingerprint": digest(arithmetic), "content": arithmetic},
    }
    return CacheLocation(cache_root, KIND, parts)


def _rows(run: Run) -> int:
    return run.train.micro_batch or run.train.batch_size


def _build(cache: CacheLocation, run: Run, model: torch.nn.Module, machine: Machine, pairs: PairData) -> None:
    folder, whole = cache.folder, run.train.loss == "whole"
    was_training = model.training
    model.eval()
    try:
        with report.phase("reference", total=pairs.train.pairs + pairs.val.pairs, unit="pairs") as p:
            sides = [
                _of_side(side, model, machine, p, rows=_rows(run), whole=whole, as_in_steps=side is pairs.train)
                for side in (pairs.train, pairs.val)
            ]
    finally:
        model.train(was_training)
    stored = io.BytesIO()
    np.save(stored, np.concatenate(sides))
    write_atomic(folder / _FILE, stored.getvalue())
    files = {_FILE: {"bytes": (folder / _FILE).stat().st_size, "sha256": hash_file(folder / _FILE)}}
    write_json(folder / KIND.manifest, sealed({"format": KIND.format, "parts": cache.parts, "files": files}))


def _of_side(
    side: AnswerSide,
    model: torch.nn.Module,
    machine: Machine,
    p: report.Phase,
    *,
    rows: int,
    whole: bool,
    as_in_steps: bool,
) -> Float64s:
    found: Float64s = np.full(2 * side.pairs, np.nan)
    for batch in side.in_order(rows):
        with torch.set_grad_enabled(as_in_steps):
            nats_N, answers_N = answer_nats(model, batch, machine, whole=whole)
        numbers, logps = answer_logps(nats_N.detach(), answers_N)
        found[numbers] = logps.cpu().numpy()
        p.tick(batch.real_tokens)
    if not np.isfinite(found).all():
        bad = int(np.flatnonzero(~np.isfinite(found))[0]) // 2
        raise BadData(
            "the model gives an answer a log-probability that is not finite",
            f"in {np.count_nonzero(~np.isfinite(found)):,} of {len(found):,} answers, first in pair {bad + 1}",
            "look at the model with lamp doctor; --train.dtype fp32",
        )
    return found
