"""Costs of decoding a wave of documents: data-parallel, or head-parallel over all ranks.

Data-parallel, a rank reads all weights for its own documents only. Head-parallel, every rank reads only its part of the
weights for all documents, but every layer has two all-reduces, keys and values must first be sent to their owners, and
in each layer all ranks wait for the one with the most attention work (`placement.sync_efficiency`). Jobs and ``kvr
plan`` choose ``[decode] mode = "auto"`` by these costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.errors import counted
from kvr_mpi.transport.collectives import SMALL_BYTES

# All-reduces of a layer, after attention and after the MLP; and of a step, to choose and to share its tokens.
SUMS_OF_LAYER, SUMS_OF_STEP = 2, 2
# Required speed-up in the forecast. The forecast ignores that a head-parallel wave ends with its longest answer, and
# that disturbed ranks delay each other in every layer.
LEAST_GAIN = 1.1


@dataclass(frozen=True, slots=True)
class Wave:
    """Documents that a chain decodes together.

    documents : of all ranks.
    ranks : of the chain.
    kept_tokens : per document and KV head, on average.
    new_tokens : per answer.
    hidden_bytes : of a token's hidden state between layers.
    """

    documents: int
    ranks: int
    kept_tokens: float
    new_tokens: int
    hidden_bytes: float

    @property
    def own_documents(self) -> int:
        """Documents of the rank with the most."""
        return -(-self.documents // self.ranks)


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """The chosen decode mode, with the reason."""

    mode: str
    why: str

    def __str__(self) -> str:
        """Describe the choice for logs and plans."""
        return f"decode.mode = 'auto': {self.mode}, since {self.why}"


def step_seconds(
    costs: Costs, wave: Wave, efficiency: float, measured_s: tuple[float, float] | None = None
) -> tuple[float, float]:
    """Return the times of a data-parallel and a head-parallel step, the latter with its share of sending the KV cache.

    efficiency : of the placement of heads on ranks (`placement.sync_efficiency`).
    measured_s : both times without attention, measured on these ranks; default: computed from `costs`.
    """
    apart_s, shared_s = measured_s or (
        costs.step_s + (wave.own_documents - 1) * costs.row_s,
        _shared_rows_s(costs, wave),
    )
    kept_token_bytes = costs.layers * costs.kv_bytes
    attention_s = wave.documents * wave.kept_tokens * costs.decode_key_s / (wave.ranks * efficiency)
    given = wave.own_documents * wave.kept_tokens * kept_token_bytes * (wave.ranks - 1) / wave.ranks
    return (
        apart_s + wave.own_documents * wave.kept_tokens * costs.decode_key_s,
        shared_s + attention_s + given / costs.link_bytes_per_s / max(1, wave.new_tokens),
    )


def _shared_rows_s(costs: Costs, wave: Wave) -> float:
    """Time of the products with a rank's part of the weights, and of the all-reduces."""
    weights_s = max(costs.step_floor_s, (costs.step_s + (wave.documents - 1) * costs.row_s) / wave.ranks)
    return weights_s + (SUMS_OF_LAYER * costs.layers + SUMS_OF_STEP) * _sum_s(costs, wave)


def _sum_s(costs: Costs, wave: Wave) -> float:
    """Time of an all-reduce built from messages (``transport.collectives``)."""
    if wave.ranks == 1:
        return 0.0
    size, messages = wave.documents * wave.hidden_bytes, wave.ranks - 1
    if size <= SMALL_BYTES:  # to every other rank at once
        return costs.link_latency_s + messages * size / costs.link_bytes_per_s
    return 2 * messages * (costs.link_latency_s + size / wave.ranks / costs.link_bytes_per_s)


def choose_decoding(
    costs: Costs, wave: Wave, efficiency: float, measured_s: tuple[float, float] | None = None
) -> DecodeChoice:
    """Choose the faster forecast; data-parallel unless head-parallel is faster by `LEAST_GAIN`.

    Parameters are those of `step_seconds`.
    """
    if wave.ranks == 1:
        return DecodeChoice("data-parallel", "there is only one rank")
    apart_s, shared_s = step_seconds(costs, wave, efficiency, measured_s)
    gain = apart_s / shared_s
    why = (
        f"for {counted(wave.documents, 'document')} on {wave.ranks} ranks, {wave.kept_tokens:.0f} tokens kept of "
        f"each, a step "
        f"is forecast to take {1e3 * apart_s:.3g} ms data-parallel, {1e3 * shared_s:.3g} ms head-parallel"
    )
    if gain >= LEAST_GAIN:
        return DecodeChoice("head-parallel", why)
    needed = f"; head-parallel requires a forecast of {LEAST_GAIN} times the speed" if gain > 1 else ""
    return DecodeChoice("data-parallel", why + needed)
