"""Prompts with an answer that stands somewhere in a long text: what compression may lose shows in whether it is found.

Tasks of RULER's kinds (Hsieh et al. 2024, arXiv:2404.06654, section 3), made here: a number is named once among
sentences of a text (single); the same among other names with numbers (several); a variable is set, and others are set
to it (chain).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

COLORS = ("amber", "violet", "silver", "crimson", "olive", "teal", "ivory", "scarlet")
THINGS = ("harbour", "lantern", "orchard", "compass", "anchor", "granary", "chapel", "bridge")
OTHERS = 4  # names with numbers beside the one that is asked for
LINKS = 3  # variables that are set to each other


@dataclass(frozen=True, slots=True)
class Needle:
    """A text, a question about it, how its answer begins, and the answer.

    kind : of `KINDS`.
    """

    kind: str
    text: str
    question: str
    begins: str
    answer: str


def _named(chance: random.Random, count: int) -> list[tuple[str, str]]:
    """Names, each another one, and numbers of five digits."""
    names = [f"{color} {thing}" for color in COLORS for thing in THINGS]
    return [(name, str(chance.randrange(10_000, 100_000))) for name in chance.sample(names, count)]


def _hidden(chance: random.Random, sentences: Sequence[str], needles: Sequence[str]) -> str:
    """Put needles, in their order, between sentences."""
    places = sorted(chance.sample(range(len(sentences)), len(needles)))
    parts = list(sentences)
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        parts.insert(place, needle)
    return " ".join(parts)


def _ask_number(chance: random.Random, sentences: Sequence[str], kind: str, count: int) -> Needle:
    named = _named(chance, count)
    name, number = chance.choice(named)
    text = _hidden(chance, sentences, [f"The number of the {each} is {value}." for each, value in named])
    return Needle(kind, text, f"What is the number of the {name}?", f"The number of the {name} is", f" {number}")


def single(chance: random.Random, sentences: Sequence[str]) -> Needle:
    """Hide one name with a number."""
    return _ask_number(chance, sentences, "single", 1)


def several(chance: random.Random, sentences: Sequence[str]) -> Needle:
    """Hide a name with a number among others."""
    return _ask_number(chance, sentences, "several", 1 + OTHERS)


def chain(chance: random.Random, sentences: Sequence[str]) -> Needle:
    """Set a variable to a number, others to it, one after the other, and ask for the last one's value."""
    names = ["".join(chance.sample("ABCDEFGHKLMNPQRSTUVWXYZ", 3)) for _ in range(LINKS + 1)]
    number = str(chance.randrange(10_000, 100_000))
    links = [f"VAR {name} = VAR {before}." for before, name in zip(names, names[1:], strict=False)]
    text = _hidden(chance, sentences, [f"VAR {names[0]} = {number}.", *links])
    return Needle("chain", text, f"What number is VAR {names[-1]}?", f"VAR {names[-1]} is", f" {number}")


KINDS: Mapping[str, Callable[[random.Random, Sequence[str]], Needle]] = {
    "single": single,
    "several": several,
    "chain": chain,
}
