"""What a run is made of: its sections and their fields, each with default, meaning, limits and advice.

In:  values by section and name, from a YAML file or a command line.
Out: a frozen Run; ValidationError or ValueError for what cannot be.

Sections are plain dataclasses, and pydantic's core checks the values: its own model classes take 80 ms to load and to build,
at every start of `lamp` (decision 018).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from lamplighter.model.shape import FAMILIES

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator


def _value(default: Any, about: str, advice: str = "", **limits: Any) -> Any:
    """A field: its default, what it means, what to do when it is out of range."""
    about_it = {"description": about, "advice": advice, "limits": limits}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=about_it)
    return field(default=default, metadata=about_it)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where text comes from and how it is cut."""

    paths: list[str] = _value(  # noqa: RUF009
        [],
        "files, folders, globs (.txt .md .jsonl .json .csv .tsv .parquet, also .gz .zst), URLs (http, s3, hf, any fsspec one),"
        " or dataset:NAME (a Hugging Face dataset, folder or hub name); none = the embedded corpus",
    )
    weights: list[float] = _value([], "a mixture: the share of text that each entry of data.paths gives")  # noqa: RUF009
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
        "the share of all lines that may be set aside before the corpus is refused; up to 5 always may, if no more than a tenth",
        ge=0,
        le=1,
    )
    max_documents: int | None = _value(None, "read only so many documents", ge=2)
    cache: Literal["auto", "require", "rebuild"] = _value("auto", "use, insist on, or rebuild the token cache")
    embedded_documents: int = _value(20_000, "size of the embedded corpus, in documents", ge=200, le=10_000_000)


@dataclass(frozen=True, kw_only=True)
class TokenizerSection:
    """How text becomes numbers."""

    kind: Literal["bpe", "bytes"] = _value("bpe", "train a byte-level BPE, or use the 256 bytes")
    path: str | None = _value(None, "a tokenizer.json, or a folder that holds one: used instead of training")
    vocab_size: int = _value(
        8192, "size of the trained vocabulary", "257 is the least (256 bytes + end of text)", ge=257, le=1_000_000
    )
    sample_mb: float = _value(50.0, "train the tokenizer on so many MB, spread over the text", gt=0)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network."""

    family: str = _value(
        "gpt2", 'gpt2, llama, qwen3, or a model of your own, "module:name"; from scratch qwen3, unless it is given'
    )
    layers: int = _value(6, "transformer blocks", ge=1, le=1000)
    width: int = _value(384, "model width", ge=8, le=65_536)
    heads: int = _value(6, "attention heads", "width must be a multiple of heads", ge=1, le=1024)
    kv_heads: int | None = _value(None, "key/value heads (llama, qwen3); none = heads", ge=1)
    mlp_width: int | None = _value(
        None, "hidden width of the MLP; none = 4 x width (gpt2), about 8/3 x width (llama, qwen3)", ge=8
    )
    tie_embeddings: bool = _value(True, "the last matrix is the embedding of the tokens, or one of its own")
    dropout: float = _value(0.0, "dropout rate", "0.1 is usual for small data", ge=0, lt=0.9)
    init_from: str | None = _value(
        None, "start from the weights and shape of this Hugging Face folder, or of org/name on the hub"
    )
    revision: str | None = _value(None, "of org/name on the hub: a branch, tag or commit; none = main as it is now")


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters on a frozen model; off unless lora.r is given."""

    r: int | None = _value(
        None, "rank of the adapters; none = all weights are trained", "8 to 64 is usual", ge=1, le=4096
    )
    alpha: float | None = _value(None, "adapters are scaled by alpha / r; none = 2 x r", gt=0)
    dropout: float = _value(0.0, "dropout rate of what an adapter reads", "0.05 for small data", ge=0, lt=1)
    targets: list[str] = _value(  # noqa: RUF009
        ["auto"],
        "layers with an adapter: auto (those of attention), all-linear (all but the head), or names such as q_proj v_proj",
    )
    base_dtype: Literal["fp32", "bf16", "int8"] = _value(
        "fp32", "how the frozen matrices of the layers are kept in memory"
    )

    @property
    def scale(self) -> float:
        assert self.r is not None
        return (2.0 * self.r if self.alpha is None else self.alpha) / self.r


WEIGHT_BYTES = GRADIENT_BYTES = 4  # of a parameter: both are float32, also where bf16 computes


@dataclass(frozen=True)
class OptimizerKind:
    """What the plan, the doctor and a save must know of an optimizer, without torch. Bytes are per parameter."""

    name: str
    built_by: str  # "module:name", called with the model and the train section
    state_bytes: int  # kept from step to step
    moved_bytes: int  # read and written by one step, clipping included
    split: Literal["element", "block", "matrix"]  # the smallest part that a rank can update by itself
    hidden_bytes: int | None = None  # kept of a matrix inside the blocks, where that is something else
    orthogonalises: bool = False  # those matrices, by Newton-Schulz steps: products that the plan counts

    def state(self, trained: int, hidden: int = 0) -> int:
        """Bytes for so many parameters, `hidden` of them in matrices inside the blocks."""
        each = self.state_bytes if self.hidden_bytes is None else self.hidden_bytes
        return self.state_bytes * (trained - hidden) + each * hidden

    def checkpoint(self, trained: int, hidden: int = 0) -> int:
        """Bytes of a save, and of the copy in memory that an asynchronous save is written from."""
        return WEIGHT_BYTES * trained + self.state(trained, hidden)

    def training(self, trained: int, hidden: int = 0) -> int:
        """Bytes held on the device while training, besides activations."""
        return (WEIGHT_BYTES + GRADIENT_BYTES) * trained + self.state(trained, hidden)


# A new optimizer is its own file and one line here (tests/unit/test_optim.py compares the bytes with its real state).
OPTIMIZERS = {
    kind.name: kind
    for kind in (
        OptimizerKind("adamw", "lamplighter.train.optimizers:adamw", 8, 36, "element"),
        OptimizerKind("muon", "lamplighter.train.muon:muon", 8, 44, "matrix", hidden_bytes=4, orthogonalises=True),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Train:
    """How the model learns. Steps are optimizer steps, everywhere."""

    objective: Literal["sft", "dpo"] = _value(
        "sft",
        "what is learned: sft, the next token (of text, or of answers); dpo, to prefer the chosen of two answers (rows with prompt,"
        " chosen, rejected)",
    )
    dpo_beta: float = _value(0.1, "of dpo: how strongly it is held to the model that it began from", gt=0, le=100)
    steps: int | None = _value(None, "optimizer steps; or give train.epochs", ge=1, le=10**12)
    epochs: float | None = _value(None, "passes over the data; or give train.steps", gt=0, le=10_000)
    batch_size: int = _value(16, "sequences per optimizer step, over all devices", ge=1, le=1_000_000)
    micro_batch: int | None = _value(None, "sequences that one device holds at once; none = batch_size", ge=1)
    ranks: int | Literal["auto"] = _value(
        "auto",
        "processes that share out each step, one per device; auto: every GPU that is there, or one process on a CPU",
        ge=1,
        le=1024,
    )
    tree: int = _value(
        8,
        "gradients of micro-batches are summed by a binary tree of at most so many parts; 1 takes the least memory",
        ge=1,
        le=1024,
    )
    reduction: Literal["tree", "native"] = _value(
        "tree",
        "how ranks add up gradients: in the order of one tree, the same bits on any number of ranks; or natively, in the order of"
        " torch's all_reduce, the same bits on the same number of ranks only",
    )
    shard: Literal["auto", "none", "full"] = _value(
        "auto",
        "none: every rank holds the whole model; full: weights, gradients and optimizer are divided among the ranks (FSDP2);"
        " auto: divided where one device cannot hold the whole; the bits are the same",
    )
    optimizer: str = _value(
        "adamw",
        f"one of: {', '.join(OPTIMIZERS)}; muon for a model from scratch, adamw where train.lr is given alone and for all other models",
        choices=OPTIMIZERS,
    )
    lr: float = _value(
        3e-4,
        "peak learning rate; with muon, of matrices",
        "with AdamW 3e-4 is usual for 100M parameters, 1e-3 for 1M; with Muon 0.02",
        gt=0,
        le=1,
    )
    min_lr_ratio: float = _value(0.1, "final rate as a share of the peak (cosine)", ge=0, le=1)
    warmup_steps: int | None = _value(None, "optimizer steps of warm-up; none = 5 % of the run, at most 2,000", ge=0)
    schedule: Literal["cosine", "constant", "wsd"] = _value(
        "cosine", "after warm-up; wsd is constant, then falls in a straight line"
    )
    decay_ratio: float = _value(0.4, "the share of the steps in which wsd falls", "0.2 to 0.5 is usual", gt=0, le=1)
    weight_decay: float = _value(0.1, "on matrices only", ge=0, le=10)
    beta1: float = _value(0.9, "AdamW", ge=0, lt=1)
    beta2: float = _value(0.95, "AdamW", ge=0, lt=1)
    grad_clip: float = _value(1.0, "largest gradient norm; 0 = no clipping", ge=0)
    seed: int = _value(1, "of the order, the weights and dropout", ge=0, lt=2**31)
    device: Literal["auto", "cpu", "cuda"] = _value("auto", "where to compute")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = _value(
        "auto", "bf16 and fp16 mean autocast; weights stay fp32; fp16 (cards without bf16) has a loss scale"
    )
    exact: bool | Literal["auto"] = _value(
        "auto",
        "on a GPU, kernels that give the same bits each time; auto: unless lamp selftest measured over 15 % for it",
    )
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
    def optimizer_kind(self) -> OptimizerKind:
        return OPTIMIZERS[self.optimizer]


@dataclass(frozen=True, kw_only=True)
class Save:
    """When the work becomes durable."""

    every_steps: int = _value(500, "optimizer steps between saves; 0 = not by steps", ge=0)
    every_s: float = _value(600.0, "seconds between saves; 0 = not by time", ge=0)
    keep: int = _value(3, "checkpoints kept besides the best", "1 is the least", ge=1, le=10_000)
    staged: Literal["auto"] | bool = _value(
        "auto", "write beside the steps, from a copy in memory; auto = where memory allows"
    )
    memory: Literal["auto"] | bool = _value(
        "auto", "keep the newest step in memory that outlives the process (Linux); auto = where two copies fit"
    )
    mirror: str | None = _value(
        None,
        "a folder or an fsspec URL (s3://bucket/runs ...) to which finished checkpoints are copied; resumed from there",
    )
    mirror_wait_s: float = _value(300.0, "how long the end of a run waits for the last copy to save.mirror", ge=0)


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Looking at the model while it learns."""

    every_steps: int = _value(250, "optimizer steps between validations; 0 = only at the end", ge=0)
    windows: int = _value(200, "validation windows used; 0 = all", ge=0)
    sample_every_steps: int = _value(250, "optimizer steps between samples; 0 = none", ge=0)
    sample_prompt: str = _value("", "what the samples begin with; empty = the start of a document")
    sample_tokens: int = _value(60, "length of a sample", ge=1, le=10_000)
    patience: int = _value(0, "end the run after so many validations without a new best; 0 = never", ge=0)
    tasks: str | None = _value(
        None, "tasks of lamp eval for every checkpoint that is kept, such as held-back,hellaswag"
    )
    data: str | None = _value(None, "the folder with the data of eval.tasks")
    limit: int | None = _value(None, "items of each of eval.tasks; none = all", ge=1)
    while_training: bool = _value(False, "eval.tasks beside the training, which gets slower by it, not after its end")


@dataclass(frozen=True, kw_only=True)
class Watch:
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
        None,
        "told of stuck, dead, diverged, finished: a Slack or Discord webhook, ntfy:TOPIC, mailto:ADDRESS, any URL, or a command (JSON on stdin)",
    )
    stop_grace_s: float = _value(30.0, "how long a stop may take before the process is killed", ge=1)


_MEET = "an address of node 0: --launch.rendezvous 10.0.0.1:29511"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The processes of a run."""

    spare: Literal["auto"] | int = _value(
        "auto",
        "processes that stand by, ready to take the place of one that dies; auto: one, for runs of over five minutes where memory"
        " allows it",
        ge=0,
        le=8,
    )
    nodes: int = _value(1, "machines that share out a step; the same command on each", ge=1, le=1024)
    rendezvous: str | None = _value(None, "HOST:PORT where the nodes meet: node 0 is the one that has this address")
    node: int | None = _value(None, "which node this is, from 0; none = by address and order of arrival", ge=0, le=1023)
    wait_s: float = _value(600.0, "how long nodes wait for each other at the start", gt=0)
    secret: str | None = _value(
        None, "a file with the secret of the nodes; none = LAMP_SECRET, or a file in the run's folder if all see it"
    )

    def __post_init__(self) -> None:
        if self.nodes > 1 and self.rendezvous is not None:
            host, _, port = self.rendezvous.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f"launch.rendezvous {self.rendezvous} will not do", "it is HOST:PORT", _MEET)
            if not 0 < int(port) < 65536:
                raise ValueError(
                    f"launch.rendezvous {self.rendezvous} will not do", "a port is a number from 1 to 65535", _MEET
                )
        if self.node is not None and self.node >= self.nodes:
            raise ValueError(f"launch.node {self.node}: they count from 0, and launch.nodes is {self.nodes}")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the run may cost; counted over all attempts."""

    usd: float | None = _value(None, "stop, saved, before so many dollars are spent", gt=0)
    usd_per_hour: float | None = _value(None, "price of the machine; of each node, where there are several", gt=0)
    hours: float | None = _value(None, "stop, saved, before so many hours have passed", gt=0)
    until_step: int | None = _value(
        None, "pause, validated and saved, after this step; the schedule stays that of train.steps", ge=1
    )

    def __post_init__(self) -> None:
        if self.usd is not None and self.usd_per_hour is None:
            raise ValueError("budget.usd needs budget.usd_per_hour to be counted")

    def of_nodes(self, count: int) -> "Budget":
        """The same for so many machines: the price is that of one."""
        return replace(self, usd_per_hour=self.usd_per_hour * count) if self.usd_per_hour and count > 1 else self

    def spent_usd(self, spent_s: float) -> float:
        return spent_s / 3600 * (self.usd_per_hour or 0.0)

    def left_s(self, spent_s: float) -> float:
        """Seconds until the first limit is reached; infinite without one."""
        limits = [self.hours * 3600] if self.hours is not None else []
        if self.usd is not None and self.usd_per_hour is not None:
            limits.append(self.usd / self.usd_per_hour * 3600)
        return min(limits) - spent_s if limits else float("inf")

    def enough_for(self, seconds: float) -> str:
        """As settings: what would do for a run of so many seconds, with a little to spare."""
        ways = []
        if self.usd is not None:
            price = 1.05 * self.spent_usd(seconds)
            ways.append(
                f"--budget.usd {math.ceil(price * 100) / 100 if price > 0.1 else math.ceil(price * 1e4) / 1e4:g}"
            )
        if self.hours is not None:
            ways.append(f"--budget.hours {math.ceil(seconds / 3600 * 1050) / 1000:g}")
        return " ".join(ways)


@dataclass(frozen=True, kw_only=True)
class Track:
    """Experiment trackers that follow the run, each in a process of its own."""

    to: list[Literal["tensorboard", "wandb", "trackio", "mlflow", "csv"]] = _value(  # noqa: RUF009
        [], "trackers that follow the run: tensorboard, wandb, trackio, mlflow, csv; none = none"
    )
    project: str | None = _value(None, "the tracker's project; none = its environment variable, else lamplighter")
    name: str | None = _value(None, "the tracker run's name; none = the run's name")
    tags: list[str] = _value([], "tags of the tracker run")  # noqa: RUF009
    group: str | None = _value(None, "the group of tracker runs that it belongs to")
    offline: bool = _value(False, "W&B and MLflow: write to a folder and send nothing; wandb sync sends it")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a run is."""

    data: Data = Data()
    tokenizer: TokenizerSection = TokenizerSection()
    model: Model = Model()
    lora: Lora = Lora()
    train: Train = Train()
    save: Save = Save()
    eval: Eval = Eval()
    watch: Watch = Watch()
    launch: Launch = Launch()
    budget: Budget = Budget()
    track: Track = Track()

    def __post_init__(self) -> None:
        """What must fit together."""
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
        if model.family not in FAMILIES and ":" not in model.family:
            import difflib

            near = difflib.get_close_matches(model.family, FAMILIES, 1, 0.3)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f'model.family {model.family!r} is not {", ".join(FAMILIES)} or "module:name"{hint}')
        if self.lora.r is None and self.lora != Lora():
            raise ValueError("the lora section is given without lora.r, which switches it on")
        if self.lora.r is not None and model.init_from is None:
            raise ValueError("lora.r needs model.init_from: adapters on a model that has learned nothing learn nothing")
        if train.objective == "dpo" and model.init_from is None:
            raise ValueError(
                "train.objective dpo needs model.init_from: it is measured against the model that it begins from"
            )
        if train.objective != "dpo" and train.dpo_beta != Train().dpo_beta:
            raise ValueError("train.dpo_beta is given without train.objective dpo")
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


SECTIONS: dict[str, Any] = {
    "data": Data,
    "tokenizer": TokenizerSection,
    "model": Model,
    "lora": Lora,
    "train": Train,
    "save": Save,
    "eval": Eval,
    "watch": Watch,
    "launch": Launch,
    "budget": Budget,
    "track": Track,
}
MAY_CHANGE = ("save", "eval", "watch", "launch", "budget", "track")  # at resume; train.steps too, with a warning
LENGTH = ("train.steps", "train.epochs")
ROUNDING = (
    "train.micro_batch",
    "train.tree",
    "train.reduction",
)  # the same result but for rounding: may change, and that is said
NO_MATTER = ("data.cache", "data.workers", "data.retry_s", "data.max_chunks", "train.recompute", "train.exact",
             "train.ranks", "train.shard", *LENGTH)  # fmt: skip

# What became of the fields of older runs, so that their config.yaml is understood: whoever renames, removes or adds a
# field of a run puts a line here (and a test beside it).
RENAMED: dict[str, str] = {}  # name then -> name now
REMOVED: dict[str, str] = {}  # name then -> what happens instead, in words
ADDED: dict[str, Any] = {
    "train.optimizer": "adamw",
    "train.tree": 1,
    "train.ranks": "auto",
    "train.shard": "auto",
    "train.reduction": "tree",
    "model.tie_embeddings": True,
    "train.decay_ratio": 0.4,
    "train.objective": "sft",
    "train.dpo_beta": 0.1,
}  # name now -> how runs behaved before it existed


@dataclass(frozen=True)
class FieldInfo:
    """A field of a section, as the command line and errors speak of it."""

    annotation: Any
    default: Any
    description: str
    advice: str
    limits: Mapping[str, Any]


@cache
def fields() -> dict[str, FieldInfo]:
    """Every field by its dotted name."""
    found = {}
    for section, kind in SECTIONS.items():
        defaults = kind()
        for name, one in kind.__dataclass_fields__.items():
            found[f"{section}.{name}"] = FieldInfo(one.type, getattr(defaults, name), **one.metadata)
    return found


def validated(values: Mapping[str, Mapping[str, Any]]) -> Run:
    """A Run from values by section and name; text becomes numbers where a number is wanted."""
    given = {section: dict(known) for section, known in values.items()}
    for section, name in (("data", "paths"), ("lora", "targets"), ("track", "to"), ("track", "tags")):
        if isinstance(given.get(section, {}).get(name), str):
            given[section][name] = [given[section][name]]  # one may stand without brackets
    checked: dict[str, dict[str, Any]] = _validator().validate_python(given)
    return Run(**{section: SECTIONS[section](**given) for section, given in checked.items()})


@cache
def _validator() -> "SchemaValidator":
    from pydantic_core import SchemaValidator

    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for dotted, info in fields().items():
        section, name = dotted.split(".")
        sections[section][name] = _optional(_schema(info.annotation, info.limits))
    return SchemaValidator(_typed_dict({name: _optional(_typed_dict(one)) for name, one in sections.items()}))


def _typed_dict(fields: dict[str, Any]) -> Any:
    return {"type": "typed-dict", "fields": fields, "extra_behavior": "forbid"}


def _optional(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "typed-dict-field", "schema": schema, "required": False}


def _schema(kind: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    """A field's type in the words of pydantic's core."""
    origin, inner = get_origin(kind), get_args(kind)
    if "choices" in limits:  # the names in a table
        return {"type": "literal", "expected": list(limits["choices"])}
    if origin is Literal:
        return {"type": "literal", "expected": list(inner)}
    if origin is list:
        return {"type": "list", "items_schema": _schema(inner[0], {})}
    if origin in (Union, UnionType):
        choices = [_schema(one, limits) for one in inner if one is not NoneType]
        one_of = choices[0] if len(choices) == 1 else {"type": "union", "choices": choices}
        return {"type": "nullable", "schema": one_of} if NoneType in inner else one_of
    return {"type": kind.__name__, **limits}
