"""The engine and the machine of the KV-Runahead paper: eager attention, store-and-forward, all-gathers (TSP).

Our engine does none of these, so ``kvr_mpi.costs`` has no model of them. Eager: the whole rectangle of a slice's
queries by all keys is computed, written to memory and masked, and the LM head is applied to all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kvr_mpi.costs.costmodel import descend, neighbors
from kvr_mpi.costs.hardware import Hardware, NotNegative
from kvr_mpi.costs.layer_costs import Costs, costs_of
from kvr_mpi.costs.solve import equal_time
from kvr_mpi.costs.workload import Shape
from kvr_mpi.plain import Strict

Array = npt.NDArray[np.float64]

# The paper runs its models beyond their training lengths, so they have no limit here.
SHAPES = {
    "Llama 7B": Shape(32, 4096, 32, 32, 128, 11008, 32000),
    "Falcon 1B": Shape(24, 2048, 32, 32, 64, 8192, 50304, mlp_matrices=2, tied=True),
    "Falcon 7B": Shape(32, 4544, 71, 1, 64, 4 * 4544, 65024, mlp_matrices=2, tied=True),
}


class ModelRates(Strict):
    """Rates that depend on a model's implementation."""

    score_s: float | None = None
    launch_floor_s: float | None = None


class PaperHardware(Hardware):
    """The paper's machine.

    score_s : memory traffic of one score of one head.
    kv_copies, gather_kv_copies : how often a layer copies all keys and values that it received, in a chain and after an
        all-gather.
    gather_link_share : fraction of the link's bandwidth that an all-gather reaches.
    gather_floor_per_rank_s : added to the launch floor by an all-gather, per rank.
    for_models : other rates for models whose name starts with this, since another implementation runs them.
    """

    score_s: NotNegative
    kv_copies: NotNegative
    gather_kv_copies: NotNegative
    gather_link_share: float
    gather_floor_per_rank_s: NotNegative
    for_models: dict[str, ModelRates] = Field(default_factory=dict)

    def as_run_by(self, model: str) -> PaperHardware:
        """Return the rates for a model; of the entries of `for_models` that match, the longest has the last word."""
        found: dict[str, float] = {}
        for prefix in sorted(self.for_models, key=len):
            if model.startswith(prefix):
                found |= self.for_models[prefix].model_dump(exclude_none=True)
        return self.model_copy(update=found)


def paper_hardware() -> PaperHardware:
    """Read the profile that `calibrate` fitted."""
    return PaperHardware.model_validate_json((Path(__file__).parent / "data" / "paper-a100.json").read_text())


@dataclass(frozen=True, slots=True)
class PaperCosts:
    """Costs of one layer on one rank; those of an all-gather are as for `PaperHardware`."""

    costs: Costs
    gather_floor_per_rank_s: float
    gather_copy_token_s: float
    gather_link_share: float


def costs_on_paper(model: str, hardware: PaperHardware, link_bytes_per_s: float | None = None) -> PaperCosts:
    """Return the costs of a model of the paper on a machine; `link_bytes_per_s` replaces the profile's."""
    work, rates = SHAPES[model].workload(model), hardware.as_run_by(model)
    costs = costs_of(work, rates, link_bytes_per_s=link_bytes_per_s)
    copied_s = 2 * work.kv_bytes / rates.memory_bytes_per_s  # each copy reads and writes
    costs = replace(
        costs,
        pair_s=costs.pair_s + work.heads * rates.score_s,
        copy_token_s=rates.kv_copies * copied_s,
        head_s=work.head_flop / rates.gemm_flop_per_s,
    )
    gathered_s = rates.gather_kv_copies * copied_s
    return PaperCosts(costs, rates.gather_floor_per_rank_s, gathered_s, rates.gather_link_share)


def single_seconds(costs: Costs, tokens: float) -> float:
    """Time to the first token of one process."""
    layer_s = tokens * costs.token_s + tokens**2 * costs.pair_s
    return costs.layers * max(layer_s, costs.launch_floor_s) + costs.head_s * tokens


def tsp_seconds(paper: PaperCosts, tokens: float, ranks: int) -> float:
    """Time to the first token of tensor and sequence parallelism (section 3): even slices, an all-gather per layer.

    Every rank attends to the whole prompt, and masks the tokens after its own (Fig. 4).
    """
    costs, own = paper.costs, tokens / ranks
    gather_bytes_per_s = costs.link_bytes_per_s * paper.gather_link_share
    gather_s = costs.link_latency_s * (ranks - 1) + (tokens - own) * costs.kv_bytes / gather_bytes_per_s
    work_s = own * (costs.token_s + tokens * costs.pair_s) + tokens * paper.gather_copy_token_s
    floor_s = costs.launch_floor_s + ranks * paper.gather_floor_per_rank_s
    return costs.layers * max(costs.layer_s + gather_s + work_s, floor_s) + costs.head_s * own


def store_and_forward(costs: Costs, splits: Array) -> Array:
    """Seconds to the first token (splits,) if a rank forwards the whole prefix at once (section 4.1).

    A message starts when the sender has the prefix and its own keys and values, and the receiver has started its layer
    and posted its receive. Attention waits for the prefix; a layer ends when its message is sent.

    splits : lengths of slices in tokens (splits, ranks).
    """
    count, ranks = splits.shape
    bounds = np.cumsum(splits, axis=1)
    before_s, after_s = costs.around_attention(splits, 1.0, ranks)
    attention_s = splits * bounds * costs.pair_s
    copy_s = bounds * costs.copy_token_s
    copy_s[:, 0] = 0.0
    message_s = costs.link_latency_s + (bounds - splits) * costs.kv_bytes / costs.link_bytes_per_s
    message_s[:, 0] = 0.0
    hops_s = np.cumsum(message_s + copy_s, axis=1)
    ends = np.zeros((count, ranks))
    for layer in range(costs.layers):
        starts = np.maximum(ends, layer * costs.launch_floor_s)
        # Rank i has all keys and values once it has its own and those from rank i - 1 have arrived: a running maximum.
        alone = np.maximum(starts + before_s, starts + message_s) + copy_s
        complete = np.maximum.accumulate(alone - hops_s, axis=1) + hops_s
        ends = complete + attention_s
        sent = np.maximum(complete[:, :-1], starts[:, 1:]) + message_s[:, 1:]
        ends[:, :-1] = np.maximum(ends[:, :-1], sent)
        ends += after_s
    return np.maximum(ends[:, -1], costs.layers * costs.launch_floor_s) + costs.head_s * splits[:, -1]


def best_lengths(costs: Costs, tokens: float, ranks: int) -> list[float]:
    """Slice lengths with the shortest time to the first token that a descent from slices of equal time finds."""
    start = np.array(equal_time(tokens, costs.rates(ranks)))
    found = descend(lambda splits: store_and_forward(costs, splits), neighbors, start, rounds=400, smallest=1 / 4096)
    return list(map(float, found))


def chain_seconds(costs: Costs, lengths: Sequence[float]) -> float:
    """Time to the first token of a chain with slices of these lengths in tokens."""
    return float(store_and_forward(costs, np.array([lengths], dtype=float))[0])
