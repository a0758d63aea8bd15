"""The steps of a run that were done twice, because it was killed in between: is every loss the same, to the last bit?

Run: python redone.py runs/NAME
"""

import json
import sys
from collections import defaultdict
from pathlib import Path


def main() -> None:
    losses: dict[int, list[str]] = defaultdict(list)
    for line in (Path(sys.argv[1]) / "metrics.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # a line that the kill cut short
        if "train/loss" in record:
            losses[record["step"]].append(float(record["train/loss"]).hex())
    twice = {step: found for step, found in losses.items() if len(found) > 1}
    for step, found in sorted(twice.items())[-5:]:
        print(f"step {step:4d}   {found[0]}   {found[-1]}")
    equal = sum(len(set(found)) == 1 for found in twice.values())
    print(f"{len(twice)} steps were done twice; {equal} of them are equal to the last bit")


if __name__ == "__main__":
    main()
