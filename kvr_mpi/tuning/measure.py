"""Measures the parameters of the cost model, and runs single instrumented prefills.

`measure_costs` makes a first estimate of all rates within seconds. `observe` runs one prompt with one partition and
returns what every rank did. Measuring is collective, but only rank 0 decides what to run and the others take part
(`follow_measurements`), so that rounding errors cannot make ranks diverge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from operator import eq, truediv
from statistics import median, median_low

from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.costs.solve import Rates
from kvr_mpi.costs.workload import workload_of
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.transport import Transport, gather_json, share_json
from kvr_mpi.transport.links import measure_links
from kvr_mpi.transport.local import LocalTransport, PretendedChain
from kvr_mpi.tuning.decode_probe import kept_token_seconds

# Slice length at which the ranks' speeds are compared.
REFERENCE_TOKENS = 1024
# Placeholder for a single rank, which has no link; the cost model does not use it.
NO_LINK_BYTES_PER_S = 1e12


@dataclass(frozen=True, slots=True)
class Observation:
    """Measurements of one prompt on a chain, in seconds.

    ttft_s : time from the common start to the first token's logits.
    busy_s : compute time of every rank, without waiting and without short disturbances.
    wait_s : time that every rank waited to receive keys and values, or to send them.
    """

    partition: Partition
    ttft_s: float
    busy_s: tuple[float, ...]
    wait_s: tuple[float, ...]


RunSlices = Callable[[Partition], Observation]


def observe(loaded: LoadedModel, chain: Transport, partition: Partition) -> Observation:
    """Prefill a synthetic prompt; every rank of the chain calls this with the same partition."""
    ids = loaded.shape.sample_ids(partition.tokens, 7919, 13)
    chain.barrier()
    prefill = prefill_kvr(loaded, ids, partition, chain)
    waited_s = prefill.wait_s + prefill.send_wait_s
    kinds = getattr(loaded.model.config.get_text_config(), "layer_types", None) or []
    busy_s = undisturbed_seconds(prefill.seconds - waited_s, prefill.layer_times_s, kinds)
    everyone = share_json(chain, gather_json(chain, [prefill.seconds, busy_s, waited_s]))
    seconds, busy, waits = zip(*everyone, strict=True)
    return Observation(partition, seconds[-1], busy, waits)


def undisturbed_seconds(busy_s: float, layer_times_s: Sequence[float], kinds: Sequence[str]) -> float:
    """Return a rank's computing time if every layer took the median time of its kind.

    A temporary disturbance, such as another process, slows down a few layers; this removes it from the time.

    busy_s : time without waiting.
    layer_times_s : when each layer's keys were computed, on a clock that stops while the rank waits.
    kinds : kind of each layer; layers of a kind take the same time. Empty: all layers are alike.
    """
    steps: dict[str, list[float]] = defaultdict(list)
    for layer, (before, after) in enumerate(pairwise(layer_times_s)):
        steps[kinds[layer] if kinds else ""].append(after - before)
    return busy_s + sum(len(times) * median(times) - sum(times) for times in steps.values())


@contextmanager
def leading(loaded: LoadedModel, chain: Transport) -> Iterator[RunSlices]:
    """On rank 0: yield a function that observes a partition on all ranks; at the end, let the other ranks return."""

    def run(partition: Partition) -> Observation:
        share_json(chain, partition.bounds)
        return observe(loaded, chain, partition)

    yield run
    share_json(chain, None)  # not after an exception, which ends all ranks


def follow_measurements(loaded: LoadedModel, chain: Transport) -> None:
    """On the other ranks: take part in rank 0's measurements until it has finished."""
    while (bounds := share_json(chain, None)) is not None:
        observe(loaded, chain, Partition(tuple(bounds)))


def measure_costs(loaded: LoadedModel, world: Transport) -> Costs:
    """Measure compute rates, fixed times and links in a few seconds; every rank calls this and gets the same result.

    The model must be ready for chains (``attention_hook.prepare_model``). The costs are those of the median rank;
    `speeds` has the ranks' speeds relative to it if they differ, in the order of `world`.
    """
    rates = measure_rates(loaded, world)
    head_s, floor_s = _fixed_seconds(loaded, world)
    latency_s, bytes_per_s = _slowest_link(loaded, world)
    shape = loaded.shape
    work = workload_of(loaded.model.config, shape.dtype_bytes)
    times = [rate.seconds(REFERENCE_TOKENS, 0) for rate in rates]
    usual_s = median_low(times)
    usual = rates[times.index(usual_s)]
    before = work.qkv_flop / (work.qkv_flop + work.rest_flop)
    # Attention of a decode step can be timed separately only where our own attention runs in every layer.
    is_timed = loaded.attends_in_parts and not shape.has_states and not shape.has_latents
    is_timed = is_timed and all(layer.elements for layer in shape.layers)
    return Costs(
        layers=work.layers,
        qkv_token_s=usual.token_s * before,
        rest_token_s=usual.token_s * (1 - before),
        pair_s=usual.pair_s,
        layer_s=0.0,
        launch_floor_s=floor_s,
        kv_bytes=shape.kv_bytes_per_token / len(shape.layers),
        link_bytes_per_s=bytes_per_s,
        link_latency_s=latency_s,
        head_s=head_s,
        kept_token_s=kept_token_seconds(loaded, world) if is_timed else None,
        speeds=None if len(set(times)) == 1 else tuple(usual_s / seconds for seconds in times),
    )


def _fixed_seconds(loaded: LoadedModel, world: Transport) -> tuple[float, float]:
    """Measure the LM head and the minimum time of a layer, with a prompt of one token, on the slowest rank."""
    ids, layers = loaded.shape.sample_ids(1, 1, 0), len(loaded.shape.layers)
    world.barrier()
    whole_s, body_s, first_s = (
        min(
            prefill_kvr(loaded, ids, Partition((0, 1)), LocalTransport(), stop_after=stop_after).seconds
            for _ in range(ROUNDS)
        )
        for stop_after in (None, layers, 1)
    )
    floor_s = max(0.0, (body_s - first_s) / max(1, layers - 1))
    found = [max(0.0, whole_s - body_s - floor_s), floor_s]  # the difference includes the rest of the last layer
    everyone = share_json(world, gather_json(world, found))
    return max(head_s for head_s, _ in everyone), max(floor_s for _, floor_s in everyone)


def _slowest_link(loaded: LoadedModel, world: Transport) -> tuple[float, float]:
    """Return latency and bandwidth of the slowest link, which limits the chain."""
    link = measure_links(world, loaded.device)
    found = gather_json(world, None if link is None else (link.latency_s, link.bytes_per_s))
    links = [each for each in share_json(world, found) if each]
    if not links:
        return 0.0, NO_LINK_BYTES_PER_S
    return max(latency_s for latency_s, _ in links), min(bytes_per_s for _, bytes_per_s in links)


LAYERS = 2
# Tokens of the slice and of the prefix, enough to keep the device busy. On CPUs a slice takes about twice as long with
# the prefix. A GPU computes 512 tokens faster than their kernels are launched, so the measured time per pair of tokens
# would be several times too long.
PROBES = {"cpu": (256, 4096), "cuda": (8192, 16384)}
# Runs of each measurement.
ROUNDS = 4
# Ranks that differ by less than this ratio count as equal: the difference is noise.
SAME_WITHIN = 1.25


def measure_rates(loaded: LoadedModel, transport: Transport) -> list[Rates]:
    """Time a slice with and without a prefix, and solve for both rates of each rank; alike on all ranks.

    Slices of equal time depend only on the ratio of both times. They are measured in turn, and medians are used, since
    on shared machines all times vary from second to second.
    """
    layers, period = _layers_timed(loaded.shape.layers)
    tokens, prefix = _probe_lengths(loaded.device.type, loaded.shape.max_tokens)
    longest = tokens + prefix
    alone, after_prefix = list[float](), list[float]()
    transport.barrier()
    for _ in range(ROUNDS):
        alone += _layer_seconds(loaded, Partition((0, tokens)), LocalTransport(), layers, period)
        after_prefix += _layer_seconds(loaded, Partition((0, prefix, longest)), PretendedChain(), layers, period)
    alone_s, ratio = median(alone), median(map(truediv, after_prefix, alone))
    pair_s = max(0.0, (ratio - 1) * alone_s / (tokens * prefix))
    token_s = alone_s / tokens - pair_s * tokens / 2
    if token_s <= 0:  # the slice is too short, or the times too noisy, to separate the rates
        pair_s, token_s = 0.0, alone_s / tokens
    everyone = [Rates(*pair) for pair in share_json(transport, gather_json(transport, [token_s, pair_s]))]
    times = [rates.seconds(longest, 0) for rates in everyone]
    if max(times) < SAME_WITHIN * min(times):
        return [everyone[times.index(median_low(times))]] * len(everyone)
    return everyone


def _probe_lengths(device: str, max_tokens: int | None) -> tuple[int, int]:
    """Return the lengths of a slice and its prefix that fit into the model's context."""
    tokens, prefix = PROBES.get(device, PROBES["cpu"])
    longest = max(2, min(tokens + prefix, max_tokens or tokens + prefix))
    tokens = min(tokens, longest // 2)
    return tokens, longest - tokens


def _layers_timed(layers: Sequence[LayerShape]) -> tuple[int, int]:
    """Return how many layers are timed, and the period in which kinds of layers alternate.

    Only layers up to the last with a cache are timed: later layers do not record when they begin.
    """
    most = max(at for at, layer in enumerate(layers) if layer.elements or layer.states)
    known = layers[: most + 1]
    period = next((one for one in range(1, most + 1) if all(map(eq, known, known[one:]))), most)
    return (period * min(most // period, -(-LAYERS // period)), period) if period else (0, 0)


def _layer_seconds(
    loaded: LoadedModel, partition: Partition, chain: Transport, layers: int, period: int
) -> list[float]:
    """Time layers in one run, each from its start to the start of the next layer of the same kind."""
    ids = loaded.shape.sample_ids(partition.tokens, 1, 0)
    if layers == 0:  # a model of one layer
        return [prefill_kvr(loaded, ids, partition, chain).seconds]
    begins_s = prefill_kvr(loaded, ids, partition, chain, stop_after=1 + layers).layer_times_s
    return [max(last - first, 1e-9) / period for first, last in pairwise(begins_s[: 1 + layers : period])]
