"""The run on paper, by `lamp plan` itself: one arithmetic for both.

In:  a Patient.
Out: a Paper, or None where paper does not suffice (NOT_PLANNED says why); a LampError where the settings do not fit together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from lamplighter.config import OPTIMIZERS, OptimizerKind, Resolved, dump
from lamplighter.doctor.probe import Patient
from lamplighter.doctor.runner import patience
from lamplighter.errors import BadConfig, RefusedByPlan
from lamplighter.rundir import write_atomic

PLAN_S = 45.0
NOT_PLANNED = "the data must be counted for it, and that takes longer than a probe may (lamp plan, lamp data stats)"


@dataclass(frozen=True)
class Paper:
    """The plan's figures, as --json gives them."""

    figures: dict[str, Any]
    optimizer: OptimizerKind = OPTIMIZERS["adamw"]

    @property
    def checkpoint_bytes(self) -> int:
        return self.optimizer.checkpoint_bytes * int(self.figures["params"])

    @property
    def seconds(self) -> float:
        return 3600.0 * float(self.figures["hours"])


def plan(patient: Patient) -> Paper | None:
    """`lamp plan --json` of the very settings, on the device that it chooses by itself."""
    known = patient.scratch / "paper.json"  # of an earlier probe of this examination
    if known.exists():
        return Paper(json.loads(known.read_text()), patient.run.train.optimizer)
    file = patient.scratch / "paper.yaml"
    file.write_text(dump(Resolved(patient.run)))
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "lamplighter.commands",
                "plan",
                str(file),
                "--json",
                "--runs-dir",
                str(patient.runs_dir),
            ],
            capture_output=True,
            text=True,
            timeout=PLAN_S * patience(),
            check=False,
            env={name: value for name, value in os.environ.items() if not name.startswith("LAMP_")},
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode in (0, RefusedByPlan.code):
        write_atomic(known, done.stdout)
        return Paper(json.loads(done.stdout), patient.run.train.optimizer)
    if patient.run.train.steps is None:
        return None
    said = dict(line.split(":", 1) for line in done.stderr.splitlines() if ":" in line)
    what, why, advice = (said.get(name, "").strip() for name in ("error", "why", "next"))
    raise BadConfig(what or f"lamp plan left with {done.returncode}", why or done.stderr[-300:], advice)
