"""Scores for choosing tokens: attention from a window of queries, or recency.

SnapKV (Li et al. 2024, arXiv:2404.14469, section 4.2): the softmax over all keys a query sees, its mean over the
window's queries, pooled along the tokens so that neighbors of attended tokens are kept, too. Under grouped-query
attention a KV head's scores are the mean over its query heads, since a token is kept or dropped for all of them (as in
kvpress; SnapKV's own code repeats keys, and chooses for each query head).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvr_mpi.compress.registry import SINKS
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.devices import copy_to_host

# Neighbouring tokens whose scores are pooled, as in kvpress; odd.
KERNEL = 5


def query_products(query: torch.Tensor, keys: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """Return the products of queries (..., queries, head_dim) with all of one head's keys (keys, head_dim), float32."""
    products = torch.matmul(query.float(), keys.float().transpose(0, 1)) * params.scale
    if params.softcap is None:
        return products
    return torch.tanh(products / params.softcap) * params.softcap


def window_scores(query: torch.Tensor, keys: torch.Tensor, params: AttentionParams, *, start: int) -> torch.Tensor:
    """Score the tokens before a window (kv_heads, start), float32.

    query : of the window's tokens (1, heads, window, head_dim), heads a multiple of kv_heads.
    keys : of all tokens up to the window's last (1, kv_heads, start + window, head_dim).
    start : tokens before the window.
    """
    window, kv_heads = query.shape[2], keys.shape[1]
    later = torch.ones(window, window, dtype=torch.bool, device=query.device).triu(1)
    sinks = None if params.sinks is None else params.sinks.float().view(kv_heads, -1, 1)
    means = []
    # One head at a time: a row of products is as long as the text.
    for head, group in enumerate(query[0].view(kv_heads, -1, window, query.shape[-1])):
        products = query_products(group, keys[0, head], params)
        products[..., start:].masked_fill_(later, float("-inf"))
        total = torch.logsumexp(products, dim=-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks[head])
        means.append(torch.exp(products[..., :start] - total.unsqueeze(-1)).mean(dim=(0, 1)))
    return torch.nn.functional.avg_pool1d(torch.stack(means), KERNEL, stride=1, padding=KERNEL // 2)


def recency_scores(tokens: int, kv_heads: int, device: torch.device) -> torch.Tensor:
    """Score tokens by recency, the first `SINKS` above all others (kv_heads, tokens).

    Surplus attention goes to the first tokens, its sinks: without them, the other tokens' weights are wrong
    (StreamingLLM, section 3.2). Tokens keep their positions in the prompt, as in kvpress; the paper counts positions
    within the cache, so that a text can have any length.
    """
    scores = torch.arange(tokens, dtype=torch.float64, device=device)
    scores[:SINKS] += tokens
    return scores.expand(kv_heads, tokens)


def top_tokens(scores: torch.Tensor, counts: torch.Tensor) -> Iterator[torch.Tensor]:
    """Choose the tokens with each head's highest scores (kv_heads, tokens), as many as its count (kv_heads,).

    Returns an iterator over each head's positions, ascending, int64. If the counts are on a GPU, its first step waits
    for them; until then the host can launch other work.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)  # ties: the first token, on every rank
    copied = copy_to_host(counts)

    def choose() -> Iterator[torch.Tensor]:
        (on_host,) = copied()
        for tokens, count in zip(order, on_host.tolist(), strict=True):
            yield tokens[:count].sort().values

    return choose()
