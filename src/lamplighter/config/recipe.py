"""What follows from what a run was given: the recipe of a model from scratch, its sizes from its layers, its batch and length from those.

In:  the values that a run was given.
Out: those that it was not given, each with its reason; and in words what of a run does not fit together.

The recipe and the sizes are those of the qwen3 family, whose weights begin so that one rate does for every width; whatever is
given is left as it is. The rules, and what is measured of them, stand in docs/recipe.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lamplighter.config.schema import fields
from lamplighter.model.shape import Shape, count_parameters, flops_per_token

_FAMILY = "qwen3"
_RECIPE = "the recipe of a model from scratch"
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022: the most that is learned for the arithmetic that is spent
_HEAD_WIDTH = 64
_WIDTH_PER_LAYER = 64
_MUON_LR = 0.02
_TOKENS_AT_ONCE = 8192
# Bi et al. 2024 (arXiv 2401.02954), from the FLOPs of a whole run: tokens in a step, and the peak rate of AdamW.
_BATCH_FACTOR, _BATCH_POWER = 0.2920, 0.3271
_RATE_FACTOR, _RATE_POWER = 0.3118, -0.1250
_FAR = 8.0  # how many times off is worth a word
_LEAST_STEPS, _LEAST_TOKENS = 100, 100_000  # shorter runs are tries
_LEAST_FLOPS = 1e11  # of less, the rule for rates would be above anything that was ever tried


def derived(values: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """By dotted name: the value, and why."""
    found: dict[str, tuple[Any, str]] = {}

    def of(name: str) -> Any:
        return found[name][0] if name in found else values.get(name, fields()[name].default)

    def put(name: str, value: Any, why: str) -> None:
        if name not in values:
            found[name] = (value, why)

    scratch = of("model.init_from") is None
    if scratch:
        put("model.family", _FAMILY, _RECIPE)
    modern = scratch and of("model.family") == _FAMILY
    if modern:
        _put_recipe(values, of, put)
    if of("train.optimizer") == "muon":
        put("train.lr", _MUON_LR, "of matrices under Muon, at every width")
    if not modern:
        return found
    try:
        layers = int(of("model.layers"))
        if "model.layers" in values:
            put("model.width", _WIDTH_PER_LAYER * layers, f"{_WIDTH_PER_LAYER} for each of {layers} layers")
        put("model.heads", max(1, int(of("model.width")) // _HEAD_WIDTH), f"{_HEAD_WIDTH} numbers in each head")
        if "model.layers" not in values:
            return found
        shape = _shape(of)
        seq_len, each = int(of("data.seq_len")), flops_per_token(shape, int(of("data.seq_len")))
        steps, length = _length(of, values, count_parameters(shape))
        if steps is None and length is None:
            return found
        batch = of("train.batch_size") if "train.batch_size" in values else None
        rows = int(batch) if batch is not None else fitting_rows(each, seq_len, steps, length)
    except (TypeError, ValueError):  # what is no number is refused where values are checked
        return found
    put("train.batch_size", rows, f"{rows * seq_len:,} tokens a step suit a run of this size")
    at_once = max(1, _TOKENS_AT_ONCE // seq_len)
    if "train.batch_size" not in values and rows > at_once:
        put("train.micro_batch", at_once, f"{at_once * seq_len:,} tokens at once, which most devices hold")
    if length is not None:
        why = f"{TOKENS_PER_PARAMETER} tokens for each of {count_parameters(shape) / 1e6:,.1f}M parameters"
        put("train.steps", max(1, math.ceil(length / (rows * seq_len))), why)
    return found


def _put_recipe(values: dict[str, Any], of: Callable[[str], Any], put: Callable[[str, Any, str], None]) -> None:
    """What learned most in equal time. A rate that is given alone is one for AdamW, with the schedule that belongs to it."""
    put("model.tie_embeddings", False, _RECIPE)
    if str(values.get("train.shard")) == "full":
        put("train.optimizer", "adamw", "Muon needs whole matrices, and with train.shard full no rank has one")
    elif "train.lr" in values:
        put("train.optimizer", "adamw", "train.lr is given without an optimizer")
    else:
        put("train.optimizer", "muon", _RECIPE)
    if of("train.optimizer") == "muon":
        put("train.schedule", "wsd", _RECIPE)
        put("train.min_lr_ratio", 0.0, _RECIPE)


def _shape(of: Any) -> Shape:
    return Shape(
        "qwen3",
        int(of("tokenizer.vocab_size")),
        int(of("data.seq_len")),
        int(of("model.layers")),
        int(of("model.width")),
        int(of("model.heads")),
        kv_heads=int(of("model.kv_heads") or 0),
        mlp_width=int(of("model.mlp_width") or 0),
        tie_embeddings=str(of("model.tie_embeddings")).lower() not in ("false", "no", "0", "off"),
    )


def _length(of: Any, values: dict[str, Any], parameters: int) -> tuple[int | None, float | None]:
    """The steps, where they are given; else the tokens, where nothing else says how long the run is."""
    if values.get("train.steps") is not None:
        return int(of("train.steps")), None
    if values.get("train.epochs") is not None or values.get("data.max_chunks") is not None:
        return None, None
    return None, float(TOKENS_PER_PARAMETER * parameters)


def fitting_rows(flops_per_token: float, seq_len: int, steps: int | None, tokens: float | None) -> int:
    """Sequences in a step, a power of two, for a run of so many steps or of so many tokens."""
    if tokens is not None:
        best = fitting_tokens(flops_per_token * tokens)
    else:
        assert steps is not None  # tokens = steps x batch, solved for the batch
        best = (_BATCH_FACTOR * (flops_per_token * steps) ** _BATCH_POWER) ** (1 / (1 - _BATCH_POWER))
    return 1 << max(0, round(math.log2(max(1.0, best / seq_len))))


def fitting_tokens(flops: float) -> float:
    """Tokens in a step of a run of so many FLOPs."""
    return float(_BATCH_FACTOR * max(flops, 1.0) ** _BATCH_POWER)


def fitting_rate(flops: float) -> float:
    """The peak rate of AdamW for a run of so many FLOPs."""
    return float(_RATE_FACTOR * max(flops, 1.0) ** _RATE_POWER)


def misfits(
    *, optimizer: str, lr: float, batch_size: int, flops_per_token: float, steps: int, step_tokens: float
) -> list[str]:
    """What of batch, rate and steps does not fit the others in a run from scratch, with what would; in words.

    Only what is far off is said: the rules are those of large runs, and good to a factor of a few. Of a short try only a rate that is
    too large for any run is.
    """
    tokens = steps * step_tokens
    flops, found = flops_per_token * tokens, []
    best, short = fitting_tokens(flops), steps < _LEAST_STEPS or tokens < _LEAST_TOKENS
    rate = _MUON_LR if optimizer == "muon" else fitting_rate(max(flops, _LEAST_FLOPS))
    if lr > rate * _FAR or (lr < rate / _FAR and not short):
        size = "small" if lr < rate else "large"
        usual = "with Muon" if optimizer == "muon" else f"for so much arithmetic ({flops:.1e} FLOPs)"
        found.append(
            f"a peak rate of {lr:g} is {size} for {steps:,} steps of this model: {_round(rate):g} is usual {usual}:"
            f" --train.lr {_round(rate):g}"
        )
    if short:
        return found
    if step_tokens > _FAR * best:
        rows = max(1, round(batch_size * best / step_tokens))
        more = math.ceil(steps * batch_size / rows)
        found.append(
            f"{step_tokens:,.0f} tokens a step are many for a run of {tokens:,.0f} tokens: more is learned from {more:,} smaller steps:"
            f" --train.batch_size {rows} --train.steps {more}"
        )
    return found


def _round(rate: float) -> float:
    """To one digit."""
    return float(f"{rate:.0e}")
