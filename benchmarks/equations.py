"""The paper's equations 1 to 7, with its own symbols in the docstrings: bounds on time, traffic, and its rival TSP.

Stand beside the event model, which knows what these leave out: token work, launches, links. Times are in the unit of
what goes in; traffic is in tokens whose keys and values cross a link, for one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kvr_mpi.costs.costmodel import single_seconds
from kvr_mpi.costs.layer_costs import Costs


def balanced_bound(lengths: Sequence[float], alpha: float) -> float:
    """Time to the first token with these slices, if all work were shared out evenly (eq. 1).

    TTFT(p) >= alpha (C^2 / 2 + sum c_i^2 / 2) / p: each rank computes a rectangle of queries by keys, and the triangle
    above the diagonal of each slice is wasted.

    Parameters
    ----------
    lengths : sequence of float
        c_0 ... c_(p-1), in tokens.
    alpha : float
        Seconds for one query attending to one key, so that one process takes alpha C^2.
    """
    tokens = sum(lengths)
    return alpha * (tokens**2 / 2 + sum(length**2 for length in lengths) / 2) / len(lengths)


def even_bound(tokens: float, ranks: int, alpha: float) -> float:
    """Smallest value of eq. 1, that of even slices (eq. 2): alpha C^2 / 2 (1/p + 1/p^2)."""
    return alpha * tokens**2 / 2 * (1 / ranks + 1 / ranks**2)


def tsp_traffic(tokens: float, ranks: int) -> float:
    """Traffic of an all-gather, Net_tsp = p (p - 1) C/p = (p - 1) C (eqs. 4 and 5)."""
    return (ranks - 1) * tokens


def chain_traffic(lengths: Sequence[float]) -> float:
    """Traffic of a chain, every prefix crossing one link: Net_kvr = c_0 + (c_0 + c_1) + ... (eq. 6).

    The paper writes C/p + 2C/p + ..., which is this for even slices.
    """
    return sum(list(accumulate(lengths))[:-1])


def even_chain_traffic(tokens: float, ranks: int) -> float:
    """Traffic of a chain with even slices, Net_kvr = (p - 1) C / 2 (eq. 7), half of an all-gather's.

    For even slices only: the slices that make the chain fast are longer in front, and these cross more links. Where
    attention is most of the work their traffic comes to about 2/3 (p - 1) C; `chain_traffic` has the exact number.
    """
    return (ranks - 1) * tokens / 2


def ttft_star(single_s: float, ranks: int) -> float:
    """Lower bound TTFT*(p) = TTFT(1) / 2 (1/p + 1/p^2) (eq. 3); more than p times faster than one process.

    It assumes that all work is attention, and that one process computes the whole square C x C (eager). The work per
    token only shrinks with 1/p, and flash kernels skip the masked triangle on one process, too: use
    `costmodel.lower_bound_seconds` then.
    """
    return single_s / 2 * (1 / ranks + 1 / ranks**2)


def tsp_seconds(costs: Costs, tokens: float, ranks: int, *, dense: bool = True) -> float:
    """Time to the first token of tensor and sequence parallelism: even slices, an all-gather in every layer.

    If `dense`, every rank attends to the whole prompt and masks the tokens after its own, as in the paper (Fig. 4).
    Otherwise these are skipped, and the last rank has the most work.
    """
    if ranks == 1:
        return single_seconds(costs, tokens)
    own = tokens / ranks
    gather_bytes_per_s = costs.link_bytes_per_s * costs.gather_link_share
    gather_s = costs.link_latency_s * (ranks - 1) + (tokens - own) * costs.kv_bytes / gather_bytes_per_s
    seen = tokens if dense or costs.eager else tokens - own / 2
    work_s = own * (costs.token_s + seen * costs.pair_s) + tokens * costs.gather_copy_token_s
    floor_s = costs.launch_floor_s + ranks * costs.gather_floor_per_rank_s
    layer_s = costs.layer_s + gather_s + work_s / min(costs.speeds or (1.0,))
    head_s = costs.head_s * (own if costs.eager else 1.0)
    return costs.layers * max(layer_s, floor_s) + head_s
