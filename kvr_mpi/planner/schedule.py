"""Which documents on which chains."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal(todo: Sequence[tuple[str, int]], chains: int) -> list[set[str]]:
    """Share documents (id, characters) among chains: the longest first, each to the chain with least to do."""
    shares: list[set[str]] = [set() for _ in range(chains)]
    loads = [(0, chain) for chain in range(chains)]
    for name, chars in sorted(todo, key=lambda item: (-item[1], item[0])):
        load, chain = heapq.heappop(loads)
        shares[chain].add(name)
        heapq.heappush(loads, (load + max(1, chars), chain))
    return shares
