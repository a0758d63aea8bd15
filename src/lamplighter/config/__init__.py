"""One Run, made of sections, and where each of its values came from.

In:  a preset name, a YAML file, `--section.key value` pairs; or the config.yaml of a run.
Out: a frozen Run and its provenance; or a three-line error with the nearest match and advice.

`schema` has the fields, `resolve` lays the layers over each other, `recorded` writes and reads config.yaml, `names` knows
what other tools call things.
"""

from lamplighter.config.recorded import (
    Recorded,
    carry_over,
    drift,
    dump,
    dump_for_mirror,
    load_dump,
    read_dump,
    shown,
    to_give_again,
    with_check,
    with_secrets_of,
)
from lamplighter.config.resolve import Resolved, flat, parse_overrides, preset_names, resolve, with_change
from lamplighter.config.schema import (
    GRADIENT_BYTES,
    LENGTH,
    OPTIMIZERS,
    ROUNDING,
    WEIGHT_BYTES,
    Budget,
    Data,
    Eval,
    Launch,
    Lora,
    Model,
    OptimizerKind,
    Run,
    Save,
    TokenizerSection,
    Track,
    Train,
    Watch,
    fields,
    validated,
)

__all__ = [
    "GRADIENT_BYTES",
    "LENGTH",
    "OPTIMIZERS",
    "ROUNDING",
    "WEIGHT_BYTES",
    "Budget",
    "Data",
    "Eval",
    "Launch",
    "Lora",
    "Model",
    "OptimizerKind",
    "Recorded",
    "Resolved",
    "Run",
    "Save",
    "TokenizerSection",
    "Track",
    "Train",
    "Watch",
    "carry_over",
    "drift",
    "dump",
    "dump_for_mirror",
    "fields",
    "flat",
    "load_dump",
    "parse_overrides",
    "preset_names",
    "read_dump",
    "resolve",
    "shown",
    "to_give_again",
    "validated",
    "with_change",
    "with_check",
    "with_secrets_of",
]
