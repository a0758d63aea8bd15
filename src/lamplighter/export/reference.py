"""What the checkpoint itself says, for comparison: ids of dirty text, greedy answers, probabilities of a sampled text.

In:  an Opened.
Out: a Reference of plain numbers; and words about what differs between it and somebody else's answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lamplighter import report
from lamplighter.export.opened import ExportFailed, Opened
from lamplighter.model.generate import stream

TIE = 1e-3  # between the two best logits: which one is said is then a matter of rounding
TIE_OF_8_BITS = 0.1  # the same where a program multiplies by numbers of 8 bits, however well the weights are kept
PROMPTS = [
    "What is the capital of France?", "Convert 45 kilometers to meters.", "Name three colours.", "Who lights the lamps?",
    "Write one sentence about rain.", "2 + 2 =", "Explain gravity to a child.", "List two fruits.", "Translate 'good morning' to French.",
    "What is a noun?", "Say hello.", "Once upon a time", "Is the sky blue?", "Define courage.", "Give a synonym of happy.",
    "How many legs has a spider?", "Why do leaves fall?", "Summarise: The cat sat on the mat.", "ÄÖÜ — naïve?", "Tell a joke.",
]  # fmt: skip
DIRTY = [
    "Hello world", " leading and trailing ", "don't   wait!!  it's 1,837 LAMPS\tand\ttabs", "line\nbreaks\r\n\r\n  and   spaces\n",
    "£5 œuvre naïve — “quote” … e\u0301", "日本語 한국어 Ελλάδα Россия العربية हिन्दी", "🙂👩‍👩‍👧\u200d\u00a0\u3000 x\u0007y",
    "if x_1 == 'a':\n        return  {}\n", "https://example.org/?q=%20&r=3.14159", "1234567890 12 345,678.90", "<|im_end|> is text here </s>",
    "ThisIsCamelCase and snake_case_words", "a" * 50, "x\n\n\n\ny", "'S 'T 'll 'VE", "...!!!???", "",
]  # fmt: skip
_ANSWER_TOKENS = 24
_TEXTS, _SAMPLES, _TEXT_TOKENS, _LIKELY = 8, 4, 33, 50
FIRST_TEXTS = _TEXTS  # one for each prompt: they decide, where the result is not close to a limit


@dataclass(frozen=True)
class Greedy:
    """One prompt and what the model says to it, with how far the best token was ahead of the second at each place."""

    prompt: list[int]
    answer: list[int]
    gaps: list[float]


@dataclass(frozen=True)
class Scored:
    """A text, and of each of its tokens from `start` on the log-probability and which one would have been chosen."""

    ids: list[int]
    start: int
    logprobs: list[float]
    first: list[int]
    gaps: list[float] = field(default_factory=list)  # how far that one was ahead of the second


@dataclass(frozen=True)
class Reference:
    texts: list[str]
    text_ids: list[list[int]]
    greedy: list[Greedy] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)


def make_reference(opened: Opened, *, greedy: bool, scored: bool) -> Reference:
    """What the model says, in fp32 on this machine."""
    ids = [opened.tokenizer.encode(text).tolist() for text in DIRTY]
    prompts = [prompt_of(opened, text) for text in PROMPTS]
    answers: list[Greedy] = []
    with report.phase("reference", total=len(PROMPTS) * greedy + _TEXTS * scored, unit="texts") as phase:
        for prompt in prompts if greedy else ():
            answers.append(_answer(opened, prompt))
            phase.tick()
        samples = []
        for number in range(_TEXTS if scored else 0):
            samples.append(_sampled(opened, prompts[number], number))
            phase.tick()
    texts = [
        one for same in zip(*samples, strict=True) for one in same
    ]  # the first of each prompt, then the second ...
    return Reference(DIRTY, ids, answers, texts)


def prompt_of(opened: Opened, text: str) -> list[int]:
    """With the chat template; of a model without one, the end of the text before, and the text."""
    room = max(8, opened.built.positions - _TEXT_TOKENS - 2)
    if opened.template is not None:
        ids = opened.template.prompt_ids([{"role": "user", "content": text}])
    else:
        ids = [opened.tokenizer.end_of_text, *opened.tokenizer.encode(text).tolist()]
    return ids[-room:]


def stops_of(opened: Opened) -> set[int]:
    return {opened.tokenizer.end_of_text, *([opened.template.stop_id] if opened.template else [])}


@torch.no_grad()
def logits_of(opened: Opened, ids: list[int]) -> Tensor:
    found: Tensor = opened.built.model(torch.tensor([ids]))[0].float()
    return found


def _answer(opened: Opened, prompt: list[int]) -> Greedy:
    stops, answer = stops_of(opened), list[int]()
    room = min(_ANSWER_TOKENS, opened.built.positions - len(prompt))
    for (token,) in stream(opened.built.model, prompt, max_tokens=room, temperature=0.0, window=len(prompt) + room):
        assert token is not None
        answer.append(token)
        if token in stops:
            break
    best = logits_of(opened, [*prompt, *answer[:-1]])[len(prompt) - 1 :].topk(2).values
    return Greedy(prompt, answer, (best[:, 0] - best[:, 1]).tolist())


def _sampled(opened: Opened, prompt: list[int], number: int) -> list[Scored]:
    """Some texts that the model itself writes, with its probabilities."""
    room = min(_TEXT_TOKENS, opened.built.positions - len(prompt))
    made = stream(
        opened.built.model, prompt, samples=_SAMPLES, max_tokens=room, temperature=1.0, top_k=_LIKELY, seed=number, window=len(prompt) + room)  # fmt: skip
    return [_scored(opened, prompt, [int(token or 0) for token in text]) for text in zip(*made, strict=True)]


@torch.no_grad()
def _scored(opened: Opened, prompt: list[int], made: list[int]) -> Scored:
    ids = [*prompt, *made]
    logits = logits_of(opened, ids)[len(prompt) - 1 : -1]
    chances = logits.log_softmax(-1)
    picked = chances[torch.arange(len(made)), torch.tensor(made)]
    best = logits.topk(2)
    gaps = best.values[:, 0] - best.values[:, 1]
    return Scored(ids, len(prompt), picked.tolist(), best.indices[:, 0].tolist(), gaps.tolist())


# ---------------------------------------------------------------- comparing


def compare_ids(reference: Reference, theirs: list[list[int]]) -> None:
    for text, ours, other in zip(reference.texts, reference.text_ids, theirs, strict=True):
        if ours != other:
            raise ExportFailed(
                f"{text[:40]!r} has other token ids there",
                f"here {ours[:12]}, there {other[:12]}",
                "the tokenizer cannot be exported to this format",
            )


def compare_greedy(reference: Reference, theirs: list[list[int]]) -> str:
    """Words for the report; a difference that is no near tie is a failure."""
    ties = 0
    for ours, other in zip(reference.greedy, theirs, strict=True):
        at = next((n for n, (a, b) in enumerate(zip(ours.answer, other, strict=False)) if a != b), None)
        if at is None and len(other) >= len(ours.answer):
            continue
        place = at if at is not None else len(other)
        if place < len(ours.gaps) and ours.gaps[place] <= TIE:
            ties += 1
            continue
        gap = ours.gaps[place] if place < len(ours.gaps) else math.nan
        why = f"token {place} of an answer is {ours.answer[place : place + 1]} here and {other[place : place + 1]} there; the two best are {gap:.4f} apart here"
        raise ExportFailed("the exported model says something else", why, "please report it: the export is not kept")
    near = f", {ties} of them up to a near tie of the two best tokens" if ties else ""
    return f"the same words to {len(theirs)} prompts{near}"


@dataclass(frozen=True)
class Limits:
    """What an export in fewer bits may differ by."""

    perplexity: float
    same: float  # more than this share of the first choices
    tie: float = TIE


def is_close_to_a_limit(reference: Reference, theirs: list[tuple[list[float], list[int]]], limits: Limits) -> bool:
    """Whether more texts might decide otherwise: a share of few places is known to some percent only."""
    change, share, places, _ = _difference(reference, theirs, limits.tie)
    error = math.sqrt(max(share * (1 - share), limits.same * (1 - limits.same)) / max(1, places))
    return abs(share - limits.same) < 2 * error or limits.perplexity / 2 < change < 2 * limits.perplexity


def _difference(
    reference: Reference, theirs: list[tuple[list[float], list[int]]], tie: float
) -> tuple[float, float, int, int]:
    """How far the perplexities are apart; the share of the same first choice, of how many places, and how many others differ
    by a near tie alone."""
    ours, other = _perplexities(reference, theirs)
    same = places = ties = 0
    for one, (_, firsts) in zip(reference.scored, theirs, strict=True):
        for place, (a, b) in enumerate(zip(one.first, firsts, strict=True)):
            if a != b and place < len(one.gaps) and one.gaps[place] < tie:
                ties += 1
            else:
                places, same = places + 1, same + (a == b)
    return abs(other / ours - 1), same / max(1, places), places, ties


def _perplexities(reference: Reference, theirs: list[tuple[list[float], list[int]]]) -> tuple[float, float]:
    found = [
        (mine, other)
        for one, (logprobs, _) in zip(reference.scored, theirs, strict=True)
        for mine, other in zip(one.logprobs, logprobs, strict=True)
    ]
    if lost := sum(other is None or not math.isfinite(other) for _, other in found):
        raise ExportFailed(
            "the exported model computes what is no number",
            f"of {len(found)} tokens {lost} have no probability there",
            "--quantize bf16 or f32: f16 ends at 65,504",
        )
    ours, other = (math.exp(-sum(values) / len(found)) for values in zip(*found, strict=True))
    return ours, other


def compare_scores(reference: Reference, theirs: list[tuple[list[float], list[int]]], limits: Limits) -> str:
    """Perplexity and first choices within the limits, in words."""
    ours, other = _perplexities(reference, theirs)
    change, share, places, ties = _difference(reference, theirs, limits.tie)
    words = f"perplexity {other:.4f} (here {ours:.4f}, {change:.2%} apart), the same first choice in {share:.1%} of {places} places"
    if ties:
        words += f" ({ties} more differ where the two best tokens are within {limits.tie:g})"
    if not change <= limits.perplexity or not share > limits.same:
        allowed = f"allowed: {limits.perplexity:.1%} and over {limits.same:.0%}"
        raise ExportFailed(
            "the exported model is not near enough", f"{words}; {allowed}", "a finer --quantize: f16, bf16 or f32"
        )
    return words
