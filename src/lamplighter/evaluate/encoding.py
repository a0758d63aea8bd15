"""Items as token ids, exactly as lm-eval cuts them: context and answer are encoded together and divided by length.

In:  a tokenizer, a context and its possible answers, or a long text.
Out: Question: the ids of the context and of each answer. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from lamplighter.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Question:
    """A context that several answers follow, in ids. `number` is the item's."""

    number: int
    context: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """What one row of all of them takes: the last token of an answer is predicted, never read."""
        return len(self.context) + sum(len(one) - 1 for one in self.answers)


class QuestionEncoder:
    """A tokenizer, with what it puts before a text, and the token that stands where there is no context."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.head = _ids_before_text(tokenizer)
        self.first = _first_id(tokenizer)

    def ids(self, text: str) -> list[int]:
        return [*self.head, *self.tokenizer.encode(text).tolist()]

    def question(self, number: int, context: str, answers: Sequence[str]) -> Question:
        """White space at the end of a context belongs to the answers: a word and its space are one token."""
        bare = context.rstrip()
        space = context[len(bare) :]
        if not bare:
            return Question(number, (self.first,), tuple(tuple(self.ids(space + one)) for one in answers))
        head = self.ids(bare)
        wholes = [self.ids(bare + space + one) for one in answers]
        found = tuple(tuple(whole[len(head) :]) for whole in wholes)
        if not all(found):
            raise ValueError("an answer adds no token to its context")
        return Question(number, tuple(head), found)

    def windows(self, number: int, text: str, most: int) -> list[Question]:
        """A long text as stretches that are predicted once each, every one after as much as fits before it.

        The first begins after `first`; each later one has the single token before it as its context.
        """
        ids = self.ids(text)
        found = [Question(number, (self.first,), (tuple(ids[:most]),))]
        for begin in range(most, len(ids), most):
            end = min(begin + most, len(ids))
            context = ids[end - most - 1 : begin]
            found.append(Question(number, tuple(context), (tuple(ids[begin:end]),)))
        return found


def _ids_before_text(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer's own post-processor puts before every text, such as Llama's <s>.

    What it may put behind a text is left out: nothing could be said after an end of text.
    """
    if tokenizer.content.get("post_processor") is None:
        return []
    reference = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.content))
    plain = reference.encode("a", add_special_tokens=False).ids
    whole = reference.encode("a", add_special_tokens=True).ids
    at = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
    return whole[:at]


def _first_id(tokenizer: Tokenizer) -> int:
    """bos_token where the tokenizer names one, else the end of text, as lm-eval chooses."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        found = json.loads(tokenizer.files.get(name) or b"{}").get("bos_token")
        text = found.get("content") if isinstance(found, dict) else found
        by_name = {content: i for i, content in tokenizer.added.items()}
        if isinstance(text, str) and text in by_name:
            return by_name[text]
    return tokenizer.end_of_text
