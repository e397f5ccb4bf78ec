"""Measure what a token and what a query-key pair cost on this machine, in a few seconds.

The numbers feed `solve.equal_time`. One slice is timed twice over the first layers: at the prompt's start, and after
a pretended prefix, which costs only what attending to it costs. All ranks measure at once, so that they share
caches and memory as they will when they work.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq

from kvr_mpi.costs.solve import Rates
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.transport import Transport, gather_json, share_json
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.transport.pretended import PretendedChain

LAYERS = 3
# Tokens of the slice, and of the prefix: enough to keep the device busy. A GPU has done 768 tokens before it has been
# told of them all, and what it takes for a pair of tokens would seem to be a multiple of the truth.
PROBES = {"cpu": (768, 3072), "cuda": (8192, 16384)}
REPEATS = 5
# Ranks that differ by less than this are the same machine, and the difference is noise.
SAME_WITHIN = 1.25


def measure_rates(loaded: LoadedModel, transport: Transport) -> list[Rates]:
    """Time a slice without and with a prefix, and solve for the two rates of every rank.

    Returns
    -------
    list of Rates
        One for each rank, the same list on every rank.
    """
    layers = _layers_timed(loaded.shape.layers)
    tokens, prefix = _probe_lengths(loaded.device.type, loaded.shape.max_tokens)
    longest = tokens + prefix
    alone_s = _layer_seconds(loaded, transport, Partition((0, tokens)), LocalTransport(), layers)
    after_prefix_s = _layer_seconds(loaded, transport, Partition((0, prefix, longest)), PretendedChain(), layers)
    pair_s = max(0.0, (after_prefix_s - alone_s) / (tokens * prefix))
    token_s = alone_s / tokens - pair_s * tokens / 2
    if token_s <= 0:  # too short or too noisy to tell them apart
        pair_s, token_s = 0.0, alone_s / tokens
    everyone = [Rates(*pair) for pair in share_json(transport, gather_json(transport, [token_s, pair_s]))]
    times = [rates.seconds(longest, 0) for rates in everyone]
    if max(times) < SAME_WITHIN * min(times):
        return [everyone[times.index(min(times))]] * len(everyone)
    return everyone


def _probe_lengths(device: str, max_tokens: int | None) -> tuple[int, int]:
    """Say how long a slice and its prefix are, within the model's context."""
    tokens, prefix = PROBES.get(device, PROBES["cpu"])
    longest = max(2, min(tokens + prefix, max_tokens or tokens + prefix))
    tokens = min(tokens, longest // 2)
    return tokens, longest - tokens


def _layers_timed(layers: Sequence[LayerShape]) -> int:
    """Say how many layers are timed: few, but whole periods where layers of several kinds take turns."""
    most = len(layers) - 1
    period = next((one for one in range(1, most + 1) if all(map(eq, layers, layers[one:]))), most)
    return min(most, period * -(-LAYERS // period)) if period else 0


def _layer_seconds(
    loaded: LoadedModel, transport: Transport, partition: Partition, chain: Transport, layers: int
) -> float:
    """Time of one whole layer: from the first layer's keys to those of the layer `layers` after it."""
    ids = loaded.shape.sample_ids(partition.tokens, 1, 0)

    def fastest(stop_after: int | None) -> float:
        times = []
        for _ in range(REPEATS + 1):
            transport.barrier()
            times.append(prefill_kvr(loaded, ids, partition, chain, stop_after=stop_after).seconds)
        return min(times[1:])  # what disturbs a run only ever makes it longer

    if layers == 0:  # a model of one layer
        return fastest(None)
    return max(fastest(1 + layers) - fastest(1), 1e-9) / layers
