"""What an answer takes from its document: copied text, and numbers, dates and names that the document lacks.

Texts are compared word by word, without another model, in time linear in the document. What occurs in the document may
still be used wrongly, and what does not may be right: rounded, computed, translated, or known otherwise.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

# A word, or a character of a script that is written without spaces. Combining marks belong to their letters.
NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = re.compile(rf"[{NO_SPACES}]|(?:[^\W_{NO_SPACES}][\u0300-\u036f]*)+")
# Digits, in groups or with decimals. A space separates groups of three digits only.
NUMBER = re.compile(r"(?:(?<![\w.])\.)?\d+(?:[.,'\u2019\u066b\u066c]\d+|[ \u00a0\u202f\u2009]\d{3}(?!\d))*")
NUMERIC_DATE = re.compile(r"(?<![\d./-])(\d{1,4})([./-])(\d{1,2})\2(\d{1,4})(?![\d/-])")
# Chinese digits and powers of ten, in order of their values.
CJK_DIGITS = dict(zip("〇零一二两兩三四五六七八九", "0012223456789", strict=True))
CJK_POWERS = {"十": 1, "百": 2, "千": 3, "万": 4, "萬": 4, "亿": 8, "億": 8}
CJK_NUMBER = re.compile(rf"[\d{''.join((*CJK_DIGITS, *CJK_POWERS))}]{{1,20}}")
CJK_DATE = re.compile(
    r"([\dX]{4})\s?年\s?([\dX]{1,3})\s?月(?:\s?([\dX]{1,3})\s?日)?".replace("X", f"{''.join(CJK_DIGITS)}十")
)
CLOCK_TIME = re.compile(r"\b([01]?\d|2[0-3])(?:[:h]([0-5]\d)\b|(?:[.:]([0-5]\d))?(?=\s?[ap]\.?m\b))")
FRACTION = re.compile(r"(\d{0,9})\s?([\u00bc-\u00be\u2150-\u215e])")
ROMAN = re.compile(r"(?=[IVX]{2})X{0,3}(?:IX|IV|V?I{0,3})")
# Capitalized words that an acronym may stand for, with small words between them.
CAPITALIZED_WORDS = re.compile(r"\b[A-Z]\w*(?:[ -](?:(?:of|and|the|for|on|in|de|du|des|la|y) )*[A-Z]\w*){1,8}")
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
LIST_NUMBER = re.compile(r"(?:^|\n)[ \t>*_#-]*\(?\Z")
LIST_NUMBER_END = re.compile(r"[.)](?!\w)")
JSON_KEY = re.compile(r'"[^"\n]{0,80}"\s*:')
# Bold words at the beginning of a line or list item: **Next Steps**, - **Budget:**
LABEL = re.compile(r"(?:^|(?<=\n))[ \t]*(?:[-*+\u2022][ \t]+|\(?\d{1,3}[.)][ \t]+)?\*\*[^*\n]{1,120}\*\*")
LINE = re.compile(r"[^\n]+")

# A stretch counts as copied from this weight on: 8 words, or 16 characters of a script without spaces.
COPIED_WEIGHT, WORD_WEIGHT = 16, 2
SEED_WORDS = COPIED_WEIGHT // WORD_WEIGHT
MAX_NUMBER_WORDS = 12
# Places of the document at which one beginning of a stretch is compared; bounds the time for repetitive texts.
MAX_PLACES = 16

TITLES = frozenset("mr mrs ms mx dr prof st mt ft sr jr rev hon gen col capt sgt lt sen rep gov pres mme mlle".split())
# Words of languages that capitalize all nouns (German, Luxembourgish), and of no other large language.
NOUNS_CAPITALIZED = frozenset(
    "und nicht ist eine einen einer einem das für auf werden wird wurde wurden auch sich zur zum über sind von dass "
    "ass vun déi och huet sech gouf fir datt".split()
)


def _numbered(first: int, words: str) -> dict[str, int]:
    return {word: number for number, word in enumerate(words.split(), first)}


UNITS = _numbered(0, "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen")
UNITS |= _numbered(16, "sixteen seventeen eighteen nineteen")
TENS = {word: 10 * tens for word, tens in _numbered(2, "twenty thirty forty fifty sixty seventy eighty ninety").items()}
ORDINALS = _numbered(1, "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth")
ORDINALS |= _numbered(14, "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth")
# Other languages: only words that mean nothing else in a language that capitals or accents do not tell apart.
for _words in (
    "zwei drei vier fünf sechs sieben _ neun zehn _ zwölf",
    "deux trois quatre cinq _ _ huit neuf _ onze douze",
    "_ tres cuatro cinco seis siete ocho nueve diez _ doce",
    "_ tre quattro cinque _ sette _ nove dieci undici dodici",
    "dois três quatro cinco seis sete oito nove dez onze doze",
    "twee drie vier vijf zes zeven acht negen tien _ twaalf",
):
    UNITS |= {word: number for word, number in _numbered(2, _words).items() if word != "_"}
for _words in (
    "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
    "vingt trente quarante cinquante soixante",
    "veinte treinta cuarenta cincuenta sesenta setenta ochenta noventa",
    "_ trenta quaranta cinquanta sessanta settanta ottanta novanta",
    "vinte trinta quarenta cinquenta sessenta setenta oitenta noventa",
    "twintig dertig veertig vijftig zestig zeventig tachtig negentig",
):
    TENS |= {word.casefold(): 10 * tens for word, tens in _numbered(2, _words).items() if word != "_"}
for _unit, _word in enumerate("ein zwei drei vier fünf sechs sieben acht neun".split(), 1):
    UNITS |= {f"{_word}und{ten}": value + _unit for ten, value in TENS.items() if ten.endswith(("zig", "ssig"))}
    UNITS[f"{_word}hundert"] = 100 * _unit
NUMBER_WORDS = {**UNITS, **TENS}
MULTIPLES = {"hundred": 100, "hundert": 100, "dozen": 12}
# Exponents of ten; a billion is 10^9 in some languages, 10^12 in others.
SCALES: dict[str, tuple[int, ...]] = {"hundred": (2,), "k": (3, 0), "m": (6, 0), "b": (9, 0), "billion": (9, 12)}
SCALES |= dict.fromkeys("lakh lakhs".split(), (5,)) | dict.fromkeys("crore crores".split(), (7,))
SCALES |= dict.fromkeys("thousand thousands tausend mille mil mila duizend 千".split(), (3,))
SCALES |= dict.fromkeys(
    "million millions mio mn millionen millón millones milhão milhões milione milioni".split(), (6,)
)
SCALES |= dict.fromkeys("bn mrd milliarde milliarden milliard milliards miliardo miliardi miljard".split(), (9,))
SCALES |= {
    "trillion": (12, 18),
    "trillions": (12, 18),
    "billions": (9, 12),
    "万": (4,),
    "萬": (4,),
    "亿": (8,),
    "億": (8,),
}
SPOKEN_SCALES = frozenset("thousand million billion lakh crore tausend mille mil".split())
AND = frozenset("and et y e".split())
# Only after tens: words that mean something else alone.
AFTER_TENS = {"un": 1, "une": 1, "uno": 1, "um": 1, "uma": 1, "dos": 2, "dix": 10}
CURRENCIES = {"$": ("usd", "us"), "€": ("eur",), "£": ("gbp",), "¥": ("jpy", "cny")}
MONTHS: dict[str, int] = {}
for _words in (
    "january february march april may june july august september october november december",
    "jan feb mar apr _ jun jul aug sep oct nov dec",
    "januar februar märz april mai juni juli august september oktober november dezember",
    "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
    "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre",
    "janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro",
    "januari februari maart april mei juni juli augustus september oktober november december",
):
    MONTHS |= {word: number for word, number in _numbered(1, _words).items() if word != "_"}
MONTHS |= {"sept": 9, "jänner": 1}
OF = frozenset("of de del di do van the".split())

CalendarDate = tuple[int | None, int, int | None]  # year, month, day
Kind = Literal["number", "date", "name"]
Bounds = tuple[int, int]


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


def _normal(word: str) -> str:
    return word.lower() if word.isascii() else unicodedata.normalize("NFKC", word).casefold()


def _unaccented(word: str) -> str:
    return "".join(sign for sign in unicodedata.normalize("NFD", word) if not unicodedata.combining(sign))


def _tokens(text: str) -> list[_Token]:
    return [_Token(*found.span(), _normal(found[0])) for found in WORD.finditer(text)]


class SupportingText:
    """A document, indexed to check answers against it; `other` is text whose words count as known: the question.

    Copied stretches are those of the document only.
    """

    def __init__(self, document: str, other: str = "") -> None:
        self._document = document
        self._words = [_normal(word) for word in WORD.findall(document)]
        known = [*self._words, "\n", *map(_normal, WORD.findall(other))]
        text = f"{document}\n{other}"
        self._known = set(known)
        self._known.update(_normal("".join(filter(str.isalpha, found))) for found in SPELLED.findall(text))
        self._known.update(code for sign, codes in CURRENCIES.items() if sign in text for code in codes)
        for word in set(known):
            if word[:1].isdigit():  # 3GB
                self._known.add(word.lstrip("0123456789"))
            elif not word.isascii():
                self._known |= {bare := _unaccented(word), CYRILLIC_ENDINGS.sub("", bare)}
        for found in CAPITALIZED_WORDS.findall(text):
            initials = "".join(re.findall(r"\b[A-Z]", found)).lower()
            self._known.update(
                initials[at:end] for at in range(len(initials)) for end in range(at + 2, len(initials) + 1)
            )
        self._numbers = set[str]()
        for found in NUMBER.finditer(text):
            readings = _readings(found[0])
            self._numbers |= readings
            self._numbers.update(_plain(part) for part in re.findall(r"\d+", found[0]))
            scale = WORD.match(text, found.end() + text.startswith((" ", "-", "\u00a0", "\u202f"), found.end()))
            if scale is not None and (exponents := SCALES.get(_normal(scale[0]))):
                self._numbers |= {_scaled(one, exponent) for one in readings for exponent in exponents}
        self._numbers |= _word_values(known)
        for found in CJK_NUMBER.finditer(text):
            self._numbers.update(str(_cjk_value(one)) for one in (found[0], *found[0]) if not one.isdecimal())
        self._numbers.update(_roman_value(word) for word in WORD.findall(text) if ROMAN.fullmatch(word))
        for whole, part in FRACTION.findall(text):
            self._numbers.add(f"{int(whole or 0) + unicodedata.numeric(part):g}")
        for found in CLOCK_TIME.finditer(text):
            for hour in {int(found[1]), (int(found[1]) + 12) % 24}:
                minutes = found[2] or found[3] or "00"
                self._numbers |= {str(hour), f"{hour}{minutes}", _decimal(str(hour), minutes)}
        self._dates: set[CalendarDate] = {date for _, dates in _find_dates(text, known) for date in dates}

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

        def add(kind: Kind, bounds: Bounds) -> None:
            found.append(Unsupported(*bounds, kind, answer[slice(*bounds)]))

        for bounds, dates in _find_dates(answer, tokens):
            ignored.append(bounds)
            if not any(map(self._has_date, dates)):
                add("date", bounds)
        numbers = sorted([*_find_numbers(answer), *_find_number_words(tokens)])
        for bounds, values in numbers:
            if not _meets(bounds, ignored):
                ignored.append(bounds)
                if not values & self._numbers:
                    add("number", bounds)
        names = [] if _capitalizes_nouns(tokens) else _find_names(answer, tokens)
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
        word = _normal(name)
        forms = {word, f"{word}s", word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word)}
        forms |= set() if word.isascii() else {bare := _unaccented(word), CYRILLIC_ENDINGS.sub("", bare)}
        if forms & self._known or (ROMAN.fullmatch(name) and _roman_value(name) in self._numbers):
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


def _plain(digits: str) -> str:
    """Write a whole number with ASCII digits, without leading zeros."""
    return str(int(digits)) if len(digits) < 300 else digits


def _decimal(whole: str, fraction: str) -> str:
    fraction = "".join(str(unicodedata.decimal(digit)) for digit in fraction).rstrip("0")
    return f"{_plain(whole)}.{fraction}" if fraction else _plain(whole)


def _readings(number: str) -> set[str]:
    """Return the values that digits can have: 1,234 may be 1234 or 1.234."""
    if number.startswith("."):
        return _readings(number[1:]) | {_decimal("0", number[1:])} if number[1:].isdecimal() else _readings(number[1:])
    first, *parts = re.split(r"\D", number)
    separators = re.findall(r"\D", number)
    if not parts:
        return {_plain(first)}
    found = set[str]()
    if len(set(separators)) == 1 and (len(parts) > 1 or len(parts[0]) == 3):  # groups of digits
        found.add(_plain(first + "".join(parts)))
    if len(parts) == 1 and separators[0] in ".,\u066b":
        found.add(_decimal(first, parts[0]))
    if len(set(separators[:-1])) == 1 and separators[-1] != separators[0]:  # groups, then decimals
        found.add(_decimal(first + "".join(parts[:-1]), parts[-1]))
    return found


def _cjk_value(number: str) -> int:
    """Read Chinese digits, by powers of ten (一百二十三) or one by one (二〇二四)."""
    total, section, digits = 0, 0, ""
    for sign in number:
        power = CJK_POWERS.get(sign, 0)
        if power == 0:
            digits += CJK_DIGITS.get(sign) or str(unicodedata.decimal(sign))
            continue
        if power < 4:
            section += int(digits or 1) * 10**power
        else:
            part = section + int(digits or 0)
            total, section = total + part * 10**power if part else (total or 1) * 10**power, 0
        digits = ""
    return total + section + int(digits or 0)


def _roman_value(number: str) -> str:
    values = [{"I": 1, "V": 5, "X": 10}[sign] for sign in number]
    return str(sum(-one if one < after else one for one, after in zip(values, [*values[1:], 0], strict=True)))


def _scaled(value: str, exponent: int) -> str:
    whole, _, fraction = value.partition(".")
    kept = fraction[exponent:].rstrip("0")
    moved = whole + fraction[:exponent].ljust(exponent, "0")
    return str(int(moved)) + (f".{kept}" if kept else "") if len(moved) < 300 else value


def _find_numbers(text: str) -> Iterator[tuple[Bounds, set[str]]]:
    """Find numbers in digits, with their possible values; not those in words such as H200, and of lists."""
    for found in NUMBER.finditer(text):
        start, stop = found.span()
        before, after = text[max(0, start - 80) : start], text[stop : stop + 2]
        if before[-1:].isalpha() or (LIST_NUMBER_END.match(after) and LIST_NUMBER.search(before)):
            continue
        values = _readings(found[0])
        if re.search(r"\D", found[0]) and max(map(len, re.split(r"\D", found[0])[1:])) > 3:  # a list without spaces
            values |= {_plain(part) for part in re.findall(r"\d+", found[0])}
        if len(found[0]) == 2 and (years := re.search(r"(?<!\d)(\d\d)\d\d[-\u2013/]\Z", before)):  # 1990-95
            values.add(years[1] + found[0])
        elif len(found[0]) == 2 and (before[-1:] in ("'", "\u2019") or after[:1] == "s"):  # the '90s
            values |= {f"19{found[0]}", f"20{found[0]}"}
        scale = WORD.match(text, stop + text.startswith((" ", "-", "\u00a0", "\u202f"), stop))
        if scale is not None and (exponents := SCALES.get(_normal(scale[0]))):
            values = {_scaled(value, exponent) for value in values for exponent in exponents}
            stop = scale.end()
        yield (start, stop), values


def _values_of(words: Sequence[str], at: int) -> Iterator[tuple[str, int]]:
    """Read the number that begins with a word.

    Yields its value, and that of its beginnings, with the place after each; the longest last.
    """
    total, current, room, end = 0, 0, 1000, at  # the next word may be smaller than the room
    for place, word in enumerate(words[at : at + MAX_NUMBER_WORDS], at):
        value = UNITS.get(word, TENS.get(word, AFTER_TENS.get(word) if room in (10, 20) else None))
        if word in ("vingt", "vingts") and current == 4:
            current, room = 80, 20
        elif value is not None and (place == at or 0 < value < room):
            current, room = current + value, (20 if word == "soixante" else 10) if word in TENS else 100 * (value > 99)
        elif word in MULTIPLES and (0 < current < 100 or place == at):
            current, room = MULTIPLES[word] * (current or 1), 100
        elif word in SPOKEN_SCALES and (current or place == at):
            total, current, room = total + (current or 1) * 10 ** SCALES[word][0], 0, 1000
        elif word in AND and room >= 10 and place > at:
            continue
        else:
            break
        end = place + 1
        yield str(total + current), end
    value, after = total + current, words[end : end + MAX_NUMBER_WORDS]
    digits = "".join(str(UNITS[word]) for word in takewhile(lambda word: UNITS.get(word, 10) < 10, after[1:]))
    if after[:1] == ["point"] and digits:
        yield from ((f"{value}.{digits[:count]}", end + 1 + count) for count in range(1, len(digits)))
        spoken, end = f"{value}.{digits}", end + 1 + len(digits)
    elif after[:3] == ["and", "a", "half"]:
        spoken, end = f"{value}.5", end + 3
    elif end > at and words[end - 1] in TENS and ORDINALS.get("".join(after[:1]), 10) < 10:
        spoken, end = str(value + ORDINALS[after[0]]), end + 1
    else:
        return
    yield spoken, end
    if end < len(words) and words[end] in SPOKEN_SCALES:
        yield _scaled(spoken, SCALES[words[end]][0]), end + 1


def _word_values(words: Sequence[str]) -> set[str]:
    """Return the values of all numbers in words, of ordinals, and of digits at the beginning of words."""
    values = set[str]()
    for at, word in enumerate(words):
        if word in NUMBER_WORDS or word in MULTIPLES or word in SPOKEN_SCALES:
            found = list(_values_of(words, at))
            values.update(value for value, _ in found)
            value, end = found[-1]
            if len(value) < 3 and end < len(words) and words[end] in NUMBER_WORDS:  # twelve fifty: 12.50, or 1250
                for other, _ in _values_of(words, end):
                    if len(other) == 2:
                        values |= {_decimal(value, other), value + other}
        elif word in ORDINALS:
            values.add(str(ORDINALS[word]))
    return values


def _find_number_words(tokens: Sequence[_Token]) -> Iterator[tuple[Bounds, set[str]]]:
    """Find numbers in words, but for "one", which is often a pronoun."""
    words, end = [token.word for token in tokens], 0
    for at, token in enumerate(tokens):
        if at >= end and token.word in NUMBER_WORDS:
            *_, (value, end) = _values_of(words, at)
            if token.word != "one" or end > at + 1:
                yield (token.start, tokens[end - 1].stop), {value}


def _find_dates(text: str, tokens: Sequence[_Token] | Sequence[str]) -> Iterator[tuple[Bounds, list[CalendarDate]]]:
    """Find dates with a day or a year, with their possible meanings; without tokens' bounds, these are empty."""
    for found in NUMERIC_DATE.finditer(text):
        first, second, third = found[1], found[3], found[4]
        if len(first) == 4:
            dates = _valid([(first, second, third)])
        else:  # day first, or month first
            dates = _valid([(third, second, first), (third, first, second)])
        if dates:
            yield found.span(), dates
    for found in CJK_DATE.finditer(text):
        year, month, day = (part and str(_cjk_value(part)) for part in found.groups())
        yield found.span(), _valid([(year or "", month or "", day)])
    words = [token if isinstance(token, str) else token.word for token in tokens]
    for at, word in enumerate(words):
        if word not in MONTHS:
            continue
        first, last, day, year = at, at, None, None
        before = at - 1 - (at > 1 and words[at - 1] in OF)
        if before >= 0 and (day := _day(words[before])) is not None:
            first = before
            if before > 0 and words[before - 1] in TENS and words[before] in ORDINALS:
                first, day = before - 1, day + TENS[words[before - 1]]
        elif at + 1 < len(words) and (day := _day(words[at + 1])) is not None:
            last = at + 1
        after = last + 1 + (last + 2 < len(words) and words[last + 1] in OF)
        if after < len(words) and re.fullmatch(r"[12]\d{3}", words[after]):
            last, year = after, int(words[after])
        if day is None and year is None:
            continue
        start, stop = tokens[first], tokens[last]
        bounds = (0, 0) if isinstance(start, str) or isinstance(stop, str) else (start.start, stop.stop)
        yield bounds, [(year, MONTHS[word], day)]


def _day(word: str) -> int | None:
    found = re.fullmatch(r"(\d{1,2})(?:st|nd|rd|th|er|º|ª)?", word)
    day = int(found[1]) if found else ORDINALS.get(word, 0)
    return day if 1 <= day <= 31 else None


def _valid(dates: Iterable[tuple[str, str, str | None]]) -> list[CalendarDate]:
    """Return the possible dates of (year, month, day); a year of two digits can be of two centuries."""
    found = list[CalendarDate]()
    for year, month, day in dates:
        years = [int(year)] if len(year) == 4 else [1900 + int(year), 2000 + int(year)] if len(year) == 2 else []
        if 1 <= int(month) <= 12 and (day is None or 1 <= int(day) <= 31):
            found += [(one, int(month), None if day is None else int(day)) for one in years]
    return found


def _capitalizes_nouns(tokens: Sequence[_Token]) -> bool:
    """Whether a text is in a language in which capitals do not mark names."""
    found = [token.word for token in tokens if token.word in NOUNS_CAPITALIZED]
    return len(set(found)) > 1 and 20 * len(found) > len(tokens)


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
    is_title = before.rstrip().endswith(".") and bool(words) and (len(words[-1]) == 1 or _normal(words[-1]) in TITLES)
    return not is_title
