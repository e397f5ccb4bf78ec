"""Predicts how much memory a plan takes on each rank.

The peak memory of a rank is the sum of (1) what it held before, weights and libraries, (2) buffers of the layers in
flight, (3) on the last rank, the keys and values of all layers and tokens, or with compression those of the retained
tokens, and (4) the activations of one layer, which grow with the slice. Activations are counted: the model's own code
runs on the ``meta`` device, where tensors have shapes but no memory, and the sizes of all tensors that are alive at the
same time are added up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvr_mpi.compress.planned_drop import PlannedDrop
from kvr_mpi.errors import DocumentError, ModelError
from kvr_mpi.kv.chain import FEW_AHEAD, LAYERS_AHEAD, LAYERS_HELD
from kvr_mpi.kv.relay import Relay
from kvr_mpi.kv.rolling import Rolling
from kvr_mpi.model import LoadedModel, ModelShape, meta_model, on_meta, probe_shape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr, why_no_chunks
from kvr_mpi.transport.local import PretendedChain

# Layers to count: all layers have the same activations, and the first layer's are freed before the second runs.
LAYERS = 2
# Chunk sizes that are tried, in this order, if whole slices do not fit.
CHUNK_SIZES = (4096, 2048, 1024, 512, 256, 128)
GIB = 1 << 30
# Largest number of ranks that is tried.
MOST_RANKS = 4096
# Memory of the C library's heap, relative to the activations alive: the heap keeps freed blocks, and fragments.
# Measured with SmolLM2: 1.9 to 3.0, mostly 2.3, for slices of 256 to 3700 tokens. A GPU's allocator was not measured.
HEAP_SHARE = 2.3


class _Ledger(TorchDispatchMode):
    """Finds the peak of the bytes of all tensors that are alive at the same time, except earlier ones.

    Tensors made by ``empty`` are left out: no model's layer calls it, only our buffers of keys and values, which are
    counted separately.
    """

    def __init__(self, known: Any) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        if func is not torch.ops.aten.empty.memory_format:
            for tensor in tree_leaves(out):
                storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
                if storage is not None and storage._cdata not in self._known:
                    self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        else:
            self._known.add(out.untyped_storage()._cdata)
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return out


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a model's prefill, in addition to the weights.

    activations : returns the bytes of one layer's activations, given the tokens of a slice, which follows a prefix of
        the same length, and of its chunks (None: at once).
    takes_chunks : whether the model's layers can be run in chunks.
    on_gpu : whether prompts run on a GPU, where activations take no more than their bytes and layers are compressed
        late.
    keeps_kv : whether the decode rank keeps all layers; otherwise it releases them like the other ranks.
    """

    shape: ModelShape
    activations: Callable[[int, int | None], int]
    takes_chunks: bool = False
    on_gpu: bool = False
    keeps_kv: bool = True

    @property
    def heap_share(self) -> float:
        """Memory allocated for activations, relative to their bytes."""
        return 1.0 if self.on_gpu else HEAP_SHARE

    def slice_bytes(
        self, relay: Relay, *, reserve_tokens: int = 0, is_sharded: bool = False, drop: PlannedDrop | None = None
    ) -> int:
        """Peak bytes of a rank for a prompt of a chain, in addition to what it held before.

        An upper bound: a rank that does not keep all layers is assumed to hold the maximum number at a time. With
        `is_sharded` every rank keeps only its own tokens; with a `drop` the decode rank holds the retained tokens, and
        a few whole layers.
        """
        is_decode_rank, (start, stop) = relay.is_last and self.keeps_kv, relay.own
        is_alone = relay.partition.size == 1 and not self.shape.has_states
        layers = sorted((layer.elements for layer in self.shape.layers), reverse=True)
        reserved = reserve_tokens if is_decode_rank else 0
        computed = stop - start
        kept = (computed + reserved) * sum(layers) if is_sharded else 0
        if is_sharded or not is_decode_rank:
            layers = layers[: 1 if is_alone else LAYERS_HELD + 1 + LAYERS_AHEAD]
        tokens = stop + (0 if is_sharded else reserved)
        activation_bytes = self.activation_bytes(computed, max(end - first for first, end in relay.chunks))
        if drop is not None and is_decode_rank and drop.repeated_tokens:
            activation_bytes = max(activation_bytes, self.activation_bytes(drop.repeated_tokens))
        needs = (tokens * sum(layers) + kept) * self.shape.dtype_bytes + activation_bytes
        if is_sharded or not is_decode_rank:
            return needs
        ahead = 0 if is_alone else LAYERS_AHEAD if drop is None else FEW_AHEAD
        late = drop.late_layers if drop is not None and self.on_gpu else 0
        in_flight = min(len(layers), 1 + ahead + late) * layers[0]
        if drop is None and not self.on_gpu:  # the last layers' stores replace buffers, which no layer needs any more
            in_flight = layers[0] + ahead * (layers[0] - layers[-1])
        needs += in_flight * stop * self.shape.dtype_bytes
        if drop is None:
            return needs
        return needs - (0 if drop.is_late else drop.kv_bytes) + int(self.heap_share * drop.choosing_bytes)

    def rolling_bytes(self, rolling: Rolling) -> int:
        """Peak bytes of a prompt with a rolling cache, independent of its length."""
        held = rolling.cache_tokens + rolling.step_tokens
        return rolling.kv_bytes(self.shape) + self.activation_bytes(held)

    def activation_bytes(self, tokens: int, chunk_tokens: int | None = None) -> int:
        """Bytes of one layer's activations, interpolated between measured numbers of tokens.

        Without chunks, powers of two are measured. With chunks, two multiples of the chunk are measured: the part for
        the whole slice grows linearly, and the part for a chunk is constant.
        """
        if chunk_tokens is not None and chunk_tokens < tokens:
            below, every, step = 2 * chunk_tokens, chunk_tokens, 2 * chunk_tokens
        else:
            every, below = None, max(1, 1 << (tokens.bit_length() - 1))
            step = below
        low, high = self.activations(below, every), self.activations(below + step, every)
        return int(self.heap_share * (low + (high - low) * (tokens - below) / step))


def footprint_of(
    config: Any,
    dtype: torch.dtype,
    *,
    shape: ModelShape | None = None,
    on_gpu: bool = False,
    in_parts: bool = True,
) -> Footprint:
    """Prepare the prediction for a model configuration; needs no weights.

    shape : found by `probe_shape` if it is not given.
    on_gpu : add nothing for memory that the allocator keeps.
    in_parts : replace the model's attention if the configuration allows it; otherwise its own attention makes masks.

    Raises `ModelError` if the model cannot run as a chain.
    """
    shape = shape or probe_shape(config, dtype)
    # Grouped experts have a meta kernel for bfloat16 only; their activations are counted in that and scaled.
    has_experts = any("expert" in key for key in config.get_text_config().to_dict())
    counted = torch.bfloat16 if has_experts else dtype
    model = meta_model(config, counted)
    in_parts = in_parts and shape.why_whole is None
    try:
        prepare_model(model, chain=True, in_parts=in_parts)
    except ModelError:
        in_parts = False
        prepare_model(model, chain=True, in_parts=False)
    meta = torch.device("meta")
    loaded = LoadedModel(model, None, shape, "", "", counted, meta, attends_in_parts=in_parts)
    layers = min(LAYERS, len(shape.layers))

    def count(before: int, tokens: int, chunk_tokens: int | None) -> int:
        partition = Partition((0, before, before + tokens))
        ids = shape.sample_ids(partition.tokens)
        with on_meta(), _Ledger([*model.parameters(), *model.buffers()]) as ledger:
            prefill_kvr(loaded, ids, partition, PretendedChain(), stop_after=layers, chunk_tokens=chunk_tokens)
        return int(ledger.peak_bytes) * shape.dtype_bytes // counted.itemsize

    @functools.cache
    def activations(tokens: int, chunk_tokens: int | None) -> int:
        try:
            return count(tokens, tokens, chunk_tokens)
        except (RuntimeError, IndexError):  # tables of positions and masks end at the longest prompt
            if (longest := shape.max_tokens) is None or 2 * tokens <= longest or longest < 2:
                raise
        most = min(tokens, longest - 1)
        found = count(min(tokens, longest - most), most, chunk_tokens)
        return found if chunk_tokens is not None else -(-found * tokens // most)

    try:
        activations(1, None)
    except (RuntimeError, NotImplementedError):  # an operation without a meta kernel: only buffers are counted
        return Footprint(shape, lambda tokens, chunk_tokens: 0, on_gpu=on_gpu)
    return Footprint(shape, activations, why_no_chunks(loaded) is None, on_gpu)


def choose_chunks(
    asked: int | Literal["auto"],
    footprint: Footprint | None,
    fits: Callable[[int | None], bool],
) -> int | None:
    """Choose the chunk size of a prompt's slices; None for whole slices.

    asked : the job's setting; auto: whole slices if the prompt fits, else the largest of `CHUNK_SIZES` with which it
        fits.
    fits : whether the prompt fits with chunks of a size, or (None) with whole slices, on otherwise empty ranks: a
        prompt's chunks must not depend on other prompts.
    """
    if footprint is None:
        return None
    if asked != "auto":
        return asked
    if not footprint.takes_chunks or fits(None):
        return None
    return next((size for size in CHUNK_SIZES if fits(size)), None)


def check_fits(
    footprint: Footprint,
    partition: Partition,
    free_bytes: Sequence[int],
    reserve_tokens: int,
    *,
    chunk_tokens: int | None = None,
    is_sharded: bool = False,
    drop: PlannedDrop | None = None,
) -> None:
    """Check that a prompt fits into memory before it starts; the result is the same on every rank.

    free_bytes : bytes each rank of the chain has left for prompts, in the order of their slices.
    chunk_tokens : slices are computed in chunks of this many tokens; None: at once.
    is_sharded : every rank keeps only its own tokens.
    drop : what compression drops on the last rank.

    Raises `DocumentError` if it does not fit; the message says how many ranks would be enough, if any number would.
    """
    size, tokens = len(free_bytes), partition.tokens

    def needed(cut: Partition, rank: int) -> int:
        relay = Relay(cut, rank, chunk_tokens=chunk_tokens)
        return footprint.slice_bytes(relay, reserve_tokens=reserve_tokens, is_sharded=is_sharded, drop=drop)

    needs = [needed(partition, rank) for rank in range(size)]
    short = [rank for rank, (need, free) in enumerate(zip(needs, free_bytes, strict=True)) if need > free]
    if not short:
        return
    rank, enough = short[-1], ranks_that_fit(needed, tokens, min(free_bytes))
    advice = f"{enough} ranks would be enough" if enough else "more ranks would not help"
    if not enough and drop is not None:
        advice += ", since the last one keeps all that compression does not drop"
    elif not enough and not is_sharded and footprint.keeps_kv:
        advice += ", since the last one keeps them all (unless output.kv = 'sharded')"
    raise DocumentError(
        f"a prompt of {tokens} tokens does not fit: rank {rank} of {size} needs {needs[rank] / GIB:.2f} GiB in "
        f"addition to the weights, but has {free_bytes[rank] / GIB:.2f} GiB; its keys and values alone take "
        f"{tokens * footprint.shape.kv_bytes_per_token / GIB:.2f} GiB; {advice}"
    )


def ranks_that_fit(needed: Callable[[Partition, int], int], tokens: int, free: int) -> int | None:
    """Return the smallest number of ranks for which even slices fit into `free` bytes each; None if there is none.

    needed : bytes that a rank needs for a partition.
    """
    size = 1
    while size <= min(tokens, MOST_RANKS):
        partition = Partition.even(tokens, size)
        # The ranks in between need no more than the last but one.
        if all(needed(partition, rank) <= free for rank in {0, max(0, size - 2), size - 1}):
            return size
        size = size + 1 if size < 16 else size + size // 8
    return None
