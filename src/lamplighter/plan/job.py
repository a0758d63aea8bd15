"""What is to be trained, as far as arithmetic needs it. No torch.

In:  a resolved run; what is known of its model, its text and its length.
Out: a Job; the shape of the model and the size of the vocabulary as the settings and the files say them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lamplighter.config import OPTIMIZERS, WEIGHT_BYTES, Budget, Eval, Lora, OptimizerKind, Run, Save
from lamplighter.errors import BadConfig
from lamplighter.gpus import Device
from lamplighter.leaves import leaf_size
from lamplighter.model.lora_targets import lora_parameters, refuse_unknown_in, stored_lora_parameters
from lamplighter.model.shape import (
    FAMILIES,
    NotOurs,
    Shape,
    approximate_shape,
    count_parameters,
    flops_per_token,
    frozen_bytes,
    hidden_parameters,
    matmul_parameters_per_layer,
    orthogonalising_flops,
    shape_from_hf,
)
from lamplighter.model.stored import stored_numbers
from lamplighter.rundir import read_json
from lamplighter.schedule import Schedule, schedule

_BYTES_VOCABULARY = 257


@dataclass(frozen=True)
class Text:
    """What is known of the data."""

    tokens: int  # to train on; padding is not counted
    how: str  # counted where, or estimated from what
    counted: bool
    val_tokens: int | None = None
    padding: float = 0.0  # of the positions that are computed
    samples: int | None = None  # windows or examples of an epoch, where they are known
    noun: str = "windows"


@dataclass(frozen=True)
class Measured:
    """What a few real steps took, in a process of their own."""

    step_s: float
    peak_gib: float
    micro_batch: int
    steps: int
    dtype: str
    fits: bool = True
    why: str = ""


@dataclass(frozen=True)
class Known:
    """What is known beyond the settings."""

    text: Text | None = None
    vocab_size: int | None = None  # of the tokenizer
    measured: Measured | None = None
    largest: int | None = None
    own_params: int | None = None
    segments: bool = False
    row_tokens: float | None = None
    device: Device | None = None  # on which steps were tried


@dataclass(frozen=True)
class Job:
    """One run, in numbers."""

    shape: Shape
    seq_len: int
    batch_size: int
    micro_batch: int
    steps: int
    dtype: str = "fp32"
    tree: int = 1  # parts that gradients of micro-batches are summed by: train.tree
    shard: str = (
        "auto"  # none: the whole model on every device; full: FSDP2, a unit for each block; auto: none where it fits
    )
    sharded: bool = False  # as it was chosen for a device (plan/estimate.py)
    leaf_given: bool = True  # train.micro_batch; else it follows from the number of devices
    recompute: bool = False
    whole_logits: bool = False  # train.loss whole, or a model of one's own
    segments: bool = False  # packed examples, kept apart by a mask
    text: Text | None = None
    row_tokens: float | None = None  # positions of a row on average, where they are fewer than seq_len
    own_params: int | None = None  # of a model of one's own: all that is known of it
    tokenizer_vocab: int | None = None
    counted_params: int | None = None  # of another family: as its files hold them
    counted_trained: int | None = None  # adapters on it, where the names in its files tell
    pretrained: bool = False  # it begins from a model that exists
    pairs: bool = False  # train.objective dpo: a reference pass comes before the first step
    lora: Lora = field(default_factory=Lora)
    optimizer: OptimizerKind = OPTIMIZERS["adamw"]
    optimizer_ranks: int = 1  # that share out its products
    rate: Schedule | None = None
    save: Save = field(default_factory=Save)
    eval: Eval = field(default_factory=Eval)
    budget: Budget = field(default_factory=Budget)
    spent_s: float = 0.0  # of it, by what has gone before

    @property
    def params(self) -> int:
        """Of the model; adapters are counted by `trained`."""
        return self.own_params or self.counted_params or count_parameters(self.shape)

    @property
    def trained(self) -> int:
        """What has gradients and optimizer state, and is saved."""
        if self.lora.r is None:
            return self.params
        if self.counted_trained is not None:
            return self.counted_trained
        return lora_parameters(self.shape, self.lora.r, self.lora.targets)

    @property
    def hidden(self) -> int:
        """Those of them in matrices inside the blocks, as far as paper goes."""
        if self.own_params:
            return 0
        if self.lora.r is not None:
            return self.trained
        return min(self.trained, hidden_parameters(self.shape))

    @property
    def optimizer_flops(self) -> float:
        """Of the products that the optimizer makes in a step, by one rank."""
        counts = self.optimizer.orthogonalises and not self.own_params and self.lora.r is None
        return orthogonalising_flops(self.shape) / self.optimizer_ranks if counts else 0.0

    @property
    def weight_bytes(self) -> int:
        """In memory: all in fp32, or the frozen ones as lora.base_dtype says, with the adapters in fp32."""
        if self.lora.r is None:
            return WEIGHT_BYTES * self.params
        share = self.params / count_parameters(self.shape)
        return int(frozen_bytes(self.shape, self.lora.base_dtype) * share) + WEIGHT_BYTES * self.trained

    @property
    def flops_per_token(self) -> float:
        """6N + attention; 6N of a model of one's own; of frozen weights 4N, which get no gradient."""
        full = 6.0 * self.own_params if self.own_params else flops_per_token(self.shape, self.seq_len)
        if self.lora.r is None:
            return full
        matrices = (
            self.shape.layers * matmul_parameters_per_layer(self.shape) + self.shape.vocab_size * self.shape.width
        )
        return full - 2.0 * matrices + 6.0 * self.trained

    @property
    def step_tokens(self) -> float:
        return self.batch_size * (self.row_tokens or self.seq_len)

    @property
    def tokens(self) -> int:
        return round(self.steps * self.step_tokens)

    @property
    def reference_positions(self) -> float:
        """Of preference pairs: what the reference model goes over once, both sides of the data with their padding."""
        if not self.pairs or self.text is None:
            return 0.0
        return (self.text.tokens + (self.text.val_tokens or 0)) / (1 - self.text.padding)

    @property
    def accumulation(self) -> int:
        return math.ceil(self.batch_size / self.micro_batch)

    @property
    def nodes(self) -> int:
        """Base nodes of the tree by which gradients are summed (train/gradients.py)."""
        return min(self.tree, self.accumulation)

    @property
    def epochs(self) -> float | None:
        """Passes over the data; None where it is not known."""
        if self.text is None or not self.text.tokens:
            return None
        return self.tokens * (1 - self.text.padding) / self.text.tokens

    @property
    def limit_hours(self) -> float:
        """What the budget leaves; infinite without one."""
        return self.budget.left_s(self.spent_s) / 3600


def job_of(
    run: Run, shape: Shape, steps: int, dtype: str, text: Text | None = None, *, ranks: int = 1, **more: Any
) -> Job:
    """What a resolved run asks for."""
    train = run.train
    return Job(
        shape=shape,
        seq_len=run.data.seq_len,
        batch_size=train.batch_size,
        micro_batch=train.micro_batch or leaf_size(train.batch_size, ranks),
        leaf_given=train.micro_batch is not None,
        steps=steps,
        dtype=dtype,
        tree=train.tree,
        shard=train.shard,
        recompute=train.recompute,
        whole_logits=train.loss == "whole" or bool(more.get("own_params")),
        text=text,
        optimizer=train.optimizer_kind,
        pretrained=run.model.init_from is not None,
        pairs=train.objective == "dpo",
        lora=run.lora,
        counted_params=_counted(run),
        counted_trained=_counted_adapters(run),
        rate=schedule(train, steps),
        save=run.save,
        eval=run.eval,
        **{"budget": run.budget, **more},
    )


def _count_steps(run: Run, text: Text | None) -> int:
    """train.steps, or the epochs over what is known of the data."""
    train, data = run.train, run.data
    if train.steps is not None:
        return train.steps
    if data.stream and data.max_chunks:
        return max(1, math.ceil(data.max_chunks * data.tokens_per_chunk / (train.batch_size * data.seq_len)))
    if text is None or train.epochs is None:
        what, why = "the length of the run is not known on paper", "train.epochs needs the data to be counted"
        raise BadConfig(what, why, "give data.paths, or train.steps")
    rows = text.samples or math.ceil(text.tokens / (1 - text.padding) / data.seq_len)
    return max(1, math.ceil(train.epochs * rows / train.batch_size))


def shape_of(run: Run, vocab_size: int | None = None) -> Shape:
    """The model of a run, as far as paper goes; with the vocabulary of its tokenizer where that is known."""
    model = run.model
    if model.init_from is not None:
        config = read_json(Path(model.init_from) / "config.json")
        if not isinstance(config, dict):
            raise BadConfig(f"model.init_from {model.init_from}", "no readable config.json", "check the path")
        try:
            return approximate_shape(config) if _is_other_family(config) else shape_from_hf(config)
        except (ValueError, KeyError) as error:
            raise BadConfig(
                f"{model.init_from}/config.json", str(error), "use the whole folder of the model"
            ) from error
    sizes: dict[str, Any] = {"kv_heads": model.kv_heads or 0, "mlp_width": model.mlp_width or 0}
    family = model.family if model.family in FAMILIES else "gpt2"
    try:
        return Shape(
            family,  # type: ignore[arg-type]
            vocab_size or vocabulary(run),
            run.data.seq_len,
            layers=model.layers,
            width=model.width,
            heads=model.heads,
            dropout=model.dropout,
            tie_embeddings=model.tie_embeddings,
            **sizes,
        )
    except ValueError as error:
        raise BadConfig("the model section does not fit together", str(error), "change one of the sizes") from error


def is_own(run: Run) -> bool:
    return run.model.init_from is None and run.model.family not in FAMILIES


def _is_other_family(config: dict[str, Any]) -> bool:
    """Neither of the two that are built here: by transformers."""
    try:
        shape_from_hf(config)
    except NotOurs:  # that is the answer
        return True
    except (ValueError, KeyError):  # ours and damaged: said where it is read
        return False
    return False


def _other_family(run: Run) -> bool:
    config = read_json(Path(run.model.init_from) / "config.json") if run.model.init_from else None
    return isinstance(config, dict) and _is_other_family(config)


def _counted(run: Run) -> int | None:
    """The numbers in the files of another family, whose sizes are only nearly known."""
    if not _other_family(run):
        return None
    try:
        return stored_numbers(Path(str(run.model.init_from)))
    except (OSError, ValueError):  # said where the weights are read
        return None


def _counted_adapters(run: Run) -> int | None:
    """Those of another family, by the names in its files."""
    if run.lora.r is None or not _other_family(run):
        return None
    try:
        return stored_lora_parameters(Path(str(run.model.init_from)), run.lora.r, run.lora.targets)
    except (OSError, ValueError):  # said where the weights are read
        return None


def refuse_unknown_targets(run: Run) -> None:
    """BadConfig for a name in lora.targets that no layer has, where the model is built here; others are asked when they are built."""
    if run.lora.r is not None and not _other_family(run):
        refuse_unknown_in(shape_of(run), run.lora.targets)


def is_built_first(run: Run) -> bool:
    """Whether the data can only be laid out when the model is there."""
    return is_own(run) or _other_family(run)


def known_shape(run: Run) -> Shape | None:
    """None of a model of one's own."""
    return None if is_own(run) else shape_of(run)


def family_of(run: Run) -> str:
    """gpt2, llama, or the name of another family or of a model of one's own."""
    if _other_family(run):
        return str(read_json(Path(str(run.model.init_from)) / "config.json").get("model_type"))
    shape = known_shape(run)
    return shape.family if shape else run.model.family


def vocabulary(run: Run) -> int:
    """Of the tokenizer: as the settings say it, or as its file does."""
    section = run.tokenizer
    given = section.path or run.model.init_from
    if given is None:
        return _BYTES_VOCABULARY if section.kind == "bytes" else section.vocab_size
    path = Path(given)
    content = read_json(path / "tokenizer.json" if path.is_dir() else path)
    if not isinstance(content, dict) or "model" not in content:
        raise BadConfig(f"tokenizer of {path}", "no readable tokenizer.json there", "check the path")
    vocab = content["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    return 1 + int(max([*ids, *(token["id"] for token in content.get("added_tokens", []))]))


def job_on(run: Run, device: Device, known: Known) -> Job:
    """A run on a device; without data its tokens are steps x batch x length."""
    if is_own(run) and known.own_params is None:
        what = f"model.family {run.model.family} cannot be planned on paper"
        raise BadConfig(what, "only its own code knows its size", "lamp plan --measure builds and tries it")
    dtype = device.dtype if run.train.dtype == "auto" else run.train.dtype
    if dtype == "bf16" and not (device.bf16_flops or device.is_cpu):
        raise BadConfig(f"{device.name} has no bf16", "it would be emulated, slower than fp32", "--train.dtype fp16")
    if known.measured is not None and known.measured.fits:
        dtype = known.measured.dtype
    refuse_unknown_targets(run)
    has = known.vocab_size or vocabulary(run)
    return job_of(
        run,
        shape_of(run, has),
        _count_steps(run, known.text),
        dtype,
        known.text,
        tokenizer_vocab=has,
        own_params=known.own_params,
        segments=known.segments,
        row_tokens=known.row_tokens,
        ranks=device.count,
        budget=_budget_for(run.budget, device),
    )


def _budget_for(budget: Budget, device: Device) -> Budget:
    """Of devices that are rented by the piece, each costs budget.usd_per_hour; a machine that is here has one price."""
    if budget.usd_per_hour is None or not device.is_elsewhere:
        return budget
    return replace(budget, usd_per_hour=budget.usd_per_hour * device.count)


def on_devices(job: Job, was: Device, now: Device) -> Job:
    """The same run on another number of devices: with its share of the batch where that was not given, and its price."""
    size = job.micro_batch if job.leaf_given else leaf_size(job.batch_size, now.count)
    price = job.budget.usd_per_hour
    if price is not None:
        price *= now.count / was.count
    return replace(job, micro_batch=size, budget=replace(job.budget, usd_per_hour=price))
