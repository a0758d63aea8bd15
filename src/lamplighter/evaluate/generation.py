"""Scores of written text: ROUGE, exact match, repetition and diversity.

In:  texts, and where there are any, what should have been written.
Out: TaskScore. ROUGE is rouge-score's own arithmetic. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lamplighter.errors import InputMissing
from lamplighter.evaluate.scores import TaskScore, mean_score

_ROUGE = ("rouge1", "rouge2", "rougeL")
_WORD = re.compile(r"\w+(?:['’]\w+)*")


def words_of(text: str) -> list[str]:
    """Words, without case and punctuation."""
    return [word.lower() for word in _WORD.findall(text)]


def rouge_scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise InputMissing("ROUGE needs rouge-score", str(error), "pip install 'lamplighter[eval]'") from error
    return RougeScorer(list(_ROUGE), use_stemmer=False)


def rouge(scorer: Any, reference: str, text: str) -> dict[str, float]:
    """F-measures of one pair."""
    return {name: float(found.fmeasure) for name, found in scorer.score(reference, text).items()}


def exact(reference: str, text: str) -> dict[str, float]:
    """Equal as it is (white space at the ends apart), and equal word by word without case and punctuation."""
    return {
        "exact_match": float(reference.strip() == text.strip()),
        "exact_match_words": float(words_of(reference) == words_of(text)),
    }


def variety(text: str) -> dict[str, float]:
    """Of one text: how much of it repeats itself, and how many of its words are different."""
    words = words_of(text)
    return {
        "repetition": repeated_share(words, 4),
        "distinct_1": _distinct(words, 1),
        "distinct_2": _distinct(words, 2),
    }


def repeated_share(words: Sequence[str], n: int) -> float:
    """The share of n-grams that stood in the same text before; 0 for one that is too short."""
    return 1.0 - _distinct(words, n) if len(words) >= n else 0.0


def _distinct(words: Sequence[str], n: int) -> float:
    grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


_LOWER_IS_BETTER = ("repetition",)


def average(found: Sequence[dict[str, float]]) -> list[TaskScore]:
    """The mean of each figure over the items."""
    return [
        mean_score(name, [one[name] for one in found], higher_is_better=name not in _LOWER_IS_BETTER)
        for name in found[0]
    ]
