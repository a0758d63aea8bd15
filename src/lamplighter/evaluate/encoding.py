"""Items as token ids, exactly as lm-eval cuts them: context and answer are encoded together and divided by length.

In:  a tokenizer, a context and its possible answers, or a long text.
Out: Question: the ids of the context and of each answer. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        self.head = tokenizer.ids_before_text()
        self.first = tokenizer.begin_of_text  # as lm-eval chooses

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
