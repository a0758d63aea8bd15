"""What starts processes: The plan on paper: true parameters, refusals with their arithmetic, changes, sanity, curves, devices, the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lamplighter.plan import devices
from lamplighter.procs import cgroup
from running import Command


def test_room_is_the_least_of_what_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    monkeypatch.setattr(cgroup, "folders", lambda _: [tmp_path])
    assert devices.host_room() == devices.Room(100, f"the memory limit of {tmp_path}")
    assert devices.host_total().bytes == 1000
    code = "from lamplighter.plan.devices import host_room; r = host_room(); print(r.bytes, r.by)"
    limited = ["bash", "-c", f"ulimit -v 4000000 && exec {sys.executable} -c '{code}'"]
    said = subprocess.run(limited, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["4096000000", "ulimit"]


def test_the_command_refuses_with_77_and_loads_no_torch(tmp_path: Path, command: Command) -> None:
    done = command("plan", "--preset", "slm", "--on", "a100-80gb:2", "--what-if", cwd=tmp_path)
    assert done.returncode == 0 and "GO" in done.stdout and "2 x a100-80gb" in done.stdout, done.stderr
    for name in ("t4", "l4", "a10", "l40s", "a100-40gb", "h100-80gb", "rtx3090", "rtx4090", "regular", "llama"):
        assert name in done.stdout
    dear = ["plan", "--preset", "slm", "--on", "t4", "--budget.usd", "2", "--budget.usd_per_hour", "0.5"]
    done = command(*dear, cwd=tmp_path)
    assert done.returncode == 77 and "NO GO" in done.stdout and "--train.steps" in done.stdout
    done = command(*dear, "--json", cwd=tmp_path)
    assert done.returncode == 77 and json.loads(done.stdout)["reasons"] and not done.stderr
    for words, code in ((["--on", "a100"], 2), (["--on", "l4", "--measure"], 2), (["--on", "l4", "--mfu", "2"], 2)):
        assert command("plan", "--preset", "slm", *words, cwd=tmp_path).returncode == code
    assert command("plan", "--train.epochs", "3", "--on", "l4", cwd=tmp_path).returncode == 78
    assert not (tmp_path / "runs").exists(), "nothing is written"
    code = "import sys, lamplighter.commands.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_card_of_this_machine_is_planned_for(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA L4, 23034'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["plan", "--preset", "slm", "--json"]
    done = command(*words, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["device"] == "l4" and found["memory_there_gib"] == pytest.approx(23034 / 1024)
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    done = command(*words, cwd=tmp_path)
    assert json.loads(done.stdout)["device"] == "cpu"
