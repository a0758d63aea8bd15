"""What the words of a failing GPU are taken for: recorded texts of public issues, Xids, states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lamplighter import device_faults

TEXTS = Path(__file__).parents[1] / "fixtures" / "device_texts"


def recorded(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (TEXTS / name).read_text().splitlines()]


@pytest.mark.parametrize("one", recorded("first_half.jsonl"), ids=lambda one: one["from"])
def test_the_texts_that_the_rules_were_written_against(one: dict[str, str]) -> None:
    found = device_faults.from_text(one["text"])
    assert found is not None and found.cause == one["cause"]
