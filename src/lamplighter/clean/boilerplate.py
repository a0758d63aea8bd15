"""The words by which Project Gutenberg's own lines are known, in all generations of its files: markers, credits, notes, adverts.

In:  a paragraph.
Out: whether it is one of these. Nothing is cut here.

The marker lines are facts of the format: 1990s "Etext" headers with the small print in front, 2001-2004 headers with the
small print at the end, "*** START OF THIS", "***START OF THE", the short form with a number only, and files with no marker
but the last line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_I, _M = re.IGNORECASE, re.MULTILINE

START = re.compile(
    r"[ \t]*\*+[ \t]*START[ \t]+OF[ \t]+(?:THE[ \t]+|THIS[ \t]+|A[ \t]+)?PROJECT[ \t]+GUTENBERG.*$", _I | _M
)
END = re.compile(r"[ \t]*\*+[ \t]*END[ \t]+OF[ \t]+(?:THE[ \t]+|THIS[ \t]+|A[ \t]+)?PROJECT[ \t]+GUTENBERG.*$", _I | _M)
SMALL_PRINT_ENDS = re.compile(r"[ \t]*\*+[ \t]*END[ \t*]*(?:OF[ \t]+)?(?:THE[ \t]+)?SMALL[ \t]+PRINT.*$", _I | _M)
LAST_LINE = re.compile(
    r"[ \t*_]*(?:this is )?(?:the )?end of\s+(?:the |this |these )?(?:\w+ )?project\s+gutenberg"
    r"|[ \t*_]*(?:fin|ende|einde|fine|fim|slut|loppu)\b[^\n]{0,60}\bproje[ck]?t[ -]gutenberg",
    _I | _M,
)
LEGAL = re.compile(
    r"[ \t*]*(?:START: FULL LICENSE|THE FULL PROJECT GUTENBERG LICENSE|PLEASE READ THIS BEFORE YOU DISTRIBUTE"
    r"|Updated editions will replace the previous one|Creating the works from (?:public domain )?print editions"
    r"|This file should be named \S+|START\**THE SMALL PRINT|The Legal Small Print\b"
    r"|Information about Project Gutenberg|(?:All )?Corrected EDITIONS of our e|This and all associated files of various formats"
    r"|Project Gutenberg(?:-tm|™)? (?:eBooks|etexts|e-texts) are (?:often|usually) created|Most people start at our"
    r"|\**Welcome To The World of Free Plain Vanilla"
    r"|Section 1\. +General Terms of Use and Redistributing Project)",
    _I | _M,
)
HEADER = re.compile(
    r"[ \t*_<#\ufeff]*(?:this is )?(?:the |a )?project[ \t]+gutenberg(?:['\u2019]s\b|[ \t,:]+(?:of australia )?(?:\w+ ){0,2}?(?:e-?text|e-?book|edition)|[ \t]+(?:presents|release))",
    _I | _M,
)
TERMS = re.compile(  # what a header says besides its first line; an essay about the project does not
    r"for the use of anyone anywhere|copyright laws are changing|plain vanilla electronic|\[(?:e-?text|e-?book)[ \t]*#"
    r"|^title[ \t]*:[^\n]*\n(?:[^\n]*\n){0,12}?author[ \t]*:|eBook No\.:|(?:almost no|very few)\s+restrictions|small print!",
    _I | _M,
)
_META = re.compile(
    r"^[ \t]*(?:title|author|editor|translator|illustrator|contributor|commentator|release date|posting date|last updated"
    r"|most recently updated|language|character set encoding|edition|credits|subtitle|original publication|date first posted"
    r"|date most recently updated|ebook no\.?|annotator|compiler|other|official release date|first posted)[ \t]*:",
    _I,
)
BOILER = re.compile(
    r"project\s+gutenberg|gutenberg-tm|gutenberg\.(?:org|net|com)|gutenberg (?:literary|license|file|header|volunteers)|\bpgdp\b|distributed\s+proofread"
    r"|\bthis\s+(?:e-?text|e-?book|electronic (?:text|work|edition))\b|\be-?texts?\b|electronic works?\b|\bsmall print\b|michael (?:s\. )?hart|literary archive foundation"
    r"|plain vanilla|\bdonat(?:e|ions?)\b|etext\d\d|tax.?deductible|copyright (?:laws?|notice|status|research|law)|\btrademark|public domain|royalt(?:y|ies)"
    r"|\bdisclaim|\bwarrant(?:y|ies)|\bindemnif|\brefund|\bredistribut|\bproofread|\bdownload|\bemail|e-mail|newsletter|\bwebsite|web (?:site|page)|\bebooks?\b"
    r"|\bftp\b|https?://|www\.|\bvolunteers?\b|check or money order|paragraph 1\.[EF]|\b1\.[A-F](?:\.\d)?\.|defective work|physical medium|machine readable|one hundred million readers",
    _I,
)
OURS = re.compile(  # in the first pages of a book, a paragraph with one of these is not the book's
    r"project\s+gutenberg|gutenberg\.(?:org|net|com)|\bpgdp\b|distributed\s+proofread|proofreading\s+team|proofreaders? (?:europe|canada)"
    r"|\bthis\s+(?:e-?text|e-?book)\s+(?:was|is|has|were|version|edition|file)|\be-?texts?\s+(?:prepared|produced|created|typed|scanned|by|was|edition)"
    r"|images?\s+(?:generously|courtesy|of\s+the\s+original|made\s+available|from\s+the\s+internet)|file\s+was\s+produced\s+from\s+images"
    r"|(?:made|are)\s+available\s+(?:by|at|through|from|on)\s+(?:the\s+)?(?:\w+\s+)?(?:internet\s+archive|archive\.org|hathi|google|https?:|gallica|biblioth)"
    r"|short list of bookmarks, or pointers|see\s+\S*-h\.(?:htm|zip)|\bhttps?://|\bwww\.[a-z]"
    r"|\b(?:utf-?8|unicode|iso-8859|latin-1)\b[^.]{0,120}\b(?:encod|file|fonts?\b|browser|text reader|version)|\bthis\s+(?:e-?text|e-?book)\s+(?:includes?|contains?|uses?|comes?|requires?)\b"
    r"|\b(?:of|in|for)\s+this\s+e-?text\b|gutenberg\W+projekt|projekt\W+gutenberg",
    _I,
)
CREDIT = re.compile(
    r"\A[\s\[({<*_\"'|+=-]*(?:(?:this|the)\s+)?(?:"
    r"(?:project gutenberg\s+)?(?:e-?text|e-?book|electronic\s+(?:text|edition|version)|html\s+(?:file|version|edition)|digital\s+edition|text\s+file|online\s+edition|file)\b[^.\n]{0,60}?\b(?:prepared|produced|created|typed|scanned|transcribed|edited|digiti[sz]ed|compiled|proof|converted|provided|donated|contributed|entered|updated|revised|keyed|made|by)\b"
    r"|e-?text\s*:|credits?\s*:|edition\s+\d+\s+(?:editing|edited|corrected)|transcribed\s+(?:from|by|and)\b|scanned(?:\s+(?:and|by|from|with|using)|,)"
    r"|(?:produced|prepared|digiti[sz]ed|typed|keyed|proofed|proof-?read|ocr(?:'?d|ed)?|html(?:-?ized)?|encoded|converted|formatted|edited for gutenberg|text prepared|text\s+scanned|updated?)\b(?:\s+(?:and|&|,|for|to|from|in|with|etext|html|the|project|gutenberg|electronic|text|edition|scanned|proofread|proofed|typed|corrected|edited|digitized|originally)){0,6}\s+by\b"
    r"|note:\s+(?:project gutenberg|images|the\s+original\s+(?:files|illustrations)|this\s+e|see\s)|an?\s+html\s+version|html\s+version|character\s+set"
    r"|(?:many\s+)?thanks\s+to\s+[^\n]{0,80}(?:proofread|internet archive|pgdp|gutenberg)|with\s+(?:many\s+)?thanks\s+to\s+[^\n]{0,80}(?:proofread|archive)"
    r"|ce\s+document\s+fut\s+pr[ée]sent[ée]|\(?this\s+file\s+was\s+(?:produced|first\s+posted|made)|most recently updated|last updated|\[?last\s+updated?|release\s+date\s*:)",
    _I,
)
_PEOPLE = (
    r"(?:executive\s+director['\u2019]?s|transcribers?|transcribers?['\u2019]s?|transcriber['\u2019]?s['\u2019]?|redactor['\u2019]?s|proofreaders?['\u2019]?s?|producer['\u2019]?s|preparer['\u2019]?s"
    r"|scanner['\u2019]?s|digiti[sz]er['\u2019]?s|typist['\u2019]?s|transcription|transcriptionist['\u2019]?s|pg\s+editor['\u2019]?s|e-?text(?:\s+(?:editor|transcriber|producer)['\u2019]?s)?|e-?book|tr(?:anscriber)?\.)"
)
NOTE = re.compile(
    r"[^\w\n]{0,70}(?:(?:the|a|note\s+by\s+the)\s+)?(?:"
    + _PEOPLE
    + r"\s*(?:end\s*|foot|foot-|general\s+|additional\s+|final\s+)?(?:notes?|comments?|remarks?|amendments?|corrections?|changes|errata|preface|foreword|bookmarks)\b"
    r"|notes?\s+(?:about|on|to|for|regarding|by|of|from|concerning)\s+(?:the|this)\s+(?:e-?text|e-?book|electronic|digital|transcri\w*|online|html|text\s+version|plain.text|project\s+gutenberg)"
    r"|(?:errata|errors?|corrections?|changes|irregularities|misprints)\b[^\[\]\n]{0,40}\b(?:by|of)\s+(?:the\s+)?transcriber\b|errata\b(?=(?:(?!\n{4}|transcriber['\u2019])[^\[\]]){0,300}?\bby\s+(?:the\s+)?transcriber\b)"
    r"|(?:the\s+following\s+)?(?:typographical|typographic|printers?['\u2019]?s?)\s+errors?\s+(?:(?:have|has)\s+been\s+|were\s+)?corrected\b|the\s+following\s+(?:corrections?|changes)\s+(?:have|has|were)\s+(?:been\s+)?made\b[^\n]{0,30}\btext\b"
    r"|(?:anmerkung(?:en)?|bemerkung(?:en)?|hinweise?|notiz(?:en)?)\s+(?:zur|der|des|zum)\s+(?:transkri\w+|elektronischen|textgestalt)"
    r"|(?:notes?|remarques?)\s+(?:(?:de|sur|au\s+sujet\s+de|concernant)\s+(?:la\s+|cette\s+)?transcription|d[ue]s?\s+transcripteurs?|de\s+transcripteur)"
    r"|not[ae]s?\s+(?:del?|do|da|dos|de\s+la|a\s+la|della?|dei|sulla|di)\s*(?:transcri\w+|trascri\w+)|(?:opmerking(?:en)?|noot|noten|aantekening(?:en)?)\s+(?:van|bij|over)\s+de\s+(?:bewerker|transcri\w+)"
    r"|questo\s+e-?book\s*:|trans[ks]?s?kri\w+\s+(?:anm\w+|bem\w+|noter?|huomautu\w+)"
    r")",
    _I | _M,
)
BRACKETED = re.compile(r"[\[{(<][^\w\[\]{}()\n]{0,6}(?:\w{1,12}[.:] ?)?(?:the )?(?:transcribers?['\u2019]?s?['\u2019]?|transcriber['\u2019]s|redactor['\u2019]?s|proofreader['\u2019]?s|e-?text|t\.?n|tr)\.?[ \t\n]*(?:foot)?(?:notes?|comment|correction|[:.])", _I)  # fmt: skip
_NOTEY = re.compile(
    r"transcri|typograph|spelling|spelled|hyphen|punctuat|quotation mark|italic|underscore|\bbold\b|small.?caps|capitali|footnotes?|\bcorrected|\bretained|\bunchanged|original\s+(?:text|book|edition|publication|spelling|page|print|source|scan)"
    r"|printed\s+(?:text|book|edition|version|original|page)|printers?['\u2019]?s?\s+error|printing error|inconsisten|misprint|page\s+(?:number|header|\d)|\bp\. ?\d|\billustrations?|accent|diacritic|ligature|encod|\bascii\b|utf-?8|unicode|latin-1|\bhtml\b|e-?text|e-?book|superscript|subscript|\bcaret"
    r"|changed\s+to|replaced\s+(?:with|by)|added\s+to|removed|omitted|table of contents|cover\s+(?:image|art)|public domain|archaic|obvious|as\s+printed|greek|symbol|macron|breve|sidenote|scanned|silently|text\s+(?:file|version|edition)|\"[^\"\n]+\"\s+(?:to|for)\s+\"|this\s+(?:version|edition|text|book)|line\s+\d"
    r"|transkri|trascri|orthogra|ortogra|rechtschreib|schreibweis|druckfehler|tippfehler|gesperrt|kursiv|korrigiert|schriftart|fraktur|antiqua|zeichensetzung|interpun[ck]t|ponctuation|puntuaci|punteggiatura|pontua"
    r"|\bcorrig|\bconservé|\bcorreg|\bcorrett|zetfout|spelfout|drukfout|spelling|gecorrigeerd|originale?\b|erreurs?\b|errores\b|errori\b|refusi\b|\bitaliques?|cursiva|corsivo|\d\.png",
    _I,
)
ELECTRONIC = re.compile(r"<<\s*THIS ELECTRONIC VERSION OF.{0,1500}?>>", re.S)
_LEGAL_CHARS = 60_000  # no licence is longer
RULE = re.compile(r"\A[\s*=~_+#.o-]+\Z", _I)
ABOUT_FILES = re.compile(
    r"\bmidi\b|\bpdf\b|\bhtml\b|\be-?text|\btext file|\bcomputer\b|project\s+gutenberg|lilypond|transcri", _I
)
ABOUT_ETEXT = re.compile(r"\be-?texts?\b|\bemail me\b|\b[\w.+-]+@[\w-]+\.[\w.-]+\b|project\s+gutenberg", _I)
ADDRESS = re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b")

_SIZE = re.compile(r"\b(?:12mo|8vo|16mo|4to|18mo|24mo|32mo|octavo|duodecimo)\b|\$ ?\.?\d|\b\d+ cents\b|\bpost.?(?:paid|free)\b|\bby mail\b|\b\d+s\. ?(?:\d+d\.)?,? net|\bnet\.? \$|\bprice,? (?:\$|\d|one|two)|[a-z,].*[ .]\.?\d?\.\d\d$|[a-z].*  \d \d\d$", _I)  # fmt: skip
_BOOKISH = re.compile(r"\b(?:12mo|8vo|16mo|4to|18mo|octavo|cloth|gilt|boards|calf|morocco|crown|post.?(?:paid|free)|illustrat(?:ed|ions?)|publishers?|published|pp\.|pages|bound|binding|volumes?|vols?\.|author of|editions?|booksellers?|catalogue|net|price|cents|mailed|fcap|demy)\b|\$ ?\.?\d|\.\d\d$|^ *by [A-Z]", _I | _M)  # fmt: skip
_SELLING = re.compile(r"by the same author|recent publications|just (?:published|printed)|books? (?:by|for|of)\b|works (?:by|of)\b|new (?:books|novels|works|edition)|advertisement|publications? of|list of (?:books|works|publications)|catalogue|library\b|series\b|press notices|opinions of the press|publishers?", _I)  # fmt: skip
NOT_ADVERT = re.compile(r"\A\W*(?:foot)?notes?\b|\A\W*index\b|\A\W*appendix|\A\W*glossary|\A\W*bibliography|\A\W*contents|\A\W*chapter\b|\A\W*errata|\A\W*epilogue", _I)  # fmt: skip


def cases(*needles: str) -> tuple[str, ...]:
    """A word as it may be written, without its first letter where only that differs: two plain searches, no lower-cased copy."""
    return tuple(dict.fromkeys(one for needle in needles for one in (needle[1:], needle[1:].upper())))


NAME = cases("gutenberg")
NAME_OR_PRINT = cases("gutenberg", "small print")


def lines_with(text: str, needles: tuple[str, ...], start: int = 0, end: int | None = None) -> list[int]:
    """Where the lines begin that hold one of these, and the lines before them: a pattern may begin there and go on.

    A plain search for a few words, then a pattern at the lines found: a pattern tried at every line is a hundred times slower.
    """
    found: set[int] = set()
    stop = len(text) if end is None else end
    for needle in needles:
        at = text.find(needle, start, stop)
        while at >= 0:
            line = text.rfind("\n", 0, at) + 1
            found.add(line)
            if line > 1:
                found.add(text.rfind("\n", 0, line - 1) + 1)
            at = text.find(needle, at + len(needle), stop)
    return sorted(found)


def marks(text: str, patterns: tuple[re.Pattern[str], ...], lines: list[int]) -> list[re.Match[str]]:
    """Those of the lines that are one of these, in order."""
    found = [one.match(text, at) for at in lines for one in patterns]
    return [match for match in found if match]


@dataclass(frozen=True)
class Paragraph:
    """Lines between blank ones; `gap` counts the blank lines before it."""

    start: int
    end: int
    gap: int
    text: str


_PARAGRAPH = re.compile(r"[^\n]+(?:\n[^\n]+)*")


def paragraphs(text: str, start: int = 0, end: int | None = None) -> list[Paragraph]:
    found, last = [], start
    for match in _PARAGRAPH.finditer(text, start, len(text) if end is None else end):
        found.append(Paragraph(match.start(), match.end(), max(0, match.start() - last - 1), match.group()))
        last = match.end()
    return found


def is_boiler(text: str) -> bool:
    """Licence, donation, contact and header prose."""
    return bool(BOILER.search(text) or _META.match(text) or HEADER.match(text) or RULE.match(text))


def is_legal(text: str) -> bool:
    """Whether nothing but licence and the like is left: what stands after the last line of a book."""
    if len(text) < 1200:
        return True
    if len(text) > _LEGAL_CHARS:
        return False
    low = text.lower()
    named = low.count("gutenberg") + low.count("etext") + low.count("ebook") + low.count("e-text")
    if named * 400 > len(text):
        return True
    all_of_it = paragraphs(text)
    ours = sum(len(one.text) for one in all_of_it if is_boiler(one.text))
    return ours > 0.6 * sum(len(one.text) for one in all_of_it)


def is_notey(text: str) -> bool:
    """Talk about how a text was transcribed; a long paragraph must say so more than once."""
    wanted = 1 if len(text) < 600 else 2
    return sum(1 for _ in zip(_NOTEY.finditer(text), range(wanted), strict=False)) == wanted


def is_box(text: str) -> bool:
    lines = text.split("\n")
    return len(lines) > 1 and sum(line.lstrip()[:1] in ("|", "+", "*", "#") for line in lines) > 0.8 * len(lines)


def is_advert(section: str, after_one: bool = False) -> bool:
    """A publisher's list: sizes, bindings and prices in many lines; `after_one`: such a list follows, so less will do."""
    lines = [line for line in section.split("\n") if line.strip()]
    selling = bool(_SELLING.search("\n".join(lines[:4])))
    if NOT_ADVERT.match(section) or len(lines) < (2 if after_one and selling else 4):
        return False
    prices = sum(bool(_SIZE.search(line)) for line in lines)
    bookish = sum(bool(_BOOKISH.search(line)) for line in lines)
    if after_one and selling and len(lines) < 12:
        return True  # the title of the lists
    if after_one and prices >= 2 and prices > 0.06 * len(lines):
        return True
    return (prices >= 3 and bookish > 0.2 * len(lines)) or (selling and prices >= 1 and bookish > 0.15 * len(lines))
