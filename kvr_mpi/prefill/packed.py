"""Several documents in one row of tokens: the model reads its weights once for all of them.

A packed row (1, tokens) holds some tokens of each document, one document behind the other, each with its own
positions. A `PackedCache` takes every layer's keys and values apart again and gives each document's to its own
`SliceCache`, which attends as if it were alone. Used for short prompts, and for one token each of many answers.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvr_mpi.errors import ModelError
from kvr_mpi.model import LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.attention import Scores, attend, attend_documents, takes_varlen
from kvr_mpi.prefill.cache import SliceCache, SliceLayer
from kvr_mpi.prefill.exchange import Relay
from kvr_mpi.prefill.failure import is_out_of_memory
from kvr_mpi.prefill.prefix import SharedPrefix
from kvr_mpi.prefill.seam import run_model, run_packed
from kvr_mpi.prefill.strategies import Prefill, prefill_kvr
from kvr_mpi.transport.local import LocalTransport

# Rotary embeddings of these kinds are scaled by the farthest position of the row, which is a neighbour's perhaps.
ROPE_OF_THE_ROW = {"dynamic", "longrope"}


class PackedLayer(CacheLayerMixin):
    """One layer of all documents of a packed row."""

    is_sliding = False

    def __init__(self, cache: PackedCache, layer_idx: int, documents: Sequence[SliceLayer]) -> None:
        super().__init__()
        self.cache = cast("PackedCache", weakref.proxy(cache))  # see `SliceLayer`
        self.layer_idx, self.documents = layer_idx, documents
        self.attended = True
        # Views of whole buffers, (kv_heads, capacity, head_dim): narrowing these is all there is to do for a token.
        self._whole = [layer.rows(0, layer.cache.capacity) for layer in documents] if cache.decodes else []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append each document's tokens of (1, kv_heads, tokens, head_dim) to its own buffer."""
        cache = self.cache
        cache.enter(self)
        if not cache.decodes:
            for layer, (first, last) in zip(self.documents, cache.bounds, strict=True):
                layer.update(key_states[:, :, first:last], value_states[:, :, first:last])
            return key_states, value_states
        places = [
            whole.select(2, length) for pair, length in zip(self._whole, cache.lengths, strict=True) for whole in pair
        ]
        tokens = zip(key_states.unbind(2), value_states.unbind(2), strict=True)
        torch._foreach_copy_(places, list(itertools.chain.from_iterable(tokens)))
        for layer, length in zip(self.documents, cache.lengths, strict=True):
            layer.length = length + 1
        return key_states, value_states

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scores: Scores,
        window: int | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from each document's tokens to those before them.

        Returns
        -------
        torch.Tensor
            (1, heads, tokens, value_dim) in the query's dtype.
        """
        cache, self.attended = self.cache, True
        if cache.decodes:
            return self._attend_tokens(query, scores, window, sinks)
        if takes_varlen(query, values, scores) and all(layer.cache.prefix is None for layer in self.documents):
            for layer in self.documents:
                layer.attended = True
            part = attend_documents(query, keys, values, scores, cache.edges, cache.longest, window)
            return (part if sinks is None else part.with_sinks(sinks)).out.to(query.dtype)
        outs = [
            layer.attend(
                query[:, :, first:last], keys[:, :, first:last], values[:, :, first:last], scores, window, sinks
            )
            for layer, (first, last) in zip(self.documents, cache.bounds, strict=True)
        ]
        return torch.cat(outs, dim=2)

    def _attend_tokens(
        self, query: torch.Tensor, scores: Scores, window: int | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend from one token of each document: what `SliceLayer.attend` does, without its detours."""
        tokens = query.chunk(len(self.documents), dim=2)  # of one document it may be folded, and stays whole
        outs = []
        for token, (keys, values), before in zip(tokens, self._whole, self.cache.lengths, strict=True):
            length = before + 1
            low = 0 if window is None or length <= window else length - window
            part = attend(token, keys.narrow(2, low, length - low), values.narrow(2, low, length - low), scores)
            outs.append((part if sinks is None else part.with_sinks(sinks)).out)
        return torch.cat(outs, dim=2).to(query.dtype)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the documents have their buffers."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys a query sees; no mask is made of them."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Nothing that could be said of all documents: models are given every token's position."""
        return 0

    def get_max_length(self) -> int:
        """Most tokens any of the buffers holds."""
        return max(layer.cache.capacity for layer in self.documents)


class PackedCache(Cache):
    """The caches of several documents, seen by the model as one.

    Parameters
    ----------
    documents : sequence of SliceCache
        Each that of a keeper: prompts that begin, or answers that go on.
    tokens : sequence of int
        How many tokens of each document a row holds; one of each if answers go on.
    """

    cuts_last_layer = False

    def __init__(self, documents: Sequence[SliceCache], tokens: Sequence[int]) -> None:
        self.documents = documents
        stops = list(itertools.accumulate(tokens))
        self.bounds = list(zip([0, *stops], stops, strict=False))
        self.edges = torch.tensor([0, *stops], dtype=torch.int32, device=documents[0].device)
        self.longest = max(tokens)
        self.decodes = not any(document.prefilling for document in documents)
        assert not self.decodes or all(count == 1 for count in tokens), "one token of each answer at a time"
        self.lengths = [0] * len(documents)  # of the documents, before this row
        self.current: PackedLayer | None = None
        count = len(documents[0].layers)
        layers = [PackedLayer(self, idx, [document.layers[idx] for document in documents]) for idx in range(count)]
        super().__init__(layers=layers)
        self.take_up()

    @property
    def attending(self) -> PackedLayer:
        """The layer that was updated and has not attended yet."""
        if self.current is None or self.current.attended:
            raise ModelError("a layer attends without having updated the cache")
        return self.current

    def take_up(self) -> list[int]:
        """Note how long the documents are before the next row, and tell."""
        self.current = None
        self.lengths = [document.layers[0].get_seq_length() for document in self.documents]
        return self.lengths

    def take_back(self) -> None:
        """Forget the row that failed on its way through the layers."""
        self.current = None
        for document, length in zip(self.documents, self.lengths, strict=True):
            step_back(document, length)

    def enter(self, layer: PackedLayer) -> None:
        """Let a layer be the one that attends next."""
        if self.current is not None and not self.current.attended:
            raise ModelError(f"layer {layer.layer_idx}: the layer before it never attended to its keys")
        self.current, layer.attended, layer.is_initialized = layer, False, True


def prefill_packed(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    reserve_tokens: int = 0,
    prefix: SharedPrefix | None = None,
) -> list[Prefill]:
    """Prefill several short prompts in one forward pass, each exactly as if alone (`prefill_kvr` on one rank).

    If there is no memory for all of them it goes on in halves; one that does not fit alone has its `Prefill.error`.

    Parameters
    ----------
    prompts : sequence of sequences of int
        At least one, none of them empty.
    reserve_tokens : int
        Room for tokens to be decoded behind each.
    prefix : SharedPrefix or None
        What all of them begin with, if it has been computed; the prompts still contain it.

    Returns
    -------
    list of Prefill
        In the prompts' order, each with its own cache. Every one took as long as all of its forward pass.
    """
    if len(prompts) == 1 or _rope_of_the_row(loaded):
        options: dict[str, Any] = {"reserve_tokens": reserve_tokens, "prefix": prefix, "spares_chain": True}
        return [prefill_kvr(loaded, ids, Partition((0, len(ids))), LocalTransport(), **options) for ids in prompts]
    try:
        return _prefill_row(loaded, prompts, reserve_tokens, prefix)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Out of the except block: the error held on to what the failed pass had made.
    if loaded.device.type == "cuda":
        torch.cuda.empty_cache()
    half = len(prompts) // 2
    return [
        prefill
        for some in (prompts[:half], prompts[half:])
        for prefill in prefill_packed(loaded, some, reserve_tokens=reserve_tokens, prefix=prefix)
    ]


@torch.inference_mode()
def _prefill_row(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], reserve_tokens: int, prefix: SharedPrefix | None
) -> list[Prefill]:
    began, start = time.perf_counter(), 0 if prefix is None else prefix.tokens
    partitions, caches = [Partition((0, len(ids))) for ids in prompts], []
    for ids, partition in zip(prompts, partitions, strict=True):
        if prefix is not None:
            prefix.check(ids)
        cache = SliceCache(
            loaded.shape,
            Relay(partition, 0, start),
            None,
            dtype=loaded.dtype,
            device=loaded.device,
            reserve_tokens=reserve_tokens,
            prefix=prefix,
        )
        caches.append(cache)
    device = loaded.device
    packed = PackedCache(caches, [len(ids) - start for ids in prompts])
    row = torch.tensor([[token for ids in prompts for token in ids[start:]]], device=device)
    positions = torch.cat([torch.arange(start, len(ids), device=device) for ids in prompts]).unsqueeze(0)
    last_rows = torch.tensor([last - 1 for _, last in packed.bounds], device=device)
    logits = run_packed(loaded.model, row, positions, packed, last_rows)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    for cache in caches:
        cache.finish()
    return [
        Prefill(partition, cache, each.clone(), seconds)
        for partition, cache, each in zip(partitions, caches, logits, strict=True)
    ]


def step_back(cache: SliceCache, length: int) -> None:
    """Shorten a cache to its first `length` tokens, if need be in the middle of a layer."""
    cache.current = None
    for layer in cache.layers:
        layer.length = length


@torch.inference_mode()
def decode_packed(loaded: LoadedModel, cache: PackedCache, tokens: Sequence[int]) -> torch.Tensor:
    """Run one more token of each document.

    Returns
    -------
    torch.Tensor
        Logits behind them (documents, vocab_size), float32.

    Raises
    ------
    Exception
        Whatever the model raises; the documents are then as they were before.
    """
    device = loaded.device
    positions = cache.take_up()
    full = [length for length, document in zip(positions, cache.documents, strict=True) if length >= document.capacity]
    if full:
        raise ValueError(f"a cache of {full[0]} tokens is full; reserve room for the tokens to be decoded")
    try:
        return run_packed(
            loaded.model,
            torch.tensor([list(tokens)], device=device),
            torch.tensor([positions], device=device),
            cache,
            torch.arange(len(tokens), device=device),
        )
    except BaseException:
        cache.take_back()
        raise


def _rope_of_the_row(loaded: LoadedModel) -> str:
    """Name the kind of rotary embedding that does not let a document be itself in a row; else the empty string."""
    parameters = getattr(loaded.model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = {str(each.get("rope_type")) for each in [parameters, *parameters.values()] if isinstance(each, dict)}
    return ", ".join(sorted(kinds & ROPE_OF_THE_ROW))


def why_not_packed(loaded: LoadedModel) -> str | None:
    """Try two small documents together and alone: say why this model cannot run packed, None if it can.

    The model has to be prepared for chains (`prepare_model`).
    """
    kind = _rope_of_the_row(loaded)
    if kind:
        return f"its rotary embedding ({kind}) depends on the longest document of a row"
    prompts = [[(37 * at + 11 * (many + 1)) % loaded.shape.vocab_size for at in range(many)] for many in (7, 4)]
    device = loaded.device
    try:
        alone = [
            prefill_kvr(loaded, ids, Partition((0, len(ids))), LocalTransport(), reserve_tokens=1) for ids in prompts
        ]
        together = prefill_packed(loaded, prompts, reserve_tokens=1)
        truths, founds = [each.logits for each in alone], [each.logits for each in together]
        with torch.inference_mode():
            truths += [run_model(loaded.model, torch.tensor([[5]], device=device), each.cache) for each in alone]
        founds += list(decode_packed(loaded, PackedCache([each.cache for each in together], [1, 1]), [5, 5]))
    except (ModelError, ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        return f"{loaded.shape.architecture} does not run packed ({type(error).__name__}: {error})"
    # Room for the rounding of the dtype; a wrong position or neighbour is off by a large part of the spread.
    allowed = {torch.float32: 1e-3, torch.float16: 2e-2}.get(loaded.dtype, 1e-1)
    for truth, found in zip(truths, founds, strict=True):
        assert truth is not None and found is not None
        error_share = float((found - truth).abs().max()) / max(float(truth.max() - truth.min()), 1e-6)
        if not error_share <= allowed:
            return (
                f"{loaded.shape.architecture}: two small documents together differ from each alone by "
                f"{error_share:.1e} of the logits' spread (allowed {allowed:.0e})"
            )
    return None
