"""The cache of one rank's slice of a prompt as the model sees it: keys, values and states of all layers.

``layer`` and ``states`` hold the contents of a layer. In this package only ``row`` and ``states`` import transformers'
cache classes. No model code is changed, and the model is not aware of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from kvr_mpi.kv.arena import Arena
from kvr_mpi.kv.buffers import LayerBuffers
from kvr_mpi.kv.clock import Clock
from kvr_mpi.kv.head_store import HeadStore, Pair, check_retained
from kvr_mpi.kv.layer import Retain, SliceLayer
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.kv.route import Route
from kvr_mpi.kv.row import RowCache
from kvr_mpi.kv.shares import Share
from kvr_mpi.kv.states import StateLayer
from kvr_mpi.kv.transfers import PromptTransfers
from kvr_mpi.model import LoadedModel

# Takes a layer's keys and values, each (tokens, kv_heads, head_dim); None if it has none.
WriteLayer = Callable[[tuple[torch.Tensor, torch.Tensor] | None], None]
# Layers with unfinished sends that a rank holds before it waits for the sends.
LAYERS_HELD = 8
# Layers whose receives are posted ahead of the computing one.
LAYERS_AHEAD = 2
# Fewer where a pending receive occupies part of a GPU, or the decode rank compresses each layer when it is complete.
FEW_AHEAD = 1


class SliceCache(RowCache):
    """The cache of one rank's slice; on the decode rank, of the whole prompt and then the answer.

    route : what the strategy does on this rank.
    transfers : the prompt's transfers on this rank; None if the chain has only this rank.
    prefix : keys and values of the first tokens, if they have been computed already.
    reserve_tokens : room for decoded tokens on the decode rank.
    stop_after : leave the model after this many layers (for timing a few of them).
    is_spread : sharded KV: every rank keeps its own tokens, in `share`, and no rank keeps all.
    retain : what compression keeps of each layer, once the decode rank has attended in that layer. The rest is dropped,
        so this rank never holds all layers uncompressed. All heads keep the tokens decoded later.
    arena : page pool for the stores of the rank that ends with all keys and values; None: separate memory.
    write_layer : called for each complete layer with the keys and values of this rank's own tokens.
    cuts_last_layer : the last layer processes the last token as a separate chunk, the only one that attends
        (``layer_chunks``).
    is_alone : no other rank takes part. A layer's buffer is allocated only after the layer before it is complete.
    shared_tokens : tokens of the prefix whose keys and values this cache references instead of copying.
    last : the last layer that keeps anything; later layers work token by token.
    left_after : this rank leaves the model after computing this layer's keys and values.
    """

    prefilling = True

    def __init__(
        self,
        loaded: LoadedModel,
        route: Route,
        transfers: PromptTransfers | None,
        *,
        reserve_tokens: int = 0,
        prefix: SharedPrefix | None = None,
        stop_after: int | None = None,
        is_spread: bool = False,
        retain: Retain | None = None,
        arena: Arena | None = None,
        write_layer: WriteLayer | None = None,
    ) -> None:
        shape = loaded.shape
        self.route, self.transfers, self.prefix = route, transfers, prefix
        self.dtype, self.device = loaded.dtype, loaded.device
        self.is_decode_rank = transfers is None or route.position == route.decode_position
        keep = retain if retain is not None and self.is_decode_rank else Retain(None)
        self.window, self._choose, self._late_layers = keep.window, keep.choose, keep.late_layers
        if self.window is not None:  # otherwise what compression keeps would depend on the partition
            (first, last), window = route.owned[-1], self.window
            if not first <= window[0] < window[1] <= last:
                raise ValueError(f"the observation window, tokens {window}, is not in the last slice, {first, last}")
        self._reserve_tokens = reserve_tokens
        (self.start, end), self.prompt_tokens = route.owned[0], route.partition.tokens
        self.share: Share | None = None
        if is_spread:
            first = 0 if prefix is not None and self.start == prefix.tokens else self.start  # with those of the prefix
            self.share = Share(loaded, first, end, self.prompt_tokens, self.prompt_tokens + reserve_tokens)
        self.keeps_all = self.is_decode_rank and self.share is None
        self.capacity = route.capacity + (reserve_tokens if self.keeps_all else 0)
        self.in_parts = loaded.attends_in_parts
        self.clock = Clock(self.device) if transfers is None else transfers.clock
        self._write_layer = write_layer
        self._held: list[Any] = []
        self._chosen: list[tuple[SliceLayer, Iterable[torch.Tensor] | None]] = []  # complete layers, to be admitted
        self._begun, self._posted = -1, 0
        self.is_alone = transfers is None and not shape.has_states  # models read states before keys
        in_streams = transfers is not None and transfers.forwarder.transport.in_streams
        self._layers_ahead = FEW_AHEAD if in_streams or self._choose is not None else LAYERS_AHEAD
        if self.is_alone:
            self._layers_ahead = 0
        layers = [
            StateLayer(self, idx, layer) if layer.states else SliceLayer(self, idx, layer)
            for idx, layer in enumerate(shape.layers)
        ]
        kept = [idx for idx, layer in enumerate(shape.layers) if layer.elements or layer.states]
        self.last = kept[-1]
        stop = next((idx for idx in kept if stop_after is not None and idx + 1 >= stop_after), None)
        is_read = self.is_decode_rank or not route.saves_last_layer
        self.left_after = self.last if stop is None and not is_read else stop
        self.cuts_last_layer = loaded.cuts_last_layer and self.in_parts and not shape.layers[self.last].states
        super().__init__(layers)
        self.arena = arena if self.keeps_all else None
        self.shared_tokens = prefix.shared_tokens(self.arena) if prefix is not None and self.in_parts else 0
        elements = max(layer.elements for layer in shape.layers)
        self.buffers = LayerBuffers(elements, route.capacity - self.shared_tokens, self.dtype, self.device)
        if arena is not None:
            arena.collect()

    def begin(self) -> None:
        """Post the receives of the first layers before anything is computed."""
        if self.cuts_last_layer and self.is_decode_rank and self.route.saves_last_layer:  # the last token alone
            *before, (*ranges, (first, last)) = self.route.chunks
            rest = [*ranges, (first, last - 1)] if last - first > 1 else ranges
            self.layers[self.last].chunks = [*before, *([rest] if rest else []), [(last - 1, last)]]
        self._posted = self._layers_ahead
        for layer in self.layers[: self._posted]:
            layer.post()

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """Return the tokens to run and the length of the whole prompt, including the slices of later ranks."""
        return [(tokens, self.prompt_tokens if self.prefilling else self.length + tokens)]

    def advance(self, layer_idx: int) -> None:
        """Begin a layer: finish those before it, release the ones that are sent, and post receives.

        Beginning the layer after the last one finishes all layers.
        """
        if layer_idx <= self._begun:
            return
        is_end, through = layer_idx == len(self.layers), self.layers[max(self._begun, 0) : layer_idx]
        if not is_end:
            self.clock.mark("layer", layer_idx - self._begun)  # those without keys begin with the next that has them
        self._begun = layer_idx
        for layer in through:
            if layer.shape.states:
                layer.send_states()
            if self.share is not None:
                self.share.take(layer)
            if self._write_layer is not None:
                bounds = self.route.partition.bounds[self.route.position :][:2]
                self._write_layer(layer.store.rows_by_token(*bounds) if layer.shape.elements else None)
            if self.keeps_all and layer.shape.elements and layer.has_all_chunks:
                chosen = None
                if self._choose is not None:
                    chosen, layer.observed = self._choose(layer), None
                self._chosen.append((layer, chosen))
        while len(self._chosen) > (0 if is_end else self._late_layers):
            layer, chosen = self._chosen.pop(0)
            kept = None if chosen is None else list(chosen)
            if kept is not None:
                check_retained(kept, layer.shape, layer.layer_idx)
            self.admit(layer, kept, self._reserve_tokens)
        if is_end:
            return
        for layer in self.layers[self._posted : layer_idx + 1 + self._layers_ahead]:
            layer.post()
        self._posted = max(self._posted, layer_idx + 1 + self._layers_ahead)
        if not self.keeps_all:
            self._held += through
            while self._held and self._held[0].release(wait=len(self._held) > LAYERS_HELD):
                self._held.pop(0)

    def finish(self) -> None:
        """End the prefill, so that decoding can begin; unfinished sends continue in the background."""
        if self._begun >= 0:
            self.advance(len(self.layers))
        self.buffers.clear()
        if not self.keeps_all:
            for layer in self.layers:
                layer.let_go()
        self.prefilling = False

    @property
    def length(self) -> int:
        """Tokens held in layers that keep keys and values; 0 if no layer does."""
        return next((int(layer.length) for layer in self.layers if layer.shape.elements), 0)

    @property
    def is_ragged(self) -> bool:
        """Whether in some layer each head keeps different tokens."""
        return any(layer.is_ragged for layer in self.layers)

    @property
    def held_bytes(self) -> int:
        """Bytes of keys and values, including the room reserved for further tokens."""
        return sum(store.nbytes for store in self.stores)

    @property
    def stores(self) -> list[HeadStore]:
        """Keys and values of the layers that hold any now."""
        return [layer.store for layer in self.layers if layer.store is not None]

    def admit(self, layer: SliceLayer, kept: Sequence[torch.Tensor] | None, slack: int) -> None:
        """Move the tokens that each head keeps (None: all) to the decode store, and release the layer's buffer.

        Transfers need rows by token; in the store they are by head, which decoding on CPUs reads twice as fast.
        """
        before, shape, length, own = layer.store, layer.shape, layer.length, (self.dtype, self.device, self.arena)
        assert before is not None, "the buffer was filled"
        if layer.segments is not None:
            layer.segments.is_through(wait=True)
        if kept is None:
            counts, start, shared = [length - before.start] * shape.num_kv_heads, before.start, before.shared
            store = HeadStore.reserve(shape, counts, slack, length, *own, start=start, shared=shared, is_whole=True)
            store.write(store.start, *before.rows(store.start, length))
        else:
            store = HeadStore.reserve(shape, list(map(len, kept)), slack, length, *own)
            store.positions = [positions.to(torch.int32) for positions in kept]
            keys, values = (each[0].unbind(0) for each in before.rows(0, length))
            store.fill(zip(keys, values, strict=True), kept)
        layer.store, layer.segments = store, None  # the segments reference the buffer, too
        self.reuse(before)

    def reuse(self, store: HeadStore) -> None:
        """Give a complete layer's buffer to later layers; if none needs it, it is freed with the last view of it.

        Buffers are not reused if the model attends by itself: its later layers may share keys and values of this one.
        """
        if store.buffer is not None and self.in_parts and self._posted < len(self.layers):
            self.buffers.give_back(store.buffer)

    def adopt(self, stores: Sequence[HeadStore], length: int, slack: int) -> None:
        """Take over the rows of a document of `length` tokens, or of some of its heads, prefilled elsewhere."""
        assert not self.prefilling
        for layer, store in zip(self.layers, stores, strict=True):
            layer.store, layer.length = store, length
        self.capacity = length + slack

    def note_states(self) -> None:
        """Save the recurrent states, since a failed step may leave them partly updated."""
        for layer in self.layers:
            if layer.shape.states:
                layer.note_states()

    def step_back(self, length: int) -> None:
        """Truncate to the first `length` tokens, even if a step failed between layers, and restore the saved states."""
        self.current = None
        for layer in self.layers:
            layer.length = length
            if layer.shape.states:
                layer.restore_states()


def layer_kv(cache: Any, layer_idx: int, first: int = 0) -> Pair | None:
    """Return keys and values of one layer of a cache, each (tokens, kv_heads, head_dim), or None if it has none.

    From a `SliceCache`, only tokens from `first` on are returned. A layer with a window or chunks may hold only its
    last tokens. If heads keep different tokens, the tensors are (rows, 1, head_dim), head after head
    (`SliceLayer.positions`).
    """
    layer = cache.layers[layer_idx]
    if getattr(layer, "is_ragged", False):
        heads = [layer.store.head_rows(head, layer.length) for head in range(layer.shape.num_kv_heads)]
        keys, values = (torch.cat(each).unsqueeze(1) for each in zip(*heads, strict=True))
        return keys, values
    if isinstance(layer, SliceLayer):
        if not layer.shape.elements:
            return None
        assert layer.store is not None, "this rank holds keys and values"
        return layer.store.rows_by_token(max(first, cache.route.first_held(layer.shape.visibility)), layer.length)
    held: tuple[Any, Any] = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not all(isinstance(tensor, torch.Tensor) and tensor.ndim == 4 for tensor in held):
        return None
    return held[0][0].transpose(0, 1), held[1][0].transpose(0, 1)
