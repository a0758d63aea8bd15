"""Cleaning on real files, where they are at hand: books of five header generations, trials, OCR, old spelling, the web."""

from __future__ import annotations

import json
import re

import pytest

from lamplighter.clean import dedup
from lamplighter.clean.markup import BadMarkup, read_xml
from lamplighter.clean.quality import words_of
from lamplighter.clean.raw_documents import decode
from lamplighter.clean.rules import Ledger, Raw, Rejected, Rules
from lamplighter.clean.worker import Clean, clean_document, clean_text
from running import real

# book: (the least share of characters that stays, how the work begins, how it ends)
BOOKS = {
    "ainsworth_jack_sheppard_16215-8.txt": (0.97, "English Library\n\nVOL. XII\n\nJACK SHEPPARD A Romance", "which ran thus--\n\nJACK SHEPPARD\n\nTHE END."),
    "defoe_plague_17221-8.txt": (0.94, "ECLECTIC ENGLISH CLASSICS\n\nHISTORY\nOF\nTHE PLAGUE IN LONDON", '[353] "H.F." is of course fictitious.'),
    "dickens_bleak_house_1023.txt": (0.98, "BLEAK HOUSE\n\nby\n\nCHARLES DICKENS\n\nCONTENTS", "without much beauty in me--even supposing--.\""),
    "dickens_dombey_821-0.txt": (0.98, "DOMBEY AND SON\n\nBy Charles Dickens\n\nCONTENTS", "the chapter in which my little friend and I parted company."),
    "dickens_oliver_twist_old_olivr11.txt": (0.98, "OLIVER TWIST\nOR\nTHE PARISH BOY'S PROGRESS", "that nook is in a Church, and she was weak and erring."),
    "dickens_two_cities_98-0.txt": (0.97, "A TALE OF TWO CITIES\n\nA STORY OF THE FRENCH REVOLUTION", "a far, far better rest that I go to than I have ever known.\u201d"),
    "evelyn_diary_v1_41218-0.txt": (0.99, "CHARLES I. IN PRISON\n\nPhotogravure after De La Roche\n\n  THE DIARY OF JOHN EVELYN", "the mystery of our Blessed Savior's Incarnation."),
    "london_people_of_the_abyss_1688.txt": (0.94, "THE PEOPLE OF THE ABYSS\n\nThe chief priests and rulers cry:-", "at present is on strike for twenty-four shillings."),
    "mayhew_london_labour_v1_55998-0.txt": (0.98, "HENRY MAYHEW.\n\n[From a Daguerreotype by BEARD.]\n\n  LONDON LABOUR", "Women street-sellers, 457"),
    "mayhew_london_labour_v3_60440-0.txt": (0.98, "  LONDON LABOUR\n  AND THE LONDON POOR", "(as it is in London) for the average of each house."),
    "pepys_diary_3331.txt": (0.99, "THE DIARY OF SAMUEL PEPYS, ESQ., F.R.S.\n\nFROM 1659 TO 1669\n\nWITH MEMOIR\n\nEdited by LORD BRAYBROOKE\n\nPREFACE TO THE PRESENT EDITION.", "the good God prepare me!\n\nS.P.       May 31, 1669."),
    "stow_survey_of_london_42959-0.txt": (0.99, "    EVERYMAN\u2019S LIBRARY\n    EDITED BY ERNEST RHYS", "THE TEMPLE PRESS, PRINTERS, LETCHWORTH\n\n       *       *       *       *       *"),
    "walton_complete_angler_9198-8.txt": (0.90, "THE COMPLETE ANGLER;\n\nOR,\n\nTHE CONTEMPLATIVE MAN'S RECREATION.", "and love quietnesse, and vertue, and Angling.\n\nFINIS."),
}  # fmt: skip
OURS = re.compile(
    r"project gutenberg|gutenberg-tm|\be-?texts?\b|\be-?books?\b|small print|transcriber|pgdp|proofread|www\.|https?:|public domain|\[illustration",
    re.I,
)
NEAR_THE_ENDS = re.compile(
    r"^\s*(?:produced by|prepared by|transcribed from|release date|title:|author:)|donation|gutenberg|licen[cs]e\b.*terms",
    re.I | re.M,
)
# letters of paragraphs in the middle of the books: an accent, a footnote, a table of contents, verse, a letter's address
INSIDE = {
    "ainsworth_jack_sheppard_16215-8.txt": "almost made me long to try",
    "dickens_bleak_house_1023.txt": "       III. A Progress\n        IV. Telescopic Philanthropy",
    "london_people_of_the_abyss_1688.txt": '   "O Lord and Master, not ours the guilt,\n   We build but as our fathers built;',
    "evelyn_diary_v1_41218-0.txt": "who strive for the glory of it, besides John Gutenberg.",
    "walton_complete_angler_9198-8.txt": "   Welcom pure thoughts, welcome ye silent groves,\n   These guests, these Courts, my soul most dearly loves,",
    "mayhew_london_labour_v1_55998-0.txt": "A Cyclop\u00e6dia of the Condition and Earnings",
}


def test_a_book_is_all_there_and_nothing_else_is() -> None:
    assert {path.name for path in real("london", "gutenberg_raw").iterdir()} == set(BOOKS)
    for name in BOOKS:
        check_book(name)


def check_book(name: str) -> None:
    least, first, last = BOOKS[name]
    raw = decode(real("london", "gutenberg_raw", name).read_bytes()).text
    text, _ = clean_text(raw, Rules())
    assert text.startswith(first), name
    assert text.endswith(last), name
    assert not OURS.search(text), name
    assert not NEAR_THE_ENDS.search(text[:3000].replace("John Gutenberg", "") + text[-3000:])
    assert len(text) / len(raw.replace("\r\n", "\n")) > least, name
    assert INSIDE.get(name, first) in text, name
    assert clean_text(text, Rules())[0] == text, name


def test_joining_loses_no_word_of_a_book() -> None:
    for name in ("dickens_two_cities_98-0.txt", "mayhew_london_labour_v1_55998-0.txt"):
        check_joining(name)


def check_joining(name: str) -> None:
    raw = decode(real("london", "gutenberg_raw", name).read_bytes()).text
    joined, kept = (clean_text(raw, Rules(keep_lines=keep))[0] for keep in (False, True))
    assert re.sub(r"[\s-]+", "", joined) == re.sub(r"[\s-]+", "", kept)
    prose = [
        block
        for block in joined.split("\n\n")
        if block.count("\n") > 3 and not block.startswith(" ") and "   " not in block
    ]
    assert len(prose) < 0.03 * len(joined.split("\n\n")), name


def gate(raw: Raw, **rules: object) -> Clean | Rejected:
    return clean_document(raw, Rules(**rules), Ledger())  # type: ignore[arg-type]


def test_old_spelling_passes_as_english() -> None:
    paths = sorted(real("london", "ordinarys_accounts_txt").glob("*.txt"))
    found = [gate(Raw(path.name, path.read_text()), language="en") for path in paths]
    assert len(paths) > 70
    assert all(isinstance(one, Clean) for one in found)


def test_ocr_of_1824_passes_and_reads_in_paragraphs() -> None:
    for page in ("0001", "0002"):
        path = real("london", "ocr_newspaper_1824_alto", f"0002647_18240217_{page}.xml")
        (piece,) = read_xml(path.read_bytes(), "auto")
        found = gate(Raw(path.name, piece.text), language="en")
        assert isinstance(found, Clean)
    assert (
        "In his Preleetions and Isaiah"
        in read_xml(real("london", "ocr_newspaper_1824_alto", "0002647_18240217_0001.xml").read_bytes(), "auto")[0].text
    )
    with pytest.raises(BadMarkup, match="lists other files"):
        read_xml(real("london", "ocr_newspaper_1824_alto", "0002647_18240217_mets.xml").read_bytes(), "auto")


SESSIONS = {"18000115.xml": 89, "18181028.xml": 205, "18360613.xml": 245, "18610610.xml": 86, "18981121.xml": 65}


def test_each_trial_is_a_document() -> None:
    for name, trials in SESSIONS.items():
        check_trials(name, trials)


def check_trials(name: str, trials: int) -> None:
    pieces = read_xml(real("london", "oldbailey_xml", name).read_bytes(), "auto")
    accounts = [piece for piece in pieces if piece.extra.get("type") == "trialAccount"]
    assert len(accounts) == trials, name
    assert not any("<" in piece.text or "  " in piece.text for piece in accounts)
    assert sum(" ," in piece.text[:200] for piece in accounts) <= 1  # one is so in the file itself


def web(name: str) -> list[Raw]:
    records = [json.loads(line) for line in real("web", name).read_text().splitlines()]
    return [
        Raw(f"{name}:{number}", record["text"])
        for number, record in enumerate(records, 1)
        if isinstance(record.get("text"), str)
    ]


def test_the_spanish_part_of_the_web_is_told() -> None:
    found = [gate(raw, language="en") for raw in web("datajuicer_stack_exchange.jsonl")]
    assert sum(isinstance(one, Rejected) and one.reason == "language" for one in found) > 50


def test_good_web_text_passes_unchanged() -> None:
    raws = [*web("c4_demo_first200.jsonl"), *web("dolma_cc_en_head-0091.jsonl")]
    found = [gate(raw) for raw in raws]
    assert sum(isinstance(one, Clean) for one in found) > 0.97 * len(raws)
    same = sum(
        isinstance(one, Clean) and one.text.split() == raw.text.split() for one, raw in zip(found, raws, strict=True)
    )
    assert same >= 0.98 * sum(isinstance(one, Clean) for one in found)


def test_natural_copies_are_found() -> None:
    import numpy as np
    import zstandard

    rows: list[str] = []
    for path in sorted(real("web", "slimpajama_like").glob("*.zst")):
        data = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()
        rows += [json.loads(line)["text"] for line in data.decode().splitlines()]
    records = np.frombuffer(b"".join(dedup.record_of(words_of(text), True) for text in rows), dtype=dedup.RECORD)
    found = dedup.find_twins(records, 0.8, lambda _: None)
    exact = {number for number, twin in found.items() if twin.likeness == 1.0}
    seen: dict[str, int] = {}
    truth = {number for number, text in enumerate(rows) if seen.setdefault(text, number) != number}
    assert truth <= exact
    assert len(found) < 0.1 * len(rows)
