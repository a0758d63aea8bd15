"""From a config section or a folder to a model: built-in families, or one's own by "module:name".

In:  the model section and the vocabulary, or a folder with config.json and model.safetensors.
Out: an nn.Module on the CPU, the content of its config.json, its true parameter count and FLOPs per token.
"""

from __future__ import annotations

import inspect
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from lamplighter import own_code
from lamplighter.config import Lora, Model
from lamplighter.errors import BadConfig, BadData, InputMissing
from lamplighter.model import origin
from lamplighter.model.families import (
    FromTransformers,
    check_adapters_are_used,
    config_of,
    open_family,
    positions_of,
    vocabulary_of,
)
from lamplighter.model.lora import SETTINGS, apply_lora, merge, section_of
from lamplighter.model.shape import (
    OWN_TYPE,
    Family,
    NotOurs,
    Shape,
    count_parameters,
    flops_per_token,
    shape_from_hf,
    shape_to_hf,
)
from lamplighter.model.stored import stored_numbers
from lamplighter.model.transformer import Transformer
from lamplighter.model.weights import init_weights, load_narrow, load_weights
from lamplighter.rundir import read_json

_SMALL = 1 << 20
_LARGE = 200_000_000  # parameters, that take longer to draw than a device without numbers to load
_OWN_ROOM = 8  # an embedding of one's own may be smaller than vocab_size x width, but not by much more than this
_OWN_SIZES = ("vocab_size", "positions", "layers", "width", "heads")  # what the user's own function is called with


def is_hidden(name: str, parameter: torch.Tensor) -> bool:
    """A matrix of one of the numbered blocks: no embedding, no head."""
    return parameter.dim() == 2 and any(part.isdecimal() for part in name.split("."))


@dataclass(frozen=True)
class Built:
    """A model and what is written down about it."""

    model: torch.nn.Module
    config: dict[str, Any]  # config.json
    vocab_size: int
    positions: int
    adapter: dict[str, Any] | None = None  # adapter_config.json, where adapters are trained and not the model
    base: origin.Base | None = None  # what they are trained on

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def trained(self) -> int:
        """Parameters that training changes."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    @property
    def hidden(self) -> int:
        """Those of them in matrices inside the blocks."""
        return sum(p.numel() for name, p in self.model.named_parameters() if p.requires_grad and is_hidden(name, p))

    @property
    def takes_segments(self) -> bool:
        """Whether it keeps packed examples apart: forward(ids, segments_BT=...)."""
        if isinstance(self.model, FromTransformers):
            return self.model.keeps_apart
        return "segments_BT" in inspect.signature(self.model.forward).parameters

    def flops_per_token(self, seq_len: int) -> float:
        """6N + attention for the built-in families; 6N for others; 4N of what is frozen, which gets no gradient."""
        frozen = self.parameters - self.trained if self.adapter is not None else 0
        if isinstance(self.model, Transformer):
            return flops_per_token(self.model.shape, seq_len) - 2.0 * frozen + 6.0 * self.trained * bool(frozen)
        return 6.0 * self.parameters - 2.0 * frozen


def build(
    section: Model, vocab_size: int, positions: int, end_of_text: int, seed: int, *, lora: Lora | None = None
) -> Built:
    """A new model, or the one in `model.init_from`, with adapters where the lora section asks for them."""
    if section.init_from is not None:
        folder, lora = Path(section.init_from), lora if lora is not None and lora.r is not None else None
        built = _from_folder(folder, vocab_size, positions, section.dropout, lora)
        return built if lora is None else _adapted(built, folder, lora, seed)
    if ":" in section.family:
        arguments = {"vocab_size": vocab_size, "positions": positions, "layers": section.layers, "width": section.width,
                     "heads": section.heads, "dropout": section.dropout}  # fmt: skip
        torch.manual_seed(seed)
        return _own(section.family, arguments)
    try:
        shape = Shape(
            family=cast(Family, section.family),
            vocab_size=vocab_size,
            positions=positions,
            layers=section.layers,
            width=section.width,
            heads=section.heads,
            kv_heads=section.kv_heads or 0,
            mlp_width=section.mlp_width or 0,
            dropout=section.dropout,
            tie_embeddings=section.tie_embeddings,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
        )
    except ValueError as error:
        raise BadConfig("the model section does not fit together", str(error), "change one of the sizes") from error
    model = Transformer(shape)
    init_weights(model, seed)
    return Built(model, shape_to_hf(shape), vocab_size, positions)


def _adapted(built: Built, folder: Path, lora: Lora, seed: int) -> Built:
    """Freeze it and put the adapters in; which base it is, the caller finds out where it matters (origin.identify)."""
    settings = {**apply_lora(built.model, lora, seed), "base_model_name_or_path": str(folder.resolve())}
    if isinstance(built.model, FromTransformers):
        check_adapters_are_used(built.model)
    return replace(built, adapter=settings)


def load_folder(
    folder: Path,
    family: str | None = None,
    command: str = "",
    *,
    base: str | None = None,
    base_dtype: str | None = None,
) -> Built:
    """The model of a checkpoint, of an adapter (merged into its base) or of any Hugging Face folder.

    An adapter's base is where its base.json says, or where the user says (`base`: a folder, or a name on the hub); its
    hash must be the one of training. Its matrices act as they did there, or (`base_dtype` fp32) as they are stored.
    A folder never names code: a model of somebody's own is built by the `family` that the user gives. `command` is
    what the user typed, for the advice to type it again with the name.
    """
    if (folder / SETTINGS).is_file():
        return _load_adapter(folder, base, command, base_dtype)
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise InputMissing(
            f"{folder} is not a model folder", "it has no readable config.json", "give a run, or a folder"
        )
    if config.get("model_type") != OWN_TYPE:
        if family not in (None, config.get("model_type")):
            what = f"{folder} holds a {config.get('model_type')!r} model, not {family}"
            raise BadConfig(what, "its config.json says so", "leave --model.family out")
        shape = _shape(folder, config)
        return _load(folder, shape) if shape is not None else _load_family(folder, config, None, None)
    if family is None or ":" not in family:
        raise _name_needed(folder, config.get("family"), command or f"lamp generate {shlex.quote(str(folder))}")
    arguments = _own_arguments(folder, config.get("arguments"))
    try:
        rows = max(arguments["vocab_size"], arguments["layers"])  # how code of one's own spends its sizes is not known
        _refuse_more_than_stored(folder, rows * arguments["width"] // _OWN_ROOM)
        built = _own(family, arguments)
        load_weights(built.model, folder)
    except FileNotFoundError as error:
        raise InputMissing(f"{folder} has no weights", str(error), "expected model.safetensors") from error
    except ValueError as error:
        raise BadData(f"the weights in {folder} do not fit {family}", str(error), "name the code of then") from error
    return built


def _load_adapter(folder: Path, base: str | None, command: str, base_dtype: str | None = None) -> Built:
    settings, known = read_json(folder / SETTINGS), origin.read_base(folder)
    if not isinstance(settings, dict):
        raise BadData(f"{folder}/{SETTINGS} is damaged", "it is no JSON object", "use an intact copy")
    place = _base_of(folder, settings, known, base=base, command=command)
    if known is not None:
        origin.refuse_other_base(known, origin.identify(place, known.dtype), str(folder))
    built = load_folder(place)
    apply_lora(built.model, section_of(settings, folder, base_dtype or (known.dtype if known else "fp32")), 0)
    try:
        load_weights(built.model, folder)
    except FileNotFoundError as error:
        raise InputMissing(f"{folder} has no weights", str(error), "expected adapter_model.safetensors") from error
    except ValueError as error:
        raise BadData(f"the adapter in {folder} does not fit {place}", str(error), "use the base of then") from error
    merge(built.model)
    return built


def _base_of(
    folder: Path, settings: dict[str, Any], known: origin.Base | None, *, base: str | None, command: str
) -> Path:
    """Where the base of an adapter is. Only a name that the user gives is fetched; one of the folder is looked for here."""
    if base is not None and origin.is_hub_name(base):
        return origin.download(base, known.commit if known else settings.get("revision"))[0]
    said = base or (known.path if known else settings.get("base_model_name_or_path"))
    if said and (Path(str(said)) / "config.json").is_file():
        return Path(str(said))
    name = known.name if known else said if isinstance(said, str) and origin.is_hub_name(said) else None
    commit = known.commit if known else settings.get("revision")
    if base is None and name and (cached := origin.cached(name, commit if isinstance(commit, str) else None)):
        return cached
    at = f" at {str(commit)[:12]}" if commit else ""
    why = f"it says {str(said)[:200]!r}" if said else "it does not say where its base is"
    advice = f"{command or 'the same command'} --model.init_from {name or 'FOLDER'}"
    raise InputMissing(
        f"the base of the adapter {folder} is not there",
        f"{why}{f' ({name}{at} on the hub, which is not in the cache)' if name else ''}; an adapter is no model without it",
        advice,
    )


def _refuse_more_than_stored(folder: Path, wanted: int) -> None:
    """ValueError where a config.json asks for far more than its weights have: said before memory is taken for it.

    What differs by less is loaded, and the tensors that are missing are named.
    """
    if wanted > 2 * (stored := stored_numbers(folder)) + _SMALL:
        raise ValueError(f"its config.json asks for {wanted:,} numbers, and {stored:,} are stored")


def _name_needed(folder: Path, named: object, command: str) -> BadConfig:
    """A model of somebody's own, and the user has not said by which code; what the folder says is only repeated."""
    plain = isinstance(named, str) and re.fullmatch(r"[\w.]+:\w+", named, re.ASCII) is not None
    return BadConfig(
        f"{folder} holds a model of somebody's own, and no code is ever taken from a model folder",
        f"its config.json names {named!r}, which is not imported",
        f"if that is code of yours: {command} --model.family {named if plain else 'module:name'}",
    )


def _own_arguments(folder: Path, found: object) -> dict[str, Any]:
    """The sizes in a config.json, and nothing else that it might hand to the user's function."""
    known = found if isinstance(found, dict) else {}
    wrong = [name for name in _OWN_SIZES if type(known.get(name)) is not int or known[name] < 1]
    if wrong or type(known.get("dropout")) not in (int, float) or known.keys() - {*_OWN_SIZES, "dropout"}:
        why = "it should hold " + ", ".join((*_OWN_SIZES, "dropout"))
        raise BadData(f"the arguments in {folder}/config.json are damaged", why, "use an intact folder")
    return dict(known)


def _from_folder(folder: Path, vocab_size: int, positions: int, dropout: float, lora: Lora | None) -> Built:
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise InputMissing(
            f"model.init_from {folder} is not a model folder", "no readable config.json", "check the path"
        )
    shape = _shape(folder, config)
    knows = shape.vocab_size if shape else vocabulary_of(config)
    room = shape.positions if shape else positions_of(config) or positions
    if knows < vocab_size:
        raise BadConfig(
            f"the tokenizer has {vocab_size:,} tokens, the model in {folder} knows {knows:,}",
            "every id must be one that the model knows",
            f"use the model's own tokenizer: --tokenizer.path {shlex.quote(str(folder))}",
        )
    if room < positions:
        raise BadConfig(
            f"data.seq_len {positions} is longer than the {room} positions of {folder}",
            "the model has no positions beyond that",
            f"--data.seq_len {room}",
        )
    if shape is None:
        return _load_family(folder, config, dropout, positions)
    return _load(folder, replace(shape, dropout=dropout), lora.base_dtype if lora else "fp32")


def _load_family(folder: Path, config: dict[str, Any], dropout: float | None, seq_len: int | None) -> Built:
    """By transformers."""
    model = open_family(folder, config, dropout, seq_len)
    return Built(model, config_of(model), vocabulary_of(config), model.positions)


def _shape(folder: Path, config: dict[str, Any]) -> Shape | None:
    """None for a family that is not built here."""
    try:
        return shape_from_hf(config)
    except NotOurs:  # transformers builds it
        return None
    except (ValueError, KeyError) as error:
        raise BadConfig(
            f"{folder}/config.json is not that of a model which can be built here",
            str(error),
            "use the whole folder of the model, as transformers saves it",
        ) from error


def _load(folder: Path, shape: Shape, dtype: str = "fp32") -> Built:
    try:
        _refuse_more_than_stored(folder, count_parameters(shape))
        if dtype != "fp32":
            with torch.device("meta"):
                model = Transformer(shape)
            load_narrow(model, folder, dtype)
            return Built(model, shape_to_hf(shape), shape.vocab_size, shape.positions)
        if count_parameters(shape) < _LARGE:
            model = Transformer(shape)
        else:  # numbers that nobody chose take a while, and would only be overwritten
            with torch.device("meta"):  # which itself takes 2 s to load
                model = Transformer(shape)
            model.to_empty(device="cpu")
        load_weights(model, folder)
    except FileNotFoundError as error:
        raise InputMissing(f"{folder} has no weights", str(error), "expected model.safetensors") from error
    except ValueError as error:
        raise BadData(
            f"the weights in {folder} do not fit its config.json", str(error), "use an intact folder"
        ) from error
    return Built(model, shape_to_hf(shape), shape.vocab_size, shape.positions)


def _own(name: str, arguments: dict[str, Any]) -> Built:
    """Call the user's `module:name`."""
    module_name, _, attribute = name.partition(":")
    try:
        make = getattr(own_code.load(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise BadConfig(
            f"cannot load model.family {name}", str(error), f"it is looked for in {own_code.places()}"
        ) from error
    model = make(**arguments)
    if not isinstance(model, torch.nn.Module):
        raise BadConfig(
            f"{name} did not return a torch.nn.Module", f"it returned {type(model).__name__}", "see docs/MAP.md"
        )
    config = {"model_type": OWN_TYPE, "family": name, "arguments": arguments}
    return Built(model, config, arguments["vocab_size"], arguments["positions"])
