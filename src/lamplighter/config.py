"""One Run, made of sections: default < preset < YAML file < command line, and where each value came from.

In:  a preset name, a YAML file, `--section.key value` pairs.
Out: a frozen Run and its provenance; or a three-line error with the nearest match and advice.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from lamplighter.errors import BadConfig, InputMissing, LampError, UsageError

PRESETS = Path(__file__).parent / "presets"


def _value(default: Any, about: str, advice: str = "", **limits: Any) -> Any:
    """A field: its default, what it means, what to do when it is out of range."""
    return Field(default, description=about, json_schema_extra={"advice": advice} if advice else None, **limits)


def _listed(value: Any) -> Any:
    """One path may stand without brackets."""
    return [value] if isinstance(value, str) else value


class Section(BaseModel):
    """What all sections share: unknown keys are errors, and nothing changes after the start."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Data(Section):
    """Where text comes from and how it is cut."""

    paths: Annotated[list[str], BeforeValidator(_listed)] = _value(
        [],
        "files, folders, globs (.txt .md .jsonl .json .csv .tsv .parquet, also .gz .zst), URLs (http, s3, hf, any fsspec one),"
        " or dataset:NAME (a Hugging Face dataset, folder or hub name); none = the embedded corpus",
    )
    weights: list[float] = _value([], "a mixture: the share of text that each entry of data.paths gives")
    mix_until: Literal["first", "all"] = _value(
        "first", "a mixture ends when its first source ends, or repeats the short ones until all have ended"
    )
    source: str | None = _value(None, 'a source of your own, "module:name"')
    separator: str | None = _value(None, "text that stands between two documents of a .txt file")
    text_key: str = _value("text", "the JSON key, or the CSV or Parquet column, that holds the text")
    dataset_config: str | None = _value(None, "of dataset:NAME, which configuration")
    dataset_split: str = _value("train", "of dataset:NAME, which split")
    retry_s: float = _value(600.0, "how long a remote file is tried again before it counts as lost", ge=0)
    format: Literal["auto", "text", "chat"] = _value(
        "auto", "plain text, or instruction rows (messages; prompt, completion; instruction, input, output)"
    )
    template: str | None = _value(
        None, "chat template: chatml, alpaca, plain, or a Jinja file; none = the tokenizer's own, else chatml"
    )
    loss_on: Literal["response", "all"] = _value(
        "response", "of instruction rows: learn the answers only, or all of it"
    )
    packing: Literal["auto", "windows", "packed", "grouped"] = _value(
        "auto",
        "windows over the stream (text), several examples in a window, or examples of like length padded to the longest",
    )
    over_length: Literal["truncate", "drop", "refuse"] = _value(
        "truncate",
        "an example that is longer than data.seq_len: cut its end off, leave it out, or refuse; always counted",
    )
    stream: bool = _value(False, "train while documents arrive, without a cache of all tokens")
    tokens_per_chunk: int = _value(
        1_000_000, "of a stream: tokens that are gathered, shuffled and trained on together", ge=1024
    )
    max_chunks: int | None = _value(None, "of a stream: stop after so many chunks", ge=1)
    at_end: Literal["repeat", "stop"] = _value("repeat", "of a stream that ends: another epoch, or the end of the run")
    workers: int | None = _value(
        None, "processes that tokenise or clean; none = the cores this process may use", ge=1, le=1024
    )
    seq_len: int = _value(256, "tokens in a window", "512 and 1024 are usual", ge=8, le=1_048_576)
    val_fraction: float = _value(0.02, "share of documents kept for validation", "0.01 to 0.1 is usual", ge=0, le=0.5)
    bad_text: Literal["set_aside", "refuse"] = _value(
        "set_aside", "lines that are not text (bad UTF-8, NUL, bad JSON): set aside and counted, or refused"
    )
    bad_limit: float = _value(
        0.001,
        "the share of all lines that may be set aside before the corpus is refused; 5 lines of a small corpus always may",
        ge=0,
        le=1,
    )
    max_documents: int | None = _value(None, "read only so many documents", ge=2)
    cache: Literal["auto", "require", "rebuild"] = _value("auto", "use, insist on, or rebuild the token cache")
    embedded_documents: int = _value(20_000, "size of the embedded corpus, in documents", ge=200, le=10_000_000)


class TokenizerSection(Section):
    """How text becomes numbers."""

    kind: Literal["bpe", "bytes"] = _value("bpe", "train a byte-level BPE, or use the 256 bytes")
    path: str | None = _value(None, "a tokenizer.json, or a folder that holds one: used instead of training")
    vocab_size: int = _value(
        8192, "size of the trained vocabulary", "257 is the least (256 bytes + end of text)", ge=257, le=1_000_000
    )
    sample_mb: float = _value(50.0, "train the tokenizer on so many MB, spread over the text", gt=0)


class Model(Section):
    """The network."""

    family: str = _value("gpt2", 'gpt2, llama, or a model of your own, "module:name"')
    layers: int = _value(6, "transformer blocks", ge=1, le=1000)
    width: int = _value(384, "model width", ge=8, le=65_536)
    heads: int = _value(6, "attention heads", "width must be a multiple of heads", ge=1, le=1024)
    kv_heads: int | None = _value(None, "key/value heads (llama); none = heads", ge=1)
    mlp_width: int | None = _value(
        None, "hidden width of the MLP; none = 4 x width (gpt2), about 8/3 x width (llama)", ge=8
    )
    dropout: float = _value(0.0, "dropout rate", "0.1 is usual for small data", ge=0, lt=0.9)
    init_from: str | None = _value(None, "start from the weights and shape of this Hugging Face folder")


WEIGHT_BYTES = GRADIENT_BYTES = 4  # of a parameter: both are float32, also where bf16 computes


@dataclass(frozen=True)
class OptimizerKind:
    """What the plan, the doctor and a save must know of an optimizer, without torch. Bytes are per parameter."""

    built_by: str  # "module:name", called with the model and the train section
    state_bytes: int  # kept from step to step
    moved_bytes: int  # read and written by one step, clipping included
    split: Literal["element", "block", "matrix"]  # the smallest part that a rank can update by itself

    @property
    def checkpoint_bytes(self) -> int:
        """Of a save, and of the copy in memory that an asynchronous save is written from."""
        return WEIGHT_BYTES + self.state_bytes

    @property
    def training_bytes(self) -> int:
        """Held on the device while training, besides activations."""
        return WEIGHT_BYTES + GRADIENT_BYTES + self.state_bytes


# A new optimizer is its own file and one line here (tests/test_optim.py compares the bytes with its real state).
OPTIMIZERS = {"adamw": OptimizerKind("lamplighter.train.optimizers:adamw", 8, 36, "element")}


class Train(Section):
    """How the model learns. Steps are optimizer steps, everywhere."""

    steps: int | None = _value(None, "optimizer steps; or give train.epochs", ge=1, le=10**12)
    epochs: float | None = _value(None, "passes over the data; or give train.steps", gt=0, le=10_000)
    batch_size: int = _value(16, "sequences per optimizer step, over all devices", ge=1, le=1_000_000)
    micro_batch: int | None = _value(None, "sequences that one device holds at once; none = batch_size", ge=1)
    lr: float = _value(3e-4, "peak learning rate", "3e-4 is usual for 100M parameters, 1e-3 for 1M", gt=0, le=1)
    min_lr_ratio: float = _value(0.1, "final rate as a share of the peak (cosine)", ge=0, le=1)
    warmup_steps: int | None = _value(None, "optimizer steps of warm-up; none = 5 % of the run, at most 2,000", ge=0)
    schedule: Literal["cosine", "constant"] = _value("cosine", "after warm-up")
    weight_decay: float = _value(0.1, "on matrices only", ge=0, le=10)
    beta1: float = _value(0.9, "AdamW", ge=0, lt=1)
    beta2: float = _value(0.95, "AdamW", ge=0, lt=1)
    grad_clip: float = _value(1.0, "largest gradient norm; 0 = no clipping", ge=0)
    seed: int = _value(1, "of the order, the weights and dropout", ge=0, lt=2**31)
    device: Literal["auto", "cpu", "cuda"] = _value("auto", "where to compute")
    dtype: Literal["auto", "fp32", "bf16"] = _value("auto", "bf16 means autocast; weights stay fp32")
    threads: int | None = _value(None, "CPU threads; none = the cores this process may use", ge=1, le=1024)
    on_nonfinite: Literal["skip", "stop"] = _value(
        "skip", "a batch with non-finite numbers: skip it (at most 3 within 100 steps), or stop"
    )
    compile: bool | Literal["auto"] = _value(
        "auto", "torch.compile each block; auto: where the run is long enough to pay for it"
    )
    loss: Literal["blocks", "whole"] = _value(
        "blocks", "work the loss out a few rows of logits at a time (less memory, faster), or on all logits as a whole"
    )
    recompute: bool = _value(False, "keep no activations of a block, compute them again for the backward pass")

    @property
    def optimizer(self) -> OptimizerKind:
        return OPTIMIZERS["adamw"]


class Save(Section):
    """When the work becomes durable."""

    every_steps: int = _value(500, "optimizer steps between saves; 0 = not by steps", ge=0)
    every_s: float = _value(600.0, "seconds between saves; 0 = not by time", ge=0)
    keep: int = _value(3, "checkpoints kept besides the best", "1 is the least", ge=1, le=10_000)
    staged: Literal["auto"] | bool = _value(
        "auto", "write beside the steps, from a copy in memory; auto = where memory allows"
    )


class Eval(Section):
    """Looking at the model while it learns."""

    every_steps: int = _value(250, "optimizer steps between validations; 0 = only at the end", ge=0)
    windows: int = _value(200, "validation windows used; 0 = all", ge=0)
    sample_every_steps: int = _value(250, "optimizer steps between samples; 0 = none", ge=0)
    sample_prompt: str = _value("", "what the samples begin with; empty = the start of a document")
    sample_tokens: int = _value(60, "length of a sample", ge=1, le=10_000)
    patience: int = _value(0, "end the run after so many validations without a new best; 0 = never", ge=0)


class Watch(Section):
    """How the run is looked after."""

    on_stuck: Literal["recover", "report", "stop"] = _value(
        "recover", "restart from the durable step, only say it, or stop with 70"
    )
    patience_s: float = _value(
        600.0,
        "how long a cause that cannot be proved is only named",
        "600 is usual; never below the longest step",
        ge=1,
    )
    notify: str | None = _value(
        None, "a command (the event as JSON on its stdin) or a URL, told of stuck, dead, diverged, finished"
    )
    stop_grace_s: float = _value(30.0, "how long a stop may take before the process is killed", ge=1)


class Budget(Section):
    """What the run may cost; counted over all attempts."""

    usd: float | None = _value(None, "stop, saved, before so many dollars are spent", gt=0)
    usd_per_hour: float | None = _value(None, "price of the machine", gt=0)
    hours: float | None = _value(None, "stop, saved, before so many hours have passed", gt=0)

    @model_validator(mode="after")
    def _price_known(self) -> Budget:
        if self.usd is not None and self.usd_per_hour is None:
            raise ValueError("budget.usd needs budget.usd_per_hour to be counted")
        return self

    def spent_usd(self, spent_s: float) -> float:
        return spent_s / 3600 * (self.usd_per_hour or 0.0)

    def left_s(self, spent_s: float) -> float:
        """Seconds until the first limit is reached; infinite without one."""
        limits = [self.hours * 3600] if self.hours is not None else []
        if self.usd is not None and self.usd_per_hour is not None:
            limits.append(self.usd / self.usd_per_hour * 3600)
        return min(limits) - spent_s if limits else float("inf")


class Run(Section):
    """Everything that a run is."""

    data: Data = Data()
    tokenizer: TokenizerSection = TokenizerSection()
    model: Model = Model()
    train: Train = Train()
    save: Save = Save()
    eval: Eval = Eval()
    watch: Watch = Watch()
    budget: Budget = Budget()

    @model_validator(mode="after")
    def _fits_together(self) -> Run:
        train, model, data = self.train, self.model, self.data
        if train.steps is not None and train.epochs is not None:
            raise ValueError("train.steps and train.epochs are both given; keep one of them")
        if train.micro_batch is not None and train.micro_batch > train.batch_size:
            raise ValueError(
                f"train.micro_batch {train.micro_batch} is larger than train.batch_size {train.batch_size}"
            )
        if model.width % model.heads:
            raise ValueError(f"model.width {model.width} is not a multiple of model.heads {model.heads}")
        if model.kv_heads is not None and model.heads % model.kv_heads:
            raise ValueError(f"model.heads {model.heads} is not a multiple of model.kv_heads {model.kv_heads}")
        if model.family not in ("gpt2", "llama") and ":" not in model.family:
            near = difflib.get_close_matches(model.family, ["gpt2", "llama"], 1, 0.3)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f'model.family {model.family!r} is not gpt2, llama or "module:name"{hint}')
        if data.stream and train.epochs is not None:
            raise ValueError(
                "a stream has no known length: give train.steps or data.max_chunks instead of train.epochs"
            )
        if data.max_chunks is not None and not data.stream:
            raise ValueError("data.max_chunks needs data.stream true")
        if data.weights and not data.paths:
            raise ValueError("data.weights mixes the entries of data.paths, and there are none")
        if self.eval.patience and not (self.eval.every_steps and data.val_fraction):
            raise ValueError(
                "eval.patience counts validations: it needs eval.every_steps and data.val_fraction above 0"
            )
        if data.paths and data.source:
            raise ValueError("data.paths and data.source are both given; keep one of them")
        return self


SECTIONS: dict[str, type[Section]] = {name: info.annotation for name, info in Run.model_fields.items()}  # type: ignore[misc]
MAY_CHANGE = ("save", "eval", "watch", "budget")  # at resume; train.steps too, with a warning
LENGTH = ("train.steps", "train.epochs")
NO_MATTER = ("data.cache", "data.workers", "data.retry_s", "data.max_chunks", "train.recompute", *LENGTH)


def fields() -> dict[str, FieldInfo]:
    """Every field by its dotted name."""
    return {f"{s}.{n}": info for s, section in SECTIONS.items() for n, info in section.model_fields.items()}


# ---------------------------------------------------------------- names that people bring from elsewhere

ELSEWHERE = {
    "max_seq_length": "data.seq_len", "max_length": "data.seq_len", "block_size": "data.seq_len",
    "seq_length": "data.seq_len", "context_length": "data.seq_len", "max_seq_len": "data.seq_len",
    "learning_rate": "train.lr", "max_steps": "train.steps", "max_iters": "train.steps", "num_steps": "train.steps",
    "iterations": "train.steps", "num_train_epochs": "train.epochs", "num_epochs": "train.epochs",
    "per_device_train_batch_size": "train.micro_batch", "micro_batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.micro_batch", "grad_accum": "train.micro_batch",
    "warmup": "train.warmup_steps", "warmup_iters": "train.warmup_steps", "lr_scheduler_type": "train.schedule",
    "max_grad_norm": "train.grad_clip", "bf16": "train.dtype", "fp16": "train.dtype", "precision": "train.dtype",
    "no_compile": "train.compile", "torch_compile": "train.compile", "save_steps": "save.every_steps",
    "save_interval": "save.every_steps", "save_every": "save.every_steps", "checkpoint_interval": "save.every_steps",
    "save_total_limit": "save.keep", "keep_last": "save.keep", "eval_steps": "eval.every_steps",
    "eval_interval": "eval.every_steps", "sample_interval": "eval.sample_every_steps", "n_layer": "model.layers",
    "num_layers": "model.layers", "num_hidden_layers": "model.layers", "n_embd": "model.width", "d_model": "model.width",
    "hidden_size": "model.width", "dim": "model.width", "n_head": "model.heads", "num_heads": "model.heads",
    "num_attention_heads": "model.heads", "n_kv_head": "model.kv_heads", "model_name_or_path": "model.init_from",
    "model_name": "model.init_from", "model_size": "--preset", "preset_name": "--preset", "size": "--preset",
    "output_dir": "--runs-dir", "out_dir": "--runs-dir", "resume_from_checkpoint": "--resume", "checkpoint": "--resume",
    "resume_from": "--resume", "run_name": "--run", "name": "--run", "dry_run": "--test", "test_mode": "--test",
    "use_pretokenized": "data.cache", "no_pretokenized": "data.cache", "dataset": "data.paths", "data_path": "data.paths",
    "data_dir": "data.paths", "train_file": "data.paths", "input": "data.paths", "tokenizer_path": "tokenizer.path",
    "tokenizer_dir": "tokenizer.path", "vocab": "tokenizer.vocab_size", "max_cost": "budget.usd", "budget": "budget.usd",
    "hourly_rate": "budget.usd_per_hour", "max_hours": "budget.hours", "val_split": "data.val_fraction",
    "min_lr": "train.min_lr_ratio", "wd": "train.weight_decay", "num_workers": "data.workers", "streaming": "data.stream",
    "chat_template": "data.template", "sequence_len": "data.seq_len", "base_model": "model.init_from",
    "sample_packing": "data.packing", "train_on_inputs": "data.loss_on", "val_set_size": "data.val_fraction",
    "gradient_checkpointing": "train.recompute", "activation_checkpointing": "train.recompute",
}  # fmt: skip


def nearest(name: str, extra: list[str] | None = None) -> str | None:
    """The field or flag that was probably meant."""
    plain = name.lstrip("-").replace("-", "_")
    leaf = plain.rsplit(".", 1)[-1]
    known = list(fields())
    if leaf in ELSEWHERE:
        return ELSEWHERE[leaf]
    exact = [field for field in known if field.rsplit(".", 1)[1] == leaf]
    if exact:
        return exact[0]
    candidates = {field: field for field in known} | {field.rsplit(".", 1)[1]: field for field in known}
    candidates |= {flag.lstrip("-").replace("-", "_"): flag for flag in extra or []}
    candidates |= {old: new for old, new in ELSEWHERE.items() if len(old) > 4}
    best = difflib.get_close_matches(plain, candidates, 1, 0.6) or difflib.get_close_matches(leaf, candidates, 1, 0.6)
    return candidates[best[0]] if best else None


def unknown(name: str, where: str, error: type[LampError], extra: list[str] | None = None) -> LampError:
    """The three lines for a name that does not exist."""
    meant = nearest(name, extra)
    as_flag = error is UsageError
    suggestion = (meant if meant is None or meant.startswith("--") else f"--{meant}") if as_flag else meant
    return error(
        f"{name} is not {'a flag' if as_flag else 'a field'}" + (f" ({where})" if where else ""),
        f"did you mean {suggestion}?" if suggestion else "nothing has a name like it",
        "lamp train --help lists every field" if not suggestion else _usage(suggestion),
    )


def _usage(suggestion: str) -> str:
    info = fields().get(suggestion.lstrip("-"))
    return f"{suggestion}: {info.description}" if info else "lamp train --help lists every flag and field"


# ---------------------------------------------------------------- reading


class _Loader(yaml.SafeLoader):
    """YAML in which 3e-4 is a number."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


@dataclass(frozen=True)
class Resolved:
    """A run and where each of its values came from."""

    run: Run
    origin: dict[str, str] = field(default_factory=dict)
    preset: str | None = None


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


TEXT_ENDINGS = (".txt", ".text", ".md", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".gz", ".zst")
YAML_BYTES = 1 << 20  # nobody writes so much by hand, and YAML takes minutes for it


def _refuse_text(path: Path) -> None:
    """A folder or a file of text where a run.yaml is wanted: a newcomer's first guess."""
    if path.is_dir():
        what = f"{path} is a folder, not a run.yaml"
    elif path.suffix.lower() in TEXT_ENDINGS or (path.is_file() and path.stat().st_size > YAML_BYTES):
        what = f"{path} is not a run.yaml"
    else:
        return
    raise UsageError(what, "the word without a flag is a file of settings", f"text is named so: --data.paths '{path}'")


def read_yaml(path: Path, label: str | None = None) -> dict[str, tuple[Any, str]]:
    """Dotted name -> (value, 'file:line')."""
    _refuse_text(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputMissing(
            f"cannot read {path}", str(error), "check the name; lamp train --help shows the usage"
        ) from error
    try:
        root = yaml.compose(text, Loader=_Loader)
        values = yaml.load(text, Loader=_Loader) or {}
    except yaml.YAMLError as error:
        raise BadConfig(f"{path} is not valid YAML", " ".join(str(error).split()), "mend that line") from error
    if not isinstance(values, dict):
        raise BadConfig(
            f"{path} is not a mapping of sections", f"it holds {type(values).__name__}", "begin with 'train:'"
        )
    found: dict[str, tuple[Any, str]] = {}
    _refuse_duplicates([key for key, _ in root.value] if root else [], label or path.name)
    for key_node, value_node in root.value if root else []:
        section, where = key_node.value, f"{label or path.name}:{key_node.start_mark.line + 1}"
        if section not in SECTIONS:
            raise _unknown_section(str(section), where)
        if values[section] is None:
            continue
        if not isinstance(values[section], dict):
            raise BadConfig(
                f"{where}: {section} is not a mapping",
                f"it holds {values[section]!r}",
                f"indent fields below {section}:",
            )
        _refuse_duplicates([inner for inner, _ in value_node.value], label or path.name)
        for (inner, _), (name, value) in zip(value_node.value, values[section].items(), strict=True):
            found[f"{section}.{name}"] = (value, f"{label or path.name}:{inner.start_mark.line + 1}")
    return found


def _refuse_duplicates(keys: list[yaml.Node], label: str) -> None:
    """YAML lets the last of two equal keys win in silence; we do not."""
    seen: dict[str, int] = {}
    for key in keys:
        line = key.start_mark.line + 1
        if str(key.value) in seen:
            raise BadConfig(
                f"{key.value} stands twice ({label}:{seen[str(key.value)]} and :{line})",
                "only one can count",
                "take one out",
            )
        seen[str(key.value)] = line


def _unknown_section(name: str, where: str) -> LampError:
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
            raise unknown(f"--{name}", "", UsageError)
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
            return yaml.load(words[0], Loader=_Loader)
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
            near = difflib.get_close_matches(preset, preset_names(), 1, 0.4)
            hint = f"did you mean {near[0]}?" if near else "presets: " + ", ".join(preset_names())
            raise UsageError(f"there is no preset {preset}", hint, "presets: " + ", ".join(preset_names()))
        for name, (value, _) in read_yaml(PRESETS / f"{preset}.yaml", f"preset {preset}").items():
            values[name], origin[name] = value, f"preset {preset}"
    if file is not None:
        for name, (value, where) in read_yaml(file).items():
            if name not in fields():
                raise unknown(name, where, BadConfig)
            values[name], origin[name] = value, where
    for name, words in (overrides or {}).items():
        values[name], origin[name] = _from_words(name, words), "command line"
    _one_length(values, origin)
    run = _validate(values, origin)
    return _small(run, origin, preset) if test else Resolved(run, origin, preset)


def _one_length(values: dict[str, Any], origin: dict[str, str]) -> None:
    """steps and epochs exclude each other: the one from the higher layer wins; without either, 2,000 steps."""
    rank = {"default": 0, "preset": 1, "file": 2, "command line": 3}
    given = {n: rank.get(origin[n].split(" ")[0] if origin[n].startswith("preset") else origin[n], 2)
             for n in ("train.steps", "train.epochs") if values.get(n) is not None}  # fmt: skip
    if len(given) == 2 and len(set(given.values())) == 2:
        loser = min(given, key=lambda name: given[name])
        values[loser], origin[loser] = None, "replaced by " + max(given, key=lambda name: given[name])
    streamed = str(values.get("data.stream")).lower() in ("true", "1", "yes", "on") and values.get("data.max_chunks")
    if not given and not streamed:
        values["train.steps"] = 2000


def _validate(values: dict[str, Any], origin: dict[str, str]) -> Run:
    nested: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, leaf = name.split(".", 1)
        nested.setdefault(section, {})[leaf] = _plain_int(name, value)
    try:
        return Run.model_validate(nested)
    except ValidationError as error:
        raise _explain(error, values, origin) from None


def _plain_int(name: str, value: Any) -> Any:
    """1e4 is a whole number too."""
    info = fields().get(name)
    wants_int = info is not None and (info.annotation is int or int in get_args(info.annotation))
    if wants_int and isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d+", value):
        value = float(value)
    return int(value) if wants_int and isinstance(value, float) and value.is_integer() else value


def _explain(error: ValidationError, values: dict[str, Any], origin: dict[str, str]) -> LampError:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"][:2])
    message = first["msg"].removeprefix("Value error, ")
    info = fields().get(name)
    if info is None:
        return BadConfig(message, "the sections do not fit together", "change one of the two and start again")
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    advice = str(extra.get("advice", "")) or f"the default is {info.default}"
    where = origin.get(name, "default")
    return BadConfig(
        f"{name}: {values.get(name)!r} will not do ({where})",
        f"{message[0].lower()}{message[1:]}; {name} is: {info.description}",
        f"{advice}; lamp train --help lists every field",
    )


# ---------------------------------------------------------------- --test, --print-config, resume


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
    }
    values = {f"{s}.{n}": value for s, section in run.model_dump().items() for n, value in section.items()}
    changed = {name: "--test" for name, value in small.items() if values[name] != value}
    origin = {**origin, **changed}
    return Resolved(_validate({**values, **small}, origin), origin, preset)


def dump(resolved: Resolved) -> str:
    """The run as YAML, each value with where it came from."""
    lines = [f"# preset: {resolved.preset}"] if resolved.preset else []
    for section, values in resolved.run.model_dump().items():
        lines.append(f"{section}:")
        for name, value in values.items():
            text = yaml.safe_dump({name: value}, default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]
            lines.append(f"  {text:<38} # {resolved.origin.get(f'{section}.{name}', 'default')}")
    return "\n".join(lines) + "\n"


def with_change(resolved: Resolved, name: str, value: Any, reason: str) -> Resolved:
    """The same run with one field changed, and why; of steps and epochs the other one goes."""
    values = {f"{s}.{n}": old for s, section in resolved.run.model_dump().items() for n, old in section.items()}
    changed = {name: value, **({other: None for other in LENGTH if other != name} if name in LENGTH else {})}
    origin = {**resolved.origin, **dict.fromkeys(changed, reason)}
    return Resolved(_validate({**values, **changed}, origin), origin, resolved.preset)


def load_dump(path: Path) -> Run:
    """The run that `dump` wrote."""
    return _validate({name: value for name, (value, _) in read_yaml(path).items()}, {})


def drift(old: Run, new: Run) -> list[str]:
    """What a resume may not change, as 'train.lr: 0.001 -> 0.002'."""
    before, after = old.model_dump(), new.model_dump()
    return [
        f"{section}.{name}: {before[section][name]} -> {value}"
        for section, values in after.items()
        for name, value in values.items()
        if section not in MAY_CHANGE and f"{section}.{name}" not in NO_MATTER and before[section][name] != value
    ]
