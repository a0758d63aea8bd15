"""Hugging Face datasets: folders are read in place and ask nobody; a name without a network is an error in seconds."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from test_cursors import check_every_cursor, joined

from lamplighter.data.sources import Source, hub
from lamplighter.errors import BadConfig, BadData, InputMissing
from opening import open_source

datasets = pytest.importorskip("datasets")

ROWS = [f"row {n} é " + "fog " * (n % 9) for n in range(700)]


@pytest.fixture
def no_network(monkeypatch: Any) -> None:
    def no(*_: object, **__: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", no)
    monkeypatch.setattr(socket, "getaddrinfo", no)


@pytest.fixture
def made() -> Any:
    datasets.disable_progress_bars()
    return datasets.Dataset.from_dict({"text": ROWS, "id": list(range(700)), "meta": [{"a": t.upper()} for t in ROWS]})


def opened(folder: Path, **options: Any) -> Source:
    return open_source([f"dataset:{folder}"], None, None, **options)


def test_a_saved_dataset_by_rows(tmp_path: Path, made: Any, no_network: None) -> None:
    made.save_to_disk(str(tmp_path / "one"))
    assert check_every_cursor(lambda: opened(tmp_path / "one"), 8) == ROWS
    datasets.DatasetDict({"train": made, "test": made.select(range(5))}).save_to_disk(str(tmp_path / "dict"))
    assert list(opened(tmp_path / "dict", dataset_split="test").documents()) == ROWS[:5]
    assert list(opened(tmp_path / "dict", text_key="meta.a").documents()) == [row.upper() for row in ROWS]
    with pytest.raises(BadConfig, match="no split valid") as caught:
        opened(tmp_path / "dict", dataset_split="valid")
    assert "train, test" in caught.value.why
    with pytest.raises(BadData, match='no column "txt"') as missing:
        opened(tmp_path / "one", text_key="txt")
    assert "text, id, meta" in missing.value.why and "--data.text_key text" in missing.value.next


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_folder_of_files_by_the_conventions_of_the_library(
    tmp_path: Path, made: Any, no_network: None, kind: str
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(2):
        half = made.select(range(350 * number, 350 * (number + 1)))
        path = str(folder / f"train-{number:05d}-of-00002.{'parquet' if kind == 'parquet' else 'jsonl'}")
        half.to_parquet(path, batch_size=60) if kind == "parquet" else half.to_json(path)
    made.select(range(3)).to_json(str(folder / "test.jsonl")) if kind == "json" else None
    assert check_every_cursor(lambda: opened(folder), 6, alike=False) == ROWS
    first = opened(folder).fingerprint()
    assert opened(folder).fingerprint() == first
    extra = folder / ("train-x.jsonl" if kind == "json" else "notes.txt")
    extra.write_text(json.dumps({"text": "x"}) + "\n")
    assert opened(folder, dataset_split="train").fingerprint() != first


def test_long_and_bad_rows(tmp_path: Path, no_network: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(hub, "PART_CHARS", 50)
    monkeypatch.setattr(hub, "BATCH_ROWS", 16)
    rows: list[str | None] = [f"row {n} " + "word " * (n % 50) for n in range(3000)]
    rows[40], rows[2000] = None, "nul \0 byte"
    made = datasets.Dataset.from_dict({"text": rows})
    made.save_to_disk(str(tmp_path / "one"))
    (tmp_path / "files").mkdir()
    made.to_parquet(str(tmp_path / "files" / "train.parquet"), batch_size=500)
    good = [row for row in rows if row and "\0" not in row]
    for folder in (tmp_path / "one", tmp_path / "files"):
        assert joined(check_every_cursor(lambda folder=folder: opened(folder), 5, alike=False)) == good  # type: ignore[misc]
        with pytest.raises(BadData, match="row 41"):
            list(opened(folder, bad_text="refuse").documents())


def test_damage_in_the_middle_has_a_place(tmp_path: Path, no_network: None) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS * 60) + "{torn\n")
    with pytest.raises(InputMissing, match="at row"):
        list(opened(tmp_path).documents())


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="no such folder"):
        opened(tmp_path / "nothing")


def test_a_silent_host_is_given_up(tmp_path: Path, monkeypatch: Any) -> None:
    """One that takes the connection's first packet and never answers."""
    import huggingface_hub

    def hang(*_: object, **__: object) -> None:
        time.sleep(3)
        raise TimeoutError

    monkeypatch.setattr(hub, "REACH_S", 0.4)
    monkeypatch.setattr(hub.socket, "create_connection", hang)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(InputMissing, match="someone/nothing") as caught:
        open_source(["dataset:someone/nothing"])
    assert "no answer in 0 s" in caught.value.why and caught.value.code == 67


def test_a_dataset_without_a_name_is_not_the_current_folder() -> None:
    with pytest.raises(BadConfig, match="names no dataset"):
        open_source(["dataset:"])
