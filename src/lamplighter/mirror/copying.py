"""The process that copies finished checkpoints to save.mirror: it alone speaks with the store, and may hang, fail or die.

In:  one JSON object on standard input (so that an address with a key in it is in no list of processes): folder, address, id, keep.
Out: checkpoint-N in the store, manifest.json last; RUN/mirror.json, which says how far it is and what is wrong.

The newest checkpoint always goes first, and what became old meanwhile is never copied: a store that is slower than the saves gets
fewer of them, and nothing piles up. It ends when it is asked to (SIGTERM) and the newest checkpoint is whole in the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamplighter import read_back
from lamplighter.config import dump_for_mirror
from lamplighter.errors import InputMissing, LampError, Unreachable
from lamplighter.mirror.store import MANIFEST, Store
from lamplighter.procs.lock import hold as take
from lamplighter.read_back import open_file, read_whole
from lamplighter.rundir import (
    CACHE_NAME,
    VERSIONS,
    RunDir,
    checkpoint_name,
    newest_first,
    read_record,
    sealed,
    step_of,
    verify_manifest,
    write_atomic,
)
from lamplighter.safe_text import clean, mask, mask_record
from lamplighter.train.held import hold, let_go

STALLED_S = 60.0  # without a byte taken: the connection is given up with its process, and tried again
STALLED = 5  # exit code for that
NOT_ALL = 3  # exit code: asked to end before the newest checkpoint was in the store
PAUSES_S = (2.0, 10.0, 60.0, 300.0)  # before a store that failed is tried again
_LOOK_S = 0.5
_ORPHAN_S = 60.0  # to end a copy whose parent was killed
_WRITE_S = 0.5  # between two records of progress
_METRICS_BYTES = 1 << 26  # of a run's history, its newest part
_PIECE_BYTES = 1 << 20
HISTORY = "run"  # in a mirrored checkpoint: the settings and the history of its run
ENDED = f"{HISTORY}/ended.json"  # the run's last status, after its last checkpoint


@dataclass
class MirrorState:
    """How far the copies are: what is in RUN/mirror.json."""

    id: str
    store: str = ""  # for people: without a secret
    step: int = 0  # the newest that is whole in the store
    most: int = 0  # the highest that this folder has ever put there, or has got from there
    problem: str = ""
    kind: str = ""  # of the problem: stalled, refused, failed, missing
    doing: str = ""
    since: float = 0.0  # when the last byte was taken
    bytes: int = 0
    total: int = 0
    done: bool = False  # it was asked to end, and had nothing left to copy
    t: float = 0.0


def read_state(run: RunDir) -> MirrorState:
    """As the last process left it."""
    found, _ = read_back.read_object(run.mirror, read_back.MIRROR)
    known = {name: value for name, value in found.items() if name in MirrorState.__dataclass_fields__}
    return MirrorState(**{"id": "", **{name: value for name, value in known.items() if value is not None}})


def write_state(run: RunDir, state: MirrorState) -> None:
    with contextlib.suppress(OSError):  # a full disk: the next one is as good
        write_atomic(run.mirror, json.dumps(mask_record(vars(state))) + "\n", durable=False, mode=0o600)


@dataclass
class Copier:
    """One run, one store."""

    run: RunDir
    store: Store
    keep: int
    say: Callable[[str], None]
    now: MirrorState = field(default_factory=lambda: MirrorState(""))
    asked_to_end: threading.Event = field(default_factory=threading.Event)
    whole: set[int] | None = None  # steps that are complete in the store; none = it was not asked yet
    damaged: set[int] = field(default_factory=set)  # here
    sent: set[str] = field(default_factory=set)  # files of a copy that was broken off
    written: float = 0.0

    # ---------------------------------------------------------------- life

    def follow(self) -> Iterator[bool]:
        """Until it is asked to end and the newest is copied, or cannot be; after each round, whether it has copied one."""
        failures = 0
        while True:
            ended = self.asked_to_end.is_set()
            try:
                copied = self.copy_one()
                failures = 0
                if ended and not copied:
                    self._finish()
                    return
                yield copied
                if not copied:
                    self.asked_to_end.wait(_LOOK_S)
            except Exception as error:  # noqa: BLE001  each file system has its own: told, and tried again
                self._tell(error)
                if ended and failures:
                    return
                pause = PAUSES_S[min(failures, len(PAUSES_S) - 1)] if not ended else 0.5
                failures += 1
                yield False
                if ended:
                    time.sleep(pause)
                else:
                    self.asked_to_end.wait(pause)

    def copy_one(self) -> bool:
        """The newest checkpoint that the store lacks, else the best; whether there was one."""
        if self.whole is None:
            self._begin()
        assert self.whole is not None
        here = [step_of(path) for path in newest_first(self.run.checkpoints) if (path / MANIFEST).exists()]
        wanted = [*(step for step in here if step not in self.damaged)][:1]
        best = read_back.read_object(self.run.checkpoints / "best.json", read_back.BEST)[0].get("step")
        wanted += [best] if best in here else []
        for step in wanted:
            if step not in self.whole and step not in self.damaged and self._copy(step):
                self._prune(here[0], best)
                return True
        return False

    def _begin(self) -> None:
        """What is in the store already."""
        self._doing("asking the store", 0)
        before = self.store.current()
        if before != self.store.id:
            self.store.make_current()
            if before:
                self.say(f"the run that was in the mirror before is kept there as run-{before}")
        self.whole = {step for step in self.store.steps() if self.store.is_complete(step)}
        self._done()

    def _finish(self) -> None:
        """The run's end goes to its last checkpoint: a finished run is finished elsewhere, too."""
        if self.now.step and (status := read_record(self.run.status)).get("exit_code") is not None:
            self._doing("the run's last status", 0)
            data = json.dumps(mask_record(status)).encode()
            self.store.put(f"{checkpoint_name(self.now.step)}/{ENDED}", iter([data]), self._tick)
        self.now.done = True
        self._done()

    # ---------------------------------------------------------------- one checkpoint

    def _copy(self, step: int) -> bool:
        """All files, then the manifest. False where it was pruned meanwhile, or is damaged here."""
        name = checkpoint_name(step)
        folder = self.run.checkpoint(step)
        if not hold(folder):  # while we hold it, the trainer does not prune it
            return False
        try:
            manifest = read_whole(folder / MANIFEST, read_back.MOST_BYTES)
            if reason := verify_manifest(folder, deep=False):
                return self._leave_out(step, reason)
            files: dict[str, dict[str, Any]] = json.loads(manifest)["files"]
            extra = self._history(folder)
            total = sum(one["bytes"] for one in files.values()) + sum(map(len, extra.values())) + len(manifest)
            self._doing(f"copying {name}", total)
            self.store.remove_manifest(step)
            for file, facts in files.items():
                if not self._send(folder, f"{name}/{file}", folder / file, facts):
                    return self._leave_out(step, f"{file} does not match its checksum")
            for file, data in extra.items():
                self.store.put(f"{name}/{HISTORY}/{file}", iter([data]), self._tick)
            wanted = {file: facts["bytes"] for file, facts in files.items()}
            wanted |= {f"{HISTORY}/{file}": len(data) for file, data in extra.items()}
            there = self.store.sizes(step)
            if wrong := [file for file, size in wanted.items() if there.get(file) != size]:
                self.sent.clear()
                raise OSError(
                    f"{wrong[0]} has {there.get(wrong[0], 0):,} bytes in the store, {wanted[wrong[0]]:,} were sent"
                )
            self.store.put(f"{name}/{MANIFEST}", iter([manifest]), self._tick)
        finally:
            let_go(folder)
        self.sent.clear()
        assert self.whole is not None
        self.whole.add(step)
        self._done()
        return True

    def _send(self, folder: Path, name: str, path: Path, facts: dict[str, Any]) -> bool:
        """One file, hashed on its way; False where it is not what the manifest says."""
        if name in self.sent:
            self._tick(facts["bytes"])
            return True
        import hashlib

        import xxhash

        digest = hashlib.sha256() if "sha256" in facts else xxhash.xxh3_128()

        def pieces() -> Iterator[bytes]:
            with open_file(path) as file:
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
                    yield piece

        self.store.put(name, pieces(), self._tick)
        if digest.hexdigest() != facts.get("sha256", facts.get("xxh3_128")):
            return False
        self.sent.add(name)
        return True

    def _leave_out(self, step: int, reason: str) -> bool:
        self.damaged.add(step)
        self.say(f"{checkpoint_name(step)} is not copied: {reason}")
        self._done()
        return False

    def _history(self, folder: Path) -> dict[str, bytes]:
        """What a resume elsewhere needs besides the checkpoint: settings, time and money spent, metrics, the trained tokenizer."""
        found: dict[str, bytes] = {}
        with contextlib.suppress(
            OSError, LampError
        ):  # a run without settings of its own is resumed by those that are given
            found["config.yaml"] = dump_for_mirror(self.run.config).encode()
        found["status.json"] = json.dumps(mask_record(read_record(self.run.status))).encode()
        found["metrics.jsonl"] = _last_lines(self.run.metrics, _METRICS_BYTES)
        found["best.json"] = json.dumps(read_record(self.run.checkpoints / "best.json")).encode()
        found |= _trained_tokenizer(self.run, folder)
        import xxhash

        files = {
            name: {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)} for name, data in found.items()
        }
        found[MANIFEST] = json.dumps(sealed({**VERSIONS, "files": files})).encode()
        return found

    # ---------------------------------------------------------------- making room

    def _prune(self, newest_here: int, best: int | None) -> None:
        """By the rule of the checkpoints here: the newest `keep`, and the best; and none of a future that the run went back from."""
        assert self.whole is not None
        if newest_here not in self.whole:
            return
        there = self.store.steps()
        beyond = [step for step in there if step > newest_here]
        old = [step for step in there if step <= newest_here and step in self.whole][self.keep :]
        torn = [step for step in there if step < newest_here and step not in self.whole]
        for step in (*beyond, *(step for step in old if step != best), *torn):
            self._doing(f"removing {checkpoint_name(step)}", 0)
            self.store.remove(step)
            self.whole.discard(step)
        self._done()

    # ---------------------------------------------------------------- what the parent reads

    def _doing(self, words: str, total: int) -> None:
        self.now.doing, self.now.bytes, self.now.total, self.now.since = words, 0, total, time.time()
        self._write()

    def _tick(self, count: int) -> None:
        self.now.bytes += count
        self.now.since = time.time()
        if time.monotonic() - self.written > _WRITE_S:
            self._write()

    def _done(self) -> None:
        """The store has answered: nothing is wrong with it."""
        step = max((step for step in self.whole or ()), default=0)
        self.now.step, self.now.most = step, max(self.now.most, step)
        self.now.doing, self.now.problem, self.now.kind, self.now.since = "", "", "", 0.0
        self._write()

    def _tell(self, error: Exception) -> None:
        kind = "failed"
        if isinstance(error, PermissionError | Unreachable) or "denied" in str(error).lower():
            kind = "refused"
        elif isinstance(error, InputMissing):
            kind = "missing"
        what = str(error.what) if isinstance(error, LampError) else f"{type(error).__name__}: {error}"
        words = mask(clean(" ".join(what.split())))[:300]
        if words != self.now.problem:
            self.say(words)
        self.now.problem, self.now.kind, self.now.doing, self.now.since = words, kind, "", 0.0
        self._write()

    def _write(self) -> None:
        self.written, self.now.t = time.monotonic(), time.time()
        write_state(self.run, self.now)


def _last_lines(path: Path, most: int) -> bytes:
    """The whole lines at the end of a file that grows; empty where there is none."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                file.seek(size - most)
                file.readline()
            data = file.read(most)
    except OSError:  # no step was made yet
        return b""
    return data[: data.rfind(b"\n") + 1]


def _trained_tokenizer(run: RunDir, folder: Path) -> dict[str, bytes]:
    """The tokenizer that was trained for this run, under its name in the cache: elsewhere it is not trained again."""
    with contextlib.suppress(OSError):  # one that was given, or the bytes
        ours = read_whole(folder / "tokenizer.json", read_back.MOST_BYTES)
        for kept in sorted((run.path.parent / CACHE_NAME).glob("tokenizer-*/tokenizer.json")):
            if read_whole(kept, read_back.MOST_BYTES) == ours:
                files = [path for path in kept.parent.iterdir() if path.is_file()]
                return {f"{kept.parent.name}/{one.name}": read_whole(one, read_back.MOST_BYTES) for one in files}
    return {}


# ---------------------------------------------------------------- the process


def main() -> int:
    """`python -m lamplighter.mirror.copying`: started by the parent of a run."""
    told, parent = json.load(sys.stdin), os.getppid()
    run = RunDir(Path(told["folder"]))
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lock = take(run.path / "mirror.lock")
    while lock is None:  # that of an earlier start still copies
        time.sleep(0.2)
        if os.getppid() != parent or asked.is_set():
            return NOT_ALL
        lock = take(run.path / "mirror.lock")
    now = MirrorState(told["id"], most=read_state(run).most)
    threading.Thread(target=_leave_with, args=(parent, now, asked), name="lamp-orphan", daemon=True).start()
    threading.Thread(target=_leave_stalled, args=(run, now), name="lamp-stall", daemon=True).start()
    now.doing, now.since = "opening the store", time.time()
    try:
        store = Store(told["address"], run.name, told["id"])
    except LampError as error:
        now.problem, now.kind, now.doing = mask(clean(f"{error.what}: {error.next}")), "missing", ""
        write_state(run, now)
        return error.code
    now.store = store.words
    copier = Copier(run, store, int(told["keep"]), _log, now, asked)
    for _ in copier.follow():
        pass
    sys.stderr.flush()
    os._exit(0 if now.done else NOT_ALL)  # at once: threads of a store's client must not hold us


def _log(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {mask(text)}\n")


def _leave_with(parent: int, now: MirrorState, asked: threading.Event) -> None:
    """A killed parent: the copy that is under way, and the newest checkpoint, have a minute."""
    while os.getppid() == parent:
        time.sleep(0.5)
    asked.set()
    time.sleep(_ORPHAN_S)
    os._exit(NOT_ALL)


def _leave_stalled(run: RunDir, now: MirrorState) -> None:
    """Nothing else ends a write that hangs in a library."""
    while True:
        time.sleep(0.5)
        if now.doing and now.since and time.time() - now.since > STALLED_S:
            now.problem, now.kind = f"{now.doing}: nothing was taken for {STALLED_S:.0f} s", "stalled"
            write_state(run, now)
            os._exit(STALLED)


if __name__ == "__main__":
    sys.exit(main())
