"""The compression methods: how each divides the budget of a prompt over heads, and which settings it reads.

Jobs, ``kvr search --heads`` and the quality bench take their methods from here. `compression.Compression` applies them.
Tokens are chosen by their scores (`scores`), within the counts that a method gives. Settings are checked without torch
and numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    TokenCounts = npt.NDArray[np.int64]
    Weights = npt.NDArray[np.float64]

# StreamingLLM's first tokens, as in its paper.
SINKS = 4
# PyramidKV's, as in the paper's code and in kvpress.
PYRAMID_BETA = 20.0
# Ada-SnapKV's, as in kvpress.
FLOOR = 0.2
# (mean count, candidates, layers, the profile's counts beyond the window) to the weights by which heads share the
# budget (layers, kv_heads) or (layers, 1); the same for every text.
Weigh = Callable[[int, int, int, "Weights | None"], "Weights"]
# (scores (heads, candidates), mean count) to the number of candidates each head keeps (heads,).
Compete = Callable[["torch.Tensor", int], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Method:
    """A method that chooses the tokens each KV head keeps.

    name : in jobs, records and tables.
    reads : settings in addition to those that all methods read.
    weigh : distributes the budget over layers and heads; None: all heads keep the same number.
    compete : distributes a layer's budget over its heads by the text's own scores instead; None: not used.
    repeats : tokens are scored after the prefill, while the model repeats the text (`repeating`), and the heads of all
        layers compete.
    """

    name: str
    reads: tuple[str, ...] = ()
    weigh: Weigh | None = None
    compete: Compete | None = None
    repeats: bool = False

    @property
    def observes(self) -> bool:
        """Whether tokens are scored by the queries of a window; otherwise by their positions."""
        return "window" in self.reads

    @property
    def needs_profile(self) -> bool:
        """Whether a file defines how many tokens each head keeps."""
        return "profile" in self.reads

    @property
    def late_layers(self) -> int:
        """Complete layers that a GPU holds whole until the host knows how many tokens each of their heads keeps."""
        return int(self.compete is not None and not self.repeats)


def share_budget(weights: Weights, each: int, candidates: int) -> TokenCounts:
    """Divide a budget of `each` tokens per head, on average, over heads by their weights (layers, kv_heads).

    No head gets more than the `candidates`, of which there are at least `each`; the excess goes to the other heads.
    """
    import numpy as np

    flat = np.maximum(weights.ravel().astype(np.float64), 0)
    total, shares = each * flat.size, np.zeros(flat.size)
    is_open = np.ones(flat.size, dtype=bool)
    while is_open.any():
        left = total - candidates * int((~is_open).sum())
        among = flat[is_open]
        shares[is_open] = left * (among / among.sum() if among.sum() > 0 else np.full(among.size, 1 / among.size))
        full = is_open & (shares >= candidates)
        if not full.any():
            break
        shares[full] = candidates
        is_open &= ~full
    counts = np.floor(shares + 1e-9).astype(np.int64)
    rest = np.where(counts < candidates, shares - counts, -1.0)
    counts[np.argsort(-rest, kind="stable")[: total - int(counts.sum())]] += 1
    return counts.reshape(weights.shape)


def pyramidkv_weights(each: int, candidates: int, layers: int, profile: Weights | None) -> Weights:
    """Give lower layers more, since attention narrows upwards (PyramidKV, arXiv:2406.02069, section 4.2).

    Counts fall linearly from the first layer to the last, which keeps 1 / `PYRAMID_BETA` of the mean. If the first
    layer would keep more tokens than there are, the slope is reduced and the mean stays (as in the paper's code).
    """
    import numpy as np

    least = each / PYRAMID_BETA
    most = min(2 * each - least, candidates)
    return np.linspace(most, 2 * each - most, layers)[:, np.newaxis]


def headkv_weights(each: int, candidates: int, layers: int, profile: Weights | None) -> Weights:
    """Give more to heads that were found to retrieve or reason (HeadKV, arXiv:2410.19258).

    The weights are the counts of a profile beyond the window (`head_profile` converts published scores to a profile).
    HeadKV's own code repeats keys before it caches them, so its budget is per *query* head: with groups of four, a
    budget of 128 there is up to 512 tokens of a KV head. Here it is per KV head, which determines memory.
    """
    assert profile is not None, "it is read when the job is set up"
    return profile


def adakv_counts(scores: torch.Tensor, each: int, floor: float = FLOOR) -> torch.Tensor:
    """Let heads compete for their budget, token by token, by their scores (kv_heads, candidates).

    Ada-SnapKV (arXiv:2407.11550): heads whose attention is spread over many tokens keep more tokens than heads that
    attend to few. As in kvpress, each head first keeps its own best tokens, the fraction `floor` (the paper's alpha) of
    `each`, which is the mean count. The rest of the budget goes to the best tokens of all heads together. The paper's
    code distributes the whole budget by competition, and then moves each head's count towards the floor.

    Returns counts (kv_heads,), int64, that add up to ``kv_heads * each``.
    """
    heads, candidates = scores.shape
    safe = min(int(floor * each), candidates)
    best = scores.sort(dim=-1, descending=True, stable=True).values[:, safe:]
    chosen = best.flatten().argsort(descending=True, stable=True)[: heads * (each - safe)]
    theirs = chosen // max(1, candidates - safe)
    counts = theirs.new_full((heads,), safe)
    return counts.scatter_add_(0, theirs, theirs.new_ones(theirs.shape))  # bincount would wait for a GPU


# StreamingLLM (arXiv:2309.17453) keeps the first tokens and the most recent ones, SnapKV (arXiv:2404.14469) those that
# the window attends to most.
METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("streaming-llm"),
        Method("snapkv", ("window",)),
        Method("pyramidkv", ("window",), pyramidkv_weights),
        Method("ada-snapkv", ("window",), compete=adakv_counts),
        Method("headkv", ("window", "profile"), headkv_weights),
        Method("kvzip", compete=partial(adakv_counts, floor=0.0), repeats=True),
    )
}
