"""Answers compared with documents: copied text, and numbers, dates and names that a document lacks."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvr_mpi.documents.support import SupportingText

pytestmark = pytest.mark.quick

PHRASE = "one of the boats had left the quiet harbour before anybody saw it"
# Words from all that the rules know, and separators between which numbers and dates can arise.
WORD = st.one_of(
    st.sampled_from(
        "May 5 5th 2024 1,234 1.234,5 twenty two hundred and million k % 5/6/2024 T_V_ Mr. O'Neil I".split()
    ),
    st.sampled_from(
        ["März", "三", "٣", "ﬁ", "İ", "e\u0301", "ß", "²", "Ⅳ", "😀", "ไทย", '"', "**", "#", "{", "\n- 1. "]
    ),
    st.text(max_size=6),
)
TEXT = st.lists(WORD, max_size=40).flatmap(
    lambda words: st.lists(
        st.sampled_from([" ", "\n", ". ", "", "-", ", "]), min_size=len(words), max_size=len(words)
    ).map(lambda gaps: "".join(word + gap for word, gap in zip(words, gaps, strict=True)))
)


def lacking(document: str, answer: str, other: str = "") -> list[str]:
    """Words of the answer that are not in the document, in order; also check their bounds."""
    _, found = SupportingText(document, other).check(answer)
    assert [answer[one.start : one.stop] for one in found] == [one.text for one in found]
    return [one.text for one in found]


@pytest.mark.parametrize(
    ("document", "same", "other"),
    [
        (
            "It cost 1,234 euros.",
            ["1234", "1 234", "1\u202f234", "1.234", "1'234", "1,234.00", "\uff11\uff12\uff13\uff14"],
            ["1235", "12.34"],
        ),
        ("It cost 1.234,50 euros.", ["1234.5", "1,234.50", "1 234,5"], ["1234", "123.45"]),
        ("It rose by 3 %.", ["3%", "3 percent", "three percent", "3.0 %"], ["4 %", "3.1 %", "30 %"]),
        ("There were three boats.", ["3", "three"], ["4", "four", "thirty"]),
        ("It has twenty-five rooms.", ["25", "twenty five"], ["24", "twenty-six"]),
        ("About 1.5 million people.", ["1,500,000", "1500000", "1.5M"], ["15 million", "1.5 billion"]),
        ("Two hundred and fifty thousand.", ["250,000", "250k"], ["250 million", "251 000"]),
        ("Es sind zwölf Boote.", ["12"], ["13"]),
        ("那里有三艘船。", ["3"], ["4"]),
        ("The GPT-4 model.", ["4"], ["5"]),
        ("5 lakh people, 2 crore rupees", ["500,000", "5,00,000", "20 million", "five lakh"], ["50,000"]),
        ("共有一百二十三人，二〇二四年三千五百元，3億5000万円", ["123", "3,500", "2024", "350,000,000"], ["124", "20"]),
        ("We meet at 3:30 pm and at 17:45.", ["15:30", "3.30 pm", "15h30", "5:45 p.m.", "17.45"], ["16"]),
        ("It takes ½ cup and 2½ hours, or .25", ["0.5", "2.5", "0.25", ".5"], ["2.25"]),
        ("World War II, Chapter XIV", ["2", "14"], ["3"]),
        ("A hundred boats, two dozen men, a million euros", ["100", "24", "1,000,000", "1 million"], ["1,000"]),
        ("two point five, one and a half million", ["2.5", "1.5 million", "1,500,000"], ["1.25"]),
        ("it was nineteen eighty-four", ["1984"], ["1985"]),
        ("the 21st, in 1990 to 1995", ["twenty-first", "1990-95", "the '90s"], ["1990-94", "twenty-second"]),
        ("Es sind einundzwanzig und zweihundert.", ["21", "200"], ["20", "2"]),
        ("quatre-vingt-dix et vingt et un, treinta y dos", ["90", "21", "32"], ["91"]),
        ("90, 21, 32", ["quatre-vingt-dix", "vingt et un", "treinta y dos", "zweiunddreißig"], ["dreiunddreißig"]),
    ],
)  # fmt: skip
def test_numbers_in_any_format(document: str, same: list[str], other: list[str]) -> None:
    for number in same:
        assert lacking(document, f"it is {number} today") == [], number
    for number in other:
        (found,) = lacking(document, f"it is {number} today")
        assert found in number, number


def test_numbers_of_lists_are_not_claims() -> None:
    assert lacking("Boats.", "1. boats\n2) more boats\n**3.** boats") == []
    assert lacking("Boats.", "1. 7 boats\n2) 8 more boats") == ["7", "8"]


@pytest.mark.parametrize(
    ("document", "same", "other"),
    [
        (
            "On January 5, 2024, it began.",
            ["5 January 2024", "5th of January", "Jan. 5, 2024", "2024-01-05", "05/01/2024", "1/5/24", "5.1.2024",
             "am 5. Januar 2024", "le 5 janvier 2024", "5 de enero de 2024", "January 2024", "2024年1月5日"],
            ["6 January 2024", "2024-01-06", "January 5, 2023", "5 February", "February 2024", "05/02/2024"],
        ),
        ("二〇二四年五月三日", ["3 May 2024", "2024年5月3日"], ["2024-05-04", "二〇二四年五月四日"]),
        ("It began on 2024-03-31.", ["March 31st, 2024", "31 March"], ["30 March", "March 2023"]),
        ("In 2024 we met on the twenty-first of May.", ["21 May 2024", "May 21"], ["22 May", "May 21, 2023"]),
    ],
)  # fmt: skip
def test_dates_in_any_format(document: str, same: list[str], other: list[str]) -> None:
    for date in same:
        assert lacking(document, f"it was {date}") == [], date
    for date in other:
        _, (found,) = SupportingText(document).check(f"it was {date}")
        assert (found.text, found.kind) == (date, "date")


@pytest.mark.parametrize(
    ("document", "answer", "names"),
    [
        ("Smith saw it.", "The boat of Smith's friend Jones, and of Mary-Ann Lee.", ["Jones", "Mary-Ann Lee"]),
        ("Smith saw it.", "Overall it was seen. However, Boston saw it. (Nobody did.)", ["Boston"]),
        ("Smith saw it.", "We met Dr. Jones and J. Doe.", ["Dr. Jones", "Doe"]),
        ("the project manager and the T_V_ remotes", "A Project Manager, TV, T.V. and TVs, and USB", ["USB"]),
        ("an American with PowerPoint", "the Americans with Power and Powerpoint", ["Power"]),
        ("x", "# Key Points\n**Main Decisions:**\nMEETING NOTES\n- Boats\n1. **Boats** of Paris", ["Paris"]),
        ("x", "They said: \"Great!\" and «Formidable»", []),
        ("Müller kam.", "die Besprechung mit Müller und Meier ist kurz, das wird auch der BND sagen", ["BND"]),
        ("Ångström", "about A\u030angstro\u0308m and ÅNGSTRÖM", []),
        ("иван", "это сказал Иван, а не Пётр", ["Пётр"]),
        ("x", '{"Name": "x", "City": "in Paris"}', ["Paris"]),
        ("Zoë, François and İstanbul; Sao Paulo", "with Zoe, Francois, Istanbul, São Paulo and Zürich", ["Zürich"]),
        ("Иван Петров и Мария в Москве", "о Марии, с Иваном Петровым и Марком, Москва", ["Марком"]),
        ("the World Health Organization has 3GB for $5", "the WHO has 3 GB for US$5 or 5 USD, as NATO", ["NATO"]),
        ("Chapter 4", "see Chapter IV and VI", ["VI"]),
        # Initials count as an acronym if the words are neighbors, and there are at least three.
        ("The Uniform Standards Board. Annual Notice.", "the USB of the US and Ann, and SBM", ["US", "Ann", "SBM"]),
    ],
)  # fmt: skip
def test_names_are_capitalized_words_that_begin_no_sentence(document: str, answer: str, names: list[str]) -> None:
    assert lacking(document, answer) == names


def test_words_of_the_question_count_as_known() -> None:
    assert lacking("Boats.", "It was not Smith, nor Jones in 1999.", "Was it Smith in 1999?") == ["Jones"]


@pytest.mark.parametrize("space", [" ", "\n", ", ", " \u2013 "])
def test_copied_text_is_found_where_it_stands(space: str) -> None:
    document = f"Hardly {'😀 é ' * 9}{PHRASE}. Then {PHRASE} again and again."
    answer = f"He thinks {space.join(PHRASE.upper().split())} again. Or not."
    (copied,), _ = SupportingText(document).check(answer)
    assert answer[copied.start : copied.stop] == f"{space.join(PHRASE.upper().split())} again"
    assert document[copied.document_start : copied.document_stop] == f"{PHRASE} again"  # the longest
    short = " ".join(PHRASE.split()[:7])
    assert SupportingText(document).check(f"so {short}, indeed")[0] == []
    characters = "昨天早上三艘船离开了安静的港口没有人看见"
    (copied,), _ = SupportingText(f"他说{characters}。").check(f"据称{characters}吗")
    assert (copied.start, copied.stop, copied.document_start) == (2, 2 + len(characters), 2)


@given(TEXT)
@example("1 234 567,8 km in May 5 2024 and two hundred and")
@settings(max_examples=150, deadline=None)
def test_a_document_supports_itself(text: str) -> None:
    copied, unsupported = SupportingText(text).check(text)
    assert unsupported == []
    for one in copied:
        words = [
            [unicodedata.normalize("NFKC", word).casefold() for word in re.findall(r"\w+", part)]
            for part in (text[one.start : one.stop], text[one.document_start : one.document_stop])
        ]
        assert words[0] == words[1]


@given(TEXT, TEXT)
@settings(max_examples=150, deadline=None)
def test_bounds_are_in_order_and_apart(document: str, answer: str) -> None:
    copied, unsupported = SupportingText(document).check(answer)
    for found in (copied, unsupported):
        bounds = [place for one in found for place in (one.start, one.stop)]
        assert bounds == sorted(bounds) and (not bounds or bounds[-1] <= len(answer))
    assert all(answer[one.start : one.stop] == one.text for one in unsupported)
