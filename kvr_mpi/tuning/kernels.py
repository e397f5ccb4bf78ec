"""Chooses the fastest implementation of each kind of product and of attention by measurement.

Each implementation is timed in turn with torch's own at the row counts that matter (`model.kernels.ROWS`), once per
processor, number of threads, torch version and model shapes. An implementation that differs from torch's on random
numbers, at any row count, is not used. All ranks of a host measure at the same time, since they also compute at the
same time; each measures half of the kinds, and all choose the same implementations. The results are cached in
``KVR_CACHE``; later jobs repeat the measurement if other programs ran meanwhile. Before use, every job tests the whole
model with the chosen implementations on a few tokens (`prefill.self_check`).
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import xxhash
from pydantic import Field, ValidationError

from kvr_mpi.disk import read_regular, replacing
from kvr_mpi.errors import counted
from kvr_mpi.kv.attention import name_attention, why_no_new_flash
from kvr_mpi.logs import RankLogger
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.cpu_attention import DTYPES, HALVES, CpuAttention, KernelLibrary
from kvr_mpi.model.fused import TRIAL_TOKENS, FusedForward, fuse_functions, fuse_rows
from kvr_mpi.model.kernels import PLAIN, ROWS, Ways, give_kernel, kernel_of
from kvr_mpi.model.narrow_product import NARROW, NarrowWeights
from kvr_mpi.model.norms import fuse_norms
from kvr_mpi.model.products import LAYOUTS, find_products, give_products, narrow_weights
from kvr_mpi.plain import Strict
from kvr_mpi.transport import Transport, gather_json, host_by_host, share_json, together
from kvr_mpi.tuning.candidates import (
    TURNS_ROWS,
    Candidates,
    Compute,
    attention_candidates,
    attention_name,
    product_candidates,
)
from kvr_mpi.tuning.compiled_attention import open_attention
from kvr_mpi.tuning.identity import processor_key

# Minimum speed-up for choosing an implementation; and, at some number of rows, for a second copy of weights.
LEAST_GAIN, LEAST_COPY_GAIN = 1.03, 1.1
# All copies together may take this share of the free memory.
COPY_SHARE = 0.25
# Models with a smaller hidden size gain too little to compile kernels.
LEAST_FEATURES = 256
PAIRS, SAMPLE_S = 5, 1e-3
# Later jobs measure again, up to this many times, if a rank had its processor for less than this share of the time.
QUIET_SHARE, MOST_TRIES = 0.9, 3
# Longer calls are not measured; the result for fewer rows is used.
MOST_CALL_S = 0.2
# Results are compared at these numbers of rows. Our kernels divide rows into pieces of at most 192. Like 512 rows, the
# largest number makes several pieces, the last with a partial tile; with 512, an LM head would take seconds.
COMPARED_ROWS = (*ROWS[:-1], 205)
# But not where torch alone would take this long: its 16-bit products may be slow, and kinds share their kernels.
MOST_COMPARED_S = 1.0
# Rows with which products in a model's dtype are timed against other dtypes, how much slower they are if jobs warn,
# and what another dtype costs.
SLOW_ROWS, SLOW_FACTOR = 64, 2.0
FASTER_DTYPES = {torch.float32: "takes twice the memory", torch.bfloat16: "is less precise"}
MOST_FILE_BYTES = 1 << 20

Gains = dict[str, dict[str, list[float]]]


class _Kept(Strict):
    """A cached measurement: the speed-up of each implementation at each of `ROWS`; all 0 if its results are wrong.

    busy_share : share of the measuring time in which a rank had its processor; the minimum over the host's ranks.
    tries : number of jobs that have measured; the gains are from the job with the largest share.
    """

    holds_for: str
    rows: list[int]
    gains: dict[str, dict[str, list[Annotated[float, Field(ge=0, le=1e6)]]]]
    busy_share: Annotated[float, Field(ge=0)]
    tries: Annotated[int, Field(ge=1)]

    @property
    def is_final(self) -> bool:
        """Whether later jobs use this measurement without repeating it."""
        return self.busy_share >= QUIET_SHARE or self.tries >= MOST_TRIES


def choose_kernels(loaded: LoadedModel, world: Transport, free_bytes: int, cache_dir: Path, logger: RankLogger) -> None:
    """Measure, choose and prepare kernels; every rank calls this. On GPUs nothing is measured."""
    if any(share_json(world, gather_json(world, loaded.device.type != "cpu"))):
        fuse_on_gpus(loaded, world, logger)
        return
    attention = host_by_host(world, lambda: _open_attention(loaded, cache_dir, logger, compiles=world.local_rank == 0))
    with torch.inference_mode():
        room = COPY_SHARE * free_bytes
        narrowed = {} if attention is None else narrow_weights(loaded.model, attention, room)
        kinds = [
            *product_candidates(loaded.model, room, attention, narrowed),
            *attention_candidates(loaded, attention),
        ]
        holds_for = _holds_for(kinds, attention)
        key = xxhash.xxh3_64_hexdigest(holds_for.encode())
        file = cache_dir / "kernels" / f"{key}.json"
        known = _read(file, holds_for, kinds)
        is_known = known is not None and known.is_final
        if not is_known:
            again = "" if known is None else "; repeated, since other programs ran during the last measurement"
            logger.info(f"measuring CPU kernels (once per machine){again}")
        alike = [socket.gethostname(), key]  # of all ranks with the same kinds on the same host
        here = [rank for rank, view in enumerate(share_json(world, gather_json(world, alike))) if view == alike]
        half = slice(here.index(world.rank) % 2, None, 2) if len(here) > 1 else slice(None)
        mine = together(world, partial(_known_or_measured, known, kinds[half]))
        views = share_json(world, gather_json(world, mine))
        gains, share = _middle([views[rank][0] for rank in here]), min(views[rank][1] for rank in here)
        for name, way in _wrong_ways(gains):
            logger.warning(f"{name}: {way} is not used, since its results differ from plain torch")
        ways = choose_ways(gains, _copy_bytes(loaded.model, narrowed), room)
    chosen = "; ".join(f"{name}: {', '.join(way)}" for name, way in ways.items())
    logger.debug(f"kernels: {chosen or 'those of torch'}")
    if attention is not None and (taken := ways.get(attention_name(loaded))) is not None:
        give_kernel(loaded.model, CpuAttention(attention, taken))
    del kinds
    if not is_known and world.local_rank == 0:
        tries = 1 if known is None else known.tries + 1
        _keep(file, _Kept(holds_for=holds_for, rows=list(ROWS), gains=gains, busy_share=share, tries=tries), logger)
    give_products(loaded.model, ways, attention, narrowed)
    if attention is not None:
        fused = fuse_rows(loaded.model, attention.rows)
        logger.debug(f"in one pass: {', '.join(f'{count} {name}' for name, count in fused.items())}")


def fuse_on_gpus(loaded: LoadedModel, world: Transport, logger: RankLogger) -> None:
    """On GPUs, fuse a model's functions and norms, each on all ranks or on none; every rank calls this."""
    fused: dict[torch.nn.Module, FusedForward] = {}
    if loaded.device.type == "cuda":
        ids = loaded.shape.sample_ids(min(TRIAL_TOKENS, loaded.shape.max_tokens or TRIAL_TOKENS))
        fused = fuse_functions(loaded.model, ids)
    whys: dict[str, str] = {}
    for kernel in fused.values():
        whys[kernel.function.name] = whys.get(kernel.function.name) or kernel.function.why_not
    views = share_json(world, gather_json(world, whys))
    whys = {name: next((view[name] for view in views if view.get(name)), "") for name in whys}
    for module, kernel in fused.items():
        if not whys[kernel.function.name]:
            give_kernel(module, kernel)
    for name, why in whys.items():
        logger.debug(f"{name} are {f'not fused: {why}' if why else 'fused'}")
    if loaded.device.type == "cuda":
        norms = f"{counted(fuse_norms(loaded.model), 'norm')} in one pass"
        logger.debug(f"kernels: {norms}; attention: {name_attention(loaded.device)}")
        if (why_not := why_no_new_flash(loaded.device, torch.bfloat16)) is not None:
            logger.debug(f"FlashAttention 3 or 4 is not used: {why_not}")


def _known_or_measured(known: _Kept | None, kinds: Sequence[Candidates]) -> tuple[Gains, float]:
    """Return this rank's speed-ups and its share of processor time; cached ones if their share is larger.

    The ranks of a host may see different cache files; `_middle` makes their choice the same.
    """
    if known is not None and known.is_final:
        return known.gains, known.busy_share
    began_s, ran_s = time.perf_counter(), time.thread_time()
    gains = measure_gains(kinds)
    share = (time.thread_time() - ran_s) / (time.perf_counter() - began_s)
    if known is not None and known.busy_share > share:
        wrong = {(name, way): [0.0] * len(ROWS) for name, way in _wrong_ways(gains)}
        known_gains = {
            name: {way: wrong.get((name, way), row) for way, row in ways.items()} for name, ways in known.gains.items()
        }
        return known_gains, known.busy_share
    return gains, share


def _open_attention(
    loaded: LoadedModel, cache_dir: Path, logger: RankLogger, *, compiles: bool
) -> KernelLibrary | None:
    """Load the compiled kernels if the model's dtype is supported and the model is large enough."""
    if loaded.dtype not in DTYPES or loaded.model.config.get_text_config().hidden_size < LEAST_FEATURES:
        return None
    return open_attention(cache_dir, logger, compiles=compiles)


def _copy_bytes(model: torch.nn.Module, narrowed: Mapping[torch.nn.Linear, NarrowWeights]) -> dict[str, dict[str, int]]:
    """Return the bytes that copies of the weights take, by shape and implementation."""
    return {
        shape: {
            **dict.fromkeys(LAYOUTS, sum(layer.weight.nbytes for layer in layers)),
            NARROW: sum(narrowed[layer].nbytes for layer in layers if layer in narrowed),
        }
        for shape, layers in find_products(model).items()
    }


def measure_gains(kinds: Sequence[Candidates]) -> Gains:
    """Time every implementation of every kind, alternating with torch's.

    A speed-up is 0 at row counts that would take too long, and at all of them if the results are wrong at any.
    """
    gains: Gains = {}
    for kind in kinds:
        calls = {way: make() for way, make in kind.ways.items()}
        taken_s, rows = 0.0, [{way: 0.0 for way in calls} for _ in ROWS]
        for at, count in enumerate(ROWS):
            if taken_s * count < MOST_CALL_S:
                rows[at] = _gains_of(kind, calls, count)
                taken_s = rows[at][PLAIN] / count
        right = _right_ways(kind, calls, [count for count in COMPARED_ROWS if taken_s * count < MOST_COMPARED_S])
        gains[kind.name] = {
            way: [row[way] for row in rows] if way in right else [0.0] * len(ROWS) for way in calls if way != PLAIN
        }
    return gains


def _gains_of(kind: Candidates, calls: Mapping[str, Sequence[Compute]], count: int) -> dict[str, float]:
    """Return the speed-up of each implementation at a number of rows; for `PLAIN` the best time in seconds."""
    rows = kind.rows(count)
    turns = {way: each if count <= TURNS_ROWS else each[:1] for way, each in calls.items() if kind.tries(way, count)}
    once = {way: _seconds(each, rows, 1) for way, each in turns.items()}
    repeats = max(1, min(100, int(SAMPLE_S / max(min(once.values()), 1e-6))))
    times: dict[str, list[float]] = {way: [] for way in turns}
    for pair in range(PAIRS):
        for way in list(turns)[:: 1 if pair % 2 else -1]:
            times[way].append(_seconds(turns[way], rows, repeats))
    plain = times[PLAIN]
    gains = {way: median(a / b for a, b in zip(plain, found, strict=True)) for way, found in times.items()}
    return dict.fromkeys(calls, 1.0) | gains | {PLAIN: min(plain) / repeats / len(turns[PLAIN])}


def _right_ways(kind: Candidates, calls: Mapping[str, Sequence[Compute]], counts: Sequence[int]) -> set[str]:
    """Return the implementations that give torch's results at those of these numbers of rows where they may be used."""
    right = {*calls}
    for rows in map(kind.rows, counts):
        truth = calls[PLAIN][0](rows)
        right -= {
            way for way in right - {PLAIN} if kind.tries(way, len(rows)) and not is_same(truth, calls[way][0](rows))
        }
    return right


@torch.inference_mode()
def describe_slow_dtype(loaded: LoadedModel) -> str | None:
    """Say how much slower a 16-bit model's products are than in another dtype on this CPU, as its kernels compute them.

    The others are float32 and, for a float16 model, bfloat16. Returns None if none is much faster, or on GPUs. The
    products of most multiplications per layer are timed.
    """
    products = find_products(loaded.model)
    if loaded.dtype not in HALVES or loaded.device.type != "cpu" or not products:
        return None
    layer = max(products.values(), key=lambda layers: (len(layers) > 1, len(layers) * layers[0].weight.numel()))[0]
    kernel = kernel_of(layer)
    own = partial(torch.nn.functional.linear, weight=layer.weight, bias=layer.bias) if kernel is None else kernel
    others = [dtype for dtype in FASTER_DTYPES if dtype.itemsize > 2 or loaded.dtype == torch.float16]
    calls = {dtype: partial(torch.nn.functional.linear, weight=layer.weight.to(dtype)) for dtype in others}
    rows = torch.randn(SLOW_ROWS, layer.in_features, generator=torch.Generator().manual_seed(0))
    times_s: dict[torch.dtype, list[float]] = {dtype: [] for dtype in (loaded.dtype, *others)}
    for _ in range(PAIRS):
        for dtype, each in times_s.items():
            each.append(_seconds([calls.get(dtype, own)], rows.to(dtype), 1))
    best_s = {dtype: min(each) for dtype, each in times_s.items()}  # other programs may disturb some of them
    fastest = min(others, key=best_s.__getitem__)
    ratio = best_s[loaded.dtype] / best_s[fastest]
    if ratio < SLOW_FACTOR:
        return None
    name, faster = (str(dtype).removeprefix("torch.") for dtype in (loaded.dtype, fastest))
    return (
        f"{name} is slow on this processor: matrix products take {ratio:.1f} times as long as in "
        f"{faster}. Set model.dtype = '{faster}', which {FASTER_DTYPES[fastest]}, or model.kernels = 'measured' with a "
        "C++ compiler"
    )


def _seconds(calls: Sequence[Compute], rows: torch.Tensor, repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        for call in calls:
            call(rows)
    return time.perf_counter() - began


def choose_ways(gains: Gains, copy_bytes: Mapping[str, Mapping[str, int]], room: float) -> dict[str, Ways]:
    """Choose each kind's implementation at each number of rows; omit kinds for which torch is always chosen.

    copy_bytes : bytes of a second copy of the weights, by shape and by the implementation that reads it.
    room : bytes available for copies; the shapes that gain most come first.
    """
    chosen = {}
    for name in sorted(gains, key=lambda one: -max((max(row) for row in gains[one].values()), default=0.0)):
        sizes, found = copy_bytes.get(name, {}), _with_one_layout(gains[name])
        while True:
            ways = _fastest(found)
            most = {
                way: max(found[way][at] for at, taken in enumerate(ways) if taken == way) for way in {*ways} & {*sizes}
            }
            needed = sum(sizes[way] for way in most)
            if not most or (min(most.values()) >= LEAST_COPY_GAIN and needed <= room):
                break
            del found[min(most, key=most.__getitem__)]  # gains too little for its memory, or does not fit
        room -= needed
        if set(ways) != {PLAIN}:
            chosen[name] = ways
    return chosen


def _with_one_layout(gains: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Keep only one of the `LAYOUTS` of weights: the one with the larger product of speed-ups, where measured."""
    layouts = [way for way in LAYOUTS if any(gains.get(way, ()))]
    best = max(layouts, key=lambda way: math.prod(gain or 1.0 for gain in gains[way]), default=None)
    return {way: row for way, row in gains.items() if way == best or way not in layouts}


def _fastest(gains: Mapping[str, Sequence[float]]) -> Ways:
    """Return the fastest implementation at each number of rows.

    Unmeasured row counts use the choice for fewer rows, except `NARROW`, whose kernels are only for few rows.
    """
    ways: list[str] = []
    for at in range(len(ROWS)):
        best = max(gains, key=lambda way: gains[way][at], default=PLAIN)
        if best != PLAIN and not gains[best][at]:
            best = ways[-1] if ways and ways[-1] != NARROW else PLAIN
        elif best != PLAIN and gains[best][at] < LEAST_GAIN:
            best = PLAIN
        ways.append(best)
    return tuple(ways)


def _middle(found: Sequence[Gains]) -> Gains:
    """Return the median over a host's ranks, each of which measured some of the kinds; 0 where any of them has 0."""
    rows: dict[str, dict[str, list[list[float]]]] = {}
    for name, ways in (item for gains in found for item in gains.items()):
        for way, row in ways.items():
            rows.setdefault(name, {}).setdefault(way, []).append(row)
    return {
        name: {
            way: [median(each) if all(each) else 0.0 for each in zip(*same, strict=True)] for way, same in ways.items()
        }
        for name, ways in rows.items()
    }


def _wrong_ways(gains: Gains) -> list[tuple[str, str]]:
    """List kinds and their implementations that gave wrong results."""
    return [(name, way) for name, ways in gains.items() for way, row in ways.items() if not any(row)]


def _holds_for(kinds: Sequence[Candidates], attention: KernelLibrary | None) -> str:
    """Return a text with everything that a measurement, and whether results are right, depends on."""
    of_ours = "" if attention is None else f", attention {attention.identity}"
    what = sorted(f"{kind.name} {kind.dtype} {'/'.join(kind.ways)}" for kind in kinds)
    build = f"torch {torch.__version__} {xxhash.xxh3_64_hexdigest(torch.__config__.show().encode())}"
    return f"{processor_key()}, {torch.get_num_threads()} threads, compared with {build}{of_ours}: {'; '.join(what)}"


def _read(file: Path, holds_for: str, kinds: Sequence[Candidates]) -> _Kept | None:
    """Read a cached measurement; None if there is none for these kinds."""
    try:
        kept = _Kept.model_validate_json(read_regular(file, MOST_FILE_BYTES))
    except (OSError, ValidationError):
        return None
    expected = {kind.name: set(kind.ways) - {PLAIN} for kind in kinds}
    same = {name: set(ways) for name, ways in kept.gains.items()} == expected
    whole = all(len(row) == len(ROWS) for ways in kept.gains.values() for row in ways.values())
    return kept if same and whole and kept.holds_for == holds_for and kept.rows == list(ROWS) else None


def _keep(file: Path, kept: _Kept, logger: RankLogger) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(file) as stream:
            stream.write(kept.model_dump_json(indent=1).encode() + b"\n")
    except OSError as error:
        if isinstance(error, FileExistsError) and file.parent.is_dir():
            return  # another host is writing it
        logger.warning(f"kernel measurements are not saved: {file} cannot be written ({error.strerror or error})")


def is_same(truth: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether two results differ only by rounding; False if a value is not finite."""
    allowed = 1e-5 if truth.dtype == torch.float32 else 2e-2
    largest = float(truth.float().abs().max())
    return float((truth.float() - found.float()).abs().max()) <= allowed * max(largest, 1e-30)
