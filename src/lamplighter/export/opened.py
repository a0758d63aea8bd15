"""A checkpoint, opened for export: the model with its adapters merged, its tokenizer, its template.

In:  a run's checkpoint or a model folder.
Out: an Opened; the error of an export that says something else than the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
    return Opened(folder, name, built, tokenizer, template, base)
