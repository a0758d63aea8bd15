"""lamp publish: a run's model to the Hugging Face hub, with a card that is written from the run.

In:  a run, a name on the hub.
Out: the address on stdout. The folder is made and checked as by `lamp export --to hf`; only its files are uploaded.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from lamplighter import report
from lamplighter.commands.arguments import find_run, parse
from lamplighter.commands.model_folder import base_given
from lamplighter.errors import DONE, BadConfig, InputMissing, Unreachable, UsageError
from lamplighter.export.place import sweep, written
from lamplighter.rundir import RunDir, human_bytes, write_atomic

_ALLOWED = {
    "README.md", "curves.svg", "config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors", "base.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat.json",
}  # fmt: skip


def _publish_flags(
    run: str,
    /,
    *,
    to: str = "",
    dry_run: bool = False,
    private: bool = False,
    merge: bool = False,
    checkpoint: str = "latest",
    license: str | None = None,
    out: Path | None = None,
    model_init_from: str | None = None,
    runs_dir: Path = Path("runs"),
) -> None:
    """What to publish, and where."""


def publish(words: list[str]) -> int:
    """No prompts: what is missing is an error."""
    from lamplighter.commands.session import session

    flags = parse(
        "publish", _publish_flags, [re.sub(r"^--model\.init_from(?==|$)", "--model-init-from", w) for w in words]
    )
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", flags["to"]):
        raise UsageError(
            f"--to {flags['to'] or '(nothing)'} is no name on the hub", "a name has an owner", "--to ORG/NAME"
        )
    run = find_run(flags["run"], flags.pop("runs_dir"))
    flags["run"] = str(run.path.resolve())
    flags["out"] = str(Path(flags["out"]).resolve()) if flags["out"] else ""
    flags["model_init_from"] = base_given(flags["model_init_from"])
    flags["command"] = shlex.join(["lamp", "publish", *words])
    try:
        return session("publish", flags)
    finally:  # a child that was killed could not clear up
        sweep(Path(flags["out"]).parent if flags["out"] else run.path / "export")


# ---------------------------------------------------------------- in the child


def publish_child(_: RunDir, request: dict[str, Any]) -> int:
    """Make the folder, then upload it, unless it is a dry run."""
    with report.phase("import"):
        from lamplighter.commands.model_folder import choose_folder
        from lamplighter.export import model_card

    run = RunDir(Path(request["run"]))
    token = None if request["dry_run"] else _token()
    with report.phase("checkpoint"):
        folder = choose_folder(run.path, request["checkpoint"])
    is_adapter = (folder / "adapter_config.json").is_file() and not request["merge"]
    base = model_card.hub_base(folder)
    if is_adapter and base is None:
        why = "an adapter without its base is no model, and this base has no name on the hub"
        raise BadConfig("the base of this adapter cannot be found by others", why, "--merge publishes the whole model")
    place = Path(request["out"]) if request["out"] else run.path / "export" / "publish"
    _make(run, folder, place, is_adapter, request)
    files = sorted(path for path in place.iterdir() if path.name in _ALLOWED)
    strange = sorted(path.name for path in place.iterdir() if path.name not in _ALLOWED)
    if strange:
        report.warn(f"not uploaded: {', '.join(strange)}")
    for path in files:
        report.note(f"{path.name}  {human_bytes(path.stat().st_size)}")
    if request["dry_run"]:
        report.note(f"--dry-run: nothing was uploaded; {place} is what would be, {len(files)} files")
        report.result(f"{place}\n")
        return DONE
    try:
        report.result(f"{_upload(files, request, str(token))}\n")
    finally:
        if not request["out"]:
            shutil.rmtree(place, ignore_errors=True)
    return DONE


def _token() -> str:
    try:
        import huggingface_hub
    except ImportError as error:
        raise BadConfig("publishing needs huggingface_hub", str(error), "pip install 'lamplighter[hf]'") from error
    token = huggingface_hub.get_token()
    if not token:
        raise InputMissing(
            "there is no token for the hub",
            "neither HF_TOKEN nor a saved one was found",
            "hf auth login, or HF_TOKEN=... lamp publish ...",
        )
    return str(token)


def _make(run: RunDir, folder: Path, place: Path, is_adapter: bool, request: dict[str, Any]) -> None:
    """The checked folder of an export, the card and the picture."""
    from lamplighter.config import Resolved, load_dump, shown
    from lamplighter.export import hugging_face, model_card
    from lamplighter.export.opened import open_model

    settings = load_dump(run.config)
    opened = open_model(folder, run.name, request["model_init_from"], request["command"])
    trained = _trained(folder) or opened.built.parameters
    base = model_card.hub_base(folder)
    need = opened.built.parameters * 4 if not is_adapter else 64 << 20
    facts = model_card.Published(
        to=request["to"],
        checkpoint=folder,
        parameters=opened.built.parameters,
        trained=trained,
        is_adapter=is_adapter,
        base=base or _hub_name(settings.model.init_from),
        license=request["license"],
        template=opened.template.name if opened.template else None,
    )
    with written(place, need, force=True) as temporary:
        if is_adapter:
            hugging_face.write_adapter(temporary, opened)
            report.note(hugging_face.check_adapter(temporary, opened))
            model_card.without_path(temporary)
        else:
            hugging_face.write_model(temporary, opened, "f32")
            report.note(hugging_face.check_model(temporary, opened, "f32", None))
        picture = run.path / "curves.svg"
        write_atomic(
            temporary / "curves.svg", picture.read_text() if picture.is_file() else model_card.draw_curves(run)
        )
        card = model_card.write_card(run, settings, shown(Resolved(settings, {}, None)), facts)
        write_atomic(temporary / "README.md", card)
    if request["license"] is None:
        report.warn("no --license was given: the card names none, and nobody may then use the model")


def _hub_name(given: str | None) -> str | None:
    return given if given and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", given) and not Path(given).exists() else None


def _trained(folder: Path) -> int | None:
    from lamplighter.model.stored import numbers_in

    file = folder / "adapter_model.safetensors"
    return numbers_in(file) if file.is_file() else None


def _upload(files: list[Path], request: dict[str, Any], token: str) -> str:
    """One commit; what the hub has already is not sent again. The address of the model."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from lamplighter.model.origin import network_errors

    broken: tuple[type[Exception], ...] = (HfHubHTTPError, RuntimeError, ValueError, *network_errors())
    disable_progress_bars()  # the parent says how it goes on
    api, to = huggingface_hub.HfApi(token=token), request["to"]
    operations = [huggingface_hub.CommitOperationAdd(path.name, path) for path in files]
    size = human_bytes(sum(path.stat().st_size for path in files))
    try:
        with report.phase("upload"):
            report.note(f"{len(files)} files, {size}, to {constants.ENDPOINT}/{to}")
            api.create_repo(to, private=request["private"] or None, exist_ok=True)
            api.create_commit(to, operations, commit_message=f"Publish {Path(request['run']).name}")
    except broken as error:
        words = " ".join(str(error).split())[:300] or type(error).__name__
        raise Unreachable(
            f"the upload to {to} did not come to its end", words, "the same command goes on where it stopped"
        ) from error
    report.note(f"published: {constants.ENDPOINT}/{to}")
    return f"{constants.ENDPOINT}/{to}"
