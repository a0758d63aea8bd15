"""Testing a checkpoint: where its loss stands for how far the run is, what its texts are like, and what to do next.

In:  the loss on held-back text, the run's own curve, texts that the model wrote.
Out: Expected, flags and an action in words. No torch.

The table is the historical-text pipeline's (its two models have 12 layers of 768 and 24 of 1024, and 30,000 tokens); for any
other model its figures mean nothing, and the run's own curve says what was to be expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lamplighter.evaluate.generation import repeated_share, words_of

PROMPTS = (
    "In the year 1834, I walked through the streets of London",
    "The gentleman from the country said, 'I have never seen such a sight",
    "Parliament sat in Westminster Hall",
    "The Great Fire of 1666 had destroyed",
)
TABLE = (
    (0.25, 5.0, 6.0, "continue"),
    (0.50, 4.0, 5.0, "monitor"),
    (0.75, 3.0, 4.0, "check convergence"),
    (0.90, 2.5, 3.5, "consider stopping"),
    (1.00, 0.0, 3.0, "ready"),
)  # up to this progress: loss from, to, and what to do
_ENGLISH = frozenset(
    ["the", "of", "and", "to", "a", "in", "that", "was", "it", "he", "is", "with", "as", "for", "his", "on"]
)
_ENGLISH_SHARE = 0.12  # of the words of a text: English has about 0.3, its neighbours below 0.08
_SIZES = (80e6, 450e6)
_VOCABULARY = (25_000, 35_000)
_OVERFITTED = 0.03  # above the best earlier validation, while the training loss fell
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Expected:
    """What the loss should be about, and by what."""

    low: float
    high: float
    action: str
    source: str

    def words(self) -> str:
        return f"below {self.high:.2f}" if self.low <= 0 else f"{self.low:.2f} to {self.high:.2f}"


def row_of(progress: float) -> tuple[float, float, float, str]:
    return next((row for row in TABLE if progress <= row[0] + 1e-9), TABLE[-1])


def expected(progress: float, parameters: int, vocab_size: int, curve: Sequence[float]) -> Expected | None:
    """The band for this progress; `curve`: training losses of the last tenth before the checkpoint. None: nothing is known."""
    _, low, high, action = row_of(progress)
    if _SIZES[0] <= parameters <= _SIZES[1] and _VOCABULARY[0] <= vocab_size <= _VOCABULARY[1]:
        return Expected(low, high, action, "the table for models of 100M to 400M parameters and 30,000 tokens")
    known = [loss for loss in curve if math.isfinite(loss)]
    if len(known) < 3:
        return None
    middle = median(known)
    spread = 1.4826 * median(abs(loss - middle) for loss in known)
    room = max(3 * spread, 0.05 * middle)
    source = "this run's own training losses: the table is for other sizes"
    return Expected(max(0.0, middle - room), middle + room, action, source)


def act(loss: float, found: Expected | None, facts: Mapping[str, float | None]) -> tuple[str, str]:
    """What to do, and why. `facts`: progress, vocab_size, best_before (validation), train_now and train_then (losses)."""
    progress, guess = facts["progress"] or 0.0, math.log(max(2.0, facts["vocab_size"] or 2.0))
    if not math.isfinite(loss):
        return "broken", "the loss is not a finite number"
    if loss > 0.98 * guess and progress >= 0.25:
        return "broken", f"the loss is that of guessing, ln(vocabulary) = {guess:.2f}"
    best, now, then = facts["best_before"], facts["train_now"], facts["train_then"]
    if best is not None and loss > best * (1 + _OVERFITTED) and now is not None and then is not None and now < then:
        return (
            "overfitting",
            f"held-back loss {loss:.3f} is above {best:.3f} of an earlier checkpoint, while training fell",
        )
    if found is None:
        return "monitor", "there are too few records to say what was to be expected"
    if loss > found.high:
        return ("check convergence" if progress > 0.9 else "continue"), f"above the expected {found.words()}"
    return (
        found.action,
        f"as expected ({found.words()})" if loss >= found.low else f"below the expected {found.words()}",
    )


# ---------------------------------------------------------------- texts


def text_figures(text: str, ended: bool, dictionary: frozenset[str], entropy_share: float) -> dict[str, Any]:
    """One text in figures; `entropy_share`: of the model's own uncertainty in ln(vocabulary)."""
    words = words_of(text)
    known = sum(word in dictionary for word in words) / len(words) if words and dictionary else 1.0
    finished = bool(re.search(r"[.!?][\"'”’)]*\s*$", text))
    return {
        "words": len(words),
        "repetition": repeated_share(words, 4),
        "known_words": known,
        "entropy": entropy_share,
        "ended": ended,
        "unfinished": not finished,
    }


def red_flags(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with the texts, in words; empty: nothing."""
    if not figures:
        return []

    def mean(name: str) -> float:
        return sum(float(one[name]) for one in figures) / len(figures)

    found = []
    if mean("repetition") > 0.3:
        found.append(f"repetition: {mean('repetition'):.0%} of the runs of four words stood before in the same text")
    if mean("known_words") < 0.6:
        found.append(f"gibberish: only {mean('known_words'):.0%} of the words stand in the text that it was trained on")
    if mean("entropy") > 0.75:
        found.append(f"gibberish: it is as unsure as {mean('entropy'):.0%} of guessing, token by token")
    if mean("words") < 3:
        found.append(f"very short: {mean('words'):.1f} words on average")
    ended = [one for one in figures if one["ended"]]  # what was cut at the limit could not end its sentence
    unfinished = sum(one["unfinished"] for one in ended)
    if 2 * unfinished > len(ended):
        found.append(f"unfinished sentences: {unfinished} of the {len(ended)} texts that the model ended by itself stop within one")  # fmt: skip
    return found


def is_english(text: str) -> bool:
    """By its commonest words: the four prompts are of no use to a model that has read another language."""
    words = words_of(text)
    return sum(word in _ENGLISH for word in words) >= _ENGLISH_SHARE * max(1, len(words))


def dictionary_of(texts: Iterable[str]) -> frozenset[str]:
    return frozenset(word for text in texts for word in words_of(text))


def sparkline(values: Sequence[float]) -> str:
    """Losses as a curve of one line."""
    finite = [one for one in values if math.isfinite(one)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((one - low) * scale)] if math.isfinite(one) else "?" for one in values)
