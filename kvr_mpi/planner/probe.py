"""Measure what a token and what a query-key pair cost on this machine, in a second or two.

The numbers feed `solve.equal_time`. All ranks measure at once, so that they share caches and memory as they
will when they work.
"""

from __future__ import annotations

from kvr_mpi.model import LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.planner.solve import Rates
from kvr_mpi.prefill.strategies import prefill_kvr
from kvr_mpi.transport import Transport, gather_json, share_json
from kvr_mpi.transport.local import LocalTransport

LAYERS = 3
SHORT_TOKENS, LONG_TOKENS = 512, 2048
REPEATS = 5
# Ranks that differ by less than this are the same machine, and the difference is noise.
SAME_WITHIN = 1.25


def measure_rates(loaded: LoadedModel, transport: Transport) -> list[Rates]:
    """Time the first layers of the model on two prompts and solve for the two rates of every rank.

    Returns
    -------
    list of Rates
        One for each rank, the same list on every rank.
    """
    layers = min(LAYERS, len(loaded.shape.layers))
    longest = min(LONG_TOKENS, loaded.shape.max_tokens or LONG_TOKENS)
    shortest = max(1, min(SHORT_TOKENS, longest // 4))
    short_s, long_s = (_layer_seconds(loaded, transport, tokens, layers) for tokens in (shortest, longest))
    # t(n) = a n + b n^2 / 2, so t(n) / n is a line in n.
    pair_s = 2 * (long_s / longest - short_s / shortest) / (longest - shortest)
    token_s = short_s / shortest - pair_s * shortest / 2
    if pair_s <= 0 or token_s <= 0:  # too short or too noisy to tell them apart: the even share of both
        pair_s, token_s = 0.0, long_s / longest
    everyone = [Rates(*pair) for pair in share_json(transport, gather_json(transport, [token_s, pair_s]))]
    times = [rates.seconds(longest, 0) for rates in everyone]
    if max(times) < SAME_WITHIN * min(times):
        return [everyone[times.index(min(times))]] * len(everyone)
    return everyone


def _layer_seconds(loaded: LoadedModel, transport: Transport, tokens: int, layers: int) -> float:
    ids = [position % loaded.shape.vocab_size for position in range(tokens)]
    alone, whole = LocalTransport(), Partition((0, tokens))
    times = []
    for _ in range(REPEATS + 1):
        transport.barrier()
        times.append(prefill_kvr(loaded, ids, whole, alone, stop_after=layers).seconds)
    return min(times[1:]) / layers  # what disturbs a run only ever makes it longer
