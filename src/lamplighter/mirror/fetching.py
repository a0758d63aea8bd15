"""A run on a new machine: its newest checkpoint out of save.mirror, checked by its hashes, with what else a resume needs.

In:  a run folder without checkpoints (or with older ones than the store), an address.
Out: checkpoints/checkpoint-N whole, config.yaml, status.json, metrics.jsonl, the trained tokenizer; or nothing, and why.

The store is asked in a process of its own with a deadline. Where nothing is here to go on from and the store cannot be asked, the
run does not begin anew in silence: that would be another run under the same name.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import read_back
from lamplighter.config import Resolved, dump, read_dump, with_check, with_secrets_of
from lamplighter.errors import BadConfig, InputMissing, LampError, NoCheckpoint, Unreachable
from lamplighter.mirror.copying import ENDED, HISTORY, MirrorState, read_state, write_state
from lamplighter.mirror.mirroring import new_id
from lamplighter.mirror.store import MANIFEST, Store, refuse_address
from lamplighter.procs import child
from lamplighter.rundir import (
    CACHE_NAME,
    RunDir,
    checkpoint_name,
    human_bytes,
    newest_first,
    read_record,
    step_of,
    verify_manifest,
    write_atomic,
    write_json,
)
from lamplighter.safe_text import clean, mask, mask_address

if TYPE_CHECKING:
    from lamplighter.config import Run

Say = Callable[..., None]
_STALLED_S = 60.0  # without a byte
_TELL_S = 2.0
_OF_A_PROCESS = (
    "host",
    "boot_id",
    "pid",
    "pid_start",
    "child_pid",
    "exit_code",
    "now",
    "stall",
    "track",
    "mirrored_step",
)


@dataclass(frozen=True)
class _Found:
    """What the store says of a run's name."""

    id: str = ""
    step: int = 0


# ---------------------------------------------------------------- in the parent


def prepare(run: RunDir, settings: Run, say: Say, anew: bool) -> str:
    """Bring what is newer in the mirror; the id under which this run is copied from now on."""
    address = settings.save.mirror
    assert address is not None
    refuse_address(address)
    before, here = read_state(run), newest_first(run.checkpoints)
    if anew:
        return before.id or new_id()
    newest = max(map(step_of, here), default=0)
    request = {
        "folder": str(run.path),
        "address": address,
        "id": before.id,
        "here": newest,
        "most": max(before.most, newest) if before.id else newest,
    }
    try:
        outcome = _ask(request, say, mask_address(address))
    except Unreachable as error:
        if not here:
            raise
        say(f"WARNING  {error.what} ({error.why}); the run goes on from what is here", "bold yellow")
        return before.id or new_id()
    found = _Found(str(outcome.get("id") or ""), int(outcome.get("step") or 0))
    if found.id and here and found.id != before.id:
        if not found.step:
            return before.id or new_id()
        raise BadConfig(
            f"the mirror holds another run of the name {run.name} (run-{found.id}, up to step {found.step})",
            f"the checkpoints in {run.path} are not of that run",
            "another name (--run) or address; --resume never begins anew; or move the folder away to go on from the mirror",
        )
    if outcome.get("fetched"):
        _settle(run, settings, outcome, say, mask_address(address))
        write_state(run, MirrorState(found.id, mask_address(address), found.step, max(found.step, before.most)))
    return found.id or before.id or new_id()


def _ask(request: dict[str, Any], say: Say, where: str) -> dict[str, Any]:
    """The store's answer, with progress while it takes long."""
    heard, told = [time.monotonic()], [time.monotonic()]
    last: dict[str, Any] = {}

    def hear(record: dict[str, Any]) -> None:
        heard[0] = time.monotonic()
        last.update(record)
        if passed := record.get("passed"):
            say(f"WARNING  {where}: {clean(str(passed))}", "bold yellow")

    def tick(seconds: float) -> None:
        if time.monotonic() - told[0] > _TELL_S:
            told[0] = time.monotonic()
            doing = clean(str(last.get("doing") or f"asking {where} for checkpoints"))
            part = f", {human_bytes(last['bytes'])} of {human_bytes(last['total'])}" if last.get("total") else ""
            say(f"mirror: {doing}{part}, for {seconds:.0f} s")

    ended = child.run(
        "lamplighter.mirror.fetching:fetch_child",
        request,
        on_record=hear,
        on_tick=tick,
        is_stuck=lambda records: time.monotonic() - heard[0] > _STALLED_S,
    )
    if error := last.get("error"):
        kinds = {kind.code: kind for kind in (InputMissing, NoCheckpoint, Unreachable, BadConfig)}
        raise kinds.get(error["code"], Unreachable)(error["what"], error["why"], error["next"])
    if not ended.done:
        why = f"no answer for {_STALLED_S:.0f} s" if ended.ended_for else f"its process {mask(ended.how())}"
        raise _not_asked(where, why)
    return last


def _not_asked(where: str, why: str) -> Unreachable:
    return Unreachable(
        f"{where} cannot be asked for checkpoints of this run",
        why,
        "run the same command again; to begin without what may be there: --resume never",
    )


def _settle(run: RunDir, settings: Run, outcome: Mapping[str, Any], say: Say, where: str) -> None:
    """What has come, at its place; what is here already stays."""
    step = int(outcome["step"])
    folder = run.checkpoint(step)
    history, taken = folder / HISTORY, [checkpoint_name(step)]
    reason = verify_manifest(history) if history.is_dir() else "it is missing"
    if reason:
        say(f"WARNING  the settings and the history of the run are not taken from {where}: {reason}", "bold yellow")
    else:
        taken += _take_history(run, history, settings)
    shutil.rmtree(history, ignore_errors=True)
    write_json(run.checkpoints / "latest.json", {"step": step, "path": folder.name, "t": time.time()})
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    say(
        f"fetched from {where}: {', '.join(taken)} ({human_bytes(size)} in {outcome.get('seconds', 0):.1f} s, every hash"
        f" checked); the run goes on from step {step}",
        "green",
    )
    best = read_back.read_object(run.checkpoints / "best.json", read_back.BEST)[0].get("step")
    if best is not None and not run.checkpoint(best).exists():
        say(f"note  the best so far, {checkpoint_name(best)}, stays in the mirror")


def _take_history(run: RunDir, history: Path, settings: Run) -> list[str]:
    """The settings, spent time and money, metrics, the tokenizer; the names of what was taken."""
    taken = []
    if not run.config.exists() and (history / "config.yaml").exists():
        text = (history / "config.yaml").read_text()
        write_atomic(run.config, text, mode=0o600)
        recorded = read_dump(run.config)
        if (whole := with_secrets_of(recorded, settings)) is not None:
            write_atomic(run.config, with_check(dump(Resolved(whole, recorded.origin))), mode=0o600)
        taken.append("config.yaml")
    if not run.status.exists():
        status = read_record(history / Path(ENDED).name) or read_record(history / "status.json")
        ended = status.get("state") if status.get("state") not in ("running", "stopping") else "stopped"
        kept = {name: value for name, value in status.items() if name not in _OF_A_PROCESS}
        write_json(run.status, {**kept, "state": ended or "stopped"})
        taken.append("status.json")
    for name, place in (("metrics.jsonl", run.metrics), ("best.json", run.checkpoints / "best.json")):
        if not place.exists() and (history / name).stat().st_size > 2:
            shutil.copyfile(history / name, place)
            taken += [name] if name == "metrics.jsonl" else []
    for folder in sorted(history.glob("tokenizer-*")):
        place = run.path.parent / CACHE_NAME / folder.name
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            arriving = place.with_name(f".{place.name}.{os.getpid()}")
            shutil.copytree(folder, arriving)
            arriving.rename(place)
            taken.append("the tokenizer")
    return taken


# ---------------------------------------------------------------- in a process of its own


def fetch_child(request: dict[str, Any], say: child.Say) -> None:
    """Look for the newest complete checkpoint, and bring it where it is newer than what is here."""
    try:
        run = RunDir(Path(request["folder"]))
        store = Store(request["address"], run.name)
        say(**_fetch(run, store, request, say))
    except LampError as error:
        say(error={"code": error.code, "what": error.what, "why": error.why, "next": error.next})
    except Exception as error:  # noqa: BLE001  each file system has its own
        words = mask(clean(f"{type(error).__name__}: {' '.join(str(error).split())}"))[:300]
        away = _not_asked(mask_address(request["address"]), words)
        say(error={"code": away.code, "what": away.what, "why": away.why, "next": away.next})


def _fetch(run: RunDir, store: Store, request: Mapping[str, Any], say: child.Say) -> dict[str, Any]:
    store.id = store.current()
    if not store.id:
        return {"id": "", "step": 0}
    steps = [step for step in store.steps() if store.is_complete(step)]
    newest = max(steps, default=0)
    stranger = request["here"] and store.id != request["id"]
    if (
        stranger or newest <= request["most"]
    ):  # of what this folder itself has copied, what is here is newer or went back
        return {"id": store.id, "step": newest}
    began = time.monotonic()
    for step in (step for step in steps if step > request["here"]):
        reason = _bring(run, store, step, say)
        if reason is None:
            return {"id": store.id, "step": step, "fetched": True, "seconds": time.monotonic() - began}
        say(passed=f"{checkpoint_name(step)} is passed over: {reason}")
    if request["here"]:
        return {"id": store.id, "step": newest}
    raise NoCheckpoint(
        f"none of the {len(steps)} checkpoints in {store.words} is valid",
        "each was damaged (see the warnings above)",
        "begin anew with --resume never; what is there is kept",
    )


def _bring(run: RunDir, store: Store, step: int, say: child.Say) -> str | None:
    """One checkpoint under a temporary name, verified, renamed; else the reason why it cannot be used."""
    name = checkpoint_name(step)
    arriving = run.checkpoints / f".writing-{name}-{os.getpid()}"  # what is left of it is cleared away by the next save
    shutil.rmtree(arriving, ignore_errors=True)
    sizes = store.sizes(step)
    manifest = read_back.parse_object(store.text(f"{name}/{MANIFEST}"))
    files = manifest.get("files") if manifest is not None else None
    if not isinstance(files, dict):
        return "manifest.json is damaged"
    history = [one for one in sizes if one.startswith(f"{HISTORY}/")]
    wanted = [one for one in (*files, *history, MANIFEST) if _is_inside(one)]
    total, arrived = sum(sizes.get(one, 0) for one in wanted), 0
    try:
        for one in sorted(wanted, key=lambda one: one == MANIFEST):
            if one not in sizes:
                return f"{one} is missing"
            path = arriving / one
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                for piece in store.pieces(f"{name}/{one}", sizes[one], lambda words, at: None):
                    file.write(piece)
                    arrived += len(piece)
                    say(doing=f"fetching {name}", bytes=arrived, total=total)
                file.flush()
                os.fsync(file.fileno())
        if (reason := verify_manifest(arriving)) is not None:
            return reason
        arriving.rename(run.checkpoint(step))
        return None
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def _is_inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts
