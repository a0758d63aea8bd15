"""Which model a verb is about: a run, a folder or a name on the hub; its checkpoints; is there memory for it.

In:  what the user typed.
Out: a folder of weights, or the model in it with its tokenizer and template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.commands.arguments import find_run
from lamplighter.errors import InputMissing, NoCheckpoint, RefusedByPlan
from lamplighter.rundir import EVALUATED, checkpoint_name, human_bytes, newest_first, read_record, step_of

if TYPE_CHECKING:
    from lamplighter.evaluate.evaluation import Candidate

_SPARE_BYTES = 400 << 20  # torch itself, the logits of a batch, its activations


def is_model_folder(folder: Path) -> bool:
    """A model, or an adapter of one."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def located(name: str, runs_dir: Path) -> dict[str, Any]:
    """Where a model is: a run, a folder, or a name on the hub; and where its evaluations go."""
    folder = Path(name)
    if is_model_folder(folder):
        return {"model": str(folder.resolve()), "place": str(_beside(runs_dir, folder.resolve().name))}
    try:
        run = find_run(name, runs_dir)
    except InputMissing:
        if name.count("/") == 1 and not folder.exists():
            return {"model": f"hub:{name}", "place": str(_beside(runs_dir, name.replace("/", "--")))}
        raise
    return {"model": str(run.path.resolve()), "place": str(run.path.resolve())}


def own_family(folder: Path) -> list[str]:
    """The words to name a model of one's own again; what its config.json says is only repeated, and only a plain name."""
    from lamplighter.model.shape import OWN_TYPE

    config = read_record(folder / "config.json")
    named = config.get("family") if config.get("model_type") == OWN_TYPE else None
    plain = isinstance(named, str) and re.fullmatch(r"[\w.]+:\w+", named, re.ASCII) is not None
    return ["--model.family", str(named) if plain else "module:name"] if named is not None else []


def _beside(runs_dir: Path, name: str) -> Path:
    """Results of a model that is no run of ours."""
    return runs_dir.resolve() / EVALUATED / name


# ---------------------------------------------------------------- in the child


def choose_folder(path: Path, wanted: str, raw: bool = False) -> Path:
    """A model folder as it is; of a run the latest valid checkpoint, the best, or the named one.

    A checkpoint is held from then on: the run that goes on does not prune it while this process reads it.
    """
    from lamplighter.data.chat import template as templates
    from lamplighter.train import checkpoint, held

    if is_model_folder(path):
        checkpoint.refuse_newer(path)
        if step_of(path) >= 0:
            held.hold(path)
        return path
    root = path / "checkpoints"
    if wanted == "best":
        best = checkpoint.best_of(root)
        if best is None:
            raise NoCheckpoint(f"{path.name} has no best checkpoint", "no validation was made", "--checkpoint latest")
        wanted = checkpoint_name(best[0])
    for folder in newest_first(root)[:1] if wanted == "latest" else [root / wanted]:
        if not raw:
            templates.check_folder(folder)  # before its hashes: what differs in a template is said in words
    found = None
    meanwhile = [folder for folder in newest_first(root) if not held.is_ours(folder) and held.hold(folder)]
    try:
        found = checkpoint.find(root, "auto" if wanted == "latest" else wanted)
        if found is not None:
            held.hold(found)
    finally:
        for folder in meanwhile:
            if folder != found:
                held.let_go(folder)
    if found is None:
        raise NoCheckpoint(
            f"{path.name} has no checkpoint yet", "nothing was saved", "lamp save RUN, or wait for the first save"
        )
    return found


def resolved_model(name: str) -> str:
    """A folder as it is; a name on the hub from its cache, else from the hub."""
    if not name.startswith("hub:"):
        return name
    from lamplighter.model import origin

    repo = name.removeprefix("hub:")
    if (there := origin.cached(repo, None)) is not None:
        return str(there)
    with report.phase("hub"):
        report.note(f"{repo} is neither a run, a folder, nor in the local cache: asking the hub")
        return str(origin.download(repo, None)[0])


def base_given(words: str | None) -> str | None:
    """What the user says of an adapter's base: a folder, made absolute, or a name on the hub."""
    from lamplighter.model.origin import is_hub_name

    return words if words is None or is_hub_name(words) else str(Path(words).resolve())


def folders_of(path: Path, wanted: str) -> list[Path]:
    """The folders of weights: one, or all checkpoints of a run."""
    if is_model_folder(path) or wanted != "all":
        name = checkpoint_name(int(wanted)) if wanted.isdecimal() else wanted
        return [choose_folder(path, name, raw=True)]
    found = list(reversed(newest_first(path / "checkpoints")))
    if not found:
        raise NoCheckpoint(f"{path.name} has no checkpoint yet", "nothing was saved", "lamp save RUN")
    return [choose_folder(path, one.name, raw=True) for one in found]


def load_candidate(folder: Path, request: Mapping[str, Any]) -> Candidate:
    """A model with its tokenizer and template, on the device; memory is looked at first."""
    import torch

    from lamplighter.data import tokenizer as tokenizers
    from lamplighter.data.chat import template as templates
    from lamplighter.evaluate.evaluation import Candidate
    from lamplighter.evaluate.results import Subject, mark_of
    from lamplighter.model.build import load_folder
    from lamplighter.model.generate import lay_out

    base = request.get("model_init_from")
    refuse_without_memory(folder, base=base)
    with report.phase("model"):
        built = load_folder(folder, request["model_family"], request["command"], base=base)
        tokenizer = tokenizers.load(folder)
        template = templates.of_folder(folder, tokenizer) if request.get("chat") else None
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        built.model.to(device).eval()
        lay_out(built.model)
        step = step_of(folder)
        name = folder.name if step >= 0 else Path(request["place"]).name
        subject = Subject(folder, name, step if step >= 0 else None, mark_of(folder))
    report.note(f"{folder}: {built.parameters:,} parameters, on {device.type}")
    return Candidate(subject, built, tokenizer, template)


def refuse_without_memory(
    folder: Path, more_bytes: int = 0, is_loaded: bool = False, *, base: str | None = None
) -> None:
    """77 where the weights (unless they are there already; of an adapter its base's, too) and so much more would not fit beside
    what runs already."""
    from lamplighter.procs import cgroup, procfs

    weights = 0 if is_loaded else bytes_of_weights(folder, base)
    need = weights + _SPARE_BYTES + more_bytes
    have = min([procfs.memory_available(), *(limit.left for limit in cgroup.memory_limits())])
    if need > have:
        why = f"it needs about {human_bytes(need)}, and {human_bytes(have)} are free"
        raise RefusedByPlan(f"there is no memory for {folder.name}", why, "wait until other work has ended, or use another machine")  # fmt: skip


def bytes_of_weights(folder: Path, base: str | None) -> int:
    """Of the files that are read: of an adapter its own and those of its base, where that is a folder here."""
    from lamplighter.model.origin import RECORD

    found = [*folder.glob("*.safetensors")]
    if (folder / "adapter_config.json").is_file():
        named = base or read_record(folder / RECORD).get("path")
        found += [*Path(str(named)).glob("*.safetensors")] if named else []
    return sum(path.stat().st_size for path in found)
