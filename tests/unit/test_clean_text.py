"""Characters, encodings, lines, the gate, languages and duplicates: what changes, and what must not."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from lamplighter.clean import dedup, quality, worker
from lamplighter.clean import normalise as characters
from lamplighter.clean.normalise import join
from lamplighter.clean.quality import language_of, words_of
from lamplighter.clean.raw_documents import decode
from lamplighter.clean.rules import Ledger, Raw, Rejected, Rules
from lamplighter.clean.worker import Clean, clean_document, clean_text
from lamplighter.data.ngrams import word_key

GOOD = [
    "\u201cNo,\u201d she said \u2014 \u2018never\u2019 \u2014 and the \ufb01sh\u2026 stayed; caf\u00e9, na\u00efve, \u0153uvre, \u00a310, 3\u00bd, \u00bfqu\u00e9?",
    "L\u2019\u00e9t\u00e9 \u00e0 No\u00ebl: \u00ab \u00e9lan \u00bb, \u00c2me, \u00c3o, p\u00e2t\u00e9\u2019s. \u00c9\u2026 S\u00e3o Paulo \u2013 \u00e9\u201d",
    "the Dying-Words of John Shears , a Seaman , that was Executed Esq ; vpon ye 4th day, publick musick & Chappel",
    "\u0645\u0631\u062d\u0628\u0627 \u0648\u200c\u0633\u0647\u0644\u0627 \u6f22\u5b57\u3068\u304b\u306a \u0939\u093f\u0928\u094d\u0926\u0940",
    "def f(x_y):\n    return x_y[0]  # two\n\nROMEO:\nBut soft,\nwhat light\n\n| a   | b   |\n| 1   | 2   |",
    "Dear Sir,\n\n12 Lamp Lane,\nStepney.\n\n- one\n- two\n\n1. first\n2. second",
]


@pytest.mark.parametrize("text", GOOD)
def test_good_text_comes_out_byte_for_byte(text: str) -> None:
    assert clean_text(text, Rules())[0] == text


def test_what_nobody_can_see_goes() -> None:
    text = (
        "a\x00b\x1b c\u00add\u200be\u2060f\ufeffg\x1a  \t\r\nnext\u00a0\n\n\n\n\nexam\u00ad\nple caf"
        + "e\u0301 \x0cpage"
    )
    assert clean_text(text, Rules())[0] == "ab cdefg\nnext\n\nexample caf\u00e9\npage"


def test_only_true_mojibake_is_read_again() -> None:
    right = "\u201cYou\u2019re late,\u201d said Andr\u00e9 \u2014 \u00a35"
    wrong = "\u00e2\u20ac\u0153You\u00e2\u20ac\u2122re late,\u00e2\u20ac\u009d said Andr\u00c3\u00a9 \u00e2\u20ac\u201d \u00c2\u00a35"
    text, changes = characters.misread(f"{right}\n{wrong}\nplain")
    assert text == f"{right}\n{right}\nplain"
    assert len(changes) == 1


@pytest.mark.parametrize(
    ("data", "encoding", "text"),
    [
        (b"plain", "utf-8", "plain"),
        (b"\xef\xbb\xbfcaf\xc3\xa9", "utf-8", "caf\u00e9"),
        ("caf\u00e9 \u2014".encode("utf-16"), "utf-16-le", "caf\u00e9 \u2014"),
        ("no mark, all wide".encode("utf-16-be"), "utf-16-be", "no mark, all wide"),
        (b"caf\xe9 and na\xefve", "cp1252", "caf\u00e9 and na\u00efve"),
        (b"\x93quoted\x94 \x97 dash", "cp1252", "\u201cquoted\u201d \u2014 dash"),
    ],
)
def test_encodings_are_found(data: bytes, encoding: str, text: str) -> None:
    found = decode(data)
    assert (found.encoding, found.text) == (encoding, text)


def test_a_bad_line_is_named_and_left_out_and_the_rest_stays() -> None:
    lines = [f"caf\u00e9 \u201cgood\u201d line {n}" for n in range(400)]
    data = "\n".join(lines).encode().replace(b"line 7\n", b"line \xff7\n").replace(b"line 9\n", b"li\x00ne 9\n")
    found = decode(data)
    assert [(bad.line, bad.why.split(":")[0]) for bad in found.bad] == [(8, "not UTF-8"), (10, "a NUL byte")]
    assert found.text.split("\n") == [*lines[:7], lines[8], *lines[10:]]


@pytest.mark.parametrize("data", [b"%PDF-1.4 \x00\x01", bytes(range(256)) * 40, b"PK\x03\x04zip"])
def test_what_is_not_text_is_refused(data: bytes) -> None:
    assert decode(data).refused


# ---------------------------------------------------------------- lines

WRAPPED = """The lamplighter came down the lane at six, and the children who had
been told to be in bed by five were all of them at their windows. He
knew it, and took his time; for a man who lights forty lamps in one
evening has little else to be looked at for.

It was, they said afterwards, the last of the oil lamps in that well-
known parish--and he the last of the men who had lit them, summer and
winter, for one-and-thirty years."""

VERSE = """The lamps are lit along the lane,
  The night is coming down;
The wind has brought the autumn rain
  To every street in town.

And one by one they go to bed,
The children of the poor,
And he goes by with careful tread
And closes every door."""


def test_wrapped_prose_is_joined() -> None:
    text = join(WRAPPED).text
    assert text.count("\n") == 2
    assert "well-known parish--and he the last" in text
    assert text.split() == [*WRAPPED.replace("well-\nknown", "well-known").split()]


@pytest.mark.parametrize(
    "kept",
    [
        VERSE,
        "12, Lamp Lane,\nStepney,\nLondon, E.",
        "ROMEO.\nWhat light is that which through the window there now breaks upon us?\nJULIET.\nMy own.",
        "  Name            Lamps      Oil\n  Lane               40    2 gal.\n  Court              12    1 gal.",
        "- forty lamps in the lane, and of these not one was lit before the sixth\n- twelve in the court",
        "THE LADDER\nAND\nTHE LAMP\n\nBY\nJANE INVENTED",
    ],
)
def test_verse_tables_lists_and_addresses_stay_as_they_are(kept: str) -> None:
    text = join(f"{WRAPPED}\n\n{kept}\n\n{WRAPPED}").text
    assert kept in text
    assert "at six, and the children who had been told" in text


def test_a_hyphen_at_a_lines_end_goes_only_where_the_text_itself_says_so() -> None:
    page = (
        "The committee of the parish met again on the same evening; the com-\nmittee was of one mind, but nobody had thought of the lamp-\n"
        "lighters at all, and so the lane stayed dark, and every one of the mem-\nbers of it went home before the lamps of the town were lit.\n"
        "The members saw the lamp-lighters and the committee."
    )
    text = "\n\n".join([page] * 3)
    joined = join(text).text
    assert "the committee was of one mind" in joined
    assert "the lamp-lighters at all" in joined
    assert "the members of it" in joined


def test_cleaning_twice_is_cleaning_once() -> None:
    random.seed(3)
    vocabulary = [
        "lamp",
        "the",
        "of",
        "and",
        "to",
        "Ladder,",
        "stair.",
        "“No”",
        "--",
        "well-",
        "known",
        "—",
        "a",
        "I",
        "he.",
        "It",
        "was",
        "(one)",
        "[2]",
        "_so_",
        "12",
        "x",
    ]
    ends = [" ", " ", " ", " ", "\n", "\n", "\n\n", "\n\n\n\n", "  \n", "\t", "-\n", "\r\n", "\n    "]
    for _ in range(300):
        text = "".join(random.choice(vocabulary) + random.choice(ends) for _ in range(random.randint(1, 400)))
        once = clean_text(text, Rules())[0]
        assert clean_text(once, Rules())[0] == once


def test_no_word_is_ever_changed_by_joining() -> None:
    random.seed(4)
    vocabulary = [
        "lamp",
        "the",
        "of",
        "and",
        "to",
        "ladder",
        "stair",
        "no",
        "well",
        "known",
        "a",
        "he",
        "it",
        "was",
        "one",
        "so",
        "lane",
        "evening",
        "children",
        "window",
    ]
    import textwrap

    for width in (45, 60, 72, 99):
        paragraphs = [" ".join(random.choices(vocabulary, k=random.randint(3, 90))) + "." for _ in range(60)]
        wrapped = "\n\n".join(textwrap.fill(one, width) for one in paragraphs)
        assert join(wrapped).text == "\n\n".join(paragraphs)


# ---------------------------------------------------------------- the gate


def judged(text: str, **rules: object) -> Clean | Rejected:
    return clean_document(Raw("x", text), Rules(**rules), Ledger())  # type: ignore[arg-type]


OCR = (
    "of the Principles of Compofition laid down by the late Robert Loath. D. D. Lord Bishop of London, In his Prelee tions and "
    "Isaiah, and an Application of the b\u25ba each a argnment tvits'aity Principles so re viewed to the Illustrations of the New Testament ; in a "
) * 3
OLD = "ON Saturday the 3d Instant, the above-named John Shears receiv'd Sentence of Condemnation , & vpon ye Lord's Day I preach'd to them in the Chappel , that they wou'd consider their latter End . Hee confess'd that hee had bin a very great Sinner , & desir'd all yong Men to take Warning by him . "


@pytest.mark.parametrize("text", [OCR, OLD, WRAPPED, VERSE * 2])
def test_old_spelling_verse_and_honest_ocr_pass(text: str) -> None:
    assert isinstance(judged(text, language="en"), Clean)


def some(words: str, count: int) -> str:
    return " ".join(random.Random(count).choices(words.split(), k=count))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("Three words only.", "too_short"),
        (some("#@! %% ^&*( ~~| <> {}", 300), "too_short"),
        (some("#@! %%% ^&*( ~~| <==> a{}b {c}d", 900), "letters"),
        (" ".join(f"{n:08x}{n * 7919 % 99991}" for n in range(400)), "letters"),
        ("Home | About | Contact us today for the best offer\n" * 60, "repeated_lines"),
        ("the lamp of the lane and the lamp of the lane is the lamp " * 200, "repeated_words"),
        (" ".join(some("ab cd ef gh ij kl", 90).replace(" ", "") for _ in range(40)), "word_length"),
        (some("b c d f g h j k l m n p", 500), "word_length"),
        (some("xa3k9b zo7q1e lamp me4t4s", 500), "broken_words"),
    ],
)
def test_noise_is_rejected_with_its_reason_and_scores(text: str, reason: str) -> None:
    found = judged(text)
    assert isinstance(found, Rejected)
    assert found.reason == reason
    assert reason in ("empty", "too_short") or found.scores["score"] == 0
    assert found.why


def test_a_list_of_words_is_no_english_text() -> None:
    found = judged(
        some("lamp ladder lane window candle street river garden winter morning", 300) + " yes", language="en"
    )
    assert isinstance(found, Rejected)
    assert found.reason in ("common_words", "language")


def test_the_least_quality_can_be_raised() -> None:
    found = judged(OCR)
    assert isinstance(found, Clean)
    assert isinstance(judged(OCR, min_quality=found.score), Rejected)


FRENCH = "Il \u00e9tait une fois, dans une petite rue derri\u00e8re la fabrique de chandelles, un vieil homme qui allumait les r\u00e9verb\u00e8res tous les soirs de l\u2019hiver, et que les enfants regardaient de leurs fen\u00eatres sans rien dire."
GERMAN = "Es war ein nasser Abend in der Gasse hinter der Kerzenfabrik, und der alte Laternenanz\u00fcnder war noch nicht weiter als bis zum dritten Pfosten gekommen, als der Wind ihm den Hut nahm."


@pytest.mark.parametrize(("text", "language"), [(WRAPPED, "en"), (FRENCH, "fr"), (GERMAN, "de"), (OLD, "en")])
def test_languages_are_told(text: str, language: str) -> None:
    assert language_of(text, words_of(text)) == language


def test_only_the_wanted_languages_stay() -> None:
    found = judged(FRENCH, language="en")
    assert isinstance(found, Rejected)
    assert found.reason == "language"
    assert isinstance(judged(FRENCH, language="en,fr"), Clean)
    assert isinstance(judged(FRENCH), Clean)


def test_the_words_are_the_words() -> None:
    words = words_of("Lamp, the LAMP; caf\u00e9-lamp 12th _x_")
    assert words.keys.tolist() == [word_key(one) for one in ("lamp", "the", "lamp", "caf\u00e9", "lamp", "12th", "x")]
    assert quality.judge(WRAPPED, words_of(WRAPPED), True).words == len(
        WRAPPED.replace("-", " ").replace("\n", " ").split()
    )


# ---------------------------------------------------------------- duplicates


def records(*texts: str) -> np.ndarray:
    return np.frombuffer(b"".join(dedup.record_of(words_of(text), True) for text in texts), dtype=dedup.RECORD)


def test_copies_go_and_the_first_one_stays() -> None:
    random.seed(5)
    names = [f"word{n}" for n in range(400)]
    texts = [" ".join(random.choices(names, k=300)) for _ in range(40)]
    near = texts[3].replace(texts[3].split()[100], "changed", 1)
    all_of_them = [*texts, texts[7].upper().replace(" ", "  "), near, texts[3]]
    found = dedup.find_twins(records(*all_of_them), 0.8, lambda _: None)
    assert {number: (twin.first, twin.likeness == 1.0) for number, twin in found.items()} == {
        40: (7, True),
        41: (3, False),
        42: (3, True),
    }
    assert set(dedup.find_twins(records(*all_of_them), 0.0, lambda _: None)) == {40, 42}


def test_a_chain_of_likenesses_leads_to_the_one_that_stays() -> None:
    random.seed(6)
    names = [f"word{n}" for n in range(500)]
    first = random.choices(names, k=400)
    second, third = [*first], [*first]
    second[50], third[300] = "one", "two"
    found = dedup.find_twins(records(*(" ".join(one) for one in (first, second, third))), 0.8, lambda _: None)
    assert {twin.first for twin in found.values()} == {0}
    assert set(found) == {1, 2}


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 0.95])
def test_enough_bands_to_find_pairs_at_the_threshold(threshold: float) -> None:
    bands = dedup.bands_for(threshold)
    assert (1 - threshold ** (dedup.PERMUTATIONS // bands)) ** bands < 0.02


def test_blanks_that_an_unseen_character_hid_go_too() -> None:
    once, unseen = characters.characters("a lamp \u200b\nand \x00\na street\u00a0\u2060\n\u00e9")
    assert (once, unseen) == ("a lamp\nand\na street\n\u00e9", 3)
    assert characters.characters(once) == (once, 0), "a second pass must find nothing"


def test_a_line_of_output_is_what_json_writes() -> None:
    text = "".join(map(chr, [*range(0x250), 0x2028, 0x201C, 0xFFFD, 0x1F56F])) + '\\"'
    made = worker._line(worker.Clean("a.txt#1", text, words_of(text), {"title": "caf\u00e9", "meta": {"n": 1}}, "en"))
    record = {"text": text, "source": "a.txt#1", "title": "caf\u00e9", "meta": {"n": 1}, "language": "en"}
    assert made == (json.dumps(record, ensure_ascii=False) + "\n").encode()
