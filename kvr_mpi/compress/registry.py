"""The compression methods: for each a function that divides the budget, and an entry with what it observes and reads.

Jobs, ``kvr search --heads`` and the quality bench take their methods from here. `compression.Compression` applies them.
Tokens are chosen by their scores (`scores`), within the counts that a method gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # settings are checked without torch
    import torch

    from kvr_mpi.compress.budget import Budget, TokenCounts
    from kvr_mpi.compress.head_profile import HeadProfile


# StreamingLLM's first tokens, as in its paper.
SINKS = 4
# PyramidKV's, as in the paper's code and in kvpress.
PYRAMID_BETA = 20.0
# Ada-SnapKV's, as in kvpress.
FLOOR = 0.2
# (budget, window, profile) to the number of candidates each head keeps (layers, kv_heads); the same for every text.
ShareOut = Callable[["Budget", int, "HeadProfile | None"], "TokenCounts"]
# (scores (kv_heads, candidates), mean count) to the number of candidates each head of one layer keeps (kv_heads,).
Compete = Callable[["torch.Tensor", int], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Method:
    """A method that chooses the tokens each KV head keeps.

    name : in jobs, records and tables.
    share_out : distributes the budget over layers and heads.
    compete : distributes a layer's budget over its heads by the text's own scores instead; None: not used.
    reads : settings in addition to those that all methods read.
    """

    name: str
    share_out: ShareOut
    reads: tuple[str, ...]
    compete: Compete | None = None

    @property
    def observes(self) -> bool:
        """Whether tokens are scored by the queries of a window; otherwise by their positions."""
        return "window" in self.reads

    @property
    def needs_profile(self) -> bool:
        """Whether a file defines how many tokens each head keeps."""
        return "profile" in self.reads

    @property
    def over_layers(self) -> bool:
        """Whether layers keep different numbers of tokens, so that their heads have to be of one size."""
        return self.share_out is not evenly

    @property
    def is_even(self) -> bool:
        """Whether all heads of all layers keep the same number of tokens."""
        return self.compete is None and not self.over_layers


def evenly(budget: Budget, window: int, profile: HeadProfile | None) -> TokenCounts:
    """Give every head of every layer the same number.

    StreamingLLM (arXiv:2309.17453) fills it with the first tokens and the most recent ones, SnapKV (arXiv:2404.14469)
    with the tokens that the window attends to most.
    """
    return budget.evenly()


def pyramidkv_counts(budget: Budget, window: int, profile: HeadProfile | None) -> TokenCounts:
    """Give lower layers more, since attention narrows upwards (PyramidKV, arXiv:2406.02069, section 4.2).

    Counts fall linearly from the first layer to the last, which keeps 1 / `PYRAMID_BETA` of the mean. If the first
    layer would keep more tokens than there are, the slope is reduced and the mean stays (as in the paper's code).
    """
    import numpy as np

    least = budget.each / PYRAMID_BETA
    most = min(2 * budget.each - least, budget.candidates)
    line = np.linspace(most, 2 * budget.each - most, budget.layers)
    return budget.by_weight(line[:, np.newaxis])


def headkv_counts(budget: Budget, window: int, profile: HeadProfile | None) -> TokenCounts:
    """Give more to heads that were found to retrieve or reason (HeadKV, arXiv:2410.19258).

    Counts are the same for every prompt: those of a profile, beyond the window, scaled to the budget over all heads of
    the model (`head_profile` converts published scores to a profile). HeadKV's own code repeats keys before it caches
    them, so its budget is per *query* head: with groups of four, a budget of 128 there is up to 512 tokens of a KV
    head. Here the budget is per KV head, which determines memory.
    """
    assert profile is not None, "it is read when the job is set up"
    return budget.by_weight((profile.counts - window).clip(0))


def adakv_counts(scores: torch.Tensor, each: int) -> torch.Tensor:
    """Let a layer's heads compete for its budget, token by token, by their scores (kv_heads, candidates).

    Ada-SnapKV (arXiv:2407.11550): heads whose attention is spread over many tokens keep more tokens than heads that
    attend to few. As in kvpress, each head first keeps its own best tokens, the fraction `FLOOR` (the paper's alpha) of
    `each`, which is the mean count. The rest of the budget goes to the best tokens of all heads together. The paper's
    code distributes the whole budget by competition, and then moves each head's count towards the floor.

    Returns
    -------
    torch.Tensor
        (kv_heads,), int64; they add up to ``kv_heads * each``.
    """
    heads, candidates = scores.shape
    safe = min(int(FLOOR * each), candidates)
    best = scores.sort(dim=-1, descending=True, stable=True).values[:, safe:]
    chosen = best.flatten().argsort(descending=True, stable=True)[: heads * (each - safe)]
    return safe + (chosen // max(1, candidates - safe)).bincount(minlength=heads)


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("streaming-llm", evenly, ()),
        Method("snapkv", evenly, ("window",)),
        Method("pyramidkv", pyramidkv_counts, ("window",)),
        Method("ada-snapkv", evenly, ("window",), compete=adakv_counts),
        Method("headkv", headkv_counts, ("window", "profile")),
    )
}
