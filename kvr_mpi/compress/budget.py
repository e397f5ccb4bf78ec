"""The budget of a prompt's heads, and its division into whole numbers of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenCounts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens of one prompt to keep in addition to those that every head keeps.

    each : candidates that a KV head keeps, on average.
    candidates : tokens before the window, from which heads choose; at least `each`.
    layers, kv_heads : number of compressed layers, and of KV heads in each.
    """

    each: int
    candidates: int
    layers: int
    kv_heads: int

    def evenly(self) -> TokenCounts:
        """Give every head the same number (layers, kv_heads)."""
        return np.full((self.layers, self.kv_heads), self.each, dtype=np.int64)

    def by_weight(self, weights: npt.NDArray[np.float64]) -> TokenCounts:
        """Divide in proportion to weights (layers, kv_heads); the total is the same as for even shares.

        No head gets more than there are candidates; the excess goes to the other heads.
        """
        flat = np.maximum(np.broadcast_to(weights, (self.layers, self.kv_heads)).ravel().astype(np.float64), 0)
        total, shares = self.each * flat.size, np.zeros(flat.size)
        is_open = np.ones(flat.size, dtype=bool)
        while is_open.any():
            left = total - self.candidates * int((~is_open).sum())
            among = flat[is_open]
            shares[is_open] = left * (among / among.sum() if among.sum() > 0 else np.full(among.size, 1 / among.size))
            full = is_open & (shares >= self.candidates)
            if not full.any():
                break
            shares[full] = self.candidates
            is_open &= ~full
        counts = np.floor(shares + 1e-9).astype(np.int64)
        rest = np.where(counts < self.candidates, shares - counts, -1.0)
        counts[np.argsort(-rest, kind="stable")[: total - int(counts.sum())]] += 1
        return counts.reshape(self.layers, self.kv_heads)
