"""Ada-SnapKV (Feng et al. 2024, arXiv:2407.11550): a layer's heads compete for its budget, token by token.

Heads whose attention is spread over many tokens keep more of them, at the cost of those that look at few. A share of
the budget, the floor, is safe in every head (the paper's alpha): each keeps that many of its own best tokens first, and
the rest goes to the best of all heads together, as in kvpress. The paper's code shares everything out by competition,
and then moves each head's count towards the floor.
"""

from __future__ import annotations

import torch

# As in kvpress.
FLOOR = 0.2


def adakv_counts(scores: torch.Tensor, each: int, floor: float = FLOOR) -> torch.Tensor:
    """Say how many candidates each head of one layer keeps, by their scores (kv_heads, candidates).

    Parameters
    ----------
    each : int
        Mean of the heads' counts.
    floor : float
        Share of it that is safe in every head.

    Returns
    -------
    torch.Tensor
        (kv_heads,), int64; they add up to ``kv_heads * each``.
    """
    heads, candidates = scores.shape
    safe = min(int(floor * each), candidates)
    best = scores.sort(dim=-1, descending=True, stable=True).values[:, safe:]
    chosen = best.flatten().argsort(descending=True, stable=True)[: heads * (each - safe)]
    return safe + torch.bincount(chosen // max(1, candidates - safe), minlength=heads)
