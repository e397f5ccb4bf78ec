"""A prefix that several prompts share: its keys and values are computed or loaded once per rank, and never sent."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch

from kvr_mpi.kv.arena import PAGE_ROWS, Arena
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.kv.loading import LoadedLayers
from kvr_mpi.model import LayerShape

# Reads each KV head's keys and values (tokens, dim) of a layer; None if the layer has none.
ReadHeads = Callable[[int], "Sequence[tuple[torch.Tensor, torch.Tensor]] | None"]
ReadRows = Callable[[int, int, int], "torch.Tensor | None"]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Keys and values of the tokens that several prompts begin with.

    layers : for each layer its `HeadStore`; for a stored prefix its rows (tokens, elements of K and V of all heads),
        read on access; None for layers without keys and values.
    states : recurrent states by layer index, (bytes,), in the format of messages.
    read : of a stored prefix: reads a layer's rows from one token to another; returns None if the layer has none.
    heads : of a compressed prefix: reads a layer's heads, which keep different tokens; `layers` is then empty.
    compression : its compression method and settings.
    in_pages : rows are, or will be once they are read, in pages of the prompts' arena, if there is one.
    source : where it is stored; prefixes with the same source are the same.
    """

    ids: tuple[int, ...]
    layers: Sequence[HeadStore | torch.Tensor | None] | LoadedLayers
    states: Mapping[int, torch.Tensor] = field(default_factory=dict)
    read: ReadRows | None = None
    heads: ReadHeads | None = None
    compression: str = ""
    in_pages: bool = True
    source: Hashable = None
    _stores: WeakValueDictionary[tuple[int, bool], HeadStore] = field(default_factory=WeakValueDictionary)

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return len(self.ids)

    def is_same(self, other: SharedPrefix | None) -> bool:
        """Whether another object is the same prefix, perhaps loaded again."""
        return other is self or (other is not None and self.source is not None and other.source == self.source)

    def shared_tokens(self, arena: Arena | None) -> int:
        """Return how many of its tokens prompts can reference instead of copying, in an arena or (None) outside."""
        if arena is None:
            return self.tokens
        return self.tokens // PAGE_ROWS * PAGE_ROWS if self.in_pages else 0

    def store(self, layer_idx: int, shape: LayerShape, device: torch.device, arena: Arena | None) -> HeadStore | None:
        """Return a layer's keys and values; loaded ones stay in memory while a prompt uses them.

        Raises `DataError` if they cannot be read.
        """
        name = layer_idx, arena is not None  # a rank may hold some prompts in pages, and those of chains outside
        found = self._stores.get(name)
        held = self.layers[layer_idx] if found is None else found
        if isinstance(held, HeadStore) or held is None:
            return held
        store = self._stores[name] = HeadStore.of_rows(held, shape, device, arena)
        return store

    def check(self, ids: Sequence[int]) -> None:
        """Check that a prompt begins with this prefix and continues after it.

        Raises `ValueError` if it does not, since the answer would belong to another prompt.
        """
        if len(ids) <= self.tokens or tuple(ids[: self.tokens]) != self.ids:
            raise ValueError(
                f"a prompt of {len(ids)} tokens does not begin with the shared prefix of {self.tokens} tokens, or "
                "ends with it"
            )
