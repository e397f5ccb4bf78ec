"""Numbers and dates in texts: in digits or words, in the formats and words of several languages.

A number is a text such as ``1234.5``; digits that can be read in several ways have several values. ``data/words.toml``
has the words.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from itertools import takewhile

CalendarDate = tuple[int | None, int, int | None]  # year, month, day
Bounds = tuple[int, int]

# A word, or a character of a script that is written without spaces. Combining marks belong to their letters.
NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = re.compile(rf"[{NO_SPACES}]|(?:[^\W_{NO_SPACES}][\u0300-\u036f]*)+")
# Digits, in groups or with decimals. A space separates groups of three digits only.
NUMBER = re.compile(r"(?:(?<![\w.])\.)?\d+(?:[.,'\u2019\u066b\u066c]\d+|[ \u00a0\u202f\u2009]\d{3}(?!\d))*")
BEFORE_SCALE = (" ", "-", "\u00a0", "\u202f")
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
LIST_NUMBER = re.compile(r"(?:^|\n)[ \t>*_#-]*\(?\Z")
LIST_NUMBER_END = re.compile(r"[.)](?!\w)")
MAX_NUMBER_WORDS = 12


def normal(word: str) -> str:
    """Return the form of a word in which words are compared."""
    return word.lower() if word.isascii() else unicodedata.normalize("NFKC", word).casefold()


_DATA = tomllib.loads((files("kvr_mpi.documents") / "data" / "words.toml").read_text(encoding="utf-8"))


def _numbered(lines: Iterable[str], first: int, step: int = 1) -> dict[str, int]:
    """Return the words of lines, with their numbers from `first` on."""
    found = ((word, first + step * at) for line in lines for at, word in enumerate(line.split()))
    return {normal(word): number for word, number in found if word != "_"}


LANGUAGES = list(_DATA["languages"].values())
LISTS = {name: frozenset(words.split()) for name, words in _DATA["lists"].items()}
UNITS = _numbered((language["units"] for language in LANGUAGES), 0)
TENS = _numbered((language["tens"] for language in LANGUAGES), 20, 10)
ORDINALS = _numbered((language.get("ordinals", "") for language in LANGUAGES), 1)
MONTHS = _numbered((line for language in LANGUAGES for line in language["months"]), 1)
for _unit, _word in enumerate("ein zwei drei vier fünf sechs sieben acht neun".split(), 1):  # of German compounds
    UNITS |= {f"{_word}und{ten}": value + _unit for ten, value in TENS.items() if ten.endswith(("zig", "ssig"))}
    UNITS[f"{_word}hundert"] = 100 * _unit
AFTER_TENS = {word: int(value) for value, words in _DATA["after_tens"].items() for word in words.split()}
MULTIPLES = {word: int(value) for value, words in _DATA["multiples"].items() for word in words.split()}
SCALES = {normal(word): tuple(scale["exponents"]) for scale in _DATA["scales"] for word in scale["words"].split()}
NUMBER_WORDS = {**UNITS, **TENS}


def known_numbers(text: str, words: Sequence[str]) -> set[str]:
    """Return the values of all numbers in a text, in every way in which they can be read; `words` are its words."""
    found = _word_values(words)
    for number in NUMBER.finditer(text):
        values = _readings(number[0])
        found |= values | {_plain(part) for part in re.findall(r"\d+", number[0])} | _scaled_values(number, values)[0]
    for number in CJK_NUMBER.finditer(text):
        found.update(str(_cjk_value(one)) for one in (number[0], *number[0]) if not one.isdecimal())
    found.update(roman_value(word) for word in WORD.findall(text) if ROMAN.fullmatch(word))
    for whole, part in FRACTION.findall(text):
        found.add(f"{int(whole or 0) + unicodedata.numeric(part):g}")
    for number in CLOCK_TIME.finditer(text):
        minutes = number[2] or number[3] or "00"
        for hour in {int(number[1]), (int(number[1]) + 12) % 24}:
            found |= {str(hour), f"{hour}{minutes}", _decimal(str(hour), minutes)}
    return found


def find_numbers(text: str) -> Iterator[tuple[Bounds, set[str]]]:
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
        scaled, scale_stop = _scaled_values(found, values)
        yield (start, scale_stop), scaled or values


def find_number_words(words: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Find numbers in words, but for "one", which is often a pronoun: the first and the last word, and the value."""
    end = 0
    for at, word in enumerate(words):
        if at >= end and word in NUMBER_WORDS:
            *_, (value, end) = _spoken(words, at)
            if word != "one" or end > at + 1:
                yield at, end - 1, value


def find_numeric_dates(text: str) -> Iterator[tuple[Bounds, list[CalendarDate]]]:
    """Find dates in digits, with their possible meanings."""
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


def find_worded_dates(words: Sequence[str]) -> Iterator[tuple[int, int, CalendarDate]]:
    """Find dates with the name of a month, and a day or a year: the first and the last word, and the date."""
    for at, word in enumerate(words):
        if word not in MONTHS:
            continue
        first, last, day, year = at, at, None, None
        before = at - 1 - (at > 1 and words[at - 1] in LISTS["of"])
        if before >= 0 and (day := _day(words[before])) is not None:
            first = before
            if before > 0 and words[before - 1] in TENS and words[before] in ORDINALS:
                first, day = before - 1, day + TENS[words[before - 1]]
        elif at + 1 < len(words) and (day := _day(words[at + 1])) is not None:
            last = at + 1
        after = last + 1 + (last + 2 < len(words) and words[last + 1] in LISTS["of"])
        if after < len(words) and re.fullmatch(r"[12]\d{3}", words[after]):
            last, year = after, int(words[after])
        if day is not None or year is not None:
            yield first, last, (year, MONTHS[word], day)


def roman_value(number: str) -> str:
    """Return the value of a roman number."""
    values = [{"I": 1, "V": 5, "X": 10}[sign] for sign in number]
    return str(sum(-one if one < after else one for one, after in zip(values, [*values[1:], 0], strict=True)))


def _spoken(words: Sequence[str], at: int) -> Iterator[tuple[str, int]]:
    """Read the number that begins with a word.

    Yields its value, and that of its beginnings, with the place after each; the longest last.
    """
    value, end = 0, at
    for value, end in _whole(words, at):
        yield str(value), end
    after = words[end : end + MAX_NUMBER_WORDS]
    digits = "".join(str(UNITS[word]) for word in takewhile(lambda word: UNITS.get(word, 10) < 10, after[1:]))
    if after[:1] == ["point"] and digits:
        yield from ((f"{value}.{digits[:count]}", end + 1 + count) for count in range(1, len(digits)))
        spoken, end = f"{value}.{digits}", end + 1 + len(digits)
    elif after[:3] == ["and", "a", "half"]:
        spoken, end = f"{value}.5", end + 3
    elif end > at and words[end - 1] in TENS and after and ORDINALS.get(after[0], 10) < 10:
        spoken, end = str(value + ORDINALS[after[0]]), end + 1
    else:
        return
    yield spoken, end
    if end < len(words) and words[end] in LISTS["spoken_scales"]:
        yield _scaled(spoken, SCALES[words[end]][0]), end + 1


def _whole(words: Sequence[str], at: int) -> Iterator[tuple[int, int]]:
    """Read a whole number: groups below a thousand, each with its scale; as `_spoken`.

    A word is added to its group if it is smaller than the room that the words before it leave.
    """
    total, group, room = 0, 0, 1000
    for place, word in enumerate(words[at : at + MAX_NUMBER_WORDS], at):
        is_first = place == at
        own = NUMBER_WORDS.get(word, AFTER_TENS.get(word, 0) if room in (10, 20) else 0)
        if word in ("vingt", "vingts") and group == 4:
            group, room = 80, 20
        elif (is_first and word in NUMBER_WORDS) or 0 < own < room:
            group += own
            room = (20 if word == "soixante" else 10) if word in TENS else 100 if own > 99 else 0
        elif word in MULTIPLES and (is_first or 0 < group < 100):
            group, room = MULTIPLES[word] * (group or 1), 100
        elif word in LISTS["spoken_scales"] and (is_first or group):
            total, group, room = total + (group or 1) * 10 ** SCALES[word][0], 0, 1000
        elif word in LISTS["and"] and room >= 10 and not is_first:
            continue
        else:
            return
        yield total + group, place + 1


def _word_values(words: Sequence[str]) -> set[str]:
    """Return the values of all numbers in words, and of ordinals."""
    values = set[str]()
    for at, word in enumerate(words):
        if word in NUMBER_WORDS or word in MULTIPLES or word in LISTS["spoken_scales"]:
            found = list(_spoken(words, at))
            values.update(value for value, _ in found)
            value, end = found[-1]
            if len(value) < 3 and end < len(words) and words[end] in NUMBER_WORDS:  # twelve fifty: 12.50, or 1250
                tens = [other for other, _ in _spoken(words, end) if len(other) == 2]
                values.update(each for other in tens for each in (_decimal(value, other), value + other))
        elif word in ORDINALS:
            values.add(str(ORDINALS[word]))
    return values


def _scaled_values(number: re.Match[str], values: set[str]) -> tuple[set[str], int]:
    """Return the values of a number with the scale that follows it, none without one; and where both end."""
    text, stop = number.string, number.end()
    scale = WORD.match(text, stop + text.startswith(BEFORE_SCALE, stop))
    if scale is None or (exponents := SCALES.get(normal(scale[0]))) is None:
        return set(), stop
    return {_scaled(value, exponent) for value in values for exponent in exponents}, scale.end()


def _scaled(value: str, exponent: int) -> str:
    whole, _, fraction = value.partition(".")
    kept = fraction[exponent:].rstrip("0")
    moved = whole + fraction[:exponent].ljust(exponent, "0")
    return str(int(moved)) + (f".{kept}" if kept else "") if len(moved) < 300 else value


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
