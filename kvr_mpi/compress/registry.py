"""The methods, one line each: what they look at, how they share a budget out, and which settings they read.

Jobs, ``kvr search --heads`` and the quality bench take their methods from here: a new one is a file with its rule, and
an entry in `METHODS`. `compression.Compression` applies it.
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
# (budget, window, profile) to the candidates each head keeps (layers, kv_heads); the same for every text.
ShareOut = Callable[["Budget", int, "HeadProfile | None"], "TokenCounts"]
# (scores (kv_heads, candidates), mean count) to the candidates each head of one layer keeps (kv_heads,).
Compete = Callable[["torch.Tensor", int], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Method:
    """One way to choose the tokens that each KV head keeps.

    name : in jobs, records and tables.
    about : in a few words.
    paper : on arXiv.
    share_out : how the budget is shared out over layers and heads.
    compete : within a layer, by the text's own scores, instead.
    observes : whether tokens are judged by the queries of a window; else by where they stand.
    over_layers : whether layers keep different counts, so that their heads have to be of one size.
    needs_profile : whether counts are those of a file.
    reads : settings beside those that all read.
    """

    name: str
    about: str
    paper: str
    share_out: ShareOut
    reads: tuple[str, ...]
    compete: Compete | None = None
    observes: bool = True
    over_layers: bool = False
    needs_profile: bool = False

    @property
    def is_even(self) -> bool:
        """Whether all heads of all layers keep as many tokens."""
        return self.compete is None and not self.over_layers


def _evenly(budget: Budget, window: int, profile: HeadProfile | None) -> TokenCounts:
    return budget.evenly()


def _pyramid(budget: Budget, window: int, profile: HeadProfile | None) -> TokenCounts:
    from kvr_mpi.compress.pyramidkv import pyramidkv_counts

    return pyramidkv_counts(budget)


def _by_profile(budget: Budget, window: int, profile: HeadProfile | None) -> TokenCounts:
    from kvr_mpi.compress.headkv import headkv_counts

    assert profile is not None, "it is read when the job is set up"
    return headkv_counts(budget, profile, window)


def _compete(scores: torch.Tensor, each: int) -> torch.Tensor:
    from kvr_mpi.compress.adakv import adakv_counts

    return adakv_counts(scores, each)


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(
            "streaming-llm",
            "the first tokens and the most recent ones",
            "arXiv:2309.17453",
            _evenly,
            (),
            observes=False,
        ),
        Method(
            "snapkv",
            "the tokens that the window attends to most, the same number in every head",
            "arXiv:2404.14469",
            _evenly,
            ("window",),
        ),
        Method(
            "pyramidkv",
            "as snapkv, but more in lower layers",
            "arXiv:2406.02069",
            _pyramid,
            ("window",),
            over_layers=True,
        ),
        Method(
            "ada-snapkv",
            "as snapkv, but the heads of a layer share one budget",
            "arXiv:2407.11550",
            _evenly,
            ("window",),
            compete=_compete,
        ),
        Method(
            "headkv",
            "as snapkv, but more in heads that retrieve, according to a profile",
            "arXiv:2410.19258",
            _by_profile,
            ("window", "profile"),
            over_layers=True,
            needs_profile=True,
        ),
    )
}
