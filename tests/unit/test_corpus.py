"""The embedded corpus: one text, one derivation, one probability; and a reader who smiles."""

import datetime
import hashlib
import random
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from math import exp, isclose, prod
from statistics import mean, stdev

import pytest

from lamplighter.data import corpus
from lamplighter.data.corpus import GRAMMAR, ROOT, Alternative, Entry, entries, nats

Grammar = dict[str, tuple[Alternative, ...]]
Parts = tuple[str, ...]

# First 1,000 texts of seed 1. If this changes, every cached corpus is stale: add one to GRAMMAR_VERSION.
GOLDEN = (1, "10bac86261e15dc09826dff99c2fd9ebdd5249f61a67d0c657e6e767d23b5750")


@pytest.fixture(scope="module")
def sample() -> list[Entry]:
    return list(entries(1, 5000))


# What the probability means.


@pytest.mark.parametrize("seed", [0, 1, 2, -7, 2**63 + 5])
def test_parsing_a_text_gives_back_its_nats(seed: int) -> None:
    for entry in entries(seed, 1500):
        assert nats(entry.text) == pytest.approx(entry.nats, abs=1e-9)


def test_every_choice_is_prefix_free_so_every_text_has_one_derivation() -> None:
    """The proof. If no text of one alternative begins a text of another, then reading left to right never has
    two ways to go: each choice is settled by the text, and so is the place where the document ends."""
    assert clashes(GRAMMAR) == []


@pytest.mark.parametrize(
    ("table", "clash"),
    [
        ("a = 1 goose | 1 goose pie", "{a}"),
        ("a = 1 {b}s | 1 cats\nb = 1 cat | 1 dog", "{a}"),
        ("a = 1 {b} {b} | 1 {b} dog.\nb = 1 cat | 1 dog", "{a}"),
        ("a = 1 x{b} | 1 y{c}\nb = 1 p | 1 q\nc = 1 {b} | 2 q!", "{c}"),
    ],
)
def test_the_proof_notices_an_ambiguous_grammar(table: str, clash: str) -> None:
    assert clash in [name for name, _, _ in clashes(corpus._read(table))]


def test_a_parser_that_follows_all_derivations_finds_exactly_one() -> None:
    for entry in entries(3, 400):
        whole = [found for end, found in derivations((ROOT,), entry.text, 0) if end == len(entry.text)]
        assert whole == [pytest.approx(entry.nats, abs=1e-9)]


def test_probabilities_of_each_choice_sum_to_one() -> None:
    for name, alternatives in GRAMMAR.items():
        total = sum(alternative.weight for alternative in alternatives)
        assert all(alternative.weight > 0 for alternative in alternatives)
        assert all(isclose(exp(-each.nats), each.weight / total, rel_tol=1e-12) for each in alternatives), name
        assert sum(exp(-each.nats) for each in alternatives) == pytest.approx(1, abs=1e-12), name


def test_probabilities_of_all_texts_of_a_small_language_sum_to_one() -> None:
    small = [name for name in GRAMMAR if count_texts(name) <= 3000]
    assert len(small) > 50
    for name in small:
        language = list(texts((name,)))
        assert len({text for text, _ in language}) == len(language) == count_texts(name), name
        assert sum(exp(-cost) for _, cost in language) == pytest.approx(1, abs=1e-9), name


def test_mean_nats_is_the_entropy_of_the_grammar(sample: list[Entry]) -> None:
    measured = [entry.nats for entry in sample]
    assert abs(mean(measured) - entropy(ROOT)) < 4 * stdev(measured) / len(measured) ** 0.5
    assert entropy(ROOT) == pytest.approx(58.6, abs=0.05), "the docstring of corpus.py quotes this number"


@pytest.mark.parametrize(
    ("pattern", "probability"),
    [
        (r"\nSpent today", 3 / 8),
        (r"^.*November", 1 / 2),
        (r"^.*Sunday", 1 / 25),
        (r"\nIt has rained", 5 / 25),
        (r"fog permitting\.\n", 5 / 23),
    ],
)
def test_events_happen_as_often_as_the_weights_say(sample: list[Entry], pattern: str, probability: float) -> None:
    share = mean(bool(re.search(pattern, entry.text)) for entry in sample)
    assert abs(share - probability) < 4 * (probability * (1 - probability) / len(sample)) ** 0.5


def test_a_text_outside_the_language_is_refused(sample: list[Entry]) -> None:
    text = sample[0].text
    for wrong in ("", text[:-1], text + " ", text + "\n", " " + text, text.replace("1837", "1838"), text + text):
        with pytest.raises(ValueError, match="Not a document of the embedded corpus"):
            nats(wrong)


# What a user relies on.


def test_the_corpus_of_a_version_never_changes() -> None:
    digest = hashlib.sha256("\0".join(entry.text for entry in entries(1, 1000)).encode()).hexdigest()
    assert (corpus.GRAMMAR_VERSION, digest) == GOLDEN


def test_a_document_is_the_same_whatever_range_it_is_asked_in(sample: list[Entry]) -> None:
    assert list(entries(1, 20, start=4000)) == sample[4000:4020]
    assert next(entries(1, 1, start=4999)) == sample[4999]
    assert list(islice(entries(1, 10**15), 3)) == sample[:3]
    assert next(entries(1, 1, start=10**15)).nats > 0
    assert list(entries(1, 0)) == []


def test_nobody_elses_random_numbers_are_used_or_moved(sample: list[Entry]) -> None:
    random.seed(5)
    before = random.getstate()
    assert list(entries(1, 50)) == sample[:50]
    assert random.getstate() == before


def test_impossible_ranges_are_refused_at_once() -> None:
    for count, start in ((-1, 0), (1, -1)):
        with pytest.raises(ValueError, match="Try a count and a start of zero or more"):
            entries(1, count, start)


def test_documents_differ_within_a_seed_and_between_seeds(sample: list[Entry]) -> None:
    own = {entry.text for entry in sample}
    assert len(sample) - len(own) < 0.001 * len(sample)
    assert len(own & {entry.text for entry in entries(2, 5000)}) < 0.001 * len(sample)


# What a reader sees.


def test_documents_are_short_plain_and_whole(sample: list[Entry]) -> None:
    words = [len(entry.text.split()) for entry in sample]
    assert min(words) >= 40
    assert max(words) <= 117
    assert 65 < mean(words) < 85
    for entry in sample:
        assert entry.text.isascii()
        assert entry.text == entry.text.strip()
        assert not re.search(r"[{}|\\]|  | \n|\n\n|\ba [aeiou]", entry.text)


def test_vocabulary_is_modest(sample: list[Entry]) -> None:
    vocabulary = {word.lower() for entry in sample for word in re.findall(r"\w+", entry.text)}
    assert 250 <= len(vocabulary) <= 400


def test_weekdays_fit_the_calendar_of_1837(sample: list[Entry]) -> None:
    for entry in sample[:500]:
        heading = re.search(r"(\w+) the (\d+)\w\w of (\w+), 1837\.\n", entry.text)
        assert heading is not None
        weekday, day, month = heading.groups()
        assert datetime.datetime.strptime(f"{day} {month} 1837", "%d %B %Y").strftime("%A") == weekday


# Other ways to read the grammar, kept apart from the code under test.


def clashes(grammar: Grammar) -> list[tuple[str, Parts, Parts]]:
    """Pairs of alternatives of one choice where a text of one equals or begins a text of the other."""

    @cache
    def may_meet(a: Parts, b: Parts) -> bool:
        if not a or not b:
            return True
        x, y = a[0], b[0]
        if x == y:  # one choice in both: if it is prefix-free (it is checked too), both must have read the same text
            return may_meet(a[1:], b[1:])
        if x in grammar:
            return any(may_meet(each.parts + a[1:], b) for each in grammar[x])
        if y in grammar:
            return may_meet(b, a)
        size = min(len(x), len(y))
        rest_a, rest_b = tuple(filter(None, (x[size:],))), tuple(filter(None, (y[size:],)))
        return x[:size] == y[:size] and may_meet(rest_a + a[1:], rest_b + b[1:])

    return [
        (name, one.parts, other.parts)
        for name, alternatives in grammar.items()
        for i, one in enumerate(alternatives)
        for other in alternatives[:i]
        if may_meet(one.parts, other.parts)
    ]


def derivations(parts: Parts, text: str, at: int) -> Iterator[tuple[int, float]]:
    """Every way, not only the first, to read `parts` from position `at`: where it ends, and its nats."""
    if not parts:
        yield at, 0.0
    elif parts[0] not in GRAMMAR:
        if text.startswith(parts[0], at):
            yield from derivations(parts[1:], text, at + len(parts[0]))
    else:
        for alternative in GRAMMAR[parts[0]]:
            for middle, first in derivations(alternative.parts, text, at):
                for end, rest in derivations(parts[1:], text, middle):
                    yield end, alternative.nats + first + rest


def texts(parts: Parts) -> Iterator[tuple[str, float]]:
    """Every text of `parts` with its nats."""
    if not parts:
        yield "", 0.0
        return
    heads = [(parts[0], 0.0)]
    if parts[0] in GRAMMAR:
        heads = [(text, each.nats + cost) for each in GRAMMAR[parts[0]] for text, cost in texts(each.parts)]
    for head, head_nats in heads:
        for tail, tail_nats in texts(parts[1:]):
            yield head + tail, head_nats + tail_nats


@cache
def count_texts(name: str) -> int:
    return sum(prod(count_texts(part) for part in each.parts if part in GRAMMAR) for each in GRAMMAR[name])


@cache
def entropy(name: str) -> float:
    """Expected nats of a choice: its own, and those of the choices inside it."""
    return sum(
        exp(-each.nats) * (each.nats + sum(entropy(part) for part in each.parts if part in GRAMMAR))
        for each in GRAMMAR[name]
    )
