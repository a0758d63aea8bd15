"""What starts processes: Instruction rows: every kind is found, every fault is named with its place, the cache is built once and never trusted."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_examples import BAD, TEMPLATE, many, source_of, write_lines

from lamplighter.data.chat import example_cache
from lamplighter.data.chat.example_cache import ensure, open_examples


def test_the_number_of_workers_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "x.jsonl", [*many(900), *BAD])
    monkeypatch.setattr(example_cache, "MANY_BYTES", 0)
    folders = [ensure(tmp_path / str(n), source_of(path), TEMPLATE, 0.1, workers=n) for n in (1, 3)]
    for name in ("examples.bin", "index.npy"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    one, three = (open_examples(folder).manifest for folder in folders)
    assert {**one, "seconds": 0, "check": ""} == {**three, "seconds": 0, "check": ""}
