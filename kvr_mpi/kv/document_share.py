"""What a rank holds of a stored document that stays spread over the ranks of a chain: read once, for all that is asked.

Prompts that go on from the document attend to these rows and hold only what follows it (``shares``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvr_mpi.errors import DataError
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.kv.layout import Slab
from kvr_mpi.kv.loading import LoadedLayers
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.model import LayerShape, LoadedModel
from kvr_mpi.model.masks import Visibility


@dataclass(frozen=True, slots=True, eq=False)
class ShareLayer:
    """One layer's keys and values of the tokens from `first` on."""

    layout: Slab | HeadStore
    shape: LayerShape
    first: int

    def rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a range of tokens, by their positions, as views (1, kv_heads, tokens, head_dim)."""
        return self.layout.rows(first - self.first, last - self.first)

    def write(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put in keys and values (1, kv_heads, tokens, head_dim) from a position on."""
        self.layout.write(first - self.first, keys, values)

    def by_heads(self, stop: int) -> ShareLayer:
        """Lay what is held up to a position by heads, in the same memory: a CPU attends to it faster."""
        if isinstance(self.layout, HeadStore):
            return self
        return replace(self, layout=HeadStore.laid_anew(self.layout, self.shape, stop - self.first))


@dataclass(frozen=True, slots=True)
class ShareBounds:
    """Which tokens of something a rank holds.

    start, stop : those that are this rank's.
    is_last : it has the last ones, and what follows them.
    longest : most tokens there may come to be, all ranks' together.
    """

    start: int
    stop: int
    is_last: bool
    longest: int

    def first_row(self, seen: Visibility) -> int:
        """Position of the first token that is held of a layer.

        If its later tokens do not see all, the last share has what they see, since no other has anything to add.
        """
        if not self.is_last or seen.sees_all(self.longest):
            return self.start
        return min(self.start, seen.first_key(self.stop))

    def elements(self, layers: tuple[LayerShape, ...]) -> int:
        """Elements of all layers' rows up to `stop`."""
        return sum((self.stop - self.first_row(layer.visibility)) * layer.elements for layer in layers)


class DocumentShare:
    """The rows of a stored document that one rank holds, each layer's read when it is first come to.

    Parameters
    ----------
    loaded : LoadedModel
    prefix : SharedPrefix
        The document, with `read`.
    bounds : ShareBounds

    Attributes
    ----------
    tokens : int
        Of the whole document, on all ranks.
    failure : str or None
        Why something could not be read: what is computed has no meaning. That does not stop this rank, since the others
        would wait for it.
    """

    def __init__(self, loaded: LoadedModel, prefix: SharedPrefix, bounds: ShareBounds) -> None:
        self.prefix, self.bounds, self.tokens = prefix, bounds, prefix.tokens
        self.layers: list[ShareLayer | None] = [None] * len(loaded.shape.layers)
        self.failure: str | None = None
        self._shapes, self._dtype, self._device = loaded.shape.layers, loaded.dtype, loaded.device
        self._loading: LoadedLayers | None = LoadedLayers(len(self._shapes), self._read, loaded.device)

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return sum(layer.layout.nbytes for layer in self.layers if layer is not None)

    def load(self, layer_idx: int) -> None:
        """Make sure that a layer is here; those after it are read meanwhile."""
        shape = self._shapes[layer_idx]
        if self.layers[layer_idx] is not None or not shape.elements:
            return
        first = self.bounds.first_row(shape.visibility)
        rows = None if self.failure is not None else self._wait_for(layer_idx, self.bounds.stop - first)
        if rows is None:  # it failed: what is in them is not defined
            rows = torch.empty(self.bounds.stop - first, shape.elements, dtype=self._dtype)
        layout = Slab(rows.to(self._device, non_blocking=True), shape)
        self.layers[layer_idx] = ShareLayer(layout, shape, first)

    def end_loading(self) -> None:
        """Let go of the file; all layers are here."""
        self._loading = None

    def give_up(self, failure: str) -> None:
        """Let go of the file, since some rank could not read its share."""
        self.failure, self._loading = failure, None

    def lay_by_heads(self) -> None:
        """Let a CPU attend faster."""
        self.layers = [None if layer is None else layer.by_heads(self.bounds.stop) for layer in self.layers]

    def _wait_for(self, layer_idx: int, tokens: int) -> torch.Tensor | None:
        """Return so many rows of a layer; None, and the failure, if they cannot be had."""
        assert self._loading is not None, "it is not complete before all layers were come to"
        try:
            rows = self._loading[layer_idx]
        except DataError as error:
            self.failure = str(error)
            return None
        if rows is None or len(rows) != tokens:
            found = 0 if rows is None else len(rows)
            self.failure = f"layer {layer_idx} has keys and values of {found} tokens, expected {tokens}"
            return None
        return rows

    def _read(self, number: int) -> torch.Tensor | None:
        assert self.prefix.read is not None, "it is stored"
        return self.prefix.read(number, self.bounds.first_row(self._shapes[number].visibility), self.bounds.stop)
