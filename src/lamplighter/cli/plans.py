"""lamp plan: memory, time, money and disk of a run, on paper, before anything is started.

In:  a run as `lamp train` takes it, and a device.
Out: the arithmetic on stdout (or JSON); 0 for go, 77 for no-go. No torch is loaded, and nothing is written.
"""

from __future__ import annotations

import json as json_room
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from lamplighter.cli import parse
from lamplighter.config import Run, parse_overrides, preset_names, resolve
from lamplighter.errors import BadConfig, RefusedByPlan, UsageError
from lamplighter.model.shape import Shape, shape_from_hf
from lamplighter.ops import devices, told
from lamplighter.ops.devices import Device
from lamplighter.ops.plan import GIB, Plan, as_json, job_of, make
from lamplighter.rundir import free_bytes, read_json

GEMM_S = 0.25
WHAT_IF = ("t4", "l4", "a10", "rtx3090", "rtx4090", "l40s", "a100-40gb", "a100-80gb", "h100-80gb")


def _plan_flags(
    run_yaml: Path | None = None,
    /,
    *,
    preset: str | None = None,
    on: str | None = None,
    mfu: float | None = None,
    what_if: bool = False,
    json: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp plan` takes besides fields."""


def plan(words: list[str]) -> tuple[str, int]:
    """What to say, and the exit code."""
    rest, overrides = parse_overrides(words)
    flags = parse("plan", _plan_flags, rest)
    resolved = resolve(flags.get("preset"), flags.get("run_yaml"), overrides)
    device = devices.find(flags["on"]) if flags.get("on") else this_cpu()
    if (mfu := flags.get("mfu")) is not None:
        if not 0 < mfu <= 1:
            raise UsageError(f"--mfu {mfu} is no share of the peak", "it is above 0 and at most 1", "--mfu 0.4")
        device = replace(device, mfu=mfu)
    room = _room(flags.get("runs_dir", Path("runs")))
    found = plan_of(resolved.run, device, room)
    if flags.get("json"):
        return json_room.dumps(as_json(found), indent=1) + "\n", _code(found)
    lines = told.tell(found)
    if flags.get("what_if"):
        lines += ["", *told.table(_what_if(resolved.run, mfu, room))]
    return "\n".join([*lines, _next(found), ""]), _code(found)


def _code(found: Plan) -> int:
    return 0 if found.go else RefusedByPlan.code


def _next(found: Plan) -> str:
    return (
        "next: lamp train with the same words" if found.go else "next: one of the changes above, or --on another device"
    )


def plan_of(run: Run, device: Device, room: int | None) -> Plan:
    """A run on a device; without data its tokens are steps x batch x length."""
    if run.train.steps is None:
        what, why = "the length of the run is not known on paper", "train.epochs needs the data to be counted"
        raise BadConfig(what, why, "give train.steps (lamp data stats counts the tokens)")
    wanted = run.train.dtype
    dtype = device.dtype if wanted == "auto" or not device.bf16_flops else wanted
    return make(job_of(run, shape_of(run), run.train.steps, None, dtype), device, room)


def shape_of(run: Run) -> Shape:
    """The model of a run, as far as paper goes."""
    model = run.model
    if model.init_from is not None:
        config = read_json(Path(model.init_from) / "config.json")
        if not isinstance(config, dict):
            raise BadConfig(f"model.init_from {model.init_from}", "no readable config.json", "check the path")
        return shape_from_hf(config)
    if model.family not in ("gpt2", "llama"):
        what = f"model.family {model.family} cannot be planned on paper"
        raise BadConfig(what, "only its own code knows its size", "lamp train --test tries it, small")
    sizes: dict[str, Any] = {"kv_heads": model.kv_heads or 0, "mlp_width": model.mlp_width or 0}
    try:
        return Shape(model.family, _vocabulary(run), run.data.seq_len, model.layers, model.width, model.heads, **sizes)  # type: ignore[arg-type]
    except ValueError as error:
        raise BadConfig("the model section does not fit together", str(error), "change one of the sizes") from error


def _vocabulary(run: Run) -> int:
    section = run.tokenizer
    if section.path is None:
        return 257 if section.kind == "bytes" else section.vocab_size
    path = Path(section.path)
    content = read_json(path / "tokenizer.json" if path.is_dir() else path)
    if not isinstance(content, dict) or "model" not in content:
        raise BadConfig(f"tokenizer.path {path}", "no readable tokenizer.json there", "check the path")
    vocab = content["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    return 1 + int(max([*ids, *(token["id"] for token in content.get("added_tokens", []))]))


def this_cpu() -> Device:
    """This machine's processor: memory that is free now, and a matrix product that is measured."""
    import numpy as np
    import psutil

    a = np.ones((1024, 1024), np.float32)
    best, until = 0.0, time.perf_counter() + GEMM_S
    while time.perf_counter() < until:
        start = time.perf_counter()
        a @ a
        best = max(best, 2 * 1024**3 / (time.perf_counter() - start))
    return Device("cpu", psutil.virtual_memory().available / GIB, None, best)


def _room(folder: Path) -> int | None:
    while not folder.exists():
        if folder == folder.parent:
            return None
        folder = folder.parent
    return free_bytes(folder)


def _what_if(run: Run, mfu: float | None, room: int | None) -> list[Plan]:
    rows = [plan_of(run, devices.find(name), room) for name in WHAT_IF]
    for name in preset_names():
        if name != "demo":
            other = resolve(name).run
            sizes = other.model_copy(update={"budget": run.budget})
            rows.append(plan_of(sizes, devices.find("a100-80gb"), room))
    return [make(row.job, replace(row.device, mfu=mfu), room, False) if mfu else row for row in rows]
