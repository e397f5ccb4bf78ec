"""HeadKV (Fu et al. 2024, arXiv:2410.19258): heads keep more that were found to retrieve, or to reason, beforehand.

Counts are the same for every prompt: they are those of a profile, beyond the window, scaled to the budget over all
heads of the model (`head_profile` says how published scores become a profile). Tokens are chosen as by SnapKV. HeadKV's
own code repeats keys before it caches them, and so counts its budget for each *query* head: with groups of four, a
budget of 128 there is up to 512 tokens of a KV head. Here a budget is of KV heads, which is what memory goes by.
"""

from __future__ import annotations

import numpy as np

from kvr_mpi.compress.budget import Budget, TokenCounts
from kvr_mpi.compress.head_profile import HeadProfile


def headkv_counts(budget: Budget, profile: HeadProfile, window: int) -> TokenCounts:
    """Say how many candidates each head keeps (layers, kv_heads)."""
    return budget.by_weight(np.maximum(profile.counts - window, 0))
