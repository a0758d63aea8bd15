"""Project Gutenberg files of every generation, made up: nothing of the header or licence stays, nothing of the book goes."""

from __future__ import annotations

import re

import pytest

from lamplighter.clean.gutenberg import strip
from lamplighter.clean.normalise import blank_lines
from lamplighter.clean.rules import Ledger, Rules
from lamplighter.clean.worker import clean_text

OURS = re.compile(
    r"gutenberg|e-?text|small print|donation|pgdp|proofread|produced by|transcriber|www\.|http|ebook", re.I
)

PROSE = """It was a wet evening in the lane behind the candle works, and the old
lamplighter had gone no further than the third post when the wind took
his hat. He let it go. There were other hats in Stepney, he said, and
there was but one ladder.

"You will be late," said the girl at the window, who had been told to
count the lamps as they were lit, and had reached two.

He did not answer her until the fourth was burning, and then he only
touched the place where the brim should have been."""

FRONT = """THE LADDER AND THE LAMP

A TALE OF TWO LANES

By Jane Invented


TO MY FATHER,
WHO COUNTED THEM


PREFACE

This little book was written in a winter without coals, and the author
asks no pardon for its shortness.


CONTENTS

    I. The Third Post
   II. The Hat


CHAPTER I. THE THIRD POST

"""
BOOK = FRONT + "\n" + PROSE + "\n\n\nTHE END\n"

MODERN_HEAD = """The Project Gutenberg eBook of The Ladder and the Lamp

This ebook is for the use of anyone anywhere in the United States and
most other parts of the world at no cost and with almost no restrictions
whatsoever. You may copy it, give it away or re-use it under the terms
of the Project Gutenberg License included with this ebook or online
at www.gutenberg.org.

Title: The Ladder and the Lamp
       A Tale of Two Lanes

Author: Jane Invented

Release date: June 1, 2021 [eBook #99999]
                Most recently updated: October 29, 2024

Language: English

Credits: A. Volunteer and the Online Distributed Proofreading Team at http://www.pgdp.net


*** START OF THE PROJECT GUTENBERG EBOOK THE LADDER AND THE LAMP ***




"""
LICENCE = """Updated editions will replace the previous one--the old editions
will be renamed.

Creating the works from print editions not protected by U.S. copyright
law means that no one owns a United States copyright in these works, so
the Foundation (and you!) can copy and distribute it.

START: FULL LICENSE

THE FULL PROJECT GUTENBERG LICENSE
PLEASE READ THIS BEFORE YOU DISTRIBUTE OR USE THIS WORK

To protect the Project Gutenberg-tm mission of promoting the free
distribution of electronic works, you agree to comply with the terms.

1.A.  By reading or using any part of this Project Gutenberg-tm
electronic work, you indicate that you have read and accept this license.

1.F.3.  LIMITED RIGHT OF REPLACEMENT OR REFUND - If you discover a
defect in this electronic work you can receive a refund of the money.

Section 5.  General Information About Project Gutenberg-tm electronic works.

Most people start at our Web site which has the main PG search facility:

     www.gutenberg.org
"""
MODERN_TAIL = "\n\n\n\n*** END OF THE PROJECT GUTENBERG EBOOK THE LADDER AND THE LAMP ***\n\n\n" + LICENCE
SMALL_PRINT = """***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***
Why is this "Small Print!" statement here?  You know: lawyers.
They tell us you might sue us if there is something wrong with
your copy of this etext, even if you got it for free.

*BEFORE!* YOU USE OR READ THIS ETEXT
By using or reading any part of this PROJECT GUTENBERG-tm
etext, you indicate that you understand this statement.

LIMITED WARRANTY; DISCLAIMER OF DAMAGES
But for the "Right of Replacement or Refund" described below,
the Project disclaims all liability to you for damages.

WHAT IF YOU *WANT* TO SEND MONEY EVEN IF YOU DON'T HAVE TO?
The Project gratefully accepts contributions in money, time,
scanning machines, OCR software, public domain etexts.

{end}
"""
NINETIES_HEAD = """*****The Project Gutenberg Etext of The Ladder and the Lamp*****

Copyright laws are changing all over the world, be sure to check
the laws for your country before redistributing these files!!!

Please take a look at the important information in this header.
We encourage you to keep this file on your own disk, keeping an
electronic path open for the next readers.  Do not remove this.

**Welcome To The World of Free Plain Vanilla Electronic Texts**

**Etexts Readable By Both Humans and By Computers, Since 1971**

*These Etexts Prepared By Hundreds of Volunteers and Donations*

The Ladder and the Lamp

by Jane Invented

March, 1994  [Etext #9999]

*****This file should be named ladlp10.txt or ladlp10.zip*****

Corrected EDITIONS of our etexts get a new NUMBER, ladlp11.txt.

Information about Project Gutenberg (one page)

We produce about one million dollars for each hour we work.  One
hundred hours is a conservative estimate for how long it takes to
get any etext selected, entered, proofread, edited and copyrighted.

When these and other matters are settled we will send the list to
those who have asked for it by mail, and to the members.

""" + SMALL_PRINT.format(end="*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*")

VARIANTS: dict[str, str] = {
    "2021": MODERN_HEAD + BOOK + MODERN_TAIL,
    "2005 this": MODERN_HEAD.replace("OF THE PROJECT", "OF THIS PROJECT")
    + "Produced by A. Nother, B. Nother and the Online\nDistributed Proofreading Team at http://www.pgdp.net\n\n\n\n\n"
    + BOOK + "\n\n\n\nEnd of Project Gutenberg's The Ladder and the Lamp, by Jane Invented\n" + MODERN_TAIL,
    "no space": MODERN_HEAD.replace("*** START", "***START").replace("LAMP ***", "LAMP***")
    + "E-text prepared by A. Nother, Toronto,\nand revised by C. Nother, M.D.\n\n\n\n" + BOOK
    + "\n\n\n***END OF THE PROJECT GUTENBERG EBOOK THE LADDER AND THE LAMP***\n\n\n"
    + "******* This file should be named 9999.txt or 9999.zip *******\n\n\n" + LICENCE,
    "number only": "*** START OF THE PROJECT GUTENBERG EBOOK 99999 ***\n\n" + BOOK
    + "\n\n\n\nEnd of the Project Gutenberg EBook of The Ladder and the Lamp, by\nJane Invented\n\n*** END OF THE PROJECT GUTENBERG EBOOK 99999 ***\n",
    "last line only": BOOK + "\n\n\n\n\nEnd of the Project Gutenberg EBook of The Ladder and the Lamp, by \nJane Invented\n\n",
    "1994": NINETIES_HEAD + "\n\n\nThis etext was prepared by A. Nother <another@example.edu>\n\n\n\n\n" + BOOK
    + "\n\n\n\nEnd of Project Gutenberg Etext of The Ladder and the Lamp\n",
    "1999 scanned": NINETIES_HEAD.replace("*END*THE", "*END THE") + "\n\nScanned and proofed by A. Nother\nanother@example.edu\n\n\n\n"
    + BOOK + "\n\n\nEnd of The Project Gutenberg Etext of The Ladder and the Lamp\n\n",
    "2002 small print last": MODERN_HEAD.replace("re-use it", "re-use it") + "This etext was created by A. Nother.\nEdition 11 editing by B. Nother.\n\n\n\n"
    + BOOK + "\n\n\n\nEnd of the Project Gutenberg EBook of The Ladder and the Lamp\n\n*** END OF THE PROJECT GUTENBERG EBOOK, THE LADDER AND THE LAMP ***\n\n"
    + "This file should be named ladlp11.txt or ladlp11.zip\nCorrected EDITIONS of our eBooks get a new NUMBER, ladlp12.txt\n\n"
    + SMALL_PRINT.format(end="*END THE SMALL PRINT! FOR PUBLIC DOMAIN EBOOKS*Ver.02/11/02*END*"),
    "long title": MODERN_HEAD.replace("EBOOK THE LADDER AND THE LAMP ***", "EBOOK THE LADDER AND THE LAMP; OR, A TALE OF\nTWO LANES IN THE PARISH OF STEPNEY ***")
    + BOOK + MODERN_TAIL.replace("EBOOK THE LADDER AND THE LAMP ***", "EBOOK THE LADDER AND THE LAMP; OR, A TALE OF\nTWO LANES IN THE PARISH OF STEPNEY ***"),
    "licence without a marker": MODERN_HEAD + BOOK + "\n\n\n\n" + LICENCE,
    "html note": MODERN_HEAD + "E-text prepared by A. Nother and the Project Gutenberg Online Distributed\nProofreading Team (http://www.pgdp.net)\nfrom page images generously made available by\nInternet Archive (http://archive.org)\n\n\n\n"
    + "Note: Project Gutenberg also has an HTML version of this\n      file which includes the original illustrations.\n      See 9999-h.htm or 9999-h.zip\n\n\n      Images of the original pages are available through\n      Internet Archive. See\n      http://archive.org/details/ladder\n\n\n\n\n\n" + BOOK + MODERN_TAIL,
    "transcribed from": MODERN_HEAD + "Transcribed from the 1890 Invented and Sons edition by D. Price, email\nnobody@example.org\n\n\n\n\n" + BOOK + MODERN_TAIL,
    "note in front": MODERN_HEAD + "Produced by A. Nother\n\n\n\n\nTranscriber's Note:\n\nItalics are shown by _underscores_. Obvious printer's errors have been\ncorrected; the spelling is as in the original.\n\n\n\n\n" + BOOK + MODERN_TAIL,
    "note in a box": MODERN_HEAD + "Produced by A. Nother\n\n\n\n  +----------------------------------------+\n  | Transcriber's Note:                    |\n  |                                        |\n  | Inconsistent hyphenation has been kept |\n  | as printed.                            |\n  +----------------------------------------+\n\n\n\n" + BOOK + MODERN_TAIL,
    "note in brackets": MODERN_HEAD + "[Transcriber's note: The spelling is the author's own.\n\nPage numbers are left out.]\n\n\n" + BOOK + MODERN_TAIL,
    "notes at the end": MODERN_HEAD + BOOK + "\n\n\n\nTranscriber's Notes\n\n\nThe following printing errors have been corrected:\n\np. 12 \"lanp\" changed to \"lamp\"\n\nStepney and Stepny\n\nward-robe and wardrobe\n" + MODERN_TAIL,
    "small gap to the note": MODERN_HEAD + BOOK + "\n\nTranscriber's Note: Minor typographical errors have been corrected without\nnote. Archaic spellings were retained.\n" + MODERN_TAIL,
    "german tail": MODERN_HEAD + BOOK + "\n\n\nEnde dieses Project Gutenberg Etextes The Ladder and the Lamp\n",
    "crlf and byte-order mark": "\ufeff" + (MODERN_HEAD + BOOK + MODERN_TAIL).replace("\n", "\r\n"),
}  # fmt: skip


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_book_and_nothing_but_the_book_stays(name: str) -> None:
    text, extra = clean_text(VARIANTS[name], Rules())
    assert words(text) == words(BOOK), name
    if name not in ("number only", "last line only", "1994", "1999 scanned"):
        assert extra == {"title": "The Ladder and the Lamp A Tale of Two Lanes", "author": "Jane Invented"}


@pytest.mark.parametrize("name", VARIANTS)
def test_cleaning_it_again_changes_nothing(name: str) -> None:
    once, _ = clean_text(VARIANTS[name], Rules())
    assert clean_text(once, Rules())[0] == once


def test_a_text_that_only_talks_about_the_project_is_left_alone() -> None:
    article = (
        "Project Gutenberg is the oldest digital library.\n\nThe Project Gutenberg eBook of this tale is easy to find, and so\n"
        "is its license. Donations are welcome.\n\nThe end of the Project Gutenberg story is not written yet."
        + "\n\n"
        + PROSE * 8
    )
    assert strip(article).text == article
    assert strip(BOOK).text == BOOK


def test_adverts_at_the_end_go_and_footnotes_before_them_stay() -> None:
    notes = "\n\n\n\nFOOTNOTES:\n\n[1] A ladder of nine rungs, price 2s. at the time.\n\n[2] Since pulled down.\n"
    adverts = (
        "\n\n\n\nINVENTED'S POPULAR LIBRARY.\n\nTHE HAT. By J. INVENTED. Cloth, 12mo. 336 pp.      $0.48\nA tale for schools.\n\n"
        "THE LANE. By the same Author. Cloth, 8vo. 530 pp.      .98\nWith 30 illustrations.\n\nTHE POST. Cloth, 12mo.      $1.50\n"
        "Illustrated, gilt top.\n\n\n_Copies of any of these books will be sent, postpaid, on receipt of the price by the\nPublishers_:\n\nINVENTED BOOK COMPANY\nNEW YORK\n"
    )
    text = strip(MODERN_HEAD + BOOK + notes + adverts + MODERN_TAIL).text
    assert words(text) == words(BOOK + notes)


def test_prices_and_cloth_in_the_last_chapter_are_no_advert() -> None:
    chapter = "\n\n\n\nCHAPTER II\n\nThe cloth cost him $2 and the boards 3s. net; he had it bound in calf, and the price was\nnot published. The pages were gilt, he said, for 50 cents.\n"
    text = strip(MODERN_HEAD + BOOK.replace("\n\n\nTHE END\n", "") + chapter + MODERN_TAIL).text
    assert "the price was\nnot published" in text


def test_two_books_in_one_file_are_both_kept() -> None:
    two = VARIANTS["2021"] + "\n\n" + VARIANTS["no space"]
    text = strip(two).text
    assert not OURS.search(text)
    assert text.count("touched the place where the brim") == 2


def test_a_mark_in_the_middle_goes_alone() -> None:
    book = (
        BOOK.replace("THE END", "")
        + "\n\nEnd of the Project Gutenberg EBook of The Ladder, Vol. 1\n\n\n"
        + "VOLUME II\n\n"
        + (PROSE + "\n\n") * 150
    )
    text = strip(MODERN_HEAD + book + MODERN_TAIL).text
    assert not OURS.search(text)
    assert text.count("touched the place") == 151
    assert "VOLUME II" in text


def test_marks_of_the_transcription_go_and_what_they_mark_stays() -> None:
    body = (
        "He cried _No, never_; and paid 4_s._ 6_d._ for it, to Mr. ____ of file_name Lane.\n\n[Illustration]\n\n"
        "[Illustration: THE HAT\n\n[_From a sketch by_ BEARD.]]\n\nThe =third= lamp was out. {Transcriber's note: see note 4.} [Pg 12]So was the\nfourth [Transcriber's note: symbol for Mars] one.\n\n"
        "   *Transcriber's note. This referred to a page of\n    the printed book.\n"
    )
    text = blank_lines(strip(MODERN_HEAD + BOOK + "\n\n" + body + MODERN_TAIL).text)
    assert text.endswith(
        "He cried No, never; and paid 4s. 6d. for it, to Mr. ____ of file_name Lane.\n\nTHE HAT\n\n[From a sketch by BEARD.]\n\n"
        "The third lamp was out. So was the\nfourth one."
    )


def test_a_note_never_takes_the_preface_with_it() -> None:
    near = MODERN_HEAD + "Transcriber's Note: Spelling has been retained.\n\n" + BOOK + MODERN_TAIL
    assert words(strip(near).text) == words(BOOK)


def test_a_long_preface_about_italics_and_spelling_stays() -> None:
    preface = "EDITOR'S NOTE\n\nThe spelling and the punctuation of the original edition are retained, and the italics\nare the author's. Errors of the printed text are corrected in the footnotes.\n\n\n"
    assert words(strip(MODERN_HEAD + preface + BOOK + MODERN_TAIL).text) == words(preface + BOOK)


def test_the_ledger_says_what_was_taken() -> None:
    ledger = Ledger()
    clean_text(VARIANTS["notes at the end"], Rules(), ledger, "ladder.txt")
    assert (
        ledger.counts["gutenberg header"]
        == ledger.counts["gutenberg licence"]
        == ledger.counts["transcriber's note"]
        == 1
    )
    assert ledger.examples["transcriber's note"][0][0] == "ladder.txt"


TALE = "CHAPTER I\n\n" + "\n\n".join(
    f"This is paragraph {number} of the tale, and it says what the others say\nin other words, as tales do."
    for number in range(60)
)
START = "*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\n\n\n"
END = "\n\n\n\n*** END OF THE PROJECT GUTENBERG EBOOK X ***\n\nUpdated editions will replace the previous one.\n"
STARS = "*" * 40

# name: (file, what must stay, what must go)
HOSTILE: dict[str, tuple[str, list[str], list[str]]] = {
    "australia": (
        "Project Gutenberg Australia\n\n\nTitle: X\nAuthor: Y\n* A Project Gutenberg of Australia eBook *\neBook No.:  0200041.txt\nLanguage:   English\n\n"
        "This eBook was produced by: A. Nother another@example.com\n\nProject Gutenberg of Australia eBooks are created from printed editions\n"
        "which are in the public domain in Australia.\n\nTo contact Project Gutenberg of Australia go to http://gutenberg.net.au\n\n\n-------------\n\n"
        "THE TALE\n\nby Y\n\n\n" + TALE + "\n\n\nTHE END\n\n\n\nThis site is full of FREE ebooks - Project Gutenberg Australia\n",
        ["THE TALE", "THE END"], ["eBook", "ebook", "Gutenberg", "copyright"],
    ),
    "bookmarks": (
        START + "Produced by A. Nother\n\n\n\n\nX\n\nBy Y\n\n\n[NOTE: There is a short list of bookmarks, or pointers, at the end of the\nfile for those who may wish.]\n\n\n"
        + TALE + "\n\n\n\nETEXT EDITOR'S BOOKMARKS:\n\nA man of lamps\nOil is dear\n\n\n" + END,
        ["By Y"], ["BOOKMARKS", "Oil is dear", "bookmarks", "Produced"],
    ),
    "note between rules": (
        START + "THE TALE\n\n\n       *       *       *       *       *\n\nTranscriber's Notes:\n\n  Archaic spelling retained.\n  Page 4, \"teh\" changed to \"the\".\n\n"
        "       *       *       *       *       *\n\n\nDEDICATION\n\nTo my spelling-master.\n\n" + TALE + END,
        ["THE TALE", "DEDICATION", "To my spelling-master"], ["Archaic", "changed"],
    ),
    "index after the note": (
        START + TALE + "\n\n\n\nTranscriber's Note\n\nErrors have been corrected.\n\n\n\n\nINDEX\n\nApples, 12\n\nLamps, 40\n" + END,
        ["INDEX", "Lamps, 40"], ["Errors have"],
    ),
    "a play was produced by": (START + "THE PLAY\n\nProduced by Mr. Irving at the Lyceum Theatre, 1880.\n\n" + TALE + END, ["Produced by Mr. Irving"], []),
    "a poem shorter than its small print": (
        "Project Gutenberg's Etext of A Poem by Y\n\nCopyright laws are changing all over the world.\n\n*** START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\n"
        + "Legal etext words of the Project Gutenberg Association.\n" * 200
        + "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n\nA POEM\n\nO lamp,\nO lane!\n\n\nEnd of Project Gutenberg's Etext of A Poem by Y\n",
        ["A POEM", "O lane!"], ["Legal", "End of"],
    ),
    "1991": (
        "The Project Gutenberg Edition of The Tale, by Y\n\n*********This file should be named tale10.txt or tale10.zip*********\n\n"
        "Corrected EDITIONS of our etexts get a new NUMBER, tale11.txt.\n\n(Three Pages)\n****START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START****\n"
        'Why is this "Small Print!" statement here?\n\n****END**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**END****\n\n\nTHE TALE\n\n'
        + TALE + "\n\nThe end of the Project Gutenberg edition of The Tale.\n",
        ["THE TALE"], ["Small Print", "etext", "Gutenberg"],
    ),
    "1992, copyrighted": (
        "**This is a COPYRIGHTED Project Gutenberg Etext, Details Below**\n\n*SMALL PRINT! Ver.03.17.92 for COPYRIGHT PROTECTED ETEXTS*\nTITLE AND COPYRIGHT NOTICE: X\n"
        "This etext is distributed by Professor Hart.\n*END*SMALL PRINT! for COPYRIGHT PROTECTED ETEXTS\n\n\nTHE TALE\n\n" + TALE,
        ["THE TALE"], ["SMALL PRINT", "Hart"],
    ),
    "credits behind the title": (START + "THE TALE\n\nby Y\n\n\nThis etext was prepared by A. B. of Portland\n\n\n" + TALE + END, ["by Y"], ["etext"]),
    "a paragraph about transcribers": (
        START + TALE + "\n\nHe was a transcriber.\nTranscribers noted it well in those days,\nand so did we.\n\nNOTE.--This tale is true.\n\n" + END,
        ["Transcribers noted it", "NOTE.--This tale is true."], [],
    ),
    "french": (
        "Project Gutenberg's Le Conte, by Y\n\nTitle: Le Conte\n\n*** START OF THIS PROJECT GUTENBERG EBOOK LE CONTE ***\n\nNotes du transcripteur: L'orthographe d'origine.\n\n\n\n\n"
        "LE CONTE\n\n" + TALE + "\n\n\nFin de Project Gutenberg's Le Conte, by Y\n" + END,
        ["LE CONTE"], ["transcripteur", "Fin de"],
    ),
    "a box of stars": (START + f"{STARS}\n*                                      *\n* Transcriber's Note: spelling kept.   *\n{STARS}\n\nTHE TALE\n\n" + TALE + END, ["THE TALE"], ["spelling kept", "***"]),
    "an introduction about ebooks": (START + "INTRODUCTION\n\nEbooks are good, and I wanted one.\n\nMy publisher agreed.\n\n" + TALE + END, ["Ebooks are good", "My publisher agreed"], []),
    "a note in brackets, set in": (
        START + "Produced by A. Nother\n\n\n\n\n  [Transcriber's Note:\n\n  Short dashes are kept.\n\n      D - - n\n\n  Braces } hold lines together.]\n\n\n\n\n  THE\n  TALE\n\n" + TALE + END,
        ["  THE\n  TALE"], ["dashes", "D - -", "Braces"],
    ),
    "a bracket about the encoding": (
        START + "[This e-text includes characters that require UTF-8 (Unicode) file\nencoding:\n\n  \u0101 \u0113 (letters with macron)\n\nIf these do not display, use the Latin-1 file.]\n\n\n\n\nTHE TALE\n\n" + TALE + END,
        ["THE TALE"], ["UTF-8", "macron", "Latin-1"],
    ),
    "a note set in under its heading": (
        START + "Transcriber's note:\n\n      The first pages were put in another order.\n\n      The letter x does not occur.\n\n\n\n\n\nTHE TALE\n\nby Y\n\n" + TALE + END,
        ["THE TALE", "by Y"], ["The first pages", "The letter x"],
    ),
    "a preparer's note behind the title": (
        START + "THE TALE\n\nBy Y\n\n\n\nPREPARER'S NOTE\n\n     The text is based on the\n     edition of 1888.\n\n\n\n\nCONTENTS:\n\n     I. THE LANE\n\n" + TALE + END,
        ["By Y", "I. THE LANE"], ["PREPARER", "edition of 1888"],
    ),
    "errata of the transcriber": (
        START + TALE + "\n\n  THE END.\n\n\n       *       *       *       *\n\n\nERRATA (noted by transcriber)\n\nFirst Act:\n  and I-- I'm afraid----\n    _text has comma_\n\nSecond Act:\n  Karl----\n    _no visible hyphen_\n" + END,
        ["THE END."], ["ERRATA", "Karl"],
    ),
    "a table of signs": (
        START + "TRANSCRIBER'S NOTES\n\n\nItalic text is between _underscores_.\n\nFootnotes were renumbered.\n\nAccidentals:\n\n[f++] = F double-sharp\n[a+]  = A sharp\n\nFor example:\n\n[G: d' e']\n\n\n\n\nTHE TALE\n\nBY Y\n\n\n\n\nPREFACE\n\nThe present work.\n\n\n\n" + TALE + END,
        ["THE TALE", "BY Y", "PREFACE", "The present work."], ["Italic", "Accidentals", "sharp", "For example", "[G:"],
    ),
    "a note, then the title close by": (
        START + "TRANSCRIBER'S NOTES\n\nItalic text is between _underscores_.\n\nFootnotes were renumbered.\n\nTHE TALE\n\nBY Y\n\nThe present work is short.\n\n\n\n\n" + TALE + END,
        ["THE TALE", "BY Y", "The present work is short."], ["Italic", "renumbered"],
    ),
    "errata, a rule, and more about the files": (
        START + TALE + "\n\nFINIS.\n\n\n       *       *       *       *\n\nErrors and Inconsistencies (noted by transcriber)\n\nSome spellings are standard.\n\n  Celts  [_final . missing_]\n\n       *       *       *       *\n\n_About the Music_\n\n"
        "It is also given in the text file.\n\n--Open it and scroll down.\n\nThe MIDI files are easy to make on your own computer.\n" + END,
        ["FINIS."], ["noted by", "Celts", "About the Music", "scroll", "MIDI"],
    ),
    "an index close behind the note": (START + TALE + "\n\n\n\nTranscriber's Note\n\nErrors in spelling have been corrected.\n\nINDEX\n\nApples, 12\n\nLamps, 40\n" + END, ["INDEX", "Apples, 12", "Lamps, 40"], ["spelling"]),
    "errata of the author, then a note": (
        START + TALE + "\n\n\n\nERRATA.\n\nPage 3, for lamp read lamps.\n\n\n\n\nTranscriber's Notes\n\nThe errata above were applied by the transcriber.\n" + END,
        ["ERRATA.", "for lamp read lamps"], ["applied by"],
    ),
    "a rule of tildes, quotes of backticks": (START + "THE TALE\n~~~~~~~~\n\n```Tis late,' he said.\n\n" + TALE + END, ["THE TALE", "Tis late"], ["START OF", "Updated editions"]),
    "a header cut down to the title": ("The Tale, by Y\n\n" + START + TALE, [], ["START OF"]),
    "errata of the author": (START + TALE + "\n\n\n\nERRATA.\n\nPage 3, for lamp read lamps.\n" + END, ["ERRATA.", "for lamp read lamps"], []),
    "a wide box, german": (
        START + "+" + "-" * 50 + "+\n|                      Anmerkungen zur Transkription |\n|                                                    |\n| Der Text ist originalgetreu.                       |\n+" + "-" * 50 + "+\n\n\n\n\nDIE LATERNE\n\n" + TALE
        + "\n\n\n\n    [ Im folgenden werden alle ge\u00e4nderten Textzeilen angef\u00fchrt.\n\n      gieng\n      ging\n    ]\n" + END,
        ["DIE LATERNE"], ["originalgetreu", "folgenden", "gieng"],
    ),
    "italian": (
        START + "QUESTO E-BOOK:\n\nTITOLO: La lanterna\n\nDIRITTI D'AUTORE: no\n\nPUBBLICATO DA:\nA. Nother\n\n\n\n\nLA LANTERNA\n\n" + TALE
        + "\n\n\n\n\nNota del Trascrittore\n\nOrtografia e punteggiatura originali sono state mantenute.\n" + END,
        ["LA LANTERNA"], ["TITOLO", "PUBBLICATO", "Trascrittore", "Ortografia"],
    ),
    "spanish": (START + "Nota del transcriptor: la ortograf\u00eda fue conservada.\n\nLA LINTERNA\n\n" + TALE + "\n\nNOTAS:\n\n[1] As\u00ed en el original.\n" + END, ["LA LINTERNA", "NOTAS:", "[1] As\u00ed"], ["transcriptor"]),
    "a letter about the etext": (
        "The Project Gutenberg Etext of The Tale, by Y\n\n*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n\n\n\nExecutive Director's Notes:\n\n"
        "You will see odd words, such as these:\n\n  Who's there?\n\n***\n\nPlease take this into account when looking at this etext.\n\n\n***\n\n\nScanner's Notes: What this is.\n\n"
        "It is as close as I can come.\n\nI wish to make this the best etext possible: somebody@example.com\n\nA. Nother\n\n\nThe Tragedie of the Lamp\n\nActus Primus.\n\n" + TALE + "\n\nEnd of The Project Gutenberg Etext of The Tale\n",
        ["The Tragedie of the Lamp", "Actus Primus."], ["Executive", "odd words", "Who's there", "as close as", "Nother"],
    ),
    "two versions of an etext": (
        START + "This Etext is in German.\n\nWe are releasing two versions of this Etext, one in 7-bit format.\n\nThis book content was graciously contributed by the Gutenberg\nProjekt-DE.\n\n\n\n\nDIE LATERNE\n\n" + TALE + END,
        ["DIE LATERNE"], ["7-bit", "contributed"],
    ),
    "canada": (
        "* A Project Gutenberg Canada Ebook *\n\nThis ebook is made available at no cost and with very few\nrestrictions.\n\nTitle: X\nAuthor: Y, Z (1863-1930)\nDate first posted: 23 May 2012\nProject Gutenberg Canada ebook #949\n\n"
        "This ebook was produced by A. Nother\n\n\n\n\nTHE TALE\n\nby Z Y\n\n" + TALE + "\n\n\nTHE END\n\n\n[End of _The Tale_, by Z Y]\n",
        ["by Z Y", "THE END"], ["[End of", "ebook", "1863"],
    ),
    "lists of several houses": (
        START + TALE + "\n\n\n\n\nPUBLICATIONS OF\n\nTHE LAMP PRESS\n\nFOUNDED 1900\n\n\n\n\nLAMP CLASSICS\n\n\nI. Poems by Oil\n\nWith an introduction. 1914.\n178 pages. Price $1.50\n\nThe public is indebted to it. _Daily Wick._\n\nII. Wicks\n\nA life of them. 1915. Price $2.00\n"
        "\n\n\n\nRECENT PUBLICATIONS.\n\nOIL'S School Physics                  1 20\n\nWICK'S Trees. _Illustrated_           1 00\n\nWICK'S General History 1.20\n\nBooks sent postpaid on receipt of price.\n" + END,
        [], ["PUBLICATIONS", "CLASSICS", "Wicks", "WICK", "postpaid"],
    ),
    "a sale in the last chapter but one": (
        START + TALE + "\n\n\n\nTHE SALE\n\nLot 1. A Bible, octavo, calf, price 2s.\nLot 2. A Herbal, quarto, price 10s.\nLot 3. A Psalter, boards, price 4s.\nLot 4. Sylva.\n\n\n\n\nEPILOGUE\n\nThe boy grew old.\n" + END,
        ["THE SALE", "Lot 3.", "EPILOGUE", "The boy grew old."], [],
    ),
    "somebody copied a manuscript": (
        START + "THE MONK'S BOOK\n\nTRANSCRIBER'S PREFACE\n\nIn the year 1701 I found it in a chest at Ware.\n\nI have altered nothing.\n\n" + TALE + END,
        ["TRANSCRIBER'S PREFACE", "I found it", "altered nothing"], [],
    ),
    "pictures": (START + "[ILLUSTRATION]\n\n[Picture: The lane by night]\n\n" + TALE + END, ["The lane by night"], ["ILLUSTRATION", "Picture"]),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_odd_files_lose_what_is_not_theirs_and_nothing_else(name: str) -> None:
    file, stays, goes = HOSTILE[name]
    text = strip(file).text
    assert [one for one in stays if one not in text] == []
    assert [one for one in goes if one in text] == []
    assert name == "a poem shorter than its small print" or all(
        f"paragraph {number} of" in text for number in range(60)
    )


ABOUT = {
    "a page with a fence": "# Cleaner\n\n```\n*** START OF THIS PROJECT GUTENBERG EBOOK ***\ntext\n*** END OF THIS PROJECT GUTENBERG EBOOK ***\n```\n\nThen cut.\n",
    "a page with a quoted line": "# Libraries\n\nProject Gutenberg was founded in 1971.\n\nLook for such lines:\n\n    *** START OF THE PROJECT GUTENBERG EBOOK X ***\n\nand cut there. Donations are welcome.\n",
    "an essay": "Project Gutenberg's mission, a short account\n\nThe Project Gutenberg eBook collection is in the public domain, and its\nlicense, the small print and donations are told of below.\n\n" + TALE,
}  # fmt: skip


@pytest.mark.parametrize("name", ABOUT)
def test_what_quotes_or_discusses_its_lines_is_left_alone(name: str) -> None:
    assert strip(ABOUT[name]).text == ABOUT[name]


def test_a_last_chapter_about_licences_and_donations_stays() -> None:
    last = '\n\nCHAPTER II\n\nThe licence was granted, and the donations of the parish were counted.\n\n"No refund," said the beadle, "and no warranty." The volunteers laughed.\n'
    assert last.strip() in strip(START + TALE + last + END).text
