"""Copies of checkpoints in a store: whole or not there, the newest first, few; faults of the store are said once and cost nothing."""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lamplighter.config import Save, dump_for_mirror, read_dump, resolve, with_check, with_secrets_of
from lamplighter.config.recorded import dump
from lamplighter.errors import BadConfig, NoCheckpoint
from lamplighter.mirror import copying, fetching, mirroring
from lamplighter.mirror.copying import Copier, MirrorState, read_state, write_state
from lamplighter.mirror.mirroring import Mirroring
from lamplighter.mirror.store import Store, refuse_address
from lamplighter.rundir import RunDir, verify_manifest, write_json, write_manifest


@pytest.fixture
def address() -> Iterator[str]:
    place = f"/mirror-{uuid.uuid4().hex}"
    yield f"memory:/{place}"
    system = fsspec.filesystem("memory")
    if system.exists(place):
        system.rm(place, recursive=True)


def make_run(path: Path) -> RunDir:
    run = RunDir(path)
    run.create()
    run.config.write_text(with_check(dump(resolve(overrides={"train.steps": ["9"]}))))
    write_json(run.status, {"state": "running", "spent_s": 7.5, "host": "elsewhere", "pid": 5})
    run.metrics.write_text('{"step": 1, "train/loss": 2.0}\n')
    return run


def save(run: RunDir, step: int, text: str = "") -> Path:
    folder = run.checkpoint(step)
    (folder / "training").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(f"{text or step} ".encode() * 1000)
    (folder / "training" / "state.json").write_text("{}")
    write_manifest(folder, step=step)
    return folder


def copier_of(run: RunDir, address: str, keep: int = 2, id: str = "00000001") -> Copier:
    return Copier(run, Store(address, run.name, id), keep, lambda text: None, MirrorState(id))


def steps_of(address: str, id: str = "00000001") -> list[int]:
    store = Store(address, "r", id)
    return [step for step in store.steps() if store.is_complete(step)]


def fetch(run: RunDir, address: str, here: int = 0, most: int = 0, id: str = "") -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    request = {"here": here, "most": most, "id": id}
    found = fetching._fetch(run, Store(address, "r"), request, lambda **record: said.append(record.get("passed", "")))
    return found, [one for one in said if one]


def test_the_manifest_is_written_last_and_old_ones_go_as_they_do_here(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, order = make_run(tmp_path / "r"), []
    copier = copier_of(run, address)
    put = Store._put
    monkeypatch.setattr(
        Store, "_put", lambda self, path, *more: (order.append(path.split("/run-")[-1]), put(self, path, *more))[1]
    )
    for step in (10, 20, 30, 40):
        save(run, step)
        write_json(run.checkpoints / "best.json", {"step": 10, "val_loss": 1.0})
        assert copier.copy_one()
        assert order[-1] == f"00000001/checkpoint-{step}/manifest.json"
        assert not any(name.endswith("/manifest.json") and "/run/" not in name for name in order[1:-1])
        order.clear()
        assert not copier.copy_one(), "nothing is left to do"
    assert steps_of(address) == [40, 30, 10], "the newest two, and the best"
    assert copier.now.step == 40 and read_state(run).step == 40


def test_a_slow_store_gets_fewer_and_always_the_newest(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "r")
    copier, put = copier_of(run, address), Store._put

    def slowly(self: Store, path: str, *more: Any) -> None:
        if path.endswith("checkpoint-10/model.safetensors"):  # three more are saved meanwhile
            for step in (20, 30, 40):
                save(run, step)
        put(self, path, *more)

    monkeypatch.setattr(Store, "_put", slowly)
    save(run, 10)
    assert [copier.copy_one() for _ in range(3)] == [True, True, False]
    assert steps_of(address) == [40, 10]


def test_what_is_half_there_or_damaged_is_never_taken_for_whole(tmp_path: Path, address: str) -> None:
    run = make_run(tmp_path / "a" / "r")
    copier = copier_of(run, address, keep=5)
    for step in (10, 20, 30, 40):
        save(run, step)
        copier.copy_one()
    system, root = copier.store.system, copier.store.path("")
    system.rm_file(f"{root}checkpoint-40/manifest.json")  # killed before the commit
    system.pipe_file(f"{root}checkpoint-30/model.safetensors", b"half")
    system.pipe_file(
        f"{root}checkpoint-20/model.safetensors", (run.checkpoint(20) / "model.safetensors").read_bytes()[::-1]
    )
    new = RunDir(tmp_path / "b" / "r")
    new.create()
    found, said = fetch(new, address)
    assert (found["step"], found["fetched"]) == (10, True)
    assert [one.split(" is ")[0] for one in said] == ["checkpoint-30", "checkpoint-20"]
    assert "has 4 bytes" in said[0] and "does not match its checksum" in said[1]
    assert verify_manifest(new.checkpoint(10)) is None
    assert [path.name for path in new.checkpoints.iterdir()] == ["checkpoint-10"], "nothing is left of the others"
    system.pipe_file(f"{root}checkpoint-10/model.safetensors", b"")
    with pytest.raises(NoCheckpoint):
        fetch(RunDir(tmp_path / "c" / "r"), address)


def test_a_store_that_loses_bytes_gets_no_manifest(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, put = make_run(tmp_path / "r"), Store._put

    def loses(self: Store, path: str, pieces: Iterator[bytes], tick: Callable[[int], None]) -> None:
        put(self, path, (piece[:-1] if path.endswith("model.safetensors") else piece for piece in pieces), tick)

    monkeypatch.setattr(Store, "_put", loses)
    save(run, 10)
    copier = copier_of(run, address)
    with pytest.raises(OSError, match="bytes in the store"):
        copier.copy_one()
    assert steps_of(address) == []
    monkeypatch.setattr(Store, "_put", put)
    assert copier.copy_one() and steps_of(address) == [10]


def test_a_checkpoint_that_is_damaged_here_is_not_copied(tmp_path: Path, address: str) -> None:
    run = make_run(tmp_path / "r")
    said: list[str] = []
    copier = copier_of(run, address)
    copier.say = said.append
    save(run, 10)
    folder = save(run, 20)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[::-1])
    assert not copier.copy_one() and said == [
        "checkpoint-20 is not copied: model.safetensors does not match its checksum"
    ]
    assert copier.copy_one() and steps_of(address) == [10]


def test_the_steps_of_a_future_that_was_left_are_not_resumed_from(tmp_path: Path, address: str) -> None:
    """--resume checkpoint-10 after checkpoint-30: the mirror follows, and a folder that went back does not fetch what it left."""
    run = make_run(tmp_path / "r")
    copier = copier_of(run, address, keep=5)
    for step in (10, 20, 30):
        save(run, step)
        copier.copy_one()
    for step in (20, 30):
        shutil.move(run.checkpoint(step), run.checkpoints / f"aside-checkpoint-{step}-1")
    assert fetch(run, address, here=10, most=30, id="00000001")[0] == {"id": "00000001", "step": 30}, "nothing fetched"
    save(run, 20, "other")
    copier.copy_one()
    copier = copier_of(run, address, keep=5)  # the next start of the run
    save(run, 25)
    assert copier.copy_one() and steps_of(address) == [25, 20, 10]


def test_another_run_of_the_same_name_is_not_mixed_with(tmp_path: Path, address: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(fetching.child, "run", _here)
    first, second = make_run(tmp_path / "a" / "r"), make_run(tmp_path / "b" / "r")
    save(first, 10)
    copier_of(first, address).copy_one()
    save(second, 5)
    settings = resolve(overrides={"save.mirror": [address]}).run
    with pytest.raises(BadConfig, match=r"another run of the name r .run-00000001, up to step 10"):
        fetching.prepare(second, settings, lambda *words: None, anew=False)
    named = fetching.prepare(second, settings, lambda *words: None, anew=True)  # --resume never
    said: list[str] = []
    copier = copier_of(second, address, id=named)
    copier.say = said.append
    copier.copy_one()
    assert "kept there as run-00000001" in said[0]
    assert steps_of(address, named) == [5] and steps_of(address) == [10]


def _here(function: str, request: dict[str, Any], on_record: Any, **_: Any) -> Any:
    fetching.fetch_child(request, lambda **record: on_record(record))
    return fetching.child.Outcome([], 0, 0.1, "", 1, done=True)


def test_a_new_machine_gets_settings_spent_time_metrics_and_no_secret(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching.child, "run", _here)
    run = make_run(tmp_path / "a" / "r")
    words = {"data.paths": ["s3://key:sesame@bucket/a.jsonl"], "watch.notify": ["https://hooks.slack.com/services/sesame"],
             "save.mirror": [f"{address}?token2=sesame"], "train.lr": ["0.002"]}  # fmt: skip
    run.config.write_text(with_check(dump(resolve(overrides=words))))
    assert "token2=sesame" not in run.config.read_text()
    save(run, 10)
    copier_of(run, address).copy_one()
    system = fsspec.filesystem("memory")
    assert not any(b"sesame" in system.cat_file(path) for path in system.find(address.removeprefix("memory:/")))
    new, said = RunDir(tmp_path / "b" / "r"), []
    new.create()
    given = resolve(overrides={**words, "save.mirror": [address]}).run
    assert fetching.prepare(new, given, lambda *words: said.append(words[0]), anew=False) == "00000001"
    assert "checkpoint-10, config.yaml, status.json, metrics.jsonl" in said[0] and "every hash checked" in said[0]
    recorded = read_dump(new.config)
    assert (recorded.run.train.lr, recorded.run.data.paths) == (0.002, words["data.paths"]) and not recorded.changed
    status = json.loads(new.status.read_text())
    assert (status["spent_s"], status["state"]) == (7.5, "stopped") and "host" not in status
    assert new.metrics.read_text() == run.metrics.read_text() and read_state(new).most == 10
    assert not (new.checkpoint(10) / "run").exists() and verify_manifest(new.checkpoint(10)) is None
    assert with_secrets_of(read_dump(new.config), given) is None
    assert "sesame" not in dump_for_mirror(new.config)


@pytest.mark.parametrize(
    ("error", "words"),
    [(PermissionError("403 Forbidden"), "refuses what is copied"), (ConnectionError("reset"), "cannot be used")],
)
def test_a_store_that_refuses_is_said_once(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    monkeypatch.setattr(copying, "PAUSES_S", (0.0,))
    run, said = make_run(tmp_path / "r"), []
    save(run, 10)
    copier, put = copier_of(run, address), Store._put

    def refuse(*_: Any) -> None:
        raise error

    parent = Mirroring(run, Save(mirror=address), "00000001", lambda *words: said.append(words[0]))
    monkeypatch.setattr(Store, "_put", refuse)
    rounds = copier.follow()
    for _ in range(4):
        assert next(rounds) is False
        parent.look()
    assert len(said) == 1 and words in said[0] and "the run goes on" in said[0]
    monkeypatch.setattr(Store, "_put", put)
    assert next(rounds) is True
    parent.look()
    assert len(said) == 2 and "works again: step 10" in said[1]


def test_a_store_that_hangs_is_said_once_and_its_process_ends_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent only reads a file: it waits for nothing. What hangs in a library ends with its process."""
    monkeypatch.setattr(mirroring, "SILENT_S", 0.0)
    run, said = make_run(tmp_path / "r"), []
    now = MirrorState("00000001", doing="copying checkpoint-10", since=time.time() - 1)
    write_state(run, now)
    parent = Mirroring(run, Save(mirror="memory://x"), "00000001", lambda *words: said.append(words[0]))
    for _ in range(3):
        parent.look()
    assert len(said) == 1 and "does not answer (copying checkpoint-10: nothing was taken" in said[0]
    left: list[int] = []

    def leave(code: int) -> None:
        left.append(code)
        raise SystemExit

    monkeypatch.setattr(copying, "STALLED_S", 0.1)
    monkeypatch.setattr(copying.os, "_exit", leave)
    with pytest.raises(SystemExit):
        copying._leave_stalled(run, now)
    assert left == [copying.STALLED] and read_state(run).kind == "stalled"


def test_an_address_that_cannot_be_written_to_is_refused() -> None:
    with pytest.raises(BadConfig) as refused:
        refuse_address("https://key:sesame@example.org/x?sig=sesame")
    assert "sesame" not in "".join(refused.value.lines()) and "takes no files" in refused.value.why
