"""StreamingLLM (Xiao et al. 2023, arXiv:2309.17453, section 3.2): the first tokens, and the most recent ones.

Attention that has nowhere to go goes to the first tokens, its sinks: without them the rest is weighted wrongly.
Positions stay those of the prompt, as in kvpress: the paper counts within the cache, so that a text can go on for ever.
"""

from __future__ import annotations

import torch


def recency_scores(tokens: int, sinks: int, kv_heads: int, device: torch.device) -> torch.Tensor:
    """Score tokens by how recent they are, the first `sinks` above all others (kv_heads, tokens)."""
    scores = torch.arange(tokens, dtype=torch.float64, device=device)
    scores[:sinks] += tokens
    return scores.expand(kv_heads, tokens)
