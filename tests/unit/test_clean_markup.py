"""TEI, ALTO and HTML, made up: words without lost or added blanks, in reading order; faults with their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamplighter.clean.markup import BadMarkup, read_html, read_xml

TRIALS = b"""<?xml version="1.0" encoding="UTF-8"?>
<TEI.2><teiHeader><title>Invented Sessions</title><note>not text</note></teiHeader>
   <text>
      <body>
         <div0 type="sessionsPaper" id="s1">
            <interp inst="s1" type="year" value="1818"/>
            <div1 type="frontMatter" id="f1"><p>THE WHOLE PROCEEDINGS</p></div1>
            <div1 type="trialAccount" id="t1">
               <interp inst="t1" type="uri" value="x"/>
               <p>1. <persName id="p1">
                     JOHN
                     LAMP
                  <interp inst="p1" type="surname" value="LAMP"/>
                  </persName>
               , Knt. was indicted for <rs id="o"><interp inst="o"/>stealing</rs> <hi rend="italic">a hat</hi>, value 2s., &amp; pleaded<hi>GUILTY</hi>.</p>
               <p>I saw him in the morn<lb/>ing with Steal<lb/>whilst he ran; he had left in
                  the morning to steal. Steal not, whilst I look.</p>
            </div1>
            <div1 type="trialAccount" id="t2"><head>The second</head><p>2. JANE POST, caf&eacute;.</p><lg><l>One line,</l><l>two lines.</l></lg></div1>
         </div0>
      </body>
   </text>
</TEI.2>"""  # fmt: skip


def test_each_trial_is_a_document_and_its_blanks_are_its_own() -> None:
    front, one, two = read_xml(TRIALS, "auto")
    assert (front.part, one.part, two.part) == ("f1", "t1", "t2")
    assert one.text == (
        "1. JOHN LAMP, Knt. was indicted for stealing a hat, value 2s., & pleadedGUILTY.\n\n"
        "I saw him in the morning with Steal whilst he ran; he had left in the morning to steal. Steal not, whilst I look."
    )
    assert two.text == "The second\n\n2. JANE POST, caf\u00e9.\n\nOne line,\ntwo lines."
    assert one.extra == {"title": "Invented Sessions", "type": "trialAccount"}
    assert two.extra["title"] == "The second"


def test_a_file_can_be_one_document() -> None:
    (whole,) = read_xml(TRIALS, "file")
    assert whole.text.startswith("THE WHOLE PROCEEDINGS\n\n1. JOHN LAMP, Knt.")
    assert "not text" not in whole.text


def test_the_chapters_of_a_novel_stay_together() -> None:
    novel = b'<TEI xmlns="http://www.tei-c.org/ns/1.0"><text><body><div type="chapter"><head>I</head><p>One.</p></div><div type="chapter"><p>Two <choice><sic>thier</sic><corr>their</corr></choice>.</p></div></body></text></TEI>'
    (whole,) = read_xml(novel, "auto")
    assert whole.text == "I\n\nOne.\n\nTwo thier."
    assert len(read_xml(novel, "div")) == 2


def line(left: int, wide: int, *words: str) -> str:
    strings = "<SP/>".join(word if word.startswith("<") else f'<String CONTENT="{word}"/>' for word in words)
    return f'<TextLine HPOS="{left}" WIDTH="{wide}">{strings}</TextLine>'


def test_a_page_of_ocr_is_read_by_its_blocks_and_lines() -> None:
    page = (
        '<alto xmlns="http://www.loc.gov/standards/alto/ns-v2#"><Layout><Page ID="P1"><PrintSpace>'
        '<TextBlock ID="B1">'
        + line(
            30,
            470,
            "The",
            "lamp",
            "was",
            '<String CONTENT="Prelee" SUBS_TYPE="HypPart1" SUBS_CONTENT="Preleetions"/><HYP CONTENT="-"/>',
        )
        + line(
            0,
            500,
            '<String CONTENT="tions" SUBS_TYPE="HypPart2" SUBS_CONTENT="Preleetions"/>',
            "and",
            "then",
            "some",
            "more",
        )
        + line(0, 200, "the", "end.")
        + line(30, 470, "A", "new", '<String CONTENT="&quot;one&quot;"/><String CONTENT=","/>', "para")
        + "</TextBlock>"
        '<TextBlock ID="B2">' + line(0, 500, "Second", "block") + "</TextBlock></PrintSpace></Page></Layout></alto>"
    )
    (found,) = read_xml(page.encode(), "auto")
    assert found.text == 'The lamp was Preleetions and then some more the end.\nA new "one", para\n\nSecond block'
    assert found.part == "P1"


def test_blocks_follow_the_stated_order_and_strings_without_spaces_are_words() -> None:
    page = (
        '<alto><ReadingOrder><OrderedGroup><ElementRef REF="B2"/><ElementRef REF="B1"/></OrderedGroup></ReadingOrder><Layout><Page>'
        '<TextBlock ID="B1"><TextLine HPOS="0" WIDTH="9"><String CONTENT="last"/><String CONTENT="words"/></TextLine></TextBlock>'
        '<TextBlock ID="B2"><TextLine HPOS="0" WIDTH="9"><String CONTENT="first"/></TextLine></TextBlock></Page></Layout></alto>'
    )
    assert read_xml(page.encode(), "auto")[0].text == "first\n\nlast words"


@pytest.mark.parametrize(
    ("data", "reason", "place"),
    [
        (b"<TEI.2>\n<text><p>one</q></text></TEI.2>", "bad_xml", (2, 15)),
        (b"<alto><Page>", "bad_xml", (1, 13)),
        (b'<mets:mets xmlns:mets="x"/>', "mets", (0, 0)),
        (b"<rss><item/></rss>", "unknown_xml", (0, 0)),
    ],
)
def test_faults_have_a_reason_and_a_place(data: bytes, reason: str, place: tuple[int, int]) -> None:
    with pytest.raises(BadMarkup) as caught:
        read_xml(data, "auto")
    assert caught.value.reason == reason
    assert (caught.value.line, caught.value.column) == place


def test_nothing_outside_the_file_is_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("SECRET WORDS")
    data = f'<!DOCTYPE TEI.2 SYSTEM "file://{tmp_path}/x.dtd" [<!ENTITY s SYSTEM "file://{secret}">]><TEI.2><text><p>A &s; B</p></text></TEI.2>'
    assert "SECRET" not in read_xml(data.encode(), "auto")[0].text


def test_entities_that_grow_without_end_are_refused() -> None:
    levels = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 12))
    data = f'<!DOCTYPE TEI.2 [<!ENTITY e0 "lamplamplamplamp">{levels}]><TEI.2><text><p>&e11;</p></text></TEI.2>'
    with pytest.raises(BadMarkup) as caught:
        read_xml(data.encode(), "auto")
    assert caught.value.reason == "bad_xml"


def test_a_page_of_html_as_a_reader_sees_it() -> None:
    page = """<!DOCTYPE html><html><head><title>The  Lamp &amp; Co</title><style>p { a > b }</style></head><body>
    <nav><a href="/">Home</a></nav><h1>The Lamp</h1><p>One <b>bold</b>word, caf&eacute;&nbsp;&#8212; and <a title="a > b" href='x'>a
    link</a>.<br>Next line</p><script>if (a < b) { alert("<p>no</p>") }</script><ul><li>first<li>second</ul>
    <!-- <p>hidden</p> --><pre>keep
  this</pre><table><tr><td>a</td><td>b</td></tr></table>2 < 3 & 4<footer>(c)</footer></body></html>"""
    found = read_html(page)
    assert found.extra == {"title": "The Lamp & Co"}
    assert found.text == (
        "The Lamp\n\nOne boldword, caf\u00e9\u00a0\u2014 and a link.\nNext line\n\nfirst\nsecond\n\nkeep\n  this\n\na b\n\n2 < 3 & 4"
    )
