"""What an answer takes from its document: copied text, and numbers, dates and names that the document lacks.

Texts are compared word by word, without another model, in time linear in the document. What occurs in the document may
still be used wrongly, and what does not may be right: rounded, computed, translated, or known otherwise.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvr_mpi.documents.numbers import (
    LISTS,
    MONTHS,
    NO_SPACES,
    ROMAN,
    WORD,
    Bounds,
    CalendarDate,
    find_number_words,
    find_numbers,
    find_numeric_dates,
    find_worded_dates,
    known_numbers,
    normal,
    roman_value,
)

# Capitalized words that an acronym of at least three letters may stand for, with small words between them.
CAPITALIZED_WORDS = re.compile(r"\b[A-Z]\w*(?:[ -](?:(?:of|and|the|for|on|in|de|du|des|la|y) )*[A-Z]\w*){2,8}")
LEAST_ACRONYM = 3
CURRENCIES = {"$": ("usd", "us"), "€": ("eur",), "£": ("gbp",), "¥": ("jpy", "cny")}
CYRILLIC_ENDINGS = re.compile("(?<=[а-я]{2})(?:[аеиоуыэюяйь]|[оеы]?[вмх]|[ое]го|[ое]му)+$")
# An acronym that is written with separators: T.V., T_V_
SPELLED = re.compile(r"(?<![^\W_])(?:[^\W\d_][._] ?){2,}[^\W\d_]?(?![^\W_])")
# What precedes the first word of a sentence, of a line or of a quotation.
SENTENCE_START = re.compile(
    r"(?:^|[.!?:;\u2026\u3002\uff01\uff1f\u0964|]|\n)[\s*_#>~`\"'\u201c\u201e\u2018\u00ab(\[{-]*\Z"
)
QUOTED_START = re.compile(r"(?:^|[\s(\[{:,])[*_]*[\"\u201c\u201e\u00ab]\Z")
LIST_ITEM = re.compile(
    r"(?:^|\n)[ \t]*(?:[-*+\u2022\u2013\u2014>#|]+[ \t]*)*[*_]*(?:\(?\d{1,3}[.)\]:][*_]*[ \t]*)?[*_\"\[]*\Z"
)
JSON_KEY = re.compile(r'"[^"\n]{0,80}"\s*:')
# Bold words at the beginning of a line or list item: **Next Steps**, - **Budget:**
LABEL = re.compile(r"(?:^|(?<=\n))[ \t]*(?:[-*+\u2022][ \t]+|\(?\d{1,3}[.)][ \t]+)?\*\*[^*\n]{1,120}\*\*")
LINE = re.compile(r"[^\n]+")

# A stretch counts as copied from this weight on: 8 words, or 16 characters of a script without spaces.
COPIED_WEIGHT, WORD_WEIGHT = 16, 2
SEED_WORDS = COPIED_WEIGHT // WORD_WEIGHT
# Places of the document at which one beginning of a stretch is compared; bounds the time for repetitive texts.
MAX_PLACES = 16

Kind = Literal["number", "date", "name"]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Words of an answer, by their bounds in characters, that do not occur in its document."""

    start: int
    stop: int
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class CopiedText:
    """A stretch of an answer that also stands in its document: bounds in characters, here and there."""

    start: int
    stop: int
    document_start: int
    document_stop: int


@dataclass(frozen=True, slots=True)
class _Token:
    """A word of a text: its bounds, and its normal form."""

    start: int
    stop: int
    word: str


def _unaccented(word: str) -> str:
    return "".join(sign for sign in unicodedata.normalize("NFD", word) if not unicodedata.combining(sign))


def _tokens(text: str) -> list[_Token]:
    return [_Token(*found.span(), normal(found[0])) for found in WORD.finditer(text)]


class SupportingText:
    """A document, indexed to check answers against it; `other` is text whose words count as known: the question.

    Copied stretches are those of the document only.
    """

    def __init__(self, document: str, other: str = "") -> None:
        self._document = document
        self._words = [normal(word) for word in WORD.findall(document)]
        known = [*self._words, "\n", *map(normal, WORD.findall(other))]
        text = f"{document}\n{other}"
        self._known = set(known)
        self._known.update(normal("".join(filter(str.isalpha, found))) for found in SPELLED.findall(text))
        self._known.update(code for sign, codes in CURRENCIES.items() if sign in text for code in codes)
        for word in set(known):
            if word[:1].isdigit():  # 3GB
                self._known.add(word.lstrip("0123456789"))
            elif not word.isascii():
                self._known |= {bare := _unaccented(word), CYRILLIC_ENDINGS.sub("", bare)}
        self._initials = {"".join(re.findall(r"\b[A-Z]", found)) for found in CAPITALIZED_WORDS.findall(text)}
        self._numbers = known_numbers(text, known)
        self._dates: set[CalendarDate] = {date for _, dates in find_numeric_dates(text) for date in dates}
        self._dates.update(date for *_, date in find_worded_dates(known))

    def check(self, answer: str) -> tuple[list[CopiedText], list[Unsupported]]:
        """Return the copied stretches of an answer, and its numbers, dates and names that are not in the text."""
        tokens = _tokens(answer)
        return self._find_copied(tokens), self._find_unsupported(answer, tokens)

    def _find_copied(self, tokens: Sequence[_Token]) -> list[CopiedText]:
        """Find the longest stretches, from the first word of the answer on."""
        answer, document = [token.word for token in tokens], self._words
        seeds = {tuple(answer[at : at + SEED_WORDS]) for at in range(len(answer) - SEED_WORDS + 1)}
        firsts = {seed[0] for seed in seeds}
        places: dict[tuple[str, ...], list[int]] = {}
        for at, word in enumerate(document):
            if word in firsts and (seed := tuple(document[at : at + SEED_WORDS])) in seeds:
                found = places.setdefault(seed, [])
                if len(found) < MAX_PLACES:
                    found.append(at)
        stretches, at = list[tuple[int, int, int]](), 0
        while places and at <= len(answer) - SEED_WORDS:
            length, first = 0, 0
            for place in places.get(tuple(answer[at : at + SEED_WORDS]), ()):
                if (common := _common(answer, at, document, place)) > length:
                    length, first = common, place
            weight = sum(1 if _has_no_spaces(word) else WORD_WEIGHT for word in answer[at : at + length])
            if weight >= COPIED_WEIGHT:
                stretches.append((at, length, first))
                at += length
            else:
                at += 1
        if not stretches:
            return []
        bounds = [found.span() for found in WORD.finditer(self._document)]
        return [
            CopiedText(tokens[at].start, tokens[at + n - 1].stop, bounds[first][0], bounds[first + n - 1][1])
            for at, n, first in stretches
        ]

    def _find_unsupported(self, answer: str, tokens: Sequence[_Token]) -> list[Unsupported]:
        ignored = [found.span() for found in JSON_KEY.finditer(answer)] if answer.lstrip()[:1] in ("{", "[") else []
        found = list[Unsupported]()
        words = [token.word for token in tokens]

        def add(kind: Kind, bounds: Bounds) -> None:
            found.append(Unsupported(*bounds, kind, answer[slice(*bounds)]))

        def bounds_of(first: int, last: int) -> Bounds:
            return tokens[first].start, tokens[last].stop

        worded = [(bounds_of(first, last), [date]) for first, last, date in find_worded_dates(words)]
        for bounds, dates in [*find_numeric_dates(answer), *worded]:
            ignored.append(bounds)
            if not any(map(self._has_date, dates)):
                add("date", bounds)
        spoken = [(bounds_of(first, last), {value}) for first, last, value in find_number_words(words)]
        for bounds, values in sorted([*find_numbers(answer), *spoken]):
            if not _meets(bounds, ignored):
                ignored.append(bounds)
                if not values & self._numbers:
                    add("number", bounds)
        names = [] if _capitalizes_nouns(words) else _find_names(answer, tokens)
        acronyms = [[token] for token in tokens if _is_acronym(answer, token)]
        for name in names or acronyms:
            lacking = [token for token in name if not self._has_name(answer[token.start : token.stop])]
            bounds = (lacking[0].start, lacking[-1].stop) if lacking else (0, 0)
            if lacking and not _meets(bounds, ignored):
                add("name", bounds)
        return sorted(found, key=lambda one: one.start)

    def _has_date(self, date: CalendarDate) -> bool:
        """Whether the text has a date, or one that lacks only its year, with that year elsewhere."""
        year, month, day = date
        for other in self._dates:
            is_day = day is None or other[2] == day
            is_year = year is None or other[0] == year or (other[0] is None and str(year) in self._numbers)
            if is_day and is_year and other[1] == month:
                return True
        return day is None and str(year) in self._numbers and any(MONTHS.get(word) == month for word in self._known)

    def _has_name(self, name: str) -> bool:
        """Whether the text has a word in any case or inflection, without accents, or all the words that it joins."""
        word = normal(name)
        forms = {word, f"{word}s", word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word)}
        forms |= set() if word.isascii() else {bare := _unaccented(word), CYRILLIC_ENDINGS.sub("", bare)}
        if forms & self._known or (ROMAN.fullmatch(name) and roman_value(name) in self._numbers):
            return True
        letters = name.removesuffix("s")
        if len(letters) >= LEAST_ACRONYM and letters.isupper() and any(letters in each for each in self._initials):
            return True
        parts = re.findall(r"[A-Z]+[a-z]*", name)
        return len(parts) > 1 and "".join(parts) == name and {part.lower() for part in parts} <= self._known


def _has_no_spaces(word: str) -> bool:
    return len(word) == 1 and re.match(f"[{NO_SPACES}]", word) is not None


def _common(answer: Sequence[str], at: int, document: Sequence[str], place: int) -> int:
    """Count the words that are the same from two places on."""
    length, most = 0, min(len(answer) - at, len(document) - place)
    while length < most and answer[at + length] == document[place + length]:
        length += 1
    return length


def _meets(bounds: Bounds, others: Iterable[Bounds]) -> bool:
    return any(bounds[0] < stop and start < bounds[1] for start, stop in others)


def _capitalizes_nouns(words: Sequence[str]) -> bool:
    """Whether a text is in a language in which capitals do not mark names."""
    found = [word for word in words if word in LISTS["of_capitalized_nouns"]]
    return len(set(found)) > 1 and 20 * len(found) > len(words)


def _is_acronym(text: str, token: _Token) -> bool:
    """Whether a word has several capitals, or capitals and digits."""
    letters = text[token.start : token.stop]
    capitals = sum(map(str.isupper, letters))
    return capitals > 1 or (capitals == 1 and any(map(str.isdigit, letters)))


def _find_names(text: str, tokens: Sequence[_Token]) -> list[list[_Token]]:
    """Find capitalized words that do not begin a sentence, those that follow each other together."""
    headings = [found.span() for found in LINE.finditer(text) if _is_heading(found[0])]
    headings += [found.span() for found in LABEL.finditer(text)]
    names = list[list[_Token]]()
    capitals = [
        token for token in tokens if text[token.start].isupper() and not _meets((token.start, token.stop), headings)
    ]
    for token in capitals:
        gap = text[names[-1][-1].stop : token.start] if names else ""
        if names and gap in (" ", "-", "\u2010", "\u2011", ". ", "\u00a0") and not _begins_sentence(text, token):
            names[-1].append(token)
        else:
            names.append([token])
    found = list[list[_Token]]()
    for name in names:
        is_first = _begins_sentence(text, name[0])
        kept = [
            token
            for token in (name[1:] if is_first and not _is_acronym(text, name[0]) else name)
            if len(token.word) > 1
        ]
        if kept:
            found.append(kept)
    return found


def _is_heading(line: str) -> bool:
    """Whether a line is a heading, in which any word may have a capital."""
    return line.lstrip().startswith("#") or (line.isupper() and " " in line.strip())


def _begins_sentence(text: str, token: _Token) -> bool:
    before = text[max(0, token.start - 80) : token.start]
    if LIST_ITEM.search(before) or QUOTED_START.search(before):
        return True
    if not SENTENCE_START.search(before):
        return False
    words = WORD.findall(before)
    is_title = (
        before.rstrip().endswith(".") and bool(words) and (len(words[-1]) == 1 or normal(words[-1]) in LISTS["titles"])
    )
    return not is_title
