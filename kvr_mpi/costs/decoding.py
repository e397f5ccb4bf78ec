"""Costs of decoding a wave of documents: data-parallel, or head-parallel over all ranks.

Each rank its own, a rank reads all weights for its documents alone. Sharing heads, every rank reads its part of them
for all documents; but every layer ends in two sums over the ranks, keys and values are sent to their owners first, and
in each layer all wait for the rank with most to attend to (`placement.sync_efficiency`). Stands before the choice of
``[decode] mode = "auto"``, in jobs and in ``kvr plan``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.errors import counted
from kvr_mpi.transport.collectives import SMALL_BYTES

# Sums a layer ends in, after attention and after the MLP; and those that choose a step's tokens and tell them.
SUMS_OF_LAYER, SUMS_OF_STEP = 2, 2
# A forecast has to be this much better: a wave that shares heads ends with its longest answer, and ranks that are
# disturbed delay each other in every layer, which no forecast knows of.
LEAST_GAIN = 1.1


@dataclass(frozen=True, slots=True)
class Wave:
    """Documents that a chain decodes together.

    documents : of all ranks.
    ranks : of the chain.
    kept_tokens : of a KV head, on average.
    new_tokens : of an answer.
    """

    documents: int
    ranks: int
    kept_tokens: float
    new_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Costs of decode steps, in seconds.

    step_s : a token through all weights.
    floor_s : of that, what does not get less with fewer weights (launches of kernels).
    row_s : another document's token in the same step.
    kept_token_s : attending to a token that all heads keep.
    layers : of the model.
    hidden_bytes : of a token between layers.
    kept_token_bytes : keys and values of a token that all heads keep.
    link_latency_s, link_bytes_per_s : of the link between two ranks, one direction.
    measured_s : a step of a wave without what it attends to, data-parallel and head-parallel, on the ranks themselves;
        None: computed from the numbers above.
    """

    step_s: float
    floor_s: float
    row_s: float
    kept_token_s: float
    layers: int
    hidden_bytes: float
    kept_token_bytes: float
    link_latency_s: float
    link_bytes_per_s: float
    measured_s: tuple[float, float] | None = None

    def data_parallel_s(self, wave: Wave) -> float:
        """Time of a data-parallel step, which is that of the rank with the most documents."""
        own = -(-wave.documents // wave.ranks)
        rows_s = self.step_s + (own - 1) * self.row_s if self.measured_s is None else self.measured_s[0]
        return rows_s + own * wave.kept_tokens * self.kept_token_s

    def head_parallel_s(self, wave: Wave, efficiency: float) -> float:
        """Time of a head-parallel step, including its part of the redistribution of keys and values."""
        rows_s = self._shared_rows_s(wave) if self.measured_s is None else self.measured_s[1]
        attention_s = wave.documents * wave.kept_tokens * self.kept_token_s / (wave.ranks * efficiency)
        return rows_s + attention_s + self._handing_over_s(wave) / max(1, wave.new_tokens)

    def _shared_rows_s(self, wave: Wave) -> float:
        """Time of the products with a rank's part of the weights, and of the sums."""
        weights_s = max(self.floor_s, (self.step_s + (wave.documents - 1) * self.row_s) / wave.ranks)
        return weights_s + (SUMS_OF_LAYER * self.layers + SUMS_OF_STEP) * self._sum_s(wave)

    def _sum_s(self, wave: Wave) -> float:
        """Time of an all-reduce built from messages (``transport.collectives``)."""
        if wave.ranks == 1:
            return 0.0
        size, messages = wave.documents * self.hidden_bytes, wave.ranks - 1
        if size <= SMALL_BYTES:  # to every other rank at once
            return self.link_latency_s + messages * size / self.link_bytes_per_s
        return 2 * messages * (self.link_latency_s + size / wave.ranks / self.link_bytes_per_s)

    def _handing_over_s(self, wave: Wave) -> float:
        """Time to send the other ranks the heads that they own."""
        own = -(-wave.documents // wave.ranks)
        given = own * wave.kept_tokens * self.kept_token_bytes * (wave.ranks - 1) / wave.ranks
        return given / self.link_bytes_per_s


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """The chosen decode mode, with the reason."""

    mode: str
    why: str

    def __str__(self) -> str:
        """Describe the choice for logs and plans."""
        return f"decode.mode = 'auto': {self.mode}, since {self.why}"


def choose_decoding(costs: DecodeCosts, wave: Wave, efficiency: float) -> DecodeChoice:
    """Choose the faster forecast; data-parallel unless head-parallel is faster by `LEAST_GAIN`."""
    if wave.ranks == 1:
        return DecodeChoice("data-parallel", "there is only one rank")
    apart_s, shared_s = costs.data_parallel_s(wave), costs.head_parallel_s(wave, efficiency)
    gain = apart_s / shared_s
    why = (
        f"for {counted(wave.documents, 'document')} on {wave.ranks} ranks, {wave.kept_tokens:.0f} tokens kept of "
        f"each, a step "
        f"is forecast to take {1e3 * apart_s:.3g} ms data-parallel, {1e3 * shared_s:.3g} ms head-parallel"
    )
    if gain >= LEAST_GAIN:
        return DecodeChoice("head-parallel", why)
    needed = f"; sharing heads has to be forecast {LEAST_GAIN} times as fast" if gain > 1 else ""
    return DecodeChoice("data-parallel", why + needed)


def decode_costs_of(
    costs: Costs,
    *,
    hidden_bytes: float,
    step_s: float | None = None,
    floor_s: float = 0.0,
    kept_token_s: float | None = None,
) -> DecodeCosts:
    """Derive the costs of decoding from those of a layer.

    Parameters
    ----------
    hidden_bytes : float
        Of a token between layers.
    step_s, kept_token_s : float, optional
        As in `DecodeCosts`, where they are known apart, as from a profile.
    floor_s : float
        Likewise. A token measured alone tells launching and weights in one: all of it is taken to get less then.
    """
    return DecodeCosts(
        step_s=costs.layers * costs.launch_floor_s + costs.head_s if step_s is None else step_s,
        floor_s=floor_s,
        row_s=costs.layers * (costs.qkv_token_s + costs.rest_token_s),
        kept_token_s=costs.decode_key_s if kept_token_s is None else kept_token_s,
        layers=costs.layers,
        hidden_bytes=hidden_bytes,
        kept_token_bytes=costs.layers * costs.kv_bytes,
        link_latency_s=costs.link_latency_s,
        link_bytes_per_s=costs.link_bytes_per_s,
    )
