"""Fill the figures of the README from the benchmarks' results: `make readme`.

In:  README.md with spans such as `<!-- training.ratio_trainer .2f -->1.27<!-- / -->`, and benchmarks/results/*.json, each with
     machine, date, commit, command and its figures by name (a benchmark writes one with --json FILE).
Out: README.md, every span with the figure of today's results; with --check nothing is written, and a stale one is an error;
     with --plans the results of `lamp plan` are made anew first.

Run: .venv/bin/python benchmarks/readme.py [--check] [--plans]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import measured

ROOT = Path(__file__).parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
PRESETS, DEVICES = ("slm", "regular", "modern"), ("t4", "rtx4090", "a100-80gb")
SPAN = re.compile(r"<!-- ([a-z_]+)\.([\w.]+)(?: ([^ ]+))? -->(.*?)<!-- / -->")


def results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Name of the benchmark -> what it wrote."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def plans(presets: tuple[str, ...] = PRESETS, devices: tuple[str, ...] = DEVICES) -> dict[str, float]:
    """Hours and memory of each preset on each device, as `lamp plan` says on paper."""
    figures = {}
    for preset in presets:
        for device in devices:
            words = [sys.executable, "-m", "lamplighter", "plan", "--preset", preset, "--on", device, "--json"]
            told = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
            key = f"{preset}_{device.replace('-', '_')}"
            figures |= {f"{key}_h": round(told["hours"], 3), f"{key}_gib": round(told["memory_gib"], 3)}
    return figures


def fill(text: str, found: dict[str, dict[str, Any]]) -> str:
    """The text with every figure as the results have it; a name that no result has is an error."""

    def figure(match: re.Match[str]) -> str:
        bench, name, how, _ = match.groups()
        if bench not in found or name not in found[bench]["figures"]:
            raise SystemExit(f"README.md quotes {bench}.{name}, and benchmarks/results/{bench}.json has no such figure")
        value = found[bench]["figures"][name]
        shown = format(value, how) if how else f"{value:,}" if isinstance(value, int) else f"{value:g}"
        return f"<!-- {bench}.{name}{f' {how}' if how else ''} -->{shown}<!-- / -->"

    return SPAN.sub(figure, text)


def _renew_plans() -> None:
    """Written only where a figure has changed: the commit in the file is the one that changed it."""
    figures = plans()
    if results().get("plan", {}).get("figures") != figures:
        about = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": measured.commit(), "machine": "on paper"}
        about |= {"command": "lamp plan --preset PRESET --on DEVICE --json", "figures": figures}
        (RESULTS / "plan.json").write_text(json.dumps(about, indent=1) + "\n")


def main() -> None:
    if "--plans" in sys.argv[1:]:
        _renew_plans()
    before = README.read_text()
    after = fill(before, results())
    if after == before:
        print("README.md has the figures of benchmarks/results")
    elif "--check" in sys.argv[1:]:
        old, new = SPAN.findall(before), SPAN.findall(after)
        told = [f"{a[0]}.{a[1]} is {b[3]}, README.md says {a[3]}" for a, b in zip(old, new, strict=True) if a != b]
        raise SystemExit("\n".join([*told, "next: make readme"]))
    else:
        README.write_text(after)
        print("README.md: figures filled in from benchmarks/results")


if __name__ == "__main__":
    main()
