"""A run from its layers: default < preset < YAML file < command line, and where each value came from.

In:  a preset name, a YAML file, `--section.key value` pairs.
Out: a frozen Run and its provenance; or a three-line error with the nearest match and advice.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from lamplighter import read_back
from lamplighter.config import schema
from lamplighter.config.recipe import derived
from lamplighter.config.schema import LENGTH, SECTIONS, Run, fields, validated
from lamplighter.errors import BadConfig, InputMissing, LampError, UsageError
from lamplighter.rundir import FORMAT, VERSIONS
from lamplighter.safe_text import MASK

if TYPE_CHECKING:
    import yaml
    from pydantic_core import ValidationError

_PRESETS = Path(__file__).parents[1] / "presets"


@cache
def _loader() -> type[yaml.SafeLoader]:
    """YAML in which 3e-4 is a number."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
    )
    return Loader


@dataclass(frozen=True)
class Resolved:
    """A run and where each of its values came from."""

    run: Run
    origin: dict[str, str] = field(default_factory=dict)
    preset: str | None = None

    @property
    def given(self) -> set[str]:
        """What somebody has said, in a preset, a file or a flag; what is derived from it is not."""
        return {name for name, origin in self.origin.items() if not origin.startswith("derived")}


def preset_names() -> list[str]:
    return sorted(path.stem for path in _PRESETS.glob("*.yaml"))


_TEXT_ENDINGS = (".txt", ".text", ".md", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".gz", ".zst")
_YAML_BYTES = 1 << 20  # nobody writes so much by hand, and YAML takes long for it
_YAML_NODES = 100_000


def _refuse_text(path: Path) -> None:
    """A folder or a file of text where a run.yaml is wanted: a newcomer's first guess."""
    if path.is_dir():
        what = f"{path} is a folder, not a run.yaml"
    elif path.suffix.lower() in _TEXT_ENDINGS or (path.is_file() and path.stat().st_size > _YAML_BYTES):
        what = f"{path} is not a run.yaml"
    else:
        return
    raise UsageError(
        what,
        "the word without a flag is a file of settings",
        f"text is named so: --data.paths {shlex.quote(str(path))}",
    )


def read_yaml(path: Path, label: str | None = None) -> dict[str, tuple[Any, str]]:
    """Dotted name -> (value, 'file:line')."""
    import yaml

    _refuse_text(path)
    try:
        text = read_back.read_whole(path, _YAML_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputMissing(f"cannot read {path}", why, "check the name; lamp train --help shows the usage") from error
    try:
        root, values = _parse(text, label or path.name)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that does not exist; nested without end
        raise BadConfig(f"{path} is not valid YAML", " ".join(str(error).split()), "mend that line") from error
    if not isinstance(values, dict):
        raise BadConfig(
            f"{path} is not a mapping of sections", f"it holds {type(values).__name__}", "begin with 'train:'"
        )
    found: dict[str, tuple[Any, str]] = {}
    for section, (line, value_node) in _entries(root).items():
        where, value = f"{label or path.name}:{line}", values[section]
        if section in VERSIONS:
            _refuse_newer(path, str(section), value)
            continue
        if section not in SECTIONS and not _was_section(str(section)):
            raise _unknown_section(str(section), where)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise BadConfig(
                f"{where}: {section} is not a mapping", f"it holds {_short(value)}", f"indent fields below {section}:"
            )
        lines = _entries(value_node)
        for name in value:
            found[f"{section}.{name}"] = (value[name], f"{label or path.name}:{lines[name][0]}")
    return found


def _parse(text: str, label: str = "") -> tuple[yaml.Node | None, Any]:
    """The nodes, merges (`<<`) resolved, and their values. What is too much or too deep is a ValueError."""
    loader = _loader()(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None, {}
        if _size(root, {}) > _YAML_NODES:
            raise ValueError(f"it holds more than {_YAML_NODES:,} values, each alias counted as often as it stands")
        _refuse_duplicates(root, label)
        return root, loader.construct_document(root)
    except RecursionError:
        raise ValueError("it is nested deeper than any run.yaml") from None
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """How many values it stands for; infinite where it holds itself."""
    if isinstance(node.value, str):
        return 1 + len(node.value) // 100
    if id(node) not in known:
        known[id(node)] = float("inf")
        parts = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else [entry])]
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _entries(node: yaml.Node | None) -> dict[Any, tuple[int, yaml.Node]]:
    """The keys of a mapping as they were read, each with its line and its node; a key of its own wins over a merged one."""
    reader = _loader()("")
    pairs = node.value if node is not None else []
    return {reader.construct_object(key): (key.start_mark.line + 1, value) for key, value in pairs}


def _short(value: object) -> str:
    """A value of somebody's file, as short as an error must be."""
    try:
        shown = repr(value)
    except ValueError:  # a whole number of more digits than Python writes
        return "a number without end"
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def _refuse_newer(path: Path, name: str, found: object) -> None:
    """`format` and `numerics` stand above the sections of a config.yaml; a later format is not for this version."""
    if type(found) is not int:
        raise BadConfig(
            f"{path}: {name} is {found!r}", "it is a whole number, written by lamp", "put the old file back"
        )
    if name == "format" and found > FORMAT:
        raise BadConfig(
            f"{path} has format {found}, and this version reads up to format {FORMAT}",
            "a newer version of lamplighter wrote it",
            "use that version, or begin anew with --resume never (the old folder is kept)",
            cause="newer_format",
        )


def _was_section(name: str) -> bool:
    """Whether older runs had this section."""
    return any(field.startswith(f"{name}.") for field in (*schema.RENAMED, *schema.REMOVED))


def _refuse_duplicates(root: yaml.Node, label: str, deeper: int = 2) -> None:
    """YAML lets the last of two equal keys win in silence; we do not. A section may merge another one, and say more."""
    import yaml

    if not isinstance(root, yaml.MappingNode) or not deeper:
        return
    seen: dict[str, int] = {}
    for key, value in root.value:
        line = key.start_mark.line + 1
        if key.id != "scalar":
            raise ValueError(f"line {line}: a name is a word, not a {key.id}")
        if key.value in seen:
            what = f"{key.value} stands twice ({label}:{seen[key.value]} and :{line})"
            raise BadConfig(what, "only one can count", "take one out")
        seen[key.value] = line
        _refuse_duplicates(value, label, deeper - 1)


def _unknown_section(name: str, where: str) -> LampError:
    import difflib

    from lamplighter.config.names import nearest

    near = difflib.get_close_matches(name, SECTIONS, 1, 0.6)
    meant = near[0] if near else nearest(name)
    return BadConfig(
        f"{name} is not a section ({where})",
        f"did you mean {meant}?" if meant else "sections: " + " ".join(SECTIONS),
        "lamp train --help lists every field",
    )


def parse_overrides(words: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Take `--section.key value` pairs out of a command line; the rest is for the verb."""
    rest: list[str] = []
    found: dict[str, list[str]] = {}
    words = list(words)
    while words:
        word = words.pop(0)
        if not (word.startswith("--") and "." in word.partition("=")[0]):
            rest.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        info = fields().get(name)
        if info is None:
            raise _unknown(f"--{name}", "", UsageError)
        many = get_origin(info.annotation) is list
        taken = [value] if equals else []
        while words and not equals and not words[0].startswith("--") and (many or not taken):
            taken.append(words.pop(0))
        if not taken and (info.annotation is bool or bool in get_args(info.annotation)):
            taken.append("true")
        if not taken:
            example = f"for example: --{name} {info.default}" if info.default not in (None, []) else "lamp train --help"
            raise UsageError(f"--{name} needs a value", info.description or "", example)
        found[name] = (
            found.get(name, []) + taken if many else taken
        )  # given twice: a list grows, anything else is replaced
    return rest, found


def _from_words(name: str, words: list[str]) -> Any:
    """A command-line value as YAML would read it, but text stays text."""
    info = fields()[name]
    if get_origin(info.annotation) is list:
        if len(words) == 1 and words[0].startswith("[") and words[0].endswith("]"):
            import yaml

            try:
                return _parse(words[0])[1]
            except (yaml.YAMLError, ValueError) as error:
                why = " ".join(str(error).split())
                raise UsageError(f"--{name} is not a list", why, f"without brackets: --{name} A B") from error
        if get_origin(get_args(info.annotation)[0]) is Literal:  # names of ours, none of which has a comma
            return [one for word in words for one in word.replace(",", " ").split()]
        return words
    word = words[-1]
    if word.lower() in ("none", "null") and type(None) in get_args(info.annotation):
        return None
    return word


def resolve(
    preset: str | None = None,
    file: Path | None = None,
    overrides: dict[str, list[str]] | None = None,
    test: bool = False,
) -> Resolved:
    """Lay the layers over each other and validate the result once."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    if preset is not None:
        if preset not in preset_names():
            import difflib

            near = difflib.get_close_matches(preset, preset_names(), 1, 0.4)
            hint = f"did you mean {near[0]}?" if near else "presets: " + ", ".join(preset_names())
            raise UsageError(f"there is no preset {preset}", hint, "presets: " + ", ".join(preset_names()))
        for name, (value, _) in read_yaml(_PRESETS / f"{preset}.yaml", f"preset {preset}").items():
            values[name], origin[name] = value, f"preset {preset}"
    if file is not None:
        for name, (value, where) in read_yaml(file).items():
            if name not in fields():
                raise _unknown(name, where, BadConfig)
            _refuse_masked(name, value, where)
            if name not in (overrides or {}) and reaches_out(name, value) and _of_a_run(file):
                raise _to_be_named(name, where)
            values[name], origin[name] = value, where
    for name, words in (overrides or {}).items():
        values[name], origin[name] = _from_words(name, words), "command line"
    for name, (value, why) in derived(values).items():
        values[name], origin[name] = value, f"derived: {why}"
    _one_length(values, origin)
    run = validate(values, origin)
    _refuse_hub_name(run.model.init_from, origin.get("model.init_from", "default"))
    return _small(run, origin, preset) if test else Resolved(run, origin, preset)


def reaches_out(name: str, value: Any) -> bool:
    """Whether a value would cause an import, a command or a request."""
    if name == "data.paths":
        return any(
            ":" in str(path) for path in (value if isinstance(value, list) else [value])
        )  # URL, dataset:, source:
    if name == "track.to":
        return any(one in ("wandb", "trackio", "mlflow") for one in (value if isinstance(value, list) else [value]))
    return (name in ("data.source", "watch.notify", "save.mirror") and value is not None) or (
        name == "model.family" and ":" in str(value)
    )


def _of_a_run(file: Path) -> bool:
    """Whether it lies in a run folder, which may be somebody else's."""
    return (file.parent / "events.jsonl").exists() or (file.parent / "checkpoints").exists()


def _to_be_named(name: str, where: str) -> BadConfig:
    return BadConfig(
        f"{name} is not taken from a run folder ({where})",
        "it names code, a command or an address, and a run folder may be somebody else's",
        f"if it is yours, give it yourself: --{name} ...; or copy the file out of the run folder",
    )


def _refuse_masked(name: str, value: object, where: str) -> None:
    """A file out of --print-config has no secrets in it: the place of one is not a value."""
    if name in ("data.paths", "watch.notify", "save.mirror") and MASK in str(value):
        why = f"{MASK} stands in the place of a password or a token, which --print-config leaves out"
        raise BadConfig(f"{name}: a secret is missing ({where})", why, "put it back into the file")


def _refuse_hub_name(given: str | None, where: str) -> None:
    """A bare name such as gpt2: neither a folder here nor a name on the hub, which has an owner."""
    if given is None or Path(given).exists() or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", given):
        return
    raise InputMissing(
        f"model.init_from {given} is no folder here ({where})",
        "a name on the Hugging Face hub is written with its owner",
        f"--model.init_from OWNER/{given} (openai-community/gpt2, say), or the path of a folder (of one that was moved, the new one)",
    )


def _one_length(values: dict[str, Any], origin: dict[str, str]) -> None:
    """steps and epochs exclude each other: the one from the higher layer wins; without either, 2,000 steps."""
    rank = {"default": 0, "derived": 0, "preset": 1, "file": 2, "command line": 3}
    given = {n: rank.get(origin[n].split(" ")[0] if origin[n].startswith("preset") else origin[n], 2)
             for n in ("train.steps", "train.epochs") if values.get(n) is not None}  # fmt: skip
    if len(given) == 2 and len(set(given.values())) == 2:
        loser = min(given, key=lambda name: given[name])
        values[loser], origin[loser] = None, "replaced by " + max(given, key=lambda name: given[name])
    streamed = str(values.get("data.stream")).lower() in ("true", "1", "yes", "on") and values.get("data.max_chunks")
    if not given and not streamed:
        values["train.steps"] = 2000


def validate(values: dict[str, Any], origin: dict[str, str]) -> Run:
    nested: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, leaf = name.split(".", 1)
        nested.setdefault(section, {})[leaf] = _plain_int(name, value)
    try:
        return validated(nested)
    except ValueError as error:
        from pydantic_core import ValidationError

        if isinstance(error, ValidationError):
            raise _explain(error, values, origin) from None
        if len(error.args) == 3:  # what, why, what to try
            raise BadConfig(*error.args) from None
        raise BadConfig(
            str(error), "the sections do not fit together", "change one of the two and start again"
        ) from None


def _plain_int(name: str, value: Any) -> Any:
    """1e4 is a whole number too."""
    info = fields().get(name)
    wants_int = info is not None and (info.annotation is int or int in get_args(info.annotation))
    if wants_int and isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d+", value):
        value = float(value)
    return int(value) if wants_int and isinstance(value, float) and value.is_integer() else value


def _explain(error: ValidationError, values: dict[str, Any], origin: dict[str, str]) -> LampError:
    first, *more = error.errors(include_url=False)
    name = ".".join(str(part) for part in first["loc"][:2])
    others = [one["msg"].removeprefix("Input should be ") for one in more if one["loc"][:2] == first["loc"][:2]]
    message, info = ", or ".join([first["msg"], *others]), fields().get(name)
    if info is None:
        return _unknown(name, origin.get(name, ""), BadConfig)
    advice = info.advice or f"the default is {flat(resolve().run)[name]}"  # of a run without settings
    where = origin.get(name, "default")
    return BadConfig(
        f"{name}: {_short(values.get(name))} will not do ({where})",
        f"{message[0].lower()}{message[1:]}; {name} is: {info.description}",
        f"{advice}; lamp train --help lists every field",
    )


# ---------------------------------------------------------------- changes to a run


def _small(run: Run, origin: dict[str, str], preset: str | None) -> Resolved:
    """--test: the real path, small, in under a minute."""
    heads = min(run.model.heads, 4)
    width = min(run.model.width, 256) // heads * heads
    batch = min(run.train.batch_size, 4)
    small: dict[str, Any] = {
        "data.seq_len": min(run.data.seq_len, 128),
        "data.max_documents": min(run.data.max_documents or 500, 500),
        "data.tokens_per_chunk": min(run.data.tokens_per_chunk, 2048),
        "data.max_chunks": None,
        "data.embedded_documents": min(run.data.embedded_documents, 1000),
        "data.val_fraction": max(run.data.val_fraction, 0.05) if run.data.val_fraction else 0.0,
        "tokenizer.vocab_size": min(run.tokenizer.vocab_size, 2000),
        "model.layers": min(run.model.layers, 2),
        "model.width": width,
        "model.heads": heads,
        "model.kv_heads": None if run.model.kv_heads is None else min(run.model.kv_heads, heads // 2 or 1),
        "model.mlp_width": None,
        "train.steps": min(run.train.steps or 10, 10),
        "train.epochs": None,
        "train.batch_size": batch,
        "train.micro_batch": min(run.train.micro_batch or batch, max(1, batch // 2)),
        "train.warmup_steps": 2,
        "save.every_steps": 5,
        "eval.every_steps": 5,
        "eval.windows": 8,
        "eval.sample_every_steps": 10,
        "eval.sample_tokens": min(run.eval.sample_tokens, 30),
        "eval.limit": min(run.eval.limit or 20, 20) if run.eval.tasks else run.eval.limit,
    }
    values = flat(run)
    changed = {name: "--test" for name, value in small.items() if values[name] != value}
    origin = {**origin, **changed}
    return Resolved(validate({**values, **small}, origin), origin, preset)


def with_change(resolved: Resolved, name: str, value: Any, reason: str) -> Resolved:
    """The same run with one field changed, and why; of steps and epochs the other one goes."""
    values = flat(resolved.run)
    changed = {name: value, **({other: None for other in LENGTH if other != name} if name in LENGTH else {})}
    origin = {**resolved.origin, **dict.fromkeys(changed, reason)}
    return Resolved(validate({**values, **changed}, origin), origin, resolved.preset)


def flat(run: Run) -> dict[str, Any]:
    """Every value by its dotted name."""
    return {f"{section}.{name}": value for section, values in asdict(run).items() for name, value in values.items()}


def _unknown(name: str, where: str, error: type[LampError]) -> LampError:
    from lamplighter.config.names import unknown

    return unknown(name, where, error)
