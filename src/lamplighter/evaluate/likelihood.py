"""How likely a model finds each answer: questions in batches of like length, what they have in common computed once.

In:  a model, questions in ids.
Out: per question the log-probability of each answer in nats, and whether it is what the model would have written itself.

All answers of a question lie behind one copy of its context in one row: an answer sees the context and itself, and counts
its positions from the context's end. What all questions of a group begin with (solved examples) is read once and kept.

Tensors carry their axes as a suffix: B rows, T tokens of a row, S tokens that may be seen, P tokens of the common beginning,
C width, K tokens that are predicted, V vocabulary, H heads, D head width.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lamplighter.evaluate.encoding import Question
from lamplighter.model.generate import evaluating
from lamplighter.model.transformer import AttentionContext, KVCache, Transformer

_CPU_TOKENS = 1024  # of a batch; more do not make a CPU faster, and the progress would be seldom
_GPU_TOKENS = 32768
_ALIKE = 0.9  # of the longest of a batch: shorter questions go into the next
_LEAST_COMMON = 32  # tokens that are worth keeping
_LOGIT_ROWS = 512  # of logits at once: their vocabulary is what takes memory


@dataclass(frozen=True)
class Answered:
    """What was found out about one question."""

    number: int
    nats: tuple[float, ...]  # log-probability of each answer
    greedy: tuple[bool, ...]  # whether each token of it was the likeliest
    tokens: tuple[int, ...]  # of each answer


class _Common:
    """Keys and values of what a group of rows begins with: kept at the first pass, put before theirs at each later one."""

    def __init__(self, layers: int) -> None:
        self.kept: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def extend(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        found = self.kept[layer]
        if found is None:
            self.kept[layer] = (k_BHTD, v_BHTD)
            return k_BHTD, v_BHTD
        rows = len(k_BHTD)
        k_BHPD, v_BHPD = (part.expand(rows, -1, -1, -1) for part in found)
        return torch.cat((k_BHPD, k_BHTD), 2), torch.cat((v_BHPD, v_BHTD), 2)


def answer_all(
    model: nn.Module, questions: Sequence[Question], positions: int, groups: Sequence[str]
) -> Iterator[list[Answered]]:
    """Batch by batch, longest first (so that the time left is never guessed too short); `groups`: of each question."""
    for one in questions:  # before any work is done
        _cut(one, max(range(len(one.answers)), key=lambda n: len(one.answers[n])), positions)
    device = next(model.parameters()).device
    budget = _CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS
    with evaluating(model):
        if not isinstance(model, Transformer):
            yield from _by_logits(model, questions, positions, budget)
            return
        alone = [one for one in questions if not _fits(one, positions)]
        for group in sorted(set(groups)):
            members = [
                one for one, its in zip(questions, groups, strict=True) if its == group and _fits(one, positions)
            ]
            yield from _group(model, members, budget)
        for one in alone:  # longer than the model reads: each answer with as much of the context's end as fits
            cut = [_cut(one, number, positions) for number in range(len(one.answers))]
            found = [_row_batch(model, [part], None) for part in cut]
            parts = [batch[0] for batch in found]
            yield [Answered(one.number, tuple(p.nats[0] for p in parts), tuple(p.greedy[0] for p in parts), tuple(p.tokens[0] for p in parts))]  # fmt: skip


def seconds_to_read(model: nn.Module, tokens: int, positions: int) -> float:
    """How long this model takes for so many tokens at once, on this machine; the first pass warms up."""
    probe = Question(0, (0,) * max(1, min(tokens, positions) - 1), ((0,),))
    took = 0.0
    for _ in range(2):
        began = time.perf_counter()
        list(answer_all(model, [probe], positions, [""]))
        took = time.perf_counter() - began
    return took


def _fits(question: Question, positions: int) -> bool:
    return len(question.context) + max(map(len, question.answers)) - 1 <= positions


def _cut(question: Question, number: int, positions: int) -> Question:
    """One answer with the end of the context that fits before it; an answer longer than the window is an error."""
    answer = question.answers[number]
    if len(answer) > positions:
        raise ValueError(
            f"item {question.number}: an answer of {len(answer)} tokens does not fit {positions} positions"
        )
    room = positions + 1 - len(answer)
    return Question(question.number, question.context[-room:], (answer,))


def _group(model: Transformer, questions: Sequence[Question], budget: int) -> Iterator[list[Answered]]:
    """Rows that begin alike: the common beginning is read once."""
    common: tuple[int, ...] = ()
    if len(questions) > 1:
        first, last = min(q.context for q in questions), max(q.context for q in questions)
        length = next(
            (n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
        )
        length = min(length, min(len(q.context) for q in questions) - 1)  # at least one token is read anew
        common = first[:length] if length >= _LEAST_COMMON else ()
    kept = _read_common(model, common) if common else None
    rest = [Question(q.number, q.context[len(common) :], q.answers) for q in questions]
    for batch in _batches(rest, budget):
        yield _row_batch(model, batch, kept, len(common))


def _batches(questions: Sequence[Question], budget: int) -> Iterator[list[Question]]:
    """Longest first. A batch ends where it is full, or where it has a quarter of that and the next question would be padded much."""
    batch: list[Question] = []
    for question in sorted(questions, key=lambda q: (-q.tokens, q.number)):
        taken = len(batch) * batch[0].tokens if batch else 0
        much = taken >= budget // 4 and question.tokens < _ALIKE * batch[0].tokens
        if batch and (taken + batch[0].tokens > budget or much):
            yield batch
            batch = []
        batch.append(question)
    if batch:
        yield batch


@torch.inference_mode()
def _read_common(model: Transformer, common: Sequence[int]) -> _Common:
    device = model.head_weight().device
    kept = _Common(model.shape.layers)
    ids_BT = torch.tensor([list(common)], device=device)
    context = AttentionContext(torch.arange(len(common), device=device), None, cast(KVCache, kept))
    _body(model)(ids_BT, context)
    return kept


def _body(model: Transformer) -> Any:
    return model.transformer if model.shape.family == "gpt2" else model.model


@torch.inference_mode()
def _row_batch(model: Transformer, batch: Sequence[Question], kept: _Common | None, before: int = 0) -> list[Answered]:
    """One forward pass for all answers of all these questions."""
    device = model.head_weight().device
    T = max(question.tokens for question in batch)
    ids, places, branches = ([[0] * T for _ in batch] for _ in range(3))
    reads: list[tuple[int, int, int]] = []  # row, place that predicts, id that is predicted
    for row, question in enumerate(batch):
        length = len(question.context)
        line, place = list(question.context), list(range(length))
        branch = [0] * length
        for number, answer in enumerate(question.answers, 1):
            begin = len(line)
            reads += [(row, length - 1 if n == 0 else begin + n - 1, token) for n, token in enumerate(answer)]
            line += answer[:-1]
            place += range(length, length + len(answer) - 1)
            branch += [number] * (len(answer) - 1)
        ids[row][: len(line)], places[row][: len(line)], branches[row][: len(line)] = line, place, branch
    ids_BT, branch_BT = torch.tensor(ids, device=device), torch.tensor(branches, device=device)
    places_BT = torch.tensor(places, device=device) + before
    mask = _tree_mask(branch_BT, before) if before or any(len(question.answers) > 1 for question in batch) else None
    context = AttentionContext(places_BT, mask, cast("KVCache | None", kept))
    x_BTC = _body(model)(ids_BT, context)
    rows, columns, targets = (torch.tensor(part, device=device) for part in zip(*reads, strict=True))
    nats, greedy = _predicted(model, x_BTC[rows, columns], targets)
    return _collect(batch, nats, greedy)


def _tree_mask(branch_BT: Tensor, before: int) -> Tensor:
    """True where a token may look: at what comes before it in the context or in its own answer, and at all that is kept."""
    T = branch_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=branch_BT.device).tril()
    mine_BTT = branch_BT[:, :, None] == branch_BT[:, None, :]
    mask_BTT = causal_TT & (mine_BTT | (branch_BT == 0)[:, None, :])
    return functional.pad(mask_BTT, (before, 0), value=True)[:, None]


def _predicted(model: Transformer, x_KC: Tensor, targets_K: Tensor) -> tuple[list[float], list[bool]]:
    """Log-probability of each target, in float32, and whether nothing was likelier."""
    nats: list[float] = []
    greedy: list[bool] = []
    for begin in range(0, len(x_KC), _LOGIT_ROWS):
        logits_KV = functional.linear(x_KC[begin : begin + _LOGIT_ROWS], model.head_weight()).float()
        found, best = _scored(logits_KV, targets_K[begin : begin + _LOGIT_ROWS])
        nats += found
        greedy += best
    return nats, greedy


def _scored(logits_KV: Tensor, targets_K: Tensor) -> tuple[list[float], list[bool]]:
    chosen_K = logits_KV.gather(1, targets_K[:, None]).squeeze(1)
    nats_K = chosen_K - logits_KV.logsumexp(1)
    if not torch.isfinite(nats_K).all():
        raise ValueError("the model's logits are not finite: its weights are damaged, or its training diverged")
    return nats_K.tolist(), (logits_KV.argmax(1) == targets_K).tolist()


def _collect(batch: Sequence[Question], nats: Sequence[float], greedy: Sequence[bool]) -> list[Answered]:
    found, at = [], 0
    for question in batch:
        sums, bests = [], []
        for answer in question.answers:
            sums.append(sum(nats[at : at + len(answer)]))
            bests.append(all(greedy[at : at + len(answer)]))
            at += len(answer)
        found.append(Answered(question.number, tuple(sums), tuple(bests), tuple(map(len, question.answers))))
    return found


# ---------------------------------------------------------------- models of one's own, by their logits alone


def _by_logits(
    model: nn.Module, questions: Sequence[Question], positions: int, budget: int
) -> Iterator[list[Answered]]:
    """Each answer with its own copy of the context: nothing is known of the model but forward(ids)."""
    for question in sorted(questions, key=lambda q: -q.tokens):
        cut = [_cut(question, number, positions) for number in range(len(question.answers))]
        pairs = [_one_by_logits(model, part) for part in cut]
        yield [Answered(question.number, tuple(p[0] for p in pairs), tuple(p[1] for p in pairs), tuple(map(len, question.answers)))]  # fmt: skip


@torch.inference_mode()
def _one_by_logits(model: nn.Module, part: Question) -> tuple[float, bool]:
    device, answer = next(model.parameters()).device, part.answers[0]
    ids_BT = torch.tensor([[*part.context, *answer[:-1]]], device=device)
    logits_KV = model(ids_BT)[0, -len(answer) :].float()
    nats, greedy = _scored(logits_KV, torch.tensor(answer, device=device))
    return sum(nats), all(greedy)
