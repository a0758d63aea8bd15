"""A plan as it is asked for on the command line: a run, a device, and what is known of the text. No torch.

In:  a Run and a Wish (device, MFU, table, JSON).
Out: the page, or JSON, and the exit code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from lamplighter.config import Run, preset_names, resolve
from lamplighter.errors import DONE, BadConfig, RefusedByPlan
from lamplighter.plan import devices as places
from lamplighter.plan import render, sanity
from lamplighter.plan.alternatives import completed
from lamplighter.plan.estimate import Measured, Plan, as_json, make
from lamplighter.plan.job import Job, Text, count_steps, is_own, job_of, shape_of, vocabulary
from lamplighter.train import gpus
from lamplighter.train.gpus import Device

__all__ = ["Known", "Wish", "is_own", "page", "plan_of"]

WHAT_IF = ("t4", "l4", "a10", "rtx3090", "rtx4090", "l40s", "a100-40gb", "a100-80gb", "h100-80gb")
PRESETS_ON = "a100-80gb"


@dataclass(frozen=True)
class Wish:
    """What was asked for."""

    on: str | None = None
    mfu: float | None = None
    what_if: bool = False
    as_json: bool = False
    runs_dir: str = "runs"


@dataclass(frozen=True)
class Known:
    """What is known beyond the settings."""

    text: Text | None = None
    vocab_size: int | None = None  # of the tokenizer
    measured: Measured | None = None
    largest: int | None = None
    own_params: int | None = None
    segments: bool = False
    row_tokens: float | None = None
    device: Device | None = None  # on which steps were tried


def job_on(run: Run, device: Device, known: Known) -> Job:
    """A run on a device; without data its tokens are steps x batch x length."""
    if is_own(run) and known.own_params is None:
        what = f"model.family {run.model.family} cannot be planned on paper"
        raise BadConfig(what, "only its own code knows its size", "lamp plan --measure builds and tries it")
    wanted = run.train.dtype
    dtype = device.dtype if wanted == "auto" or not (device.bf16_flops or device.is_cpu) else wanted
    if known.measured is not None and known.measured.fits:
        dtype = known.measured.dtype
    has = known.vocab_size or vocabulary(run)
    return job_of(
        run,
        shape_of(run, has),
        count_steps(run, known.text),
        dtype,
        known.text,
        tokenizer_vocab=has,
        own_params=known.own_params,
        segments=known.segments,
        row_tokens=known.row_tokens,
    )


def plan_of(run: Run, device: Device, free_disk: int | None, known: Known) -> Plan:
    made = make(job_on(run, device, known), device, free_disk, known.measured)
    return replace(completed(made), largest=known.largest)


def page(run: Run, wish: Wish, known: Known | None = None) -> tuple[str, int]:
    """What to say, and the exit code."""
    known = known or Known()
    room = places.free_disk(Path(wish.runs_dir)) if not wish.on else None  # elsewhere there are other disks
    device = known.device or places.choose(wish.on, wish.mfu, run.train.threads, run.train.device)
    found = plan_of(run, device, room, known)
    code = DONE if found.go else RefusedByPlan.code
    if wish.as_json:
        record = as_json(found, sanity.warnings(found))
        if wish.what_if:
            record["what_if"] = [
                {"run": name, **as_json(row, sanity.warnings(row))} for name, row in _what_if(run, wish, known)
            ]
        return json.dumps(record, indent=1) + "\n", code
    lines = render.tell(found)
    if wish.what_if:
        lines += ["", *render.table(_what_if(run, wish, known))]
    return "\n".join([*lines, _next(found), ""]), code


def _next(found: Plan) -> str:
    if found.go:
        return "next: lamp train with the same words"
    return "next: one of the changes above, or --on another device; lamp train --force insists"


def _what_if(run: Run, wish: Wish, known: Known) -> list[tuple[str, Plan]]:
    """The same run on other devices, and the presets on one of them."""
    on_paper = replace(known, measured=None, largest=None, device=None)
    rows = [("this run", make(job_on(run, d, on_paper), d)) for d in (_named(name, wish) for name in WHAT_IF)]
    device = _named(PRESETS_ON, wish)
    for name in preset_names():
        if name != "demo":
            other = resolve(name).run.model_copy(update={"budget": run.budget})
            rows.append((f"{name}", make(job_on(other, device, Known()), device)))
    return rows


def _named(name: str, wish: Wish) -> Device:
    device = gpus.find(name)
    return replace(device, mfu=wish.mfu) if wish.mfu else device
