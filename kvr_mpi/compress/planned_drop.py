"""Predicts how much memory compression saves and needs during prefill.

A plan must not underestimate a rank's memory. All methods keep exactly the budget over all heads, but some distribute
it unevenly: a rank that has only some of a layer's heads may have those that keep most.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvr_mpi.compress.repeating import CHUNK_TOKENS, LINK_TOKENS
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.model import ModelShape

# Bytes for each candidate of each KV head: scores, pooled scores, and two sorts with their indices.
SORTED_BYTES = 96
# The same for each layer whose tokens are dropped late: the order of its scores.
ORDER_BYTES = 8
# Room for the instruction to repeat a text.
INSTRUCTION_TOKENS = 128
# Copies of the window's products with all keys that are alive at once in `scores.window_scores`.
PRODUCTS = 3


@dataclass(frozen=True, slots=True)
class PlannedDrop:
    """The effect of compression on the memory of the rank that prefills a prompt's last slice.

    kv_bytes : lower bound of the keys and values that are dropped.
    choosing_bytes : upper bound of the memory for choosing tokens in one layer, and for the retained positions.
    late_layers : layers that a GPU holds in addition until their tokens are dropped.
    repeated_tokens : most tokens that run through the model at once after the prefill.
    """

    kv_bytes: int
    choosing_bytes: int
    late_layers: int = 0
    repeated_tokens: int = 0

    @property
    def is_late(self) -> bool:
        """Whether tokens are dropped after the prefill, which needs memory for all of them."""
        return self.repeated_tokens > 0


def compressed_layers(shape: ModelShape) -> tuple[int, ...]:
    """Return which layers are compressed: those whose queries see all tokens."""
    return tuple(idx for idx, one in enumerate(shape.layers) if one.elements and one.visibility.size is None)


def planned_drop(
    settings: CompressSettings, shape: ModelShape, heads: int, tokens: int, stop: int | None, group_ranks: int = 1
) -> PlannedDrop | None:
    """Predict what a rank drops of a prompt; None if the whole prompt is kept.

    shape, heads : of this rank's part of the model; `heads` are the query heads of a layer.
    stop : end of the observation window; later tokens are kept. None: not known; nothing is counted as dropped.
    group_ranks : ranks that share the heads of a layer.
    """
    last = tokens if stop is None else stop
    layers, dropped = [shape.layers[idx] for idx in compressed_layers(shape)], last - settings.kept_of(last)
    if not dropped or not layers:
        return None
    is_even = settings.rule.weigh is None and settings.rule.compete is None  # all heads keep the same number
    if stop is None or (group_ranks > 1 and not is_even):
        dropped = 0
    kv_bytes = dropped * sum(one.elements for one in layers) * shape.dtype_bytes
    positions = 4 * (tokens - dropped) * sum(one.num_kv_heads for one in layers)
    head_dim, window = max(one.key_dim for one in layers), settings.observed_tokens
    products = 4 * -(-heads // min(one.num_kv_heads for one in layers)) * window * last
    late_layers, repeated = settings.rule.late_layers, 0
    candidate_bytes = SORTED_BYTES + ORDER_BYTES * late_layers
    ordered = candidate_bytes * max(one.num_kv_heads for one in layers) * group_ranks * last
    if settings.rule.repeats:  # one head at a time, and then the heads of all layers together
        chunk = min(last, CHUNK_TOKENS)
        window = repeated = chunk + LINK_TOKENS + INSTRUCTION_TOKENS
        products, ordered = 4 * window * chunk, ordered * len(layers)
    scored = PRODUCTS * products + 4 * head_dim * (last + 4 * heads * window) if window else 0
    return PlannedDrop(kv_bytes, scored + ordered + positions, late_layers, repeated)
