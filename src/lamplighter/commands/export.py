"""lamp export: a checkpoint becomes a Hugging Face folder, a GGUF file or an Ollama model; opened again and compared, or not there.

In:  a run or a model folder, what to make of it.
Out: the path on stdout; what was compared in notes. Nothing is left behind by a failure.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.commands.arguments import find_run, parse
from lamplighter.commands.model_folder import base_given, is_model_folder
from lamplighter.errors import DONE, BadConfig, UsageError
from lamplighter.export.place import refuse_taken, sweep, written
from lamplighter.rundir import RunDir, human_bytes, write_atomic

if TYPE_CHECKING:
    from lamplighter.export.opened import Opened
    from lamplighter.export.reference import Limits, Reference

_KINDS = ("hf", "gguf", "ollama")
_K_LIMITS = (0.10, 0.75)  # of what llama-quantize makes: coarser, and measured all the same
_K_QUANTS = r"(q[2-6]_(0|1|k(_[sml])?)|iq[1-4]_\w+)"
_QUESTION = "Who lights the lamps?"


def _export_flags(
    model: str,
    /,
    *,
    to: str = "hf",
    quantize: str | None = None,
    merge: bool = False,
    out: Path | None = None,
    name: str | None = None,
    force: bool = False,
    checkpoint: str = "latest",
    model_init_from: str | None = None,
    runs_dir: Path = Path("runs"),
) -> None:
    """What to make, and where."""


def export(words: list[str]) -> int:
    """The request is checked here, the rest happens in a child under watch."""
    from lamplighter.commands.session import session

    flags = parse(
        "export", _export_flags, [re.sub(r"^--model\.init_from(?==|$)", "--model-init-from", w) for w in words]
    )
    runs_dir, given = flags.pop("runs_dir"), flags["model"]
    _check(flags)
    folder = Path(given)
    is_folder = is_model_folder(folder)
    place = (folder if is_folder else find_run(given, runs_dir).path).resolve()
    flags["model"], flags["name"] = str(place), flags["name"] or place.name
    if is_folder and place.parent.name == "checkpoints":
        flags["name"] = flags["name"] if flags["name"] != place.name else place.parent.parent.name
    out = flags["out"]
    flags["out"] = str(Path(out).resolve()) if out else ""
    flags["is_folder"], flags["here"], flags["given"] = is_folder, str(Path.cwd()), given
    flags["model_init_from"] = base_given(flags["model_init_from"])
    flags["command"] = shlex.join(["lamp", "export", *words])
    try:
        return session("export", flags)
    finally:  # a child that was killed could not clear up
        sweep(_place(flags, "").parent)


def _check(flags: dict[str, Any]) -> None:
    to, quantize = flags["to"], flags["quantize"]
    if to not in _KINDS:
        raise UsageError(f"--to {to} is not known", "what other programs run", f"one of: {', '.join(_KINDS)}")
    if quantize is None:
        quantize = flags["quantize"] = "f32" if to == "hf" else "f16"
    quantize = flags["quantize"] = quantize.lower()
    known = ("f32", "f16", "bf16") if to == "hf" else ("f32", "f16", "bf16", "q8_0")
    if quantize not in known and not (to != "hf" and re.fullmatch(_K_QUANTS, quantize)):
        more = "" if to == "hf" else ", or a k-quant such as q4_k_m where llama-quantize is installed"
        raise UsageError(
            f"--quantize {quantize} is not known for {to}", f"known: {', '.join(known)}{more}", f"--quantize {known[1]}"
        )


# ---------------------------------------------------------------- in the child


def export_child(_: RunDir, request: dict[str, Any]) -> int:
    """Open, write under a temporary name, open again by the other program, compare; only then is it there."""
    with report.phase("import"):
        from lamplighter.commands.model_folder import choose_folder
        from lamplighter.data.chat import template as templates
        from lamplighter.export.opened import open_model

    root = Path(request["model"])
    with report.phase("checkpoint"):
        folder = choose_folder(root, request["checkpoint"])
        templates.check_folder(folder)
    is_adapter = (folder / "adapter_config.json").is_file()
    merged = not is_adapter or request["merge"] or request["to"] != "hf"
    if request["merge"] and not is_adapter:
        report.note("--merge: there is no adapter to merge")
    if is_adapter and merged:
        report.note("the adapter is merged into its base, in fp32")
    _refuse_early(request, merged)
    opened = open_model(folder, request["name"], request["model_init_from"], request["command"])
    made = {"hf": _to_hf, "gguf": _to_gguf, "ollama": _to_ollama}[request["to"]](opened, request, merged)
    report.result(f"{made}\n")
    return DONE


def _refuse_early(request: dict[str, Any], merged: bool) -> None:
    """What needs no model to be known: it may take minutes to open."""
    refuse_taken(_place(request, _ending(request, merged)), request["force"])
    if request["to"] != "hf":
        from lamplighter.export import gguf_file, llama_cpp

        llama_cpp.require()
        if request["quantize"] not in gguf_file.QUANTS:
            _llama_quantize(request["quantize"])


def _ending(request: dict[str, Any], merged: bool) -> str:
    if request["to"] == "hf":
        return "-hf" if merged else "-adapter"
    return "-ollama" if request["to"] == "ollama" else f"-{request['quantize']}.gguf"


def _place(request: dict[str, Any], ending: str) -> Path:
    if request["out"]:
        return Path(request["out"])
    where = Path(request["here"]) if request["is_folder"] else Path(request["model"]) / "export"
    return where / f"{request['name']}{ending}"


def _to_hf(opened: Opened, request: dict[str, Any], merged: bool) -> Path:
    from lamplighter.export import hugging_face
    from lamplighter.export.reference import make_reference

    quantize = request["quantize"]
    if not merged and quantize != "f32":
        raise UsageError(
            f"--quantize {quantize} is for a merged model", "an adapter is small and stays in fp32", "--merge"
        )
    place = _place(request, _ending(request, merged))
    need = int(opened.built.parameters * {"f32": 4, "f16": 2, "bf16": 2}[quantize] * 1.02) if merged else 64 << 20
    with written(place, need, request["force"]) as temporary:
        if merged:
            reference = make_reference(opened, greedy=False, scored=True) if quantize != "f32" else None
            hugging_face.write_model(temporary, opened, quantize)
            report.note(hugging_face.check_model(temporary, opened, quantize, reference))
        else:
            hugging_face.write_adapter(temporary, opened)
            report.note(hugging_face.check_adapter(temporary, opened))
    how = "AutoModelForCausalLM.from_pretrained" if merged else "peft.AutoPeftModelForCausalLM.from_pretrained"
    report.note(f"made: {place}; opens with {how}; next: lamp generate {shlex.quote(str(place))}")
    return place


def _to_gguf(opened: Opened, request: dict[str, Any], merged: bool) -> Path:
    place = _place(request, _ending(request, merged))
    _make_gguf(opened, request, place)
    size = human_bytes(place.stat().st_size)
    here, again = shlex.quote(str(place)), shlex.join(["lamp", "export", request["given"], "--to", "ollama"])
    report.note(f"made: {place} ({size}); next: llama-cli -m {here}, or {again}")
    return place


def _make_gguf(opened: Opened, request: dict[str, Any], place: Path) -> None:
    from lamplighter.export import gguf_file
    from lamplighter.export.pre_tokenizer import choose_pre_tokenizer
    from lamplighter.export.reference import DIRTY, make_reference
    from lamplighter.export.vocabulary import vocabulary_of

    quantize = request["quantize"]
    tool = None if quantize in gguf_file.QUANTS else _llama_quantize(quantize)
    gguf_file.refuse_family(opened.built.config)
    vocabulary = vocabulary_of(opened.tokenizer, opened.built.vocab_size)
    need = gguf_file.needed_bytes(opened, "f32" if tool else quantize) * (2 if tool else 1)
    with written(place, need, request["force"]) as temporary:
        ids = [opened.tokenizer.encode(text).tolist() for text in DIRTY]
        vocabulary = choose_pre_tokenizer(vocabulary, DIRTY, ids, temporary)
        gguf_file.write_gguf(temporary, opened, vocabulary, "f32" if tool else quantize)
        if tool:
            _by_llama_quantize(tool, temporary, quantize)
        reference = make_reference(opened, greedy=quantize == "f32", scored=quantize != "f32")
        opened.release()
        _compare(temporary, opened, reference, quantize)


def _compare(path: Path, opened: Opened, reference: Reference, quantize: str) -> None:
    from lamplighter.export import llama_cpp
    from lamplighter.export import reference as known
    from lamplighter.export.opened import ExportFailed

    chats = [
        [{"role": "user", "content": _QUESTION}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": _QUESTION}],
    ]
    template, ours = opened.template, []
    for chat in chats if template else []:
        try:
            ours.append(template.prompt_ids(chat))  # type: ignore[union-attr]
        except BadConfig:  # a template without a system message
            break
    longest = max((len(one.prompt) + len(one.answer) for one in reference.greedy), default=0)
    longest = max([longest, *(len(one.ids) for one in reference.scored), *(len(one) for one in ours)])
    context, first = min(opened.built.positions, longest + 64), reference.scored[: known.FIRST_TEXTS]
    answers = llama_cpp.ask(
        path,
        texts=reference.texts,
        chats=chats[: len(ours)],
        greedy=reference.greedy,
        scored=first,
        context=context,
        stops=known.stops_of(opened),
    )
    known.compare_ids(reference, answers.ids)
    for one, other in zip(ours, answers.prompts, strict=True):
        if one != other:
            then, now = (opened.tokenizer.decode(ids)[:120] for ids in (one, other))
            raise ExportFailed(
                "llama.cpp renders the chat template otherwise",
                f"in training {then!r}, there {now!r}",
                "--data.template chatml",
                cause="template_differs",
            )
    report.note(
        f"llama.cpp gives the same token ids on {len(answers.ids)} dirty texts"
        + (f" and {len(ours)} chat prompts" if ours else "")
    )
    if reference.greedy:
        report.note(f"llama.cpp says {known.compare_greedy(reference, answers.greedy)}")
    if reference.scored:
        limits = _limits(quantize)
        scores, asked = answers.scored, replace(reference, scored=first)
        if known.is_close_to_a_limit(asked, scores, limits):
            scores += llama_cpp.ask(path, scored=reference.scored[known.FIRST_TEXTS :], context=context).scored
            asked = reference
        report.note(f"{quantize}: {known.compare_scores(asked, scores, limits)}")


def _limits(quantize: str) -> Limits:
    from lamplighter.export.reference import TIE_OF_8_BITS, Limits

    if quantize in ("f16", "bf16"):
        return Limits(0.005, 0.95)
    return Limits(*((0.01, 0.95) if quantize == "q8_0" else _K_LIMITS), TIE_OF_8_BITS)


def _llama_quantize(quantize: str) -> str:
    tool = shutil.which("llama-quantize")
    if tool is None:
        why = "k-quants are made by llama.cpp's own llama-quantize, which is not installed here"
        raise BadConfig(
            f"--quantize {quantize} needs llama-quantize", why, "--quantize q8_0, or put llama-quantize on the PATH"
        )
    return tool


def _by_llama_quantize(tool: str, path: Path, quantize: str) -> None:
    from lamplighter.export.opened import ExportFailed

    target = path.with_name(f"{path.name}.quantized")
    try:
        with report.phase("llama-quantize"):
            done = subprocess.run(
                [tool, str(path), str(target), quantize.upper()], capture_output=True, text=True, check=False
            )
        if done.returncode or not target.is_file():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
            raise ExportFailed(f"llama-quantize ended with {done.returncode}", last[0][:300], "--quantize q8_0")
        target.replace(path)
    finally:
        target.unlink(missing_ok=True)


def _to_ollama(opened: Opened, request: dict[str, Any], merged: bool) -> Path:
    """A folder with the file and its Modelfile; created in Ollama too, where one answers."""
    from lamplighter.export import modelfile, ollama

    place = _place(request, _ending(request, merged))
    name = re.sub(r"[^a-z0-9._-]+", "-", request["name"].lower()).strip("-.") or "model"
    file_name = f"{name}-{request['quantize']}.gguf"
    text = modelfile.modelfile(file_name, opened.template)  # before anything is written: it may not be possible
    with written(place, 1 << 20, request["force"]) as temporary:
        temporary.mkdir()
        _make_gguf(opened, {**request, "force": True}, temporary / file_name)
        write_atomic(temporary / "Modelfile", text)
    if not ollama.is_there():
        report.note(
            f"made: {place}; no Ollama answers at {ollama.address()}; next: cd {shlex.quote(str(place))} && ollama create {name} -f Modelfile && ollama run {name}"
        )
        return place
    said = ollama.create(name, place / file_name, opened.template, _QUESTION)
    report.note(f"Ollama has {name}; asked {_QUESTION!r} it says {said.strip()[:200]!r}")
    report.note(f"made: {place}; next: ollama run {name}")
    return place
