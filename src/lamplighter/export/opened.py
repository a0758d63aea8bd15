"""A checkpoint, opened for export: the model with its adapters merged, its tokenizer, its template.

In:  a run's checkpoint or a model folder.
Out: an Opened; the error of an export that says something else than the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lamplighter import report
from lamplighter.data import tokenizer as tokenizers
from lamplighter.data.chat import template as templates
from lamplighter.data.chat.template import ChatTemplate
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import BadData
from lamplighter.model.build import Built, load_folder


class ExportFailed(BadData):
    """What was written does not say what the checkpoint says; it is removed."""

    cause = "export_differs"


@dataclass(frozen=True)
class Opened:
    """A model that is to be used elsewhere."""

    folder: Path
    name: str
    built: Built
    tokenizer: Tokenizer
    template: ChatTemplate | None
    base: str | None = None  # of an adapter, where the user says that it is

    def release(self) -> None:
        """What it says has been worked out and written: its weights give way to those of the program that opens the file."""
        self.built.model.to("meta")


def open_model(folder: Path, name: str, base: str | None, command: str = "") -> Opened:
    """Template and end mark are compared with those of training, as everywhere."""
    with report.phase("model"):
        built = load_folder(folder, None, command, base=base)
        tokenizer = tokenizers.load(folder)
        template = templates.of_folder(folder, tokenizer)
        built.model.eval()
    if tokenizer.vocab_size > built.vocab_size:
        why = f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model {built.vocab_size:,}"
        raise BadData(f"{folder} does not fit together", why, "use an intact folder")
    _refuse_what_is_no_number(folder, built)
    return Opened(folder, name, built, tokenizer, template, base)


def _refuse_what_is_no_number(folder: Path, built: Built) -> None:
    """Logits that are no numbers are not far from any others: a comparison alone would let them through."""
    for name, tensor in built.model.state_dict().items():
        # The smallest and the largest tell it without a copy; isfinite makes one of the size of the tensor.
        if tensor.is_floating_point() and tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all():
            why = f"{name} holds infinite numbers, or none: its training diverged, or the file is damaged"
            raise BadData(f"{folder} is no usable model", why, "lamp checkpoints RUN, and --checkpoint an earlier one")
