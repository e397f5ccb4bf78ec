"""Which strategy runs a prompt on a chain if the job leaves the choice open (``parallel.strategy = "auto"``).

Stands between the cost model and the engine. What is forecast depends on a prompt's length alone, so the chain's first
rank works it out once for all lengths and tells the others: no two ranks can choose differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvr_mpi.prefill.registry import Strategy, fastest
from kvr_mpi.transport import Transport, share_json

# Longer prompts are run as one of this length.
LONGEST_TOKENS = 1 << 20
# Relative accuracy of the length at which the choice changes.
NEAR = 1 / 32

# Seconds to the first token of a prompt of so many tokens.
Seconds = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of prompt lengths: the candidate chosen for it, and the seconds of all at its longest length."""

    tokens: int
    chosen: int
    longest_tokens: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice among candidates for every length; `stretches` begin with the shortest."""

    strategies: tuple[Strategy, ...]
    stretches: tuple[Stretch, ...]

    def order(self, tokens: int) -> list[Strategy]:
        """List all candidates, the one that is chosen for so many tokens first."""
        stretch = next((one for one in reversed(self.stretches) if one.tokens <= tokens), self.stretches[0])
        chosen = self.strategies[stretch.chosen]
        return [chosen, *(one for one in self.strategies if one is not chosen)]

    def describe(self, ranks: int) -> str:
        """Describe the choice and its reason in one line."""
        parts = []
        for number, stretch in enumerate(self.stretches):
            since = f"from {stretch.tokens} tokens on " if number else ""
            times = ", ".join(
                f"{one.name} {seconds:.3g} s" for one, seconds in zip(self.strategies, stretch.seconds, strict=True)
            )
            chosen = self.strategies[stretch.chosen].name
            parts.append(f"{since}{chosen} (forecast for {stretch.longest_tokens} tokens: {times})")
        return f"strategy = 'auto', on chains of {ranks} ranks: {'; '.join(parts)}"


def choose_strategies(
    chain: Transport, strategies: Sequence[Strategy], seconds: Sequence[Seconds], shortest: int, longest: int
) -> Choice:
    """Work out which strategy is fastest for every length; every rank of the chain calls this.

    Parameters
    ----------
    seconds : sequence of callable
        Of each strategy, its forecast; called on the chain's first rank only.
    shortest, longest : int
        Tokens of prompts on this chain.
    """
    found = _stretches(seconds, shortest, max(shortest, min(longest, LONGEST_TOKENS))) if chain.rank == 0 else []
    told = share_json(chain, [[one.tokens, one.chosen, one.longest_tokens, one.seconds] for one in found])
    return Choice(
        tuple(strategies),
        tuple(Stretch(tokens, chosen, most, tuple(times)) for tokens, chosen, most, times in told),
    )


def _stretches(seconds: Sequence[Seconds], shortest: int, longest: int) -> list[Stretch]:
    """Compare the candidates at doubling lengths, and bisect between two lengths with different choices."""

    def times(tokens: int) -> tuple[float, ...]:
        return tuple(one(tokens) for one in seconds)

    starts, before = [(shortest, fastest(times(shortest)))], shortest
    while before < longest:
        tokens = min(2 * before, longest)
        chosen = fastest(times(tokens))
        if chosen != starts[-1][1]:
            low, high = before, tokens
            while high - low > max(1, NEAR * low):
                middle = (low + high) // 2
                if fastest(times(middle)) == starts[-1][1]:
                    low = middle
                else:
                    high, chosen = middle, fastest(times(middle))
            starts.append((high, chosen))
        before = tokens
    ends = [*(start - 1 for start, _ in starts[1:]), longest]
    return [Stretch(start, chosen, end, times(end)) for (start, chosen), end in zip(starts, ends, strict=True)]
