"""`lamp data prepare`: the cache that `lamp train` would make, by workers, whatever is killed; and it says what it made."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from lamplighter.data.token_cache import builder
from lamplighter.data.token_cache.reader import CacheSettings, open_tokens
from lamplighter.data.tokenizer import byte_level
from lamplighter.rundir import sealed
from opening import ensure, open_source
from running import LONG, TINY, Command, lamp, shared, start_lamp, wait_for

BYTES = ["--tokenizer.kind", "bytes"]


def content(root: Path) -> dict[str, bytes]:
    (folder,) = (path.parent for path in root.glob("*/manifest.json"))
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def some_text(path: Path, mb: float) -> Path:
    """Numbered lines of made-up words: no two stretches are the same."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghiklmnoprstuw", k=rng.randint(1, 9))) for _ in range(500)] + ["naïve", "£5"]
    rows = [" ".join(rng.choices(words, k=12)) for _ in range(2000)]
    size = 0
    with open(path, "w") as out:
        while size < mb * 1e6:
            start = size
            size += out.write("".join(f"{start + number} {row}\n" for number, row in enumerate(rows)))
    return path


def test_it_makes_what_training_would_and_says_so(tmp_path: Path, here: Command) -> None:
    made = here("data", "prepare", *TINY, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    (folder,) = (path.parent for path in (tmp_path / "runs" / ".cache").glob("*/manifest.json"))
    for words in (
        f"token cache made: runs/.cache/{folder.name}",
        "train",
        "val",
        "on disk:",
        "MB/s",
        "next: lamp train ",
    ):
        assert words in made.stdout, made.stdout
    again = here("data", "prepare", *TINY, "--json", cwd=tmp_path)
    found = json.loads(again.stdout)
    cache = open_tokens(folder)
    assert found["cache"] == f"runs/.cache/{folder.name}" and found["made"] is False
    assert found["splits"]["train"] == {
        "documents": cache.train.documents, "tokens": len(cache.train), "text_bytes": cache.train.text_bytes,
    }  # fmt: skip
    assert found["disk_bytes"] == sum((folder / name).stat().st_size for name in cache.manifest["files"])
    next_words = found["next"].split()
    assert next_words[:2] == ["lamp", "train"] and "--json" not in next_words
    trained = here(*next_words[1:], "--train.steps", "2", cwd=tmp_path)
    assert trained.returncode == 0, trained.stdout
    assert f"token cache reused: runs/.cache/{folder.name}" in trained.stdout
    assert len(list((tmp_path / "runs" / ".cache").glob("*/manifest.json"))) == 1


def test_a_trained_tokenizer_is_kept_for_the_training(tmp_path: Path, here: Command) -> None:
    some_text(tmp_path / "a.txt", 0.3)
    words = ["--data.paths", "a.txt", "--tokenizer.vocab_size", "400", "--runs-dir", "elsewhere"]
    first = here("data", "prepare", *words, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "400 tokens" in first.stdout and "next: lamp train --data.paths a.txt" in first.stdout
    again = here("data", "prepare", *words, cwd=tmp_path)
    assert "tokenizer kept from before" in again.stderr and "token cache found" in again.stdout
    assert not (tmp_path / "runs").exists()


def test_wrong_words_are_said(tmp_path: Path, here: Command) -> None:
    for words, code, said in (
        (["--data.stream", "true"], 78, "nothing to prepare"),
        (["--data.paths", "nowhere.txt"], 66, "nowhere.txt"),
        (["--prset", "demo"], 2, "--preset"),
        (["--data.val_fration", "0.1"], 2, "val_fraction"),
    ):
        done = here("data", "prepare", *words, cwd=tmp_path)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_real_books_by_two_workers_and_by_one(tmp_path: Path, monkeypatch: Any) -> None:
    """Files of all sizes, some with a byte-order mark; the same bytes whoever made them."""
    monkeypatch.setattr(builder, "ALONE_BYTES", 0)
    books = [
        str(shared("london", "gutenberg_raw", name))
        for name in ("dickens_dombey_821-0.txt", "evelyn_diary_v1_41218-0.txt", "london_people_of_the_abyss_1688.txt")
    ]
    source = open_source([*books, str(shared("london", "ordinarys_accounts_txt"))])
    made = [
        content(
            ensure(
                tmp_path / str(workers), source, byte_level(), CacheSettings(0.05, 0, 500_000), workers=workers
            ).parent
        )
        for workers in (1, 2)
    ]
    assert made[0] == made[1] and len([name for name in made[0] if name.endswith(".bin")]) > 10


def children(pid: int) -> dict[str, list[int]]:
    """The child of a command, and its workers."""
    found: dict[str, list[int]] = {"child": [], "workers": []}
    for one in psutil.Process(pid).children(recursive=True):
        try:
            line = " ".join(one.cmdline())
        except psutil.Error:
            continue
        if "lamplighter.commands.child_main" in line:
            found["child"].append(one.pid)
        elif "spawn_main" in line:
            found["workers"].append(one.pid)
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Text for ten units, and the cache that one process makes of it without a break."""
    folder = tmp_path_factory.mktemp("corpus")
    path = some_text(folder / "corpus.txt", 40)
    done = lamp("data", "prepare", *BYTES, "--data.paths", str(path), "--data.workers", "1", cwd=folder)
    assert done.returncode == 0, done.stderr
    return path, content(folder / "runs" / ".cache")


@pytest.mark.parametrize("victim", ["worker", *(pytest.param(name, marks=LONG) for name in ("child", "parent"))])
def test_killed_in_the_middle_it_goes_on(tmp_path: Path, corpus: tuple[Path, dict[str, bytes]], victim: str) -> None:
    path, truth = corpus
    words = ["data", "prepare", *BYTES, "--data.paths", str(path), "--data.workers", "2"]
    going = start_lamp(*words, cwd=tmp_path)
    cache = tmp_path / "runs" / ".cache"
    wait_for(lambda: list(cache.glob("*/unit-*.json")), process=going)
    family = children(going.pid)
    pid = {"worker": family["workers"], "child": family["child"], "parent": [going.pid]}[victim][0]
    os.kill(pid, signal.SIGKILL)
    code = going.wait(20)
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in [*family["workers"], *family["child"]]))
    said = (tmp_path / "out.txt").read_text()
    stored = len(list(cache.glob("*/unit-*.json")))
    assert code != 0 and stored > 0 and not list(cache.glob("*/manifest.json")), said
    if victim == "worker":
        assert code == 71 and "a worker process died while it worked on" in said and "corpus.txt" in said
    done = lamp(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "goes on after" in done.stderr and "of text that a stopped build had stored" in done.stderr
    assert content(cache) == truth


def test_after_a_power_cut_the_bytes_decide(tmp_path: Path, corpus: tuple[Path, dict[str, bytes]]) -> None:
    """Markers of another start of the machine prove nothing: a shard that lost its bytes is made again."""
    path, truth = corpus
    source = open_source([str(path)])
    folder = ensure(tmp_path, source, byte_level(), CacheSettings(0.02), workers=1)
    assert content(tmp_path) == truth
    manifest = json.loads((folder / "manifest.json").read_text())
    one = builder.Builder(folder, byte_level(), CacheSettings(0.02))
    plan = builder.units.plan(source, CacheSettings(0.02))
    assert plan is not None
    (folder / "manifest.json").unlink()
    one.begin(source, plan)
    one.run_plan(source, plan)  # type: ignore[arg-type]
    for marker in folder.glob("unit-*.json"):
        record = json.loads(marker.read_text())
        marker.write_text(json.dumps(sealed({**record, "boot_id": "another"})))
    torn = folder / "train-00003.bin"
    torn.write_bytes(bytes(torn.stat().st_size))
    two = builder.Builder(folder, byte_level(), CacheSettings(0.02))
    assert two.go_on() and sorted(two.records) == [number for number in range(len(plan.units)) if number != 3]
    two.run_plan(source, plan)  # type: ignore[arg-type]
    two.finish(manifest["parts"])
    assert content(tmp_path) == truth
