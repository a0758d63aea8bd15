"""Where a model comes from: a folder here or a name on the hub; and who it is, by the hash of its files. No torch.

In:  model.init_from and model.revision; a run's folder, in which the commit of a hub name is kept.
Out: a local folder; base.json, which says what an adapter was trained on, and the check of a base against it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lamplighter import read_back, report
from lamplighter.config import Model, Run
from lamplighter.errors import BadConfig, InputMissing, Unreachable
from lamplighter.model.stored import weight_files
from lamplighter.rundir import hash_file, human_bytes, newest_first, read_record, write_json

RECORD = "base.json"
_KEPT = "model_source.json"
_HUB_NAME = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
_WEIGHTS = "*.safetensors"
_WANTED = ("*.json", _WEIGHTS, "*.txt", "*.model", "*.jinja", "*.tiktoken")
_UNWANTED = ("original/*", "onnx/*", "*/*")
_ANSWER_S = 10.0  # for the hub's first answer: offline is known in seconds


def is_hub_name(given: str) -> bool:
    return not Path(given).exists() and re.fullmatch(_HUB_NAME, given) is not None


def with_local_model(run: Run, keep: Path | None = None, *, weights: bool = True) -> Run:
    """The run with a folder of this machine in model.init_from, downloaded if need be; `keep`: the run's own folder.

    Without `weights` their files are left out: a plan on paper and figures of the rows need the small ones alone.
    """
    given = run.model.init_from
    if given is None:
        return run
    if not is_hub_name(given):
        if Path(given).is_file():
            raise _is_a_file(Path(given))
        if not Path(given).is_dir():
            moved = "if the base was moved, say where it is now: --model.init_from FOLDER (it is known by its hash)"
            advice = moved if run.lora.r else "check the path"
            raise InputMissing(f"model.init_from {given} is not there", "no such folder", advice)
        _refuse_no_model(Path(given))
        return run
    with report.phase("model of the hub"):
        folder = _from_hub(run.model, keep, weights)
    return replace(run, model=replace(run.model, init_from=str(folder)))


def _refuse_no_model(folder: Path) -> None:
    """An adapter or a run in the place of a model: common mistakes, said before anything is read."""
    if (folder / "config.json").is_file():
        return
    what, shown = f"model.init_from {folder}", shlex.quote(str(folder))
    if (folder / "adapter_config.json").is_file():
        merge = f"lamp export {shown} --to hf --merge --out DIR, then --model.init_from DIR"
        raise BadConfig(
            f"{what} is an adapter", "training begins with a whole model, not with what was added to one", merge
        )
    if found := newest_first(folder / "checkpoints"):
        _refuse_no_model(found[0])
        raise BadConfig(
            f"{what} is a run",
            "a model is in one of its checkpoints",
            f"--model.init_from {shlex.quote(str(found[0]))}",
        )
    if packed := sorted(folder.glob("*.gguf")):
        raise _is_a_file(packed[0])
    raise InputMissing(f"{what} is not a model folder", "it has no config.json", "check the path")


def _is_a_file(path: Path) -> BadConfig:
    """Training begins with a folder: config.json, safetensors and a tokenizer."""
    if path.suffix.lower() == ".gguf":
        return BadConfig(
            f"{path} is a model packed for llama.cpp (GGUF), which cannot be trained",
            "training wants a folder with config.json, model.safetensors and tokenizer.json; transformers can make one of it",
            f"AutoModelForCausalLM and AutoTokenizer.from_pretrained({str(path.parent)!r}, gguf_file={path.name!r}), and save_pretrained(DIR)"
            " of both (docs/finetuning.md has the lines); then --model.init_from DIR",
        )
    inside = (path.parent / "config.json").is_file()
    advice = f"--model.init_from {shlex.quote(str(path.parent))}" if inside else "give the folder of the whole model"
    return BadConfig(
        f"model.init_from {path} is a file", "a model is a folder, with config.json, weights and tokenizer", advice
    )


def _from_hub(section: Model, keep: Path | None, weights: bool) -> Path:
    """A snapshot in the hub's own cache. The commit is resolved once, at a run's first start."""
    name, kept = str(section.init_from), read_record(keep / _KEPT) if keep is not None else {}
    commit = kept.get("commit") if kept.get("name") == name and kept.get("revision") == section.revision else None
    found, commit = download(name, str(commit) if commit else section.revision, weights=weights)
    if keep is not None:
        write_json(keep / _KEPT, {"name": name, "revision": section.revision, "commit": commit, "path": str(found)})
    report.note(f"{name} at commit {commit[:12]}: {found}")
    return found


def hub_name_of(keep: Path | None) -> dict[str, Any]:
    """{"name", "commit"} of a run whose base came from the hub."""
    kept = read_record(keep / _KEPT) if keep is not None else {}
    return {key: kept[key] for key in ("name", "commit") if isinstance(kept.get(key), str)}


def download(name: str, revision: str | None, *, weights: bool = True) -> tuple[Path, str]:
    """The snapshot folder of a hub name, and its commit; what is in the cache is not fetched again."""
    try:
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.errors import (
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise BadConfig(
            f"{name} is a name on the hub", f"huggingface_hub is missing ({error})", "pip install 'lamplighter[hf]'"
        ) from error
    there = cached(name, revision, weights=weights)
    if there is not None and revision is not None and there.name == revision:
        return there, revision  # a commit never changes
    broken: tuple[type[Exception], ...] = (HfHubHTTPError, LocalEntryNotFoundError, *network_errors())
    try:
        info = huggingface_hub.HfApi().model_info(name, revision=revision, timeout=_ANSWER_S, files_metadata=True)
    except RepositoryNotFoundError as error:
        why = f"{constants.ENDPOINT} has no model of this name, or you may not see it"
        raise InputMissing(
            f"there is no {name} on the hub", why, "check the name; for a private one: hf auth login"
        ) from error
    except RevisionNotFoundError as error:
        raise InputMissing(
            f"{name} has no revision {revision}", "the hub does not know it", "--model.revision main"
        ) from error
    except broken as error:
        if there is not None:
            report.warn(
                f"the hub cannot be reached ({_short(error)}): {name} is taken from the cache, commit {there.name[:12]}"
            )
            return there, there.name
        what = f"{name} cannot be fetched: the hub cannot be reached, and it is not in the cache"
        advice = f"go online; or fetch it elsewhere (hf download {shlex.quote(name)} --local-dir DIR) and --model.init_from DIR"
        raise Unreachable(what, _short(error), advice) from error
    files = [one for one in info.siblings or [] if _is_wanted(one.rfilename)]
    if not any(one.rfilename.endswith(".safetensors") for one in files):
        raise InputMissing(
            f"{name} has no safetensors on the hub", "weights are never read from pickles", "choose another"
        )
    wanted = [pattern for pattern in _WANTED if weights or pattern != _WEIGHTS]
    files = [one for one in files if weights or not one.rfilename.endswith(_WEIGHTS[1:])]
    total = sum(one.size or 0 for one in files)
    with report.phase("download", total=total, unit="B") as phase:
        stop = threading.Event()
        watcher = threading.Thread(target=_show_progress, args=(phase, name, stop), daemon=True)
        watcher.start()
        try:
            path = huggingface_hub.snapshot_download(
                name,
                revision=revision,  # not the commit: under the branch's name it is found again without a network
                allow_patterns=wanted,
                ignore_patterns=list(_UNWANTED),
                etag_timeout=_ANSWER_S,
            )
        except broken as error:
            what = f"the download of {name} broke off"
            raise Unreachable(what, _short(error), "the same command goes on where it stopped") from error
        finally:
            stop.set()
            watcher.join()
    report.note(f"{name}: {human_bytes(total)} in {len(files)} files")
    return Path(path), Path(path).name


def network_errors() -> tuple[type[Exception], ...]:
    """What a broken connection raises: of the hub's client, whichever library it is built on, and of the system."""
    found: list[type[Exception]] = [OSError]
    for name in ("httpx", "httpx2", "requests"):
        library = sys.modules.get(name)
        found += [
            kind for kind in (getattr(library, "HTTPError", None), getattr(library, "RequestException", None)) if kind
        ]
    return tuple(found)


def _is_wanted(name: str) -> bool:
    return "/" not in name and name.endswith(tuple(pattern[1:] for pattern in _WANTED))


def cached(name: str, revision: str | None, *, weights: bool = True) -> Path | None:
    """The snapshot in the hub's own cache, asked without a network; None where it is not there, or not whole."""
    try:
        import huggingface_hub

        folder = Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
        if weights:
            weight_files(folder)
    except (ImportError, OSError, ValueError):  # a FileNotFoundError of a file that has not come yet is one, too
        return None
    return folder if (folder / "config.json").is_file() else None


def _show_progress(phase: report.Phase, name: str, stop: threading.Event) -> None:
    """The library's own bars are for terminals: here the bytes in its cache are counted."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"
    began, done = _bytes_in(folder), 0
    while not stop.wait(0.5):
        now = _bytes_in(folder) - began
        phase.tick(max(0, now - done), name)
        done = max(done, now)


def _bytes_in(folder: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    except OSError:  # not there yet, or a part was renamed meanwhile
        return 0


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# ---------------------------------------------------------------- the base of an adapter


@dataclass(frozen=True)
class Base:
    """What an adapter was trained on."""

    path: str
    hashes: dict[str, str]  # of config.json and the weight files
    dtype: str = "fp32"
    name: str | None = None  # on the hub
    commit: str | None = None

    def record(self) -> dict[str, Any]:
        hub = {"name": self.name, "commit": self.commit}
        return {"format": 1, "path": self.path, "dtype": self.dtype, "hashes": self.hashes, **hub}


def identify(folder: Path, dtype: str, hub: dict[str, Any] | None = None) -> Base:
    """The base in a folder, by the hash of each of its files."""
    try:
        paths = [folder / "config.json", *weight_files(folder)]
    except (FileNotFoundError, ValueError) as error:
        raise InputMissing(f"{folder} has no weights", str(error), "expected model.safetensors") from error
    with report.phase("hash base", total=sum(path.stat().st_size for path in paths), unit="B") as phase:
        hashes = {path.name: hash_file(path, lambda n, path=path: phase.tick(n, path.name)) for path in paths}  # type: ignore[misc]
    return Base(str(folder.resolve()), hashes, dtype, **(hub or {}))


def read_base(folder: Path) -> Base | None:
    """base.json of an adapter folder; None where it has none."""
    if not (folder / RECORD).exists():
        return None
    found, damage = read_back.read_object(
        folder / RECORD, {"path": read_back.TEXT, "hashes": read_back.OBJECT, "dtype": read_back.TEXT}
    )
    hashes = found.get("hashes") or {}
    if (
        damage
        or not all(isinstance(value, str) for value in hashes.values())
        or found.get("dtype") not in ("fp32", "bf16", "int8")
    ):
        raise BadConfig(f"{folder / RECORD} is damaged", damage or "hashes or dtype is wrong", "use an intact copy")
    texts = {key: found.get(key) if isinstance(found.get(key), str) else None for key in ("name", "commit")}
    return Base(str(found["path"]), dict(hashes), str(found["dtype"]), **texts)


def refuse_other_base(known: Base, now: Base, where: str) -> None:
    """An adapter means nothing on another model, or on the same one with other weights."""
    if known.hashes == now.hashes:
        return
    changed = sorted({*known.hashes, *now.hashes} - {n for n, h in now.hashes.items() if known.hashes.get(n) == h})
    name = changed[0]
    raise BadConfig(
        f"{now.path} is not the base that {where} was trained on",
        f"{', '.join(changed)}: then {known.hashes.get(name, 'not there')}, now {now.hashes.get(name, 'not there')}",
        "give the folder of then: --model.init_from FOLDER",
        cause="base_differs",
    )
