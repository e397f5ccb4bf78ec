"""PyramidKV (Cai et al. 2024, arXiv:2406.02069, section 4.2): lower layers keep more, since attention narrows upwards.

Counts fall linearly from the first layer to the last, which keeps 1 / beta of the mean; tokens are chosen as by SnapKV.
Where the first layer would keep more than there is, the slope is less, and the mean the same (as in the paper's code).
"""

from __future__ import annotations

import numpy as np

from kvr_mpi.compress.budget import Budget, TokenCounts

# The paper's code; kvpress has the same.
PYRAMID_BETA = 20.0


def pyramidkv_counts(budget: Budget, beta: float = PYRAMID_BETA) -> TokenCounts:
    """Say how many candidates each head keeps (layers, kv_heads)."""
    least = budget.each / beta
    most = min(2 * budget.each - least, budget.candidates)
    line = np.linspace(most, 2 * budget.each - most, budget.layers)
    return budget.by_weight(line[:, np.newaxis])
