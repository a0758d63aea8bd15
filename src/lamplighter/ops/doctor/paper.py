"""The run on paper, by `lamp plan` itself: one arithmetic for both.

In:  a Patient.
Out: a Paper, or None where paper does not suffice (NOT_PLANNED says why); a LampError where the settings do not fit together.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamplighter.config import Resolved, dump
from lamplighter.errors import BadConfig, RefusedByPlan
from lamplighter.ops import devices
from lamplighter.ops.doctor.finding import Patient
from lamplighter.rundir import write_atomic

PLAN_S = 45.0
NOT_PLANNED = "train.epochs needs the data to be counted, or the GPU is not in the table of lamp plan"


@dataclass(frozen=True)
class Paper:
    """The plan's figures, as --json gives them."""

    figures: dict[str, Any]

    @property
    def checkpoint_bytes(self) -> int:
        return 12 * int(self.figures["params"])  # weights and two moments, fp32

    @property
    def seconds(self) -> float:
        return 3600.0 * float(self.figures["hours"])


def plan(patient: Patient) -> Paper | None:
    """`lamp plan --json` of the very settings, for the GPU that torch sees or for this CPU."""
    if patient.run.train.steps is None:
        return None
    known = patient.scratch / "paper.json"  # of an earlier probe of this examination
    if known.exists():
        return Paper(json.loads(known.read_text()))
    file = patient.scratch / "paper.yaml"
    file.write_text(dump(Resolved(patient.run)))
    words = [sys.executable, "-m", "lamplighter.cli", "plan", str(file), "--json", "--runs-dir", str(patient.runs_dir)]
    device = gpu_name() if patient.run.train.device != "cpu" else None
    if device == "":
        return None
    done = subprocess.run(
        [*words, *(["--on", device] if device else [])],
        capture_output=True,
        text=True,
        timeout=PLAN_S,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("LAMP_")},
    )
    if done.returncode not in (0, RefusedByPlan.code):
        said = dict(line.split(":", 1) for line in done.stderr.splitlines() if ":" in line)
        what, why, advice = (said.get(name, "").strip() for name in ("error", "why", "next"))
        raise BadConfig(what or f"lamp plan left with {done.returncode}", why or done.stderr[-300:], advice)
    figures = json.loads(done.stdout)
    write_atomic(known, done.stdout)
    return Paper(figures)


def gpu_name() -> str | None:
    """The first GPU that torch sees, as the table of devices calls it; empty where it has no such name; None without a GPU."""
    if shutil.which("nvidia-smi") is None and not Path("/dev/nvidia0").exists():
        return None  # without loading torch for it
    import torch

    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0).lower().replace("geforce", "").replace("nvidia", "")
    plain = "".join(c for c in name if c.isalnum())
    gib = torch.cuda.mem_get_info(0)[1] / 2**30
    near = [key for key in devices.TABLE if "".join(c for c in key.split("-")[0] if c.isalnum()) in plain]
    near.sort(key=lambda key: (abs(devices.TABLE[key].memory_gib - gib), -len(key)))
    return near[0] if near else ""
