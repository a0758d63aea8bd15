"""The zoo under `lamp watch`: scripts of the field that know nothing of us, each verdict compared with the truth."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from truth import CASES, Case, command_of, culprit_lines

from lamplighter.rundir import RunDir
from running import FULL, LONG, Row, verdicts_of
from watched import marks, watching

QUICK = {"two_ranks_stuck", "zoo_worker_sigkill", "calm_pauses_5s"}
DEADLINE_S = 60.0


def watched(case: Case, folder: Path) -> tuple[int | None, RunDir]:
    """Run it under the watcher, until it ends or, if it never does, until it is named; its code, and its folder."""
    words = command_of(case, sys.executable, 1.0 if FULL else 0.4 if case.kind == "innocent" else 1.0)
    with watching(words, folder) as (going, run):
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and going.poll() is None:
            named = {verdict["cause"] for verdict in verdicts_of(run)}
            if case.exit_code is None and named & set(case.causes):
                time.sleep(0.5)
                return None, run
            time.sleep(0.1)
        return going.poll(), run


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=() if case.name in QUICK else LONG) for case in CASES]
)
def test_the_truth_is_told(tmp_path: Path, case: Case, zoo_row: Row) -> None:
    if "mount" in case.needs and subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    code, run = watched(case, tmp_path)
    said = verdicts_of(run)
    told = "\n".join(f"{v['state']} {v['cause']} {v['culprit']}: {v['why']}" for v in said)
    told += "\n" + (tmp_path / "out.txt").read_text()[-2500:]
    assert code == case.exit_code, told
    if case.kind in ("healthy", "innocent", "slow"):
        assert not [verdict for verdict in said if verdict["state"] == "stuck"], told
    if case.kind in ("healthy", "innocent"):
        zoo_row(case.name, "none", "none", code or 0)
        return
    began, pid = marks(tmp_path)["fault"][0]
    found = [verdict for verdict in said if verdict["cause"] in case.causes and verdict["t"] >= began]
    assert found, told
    first = next((one for one in found if "line" in one["culprit"]), found[0])
    took = first["t"] - began
    assert took < max(7.0, case.within_s), told
    check_culprit(case, first, pid, told)
    zoo_row(case.name, float(took), first["action"], -1 if code is None else code)


def check_culprit(case: Case, first: dict[str, Any], pid: int, told: str) -> None:
    """The line, the worker and its item, the rank, the process."""
    where = first["culprit"]
    if "line" in where and where.get("file", "").endswith(case.culprit["file"]):
        assert where["line"] in culprit_lines(case), told
    elif case.kind != "dead":
        pytest.fail(f"no line is named\n{told}")
    if "worker" in case.culprit and "worker" in where:
        assert where["worker"] == case.culprit["worker"], told
        low, _, high = str(where["item"]).partition("..")
        if low.isdecimal() and (high.isdecimal() or not high):
            assert int(low) <= case.culprit["item"] <= int(high or low), told
    if "rank" in case.culprit:
        assert where.get("rank") == case.culprit["rank"], told
    if "signal" in case.culprit:
        assert where.get("signal") == case.culprit["signal"], told
    if case.culprit.get("code"):
        assert where.get("code") == case.culprit["code"], told
