"""Partitions: how a prompt is cut into slices for the ranks of a chain (KV-Runahead, section 4.2).

Planners create a `Partition`; a prefill follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvr_mpi.errors import PartitionError

# Slices end at multiples of this: kernels are faster then, and steps of 64 tokens would miss the best split.
QUANTUM_TOKENS = 16


def cut_range(start: int, stop: int, every: int | None) -> Iterator[tuple[int, int]]:
    """Cut a range of tokens at multiples of `every`; None for no cuts."""
    while start < stop:
        end = stop if every is None else min(stop, (start // every + 1) * every)
        yield start, end
        start = end


@dataclass(frozen=True, slots=True)
class Partition:
    """Slice bounds of one prompt: rank i owns tokens ``bounds[i]`` to ``bounds[i + 1]``.

    bounds : ``size + 1`` strictly increasing token positions, the first 0, the last the prompt's length; otherwise a
        `PartitionError`.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse invalid bounds."""
        if len(self.bounds) < 2 or self.bounds[0] != 0:
            raise PartitionError(f"slice bounds {list(self.bounds)}: expected at least two, the first one 0")
        for rank, (start, stop) in enumerate(pairwise(self.bounds)):
            if stop <= start:
                raise PartitionError(
                    f"slice bounds {list(self.bounds)}: rank {rank} would get {stop - start} tokens; "
                    f"every rank needs at least one (use fewer ranks, or other ratios)"
                )

    @property
    def size(self) -> int:
        return len(self.bounds) - 1

    @property
    def tokens(self) -> int:
        """Length of the whole prompt in tokens."""
        return self.bounds[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank's slice."""
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    def slices(self, known: int = 0) -> list[tuple[int, int]]:
        """Return the range of each rank's slice, without the first `known` tokens."""
        return [(max(start, known), stop) for start, stop in pairwise(self.bounds)]

    def check_prefix(self, tokens: int) -> None:
        """Raise `PartitionError` unless the first slice extends beyond a prefix of `tokens`."""
        if self.bounds[1] <= tokens:
            raise PartitionError(
                f"slice bounds {list(self.bounds)}: the first slice has to end after the {tokens} tokens that all "
                f"prompts begin with"
            )

    def after(self, tokens: int) -> Partition:
        """Return the same slices after a prefix of `tokens`, which the first slice includes."""
        return Partition((0, *(bound + tokens for bound in self.bounds[1:])))

    def with_last_from(self, token: int, known: int = 0) -> Partition:
        """Move the start of the last slice back to `token` if it is later; others shrink as little as possible.

        The first `known` tokens are not computed; the first slice ends after them. Raises `PartitionError` if
        there are too few tokens before `token` for the other slices.
        """
        if token - known < self.size - 1:
            raise PartitionError(
                f"slice bounds {list(self.bounds)}: the last slice cannot begin at token {token}, since "
                f"{self.size - 1} slices must fit between it and the {known} known tokens"
            )
        inner = (min(bound, token - (self.size - 1 - rank)) for rank, bound in enumerate(self.bounds[1:-1], start=1))
        return Partition((0, *inner, self.tokens))

    @classmethod
    def even(cls, tokens: int, size: int) -> Partition:
        """Cut into `size` slices whose lengths differ by at most one token."""
        return cls.by_ratio(tokens, [1.0] * size)

    @classmethod
    def by_ratio(cls, tokens: int, ratios: Sequence[float], quantum: int = 1) -> Partition:
        """Cut in proportion to positive ratios, which need not add up to one; each slice has at least one token.

        Inner bounds are multiples of `quantum`, if the prompt is long enough and no slice becomes empty.
        """
        size = len(ratios)
        if size < 1 or any(not ratio > 0 or ratio == float("inf") for ratio in ratios):
            raise PartitionError(f"ratios {list(ratios)}: expected one positive number for each rank")
        if tokens < size:
            raise PartitionError(
                f"{tokens} tokens cannot be cut over {size} ranks: every rank needs at least one token; "
                f"use at most {tokens} ranks for this prompt"
            )
        if quantum < 1:
            raise PartitionError(f"quantum {quantum}: expected at least 1 token")
        if tokens < 4 * quantum * size:
            quantum = 1
        largest = max(ratios)  # divided out first, so that sums of huge ratios do not overflow
        total = sum(ratio / largest for ratio in ratios)
        bounds, seen = [0], 0.0
        for rank, ratio in enumerate(ratios[:-1]):
            seen += ratio / largest
            bound = round(tokens * seen / total / quantum) * quantum
            bounds.append(min(max(bound, bounds[-1] + 1), tokens - (size - 1 - rank)))
        return cls((*bounds, tokens))

    def __str__(self) -> str:
        """Slice lengths joined by ``+``, as shown in logs and tables."""
        return "+".join(map(str, self.lengths))
