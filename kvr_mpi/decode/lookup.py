"""Prompt lookup: a step also runs tokens that an answer may copy, and keeps those that are then chosen.

Answers about long documents quote them. A *draft* is what followed the last tokens of prompt and answer when they
occurred before (Saxena 2023, "Prompt Lookup Decoding"). Verifying it costs little, since a step reads the weights once
for all its rows, and changes no answer (`Group.write`).

Drafts are only run where they save time, according to two measurements. How often a draft is right depends on the
document and on how many tokens matched; a draft that is not run is compared with the answer, too, so that this costs
nothing. And how long a step takes depends on its number of rows.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
# Longest match that is looked for, and longest draft.
LONGEST_MATCH, LONGEST_DRAFT = 8, 15
BACK = np.arange(1, LONGEST_MATCH)
# Most rows of a step with drafts.
MOST_ROWS = 128
# A draft's token is not considered if it is chosen less often than this.
LEAST_CHANCE = 0.05
# Expected shares of right tokens by length of the match, before anything is measured.
EXPECTED = (0.0, 0.1, 0.25, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7)
# Comparisons that an expectation counts for, and the weight of a document's earlier comparisons with each new one.
EXPECTED_WEIGHT, KEPT_WEIGHT = 4.0, 0.95


def find_draft(ids: Integers, most: int) -> tuple[int, list[int]]:
    """Find what followed the last tokens when they occurred before, the longest match first, then the latest.

    ids : prompt and answer so far (tokens,).
    most : tokens to return; if the match overlaps the end, they repeat.

    Returns the length of the match, up to `LONGEST_MATCH`, and the tokens; 0 and none if there is no match.
    """
    last = len(ids) - 1
    if most < 1 or last < 1:
        return 0, []
    found = np.flatnonzero(ids[:last] == ids[last])
    if not len(found):
        return 0, []
    back = BACK[:last]
    before = found[:, None] - back
    same = np.logical_and.accumulate((before >= 0) & (ids[before] == ids[last - back]), axis=1).sum(axis=1)
    at = len(found) - 1 - int(same[::-1].argmax())
    matched, end = 1 + int(same[at]), int(found[at])
    after = ids[end + 1 : end + 1 + most]
    return matched, (after if len(after) == most else np.resize(after, most)).tolist()


class Acceptance:
    """How often the next token of a match is chosen, by length of the match.

    expected : of all documents, which counts until a document has its own comparisons; None: `EXPECTED`.
    """

    def __init__(self, expected: Acceptance | None = None) -> None:
        self._expected = expected
        self._compared = [0.0] * (LONGEST_MATCH + 1)
        self._right = [0.0] * (LONGEST_MATCH + 1)

    def chance(self, matched: int) -> float:
        """Probability that the token after a match of this length is chosen."""
        matched = min(matched, LONGEST_MATCH)
        before = EXPECTED[matched] if self._expected is None else self._expected.chance(matched)
        return (self._right[matched] + EXPECTED_WEIGHT * before) / (self._compared[matched] + EXPECTED_WEIGHT)

    def see(self, matched: int, is_right: bool) -> None:
        matched = min(matched, LONGEST_MATCH)
        self._compared[matched] = KEPT_WEIGHT * self._compared[matched] + 1
        self._right[matched] = KEPT_WEIGHT * self._right[matched] + is_right
        if self._expected is not None:
            self._expected.see(matched, is_right)


class StepTimes:
    """Durations of steps by number of documents, roughly, and number of rows; the shortest of the last few counts."""

    # Numbers of rows that are measured together, up to each of these.
    BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, MOST_ROWS)
    # Steps after which a duration without or with drafts is measured again; durations that count.
    PLAIN_STEPS, DRAFTED_STEPS, COUNTED = 32, 256, 3
    # Gain at which drafts are run; and what a drafted token is worth, since a document that ends before others saves
    # only its own rows.
    MARGIN, WORTH = 1.03, 0.8

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._seen_at: dict[tuple[int, int], int] = {}
        self._steps = 0

    def see(self, documents: int, rows: int, seconds: float) -> None:
        key = self._key(documents, rows)
        found = self._seconds.setdefault(key, deque(maxlen=self.COUNTED))
        if self._is_old(key):
            found.clear()
        found.append(seconds)
        self._steps += 1
        self._seen_at[key] = self._steps

    def choose(self, documents: int, gains: Sequence[float]) -> int:
        """Return the number of drafted tokens that saves most time; 0 if it is not known how long a step takes.

        gains : probabilities that each is chosen, in descending order.
        """
        seconds, tokens, chosen = self.plain(documents), float(documents), 0
        if not gains or seconds is None:
            return 0
        best = self.MARGIN * tokens / seconds
        for rows, gain in enumerate(gains[: max(0, MOST_ROWS - documents)], documents + 1):
            tokens += self.WORTH * gain
            if rows in self.BOUNDS or rows == documents + len(gains):
                key = self._key(documents, rows)
                # What was not measured may take as long as fewer rows. It is tried, but not together with more rows.
                if is_known := self._is_known(key):
                    seconds = max(seconds, min(self._seconds[key]))
                if tokens / seconds > best:
                    best, chosen = tokens / seconds, rows - documents
                if not is_known:
                    break
        return chosen

    def plain(self, documents: int) -> float | None:
        """Return how long a step without drafts takes; None if it has to be measured again."""
        key = self._key(documents, documents)
        return min(self._seconds[key]) if self._is_known(key) else None

    def _key(self, documents: int, rows: int) -> tuple[int, int]:
        return documents.bit_length(), 0 if rows == documents else 1 + bisect_left(self.BOUNDS, rows)

    def _is_known(self, key: tuple[int, int]) -> bool:
        """Whether a duration was measured often enough, and not too long ago."""
        return len(self._seconds.get(key, ())) >= (2 if key[1] else 1) and not self._is_old(key)

    def _is_old(self, key: tuple[int, int]) -> bool:
        steps = self.DRAFTED_STEPS if key[1] else self.PLAIN_STEPS
        return self._steps - self._seen_at.get(key, 0) > steps


@dataclass(slots=True)
class Decoded:
    """Counts of decode steps.

    steps : for each document that takes part in it.
    tokens : that were chosen.
    drafted : tokens that were run before they were chosen.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0


@dataclass(slots=True, eq=False)
class Candidate:
    """What a document may copy next.

    ids : prompt and answer so far.
    room : most tokens to draft.
    acceptance : of the document.
    matched, tokens : see `find_draft`.
    """

    ids: Integers
    room: int
    acceptance: Acceptance
    matched: int = field(init=False)
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.matched, self.tokens = find_draft(self.ids, min(self.room, LONGEST_DRAFT))

    @property
    def gains(self) -> Iterable[float]:
        """For each token the probability that it and all before it are chosen, while that is worth considering."""
        chances = (self.acceptance.chance(self.matched + at) for at in range(len(self.tokens)))
        return itertools.takewhile(
            lambda chance: chance > LEAST_CHANCE, itertools.accumulate(chances, lambda a, b: a * b)
        )

    def learn(self, chosen: Sequence[int]) -> None:
        """Compare with the tokens that were chosen."""
        for at, (token, drafted) in enumerate(zip(chosen, self.tokens, strict=False)):
            self.acceptance.see(self.matched + at, token == drafted)
            if token != drafted:
                return


class Lookup:
    """The drafts of a rank's answers.

    most_rows : most rows of a step with drafts; fewer after memory was short.
    """

    def __init__(self) -> None:
        self._expected, self._times, self.most_rows = Acceptance(), StepTimes(), MOST_ROWS

    def new_acceptance(self) -> Acceptance:
        return Acceptance(self._expected)

    def choose(self, candidates: Sequence[Candidate]) -> list[list[int]]:
        """Choose the drafts of a step, some of them empty."""
        gains = [(gain, number) for number, each in enumerate(candidates) for gain in each.gains]
        gains.sort(reverse=True)
        most = max(0, self.most_rows - len(candidates))
        count = self._times.choose(len(candidates), [gain for gain, _ in gains[:most]])
        drafted = [0] * len(candidates)
        for _, number in gains[:count]:
            drafted[number] += 1
        return [each.tokens[:many] for each, many in zip(candidates, drafted, strict=True)]

    def learn(
        self,
        candidates: Sequence[Candidate],
        drafts: Sequence[Sequence[int]],
        chosen: Sequence[Sequence[int]],
        seconds: float,
    ) -> None:
        """Learn from a step: the tokens that were chosen for each document, and its duration."""
        for candidate, tokens in zip(candidates, chosen, strict=True):
            candidate.learn(tokens)
        documents, drafted = len(candidates), sum(map(len, drafts))
        self._times.see(documents, documents + drafted, seconds)

    def shrink(self, rows: int) -> None:
        """Run fewer rows from now on, since memory was short for so many."""
        self.most_rows = min(self.most_rows, rows // 2)
